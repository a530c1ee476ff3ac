"""Planted faults of lab 06: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

ONE, FORWARD, BACKWARD = (
    "online_softmax_stats",
    "flash_attention_forward",
    "flash_attention_backward",
)
SOFTMAX, LAUNCH4, KERNEL, LAUNCH5 = (
    "_softmax_kernel",
    "triton_softmax",
    "_flash_fwd_kernel",
    "triton_flash_attention",
)


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside, append)


def cheat(id, step, caught_by, teaches, append, *edits, inside=""):
    return Mutant(id, "cheat", step, teaches, caught_by, edits, inside, append)


STEP_1 = [
    bug(
        "stats-no-rescale",
        1,
        ONE,
        "test_online_softmax_handles_growing_max",
        "the old sum is not rescaled as the maximum grows (handout section 2)",
        ("l = l * torch.exp(m - m_new) + ", "l = l + "),
    ),
    bug(
        "stats-no-max",
        1,
        ONE,
        "test_online_softmax_handles_growing_max",
        "the maximum is not subtracted before exp, which overflows (handout section 2)",
        ("torch.exp(block - m_new)", "torch.exp(block)"),
    ),
    bug(
        "stats-block-max",
        1,
        ONE,
        "test_online_softmax_handles_shrinking_max_and_ties",
        "m is the last block's maximum and not the largest so far (handout section 2)",
        ("torch.maximum(m, block.max())", "block.max()"),
    ),
    bug(
        "stats-all-minus-inf",
        1,
        ONE,
        "test_online_softmax_minus_inf",
        "a prefix of -inf gives exp(-inf - (-inf)) = NaN (handout section 2)",
        ('if m_new == float("-inf"):\n            continue', "if False:\n            continue"),
    ),
    bug(
        "stats-finite-minus-inf",
        1,
        ONE,
        "test_online_softmax_minus_inf",
        "a finite number stands for -inf, so a row of -inf only gets a sum (handout section 2)",
        ('block.new_full((), float("-inf"))', "block.new_full((), -1e4)"),
    ),
    bug(
        "stats-empty-block",
        1,
        ONE,
        "test_online_softmax_empty_blocks",
        "an empty block is asked for its maximum",
        ("if block.numel() == 0:\n            continue", "if False:\n            continue"),
    ),
    bug(
        "stats-no-blocks",
        1,
        ONE,
        "test_online_softmax_empty_blocks",
        "no block at all is not refused",
        ("raise ValueError(", "return torch.zeros(()), torch.zeros(()) if True else ("),
    ),
    bug(
        "stats-float32",
        1,
        ONE,
        "test_online_softmax_matches_logsumexp",
        "the statistics are float32 whatever the blocks are",
        ("return m, l", "return m.float(), l.float()"),
    ),
    bug(
        "stats-half",
        1,
        ONE,
        "test_online_softmax_matches_logsumexp",
        "the sum is kept in half precision",
        ("torch.exp(block - m_new).sum()", "torch.exp((block - m_new).half()).sum().to(l.dtype)"),
    ),
    cheat(
        "stats-concatenated",
        1,
        "test_online_softmax_takes_a_generator_one_block_at_a_time",
        "the row is put together first and reduced at once",
        """
def online_softmax_stats(blocks):
    blocks = list(blocks)
    if not blocks:
        raise ValueError("online_softmax_stats needs at least one block: got none")
    row = torch.cat(blocks)
    m = row.max() if row.numel() else row.new_full((), float("-inf"))
    if m == float("-inf"):
        return m, row.new_zeros(())
    return m, torch.exp(row - m).sum()
