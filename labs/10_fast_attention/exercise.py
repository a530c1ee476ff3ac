"""Lab 10, your file: from a first kernel to the vendor's speed, in plain Triton.

Write the places marked TODO, in order; everything else is given. The handout, README.md beside this
file, leads through them. See where you stand with: pytest labs/10_fast_attention

A ladder of six versions of one forward kernel, one idea a rung; rungs share helpers. Letters: B
batch, H heads, T query length, S key length, D head dim. `lse` is the natural logarithm of the sum
of exponentials of the scaled scores; m_i, the running maximum, is kept in units of log 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from labs._harness.checks import (
    MAX_GRID_YZ,
    check_head_dim,
    check_kernel_blocks,
    check_kernel_dtype,
    check_qkv,
)
from labs._harness.runtime import capability, check_launch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # macOS: steps 3, 4 and 6 have parts that run without
    triton = None

MAX_PROGRAMS = 2**31 - 1  # along grid axis 0


def _prepare(q, k, v, causal, scale, block_m, block_n):
    """Checks the arguments of a rung; gives what every kernel takes.

    Returns:
        (q, k, v, out, lse) contiguous, (slope, steep): the factor of the scores before exp2, and
        the power of two that takes its place where scores are huge; query tiles, B * H.
    """
    check_qkv(q, k, v, causal)
    check_kernel_dtype(q=q, k=k, v=v)
    B, H, T, D = q.shape
    check_head_dim(D)
    check_kernel_blocks(block_m=block_m, block_n=block_n)
    check_launch(q=q, k=k, v=v)
    if scale is None:
        scale = 1.0 / math.sqrt(D)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number: got {scale}")
    slope = scale * math.log2(math.e)
    tiles = triton.cdiv(T, block_m)
    if tiles * B * H > MAX_PROGRAMS:
        raise ValueError(f"at most {MAX_PROGRAMS:,} query tiles in all: got {tiles * B * H:,}")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    return (q, k, v, out, lse), (slope, 2.0 ** math.ceil(math.log2(slope))), tiles, B * H


def _check_grid(heads):
    if heads > MAX_GRID_YZ:
        raise ValueError(f"B * H must be at most {MAX_GRID_YZ:,} (grid axis 1): got {heads:,}")


if triton is not None:
    LN2 = tl.constexpr(math.log(2.0))
    # From here on neighbouring float32 scores are 32 and more apart: exp2 gives 1 or nothing.
    HUGE = tl.constexpr(2.0**28)

    @triton.jit
    def _pointers(ptr, start, D: tl.constexpr, BLOCK: tl.constexpr):
        """(BLOCK, D): where rows start to start + BLOCK - 1 of a contiguous (rows, D) lie."""
        tile = tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :]  # (BLOCK, D)
        return ptr + tl.cast(start, tl.int64) * D + tile  # (BLOCK, D)

    @triton.jit
    def _load(ptrs, start, rows, MASKED: tl.constexpr):
        """The tile at `ptrs`, which begins at row `start` of `rows`; 0 past the end if MASKED."""
        if MASKED:
            exists = start + tl.arange(0, ptrs.shape[0]) < rows  # (BLOCK,)
            tile = tl.load(ptrs, mask=exists[:, None], other=0.0)  # (BLOCK, D)
        else:
            tile = tl.load(ptrs)  # (BLOCK, D)
        return tile

    @triton.jit
    def _hide(s, start_n, offs_m, S, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
        """-inf for keys past S and, if CAUSAL, past the query's own: one comparison does both."""
        last = S - 1 - start_n  # the last key that a row sees, counted from the tile's first
        if CAUSAL:
            last = tl.minimum(offs_m, S - 1)[:, None] - start_n  # (BLOCK_M, 1)
        return tl.where(tl.arange(0, BLOCK_N)[None, :] <= last, s, float("-inf"))

    @triton.jit
    def _store(
        out_ptr,
        lse_ptr,
        acc,
        l_i,
        m_i,
        pid_m,
        T,
        slope,
        steep,
        D: tl.constexpr,
        SHIFT: tl.constexpr = 0,
    ):
        """Divides, and writes the rows of a query tile that exist: out, and lse in natural log."""
        BLOCK_M: tl.constexpr = acc.shape[0]
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        out_ptrs = _pointers(out_ptr, pid_m * BLOCK_M, D, BLOCK_M)  # (BLOCK_M, D)
        l_i = tl.sum(l_i, axis=1)  # (BLOCK_M,), its parts until here
        out = acc * (1.0 / l_i)[:, None]  # (BLOCK_M, D); a division is 10 instructions: one a row
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < T)
        unit = tl.where(tl.abs(m_i) < HUGE / 2**SHIFT, LN2, LN2 * slope / steep)  # (BLOCK_M,)
        tl.store(lse_ptr + offs_m, m_i * unit + tl.log(l_i) - SHIFT * LN2, mask=offs_m < T)


