"""Lab 04, reference: five Triton kernels to read everything after.

Each step is a kernel, what one program does, beside the function that launches it. Matrices are
(M, N): M rows of N columns. Strides count elements. Each program does its own part only. Sizes and
strides of the data stay run-time numbers, and nothing is computed in float64.
"""

from __future__ import annotations

import math

import torch

from labs._harness.checks import MAX_GRID_YZ, check_kernel_blocks, check_kernel_dtype
from labs._harness.runtime import check_launch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS: nothing of this lab runs
    triton = None

MAX_TILE = 65_536  # elements of a tile; as float32 they fill a multiprocessor's registers


def _check_tile(**sides):
    """Raises ValueError unless the sides are powers of two from 16 up that make no huge tile."""
    check_kernel_blocks(**sides)
    if math.prod(sides.values()) > MAX_TILE:
        got = ", ".join(f"{name}={side}" for name, side in sides.items())
        raise ValueError(f"a tile must have at most {MAX_TILE:,} elements: got {got}")


def _check_matrix(x):
    """Raises ValueError unless x is a matrix that is not empty, of a dtype that kernels take."""
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"x must be a matrix that is not empty: got shape {tuple(x.shape)}")
    check_kernel_dtype(x=x)


def _check_grid(N, block_n):
    """Raises ValueError where the tiles beside each other do not fit on grid axis 1."""
    tiles = triton.cdiv(N, block_n)
    if tiles > MAX_GRID_YZ:
        raise ValueError(
            f"at most {MAX_GRID_YZ:,} tiles beside each other (grid axis 1): got {tiles:,}, from "
            f"{N:,} columns and block_n={block_n}"
        )


# ---------------------------------------------------------------- step 1
if triton is not None:

    @triton.jit
    def _add_kernel(
        x_ptr,
        y_ptr,
        out_ptr,
        N,
        BLOCK: tl.constexpr,
    ):
        # The program's number is int64: times BLOCK it can pass 2**31.
        pid = tl.program_id(0).to(tl.int64)
        offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
        mask = offs < N  # (BLOCK,)
        x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
        y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
        tl.store(out_ptr + offs, x + y, mask=mask)


def vector_add(x, y, block=1024):
    """Sum of two vectors, a program a block, each element read once and written once.

    Args:
        x, y: (N,) of one length, float16, bfloat16 or float32. Made contiguous if they are not.
        block: elements of a program; a power of two from 16 to 65,536.

    Returns:
        (N,) in the dtype of x: x + y, rounded once.

    Raises:
        ValueError: not 1-D, empty, not of one length, dtype and device; a bad block.
    """
    if x.dim() != 1 or x.numel() == 0 or x.shape != y.shape:
        raise ValueError(
            "x and y must be vectors of one length that are not empty: got shapes "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        )
    check_kernel_dtype(x=x, y=y)
    _check_tile(block=block)
    check_launch(x=x, y=y)
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    N = x.numel()
    with torch.cuda.device_of(x):  # the current device may be another GPU
        _add_kernel[(triton.cdiv(N, block),)](x, y, out, N, BLOCK=block)
    return out


# ---------------------------------------------------------------- step 2
if triton is not None:

    @triton.jit
    def _row_sum_kernel(
        x_ptr,
        out_ptr,
        stride_xm,
        N,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)  # (BLOCK,)
        x = tl.load(x_ptr + row * stride_xm + cols, mask=cols < N, other=0.0)  # (BLOCK,)
        tl.store(out_ptr + row, tl.sum(x.to(tl.float32), axis=0))


def row_sum(x):
    """Sum of each row, a program a row, accumulated in float32; each element is read once.

    Args:
        x: (M, N) float16, bfloat16 or float32, with N <= 65,536. Rows may lie any distance apart;
            elements of a row are made adjacent if they are not.

    Returns:
        (M,) float32. A row with NaN or infinities sums to what torch.sum says.

    Raises:
        ValueError: not 2-D, empty, not one of these dtypes, or rows wider than one program's block.
    """
    _check_matrix(x)
    M, N = x.shape
    if N > MAX_TILE:
        raise ValueError(
            f"rows of at most {MAX_TILE:,} columns: got {N:,}; one program holds its whole "
            "row, and a wider one needs a loop (step 5)"
        )
    check_launch(x=x)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(M, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(N)
    num_warps = 4 if block <= 4096 else 16
    with torch.cuda.device_of(x):
        _row_sum_kernel[(M,)](x, out, x.stride(0), N, BLOCK=block, num_warps=num_warps)
    return out


# ---------------------------------------------------------------- step 3
if triton is not None:

    @triton.jit
    def _copy_kernel(
        x_ptr,
        out_ptr,
        stride_xm,
        stride_xn,
        stride_om,
        stride_on,
        M,
        N,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
    ):
        pid_m = tl.program_id(0).to(tl.int64)
        pid_n = tl.program_id(1).to(tl.int64)
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)  # (BLOCK_M, BLOCK_N)
        # Tiles of pointers, (BLOCK_M, BLOCK_N) each.
        x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :] * stride_xn
        out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :] * stride_on
        x = tl.load(x_ptrs, mask=mask)  # (BLOCK_M, BLOCK_N)
        tl.store(out_ptrs, x, mask=mask)