""",
    ),
]

STEP_2 = [
    bug(
        "forward-acc-not-rescaled",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "acc is not rescaled as the max grows (handout section 3)",
        ("acc = acc * alpha[..., None] + ", "acc = acc + "),
    ),
    bug(
        "forward-l-not-rescaled",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "l is not rescaled as the max grows (handout section 3)",
        ("l_i = l_i * alpha + ", "l_i = l_i + "),
    ),
    bug(
        "forward-alpha-inverted",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "alpha is exp(m_new - m_i), the wrong way round (handout section 3)",
        ("alpha = torch.exp(m_i - m_new)", "alpha = torch.exp(m_new - m_i).clamp(max=1e6)"),
    ),
    bug(
        "forward-no-max",
        2,
        FORWARD,
        "test_flash_forward_score_ranges",
        "no maximum is subtracted before exp (handout section 2)",
        ("m_new = torch.maximum(m_i, s.amax(dim=-1))", "m_new = torch.zeros_like(m_i)"),
    ),
    bug(
        "forward-tile-softmax",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "the softmax of each tile is taken by itself (handout section 10)",
        (
            "p = torch.exp(s - m_new[..., None])",
            "p = torch.exp(s - m_new[..., None])\n"
            "            p = p / p.sum(dim=-1, keepdim=True).clamp(min=1e-30)",
        ),
    ),
    bug(
        "forward-not-normalised",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "acc is not divided by l at the end (handout section 3)",
        ("acc / l_i[..., None]", "acc"),
    ),
    bug(
        "forward-skip-early",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "the causal loop ends at the first row of the query tile (handout section 3)",
        ("hi = min(i1, S) if causal else S", "hi = min(max(i0, 1), S) if causal else S"),
    ),
    bug(
        "forward-skip-one-short",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "the causal loop ends one key early: row i1 - 1 needs key i1 - 1 (handout section 3)",
        ("hi = min(i1, S) if causal else S", "hi = min(max(i1 - 1, 1), S) if causal else S"),
    ),
    bug(
        "forward-last-tile-dropped",
        2,
        FORWARD,
        "test_flash_forward_cross_attention_lengths",
        "the last, ragged tile of keys is dropped (handout section 3)",
        (
            "for j0 in range(0, hi, block_k):",
            "for j0 in range(0, max(hi // block_k, 1) * block_k, block_k):",
        ),
    ),
    bug(
        "forward-mask-strict",
        2,
        "_future",
        "test_flash_forward_matches_naive",
        "a query does not see itself: the mask is >= where > is right (handout section 3)",
        ("cols[None, :] > rows[:, None]", "cols[None, :] >= rows[:, None]"),
    ),
    bug(
        "forward-mask-local",
        2,
        "_future",
        "test_flash_forward_matches_naive",
        "the mask compares places within the tile, not in the sequence (handout section 3)",
        ("torch.arange(j0, j1, device=device)", "torch.arange(0, j1 - j0, device=device)"),
    ),
    bug(
        "forward-no-mask",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "the diagonal tiles are not masked (handout section 3)",
        ("            if causal:\n", "            if False:\n"),
    ),
    bug(
        "forward-finite-minus-inf",
        2,
        FORWARD,
        "test_flash_forward_huge_equal_scores",
        "hidden scores are a finite number, which real scores lie below",
        (
            '_future(i0, i1, j0, j1, q.device), float("-inf"))',
            "_future(i0, i1, j0, j1, q.device), -1e9)",
        ),
    ),
    bug(
        "forward-scale-missing",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "the scores are not scaled by 1/sqrt(D)",
        ("q[:, :, i0:i1].to(dtype) * scale", "q[:, :, i0:i1].to(dtype)"),
    ),
    bug(
        "forward-scale-twice",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "the scale is applied twice",
        ("q[:, :, i0:i1].to(dtype) * scale", "q[:, :, i0:i1].to(dtype) * scale * scale"),
    ),
    bug(
        "forward-scale-hard-coded",
        2,
        FORWARD,
        "test_flash_forward_head_dims",
        "the scale is 1/8, which is right for D = 64 only",
        ("scale = 1.0 / math.sqrt(D)", "scale = 0.125"),
    ),
    bug(
        "forward-scale-after-overflow",
        2,
        FORWARD,
        "test_flash_forward_half_scores_do_not_overflow",
        "the scores overflow float16 before they are scaled",
        (
            "s = q_tile @ k[:, :, j0:j1].to(dtype).transpose(-2, -1)",
            "s = (q[:, :, i0:i1] @ k[:, :, j0:j1].transpose(-2, -1)).to(dtype) * scale",
        ),
    ),
    bug(
        "forward-half-statistics",
        2,
        FORWARD,
        "test_flash_forward_dtypes",
        "statistics and accumulator are in the dtype of q",
        ("dtype = torch.float64 if q.dtype == torch.float64 else torch.float32", "dtype = q.dtype"),
    ),
    bug(
        "forward-float32-for-float64",
        2,
        FORWARD,
        "test_flash_forward_dtypes",
        "float64 inputs are computed in float32",
        (
            "dtype = torch.float64 if q.dtype == torch.float64 else torch.float32",
            "dtype = torch.float32",
        ),
        (
            "lse = torch.empty(B, H, T, dtype=dtype, device=q.device)",
            "lse = torch.empty(B, H, T, dtype=torch.float64, device=q.device)",
        ),
    ),
    bug(
        "forward-p-rounded",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "P is rounded to bfloat16 before the product with V",
        ("+ p @ v[:, :, j0:j1].to(dtype)", "+ p.bfloat16().to(dtype) @ v[:, :, j0:j1].to(dtype)"),
    ),
    bug(
        "forward-lse-no-m",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "lse is log l without m (handout section 3)",
        ("m_i + torch.log(l_i)", "torch.log(l_i)"),
    ),
    bug(
        "forward-lse-base-2",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "lse is in base 2: it is 1.4427 times too large (handout section 3)",
        ("m_i + torch.log(l_i)", "(m_i + torch.log(l_i)) * math.log2(math.e)"),
    ),
    bug(
        "forward-lse-is-m",
        2,
        FORWARD,
        "test_flash_forward_halves_merge",
        "lse is the maximum only",
        ("m_i + torch.log(l_i)", "m_i"),
    ),
    bug(
        "forward-lse-half",
        2,
        FORWARD,
        "test_flash_forward_dtypes",
        "lse is in the dtype of q",
        (
            "lse = torch.empty(B, H, T, dtype=dtype, device=q.device)",
            "lse = torch.empty(B, H, T, dtype=q.dtype, device=q.device)",
        ),
    ),
    bug(
        "forward-t-for-s",
        2,
        FORWARD,
        "test_flash_forward_cross_attention_lengths",
        "the key loop runs to T, the number of queries, instead of S (handout section 3)",
        ("hi = min(i1, S) if causal else S", "hi = min(i1, S) if causal else min(T, S)"),
    ),
    bug(
        "forward-block-mixed-up",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "key tiles are block_q long but step by block_k",
        ("j1 = min(j0 + block_k, hi)", "j1 = min(j0 + block_q, hi)"),
    ),
    bug(
        "forward-v-strides",
        2,
        FORWARD,
        "test_flash_forward_layouts",
        "v is read with another tensor's strides",
        (
            "v[:, :, j0:j1].to(dtype)",
            "v.as_strided(v.shape, torch.empty(v.shape, device='meta').stride(), "
            "v.storage_offset())[:, :, j0:j1].to(dtype)",
        ),
    ),
    bug(
        "forward-first-heads-only",
        2,
        FORWARD,
        "test_flash_forward_matches_naive",
        "only the first two heads are written",
        (
            "out[:, :, i0:i1] = acc / l_i[..., None]",
            "out[:, :2, i0:i1] = (acc / l_i[..., None])[:, :2]",
        ),
    ),
    waste(
        "forward-no-tile-skip",
        2,
        FORWARD,
        "test_flash_forward_causal_skips_tiles",
        "tiles right of the diagonal are computed and masked away",
        ("hi = min(i1, S) if causal else S", "hi = S"),
    ),
    waste(
        "forward-one-big-tile",
        2,
        FORWARD,
        "test_flash_forward_makes_no_score_matrix",
        "the block sizes are ignored: one tile is the whole matrix",
        ("    S = k.shape[2]\n", "    S = k.shape[2]\n    block_q, block_k = T, S\n"),
    ),
    waste(
        "forward-full-rows",
        2,
        FORWARD,
        "test_flash_forward_makes_no_score_matrix",
        "each query tile takes all keys at once",
        ("    S = k.shape[2]\n", "    S = k.shape[2]\n    block_k = S\n"),
    ),
    waste(
        "forward-scores-twice",
        2,
        FORWARD,
        "test_flash_forward_causal_skips_tiles",
        "each tile of scores is computed twice",
        (
            "m_new = torch.maximum(m_i, s.amax(dim=-1))",
            "m_new = torch.maximum(m_i, s.amax(dim=-1))\n"
            "            s = torch.minimum(s, q_tile @ k[:, :, j0:j1].to(dtype).transpose(-2, -1))",
        ),
    ),
    cheat(
        "forward-sdpa",
        2,
        "test_flash_forward_matches_naive",
        "PyTorch's own attention does the work",
        """
