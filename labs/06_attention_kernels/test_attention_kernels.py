"""Tests of lab 06. Run `pytest labs/06_attention_kernels`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
`oracle` gives inputs and float64 results with their error budgets.
"""

from __future__ import annotations

import contextlib
import math
import weakref

import pytest
import torch

from labs._harness import memory, oracle, runtime
from labs._harness.cases import (
    check_compiles,
    check_kept,
    check_not_written,
    fenced_qkv,
    interpreter_only,
    kernel_dtypes,
    needs_compiler,
    needs_triton,
    step,
)

STEPS = {
    1: "online_softmax_stats",
    2: "flash_attention_forward",
    3: "flash_attention_backward",
    4: "triton_softmax",
    5: "triton_flash_attention",
}

# Most elements of a row that torch's softmax or logsumexp may see at a time, by function.
ROW_LIMITS = {
    "flash_attention_forward": "block_k",
    "flash_attention_backward": "block_k",
    "flash_attention": 16,
    "triton_softmax": 0,
    "triton_flash_attention": 0,
}

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
INF = math.inf

here = runtime.setup()
torch_dtypes = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
causal_or_full = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
step1 = step(1)
step2 = step(2)
step3 = step(3)
step4 = step(4, needs_triton)
step5 = step(5, needs_triton)


@contextlib.contextmanager
def case(**values):
    """Adds to a failure within the block which case of the test it is."""
    try:
        yield
    except AssertionError as error:
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        error.args = (f"{error}\n  in the case {text}",)
        raise


# ---------------------------------------------------------------- step 1


def check_same(got, want, what, **tolerance):
    """Fails in one line unless two tensors are the same, exactly or within rtol and atol."""
    tolerance = {"rtol": 0.0, "atol": 0.0} | tolerance
    if not torch.allclose(got, want, **tolerance):
        i = int((got - want).abs().flatten().nan_to_num(math.inf).argmax())
        pair = want.flatten()[i].item(), got.flatten()[i].item()
        raise AssertionError(f"{what}: want {pair[0]:.8g}, got {pair[1]:.8g} where it is worst")


def check_stats(lab, row, sizes):
    blocks = row.split(sizes)
    text = {"row": [float(f"{x:.5g}") for x in row.tolist()]} if len(row) <= 12 else {}
    with case(**text, blocks=sizes):
        got = lab.online_softmax_stats(iter(blocks))
        oracle.check_all(oracle.softmax_stats(row, len(blocks)), got, "online_softmax_stats")


@step1
@torch_dtypes
@pytest.mark.parametrize("sizes", [[1], [5], [16, 16], [7, 1, 13], [3] * 20], ids=str)
def test_online_softmax_matches_logsumexp(lab, device, dtype, sizes):
    row = oracle.inputs(sum(sizes), dtype=dtype, device=device) * 3
    check_stats(lab, row, sizes)
    if dtype == F64:
        m, l = lab.online_softmax_stats(row.split(sizes))
        check_same(m + l.log(), row.logsumexp(0), "m + log l is the row's logsumexp", atol=1e-12)


@step1
def test_online_softmax_worked_example(lab, device):
    row = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=F64, device=device)
    for blocks, want in ([row[:2]], (1.0, 1.3679)), ([row[:2], row[2:]], (2.0, 1.5530)):
        m, l = lab.online_softmax_stats(blocks)
        got = m.item(), round(l.item(), 4)
        assert got == want, (
            f"m, l after the blocks {[b.tolist() for b in blocks]}: want {want[0]:g}, {want[1]:g}, "
            f"got {got[0]:g}, {got[1]:g}"
        )


@step1
def test_online_softmax_handles_growing_max(lab, device):
    row = torch.tensor([-40.0, -39.5, 0.0, 3.0, 999.0, 1000.0], device=device)
    check_stats(lab, row, [2, 2, 2])
    check_stats(lab, row, [1] * 6)


@step1
def test_online_softmax_handles_shrinking_max_and_ties(lab, device):
    check_stats(lab, torch.tensor([1000.0, 999.0, 3.0, 0.0, -40.0], device=device), [2, 2, 1])
    check_stats(lab, torch.full((12,), 88.0, device=device), [5, 4, 3])


@step1
def test_online_softmax_minus_inf(lab, device):
    row = torch.tensor([-INF, -INF, -INF, 2.0, -INF, 3.0], device=device)
    check_stats(lab, row, [2, 2, 2])
    check_stats(lab, row, [3, 3])
    check_stats(lab, torch.full((4,), -INF, device=device), [1, 3])
    low = torch.tensor([-3.0e38, -3.0e38, -INF, -3.1e38], device=device)
    check_stats(lab, low, [1, 2, 1])  # below every finite number that could stand for -inf


@step1
def test_online_softmax_empty_blocks(lab, device):
    row = oracle.inputs(6, device=device)
    check_stats(lab, row, [0, 4, 0, 2, 0])
    check_stats(lab, row[:0], [0])
    with pytest.raises(ValueError, match="."):
        lab.online_softmax_stats([])


