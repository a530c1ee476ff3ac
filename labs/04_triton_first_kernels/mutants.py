"""Planted faults of lab 04: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

ADD, SUM, COPY, SILU, MAX = (
    "_add_kernel",
    "_row_sum_kernel",
    "_copy_kernel",
    "_bias_silu_kernel",
    "_row_max_kernel",
)


def bug(id, step, inside, caught_by, teaches, *edits):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside)


def waste(id, step, inside, caught_by, teaches, *edits):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside)


def cheat(id, step, caught_by, teaches, append):
    return Mutant(id, "cheat", step, teaches, caught_by, append=append)


PID = "tl.program_id(0).to(tl.int64)"
FREE_LOAD = ("mask=mask)  # (BLOCK,)\n        y", "mask=None)  # (BLOCK,)\n        y")
X_AT = "offs_m[:, None] * stride_xm + offs_n[None, :]"

STEP_1 = [
    bug(
        "add-load-unmasked",
        1,
        ADD,
        "test_vector_add",
        "the load of x has no mask (handout section 2)",
        FREE_LOAD,
    ),
    bug(
        "add-store-unmasked",
        1,
        ADD,
        "test_vector_add",
        "the store has no mask (handout section 2)",
        ("x + y, mask=mask)", "x + y)"),
    ),
    bug(
        "add-mask-one-too-far",
        1,
        ADD,
        "test_vector_add",
        "the mask is offs <= N: element N does not exist (handout section 2)",
        ("offs < N", "offs <= N"),
    ),
    bug(
        "add-program-forgotten",
        1,
        ADD,
        "test_vector_add",
        "every program does the first block: the offsets lack pid * BLOCK (handout section 2)",
        ("pid * BLOCK + tl.arange", "0 * pid + tl.arange"),
    ),
    bug(
        "add-program-not-times-block",
        1,
        ADD,
        "test_vector_add",
        "program p begins at element p and not at p * BLOCK (handout section 2)",
        ("pid * BLOCK + tl.arange", "pid + tl.arange"),
    ),
    bug(
        "add-grid-rounded-down",
        1,
        "vector_add",
        "test_vector_add",
        "the grid is rounded down: the last, ragged block is never written (handout section 2)",
        ("triton.cdiv(N, block)", "max(1, N // block)"),
    ),
    bug(
        "add-x-twice",
        1,
        ADD,
        "test_vector_add",
        "y is loaded from x's pointer",
        ("tl.load(y_ptr + offs", "tl.load(x_ptr + offs"),
    ),
    bug(
        "add-half",
        1,
        ADD,
        "test_vector_add",
        "float32 is added in half precision",
        ("x + y, mask", "x.to(tl.float16) + y.to(tl.float16), mask"),
    ),
    bug(
        "add-32-bit-offsets",
        1,
        ADD,
        "test_vector_add_offsets_beyond_32_bits",
        "the program's number times BLOCK wraps past 2**31 (handout section 2)",
        (PID, "tl.program_id(0)"),
    ),
    bug(
        "add-strides-ignored",
        1,
        "vector_add",
        "test_vector_add_any_strides",
        "vectors with gaps are read as if they had none",
        ("x, y = x.contiguous(), y.contiguous()", "pass"),
    ),
    bug(
        "add-any-block-taken",
        1,
        "vector_add",
        "test_vector_add_rejects",
        "a block that is no power of two gets as far as tl.arange (handout section 2)",
        ("_check_tile(block=block)", "pass"),
    ),
    bug(
        "add-global-variable",
        1,
        ADD,
        "test_vector_add_compiles_for_every_card",
        "the kernel reads a global variable, which the compiler refuses (handout section 7)",
        ("offs < N  #", "(offs < N) & (offs >= MAX_TILE - MAX_TILE)  #"),
    ),
    bug(
        "add-unsigned-offsets",
        1,
        ADD,
        "test_vector_add_offsets_beyond_32_bits",
        "uint32 offsets wrap past 2**32, twice as far as int32 ones (handout section 2)",
        (PID, "tl.program_id(0).to(tl.uint32)"),
        (
            "tl.arange(0, BLOCK)  # (BLOCK,)\n        mask",
            "tl.arange(0, BLOCK).to(tl.uint32)\n        mask",
        ),
    ),
    waste(
        "add-float64",
        1,
        ADD,
        "test_vector_add_reads_and_writes_once",
        "the sum is made in float64, which most cards compute 64 times slower (handout section 1)",
        ("x + y, mask", "x.to(tl.float64) + y, mask"),
    ),
    waste(
        "add-length-constexpr",
        1,
        ADD,
        "test_vector_add_reads_and_writes_once",
        "N is a constexpr, so each new length compiles the kernel anew (handout section 1)",
        ("        N,\n", "        N: tl.constexpr,\n"),
    ),
    waste(
        "add-reads-the-last-again",
        1,
        ADD,
        "test_vector_add_reads_and_writes_once",
        "lanes past the end read the last element again in place of being masked off",
        ("tl.load(x_ptr + offs, mask=mask)", "tl.load(x_ptr + tl.minimum(offs, N - 1))"),
    ),
    waste(
        "add-copies-first",
        1,
        "vector_add",
        "test_vector_add_reads_and_writes_once",
        "the inputs are copied before they are added",
        ("x.contiguous(), y.contiguous()", "x.clone(), y.clone()"),
    ),
    cheat(
        "add-torch",
        1,
        "test_vector_add_reads_and_writes_once",
        "PyTorch adds and no kernel runs",
        """
