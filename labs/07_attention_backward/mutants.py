"""Planted faults of lab 07: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

DELTA, DKDV, DQ, KEYS = "_delta_kernel", "_dkdv_kernel", "_dq_kernel", "_dq_keys"
LAUNCH1, LAUNCH2, LAUNCH3 = "attention_delta", "attention_dkdv", "attention_dq"
BACKWARD, LAYER = "backward", "causal_self_attention"


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside, append)


def cheat(id, step, caught_by, teaches, append, *edits, inside=""):
    return Mutant(id, "cheat", step, teaches, caught_by, edits, inside, append)


STEP_1 = [
    bug(
        "delta-strides-of-out",
        1,
        DELTA,
        "test_delta_strides_of_out_and_dout_differ",
        "dout is read with the strides of out (handout section 2)",
        (
            "dout_ptr + b * stride_gb + h * stride_gh + rows * stride_gt + offs_d * stride_gd",
            "dout_ptr + b * stride_ob + h * stride_oh + rows * stride_ot + offs_d * stride_od",
        ),
    ),
    bug(
        "delta-rows-32-bit",
        1,
        DELTA,
        "test_delta_rows_far_apart",
        "a row's number times its stride passes 2**31 (handout section 2)",
        ("rows = offs_m.to(tl.int64)[:, None]", "rows = offs_m[:, None]"),
    ),
    bug(
        "delta-elements-adjacent",
        1,
        DELTA,
        "test_delta_of_an_expanded_dout",
        "the elements of a row of dout are taken to be adjacent (handout section 2)",
        ("offs_d * stride_gd", "offs_d"),
    ),
    bug(
        "delta-contiguous-dout",
        1,
        DELTA,
        "test_delta_of_a_slice",
        "dout is taken to be contiguous (handout section 2)",
        (
            "dout_ptr + b * stride_gb + h * stride_gh + rows * stride_gt + offs_d * stride_gd",
            "dout_ptr + (pid_bh * T + rows) * D + offs_d",
        ),
    ),
    bug(
        "delta-of-out",
        1,
        DELTA,
        "test_delta",
        "out is multiplied with itself",
        ("tl.sum(out * dout, axis=1)", "tl.sum(out * out, axis=1)"),
    ),
    bug(
        "delta-mean",
        1,
        DELTA,
        "test_delta",
        "the mean of a row is taken, and not its sum",
        ("tl.sum(out * dout, axis=1)", "tl.sum(out * dout, axis=1) / D"),
    ),
    bug(
        "delta-half-products",
        1,
        DELTA,
        "test_delta_half_products_do_not_overflow",
        "the products are taken in half precision, before the sum (handout section 2)",
        (
            "dout = tl.load(dout_ptrs, mask=rows < T, other=0.0).to(tl.float32)",
            "dout = tl.load(dout_ptrs, mask=rows < T, other=0.0)",
        ),
        (
            "out = tl.load(out_ptrs, mask=rows < T, other=0.0).to(tl.float32)",
            "out = tl.load(out_ptrs, mask=rows < T, other=0.0)",
        ),
        (
            "delta = tl.sum(out * dout, axis=1)",
            "delta = tl.sum((out * dout).to(tl.float32), axis=1)",
        ),
    ),
    bug(
        "delta-load-unmasked",
        1,
        DELTA,
        "test_delta",
        "the load of dout has no mask (handout section 2)",
        ("tl.load(dout_ptrs, mask=rows < T, other=0.0)", "tl.load(dout_ptrs)"),
    ),
    bug(
        "delta-store-unmasked",
        1,
        DELTA,
        "test_delta",
        "the store has no mask: it writes into the next head's rows",
        ("delta, mask=offs_m < T)", "delta)"),
    ),
    bug(
        "delta-32-bit-offsets",
        1,
        DELTA,
        "test_delta_offsets_beyond_32_bits",
        "head times stride wraps past 2**31",
        ("tl.program_id(1).to(tl.int64)", "tl.program_id(1)"),
        ("rows = offs_m.to(tl.int64)[:, None]", "rows = offs_m[:, None]"),
    ),
    bug(
        "delta-half-result",
        1,
        LAUNCH1,
        "test_delta",
        "delta is stored in the dtype of out (handout section 2)",
        ("dtype=torch.float32", "dtype=out.dtype"),
    ),
    bug(
        "delta-rows-left-out",
        1,
        LAUNCH1,
        "test_delta",
        "the grid is rounded down: the last, ragged tile of rows is never written",
        ("triton.cdiv(T, block_m)", "max(1, T // block_m)"),
    ),
    bug(
        "delta-shapes-not-checked",
        1,
        LAUNCH1,
        "test_delta_rejects",
        "a dout that does not fit is not refused",
        ("    if out.shape != dout.shape:\n", "    if False:\n"),
        ("    check_qkv(out, dout, dout)\n", ""),
        (
            "    _check(out, dout, dout, causal=False)\n",
            "    _check(out, out, out, causal=False)\n",
        ),
    ),
    waste(
        "delta-copies",
        1,
        LAUNCH1,
        "test_delta_reads_and_writes_once",
        "out and dout are copied first",
        (
            "    B, H, T, D = out.shape\n",
            "    B, H, T, D = out.shape\n    out, dout = out.clone(), dout.clone()\n",
        ),
    ),
    cheat(
        "delta-in-pytorch",
        1,
        "test_delta_reads_and_writes_once",
        "PyTorch does the work and no kernel runs",
        """
