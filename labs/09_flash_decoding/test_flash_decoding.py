"""Tests of lab 09. Run `pytest labs/09_flash_decoding`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
`oracle` gives inputs and float64 results with their error budgets.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from labs._harness import memory, oracle, runtime
from labs._harness.cases import (
    check_compiles,
    check_kept,
    fenced_qkv,
    interpreter_only,
    kernel_dtypes,
    needs_compiler,
    needs_triton,
    step,
)

STEPS = {
    1: "merge_states",
    2: "split_attention",
    3: "_split_kernel",
    4: "flash_decode",
    5: "paged_decode",
    6: "append_kv",
}

# Most elements of a row that torch's softmax or logsumexp may see at a time, by function.
ROW_LIMITS = dict.fromkeys(
    (
        "split_attention",
        "split_partials",
        "merge_partials",
        "flash_decode",
        "paged_partials",
        "paged_decode",
    ),
    0,
)

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
INF, NAN = math.inf, math.nan

here = runtime.setup()
torch_dtypes = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
score_kinds = pytest.mark.parametrize("kind", ["large", "growing", "shrinking", "equal"])
step1 = step(1)
step2 = step(2)
step3 = step(3, needs_triton)
step4 = step(4, needs_triton)
step5 = step(5, needs_triton)
step6 = step(6)


# ---------------------------------------------------------------- step 1


def parts_of(q, k, v, bounds):
    """float64 (m, l, acc) of each chunk of keys between two neighbours of `bounds`."""
    parts = []
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        s = q.double() @ k[:, :, lo:hi].double().transpose(-2, -1) / math.sqrt(q.shape[-1])
        if lo == hi:
            parts.append((s.new_full(s.shape[:-1], -INF), s.sum(-1), s @ v[:, :, lo:hi].double()))
            continue
        m = s.amax(-1)
        p = torch.exp(s - m[..., None])
        parts.append((m, p.sum(-1), p @ v[:, :, lo:hi].double()))
    return tuple(torch.stack(x) for x in zip(*parts, strict=True))


def states_of(q, k, v, bounds, dtype):
    """(outs, lses) of the same chunks: outs in `dtype`, NaN where the chunk is empty."""
    m, l, acc = parts_of(q, k, v, bounds)
    lse_dtype = F64 if dtype == F64 else F32
    return (acc / l[..., None]).to(dtype), (m + l.log()).to(lse_dtype)


@step1
@torch_dtypes
@pytest.mark.parametrize("bounds", [[0, 30], [0, 10, 30], [0, 1, 2, 17, 29, 30]], ids=str)
def test_merge_states_equals_attention(lab, device, dtype, bounds):
    q, k, v = oracle.qkv(2, 3, 4, 8, S=30, dtype=dtype, device=device)
    got = lab.merge_states(*states_of(q, k, v, bounds, dtype))
    oracle.check_all(oracle.attention(q, k, v), got, "merge_states")


@step1
@torch_dtypes
def test_merge_accumulators_equals_attention(lab, device, dtype):
    q, k, v = oracle.qkv(2, 3, 4, 8, S=30, dtype=dtype, device=device)
    parts = parts_of(q, k, v, [0, 1, 2, 17, 29, 30])
    kind = F64 if dtype == F64 else F32
    m, l, acc = lab.merge_accumulators(*(x.to(kind) for x in parts))
    assert torch.equal(m, parts[0].to(kind).amax(0)), "m is the largest of the parts' m"
    got = (acc / l[..., None]).to(dtype), m + l.log()
    oracle.check_all(oracle.attention(q, k, v), got, "merge_accumulators")


@step1
def test_merge_worked_example(lab, device):
    # Scores 0, 1 | 2, -1 and values 2, 4 | 1, 3: the two tiles of lab 06's example.
    ms = torch.tensor([1.0, 2.0], dtype=F64, device=device)
    ls = torch.tensor([1 + math.exp(-1), 1 + math.exp(-3)], dtype=F64, device=device)
    accs = torch.tensor([[2 * math.exp(-1) + 4], [1 + 3 * math.exp(-3)]], dtype=F64, device=device)
    m, l, acc = lab.merge_accumulators(ms, ls, accs)
    assert (m.item(), round(l.item(), 4), round(acc.item(), 4)) == (2.0, 1.5530, 2.8915)
    out, lse = lab.merge_states(accs / ls[:, None], ms + ls.log())
    assert (round(out.item(), 4), round(lse.item(), 4)) == (1.8619, 2.4402)


@step1
def test_merge_empty_parts_may_hold_anything(lab, device):
    q, k, v = oracle.qkv(1, 2, 3, 8, S=20, device=device)
    want = oracle.attention(q, k, v)
    for bounds in ([0, 0, 9, 20], [0, 9, 9, 20], [0, 9, 20, 20, 20]):
        outs, lses = states_of(q, k, v, bounds, F32)
        for filler in (NAN, INF, 7.0):
            outs[lses == -INF] = filler
            oracle.check_all(want, lab.merge_states(outs, lses), "merge_states")
        m, l, acc = (x.float() for x in parts_of(q, k, v, bounds))
        acc[m == -INF] = NAN
        l[m == -INF] = NAN
        m, l, acc = lab.merge_accumulators(m, l, acc)
        oracle.check_all(want, (acc / l[..., None], m + l.log()), "merge_accumulators")


@step1
def test_merge_all_parts_empty(lab, device):
    outs = torch.full((3, 2, 5, 4), NAN, device=device)
    lses = torch.full((3, 2, 5), -INF, device=device)
    lses[:, 0, 0], outs[:, 0, 0] = 1.5, 2.0  # one row of ten is not empty
    out, lse = lab.merge_states(outs, lses)
    assert torch.equal(out[0, 0], torch.full((4,), 2.0, device=device))
    assert (out.flatten(0, 1)[1:] == 0).all(), f"a row that sees no key is 0: got {out}"
    assert (lse.flatten()[1:] == -INF).all(), f"and its lse -inf: got {lse}"
    m, l, acc = lab.merge_accumulators(lses, torch.full_like(lses, NAN), outs)
    rest = [x.flatten(0, 1)[1:] for x in (m, l, acc)]
    for x, want, name in zip(rest, (-INF, 0.0, 0.0), ("m", "l", "acc"), strict=True):
        assert (x == want).all(), f"{name} of parts that are all empty is {want}: got {x}"


@step1
@pytest.mark.parametrize("far", [60.0, 1000.0, 1e9])
def test_merge_lse_far_apart(lab, device, far):
    outs = torch.tensor([[3.0], [5.0], [3.0]], device=device)
    for lses, want, lse in (
        ([-far, far, -far], 5.0, far),
        ([far, -far, -INF], 3.0, far),
        ([-far, -far, -INF], 4.0, -far + math.log(2)),
    ):
        got, got_lse = lab.merge_states(outs, torch.tensor(lses, device=device))
        assert got.item() == want, f"lse {lses}: want {want}, got {got.item()}"
        assert got_lse.item() == pytest.approx(lse, rel=1e-6), f"lse {lses}: got {got_lse.item()}"


@step1
def test_merge_accumulators_keeps_counts_beside_huge_scores(lab, device):
    # At m = 1.4e11, m + log l is m: whoever merges by lse takes both parts for equally heavy.
    ms = torch.full((2,), 1.4177e11, device=device)
    ls = torch.tensor([3.0, 1.0], device=device)
    accs = torch.tensor([[6.0], [10.0]], device=device)
    m, l, acc = lab.merge_accumulators(ms, ls, accs)
    assert (m.item(), l.item(), acc.item()) == (ms[0].item(), 4.0, 16.0)


@step1
def test_merge_in_any_order_and_grouping(lab, device):
    q, k, v = oracle.qkv(1, 2, 3, 8, S=24, dtype=F64, device=device, kind="growing")
    bounds = [0, 5, 5, 6, 14, 24]
    whole = lab.merge_accumulators(*parts_of(q, k, v, bounds))
    outs, lses = states_of(q, k, v, bounds, F64)
    state = lab.merge_states(outs, lses)
    for order, cut in (([4, 2, 0, 1, 3], 2), ([1, 0, 3, 2, 4], 1), ([0, 1, 2, 3, 4], 4)):
        mixed = [x[order] for x in parts_of(q, k, v, bounds)]
        groups = [lab.merge_accumulators(*(x[s] for x in mixed)) for s in _cut(cut)]
        again = lab.merge_accumulators(*(torch.stack(x) for x in zip(*groups, strict=True)))
        for a, b, name in zip(whole, again, ("m", "l", "acc"), strict=True):
            assert torch.allclose(a, b, rtol=1e-12), f"{name} depends on the order of merging"
        groups = [lab.merge_states(outs[order][s], lses[order][s]) for s in _cut(cut)]
        again = lab.merge_states(*(torch.stack(x) for x in zip(*groups, strict=True)))
        for a, b, name in zip(state, again, ("out", "lse"), strict=True):
            assert torch.allclose(a, b, atol=1e-12), f"{name} depends on the order of merging"


def _cut(place):
    return slice(None, place), slice(place, None)


@step1
def test_merge_shapes_and_dtypes(lab, device):
    for shape in ((), (4,), (2, 3, 4)):  # D is the last axis of outs, and only of outs
        outs = oracle.inputs(5, *shape, 8, dtype=F16, device=device)
        lses = oracle.inputs(5, *shape, device=device)
        out, lse = lab.merge_states(outs, lses)
        assert (out.shape, out.dtype) == ((*shape, 8), F16)
        assert (lse.shape, lse.dtype) == (shape, F32)
        weights = lses.double().softmax(0)
        want = (weights[..., None] * outs.double()).sum(0)
        assert (out.double() - want).abs().max() < 2e-3
    out, lse = lab.merge_states(outs[:1], lses[:1])
    assert torch.equal(out, outs[0]), "one part alone is the result"
    assert torch.equal(lse, lses[0])


@step1
def test_merge_does_not_hide_nan(lab, device):
    outs = torch.ones(2, 3, 4, device=device)
    lses = torch.zeros(2, 3, device=device)
    outs[0, 1, 2], lses[1, 2] = NAN, NAN
    out, lse = lab.merge_states(outs, lses)
    want = torch.zeros(3, 4, dtype=torch.bool, device=device)
    want[1, 2] = want[2] = True
    assert torch.equal(out.isnan(), want), f"NaN in a part with keys is NaN in the result: {out}"
    assert lse.isnan().tolist() == [False, False, True]
    # The same through merge_accumulators: a part of weight exp(-200) = 0 has keys, too.
    ms = torch.zeros(2, 3, device=device)
    ms[0] = -200.0
    m, l, acc = lab.merge_accumulators(ms, torch.ones_like(ms), outs)
    assert acc.isnan()[1, 2], f"acc is NaN in a part with keys (m = -200 beside 0): got {acc}"
    assert acc.isnan().sum() == 1, f"and in that element only: got {acc}"
    ls = torch.tensor([[1.0, NAN, 1.0], [1.0, 1.0, NAN]], device=device)
    m, l, acc = lab.merge_accumulators(ms, ls, torch.ones_like(outs))
    assert l.isnan().tolist() == [False, True, True], f"l is NaN in a part with keys: got {l}"


@step1
def test_merge_rejects(lab, device):
    lses, outs = torch.zeros(2, 3, device=device), torch.zeros(2, 3, 4, device=device)
    lab.merge_states(outs, lses)
    lab.merge_accumulators(lses, lses, outs)
    for bad in ((outs[:0], lses[:0]), (outs, lses[:1]), (outs[..., 0], lses), (outs[:, :2], lses)):
        with pytest.raises(ValueError, match="got"):
            lab.merge_states(*bad)
    for bad in ((lses[:0], lses[:0], outs[:0]), (lses, lses[:1], outs), (lses, lses, outs[:1])):
        with pytest.raises(ValueError, match="got"):
            lab.merge_accumulators(*bad)


# ---------------------------------------------------------------- step 2


def check_split(lab, q, k, v, n_splits):
    got = lab.split_attention(q, k, v, n_splits)
    oracle.check_all(oracle.attention(q, k, v), got, "split_attention")


@step2
@pytest.mark.parametrize("n_splits", [1, 2, 3, 7, 36, 37, 38, 500])
def test_split_attention_any_number_of_splits(lab, device, n_splits):
    check_split(lab, *oracle.qkv(2, 4, 3, 8, S=37, kv_heads=2, device=device), n_splits)


@step2
@pytest.mark.parametrize(("H", "kv_heads"), [(6, 6), (6, 3), (6, 2), (6, 1)])
@pytest.mark.parametrize("T", [1, 5])
def test_split_attention_groups(lab, device, H, kv_heads, T):
    check_split(lab, *oracle.qkv(2, H, T, 8, S=29, kv_heads=kv_heads, device=device), 4)


@step2
@torch_dtypes
def test_split_attention_dtypes(lab, device, dtype):
    check_split(lab, *oracle.qkv(1, 4, 1, 16, S=50, kv_heads=2, dtype=dtype, device=device), 3)


@step2
@score_kinds
def test_split_attention_score_ranges(lab, device, kind):
    check_split(lab, *oracle.qkv(1, 2, 2, 16, S=40, kind=kind, device=device), 5)


@step2
@pytest.mark.parametrize("S", [1, 2, 64])
def test_split_attention_lengths(lab, device, S):
    for n_splits in (1, 2, 5):
        check_split(lab, *oracle.qkv(1, 2, 1, 8, S=S, device=device), n_splits)


@step2
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_split_attention_layouts(lab, device, layout):
    q, k, v = oracle.qkv(2, 4, 3, 8, S=21, kv_heads=2, device=device, layout=layout)
    check_split(lab, q, k, v, 4)
    check_split(lab, q.contiguous(), k.contiguous(), v, 4)  # only V has other strides


@step2
def test_split_attention_huge_equal_scores(lab, device):
    x = torch.full((1, 1, 1, 64), 133120.0, device=device)
    v = torch.arange(7.0, device=device)[:, None].expand(7, 64)[None, None]
    out, _ = lab.split_attention(x, x.expand(1, 1, 7, 64), v, 3)  # chunks of 2, 2 and 3 keys
    assert torch.allclose(out, torch.full_like(out, 3.0), atol=1e-5), (
        f"equal scores weigh equally: want the mean of 0 to 6, 3.0; got {out[0, 0, 0, 0].item()}. "
        "Merge m, l and acc: log l is lost in m + log l when m is this large"
    )


@step2
def test_split_attention_work(lab, device):
    q, k, v = oracle.qkv(1, 8, 1, 32, S=256, kv_heads=1, device=device)
    lab.split_attention(q, k, v, 8)
    assert lab.work.flops <= 1.01 * 4 * 8 * 256 * 32, "each score is computed once"
    assert lab.work.largest <= k.nbytes // 2, (
        f"a chunk of k ({k.nbytes // 8} bytes) is enough at a time, for all heads of its group: "
        f"got a tensor of shape {lab.work.largest_shape}, {lab.work.largest} bytes"
    )
    q, k, v = oracle.qkv(1, 4, 64, 8, S=256, kv_heads=1, device=device)
    lab.split_attention(q, k, v, 8)
    scores = 4 * 64 * 256 * 4
    assert lab.work.largest <= scores // 2, (
        f"the scores of one chunk of 8 ({scores // 8} bytes) are enough at a time: "
        f"got a tensor of shape {lab.work.largest_shape}, {lab.work.largest} bytes"
    )


@step2
def test_split_attention_rejects(lab, device):
    q, k, v = oracle.qkv(1, 4, 1, 8, S=9, kv_heads=2, device=device)
    lab.split_attention(q, k, v, 2)
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="n_splits"):
            lab.split_attention(q, k, v, bad)
    bad = [(q[0], k, v), (q[:, :3], k, v), (q, k, v[:, :, :4]), (q, k[:, :, :0], v[:, :, :0])]
    for args in [*bad, (q, k, v.double()), (q.int(), k.int(), v.int())]:
        with pytest.raises(ValueError, match="got"):
            lab.split_attention(*args, 2)


# ---------------------------------------------------------------- step 3


def merged(parts, dtype):
    """(out, lse) from (m, l, acc) of a kernel, merged here in float64; leans on no other step."""
    m, l, acc = (x.double() for x in parts)
    full = m != -INF  # NaN has keys
    top = m.amax(0)
    w = torch.where(full, torch.exp(m - torch.where(top == -INF, 0.0, top)), 0.0)
    l = torch.where(full, w * l, 0.0).sum(0)
    acc = torch.where(full[..., None], w[..., None] * acc, 0.0).sum(0)
    out = acc / torch.where(l == 0, 1.0, l)[..., None]
    return out[:, :, None].to(dtype), (top + l.log())[:, :, None].float()


def check_shows_nan(run, device):
    """NaN in q, in a tile of k, in one key or one value is NaN for the heads that read it.

    Args:
        run: (q, k, v, n_splits) -> (out, lse), with tiles of 16 keys.
    """
    key_head_0 = [True, True, False, False]
    for what, number, place, heads in (
        ("q of head 1", 0, (0, 1), [False, True, False, False]),
        ("all keys", 1, (0, 0), key_head_0),
        ("a tile of keys", 1, (0, 0, slice(16)), key_head_0),
        ("one key", 1, (0, 0, 5), key_head_0),
        ("one value", 2, (0, 0, 5), key_head_0),
    ):
        for n_splits in (1, 3):
            x = oracle.qkv(1, 4, 1, 16, S=40, kv_heads=2, device=device)
            x[number][place] = NAN
            out, lse = run(*x, n_splits)
            case = f"NaN in {what}, {n_splits} chunks: heads whose"
            got = out.isnan().all(-1).flatten().tolist()
            assert got == heads, f"{case} out is NaN: want {heads}, got {got}"
            assert out.isnan().any(-1).flatten().tolist() == heads, f"{case} out has a NaN"
            want = heads if number < 2 else [False] * 4
            got = lse.isnan().flatten().tolist()
            assert got == want, f"{case} lse is NaN: want {want}, got {got}"


def check_shapes(parts, n_splits, q):
    B, H, _, D = q.shape
    for x, shape, name in zip(
        parts, [(n_splits, B, H)] * 2 + [(n_splits, B, H, D)], ("m", "l", "acc"), strict=True
    ):
        assert (tuple(x.shape), x.dtype) == (shape, F32), f"{name}: got {x.shape}, {x.dtype}"


def check_partials(lab, q, k, v, n_splits=3, block_n=16):
    parts = lab.split_partials(q, k, v, n_splits, block_n=block_n)
    check_shapes(parts, n_splits, q)
    want = oracle.attention(q, k, v, kernel=True, tiles=(16, block_n))
    oracle.check_all(want, merged(parts, q.dtype), "split_partials, merged,")


@step3
@kernel_dtypes
@pytest.mark.parametrize("S", [64, 67])
def test_split_kernel(lab, device, dtype, S):
    check_partials(lab, *fenced_qkv(2, 4, 1, 32, S=S, kv_heads=2, dtype=dtype, device=device))


@step3
@pytest.mark.parametrize(
    ("S", "n_splits", "block_n"),
    [(1, 1, 16), (1, 4, 16), (16, 2, 16), (17, 2, 16), (97, 1, 32), (97, 7, 16), (97, 5, 64)],
)
def test_split_kernel_lengths_and_splits(lab, device, S, n_splits, block_n):
    q, k, v = fenced_qkv(1, 2, 1, 16, S=S, device=device)
    check_partials(lab, q, k, v, n_splits, block_n)


@step3
@pytest.mark.parametrize(("H", "kv_heads"), [(3, 3), (6, 2), (5, 1), (16, 1), (20, 1)])
def test_split_kernel_groups(lab, device, H, kv_heads):
    check_partials(lab, *fenced_qkv(2, H, 1, 16, S=40, kv_heads=kv_heads, device=device))


@step3
@pytest.mark.parametrize("D", [16, 64, 128, 256])
def test_split_kernel_head_dims(lab, device, D):
    check_partials(lab, *fenced_qkv(1, 2, 1, D, S=37, kv_heads=1, device=device))


@step3
@score_kinds
def test_split_kernel_score_ranges(lab, device, kind):
    check_partials(lab, *fenced_qkv(1, 2, 1, 32, S=70, kind=kind, device=device))


@step3
def test_split_kernel_half_scores_do_not_overflow(lab, device):
    q, k, v = fenced_qkv(1, 2, 1, 64, S=40, dtype=F16, device=device)
    check_partials(lab, q * 60, k * 60, v)  # q.k before scaling passes 65,504


@step3
def test_split_kernel_huge_equal_scores(lab, device):
    dtype = F32 if here.interpret else BF16
    for sign in (1, -1):  # scores near -1e11 lie below every number that could stand for -inf
        x = torch.full((1, 1, 40, 64), 133120.0, dtype=dtype, device=device)
        m, l, acc = lab.split_partials(x[:, :, :1], sign * x, x, 2, block_n=16)
        assert (l.flatten() == torch.tensor([16.0, 24.0], device=device)).all(), (
            f"equal scores weigh 1 each: want l = 16 and 24, got {l.flatten().tolist()}"
        )
        assert torch.allclose(acc / l[..., None], x[0, 0, 0, 0].float())
        assert torch.isfinite(m).all()


@step3
def test_split_kernel_does_not_hide_nan(lab, device):
    def run(q, k, v, n_splits):
        return merged(lab.split_partials(q, k, v, n_splits, block_n=16), q.dtype)

    check_shows_nan(run, device)


@step3
def test_split_kernel_chunks_are_whole_tiles(lab, device):
    q, k, v = oracle.qkv(1, 2, 1, 16, S=75, device=device)  # 5 tiles of 16
    for n_splits in (1, 2, 3, 5, 8):
        m, l, acc = lab.split_partials(q, k, v, n_splits, block_n=16)
        check_shapes((m, l, acc), n_splits, q)
        for c in range(n_splits):
            lo, hi = (min(75, (c + i) * 5 // n_splits * 16) for i in (0, 1))
            if lo == hi:
                assert (m[c] == -INF).all(), f"chunk {c} of {n_splits} is empty: m must be -inf"
                continue
            want = oracle.attention(q, k[:, :, lo:hi], v[:, :, lo:hi], kernel=True)
            got = merged((m[c : c + 1], l[c : c + 1], acc[c : c + 1]), q.dtype)
            oracle.check_all(want, got, f"chunk {c} of {n_splits}, keys {lo} to {hi - 1},")


@step3
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_split_kernel_layouts(lab, device, layout):
    q, k, v = oracle.qkv(2, 4, 1, 16, S=40, kv_heads=2, device=device, layout=layout)
    check_partials(lab, q, k, v)
    check_partials(lab, q.contiguous(), k.contiguous(), v)  # only V has other strides
    check_partials(lab, q, k.mT.contiguous().mT, v)  # elements of a row are not adjacent


@step3
def test_split_kernel_reads_a_part_of_a_longer_cache(lab, device):
    q, k, v = oracle.qkv(2, 4, 1, 16, S=40, kv_heads=2, dtype=F16, device=device)
    k_cache, v_cache = (torch.full((2, 2, 2**17, 16), NAN, dtype=F16, device=device) for _ in "kv")
    k_cache[:, :, :40], v_cache[:, :, :40] = k, v
    check_partials(lab, q, k_cache[:, :, :40], v_cache[:, :, :40])
    assert lab.work.largest < k.nbytes, (
        f"the cache is read where it lies: got a tensor of shape {lab.work.largest_shape}"
    )


@step3
@interpreter_only
def test_split_kernel_loads_each_key_once_for_its_group(lab, device):
    B, H, H_kv, S, D, n_splits, block_n = 2, 8, 2, 70, 16, 3, 16
    q, k, v = oracle.qkv(B, H, 1, D, S=S, kv_heads=H_kv, device=device)
    lab.split_partials(q, k, v, n_splits, block_n=block_n)
    work = lab.kernels
    for name, x in {"k_ptr": k, "v_ptr": v}.items():
        got = work.loaded["_split_kernel", name]
        assert got == x.nbytes, (
            f"each row of {name[0]} is loaded once, for the {H // H_kv} heads of its group "
            f"together: {x.nbytes} bytes; got {got}"
        )
    assert work.loaded["_split_kernel", "q_ptr"] <= n_splits * q.nbytes, "q once for each chunk"
    stored = n_splits * B * H * (D + 2) * 4
    assert work.bytes_stored <= stored, (
        f"m, l and acc once for each chunk: {stored} bytes; got {work.bytes_stored}"
    )
    tiles = -(-S // block_n)
    assert work.dot_flops <= B * H_kv * tiles * 4 * 16 * block_n * D, (
        f"two products a tile of keys, {tiles} tiles a head: got {work.dot_flops} FLOPs"
    )
    assert work.launches["_split_kernel"] == B * H_kv * n_splits


def lazy(*shape, dtype, device):
    """An uninitialised tensor too large to fill: on a CPU only what is touched takes memory."""
    try:
        return torch.empty(*shape, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs much address space: {str(error)[:60]}")


@step3
@pytest.mark.parametrize("large", ["batch", "heads", "keys"])
def test_split_kernel_offsets_beyond_32_bits(lab, device, large):
    D, block_n = 256, 32
    B, heads, S, n_splits = {
        "batch": (129, 1, 2**16 + 7, 32),
        "heads": (1, 129, 2**16 + 7, 32),
        "keys": (1, 1, 2**23 + 2**13, 4096),
    }[large]
    k = lazy(B, heads, S, D, dtype=F16, device=device)
    tiles = -(-S // block_n)
    lo = (n_splits - 1) * tiles // n_splits * block_n  # where the last chunk begins
    q = lazy(B, heads, 1, D, dtype=F16, device=device)
    q[-1:, -1:] = oracle.inputs(1, 1, 1, D, dtype=F16, device=device)
    if here.interpret:
        k[-1:, -1:, lo:] = oracle.inputs(1, 1, S - lo, D, dtype=F16, device=device)
        with lab.last_program_only():
            parts = lab.split_partials(q, k, k, n_splits, block_n=block_n)
    else:
        k.normal_()
        q.normal_()
        parts = lab.split_partials(q, k, k, n_splits, block_n=block_n)
    last = [x[-1:, -1:, -1:] for x in parts]
    q, k = q[-1:, -1:], k[-1:, -1:, lo:]
    want = oracle.attention(q, k, k, kernel=True)
    oracle.check_all(want, merged(last, F16), "the last chunk of the last head,")


@step3
def test_split_kernel_follows_its_input(lab, device):
    q, k, v = oracle.qkv(1, 2, 1, 16, S=40, device=device)
    first = lab.split_partials(q, k, v, 2)
    kept = [x.clone() for x in first]
    for x in (q, k, v):
        x.copy_(oracle.inputs(*x.shape, device=device))
    check_partials(lab, q, k, v)
    check_kept(first, kept)


def refusal(function, *args) -> str:
    """The message of the ValueError that a call raises."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return "(nothing was raised)"


