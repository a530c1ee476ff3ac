"""Planted faults of lab 01: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

QUANTILES, CALL, MEDIAN = "quantiles", "time_call_ms", "median_time_ms"
ACHIEVED = "achieved"
BUFFERS, ROTATE, COMPARE = "buffers_to_defeat_cache", "rotate", "compare"

# Pieces of solution.py that several faults replace.
CALL_BODY = """    synchronize()
    start = clock()
    fn()
    synchronize()
    return 1e3 * (clock() - start)"""
MEDIAN_BODY = """    samples = [time_call_ms(fn, clock, synchronize) for _ in range(repeats)]
    return quantiles(samples, [0.5])[0]"""
TURNS = "for fn, times in turns if i % 2 == 0 else reversed(turns):"
PAIRS_LOOP = """    for i in range(pairs):
        turns = [(fn_a, times_a), (fn_b, times_b)]
        for fn, times in turns if i % 2 == 0 else reversed(turns):
            times.append(time_call_ms(fn, clock, synchronize))"""
PLACE = """        nonlocal calls
        args = inputs[calls % len(inputs)]
        calls += 1
"""
RESULT = "return Comparison(ratio, q1, q3)"
DEFAULT = "synchronize: Callable[[], None] = wait_for_gpu"
NO_WAIT = "synchronize: Callable[[], None] = lambda: None"
RATIOS = "[a / b for a, b in zip(times_a, times_b, strict=True)]"


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside, append)


def cheat(id, step, caught_by, teaches, append, *edits, inside=""):
    return Mutant(id, "cheat", step, teaches, caught_by, edits, inside, append)


STEP_1 = [
    bug(
        "quantiles-not-sorted",
        1,
        QUANTILES,
        "test_quantiles_take_any_iterable_in_any_order",
        "the samples are not sorted (handout section 2)",
        ("sorted(samples)", "samples"),
    ),
    bug(
        "quantiles-no-interpolation",
        1,
        QUANTILES,
        "test_quantiles_worked_example",
        "the sample below is taken, without interpolation (handout section 2)",
        ("weight = place - below", "weight = 0.0"),
    ),
    bug(
        "quantiles-nearest",
        1,
        QUANTILES,
        "test_quantiles_worked_example",
        "the nearest sample is taken, without interpolation (handout section 2)",
        ("weight = place - below", "weight = round(place - below)"),
    ),
    bug(
        "quantiles-place-of-n",
        1,
        QUANTILES,
        "test_quantiles_worked_example",
        "the place is q * n and not q * (n - 1) (handout section 2)",
        ("place = q * last", "place = min(q * len(ordered), last)"),
    ),
    bug(
        "quantiles-place-from-one",
        1,
        QUANTILES,
        "test_quantiles_interpolate",
        "places are counted from 1, (n + 1) of them, which is another definition (section 2)",
        ("place = q * last", "place = min(max(q * (last + 2) - 1, 0), last)"),
    ),
    bug(
        "quantiles-weights-swapped",
        1,
        QUANTILES,
        "test_quantiles_worked_example",
        "the two weights are swapped (handout section 2)",
        ("weight = place - below", "weight = 1 - (place - below)"),
    ),
    bug(
        "quantiles-past-the-end",
        1,
        QUANTILES,
        "test_quantiles_ends",
        "q = 1 looks one place past the last sample (handout section 2)",
        ("above = min(below + 1, last)", "above = below + 1"),
    ),
    bug(
        "quantiles-qs-sorted",
        1,
        QUANTILES,
        "test_quantiles_take_any_iterable_in_any_order",
        "the results come in the order of sorted qs",
        ("for q in qs:\n        place", "for q in sorted(qs):\n        place"),
    ),
    bug(
        "quantiles-sorted-in-place",
        1,
        QUANTILES,
        "test_quantiles_leave_the_samples_as_they_are",
        "the caller's list is sorted in place (handout section 2)",
        (
            "    samples, qs = [float(x) for x in samples], [float(q) for q in qs]",
            "    if isinstance(samples, list):\n"
            "        samples.sort()\n"
            "    samples, qs = [float(x) for x in samples], [float(q) for q in qs]",
        ),
    ),
    bug(
        "quantiles-outliers-dropped",
        1,
        QUANTILES,
        "test_quantiles_properties",
        "samples beyond three times the median are thrown away",
        (
            "ordered = sorted(samples)",
            "ordered = sorted(samples)\n"
            "    ordered = [x for x in ordered if x <= 3 * ordered[len(ordered) // 2]]",
        ),
    ),
    bug(
        "quantiles-duplicates-dropped",
        1,
        QUANTILES,
        "test_quantiles_worked_example",
        "equal samples count once",
        ("sorted(samples)", "sorted(set(samples))"),
    ),
    bug(
        "quantiles-take-nan",
        1,
        QUANTILES,
        "test_quantiles_reject",
        "a NaN among the samples is not refused",
        ("    _check_finite(", "    dict("),
    ),
    bug(
        "quantiles-take-percent",
        1,
        QUANTILES,
        "test_quantiles_reject",
        "a q of 50 is taken for percent",
        ("if not 0 <= q <= 1:", "if not 0 <= q <= 100:"),
        ("place = q * last", "place = (q if q <= 1 else q / 100) * last"),
    ),
    bug(
        "quantiles-place-rounded",
        1,
        QUANTILES,
        "test_quantiles_interpolate",
        "the place is rounded to three decimals",
        ("place = q * last", "place = round(q * last, 3)"),
    ),
    bug(
        "quantiles-many-not-interpolated",
        1,
        QUANTILES,
        "test_quantiles_interpolate",
        "many samples are not interpolated, since it hardly matters then",
        ("weight = place - below", "weight = place - below if last <= 100 else 0.0"),
    ),
    cheat(
        "quantiles-by-partial",
        1,
        "test_quantiles_are_written_out",
        "NumPy computes it, under another name",
        "import functools\n\nimport numpy as np\n\n_q = functools.partial(np.quantile)\n",
        ("    ordered = sorted(samples)\n", "    return [float(_q(samples, q)) for q in qs]\n"),
        ("    last = len(ordered) - 1\n", "    ordered, last = [], 0\n"),
        inside=QUANTILES,
    ),
    cheat(
        "quantiles-by-torch-ops",
        1,
        "test_quantiles_are_written_out",
        "torch computes it, through torch.ops",
        "",
        (
            "    ordered = sorted(samples)\n",
            "    ordered = sorted(samples)\n"
            "    x = torch.tensor(samples, dtype=torch.float64)\n"
            "    return [float(torch.ops.aten.quantile(x, q)) for q in qs]\n",
        ),
        inside=QUANTILES,
    ),
    cheat(
        "quantiles-by-numpy",
        1,
        "test_quantiles_are_written_out",
        "NumPy computes it",
        """
