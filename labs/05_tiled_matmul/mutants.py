"""Planted faults of lab 05: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

TILED, FIRST, RAGGED = "tiled_matmul", "_matmul_kernel", "_ragged_kernel"
ORDER, TWIN, WAVE = "grouped_order", "_grouped_order", "wave_tiles"
SHARED, FITTING, TUNER = "shared_memory", "fitting_configs", "autotuned_kernel"


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside, append)


def cheat(id, step, caught_by, teaches, append):
    return Mutant(id, "cheat", step, teaches, caught_by, append=append)


STEP_1 = [
    bug(
        "tiled-overwritten",
        1,
        TILED,
        "test_tiled_matmul_worked_example",
        "a tile of C keeps the last product only: products along K must be added up (handout "
        "section 2)",
        ("acc += a_tile @ b_tile", "acc = a_tile @ b_tile"),
    ),
    bug(
        "tiled-last-rows-dropped",
        1,
        TILED,
        "test_tiled_matmul",
        "the last, short tile of rows is never made (handout section 2)",
        ("range(0, M, block_m)", "range(0, max(M // block_m, 1) * block_m, block_m)"),
    ),
    bug(
        "tiled-last-depth-dropped",
        1,
        TILED,
        "test_tiled_matmul",
        "the last, short piece of K is not added (handout section 2)",
        ("range(0, K, block_k)", "range(0, max(K // block_k, 1) * block_k, block_k)"),
    ),
    bug(
        "tiled-blocks-mixed-up",
        1,
        TILED,
        "test_tiled_matmul",
        "columns end after block_m and not block_n of them: right for square tiles only",
        ("min(j0 + block_n, N)", "min(j0 + block_m, N)"),
    ),
    bug(
        "tiled-half-sum",
        1,
        TILED,
        "test_tiled_matmul_sums_in_float32",
        "the sum is kept in the dtype of a and stops growing (handout section 2)",
        ("torch.float64 if a.dtype == torch.float64 else torch.float32", "a.dtype"),
    ),
    bug(
        "tiled-float32-for-float64",
        1,
        TILED,
        "test_tiled_matmul_keeps_float64",
        "float64 inputs are computed in float32",
        ("torch.float64 if a.dtype == torch.float64 else torch.float32", "torch.float32"),
    ),
    bug(
        "tiled-strides-ignored",
        1,
        TILED,
        "test_tiled_matmul_layouts",
        "a is read as if its rows lay one behind the other",
        ("a[i0:i1, k0:k1]", "a.as_strided((M, K), (K, 1))[i0:i1, k0:k1]"),
    ),
    bug(
        "tiled-nan-hidden",
        1,
        TILED,
        "test_tiled_matmul_not_finite",
        "NaN and infinities of the inputs become plausible numbers",
        ("a[i0:i1, k0:k1].to(dtype)", "a[i0:i1, k0:k1].to(dtype).nan_to_num()"),
    ),
    waste(
        "tiled-whole-depth",
        1,
        TILED,
        "test_tiled_matmul_works_on_tiles",
        "there is no loop along K: a product is K deep and its operands do not fit on a chip "
        "(handout section 2)",
        ("range(0, K, block_k)", "range(0, K, K)"),
        ("min(k0 + block_k, K)", "K"),
    ),
    waste(
        "tiled-converted-whole",
        1,
        TILED,
        "test_tiled_matmul_works_on_tiles",
        "a is converted as a whole for each tile (handout section 2)",
        ("a[i0:i1, k0:k1].to(dtype)", "a.to(dtype)[i0:i1, k0:k1]"),
    ),
    waste(
        "tiled-products-twice",
        1,
        TILED,
        "test_tiled_matmul_works_on_tiles",
        "each product of tiles is computed twice",
        ("acc += a_tile @ b_tile", "acc += (a_tile @ b_tile + a_tile @ b_tile) / 2"),
    ),
    waste(
        "tiled-fixed-tile",
        1,
        TILED,
        "test_tiled_matmul_works_on_tiles",
        "the block sizes are ignored, every tile is 16 x 16 x 16 (handout section 2)",
        (
            "    dtype = torch.float64 if",
            "    block_m = block_n = block_k = 16\n    dtype = torch.float64 if",
        ),
    ),
    waste(
        "tiled-whole-rows",
        1,
        TILED,
        "test_tiled_matmul_works_on_tiles",
        "block_n is ignored: a tile of C is as wide as C (handout section 2)",
        ("range(0, N, block_n)", "range(0, N, N)"),
        ("min(j0 + block_n, N)", "N"),
    ),
    waste(
        "tiled-half-depth",
        1,
        TILED,
        "test_tiled_matmul_works_on_tiles",
        "products are half as deep as block_k, and twice as many",
        (
            "    dtype = torch.float64 if",
            "    block_k = (block_k + 1) // 2\n    dtype = torch.float64 if",
        ),
    ),
    waste(
        "tiled-float64-for-all",
        1,
        TILED,
        "test_tiled_matmul_works_on_tiles",
        "half and float32 inputs are multiplied in float64, which is slow",
        ("torch.float64 if a.dtype == torch.float64 else torch.float32", "torch.float64"),
    ),
    waste(
        "tiled-one-element",
        1,
        "",
        "test_tiled_matmul_works_on_tiles",
        "one element of C at a time, from a whole row and a whole column (handout section 1)",
        append="""