@step1
def test_online_softmax_takes_a_generator_one_block_at_a_time(lab, device):
    row = oracle.inputs(4096, device=device)
    served, kept = [], 0

    def blocks():
        nonlocal kept
        for start in range(0, 4096, 32):
            block = row[start : start + 32].clone()
            served.append(weakref.ref(block))
            yield block
            del block
            kept = max(kept, sum(ref() is not None for ref in served))

    got = lab.online_softmax_stats(blocks())
    oracle.check_all(oracle.softmax_stats(row, 128), got, "online_softmax_stats")
    assert len(served) == 128, f"each block once: 128 of them, got {len(served)}"
    assert kept <= 3, f"a block is not needed once it has been used: got {kept} blocks kept"
    assert lab.work.largest <= 4 * 32 * row.element_size(), (
        f"one block of 32 numbers at a time: got a tensor of shape {lab.work.largest_shape}"
    )


@step1
def test_online_softmax_shift_and_split(lab, device):
    row = oracle.inputs(48, dtype=F64, device=device)
    m, l = lab.online_softmax_stats(row.split(8))
    m_shifted, l_shifted = lab.online_softmax_stats((row + 500.0).split(8))
    check_same(m_shifted, (row + 500.0).max(), "m of a row plus 500 is its maximum")
    check_same(l_shifted, l, "l of a row plus 500 is that of the row", rtol=1e-11)
    for size in (1, 5, 48):
        again = lab.online_softmax_stats(row.split(size))[1]
        check_same(again, l, f"l in blocks of {size} is that in blocks of 8", rtol=1e-12)
    check_same(m, row.max(), "m is the row's maximum")


# ---------------------------------------------------------------- step 2


def check_forward(lab, q, k, v, causal=False, block_q=16, block_k=16):
    with case(causal=causal, block_q=block_q, block_k=block_k):
        got = lab.flash_attention_forward(q, k, v, causal=causal, block_q=block_q, block_k=block_k)
        want = oracle.attention(q, k, v, causal, tiles=(block_q, block_k))
        oracle.check_all(want, got, "flash_attention_forward")


@step2
@pytest.mark.parametrize(
    ("T", "block_q", "block_k"),
    [(33, 7, 11), (33, 11, 7), (33, 16, 32), (33, 32, 16), (13, 1, 5), (32, 16, 16), (1, 16, 16)],
)
def test_flash_forward_matches_naive(lab, device, T, block_q, block_k):
    q, k, v = oracle.qkv(2, 3, T, 8, device=device)
    check_forward(lab, q, k, v, False, block_q, block_k)
    check_forward(lab, q, k, v, True, block_q, block_k)


@step2
@torch_dtypes
def test_flash_forward_dtypes(lab, device, dtype):
    q, k, v = oracle.qkv(1, 2, 29, 16, dtype=dtype, device=device)
    check_forward(lab, q, k, v, False, 8, 12)
    check_forward(lab, q, k, v, True, 8, 12)


score_ranges = pytest.mark.parametrize("kind", ["large", "growing", "shrinking", "equal", "low"])


@step2
@score_ranges
def test_flash_forward_score_ranges(lab, device, kind):
    q, k, v = oracle.qkv(1, 2, 32, 16, kind=kind, device=device)
    check_forward(lab, q, k, v, False, 8, 8)
    check_forward(lab, q, k, v, True, 8, 8)


@step2
@causal_or_full
@pytest.mark.parametrize("sign", [1, -1])
def test_flash_forward_huge_equal_scores(lab, device, sign, causal):
    # Scores near -1e11 lie below every finite number that could stand for -inf.
    x = torch.full((1, 1, 20, 64), 133120.0, dtype=F64, device=device)
    out, lse = lab.flash_attention_forward(x, sign * x, x, causal=causal, block_q=8, block_k=8)
    off = ((out - x) / x).abs().max().item()
    assert off < 1e-3, f"equal scores weigh equally: want 133120, got {out[0, 0, -1, 0].item()}"
    off = (lse / (sign * 8 * 133120.0**2) - 1).abs().max().item()
    assert off < 1e-9, (
        f"lse is the score itself here, {sign * 1.4177e11}: got {lse[0, 0, -1].item()}"
    )


@step2
def test_flash_forward_half_scores_do_not_overflow(lab, device):
    q, k, v = oracle.qkv(1, 1, 20, 64, dtype=F16, device=device)
    check_forward(lab, q * 60, k * 60, v)  # q.k before scaling passes 65,504


@step2
def test_flash_forward_head_dims(lab, device):
    for D in (1, 3, 24, 100):
        with case(D=D):
            check_forward(lab, *oracle.qkv(1, 2, 19, D, device=device), True, 8, 8)


@step2
def test_flash_forward_cross_attention_lengths(lab, device):
    for T, S in ((1, 40), (40, 1), (13, 29), (29, 13), (16, 48)):
        with case(T=T, S=S):
            check_forward(lab, *oracle.qkv(2, 2, T, 8, S=S, device=device), False, 8, 16)
            check_forward(lab, *oracle.qkv(2, 2, T, 8, S=S, device=device), False, 16, 7)


@step2
def test_flash_forward_layouts(lab, device):
    for layout in ("transposed", "strided"):
        q, k, v = oracle.qkv(2, 3, 21, 8, device=device, layout=layout)
        with case(layout=layout):
            check_forward(lab, q, k, v, True, 8, 8)
            # Only V has other strides.
            check_forward(lab, q.contiguous(), k.contiguous(), v, True, 8, 8)


