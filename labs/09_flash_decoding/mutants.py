"""Planted faults of lab 09: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

PARTS, STATES, SPLIT = "merge_accumulators", "merge_states", "split_attention"
KERNEL, LAUNCH, MERGE, CHOOSE, DECODE = (
    "_split_kernel",
    "split_partials",
    "_merge_kernel",
    "choose_splits",
    "flash_decode",
)
OPTIONS = "pdl_options"
PAGED, PAGED_LAUNCH, APPEND, LOOP = (
    "_paged_split_kernel",
    "paged_partials",
    "append_kv",
    "decode_paged",
)


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside, append)


def cheat(id, step, caught_by, teaches, append, *edits, inside=""):
    return Mutant(id, "cheat", step, teaches, caught_by, edits, inside, append)


_MERGE_WAIT = "        if PDL:\n            tl.extra.cuda.gdc_wait()\n"
_WAIT = _MERGE_WAIT.replace(
    ":\n", ":  # only arithmetic so far; what is read from here on may be another kernel's\n"
)
_LETS_GO = (
    "        if PDL:  # the next kernel may begin; it waits for the end of this one\n"
    "            tl.extra.cuda.gdc_launch_dependents()\n"
)

_SHOWS_NAN = (
    "        m_i = tl.where(l_i == l_i, m_i, l_i)"
    '  # a maximum drops NaN, and -inf would say "empty"\n'
)

STEP_1 = [
    bug(
        "merge-empty-acc-nan",
        1,
        PARTS,
        "test_merge_empty_parts_may_hold_anything",
        "an empty part's output is multiplied by 0, and 0 times NaN is NaN (handout section 2)",
        ("accs.masked_fill(empty[..., None], 0.0)", "accs"),
    ),
    bug(
        "merge-empty-l-nan",
        1,
        PARTS,
        "test_merge_empty_parts_may_hold_anything",
        "an empty part's l is used (handout section 2)",
        ("ls.masked_fill(empty, 0.0)", "ls"),
    ),
    bug(
        "merge-nan-to-zero",
        1,
        PARTS,
        "test_merge_does_not_hide_nan",
        "NaN is turned into 0 wherever it comes from (handout section 2)",
        ("accs.masked_fill(empty[..., None], 0.0)", "accs.nan_to_num(0.0)"),
    ),
    bug(
        "merge-l-nan-to-zero",
        1,
        PARTS,
        "test_merge_does_not_hide_nan",
        "an l that is NaN is turned into 0 (handout section 2)",
        ("ls.masked_fill(empty, 0.0)", "ls.nan_to_num(0.0)"),
    ),
    bug(
        "merge-zero-weight-hides-nan",
        1,
        PARTS,
        "test_merge_does_not_hide_nan",
        "a part that weighs 0 is taken for empty, though it has keys (handout section 2)",
        ('    empty = ms == float("-inf")  # (C, ...)\n', ""),
        (
            "  # (C, ...)\n    l =",
            "  # (C, ...)\n    empty = weights == 0.0  # (C, ...)\n    l =",
        ),
    ),
    bug(
        "merge-all-empty-nan",
        1,
        PARTS,
        "test_merge_all_parts_empty",
        "all parts are empty and exp(-inf - (-inf)) is NaN (handout section 2)",
        ('m.masked_fill(m == float("-inf"), 0.0)', "m"),
    ),
    bug(
        "merge-all-empty-divides",
        1,
        STATES,
        "test_merge_all_parts_empty",
        "a row without keys is divided by l = 0 (handout section 2)",
        ("l.masked_fill(l == 0.0, 1.0)", "l"),
    ),
    bug(
        "merge-no-max",
        1,
        PARTS,
        "test_merge_lse_far_apart",
        "the weights are exp(m) without the largest m subtracted (handout section 2)",
        ('torch.exp(ms - m.masked_fill(m == float("-inf"), 0.0))', "torch.exp(ms)"),
        ("    return m, l, acc", "    return torch.zeros_like(m), l, acc"),
    ),
    bug(
        "merge-mean",
        1,
        PARTS,
        "test_merge_states_equals_attention",
        "all parts weigh the same (handout section 2)",
        ('torch.exp(ms - m.masked_fill(m == float("-inf"), 0.0))', "torch.ones_like(ms)"),
    ),
    bug(
        "merge-acc-not-rescaled",
        1,
        PARTS,
        "test_merge_accumulators_equals_attention",
        "acc is added up without its weights (handout section 2)",
        ("(weights[..., None] * accs", "(accs"),
    ),
    bug(
        "merge-l-not-rescaled",
        1,
        PARTS,
        "test_merge_accumulators_equals_attention",
        "l is added up without its weights (handout section 2)",
        ("(weights * ls", "(ls"),
    ),
    bug(
        "merge-lse-summed",
        1,
        STATES,
        "test_merge_states_equals_attention",
        "the lse of the parts are added up instead of their exponentials (handout section 2)",
        ("m + torch.log(l)", "torch.logsumexp(lses, 0) * 0 + lses.sum(dim=0)"),
    ),
    bug(
        "merge-lse-base-2",
        1,
        STATES,
        "test_merge_states_equals_attention",
        "lse is in base 2 (handout section 2)",
        ("m + torch.log(l)", "(m + torch.log(l)) * math.log2(math.e)"),
    ),
    bug(
        "merge-base-2-weights",
        1,
        PARTS,
        "test_merge_states_equals_attention",
        "natural logarithms are taken for base-2 ones (handout section 2)",
        ("torch.exp(ms", "torch.exp2(ms"),
    ),
    bug(
        "merge-through-lse",
        1,
        PARTS,
        "test_merge_accumulators_keeps_counts_beside_huge_scores",
        "parts are merged by m + log l, in which log l is lost beside a huge m (section 2)",
        (
            "    return m, l, acc",
            "    lse = ms + torch.log(ls)\n"
            "    w = torch.exp(lse - lse.amax(dim=0).clamp(min=-3e38))\n"
            "    acc = (w[..., None] * (accs / ls[..., None]).nan_to_num(0.0)).sum(dim=0)\n"
            "    return lse.amax(dim=0), w.sum(dim=0), acc",
        ),
    ),
    bug(
        "merge-in-half",
        1,
        STATES,
        "test_merge_shapes_and_dtypes",
        "lse comes out in the dtype of outs",
        ("m + torch.log(l)", "(m + torch.log(l)).to(outs.dtype)"),
    ),
    bug(
        "merge-takes-nothing",
        1,
        "_check_parts",
        "test_merge_rejects",
        "no part at all is not refused",
        ("ms.dim() < 1 or ms.shape[0] == 0", "False"),
    ),
    cheat(
        "merge-modifies-inputs",
        1,
        "test_merge_empty_parts_may_hold_anything",
        "the caller's tensors are overwritten",
        "",
        ("accs.masked_fill(empty", "accs.masked_fill_(empty"),
        inside=PARTS,
    ),
]

STEP_2 = [
    bug(
        "split-last-keys-dropped",
        2,
        SPLIT,
        "test_split_attention_any_number_of_splits",
        "S // n_splits keys a chunk leave the rest out (handout section 3)",
        (
            "lo, hi = c * S // n_splits, (c + 1) * S // n_splits",
            "size = max(S // n_splits, 1)\n"
            "        lo, hi = min(c * size, S), min((c + 1) * size, S)",
        ),
    ),
    bug(
        "split-empty-chunk",
        2,
        SPLIT,
        "test_split_attention_any_number_of_splits",
        "an empty chunk is asked for its maximum (handout section 3)",
        ("if lo == hi:", "if False:"),
    ),
    bug(
        "split-softmax-mean",
        2,
        SPLIT,
        "test_split_attention_any_number_of_splits",
        "each chunk is normalised and counts the same (handout section 3)",
        (
            "parts.append((m, p.sum(dim=-1), p @",
            "p = p / p.sum(-1, True)\n        parts.append((m * 0, p.sum(dim=-1), p @",
        ),
    ),
    bug(
        "split-through-lse",
        2,
        SPLIT,
        "test_split_attention_huge_equal_scores",
        "chunks are merged by their lse, in which log l is lost (handout section 3)",
        (
            "parts.append((m, p.sum(dim=-1), p @ v[:, :, lo:hi].to(dtype)))",
            "l = p.sum(dim=-1)\n"
            "        o = p @ v[:, :, lo:hi].to(dtype) / l[..., None]\n"
            "        parts.append((m + torch.log(l), torch.ones_like(l), o))",
        ),
    ),
    bug(
        "split-groups-interleaved",
        2,
        SPLIT,
        "test_split_attention_groups",
        "query head h reads key head h % H_kv (handout section 3)",
        (
            "rows = q.reshape(B, H_kv, H // H_kv * T, D)",
            "rows = q.reshape(B, H // H_kv, H_kv, T, D).transpose(1, 2).reshape(B, H_kv, -1, D)",
        ),
    ),
    bug(
        "split-no-scale",
        2,
        SPLIT,
        "test_split_attention_any_number_of_splits",
        "the scores are not scaled",
        (" / math.sqrt(D)", ""),
    ),
    bug(
        "split-half",
        2,
        SPLIT,
        "test_split_attention_dtypes",
        "everything is computed in the dtype of q",
        ("dtype = torch.float64 if q.dtype == torch.float64 else torch.float32", "dtype = q.dtype"),
    ),
    bug(
        "split-float32-for-float64",
        2,
        SPLIT,
        "test_split_attention_dtypes",
        "float64 inputs are computed in float32",
        (
            "dtype = torch.float64 if q.dtype == torch.float64 else torch.float32",
            "dtype = torch.float32",
        ),
    ),
    bug(
        "split-number-ignored",
        2,
        SPLIT,
        "test_split_attention_work",
        "all keys make one chunk, whatever n_splits is (handout section 3)",
        ("    for c in range(n_splits):", "    n_splits = 1\n    for c in range(n_splits):"),
    ),
    waste(
        "split-copies-heads",
        2,
        SPLIT,
        "test_split_attention_work",
        "k and v are copied for each head of a group (handout section 3)",
        (
            "    rows = q.reshape",
            "    k, v = (x.repeat_interleave(H // H_kv, dim=1) for x in (k, v))\n"
            "    H_kv = H\n    rows = q.reshape",
        ),
    ),
    waste(
        "split-full-scores",
        2,
        SPLIT,
        "test_split_attention_work",
        "all scores are computed for each chunk, and cut",
        (
            "s = rows @ k[:, :, lo:hi].to(dtype).transpose(-2, -1)",
            "s = (rows @ k.to(dtype).transpose(-2, -1))[..., lo:hi]",
        ),
    ),
    cheat(
        "split-softmax",
        2,
        "test_split_attention_any_number_of_splits",
        "one softmax runs over all keys",
        """