_flash = flash_attention_forward


def flash_attention_forward(q, k, v, causal=False, block_q=16, block_k=16):
    check_blocks(block_q=block_q, block_k=block_k)
    check_qkv(q, k, v, causal)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out, _flash(q, k, v, causal, block_q, block_k)[1]
""",
    ),
    cheat(
        "forward-torch-softmax",
        2,
        "test_flash_forward_matches_naive",
        "torch.softmax sees whole rows",
        """
def flash_attention_forward(q, k, v, causal=False, block_q=16, block_k=16):
    check_qkv(q, k, v, causal)
    check_blocks(block_q=block_q, block_k=block_k)
    x = torch.float64 if q.dtype == torch.float64 else torch.float32
    s = q.to(x) @ k.to(x).transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(_future(0, s.shape[-2], 0, s.shape[-1], q.device), float("-inf"))
    return (s.softmax(-1) @ v.to(x)).to(q.dtype), s.logsumexp(-1)
""",
    ),
    cheat(
        "forward-modifies-inputs",
        2,
        "test_flash_forward_matches_naive",
        "q is scaled in place",
        "",
        (
            "    scale = 1.0 / math.sqrt(D)\n",
            "    scale = 1.0 / math.sqrt(D)\n    q.mul_(scale)\n    scale = 1.0\n",
        ),
        inside=FORWARD,
    ),
    cheat(
        "forward-edits-the-oracle",
        2,
        "test_flash_forward_matches_naive",
        "the check is switched off",
        """
def flash_attention_forward(q, k, v, causal=False, block_q=16, block_k=16):
    from labs._harness import oracle

    oracle.Expected.check = lambda self, got: None
    return torch.zeros_like(q), torch.zeros(q.shape[:3])
