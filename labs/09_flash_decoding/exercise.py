"""Lab 09, your file: flash decoding, one query against a long cache of keys and values.

Write the nine places marked TODO, in order; everything else is given. The handout, README.md beside
this file, leads through them. See where you stand with: pytest labs/09_flash_decoding

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
    # TODO step 1 (about 6 lines; handout section 2)
    #   the largest m; what each chunk weighs beside it; the two weighted sums
    #   mind: 0 times NaN, and exp(-inf - (-inf))
    raise NotImplementedError("lab 09 step 1: write merge_accumulators")


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
    # TODO step 1, second half (about 4 lines; handout section 2)
    #   call merge_accumulators: what are m, l and acc of a chunk that is normalised already?
    raise NotImplementedError("lab 09 step 1: write merge_states")


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
    # TODO step 2 (about 18 lines; handout section 3)
    #   float32 (float64 for float64 inputs); the queries of a group as rows of one tile, so that
    #   k and v are not copied for each head
    #   for each chunk of keys: scores, m, p, l, acc; then merge_accumulators, out and lse
    raise NotImplementedError("lab 09 step 2: write split_attention")


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
        # TODO step 3 (about 45 lines; handout section 4): one program, one chunk of one key head
        #   program_id(0) is (b * H_kv + h) * n_splits + split, as int64
        #   key head h serves query heads h * G to h * G + G - 1: rows of one tile, then padding
        #   chunk split has tiles split * n // n_splits up to (split + 1) * n // n_splits of the n
        #   m and l are (n_splits, B * H), acc is (n_splits, B * H, D), contiguous
        #   mind: a maximum drops NaN, so m can be -inf, "empty", where l is NaN
        #   PDL is for the optional end of section 5: leave it alone until then
        tl.static_assert(False, "lab 09 step 3: write _split_kernel")


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
    # TODO step 4 (a line; handout section 5)
    raise NotImplementedError("lab 09 step 4: write choose_splits")


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
        # TODO step 4, second half (about 28 lines; handout section 5)
        #   one program, one row b * H + h of rows = num_programs(0)
        #   m and l are (n_splits, rows), acc is (n_splits, rows, D)
        #   BLOCK_C chunks at a time, and a running m, l, acc over them, as in step 1
        #   mind: a chunk is empty where m is -inf, and only there; NaN is not empty
        tl.static_assert(False, "lab 09 step 4: write _merge_kernel")


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
        # TODO step 5 (about 45 lines; handout section 6): step 3 with the keys in pages
        #   S is this sequence's own length; a row of k lies at page * stride_kp + h * stride_kh +
        #   slot * stride_ks, page from row b of the table
        #   mind: neither table nor page may be read beyond the length; NaN, as in step 3
        tl.static_assert(False, "lab 09 step 5: write _paged_split_kernel")


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
    # TODO step 6 (about 6 lines; handout section 7)
    #   where in its sequence does each new key go? in which page is that, and in which slot?
    raise NotImplementedError("lab 09 step 6: write append_kv")


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
    # TODO step 6, second half (about 22 lines; handout section 7)
    #   allocate_pages; each prompt by itself: append all its keys, keep the last query
    #   then all sequences together: attend, choose, append the new token's key, and again
    raise NotImplementedError("lab 09 step 6: write decode_paged")
