"""Planted faults of lab 08: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

ONLINE, KERNEL, LAUNCH, ATTEND = "online_attention", "_attention_kernel", "attention", "_attend"
PROJECTED, VARLEN, LAUNCH5, BACKWARD = (
    "projected_attention",
    "_varlen_kernel",
    "varlen_attention",
    "attention_backward",
)


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside, append)


def cheat(id, step, caught_by, teaches, append, *edits, inside=""):
    return Mutant(id, "cheat", step, teaches, caught_by, edits, inside, append)


# ---------------------------------------------------------------- step 1

HIDDEN = "key_positions[:, None, None, None, j0 : j0 + tile] > last"
KEEP_INF = ('m_new.masked_fill(m_new == float("-inf"), 0.0)', "m_new")

STEP_1 = [
    bug(
        "online-top-left",
        1,
        ONLINE,
        "test_online_attention_field_report_offsets",
        "query i stands at position i and not at S - T + i: a decode query sees key 0 only "
        "(handout section 2)",
        ("torch.arange(S - T, S, device=q.device)", "torch.arange(T, device=q.device)"),
    ),
    bug(
        "online-blind-rows",
        1,
        ONLINE,
        "test_online_attention_rows_blind_in_the_first_tiles",
        "a row that has seen nothing yet computes exp(-inf - (-inf)) (handout section 2)",
        KEEP_INF,
    ),
    bug(
        "online-strict",
        1,
        ONLINE,
        "test_online_attention_matches_definition",
        "a query does not see the key at its own position",
        (HIDDEN, HIDDEN.replace(">", ">=")),
    ),
    bug(
        "online-heads-interleaved",
        1,
        ONLINE,
        "test_online_attention_matches_definition",
        "query head h reads key head h % H_kv instead of h // group (handout section 2)",
        (
            "rows = (q.to(dtype) / math.sqrt(D)).reshape(B, H_kv, G * T, D)",
            "rows = q.view(B, G, H_kv, T, D).transpose(1, 2)\n"
            "    rows = (rows.to(dtype) / math.sqrt(D)).reshape(B, H_kv, G * T, D)",
        ),
    ),
    bug(
        "online-not-rescaled",
        1,
        ONLINE,
        "test_online_attention_score_ranges",
        "acc is not rescaled as the maximum grows",
        ("acc = acc * alpha[..., None] + ", "acc = acc + "),
    ),
    bug(
        "online-no-max",
        1,
        ONLINE,
        "test_online_attention_score_ranges",
        "no maximum is subtracted before exp",
        ("torch.maximum(m_i, s.amax(dim=-1))", "torch.zeros_like(m_i)"),
    ),
    bug(
        "online-finite-minus-inf",
        1,
        ONLINE,
        "test_online_attention_score_ranges",
        "hidden scores are a finite number, which real scores lie below",
        ('s = s.masked_fill(hidden, float("-inf"))', "s = s.masked_fill(hidden, -1e4)"),
    ),
    bug(
        "online-positions-of-batch-0",
        1,
        ONLINE,
        "test_online_attention_positions",
        "every batch element uses the positions of the first",
        ("last = query_positions[:, ", "last = query_positions[:1, "),
    ),
    bug(
        "online-keys-by-index",
        1,
        ONLINE,
        "test_online_attention_positions",
        "the mask compares a key's place in memory instead of its position (handout section 2)",
        (HIDDEN, "keys[None, None, None, None, j0 : j0 + tile] > last"),
    ),
    bug(
        "online-value-dim",
        1,
        ONLINE,
        "test_online_attention_value_dim",
        "the output is taken to be as wide as the queries",
        ("torch.zeros(B, H_kv, G, T, DV,", "torch.zeros(B, H_kv, G, T, D,"),
        ("view(B, H, T, DV)", "view(B, H, T, D)"),
    ),
    bug(
        "online-half",
        1,
        ONLINE,
        "test_online_attention_sums_in_float32",
        "statistics and accumulator are in the dtype of q",
        ("torch.float64 if q.dtype == torch.float64 else torch.float32", "q.dtype"),
    ),
    bug(
        "online-scale-missing",
        1,
        ONLINE,
        "test_online_attention_matches_definition",
        "the scores are not scaled by 1/sqrt(D)",
        ("q.to(dtype) / math.sqrt(D)", "q.to(dtype)"),
    ),
    bug(
        "online-accepts-blind-queries",
        1,
        ONLINE,
        "test_online_attention_rejects",
        "a query that sees no key is not refused",
        (
            "if (query_positions.amin(dim=1) < key_positions.amin(dim=1)).any():",
            "if False:",
        ),
    ),
    waste(
        "online-keys-repeated",
        1,
        ONLINE,
        "test_online_attention_work",
        "K and V are repeated for every query head (handout section 2)",
        append="""
_grouped = online_attention


def online_attention(q, k, v, query_positions=None, key_positions=None, tile=16):
    if q.dim() == k.dim() == v.dim() == 4 and k.shape[1] and q.shape[1] % k.shape[1] == 0:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return _grouped(q, k, v, query_positions, key_positions, tile)
