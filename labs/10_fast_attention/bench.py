"""What `python -m labs bench 10` compares: the rungs of the ladder, and SDPA's backends by name.

Rates count 4 B H T^2 D FLOP, half of them when causal. The sweeps keep B T = 16,384 and
H D = 2,048, so that every length does the same number of tokens.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
import time
from pathlib import Path

import torch

from labs._harness.bench import Check, Provider, Sweep, attention_error, sdpa
from labs._harness.trace import Traced
from labs._impl import ROOT

TOKENS, WIDTH = 16_384, 2_048
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
COUNTED_LENGTHS = [64, 128, 256, 512, 1024]
BACKENDS = {"SDPA FLASH": "FLASH_ATTENTION", "SDPA cuDNN": "CUDNN_ATTENTION"}
EXP2, TWO, ORDERED, DEFAULT, TUNED, TMA, SPECIALISED, FP8, FP8_QUANTISE = (
    "1 exp2",
    "2 two loops",
    "3 ordered",
    "4 default",
    "4 tuned",
    "5 tma",
    "5 tma, specialised",
    "6 fp8",
    "6 fp8, quantising",
)
WINNERS = ROOT / "runs" / "fast-attention-winners.json"


# ---------------------------------------------------------------- what to time
def timed(fa, options, gpu) -> list[Sweep]:
    """The ladder at head dims 64 and 128, causal and full; --head-dim and --only pick fewer."""
    dtype = getattr(torch, options.dtype or "bfloat16")
    found = []
    for D, causal in itertools.product((64, 128), (True, False)):
        B_of = functools.partial(_batch, options)
        H = options.heads or WIDTH // D
        sweep = Sweep(
            name=f"ladder-{D}-{'causal' if causal else 'full'}",
            title=f"Attention forward, B T={TOKENS:,} H={H} D={D} {str(dtype)[6:]} "
            f"{'causal' if causal else 'full'}",
            axis="T",
            sizes=options.lengths or LENGTHS,
            inputs=functools.partial(_qkv, B_of, H, D, dtype, gpu.device),
            providers=[
                *rungs(fa, D, causal, dtype),
                *(sdpa(name, BACKENDS[name], causal) for name in BACKENDS),
            ],
            verify=functools.partial(attention_error, causal=causal),
            unit="TFLOP/s",
            work=functools.partial(_flops, B_of, H, D, causal),
            tune=candidates(fa, D, causal) if options.tune else [],
            tuned=DEFAULT,
        )
        found.append(sweep)
    return found


def rungs(fa, D, causal, dtype) -> list[Provider]:
    """Each version with the tiles that suit it on the card at hand."""
    tile = _start_tile(D)
    steps = {
        EXP2: lambda q, k, v: fa.attention_exp2(q, k, v, causal, **tile)[0],
        TWO: lambda q, k, v: fa.attention_two_loops(q, k, v, causal, **tile)[0],
        ORDERED: lambda q, k, v: fa.attention_ordered(q, k, v, causal, **tile)[0],
        DEFAULT: lambda q, k, v: fa.attention_tuned(q, k, v, causal, tune=False)[0],
        TUNED: functools.partial(_tuned, fa, D, causal),
        TMA: functools.partial(_tma, fa, D, causal),
    }
    if _hopper():
        steps[SPECIALISED] = functools.partial(_specialised, fa, D, causal)
    text = f"{tile['block_m']}x{tile['block_n']} w{tile['num_warps']} s{tile['num_stages']}"
    found = [
        Provider(name, run, yours=True, kernel=True, config=text if name[0] < "4" else "")
        for name, run in steps.items()
    ]
    if dtype != torch.float32 and _capability() >= (8, 9):
        found += _fp8(fa, D, causal)
    return found


def _start_tile(D) -> dict:
    """One tile for rungs 1 to 3, so that only the idea changes between them."""
    tile = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2}
    return tile if D < 256 else tile | {"block_m": 64, "num_warps": 4}


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _hopper() -> bool:
    return _capability()[0] == 9


def _tuned(fa, D, causal, q, k, v):
    """Runs the tuned rung and notes what it chose for this length."""
    out, _ = fa.attention_tuned(q, k, v, causal)
    key = f"{_card()} D={D} {'causal' if causal else 'full'} {str(q.dtype)[6:]} T={q.shape[2]}"
    _seen[key] = fa.best_config()._asdict()
    return out


_seen: dict[str, dict] = {}  # length and so on -> the winner there; `closing` writes it


def _card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _tile(block_m, block_n, num_warps, num_stages) -> dict:
    return {
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


SMALL = _tile(64, 32, 4, 2)  # for cards other than Hopper


def _tma_tile(D, T, causal) -> dict:
    """Small programs, several on a multiprocessor, where rows are short; else large ones."""
    if not _hopper():
        return SMALL
    if D <= 64:
        return _tile(64 if causal and T <= 1024 else 128, 64, 4, 3)
    if D <= 128:
        return _tile(64, 64, 4, 3) if T <= 2048 else _tile(128, 64, 8, 3)
    return _tile(128, 32, 8, 2)


def _tma(fa, D, causal, q, k, v):
    tile = _tma_tile(D, q.shape[2], causal)
    return fa.attention_tma(q, k, v, causal, **tile, warp_specialize=False)[0]


def _specialised(fa, D, causal, q, k, v):
    tile = _tile(128, 128 if D <= 128 else 64, 4, 2)
    return fa.attention_tma(q, k, v, causal, **tile, warp_specialize=True)[0]


def _fp8(fa, D, causal) -> list[Provider]:
    """e4m3 with and without quantising its inputs; its error is --check's business, as an RMSE."""
    kept: dict[tuple, tuple] = {}

    def attend(q, k, v):
        key = q.data_ptr(), *q.shape
        if key not in kept:
            kept.clear()
            kept[key] = fa.quantise(q), fa.quantise(k), fa.quantise(v, "channel")
        parts = kept[key]
        return fa.attend_fp8(*parts, causal, out_dtype=q.dtype, **_fp8_tile(q, causal))[0]

    def both(q, k, v):
        return fa.attention_fp8(q, k, v, causal, **_fp8_tile(q, causal))[0]

    return [
        Provider(name, run, yours=True, kernel=True, checked=False)
        for name, run in ((FP8, attend), (FP8_QUANTISE, both))
    ]


