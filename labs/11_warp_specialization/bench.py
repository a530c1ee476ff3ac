"""What `python -m labs bench 11` compares: attention forward on Hopper, version by version.

`--check` holds the bars, `--tune` tries all configurations of the last version.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from pathlib import Path

import torch

from labs._harness import gluon_emulator, gluon_program
from labs._harness.bench import Check, Provider, Sweep, attention_error, sdpa
from labs._impl import LoadError

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
TOKENS, WIDTH = 16_384, 2048  # B * T and H * D of every shape
CELLS = [(D, causal) for D in (128, 64) for causal in (False, True)]
CUDNN, FLASH = "SDPA cuDNN", "SDPA FLASH"
BACKENDS = {CUDNN: "CUDNN_ATTENTION", FLASH: "FLASH_ATTENTION"}
BEST, OVERLAP, OVERLAP_ONE, SIMPLE = (
    "5 persistent",
    "4 overlap, ping-pong",
    "4 overlap",
    "3 producer, consumers",
)
# What is asked of step 5, against cuDNN in the same run.
GEOMEAN_BAR, GEOMEAN_FROM = 1.05, 2048
CELL_BAR, CELL_FROM = 0.95, 1024
RATE_BAR, RATE_CELL = 650.0, (128, False, 16_384)


def timed(ws, options, gpu) -> list[Sweep]:
    """One table for each head dim and mask: the versions, and the vendor's two kernels."""
    _need_hopper()
    dtype = getattr(torch, options.dtype or "bfloat16")
    lengths = options.lengths or LENGTHS
    return [_sweep(ws, options, gpu, D, causal, dtype, lengths) for D, causal in CELLS]


def _need_hopper() -> None:
    reason = gluon_emulator.unavailable()
    if reason is None and not gluon_emulator.hopper():
        reason = "its kernels need a Hopper card (H100, H200; capability 9.0)"
    if reason:
        raise LoadError(f"lab 11 cannot be timed here: {reason}")


def _sweep(ws, options, gpu, D, causal, dtype, lengths) -> Sweep:
    H = options.heads or WIDTH // D
    mask = "causal" if causal else "full"
    versions = [
        Provider(BEST, lambda *x: ws.hopper_attention(*x, causal)[0], yours=True, kernel=True),
        _overlap(ws, OVERLAP, D, causal, True),
        _overlap(ws, OVERLAP_ONE, D, causal, False),
    ]
    if not causal:
        run = functools.partial(_simple, ws)
        versions.append(Provider(SIMPLE, run, yours=True, kernel=True))
    return Sweep(
        name=f"D{D}-{mask}",
        title=f"Attention forward, B*T={TOKENS} H={H} D={D} {str(dtype)[6:]} {mask}",
        axis="T",
        sizes=lengths,
        inputs=functools.partial(_qkv, H, D, dtype, gpu.device),
        providers=[
            *versions,
            sdpa(CUDNN, BACKENDS[CUDNN], causal),
            sdpa(FLASH, BACKENDS[FLASH], causal),
        ],
        verify=functools.partial(attention_error, causal=causal),
        unit="TFLOP/s",
        work=lambda T: flops(batch(T), H, T, D, causal),
        ceiling="matmul",
        tune=_configurations(ws, D, causal) if options.tune else [],
        tuned=BEST,
    )


def _overlap(ws, name, D, causal, ping_pong) -> Provider:
    stages = 2 if D == 128 else 3

    def run(q, k, v):
        return ws.attention_overlap(q, k, v, causal, stages=stages, ping_pong=ping_pong)[0]

    return Provider(name, run, yours=True, kernel=True)


def _simple(ws, q, k, v):
    return ws.attention_producer_consumer(q, k, v)[0]


def _configurations(ws, D, causal) -> list[Provider]:
    """Configurations of step 5 to try: those that fit, with as many stages as do and one fewer.

    Half of them compile to the kernel of another: whether it is persistent is a matter of the grid.
    """
    found = []
    for block_n, consumers in itertools.product((64, 128), (2, 3) if D == 64 else (2,)):
        fits = [
            stages
            for stages in (2, 3, 4)
            if shared_memory(D, block_n, stages, consumers) <= gluon_program.SHARED_LIMIT
        ]
        flags = itertools.product((True, False), (False, True))
        for stages, (ping_pong, fused) in itertools.product(fits[-2:], list(flags)):
            for persistent in (True, False):
                config = ws.Config(block_n, stages, ping_pong, persistent, fused, consumers)
                run = functools.partial(_persistent, ws, causal, config)
                text = described(config)
                found.append(Provider(BEST, run, yours=True, kernel=True, config=text))
    return found