@step2
def test_flash_forward_permuted_and_shifted_keys(lab, device):
    q, k, v = oracle.qkv(1, 2, 24, 8, dtype=F64, device=device)
    out, lse = lab.flash_attention_forward(q, k, v, block_q=8, block_k=8)
    order = torch.randperm(24, device=device)
    again, lse_again = lab.flash_attention_forward(
        q, k[:, :, order], v[:, :, order], block_q=8, block_k=8
    )
    check_same(again, out, "out of keys in another order", atol=1e-12)
    check_same(lse_again, lse, "lse of keys in another order", atol=1e-12)
    u = oracle.inputs(8, dtype=F64, device=device)
    shifted, lse_shifted = lab.flash_attention_forward(q, k + u, v, block_q=8, block_k=8)
    check_same(shifted, out, "out with one number added to all scores of a row", atol=1e-12)
    moved = lse + q @ u / math.sqrt(8)
    check_same(lse_shifted, moved, "lse with one number added to all scores of a row", atol=1e-12)


@step2
def test_flash_forward_halves_merge(lab, device):
    q, k, v = oracle.qkv(1, 2, 24, 8, dtype=F64, device=device)
    out, lse = lab.flash_attention_forward(q, k, v, block_q=8, block_k=8)
    left = lab.flash_attention_forward(q, k[:, :, :10], v[:, :, :10], block_q=8, block_k=8)
    right = lab.flash_attention_forward(q, k[:, :, 10:], v[:, :, 10:], block_q=8, block_k=8)
    merged = torch.logaddexp(left[1], right[1])
    both = sum(o * torch.exp(s - merged)[..., None] for o, s in (left, right))
    check_same(merged, lse, "lse of two halves of the keys, merged", atol=1e-12)
    check_same(both, out, "out of two halves of the keys, merged by their lse", atol=1e-12)


# T = 256 shows how much memory is alive at once; beside the small q of T = 48, a band of scores
# (block x T) is too large a tensor.
sizes_for_memory = pytest.mark.parametrize(
    ("T", "D", "block", "dtype", "causal"),
    [
        (256, 16, 32, F32, True),
        (256, 16, 32, F16, False),
        (48, 2, 8, F32, False),
        (48, 2, 8, F16, True),
    ],
    ids=str,
)


@step2
@sizes_for_memory
def test_flash_forward_makes_no_score_matrix(lab, device, T, D, block, dtype, causal):
    q, k, v = oracle.qkv(1, 2, T, D, dtype=dtype, device=device)
    check_forward(lab, q, k, v, causal, block, block)
    check_memory(lab.work, q, block, peak=6 if dtype == F32 else 7)


def check_memory(work, q, block, peak):
    """No tensor larger than q or a tile of scores; at most `peak` times q alive at once."""
    most = 1.5 * max(q.numel(), q.shape[0] * q.shape[1] * block * block)
    assert work.most_elements <= most, (
        f"nothing larger than q ({q.numel():,} elements) or a tile of scores is needed: "
        f"got {work.most_text}"
    )
    if q.shape[2] < 256:
        return  # a few tiles are as large as everything else
    assert work.peak <= peak * q.nbytes, (
        f"O(T D) memory, half inputs converted a tile at a time: want at most {peak} times q's "
        f"{q.nbytes:,} bytes alive at once, got {work.peak / q.nbytes:.1f} times"
    )


tile_shapes = pytest.mark.parametrize(
    ("T", "block_q", "block_k"), [(96, 16, 16), (128, 32, 16), (120, 16, 40)]
)


@step2
@tile_shapes
def test_flash_forward_causal_skips_tiles(lab, device, T, block_q, block_k):
    q, k, v = oracle.qkv(1, 1, T, 16, device=device)
    check_forward(lab, q, k, v, False, block_q, block_k)
    full = lab.work
    check_forward(lab, q, k, v, True, block_q, block_k)
    check_work(lab.work, full, 2, T, 16, block_q, block_k)


def tile_pairs(T, block_q, block_k, causal):
    """Scores in the tiles that hold a visible one, the last ones padded to full tiles or not."""
    total = 0
    for start in range(0, T, block_q):
        stop = min(start + block_q, T) if causal else T
        total += block_q * math.ceil(stop / block_k) * block_k
    return total


def check_work(causal, full, products, T, D, block_q, block_k):
    """Each visited tile is computed once, those that hold nothing visible never; nothing hides."""
    works = {"full": full, "causal": causal}
    pairs = {what: tile_pairs(T, block_q, block_k, what == "causal") for what in works}
    for what, work in works.items():
        want = 2 * products * pairs[what] * D
        assert work.flops <= 1.01 * want, (
            f"{what}: {products} products for each of the {pairs[what]:,} scores in visited tiles, "
            f"{want:,} FLOPs: got {work.flops:,}, {work.flops / want:.2f} times as many"
        )
        assert work.moved >= 4 * T * T / (2 if what == "causal" else 1), (
            f"{what}: {pairs[what]:,} scores cannot be made and used by moving {work.moved:,} "
            "bytes in PyTorch: compute them where they can be seen"
        )
    if full.flops == 0:  # no matrix products: then by what is read and written
        assert causal.moved <= 0.75 * full.moved, (
            f"causal needs {pairs['causal'] / pairs['full']:.2f} of the work: got "
            f"{causal.moved / full.moved:.2f}; tiles right of the diagonal need not be visited"
        )