def tiled_matmul(a, b, block_m=16, block_n=16, block_k=16):
    _check_product(a, b)
    check_blocks(block_m=block_m, block_n=block_n, block_k=block_k)
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    c = a.new_empty(a.shape[0], b.shape[1])
    for i, row in enumerate(a):
        for j, column in enumerate(b.t()):
            c[i, j] = (row.to(dtype) * column.to(dtype)).sum()
    return c
""",
    ),
    cheat(
        "tiled-is-torch",
        1,
        "test_tiled_matmul_works_on_tiles",
        "PyTorch's own product of the whole matrices does the work",
        """
def tiled_matmul(a, b, block_m=16, block_n=16, block_k=16):
    _check_product(a, b)
    check_blocks(block_m=block_m, block_n=block_n, block_k=block_k)
    return a @ b
""",
    ),
    cheat(
        "tiled-cached",
        1,
        "test_tiled_matmul_follows_its_input",
        "the result is kept between calls",
        """
_tiled, _kept = tiled_matmul, {}


def tiled_matmul(a, b, *tile, **tiles):
    key = a.data_ptr(), b.data_ptr(), a.shape, b.shape
    if key not in _kept:
        _kept[key] = _tiled(a, b, *tile, **tiles)
    return _kept[key]
""",
    ),
]

STEP_2 = [
    bug(
        "first-overwritten",
        2,
        FIRST,
        "test_triton_matmul",
        "acc keeps the last product only (handout section 3)",
        ("acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b)"),
    ),
    bug(
        "first-not-advanced",
        2,
        FIRST,
        "test_triton_matmul",
        "the pointers of A never move along K (handout section 3)",
        ("a_ptrs += step * stride_ak", "a_ptrs += 0"),
    ),
    bug(
        "first-advanced-along-n",
        2,
        FIRST,
        "test_triton_matmul",
        "the pointers of B move along N and not along K (handout section 3)",
        ("b_ptrs += step * stride_bk", "b_ptrs += step * stride_bn"),
    ),
    bug(
        "first-blocks-mixed-up",
        2,
        FIRST,
        "test_triton_matmul",
        "rows start at pid_m * BLOCK_N: right for square tiles only",
        ("pid // tiles_n * BLOCK_M", "pid // tiles_n * BLOCK_N"),
    ),
    bug(
        "first-tiles-of-a-row",
        2,
        FIRST,
        "test_triton_matmul",
        "the tiles of a row of C are counted with BLOCK_M: right for square tiles only",
        ("tiles_n = N // BLOCK_N", "tiles_n = N // BLOCK_M"),
    ),
    bug(
        "first-row-major-a",
        2,
        FIRST,
        "test_triton_matmul_layouts",
        "neighbours in a row of A are taken to lie side by side: a turned one has other strides "
        "(handout section 3)",
        ("offs_k[None, :] * stride_ak", "offs_k[None, :]"),
    ),
    bug(
        "first-row-major-b",
        2,
        FIRST,
        "test_triton_matmul_layouts",
        "neighbours in a row of B are taken to lie side by side (handout section 3)",
        ("offs_n[None, :] * stride_bn\n", "offs_n[None, :]\n"),
    ),
    bug(
        "first-half-sum",
        2,
        FIRST,
        "test_triton_matmul_sums_in_float32",
        "the sum is rounded to half precision after each product (handout section 3)",
        ("acc = tl.dot(a, b, acc)", "acc = (acc + tl.dot(a, b)).to(a.dtype).to(tl.float32)"),
    ),
    bug(
        "first-32-bit-rows",
        2,
        FIRST,
        "test_triton_matmul_offsets_beyond_32_bits",
        "row times stride overflows 2**31 (handout section 3)",
        ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
    ),
    bug(
        "first-32-bit-depth",
        2,
        FIRST,
        "test_triton_matmul_offsets_beyond_32_bits",
        "depth times stride overflows 2**31 within a tile (handout section 3)",
        ("tl.arange(0, BLOCK_K).to(tl.int64)", "tl.arange(0, BLOCK_K)"),
    ),
    bug(
        "first-32-bit-step",
        2,
        FIRST,
        "test_triton_matmul_offsets_beyond_32_bits",
        "BLOCK_K times stride overflows 2**31 from one tile to the next (handout section 3)",
        ("step = tl.full((), BLOCK_K, tl.int64)", "step = BLOCK_K"),
    ),
    bug(
        "first-32-bit-store",
        2,
        FIRST,
        "test_triton_matmul_stores_beyond_32_bits",
        "row times stride of C overflows 2**31 (handout section 3)",
        ("offs_m[:, None] * stride_cm", "offs_m.to(tl.int32)[:, None] * stride_cm"),
    ),
    bug(
        "first-acc-is-a-number",
        2,
        FIRST,
        "test_triton_matmul_compiles_for_every_card",
        "acc starts as a number and becomes a tile in the loop, which the compiler refuses",
        ("acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)", "acc = 0.0"),
        ("acc = tl.dot(a, b, acc)", "acc = acc + tl.dot(a, b)"),
    ),
    waste(
        "first-loads-twice",
        2,
        FIRST,
        "test_triton_matmul_moves_each_tile_once",
        "each tile of A is loaded twice",
        ("a = tl.load(a_ptrs)", "a = tl.maximum(tl.load(a_ptrs), tl.load(a_ptrs))"),
    ),
    waste(
        "first-stores-in-the-loop",
        2,
        FIRST,
        "test_triton_matmul_moves_each_tile_once",
        "C is stored in each step along K (handout section 3)",
        (
            "            b_ptrs += step * stride_bk\n",
            "            b_ptrs += step * stride_bk\n"
            "            c = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]\n"
            "            tl.store(c, acc.to(c_ptr.dtype.element_ty))\n",
        ),
    ),
    waste(
        "first-column-by-column",
        2,
        FIRST,
        "test_triton_matmul_goes_row_by_row",
        "programs go down the columns of C: right numbers, another order than promised",
        ("pid // tiles_n * BLOCK_M", "pid % (tl.num_programs(0) // tiles_n) * BLOCK_M"),
        ("pid % tiles_n * BLOCK_N", "pid // (tl.num_programs(0) // tiles_n) * BLOCK_N"),
    ),
    waste(
        "first-copies",
        2,
        "",
        "test_triton_matmul_layouts",
        "turned matrices are copied before the kernel starts (handout section 3)",
        append="""