""",
    ),
    waste(
        "online-converted-at-once",
        1,
        ONLINE,
        "test_online_attention_work",
        "half K and V are converted to float32 whole, not a tile at a time",
        ("    G = H // H_kv\n", "    G = H // H_kv\n    k, v = k.float(), v.float()\n"),
    ),
    waste(
        "online-one-big-tile",
        1,
        ONLINE,
        "test_online_attention_work",
        "the tile size is ignored: one tile is the whole matrix",
        ("    G = H // H_kv\n", "    G = H // H_kv\n    tile = S\n"),
    ),
    cheat(
        "online-sdpa",
        1,
        "test_online_attention_matches_definition",
        "PyTorch's own attention does the work",
        """
def online_attention(q, k, v, query_positions=None, key_positions=None, tile=16):
    check_qkv(q, k, v, grouped=True, free_value_dim=True)
    T, S, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    mask = _visible(0, T, 0, S, S - T, None, q.device)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
""",
    ),
]

# ---------------------------------------------------------------- step 2

STEP_2 = [
    bug(
        "kernel-heads-interleaved",
        2,
        KERNEL,
        "test_attention_matches_definition",
        "query head h reads key head h % H_kv instead of h // group (handout section 3)",
        (
            "k_ptr + b * stride_kb + h // GROUP * stride_kh",
            "k_ptr + b * stride_kb + h % (H // GROUP) * stride_kh",
        ),
        (
            "v_ptr + b * stride_vb + h // GROUP * stride_vh",
            "v_ptr + b * stride_vb + h % (H // GROUP) * stride_vh",
        ),
    ),
    bug(
        "kernel-group-ignored",
        2,
        KERNEL,
        "test_attention_matches_definition",
        "the group is left out of V's address: head h reads value head h (handout section 3)",
        ("v_ptr + b * stride_vb + h // GROUP * stride_vh", "v_ptr + b * stride_vb + h * stride_vh"),
    ),
    bug(
        "kernel-batch-and-head-mixed-up",
        2,
        KERNEL,
        "test_attention_matches_definition",
        "batch and head are taken from the program id the wrong way round (handout section 3)",
        ("b, h = bh // H, bh % H", "b, h = bh % H, bh // H"),
    ),
    bug(
        "kernel-top-left",
        2,
        KERNEL,
        "test_attention_field_report_offsets",
        "the offset is left out of the mask: a decode query sees key 0 only (handout section 3)",
        ("last = tl.minimum(offset + offs_m, S - 1)", "last = tl.minimum(offs_m, S - 1)"),
    ),
    bug(
        "kernel-offset-ignored",
        2,
        LAUNCH,
        "test_attention_field_report_offsets",
        "the offset is always S - T, whatever the caller says",
        ("offset = _offset(T, S, query_offset, window)", "offset = _offset(T, S, None, window)"),
    ),
    bug(
        "kernel-loop-ends-at-T",
        2,
        KERNEL,
        "test_attention_tiles_and_lengths",
        "the loop ends at the tile's last row, not at that row's position (handout section 3)",
        ("hi = tl.minimum(S, offset + tl.minimum(T,", "hi = tl.minimum(S, 0 + tl.minimum(T,"),
    ),
    bug(
        "kernel-loop-ends-early",
        2,
        KERNEL,
        "test_attention_tiles_and_lengths",
        "the loop ends at the position of the tile's first row (handout section 3)",
        ("tl.minimum(T, (pid_m + 1) * BLOCK_M))", "tl.minimum(T, pid_m * BLOCK_M + 1))"),
    ),
    bug(
        "kernel-padding-keys",
        2,
        KERNEL,
        "test_attention_offsets",
        "keys at or past S count with score 0: an offset beyond S - T lets rows see them "
        "(handout section 3)",
        ("last = tl.minimum(offset + offs_m, S - 1)", "last = offset + offs_m"),
    ),
    bug(
        "kernel-empty-rows",
        2,
        KERNEL,
        "test_attention_offsets",
        "a row that sees no key computes exp(-inf - (-inf)) (handout section 3)",
        ('tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new"),
    ),
    bug(
        "kernel-empty-rows-divided",
        2,
        KERNEL,
        "test_attention_offsets",
        "a row that sees no key is divided by a sum of 0 (handout section 3)",
        ("l_i = tl.where(l_i == 0, 1.0, l_i)", "l_i = l_i + 0"),
    ),
    bug(
        "kernel-finite-minus-inf",
        2,
        KERNEL,
        "test_attention_score_ranges",
        "hidden scores are a finite number, which real scores lie below",
        ('last[:, None], s, float("-inf"))', "last[:, None], s, -1e4)"),
    ),
    bug(
        "kernel-strict",
        2,
        KERNEL,
        "test_attention_matches_definition",
        "a query does not see the key at its own position",
        ("cols[None, :] <= last[:, None]", "cols[None, :] < last[:, None]"),
    ),
    bug(
        "kernel-acc-not-rescaled",
        2,
        KERNEL,
        "test_attention_score_ranges",
        "acc is not rescaled as the maximum grows",
        ("acc * alpha[:, None]", "acc"),
    ),
    bug(
        "kernel-no-max",
        2,
        KERNEL,
        "test_attention_score_ranges",
        "no maximum is subtracted before exp",
        ("m_new = tl.maximum(m_i, tl.max(s, axis=1))", "m_new = tl.zeros_like(m_i)"),
    ),
    bug(
        "kernel-scale-hard-coded",
        2,
        KERNEL,
        "test_attention_head_dims",
        "the scale is 1/8, which is right for D = 64 only",
        ('input_precision="ieee") * scale', 'input_precision="ieee") * 0.125'),
    ),
    bug(
        "kernel-half-scores",
        2,
        KERNEL,
        "test_attention_half_scores_do_not_overflow",
        "the scores overflow float16 before they are scaled",
        (
            's = tl.dot(q, tl.trans(k), input_precision="ieee") * scale',
            's = tl.dot(q, tl.trans(k), input_precision="ieee").to(q.dtype).to(tl.float32) * scale',
        ),
    ),
    bug(
        "kernel-half-acc",
        2,
        KERNEL,
        "test_attention_sums_in_float32",
        "the output accumulates in the dtype of v",
        ("acc * alpha[:, None]", "(acc * alpha[:, None]).to(v.dtype).to(tl.float32)"),
    ),
    bug(
        "kernel-lse-base-2",
        2,
        KERNEL,
        "test_attention_field_report_offsets",
        "lse is in base 2: it is 1.4427 times too large (handout section 3)",
        ("m_i + tl.log(l_i)", "(m_i + tl.log(l_i)) * 1.4426950408889634"),
    ),
    bug(
        "kernel-32-bit-heads",
        2,
        KERNEL,
        "test_attention_offsets_beyond_32_bits",
        "a row's number times its stride wraps past 2**31 (handout section 3)",
        ("keys = offs_n.to(tl.int64)[:, None]", "keys = offs_n[:, None]"),
    ),
    bug(
        "kernel-32-bit-rows",
        2,
        KERNEL,
        "test_attention_offsets_beyond_32_bits",
        "a query's number times its stride wraps past 2**31",
        ("rows = offs_m.to(tl.int64)[:, None]", "rows = offs_m[:, None]"),
    ),
    bug(
        "kernel-32-bit-programs",
        2,
        KERNEL,
        "test_attention_offsets_beyond_32_bits",
        "a head's number times its stride wraps past 2**31 (handout section 3)",
        ("bh = (pid // tiles).to(tl.int64)", "bh = pid // tiles"),
    ),
    bug(
        "kernel-v-unmasked",
        2,
        KERNEL,
        "test_attention_matches_definition",
        "V is loaded without a mask, past its last row",
        ("v = tl.load(v_ptrs, mask=cols[:, None] < S, other=0.0)", "v = tl.load(v_ptrs)"),
    ),
    bug(
        "kernel-v-no-other",
        2,
        KERNEL,
        "test_attention_matches_definition",
        "V's padding is undefined, and 0 times NaN is NaN",
        (
            "v = tl.load(v_ptrs, mask=cols[:, None] < S, other=0.0)",
            "v = tl.load(v_ptrs, mask=cols[:, None] < S)",
        ),
    ),
    bug(
        "launch-grid-floor",
        2,
        LAUNCH,
        "test_attention_tiles_and_lengths",
        "the last, ragged tile of queries gets no program",
        ("B * H * triton.cdiv(T, block_m)", "B * H * max(T // block_m, 1)"),
    ),
    waste(
        "kernel-no-tile-skip",
        2,
        KERNEL,
        "test_attention_moves_few_bytes",
        "keys in the future of a whole tile are loaded and masked away (handout section 3)",
        (
            "hi = tl.minimum(S, offset + tl.minimum(T, (pid_m + 1) * BLOCK_M))",
            "hi = S",
        ),
    ),
    waste(
        "kernel-padding-rows-decide",
        2,
        KERNEL,
        "test_attention_moves_few_bytes",
        "the loop runs to the last key of a tile's padding rows, past that of its last real row "
        "(handout section 3)",
        ("tl.minimum(T, (pid_m + 1) * BLOCK_M))", "(pid_m + 1) * BLOCK_M)"),
    ),
    waste(
        "kernel-runs-past-the-end",
        2,
        KERNEL,
        "test_attention_moves_few_bytes",
        "an offset beyond S - T makes the loop run on past the last key (handout section 3)",
        ("hi = tl.minimum(S, offset + ", "hi = (offset + "),
    ),
    waste(
        "launch-keys-repeated",
        2,
        LAUNCH,
        "test_attention_moves_few_bytes",
        "K and V are repeated for every query head (handout section 3)",
        (
            "    out = torch.empty_like(q)",
            "    k, v = (x.repeat_interleave(H // H_kv, dim=1) for x in (k, v))\n"
            "    H_kv = H\n"
            "    out = torch.empty_like(q)",
        ),
    ),
    cheat(
        "attention-cached",
        2,
        "test_attention_follows_its_input",
        "the results are kept between calls",
        """
