"""Lab 08, reference: attention as serving needs it.

Grouped heads, queries at an offset, a sliding window, any strides, sequences of any length: one
step each, in PyTorch (steps 1 and 6) and in Triton (2 to 5). Letters: B batch, H query heads,
H_kv key heads, group = H / H_kv, T query length, S key length, D head dim. Query i sits at position
offset + i, key j at j; a query sees the keys at its own position and before it. A window W leaves
it its own position and the W - 1 before. `lse` is the natural logarithm of the sum of exponentials
of the scaled scores; a row that sees no key has out 0 and lse -inf.
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
from labs._harness.runtime import capability, check_launch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # macOS: steps 1 and 6 still run
    triton = None

MAX_PROGRAMS = 2**31 - 1  # along grid axis 0; axes 1 and 2 end at 65,535
NO_WINDOW = 2**30  # keys: more than there are


def _visible(i0, i1, j0, j1, offset, window, device):
    """(i1 - i0, j1 - j0) bool: whether query i, at position offset + i, sees key j."""
    rows = offset + torch.arange(i0, i1, device=device)[:, None]  # (i1 - i0, 1)
    cols = torch.arange(j0, j1, device=device)[None, :]  # (1, j1 - j0)
    visible = cols <= rows
    return visible if window is None else visible & (cols > rows - window)


def _positions(name, given, default, shape, device):
    """Positions as `shape`, (B, T) or (B, S): those given, or the default. Refuses what is not."""
    if given is None:
        given = default
    elif not isinstance(given, torch.Tensor) or given.is_floating_point() or given.is_complex():
        raise ValueError(f"{name} must be an integer tensor: got {getattr(given, 'dtype', given)}")
    if given.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}: got {given.device}")
    try:
        return given.broadcast_to(shape)
    except RuntimeError:
        got = tuple(given.shape)
        raise ValueError(f"{name} must broadcast to {tuple(shape)}: got {got}") from None


def _offset(T, S, query_offset, window):
    """The position of query 0. Refuses an offset or a window that is not a usable number."""
    for name, x, low in (("query_offset", query_offset, -(2**30)), ("window", window, 1)):
        if x is not None and (type(x) is not int or not low <= x <= 2**30):
            raise ValueError(f"{name} must be a whole number from {low} to 2**30: got {x!r}")
    return S - T if query_offset is None else query_offset


# ---------------------------------------------------------------- step 1
def online_attention(q, k, v, query_positions=None, key_positions=None, tile=16):
    """Grouped causal attention by position: all queries and heads at once, a key tile at a time.

    Method: Ainslie et al., "GQA" (2023), section 2, with the recurrence of Milakov and Gimelshein,
    "Online normalizer calculation for softmax" (2018), section 3.

    Args:
        q: (B, H, T, D) floating point.
        k: (B, H_kv, S, D); query head h reads key head h // (H / H_kv).
        v: (B, H_kv, S, DV), any DV.
        query_positions: integers that broadcast to (B, T); default S - T + i, the newest.
        key_positions: integers that broadcast to (B, S), in any order; default j. A query sees the
            keys whose position is at most its own.
        tile: keys of a tile, any number from 1 up.

    Returns:
        out (B, H, T, DV) in the dtype of q. Nothing larger than (B, H, T, tile), or out, is made.

    Raises:
        ValueError: what does not fit together; a tile below 1; a query that sees no key at all.
    """
    check_qkv(q, k, v, grouped=True, free_value_dim=True)
    check_blocks(tile=tile)
    B, H, T, D = q.shape
    H_kv, S, DV = v.shape[1:]
    newest = torch.arange(S - T, S, device=q.device)
    query_positions = _positions("query_positions", query_positions, newest, (B, T), q.device)
    keys = torch.arange(S, device=q.device)
    key_positions = _positions("key_positions", key_positions, keys, (B, S), q.device)
    if (query_positions.amin(dim=1) < key_positions.amin(dim=1)).any():
        raise ValueError(
            "every query must see a key: got one whose position is below that of every key "
            f"(T={T}, S={S})"
        )
    G = H // H_kv
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # The queries of a group are rows of one matrix: K and V are shared, not repeated.
    rows = (q.to(dtype) / math.sqrt(D)).reshape(B, H_kv, G * T, D)  # (B, H_kv, G T, D)
    last = query_positions[:, None, None, :, None]  # (B, 1, 1, T, 1)
    # Running state of every query: maximum, sum, unnormalised output.
    m_i = torch.full((B, H_kv, G, T), float("-inf"), dtype=dtype, device=q.device)
    l_i = torch.zeros_like(m_i)
    acc = torch.zeros(B, H_kv, G, T, DV, dtype=dtype, device=q.device)
    for j0 in range(0, S, tile):
        k_tile = k[:, :, j0 : j0 + tile].to(dtype)  # (B, H_kv, tile, D)
        v_tile = v[:, :, j0 : j0 + tile].to(dtype)  # (B, H_kv, tile, DV)
        s = (rows @ k_tile.transpose(-2, -1)).view(B, H_kv, G, T, -1)  # (B, H_kv, G, T, tile)
        hidden = key_positions[:, None, None, None, j0 : j0 + tile] > last  # (B, 1, 1, T, tile)
        s = s.masked_fill(hidden, float("-inf"))
        m_new = torch.maximum(m_i, s.amax(dim=-1))
        # A row that has seen nothing yet has m_new = -inf, and -inf - (-inf) is NaN: refer to 0.
        m_ref = m_new.masked_fill(m_new == float("-inf"), 0.0)
        alpha = torch.exp(m_i - m_ref)
        p = torch.exp(s - m_ref[..., None])  # (B, H_kv, G, T, tile)
        l_i = l_i * alpha + p.sum(dim=-1)
        pv = p.view(B, H_kv, G * T, -1) @ v_tile  # (B, H_kv, G T, DV)
        acc = acc * alpha[..., None] + pv.view_as(acc)
        m_i = m_new
    return (acc / l_i[..., None]).view(B, H, T, DV).to(q.dtype)


# ---------------------------------------------------------------- step 2
if triton is not None:

    @triton.jit
    def _attention_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        stride_qb,
        stride_qh,
        stride_qt: tl.constexpr,
        stride_kb,
        stride_kh,
        stride_ks: tl.constexpr,
        stride_vb,
        stride_vh,
        stride_vs: tl.constexpr,
        stride_ob,
        stride_oh,
        stride_ot: tl.constexpr,
        H,
        T,
        S,
        offset,
        scale,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
    ):
        # Axis 0 holds everything, query tiles fastest: neighbours share K and V in L2.
        pid = tl.program_id(0)
        tiles = tl.cdiv(T, BLOCK_M)
        pid_m = pid % tiles
        bh = (pid // tiles).to(tl.int64)
        b, h = bh // H, bh % H
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_d = tl.arange(0, D)  # (D,)
        rows = offs_m.to(tl.int64)[:, None]  # (BLOCK_M, 1), int64: times a stride it can pass 2**31
        keys = offs_n.to(tl.int64)[:, None]  # (BLOCK_N, 1)
        q_ptrs = q_ptr + b * stride_qb + h * stride_qh + rows * stride_qt + offs_d[None, :]
        k_head = k_ptr + b * stride_kb + h // GROUP * stride_kh
        v_head = v_ptr + b * stride_vb + h // GROUP * stride_vh
        k_ptrs = k_head + keys * stride_ks + offs_d[None, :]  # (BLOCK_N, D)
        v_ptrs = v_head + keys * stride_vs + offs_d[None, :]  # (BLOCK_N, D)
        q = tl.load(q_ptrs, mask=offs_m[:, None] < T, other=0.0)  # (BLOCK_M, D)
        last = tl.minimum(offset + offs_m, S - 1)  # (BLOCK_M,), the last key that each row sees

        # Running state of the query tile: row maximum, row sum, unnormalised output.
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        hi = tl.minimum(S, offset + tl.minimum(T, (pid_m + 1) * BLOCK_M))  # past the last row's key
        for start_n in range(0, hi, BLOCK_N):
            cols = start_n + offs_n  # (BLOCK_N,)
            k = tl.load(k_ptrs, mask=cols[:, None] < S, other=0.0)  # (BLOCK_N, D)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BLOCK_M, BLOCK_N)
            s = tl.where(cols[None, :] <= last[:, None], s, float("-inf"))  # (BLOCK_M, BLOCK_N)
            m_new = tl.maximum(m_i, tl.max(s, axis=1))  # (BLOCK_M,)
            # A negative offset leaves rows without any key: refer to 0 while m_new is -inf.
            m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # (BLOCK_M,)
            alpha = tl.exp(m_i - m_ref)  # (BLOCK_M,)
            p = tl.exp(s - m_ref[:, None])  # (BLOCK_M, BLOCK_N)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            v = tl.load(v_ptrs, mask=cols[:, None] < S, other=0.0)  # (BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
            m_i = m_new
            k_ptrs += BLOCK_N * stride_ks
            v_ptrs += BLOCK_N * stride_vs

        l_i = tl.where(l_i == 0, 1.0, l_i)  # a row that sees no key: out 0, lse = m_i = -inf
        out = acc / l_i[:, None]  # (BLOCK_M, D)
        out_ptrs = out_ptr + b * stride_ob + h * stride_oh + rows * stride_ot + offs_d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < T)
        tl.store(lse_ptr + bh * T + offs_m, m_i + tl.log(l_i), mask=offs_m < T)


def attention(
    q,
    k,
    v,
    query_offset=None,
    window=None,
    block_m=64,
    block_n=64,
    num_warps=4,
    num_stages=2,
):
    """Causal attention of grouped heads at an offset, with or without a window; copies nothing.

    Method: Dao, "FlashAttention-2" (2023), algorithm 1; Ainslie et al., "GQA" (2023), section 2;
    the window is that of Beltagy et al., "Longformer" (2020), section 3.1, on the left side only.

    Args:
        q: (B, H, T, D) float16, bfloat16 or float32 (products in true float32, not TF32); D a power
            of two from 16 to 256.
        k, v: (B, H_kv, S, D), dtype and device of q; query head h reads head h // (H / H_kv). q, k
            and v may each have any strides, as long as elements along D are adjacent.
        query_offset: position of query 0; default S - T, the queries are the newest tokens. Rows
            below position 0 see nothing; at S - 1 and beyond a query sees every key.
        window: how many keys a query sees at most, itself included; None for no limit.
        block_m, block_n: rows of a query tile and of a key tile; powers of two from 16 up.
        num_warps, num_stages: Triton's: warps of a program, and key tiles in flight.

    Returns:
        out: (B, H, T, D) in the dtype of q, its axes in memory in the order of q's.
        lse: (B, H, T) float32.

    Raises:
        ValueError: the above does not hold.
    """
    check_qkv(q, k, v, grouped=True)
    B, H, T, D = q.shape
    H_kv, S = k.shape[1:3]
    offset = _offset(T, S, query_offset, window)
    _check_kernel(q, k, v, block_m=block_m, block_n=block_n)
    programs = B * H * triton.cdiv(T, block_m)
    if programs > MAX_PROGRAMS:
        raise ValueError(f"at most {MAX_PROGRAMS:,} query tiles over all heads: got {programs:,}")
    out = torch.empty_like(q)  # keeps the order of q's axes in memory, also where q has gaps
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    kernel, tensors, places = _attention_kernel, (q, k, v, out, lse), (offset,)
    if window is not None:
        kernel, places = _window_kernel, (offset, window)
        tensors += _descriptor(k, block_n), _descriptor(v, block_n)
    with torch.cuda.device_of(q):  # the current device may be another GPU
        kernel[(programs,)](
            *tensors,
            *(stride for x in (q, k, v, out) for stride in x.stride()[:3]),
            *(H, T, S, *places, 1.0 / math.sqrt(D)),
            GROUP=H // H_kv,
            D=D,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return out, lse


def _check_kernel(q, k, v, **blocks):
    """Refuses what the kernels do not take."""
    check_kernel_dtype(q=q, k=k, v=v)
    check_head_dim(q.shape[-1])
    check_kernel_blocks(**blocks)
    check_launch(q=q, k=k, v=v)
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: elements along D must be adjacent: got strides {x.stride()}")


# ---------------------------------------------------------------- step 3
def _descriptor(x, block_n):
    """x (B, H_kv, S, D) as Hopper's copy engine (TMA) takes it, block_n rows at a time; or None.

    It wants addresses and strides in multiples of 16 bytes; here it is for half dtypes only.
    """
    places = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:3])]
    if capability(x.device)[0] != 9 or x.element_size() != 2 or block_n > 256:
        return None
    if 0 in places or any(place % 16 for place in places):
        return None
    return TensorDescriptor.from_tensor(x, [1, 1, block_n, x.shape[3]])


if triton is not None:

    @triton.jit
    def _attend(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        stride_qt: tl.constexpr,
        stride_ks: tl.constexpr,
        stride_vs: tl.constexpr,
        stride_ot: tl.constexpr,
        k_desc,
        v_desc,
        b,
        kv_head,
        pid_m,
        T,
        S,
        offset,
        window,
        scale,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
    ):
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        EDGE: tl.constexpr = min(BLOCK_N, 64)  # keys of a tile that is cut: wider ones waste more
        offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_e = tl.arange(0, EDGE)  # (EDGE,)
        offs_d = tl.arange(0, D)  # (D,)
        rows = offs_m.to(tl.int64)[:, None]  # (BLOCK_M, 1)
        q_ptrs = q_ptr + rows * stride_qt + offs_d[None, :]  # (BLOCK_M, D)
        q = tl.load(q_ptrs, mask=offs_m[:, None] < T, other=0.0)  # (BLOCK_M, D)
        last = tl.minimum(offset + offs_m, S - 1)  # (BLOCK_M,), the last key that each row sees
        first = offset + offs_m - window + 1  # (BLOCK_M,), and the first

        # Keys lo to hi are seen by some row of the tile, keys full_lo to full_hi by every row.
        low = offset + pid_m * BLOCK_M  # position of the first row
        high = offset + tl.minimum(T, (pid_m + 1) * BLOCK_M)  # past the position of the last row
        hi = tl.minimum(S, high)
        lo = tl.minimum(tl.maximum(low - window + 1, 0), hi)
        full_lo = lo + tl.cdiv(tl.maximum(high - window - lo, 0), EDGE) * EDGE
        full_hi = full_lo + tl.maximum(tl.minimum(S, low + 1) - full_lo, 0) // BLOCK_N * BLOCK_N
        below = tl.cdiv(tl.minimum(full_lo, hi) - lo, EDGE)  # tiles before the full ones
        above = tl.cdiv(tl.maximum(hi - full_hi, 0), EDGE)  # tiles after them

        # Running state of the query tile: row maximum (unscaled), row sum, unnormalised output.
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        scale_log2 = scale * 1.4426950408889634  # exp(x) is exp2(x log2(e)), one instruction
        # Two loops from one text: full tiles without a mask, then those that the window cuts and,
        # in the same loop, those that the diagonal or the end cuts.
        for phase in tl.static_range(2):
            for i in range(0, (full_hi - full_lo) // BLOCK_N if phase == 0 else below + above):
                if phase == 0:
                    start_n, offs = full_lo + i * BLOCK_N, offs_n
                else:
                    after = full_hi + (i - below) * EDGE
                    start_n, offs = tl.where(i < below, lo + i * EDGE, after), offs_e
                # From here on N is BLOCK_N or EDGE.
                cols = start_n + offs  # (N,)
                if phase == 0 and k_desc is not None:  # one instruction fetches a tile
                    k = k_desc.load([b, kv_head, start_n, 0]).reshape(BLOCK_N, D)
                    v = v_desc.load([b, kv_head, start_n, 0]).reshape(BLOCK_N, D)
                else:
                    keys = cols.to(tl.int64)[:, None]  # (N, 1)
                    k_ptrs = k_ptr + keys * stride_ks + offs_d[None, :]  # (N, D)
                    v_ptrs = v_ptr + keys * stride_vs + offs_d[None, :]  # (N, D)
                    if phase == 0:
                        k = tl.load(k_ptrs)  # (BLOCK_N, D)
                        v = tl.load(v_ptrs)  # (BLOCK_N, D)
                    else:
                        k = tl.load(k_ptrs, mask=cols[:, None] < S, other=0.0)  # (EDGE, D)
                        v = tl.load(v_ptrs, mask=cols[:, None] < S, other=0.0)  # (EDGE, D)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, N)
                if phase == 1:
                    visible = (cols[None, :] >= first[:, None]) & (cols[None, :] <= last[:, None])
                    s = tl.where(visible, s, float("-inf"))  # (BLOCK_M, EDGE)
                m_new = tl.maximum(m_i, tl.max(s, axis=1))  # (BLOCK_M,)
                # A row's first tile may lie wholly outside its window: refer to 0 meanwhile.
                m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # (BLOCK_M,)
                alpha = tl.exp2((m_i - m_ref) * scale_log2)  # (BLOCK_M,)
                # Subtract before scaling: equal scores must give exactly 1, however large.
                p = tl.exp2((s - m_ref[:, None]) * scale_log2)  # (BLOCK_M, N)
                l_i = l_i * alpha + tl.sum(p, axis=1)
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
                m_i = m_new

        l_i = tl.where(l_i == 0, 1.0, l_i)  # a row that sees no key: out 0, lse = m_i = -inf
        out = acc * (1.0 / l_i)[:, None]  # (BLOCK_M, D), a division takes ten instructions
        out_ptrs = out_ptr + rows * stride_ot + offs_d[None, :]  # (BLOCK_M, D)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < T)
        tl.store(lse_ptr + offs_m, m_i * scale + tl.log(l_i), mask=offs_m < T)

    @triton.jit
    def _window_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        k_desc,
        v_desc,
        stride_qb,
        stride_qh,
        stride_qt: tl.constexpr,
        stride_kb,
        stride_kh,
        stride_ks: tl.constexpr,
        stride_vb,
        stride_vh,
        stride_vs: tl.constexpr,
        stride_ob,
        stride_oh,
        stride_ot: tl.constexpr,
        H,
        T,
        S,
        offset,
        window,
        scale,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
    ):
        """Hands each program its tile of queries and its head; `_attend` does the work."""
        pid = tl.program_id(0)
        tiles = tl.cdiv(T, BLOCK_M)
        bh = (pid // tiles).to(tl.int64)
        b, h = bh // H, bh % H
        _attend(
            q_ptr + b * stride_qb + h * stride_qh,
            k_ptr + b * stride_kb + h // GROUP * stride_kh,
            v_ptr + b * stride_vb + h // GROUP * stride_vh,
            out_ptr + b * stride_ob + h * stride_oh,
            lse_ptr + bh * T,
            stride_qt,
            stride_ks,
            stride_vs,
            stride_ot,
            k_desc,
            v_desc,
            b.to(tl.int32),
            (h // GROUP).to(tl.int32),
            pid % tiles,
            T,
            S,
            offset,
            window,
            scale,
            D,
            BLOCK_M,
            BLOCK_N,
        )


# ---------------------------------------------------------------- step 4
def projected_attention(x, heads, kv_heads, query_offset=None, window=None, **tiles):
    """Attention between a model's two projections, which copies nothing.

    Args:
        x: (B, T, (heads + 2 kv_heads) D), what the projection of q, k and v gives: of each token
            its query heads, then its key heads, then its value heads. A slice of a wider tensor
            is fine, as long as elements of a token are adjacent.
        heads, kv_heads: H and H_kv.
        query_offset, window, tiles: as in `attention`.

    Returns:
        out: (B, T, heads D), as the output projection wants it.
        lse: (B, heads, T) float32.

    Raises:
        ValueError: x is not of this shape, or what `attention` refuses.
    """
    for name, n in {"heads": heads, "kv_heads": kv_heads}.items():
        if type(n) is not int or n < 1:
            raise ValueError(f"{name} must be a whole number from 1 up: got {n!r}")
    if x.dim() != 3 or x.shape[2] % (heads + 2 * kv_heads):
        wanted = f"(B, T, ({heads} + 2 * {kv_heads}) D)"
        raise ValueError(f"x must be {wanted}: got shape {tuple(x.shape)}")
    by_head = x.unflatten(2, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = by_head.split((heads, kv_heads, kv_heads), dim=1)
    out, lse = attention(q, k, v, query_offset, window, **tiles)
    return out.transpose(1, 2).flatten(2), lse


# ---------------------------------------------------------------- step 5
if triton is not None:

    @triton.jit
    def _varlen_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        cu_q_ptr,
        cu_k_ptr,
        stride_qt: tl.constexpr,
        stride_qh,
        stride_ks: tl.constexpr,
        stride_kh,
        stride_vs: tl.constexpr,
        stride_vh,
        stride_ot: tl.constexpr,
        stride_oh,
        stride_lh,
        H,
        tiles,
        window,
        scale,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CAUSAL: tl.constexpr,
    ):
        pid = tl.program_id(0)
        pid_m = pid % tiles  # the grid has tiles for the longest sequence; others leave some unused
        h = (pid // tiles % H).to(tl.int64)
        n = pid // tiles // H
        # int64: a token's number times a stride can pass 2**31.
        q_start = tl.load(cu_q_ptr + n).to(tl.int64)
        k_start = tl.load(cu_k_ptr + n).to(tl.int64)
        T = (tl.load(cu_q_ptr + n + 1) - q_start).to(tl.int32)
        S = (tl.load(cu_k_ptr + n + 1) - k_start).to(tl.int32)
        offset = S - T if CAUSAL else S  # past the last key every row sees all of them
        if pid_m * BLOCK_M < T:
            _attend(
                q_ptr + q_start * stride_qt + h * stride_qh,
                k_ptr + k_start * stride_ks + h // GROUP * stride_kh,
                v_ptr + k_start * stride_vs + h // GROUP * stride_vh,
                out_ptr + q_start * stride_ot + h * stride_oh,
                lse_ptr + h * stride_lh + q_start,
                stride_qt,
                stride_ks,
                stride_vs,
                stride_ot,
                None,  # a sequence may begin at any token: no descriptor
                None,
                0,
                0,
                pid_m,
                T,
                S,
                offset,
                window,
                scale,
                D,
                BLOCK_M,
                BLOCK_N,
            )


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    causal=True,
    window=None,
    block_m=64,
    block_n=64,
    num_warps=4,
    num_stages=2,
):
    """Attention of sequences of any lengths, packed one after the other: no padding is computed.

    Method: the packed layout of the flash-attention library's `flash_attn_varlen_func`.

    Args:
        q: (total_q, H, D); k, v: (total_k, H_kv, D); dtypes, head dims and strides as in
            `attention`.
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 on the device of q. Tokens cu[n] to cu[n + 1] - 1
            are sequence n: it starts at 0, never falls, and ends at the total or before it. Two
            equal numbers are a sequence of length zero. They are read by the host: one
            synchronisation a call.
        causal: the last query of a sequence sees all its keys, the one before all but the last, and
            so on (offset S - T); otherwise every query sees every key of its sequence.
        window: as in `attention`; needs causal.
        block_m, block_n, num_warps, num_stages: as in `attention`.

    Returns:
        out: (total_q, H, D) in the dtype of q. lse: (H, total_q) float32. Queries that see no key,
        and those that belong to no sequence, have 0 and -inf.

    Raises:
        ValueError: the above does not hold.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dim() != 3:
            raise ValueError(f"{name} must be (total, H, D): got shape {tuple(x.shape)}")
    check_qkv(*(x.transpose(0, 1)[None] for x in (q, k, v)), grouped=True)
    _offset(len(q), len(k), None, window)
    if window is not None and not causal:
        raise ValueError(f"a window needs causal=True: got causal={causal}, window={window}")
    starts_q = _check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    starts_k = _check_offsets("cu_seqlens_k", cu_seqlens_k, k)
    if len(starts_q) != len(starts_k):
        got = f"{len(starts_q)} and {len(starts_k)}"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be of one length: got {got}")
    _check_kernel(q, k, v, block_m=block_m, block_n=block_n)
    total, H, D = q.shape
    longest = max(b - a for a, b in zip(starts_q, starts_q[1:], strict=False))
    tiles = triton.cdiv(longest, block_m)
    programs = tiles * H * (len(starts_q) - 1)
    if programs > MAX_PROGRAMS:
        raise ValueError(f"at most {MAX_PROGRAMS:,} query tiles over all heads: got {programs:,}")
    out = torch.empty_like(q)
    lse = torch.empty(H, total, dtype=torch.float32, device=q.device)
    out[starts_q[-1] :] = 0.0
    lse[:, starts_q[-1] :] = float("-inf")
    if programs:
        with torch.cuda.device_of(q):  # the current device may be another GPU
            _varlen_kernel[(programs,)](
                *(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k),
                *(stride for x in (q, k, v, out) for stride in x.stride()[:2]),
                *(lse.stride(0), H, tiles, window or NO_WINDOW, 1.0 / math.sqrt(D)),
                GROUP=H // k.shape[1],
                D=D,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                CAUSAL=causal,
                num_warps=num_warps,
                num_stages=num_stages,
            )
    return out, lse