_strided = triton_matmul


def triton_matmul(a, b, *args, **kwargs):
    return _strided(a.contiguous(), b.contiguous(), *args, **kwargs)
""",
    ),
    waste(
        "first-float32-operands",
        2,
        FIRST,
        "test_triton_matmul_compiles_for_every_card",
        "half tiles are multiplied in TF32, with twice as many instructions",
        ("tl.dot(a, b, acc)", "tl.dot(a.to(tl.float32), b.to(tl.float32), acc)"),
    ),
    waste(
        "first-no-tensor-cores",
        2,
        FIRST,
        "test_triton_matmul_compiles_for_every_card",
        "tiles are multiplied in float32 on ordinary units (handout section 1)",
        (
            "tl.dot(a, b, acc)",
            'tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")',
        ),
    ),
    waste(
        "first-clamped",
        2,
        FIRST,
        "test_triton_matmul_compiles_for_every_card",
        "columns are clamped for no reason: tiles of B are loaded element by element (handout "
        "section 4)",
        ("offs_n[None, :] * stride_bn\n", "tl.minimum(offs_n, N - 1)[None, :] * stride_bn\n"),
    ),
    cheat(
        "first-is-torch",
        2,
        "test_triton_matmul_moves_each_tile_once",
        "PyTorch's own product does the work and no kernel runs",
        """
