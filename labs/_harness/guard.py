"""What a submission may not do, and what is watched while it runs.

This keeps people from fooling themselves. It is not a sandbox: it does not stop code that sets out
to get around it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from labs import _impl
from labs._harness import interpreter, memory, oracle, runtime, work


class Finding(AssertionError):
    """A submission did what the lab rules out; the message says what and why."""


class _Watch(work.TorchWork):
    """Counts PyTorch's work and notes what is not allowed."""

    def __init__(self, row_limit: int | None, poison: bool):
        super().__init__()
        self.row_limit = row_limit
        self.poison = poison  # torch.empty and its kin give NaN, so an unwritten output shows
        self.findings: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = work.operation(func).name
        if not _judged(name):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if "attention" in name:
            self.findings.append(f"calls PyTorch's own attention ({name}): write it yourself")
        if self.row_limit is not None and any(part in name for part in _OF_ROWS):
            length = _reduced_length(args)
            if length > self.row_limit:
                self.findings.append(
                    f"calls {name} over {length} elements of a row; this function sees at most "
                    f"{self.row_limit} of them at a time"
                )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.poison and name in _UNINITIALISED:
            memory.poison(result)
        return result


def poisoned():
    """Within the block torch.empty and its kin give NaN."""
    return _Watch(None, poison=True)


_OF_ROWS = ("softmax", "logsumexp")
_UNINITIALISED = {
    f"aten.{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
}


@functools.cache
def _judged(name: str) -> bool:
    """Whether _Watch has anything to do with an operation; most have another name."""
    return name in _UNINITIALISED or any(part in name for part in ("attention", *_OF_ROWS))


def _reduced_length(args) -> int:
    """Elements that softmax(x, dim, ...) or logsumexp(x, dims, ...) reduces over."""
    x, dims = args[0], args[1] if len(args) > 1 else -1
    length = 1
    for dim in [dims] if isinstance(dims, int) else dims:
        length *= x.shape[dim] if x.dim() else 1
    return length


class Guarded:
    """A lab's module whose functions run under guard.

    A call raises Finding when it does what is ruled out, StrayAccess when a kernel leaves its
    tensors, and else returns what the function returns. Afterwards `work` and `kernels` hold what
    that last call did.

    Attributes:
        file: where the code was loaded from.
        row_limits: function name -> most elements of a row that torch's softmax or logsumexp may
            see in it: a number, or the name of the argument that says. Others may see any number.
        work: TorchWork of the last call.
        kernels: KernelWork of the last call; None where kernels cannot be watched.
        last_call: (name, args, kwargs, result) of the last call that returned.
    """

    def __init__(self, file: Path, load, row_limits: dict[str, int | str] | None = None):
        self.file = file
        self.row_limits = row_limits or {}
        self.work: work.TorchWork | None = None
        self.kernels: work.KernelWork | None = None
        self.last_call: tuple | None = None
        self._skip: interpreter.Observer | None = None
        with self._reading():
            self._module = load()

    def __getattr__(self, name):
        value = getattr(self._module, name)
        if not inspect.isfunction(value):
            return value

        @functools.wraps(value)
        def call(*args, **kwargs):
            with self.guarded(name, self._row_limit(value, args, kwargs), inputs=(args, kwargs)):
                result = value(*args, **kwargs)
            self.last_call = name, args, kwargs, result
            return result

        return call

    def _row_limit(self, function, args, kwargs) -> int | None:
        limit = self.row_limits.get(function.__name__)
        if isinstance(limit, str):
            try:
                bound = inspect.signature(function).bind(*args, **kwargs)
            except TypeError:
                return None  # the call itself will say what is wrong with the arguments
            bound.apply_defaults()
            limit = bound.arguments.get(limit)
        return limit

    @contextlib.contextmanager
    def guarded(self, name: str, row_limit: int | None = None, inputs=(), engine_calls: int = 0):
        """Watches the block as a call of `name`.

        Args:
            name: what to call it in messages.
            row_limit: see the class.
            inputs: anything holding tensors or NumPy arrays that the block must not modify.
            engine_calls: how often the block may start the autograd engine.
        """
        leaves = tree_leaves(inputs)
        arrays = [(n, a, a.copy()) for n, a in enumerate(leaves) if isinstance(a, np.ndarray)]
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        before = [t.detach().clone() if t.numel() < 1 << 24 else None for t in tensors]
        versions = [t._version for t in tensors]
        watch = _Watch(row_limit, poison=not isinstance(self._skip, memory.LastProgramOnly))
        access, kernels = memory.AccessCheck(), work.KernelWork()
        self.work, self.kernels = watch, None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._reading())
            if self._skip is not None:
                stack.enter_context(interpreter.observe(self._skip))
            stack.enter_context(_engine(watch, engine_calls))
            if interpreter.unavailable() is None:
                self.kernels = kernels
                stack.enter_context(interpreter.observe(kernels, access))
            stack.enter_context(watch)
            yield
        findings = access.findings + watch.findings
        for number, (t, old) in enumerate(zip(tensors, before, strict=True)):
            if t._version != versions[number] or (old is not None and not _same(t.detach(), old)):
                findings.append(f"modifies its input number {number} (shape {tuple(t.shape)})")
        for number, a, old in arrays:
            if not np.array_equal(a, old, equal_nan=a.dtype.kind in "fc"):
                findings.append(f"modifies its argument number {number} (shape {a.shape})")
        if _harness_code() != _HARNESS_CODE:
            findings.append("changes the code that checks it (labs._harness)")
        if findings:
            raise Finding(f"{name}: {findings[0]}")

    def last_program_only(self):
        """Within the block kernels run their last program only, and outputs stay lazily allocated.

        So offsets beyond 2**31 are reached without the memory and the time of getting there.
        """
        return self._skipping(memory.LastProgramOnly())

    def no_program(self):
        """Within the block kernels are launched and run no program: outputs stay unwritten."""
        return self._skipping(memory.NoProgram())

    @contextlib.contextmanager
    def _skipping(self, observer):
        self._skip = observer
        try:
            yield
        finally:
            self._skip = None

    @contextlib.contextmanager
    def _reading(self):
        """Refuses to open a lab's solution.py (or its compiled form) for other implementations."""
        if self.file.name == "solution.py" and self.file.is_relative_to(_impl.LABS):
            yield
            return
        _install_audit_hook()
        before, _audit.watching = _audit.watching, True
        try:
            yield
        finally:
            _audit.watching = before


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