def split_attention(q, k, v, n_splits):
    check_qkv(q, k, v, grouped=True)
    check_blocks(n_splits=n_splits)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3).to(dtype) / math.sqrt(q.shape[-1])
    s = rows @ k.to(dtype).transpose(-2, -1)
    out, lse = torch.softmax(s, -1) @ v.to(dtype), torch.logsumexp(s, -1)
    return out.to(q.dtype).reshape(q.shape), lse.reshape(q.shape[:-1])
""",
    ),
    cheat(
        "split-sdpa",
        2,
        "test_split_attention_any_number_of_splits",
        "PyTorch's own attention does the work",
        """
_split = split_attention


def split_attention(q, k, v, n_splits):
    _, lse = _split(q, k, v, n_splits)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v), lse
""",
    ),
]

STEP_3 = [
    bug(
        "kernel-acc-not-rescaled",
        3,
        KERNEL,
        "test_split_kernel_score_ranges",
        "acc is not rescaled as the maximum grows (handout section 4)",
        ("acc * alpha[:, None]", "acc"),
    ),
    bug(
        "kernel-l-not-rescaled",
        3,
        KERNEL,
        "test_split_kernel_score_ranges",
        "l is not rescaled as the maximum grows (handout section 4)",
        ("l_i * alpha +", "l_i +"),
    ),
    bug(
        "kernel-padding-keys-counted",
        3,
        KERNEL,
        "test_split_kernel",
        "keys past S have the score 0 and not -inf (handout section 4)",
        ('s = tl.where(visible[None, :], s, float("-inf"))', "s = s"),
    ),
    bug(
        "kernel-k-unmasked",
        3,
        KERNEL,
        "test_split_kernel",
        "k is read past the cache (handout section 4)",
        ("tl.load(k_ptrs, mask=visible[:, None], other=0.0)", "tl.load(k_ptrs)"),
    ),
    bug(
        "kernel-v-without-other",
        3,
        KERNEL,
        "test_split_kernel",
        "masked rows of v hold anything, and 0 times NaN is NaN (handout section 4)",
        (
            "tl.load(v_ptrs, mask=visible[:, None], other=0.0)",
            "tl.load(v_ptrs, mask=visible[:, None])",
        ),
    ),
    bug(
        "kernel-q-unmasked",
        3,
        KERNEL,
        "test_split_kernel",
        "padding rows read past q",
        ("tl.load(q_ptrs, mask=offs_m[:, None] < G, other=0.0)", "tl.load(q_ptrs)"),
    ),
    bug(
        "kernel-padding-heads-stored",
        3,
        KERNEL,
        "test_split_kernel_groups",
        "padding rows are stored over the next group's results (handout section 4)",
        (
            "tl.store(acc_ptrs, acc, mask=offs_m[:, None] < G)",
            "tl.store(acc_ptrs, acc, mask=offs_m[:, None] < 2 * G)",
        ),
    ),
    bug(
        "kernel-group-modulo",
        3,
        KERNEL,
        "test_split_kernel_groups",
        "query head h reads key head h % H_kv (handout section 4)",
        ("heads = h * G + offs_m", "heads = h + offs_m * H_kv"),
    ),
    bug(
        "kernel-chunks-rounded-up",
        3,
        KERNEL,
        "test_split_kernel_chunks_are_whole_tiles",
        "chunks of cdiv(n, n_splits) tiles leave the last programs idle (handout section 4)",
        (
            "lo = (split * n_tiles // n_splits).to(tl.int32) * BLOCK_N",
            "lo = tl.minimum(split * tl.cdiv(n_tiles, n_splits), n_tiles).to(tl.int32) * BLOCK_N",
        ),
        (
            "hi = ((split + 1) * n_tiles // n_splits).to(tl.int32) * BLOCK_N",
            "hi = tl.minimum((split + 1) * tl.cdiv(n_tiles, n_splits), n_tiles)\n"
            "        hi = hi.to(tl.int32) * BLOCK_N",
        ),
    ),
    bug(
        "kernel-tiles-rounded-down",
        3,
        KERNEL,
        "test_split_kernel",
        "the last, ragged tile belongs to no chunk (handout section 4)",
        ("n_tiles = tl.cdiv(S, BLOCK_N)", "n_tiles = S // BLOCK_N"),
    ),
    bug(
        "kernel-starts-at-zero",
        3,
        KERNEL,
        "test_split_kernel_lengths_and_splits",
        "every chunk reads the keys from 0 on (handout section 4)",
        ("keys = (lo + offs_n)", "keys = (0 * lo + offs_n)"),
    ),
    bug(
        "kernel-empty-not-stored",
        3,
        KERNEL,
        "test_split_kernel_lengths_and_splits",
        "an empty chunk stores nothing, and its m is whatever lay there (handout section 4)",
        (
            "tl.store(m_ptr + rows, m_i, mask=offs_m < G)",
            "tl.store(m_ptr + rows, m_i, mask=(offs_m < G) & (lo < hi))",
        ),
    ),
    bug(
        "kernel-scale-missing",
        3,
        KERNEL,
        "test_split_kernel",
        "the scores are not scaled",
        ("tl.dot(q, tl.trans(k)) * scale", "tl.dot(q, tl.trans(k))"),
    ),
    bug(
        "kernel-scale-hard-coded",
        3,
        KERNEL,
        "test_split_kernel_head_dims",
        "the scale is 1/8, which is right for D = 64 only",
        ("tl.dot(q, tl.trans(k)) * scale", "tl.dot(q, tl.trans(k)) * 0.125"),
    ),
    bug(
        "kernel-scale-after-overflow",
        3,
        KERNEL,
        "test_split_kernel_half_scores_do_not_overflow",
        "the scores overflow float16 before they are scaled",
        (
            "tl.dot(q, tl.trans(k)) * scale",
            "tl.dot(q, tl.trans(k)).to(q.dtype).to(tl.float32) * scale",
        ),
    ),
    bug(
        "kernel-normalised",
        3,
        KERNEL,
        "test_split_kernel",
        "acc is divided by l, and divided again after merging (handout section 4)",
        ("tl.store(acc_ptrs, acc,", "tl.store(acc_ptrs, acc / tl.maximum(l_i, 1e-30)[:, None],"),
    ),
    bug(
        "kernel-finite-minus-inf",
        3,
        KERNEL,
        "test_split_kernel_huge_equal_scores",
        "a finite number stands for -inf, and real scores lie below it",
        (
            'm_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)',
            "m_i = tl.full((BLOCK_M,), -1e9, tl.float32)",
        ),
    ),
    bug(
        "kernel-scale-fused",
        3,
        KERNEL,
        "test_split_kernel_huge_equal_scores",
        "s - m is formed from differently rounded scores, so exp is not exactly 1",
        ("p = tl.exp(s - m_new[:, None])", "p = tl.exp(s * 1.0000001 - m_new[:, None])"),
    ),
    bug(
        "kernel-nan-looks-empty",
        3,
        KERNEL,
        "test_split_kernel_does_not_hide_nan",
        "a maximum drops NaN, and a chunk that is all NaN says it is empty (handout section 4)",
        (_SHOWS_NAN, ""),
    ),
    bug(
        "kernel-nan-to-zero",
        3,
        KERNEL,
        "test_split_kernel_does_not_hide_nan",
        "NaN in v is turned into 0 (handout section 4)",
        (
            "            acc = tl.dot(",
            "            v = tl.where(v == v, v, 0.0)\n            acc = tl.dot(",
        ),
    ),
    bug(
        "kernel-32-bit-batch",
        3,
        KERNEL,
        "test_split_kernel_offsets_beyond_32_bits",
        "sequence times stride wraps past 2**31 (handout section 4)",
        ("k_ptr + b * stride_kb", "k_ptr + b.to(tl.int32) * stride_kb"),
    ),
    bug(
        "kernel-32-bit-head",
        3,
        KERNEL,
        "test_split_kernel_offsets_beyond_32_bits",
        "head times stride wraps past 2**31 (handout section 4)",
        (
            "b, h = pid_bh // H_kv, pid_bh % H_kv",
            "b, h = (pid_bh // H_kv).to(tl.int32), (pid_bh % H_kv).to(tl.int32)",
        ),
    ),
    bug(
        "kernel-32-bit-keys",
        3,
        KERNEL,
        "test_split_kernel_offsets_beyond_32_bits",
        "key times stride wraps past 2**31 in one long cache (handout section 4)",
        ("keys = (lo + offs_n).to(tl.int64)", "keys = lo + offs_n"),
    ),
    bug(
        "kernel-strides-of-k",
        3,
        LAUNCH,
        "test_split_kernel_layouts",
        "v is read through the strides of k (handout section 4)",
        ("*v.stride()[:3]", "*k.stride()[:3]"),
    ),
    waste(
        "kernel-copies-the-cache",
        3,
        LAUNCH,
        "test_split_kernel_reads_a_part_of_a_longer_cache",
        "the cache is made contiguous: every key is copied for every token (handout section 4)",
        (
            "    block_n = _block_n(q, block_n)\n",
            "    block_n = _block_n(q, block_n)\n    k, v = k.contiguous(), v.contiguous()\n",
        ),
    ),
    waste(
        "kernel-program-a-head",
        3,
        LAUNCH,
        "test_split_kernel_loads_each_key_once_for_its_group",
        "there is a program for each query head, so k is loaded once for each (handout section 4)",
        (
            "    H_kv, S = k.shape[1:3]\n",
            "    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))\n"
            "    H_kv, S = k.shape[1:3]\n",
        ),
    ),
    waste(
        "kernel-k-twice",
        3,
        KERNEL,
        "test_split_kernel_loads_each_key_once_for_its_group",
        "k is loaded twice",
        (
            "            s = tl.dot(",
            "            k = tl.load(k_ptrs, mask=visible[:, None], other=0.0)\n"
            "            s = tl.dot(",
        ),
    ),
    cheat(
        "kernel-without-a-kernel",
        3,
        "test_split_kernel_loads_each_key_once_for_its_group",
        "PyTorch does the work and no kernel runs",
        """
