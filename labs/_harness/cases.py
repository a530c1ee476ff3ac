"""Marks and parameters that the labs' kernel tests share."""

from __future__ import annotations

import pytest
import torch

from labs._harness import compiler, memory, oracle, runtime, xray

_here = runtime.setup()

needs_triton = pytest.mark.skipif(not _here.has_triton, reason="Triton is not installed")
interpreter_only = pytest.mark.skipif(
    not _here.interpret, reason="counted in Triton's CPU interpreter (TRITON_INTERPRET=1)"
)
needs_compiler = pytest.mark.skipif(
    compiler.unavailable() is not None, reason=str(compiler.unavailable())
)
kernel_dtypes = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                _here.interpret, reason="the interpreter computes bfloat16 as raw integer bits"
            ),
        ),
    ],
    ids=str,
)


def step(number: int, *marks):
    """A decorator for a test that belongs to a step and carries these marks, too."""

    def decorate(test):
        for mark in marks:
            test = mark(test)
        return pytest.mark.step(number)(test)

    return decorate


def fenced_qkv(*args, **kwargs) -> tuple[torch.Tensor, ...]:
    """q, k, v of `oracle.qkv`, each between red zones."""
    return tuple(memory.fenced(x) for x in oracle.qkv(*args, **kwargs))


def check_kept(results, kept) -> None:
    """A first call's results are what they were (`kept`, copies of them), after a later call."""
    for got, old in zip(results, kept, strict=True):
        changed = (got != old).sum().item()
        assert changed == 0, (
            f"a later call must not write into the first one's result: want 0 numbers changed, "
            f"got {changed} of {got.numel()}"
        )


def check_not_written(**results) -> None:
    """What a launcher returned by name, when no program of its kernels ran, is NaN throughout."""
    for name, x in results.items():
        numbers = x.numel() - x.isnan().sum().item()
        assert numbers == 0, (
            f"no program ran, so {name} is not written: want 0 numbers, got {numbers}; only the "
            "kernel may write it"
        )


def check_compiles(lab, request, launcher: str, *contains: str, **options) -> list:
    """`xray.check` of the code under test; results are kept, but not with -p no:cacheprovider."""
    cached = hasattr(request.config, "cache")
    return xray.check(request.path, lab.file, launcher, cached, contains=contains, **options)
