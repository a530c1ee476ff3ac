"""Measures your card's two numbers: python -m labs.03_roofline.measure

Prints the rate of a large matrix product, the rate of a large copy, the ridge point between them,
and a line for your journal and for the table CARDS. Needs a GPU; takes a few seconds.
"""

from __future__ import annotations

import sys

from labs._harness import bench, runtime


def measure(gpu: bench.Gpu) -> str:
    """The two numbers of a card as text: measured, never from the box."""
    machine = gpu.describe()
    (peak, _, how_peak), (speed, _, how_speed) = bench.ceilings(gpu).values()
    after = gpu.describe()
    versions = bench.versions()
    stack = f"torch {versions['torch']}, triton {versions['triton']}"
    source = f"measured: {how_peak}; {how_speed}; {stack}"
    memory = machine.get("memory_gib", 1) * 2**30
    numbers = f"{peak * 1e12:.4g}, {speed * 1e12:.4g}, {memory:.4g}"
    clock, driver = after.get("clocks.sm", "unknown"), machine.get("driver_version", "unknown")
    return "\n".join(
        [
            f"card       {machine['card']}, driver {driver}, {stack}",
            f"peak       {peak:,.4g} TFLOP/s ({how_peak}; SM clock right after it: {clock})",
            f"bandwidth  {speed:,.4g} TB/s ({how_speed})",
            f"ridge      {peak / speed:,.4g} FLOP a byte",
            "",
            "a line for CARDS:",
            f"Card({machine['card']!r}, {numbers}, {source!r}, measured=True),",
        ]
    )


def main() -> int:
    here = runtime.setup()
    if here.device != "cuda":
        print(f"needs a GPU: {here.reason}; take a card of the table CARDS", file=sys.stderr)
        return 2
    print(measure(bench.Gpu()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