def split_partials(q, k, v, n_splits, block_n=None, num_warps=4, num_stages=3):
    G = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(G, dim=1).float() for x in (k, v))
    m, l, acc = _empty_partials(q, n_splits)
    m.fill_(float("-inf"))
    s = (q.float() @ k.transpose(-2, -1) / q.shape[-1] ** 0.5)[:, :, 0]
    m[0] = s.amax(-1)
    p = torch.exp(s - m[0][..., None])
    l[0] = p.sum(-1)
    acc[0] = (p[:, :, None] @ v)[:, :, 0]
    return m, l, acc
""",
    ),
]

STEP_4 = [
    bug(
        "decode-empty-acc-nan",
        4,
        MERGE,
        "test_merge_kernel_empty_parts_may_hold_anything",
        "an empty chunk's output is multiplied by 0, and 0 times NaN is NaN (handout section 5)",
        ("tl.where(full[:, None], w[:, None] * acc_c, 0.0)", "w[:, None] * acc_c"),
    ),
    bug(
        "decode-empty-l-nan",
        4,
        MERGE,
        "test_merge_kernel_empty_parts_may_hold_anything",
        "an empty chunk's l is used (handout section 5)",
        ("tl.where(full, w * l_c, 0.0)", "w * l_c"),
    ),
    bug(
        "decode-nan-looks-empty",
        4,
        MERGE,
        "test_merge_kernel_does_not_hide_nan",
        "a chunk whose m is NaN is taken for empty: NaN > -inf is false (handout section 5)",
        ("full = m_c != float", "full = m_c > float"),
    ),
    bug(
        "decode-zero-weight-hides-nan",
        4,
        MERGE,
        "test_merge_kernel_does_not_hide_nan",
        "a chunk that weighs 0 is taken for empty, though it has keys (handout section 5)",
        ("tl.where(full[:, None], w", "tl.where((full & (w != 0.0))[:, None], w"),
    ),
    bug(
        "decode-nan-to-zero",
        4,
        MERGE,
        "test_flash_decode_does_not_hide_nan",
        "NaN in a chunk's acc is turned into 0 (handout section 5)",
        (
            "            full = m_c",
            "            acc_c = tl.where(acc_c == acc_c, acc_c, 0.0)\n            full = m_c",
        ),
    ),
    bug(
        "decode-first-chunks-empty",
        4,
        MERGE,
        "test_merge_kernel_empty_parts_may_hold_anything",
        "all chunks so far are empty and exp(-inf - (-inf)) is NaN (handout section 5)",
        ('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = m_new"),
    ),
    bug(
        "decode-all-empty-divides",
        4,
        MERGE,
        "test_merge_kernel_all_parts_empty",
        "a row without keys is divided by l = 0 (handout section 5)",
        ("out = acc / l_safe", "out = acc / l_i"),
    ),
    bug(
        "decode-state-not-rescaled",
        4,
        MERGE,
        "test_merge_kernel_any_number_of_parts",
        "right up to 64 chunks: the state is not rescaled between blocks of them (section 5)",
        ("acc = acc * alpha + ", "acc = acc + "),
    ),
    bug(
        "decode-first-block-only",
        4,
        MERGE,
        "test_merge_kernel_any_number_of_parts",
        "only the first BLOCK_C chunks are merged (handout section 5)",
        ("range(0, n_splits, BLOCK_C)", "range(0, tl.minimum(n_splits, BLOCK_C), BLOCK_C)"),
    ),
    bug(
        "decode-padding-chunks",
        4,
        MERGE,
        "test_merge_kernel_any_number_of_parts",
        "chunks past n_splits are read (handout section 5)",
        ('tl.load(m_ptr + places, mask=exists, other=float("-inf"))', "tl.load(m_ptr + places)"),
    ),
    bug(
        "decode-no-max",
        4,
        MERGE,
        "test_merge_kernel_scores_far_apart",
        "the weights are exp(m) without the largest m subtracted (handout section 5)",
        (
            "m_new = tl.maximum(m_i, tl.max(m_c, axis=0))",
            "m_new = m_i * 0.0 if start > 0 else tl.zeros((), tl.float32)",
        ),
    ),
    bug(
        "decode-mean",
        4,
        MERGE,
        "test_flash_decode",
        "all chunks weigh the same (handout section 5)",
        ("w = tl.exp(m_c - m_safe)", "w = tl.exp(0.0 * tl.where(full, m_c, 0.0))"),
    ),
    bug(
        "decode-through-lse",
        4,
        MERGE,
        "test_flash_decode_huge_equal_scores_in_unequal_chunks",
        "chunks are merged by m + log l, in which log l is lost beside a huge m (section 5)",
        (
            "            full = m_c",
            "            acc_c = acc_c / tl.where(l_c > 0.0, l_c, 1.0)[:, None]\n"
            "            m_c = m_c + tl.log(tl.where(l_c > 0.0, l_c, 1.0))\n"
            "            l_c = tl.where(l_c > 0.0, 1.0, 0.0)\n"
            "            full = m_c",
        ),
    ),
    bug(
        "decode-lse-base-2",
        4,
        MERGE,
        "test_flash_decode_lse_is_natural",
        "lse is in base 2 (handout section 5)",
        ("m_i + tl.log(l_safe)", "(m_i + tl.log(l_safe)) * 1.4426950408889634"),
    ),
    bug(
        "decode-lse-no-m",
        4,
        MERGE,
        "test_flash_decode",
        "lse is log l without m",
        ("m_i + tl.log(l_safe)", "tl.log(l_safe)"),
    ),
    bug(
        "decode-32-bit-offsets",
        4,
        MERGE,
        "test_merge_kernel_offsets_beyond_32_bits",
        "chunk times rows times D wraps past 2**31 (handout section 5)",
        (
            "(start + offs_c).to(tl.int64) * tl.num_programs(0) + row",
            "(start + offs_c) * tl.num_programs(0) + tl.program_id(0)",
        ),
    ),
    bug(
        "decode-splits-without-room",
        4,
        CHOOSE,
        "test_choose_splits_fills_the_card",
        "the division is rounded up, and a few programs wait for a second round (section 5)",
        (
            "multiprocessors * programs_per_sm // heads",
            "-(-multiprocessors * programs_per_sm // heads)",
        ),
    ),
    bug(
        "decode-no-splits",
        4,
        CHOOSE,
        "test_choose_splits_fills_the_card",
        "0 chunks are chosen where there are more heads than programs (handout section 5)",
        ("max(1, min(", "(min("),
    ),
    bug(
        "decode-more-splits-than-tiles",
        4,
        CHOOSE,
        "test_choose_splits_fills_the_card",
        "a short cache is cut into more chunks than it has tiles (handout section 5)",
        (
            "max(1, min(multiprocessors * programs_per_sm // heads, n_tiles))",
            "max(1, multiprocessors * programs_per_sm // heads)",
        ),
    ),
    waste(
        "decode-choice-ignored",
        4,
        DECODE,
        "test_flash_decode_chooses_its_splits",
        "n_splits=None means one chunk",
        (
            "n_splits = choose_splits(k.shape[0] * k.shape[1], n_tiles, multiprocessors(q.device))",
            "n_splits = 1",
        ),
    ),
    waste(
        "decode-acc-twice",
        4,
        MERGE,
        "test_merge_kernel_reads_each_part_once",
        "each partial output is read twice",
        (
            "            full = m_c",
            "            acc_c = tl.load(acc_ptrs, mask=exists[:, None], other=0.0)\n"
            "            full = m_c",
        ),
    ),
    bug(
        "overlap-wait-after-load",
        4,
        KERNEL,
        "test_kernels_wait_for_the_kernel_before",
        "q is loaded before the kernel waits for whoever writes it (handout section 5)",
        (_WAIT, ""),
        (_LETS_GO, _WAIT + _LETS_GO),
    ),
    bug(
        "overlap-merge-waits-late",
        4,
        MERGE,
        "test_kernels_wait_for_the_kernel_before",
        "the merge waits before it stores, not before it loads (handout section 5)",
        (_MERGE_WAIT, ""),
        ("        l_safe =", _MERGE_WAIT + "        l_safe ="),
    ),
    bug(
        "overlap-without-a-wait",
        4,
        OPTIONS,
        "test_a_kernel_that_does_not_wait_is_not_launched_early",
        "a kernel is launched early whether it waits or not (handout section 5)",
        ("if waits and", "if"),
    ),
    bug(
        "overlap-on-old-cards",
        4,
        OPTIONS,
        "test_a_kernel_that_does_not_wait_is_not_launched_early",
        "cards that know no such launch are asked for it (handout section 5)",
        (">= (9, 0)", ">= (8, 0)"),
    ),
    bug(
        "overlap-kernel-not-told",
        4,
        OPTIONS,
        "test_kernels_wait_for_the_kernel_before",
        "the launch is early and the kernel's PDL is false, so it does not wait",
        ('{"PDL": True, "launch_pdl": True}', '{"PDL": False, "launch_pdl": True}'),
    ),
    waste(
        "overlap-next-never",
        4,
        KERNEL,
        "test_kernels_wait_for_the_kernel_before",
        "the kernel waits, but never lets the next one begin (handout section 5)",
        (_LETS_GO, ""),
    ),
    waste(
        "overlap-next-after-the-loop",
        4,
        KERNEL,
        "test_kernels_wait_for_the_kernel_before",
        "the next kernel may begin after the loop, where nothing is left to overlap (section 5)",
        (_LETS_GO, ""),
        ("        # Stored also where", _LETS_GO + "        # Stored also where"),
    ),
    waste(
        "overlap-merge-lets-the-next-begin",
        4,
        MERGE,
        "test_kernels_wait_for_the_kernel_before",
        "the merge lets the next split begin while this one's programs still run (section 5)",
        (
            "        # Running state of the row",
            "        if PDL:\n            tl.extra.cuda.gdc_launch_dependents()\n"
            "        # Running state of the row",
        ),
    ),
    cheat(
        "decode-merged-in-torch",
        4,
        "test_flash_decode_chooses_its_splits",
        "PyTorch merges and the merge kernel never runs",
        """
