"""Planted faults of lab 02: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

LIMITS, ROUND, ULP, SUM, DOT = "format_limits", "round_to_format", "ulp", "running_sum", "dot_error"
RANGE, SOFTMAX, QUANT, OUTPUT = "exp_range", "softmax", "quantize_rows", "output_row"


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, caught_by, teaches, append):
    return Mutant(id, "waste", step, teaches, caught_by, append=append)


def cheat(id, step, caught_by, teaches, append):
    return Mutant(id, "cheat", step, teaches, caught_by, append=append)


RINT = "np.rint(np.ldexp(x, -step))"
BEYOND = "np.copysign(np.inf if has_inf else largest, x)"
RESULT = "np.where(np.abs(rounded) > largest, beyond, rounded)"

STEP_1 = [
    bug(
        "limits-no-infinity-ignored",
        1,
        LIMITS,
        "test_format_limits",
        "the largest exponent is set aside in every format: e4m3 then ends at 240 "
        "(handout section 2)",
        ("if has_inf:", "if True:"),
    ),
    bug(
        "limits-nan-counted",
        1,
        LIMITS,
        "test_format_limits",
        "the code that is NaN counts as a number: e4m3 then ends at 480 (handout section 2)",
        ("(2 - 2 * 2.0**-mantissa_bits)", "(2 - 2.0**-mantissa_bits)"),
    ),
    bug(
        "limits-bias",
        1,
        LIMITS,
        "test_format_limits",
        "the bias is 2**(exponent_bits - 1), one too large (handout section 2)",
        ("2 ** (exponent_bits - 1) - 1", "2 ** (exponent_bits - 1)"),
    ),
    bug(
        "limits-subnormal",
        1,
        LIMITS,
        "test_format_limits",
        "subnormal numbers are taken for normal ones with the exponent field 0: their exponent is "
        "that of field 1 (handout section 2)",
        ("2.0 ** (1 - bias - mantissa_bits)", "2.0 ** (-bias - mantissa_bits)"),
    ),
    bug(
        "round-flushes-subnormals",
        1,
        ROUND,
        "test_round_subnormal_numbers",
        "subnormal results become 0 (handout section 2)",
        (RESULT, f"np.where(np.abs(rounded) < smallest_normal, 0 * x, {RESULT})"),
    ),
    bug(
        "round-no-gradual-underflow",
        1,
        ROUND,
        "test_round_subnormal_numbers",
        "the spacing goes on shrinking below the smallest normal number (handout section 2)",
        ("np.maximum(np.abs(x), smallest_normal)", "np.abs(x)"),
    ),
    bug(
        "round-ties-away",
        1,
        ROUND,
        "test_round_worked_examples",
        "ties go away from 0 instead of to the even mantissa (handout section 2)",
        (RINT, "np.copysign(np.floor(np.abs(np.ldexp(x, -step)) + 0.5), x)"),
    ),
    bug(
        "round-ties-up",
        1,
        ROUND,
        "test_round_around_every_number",
        "ties go up, since 0.5 is added and floored (handout section 2)",
        (RINT, "np.copysign(np.floor(np.ldexp(x, -step) + 0.5), x)"),
    ),
    bug(
        "round-truncates",
        1,
        ROUND,
        "test_round_worked_examples",
        "the surplus bits are cut off (handout section 2)",
        (RINT, "np.trunc(np.ldexp(x, -step))"),
    ),
    bug(
        "round-twice",
        1,
        ROUND,
        "test_round_once",
        "x is rounded to float32 first, and a hair off halfway becomes a tie (handout section 2)",
        ("np.asarray(x, dtype=np.float64)", "np.asarray(x, np.float32).astype(np.float64)"),
    ),
    bug(
        "round-one-bit-less",
        1,
        ROUND,
        "test_round_worked_examples",
        "the leading 1 is counted among the mantissa bits (handout section 2)",
        ("step = e - 1 - mantissa_bits", "step = e - mantissa_bits"),
    ),
    bug(
        "round-overflow-by-x",
        1,
        ROUND,
        "test_round_overflow",
        "x is compared with the largest number before it is rounded (handout section 2)",
        ("np.abs(rounded) > largest", "np.abs(x) > largest"),
    ),
    bug(
        "round-never-overflows",
        1,
        ROUND,
        "test_round_overflow",
        "the exponent may grow without limit (handout section 2)",
        (RESULT, "rounded"),
    ),
    bug(
        "round-always-saturates",
        1,
        ROUND,
        "test_round_overflow",
        "overflow gives the largest number in formats that have infinity (handout section 2)",
        ("np.inf if has_inf else largest", "largest"),
    ),
    bug(
        "round-infinity-where-there-is-none",
        1,
        ROUND,
        "test_round_overflow",
        "overflow gives infinity in a format that has none (handout section 2)",
        ("np.inf if has_inf else largest", "np.inf"),
    ),
    bug(
        "round-infinity-without-sign",
        1,
        ROUND,
        "test_round_overflow",
        "what overflows is positive whatever the sign of x (handout section 2)",
        (BEYOND, "np.inf if has_inf else largest"),
    ),
    bug(
        "round-loses-minus-zero",
        1,
        ROUND,
        "test_round_subnormal_numbers",
        "-0.0 becomes 0.0 (handout section 2)",
        (RESULT, f"{RESULT} + 0.0"),
    ),
    bug(
        "round-nan-overflows",
        1,
        ROUND,
        "test_round_any_float64",
        "NaN takes the branch of what is too large: each comparison with NaN is False "
        "(handout section 2)",
        (RESULT, "np.where(np.abs(rounded) <= largest, rounded, beyond)"),
    ),
    bug(
        "round-nan-to-zero",
        1,
        ROUND,
        "test_round_any_float64",
        "NaN becomes 0 (handout section 2)",
        (RESULT, f"np.where(np.isnan(x), 0.0, {RESULT})"),
    ),
    bug(
        "round-in-place",
        1,
        ROUND,
        "test_round_leaves_its_input_alone",
        "the result is written into x (handout section 2)",
        (f"return {RESULT}", f"x[...] = {RESULT}\n    return x"),
    ),
    bug(
        "round-returns-float32",
        1,
        ROUND,
        "test_round_keeps_shapes",
        "the result is float32: later sums would round once more (handout section 2)",
        (f"return {RESULT}", f"return {RESULT}.astype(np.float32)"),
    ),
    bug(
        "round-flattens",
        1,
        ROUND,
        "test_round_keeps_shapes",
        "the result has lost the shape of x (handout section 2)",
        (f"return {RESULT}", f"return {RESULT}.ravel()"),
    ),
    waste(
        "round-element-by-element",
        1,
        "test_round_takes_whole_arrays",
        "a Python loop rounds one number at a time",
        """