@step2
def test_flash_forward_sums_in_float32(lab, device):
    # 320 equal terms, one key a tile: a sum kept in bfloat16 (8 bits) stops growing at 256.
    q, k, v = oracle.qkv(1, 1, 1, 8, S=320, dtype=BF16, device=device)
    check_forward(lab, q * 0, k, torch.ones_like(v), False, 1, 1)


@step2
def test_flash_forward_many_heads_long_rows(lab, device):
    check_forward(lab, *oracle.qkv(2, 5, 150, 8, device=device), True, 64, 32)
    check_forward(lab, *oracle.qkv(1, 2, 70, 128, device=device), False, 32, 64)


@step2
def test_flash_forward_follows_its_input(lab, device):
    q, k, v = oracle.qkv(1, 2, 20, 8, device=device)
    out, lse = lab.flash_attention_forward(q, k, v)
    kept = out.clone(), lse.clone()
    for x in (q, k, v):
        x.copy_(oracle.inputs(1, 2, 20, 8, device=device))
    check_forward(lab, q, k, v)
    check_kept((out, lse), kept)


@step2
def test_flash_forward_rejects(lab, device):
    q, k, v = oracle.qkv(1, 1, 8, 4, device=device)
    lab.flash_attention_forward(q, k, v)
    check_rejects(lab.flash_attention_forward, q, k, v)
    for block in (0, -1):
        with pytest.raises(ValueError, match="block_q"):
            lab.flash_attention_forward(q, k, v, block_q=block)
        with pytest.raises(ValueError, match="block_k"):
            lab.flash_attention_forward(q, k, v, block_k=block)
    with pytest.raises(ValueError, match="T=8, S=6"):
        lab.flash_attention_forward(q, k[:, :, :6], v[:, :, :6], causal=True)


def check_rejects(attention, q, k, v):
    """Shapes, dtypes and empty tensors that no attention function takes."""
    bad = {
        "rank": (q[0], k[0], v[0]),
        "batch": (q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)),
        "heads": (q.repeat(1, 2, 1, 1), k, v),
        "head dim": (q.repeat(1, 1, 1, 2), k, v),
        "k and v lengths": (q, k, v[:, :, :4]),
        "dtype": (q, k, v.double()),
        "integers": (q.int(), k.int(), v.int()),
        "no queries": (q[:, :, :0], k, v),
        "no keys": (q, k[:, :, :0], v[:, :, :0]),
        "device": (q, k.to("meta"), v.to("meta")),
    }
    for what, args in bad.items():
        try:
            attention(*args)
        except ValueError as error:
            message = str(error)
        else:
            message = "(nothing was raised)"
        assert "got" in message, f"bad {what} is a ValueError that says what it got: {message}"


# ---------------------------------------------------------------- step 3


def forward_results(q, k, v, causal):
    """(out, lse) as a right forward gives them, so that this step does not lean on step 2."""
    out, lse = oracle.attention(q, k, v, causal)
    return out.value.to(out.dtype), lse.value.to(lse.dtype)


def check_backward(lab, q, k, v, dout, causal=False, block_q=16, block_k=16):
    with case(causal=causal, block_q=block_q, block_k=block_k):
        out, lse = forward_results(q, k, v, causal)
        got = lab.flash_attention_backward(
            q, k, v, out, lse, dout, causal=causal, block_q=block_q, block_k=block_k
        )
        want = oracle.attention_gradients(q, k, v, dout, causal, tiles=(block_q, block_k))
        oracle.check_all(want, got, "flash_attention_backward")


@step3
@pytest.mark.parametrize(
    ("T", "block_q", "block_k"),
    [(33, 7, 11), (33, 11, 7), (37, 32, 16), (37, 16, 32), (13, 1, 5), (32, 16, 16), (1, 16, 16)],
)
def test_flash_backward_matches_autograd(lab, device, T, block_q, block_k):
    q, k, v = oracle.qkv(2, 2, T, 8, dtype=F64, device=device)
    dout = oracle.inputs(2, 2, T, 8, dtype=F64, device=device)
    for causal in (False, True):
        check_backward(lab, q, k, v, dout, causal, block_q, block_k)
        if T == 1:
            continue
        # The oracle's formulas are the same as autograd's own.
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        # A gradient given to backward() would make PyTorch import half a second's modules.
        (lab.naive_attention(*leaves, causal=causal) * dout).sum().backward()
        for expected, x in zip(
            oracle.attention_gradients(q, k, v, dout, causal), leaves, strict=True
        ):
            expected.check(x.grad)


@step3
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_flash_backward_dtypes(lab, device, dtype):
    q, k, v = oracle.qkv(1, 2, 29, 16, dtype=dtype, device=device)
    dout = oracle.inputs(1, 2, 29, 16, dtype=dtype, device=device)
    check_backward(lab, q, k, v, dout, False, 8, 12)
    check_backward(lab, q, k, v, dout, True, 8, 12)


