"""Lab 07, reference: the backward of attention as three Triton kernels, plugged into a model.

Letters: B batch, H heads, T query length, S key length, D head dim; in stride names the tensors are
q, k, v, o (out) and g (dout). `lse` is the natural logarithm of the sum of exponentials of the
scaled scores, float32.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from labs._harness.checks import (
    MAX_GRID_YZ,
    check_head_dim,
    check_kernel_blocks,
    check_kernel_dtype,
    check_qkv,
)
from labs._harness.runtime import check_launch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS: the tests of this lab are skipped
    triton = None


# ---------------------------------------------------------------- given: checks, tiles, the forward
def _check(q, k, v, causal, **blocks):
    """Refuses what no kernel of this lab takes; every launcher calls it first."""
    check_qkv(q, k, v, causal)
    check_kernel_dtype(q=q)
    check_head_dim(q.shape[-1])
    check_kernel_blocks(**blocks)
    heads = q.shape[0] * q.shape[1]
    if heads > MAX_GRID_YZ:
        raise ValueError(f"B * H must be at most {MAX_GRID_YZ:,} (grid axis 1): got {heads:,}")
    check_launch(q=q, k=k, v=v)


def _check_backward(q, k, v, dout, lse, delta, causal, **blocks):
    """_check, and dout like q, and one float32 number a row in lse and delta."""
    _check(q, k, v, causal, **blocks)
    if dout.shape != q.shape or dout.dtype != q.dtype or dout.device != q.device:
        got = f"{tuple(dout.shape)} {dout.dtype} on {dout.device}"
        raise ValueError(
            f"dout must be like q, {tuple(q.shape)} {q.dtype} on {q.device}: got {got}"
        )
    for name, x in {"lse": lse, "delta": delta}.items():
        if x.shape != q.shape[:3] or x.dtype != torch.float32 or x.device != q.device:
            got = f"{tuple(x.shape)} {x.dtype} on {x.device}"
            raise ValueError(f"{name} must be (B, H, T) float32 on {q.device}: got {got}")


def _rows(x):
    """x, or a copy where the elements of a row are not adjacent: kernels take strides of rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors):
    """Strides of batch, head and row of each tensor, in the order that kernels take them."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def tiles(D, causal, dtype, device):
    """Tile sizes of each kernel: what `flash_attention` passes to the launchers.

    Args:
        D: head dim. causal: whether the causal mask is on. dtype, device: of the inputs.

    Returns:
        {"forward": ..., "dkdv": ..., "dq": ...}, each with block_m, block_n, num_warps, num_stages;
        "dkdv" and "dq" also with registers (see attention_dkdv) where that is faster.
    """
    width = D * dtype.itemsize // 2  # a float32 row takes the place of a half one twice as long
    half = dtype.itemsize == 2
    wgmma = False  # Hopper and newer data-centre cards: large tiles, operands in shared memory
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        roomy = properties.shared_memory_per_block_optin >= 160 * 1024
        wgmma = properties.major >= 9 and roomy
    if not wgmma:
        rows = 64 if width <= 64 else 32 if width <= 128 else 16
        sizes = (rows, min(rows, 32), 4, 2)
        found = {"forward": sizes, "dkdv": sizes, "dq": sizes}
    elif width <= 64:
        dkdv = (64, 64, 4, 3, half and not causal)
        dq = (64, 64, 4, 3) if causal else (128, 64, 8, 3)
        found = {"forward": (64, 64, 4, 3), "dkdv": dkdv, "dq": dq}
    elif width <= 128:
        dq = (128, 64, 8, 3, half)
        found = {"forward": (64, 64, 4, 3), "dkdv": (64, 64, 4, 2), "dq": dq}
    else:
        rows = 64 if width <= 256 else 32
        found = {"forward": (64, 32, 8, 2), "dkdv": (32, rows, 8, 2), "dq": (rows, 32, 8, 2)}
    names = ("block_m", "block_n", "num_warps", "num_stages", "registers")
    return {kernel: dict(zip(names, sizes, strict=False)) for kernel, sizes in found.items()}


def _overlaps(kernel, call, device) -> bool:
    """Whether `kernel` is compiled with OVERLAP: it has that call in it, and the card knows it."""
    calls = call in kernel.fn.__code__.co_names and hasattr(tl.extra.cuda, call)
    return calls and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


if triton is not None:

    @triton.jit
    def _in_registers(x):
        """x times the identity, which is x: on Hopper what comes of a product is in registers."""
        D: tl.constexpr = x.shape[1]
        identity = tl.arange(0, D)[:, None] == tl.arange(0, D)[None, :]  # (D, D)
        return tl.dot(x, identity.to(x.dtype)).to(x.dtype)

    @triton.jit
    def _load(ptrs, mask, other, WHOLE: tl.constexpr):
        """tl.load with a mask, or without one where all elements exist: in a hot loop it costs."""
        if WHOLE:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=mask, other=other)

    # fmt: off
    @triton.jit
    def _forward_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
        stride_qb, stride_qh, stride_qt,
        stride_kb, stride_kh, stride_ks,
        stride_vb, stride_vh, stride_vs,
        H, T, S, scale,
        D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    ):  # fmt: on
        pid_m = tl.program_id(0)
        pid_bh = tl.program_id(1).to(tl.int64)  # int64: times a stride it can pass 2**31
        b, h = pid_bh // H, pid_bh % H
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_d = tl.arange(0, D)  # (D,)
        rows = offs_m.to(tl.int64)[:, None]  # (BLOCK_M, 1)
        keys = offs_n.to(tl.int64)[:, None]  # (BLOCK_N, 1)
        q_ptrs = q_ptr + b * stride_qb + h * stride_qh + rows * stride_qt + offs_d  # (BLOCK_M, D)
        k_ptrs = k_ptr + b * stride_kb + h * stride_kh + keys * stride_ks + offs_d  # (BLOCK_N, D)
        v_ptrs = v_ptr + b * stride_vb + h * stride_vh + keys * stride_vs + offs_d  # (BLOCK_N, D)
        q = tl.load(q_ptrs, mask=rows < T, other=0.0)  # (BLOCK_M, D)

        # Running state of the query tile: row maximum, row sum, unnormalised output.
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        hi = S
        if CAUSAL:
            hi = tl.minimum(S, (pid_m + 1) * BLOCK_M)
        for start_n in range(0, hi, BLOCK_N):
            cols = start_n + offs_n  # (BLOCK_N,)
            k = tl.load(k_ptrs, mask=cols[:, None] < S, other=0.0)  # (BLOCK_N, D)
            s = tl.dot(q, tl.trans(k)) * scale  # (BLOCK_M, BLOCK_N)
            visible = cols[None, :] < S  # (1, BLOCK_N)
            if CAUSAL:
                visible = visible & (cols[None, :] <= offs_m[:, None])  # (BLOCK_M, BLOCK_N)
            s = tl.where(visible, s, float("-inf"))  # (BLOCK_M, BLOCK_N)
            m_new = tl.maximum(m_i, tl.max(s, axis=1))  # (BLOCK_M,)
            alpha = tl.exp(m_i - m_new)  # (BLOCK_M,)
            p = tl.exp(s - m_new[:, None])  # (BLOCK_M, BLOCK_N)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            v = tl.load(v_ptrs, mask=cols[:, None] < S, other=0.0)  # (BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            m_i = m_new
            k_ptrs += BLOCK_N * stride_ks
            v_ptrs += BLOCK_N * stride_vs

        out_ptrs = out_ptr + (pid_bh * T + rows) * D + offs_d  # (BLOCK_M, D)
        out = acc / l_i[:, None]  # (BLOCK_M, D)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=rows < T)
        tl.store(lse_ptr + pid_bh * T + offs_m, m_i + tl.log(l_i), mask=offs_m < T)


def attention_forward(
    q, k, v, causal=False, scale=None, block_m=64, block_n=64, num_warps=4, num_stages=2
):
    """FlashAttention forward.

    Method: Dao, "FlashAttention-2" (2023), algorithm 1.

    Args:
        q: (B, H, T, D) float16, bfloat16 or float32 (float32 products may run in TF32 on a GPU); D
            a power of two from 16 to 256; B * H at most 65,535. Any strides.
        k, v: (B, H, S, D), dtype and device of q. Any strides.
        causal: query i sees keys 0 to i only; needs T == S.
        scale: of the scores; None means 1 / sqrt(D).
        block_m, block_n: rows of a query tile and of a key tile; powers of two from 16 up.
        num_warps, num_stages: Triton's: warps of a program, and tiles in flight.

    Returns:
        out: (B, H, T, D) in the dtype of q.
        lse: (B, H, T) float32.

    Raises:
        ValueError: the above does not hold.
    """
    _check(q, k, v, causal, block_m=block_m, block_n=block_n)
    B, H, T, D = q.shape
    S = k.shape[2]
    q, k, v = _rows(q), _rows(k), _rows(v)
    out = torch.empty(B, H, T, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    options = {"num_warps": num_warps, "num_stages": num_stages}
    with torch.cuda.device_of(q):  # the current device may be another GPU
        _forward_kernel[(triton.cdiv(T, block_m), B * H)](
            *(q, k, v, out, lse),
            *_strides(q, k, v),
            *(H, T, S, scale),
            **{"D": D, "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": causal},
            **options,
        )
    return out, lse


# ---------------------------------------------------------------- step 1
if triton is not None:
    # fmt: off
    @triton.jit
    def _delta_kernel(
        out_ptr, dout_ptr, delta_ptr,
        stride_ob, stride_oh, stride_ot, stride_od,
        stride_gb, stride_gh, stride_gt, stride_gd,
        H, T,
        D: tl.constexpr, BLOCK_M: tl.constexpr,
    ):  # fmt: on
        pid_bh = tl.program_id(1).to(tl.int64)  # int64: times a stride it can pass 2**31
        b, h = pid_bh // H, pid_bh % H
        offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_d = tl.arange(0, D)[None, :]  # (1, D)
        rows = offs_m.to(tl.int64)[:, None]  # (BLOCK_M, 1)
        out_ptrs = out_ptr + b * stride_ob + h * stride_oh + rows * stride_ot + offs_d * stride_od
        dout_ptrs = dout_ptr + b * stride_gb + h * stride_gh + rows * stride_gt + offs_d * stride_gd
        out = tl.load(out_ptrs, mask=rows < T, other=0.0).to(tl.float32)  # (BLOCK_M, D)
        dout = tl.load(dout_ptrs, mask=rows < T, other=0.0).to(tl.float32)  # (BLOCK_M, D)
        delta = tl.sum(out * dout, axis=1)  # (BLOCK_M,)
        tl.store(delta_ptr + pid_bh * T + offs_m, delta, mask=offs_m < T)


def attention_delta(out, dout):
    """Row sums of out * dout: the scalar of each row that the softmax's gradient subtracts.

    Method: Dao et al., "FlashAttention" (2022), appendix B.2.

    Args:
        out: (B, H, T, D) float16, bfloat16 or float32, the forward's output; any strides.
        dout: its gradient, same shape, dtype and device; any strides of its own, 0 included.

    Returns:
        delta: (B, H, T) float32, contiguous.

    Raises:
        ValueError: the above does not hold, or D is not a power of two from 16 to 256.
    """
    check_qkv(out, dout, dout)
    if out.shape != dout.shape:
        raise ValueError(f"dout must be {tuple(out.shape)} as out is: got {tuple(dout.shape)}")
    _check(out, dout, dout, causal=False)
    B, H, T, D = out.shape
    delta = torch.empty(B, H, T, dtype=torch.float32, device=out.device)
    block_m = 64
    with torch.cuda.device_of(out):
        _delta_kernel[(triton.cdiv(T, block_m), B * H)](
            *(out, dout, delta), *out.stride(), *dout.stride(), H, T, D=D, BLOCK_M=block_m
        )
    return delta


# ---------------------------------------------------------------- step 2
if triton is not None:
    # fmt: off
    @triton.jit
    def _dkdv_kernel(
        q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
        stride_qb, stride_qh, stride_qt: tl.constexpr,
        stride_kb, stride_kh, stride_ks: tl.constexpr,
        stride_vb, stride_vh, stride_vs: tl.constexpr,
        stride_gb, stride_gh, stride_gt: tl.constexpr,
        H, T, S, scale,
        D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
        WHOLE: tl.constexpr, REGISTERS: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: on
        if OVERLAP:  # the next kernel may begin as soon as all programs of this one have
            tl.extra.cuda.gdc_launch_dependents()
        start_n = tl.program_id(0) * BLOCK_N
        pid_bh = tl.program_id(1).to(tl.int64)
        b, h = pid_bh // H, pid_bh % H
        lo = 0
        if CAUSAL:
            lo = start_n // BLOCK_M * BLOCK_M  # earlier rows see none of these keys
            q_ptr += lo.to(tl.int64) * stride_qt
            dout_ptr += lo.to(tl.int64) * stride_gt
        offs_m = tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = start_n + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_d = tl.arange(0, D)  # (D,)
        keys = offs_n.to(tl.int64)[:, None]  # (BLOCK_N, 1)
        first = offs_m.to(tl.int64)[:, None]  # (BLOCK_M, 1)
        k_ptrs = k_ptr + b * stride_kb + h * stride_kh + keys * stride_ks + offs_d  # (BLOCK_N, D)
        v_ptrs = v_ptr + b * stride_vb + h * stride_vh + keys * stride_vs + offs_d  # (BLOCK_N, D)
        q_ptrs = q_ptr + b * stride_qb + h * stride_qh + first * stride_qt + offs_d  # (BLOCK_M, D)
        dout_ptrs = dout_ptr + b * stride_gb + h * stride_gh + first * stride_gt + offs_d
        k = tl.load(k_ptrs, mask=keys < S, other=0.0)  # (BLOCK_N, D)
        v = tl.load(v_ptrs, mask=keys < S, other=0.0)  # (BLOCK_N, D)
        if REGISTERS:
            k, v = _in_registers(k), _in_registers(v)  # (BLOCK_N, D)
        lse2_ptr += pid_bh * T
        delta_ptr += pid_bh * T
        scale2 = scale * 1.4426950408889634  # log2(e): exp(x) = exp2(x log2(e))

        # Everything is transposed, keys by queries, so that p and ds are left operands as they are.
        dk = tl.zeros((BLOCK_N, D), tl.float32)
        dv = tl.zeros((BLOCK_N, D), tl.float32)
        for start_m in range(lo, T, BLOCK_M):
            rows = start_m + offs_m  # (BLOCK_M,)
            exists = rows < T  # (BLOCK_M,)
            q = _load(q_ptrs, exists[:, None], 0.0, WHOLE)  # (BLOCK_M, D)
            dout = _load(dout_ptrs, exists[:, None], 0.0, WHOLE)  # (BLOCK_M, D)
            # Padding gets lse2 = inf, as does a row that saw no key: its p is exp2(-inf) = 0.
            lse2 = _load(lse2_ptr + rows, exists, float("inf"), WHOLE)  # (BLOCK_M,)
            delta = _load(delta_ptr + rows, exists, 0.0, WHOLE)  # (BLOCK_M,)
            s = tl.dot(k, tl.trans(q))  # (BLOCK_N, BLOCK_M)
            if D <= 64:
                dp = tl.dot(v, tl.trans(dout))  # (BLOCK_N, BLOCK_M)
            s = s * scale2 - lse2[None, :]  # (BLOCK_N, BLOCK_M), before the mask: -inf * 0 is NaN
            if CAUSAL:
                if start_m < start_n + BLOCK_N - 1:  # from there on every row sees every key
                    s = tl.where(offs_n[:, None] <= rows[None, :], s, float("-inf"))
            if D > 64:  # after the mask: registers are short, and s needs fewer from here on
                dp = tl.dot(v, tl.trans(dout))  # (BLOCK_N, BLOCK_M)
            p = tl.exp2(s)  # (BLOCK_N, BLOCK_M)
            dv = tl.dot(p.to(dout.dtype), dout, dv)
            ds = p * (dp - delta[None, :])  # (BLOCK_N, BLOCK_M)
            dk = tl.dot(ds.to(q.dtype), q, dk)
            q_ptrs += BLOCK_M * stride_qt
            dout_ptrs += BLOCK_M * stride_gt

        offset = (pid_bh * S + keys) * D + offs_d  # (BLOCK_N, D)
        tl.store(dk_ptr + offset, (dk * scale).to(dk_ptr.dtype.element_ty), mask=keys < S)
        tl.store(dv_ptr + offset, dv.to(dv_ptr.dtype.element_ty), mask=keys < S)


def attention_dkdv(
    q, k, v, dout, lse, delta, causal=False, scale=None,
    block_m=64, block_n=64, num_warps=4, num_stages=2, registers=False,
):  # fmt: skip
    """Gradients of keys and values: one program a key tile, which walks over the query tiles.

    Method: Dao, "FlashAttention-2" (2023), algorithm 2, without its dQ.

    Args:
        q, k, v, causal, scale, block_m, block_n, num_warps, num_stages: as in attention_forward.
        dout: (B, H, T, D), gradient of the output; dtype and device of q, any strides.
        lse: (B, H, T) float32, of the forward.
        delta: (B, H, T) float32, of attention_delta.
        registers: hold k and v in registers, where products read them without shared memory. Not
            with causal: ptxas 12.8 loses such an operand in a loop that has a branch (section 3).

    Returns:
        dk, dv: (B, H, S, D) in the dtype of q, contiguous.

    Raises:
        ValueError: the above does not hold.
    """
    _check_backward(q, k, v, dout, lse, delta, causal, block_m=block_m, block_n=block_n)
    if registers and causal:
        raise ValueError("registers=True needs causal=False: ptxas loses the operands otherwise")
    B, H, T, D = q.shape
    S = k.shape[2]
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    dk = torch.empty(B, H, S, D, dtype=q.dtype, device=q.device)
    dv = torch.empty_like(dk)
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    # In base 2 and mended once, where the kernel would do it for each pair of tiles.
    lse2 = lse.nan_to_num(math.nan, math.inf, math.inf).mul_(math.log2(math.e)).contiguous()
    options = {"num_warps": num_warps, "num_stages": num_stages}
    with torch.cuda.device_of(q):
        _dkdv_kernel[(triton.cdiv(S, block_n), B * H)](
            *(q, k, v, dout, lse2, delta.contiguous(), dk, dv),
            *_strides(q, k, v, dout),
            *(H, T, S, scale),
            **{"D": D, "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": causal},
            WHOLE=T % block_m == 0,
            REGISTERS=registers,
            OVERLAP=_overlaps(_dkdv_kernel, "gdc_launch_dependents", q.device),
            **options,
        )
    return dk, dv


# ---------------------------------------------------------------- step 3
if triton is not None:

    @triton.jit
    def _dq_keys(
        dq, q, dout, k_ptr, v_ptr, lse2, delta, offs_m, lo, hi,
        stride_ks: tl.constexpr, stride_vs: tl.constexpr,
        S, scale2,
        D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
        WHOLE: tl.constexpr,
    ):  # fmt: skip
        """Adds what keys lo to hi - 1 give; without MASKED every row must see all of them."""
        offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        keys = (lo + offs_n).to(tl.int64)[:, None]  # (BLOCK_N, 1)
        k_ptrs = k_ptr + keys * stride_ks + tl.arange(0, D)  # (BLOCK_N, D)
        v_ptrs = v_ptr + keys * stride_vs + tl.arange(0, D)  # (BLOCK_N, D)
        for start_n in range(lo, hi, BLOCK_N):
            cols = start_n + offs_n  # (BLOCK_N,)
            k = _load(k_ptrs, cols[:, None] < S, 0.0, WHOLE)  # (BLOCK_N, D)
            v = _load(v_ptrs, cols[:, None] < S, 0.0, WHOLE)  # (BLOCK_N, D)
            s = tl.dot(q, tl.trans(k))  # (BLOCK_M, BLOCK_N)
            dp = tl.dot(dout, tl.trans(v))  # (BLOCK_M, BLOCK_N)
            s = s * scale2 - lse2[:, None]  # (BLOCK_M, BLOCK_N), before the mask: -inf * 0 is NaN
            if MASKED:
                visible = cols[None, :] < S  # (1, BLOCK_N)
                if CAUSAL:
                    visible = visible & (cols[None, :] <= offs_m[:, None])  # (BLOCK_M, BLOCK_N)
                s = tl.where(visible, s, float("-inf"))  # (BLOCK_M, BLOCK_N)
            p = tl.exp2(s)  # (BLOCK_M, BLOCK_N)
            ds = p * (dp - delta[:, None])  # (BLOCK_M, BLOCK_N)
            dq = tl.dot(ds.to(k.dtype), k, dq)
            k_ptrs += BLOCK_N * stride_ks
            v_ptrs += BLOCK_N * stride_vs
        return dq

    # fmt: off
    @triton.jit
    def _dq_kernel(
        q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
        stride_qb, stride_qh, stride_qt: tl.constexpr,
        stride_kb, stride_kh, stride_ks: tl.constexpr,
        stride_vb, stride_vh, stride_vs: tl.constexpr,
        stride_gb, stride_gh, stride_gt: tl.constexpr,
        H, T, S, scale,
        D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
        WHOLE: tl.constexpr, REGISTERS: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: on
        pid_m = tl.program_id(0)
        if CAUSAL:
            pid_m = tl.num_programs(0) - 1 - pid_m  # the longest tile first
        start_m = pid_m * BLOCK_M
        pid_bh = tl.program_id(1).to(tl.int64)
        b, h = pid_bh // H, pid_bh % H
        # Every row sees all of the key tiles below mid; those from mid to hi need a mask.
        mid, hi = S // BLOCK_N * BLOCK_N, S
        if CAUSAL:
            mid = (start_m + 1) // BLOCK_N * BLOCK_N
            hi = tl.minimum(S, start_m + BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_d = tl.arange(0, D)  # (D,)
        rows = offs_m.to(tl.int64)[:, None]  # (BLOCK_M, 1)
        q_ptrs = q_ptr + b * stride_qb + h * stride_qh + rows * stride_qt + offs_d  # (BLOCK_M, D)
        dout_ptrs = dout_ptr + b * stride_gb + h * stride_gh + rows * stride_gt + offs_d
        q = tl.load(q_ptrs, mask=rows < T, other=0.0)  # (BLOCK_M, D)
        dout = tl.load(dout_ptrs, mask=rows < T, other=0.0)  # (BLOCK_M, D)
        if REGISTERS:
            dout = _in_registers(dout)  # (BLOCK_M, D)
        k_ptr += b * stride_kb + h * stride_kh
        v_ptr += b * stride_vb + h * stride_vh
        lse = tl.load(lse_ptr + pid_bh * T + offs_m, mask=offs_m < T, other=float("inf"))
        delta = tl.load(delta_ptr + pid_bh * T + offs_m, mask=offs_m < T, other=0.0)
        log2e = 1.4426950408889634
        # A row that saw no key has lse -inf; with +inf in its place its p is exp2(-inf) = 0.
        lse2 = tl.where(lse == float("-inf"), float("inf"), lse * log2e)  # (BLOCK_M,)
        scale2 = scale * log2e
        dq = tl.zeros((BLOCK_M, D), tl.float32)
        # fmt: off
        dq = _dq_keys(dq, q, dout, k_ptr, v_ptr, lse2, delta, offs_m, 0, mid, stride_ks, stride_vs,
                      S, scale2, D, BLOCK_N, CAUSAL, False, True)
        dq = _dq_keys(dq, q, dout, k_ptr, v_ptr, lse2, delta, offs_m, mid, hi, stride_ks, stride_vs,
                      S, scale2, D, BLOCK_N, CAUSAL, True, WHOLE)
        # fmt: on
        if OVERLAP:  # what ran alongside must not end after this: nobody waits for it again
            tl.extra.cuda.gdc_wait()
        dq_ptrs = dq_ptr + (pid_bh * T + rows) * D + offs_d  # (BLOCK_M, D)
        tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=rows < T)


def attention_dq(
    q, k, v, dout, lse, delta, causal=False, scale=None,
    block_m=64, block_n=64, num_warps=4, num_stages=2, registers=False, overlap=False,
):  # fmt: skip
    """Gradient of queries: one program a query tile, which walks over the key tiles.

    Args, Raises: as attention_dkdv, but
        registers: hold dout in registers; causal or not.
        overlap: begin while the kernel launched just before still runs. Only right behind
            attention_dkdv, from which nothing is read here.

    Returns:
        dq: (B, H, T, D) in the dtype of q, contiguous.
    """
    _check_backward(q, k, v, dout, lse, delta, causal, block_m=block_m, block_n=block_n)
    B, H, T, D = q.shape
    S = k.shape[2]
    copies = any(x.stride(-1) != 1 for x in (q, k, v, dout))  # then they are the kernel before
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    dq = torch.empty(B, H, T, D, dtype=q.dtype, device=q.device)
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    options = {"num_warps": num_warps, "num_stages": num_stages}
    overlap = overlap and not copies and _overlaps(_dq_kernel, "gdc_wait", q.device)
    if overlap:
        options["launch_pdl"] = True
    with torch.cuda.device_of(q):
        _dq_kernel[(triton.cdiv(T, block_m), B * H)](
            *(q, k, v, dout, lse.contiguous(), delta.contiguous(), dq),
            *_strides(q, k, v, dout),
            *(H, T, S, scale),
            **{"D": D, "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": causal},
            WHOLE=S % block_n == 0,
            REGISTERS=registers,
            OVERLAP=overlap,
            **options,
        )
    return dq


# ---------------------------------------------------------------- step 4
class TritonFlashAttention(torch.autograd.Function):
    """Joins the kernels for autograd. Saves q, k, v, out and lse: nothing of size T x S."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        sizes = tiles(q.shape[-1], causal, q.dtype, q.device)
        out, lse = attention_forward(q, k, v, causal, scale, **sizes["forward"])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale, ctx.sizes = causal, scale, sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        delta = attention_delta(out, dout)
        given = (q, k, v, dout, lse, delta, ctx.causal, ctx.scale)
        dq = dk = dv = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = attention_dkdv(*given, **ctx.sizes["dkdv"])
        if ctx.needs_input_grad[0]:
            dq = attention_dq(*given, **ctx.sizes["dq"], overlap=dk is not None)
        return dq, dk, dv, None, None


