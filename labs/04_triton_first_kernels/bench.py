"""What `python -m labs bench 04` compares: one pass over memory against two and three.

Formulas are those of the handout, in bytes, for elements of e bytes.
"""

from __future__ import annotations

import functools
import math

import torch

from labs._harness.bench import Provider, Sweep, fit

LENGTHS = [2**n for n in (14, 18, 22, 26, 28)]
COUNTED_LENGTHS = [1000, 10_000, 100_000]
COLUMNS, COUNTED_COLUMNS = [1000, 1024, 4096, 16384], [100, 1000, 1024]
ROWS, COUNTED_ROWS = 16_384, 64
SIDES, COUNTED_SIDES = [1024, 4096, 8192, 16384], [64, 100, 256]
WIDER = 64  # columns that a matrix of the copy has more than rows: its shape tells it from its view
BLOCK_M = 32  # of bias_silu, its default
YOURS = "yours (Triton)"

GRID = {"block": (256, 1024, 4096), "block_n": (32, 64, 128)}


def timed(fk, options, gpu) -> list[Sweep]:
    """What to time on a GPU. Everything here is bound by memory: the unit is TB/s."""
    dtype = getattr(torch, options.dtype or "float32")
    e = dtype.itemsize
    rows = fit(ROWS, 5 * e * max(COLUMNS), gpu)
    add = _add(fk, options.lengths or LENGTHS, dtype, gpu.device)
    copy = _copy(fk, options.lengths or SIDES, dtype, gpu.device)
    silu = _silu(fk, options.lengths or COLUMNS, dtype, gpu.device, rows)
    return [add, copy, silu]


def counted(fk, options) -> list[Sweep]:
    """What to count without a GPU: the same code, at sizes that the interpreter can run."""
    dtype = getattr(torch, options.dtype or "float32")
    add = _add(fk, options.lengths or COUNTED_LENGTHS, dtype, "cpu")
    copy = _copy(fk, options.lengths or COUNTED_SIDES, dtype, "cpu")
    silu = _silu(fk, options.lengths or COUNTED_COLUMNS, dtype, "cpu", COUNTED_ROWS)
    return [add, copy, silu]


def launches(fk, block_m=64, block_n=64, block=1024, columns=1024, dtype="float16") -> dict:
    """Launcher name -> a call that launches its kernel once, for the X-ray to compile."""
    kind = getattr(torch, dtype)
    x = torch.empty(4 * block_m, columns, dtype=kind)
    v = torch.empty(4 * block, dtype=kind)
    tile = {"block_m": block_m, "block_n": block_n}
    return {
        "vector_add": lambda: fk.vector_add(v, v, block),
        "row_sum": lambda: fk.row_sum(x),
        "copy_2d": lambda: fk.copy_2d(x.t(), **tile),
        "bias_silu": lambda: fk.bias_silu(x, x[0], **tile),
        "row_max": lambda: fk.row_max(x, block),
    }


# ---------------------------------------------------------------- sweeps
def _add(fk, sizes, dtype, device) -> Sweep:
    e = dtype.itemsize

    def moved(n):
        return 3 * e * n  # x and y read, the sum written

    cost = {"moved": moved, "peak": lambda n: e * n}
    return Sweep(
        name="add",
        title=f"Sum of two vectors, {str(dtype)[6:]}",
        axis="N",
        sizes=sizes,
        inputs=functools.partial(_vectors, dtype, device),
        providers=[
            Provider(YOURS, fk.vector_add, yours=True, kernel=True, **cost),
            Provider("torch.add", torch.add, **cost),
        ],
        verify=functools.partial(_error, torch.add),
        unit="TB/s",
        work=moved,
        ceiling="copy",
    )


