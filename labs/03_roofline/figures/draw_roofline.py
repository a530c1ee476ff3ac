"""Draws h200_roofline.png and block_m.png with the lab's own roofline_plot.

The first shows what was measured on an H200: times from the generated table of lab 06's handout
(B=8 H=16 D=64, bfloat16, causal), FLOP and bytes from lab 03's functions. The second is predicted.
Run it from the repository root: python labs/03_roofline/figures/draw_roofline.py
"""

from __future__ import annotations

import re
from pathlib import Path

from labs._impl import LABS, load

HERE = Path(__file__).parent
B, H, D = 8, 16, 64
NAIVE, ASKED, IDEAL, SOFTMAX = (
    "naive attention",
    "flash kernel, bytes asked for",
    "flash kernel, ideal bytes",
    "row softmax, float32",
)


def measured_rates() -> dict[int, tuple[float, float | None]]:
    """T -> TFLOP/s of (the Triton kernel, naive attention; None where it ran out of memory)."""
    page = (LABS / "06_attention_kernels" / "README.md").read_text()
    block = page.partition("<!-- generated:h200-sweep -->")[2].partition("<!-- end")[0]
    lines = [line.strip("|").split("|") for line in block.splitlines() if line.startswith("|")]
    header = [name.strip() for name in lines[0]]
    kernel, naive = header.index("yours (Triton)"), header.index("naive")
    rates = {}
    for cells in lines[2:]:
        rate = cells[naive].strip()
        rates[int(cells[0].replace(",", ""))] = (
            float(cells[kernel]),
            None if rate == "OOM" else float(rate),
        )
    return rates


def softmax_rate() -> float:
    """TB/s of the row softmax at 4096 columns, from the same place."""
    page = (LABS / "06_attention_kernels" / "README.md").read_text()
    return float(re.search(r"The row softmax of step 4 .*?: [\d.]+, [\d.]+, ([\d.]+)", page)[1])


def h200(lab) -> Path:
    rates, points = measured_rates(), []
    lengths = [T for T in rates if T >= 512]
    for name in (NAIVE, ASKED, IDEAL):
        mine = [T for T in lengths if name != NAIVE or rates[T][1]]
        for T in mine:
            kernel, naive = rates[T]
            ideal = lab.ideal_work(B, H, T, D, True, 2)
            nbytes = {
                NAIVE: lab.naive_attention_bytes(B, H, T, D, True, 2),
                ASKED: lab.flash_attention_bytes(B, H, T, D, True, 2, 64),
                IDEAL: ideal.nbytes,
            }[name]
            ms = ideal.flops / (naive if name == NAIVE else kernel) / 1e9
            note = f"T={T:,}" if name != NAIVE and T in (mine[0], mine[-1]) else ""
            points.append(lab.Point(name, lab.Work(ideal.flops, nbytes), ms, True, note))
    softmax = lab.softmax_work(32_768, 4096, 4)
    ms = softmax.nbytes / softmax_rate() / 1e9
    points.append(lab.Point(SOFTMAX, softmax, ms, True))
    return lab.roofline_plot(points, lab.CARDS["H200, measured"], HERE / "h200_roofline.png")


def block_m(lab) -> Path:
    card, T = lab.CARDS["RTX 5060"], 2048
    naive = lab.naive_work(B, H, T, D, False, 2)
    points = [lab.Point(NAIVE, naive, lab.predict_ms(naive, card), False)]
    for rows in (16, 32, 64, 128, 256):
        work = lab.flash_work(B, H, T, D, False, 2, rows)
        ms = lab.predict_ms(work, card)
        points.append(lab.Point("flash kernel by block_m", work, ms, False, str(rows)))
    softmax = lab.softmax_work(32_768, 4096, 4)
    points.append(lab.Point(SOFTMAX, softmax, lab.predict_ms(softmax, card), False))
    return lab.roofline_plot(points, card, HERE / "block_m.png")


if __name__ == "__main__":
    reference = load("03", "solution")
    for picture in (h200(reference), block_m(reference)):
        print(f"wrote {picture}")