def described(config) -> str:
    """A configuration in a few letters: 128x64 s3 ping-pong persistent."""
    words = f"{64 * config.consumers}x{config.block_n} s{config.stages}"
    for name in ("ping_pong", "persistent", "fused"):
        words += f" {name.replace('_', '-')}" if getattr(config, name) else ""
    return words


def _persistent(ws, causal, config, q, k, v):
    return ws.attention_persistent(q, k, v, causal, None, config)[0]


def shared_memory(D, block_n, stages, consumers=2) -> int:
    """Bytes of shared memory of a program of step 5: Q twice and O, K and V, barriers."""
    barriers = 8 * (2 * 2 * consumers + 4 * stages + consumers)
    return 2 * D * (3 * consumers * 64 + 2 * block_n * stages) + barriers + 256


def closing(ws, options, report, rows, folder: Path):
    """The ladder: TFLOP/s by version, with cuDNN, FLASH and the matrix peak as lines."""
    if report["mode"] != "timed":
        return "", []
    try:
        file = ladder(report, rows, folder / "ladder.png")
    except ImportError as error:
        return f"no ladder: {error}", []
    return ratios(rows), [file]


def ratios(rows) -> str:
    """Step 5 against cuDNN in this run, one line for each table."""
    lines = []
    for D, causal in CELLS:
        name = f"D{D}-{'causal' if causal else 'full'}"
        best, base = (
            {r.size: r.rate for r in rows if r.sweep == name and r.provider == p and r.rate}
            for p in (BEST, CUDNN)
        )
        both = [f"{T}: {best[T] / base[T]:.3f}" for T in sorted(best) if T in base]
        lines += [f"{name}, step 5 over cuDNN: {', '.join(both)}"] if both else []
    return "\n".join(lines)