@contextlib.contextmanager
def _engine(watch: _Watch, allowed: int):
    """Notes each start of the autograd engine beyond `allowed`."""
    inner = torch.autograd._engine_run_backward
    starts = 0

    def run(*args, **kwargs):
        nonlocal starts
        starts += 1
        if starts > allowed:
            watch.findings.append("calls autograd: the gradients are yours to write")
        return inner(*args, **kwargs)

    torch.autograd._engine_run_backward = run
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = inner


class _Audit:
    installed = False
    watching = False


_audit = _Audit()


def _install_audit_hook():
    if _audit.installed:
        return
    _audit.installed = True  # an audit hook cannot be removed; `watching` turns it off

    def hook(event, args):
        if not _audit.watching:
            return
        if event in _OTHER_PROGRAMS and runtime.setup().interpret:  # a GPU's compiler is one, too
            raise Finding("starts another program: what it does cannot be watched")
        if event != "open" or not isinstance(args[0], (str, bytes)):
            return
        path = Path(os.path.realpath(os.fsdecode(args[0])))
        if path.name == "solution.py" or (
            path.parent.name == "__pycache__" and path.name.startswith("solution.")
        ):
            raise Finding(f"opens {path.name}, the reference: write your own")

    sys.addaudithook(hook)


_OTHER_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")


_JUDGES_USE = ("where", "equal", "allclose", "isfinite", "unravel_index", "exp", "tensor")


def _harness_code() -> dict[str, object]:
    """Every function of the modules that judge, by name: what a submission must leave alone."""
    code = {name: getattr(torch, name) for name in _JUDGES_USE}
    for module in (oracle, memory, work, interpreter, sys.modules[__name__]):
        for name, value in vars(module).items():
            if inspect.isfunction(value) or inspect.isclass(value):
                code[f"{module.__name__}.{name}"] = value
            if inspect.isfunction(value):
                code[f"{module.__name__}.{name}.code"] = value.__code__
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for method, function in vars(value).items():
                    if inspect.isfunction(function):
                        code[f"{module.__name__}.{name}.{method}"] = function.__code__
    return code


_HARNESS_CODE = _harness_code()
