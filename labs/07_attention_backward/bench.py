"""What `python -m labs xray 07` compiles."""


def launches(
    ab, block_m=64, block_n=64, num_warps=4, num_stages=2, head_dim=64, dtype="float16", causal=True
):
    import torch

    kind = getattr(torch, dtype)
    q = torch.empty(1, 2, 2 * max(block_m, block_n), head_dim, dtype=kind)
    row = torch.empty(q.shape[:3], dtype=torch.float32)
    sizes = {
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    return {
        "attention_delta": lambda: ab.attention_delta(q, q),
        "attention_forward": lambda: ab.attention_forward(q, q, q, causal, **sizes),
        "attention_dkdv": lambda: ab.attention_dkdv(q, q, q, q, row, row, causal, **sizes),
        "attention_dq": lambda: ab.attention_dq(q, q, q, q, row, row, causal, **sizes),
    }
