"""Lab 09, reference: flash decoding, one query against a long cache of keys and values.

Steps 1 and 2 are PyTorch: partial results and how they merge. Steps 3 and 4 are two Triton
kernels. Steps 5 and 6 put the cache into pages and decode with it.
Letters: B batch, H query heads, H_kv key heads, G = H / H_kv heads of a group, T query length, S
key length, D head dim. `lse` is the natural logarithm of the sum of exponentials of the scaled
scores.
"""

from __future__ import annotations

import math

import torch

from labs._harness.checks import (
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
except ImportError:  # macOS: steps 1 and 2 and append_kv still run
    triton = None

# Programs given to a multiprocessor, all of which run at once. Through a page table fewer loads
# are in flight in each, so it takes more of them.
PROGRAMS_PER_SM, PAGED_PROGRAMS_PER_SM = 2, 4
NUM_STAGES, PAGED_WARPS, PAGED_STAGES = 3, 4, 2
EXAMPLE_CARD = 30  # multiprocessors of the handout's card; used where there is no card


# ---------------------------------------------------------------- step 1
def _check_parts(ms, ls, accs):
    if ms.dim() < 1 or ms.shape[0] == 0:
        raise ValueError(f"at least one part is needed, along axis 0: got shape {tuple(ms.shape)}")
    if ls.shape != ms.shape or accs.shape[:-1] != ms.shape:
        shapes = f"{tuple(ms.shape)}, {tuple(ls.shape)} and {tuple(accs.shape)}"
        raise ValueError(f"shapes must be (C, ...), (C, ...) and (C, ..., D): got {shapes}")


def merge_accumulators(ms, ls, accs):
    """Merges partial results of attention over C chunks of keys, as the chunks carry them.

    Method: Dao et al., "Flash-Decoding for long-context inference" (2023); the rule itself is the
    recurrence of Milakov and Gimelshein (2018), section 3, on whole chunks.

    Args:
        ms: (C, ...) largest score of each chunk. -inf means that the chunk is empty, whatever its
            other two values hold, NaN included.
        ls: (C, ...) sum of exp(score - m) over the chunk.
        accs: (C, ..., D) sum of exp(score - m) * value over the chunk.

    Returns:
        (m, l, acc) of all chunks together, of shapes (...), (...), (..., D): a partial result like
        any other. If all chunks are empty, (-inf, 0, 0).

    Raises:
        ValueError: there is no chunk, or shapes do not fit together.
    """
    _check_parts(ms, ls, accs)
    empty = ms == float("-inf")  # (C, ...)
    m = ms.amax(dim=0)
    # Where all chunks are empty, exp(-inf - (-inf)) would be NaN.
    weights = torch.exp(ms - m.masked_fill(m == float("-inf"), 0.0))  # (C, ...)
    l = (weights * ls.masked_fill(empty, 0.0)).sum(dim=0)
    acc = (weights[..., None] * accs.masked_fill(empty[..., None], 0.0)).sum(dim=0)
    return m, l, acc


def merge_states(outs, lses):
    """Merges normalised partial results of attention over C chunks of keys.

    Args:
        outs: (C, ..., D) output of each chunk; may be NaN where the chunk is empty.
        lses: (C, ...) float32 or float64, its log-sum-exp; -inf where the chunk is empty.

    Returns:
        out: (..., D) in the dtype of outs; 0 where all chunks are empty.
        lse: (...) in the dtype of lses; -inf there.

    Raises:
        ValueError: there is no chunk, or shapes do not fit together.
    """
    _check_parts(lses, lses, outs)
    # A softmax over the chunk is a partial result with m = lse and l = 1.
    m, l, acc = merge_accumulators(lses, torch.ones_like(lses), outs.to(lses.dtype))
    out = acc / l.masked_fill(l == 0.0, 1.0)[..., None]
    return out.to(outs.dtype), m + torch.log(l)


# ---------------------------------------------------------------- step 2
def split_attention(q, k, v, n_splits):
    """Attention with the keys cut into n_splits chunks of nearly equal length, merged at the end.

    Args:
        q: (B, H, T, D) floating point.
        k, v: (B, H_kv, S, D), dtype and device of q; H a multiple of H_kv. Query head h reads key
            head h // G.
        n_splits: number of chunks, from 1 up; there may be more chunks than keys.

    Returns:
        out: (B, H, T, D) in the dtype of q.
        lse: (B, H, T) float32, or float64 for float64 inputs.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or n_splits is below 1.
    """
    check_qkv(q, k, v, grouped=True)
    check_blocks(n_splits=n_splits)
    B, H, T, D = q.shape
    H_kv, S = k.shape[1:3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # The queries of a group are rows of one tile: k and v are never copied for each head.
    rows = q.reshape(B, H_kv, H // H_kv * T, D).to(dtype) / math.sqrt(D)  # (B, H_kv, G * T, D)
    parts = []
    for c in range(n_splits):
        lo, hi = c * S // n_splits, (c + 1) * S // n_splits
        if lo == hi:
            continue  # an empty chunk changes nothing
        s = rows @ k[:, :, lo:hi].to(dtype).transpose(-2, -1)  # (B, H_kv, G * T, hi - lo)
        m = s.amax(dim=-1)
        p = torch.exp(s - m[..., None])  # (B, H_kv, G * T, hi - lo)
        parts.append((m, p.sum(dim=-1), p @ v[:, :, lo:hi].to(dtype)))
    m, l, acc = merge_accumulators(*(torch.stack(x) for x in zip(*parts, strict=True)))
    out = (acc / l[..., None]).to(q.dtype)
    return out.reshape(B, H, T, D), (m + torch.log(l)).reshape(B, H, T)


# ---------------------------------------------------------------- step 3
if triton is not None:

    @triton.jit
    def _split_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        m_ptr,
        l_ptr,
        acc_ptr,
        stride_qb,
        stride_qh,
        stride_kb,
        stride_kh,
        stride_ks,
        stride_vb,
        stride_vh,
        stride_vs,
        H_kv,
        S,
        n_splits,
        scale,
        G: tl.constexpr,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        PDL: tl.constexpr,
    ):
        # Ids are int64: times a stride they can pass 2**31.
        pid = tl.program_id(0).to(tl.int64)  # (b * H_kv + h) * n_splits + split
        split, pid_bh = pid % n_splits, pid // n_splits
        b, h = pid_bh // H_kv, pid_bh % H_kv
        offs_m = tl.arange(0, BLOCK_M)  # (BLOCK_M,) heads of the group, then padding
        offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_d = tl.arange(0, D)  # (D,)
        heads = h * G + offs_m  # (BLOCK_M,)
        q_ptrs = q_ptr + b * stride_qb + heads[:, None] * stride_qh + offs_d[None, :]
        if PDL:  # only arithmetic so far; what is read from here on may be another kernel's
            tl.extra.cuda.gdc_wait()
        q = tl.load(q_ptrs, mask=offs_m[:, None] < G, other=0.0)  # (BLOCK_M, D)

        # Whole tiles are dealt out, so that only the last chunk can have a ragged one.
        n_tiles = tl.cdiv(S, BLOCK_N)
        lo = (split * n_tiles // n_splits).to(tl.int32) * BLOCK_N
        hi = ((split + 1) * n_tiles // n_splits).to(tl.int32) * BLOCK_N
        keys = (lo + offs_n).to(tl.int64)  # (BLOCK_N,)
        k_ptrs = k_ptr + b * stride_kb + h * stride_kh + keys[:, None] * stride_ks + offs_d[None, :]
        v_ptrs = v_ptr + b * stride_vb + h * stride_vh + keys[:, None] * stride_vs + offs_d[None, :]

        # Running state of the group: row maximum, row sum, unnormalised output.
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        if PDL:  # the next kernel may begin; it waits for the end of this one
            tl.extra.cuda.gdc_launch_dependents()
        for start_n in range(lo, hi, BLOCK_N):
            visible = start_n + offs_n < S  # (BLOCK_N,)
            k = tl.load(k_ptrs, mask=visible[:, None], other=0.0)  # (BLOCK_N, D)
            s = tl.dot(q, tl.trans(k)) * scale  # (BLOCK_M, BLOCK_N)
            s = tl.where(visible[None, :], s, float("-inf"))  # (BLOCK_M, BLOCK_N)
            # A tile that is visited holds a key: m_new is finite from the first one on.
            m_new = tl.maximum(m_i, tl.max(s, axis=1))  # (BLOCK_M,)
            alpha = tl.exp(m_i - m_new)  # (BLOCK_M,)
            p = tl.exp(s - m_new[:, None])  # (BLOCK_M, BLOCK_N)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            v = tl.load(v_ptrs, mask=visible[:, None], other=0.0)  # (BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            m_i = m_new
            k_ptrs += BLOCK_N * stride_ks
            v_ptrs += BLOCK_N * stride_vs

        # Stored also where the chunk is empty: then it says -inf, 0, 0.
        rows = (split * (tl.num_programs(0) // n_splits) + pid_bh) * G + offs_m  # (BLOCK_M,)
        m_i = tl.where(l_i == l_i, m_i, l_i)  # a maximum drops NaN, and -inf would say "empty"
        tl.store(m_ptr + rows, m_i, mask=offs_m < G)
        tl.store(l_ptr + rows, l_i, mask=offs_m < G)
        acc_ptrs = acc_ptr + rows[:, None] * D + offs_d[None, :]  # (BLOCK_M, D)
        tl.store(acc_ptrs, acc, mask=offs_m[:, None] < G)


def split_partials(q, k, v, n_splits, block_n=None, num_warps=None, num_stages=NUM_STAGES):
    """Partial results of attention of one query a head, one program for each chunk and key head.

    Args:
        q: (B, H, 1, D) float16, bfloat16 or float32 (products may run in TF32 on a GPU); D a power
            of two from 16 to 256.
        k, v: (B, H_kv, S, D), dtype and device of q; read where they lie, through their strides,
            if the elements of a row are adjacent.
        n_splits: number of chunks, from 1 up.
        block_n: keys of a tile, a power of two from 16 up; None: as many as 16 KiB hold, 16 to 128.
        num_warps, num_stages: Triton's: warps of a program (None: 2 where each key head has one
            query head, else 4), and key tiles in flight.

    Returns:
        (m, l, acc) as merge_accumulators takes them, float32: (n_splits, B, H), (n_splits, B, H),
        (n_splits, B, H, D). With n tiles of keys, chunk c has tiles c * n // n_splits up to
        (c + 1) * n // n_splits. A row of a chunk whose l is NaN must not have m = -inf, which
        would say that it is empty.

    Raises:
        ValueError: the above does not hold.
    """
    check_qkv(q, k, v, grouped=True)
    q, k, v = _check_decode(q, k, v, n_splits)
    block_n = _block_n(q, block_n)
    B, H, _, D = q.shape
    H_kv, S = k.shape[1:3]
    m, l, acc = _empty_partials(q, n_splits)
    with torch.cuda.device_of(q):  # the current device may be another GPU
        _split_kernel[(B * H_kv * n_splits,)](
            q,
            k,
            v,
            m,
            l,
            acc,
            *q.stride()[:2],
            *k.stride()[:3],
            *v.stride()[:3],
            H_kv,
            S,
            n_splits,
            1.0 / math.sqrt(D),
            G=H // H_kv,
            D=D,
            BLOCK_M=max(16, triton.next_power_of_2(H // H_kv)),
            BLOCK_N=block_n,
            num_warps=num_warps or default_warps(H // H_kv),
            num_stages=num_stages,
            **pdl_options(_split_kernel, q.device),
        )
    return m, l, acc


def _check_decode(q, k, v, n_splits):
    """Refuses what the kernels cannot take; returns q, k, v with rows of adjacent elements."""
    check_kernel_dtype(q=q, k=k, v=v)
    check_head_dim(q.shape[-1])
    if q.shape[2] != 1:
        raise ValueError(f"decoding takes one query a head, q (B, H, 1, D): got {tuple(q.shape)}")
    check_blocks(n_splits=n_splits)
    check_launch(q=q, k=k, v=v)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]


def _block_n(q, block_n=None) -> int:
    """Keys of a tile: what was asked for, or as many as 16 KiB hold, from 16 to 128."""
    if block_n is None:
        return min(128, max(16, 16_384 // (q.shape[-1] * q.element_size())))
    check_kernel_blocks(block_n=block_n)
    return block_n


def default_warps(group) -> int:
    """Warps of a program: 2 where a key head has one query head, else 4."""
    return 2 if group == 1 else 4


def _empty_partials(q, n_splits):
    B, H, _, D = q.shape
    m = torch.empty(n_splits, B, H, dtype=torch.float32, device=q.device)
    acc = torch.empty(n_splits, B, H, D, dtype=torch.float32, device=q.device)
    return m, torch.empty_like(m), acc


# ---------------------------------------------------------------- step 4
def choose_splits(heads, n_tiles, multiprocessors, programs_per_sm=PROGRAMS_PER_SM):
    """How many chunks to cut the keys into: as many programs as run at once, and no second round.

    Args:
        heads: B * H_kv, programs that there are without splitting.
        n_tiles: tiles of keys; a chunk has at least one.
        multiprocessors: of the card.
        programs_per_sm: how many programs each of them is given.

    Returns:
        The largest number of chunks that makes at most multiprocessors * programs_per_sm programs;
        at least 1 and at most n_tiles.
    """
    return max(1, min(multiprocessors * programs_per_sm // heads, n_tiles))


if triton is not None:

    @triton.jit
    def _merge_kernel(
        m_ptr,
        l_ptr,
        acc_ptr,
        out_ptr,
        lse_ptr,
        n_splits,
        D: tl.constexpr,
        BLOCK_C: tl.constexpr,
        PDL: tl.constexpr,
    ):
        if PDL:
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0).to(tl.int64)  # b * H + h
        offs_c = tl.arange(0, BLOCK_C)  # (BLOCK_C,)
        offs_d = tl.arange(0, D)  # (D,)
        # Running state of the row, over the chunks merged so far.
        m_i = tl.full((), float("-inf"), tl.float32)
        l_i = tl.zeros((), tl.float32)
        acc = tl.zeros((D,), tl.float32)
        for start in range(0, n_splits, BLOCK_C):
            exists = start + offs_c < n_splits  # (BLOCK_C,)
            places = (start + offs_c).to(tl.int64) * tl.num_programs(0) + row  # (BLOCK_C,)
            m_c = tl.load(m_ptr + places, mask=exists, other=float("-inf"))  # (BLOCK_C,)
            l_c = tl.load(l_ptr + places, mask=exists, other=0.0)  # (BLOCK_C,)
            acc_ptrs = acc_ptr + places[:, None] * D + offs_d[None, :]  # (BLOCK_C, D)
            acc_c = tl.load(acc_ptrs, mask=exists[:, None], other=0.0)  # (BLOCK_C, D)
            full = m_c != float("-inf")  # (BLOCK_C,): NaN is full; an empty one may hold anything
            m_new = tl.maximum(m_i, tl.max(m_c, axis=0))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # all empty: exp(-inf) = 0
            alpha = tl.exp(m_i - m_safe)
            w = tl.exp(m_c - m_safe)  # (BLOCK_C,)
            l_i = l_i * alpha + tl.sum(tl.where(full, w * l_c, 0.0), axis=0)
            terms = tl.where(full[:, None], w[:, None] * acc_c, 0.0)  # (BLOCK_C, D)
            acc = acc * alpha + tl.sum(terms, axis=0)
            m_i = m_new
        l_safe = tl.where(l_i == 0.0, 1.0, l_i)
        out = acc / l_safe  # (D,)
        tl.store(out_ptr + row * D + offs_d, out.to(out_ptr.dtype.element_ty))
        tl.store(lse_ptr + row, m_i + tl.log(l_safe))


def merge_partials(m, l, acc, dtype):
    """Merges what split_partials or paged_partials returned, one program for each row.

    Args:
        m, l, acc: float32 (C, B, H), (C, B, H), (C, B, H, D), contiguous; D as in split_partials.
        dtype: of the output.

    Returns:
        out (B, H, 1, D) in `dtype`, and lse (B, H, 1) float32; 0 and -inf where all are empty.

    Raises:
        ValueError: the above does not hold.
    """
    _check_parts(m, l, acc)
    for name, x in {"m": m, "l": l, "acc": acc}.items():
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"{name} must be float32 and contiguous: got {x.dtype}, {x.stride()}")
    C, B, H, D = acc.shape
    check_head_dim(D)
    out = torch.empty(B, H, 1, D, dtype=dtype, device=acc.device)
    lse = torch.empty(B, H, 1, dtype=torch.float32, device=acc.device)
    block_c = min(64, triton.next_power_of_2(C))
    with torch.cuda.device_of(acc):
        _merge_kernel[(B * H,)](
            m,
            l,
            acc,
            out,
            lse,
            C,
            D=D,
            BLOCK_C=block_c,
            num_warps=4,
            **pdl_options(_merge_kernel, acc.device),
        )
    return out, lse


def multiprocessors(device) -> int:
    """Multiprocessors of a card; in the interpreter, those of the handout's example card."""
    if device.type != "cuda":
        return EXAMPLE_CARD
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability(device) -> tuple[int, int]:
    """Compute capability of a card; (0, 0) where kernels run in the interpreter."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def pdl_options(kernel, device) -> dict:
    """Launch options of `kernel`: whether it may begin before the kernel in front of it has ended.

    Programmatic dependent launch (handout section 5), from compute capability 9.0 on. Such a kernel
    must wait by itself, or it reads what is not written yet: only one that calls gdc_wait is
    launched so. Whether it calls it before it reads is for the tests to see.
    """
    waits = "gdc_wait" in kernel.fn.__code__.co_names  # names that its code uses, comments aside
    if waits and capability(device) >= (9, 0) and hasattr(tl.extra.cuda, "gdc_wait"):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def flash_decode(q, k, v, n_splits=None, **config):
    """Attention of one query a head against a long cache.

    Args:
        q, k, v: as in split_partials.
        n_splits: number of chunks; None lets choose_splits say.
        **config: block_n, num_warps, num_stages of split_partials.

    Returns:
        out: (B, H, 1, D) in the dtype of q.
        lse: (B, H, 1) float32.

    Raises:
        ValueError: as split_partials.
    """
    if n_splits is None:
        check_qkv(q, k, v, grouped=True)
        n_tiles = -(-k.shape[2] // _block_n(q, config.get("block_n")))
        n_splits = choose_splits(k.shape[0] * k.shape[1], n_tiles, multiprocessors(q.device))
    return merge_partials(*split_partials(q, k, v, n_splits, **config), q.dtype)


# ---------------------------------------------------------------- step 5
if triton is not None:

    @triton.jit
    def _paged_split_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        table_ptr,
        lens_ptr,
        m_ptr,
        l_ptr,
        acc_ptr,
        stride_qb,
        stride_qh,
        stride_kp,
        stride_kh,
        stride_ks,
        stride_vp,
        stride_vh,
        stride_vs,
        stride_tb,
        H_kv,
        n_splits,
        scale,
        G: tl.constexpr,
        D: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        PDL: tl.constexpr,
    ):
        # Ids are int64: times a stride they can pass 2**31.
        pid = tl.program_id(0).to(tl.int64)  # (b * H_kv + h) * n_splits + split
        split, pid_bh = pid % n_splits, pid // n_splits
        b, h = pid_bh // H_kv, pid_bh % H_kv
        offs_m = tl.arange(0, BLOCK_M)  # (BLOCK_M,) heads of the group, then padding
        offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_d = tl.arange(0, D)  # (D,)
        heads = h * G + offs_m  # (BLOCK_M,)
        q_ptrs = q_ptr + b * stride_qb + heads[:, None] * stride_qh + offs_d[None, :]
        if PDL:  # only arithmetic so far; what is read from here on may be another kernel's
            tl.extra.cuda.gdc_wait()
        q = tl.load(q_ptrs, mask=offs_m[:, None] < G, other=0.0)  # (BLOCK_M, D)

        S = tl.load(lens_ptr + b)  # this sequence's own length; 0 leaves every chunk empty
        n_tiles = tl.cdiv(S, BLOCK_N)
        lo = (split * n_tiles // n_splits).to(tl.int32) * BLOCK_N
        hi = ((split + 1) * n_tiles // n_splits).to(tl.int32) * BLOCK_N

        # Running state of the group: row maximum, row sum, unnormalised output.
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        if PDL:  # the next kernel may begin; it waits for the end of this one
            tl.extra.cuda.gdc_launch_dependents()
        for start_n in range(lo, hi, BLOCK_N):
            cols = start_n + offs_n  # (BLOCK_N,)
            visible = cols < S  # (BLOCK_N,)
            # Beyond the length neither the table nor the page is looked at.
            page = tl.load(table_ptr + b * stride_tb + cols // PAGE, mask=visible, other=0)
            page = page.to(tl.int64)  # (BLOCK_N,)
            slot = cols % PAGE  # (BLOCK_N,)
            k_rows = page * stride_kp + h * stride_kh + slot * stride_ks  # (BLOCK_N,)
            k_ptrs = k_ptr + k_rows[:, None] + offs_d[None, :]  # (BLOCK_N, D)
            k = tl.load(k_ptrs, mask=visible[:, None], other=0.0)  # (BLOCK_N, D)
            s = tl.dot(q, tl.trans(k)) * scale  # (BLOCK_M, BLOCK_N)
            s = tl.where(visible[None, :], s, float("-inf"))  # (BLOCK_M, BLOCK_N)
            m_new = tl.maximum(m_i, tl.max(s, axis=1))  # (BLOCK_M,)
            alpha = tl.exp(m_i - m_new)  # (BLOCK_M,)
            p = tl.exp(s - m_new[:, None])  # (BLOCK_M, BLOCK_N)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            v_rows = page * stride_vp + h * stride_vh + slot * stride_vs  # (BLOCK_N,)
            v_ptrs = v_ptr + v_rows[:, None] + offs_d[None, :]  # (BLOCK_N, D)
            v = tl.load(v_ptrs, mask=visible[:, None], other=0.0)  # (BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            m_i = m_new

        rows = (split * (tl.num_programs(0) // n_splits) + pid_bh) * G + offs_m  # (BLOCK_M,)
        m_i = tl.where(l_i == l_i, m_i, l_i)  # a maximum drops NaN, and -inf would say "empty"
        tl.store(m_ptr + rows, m_i, mask=offs_m < G)
        tl.store(l_ptr + rows, l_i, mask=offs_m < G)
        acc_ptrs = acc_ptr + rows[:, None] * D + offs_d[None, :]  # (BLOCK_M, D)
        tl.store(acc_ptrs, acc, mask=offs_m[:, None] < G)


def paged_partials(
    q,
    k_pages,
    v_pages,
    page_table,
    seq_lens,
    n_splits,
    block_n=None,
    num_warps=PAGED_WARPS,
    num_stages=PAGED_STAGES,
):
    """Partial results against a paged cache; arguments as paged_decode, results as split_partials.

    Chunks are cut from each sequence's own length. Values of page_table and seq_lens are taken on
    trust here: paged_decode checks them.
    """
    _check_paged_shapes(q, k_pages, v_pages, page_table, seq_lens)
    q, k_pages, v_pages = _check_decode(q, k_pages, v_pages, n_splits)
    block_n = _block_n(q, block_n)
    B, H, _, D = q.shape
    H_kv, page_size = k_pages.shape[1:3]
    m, l, acc = _empty_partials(q, n_splits)
    with torch.cuda.device_of(q):
        _paged_split_kernel[(B * H_kv * n_splits,)](
            q,
            k_pages,
            v_pages,
            page_table,
            seq_lens,
            m,
            l,
            acc,
            *q.stride()[:2],
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            page_table.stride(0),
            H_kv,
            n_splits,
            1.0 / math.sqrt(D),
            G=H // H_kv,
            D=D,
            PAGE=page_size,
            BLOCK_M=max(16, triton.next_power_of_2(H // H_kv)),
            BLOCK_N=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            **pdl_options(_paged_split_kernel, q.device),
        )
    return m, l, acc


def paged_decode(
    q, k_pages, v_pages, page_table, seq_lens, n_splits=None, check_values=True, **config
):
    """Attention of one query a head against a cache that lies in pages.

    Method: Kwon et al., "Efficient memory management for large language model serving with
    PagedAttention" (2023), section 4.

    Args:
        q: (B, H, 1, D), as in split_partials.
        k_pages, v_pages: (P, H_kv, page_size, D), dtype and device of q. Slots that no key was
            written to may hold anything, NaN included.
        page_table: (B, N) int32; key s of sequence b lies in page page_table[b, s // page_size],
            slot s % page_size. Entries past the sequence's last page may hold anything.
        seq_lens: (B,) int32, keys of each sequence, 0 included.
        n_splits: number of chunks of each sequence; None lets choose_splits say.
        check_values: whether to look at the values of page_table and seq_lens. That waits for the
            GPU, and a CUDA graph cannot capture it.
        **config: block_n, num_warps, num_stages of split_partials.

    Returns:
        out: (B, H, 1, D) in the dtype of q; 0 for a sequence without keys.
        lse: (B, H, 1) float32; -inf there.

    Raises:
        ValueError: shapes, dtypes or devices; a length beyond the table; a page out of range.
    """
    _check_paged_shapes(q, k_pages, v_pages, page_table, seq_lens)
    if check_values:
        _check_paged_values(page_table, seq_lens, *k_pages.shape[0:4:2])
    if n_splits is None:
        capacity = page_table.shape[1] * k_pages.shape[2]
        n_tiles = -(-capacity // _block_n(q, config.get("block_n")))
        n_splits = choose_splits(
            len(q) * k_pages.shape[1], n_tiles, multiprocessors(q.device), PAGED_PROGRAMS_PER_SM
        )
    partials = paged_partials(q, k_pages, v_pages, page_table, seq_lens, n_splits, **config)
    return merge_partials(*partials, q.dtype)


def _check_paged_shapes(q, k_pages, v_pages, page_table, seq_lens):
    # Pages are a batch to check_qkv: give q as many rows.
    if q.dim() != 4 or k_pages.dim() != 4:
        shapes = f"{tuple(q.shape)} and {tuple(k_pages.shape)}"
        raise ValueError(f"q must be (B, H, 1, D), k_pages (P, H_kv, page_size, D): got {shapes}")
    check_qkv(q[:1].expand(len(k_pages), *q.shape[1:]), k_pages, v_pages, grouped=True)
    wanted = {"page_table": (page_table, 2), "seq_lens": (seq_lens, 1)}
    for name, (x, rank) in wanted.items():
        if x.dim() != rank or x.shape[0] != len(q) or x.numel() == 0:
            raise ValueError(f"{name} must have {len(q)} rows, one a query: got {tuple(x.shape)}")
        if x.dtype != torch.int32 or x.device != q.device or x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be int32, on {q.device}, with adjacent elements: "
                f"got {x.dtype} on {x.device}, strides {x.stride()}"
            )


def _check_paged_values(page_table, seq_lens, n_pages, page_size):
    """Refuses a length that is negative or beyond the table, and a page in use that is none."""
    capacity = page_table.shape[1] * page_size
    shortest, longest = int(seq_lens.min()), int(seq_lens.max())
    if shortest < 0 or longest > capacity:
        raise ValueError(
            f"seq_lens must be from 0 to {capacity}, {page_table.shape[1]} pages of {page_size}: "
            f"got {shortest} to {longest}"
        )
    first_keys = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    used = page_table[first_keys[None, :] < seq_lens[:, None]]
    if ((used < 0) | (used >= n_pages)).any():
        got = f"{int(used.min())} to {int(used.max())}"
        raise ValueError(f"pages in use must be from 0 to {n_pages - 1}: got {got}")


# ---------------------------------------------------------------- step 6
def append_kv(k_pages, v_pages, page_table, seq_lens, k_new, v_new):
    """Writes N new keys and values of each sequence behind those that it has, in place.

    Args:
        k_pages, v_pages, page_table, seq_lens: as in paged_decode; the pages are written to.
        k_new, v_new: (B, H_kv, N, D), dtype and device of the pages.

    Returns:
        The new lengths, seq_lens + N; seq_lens itself stays as it is.

    Raises:
        ValueError: shapes or dtypes, a length beyond the table, a page out of range. Then nothing
            has been written.
    """
    B, N = len(page_table), k_new.shape[2] if k_new.dim() == 4 else 0
    P, H_kv, page_size, D = k_pages.shape
    if N == 0 or k_new.shape != (B, H_kv, N, D) or v_new.shape != k_new.shape:
        shapes = f"{tuple(k_new.shape)} and {tuple(v_new.shape)}"
        raise ValueError(f"k_new and v_new must be ({B}, {H_kv}, N, {D}): got {shapes}")
    if {k_new.dtype, v_new.dtype} != {k_pages.dtype}:
        raise ValueError(f"wanted {k_pages.dtype}: got k_new {k_new.dtype}, v_new {v_new.dtype}")
    _check_paged_values(page_table, seq_lens + N, P, page_size)
    places = seq_lens[:, None] + torch.arange(N, device=seq_lens.device)  # (B, N)
    pages = page_table.gather(1, places // page_size)  # (B, N)
    slots = places % page_size  # (B, N)
    # Two index tensors with a slice between them: their axes come first, (B, N, H_kv, D).
    k_pages[pages, :, slots] = k_new.transpose(1, 2)
    v_pages[pages, :, slots] = v_new.transpose(1, 2)
    return seq_lens + N


class TinyModel:
    """A language model of one attention layer with fixed random weights, float32.

    Attributes:
        embed (V, W), position (max_len, W), wq (W, H * D), wk and wv (W, H_kv * D),
        wo (H * D, V): its weights, W = H * D.
    """

    def __init__(self, vocab=61, heads=4, kv_heads=2, head_dim=16, max_len=256, device="cpu"):
        self.heads, self.kv_heads, self.head_dim, self.device = heads, kv_heads, head_dim, device
        generator = torch.Generator().manual_seed(9)

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(device) * shape[0] ** -0.5

        width = heads * head_dim
        self.embed = draw(vocab, width) * vocab**0.5
        self.position = draw(max_len, width) * max_len**0.5
        self.wq, self.wo = 2 * draw(width, width), draw(width, vocab)
        self.wk, self.wv = (draw(width, kv_heads * head_dim) for _ in range(2))

    def qkv(self, tokens, places):
        """q (B, H, N, D), k and v (B, H_kv, N, D) of tokens (B, N) int64 at places (B, N)."""
        x = self.embed[tokens] + self.position[places]  # (B, N, W)
        return [
            (x @ w).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        ]

    def next_tokens(self, attended):
        """The likeliest next token, (B, 1) int64, from the attention (B, H, 1, D) of the last."""
        return (attended.transpose(1, 2).flatten(2) @ self.wo).argmax(dim=-1)


def decode_recomputing(model, prompt, n_new):
    """n_new greedy tokens after prompt (N,) int64, every key and value computed anew each time."""
    tokens = prompt[None, :]  # (1, N)
    for _ in range(n_new):
        places = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
        q, k, v = model.qkv(tokens, places)
        out, _ = split_attention(q[:, :, -1:], k, v, 1)
        tokens = torch.cat([tokens, model.next_tokens(out)], dim=1)
    return tokens[0, len(prompt) :]


def decode_unpaged(model, prompt, n_new):
    """The same tokens from a cache in one piece, as long as it will ever be."""
    tokens, length = prompt[None, :], 0  # what is not in the cache yet, and how much is
    cache = torch.empty(
        2, 1, model.kv_heads, len(prompt) + n_new, model.head_dim, device=prompt.device
    )
    found = []
    for _ in range(n_new):
        places = length + torch.arange(tokens.shape[1], device=tokens.device)[None, :]
        q, k, v = model.qkv(tokens, places)
        length += tokens.shape[1]
        cache[0, :, :, places[0]], cache[1, :, :, places[0]] = k, v
        out, _ = flash_decode(q[:, :, -1:], cache[0, :, :, :length], cache[1, :, :, :length])
        tokens = model.next_tokens(out)
        found.append(tokens[0])
    return torch.cat(found)


def allocate_pages(model, lengths, page_size):
    """Pages for sequences of up to these lengths, dealt out in a mixed order.

    Returns:
        k_pages, v_pages: (P, H_kv, page_size, D) float32, uninitialised.
        page_table: (B, N) int32, -1 where a sequence needs no page.
    """
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).split(counts)
    table = torch.nn.utils.rnn.pad_sequence(order, batch_first=True, padding_value=-1)
    shape = sum(counts), model.kv_heads, page_size, model.head_dim
    k_pages, v_pages = (torch.empty(shape, device=model.device) for _ in range(2))
    return k_pages, v_pages, table.to(model.device, torch.int32)


def decode_paged(model, prompts, n_new, page_size=16):
    """Greedy tokens for a batch of prompts of different lengths, all caches in one pool of pages.

    Args:
        model: a TinyModel.
        prompts: list of (N,) int64 tensors on the model's device, N from 1 up.
        n_new: tokens to add to each, from 1 up.
        page_size: slots of a page. Each sequence gets pages for its own prompt and n_new tokens.

    Returns:
        (B, n_new) int64. Each token takes one call of paged_decode, for all sequences together.
    """
    lengths = [len(prompt) + n_new for prompt in prompts]
    k_pages, v_pages, page_table = allocate_pages(model, lengths, page_size)
    device = page_table.device
    queries, seq_lens = [], []
    for b, prompt in enumerate(prompts):
        q, k, v = model.qkv(prompt[None, :], torch.arange(len(prompt), device=device)[None, :])
        none = torch.zeros(1, dtype=torch.int32, device=device)
        seq_lens.append(append_kv(k_pages, v_pages, page_table[b : b + 1], none, k, v))
        queries.append(q[:, :, -1:])
    q, seq_lens = torch.cat(queries), torch.cat(seq_lens)  # (B, H, 1, D), (B,)
    found = []
    for _ in range(n_new):
        out, _ = paged_decode(q, k_pages, v_pages, page_table, seq_lens)
        tokens = model.next_tokens(out)  # (B, 1)
        found.append(tokens)
        if len(found) < n_new:
            q, k, v = model.qkv(tokens, seq_lens[:, None])
            seq_lens = append_kv(k_pages, v_pages, page_table, seq_lens, k, v)
    return torch.cat(found, dim=1)
