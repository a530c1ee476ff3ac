"""Lab 06, reference: from an online softmax to FlashAttention in Triton.

Part A (steps 1 to 3) is PyTorch, tile by tile; part B (steps 4 and 5) is two Triton kernels.
Letters: B batch, H heads, T query length, S key length, D head dim. `lse` is the natural logarithm
of the sum of exponentials of the scaled scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from labs._harness.checks import (
    MAX_GRID_YZ,
    check_blocks,
    check_head_dim,
    check_kernel_blocks,
    check_kernel_dtype,
    check_qkv,
)
from labs._harness.runtime import check_launch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS: part A still runs
    triton = None


def naive_attention(q, k, v, causal=False):
    """Attention that materialises the scores: the definition that the tiled versions must equal.

    Args:
        q: (B, H, T, D) floating point.
        k, v: (B, H, S, D), dtype and device of q.
        causal: query i sees keys 0 to i only; needs T == S.

    Returns:
        out (B, H, T, D) in the dtype of q: softmax(q k^T / sqrt(D)) v.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    check_qkv(q, k, v, causal)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ v


def _future(i0, i1, j0, j1, device):
    """(i1 - i0, j1 - j0) bool: True where key j lies in the future of query i, j > i."""
    rows = torch.arange(i0, i1, device=device)
    cols = torch.arange(j0, j1, device=device)
    return cols[None, :] > rows[:, None]


