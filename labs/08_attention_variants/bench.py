"""What `python -m labs bench 08` compares: a sliding window, grouped heads, and packed sequences.

Formulas are those of the handout, in bytes, for elements of e bytes.
"""

from __future__ import annotations

import torch


def launches(
    av, block_m=64, block_n=64, num_warps=4, num_stages=2, head_dim=64, dtype="float16", window=100
) -> dict:
    """Launcher name -> a call that launches its kernel once, for the X-ray to compile."""
    kind = getattr(torch, dtype)
    q = torch.empty(1, 4, 2 * block_m, head_dim, dtype=kind)
    kv = torch.empty(1, 2, 2 * block_m, head_dim, dtype=kind)
    packed, packed_kv = (x[0].transpose(0, 1).contiguous() for x in (q, kv))
    cu = torch.tensor([0, 7, 2 * block_m], dtype=torch.int32)
    config = dict(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
    return {
        "attention": lambda: av.attention(q, kv, kv, **config),
        "attention, window": lambda: av.attention(q, kv, kv, window=window, **config),
        "varlen_attention": lambda: av.varlen_attention(
            packed, packed_kv, packed_kv, cu, cu, **config
        ),
    }