""",
    ),
]

STEP_3 = [
    bug(
        "backward-no-delta",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "delta is left out of dS = P (dP - delta) (handout section 4)",
        ("ds = p * (dp - delta[:, :, i0:i1, None])", "ds = p * dp"),
    ),
    bug(
        "backward-delta-per-tile",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "delta is summed over one key tile instead of the whole row (handout section 4)",
        (
            "ds = p * (dp - delta[:, :, i0:i1, None])",
            "ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))",
        ),
    ),
    bug(
        "backward-delta-sign",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "delta is added instead of subtracted (handout section 4)",
        ("(dp - delta[:, :, i0:i1, None])", "(dp + delta[:, :, i0:i1, None])"),
    ),
    bug(
        "backward-dq-overwritten",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "dq keeps the last key tile's part only: it must be added to (handout section 4)",
        ("dq[:, :, i0:i1] += ", "dq[:, :, i0:i1] = "),
    ),
    bug(
        "backward-dk-overwritten",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "dk keeps the last query tile's part only: it must be added to (handout section 4)",
        ("dk_acc += ", "dk_acc = "),
    ),
    bug(
        "backward-dk-no-scale",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "dk lacks the factor 1/sqrt(D) (handout section 4)",
        ("ds.transpose(-2, -1) @ q_tile * scale", "ds.transpose(-2, -1) @ q_tile"),
    ),
    bug(
        "backward-dq-no-scale",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "dq lacks the factor 1/sqrt(D) (handout section 4)",
        ("ds @ k_tile * scale", "ds @ k_tile"),
    ),
    bug(
        "backward-no-mask",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "the causal mask is missing in the backward (handout section 4)",
        ("            if causal:\n", "            if False:\n"),
    ),
    bug(
        "backward-starts-late",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "the causal loop starts one query tile late (handout section 4)",
        (
            "lo = j0 // block_q * block_q if causal else 0",
            "lo = -(-j0 // block_q) * block_q if causal else 0",
        ),
    ),
    bug(
        "backward-starts-off-tile",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "the causal loop skips the rows of the diagonal tile's own query tile",
        (
            "lo = j0 // block_q * block_q if causal else 0",
            "lo = (j0 // block_q + 1) * block_q if causal else 0",
        ),
    ),
    bug(
        "backward-t-for-s",
        3,
        BACKWARD,
        "test_flash_backward_cross_attention_lengths",
        "the query loop runs to S, the number of keys, instead of T",
        ("for i0 in range(lo, T, block_q):", "for i0 in range(lo, min(S, T), block_q):"),
    ),
    bug(
        "backward-base-2",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "lse is taken for a base-2 logarithm",
        ("p = torch.exp(s - lse[:, :, i0:i1, None])", "p = torch.exp2(s - lse[:, :, i0:i1, None])"),
    ),
    bug(
        "backward-v-for-dout",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "dv is P V instead of P dO (handout section 4)",
        ("dv_acc += p.transpose(-2, -1) @ dout_tile", "dv_acc += p.transpose(-2, -1) @ q_tile"),
    ),
    bug(
        "backward-dout-view",
        3,
        BACKWARD,
        "test_flash_backward_reads_dout_through_its_strides",
        "dout is read as if it were contiguous (handout section 4)",
        (
            "    T, D = q.shape[2:]\n",
            "    T, D = q.shape[2:]\n"
            "    flat = dout.as_strided((dout.untyped_storage().nbytes() // dout.element_size(),),"
            " (1,), 0)\n"
            "    n = dout.numel()\n"
            "    dout = flat.repeat(-(-n // flat.numel()))[:n].view(dout.shape)\n",
        ),
    ),
    bug(
        "backward-half",
        3,
        BACKWARD,
        "test_flash_backward_sums_in_float32",
        "the gradients accumulate in the dtype of q",
        ("    dtype = lse.dtype\n", "    dtype = q.dtype\n    lse = lse.to(dtype)\n"),
    ),
    bug(
        "backward-last-keys-dropped",
        3,
        BACKWARD,
        "test_flash_backward_matches_autograd",
        "the last, ragged tile of keys gets no gradient",
        (
            "    for j0 in range(0, S, block_k):\n",
            "    dk.zero_(), dv.zero_()\n"
            "    for j0 in range(0, max(S // block_k, 1) * block_k, block_k):\n",
        ),
    ),
    waste(
        "backward-no-tile-skip",
        3,
        BACKWARD,
        "test_flash_backward_causal_skips_tiles",
        "query tiles above the diagonal are computed and masked away",
        ("lo = j0 // block_q * block_q if causal else 0", "lo = 0"),
    ),
    waste(
        "backward-full-p",
        3,
        BACKWARD,
        "test_flash_backward_makes_no_score_matrix",
        "P is made whole",
        ("    dtype = lse.dtype\n", "    dtype = lse.dtype\n    block_q, block_k = T, S\n"),
    ),
    waste(
        "backward-full-columns",
        3,
        BACKWARD,
        "test_flash_backward_makes_no_score_matrix",
        "each key tile takes all queries at once",
        ("    dtype = lse.dtype\n", "    dtype = lse.dtype\n    block_q = T\n"),
    ),
    waste(
        "autograd-saves-p",
        3,
        "",
        "test_autograd_function_saves_nothing_of_size_t_squared",
        "P is kept for the backward",
        (
            "        ctx.causal = causal\n",
            "        ctx.causal = causal\n        ctx.p = q @ k.mT\n",
        ),
    ),
    cheat(
        "backward-autograd",
        3,
        "test_flash_backward_matches_autograd",
        "autograd gives the gradients",
        """