_kernel_delta = attention_delta


def attention_delta(out, dout):
    _check(out, dout, dout, causal=False)
    return (out.float() * dout.float()).sum(dim=-1)
""",
    ),
    cheat(
        "delta-cached",
        1,
        "test_delta_follows_its_input",
        "the result is kept between calls",
        """
_kernel_delta, _kept = attention_delta, {}


def attention_delta(out, dout):
    key = out.data_ptr(), dout.data_ptr(), out.shape, dout.stride()
    if key not in _kept:
        _kept[key] = _kernel_delta(out, dout)
    return _kept[key]
""",
    ),
]

STEP_2 = [
    bug(
        "dkdv-no-mask",
        2,
        DKDV,
        "test_dkdv",
        "the causal mask is missing in the backward (handout section 3)",
        ("if start_m < start_n + BLOCK_N - 1:", "if start_m < 0:"),
    ),
    bug(
        "dkdv-mask-after-exp",
        2,
        DKDV,
        "test_dkdv_masked_scores_do_not_overflow",
        "p is multiplied by a 0/1 mask after exp: inf times 0 is NaN (handout section 3)",
        (
            's = tl.where(offs_n[:, None] <= rows[None, :], s, float("-inf"))',
            "s = s + 0.0",
        ),
        (
            "p = tl.exp2(s)  # (BLOCK_N, BLOCK_M)",
            "p = tl.exp2(s)  # (BLOCK_N, BLOCK_M)\n"
            "            if CAUSAL:\n"
            "                p = p * (offs_n[:, None] <= rows[None, :]).to(tl.float32)",
        ),
    ),
    bug(
        "dkdv-mask-strict",
        2,
        DKDV,
        "test_dkdv",
        "a query does not see itself: the mask is < where <= is right",
        ("offs_n[:, None] <= rows[None, :]", "offs_n[:, None] < rows[None, :]"),
    ),
    bug(
        "dkdv-mask-mirrored",
        2,
        DKDV,
        "test_dkdv",
        "the mask is not transposed along with the tile (handout section 3)",
        ("offs_n[:, None] <= rows[None, :]", "offs_n[:, None] >= rows[None, :]"),
    ),
    bug(
        "dkdv-mask-ends-early",
        2,
        DKDV,
        "test_dkdv_tiles",
        "only the first query tile is masked: a key tile can cross several (handout section 3)",
        ("if start_m < start_n + BLOCK_N - 1:", "if start_m <= start_n:"),
    ),
    bug(
        "dkdv-starts-late",
        2,
        DKDV,
        "test_dkdv_tiles",
        "the walk starts at the first whole query tile below the diagonal (handout section 3)",
        ("lo = start_n // BLOCK_M * BLOCK_M", "lo = tl.cdiv(start_n, BLOCK_M) * BLOCK_M"),
    ),
    bug(
        "dkdv-starts-off-tile",
        2,
        DKDV,
        "test_dkdv_tiles",
        "the walk starts one query tile after the diagonal",
        ("lo = start_n // BLOCK_M * BLOCK_M", "lo = (start_n // BLOCK_M + 1) * BLOCK_M"),
    ),
    bug(
        "dkdv-dout-starts-at-row-0",
        2,
        DKDV,
        "test_dkdv_tiles",
        "q starts at the diagonal and dout at row 0 (handout section 3)",
        ("            dout_ptr += lo.to(tl.int64) * stride_gt\n", ""),
    ),
    bug(
        "dkdv-dout-stays",
        2,
        DKDV,
        "test_dkdv_tiles",
        "dout does not move on with q: every turn reads its first tile",
        ("            dout_ptrs += BLOCK_M * stride_gt\n", ""),
    ),
    bug(
        "dkdv-causal-ignored",
        2,
        LAUNCH2,
        "test_dkdv",
        "causal is always on (handout section 3)",
        ('"CAUSAL": causal', '"CAUSAL": True'),
    ),
    bug(
        "dkdv-no-delta",
        2,
        DKDV,
        "test_dkdv",
        "delta is left out of dS = P (dP - delta)",
        ("ds = p * (dp - delta[None, :])", "ds = p * dp"),
    ),
    bug(
        "dkdv-delta-sign",
        2,
        DKDV,
        "test_dkdv",
        "delta is added",
        ("dp - delta[None, :]", "dp + delta[None, :]"),
    ),
    bug(
        "dkdv-dk-no-scale",
        2,
        DKDV,
        "test_dkdv",
        "dk lacks the scale (handout section 3)",
        ("(dk * scale)", "dk"),
    ),
    bug(
        "dkdv-dk-scaled-in-base-2",
        2,
        DKDV,
        "test_dkdv",
        "dk is scaled by scale * log2(e): that factor belongs to the exponent (handout section 3)",
        ("(dk * scale)", "(dk * scale2)"),
    ),
    bug(
        "dkdv-natural-exponent",
        2,
        DKDV,
        "test_dkdv",
        "exp2 is given a natural exponent: log2(e) is missing (handout section 3)",
        ("scale2 = scale * 1.4426950408889634", "scale2 = scale"),
    ),
    bug(
        "dkdv-lse-base-2-twice",
        2,
        LAUNCH2,
        "test_dkdv",
        "lse is converted to base 2 twice",
        (".mul_(math.log2(math.e))", ".mul_(math.log2(math.e) ** 2)"),
    ),
    bug(
        "dkdv-lse-in-place",
        2,
        LAUNCH2,
        "test_dkdv",
        "lse is converted in place: the dq kernel, which wants it natural, reads base 2",
        ("lse.nan_to_num(", "lse.nan_to_num_("),
    ),
    bug(
        "dkdv-scale-ignored",
        2,
        LAUNCH2,
        "test_dkdv_scale",
        "the scale asked for is ignored",
        ("if scale is None else scale", "if True else scale"),
    ),
    bug(
        "dkdv-mask-before-scale",
        2,
        DKDV,
        "test_dkdv_scale",
        "the mask comes before the scale: -inf times a negative scale is inf, times 0 NaN",
        ("s = s * scale2 - lse2[None, :]", "s = s + 0.0"),
        ("p = tl.exp2(s)", "p = tl.exp2(s * scale2 - lse2[None, :])"),
    ),
    bug(
        "dkdv-dv-of-ds",
        2,
        DKDV,
        "test_dkdv",
        "dv is dS dO and not P dO",
        (
            "            dv = tl.dot(p.to(dout.dtype), dout, dv)\n",
            "",
        ),
        (
            "            dk = tl.dot(ds.to(q.dtype), q, dk)\n",
            "            dk = tl.dot(ds.to(q.dtype), q, dk)\n"
            "            dv = tl.dot(ds.to(q.dtype), dout, dv)\n",
        ),
    ),
    bug(
        "dkdv-overwritten",
        2,
        DKDV,
        "test_dkdv_tiles",
        "dv keeps the last query tile's part only",
        ("tl.dot(p.to(dout.dtype), dout, dv)", "tl.dot(p.to(dout.dtype), dout)"),
    ),
    bug(
        "dkdv-q-strides-for-dout",
        2,
        DKDV,
        "test_dkdv_layouts",
        "dout is walked with the row stride of q (handout section 3)",
        ("dout_ptrs += BLOCK_M * stride_gt", "dout_ptrs += BLOCK_M * stride_qt"),
    ),
    bug(
        "dkdv-v-strides",
        2,
        DKDV,
        "test_dkdv_layouts",
        "v is read with the strides of k",
        (
            "v_ptr + b * stride_vb + h * stride_vh + keys * stride_vs",
            "v_ptr + b * stride_kb + h * stride_kh + keys * stride_ks",
        ),
    ),
    bug(
        "dkdv-t-for-s",
        2,
        DKDV,
        "test_dkdv_lengths",
        "dk and dv are stored as if there were T keys",
        ("offset = (pid_bh * S + keys)", "offset = (pid_bh * T + keys)"),
    ),
    bug(
        "dkdv-padding-rows-weigh",
        2,
        DKDV,
        "test_dkdv",
        "padding rows are read past the end of q: the load has no mask (handout section 3)",
        ("_load(q_ptrs, exists[:, None], 0.0, WHOLE)", "tl.load(q_ptrs)"),
    ),
    bug(
        "dkdv-registers-swapped",
        2,
        DKDV,
        "test_dkdv_operands_in_registers",
        "in the branch for Hopper k becomes v, and v becomes k",
        ("k, v = _in_registers(k)", "v, k = _in_registers(k)"),
    ),
    bug(
        "dkdv-walk-from-the-first-row",
        2,
        DKDV,
        "test_dkdv_tiles",
        "the walk begins at the tile's first key and runs past T: turns begin at multiples of "
        "BLOCK_M (handout section 3)",
        ("lo = start_n // BLOCK_M * BLOCK_M", "lo = start_n"),
    ),
    bug(
        "dkdv-rows-32-bit",
        2,
        DKDV,
        "test_dkdv_rows_far_apart",
        "a row's number times its stride passes 2**31 (handout section 2)",
        ("first = offs_m.to(tl.int64)[:, None]", "first = offs_m[:, None]"),
    ),
    bug(
        "dkdv-rounds-each-turn",
        2,
        DKDV,
        "test_dkdv_sums_many_turns_in_float32",
        "dv is rounded to half in each turn",
        (
            "dv = tl.dot(p.to(dout.dtype), dout, dv)",
            "dv = tl.dot(p.to(dout.dtype), dout, dv).to(dout.dtype).to(tl.float32)",
        ),
    ),
    waste(
        "dkdv-registers-in-the-loop",
        2,
        DKDV,
        "test_dkdv_makes_operands_of_registers_once",
        "k and v are multiplied by the identity in every turn (handout section 3)",
        (
            "        if REGISTERS:\n"
            "            k, v = _in_registers(k), _in_registers(v)  # (BLOCK_N, D)\n",
            "",
        ),
        (
            "            s = tl.dot(k, tl.trans(q))  # (BLOCK_N, BLOCK_M)\n",
            "            if REGISTERS:\n"
            "                k, v = _in_registers(k), _in_registers(v)  # (BLOCK_N, D)\n"
            "            s = tl.dot(k, tl.trans(q))  # (BLOCK_N, BLOCK_M)\n",
        ),
    ),
    bug(
        "dkdv-lse-without-other",
        2,
        DKDV,
        "test_dkdv",
        "the lse of padding rows is whatever lies there (handout section 3)",
        (
            '_load(lse2_ptr + rows, exists, float("inf"), WHOLE)',
            "tl.load(lse2_ptr + rows, mask=exists)",
        ),
    ),
    bug(
        "dkdv-whole-always",
        2,
        LAUNCH2,
        "test_dkdv",
        "ragged lengths take the path that needs no mask",
        ("WHOLE=T % block_m == 0", "WHOLE=True"),
    ),
    bug(
        "dkdv-unseen-row",
        2,
        LAUNCH2,
        "test_dkdv_row_that_saw_no_key",
        "lse = -inf goes into exp(s - lse), which is inf (handout section 3)",
        (".nan_to_num(math.nan, math.inf, math.inf)", ".clone()"),
    ),
    bug(
        "dkdv-32-bit-offsets",
        2,
        DKDV,
        "test_dkdv_offsets_beyond_32_bits",
        "head times stride wraps past 2**31",
        ("tl.program_id(1).to(tl.int64)", "tl.program_id(1)"),
        ("keys = offs_n.to(tl.int64)[:, None]", "keys = offs_n[:, None]"),
    ),
    bug(
        "dkdv-p-rounded",
        2,
        DKDV,
        "test_dkdv",
        "P is rounded to float16 whatever dout is",
        ("p.to(dout.dtype)", "p.to(tl.float16).to(dout.dtype)"),
    ),
    bug(
        "dkdv-store-unmasked",
        2,
        DKDV,
        "test_dkdv",
        "the store of dv has no mask: it writes into the next head",
        (
            "tl.store(dv_ptr + offset, dv.to(dv_ptr.dtype.element_ty), mask=keys < S)",
            "tl.store(dv_ptr + offset, dv.to(dv_ptr.dtype.element_ty))",
        ),
    ),
    waste(
        "dkdv-no-tile-skip",
        2,
        DKDV,
        "test_dkdv_moves_few_bytes",
        "query tiles above the diagonal are loaded and masked away (handout section 3)",
        ("lo = start_n // BLOCK_M * BLOCK_M", "lo = start_n * 0"),
    ),
    waste(
        "dkdv-copies",
        2,
        LAUNCH2,
        "test_dkdv_moves_few_bytes",
        "every input is copied first",
        (
            "_rows(q), _rows(k), _rows(v), _rows(dout)",
            "q.clone(), k.clone(), v.clone(), dout.clone()",
        ),
    ),
    waste(
        "dkdv-keys-in-the-loop",
        2,
        DKDV,
        "test_dkdv_moves_few_bytes",
        "v is loaded again for each query tile",
        (
            "            exists = rows < T  # (BLOCK_M,)\n",
            "            exists = rows < T  # (BLOCK_M,)\n"
            "            v = tl.load(v_ptrs, mask=keys < S, other=0.0)\n",
        ),
    ),
    cheat(
        "dkdv-autograd",
        2,
        "test_dkdv",
        "autograd gives the gradients",
        """
