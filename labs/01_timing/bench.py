"""What `python -m labs bench 01` compares: two ways to be fooled, beside the ways not to be.

copy: the same copy again and again, between two buffers that stay in L2, and through as many sets
of buffers as your buffers_to_defeat_cache asks for. A set moves 2 bytes for each byte of its x.
data: the same matrix product of random numbers and of zeros (on a GPU only).
"""

from __future__ import annotations

import functools
import math

import torch

from labs._harness.bench import Provider, Sweep

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]  # MiB of x
COUNTED_SIZES = [1, 4, 16]
PRODUCTS = [1024, 2048, 4096, 8192]
EXAMPLE_L2 = 32 << 20  # bytes; the handout's card, where there is none
SAME, YOURS = "same buffers", "yours (in turn)"


def timed(module, options, gpu) -> list[Sweep]:
    """What to time on a GPU: copies against their size, and products against theirs."""
    l2 = torch.cuda.get_device_properties(gpu.device).L2_cache_size
    copy = _copies(module, options.lengths or SIZES, l2, gpu.device)
    data = Sweep(
        name="data",
        title="Matrix product, bfloat16, square",
        axis="n",
        sizes=PRODUCTS,
        inputs=functools.partial(_factors, gpu.device),
        providers=[
            Provider("random numbers", lambda a, b, zeros: a @ b),
            Provider("zeros", lambda a, b, zeros: zeros @ zeros, checked=False),
        ],
        verify=_product_error,
        unit="TFLOP/s",
        work=lambda n: 2 * n**3,
    )
    return [copy, data]


def counted(module, options) -> list[Sweep]:
    """What to count without a GPU: bytes moved, and the memory that the sets of buffers take."""
    return [_copies(module, options.lengths or COUNTED_SIZES, EXAMPLE_L2, "cpu")]


def _copies(module, sizes, l2, device) -> Sweep:
    """Copies of one set of buffers, and of as many as the code under test asks for."""
    made = _make_sets if device == "cpu" else _ready_sets

    def provider(name, how_many, right, yours=False):
        return Provider(
            name,
            functools.partial(_run, made, l2, how_many),
            yours=yours,
            moved=lambda mib: (_copies_a_run(mib, l2) + right(mib)) * (2 * mib << 20),
            peak=lambda mib: right(mib) * (2 * mib << 20),
        )

    def asked(each):
        return module.buffers_to_defeat_cache(each, l2)

    return Sweep(
        name="copy",
        title=f"Copies one after the other, float32, L2 cache of {l2 / 2**20:.0f} MiB",
        axis="MiB",
        sizes=sizes,
        inputs=functools.partial(_buffers, l2, device),
        providers=[
            provider(SAME, lambda each: 1, lambda mib: 1),
            provider(YOURS, asked, lambda mib: _sets(mib, l2), yours=True),
        ],
        verify=_copy_error,
        unit="TB/s",
        work=lambda mib: _copies_a_run(mib, l2) * (2 * mib << 20),
        ceiling="copy",
    )


def _sets(mib, l2) -> int:
    """How many sets it takes; a set moves 2 * mib MiB."""
    return 1 + math.ceil(l2 / (2 * mib << 20))


def _copies_a_run(mib, l2) -> int:
    """Each set twice, and 8 copies at least."""
    return max(8, 2 * _sets(mib, l2))


def _buffers(l2, device, mib):
    """On a GPU all x, then all y, with the same random numbers in each x; on the CPU one x."""
    x = torch.randn(mib << 18, device=device)
    sets = range(_sets(mib, l2) if device != "cpu" else 0)
    return x, *(x.clone() for _ in sets), *(torch.empty_like(x) for _ in sets)


def _run(made, l2, how_many, x, *buffers):
    """Copies x to y, set after set in turn; returns the y written last."""
    mib = x.nbytes >> 20
    n = how_many(2 * x.nbytes)
    if not 1 <= n <= _sets(mib, l2):
        raise ValueError(f"want 1 to {_sets(mib, l2)} sets of buffers: got {n}")
    xs, ys = made(n, x, buffers)
    for i in range(_copies_a_run(mib, l2)):
        y = ys[i % n].copy_(xs[i % n])
    return y


def _ready_sets(n, x, buffers):
    """The first n of the sets that lie ready: making them is no part of the time."""
    half = len(buffers) // 2
    return buffers[:n], buffers[half : half + n]


def _make_sets(n, x, buffers):
    """n sets made here, so that their memory is counted."""
    return [x.clone() for _ in range(n)], [torch.empty_like(x) for _ in range(n)]


def _copy_error(buffers, y) -> tuple[float, float]:
    x = buffers[0]
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return math.inf, 0.0
    return (y - x).abs().max().item(), 0.0


def _factors(device, n):
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return a, b, torch.zeros_like(a)


def _product_error(inputs, got) -> tuple[float, float]:
    """(largest relative error of a row, budget) against float64, three rows of it."""
    a, b, _ = inputs
    rows = [0, a.shape[0] // 3, a.shape[0] - 1]
    want = a[rows].double() @ b.double()
    error = (got[rows].double() - want).norm(dim=1) / want.norm(dim=1)
    return error.max().item(), 4 * torch.finfo(a.dtype).eps
