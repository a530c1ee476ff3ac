"""Tests of lab 02. Run `pytest labs/02_number_formats`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
What is right is looked up in tables of all numbers of a format, decoded from their bits.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from labs._harness import oracle
from labs._harness.cases import step

STEPS = {
    1: "round_to_format",
    2: "ulp",
    3: "dot_error",
    4: "softmax",
    5: "quantize_rows",
}

INF, NAN = math.inf, math.nan
# exponent bits, mantissa bits, whether the format has infinities
FP32, TF32, FP16, BF16 = (8, 23, True), (8, 10, True), (5, 10, True), (8, 7, True)
E5M2, E4M3 = (5, 2, True), (4, 3, False)
NAMES = {FP32: "fp32", TF32: "tf32", FP16: "fp16", BF16: "bf16", E5M2: "e5m2", E4M3: "e4m3"}
TORCH = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}
# Formats that neither NumPy nor torch has.
ODD = [(6, 9, True), (2, 1, True), (3, 4, False), (7, 1, False), (4, 3, True), (3, 8, True)]
ODD += [(8, 3, False)]
# More mantissa bits than fp16 and fewer exponent bits than fp32: no library type comes near.
WIDE = [(5, 12, True), (6, 20, True), (7, 15, False)]


def name_of(fmt):
    return NAMES.get(fmt) or f"e{fmt[0]}m{fmt[1]}{'' if fmt[2] else ' without inf'}"


def formats(*chosen):
    return pytest.mark.parametrize("fmt", chosen, ids=name_of)


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # inf - inf and 0 / 0 are tested

step1 = step(1)
step2 = step(2)
step3 = step(3)
step4 = step(4)
step5 = step(5)


# ---------------------------------------------------------------- what is right


@functools.cache
def table(fmt):
    """Every finite number of a format from 0 up, and the one that would come next, as float64."""
    exponent_bits, mantissa_bits, has_inf = fmt
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(2 ** (exponent_bits + mantissa_bits))
    field, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    value = np.where(
        field == 0,
        mantissa * 2.0 ** (1 - bias - mantissa_bits),
        (2**mantissa_bits + mantissa) * np.exp2(field - bias - mantissa_bits),
    )
    count = len(code) - (2**mantissa_bits if has_inf else 1)  # the codes of inf and NaN
    return value[: count + 1]


@functools.cache
def halfway(fmt):
    """What lies halfway from each number of a format to the next; exact in float64."""
    return (table(fmt)[:-1] + table(fmt)[1:]) / 2


def limits(fmt):
    """(largest number, its exponent's first number, smallest normal number) of a format."""
    exponent_bits, mantissa_bits, has_inf = fmt
    bias = 2 ** (exponent_bits - 1) - 1
    top = 2.0 ** (bias if has_inf else bias + 1)
    return top * (2 - 2.0**-mantissa_bits * (1 if has_inf else 2)), top, 2.0 ** (1 - bias)


def nearest(x, fmt):
    """Reference: x rounded to a format, by looking it up. Tables end at 2**18 numbers."""
    x = np.asarray(x, dtype=np.float64)
    if fmt == FP32:
        return x.astype(np.float32).astype(np.float64)  # the processor rounds these
    values, middles = table(fmt), halfway(fmt)
    place = np.searchsorted(middles, np.abs(x))
    tie = middles[np.minimum(place, len(middles) - 1)] == np.abs(x)
    place = place + (tie & (place % 2 == 1))  # numbers with an even mantissa stand at even places
    beyond = INF if fmt[2] else values[-2]
    result = np.where(place > len(values) - 2, beyond, values[np.minimum(place, len(values) - 1)])
    return np.where(np.isnan(x), NAN, np.copysign(result, x))


def nearest_exactly(x, fmt):
    """Reference for one number: x rounded with exact fractions, for formats without a table."""
    largest, _, smallest_normal = limits(fmt)
    _, e = math.frexp(max(abs(x), smallest_normal))
    step = Fraction(2) ** (e - 1 - fmt[1])
    rounded = float(round(Fraction(x) / step) * step)  # round of a Fraction: ties to even
    beyond = INF if fmt[2] else largest
    return math.copysign(beyond if abs(rounded) > largest else abs(rounded), x)


def summed(terms, fmt):
    """Reference: partial sums along the last axis, rounded after each addition."""
    sums = np.zeros_like(terms)
    total = np.zeros(terms.shape[:-1])
    for n in range(terms.shape[-1]):
        total = nearest(total + terms[..., n], fmt)
        sums[..., n] = total
    return sums


def format_of(lab, fmt):
    return lab.Format(*fmt)


def normal(*shape):
    return oracle.inputs(*shape, dtype=torch.float64).numpy()


def uniform(*shape):
    return torch.rand(*shape, dtype=torch.float64).numpy()


# ---------------------------------------------------------------- what a failure says


class Exactly:
    """Recognises the very same wrong numbers, for the harness's diagnosis."""

    def agree(self, a, b):
        a, b = np.asarray(a), np.asarray(b)
        return a.shape == b.shape and bool(same(a, b).all())


def same(a, b):
    """Equal, with equal signs of zero, or both NaN."""
    return ((a == b) & (np.signbit(a) == np.signbit(b))) | (np.isnan(a) & np.isnan(b))


def check(what, got, want, x=None, fmt=None, note="", tolerance=0.0):
    """Fails unless got has the shape, the dtype and the values of want.

    Args:
        what: the call, for messages.
        x, fmt: what was rounded, and the format: the failure then says what is special about it.
        note: what usually causes a failure.
        tolerance: largest absolute error of finite values.
    """
    __tracebackhide__ = True
    result, want = np.asarray(got), np.asarray(want, dtype=np.float64)
    if result.dtype != np.float64:
        raise oracle.Mismatch(f"{what}: want float64, got {result.dtype}")
    if result.shape != want.shape:
        raise oracle.Mismatch(f"{what}: want shape {want.shape}, got {result.shape}")
    near = np.abs(result - want) <= tolerance if tolerance else False  # 0.0 is not -0.0
    wrong = ~(same(result, want) | near)
    if not wrong.any():
        return
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    lines = [f"{what}: {int(wrong.sum()):,} of {wrong.size:,} values wrong"]
    where = f"at {list(place)}: " if place else ""
    if x is not None:
        value = np.broadcast_to(np.asarray(x, dtype=np.float64), want.shape)[place]
        where += f"x = {float(value)!r} ({float(value).hex()}), "
    lines.append(f"  {where}want {float(want[place])!r}, got {float(result[place])!r}")
    if fmt is not None:
        groups = kinds(np.broadcast_to(np.asarray(x, dtype=np.float64), want.shape), fmt)
        for kind, hint in HINTS.items():
            count = int((wrong & (groups == kind)).sum())
            if count:
                lines.append(f"  {count:,} of them {kind}: {hint}")
                break
    if note:
        lines.append(f"  {note}")
    text = "\n".join(lines)
    raise oracle.Mismatch(text, Exactly(), got)


HINTS = {
    "NaN": "NaN stays NaN",
    "zeros": "0 stays 0 and keeps its sign (-0.0 == 0.0 is True; np.copysign looks at the sign)",
    "infinite": "infinity stays, or is the largest number where there is no infinity",
    "past the largest number": "round first, then compare with the largest number",
    "below the smallest normal number": "there the spacing stays that of the smallest normal one",
    "exactly halfway": "of two equally near numbers take the one with the even mantissa",
    "a hair off halfway": "rounded twice? float64 to float32 to the format makes ties of them",
    "ordinary": "x over the spacing at x, to the nearest whole number, times the spacing",
}


def kinds(x, fmt):
    """What is special about each x, as keys of HINTS."""
    largest, top, smallest_normal = limits(fmt)
    size = np.abs(x)
    _, e = np.frexp(np.clip(size, smallest_normal, largest))
    part = np.ldexp(np.minimum(size, 2 * largest), fmt[1] + 1 - e) % 1
    tests = {
        "NaN": np.isnan(x),
        "zeros": x == 0,
        "infinite": np.isinf(x),
        "past the largest number": size > largest,
        "exactly halfway": part == 0.5,
        "a hair off halfway": np.abs(part - 0.5) < 2.0**-12,
        "below the smallest normal number": size < smallest_normal,
    }
    return np.select(list(tests.values()), list(tests), "ordinary")


def check_rounding(lab, x, fmt, want, note=""):
    __tracebackhide__ = True
    got = lab.round_to_format(x, *fmt)
    check(f"round_to_format(x, {', '.join(map(str, fmt))})", got, want, x, fmt, note)


def lines_run(lab, function, *args):
    """How many lines of the student's file a call runs: a count of work, not of time.

    The call is made once before: a table built on first use, or functools.cache, costs nothing.
    """
    function(*args)
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename != str(lab.file):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


# ---------------------------------------------------------------- step 1


@step1
def test_format_limits(lab):
    for fmt, want in {
        FP32: (3.4028234663852886e38, 2.0**-126, 2.0**-149),
        TF32: (3.4011621342146535e38, 2.0**-126, 2.0**-136),
        FP16: (65504.0, 2.0**-14, 2.0**-24),
        BF16: (3.3895313892515355e38, 2.0**-126, 2.0**-133),
        E5M2: (57344.0, 2.0**-14, 2.0**-16),
        E4M3: (448.0, 2.0**-6, 2.0**-9),
        **{fmt: (table(fmt)[-2], table(fmt)[2 ** fmt[1]], table(fmt)[1]) for fmt in ODD},
    }.items():
        got = tuple(lab.format_limits(*fmt))
        assert got == want, (
            f"format_limits of {name_of(fmt)}: want (largest, smallest normal, smallest above 0) "
            f"= {want}, got {got}. Is the largest exponent set aside, and which mantissa is?"
        )
    for fmt, dtype in TORCH.items():
        info = torch.finfo(dtype)
        assert tuple(lab.format_limits(*fmt))[:2] == (info.max, info.smallest_normal)


@step1
def test_round_worked_examples(lab):
    for fmt, x, want in (
        (BF16, 3.14159265, 3.140625),
        (FP16, 3.14159265, 3.140625),
        (FP16, 2049.0, 2048.0),
        (FP16, 2051.0, 2052.0),
        (FP16, 65519.99, 65504.0),
        (FP16, 65520.0, INF),
        (FP16, 1e-8, 0.0),
        (FP16, 4.4e-5, 738 * 2.0**-24),
        (BF16, 257.0, 256.0),
        (TF32, 1 / 3, 0.333251953125),
        (E4M3, 0.1, 0.1015625),
        (E4M3, 300.0, 288.0),
        (E4M3, 1000.0, 448.0),
        (E5M2, 61440.0, INF),
    ):
        check_rounding(lab, x, fmt, want)
        check_rounding(lab, -x, fmt, -want)


def around_every_number(fmt):
    """Numbers of a format, the middle to the next one, and the neighbours of both in float64."""
    values = table(fmt)
    x = np.concatenate([values, halfway(fmt)])
    if len(x) > 2**17:  # some of tf32's
        x = np.concatenate([x[:4096], x[::5], x[-4096:], values[-4096:]])
    x = np.concatenate([x, np.nextafter(x, INF), np.nextafter(x, -INF)])
    return np.concatenate([x, -x])


@step1
@formats(FP16, BF16, TF32)
def test_round_around_every_number(lab, fmt):
    x = around_every_number(fmt)
    check_rounding(lab, x, fmt, nearest(x, fmt))


@step1
def test_round_around_every_number_of_small_and_odd_formats(lab):
    for fmt in (E4M3, E5M2, *ODD):
        x = around_every_number(fmt)
        check_rounding(lab, x, fmt, nearest(x, fmt))


@step1
@formats(*TORCH)
def test_round_matches_torch(lab, fmt):
    # Every upper half of a float32 with lower halves around ties, and with random ones.
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    lower = [*lower, torch.randint(2**16, (2**16,)).numpy().astype(np.uint32)]
    x = np.concatenate([upper | part for part in lower]).view(np.float32)
    if fmt == E4M3 and not torch.tensor(1000.0).to(torch.float8_e4m3fn).float() == 448:
        x = x[~(np.abs(x) > 464)]  # torch before 2.12 gives NaN there
    want = torch.from_numpy(x).to(TORCH[fmt]).float().numpy()
    check_rounding(lab, x, fmt, want)


@step1
def test_round_tf32_drops_13_bits_of_float32(lab):
    bits = torch.randint(-(2**31), 2**31, (200_000,)).numpy().astype(np.int32).view(np.uint32)
    bits[::2] = bits[::2] & ~np.uint32(0x1FFF) | 0x1000  # half of them ties
    bits = bits[np.isfinite(bits.view(np.float32))]
    kept = (bits.astype(np.uint64) + 0xFFF + (bits >> 13 & 1)) >> 13 << 13
    check_rounding(lab, bits.view(np.float32), TF32, kept.astype(np.uint32).view(np.float32))


@step1
def test_round_any_float64(lab):
    # Random bits of float64, half of them with exponents near the format's.
    special = [INF, -INF, NAN, 0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, sys.float_info.max]
    for fmt in (FP32, TF32, FP16, BF16, E4M3, E5M2, *ODD[:4]):
        x = torch.randint(-(2**63), 2**63 - 1, (20_000,)).numpy().view(np.float64).copy()
        span = 2 ** fmt[0] + 2 * fmt[1]
        near = np.ldexp(1 + uniform(10_000), torch.randint(-span, span, (10_000,)).numpy() // 2)
        x[:10_000] = np.copysign(near, x[:10_000])
        x = np.concatenate([x, special])
        check_rounding(lab, x, fmt, nearest(x, fmt))


@step1
def test_round_once(lab):
    # 2**-40 past a tie: float32 cannot hold it, so rounding to float32 first makes a tie of it.
    for fmt in (FP16, BF16, TF32, E5M2, E4M3, *WIDE):
        ulp = 2.0 ** -fmt[1]
        x = np.array([1 + ulp / 2 + 2.0**-40, 1 + 1.5 * ulp - 2.0**-40])
        x = np.concatenate([x, -x, x * 2.0**-5])
        want = np.array([1 + ulp, 1 + ulp])
        want = np.concatenate([want, -want, want * 2.0**-5])
        check_rounding(lab, x, fmt, want, "float64 -> float32 -> format rounds twice")
    x = 1 + 2.0**-13 + 2.0**-30
    check_rounding(lab, x, (5, 12, True), 1 + 2.0**-12, "float32 makes a tie of it")


@step1
def test_round_wide_formats_against_fractions(lab):
    for fmt in WIDE:
        largest, _, smallest_normal = limits(fmt)
        span = 2 ** (fmt[0] - 1) + fmt[1]
        x = np.ldexp(1 + uniform(300), torch.randint(-span, span, (300,)).numpy())
        gap = smallest_normal * 2.0 ** -fmt[1]
        x = np.concatenate([x, [largest, 2 * largest, gap / 2, gap / 2 * 1.01, gap * 1.5, 0.0]])
        x = np.concatenate([x, -x])
        want = [nearest_exactly(float(value), fmt) for value in x]
        check_rounding(lab, x, fmt, want, "no format of NumPy or torch is this one")


@step1
def test_round_overflow(lab):
    note = "what rounds to the largest number is no overflow; past that, infinity or the largest"
    for fmt in (FP32, TF32, FP16, BF16, E5M2, E4M3, *ODD[:4], ODD[-1]):
        largest, top, _ = limits(fmt)
        gap = top * 2.0 ** -fmt[1]
        below, above = np.nextafter(largest + gap / 2, 0), np.nextafter(largest + gap / 2, INF)
        beyond = INF if fmt[2] else largest
        x = np.array([largest, below, above, largest + gap, 2.0 * largest, 1e300, INF])
        want = np.array([largest, largest, *[beyond] * 5])
        check_rounding(lab, np.concatenate([x, -x]), fmt, np.concatenate([want, -want]), note)
        # Halfway to what would come next, whose mantissa is even where there is infinity.
        check_rounding(lab, largest + gap / 2, fmt, beyond)


@step1
def test_round_subnormal_numbers(lab):
    for fmt in (FP16, BF16, E5M2, E4M3, FP32):
        _, _, normal = limits(fmt)
        unit = normal * 2.0 ** -fmt[1]
        count = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 2.75])
        whole = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0])
        x, want = np.concatenate([count, -count]) * unit, np.concatenate([whole, -whole]) * unit
        check_rounding(lab, x, fmt, want, "gradual underflow: multiples of the smallest number")
        x = normal - unit / 2 + np.array([-0.01, 0.0, 0.01]) * unit
        check_rounding(lab, x, fmt, [normal - unit, normal, normal])