_kernel_dkdv = attention_dkdv


def attention_dkdv(q, k, v, dout, lse, delta, causal=False, scale=None, **sizes):
    _kernel_dkdv(q, k, v, dout, lse, delta, causal, scale, **sizes)
    x, y, z = (t.detach().requires_grad_() for t in (q, k, v))
    s = x @ y.transpose(-2, -1) * (scale or q.shape[-1] ** -0.5)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    p = torch.exp(s - s.detach().logsumexp(-1, keepdim=True))
    out = (p / p.sum(-1, keepdim=True)) @ z
    return torch.autograd.grad(out, (y, z), dout)
""",
    ),
    cheat(
        "dkdv-in-pytorch",
        2,
        "test_dkdv_moves_few_bytes",
        "PyTorch does the products and no kernel runs",
        """
def attention_dkdv(q, k, v, dout, lse, delta, causal=False, scale=None, block_m=64, block_n=64):
    _check_backward(q, k, v, dout, lse, delta, causal, block_m=block_m, block_n=block_n)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = q.float() @ k.float().transpose(-2, -1) * scale
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    p = torch.exp(s - lse[..., None])
    ds = p * (dout.float() @ v.float().transpose(-2, -1) - delta[..., None])
    dk, dv = ds.transpose(-2, -1) @ q.float() * scale, p.transpose(-2, -1) @ dout.float()
    return dk.to(q.dtype), dv.to(q.dtype)