# ---------------------------------------------------------------- step 1
def online_softmax_stats(blocks: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum of exponentials of one row that arrives in blocks, in a single pass.

    Method: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.

    Args:
        blocks: any iterable of 1-D tensors, a generator included; each is seen once. A block may
            be empty, and may hold -inf.

    Returns:
        (m, l), 0-dim, in the dtype and on the device of the blocks: m is the maximum, l the sum of
        exp(x - m). A row of -inf only gives (-inf, 0).

    Raises:
        ValueError: there is no block at all.
    """
    m = l = None
    for block in blocks:
        if m is None:
            m = block.new_full((), float("-inf"))
            l = block.new_zeros(())
        if block.numel() == 0:
            continue
        m_new = torch.maximum(m, block.max())
        if m_new == float("-inf"):
            continue  # exp(-inf - (-inf)) would be NaN; nothing has been seen yet
        l = l * torch.exp(m - m_new) + torch.exp(block - m_new).sum()
        m = m_new
    if m is None:
        raise ValueError("online_softmax_stats needs at least one block: got none")
    return m, l


# ---------------------------------------------------------------- step 2
def flash_attention_forward(q, k, v, causal=False, block_q=16, block_k=16):
    """Attention, one tile of queries against one tile of keys at a time.

    Method: Dao et al., "FlashAttention" (2022), algorithm 1, with the loop order of Dao,
    "FlashAttention-2" (2023), algorithm 1. No tensor larger than a tile or (B, H, T, D) is made.

    Args:
        q: (B, H, T, D) floating point.
        k, v: (B, H, S, D), dtype and device of q.
        causal: query i sees keys 0 to i only; needs T == S.
        block_q, block_k: rows of a query tile and of a key tile, any number from 1 up.

    Returns:
        out: (B, H, T, D) in the dtype of q.
        lse: (B, H, T) float32, or float64 for float64 inputs.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or a block size below 1.
    """
    check_qkv(q, k, v, causal)
    check_blocks(block_q=block_q, block_k=block_k)
    B, H, T, D = q.shape
    S = k.shape[2]
    scale = 1.0 / math.sqrt(D)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q)
    lse = torch.empty(B, H, T, dtype=dtype, device=q.device)
    for i0 in range(0, T, block_q):
        i1 = min(i0 + block_q, T)
        q_tile = q[:, :, i0:i1].to(dtype) * scale  # (B, H, block_q, D)
        # Running state of this query tile: row maximum, row sum, unnormalised output.
        m_i = torch.full((B, H, i1 - i0), float("-inf"), dtype=dtype, device=q.device)
        l_i = torch.zeros_like(m_i)
        acc = torch.zeros(B, H, i1 - i0, D, dtype=dtype, device=q.device)
        hi = min(i1, S) if causal else S  # keys at or past i1 are in the future of every row here
        for j0 in range(0, hi, block_k):
            j1 = min(j0 + block_k, hi)
            s = q_tile @ k[:, :, j0:j1].to(dtype).transpose(-2, -1)  # (B, H, block_q, block_k)
            if causal:
                s = s.masked_fill(_future(i0, i1, j0, j1, q.device), float("-inf"))
            m_new = torch.maximum(m_i, s.amax(dim=-1))
            alpha = torch.exp(m_i - m_new)
            p = torch.exp(s - m_new[..., None])  # (B, H, block_q, block_k)
            l_i = l_i * alpha + p.sum(dim=-1)
            acc = acc * alpha[..., None] + p @ v[:, :, j0:j1].to(dtype)
            m_i = m_new
        out[:, :, i0:i1] = acc / l_i[..., None]
        lse[:, :, i0:i1] = m_i + torch.log(l_i)
    return out, lse


# ---------------------------------------------------------------- step 3
def flash_attention_backward(q, k, v, out, lse, dout, causal=False, block_q=16, block_k=16):
    """Gradients of attention, recomputing the probabilities of each tile from `lse`.

    Method: Dao et al., "FlashAttention" (2022), algorithm 4 (appendix B.4): key tiles outer,
    query tiles inner.

    Args:
        q, k, v, causal, block_q, block_k: as in flash_attention_forward.
        out: (B, H, T, D), its first result.
        lse: (B, H, T), its second result.
        dout: (B, H, T, D), gradient of the loss with respect to out; any strides.

    Returns:
        (dq, dk, dv) in the shapes and dtypes of q, k, v.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or a block size below 1.
    """
    check_qkv(q, k, v, causal)
    check_blocks(block_q=block_q, block_k=block_k)
    T, D = q.shape[2:]
    S = k.shape[2]
    scale = 1.0 / math.sqrt(D)
    dtype = lse.dtype
    delta = (out.to(dtype) * dout.to(dtype)).sum(dim=-1)  # (B, H, T)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    for j0 in range(0, S, block_k):
        j1 = min(j0 + block_k, S)
        k_tile = k[:, :, j0:j1].to(dtype)  # (B, H, block_k, D)
        v_tile = v[:, :, j0:j1].to(dtype)  # (B, H, block_k, D)
        dk_acc = torch.zeros_like(k_tile)
        dv_acc = torch.zeros_like(v_tile)
        # Causal: query tiles that end before this key tile begins see nothing of it.
        lo = j0 // block_q * block_q if causal else 0
        for i0 in range(lo, T, block_q):
            i1 = min(i0 + block_q, T)
            q_tile = q[:, :, i0:i1].to(dtype)  # (B, H, block_q, D)
            dout_tile = dout[:, :, i0:i1].to(dtype)  # (B, H, block_q, D)
            s = q_tile @ k_tile.transpose(-2, -1) * scale  # (B, H, block_q, block_k)
            if causal:
                s = s.masked_fill(_future(i0, i1, j0, j1, q.device), float("-inf"))
            p = torch.exp(s - lse[:, :, i0:i1, None])  # (B, H, block_q, block_k)
            dv_acc += p.transpose(-2, -1) @ dout_tile
            dp = dout_tile @ v_tile.transpose(-2, -1)  # (B, H, block_q, block_k)
            ds = p * (dp - delta[:, :, i0:i1, None])  # (B, H, block_q, block_k)
            dq[:, :, i0:i1] += ds @ k_tile * scale
            dk_acc += ds.transpose(-2, -1) @ q_tile * scale
        dk[:, :, j0:j1] = dk_acc
        dv[:, :, j0:j1] = dv_acc
    return dq.to(q.dtype), dk, dv


class FlashAttention(torch.autograd.Function):
    """Joins steps 2 and 3 for autograd. Saves q, k, v, out and lse: nothing of size T x S."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False):
        out, lse = flash_attention_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = flash_attention_backward(q, k, v, out, lse, dout, ctx.causal)
        return dq, dk, dv, None


def flash_attention(q, k, v, causal=False):
    """Differentiable tiled attention: out (B, H, T, D). Arguments as flash_attention_forward."""
    return FlashAttention.apply(q, k, v, causal)


# ---------------------------------------------------------------- step 4
if triton is not None:

    @triton.jit
    def _softmax_kernel(
        x_ptr,
        y_ptr,
        stride_xr,
        stride_yr,
        n_cols,
        BLOCK: tl.constexpr,
    ):
        # The row number is int64: times a stride it can pass 2**31.
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(x_ptr + row * stride_xr + cols, mask=mask, other=float("-inf"))  # (BLOCK,)
        x = x.to(tl.float32)
        p = tl.exp(x - tl.max(x, axis=0))  # (BLOCK,)
        y = p / tl.sum(p, axis=0)  # (BLOCK,)
        tl.store(y_ptr + row * stride_yr + cols, y, mask=mask)


def triton_softmax(x):
    """Softmax over the rows of a matrix, each row read once and written once.

    Args:
        x: (R, C) float16, bfloat16 or float32, with C <= 65,536. Rows may lie any distance apart;
            elements of a row are made adjacent if they are not.

    Returns:
        (R, C) in the dtype of x. A row with NaN, +inf, or -inf only is NaN, as in torch.softmax.

    Raises:
        ValueError: not 2-D, empty, not one of these dtypes, or rows wider than one program's block.
    """
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"x must be a matrix that is not empty: got shape {tuple(x.shape)}")
    check_kernel_dtype(x=x)
    n_rows, n_cols = x.shape
    if n_cols > 65_536:
        raise ValueError(
            f"rows of at most 65,536 columns: got {n_cols}; one program holds its whole row in "
            "registers, and a wider one needs a loop (step 1's recurrence)"
        )
    check_launch(x=x)
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(n_cols)
    num_warps = 2 if block <= 1024 else 4 if block <= 4096 else 16
    with torch.cuda.device_of(x):  # the current device may be another GPU
        _softmax_kernel[(n_rows,)](
            x, y, x.stride(0), y.stride(0), n_cols, BLOCK=block, num_warps=num_warps
        )
    return y


