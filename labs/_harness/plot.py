"""Pictures of `python -m labs bench`: rates with the measured bound, costs, counts with formulas.

Colours are those of Okabe and Ito, told apart by every common kind of colour blindness; markers
differ too. A figure is readable at half its size.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

YOURS = "#D55E00"
OTHERS = ["#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999"]
MARKERS = "sD^vP*X"
LETTER = 0.13  # inches, of a label at an axis
STYLE = {
    "font.size": 15,
    "axes.titlesize": 15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 2.2,
    "lines.markersize": 9,
    "legend.frameon": False,
    "legend.fontsize": 13,
}


def rates(path: Path, sweep, rows, subtitle: str, bound: tuple[float, str, str]) -> Path:
    """The rate of each provider against size, with the measured bound as a line.

    Args:
        path: the PNG to write.
        sweep: the bench.Sweep measured. rows: its bench.Row list.
        subtitle: fixed sizes, implementation and card.
        bound: (rate in the sweep's unit, unit, how it was measured).

    Returns:
        path
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(11, 7), layout="constrained")
        styles = _styles(sweep)
        for name, style in styles.items():
            mine = [r for r in rows if r.provider == name and r.rate is not None]
            axes.plot(_sizes(mine), [r.rate for r in mine], label=name, **style)
        for level, (name, style) in enumerate(_ran_out(styles, rows)):
            _out_of_memory(axes, rows, name, "rate", style, level=level)
        rate, unit, how = bound
        axes.axhline(rate, color="black", linestyle="--", linewidth=1.5)
        axes.annotate(
            f"measured bound {rate:.4g} {unit}: {how}",
            (0.01, rate),
            xycoords=("axes fraction", "data"),
            xytext=(0, 5),
            textcoords="offset points",
            fontsize=13,
        )
        axes.set_ylim(0, 1.1 * max([rate, *(r.rate for r in rows if r.rate)]))
        _size_axis(axes, sweep)
        axes.set_ylabel(f"{unit} (higher is better)")
        axes.set_title(subtitle, loc="left")
        _legend(figure, axes)
        return _save(figure, path)


def costs(path: Path, sweep, rows, subtitle: str) -> Path:
    """Latency and peak extra memory of the sweep's `cost` providers against size, log-log."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(14, 7), layout="constrained")
        for axes, attribute, scale in zip(panels, ("ms", "peak"), (1, 2**20), strict=True):
            for name, style in _styles(sweep).items():
                mine = [r for r in rows if r.provider == name and r.ms is not None]
                if name in sweep.cost:
                    values = [getattr(r, attribute) / scale for r in mine]
                    axes.plot(_sizes(mine), values, label=name, **style)
                    _out_of_memory(axes, rows, name, attribute, style, scale)
            _log_axis(axes)
            _size_axis(axes, sweep)
        panels[0].set_ylabel("latency, ms (lower is better)")
        panels[1].set_ylabel("peak extra memory, MiB (lower is better)")
        figure.suptitle(subtitle, x=0.01, ha="left", fontsize=15)
        _legend(figure, panels[0])
        return _save(figure, path)


def counts(path: Path, sweep, rows, subtitle: str) -> Path:
    """Counted bytes as markers on the lines of the handout's formulas, log-log."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(14, 7), layout="constrained")
        formula = False
        for axes, attribute in zip(panels, ("moved", "peak"), strict=True):
            for name, style in _styles(sweep).items():
                mine = [r for r in rows if r.provider == name]
                line = [r for r in mine if getattr(r, f"{attribute}_formula") is not None]
                values = [getattr(r, f"{attribute}_formula") / 2**20 for r in line]
                # A line through one point cannot be seen: a dash stands for it.
                dash = {"marker": "_", "ms": 40, "mew": 1.8} if len(line) == 1 else {}
                axes.plot(_sizes(line), values, color=style["color"], linewidth=1.8, **dash)
                formula = formula or bool(line)
                dots = [r for r in mine if getattr(r, attribute) is not None]
                values = [getattr(r, attribute) / 2**20 for r in dots]
                label = f"{name}, counted" if dots else None
                axes.plot(_sizes(dots), values, **style, label=label, linestyle="")
            _log_axis(axes)
            _size_axis(axes, sweep)
        if formula:
            label = "line: the handout's formula"
            panels[0].plot([], [], color="black", linewidth=1.8, label=label)
        panels[0].set_ylabel("bytes moved, MiB")
        panels[1].set_ylabel("peak extra memory, MiB")
        figure.suptitle(subtitle, x=0.01, ha="left", fontsize=15)
        _legend(figure, panels[0])
        return _save(figure, path)


