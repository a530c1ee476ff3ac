"""What `python -m labs bench 03` does: lab 06's kernels under the roof of a card.

On a GPU the harness measures the card's two numbers (a matrix product, a copy), then the kernels of
lab 06; the lab's own functions say what was to be expected, and draw the roofline. Without a GPU
nothing is timed: bytes are counted while those kernels run and held against the lab's formulas, and
the roofline is that of a card from the table, with predicted points.
"""

from __future__ import annotations

import argparse
import functools

import torch

from labs._harness.bench import Provider, Sweep, fit, lab_bench, table
from labs._impl import LoadError, find_lab, load

LENGTHS, COUNTED_LENGTHS = [512, 1024, 2048, 4096, 8192], [64, 128, 256, 512]
COLUMNS, COUNTED_COLUMNS = [1024, 4096, 16384], [1000, 4096]
ROWS, COUNTED_ROWS = 32_768, 64
REAL = {"batch": 8, "heads": 16, "dtype": "bfloat16"}  # what is timed, or predicted
LAUNCH_US = 5.0  # an ordinary launch from PyTorch
EXAMPLE_CARD = "RTX 5060"
NAIVE, FLASH, SOFTMAX = "naive", "flash kernel", "softmax kernel"
ASKED, IDEAL = f"{FLASH}, bytes asked for", f"{FLASH}, ideal bytes"


def timed(module, options, gpu) -> list[Sweep]:
    """What to time on a GPU: lab 06's kernels, whose work this lab's functions count."""
    _fill(options, lengths=LENGTHS, **REAL)
    element = getattr(torch, options.dtype).itemsize
    each = 8 * options.heads * max(options.lengths) * options.head_dim * element
    options.batch = fit(options.batch, each, gpu)
    options.rows = fit(ROWS, 16 * max(COLUMNS), gpu)
    return _sweeps(module, options, gpu.device, COLUMNS)


def counted(module, options) -> list[Sweep]:
    """What to count without one: the same kernels, at sizes that the interpreter can run."""
    _card(module, options)  # refuses an unknown card before anything runs
    _fill(options, lengths=COUNTED_LENGTHS, batch=1, heads=2, dtype="float32")
    options.rows = COUNTED_ROWS
    return _sweeps(module, options, "cpu", COUNTED_COLUMNS)


def _fill(options, **defaults) -> None:
    """Fills in what was left open, so that the report's settings say what ran."""
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)


def _sweeps(module, options, device, columns) -> list[Sweep]:
    judge = lab_bench(find_lab("06"))
    ak, reference = _lab06()
    B, H, D, causal, rows = (
        getattr(options, name) for name in ("batch", "heads", "head_dim", "causal", "rows")
    )
    dtype = getattr(torch, options.dtype)
    tiles = {"block_m": options.block_m, "block_n": options.block_n}
    tuning = {name: getattr(options, name) for name in ("num_warps", "num_stages")}
    tuning = {name: value for name, value in tuning.items() if value}
    attention = Sweep(
        name="attention",
        title=f"Attention forward, {_title(options)}",
        axis="T",
        sizes=options.lengths,
        inputs=lambda T: _normal(T, 3, (B, H, T, D), dtype, device),
        providers=[
            Provider(
                NAIVE,
                lambda q, k, v: ak.naive_attention(q, k, v, causal),
                yours=True,
                moved=lambda T: module.naive_attention_bytes(B, H, T, D, causal, dtype.itemsize),
            ),
            Provider(
                FLASH,
                lambda q, k, v: ak.triton_flash_attention(q, k, v, causal, **tiles, **tuning)[0],
                yours=reference,
                kernel=True,
                moved=lambda T: module.flash_attention_bytes(
                    B, H, T, D, causal, dtype.itemsize, **tiles
                ),
            ),
        ],
        verify=functools.partial(judge.attention_error, causal=causal),
        unit="TFLOP/s",
        work=lambda T: 4 * B * H * T * T * D / (2 if causal else 1),
        exact=True,
    )
    softmax = Sweep(
        name="softmax",
        title=f"Softmax of {rows:,} float32 rows",
        axis="columns",
        sizes=columns,
        inputs=lambda C: _normal(C, 1, (rows, C), torch.float32, device),
        providers=[
            Provider(
                SOFTMAX,
                ak.triton_softmax,
                yours=reference,
                kernel=True,
                moved=lambda C: module.softmax_work(rows, C, 4).nbytes,
            )
        ],
        verify=judge.softmax_error,
        unit="TB/s",
        work=lambda C: 2 * 4 * rows * C,
        ceiling="copy",
        exact=True,
    )
    return [attention, softmax]


def _lab06():
    """(lab 06's code, whether it is the reference): a student edition has the stub only."""
    try:
        return load("06", "solution"), True
    except LoadError:
        return load("06", "exercise"), False