""",
    ),
]

STEP_3 = [
    bug(
        "dq-padding-keys-counted",
        3,
        KEYS,
        "test_dq_padding_keys_do_not_overflow",
        "padding keys are not masked: exp(0 - lse) can be inf, and inf * 0 is NaN "
        "(handout section 4)",
        ("visible = cols[None, :] < S", "visible = cols[None, :] >= 0"),
    ),
    bug(
        "dq-mask-after-exp",
        3,
        KEYS,
        "test_dq_masked_scores_do_not_overflow",
        "p is multiplied by a 0/1 mask after exp: inf times 0 is NaN (handout section 4)",
        ('                s = tl.where(visible, s, float("-inf"))', "                s = s + 0.0"),
        (
            "p = tl.exp2(s)",
            "ok = (cols[None, :] < S) & ((cols[None, :] <= offs_m[:, None]) | (not CAUSAL))\n"
            "            p = tl.exp2(s) * ok.to(tl.float32)",
        ),
    ),
    bug(
        "dq-no-mask",
        3,
        KEYS,
        "test_dq",
        "the causal mask is missing in the backward (handout section 4)",
        (
            "visible = visible & (cols[None, :] <= offs_m[:, None])",
            "visible = visible & (offs_m[:, None] >= 0)",
        ),
    ),
    bug(
        "dq-mask-strict",
        3,
        KEYS,
        "test_dq",
        "a query does not see itself: the mask is < where <= is right",
        ("cols[None, :] <= offs_m[:, None]", "cols[None, :] < offs_m[:, None]"),
    ),
    bug(
        "dq-rows-32-bit",
        3,
        DQ,
        "test_dq_rows_far_apart",
        "a row's number times its stride passes 2**31 (handout section 2)",
        ("rows = offs_m.to(tl.int64)[:, None]", "rows = offs_m[:, None]"),
    ),
    bug(
        "dq-waits-now-and-then",
        3,
        DQ,
        "test_dq_waits_before_it_stores",
        "without a mask dq does not wait (handout section 3)",
        ("        if OVERLAP:  # what ran", "        if OVERLAP and CAUSAL:  # what ran"),
    ),
    bug(
        "dq-registers-of-q",
        3,
        DQ,
        "test_dq_operand_in_registers",
        "in the branch for Hopper dout becomes q",
        ("dout = _in_registers(dout)", "dout = _in_registers(q)"),
    ),
    bug(
        "dq-waits-after-it-stores",
        3,
        DQ,
        "test_dq_waits_before_it_stores",
        "dq is written while the kernel before still reads that memory (handout section 3)",
        (
            "        dq_ptrs = dq_ptr + (pid_bh * T + rows) * D + offs_d  # (BLOCK_M, D)\n"
            "        tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=rows < T)\n",
            "        dq_ptrs = dq_ptr + (pid_bh * T + rows) * D + offs_d  # (BLOCK_M, D)\n"
            "        tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=rows < T)\n"
            "        if OVERLAP:\n"
            "            tl.extra.cuda.gdc_wait()\n",
        ),
    ),
    bug(
        "dq-mask-begins-late",
        3,
        DQ,
        "test_dq_tiles",
        "the tiles taken to need no mask reach across the diagonal (handout section 4)",
        (
            "mid = (start_m + 1) // BLOCK_N * BLOCK_N",
            "mid = (start_m + BLOCK_M) // BLOCK_N * BLOCK_N",
        ),
    ),
    bug(
        "dq-ragged-tile-unmasked",
        3,
        DQ,
        "test_dq",
        "the last, ragged tile of keys is walked as a full one (handout section 4)",
        ("mid, hi = S // BLOCK_N * BLOCK_N, S", "mid, hi = tl.cdiv(S, BLOCK_N) * BLOCK_N, S"),
    ),
    bug(
        "dq-second-walk-from-key-0",
        3,
        DQ,
        "test_dq_tiles",
        "the masked walk starts at key 0: full tiles count twice (handout section 4)",
        ("delta, offs_m, mid, hi,", "delta, offs_m, 0, hi,"),
    ),
    bug(
        "dq-second-walk-not-masked",
        3,
        DQ,
        "test_dq",
        "neither of the two walks has a mask (handout section 4)",
        ("CAUSAL, True, WHOLE)", "CAUSAL, False, WHOLE)"),
    ),
    bug(
        "dq-second-walk-starts-anew",
        3,
        DQ,
        "test_dq_tiles",
        "the second walk forgets what the first one added up",
        (
            "_dq_keys(dq, q, dout, k_ptr, v_ptr, lse2, delta, offs_m, mid, hi,",
            "_dq_keys(dq * 0.0, q, dout, k_ptr, v_ptr, lse2, delta, offs_m, mid, hi,",
        ),
    ),
    bug(
        "dq-pointers-not-at-lo",
        3,
        KEYS,
        "test_dq_tiles",
        "the second walk's pointers start at key 0 and its columns at mid (handout section 4)",
        ("keys = (lo + offs_n).to(tl.int64)", "keys = offs_n.to(tl.int64)"),
    ),
    bug(
        "dq-values-stay",
        3,
        KEYS,
        "test_dq_tiles",
        "v does not move on with k: every turn reads the walk's first tile",
        ("            v_ptrs += BLOCK_N * stride_vs\n", ""),
    ),
    bug(
        "dq-value-strides",
        3,
        KEYS,
        "test_dq_layouts",
        "v is walked with the row stride of k (handout section 4)",
        ("v_ptrs = v_ptr + keys * stride_vs", "v_ptrs = v_ptr + keys * stride_ks"),
    ),
    bug(
        "dq-whole-always",
        3,
        LAUNCH3,
        "test_dq",
        "ragged lengths take the path that needs no mask on its loads",
        ("WHOLE=S % block_n == 0", "WHOLE=True"),
    ),
    bug(
        "dq-natural-exponent",
        3,
        DQ,
        "test_dq",
        "exp2 is given natural scores: log2(e) is missing in the scale",
        ("scale2 = scale * log2e", "scale2 = scale"),
    ),
    bug(
        "dq-ends-early",
        3,
        DQ,
        "test_dq_tiles",
        "the causal walk ends at the query tile's first row",
        ("hi = tl.minimum(S, start_m + BLOCK_M)", "hi = tl.minimum(S, start_m + 1)"),
    ),
    bug(
        "dq-last-keys-dropped",
        3,
        DQ,
        "test_dq_lengths",
        "the last, ragged tile of keys is dropped",
        (
            "mid, hi = S // BLOCK_N * BLOCK_N, S",
            "mid, hi = S // BLOCK_N * BLOCK_N, S // BLOCK_N * BLOCK_N",
        ),
    ),
    bug(
        "dq-t-for-s",
        3,
        DQ,
        "test_dq_lengths",
        "the key loop runs to T",
        (
            "mid, hi = S // BLOCK_N * BLOCK_N, S",
            "mid, hi = S // BLOCK_N * BLOCK_N, tl.minimum(S, T)",
        ),
    ),
    bug(
        "dq-causal-ignored",
        3,
        LAUNCH3,
        "test_dq",
        "causal is always on (handout section 4)",
        ('"CAUSAL": causal', '"CAUSAL": True'),
    ),
    bug(
        "dq-mask-before-scale",
        3,
        KEYS,
        "test_dq_scale",
        "the mask comes before the scale: -inf times a negative scale is inf, times 0 NaN",
        ("s = s * scale2 - lse2[:, None]", "s = s + 0.0"),
        ("p = tl.exp2(s)", "p = tl.exp2(s * scale2 - lse2[:, None])"),
    ),
    bug(
        "dq-no-scale",
        3,
        DQ,
        "test_dq",
        "dq lacks the scale",
        ("(dq * scale)", "dq"),
    ),
    bug(
        "dq-scale-hard-coded",
        3,
        LAUNCH3,
        "test_dq_head_dims",
        "the scale is 1/4, which is right for D = 16 only",
        ("1.0 / math.sqrt(D)", "0.25"),
    ),
    bug(
        "dq-no-delta",
        3,
        KEYS,
        "test_dq",
        "delta is left out of dS = P (dP - delta)",
        ("ds = p * (dp - delta[:, None])", "ds = p * dp"),
    ),
    bug(
        "dq-of-v",
        3,
        KEYS,
        "test_dq",
        "dq is dS V and not dS K",
        ("tl.dot(ds.to(k.dtype), k, dq)", "tl.dot(ds.to(k.dtype), v, dq)"),
    ),
    bug(
        "dq-unseen-row",
        3,
        DQ,
        "test_dq_row_that_saw_no_key",
        "lse = -inf goes into exp(s - lse), which is inf (handout section 4)",
        ('tl.where(lse == float("-inf"), float("inf"), lse * log2e)', "lse * log2e"),
    ),
    bug(
        "dq-natural-lse",
        3,
        DQ,
        "test_dq",
        "exp2 is given lse in natural units",
        ('float("inf"), lse * log2e)', 'float("inf"), lse)'),
    ),
    bug(
        "dq-dout-strides",
        3,
        DQ,
        "test_dq_layouts",
        "dout is read with the strides of q (handout section 4)",
        (
            "dout_ptr + b * stride_gb + h * stride_gh + rows * stride_gt",
            "dout_ptr + b * stride_qb + h * stride_qh + rows * stride_qt",
        ),
    ),
    bug(
        "dq-strides-for-all-expanded",
        3,
        LAUNCH3,
        "test_dq_of_an_expanded_dout",
        "a dout whose elements are not adjacent is read as if they were (handout section 4)",
        ("_rows(dout)", "dout"),
    ),
    bug(
        "dq-rows-left-out",
        3,
        LAUNCH3,
        "test_dq",
        "the grid is rounded down: the last, ragged tile of queries is never written",
        ("triton.cdiv(T, block_m)", "max(1, T // block_m)"),
    ),
    bug(
        "dq-32-bit-offsets",
        3,
        DQ,
        "test_dq_offsets_beyond_32_bits",
        "head times stride wraps past 2**31",
        ("tl.program_id(1).to(tl.int64)", "tl.program_id(1)"),
        ("rows = offs_m.to(tl.int64)[:, None]", "rows = offs_m[:, None]"),
    ),
    bug(
        "dq-keys-unmasked",
        3,
        KEYS,
        "test_dq",
        "padding keys are read past the end of k: the load has no mask",
        ("_load(k_ptrs, cols[:, None] < S, 0.0, WHOLE)", "tl.load(k_ptrs)"),
    ),
    bug(
        "dq-values-without-other",
        3,
        KEYS,
        "test_dq",
        "padding rows of v are whatever lies there",
        (
            "_load(v_ptrs, cols[:, None] < S, 0.0, WHOLE)",
            "tl.load(v_ptrs, mask=cols[:, None] < S)",
        ),
    ),
    bug(
        "dq-ds-rounded",
        3,
        KEYS,
        "test_dq",
        "dS is rounded to float16 whatever k is",
        ("ds.to(k.dtype)", "ds.to(tl.float16).to(k.dtype)"),
    ),
    waste(
        "dq-shortest-first",
        3,
        DQ,
        "test_dq_starts_with_the_longest_tile",
        "the shortest tiles start first and the longest runs alone at the end (handout section 4)",
        ("pid_m = tl.num_programs(0) - 1 - pid_m", "pid_m = pid_m + 0"),
    ),
    waste(
        "dq-no-tile-skip",
        3,
        DQ,
        "test_dq_moves_few_bytes",
        "key tiles right of the diagonal are loaded and masked away",
        ("hi = tl.minimum(S, start_m + BLOCK_M)", "hi = S"),
    ),
    waste(
        "dq-keys-loaded-twice",
        3,
        KEYS,
        "test_dq_moves_few_bytes",
        "k is loaded again for its second product",
        (
            "            dq = tl.dot(ds.to(k.dtype), k, dq)\n",
            "            k = _load(k_ptrs, cols[:, None] < S, 0.0, WHOLE)\n"
            "            dq = tl.dot(ds.to(k.dtype), k, dq)\n",
        ),
    ),
    waste(
        "dq-stored-after-each-walk",
        3,
        DQ,
        "test_dq_moves_few_bytes",
        "dq goes to memory after each of the two walks (handout section 4)",
        (
            "        dq = _dq_keys(dq, q, dout, k_ptr, v_ptr, lse2, delta, offs_m, mid, hi,",
            "        tl.store(dq_ptr + (pid_bh * T + rows) * D + offs_d, "
            "dq.to(dq_ptr.dtype.element_ty), mask=rows < T)\n"
            "        dq = _dq_keys(dq, q, dout, k_ptr, v_ptr, lse2, delta, offs_m, mid, hi,",
        ),
    ),
    cheat(
        "dq-cached",
        3,
        "test_dq_follows_its_input",
        "the result is kept between calls",
        """
