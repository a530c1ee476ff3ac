"""Planted faults of lab 11: edits of solution.py, each with the test that must catch it.

`teaches` completes the sentence "This is what you get when ...".
"""

from labs._harness.mutants import Mutant

COPY, WGMMA, RING, FILL, TAKE, GIVE, WRITE = (
    "_tma_copy_kernel",
    "_wgmma_kernel",
    "_ring",
    "_fill",
    "_take",
    "_give_back",
    "_write",
)
PRODUCE_ONCE, CONSUME_ONCE, SIMPLE = (
    "_produce_once",
    "_consume_once",
    "_attention_producer_consumer_kernel",
)
BOUNDS, MASK, MAXIMUM, WEIGHTS, COLLECT, BEGIN, END, STEP, PRODUCE_TILE, CONSUME_TILE, OVERLAP = (
    "_bounds",
    "_mask",
    "_maximum",
    "_weights",
    "_collect",
    "_begin_turn",
    "_end_turn",
    "_step",
    "_produce_tile",
    "_consume_tile",
    "_attention_overlap_kernel",
)
SCHEDULE, PRODUCE, CONSUME, LAUNCH = "schedule", "_produce", "_consume", "attention_persistent"
PERSISTENT = "_attention_persistent_kernel"


def bug(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "bug", step, teaches, caught_by, edits, inside, append)


def waste(id, step, inside, caught_by, teaches, *edits, append=""):
    return Mutant(id, "waste", step, teaches, caught_by, edits, inside, append)


def cheat(id, step, caught_by, teaches, append, *edits, inside=""):
    return Mutant(id, "cheat", step, teaches, caught_by, edits, inside, append)


STEP_1 = [
    bug(
        "copy-parity-fixed",
        1,
        COPY,
        "test_tma_copy",
        "every round waits for parity 0: the second passes at once (handout section 2)",
        ("mbarrier.wait(full, i & 1)", "mbarrier.wait(full, 0)"),
    ),
    bug(
        "copy-parity-of-next",
        1,
        COPY,
        "test_tma_copy",
        "the wait is for the phase before, which is complete (handout section 2)",
        ("mbarrier.wait(full, i & 1)", "mbarrier.wait(full, (i & 1) ^ 1)"),
    ),
    bug(
        "copy-no-wait",
        1,
        COPY,
        "test_tma_copy",
        "the tile is stored before it has arrived (handout section 2)",
        ("            mbarrier.wait(full, i & 1)\n", ""),
    ),
    bug(
        "copy-no-expect",
        1,
        COPY,
        "test_tma_copy",
        "nobody arrives at the barrier, and the wait never ends (handout section 2)",
        ("            mbarrier.expect(full, x_desc.block_type.nbytes)\n", ""),
    ),
    bug(
        "copy-expects-half",
        1,
        COPY,
        "test_tma_copy",
        "fewer bytes are expected than come (handout section 2)",
        ("x_desc.block_type.nbytes)", "x_desc.block_type.nbytes // 2)"),
    ),
    bug(
        "copy-no-init",
        1,
        COPY,
        "test_tma_copy",
        "the barrier has no count (handout section 2)",
        ("        mbarrier.init(full, count=1)\n", ""),
    ),
    bug(
        "copy-count-two",
        1,
        COPY,
        "test_tma_copy",
        "the barrier wants an arrival that never comes (handout section 2)",
        ("mbarrier.init(full, count=1)", "mbarrier.init(full, count=2)"),
    ),
    bug(
        "copy-store-not-waited",
        1,
        COPY,
        "test_tma_copy",
        "the next load overwrites the tile while the store reads it (handout section 2)",
        ("            tma.store_wait(pendings=0)", "            tma.store_wait(pendings=1)"),
        ("x_desc.block_type.nbytes)", "x_desc.block_type.nbytes + 0 * i)"),
    ),
    bug(
        "copy-rows-and-columns",
        1,
        COPY,
        "test_tma_copy",
        "coordinates are given column first",
        ("async_store(out_desc, [i * BLOCK_R, col]", "async_store(out_desc, [col, i * BLOCK_R]"),
    ),
    waste(
        "copy-loads-twice",
        1,
        COPY,
        "test_tma_copy_moves_each_tile_once",
        "each tile is loaded twice",
        (
            "            mbarrier.wait(full, i & 1)\n",
            "            mbarrier.wait(full, 0)\n"
            "            mbarrier.expect(full, x_desc.block_type.nbytes)\n"
            "            async_load(x_desc, [i * BLOCK_R, col], full, tile)\n"
            "            mbarrier.wait(full, 1)\n",
        ),
    ),
    cheat(
        "copy-clone",
        1,
        "test_tma_copy_moves_each_tile_once",
        "PyTorch copies, and no kernel runs",
        "def tma_copy(x, block_r=64, block_c=64):\n    return x.clone()",
    ),
]