def check_rejects(decode, q, k, v):
    """What neither split_partials nor flash_decode takes."""
    bad = {
        "rank": (q[0], k, v),
        "batch": (q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)),
        "group": (q[:, :3], k, v),
        "head dim": (q[..., :12], k[..., :12], v[..., :12]),
        "two queries": (q.repeat(1, 1, 2, 1), k, v),
        "k and v lengths": (q, k, v[:, :, :4]),
        "dtype": (q, k, v.half()),
        "float64": (q.double(), k.double(), v.double()),
        "no keys": (q, k[:, :, :0], v[:, :, :0]),
        "device": (q, k.to("meta"), v.to("meta")),
    }
    if here.interpret:
        bad["bfloat16 in the interpreter"] = (q.bfloat16(), k.bfloat16(), v.bfloat16())
    for what, args in bad.items():
        message = refusal(decode, *args, 2)
        assert "got" in message or "bfloat16" in message, (
            f"bad {what} is a ValueError that says what it got: {message}"
        )
    for n_splits in (0, -1, 2.0):
        with pytest.raises(ValueError, match="n_splits"):
            decode(q, k, v, n_splits)
    for block_n in (8, 24, 0):
        with pytest.raises(ValueError, match="block_n"):
            decode(q, k, v, 2, block_n=block_n)


