"""Lab 11, your file: warp specialization on Hopper, in Gluon.

Write the 23 places marked TODO, in order; everything else is given. The handout, README.md beside
this file, leads through them. See where you stand with: pytest labs/11_warp_specialization

Steps 1 and 2 are one tile through TMA and one through wgmma. Step 3 puts them together: a producer
warp that copies, two warpgroups that compute, a ring of buffers between them. Step 4 overlaps the
products with the softmax, and takes any length and the causal mask. Step 5 stays on its
multiprocessor and goes from tile to tile.
Letters: B batch, H heads, T length, D head dim; a consumer is a warpgroup with ROWS rows of Q.
"""

from __future__ import annotations

import functools
import heapq  # noqa: F401 (for step 5)
import itertools
import math
from typing import NamedTuple

import torch

from labs._harness import triton_private
from labs._harness.checks import check_qkv
from labs._harness.gluon_emulator import check_launch, multiprocessors, unavailable

if unavailable() is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,  # noqa: F401 (for step 2)
        warpgroup_mma_wait,  # noqa: F401 (for step 2)
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    async_load, async_store = triton_private.tma_copies()
    ROWS = gl.constexpr(64)  # of a warpgroup's product: wgmma has no other height
    LOG2_E = gl.constexpr(math.log2(math.e))
    SLACK = gl.constexpr(8.0)  # how far, in powers of 2, weights may exceed 1 (step 4)
else:  # no Triton, or one whose Gluon has moved: nothing of this lab runs, the launchers say why
    gluon = None

HEAD_DIMS = (64, 128)
L2_BYTES = 8 << 20  # of keys and values: those of the heads that are computed together
ELEMENTS = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