def ladder(report, rows, file: Path) -> Path:
    """Bars for the versions at the longest sequence, lines for what others reach there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(CELLS), figsize=(14, 4.2), sharey=True, layout="constrained"
    )
    order = [SIMPLE, OVERLAP_ONE, OVERLAP, BEST]
    peak, _, how = report["ceilings"]["matmul"]
    for panel, (D, causal) in zip(panels, CELLS, strict=True):
        name = f"D{D}-{'causal' if causal else 'full'}"
        mine = [r for r in rows if r.sweep == name and r.rate]
        T = max((r.size for r in mine), default=0)
        at = {r.provider: r.rate for r in mine if r.size == T}
        steps = [p for p in order if p in at]
        bars = panel.bar(range(len(steps)), [at[p] for p in steps], color="#4878a8", width=0.65)
        for bar in bars:  # at the foot, where no line runs
            place = bar.get_x() + bar.get_width() / 2, 20
            panel.text(*place, f"{bar.get_height():.0f}", color="white", ha="center")
        for p, color, style in ((CUDNN, "#c44e52", "--"), (FLASH, "#55585c", ":")):
            if p in at:
                panel.axhline(at[p], color=color, linestyle=style, label=f"{p} {at[p]:.0f}")
        panel.axhline(peak, color="black", label=f"matrix product {peak:.0f}")
        panel.set_xticks(range(len(steps)), [p.replace(", ", ",\n") for p in steps], fontsize=8)
        panel.set_title(f"D = {D}, {'causal' if causal else 'full'}, T = {T:,}")
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    panels[0].set_ylabel("TFLOP/s")
    title = f"Attention forward by version; {report['impl']} · {report['where']}"
    figure.suptitle(f"{title} · matrix product: {how}")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file


# ---------------------------------------------------------------- the bars
def check(ws, options, gpu) -> list[Check]:
    """Step 5 against cuDNN in each cell, timed in turn; outputs compared with float64."""
    _need_hopper()
    found, ratios_from = [], []
    for D, causal in CELLS:
        for T in LENGTHS:
            found += _check_cell(ws, gpu, D, causal, T, ratios_from)
    geomean = statistics.geometric_mean(ratios_from)
    what = f"geometric mean of the speed against cuDNN, T >= {GEOMEAN_FROM}"
    ok = geomean >= GEOMEAN_BAR
    return [*found, Check(what, f"{geomean:.3f}x", f">= {GEOMEAN_BAR}x", ok)]


def _check_cell(ws, gpu, D, causal, T, ratios_from) -> list[Check]:
    H = WIDTH // D
    inputs = _qkv(H, D, torch.bfloat16, gpu.device, T)
    cudnn, flash = sdpa(CUDNN, BACKENDS[CUDNN], causal), sdpa(FLASH, BACKENDS[FLASH], causal)
    theirs = {p.name: functools.partial(p, *inputs) for p in (cudnn, flash)}
    ms = gpu.medians({"yours": lambda: ws.hopper_attention(*inputs, causal)} | theirs)
    rate = {name: flops(batch(T), H, T, D, causal) / t / 1e9 for name, t in ms.items()}
    error, budget = attention_error(inputs, ws.hopper_attention(*inputs, causal)[0], causal)
    ratio = ms[CUDNN] / ms["yours"]
    if T >= GEOMEAN_FROM:
        ratios_from.append(ratio)
    bar = CELL_BAR if T >= CELL_FROM else 0.0
    shape = f"D={D} {'causal' if causal else 'full'} T={T}"
    figure = f"{ratio:.3f}x ({rate['yours']:.0f}; {rate[CUDNN]:.0f}, FLASH {rate[FLASH]:.0f})"
    wanted = f">= {bar}x, error <= {budget:.2g}"
    found = [Check(f"against cuDNN, {shape}", figure, wanted, ratio >= bar and error <= budget)]
    if (D, causal, T) == RATE_CELL:
        ok = rate["yours"] >= RATE_BAR
        found.append(Check(f"TFLOP/s, {shape}", f"{rate['yours']:.0f}", f">= {RATE_BAR:.0f}", ok))
    return found


# ---------------------------------------------------------------- X-ray
ARCHS = ("sm_90",)
GRID = {
    "block_n": (64, 128),
    "num_stages": (2, 3, 4),
}


def launches(
    ws,
    block_n=None,
    num_stages=None,
    head_dim=128,
    ping_pong=True,
    fused=None,
    dtype="bfloat16",
    causal=True,
    consumers=None,
) -> dict:
    """Launcher name -> a call that launches its kernel once, for the X-ray to compile."""
    kind = getattr(torch, dtype)
    stages = num_stages or (2 if head_dim == 128 else 3)
    q = torch.empty(1, 2, 384, head_dim, dtype=kind)
    x = torch.empty(256, 256, dtype=kind)
    k = torch.empty(block_n or 128, head_dim, dtype=kind)

    def best():
        config = ws.best_config(head_dim, causal, 16384)
        given = dict(block_n=block_n, stages=num_stages, fused=fused, consumers=consumers)
        given["ping_pong"] = ping_pong
        config = config._replace(**{k: v for k, v in given.items() if v is not None})
        ws.attention_persistent(q, q, q, causal, None, config)

    return {
        "tma_copy": lambda: ws.tma_copy(x),
        "wgmma_products": lambda: ws.wgmma_products(q[0, 0], k, k),
        "attention_producer_consumer": lambda: ws.attention_producer_consumer(q, q, q),
        "attention_overlap": lambda: ws.attention_overlap(
            q, q, q, causal, None, block_n or 128, stages, ping_pong
        ),
        "hopper_attention": best,
    }


# ---------------------------------------------------------------- counted without a GPU
def counted(ws, options) -> list[Sweep]:
    """Nothing to count: the emulator proves numbers, races and hangs, in the lab's tests."""
    raise LoadError(
        "lab 11 is timed on a Hopper card only; without one `pytest labs/11_warp_specialization` "
        "runs its kernels in an emulator, and `python -m labs xray 11` compiles them"
    )


# ---------------------------------------------------------------- work, providers, inputs, oracle
def batch(T) -> int:
    return max(1, TOKENS // T)


def flops(B, H, T, D, causal) -> float:
    """FLOP of the forward: two products of 2 B H T T D, half of them when causal."""
    return 4 * B * H * T * T * D / (2 if causal else 1)


def _qkv(H, D, dtype, device, T):
    """q, k, v (B, H, T, D), random normal, the same for every run."""
    generator = torch.Generator(device).manual_seed(T)
    shape = batch(T), H, T, D
    return tuple(
        torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(3)
    )