@step3
@needs_compiler
@pytest.mark.timeout(240)
def test_split_kernel_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "split_partials")
    check_compiles(lab, request, "split_partials", group=1, num_warps=2)


@step3
def test_split_kernel_rejects(lab, device):
    q, k, v = oracle.qkv(1, 4, 1, 16, S=8, kv_heads=2, device=device)
    lab.split_partials(q, k, v, 2)
    check_rejects(lab.split_partials, q, k, v)


# ---------------------------------------------------------------- step 4


def random_parts(n_splits, D, device, spread=3.0):
    m = oracle.inputs(n_splits, 2, 3, device=device) * spread
    l = oracle.inputs(n_splits, 2, 3, device=device).abs() * 9 + 1
    return m, l, oracle.inputs(n_splits, 2, 3, D, device=device) * l[..., None]


def check_merge(lab, m, l, acc, dtype=F32):
    """Against the same merge in float64."""
    want_out, want_lse = merged((m, l, acc), F64)
    got = lab.merge_partials(m, l, acc, dtype)
    full = m != -INF
    terms = float((acc / l[..., None])[full].abs().max()) if full.any() else 1.0
    tops = m[full].abs().max().item() if full.any() else 1.0
    eps = max(oracle.eps(dtype), oracle.eps(F32) * (8 + tops))
    expected = (
        oracle.Expected("out", want_out, 4 * eps * terms, dtype, "BHTD"),
        oracle.Expected("lse", want_lse.double(), 4 * oracle.eps(F32) * (4 + tops), F32, "BHT"),
    )
    oracle.check_all(expected, got, "merge_partials")


