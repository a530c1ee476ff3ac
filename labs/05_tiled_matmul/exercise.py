"""Lab 05, your file: a matrix product on tensor cores, tile by tile.

Write the nine places marked TODO, in order; everything else is given. The handout, README.md
beside this file, leads through them. See where you stand with: pytest labs/05_tiled_matmul

Step 1 is PyTorch; steps 2 to 5 are a first Triton kernel and one that grows from it until it keeps
a card busy. C = A B with A (M, K), B (K, N), C (M, N). A tile of C is BLOCK_M x BLOCK_N, the sum of
products of a tile of A, BLOCK_M x BLOCK_K, and a tile of B, BLOCK_K x BLOCK_N.
"""

from __future__ import annotations

import functools

import torch

from labs._harness.checks import check_blocks, check_kernel_blocks, check_kernel_dtype
from labs._harness.runtime import check_launch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS: step 1 and the plain Python of steps 4 and 5 still run
    triton = None


def _check_product(a, b):
    for name, x in {"a": a, "b": b}.items():
        if x.dim() != 2 or x.numel() == 0:
            raise ValueError(f"{name} must be a matrix, not empty: got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point: got {x.dtype}")
    if a.shape[1] != b.shape[0]:
        shapes = f"a {tuple(a.shape)}, b {tuple(b.shape)}"
        raise ValueError(f"a must be (M, K) and b (K, N) with one K: got {shapes}")
    if a.dtype != b.dtype or a.device != b.device:
        places = f"a {a.dtype} on {a.device}, b {b.dtype} on {b.device}"
        raise ValueError(f"a and b must have one dtype and one device: got {places}")


# ---------------------------------------------------------------- step 1
def tiled_matmul(a, b, block_m=16, block_n=16, block_k=16):
    """Matrix product, one tile of C at a time, each a sum of products of small tiles.

    No tensor is made that is larger than C or than a tile.

    Args:
        a: (M, K) floating point, any strides.
        b: (K, N), dtype and device of a; any strides.
        block_m, block_n, block_k: rows and columns of a tile of C, and depth of one product; whole
            numbers from 1 up, which need not divide M, N and K.

    Returns:
        c: (M, N) in the dtype of a, accumulated in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or a block size below 1.
    """
    _check_product(a, b)
    check_blocks(block_m=block_m, block_n=block_n, block_k=block_k)
    # TODO step 1 (about 14 lines; handout section 2)
    #   c is made once, for all tiles; accumulate in float32, or float64 for float64 inputs
    #   for each tile of C, block_m rows and block_n columns: a sum that starts at zero
    #     for each block_k of the depth: add the product of a tile of a and a tile of b
    #     then store the sum into its part of c; the last tile of any loop may be short
    raise NotImplementedError("lab 05 step 1: write tiled_matmul")