_fresh, _kept = attention, {}


def attention(q, *args, **kwargs):
    key = q.shape
    if key not in _kept:
        _kept[key] = _fresh(q, *args, **kwargs)
    return _kept[key]
""",
    ),
    cheat(
        "attention-without-a-kernel",
        2,
        "test_attention_is_the_kernels_work",
        "PyTorch operations do the work and no kernel runs",
        """
def attention(q, k, v, query_offset=None, window=None, **config):
    T, S, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    offset = _offset(T, S, query_offset, window)
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    s = q.float() @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~_visible(0, T, 0, S, offset, window, q.device), float("-inf"))
    m = s.amax(dim=-1, keepdim=True)
    p = torch.exp(s - m)
    return (p / p.sum(-1, keepdim=True) @ v).to(q.dtype), (m[..., 0] + p.sum(-1).log())
""",
    ),
]

# ---------------------------------------------------------------- step 3

FIRST = "first = offset + offs_m - window + 1"
STEP_3 = [
    bug(
        "window-one-more",
        3,
        ATTEND,
        "test_window_field_report_off_by_one",
        "the window has W keys before the query instead of W - 1 (handout section 4)",
        (FIRST, "first = offset + offs_m - window"),
        ("tl.maximum(low - window + 1, 0)", "tl.maximum(low - window, 0)"),
    ),
    bug(
        "window-one-less",
        3,
        ATTEND,
        "test_window_field_report_off_by_one",
        "the query itself is not counted: W - 1 keys in all (handout section 4)",
        (FIRST, "first = offset + offs_m - window + 2"),
    ),
    bug(
        "window-nan-trap",
        3,
        ATTEND,
        "test_window_first_tile_wholly_masked",
        "a row's first tile is wholly masked, and exp(-inf - (-inf)) is NaN (handout section 4)",
        ('tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new"),
    ),
    bug(
        "window-mask-missing",
        3,
        ATTEND,
        "test_window_tiles",
        "the boundary tile is loaded from the right key on but not masked (handout section 4)",
        ("(cols[None, :] >= first[:, None]) & ", ""),
    ),
    bug(
        "window-starts-late",
        3,
        ATTEND,
        "test_window_tiles",
        "the loop starts at the window of the tile's last row instead of its first "
        "(handout section 4)",
        ("tl.maximum(low - window + 1, 0)", "tl.maximum(high - window, 0)"),
    ),
    bug(
        "window-full-too-early",
        3,
        ATTEND,
        "test_window_tiles",
        "tiles count as full from the first row's window on, so the later rows see too much "
        "(handout section 4)",
        ("tl.maximum(high - window - lo, 0)", "tl.maximum(low - window + 1 - lo, 0)"),
    ),
    bug(
        "window-full-too-long",
        3,
        ATTEND,
        "test_window_tiles",
        "tiles count as full up to the last row's position, so the earlier rows see the future "
        "(handout section 4)",
        ("tl.minimum(S, low + 1) - full_lo", "tl.minimum(S, high) - full_lo"),
    ),
    bug(
        "window-full-past-the-end",
        3,
        ATTEND,
        "test_window_lengths_and_offsets",
        "a full tile reaches past key S - 1: full tiles carry no mask (handout section 4)",
        ("tl.minimum(S, low + 1) - full_lo, 0)", "low + BLOCK_N - full_lo, 0)"),
    ),
    bug(
        "window-loops-overlap",
        3,
        ATTEND,
        "test_window_tiles",
        "with a window narrower than a tile the full tiles end before they begin, and those after "
        "them come twice (handout section 4)",
        (
            "tl.maximum(tl.minimum(S, low + 1) - full_lo, 0) // BLOCK_N",
            "(tl.minimum(S, low + 1) - full_lo) // BLOCK_N",
        ),
    ),
    bug(
        "window-tiles-after-lost",
        3,
        ATTEND,
        "test_window_tiles",
        "the tiles that the diagonal cuts start where those that the window cuts end "
        "(handout section 4)",
        ("after = full_hi + (i - below) * EDGE", "after = lo + i * EDGE"),
    ),
    waste(
        "window-last-tile-early",
        3,
        ATTEND,
        "test_window_moves_few_bytes",
        "the loop runs one tile past the last visible key, and masks it away",
        ("else below + above)", "else below + above + 1)"),
    ),
    bug(
        "window-pointers-from-0",
        3,
        ATTEND,
        "test_window_tiles",
        "K and V are read from key 0 on while the mask counts from lo (handout section 4)",
        ("keys = cols.to(tl.int64)[:, None]", "keys = (cols - lo).to(tl.int64)[:, None]"),
    ),
    bug(
        "window-offset-ignored",
        3,
        ATTEND,
        "test_window_lengths_and_offsets",
        "the window starts by row number, not by position",
        (FIRST, "first = offs_m - window + 1"),
    ),
    bug(
        "window-huge-scores",
        3,
        ATTEND,
        "test_window_huge_equal_scores",
        "scores and maximum are scaled apart and rounded apart, so that huge equal scores differ "
        "(handout section 4)",
        (
            "p = tl.exp2((s - m_ref[:, None]) * scale_log2)",
            "p = tl.exp2(s * scale_log2 - (m_ref * (scale_log2 * 1.0000001))[:, None])",
        ),
    ),
    bug(
        "window-base-e",
        3,
        ATTEND,
        "test_window_matches_definition",
        "exp2 is taken of scores that are not multiplied by log2(e) (handout section 4)",
        ("scale_log2 = scale * 1.4426950408889634", "scale_log2 = scale * 1.0"),
    ),
    bug(
        "window-half-acc",
        3,
        ATTEND,
        "test_window_sums_in_float32",
        "the output accumulates in the dtype of v",
        ("acc * alpha[:, None]", "(acc * alpha[:, None]).to(v.dtype).to(tl.float32)"),
    ),
    bug(
        "window-half-sum",
        3,
        ATTEND,
        "test_window_sums_in_float32",
        "the row sum is kept in the dtype of v",
        (
            "l_i = l_i * alpha + tl.sum(p, axis=1)",
            "l_i = (l_i * alpha + tl.sum(p, axis=1)).to(v.dtype).to(tl.float32)",
        ),
    ),
    bug(
        "window-lse-unscaled",
        3,
        ATTEND,
        "test_window_matches_definition",
        "lse holds the unscaled maximum (handout section 4)",
        ("m_i * scale + tl.log(l_i)", "m_i + tl.log(l_i)"),
    ),
    bug(
        "window-lse-base-2",
        3,
        ATTEND,
        "test_window_field_report_off_by_one",
        "lse is in base 2: it is 1.4427 times too large (handout section 4)",
        ("m_i * scale + tl.log(l_i)", "m_i * scale_log2 + tl.log2(l_i)"),
    ),
    bug(
        "window-32-bit-keys",
        3,
        ATTEND,
        "test_window_offsets_beyond_32_bits",
        "a key's number times its stride wraps past 2**31",
        ("keys = cols.to(tl.int64)[:, None]", "keys = cols[:, None]"),
    ),
    bug(
        "window-0-is-none",
        3,
        "_offset",
        "test_window_rejects",
        "a window of 0 or below is taken for no limit (handout section 4)",
        ('("window", window, 1)', '("window", window, -(2**31))'),
    ),
    waste(
        "window-not-skipped",
        3,
        ATTEND,
        "test_window_bytes_grow_with_T_times_W",
        "tiles before the window are loaded and masked away (handout section 4)",
        ("tl.maximum(low - window + 1, 0)", "0"),
    ),
    waste(
        "window-runs-past-the-end",
        3,
        ATTEND,
        "test_window_moves_few_bytes",
        "tiles past the last key, where a large offset puts the window, are computed and masked",
        ("hi = tl.minimum(S, high)", "hi = high"),
    ),
    waste(
        "window-one-tile-more",
        3,
        ATTEND,
        "test_window_moves_few_bytes",
        "a tile before the window's first is loaded",
        ("tl.maximum(low - window + 1, 0)", "tl.maximum(low - window - BLOCK_N + 1, 0)"),
    ),
    bug(
        "window-ignored",
        3,
        LAUNCH,
        "test_window_matches_definition",
        "the window is checked and then ignored",
        ("if window is not None:\n        kernel", "if False:\n        kernel"),
    ),
    bug(
        "window-cut-tiles-apart",
        3,
        ATTEND,
        "test_window_wide_tiles",
        "tiles that the window cuts are 64 keys wide and begin 128 apart (handout section 4)",
        (
            "tl.where(i < below, lo + i * EDGE, after)",
            "tl.where(i < below, lo + i * BLOCK_N, after)",
        ),
    ),
    bug(
        "window-full-tiles-overlap",
        3,
        ATTEND,
        "test_window_wide_tiles",
        "full tiles of 128 keys begin 64 apart",
        ("full_lo + i * BLOCK_N", "full_lo + i * EDGE"),
    ),
    waste(
        "window-cut-tiles-wide",
        3,
        ATTEND,
        "test_window_cut_tiles_are_narrow",
        "tiles that are cut are as wide as full ones (handout section 4)",
        ("min(BLOCK_N, 64)", "BLOCK_N"),
    ),
    bug(
        "window-descriptor-first-head",
        3,
        ATTEND,
        "test_window_matches_definition",
        "full tiles of K come from head 0, whatever the query's",
        ("k_desc.load([b, kv_head,", "k_desc.load([b, 0,"),
    ),
    bug(
        "window-descriptor-first-batch",
        3,
        ATTEND,
        "test_window_matches_definition",
        "full tiles of V come from the first element of the batch",
        ("v_desc.load([b, kv_head,", "v_desc.load([0, kv_head,"),
    ),
    bug(
        "window-descriptor-misaligned",
        3,
        "_descriptor",
        "test_window_half_at_any_address",
        "a descriptor is made of rows that do not begin at multiples of 16 bytes",
        ("0 in places or any(place % 16 for place in places)", "False"),
    ),
]

# ---------------------------------------------------------------- step 4

STEP_4 = [
    bug(
        "strides-k-for-v",
        4,
        KERNEL,
        "test_layouts",
        "V is read with K's strides (handout section 5)",
        (
            "v_ptr + b * stride_vb + h // GROUP * stride_vh",
            "v_ptr + b * stride_kb + h // GROUP * stride_kh",
        ),
        ("v_ptrs = v_head + keys * stride_vs", "v_ptrs = v_head + keys * stride_ks"),
        ("v_ptrs += BLOCK_N * stride_vs", "v_ptrs += BLOCK_N * stride_ks"),
    ),
    bug(
        "strides-window-k-for-v",
        4,
        ATTEND,
        "test_layouts",
        "under a window V's rows are taken to be as far apart as K's (handout section 5)",
        ("v_ptr + keys * stride_vs", "v_ptr + keys * stride_ks"),
    ),
    bug(
        "strides-d-for-row",
        4,
        KERNEL,
        "test_layouts",
        "queries are taken to be D apart (handout section 5)",
        ("h * stride_qh + rows * stride_qt", "h * stride_qh + rows * D"),
    ),
    bug(
        "strides-out-as-q",
        4,
        KERNEL,
        "test_layouts",
        "the output is stored with q's strides (handout section 5)",
        (
            "b * stride_ob + h * stride_oh + rows * stride_ot",
            "b * stride_qb + h * stride_qh + rows * stride_qt",
        ),
    ),
    bug(
        "strides-columns",
        4,
        "_check_kernel",
        "test_layouts_rejects",
        "a tensor whose elements along D are not adjacent is read as if they were",
        ("if x.stride(-1) != 1:", "if False:"),
    ),
    bug(
        "projected-order",
        4,
        PROJECTED,
        "test_projected_matches_definition",
        "the heads of x are taken to be keys, queries, values (handout section 5)",
        (
            "q, k, v = by_head.split((heads, kv_heads, kv_heads), dim=1)",
            "k, q, v = by_head.split((kv_heads, heads, kv_heads), dim=1)",
        ),
    ),
    bug(
        "projected-view",
        4,
        PROJECTED,
        "test_projected_matches_definition",
        "(B, T, H, D) is viewed as (B, H, T, D) without a transpose (handout section 5)",
        (
            "x.unflatten(2, (heads + 2 * kv_heads, -1)).transpose(1, 2)",
            "x.reshape(x.shape[0], heads + 2 * kv_heads, x.shape[1], -1)",
        ),
    ),
    bug(
        "projected-out-by-head",
        4,
        PROJECTED,
        "test_projected_matches_definition",
        "the output is flattened by head instead of by token (handout section 5)",
        ("out.transpose(1, 2).flatten(2)", "out.reshape(x.shape[0], x.shape[1], -1)"),
    ),
    bug(
        "projected-window-lost",
        4,
        PROJECTED,
        "test_projected_matches_definition",
        "the window is not passed on",
        (
            "attention(q, k, v, query_offset, window, **tiles)",
            "attention(q, k, v, query_offset, **tiles)",
        ),
    ),
    bug(
        "projected-tiles-lost",
        4,
        PROJECTED,
        "test_layouts_rejects",
        "the tile sizes are not passed on",
        (
            "attention(q, k, v, query_offset, window, **tiles)",
            "attention(q, k, v, query_offset, window)",
        ),
    ),
    bug(
        "projected-accepts-anything",
        4,
        PROJECTED,
        "test_layouts_rejects",
        "numbers of heads below 1 are not refused",
        ("if type(n) is not int or n < 1:", "if False:"),
    ),
    waste(
        "launch-contiguous",
        4,
        LAUNCH,
        "test_projected_copies_nothing",
        "q, k and v are made contiguous first (handout section 5)",
        (
            "    out = torch.empty_like(q)",
            "    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()\n"
            "    out = torch.empty_like(q)",
        ),
    ),
    waste(
        "launch-out-contiguous",
        4,
        LAUNCH,
        "test_projected_copies_nothing",
        "the output lies in memory by head, and the last line has to copy it (handout section 5)",
        ("torch.empty_like(q)", "torch.empty_like(q, memory_format=torch.contiguous_format)"),
    ),
]

# ---------------------------------------------------------------- step 5

STEP_5 = [
    bug(
        "varlen-no-exit",
        5,
        VARLEN,
        "test_varlen_moves_few_bytes",
        "tiles past the end of their sequence do work as well (handout section 6)",
        ("if pid_m * BLOCK_M < T:", "if pid_m * BLOCK_M < T + BLOCK_M * 64:"),
    ),
    bug(
        "varlen-end-of-the-batch",
        5,
        VARLEN,
        "test_varlen_sequences_are_apart",
        "a sequence's keys run on into the next sequence (handout section 6)",
        (
            "S = (tl.load(cu_k_ptr + n + 1) - k_start).to(tl.int32)",
            "S = (tl.load(cu_k_ptr + n + 1) - k_start + 8).to(tl.int32)",
        ),
    ),
    bug(
        "varlen-keys-from-queries",
        5,
        VARLEN,
        "test_varlen_matches_definition",
        "the first key is taken from the offsets of the queries (handout section 6)",
        ("k_start = tl.load(cu_k_ptr + n)", "k_start = tl.load(cu_q_ptr + n)"),
    ),
    bug(
        "varlen-top-left",
        5,
        VARLEN,
        "test_varlen_matches_definition",
        "the first query of a sequence stands at its first key, not the last at its last "
        "(handout section 6)",
        ("offset = S - T if CAUSAL else S", "offset = 0 * (S - T) if CAUSAL else S"),
    ),
    bug(
        "varlen-always-causal",
        5,
        VARLEN,
        "test_varlen_matches_definition",
        "causal=False is ignored",
        ("offset = S - T if CAUSAL else S", "offset = S - T"),
    ),
    bug(
        "varlen-lse-by-token",
        5,
        VARLEN,
        "test_varlen_matches_definition",
        "lse is addressed as (total, H) instead of (H, total) (handout section 6)",
        ("lse_ptr + h * stride_lh + q_start", "lse_ptr + q_start * H + h * T"),
    ),
    bug(
        "varlen-heads",
        5,
        VARLEN,
        "test_varlen_matches_definition",
        "the group is left out of K's address",
        (
            "k_start * stride_ks + h // GROUP * stride_kh",
            "k_start * stride_ks + h % (H // GROUP) * stride_kh",
        ),
    ),
    bug(
        "varlen-strides-k-for-v",
        5,
        VARLEN,
        "test_varlen_layouts",
        "V's tokens are taken to be as far apart as K's",
        ("v_ptr + k_start * stride_vs", "v_ptr + k_start * stride_ks"),
    ),
    bug(
        "varlen-32-bit-tokens",
        5,
        VARLEN,
        "test_varlen_offsets_beyond_32_bits",
        "a token's number times its stride wraps past 2**31 (handout section 6)",
        ("k_start = tl.load(cu_k_ptr + n).to(tl.int64)", "k_start = tl.load(cu_k_ptr + n)"),
    ),
    bug(
        "varlen-32-bit-heads",
        5,
        VARLEN,
        "test_varlen_offsets_beyond_32_bits",
        "a head's number times its stride wraps past 2**31 (handout section 6)",
        ("h = (pid // tiles % H).to(tl.int64)", "h = pid // tiles % H"),
    ),
    bug(
        "varlen-spare-tokens",
        5,
        LAUNCH5,
        "test_varlen_spare_tokens",
        "rows of tokens beyond the last offset are never written (handout section 6)",
        ("out[starts_q[-1] :] = 0.0", "pass"),
    ),
    bug(
        "varlen-offsets-unchecked",
        5,
        "_check_offsets",
        "test_varlen_rejects",
        "offsets that fall are not refused (handout section 6)",
        (" or starts != sorted(starts)", ""),
    ),
    bug(
        "varlen-past-the-end",
        5,
        "_check_offsets",
        "test_varlen_rejects",
        "offsets beyond the last token are not refused",
        (" or starts[-1] > len(x)", ""),
    ),
    bug(
        "varlen-window-lost",
        5,
        LAUNCH5,
        "test_varlen_window",
        "the window is not passed on",
        ("window or NO_WINDOW", "NO_WINDOW"),
    ),
    waste(
        "varlen-padded",
        5,
        LAUNCH5,
        "test_varlen_moves_few_bytes",
        "sequences are padded to the longest one (handout section 6)",
        append="""