@step1
def test_round_keeps_shapes(lab):
    x = normal(6, 10)
    for case, value in {
        "a Python float": 0.1,
        "a Python int": 3,
        "a 0-dimensional array": np.array(0.1),
        "an empty array": np.zeros((0, 3)),
        "a list": [0.1, -0.2],
        "a transposed view": x.T,
        "every third column": x[:, ::3],
        "float32": x.astype(np.float32),
        "float16": x.astype(np.float16),
        "int64": np.array([[1, 257, 2049]]),
    }.items():
        got = lab.round_to_format(value, *BF16)
        check(f"round_to_format of {case}", got, nearest(value, BF16), value, BF16)


@step1
def test_round_leaves_its_input_alone(lab):
    x = np.array([0.1, -1e9, NAN, -0.0, INF])
    before = x.copy()
    got = lab.round_to_format(x, *FP16)
    assert same(x, before).all(), f"round_to_format changes x: {before} became {x}"
    rounded = np.array([0.5, 2.0, INF, -0.0])  # numbers of fp16 already
    for given, result in ((x, got), (rounded, lab.round_to_format(rounded, *FP16))):
        shared = np.shares_memory(result, given)
        assert not shared, "round_to_format returns x itself: want a new array"


@step1
def test_round_properties(lab):
    for fmt in (FP32, TF32, FP16, BF16, E5M2, E4M3):
        _, top, smallest_normal = limits(fmt)
        x = np.sort(normal(2000) * np.exp2(8 * normal(2000)))
        once = np.asarray(lab.round_to_format(x, *fmt))
        check("rounding what is rounded", lab.round_to_format(once, *fmt), once, once, fmt)
        check("rounding -x", lab.round_to_format(-x, *fmt), -once, -x, fmt)
        assert (once[1:] >= once[:-1]).all(), "a larger x never rounds to a smaller number"
        x = x[(np.abs(x) >= 4 * smallest_normal) & (np.abs(x) < top / 8)]
        once = np.asarray(lab.round_to_format(x, *fmt))
        for factor in (0.25, 4.0):
            got = lab.round_to_format(x * factor, *fmt)
            check(f"rounding {factor} x", got, once * factor, x * factor, fmt)


