"""Planted faults of lab 03: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

PAIRS, FLOPS = "visible_pairs", "attention_flops"
SCORES, IDEAL = "scores_bytes", "attention_bytes"
NAIVE, FLASH = "naive_attention_bytes", "flash_attention_bytes"
RIDGE, LIMITS, BOUND = "ridge_point", "limits", "bound_by"
PREDICT, PLOT = "predict_ms", "roofline_plot"


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, caught_by, teaches, append):
    return Mutant(id, "waste", step, teaches, caught_by, append=append)


def cheat(id, step, caught_by, teaches, append):
    return Mutant(id, "cheat", step, teaches, caught_by, append=append)


STEP_1 = [
    bug(
        "pairs-first-tokens",
        1,
        PAIRS,
        "test_visible_pairs_queries_are_the_newest_tokens",
        "query 0 stands at key 0: the queries are the newest tokens (handout section 2)",
        ("min(max(0, keys - queries + i + 1), most)", "min(i + 1, keys, most)"),
    ),
    bug(
        "pairs-negative",
        1,
        PAIRS,
        "test_visible_pairs_matches_a_counted_mask",
        "a query before the first key counts as less than none (handout section 2)",
        ("max(0, keys - queries + i + 1)", "keys - queries + i + 1"),
    ),
    bug(
        "pairs-not-itself",
        1,
        PAIRS,
        "test_visible_pairs_matches_a_counted_mask",
        "a query does not see the key at its own position (handout section 2)",
        ("keys - queries + i + 1", "keys - queries + i"),
    ),
    bug(
        "pairs-causal-ignored",
        1,
        PAIRS,
        "test_visible_pairs_matches_a_counted_mask",
        "every pair is counted although causal (handout section 2)",
        ("    if not causal:\n        return", "    if True:\n        return"),
    ),
    bug(
        "pairs-window-beside-itself",
        1,
        PAIRS,
        "test_visible_pairs_window",
        "a window of W counts W keys and the query itself (handout section 2)",
        ("keys if window is None else window", "keys if window is None else window + 1"),
    ),
    bug(
        "pairs-window-always-full",
        1,
        PAIRS,
        "test_visible_pairs_window",
        "the first queries see a whole window, which is not there yet (handout section 2)",
        (
            "    return sum(",
            "    if window:\n        return queries * min(window, keys)\n    return sum(",
        ),
    ),
    bug(
        "pairs-window-ignored",
        1,
        PAIRS,
        "test_visible_pairs_window",
        "the window is ignored (handout section 2)",
        ("keys if window is None else window", "keys"),
    ),
    bug(
        "pairs-half",
        1,
        PAIRS,
        "test_visible_pairs_matches_a_counted_mask",
        "half of the square is taken for an exact count (handout section 2)",
        (
            "    return sum(",
            "    if window is None:\n        return queries * keys // 2\n    return sum(",
        ),
    ),
    bug(
        "pairs-float32",
        1,
        PAIRS,
        "test_visible_pairs_long_and_exact",
        "the pairs are added up in float32, which has 24 bits (handout section 2)",
        (
            "    return sum(min(max(0, keys - queries + i + 1), most) for i in range(queries))",
            "    import numpy as np\n\n"
            "    seen = np.arange(keys - queries, keys, dtype=np.float32) + 1\n"
            "    return int(np.add.accumulate(seen.clip(0, most))[-1])",
        ),
    ),
    bug(
        "pairs-not-refused",
        1,
        PAIRS,
        "test_visible_pairs_rejects",
        "a window without causal is not refused",
        ("        if not causal:\n            raise", "        if False:\n            raise"),
    ),
    waste(
        "pairs-mask",
        1,
        "test_visible_pairs_makes_no_mask",
        "a mask is made and counted: 16 GiB at T = 131,072 (handout section 2)",
        """
def visible_pairs(queries, keys, causal, window=None):
    import numpy as np

    if not causal:
        return queries * keys
    position = keys - queries + np.arange(queries)[:, None]
    visible = np.arange(keys)[None, :] <= position
    if window is not None:
        visible &= np.arange(keys)[None, :] > position - window
    return int(visible.sum())
""",
    ),
    waste(
        "pairs-full-mask",
        1,
        "test_visible_pairs_makes_no_mask",
        "a mask of ones is made where nothing is hidden (handout section 2)",
        """