def _fp8_tile(q, causal) -> dict:
    """64 rows and 4 warps: two programs on a multiprocessor of Hopper."""
    if not _hopper():
        return SMALL
    return _tile(64, 64 if causal and q.shape[2] <= 512 else 128, 4, 3)


# ---------------------------------------------------------------- the tile sweep
PLAIN = [  # block_m, block_n, num_warps, num_stages
    *itertools.product((128,), (64,), (8,), (2, 3, 4)),
    *itertools.product((128,), (64,), (4,), (2, 3)),
    *itertools.product((128,), (128,), (8,), (2, 3)),
    *itertools.product((64,), (64,), (4,), (2, 3, 4)),
    *itertools.product((64,), (128,), (4,), (2, 3)),
    *itertools.product((64, 128), (32,), (4, 8), (3,)),
]
DESCRIPTORS = [  # and whether it is warp specialised
    *itertools.product((128,), (64, 128), (8,), (2, 3), (False,)),
    *itertools.product((128,), (64,), (4,), (2, 3), (False,)),
    *itertools.product((64,), (32, 64, 128), (4,), (2, 3), (False,)),
    *itertools.product((128,), (64, 128), (4,), (2, 3), (True,)),
]


def candidates(fa, D, causal) -> list[Provider]:
    """Everything that --tune tries: tiles, warps and stages, at once and late, and descriptors."""
    found = []
    for (m, n, w, s), late in itertools.product(PLAIN, (False, True)):
        text = f"{m}x{n} w{w} s{s}{' late' if late else ''}"
        config = fa.Config(m, n, w, s, late)
        run = functools.partial(_with_config, fa, causal, config)
        found.append(Provider(DEFAULT, run, yours=True, kernel=True, config=text))
    for m, n, w, s, specialised in DESCRIPTORS:
        tile = _tile(m, n, w, s) | {"warp_specialize": specialised}
        run = functools.partial(_with_descriptors, fa, causal, tile)
        text = f"{m}x{n} w{w} s{s} tma{' specialised' if specialised else ''}"
        found.append(Provider(DEFAULT, run, yours=True, kernel=True, config=text))
    for group in (1, 4, 16, 64, 1 << 20):
        tile = _tile(64, 64, 4, 3) | {"warp_specialize": False, "group": group}
        run = functools.partial(_with_descriptors, fa, causal, tile)
        text = f"64x64 w4 s3 tma, groups of {group if group < 1 << 20 else 'all'}"
        found.append(Provider(DEFAULT, run, yours=True, kernel=True, config=text))
    return found


