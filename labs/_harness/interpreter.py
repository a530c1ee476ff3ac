"""Watch a kernel while Triton's CPU interpreter runs it.

This is the one module that touches the interpreter's private parts. `observe(observer)` reports
each launch, program, load, store and dot to the observer; `memory` (stray accesses) and `work`
(bytes and FLOPs) are built on it. Where a Triton release has moved those parts, `unavailable()`
says so and callers skip with that reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
from dataclasses import dataclass, field

import numpy as np
import torch

from labs._harness import runtime, triton_private


@dataclass
class Launch:
    """One kernel launch.

    Attributes:
        kernel: the kernel's name.
        tensors: its tensor arguments by parameter name.
        grid: programs along each axis.
        program: (x, y, z) of the program that runs now.
        patched: modules, by their globals, in which Triton has put its interpreter in place.
    """

    kernel: str
    tensors: dict[str, torch.Tensor]
    grid: tuple[int, int, int]
    program: tuple[int, int, int] = (0, 0, 0)
    patched: set[int] = field(default_factory=set)

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def tensor_at(self, address: int) -> str:
        """Parameter name of the tensor that an address lies in, or "?"."""
        for name, t in self.tensors.items():
            if 0 <= address - t.data_ptr() < span(t) * t.element_size():
                return name
        return "?"


def span(t: torch.Tensor) -> int:
    """Elements from a tensor's first to past its last, gaps between its strides included."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


class Observer:
    """Override what you need. Addresses are uint64 arrays, one per lane, `mask` says which act."""

    def launch(self, launch: Launch) -> None: ...

    def program(self, launch: Launch) -> bool:
        """Called before each program; False skips it."""
        return True

    def load(self, launch: Launch, address: np.ndarray, mask: np.ndarray, itemsize: int): ...

    def store(self, launch: Launch, address: np.ndarray, mask: np.ndarray, itemsize: int): ...

    def dot(self, launch: Launch, m: int, n: int, k: int) -> None: ...


@dataclass
class _State:
    observers: list[Observer] = field(default_factory=list)
    launch: Launch | None = None


_state = _State()


def unavailable() -> str | None:
    """Why kernels cannot be watched here, or None if they can."""
    here = runtime.setup()
    if not here.has_triton:
        return "Triton is not installed"
    if not here.interpret:
        return "kernels run on the GPU; watching them needs Triton's CPU interpreter"
    return _moved()


@functools.cache
def _moved() -> str | None:
    return triton_private.moved(triton_private.INTERPRET)


@contextlib.contextmanager
def observe(*observers: Observer):
    """Reports what kernels do to `observers` while the block runs. May be nested.

    Raises:
        RuntimeError: kernels cannot be watched here; the message is that of `unavailable`.
    """
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)
    outermost = not _state.observers
    before = list(_state.observers)
    _state.observers = before + list(observers)
    with _patched() if outermost else contextlib.nullcontext():
        try:
            yield
        finally:
            _state.observers = before


def warm_up() -> None:
    """Rewrites the functions of tl that most kernels call, as each process does at its first call.

    Only a matter of time (12 ms in each fork): where a release has moved it, nothing is lost.
    """
    from triton import language as tl

    for name in ("zeros", "max", "sum"):
        rewrite = getattr(getattr(tl, name, None), "rewrite", None)
        if callable(rewrite):
            rewrite()


class _WatchedMemory:
    """Stands in for the interpreter's memory functions; reports each access before it happens."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def load(self, address, mask, other, dtype):
        _tell("load", address, mask := _boolean(mask), np.dtype(dtype).itemsize)
        return self._inner.load(address, mask, other, dtype)

    def store(self, address, value, mask):
        _tell("store", address, mask := _boolean(mask), value.dtype.itemsize)
        return self._inner.store(address, value, mask)

    def atomic_rmw(self, op, address, value, mask, semantic):
        _tell("load", address, mask := _boolean(mask), value.dtype.itemsize)
        _tell("store", address, mask, value.dtype.itemsize)
        return self._inner.atomic_rmw(op, address, value, mask, semantic)

    def atomic_cas(self, address, expected, value, semantic):
        mask = np.ones(address.shape, dtype=bool)
        _tell("load", address, mask, value.dtype.itemsize)
        _tell("store", address, mask, value.dtype.itemsize)
        return self._inner.atomic_cas(address, expected, value, semantic)


def _boolean(mask):
    """A mask joined with a scalar comparison is int32 in the interpreter, which 3.9 refuses."""
    return np.asarray(mask, dtype=bool)


def _tell(event, address, mask, itemsize):
    address = np.asarray(address)
    mask = np.broadcast_to(mask, address.shape)
    for observer in _state.observers:
        getattr(observer, event)(_state.launch, address, mask, itemsize)


class _WatchedKernel:
    """Stands in for the kernel's function: asks the observers about each program, then runs it."""

    def __init__(self, fn, launch, builder):
        self.__signature__ = inspect.signature(fn)
        self.__name__ = fn.__name__
        self.__globals__ = fn.__globals__
        self._fn, self._launch, self._builder = fn, launch, builder
        self._announced = False

    def __call__(self, *args, **kwargs):
        launch = self._launch
        launch.program = tuple(map(int, self._builder.grid_idx))
        if not self._announced:
            self._announced = True
            launch.grid = tuple(map(int, self._builder.grid_dim))
            for observer in _state.observers:
                observer.launch(launch)
        if all([observer.program(launch) for observer in _state.observers]):
            self._fn(*args, **kwargs)