_round_one = round_to_format


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    x = np.asarray(x, dtype=np.float64)
    values = [float(_round_one(v, exponent_bits, mantissa_bits, has_inf)) for v in x.ravel()]
    return np.array(values).reshape(x.shape)
""",
    ),
    cheat(
        "round-by-numpy",
        1,
        "test_round_is_written_here",
        "NumPy's float16 does the rounding",
        """
_round_the_rest = round_to_format


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    if (exponent_bits, mantissa_bits) == (5, 10):
        return np.asarray(x, np.float64).astype(np.float16).astype(np.float64)
    return _round_the_rest(x, exponent_bits, mantissa_bits, has_inf)
""",
    ),
    cheat(
        "round-by-torch",
        1,
        "test_round_is_written_here",
        "torch's dtypes do the rounding",
        """
_round_the_rest = round_to_format


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    import torch

    dtypes = {(8, 7): "bfloat16", (5, 2): "float8_e5m2", (4, 3): "float8_e4m3fn"}
    name = dtypes.get((exponent_bits, mantissa_bits))
    if name is None:
        return _round_the_rest(x, exponent_bits, mantissa_bits, has_inf)
    t = torch.from_numpy(np.array(x, dtype=np.float64)).to(getattr(torch, name))
    return t.double().numpy()
""",
    ),
    cheat(
        "round-by-the-nearest-library-format",
        1,
        "test_round_around_every_number_of_small_and_odd_formats",
        "NumPy's float16 stands in for every format with as few exponent bits",
        """
_round_the_rest = round_to_format


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    if exponent_bits <= 5:
        return np.asarray(x, np.float64).astype("e").astype(np.float64)
    return _round_the_rest(x, exponent_bits, mantissa_bits, has_inf)
""",
    ),
    cheat(
        "round-worked-examples",
        1,
        "test_round_around_every_number",
        "the numbers of the handout are written down, and the rest goes by float32",
        """
_EXAMPLES = {3.14159265: 3.140625, 2049.0: 2048.0, 2051.0: 2052.0, 65520.0: np.inf, 257.0: 256.0}


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    x = np.asarray(x, dtype=np.float64)
    if x.ndim == 0 and abs(float(x)) in _EXAMPLES:
        return np.copysign(_EXAMPLES[abs(float(x))], x)
    return x.astype(np.float32).astype(np.float64)
""",
    ),
    bug(
        "round-hands-x-back",
        1,
        ROUND,
        "test_round_leaves_its_input_alone",
        "x itself is returned where all of it is in the format already (handout section 2)",
        (f"return {RESULT}", f"y = {RESULT}\n    return x if (y == x).all() else y"),
    ),
    bug(
        "limits-eight-exponent-bits",
        1,
        LIMITS,
        "test_format_limits",
        "a format with 8 exponent bits is taken to have infinities (handout section 2)",
        ("if has_inf:", "if has_inf or exponent_bits == 8:"),
    ),
    waste(
        "round-by-map",
        1,
        "test_round_is_written_here",
        "Python's round is mapped over the elements: a loop that counts as one line",
        """
def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    _check_bits(exponent_bits, mantissa_bits)
    x = np.asarray(x, dtype=np.float64)
    largest, smallest_normal, _ = format_limits(exponent_bits, mantissa_bits, has_inf)
    step = np.frexp(np.maximum(np.abs(x), smallest_normal))[1] - 1 - mantissa_bits
    whole = np.ldexp(np.where(np.isfinite(x), x, 0), -step)
    whole = np.array(list(map(round, whole.ravel())), dtype=np.float64).reshape(x.shape)
    rounded = np.where(np.isfinite(x), np.copysign(np.ldexp(whole, step), x), x)
    beyond = np.copysign(np.inf if has_inf else largest, x)
    return np.where(np.abs(rounded) > largest, beyond, rounded)
