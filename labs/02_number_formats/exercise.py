"""Lab 02, your file: what bits do to attention.

Write the nine places marked TODO, in order; everything else is given. The handout, README.md beside
this file, leads through them. See where you stand with: pytest labs/02_number_formats

Step 1 rounds to any format, step 2 measures in units of the last place, step 3 adds up in narrow
accumulators, step 4 is softmax in a format, step 5 prepares numbers for FP8. All of it is NumPy:
each function computes in float64, and rounds where the hardware would.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """A binary floating-point format: a sign, exponent bits and mantissa bits.

    `has_inf` is True where the largest exponent is set aside for infinities and NaN, as IEEE 754
    does. Where it is False there is no infinity: the largest exponent holds numbers too, and only
    its last mantissa is NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    has_inf: bool = True


FP32 = Format(8, 23)
TF32 = Format(8, 10)
FP16 = Format(5, 10)
BF16 = Format(8, 7)
E5M2 = Format(5, 2)
E4M3 = Format(4, 3, has_inf=False)  # torch.float8_e4m3fn


def _check_bits(exponent_bits, mantissa_bits):
    for name, bits, low, high in (
        ("exponent_bits", exponent_bits, 2, 8),
        ("mantissa_bits", mantissa_bits, 1, 23),
    ):
        if not isinstance(bits, int) or not low <= bits <= high:
            raise ValueError(f"{name} must be a whole number from {low} to {high}: got {bits!r}")


def _check_row(name, x):
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"{name} must be (..., N) with N from 1 up: got shape {x.shape}")


# ---------------------------------------------------------------- step 1
def format_limits(exponent_bits, mantissa_bits, has_inf=True):
    """The largest number of a format, its smallest normal one, and its smallest one above 0.

    Args:
        exponent_bits: from 2 to 8.
        mantissa_bits: from 1 to 23, the leading 1 not counted.
        has_inf: see Format.

    Returns:
        (largest, smallest_normal, smallest_subnormal), three floats.

    Raises:
        ValueError: exponent_bits or mantissa_bits out of range.
    """
    _check_bits(exponent_bits, mantissa_bits)
    # TODO step 1 (about 6 lines; handout section 2)
    #   the bias; the largest exponent and the largest mantissa, with and without infinity
    raise NotImplementedError("lab 02 step 1: write format_limits")


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    """The nearest number of a format; of two equally near ones the one with an even mantissa.

    Rounded once, in float64 or in integers: no half-precision type of NumPy or torch is used.
    Whole arrays at a time: no Python loop over elements, nor one in disguise (map, tolist,
    np.vectorize, np.frompyfunc). IEEE 754-2019, section 4.3.1 (roundTiesToEven) and 7.4
    (overflow); Micikevicius et al., "FP8 formats for deep learning" (2022), section 3, for formats
    without infinity.

    Args:
        x: number or array of any shape, read as float64.
        exponent_bits, mantissa_bits, has_inf: the format, see format_limits.

    Returns:
        New float64 array of the shape of x. The sign is kept, also of 0. Subnormal numbers are
        numbers like others. What rounds past the largest number becomes +-infinity; in a format
        without infinity, +-the largest number, as does infinity itself. NaN stays NaN.

    Raises:
        ValueError: exponent_bits or mantissa_bits out of range.
    """
    _check_bits(exponent_bits, mantissa_bits)
    x = np.asarray(x, dtype=np.float64)
    # TODO step 1, second half (about 7 lines; handout section 2)
    #   the exponent of x, not below that of the smallest normal number; from it the spacing there
    #   x in units of the spacing, to the nearest whole number, and back; then overflow
    #   mind: -0, infinities, NaN, and numbers that round up into the next exponent
    raise NotImplementedError("lab 02 step 1: write round_to_format")


# ---------------------------------------------------------------- step 2
def ulp(x, fmt):
    """The unit in the last place at x: how far apart the numbers of a format lie there.

    With e the exponent of x, 2**e <= |x| < 2**(e + 1), it is 2**(e - mantissa_bits), where e is
    kept between the exponents of the format's smallest normal and largest number. So at a power of
    two it is the gap to the next larger number, at 0 the smallest subnormal number. Muller et al.,
    "Handbook of floating-point arithmetic", section 2.3.2.

    Args:
        x: number or array of any shape, read as float64; need not be a number of the format.
        fmt: a Format.

    Returns:
        float64 array of the shape of x; NaN where x is NaN or infinite.
    """
    x = np.asarray(x, dtype=np.float64)
    # TODO step 2 (about 3 lines; handout section 3)
    #   the exponent of x, held between two limits; the spacing there; NaN where x is not finite
    raise NotImplementedError("lab 02 step 2: write ulp")


# ---------------------------------------------------------------- step 3
def running_sum(terms, fmt):
    """Partial sums from left to right in an accumulator of a format.

    The accumulator starts at +0.0; after each addition, done in float64, it is rounded to the
    format. The terms are not rounded. One Python loop, along the last axis.

    Args:
        terms: (..., N) array, read as float64; the leading axes are sums of their own.
        fmt: the Format of the accumulator.

    Returns:
        (..., N) float64, a new array: the accumulator after 1, 2, ... N terms. inf - inf is NaN.

    Raises:
        ValueError: N is 0, or there is no axis.
    """
    terms = np.asarray(terms, dtype=np.float64)
    _check_row("terms", terms)
    # TODO step 3 (about 6 lines; handout section 4)
    #   one loop along the last axis: add, round, keep
    raise NotImplementedError("lab 02 step 3: write running_sum")


