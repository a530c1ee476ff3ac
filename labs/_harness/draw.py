"""Pictures of single runs: tile maps and row paths of `trace`, error maps of `pytest --picture`.

Colours are those of Okabe and Ito, told apart by hatching, labels or lightness as well. A figure is
readable at half its size.
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from labs._harness import tilemap

BLUE, ORANGE, GREEN, PURPLE, VERMILION, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#999999",
)
KIND_STYLE = {
    "full": {"facecolor": "#6BAED6"},  # the blue, lighter: numbers stay readable on it
    "diagonal": {"facecolor": ORANGE},
    "skipped": {"facecolor": "#F2F2F2", "hatch": "//"},
    "useless": {"facecolor": PURPLE, "hatch": "xx"},
    "missing": {"facecolor": "#FBDCC8"},  # the missing pairs themselves are vermilion
}
STYLE = {
    "font.size": 15,
    "axes.titlesize": 15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 14,
    "lines.linewidth": 2.2,
    "lines.markersize": 8,
    "hatch.linewidth": 0.8,
}
NUMBERED = 14  # tiles of one axis up to which each carries the order of its visit
LABELLED = 12  # ticks of one axis


# ---------------------------------------------------------------- tile map


def tile_map(path: Path, found: tilemap.TileMap, title: str, kernel: bool) -> Path:
    """Which query tiles met which key tiles, in which order, with the causal diagonal.

    Args:
        path: the PNG to write.
        found: what `trace` found.
        kernel: whether the numbers count within a program.

    Returns:
        path
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(11, 10.5), layout="constrained")
        cells = [cell for row in found.cells for cell in row]
        numbered = max(len(found.cells), len(found.cells[0])) <= NUMBERED
        for cell in cells:
            _draw_cell(axes, cell, 1.4 if numbered else 0.4)
            if numbered and cell.orders and _roomy(cell, found):
                _number(axes, cell, found)
        if found.missing.any():
            _missing_pairs(axes, found)
        if found.causal:
            _staircase(axes, found.T)
        _tile_axes(axes, found)
        present = [kind for kind in tilemap.KINDS if found.counts[kind]]
        handles = [
            Patch(
                label=f"{kind}: {tilemap.MEANINGS[kind]}", edgecolor="#555555", **KIND_STYLE[kind]
            )
            for kind in present
        ]
        if found.missing.any():
            handles[-1].set_label("tile with missing pairs")
            pairs = "missing: needed, never computed"
            handles.append(Patch(facecolor=VERMILION, edgecolor="#555555", label=pairs))
        if found.causal:
            line = Line2D([], [], color="black", label="causal diagonal: visible below it")
            handles.append(line)
        figure.legend(handles=handles, loc="outside lower center", ncols=2, handlelength=2.2)
        lines = [title, found.summary(), *found.captions()]
        if numbered:
            lines.append("number: order of visit" + (" in its program" if kernel else ""))
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=15)
        return _save(figure, path)


def _draw_cell(axes, cell: tilemap.Cell, width: float) -> None:
    (i0, i1), (j0, j1) = cell.rows, cell.keys
    style = KIND_STYLE[cell.kind]
    shape = (j0, i0), j1 - j0, i1 - i0
    axes.add_patch(Rectangle(*shape, **{"edgecolor": "#8A8A8A", "linewidth": 0, **style}))
    axes.add_patch(Rectangle(*shape, fill=False, edgecolor="black", linewidth=width))


def _roomy(cell: tilemap.Cell, found: tilemap.TileMap) -> bool:
    return min(np.ptp(cell.rows), np.ptp(cell.keys)) >= 0.045 * found.T


def _missing_pairs(axes, found: tilemap.TileMap) -> None:
    pairs = np.ma.masked_equal(found.missing, False)
    axes.imshow(
        pairs,
        cmap=ListedColormap([VERMILION]),
        extent=(0, found.T, found.T, 0),
        interpolation="nearest",
        zorder=2,
    )
    for edge in range(found.block_m, found.T, found.block_m):
        axes.axhline(edge, color="black", linewidth=0.8, zorder=2.5)
    for edge in range(found.block_n, found.T, found.block_n):
        axes.axvline(edge, color="black", linewidth=0.8, zorder=2.5)


