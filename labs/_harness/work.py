"""Count work while real code runs: FLOPs, bytes moved, the largest tensor, peak memory.

`count_kernels()` counts what Triton kernels load, store and multiply in the CPU interpreter;
`count_torch()` counts what PyTorch operations allocate and multiply, on any device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labs._harness import interpreter


@dataclass
class KernelWork(interpreter.Observer):
    """What the kernels launched so far have done, in bytes and FLOPs.

    Attributes:
        launches: programs run, by kernel name.
        loaded, stored: bytes of active lanes, by (kernel, tensor parameter). A byte read twice
            counts twice: there is no cache in this count.
        dot_flops: 2 M N K, summed over tl.dot calls.
    """

    launches: Counter = field(default_factory=Counter)
    loaded: Counter = field(default_factory=Counter)
    stored: Counter = field(default_factory=Counter)
    dot_flops: int = 0

    @property
    def bytes_loaded(self) -> int:
        return sum(self.loaded.values())

    @property
    def bytes_stored(self) -> int:
        return sum(self.stored.values())

    @property
    def bytes_moved(self) -> int:
        return self.bytes_loaded + self.bytes_stored

    def program(self, launch):
        self.launches[launch.kernel] += 1
        return True

    def load(self, launch, address, mask, itemsize):
        self._add(self.loaded, launch, address, mask, itemsize)

    def store(self, launch, address, mask, itemsize):
        self._add(self.stored, launch, address, mask, itemsize)

    def dot(self, launch, m, n, k):
        self.dot_flops += 2 * m * n * k

    def _add(self, counter, launch, address, mask, itemsize):
        lanes = int(np.count_nonzero(mask))
        if lanes:
            first = address.item(mask.argmax())
            counter[launch.kernel, launch.tensor_at(first)] += lanes * itemsize


@contextlib.contextmanager
def count_kernels():
    """Counts what Triton kernels do while the block runs; yields a KernelWork.

    Raises:
        RuntimeError: kernels cannot be watched here (see interpreter.unavailable).
    """
    work = KernelWork()
    with interpreter.observe(work):
        yield work


class TorchWork(TorchDispatchMode):
    """What PyTorch operations have done so far.

    Attributes:
        flops: of matrix products (torch.utils.flop_counter's formulas).
        allocated: bytes of all tensors made, views not counted.
        largest: bytes of the largest tensor made, `largest_shape` its shape.
        most_elements: elements of the tensor made that has most, `most_text` says which.
        peak: most bytes alive at one time among the tensors made.
        live: bytes alive now.
        moved: bytes read and written, had every operation read its inputs and written its output.
        calls: operations, by name.
    """

    def __init__(self):
        super().__init__()
        self.flops = 0
        self.allocated = 0
        self.largest = 0
        self.largest_shape: tuple[int, ...] = ()
        self.most_elements = 0
        self.most_text = "no tensor"
        self.live = 0
        self.peak = 0
        self.moved = 0
        self.calls: Counter = Counter()
        self._alive: dict[int, weakref.ref] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled; True imports torch._dynamo, a second in each fork

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Thousands of operations run in a test: this is written to be quick.
        kwargs = kwargs or {}
        facts = operation(func)
        self.calls[facts.name] += 1
        if facts.view:
            return func(*args, **kwargs)
        inputs = _tensors(args, [])
        if kwargs:
            _tensors(kwargs.values(), inputs)
        known = {t.untyped_storage()._cdata for t in inputs}
        result = func(*args, **kwargs)
        if facts.flops:
            self.flops += facts.flops(*args, **kwargs, out_val=result)
        made = []
        for t in (result,) if type(result) is torch.Tensor else _tensors((result,), []):
            storage = t.untyped_storage()
            if storage._cdata not in known:
                made.append(t)
                if not facts.adopts:
                    self._made(t, storage)
        self.moved += facts.bytes_moved(inputs, made)
        return result

    def _made(self, t, storage):
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self.allocated += size
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
        if size > self.largest:
            self.largest, self.largest_shape = size, tuple(t.shape)
        if size // t.element_size() > self.most_elements:
            self.most_elements = size // t.element_size()
            self.most_text = (
                f"a tensor of {self.most_elements:,} elements, {t.dtype} {tuple(t.shape)}"
            )
        self._alive[key] = weakref.ref(storage, lambda _: self._freed(key, size))

    def _freed(self, key, size):
        del self._alive[key]
        self.live -= size


@dataclass(frozen=True, slots=True)
class Operation:
    """What counting needs to know of a PyTorch operation.

    Attributes:
        name: such as "aten.mm".
        view: whether it makes a view and so moves nothing.
        flops: formula of torch.utils.flop_counter, or None.
        reads: which of its tensor inputs it reads, as a slice.
        writes_input: whether it writes its first input rather than a new tensor.
        idle: whether it moves nothing: uninitialised memory.
        adopts: whether it gives a tensor memory that exists already, as Triton's interpreter does.
        func: the operation itself.
    """

    name: str
    view: bool
    flops: Callable | None
    reads: slice
    writes_input: bool
    idle: bool
    adopts: bool
    func: torch._ops.OpOverload

    def bytes_moved(self, inputs, made) -> int:
        """Bytes that one call reads and writes; `made` are its outputs that are not inputs."""
        written = inputs[:1] if self.writes_input else made
        if self.idle or not written:  # _unsafe_view and its like: the output is an input
            return 0
        moved = 0
        for t in inputs[self.reads]:
            moved += t.nbytes
        for t in written:
            moved += t.nbytes
        return moved


# In-place operations that do not read what they overwrite.
_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_"}


# By id: the hash of an operation is a call into Python. Operation.func keeps the id its own.
_operations: dict[int, Operation] = {}


def operation(func: torch._ops.OpOverload) -> Operation:
    """The facts of an operation as PyTorch's dispatcher names it."""
    facts = _operations.get(id(func))
    if facts is None:
        facts = _operations[id(func)] = _facts(func)
    return facts


def _facts(func: torch._ops.OpOverload) -> Operation:
    packet = func._overloadpacket
    name = packet.__name__
    if name.endswith("_like") or name.startswith("new_"):
        reads = slice(0)
    else:
        reads = slice(1 if name in _OVERWRITE else 0, None)
    return Operation(
        name=str(packet),
        view=func.is_view,
        flops=_quick(flop_registry.get(packet)),
        reads=reads,
        writes_input=func._schema.is_mutable,
        idle="empty" in name or name == "set_",
        adopts=name == "set_",
        func=func,
    )


def _quick(formula: Callable | None) -> Callable | None:
    """The formula without flop_counter's walk through the arguments, where all are tensors."""
    of_shapes = getattr(formula, "__wrapped__", None)
    if of_shapes is None:
        return formula

    def flops(*args, out_val=None, **kwargs):
        if kwargs or not all(type(t) is torch.Tensor for t in (*args, out_val)):
            return formula(*args, out_val=out_val, **kwargs)
        return of_shapes(*[t.shape for t in args], out_shape=out_val.shape)

    return flops


def _tensors(values, found: list) -> list[torch.Tensor]:
    """Appends the tensors among `values`, those in lists and tuples included, to `found`."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors(value, found)
    return found


@contextlib.contextmanager
def count_torch():
    """Counts what PyTorch operations do while the block runs; yields a TorchWork."""
    work = TorchWork()
    with work:
        yield work