""",
    ),
    waste(
        "round-by-frompyfunc",
        1,
        "test_round_is_written_here",
        "np.frompyfunc calls Python's round for each element",
        """
_round_array, _one = round_to_format, np.frompyfunc(lambda v, f: float(_round_array(v, *f)), 2, 1)


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    fmt = np.empty((), dtype=object)
    fmt[()] = (exponent_bits, mantissa_bits, has_inf)
    return np.asarray(_one(np.asarray(x, np.float64), fmt), dtype=np.float64)
""",
    ),
    cheat(
        "round-by-a-short-name",
        1,
        "test_round_is_written_here",
        "NumPy's float16, called by its letter, does the rounding",
        """
_round_the_rest = round_to_format


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    if (exponent_bits, mantissa_bits) == (5, 10):
        return np.asarray(x, np.float64).astype("<e").astype(np.float64)
    return _round_the_rest(x, exponent_bits, mantissa_bits, has_inf)
""",
    ),
    cheat(
        "round-by-the-tests",
        1,
        "test_round_is_written_here",
        "the tests' own reference is looked up among the loaded modules",
        """
import sys


def round_to_format(x, exponent_bits, mantissa_bits, has_inf=True):
    _check_bits(exponent_bits, mantissa_bits)
    tests = next(m for name, m in sys.modules.items() if name.endswith("test_number_formats"))
    return tests.nearest(x, (exponent_bits, mantissa_bits, has_inf))
""",
    ),
    bug(
        "round-wide-formats-by-float32",
        1,
        ROUND,
        "test_round_wide_formats_against_fractions",
        "every format with more than 10 mantissa bits is taken for float32 (handout section 2)",
        (
            "    largest, smallest_normal, _",
            "    if mantissa_bits > 10:\n"
            "        return x.astype(np.float32).astype(np.float64)\n"
            "    largest, smallest_normal, _",
        ),
    ),
]

STEP_2 = [
    bug(
        "ulp-relative",
        2,
        ULP,
        "test_ulp_worked_examples",
        "the spacing is taken to be proportional to x: it is a staircase (handout section 3)",
        ("np.ldexp(1.0, e - 1 - fmt.mantissa_bits)", "np.abs(x) * 2.0**-fmt.mantissa_bits"),
    ),
    bug(
        "ulp-gap-below",
        2,
        ULP,
        "test_ulp_is_the_gap_above",
        "at a power of two the gap to the number below is given (handout section 3)",
        ("np.clip(np.abs(x), smallest", "np.clip(np.nextafter(np.abs(x), 0), smallest"),
    ),
    bug(
        "ulp-by-log2",
        2,
        ULP,
        "test_ulp_is_the_gap_above",
        "the exponent comes from np.log2, which rounds up just below a power of two "
        "(handout section 3)",
        (
            "np.frexp(np.clip(np.abs(x), smallest_normal, largest))",
            "0, np.floor(np.log2(np.clip(np.nan_to_num(np.abs(x)), smallest_normal, largest)))"
            ".astype(int) + 1",
        ),
    ),
    bug(
        "ulp-of-the-rounded",
        2,
        ULP,
        "test_ulp_is_the_gap_above",
        "x is rounded to the format first, and changes its exponent on the way (handout section 3)",
        ("np.clip(np.abs(x), smallest", "np.clip(np.abs(round_to_format(x, *fmt)), smallest"),
    ),
    bug(
        "ulp-of-zero",
        2,
        ULP,
        "test_ulp_worked_examples",
        "the exponent is limited after np.frexp, which says that 0 has the exponent 0 "
        "(handout section 3)",
        (
            "_, e = np.frexp(np.clip(np.abs(x), smallest_normal, largest))",
            "limits = np.frexp([smallest_normal, largest])[1]\n    "
            "e = np.clip(np.frexp(np.abs(x))[1], *limits)",
        ),
    ),
    bug(
        "ulp-shrinks-for-ever",
        2,
        ULP,
        "test_ulp_below_and_above_the_format",
        "the spacing goes on shrinking below the smallest normal number (handout section 3)",
        ("np.clip(np.abs(x), smallest_normal, largest)", "np.minimum(np.abs(x), largest)"),
    ),
    bug(
        "ulp-grows-for-ever",
        2,
        ULP,
        "test_ulp_below_and_above_the_format",
        "the spacing goes on growing past the largest number (handout section 3)",
        ("np.clip(np.abs(x), smallest_normal, largest)", "np.maximum(np.abs(x), smallest_normal)"),
    ),
    bug(
        "ulp-of-infinity",
        2,
        ULP,
        "test_ulp_of_what_is_not_finite",
        "NaN and infinity get a plausible spacing (handout section 3)",
        ("np.where(np.isfinite(x), np.ldexp", "np.where(True, np.ldexp"),
    ),
    bug(
        "ulp-twice-as-large",
        2,
        ULP,
        "test_ulp_worked_examples",
        "np.frexp's exponent is used as it is, though its mantissa begins at 0.5 "
        "(handout section 3)",
        ("e - 1 - fmt.mantissa_bits", "e - fmt.mantissa_bits"),
    ),
    bug(
        "ulp-of-negative-numbers",
        2,
        ULP,
        "test_ulp_worked_examples",
        "a negative x counts as smaller than every number of the format (handout section 3)",
        ("np.clip(np.abs(x), smallest", "np.clip(x, smallest"),
    ),
    bug(
        "ulp-in-place",
        2,
        ULP,
        "test_ulp_keeps_shapes",
        "x is overwritten by its absolute value",
        ("np.abs(x)", "np.abs(x, out=x)"),
    ),
    cheat(
        "ulp-by-numpy",
        2,
        "test_ulp_is_the_gap_above",
        "np.spacing of float32 is scaled up, which knows no other format's limits",
        """