def flash_attention_backward(q, k, v, out, lse, dout, causal=False, block_q=16, block_k=16):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(naive_attention(*leaves, causal=causal), leaves, dout)
""",
    ),
]

STEP_4 = [
    bug(
        "softmax-no-max",
        4,
        SOFTMAX,
        "test_triton_softmax_large_values",
        "the maximum is not subtracted before exp (handout section 5)",
        ("tl.exp(x - tl.max(x, axis=0))", "tl.exp(x)"),
    ),
    bug(
        "softmax-padding-counted",
        4,
        SOFTMAX,
        "test_triton_softmax",
        "padding columns count as exp(0): load them as -inf (handout section 5)",
        ('other=float("-inf")', "other=0.0"),
    ),
    bug(
        "softmax-finite-minus-inf",
        4,
        SOFTMAX,
        "test_triton_softmax_large_values",
        "padding columns hold a finite number that a real row can lie below",
        ('other=float("-inf")', "other=-1e4"),
    ),
    bug(
        "softmax-load-unmasked",
        4,
        SOFTMAX,
        "test_triton_softmax",
        "the load has no mask (handout section 5)",
        (
            'tl.load(x_ptr + row * stride_xr + cols, mask=mask, other=float("-inf"))',
            "tl.load(x_ptr + row * stride_xr + cols)",
        ),
        (
            "x = x.to(tl.float32)",
            'x = tl.where(mask, x.to(tl.float32), float("-inf"))',
        ),
    ),
    bug(
        "softmax-store-unmasked",
        4,
        SOFTMAX,
        "test_triton_softmax",
        "the store has no mask (handout section 5)",
        ("cols, y, mask=mask)", "cols, y)"),
    ),
    bug(
        "softmax-row-stride-ignored",
        4,
        SOFTMAX,
        "test_triton_softmax_row_strides",
        "rows are taken to be n_cols apart (handout section 5)",
        ("x_ptr + row * stride_xr", "x_ptr + row * n_cols"),
    ),
    bug(
        "softmax-one-stride-for-both",
        4,
        SOFTMAX,
        "test_triton_softmax_row_strides",
        "the result is stored with the input's stride",
        ("y_ptr + row * stride_yr", "y_ptr + row * stride_xr"),
    ),
    bug(
        "softmax-32-bit-offsets",
        4,
        SOFTMAX,
        "test_triton_softmax_offsets_beyond_32_bits",
        "row times stride wraps past 2**31 (handout section 5)",
        ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
    ),
    bug(
        "softmax-half",
        4,
        SOFTMAX,
        "test_triton_softmax",
        "the row is summed in half precision",
        ("x = x.to(tl.float32)", "x = x.to(tl.float16)"),
    ),
    bug(
        "softmax-nan-hidden",
        4,
        SOFTMAX,
        "test_triton_softmax_rows_that_are_not_finite",
        "a row that is not finite gets plausible numbers",
        (
            "x = x.to(tl.float32)",
            "x = x.to(tl.float32)\n        x = tl.where(x == x, tl.clamp(x, -3e38, 3e38), -3e38)",
        ),
    ),
    bug(
        "softmax-wide-rows-taken",
        4,
        LAUNCH4,
        "test_triton_softmax_rejects",
        "rows wider than a program's block are not refused",
        ("n_cols > 65_536", "n_cols > 1 << 30"),
    ),
    waste(
        "softmax-three-passes",
        4,
        SOFTMAX,
        "test_triton_softmax_reads_and_writes_once",
        "the row is read again for each use",
        (
            "p = tl.exp(x - tl.max(x, axis=0))",
            'again = tl.load(x_ptr + row * stride_xr + cols, mask=mask, other=float("-inf"))\n'
            "        p = tl.exp(again.to(tl.float32) - tl.max(x, axis=0))",
        ),
    ),
    cheat(
        "softmax-torch",
        4,
        "test_triton_softmax",
        "torch.softmax does the work",
        """
_launch = triton_softmax


def triton_softmax(x):
    _launch(x)
    return torch.softmax(x, dim=-1)
""",
    ),
    cheat(
        "softmax-without-a-kernel",
        4,
        "test_triton_softmax_reads_and_writes_once",
        "PyTorch operations do the work and no kernel runs",
        """
