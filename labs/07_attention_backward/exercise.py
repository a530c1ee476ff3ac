"""Lab 07, your file: the backward of attention as three Triton kernels, plugged into a model.

Write the places marked TODO, in order; everything else is given. The handout, README.md beside
this file, leads through them. See where you stand with: pytest labs/07_attention_backward

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
        # TODO step 1 (about 9 lines; handout section 2): one program, BLOCK_M rows of one head
        #   program_id(0) is the tile of rows, program_id(1) the head among B * H, as int64
        #   out and dout have strides of their own, four each: batch, head, row, element
        #   delta is (B * H, T), contiguous; multiply and sum in float32
        tl.static_assert(False, "lab 07 step 1: write _delta_kernel")


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
        # TODO step 2 (about 45 lines; handout section 3): one program, BLOCK_N keys of one head
        #   program_id(0) is the key tile, program_id(1) the head among B * H, as int64
        #   q, k, v, dout (g): a row's elements are adjacent; batch, head and row have strides,
        #   those of rows known when the kernel is compiled
        #   lse2 and delta are (B * H, T), dk and dv (B * H, S, D), all contiguous
        #   lse2 is lse in base 2, and +inf where a row saw no key; WHOLE: T fills its tiles
        #   load k, v once; loop over the query tiles that see them: p by exp2, then dv, dp, ds, dk
        #   REGISTERS and OVERLAP are optional: speed on Hopper, at the end of section 3
        #   scale dk at the end; store both; mind: the mask comes after the scale, before exp2
        tl.static_assert(False, "lab 07 step 2: write _dkdv_kernel")


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
        # TODO step 3 (about 20 lines; handout section 4): the loop of _dq_kernel, below
        #   k_ptr and v_ptr point to key 0 of this head; make the tile of pointers for key lo here
        #   step 2 with the loops swapped: k and v through _load, p by exp2, then dp, ds, dq
        #   MASKED: padding keys are masked, when CAUSAL later ones, too: after scale2, before exp2
        #   returns dq without the scale (leave this function alone if your kernel does without)
        tl.static_assert(False, "lab 07 step 3: write _dq_keys")

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
        # TODO step 3 (about 35 lines; handout section 4): one program, BLOCK_M queries of one head
        #   load q, dout, lse, delta once; one walk over the keys, or two: full tiles, then masked
        #   lse is natural here, and may be -inf; WHOLE: S fills its tiles
        #   causal: the last query tile has the most keys, so let program 0 take it
        #   REGISTERS (of dout) and OVERLAP are optional: the end of section 3
        #   scale dq at the end; dq is (B * H, T, D), contiguous
        tl.static_assert(False, "lab 07 step 3: write _dq_kernel")


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
        # TODO step 4 (about 9 lines; handout section 5)
        #   delta, then dk, dv and dq, with the tile sizes in ctx.sizes, with ctx.causal, ctx.scale
        #   ctx.needs_input_grad says which of the five arguments of forward want a gradient
        #   one entry for each of them is returned, None where there is none
        raise NotImplementedError("lab 07 step 4: write backward")


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
    # TODO step 5 (about 5 lines; handout section 6)
    #   one product for q, k and v; views that split it into heads; attention; heads side by side
    raise NotImplementedError("lab 07 step 5: write causal_self_attention")


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
