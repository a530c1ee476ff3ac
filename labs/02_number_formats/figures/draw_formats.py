"""Draws spacing.png and error_growth.png. Takes half a minute.

It uses solution.py; where there is none, your exercise.py, once steps 1 to 3 are written.

Run it from the repository root: python labs/02_number_formats/figures/draw_formats.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[3]))
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from labs._impl import load  # noqa: E402

REFERENCE = HERE.parents[1] / "solution.py"
nf = load("labs/02_number_formats/x.py", "solution" if REFERENCE.is_file() else "exercise")
# Okabe-Ito colours, told apart by line style and by their labels as well.
STYLE = {
    "FP32": ("#000000", "-"),
    "TF32": ("#0072B2", "--"),
    "FP16": ("#009E73", "-"),
    "BF16": ("#D55E00", "-"),
    "E5M2": ("#CC79A7", "--"),
    "E4M3": ("#E69F00", "-"),
}


def spacing(ax):
    """The spacing of each format against magnitude, from 2**-30 to 2**20."""
    exponents = np.arange(-30, 20)
    for name, (colour, line) in STYLE.items():
        fmt = getattr(nf, name)
        largest, smallest_normal, smallest = nf.format_limits(*fmt)
        x = np.repeat(2.0**exponents, 2)
        x[1::2] *= 2 - 2**-20  # a step of the staircase, from its left end to its right one
        x = x[(x >= smallest) & (x <= largest)]
        x = np.append(x, largest) if largest < 2.0**20 else x
        gap = nf.ulp(x, fmt)
        nudge = 2**0.22 if name == "FP16" else 1.0  # else it would hide tf32's steps
        ax.plot(x, gap * nudge, color=colour, linestyle=line, linewidth=1.8, label=name)
        if largest < 2.0**20:
            ax.plot(largest, gap[-1] * nudge, "o", color=colour, markersize=7)
            ax.annotate(
                f"{name.lower()}: {largest:g}",
                (largest, gap[-1] * nudge),
                xytext={"E5M2": (-76, 2), "E4M3": (-76, 26), "FP16": (9, -4)}[name],
                textcoords="offset points",
                color=colour,
                fontsize=10,
                arrowprops={"arrowstyle": "-", "color": colour} if name == "E4M3" else None,
            )
        else:
            ends = {"FP32": (-149, 128), "TF32": (-136, 128), "BF16": (-133, 128)}[name]
            text = f"{name.lower()}: to $2^{{{ends[1]}}}$"
            ax.text(2**21.2, gap[-1] * 2, text, color=colour, fontsize=10, va="center")
            arrow = {"arrowstyle": "->", "color": colour, "linewidth": 1.8}
            ax.annotate("", (2**21.0, gap[-1] * 2), (2.0**19.9, gap[-1]), arrowprops=arrow)
            text = f"to $2^{{{ends[0]}}}$"
            ax.text(2**-31.4, gap[0], text, color=colour, fontsize=10, va="center", ha="right")
            ax.annotate("", (2**-31.2, gap[0] / 2), (2.0**-29.9, gap[0]), arrowprops=arrow)
        if smallest > 2.0**-30:
            ax.plot(smallest, gap[0] * nudge, "s", color=colour, markersize=6)
    ax.axvspan(2.0**-24, 2.0**-14, color="#F2F2F2", zorder=0)
    ax.text(2.0**-23.5, 2.0**12, "fp16 is subnormal\nin the shaded part", fontsize=9.5, va="center")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xlim(2.0**-38, 2.0**30)
    ax.set_ylim(2.0**-54, 2.0**16)
    ax.set_xticks([2.0**e for e in range(-30, 21, 5)])
    ax.set_yticks([2.0**e for e in range(-50, 15, 10)])
    ax.grid(alpha=0.3)
    ax.set_xlabel("|x|")
    ax.set_ylabel("spacing of the numbers there (ulp)")
    ax.set_title(
        "square: smallest number above 0; circle: largest number; arrow: goes on.\n"
        "fp16 is drawn a little high: from 2^-14 to 65504 it has the spacing of tf32.",
        fontsize=10,
    )


def growth(axes, trials=48, length=16384):
    """Root mean square error of dot products against their length."""
    rng = np.random.default_rng(0)
    shown = np.unique(np.geomspace(4, length, 40).astype(int)) - 1
    pairs = [("FP32", "FP32"), ("TF32", "FP32"), ("BF16", "FP32"), ("FP16", "FP16")]
    pairs += [("BF16", "BF16")]
    marks = dict(zip(pairs, "osv^D", strict=True))
    for ax, draw, title in (
        (axes[0], rng.random, "all terms positive, as in the sum of a softmax"),
        (axes[1], rng.standard_normal, "terms of both signs, as in a score q . k"),
    ):
        a, b = draw((trials, length)), draw((trials, length))
        for pair in pairs:
            inputs, accumulator = (getattr(nf, name) for name in pair)
            error = np.sqrt((nf.dot_error(a, b, inputs, accumulator) ** 2).mean(axis=0))
            colour = STYLE[pair[0]][0]
            line = "--" if pair[0] != pair[1] else "-"
            ax.plot(
                shown + 1,
                error[shown],
                color=colour,
                linestyle=line,
                marker=marks[pair],
                markersize=4,
                markevery=4,
                linewidth=1.6,
                label=f"{pair[0].lower()} inputs, {pair[1].lower()} sum",
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_ylim(1e-8, 2)
        ax.set_xlabel("terms n")
        ax.set_title(title, fontsize=10.5)
        ax.grid(alpha=0.3)
    n = np.array([64, 16384])
    axes[0].plot(n, 1e-7 * np.sqrt(n / 64) / 2.2, color="#777777", linestyle=":")
    axes[0].text(2000, 1.0e-7, "slope of sqrt(n)", color="#555555", fontsize=9)
    axes[0].plot([32, 512], [3e-2, 3e-2 * 16], color="#777777", linestyle=":")
    axes[0].text(20, 1.3e-1, "slope of n", color="#555555", fontsize=9)
    axes[0].set_ylabel("error / sum of |a b|")
    axes[1].legend(fontsize=9, loc="upper right", framealpha=1.0)


def save(fig, name):
    fig.savefig(HERE.with_name(name), bbox_inches="tight", metadata={"Software": None})


def main():
    fig, ax = plt.subplots(figsize=(9.2, 6.0), dpi=130)
    spacing(ax)
    save(fig, "spacing.png")
    fig, axes = plt.subplots(1, 2, figsize=(11.0, 4.8), dpi=130, sharey=True)
    growth(axes)
    fig.tight_layout()
    save(fig, "error_growth.png")


if __name__ == "__main__":
    main()