@step1
def test_round_rejects(lab):
    lab.round_to_format(1.0, 2, 1), lab.round_to_format(1.0, 8, 23)
    for bits in ((1, 3), (9, 3), (11, 52), (5, 0), (5, 24), (5, -1), (5.0, 10), ("5", 10)):
        for function, args in ((lab.round_to_format, (1.0, *bits)), (lab.format_limits, bits)):
            with pytest.raises(ValueError, match=r"must be a whole number .* got"):
                function(*args)


NARROW = {"float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
# What looks into other modules, such as this one, or loops over elements out of sight.
OTHERS = {"torch", "ml_dtypes", "importlib", "inspect", "gc"}
LOOPS = {"tolist", "vectorize", "frompyfunc", "nditer", "fromiter", "apply_along_axis"}


@step1
def test_round_is_written_here(lab):
    lab.round_to_format(1.0, 5, 10)
    for node in ast.walk(ast.parse(lab.file.read_text())):
        found = loops = set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # "float16", "<f2", "e"
            word = node.value.strip()
            found = {word} if word in NARROW or re.fullmatch("[<>=|]?(f2|e)", word) else set()
        elif isinstance(node, ast.Attribute):  # np.half, sys.modules
            found, loops = {node.attr} & (NARROW | {"modules"}), {node.attr} & LOOPS
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            found = {n for n in names if n.split(".")[0] in NARROW | OTHERS | {"labs"}}
        elif isinstance(node, ast.FunctionDef) and node.name == "round_to_format":
            loops = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & {"map"}
        assert not found, (
            f"{lab.file.name} line {node.lineno} uses {found.pop()!r}: the rounding is yours to "
            "write, in float64 or with integers. No library has a 6 + 9 bit format to cast to"
        )
        assert not loops, (
            f"{lab.file.name} line {node.lineno} uses {loops.pop()}: a Python loop over elements, "
            "out of sight. Use operations on whole arrays"
        )


@step1
def test_round_takes_whole_arrays(lab):
    x = normal(16)
    few = lines_run(lab, lab.round_to_format, x, *FP16)
    many = lines_run(lab, lab.round_to_format, np.tile(x, 64), *FP16)
    assert many <= few, (
        f"16 numbers run {few} lines of your file, 64 times as many run {many}: a Python loop "
        "over elements. Arrays of a million numbers come; use operations on whole arrays"
    )


# ---------------------------------------------------------------- step 2


def check_ulp(lab, x, fmt, want, note=""):
    __tracebackhide__ = True
    got = lab.ulp(x, format_of(lab, fmt))
    check(f"ulp(x, {name_of(fmt)})", got, want, x, note=note)


@step2
def test_ulp_worked_examples(lab):
    for fmt, x, want in (
        (FP32, 1.0, 2.0**-23),
        (FP16, 1.0, 2.0**-10),
        (BF16, 1.0, 2.0**-7),
        (TF32, 1.0, 2.0**-10),
        (E4M3, 1.0, 0.125),
        (FP16, 0.999, 2.0**-11),
        (FP16, 2047.0, 1.0),
        (FP16, -2048.0, 2.0),
        (FP32, 16777216.0, 2.0),
        (FP16, 65504.0, 32.0),
        (BF16, 300.0, 2.0),
        (E4M3, 448.0, 32.0),
        (FP16, 0.0, 2.0**-24),
    ):
        check_ulp(lab, x, fmt, want)


@step2
def test_ulp_is_the_gap_above(lab):
    # At each number of a format the gap to the next larger one, which also is that of everything
    # between the two. Past the largest number it stays.
    for fmt in (FP16, BF16, E5M2, E4M3, *ODD):
        values = table(fmt)
        numbers, gaps = values[:-1], np.diff(values)
        note = "at a power of two the gap above counts; just below it, the smaller one"
        check_ulp(lab, numbers, fmt, gaps, note)
        note = "log2 of a number just below a power of two rounds up to a whole one: use np.frexp"
        check_ulp(lab, np.nextafter(numbers[1:], 0), fmt, gaps[:-1], note)
        check_ulp(lab, np.nextafter(numbers, INF), fmt, gaps)
        check_ulp(lab, -(numbers + values[1:]) / 2, fmt, gaps, "the sign of x plays no part")


@step2
def test_ulp_matches_numpy_spacing(lab):
    exponent = torch.randint(-149, 127, (50_000,)).numpy()
    x = np.ldexp(1 + uniform(50_000), exponent).astype(np.float32)
    check_ulp(lab, x, FP32, np.spacing(x).astype(np.float64))


@step2
def test_ulp_below_and_above_the_format(lab):
    for fmt in (FP32, TF32, FP16, BF16, E5M2, E4M3):
        largest, top, smallest_normal = limits(fmt)
        least, most = smallest_normal * 2.0 ** -fmt[1], top * 2.0 ** -fmt[1]
        x = [0.0, -0.0, least / 8, least, 5e-324, smallest_normal / 2, smallest_normal]
        check_ulp(lab, x, fmt, [least] * 7, "subnormal numbers all lie equally far apart")
        x = [largest, np.nextafter(largest, INF), 2 * largest, -1e300]
        check_ulp(lab, x, fmt, [most] * 4, "past the largest number it stays that of the largest")


@step2
def test_ulp_of_what_is_not_finite(lab):
    x = np.array([1.0, NAN, INF, -INF, 2.0])
    for fmt in (FP16, E4M3):
        one = 2.0 ** -fmt[1]
        check_ulp(lab, x, fmt, [one, NAN, NAN, NAN, 2 * one], "NaN, not a plausible number")


@step2
def test_ulp_bounds_the_rounding_error(lab):
    for fmt in (FP32, TF32, FP16, BF16, E5M2, E4M3):
        x = normal(3000) * np.exp2(4 * normal(3000))
        x = x[np.abs(x) < limits(fmt)[0]]
        error = np.abs(nearest(x, fmt) - x) / np.asarray(lab.ulp(x, format_of(lab, fmt)))
        worst = error.max()
        assert 0.4 < worst <= 0.5, (
            f"{name_of(fmt)}: rounding to nearest is off by up to half an ulp; by your ulp it is "
            f"{worst:.4g}"
        )


@step2
def test_ulp_keeps_shapes(lab):
    for value in (3.0, 3, np.array(3.0), np.zeros((0, 2)), normal(3, 4).T, [1.0, 3.0]):
        x = np.asarray(value, dtype=np.float64)
        _, e = np.frexp(np.maximum(np.abs(x), 2.0**-126))
        check_ulp(lab, value, BF16, np.ldexp(1.0, e - 8))
    x = np.array([0.0, -3.0, INF])
    before = x.copy()
    lab.ulp(x, format_of(lab, FP16))
    assert same(x, before).all(), "ulp changes x"


# ---------------------------------------------------------------- step 3


def check_sum(lab, terms, fmt, want, note=""):
    __tracebackhide__ = True
    got = lab.running_sum(terms, format_of(lab, fmt))
    check(f"running_sum in {name_of(fmt)}", got, want, note=note)


@step3
def test_running_sum_matches_numpy(lab):
    for fmt, dtype in ((FP32, np.float32), (FP16, np.float16)):
        terms = (uniform(7, 200) * 3 - 0.5).astype(dtype)
        want = np.add.accumulate(terms, axis=-1, dtype=dtype)
        note = "each sum is rounded once, from float64, and only after the addition"
        check_sum(lab, terms, fmt, want.astype(np.float64), note)


@step3
def test_running_sum_of_any_format(lab):
    for fmt in (TF32, BF16, E5M2, E4M3, (6, 9, True)):
        terms = normal(2, 3, 40)
        check_sum(lab, terms, fmt, summed(terms, fmt))
    terms = uniform(1, 1200)
    note = "the order is left to right: not blocks, not pairs"
    check_sum(lab, terms, BF16, summed(terms, BF16), note)


@step3
def test_running_sum_of_ones_stops(lab):
    for fmt, first, stops in (
        (BF16, 1, 256),
        (E4M3, 1, 16),
        (E5M2, 1, 8),
        (FP16, 2040, 2048),
        (TF32, 2040, 2048),
        (FP32, 2**24 - 3, 2**24),
    ):
        terms = np.ones(stops - first + 20)
        terms[0] = first
        want = np.minimum(np.cumsum(terms), stops)
        note = f"{stops} + 1 lies halfway to {stops} + 2 and goes back to {stops}, for ever"
        check_sum(lab, terms, fmt, want, note)
    note = "a sum that has stopped for small terms goes on with a larger one"
    check_sum(lab, [256.0, 1.0, 4.0], BF16, [256.0, 256.0, 260.0], note)


@step3
def test_running_sum_does_not_round_the_terms(lab):
    # 2**-11 + 2**-30 rounded to fp16 is 2**-11, and 1 + 2**-11 is a tie that goes back to 1.
    terms = np.array([1.0, 2.0**-11 + 2.0**-30])
    note = "only the accumulator is rounded, after the addition"
    check_sum(lab, terms, FP16, [1.0, 1 + 2.0**-10], note)


@step3
def test_running_sum_overflow(lab):
    check_sum(lab, [60000.0, 5000.0, 1000.0, -60000.0], FP16, [60000.0, 64992.0, INF, INF])
    check_sum(lab, [400.0, 400.0, -400.0], E4M3, [384.0, 448.0, 48.0])
    check_sum(lab, [1.0, NAN, 1.0], BF16, [1.0, NAN, NAN])
    check_sum(lab, [INF, -INF, 1.0], FP16, [INF, NAN, NAN], "inf - inf is NaN")


@step3
def test_running_sum_keeps_shapes(lab):
    for terms in (np.ones(1), np.ones((2, 1)), np.ones((0, 3)), normal(4, 3, 2).T, [0.5, 0.25]):
        terms = np.asarray(terms)
        check_sum(lab, terms, BF16, summed(terms, BF16))
    note = "the accumulator starts at 0, and 0 + -0 is 0"
    check_sum(lab, [-0.0, -0.0], FP16, [0.0, 0.0], note)
    terms = normal(2, 5)
    before = terms.copy()
    got = lab.running_sum(terms, format_of(lab, FP16))
    assert (terms == before).all(), "running_sum changes its terms"
    first = np.array(got)
    lab.running_sum(terms + 1, format_of(lab, FP16))
    assert (np.asarray(got) == first).all(), "a second call changes the result of the first"


@step3
def test_running_sum_loops_along_the_last_axis_only(lab):
    fmt = format_of(lab, BF16)
    terms = normal(1, 30)
    few = lines_run(lab, lab.running_sum, terms, fmt)
    many = lines_run(lab, lab.running_sum, np.repeat(terms, 64, axis=0), fmt)
    assert many <= few, (
        f"1 sum of 30 terms runs {few} lines of your file, 64 such sums run {many}: loop along "
        "the last axis only, and let each step of it add to all sums at once"
    )


def dot_error_reference(a, b, inputs, accumulator):
    products = nearest(a, inputs) * nearest(b, inputs)
    size = np.cumsum(np.abs(a * b), axis=-1)
    return np.abs(summed(products, accumulator) - np.cumsum(a * b, axis=-1)) / size


def check_dot(lab, a, b, inputs, accumulator, want, note=""):
    __tracebackhide__ = True
    got = lab.dot_error(a, b, format_of(lab, inputs), format_of(lab, accumulator))
    what = f"dot_error with {name_of(inputs)} inputs, {name_of(accumulator)} accumulator"
    check(what, got, want, note=note, tolerance=1e-13)


@step3
def test_dot_error(lab):
    a, b = normal(3, 80), uniform(3, 80)
    note = "|sum - exact| over the sum of |a b|, both of a and b before they are rounded"
    for inputs, accumulator in (
        (FP32, FP32),
        (TF32, FP32),
        (BF16, FP32),
        (FP16, FP16),
        (BF16, BF16),
        (E4M3, FP16),
    ):
        want = dot_error_reference(a, b, inputs, accumulator)
        check_dot(lab, a, b, inputs, accumulator, want, note)
    # 1.01 * 2**-25 is rounded to 2**-24, twice as much, and the product is four times as large.
    a = np.array([1.01 * 2.0**-25])
    want = dot_error_reference(a, a, FP16, FP32)
    check_dot(lab, a, a, FP16, FP32, want, "an error may be larger than 1")


@step3
def test_dot_error_keeps_shapes(lab):
    for shape in ((2, 3, 40), (1, 5), (5, 1), (0, 3)):
        a, b = normal(*shape), normal(*shape)
        want = dot_error_reference(a, b, BF16, FP32)
        check_dot(lab, a, b, BF16, FP32, want, "sums run along the last axis, others stay")
    a, b = normal(2, 5), normal(2, 5)
    copies = [a.copy(), b.copy()]
    lab.dot_error(a, b, format_of(lab, BF16), format_of(lab, FP32))
    assert (a == copies[0]).all(), "dot_error changes a"
    assert (b == copies[1]).all(), "dot_error changes b"


@step3
def test_dot_error_products_are_exact(lab):
    # (1 + 2**-10)**2 has 21 bits. In fp16 it would lose the last one before it is added.
    a = np.array([1 + 2.0**-10, -1.0])
    b = np.array([1 + 2.0**-10, 1 + 2.0**-9])
    note = "a product is not rounded: tensor cores add it with all its bits"
    check_dot(lab, a, b, FP16, FP32, [0.0, 0.0], note)


@step3
def test_dot_error_of_ones(lab):
    n = np.arange(1.0, 1025.0)
    want = np.maximum(n - 256, 0) / n
    check_dot(lab, np.ones(1024), np.ones(1024), BF16, BF16, want, "the sum stops at 256")
    assert want[-1] == 0.75
    check_dot(lab, np.ones(300), np.ones(300), BF16, FP32, np.zeros(300))


@step3
def test_dot_error_where_nothing_was_added(lab):
    a, b = np.array([0.0, 0.0, 0.1, 0.0]), np.array([1.0, 0.0, 1.0, 2.0])
    error = abs(nearest(0.1, FP16) - 0.1) / 0.1
    note = "0 / 0 is an error of 0"
    check_dot(lab, a, b, FP16, FP32, [0.0, 0.0, error, error], note)


@step3
def test_dot_error_does_not_hide_overflow_or_nan(lab):
    fmt, wide = format_of(lab, FP16), format_of(lab, FP32)
    big = np.full(4, 200.0)
    got = np.asarray(lab.dot_error(big, big, fmt, fmt))
    assert got[0] == 0, f"200 * 200 is a number of fp16: got the error {got[0]}"
    assert np.isinf(got[1:]).all(), f"the accumulator is infinite, so is the error: got {got}"
    got = np.asarray(lab.dot_error(np.array([1.0, NAN, 1.0]), np.ones(3), fmt, wide))
    assert got[0] == 0, f"NaN comes after the first term: got {got}"
    assert np.isnan(got[1:]).all(), f"NaN among the terms is no error of 0: got {got}"
    note = "an infinite sum against an infinite exact sum: inf - inf is NaN"
    check_dot(lab, [1.0, INF, 1.0], np.ones(3), FP16, FP32, [0.0, NAN, NAN], note)
    note = "70000 is infinite in fp16: so are the sum and its error"
    check_dot(lab, [7e4, 1.0], np.ones(2), FP16, FP32, [INF, INF], note)


@step3
def test_error_grows_with_the_square_root_and_then_with_the_length(lab):
    # Positive terms: rounding errors of either sign add up to sqrt(n). Once the accumulator's ulp
    # is as large as the terms, all errors have one sign, and the sum falls behind.
    a, b = uniform(32, 1024), uniform(32, 1024)
    fp32, bf16 = format_of(lab, FP32), format_of(lab, BF16)

    def typical(accumulator):
        error = np.asarray(lab.dot_error(a, b, fp32, accumulator))
        return np.sqrt((error**2).mean(axis=0))

    wide, narrow = typical(fp32), typical(bf16)
    ratio = wide[1023] / wide[63]
    assert 2 < ratio < 8, f"fp32, 16 times as long: want about 4 times the error, got {ratio:.3g}"
    assert wide[1023] < 1024 * 2.0**-24 / 8, "far below the bound n * u"
    assert narrow[1023] > 8 * narrow[63], "bf16: once the sum stagnates its error grows like n"
    assert narrow[1023] > 0.1, f"bf16 at 1024 terms: much of the sum is lost, got {narrow[1023]}"


@step3
def test_tf32_is_an_error_of_the_inputs(lab):
    # What a float32 tl.dot does by default on a GPU: float32 sums of tf32 inputs.
    a, b = normal(32, 256), normal(32, 256)
    fp32, tf32 = format_of(lab, FP32), format_of(lab, TF32)
    exact_inputs = np.asarray(lab.dot_error(a, b, fp32, fp32))[:, -1].mean()
    tf32_inputs = np.asarray(lab.dot_error(a, b, tf32, fp32))[:, -1].mean()
    assert exact_inputs < 2.0**-23, f"fp32 inputs: {exact_inputs:.3g}"
    assert 2.0**-17 < tf32_inputs < 2.0**-11, f"tf32 inputs: {tf32_inputs:.3g}"


@step3
def test_dot_error_rejects(lab):
    fmt = format_of(lab, FP16)
    lab.running_sum(np.ones(1), fmt), lab.dot_error(np.ones(1), np.ones(1), fmt, fmt)
    for bad in (np.float64(1.0), np.ones((3, 0))):
        with pytest.raises(ValueError, match="got shape"):
            lab.running_sum(bad, fmt)
        with pytest.raises(ValueError, match="got shape"):
            lab.dot_error(bad, bad, fmt, fmt)
    for other in (np.ones(2), np.ones((1, 3)), np.ones(1)):
        with pytest.raises(ValueError, match="one shape: got"):
            lab.dot_error(np.ones(3), other, fmt, fmt)


# ---------------------------------------------------------------- step 4


@step4
def test_exp_range(lab):
    for fmt, low, high in (
        (FP32, -103.9720770840, 88.7228390819),
        (TF32, -94.9611637367, 88.7225949412),
        (BF16, -92.8817221950, 88.7208840768),
        (FP16, -17.3286795140, 11.0901107185),
        (E5M2, -11.7835020691, 11.0258163678),
        (E4M3, -6.9314718056, 6.1398845523),
    ):
        got = lab.exp_range(format_of(lab, fmt))
        for name, value, want in zip(("low", "high"), got, (low, high), strict=True):
            assert value == pytest.approx(want, abs=1e-9), (
                f"exp_range of {name_of(fmt)}: want {name} {want}, got {value}. What is below half "
                "the smallest number rounds to 0; what is up to half an ulp past the largest, to it"
            )


@step4
def test_exp_range_is_where_rounding_says(lab):
    for fmt in (FP16, BF16, E5M2, E4M3, (6, 9, True), (3, 4, False), (8, 3, False)):
        low, high = lab.exp_range(format_of(lab, fmt))
        values = table(fmt)
        inside = nearest(np.exp([low + 1e-9, high - 1e-9]), fmt)
        want = values[1], values[-2]
        assert tuple(inside) == want, f"{name_of(fmt)}: just inside want {want}, got {inside}"
        assert nearest(np.exp(low - 1e-9), fmt) == 0, f"{name_of(fmt)}: below low exp is not 0"
        past = np.exp(high + 1e-9) - (values[-1] + values[-2]) / 2
        assert past > 0, f"{name_of(fmt)}: above high exp still rounds to the largest number"


def softmax_reference(x, fmt, accumulator=FP32, safe=True):
    x = nearest(x, fmt)
    if safe:
        x = nearest(x - x.max(axis=-1, keepdims=True), fmt)
    p = nearest(np.exp(x), fmt)
    return nearest(p / summed(p, accumulator)[..., -1:], fmt)


def check_softmax(lab, x, fmt, accumulator=FP32, safe=True, want=None, note=""):
    __tracebackhide__ = True
    if want is None:
        want = softmax_reference(np.asarray(x), fmt, accumulator, safe)
    got = lab.softmax(x, format_of(lab, fmt), format_of(lab, accumulator), safe)
    how = "safe" if safe else "unsafe"
    check(f"{how} softmax in {name_of(fmt)}, sum in {name_of(accumulator)}", got, want, note=note)


@step4
@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
def test_softmax(lab, safe):
    x = normal(5, 40) * 2
    note = "a wrong last digit: one of the five operations is not rounded, or rounded elsewhere"
    for fmt in (FP32, TF32, FP16, BF16, E5M2, E4M3):
        check_softmax(lab, x, fmt, FP32, safe, note=note)
        check_softmax(lab, x, fmt, fmt, safe, note=note)
    note = "the quotient is rounded once, from float64"
    check_softmax(lab, [0.0, -4.5], FP16, FP32, safe, [0.98876953125, 0.010986328125], note)


@step4
def test_softmax_is_close_to_the_real_one(lab):
    x = normal(5, 40) * 3
    for fmt in (FP32, FP16, BF16):
        want = torch.softmax(torch.from_numpy(nearest(x, fmt)), -1).numpy()
        got = lab.softmax(x, format_of(lab, fmt))
        # A difference of up to 32 is rounded by up to half an ulp, and exp makes that relative.
        tolerance = 2.0 ** -fmt[1] * 24
        check(f"softmax in {name_of(fmt)}", got, want, tolerance=tolerance)


@step4
def test_softmax_by_default_is_safe_and_sums_in_fp32(lab):
    # 1 + 400 * 2**-12: in tf32 or fp16 the sum would stay 1. And 90 overflows unless it is safe.
    x = np.full(401, 90 - 12 * math.log(2))
    x[0] = 90.0
    got = lab.softmax(x, format_of(lab, TF32))
    check("softmax(x, tf32)", got, softmax_reference(x, TF32), note="the defaults: fp32, safe")


@step4
def test_softmax_unsafe_overflows_where_exp_range_says(lab):
    # The numbers of each format next to its upper threshold.
    for fmt, fits, too_large in (
        (FP32, 88.72283172607422, 88.72283935546875),
        (FP16, 11.0859375, 11.09375),
        (BF16, 88.5, 89.0),
    ):
        want = softmax_reference(np.array([fits, 0.0]), fmt, FP32, False)
        assert np.isfinite(want).all()
        check_softmax(lab, [fits, 0.0], fmt, FP32, False, want)
        note = "exp is infinite, and inf / inf is NaN"
        check_softmax(lab, [too_large, 0.0], fmt, FP32, False, [NAN, 0.0], note)
        want = softmax_reference(np.array([too_large, 0.0]), fmt, FP32, True)
        assert np.isfinite(want).all()
        note = "safe: the largest exponent is 0, whatever the scores"
        check_softmax(lab, [too_large, 0.0], fmt, FP32, True, want, note)
    note = "the maximum of a row may be far below 0"
    check_softmax(lab, [-20000.0, -20001.0], FP32, note=note)


@step4
def test_softmax_unsafe_vanishes_too(lab):
    for fmt, score in ((FP32, -104.0), (FP16, -17.5), (BF16, -93.0), (E4M3, -7.0)):
        note = "every exp rounds to 0, and 0 / 0 is NaN"
        check_softmax(lab, [score, score], fmt, FP32, False, [NAN, NAN], note)
        check_softmax(lab, [score, score], fmt, FP32, True, [0.5, 0.5])


@step4
def test_softmax_without_infinity_is_wrong_and_silent(lab):
    # exp(7) = 1097 and exp(9) = 8103 both become 448: two scores, 2 apart, weigh the same.
    check_softmax(lab, [7.0, 9.0], E4M3, FP32, False, [0.5, 0.5], "448 / 896 is 0.5 each")
    check_softmax(lab, [7.0, 9.0], E4M3, FP32, True)


@step4
def test_softmax_sum_stagnates(lab):
    # 1024 equal scores. In bf16 the sum stops at 256: the probabilities add up to 4.
    note = "the sum runs from left to right in the accumulator: running_sum"
    for accumulator, n, stops in ((BF16, 1024, 256), (E4M3, 256, 16), (FP32, 512, 512)):
        check_softmax(lab, np.zeros(n), FP16, accumulator, True, np.full(n, 1 / stops), note)


@step4
def test_softmax_rounds_the_scores_first(lab):
    # 2049 and 2050 are scores; in fp16 they are 2048 and 2050.
    check_softmax(lab, [2049.0, 2050.0], FP16, want=softmax_reference(np.array([0.0, 2.0]), FP16))
    # 70000 is inf in fp16, before anything is subtracted: scale before it can overflow.
    check_softmax(lab, [70000.0, 0.0], FP16, want=[NAN, NAN], note="inf - inf is NaN")
    check_softmax(lab, [70000.0 / 8, 0.0], FP16, want=[1.0, 0.0])


@step4
def test_softmax_masked_and_broken_rows(lab):
    rows = [[1.0, -INF, 2.0], [-INF, -INF, -INF], [0.0, NAN, 1.0], [0.0, INF, 1.0], [3.0, 1.0, 2.0]]
    for fmt in (FP32, FP16, BF16):
        got = lab.softmax(rows, format_of(lab, fmt))
        want = softmax_reference(np.array(rows), fmt)
        assert (np.isnan(want) == torch.softmax(torch.tensor(rows), -1).isnan().numpy()).all()
        note = "a masked score gets 0; a row that is all masked, or broken, is NaN and not hidden"
        check(f"softmax in {name_of(fmt)}", got, want, note=note)
        check_softmax(lab, rows, fmt, FP32, False, note=note)
    note = "e4m3 has no infinity: -inf is -448 there, and exp(-448) is 0"
    check_softmax(lab, [1.0, -INF, 2.0], E4M3, want=[0.28125, 0.0, 0.75], note=note)
    note = "four scores of -448 are equal scores: 1/4 each"
    check_softmax(lab, [-INF] * 4, E4M3, want=[0.25] * 4, note=note)


@step4
def test_softmax_properties(lab):
    fmt = format_of(lab, FP16)
    x = np.round(normal(4, 50) * 64) / 64  # numbers of fp16, also after adding 8
    once = np.asarray(lab.softmax(x, fmt))
    check("softmax(x + 8)", lab.softmax(x + 8, fmt), once, note="a constant makes no difference")
    check("softmax of a single score", lab.softmax([[5.0], [-5.0]], fmt), [[1.0], [1.0]])
    check("softmax of (2, 2, 50)", lab.softmax(x.reshape(2, 2, 50), fmt), once.reshape(2, 2, 50))
    x = normal(4, 50)  # not numbers of fp16
    before = x.copy()
    lab.softmax(x, fmt)
    assert (x == before).all(), "softmax changes x"


@step4
def test_softmax_rejects(lab):
    fmt = format_of(lab, FP16)
    lab.softmax([1.0], fmt)
    for bad in (1.0, np.ones((3, 0))):
        with pytest.raises(ValueError, match="got shape"):
            lab.softmax(bad, fmt)


# ---------------------------------------------------------------- step 5


def check_quantized(lab, x, fmt):
    """Checks shapes, scales and rounding of finite rows; returns (q, scale)."""
    q, scale = lab.quantize_rows(x, format_of(lab, fmt))
    x, largest = np.asarray(x, dtype=np.float64), limits(fmt)[0]
    amax = np.abs(x).max(axis=1, keepdims=True)
    want = np.where(amax == 0, 1.0, amax / largest)
    what = f"quantize_rows to {name_of(fmt)}"
    note = f"largest |x| of the row / {largest:g}, the largest number of {name_of(fmt)}"
    check(f"{what}, scale", scale, want, note=note, tolerance=1e-15 * float(want.max()))
    assert (np.abs(np.asarray(scale) / want - 1) < 1e-15).all(), f"{what}: scale is not {note}"
    check(f"{what}, q", q, nearest(x / scale, fmt), x / scale, fmt, "q = x / scale, rounded")
    return np.asarray(q), np.asarray(scale)


@step5
def test_quantize_rows(lab):
    for fmt in (E4M3, E5M2, FP16, (3, 4, False), (4, 3, True)):
        q, _ = check_quantized(lab, normal(7, 33) * np.exp2(4 * normal(7, 1)), fmt)
        top = np.abs(q).max(axis=1)
        assert (top == limits(fmt)[0]).all(), f"each row reaches the largest number: got {top}"


@step5
def test_quantize_rows_worked_example(lab):
    x = np.array([[0.5, -1.75, 0.1], [896.0, 3.0, -100.0]])
    q, scale = lab.quantize_rows(x, format_of(lab, E4M3))
    check("scale", scale, [[1.75 / 448], [2.0]])
    check("q", q, [[128.0, -448.0, 26.0], [448.0, 1.5, -48.0]], x / scale, E4M3)


@step5
def test_quantize_rows_zeros_and_signs(lab):
    check_quantized(lab, [[0.0, -0.0, 0.0], [1.0, -2.0, 0.0]], E4M3)
    _, scale = check_quantized(lab, np.zeros((2, 1)), E4M3)
    assert (scale == 1).all(), f"a row of zeros has the scale 1: got {scale}"
    check_quantized(lab, [[-3.0, -1.0]], E4M3)
    check_quantized(lab, [[-3e-30, 1e-31], [3e30, -1e29]], E4M3)
    check_quantized(lab, [[1e-300, 3e-301], [1e60, 3e59]], E4M3)  # the scale is a float64


@step5
def test_quantize_rows_shapes(lab):
    for shape in ((1, 1), (1, 5), (5, 1)):
        check_quantized(lab, normal(*shape), E4M3)
    x = normal(6, 8)
    check_quantized(lab, x.T, E4M3)
    check_quantized(lab, x.astype(np.float32)[:, ::3], E4M3)
    before = x.copy()
    lab.quantize_rows(x, format_of(lab, E4M3))
    assert (x == before).all(), "quantize_rows changes x"


@step5
def test_quantize_rows_does_not_hide_nan_or_infinity(lab):
    x = normal(6, 6)
    x[1, 2], x[2, 3], x[2, 4], x[3, 0], x[4, 5] = NAN, INF, -INF, -INF, INF
    for fmt in (E4M3, E5M2):
        q, scale = (np.asarray(y) for y in lab.quantize_rows(x, format_of(lab, fmt)))
        with np.errstate(invalid="ignore"):
            back = q * scale
        for place in np.argwhere(~np.isfinite(x)):
            row, column = (int(i) for i in place)
            assert not np.isfinite(back[row, column]), (
                f"{name_of(fmt)}: x[{row}, {column}] is {x[row, column]}, q * scale there "
                f"{back[row, column]}: a broken activation must not become a plausible number"
            )
        want, want_scale = check_quantized(lab, x[[0, 5]], fmt)
        note = "rows without NaN or infinity do not notice those of others"
        check("q of the other rows", q[[0, 5]], want, note=note)
        check("scale of the other rows", scale[[0, 5]], want_scale, note=note)


@step5
def test_quantize_rows_one_outlier_row(lab):
    # One row 2**15 times as large as the others. One scale a tensor is quantize_rows of one row.
    fmt = format_of(lab, E4M3)
    x = normal(32, 64)
    x[3] *= 2.0**15
    others = np.arange(32) != 3

    def error(q, scale):
        back = (np.asarray(q) * np.asarray(scale)).reshape(x.shape)
        lost = np.linalg.norm(back - x, axis=1) / np.linalg.norm(x, axis=1)
        return lost[others].mean()

    rows = error(*lab.quantize_rows(x, fmt))
    tensor = error(*lab.quantize_rows(x.reshape(1, -1), fmt))
    assert rows < 0.035, f"one scale a row: relative error {rows:.3g}, want below 2**-4 / sqrt(3)"
    assert tensor > 2.5 * rows, f"one scale a tensor: {tensor:.3g}, want far above {rows:.3g}"


@step5
def test_quantize_rows_rejects(lab):
    fmt = format_of(lab, E4M3)
    lab.quantize_rows(np.ones((1, 1)), fmt)
    for bad in (np.ones(3), np.ones((0, 3)), np.ones((3, 0)), np.ones((2, 2, 2)), 1.0):
        with pytest.raises(ValueError, match="got shape"):
            lab.quantize_rows(bad, fmt)


FAR = np.concatenate([[0.0], np.full(4096, -7.0)])  # one key that matters, 4096 a little below it
FAR_V = np.concatenate([[1.0], np.full(4096, -1.0)])


@step5
def test_output_row_shift_saves_small_weights(lab):
    e4m3 = format_of(lab, E4M3)
    true = float(lab.output_row(FAR, FAR_V, format_of(lab, FP32)))
    plain = float(lab.output_row(FAR, FAR_V, e4m3))
    shifted = float(lab.output_row(FAR, FAR_V, e4m3, 8))
    got = round(true, 3), round(plain, 3), round(shifted, 3)
    assert got == (-0.578, 0.211, -0.581), (
        f"want -0.578 (P in fp32), 0.211 (P in e4m3: exp(-7) rounds to 0) and -0.581 (P times "
        f"2**8): got {got}. Does the denominator add p before rounding, in the same units?"
    )


@step5
def test_output_row_shift_too_far(lab):
    # 2**9 is past 448: the largest weight is cut to 448, and no NaN says so.
    fmt = format_of(lab, E4M3)
    for shift in (8, 9, 12):
        p = np.exp(FAR) * 2.0**shift
        want = (nearest(p, E4M3) * FAR_V).sum() / p.sum()
        got = float(lab.output_row(FAR, FAR_V, fmt, shift))
        assert got == pytest.approx(want, abs=1e-12), f"shift {shift}: want {want}, got {got}"
    assert abs(float(lab.output_row([0.0, 0.0], [1.0, 1.0], fmt, 9)) - 0.875) < 1e-12
    assert np.isinf(lab.output_row([0.0, 0.0], [1.0, 1.0], format_of(lab, E5M2), 16))


@step5
def test_output_row(lab):
    cases = ((1, 4, 0), (37, 1, 0), (37, 8, 8), (50, 3, -2), (8, 8, 0))
    for fmt, (n, width, shift) in itertools.product((BF16, E5M2, E4M3), cases):
        s, v = normal(n) * 3, normal(n, width)
        p = np.exp(s - s.max())
        want = nearest(p * 2.0**shift, fmt) @ v / (2.0**shift * p.sum())
        got = lab.output_row(s, v, format_of(lab, fmt), shift)
        check(f"output_row in {name_of(fmt)}, shift {shift}", got, want, tolerance=1e-12)
        assert np.ndim(lab.output_row(s, v[:, 0], format_of(lab, fmt), shift)) == 0


@step5
def test_output_row_masked_and_broken(lab):
    fmt = format_of(lab, FP32)
    got = float(lab.output_row([0.0, -INF], [1.0, 1e30], fmt))
    assert got == 1, f"a score of -inf weighs 0, whatever its v: want 1, got {got}"
    for s, v in (
        ([0.0, NAN], [1.0, 2.0]),
        ([0.0, 1.0], [1.0, NAN]),
        ([-INF, -INF], [1.0, 2.0]),
        ([0.0, INF], [1.0, 2.0]),
    ):
        got = float(lab.output_row(s, v, fmt))
        assert np.isnan(got), f"s = {s}, v = {v}: want NaN, nothing is hidden; got {got}"


@step5
def test_output_row_properties(lab):
    fmt = format_of(lab, FP16)
    s, v = normal(20), normal(20, 4)
    once = np.asarray(lab.output_row(s, v, fmt))
    order = torch.randperm(20).numpy()
    check("keys in another order", lab.output_row(s[order], v[order], fmt), once, tolerance=1e-12)
    far = lab.output_row(s + 1000, v, fmt)
    check("scores plus 1000", far, once, note="subtract the maximum", tolerance=2e-3)
    copies = [s.copy(), v.copy()]
    lab.output_row(s, v, fmt)
    assert (s == copies[0]).all(), "output_row changes s"
    assert (v == copies[1]).all(), "output_row changes v"


@step5
def test_output_row_rejects(lab):
    fmt = format_of(lab, E4M3)
    lab.output_row(np.ones(2), np.ones(2), fmt)
    bad = [(1.0, 1.0), (np.ones(0), np.ones(0)), (np.ones((2, 2)), np.ones(2))]
    for s, v in [*bad, (np.ones(2), np.ones(3)), (np.ones(2), np.ones((3, 2)))]:
        with pytest.raises(ValueError, match="got shapes"):
            lab.output_row(s, v, fmt)