_packed = varlen_attention


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, **kwargs):
    out = _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, **kwargs)
    lengths = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).tolist()
    padded = k.new_zeros(len(lengths), max(lengths), *k.shape[1:])
    for n, (start, length) in enumerate(zip(cu_seqlens_k.tolist(), lengths)):
        padded[n, :length] = k[start : start + length]
    return out
""",
    ),
    cheat(
        "varlen-loop-of-calls",
        5,
        "test_varlen_is_the_kernels_work",
        "PyTorch operations do the work, sequence by sequence",
        """
_launch = varlen_attention


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, window=None, **config):
    _launch(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, **config)
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), float("-inf")).float()
    cq, ck = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    group = q.shape[1] // k.shape[1]
    for a, b, c, d in zip(cq, cq[1:], ck, ck[1:]):
        if b > a and d > c:
            s = torch.einsum("thd,shd->hts", q[a:b], k[c:d].repeat_interleave(group, dim=1))
            s = s.float() / math.sqrt(q.shape[-1])
            if causal:
                hidden = ~_visible(0, b - a, 0, d - c, (d - c) - (b - a), window, q.device)
                s = s.masked_fill(hidden, -1e30)
            m = s.amax(-1, keepdim=True)
            p = torch.exp(s - m)
            lse[:, a:b] = m[..., 0] + p.sum(-1).log()
            p = (p / p.sum(-1, keepdim=True)).to(v.dtype)
            out[a:b] = torch.einsum("hts,shd->thd", p, v[c:d].repeat_interleave(group, dim=1))
    return out, lse
