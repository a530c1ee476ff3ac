"""Draws h200_rates.png: TFLOP/s against T of step 5, cuDNN and FLASH, from the handout's tables.

Run it from the repository root: python labs/11_warp_specialization/figures/draw_rates.py
"""

from __future__ import annotations

import re
from pathlib import Path

from labs._harness import plot

HERE = Path(__file__).parent
PAGE = HERE.parent / "README.md"
PEAK = 686  # TFLOP/s of a bfloat16 product of 8192 x 8192 x 8192 in the same hour


def rates() -> dict[tuple[int, str], dict[str, dict[int, float]]]:
    """(D, "full" or "causal") -> row of the table -> T -> TFLOP/s."""
    found = {}
    for table in re.finditer(
        r"\| D = (\d+) full / causal.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text()
    ):
        head = re.findall(r"\d+", table[0].partition("\n")[0])[1:]
        for line in table[2].splitlines():
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for T, cell in zip(head, cells, strict=True):
                for mask, rate in zip(("full", "causal"), cell.split(" / "), strict=True):
                    panel = found.setdefault((int(table[1]), mask), {})
                    panel.setdefault(name, {})[int(T)] = float(rate)
    return found


def draw() -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = rates()
    figure, panels = pyplot.subplots(1, 4, figsize=(15, 4), sharey=True, layout="constrained")
    for axes, ((D, mask), rows) in zip(panels, found.items(), strict=True):
        for (name, row), color, marker in zip(
            rows.items(), (plot.YOURS, *plot.OTHERS), "o" + plot.MARKERS, strict=False
        ):
            label = name.removesuffix(" on an H200")
            axes.plot(list(row), list(row.values()), color=color, marker=marker, label=label)
        axes.axhline(PEAK, color="black", linestyle="--", label=f"matrix product {PEAK}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(row), [f"{T:,}" for T in row], rotation=45)
        axes.minorticks_off()
        axes.set_title(f"D = {D}, {mask}")
        axes.set_xlabel("T, with B T = 16,384")
        axes.set_ylim(0, 720)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("TFLOP/s, bfloat16")
    panels[0].legend(loc="lower right", fontsize=9)
    file = HERE / "h200_rates.png"
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


if __name__ == "__main__":
    print(draw())