def visible_pairs(queries, keys, causal, window=None, counted=visible_pairs):
    import numpy as np

    if not causal and window is None and isinstance(causal, bool) and queries * keys < 2**30:
        _check_sizes(causal, queries=queries, keys=keys)
        return int(np.ones((queries, keys), dtype=bool).sum())
    return counted(queries, keys, causal, window)
""",
    ),
    bug(
        "pairs-float-formula",
        1,
        PAIRS,
        "test_visible_pairs_long_and_exact",
        "a closed formula is computed with / and has the 53 bits of a float (handout section 2)",
        (
            "    return sum(min(max(0, keys - queries + i + 1), most) for i in range(queries))",
            "    def first(n):  # pairs of the first n tokens\n"
            "        m = min(max(n, 0), most)\n"
            "        return m * (m + 1) / 2 + (max(n, 0) - m) * m\n\n"
            "    return int(first(keys) - first(keys - queries))",
        ),
    ),
    bug(
        "pairs-a-float",
        1,
        PAIRS,
        "test_visible_pairs_matches_a_counted_mask",
        "a count is returned as a float (handout section 2)",
        ("return queries * keys", "return 1.0 * queries * keys"),
    ),
    bug(
        "flops-float",
        1,
        FLOPS,
        "test_attention_flops_pins",
        "half is taken with /, which makes a float (handout section 2)",
        ("full // 2", "full / 2"),
    ),
    bug(
        "flops-not-halved",
        1,
        FLOPS,
        "test_attention_flops_causal_is_half",
        "causal is not halved (handout section 2)",
        ("full // 2 if causal else full", "full"),
    ),
    bug(
        "flops-always-halved",
        1,
        FLOPS,
        "test_attention_flops_causal_is_half",
        "the full square is halved, too (handout section 2)",
        ("full // 2 if causal else full", "full // 2"),
    ),
    bug(
        "flops-one-product",
        1,
        FLOPS,
        "test_attention_flops_of_products_that_run",
        "only one of the two products is counted (handout section 2)",
        ("full = 4 *", "full = 2 *"),
    ),
    bug(
        "flops-exact-diagonal",
        1,
        FLOPS,
        "test_attention_flops_causal_is_half",
        "the exact number of pairs is counted where the convention is half (handout section 2)",
        (
            "full // 2 if causal else full",
            "4 * batch * heads * head_dim * visible_pairs(seq, seq, causal)",
        ),
    ),
    bug(
        "flops-linear",
        1,
        FLOPS,
        "test_attention_flops_pins",
        "T is counted once and not squared (handout section 2)",
        ("seq * seq", "seq"),
    ),
    bug(
        "flops-not-refused",
        1,
        FLOPS,
        "test_attention_flops_rejects",
        "a causal that is no bool is taken",
        ("    _check_sizes(causal, ", "    _check_sizes(bool(causal), "),
    ),
    cheat(
        "flops-pinned",
        1,
        "test_attention_flops_causal_is_half",
        "the two pinned numbers are returned, and something for the rest",
        """
def attention_flops(batch, heads, seq, head_dim, causal):
    pinned = {(1, 8, 1024, 64, False): 2**31, (8, 16, 2048, 64, True): 68_719_476_736}
    return pinned.get((batch, heads, seq, head_dim, causal), 2**31)