def handout_rates(page: Path, path: Path, peak: float) -> Path:
    """TFLOP/s against T from a handout's own tables, a panel for each head dim and mask.

    Args:
        page: the handout. A table begins "| D = 64 full / causal, TFLOP/s | T = 512 | 1024 |", and
            a row is a name and cells of two numbers, "387 / 241".
        path: of the picture.
        peak: TFLOP/s of a large matrix product, drawn as a line.
    """
    found = _rates_in(page.read_text())
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    looks = list(zip((YOURS, *OTHERS), "o" + MARKERS, strict=True))
    figure, panels = plt.subplots(1, len(found), figsize=(15, 4), sharey=True, layout="constrained")
    for axes, ((D, mask), rows) in zip(panels, found.items(), strict=True):
        for name, row in rows.items():
            color, marker = looks[names.index(name)]
            axes.plot(list(row), list(row.values()), color=color, marker=marker, label=name)
        axes.axhline(peak, color="black", linestyle="--", label=f"matrix product {peak}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(row), [f"{T:,}" for T in row], rotation=45)
        axes.minorticks_off()
        axes.set_title(f"D = {D}, {mask}")
        axes.set_xlabel("T, with B T = 16,384")
        axes.grid(alpha=0.3)
    top = max(rate for rows in found.values() for row in rows.values() for rate in row.values())
    panels[0].set_ylim(0, 1.06 * max(top, peak))
    panels[0].set_ylabel("TFLOP/s")
    handles = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _rates_in(text: str) -> dict[tuple[int, str], dict[str, dict[int, float]]]:
    """(D, "full" or "causal") -> row of the table -> T -> TFLOP/s."""
    found: dict = {}
    tables = re.finditer(r"\| D = (\d+) full / causal.*\n\|[-|: ]+\n((?:\|.*\n)+)", text)
    for table in tables:
        head = re.findall(r"\d+", table[0].partition("\n")[0])[1:]
        for line in table[2].splitlines():
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for T, cell in zip(head, cells, strict=True):
                for mask, rate in zip(("full", "causal"), cell.split(" / "), strict=True):
                    panel = found.setdefault((int(table[1]), mask), {})
                    panel.setdefault(name, {})[int(T)] = float(rate)
    return found


def _styles(sweep) -> dict[str, dict]:
    """Line style by provider: yours in vermilion and on top, the others in the sweep's order."""
    mine = sorted((p for p in sweep.providers if p.yours), key=lambda p: not p.kernel)
    # Seven colours, then the same with their markers one further on.
    shifts = itertools.count()
    others = ((c, MARKERS[(i + k) % len(MARKERS)]) for k in shifts for i, c in enumerate(OTHERS))
    styles = {}
    for provider in sweep.providers:
        if mine and provider is mine[0]:
            style = {"color": YOURS, "marker": "o", "markersize": 7, "zorder": 4}
        else:
            color, marker = next(others)
            style = {"color": color, "marker": marker, "markersize": 11}
        styles[provider.name] = style
    return styles


def _ran_out(styles, rows) -> list[tuple[str, dict]]:
    """Name and style of each provider that ran out of memory at some size."""
    names = {r.provider for r in rows if r.status == "OOM"}
    return [(name, style) for name, style in styles.items() if name in names]


def _out_of_memory(axes, rows, name, attribute, style, scale=1, level=0) -> None:
    """Says beside the last point of a provider that the next size ran out of memory.

    `level` counts the labels below it, so that those of neighbouring lines do not overlap.
    """
    sizes = [r.size for r in rows if r.provider == name and r.status == "OOM"]
    points = [r for r in rows if r.provider == name and getattr(r, attribute) and r.ms is not None]
    if sizes and points:
        axes.annotate(
            f"{name}: OOM at {min(sizes):,}" if attribute == "rate" else f"OOM at {min(sizes):,}",
            (points[-1].size, getattr(points[-1], attribute) / scale),
            xytext=(-40, 14 + 18 * level) if attribute == "rate" else (8, -18),
            textcoords="offset points",
            fontsize=13,
            weight="bold",
            color=style["color"],
        )


def _sizes(rows) -> list[int]:
    return [r.size for r in rows]


def _size_axis(axes, sweep) -> None:
    """The size axis, in powers of two, with a label at each size; close ones lie lower."""
    inches = axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols - 1.3
    doublings = math.log2(max(sweep.sizes) / min(sweep.sizes)) or 1.0
    labels, taken = [], {}  # line -> where its last label ends, in inches
    for size in sweep.sizes:
        text, place = f"{size:,}", math.log2(size / min(sweep.sizes)) / doublings * inches
        half = LETTER * (len(text) + 1) / 2
        line = next((n for n in range(3) if place - half >= taken.get(n, -inches)), None)
        labels.append("" if line is None else "\n" * line + text)
        taken[line] = place + half
    axes.set_xscale("log", base=2)
    axes.set_xticks(sweep.sizes, labels)
    axes.xaxis.set_minor_locator(NullLocator())
    if len(sweep.sizes) == 1:
        axes.set_xlim(sweep.sizes[0] / 2, sweep.sizes[0] * 2)
    axes.margins(x=0.06)
    axes.set_xlabel(f"{sweep.axis}" + (" (sequence length)" if sweep.axis == "T" else ""))


def _log_axis(axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 100 * low:  # under two decades: powers of ten alone would be too few labels
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _save(figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