@step3
def test_flash_backward_sums_in_float32(lab, device):
    # 320 equal terms: a sum kept in bfloat16 (8 bits) stops growing at 256 of them.
    q, k, v = oracle.qkv(1, 1, 640, 8, S=4, dtype=BF16, device=device)
    check_backward(lab, q * 0.01, k * 0.01, v, torch.ones_like(q), False, 2, 4)


@step3
def test_flash_backward_sums_dq_in_float32(lab, device):
    # The same for dq: 640 keys in tiles of 2, where each adds as much of the same sign.
    sign = torch.tensor([1.0, -1.0], dtype=BF16, device=device).repeat(320)[None, None, :, None]
    k = v = sign.expand(1, 1, 640, 8).contiguous()
    q = torch.zeros(1, 1, 4, 8, dtype=BF16, device=device)
    check_backward(lab, q, k, v, torch.ones_like(q), False, 4, 2)


@step3
def test_flash_backward_cross_attention_lengths(lab, device):
    for T, S in ((13, 29), (29, 13), (1, 40), (40, 1)):
        q, k, v = oracle.qkv(1, 2, T, 8, S=S, device=device)
        with case(T=T, S=S):
            check_backward(lab, q, k, v, oracle.inputs(1, 2, T, 8, device=device), False, 8, 16)
            check_backward(lab, q, k, v, oracle.inputs(1, 2, T, 8, device=device), False, 16, 7)


@step3
@score_ranges
def test_flash_backward_score_ranges(lab, device, kind):
    q, k, v = oracle.qkv(1, 2, 32, 16, kind=kind, device=device)
    dout = oracle.inputs(1, 2, 32, 16, device=device)
    check_backward(lab, q, k, v, dout, False, 8, 8)
    check_backward(lab, q, k, v, dout, True, 8, 8)


@step3
def test_flash_backward_reads_dout_through_its_strides(lab, device):
    q, k, v = oracle.qkv(2, 2, 21, 8, device=device)
    row = oracle.inputs(2, 2, 1, 8, device=device)
    check_backward(lab, q, k, v, row.expand(2, 2, 21, 8), True, 8, 8)
    check_backward(lab, q, k, v, torch.ones((), device=device).expand(2, 2, 21, 8), True, 8, 8)
    for layout in ("transposed", "strided"):
        dout = oracle.inputs(2, 2, 21, 8, device=device, layout=layout)
        check_backward(lab, q, k, v, dout, True, 8, 8)
        views = oracle.qkv(2, 2, 21, 8, device=device, layout=layout)
        check_backward(lab, *views, dout, True, 8, 8)


@step3
@sizes_for_memory
def test_flash_backward_makes_no_score_matrix(lab, device, T, D, block, dtype, causal):
    q, k, v = oracle.qkv(1, 2, T, D, dtype=dtype, device=device)
    dout = oracle.inputs(1, 2, T, D, dtype=dtype, device=device)
    check_backward(lab, q, k, v, dout, causal, block, block)
    check_memory(lab.work, q, block, peak=8 if dtype == F32 else 14)


@step3
@tile_shapes
def test_flash_backward_causal_skips_tiles(lab, device, T, block_q, block_k):
    q, k, v = oracle.qkv(1, 1, T, 16, device=device)
    dout = oracle.inputs(1, 1, T, 16, device=device)
    check_backward(lab, q, k, v, dout, False, block_q, block_k)
    full = lab.work
    check_backward(lab, q, k, v, dout, True, block_q, block_k)
    check_work(lab.work, full, 5, T, 16, block_q, block_k)


@step3
def test_flash_backward_many_heads_long_rows(lab, device):
    q, k, v = oracle.qkv(2, 5, 150, 8, device=device)
    check_backward(lab, q, k, v, oracle.inputs(2, 5, 150, 8, device=device), True, 64, 32)
    q, k, v = oracle.qkv(1, 2, 70, 128, device=device)
    check_backward(lab, q, k, v, oracle.inputs(1, 2, 70, 128, device=device), False, 32, 64)


@step3
def test_flash_backward_uses_lse_and_out(lab, device):
    # P is exp(s - lse): with lse + log 2 every weight is half as large, and so is every gradient.
    q, k, v = oracle.qkv(1, 2, 20, 8, dtype=F64, device=device)
    dout = oracle.inputs(1, 2, 20, 8, dtype=F64, device=device)
    out, lse = forward_results(q, k, v, False)
    whole = lab.flash_attention_backward(q, k, v, out, lse, dout)
    halves = lab.flash_attention_backward(q, k, v, out, lse + math.log(2), dout)
    for name, a, b in zip(("dq", "dk", "dv"), whole, halves, strict=True):
        off = (a - 2 * b).abs().max().item()
        assert off < 1e-10, f"{name}: recompute P from lse; it does not follow lse (off {off:.2g})"
    no_delta = lab.flash_attention_backward(q, k, v, out * 0, lse, dout)
    check_same(no_delta[2], whole[2], "dv does not depend on out, which is 0 here")
    off = (no_delta[0] - whole[0]).abs().max().item()
    assert off > 1e-3, (
        f"delta is rowsum(dout * out): with out = 0 want dq to change by over 1e-3, got {off:.2g}"
    )