def triton_softmax(x):
    p = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
    return (p / p.sum(-1, keepdim=True)).to(x.dtype)
""",
    ),
    cheat(
        "softmax-cached",
        4,
        "test_triton_softmax_follows_its_input",
        "the output is kept between calls",
        """
_launch, _kept = triton_softmax, {}


def triton_softmax(x):
    key = x.data_ptr(), tuple(x.shape), x.dtype
    if key not in _kept:
        _kept[key] = _launch(x)
    return _kept[key]
""",
    ),
]

STEP_5 = [
    bug(
        "kernel-acc-not-rescaled",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "acc is not rescaled as the max grows (handout section 3)",
        (
            "acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])",
            "acc = tl.dot(p.to(v.dtype), v, acc)",
        ),
    ),
    bug(
        "kernel-l-not-rescaled",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "l is not rescaled as the max grows (handout section 3)",
        ("l_i = l_i * alpha + tl.sum(p, axis=1)", "l_i = l_i + tl.sum(p, axis=1)"),
    ),
    bug(
        "kernel-no-max",
        5,
        KERNEL,
        "test_triton_flash_attention_score_ranges",
        "no maximum is subtracted before exp (handout section 2)",
        ("m_new = tl.maximum(m_i, tl.max(s, axis=1))", "m_new = tl.zeros((BLOCK_M,), tl.float32)"),
    ),
    bug(
        "kernel-scale-missing",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the scores are not scaled by 1/sqrt(D)",
        ("tl.dot(q, tl.trans(k)) * scale", "tl.dot(q, tl.trans(k))"),
    ),
    bug(
        "kernel-scale-hard-coded",
        5,
        KERNEL,
        "test_triton_flash_attention_head_dims",
        "the scale is 1/8, which is right for D = 64 only",
        ("tl.dot(q, tl.trans(k)) * scale", "tl.dot(q, tl.trans(k)) * 0.125"),
    ),
    bug(
        "kernel-scale-after-overflow",
        5,
        KERNEL,
        "test_triton_flash_attention_half_scores_do_not_overflow",
        "the scores overflow float16 before they are scaled",
        (
            "tl.dot(q, tl.trans(k)) * scale",
            "tl.dot(q, tl.trans(k)).to(q.dtype).to(tl.float32) * scale",
        ),
    ),
    bug(
        "kernel-head-dim-hard-coded",
        5,
        KERNEL,
        "test_triton_flash_attention_head_dims",
        "only the first 16 columns of a head are used",
        (
            "q = tl.load(q_ptrs, mask=offs_m[:, None] < T, other=0.0)",
            "q = tl.load(q_ptrs, mask=(offs_m[:, None] < T) & (offs_d[None, :] < 16), other=0.0)",
        ),
    ),
    bug(
        "kernel-padding-keys-counted",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "padding keys count: their scores are 0 and not -inf (handout section 6)",
        ("visible = cols[None, :] < T", "visible = cols[None, :] < T + BLOCK_N"),
    ),
    bug(
        "kernel-mask-strict",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "a query does not see itself: the mask is < where <= is right (handout section 6)",
        ("cols[None, :] <= offs_m[:, None]", "cols[None, :] < offs_m[:, None]"),
    ),
    bug(
        "kernel-no-causal-mask",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the diagonal tiles are not masked (handout section 6)",
        (
            "visible = visible & (cols[None, :] <= offs_m[:, None])",
            "visible = visible & (offs_m[:, None] >= 0)",
        ),
    ),
    bug(
        "kernel-skip-early",
        5,
        KERNEL,
        "test_triton_flash_attention_tiles",
        "the causal loop ends at the query tile's first row (handout section 6)",
        ("hi = tl.minimum(T, (pid_m + 1) * BLOCK_M)", "hi = tl.minimum(T, pid_m * BLOCK_M + 1)"),
    ),
    bug(
        "kernel-last-keys-dropped",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the last, ragged tile of keys is dropped (handout section 6)",
        (
            "for start_n in range(0, hi, BLOCK_N):",
            "for start_n in range(0, hi // BLOCK_N * BLOCK_N, BLOCK_N):",
        ),
    ),
    bug(
        "kernel-rows-unwritten",
        5,
        LAUNCH5,
        "test_triton_flash_attention",
        "the grid is rounded down: the last, ragged tile of queries is never written",
        ("grid = (triton.cdiv(T, block_m), B * H)", "grid = (max(T // block_m, 1), B * H)"),
    ),
    bug(
        "kernel-block-n-for-m",
        5,
        KERNEL,
        "test_triton_flash_attention_tiles",
        "query rows start at pid * BLOCK_N instead of pid * BLOCK_M",
        (
            "offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)",
            "offs_m = pid_m * BLOCK_N + tl.arange(0, BLOCK_M)",
        ),
    ),
    bug(
        "kernel-block-m-for-n",
        5,
        KERNEL,
        "test_triton_flash_attention_tiles",
        "the V pointers advance by BLOCK_M instead of BLOCK_N",
        ("v_ptrs += BLOCK_N * stride_t", "v_ptrs += BLOCK_M * stride_t"),
    ),
    bug(
        "kernel-32-bit-offsets",
        5,
        KERNEL,
        "test_triton_flash_attention_offsets_beyond_32_bits",
        "head times stride wraps past 2**31 (handout section 6)",
        ("pid_bh = tl.program_id(1).to(tl.int64)", "pid_bh = tl.program_id(1)"),
        ("offs_m.to(tl.int64) * stride_t", "offs_m * stride_t"),
    ),
    bug(
        "kernel-q-unmasked",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the load of Q has no mask (handout section 6)",
        ("q = tl.load(q_ptrs, mask=offs_m[:, None] < T, other=0.0)", "q = tl.load(q_ptrs)"),
    ),
    bug(
        "kernel-k-unmasked",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the load of K has no mask (handout section 6)",
        ("k = tl.load(k_ptrs, mask=cols[:, None] < T, other=0.0)", "k = tl.load(k_ptrs)"),
    ),
    bug(
        "kernel-v-unmasked",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the load of V has no mask (handout section 6)",
        ("v = tl.load(v_ptrs, mask=cols[:, None] < T, other=0.0)", "v = tl.load(v_ptrs)"),
    ),
    bug(
        "kernel-v-without-other",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "masked rows of V hold anything, and 0 times anything can be NaN (handout section 6)",
        (
            "v = tl.load(v_ptrs, mask=cols[:, None] < T, other=0.0)",
            "v = tl.load(v_ptrs, mask=cols[:, None] < T)",
        ),
    ),
    bug(
        "kernel-out-unmasked",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the store of the output has no mask (handout section 6)",
        (
            "tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < T)",
            "tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty))",
        ),
    ),
    bug(
        "kernel-lse-unmasked",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the store of lse has no mask (handout section 6)",
        ("m_i + tl.log(l_i), mask=offs_m < T)", "m_i + tl.log(l_i))"),
    ),
    bug(
        "kernel-lse-never-stored",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "lse is never stored",
        ("tl.store(lse_ptrs, m_i + tl.log(l_i), mask=offs_m < T)", "lse_ptrs += 0"),
    ),
    bug(
        "kernel-lse-base-2",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "lse is in base 2 (handout section 6)",
        ("m_i + tl.log(l_i)", "(m_i + tl.log(l_i)) * 1.4426950408889634"),
    ),
    bug(
        "kernel-lse-no-m",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "lse is log l without m (handout section 6)",
        ("m_i + tl.log(l_i)", "tl.log(l_i)"),
    ),
    bug(
        "kernel-lse-stride",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "rows of lse are addressed with the stride of q",
        ("lse_ptr + pid_bh * T + offs_m", "lse_ptr + pid_bh * stride_t + offs_m"),
    ),
    bug(
        "kernel-not-normalised",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "acc is not divided by l at the end (handout section 3)",
        ("out = acc / l_i[:, None]", "out = acc"),
    ),
    bug(
        "kernel-finite-minus-inf",
        5,
        KERNEL,
        "test_triton_flash_attention_huge_equal_scores",
        "hidden scores are a finite number, which real scores lie below",
        ('s = tl.where(visible, s, float("-inf"))', "s = tl.where(visible, s, -1e9)"),
    ),
    bug(
        "kernel-scale-fused",
        5,
        KERNEL,
        "test_triton_flash_attention_huge_equal_scores",
        "s - m is formed from differently rounded scores, so exp is not exactly 1",
        (
            "p = tl.exp(s - m_new[:, None])",
            "p = tl.exp(tl.where(visible, tl.dot(q, tl.trans(k)) * (scale * (1.0 + 1e-7)), "
            'float("-inf")) - m_new[:, None])',
        ),
    ),
    bug(
        "kernel-half-statistics",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "the row sum is kept in half precision",
        (
            "l_i = l_i * alpha + tl.sum(p, axis=1)",
            "l_i = (l_i * alpha + tl.sum(p, axis=1)).to(tl.float16).to(tl.float32)",
        ),
    ),
    bug(
        "kernel-p-rounded",
        5,
        KERNEL,
        "test_triton_flash_attention",
        "P is rounded to float16 whatever V is",
        ("p.to(v.dtype)", "p.to(tl.float16).to(v.dtype)"),
    ),
    bug(
        "kernel-strides-of-v",
        5,
        LAUNCH5,
        "test_triton_flash_attention_layouts",
        "v is passed as it lies in memory with q's strides (handout section 6)",
        (
            "q, k, v = q.contiguous(), k.contiguous(), v.contiguous()",
            "q, k = q.contiguous(), k.contiguous()",
        ),
    ),
    bug(
        "kernel-many-heads-taken",
        5,
        LAUNCH5,
        "test_triton_flash_attention_rejects",
        "more than 65,535 heads are not refused",
        ("if B * H > MAX_GRID_YZ:", "if B * H > 1 << 30:"),
    ),
    waste(
        "kernel-no-tile-skip",
        5,
        KERNEL,
        "test_triton_flash_attention_moves_few_bytes",
        "tiles right of the diagonal are loaded and masked away",
        ("hi = tl.minimum(T, (pid_m + 1) * BLOCK_M)", "hi = T"),
    ),
    waste(
        "kernel-q-in-the-loop",
        5,
        KERNEL,
        "test_triton_flash_attention_moves_few_bytes",
        "q is loaded again for each key tile",
        (
            "            k = tl.load(k_ptrs",
            "            q = tl.load(q_ptrs, mask=offs_m[:, None] < T, other=0.0)\n"
            "            k = tl.load(k_ptrs",
        ),
    ),
    waste(
        "kernel-out-in-the-loop",
        5,
        KERNEL,
        "test_triton_flash_attention_moves_few_bytes",
        "out is stored for each key tile",
        (
            "            m_i = m_new\n",
            "            m_i = m_new\n"
            "            tl.store(out_ptr + rows[:, None] + offs_d[None, :],\n"
            "                     (acc / l_i[:, None]).to(out_ptr.dtype.element_ty),\n"
            "                     mask=offs_m[:, None] < T)\n",
        ),
    ),
    cheat(
        "kernel-sdpa",
        5,
        "test_triton_flash_attention",
        "PyTorch's own attention does the work",
        """