@step4
@pytest.mark.parametrize("n_splits", [1, 2, 3, 16, 33, 64, 65, 130])
def test_merge_kernel_any_number_of_parts(lab, device, n_splits):
    check_merge(lab, *(memory.fenced(x) for x in random_parts(n_splits, 16, device)))


@step4
@pytest.mark.parametrize("D", [16, 64, 256])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_merge_kernel_head_dims_and_dtypes(lab, device, D, dtype):
    if here.interpret and dtype == BF16:
        pytest.skip("the interpreter computes bfloat16 as raw integer bits")
    check_merge(lab, *random_parts(5, D, device), dtype)


@step4
@pytest.mark.parametrize("empty", [[0], [1, 2], [4], list(range(64)), list(range(64, 130))])
def test_merge_kernel_empty_parts_may_hold_anything(lab, device, empty):
    n_splits = 5 if max(empty) < 5 else 130
    for filler in (NAN, INF, 0.0):
        m, l, acc = random_parts(n_splits, 16, device)
        m[empty], l[empty], acc[empty] = -INF, filler, filler
        check_merge(lab, m, l, acc)


@step4
@pytest.mark.parametrize("n_splits", [1, 3, 70])
def test_merge_kernel_all_parts_empty(lab, device, n_splits):
    m, l, acc = random_parts(n_splits, 16, device)
    m[:, 1, 0], l[:, 1, 0], acc[:, 1, 0] = -INF, NAN, NAN
    out, lse = lab.merge_partials(m, l, acc, F32)
    assert (out[1, 0] == 0).all(), f"a row that sees no key is 0: got {out[1, 0]}"
    assert lse[1, 0, 0] == -INF, f"and its lse -inf: got {lse[1, 0, 0]}"
    others = [x.flatten(1, 2)[:, [0, 1, 2, 4, 5]][:, None].contiguous() for x in (m, l, acc)]
    check_merge(lab, *others)


@step4
@pytest.mark.parametrize("spread", [60.0, 1000.0])
def test_merge_kernel_scores_far_apart(lab, device, spread):
    check_merge(lab, *random_parts(7, 16, device, spread))
    check_merge(lab, *random_parts(70, 16, device, spread))


@step4
def test_merge_kernel_keeps_counts_beside_huge_scores(lab, device):
    m = torch.full((2, 1, 1), 1.4177e11, device=device)
    l = torch.tensor([3.0, 1.0], device=device).view(2, 1, 1)
    acc = torch.tensor([6.0, 10.0], device=device).view(2, 1, 1, 1).repeat(1, 1, 1, 16)
    out, _ = lab.merge_partials(m, l, acc, F32)
    assert (out == 4.0).all(), (
        f"16 over 4 keys: want 4.0, got {out[0, 0, 0, 0].item()}. m + log l is m at this size"
    )


@step4
@pytest.mark.parametrize("n_splits", [1, 2, 70])
def test_merge_kernel_does_not_hide_nan(lab, device, n_splits):
    for what in ("m, l and acc", "l and acc", "acc"):
        for m_beside in (0.0, -200.0):  # a weight of exp(-200) = 0, but not empty
            m, l, acc = random_parts(n_splits, 16, device)
            m[0, 0, 0] = NAN if what == "m, l and acc" else m_beside
            if what != "acc":
                l[0, 0, 0] = NAN
            acc[0, 0, 0] = NAN
            out, lse = lab.merge_partials(m, l, acc, F32)
            case = f"{what} of part 0 of {n_splits} NaN, its m {m[0, 0, 0].item()}:"
            assert out[0, 0].isnan().all(), f"{case} out must be NaN, got {out[0, 0]}"
            assert lse[0, 0].isnan().all() == (what != "acc"), f"{case} lse {lse[0, 0].item()}"
            assert out.isnan().sum() == 16, f"{case} the other rows must be as they were"


@step4
@interpreter_only
def test_merge_kernel_reads_each_part_once(lab, device):
    m, l, acc = random_parts(70, 16, device)
    lab.merge_partials(m, l, acc, F32)
    want = m.nbytes + l.nbytes + acc.nbytes
    assert want <= lab.kernels.bytes_loaded <= want + m.nbytes, (
        f"l and acc once, m once or twice: {want} or {want + m.nbytes} bytes; "
        f"got {lab.kernels.bytes_loaded}"
    )
    assert lab.kernels.bytes_stored == 6 * 4 * (16 + 1)


@step4
def test_merge_kernel_offsets_beyond_32_bits(lab, device):
    n_splits, rows, D = 2**10 + 1, 2**13 + 8, 256
    acc = lazy(n_splits, 1, rows, D, dtype=F32, device=device)
    m, l = (lazy(n_splits, 1, rows, dtype=F32, device=device) for _ in range(2))
    parts = random_parts(n_splits, D, device)
    for x, small in zip((m, l, acc), parts, strict=True):
        x[:, 0, -1] = small[:, 0, 0]  # the others are not looked at
    with lab.last_program_only() if here.interpret else _nothing():
        out, lse = lab.merge_partials(m, l, acc, F32)
    want_out, want_lse = merged([x[:, :1, :1] for x in parts], F64)
    assert torch.allclose(out[:, -1:].double(), want_out, atol=1e-4)
    assert torch.allclose(lse[:, -1:].double(), want_lse.double(), atol=1e-4)


