"""What attention functions refuse before they compute: each message says wanted and got."""

from __future__ import annotations

import torch

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_GRID_YZ = 65_535  # programs along grid axes 1 and 2


def check_qkv(q, k, v, causal=False, *, grouped=False, free_value_dim=False) -> None:
    """Refuses q, k, v that do not fit together.

    Args:
        q: wanted (B, H, T, D). k: (B, H, S, D). v: (B, H, S, D).
        causal: whether T == S is needed, as where query i sees keys 0 to i.
        grouped: whether k and v may have fewer heads, H a multiple of theirs.
        free_value_dim: whether v may have another head dim than q and k.

    Raises:
        ValueError: rank, shapes, dtypes or devices; an empty tensor; not floating point.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dim() != 4:
            raise ValueError(f"{name} must be (B, H, T, D): got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point: got {x.dtype}")
        if x.numel() == 0:
            raise ValueError(f"{name} must not be empty: got {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"q, k, v must have one dtype: got q {q.dtype}, {name} {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k, v must be on one device: got q {q.device}, {name} {x.device}")
    B, H, T, D = q.shape
    _, heads, S, _ = k.shape
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    value_dim = v.shape[-1] if free_value_dim else D
    if tuple(k.shape) != (B, heads, S, D) or tuple(v.shape) != (B, heads, S, value_dim):
        raise ValueError(f"k and v must be (B, H, S, D) with B and D of q: got {shapes}")
    if heads != H and not grouped:
        raise ValueError(f"q, k and v must have as many heads: got {shapes}")
    if H % heads:
        raise ValueError(f"the heads of q must be a multiple of those of k and v: got {shapes}")
    if causal and T != S:
        raise ValueError(f"causal needs as many keys as queries: got T={T}, S={S}")


def check_blocks(**sizes) -> None:
    """Raises ValueError unless every block size, given by name, is a whole number from 1 up."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number from 1 up: got {size!r}")


def check_kernel_blocks(**sizes) -> None:
    """Raises ValueError unless every block size, given by name, is a power of two from 16 up."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 16 or size & (size - 1):
            raise ValueError(f"{name} must be a power of two from 16 up: got {size!r}")


def check_kernel_dtype(**tensors) -> None:
    """Raises ValueError unless every tensor, given by name, has a dtype that kernels compute in."""
    for name, x in tensors.items():
        if x.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{name} must be float16, bfloat16 or float32: got {x.dtype}")


def check_head_dim(D: int) -> None:
    """Raises ValueError unless a kernel's tile can be D wide."""
    if D not in KERNEL_HEAD_DIMS:
        raise ValueError(f"head dim D must be a power of two from 16 to 256: got {D}")
