"""One program of a Gluon kernel in the emulator: partitions, what is in flight, what is counted.

Partitions are threads of which one runs at a time. `Program.point` is called before each operation:
there the seed decides whether something lands, a product reads, or another partition goes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import threading
import types
from dataclasses import dataclass, field

import numpy as np
import torch

from labs._harness import gluon_values
from labs._harness.gluon_memory import Allocation, Descriptor, Shared, overlap
from labs._harness.gluon_values import Deadlock, GluonError, InFlight, Tile

SHARED_LIMIT = 232_448  # bytes of shared memory that a program may have on sm_90
HERE = os.path.dirname(__file__)


@dataclass(frozen=True)
class Event:
    """One thing that a partition did.

    Attributes:
        program: its number on axis 0. partition: its number in the list of warp_specialize.
        what: "load" or "store" by TMA; "product", a warpgroup_mma; "exp2", "where" or "arithmetic"
            on a matrix; "times", a multiplication that is off where the factor is 1; "arrive" or
            "wait" at an mbarrier; "product wait", "store wait".
        amount: bytes, FLOPs, or elements of the matrix; of "times" those that are multiplied.
        loads, products, stores: in flight before it: loads of the program, the others of the
            partition. A store is in flight until a wait for it.
        tensor, place: of a load or store, and the coordinates there.
        registers: of a product: its left operand lies in registers.
    """

    program: int
    partition: int
    what: str
    amount: int
    loads: int
    products: int
    stores: int
    tensor: torch.Tensor | None = field(default=None, compare=False)
    place: tuple[int, ...] = ()
    registers: bool = False


@dataclass
class Work:
    """What the kernels of an `emulate` block have done so far.

    Attributes:
        programs: how many ran. shared: bytes of shared memory of the last one.
        events: what their partitions did, in order.
        written: by address, the memory that they stored to, as bytes: what is there now, and what
            was there when the last launch had ended.
    """

    programs: int = 0
    shared: int = 0
    events: list[Event] = field(default_factory=list)
    written: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, compare=False
    )

    def of(self, *what: str) -> list[Event]:
        return [event for event in self.events if event.what in what]

    def amount(self, what: str) -> int:
        return sum(event.amount for event in self.of(what))

    def is_as_written(self, tensor: torch.Tensor) -> bool:
        """Whether kernels stored to a tensor's memory, and nobody has changed it since."""
        now, then = self.written.get(tensor.untyped_storage().data_ptr(), (None, None))
        return now is not None and torch.equal(now, then)

    @property
    def bytes_loaded(self) -> int:
        """By TMA, whole tiles."""
        return self.amount("load")

    @property
    def bytes_stored(self) -> int:
        """By TMA, whole tiles."""
        return self.amount("store")

    @property
    def flops(self) -> int:
        """Of warpgroup_mma."""
        return self.amount("product")

    @property
    def softmaxes(self) -> int:
        """exp2 of a matrix."""
        return len(self.of("exp2"))

    @property
    def overlapped(self) -> int:
        """Those of them with a product in flight in their partition."""
        return sum(event.products > 0 for event in self.of("exp2"))

    @property
    def masked(self) -> int:
        """gl.where on a matrix."""
        return len(self.of("where"))


@dataclass
class Load:
    """A TMA load in flight."""

    source: Descriptor
    coord: tuple[int, ...]
    barrier: Shared
    target: Shared

    def land(self):
        self.target.memory.data[self.target.places] = self.source.read(self.coord)
        bar = self.barrier.ready()
        bar.bytes -= self.source.nbytes
        bar.settle()


@dataclass
class Store:
    """A TMA store that has not read shared memory yet."""

    target: Descriptor
    coord: tuple[int, ...]
    source: Shared

    def land(self):
        self.target.write(self.coord, self.source.now())


class Product(InFlight):
    """What an asynchronous warpgroup_mma returns: its result, which is not there yet."""

    def __init__(self, a, b, acc, use_acc, line):
        self.a, self.b, self.acc, self.use_acc, self.line = a, b, acc, use_acc, line
        self.layout, self.dtype, self.shape = acc.layout, acc.dtype, acc.shape
        self.result: np.ndarray | None = None
        self.waited = False

    @property
    def type(self):
        return types.SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def describe(self):
        return f"the product of line {self.line} is in flight"

    def compute(self):
        if self.result is not None:
            return
        a = self.a.now() if isinstance(self.a, Shared) else self.a.data
        start = np.float32(0.0)
        if self.use_acc:
            start = self.acc.result if isinstance(self.acc, Product) else self.acc.data
        a, b = (torch.from_numpy(np.ascontiguousarray(x)) for x in (a, self.b.now()))
        with np.errstate(all="ignore"):
            self.result = (a @ b).numpy() + start