class _nothing:
    def __enter__(self): ...

    def __exit__(self, *error): ...


@step4
def test_choose_splits_fills_the_card(lab):
    for sms, per_sm in ((1, 2), (30, 2), (30, 4), (132, 1), (132, 2)):
        room = sms * per_sm
        for heads in (1, 3, 8, 32, 128, 5000):
            for n_tiles in (1, 2, 7, 512, 4096):
                n = lab.choose_splits(heads, n_tiles, sms, per_sm)
                case = f"{heads} heads, {n_tiles} tiles, {sms} times {per_sm} programs: got {n}"
                assert isinstance(n, int), f"{case}, not a whole number"
                assert 1 <= n <= n_tiles, f"{case}, outside 1 to {n_tiles}"
                assert n == 1 or heads * n <= room, f"{case}, {heads * n} programs"
                assert n == n_tiles or heads * (n + 1) > room, f"{case}, room for one more"
    assert lab.choose_splits(8, 512, 132) == 33, "8 heads on an H200: 33 chunks, 264 programs"


def decode(lab, *args, **config):
    lab.choose_splits(1, 1, 1)  # of this step: while it is unwritten, it says so before step 3 does
    return lab.flash_decode(*args, **config)


def check_decode(lab, q, k, v, n_splits=None, **config):
    got = decode(lab, q, k, v, n_splits, **config)
    oracle.check_all(oracle.attention(q, k, v, kernel=True), got, "flash_decode")


@step4
@kernel_dtypes
@pytest.mark.parametrize("n_splits", [None, 1, 4])
def test_flash_decode(lab, device, dtype, n_splits):
    q, k, v = fenced_qkv(2, 4, 1, 32, S=150, kv_heads=2, dtype=dtype, device=device)
    check_decode(lab, q, k, v, n_splits)


@step4
@score_kinds
def test_flash_decode_score_ranges(lab, device, kind):
    check_decode(lab, *fenced_qkv(1, 2, 1, 32, S=70, kind=kind, device=device), 3, block_n=16)


@step4
@pytest.mark.parametrize("S", [1, 15, 65])
def test_flash_decode_more_splits_than_keys(lab, device, S):
    check_decode(lab, *fenced_qkv(1, 3, 1, 16, S=S, kv_heads=1, device=device), 20, block_n=16)


@step4
def test_flash_decode_huge_equal_scores_in_unequal_chunks(lab, device):
    dtype = F32 if here.interpret else BF16
    x = torch.full((1, 1, 80, 64), 133120.0, dtype=dtype, device=device)
    v = (torch.arange(80, device=device) // 16)[None, None, :, None].expand(1, 1, 80, 64)
    out, _ = decode(lab, x[:, :, :1], x, v.to(dtype), 3, block_n=16)  # 16, 32, 32 keys
    assert torch.allclose(out.float(), torch.full_like(out, 2.0).float(), rtol=1e-5), (
        f"equal scores weigh equally: want the mean, 2.0; got {out[0, 0, 0, 0].item()}"
    )


@step4
def test_flash_decode_does_not_hide_nan(lab, device):
    check_shows_nan(lambda q, k, v, n: decode(lab, q, k, v, n, block_n=16), device)


@step4
def test_flash_decode_lse_is_natural(lab, device):
    q = torch.zeros(1, 1, 1, 16, device=device)
    k = torch.zeros(1, 1, 2, 16, device=device)
    for n_splits in (1, 2):
        lse = decode(lab, q, k, k, n_splits)[1].item()
        assert lse == pytest.approx(0.6931472), f"two scores of 0: log 2 = 0.6931, got {lse}"


@step4
@interpreter_only
def test_flash_decode_chooses_its_splits(lab, device):
    q, k, v = oracle.qkv(1, 2, 1, 16, S=2048, kv_heads=1, device=device)
    decode(lab, q, k, v, block_n=32)
    want = lab.PROGRAMS_PER_SM * lab.EXAMPLE_CARD  # 60 of 64 tiles
    assert lab.kernels.launches["_split_kernel"] == want
    assert lab.kernels.launches["_merge_kernel"] == 2


@step4
def test_flash_decode_follows_its_input(lab, device):
    q, k, v = oracle.qkv(1, 2, 1, 16, S=40, device=device)
    out, lse = decode(lab, q, k, v)
    kept = out.clone(), lse.clone()
    for x in (q, k, v):
        x.copy_(oracle.inputs(*x.shape, device=device))
    check_decode(lab, q, k, v)
    check_kept((out, lse), kept)


@step4
@needs_compiler
@pytest.mark.timeout(240)
def test_merge_kernel_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "merge_partials")


def order_on_hopper(lab, request, *launchers) -> dict[str, list[str]]:
    """Kernel -> what its PTX for sm_90 does, one after another; launched as on such a card."""
    found = {}
    for launcher in launchers:
        on_hopper = {"archs": ("sm_90",), "overlap": True, "may_spill": True}
        for c in check_compiles(lab, request, launcher, **on_hopper):
            assert c.early, f"{c.kernel} waits, but it is launched without launch_pdl"
            found[c.kernel] = c.order
    return found


def check_waits(kernel, order):
    """The wait stands before all that touches global memory."""
    assert order[:1] == ["wait"], (
        f"{kernel} is launched before the kernel in front of it has ended, and must wait before "
        f"its first load: its PTX for sm_90 begins with {', '.join(order[:4])}"
    )


def check_lets_the_next_begin(kernel, order):
    assert "launch" in order, f"{kernel} waits, but never lets the next kernel begin"
    assert order.index("launch") < order.index("product"), (
        f"{kernel} lets the next kernel begin only after its loop: there is nothing left to overlap"
    )


def waits(kernel) -> bool:
    """Whether a kernel calls gdc_wait, the last part of section 5."""
    return "gdc_wait" in kernel.fn.__code__.co_names


@step4
@needs_compiler
@pytest.mark.timeout(120)
def test_kernels_wait_for_the_kernel_before(lab, request):
    kernels = {"split_partials": lab._split_kernel, "merge_partials": lab._merge_kernel}
    launchers = [name for name, kernel in kernels.items() if waits(kernel)]
    if not launchers:
        pytest.skip("optional: no kernel calls gdc_wait (handout section 5)")
    for kernel, order in order_on_hopper(lab, request, *launchers).items():
        check_waits(kernel, order)
        if kernel == "_split_kernel":
            check_lets_the_next_begin(kernel, order)
        else:
            assert "launch" not in order, (
                f"{kernel} lets the next kernel begin, which made the whole 10% slower on an H200 "
                "(handout section 5)"
            )


@step4
def test_a_kernel_that_does_not_wait_is_not_launched_early(lab, monkeypatch):
    lab.choose_splits(1, 1, 1)  # of this step: says so while it is unwritten

    class Kernel:
        def __init__(self, fn):
            self.fn = fn

    def waits():
        tl.extra.cuda.gdc_wait()  # noqa: F821 - never called

    def talks_of_it():
        return "gdc_wait"  # gdc_wait()

    cpu = torch.device("cpu")
    assert lab.pdl_options(Kernel(waits), cpu) == {"PDL": False}, "not on a CPU"
    for card, want in (((9, 0), True), ((12, 0), True), ((8, 9), False)):
        set_capability(monkeypatch, lab, card)
        got = lab.pdl_options(Kernel(waits), cpu)
        assert got["PDL"] == got.get("launch_pdl", False) == want, f"{card}: got {got}"
        got = lab.pdl_options(Kernel(talks_of_it), cpu)
        assert got == {"PDL": False}, f"{card}, a kernel that does not wait: got {got}"


def set_capability(monkeypatch, lab, card):
    code = lab.flash_decode.__wrapped__.__globals__
    monkeypatch.setitem(code, "capability", lambda device: card)


hopper_only = pytest.mark.skipif(
    here.device != "cuda" or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a card of compute capability 9.0 or newer",
)


