"""Planted faults of lab 10: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside, append)


def cheat(id, step, caught_by, teaches, append, *edits, inside=""):
    return Mutant(id, "cheat", step, teaches, caught_by, edits, inside, append)


W, HIDE, STORE, PREPARE, E, K, ATTEND = (
    "_weights",
    "_hide",
    "_store",
    "_prepare",
    "_exp2_kernel",
    "_keys",
    "_attend",
)

STEP_1 = [
    bug(
        "weights-no-guard",
        1,
        W,
        "test_exp2_huge_equal_scores",
        "the rounded maximum is subtracted from scores that are not rounded (handout section 2)",
        ("tl.where(tl.abs(scaled) < LIMIT, scaled, top * steep)", "scaled"),
        ("tl.where(tl.abs(m_new) < LIMIT, slope, steep)", "slope + 0 * m_new"),
    ),
    bug(
        "weights-two-references",
        1,
        W,
        "test_exp2_tiles_agree_on_their_reference",
        "alpha is computed from another rounding of the maximum than p (handout section 2)",
        ("alpha = tl.exp2(m_i - m_new)", "alpha = tl.exp2(tl.fma(-top, slope + 0 * top, m_i))"),
    ),
    bug(
        "weights-steep-always",
        1,
        W,
        "test_exp2",
        "the power of two is used where scores are small, too: the wrong temperature",
        ("factor = tl.where(tl.abs(m_new) < LIMIT, slope, steep)", "factor = m_new * 0 + steep"),
    ),
    bug(
        "weights-l-not-rescaled",
        1,
        W,
        "test_exp2_score_ranges",
        "l is not rescaled as the maximum grows",
        ("l_i = l_i * alpha[:, None] + ", "l_i = l_i + "),
    ),
    bug(
        "weights-tile-max",
        1,
        W,
        "test_exp2_score_ranges",
        "the maximum is this tile's and not the largest so far",
        ("m_new = tl.maximum(m_i, tl.where(", "m_new = tl.maximum(-3e38, tl.where("),
    ),
    bug(
        "exp2-acc-not-rescaled",
        1,
        E,
        "test_exp2_score_ranges",
        "acc is not rescaled as the maximum grows",
        ("acc * alpha[:, None])", "acc)"),
    ),
    bug(
        "exp2-no-scale",
        1,
        PREPARE,
        "test_exp2",
        "the scores are not scaled",
        ("slope = scale * math.log2(math.e)", "slope = math.log2(math.e)"),
    ),
    bug(
        "exp2-no-log2e",
        1,
        PREPARE,
        "test_exp2",
        "log2(e) is left out: the softmax is to the base 2 (handout section 2)",
        ("slope = scale * math.log2(math.e)", "slope = scale"),
    ),
    bug(
        "exp2-scale-ignored",
        1,
        PREPARE,
        "test_exp2_layouts_and_scale",
        "the caller's scale is ignored",
        ("if scale is None:", "if True:"),
    ),
    bug(
        "exp2-scale-not-checked",
        1,
        PREPARE,
        "test_exp2_rejects",
        "a scale of 0 or below is not refused: the largest score is then not the largest exponent",
        ("if not 0.0 < scale < math.inf:", "if False:"),
        ("slope = scale * math.log2(math.e)", "slope = abs(scale) or 1.0"),
        ("2.0 ** math.ceil(math.log2(slope))", "1.0"),
    ),
    bug(
        "exp2-lse-base-2",
        1,
        STORE,
        "test_exp2_lse_is_natural",
        "lse is in base 2",
        ("m_i * unit + tl.log(l_i)", "m_i + tl.log2(l_i)"),
    ),
    bug(
        "exp2-lse-mixed",
        1,
        STORE,
        "test_exp2",
        "m is in base 2 and log l natural",
        ("m_i * unit + tl.log(l_i)", "m_i + tl.log(l_i)"),
    ),
    bug(
        "exp2-lse-steep-unit",
        1,
        STORE,
        "test_exp2_huge_equal_scores",
        "lse of huge scores is in units of the power of two, not of log 2 (handout section 2)",
        ("tl.where(tl.abs(m_i) < HUGE / 2**SHIFT, LN2, LN2 * slope / steep)", "LN2 + 0 * m_i"),
    ),
    bug(
        "exp2-padding-key",
        1,
        HIDE,
        "test_exp2",
        "the first key past the end counts, with a score of 0",
        ("last = S - 1 - start_n", "last = S - start_n"),
    ),
    bug(
        "exp2-diagonal-hidden",
        1,
        HIDE,
        "test_exp2",
        "a query does not see its own key",
        ("tl.minimum(offs_m, S - 1)", "tl.minimum(offs_m - 1, S - 1)"),
    ),
    bug(
        "exp2-hi-one-short",
        1,
        E,
        "test_exp2_tiles",
        "the causal loop ends at the first row of the query tile",
        ("(pid_m + 1) * BLOCK_M) if", "pid_m * BLOCK_M + 1) if"),
    ),
    bug(
        "exp2-load-without-other",
        1,
        "_load",
        "test_exp2",
        "masked rows hold anything, and 0 times NaN is NaN",
        (", other=0.0", ""),
    ),
    bug(
        "exp2-q-unmasked",
        1,
        E,
        "test_exp2",
        "padding rows read past q",
        (
            "q = _load(q_ptrs, pid_m * BLOCK_M, T, True)",
            "q = _load(q_ptrs, pid_m * BLOCK_M, T, False)",
        ),
    ),
    bug(
        "exp2-store-unmasked",
        1,
        STORE,
        "test_exp2",
        "padding rows are stored over the next head's",
        (", mask=offs_m[:, None] < T", ""),
    ),
    bug(
        "exp2-keys-as-long-as-queries",
        1,
        E,
        "test_exp2_key_lengths",
        "a head's keys are taken to be as many as its queries",
        ("k_ptr + bh * S * D", "k_ptr + bh * T * D"),
    ),
    bug(
        "exp2-half-scores",
        1,
        E,
        "test_exp2_half_scores_do_not_overflow",
        "the scores overflow float16 before they are scaled",
        ("s = tl.dot(q, tl.trans(k))", "s = tl.dot(q, tl.trans(k)).to(q.dtype).to(tl.float32)"),
    ),
    bug(
        "exp2-finite-minus-inf",
        1,
        E,
        "test_exp2_huge_equal_scores",
        "a finite number stands for -inf, and real scores lie below it",
        ('float("-inf")', "-1e6"),
    ),
    waste(
        "exp2-visits-the-future",
        1,
        E,
        "test_exp2_moves_few_bytes",
        "key tiles in the future of every row are visited",
        ("tl.minimum(S, (pid_m + 1) * BLOCK_M) if CAUSAL else S", "S"),
    ),
    waste(
        "weights-no-fma",
        1,
        W,
        "test_exp2_costs_one_multiply_add_and_one_exp2",
        "a product and a sum stand for the fused multiply-add (handout section 2)",
        (
            "tl.fma(s, factor[:, None], (shift - m_new)[:, None])",
            "s * factor[:, None] + (shift - m_new)[:, None]",
        ),
    ),
    waste(
        "weights-exp",
        1,
        W,
        "test_exp2_costs_one_multiply_add_and_one_exp2",
        "exp stands for exp2: it is exp2 of a product more (handout section 2)",
        (
            "tl.exp2(tl.fma(s, factor[:, None], (shift - m_new)[:, None]))",
            "tl.exp(LN2 * tl.fma(s, factor[:, None], (shift - m_new)[:, None]))",
        ),
    ),
    bug(
        "exp2-32-bit",
        1,
        E,
        "test_exp2_offsets_beyond_32_bits",
        "head times rows times D wraps past 2**31",
        ("bh = tl.program_id(1).to(tl.int64)", "bh = tl.program_id(1)"),
    ),
    cheat(
        "exp2-in-torch",
        1,
        "test_exp2_is_the_kernels_work",
        "PyTorch does the work and no kernel runs",
        """