_triton_matmul = triton_matmul


def triton_matmul(a, b, *args, **kwargs):
    with torch.no_grad():
        return (a.float() @ b.float()).to(a.dtype)
""",
    ),
]

STEP_3 = [
    bug(
        "ragged-depth-unmasked",
        3,
        RAGGED,
        "test_ragged_matmul",
        "tiles are read past K as if it were even (handout section 4)",
        ("if EVEN_K:", "if True:"),
    ),
    bug(
        "ragged-depth-mask-of-first-tile",
        3,
        RAGGED,
        "test_ragged_matmul",
        "the mask along K does not move with the tile: it compares with K and not with what is "
        "left (handout section 4)",
        ("offs_k[None, :] < K - start", "offs_k[None, :] < K"),
    ),
    bug(
        "ragged-depth-dropped",
        3,
        RAGGED,
        "test_ragged_matmul",
        "the last, short piece of K is not added (handout section 4)",
        ("range(0, K, BLOCK_K)", "range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)"),
    ),
    bug(
        "ragged-a-without-other",
        3,
        RAGGED,
        "test_ragged_matmul",
        "a masked load of A has no `other` and may give anything (handout section 4)",
        ("offs_k[None, :] < K - start, other=0.0)", "offs_k[None, :] < K - start)"),
    ),
    bug(
        "ragged-one-side-masked",
        3,
        RAGGED,
        "test_ragged_matmul",
        "only A is 0 past K: 0 times whatever B has there can be NaN (handout section 4)",
        ("offs_k[:, None] < K - start, other=0.0)", "offs_k[:, None] < K - start)"),
    ),
    bug(
        "ragged-depth-wrapped",
        3,
        RAGGED,
        "test_ragged_matmul_not_finite",
        "A wraps round along K and only B is 0 past it: 0 times an infinity of A is NaN (handout "
        "section 4)",
        (
            "tl.load(a_ptrs, mask=offs_k[None, :] < K - start, other=0.0)",
            "tl.load(a_ptr + rows[:, None] * stride_am + (offs_k + start)[None] % K * stride_ak)",
        ),
    ),
    bug(
        "ragged-rows-unmasked",
        3,
        RAGGED,
        "test_ragged_matmul",
        "rows past M are read: neither masked nor wrapped (handout section 4)",
        ("(offs_m % M)", "offs_m"),
    ),
    bug(
        "ragged-columns-wrapped-by-m",
        3,
        RAGGED,
        "test_ragged_matmul",
        "columns wrap round at M and not at N: right for square matrices only",
        ("offs_n % N", "offs_n % M"),
    ),
    bug(
        "ragged-store-unmasked",
        3,
        RAGGED,
        "test_ragged_matmul",
        "the store has no mask and overwrites the next row (handout section 4)",
        (", mask=inside)", ")"),
    ),
    bug(
        "ragged-store-mask-of-rows",
        3,
        RAGGED,
        "test_ragged_matmul",
        "the store masks rows past M but not columns past N (handout section 4)",
        ("(offs_m[:, None] < M) & (offs_n[None, :] < N)", "(offs_m[:, None] < M)"),
    ),
    bug(
        "ragged-row-major-b",
        3,
        RAGGED,
        "test_ragged_matmul_layouts",
        "neighbours in a row of B are taken to lie side by side (handout section 3)",
        ("cols[None, :] * stride_bn", "cols[None, :]"),
    ),
    bug(
        "ragged-half-sum",
        3,
        RAGGED,
        "test_ragged_matmul_sums_in_float32",
        "the sum is rounded to half precision after each product (handout section 3)",
        ("acc = tl.dot(a, b, acc)", "acc = (acc + tl.dot(a, b)).to(a.dtype).to(tl.float32)"),
    ),
    bug(
        "ragged-nan-hidden",
        3,
        RAGGED,
        "test_ragged_matmul_not_finite",
        "NaN of the inputs becomes 0 on the way",
        ("acc = tl.dot(a, b, acc)", "acc = tl.dot(tl.where(a == a, a, 0.0), b, acc)"),
    ),
    bug(
        "ragged-32-bit-rows",
        3,
        RAGGED,
        "test_ragged_matmul_offsets_beyond_32_bits",
        "row times stride overflows 2**31 (handout section 3)",
        ("(offs_m % M).to(tl.int64)", "(offs_m % M)"),
    ),
    bug(
        "ragged-32-bit-columns",
        3,
        RAGGED,
        "test_ragged_matmul_offsets_beyond_32_bits",
        "column times stride overflows 2**31 in a turned B (handout section 3)",
        ("(offs_n % N).to(tl.int64)", "(offs_n % N)"),
    ),
    bug(
        "ragged-32-bit-step",
        3,
        RAGGED,
        "test_ragged_matmul_offsets_beyond_32_bits",
        "BLOCK_K times stride overflows 2**31 from one tile to the next (handout section 3)",
        ("step = tl.full((), BLOCK_K, tl.int64)", "step = BLOCK_K"),
    ),
    bug(
        "ragged-32-bit-store",
        3,
        RAGGED,
        "test_ragged_matmul_stores_beyond_32_bits",
        "row times stride of C overflows 2**31 (handout section 3)",
        ("offs_m.to(tl.int64)[:, None] * stride_cm", "offs_m[:, None] * stride_cm"),
    ),
    waste(
        "ragged-stores-wrapped-rows",
        3,
        RAGGED,
        "test_ragged_matmul_moves_few_bytes",
        "what wrapped round is stored once more, over the same numbers (handout section 4)",
        ("offs_m.to(tl.int64)[:, None] * stride_cm + offs_n", "rows[:, None] * stride_cm + cols"),
        (", mask=inside)", ")"),
    ),
    waste(
        "ragged-clamped",
        3,
        RAGGED,
        "test_ragged_matmul_compiles_for_every_card",
        "columns are clamped with tl.minimum: the compiler no longer sees neighbours, loads single "
        "elements and copies nothing ahead (handout section 4)",
        ("offs_n % N", "tl.minimum(offs_n, N - 1)"),
    ),
    waste(
        "ragged-masks-always",
        3,
        RAGGED,
        "test_ragged_matmul_masks_no_even_depth",
        "EVEN_K is ignored and every load is masked (handout section 4)",
        ("if EVEN_K:", "if False:"),
    ),
    waste(
        "ragged-copies",
        3,
        "",
        "test_ragged_matmul_layouts",
        "turned matrices are copied before the kernel starts (handout section 3)",
        append="""