# ---------------------------------------------------------------- step 5
if triton is not None:

    @triton.jit
    def _flash_fwd_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        stride_bh,
        stride_t,
        T,
        scale,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
    ):
        pid_m = tl.program_id(0)
        pid_bh = tl.program_id(1).to(tl.int64)
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_d = tl.arange(0, D)  # (D,)
        rows = pid_bh * stride_bh + offs_m.to(tl.int64) * stride_t  # (BLOCK_M,)
        q_ptrs = q_ptr + rows[:, None] + offs_d[None, :]  # (BLOCK_M, D)
        tile = pid_bh * stride_bh + offs_n[:, None] * stride_t + offs_d[None, :]  # (BLOCK_N, D)
        k_ptrs = k_ptr + tile  # (BLOCK_N, D)
        v_ptrs = v_ptr + tile  # (BLOCK_N, D)
        q = tl.load(q_ptrs, mask=offs_m[:, None] < T, other=0.0)  # (BLOCK_M, D)

        # Running state of the query tile: row maximum, row sum, unnormalised output.
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        hi = T
        if CAUSAL:
            hi = tl.minimum(T, (pid_m + 1) * BLOCK_M)  # later keys are in the future of every row
        for start_n in range(0, hi, BLOCK_N):
            cols = start_n + offs_n  # (BLOCK_N,)
            k = tl.load(k_ptrs, mask=cols[:, None] < T, other=0.0)  # (BLOCK_N, D)
            s = tl.dot(q, tl.trans(k)) * scale  # (BLOCK_M, BLOCK_N)
            visible = cols[None, :] < T  # (1, BLOCK_N): padding keys are not keys
            if CAUSAL:
                visible = visible & (cols[None, :] <= offs_m[:, None])  # (BLOCK_M, BLOCK_N)
            s = tl.where(visible, s, float("-inf"))  # (BLOCK_M, BLOCK_N)
            # Key 0 comes first and every row sees it: m_new is finite from the first tile on.
            m_new = tl.maximum(m_i, tl.max(s, axis=1))  # (BLOCK_M,)
            alpha = tl.exp(m_i - m_new)  # (BLOCK_M,)
            p = tl.exp(s - m_new[:, None])  # (BLOCK_M, BLOCK_N)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            v = tl.load(v_ptrs, mask=cols[:, None] < T, other=0.0)  # (BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            m_i = m_new
            k_ptrs += BLOCK_N * stride_t
            v_ptrs += BLOCK_N * stride_t

        out = acc / l_i[:, None]  # (BLOCK_M, D)
        out_ptrs = out_ptr + rows[:, None] + offs_d[None, :]  # (BLOCK_M, D)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < T)
        lse_ptrs = lse_ptr + pid_bh * T + offs_m  # (BLOCK_M,)
        tl.store(lse_ptrs, m_i + tl.log(l_i), mask=offs_m < T)


def triton_flash_attention(
    q, k, v, causal=False, block_m=16, block_n=16, num_warps=4, num_stages=2
):
    """FlashAttention forward, one program for each tile of queries of one (batch, head).

    Method: Dao, "FlashAttention-2" (2023), algorithm 1.

    Args:
        q, k, v: (B, H, T, D) of one shape; float16, bfloat16 or float32 (float32 products may run
            in TF32 on a GPU); D a power of two from 16 to 256; any T; B * H at most 65,535. Made
            contiguous if they are not.
        causal: query i sees keys 0 to i only.
        block_m, block_n: rows of a query tile and of a key tile; powers of two from 16 up.
        num_warps, num_stages: Triton's: warps of a program, and key tiles in flight.

    Returns:
        out: (B, H, T, D) in the dtype of q.
        lse: (B, H, T) float32.

    Raises:
        ValueError: the above does not hold.
    """
    check_qkv(q, k, v, causal)
    check_kernel_dtype(q=q, k=k, v=v)
    B, H, T, D = q.shape
    if k.shape != q.shape:
        raise ValueError(f"q, k, v must have one shape: got q {tuple(q.shape)}, k {tuple(k.shape)}")
    check_head_dim(D)
    if B * H > MAX_GRID_YZ:
        raise ValueError(f"B * H must be at most {MAX_GRID_YZ:,} (grid axis 1): got {B * H:,}")
    check_kernel_blocks(block_m=block_m, block_n=block_n)
    check_launch(q=q, k=k, v=v)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(T, block_m), B * H)
    with torch.cuda.device_of(q):  # the current device may be another GPU
        _flash_fwd_kernel[grid](
            q,
            k,
            v,
            out,
            lse,
            T * D,
            D,
            T,
            1.0 / math.sqrt(D),
            D=D,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            CAUSAL=causal,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return out, lse