""",
    ),
]

# ---------------------------------------------------------------- step 6

STEP_6 = [
    bug(
        "backward-one-head-of-the-group",
        6,
        BACKWARD,
        "test_backward_groups",
        "a key head gets the gradient of one query head of its group only (handout section 7)",
        (
            "dv[:, :, j0:j1] = p_rows.transpose(-2, -1) @ do_rows",
            "dv[:, :, j0:j1] = p_rows[:, :, :n].transpose(-2, -1) @ do_rows[:, :, :n]",
        ),
    ),
    bug(
        "backward-group-mean",
        6,
        BACKWARD,
        "test_backward_groups",
        "gradients of a group are averaged instead of summed (handout section 7)",
        (
            "dk[:, :, j0:j1] = ds_rows.transpose(-2, -1) @ q_rows",
            "dk[:, :, j0:j1] = ds_rows.transpose(-2, -1) @ q_rows / G",
        ),
    ),
    bug(
        "backward-no-window",
        6,
        BACKWARD,
        "test_backward_matches_autograd",
        "the window is missing in the backward: exp(s - lse) is not 0 for hidden keys "
        "(handout section 7)",
        ("j0, j1, query_offset, window, q.device", "j0, j1, query_offset, None, q.device"),
    ),
    bug(
        "backward-no-mask",
        6,
        BACKWARD,
        "test_backward_matches_autograd",
        "nothing is hidden in the backward (handout section 7)",
        (".masked_fill(~visible, 0.0)", ""),
    ),
    bug(
        "backward-empty-rows",
        6,
        BACKWARD,
        "test_backward_offsets_and_empty_rows",
        "rows without a key take part, and from their scores -inf their lse -inf is subtracted "
        "(handout section 7)",
        ("i0 = min(max(j0 - query_offset, 0), T)", "i0 = 0"),
        (
            "p = torch.exp(s - lse[:, :, i0:i1, None]).masked_fill(~visible, 0.0)",
            's = s.masked_fill(~visible, float("-inf"))\n'
            "        p = torch.exp(s - lse[:, :, i0:i1, None])",
        ),
    ),
    bug(
        "backward-offset-ignored",
        6,
        BACKWARD,
        "test_backward_offsets_and_empty_rows",
        "queries before row j0, not before position j0, are left out (handout section 7)",
        ("i0 = min(max(j0 - query_offset, 0), T)", "i0 = min(j0, T)"),
    ),
    bug(
        "backward-window-short",
        6,
        BACKWARD,
        "test_backward_matches_autograd",
        "the last queries that see a tile are left out: its last key, not its first, decides "
        "(handout section 7)",
        ("min(j1 - 1 + window - query_offset, T)", "min(j0 + window - query_offset, T)"),
    ),
    bug(
        "backward-dq-overwritten",
        6,
        BACKWARD,
        "test_backward_matches_autograd",
        "dq keeps the last key tile's part only: it must be added to",
        ("dq[:, :, i0:i1] += ", "dq[:, :, i0:i1] = "),
    ),
    bug(
        "backward-no-delta",
        6,
        BACKWARD,
        "test_backward_matches_autograd",
        "delta is left out of dS = P (dP - delta)",
        ("(dp - delta[:, :, i0:i1, None])", "dp"),
    ),
    bug(
        "backward-no-scale",
        6,
        BACKWARD,
        "test_backward_matches_autograd",
        "dq and dk lack the factor 1/sqrt(D)",
        ("(dp - delta[:, :, i0:i1, None]) * scale", "(dp - delta[:, :, i0:i1, None])"),
    ),
    bug(
        "backward-base-2",
        6,
        BACKWARD,
        "test_backward_matches_autograd",
        "lse is taken for a base-2 logarithm",
        ("s - lse[:, :, i0:i1, None]", "s - lse[:, :, i0:i1, None] * math.log(2)"),
    ),
    bug(
        "backward-half",
        6,
        BACKWARD,
        "test_backward_sums_in_float32",
        "the gradients accumulate in the dtype of q",
        ("dq = torch.zeros(q.shape, dtype=dtype, device=q.device)", "dq = torch.zeros_like(q)"),
    ),
    bug(
        "backward-dout-view",
        6,
        BACKWARD,
        "test_backward_layouts",
        "dout is read as if it were contiguous",
        (
            "dout[:, :, i0:i1].to(dtype)",
            "dout.as_strided(out.shape, out.contiguous().stride())[:, :, i0:i1].to(dtype)",
        ),
    ),
    bug(
        "backward-value-dim",
        6,
        BACKWARD,
        "test_backward_value_dim",
        "dout is taken to be as wide as the queries",
        ("reshape(B, H_kv, G * n, DV)", "reshape(B, H_kv, G * n, D)"),
    ),
    waste(
        "backward-window-not-skipped",
        6,
        BACKWARD,
        "test_backward_work_grows_with_T_times_W",
        "queries whose window lies behind a tile take part and are masked away (handout section 7)",
        ("if window is not None:", "if False:"),
    ),
    waste(
        "backward-causal-not-skipped",
        6,
        BACKWARD,
        "test_backward_causal_skips_rows",
        "queries before a tile's first key take part and are masked away (handout section 7)",
        ("i0 = min(max(j0 - query_offset, 0), T)", "i0 = 0"),
    ),
    waste(
        "backward-keys-repeated",
        6,
        BACKWARD,
        "test_backward_shares_keys_within_the_group",
        "K and V are repeated for every query head, and the gradients summed at the end",
        append="""