@step3
def test_flash_backward_follows_its_input(lab, device):
    q, k, v = oracle.qkv(1, 2, 20, 8, device=device)
    dout = oracle.inputs(1, 2, 20, 8, device=device)
    grads = lab.flash_attention_backward(q, k, v, *forward_results(q, k, v, False), dout)
    kept = [g.clone() for g in grads]
    for x in (q, k, v, dout):
        x.copy_(oracle.inputs(1, 2, 20, 8, device=device))
    check_backward(lab, q, k, v, dout)
    check_kept(grads, kept)


@step3
@causal_or_full
def test_autograd_function_end_to_end(lab, device, causal):
    leaves = [
        x.requires_grad_() for x in oracle.qkv(2, 2, 33, 8, dtype=F64, device=device, kind="normal")
    ]
    dout = oracle.inputs(2, 2, 33, 8, dtype=F64, device=device)
    out = lab.flash_attention(*leaves, causal=causal)
    q, k, v = (x.detach() for x in leaves)
    oracle.attention(q, k, v, causal)[0].check(out)
    with lab.guarded("flash_attention's backward", row_limit=16, engine_calls=1):
        got = torch.autograd.grad((out * dout).sum(), leaves)
    for expected, result in zip(
        oracle.attention_gradients(q, k, v, dout, causal), got, strict=True
    ):
        expected.check(result)


@step3
def test_autograd_function_saves_nothing_of_size_t_squared(lab, device):
    leaves = [x.requires_grad_() for x in oracle.qkv(1, 1, 128, 4, device=device)]
    out = lab.flash_attention(*leaves)
    alive = lab.work.live
    assert alive <= 4 * out.nbytes, (
        f"out and lse are all that is kept beside q, k, v: got {alive} bytes alive after the "
        f"forward, out has {out.nbytes}"
    )
    torch.autograd.grad(out.sum(), leaves)


# ---------------------------------------------------------------- step 4


@step4
@kernel_dtypes
@pytest.mark.parametrize("n_cols", [37, 128, 1000])
def test_triton_softmax(lab, device, dtype, n_cols):
    x = memory.fenced(oracle.inputs(5, n_cols, dtype=dtype, device=device) * 3)
    oracle.softmax(x).check(lab.triton_softmax(x))


@step4
@pytest.mark.parametrize(
    ("n_rows", "n_cols"),
    [(1, 1), (7, 1), (1, 2), (3, 65), (2, 4097), (300, 70), (2, 20000), (1, 65536)],
)
def test_triton_softmax_shapes(lab, device, n_rows, n_cols):
    x = oracle.inputs(n_rows, n_cols, device=device)
    x[:, -1] += 300  # the maximum is the last to be seen
    x = memory.fenced(x)
    oracle.softmax(x).check(lab.triton_softmax(x))


@step4
def test_triton_softmax_large_values(lab, device):
    x = oracle.inputs(5, 50, device=device) * 300
    x[1] += 1e4
    x[2] = x[2] / 100 - 1e5
    x[3] = -3e38  # below every finite number that could stand for -inf
    x[4] = 0.0
    oracle.softmax(x).check(lab.triton_softmax(x))


@step4
def test_triton_softmax_row_strides(lab, device):
    x = oracle.inputs(6, 40, device=device, layout="strided")
    oracle.softmax(x).check(lab.triton_softmax(x))
    wide = oracle.inputs(6, 100, device=device)
    oracle.softmax(wide[::2, 30:70]).check(lab.triton_softmax(wide[::2, 30:70]))
    row = oracle.inputs(1, 40, device=device).expand(6, 40)
    oracle.softmax(row).check(lab.triton_softmax(row))
    columns = oracle.inputs(40, 6, device=device).t()
    oracle.softmax(columns).check(lab.triton_softmax(columns))


@step4
@kernel_dtypes
def test_triton_softmax_rows_that_are_not_finite(lab, device, dtype):
    x = oracle.inputs(6, 64, dtype=dtype, device=device)
    x[0, 3] = INF
    x[1, 5] = math.nan
    x[2] = -INF
    x[3, :40] = -INF
    x[4, 9], x[4, 10] = INF, -INF
    oracle.softmax(x).check(lab.triton_softmax(x))


@step4
@interpreter_only
def test_triton_softmax_reads_and_writes_once(lab, device):
    x = oracle.inputs(8, 100, device=device)
    lab.triton_softmax(x)
    work = lab.kernels
    assert work.bytes_loaded == x.nbytes, (
        f"each element is read once ({x.nbytes} bytes): got {work.bytes_loaded} bytes loaded. "
        "Columns that do not exist are masked off, not read again at another place"
    )
    assert work.bytes_stored == x.nbytes, (
        f"each element is written once ({x.nbytes} bytes): got {work.bytes_stored} bytes stored"
    )