def _with_config(fa, causal, config, q, k, v):
    return fa.attention_tuned(q, k, v, causal, config=config)[0]


def _with_descriptors(fa, causal, tile, q, k, v):
    return fa.attention_tma(q, k, v, causal, **tile)[0]


# ---------------------------------------------------------------- without a GPU
def counted(fa, options) -> list[Sweep]:
    """What to count without a GPU: bytes are the same on every rung, which is the point."""
    dtype = getattr(torch, options.dtype or "float16")
    H, D, causal = options.heads or 1, options.head_dim, options.causal
    M, N = options.block_m, options.block_n
    tile = {"block_m": M, "block_n": N}
    moved = functools.partial(
        kernel_bytes, heads=H, D=D, e=dtype.itemsize, causal=causal, block_m=M, block_n=N
    )
    peak = functools.partial(_outputs, heads=H, D=D, e=dtype.itemsize)
    config = fa.Config(M, N, 4, 2, True)
    steps = {
        EXP2: lambda q, k, v: fa.attention_exp2(q, k, v, causal, **tile)[0],
        TWO: lambda q, k, v: fa.attention_two_loops(q, k, v, causal, **tile)[0],
        ORDERED: lambda q, k, v: fa.attention_ordered(q, k, v, causal, **tile)[0],
        TUNED: lambda q, k, v: fa.attention_tuned(q, k, v, causal, config=config)[0],
    }
    return [
        Sweep(
            name="ladder",
            title=f"Attention forward, B=1 H={H} D={D} {str(dtype)[6:]} "
            f"{'causal' if causal else 'full'}, tiles {M}x{N}",
            axis="T",
            sizes=options.lengths or COUNTED_LENGTHS,
            inputs=functools.partial(_qkv, lambda T: 1, H, D, dtype, "cpu"),
            providers=[
                Provider(name, run, yours=True, kernel=True, moved=moved, peak=peak)
                for name, run in steps.items()
            ],
            verify=functools.partial(attention_error, causal=causal),
        )
    ]


# ---------------------------------------------------------------- --check
def check(fa, options, gpu) -> list[Check]:
    """The bars of the handout, each ratio from one run: medians, interleaved, L2 flushed."""
    found: list[Check] = []
    dtype = torch.bfloat16
    ratios: dict[tuple[int, str], list[float]] = {}
    fp8: list[float] = []
    for D, causal, T in itertools.product((64, 128), (True, False), options.lengths or LENGTHS):
        H, B = WIDTH // D, TOKENS // T
        q, k, v = _qkv(lambda T, B=B: B, H, D, dtype, gpu.device, T)
        runs = {TUNED: functools.partial(_tuned, fa, D, causal, q, k, v)}
        runs[TMA] = functools.partial(_tma, fa, D, causal, q, k, v)
        if _hopper():
            runs[SPECIALISED] = functools.partial(_specialised, fa, D, causal, q, k, v)
        plain = list(runs)
        eight = {p.name: p for p in _fp8(fa, D, causal)} if _capability() >= (8, 9) else {}
        if eight and D == 128:
            runs[FP8] = functools.partial(eight[FP8].run, q, k, v)
        theirs = {n: functools.partial(sdpa(n, BACKENDS[n], causal), q, k, v) for n in BACKENDS}
        ms = gpu.medians(runs | theirs)
        for name in plain:
            error, budget = attention_error((q, k, v), runs[name](), causal)
            if not error <= budget:
                found.append(
                    Check(f"{name} D={D} T={T}", f"{error:.2g}", f"<= {budget:.2g}", False)
                )
        best = min(ms[name] for name in plain)
        flop = _flops(lambda T, B=B: B, H, D, causal, T)
        rates = ", ".join(f"{n} {flop / t / 1e9:.0f}" for n, t in ms.items())
        print(f"  D={D} {'causal' if causal else 'full'} T={T}: {rates} TFLOP/s", flush=True)
        for name in BACKENDS:
            ratios.setdefault((D, name), []).append(ms[name] / best)
        if FP8 in ms:
            fp8.append(best / ms[FP8])
    flash = ratios[64, "SDPA FLASH"] + ratios[128, "SDPA FLASH"]
    mean = statistics.geometric_mean
    _bar(found, "best plain version / SDPA FLASH, geometric mean", mean(flash), 1.40)
    _bar(found, "the same, worst cell", min(flash), 1.20)
    for D, wanted in ((64, 0.92), (128, 0.80)):
        what = f"best plain version / SDPA cuDNN, D={D}, geometric mean"
        _bar(found, what, mean(ratios[D, "SDPA cuDNN"]), wanted)
    if fp8:
        _bar(found, "e4m3 / bfloat16, D=128, geometric mean", mean(fp8), 1.25)
        found.append(_outliers(fa, gpu))
    start = time.monotonic()
    q, k, v = _qkv(lambda T: 1, 32, 64, torch.float16, gpu.device, 4096)
    fa.attention_tuned(q, k, v, True)
    seconds = time.monotonic() - start
    what = "first tuned call with a new dtype, search included"
    found.append(Check(what, f"{seconds:.1f} s", "< 60 s", seconds < 60))
    return found


