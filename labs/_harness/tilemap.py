"""Which queries met which keys: visits, the tile map as data and as text, one row's path.

`trace` finds out what a run visited; `draw` makes pictures of it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from labs._harness import oracle

WIDTH = 100  # columns of the text form
SEED = 8  # of the inputs: at the default size the last row's maximum grows with each tile
LISTED = 6  # lines about missing tiles; the rest are counted


def inputs(T: int, D: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v (1, 1, T, D) float32: the same ones each time."""
    oracle.seed(SEED, "trace")
    return oracle.qkv(1, 1, T, D)


@dataclass
class Visit:
    """Queries that met keys: one turn of the inner loop.

    Attributes:
        order: counts from 1; in a kernel, within its program.
        rows, keys: which queries and keys, ascending.
    """

    order: int
    rows: np.ndarray
    keys: np.ndarray


# ---------------------------------------------------------------- the tile map


@dataclass
class Cell:
    """One query tile against one key tile.

    Attributes:
        kind: "full", "diagonal", "skipped", "useless" (visited, but no query sees a key of it) or
            "missing" (a visible pair that no visit computed).
        orders: the orders of the visits that touched it.
        rows, keys: (first, past the last).
        visible, computed: pairs that causal attention needs, and those of them that met.
    """

    kind: str
    orders: list[int]
    rows: tuple[int, int]
    keys: tuple[int, int]
    visible: int
    computed: int

    @property
    def label(self) -> str:
        """The order of the first visit, and how often it was visited if more than once."""
        if not self.orders:
            return ""
        times = f"x{len(self.orders)}" if len(self.orders) > 1 else ""
        return f"{self.orders[0]}{times}"


KINDS = ("full", "diagonal", "skipped", "useless", "missing")
LETTERS = {"full": "F", "diagonal": "D", "skipped": ".", "useless": "U", "missing": "M"}
MEANINGS = {
    "full": "every pair is visible",
    "diagonal": "needs the mask",
    "skipped": "nothing to see, never read",
    "useless": "read, but wholly masked",
    "missing": "needed, never computed",
}


