"""Lab 06, your file: from an online softmax to FlashAttention in Triton.

Write the five places marked TODO, in order; everything else is given. The handout, README.md beside
this file, leads through them. See where you stand with: pytest labs/06_attention_kernels

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
    # TODO step 1 (about 12 lines; handout section 2)
    #   state: m = -inf and l = 0, made like the first block
    #   each block: the new maximum; what that makes of the old l; the new terms of the sum
    #   mind: an empty block, a block of -inf only, and no block at all
    raise NotImplementedError("lab 06 step 1: write online_softmax_stats")


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
    # TODO step 2 (about 25 lines; handout section 3)
    #   for each tile of block_q queries: m_i, l_i, acc in float32 (float64 for float64 inputs)
    #     for each tile of block_k keys it may see: scores, mask, new maximum, rescale, accumulate
    #     then out and lse of the tile; the last tile of either loop may be short
    raise NotImplementedError("lab 06 step 2: write flash_attention_forward")


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
    # TODO step 3 (about 30 lines; handout section 4)
    #   delta once, for all rows
    #   for each tile of block_k keys: its dk and dv accumulate in one place
    #     for each tile of block_q queries that sees it: recompute p, then dv, dp, ds, dq, dk
    raise NotImplementedError("lab 06 step 3: write flash_attention_backward")


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
        # TODO step 4 (about 9 lines; handout section 5): one program, one row
        #   this program's row number, as int64; the columns and which of them exist
        #   load the row, subtract its maximum, exponentiate, divide, store
        tl.static_assert(False, "lab 06 step 4: write _softmax_kernel")


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
        # TODO step 5 (about 40 lines; handout section 6): one program, BLOCK_M queries of one head
        #   program_id(0) is the query tile, program_id(1) the head among B * H, as int64
        #   element (bh, t, d) of q, k, v and out lies at bh * stride_bh + t * stride_t + d;
        #   lse is (B * H, T), contiguous
        #   load q once; loop over key tiles as in step 2, with masks where T ends; store out, lse
        tl.static_assert(False, "lab 06 step 5: write _flash_fwd_kernel")


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