def _number(axes, cell: tilemap.Cell, found: tilemap.TileMap) -> None:
    """The order of visit, in the corner that the diagonal does not pass."""
    (i0, i1), (j0, j1) = cell.rows, cell.keys
    x, y = (j0 + j1) / 2, (i0 + i1) / 2
    if found.causal and 0 < cell.visible < (i1 - i0) * (j1 - j0):
        above = max(i0, j0) + min(i1, j1) < j0 + j1
        inset_x, inset_y = 0.16 * (j1 - j0), 0.2 * (i1 - i0)
        x, y = (j1 - inset_x, i0 + inset_y) if above else (j0 + inset_x, i1 - inset_y)
    size = 18 if max(len(found.cells), len(found.cells[0])) <= 8 else 13
    white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    axes.text(x, y, cell.label, ha="center", va="center", fontsize=size, bbox=white, zorder=4)


def _staircase(axes, T: int, swap: bool = False, width: float = 2.4) -> None:
    """The edge of the visible pairs: row i sees the cells left of it up to i."""
    steps = np.repeat(np.arange(T + 1), 2)
    xs, ys = steps[1:], steps[:-1]
    if swap:
        xs, ys = ys, xs
    axes.plot(xs, ys, color="white", linewidth=width + 2, zorder=3)
    axes.plot(xs, ys, color="black", linewidth=width, zorder=3)


def _tile_axes(axes, found: tilemap.TileMap) -> None:
    T = found.T
    axes.set_xlim(0, T)
    axes.set_ylim(T, 0)
    axes.set_aspect("equal")
    axes.set_xticks(_edges(T, found.block_n))
    axes.set_yticks(_edges(T, found.block_m))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(f"key j (tiles of {found.block_n})")
    axes.set_ylabel(f"query i (tiles of {found.block_m})")


def _edges(n: int, tile: int) -> list[int]:
    """Edges of tiles, thinned out so that their labels do not overlap; the end is one of them."""
    step = math.ceil(math.ceil(n / tile) / LABELLED) * tile
    edges = list(range(0, n, step))
    if len(edges) > 1 and n - edges[-1] < 0.07 * n:
        edges.pop()
    return [*edges, n]


# ---------------------------------------------------------------- one row


def row_path(path: Path, found, row: int, points, true, lse: float, title: str) -> Path:
    """Scores with the running maximum, the running sum, and one output, as tiles arrive."""
    with plt.rc_context({**STYLE, "axes.grid": True, "grid.alpha": 0.3}):
        figure, panels = plt.subplots(3, 1, figsize=(11, 11), sharex=True, layout="constrained")
        x = np.arange(1, len(points) + 1)
        for at, p in zip(x, points, strict=True):
            spread = np.linspace(-0.3, 0.3, len(p.scores)) if len(p.scores) > 1 else 0.0
            panels[0].plot(
                at + spread + 0 * p.scores, p.scores, "o", color=GREY, markersize=5, zorder=1
            )
        panels[0].plot([], [], "o", color=GREY, markersize=5, label="scores of the tile's keys")
        for panel, values, colour, label in (
            (panels[0], [p.m for p in points], BLUE, "running maximum m"),
            (panels[1], [p.l for p in points], ORANGE, "running sum l"),
            (panels[2], [p.out[0] for p in points], GREEN, "acc[0] / l"),
        ):
            values = [y if math.isfinite(y) else math.nan for y in values]
            edges = np.arange(len(x) + 1) + 0.5
            panel.stairs(values, edges, baseline=None, color=colour, label=label, linewidth=3)
        panels[1].axhline(
            math.exp(lse - points[-1].m) if math.isfinite(points[-1].m) else math.nan,
            color="black",
            linestyle="--",
            linewidth=1.6,
            label="true l, counted from the last m",
        )
        panels[2].axhline(
            true[0], color="black", linestyle="--", linewidth=1.6, label="true out[0]"
        )
        own = [(at, p.stats) for at, p in zip(x, points, strict=True) if p.stats is not None]
        for place, panel in enumerate(panels[:2] if own else []):
            values = [stats[place] for _, stats in own]
            style = {"marker": "s", "markersize": 10 if len(x) <= 24 else 5}
            style |= {"markerfacecolor": "none", "linestyle": ""}
            label = "your online_softmax_stats"
            panel.plot([at for at, _ in own], values, color=VERMILION, label=label, **style)
        for panel, name in zip(panels, ("m", "l", "out[0] so far"), strict=True):
            panel.set_ylabel(name)
            panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
            panel.margins(y=0.12)
        figure.align_ylabels(panels)
        every = math.ceil(len(x) / LABELLED)
        names = [tilemap.span(p.keys).split(" ")[0] for p in points]
        panels[2].set_xticks(x[::every], names[::every], rotation=30 if len(x) > 6 else 0)
        panels[2].set_xlim(0.5, len(x) + 0.5)
        panels[2].set_xlabel("keys of each tile, in the order of visit")
        lines = [title, f"row {row}: the recurrence in float64, in the code's own order of tiles"]
        missing = found.missing_keys(row)
        if missing.size:
            lines.append(f"never met: {tilemap.named(missing, 'key')}")
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=15)
        return _save(figure, path)