def _copy(fk, sizes, dtype, device) -> Sweep:
    e = dtype.itemsize

    def moved(n):
        return 2 * e * n * (n + WIDER)  # read once, written once

    cost = {"moved": moved, "peak": lambda n: e * n * (n + WIDER)}
    return Sweep(
        name="copy",
        title=f"Copy of a matrix of n rows and n + {WIDER} columns, {str(dtype)[6:]}",
        axis="n",
        sizes=sizes,
        inputs=functools.partial(_matrix, dtype, device),
        providers=[
            Provider("yours, straight", fk.copy_2d, yours=True, kernel=True, **cost),
            Provider(
                "yours, transposed", lambda x: fk.copy_2d(x.t()), yours=True, kernel=True, **cost
            ),
            Provider("torch, straight", torch.clone, **cost),
            Provider("torch, transposed", lambda x: x.t().contiguous(), **cost),
        ],
        verify=lambda inputs, y: _error(
            lambda x: x if y.shape == x.shape else x.t(), inputs, y, budget=0.0
        ),
        unit="TB/s",
        work=moved,
        ceiling="copy",
    )


def _silu(fk, sizes, dtype, device, M) -> Sweep:
    e = dtype.itemsize
    return Sweep(
        name="bias_silu",
        title=f"SiLU of x + bias, {M:,} rows, {str(dtype)[6:]}",
        axis="columns",
        sizes=sizes,
        inputs=functools.partial(_rows_and_bias, M, dtype, device),
        providers=[
            Provider(
                YOURS,
                fk.bias_silu,
                yours=True,
                kernel=True,
                moved=lambda N: e * (2 * M * N + math.ceil(M / BLOCK_M) * N),
                peak=lambda N: e * M * N,
            ),
            Provider(
                "2 PyTorch operations",
                lambda x, bias: torch.nn.functional.silu(x + bias),
                moved=lambda N: e * (4 * M * N + N),  # x + bias, silu
                peak=lambda N: e * 2 * M * N,
            ),
            Provider(
                "3 PyTorch operations",
                fk.bias_silu_unfused,
                moved=lambda N: e * (7 * M * N + N),  # x + bias, sigmoid, product of two
                peak=lambda N: e * 3 * M * N,
            ),
        ],
        verify=functools.partial(_error, lambda x, bias: torch.nn.functional.silu(x + bias)),
        unit="TB/s",
        work=lambda N: e * 2 * M * N,  # what one pass needs, whoever moves more
        ceiling="copy",
    )


# ---------------------------------------------------------------- inputs and oracle
def _vectors(dtype, device, n):
    generator = torch.Generator(device).manual_seed(n)
    return tuple(torch.randn(n, dtype=dtype, device=device, generator=generator) for _ in "xy")


def _matrix(dtype, device, n):
    generator = torch.Generator(device).manual_seed(n)
    return (torch.randn(n, n + WIDER, dtype=dtype, device=device, generator=generator),)


def _rows_and_bias(M, dtype, device, columns):
    generator = torch.Generator(device).manual_seed(columns)
    shapes = (M, columns), (columns,)
    return tuple(torch.randn(*s, dtype=dtype, device=device, generator=generator) for s in shapes)


def _error(reference, inputs, y, budget=None) -> tuple[float, float]:
    """(largest error over the largest right value, budget 8 ulp), against float64.

    A part is compared: at most 2**20 elements from the beginning of the first axis, and as many
    from its end.
    """
    budget = 8 * torch.finfo(inputs[0].dtype).eps if budget is None else budget
    want = reference(*inputs)  # for its shape
    if not isinstance(y, torch.Tensor) or y.shape != want.shape:
        return math.inf, budget
    few = max(1, 2**20 // max(1, want[0].numel()))
    errors = []
    for part in (slice(None, few), slice(-few, None)):
        cut = [t[part] if t.dim() == want.dim() else t for t in inputs]
        right = (want[part] if budget == 0.0 else reference(*(t.double() for t in cut))).double()
        errors.append((y[part].double() - right).abs().max() / right.abs().max())
    return max(error.item() for error in errors), budget
