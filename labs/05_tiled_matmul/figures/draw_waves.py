"""Draws waves.png: what 132 programs load that run at once, row by row and in bands of 8 rows.

Run it from the repository root: python labs/05_tiled_matmul/figures/draw_waves.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

TILES, PROGRAMS, BAND = 64, 132, 8  # 8192 x 8192 in tiles of 128 x 128; an H200's multiprocessors
# Okabe-Ito colours; A, B and C are told apart by their place, too.
A, B, C, IDLE = "#0072B2", "#E69F00", "#009E73", "#EFEFEF"
GAP, THICK = 3, 5


def tiles(band):
    """The first PROGRAMS tiles of C, in bands of `band` rows."""
    order = []
    for top in range(0, TILES, band):
        order += [(m, n) for n in range(TILES) for m in range(top, min(top + band, TILES))]
    return order[:PROGRAMS]


def draw(ax, band, title):
    made = tiles(band)
    rows, cols = {m for m, _ in made}, {n for _, n in made}
    ax.add_patch(Rectangle((0, 0), TILES, TILES, facecolor=IDLE))
    ax.add_patch(Rectangle((-GAP - THICK, 0), THICK, TILES, facecolor=IDLE))
    ax.add_patch(Rectangle((0, -GAP - THICK), TILES, THICK, facecolor=IDLE))
    line = {"edgecolor": "white", "linewidth": 0.4}
    for m, n in made:
        ax.add_patch(Rectangle((n, m), 1, 1, facecolor=C, **line))
    for m in rows:
        ax.add_patch(Rectangle((-GAP - THICK, m), THICK, 1, facecolor=A, **line))
    for n in cols:
        ax.add_patch(Rectangle((n, -GAP - THICK), 1, THICK, facecolor=B, **line))
    for x, y, width, height in (
        (0, 0, TILES, TILES),
        (-GAP - THICK, 0, THICK, TILES),
        (0, -GAP - THICK, TILES, THICK),
    ):
        ax.add_patch(Rectangle((x, y), width, height, fill=False, linewidth=1.2))
    middle, side = TILES / 2, -GAP - THICK - 1.5
    ax.text(side, middle, f"tiles of A: {len(rows)}", rotation=90, ha="right", va="center")
    ax.text(middle, side, f"tiles of B: {len(cols)}", ha="center", va="bottom")
    ax.text(middle, 44, f"C, {TILES} x {TILES} tiles\n{len(made)} made at once", ha="center")
    ax.text(
        middle,
        TILES + 4,
        f"{title}: {len(rows)} + {len(cols)} = {len(rows) + len(cols)} tiles a step",
        ha="center",
        va="top",
        weight="bold",
    )
    ax.set_xlim(-GAP - THICK - 7, TILES + 1)
    ax.set_ylim(TILES + 9, -GAP - THICK - 7)
    ax.set_aspect("equal")
    ax.axis("off")


def main():
    plt.rcParams["font.size"] = 13
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 7), dpi=110)
    draw(left, 1, "Row by row")
    draw(right, BAND, f"Bands of {BAND} rows")
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.99, wspace=0.02)
    file = Path(__file__).with_name("waves.png")
    figure.savefig(file, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    main()