_kernel_dq, _kept_dq = attention_dq, {}


def attention_dq(q, k, v, dout, lse, delta, causal=False, scale=None, **sizes):
    key = q.data_ptr(), k.data_ptr(), q.shape, causal, scale, tuple(sizes)
    if key not in _kept_dq:
        _kept_dq[key] = _kernel_dq(q, k, v, dout, lse, delta, causal, scale, **sizes)
    return _kept_dq[key]
""",
    ),
]

STEP_4 = [
    bug(
        "autograd-causal-forgotten",
        4,
        BACKWARD,
        "test_autograd",
        "the backward forgets causal: the forward is right, every gradient wrong "
        "(handout section 5)",
        ("ctx.causal, ctx.scale)", "False, ctx.scale)"),
    ),
    bug(
        "autograd-always-causal",
        4,
        BACKWARD,
        "test_autograd_keeps_its_flags",
        "the backward is always causal (handout section 5)",
        ("ctx.causal, ctx.scale)", "q.shape[2] == k.shape[2], ctx.scale)"),
    ),
    bug(
        "autograd-scale-forgotten",
        4,
        BACKWARD,
        "test_autograd_keeps_its_flags",
        "the backward forgets the scale that the forward was given (handout section 5)",
        ("ctx.causal, ctx.scale)", "ctx.causal, None)"),
    ),
    bug(
        "autograd-dk-dv-swapped",
        4,
        BACKWARD,
        "test_autograd",
        "dk and dv are returned in the wrong order",
        ("return dq, dk, dv, None, None", "return dq, dv, dk, None, None"),
    ),
    bug(
        "autograd-delta-of-q",
        4,
        BACKWARD,
        "test_autograd",
        "delta is the row sum of q dO and not of out dO",
        ("attention_delta(out, dout)", "attention_delta(q, dout)"),
    ),
    bug(
        "autograd-keys-asked-for-by-values",
        4,
        BACKWARD,
        "test_autograd_computes_what_is_asked_for",
        "dk is computed only where v needs a gradient, too (handout section 5)",
        (
            "if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:",
            "if ctx.needs_input_grad[1] and ctx.needs_input_grad[2]:",
        ),
    ),
    bug(
        "autograd-overlaps-always",
        4,
        BACKWARD,
        "test_autograd_overlaps_only_behind_dkdv",
        "dq begins before delta is written, where k and v need no gradient (handout section 5)",
        ("overlap=dk is not None", "overlap=True"),
    ),
    bug(
        "autograd-sizes-of-the-other",
        4,
        BACKWARD,
        "test_autograd_uses_the_sizes_of_each_kernel",
        "dq runs with the tile sizes of dkdv (handout section 5)",
        ('attention_dq(*given, **ctx.sizes["dq"]', 'attention_dq(*given, **ctx.sizes["dkdv"]'),
    ),
    waste(
        "autograd-forward-again",
        4,
        BACKWARD,
        "test_autograd_does_not_run_the_forward_again",
        "out and lse are computed again, though they are saved",
        (
            "        delta = attention_delta(out, dout)\n",
            "        again = ctx.causal, ctx.scale\n"
            '        out, lse = attention_forward(q, k, v, *again, **ctx.sizes["forward"])\n'
            "        delta = attention_delta(out, dout)\n",
        ),
    ),
    bug(
        "autograd-second-derivative",
        4,
        "",
        "test_autograd_has_no_second_derivative",
        "a second derivative is silently wrong (handout section 5)",
        ("    @once_differentiable\n", ""),
    ),
    waste(
        "autograd-computes-all",
        4,
        BACKWARD,
        "test_autograd_computes_what_is_asked_for",
        "all gradients are computed, whichever are asked for",
        ("if ctx.needs_input_grad[0]:", "if True:"),
    ),
    waste(
        "autograd-saves-p",
        4,
        "",
        "test_autograd_saves_nothing_of_size_t_squared",
        "P is kept for the backward",
        (
            "        ctx.save_for_backward(q, k, v, out, lse)\n",
            "        ctx.p = torch.exp(q @ k.transpose(-2, -1) * 0.25 - lse[..., None])\n"
            "        ctx.save_for_backward(q, k, v, out, lse)\n",
        ),
    ),
    cheat(
        "autograd-sdpa",
        4,
        "test_autograd",
        "PyTorch's own attention does the work",
        """
