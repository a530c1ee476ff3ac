"""Draws timeline.png and drift.png of the handout, from runs of the simulated GPU.

Run it from the repository root: python labs/01_timing/figures/draw.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from labs._impl import load  # noqa: E402

SimulatedGpu = load(HERE, str(HERE.parent / "simulated_gpu.py")).SimulatedGpu

# Okabe-Ito colours, told apart by hatching and shape as well.
BLUE, ORANGE, VERMILION, GREY = "#0072B2", "#E69F00", "#D55E00", "#BBBBBB"
LAUNCH_MS, WARMUP_MS, KERNEL_MS = 0.3, 1.5, 2.0


def no_wait(gpu):
    gpu.clock()
    gpu.launch(KERNEL_MS)
    gpu.clock()


def wait_after(gpu):
    gpu.clock()
    gpu.launch(KERNEL_MS)
    gpu.synchronize()
    gpu.clock()


def wait_twice(gpu):
    gpu.synchronize()
    gpu.clock()
    gpu.launch(KERNEL_MS)
    gpu.synchronize()
    gpu.clock()


TIMERS = {
    "no synchronise: the launch is timed": no_wait,
    "synchronise after the call only: the warm-up's rest is timed too": wait_after,
    "synchronise before both readings of the clock": wait_twice,
}


def timeline():
    """What the host and the device do under three timers, after one warm-up call."""
    figure, axes = plt.subplots(3, 1, figsize=(9.6, 6.4), dpi=130, sharex=True)
    for ax, (title, timer) in zip(axes, TIMERS.items(), strict=True):
        gpu = SimulatedGpu(launch_us=1e3 * LAUNCH_MS)
        begin = gpu.now
        gpu.launch(WARMUP_MS)
        timer(gpu)
        kernels, launches, reads = 0, 0, []
        for who, what, start, end in gpu.log:
            x, width = 1e3 * (start - begin), 1e3 * (end - start)
            y = 1.15 if who == "host" else 0.0
            if what == "clock":
                reads.append(x)
                continue
            style = {"launch": dict(facecolor=ORANGE), "wait": dict(facecolor="white", hatch="...")}
            style["kernel"] = dict(
                facecolor=BLUE if kernels else GREY, hatch="" if kernels else "//"
            )
            ax.add_patch(Rectangle((x, y), width, 0.8, edgecolor="black", **style[what]))
            if what == "launch":
                launches += 1
                ax.text(x + width / 2, y + 0.4, launches, ha="center", va="center", fontsize=10)
            if what == "kernel":
                name = "the timed kernel, 2 ms" if kernels else "warm-up, 1.5 ms"
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                ax.text(x + width / 2, 0.4, name, ha="center", va="center", fontsize=9.5, bbox=box)
                kernels += 1
        for x, name in zip(reads, ("start", "end"), strict=True):
            ax.plot([x, x], [-0.15, 2.35], color=VERMILION, linewidth=2)
            side = "right" if name == "start" else "left"
            ax.text(x, 2.42, name, color=VERMILION, ha=side, fontsize=9.5, weight="bold")
        read = reads[1] - reads[0]
        ax.annotate(
            "",
            (reads[0], 2.15),
            (reads[1], 2.15),
            arrowprops={"arrowstyle": "<->", "color": VERMILION, "shrinkA": 0, "shrinkB": 0},
        )
        ax.text(reads[1] + 0.06, 2.08, f"reads {read:.1f} ms", color=VERMILION, fontsize=10.5)
        ax.set_title(title, loc="left", fontsize=11)
        ax.set_xlim(-0.05, 4.9)
        ax.set_ylim(-0.2, 2.75)
        ax.set_yticks([0.4, 1.55], ["device", "host"])
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time, ms (a launch is drawn 60 times too long)")
    figure.legend(
        handles=[
            Patch(facecolor=ORANGE, edgecolor="black", label="launch 1, 2"),
            Patch(facecolor="white", edgecolor="black", hatch="...", label="host waits"),
        ],
        loc="upper right",
        ncols=2,
        frameon=False,
    )
    figure.tight_layout()
    save(figure, "timeline.png")


def drift():
    """Two equal kernels on a device that slows down by 1% a call, in three orders."""
    pairs = 12
    orders = {
        "A, then B": "A" * pairs + "B" * pairs,
        "A first in each pair": "AB" * pairs,
        "taking turns: A B, B A": "ABBA" * (pairs // 2),
    }
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.6), dpi=130, sharey=True)
    for ax, (title, order) in zip(axes, orders.items(), strict=True):
        gpu = SimulatedGpu(pace=lambda n: 1 + 0.01 * n)
        times = {"A": [], "B": []}
        for number, name in enumerate(order):
            gpu.synchronize()
            start = gpu.clock()
            gpu.launch(1.0)
            gpu.synchronize()
            times[name].append((number, 1e3 * (gpu.clock() - start)))
        medians = {k: statistics.median(ms for _, ms in v) for k, v in times.items()}
        looks = {"A": (BLUE, "o", "-"), "B": (VERMILION, "^", "--")}
        for name, (colour, marker, line) in looks.items():
            xs, ys = zip(*times[name], strict=True)
            face = colour if name == "A" else "white"
            ax.plot(xs, ys, marker, color=colour, markerfacecolor=face, label=name)
            ax.axhline(medians[name], color=colour, linestyle=line, linewidth=1.4)
        ratio = statistics.median(
            a / b for (_, a), (_, b) in zip(times["A"], times["B"], strict=True)
        )
        ax.set_title(f"{title}\nmedian of a/b = {ratio:.3f}", fontsize=11)
        ax.set_xlabel("call")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("ms (lines: medians)")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    save(figure, "drift.png")


def save(figure, name):
    figure.savefig(HERE / name, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    timeline()
    drift()
