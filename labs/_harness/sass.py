"""Reads the assembler's output for a mistake that nothing else shows: an operand that a loop loses.

On Hopper a wgmma may take its left operand from registers. One that does not change is made before
the loop, and its registers must then be left alone in it. ptxas 12.8 (Triton 3.4 to 3.7) gives
them to other values where the loop holds a branch; from the second turn on the product is of
something else. Neither Triton nor ptxas says a word.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?(.*?)\s*;")
_BRANCH = re.compile(r"BRA\b(.*?)(0x[0-9a-f]+)")
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
    lost = []
    for loop in _loops(text):
        written: dict[int, int] = {}  # register -> number of the first instruction that writes it
        for n, code in enumerate(loop):
            for register in _written(code):
                written.setdefault(register, n)
        for n, code in enumerate(loop):
            product = _PRODUCT.match(code)
            operand = range(int(product[1]), int(product[1]) + 4) if product else ()
            behind = [register for register in operand if written.get(register, -1) >= n]
            whole = written.keys() >= set(operand)  # written in the loop, all four
            if behind and code not in lost and not (whole and _carried(loop[n:], behind)):
                lost.append(code)
    return lost


def _loops(text: str) -> list[list[str]]:
    """The instructions of each loop, in the order in which they lie.

    A branch backwards makes a loop only if its target must be passed to get to it. Others come back
    from code that was moved out of the way, such as the waiting of an mbarrier.
    """
    lines = list(filter(None, map(_INSTRUCTION.match, text.splitlines())))
    codes = [" ".join(line[3].split()) for line in lines]
    number = {int(line[1], 16): n for n, line in enumerate(lines)}
    after: list[set[int]] = []  # numbers of the instructions that may come next
    first = {0}  # of a block: where a branch goes to, and behind an instruction that may leave
    for n, (line, code) in enumerate(zip(lines, codes, strict=True)):
        branch = _BRANCH.match(code)
        leaves = branch or code.startswith(("EXIT", "RET"))
        always = not line[2] and not (branch and "P" in branch[1])
        nexts = {number[int(branch[2], 16)]} if branch else set()
        if leaves:
            first |= nexts | {n + 1}
        after.append(nexts if leaves and always else nexts | {n + 1})
    blocks = sorted(first - {len(lines)})
    spans = dict(zip(blocks, [*blocks[1:], len(lines)], strict=True))  # first -> past the last
    before: dict[int, set[int]] = {n: set() for n in [*blocks, len(lines)]}
    for n, end in spans.items():
        for m in after[end - 1]:
            before[m].add(n)
    over = _dominators(blocks, before)
    loops = []
    for head in blocks:
        ends = [n for n in before[head] if head in over[n]]  # they branch back to it
        inside, left = {head}, list(ends)
        while left:
            n = left.pop()
            if n not in inside:
                inside.add(n)
                left += before[n]
        if ends:
            loops.append([code for n in sorted(inside) for code in codes[n : spans[n]]])
    return loops


def _dominators(blocks: list[int], before: dict[int, set[int]]) -> dict[int, set[int]]:
    """Of each block those that every way to it passes, itself among them."""
    over = {n: set(blocks) for n in blocks} | {blocks[0]: {blocks[0]}}
    changed = True
    while changed:
        changed = False
        for n in blocks[1:]:
            new = set.intersection(*(over[m] for m in before[n])) if before[n] else set()
            changed |= new | {n} != over[n]
            over[n] = new | {n}
    return over


def _carried(rest: list[str], registers: list[int]) -> bool:
    """Whether what the rest of a loop writes to an operand's registers is the next turn's operand.

    Then no product writes it, and nobody reads it before the loop begins again.
    """
    for register in registers:
        writers = [n for n, code in enumerate(rest) if register in _written(code)]
        if any(rest[n].startswith("HGMMA") for n in writers):
            return False
        if any(register in _read(code) for code in rest[writers[-1] + 1 :]):
            return False
    return True


def _read(code: str) -> set[int]:
    """Registers that an instruction reads."""
    name, _, rest = code.partition(" ")
    found = [(int(m[1]), 2 if m[2] else 1) for m in re.finditer(r"\bR(\d+)(\.64)?", rest)]
    if name.startswith("HGMMA"):
        product = _PRODUCT.match(code)
        left = set(range(int(product[1]), int(product[1]) + 4)) if product else set()
        return left if ", RZ, " in rest else left | set(_written(code))
    if not name.startswith(_READERS):
        found = found[1:]  # the first is the result
    wide = re.search(r"\.(128|64)\b", name) if name.startswith("ST") else None
    if wide and found:  # the data come last
        found[-1] = found[-1][0], int(wide[1]) // 32
    return {register for first, count in found for register in range(first, first + count)}


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
