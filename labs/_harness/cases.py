"""Marks and parameters that the labs' kernel tests share."""

from __future__ import annotations

import pytest
import torch

from labs._harness import compiler, runtime

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