# ---------------------------------------------------------------- error map


def error_map(path: Path, expected, got, title: str) -> Path:
    """Where a result is wrong: |got - want| of the (batch, head) with the worst value.

    Args:
        path: the PNG to write.
        expected: an oracle.Expected: value, budget, axes, tiles, causal.
        got: the tensor that was compared with it.

    Returns:
        path
    """
    want = expected.value.detach().double().cpu()
    result = got.detach().double().cpu()
    error = (result - want).abs()
    same = (result == want) | (result.isnan() & want.isnan())
    error[same] = 0.0
    error = error.numpy()
    letters = (expected.axes or "?" * error.ndim)[: error.ndim]
    ranked = np.where(np.isnan(error), np.inf, error)
    worst = np.unravel_index(int(ranked.argmax()), error.shape)
    shown = [axis for axis in range(error.ndim) if letters[axis] not in "BH"][-2:]
    for axis in range(error.ndim - 1, -1, -1):
        if axis not in shown:
            error = np.take(error, worst[axis], axis=axis)
    where = ", ".join(
        f"{_LONG.get(letters[axis], 'axis')} {worst[axis]}"
        for axis in range(len(worst))
        if axis not in shown
    )
    at = tuple(int(worst[axis]) for axis in shown)
    names = [letters[axis] for axis in shown]
    lines = [title, f"{expected.name}: |got - want|" + (f" of {where}, the worst" if where else "")]
    with plt.rc_context(STYLE):
        if error.ndim == 2:
            return _heat_map(path, expected, error, at, names, lines)
        return _error_line(path, expected, np.atleast_1d(error), at, names, lines)


_LONG = {
    "B": "batch",
    "H": "head",
    "T": "query i",
    "S": "key j",
    "D": "head dim d",
    "R": "row",
    "C": "column",
}


def _heat_map(path, expected, error, at, names, lines) -> Path:
    rows, columns = error.shape
    tiles = expected.tiles
    other = {"T": "S", "S": "T"}.get(names[0])
    beside = bool(
        other and names[1] == "D" and tiles.get(other) and rows > tiles.get(names[0], rows)
    )
    figure = plt.figure(figsize=(14 if beside else 11, 9.5), layout="constrained")
    grid = figure.subplots(1, 2 if beside else 1, sharey=True, squeeze=False)[0]
    axes = grid[-1]
    budget = max(expected.budget, 1e-300)
    finite = error[np.isfinite(error)]
    top = max(float(finite.max()) if finite.size else 0.0, 10 * budget)
    colours = plt.get_cmap("viridis_r").with_extremes(under="#EDEDED", bad=VERMILION)
    # A log scale has no 0: what is far within the budget counts as just within it.
    masked = np.ma.masked_where(~np.isfinite(error), np.maximum(error, budget / 2))
    # A place's number stands at its middle; along an axis of tiles at its edge, as the tiles' do.
    down, right = (0.0 if name in tiles else 0.5 for name in names)
    extent = (-right, columns - right, rows - down, -down)
    image = axes.imshow(
        masked,
        norm=LogNorm(budget, top),
        cmap=colours,
        aspect="auto",
        interpolation="nearest",
        extent=extent,
    )
    bar = figure.colorbar(image, ax=axes, extend="min", shrink=0.9)
    bar.set_label(f"|got - want|, from the budget {expected.budget:.2g} up")
    for name, size, lay in ((names[0], rows, axes.axhline), (names[1], columns, axes.axvline)):
        if name in tiles:
            for edge in range(tiles[name], size, tiles[name]):
                lay(edge, color="black", linewidth=1.2)
    if names == ["T", "S"] and expected.causal:
        _staircase(axes, rows)
    y, x = at
    middle = (x + 0.5 - right, y + 0.5 - down)
    axes.plot(*middle, "o", markersize=20, markerfacecolor="none", color="white", mew=4.5)
    axes.plot(*middle, "o", markersize=20, markerfacecolor="none", color="black", mew=2)
    handles = [
        Patch(facecolor="#EDEDED", edgecolor="#555555", label="within the budget"),
        Line2D(
            [],
            [],
            marker="o",
            markersize=14,
            markerfacecolor="none",
            color="black",
            mew=2,
            linestyle="",
            label=f"worst: {_LONG.get(names[0], 'row')} = {y}, "
            f"{_LONG.get(names[1], 'column')} = {x}",
        ),
    ]
    if not np.isfinite(error).all():
        handles.append(Patch(facecolor=VERMILION, edgecolor="#555555", label="NaN or infinite"))
    _integer_ticks(axes, rows, columns, tiles.get(names[0]))
    axes.set_xlabel(_LONG.get(names[1], "column"))
    if beside:
        _tiles_beside(grid[0], expected, names[0], other, rows, error)
        handles += [
            Patch(facecolor="#FDE9D9", edgecolor="#555555", label="rows with a wrong value"),
            Line2D([], [], color="black", label="causal diagonal" if expected.causal else "tiles"),
        ]
    grid[0].set_ylabel(_LONG.get(names[0], "row") + _of(tiles.get(names[0])))
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=15)
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return _save(figure, path)