# ---------------------------------------------------------------- step 1
if triton is not None:

    @triton.jit
    def _sums(p, PARTS: tl.constexpr):
        """(BLOCK_M, PARTS): the sums of columns 0, PARTS, 2 PARTS, ..., of 1, PARTS + 1, and so on.

        One part is the sum of a row. Eight are for step 5.
        """
        if PARTS == 1:
            sums = tl.sum(p, axis=1)[:, None]  # (BLOCK_M, 1)
        else:
            columns = tl.reshape(p, (p.shape[0], p.shape[1] // PARTS, PARTS))
            sums = tl.sum(columns, axis=1)  # (BLOCK_M, PARTS)
        return sums

    @triton.jit
    def _weights(s, m_i, l_i, slope, steep, SHIFT: tl.constexpr = 0):
        """Folds one tile of raw scores into the running state.

        Args:
            s: (BLOCK_M, BLOCK_N), q k^T, not scaled; -inf where a query does not see the key.
            m_i: (BLOCK_M,), running maximum in units of log 2.
            l_i: (BLOCK_M, parts), running sum, in the parts that `_sums` gives; 1 until step 5.
            slope, steep: see `_prepare`; a number, or (BLOCK_M,).
            SHIFT: p, and with it l_i, is multiplied by 2**SHIFT: step 6; until then it is 0.

        Returns:
            p (BLOCK_M, BLOCK_N), alpha (BLOCK_M,), and the new l_i and m_i.
        """
        # TODO step 1 (about 8 lines; handout section 2). Leave SHIFT out: step 6 puts it in.
        #   the tile's row maximum, then m_new in units of log 2; from HUGE on the factor is
        #   `steep`, else `slope`
        #   alpha; p by one tl.fma and one exp2; l_i
        tl.static_assert(False, "lab 10 step 1: write _weights")

    @triton.jit
    def _exp2_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        T,
        S,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
    ):
        # TODO step 1 (about 24 lines; handout section 2)
        #   ids (the head's in int64), pointers, the query tile, the running state
        #   for each key tile that the query tile sees: load, scores, _hide, _weights, acc, advance
        #   _store
        tl.static_assert(False, "lab 10 step 1: write _exp2_kernel")


def attention_exp2(
    q, k, v, causal=False, scale=None, block_m=64, block_n=64, num_warps=4, num_stages=2
):
    """Attention with one fused multiply-add and one exp2 a score: the first rung.

    Method: Dao, "FlashAttention-2" (2023), section 3.1, with exp(x) as exp2(x log2(e)).

    Args:
        q: (B, H, T, D) float16, bfloat16 or float32 (float32 products run in TF32 on a GPU); D a
            power of two from 16 to 256; any T. Made contiguous if it is not.
        k, v: (B, H, S, D), dtype and device of q; any S.
        causal: query i sees keys 0 to i only; needs T == S.
        scale: of the scores, positive; None means 1 / sqrt(D).
        block_m, block_n: rows of a query tile and of a key tile; powers of two from 16 up.
        num_warps, num_stages: Triton's: warps of a program, and key tiles in flight.

    Returns:
        out: (B, H, T, D) in the dtype of q.
        lse: (B, H, T) float32, natural logarithm.

    Raises:
        ValueError: the above does not hold, or B * H is more than 65,535 (steps 1 and 2).
    """
    tensors, slopes, tiles, heads = _prepare(q, k, v, causal, scale, block_m, block_n)
    _check_grid(heads)
    with torch.cuda.device_of(q):  # the current device may be another GPU
        _exp2_kernel[(tiles, heads)](
            *tensors,
            q.shape[2],
            k.shape[2],
            *slopes,
            D=q.shape[3],
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            CAUSAL=causal,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return tensors[3:]


# ---------------------------------------------------------------- step 2
if triton is not None:

    @triton.jit
    def _keys(
        acc,
        l_i,
        m_i,
        q,
        k_ptr,
        v_ptr,
        offs_m,
        lo,
        hi,
        S,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
        MASKED: tl.constexpr,
    ):
        """Folds keys lo to hi - 1 into the state; without MASKED every row must see all of them."""
        # TODO step 2 (about 14 lines; handout section 3)
        #   the loop of step 1 from lo to hi; masks only if MASKED
        tl.static_assert(False, "lab 10 step 2: write _keys")

    @triton.jit
    def _ranges(pid_m, S, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
        """(full, hi): keys before `full` are whole tiles that every row sees, none from hi on."""
        # TODO step 2 (about 6 lines; handout section 3)
        #   hi: past the last key that any row sees; full: how many keys lie in whole tiles that
        #   every row sees, whatever BLOCK_M and BLOCK_N
        tl.static_assert(False, "lab 10 step 2: write _ranges")

    @triton.jit
    def _attend(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        pid_m,
        T,
        S,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
        LATE: tl.constexpr,
    ):
        """One query tile of one head, to whose first row the pointers point."""
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        q_ptrs = _pointers(q_ptr, pid_m * BLOCK_M, D, BLOCK_M)  # (BLOCK_M, D)
        q = _load(q_ptrs, pid_m * BLOCK_M, T, True)  # (BLOCK_M, D)
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M, 1), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        full, hi = _ranges(pid_m, S, BLOCK_M, BLOCK_N, CAUSAL)
        if LATE:
            # fmt: off
            acc, l_i, m_i = _late(acc, l_i, m_i, q, k_ptr, v_ptr, offs_m, full, hi, S, slope, steep,
                                  D, BLOCK_N, CAUSAL)
            # fmt: on
        else:
            # fmt: off
            acc, l_i, m_i = _keys(acc, l_i, m_i, q, k_ptr, v_ptr, offs_m, 0, full, S, slope, steep,
                                  D, BLOCK_N, CAUSAL, False)
            acc, l_i, m_i = _keys(acc, l_i, m_i, q, k_ptr, v_ptr, offs_m, full, hi, S, slope, steep,
                                  D, BLOCK_N, CAUSAL, True)
            # fmt: on
        _store(out_ptr, lse_ptr, acc, l_i, m_i, pid_m, T, slope, steep, D)

    @triton.jit
    def _two_loops_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        T,
        S,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
    ):
        bh = tl.program_id(1).to(tl.int64)
        q_ptr, out_ptr, lse_ptr = q_ptr + bh * T * D, out_ptr + bh * T * D, lse_ptr + bh * T
        k_ptr, v_ptr = k_ptr + bh * S * D, v_ptr + bh * S * D
        # fmt: off
        _attend(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tl.program_id(0), T, S, slope, steep,
                D, BLOCK_M, BLOCK_N, CAUSAL, False)
        # fmt: on


def attention_two_loops(
    q, k, v, causal=False, scale=None, block_m=64, block_n=64, num_warps=4, num_stages=2
):
    """Attention that masks only the tiles that need it: those on the diagonal and the ragged last.

    Method: Dao, "FlashAttention-2" (2023), section 3.1 ("causal masking").

    Args and returns: as `attention_exp2`.
    """
    tensors, slopes, tiles, heads = _prepare(q, k, v, causal, scale, block_m, block_n)
    _check_grid(heads)
    with torch.cuda.device_of(q):  # the current device may be another GPU
        _two_loops_kernel[(tiles, heads)](
            *tensors,
            q.shape[2],
            k.shape[2],
            *slopes,
            D=q.shape[3],
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            CAUSAL=causal,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return tensors[3:]


# ---------------------------------------------------------------- step 3
if triton is not None:

    @triton.jit
    def _tile_of_program(pid, tiles, heads, group, CAUSAL: tl.constexpr):
        """(head, query tile) of a program: see `program_order`, which is this for all programs."""
        # TODO step 3 (about 7 lines; handout section 4)
        #   the group of heads, its size (the last may be smaller), the place in it, head and tile
        tl.static_assert(False, "lab 10 step 3: write _tile_of_program")

    @triton.jit
    def _ordered_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        T,
        S,
        heads,
        group,
        bucket,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
        LATE: tl.constexpr,
    ):
        """`bucket`, T up to a power of two, is for the autotuner of step 4 only."""
        tiles = tl.cdiv(T, BLOCK_M)
        bh, pid_m = _tile_of_program(tl.program_id(0), tiles, heads, group, CAUSAL)
        bh = bh.to(tl.int64)
        q_ptr, out_ptr, lse_ptr = q_ptr + bh * T * D, out_ptr + bh * T * D, lse_ptr + bh * T
        k_ptr, v_ptr = k_ptr + bh * S * D, v_ptr + bh * S * D
        # fmt: off
        _attend(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, pid_m, T, S, slope, steep,
                D, BLOCK_M, BLOCK_N, CAUSAL, LATE)
        # fmt: on


def program_order(tiles, heads, group, causal) -> list[tuple[int, int]]:
    """The (head, query tile) of program 0, 1, ...: what `_tile_of_program` computes.

    Groups of heads come one after the other. Within a group, tiles from the last to the first if
    causal (the last sees most keys), else from the first on; of each the heads of the group in
    turn. With group=1 all tiles of a head are adjacent; with group=heads the longest of all come
    first.
    """
    # TODO step 3 (about 6 lines; handout section 4)
    #   the same for all programs, as three nested loops: groups, tiles, heads
    raise NotImplementedError("lab 10 step 3: write program_order")


def makespan(work, slots) -> float:
    """Time until all is done when `slots` workers each take the next piece as they become free.

    Args:
        work: duration of each piece, in the order in which they are handed out.
        slots: workers: programs that run at a time.
    """
    # TODO step 3 (about 5 lines; handout section 4)
    raise NotImplementedError("lab 10 step 3: write makespan")


def heads_per_group(S, D, itemsize, cache_bytes) -> int:
    """Heads of a group: 4, or as many as have their K and V in half of the L2 cache; 1 at least."""
    # TODO step 3 (1 line; handout section 4)
    raise NotImplementedError("lab 10 step 3: write heads_per_group")


def _cache_bytes(device) -> int:
    """Bytes of the card's L2 cache; 32 MiB where there is no card."""
    return (
        torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**25
    )


def _sizes(q, k, heads, group, causal):
    """T, S, heads, group, bucket: the whole-number arguments of `_ordered_kernel`."""
    T, D = q.shape[2:]
    S = k.shape[2]
    if group is None:
        group = 1  # all tiles are alike: head by head
        if causal:
            group = heads_per_group(S, D, q.element_size(), _cache_bytes(q.device))
    if type(group) is not int or group < 1:
        raise ValueError(f"group must be a whole number from 1 up: got {group!r}")
    return T, S, heads, min(group, heads), max(16, triton.next_power_of_2(T))


def attention_ordered(
    q,
    k,
    v,
    causal=False,
    scale=None,
    block_m=64,
    block_n=64,
    num_warps=4,
    num_stages=2,
    group=None,
):
    """Attention whose programs come in an order: the longest first, a group of heads at a time.

    Method: the scheduling of Shah et al., "FlashAttention-3" (2024), for causal masks: longest
    tiles first within groups of heads, here of few (`heads_per_group`).

    Args and returns: as `attention_exp2`, and
        group: heads in a group, from 1 up; None means `heads_per_group` when causal, else 1.

    There is one grid axis: any B * H.
    """
    tensors, slopes, tiles, heads = _prepare(q, k, v, causal, scale, block_m, block_n)
    sizes = _sizes(q, k, heads, group, causal)
    with torch.cuda.device_of(q):  # the current device may be another GPU
        _ordered_kernel[(tiles * heads,)](
            *tensors,
            *sizes,
            *slopes,
            D=q.shape[3],
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            CAUSAL=causal,
            LATE=False,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return tensors[3:]


# ---------------------------------------------------------------- step 4
if triton is not None:

    @triton.jit
    def _late_keys(
        acc,
        l_i,
        m_i,
        p,
        alpha,
        q,
        k_ptr,
        v_ptr,
        offs_m,
        lo,
        hi,
        S,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
        MASKED: tl.constexpr,
    ):
        """As `_keys`, but p and alpha of a tile meet its values one turn later.

        So nobody waits for that product while the next tile's softmax is computed.
        """
        # TODO step 4 (about 15 lines; handout section 5)
        #   as _keys, in another order: this tile's scores, the last tile's product, _weights;
        #   the values lag a tile behind the keys, and are always a whole tile
        tl.static_assert(False, "lab 10 step 4: write _late_keys")

    @triton.jit
    def _late(
        acc,
        l_i,
        m_i,
        q,
        k_ptr,
        v_ptr,
        offs_m,
        full,
        hi,
        S,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
    ):
        """Both loops, late: the first tile's scores come before them, the last product after."""
        k = _load(_pointers(k_ptr, 0, D, BLOCK_N), 0, S, True)  # (BLOCK_N, D)
        s = _hide(tl.dot(q, tl.trans(k)), 0, offs_m, S, BLOCK_N, CAUSAL)  # (BLOCK_M, BLOCK_N)
        p, alpha, l_i, m_i = _weights(s, m_i, l_i, slope, steep)
        # fmt: off
        acc, l_i, m_i, p, alpha = _late_keys(
            acc, l_i, m_i, p, alpha, q, k_ptr, v_ptr, offs_m, BLOCK_N, full, S, slope, steep,
            D, BLOCK_N, CAUSAL, False)
        acc, l_i, m_i, p, alpha = _late_keys(
            acc, l_i, m_i, p, alpha, q, k_ptr, v_ptr, offs_m, tl.maximum(full, BLOCK_N), hi, S,
            slope, steep, D, BLOCK_N, CAUSAL, True)
        # fmt: on
        last = (hi - 1) // BLOCK_N * BLOCK_N  # where the last tile begins
        v = _load(_pointers(v_ptr, last, D, BLOCK_N), last, S, True)  # (BLOCK_N, D)
        return tl.dot(p.to(v.dtype), v, acc * alpha[:, None]), l_i, m_i


class Config(NamedTuple):
    """How a kernel is cut and run: rows of the tiles, warps, tiles in flight, order of products."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    late: bool = False


CANDIDATES = [
    Config(128, 64, 8, 3, late=True),
    Config(128, 64, 8, 3),
    Config(128, 64, 8, 2),
    Config(128, 128, 8, 2),
    Config(128, 64, 4, 3),
    Config(64, 64, 4, 3, late=True),
    Config(64, 64, 4, 3),
    Config(64, 64, 4, 2, late=True),
    Config(128, 32, 8, 3),
    Config(128, 32, 8, 2, late=True),
    Config(64, 32, 8, 2),
]
DEFAULTS = {  # by kind of card and head dim; chosen among those that compile without spills
    "hopper": {
        64: Config(128, 64, 8, 3),
        128: Config(128, 64, 8, 3, late=True),
        256: Config(128, 32, 8, 2, late=True),
    },
    "others": {64: Config(128, 64, 8, 3), 128: Config(128, 32, 8, 3), 256: Config(64, 32, 8, 2)},
}

# Bytes of shared memory that a block may take, by compute capability.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}
# Of a multiprocessor: warps, blocks, and bytes of shared memory that it holds at a time.
MULTIPROCESSOR = {
    80: (64, 32, 167_936),
    86: (48, 16, 102_400),
    89: (48, 24, 102_400),
    90: (64, 32, 233_472),
    120: (48, 24, 102_400),
}


def shared_bytes(config, D, itemsize, arch) -> int:
    """Bytes of shared memory of `_ordered_kernel`, num_stages from 2 up; derived in the handout.

    Args:
        config: a Config. itemsize: bytes of an element. arch: 90 for sm_90.
    """
    # TODO step 4 (about 4 lines; handout section 5)
    #   which tiles lie in shared memory at a time, with wgmma (sm_90, from 64 rows up) and without
    raise NotImplementedError("lab 10 step 4: write shared_bytes")


def register_estimate(config, D) -> int:
    """Registers of a thread: its share of acc, of s, of p where it waits, and 64 for the rest.

    128x64 with 8 warps at D = 128: 64 + 32 + 64 = 160, and 192 late.
    """
    # TODO step 4 (about 2 lines; handout section 5)
    raise NotImplementedError("lab 10 step 4: write register_estimate")


def occupancy(registers, shared, num_warps, arch) -> int:
    """Programs that fit on a multiprocessor at a time: the least of four limits.

    Args:
        registers: a thread's; a warp gets them in pieces of 256. shared: bytes a program; the
            driver takes 1024 more. num_warps: of a program. arch: 90 for sm_90.
    """
    # TODO step 4 (about 3 lines; handout section 5)
    raise NotImplementedError("lab 10 step 4: write occupancy")


def fits(config, D, itemsize, arch) -> bool:
    """Whether a configuration is worth trying: it launches, and is not sure to spill."""
    # TODO step 4 (about 2 lines; handout section 5)
    raise NotImplementedError("lab 10 step 4: write fits")


def default_config(D, arch) -> Config:
    """What runs without tuning, by head dim and kind of card."""
    return DEFAULTS["hopper" if arch == 90 else "others"][
        64 if D <= 64 else 128 if D <= 128 else 256
    ]


def _arch(device) -> int:
    """The compute capability as a number, of a known card at most as new; 86 without a card."""
    if device.type != "cuda":
        return 86
    major, minor = torch.cuda.get_device_capability(device)
    return max(known for known in SHARED_LIMIT if known <= 10 * major + minor)


def prune(configs, named_args, **kwargs):
    """The autotuner's early_config_prune: of `configs` those that fit, or the default alone.

    Args:
        configs: list of triton.Config. named_args: the kernel's positional arguments by name, such
            as "q_ptr". kwargs: the others, "D" among them.
    """
    # TODO step 4 (about 4 lines; handout section 5)
    #   never empty: where nothing fits, the card's default
    raise NotImplementedError("lab 10 step 4: write prune")


def _config_of(c) -> Config:
    """A Config from Triton's."""
    kw = c.kwargs
    return Config(kw["BLOCK_M"], kw["BLOCK_N"], c.num_warps, c.num_stages, kw["LATE"])


def _triton_config(config):
    """Triton's configuration from ours."""
    kwargs = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "LATE": config.late}
    return triton.Config(kwargs, num_warps=config.num_warps, num_stages=config.num_stages)


def _quick_bench(call, quantiles):
    """Times one candidate: enough to rank, and a whole search stays under a minute."""
    return triton.testing.do_bench(call, warmup=10, rep=40, quantiles=quantiles)


if triton is not None:
    # The same program text as `_ordered_kernel`; the best configuration is looked for once a key.
    _tuned_kernel = triton.autotune(
        configs=[_triton_config(c) for c in CANDIDATES],
        key=["bucket", "D", "CAUSAL"],  # and, by itself, the dtype of every tensor
        prune_configs_by={"early_config_prune": prune},
        do_bench=_quick_bench,
    )(_ordered_kernel)


def attention_tuned(q, k, v, causal=False, scale=None, config=None, tune=True, group=None):
    """Attention with the configuration that is fastest on this card for these shapes.

    The first call for each (power of two above T, D, causal, dtype) tries the candidates that the
    card can launch; later calls reuse the winner. Kernels in the interpreter are never timed.

    Args:
        q, k, v, causal, scale, group: as `attention_ordered`.
        config: a Config to use; None chooses one.
        tune: whether to look for the best one; otherwise `default_config`.

    Returns:
        as `attention_exp2`.
    """
    if config is None and tune and not triton.knobs.runtime.interpret:
        m, kernel, extra = 16, _tuned_kernel, {}
    else:
        config = config or default_config(q.shape[-1], _arch(q.device))
        m, kernel = config.block_m, _ordered_kernel
        extra = {"BLOCK_M": m, "BLOCK_N": config.block_n, "LATE": config.late}
        extra |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    tensors, slopes, _, heads = _prepare(q, k, v, causal, scale, m, extra.get("BLOCK_N", 16))
    sizes = _sizes(q, k, heads, group, causal)
    T, D = q.shape[2:]
    with torch.cuda.device_of(q):  # the current device may be another GPU
        kernel[lambda meta: (triton.cdiv(T, meta["BLOCK_M"]) * heads,)](
            *tensors, *sizes, *slopes, D=D, CAUSAL=causal, **extra
        )
    return tensors[3:]


def best_config() -> Config | None:
    """The configuration that `attention_tuned` found or reused last; None before its first."""
    best = getattr(_tuned_kernel, "best_config", None)
    return _config_of(best) if best is not None else None


# ---------------------------------------------------------------- step 5
if triton is not None:

    @triton.jit
    def _fetch(
        desc,
        bh,
        row,
        column,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        ON_HOST: tl.constexpr,
    ):
        """(ROWS, COLUMNS): the tile at (row, column) of a head; what lies past its end is 0."""
        if ON_HOST:  # the descriptor is of all heads
            tile = desc.load([bh, row, column]).reshape(ROWS, COLUMNS)  # (ROWS, COLUMNS)
        else:  # of this one
            tile = desc.load([row, column])  # (ROWS, COLUMNS)
        return tile

    @triton.jit
    def _tma_keys(
        acc,
        l_i,
        m_i,
        q,
        k_desc,
        v_desc,
        bh,
        offs_m,
        full,
        hi,
        S,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
        MASKED: tl.constexpr,
        ON_HOST: tl.constexpr,
        WARP_SPECIALIZE: tl.constexpr,
    ):
        """Folds keys 0 to hi - 1 into the state; without MASKED every row must see all of them.

        With MASKED, tiles from `full` on are masked; all of them if WARP_SPECIALIZE or D > 128. One
        loop, so that tiles are asked for ahead up to the last.
        """
        # TODO step 5 (about 12 lines; handout section 6)
        #   as _keys, in a tl.range that takes WARP_SPECIALIZE; tiles come by _fetch; if MASKED,
        #   _hide, on a condition or without one
        tl.static_assert(False, "lab 10 step 5: write _tma_keys")

    @triton.jit
    def _tma_kernel(
        q_desc,
        k_desc,
        v_desc,
        out_ptr,
        lse_ptr,
        T,
        S,
        heads,
        group,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
        RAGGED: tl.constexpr,
        PARTS: tl.constexpr,
        ON_HOST: tl.constexpr,
        WARP_SPECIALIZE: tl.constexpr,
    ):
        """q_desc, k_desc, v_desc: descriptors of all heads if ON_HOST, otherwise pointers."""
        # TODO step 5 (about 22 lines; handout section 6)
        #   head and tile as in step 3; tiles come by _fetch, out and lse go by pointers
        #   not ON_HOST: descriptors of this head's rows, tl.make_tensor_descriptor(base, shape,
        #   strides, block)
        #   specialised: q has a row number of its own
        #   MASKED if any tile needs it: causal, or a ragged end
        tl.static_assert(False, "lab 10 step 5: write _tma_kernel")


def _descriptor(x, rows, columns):
    """Of x, contiguous (B, H, R, C): a tile is (1, rows, columns), of one head, up to 256 a side.

    What lies past the end of a head is 0, and not the next head's. Made on the host, once a launch.
    """
    B, H, R, C = x.shape
    return TensorDescriptor(x, [B * H, R, C], [R * C, C, 1], [1, rows, columns])


def _has_copy_engine(device) -> bool:
    """Whether descriptors are what the card itself loads by; otherwise Triton makes pointers.

    It makes good ones only of descriptors made in the kernel: there it sees that the last stride
    is 1.
    """
    return capability(device)[0] >= 9


def attention_tma(
    q,
    k,
    v,
    causal=False,
    scale=None,
    block_m=128,
    block_n=128,
    num_warps=4,
    num_stages=2,
    group=None,
    warp_specialize=None,
):
    """Attention whose tiles are fetched by tensor descriptors, by a warp of its own where it can.

    Args and returns: as `attention_ordered`, half dtypes only, block sizes up to 256, and
        warp_specialize: let Triton give loads and products to different warps; needs compute
            capability 9, num_warps=4 and block_m=128. None: where the three hold. Triton's
            compiler has no other form of it that works: see the handout.

    Raises:
        ValueError: the above does not hold.
    """
    tensors, slopes, tiles, heads = _prepare(q, k, v, causal, scale, block_m, block_n)
    if q.dtype == torch.float32 or max(block_m, block_n) > 256:
        got = f"{q.dtype}, {block_m} x {block_n}"
        raise ValueError(f"descriptors here take half dtypes and tiles up to 256 rows: got {got}")
    can = (num_warps, block_m) == (4, 128) and (_arch(q.device) == 90 or q.device.type == "cpu")
    if warp_specialize and not can:
        got = f"num_warps={num_warps}, block_m={block_m}, sm_{_arch(q.device)}"
        raise ValueError(f"warp_specialize needs num_warps=4, block_m=128 and sm_90: got {got}")
    specialised = can if warp_specialize is None else warp_specialize
    on_host = _has_copy_engine(q.device) and not specialised
    hopper = capability(q.device)[0] == 9  # whose products leave a warp whole rows
    T, S, heads, group, _ = _sizes(q, k, heads, group, causal)
    D, sources = q.shape[3], tensors[:3]
    with torch.cuda.device_of(q):  # the current device may be another GPU
        if on_host:
            blocks = block_m, block_n, block_n
            sources = [_descriptor(x, n, D) for x, n in zip(sources, blocks, strict=True)]
        else:
            # Descriptors are built on the device, in memory that Triton asks the caller for.
            device = q.device
            triton.set_allocator(lambda n, *_: torch.empty(n, dtype=torch.int8, device=device))
        _tma_kernel[(tiles * heads,)](
            *sources,
            *tensors[3:],
            *(T, S, heads, group),
            *slopes,
            D=D,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            CAUSAL=causal,
            RAGGED=S % block_n != 0,
            PARTS=8 if hopper and not specialised else 1,
            ON_HOST=on_host,
            WARP_SPECIALIZE=specialised,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return tensors[3:]


# ---------------------------------------------------------------- step 6
E4M3_MAX = 448.0  # the largest number of float8_e4m3fn: 1.75 times 2**8

if triton is not None:
    TOP = tl.constexpr(E4M3_MAX)

    @triton.jit
    def _in_lanes(x):
        """(R, N): of each 16 columns 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, in this order.

        Of a product's result a lane holds two pairs of these columns, of an e4m3 operand it must
        hold four in a row. Here its pairs are in a row: columns get other places, nothing moves.
        """
        # TODO step 6 (about 4 lines; handout section 7)
        #   a column's number is 16 h + 8 pair + 2 lane + e: swap pair and lane, by a reshape, a
        #   permute and a reshape
        tl.static_assert(False, "lab 10 step 6: write _in_lanes")

    @triton.jit
    def _quantise_kernel(
        x_ptr,
        y_ptr,
        scale_ptr,
        stride_xn,
        stride_xr,
        stride_xc,
        rows,
        cols,
        padded,
        BLOCK_R: tl.constexpr,
        BLOCK_C: tl.constexpr,
        IN_LANES: tl.constexpr,
    ):
        """Rows of x[n] to e4m3, each with a scale of its own; columns past `cols` become 0.

        IN_LANES: columns are written in the order of `_in_lanes`.
        """
        # TODO step 6 (about 22 lines; handout section 7)
        #   a first pass over the columns for each row's largest, a second that divides and stores
        #   mind: a scale of 0; 448 times 1 + eps; columns that pad; IN_LANES, the column to load
        #   from is not the one to store in; int64 for what meets a stride: head, row, column
        tl.static_assert(False, "lab 10 step 6: write _quantise_kernel")

    @triton.jit
    def _fp8_keys(
        acc,
        l_i,
        m_i,
        q,
        k_desc,
        v_desc,
        k_scale_ptr,
        bh,
        offs_m,
        lo,
        hi,
        S,
        slope,
        steep,
        D: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
        MASKED: tl.constexpr,
        SHIFT: tl.constexpr,
        ON_HOST: tl.constexpr,
    ):
        """As `_tma_keys`, for quantised k; with SHIFT > 0 v is e4m3, too, and so is p."""
        # TODO step 6 (about 20 lines; handout section 7)
        #   first SHIFT in `_weights` (step 1): the limit is HUGE / 2**SHIFT, and p is times
        #   2**SHIFT for free, in the fma's addend, but not where |m_new| is HUGE / 2 and more
        #   then as _tma_keys; scores times the keys' scales (k_scale_ptr: this head's first);
        #   _weights with SHIFT; if SHIFT, v from its (D, BLOCK_N) tile, and p rounded and then in
        #   the order of v's tokens
        tl.static_assert(False, "lab 10 step 6: write _fp8_keys")

    @triton.jit
    def _fp8_kernel(
        q_ptr,
        k_desc,
        v_desc,
        q_scale_ptr,
        k_scale_ptr,
        v_scale_ptr,
        out_ptr,
        lse_ptr,
        T,
        S,
        heads,
        group,
        slope,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
        SHIFT: tl.constexpr,
        ON_HOST: tl.constexpr,
    ):
        """k_desc, v_desc: descriptors of all heads if ON_HOST, otherwise pointers."""
        # TODO step 6 (about 32 lines; handout section 7)
        #   head and tile as in step 3; q by pointers; not ON_HOST: descriptors of this head, made
        #   here; the queries' scales go into slope, the values' into acc at the end
        tl.static_assert(False, "lab 10 step 6: write _fp8_kernel")


class Quantised(NamedTuple):
    """A tensor in float8_e4m3fn and its float32 scales: x is about values * scales.

    Tokens of q and k: values (B, H, T, D), scales (B, H, T). Channels of v: values (B, H, D, S'),
    transposed, S' being S up to a multiple of 16 (0 past S), scales (B, H, D); of each 16 tokens
    0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, in this order: see `_in_lanes`.
    """

    values: torch.Tensor
    scales: torch.Tensor


def quantise(x, per="token") -> Quantised:
    """To e4m3, a scale for each token or for each channel, chosen so that the largest is 448.

    Args:
        x: (B, H, T, D) float16, bfloat16 or float32, any strides.
        per: "token" for q and k; "channel" for v, which is transposed, its tokens in the order
            that `Quantised` tells.

    Raises:
        ValueError: the above does not hold.
    """
    if x.dim() != 4 or x.numel() == 0 or per not in ("token", "channel"):
        got = f"{tuple(x.shape)}, per={per!r}"
        raise ValueError(f'wanted (B, H, T, D), not empty, per "token" or "channel": got {got}')
    check_kernel_dtype(x=x)
    check_launch(x=x)
    B, H = x.shape[:2]
    if per == "channel":
        x = x.transpose(2, 3)
    x = x.flatten(0, 1)  # a view where strides allow
    heads, rows, cols = x.shape
    padded = cols if per == "token" else triton.cdiv(cols, 16) * 16
    values = torch.empty(B, H, rows, padded, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(B, H, rows, dtype=torch.float32, device=x.device)
    block_r, block_c = (32, triton.next_power_of_2(cols)) if per == "token" else (16, 256)
    if triton.cdiv(rows, block_r) > MAX_GRID_YZ or heads > MAX_PROGRAMS:
        raise ValueError(f"at most {MAX_GRID_YZ * block_r:,} rows a head: got {rows:,}")
    with torch.cuda.device_of(x):  # the current device may be another GPU
        _quantise_kernel[(heads, triton.cdiv(rows, block_r))](
            *(x, values, scales, *x.stride(), rows, cols, padded),
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            IN_LANES=per == "channel",
        )
    return Quantised(values, scales)


def attend_fp8(
    q,
    k,
    v,
    causal=False,
    scale=None,
    block_m=64,
    block_n=128,
    num_warps=4,
    num_stages=3,
    group=None,
    out_dtype=torch.bfloat16,
):
    """Attention of quantised tensors.

    Method: Shah et al., "FlashAttention-3" (2024), section 3.3, with a scale for each token in the
    place of one for each block.

    Args:
        q, k: Quantised per token, (B, H, T, D) and (B, H, S, D).
        v: Quantised per channel; or a (B, H, S, D) tensor in `out_dtype`: then only the scores are
            computed in e4m3.
        out_dtype: of the result.
        others as `attention_ordered`; block_n from 32 to 256. The tile is Hopper's: smaller ones
            elsewhere.

    Returns:
        out (B, H, T, D) in out_dtype, lse (B, H, T) float32.

    Raises:
        ValueError: the above does not hold, or the card has no e4m3: below compute capability 8.9.
    """
    B, H, T, D = q.values.shape
    S = k.values.shape[2]
    device = q.values.device
    if device.type == "cuda":
        check_e4m3(_arch(device))
    if causal and T != S:
        raise ValueError(f"causal needs as many keys as queries: got T={T}, S={S}")
    check_kernel_blocks(block_m=block_m, block_n=block_n)
    if not 32 <= block_n <= 256:
        raise ValueError(f"32 to 256 keys a tile, for e4m3 and a descriptor: got block_n={block_n}")
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number: got {scale}")
    if isinstance(v, Quantised):
        values, v_scales, shift, v_tile = v.values, v.scales, 8, (D, block_n)
    else:
        values, v_tile = v.contiguous(), (block_n, D)
        v_scales, shift = k.scales, 0  # its scales are not looked at
    sources, on_host = (k.values, values), _has_copy_engine(device)
    if on_host:
        sources = _descriptor(k.values, block_n, D), _descriptor(values, *v_tile)
    out = torch.empty(B, H, T, D, dtype=out_dtype, device=device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=device)
    with torch.cuda.device_of(q.values):  # the current device may be another GPU
        _fp8_kernel[(triton.cdiv(T, block_m) * B * H,)](
            *(q.values, *sources, q.scales, k.scales, v_scales, out, lse),
            *_sizes(q.values, k.values, B * H, group, causal)[:4],
            scale * math.log2(math.e),
            D=D,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            CAUSAL=causal,
            SHIFT=shift,
            ON_HOST=on_host,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return out, lse


def attention_fp8(q, k, v, causal=False, scale=None, values=True, **config):
    """Attention with q and k, and with `values` v and p, in e4m3: quantises, then `attend_fp8`.

    Args:
        q, k, v, causal, scale: as `attention_exp2`; D from 32 up.
        values: whether v is quantised, too.
        config: block sizes and so on of `attend_fp8`.

    Returns:
        as `attention_exp2`.
    """
    check_qkv(q, k, v, causal)
    check_kernel_dtype(q=q, k=k, v=v)
    check_head_dim(q.shape[-1])
    if q.shape[-1] < 32:
        raise ValueError(f"e4m3 products take 32 channels at a time: got D={q.shape[-1]}")
    check_launch(q=q, k=k, v=v)
    v = quantise(v, "channel") if values else v
    return attend_fp8(quantise(q), quantise(k), v, causal, scale, out_dtype=q.dtype, **config)


def check_e4m3(arch) -> None:
    """Raises ValueError for a card (86 for sm_86) whose tensor cores do not take e4m3."""
    if arch < 89:
        raise ValueError(f"e4m3 products need compute capability 8.9: got sm_{arch}")


def rmse(got, want) -> float:
    """Root of the mean squared difference, in float64: how far off a result is on the whole."""
    return (got.double() - want.double()).square().mean().sqrt().item()


def with_outliers(x, size=32.0):
    """x with its first channel `size` times as large, as keys of language models have some."""
    x = x.clone()
    x[..., 0] *= size
    return x
