"""Draws sectors.png: which sectors of memory a tile of a matrix, or of its transpose, fetches.

Run it from the repository root: python labs/04_triton_first_kernels/figures/draw_sectors.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

SIDE, SECTOR = 16, 8  # a 16 x 16 float32 matrix; a sector is 32 bytes, 8 elements
# Okabe-Ito colours, told apart by hatching as well.
USED = {"facecolor": "#0072B2", "alpha": 0.8}
FETCHED = {"facecolor": "#E69F00", "alpha": 0.55, "hatch": "///"}
NOTHING = {"facecolor": "#F4F4F4"}
# Rows and columns of the stored matrix that a tile asks for.
PANELS = [
    ("A tile of 1 x 8 of x", range(3, 4), range(0, 8)),
    ("A tile of 1 x 8 of x.t()", range(0, 8), range(3, 4)),
    ("A tile of 8 x 8 of x.t()", range(0, 8), range(0, 8)),
]


def draw(ax, title, rows, cols):
    wanted = {(r, c) for r in rows for c in cols}
    sectors = {(r, c // SECTOR) for r, c in wanted}
    for r in range(SIDE):
        for c in range(SIDE):
            style = USED if (r, c) in wanted else FETCHED
            style = style if (r, c // SECTOR) in sectors else NOTHING
            ax.add_patch(Rectangle((c, r), 1, 1, edgecolor="#BBBBBB", linewidth=0.5, **style))
        for start in range(0, SIDE, SECTOR):
            box = {"fill": False, "edgecolor": "black", "linewidth": 1.1}
            ax.add_patch(Rectangle((start, r), SECTOR, 1, **box))
    fetched = len(sectors) * SECTOR
    share = "all are used" if fetched == len(wanted) else f"1 in {fetched // len(wanted)} is used"
    plural = "s" if len(sectors) > 1 else ""
    ax.set_title(title, fontsize=12)
    ax.set_xlabel(
        f"{len(sectors)} sector{plural}: {fetched} elements fetched,\n{share}", fontsize=11
    )
    ax.set_xlim(0, SIDE)
    ax.set_ylim(SIDE, 0)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])


def main():
    fig, axes = plt.subplots(1, 3, figsize=(11, 4.7), dpi=130)
    for ax, panel in zip(axes, PANELS, strict=True):
        draw(ax, *panel)
    axes[0].set_ylabel("x as it lies in memory:\nrow after row, 16 elements each", fontsize=10)
    handles = [Rectangle((0, 0), 1, 1, edgecolor="#888888", **s) for s in (USED, FETCHED, NOTHING)]
    handles.append(Rectangle((0, 0), 1, 1, fill=False, edgecolor="black"))
    names = ["used", "fetched, not used", "not fetched", "a sector: 32 bytes, 8 float32"]
    fig.legend(handles, names, loc="lower center", ncols=4, fontsize=10, frameon=False)
    fig.subplots_adjust(bottom=0.18, top=0.94, left=0.06, right=0.99, wspace=0.08)
    fig.savefig(Path(__file__).with_name("sectors.png"), metadata={"Software": None})


if __name__ == "__main__":
    main()