def merge_partials(m, l, acc, dtype):
    _check_parts(m, l, acc)
    m, l, acc = merge_accumulators(m, l, acc)
    out = acc / l.masked_fill(l == 0.0, 1.0)[..., None]
    return out[:, :, None].to(dtype), (m + torch.log(l))[:, :, None]
""",
    ),
    cheat(
        "decode-sdpa",
        4,
        "test_flash_decode",
        "PyTorch's own attention does the work",
        """
_decode = flash_decode


def flash_decode(q, k, v, n_splits=None, **config):
    _, lse = _decode(q, k, v, n_splits, **config)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v), lse
""",
    ),
    cheat(
        "decode-cached",
        4,
        "test_flash_decode_follows_its_input",
        "the output is kept between calls",
        """
_decode, _kept = flash_decode, {}


def flash_decode(q, k, v, n_splits=None, **config):
    key = (q.data_ptr(), k.data_ptr(), n_splits)
    if key not in _kept:
        _kept[key] = _decode(q, k, v, n_splits, **config)
    return _kept[key]
""",
    ),
]

STEP_5 = [
    bug(
        "paged-unused-slots-counted",
        5,
        PAGED,
        "test_paged_decode_unused_slots_hold_nan",
        "the unused slots of the last page count as keys (handout section 6)",
        ("visible = cols < S", "visible = cols < tl.cdiv(S, PAGE) * PAGE"),
    ),
    bug(
        "paged-slot-nan-in-v",
        5,
        PAGED,
        "test_paged_decode_unused_slots_hold_nan",
        "v is loaded by whole pages: its weight is 0, and 0 times NaN is NaN (handout section 6)",
        (
            "v = tl.load(v_ptrs, mask=visible[:, None], other=0.0)",
            "v = tl.load(v_ptrs, mask=(cols < tl.cdiv(S, PAGE) * PAGE)[:, None], other=0.0)",
        ),
    ),
    bug(
        "paged-table-unmasked",
        5,
        PAGED,
        "test_paged_kernel_loads_only_what_a_sequence_has",
        "the table is read beyond its row (handout section 6)",
        ("cols // PAGE, mask=visible, other=0)", "cols // PAGE)"),
    ),
    bug(
        "paged-stale-entries",
        5,
        PAGED,
        "test_paged_kernel_page_sizes",
        "pages that the sequence does not use are looked up and read (handout section 6)",
        ("mask=visible, other=0)", "mask=cols // PAGE < stride_tb, other=0)"),
        (
            "k = tl.load(k_ptrs, mask=visible[:, None], other=0.0)",
            "k = tl.load(k_ptrs, mask=(cols // PAGE < stride_tb)[:, None], other=0.0)",
        ),
    ),
    bug(
        "paged-page-as-place",
        5,
        PAGED,
        "test_paged_kernel",
        "pages are taken to lie in order: the table is not used (handout section 6)",
        ("page = page.to(tl.int64)", "page = (page * 0 + cols // PAGE).to(tl.int64)"),
    ),
    bug(
        "paged-table-of-sequence-0",
        5,
        PAGED,
        "test_paged_kernel",
        "every sequence reads the first one's table (handout section 6)",
        ("table_ptr + b * stride_tb", "table_ptr"),
    ),
    bug(
        "paged-length-of-sequence-0",
        5,
        PAGED,
        "test_paged_kernel",
        "every sequence has the first one's length (handout section 6)",
        ("tl.load(lens_ptr + b)", "tl.load(lens_ptr)"),
    ),
    bug(
        "paged-slot-of-tile",
        5,
        PAGED,
        "test_paged_kernel_page_sizes",
        "the slot is counted from the tile's start, right only if pages divide tiles (section 6)",
        ("slot = cols % PAGE", "slot = offs_n % PAGE"),
    ),
    bug(
        "paged-tile-is-page",
        5,
        PAGED,
        "test_paged_kernel_page_sizes",
        "all keys of a tile are taken from its first page (handout section 6)",
        ("+ cols // PAGE, mask", "+ start_n // PAGE + 0 * cols, mask"),
    ),
    bug(
        "paged-nan-looks-empty",
        5,
        PAGED,
        "test_paged_kernel_does_not_hide_nan",
        "a maximum drops NaN, and a chunk that is all NaN says it is empty (handout section 4)",
        (_SHOWS_NAN, ""),
    ),
    bug(
        "paged-nan-to-zero",
        5,
        PAGED,
        "test_paged_kernel_does_not_hide_nan",
        "NaN in v is turned into 0, in slots that do hold a key, too (handout section 6)",
        (
            "            acc = tl.dot(",
            "            v = tl.where(v == v, v, 0.0)\n            acc = tl.dot(",
        ),
    ),
    bug(
        "paged-finite-minus-inf",
        5,
        PAGED,
        "test_paged_kernel_huge_equal_scores",
        "a finite number stands for -inf, and real scores lie below it",
        (
            'm_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)',
            "m_i = tl.full((BLOCK_M,), -1e9, tl.float32)",
        ),
    ),
    bug(
        "paged-strides-of-q",
        5,
        PAGED,
        "test_paged_kernel_layouts",
        "q is read as if it were contiguous (handout section 6)",
        (
            "b * stride_qb + heads[:, None] * stride_qh",
            "(b * H_kv * G + heads[:, None]) * D",
        ),
    ),
    bug(
        "paged-strides-of-k",
        5,
        PAGED_LAUNCH,
        "test_paged_kernel_layouts",
        "v's pages are read through the strides of k",
        ("*v_pages.stride()[:3]", "*k_pages.stride()[:3]"),
    ),
    bug(
        "paged-table-width",
        5,
        PAGED_LAUNCH,
        "test_paged_kernel_layouts",
        "rows of the table are taken to lie as far apart as it is wide",
        ("page_table.stride(0),", "page_table.shape[1],"),
    ),
    bug(
        "paged-32-bit-pages",
        5,
        PAGED,
        "test_paged_kernel_offsets_beyond_32_bits",
        "page times stride wraps past 2**31 (handout section 6)",
        ("page = page.to(tl.int64)", "page = page.to(tl.int32)"),
        (
            "k_rows = page * stride_kp + h * stride_kh",
            "k_rows = page * stride_kp + (h * stride_kh).to(tl.int32)",
        ),
        (
            "v_rows = page * stride_vp + h * stride_vh",
            "v_rows = page * stride_vp + (h * stride_vh).to(tl.int32)",
        ),
    ),
    bug(
        "paged-too-long",
        5,
        "_check_paged_values",
        "test_paged_decode_rejects_values",
        "a length beyond the table is not refused (handout section 6)",
        ("shortest < 0 or longest > capacity", "shortest < 0"),
    ),
    bug(
        "paged-no-such-page",
        5,
        "_check_paged_values",
        "test_paged_decode_rejects_values",
        "a page that is none is not refused (handout section 6)",
        ("((used < 0) | (used >= n_pages)).any()", "False"),
    ),
    bug(
        "paged-unused-entries-refused",
        5,
        "_check_paged_values",
        "test_paged_decode_unused_slots_hold_nan",
        "entries that no key needs are refused",
        ("used = page_table[first_keys[None, :] < seq_lens[:, None]]", "used = page_table"),
    ),
    bug(
        "overlap-paged-wait-after-load",
        5,
        PAGED,
        "test_paged_kernel_waits_for_the_kernel_before",
        "the length is loaded before the kernel waits for whoever writes it (handout section 5)",
        (_WAIT, ""),
        (_LETS_GO, _WAIT + _LETS_GO),
    ),
    waste(
        "paged-chunks-of-the-longest",
        5,
        PAGED,
        "test_paged_kernel_chunks_come_from_each_length",
        "chunks are cut from the table's width, and short sequences fill a few (section 6)",
        ("n_tiles = tl.cdiv(S, BLOCK_N)", "n_tiles = tl.cdiv(stride_tb * PAGE, BLOCK_N)"),
    ),
    waste(
        "paged-gathered-first",
        5,
        "",
        "test_paged_kernel_loads_only_what_a_sequence_has",
        "the pages are put together first, as long as the table is wide",
        append="""