def check_overlap(monkeypatch, lab, call, q, calls=8, rounds=20):
    """The same bits whether each kernel begins after the one before has ended, or earlier.

    Args:
        call: q -> (out, lse), of the lab, without the guard, whose kernels would come between.
        q: the first call's queries. Each other call takes the output of the one before, so that a
            kernel that does not wait reads what is not written yet, or what an older call left.
    """

    def chain(x):
        found = []
        for _ in range(calls):
            x, lse = call(x)
            found.append((x, lse))
        return found

    def compare(found, how):
        torch.cuda.synchronize()
        for number, (got, true) in enumerate(zip(found, want, strict=True)):
            for a, b, name in zip(got, true, ("out", "lse"), strict=True):
                assert torch.equal(a, b), f"{how}: {name} of call {number} is another with overlap"

    # Filling torch.empty with NaN would put a kernel between the two, too.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with monkeypatch.context() as off:
        set_capability(off, lab, (0, 0))
        want = chain(q)
        torch.cuda.synchronize()
    assert all(torch.isfinite(out).all() for out, _ in want)
    for _ in range(rounds):
        compare(chain(q), "back to back")
    static = q.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        chain(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(static)
    for turn in range(rounds):
        static.fill_(NAN)  # so that what an older call left is NaN
        graph.replay()
        static.copy_(q)
        for _ in range(1 + turn % 2):
            graph.replay()
        compare(found, "CUDA graph")


def scaled(v):
    """v times what keeps outputs near 1, however many keys are averaged."""
    return v * math.sqrt(v.shape[2] / math.e)


@step4
@hopper_only
@pytest.mark.parametrize(("H", "kv_heads", "S"), [(8, 8, 4096), (32, 8, 2048), (2, 1, 100)])
def test_flash_decode_overlapped_gives_the_same_bits(lab, device, monkeypatch, H, kv_heads, S):
    q, k, v = oracle.qkv(1, H, 1, 128, S=S, kv_heads=kv_heads, dtype=BF16, device=device)
    v = scaled(v)
    check_decode(lab, q, k, v)
    if not waits(lab._merge_kernel):
        pytest.skip("optional: _merge_kernel does not call gdc_wait (handout section 5)")
    check_overlap(monkeypatch, lab, lambda x: lab.flash_decode.__wrapped__(x, k, v), q)


@step4
def test_flash_decode_rejects(lab, device):
    q, k, v = oracle.qkv(1, 4, 1, 16, S=8, kv_heads=2, device=device)
    decode(lab, q, k, v, 2)
    check_rejects(lab.flash_decode, q, k, v)
    for bad in ((q[0], k, v), (q, k, v[:, :, :4])):
        with pytest.raises(ValueError, match="got"):
            lab.flash_decode(*bad)  # no n_splits: it is chosen from shapes that must fit
    m, l, acc = random_parts(3, 16, device)
    for bad in ((m[:2], l, acc), (m[:0], l[:0], acc[:0]), (m.half(), l, acc), (m, l, acc[..., :8])):
        with pytest.raises(ValueError, match="got"):
            lab.merge_partials(*bad, F32)


# ---------------------------------------------------------------- step 5


def pages_of(k, v, lens, page_size, spare=3, layout="HND"):
    """(k_pages, v_pages, page_table, seq_lens): k and v (B, H_kv, S, D) cut into mixed pages.

    Slots that no key lies in hold NaN; table entries that no key needs are -1 or far too large.
    """
    B, H_kv, S, D = k.shape
    width = -(-S // page_size)
    n_pages = B * width + spare
    order = torch.randperm(n_pages)[: B * width].view(B, width)
    shape = (n_pages, H_kv, page_size, D)
    pages = []
    for x in (k, v):
        cache = torch.full(shape, NAN, dtype=x.dtype, device=x.device)
        for b, length in enumerate(lens):
            for s in range(length):
                cache[order[b, s // page_size], :, s % page_size] = x[b, :, s]
        if layout == "NHD":
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        pages.append(cache)
    table = order.clone()
    for b, length in enumerate(lens):
        used = -(-length // page_size)
        table[b, used:] = torch.tensor([-1, 2**30]).repeat(width)[: width - used]
    device = k.device
    return *pages, table.to(device, torch.int32), torch.tensor(lens, device=device).int()


def ragged(q, k, v, lens, **kwargs):
    """Expected results where sequence b sees its first lens[b] keys."""
    lens = torch.tensor(lens, device=q.device)
    visible = torch.arange(k.shape[2], device=q.device) < lens[:, None]
    return oracle.attention(q, k, v, kernel=True, visible=visible[:, None, None], **kwargs)


def check_paged(lab, q, k, v, lens, page_size, n_splits=2, block_n=16, layout="HND"):
    """The kernel alone, its parts merged here."""
    cache = pages_of(k, v, lens, page_size, layout=layout)
    cache = [memory.fenced(x) if x.is_floating_point() else x for x in cache]
    parts = lab.paged_partials(q, *cache, n_splits, block_n=block_n)
    check_shapes(parts, n_splits, q)
    want = ragged(q, k, v, lens, tiles=(16, block_n))
    oracle.check_all(want, merged(parts, q.dtype), "paged_partials, merged,")


@step5
@kernel_dtypes
@pytest.mark.parametrize("page_size", [16, 64])
def test_paged_kernel(lab, device, dtype, page_size):
    q, k, v = fenced_qkv(2, 4, 1, 32, S=70, kv_heads=2, dtype=dtype, device=device)
    check_paged(lab, q, k, v, [70, 33], page_size)


@step5
@pytest.mark.parametrize("page_size", [1, 4, 7, 16, 40, 128])
def test_paged_kernel_page_sizes(lab, device, page_size):
    q, k, v = oracle.qkv(3, 2, 1, 16, S=41, kv_heads=1, device=device)
    for n_splits in (1, 3, 9):
        check_paged(lab, q, k, v, [41, 1, 20], page_size, n_splits)


@step5
@pytest.mark.parametrize("lens", [[13], [16], [1], [0], [0, 13], [12, 16, 5]], ids=str)
def test_paged_decode_unused_slots_hold_nan(lab, device, lens):
    q, k, v = oracle.qkv(len(lens), 4, 1, 16, S=16, kv_heads=2, device=device)
    check_paged(lab, q, k, v, lens, 4)
    cache = pages_of(k, v, lens, 4)
    got = lab.paged_decode(q, *cache)
    oracle.check_all(ragged(q, k, v, lens), got, "paged_decode")
    for b, length in enumerate(lens):
        if length == 0:
            assert (got[0][b] == 0).all(), "a sequence without keys gives 0"
            assert (got[1][b] == -INF).all(), "and lse -inf"


@step5
@pytest.mark.parametrize("n_splits", [None, 1, 5])
def test_paged_decode_equals_unpaged(lab, device, n_splits):
    q, k, v = oracle.qkv(2, 4, 1, 16, S=90, kv_heads=2, device=device)
    check_paged(lab, q, k, v, [90, 77], 16)
    cache = pages_of(k, v, [90, 77], 16)
    got = lab.paged_decode(q, *cache, n_splits, block_n=16)
    oracle.check_all(ragged(q, k, v, [90, 77]), got, "paged_decode")
    again = lab.paged_decode(q, *cache, n_splits, check_values=False, block_n=16)
    assert torch.equal(got[0], again[0]), "check_values must not change the result"


@step5
def test_paged_kernel_groups_and_head_dims(lab, device):
    for H, kv_heads, D in ((3, 3, 16), (5, 1, 64), (20, 1, 16), (2, 2, 128)):
        q, k, v = oracle.qkv(2, H, 1, D, S=20, kv_heads=kv_heads, device=device)
        check_paged(lab, q, k, v, [20, 7], 4)


@step5
@score_kinds
def test_paged_kernel_score_ranges(lab, device, kind):
    check_paged(lab, *oracle.qkv(1, 2, 1, 32, S=70, kind=kind, device=device), [70], 16)


@step5
def test_paged_kernel_huge_equal_scores(lab, device):
    dtype = F32 if here.interpret else BF16
    for sign in (1, -1):  # scores near -1e11 lie below every number that could stand for -inf
        x = torch.full((1, 1, 40, 64), 133120.0, dtype=dtype, device=device)
        cache = pages_of(sign * x, x, [40], 8)
        m, l, acc = lab.paged_partials(x[:, :, :1], *cache, 2, block_n=16)
        assert (l.flatten() == torch.tensor([16.0, 24.0], device=device)).all(), (
            f"equal scores weigh 1 each: want l = 16 and 24, got {l.flatten().tolist()}"
        )
        assert torch.allclose(acc / l[..., None], x[0, 0, 0, 0].float())


@step5
def test_paged_kernel_does_not_hide_nan(lab, device):
    def run(q, k, v, n_splits):
        cache = pages_of(k, v, [k.shape[2]], 7)
        return merged(lab.paged_partials(q, *cache, n_splits, block_n=16), q.dtype)

    check_shows_nan(run, device)


@step5
def test_paged_kernel_layouts(lab, device):
    strided = oracle.qkv(2, 4, 1, 16, S=30, kv_heads=2, device=device, layout="strided")
    check_paged(lab, *strided, [30, 11], 8)
    q, k, v = oracle.qkv(2, 4, 1, 16, S=30, kv_heads=2, device=device)
    check_paged(lab, q, k, v, [30, 11], 8, layout="NHD")
    k_pages, v_pages, table, lens = pages_of(k, v, [30, 11], 8)
    mixed = v_pages.transpose(1, 2).contiguous().transpose(1, 2)  # only V has other strides
    wide = torch.full((2, 9), -1, dtype=torch.int32, device=device)
    wide[:, : table.shape[1]] = table
    parts = lab.paged_partials(q, k_pages, mixed, wide[:, : table.shape[1]], lens, 2, block_n=16)
    oracle.check_all(ragged(q, k, v, [30, 11]), merged(parts, F32), "paged_partials, merged,")


@step5
def test_paged_kernel_sequences_may_share_pages(lab, device):
    q, k, v = oracle.qkv(2, 2, 1, 16, S=12, device=device)
    k[1], v[1] = k[0], v[0]  # a prefix in common: both tables name the same pages
    k_pages, v_pages, table, lens = pages_of(k, v, [12, 12], 4)
    table[1] = table[0]
    lens[1] = 9
    parts = lab.paged_partials(q, k_pages, v_pages, table, lens, 2, block_n=16)
    oracle.check_all(ragged(q, k, v, [12, 9]), merged(parts, F32), "paged_partials, merged,")


@step5
def test_paged_kernel_chunks_come_from_each_length(lab, device):
    q, k, v = oracle.qkv(2, 2, 1, 16, S=64, device=device)
    m, _, _ = lab.paged_partials(q, *pages_of(k, v, [64, 30], 16), 2, block_n=16)
    full = (m[:, :, 0] > -INF).sum(0).tolist()
    assert full == [2, 2], (
        f"4 tiles of 16 keys make 2 chunks with keys, and so do 2 tiles: got {full}. "
        "Chunks are cut from the sequence's own length"
    )


@step5
@interpreter_only
def test_paged_kernel_loads_only_what_a_sequence_has(lab, device):
    lens, H_kv, D, n_splits = [40, 7, 0], 2, 16, 2
    q, k, v = oracle.qkv(3, 8, 1, D, S=48, kv_heads=H_kv, device=device)
    lab.paged_partials(q, *pages_of(k, v, lens, 8), n_splits, block_n=16)
    want = sum(lens) * H_kv * D * 4
    for name in ("k_ptr", "v_ptr"):
        got = lab.kernels.loaded["_paged_split_kernel", name]
        assert got == want, f"{sum(lens)} keys, once for each group: {want} bytes; got {got}"
    table = lab.kernels.loaded["_paged_split_kernel", "table_ptr"]
    assert table <= sum(lens) * H_kv * 4, f"a table entry a key at most: got {table} bytes"


@step5
def test_paged_kernel_offsets_beyond_32_bits(lab, device):
    n_pages, page_size, D = 2**20 + 5, 16, 128
    pages = lazy(n_pages, 1, page_size, D, dtype=F16, device=device)
    q, k, v = oracle.qkv(1, 1, 1, D, S=20, dtype=F16, device=device)
    table = torch.tensor([[n_pages - 1, n_pages - 2]], dtype=torch.int32, device=device)
    pages[-1, :, :] = k[0, :, :16]
    pages[-2, :, :4] = k[0, :, 16:]
    lens = torch.tensor([20], dtype=torch.int32, device=device)
    parts = lab.paged_partials(q, pages, pages, table, lens, 1, block_n=16)
    oracle.check_all(oracle.attention(q, k, k, kernel=True), merged(parts, F16), "paged_partials")


@step5
@needs_compiler
@pytest.mark.timeout(240)
def test_paged_kernel_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "paged_partials")


@step5
@needs_compiler
@pytest.mark.timeout(120)
def test_paged_kernel_waits_for_the_kernel_before(lab, request):
    if not waits(lab._paged_split_kernel):
        pytest.skip("optional: _paged_split_kernel does not call gdc_wait (handout section 5)")
    for kernel, order in order_on_hopper(lab, request, "paged_partials").items():
        check_waits(kernel, order)
        check_lets_the_next_begin(kernel, order)


@step5
@hopper_only
def test_paged_decode_overlapped_gives_the_same_bits(lab, device, monkeypatch):
    q, k, v = oracle.qkv(2, 8, 1, 128, S=600, kv_heads=2, dtype=BF16, device=device)
    v, lens = scaled(v), [600, 77]
    check_paged(lab, q, k, v, lens, 16)
    if not waits(lab._merge_kernel) and not waits(lab._paged_split_kernel):
        pytest.skip("optional: no kernel calls gdc_wait (handout section 5)")
    cache = pages_of(k, v, lens, 16)
    decode = lab.paged_decode.__wrapped__
    check_overlap(monkeypatch, lab, lambda x: decode(x, *cache, check_values=False), q)


@step5
def test_paged_decode_rejects_values(lab, device):
    q, k, v = oracle.qkv(1, 1, 1, 16, S=16, device=device)
    k_pages, v_pages, table, lens = pages_of(k, v, [16], 4)
    lab.paged_partials(q, k_pages, v_pages, table, lens, 1)
    lab.paged_decode(q, k_pages, v_pages, table, lens)
    for length in (17, 2**30, -1):
        with pytest.raises(ValueError, match=str(length)):
            lab.paged_decode(q, k_pages, v_pages, table, torch.full_like(lens, length))
    for page in (-1, len(k_pages), 2**30):
        bad = table.clone()
        bad[0, 2] = page
        with pytest.raises(ValueError, match=str(page)):
            lab.paged_decode(q, k_pages, v_pages, bad, lens)
        lab.paged_decode(q, k_pages, v_pages, bad, torch.full_like(lens, 8))  # not in use


@step5
def test_paged_decode_rejects_shapes(lab, device):
    q, k, v = oracle.qkv(2, 4, 1, 16, S=16, kv_heads=2, device=device)
    k_pages, v_pages, table, lens = cache = pages_of(k, v, [16, 5], 4)
    lab.paged_partials(q, *cache, 1)
    lab.paged_decode(q, *cache)
    bad = {
        "rank of q": (q[0], *cache),
        "two queries": (q.repeat(1, 1, 2, 1), *cache),
        "group": (q[:, :3], *cache),
        "rank of pages": (q, k_pages[0], v_pages[0], table, lens),
        "k and v pages": (q, k_pages, v_pages[:-1], table, lens),
        "dtype of pages": (q, k_pages.half(), v_pages.half(), table, lens),
        "no pages": (q, k_pages[:0], v_pages[:0], table, lens),
        "rows of the table": (q, k_pages, v_pages, table[:1], lens),
        "rank of the table": (q, k_pages, v_pages, table[0], lens),
        "dtype of the table": (q, k_pages, v_pages, table.long(), lens),
        "empty table": (q, k_pages, v_pages, table[:, :0], lens),
        "lengths": (q, k_pages, v_pages, table, lens[:1]),
        "dtype of lengths": (q, k_pages, v_pages, table, lens.float()),
        "device": (q, k_pages, v_pages, table.to("meta"), lens),
    }
    for what, args in bad.items():
        message = refusal(lab.paged_decode, *args)
        assert "got" in message, f"bad {what} is a ValueError that says what it got: {message}"
    with pytest.raises(ValueError, match="n_splits"):
        lab.paged_decode(q, *cache, 0)


# ---------------------------------------------------------------- step 6


def append(lab, k_pages, v_pages, page_table, seq_lens, k_new, v_new):
    """append_kv under guard, the two caches being what it may write to."""
    args = page_table, seq_lens, k_new, v_new
    with lab.guarded("append_kv", inputs=args):
        return lab.append_kv.__wrapped__(k_pages, v_pages, *args)


@step6
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lens", [[0], [4], [5, 0, 11], [16, 15]], ids=str)
@pytest.mark.parametrize("N", [1, 6])
def test_append_kv_writes_behind_what_is_there(lab, device, lens, N, dtype):
    B = len(lens)
    k, v = (oracle.inputs(B, 2, 24, 8, dtype=dtype, device=device) for _ in range(2))
    after = [length + N for length in lens]
    want_k, want_v, table, _ = pages_of(k, v, after, 4)
    k_pages, v_pages = (torch.full_like(want_k, NAN) for _ in range(2))
    for b, length in enumerate(lens):  # what was there before
        for s in range(length):
            place = table[b, s // 4], slice(None), s % 4
            k_pages[place], v_pages[place] = want_k[place], want_v[place]
    seq_lens = torch.tensor(lens, device=device).int()
    places = seq_lens.long()[:, None, None, None] + torch.arange(N, device=device)[:, None]
    k_new, v_new = (x.gather(2, places.expand(B, 2, N, 8)) for x in (k, v))
    got = append(lab, k_pages, v_pages, table, seq_lens, k_new, v_new)
    assert got.tolist() == after, f"new lengths: want {after}, got {got.tolist()}"
    assert got.dtype == torch.int32
    for name, got_pages, want in (("k", k_pages, want_k), ("v", v_pages, want_v)):
        wrong = ~((got_pages == want) | (got_pages.isnan() & want.isnan()))
        assert not wrong.any(), (
            f"{name}_pages: {int(wrong.any(-1).any(1).sum())} slots (page, slot) wrong, the first "
            f"at {wrong.any(-1).any(1).nonzero()[0].tolist()}; table {table.tolist()}, "
            f"lengths before {lens}, {N} new"
        )


@step6
def test_append_kv_writes_through_strides(lab, device):
    k_new, v_new = (oracle.inputs(2, 2, 3, 8, device=device) for _ in range(2))
    pool = torch.full((2, 6, 4, 2, 8), NAN, device=device)  # (k or v, page, slot, head, D)
    k_pages, v_pages = pool.transpose(2, 3)
    table = torch.tensor([[5, 0], [2, 3]], dtype=torch.int32, device=device)
    lens = torch.tensor([2, 3], dtype=torch.int32, device=device)
    append(lab, k_pages, v_pages, table, lens, k_new, v_new)
    for pages, new in ((pool[0], k_new), (pool[1], v_new)):
        got = torch.stack([pages[5, 2], pages[5, 3], pages[0, 0]])
        assert torch.equal(got, new[0].transpose(0, 1))
        got = torch.stack([pages[2, 3], pages[3, 0], pages[3, 1]])
        assert torch.equal(got, new[1].transpose(0, 1))
        assert (~pages.isnan()).sum() == 2 * 3 * 2 * 8, "nothing else is written"


@step6
def test_append_kv_into_a_large_pool(lab, device):
    k_pages, v_pages = (torch.zeros(512, 1, 8, 8, device=device) for _ in range(2))
    table = torch.arange(511, -1, -1, device=device).int().view(2, 256)
    lens = torch.tensor([2000, 5], dtype=torch.int32, device=device)
    k_new, v_new = (oracle.inputs(2, 1, 3, 8, device=device) for _ in range(2))
    got = append(lab, k_pages, v_pages, table, lens, k_new, v_new)
    assert got.tolist() == [2003, 8], f"lengths 2000 and 5, 3 more: got {got.tolist()}"
    assert lab.work.largest <= k_pages.nbytes // 4, (
        f"only the new keys are written, the pool of {k_pages.nbytes} bytes is not copied: "
        f"got a tensor of shape {lab.work.largest_shape}"
    )
    for pages, new in ((k_pages, k_new), (v_pages, v_new)):  # key 2000: page 250 of its row, slot 0
        assert torch.equal(pages[511 - 250, 0, :3], new[0, 0])
        assert torch.equal(pages[511 - 256, 0, 5:], new[1, 0])


@step6
def test_append_kv_refused_leaves_the_cache_alone(lab, device):
    k_pages, v_pages = (torch.zeros(4, 2, 4, 8, device=device) for _ in range(2))
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    lens = torch.tensor([1, 7], dtype=torch.int32, device=device)
    new = torch.ones(2, 2, 2, 8, device=device)
    append(lab, k_pages.clone(), v_pages.clone(), table, lens, new[:, :, :1], new[:, :, :1])
    bad = {
        "a length beyond the table": (table, lens, new, new),
        "a page that is none": (table + 1, lens, new[:, :, :1], new[:, :, :1]),
        "page -1": (table - 1, lens, new[:, :, :1], new[:, :, :1]),
        "shape of k_new": (table, lens * 0, new[:, :1], new),
        "shape of v_new": (table, lens * 0, new, new[:, :, :1]),
        "rank of k_new": (table, lens * 0, new[0], new[0]),
        "dtype of k_new": (table, lens * 0, new.half(), new.half()),
    }
    for what, args in bad.items():
        message = refusal(append, lab, k_pages, v_pages, *args)
        assert "got" in message, f"{what} is a ValueError that says what it got: {message}"
        assert not k_pages.any(), f"{what}: refused, but something was written"
        assert not v_pages.any(), f"{what}: refused, but something was written"


@step6
@needs_triton
def test_append_kv_then_decode(lab, device):
    q, k, v = oracle.qkv(2, 4, 1, 16, S=14, kv_heads=2, device=device)
    k_pages, v_pages, table, _ = pages_of(k, v, [14, 13], 4)
    k_pages, v_pages = (torch.full_like(x, NAN) for x in (k_pages, v_pages))
    lens = torch.zeros(2, dtype=torch.int32, device=device)
    for lo, hi in ((0, 9), (9, 10), (10, 13)):
        lens = append(lab, k_pages, v_pages, table, lens, k[:, :, lo:hi], v[:, :, lo:hi])
    lab.append_kv.__wrapped__(k_pages, v_pages, table[:1], lens[:1], k[:1, :, 13:], v[:1, :, 13:])
    lens[0] += 1
    got = lab.paged_decode(q, k_pages, v_pages, table, lens)
    oracle.check_all(ragged(q, k, v, [14, 13]), got, "paged_decode")


def tokens_by_hand(model, prompt, n_new):
    """Greedy tokens, recomputed from the model's weights in float64, and the least margin."""
    tokens, margin = prompt.tolist(), INF
    for _ in range(n_new):
        x = model.embed[tokens].double() + model.position[: len(tokens)].double()
        q, k, v = (
            (x @ w.double()).unflatten(-1, (-1, model.head_dim)).transpose(0, 1)[None]
            for w in (model.wq, model.wk, model.wv)
        )
        out = oracle.attention(q[:, :, -1:], k, v)[0].value
        best = (out.flatten() @ model.wo.double()).topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margin


def prompts_of(lengths, device):
    generator = torch.Generator().manual_seed(42)  # no close calls between tokens
    return [torch.randint(61, (n,), generator=generator).to(device) for n in lengths]


@step6
@needs_triton
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("lengths", "n_new"), [([6], 1), ([1, 12, 7], 5)], ids=str)
def test_decode_paged_gives_the_same_tokens(lab, device, lengths, n_new, page_size):
    model, prompts = lab.TinyModel(device=device), prompts_of(lengths, device)
    got = lab.decode_paged(model, prompts, n_new, page_size)
    assert (tuple(got.shape), got.dtype) == ((len(lengths), n_new), torch.int64)
    for row, prompt in zip(got.tolist(), prompts, strict=True):
        want, margin = tokens_by_hand(model, prompt, n_new)
        assert margin > 1e-2, "the test's own prompt is too close a call"
        assert row == want, f"prompt of {len(prompt)}: want {want}, got {row}"


@step6
@needs_triton
def test_decode_paged_attends_for_all_sequences_at_once(lab, device, monkeypatch):
    module = lab.decode_paged.__wrapped__.__globals__
    attend, seen = module["paged_decode"], []

    def watched(*args, **kwargs):
        call = inspect.signature(attend).bind(*args, **kwargs).arguments
        seen.append((len(call["q"]), call["k_pages"].shape[2], len(call["k_pages"])))
        return attend(*args, **kwargs)

    monkeypatch.setitem(module, "paged_decode", watched)
    lengths, n_new, page_size = [1, 13], 2, 4
    lab.decode_paged(lab.TinyModel(device=device), prompts_of(lengths, device), n_new, page_size)
    pages = sum(-(-(length + n_new) // page_size) for length in lengths)
    assert len(seen) == n_new, f"one call of paged_decode a token: want {n_new}, got {len(seen)}"
    for sequences, slots, pool in seen:
        assert sequences == 2, f"each call takes both sequences: got {sequences}"
        assert slots == page_size, f"pages of {page_size} slots were asked for: got {slots}"
        assert pool <= pages, (
            f"each sequence gets pages for its own prompt and {n_new} tokens, {pages} in all: "
            f"got a pool of {pool}"
        )


@step6
@needs_triton
def test_three_ways_to_decode_agree(lab, device):
    model, prompts = lab.TinyModel(device=device), prompts_of([9, 2], device)
    paged = lab.decode_paged(model, prompts, 4, 4)
    for row, prompt in zip(paged, prompts, strict=True):
        assert torch.equal(row, lab.decode_unpaged(model, prompt, 4)), "paged and unpaged"
        assert torch.equal(row, lab.decode_recomputing(model, prompt, 4)), "and recomputed"


@step6
@interpreter_only
def test_decode_paged_computes_each_key_once(lab, device):
    model, prompts = lab.TinyModel(device=device), prompts_of([9, 4], device)
    n_new, H_kv, D, W = 4, 2, 16, 64
    lab.decode_paged(model, prompts, n_new, 4)
    tokens = 9 + 4 + 2 * (n_new - 1)
    flops = tokens * 2 * W * (W + 2 * H_kv * D) + 2 * n_new * 2 * W * 61
    assert lab.work.flops <= flops, (
        f"q, k and v of {tokens} tokens, once each: {flops} FLOPs; got {lab.work.flops}"
    )
    seen = sum(2 * step + 9 + 4 for step in range(n_new))
    got = lab.kernels.loaded["_paged_split_kernel", "k_ptr"]
    assert got == seen * H_kv * D * 4, f"{seen} keys are attended to over all steps: got {got} B"