STEP_2 = [
    bug(
        "wgmma-no-wait-for-tiles",
        2,
        WGMMA,
        "test_wgmma_products",
        "the product reads tiles that have not arrived (handout section 3)",
        ("        mbarrier.wait(full, 0)\n", ""),
    ),
    bug(
        "wgmma-not-waited",
        2,
        WGMMA,
        "test_wgmma_products",
        "the numbers of a product in flight are used (handout section 3)",
        ("        s = warpgroup_mma_wait(0, [s])  # (ROWS, BLOCK_N)\n", ""),
    ),
    bug(
        "wgmma-waits-for-one-less",
        2,
        WGMMA,
        "test_wgmma_products",
        "the wait leaves one product in flight: this one (handout section 3)",
        ("s = warpgroup_mma_wait(0, [s])", "s = warpgroup_mma_wait(1, [s])"),
    ),
    bug(
        "wgmma-k-not-transposed",
        2,
        WGMMA,
        "test_wgmma_products",
        "k is not transposed",
        ("k_s.permute((1, 0))", "k_s"),
    ),
    bug(
        "wgmma-operand-layout",
        2,
        WGMMA,
        "test_wgmma_products",
        "the left operand keeps the layout of a result (handout section 3)",
        ("gl.convert_layout((s * scale).to(v_s.dtype), P_LAYOUT)", "(s * scale).to(v_s.dtype)"),
    ),
    bug(
        "wgmma-scale-after-rounding",
        2,
        WGMMA,
        "test_wgmma_products_scale_before_rounding",
        "scores are rounded to half before they are scaled",
        ("(s * scale).to(v_s.dtype)", "(s.to(v_s.dtype) * scale).to(v_s.dtype)"),
    ),
    bug(
        "wgmma-no-fence",
        2,
        WGMMA,
        "test_wgmma_products",
        "TMA stores what lay in shared memory before the threads wrote (handout section 3)",
        ("        fence_async_shared()  # TMA must see what the threads have written\n", ""),
    ),
    bug(
        "wgmma-store-not-waited",
        2,
        WGMMA,
        "test_wgmma_products",
        "the program ends, and with it shared memory, while TMA reads it (handout section 3)",
        ("        tma.store_wait(pendings=0)\n", ""),
    ),
    bug(
        "wgmma-expects-one-copy",
        2,
        WGMMA,
        "test_wgmma_products",
        "one copy's bytes are expected and three come (handout section 3)",
        (" + 2 * k_desc.block_type.nbytes)", ")"),
    ),
    waste(
        "wgmma-twice",
        2,
        WGMMA,
        "test_wgmma_products_work",
        "the first product is computed twice",
        (
            "        # The left one in registers.\n",
            "        s = warpgroup_mma(q_s, k_s.permute((1, 0)), s, use_acc=False)\n",
        ),
    ),
    cheat(
        "wgmma-matmul",
        2,
        "test_wgmma_products_work",
        "PyTorch multiplies, and no kernel runs",
        "def wgmma_products(q, k, v, scale=1.0):\n"
        "    s = (q.float() @ k.float().T * scale).to(q.dtype)\n"
        "    return (s.float() @ v.float()).to(q.dtype)",
    ),
]

