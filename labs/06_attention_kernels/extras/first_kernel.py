"""A complete first Triton kernel: C = A B^T. Section 5 of the handout walks through it.

Run it from the repository root, with or without a GPU:
    python -m labs.06_attention_kernels.extras.first_kernel
"""

from __future__ import annotations

import torch

from labs._harness.runtime import setup  # before Triton: chooses its CPU interpreter if need be

import triton  # isort: skip
import triton.language as tl  # isort: skip


# handout: begin
@triton.jit
def matmul_nt_kernel(
    a_ptr, b_ptr, c_ptr,                             # pointers to element 0 of each tensor
    stride_am, stride_bn, stride_cm,                 # elements from one row to the next
    M, N, K,                                         # sizes, known at run time
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_m = tl.program_id(0).to(tl.int64)  # which tile of C is mine?
    pid_n = tl.program_id(1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,) my rows of A
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,) my rows of B
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :]  # (BLOCK_M, BLOCK_K)
    b_ptrs = b_ptr + offs_n[:, None] * stride_bn + offs_k[None, :]  # (BLOCK_N, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):  # K is a run-time number
        k_ok = start + offs_k[None, :] < K  # (1, BLOCK_K)
        a = tl.load(a_ptrs, mask=(offs_m[:, None] < M) & k_ok, other=0.0)
        b = tl.load(b_ptrs, mask=(offs_n[:, None] < N) & k_ok, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc)  # (BLOCK_M, BLOCK_N), acc + a b^T
        a_ptrs += BLOCK_K  # the next BLOCK_K columns
        b_ptrs += BLOCK_K
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    c_ok = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=c_ok)


# handout: end


def matmul_nt(a, b, block_m=16, block_n=32, block_k=16):
    """a b^T for matrices with adjacent row elements.

    Args:
        a: (M, K) float16 or float32.
        b: (N, K), dtype and device of a.

    Returns:
        (M, N) in the dtype of a.
    """
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, block_m), triton.cdiv(N, block_n))
    matmul_nt_kernel[grid](
        a, b, c, a.stride(0), b.stride(0), c.stride(0), M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return c


if __name__ == "__main__":
    device = setup().device
    a = torch.randint(-3, 4, (37, 50), device=device).half()
    b = torch.randint(-3, 4, (20, 50), device=device).half()
    error = (matmul_nt(a, b).double() - a.double() @ b.double().T).abs().max().item()
    print(f"{setup().kernels_run_on}\nlargest error: {error}")