def dot_error(a, b, inputs, accumulator):
    """How the error of a dot product grows with its length.

    As on a tensor core: a and b are rounded to `inputs`, their products are exact (float64), and
    the products are added from left to right in `accumulator`. The error is measured against the
    products of a and b as given, in float64. Higham, "Accuracy and stability of numerical
    algorithms", section 3.1.

    Args:
        a, b: (..., N) arrays of one shape, read as float64; leading axes are separate products.
        inputs: the Format that a and b are rounded to.
        accumulator: the Format of the sum.

    Returns:
        (..., N) float64: |sum - exact sum| after 1, 2, ... N terms, divided by the sum of |a b| of
        these terms; 0 where that sum is 0 (an error of 0 / 0). NaN and infinity are not hidden: an
        infinite sum has an infinite error, or NaN where the exact sum is infinite as well.

    Raises:
        ValueError: a and b have different shapes, N is 0, or there is no axis.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a and b must have one shape: got {a.shape} and {b.shape}")
    _check_row("a", a)
    # TODO step 3, second half (about 4 lines; handout section 4)
    #   products of rounded inputs, running_sum; the exact sums; the sums of |a b|
    #   mind: 0 / 0 is 0 here, and NaN stays NaN
    raise NotImplementedError("lab 02 step 3: write dot_error")


# ---------------------------------------------------------------- step 4
def exp_range(fmt):
    """Where exp(x) fits into a format: neither 0 nor past the largest number.

    Args:
        fmt: a Format.

    Returns:
        (low, high), two floats. Below low exp(x) rounds to 0. Above high it is too large: it lies
        more than half an ulp past the largest number, and overflows (e4m3: saturates). Between them
        it rounds to a number above 0.
    """
    # TODO step 4 (about 2 lines; handout section 5)
    #   which numbers still round to the smallest and to the largest? the logarithms of their bounds
    raise NotImplementedError("lab 02 step 4: write exp_range")


def softmax(x, fmt, accumulator=FP32, safe=True):
    """Softmax over the last axis, every result rounded as hardware of that format would.

    In this order, each operation in float64 and rounded once: x to fmt; if safe, x minus its
    maximum to fmt; exp to fmt; the sum with running_sum in accumulator; the quotients to fmt.

    Args:
        x: (..., N) scores, read as float64.
        fmt: the Format of the scores, of the exponentials and of the result.
        accumulator: the Format of the sum.
        safe: whether the maximum of each row is subtracted first.

    Returns:
        (..., N) float64, numbers of fmt. A score of -inf gets 0. In a format with infinities a safe
        row that is all -inf, or that holds NaN or +inf, is NaN as in torch.softmax. An unsafe row
        is NaN where exp overflows, and all NaN where every exp is 0. In a format without infinity
        -inf is rounded to -largest like any score: a row of nothing else is safely 1 / N each.

    Raises:
        ValueError: N is 0, or there is no axis.
    """
    x = np.asarray(x, dtype=np.float64)
    _check_row("x", x)
    # TODO step 4, second half (about 7 lines; handout section 5)
    #   the five operations of the docstring, each rounded once
    #   np.errstate(all="ignore") keeps NumPy quiet about inf - inf and 0 / 0
    raise NotImplementedError("lab 02 step 4: write softmax")


# ---------------------------------------------------------------- step 5
def quantize_rows(x, fmt):
    """Numbers of a narrow format and a scale for each row: x is about q * scale.

    The scale takes the largest |x| of its row to the largest number of the format.

    Args:
        x: (R, C) array, R and C from 1 up, read as float64.
        fmt: a Format, usually E4M3.

    Returns:
        q: (R, C) float64, numbers of fmt: x / scale, rounded.
        scale: (R, 1) float64: largest |x| of the row / largest number of fmt; 1 for a row of
            zeros. Where x is NaN or infinite, q * scale is not finite: nothing is hidden. Other
            rows do not notice.

    Raises:
        ValueError: x is not (R, C), or is empty.
    """
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 2 or x.size == 0:
        raise ValueError(f"x must be (R, C) with R and C from 1 up: got shape {x.shape}")
    # TODO step 5 (about 4 lines; handout section 6)
    #   the largest |x| of each row, the scale, the rounded quotients
    #   mind: a row of zeros
    raise NotImplementedError("lab 02 step 5: write quantize_rows")


def output_row(s, v, fmt, shift=0):
    """One row of attention's output when P is rounded to a narrow format before it meets V.

    With p = exp(s - max s): the sum of round(2**shift * p) * v, divided by 2**shift times the sum
    of p. The denominator adds p as it was before rounding; everything but the rounding is float64.
    Shah et al., "FlashAttention-3" (2024), section 3.3, for P in FP8; the shift is that of
    flash-attention's pull request 2109.

    Args:
        s: (N,) scaled scores.
        v: (N,) or (N, D) values.
        fmt: the Format of P.
        shift: a whole number; 2**shift is the largest entry of P.

    Returns:
        float64, a number or (D,). A score of -inf weighs 0. NaN in s or v, a score of +inf, or
        nothing but -inf gives NaN: nothing is hidden.

    Raises:
        ValueError: s is not (N,) with N from 1 up, or v has not N rows.
    """
    s, v = np.asarray(s, dtype=np.float64), np.asarray(v, dtype=np.float64)
    if s.ndim != 1 or s.size == 0 or v.ndim not in (1, 2) or len(v) != len(s):
        raise ValueError(f"s must be (N,), v (N,) or (N, D): got shapes {s.shape} and {v.shape}")
    # TODO step 5, second half (about 2 lines; handout section 6)
    #   p; the numerator with p shifted and rounded; the denominator with p as it is
    raise NotImplementedError("lab 02 step 5: write output_row")