# ---------------------------------------------------------------- given: layouts and descriptors
@functools.cache  # a launch should cost the host no more than it must
def _mma_layout(n):
    """Where a warpgroup's 128 threads hold a (64, n) product of wgmma."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@functools.cache
def _shared_layout(block, dtype):
    """How a tile lies in shared memory for TMA and wgmma: rows swizzled, 128 bytes at a time."""
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, ELEMENTS[dtype]))


def _descriptor(x, block):
    """What TMA needs to know of x: shape, strides, and the tile that one copy moves.

    Args:
        x: 16-bit, any rank up to 5, as _for_tma returns it.
        block: sides of a tile, powers of two; leading ones are left out.
    """
    block = [1] * (x.dim() - len(block)) + list(block)
    # The stride of an axis of length 1 means nothing, but TMA wants a multiple of 16 bytes.
    strides = [x.shape[-1] if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    strides[-1] = 1
    layout = _shared_layout(tuple(block), x.dtype)
    return TensorDescriptor(x, list(x.shape), strides, block, layout)


def _for_tma(x):
    """x itself where TMA can read it through its strides, else a contiguous copy.

    TMA wants adjacent elements in a row, and rows that begin at multiples of 16 bytes.
    """
    strides = [s for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    ready = (x.shape[-1] == 1 or x.stride(-1) == 1) and x.data_ptr() % 16 == 0
    if ready and all(s > 0 and s % 8 == 0 for s in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _check_half(**tensors):
    for name, x in tensors.items():
        if x.dtype not in ELEMENTS:
            raise ValueError(f"{name} must be float16 or bfloat16: got {x.dtype}")


# ---------------------------------------------------------------- step 1
if gluon is not None:
    # One compilation for all lengths: Triton would make one more for 1 and for multiples of 16.
    @gluon.jit(do_not_specialize=["n_tiles"])
    def _tma_copy_kernel(
        x_desc,
        out_desc,
        n_tiles,
        BLOCK_R: gl.constexpr,
        BLOCK_C: gl.constexpr,
    ):
        # TODO step 1 (about 14 lines; handout section 2)
        #   a tile of shared memory with the descriptor's layout; an mbarrier: init, then a fence
        #   for each tile down the strip: expect its bytes, load, wait with this round's parity;
        #   then store, and wait until the store has read the tile: the next load overwrites it
        gl.static_assert(False, "lab 11 step 1: write _tma_copy_kernel")


def tma_copy(x, block_r=64, block_c=64):
    """Copies a matrix through shared memory with TMA, one program for each strip of columns.

    Args:
        x: (R, C) float16 or bfloat16.
        block_r, block_c: rows and columns of a tile; powers of two from 8 and from 64 up.

    Returns:
        (R, C), a copy.

    Raises:
        ValueError: the above does not hold. RuntimeError: neither a Hopper card nor the emulator.
    """
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"x must be a matrix that is not empty: got shape {tuple(x.shape)}")
    _check_half(x=x)
    for name, size, least in (("block_r", block_r, 8), ("block_c", block_c, 64)):
        if not isinstance(size, int) or not least <= size <= 256 or size & (size - 1):
            raise ValueError(f"{name} must be a power of two from {least} to 256: got {size!r}")
    if x.shape[1] % 8:
        raise ValueError(f"rows must be a multiple of 16 bytes long: got {x.shape[1]} columns")
    check_launch(x=x)
    x = _for_tma(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    R, C = x.shape
    with torch.cuda.device_of(x):  # the current device may be another GPU
        _tma_copy_kernel[(-(-C // block_c),)](
            _descriptor(x, [block_r, block_c]),
            _descriptor(out, [block_r, block_c]),
            -(-R // block_r),
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            num_warps=4,
        )
    return out


# ---------------------------------------------------------------- step 2
if gluon is not None:

    @gluon.jit
    def _wgmma_kernel(
        q_desc,
        k_desc,
        v_desc,
        out_desc,
        scale,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        O_LAYOUT: gl.constexpr,
    ):
        # TODO step 2 (about 30 lines; handout section 3)
        #   q, k and v through one barrier, which may expect the bytes of several copies
        #   s = q @ k.T: both operands in shared memory, asynchronous, then waited on
        #   p = s * scale, rounded, with the layout of a left operand in registers; out = p @ v
        #   out goes back through q_s: mind that TMA sees only what was written before a fence
        gl.static_assert(False, "lab 11 step 2: write _wgmma_kernel")


def wgmma_products(q, k, v, scale=1.0):
    """(q @ k.T * scale) @ v on tensor cores, one program for each 64 rows of q.

    Args:
        q: (T, D) float16 or bfloat16, any T, D 64 or 128.
        k, v: (S, D), S 64 or 128, dtype and device of q.
        scale: of the first product, which is then rounded to the dtype of q.

    Returns:
        (T, D) in the dtype of q.

    Raises:
        ValueError: the above does not hold. RuntimeError: neither a Hopper card nor the emulator.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 2 or k.shape != v.shape or q.numel() == 0 or q.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"q must be (T, D), k and v (S, D), D 64 or 128: got {shapes}")
    if k.dim() != 2 or k.shape[0] not in (64, 128) or k.shape[1] != q.shape[1]:
        raise ValueError(f"k and v must be (S, D), S 64 or 128, D of q: got {shapes}")
    _check_half(q=q, k=k, v=v)
    check_launch(q=q, k=k, v=v)
    q, k, v = _for_tma(q), _for_tma(k), _for_tma(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    D, BLOCK_N = q.shape[1], k.shape[0]
    with torch.cuda.device_of(q):
        _wgmma_kernel[(-(-len(q) // 64),)](
            _descriptor(q, [64, D]),
            _descriptor(k, [BLOCK_N, D]),
            _descriptor(v, [BLOCK_N, D]),
            _descriptor(out, [64, D]),
            float(scale),
            D=D,
            BLOCK_N=BLOCK_N,
            S_LAYOUT=_mma_layout(BLOCK_N),
            O_LAYOUT=_mma_layout(D),
            num_warps=4,
        )
    return out


# ---------------------------------------------------------------- step 3
if gluon is not None:

    @gluon.jit
    def _ring(desc, STAGES: gl.constexpr, USERS: gl.constexpr):
        # TODO step 3 (about 9 lines; handout section 4)
        #   tiles [STAGES, 1, 1, rows, D], and two mbarriers a stage, [STAGES, 1] each
        #   who arrives at `full`, who at `empty`, and how often?
        #   returns (tiles, full, empty)
        gl.static_assert(False, "lab 11 step 3: write _ring")

    @gluon.jit
    def _place(i, STAGES: gl.constexpr):
        """(stage of tile i, how many tiles used that stage before)."""
        i = gl.to_tensor(i).to(gl.uint32)  # to divide signed numbers takes more instructions
        return (i % STAGES).to(gl.int32), (i // STAGES).to(gl.int32)

    @gluon.jit
    def _fill(desc, ring, b, h, row, i, STAGES: gl.constexpr):
        # TODO step 3, next part (about 5 lines)
        #   the producer's side of tile i: wait until its stage is empty, expect, load at b, h, row
        #   mind: the first round of a ring must pass, though nobody has given anything back
        gl.static_assert(False, "lab 11 step 3: write _fill")

    @gluon.jit
    def _view(ring, i, HEIGHT: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
        tiles, full, empty = ring
        stage, uses = _place(i, STAGES)
        return tiles.index(stage).reshape([HEIGHT, D])  # (HEIGHT, D)

    @gluon.jit
    def _take(ring, i, HEIGHT: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
        # TODO step 3, next part (about 3 lines)
        #   the consumer's side: wait until tile i is there; return it as a matrix (see _view)
        gl.static_assert(False, "lab 11 step 3: write _take")

    @gluon.jit
    def _give_back(ring, i, STAGES: gl.constexpr):
        # TODO step 3, next part (about 2 lines)
        #   one arrival: this consumer will not read tile i again
        gl.static_assert(False, "lab 11 step 3: write _give_back")

    @gluon.jit
    def _write(out_desc, lse_ptr, o_s, b, h, row, H, T, scale, acc, m_i, l_i, D: gl.constexpr):
        acc = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, acc.type.layout))[:, None]
        tma.store_wait(pendings=0)  # an earlier tile's store may still read o_s
        o_s.reshape([ROWS, D]).store(acc.to(o_s.dtype))
        fence_async_shared()
        async_store(out_desc, [b, h, row, 0], o_s)  # rows beyond T are dropped
        rows = row + gl.arange(0, ROWS, layout=m_i.type.layout)  # (ROWS,)
        lse_ptrs = lse_ptr + (b * H + h).to(gl.int64) * T + rows  # (ROWS,)
        gl.store(lse_ptrs, m_i * scale + gl.log(l_i), mask=rows < T)

    @gluon.jit
    def _produce_once(
        args,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
    ):
        # TODO step 3, next part (about 7 lines)
        #   64 rows of Q for each consumer, then K and V block by block
        gl.static_assert(False, "lab 11 step 3: write _produce_once")

    @gluon.jit
    def _consume_once(
        args,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        O_LAYOUT: gl.constexpr,
        WG: gl.constexpr,
    ):
        # TODO step 3, next part (about 35 lines)
        #   lab 06's recurrence on tiles that are taken and given back; each product is waited on
        #   m_i, l_i: SliceLayout(1, S_LAYOUT); acc: O_LAYOUT; a row vector changes layout before it
        #   meets acc. A tile may be given back only once the product that reads it has ended
        #   _write (given) stores the result
        gl.static_assert(False, "lab 11 step 3: write _consume_once")

    @gluon.jit(do_not_specialize=["H", "T"])
    def _attention_producer_consumer_kernel(
        q_desc,
        k_desc,
        v_desc,
        out_desc,
        lse_ptr,
        H,
        T,
        scale,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        STAGES: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        O_LAYOUT: gl.constexpr,
    ):
        # TODO step 3, next part (about 25 lines)
        #   program_id(0) is (b * H + h) * n_m + m; three rings, o_s for the output, a fence
        #   warp_specialize: two consumers of 4 warps, one producer of 1; registers for each
        gl.static_assert(False, "lab 11 step 3: write _attention_producer_consumer_kernel")


def _launch_options(q, block_n):
    """What all attention kernels are launched with, by name."""
    D = q.shape[-1]
    return {
        "D": D,
        "BLOCK_N": block_n,
        "S_LAYOUT": _mma_layout(block_n),
        "O_LAYOUT": _mma_layout(D),
        "num_warps": 4,
        "enable_fp_fusion": True,  # the default, which Triton 3.9 wants to be said
    }


def _check_attention(q, k, v, causal, scale):
    """Refuses what no kernel here can take; returns q, k, v for TMA, out, lse and the scale."""
    check_qkv(q, k, v, causal)
    _check_half(q=q, k=k, v=v)
    if k.shape != q.shape:
        raise ValueError(f"q, k, v must have one shape: got q {tuple(q.shape)}, k {tuple(k.shape)}")
    B, H, T, D = q.shape
    if D not in HEAD_DIMS:
        raise ValueError(f"head dim D must be 64 or 128: got {D}")
    scale = 1.0 / math.sqrt(D) if scale is None else float(scale)
    if not 2.0**-126 <= scale < math.inf:
        raise ValueError(f"scale must be a positive number that float32 holds: got {scale}")
    if B * H * -(-T // 64) >= 2**31:
        raise ValueError(f"B * H * T / 64 must be below 2**31: got B={B}, H={H}, T={T}")
    check_launch(q=q, k=k, v=v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    return _for_tma(q), _for_tma(k), _for_tma(v), out, lse, scale


def attention_producer_consumer(q, k, v, scale=None, stages=2):
    """Attention with a producer warp and two consumers, one program for each 128 rows of a head.

    Args:
        q, k, v: (B, H, T, D) of one shape; float16 or bfloat16; T a multiple of 128, D 64 or 128.
            Read where they lie if elements of a row are adjacent and rows begin at multiples of 16
            bytes, else copied first.
        scale: of the scores, above 0; None means 1 / sqrt(D).
        stages: tiles of K, and of V, in shared memory at a time, from 1 up.

    Returns:
        out: (B, H, T, D) in the dtype of q.
        lse: (B, H, T) float32.

    Raises:
        ValueError: the above does not hold. RuntimeError: neither a Hopper card nor the emulator.
    """
    q, k, v, out, lse, scale = _check_attention(q, k, v, False, scale)
    B, H, T, D = q.shape
    if T % 128:
        raise ValueError(f"T must be a multiple of 128 here: got {T}")
    with torch.cuda.device_of(q):
        _attention_producer_consumer_kernel[(T // 128 * B * H,)](
            _descriptor(q, [64, D]),
            _descriptor(k, [128, D]),
            _descriptor(v, [128, D]),
            _descriptor(out, [64, D]),
            lse,
            H,
            T,
            scale,
            STAGES=stages,
            **_launch_options(q, 128),
        )
    return out, lse


# ---------------------------------------------------------------- step 4
if gluon is not None:

    @gluon.jit
    def _pack(weights, DTYPE: gl.constexpr):
        """Pairs of neighbours, rounded to half precision, as 32-bit words: (ROWS, BLOCK_N / 2)."""
        if DTYPE == gl.bfloat16:
            CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"  # the first goes below
        else:
            CONVERT: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        first, second = gl.split(weights.reshape([ROWS, weights.shape[1] // 2, 2]))
        return gl.inline_asm_elementwise(CONVERT, "=r,r,r", [first, second], gl.int32, True, 1)

    @gluon.jit
    def _unpack(p, DTYPE: gl.constexpr, acc):
        """_pack's words as the left operand of a product that is added to acc: (ROWS, BLOCK_N)."""
        SPLIT: gl.constexpr = "mov.b32 {$0, $1}, $2;"
        halves = gl.inline_asm_elementwise(SPLIT, "=h,=h,r", [p], (gl.int16, gl.int16), True, 1)
        pairs = gl.join(halves[0], halves[1])  # (ROWS, BLOCK_N / 2, 2)
        bits = pairs.reshape([ROWS, p.shape[1] * 2])  # (ROWS, BLOCK_N)
        P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, parent=acc.type.layout, k_width=2)
        return gl.convert_layout(bits.to(DTYPE, bitcast=True), P_LAYOUT)

    @gluon.jit
    def _rescale(acc, alpha):
        """acc times alpha; a row whose factor is 1 is left alone: (ROWS, D)."""
        # A multiplication that is switched off takes its turn, and no power.
        TIMES: gl.constexpr = (
            "{ .reg .pred p; setp.neu.f32 p, $2, 0f3F800000; mov.f32 $0, $1; "
            "@p mul.f32 $0, $1, $2; }"
        )
        factors = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]  # (ROWS, 1)
        return gl.inline_asm_elementwise(TIMES, "=f,f,f", [acc, factors], gl.float32, True, 1)

    @gluon.jit
    def _parts(weights):
        """Sums of each row in four parts, one for each lane that holds some of it: (ROWS, 4)."""
        return gl.sum(gl.sum(weights.reshape([ROWS, weights.shape[1] // 8, 4, 2]), 3), 1)

    @gluon.jit
    def _bounds(m, T, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
        # TODO step 4 (about 7 lines; handout section 5)
        #   (key blocks that need no mask, key blocks to visit) of query tile m
        gl.static_assert(False, "lab 11 step 4: write _bounds")

    @gluon.jit
    def _mask(s, rows, start_n, T, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
        """-inf where a row does not see a key of the block that begins at start_n: (ROWS, BLOCK_N).

        A column is 8 i + 2 j + k, j between the lanes of a row, i and k between the registers of a
        lane. With j on the other side a lane compares constants: no register for each column.
        """
        parts = s.reshape([ROWS, BLOCK_N // 8, 4, 2])  # (ROWS, BLOCK_N / 8, 4, 2)
        LAYOUT: gl.constexpr = parts.type.layout
        ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
        I_LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
        J_LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
        K_LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        i = gl.arange(0, BLOCK_N // 8, layout=I_LAYOUT)[None, :, None, None]
        j = gl.arange(0, 4, layout=J_LAYOUT)[None, None, :, None]
        k = gl.arange(0, 2, layout=K_LAYOUT)[None, None, None, :]
        if CAUSAL:  # rows that exist see no key beyond T then
            last = rows - start_n  # (ROWS,)
        else:
            # rows >> 31 is 0, which the compiler does not know: otherwise it compares once, and
            # keeps the answers for block 0 of all tiles in two dozen registers.
            last = T - 1 - start_n + (rows >> 31)  # (ROWS,)
        last = gl.convert_layout(last, ROW)[:, None, None, None]
        parts = gl.where(8 * i + k <= last - 2 * j, parts, float("-inf"))
        return gl.convert_layout(parts.reshape([ROWS, BLOCK_N]), s.type.layout)

    @gluon.jit
    def _maximum(s, m_i, scales):
        """The maximum with this block, and what sums so far are multiplied by: (ROWS,) each.

        While no weight exceeds 2**SLACK an older maximum does as well, and the factor is 1.
        """
        # TODO step 4, next part (about 3 lines)
        #   neither s nor m_i is scaled yet; scales[0] = scale * log2(e)
        #   before block 0 m_i is -inf, which no slack may keep
        gl.static_assert(False, "lab 11 step 4: write _maximum")

    @gluon.jit
    def _weights(s, m_i, l_i, alpha, scales, FUSED: gl.constexpr):
        """exp2((s - m_i) * scales[0]): (ROWS, BLOCK_N); and l_i with their sums: (ROWS, 4).

        m_i is what _maximum chose for this block.
        """
        # TODO step 4, next part (about 8 lines)
        #   l_i is (ROWS, 4), as _parts (given) gives it: alpha changes layout to meet it
        #   scales = (scale * log2(e), the power of two below it); FUSED may wait for step 5
        gl.static_assert(False, "lab 11 step 4: write _weights")

    @gluon.jit
    def _begin_turn(order, i, WG: gl.constexpr, PING_PONG: gl.constexpr):
        # TODO step 4, next part (about 2 lines)
        #   consumer WG waits for its i-th turn; consumer 0 has the first
        gl.static_assert(False, "lab 11 step 4: write _begin_turn")

    @gluon.jit
    def _end_turn(order, WG: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr):
        # TODO step 4, next part (about 2 lines)
        #   the next consumer may start its products; after the last one it is consumer 0 again
        gl.static_assert(False, "lab 11 step 4: write _end_turn")

    @gluon.jit
    def _collect(
        acc, alpha, v_ring, i, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
    ):
        """Waits for P @ V of block i - 1, gives its V back and rescales: (ROWS, D)."""
        # TODO step 4, next part (about 4 lines)
        #   wait for V of block i *before* the wait for the product: the handout says why
        #   acc is rescaled by _rescale (given)
        gl.static_assert(False, "lab 11 step 4: write _collect")

    @gluon.jit
    def _step(
        q,
        p,
        acc,
        m_i,
        l_i,
        k_ring,
        v_ring,
        order,
        rows,
        i,
        start_n,
        T,
        scales,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        CAUSAL: gl.constexpr,
        MASKED: gl.constexpr,
        PING_PONG: gl.constexpr,
        FUSED: gl.constexpr,
        WG: gl.constexpr,
    ):
        # TODO step 4, next part (about 20 lines)
        #   i counts tiles of K from the program's start, and turns; start_n is the first key
        #   start Q @ K of block i and P @ V of block i - 1; wait for the first, then _maximum,
        #   _weights, _collect; with three consumers (step 5) _collect before _weights
        #   turn the weights into the next step's p: p goes from step to step packed (see _pack
        #   and _unpack, given; their DTYPE is that of v)
        #   returns the next p, acc, m_i and l_i
        gl.static_assert(False, "lab 11 step 4: write _step")

    @gluon.jit
    def _produce_tile(
        args,
        b,
        h,
        m,
        turn,
        first,
        n_blocks,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
    ):
        # TODO step 4, next part (about 12 lines)
        #   as in step 3, in the order of use: K one block ahead of V
        #   Q's ring has 2 * CONSUMERS stages (see _shared): this tile's and the next one's
        #   tile i of a ring is counted from the program's start: `first` K and V came before, and
        #   `turn` tiles of Q: consumer w's Q is tile turn * CONSUMERS + w of its ring
        gl.static_assert(False, "lab 11 step 4: write _produce_tile")

    @gluon.jit
    def _consume_tile(
        args,
        b,
        h,
        m,
        turn,
        first,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        O_LAYOUT: gl.constexpr,
        CAUSAL: gl.constexpr,
        PING_PONG: gl.constexpr,
        FUSED: gl.constexpr,
        WG: gl.constexpr,
    ):
        # TODO step 4, next part (about 45 lines)
        #   l_i begins as _parts of zeros. Block 0 alone; a loop without mask, a loop with it;
        #   the last P @ V; the four parts of l_i added up, in the layout of m_i; _write
        #   Q is given back when its last product has ended; returns the number of blocks
        gl.static_assert(False, "lab 11 step 4: write _consume_tile")

    @gluon.jit
    def _shared(q_desc, k_desc, v_desc, out_desc, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
        rings = (
            _ring(q_desc, 2 * CONSUMERS, 1),  # this tile's, and the next one's
            _ring(k_desc, STAGES, CONSUMERS),
            _ring(v_desc, STAGES, CONSUMERS),
        )
        o_s = gl.allocate_shared_memory(
            out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout
        )  # (CONSUMERS, 1, 1, ROWS, D)
        order = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        for w in gl.static_range(CONSUMERS):
            mbarrier.init(order.index(w), count=1)
        fence_async_shared()
        return rings, o_s, order

    @gluon.jit
    def _produce_one(
        args,
        b,
        h,
        m,
        T,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
        CAUSAL: gl.constexpr,
    ):
        n_full, n_blocks = _bounds(m, T, CONSUMERS * ROWS, BLOCK_N, CAUSAL)
        _produce_tile(args, b, h, m, 0, 0, n_blocks, BLOCK_N, CONSUMERS, STAGES)

    @gluon.jit
    def _consume_one(
        args,
        b,
        h,
        m,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        O_LAYOUT: gl.constexpr,
        CAUSAL: gl.constexpr,
        PING_PONG: gl.constexpr,
        WG: gl.constexpr,
    ):
        _consume_tile(
            args, b, h, m, 0, 0,
            D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, False, WG,
        )  # fmt: skip
        tma.store_wait(pendings=0)

    @gluon.jit(do_not_specialize=["H", "T"])
    def _attention_overlap_kernel(
        q_desc,
        k_desc,
        v_desc,
        out_desc,
        lse_ptr,
        H,
        T,
        scale,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        STAGES: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        O_LAYOUT: gl.constexpr,
        CAUSAL: gl.constexpr,
        PING_PONG: gl.constexpr,
    ):
        # TODO step 4, next part (about 25 lines)
        #   as step 3; causal: the longest tiles of a head first; scales = (scale * LOG2_E, 0.0)
        #   the consumers' args hold what they and _bounds, _mask and _write need: rings, o_s,
        #   order, out_desc, lse_ptr, H, T, scale (for _write) and scales
        gl.static_assert(False, "lab 11 step 4: write _attention_overlap_kernel")


def attention_overlap(q, k, v, causal=False, scale=None, block_n=128, stages=2, ping_pong=True):
    """Attention with products and softmax overlapped, one program for each 128 rows of a head.

    Method: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2.

    Args:
        q, k, v: (B, H, T, D) of one shape; float16 or bfloat16; any T; D 64 or 128. Read where
            they lie if elements of a row are adjacent and rows begin at multiples of 16 bytes, else
            copied first.
        causal: query i sees keys 0 to i only.
        scale: of the scores, above 0; None means 1 / sqrt(D).
        block_n: keys of a tile, 64 or 128.
        stages: tiles of K, and of V, in shared memory at a time, from 2 up.
        ping_pong: whether the consumers take turns at starting their products.

    Returns:
        out: (B, H, T, D) in the dtype of q.
        lse: (B, H, T) float32, the natural logarithm.

    Raises:
        ValueError: the above does not hold. RuntimeError: neither a Hopper card nor the emulator.
    """
    q, k, v, out, lse, scale = _check_attention(q, k, v, causal, scale)
    _check_tiles(block_n, stages)
    B, H, T, D = q.shape
    with torch.cuda.device_of(q):
        _attention_overlap_kernel[(-(-T // 128) * B * H,)](
            _descriptor(q, [64, D]),
            _descriptor(k, [block_n, D]),
            _descriptor(v, [block_n, D]),
            _descriptor(out, [64, D]),
            lse,
            H,
            T,
            scale,
            STAGES=stages,
            CAUSAL=bool(causal),
            PING_PONG=bool(ping_pong),
            **_launch_options(q, block_n),
        )
    return out, lse


def _check_tiles(block_n, stages):
    if block_n not in (64, 128) or stages not in (2, 3, 4, 5, 6):
        got = f"block_n={block_n!r}, stages={stages!r}"
        raise ValueError(f"block_n must be 64 or 128, stages 2 to 6: got {got}")


# ---------------------------------------------------------------- step 5
class Config(NamedTuple):
    """How hopper_attention is launched.

    Attributes:
        block_n: keys of a tile, 64 or 128.
        stages: tiles of K, and of V, in shared memory at a time, from 2 up.
        ping_pong: whether the consumers take turns at starting their products.
        persistent: as many programs as multiprocessors, each with many tiles; else one for each.
        fused: one multiply-add for each score in place of a subtraction and a multiplication.
        consumers: groups of four warps with 64 rows each, 2 or 3; 3 at D = 64 only.
    """

    block_n: int = 128
    stages: int = 2
    ping_pong: bool = True
    persistent: bool = True
    fused: bool = False
    consumers: int = 2


def best_config(D, causal, T) -> Config:
    """The configuration that hopper_attention takes for these sizes."""
    # Measured on an H200 (torch 2.11, triton 3.6), `python -m labs bench 11 --tune`.
    if D == 64 and causal and T <= 512:  # much of short rows is diagonal: small tiles waste less
        return Config(64, 4, fused=True)
    if D == 64 and T >= (4096 if causal else 2048):  # 192 rows a tile: too many for short ones
        return Config(128, 3, ping_pong=False, fused=True, consumers=3)
    # Long rows keep the consumers out of step without being told.
    return Config(128, 4 if D == 64 else 2, ping_pong=T < 2048, fused=True)


def _programs(tiles, multiprocessors, causal):
    """How many programs compute a number of tiles: one for each multiprocessor, or fewer.

    Where all tiles are alike, 2048 of them take 132 multiprocessors 16 rounds, and 128 of them,
    too: then the last round is full, and what stays idle leaves its power to the others.
    """
    programs = min(tiles, multiprocessors)
    rounds = -(-tiles // programs)
    return programs if causal else -(-tiles // rounds)


def schedule(n_m, n_heads, programs, group, lengths):
    """Which program computes which tiles of Q, in which order.

    Tiles are handed out one by one, each to the program that will be free first.

    Args:
        n_m: tiles of a head; n_heads: B * H.
        programs: from 1 to n_m * n_heads; each gets a tile at least.
        group: heads whose keys and values stay in the cache together. The tiles of one group are
            handed out before those of the next; within it the longest first, one of each head in
            turn. Where all are alike, head by head.
        lengths: (n_m,) how long a tile m takes, in any unit; all alike where it is not causal.

    Returns:
        For each program a list of tiles, as head * n_m + m.
    """
    # TODO step 5 (about 12 lines; handout section 6)
    #   causal tiles differ in length: hand out the longest of a group of heads first, each to the
    #   program that will be free first (heapq); all alike: in turn
    raise NotImplementedError("lab 11 step 5: write schedule")


@functools.lru_cache(maxsize=256)
def _schedule_table(T, n_heads, programs, group, block_m, block_n, causal, device):
    """The schedule as the kernel reads it: where each program's tiles begin, then all tiles."""
    n_m = -(-T // block_m)
    ends = [min(T, (m + 1) * block_m) if causal else T for m in range(n_m)]
    lengths = [1.0 + -(-end // block_n) for end in ends]  # in blocks; 1 for beginning and end
    plan = schedule(n_m, n_heads, programs, group, lengths)
    starts = itertools.accumulate(map(len, plan), initial=programs + 1)
    return torch.tensor([*starts, *itertools.chain(*plan)], dtype=torch.int32, device=device)


if gluon is not None:

    @gluon.jit
    def _produce(
        args,
        schedule_ptr,
        H,
        T,
        n_m,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
        CAUSAL: gl.constexpr,
    ):
        # TODO step 5, next part (about 15 lines)
        #   schedule_ptr[pid] and schedule_ptr[pid + 1]: where this program's tiles begin and end;
        #   both are places in schedule_ptr; a tile is head * n_m + m
        #   `first` (tiles of K before), and how many tiles this program had, carry the phases on
        #   load the next tile's number early: it takes a while
        gl.static_assert(False, "lab 11 step 5: write _produce")

    @gluon.jit
    def _consume(
        args,
        schedule_ptr,
        H,
        n_m,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        O_LAYOUT: gl.constexpr,
        CAUSAL: gl.constexpr,
        PING_PONG: gl.constexpr,
        FUSED: gl.constexpr,
        WG: gl.constexpr,
    ):
        # TODO step 5, next part (about 15 lines)
        #   the same walk, with _consume_tile; at the end wait for the stores
        gl.static_assert(False, "lab 11 step 5: write _consume")

    @gluon.jit(do_not_specialize=["H", "T", "n_m"])
    def _attention_persistent_kernel(
        q_desc,
        k_desc,
        v_desc,
        out_desc,
        lse_ptr,
        schedule_ptr,
        H,
        T,
        n_m,
        scale,
        qk_step,
        D: gl.constexpr,
        BLOCK_N: gl.constexpr,
        STAGES: gl.constexpr,
        S_LAYOUT: gl.constexpr,
        O_LAYOUT: gl.constexpr,
        CAUSAL: gl.constexpr,
        PING_PONG: gl.constexpr,
        FUSED: gl.constexpr,
        CONSUMERS: gl.constexpr,
    ):
        # TODO step 5, next part (about 25 lines)
        #   _shared (given), then warp_specialize with two consumers of 240 registers; with three
        #   of 160 if CONSUMERS is 3
        gl.static_assert(False, "lab 11 step 5: write _attention_persistent_kernel")


def hopper_attention(q, k, v, causal=False, scale=None):
    """The fastest attention of this lab: warp-specialised, overlapped, persistent.

    Method: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2.

    Args:
        q, k, v: (B, H, T, D) of one shape; float16 or bfloat16; any T; D 64 or 128. Read where
            they lie if elements of a row are adjacent and rows begin at multiples of 16 bytes, else
            copied first.
        causal: query i sees keys 0 to i only.
        scale: of the scores, above 0; None means 1 / sqrt(D).

    Returns:
        out: (B, H, T, D) in the dtype of q.
        lse: (B, H, T) float32, the natural logarithm.

    Raises:
        ValueError: the above does not hold. RuntimeError: neither a Hopper card nor the emulator.
    """
    return attention_persistent(q, k, v, causal, scale)


def attention_persistent(q, k, v, causal=False, scale=None, config=None):
    """hopper_attention in a given configuration; None means best_config's.

    Args, Returns, Raises: as hopper_attention.
    """
    q, k, v, out, lse, scale = _check_attention(q, k, v, causal, scale)
    B, H, T, D = q.shape
    config = best_config(D, causal, T) if config is None else config
    block_n, stages, ping_pong, persistent, fused, consumers = config
    _check_tiles(block_n, stages)
    if consumers not in (2, 3 if D == 64 else 2):
        raise ValueError(f"consumers must be 2, or 3 at D = 64: got {consumers!r} at D = {D}")
    causal, block_m = bool(causal), 64 * consumers
    n_m = -(-T // block_m)
    programs = n_m * B * H
    if persistent:
        programs = _programs(programs, multiprocessors(q.device), causal)
    group = max(1, min(B * H, L2_BYTES // (4 * T * D)))
    table = _schedule_table(T, B * H, programs, group, block_m, block_n, causal, q.device)
    qk_step = 2.0 ** math.floor(math.log2(scale * math.log2(math.e)))
    with torch.cuda.device_of(q):
        _attention_persistent_kernel[(programs,)](
            _descriptor(q, [64, D]),
            _descriptor(k, [block_n, D]),
            _descriptor(v, [block_n, D]),
            _descriptor(out, [64, D]),
            lse,
            table,
            H,
            T,
            n_m,
            scale,
            qk_step,
            STAGES=stages,
            CAUSAL=causal,
            PING_PONG=bool(ping_pong),
            FUSED=bool(fused),
            CONSUMERS=consumers,
            **_launch_options(q, block_n),
        )
    return out, lse
