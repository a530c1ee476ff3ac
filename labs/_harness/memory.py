"""Memory that gives mistakes away: red zones around tensors, NaN where nothing was written.

In the CPU interpreter every active load and store is checked before it happens against the tensors
of the launch, so a stray access is a failed test that names the tensor, not a dead process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from labs._harness import interpreter

RED_ZONE = 64  # elements of NaN on either side of a tensor made by `fenced`


class StrayAccess(AssertionError):
    """A kernel touched memory outside the tensors it was given."""


def fenced(t: torch.Tensor, fill: float = math.nan) -> torch.Tensor:
    """A copy of `t` with the same shape and strides between two red zones of `fill`.

    Gaps between the strides hold `fill` too, so code that ignores a stride reads NaN.
    """
    size = interpreter.span(t)
    buffer = torch.full((size + 2 * RED_ZONE,), fill, dtype=t.dtype, device=t.device)
    copy = buffer.as_strided(t.shape, t.stride(), RED_ZONE)
    copy.copy_(t.detach())
    return copy


def fence_intact(t: torch.Tensor) -> bool:
    """Whether everything around and between the elements of a `fenced` tensor is untouched."""
    buffer = t.as_strided(
        (interpreter.span(t) + 2 * RED_ZONE,), (1,), t.storage_offset() - RED_ZONE
    )
    outside = torch.ones_like(buffer, dtype=torch.bool)
    outside.as_strided(t.shape, t.stride(), RED_ZONE).fill_(False)
    return bool(buffer[outside].isnan().all())


def poison(t: torch.Tensor) -> None:
    """Fills memory that nobody has written yet with NaN, or the largest integer."""
    if t.is_floating_point() or t.is_complex():
        t.fill_(math.nan)
    elif t.dtype != torch.bool:
        t.fill_(torch.iinfo(t.dtype).max)


@dataclass
class AccessCheck(interpreter.Observer):
    """Stops a kernel at its first access outside the tensors of its launch.

    Attributes:
        findings: one line for each stray access seen, also where the code under test swallowed
            the exception.
    """

    findings: list[str] = field(default_factory=list)
    _inside: list[tuple[str, torch.Tensor, int, np.ndarray | None]] = field(default_factory=list)

    def launch(self, launch):
        self._inside = [(name, t, t.data_ptr(), _elements(t)) for name, t in launch.tensors.items()]

    def load(self, launch, address, mask, itemsize):
        self._check("load", launch, address, mask, itemsize)

    def store(self, launch, address, mask, itemsize):
        self._check("store", launch, address, mask, itemsize)

    def _check(self, what, launch, address, mask, itemsize):
        active = address if mask.all() else address[mask]
        if active.size == 0:
            return
        low, high = int(active.min()), int(active.max())
        stray = np.ones(active.shape, dtype=bool)
        for _, t, base, elements in self._inside:
            end = base + interpreter.span(t) * t.element_size()
            if low >= base and high + itemsize <= end and elements is None:
                return
            inside = (active >= base) & (active + np.uint64(itemsize) <= end)
            if elements is not None and inside.any():
                offset = (active[inside] - np.uint64(base)) // np.uint64(t.element_size())
                inside[inside] = elements[offset.astype(np.int64)]
            stray &= ~inside
        if stray.any():
            self._report(what, launch, active[stray], active.size)

    def _report(self, what, launch, stray, lanes):
        # The tensor meant is taken to be the one that the addresses lie nearest to.
        def distance(entry):
            _, t, base, _ = entry
            end = base + interpreter.span(t) * t.element_size()
            return max(base - int(stray[0]), int(stray[0]) - end, 0)

        name, t, base, _ = min(self._inside, key=distance)
        offset = (int(stray[0]) - base) // t.element_size()
        line = (
            f"stray {what} in {launch.kernel}, program {launch.program}: {len(stray)} of {lanes} "
            f"lanes lie outside every tensor.\n  The first is element {offset} of {name}, shape "
            f"{tuple(t.shape)}, strides {t.stride()}: {interpreter.span(t)} elements long.\n"
            f"  {_question(offset)}"
        )
        self.findings.append(line)
        raise StrayAccess(line)


def _question(offset: int) -> str:
    if offset < -(2**30):
        return "Did a product wrap past 2**31? Make the program id int64 before you multiply."
    return "Is a mask missing, or a stride or a descriptor's shape wrong?"


def _elements(t: torch.Tensor) -> np.ndarray | None:
    """(span,) bool: which places of a tensor with gaps are its elements. None if it has no gaps."""
    size = interpreter.span(t)
    if size == t.numel() or size > 1 << 22:
        return None
    inside = np.zeros(size, dtype=bool)  # in NumPy: the work of PyTorch is being counted
    shape = [1 if stride == 0 else n for n, stride in zip(t.shape, t.stride(), strict=True)]
    np.lib.stride_tricks.as_strided(inside, shape, t.stride())[...] = True
    return inside


class LastProgramOnly(interpreter.Observer):
    """Skips all programs but the last: offsets beyond 2**31 without the work of getting there.

    With several grid axes in use, all programs run whose indices on axes 1 and 2 are the last, so
    that it does not matter in which order a kernel gives tiles to the programs of axis 0.
    """

    def program(self, launch):
        (x, y, z), (x_end, y_end, z_end) = launch.program, launch.grid
        if (y_end, z_end) != (1, 1):
            return y == y_end - 1 and z == z_end - 1
        return x == x_end - 1


class NoProgram(interpreter.Observer):
    """Skips every program: what comes out was not computed by a kernel."""

    def program(self, launch):
        return False