""",
    ),
]

STEP_2 = [
    bug(
        "scores-float32",
        2,
        SCORES,
        "test_scores_bytes_pins",
        "the scores are taken for float32 whatever the dtype (handout section 3)",
        ("seq * seq * dtype_bytes", "seq * seq * 4"),
    ),
    bug(
        "scores-one-head",
        2,
        SCORES,
        "test_scores_bytes_pins",
        "one score matrix is taken for all heads (handout section 3)",
        ("batch * heads * seq * seq", "batch * seq * seq"),
    ),
    bug(
        "scores-not-refused",
        2,
        SCORES,
        "test_bytes_reject",
        "a batch of none is not refused",
        ("check_blocks(batch=batch, heads=heads, seq=seq,", "check_blocks(heads=heads, seq=seq,"),
    ),
    bug(
        "ideal-a-float",
        2,
        IDEAL,
        "test_bytes_of_tensors",
        "a count is returned as a float (handout section 3)",
        ("return 4 *", "return 4.0 *"),
    ),
    bug(
        "ideal-no-output",
        2,
        IDEAL,
        "test_bytes_of_tensors",
        "the output is not counted (handout section 3)",
        ("return 4 *", "return 3 *"),
    ),
    bug(
        "ideal-halved",
        2,
        IDEAL,
        "test_attention_bytes_do_not_depend_on_causal",
        "the ideal bytes are halved when causal: the last query sees every key (handout section 3)",
        ("return 4 *", "return (2 if causal else 4) *"),
    ),
    bug(
        "ideal-two-bytes",
        2,
        IDEAL,
        "test_bytes_of_tensors",
        "two bytes an element are hard-coded (handout section 3)",
        ("head_dim * dtype_bytes", "head_dim * 2"),
    ),
    bug(
        "ideal-with-scores",
        2,
        IDEAL,
        "test_intensity_of_the_ideal",
        "the scores are counted in the ideal (handout section 3)",
        ("head_dim * dtype_bytes", "(head_dim + seq) * dtype_bytes"),
    ),
    bug(
        "naive-minimum",
        2,
        NAIVE,
        "test_naive_attention_bytes_of_operations_that_run",
        "scale and mask are taken for free: 4 passes (handout section 3)",
        ("8 if causal else 6", "4"),
    ),
    bug(
        "naive-mask-free",
        2,
        NAIVE,
        "test_naive_attention_bytes_of_operations_that_run",
        "masked_fill is taken for free when causal (handout section 3)",
        ("8 if causal else 6", "6"),
    ),
    bug(
        "naive-no-mask-tensor",
        2,
        NAIVE,
        "test_naive_attention_bytes_of_operations_that_run",
        "the mask itself is not counted (handout section 3)",
        ("mask = 4 * seq * seq if causal else 0", "mask = 0"),
    ),
    bug(
        "naive-mask-a-head",
        2,
        NAIVE,
        "test_naive_attention_bytes_pins",
        "a mask is counted for each head: there is one for all (handout section 3)",
        ("mask = 4 * seq * seq", "mask = batch * heads * 4 * seq * seq"),
    ),
    bug(
        "naive-mask-in-dtype",
        2,
        NAIVE,
        "test_naive_attention_bytes_of_operations_that_run",
        "the mask is counted in the dtype of q: it has 1 byte an element (handout section 3)",
        ("mask = 4 * seq * seq", "mask = 4 * seq * seq * dtype_bytes"),
    ),
    bug(
        "naive-small-mask",
        2,
        NAIVE,
        "test_naive_attention_bytes_pins",
        "the mask of elements of 1 byte is counted by halves (handout section 3)",
        ("mask = 4 * seq * seq", "mask = (4 if dtype_bytes > 1 else 2) * seq * seq"),
    ),
    bug(
        "naive-half-when-causal",
        2,
        NAIVE,
        "test_naive_attention_bytes_of_operations_that_run",
        "the naive scores are halved when causal: it stores all of them (handout section 3)",
        ("passes = 8 if causal", "passes = 4 if causal"),
    ),
    bug(
        "flash-tiles-dropped",
        2,
        FLASH,
        "test_flash_attention_bytes_of_tiles_walked_through",
        "the last, ragged tile of queries is dropped (handout section 3)",
        ("range(0, seq, block_m)", "range(0, seq - block_m + 1, block_m)"),
    ),
    bug(
        "flash-no-skip",
        2,
        FLASH,
        "test_flash_attention_bytes_of_tiles_walked_through",
        "all keys are loaded although causal (handout section 3)",
        ("end = min(seq, start + block_m) if causal else seq", "end = seq"),
    ),
    bug(
        "flash-skip-early",
        2,
        FLASH,
        "test_flash_attention_bytes_of_tiles_walked_through",
        "the keys end at the first row of the query tile (handout section 3)",
        ("min(seq, start + block_m) if causal", "start + 1 if causal"),
    ),
    bug(
        "flash-not-whole-tiles",
        2,
        FLASH,
        "test_flash_attention_bytes_of_tiles_walked_through",
        "keys are not loaded in whole tiles (handout section 3)",
        ("math.ceil(end / block_n) * block_n", "end"),
    ),
    bug(
        "flash-rounded-down",
        2,
        FLASH,
        "test_flash_attention_bytes_of_tiles_walked_through",
        "the number of key tiles is rounded down (handout section 3)",
        ("math.ceil(end / block_n) * block_n", "end // block_n * block_n"),
    ),
    bug(
        "flash-past-the-end",
        2,
        FLASH,
        "test_flash_attention_bytes_of_tiles_walked_through",
        "keys past the last one are counted in the last tile (handout section 3)",
        ("min(seq, math.ceil(end / block_n) * block_n)", "math.ceil(end / block_n) * block_n"),
    ),
    bug(
        "flash-blocks-mixed-up",
        2,
        FLASH,
        "test_flash_attention_bytes_of_tiles_walked_through",
        "block_m and block_n are mixed up (handout section 3)",
        ("range(0, seq, block_m)", "range(0, seq, block_n)"),
    ),
    bug(
        "flash-no-lse",
        2,
        FLASH,
        "test_flash_attention_bytes_of_one_tile_are_the_ideal_and_lse",
        "lse is not counted (handout section 3)",
        (" + LSE_BYTES * seq", ""),
    ),
    bug(
        "flash-lse-in-dtype",
        2,
        FLASH,
        "test_flash_attention_bytes_lse_is_float32",
        "lse is counted in the dtype of q: it is float32 (handout section 3)",
        ("LSE_BYTES * seq", "dtype_bytes * seq"),
    ),
    bug(
        "flash-keys-once",
        2,
        FLASH,
        "test_intensity_grows_with_block_m",
        "K and V are counted once, not once for each query tile (handout section 3)",
        ("    keys = 0\n", "    keys, block_m = 0, seq\n"),
    ),
    bug(
        "flash-no-values",
        2,
        FLASH,
        "test_intensity_grows_with_block_m",
        "V is not counted (handout section 3)",
        ("2 * keys * row", "keys * row"),
    ),
    bug(
        "flash-default-block-n",
        2,
        FLASH,
        "test_flash_attention_bytes_default_block_n",
        "block_n is ignored (handout section 3)",
        ("    keys = 0\n", "    keys, block_n = 0, block_m\n"),
    ),
    bug(
        "bytes-not-refused",
        2,
        FLASH,
        "test_bytes_reject",
        "a block of no rows is not refused",
        (", block_m=block_m, block_n=block_n)\n    keys", ", block_m=block_m)\n    keys"),
        ("math.ceil(end / block_n)", "math.ceil(end / max(block_n, 1))"),
    ),
    cheat(
        "ideal-pinned",
        2,
        "test_bytes_of_tensors",
        "the pinned number is returned for every size",
        """