def quantiles(samples, qs):
    import numpy as np

    samples, qs = [float(x) for x in samples], [float(q) for q in qs]
    if not samples or not all(map(math.isfinite, samples)) or not all(0 <= q <= 1 for q in qs):
        raise ValueError(f"got {samples}, {qs}")
    return [float(x) for x in np.quantile(samples, qs)]
""",
    ),
    cheat(
        "quantiles-by-statistics",
        1,
        "test_quantiles_are_written_out",
        "Python's statistics module computes the median",
        "from statistics import median as _median\n",
        (
            "    for q in qs:\n        place",
            "    for q in qs:\n        _median(ordered)\n        place",
        ),
        inside=QUANTILES,
    ),
]

STEP_2 = [
    bug(
        "call-no-synchronize",
        2,
        CALL,
        "test_time_call_waits_for_the_device",
        "nothing waits for the device: the launch is timed (handout section 3)",
        (CALL_BODY, CALL_BODY.replace("    synchronize()\n", "")),
    ),
    bug(
        "call-synchronize-before-only",
        2,
        CALL,
        "test_time_call_waits_for_the_device",
        "the device is waited for before the call only: the launch is timed (handout section 3)",
        ("    fn()\n    synchronize()\n", "    fn()\n"),
    ),
    bug(
        "call-synchronize-after-only",
        2,
        CALL,
        "test_time_call_starts_with_an_idle_device",
        "earlier work is still in the queue as the clock starts (handout section 3)",
        ("    synchronize()\n    start = clock()", "    start = clock()"),
    ),
    bug(
        "call-clock-before-synchronize",
        2,
        CALL,
        "test_time_call_waits_for_the_device",
        "the clock is read before the device is waited for (handout section 3)",
        (
            "    synchronize()\n    return 1e3 * (clock() - start)",
            "    end = clock()\n    synchronize()\n    return 1e3 * (end - start)",
        ),
    ),
    bug(
        "call-start-before-synchronize",
        2,
        CALL,
        "test_time_call_starts_with_an_idle_device",
        "the clock starts before the device has finished its earlier work (handout section 3)",
        ("    synchronize()\n    start = clock()", "    start = clock()\n    synchronize()"),
    ),
    bug(
        "call-seconds",
        2,
        CALL,
        "test_time_call_waits_for_the_device",
        "seconds are returned, not milliseconds (handout section 3)",
        ("1e3 * (clock() - start)", "clock() - start"),
    ),
    bug(
        "call-real-clock",
        2,
        CALL,
        "test_time_call_waits_for_the_device",
        "time.perf_counter is read, whatever clock was given (handout section 3)",
        ("start = clock()", "start = time.perf_counter()"),
        ("(clock() - start)", "(time.perf_counter() - start)"),
    ),
    bug(
        "call-real-synchronize",
        2,
        CALL,
        "test_time_call_waits_for_the_device",
        "wait_for_gpu is called, whatever synchronize was given (handout section 3)",
        ("    fn()\n    synchronize()", "    fn()\n    wait_for_gpu()"),
    ),
    bug(
        "call-needs-cuda",
        2,
        "",
        "test_median_time_needs_no_gpu",
        "torch.cuda.synchronize is called where there is no GPU (handout section 3)",
        ("    if torch.cuda.is_initialized():\n        torch", "    torch"),
    ),
    bug(
        "call-host-left-out",
        2,
        CALL,
        "test_time_call_includes_the_host",
        "the clock starts after the call, so that only the waiting is timed",
        ("    start = clock()\n    fn()\n", "    fn()\n    start = clock()\n"),
    ),
    bug(
        "call-warms-up",
        2,
        CALL,
        "test_time_call_calls_once",
        "a call before the timed one is made",
        ("    synchronize()\n    start", "    fn()\n    synchronize()\n    start"),
    ),
    bug(
        "call-swallows-errors",
        2,
        CALL,
        "test_time_call_lets_errors_through",
        "an error in fn is caught, and its time counts",
        ("    fn()\n", "    try:\n        fn()\n    except Exception:\n        pass\n"),
    ),
    bug(
        "call-subtracts-a-wait",
        2,
        CALL,
        "test_time_call_subtracts_nothing",
        "the time of an empty wait is subtracted",
        (
            CALL_BODY,
            "    synchronize()\n    start = clock()\n    synchronize()\n"
            "    empty = clock() - start\n"
            + CALL_BODY.replace("(clock() - start)", "(clock() - start - empty)"),
        ),
    ),
    bug(
        "call-collects-garbage",
        2,
        CALL,
        "test_time_call_times_the_call_and_nothing_else",
        "garbage is collected while the clock runs",
        ("    start = clock()\n", "    import gc\n\n    start = clock()\n    gc.collect()\n"),
    ),
    bug(
        "call-sleeps",
        2,
        CALL,
        "test_time_call_times_the_call_and_nothing_else",
        "the host sleeps while the clock runs",
        ("    start = clock()\n", "    start = clock()\n    time.sleep(0.001)\n"),
    ),
    bug(
        "call-default-waits-for-nothing",
        2,
        CALL,
        "test_time_call_waits_for_a_real_gpu_by_default",
        "the default of synchronize does nothing, so that a real GPU is not waited for",
        (DEFAULT, NO_WAIT),
    ),
    bug(
        "call-default-clock",
        2,
        CALL,
        "test_time_call_waits_for_a_real_gpu_by_default",
        "the default clock is time.time, which may jump (handout section 3)",
        ("= time.perf_counter", "= time.time"),
    ),
    bug(
        "call-wait-emptied",
        2,
        "",
        "test_time_call_waits_for_a_real_gpu_by_default",
        "wait_for_gpu, which is given, has been emptied",
        ("        torch.cuda.synchronize()\n", "        pass\n"),
    ),
    bug(
        "median-warms-up-once-a-function",
        2,
        MEDIAN,
        "test_median_time_measures_anew_each_time",
        "a function that was measured before is not warmed up again",
        (
            "    for _ in range(warmup):\n        fn()\n",
            "    for _ in range(0 if fn in _warm else warmup):\n"
            "        fn()\n"
            "    _warm.append(fn)\n",
        ),
        append="_warm = []\n",
    ),
    cheat(
        "median-cached",
        2,
        "test_median_time_measures_anew_each_time",
        "the result of a measurement is kept and returned again",
        "import functools\n\nmedian_time_ms = functools.lru_cache(median_time_ms)\n",
    ),
    waste(
        "median-capped",
        2,
        MEDIAN,
        "test_median_time_is_the_median",
        "no more than 100 repeats are made, whatever was asked for",
        ("range(repeats)", "range(min(repeats, 100))"),
    ),
    bug(
        "median-warmup-included",
        2,
        MEDIAN,
        "test_median_time_leaves_the_warmup_out",
        "the warm-up calls are among the samples (handout section 3)",
        ("    for _ in range(warmup):\n        fn()\n", ""),
        ("range(repeats)", "range(warmup + repeats)"),
    ),
    bug(
        "median-no-warmup",
        2,
        MEDIAN,
        "test_median_time_leaves_the_warmup_out",
        "there is no warm-up (handout section 3)",
        ("    for _ in range(warmup):\n        fn()\n", ""),
    ),
    bug(
        "median-warmup-once",
        2,
        MEDIAN,
        "test_median_time_leaves_the_warmup_out",
        "one call warms up, however many were asked for (handout section 3)",
        ("for _ in range(warmup):", "for _ in range(min(warmup, 1)):"),
    ),
    bug(
        "median-mean",
        2,
        MEDIAN,
        "test_median_time_outlier",
        "the mean is returned, which one slow call moves (handout section 3)",
        ("quantiles(samples, [0.5])[0]", "sum(samples) / len(samples)"),
    ),
    bug(
        "median-total-over-repeats",
        2,
        MEDIAN,
        "test_median_time_outlier",
        "all calls are timed as one and divided by their number: a mean (handout section 3)",
        (
            MEDIAN_BODY,
            "    return time_call_ms(lambda: [fn() for _ in range(repeats)], clock, synchronize)"
            " / repeats",
        ),
    ),
    bug(
        "median-minimum",
        2,
        MEDIAN,
        "test_median_time_is_the_median",
        "the fastest call is returned (handout section 3)",
        ("quantiles(samples, [0.5])[0]", "min(samples)"),
    ),
    bug(
        "median-last",
        2,
        MEDIAN,
        "test_median_time_is_the_median",
        "the last sample is returned",
        ("quantiles(samples, [0.5])[0]", "samples[-1]"),
    ),
    bug(
        "median-upper",
        2,
        MEDIAN,
        "test_median_time_is_the_median",
        "the upper of the two in the middle is taken (handout section 2)",
        ("quantiles(samples, [0.5])[0]", "sorted(samples)[repeats // 2]"),
    ),
    bug(
        "median-not-sorted",
        2,
        MEDIAN,
        "test_median_time_is_the_median",
        "the sample in the middle is taken before sorting",
        ("quantiles(samples, [0.5])[0]", "samples[repeats // 2]"),
    ),
    bug(
        "median-one-synchronize",
        2,
        MEDIAN,
        "test_median_time_first_sample_starts_idle",
        "the device is waited for after each call only, and the first sample holds the warm-up "
        "(handout section 3)",
        (
            MEDIAN_BODY,
            """    samples = []
    for _ in range(repeats):
        start = clock()
        fn()
        synchronize()
        samples.append(1e3 * (clock() - start))
    return quantiles(samples, [0.5])[0]""",
        ),
    ),
    bug(
        "median-synchronize-at-the-end",
        2,
        MEDIAN,
        "test_median_time_waits_for_the_device",
        "the device is waited for once, after all repeats (handout section 3)",
        (
            MEDIAN_BODY,
            """    synchronize()
    samples = []
    for _ in range(repeats):
        start = clock()
        fn()
        samples.append(1e3 * (clock() - start))
    synchronize()
    return quantiles(samples, [0.5])[0]""",
        ),
    ),
    bug(
        "median-defaults-used",
        2,
        MEDIAN,
        "test_median_time_waits_for_the_device",
        "clock and synchronize are not passed on (handout section 3)",
        ("time_call_ms(fn, clock, synchronize)", "time_call_ms(fn)"),
    ),
    bug(
        "median-takes-no-repeats",
        2,
        MEDIAN,
        "test_median_time_rejects",
        "no repeat at all is not refused before the warm-up",
        ("    _check_count(1, repeats=repeats)\n", ""),
    ),
    waste(
        "median-warms-up-each-time",
        2,
        MEDIAN,
        "test_median_time_leaves_the_warmup_out",
        "the warm-up is run again before each repeat",
        (
            MEDIAN_BODY,
            """    samples = []
    for _ in range(repeats):
        for _ in range(warmup):
            fn()
        samples.append(time_call_ms(fn, clock, synchronize))
    return quantiles(samples, [0.5])[0]""",
        ),
    ),
    cheat(
        "median-times-once",
        2,
        "test_median_time_outlier",
        "one call is timed and stands for all",
        "",
        ("for _ in range(repeats)]", "for _ in range(1)] * repeats"),
        inside=MEDIAN,
    ),
]

STEP_3 = [
    bug(
        "achieved-seconds",
        3,
        ACHIEVED,
        "test_achieved_worked_examples",
        "ms is taken for seconds (handout section 4)",
        ("(1e-3 * ms)", "ms"),
    ),
    bug(
        "achieved-binary",
        3,
        "",
        "test_achieved_units",
        "a TB is taken for 1024⁴ bytes (handout section 4)",
        ('"TB/s": 1e12', '"TB/s": 2.0**40'),
    ),
    bug(
        "achieved-unit-ignored",
        3,
        ACHIEVED,
        "test_achieved_units",
        "the rate is in tera, whatever the unit (handout section 4)",
        ("/ UNITS[unit]", "/ 1e12"),
    ),
    bug(
        "achieved-upside-down",
        3,
        ACHIEVED,
        "test_achieved_worked_examples",
        "time is divided by work",
        ("work / (1e-3 * ms) / UNITS[unit]", "1e-3 * ms * UNITS[unit] / max(work, 1)"),
    ),
    bug(
        "achieved-takes-zero-ms",
        3,
        ACHIEVED,
        "test_achieved_rejects",
        "a time of 0, as a clock that is too coarse gives it, is not refused (handout section 4)",
        ("or ms <= 0", ""),
        ("(1e-3 * ms)", "max(1e-3 * ms, 1e-12)"),
    ),
]

STEP_4 = [
    bug(
        "buffers-without-the-one-in-use",
        4,
        BUFFERS,
        "test_buffers_leave_nothing_in_the_cache",
        "all n sets fill the cache, where the n - 1 others must (handout section 5)",
        ("1 + -(-cache_bytes // bytes_per_call)", "max(1, -(-cache_bytes // bytes_per_call))"),
    ),
    bug(
        "buffers-rounded-down",
        4,
        BUFFERS,
        "test_buffers_leave_nothing_in_the_cache",
        "the quotient is rounded down, so that a part of the cache survives (handout section 5)",
        ("-(-cache_bytes // bytes_per_call)", "cache_bytes // bytes_per_call"),
    ),
    bug(
        "buffers-rounded",
        4,
        BUFFERS,
        "test_buffers_examples",
        "the quotient is rounded to the nearest number (handout section 5)",
        ("-(-cache_bytes // bytes_per_call)", "round(cache_bytes / bytes_per_call)"),
    ),
    bug(
        "buffers-nearly-rounded-up",
        4,
        BUFFERS,
        "test_buffers_examples",
        "0.99999999 is added and the quotient cut off, so that a small remainder is lost",
        ("-(-cache_bytes // bytes_per_call)", "int(cache_bytes / bytes_per_call + 0.99999999)"),
    ),
    bug(
        "buffers-one-when-larger",
        4,
        BUFFERS,
        "test_buffers_leave_nothing_in_the_cache",
        "one set is taken to be enough where it is larger than the cache (handout section 5)",
        (
            "    return 1 + -(",
            "    if bytes_per_call >= cache_bytes:\n        return 1\n    return 1 + -(",
        ),
    ),
    bug(
        "buffers-float",
        4,
        BUFFERS,
        "test_buffers_examples",
        "the number of sets is a float",
        ("1 + -(-cache_bytes // bytes_per_call)", "1.0 + -(-cache_bytes // bytes_per_call)"),
    ),
    bug(
        "buffers-take-zero-bytes",
        4,
        BUFFERS,
        "test_buffers_rejects",
        "a call of no bytes is not refused",
        ("    _check_count(1, bytes_per_call=bytes_per_call)\n", ""),
        ("// bytes_per_call)", "// max(bytes_per_call, 1))"),
    ),
    waste(
        "buffers-one-too-many",
        4,
        BUFFERS,
        "test_buffers_examples",
        "a set more than needed is kept, where the cache's size is a multiple (section 5)",
        ("1 + -(-cache_bytes // bytes_per_call)", "2 + cache_bytes // bytes_per_call"),
    ),
    waste(
        "buffers-thousand",
        4,
        BUFFERS,
        "test_buffers_properties",
        "a thousand sets are taken, to be safe",
        ("    return 1 + -(", "    return 1000\n    return 1 + -("),
    ),
    bug(
        "rotate-first-only",
        4,
        ROTATE,
        "test_rotate_takes_the_inputs_in_turn",
        "the same input is used for all calls (handout section 5)",
        ("        calls += 1\n", ""),
        ("        nonlocal calls\n", ""),
    ),
    bug(
        "rotate-last-first",
        4,
        ROTATE,
        "test_rotate_takes_the_inputs_in_turn",
        "the count is raised before it is used: the second input comes first",
        (
            "        args = inputs[calls % len(inputs)]\n        calls += 1\n",
            "        calls += 1\n        args = inputs[calls % len(inputs)]\n",
        ),
    ),
    bug(
        "rotate-does-not-wrap",
        4,
        ROTATE,
        "test_rotate_takes_the_inputs_in_turn",
        "the last input is kept when all have been used (handout section 5)",
        ("inputs[calls % len(inputs)]", "inputs[min(calls, len(inputs) - 1)]"),
    ),
    bug(
        "rotate-to-and-fro",
        4,
        ROTATE,
        "test_rotate_takes_the_inputs_in_turn",
        "the inputs are used forward and then backward, so that one is used twice in a row",
        (
            "inputs[calls % len(inputs)]",
            "[*inputs, *reversed(inputs)][calls % (2 * len(inputs))]",
        ),
    ),
    bug(
        "rotate-consumes",
        4,
        ROTATE,
        "test_rotate_takes_the_inputs_in_turn",
        "the caller's list is rotated itself",
        ("args = inputs[calls % len(inputs)]", "args = inputs.pop(0)\n        inputs.append(args)"),
    ),
    bug(
        "rotate-shared-place",
        4,
        ROTATE,
        "test_rotate_keeps_its_own_place",
        "all rotations share one count",
        ("    calls = 0\n", ""),
        ("        nonlocal calls\n", "        global calls\n"),
        append="calls = 0\n",
    ),
    bug(
        "rotate-place-by-function",
        4,
        ROTATE,
        "test_rotate_keeps_its_own_place",
        "the place is kept for fn, and two rotations of one function share it",
        (
            PLACE,
            "        args = inputs[_places.get(fn, 0) % len(inputs)]\n"
            "        _places[fn] = _places.get(fn, 0) + 1\n",
        ),
        append="_places = {}\n",
    ),
    bug(
        "rotate-ends",
        4,
        ROTATE,
        "test_rotate_takes_the_inputs_in_turn",
        "three rounds are made and then it ends",
        (
            PLACE,
            "        args = next(rounds)\n",
        ),
        ("    calls = 0\n", "    rounds = iter(list(inputs) * 3)\n"),
    ),
    bug(
        "rotate-not-unpacked",
        4,
        ROTATE,
        "test_rotate_takes_the_inputs_in_turn",
        "fn gets the set as one argument",
        ("fn(*args)", "fn(args)"),
    ),
    bug(
        "rotate-drops-the-result",
        4,
        ROTATE,
        "test_rotate_returns_what_fn_returns",
        "the result of fn is dropped",
        ("return fn(*args)", "fn(*args)"),
    ),
    bug(
        "rotate-calls-at-once",
        4,
        ROTATE,
        "test_rotate_takes_the_inputs_in_turn",
        "fn is called as the rotation is made",
        ("    calls = 0\n", "    calls = 0\n    fn(*inputs[0])\n"),
    ),
    bug(
        "rotate-takes-nothing",
        4,
        ROTATE,
        "test_rotate_rejects",
        "no input at all is not refused",
        ('    _check_count(1, **{"the number of inputs": len(inputs)})\n', ""),
    ),
    cheat(
        "rotate-same-buffers",
        4,
        "test_rotate_through_enough_buffers_reads_from_memory",
        "all sets of the rotation are the first one (handout section 5)",
        "",
        ("    calls = 0\n", "    calls, inputs = 0, [inputs[0]] * len(inputs)\n"),
        inside=ROTATE,
    ),
]

STEP_5 = [
    bug(
        "compare-one-after-the-other",
        5,
        COMPARE,
        "test_compare_on_a_device_that_drifts",
        "all of A runs before B: the device's drift counts as a difference (handout section 6)",
        (
            PAIRS_LOOP,
            "    for fn, times in ((fn_a, times_a), (fn_b, times_b)):\n"
            "        for _ in range(pairs):\n"
            "            times.append(time_call_ms(fn, clock, synchronize))",
        ),
    ),
    bug(
        "compare-one-after-the-other-cold",
        5,
        COMPARE,
        "test_compare_after_too_short_a_warmup",
        "A runs first and pays for a warm-up that was too short (handout section 6)",
        (
            PAIRS_LOOP,
            "    times_a = [time_call_ms(fn_a, clock, synchronize) for _ in range(pairs)]\n"
            "    times_b = [time_call_ms(fn_b, clock, synchronize) for _ in range(pairs)]",
        ),
    ),
    bug(
        "compare-a-always-first",
        5,
        COMPARE,
        "test_compare_on_a_device_that_drifts",
        "A is the first of every pair: B is always a step later (handout section 6)",
        (TURNS, "for fn, times in turns:"),
    ),
    bug(
        "compare-b-begins",
        5,
        COMPARE,
        "test_compare_takes_turns",
        "the first pair begins with B",
        ("if i % 2 == 0", "if i % 2 == 1"),
    ),
    bug(
        "compare-upside-down",
        5,
        COMPARE,
        "test_compare_two_kernels",
        "the ratio is B over A (handout section 6)",
        (RESULT, "return Comparison(1 / ratio, q1, q3)"),
    ),
    bug(
        "compare-quartiles-upside-down",
        5,
        COMPARE,
        "test_compare_two_kernels",
        "the pairs' ratios are b / a (handout section 6)",
        (RATIOS, "[b / a for a, b in zip(times_a, times_b, strict=True)]"),
    ),
    bug(
        "compare-ratio-of-medians",
        5,
        COMPARE,
        "test_compare_is_the_median_of_the_pairs",
        "A's median is divided by B's: the ratio is not taken pair by pair (handout section 6)",
        (
            RESULT,
            "ratio = quantiles(times_a, [0.5])[0] / quantiles(times_b, [0.5])[0]\n    " + RESULT,
        ),
    ),
    bug(
        "compare-ratio-of-means",
        5,
        COMPARE,
        "test_compare_outlier",
        "the ratio is that of two means, which one slow call moves (handout section 6)",
        (RESULT, "return Comparison(sum(times_a) / sum(times_b), q1, q3)"),
    ),
    bug(
        "compare-ratio-of-minima",
        5,
        COMPARE,
        "test_compare_is_the_median_of_the_pairs",
        "the ratio is that of the two fastest calls",
        (RESULT, "return Comparison(min(times_a) / min(times_b), q1, q3)"),
    ),
    bug(
        "compare-quartiles-unpaired",
        5,
        COMPARE,
        "test_compare_quartiles_are_of_the_pairs",
        "the quartiles are those of A over the median of B: what hits both counts (section 6)",
        (
            RESULT,
            "middle = quantiles(times_b, [0.5])[0]\n"
            "    q1, q3 = quantiles([a / middle for a in times_a], [0.25, 0.75])\n    " + RESULT,
        ),
    ),
    bug(
        "compare-sorted-pairs",
        5,
        COMPARE,
        "test_compare_random_times",
        "the times are sorted before they are paired (handout section 6)",
        (
            "zip(times_a, times_b, strict=True)",
            "zip(sorted(times_a), sorted(times_b), strict=True)",
        ),
    ),
    bug(
        "compare-pairs-mixed-up",
        5,
        COMPARE,
        "test_compare_quartiles_are_of_the_pairs",
        "a time of A is divided by the time of B of another pair (handout section 6)",
        (
            "zip(times_a, times_b, strict=True)",
            "zip(times_a, times_b[1:] + times_b[:1], strict=True)",
        ),
    ),
    bug(
        "compare-range",
        5,
        COMPARE,
        "test_compare_random_times",
        "the smallest and the largest ratio are returned as quartiles",
        ("[0.25, 0.5, 0.75]", "[0.0, 0.5, 1.0]"),
    ),
    bug(
        "compare-quartiles-swapped",
        5,
        COMPARE,
        "test_compare_random_times",
        "q1 and q3 are swapped",
        ("Comparison(ratio, q1, q3)", "Comparison(ratio, q3, q1)"),
    ),
    bug(
        "compare-no-synchronize",
        5,
        COMPARE,
        "test_compare_two_kernels",
        "nothing waits for the device: two launches are compared (handout section 6)",
        ("time_call_ms(fn, clock, synchronize)", "time_call_ms(fn, clock, lambda: None)"),
    ),
    bug(
        "compare-one-synchronize",
        5,
        COMPARE,
        "test_compare_each_sample_starts_idle",
        "the device is waited for after each call only, and the first sample holds the warm-up",
        (
            "            times.append(time_call_ms(fn, clock, synchronize))",
            "            start = clock()\n"
            "            fn()\n"
            "            synchronize()\n"
            "            times.append(1e3 * (clock() - start))",
        ),
    ),
    bug(
        "compare-warmup-included",
        5,
        COMPARE,
        "test_compare_leaves_the_warmup_out",
        "the warm-up pairs count (handout section 6)",
        ("    for _ in range(warmup):\n        fn_a()\n        fn_b()\n", ""),
        ("for i in range(pairs):", "for i in range(warmup + pairs):"),
    ),
    bug(
        "compare-warms-up-a-only",
        5,
        COMPARE,
        "test_compare_leaves_the_warmup_out",
        "only A is warmed up (handout section 6)",
        ("        fn_b()\n", ""),
    ),
    bug(
        "compare-dict-by-function",
        5,
        COMPARE,
        "test_compare_with_itself",
        "the times are kept by function, and a function compared with itself has one list for both",
        (
            "times_a, times_b = [], []",
            "found = {fn_a: [], fn_b: []}\n    times_a, times_b = [], []",
        ),
        (
            "            times.append(time_call_ms(fn, clock, synchronize))\n",
            "            found[fn].append(time_call_ms(fn, clock, synchronize))\n"
            "    times_a, times_b = found[fn_a], found[fn_b]\n"
            "    times_a, times_b = times_a[:pairs], times_b[:pairs]\n",
        ),
    ),
    bug(
        "compare-warms-up-a-set",
        5,
        COMPARE,
        "test_compare_with_itself",
        "the functions to warm up are a set or a dict, and a function and itself count once",
        (
            "    for _ in range(warmup):\n        fn_a()\n        fn_b()\n",
            "    for fn in dict.fromkeys((fn_a, fn_b)):\n"
            "        for _ in range(warmup):\n            fn()\n",
        ),
    ),
    bug(
        "compare-plain-tuple",
        5,
        COMPARE,
        "test_compare_two_kernels",
        "a plain tuple is returned, not a Comparison",
        (RESULT, "return ratio, q1, q3"),
    ),
    bug(
        "compare-swallows-errors",
        5,
        COMPARE,
        "test_compare_lets_errors_through",
        "an error in one of the functions is caught, and its time counts",
        (
            "            times.append(time_call_ms(fn, clock, synchronize))",
            "            try:\n"
            "                times.append(time_call_ms(fn, clock, synchronize))\n"
            "            except ZeroDivisionError:\n"
            "                times.append(1.0)",
        ),
    ),
    bug(
        "compare-default-waits-for-nothing",
        5,
        COMPARE,
        "test_compare_waits_for_a_real_gpu_by_default",
        "the default of synchronize does nothing, so that a real GPU is not waited for",
        (DEFAULT, NO_WAIT),
    ),
    waste(
        "compare-capped",
        5,
        COMPARE,
        "test_compare_random_times",
        "no more than 100 pairs are made, whatever was asked for",
        ("for i in range(pairs):", "for i in range(min(pairs, 100)):"),
    ),
    cheat(
        "compare-itself-is-one",
        5,
        "test_compare_with_itself",
        "a function compared with itself is given a ratio of 1",
        "",
        (RESULT, "return Comparison(1.0 if fn_a is fn_b else ratio, q1, q3)"),
        inside=COMPARE,
    ),
    cheat(
        "compare-near-one-is-one",
        5,
        "test_compare_on_a_device_that_drifts",
        "a ratio near 1 is rounded to 1",
        "",
        (RESULT, "return Comparison(1.0 if abs(ratio - 1) < 0.012 else ratio, q1, q3)"),
        inside=COMPARE,
    ),
    bug(
        "compare-takes-no-pairs",
        5,
        COMPARE,
        "test_compare_rejects",
        "no pair at all is not refused before the warm-up",
        ("    _check_count(1, pairs=pairs)\n", ""),
    ),
    cheat(
        "compare-by-two-medians",
        5,
        "test_compare_on_a_device_that_drifts",
        "two calls of median_time_ms stand for the pairs (handout section 6)",
        """
def compare(fn_a, fn_b, pairs=50, warmup=10, clock=time.perf_counter, synchronize=wait_for_gpu):
    a = median_time_ms(fn_a, warmup, pairs, clock, synchronize)
    b = median_time_ms(fn_b, warmup, pairs, clock, synchronize)
    return Comparison(a / b, a / b, a / b)
""",
    ),
    cheat(
        "compare-no-spread",
        5,
        "test_compare_random_times",
        "the ratio is returned three times",
        "",
        ("Comparison(ratio, q1, q3)", "Comparison(ratio, ratio, ratio)"),
        inside=COMPARE,
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5]