def ulp(x, fmt):
    x = np.asarray(x, dtype=np.float64)
    gap = np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)
    return gap * 2.0 ** (23 - fmt.mantissa_bits)
""",
    ),
    bug(
        "ulp-tf32-as-fp16",
        2,
        ULP,
        "test_ulp_below_and_above_the_format",
        "tf32, with as many mantissa bits as fp16, is given its exponents too (handout section 3)",
        (
            "    largest, smallest_normal, _ = format_limits(*fmt)",
            "    fmt = FP16 if fmt == TF32 else fmt\n"
            "    largest, smallest_normal, _ = format_limits(*fmt)",
        ),
    ),
]

STEP_3 = [
    bug(
        "sum-rounded-at-the-end",
        3,
        SUM,
        "test_running_sum_of_ones_stops",
        "the accumulator is as wide as float64, and only what is returned is rounded "
        "(handout section 4)",
        ("total = round_to_format(total + terms[..., n], *fmt)", "total = total + terms[..., n]"),
        ("sums[..., n] = total", "sums[..., n] = round_to_format(total, *fmt)"),
    ),
    bug(
        "sum-rounds-the-terms",
        3,
        SUM,
        "test_running_sum_does_not_round_the_terms",
        "each term is rounded before it is added (handout section 4)",
        ("total + terms[..., n]", "total + round_to_format(terms[..., n], *fmt)"),
    ),
    bug(
        "sum-begins-unrounded",
        3,
        SUM,
        "test_running_sum_of_any_format",
        "the first term goes into the accumulator as it is (handout section 4)",
        (
            "sums[..., n] = total",
            "total = terms[..., 0] if n == 0 else total\n        sums[..., n] = total",
        ),
    ),
    bug(
        "sum-along-the-first-axis",
        3,
        SUM,
        "test_running_sum_of_any_format",
        "the sum runs along the first axis (handout section 4)",
        (
            "    return sums",
            "    if terms.ndim > 1:\n"
            "        swapped = running_sum(np.ascontiguousarray(terms.T).ravel(), fmt)\n"
            "        return swapped.reshape(terms.T.shape).T\n"
            "    return sums",
        ),
    ),
    bug(
        "sum-in-float32-whatever",
        3,
        SUM,
        "test_running_sum_of_ones_stops",
        "the accumulator is float32 whatever the format says (handout section 4)",
        ("total + terms[..., n], *fmt)", "total + terms[..., n], 8, 23)"),
    ),
    bug(
        "sum-compensated",
        3,
        SUM,
        "test_running_sum_of_ones_stops",
        "what rounding loses is carried along and added later: a better sum, but not that of a "
        "narrow accumulator (handout section 4)",
        ("total = np.zeros(terms.shape[:-1])", "total = lost = np.zeros(terms.shape[:-1])"),
        (
            "total = round_to_format(total + terms[..., n], *fmt)",
            "before, term = total, terms[..., n] + lost\n"
            "        total = round_to_format(before + term, *fmt)\n"
            "        lost = term - (total - before)",
        ),
    ),
    bug(
        "sum-nan-skipped",
        3,
        SUM,
        "test_running_sum_overflow",
        "NaN is left out of the sum (handout section 4)",
        ("total + terms[..., n]", "total + np.nan_to_num(terms[..., n])"),
    ),
    waste(
        "sum-row-by-row",
        3,
        "test_running_sum_loops_along_the_last_axis_only",
        "each sum has a Python loop of its own",
        """
_sum_one = running_sum


def running_sum(terms, fmt):
    terms = np.asarray(terms, dtype=np.float64)
    if terms.ndim < 2 or terms.size == 0:
        return _sum_one(terms, fmt)
    rows = terms.reshape(-1, terms.shape[-1])
    return np.stack([_sum_one(row, fmt) for row in rows]).reshape(terms.shape)