STEP_3 = [
    bug(
        "barriers-not-fenced",
        3,
        SIMPLE,
        "test_producer_consumer",
        "TMA may see barriers as they were before they were initialised (handout section 2)",
        ("        fence_async_shared()\n", ""),
    ),
    bug(
        "ring-empty-counts-one",
        3,
        RING,
        "test_producer_consumer",
        "a tile counts as given back when the first of two consumers has (handout section 4)",
        (
            "mbarrier.init(empty.index(stage), count=USERS)",
            "mbarrier.init(empty.index(stage), count=1)",
        ),
    ),
    bug(
        "ring-full-counts-users",
        3,
        RING,
        "test_producer_consumer",
        "a full tile waits for arrivals of consumers (handout section 4)",
        (
            "mbarrier.init(full.index(stage), count=1)",
            "mbarrier.init(full.index(stage), count=USERS)",
        ),
    ),
    bug(
        "fill-first-round-waits",
        3,
        FILL,
        "test_producer_consumer",
        "the producer waits for a tile to be given back that nobody had (handout section 4)",
        ("(uses & 1) ^ 1)", "uses & 1)"),
    ),
    bug(
        "fill-does-not-wait",
        3,
        FILL,
        "test_producer_consumer_stages",
        "tiles are overwritten while they are read (handout section 4)",
        ("        mbarrier.wait(empty.index(stage), (uses & 1) ^ 1)\n", ""),
    ),
    bug(
        "fill-phase-of-tile",
        3,
        FILL,
        "test_producer_consumer_stages",
        "the phase is that of the tile's number, not of its round (handout section 4)",
        ("(uses & 1) ^ 1)", "(i & 1) ^ 1)"),
    ),
    bug(
        "take-phase-of-tile",
        3,
        TAKE,
        "test_producer_consumer_stages",
        "the consumer's phase is that of the tile's number (handout section 4)",
        ("uses & 1)", "i & 1)"),
    ),
    bug(
        "take-does-not-wait",
        3,
        TAKE,
        "test_producer_consumer",
        "tiles are used before they have arrived (handout section 4)",
        ("        mbarrier.wait(full.index(stage), uses & 1)\n", ""),
    ),
    bug(
        "give-back-to-full",
        3,
        GIVE,
        "test_producer_consumer",
        "the arrival goes to the wrong barrier (handout section 4)",
        ("mbarrier.arrive(empty.index", "mbarrier.arrive(full.index"),
    ),
    bug(
        "k-given-back-early",
        3,
        CONSUME_ONCE,
        "test_producer_consumer_stages",
        "K is given back while the product still reads it (handout section 4)",
        (
            "            s = warpgroup_mma_wait(0, [s])  # (ROWS, BLOCK_N)\n"
            "            _give_back(k_ring, j, STAGES)\n",
            "            _give_back(k_ring, j, STAGES)\n"
            "            s = warpgroup_mma_wait(0, [s])  # (ROWS, BLOCK_N)\n",
        ),
    ),
    bug(
        "v-given-back-early",
        3,
        CONSUME_ONCE,
        "test_producer_consumer_stages",
        "V is given back while the product still reads it (handout section 4)",
        (
            "            acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n"
            "            _give_back(v_ring, j, STAGES)\n",
            "            _give_back(v_ring, j, STAGES)\n"
            "            acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n",
        ),
    ),
    bug(
        "v-never-given-back",
        3,
        CONSUME_ONCE,
        "test_producer_consumer",
        "the producer waits for V's stages for ever (handout section 4)",
        ("            _give_back(v_ring, j, STAGES)\n", ""),
    ),
    bug(
        "consumers-share-rows",
        3,
        PRODUCE_ONCE,
        "test_producer_consumer",
        "both consumers get the first 64 rows of Q",
        ("(m * CONSUMERS + w) * ROWS", "m * CONSUMERS * ROWS"),
    ),
    bug(
        "acc-not-rescaled",
        3,
        CONSUME_ONCE,
        "test_producer_consumer_score_ranges",
        "acc is not rescaled as the maximum grows",
        ("acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]", "pass"),
    ),
    bug(
        "l-not-rescaled",
        3,
        CONSUME_ONCE,
        "test_producer_consumer_score_ranges",
        "l is not rescaled as the maximum grows",
        ("l_i = l_i * alpha + gl.sum(p, 1)", "l_i = l_i + gl.sum(p, 1)"),
    ),
    bug(
        "fused-multiply-add",
        3,
        CONSUME_ONCE,
        "test_producer_consumer_huge_equal_scores",
        "s * scale - m * scale is one fused operation, which is not 0 where s = m",
        (
            "(s - m_new[:, None]) * qk_scale)",
            "s * qk_scale - (m_new * qk_scale)[:, None])",
        ),
    ),
    bug(
        "natural-exponent",
        3,
        CONSUME_ONCE,
        "test_producer_consumer",
        "exp2 gets an exponent for exp",
        ("qk_scale = scale * LOG2_E", "qk_scale = scale"),
    ),
    bug(
        "layout-of-alpha",
        3,
        CONSUME_ONCE,
        "test_producer_consumer",
        "alpha meets acc in the layout of the scores (handout section 4)",
        ("gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]", "alpha[:, None]"),
    ),
    bug(
        "lse-base-2",
        3,
        WRITE,
        "test_producer_consumer",
        "lse is in base 2",
        ("m_i * scale + gl.log(l_i)", "m_i * scale * LOG2_E + gl.log2(l_i)"),
    ),
    bug(
        "write-no-fence",
        3,
        WRITE,
        "test_producer_consumer",
        "TMA stores what lay in shared memory before the threads wrote",
        ("        fence_async_shared()\n", ""),
    ),
    bug(
        "head-and-batch",
        3,
        SIMPLE,
        "test_producer_consumer_heads_and_scale",
        "batch and head change places",
        ("        b = bh // H\n        h = bh % H\n", "        b = bh % H\n        h = bh // H\n"),
    ),
    bug(
        "consumer-of-one-warp",
        3,
        SIMPLE,
        "test_producer_consumer",
        "a consumer has one warp, and a product of wgmma takes four (handout section 4)",
        ("[4, 1],", "[1, 1],"),
    ),
    waste(
        "keys-loaded-by-each-consumer",
        3,
        PRODUCE_ONCE,
        "test_producer_consumer_moves_few_bytes",
        "K is loaded once more than needed",
        (
            "            _fill(v_desc, v_ring, b, h, j * BLOCK_N, j, STAGES)\n",
            "            _fill(v_desc, v_ring, b, h, j * BLOCK_N, j, STAGES)\n"
            "        _fill(k_desc, k_ring, b, h, 0, n_blocks, STAGES)\n"
            "        mbarrier.wait(k_ring[1].index(n_blocks % STAGES), (n_blocks // STAGES) & 1)\n",
        ),
    ),
    cheat(
        "simple-in-torch",
        3,
        "test_producer_consumer_moves_few_bytes",
        "PyTorch computes, and no kernel runs",
        "def attention_producer_consumer(q, k, v, scale=None, stages=2):\n"
        "    scale = q.shape[-1] ** -0.5 if scale is None else scale\n"
        "    s = q.float() @ k.float().transpose(-1, -2) * scale\n"
        "    lse = s.logsumexp(-1)\n"
        "    return ((s - lse[..., None]).exp() @ v.float()).to(q.dtype), lse",
    ),
    waste(
        "heads-in-turn",
        3,
        SIMPLE,
        "test_producer_consumer_keeps_a_head_together",
        "neighbouring programs work on different heads, and share no K and V",
        ("m = gl.program_id(0) % n_m", "m = gl.program_id(0) // (gl.num_programs(0) // n_m)"),
        ("bh = gl.program_id(0) // n_m", "bh = gl.program_id(0) % (gl.num_programs(0) // n_m)"),
    ),
    waste(
        "no-copies-ahead",
        3,
        FILL,
        "test_producer_consumer_copies_ahead",
        "the producer waits for each copy before it starts the next (handout section 4)",
        (
            "full.index(stage), tiles.index(stage))\n",
            "full.index(stage), tiles.index(stage))\n"
            "        mbarrier.wait(full.index(stage), uses & 1)\n",
        ),
    ),
    bug(
        "consumers-with-the-producers-registers",
        3,
        SIMPLE,
        "test_producer_consumer",
        "the second consumer has 24 registers a thread (handout section 4)",
        ("[240, 24]", "[24, 24]"),
    ),
    waste(
        "inputs-always-copied",
        3,
        "_for_tma",
        "test_producer_consumer_layouts",
        "q, k and v are copied, whether TMA can read them or not",
        ("        return x\n", "        pass\n"),
    ),
]

