"""Pictures of `python -m labs bench`: rates with the measured bound, costs, counts with formulas.

Colours are those of Okabe and Ito, told apart by every common kind of colour blindness; markers
differ too. A figure is readable at half its size.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

YOURS = "#D55E00"
OTHERS = ["#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999"]
MARKERS = "osD^vP*X"
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
            axes.plot([r.size for r in mine], [r.rate for r in mine], label=name, **style)
            _out_of_memory(axes, rows, name, style)
        rate, unit, how = bound
        axes.axhline(rate, color="black", linestyle="--", linewidth=1.5)
        axes.annotate(
            f"measured bound {rate:.4g} {unit}: {how}",
            (0.01, rate),
            xycoords=("axes fraction", "data"),
            xytext=(0, -6),
            textcoords="offset points",
            va="top",
            fontsize=13,
        )
        axes.set_ylim(0, 1.06 * max([rate, *(r.rate for r in rows if r.rate)]))
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
                    axes.plot([r.size for r in mine], values, label=name, **style)
                    _out_of_memory(axes, rows, name, style)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(_plain))
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
        for axes, attribute in zip(panels, ("moved", "peak"), strict=True):
            for name, style in _styles(sweep).items():
                mine = [r for r in rows if r.provider == name]
                line = [(r.size, getattr(r, f"{attribute}_formula")) for r in mine]
                line = [(x, y / 2**20) for x, y in line if y is not None]
                axes.plot(*_columns(line), color=style["color"], linewidth=1.8)
                dots = [(r.size, getattr(r, attribute)) for r in mine]
                dots = [(x, y / 2**20) for x, y in dots if y is not None]
                axes.plot(*_columns(dots), label=f"{name}, counted", **{**style, "linestyle": ""})
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(_plain))
            _size_axis(axes, sweep)
        panels[0].plot([], [], color="black", linewidth=1.8, label="line: the handout's formula")
        panels[0].set_ylabel("bytes moved, MiB")
        panels[1].set_ylabel("peak extra memory, MiB")
        figure.suptitle(subtitle, x=0.01, ha="left", fontsize=15)
        _legend(figure, panels[0])
        return _save(figure, path)


def _styles(sweep) -> dict[str, dict]:
    """Line style by provider: yours in vermilion, the others in the order of the sweep."""
    styles, others = {}, iter(zip(OTHERS, MARKERS[1:], strict=True))
    for i, provider in enumerate(sweep.providers):
        first_of_yours = provider.yours and not any(p.yours for p in sweep.providers[:i])
        color, marker = (YOURS, "o") if first_of_yours else next(others)
        styles[provider.name] = {"color": color, "marker": marker}
    return styles


def _out_of_memory(axes, rows, name, style) -> None:
    """Marks the first size that ran out of memory, at the foot of the picture."""
    sizes = [r.size for r in rows if r.provider == name and r.status == "OOM"]
    if sizes:
        at = (min(sizes), 0.03)
        axes.annotate(
            f"{name}: OOM",
            at,
            xycoords=("data", "axes fraction"),
            color=style["color"],
            ha="right",
            fontsize=13,
            weight="bold",
        )


def _columns(points):
    return ([x for x, _ in points], [y for _, y in points])


def _size_axis(axes, sweep) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sweep.sizes, [f"{size:,}" for size in sweep.sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{sweep.axis}" + (" (sequence length)" if sweep.axis == "T" else ""))


def _plain(value, _position) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _legend(figure, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _save(figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