def _bar(found, what, got, wanted):
    found.append(Check(what, f"{got:.3f}x", f">= {wanted:.2f}x", got >= wanted))


def _outliers(fa, gpu) -> Check:
    """RMSE with a scale for each token against one scale for all, on keys with outliers."""
    q, k, v = _qkv(lambda T: 2, 16, 128, torch.bfloat16, gpu.device, 4096)
    k = fa.with_outliers(k)
    s = (q.double() @ k.double().transpose(-2, -1)) / math.sqrt(128)
    want = s.softmax(dim=-1) @ v.double()
    v8 = fa.quantise(v, "channel")

    def one_scale(x):
        scale = x.float().abs().amax() / 448
        values = (x.float() / scale).to(torch.float8_e4m3fn)
        return fa.Quantised(values, scale.expand(x.shape[:3]).contiguous())

    def error(quantise):
        out, _ = fa.attend_fp8(quantise(q), quantise(k), v8, **_fp8_tile(q, False))
        return fa.rmse(out, want)

    token, tensor = error(fa.quantise), error(one_scale)
    what = f"RMSE on outliers, per token {token:.2e} / per tensor {tensor:.2e}"
    return Check(what, f"{token / tensor:.2f}x", "<= 0.50x", token <= 0.5 * tensor)


# ---------------------------------------------------------------- the report's own part
def closing(fa, options, report, rows, folder) -> tuple[str, list[Path]]:
    """Writes the winners of the tuned rung per length, and the ladder picture."""
    lines, files = [], []
    if _seen:
        known = json.loads(WINNERS.read_text()) if WINNERS.is_file() else {}
        WINNERS.parent.mkdir(exist_ok=True)
        WINNERS.write_text(json.dumps(known | _seen, indent=1, sort_keys=True) + "\n")
        files.append(WINNERS)
        lines.append("the tuned rung chose, by length (why do they differ?):")
        lines += [f"  {key}: {_text(config)}" for key, config in _seen.items()]
    done = [r for r in rows if r.rate is not None and r.sweep.startswith("ladder")]
    if report["mode"] == "timed" and done:
        files.append(ladder(folder / "ladder.png", done, report))
    return "\n".join(lines), files


def _text(c) -> str:
    late = " late" if c["late"] else ""
    return f"{c['block_m']}x{c['block_n']} w{c['num_warps']} s{c['num_stages']}{late}"


