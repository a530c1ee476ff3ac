"""Run Gluon kernels for Hopper on a CPU: for right numbers, for races and for hangs.

`emulate(seed)` takes over the launches of Gluon kernels within its block. Each program runs as
Python on NumPy tiles, which carry their layouts, and the partitions of a warp-specialised program
run as threads of which one runs at a time. What a Hopper card does in the background happens at a
moment that the seed chooses between the earliest and the latest that the kernel's own waits allow:

    a TMA load      its target holds NaN from the call until the barrier has counted its bytes
    an async wgmma  reads shared memory and gives its result at any time until warpgroup_mma_wait
    a TMA store     reads shared memory at any time until store_wait, and sees only what was
                    written before a fence_async_shared

So a buffer that is released too early gives wrong numbers here, for some seed, and a wait for what
never comes is a Deadlock that says who waits for what. A kernel that passes here may still not
compile (`xray` says so), and nothing here says how fast it is.

What is there is what the labs use. Anything else is an Unsupported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import math
import random
import re
import sys
import threading
import types
from dataclasses import dataclass, field

import numpy as np
import torch

from labs._harness import runtime, triton_private

SHARED_LIMIT = 232_448  # bytes of shared memory that a program may have on sm_90
MOST_BYTES = (1 << 20) - 1  # that an mbarrier can expect at a time
MULTIPROCESSORS = 3  # of the emulated card: few, so that persistent programs have several tiles


class GluonError(RuntimeError):
    """A kernel did what Gluon refuses to compile, or what a card does not promise to survive."""


class Deadlock(GluonError):
    """Every partition waits; the message says for what, and since which line."""


class Unsupported(GluonError):
    """The emulator has no such operation."""


# ---------------------------------------------------------------- the way in
@dataclass(frozen=True)
class Event:
    """One thing that a partition did.

    Attributes:
        program: its number on axis 0. partition: its number in the list of warp_specialize.
        what: "load" or "store" by TMA; "product", a warpgroup_mma; "exp2", "where" or "arithmetic"
            on a matrix; "arrive" or "wait" at an mbarrier; "product wait", "store wait".
        amount: bytes, FLOPs, or elements of the matrix.
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
class _Setup:
    seed: int
    multiprocessors: int
    work: Work


_active: _Setup | None = None


@functools.cache
def unavailable() -> str | None:
    """Why Gluon kernels cannot be emulated here, or None if they can."""
    if not runtime.setup().has_triton:
        return "Triton is not installed"
    return triton_private.moved(triton_private.GLUON)


@contextlib.contextmanager
def emulate(seed: int = 0, multiprocessors: int = MULTIPROCESSORS):
    """Within the block Gluon kernels that are launched on CPU tensors run in the emulator.

    Args:
        seed: chooses the order of partitions, and when what is asynchronous happens. Seeds 0, 1, 2
            are as late as can be, as early as can be, and mixed; so are 3, 4, 5 and so on.
        multiprocessors: what `multiprocessors` says within the block.

    Yields:
        Work, counted while the block runs.
    """
    global _active
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)
    from triton.experimental.gluon._runtime import GluonJITFunction

    before, inherited = _active, "run" not in vars(GluonJITFunction)
    run = GluonJITFunction.run
    _active = _Setup(seed, multiprocessors, Work())

    def launch(self, *args, grid, warmup=False, **kwargs):
        _launch(self, args, grid, kwargs)

    GluonJITFunction.run = launch
    try:
        yield _active.work
    finally:
        _active = before
        if inherited:
            del GluonJITFunction.run
        else:
            GluonJITFunction.run = run


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a tensor's card, or of the emulated one."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _active.multiprocessors if _active else MULTIPROCESSORS


def check_launch(**tensors: torch.Tensor) -> None:
    """Refuses, before a launch, what a Gluon kernel for Hopper cannot take.

    Args:
        **tensors: the tensors that the kernel will read, by the name to use in messages.

    Raises:
        RuntimeError: no Triton, no Gluon, or neither a Hopper card nor the emulator.
        ValueError: the tensors are not of one dtype and on one device.
    """
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)
    first, x = next(iter(tensors.items()))
    for name, y in tensors.items():
        if y.dtype != x.dtype or y.device != x.device:
            raise ValueError(
                f"{', '.join(tensors)} must have one dtype and be on one device: got {first} "
                f"{x.dtype} on {x.device}, {name} {y.dtype} on {y.device}"
            )
    if x.device.type == "cuda":
        found = torch.cuda.get_device_capability(x.device)
        if found[0] != 9 or torch.version.hip is not None:
            raise RuntimeError(
                f"this kernel needs a Hopper card (H100, H200; capability 9.0): this one has "
                f"{found[0]}.{found[1]}"
            )
    elif _active is None:
        raise RuntimeError(
            "this kernel needs a Hopper card (H100, H200): on a CPU call it within "
            "`with gluon_emulator.emulate():` (labs/_harness/gluon_emulator.py)"
        )


def hopper() -> bool:
    """Whether kernels run on a Hopper card here."""
    here = runtime.setup()
    return here.device == "cuda" and torch.cuda.get_device_capability()[0] == 9


# ---------------------------------------------------------------- values
class Int(int):
    """A 32- or 64-bit integer of a kernel: divides towards zero, and says so when it overflows."""

    bits = 32

    def __new__(cls, value, bits=32):
        if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise GluonError(f"{int(value):,} does not fit an int{bits}: use .to(gl.int64) earlier")
        self = super().__new__(cls, value)
        self.bits = bits
        return self

    def to(self, dtype):
        return Int(int(self), dtype.primitive_bitwidth) if dtype.is_int() else float(self)