_launch = triton_flash_attention


def triton_flash_attention(q, k, v, causal=False, **options):
    lse = _launch(q, k, v, causal, **options)[1]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal), lse
""",
    ),
    cheat(
        "kernel-is-part-a",
        5,
        "test_triton_flash_attention_moves_few_bytes",
        "part A's PyTorch does the work and no kernel runs",
        """
def triton_flash_attention(q, k, v, causal=False, block_m=16, block_n=16, **options):
    return flash_attention_forward(q, k, v, causal, block_m, block_n)
""",
    ),
    cheat(
        "kernel-imports-the-reference",
        5,
        "test_triton_flash_attention",
        "the reference's kernel does the work",
        """
_launch = triton_flash_attention


def triton_flash_attention(q, k, v, causal=False, **options):
    from labs._impl import load

    load("labs/06_attention_kernels/x.py", "solution")
    return _launch(q, k, v, causal, **options)
""",
    ),
    cheat(
        "kernel-cached",
        5,
        "test_triton_flash_attention_follows_its_input",
        "the output is kept between calls",
        """
_launch, _kept = triton_flash_attention, {}


def triton_flash_attention(q, k, v, causal=False, **options):
    key = q.data_ptr(), tuple(q.shape), causal
    if key not in _kept:
        _kept[key] = _launch(q, k, v, causal, **options)
    return _kept[key]
