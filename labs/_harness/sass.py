"""Reads the assembler's output for a mistake that nothing else shows: an operand that a loop loses.

On Hopper a wgmma may take its left operand from registers. One that does not change is made before
the loop, and its registers must then be left alone in it. ptxas 12.8 (Triton 3.4 to 3.7) gives
them to other values where the loop holds a branch; from the second turn on the product is of
something else. Neither Triton nor ptxas says a word.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(.*?)\s*;")
_BRANCH = re.compile(r"BRA\b.*?(0x[0-9a-f]+)")
_PRODUCT = re.compile(r"HGMMA\.64x\d+x\S* R\d+, R(\d+),")  # left operand in 4 registers
_RESULT = re.compile(r"(\S+) (?:U?P\w+, )?R(\d+)\b")
# Instructions whose first register is read, not written.
_READERS = tuple("ST RED BRA BAR DEPBAR LDGSTS LDGDEPBAR SYNCS UTMA WARPGROUP".split())


def lost_operands(text: str) -> list[str]:
    """Products in a loop whose left operand the loop overwrites only after they have read it.

    Args:
        text: a kernel as `cuobjdump -sass` prints it.

    Returns:
        The instructions, in order; none where all is well.
    """
    lines = filter(None, map(_INSTRUCTION.match, text.splitlines()))
    found = [(int(line[1], 16), " ".join(line[2].split())) for line in lines]
    lost = []
    for end, last in found:
        branch = _BRANCH.match(last)
        if not branch or int(branch[1], 16) >= end:
            continue
        loop = [code for place, code in found if int(branch[1], 16) <= place <= end]
        written: dict[int, int] = {}  # register -> number of the first instruction that writes it
        for n, code in enumerate(loop):
            for register in _written(code):
                written.setdefault(register, n)
        for n, code in enumerate(loop):
            product = _PRODUCT.match(code)
            operand = range(int(product[1]), int(product[1]) + 4) if product else ()
            if any(written.get(register, -1) >= n for register in operand) and code not in lost:
                lost.append(code)
    return lost


def _written(code: str) -> range:
    """Registers that an instruction writes."""
    result = _RESULT.match(code)
    if not result or code.startswith(_READERS):
        return range(0)
    name, first = result[1], int(result[2])
    product = re.match(r"HGMMA\.64x(\d+)x", name)
    if product:  # 64 x N float32 numbers on 128 threads
        return range(first, first + int(product[1]) // 2)
    wide = re.search(r"\.(128|64|WIDE|M88\.[24])\b", name)
    count = {"128": 4, "64": 2, "WIDE": 2, "M88.2": 2, "M88.4": 4}[wide[1]] if wide else 1
    return range(first, first + count)