def far_rows(device, n_cols=40):
    """(3, n_cols) float16 whose last row begins past element 2**31; little of it is real memory."""
    stride = 2**30 + 64
    try:
        storage = torch.empty(2 * stride + n_cols, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4.3 GB of address space: {str(error)[:60]}")
    x = storage.as_strided((3, n_cols), (stride, 1))
    x.copy_(oracle.inputs(3, n_cols, dtype=F16, device=device))
    return x


@step4
def test_triton_softmax_offsets_beyond_32_bits(lab, device):
    x = far_rows(device)
    oracle.softmax(x).check(lab.triton_softmax(x))


@step4
def test_triton_softmax_stores_beyond_32_bits(lab, device):
    n_rows, n_cols = 65_537, 32_773
    row = oracle.inputs(1, n_cols, dtype=F16, device=device)
    try:
        torch.empty(n_rows, n_cols, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4.3 GB of address space: {str(error)[:60]}")
    with lab.last_program_only() if here.interpret else contextlib.nullcontext():
        y = lab.triton_softmax(row.expand(n_rows, n_cols))
    oracle.softmax(row).check(y[-1:])


@step4
@interpreter_only
def test_triton_softmax_is_the_kernels_work(lab, device):
    x = oracle.inputs(4, 20, device=device)
    lab.triton_softmax(x)
    with lab.no_program():
        y = lab.triton_softmax(x)
    check_not_written(y=y)


@step4
def test_triton_softmax_follows_its_input(lab, device):
    x = oracle.inputs(3, 20, device=device)
    first = lab.triton_softmax(x)
    kept = first.clone()
    x.copy_(oracle.inputs(3, 20, device=device))
    for _ in range(3):
        oracle.softmax(x).check(lab.triton_softmax(x))
    check_kept([first], [kept])


@step4
@needs_compiler
@pytest.mark.timeout(240)
def test_triton_softmax_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "triton_softmax")


@step4
def test_triton_softmax_rejects(lab, device):
    x = oracle.inputs(2, 8, device=device)
    lab.triton_softmax(x)
    for bad in (x[0], x[None], x[:0], x[:, :0], x.int(), x.double()):
        with pytest.raises(ValueError, match="got"):
            lab.triton_softmax(bad)
    with pytest.raises(ValueError, match="65,?537"):
        lab.triton_softmax(oracle.inputs(1, 65537, device=device))


# ---------------------------------------------------------------- step 5


def check_kernel(lab, q, k, v, causal=False, block_m=16, block_n=16):
    with case(causal=causal, block_m=block_m, block_n=block_n):
        got = lab.triton_flash_attention(q, k, v, causal=causal, block_m=block_m, block_n=block_n)
        want = oracle.attention(q, k, v, causal, kernel=True, tiles=(block_m, block_n))
        oracle.check_all(want, got, "triton_flash_attention")


@step5
@causal_or_full
@kernel_dtypes
def test_triton_flash_attention(lab, device, dtype, causal):
    for T in (16, 37):
        q, k, v = fenced_qkv(2, 2, T, 32, dtype=dtype, device=device)
        check_kernel(lab, q, k, v, causal)  # out (2, 2, T, 32), lse (2, 2, T)


@step5
@pytest.mark.parametrize(
    ("T", "block_m", "block_n"),
    [(1, 16, 16), (65, 32, 16), (65, 16, 32), (50, 64, 16), (81, 16, 64)],
)
def test_triton_flash_attention_tiles(lab, device, T, block_m, block_n):
    q, k, v = fenced_qkv(1, 1, T, 16, device=device)
    check_kernel(lab, q, k, v, False, block_m, block_n)
    check_kernel(lab, q, k, v, True, block_m, block_n)


@step5
def test_triton_flash_attention_head_dims(lab, device):
    for D in (16, 64, 128, 256):
        check_kernel(lab, *fenced_qkv(1, 1, 21, D, device=device), True)


@step5
@score_ranges
def test_triton_flash_attention_score_ranges(lab, device, kind):
    q, k, v = fenced_qkv(1, 1, 40, 32, kind=kind, device=device)
    check_kernel(lab, q, k, v, False, 64, 16)
    check_kernel(lab, q, k, v, True, 64, 16)


@step5
@pytest.mark.parametrize(("D", "sign"), [(32, 1), (64, 1), (32, -1), (64, -1)])
def test_triton_flash_attention_huge_equal_scores(lab, device, D, sign):
    # Scores near 1e11: exp(s - m) must be exactly 1, however s and m were rounded on the way,
    # and scores near -1e11 lie below every finite number that could stand for -inf.
    dtype = F32 if here.interpret else BF16
    x = torch.full((1, 1, 20, D), 133120.0, dtype=dtype, device=device)
    out, lse = lab.triton_flash_attention(x, sign * x, x, causal=sign < 0)
    assert (out == x).all().item(), (
        f"equal scores weigh equally: want 133120, got {out[0, 0, -1, 0].item()}. Carry m and l: "
        "log l is lost in m + log l when m is this large"
    )
    bad = (~lse.isfinite()).sum().item()
    assert bad == 0, f"lse of scores near 1e11: want finite numbers, got {bad} that are not"


@step5
def test_triton_flash_attention_half_scores_do_not_overflow(lab, device):
    q, k, v = fenced_qkv(1, 1, 20, 64, dtype=F16, device=device)
    check_kernel(lab, q * 60, k * 60, v)  # q.k before scaling passes 65,504


@step5
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_triton_flash_attention_layouts(lab, device, layout):
    q, k, v = oracle.qkv(2, 2, 21, 16, device=device, layout=layout)
    check_kernel(lab, q, k, v, True, 32, 16)
    # Only V has other strides.
    check_kernel(lab, q.contiguous(), k.contiguous(), v, True, 32, 16)


@step5
@interpreter_only
@causal_or_full
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_triton_flash_attention_moves_few_bytes(lab, device, block_m, block_n, causal):
    B, H, T, D = 1, 1, 70, 16
    q, k, v = oracle.qkv(B, H, T, D, device=device)
    check_kernel(lab, q, k, v, causal, block_m, block_n)
    work, row = lab.kernels, D * q.element_size()
    keys = flops = 0
    for start in range(0, T, block_m):
        seen = min(start + block_m, T) if causal else T
        tiles = math.ceil(seen / block_n)
        keys += min(tiles * block_n, T)
        flops += tiles * 4 * block_m * block_n * D
    want = B * H * (T + 2 * keys) * row
    assert work.bytes_loaded <= want, (
        f"q once, and for each query tile the key and value tiles it sees: {want} bytes; "
        f"got {work.bytes_loaded} loaded. Rows that do not exist are masked off, not read elsewhere"
    )
    assert work.dot_flops <= B * H * flops, (
        f"two products a visited tile: {B * H * flops} FLOPs; got {work.dot_flops}"
    )
    stored = B * H * T * (row + 4)
    assert work.bytes_stored == stored, (
        f"out and lse are written once: {stored} bytes; got {work.bytes_stored}"
    )


@step5
def test_triton_flash_attention_offsets_beyond_32_bits(lab, device):
    B, H, T, D = 5, 3280, 512, 256
    try:
        x = torch.empty(B, H, T, D, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 8.6 GB of address space: {str(error)[:60]}")
    if here.interpret:
        x[-1:, -1:] = oracle.inputs(1, 1, T, D, dtype=F16, device=device)
        with lab.last_program_only():  # the last head's: no other is real memory
            out, lse = lab.triton_flash_attention(x, x, x, block_m=512, block_n=512)
    else:
        x.normal_()
        out, lse = lab.triton_flash_attention(x, x, x, block_m=64, block_n=64)
    last = x[-1:, -1:]
    want = oracle.attention(last, last, last, kernel=True)
    oracle.check_all(want, (out[-1:, -1:], lse[-1:, -1:]), "triton_flash_attention")


@step5
def test_triton_flash_attention_many_heads_long_rows(lab, device):
    check_kernel(lab, *fenced_qkv(2, 3, 70, 16, device=device), True, 64, 64)
    check_kernel(lab, *fenced_qkv(1, 1, 200, 128, dtype=F16, device=device), False, 64, 64)


@step5
def test_triton_flash_attention_sums_in_float32(lab, device):
    # Equal terms, 16 keys a tile: a sum kept in bfloat16 (8 bits) stops growing at 256 tiles.
    if here.interpret:
        pytest.skip("the interpreter computes bfloat16 as raw integer bits")
    x = torch.ones(1, 1, 5120, 16, dtype=BF16, device=device)
    check_kernel(lab, x * 0, x, x)


@step5
@interpreter_only
def test_triton_flash_attention_is_the_kernels_work(lab, device):
    q, k, v = oracle.qkv(1, 1, 20, 16, device=device)
    lab.triton_flash_attention(q, k, v)
    with lab.no_program():
        results = lab.triton_flash_attention(q, k, v)
    check_not_written(**dict(zip(("out", "lse"), results, strict=True)))


@step5
def test_triton_flash_attention_follows_its_input(lab, device):
    q, k, v = oracle.qkv(1, 1, 20, 16, device=device)
    out, lse = lab.triton_flash_attention(q, k, v)
    kept = out.clone(), lse.clone()
    for x in (q, k, v):
        x.copy_(oracle.inputs(1, 1, 20, 16, device=device))
    check_kernel(lab, q, k, v)
    check_kept((out, lse), kept)


@step5
@needs_compiler
@pytest.mark.timeout(240)
def test_triton_flash_attention_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "triton_flash_attention", block_m=16, block_n=16)
    # The benchmark's tiles of 64 x 64 must fit, though a right kernel's registers may spill.
    check_compiles(lab, request, "triton_flash_attention", may_spill=True)


@step5
def test_triton_flash_attention_rejects(lab, device):
    q, k, v = oracle.qkv(1, 1, 8, 16, device=device)
    lab.triton_flash_attention(q, k, v)
    check_rejects(lab.triton_flash_attention, q, k, v)
    with pytest.raises(ValueError, match="float64"):
        lab.triton_flash_attention(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="12"):
        lab.triton_flash_attention(*(x[..., :12] for x in (q, k, v)))
    with pytest.raises(ValueError, match="one shape"):
        lab.triton_flash_attention(q, k[:, :, :4], v[:, :, :4])
    for block in (0, 7, 8, 24):
        with pytest.raises(ValueError, match="block_m"):
            lab.triton_flash_attention(q, k, v, block_m=block)
        with pytest.raises(ValueError, match="block_n"):
            lab.triton_flash_attention(q, k, v, block_n=block)
    many = q[:1, :1, :1].expand(70_000, 1, 1, 16)
    few = lab.last_program_only() if here.interpret else contextlib.nullcontext()
    with pytest.raises(ValueError, match="65,535"), few:
        lab.triton_flash_attention(many, many, many)
    if here.interpret:
        with pytest.raises(ValueError, match="bfloat16"):
            lab.triton_flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