def ladder(path, rows, report) -> Path:
    """Bars of TFLOP/s by version at the longest length; FLASH, cuDNN and the matrix peak as lines.

    Args:
        rows: bench rows of the ladder sweeps, tuning rows left out.
        report: the run's report, for the card and the measured matrix peak.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in rows if not r.sweep.endswith("-tune")]
    sweeps = list(dict.fromkeys(r.sweep for r in rows))
    figure, panels = plt.subplots(
        1, len(sweeps), figsize=(5.5 * len(sweeps), 6), layout="constrained", squeeze=False
    )
    peak, unit, how = report["ceilings"]["matmul"]
    for axes, sweep in zip(panels[0], sweeps, strict=True):
        size = max(r.size for r in rows if r.sweep == sweep)
        mine = {r.provider: r.rate for r in rows if r.sweep == sweep and r.size == size}
        steps = [name for name in mine if name not in BACKENDS]
        colors = ["#D55E00" if name[0] < "6" else "#E69F00" for name in steps]
        bars = axes.bar(range(len(steps)), [mine[name] for name in steps], color=colors)
        axes.bar_label(bars, fmt="%.0f")
        axes.set_xticks(range(len(steps)), steps, rotation=45, ha="right")
        for name, style in (("SDPA FLASH", ":"), ("SDPA cuDNN", "--")):
            if name in mine:
                axes.axhline(mine[name], color="black", linestyle=style)
                axes.annotate(f"{name[5:]} {mine[name]:.0f}", (0, mine[name]), va="bottom")
        axes.axhline(peak, color="#0072B2")
        axes.annotate(
            f"measured matrix peak {peak:.0f} ({how})", (0, peak), va="bottom", fontsize=8
        )
        axes.set_title(f"{sweep}, T={size:,}")
        axes.set_ylabel(f"{unit} (higher is better)")
    figure.suptitle(f"{report['impl']} · {report['where']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


# ---------------------------------------------------------------- trace and X-ray
def traced(fa, options) -> list[Traced]:
    """What `python -m labs trace 10` can run: the rungs that take any tiles, the best one first."""
    tile = {"block_m": options.block_m, "block_n": options.block_n}
    config = fa.Config(options.block_m, options.block_n, 4, 2, True)

    def late(q, k, v):
        return fa.attention_tuned(q, k, v, options.causal, config=config)

    def two_loops(q, k, v):
        return fa.attention_two_loops(q, k, v, options.causal, **tile)

    return [
        Traced(4, "attention_tuned", late, True),
        Traced(2, "attention_two_loops", two_loops, True),
    ]


GRID = {
    "block_m": (64, 128),
    "block_n": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3),
    "late": (False, True),
}


def launches(
    fa,
    block_m=64,
    block_n=32,
    num_warps=4,
    num_stages=2,
    head_dim=64,
    dtype="float16",
    causal=True,
    late=False,
    card="sm_86",
    specialised=None,
) -> dict:
    """Launcher name -> a call that launches its kernels once, for the X-ray to compile.

    The tiles are those of steps 1 to 3, 5 and 6, and of "attention_tuned"; `specialised` is of step
    5. "attention_tuned D=64" and so on launch the configuration that runs there by default on
    `card`.
    """
    kind, arch = getattr(torch, dtype), int(card.removeprefix("sm_"))
    q = torch.empty(1, 2, 4 * block_m, head_dim, dtype=kind)
    tile = _tile(block_m, block_n, num_warps, num_stages)

    def tuned():
        return fa.attention_tuned(q, q, q, causal, config=fa.Config(*tile.values(), late))

    def default(D):
        x = torch.empty(1, 2, 512, D, dtype=kind)
        return fa.attention_tuned(x, x, x, causal, config=fa.default_config(D, arch))

    return {
        "attention_exp2": lambda: fa.attention_exp2(q, q, q, causal, **tile),
        "attention_two_loops": lambda: fa.attention_two_loops(q, q, q, causal, **tile),
        "attention_ordered": lambda: fa.attention_ordered(q, q, q, causal, **tile),
        "attention_tuned": tuned,
        **{f"attention_tuned D={D}": functools.partial(default, D) for D in (64, 128, 256)},
        "attention_tma": lambda: fa.attention_tma(
            q, q, q, causal, **tile, warp_specialize=specialised
        ),
        "attention_fp8": lambda: fa.attention_fp8(q, q, q, causal, **tile),
    }


# ---------------------------------------------------------------- work and traffic
def _batch(options, T) -> int:
    return options.batch or max(1, TOKENS // T)


def _flops(batch, H, D, causal, T) -> float:
    """FLOP of the forward: two products of 2 B H T T D, half of them when causal."""
    return 4 * batch(T) * H * T * T * D / (2 if causal else 1)


def kernel_bytes(T, heads, D, e, causal, block_m, block_n) -> int:
    """Q once, K and V once per query tile (causal: up to the diagonal), out and lse once."""
    keys = 0
    for i0 in range(0, T, block_m):
        hi = min(T, i0 + block_m) if causal else T
        keys += min(T, math.ceil(hi / block_n) * block_n)
    return heads * (e * D * (2 * T + 2 * keys) + 4 * T)


def _outputs(T, heads, D, e) -> int:
    return heads * (e * T * D + 4 * T)


# ---------------------------------------------------------------- inputs and oracle
def _qkv(batch, H, D, dtype, device, T):
    """q, k, v (B, H, T, D), random normal, the same for every run."""
    generator = torch.Generator(device).manual_seed(T)
    return tuple(
        torch.randn(batch(T), H, T, D, dtype=dtype, device=device, generator=generator)
        for _ in range(3)
    )