def attention_exp2(q, k, v, causal=False, scale=None, block_m=64, block_n=64, **config):
    tensors, _, _, _ = _prepare(q, k, v, causal, scale, block_m, block_n)
    s = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), float("-inf"))
    m = s.amax(-1, keepdim=True)
    p = (s - m).exp()
    l = p.sum(-1, keepdim=True)
    return (p @ v.float() / l).to(q.dtype), (m + l.log())[..., 0]
""",
    ),
    cheat(
        "exp2-cached",
        1,
        "test_exp2_follows_its_input",
        "the output is kept between calls",
        """
_first, _kept = attention_exp2, {}


def attention_exp2(q, *args, **kwargs):
    if q.shape not in _kept:
        _kept[q.shape] = _first(q, *args, **kwargs)
    return _kept[q.shape]
""",
    ),
]

STEP_2 = [
    bug(
        "two-full-rounded-up",
        2,
        "_ranges",
        "test_two_loops",
        "the last whole tile is rounded up and the diagonal or the end goes unmasked",
        ("seen // BLOCK_N * BLOCK_N", "(seen + BLOCK_N - 1) // BLOCK_N * BLOCK_N"),
    ),
    bug(
        "two-overruns-the-diagonal",
        2,
        "_ranges",
        "test_two_loops_tiles",
        "the loop without masks runs to the tile's last row and not its first (handout section 3)",
        (
            "seen = tl.minimum(S, pid_m * BLOCK_M + 1)",
            "seen = tl.minimum(S, (pid_m + 1) * BLOCK_M)",
        ),
    ),
    bug(
        "two-no-second-loop",
        2,
        ATTEND,
        "test_two_loops",
        "the masked loop is missing: the diagonal and the ragged last tile are not there",
        (
            "_keys(acc, l_i, m_i, q, k_ptr, v_ptr, offs_m, full, hi, S",
            "_keys(acc, l_i, m_i, q, k_ptr, v_ptr, offs_m, hi, hi, S",
        ),
    ),
    bug(
        "two-starts-at-zero",
        2,
        K,
        "test_two_loops_tiles",
        "both loops read the keys from the first one on",
        ("v_ptrs = _pointers(v_ptr, lo, D, BLOCK_N)", "v_ptrs = _pointers(v_ptr, 0, D, BLOCK_N)"),
    ),
    bug(
        "two-v-not-advanced",
        2,
        K,
        "test_two_loops",
        "the pointers of v stay at the first tile",
        ("v_ptrs += BLOCK_N * D", "v_ptrs += 0"),
    ),
    bug(
        "two-acc-not-rescaled",
        2,
        K,
        "test_two_loops_score_ranges",
        "acc is not rescaled as the maximum grows",
        ("acc * alpha[:, None])", "acc)"),
    ),
    bug(
        "two-q-unmasked",
        2,
        ATTEND,
        "test_two_loops",
        "padding rows read past q",
        (
            "q = _load(q_ptrs, pid_m * BLOCK_M, T, True)",
            "q = _load(q_ptrs, pid_m * BLOCK_M, T, False)",
        ),
    ),
    bug(
        "two-32-bit",
        2,
        "_two_loops_kernel",
        "test_two_loops_offsets_beyond_32_bits",
        "head times rows times D wraps past 2**31",
        ("bh = tl.program_id(1).to(tl.int64)", "bh = tl.program_id(1)"),
    ),
    waste(
        "two-loads-masked",
        2,
        K,
        "test_two_loops_masks_only_where_needed",
        "whole tiles are loaded with a mask, too (handout section 3)",
        ("_load(k_ptrs, start_n, S, MASKED)", "_load(k_ptrs, start_n, S, True)"),
        ("_load(v_ptrs, start_n, S, MASKED)", "_load(v_ptrs, start_n, S, True)"),
    ),
    waste(
        "two-all-masked",
        2,
        ATTEND,
        "test_two_loops_masks_only_where_needed",
        "every tile is masked, whole ones, too (handout section 3)",
        ("D, BLOCK_N, CAUSAL, False)", "D, BLOCK_N, CAUSAL, True)"),
    ),
    waste(
        "two-first-loop-empty",
        2,
        "_ranges",
        "test_two_loops_masks_only_where_needed",
        "no tile counts as whole, so all of them go through the masked loop",
        ("return seen // BLOCK_N * BLOCK_N, hi", "return seen * 0, hi"),
    ),
    waste(
        "two-visits-the-future",
        2,
        "_ranges",
        "test_two_loops_moves_few_bytes",
        "key tiles in the future of every row are visited",
        ("hi = tl.minimum(S, (pid_m + 1) * BLOCK_M)", "hi = S"),
    ),
]

TILE, ORDER = "_tile_of_program", "program_order"
STEP_3 = [
    bug(
        "order-shortest-first",
        3,
        TILE,
        "test_program_order_is_what_the_kernel_does",
        "the short tiles come first and the card ends on a few long ones (handout section 4)",
        ("tile = tiles - 1 - tile", "tile = tile + 0"),
    ),
    bug(
        "order-last-group-as-large",
        3,
        TILE,
        "test_ordered_groups",
        "the last group of heads is taken to be as large as the others",
        ("size = tl.minimum(group, heads - first)", "size = group + 0 * heads"),
    ),
    bug(
        "order-place-in-grid",
        3,
        TILE,
        "test_ordered_groups",
        "the place within the group is counted from the grid's start",
        ("place = pid - first * tiles", "place = pid"),
    ),
    bug(
        "order-twin-shortest-first",
        3,
        ORDER,
        "test_program_order_worked_examples",
        "the twin in Python is not reversed",
        ("reversed(range(tiles)) if causal else range(tiles)", "range(tiles)"),
    ),
    bug(
        "order-twin-heads-outside",
        3,
        ORDER,
        "test_program_order_worked_examples",
        "within a group all tiles of a head come one after the other",
        (
            "order += [(head, tile) for head in members]",
            "order += [(head, tile) for head in members]\n    order.sort()",
        ),
    ),
    bug(
        "order-32-bit",
        3,
        "_ordered_kernel",
        "test_ordered_offsets_beyond_32_bits",
        "head times rows times D wraps past 2**31",
        ("bh = bh.to(tl.int64)", "bh = bh.to(tl.int32)"),
    ),
    bug(
        "makespan-in-turn",
        3,
        "makespan",
        "test_makespan",
        "pieces are dealt out in turn and not to who is free first",
        ("worker = free.index(min(free))", "worker = len(free) and int(sum(1 for _ in free)) - 1"),
    ),
    bug(
        "makespan-mean",
        3,
        "makespan",
        "test_makespan",
        "the mean is taken, and a card is done when its last program is",
        ("return max(free)", "return sum(free) / slots"),
    ),
    bug(
        "group-empty",
        3,
        "heads_per_group",
        "test_heads_per_group",
        "a head too large for the cache makes a group of none",
        (
            "max(1, min(4, cache_bytes // 2 // (2 * S * D * itemsize)))",
            "min(4, cache_bytes // 2 // (2 * S * D * itemsize))",
        ),
    ),
    waste(
        "group-of-all-that-fit",
        3,
        "heads_per_group",
        "test_heads_per_group",
        "as many heads as fit: where rows are short a tile's keys are needed again much later",
        (
            "min(4, cache_bytes // 2 // (2 * S * D * itemsize))",
            "cache_bytes // 2 // (2 * S * D * itemsize)",
        ),
    ),
    waste(
        "order-full-in-groups",
        3,
        "_sizes",
        "test_ordered_groups_heads_when_causal",
        "tiles that are all alike are not computed head by head",
        ("        if causal:\n            group", "        if True:\n            group"),
    ),
    bug(
        "group-keys-only",
        3,
        "heads_per_group",
        "test_heads_per_group",
        "the values are forgotten: they take as much as the keys",
        ("(2 * S * D * itemsize)", "(S * D * itemsize)"),
    ),
    bug(
        "order-grid-axis-1",
        3,
        "attention_ordered",
        "test_ordered_takes_any_number_of_heads",
        "more than 65,535 heads are refused though there is one grid axis only",
        (
            "sizes = _sizes(q, k, heads, group, causal)",
            "sizes = _sizes(q, k, heads, group, causal)\n    _check_grid(heads)",
        ),
    ),
]

LATE, LATE_KEYS = "_late", "_late_keys"
STEP_4 = [
    bug(
        "late-values-of-this-tile",
        4,
        LATE_KEYS,
        "test_tuned",
        "the weights of one tile meet the values of the next (handout section 5)",
        ("_pointers(v_ptr, lo - BLOCK_N, D, BLOCK_N)", "_pointers(v_ptr, lo, D, BLOCK_N)"),
        ("_load(v_ptrs, start_n - BLOCK_N, S, False)", "_load(v_ptrs, start_n, S, True)"),
    ),
    bug(
        "late-alpha-too-early",
        4,
        LATE_KEYS,
        "test_late_score_ranges",
        "acc is rescaled by the wrong tile's alpha, or by none (handout section 5)",
        ("acc * alpha[:, None])", "acc)"),
    ),
    bug(
        "late-tile-twice",
        4,
        LATE,
        "test_tuned",
        "the first tile is counted again by the masked loop",
        ("tl.maximum(full, BLOCK_N)", "full"),
    ),
    bug(
        "late-last-product-missing",
        4,
        LATE,
        "test_tuned",
        "the last tile's weights never meet their values",
        ("return tl.dot(p.to(v.dtype), v, acc * alpha[:, None]), l_i, m_i", "return acc, l_i, m_i"),
    ),
    bug(
        "late-last-unmasked",
        4,
        LATE,
        "test_tuned",
        "values past the end are read: their weight is 0, and 0 times NaN is NaN",
        ("last, D, BLOCK_N), last, S, True)", "last, D, BLOCK_N), last, S, False)"),
    ),
    waste(
        "late-product-first",
        4,
        LATE_KEYS,
        "test_late_order_of_products",
        "the product comes before the next scores, which then wait for it (handout section 5)",
        (
            """            s = tl.dot(q, tl.trans(k))  # (BLOCK_M, BLOCK_N)
            v = _load(v_ptrs, start_n - BLOCK_N, S, False)  # (BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