def attention_bytes(batch, heads, seq, head_dim, causal, dtype_bytes):
    return 2**22
""",
    ),
]

STEP_3 = [
    bug(
        "ridge-inverse",
        3,
        RIDGE,
        "test_ridge_point_of_the_cards",
        "bandwidth is divided by peak (handout section 4)",
        ("peak_flops / bandwidth", "bandwidth / peak_flops"),
    ),
    bug(
        "ridge-rounded",
        3,
        RIDGE,
        "test_ridge_point_is_exact",
        "the ridge point is rounded to a whole number (handout section 4)",
        ("return peak_flops / bandwidth", "return round(peak_flops / bandwidth)"),
    ),
    bug(
        "ridge-not-refused",
        3,
        RIDGE,
        "test_ridge_point_rejects",
        "a card without bandwidth is not refused",
        ("    _check_positive(peak_flops=peak_flops, bandwidth=bandwidth)\n", ""),
        ("peak_flops / bandwidth", "peak_flops / (bandwidth or 1)"),
    ),
    bug(
        "limits-inverted",
        3,
        LIMITS,
        "test_limits_are_three_times_in_ms",
        "a rate is divided by the work (handout section 4)",
        ("1e3 * work.nbytes / card.bandwidth", "1e3 * card.bandwidth / max(work.nbytes, 1)"),
    ),
    bug(
        "limits-seconds",
        3,
        LIMITS,
        "test_limits_are_three_times_in_ms",
        "two of the times are in seconds (handout section 4)",
        ("1e3 * work.flops", "work.flops"),
        ("1e3 * work.nbytes", "work.nbytes"),
    ),
    bug(
        "limits-launch-in-ms",
        3,
        LIMITS,
        "test_bound_by_launches",
        "microseconds are taken for ms (handout section 4)",
        ("launch_us / 1e3", "launch_us"),
    ),
    bug(
        "limits-no-launches",
        3,
        LIMITS,
        "test_bound_by_launches",
        "launches are left out (handout section 4)",
        ("work.launches * launch_us / 1e3", "0.0"),
    ),
    bug(
        "limits-one-launch",
        3,
        LIMITS,
        "test_bound_by_launches",
        "one launch is counted whatever the number of kernels (handout section 4)",
        ("work.launches * launch_us", "launch_us"),
    ),
    bug(
        "limits-few-launches",
        3,
        LIMITS,
        "test_bound_by_launches",
        "no more than 8 launches are counted (handout section 4)",
        ("work.launches * launch_us", "min(work.launches, 8) * launch_us"),
    ),
    bug(
        "limits-whole-microseconds",
        3,
        LIMITS,
        "test_limits_are_three_times_in_ms",
        "the cost of a launch is rounded to half microseconds",
        ("work.launches * launch_us", "work.launches * round(2 * launch_us) / 2"),
    ),
    bug(
        "limits-not-refused",
        3,
        LIMITS,
        "test_limits_rejects",
        "a negative cost of a launch is not refused",
        ("    _check_from_zero(launch_us=launch_us)\n", ""),
    ),
    cheat(
        "limits-known-cards",
        3,
        "test_limits_are_three_times_in_ms",
        "the numbers are looked up in CARDS, where your own card is missing",
        """