_checked_add = vector_add


def vector_add(x, y, block=1024):
    return x + y
""",
    ),
    cheat(
        "add-cached",
        1,
        "test_vector_add_is_computed_anew",
        "the result is kept between calls",
        """
_first_add, _sums = vector_add, {}


def vector_add(x, y, block=1024):
    key = x.data_ptr(), y.data_ptr(), x.shape, x.dtype, block
    if key not in _sums:
        _sums[key] = _first_add(x, y, block)
    return _sums[key]
""",
    ),
    cheat(
        "add-into-x",
        1,
        "test_vector_add",
        "the sum is written over x",
        """
def vector_add(x, y, block=1024):
    n = x.numel()
    _add_kernel[(triton.cdiv(n, block),)](x, y, x, n, BLOCK=block)
    return x
""",
    ),
]

STEP_2 = [
    bug(
        "sum-without-other",
        2,
        SUM,
        "test_row_sum",
        "lanes past the row's end hold anything and are summed: the load has no `other` (handout "
        "section 3)",
        (", other=0.0", ""),
    ),
    bug(
        "sum-other-minus-inf",
        2,
        SUM,
        "test_row_sum",
        "padding is -inf, which is right for a maximum and not for a sum (handout section 3)",
        ("other=0.0", 'other=float("-inf")'),
    ),
    bug(
        "sum-load-unmasked",
        2,
        SUM,
        "test_row_sum",
        "the load has no mask (handout section 2)",
        (", mask=cols < N, other=0.0", ""),
    ),
    bug(
        "sum-half",
        2,
        SUM,
        "test_row_sum_accumulates_in_float32",
        "half precision is summed in half precision (handout section 3)",
        ("x.to(tl.float32)", "x"),
    ),
    bug(
        "sum-one-row-for-all",
        2,
        SUM,
        "test_row_sum",
        "every program sums row 0: the row is missing in the address (handout section 3)",
        ("x_ptr + row * stride_xm + cols", "x_ptr + cols"),
    ),
    bug(
        "sum-one-place-for-all",
        2,
        SUM,
        "test_row_sum",
        "every program stores at out_ptr: the last one wins (handout section 7)",
        ("out_ptr + row", "out_ptr"),
    ),
    bug(
        "sum-row-stride-ignored",
        2,
        SUM,
        "test_row_sum_row_strides",
        "rows are taken to be N apart (handout section 3)",
        ("row * stride_xm", "row * N"),
    ),
    bug(
        "sum-columns-not-adjacent",
        2,
        "row_sum",
        "test_row_sum_row_strides",
        "elements of a row are taken to be adjacent and are not",
        ("        x = x.contiguous()\n", "        pass\n"),
    ),
    bug(
        "sum-32-bit-offsets",
        2,
        SUM,
        "test_row_sum_offsets_beyond_32_bits",
        "row times stride wraps past 2**31 (handout section 3)",
        (PID, "tl.program_id(0)"),
    ),
    bug(
        "sum-unsigned-offsets",
        2,
        SUM,
        "test_row_sum_offsets_beyond_32_bits",
        "row times stride in uint32 wraps past 2**32 (handout section 2)",
        ("row * stride_xm + cols", "(row.to(tl.uint32) * stride_xm.to(tl.uint32) + cols)"),
    ),
    bug(
        "sum-half-when-wide",
        2,
        SUM,
        "test_row_sum_accumulates_in_float32",
        "wide tiles are summed in half precision (handout section 3)",
        (
            "tl.sum(x.to(tl.float32), axis=0)",
            "tl.sum(x.to(tl.float32) if BLOCK < 2048 else x, axis=0)",
        ),
    ),
    bug(
        "sum-pairs-in-half",
        2,
        SUM,
        "test_row_sum_accumulates_in_float32",
        "pairs are added in half precision, and only their sums in float32 (handout section 3)",
        (
            "        tl.store(out_ptr + row, tl.sum(x.to(tl.float32), axis=0))",
            "        if BLOCK >= 2048:\n"
            "            x = tl.sum(tl.reshape(x, (BLOCK // 2, 2)), axis=1)\n"
            "        tl.store(out_ptr + row, tl.sum(x.to(tl.float32), axis=0))",
        ),
    ),
    waste(
        "sum-float64",
        2,
        SUM,
        "test_row_sum_reads_once",
        "the row is summed in float64, which most cards compute 64 times slower (handout section "
        "1)",
        ("x.to(tl.float32)", "x.to(tl.float64)"),
    ),
    waste(
        "sum-by-one-program",
        2,
        SUM,
        "test_row_sum_reads_once",
        "program 0 sums every row, and the others do nothing (handout section 1)",
        (
            "        x = tl.load(x_ptr + row * stride_xm + cols, mask=cols < N, other=0.0)"
            "  # (BLOCK,)\n"
            "        tl.store(out_ptr + row, tl.sum(x.to(tl.float32), axis=0))",
            "        for r in range(0, tl.num_programs(0) if row == 0 else 0):\n"
            "            at = row + r\n"
            "            x = tl.load(x_ptr + at * stride_xm + cols, mask=cols < N, other=0.0)\n"
            "            tl.store(out_ptr + at, tl.sum(x.to(tl.float32), axis=0))",
        ),
    ),
    bug(
        "sum-nan-hidden",
        2,
        SUM,
        "test_row_sum_rows_that_are_not_finite",
        "NaN counts as 0, so a broken row looks like a good one (handout section 3)",
        ("x.to(tl.float32)", "tl.where(x == x, x.to(tl.float32), 0.0)"),
    ),
    bug(
        "sum-result-half",
        2,
        "row_sum",
        "test_row_sum",
        "the sums are stored in the dtype of x",
        ("dtype=torch.float32", "dtype=x.dtype"),
    ),
    bug(
        "sum-wide-rows-taken",
        2,
        "row_sum",
        "test_row_sum_rejects",
        "rows wider than one program's block are not refused",
        ("N > MAX_TILE", "N > 2 * MAX_TILE"),
    ),
    waste(
        "sum-reads-twice",
        2,
        SUM,
        "test_row_sum_reads_once",
        "the row is read once more, for a mean that is added and taken away",
        (
            "tl.sum(x.to(tl.float32), axis=0))",
            "tl.sum(x.to(tl.float32), axis=0) + 0.0 * tl.load(x_ptr + row * stride_xm))",
        ),
    ),
    cheat(
        "sum-torch",
        2,
        "test_row_sum_reads_once",
        "torch.sum does the work and no kernel runs",
        """