""",
            """            v = _load(v_ptrs, start_n - BLOCK_N, S, False)  # (BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            s = tl.dot(q, tl.trans(k))  # (BLOCK_M, BLOCK_N)
""",
        ),
    ),
    waste(
        "late-product-after-softmax",
        4,
        LATE_KEYS,
        "test_late_order_of_products",
        "the product comes after the next softmax: nothing runs meanwhile (handout section 5)",
        (
            """            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            if MASKED:""",
            """            old_p, old_alpha = p, alpha
            if MASKED:""",
        ),
        (
            "_weights(s, m_i, l_i, slope, steep)\n",
            "_weights(s, m_i, l_i, slope, steep)\n"
            "            acc = tl.dot(old_p.to(v.dtype), v, acc * old_alpha[:, None])\n",
        ),
    ),
    waste(
        "late-loads-masked",
        4,
        LATE_KEYS,
        "test_late_order_of_products",
        "values are loaded with a mask, and a tile that has another behind it is whole",
        ("_load(v_ptrs, start_n - BLOCK_N, S, False)", "_load(v_ptrs, start_n - BLOCK_N, S, True)"),
    ),
    bug(
        "shared-all-stages",
        4,
        "shared_bytes",
        "test_shared_bytes_worked_examples",
        "mma.sync is counted like wgmma, which needs one tile more (handout section 5)",
        ("2 * n * (stages - 1)", "2 * n * stages"),
    ),
    bug(
        "shared-values-forgotten",
        4,
        "shared_bytes",
        "test_shared_bytes_worked_examples",
        "the keys are counted and the values are not",
        ("(m + 2 * n * stages", "(m + n * stages"),
    ),
    bug(
        "shared-late-forgotten",
        4,
        "shared_bytes",
        "test_shared_bytes_worked_examples",
        "the value tile that waits longer is not counted",
        (" + (n if config.late else 0)", ""),
    ),
    bug(
        "occupancy-no-reserve",
        4,
        "occupancy",
        "test_occupancy",
        "the 1024 bytes that the driver takes of each program are forgotten",
        ("memory // (shared + 1024)", "memory // max(shared, 1)"),
    ),
    bug(
        "occupancy-registers-exact",
        4,
        "occupancy",
        "test_occupancy",
        "registers are handed out in pieces of 256 a warp",
        ("(triton.cdiv(registers * 32, 256) * 256 * num_warps)", "(registers * 32 * num_warps)"),
    ),
    bug(
        "occupancy-no-block-limit",
        4,
        "occupancy",
        "test_occupancy",
        "there is a limit to the programs themselves",
        (", warps // num_warps, blocks)", ", warps // num_warps)"),
    ),
    bug(
        "estimate-without-acc",
        4,
        "register_estimate",
        "test_register_estimate",
        "acc is forgotten",
        ("config.block_m * (D + ", "config.block_m * ("),
    ),
    bug(
        "fits-any-registers",
        4,
        "fits",
        "test_fits_counts_registers_too",
        "configurations are kept that are sure to spill (handout section 5)",
        ("return enough and register_estimate(config, D) <= 255", "return enough"),
    ),
    bug(
        "estimate-without-late-p",
        4,
        "register_estimate",
        "test_register_estimate",
        "p of the tile before is forgotten",
        ("config.block_n * (2 if config.late else 1))", "config.block_n)"),
    ),
    bug(
        "shared-wgmma-below-64-rows",
        4,
        "shared_bytes",
        "test_shared_bytes_worked_examples",
        "wgmma's formula for tiles of fewer than 64 rows (handout section 5)",
        ("if arch == 90 and m >= 64:", "if arch == 90:"),
    ),
    bug(
        "heads-of-half",
        3,
        "heads_per_group",
        "test_heads_per_group",
        "two bytes an element, whatever the dtype",
        ("2 * S * D * itemsize", "2 * S * D * 2"),
    ),
    bug(
        "prune-for-one-head-dim",
        4,
        "prune",
        "test_prune_leaves_what_the_card_can_launch",
        "every head dim is pruned as 128",
        ("fits(_config_of(c), D, ", "fits(_config_of(c), 128, "),
    ),
    bug(
        "fits-any-shared",
        4,
        "fits",
        "test_defaults_and_candidates_fit",
        "configurations are kept that the card cannot launch (handout section 5)",
        ("return enough and ", "return "),
    ),
    bug(
        "prune-to-nothing",
        4,
        "prune",
        "test_prune_leaves_what_the_card_can_launch",
        "nothing is left to try, and the tuner fails",
        ("kept or [_triton_config(default_config(D, arch))]", "kept"),
    ),
    bug(
        "prune-half-sizes",
        4,
        "prune",
        "test_prune_leaves_what_the_card_can_launch",
        "elements are taken for bytes, and half of what the kernel needs is counted",
        ("q.element_size()", "1"),
    ),
    bug(
        "prune-one-card",
        4,
        "prune",
        "test_prune_asks_the_card",
        "every card is pruned as one of 101,376 bytes",
        ("arch = _arch(q.device)", "arch = 86"),
    ),
    Mutant(
        "default-spills",
        "waste",
        4,
        "a default is too large for its warps, and registers spill (handout section 5)",
        "test_tuned_defaults_compile_for_every_card",
        append="""