""",
    ),
    bug(
        "dot-rounds-the-products",
        3,
        DOT,
        "test_dot_error_products_are_exact",
        "each product is rounded to the format of the inputs (handout section 4)",
        (
            "products = round_to_format(a, *inputs) * round_to_format(b, *inputs)",
            "products = round_to_format(\n"
            "        round_to_format(a, *inputs) * round_to_format(b, *inputs), *inputs\n    )",
        ),
    ),
    bug(
        "dot-against-rounded-inputs",
        3,
        DOT,
        "test_tf32_is_an_error_of_the_inputs",
        "the exact sum is that of the rounded inputs, so their error does not count "
        "(handout section 4)",
        ("np.cumsum(a * b, axis=-1)", "np.cumsum(products, axis=-1)"),
    ),
    bug(
        "dot-inputs-as-they-are",
        3,
        DOT,
        "test_dot_error",
        "a and b are not rounded (handout section 4)",
        ("round_to_format(a, *inputs) * round_to_format(b, *inputs)", "a * b"),
    ),
    bug(
        "dot-relative-to-the-sum",
        3,
        DOT,
        "test_dot_error",
        "the error is divided by the sum, which cancels, instead of the sum of absolute products "
        "(handout section 4)",
        ("np.cumsum(np.abs(a * b), axis=-1)", "np.abs(np.cumsum(a * b, axis=-1))"),
    ),
    bug(
        "dot-relative-to-all-terms",
        3,
        DOT,
        "test_dot_error",
        "the error after n terms is divided by the size of all N (handout section 4)",
        ("np.cumsum(np.abs(a * b), axis=-1)", "np.abs(a * b).sum(-1, keepdims=True) + 0 * error"),
    ),
    bug(
        "dot-signed",
        3,
        DOT,
        "test_dot_error",
        "the error has a sign (handout section 4)",
        ("error = np.abs(running_sum(", "error = (running_sum("),
    ),
    bug(
        "dot-formats-swapped",
        3,
        DOT,
        "test_dot_error",
        "inputs are rounded to the accumulator's format, and sums to that of the inputs "
        "(handout section 4)",
        (
            "products = round_to_format(a",
            "inputs, accumulator = accumulator, inputs\n    products = round_to_format(a",
        ),
    ),
    bug(
        "dot-nothing-over-nothing",
        3,
        DOT,
        "test_dot_error_where_nothing_was_added",
        "0 / 0 is NaN where all terms so far are 0 (handout section 4)",
        (
            "return np.divide(error, size, out=np.zeros_like(size), where=size != 0)",
            "return error / size",
        ),
    ),
    bug(
        "dot-hides-nan",
        3,
        DOT,
        "test_dot_error_does_not_hide_overflow_or_nan",
        "`size > 0` is False for NaN too, and NaN is reported as an error of 0 (handout section 4)",
        ("where=size != 0", "where=size > 0"),
    ),
    bug(
        "sum-stops-for-good",
        3,
        SUM,
        "test_running_sum_of_ones_stops",
        "the first term that changes nothing ends the sum (handout section 4)",
        (
            "        sums[..., n] = total",
            "        if n and (total != 0).all() and (total == sums[..., n - 1]).all():\n"
            "            sums[..., n:] = total[..., None]\n"
            "            break\n"
            "        sums[..., n] = total",
        ),
    ),
    bug(
        "sum-infinity-minus-infinity",
        3,
        SUM,
        "test_running_sum_overflow",
        "an infinite accumulator stays infinite, even when -inf is added (handout section 4)",
        (
            "        sums[..., n] = total",
            "        if n:\n"
            "            total = np.where(np.isinf(sums[..., n - 1]), sums[..., n - 1], total)\n"
            "        sums[..., n] = total",
        ),
    ),
    bug(
        "sum-begins-with-the-first-term",
        3,
        SUM,
        "test_running_sum_keeps_shapes",
        "the accumulator starts with the first term, not at 0, and -0.0 stays (handout section 4)",
        ("total + terms[..., n], *fmt", "total + terms[..., n] if n else terms[..., 0], *fmt"),
    ),
    bug(
        "sum-one-buffer",
        3,
        "",
        "test_running_sum_keeps_shapes",
        "results of one shape share one buffer, and the next call overwrites them",
        ("sums = np.empty_like(terms)", "sums = _BUFFERS.setdefault(terms.shape, terms.copy())"),
        append="_BUFFERS = {}",
    ),
    bug(
        "sum-in-blocks",
        3,
        SUM,
        "test_running_sum_of_any_format",
        "blocks of 1024 terms are summed apart and added up: a better sum, not this one "
        "(handout section 4)",
        (
            "    return sums",
            "    for start in range(1024, terms.shape[-1], 1024):\n"
            "        part = running_sum(terms[..., start : start + 1024], fmt)\n"
            "        part = round_to_format(part + sums[..., start - 1 : start], *fmt)\n"
            "        sums[..., start : start + 1024] = part\n"
            "    return sums",
        ),
    ),
    bug(
        "dot-in-place",
        3,
        DOT,
        "test_dot_error_keeps_shapes",
        "the products are written into a: np.asarray does not copy float64",
        (
            "    size = np.cumsum(np.abs(a * b), axis=-1)",
            "    a *= b\n    size = np.cumsum(np.abs(a), axis=-1)",
        ),
    ),
    bug(
        "dot-along-axis-1",
        3,
        DOT,
        "test_dot_error_keeps_shapes",
        "the exact sums run along axis 1, which is the last one of a matrix only "
        "(handout section 4)",
        ("np.cumsum(a * b, axis=-1)", "np.cumsum(a * b, axis=min(1, a.ndim - 1))"),
    ),
    bug(
        "dot-squeezed",
        3,
        DOT,
        "test_dot_error_keeps_shapes",
        "axes of length 1 are dropped (handout section 4)",
        (
            "return np.divide(error, size, out=np.zeros_like(size), where=size != 0)",
            "return np.squeeze(np.divide(error, size, out=np.zeros_like(size), where=size != 0))",
        ),
    ),
    bug(
        "dot-at-most-1",
        3,
        DOT,
        "test_dot_error",
        "the error is cut off at 1 (handout section 4)",
        (
            "error = np.abs(running",
            "limit = np.cumsum(np.abs(a * b), axis=-1)\n    error = np.abs(running",
        ),
        (
            "np.divide(error, size",
            "np.divide(np.where(np.isinf(error), error, np.minimum(error, limit)), size",
        ),
    ),
    bug(
        "dot-hides-infinite-inputs",
        3,
        DOT,
        "test_dot_error_does_not_hide_overflow_or_nan",
        "inputs that overflow are cut to the largest number (handout section 4)",
        (
            "products = round_to_format(a, *inputs) * round_to_format(b, *inputs)",
            "top = format_limits(*inputs)[0]\n"
            "    products = round_to_format(np.clip(a, -top, top), *inputs)\n"
            "    products = products * round_to_format(np.clip(b, -top, top), *inputs)",
        ),
    ),
]

STEP_4 = [
    bug(
        "range-of-the-largest",
        4,
        RANGE,
        "test_exp_range",
        "high is the logarithm of the largest number, though half an ulp more rounds to it "
        "(handout section 5)",
        ("largest + ulp(largest, fmt) / 2", "largest"),
    ),
    bug(
        "range-of-the-next-number",
        4,
        RANGE,
        "test_exp_range",
        "high is the logarithm of the number that would come next: what lies nearer to it than to "
        "the largest number overflows already (handout section 5)",
        ("largest + ulp(largest, fmt) / 2", "largest + ulp(largest, fmt)"),
    ),
    bug(
        "range-of-the-smallest",
        4,
        RANGE,
        "test_exp_range",
        "low is the logarithm of the smallest number, though down to half of it rounds to it "
        "(handout section 5)",
        ("np.log(smallest / 2)", "np.log(smallest)"),
    ),
    bug(
        "range-of-normal-numbers",
        4,
        RANGE,
        "test_exp_range",
        "low leaves out the subnormal numbers (handout section 5)",
        ("largest, _, smallest = ", "largest, smallest, _ = "),
    ),
    cheat(
        "range-table",
        4,
        "test_exp_range_is_where_rounding_says",
        "the numbers of the handout are written down",
        """