def flash_attention(q, k, v, causal=False, scale=None):
    """Attention with a backward, on kernels only.

    Args: as attention_forward.

    Returns:
        out: (B, H, T, D) in the dtype of q.

    Raises:
        ValueError: as attention_forward.
    """
    return TritonFlashAttention.apply(q, k, v, causal, scale)


# ---------------------------------------------------------------- step 5
def causal_self_attention(x, w_qkv, w_out, n_heads, attention):
    """The attention layer of a language model: project, attend by head, put together, project.

    Args:
        x: (B, T, C), C a multiple of n_heads.
        w_qkv: (C, 3 C): the columns of q, of k and of v, each head by head.
        w_out: (C, C).
        n_heads: heads, each C / n_heads wide.
        attention: called as attention(q, k, v, causal=True) on (B, n_heads, T, C / n_heads).

    Returns:
        (B, T, C).
    """
    B, T, C = x.shape
    qkv = (x @ w_qkv).view(B, T, 3, n_heads, C // n_heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # views: the kernels read them through their strides
    y = attention(q, k, v, causal=True)
    return y.transpose(1, 2).reshape(B, T, C) @ w_out


class TinyLM(torch.nn.Module):
    """One attention layer that predicts the next byte of a text.

    Args:
        width: C, a multiple of heads. heads: of the attention. context: longest T.
        attention: the attention that causal_self_attention is given.
    """

    def __init__(self, attention, width=32, heads=2, context=64):
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        shapes = {
            "token": (128, width),
            "place": (context, width),
            "w_qkv": (width, 3 * width),
            "w_out": (width, width),
            "w_logits": (width, 128),
        }
        for name, shape in shapes.items():
            spread = 0.5 if name in ("token", "place") else width**-0.5
            start = spread * torch.randn(shape, generator=draw, dtype=torch.float64)
            setattr(self, name, torch.nn.Parameter(start.float()))
        self.heads, self.context, self.attention = heads, context, attention

    def forward(self, tokens):
        """(B, T) whole numbers below 128 -> (B, T, 128) logits of each next one."""
        x = self.token[tokens] + self.place[: tokens.shape[1]]
        x = x + causal_self_attention(x, self.w_qkv, self.w_out, self.heads, self.attention)
        return torch.nn.functional.layer_norm(x, x.shape[-1:]) @ self.w_logits

    def fit(self, text, steps, batch=2, lr=1e-2):
        """Trains on random pieces of a text, the same ones in every call; returns the losses."""
        draw = torch.Generator().manual_seed(8)
        tokens = torch.tensor([min(byte, 127) for byte in text.encode()])
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        losses = []
        for _ in range(steps):
            starts = torch.randint(0, len(tokens) - self.context, (batch, 1), generator=draw)
            piece = tokens[starts + torch.arange(self.context + 1)].to(self.token.device)
            logits = self(piece[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