def default_config(D, arch, *_):
    return Config(128, 128, 4, 2)
""",
    ),
    bug(
        "tuned-times-the-interpreter",
        4,
        "attention_tuned",
        "test_tuned_never_times_the_interpreter",
        "the interpreter's times choose the tiles",
        (" and not triton.knobs.runtime.interpret", ""),
    ),
    bug(
        "tuned-one-key",
        4,
        "",
        "test_autotuner_key",
        "the winner of the first length is used for all (handout section 5)",
        ('key=["bucket", "D", "CAUSAL"]', 'key=["D"]'),
    ),
    waste(
        "tuned-every-length",
        4,
        "_sizes",
        "test_bucket_is_a_power_of_two",
        "there is a search for every single length",
        ("max(16, triton.next_power_of_2(T))", "T"),
    ),
]

STEP_5 = [
    bug(
        "tma-next-head",
        5,
        "",
        "test_tma_other_heads_unread",
        "a descriptor is of rank 2, all rows: a head's last tile has rows of the next (section 6)",
        ("[B * H, R, C], [R * C, C, 1], [1, rows", "[B * H * R, C], [C, 1], [rows"),
        ("desc.load([bh, row, column]).reshape(ROWS, COLUMNS)", "desc.load([row, column])"),
        ("_fetch(q_desc, bh, row, ", "_fetch(q_desc, bh, bh * T + row, "),
        (
            """_fetch(k_desc, bh, start_n, 0, BLOCK_N, D, ON_HOST)  # (BLOCK_N, D)
            v = _fetch(v_desc, bh, start_n, """,
            """_fetch(k_desc, bh, bh * S + start_n, 0, BLOCK_N, D, ON_HOST)  # (BLOCK_N, D)
            v = _fetch(v_desc, bh, bh * S + start_n, """,
        ),
    ),
    bug(
        "tma-specialised-next-head",
        5,
        "_tma_kernel",
        "test_tma_specialised_form_other_heads_unread",
        "a descriptor made in the kernel ends with the last head: the next one's rows are read",
        ("v_desc + head * S * D, [S, D]", "v_desc + head * S * D, [(heads - bh) * S, D]"),
    ),
    bug(
        "tma-specialised-unmasked",
        5,
        "_tma_kernel",
        "test_tma_warp_specialised_form",
        "the one loop of the specialised form has no mask",
        ("CAUSAL or RAGGED, ON_HOST", "False, ON_HOST"),
    ),
    bug(
        "tma-ragged-forgotten",
        5,
        "attention_tma",
        "test_tma_warp_specialised_form",
        "keys past the end are 0, not hidden: their score of 0 counts",
        ("RAGGED=S % block_n != 0", "RAGGED=False"),
    ),
    bug(
        "tma-acc-not-rescaled",
        5,
        "_tma_keys",
        "test_tma_score_ranges",
        "acc is not rescaled as the maximum grows",
        ("acc * alpha[:, None])", "acc)"),
    ),
    bug(
        "tma-silent-fallback",
        5,
        "attention_tma",
        "test_tma_rejects",
        "warp specialisation is asked for where Triton silently leaves it out",
        ("if warp_specialize and not can:", "if False:"),
    ),
    bug(
        "tma-32-bit",
        5,
        "_tma_kernel",
        "test_tma_offsets_beyond_32_bits",
        "head times rows times D wraps past 2**31",
        ("head = bh.to(tl.int64)", "head = bh.to(tl.int32)"),
    ),
    waste(
        "tma-no-order",
        5,
        "_tma_kernel",
        "test_tma_order",
        "tiles come head by head and the short ones first (handout section 4)",
        (
            "_tile_of_program(tl.program_id(0), tiles, heads, group, CAUSAL)",
            "tl.program_id(0) // tiles, tl.program_id(0) % tiles",
        ),
    ),
    waste(
        "tma-all-masked",
        5,
        "_tma_keys",
        "test_tma_masks_only_where_needed",
        "every tile is masked, whole ones, too (handout section 3)",
        ("elif start_n >= full:", "elif start_n >= 0:"),
    ),
    waste(
        "tma-specialised-all-masked",
        5,
        "_tma_kernel",
        "test_tma_specialised_form_masks_all_or_nothing",
        "the one loop of the specialised form masks where no tile needs it (handout section 6)",
        ("CAUSAL or RAGGED, ON_HOST", "True, ON_HOST"),
    ),
    bug(
        "tma-masks-one-tile-late",
        5,
        "_tma_keys",
        "test_tma",
        "the first tile that a mask cuts is not masked",
        ("elif start_n >= full:", "elif start_n > full:"),
    ),
    waste(
        "tma-two-loops",
        5,
        "_tma_kernel",
        "test_tma_compiles_for_hopper",
        "whole tiles in one loop, the others in another: its copies start when the first has ended",
        (
            """offs_m, full, hi, S, slope,
                                  steep, D, BLOCK_N, CAUSAL, CAUSAL or RAGGED, ON_HOST,
                                  WARP_SPECIALIZE)
""",
            """offs_m, full, full, S, slope,
                                  steep, D, BLOCK_N, CAUSAL, False, ON_HOST, False)
        for start_n in range(full, hi, BLOCK_N):
            k = _fetch(k_desc, bh, start_n, 0, BLOCK_N, D, ON_HOST)
            v = _fetch(v_desc, bh, start_n, 0, BLOCK_N, D, ON_HOST)
            s = _hide(tl.dot(q, tl.trans(k)), start_n, offs_m, S, BLOCK_N, CAUSAL)
            p, alpha, l_i, m_i = _weights(s, m_i, l_i, slope, steep)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
