"""Known-good kernels for `python -m labs doctor`: copy, masked load, loop, dot.

Run as a program, in a child process, so that a crash is a report:

    python -m labs._harness.selftest float32:copy float32:dot

It prints one JSON line when a case starts and one when it ends. The numbers are small integers,
which every dtype and every tensor-core mode computes exactly, so each result must be equal.
"""

from __future__ import annotations

import json
import sys

import torch

import labs  # noqa: F401  decides where kernels run, before Triton is imported
from labs._harness import runtime

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _masked_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n, other=-1.0))


@triton.jit
def _loop_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    end = tl.minimum(n, (tl.program_id(0) + 1) * 3 * BLOCK)  # known only when the kernel runs
    for start in range(0, end, BLOCK):
        acc += tl.load(x_ptr + start + offs, mask=start + offs < n, other=0.0).to(tl.float32)
    tl.store(y_ptr, tl.sum(acc))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    a = tl.load(a_ptr + rows * BLOCK + cols)
    b = tl.load(b_ptr + rows * BLOCK + cols)
    tl.store(c_ptr + rows * BLOCK + cols, tl.dot(a, b))


def _copy(dtype, device):
    x = torch.arange(64, dtype=dtype, device=device)
    y = torch.full_like(x, float("nan"))
    _copy_kernel[(4,)](x, y, BLOCK=16)
    return y, x


def _masked(dtype, device):
    x = torch.arange(16, dtype=dtype, device=device)
    y = torch.full_like(x, float("nan"))
    _masked_kernel[(1,)](x, y, 11, BLOCK=16)
    return y, torch.where(torch.arange(16, device=device) < 11, x, -torch.ones_like(x))


def _loop(dtype, device):
    x = torch.arange(37, device=device).to(dtype)
    y = torch.full((1,), float("nan"), dtype=torch.float32, device=device)
    _loop_kernel[(1,)](x, y, 37, BLOCK=16)
    return y, x.sum(dtype=torch.float32).reshape(1)


def _dot(dtype, device):
    i = torch.arange(16, device=device)
    a = ((i[:, None] * 3 + i[None, :]) % 5 - 2).to(dtype)
    b = ((i[:, None] + i[None, :] * 2) % 7 - 3).to(dtype)
    c = torch.full((16, 16), float("nan"), dtype=torch.float32, device=device)
    _dot_kernel[(1,)](a, b, c, BLOCK=16)
    return c, (a.double().cpu() @ b.double().cpu()).float().to(device)


KERNELS = {"copy": _copy, "masked load": _masked, "loop": _loop, "dot": _dot}


def run_case(dtype_name: str, kernel: str, device: str) -> str | None:
    """Runs one kernel. Returns None if its result is right, else what was wrong in one line."""
    got, want = KERNELS[kernel](getattr(torch, dtype_name), device)
    if torch.equal(got, want):
        return None
    index = (got != want).nonzero()[0].tolist()
    at = tuple(index)
    return f"wrong numbers: at {index} got {got[at].item():g}, want {want[at].item():g}"


def main(argv: list[str]) -> int:
    here = runtime.setup()
    failed = False
    for case in argv:
        print(json.dumps({"case": case}), flush=True)
        try:
            error = here.problem or run_case(*case.split(":"), here.device)
        except Exception as exception:  # whatever Triton raises is what we are here to report
            while exception.__cause__ is not None:
                exception = exception.__cause__
            error = f"{type(exception).__name__}: {' '.join(str(exception).split())}"
        failed |= error is not None
        print(json.dumps({"case": case, "error": error}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
