"""What `python -m labs bench 06` compares: attention forward, and the row softmax.

Formulas are those of the handout, in bytes, for N = B * H heads and elements of e bytes.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from labs._harness.bench import Check, Provider, Sweep, attention_error, fit, sdpa
from labs._harness.trace import Traced

LENGTHS = [256, 512, 1024, 2048, 4096, 8192]
COUNTED_LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096]
COLUMNS = [1000, 1024, 4096, 16384]
ROWS, COUNTED_ROWS = 32_768, 64
BACKENDS = {
    "SDPA FLASH": "FLASH_ATTENTION",
    "SDPA cuDNN": "CUDNN_ATTENTION",
    "SDPA EFFICIENT": "EFFICIENT_ATTENTION",
    "SDPA MATH": "MATH",
}
YOURS, TILED, NAIVE = "yours (Triton)", "yours (tiled PyTorch)", "naive"


def timed(ak, options, gpu) -> list[Sweep]:
    """What to time on a GPU: attention against sequence length, softmax against columns."""
    dtype = getattr(torch, options.dtype or "bfloat16")
    H, D, causal = options.heads or 16, options.head_dim, options.causal
    lengths = options.lengths or LENGTHS
    # q, k, v and outputs held while the next one is made; naive and MATH may still run out.
    wanted = options.batch or 8
    B = fit(wanted, 8 * H * max(lengths) * D * dtype.itemsize, gpu)
    if B < wanted:
        print(f"B={B} instead of {wanted}: the largest that fits in this card's free memory")
    inputs = functools.partial(_qkv, B, H, D, dtype, gpu.device)
    attention = Sweep(
        name="attention",
        title=_title(B, H, D, dtype, causal),
        axis="T",
        sizes=lengths,
        inputs=inputs,
        providers=[
            _flash(ak, options),
            *(sdpa(name, BACKENDS[name], causal) for name in BACKENDS),
            Provider(NAIVE, lambda q, k, v: ak.naive_attention(q, k, v, causal)),
            _tiled(ak, options, 128, 128),
        ],
        verify=functools.partial(attention_error, causal=causal),
        unit="TFLOP/s",
        work=lambda T: flops(B, H, T, D, causal),
        ceiling="matmul",
        tune=_configurations(ak, options) if options.tune else [],
        tuned=YOURS,
        cost=(YOURS, TILED, NAIVE, "SDPA FLASH"),
    )
    rows = fit(ROWS, 4 * 4 * max(COLUMNS), gpu)
    softmax = Sweep(
        name="softmax",
        title=f"Softmax of {rows:,} float32 rows",
        axis="columns",
        sizes=COLUMNS,
        inputs=functools.partial(_matrix, rows, gpu.device),
        providers=[
            Provider(YOURS, ak.triton_softmax, yours=True, kernel=True),
            Provider("torch.softmax", lambda x: torch.softmax(x, dim=-1)),
            Provider("copy", torch.clone, checked=False),
        ],
        verify=softmax_error,
        unit="TB/s",
        work=lambda columns: 2 * 4 * rows * columns,  # one read, one write
        ceiling="copy",
    )
    return [attention, softmax]


def counted(ak, options) -> list[Sweep]:
    """What to count without a GPU: the same code, at sizes that the interpreter can run."""
    dtype = getattr(torch, options.dtype or "float32")
    B, H, D, causal = options.batch or 1, options.heads or 1, options.head_dim, options.causal
    M, N = options.block_m, options.block_n
    e = dtype.itemsize
    sizes = functools.partial(dict, heads=B * H, D=D, e=e, causal=causal)
    tiled = _tiled(ak, options, M, N)
    tiles = sizes(block_m=M, block_n=N)
    attention = Sweep(
        name="attention",
        title=f"{_title(B, H, D, dtype, causal)}, tiles {M}x{N}",
        axis="T",
        sizes=options.lengths or COUNTED_LENGTHS,
        inputs=functools.partial(_qkv, B, H, D, dtype, "cpu"),
        providers=[
            Provider(
                NAIVE,
                lambda q, k, v: ak.naive_attention(q, k, v, causal),
                moved=functools.partial(naive_bytes, **sizes()),
                peak=functools.partial(naive_peak, **sizes()),
            ),
            Provider(
                TILED,
                tiled.run,
                yours=True,
                # In half precision each tile is also converted; the formula leaves that out.
                moved=functools.partial(tiled_bytes, **tiles) if e == 4 else None,
                peak=functools.partial(tiled_peak, **tiles) if e == 4 else None,
            ),
            Provider(
                YOURS,
                _flash(ak, options).run,
                yours=True,
                kernel=True,
                moved=functools.partial(kernel_bytes, **tiles),
                peak=functools.partial(kernel_peak, heads=B * H, D=D, e=e),
            ),
        ],
        verify=functools.partial(attention_error, causal=causal),
    )
    R = COUNTED_ROWS
    softmax = Sweep(
        name="softmax",
        title=f"Softmax of {R} float32 rows",
        axis="columns",
        sizes=COLUMNS,
        inputs=functools.partial(_matrix, R, "cpu"),
        providers=[
            Provider(
                "5 PyTorch operations",
                _unfused_softmax,
                moved=lambda C: 4 * (8 * R * C + 4 * R),  # max, subtract, exp, sum, divide
                peak=lambda C: 4 * (2 * R * C + R),
            ),
            Provider(
                YOURS,
                ak.triton_softmax,
                yours=True,
                kernel=True,
                moved=lambda C: 4 * 2 * R * C,  # each element read once, written once
                peak=lambda C: 4 * R * C,
            ),
        ],
        verify=softmax_error,
    )
    return [attention, softmax]


def check(ak, options, gpu) -> list[Check]:
    """Error within 1e-3 of SDPA MATH in fp16, and at least 3 times its speed at T=2048 in bf16."""
    math_ = sdpa("SDPA MATH", BACKENDS["SDPA MATH"], causal=True)
    tiles = dict(causal=True, block_m=options.block_m, block_n=options.block_n)
    q, k, v = _qkv(1, 8, 64, torch.float16, gpu.device, 1024)
    want = math_(q, k, v)
    got, _ = ak.triton_flash_attention(q, k, v, **tiles)
    error = (got.float() - want.float()).abs().max().item()
    shape = "B=1 H=8 T=1024 D=64 float16 causal"
    found = [
        Check(f"max abs error against MATH, {shape}", f"{error:.2g}", "<= 1e-3", error <= 1e-3)
    ]
    q, k, v = _qkv(8, 16, 64, torch.bfloat16, gpu.device, 2048)
    ms = gpu.medians(
        {
            "yours": lambda: ak.triton_flash_attention(q, k, v, **tiles),
            "math": lambda: math_(q, k, v),
        }
    )
    yours, baseline = ms.values()
    error, budget = attention_error(
        (q, k, v), ak.triton_flash_attention(q, k, v, **tiles)[0], causal=True
    )
    shape = "B=8 H=16 T=2048 D=64 bfloat16 causal"
    figure = f"{baseline / yours:.1f}x ({yours:.3f} ms against {baseline:.3f} ms)"
    return found + [
        Check(f"speed against MATH, {shape}", figure, ">= 3x", baseline >= 3 * yours),
        Check("relative error there", f"{error:.2g}", f"<= {budget:.2g}", error <= budget),
    ]


# ---------------------------------------------------------------- trace and X-ray
def traced(ak, options) -> list[Traced]:
    """What `python -m labs trace 06` can run: the kernel first, where it takes such tiles."""

    def forward(q, k, v):
        tiles = {"block_q": options.block_m, "block_k": options.block_n}
        return ak.flash_attention_forward(q, k, v, causal=options.causal, **tiles)

    def kernel(q, k, v):
        tiles = {"block_m": options.block_m, "block_n": options.block_n}
        return ak.triton_flash_attention(q, k, v, causal=options.causal, **tiles)

    step2 = Traced(2, "flash_attention_forward", forward, stats=ak.online_softmax_stats)
    step5 = Traced(5, "triton_flash_attention", kernel, True, stats=ak.online_softmax_stats)
    fits = all(b >= 16 and b & (b - 1) == 0 for b in (options.block_m, options.block_n))
    return [step5, step2] if fits else [step2, step5]


def launches(
    ak, block_m=64, block_n=64, num_warps=4, num_stages=2, head_dim=64, dtype="float16", causal=True
) -> dict:
    """Launcher name -> a call that launches its kernel once, for the X-ray to compile."""
    kind = getattr(torch, dtype)
    q = torch.empty(1, 2, 2 * block_m, head_dim, dtype=kind)
    tiles = {"block_m": block_m, "block_n": block_n}
    warps = {"num_warps": num_warps, "num_stages": num_stages}
    return {
        "triton_softmax": lambda: ak.triton_softmax(torch.empty(4, 1024, dtype=kind)),
        "triton_flash_attention": lambda: ak.triton_flash_attention(
            q, q, q, causal=causal, **tiles, **warps
        ),
    }


def shared_memory(arch, block_m, block_n, num_stages, head_dim, dtype="float16") -> int:
    """Bytes of shared memory a block of the reference's attention kernel takes, by formula.

    Holds for half dtypes and num_stages from 2 up. K and V are in flight num_stages times where
    wgmma reads them from shared memory (sm_90, from 64 rows up); mma.sync reads registers and
    needs one copy fewer, but P passes through shared memory where Q's tile is wider than high.
    """
    if arch == "sm_90" and block_m >= 64:
        return 2 * head_dim * (block_m + 2 * block_n * num_stages)
    through = 2 * block_m * block_n if head_dim > block_m else 0
    return 2 * head_dim * (block_m + 2 * block_n * (num_stages - 1)) + through


# ---------------------------------------------------------------- work and traffic
def flops(B, H, T, D, causal) -> float:
    """FLOP of the forward: two products of 2 B H T T D, half of them when causal."""
    return 4 * B * H * T * T * D / (2 if causal else 1)


def naive_bytes(T, heads, D, e, causal) -> int:
    """Scores: written by the product, read and written by scale, mask and softmax, read again.

    The causal mask itself (1 byte an element, one for all heads) is made, cut and read: 4 T^2.
    """
    passes = 1 + 2 + (2 if causal else 0) + 2 + 1
    return heads * e * (passes * T * T + 4 * T * D) + (4 * T * T if causal else 0)


def naive_peak(T, heads, D, e, causal) -> int:
    """Two copies of the scores are alive at once, with the mask and the output."""
    return heads * e * (2 * T * T + T * D) + (T * T if causal else 0)


def kernel_bytes(T, heads, D, e, causal, block_m, block_n) -> int:
    """Q once, K and V once per query tile (causal: up to the diagonal), out and lse once."""
    keys = 0
    for i0 in range(0, T, block_m):
        hi = min(T, i0 + block_m) if causal else T
        keys += min(T, math.ceil(hi / block_n) * block_n)
    return heads * (e * D * (2 * T + 2 * keys) + 4 * T)


def kernel_peak(T, heads, D, e) -> int:
    """Nothing but the outputs: out, and lse in float32."""
    return heads * (e * T * D + 4 * T)


def tiled_bytes(T, heads, D, e, causal, block_m, block_n) -> int:
    """The same tiles in PyTorch: every operation writes its tile to memory, the next one reads it.

    About 10 passes over the scores when causal (8 if not): no less traffic than naive.
    """
    total = 0
    for i0 in range(0, T, block_m):
        m = min(block_m, T - i0)
        hi = min(T, i0 + m) if causal else T
        total += heads * e * (7 * m * D + 10 * m)
        for j0 in range(0, hi, block_n):
            n = min(block_n, hi - j0)
            passes = 10 if causal else 8
            total += heads * e * (passes * m * n + D * (7 * m + 2 * n) + 18 * m)
            total += 16 * (m + n) + 2 * m * n if causal else 0  # the tile's mask
    return total


def tiled_peak(T, heads, D, e, causal, block_m, block_n) -> int:
    """The outputs and a handful of tiles, whatever T."""
    tiles = 0
    for i0 in range(0, T, block_m):
        m = min(block_m, T - i0)
        n = min(block_n, i0 + m if causal else T)
        tiles = max(tiles, 5 * m * D + 2 * m * n + 4 * m, 2 * m * D + 4 * m * n + 4 * m)
    return kernel_peak(T, heads, D, e) + heads * e * tiles


# ---------------------------------------------------------------- providers
def _flash(ak, options, **config) -> Provider:
    tiles = {"block_m": options.block_m, "block_n": options.block_n, "num_warps": options.num_warps}
    if options.num_stages:
        tiles["num_stages"] = options.num_stages
    tiles |= config
    text = f"{tiles['block_m']}x{tiles['block_n']} w{tiles['num_warps']}"
    text += f" s{tiles['num_stages']}" if "num_stages" in tiles else ""

    def run(q, k, v):
        return ak.triton_flash_attention(q, k, v, causal=options.causal, **tiles)[0]

    return Provider(YOURS, run, yours=True, kernel=True, config=text)


def _configurations(ak, options) -> list[Provider]:
    tiles = [(64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)]
    return [
        _flash(ak, options, block_m=m, block_n=n, num_warps=w, num_stages=s)
        for (m, n), w, s in itertools.product(tiles, (4, 8), (2, 3))
    ]


def _tiled(ak, options, block_q, block_k) -> Provider:
    def run(q, k, v):
        return ak.flash_attention_forward(q, k, v, options.causal, block_q, block_k)[0]

    return Provider(TILED, run, yours=True, config=f"{block_q}x{block_k}")


def _unfused_softmax(x):
    p = (x - x.amax(dim=-1, keepdim=True)).exp()
    return p / p.sum(dim=-1, keepdim=True)


# ---------------------------------------------------------------- inputs and oracle
def _qkv(B, H, D, dtype, device, T):
    """q, k, v (B, H, T, D), random normal, the same for every run."""
    generator = torch.Generator(device).manual_seed(T)
    return tuple(
        torch.randn(B, H, T, D, dtype=dtype, device=device, generator=generator) for _ in range(3)
    )


def _matrix(rows, device, columns):
    """(rows, columns) float32, random normal."""
    generator = torch.Generator(device).manual_seed(columns)
    return (torch.randn(rows, columns, device=device, generator=generator),)


def softmax_error(inputs, y) -> tuple[float, float]:
    """(largest relative error of a sampled row, budget 1e-5), against float64."""
    (x,) = inputs
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return math.inf, 1e-5
    pick = torch.Generator().manual_seed(0)
    rows = torch.randint(0, len(x), (64,), generator=pick).to(x.device)
    want = x[rows].double().softmax(dim=-1)
    return ((y[rows].double() - want).norm(dim=-1) / want.norm(dim=-1)).max().item(), 1e-5


def _title(B, H, D, dtype, causal) -> str:
    mask = "causal" if causal else "full"
    return f"Attention forward, B={B} H={H} D={D} {str(dtype)[6:]} {mask}"
