"""Draws tiles.png: which tiles a causal forward computes, T = 33, block_q = 7, block_k = 11.

Run it from the repository root: python labs/06_attention_kernels/figures/draw_tiles.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

T, BLOCK_Q, BLOCK_K = 33, 7, 11
# Okabe-Ito colours, told apart by hatching as well.
STYLE = {
    "full": {"facecolor": "#0072B2", "alpha": 0.75},
    "diagonal": {"facecolor": "#E69F00", "alpha": 0.75},
    "skipped": {"facecolor": "#F2F2F2", "hatch": "//"},
}


def kind(i0, i1, j0, j1):
    """Rows [i0, i1) against columns [j0, j1): a key is visible when j <= i."""
    if j0 > i1 - 1:
        return "skipped"  # the first key is in the future of the last row
    return "full" if j1 - 1 <= i0 else "diagonal"


def main():
    fig, ax = plt.subplots(figsize=(9.6, 6.2), dpi=130)
    counts = dict.fromkeys(STYLE, 0)
    for i0 in range(0, T, BLOCK_Q):
        i1 = min(i0 + BLOCK_Q, T)
        visited = []
        for n, j0 in enumerate(range(0, T, BLOCK_K)):
            j1 = min(j0 + BLOCK_K, T)
            which = kind(i0, i1, j0, j1)
            counts[which] += 1
            if which != "skipped":
                visited.append(str(n))
            style = {"edgecolor": "#9A9A9A", "linewidth": 0, **STYLE[which]}
            ax.add_patch(Rectangle((j0, i0), j1 - j0, i1 - i0, **style))
            ax.add_patch(
                Rectangle((j0, i0), j1 - j0, i1 - i0, fill=False, edgecolor="black", linewidth=1.6)
            )
            # Labels keep clear of the staircase: in the corner that it does not pass.
            if which == "full":
                x, y, align = (j0 + j1) / 2, (i0 + i1) / 2, "center"
            elif which == "skipped" or max(i0, j0) + min(i1, j1) < j0 + j1:
                x, y, align = j1 - 0.5, i0 + 1.0, "right"
            else:
                x, y, align = j0 + 0.5, i1 - 1.0, "left"
            white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
            ax.text(x, y, which, ha=align, va="center", fontsize=10, bbox=white)
        rows = f"rows {i0}..{i1 - 1}"
        keys = f"hi = {i1}: key tile{'s' if len(visited) > 1 else ''} {', '.join(visited)}"
        ax.text(T + 0.8, (i0 + i1) / 2, f"{rows}\n{keys}", va="center", fontsize=10)
    # The staircase: a cell left of and below it is a visible (query, key) pair.
    xs, ys = [0], [0]
    for i in range(T):
        xs += [i + 1, i + 1]
        ys += [i, i + 1]
    ax.plot(xs, ys, color="#D55E00", linewidth=1.8)
    ax.add_patch(Rectangle((11, 13), 3, 1, facecolor="black", zorder=3))
    ax.annotate(
        "the trap: row 13 needs keys 11 to 13 (black),\nso query tile 1 needs key tile 1",
        xy=(13.0, 13.0),
        xytext=(11.9, 4.6),
        fontsize=10,
        va="center",
        arrowprops={"arrowstyle": "->", "color": "black", "relpos": (0.05, 0)},
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "black"},
    )
    ax.set_xlim(0, T)
    ax.set_ylim(T, 0)
    ax.set_aspect("equal")
    ax.set_xticks(range(0, T + 1, BLOCK_K))
    ax.set_yticks([*range(0, T, BLOCK_Q), T])
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set_xlabel(f"key j (block_k = {BLOCK_K})")
    ax.set_ylabel(f"query i (block_q = {BLOCK_Q})")
    ax.set_title(
        f"{counts['full']} full, {counts['diagonal']} diagonal, {counts['skipped']} skipped tiles; "
        "pairs below the orange line are visible",
        y=-0.07,
        fontsize=10,
    )
    fig.savefig(
        Path(__file__).with_name("tiles.png"), bbox_inches="tight", metadata={"Software": None}
    )


if __name__ == "__main__":
    main()