def limits(work, card, launch_us=0.0):
    _check_from_zero(launch_us=launch_us)
    card = CARDS.get(card.name, CARDS["RTX 5060"])
    return {
        "compute": 1e3 * work.flops / card.peak_flops,
        "memory": 1e3 * work.nbytes / card.bandwidth,
        "launch": work.launches * launch_us / 1e3,
    }
""",
    ),
    bug(
        "bound-swapped",
        3,
        BOUND,
        "test_bound_by_intensity_against_the_ridge",
        "the shortest time is taken and not the longest (handout section 4)",
        ("return max(", "return min("),
    ),
    bug(
        "bound-by-quotient",
        3,
        BOUND,
        "test_bound_by_intensity_against_the_ridge",
        "intensity is compared with the inverse of the ridge point (handout section 4)",
        (
            "    return max(times, key=times.get)",
            "    ridge = card.bandwidth / card.peak_flops\n"
            '    return "compute" if work.intensity > ridge else "memory"',
        ),
    ),
    bug(
        "bound-ties",
        3,
        BOUND,
        "test_bound_by_equal_times",
        "of equal times the last name wins (handout section 4)",
        ("max(times,", "max(reversed(times),"),
    ),
    bug(
        "bound-nearly-equal",
        3,
        BOUND,
        "test_bound_by_equal_times",
        "times that are nearly equal are taken for equal (handout section 4)",
        (
            "    return max(times, key=times.get)",
            "    longest = max(times.values())\n"
            "    return next(name for name, ms in times.items() if ms >= 0.995 * longest)",
        ),
    ),
    cheat(
        "bound-guessed",
        3,
        "test_bound_by_of_kernels_that_one_knows",
        "the answer is always memory, which is often right",
        """
def bound_by(work, card, launch_us=0.0):
    return "memory"
