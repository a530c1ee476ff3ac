"""Draws h200_rates.png: TFLOP/s against T of step 5, cuDNN and FLASH, from the handout's tables.

Run it from the repository root: python labs/11_warp_specialization/figures/draw_rates.py
"""

from __future__ import annotations

from pathlib import Path

from labs._harness import plot

HERE = Path(__file__).parent
PEAK = 697  # TFLOP/s of a bfloat16 product of 8192 x 8192 x 8192 on that card, minutes later

if __name__ == "__main__":
    print(plot.handout_rates(HERE.parent / "README.md", HERE / "h200_rates.png", PEAK))