STEP_4 = [
    bug(
        "last-block-dropped",
        4,
        BOUNDS,
        "test_overlap_ragged_lengths",
        "blocks are counted rounding down, and the last, ragged one is never seen",
        ("n_blocks = gl.cdiv(T, BLOCK_N)", "n_blocks = gl.maximum(T // BLOCK_N, 1)"),
    ),
    bug(
        "diagonal-not-masked",
        4,
        BOUNDS,
        "test_overlap",
        "the diagonal block counts as full, and rows see the future",
        ("n_full = m * BLOCK_M // BLOCK_N", "n_full = (m + 1) * BLOCK_M // BLOCK_N"),
    ),
    bug(
        "padding-keys-counted",
        4,
        BOUNDS,
        "test_overlap_ragged_lengths",
        "keys beyond T, zeros, have the score 0 and not -inf",
        ("n_full = T // BLOCK_N", "n_full = gl.cdiv(T, BLOCK_N)"),
    ),
    bug(
        "mask-of-block-zero",
        4,
        MASK,
        "test_overlap",
        "columns are counted from the block's start",
        ("last = rows - start_n", "last = rows"),
    ),
    bug(
        "mask-strict",
        4,
        MASK,
        "test_overlap",
        "a query does not see its own key, and the first row sees none",
        ("8 * i + k <= last - 2 * j", "8 * i + k < last - 2 * j"),
    ),
    bug(
        "mask-finite",
        4,
        MASK,
        "test_overlap_huge_equal_scores",
        "a finite number stands for -inf, and real scores lie below it",
        ('parts, float("-inf"))', "parts, -1.0e6)"),
    ),
    bug(
        "mask-of-the-end",
        4,
        MASK,
        "test_overlap_ragged_lengths",
        "where the sequence ends is counted from the block's start",
        ("last = T - 1 - start_n +", "last = T - 1 +"),
    ),
    bug(
        "sum-not-rescaled",
        4,
        WEIGHTS,
        "test_overlap_score_ranges",
        "the parts of the sum keep the scale of an older maximum",
        ("l_i * l_alpha[:, None] + _parts(p)", "l_i + _parts(p)"),
    ),
    bug(
        "acc-keeps-its-scale",
        4,
        COLLECT,
        "test_overlap_maximum_falls_behind",
        "acc keeps the scale of an older maximum",
        ("return _rescale(acc, alpha)", "return acc"),
    ),
    bug(
        "maximum-of-block-zero",
        4,
        MAXIMUM,
        "test_overlap_maximum_falls_behind",
        "the maximum stays that of block 0, and float16 weights overflow (handout section 5)",
        ("(top - m_i) * scales[0] > SLACK", 'm_i == float("-inf")'),
    ),
    bug(
        "slack-too-large",
        4,
        MAXIMUM,
        "test_overlap_maximum_falls_behind",
        "the maximum may fall behind by 2**24, and float16 ends at 2**16 (handout section 5)",
        ("> SLACK", "> 24.0"),
    ),
    bug(
        "slack-not-scaled",
        4,
        MAXIMUM,
        "test_overlap_maximum_falls_behind",
        "how far the maximum is behind is not scaled, and no number of powers of two",
        ("(top - m_i) * scales[0] > SLACK", "top - m_i > SLACK"),
    ),
    bug(
        "alpha-of-another-maximum",
        4,
        MAXIMUM,
        "test_overlap",
        "the maximum moves, and alpha is the factor of one that stays (handout section 5)",
        ("return m_new,", "return gl.maximum(m_i, top),"),
    ),
    bug(
        "sum-of-one-part",
        4,
        CONSUME_TILE,
        "test_overlap",
        "the four parts of a row's sum are not added up, one of them is taken for all",
        ("gl.sum(l_i, 1)", "gl.max(l_i, 1)"),
    ),
    bug(
        "pairs-swapped",
        4,
        "_pack",
        "test_overlap",
        "the weights of neighbouring keys change places",
        ("[first, second]", "[second, first]"),
    ),
    bug(
        "packed-as-the-other-dtype",
        4,
        "_pack",
        "test_overlap",
        "weights are rounded to bfloat16 and read as float16",
        ("if DTYPE == gl.bfloat16:", "if DTYPE == DTYPE:"),
    ),
    bug(
        "first-block-not-masked",
        4,
        CONSUME_TILE,
        "test_overlap_ragged_lengths",
        "block 0 is never masked, though a short sequence ends in it",
        (
            "        if n_full == 0:\n            s = _mask(s, rows, 0, T, BLOCK_N, CAUSAL)\n",
            "",
        ),
    ),
    bug(
        "k-given-back-in-flight",
        4,
        STEP,
        "test_overlap_tiles",
        "K is given back before its product has ended (handout section 5)",
        (
            "        s = warpgroup_mma_wait(1, [s])  # (ROWS, BLOCK_N)\n"
            "        _give_back(k_ring, i, STAGES)\n",
            "        _give_back(k_ring, i, STAGES)\n"
            "        s = warpgroup_mma_wait(1, [s])  # (ROWS, BLOCK_N)\n",
        ),
    ),
    bug(
        "v-given-back-in-flight",
        4,
        COLLECT,
        "test_overlap_tiles",
        "V is given back while P @ V still reads it (handout section 5)",
        (
            "        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n"
            "        _give_back(v_ring, i - 1, STAGES)\n",
            "        _give_back(v_ring, i - 1, STAGES)\n"
            "        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n",
        ),
    ),
    bug(
        "v-of-this-block",
        4,
        STEP,
        "test_overlap",
        "the weights of block i - 1 meet the values of block i",
        ("v = _view(v_ring, i - 1, BLOCK_N", "v = _view(v_ring, i, BLOCK_N"),
    ),
    bug(
        "v-not-waited",
        4,
        COLLECT,
        "test_overlap",
        "nobody waits for V (handout section 5)",
        ("        _take(v_ring, i, BLOCK_N, D, STAGES)\n", ""),
    ),
    bug(
        "waits-for-none",
        4,
        STEP,
        "test_overlap",
        "both products may be in flight when the scores are used (handout section 5)",
        ("s = warpgroup_mma_wait(1, [s])", "s = warpgroup_mma_wait(2, [s])"),
    ),
    bug(
        "acc-rescaled-in-flight",
        4,
        COLLECT,
        "test_overlap",
        "acc is rescaled while its product is in flight (handout section 5)",
        ("        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n", ""),
    ),
    bug(
        "turn-not-passed-on",
        4,
        END,
        "test_overlap_tiles",
        "nobody passes the turn on, and all wait (handout section 5)",
        ("        if PING_PONG:\n", "        if PING_PONG and WG == 1:\n"),
    ),
    bug(
        "turn-of-nobody",
        4,
        BEGIN,
        "test_overlap_tiles",
        "no consumer has the first turn (handout section 5)",
        ("(i & 1) ^ (WG == 0))", "i & 1)"),
    ),
    bug(
        "last-product-missing",
        4,
        CONSUME_TILE,
        "test_overlap",
        "the last block's weights never meet their values",
        (
            "        acc = warpgroup_mma(_unpack(p, v.dtype, acc), v, acc, is_async=True)\n",
            "        acc = acc * 1.0\n",
        ),
    ),
    bug(
        "q-of-other-consumer",
        4,
        CONSUME_TILE,
        "test_overlap",
        "both consumers compute with the first one's Q",
        (
            "q = _take(q_ring, turn * CONSUMERS + WG, ROWS",
            "q = _take(q_ring, turn * CONSUMERS, ROWS",
        ),
    ),
    bug(
        "rows-beyond-t-stored",
        4,
        WRITE,
        "test_overlap_ragged_lengths",
        "lse of rows beyond T is stored over the next head's",
        (", mask=rows < T)", ")"),
    ),
    waste(
        "block-beyond-the-end",
        4,
        BOUNDS,
        "test_overlap_work",
        "blocks are counted to the tile's end, not to the sequence's",
        (
            "gl.cdiv(gl.minimum(T, (m + 1) * BLOCK_M), BLOCK_N)",
            "gl.cdiv((m + 1) * BLOCK_M, BLOCK_N)",
        ),
    ),
    waste(
        "masks-counted-in-tiles",
        4,
        BOUNDS,
        "test_overlap_work",
        "with narrow blocks twice as many are masked as the diagonal crosses",
        ("n_full = m * BLOCK_M // BLOCK_N", "n_full = m"),
    ),
    waste(
        "masked-steps-wait",
        4,
        STEP,
        "test_overlap_keeps_a_product_in_flight",
        "masked steps wait for both products before the softmax (handout section 5)",
        (
            "        if MASKED:\n",
            "        if MASKED:\n            acc = warpgroup_mma_wait(0, [acc])\n",
        ),
    ),
    waste(
        "overlap-one-size",
        4,
        "attention_overlap",
        "test_overlap_stages_are_used",
        "the caller's stages are not used",
        ("STAGES=stages", "STAGES=2"),
    ),
    waste(
        "all-blocks-visited",
        4,
        BOUNDS,
        "test_overlap_work",
        "blocks in the future are computed and masked away",
        ("gl.cdiv(gl.minimum(T, (m + 1) * BLOCK_M), BLOCK_N)", "gl.cdiv(T, BLOCK_N)"),
    ),
    waste(
        "all-blocks-masked",
        4,
        BOUNDS,
        "test_overlap_work",
        "every block is masked",
        ("n_full = m * BLOCK_M // BLOCK_N", "n_full = 0 * m"),
    ),
    waste(
        "maximum-always-followed",
        4,
        MAXIMUM,
        "test_overlap_rescales_seldom",
        "each new maximum is followed, and acc is multiplied for it (handout section 5)",
        ("> SLACK", "> 0.0"),
    ),
    waste(
        "maximum-followed-early",
        4,
        MAXIMUM,
        "test_overlap_maximum_falls_behind",
        "the maximum is followed when it is half as far behind as it may be",
        ("> SLACK", "> SLACK / 2"),
    ),
    waste(
        "acc-times-one",
        4,
        COLLECT,
        "test_overlap_rescales_seldom",
        "acc is multiplied whatever the factor (handout section 5)",
        (
            "_rescale(acc, alpha)",
            "acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]",
        ),
    ),
    waste(
        "nothing-overlaps",
        4,
        STEP,
        "test_overlap_keeps_a_product_in_flight",
        "both products are waited for before the softmax (handout section 5)",
        (
            "        s = warpgroup_mma_wait(1, [s])  # (ROWS, BLOCK_N)\n",
            "        s, acc = warpgroup_mma_wait(0, [s, acc])  # (ROWS, BLOCK_N)\n",
        ),
    ),
    waste(
        "wait-behind-the-product",
        4,
        COLLECT,
        "test_overlap_softmax_stays_in_front",
        "V is waited for behind the product, and so is the softmax (handout section 5)",
        (
            "        _take(v_ring, i, BLOCK_N, D, STAGES)\n"
            "        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n",
            "        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n"
            "        _take(v_ring, i, BLOCK_N, D, STAGES)\n",
        ),
    ),
    waste(
        "no-turns",
        4,
        OVERLAP,
        "test_overlap_ping_pong",
        "the consumers never take turns (handout section 5)",
        (
            "D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, 0,",
            "D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, CAUSAL, False, 0,",
        ),
        (
            "D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, 1,",
            "D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, CAUSAL, False, 1,",
        ),
    ),
    waste(
        "always-turns",
        4,
        "attention_overlap",
        "test_overlap_ping_pong",
        "the consumers take turns, whatever the caller says",
        ("PING_PONG=bool(ping_pong)", "PING_PONG=True"),
    ),
    waste(
        "turn-behind-the-product",
        4,
        STEP,
        "test_overlap_ping_pong",
        "the turn is waited for when Q @ K is on its way already (handout section 5)",
        ("        _begin_turn(order, i, WG, PING_PONG)\n", ""),
        (
            "s, use_acc=False, is_async=True)\n",
            "s, use_acc=False, is_async=True)\n        _begin_turn(order, i, WG, PING_PONG)\n",
        ),
    ),
    waste(
        "turn-ends-between-products",
        4,
        STEP,
        "test_overlap_ping_pong",
        "the turn ends before P @ V has started (handout section 5)",
        ("        _end_turn(order, WG, CONSUMERS, PING_PONG)\n", ""),
        (
            "s, use_acc=False, is_async=True)\n",
            "s, use_acc=False, is_async=True)\n"
            "        _end_turn(order, WG, CONSUMERS, PING_PONG)\n",
        ),
    ),
    waste(
        "k-and-v-in-turn",
        4,
        PRODUCE_TILE,
        "test_overlap_copies_ahead",
        "V of a block is loaded before K of the next one, which is asked for earlier",
        (
            "            _fill(k_desc, k_ring, b, h, j * BLOCK_N, first + j, STAGES)\n"
            "            _fill(v_desc, v_ring, b, h, (j - 1) * BLOCK_N, first + j - 1, STAGES)\n",
            "            _fill(v_desc, v_ring, b, h, (j - 1) * BLOCK_N, first + j - 1, STAGES)\n"
            "            _fill(k_desc, k_ring, b, h, j * BLOCK_N, first + j, STAGES)\n",
        ),
    ),
    bug(
        "slack-of-16",
        4,
        MAXIMUM,
        "test_overlap_maximum_falls_behind",
        "the maximum may fall behind by 2**16, which float16 does not hold (handout section 5)",
        ("> SLACK", "> 16.0"),
    ),
    bug(
        "mask-very-low",
        4,
        MASK,
        "test_overlap_scores_beyond_any_mask",
        "-1e30 stands for -inf, and there are scores below it",
        ('float("-inf")', "-1e30"),
    ),
    waste(
        "k-kept-for-the-softmax",
        4,
        STEP,
        "test_overlap_copies_ahead",
        "K is given back behind the softmax, not behind its product",
        ("        _give_back(k_ring, i, STAGES)\n", ""),
        (
            "        return _pack(weights, v.dtype), acc, m_i, l_i\n",
            "        _give_back(k_ring, i, STAGES)\n"
            "        return _pack(weights, v.dtype), acc, m_i, l_i\n",
        ),
    ),
    waste(
        "v-awaited-before-the-first-product",
        4,
        CONSUME_TILE,
        "test_overlap_copies_ahead",
        "block 0 waits for its V before its first product",
        (
            "        _begin_turn(order, first, WG, PING_PONG)\n",
            "        _take(v_ring, first, BLOCK_N, D, STAGES)\n"
            "        _begin_turn(order, first, WG, PING_PONG)\n",
        ),
    ),
    waste(
        "scaled-in-two-steps",
        4,
        WEIGHTS,
        "test_overlap_arithmetic",
        "each score is scaled by two factors, one after the other",
        (
            "(s - m_i[:, None]) * qk_scale",
            "(s - m_i[:, None]) * (qk_scale / LOG2_E) * LOG2_E",
        ),
    ),
    waste(
        "turn-ends-behind-the-softmax",
        4,
        STEP,
        "test_overlap_ping_pong",
        "the turn is passed on when the softmax is done: the consumers run one after the other",
        ("        _end_turn(order, WG, CONSUMERS, PING_PONG)\n", ""),
        (
            "        return _pack(weights, v.dtype), acc, m_i, l_i\n",
            "        _end_turn(order, WG, CONSUMERS, PING_PONG)\n"
            "        return _pack(weights, v.dtype), acc, m_i, l_i\n",
        ),
    ),
    waste(
        "first-product-without-a-turn",
        4,
        CONSUME_TILE,
        "test_overlap_ping_pong",
        "block 0's product waits for no turn (handout section 5)",
        ("        _begin_turn(order, first, WG, PING_PONG)\n", ""),
    ),
    waste(
        "shortest-first",
        4,
        OVERLAP,
        "test_overlap_longest_first",
        "the shortest tiles of a head come first, and the longest end alone",
        ("            m = n_m - 1 - m", "            m = m"),
    ),
    cheat(
        "overlap-overwritten",
        4,
        "test_overlap",
        "the kernel runs, and PyTorch writes its own result over the kernel's",
        "_with_kernel = attention_overlap\n\n\n"
        "def attention_overlap(q, k, v, causal=False, scale=None, **options):\n"
        "    out, lse = _with_kernel(q, k, v, causal, scale, **options)\n"
        "    s = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)\n"
        "    if causal:\n"
        "        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf)\n"
        "    m = s.max(-1, keepdim=True).values\n"
        "    p = (s - m).exp()\n"
        "    lse.copy_(m[..., 0] + p.sum(-1).log())\n"
        "    out.copy_((p / p.sum(-1, keepdim=True)) @ v.double())\n"
        "    return out, lse",
    ),
]