def _int_method(name, function):
    def method(self, other):
        if isinstance(other, Tile) or not isinstance(other, (int, np.integer)):
            return NotImplemented
        bits = max(self.bits, getattr(other, "bits", 32))
        return Int(function(int(self), int(other)), bits)

    def reflected(self, other):
        return method(Int(int(other), getattr(other, "bits", 32)), self)

    setattr(Int, f"__{name}__", method)
    setattr(Int, f"__r{name}__", reflected)


def _divided(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


for _name, _function in {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": _divided,
    "mod": lambda a, b: a - _divided(a, b) * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "rshift": lambda a, b: a >> b,
    "lshift": lambda a, b: a << b,
}.items():
    _int_method(_name, _function)


def _kind(dtype) -> type:
    """The NumPy type that stands for a Triton dtype; half types are kept as float32."""
    if dtype.is_floating():
        return np.float64 if dtype.primitive_bitwidth == 64 else np.float32
    if dtype.primitive_bitwidth == 1:
        return np.bool_
    return np.int64 if dtype.primitive_bitwidth == 64 else np.int32


def rounded(data: np.ndarray, dtype) -> np.ndarray:
    """float32 numbers rounded to what a dtype can hold, to nearest even."""
    name = str(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "fp16":
            return data.astype(np.float16).astype(np.float32)
        if name == "bf16":
            return (
                torch.from_numpy(np.ascontiguousarray(data, np.float32)).bfloat16().float().numpy()
            )
        return data.astype(_kind(dtype))


@dataclass(frozen=True)
class Derived:
    """The layout that Gluon finds for itself when a tile is reshaped, split or joined."""

    how: str
    parent: object
    shape: tuple[int, ...]


class Tile:
    """A tensor of a kernel: numbers, a dtype and a layout."""

    __array_ufunc__ = None

    def __init__(self, data, dtype, layout, exact=None):
        self.data, self.dtype, self.layout = data, dtype, layout
        self._exact = exact  # the factors of a product: a sum with it may be fused

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def type(self):
        return types.SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def to(self, dtype, bitcast=False):
        if bitcast:
            if self.dtype.is_floating() or dtype.primitive_bitwidth != 16:
                raise Unsupported(f"{self.dtype} to {dtype} with bitcast")
            return Tile(_from_bits(self.data, dtype), dtype, self.layout)
        return Tile(rounded(self.data, dtype), dtype, self.layout)

    def reshape(self, shape):
        shape = tuple(int(n) for n in shape)
        if math.prod(shape) != self.data.size:
            raise GluonError(f".reshape: {self.shape} has other elements than {list(shape)}")
        return Tile(self.data.reshape(shape), self.dtype, Derived("reshape", self.layout, shape))

    def __getitem__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        new = [axis for axis, k in enumerate(key) if k is None]
        if len(new) != 1 or any(k not in (None, slice(None)) for k in key):
            raise Unsupported(f"a tile is indexed by one None and colons: got {key}")
        layout = self.layout
        if type(layout).__name__ != "SliceLayout" or layout.dim != new[0]:
            raise GluonError(
                f"[{', '.join('None' if k is None else ':' for k in key)}] adds axis {new[0]}: the "
                f"tile's layout must be a SliceLayout of that axis, it is {_short(layout)}"
            )
        exact = self._exact
        if exact is not None:
            exact = tuple(np.broadcast_to(x, self.data.shape)[key] for x in exact)
        return Tile(self.data[key], self.dtype, layout.parent, exact)

    def __bool__(self):
        raise GluonError("an `if` takes one value, not a tile: use gl.where")

    def __neg__(self):
        return Tile(-self.data, self.dtype, self.layout)


def _bits(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Numbers rounded to a half dtype, as the 16 bits of each in an int32."""
    half = torch.from_numpy(np.ascontiguousarray(data, np.float32)).to(dtype)
    return half.view(torch.int16).numpy().astype(np.int32) & 0xFFFF


def _from_bits(data: np.ndarray, dtype) -> np.ndarray:
    """The numbers of a half dtype that these 16-bit patterns stand for."""
    half = torch.float16 if str(dtype) == "fp16" else torch.bfloat16
    bits = np.ascontiguousarray(data.astype(np.uint16)).view(np.int16)
    return torch.from_numpy(bits).view(half).float().numpy()


def _short(layout) -> str:
    """A layout in a few words, for messages."""
    name = type(layout).__name__
    if name == "Derived":
        return f"that of a {layout.how} to {list(layout.shape)}"
    if name == "SliceLayout":
        return f"SliceLayout({layout.dim}, {_short(layout.parent)})"
    if name == "DotOperandLayout":
        return f"DotOperandLayout({layout.operand_index}, {_short(layout.parent)})"
    if name == "NVMMADistributedLayout":
        return f"NVMMADistributedLayout(instr_shape={list(layout.instr_shape)})"
    return name


def _pair(a, b, what):
    """The data of two operands, their common dtype and layout. Raises where layouts differ."""
    tiles = [x for x in (a, b) if isinstance(x, Tile)]
    for x in (a, b):
        if isinstance(x, Product):
            raise GluonError(f"{what}: {x.describe()}; warpgroup_mma_wait gives its numbers")
        if not isinstance(x, (Tile, int, float, np.integer, np.floating)):
            raise Unsupported(f"{what} of {type(x).__name__}")
    if len(tiles) == 2 and a.layout != b.layout:
        raise GluonError(
            f"{what}: the two tiles have different layouts, {_short(a.layout)} and "
            f"{_short(b.layout)}: gl.convert_layout one of them"
        )
    if len(tiles) == 2 and len(a.shape) != len(b.shape):
        raise GluonError(f"{what}: ranks differ, {a.shape} and {b.shape}")
    dtype = tiles[0].dtype
    if len(tiles) == 2 and a.dtype != b.dtype:
        floats = [t for t in tiles if t.dtype.is_floating()] or tiles
        dtype = max((t.dtype for t in floats), key=lambda d: d.primitive_bitwidth)
    elif len(tiles) == 1 and dtype.is_int():
        other = b if tiles[0] is a else a
        gl = _gl()
        if isinstance(other, float):
            dtype = gl.float32
        elif getattr(other, "bits", 32) == 64 and dtype.primitive_bitwidth > 1:
            dtype = gl.int64
    return tiles[0].layout, dtype


def _gl():
    from triton.experimental.gluon import language

    return language


def _data(x, kind=None):
    data = x.data if isinstance(x, Tile) else x
    return data if kind is None else np.asarray(data).astype(kind)


def _arithmetic(name, symbol):
    def method(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return _combine(symbol, self, other)

    def reflected(self, other):
        return _combine(symbol, other, self)

    setattr(Tile, f"__{name}__", method)
    setattr(Tile, f"__r{name}__", reflected)


def _combine(symbol, a, b):
    layout, dtype = _pair(a, b, f"`{symbol}`")
    kind = _kind(dtype)
    x, y = _data(a, kind), _data(b, kind)
    with np.errstate(all="ignore"):
        if symbol == "*":
            exact = (x, y) if str(dtype) == "fp32" else None
            _count_arithmetic(x, y)
            return Tile(rounded(x * y, dtype), dtype, layout, exact)
        if symbol in "+-":
            for one in (a, b):  # as the compiler does: a product and a sum become one operation
                if isinstance(one, Tile) and one._exact is not None:
                    exact = np.multiply(*(f.astype(np.float64) for f in one._exact))
                    x, y = (exact, y) if one is a else (x, exact)
                    break
            else:
                _count_arithmetic(x, y)
            total = x + y if symbol == "+" else x - y
            return Tile(rounded(np.asarray(total).astype(kind), dtype), dtype, layout)
        if symbol == "/":
            dtype = dtype if dtype.is_floating() else _gl().float32
            return Tile(rounded(x / y, dtype), dtype, layout)
        return Tile(_INTEGER[symbol](x, y), dtype, layout)


def _count_arithmetic(x, y):
    size = max(np.size(x), np.size(y))
    if _running is not None and max(np.ndim(x), np.ndim(y)) == 2:
        _running.record("arithmetic", size)


_INTEGER = {
    "//": lambda x, y: np.trunc(x / y).astype(x.dtype),
    "%": np.fmod,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
}
for _name, _symbol in {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
}.items():
    _arithmetic(_name, _symbol)


def _comparison(name, function):
    def method(self, other):
        layout, _ = _pair(self, other, "a comparison")
        with np.errstate(invalid="ignore"):
            return Tile(function(self.data, _data(other)), _gl().int1, layout)

    setattr(Tile, f"__{name}__", method)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(
        _name,
        getattr(
            np,
            {
                "lt": "less",
                "le": "less_equal",
                "gt": "greater",
                "ge": "greater_equal",
                "eq": "equal",
                "ne": "not_equal",
            }[_name],
        ),
    )
Tile.__hash__ = None


@dataclass(frozen=True)
class Pointer:
    """A pointer argument, a number of elements further on; or a tile of such pointers."""

    tensor: torch.Tensor
    name: str
    offset: object = 0

    def __add__(self, other):
        return Pointer(self.tensor, self.name, self.offset + other)

    __radd__ = __add__

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=_triton_dtype(self.tensor.dtype))

    def places(self, mask):
        """(flat view of the memory, element numbers that are active). Raises outside of it."""
        from labs._harness.interpreter import span

        offsets = self.offset.data if isinstance(self.offset, Tile) else np.asarray(self.offset)
        active = np.broadcast_to(np.asarray(True if mask is None else _data(mask)), offsets.shape)
        size = span(self.tensor)
        wrong = offsets[active & ((offsets < 0) | (offsets >= size))]
        if wrong.size:
            raise GluonError(
                f"element {wrong[0]:,} of {self.name}, which has {size:,}: mask it off"
            )
        flat = self.tensor.as_strided((size,), (1,), self.tensor.storage_offset())
        return flat, offsets[active], active


def _triton_dtype(dtype: torch.dtype):
    gl = _gl()
    return {
        torch.float16: gl.float16,
        torch.bfloat16: gl.bfloat16,
        torch.float32: gl.float32,
        torch.int32: gl.int32,
        torch.int64: gl.int64,
    }[dtype]


# ---------------------------------------------------------------- shared memory and barriers
@dataclass
class Barrier:
    """An mbarrier: `count` arrivals and all expected bytes complete a phase, then the next begins.

    Attributes:
        pending: arrivals that this phase still wants. bytes: that are still to come in it.
        phase: phases completed so far. A wait for parity p passes while phase p is not the one
            that runs.
        fenced: a fence came after it was initialised: TMA sees it.
    """

    count: int | None = None
    fenced: bool = False
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def arrive(self, count, name):
        if count > self.pending:
            raise GluonError(
                f"{name}: {count} more arrivals in a phase that wants {self.pending} of "
                f"{self.count}: somebody arrives twice, or init has too small a count"
            )
        self.pending -= count
        self.settle()

    def settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class _Allocation:
    """Shared memory of one allocate_shared_memory: what the asynchronous units see."""

    def __init__(self, name, shape, dtype):
        self.name, self.dtype = name, dtype
        size = math.prod(shape)
        self.barriers = [Barrier() for _ in range(size)] if dtype.primitive_bitwidth == 64 else None
        self.data = np.full(size, np.nan, np.float32) if self.barriers is None else None
        self.unfenced: list[tuple[object, np.ndarray, np.ndarray]] = []  # (partition, places, data)


class Shared:
    """A shared_memory_descriptor: a view of an allocation, as an array of places in it."""

    def __init__(self, memory, places, layout, name):
        self.memory, self.places, self.layout, self.name = memory, places, layout, name

    @property
    def shape(self):
        return list(self.places.shape)

    @property
    def dtype(self):
        return self.memory.dtype

    @property
    def type(self):
        return types.SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def index(self, i):
        if not 0 <= int(i) < self.places.shape[0]:
            raise GluonError(f"{self.name}.index({int(i)}): it has {self.places.shape[0]}")
        return Shared(self.memory, self.places[int(i)], self.layout, f"{self.name}[{int(i)}]")

    def permute(self, order):
        return Shared(self.memory, self.places.transpose(order), self.layout, self.name)

    def reshape(self, shape):
        return Shared(self.memory, self.places.reshape(shape), self.layout, self.name)

    def slice(self, start, length, dim=0):
        key = [slice(None)] * self.places.ndim
        key[dim] = slice(start, start + length)
        return Shared(self.memory, self.places[tuple(key)], self.layout, self.name)

    def load(self, layout):
        run = _run()
        run.point()
        data = self.memory.data.copy()
        for _, places, written in self.memory.unfenced:
            data[places] = written
        return Tile(data[self.places], self.dtype, layout)

    def store(self, value):
        run = _run()
        run.point()
        if not isinstance(value, Tile):
            raise GluonError(f"{self.name}.store takes a tile: got {type(value).__name__}")
        if value.shape != self.shape or value.dtype != self.dtype:
            raise GluonError(
                f"{self.name}.store: it is {self.dtype} {self.shape}, the tile {value.dtype} "
                f"{value.shape}"
            )
        run.store_may_not_read(self)
        run.product_does_not_read(self)
        self.memory.unfenced.append((run.current, self.places.copy(), value.data.copy()))

    def now(self):
        """What the asynchronous units read there."""
        return self.memory.data[self.places]

    def barrier(self) -> Barrier:
        if self.memory.barriers is None or self.places.size != 1:
            raise GluonError(f"{self.name} {self.shape} is not one mbarrier: index it first")
        return self.memory.barriers[int(self.places.reshape(-1)[0])]

    def ready(self) -> Barrier:
        bar = self.barrier()
        if bar.count is None:
            raise GluonError(
                f"{self.name}: this mbarrier was never given its count (mbarrier.init)"
            )
        return bar


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two stretches of an allocation have a place in common."""
    return a.min() <= b.max() and b.min() <= a.max()


# ---------------------------------------------------------------- one program and its partitions
@dataclass
class _Load:
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
class _Store:
    """A TMA store that has not read shared memory yet."""

    target: Descriptor
    coord: tuple[int, ...]
    source: Shared

    def land(self):
        self.target.write(self.coord, self.source.now())


class Product:
    """What an asynchronous warpgroup_mma returns: its result, which is not there yet."""

    def __init__(self, a, b, acc, use_acc, line):
        self.a, self.b, self.acc, self.use_acc, self.line = a, b, acc, use_acc, line
        self.layout, self.dtype, self.shape = acc.layout, acc.dtype, acc.shape
        self.result: np.ndarray | None = None
        self.waited = False

    @property
    def type(self):
        return types.SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def __getattr__(self, name):
        raise GluonError(f".{name}: {self.describe()}; warpgroup_mma_wait gives its numbers")

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


for _name in "add sub mul truediv radd rsub rmul rtruediv neg getitem lt le gt ge".split():

    def _in_flight(self, *_):
        raise GluonError(f"arithmetic: {self.describe()}; warpgroup_mma_wait gives its numbers")

    setattr(Product, f"__{_name}__", _in_flight)


class _Partition:
    """One function of a warp_specialize, as a thread that runs when the scheduler lets it."""

    def __init__(self, name, function, args, warps, registers):
        self.name, self.function, self.args = name, function, args
        self.warps, self.registers = warps, registers  # a thread
        self.turn = threading.Semaphore(0)
        self.products: list[Product] = []  # in flight, the oldest first
        self.stores: list[_Store] = []  # not read yet, the oldest first
        self.waits_for: tuple[Shared, int] | None = None
        self.stands_back = False  # until the others can do no more
        self.line = 0
        self.error: BaseException | None = None
        self.done = False

    def can_run(self):
        if self.done:
            return False
        if self.waits_for is None:
            return True
        shared, parity = self.waits_for
        return shared.ready().phase & 1 != parity


class _Abandoned(BaseException):
    """Ends the threads of a program in which another partition failed."""


class _Program:
    """One program of a launch: its shared memory, its partitions, and what is in flight."""

    def __init__(self, kernel, setup: _Setup, pid, grid, num_warps):
        self.kernel, self.pid, self.grid, self.work = kernel, pid, grid, setup.work
        self.random = random.Random(f"{setup.seed}.{pid}")
        self.mood = ("late", "early", "mixed")[setup.seed % 3]
        self.loads: list[_Load] = []
        self.memories: list[_Allocation] = []
        self.shared_bytes, self.num_warps = 0, num_warps
        self.current = _Partition(kernel.__name__, None, (), num_warps, 255)
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
        return Shared(_Allocation(name, shape, dtype), places, layout, name)

    def store_may_not_read(self, shared):
        """A TMA store in flight may read now, before its memory is overwritten, or after."""
        for partition in self.partitions:
            for store in list(partition.stores):
                same = store.source.memory is shared.memory
                if same and _overlap(store.source.places, shared.places):
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
                x.memory is shared.memory and _overlap(x.places, shared.places) for x in operands
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
            )  # fmt: skip
        )

    def record_write(self, tensor):
        memory = tensor.untyped_storage()
        now = torch.empty(0, dtype=torch.uint8).set_(memory)
        self.work.written[memory.data_ptr()] = now, now

    # -- time

    def line_of_kernel(self):
        """The line of the kernel's file that is being run."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        return frame.f_lineno if frame else 0

    def point(self):
        """A moment at which something else may happen: called before each operation."""
        if self.stopping:
            raise _Abandoned
        self.current.line = self.line_of_kernel()
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
        self.current.waits_for = shared, parity
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
            shared, parity = p.waits_for
            bar = shared.ready()
            lacks = f"{bar.pending} of {bar.count} arrivals"
            lacks += f" and {bar.bytes:,} bytes" if bar.bytes else ""
            lines.append(
                f"{p.name}, line {p.line}: waits for parity {parity} of {shared.name}, whose phase "
                f"{bar.phase} lacks {lacks}"
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
            _Partition(f"{name} {i}" if names.count(name) > 1 else name, *functions[i], *size)
            for i, (name, size) in enumerate(
                zip(names, zip(warps, registers, strict=True), strict=True)
            )
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
                f"nobody has waited for it on {load.barrier.name}"
            )


_running: _Program | None = None


def _run() -> _Program:
    if _running is None:
        raise GluonError("a Gluon operation outside of a kernel")
    return _running


# ---------------------------------------------------------------- descriptors
class Descriptor:
    """A host TensorDescriptor, as a kernel sees it."""

    def __init__(self, host):
        self.host, self.layout = host, host.layout
        self.dtype = _triton_dtype(host.base.dtype)
        shape = list(host.block_shape)
        self.nbytes = math.prod(shape) * self.dtype.primitive_bitwidth // 8
        self.block_type = types.SimpleNamespace(shape=shape, nbytes=self.nbytes)
        self.block_shape = shape
        self.nbytes_per_cta = self.nbytes
        self.view = host.base.as_strided(
            tuple(host.shape), tuple(host.strides), host.base.storage_offset()
        )

    def _cut(self, coord):
        """(slices of the tensor, slices of the tile) of what a tile at coord has of the tensor."""
        outer, inner = [], []
        for start, size, length in zip(coord, self.block_shape, self.view.shape, strict=True):
            low, high = max(start, 0), min(start + size, length)
            outer.append(slice(low, max(high, low)))
            inner.append(slice(low - start, max(high, low) - start))
        return tuple(outer), tuple(inner)

    def read(self, coord):
        tile = np.zeros(self.block_shape, np.float32)
        outer, inner = self._cut(coord)
        tile[inner] = self.view[outer].float().numpy()
        return tile

    def write(self, coord, tile):
        outer, inner = self._cut(coord)
        self.view[outer] = torch.from_numpy(np.ascontiguousarray(tile[inner])).to(self.view.dtype)


def _check_copy(desc, coord, shared, what):
    if not isinstance(desc, Descriptor) or not isinstance(shared, Shared):
        raise GluonError(f"{what} takes a descriptor, coordinates and shared memory")
    if len(coord) != len(desc.block_shape):
        raise GluonError(f"{what}: {len(coord)} coordinates for {len(desc.block_shape)} axes")
    if shared.shape != desc.block_shape or shared.dtype != desc.dtype:
        raise GluonError(
            f"{what}: the descriptor's tile is {desc.dtype} {desc.block_shape}, "
            f"{shared.name} is {shared.dtype} {shared.shape}"
        )
    if shared.layout != desc.layout:
        raise GluonError(f"{what}: {shared.name} must have the layout of the descriptor")


# ---------------------------------------------------------------- operations, by Gluon's names
class _Namespace:
    """Stands in for a module of Gluon: what is not emulated is taken from it, or refused."""

    def __init__(self, real, functions):
        self._real, self._functions = real, functions

    def __getattr__(self, name):
        if name in self._functions:
            return self._functions[name]
        value = getattr(self._real, name)
        if inspect.ismodule(value):
            return _stand_in(value)
        if inspect.isclass(value) or not callable(value):
            return value
        raise Unsupported(f"the emulator has no {self._real.__name__.split('.')[-1]}.{name}")


def _allocate_shared_memory(element_ty, shape, layout, value=None):
    run = _run()
    run.point()
    if value is not None:
        raise Unsupported("allocate_shared_memory with a value")
    shape = [int(n) for n in shape]
    shared = run.allocate(_assigned_name(), shape, element_ty, layout)
    run.memories.append(shared.memory)
    return shared


def _assigned_name() -> str:
    """What the kernel calls the memory that it allocates now: "k_ring.full" for one that a helper
    returns, assigned to `full` there and to `k_ring` by its caller."""
    names, frame = [], sys._getframe(2)
    file = frame.f_code.co_filename
    while frame is not None and frame.f_code.co_filename == file:
        text = linecache.getline(file, frame.f_lineno)
        assigned = re.match(r"\s*(\w+)\s*=", text)
        if not assigned:
            break
        names.append(assigned[1])
        frame = frame.f_back
    return ".".join(reversed(names)) or "shared memory"


def _init(mbarrier, count):
    bar = mbarrier.barrier()
    if bar.count is not None:
        raise GluonError(f"{mbarrier.name}: initialised a second time; mbarrier.invalidate first")
    bar.count = bar.pending = int(count)
    bar.bytes = bar.phase = 0
    bar.fenced = False


def _expect(mbarrier, bytes_per_cta=None, pred=True):
    run = _run()
    run.point()
    if not pred:
        return
    size = int(bytes_per_cta)
    if size > MOST_BYTES:
        raise GluonError(f"{mbarrier.name}: expects {size:,} bytes, at most {MOST_BYTES:,}")
    bar = mbarrier.ready()
    bar.bytes += size
    bar.arrive(1, mbarrier.name)


def _invalidate(mbarrier):
    mbarrier.ready().count = None


def _arrive(mbarrier, *, count=1, pred=True):
    run = _run()
    run.point()
    if pred:
        run.record("arrive")
        mbarrier.ready().arrive(int(count), mbarrier.name)
        run.let_others_go_on()


def _wait(mbarrier, phase, pred=True, deps=()):
    if pred:
        _run().record("wait")
        _run().wait(mbarrier, int(phase))


def _tma_load(tensor_desc, coord, barrier, result, pred=True, multicast=False):
    run = _run()
    run.point()
    if not pred:
        return
    _check_copy(tensor_desc, coord, result, "a TMA load")
    for memory, places in ((load.target.memory, load.target.places) for load in run.loads):
        if memory is result.memory and _overlap(places, result.places):
            raise GluonError(f"two TMA loads into {result.name} are in flight")
    if not barrier.ready().fenced:
        raise GluonError(
            f"a TMA load with {barrier.name}: no fence_async_shared since it was initialised, and "
            "TMA may see it as it was before"
        )
    result.memory.data[result.places] = np.nan
    coord = tuple(int(i) for i in coord)
    run.record("load", tensor_desc.nbytes, tensor=tensor_desc.host.base, place=coord)
    run.loads.append(_Load(tensor_desc, coord, barrier, result))


def _tma_store(tensor_desc, coord, src):
    run = _run()
    run.point()
    _check_copy(tensor_desc, coord, src, "a TMA store")
    coord = tuple(int(i) for i in coord)
    run.record("store", tensor_desc.nbytes, tensor=tensor_desc.host.base, place=coord)
    run.current.stores.append(_Store(tensor_desc, coord, src))
    run.record_write(tensor_desc.host.base)


def _store_wait(pendings):
    run = _run()
    run.point()
    run.record("store wait")
    while len(run.current.stores) > int(pendings):
        run.current.stores.pop(0).land()


def _fence_async_shared(cluster=False):
    run = _run()
    run.point()
    run.fence()


def _warpgroup_mma(
    a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False
):
    run = _run()
    run.point()
    layout = acc.layout
    if type(layout).__name__ != "NVMMADistributedLayout" or layout.version[0] != 3:
        raise GluonError(
            f"warpgroup_mma: the accumulator's layout must be NVMMADistributedLayout with "
            f"version=[3, 0], it is {_short(layout)}"
        )
    if math.prod(layout.warps_per_cta) != run.current.warps:
        raise GluonError(
            f"warpgroup_mma: the layout is for {math.prod(layout.warps_per_cta)} warps, "
            f"{run.current.name} has {run.current.warps}"
        )
    if not isinstance(b, Shared):
        raise GluonError("warpgroup_mma: b must lie in shared memory")
    if isinstance(a, Product):
        raise GluonError(f"warpgroup_mma: a: {a.describe()}; warpgroup_mma_wait gives its numbers")
    if isinstance(a, Tile):
        ok = type(a.layout).__name__ == "DotOperandLayout" and a.layout.operand_index == 0
        if not ok or a.layout.parent != layout:
            raise GluonError(
                "warpgroup_mma: a in registers must have a DotOperandLayout(operand_index=0, "
                f"parent=the accumulator's layout, k_width=2), it has {_short(a.layout)}"
            )
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    if len(a.shape) != 2 or len(b.shape) != 2 or b.shape[0] != k or list(acc.shape) != [m, n]:
        raise GluonError(f"warpgroup_mma: {a.shape} times {b.shape} onto {list(acc.shape)}")
    if a.dtype != b.dtype or a.dtype.primitive_bitwidth != 16:
        raise GluonError(
            f"warpgroup_mma: both operands in one half dtype, got {a.dtype}, {b.dtype}"
        )
    if m % 64 or n % 8 or k % 16 or layout.instr_shape[1] > n:
        raise GluonError(
            f"warpgroup_mma: M a multiple of 64, N of 8, K of 16, and an instruction no wider than "
            f"N: got M={m}, N={n}, K={k}, instr_shape={list(layout.instr_shape)}"
        )
    if isinstance(acc, Product) and acc.waited:
        raise GluonError("warpgroup_mma: go on with what warpgroup_mma_wait returned")
    product = Product(a, b, acc, bool(use_acc), run.current.line)
    run.record("product", 2 * m * n * k, registers=isinstance(a, Tile))
    run.current.products.append(product)
    run.has_registers_for_products()
    if run.mood == "early":
        product.compute()
    if is_async:
        return product
    return _warpgroup_mma_wait(0, [product])


def _warpgroup_mma_wait(num_outstanding=0, deps=None):
    run = _run()
    run.point()
    if deps is None:
        raise GluonError("warpgroup_mma_wait: deps must name what is waited for")
    run.record("product wait")
    products = run.current.products
    while len(products) > int(num_outstanding):
        products.pop(0).compute()
    results = []
    for dep in deps:
        if isinstance(dep, Product):
            if dep in products:
                raise GluonError(
                    f"warpgroup_mma_wait({num_outstanding}): {dep.describe()} still, among the "
                    f"{len(products)} youngest"
                )
            dep.waited = True
            if dep.result is None:
                dep.compute()
            dep = Tile(dep.result, dep.dtype, dep.layout)
        results.append(dep)
    return results[0] if len(results) == 1 else tuple(results)


def _warpgroup_mma_init(value):
    product = Product(None, None, value, True, 0)
    product.result = value.data
    return product


def _warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    run = _run()
    if len(worker_num_warps) != len(functions_and_args) - 1:
        raise GluonError("warp_specialize: a number of warps for each function but the first")
    left, others = 255, [255] * len(worker_num_warps)
    if worker_num_regs is not None:
        warps = run.num_warps + sum(4 * math.ceil(w / 4) for w in worker_num_warps)
        taken = sum(
            32 * 4 * math.ceil(w / 4) * r
            for w, r in zip(worker_num_warps, worker_num_regs, strict=True)
        )
        left = (65_536 // (32 * warps) // 8 * 8 * 32 * warps - taken) // (32 * run.num_warps)
        if any(r % 8 or not 24 <= r <= 256 for r in worker_num_regs) or left < 24:
            raise GluonError(
                f"warp_specialize: registers are multiples of 8 from 24 to 256, and all fit in "
                f"65,536: got {worker_num_regs} for {list(worker_num_warps)} warps, which leaves "
                f"{left} a thread for the first function"
            )
        others = worker_num_regs
    warps, registers = [run.num_warps, *worker_num_warps], [min(left, 255), *others]
    return run.specialise(functions_and_args, warps, registers)


def _zeros(shape, dtype, layout=None):
    return _full(shape, 0, dtype, layout)


def _full(shape, value, dtype, layout=None):
    _power_of_two(shape, "gl.full")
    return Tile(np.full([int(n) for n in shape], value, _kind(dtype)), dtype, layout)


def _zeros_like(x, shape=None, dtype=None, layout=None):
    return _full_like(x, 0, shape, dtype, layout)


def _full_like(x, value, shape=None, dtype=None, layout=None):
    return _full(shape or x.shape, value, dtype or x.dtype, layout or x.layout)


def _expand_dims(x, axis):
    colons = [slice(None)] * len(x.shape)
    return x[(*colons[:axis], None, *colons[axis:])]


def _power_of_two(shape, what):
    if any(int(n) < 1 or int(n) & (int(n) - 1) for n in shape):
        raise GluonError(f"{what}: sides of a tile are powers of two, got {list(map(int, shape))}")


def _arange(start, end, layout=None):
    _power_of_two([end - start], "gl.arange")
    return Tile(np.arange(start, end, dtype=np.int32), _gl().int32, layout)


def _convert_layout(value, layout, assert_trivial=False):
    if isinstance(value, Product):
        raise GluonError(
            f"convert_layout: {value.describe()}; warpgroup_mma_wait gives its numbers"
        )
    return Tile(value.data, value.dtype, layout)


def _reduction(function):
    def reduce(x, axis=None, *, keep_dims=False):
        if isinstance(x, Product):
            raise GluonError(f"a reduction: {x.describe()}; warpgroup_mma_wait gives its numbers")
        if axis is None or keep_dims:
            raise Unsupported("a reduction over one axis, which goes away, is what there is")
        gl = _gl()
        with np.errstate(invalid="ignore"):
            data = function(x.data, axis=axis, dtype=x.data.dtype)
        return Tile(data, x.dtype, gl.SliceLayout(axis, x.layout))

    return reduce


def _largest(data, axis, dtype):
    return np.max(data, axis=axis)  # NaN stays, where a card drops it: a NaN here is a bug shown


def _elementwise(function):
    def apply(x):
        if isinstance(x, Product):
            raise GluonError(f"arithmetic: {x.describe()}; warpgroup_mma_wait gives its numbers")
        with np.errstate(all="ignore"):
            if not isinstance(x, Tile):
                return float(function(np.float32(x)))
            if function is np.exp2 and x.data.ndim == 2:
                _run().record("exp2", x.data.size)
            return Tile(function(x.data).astype(x.data.dtype), x.dtype, x.layout)

    return apply


def _two(function, scalar):
    def apply(x, y):
        if not isinstance(x, Tile) and not isinstance(y, Tile):
            result = scalar(x, y)
            bits = max(getattr(x, "bits", 32), getattr(y, "bits", 32))
            return Int(result, bits) if isinstance(result, int) else result
        layout, dtype = _pair(x, y, "gl.maximum or gl.minimum")
        with np.errstate(invalid="ignore"):
            return Tile(function(_data(x), _data(y)).astype(_kind(dtype)), dtype, layout)

    return apply


def _where(condition, x, y):
    if not isinstance(condition, Tile):
        raise GluonError("gl.where: the condition is a tile; for one value use `if`")
    layout, dtype = condition.layout, None
    for value in (x, y):
        if isinstance(value, Product):
            raise GluonError(f"gl.where: {value.describe()}; warpgroup_mma_wait gives its numbers")
        if isinstance(value, Tile):
            layout, dtype = _pair(condition, value, "gl.where")[0], value.dtype
    dtype = dtype or _gl().float32
    if condition.data.ndim == 2:
        _run().record("where", condition.data.size)
    return Tile(np.where(condition.data, _data(x), _data(y)).astype(_kind(dtype)), dtype, layout)


def _load(pointer, mask=None, other=None):
    run = _run()
    run.point()
    flat, places, active = pointer.places(mask)
    dtype = _triton_dtype(flat.dtype)
    poison = np.nan if dtype.is_floating() else np.iinfo(np.int32).max
    data = np.full(active.shape, poison if other is None else other, _kind(dtype))
    found = flat[torch.from_numpy(places.astype(np.int64))]
    data[active] = (found.float() if found.is_floating_point() else found).numpy()
    if isinstance(pointer.offset, Tile):
        return Tile(data, dtype, pointer.offset.layout)
    return float(data) if dtype.is_floating() else Int(int(data), dtype.primitive_bitwidth)


def _store(pointer, value, mask=None):
    run = _run()
    run.point()
    if not isinstance(pointer.offset, Tile):
        raise Unsupported("a store at a single pointer: give it a tile of pointers")
    if isinstance(value, Tile) and value.layout != pointer.offset.layout:
        raise GluonError(
            f"gl.store: pointers and values have different layouts, "
            f"{_short(pointer.offset.layout)} and {_short(value.layout)}"
        )
    flat, places, active = pointer.places(mask)
    data = np.broadcast_to(_data(value), active.shape)[active]
    flat[torch.from_numpy(places.astype(np.int64))] = torch.from_numpy(data.copy()).to(flat.dtype)
    run.record_write(flat)


def _split(x):
    if not isinstance(x, Tile) or x.shape[-1] != 2:
        raise GluonError("gl.split: takes a tile whose last side is 2, and gives its two halves")
    layout = Derived("split", x.layout, tuple(x.shape[:-1]))
    return Tile(x.data[..., 0], x.dtype, layout), Tile(x.data[..., 1], x.dtype, layout)


def _join(a, b):
    layout, dtype = _pair(a, b, "gl.join")
    return Tile(np.stack([a.data, b.data], -1), dtype, Derived("join", layout, (*a.shape, 2)))


def _inline_asm(asm, constraints, args, dtype, is_pure, pack):
    """The two instructions that put halves into 32-bit words and take them out again."""
    layout = _pair(args[0], args[-1], "gl.inline_asm_elementwise")[0]
    text = " ".join(asm.split())
    packs = re.fullmatch(r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$([12]), \$([12]);", text)
    takes = re.fullmatch(r"mov\.b32 \{\$([01]), \$([01])\}, \$2;", text)
    if packs and len(args) == 2:
        half = torch.bfloat16 if packs[1] == "bf16" else torch.float16
        upper, lower = (_bits(args[int(packs[i]) - 1].data, half) for i in (2, 3))
        return Tile((upper << 16) | lower, dtype, layout)
    if takes and len(args) == 1:
        halves = {takes[1]: args[0].data & 0xFFFF, takes[2]: (args[0].data >> 16) & 0xFFFF}
        return tuple(Tile(halves[i], kind, layout) for i, kind in zip("01", dtype, strict=True))
    raise Unsupported(f"the emulator does not know this assembler: {text}")


def _static_assert(condition, message=""):
    if not condition:
        raise AssertionError(message)


def _cdiv(a, b):
    return (a + b - 1) // b


def _program_id(axis):
    return Int(_run().pid[axis])


def _num_programs(axis):
    return Int(_run().grid[axis])


_GL = {
    "allocate_shared_memory": _allocate_shared_memory,
    "warp_specialize": _warp_specialize,
    "program_id": _program_id,
    "num_programs": _num_programs,
    "num_warps": lambda: _run().num_warps,
    "zeros": _zeros,
    "full": _full,
    "zeros_like": _zeros_like,
    "full_like": _full_like,
    "expand_dims": _expand_dims,
    "arange": _arange,
    "convert_layout": _convert_layout,
    "max": _reduction(_largest),
    "sum": _reduction(np.sum),
    "exp": _elementwise(np.exp),
    "exp2": _elementwise(np.exp2),
    "log": _elementwise(np.log),
    "log2": _elementwise(np.log2),
    "abs": _elementwise(np.abs),
    "maximum": _two(np.maximum, max),
    "minimum": _two(np.minimum, min),
    "where": _where,
    "fma": lambda x, y, z: x * y + z,  # which is rounded once: see _combine
    "split": _split,
    "join": _join,
    "inline_asm_elementwise": _inline_asm,
    "to_tensor": lambda value: Int(value) if type(value) is int else value,
    "load": _load,
    "store": _store,
    "cdiv": _cdiv,
    "static_assert": _static_assert,
    "static_range": range,
    "constexpr": lambda value: value,
}
_MBARRIER = {
    "init": _init,
    "expect": _expect,
    "arrive": _arrive,
    "wait": _wait,
    "invalidate": _invalidate,
}
_TMA = {name: _tma_load for name in triton_private.TMA_LOAD}
_TMA |= {name: _tma_store for name in triton_private.TMA_STORE} | {"store_wait": _store_wait}
_HOPPER = {
    "fence_async_shared": _fence_async_shared,
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
    "warpgroup_mma_init": _warpgroup_mma_init,
}


def _modules():
    """(module of Gluon, what is emulated of it), the module that re-exports another one first."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

    return (
        (gl, _GL),
        (hopper, _HOPPER),
        (hopper.mbarrier, _MBARRIER),
        (hopper.tma, _TMA),
    )


def _stand_in(module):
    for real, functions in _modules():
        if module is real:
            return _Namespace(real, functions)
    return _Namespace(module, {})


def _emulated_globals(fn, cache):
    """The globals of a kernel's file, copied, with Gluon's names replaced."""
    original = fn.__globals__
    if id(original) in cache:
        return cache[id(original)]
    from triton.experimental.gluon._runtime import GluonJITFunction

    functions = {}
    for module, emulated in _modules():
        for name, function in emulated.items():
            if hasattr(module, name):
                functions[id(getattr(module, name))] = function
    new = dict(original)
    cache[id(original)] = new
    for name, value in original.items():
        if id(value) in functions:
            new[name] = functions[id(value)]
        elif isinstance(value, GluonJITFunction):
            new[name] = _emulated(value, cache)
        elif inspect.ismodule(value) and value.__name__.startswith("triton.experimental.gluon"):
            new[name] = _stand_in(value)
        elif getattr(value, "__triton_builtin__", False):
            new[name] = _refused(name)
        elif type(value).__name__ == "constexpr":
            new[name] = value.value
    return new


def _refused(name):
    def refuse(*args, **kwargs):
        raise Unsupported(f"the emulator has no {name}")

    return refuse


def _emulated(jit, cache):
    """The Python function of a @gluon.jit one, with emulated globals."""
    fn = jit.fn
    return types.FunctionType(
        fn.__code__, _emulated_globals(fn, cache), fn.__name__, fn.__defaults__, fn.__closure__
    )


def _argument(name, value):
    if isinstance(value, torch.Tensor):
        return Pointer(value, name)
    if type(value).__name__ == "TensorDescriptor":
        return Descriptor(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return Int(value, 32 if -(2**31) <= value < 2**31 else 64)
    return float(np.float32(value)) if isinstance(value, float) else value


def _launch(jit, args, grid, kwargs):
    """Runs all programs of a launch, one after the other."""
    global _running
    names = list(jit.arg_names)
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    grid = grid(given) if callable(grid) else grid
    grid = tuple(int(n) for n in (*grid, 1, 1)[:3])
    constants = {p.name for p in jit.params if p.is_constexpr}
    values = {k: v if k in constants else _argument(k, v) for k, v in given.items()}
    function = _emulated(jit, {})
    outer = _running
    try:
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    warps = kwargs.get("num_warps", 4)
                    program = _running = _Program(function, _active, (x, y, z), grid, warps)
                    function(**values)
                    program.end_of(program.current)
                    program.finish()
    finally:
        _running = outer
    written = _active.work.written
    written |= {place: (now, now.clone()) for place, (now, _) in written.items()}