_checked_sum = row_sum


def row_sum(x):
    return x.float().sum(dim=1)
""",
    ),
    cheat(
        "sum-of-a-copy",
        2,
        "test_row_sum_is_computed_anew",
        "PyTorch sums and a kernel only copies the sums",
        """
def row_sum(x):
    sums = x.float().sum(dim=1)
    _row_sum_kernel[(1,)](sums, torch.empty_like(sums), 1, 1, BLOCK=16)
    return sums
""",
    ),
]

STEP_3 = [
    bug(
        "copy-contiguous-assumed",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "x is read as if its rows lay one after the other (handout section 4)",
        (f"x_ptr + {X_AT} * stride_xn", "x_ptr + offs_m[:, None] * N + offs_n[None, :]"),
    ),
    bug(
        "copy-strides-swapped",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "the two strides of x have changed places (handout section 4)",
        (f"{X_AT} * stride_xn", "offs_m[:, None] * stride_xn + offs_n[None, :] * stride_xm"),
    ),
    bug(
        "copy-one-pair-of-strides",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "the result is stored with the strides of x (handout section 4)",
        (
            "offs_m[:, None] * stride_om + offs_n[None, :] * stride_on",
            f"{X_AT} * stride_xn",
        ),
    ),
    bug(
        "copy-columns-unmasked",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "the mask knows the last row only, not the last column (handout section 4)",
        (" & (offs_n[None, :] < N)", " & (offs_n[None, :] >= 0)"),
    ),
    bug(
        "copy-rows-unmasked",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "the mask knows the last column only, not the last row (handout section 4)",
        ("(offs_m[:, None] < M) & ", "(offs_m[:, None] >= 0) & "),
    ),
    bug(
        "copy-mask-with-and",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "`and` joins the masks, which looks at one value and keeps the second mask only: write & "
        "(handout section 4)",
        ("< M) & (offs_n", "< M) and (offs_n"),
    ),
    bug(
        "copy-blocks-mixed-up",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "tiles are BLOCK_M rows high but begin BLOCK_N rows apart",
        ("pid_m * BLOCK_M", "pid_m * BLOCK_N"),
    ),
    bug(
        "copy-axes-mixed-up",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "grid axis 0 is taken for the columns and axis 1 for the rows",
        (f"pid_m = {PID}", "pid_m = tl.program_id(1).to(tl.int64)"),
        ("pid_n = tl.program_id(1).to(tl.int64)", f"pid_n = {PID}"),
    ),
    bug(
        "copy-store-unmasked",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "the store has no mask (handout section 2)",
        ("tl.store(out_ptrs, x, mask=mask)", "tl.store(out_ptrs, x)"),
    ),
    bug(
        "copy-32-bit-rows",
        3,
        COPY,
        "test_copy_2d_offsets_beyond_32_bits",
        "row times stride wraps past 2**31 (handout section 4)",
        (f"pid_m = {PID}", "pid_m = tl.program_id(0)"),
    ),
    bug(
        "copy-32-bit-columns",
        3,
        COPY,
        "test_copy_2d_offsets_beyond_32_bits",
        "column times stride wraps past 2**31, as in a transposed view (handout section 4)",
        ("pid_n = tl.program_id(1).to(tl.int64)", "pid_n = tl.program_id(1)"),
    ),
    bug(
        "copy-32-bit-stores",
        3,
        COPY,
        "test_copy_2d_stores_beyond_32_bits",
        "the result's offsets wrap past 2**31 (handout section 4)",
        ("offs_m[:, None] * stride_om", "offs_m[:, None].to(tl.int32) * stride_om"),
    ),
    bug(
        "copy-rounded",
        3,
        COPY,
        "test_copy_2d_transposed_view",
        "the elements pass through half precision",
        ("tl.store(out_ptrs, x,", "tl.store(out_ptrs, x.to(tl.float16),"),
    ),
    bug(
        "copy-plus-zero",
        3,
        COPY,
        "test_copy_2d_bit_for_bit",
        "0 is added, which turns -0.0 into 0.0",
        ("tl.store(out_ptrs, x,", "tl.store(out_ptrs, x + 0.0,"),
    ),
    bug(
        "copy-times-one",
        3,
        COPY,
        "test_copy_2d_bit_for_bit",
        "the elements pass through arithmetic, which changes the bits of a signalling NaN",
        ("tl.store(out_ptrs, x,", "tl.store(out_ptrs, x * 1.0,"),
    ),
    bug(
        "copy-one-nan-for-all",
        3,
        COPY,
        "test_copy_2d_bit_for_bit",
        "each NaN becomes the same one",
        ("tl.store(out_ptrs, x,", 'tl.store(out_ptrs, tl.where(x == x, x, float("nan")),'),
    ),
    bug(
        "copy-subnormals-dropped",
        3,
        COPY,
        "test_copy_2d_bit_for_bit",
        "numbers near 0 become 0",
        ("tl.store(out_ptrs, x,", "tl.store(out_ptrs, tl.where(tl.abs(x) < 1e-37, 0.0, x),"),
    ),
    Mutant(
        "copy-grid-turned",
        "bug",
        3,
        "tiles down lie on grid axis 1, which ends at 65,535 (handout section 4)",
        "test_copy_2d_reads_and_writes_once",
        append="""