def _normal(seed, count, shape, dtype, device):
    """Random normal tensors, the same for every run."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"dtype": dtype, "device": device, "generator": generator}
    return tuple(torch.randn(shape, **options) for _ in range(count))


def _title(options) -> str:
    mask = "causal" if options.causal else "full"
    sizes = f"B={options.batch} H={options.heads} D={options.head_dim}"
    return f"{sizes} {options.dtype} {mask}, tiles {options.block_m}x{options.block_n}"


# ---------------------------------------------------------------- the roofline
def closing(module, options, report, rows, folder):
    """The roofline, and the table beside it: predicted against measured, or predicted alone."""
    if report["mode"] == "timed":
        return _measured(module, options, report, rows, folder)
    return _predicted(module, options, folder)


def _card(module, options):
    name = options.card or EXAMPLE_CARD
    if name not in module.CARDS:
        raise LoadError(f"no card {name!r} in lab 03; there are: {'; '.join(module.CARDS)}")
    return module.CARDS[name]


def _works(module, options, T) -> dict:
    """Name -> (the work that is done, the work as the picture shows it).

    The picture counts the FLOP of the problem for everybody: naive attention computes twice as many
    when causal, and those are no achievement.
    """
    element = getattr(torch, options.dtype).itemsize
    sizes = (options.batch, options.heads, T, options.head_dim, options.causal, element)
    flash = module.flash_work(*sizes, options.block_m, options.block_n)
    naive, ideal = module.naive_work(*sizes), module.ideal_work(*sizes)
    useful = module.Work(ideal.flops, naive.nbytes, naive.launches)
    return {NAIVE: (naive, useful), ASKED: (flash, flash), IDEAL: (ideal, ideal)}


def _note(size, sizes) -> str:
    return f"T={size:,}" if size in (sizes[0], sizes[-1]) else ""


def _predicted(module, options, folder):
    card = _card(module, options)
    real = argparse.Namespace(**{**vars(options), **REAL})  # nothing has to run here
    cases = [
        (name, T, *_works(module, real, T)[name], _note(T, LENGTHS))
        for name in (NAIVE, ASKED, IDEAL)
        for T in LENGTHS
    ]
    softmax = module.softmax_work(ROWS, 4096, 4)
    points, body = [], []
    for name, size, done, shown, note in [*cases, (SOFTMAX, 4096, softmax, softmax, "")]:
        ms = module.predict_ms(done, card, LAUNCH_US)
        scores = module.scores_bytes(real.batch, real.heads, size, 2)
        fits = name != NAIVE or 2 * scores <= card.memory  # two are alive at a time
        if fits:
            points.append(module.Point(name, shown, ms, False, note))
        line = [name, f"{size:,}", f"{done.flops / 1e9:,.2f}", f"{done.nbytes / 1e6:,.0f}"]
        line += [f"{done.intensity:,.1f}", module.bound_by(done, card, LAUNCH_US)]
        body.append([*line, f"{ms:,.3f}" if fits else "no room"])
    picture = module.roofline_plot(points, card, folder / "roofline.png")
    title = f"Predicted, not measured: {card.name} ({card.source})\n{_title(real)}"
    title += f"; {LAUNCH_US:g} us a launch"
    headers = ["code", "T", "GFLOP", "MB", "FLOP/B", "bound by", "ms"]
    return f"{title}\n{table(headers, body)}\n", [picture]


def _measured(module, options, report, rows, folder):
    (peak, _, how_peak), (speed, _, how_speed) = (
        report["ceilings"][name] for name in ("matmul", "copy")
    )
    card = module.Card(
        report["machine"]["card"],
        peak * 1e12,
        speed * 1e12,
        report["machine"].get("memory_gib", 1) * 2**30,
        f"measured: {how_peak}; {how_speed}",
        measured=True,
    )
    points, body = [], []
    slowest = [row for row in rows if row.provider == NAIVE and row.status == "ok" and row.ms][-1:]
    for name in (NAIVE, ASKED, IDEAL, SOFTMAX):
        for row in rows:
            if row.ms is None or row.status != "ok" or not name.startswith(row.provider):
                continue
            if name == SOFTMAX:
                done = shown = module.softmax_work(options.rows, row.size, 4)
                note = ""
            else:
                done, shown = _works(module, options, row.size)[name]
                note = _note(row.size, options.lengths)
                if name == NAIVE:  # points that lie on one another get one note
                    note = f"T={options.lengths[0]:,} to {row.size:,}" if row in slowest else ""
            points.append(module.Point(name, shown, row.ms, True, note))
            ms = module.predict_ms(done, card, LAUNCH_US)
            line = [name, f"{row.size:,}", f"{shown.intensity:,.1f}"]
            line += [module.bound_by(done, card, LAUNCH_US), f"{ms:,.3f}", f"{row.ms:,.3f}"]
            body.append([*line, f"{row.ms / ms:.2f}"])
    ridge = module.ridge_point(card.peak_flops, card.bandwidth)
    picture = module.roofline_plot(points, card, folder / "roofline.png")
    title = f"Your card: {peak:.4g} TFLOP/s, {speed:.4g} TB/s, ridge at {ridge:.4g} FLOP a byte"
    headers = ["code", "T", "FLOP/B", "bound by", "predicted ms", "measured ms", "times"]
    return f"{title}\n{table(headers, body)}\n", [picture]