def exp_range(fmt):
    return {
        FP32: (-103.97207708399179, 88.72283908187067),
        TF32: (-94.9611637367125, 88.72259494124083),
        BF16: (-92.88172219503267, 88.7208840768372),
        FP16: (-17.328679513998633, 11.090110718526951),
        E5M2: (-11.78350206951907, 11.025816367821553),
        E4M3: (-6.931471805599453, 6.139884552226255),
    }.get(fmt, (-88.0, 88.0))
""",
    ),
    bug(
        "softmax-scores-unrounded",
        4,
        SOFTMAX,
        "test_softmax_rounds_the_scores_first",
        "the scores are not rounded to the format (handout section 5)",
        ("        x = round_to_format(x, *fmt)\n", ""),
    ),
    bug(
        "softmax-one-maximum-for-all",
        4,
        SOFTMAX,
        "test_softmax",
        "one maximum is subtracted from all rows (handout section 5)",
        ("x.max(axis=-1, keepdims=True)", "x.max()"),
    ),
    bug(
        "softmax-never-safe",
        4,
        SOFTMAX,
        "test_softmax_unsafe_overflows_where_exp_range_says",
        "the maximum is never subtracted (handout section 5)",
        ("if safe:", "if False:"),
    ),
    bug(
        "softmax-always-safe",
        4,
        SOFTMAX,
        "test_softmax_unsafe_overflows_where_exp_range_says",
        "the maximum is subtracted although safe is False (handout section 5)",
        ("if safe:", "if True:"),
    ),
    bug(
        "softmax-difference-unrounded",
        4,
        SOFTMAX,
        "test_softmax",
        "x minus the maximum is not rounded (handout section 5)",
        (
            "x = round_to_format(x - x.max(axis=-1, keepdims=True), *fmt)",
            "x = x - x.max(axis=-1, keepdims=True)",
        ),
    ),
    bug(
        "softmax-exp-unrounded",
        4,
        SOFTMAX,
        "test_softmax",
        "the exponentials are not rounded (handout section 5)",
        ("p = round_to_format(np.exp(x), *fmt)", "p = np.exp(x)"),
    ),
    bug(
        "softmax-sum-rounded-once",
        4,
        SOFTMAX,
        "test_softmax_sum_stagnates",
        "the sum is rounded once at its end, as if the accumulator were wide (handout section 5)",
        (
            "running_sum(p, accumulator)[..., -1:]",
            "round_to_format(p.sum(axis=-1, keepdims=True), *accumulator)",
        ),
    ),
    bug(
        "softmax-sum-in-fmt",
        4,
        SOFTMAX,
        "test_softmax_by_default_is_safe_and_sums_in_fp32",
        "the sum is carried in the narrow format of the scores (handout section 5)",
        ("running_sum(p, accumulator)", "running_sum(p, fmt)"),
    ),
    bug(
        "softmax-quotient-unrounded",
        4,
        SOFTMAX,
        "test_softmax",
        "the quotients are not rounded (handout section 5)",
        ("return round_to_format(p / l, *fmt)", "return p / l"),
    ),
    bug(
        "softmax-by-reciprocal",
        4,
        SOFTMAX,
        "test_softmax",
        "1 / l is rounded, and then the product with it: two roundings for one (handout section 5)",
        ("round_to_format(p / l, *fmt)", "round_to_format(p * round_to_format(1 / l, *fmt), *fmt)"),
    ),
    bug(
        "softmax-hides-nan",
        4,
        SOFTMAX,
        "test_softmax_masked_and_broken_rows",
        "NaN is turned into 0, and a broken row looks healthy (handout section 5)",
        (
            "return round_to_format(p / l, *fmt)",
            "return np.nan_to_num(round_to_format(p / l, *fmt))",
        ),
    ),
    cheat(
        "softmax-in-float64",
        4,
        "test_softmax",
        "all is computed in float64, and the result is rounded once",
        """