_strided = ragged_matmul


def ragged_matmul(a, b, *args, **kwargs):
    return _strided(a.contiguous(), b.contiguous(), *args, **kwargs)
""",
    ),
    waste(
        "ragged-no-tensor-cores",
        3,
        RAGGED,
        "test_ragged_matmul_compiles_for_every_card",
        "tiles are multiplied in float32 on ordinary units (handout section 1)",
        (
            "tl.dot(a, b, acc)",
            'tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")',
        ),
    ),
    waste(
        "ragged-padded-copies",
        3,
        "",
        "test_ragged_matmul_moves_few_bytes",
        "A and B are copied into larger matrices, and C is cut out of one (handout section 4)",
        append="""
def ragged_matmul(a, b, block_m=64, block_n=64, block_k=32, group=1, num_warps=4, num_stages=3):
    (M, K), N = a.shape, b.shape[1]
    m, n, k = (-size % block for size, block in ((M, block_m), (N, block_n), (K, block_k)))
    a, b = (torch.nn.functional.pad(x, pad) for x, pad in ((a, (0, k, 0, m)), (b, (0, n, 0, k))))
    return triton_matmul(a, b, block_m, block_n, block_k)[:M, :N].contiguous()
""",
    ),
]

STEP_4 = [
    bug(
        "order-last-band-full",
        4,
        ORDER,
        "test_grouped_order_worked_example",
        "the last band is taken to have `group` rows: some tiles are made twice, others never "
        "(handout section 5)",
        ("min(group, tiles_m - band * group)", "group"),
    ),
    bug(
        "order-rows-of-a-band",
        4,
        ORDER,
        "test_grouped_order_goes_band_by_band",
        "a band is walked row by row, which is the plain order again (handout section 5)",
        ("within % rows, within // rows", "within // tiles_n, within % tiles_n"),
    ),
    bug(
        "order-band-of-columns",
        4,
        ORDER,
        "test_grouped_order_goes_band_by_band",
        "a band is taken to hold group * tiles_m tiles: right for as many rows as columns only",
        ("divmod(pid, group * tiles_n)", "divmod(pid, group * tiles_m)"),
    ),
    bug(
        "order-band-not-multiplied",
        4,
        ORDER,
        "test_grouped_order_goes_band_by_band",
        "the number of the band is taken for its first row (handout section 5)",
        ("return band * group + within", "return band + within"),
    ),
    bug(
        "twin-last-band-full",
        4,
        TWIN,
        "test_program_order_is_grouped_order",
        "in the kernel the last band is taken to have GROUP rows (handout section 5)",
        ("tl.minimum(GROUP, tiles_m - band * GROUP)", "GROUP"),
    ),
    waste(
        "twin-row-by-row",
        4,
        TWIN,
        "test_program_order_is_grouped_order",
        "the kernel still goes row by row: right numbers, nothing gained (handout section 5)",
        (
            "return band * GROUP + within % rows, within // rows",
            "return pid // tiles_n, pid % tiles_n",
        ),
    ),
    waste(
        "kernel-ignores-group",
        4,
        RAGGED,
        "test_ragged_matmul_loads_the_tiles_of_its_order",
        "the kernel ignores GROUP: right numbers, nothing gained (handout section 5)",
        ("if GROUP == 1:", "if True:"),
    ),
    bug(
        "wave-counts-programs",
        4,
        WAVE,
        "test_wave_tiles",
        "shared tiles are counted once for each program (handout section 5)",
        (
            "len({m for m, _ in tiles}), len({n for _, n in tiles})",
            "len([m for m, _ in tiles]), len([n for _, n in tiles])",
        ),
    ),
    bug(
        "wave-swapped",
        4,
        WAVE,
        "test_wave_tiles",
        "tiles of A and of B are mixed up: a row of C shares its tiles of A",
        (
            "len({m for m, _ in tiles}), len({n for _, n in tiles})",
            "len({n for _, n in tiles}), len({m for m, _ in tiles})",
        ),
    ),
    bug(
        "wave-first-only",
        4,
        WAVE,
        "test_wave_tiles_of_every_wave",
        "every wave is taken for the first one",
        (
            "range(wave * programs, min((wave + 1) * programs, tiles_m * tiles_n))",
            "range(0, min(programs, tiles_m * tiles_n))",
        ),
    ),
    bug(
        "wave-beyond-the-last-program",
        4,
        WAVE,
        "test_wave_tiles_of_every_wave",
        "the last wave is taken to be full",
        ("min((wave + 1) * programs, tiles_m * tiles_n)", "(wave + 1) * programs"),
    ),
    bug(
        "wave-that-does-not-exist",
        4,
        WAVE,
        "test_grouped_order_rejects",
        "a wave that does not exist has no tiles, instead of a ValueError",
        ("if not 0 <= wave < waves:", "if False:"),
    ),
    bug(
        "wave-one-too-many",
        4,
        WAVE,
        "test_grouped_order_rejects",
        "where waves are full, one more is taken to exist, with no tiles",
        ("-(-tiles_m * tiles_n // programs)", "tiles_m * tiles_n // programs + 1"),
    ),
    cheat(
        "wave-hard-coded",
        4,
        "test_wave_tiles_of_every_wave",
        "the handout's table is looked up",
        """