# ---------------------------------------------------------------- step 2
if triton is not None:

    @triton.jit
    def _matmul_kernel(
        a_ptr,
        b_ptr,
        c_ptr,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        stride_cm,
        N,
        K,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        # TODO step 2 (about 16 lines; handout section 3): one program, one tile of C
        #   program_id(0) counts the tiles of C row by row; there are N // BLOCK_N in a row
        #   element (m, k) of a lies at m * stride_am + k * stride_ak, (k, n) of b likewise;
        #   (m, n) of c at m * stride_cm + n; whatever a stride multiplies is int64
        #   loop along K: load a tile of each, tl.dot into a float32 tile, move on; then store
        tl.static_assert(False, "lab 05 step 2: write _matmul_kernel")


def triton_matmul(a, b, block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=3):
    """Matrix product of sizes that the tiles divide, one program for each tile of C.

    Program pid makes tile (pid // tiles_n, pid % tiles_n): row by row.

    Args:
        a: (M, K) float16, bfloat16 or float32, any strides; float32 products may run in TF32 on a
            GPU.
        b: (K, N), dtype and device of a; any strides.
        block_m, block_n, block_k: powers of two from 16 up, which divide M, N and K.
        num_warps, num_stages: Triton's: warps of a program, and stages of its pipeline along K.

    Returns:
        c: (M, N) in the dtype of a, contiguous, accumulated in float32.

    Raises:
        ValueError: the above does not hold.
    """
    c = _new_product(a, b, block_m=block_m, block_n=block_n, block_k=block_k)
    (M, N), K = c.shape, a.shape[1]
    if M % block_m or N % block_n or K % block_k:
        tile = f"({block_m}, {block_n}, {block_k})"
        raise ValueError(f"(M, N, K) must be multiples of the tile {tile}: got ({M}, {N}, {K})")
    with torch.cuda.device_of(a):  # the current device may be another GPU
        _matmul_kernel[(M // block_m * (N // block_n),)](
            a,
            b,
            c,
            *a.stride(),
            *b.stride(),
            c.stride(0),
            N,
            K,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return c


def _new_product(a, b, **blocks):
    """Refuses what the kernels cannot take, and makes C, which holds nothing yet."""
    _check_product(a, b)
    check_kernel_dtype(a=a, b=b)
    check_kernel_blocks(**blocks)
    check_launch(a=a, b=b)
    return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)


# ---------------------------------------------------------------- step 3
if triton is not None:

    @triton.jit
    def _ragged_kernel(
        a_ptr,
        b_ptr,
        c_ptr,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        stride_cm,
        M,
        N,
        K,
        bucket_m,  # M, N and K rounded up: the autotuner's key (step 5), not used in here
        bucket_n,
        bucket_k,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        EVEN_K: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        pid = tl.program_id(0)
        tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
        if GROUP == 1:
            pid_m, pid_n = pid // tiles_n, pid % tiles_n
        else:
            pid_m, pid_n = _grouped_order(pid, tiles_m, tiles_n, GROUP)
        # TODO step 3 (about 22 lines; handout section 4): step 2's kernel, for any M, N and K
        #   rows past M and columns past N: mask them off, or let them wrap round to real ones
        #   past K: 0 in both tiles where EVEN_K is False; no mask along K where it is True
        #   the store is masked to what lies in C; whatever a stride multiplies is int64 (pid_m and
        #   pid_n are not)
        tl.static_assert(False, "lab 05 step 3: write _ragged_kernel")


def ragged_matmul(a, b, block_m=64, block_n=64, block_k=32, group=1, num_warps=4, num_stages=3):
    """Matrix product of any sizes, one program for each tile of C.

    Args:
        a, b, num_warps, num_stages: as triton_matmul.
        block_m, block_n, block_k: powers of two from 16 up, which need not divide M, N and K.
        group: rows of tiles of a band in grouped_order (step 4). 1 is row by row, without step 4.

    Returns:
        c: (M, N) in the dtype of a, contiguous, accumulated in float32.

    Raises:
        ValueError: the above does not hold.
    """
    c = _new_product(a, b, block_m=block_m, block_n=block_n, block_k=block_k)
    check_blocks(group=group)
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": group}
    even = a.shape[1] % block_k == 0
    return _launch_ragged(
        _ragged_kernel, a, b, c, even, **tile, num_warps=num_warps, num_stages=num_stages
    )


def _launch_ragged(kernel, a, b, c, even_k, **meta):
    (M, N), K = c.shape, a.shape[1]
    buckets = [triton.next_power_of_2(size) for size in (M, N, K)]

    def grid(tile):
        return (triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"]),)

    strides = *a.stride(), *b.stride(), c.stride(0)
    with torch.cuda.device_of(a):
        kernel[grid](a, b, c, *strides, M, N, K, *buckets, EVEN_K=even_k, **meta)
    return c


# ---------------------------------------------------------------- step 4
def grouped_order(pid, tiles_m, tiles_n, group):
    """Which tile of C program `pid` makes, so that programs that run together share tiles.

    Bands of `group` rows of tiles, one below the other; the last may have fewer rows. Within a
    band, column by column from the left; within a column, from the top down.

    Args:
        pid: number of the program, from 0 to tiles_m * tiles_n - 1.
        tiles_m, tiles_n: rows and columns of tiles that C has, from 1 up.
        group: rows of a band, from 1 up. 1 is row by row; tiles_m or more is column by column.

    Returns:
        (pid_m, pid_n): row and column of the tile.

    Raises:
        ValueError: a count below 1.
    """
    check_blocks(tiles_m=tiles_m, tiles_n=tiles_n, group=group)
    # TODO step 4 (about 4 lines; handout section 5)
    #   which band, and which program within it; how many rows this band has; then the tile
    raise NotImplementedError("lab 05 step 4: write grouped_order")


def wave_tiles(tiles_m, tiles_n, group, programs, wave=0):
    """How many different tiles a wave of programs loads in one step along K, in grouped_order.

    A program in row m and column n of C loads one tile of A, which all programs of row m share,
    and one tile of B, which all programs of column n share.

    Args:
        tiles_m, tiles_n, group: as grouped_order.
        programs: how many run at once, from 1 up. Wave w is made of the programs from
            w * programs on; the last wave may have fewer.
        wave: w, from 0 up.

    Returns:
        (different tiles of A, different tiles of B).

    Raises:
        ValueError: a count below 1, or there is no such wave.
    """
    check_blocks(tiles_m=tiles_m, tiles_n=tiles_n, group=group, programs=programs)
    # TODO step 4 (about 5 lines; handout section 5)
    #   refuse a wave that does not exist; the tiles that its programs make; how many different
    #   rows and columns they lie in
    raise NotImplementedError("lab 05 step 4: write wave_tiles")


if triton is not None:

    @triton.jit
    def _grouped_order(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
        # TODO step 4 (about 4 lines; handout section 5): grouped_order once more, for a kernel
        tl.static_assert(False, "lab 05 step 4: write _grouped_order")

    @triton.jit
    def _order_kernel(order_ptr, tiles_m, tiles_n, GROUP: tl.constexpr):
        pid = tl.program_id(0)
        pid_m, pid_n = _grouped_order(pid, tiles_m, tiles_n, GROUP)
        tl.store(order_ptr + 2 * pid, pid_m)
        tl.store(order_ptr + 2 * pid + 1, pid_n)


def program_order(tiles_m, tiles_n, group, device="cpu"):
    """The order as the kernel has it: [(pid_m, pid_n) of program 0, of program 1, ...].

    Args:
        tiles_m, tiles_n, group: as grouped_order.
        device: where kernels run: "cpu" in the interpreter, else "cuda".

    Raises:
        ValueError: a count below 1, or kernels do not run there.
    """
    check_blocks(tiles_m=tiles_m, tiles_n=tiles_n, group=group)
    order = torch.empty(tiles_m * tiles_n, 2, dtype=torch.int32, device=device)
    check_launch(order=order)
    with torch.cuda.device_of(order):
        _order_kernel[(tiles_m * tiles_n,)](order, tiles_m, tiles_n, GROUP=group)
    return [tuple(tile) for tile in order.tolist()]


# ---------------------------------------------------------------- step 5
def shared_memory(block_m, block_n, block_k, num_stages, itemsize, major):
    """Bytes of shared memory that a program of _ragged_kernel takes: the tiles in flight.

    Where tensor cores read their operands from shared memory (compute capability 9 and 10, from
    64 rows up) it holds num_stages tiles of A and of B. Elsewhere the tile in use is in registers,
    and shared memory holds one tile of each fewer, but never less than one.

    Args:
        block_m, block_n, block_k: the tile.
        num_stages: Triton's, from 1 up.
        itemsize: bytes of an element.
        major: first number of the card's compute capability: 8, 9, 10 or 12.
    """
    # TODO step 5 (about 3 lines; handout section 6)
    #   how many tiles of A and of B there are at a time; how many bytes one of each has
    raise NotImplementedError("lab 05 step 5: write shared_memory")


def fitting_configs(configs, itemsize, major, limit):
    """Those of `configs` whose shared memory fits on a card, in the order given.

    Args:
        configs: list of triton.Config with BLOCK_M, BLOCK_N and BLOCK_K.
        itemsize, major: as shared_memory.
        limit: bytes of shared memory that a program may take there.

    Raises:
        ValueError: none fits; says the limit, and what the smallest needs.
    """
    # TODO step 5 (about 6 lines; handout section 6)
    #   what each configuration needs (config.kwargs["BLOCK_M"], ..., config.num_stages)
    raise NotImplementedError("lab 05 step 5: write fitting_configs")


def prune_for_card(configs, named_args, **kwargs):
    """early_config_prune of the autotuner: those that fit on the card that the inputs are on."""
    a = named_args["a_ptr"]
    card = torch.cuda.get_device_properties(a.device)
    limit = card.shared_memory_per_block_optin
    return fitting_configs(configs, a.element_size(), card.major, limit)


def _config(block_m, block_n, block_k, num_warps, num_stages):
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 8}
    return triton.Config(tile, num_warps=num_warps, num_stages=num_stages)


if triton is not None:
    CONFIGS = [
        _config(128, 256, 64, 8, 4),
        _config(128, 256, 64, 8, 3),
        _config(128, 128, 64, 8, 4),
        _config(128, 128, 64, 8, 3),
        _config(128, 128, 32, 4, 4),
        _config(128, 64, 64, 4, 4),
        _config(64, 128, 64, 4, 4),
        _config(64, 64, 64, 4, 4),
        _config(32, 128, 64, 4, 4),
        _config(16, 128, 64, 4, 4),
    ]
    INTERPRETED = _config(32, 32, 32, 4, 3)  # where there is nothing to time
DEEPEST = 64  # the largest BLOCK_K, which the others divide: even for it is even for all


@functools.cache
def autotuned_kernel():
    """_ragged_kernel under triton.autotune, made at first use: to import this file needs no GPU.

    Tries those of CONFIGS that prune_for_card leaves, anew for each (bucket_m, bucket_n, bucket_k):
    once for all sizes that round up to the same powers of two.
    """
    # TODO step 5 (about 5 lines; handout section 6)
    #   triton.autotune(...) called with the kernel: the configurations, the key, and how to prune
    raise NotImplementedError("lab 05 step 5: write autotuned_kernel")


def tuned_matmul(a, b, config=None):
    """Matrix product of any sizes with the tile that this card is fastest with.

    The first call of each size tries the configurations and keeps the best. In the CPU interpreter
    nothing is timed: there the tile is that of INTERPRETED.

    Args:
        a, b: as triton_matmul.
        config: a triton.Config such as one of CONFIGS, to use without trying any.

    Returns:
        c: (M, N) in the dtype of a, contiguous, accumulated in float32.

    Raises:
        ValueError: the above does not hold.
    """
    c = _new_product(a, b)
    if config is None and triton.knobs.runtime.interpret:
        config = INTERPRETED
    even = a.shape[1] % DEEPEST == 0
    if config is None:
        return _launch_ragged(autotuned_kernel(), a, b, c, even)
    warps = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return _launch_ragged(_ragged_kernel, a, b, c, even, **config.kwargs, **warps)
