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
import types
from dataclasses import dataclass

import numpy as np
import torch

from labs._harness import gluon_operations, runtime, triton_private
from labs._harness.gluon_memory import Descriptor
from labs._harness.gluon_program import Program, Work, entered
from labs._harness.gluon_values import Int, Pointer, Unsupported

MULTIPROCESSORS = 3  # of the emulated card: few, so that persistent programs have several tiles


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


def _modules():
    """(module of Gluon, what is emulated of it), the module that re-exports another one first."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

    return (
        (gl, gluon_operations.GL),
        (hopper, gluon_operations.HOPPER),
        (hopper.mbarrier, gluon_operations.MBARRIER),
        (hopper.tma, gluon_operations.TMA),
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
    names = list(jit.arg_names)
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    grid = grid(given) if callable(grid) else grid
    grid = tuple(int(n) for n in (*grid, 1, 1)[:3])
    constants = {p.name for p in jit.params if p.is_constexpr}
    values = {k: v if k in constants else _argument(k, v) for k, v in given.items()}
    function = _emulated(jit, {})
    for x in range(grid[0]):
        for y in range(grid[1]):
            for z in range(grid[2]):
                warps, work = kwargs.get("num_warps", 4), _active.work
                program = Program(function, _active.seed, work, (x, y, z), grid, warps)
                with entered(program):
                    function(**values)
                    program.end_of(program.current)
                    program.finish()
    written = _active.work.written
    written |= {place: (now, now.clone()) for place, (now, _) in written.items()}
