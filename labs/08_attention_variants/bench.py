"""What `python -m labs bench 08` compares: a sliding window, grouped heads, packed sequences.

Formulas are those of the handout, in bytes, for elements of e bytes.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from labs._harness.bench import Check, Provider, Sweep, attention_error
from labs._harness.runtime import capability
from labs._harness.trace import Traced

WINDOW = 1024
LENGTHS = [2048, 4096, 8192, 16384]
KV_HEADS = [1, 2, 4, 8, 16, 32]
SEQUENCES = [4, 16, 64]
COUNTED_LENGTHS = [128, 256, 512, 1024, 2048]
COUNTED_WINDOW, COUNTED_SEQUENCES = 128, [1, 2, 4, 8]
YOURS, NO_WINDOW, PADDED = "yours", "yours, no window", "yours, padded"


def timed(av, options, gpu) -> list[Sweep]:
    """What to time on a GPU. Rates count pairs of a query and a key that it really sees."""
    dtype = getattr(torch, options.dtype or "bfloat16")
    B, H, D = options.batch or 2, options.heads or 32, options.head_dim
    tiles = _tiles(options)
    wide = _window_tiles(options, gpu.device)
    window = Sweep(
        name="window",
        title=f"Window of {WINDOW}, B={B} H={H} D={D} {str(dtype)[6:]}",
        axis="T",
        sizes=options.lengths or LENGTHS,
        inputs=functools.partial(_qkv, B, H, H, D, dtype, gpu.device),
        providers=[
            _yours(YOURS, av, wide, window=WINDOW),
            Provider("FlexAttention", _flex(WINDOW)),
            Provider("SDPA with a mask", _masked(WINDOW)),
            Provider(
                NO_WINDOW, lambda *qkv: av.attention(*qkv, **tiles)[0], kernel=True, checked=False
            ),
        ],
        verify=functools.partial(_error, window=WINDOW),
        unit="TFLOP/s",
        work=lambda T: 4 * B * H * D * pairs(T, WINDOW),
    )
    grouped = Sweep(
        name="grouped",
        title=f"Grouped heads, causal, B=1 H={H} T=8192 D={D} {str(dtype)[6:]}",
        axis="H_kv",
        sizes=[n for n in KV_HEADS if H % n == 0],
        inputs=lambda n: _qkv(1, H, n, D, dtype, gpu.device, 8192),
        providers=[
            _yours(YOURS, av, tiles),
            Provider(
                "SDPA, enable_gqa",
                lambda q, k, v: F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                ),
            ),
        ],
        verify=_error,
        unit="TFLOP/s",
        work=lambda n: 4 * H * D * pairs(8192, None),
    )
    lengths = functools.partial(_lengths, 64, 4096)
    varlen = Sweep(
        name="varlen",
        title=f"Sequences of 64 to 4096 tokens, H=16 H_kv=4 D={D} {str(dtype)[6:]} causal",
        axis="N",
        sizes=SEQUENCES,
        inputs=lambda n: _packed(lengths(n), 16, 4, D, dtype, gpu.device),
        providers=_packed_providers(av, tiles),
        verify=packed_error,
        unit="TFLOP/s",
        work=lambda n: 4 * 16 * D * sum(pairs(t, None) for t in lengths(n)),
    )
    return [window, grouped, varlen]


def counted(av, options) -> list[Sweep]:
    """What to count without a GPU: the same code, at sizes that the interpreter can run."""
    dtype = getattr(torch, options.dtype or "float32")
    D, e, W = options.head_dim, dtype.itemsize, COUNTED_WINDOW
    M, N = options.block_m, options.block_n
    tiles = _tiles(options)
    sizes = functools.partial(kernel_bytes, heads=1, D=D, e=e, block_m=M, block_n=N)
    peak = functools.partial(_outputs, heads=1, D=D, e=e)
    window = Sweep(
        name="window",
        title=f"Window of {W}, B=1 H=1 D={D} {str(dtype)[6:]}, tiles {M}x{N}",
        axis="T",
        sizes=options.lengths or COUNTED_LENGTHS,
        inputs=functools.partial(_qkv, 1, 1, 1, D, dtype, "cpu"),
        providers=[
            Provider(
                NO_WINDOW,
                lambda *qkv: av.attention(*qkv, **tiles)[0],
                yours=True,
                kernel=True,
                checked=False,
                moved=functools.partial(sizes, window=None),
                peak=peak,
            ),
            Provider(
                YOURS,
                lambda *qkv: av.attention(*qkv, window=W, **tiles)[0],
                yours=True,
                kernel=True,
                moved=functools.partial(sizes, window=W),
                peak=peak,
            ),
        ],
        verify=functools.partial(_error, window=W),
    )
    lengths = functools.partial(_lengths, 16, 256)
    varlen = Sweep(
        name="varlen",
        title=f"Sequences of 16 to 256 tokens, H=1 D={D} {str(dtype)[6:]} causal, tiles {M}x{N}",
        axis="N",
        sizes=COUNTED_SEQUENCES,
        inputs=lambda n: _packed(lengths(n), 1, 1, D, dtype, "cpu"),
        providers=_packed_providers(av, tiles),
        verify=packed_error,
    )
    return [window, varlen]


def check(av, options, gpu) -> list[Check]:
    """The three promises of the handout, each beside its baseline in the same run, in bfloat16."""
    tiles, wide, found = _tiles(options), _window_tiles(options, gpu.device), []
    q, k, v = qkv = _qkv(2, 32, 32, 64, torch.bfloat16, gpu.device, 8192)
    flex, masked = _flex(WINDOW), _masked(WINDOW)
    ms = gpu.medians(
        {
            "yours": lambda: av.attention(*qkv, window=WINDOW, **wide),
            "flex": lambda: flex(*qkv),
            "mask": lambda: masked(*qkv),
        }
    )
    for name, wanted in (("flex", 1.15), ("mask", 10.0)):
        ratio = ms[name] / ms["yours"]
        what = f"window 1024, T=8192 D=64 B=2 H=32, against {name} ({ms[name]:.3f} ms)"
        figure = f"{ratio:.2f}x ({ms['yours']:.3f} ms)"
        found.append(Check(what, figure, f">= {wanted}x", ratio >= wanted))
    k, v = k[:, :8], v[:, :8]
    full = [x.repeat_interleave(4, dim=1) for x in (k, v)]
    ms = gpu.medians(
        {
            "grouped": lambda: av.attention(q, k, v, **tiles),
            "full": lambda: av.attention(q, *full, **tiles),
        }
    )
    ratio = ms["full"] / ms["grouped"]
    found.append(
        Check("32 heads on 8, T=8192, against 32 on 32", f"{ratio:.3f}x", ">= 0.97x", ratio >= 0.97)
    )
    inputs = _packed(_lengths(64, 4096, 64), 16, 4, 64, torch.bfloat16, gpu.device)
    runs = {p.name: functools.partial(p.run, *inputs) for p in _packed_providers(av, tiles)}
    ms = gpu.medians(runs)
    ratio = ms[PADDED] / ms[YOURS]
    what = "64 sequences of 64 to 4096 tokens, against the padded batch"
    found.append(Check(what, f"{ratio:.2f}x", ">= 1.5x", ratio >= 1.5))
    return found


# ---------------------------------------------------------------- trace and X-ray
def traced(av, options) -> list[Traced]:
    """What `python -m labs trace 08` can run: step 3's loops first, where they take such tiles.

    Causal queries stand at 0 to T - 1. Without --causal all of them see every key: as queries at
    an offset of T - 1, which a window of 2 T leaves all keys, or as one packed sequence.
    """
    T, tile = options.T, {"block_m": options.block_m, "block_n": options.block_n}
    offset = 0 if options.causal else T - 1

    def online(q, k, v):
        places = torch.arange(T) if options.causal else torch.tensor([offset])
        out = av.online_attention(q, k, v, query_positions=places, tile=options.block_n)
        s = q[0, 0].double().numpy() @ k[0, 0].double().numpy().T / math.sqrt(q.shape[-1])
        s = torch.from_numpy(s)  # numpy: the trace follows PyTorch, and this is not the lab's work
        hidden = torch.arange(T)[None, :] > places[:, None]
        return out, s.masked_fill(hidden, -math.inf).logsumexp(dim=-1).float()[None, None]

    def whole(q, k, v):
        return av.attention(q, k, v, query_offset=offset, **tile)

    def loops(q, k, v):
        return av.attention(q, k, v, query_offset=offset, window=2 * T, **tile)

    def packed(q, k, v):
        cu = torch.tensor([0, T], dtype=torch.int32)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (T, 1, D)
        out, lse = av.varlen_attention(q, k, v, cu, cu, causal=options.causal, **tile)
        return out.transpose(0, 1)[None], lse[None]

    step1 = Traced(1, "online_attention", online)
    kernels = [
        Traced(3, "_attend", loops, True),
        Traced(2, "attention", whole, True),
        Traced(5, "varlen_attention", packed, True),
    ]
    fits = all(b >= 16 and b & (b - 1) == 0 for b in (options.block_m, options.block_n))
    return [*kernels, step1] if fits else [step1, *kernels]


def launches(
    av, block_m=64, block_n=64, num_warps=4, num_stages=3, head_dim=64, dtype="float16"
) -> dict:
    """Launcher name -> a call that launches its kernels once, for the X-ray to compile."""
    kind = getattr(torch, dtype)
    q = torch.empty(1, 4, 2 * block_m, head_dim, dtype=kind)
    kv = torch.empty(1, 2, 2 * block_m, head_dim, dtype=kind)
    packed, packed_kv = (x[0].transpose(0, 1).contiguous() for x in (q, kv))
    cu = torch.tensor([0, 7, 2 * block_m], dtype=torch.int32)
    config = dict(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
    return {
        "attention": lambda: av.attention(q, kv, kv, **config),
        "_attend": lambda: av.attention(q, kv, kv, window=100, **config),
        "varlen_attention": lambda: av.varlen_attention(
            packed, packed_kv, packed_kv, cu, cu, **config
        ),
    }


GRID = {"block_m": [64, 128], "block_n": [32, 64], "num_warps": [4, 8], "num_stages": [2, 3]}


# ---------------------------------------------------------------- work and traffic
def pairs(T, window) -> int:
    """Pairs of a query and a key that it sees, T queries on T keys."""
    if window is None or window >= T:
        return T * (T + 1) // 2
    return window * (window + 1) // 2 + (T - window) * window


def kernel_bytes(T, heads, D, e, window, block_m, block_n) -> int:
    """Q once, K and V once per query tile that sees them, out and lse once; T queries and keys."""
    keys, step = 0, block_n if window is None else min(block_n, 64)  # 64: tiles that are cut
    for i0 in range(0, T, block_m):
        lo = 0 if window is None else max(i0 - window + 1, 0)
        tiles = math.ceil((min(i0 + block_m, T) - lo) / step)
        keys += min(lo + tiles * step, T) - lo
    return heads * (e * D * (2 * T + 2 * keys) + 4 * T)


def _outputs(T, heads, D, e) -> int:
    return heads * (e * T * D + 4 * T)


# ---------------------------------------------------------------- providers
def _tiles(options) -> dict:
    tiles = {"block_m": options.block_m, "block_n": options.block_n, "num_warps": options.num_warps}
    return tiles | {"num_stages": options.num_stages or 3}  # fastest on an H200 at D = 64


def _window_tiles(options, device) -> dict:
    """Wide full tiles for a window on a Hopper card, if none were asked for."""
    tiles = _tiles(options)
    hopper = capability(device)[0] == 9
    if hopper and options.head_dim <= 128 and tiles["block_n"] == 64 and not options.num_stages:
        tiles |= {"block_n": 128, "num_stages": 2}  # fastest on an H200 at D = 64
    return tiles


def _yours(name, av, tiles, window=None) -> Provider:
    config = f"{tiles['block_m']}x{tiles['block_n']} w{tiles['num_warps']}"

    def run(q, k, v):
        return av.attention(q, k, v, window=window, **tiles)[0]

    return Provider(name, run, yours=True, kernel=True, config=config)


def _flex(window):
    """FlexAttention, compiled; its block mask is made once for each length and not timed."""
    compiled, masks = None, {}

    def near(b, h, i, j):
        return (j <= i) & (i - j < window)

    def run(q, k, v):
        nonlocal compiled
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        T = q.shape[2]
        if T not in masks:
            masks[T] = create_block_mask(near, None, None, T, T, device=q.device)
        compiled = compiled or torch.compile(flex_attention, dynamic=False)
        return compiled(q, k, v, block_mask=masks[T])

    return run


def _masked(window):
    """SDPA with an explicit mask, which its fast backends do not take."""
    masks = {}

    def run(q, k, v):
        T = q.shape[2]
        if T not in masks:
            place = torch.arange(T, device=q.device)
            behind = place[:, None] - place[None, :]
            masks[T] = (behind >= 0) & (behind < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=masks[T])

    return run


def _packed_providers(av, tiles) -> list[Provider]:
    return [
        Provider(
            YOURS,
            lambda q, k, v, cu, *padded: av.varlen_attention(q, k, v, cu, cu, **tiles)[0],
            yours=True,
            kernel=True,
        ),
        Provider(
            PADDED,
            lambda q, k, v, cu, *padded: av.attention(*padded, **tiles)[0],
            yours=True,
            kernel=True,
        ),
    ]


# ---------------------------------------------------------------- inputs and oracle
def _qkv(B, H, kv_heads, D, dtype, device, T):
    """q, k, v, random normal, the same for every run."""
    generator = torch.Generator(device).manual_seed(T)
    return tuple(
        torch.randn(B, heads, T, D, dtype=dtype, device=device, generator=generator)
        for heads in (H, kv_heads, kv_heads)
    )


def _lengths(low, high, n) -> list[int]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(low, high + 1, (n,), generator=generator).tolist()


def _packed(lengths, H, kv_heads, D, dtype, device):
    """q, k, v (total, heads, D), their offsets, and the same tokens padded: (N, heads, T, D)."""
    generator = torch.Generator(device).manual_seed(len(lengths))
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    packed, padded = [], []
    for heads in (H, kv_heads, kv_heads):
        x = torch.randn(sum(lengths), heads, D, dtype=dtype, device=device, generator=generator)
        y = x.new_zeros(len(lengths), heads, max(lengths), D)
        for n, part in enumerate(x.split(lengths)):
            y[n, :, : len(part)] = part.transpose(0, 1)
        packed.append(x)
        padded.append(y)
    return *packed, cu, *padded


# The kernels multiply float32 as float32, so no budget for TF32.
_error = functools.partial(attention_error, tf32=False)


def packed_error(inputs, out) -> tuple[float, float]:
    """As `_error`, the worst of up to four sequences; `out` is packed or padded."""
    q, k, v, cu = inputs[:4]
    starts = cu.tolist()
    found = []
    for n in sorted({0, 1, len(starts) // 2, len(starts) - 2} & set(range(len(starts) - 1))):
        a, b = starts[n], starts[n + 1]
        one = tuple(x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        part = out[a:b].transpose(0, 1) if out.dim() == 3 else out[n, :, : b - a]
        found.append(_error(one, part[None]))
    return max(found)