""",
    ),
]

# Right in the interpreter, and no kernel at all on a GPU.
COMPILES4 = "test_triton_softmax_compiles_for_every_card"
COMPILES5 = "test_triton_flash_attention_compiles_for_every_card"
NOT_ON_A_GPU = [
    bug(
        "softmax-global-constant",
        4,
        SOFTMAX,
        COMPILES4,
        "the kernel reads a global variable, which the compiler refuses",
        ('other=float("-inf")', "other=NOTHING"),
        append='NOTHING = float("-inf")',
    ),
    bug(
        "kernel-break",
        5,
        KERNEL,
        COMPILES5,
        "the causal loop is left with break, which the compiler refuses",
        ("hi = tl.minimum(T, (pid_m + 1) * BLOCK_M)", "hi = T"),
        (
            "            cols = start_n + offs_n",
            "            if CAUSAL and start_n >= (pid_m + 1) * BLOCK_M:\n"
            "                break\n"
            "            cols = start_n + offs_n",
        ),
    ),
    bug(
        "kernel-scalar-sum",
        5,
        KERNEL,
        COMPILES5,
        "the row sum starts as a number and becomes a tile in the loop",
        ("l_i = tl.zeros((BLOCK_M,), tl.float32)", "l_i = 0.0"),
    ),
    bug(
        "kernel-if-on-a-tile",
        5,
        KERNEL,
        COMPILES5,
        "an if asks a whole tile whether the maximum has grown",
        (
            "            m_i = m_new\n",
            "            if tl.max(m_new) > m_i:\n                m_i = m_new\n",
        ),
    ),
    bug(
        "kernel-helper-without-jit",
        5,
        KERNEL,
        COMPILES5,
        "the kernel calls a helper that is not @triton.jit",
        ("acc * alpha[:, None]", "rescaled(acc, alpha)"),
        append="""
def rescaled(acc, alpha):
    return acc * alpha[:, None]
""",
    ),
]

MUTANTS = STEP_1 + STEP_2 + STEP_3 + STEP_4 + STEP_5 + NOT_ON_A_GPU