def _tiles_beside(axes, expected, name, other, rows, error) -> None:
    """The tiles of the scores with the causal diagonal, next to the rows of the error map."""
    across = rows if expected.causal else max(rows, expected.tiles[other])
    wrong = ~(error <= expected.budget)
    for row in np.flatnonzero(wrong.any(axis=1)):
        axes.add_patch(Rectangle((0, row), across, 1, facecolor="#FDE9D9", linewidth=0))
    for edge in range(0, across, expected.tiles[other]):
        axes.axvline(edge, color="black", linewidth=1.2)
    for edge in range(0, rows, expected.tiles[name]):
        axes.axhline(edge, color="black", linewidth=1.2)
    if expected.causal:
        _staircase(axes, rows, swap=name == "S")
    axes.set_xlim(0, across)
    axes.set_xticks(_edges(across, expected.tiles[other]))
    axes.set_xlabel(_LONG[other] + _of(expected.tiles[other]))
    axes.set_title("tiles of the scores", loc="left")


def _of(tile: int | None) -> str:
    return f" (tiles of {tile})" if tile else ""


def _integer_ticks(axes, rows, columns, tile) -> None:
    if tile and tile < rows:
        axes.set_yticks(_edges(rows, tile))
    elif rows <= 8:
        axes.set_yticks(range(rows))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=LABELLED))
    if columns <= 8:
        axes.set_xticks(range(columns))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _error_line(path, expected, error, at, names, lines) -> Path:
    figure, axes = plt.subplots(figsize=(11, 7), layout="constrained")
    name = names[0] if names else "?"
    x = np.arange(error.size)
    fine = np.isfinite(error)
    floor = max(expected.budget, 1e-300) / 100
    axes.set_yscale("log")
    inside = error <= expected.budget
    for keep, colour, marker, label in (
        (fine & inside, BLUE, "o", "within the budget"),
        (fine & ~inside, VERMILION, "s", "wrong"),
    ):
        if keep.any():
            values = np.maximum(error[keep], floor)
            axes.plot(x[keep], values, marker, color=colour, label=label)
    axes.axhline(
        max(expected.budget, 1e-300),
        color="black",
        linestyle="--",
        linewidth=1.6,
        label=f"budget {expected.budget:.2g}",
    )
    top = axes.get_ylim()[1]
    if not fine.all():
        label = "NaN or infinite"
        axes.plot(x[~fine], np.full((~fine).sum(), top), "x", color="black", mew=3, label=label)
    worst = at[0] if at else 0
    height = error[worst] if fine[worst] else top
    axes.plot(
        worst,
        height,
        "o",
        markersize=20,
        markerfacecolor="none",
        color="black",
        mew=2,
        label=f"worst: {_LONG.get(name, 'element')} = {worst}",
    )
    tile = expected.tiles.get(name)
    for edge in range(tile, error.size, tile) if tile else ():
        axes.axvline(edge - 0.5, color=GREY, linewidth=1.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=LABELLED))
    axes.set_xlabel(_LONG.get(name, "element") + (f"; grey: tiles of {tile}" if tile else ""))
    axes.set_ylabel("|got - want|")
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=15)
    figure.legend(loc="outside lower center", ncols=4)
    return _save(figure, path)


def _save(figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