def copy_2d(x, block_m=64, block_n=64):
    M, N = x.shape
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(N, block_n), triton.cdiv(M, block_m))
    strides = *x.stride()[::-1], *out.stride()[::-1]
    _copy_kernel[grid](x, out, *strides, N, M, BLOCK_M=block_n, BLOCK_N=block_m)
    return out
""",
    ),
    bug(
        "copy-layout-kept",
        3,
        "copy_2d",
        "test_copy_2d_transposed_view",
        "the result keeps the strides of x",
        ("torch.empty(M, N, dtype=x.dtype, device=x.device)", "torch.empty_like(x)"),
    ),
    bug(
        "copy-grid-too-wide",
        3,
        "copy_2d",
        "test_copy_2d_rejects",
        "more than 65,535 tiles on grid axis 1 are not refused (handout section 7)",
        ("_check_grid(N, block_n)", "pass"),
    ),
    waste(
        "copy-row-by-row",
        3,
        COPY,
        "test_copy_2d_reads_and_writes_once",
        "a loop copies the tile a row at a time, which is coalesced on one side only (handout "
        "section 4)",
        (
            "        x = tl.load(x_ptrs, mask=mask)  # (BLOCK_M, BLOCK_N)\n"
            "        tl.store(out_ptrs, x, mask=mask)",
            "        for r in range(BLOCK_M):\n"
            "            m = pid_m * BLOCK_M + r\n"
            "            if m < M:\n"
            "                at = x_ptr + m * stride_xm + offs_n * stride_xn\n"
            "                x = tl.load(at, mask=offs_n < N)\n"
            "                at = out_ptr + m * stride_om + offs_n * stride_on\n"
            "                tl.store(at, x, mask=offs_n < N)",
        ),
    ),
    waste(
        "copy-contiguous-where-no-stride-is-1",
        3,
        "copy_2d",
        "test_copy_2d_reads_and_writes_once",
        "a view of every third column is made contiguous first, and then copied",
        (
            "    check_launch(x=x)\n",
            "    check_launch(x=x)\n    x = x if 1 in x.stride() else x.contiguous()\n",
        ),
    ),
    waste(
        "copy-of-a-copy",
        3,
        "copy_2d",
        "test_copy_2d_reads_and_writes_once",
        "the view is made contiguous first, and then copied",
        ("    check_launch(x=x)\n", "    check_launch(x=x)\n    x = x.clone()\n"),
    ),
    cheat(
        "copy-torch",
        3,
        "test_copy_2d_reads_and_writes_once",
        "PyTorch copies and no kernel runs",
        """