class Partition:
    """One function of a warp_specialize, as a thread that runs when the scheduler lets it."""

    def __init__(self, name, function, args, warps, registers):
        self.name, self.function, self.args = name, function, args
        self.warps, self.registers = warps, registers  # a thread
        self.turn = threading.Semaphore(0)
        self.products: list[Product] = []  # in flight, the oldest first
        self.stores: list[Store] = []  # not read yet, the oldest first
        self.waits_for: tuple[Shared, int, types.FrameType] | None = None  # barrier, parity, where
        self.stands_back = False  # until the others can do no more
        self.line = 0
        self.error: BaseException | None = None
        self.done = False

    def can_run(self):
        if self.done:
            return False
        if self.waits_for is None:
            return True
        shared, parity, _ = self.waits_for
        return shared.ready().phase & 1 != parity


def _of_kernel(frame):
    """The innermost frame, from this one outwards, that is the kernel's."""
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == HERE:
        frame = frame.f_back
    return frame


def _calls(frame) -> str:
    """Where a kernel's file is, from the innermost call outwards: "line 9 in f, from line 20"."""
    frame, found = _of_kernel(frame), []
    file = frame and frame.f_code.co_filename
    while frame is not None:
        if frame.f_code.co_filename == file:
            found.append(f"line {frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    *inner, outer = found or ["line 0"]
    return ", from ".join([*inner, outer.partition(" in ")[0]])  # it has the partition's name


class _Abandoned(BaseException):
    """Ends the threads of a program in which another partition failed."""


class Program:
    """One program of a launch: its shared memory, its partitions, and what is in flight."""

    def __init__(self, kernel, seed, work: Work, pid, grid, num_warps):
        self.kernel, self.pid, self.grid, self.work = kernel, pid, grid, work
        self.random = random.Random(f"{seed}.{pid}")
        self.mood = ("late", "early", "mixed")[seed % 3]
        self.loads: list[Load] = []
        self.memories: list[Allocation] = []
        self.shared_bytes, self.num_warps = 0, num_warps
        self.current = Partition(kernel.__name__, None, (), num_warps, 255)
        self.partitions = [self.current]
        self.back = threading.Semaphore(0)  # of the scheduler
        self.stopping = False
        self.specialised = False

    # -- shared memory

    def allocate(self, name, shape, dtype, layout):
        self.shared_bytes += math.prod(shape) * dtype.primitive_bitwidth // 8
        if self.shared_bytes > SHARED_LIMIT:
            raise GluonError(
                f"{self.shared_bytes:,} bytes of shared memory with {name}: a program may have "
                f"{SHARED_LIMIT:,}"
            )
        places = np.arange(math.prod(shape)).reshape(shape)
        return Shared(Allocation(self, name, shape, dtype), places, layout, name)

    def store_may_not_read(self, shared):
        """A TMA store in flight may read now, before its memory is overwritten, or after."""
        for partition in self.partitions:
            for store in list(partition.stores):
                same = store.source.memory is shared.memory
                if same and overlap(store.source.places, shared.places):
                    if self.mood == "early":
                        partition.stores.remove(store)
                        store.land()
                    else:  # it reads a mixture
                        memory = store.source.memory
                        memory.data[store.source.places] = np.nan

    def product_does_not_read(self, shared):
        """Refuses to overwrite what a product in flight may still read."""
        for product in (x for partition in self.partitions for x in partition.products):
            operands = [x for x in (product.a, product.b) if isinstance(x, Shared)]
            if product.result is None and any(
                x.memory is shared.memory and overlap(x.places, shared.places) for x in operands
            ):
                raise GluonError(
                    f"{shared.name}.store: {product.describe()}, and reads it: warpgroup_mma_wait "
                    "comes first"
                )

    def has_registers_for_products(self):
        """Refuses products in flight that a thread cannot hold."""
        me = self.current
        held = [x.shape for x in me.products]  # float32 results
        held += [[x.a.shape[0], x.a.shape[1] // 2] for x in me.products if isinstance(x.a, Tile)]
        need = sum(map(math.prod, held)) // (32 * me.warps)
        if need > me.registers:
            raise GluonError(
                f"{me.name} has {me.registers} registers a thread, and its products in flight hold "
                f"{need}: worker_num_regs gives a consumer more"
            )

    # -- what is counted

    def record(self, what, amount=0, **more):
        me = self.current
        self.work.events.append(
            Event(
                self.pid[0],
                self.partitions.index(me),
                what,
                int(amount),
                len(self.loads),
                len(me.products),
                len(me.stores),
                **more,
            )
        )

    def record_write(self, tensor):
        memory = tensor.untyped_storage()
        now = torch.empty(0, dtype=torch.uint8).set_(memory)
        self.work.written[memory.data_ptr()] = now, now

    # -- time

    def point(self):
        """A moment at which something else may happen: called before each operation."""
        if self.stopping:
            raise _Abandoned
        frame = _of_kernel(sys._getframe(1))
        self.current.line = frame.f_lineno if frame else 0
        if self.mood == "late":
            return
        while self.loads and (self.mood == "early" or self.random.random() < 0.2):
            self.loads.pop(self.random.randrange(len(self.loads))).land()
        if self.mood == "mixed":
            for product in self.current.products:
                if self.random.random() < 0.3:
                    product.compute()
                else:
                    break
            if self.current.function is not None and self.random.random() < 0.3:
                self.switch()

    def wait(self, shared, parity):
        """Until the phase of this parity is complete."""
        self.point()
        shared.ready()
        if parity not in (0, 1):
            raise GluonError(f"{shared.name}: a parity is 0 or 1, got {parity}: take `phase & 1`")
        self.current.waits_for = shared, parity, sys._getframe(1)
        if self.current.function is None:  # before warp_specialize, or without it
            while not self.current.can_run():
                self.let_something_happen()
        else:
            self.switch()
        self.current.waits_for = None

    def let_others_go_on(self):
        """After an arrival, where products are in flight: others run as far as they can, if late.

        What was given back while a product still reads it is then overwritten before it has read.
        """
        me = self.current
        if self.mood == "late" and me.products and me.function is not None:
            me.stands_back = True
            self.switch()
            me.stands_back = False

    def let_something_happen(self):
        """A load lands, because everybody waits. Raises Deadlock where there is none."""
        if not self.loads:
            raise Deadlock(self.deadlock())
        self.loads.pop(self.random.randrange(len(self.loads))).land()

    def deadlock(self):
        lines = [f"program {self.pid}: everybody waits, and nothing is in flight"]
        for p in self.partitions:
            if p.waits_for is None:
                continue
            shared, parity, frame = p.waits_for
            bar = shared.ready()
            lacks = f"{bar.pending} of {bar.count} arrivals"
            lacks += f" and {bar.bytes:,} bytes" if bar.bytes > 0 else ""
            if bar.bytes < 0:
                lacks += f"; {-bar.bytes:,} bytes more have landed than were expected"
            lines.append(
                f"{p.name}, {_calls(frame)}: waits for parity {parity} of {shared.name}, whose "
                f"phase {bar.phase} lacks {lacks}"
            )
        return "\n".join(lines)

    # -- partitions

    def switch(self):
        """Gives the turn back to the scheduler, and waits for the next one."""
        me = self.current
        self.back.release()
        me.turn.acquire()
        if self.stopping:
            raise _Abandoned

    def specialise(self, functions, warps, registers):
        """Runs partitions, of so many warps and registers a thread each, to their ends."""
        if self.specialised:
            raise GluonError("one warp_specialize a kernel")
        self.specialised = True
        outer = self.current
        names = [function.__name__ for function, _ in functions]
        self.partitions = [
            Partition(
                f"{name} {i}" if names.count(name) > 1 else name,
                *functions[i],
                warps[i],
                registers[i],
            )
            for i, name in enumerate(names)
        ]
        threads = [
            threading.Thread(target=self.run_partition, args=(p,), daemon=True)
            for p in self.partitions
        ]
        for thread in threads:
            thread.start()
        try:
            self.schedule()
        finally:
            self.stopping = any(not p.done for p in self.partitions)
            for p in self.partitions:
                while not p.done:
                    self.current = p
                    p.turn.release()
                    self.back.acquire()
            for thread in threads:
                thread.join()
            self.stopping = False
            self.current = outer

    def schedule(self):
        while True:
            alive = [p for p in self.partitions if not p.done]
            if not alive:
                return
            able = [p for p in alive if p.can_run()]
            if not able:
                self.let_something_happen()
                continue
            self.current = self.random.choice([p for p in able if not p.stands_back] or able)
            self.current.turn.release()
            self.back.acquire()
            if self.current.error is not None:
                raise self.current.error

    def run_partition(self, p):
        p.turn.acquire()
        torch.set_num_threads(
            torch.get_num_threads()
        )  # else products in a new thread take all cores
        try:
            if not self.stopping:
                p.function(*p.args)
                self.end_of(p)
        except _Abandoned:
            pass
        except BaseException as error:
            p.error = error
        finally:
            p.done = True
            self.back.release()

    def end_of(self, p):
        if p.stores:
            raise GluonError(
                f"{p.name} ends while a TMA store still reads {p.stores[0].source.name}: "
                "tma.store_wait(pendings=0) first"
            )
        for product in p.products:
            product.compute()

    def fence(self):
        for memory in self.memories:
            mine = [entry for entry in memory.unfenced if entry[0] is self.current]
            for _, places, data in mine:
                memory.data[places] = data
            memory.unfenced = [e for e in memory.unfenced if e[0] is not self.current]
            for bar in memory.barriers or ():
                bar.fenced = True

    def finish(self):
        self.work.programs += 1
        self.work.shared = self.shared_bytes
        if self.loads:
            load = self.loads[0]
            raise GluonError(
                f"program {self.pid} ends while a TMA load into {load.target.name} is in flight: "
                f"nobody has waited for it on {load.barrier.name} (a wait for the other parity "
                "passes at once)"
            )


_running: Program | None = None


def running() -> Program:
    """The program that runs. Raises outside of one."""
    if _running is None:
        raise GluonError("a Gluon operation outside of a kernel")
    return _running


@contextlib.contextmanager
def entered(program: Program):
    """Within the block `program` runs."""
    global _running
    outer, seen = _running, gluon_values.on_arithmetic
    _running = program
    gluon_values.on_arithmetic = lambda size: program.record("arithmetic", size)
    try:
        yield
    finally:
        _running, gluon_values.on_arithmetic = outer, seen