@contextlib.contextmanager
def _patched():
    from triton import language as tl
    from triton.runtime import interpreter as ti

    builder = ti.interpreter_builder
    memory, call, dot = ti._interpreter, ti.GridExecutor.__call__, builder.create_dot
    masked_load = builder.create_masked_load
    patch = getattr(ti, "_patch_lang", None)
    of_type, types = ti._get_np_dtype, {}
    rewriter = getattr(ti, "FunctionRewriter", None)
    place = getattr(rewriter, "_get_jit_fn_file_line", None)

    def numpy_type(of):
        """Each call makes a table of all types; a tile's type is named after its elements' type."""
        found = types.get(of.name)
        if found is None:
            found = types[of.name] = of_type(of)
        return found

    make_type, kinds = tl.block_type.__init__, {}

    def type_of_tile(tile_type, element_ty, shape):
        """Each operation makes the type of its result anew; a kernel has few different ones."""
        try:
            kind = element_ty.name, *shape
            known = kind in kinds
        except (AttributeError, TypeError):  # no type, or a size that is none: Triton says so
            return make_type(tile_type, element_ty, shape)
        if not known:
            make_type(tile_type, element_ty, shape)
            kinds[kind] = dict(vars(tile_type))
        vars(tile_type).update(kinds[kind])
        return None

    make_tensor, tensors = tl.tensor.__init__, {}

    def tensor_of_type(tensor, handle, type):
        """Shape, size and dtype are those of its type: they are worked out once for each type."""
        name = getattr(type, "name", None)
        if name in tensors:
            vars(tensor).update(tensors[name], handle=handle, type=type)
            return
        make_tensor(tensor, handle, type)
        if name is not None:
            tensors[name] = {key: value for key, value in vars(tensor).items() if key != "handle"}

    def patch_once(fn):
        """Each call of a @jit function in a kernel does again what one for its module has done.

        Skipping that saves a quarter of the time.
        """
        module = id(fn.__globals__)
        if _state.launch is None or module not in _state.launch.patched:
            scope = patch(fn)
            if _state.launch is not None:
                _state.launch.patched.add(module)
            return scope

    def place_of_def(rewriter):
        """(file, line): Triton makes a JITFunction for it, a third of the whole rewriting."""
        code = rewriter.fn.__code__
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        before = itertools.takewhile(lambda line: not line.strip().startswith("def "), lines)
        return code.co_filename, code.co_firstlineno + len(list(before))

    def watched_call(executor, *args, **kwargs):
        named = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
        named = {name: getattr(t, "base", t) for name, t in named.items()}  # of a host descriptor
        tensors = {name: t for name, t in named.items() if isinstance(t, torch.Tensor)}
        fn, outer = executor.fn, _state.launch
        launch = Launch(fn.__name__, tensors, (0, 0, 0))
        _state.launch, executor.fn = launch, _WatchedKernel(fn, launch, builder)
        try:
            return call(executor, *args, **kwargs)
        finally:
            _state.launch, executor.fn = outer, fn

    def watched_dot(a, b, *args, **kwargs):
        *batch, m, k = a.data.shape
        for observer in _state.observers:
            observer.dot(_state.launch, m * int(np.prod(batch, dtype=int)), b.data.shape[-1], k)
        return dot(a, b, *args, **kwargs)

    def poisoned_load(pointers, mask, other, *args, **kwargs):
        """A masked load without `other` gives 0 here and anything on a GPU: NaN shows its use.

        Not of a single element: Triton asks whether `other` is true, and there 0.0 arrives as None.
        """
        element = pointers.get_element_ty()
        wide = element.is_floating() and element.primitive_bitwidth >= 16
        if other is None and wide and pointers.data.size > 1:
            dtype = ti._get_np_dtype(element)
            if np.issubdtype(dtype, np.floating):
                data = np.full_like(pointers.data, np.nan, dtype=dtype)
                other = ti.TensorHandle(data, element)
        return masked_load(pointers, mask, other, *args, **kwargs)

    ti._interpreter, ti.GridExecutor.__call__ = _WatchedMemory(memory), watched_call
    swapped = {"create_dot": watched_dot, "create_masked_load": poisoned_load}
    if hasattr(builder, "create_maxnumf") and hasattr(builder, "binary_op"):
        # tl.maximum and tl.minimum: a GPU's give the other one of a number and NaN, NumPy's NaN.
        swapped["create_maxnumf"] = lambda a, b: builder.binary_op(a, b, np.fmax)
        swapped["create_minnumf"] = lambda a, b: builder.binary_op(a, b, np.fmin)
    for name, function in swapped.items():
        setattr(builder, name, function)
    if patch:
        ti._patch_lang = patch_once
    if place:
        rewriter._get_jit_fn_file_line = place_of_def
    ti._get_np_dtype, tl.block_type.__init__ = numpy_type, type_of_tile
    tl.tensor.__init__ = tensor_of_type
    try:
        yield
    finally:
        ti._interpreter, ti.GridExecutor.__call__ = memory, call
        ti._get_np_dtype, tl.block_type.__init__ = of_type, make_type
        tl.tensor.__init__ = make_tensor
        for name in swapped:
            delattr(builder, name)
        if patch:
            ti._patch_lang = patch
        if place:
            rewriter._get_jit_fn_file_line = place