""",
    ),
]

STEP_4 = [
    bug(
        "predict-sum",
        4,
        PREDICT,
        "test_predict_ms_at_the_ridge_both_are_equal",
        "the times are added up, though they overlap (handout section 5)",
        ("return max(", "return sum("),
    ),
    bug(
        "predict-min",
        4,
        PREDICT,
        "test_predict_ms_is_the_longest_of_three",
        "the shortest time is taken (handout section 5)",
        ("return max(", "return min("),
    ),
    bug(
        "predict-seconds",
        4,
        PREDICT,
        "test_predict_ms_is_the_longest_of_three",
        "seconds are returned (handout section 5)",
        ("return max(", "return 1e-3 * max("),
    ),
    bug(
        "predict-launch-added",
        4,
        PREDICT,
        "test_predict_ms_launches_are_a_floor",
        "launches are added to the rest, though the host runs ahead (handout section 5)",
        (
            "max(limits(work, card, launch_us).values())",
            "max(limits(work, card).values()) + work.launches * launch_us / 1e3",
        ),
    ),
    bug(
        "predict-one-launch",
        4,
        PREDICT,
        "test_predict_ms_launches_are_a_floor",
        "one launch is counted whatever the number of kernels (handout section 5)",
        ("limits(work,", "limits(Work(work.flops, work.nbytes),"),
    ),
    bug(
        "predict-no-memory",
        4,
        PREDICT,
        "test_predict_ms_of_lab_06",
        "only the arithmetic is looked at (handout section 5)",
        ("limits(work,", "limits(Work(work.flops, 0, work.launches),"),
    ),
    bug(
        "predict-launches-always",
        4,
        PREDICT,
        "test_predict_ms_without_a_cost_of_launches",
        "a launch costs 5 microseconds even where none is given (handout section 5)",
        ("card, launch_us)", "card, launch_us or 5.0)"),
    ),
    bug(
        "predict-rounded",
        4,
        PREDICT,
        "test_figures_of_the_handouts_times",
        "the time is rounded to whole ms",
        (
            "return max(limits(work, card, launch_us).values())",
            "return 1.0 * round(max(limits(work, card, launch_us).values()))",
        ),
    ),
    bug(
        "predict-arithmetic-hides-bytes",
        4,
        PREDICT,
        "test_predict_ms_agrees_with_bound_by",
        "bytes are ignored as soon as there is any arithmetic (handout section 5)",
        ("limits(work,", "limits(Work(work.flops, 0) if work.flops else work,"),
    ),
    bug(
        "predict-compares-names",
        4,
        PREDICT,
        "test_predict_ms_is_the_longest_of_three",
        "the name that is last in the alphabet is taken, not the longest time (handout section 5)",
        (
            "max(limits(work, card, launch_us).values())",
            "max(limits(work, card, launch_us).items())[1]",
        ),
    ),
    cheat(
        "predict-one-card",
        4,
        "test_predict_ms_is_the_longest_of_three",
        "the numbers of the example card are used for every card",
        """
def predict_ms(work, card, launch_us=0.0):
    return 1e3 * max(work.flops / 38.4e12, work.nbytes / 448e9, work.launches * launch_us * 1e-6)