_counted = {(64, 1): (3, 64), (64, 8): (8, 17), (64, 64): (64, 3)}


def wave_tiles(tiles_m, tiles_n, group, programs, wave=0):
    if (tiles_m, tiles_n) == (64, 64):
        return _counted[tiles_m, group]
    if (tiles_m, tiles_n) == (64, 32):
        return (5, 32) if group == 1 else (8, 17)
    return (9, 16) if group == 1 else (12, 16)
""",
    ),
]

STEP_5 = [
    bug(
        "shared-one-stage-fewer-everywhere",
        5,
        SHARED,
        "test_shared_memory",
        "wgmma reads its operands from shared memory: the tile in use is there, too (handout "
        "section 6)",
        ("num_stages if from_shared else max(1, num_stages - 1)", "max(1, num_stages - 1)"),
    ),
    bug(
        "shared-all-stages-everywhere",
        5,
        SHARED,
        "test_shared_memory",
        "with mma.sync the tile in use is in registers: one stage fewer (handout section 6)",
        ("num_stages if from_shared else max(1, num_stages - 1)", "num_stages"),
    ),
    bug(
        "shared-rows-ignored",
        5,
        SHARED,
        "test_shared_memory",
        "below 64 rows there is no wgmma, also on a Hopper card (handout section 6)",
        (" and block_m >= 64", ""),
    ),
    bug(
        "shared-no-stage",
        5,
        SHARED,
        "test_shared_memory",
        "with num_stages=1 there is still one tile of each (handout section 6)",
        ("max(1, num_stages - 1)", "num_stages - 1"),
    ),
    bug(
        "shared-two-bytes",
        5,
        SHARED,
        "test_shared_memory",
        "an element is taken to have 2 bytes",
        ("block_k * itemsize", "block_k * 2"),
    ),
    bug(
        "shared-tile-of-c",
        5,
        SHARED,
        "test_shared_memory",
        "the tile of C is counted: it is in registers (handout section 6)",
        (
            "return stages * (block_m + block_n) * block_k * itemsize",
            "return (stages * (block_m + block_n) * block_k + block_m * block_n) * itemsize",
        ),
    ),
    bug(
        "fitting-strictly-less",
        5,
        FITTING,
        "test_fitting_configs_of_each_card",
        "a configuration that needs just what there is is refused",
        ("if need <= limit]", "if need < limit]"),
    ),
    bug(
        "fitting-none",
        5,
        FITTING,
        "test_fitting_configs_of_each_card",
        "where none fits the list is empty, and Triton's complaint does not say why",
        ("if min(needs) > limit:", "if False:"),
    ),
    bug(
        "fitting-says-the-largest",
        5,
        FITTING,
        "test_fitting_configs_of_each_card",
        "the message says what the largest needs, not the smallest",
        ("got {min(needs)}", "got {max(needs)}"),
    ),
    bug(
        "fitting-says-the-first",
        5,
        FITTING,
        "test_fitting_configs_of_each_card",
        "the message says what the first needs, not the smallest",
        ("got {min(needs)}", "got {needs[0]}"),
    ),
    bug(
        "fitting-dtype-ignored",
        5,
        FITTING,
        "test_fitting_configs_of_each_card",
        "float32 tiles are taken to be as small as bfloat16 ones",
        ("config.num_stages, itemsize, major", "config.num_stages, 2, major"),
    ),
    bug(
        "tuner-not-pruned",
        5,
        TUNER,
        "test_autotuned_kernel_tries_what_fits_once_a_bucket",
        "configurations that cannot launch are tried, too (handout section 6)",
        ('prune_configs_by={"early_config_prune": prune_for_card},', ""),
    ),
    bug(
        "tuner-list-cut-by-hand",
        5,
        TUNER,
        "test_autotuned_kernel_tries_what_fits_once_a_bucket",
        "the list is cut by hand for one card, and nothing is pruned on others (handout section 6)",
        ("configs=CONFIGS,", "configs=CONFIGS[1:],"),
        ('prune_configs_by={"early_config_prune": prune_for_card},', ""),
    ),
    bug(
        "tuner-pruned-for-one-card",
        5,
        TUNER,
        "test_autotuned_kernel_tries_what_fits_once_a_bucket",
        "pruned with one card's limit and 2 bytes a number, whatever the card and the inputs are",
        (
            '{"early_config_prune": prune_for_card}',
            '{"early_config_prune": lambda c, *_, **__: fitting_configs(c, 2, 12, 101_376)}',
        ),
    ),
    waste(
        "tuner-restores",
        5,
        TUNER,
        "test_autotuned_kernel_tries_what_fits_once_a_bucket",
        "what each trial overwrites is put back, and none needs it (handout section 6)",
        ("configs=CONFIGS,", 'configs=CONFIGS, restore_value=["c_ptr"],'),
    ),
    waste(
        "tuner-clears",
        5,
        TUNER,
        "test_autotuned_kernel_tries_what_fits_once_a_bucket",
        "C is cleared before each trial, which overwrites all of it (handout section 6)",
        ("configs=CONFIGS,", 'configs=CONFIGS, reset_to_zero=["c_ptr"],'),
    ),
    bug(
        "tuner-key-of-rows",
        5,
        TUNER,
        "test_autotuned_kernel_tries_what_fits_once_a_bucket",
        "the tile is chosen by M alone, and kept whatever N and K are (handout section 6)",
        ('key=["bucket_m", "bucket_n", "bucket_k"]', 'key=["bucket_m"]'),
    ),
    waste(
        "tuner-key-of-sizes",
        5,
        TUNER,
        "test_autotuned_kernel_tries_what_fits_once_a_bucket",
        "everything is tried again for each new size (handout section 6)",
        ('key=["bucket_m", "bucket_n", "bucket_k"]', 'key=["M", "N", "K"]'),
    ),
    bug(
        "tuned-times-the-interpreter",
        5,
        "tuned_matmul",
        "test_tuned_matmul",
        "the autotuner times the interpreter, or asks for a driver that is not there (handout "
        "section 6)",
        ("config is None and triton.knobs.runtime.interpret", "False"),
    ),
    bug(
        "tuned-one-config-is-wrong",
        5,
        "",
        "test_every_config_is_right_alone",
        "one configuration is deeper than DEEPEST and reads past K: right as long as another wins "
        "(handout section 6)",
        ("_config(128, 64, 64, 4, 4)", "_config(128, 64, 128, 4, 4)"),
    ),
    cheat(
        "tuned-is-torch",
        5,
        "test_autotuned_kernel_tries_what_fits_once_a_bucket",
        "PyTorch's own product does the work",
        """
def tuned_matmul(a, b, config=None):
    _new_product(a, b)
    return (a.float() @ b.float()).to(a.dtype)
""",
    ),
]

MUTANTS = [*STEP_1, *STEP_2, *STEP_3, *STEP_4, *STEP_5]