_grouped = attention_backward


def attention_backward(q, k, v, *args, **kwargs):
    G = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
    dq, dk, dv = _grouped(q, k, v, *args, **kwargs)
    dk, dv = (x.unflatten(1, (-1, G)).sum(dim=2) for x in (dk, dv))
    return dq, dk, dv
""",
    ),
    cheat(
        "backward-autograd",
        6,
        "test_backward_matches_autograd",
        "autograd gives the gradients",
        """
def attention_backward(q, k, v, out, lse, dout, query_offset=None, window=None, tile=16):
    check_qkv(q, k, v, grouped=True, free_value_dim=True)
    check_blocks(tile=tile)
    T, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    offset = _offset(T, S, query_offset, window)
    visible = _visible(0, T, 0, S, offset, window, q.device)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(G, dim=1) for x in leaves[1:])
        s = leaves[0] @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
        p = torch.exp(s - lse[..., None]).masked_fill(~visible, 0.0)
        return torch.autograd.grad(p / p.sum(-1, keepdim=True) @ values, leaves, dout)
""",
    ),
]

# Right in the interpreter, and no kernel at all on a GPU.
NOT_ON_A_GPU = [
    bug(
        "kernel-global-constant",
        2,
        KERNEL,
        "test_attention_compiles_for_every_card",
        "the kernel reads a global variable, which the compiler refuses",
        (
            'tl.full((BLOCK_M,), float("-inf"), tl.float32)',
            "tl.full((BLOCK_M,), LOWEST, tl.float32)",
        ),
        append='LOWEST = float("-inf")',
    ),
    bug(
        "window-scalar-sum",
        3,
        ATTEND,
        "test_window_compiles_for_every_card",
        "the row sum starts as a number and becomes a tile in the loop",
        ("l_i = tl.zeros((BLOCK_M,), tl.float32)", "l_i = 0.0"),
    ),
    bug(
        "varlen-break",
        5,
        VARLEN,
        "test_varlen_compiles_for_every_card",
        "a loop over the sequences is left with break, which the compiler refuses",
        (
            "        if pid_m * BLOCK_M < T:",
            "        for _ in range(0, tiles):\n            break\n        if pid_m * BLOCK_M < T:",
        ),
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5, *STEP_6, *NOT_ON_A_GPU]