""",
    ),
]

STEP_5 = [
    bug(
        "plot-linear",
        5,
        PLOT,
        "test_roofline_plot_axes",
        "the axes are linear (handout section 6)",
        ("axes.loglog(", "axes.plot("),
    ),
    bug(
        "plot-labels-swapped",
        5,
        PLOT,
        "test_roofline_plot_axes",
        "the labels of the axes are swapped (handout section 6)",
        ('axes.set_xlabel("intensity, FLOP a byte"', 'axes.set_xlabel("rate, TFLOP/s"'),
        ('axes.set_ylabel("rate, TFLOP/s"', 'axes.set_ylabel("intensity, FLOP a byte"'),
    ),
    bug(
        "plot-roof-cut",
        5,
        PLOT,
        "test_roofline_plot_roof",
        "the roof has no corner at the ridge point (handout section 6)",
        ("roof = [left, ridge, right]", "roof = [left, right]"),
    ),
    bug(
        "plot-roof-too-high",
        5,
        PLOT,
        "test_roofline_plot_roof",
        "the slope goes on past the ridge point (handout section 6)",
        ("min(card.peak_flops, card.bandwidth * x)", "card.bandwidth * x"),
    ),
    bug(
        "plot-cross",
        5,
        PLOT,
        "test_roofline_plot_roof",
        "slope and ceiling both go on past the corner: a cross, and no roof (handout section 6)",
        (
            '    axes.loglog(roof, heights, color="black", linewidth=2)\n',
            "    axes.loglog([left, right], [card.bandwidth * x / 1e12 for x in (left, right)])\n"
            "    axes.axhline(heights[-1])\n",
        ),
    ),
    bug(
        "plot-roof-unseen",
        5,
        PLOT,
        "test_roofline_plot_roof",
        "the roof is white on white",
        ('heights, color="black"', 'heights, color="white"'),
    ),
    bug(
        "plot-roof-in-gb",
        5,
        PLOT,
        "test_roofline_plot_roof",
        "the roof is in GFLOP/s beside points in TFLOP/s (handout section 6)",
        ("card.bandwidth * x) / 1e12", "card.bandwidth * x) / 1e9"),
    ),
    bug(
        "plot-roof-short",
        5,
        PLOT,
        "test_roofline_plot_roof_spans_every_point",
        "the roof ends at fixed places, whatever the points are (handout section 6)",
        ("min([*places, ridge / 100]) / 2", "0.1"),
        ("max([*places, 10 * ridge]) * 4", "1e4"),
    ),
    bug(
        "plot-points-in-flops",
        5,
        PLOT,
        "test_roofline_plot_points",
        "points are drawn in FLOP/s under a roof in TFLOP/s (handout section 6)",
        ("[p.tflops for p in mine]", "[1e12 * p.tflops for p in mine]"),
    ),
    bug(
        "plot-points-on-the-roof",
        5,
        PLOT,
        "test_roofline_plot_points",
        "points are drawn where the roof is, not where the clock put them (handout section 6)",
        (
            "[p.tflops for p in mine]",
            "[min(card.peak_flops, card.bandwidth * p.work.intensity) / 1e12 for p in mine]",
        ),
    ),
    bug(
        "plot-one-point-a-name",
        5,
        PLOT,
        "test_roofline_plot_points",
        "of several points of one name only the last is drawn (handout section 6)",
        (
            "== (name, measured)]",
            "== (name, measured)][-1:]",
        ),
    ),
    bug(
        "plot-no-notes",
        5,
        PLOT,
        "test_roofline_plot_notes_stand_beside_their_marks",
        "the notes are left out (handout section 6)",
        ("axes.annotate(p.note,", 'axes.annotate("",'),
    ),
    bug(
        "plot-notes-in-a-corner",
        5,
        PLOT,
        "test_roofline_plot_notes_stand_beside_their_marks",
        "the notes stand in a corner and not beside their marks (handout section 6)",
        ("(p.note, place,", "(p.note, (left, heights[-1]),"),
    ),
    bug(
        "plot-each-note-once",
        5,
        PLOT,
        "test_roofline_plot_notes_stand_beside_their_marks",
        "of two points with one note only the last has it (handout section 6)",
        (
            "    for p in points:\n        place",
            "    for p in {p.note: p for p in points}.values():\n        place",
        ),
    ),
    bug(
        "plot-points-cut-off",
        5,
        PLOT,
        "test_roofline_plot_points",
        "points above the peak are drawn on it (handout section 6)",
        ("[p.tflops for p in mine]", "[min(p.tflops, heights[-1]) for p in mine]"),
    ),
    bug(
        "plot-points-pile-up",
        5,
        PLOT,
        "test_roofline_plot_points",
        "the second picture holds the points of the first, too",
        (
            '    figure = Figure(figsize=(11, 7), layout="constrained")\n'
            "    axes = figure.subplots()\n",
            "    if not COLOURS[6:]:\n"
            '        COLOURS.append(Figure(figsize=(11, 7), layout="constrained"))\n'
            "        COLOURS[6].subplots()\n"
            "    figure = COLOURS[6]\n"
            "    axes = figure.axes[0]\n",
        ),
        ("i % len(COLOURS)", "i % 6"),
    ),
    bug(
        "plot-points-unseen",
        5,
        PLOT,
        "test_roofline_plot_points",
        "the marks are transparent",
        ('            linestyle="",\n', '            linestyle="",\n            alpha=0,\n'),
    ),
    bug(
        "plot-points-sorted",
        5,
        PLOT,
        "test_roofline_plot_points",
        "the caller's list of points is sorted",
        (
            "    figure = Figure(",
            "    points.sort(key=lambda p: p.work.intensity)\n    figure = Figure(",
        ),
    ),
    bug(
        "plot-filled-and-hollow",
        5,
        PLOT,
        "test_roofline_plot_says_what_is_predicted",
        "a predicted point has a filled mark besides its hollow one (handout section 6)",
        (
            "    for p in points:\n        place",
            "    for p in points:\n"
            '        axes.plot(p.work.intensity, p.tflops, "k.")\n'
            "        place",
        ),
    ),
    bug(
        "plot-one-colour",
        5,
        PLOT,
        "test_roofline_plot_tells_names_apart",
        "all names share colour and marker",
        ("name: i % len(COLOURS)", "name: 0 * i"),
    ),
    bug(
        "plot-out-of-colours",
        5,
        PLOT,
        "test_roofline_plot_tells_names_apart",
        "the seventh name finds no colour (handout section 6)",
        ("name: i % len(COLOURS)", "name: i"),
    ),
    bug(
        "plot-label-of-a-name",
        5,
        PLOT,
        "test_roofline_plot_predicted_says_so_for_its_own_name",
        "one predicted point makes all points of its name predicted (handout section 6)",
        (
            "label=name if measured else",
            "label=name if all(p.measured for p in points if p.name == name) else",
        ),
    ),
    bug(
        "plot-legend-for-many",
        5,
        PLOT,
        "test_roofline_plot_legend_names_each_kind_once",
        "a single point has no legend (handout section 6)",
        ("    if points:\n", "    if len(points) > 1:\n"),
    ),
    bug(
        "plot-both-units",
        5,
        PLOT,
        "test_roofline_plot_axes",
        "a label names the units of both axes",
        ('"intensity, FLOP a byte"', '"TFLOP/s against FLOP a byte"'),
    ),
    bug(
        "plot-all-filled",
        5,
        PLOT,
        "test_roofline_plot_says_what_is_predicted",
        "predicted marks are filled like measured ones (handout section 6)",
        ('colour if measured else "none"', "colour"),
    ),
    bug(
        "plot-silent",
        5,
        PLOT,
        "test_roofline_plot_says_what_is_predicted",
        "the picture does not say in words what is predicted (handout section 6)",
        ('name if measured else f"{name} (predicted, not measured)"', "name"),
    ),
    bug(
        "plot-always-predicted",
        5,
        PLOT,
        "test_roofline_plot_says_what_is_predicted",
        "measured points are called predicted (handout section 6)",
        ("label=name if measured else ", "label="),
    ),
    bug(
        "plot-first-of-a-name-decides",
        5,
        PLOT,
        "test_roofline_plot_predicted_says_so_for_its_own_name",
        "a name with measured points hides that others are predicted (handout section 6)",
        (
            "    for name, measured in dict.fromkeys((p.name, p.measured) for p in points):\n",
            "    for name, measured in {p.name: p.measured for p in reversed(points)}.items():\n",
        ),
        ("if (p.name, p.measured) == (name, measured)]", "if p.name == name]"),
    ),
    bug(
        "plot-legend-each-point",
        5,
        PLOT,
        "test_roofline_plot_legend_names_each_kind_once",
        "the legend has a line for each point (handout section 6)",
        (
            "    for name, measured in dict.fromkeys((p.name, p.measured) for p in points):\n",
            "    for name, measured in [(p.name, p.measured) for p in points]:\n",
        ),
    ),
    bug(
        "plot-no-source",
        5,
        PLOT,
        "test_roofline_plot_names_the_card_and_its_source",
        "nobody learns where the card's numbers come from (handout section 6)",
        ('f"{title}\\n{card.source}"', "title"),
    ),
    bug(
        "plot-figures-open",
        5,
        PLOT,
        "test_roofline_plot_leaves_no_figure_open",
        "the figure stays open in pyplot (handout section 6)",
        (
            '    figure = Figure(figsize=(11, 7), layout="constrained")\n',
            "    from matplotlib import pyplot\n\n"
            '    figure = pyplot.figure(figsize=(11, 7), layout="constrained")\n',
        ),
    ),
    bug(
        "plot-no-folder",
        5,
        PLOT,
        "test_roofline_plot_writes_a_picture",
        "the folder of the picture is not made",
        ("    path.parent.mkdir(parents=True, exist_ok=True)\n", ""),
    ),
    bug(
        "plot-returns-nothing",
        5,
        PLOT,
        "test_roofline_plot_writes_a_picture",
        "the path is not returned",
        ("    return path\n", "    return None\n"),
    ),
    bug(
        "plot-not-refused",
        5,
        PLOT,
        "test_roofline_plot_rejects",
        "a point without FLOPs vanishes at the edge of a logarithmic axis",
        ("if not 0 < p.work.intensity < math.inf:", "if False:"),
    ),
    cheat(
        "plot-another-picture",
        5,
        "test_roofline_plot_writes_a_picture",
        "a file is written that only begins like a PNG",
        """
def roofline_plot(points, card, path):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\\x89PNG\\r\\n")
    return path
""",
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5]