_checked_copy = copy_2d


def copy_2d(x, block_m=64, block_n=64):
    return x.clone(memory_format=torch.contiguous_format)
""",
    ),
    cheat(
        "copy-the-view-itself",
        3,
        "test_copy_2d_transposed_view",
        "the view is handed back as it is",
        """
def copy_2d(x, block_m=64, block_n=64):
    return x
""",
    ),
]

STEP_4 = [
    bug(
        "silu-without-bias",
        4,
        SILU,
        "test_bias_silu",
        "the bias is not added",
        (" + bias.to(tl.float32)[None, :]", " + 0.0 * bias.to(tl.float32)[None, :]"),
    ),
    bug(
        "silu-bias-outside",
        4,
        SILU,
        "test_bias_silu",
        "the bias is added after the activation and not before (handout section 5)",
        ("z = x.to(tl.float32) + bias.to(tl.float32)[None, :]", "z = x.to(tl.float32)"),
        ("z / (1.0 + tl.exp(-z))", "z / (1.0 + tl.exp(-z)) + bias.to(tl.float32)[None, :]"),
    ),
    bug(
        "silu-first-bias-again",
        4,
        SILU,
        "test_bias_silu",
        "every tile takes the first BLOCK_N biases (handout section 5)",
        ("bias_ptr + offs_n, mask=offs_n", "bias_ptr + tl.arange(0, BLOCK_N), mask=offs_n"),
    ),
    bug(
        "silu-bias-unmasked",
        4,
        SILU,
        "test_bias_silu",
        "the load of bias has no mask (handout section 5)",
        ("tl.load(bias_ptr + offs_n, mask=offs_n < N)", "tl.load(bias_ptr + offs_n)"),
    ),
    bug(
        "silu-gate-only",
        4,
        SILU,
        "test_bias_silu",
        "the result is the sigmoid of z and not z times it (handout section 5)",
        ("z / (1.0", "1.0 / (1.0"),
    ),
    bug(
        "silu-sign",
        4,
        SILU,
        "test_bias_silu",
        "exp(z) stands where exp(-z) should (handout section 5)",
        ("tl.exp(-z)", "tl.exp(z)"),
    ),
    bug(
        "silu-overflow",
        4,
        SILU,
        "test_bias_silu_saturates",
        "exp(z) overflows for large z, and inf / inf is NaN (handout section 5)",
        ("z / (1.0 + tl.exp(-z))", "z * tl.exp(z) / (1.0 + tl.exp(z))"),
    ),
    bug(
        "silu-half",
        4,
        SILU,
        "test_bias_silu",
        "z is rounded to half precision",
        ("tl.exp(-z)", "tl.exp(-z.to(tl.float16).to(tl.float32))"),
    ),
    bug(
        "silu-sum-in-half",
        4,
        SILU,
        "test_bias_silu_each_element",
        "x + bias is rounded to half precision, and may overflow there (handout section 5)",
        (
            "x.to(tl.float32) + bias.to(tl.float32)[None, :]",
            "(x + bias[None, :]).to(tl.float32)",
        ),
    ),
    bug(
        "silu-gate-in-half",
        4,
        SILU,
        "test_bias_silu_each_element",
        "the sigmoid is rounded to the dtype of x before the product (handout section 5)",
        ("z / (1.0 + tl.exp(-z))", "z * (1.0 / (1.0 + tl.exp(-z))).to(x.dtype)"),
    ),
    bug(
        "silu-gate-of-a-half",
        4,
        SILU,
        "test_bias_silu_each_element",
        "the exponential is that of a z in half precision (handout section 5)",
        (
            "tl.exp(-z)",
            "tl.exp(-(z.to(tl.float16).to(tl.float32) if x.dtype == tl.float16 else z))",
        ),
    ),
    bug(
        "silu-tail-cut",
        4,
        SILU,
        "test_bias_silu_each_element",
        "results for z below -20 are cut off to 0, though float32 holds them",
        (
            "out = z / (1.0 + tl.exp(-z))",
            "out = tl.where((z < -20.0) & (z > -1e38), 0.0, z / (1.0 + tl.exp(-z)))",
        ),
    ),
    bug(
        "silu-row-stride-ignored",
        4,
        SILU,
        "test_bias_silu_strides",
        "rows of x are taken to be N apart (handout section 3)",
        ("* stride_xm", "* N"),
    ),
    bug(
        "silu-one-stride-for-both",
        4,
        SILU,
        "test_bias_silu_strides",
        "the result is stored with the stride of x (handout section 5)",
        ("* stride_om", "* stride_xm"),
    ),
    bug(
        "silu-bias-stride-ignored",
        4,
        "bias_silu",
        "test_bias_silu_strides",
        "a bias with gaps is read as if it had none",
        ("bias = bias.contiguous()", "pass"),
    ),
    bug(
        "silu-32-bit-offsets",
        4,
        SILU,
        "test_bias_silu_offsets_beyond_32_bits",
        "row times stride wraps past 2**31 (handout section 4)",
        (f"pid_m = {PID}", "pid_m = tl.program_id(0)"),
    ),
    bug(
        "silu-unsigned-offsets",
        4,
        SILU,
        "test_bias_silu_offsets_beyond_32_bits",
        "row times stride in uint32 wraps past 2**32 (handout section 2)",
        (
            "offs_m[:, None] * stride_xm",
            "offs_m[:, None].to(tl.uint32) * stride_xm.to(tl.uint32)",
        ),
    ),
    bug(
        "silu-32-bit-stores",
        4,
        SILU,
        "test_bias_silu_stores_beyond_32_bits",
        "the result's offsets wrap past 2**31 (handout section 2)",
        ("offs_m[:, None] * stride_om", "offs_m[:, None].to(tl.int32) * stride_om"),
    ),
    bug(
        "silu-nan-hidden",
        4,
        SILU,
        "test_bias_silu_numbers_that_are_not_finite",
        "NaN becomes 0, so a broken model looks like a good one (handout section 3)",
        ("tl.store(out_ptrs, out,", "tl.store(out_ptrs, tl.where(out == out, out, 0.0),"),
    ),
    bug(
        "silu-grid-too-wide",
        4,
        "bias_silu",
        "test_bias_silu_rejects",
        "more than 65,535 tiles on grid axis 1 are not refused (handout section 7)",
        ("_check_grid(N, block_n)", "pass"),
    ),
    bug(
        "silu-if-on-a-tile",
        4,
        SILU,
        "test_bias_silu_compiles_for_every_card",
        "an `if` asks a whole tile, which the compiler refuses (handout section 7)",
        (
            "        tl.store(out_ptrs",
            "        if z > 1e30:\n            out = z\n        tl.store(out_ptrs",
        ),
    ),
    waste(
        "silu-bias-for-each-row",
        4,
        SILU,
        "test_bias_silu_reads_and_writes_once",
        "each row of a tile loads the bias again (handout section 5)",
        (
            "tl.load(bias_ptr + offs_n, mask=offs_n < N)",
            "tl.load(bias_ptr + 0 * offs_m[:, None] + offs_n[None, :], mask=mask)",
        ),
        ("bias.to(tl.float32)[None, :]", "bias.to(tl.float32)"),
    ),
    waste(
        "silu-by-one-column-of-programs",
        4,
        SILU,
        "test_bias_silu_reads_and_writes_once",
        "one program walks along all tiles beside each other, and the rest do nothing (handout "
        "section 1)",
        (
            "        x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]"
            "  # (BLOCK_M, BLOCK_N)\n"
            "        out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :]"
            "  # (BLOCK_M, BLOCK_N)\n"
            "        x = tl.load(x_ptrs, mask=mask)  # (BLOCK_M, BLOCK_N)\n"
            "        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N)  # (BLOCK_N,)\n"
            "        z = x.to(tl.float32) + bias.to(tl.float32)[None, :]  # (BLOCK_M, BLOCK_N)\n"
            "        out = z / (1.0 + tl.exp(-z))  # (BLOCK_M, BLOCK_N)\n"
            "        tl.store(out_ptrs, out, mask=mask)",
            "        for t in range(0, tl.num_programs(1) if pid_n == 0 else 0):\n"
            "            cols = t * BLOCK_N + tl.arange(0, BLOCK_N)\n"
            "            mask = (offs_m[:, None] < M) & (cols[None, :] < N)\n"
            "            at = offs_m[:, None] * stride_xm + cols[None, :]\n"
            "            x = tl.load(x_ptr + at, mask=mask)\n"
            "            bias = tl.load(bias_ptr + cols, mask=cols < N)\n"
            "            z = x.to(tl.float32) + bias.to(tl.float32)[None, :]\n"
            "            out = z / (1.0 + tl.exp(-z))\n"
            "            at = offs_m[:, None] * stride_om + cols[None, :]\n"
            "            tl.store(out_ptr + at, out, mask=mask)",
        ),
    ),
    waste(
        "silu-two-passes",
        4,
        "bias_silu",
        "test_bias_silu_reads_and_writes_once",
        "PyTorch adds the bias in a pass of its own, and the kernel only does the rest",
        (
            "    bias = bias.contiguous()\n",
            "    x, bias = x + bias, torch.zeros(N, dtype=x.dtype, device=x.device)\n",
        ),
    ),
    waste(
        "silu-reads-twice",
        4,
        SILU,
        "test_bias_silu_reads_and_writes_once",
        "x is loaded again for the product",
        (
            "out = z / (1.0 + tl.exp(-z))",
            "out = (tl.load(x_ptrs, mask=mask) + bias[None, :]).to(tl.float32)"
            " / (1.0 + tl.exp(-z))",
        ),
    ),
    cheat(
        "silu-torch",
        4,
        "test_bias_silu_reads_and_writes_once",
        "PyTorch does the work and no kernel runs",
        """