def _check_offsets(name, cu, x):
    """The offsets as a list. Refuses what does not cut the tokens of x into sequences."""
    if not isinstance(cu, torch.Tensor) or cu.dtype != torch.int32 or cu.dim() != 1 or len(cu) < 2:
        got = f"{cu.dtype} {tuple(cu.shape)}" if isinstance(cu, torch.Tensor) else repr(cu)
        raise ValueError(f"{name} must be (N + 1,) int32 with N from 1 up: got {got}")
    if cu.device != x.device or not cu.is_contiguous():
        raise ValueError(f"{name} must be contiguous on {x.device}: got {cu.device}, {cu.stride()}")
    starts = cu.tolist()
    if starts[0] != 0 or starts[-1] > len(x) or starts != sorted(starts):
        raise ValueError(
            f"{name} must start at 0, never fall, and end at {len(x)} tokens or before: "
            f"got {starts if len(starts) < 9 else [*starts[:4], '...', *starts[-4:]]}"
        )
    return starts


# ---------------------------------------------------------------- step 6
def attention_backward(q, k, v, out, lse, dout, query_offset=None, window=None, tile=16):
    """Gradients of `attention`, a tile of keys at a time, for the queries that see any of them.

    Method: Dao et al., "FlashAttention" (2022), algorithm 4 (appendix B.4), key tiles only; a key
    head's gradients are the sums over the query heads of its group.

    Args:
        q, k, v, query_offset, window: as in `attention`, any floating point; v may have another
            head dim DV.
        out: (B, H, T, DV) and lse: (B, H, T), its results; lse is -inf where a query sees no key.
        dout: (B, H, T, DV), gradient of the loss with respect to out; any strides.
        tile: keys of a tile, any number from 1 up.

    Returns:
        (dq, dk, dv) in the shapes and dtypes of q, k, v; 0 where a query sees no key.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together; a bad tile, window or offset.
    """
    check_qkv(q, k, v, grouped=True, free_value_dim=True)
    check_blocks(tile=tile)
    B, H, T, D = q.shape
    H_kv, S, DV = v.shape[1:]
    query_offset = _offset(T, S, query_offset, window)
    G, scale, dtype = H // H_kv, 1.0 / math.sqrt(D), lse.dtype
    delta = (out.to(dtype) * dout.to(dtype)).sum(dim=-1)  # (B, H, T)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for j0 in range(0, S, tile):
        j1 = min(j0 + tile, S)
        # Queries i0 to i1 - 1 see a key of this tile: from key j0's own query on, and under a
        # window up to the last one that still sees key j1 - 1.
        i0 = min(max(j0 - query_offset, 0), T)
        i1 = T
        if window is not None:
            i1 = max(min(j1 - 1 + window - query_offset, T), i0)
        n = i1 - i0
        k_tile = k[:, :, j0:j1].to(dtype)  # (B, H_kv, tile, D)
        v_tile = v[:, :, j0:j1].to(dtype)  # (B, H_kv, tile, DV)
        # The queries of a group are rows of one matrix: a product over rows sums over the group.
        q_rows = q[:, :, i0:i1].to(dtype).reshape(B, H_kv, G * n, D)  # (B, H_kv, G n, D)
        do_rows = dout[:, :, i0:i1].to(dtype).reshape(B, H_kv, G * n, DV)  # (B, H_kv, G n, DV)
        s = (q_rows @ k_tile.transpose(-2, -1) * scale).view(B, H, n, j1 - j0)
        visible = _visible(i0, i1, j0, j1, query_offset, window, q.device)  # (n, tile)
        # Rows without any key (lse -inf) are in no tile's slice: exp(s - lse) is finite.
        p = torch.exp(s - lse[:, :, i0:i1, None]).masked_fill(~visible, 0.0)  # (B, H, n, tile)
        dp = (do_rows @ v_tile.transpose(-2, -1)).view_as(p)  # (B, H, n, tile)
        ds = p * (dp - delta[:, :, i0:i1, None]) * scale  # (B, H, n, tile)
        p_rows, ds_rows = (x.view(B, H_kv, G * n, j1 - j0) for x in (p, ds))
        dv[:, :, j0:j1] = p_rows.transpose(-2, -1) @ do_rows
        dk[:, :, j0:j1] = ds_rows.transpose(-2, -1) @ q_rows
        dq[:, :, i0:i1] += (ds_rows @ k_tile).view(B, H, n, D)
    return dq.to(q.dtype), dk, dv