@dataclass
class TileMap:
    """What one call did.

    Attributes:
        T, block_m, block_n, causal: as asked for.
        visits: in the order that the code ran.
        cells: a list for each query tile of its key tiles.
        numbers: (what, counted, least needed) for the caption.
        verdict: one line on the result.
        error: what stopped the code, or None.
        missing: (T, T), which pairs are needed and were never computed.
    """

    T: int
    block_m: int
    block_n: int
    causal: bool
    visits: list[Visit]
    cells: list[list[Cell]] = field(default_factory=list)
    numbers: list[tuple[str, int, int]] = field(default_factory=list)
    verdict: str = ""
    error: str | None = None

    def __post_init__(self):
        T = self.T
        needed = np.tril(np.ones((T, T), dtype=bool)) if self.causal else np.ones((T, T), bool)
        met = np.zeros((T, T), dtype=bool)
        orders: dict[tuple[int, int], list[int]] = {}
        for visit in self.visits:
            met[np.ix_(visit.rows, visit.keys)] = True
            for i in np.unique(visit.rows // self.block_m):
                for j in np.unique(visit.keys // self.block_n):
                    orders.setdefault((int(i), int(j)), []).append(visit.order)
        for i, i0 in enumerate(range(0, T, self.block_m)):
            i1 = min(i0 + self.block_m, T)
            self.cells.append([])
            for j, j0 in enumerate(range(0, T, self.block_n)):
                j1 = min(j0 + self.block_n, T)
                seen, want = met[i0:i1, j0:j1], needed[i0:i1, j0:j1]
                visible, computed = int(want.sum()), int((want & seen).sum())
                if computed < visible:
                    kind = "missing"
                elif visible:
                    kind = "full" if visible == want.size else "diagonal"
                else:
                    kind = "useless" if seen.any() else "skipped"
                cell = Cell(kind, orders.get((i, j), []), (i0, i1), (j0, j1), visible, computed)
                self.cells[-1].append(cell)
        self.missing = needed & ~met

    @property
    def counts(self) -> Counter:
        return Counter(cell.kind for row in self.cells for cell in row)

    def missing_keys(self, row: int) -> np.ndarray:
        """Keys that a query should see and never met."""
        return np.flatnonzero(self.missing[row])

    def summary(self) -> str:
        counts = self.counts
        visited = sum(bool(cell.orders) for row in self.cells for cell in row)
        parts = [f"{counts[kind] or 'none'} {kind}" for kind in KINDS]
        return f"{visited} of {sum(counts.values())} tiles visited: {', '.join(parts)}"

    def captions(self) -> list[str]:
        """Counted against needed, one line each."""
        return [
            f"{what}: {counted:,}; needed {least:,}: {counted / least:.2f} times"
            for what, counted, least in self.numbers
        ]


def least(T, block_m, block_n, causal, D, itemsize, kernel) -> tuple[int, int]:
    """Bytes to read and FLOPs that suffice with these tiles.

    A kernel loads Q, K and V and works on whole tiles, padding included. Of PyTorch code the bytes
    of K are counted, and a tile may end with the last visible key.
    """
    nbytes = flops = 0
    for i0 in range(0, T, block_m):
        rows = min(block_m, T - i0)
        hi = i0 + rows if causal else T
        if kernel:
            tiles = math.ceil(hi / block_n)
            nbytes += itemsize * D * (rows + 2 * min(tiles * block_n, T))
            flops += 4 * block_m * tiles * block_n * D
        else:
            nbytes += itemsize * D * hi
            flops += 4 * rows * hi * D
    return nbytes, flops


# ---------------------------------------------------------------- one row


@dataclass
class Point:
    """One row's state after a visit: the recurrence in float64.

    Attributes:
        keys: of the visit. scores: of those that the row sees and had not met before.
        m, l: running maximum and sum. alpha: the factor of the old sum.
        out: normalised output so far, (D,), NaN before the first visible key.
        stats: (m, l) that the lab's own running statistics give, or None.
    """

    keys: np.ndarray
    scores: np.ndarray
    m: float
    l: float
    alpha: float
    out: np.ndarray
    stats: tuple[float, float] | None = None


def path(found: TileMap, row: int, options, stats=None) -> tuple[list[Point], np.ndarray, float]:
    """The recurrence of one row over the tiles in the order that the code visited them.

    Returns:
        (points, the true output of the row, its true log-sum-exp)
    """
    q, k, v = (t[0, 0].double().numpy() for t in inputs(options.T, options.head_dim))
    scores = k @ q[row] / math.sqrt(options.head_dim)
    sees = np.arange(options.T) <= (row if options.causal else options.T)
    m, l, acc = -math.inf, 0.0, np.zeros(options.head_dim)
    points, blocks, met = [], [], np.zeros(options.T, dtype=bool)
    for visit in found.visits:
        if row not in visit.rows:
            continue
        new = visit.keys[sees[visit.keys] & ~met[visit.keys]]
        met[new] = True
        alpha = 1.0
        if new.size:
            m_new = max(m, scores[new].max())
            alpha, p = math.exp(m - m_new), np.exp(scores[new] - m_new)
            l, acc, m = l * alpha + p.sum(), acc * alpha + p @ v[new], m_new
            blocks.append(torch.from_numpy(scores[new]))
        out = acc / l if l else np.full_like(acc, math.nan)
        points.append(Point(visit.keys, scores[new], m, l, alpha, out))
        if stats is not None and blocks:
            points[-1].stats = _running(stats, blocks)
    weights = np.exp(scores[sees] - scores[sees].max())
    true = weights @ v[sees] / weights.sum()
    return points, true, float(scores[sees].max() + math.log(weights.sum()))


def _running(stats, blocks) -> tuple[float, float] | None:
    try:
        m, l = stats(iter(blocks))
        return float(m), float(l)
    except Exception:  # not written, or wrong in a way that its own tests report
        return None


# ---------------------------------------------------------------- text


def span(numbers) -> str:
    """Whole numbers in short: "3", "7..13", or with gaps "7..13 (5 of them)"."""
    first, last = int(numbers[0]), int(numbers[-1])
    if first == last:
        return str(first)
    gaps = f" ({len(numbers)} of them)" if len(numbers) != last - first + 1 else ""
    return f"{first}..{last}{gaps}"


def named(numbers, one: str, many: str = "") -> str:
    """ "query 64", "queries 0..6"."""
    name = one if len(numbers) == 1 else many or f"{one}s"
    return f"{name} {span(numbers)}"


def tile_text(found: TileMap) -> list[str]:
    """The tile map in letters, with the order of visit where it fits."""
    head = [span(range(*row[0].rows)) for row in found.cells]
    left = max(5, *map(len, head)) + 1
    starts = [str(cell.keys[0]) for cell in found.cells[0]]
    marks = [[f"{LETTERS[c.kind]}{c.label}" for c in row] for row in found.cells]
    width = 2 + max(len(mark) for row in [starts, *marks] for mark in row)
    lines = []
    if left + width * len(starts) <= WIDTH:
        lines.append(f"{'key':>{left}}" + "".join(f"{s:>{width}}" for s in starts))
        number = "; the number is the order of visit"
        number += ", x2 a second visit" if any("x" in m for row in marks for m in row) else ""
    else:
        marks = [[LETTERS[c.kind] for c in row] for row in found.cells]
        width, number = (2, "") if left + 1 + 2 * len(starts) <= WIDTH else (1, "")
        ends = f"from {starts[0]} to {starts[-1]} in steps of {found.block_n}"
        lines.append(f"{'key':>{left}}  {ends}")
    lines.append("query")
    for name, row in zip(head, marks, strict=True):
        gap = "" if number else " "
        lines.append(f"{name:>{left}}{gap}" + "".join(f"{mark:>{width}}" for mark in row))
    present = [kind for kind in KINDS if found.counts[kind]]
    lines += ["", ", ".join(f"{LETTERS[kind]} {kind}" for kind in present) + number]
    return lines


def missing_text(found: TileMap) -> list[str]:
    cells = [cell for row in found.cells for cell in row if cell.kind == "missing"]
    lines = [
        f"missing: {named(range(*c.rows), 'query', 'queries')} with "
        f"{named(range(*c.keys), 'key')}: "
        f"{c.visible - c.computed} of {c.visible} visible pairs never met"
        for c in cells[:LISTED]
    ]
    if len(cells) > LISTED:
        lines.append(f"missing in {len(cells) - LISTED} more")
    return lines


def path_text(found: TileMap, row: int, points, true, lse) -> list[str]:
    """One row's path as a table."""
    lines = [
        f"row {row}: the recurrence in float64, over the tiles in the order that the code "
        "visited them",
        f"{'keys':>12}{'m':>10}{'alpha':>9}{'l':>10}{'out[0]':>10}{'|out - true|':>14}",
    ]
    table = []
    for p in points:
        off = np.abs(p.out - true).max()
        table.append(
            f"{span(p.keys).split(' ')[0]:>12}{p.m:>10.4f}{p.alpha:>9.4f}{p.l:>10.4f}"
            f"{p.out[0]:>10.4f}{off:>14.2g}"
        )
    if not points:
        table = [f"{'no tile':>12}"]
    if len(table) > 24:
        table[12:-8] = [f"{'...':>12}"]
    lines += table
    end = f"{'true':>12}{'m + log l = ' + format(lse, '.4f'):>29}{true[0]:>10.4f}"
    lines.append(end)
    missing = found.missing_keys(row)
    if missing.size:
        lines.append(f"never met: {named(missing, 'key')}; the path ends beside the true value")
    own = [p.stats for p in points]
    if own and own[-1] is not None:
        lines.append(f"your online_softmax_stats over the same blocks: {_compare(points)}")
    return lines


def _compare(points) -> str:
    for number, p in enumerate(points, 1):
        if p.stats is not None and not np.allclose(p.stats, (p.m, p.l), rtol=1e-9, atol=0):
            m, l = p.stats
            return f"after tile {number} it gives m = {m:.4f}, l = {l:.4f}"
    return "the same m and l after each"
