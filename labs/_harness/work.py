"""Count work while real code runs: FLOPs, bytes moved, the largest tensor, peak memory.

`count_kernels()` counts what Triton kernels load, store and multiply in the CPU interpreter;
`count_torch()` counts what PyTorch operations allocate and multiply, on any device.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

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
        lanes = int(mask.sum())
        if lanes:
            name = launch.tensor_at(int(address[mask].min()))
            counter[launch.kernel, name] += lanes * itemsize


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
        kwargs = kwargs or {}
        facts = operation(func)
        self.calls[facts.name] += 1
        if facts.view:
            return func(*args, **kwargs)
        inputs = _tensors((*args, *kwargs.values()), [])
        known = {_storage_key(t) for t in inputs}
        result = func(*args, **kwargs)
        if facts.flops:
            self.flops += facts.flops(*args, **kwargs, out_val=result)
        outputs = _tensors((result,), [])
        made = [t for t in outputs if _storage_key(t) not in known]
        self.moved += facts.bytes_moved(inputs, made)
        if facts.name != "aten.set_":  # it gives a tensor memory that exists already, as the
            for t in made:  # interpreter of Triton does
                self._made(t)
        return result

    def _made(self, t):
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self.allocated += size
        self.live += size
        self.peak = max(self.peak, self.live)
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


@dataclass(frozen=True)
class Operation:
    """What counting needs to know of a PyTorch operation.

    Attributes:
        name: such as "aten.mm".
        view: whether it makes a view and so moves nothing.
        flops: formula of torch.utils.flop_counter, or None.
        reads: which of its tensor inputs it reads, as a slice.
        writes_input: whether it writes its first input rather than a new tensor.
        idle: whether it moves nothing: uninitialised memory.
    """

    name: str
    view: bool
    flops: Callable | None
    reads: slice
    writes_input: bool
    idle: bool

    def bytes_moved(self, inputs, made) -> int:
        """Bytes that one call reads and writes; `made` are its outputs that are not inputs."""
        if self.idle:
            return 0
        written = inputs[:1] if self.writes_input else made
        if not written:  # _unsafe_view and its like: the output is an input
            return 0
        return sum(map(_nbytes, inputs[self.reads])) + sum(map(_nbytes, written))


# In-place operations that do not read what they overwrite.
_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_"}


@functools.cache
def operation(func: torch._ops.OpOverload) -> Operation:
    """The facts of an operation as PyTorch's dispatcher names it."""
    packet = func._overloadpacket
    name = packet.__name__
    if name.endswith("_like") or name.startswith("new_"):
        reads = slice(0)
    else:
        reads = slice(1 if name in _OVERWRITE else 0, None)
    return Operation(
        name=str(packet),
        view=func.is_view,
        flops=flop_registry.get(packet),
        reads=reads,
        writes_input=func._schema.is_mutable,
        idle="empty" in name or name == "set_",
    )


def _tensors(values, found: list) -> list[torch.Tensor]:
    """Appends the tensors among `values`, those in lists and tuples included, to `found`."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors(value, found)
    return found


def _storage_key(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _nbytes(t: torch.Tensor) -> int:
    return math.prod(t.shape) * t.element_size()


@contextlib.contextmanager
def count_torch():
    """Counts what PyTorch operations do while the block runs; yields a TorchWork."""
    work = TorchWork()
    with work:
        yield work
