"""The cards that kernels are compiled for, and what a compiled kernel will be like on each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labs._harness.compiler import Compiled
from labs._impl import ROOT


@dataclass(frozen=True)
class Card:
    """An architecture, the cards that have it, and bytes of shared memory a block may take."""

    arch: str
    names: str
    one: str
    shared: int


CARDS = {
    card.arch: card
    for card in (
        Card("sm_80", "A100", "an A100", 166_912),
        Card("sm_86", "RTX 3090", "an RTX 3090", 101_376),
        Card("sm_89", "RTX 4090", "an RTX 4090", 101_376),
        Card("sm_90", "H100, H200", "an H100", 232_448),
        Card("sm_120", "RTX 5060, 5090", "an RTX 5060", 101_376),
    )
}

# What became of a kernel on a card.
FITS, SPILLS, SERIALIZED, LOST, TOO_LARGE, ERROR, UNKNOWN, NOT_WRITTEN = (
    "fits",
    "spills",
    "in turn",
    "wrong",
    "no launch",
    "error",
    "not known",
    "not written",
)


def state(c: Compiled) -> str:
    """What became of a kernel: one of the words above."""
    if c.error:
        return NOT_WRITTEN if c.unwritten else UNKNOWN if c.timed_out else ERROR
    if c.shared > CARDS[c.arch].shared:
        return TOO_LARGE
    if c.lost:
        return LOST
    if c.spill:
        return SPILLS
    return SERIALIZED if c.serialized else FITS


def verdict(c: Compiled, change: Change | None = None) -> str:
    """The same in words, with what to try."""
    card, found = CARDS[c.arch], state(c)
    spills = f"spills {c.spill:,} bytes a thread"
    text = {
        FITS: "fits; 0 spills",
        SPILLS: f"{spills}: slow",
        SERIALIZED: "each wgmma waits for the one before: an accumulator in flight is touched",
        LOST: "WRONG: ptxas overwrites a wgmma's register operand in the loop; keep branches out "
        "of it, or the operand in shared memory",
        TOO_LARGE: f"will not launch on {card.one}: needs {c.shared:,} of {card.shared:,} bytes",
        NOT_WRITTEN: c.unwritten,
        UNKNOWN: c.error,
        ERROR: "does not compile" if c.kernel else "launches nothing",
    }[found]
    if found == TOO_LARGE and c.spill:
        text += f", and {spills}"
    if change is None:
        return text
    left = f" (the least spills of what was tried: {change.spill:,} bytes)" if change.spill else ""
    return f"{text}; try {named(change.options)}{left}"


@dataclass(frozen=True)
class Change:
    """Options to change, and bytes a thread still spills then. It was compiled, and fits."""

    options: dict
    spill: int


def named(options: dict) -> str:
    """Options as text: "block_m=64 num_warps=4"."""
    return " ".join(f"{name}={value}" for name, value in options.items() if value is not None)


# What the compiler says -> what it means, for those used to the interpreter.
HINTS = {
    r"AST node type: (Break|Continue)": "a kernel's loop cannot be left early: bound its range",
    r"f-string": 'a kernel has no text: to look at a value, tl.device_print("name", value)',
    r"has no attribute 'to'": "a stride of 1 and a constexpr are plain numbers when it compiles: "
    "convert the program's number in place of the stride",
    r"class 'str'.* to tensor": "a kernel has no text: take the print out; on a GPU it is "
    'tl.device_print("name", value)',
    r"breakpoint is not defined": "a debugger stops in the interpreter only: take breakpoint() out",
    r"multiple comparison": "& binds tighter than <: put each comparison that it joins in "
    "parentheses",
    r"function referenced": "a helper that a kernel calls needs @triton.jit, too",
    r"Boolean value of Tensor": "an `if` takes one value, not a tile: use tl.where",
    r"AST node type": "this piece of Python is not part of Triton's language",
    r"global variable": "a kernel sees no global variables: pass the value as an argument",
    r"initial type|[Ll]oop-carried": "a variable keeps its dtype and shape through a loop: give it "
    "both before the loop",
    r"constexpr": "sizes of tiles must be known when it compiles: mark the parameter tl.constexpr",
    r"dtype|[Ii]ncompatible types": "both sides need one dtype: convert one with .to()",
    r"power of (2|two)": "a tile's sides are powers of two: take the next larger, and mask",
}


def hint(message: str) -> str | None:
    """What a compiler's message means, in other words; None where there are none better."""
    return next((text for pattern, text in HINTS.items() if re.search(pattern, message)), None)


def complaint(c: Compiled, file: Path) -> list[str]:
    """What the compiler said, in two lines: the place with the message, the line of source."""
    shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    place = f"{shown}:{c.line}" if c.line else str(shown)
    return [f"{place}: {c.error}", *([f"    {c.text}"] if c.text else [])]


def changes(c: Compiled) -> Iterator[dict]:
    """Changes of a kernel's options that may help it, the smallest first."""
    have = {name: value for name, value in c.options.items() if value is not None}
    smaller = {
        "num_stages": have.get("num_stages", 1) - 1,
        "block_n": have.get("block_n", 0) // 2,
        "block_m": have.get("block_m", 0) // 2,
        "num_warps": have.get("num_warps", 99) * 2,
    }
    allowed = {
        "num_stages": smaller["num_stages"] >= 2,
        "block_n": smaller["block_n"] >= 16,
        "block_m": smaller["block_m"] >= 16,
        "num_warps": smaller["num_warps"] <= 16,
    }
    orders = {
        (True, False): "num_stages; block_n; block_m; num_stages block_n; block_m block_n",
        (False, True): "num_warps; block_n; block_m; num_warps block_n; num_warps block_m",
        (True, True): "num_stages num_warps; num_warps block_n; num_stages block_m; "
        "block_m block_n; num_warps block_m; num_warps block_m block_n",
    }
    too_large = c.shared > CARDS[c.arch].shared
    for names in orders.get((too_large, bool(c.spill)), "").split("; "):
        if names and all(allowed[name] for name in names.split()):
            yield {name: smaller[name] for name in names.split()}