def bias_silu(x, bias, block_m=32, block_n=128):
    return torch.nn.functional.silu(x.float() + bias.float()).to(x.dtype)
""",
    ),
]

STEP_5 = [
    bug(
        "max-other-zero",
        5,
        MAX,
        "test_row_max_in_each_block",
        "padding is 0 and wins over rows of negative numbers (handout section 6)",
        ('other=float("-inf")', "other=0.0"),
    ),
    bug(
        "max-without-other",
        5,
        MAX,
        "test_row_max",
        "lanes past the row's end hold anything: the load has no `other` (handout section 3)",
        (', other=float("-inf")', ""),
    ),
    bug(
        "max-state-starts-at-zero",
        5,
        MAX,
        "test_row_max_in_each_block",
        "the state starts at 0, which is above rows of negative numbers (handout section 6)",
        ('tl.full((BLOCK,), float("-inf"), tl.float32)', "tl.zeros((BLOCK,), tl.float32)"),
    ),
    bug(
        "max-state-starts-finite",
        5,
        MAX,
        "test_row_max_growing_shrinking_equal_low",
        "the state starts at a finite number, which a real row can lie below (handout section 6)",
        ('tl.full((BLOCK,), float("-inf"), tl.float32)', "tl.full((BLOCK,), -1e30, tl.float32)"),
    ),
    bug(
        "max-last-block-only",
        5,
        MAX,
        "test_row_max_in_each_block",
        "the state is overwritten by each block and not merged with it (handout section 6)",
        ("tl.maximum(m_i, x, propagate_nan=tl.PropagateNan.ALL)", "x"),
    ),
    bug(
        "max-reduced-and-not-merged",
        5,
        MAX,
        "test_row_max_in_each_block",
        "a reducing maximum, tl.max, stands where an elementwise one, tl.maximum, is needed: only "
        "the last block counts (handout section 6)",
        (
            "tl.maximum(m_i, x, propagate_nan=tl.PropagateNan.ALL)",
            "tl.full((BLOCK,), 0.0, tl.float32) + tl.max(x, axis=0)",
        ),
    ),
    bug(
        "max-last-block-dropped",
        5,
        MAX,
        "test_row_max_in_each_block",
        "the loop ends before the last, ragged block (handout section 6)",
        ("range(0, N, BLOCK)", "range(0, N // BLOCK * BLOCK, BLOCK)"),
    ),
    bug(
        "max-first-block-only",
        5,
        MAX,
        "test_row_max_in_each_block",
        "the loop makes one turn (handout section 6)",
        ("range(0, N, BLOCK)", "range(0, BLOCK, BLOCK)"),
    ),
    bug(
        "max-start-forgotten",
        5,
        MAX,
        "test_row_max_in_each_block",
        "every turn looks at the first block again (handout section 6)",
        ("cols = start + offs", "cols = offs"),
    ),
    bug(
        "max-mask-of-the-first-block",
        5,
        MAX,
        "test_row_max",
        "the mask compares the lane's number, and not the column, with N (handout section 6)",
        ("mask=cols < N", "mask=offs < N"),
    ),
    bug(
        "max-nan-dropped",
        5,
        MAX,
        "test_row_max_rows_that_are_not_finite",
        "tl.max passes over NaN: a row with one gets a plausible maximum (handout section 6)",
        ('tl.where(has_nan > 0, float("nan"), tl.max(m_i, axis=0))', "tl.max(m_i, axis=0)"),
    ),
    bug(
        "max-nan-dropped-by-maximum",
        5,
        MAX,
        "test_row_max_rows_that_are_not_finite",
        "tl.maximum passes over NaN, as on a GPU, unless propagate_nan says otherwise (handout "
        "section 6)",
        (", propagate_nan=tl.PropagateNan.ALL", ""),
    ),
    bug(
        "max-nan-by-sum",
        5,
        MAX,
        "test_row_max_rows_that_are_not_finite",
        "NaN is looked for in a sum, which infinities of both signs make NaN, too (handout section "
        "6)",
        (
            "has_nan = tl.max((m_i != m_i).to(tl.int32), axis=0)",
            "has_nan = (total != total).to(tl.int32)",
        ),
        (
            "        for start in range(0, N, BLOCK):",
            "        total = 0.0\n        for start in range(0, N, BLOCK):",
        ),
        (
            "            m_i = tl.maximum(",
            "            total += tl.sum(tl.where(cols < N, x, 0.0), axis=0)\n"
            "            m_i = tl.maximum(",
        ),
    ),
    bug(
        "max-one-nan-only",
        5,
        MAX,
        "test_row_max_rows_that_are_not_finite",
        "lanes with NaN are counted, and only one of them is expected",
        ("tl.max((m_i != m_i).to(tl.int32)", "tl.sum((m_i != m_i).to(tl.int32)"),
        ("has_nan > 0", "has_nan == 1"),
    ),
    bug(
        "max-rows-of-70000",
        5,
        MAX,
        "test_row_max_wide_rows",
        "the loop has a bound of its own, which wide rows pass",
        ("range(0, N, BLOCK)", "range(0, min(N, 70_000), BLOCK)"),
    ),
    bug(
        "max-unsigned-offsets",
        5,
        MAX,
        "test_row_max_offsets_beyond_32_bits",
        "row times stride in uint32 wraps past 2**32 (handout section 2)",
        ("row * stride_xm", "row.to(tl.uint32) * stride_xm.to(tl.uint32)"),
    ),
    bug(
        "max-row-stride-ignored",
        5,
        MAX,
        "test_row_max_row_strides",
        "rows are taken to be N apart (handout section 3)",
        ("row * stride_xm", "row * N"),
    ),
    bug(
        "max-32-bit-offsets",
        5,
        MAX,
        "test_row_max_offsets_beyond_32_bits",
        "row times stride wraps past 2**31 (handout section 3)",
        (PID, "tl.program_id(0)"),
    ),
    bug(
        "max-half",
        5,
        MAX,
        "test_row_max",
        "the state is kept in half precision",
        (
            'tl.full((BLOCK,), float("-inf"), tl.float32)',
            'tl.full((BLOCK,), float("-inf"), tl.float16)',
        ),
        (".to(tl.float32)\n", ".to(tl.float16)\n"),
    ),
    bug(
        "max-any-block-taken",
        5,
        "row_max",
        "test_row_max_rejects",
        "a block that is no power of two gets as far as tl.arange (handout section 2)",
        ("_check_tile(block=block)", "pass"),
    ),
    bug(
        "max-scalar-state",
        5,
        MAX,
        "test_row_max_compiles_for_every_card",
        "the state is one number before the loop and a tile after a turn, which the compiler "
        "refuses (handout section 7)",
        ('m_i = tl.full((BLOCK,), float("-inf"), tl.float32)', 'm_i = float("-inf")'),
    ),
    bug(
        "max-break",
        5,
        MAX,
        "test_row_max_compiles_for_every_card",
        "the loop is left with break, which the compiler refuses (handout section 7)",
        (
            "            cols = start + offs",
            "            if start >= N:\n                break\n            cols = start + offs",
        ),
    ),
    waste(
        "max-two-passes",
        5,
        MAX,
        "test_row_max_reads_once",
        "the row is read a second time to look for NaN",
        (
            "x = tl.load(x_ptrs, mask=cols < N",
            "x = tl.load(x_ptrs, mask=cols < N)\n            x = tl.load(x_ptrs, mask=cols < N",
        ),
    ),
    waste(
        "max-float64",
        5,
        MAX,
        "test_row_max_reads_once",
        "the state is kept in float64 (handout section 1)",
        ('float("-inf"), tl.float32)', 'float("-inf"), tl.float64)'),
        (".to(tl.float32)\n", ".to(tl.float64)\n"),
    ),
    waste(
        "max-by-one-program",
        5,
        MAX,
        "test_row_max_reads_once",
        "program 0 walks along every row, and the others do nothing (handout section 1)",
        (
            "        row = tl.program_id(0).to(tl.int64)\n",
            "        for r in range(0, tl.num_programs(0) if tl.program_id(0) == 0 else 0):\n"
            "            row = tl.program_id(0).to(tl.int64) + r\n"
            "            _walk(x_ptr, out_ptr, row, stride_xm, N, BLOCK)\n"
            "\n"
            "    @triton.jit\n"
            "    def _walk(x_ptr, out_ptr, row, stride_xm, N, BLOCK: tl.constexpr):\n",
        ),
    ),
    waste(
        "max-block-covers-the-row",
        5,
        "row_max",
        "test_row_max_reads_once",
        "the block is made as wide as the row, so that the loop never makes a second turn",
        ("BLOCK=block)", "BLOCK=triton.next_power_of_2(N))"),
    ),
    cheat(
        "max-torch",
        5,
        "test_row_max_reads_once",
        "torch.amax does the work and no kernel runs",
        """
def row_max(x, block=1024):
    return x.amax(dim=1)
""",
    ),
    cheat(
        "max-imports-the-reference",
        5,
        "test_row_max",
        "the reference's kernel does the work",
        """
def row_max(x, block=1024):
    from pathlib import Path

    import labs

    folder = Path(labs.__file__).parent / "04_triton_first_kernels"
    return eval((folder / "solution.py").read_text())
""",
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5]