STEP_5 = [
    bug(
        "phase-from-zero",
        5,
        CONSUME,
        "test_hopper_attention_many_tiles_a_program",
        "each tile starts again at stage 0 and phase 0 (handout section 6)",
        ("            first += _consume_tile(\n", "            first = 0 * _consume_tile(\n"),
    ),
    bug(
        "producer-phase-from-zero",
        5,
        PRODUCE,
        "test_hopper_attention_many_tiles_a_program",
        "the producer starts each tile at stage 0 and phase 0 (handout section 6)",
        ("            first += n_blocks\n", ""),
    ),
    bug(
        "q-never-given-back",
        5,
        CONSUME_TILE,
        "test_hopper_attention_many_tiles_a_program",
        "the producer waits for Q's place in the second tile (handout section 6)",
        ("        _give_back(q_ring, turn * CONSUMERS + WG, 2 * CONSUMERS)\n", ""),
    ),
    bug(
        "q-given-back-early",
        5,
        CONSUME_TILE,
        "test_hopper_attention_many_tiles_a_program",
        "Q is given back after its first product (handout section 6)",
        ("        _give_back(q_ring, turn * CONSUMERS + WG, 2 * CONSUMERS)\n", ""),
        (
            "        _give_back(k_ring, first, STAGES)\n",
            "        _give_back(k_ring, first, STAGES)\n"
            "        _give_back(q_ring, turn * CONSUMERS + WG, 2 * CONSUMERS)\n",
        ),
    ),
    bug(
        "output-overwritten",
        5,
        WRITE,
        "test_hopper_attention_many_tiles_a_program",
        "the second tile's output is written over the first while TMA reads it (section 6)",
        ("        tma.store_wait(pendings=0)  # an earlier tile's store may still read o_s\n", ""),
    ),
    bug(
        "stores-not-waited",
        5,
        CONSUME,
        "test_hopper_attention",
        "the program ends while the last store reads shared memory (handout section 6)",
        ("        tma.store_wait(pendings=0)\n", ""),
    ),
    bug(
        "same-tile-again",
        5,
        CONSUME,
        "test_hopper_attention_many_tiles_a_program",
        "the consumers do not go on to the next tile",
        ("            tile = upcoming\n", ""),
    ),
    bug(
        "one-tile-a-program",
        5,
        PRODUCE,
        "test_hopper_attention_many_tiles_a_program",
        "only the first tile of a program is loaded",
        ("for place in range(start, stop):", "for place in range(start, start + 1):"),
    ),
    bug(
        "head-of-batch",
        5,
        PRODUCE,
        "test_hopper_attention",
        "heads are counted over the batch",
        ("head // H, head % H, m", "head % H, head // H, m"),
    ),
    bug(
        "fused-without-guard",
        5,
        WEIGHTS,
        "test_hopper_attention_huge_equal_scores",
        "one multiply-add a score, also where its rounding decides everything (section 6)",
        ("gl.abs(m_i) * qk_scale < 268435456.0", "gl.abs(m_i) * 0.0 < 268435456.0"),
    ),
    bug(
        "fused-guard-late",
        5,
        WEIGHTS,
        "test_hopper_attention_large_equal_scores",
        "the power of two takes over only where scores are larger still (handout section 6)",
        ("< 268435456.0", "< 1.0e11"),
    ),
    bug(
        "last-v-given-back-in-flight",
        5,
        CONSUME_TILE,
        "test_hopper_attention_many_tiles_a_program",
        "the next tile's V is loaded over the one that the last product still reads (section 5)",
        ("        _give_back(v_ring, last, STAGES)\n", ""),
        (
            "        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n",
            "        _give_back(v_ring, last, STAGES)\n"
            "        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)\n",
        ),
    ),
    waste(
        "configuration-ignored",
        5,
        LAUNCH,
        "test_hopper_attention_configuration_is_used",
        "the caller's configuration is not used",
        ("best_config(D, causal, T) if config is None else config", "best_config(D, causal, T)"),
    ),
    bug(
        "schedule-tile-twice",
        5,
        SCHEDULE,
        "test_schedule_has_each_tile_once",
        "the last group's missing heads are scheduled, too",
        ("min(first + group, n_heads)", "first + group"),
    ),
    bug(
        "schedule-group-dropped",
        5,
        SCHEDULE,
        "test_schedule_has_each_tile_once",
        "the last, smaller group of heads is left out",
        ("range(0, n_heads, group)", "range(0, n_heads // group * group, group)"),
    ),
    waste(
        "schedule-in-turn",
        5,
        SCHEDULE,
        "test_schedule_is_balanced_when_causal",
        "tiles are dealt out in turn, whatever their length (handout section 6)",
        ("if len(set(lengths)) == 1:", "if True:"),
    ),
    waste(
        "schedule-shortest-first",
        5,
        SCHEDULE,
        "test_schedule_is_balanced_when_causal",
        "the longest tiles come last, when nothing is left to fill the gaps (section 6)",
        ("key=lambda m: -lengths[m]", "key=lambda m: lengths[m]"),
        ("range(0, n_heads, group)", "range(0, n_heads, n_heads)"),
        ("min(first + group, n_heads)", "n_heads"),
    ),
    waste(
        "schedule-heads-interleaved",
        5,
        SCHEDULE,
        "test_schedule_keeps_a_head_together_when_full",
        "programs work on all heads at a time, whose keys do not fit in the cache (section 6)",
        (
            "order = range(n_m * n_heads)",
            "order = [h * n_m + m for m in range(n_m) for h in range(n_heads)]",
        ),
    ),
    bug(
        "third-consumer-never-rescales",
        5,
        STEP,
        "test_hopper_attention_maximum_falls_behind",
        "with three consumers acc keeps the scale of an older maximum",
        (
            "            acc = _collect(acc, alpha, v_ring, i, D, BLOCK_N, STAGES)\n"
            "        weights",
            "            one = gl.where(alpha >= 0.0, 1.0, alpha)\n"
            "            acc = _collect(acc, one, v_ring, i, D, BLOCK_N, STAGES)\n"
            "        weights",
        ),
    ),
    waste(
        "third-consumer-waits-at-once",
        5,
        STEP,
        "test_hopper_attention_three_consumers",
        "with three consumers P @ V is waited for before the mask and the maximum",
        (
            "        s = warpgroup_mma_wait(1, [s])  # (ROWS, BLOCK_N)\n",
            "        if CONSUMERS == 3:\n"
            "            s, acc = warpgroup_mma_wait(0, [s, acc])\n"
            "        else:\n"
            "            s = warpgroup_mma_wait(1, [s])  # (ROWS, BLOCK_N)\n",
        ),
    ),
    waste(
        "masks-of-two-consumers",
        5,
        BOUNDS,
        "test_hopper_attention_three_consumers",
        "full blocks are counted for tiles of 128 rows, whatever the consumers",
        ("m * BLOCK_M // BLOCK_N", "m * 128 // BLOCK_N"),
    ),
    bug(
        "fused-guard-early",
        5,
        WEIGHTS,
        "test_hopper_attention_differences_of_large_scores",
        "the power of two takes over where weights still depend on the scale (section 6)",
        ("268435456.0", "1048576.0"),
    ),
    waste(
        "schedule-lengths-alike",
        5,
        "_schedule_table",
        "test_schedule_is_made_of_lengths",
        "causal tiles are planned as if all were as long as one another",
        ("1.0 + -(-end // block_n) for end in ends", "1.0 for end in ends"),
    ),
    waste(
        "last-round-half-empty",
        5,
        "_programs",
        "test_hopper_attention_fills_its_last_round",
        "full: a program for each multiprocessor, and the last round leaves half of them idle",
        ("    return programs if causal else -(-tiles // rounds)\n", "    return programs\n"),
    ),
    bug(
        "one-program-too-few",
        5,
        "_programs",
        "test_hopper_attention_fills_its_last_round",
        "rounded down: a round more than needed",
        ("-(-tiles // rounds)", "tiles // rounds"),
    ),
    waste(
        "not-persistent",
        5,
        LAUNCH,
        "test_hopper_attention_work",
        "there is a program for each tile",
        ("    if persistent:\n", "    if False:\n"),
    ),
    bug(
        "scale-ignored",
        5,
        "_check_attention",
        "test_hopper_attention_scale",
        "the caller's scale is not used",
        ("if scale is None else float(scale)", "if scale is None or scale > 0 else float(scale)"),
    ),
    bug(
        "strides-of-a-view",
        5,
        "_for_tma",
        "test_hopper_attention_layouts",
        "rows that do not begin at 16 bytes are given to TMA, which refuses them",
        ("and x.data_ptr() % 16 == 0", "and x.data_ptr() % 2 == 0"),
    ),
    cheat(
        "best-in-torch",
        5,
        "test_hopper_attention_work",
        "PyTorch computes, and no kernel runs",
        "def attention_persistent(q, k, v, causal=False, scale=None, config=None):\n"
        "    scale = q.shape[-1] ** -0.5 if scale is None else scale\n"
        "    s = q.float() @ k.float().transpose(-1, -2) * scale\n"
        "    if causal:\n"
        "        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf)\n"
        "    lse = s.logsumexp(-1)\n"
        "    return ((s - lse[..., None]).exp() @ v.float()).to(q.dtype), lse",
    ),
    cheat(
        "best-is-step-4",
        5,
        "test_hopper_attention_work",
        "the version of step 4 is called once more",
        "def hopper_attention(q, k, v, causal=False, scale=None):\n"
        "    return attention_overlap(q, k, v, causal, scale)",
    ),
    cheat(
        "best-sdpa",
        5,
        "test_hopper_attention",
        "PyTorch's own attention does the work",
        "def hopper_attention(q, k, v, causal=False, scale=None):\n"
        "    f = torch.nn.functional.scaled_dot_product_attention\n"
        "    return f(q, k, v, is_causal=causal), attention_persistent(q, k, v, causal, scale)[1]",
    ),
    cheat(
        "best-kept",
        5,
        "test_hopper_attention_follows_its_input",
        "the result is kept between calls",
        "_KEPT = {}\n\n\n"
        "def hopper_attention(q, k, v, causal=False, scale=None):\n"
        "    key = q.data_ptr(), q.shape, causal, scale\n"
        "    if key not in _KEPT:\n"
        "        _KEPT[key] = attention_persistent(q, k, v, causal, scale)\n"
        "    return _KEPT[key]",
    ),
    waste(
        "list-backwards",
        5,
        "",
        "test_hopper_attention_walks_its_list",
        "a program walks its list from the end, the shortest tiles first",
        *[
            (
                f"tile = gl.load(schedule_ptr + start)\n        first = 0{comment}\n"
                "        for place in range(start, stop):\n"
                "            upcoming = gl.load(schedule_ptr + gl.minimum(place + 1, stop - 1))",
                f"tile = gl.load(schedule_ptr + stop - 1)\n        first = 0{comment}\n"
                "        for place in range(start, stop):\n"
                "            upcoming = gl.load(\n"
                "                schedule_ptr + gl.maximum(stop - 2 - (place - start), start)\n"
                "            )",
            )
            for comment in (
                "  # tiles of K, and of V, before this tile of Q: it says stage and phase",
                "",
            )
        ],
    ),
    waste(
        "list-ignored",
        5,
        "",
        "test_hopper_attention_walks_its_list",
        "tiles are taken in turn, whatever the schedule says (handout section 6)",
        (
            "            m = tile % n_m\n            head = tile // n_m\n            n_full,",
            "            tile = gl.program_id(0) + (place - start) * gl.num_programs(0)\n"
            "            m = tile % n_m\n            head = tile // n_m\n            n_full,",
        ),
        (
            "            m = tile % n_m\n            head = tile // n_m\n            first +=",
            "            tile = gl.program_id(0) + (place - start) * gl.num_programs(0)\n"
            "            m = tile % n_m\n            head = tile // n_m\n            first +=",
        ),
    ),
    waste(
        "store-waited-at-once",
        5,
        WRITE,
        "test_hopper_attention_computes_while_it_stores",
        "a tile's store is waited for before the next tile begins (handout section 6)",
        (
            "        async_store(out_desc, [b, h, row, 0], o_s)  # rows beyond T are dropped\n",
            "        async_store(out_desc, [b, h, row, 0], o_s)  # rows beyond T are dropped\n"
            "        tma.store_wait(pendings=0)\n",
        ),
    ),
    waste(
        "q-of-one-tile",
        5,
        "",
        "test_hopper_attention_copies_ahead",
        "the next Q starts when the last product with this one has ended (handout section 6)",
        ("_ring(q_desc, 2 * CONSUMERS, 1),", "_ring(q_desc, CONSUMERS, 1),"),
        ("turn * CONSUMERS + w, 2 * CONSUMERS)", "turn * CONSUMERS + w, CONSUMERS)"),
        (
            "turn * CONSUMERS + WG, ROWS, D, 2 * CONSUMERS)",
            "turn * CONSUMERS + WG, ROWS, D, CONSUMERS)",
        ),
        (
            "_give_back(q_ring, turn * CONSUMERS + WG, 2 * CONSUMERS)",
            "_give_back(q_ring, turn * CONSUMERS + WG, CONSUMERS)",
        ),
    ),
    waste(
        "fused-ignored",
        5,
        LAUNCH,
        "test_hopper_attention_fused_is_one_operation_a_score",
        "fused is not handed to the kernel",
        ("FUSED=bool(fused)", "FUSED=False"),
    ),
    waste(
        "best-never-takes-turns",
        5,
        LAUNCH,
        "test_hopper_attention_ping_pong",
        "ping_pong is not handed to the kernel",
        ("PING_PONG=bool(ping_pong)", "PING_PONG=False"),
    ),
    bug(
        "third-consumer-rows-of-second",
        5,
        PERSISTENT,
        "test_hopper_attention_configurations",
        "the third consumer is told that it is the second",
        ("PING_PONG, FUSED, 2,", "PING_PONG, FUSED, 1,"),
    ),
    waste(
        "three-consumers-tiles-of-two",
        5,
        LAUNCH,
        "test_hopper_attention_three_consumers",
        "the list of tiles is made for 128 rows, whatever the consumers",
        ("64 * consumers", "128"),
    ),
    bug(
        "three-consumers-at-128",
        5,
        LAUNCH,
        "test_hopper_attention_rejects",
        "three consumers are not refused at D = 128, where 160 registers are too few",
        ("(2, 3 if D == 64 else 2)", "(2, 3)"),
    ),
    waste(
        "third-consumer-spills",
        5,
        STEP,
        "test_hopper_attention_compiles",
        "with 160 registers P @ V is waited for behind the weights, which have no room "
        "(handout section 6)",
        ("if CONSUMERS == 3:", "if False:"),
        ("if CONSUMERS == 2:", "if True:"),
    ),
]

MUTANTS = STEP_1 + STEP_2 + STEP_3 + STEP_4 + STEP_5