def flash_attention(q, k, v, causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
""",
    ),
    cheat(
        "autograd-plain",
        4,
        "test_autograd_runs_on_kernels_only",
        "the backward is plain PyTorch",
        """
class TritonFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        out, lse = attention_forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        p = torch.exp(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 - lse[..., None])
        dp = dout @ v.transpose(-2, -1)
        ds = p * (dp - (out * dout).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ dout, None, None
""",
    ),
]

STEP_5 = [
    bug(
        "layer-heads-not-split",
        5,
        LAYER,
        "test_layer_matches_its_definition",
        "heads and positions are mixed: the axes are not swapped back (handout section 6)",
        ("y.transpose(1, 2).reshape(B, T, C)", "y.reshape(B, T, C)"),
    ),
    bug(
        "layer-qkv-interleaved",
        5,
        LAYER,
        "test_layer_matches_its_definition",
        "the columns of w_qkv are taken head by head, and not q, k, v first (handout section 6)",
        (
            ".view(B, T, 3, n_heads, C // n_heads)",
            ".view(B, T, n_heads, 3, C // n_heads).transpose(2, 3)",
        ),
    ),
    bug(
        "layer-k-v-swapped",
        5,
        LAYER,
        "test_layer_matches_its_definition",
        "k and v are mixed up",
        ("q, k, v = qkv", "q, v, k = qkv"),
    ),
    bug(
        "layer-not-causal",
        5,
        LAYER,
        "test_layer_asks_for_causal_heads",
        "the layer sees the future: a language model then copies the answer (handout section 6)",
        ("y = attention(q, k, v, causal=True)", "y = attention(q, k, v, causal=False)"),
    ),
    bug(
        "layer-no-output-projection",
        5,
        LAYER,
        "test_layer_matches_its_definition",
        "the output projection is left out",
        (".reshape(B, T, C) @ w_out", ".reshape(B, T, C)"),
    ),
    bug(
        "model-learns-from-a-wrong-dq",
        5,
        DQ,
        "test_language_model_trains_as_with_sdpa",
        "a gradient is wrong by a few percent: the loss still falls (handout section 6)",
        ("(dq * scale)", "(dq * (scale * 1.05))"),
    ),
    waste(
        "layer-copies-heads",
        5,
        LAYER,
        "test_layer_copies_nothing_for_the_kernels",
        "q, k and v are made contiguous (handout section 6)",
        ("qkv.permute(2, 0, 3, 1, 4)  #", "qkv.permute(2, 0, 3, 1, 4).contiguous()  #"),
    ),
    cheat(
        "layer-sdpa",
        5,
        "test_layer_of_the_kernels",
        "PyTorch's attention runs, whatever attention the layer is given",
        "",
        (
            "y = attention(q, k, v, causal=True)",
            "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
        ),
        inside=LAYER,
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5]