""",
        ),
    ),
    waste(
        "tma-not-specialised",
        5,
        "_tma_keys",
        "test_tma_warp_specialised_compiles_for_hopper",
        "warp_specialize does not reach the loop: 4 warps do everything (handout section 6)",
        (", warp_specialize=WARP_SPECIALIZE", ""),
    ),
    waste(
        "tma-descriptors-by-program",
        5,
        "attention_tma",
        "test_tma_makes_its_descriptors_on_the_host",
        "each program makes its descriptors, as the specialised form has to (handout section 6)",
        ("on_host = _has_copy_engine(q.device) and not specialised", "on_host = False"),
    ),
    waste(
        "tma-descriptors-of-host-everywhere",
        5,
        "_has_copy_engine",
        "test_tma_compiles_for_every_card",
        "cards without a copy engine get descriptors of the host: Triton loads 2 bytes at a time",
        ("[0] >= 9", "[0] >= 8"),
    ),
    cheat(
        "tma-by-pointers",
        5,
        "test_tma_loads_by_descriptor",
        "there is no descriptor at all: it is step 3 again",
        """
def attention_tma(q, k, v, causal=False, scale=None, warp_specialize=None, **tiles):
    return attention_ordered(q, k, v, causal, scale, **tiles)
""",
    ),
]

QUANTISE, FP8 = "_quantise_kernel", "_fp8_keys"
STEP_6 = [
    bug(
        "quantise-zero-token",
        6,
        QUANTISE,
        "test_quantise_zeros_and_strides",
        "a token of zeros has a scale of 0, and 0 / 0 is NaN",
        ("tl.where(top > 0, top / TOP, 1.0)", "top / TOP"),
    ),
    bug(
        "quantise-240",
        6,
        "",
        "test_quantise_tokens",
        "the largest number is taken to be 240: that is another e4m3, of other makers",
        ("E4M3_MAX = 448.0", "E4M3_MAX = 240.0"),
    ),
    bug(
        "quantise-signed-max",
        6,
        QUANTISE,
        "test_quantise_tokens",
        "the largest is taken without its sign removed",
        ("tl.max(tl.abs(x.to(tl.float32)), axis=1)", "tl.max(x.to(tl.float32), axis=1)"),
    ),
    bug(
        "quantise-padding-unwritten",
        6,
        QUANTISE,
        "test_quantise_channels",
        "columns that pad hold anything, and 0 times NaN is NaN",
        ("mask=exists[:, None] & (c < padded))", "mask=exists[:, None] & (c < cols))"),
    ),
    bug(
        "quantise-keys-in-a-row",
        6,
        QUANTISE,
        "test_quantise_order_of_keys",
        "the tokens of a channel are written one after the other (handout section 7)",
        ("source = _in_lanes(c)", "source = c + 0"),
    ),
    bug(
        "quantise-order-of-places",
        6,
        QUANTISE,
        "test_quantise_order_of_keys",
        "the place to store in is reordered, not the token to load: that is the inverse order",
        ("x_rows + source * stride_xc", "x_rows + c * stride_xc"),
        ("(source < cols)", "(c < cols)"),
        ("tl.store(y_rows + c,", "tl.store(y_rows + source,"),
    ),
    waste(
        "order-pair-and-lane-swapped",
        6,
        "_in_lanes",
        "test_quantise_order_of_keys",
        "pair and lane are swapped, in p and v alike: right, and Triton moves the bytes again",
        ("(R, N // 16, 2, 4, 2)", "(R, N // 16, 4, 2, 2)"),
    ),
    bug(
        "quantise-first-block-only",
        6,
        QUANTISE,
        "test_quantise_channels",
        "the largest is looked for in the first block of columns only",
        ("for start in range(0, cols, BLOCK_C):", "for start in range(0, 1, BLOCK_C):"),
    ),
    bug(
        "quantise-smallest-scale",
        6,
        QUANTISE,
        "test_quantise_any_size",
        "scales end at 1e-6, and a token of small numbers loses them (handout section 7)",
        ("tl.where(top > 0, top / TOP, 1.0)", "tl.maximum(top / TOP, 1e-6)"),
    ),
    bug(
        "quantise-32-bit",
        6,
        QUANTISE,
        "test_quantise_offsets_beyond_32_bits",
        "head times its stride wraps past 2**31",
        ("n = tl.program_id(0).to(tl.int64)", "n = tl.program_id(0)"),
    ),
    bug(
        "quantise-rows-32-bit",
        6,
        QUANTISE,
        "test_quantise_offsets_beyond_32_bits",
        "row times its stride wraps past 2**31",
        ("offs_r.to(tl.int64)[:, None] * stride_xr", "offs_r[:, None] * stride_xr"),
    ),
    bug(
        "quantise-columns-32-bit",
        6,
        QUANTISE,
        "test_quantise_offsets_beyond_32_bits",
        "column times its stride wraps past 2**31",
        (
            """(0, cols, BLOCK_C):
            c = (start + offs_c).to(tl.int64)[None, :]""",
            """(0, cols, BLOCK_C):
            c = (start + offs_c)[None, :]""",
        ),
    ),
    bug(
        "quantise-stores-32-bit",
        6,
        QUANTISE,
        "test_quantise_stores_beyond_32_bits",
        "head times rows times columns of the result wraps past 2**31",
        ("y_ptr + (n * rows + offs_r)", "y_ptr + (n * rows + offs_r).to(tl.int32)"),
    ),
    bug(
        "fp8-limit-unshifted",
        6,
        W,
        "test_fp8_huge_equal_scores",
        "scores count as huge from another size on in p than in lse (handout section 2)",
        ("LIMIT: tl.constexpr = HUGE / 2**SHIFT", "LIMIT: tl.constexpr = HUGE"),
    ),
    bug(
        "fp8-smallest-scale",
        6,
        "_fp8_kernel",
        "test_fp8_scales_of_any_size",
        "scales of the queries end at 1e-6",
        ("slope = q_scale * slope", "slope = tl.maximum(q_scale, 1e-6) * slope"),
    ),
    bug(
        "fp8-32-bit",
        6,
        "_fp8_kernel",
        "test_fp8_offsets_beyond_32_bits",
        "head times rows times D wraps past 2**31",
        ("head = bh.to(tl.int64)", "head = bh.to(tl.int32)"),
    ),
    waste(
        "fp8-no-order",
        6,
        "_fp8_kernel",
        "test_fp8_order",
        "tiles come head by head and the short ones first (handout section 4)",
        (
            "_tile_of_program(tl.program_id(0), tiles, heads, group, CAUSAL)",
            "tl.program_id(0) // tiles, tl.program_id(0) % tiles",
        ),
    ),
    waste(
        "fp8-all-masked",
        6,
        "_fp8_kernel",
        "test_fp8_masks_and_products_only_where_needed",
        "every tile is masked, whole ones, too (handout section 3)",
        ("CAUSAL, False, SHIFT, ON_HOST)", "CAUSAL, True, SHIFT, ON_HOST)"),
    ),
    bug(
        "fp8-keys-in-a-row",
        6,
        FP8,
        "test_fp8_gives_each_key_its_value",
        "v's tokens are in the order of lanes and the columns of p are not (handout section 7)",
        ("_in_lanes(p.to(v.dtype))", "p.to(v.dtype)"),
    ),
    bug(
        "fp8-values-end-with-s",
        6,
        "attend_fp8",
        "test_fp8_gives_each_key_its_value",
        "v ends at S and not at the padded length: of the last 16 places some tokens lie behind S",
        (
            "_descriptor(values, *v_tile)\n",
            "_descriptor(values, *v_tile)\n        sources[1].shape[2] = S\n",
        ),
    ),
    bug(
        "fp8-values-of-first-head",
        6,
        "_fp8_kernel",
        "test_fp8_without_a_copy_engine",
        "v's descriptor begins at the first head, whatever the program's",
        ("v_desc += head * D * P", "v_desc += 0"),
    ),
    bug(
        "fp8-values-of-next-tile",
        6,
        FP8,
        "test_fp8_gives_each_key_its_value",
        "the tile of v begins a block behind that of k",
        ("_fetch(v_desc, bh, 0, start_n, D", "_fetch(v_desc, bh, 0, start_n + BLOCK_N, D"),
    ),
    bug(
        "fp8-shift-counted-twice",
        6,
        "_weights",
        "test_fp8_huge_equal_scores",
        "SHIFT is added to a maximum that is rounded to multiples of 16 (handout section 7)",
        (
            "tl.where(tl.abs(m_new) < HUGE / 2, SHIFT, 0.0)",
            "tl.where(tl.abs(m_new) < HUGE, SHIFT, 0.0)",
        ),
    ),
    waste(
        "fp8-shift-a-factor",
        6,
        W,
        "test_fp8_masks_and_products_only_where_needed",
        "2**SHIFT is a multiplication a score, not a part of the addend (handout section 7)",
        ("(shift - m_new)[:, None]))", "(0.0 - m_new)[:, None])) * 2.0**SHIFT"),
    ),
    bug(
        "fp8-key-scale-missing",
        6,
        FP8,
        "test_fp8_is_attention_of_what_was_quantised",
        "the keys' scales are left out",
        (" * k_scale[None, :]", ""),
    ),
    bug(
        "fp8-key-scale-of-first-tile",
        6,
        FP8,
        "test_fp8_is_attention_of_what_was_quantised",
        "every tile takes the scales of the first one",
        ("k_scale_ptrs += BLOCK_N", "k_scale_ptrs += 0"),
    ),
    bug(
        "fp8-query-scale-missing",
        6,
        "_fp8_kernel",
        "test_fp8_is_attention_of_what_was_quantised",
        "the queries' scales are left out",
        ("slope = q_scale * slope", "slope = q_scale * 0 + slope"),
    ),
    bug(
        "fp8-value-scale-missing",
        6,
        "_fp8_kernel",
        "test_fp8_is_attention_of_what_was_quantised",
        "the values' scales are left out",
        ("acc = acc * v_scale[None, :]", "acc = acc + 0 * v_scale[None, :]"),
    ),
    bug(
        "fp8-shift-left-out",
        6,
        W,
        "test_fp8_is_attention_of_what_was_quantised",
        "_weights is still that of step 1, without SHIFT (handout section 7)",
        ("HUGE / 2**SHIFT", "HUGE"),
        ("(shift - m_new)[:, None]", "(0.0 - m_new)[:, None]"),
    ),
    bug(
        "fp8-no-shift",
        6,
        "",
        "test_fp8_small_weights_do_not_vanish",
        "p is rounded as it is, and small weights become 0 (handout section 7)",
        (
            "p, alpha, l_i, m_i = _weights(s, m_i, l_i, slope, steep, SHIFT)",
            "p, alpha, l_i, m_i = _weights(s, m_i, l_i, slope, steep)",
        ),
        (
            "_store(out_ptr, lse_ptr, acc, l_i, m_i, pid_m, T, slope, steep, D, SHIFT)",
            "_store(out_ptr, lse_ptr, acc, l_i, m_i, pid_m, T, slope, steep, D)",
        ),
    ),
    bug(
        "fp8-shift-in-lse",
        6,
        STORE,
        "test_fp8_is_attention_of_what_was_quantised",
        "the shift of p is still in lse: it is 8 log 2 too large",
        (" - SHIFT * LN2", ""),
    ),
    bug(
        "fp8-shift-in-p-only",
        6,
        FP8,
        "test_fp8_is_attention_of_what_was_quantised",
        "p is shifted and the row sum is not: everything is 256 times too large",
        (
            "_weights(s, m_i, l_i, slope, steep, SHIFT)\n",
            "_weights(s, m_i, l_i, slope, steep)\n            p = p * 2.0**SHIFT\n",
        ),
    ),
    bug(
        "fp8-any-card",
        6,
        "check_e4m3",
        "test_fp8_refuses_cards_without_it",
        "cards without e4m3 are not refused",
        ("if arch < 89:", "if arch < 80:"),
    ),
    bug(
        "fp8-sixteen-keys",
        6,
        "attend_fp8",
        "test_fp8_rejects",
        "16 keys a tile are not refused: the tensor core takes 32 at a time",
        ("if not 32 <= block_n", "if not 16 <= block_n"),
    ),
    bug(
        "fp8-one-scale",
        6,
        "quantise",
        "test_fp8_token_scales_against_one_scale",
        "one scale serves all tokens",
        (
            "return Quantised(values, scales)",
            "top = scales.amax()\n"
            "    values = (values.float() * (scales / top)[..., None]).to(values.dtype)\n"
            "    return Quantised(values, torch.ones_like(scales) * top)",
        ),
    ),
    bug(
        "rmse-mean-of-errors",
        6,
        "rmse",
        "test_rmse",
        "the mean absolute error is taken for the RMSE",
        (".square().mean().sqrt()", ".abs().mean()"),
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5, *STEP_6]