def copy_2d(x, block_m=64, block_n=64):
    """Contiguous copy of a matrix with any strides: a slice, an expanded row, a transposed view.

    A program copies one tile, which it loads at once.

    Args:
        x: (M, N) float16, bfloat16 or float32, any strides; read as it lies in memory.
        block_m, block_n: rows and columns of a program's tile; powers of two from 16 up, at most
            65,536 elements together. At most 65,535 tiles beside each other.

    Returns:
        (M, N) in the dtype of x, contiguous, bit for bit the elements of x, each NaN as it was.

    Raises:
        ValueError: not 2-D, empty, not one of these dtypes; bad blocks, or too many tiles.
    """
    _check_matrix(x)
    _check_tile(block_m=block_m, block_n=block_n)
    M, N = x.shape
    check_launch(x=x)
    _check_grid(N, block_n)
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, block_m), triton.cdiv(N, block_n))
    with torch.cuda.device_of(x):
        _copy_kernel[grid](
            x, out, *x.stride(), *out.stride(), M, N, BLOCK_M=block_m, BLOCK_N=block_n
        )
    return out


# ---------------------------------------------------------------- step 4
def bias_silu_unfused(x, bias):
    """What step 4 does in one kernel, in three PyTorch operations: three passes over memory.

    Args:
        x: (M, N). bias: (N,).

    Returns:
        (M, N): z / (1 + exp(-z)) with z = x + bias.
    """
    z = x + bias
    gate = torch.sigmoid(z)
    return z * gate


if triton is not None:

    @triton.jit
    def _bias_silu_kernel(
        x_ptr,
        bias_ptr,
        out_ptr,
        stride_xm,
        stride_om,
        M,
        N,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
    ):
        pid_m = tl.program_id(0).to(tl.int64)
        pid_n = tl.program_id(1).to(tl.int64)
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)  # (BLOCK_M, BLOCK_N)
        x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]  # (BLOCK_M, BLOCK_N)
        out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :]  # (BLOCK_M, BLOCK_N)
        x = tl.load(x_ptrs, mask=mask)  # (BLOCK_M, BLOCK_N)
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N)  # (BLOCK_N,)
        z = x.to(tl.float32) + bias.to(tl.float32)[None, :]  # (BLOCK_M, BLOCK_N)
        out = z / (1.0 + tl.exp(-z))  # (BLOCK_M, BLOCK_N)
        tl.store(out_ptrs, out, mask=mask)


def bias_silu(x, bias, block_m=32, block_n=128):
    """SiLU of x + bias in one kernel: x is read once, the result written once.

    The function: z = x + bias and out = z / (1 + exp(-z)), both in float32, rounded once. Each
    element is right to 1 ulp of its dtype and to what float32 loses in z and exp. A program does
    one tile.
    Method: Elfwing, Uchibe and Doya (2018), "Sigmoid-weighted linear units for neural network
    function approximation in reinforcement learning", section 2.

    Args:
        x: (M, N) float16, bfloat16 or float32. Rows may lie any distance apart; elements of a row
            are made adjacent if they are not.
        bias: (N,), dtype and device of x; made contiguous if it is not. Each tile reads its part
            of it once.
        block_m, block_n: as in copy_2d.

    Returns:
        (M, N) in the dtype of x, contiguous. Where z is NaN or -inf it is NaN, as in
        torch.nn.functional.silu.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; bad blocks, or too many tiles.
    """
    _check_matrix(x)
    M, N = x.shape
    if tuple(bias.shape) != (N,):
        raise ValueError(f"bias must be ({N},), a number a column: got {tuple(bias.shape)}")
    check_kernel_dtype(bias=bias)
    _check_tile(block_m=block_m, block_n=block_n)
    check_launch(x=x, bias=bias)
    _check_grid(N, block_n)
    if x.stride(1) != 1:
        x = x.contiguous()
    bias = bias.contiguous()
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, block_m), triton.cdiv(N, block_n))
    with torch.cuda.device_of(x):
        _bias_silu_kernel[grid](
            x,
            bias,
            out,
            x.stride(0),
            out.stride(0),
            M,
            N,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
        )
    return out


# ---------------------------------------------------------------- step 5
if triton is not None:

    @triton.jit
    def _row_max_kernel(
        x_ptr,
        out_ptr,
        stride_xm,
        N,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        offs = tl.arange(0, BLOCK)  # (BLOCK,)
        # Running state: lane i holds the largest element seen of columns i, i + BLOCK, ...
        m_i = tl.full((BLOCK,), float("-inf"), tl.float32)  # (BLOCK,)
        for start in range(0, N, BLOCK):
            cols = start + offs  # (BLOCK,)
            x_ptrs = x_ptr + row * stride_xm + cols  # (BLOCK,)
            x = tl.load(x_ptrs, mask=cols < N, other=float("-inf")).to(tl.float32)
            m_i = tl.maximum(m_i, x, propagate_nan=tl.PropagateNan.ALL)
        # tl.max passes over NaN; only NaN differs from itself.
        has_nan = tl.max((m_i != m_i).to(tl.int32), axis=0)
        m = tl.where(has_nan > 0, float("nan"), tl.max(m_i, axis=0))
        tl.store(out_ptr + row, m)


def row_max(x, block=1024):
    """Maximum of each row, a program a row, a block at a time; each element is read once.

    Args:
        x: (M, N) float16, bfloat16 or float32, any N. Rows may lie any distance apart; elements of
            a row are made adjacent if they are not.
        block: columns that a program looks at in one turn of its loop; a power of two from 16 to
            65,536. It may be larger than N.

    Returns:
        (M,) in the dtype of x. A row with a NaN gives NaN and a row of -inf gives -inf, as in
        torch.amax.

    Raises:
        ValueError: not 2-D, empty, not one of these dtypes; a bad block.
    """
    _check_matrix(x)
    _check_tile(block=block)
    check_launch(x=x)
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    out = torch.empty(M, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _row_max_kernel[(M,)](x, out, x.stride(0), N, BLOCK=block)
    return out