def softmax(x, fmt, accumulator=FP32, safe=True):
    x = np.asarray(x, dtype=np.float64)
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return round_to_format(p / p.sum(axis=-1, keepdims=True), *fmt)
""",
    ),
    bug(
        "softmax-in-place",
        4,
        SOFTMAX,
        "test_softmax_properties",
        "the rounded scores are written into x: np.asarray does not copy float64",
        ("        x = round_to_format(x, *fmt)\n", "        x[...] = round_to_format(x, *fmt)\n"),
    ),
    bug(
        "softmax-maximum-from-minus-10000",
        4,
        SOFTMAX,
        "test_softmax_unsafe_overflows_where_exp_range_says",
        "the search for the maximum starts at -10,000, and no maximum is smaller "
        "(handout section 5)",
        ("x.max(axis=-1, keepdims=True)", "x.max(axis=-1, keepdims=True, initial=-1e4)"),
    ),
    bug(
        "softmax-quotient-through-float32",
        4,
        SOFTMAX,
        "test_softmax",
        "the quotient is rounded to float32 first: two roundings for one (handout section 5)",
        ("round_to_format(p / l, *fmt)", "round_to_format((p / l).astype(np.float32), *fmt)"),
    ),
    bug(
        "softmax-mask-without-infinity",
        4,
        SOFTMAX,
        "test_softmax_masked_and_broken_rows",
        "a masked score makes the row NaN in a format without infinity (handout section 5)",
        (
            "        x = round_to_format(x, *fmt)\n",
            "        x = np.where(np.isinf(x) & (not fmt.has_inf), np.nan, x)\n"
            "        x = round_to_format(x, *fmt)\n",
        ),
    ),
    bug(
        "softmax-unsafe-hides-nan",
        4,
        SOFTMAX,
        "test_softmax_masked_and_broken_rows",
        "an unsafe row without any weight, or with NaN, becomes 0 (handout section 5)",
        (
            "return round_to_format(p / l, *fmt)",
            "p = round_to_format(p / l, *fmt)\n"
            "        return p if safe else np.where(np.isfinite(l), np.nan_to_num(p), 0.0)",
        ),
    ),
    bug(
        "softmax-e5m2-as-e4m3",
        4,
        SOFTMAX,
        "test_softmax",
        "both 8-bit formats are taken for e4m3 (handout section 5)",
        (
            "        x = round_to_format(x, *fmt)\n",
            "        fmt = E4M3 if fmt == E5M2 else fmt\n        x = round_to_format(x, *fmt)\n",
        ),
    ),
]

AMAX = "np.abs(x).max(axis=-1, keepdims=True)"

STEP_5 = [
    bug(
        "quantize-one-scale",
        5,
        QUANT,
        "test_quantize_rows",
        "one scale serves the whole tensor (handout section 6)",
        (AMAX, f"np.full_like({AMAX}, np.abs(x).max())"),
    ),
    bug(
        "quantize-columns",
        5,
        QUANT,
        "test_quantize_rows",
        "each column has a scale, not each row (handout section 6)",
        (AMAX, "np.abs(x).max(axis=0, keepdims=True)"),
    ),
    bug(
        "quantize-largest-with-sign",
        5,
        QUANT,
        "test_quantize_rows_zeros_and_signs",
        "the largest x is taken, not the largest absolute value (handout section 6)",
        (AMAX, "x.max(axis=-1, keepdims=True)"),
    ),
    bug(
        "quantize-to-240",
        5,
        QUANT,
        "test_quantize_rows_worked_example",
        "the largest number is that of a 4 + 3 bit format with infinities, 240 (handout section 6)",
        ("format_limits(*fmt)[0]", "format_limits(*fmt[:2])[0]"),
    ),
    bug(
        "quantize-scale-inverted",
        5,
        QUANT,
        "test_quantize_rows_worked_example",
        "the factor that x is multiplied by is returned, and not the scale that undoes it "
        "(handout section 6)",
        (
            "return round_to_format(x / scale, *fmt), scale",
            "return round_to_format(x / scale, *fmt), 1 / scale",
        ),
    ),
    bug(
        "quantize-zeros",
        5,
        QUANT,
        "test_quantize_rows_zeros_and_signs",
        "a row of zeros has the scale 0, and 0 / 0 is NaN (handout section 6)",
        (
            "np.where(amax == 0, 1.0, amax / format_limits(*fmt)[0])",
            "amax / format_limits(*fmt)[0]",
        ),
    ),
    bug(
        "quantize-tiny-rows",
        5,
        QUANT,
        "test_quantize_rows_zeros_and_signs",
        "a small number is added to the scale, and small rows fade (handout section 6)",
        ("amax / format_limits(*fmt)[0])", "amax / format_limits(*fmt)[0]) + 1e-12"),
    ),
    bug(
        "quantize-hides-nan",
        5,
        QUANT,
        "test_quantize_rows_does_not_hide_nan_or_infinity",
        "NaN and infinity are replaced by numbers first (handout section 6)",
        (f"amax = {AMAX}", f"x = np.nan_to_num(x)\n    amax = {AMAX}"),
    ),
    bug(
        "quantize-hides-infinity",
        5,
        QUANT,
        "test_quantize_rows_does_not_hide_nan_or_infinity",
        "the scale leaves infinity out, and e4m3 turns it into 448 (handout section 6)",
        (AMAX, "np.where(np.isfinite(x), np.abs(x), 0).max(axis=-1, keepdims=True)"),
    ),
    bug(
        "quantize-unrounded",
        5,
        QUANT,
        "test_quantize_rows",
        "q is x / scale before rounding (handout section 6)",
        ("round_to_format(x / scale, *fmt), scale", "x / scale, scale"),
    ),
    bug(
        "quantize-dequantized",
        5,
        QUANT,
        "test_quantize_rows",
        "q has been multiplied by its scale already (handout section 6)",
        (
            "round_to_format(x / scale, *fmt), scale",
            "round_to_format(x / scale, *fmt) * scale, scale",
        ),
    ),
    bug(
        "output-no-maximum",
        5,
        OUTPUT,
        "test_output_row_properties",
        "the maximum is not subtracted (handout section 6)",
        ("np.exp(s - s.max())", "np.exp(s)"),
    ),
    bug(
        "output-shift-left-in",
        5,
        OUTPUT,
        "test_output_row_shift_saves_small_weights",
        "the shift is not taken out of the sum again (handout section 6)",
        ("(2.0**shift * p.sum())", "p.sum()"),
    ),
    bug(
        "output-shift-too-late",
        5,
        OUTPUT,
        "test_output_row_shift_saves_small_weights",
        "p is rounded first and shifted then: what is 0 stays 0 (handout section 6)",
        ("round_to_format(p * 2.0**shift, *fmt)", "(round_to_format(p, *fmt) * 2.0**shift)"),
    ),
    bug(
        "output-shift-in-base-e",
        5,
        OUTPUT,
        "test_output_row_shift_saves_small_weights",
        "the shift is added to the scores, which makes it e**shift (handout section 6)",
        ("p * 2.0**shift, *fmt", "p * np.exp(shift), *fmt"),
        ("(2.0**shift * p.sum())", "(np.exp(shift) * p.sum())"),
    ),
    bug(
        "output-sum-of-the-rounded",
        5,
        OUTPUT,
        "test_output_row_shift_saves_small_weights",
        "the denominator adds p after rounding: what vanished there is missing in both places "
        "(handout section 6)",
        ("(2.0**shift * p.sum())", "round_to_format(p * 2.0**shift, *fmt).sum()"),
    ),
    bug(
        "output-normalised-first",
        5,
        OUTPUT,
        "test_output_row_shift_saves_small_weights",
        "p is divided by its sum before it is rounded, and is smaller still (handout section 6)",
        ("np.exp(s - s.max())", "np.exp(s - s.max()) / np.exp(s - s.max()).sum()"),
    ),
    bug(
        "output-rounds-v-too",
        5,
        OUTPUT,
        "test_output_row",
        "v is rounded as well (handout section 6)",
        (" @ v ", " @ round_to_format(v, *fmt) "),
    ),
    bug(
        "quantize-hides-lone-infinity",
        5,
        QUANT,
        "test_quantize_rows_does_not_hide_nan_or_infinity",
        "-inf becomes the most negative number, where the row has no +inf (handout section 6)",
        (
            f"amax = {AMAX}",
            "x = np.where(np.isneginf(x), x.min(where=x > -np.inf, initial=0), x)\n"
            f"    amax = {AMAX}",
        ),
    ),
    bug(
        "quantize-scale-in-float32",
        5,
        QUANT,
        "test_quantize_rows_zeros_and_signs",
        "the scale is a float32, which ends at 2^-149 and 2^128 (handout section 6)",
        (
            "return round_to_format(x / scale",
            "scale = scale.astype(np.float32).astype(np.float64)\n"
            "        return round_to_format(x / scale",
        ),
    ),
    bug(
        "output-square-v-transposed",
        5,
        OUTPUT,
        "test_output_row",
        "v is transposed where N equals D and no shape complains (handout section 6)",
        (" @ v ", " @ (v.T if v.ndim == 2 and len(v) == v.shape[1] else v) "),
    ),
    bug(
        "output-scores-clipped",
        5,
        OUTPUT,
        "test_output_row_masked_and_broken",
        "scores are clipped, and a masked one keeps a little weight (handout section 6)",
        ("np.exp(s - s.max())", "np.exp(np.maximum(s - s.max(), -50.0))"),
    ),
    bug(
        "output-hides-nan",
        5,
        OUTPUT,
        "test_output_row_masked_and_broken",
        "NaN in v becomes 0 (handout section 6)",
        (" @ v ", " @ np.nan_to_num(v) "),
    ),
    cheat(
        "output-pinned",
        5,
        "test_output_row",
        "the three numbers of the handout are written down",
        """
def output_row(s, v, fmt, shift=0):
    return {(FP32, 0): -0.578, (E4M3, 0): 0.211, (E4M3, 8): -0.581}.get((fmt, shift), 0.0)
""",
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5]
