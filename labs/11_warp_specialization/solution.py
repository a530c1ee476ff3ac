"""Lab 11, reference: warp specialization on Hopper, in Gluon.

Steps 1 and 2 are one tile through TMA and one through wgmma. Step 3 puts them together: a producer
warp that copies, two warpgroups that compute, a ring of buffers between them. Step 4 overlaps the
products with the softmax, and takes any length and the causal mask. Step 5 stays on its
multiprocessor and goes from tile to tile.
Letters: B batch, H heads, T length, D head dim; a consumer is a warpgroup with ROWS rows of Q.
"""

from __future__ import annotations

import functools
import heapq
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
        warpgroup_mma,
        warpgroup_mma_wait,
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
        tile = gl.allocate_shared_memory(x_desc.dtype, [BLOCK_R, BLOCK_C], x_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(full, count=1)
        fence_async_shared()  # TMA must see a barrier that is ready
        col = gl.program_id(0) * BLOCK_C
        for i in range(n_tiles):
            mbarrier.expect(full, x_desc.block_type.nbytes)
            async_load(x_desc, [i * BLOCK_R, col], full, tile)
            mbarrier.wait(full, i & 1)
            async_store(out_desc, [i * BLOCK_R, col], tile)
            tma.store_wait(pendings=0)  # the next load overwrites what this store reads


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
        q_s = gl.allocate_shared_memory(q_desc.dtype, [ROWS, D], q_desc.layout)
        k_s = gl.allocate_shared_memory(k_desc.dtype, [BLOCK_N, D], k_desc.layout)
        v_s = gl.allocate_shared_memory(v_desc.dtype, [BLOCK_N, D], v_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(full, count=1)
        fence_async_shared()
        row = gl.program_id(0) * ROWS
        # One barrier may count the bytes of several copies.
        mbarrier.expect(full, q_desc.block_type.nbytes + 2 * k_desc.block_type.nbytes)
        async_load(q_desc, [row, 0], full, q_s)
        async_load(k_desc, [0, 0], full, k_s)
        async_load(v_desc, [0, 0], full, v_s)
        mbarrier.wait(full, 0)

        # Both operands in shared memory.
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)  # (ROWS, BLOCK_N)
        s = warpgroup_mma(q_s, k_s.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])  # (ROWS, BLOCK_N)
        # The left one in registers.
        P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
        p = gl.convert_layout((s * scale).to(v_s.dtype), P_LAYOUT)  # (ROWS, BLOCK_N)
        out = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)  # (ROWS, D)
        out = warpgroup_mma(p, v_s, out, is_async=True)
        out = warpgroup_mma_wait(0, [out])  # (ROWS, D)

        q_s.store(out.to(q_s.dtype))
        fence_async_shared()  # TMA must see what the threads have written
        async_store(out_desc, [row, 0], q_s)
        tma.store_wait(pendings=0)


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
        tiles = gl.allocate_shared_memory(
            desc.dtype, [STAGES] + desc.block_type.shape, desc.layout
        )  # (STAGES, 1, 1, rows, D)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)  # the producer, and the bytes that it expects
            mbarrier.init(empty.index(stage), count=USERS)
        return tiles, full, empty

    @gluon.jit
    def _place(i, STAGES: gl.constexpr):
        """(stage of tile i, how many tiles used that stage before)."""
        i = gl.to_tensor(i).to(gl.uint32)  # to divide signed numbers takes more instructions
        return (i % STAGES).to(gl.int32), (i // STAGES).to(gl.int32)

    @gluon.jit
    def _fill(desc, ring, b, h, row, i, STAGES: gl.constexpr):
        tiles, full, empty = ring
        stage, uses = _place(i, STAGES)
        # The first round finds all stages empty: a new barrier lets the parity before its own pass.
        mbarrier.wait(empty.index(stage), (uses & 1) ^ 1)
        mbarrier.expect(full.index(stage), desc.block_type.nbytes)
        async_load(desc, [b, h, row, 0], full.index(stage), tiles.index(stage))

    @gluon.jit
    def _view(ring, i, HEIGHT: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
        tiles, full, empty = ring
        stage, uses = _place(i, STAGES)
        return tiles.index(stage).reshape([HEIGHT, D])  # (HEIGHT, D)

    @gluon.jit
    def _take(ring, i, HEIGHT: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
        tiles, full, empty = ring
        stage, uses = _place(i, STAGES)
        mbarrier.wait(full.index(stage), uses & 1)
        return _view(ring, i, HEIGHT, D, STAGES)  # (HEIGHT, D)

    @gluon.jit
    def _give_back(ring, i, STAGES: gl.constexpr):
        tiles, full, empty = ring
        stage, uses = _place(i, STAGES)
        mbarrier.arrive(empty.index(stage), count=1)

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
        q_desc, k_desc, v_desc, rings, b, h, m, n_blocks = args
        q_ring, k_ring, v_ring = rings
        for w in gl.static_range(CONSUMERS):
            _fill(q_desc, q_ring, b, h, (m * CONSUMERS + w) * ROWS, w, CONSUMERS)
        for j in range(n_blocks):
            _fill(k_desc, k_ring, b, h, j * BLOCK_N, j, STAGES)
            _fill(v_desc, v_ring, b, h, j * BLOCK_N, j, STAGES)

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
        out_desc, lse_ptr, rings, o_s, b, h, m, H, T, n_blocks, scale = args
        q_ring, k_ring, v_ring = rings
        P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
        qk_scale = scale * LOG2_E  # exp(x) = exp2(x * log2(e))
        # Running state of the rows: maximum (not scaled), sum, unnormalised output.
        m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        q = _take(q_ring, WG, ROWS, D, CONSUMERS)  # (ROWS, D)
        for j in range(n_blocks):
            k = _take(k_ring, j, BLOCK_N, D, STAGES)  # (BLOCK_N, D)
            s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)  # (ROWS, BLOCK_N)
            s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])  # (ROWS, BLOCK_N)
            _give_back(k_ring, j, STAGES)
            m_new = gl.maximum(m_i, gl.max(s, 1))  # (ROWS,)
            alpha = gl.exp2((m_i - m_new) * qk_scale)  # (ROWS,)
            # Subtract first: one fused multiply-add of equal scores need not give 0.
            p = gl.exp2((s - m_new[:, None]) * qk_scale)  # (ROWS, BLOCK_N)
            l_i = l_i * alpha + gl.sum(p, 1)
            m_i = m_new
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            v = _take(v_ring, j, BLOCK_N, D, STAGES)  # (BLOCK_N, D)
            acc = warpgroup_mma(gl.convert_layout(p.to(v.dtype), P_LAYOUT), v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)
            _give_back(v_ring, j, STAGES)
        row = (m * CONSUMERS + WG) * ROWS
        _write(out_desc, lse_ptr, o_s.index(WG), b, h, row, H, T, scale, acc, m_i, l_i, D)
        tma.store_wait(pendings=0)  # shared memory must live until the last store has read it

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
        CONSUMERS: gl.constexpr = 2
        n_m = gl.cdiv(T, CONSUMERS * ROWS)
        n_blocks = gl.cdiv(T, BLOCK_N)
        m = gl.program_id(0) % n_m
        bh = gl.program_id(0) // n_m
        b = bh // H
        h = bh % H
        q_ring = _ring(q_desc, CONSUMERS, 1)
        k_ring = _ring(k_desc, STAGES, CONSUMERS)
        v_ring = _ring(v_desc, STAGES, CONSUMERS)
        o_s = gl.allocate_shared_memory(
            out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout
        )  # (CONSUMERS, 1, 1, ROWS, D)
        fence_async_shared()
        rings = (q_ring, k_ring, v_ring)
        args = (out_desc, lse_ptr, rings, o_s, b, h, m, H, T, n_blocks, scale)
        load = (q_desc, k_desc, v_desc, rings, b, h, m, n_blocks)
        # The first function runs in the warps of the launch. Registers: a warpgroup of a consumer
        # needs many, the producer few.
        gl.warp_specialize(
            [
                (_consume_once, (args, D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, 0)),
                (_consume_once, (args, D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, 1)),
                (_produce_once, (load, BLOCK_N, CONSUMERS, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )


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
        if CAUSAL:
            n_full = m * BLOCK_M // BLOCK_N
            n_blocks = gl.cdiv(gl.minimum(T, (m + 1) * BLOCK_M), BLOCK_N)
        else:
            n_full = T // BLOCK_N
            n_blocks = gl.cdiv(T, BLOCK_N)
        return n_full, n_blocks

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
        # Block 0 comes first and every row sees key 0: m_new is finite from there on.
        top = gl.max(s, 1)  # (ROWS,)
        m_new = gl.where((top - m_i) * scales[0] > SLACK, top, m_i)  # (ROWS,)
        return m_new, gl.exp2((m_i - m_new) * scales[0])

    @gluon.jit
    def _weights(s, m_i, l_i, alpha, scales, FUSED: gl.constexpr):
        """exp2((s - m_i) * scales[0]): (ROWS, BLOCK_N); and l_i with their sums: (ROWS, 4).

        m_i is what _maximum chose for this block.
        """
        qk_scale, qk_step = scales
        if FUSED:
            # Where neighbouring scores differ by 16, f is a power of two: its products are exact.
            f = gl.where(gl.abs(m_i) * qk_scale < 268435456.0, qk_scale, qk_step)  # (ROWS,)
            p = gl.exp2(s * f[:, None] - (m_i * f)[:, None])  # (ROWS, BLOCK_N)
        else:
            p = gl.exp2((s - m_i[:, None]) * qk_scale)  # (ROWS, BLOCK_N)
        l_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))  # (ROWS,)
        return p, l_i * l_alpha[:, None] + _parts(p)

    @gluon.jit
    def _begin_turn(order, i, WG: gl.constexpr, PING_PONG: gl.constexpr):
        if PING_PONG:  # consumer 0 has the first turn: its new barrier lets parity 1 pass
            mbarrier.wait(order.index(WG), (i & 1) ^ (WG == 0))

    @gluon.jit
    def _end_turn(order, WG: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr):
        if PING_PONG:
            mbarrier.arrive(order.index((WG + 1) % CONSUMERS), count=1)

    @gluon.jit
    def _collect(
        acc, alpha, v_ring, i, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
    ):
        """Waits for P @ V of block i - 1, gives its V back and rescales: (ROWS, D)."""
        # V of block i is waited for here, a step early: the assembler moves arithmetic past the
        # wait for a product, but not past this one. So what stands before this call runs beside
        # P @ V: maximum and weights; with three consumers the maximum.
        _take(v_ring, i, BLOCK_N, D, STAGES)
        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)
        _give_back(v_ring, i - 1, STAGES)
        return _rescale(acc, alpha)

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
        k = _take(k_ring, i, BLOCK_N, D, STAGES)  # (BLOCK_N, D)
        _begin_turn(order, i, WG, PING_PONG)
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)  # (ROWS, BLOCK_N)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
        v = _view(v_ring, i - 1, BLOCK_N, D, STAGES)  # (BLOCK_N, D)
        acc = warpgroup_mma(_unpack(p, v.dtype, acc), v, acc, is_async=True)
        _end_turn(order, WG, CONSUMERS, PING_PONG)
        s = warpgroup_mma_wait(1, [s])  # (ROWS, BLOCK_N)
        _give_back(k_ring, i, STAGES)
        if MASKED:
            s = _mask(s, rows, start_n, T, BLOCK_N, CAUSAL)
        m_i, alpha = _maximum(s, m_i, scales)
        if CONSUMERS == 3:  # 160 registers: the weights take p's, so P @ V must have ended
            acc = _collect(acc, alpha, v_ring, i, D, BLOCK_N, STAGES)
        weights, l_i = _weights(s, m_i, l_i, alpha, scales, FUSED)
        if CONSUMERS == 2:
            acc = _collect(acc, alpha, v_ring, i, D, BLOCK_N, STAGES)
        return _pack(weights, v.dtype), acc, m_i, l_i

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
        q_desc, k_desc, v_desc, rings = args
        q_ring, k_ring, v_ring = rings
        for w in gl.static_range(CONSUMERS):
            row = (m * CONSUMERS + w) * ROWS
            _fill(q_desc, q_ring, b, h, row, turn * CONSUMERS + w, 2 * CONSUMERS)
        _fill(k_desc, k_ring, b, h, 0, first, STAGES)
        for j in range(1, n_blocks):  # in the order of use: K one block ahead of V
            _fill(k_desc, k_ring, b, h, j * BLOCK_N, first + j, STAGES)
            _fill(v_desc, v_ring, b, h, (j - 1) * BLOCK_N, first + j - 1, STAGES)
        last = n_blocks - 1
        _fill(v_desc, v_ring, b, h, last * BLOCK_N, first + last, STAGES)

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
        out_desc, lse_ptr, rings, o_s, order, H, T, scale, scales = args
        q_ring, k_ring, v_ring = rings
        n_full, n_blocks = _bounds(m, T, CONSUMERS * ROWS, BLOCK_N, CAUSAL)
        row = (m * CONSUMERS + WG) * ROWS
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))  # (ROWS,)
        # Running state of the rows: maximum (not scaled), sum in four parts, unnormalised output.
        m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l_i = _parts(gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT))  # (ROWS, 4)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)

        # Block 0, with nothing to overlap it with.
        q = _take(q_ring, turn * CONSUMERS + WG, ROWS, D, 2 * CONSUMERS)  # (ROWS, D)
        k = _take(k_ring, first, BLOCK_N, D, STAGES)  # (BLOCK_N, D)
        _begin_turn(order, first, WG, PING_PONG)
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)  # (ROWS, BLOCK_N)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
        _end_turn(order, WG, CONSUMERS, PING_PONG)
        s = warpgroup_mma_wait(0, [s])  # (ROWS, BLOCK_N)
        _give_back(k_ring, first, STAGES)
        if n_full == 0:
            s = _mask(s, rows, 0, T, BLOCK_N, CAUSAL)
        m_i, alpha = _maximum(s, m_i, scales)
        weights, l_i = _weights(s, m_i, l_i, alpha, scales, FUSED)
        p = _pack(weights, k.dtype)  # (ROWS, BLOCK_N / 2)
        v = _take(v_ring, first, BLOCK_N, D, STAGES)  # (BLOCK_N, D)

        # Step j: Q @ K of block j and P @ V of block j - 1 in flight, then the softmax of block j.
        for j in range(1, n_full):
            p, acc, m_i, l_i = _step(
                q, p, acc, m_i, l_i, k_ring, v_ring, order, rows, first + j, j * BLOCK_N, T, scales,
                D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, CAUSAL, False, PING_PONG, FUSED, WG,
            )  # fmt: skip
        for j in range(gl.maximum(n_full, 1), n_blocks):
            p, acc, m_i, l_i = _step(
                q, p, acc, m_i, l_i, k_ring, v_ring, order, rows, first + j, j * BLOCK_N, T, scales,
                D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, CAUSAL, True, PING_PONG, FUSED, WG,
            )  # fmt: skip

        _give_back(q_ring, turn * CONSUMERS + WG, 2 * CONSUMERS)
        last = first + n_blocks - 1
        v = _view(v_ring, last, BLOCK_N, D, STAGES)  # (BLOCK_N, D)
        acc = warpgroup_mma(_unpack(p, v.dtype, acc), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])  # (ROWS, D)
        _give_back(v_ring, last, STAGES)
        l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)  # (ROWS,)
        _write(out_desc, lse_ptr, o_s.index(WG), b, h, row, H, T, scale, acc, m_i, l_i, D)
        return n_blocks

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
        CONSUMERS: gl.constexpr = 2
        rings, o_s, order = _shared(q_desc, k_desc, v_desc, out_desc, CONSUMERS, STAGES)
        n_m = gl.cdiv(T, CONSUMERS * ROWS)
        m = gl.program_id(0) % n_m
        if CAUSAL:
            m = n_m - 1 - m  # the longest rows of a head first: the short ones fill the gaps
        bh = gl.program_id(0) // n_m
        b = bh // H
        h = bh % H
        scales = (scale * LOG2_E, 0.0)
        load = (q_desc, k_desc, v_desc, rings)
        args = (out_desc, lse_ptr, rings, o_s, order, H, T, scale, scales)
        gl.warp_specialize(
            [
                (
                    _consume_one,
                    (
                        args, b, h, m,
                        D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, 0,
                    ),
                ),
                (
                    _consume_one,
                    (
                        args, b, h, m,
                        D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, 1,
                    ),
                ),
                (_produce_one, (load, b, h, m, T, BLOCK_N, CONSUMERS, STAGES, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


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
    longest_first = sorted(range(n_m), key=lambda m: -lengths[m])
    plan = [[] for _ in range(programs)]
    if len(set(lengths)) == 1:  # nothing to balance: in turn
        order = range(n_m * n_heads)
        return [list(order[p::programs]) for p in range(programs)]
    free = [(0.0, p) for p in range(programs)]  # a heap of (when, program)
    for first in range(0, n_heads, group):
        heads = range(first, min(first + group, n_heads))
        for m, head in itertools.product(longest_first, heads):
            when, p = heapq.heappop(free)
            plan[p].append(head * n_m + m)
            heapq.heappush(free, (when + lengths[m], p))
    return plan


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
        start = gl.load(schedule_ptr + gl.program_id(0))
        stop = gl.load(schedule_ptr + gl.program_id(0) + 1)
        tile = gl.load(schedule_ptr + start)
        first = 0  # tiles of K, and of V, before this tile of Q: it says stage and phase
        for place in range(start, stop):
            upcoming = gl.load(schedule_ptr + gl.minimum(place + 1, stop - 1))  # ready when needed
            m = tile % n_m
            head = tile // n_m
            n_full, n_blocks = _bounds(m, T, CONSUMERS * ROWS, BLOCK_N, CAUSAL)
            _produce_tile(
                args, head // H, head % H, m, place - start, first, n_blocks,
                BLOCK_N, CONSUMERS, STAGES,
            )  # fmt: skip
            first += n_blocks
            tile = upcoming

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
        start = gl.load(schedule_ptr + gl.program_id(0))
        stop = gl.load(schedule_ptr + gl.program_id(0) + 1)
        tile = gl.load(schedule_ptr + start)
        first = 0
        for place in range(start, stop):
            upcoming = gl.load(schedule_ptr + gl.minimum(place + 1, stop - 1))
            m = tile % n_m
            head = tile // n_m
            first += _consume_tile(
                args, head // H, head % H, m, place - start, first,
                D, BLOCK_N, CONSUMERS, STAGES, S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, FUSED, WG,
            )  # fmt: skip
            tile = upcoming
        tma.store_wait(pendings=0)

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
        rings, o_s, order = _shared(q_desc, k_desc, v_desc, out_desc, CONSUMERS, STAGES)
        scales = (scale * LOG2_E, qk_step)
        load = (q_desc, k_desc, v_desc, rings)
        args = (out_desc, lse_ptr, rings, o_s, order, H, T, scale, scales)
        if CONSUMERS == 3:
            gl.warp_specialize(
                [
                    (
                        _consume,
                        (
                            args, schedule_ptr, H, n_m, D, BLOCK_N, CONSUMERS, STAGES,
                            S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, FUSED, 0,
                        ),
                    ),
                    (
                        _consume,
                        (
                            args, schedule_ptr, H, n_m, D, BLOCK_N, CONSUMERS, STAGES,
                            S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, FUSED, 1,
                        ),
                    ),
                    (
                        _consume,
                        (
                            args, schedule_ptr, H, n_m, D, BLOCK_N, CONSUMERS, STAGES,
                            S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, FUSED, 2,
                        ),
                    ),
                    (
                        _produce,
                        (load, schedule_ptr, H, T, n_m, BLOCK_N, CONSUMERS, STAGES, CAUSAL),
                    ),
                ],
                [4, 4, 1],
                [160, 160, 24],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (
                        _consume,
                        (
                            args, schedule_ptr, H, n_m, D, BLOCK_N, CONSUMERS, STAGES,
                            S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, FUSED, 0,
                        ),
                    ),
                    (
                        _consume,
                        (
                            args, schedule_ptr, H, n_m, D, BLOCK_N, CONSUMERS, STAGES,
                            S_LAYOUT, O_LAYOUT, CAUSAL, PING_PONG, FUSED, 1,
                        ),
                    ),
                    (
                        _produce,
                        (load, schedule_ptr, H, T, n_m, BLOCK_N, CONSUMERS, STAGES, CAUSAL),
                    ),
                ],
                [4, 1],
                [240, 24],
            )  # fmt: skip


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