_paged = paged_partials


def paged_partials(q, k_pages, v_pages, page_table, seq_lens, n_splits, **config):
    page_size = k_pages.shape[2]
    B, N = page_table.shape
    safe = page_table.clamp(0, len(k_pages) - 1).long()
    k, v = (x[safe].transpose(1, 2).flatten(2, 3).contiguous() for x in (k_pages, v_pages))
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    return split_partials(q, k, v, n_splits, **config)
""",
    ),
]

STEP_6 = [
    bug(
        "append-overwrites-the-last",
        6,
        APPEND,
        "test_append_kv_writes_behind_what_is_there",
        "the new key is written over the last one (handout section 7)",
        (
            "places = seq_lens[:, None] + torch.arange(N",
            "places = (seq_lens[:, None] - 1).clamp(min=0) + torch.arange(N",
        ),
    ),
    bug(
        "append-all-in-one-page",
        6,
        APPEND,
        "test_append_kv_writes_behind_what_is_there",
        "all new keys go to the page of the first one (handout section 7)",
        (
            "page_table.gather(1, places // page_size)",
            "page_table.gather(1, places[:, :1] // page_size).expand(B, N)",
        ),
    ),
    bug(
        "append-page-as-place",
        6,
        APPEND,
        "test_append_kv_writes_behind_what_is_there",
        "the number of the page within the sequence is taken for the page (handout section 7)",
        ("page_table.gather(1, places // page_size)", "places // page_size"),
    ),
    bug(
        "append-axes-mixed-up",
        6,
        APPEND,
        "test_append_kv_writes_behind_what_is_there",
        "heads and new keys change places (handout section 7)",
        (
            "k_pages[pages, :, slots] = k_new.transpose(1, 2)",
            "k_pages[pages, :, slots] = k_new.reshape(B, N, H_kv, D)",
        ),
    ),
    bug(
        "append-v-is-k",
        6,
        APPEND,
        "test_append_kv_writes_behind_what_is_there",
        "the keys are written to both caches",
        ("= v_new.transpose(1, 2)", "= k_new.transpose(1, 2)"),
    ),
    bug(
        "append-lengths-in-place",
        6,
        APPEND,
        "test_append_kv_writes_behind_what_is_there",
        "seq_lens is changed in place",
        ("return seq_lens + N", "return seq_lens.add_(N)"),
    ),
    bug(
        "append-lengths-plus-one",
        6,
        APPEND,
        "test_append_kv_writes_behind_what_is_there",
        "lengths grow by 1 whatever N is (handout section 7)",
        ("return seq_lens + N", "return seq_lens + 1"),
    ),
    bug(
        "append-through-a-copy",
        6,
        APPEND,
        "test_append_kv_writes_through_strides",
        "the keys are written to a copy of pages that are not contiguous (handout section 7)",
        (
            "    places = seq_lens",
            "    k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()\n"
            "    places = seq_lens",
        ),
    ),
    waste(
        "append-copies-the-pool",
        6,
        APPEND,
        "test_append_kv_into_a_large_pool",
        "the whole pool is copied for every token (handout section 7)",
        (
            "    k_pages[pages, :, slots] = k_new.transpose(1, 2)",
            "    whole = k_pages.clone()\n"
            "    whole[pages, :, slots] = k_new.transpose(1, 2)\n"
            "    k_pages.copy_(whole)",
        ),
    ),
    bug(
        "append-length-clamped",
        6,
        APPEND,
        "test_append_kv_into_a_large_pool",
        "no sequence gets longer than some limit, and later keys overwrite each other",
        ("return seq_lens + N", "return (seq_lens + N).clamp(max=256)"),
    ),
    bug(
        "append-beyond-the-table",
        6,
        APPEND,
        "test_append_kv_refused_leaves_the_cache_alone",
        "the length before the new keys is checked (handout section 7)",
        ("seq_lens + N, P, page_size", "seq_lens, P, page_size"),
    ),
    bug(
        "append-checks-too-late",
        6,
        APPEND,
        "test_append_kv_refused_leaves_the_cache_alone",
        "a refused call has written something already",
        (
            "    _check_paged_values(page_table, seq_lens + N, P, page_size)\n",
            "    try:\n        _check_paged_values(page_table, seq_lens + N, P, page_size)\n"
            "    except ValueError:\n        k_pages[0] = 1.0\n        raise\n",
        ),
    ),
    bug(
        "loop-attends-before-appending",
        6,
        LOOP,
        "test_decode_paged_gives_the_same_tokens",
        "the newest token does not see itself (handout section 7)",
        (
            "paged_decode(q, k_pages, v_pages, page_table, seq_lens)",
            "paged_decode(q, k_pages, v_pages, page_table, (seq_lens - 1).clamp(min=1))",
        ),
    ),
    bug(
        "loop-places-off-by-one",
        6,
        LOOP,
        "test_decode_paged_gives_the_same_tokens",
        "a new token's place is that of the one before it (handout section 7)",
        ("model.qkv(tokens, seq_lens[:, None])", "model.qkv(tokens, seq_lens[:, None] - 1)"),
    ),
    bug(
        "loop-first-query",
        6,
        LOOP,
        "test_decode_paged_gives_the_same_tokens",
        "the prompt's first query decides, not its last (handout section 7)",
        ("queries.append(q[:, :, -1:])", "queries.append(q[:, :, :1])"),
    ),
    bug(
        "loop-shared-place",
        6,
        LOOP,
        "test_decode_paged_gives_the_same_tokens",
        "all sequences take the longest one's place (handout section 7)",
        ("seq_lens[:, None])\n", "seq_lens.max().expand(len(prompts))[:, None])\n"),
    ),
    bug(
        "loop-one-token-more",
        6,
        LOOP,
        "test_decode_paged_gives_the_same_tokens",
        "the last token's key is appended, for which no page was asked (handout section 7)",
        ("        if len(found) < n_new:\n", "        if True:\n"),
        (
            "[len(prompt) + n_new for prompt in prompts]",
            "[len(prompt) + n_new - 1 for prompt in prompts]",
        ),
    ),
    bug(
        "loop-page-size-ignored",
        6,
        LOOP,
        "test_decode_paged_attends_for_all_sequences_at_once",
        "pages have 16 slots whatever was asked for",
        ("allocate_pages(model, lengths, page_size)", "allocate_pages(model, lengths, 16)"),
    ),
    waste(
        "loop-longest-for-all",
        6,
        LOOP,
        "test_decode_paged_attends_for_all_sequences_at_once",
        "every sequence reserves as many pages as the longest (handout section 7)",
        (
            "lengths = [len(prompt) + n_new for prompt in prompts]",
            "lengths = [max(map(len, prompts)) + n_new] * len(prompts)",
        ),
    ),
    waste(
        "loop-one-sequence-at-a-time",
        6,
        LOOP,
        "test_decode_paged_attends_for_all_sequences_at_once",
        "each sequence attends in a launch of its own (handout section 7)",
        (
            "        out, _ = paged_decode(q, k_pages, v_pages, page_table, seq_lens)\n",
            "        rows = [slice(b, b + 1) for b in range(len(prompts))]\n"
            "        out = torch.cat(\n"
            "            [\n"
            "                paged_decode(q[b], k_pages, v_pages, page_table[b], seq_lens[b])[0]\n"
            "                for b in rows\n"
            "            ]\n"
            "        )\n",
        ),
    ),
    cheat(
        "loop-recomputes",
        6,
        "test_decode_paged_computes_each_key_once",
        "every key is computed anew for every token",
        """
def decode_paged(model, prompts, n_new, page_size=16):
    return torch.stack([decode_recomputing(model, prompt, n_new) for prompt in prompts])
""",
    ),
    cheat(
        "loop-unpaged",
        6,
        "test_decode_paged_computes_each_key_once",
        "the cache lies in one piece",
        """
def decode_paged(model, prompts, n_new, page_size=16):
    return torch.stack([decode_unpaged(model, prompt, n_new) for prompt in prompts])
""",
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5, *STEP_6]
