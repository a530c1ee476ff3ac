"""Draws ping_pong.png: two consumers on one multiprocessor, in step and in turn.

A model, not a measurement. Tensor cores and exponential units serve all who ask in equal shares;
with turns the tensor cores serve one after the other. The rest of a softmax is a consumer's own.
Run it from the repository root: python labs/11_warp_specialization/figures/draw_ping_pong.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

PRODUCT, EXP, REST = 256, 512, 300  # clocks of a step at D = 64: handout, section 1
CLOCKS = 5000
OTHER = "rest of the softmax"
# Colour-blind safe (Okabe and Ito).
COLORS = {"Q K": "#0072B2", "P V": "#56B4E9", "exponentials": "#D55E00", OTHER: "#F0E442"}


def timeline(turns: bool) -> list[list[tuple[str | None, str | None]]]:
    """For each consumer, clock by clock: (product that runs, part of the softmax that runs)."""
    products: list[list] = [[], []]  # of each consumer: [what, clocks left], in order
    softmax: list[list] = [[], []]
    steps, log, waiting = [0, 0], [[], []], []  # waiting: for the tensor cores, first come first
    for _ in range(CLOCKS):
        for i in (0, 1):
            if not products[i] and not softmax[i]:
                products[i] = [["Q K", PRODUCT], ["P V", PRODUCT]][: 1 + (steps[i] > 0)]
                softmax[i] = [[OTHER, REST / 2], ["exponentials", EXP], [OTHER, REST / 2]]
                steps[i] += 1
                waiting.append(i)
        served = waiting[:1] if turns else list(waiting)
        able = [
            i for i in (0, 1) if softmax[i] and ["Q K"] != [what for what, _ in products[i][:1]]
        ]
        exp = [i for i in able if softmax[i][0][0] == "exponentials"]
        for i in (0, 1):
            product = _spend(products[i], 1 / len(served)) if i in served else None
            part = _spend(softmax[i], 1 / len(exp) if i in exp else 1) if i in able else None
            log[i].append((product, part))
            if i in served and not products[i]:
                waiting.remove(i)
    return log


def _spend(jobs: list[list], clocks: float) -> str:
    what = jobs[0][0]
    jobs[0][1] -= clocks
    if jobs[0][1] < 1e-9:
        jobs.pop(0)
    return what


def draw() -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
    for axis, turns in zip(axes, (False, True), strict=True):
        log = timeline(turns)
        busy = sum(any(now[0] for now in both) for both in zip(*log, strict=True)) / CLOCKS
        for i, row in itertools.product((0, 1), (0, 1)):
            start = 0
            for what, run in itertools.groupby(now[row] for now in log[i]):
                length = len(list(run))
                if what:
                    place = (-2.5 * i - row, 0.9)
                    axis.broken_barh([(start, length)], place, color=COLORS[what], ec="white")
                start += length
        rows = {0.45: "0: products", -0.55: "0: softmax", -2.05: "1: products", -3.05: "1: softmax"}
        axis.set_yticks(list(rows), rows.values(), fontsize=12)
        axis.set_title(
            f"{'in turn' if turns else 'in step'}: tensor cores busy {busy:.0%} of the time",
            fontsize=14,
            loc="left",
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=12)
        axis.set_xlim(0, CLOCKS)
    axes[1].set_xlabel("clocks (a model, D = 64)", fontsize=12)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, ncols=4, loc="outside upper center", fontsize=12)
    path = Path(__file__).with_name("ping_pong.png")
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    print(draw())
