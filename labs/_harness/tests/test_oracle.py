"""oracle.py: budgets against right and wrong computations, messages, inputs of each kind."""

import math

import numpy as np
import pytest
import torch

from labs._harness import oracle
from labs._harness.oracle import Expected, Mismatch
from labs._harness.runtime import Runtime

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
KINDS = ["normal", "large", "growing", "shrinking", "equal"]
each_dtype = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)
causal_or_full = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture(autouse=True)
def _seeded(request):
    oracle.seed(request.config.getoption("seed"), request.node.nodeid)


def mismatch(expected, got) -> str:
    with pytest.raises(Mismatch) as caught:
        expected.check(got)
    return str(caught.value)


def tiled(q, k, v, causal=False, tile=16, reverse=False, half_sums=False):
    """Attention over tiles of keys in float32, front to back or back to front: (out, lse)."""
    plain = q.dtype if q.dtype == F64 else F32
    q, k, v = q.to(plain), k.to(plain), v.to(plain)
    T, S = q.shape[-2], k.shape[-2]
    m = torch.full((*q.shape[:-1], 1), -math.inf, dtype=plain)
    l, acc = torch.zeros_like(m), torch.zeros_like(q)
    starts = range(0, S, tile)
    for j in reversed(starts) if reverse else starts:
        s = q @ k[..., j : j + tile, :].mT / math.sqrt(q.shape[-1])
        if causal:
            keys = torch.arange(j, min(j + tile, S))
            s = s.masked_fill(keys[None, :] > torch.arange(T)[:, None], -math.inf)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = torch.where(m_new == -math.inf, 0.0, m_new)
        alpha, p = torch.exp(m - base), torch.exp(s - base)
        sums = p.half().sum(-1, keepdim=True).to(plain) if half_sums else p.sum(-1, keepdim=True)
        l, acc, m = l * alpha + sums, acc * alpha + p @ v[..., j : j + tile, :], m_new
    return acc / l, (m + l.log())[..., 0]


# ---------------------------------------------------------------- what the budgets accept


@each_kind
@each_dtype
@causal_or_full
def test_sums_in_either_order_are_right(dtype, kind, causal):
    q, k, v = oracle.qkv(1, 2, 53, 16, dtype=dtype, kind=kind)
    want_out, want_lse = oracle.attention(q, k, v, causal)
    for reverse in (False, True):
        out, lse = tiled(q, k, v, causal, reverse=reverse)
        want_out.check(out.to(dtype))
        want_lse.check(lse)


@each_dtype
@causal_or_full
@pytest.mark.parametrize("T", [1, 37])
def test_gradients_of_autograd_are_right(dtype, causal, T):
    q, k, v = oracle.qkv(1, 2, T, 8, dtype=dtype)
    dout = oracle.inputs(1, 2, T, 8, dtype=dtype)
    plain = dtype if dtype == F64 else F32
    for reverse in (False, True):
        leaves = [t.to(plain, copy=True).requires_grad_() for t in (q, k, v)]
        out, _ = tiled(*leaves, causal, reverse=reverse)
        grads = torch.autograd.grad(out, leaves, dout.to(plain))
        want = oracle.attention_gradients(q, k, v, dout, causal)
        for expected, got in zip(want, grads, strict=True):
            expected.check(got.to(dtype))


@each_dtype
def test_softmax_and_its_statistics_of_plain_torch_are_right(dtype):
    x = oracle.inputs(5, 300, dtype=dtype) * 3
    want = oracle.softmax(x)
    want.check(x.float().softmax(-1).to(dtype) if dtype != F64 else x.softmax(-1))
    row = oracle.inputs(300, dtype=dtype if dtype in (F64, F32) else F32)
    want_m, want_l = oracle.softmax_stats(row, 30)
    for blocks in (row.split(10), row.flip(0).split(10)):
        m, l = blocks[0].new_full((), -math.inf), blocks[0].new_zeros(())
        for block in blocks:
            m_new = torch.maximum(m, block.max())
            l, m = l * torch.exp(m - m_new) + torch.exp(block - m_new).sum(), m_new
        want_m.check(m)
        want_l.check(l)


@each_dtype
@pytest.mark.parametrize(("M", "N", "K"), [(33, 17, 50), (1, 1, 1), (16, 16, 5000)])
def test_products_summed_in_any_order_are_right(dtype, M, N, K):
    plain = dtype if dtype == F64 else F32
    for positive in (False, True):
        a, b = oracle.inputs(M, K, dtype=dtype), oracle.inputs(K, N, dtype=dtype)
        if positive:
            a, b = a.abs(), b.abs()
        want = oracle.matmul(a, b)
        for order in (range(K), reversed(range(K))):
            c = torch.zeros(M, N, dtype=plain)
            for k in order:
                c += a[:, k : k + 1].to(plain) * b[k : k + 1].to(plain)
            want.check(c.to(dtype))


def test_statistics_of_a_row_of_minus_infinity_or_of_nothing():
    for row in (torch.full((3,), -math.inf), torch.zeros(0)):
        m, l = oracle.softmax_stats(row, 1)
        assert (m.value.item(), l.value.item()) == (-math.inf, 0.0)
        m.check(torch.tensor(-math.inf))
        assert "m ()" in mismatch(m, torch.tensor(-1e30))


# ---------------------------------------------------------------- what they refuse


@each_dtype
@causal_or_full
def test_an_error_a_few_times_the_budget_at_one_place_is_wrong(dtype, causal):
    q, k, v = oracle.qkv(1, 2, 21, 8, dtype=dtype)
    dout = oracle.inputs(1, 2, 21, 8, dtype=dtype)
    want = [
        *oracle.attention(q, k, v, causal),
        *oracle.attention_gradients(q, k, v, dout, causal),
        oracle.softmax(q[0, 0]),
        oracle.matmul(q[0, 0], k[0, 0].T),
    ]
    for expected in want:
        got = expected.value.to(expected.dtype, copy=True)
        expected.check(got)
        at = tuple(n // 2 for n in got.shape)
        got[at] += 3 * expected.budget
        text = mismatch(expected, got)
        assert f"1 of {got.numel()} values wrong, none of them NaN" in text
        assert f"worst at [{', '.join(map(str, at))}]" in text


@each_dtype
def test_budgets_are_some_units_in_the_last_place(dtype):
    """Not so wide that half-precision work would pass: values of order 1, errors of order eps."""
    q, k, v = oracle.qkv(1, 2, 53, 16, dtype=dtype)
    computed = oracle.eps(F64 if dtype == F64 else F32)
    out, lse = oracle.attention(q, k, v)
    assert out.budget <= 150 * computed + 20 * oracle.eps(dtype)
    assert lse.budget <= 150 * computed, "lse is float32 and held to it for half inputs too"
    dout = oracle.inputs(1, 2, 53, 16, dtype=dtype)
    for gradient in oracle.attention_gradients(q, k, v, dout):
        assert gradient.budget <= 1000 * computed + 100 * oracle.eps(dtype)
    assert oracle.softmax(q[0, 0]).budget <= 8 * oracle.eps(dtype)
    product = oracle.matmul(q[0, 0], k[0, 0].T)
    largest = float(product.value.abs().max())
    assert product.budget <= 200 * computed + 2.1 * oracle.eps(dtype) * largest


def test_half_precision_on_the_way_to_a_float32_result_is_wrong():
    q, k, v = oracle.qkv(1, 2, 53, 16)
    out, lse = oracle.attention(q, k, v)
    _, right_lse, p = oracle._problem(q, k, False, None, None).forward(q, k, v, F64)
    mismatch(out, (p.half().double() @ v.double()).float())
    mismatch(lse, right_lse.half().float())
    mismatch(out, tiled(q, k, v, half_sums=True)[0])
    mismatch(out, tiled(oracle.tf32(q), oracle.tf32(k), v)[0])


def test_usual_mistakes_are_wrong_in_half_precision_too():
    q, k, v = oracle.qkv(1, 2, 53, 16, dtype=F16)
    out, lse = oracle.attention(q, k, v)
    mismatch(out, tiled(q * 1.01, k, v)[0].half())
    mismatch(out, tiled(q, k[:, :, :-1], v[:, :, :-1])[0].half())
    mismatch(lse, lse.value.float() / math.log(2))
    dout = oracle.inputs(1, 2, 53, 16, dtype=F16)
    dq, dk, _ = oracle.attention_gradients(q, k, v, dout)
    mismatch(dq, (dq.value * 1.2).half())
    mismatch(dk, (dk.value * 4).half())


def test_a_sum_in_half_precision_is_no_statistic():
    row = oracle.inputs(500)
    _, l = oracle.softmax_stats(row, 10)
    mismatch(l, torch.exp((row - row.max()).half()).sum().float())


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_product_accumulated_in_half_precision_is_wrong(dtype):
    a, b = oracle.inputs(16, 4096, dtype=dtype).abs() / 8, oracle.inputs(4096, 16, dtype=dtype)
    for right in (b.abs(), b):
        want, c = oracle.matmul(a, right), torch.zeros(16, 16, dtype=dtype)
        for k in range(0, 4096, 16):
            c = (c + a[:, k : k + 16].float() @ right[k : k + 16].float()).to(dtype)
        mismatch(want, c)


def test_a_product_that_is_not_finite_must_be_so_in_the_same_places():
    a, b = oracle.inputs(5, 7), oracle.inputs(7, 6)
    a[1, 2], b[3, 4] = math.nan, math.inf
    want, right = oracle.matmul(a, b), a @ b
    assert want.budget < 1e-4
    want.check(right)
    for place, value in (((1, 0), 0.0), ((0, 4), 3e38), ((0, 4), math.nan), ((0, 0), math.nan)):
        got = right.clone()
        got[place] = value
        assert "1 of 30 values wrong" in mismatch(want, got)


def test_a_product_that_lacks_its_last_terms_is_wrong():
    a, b = oracle.inputs(33, 100, dtype=F16), oracle.inputs(100, 20, dtype=F16)
    want = oracle.matmul(a, b, tiles=(16, 16))
    mismatch(want, (a[:, :99].double() @ b[:99].double()).half())
    got = want.value.half()
    got[32:] = 9e3
    assert "wrong along M: 32 (only in the last, ragged tile of 16)" in mismatch(want, got)


def test_tf32_is_right_for_a_kernel_on_a_gpu_only(monkeypatch):
    q, k, v = oracle.qkv(1, 2, 53, 16)
    got = tiled(oracle.tf32(q), oracle.tf32(k), oracle.tf32(v))
    on_cpu = Runtime("cpu", True, "3.7.1", "test")
    monkeypatch.setattr(oracle.runtime, "setup", lambda: on_cpu)
    mismatch(oracle.attention(q, k, v, kernel=True)[0], got[0])
    on_gpu = Runtime("cuda", False, "3.7.1", "test")
    monkeypatch.setattr(oracle.runtime, "setup", lambda: on_gpu)
    for expected, result in zip(oracle.attention(q, k, v, kernel=True), got, strict=True):
        expected.check(result)
    mismatch(oracle.attention(q, k, v)[0], got[0])
    a, b = q[0, 0], k[0, 0].T
    product = oracle.tf32(a) @ oracle.tf32(b)
    oracle.matmul(a, b, kernel=True).check(product)
    mismatch(oracle.matmul(a, b), product)


def test_the_causal_reference_sees_no_future():
    q, k, v = oracle.qkv(1, 1, 9, 8)
    out, _ = oracle.attention(q, k, v, causal=True)
    k[:, :, 5:], v[:, :, 5:] = 100.0, 100.0
    again, _ = oracle.attention(q, k, v, causal=True)
    assert torch.equal(out.value[:, :, :5], again.value[:, :, :5])
    assert not torch.equal(out.value[:, :, 5:], again.value[:, :, 5:])


# ---------------------------------------------------------------- check and its messages


def zeros(*shape, axes="BHTD", budget=0.1, **kwargs):
    return Expected("out", torch.zeros(shape, dtype=F64), budget, F32, axes, **kwargs)


def test_nan_never_passes():
    got = torch.zeros(2, 3)
    got[1, 2] = math.nan
    for budget in (0.1, 1e30):
        text = mismatch(zeros(2, 3, axes="RC", budget=budget), got)
        assert "1 of 6 values wrong, 1 of them NaN" in text
        assert "worst at [1, 2]: got nan, want 0" in text


def test_nan_is_right_where_the_formula_gives_nan_and_nowhere_else():
    x = torch.zeros(2, 3)
    x[0, 0] = math.nan
    want = oracle.softmax(x)
    want.check(x.softmax(-1))
    mismatch(want, torch.full((2, 3), 1 / 3))
    mismatch(want, torch.full((2, 3), math.nan))


def test_equal_infinities_pass_and_unequal_ones_do_not():
    want = zeros(3, axes="T")
    want.value[:] = torch.tensor([-math.inf, math.inf, 1.0])
    want.check(torch.tensor([-math.inf, math.inf, 1.0]))
    assert "worst at [0]" in mismatch(want, torch.tensor([math.inf, math.inf, 1.0]))
    assert "worst at [0]" in mismatch(want, torch.tensor([-1e30, math.inf, 1.0]))
    assert "worst at [2]" in mismatch(want, torch.tensor([-math.inf, math.inf, -math.inf]))


class AlwaysRight(torch.Tensor):
    def __eq__(self, other):
        return torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (None, "out: want a torch.Tensor, got NoneType"),
        (torch.zeros(2, 3).tolist(), "out: want a torch.Tensor, got list"),
        (AlwaysRight((2, 3)), "out: want a torch.Tensor, got AlwaysRight"),
        (torch.zeros(3, 2), "out: want shape (2, 3), got (3, 2)"),
        (torch.zeros(2, 3, dtype=F16), "out: want dtype torch.float32, got torch.float16"),
        (torch.zeros(2, 3, device="meta"), "out: want it on cpu, got meta"),
    ],
)
def test_what_is_no_result_at_all_is_one_line(got, says):
    assert mismatch(zeros(2, 3), got) == says


def test_a_budget_that_is_not_finite_is_an_error_of_the_test():
    for budget in (math.nan, math.inf):
        with pytest.raises(RuntimeError, match="the test's own budget"):
            zeros(2, budget=budget).check(torch.zeros(2))


def test_the_worst_place_shows_got_want_error_and_budget():
    want = zeros(2, 3, axes="RC")
    want.value[1, 2] = 2.5
    got = want.value.float()
    got[0, 0], got[1, 2] = 0.3, 2.0
    text = mismatch(want, got)
    assert text.startswith("out (2, 3) float32: 2 of 6 values wrong, none of them NaN\n")
    assert "worst at [1, 2]: got 2, want 2.5; error 0.5, budget 0.1" in text
    with pytest.raises(Mismatch) as caught:
        want.check(got)
    assert caught.value.expected is want
    assert caught.value.got is got


TILES = {"T": 16, "S": 16}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.s_[..., 32:, :], "query rows: 32 to 36 (only in the last, ragged tile of 16)"),
        (np.s_[..., 36:, :], "query rows: 36 (only in the last, ragged tile of 16)"),
        (np.s_[..., 16:, :], "query rows: 16 to 36 (all but the first tile of 16)"),
        (np.s_[..., :32, :], "query rows: 0 to 31 (all but the last, ragged tile of 16)"),
        (np.s_[..., [3, 20], :], "query rows: 2 of 37, from 3 to 20"),
        (np.s_[:, 1], "heads: 1"),
        (np.s_[1], "batch: 1"),
        (np.s_[..., 4:], "head dim: 4 to 7"),
    ],
)
def test_the_pattern_of_wrong_values(wrong, says):
    got = torch.zeros(2, 3, 37, 8)
    got[wrong] = 1.0
    lines = mismatch(zeros(2, 3, 37, 8, tiles=TILES), got).splitlines()
    assert len(lines) == 3, "the count, the worst place, and the one pattern there is"
    assert says in lines[2]


def test_a_causal_pattern_names_the_tile_of_keys():
    got = torch.zeros(1, 1, 70, 8)
    got[:, :, 16:] = 1.0
    says = "(just the rows that see more than the first tile of 16 keys)"
    tiles = {"T": 32, "S": 16}
    assert says in mismatch(zeros(1, 1, 70, 8, tiles=tiles, causal=True), got)
    assert says not in mismatch(zeros(1, 1, 70, 8, tiles=tiles), got)


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (-1.0, "every value is -1 times the right one, the sign"),
        (4.0, "every value is 4 times the right one, sqrt(D)"),
        (0.25, "every value is 0.25 times the right one, 1/sqrt(D)"),
        (math.log2(math.e), "every value is 1.443 times the right one, log2(e): base 2?"),
        (3.0, "every value is 3 times the right one"),
        (math.nan, "all NaN: never stored"),
    ],
)
def test_what_all_values_have_in_common(factor, says):
    want = zeros(1, 2, 37, 16, budget=1e-6, tiles=TILES)
    want.value += oracle.inputs(1, 2, 37, 16).double().abs() + 0.1
    lines = mismatch(want, (want.value * factor).float()).splitlines()
    assert len(lines) == 3
    assert lines[2].strip().startswith(says)
    got = want.value.float() * 2 + oracle.inputs(1, 2, 37, 16).abs()
    assert len(mismatch(want, got).splitlines()) == 2, "wrong everywhere, with nothing in common"


def test_a_scalar_has_no_pattern():
    assert len(mismatch(zeros(axes=""), torch.tensor(1.0)).splitlines()) == 2


def test_all_results_are_judged_together():
    want = zeros(2, axes="R"), Expected("lse", torch.zeros(2).double(), 0.1, F32, "R")
    right, wrong = torch.zeros(2), torch.ones(2)
    oracle.check_all(want, (right, right), "f")
    for got, says in (
        ((right, wrong), "lse (2,) float32: 2 of 2 values wrong"),
        ((wrong, right), "out (2,) float32: 2 of 2 values wrong"),
    ):
        with pytest.raises(Mismatch) as caught:
            oracle.check_all(want, got, "f")
        assert str(caught.value).startswith(says)
        verdicts = ", ".join(
            f"{e.name} {'right' if g is right else 'wrong'}" for e, g in zip(want, got, strict=True)
        )
        assert str(caught.value).endswith(f"\n  of all results: {verdicts}")
        assert caught.value.got is wrong
    for got, what in ((right, "Tensor"), ((right,), "1 values"), (None, "NoneType")):
        with pytest.raises(Mismatch, match=rf"f must return \(out, lse\): got {what}"):
            oracle.check_all(want, got, "f")


def test_whole_tiles_are_never_called_ragged():
    got = torch.zeros(1, 1, 48, 8)
    got[:, :, 32:] = 1.0
    text = mismatch(zeros(1, 1, 48, 8, tiles=TILES), got)
    assert "query rows: 32 to 47" in text
    assert "ragged" not in text


def test_two_results_agree_within_the_budget():
    want, got = zeros(3), torch.tensor([1.0, math.nan, -math.inf])
    assert want.agree(got, got + torch.tensor([0.05, 0.0, 0.0]))
    assert not want.agree(got, torch.tensor([1.2, math.nan, -math.inf]))
    assert not want.agree(got, torch.tensor([1.0, 0.0, -math.inf]))
    assert not want.agree(got, torch.tensor([1.0, math.nan, math.inf]))
    assert not want.agree(got, got.double())
    assert not want.agree(got, got[:2])


# ---------------------------------------------------------------- tf32


def tf32_by_arithmetic(x: np.ndarray) -> np.ndarray:
    """The nearest multiple of 2^(exponent - 10), halves away from zero; exact in float64."""
    wide = x.astype(np.float64)
    _, exponent = np.frexp(wide)  # wide = mantissa * 2^exponent, mantissa in [0.5, 1)
    step = np.ldexp(1.0, np.maximum(exponent, -125) - 11)  # below 2^-126 numbers lie evenly
    rounded = np.sign(wide) * np.floor(np.abs(wide) / step + 0.5) * step
    return np.copysign(rounded, wide).astype(np.float32)


def test_tf32_rounding_is_bit_exact():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    x = bits.view(np.float32)
    halves = np.arange(1, 99, dtype=np.float32) * np.float32(2**-11) + 1  # ties among them
    special = np.array([0.0, -0.0, 1.0, -1.0, 65504, 1e-45, -1e-39, 2.0**-126], np.float32)
    x = np.concatenate([x[np.isfinite(x)], halves, -halves, special])
    with np.errstate(over="ignore"):
        want = tf32_by_arithmetic(x)
    got = oracle.tf32(torch.from_numpy(x)).numpy()
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_tf32_leaves_infinities_and_nan_and_any_strides():
    got = oracle.tf32(torch.tensor([math.inf, -math.inf, math.nan]))
    assert got[:2].tolist() == [math.inf, -math.inf]
    assert got.isnan()[2]
    x = oracle.inputs(7, 5)
    assert torch.equal(oracle.tf32(x.t()), oracle.tf32(x).t())


# ---------------------------------------------------------------- inputs


def scores(q, k):
    return q.double() @ k.double().mT / math.sqrt(q.shape[-1])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(("kind", "sign"), [("growing", 1), ("shrinking", -1)])
def test_scores_that_grow_or_shrink_do_so_at_every_tile(dtype, kind, sign):
    q, k, _ = oracle.qkv(2, 2, 64, 32, dtype=dtype, kind=kind)
    tiles = scores(q, k).unflatten(-1, (4, 16)).amax(-1)  # maximum of each tile of 16 keys
    assert ((tiles.diff(dim=-1) * sign) > 1).all()


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_equal_scores_are_equal_and_large_ones_large(dtype):
    q, k, v = oracle.qkv(2, 2, 20, 32, S=30, dtype=dtype, kind="equal")
    s = scores(q, k)
    assert torch.allclose(s, s[..., :1], rtol=0, atol=1e-12)
    assert v.std() > 0.5
    q, k, _ = oracle.qkv(2, 2, 20, 32, S=30, dtype=dtype, kind="large")
    assert 100 < scores(q, k).abs().max() < 2000
    q, k, _ = oracle.qkv(2, 2, 20, 32, S=30, dtype=dtype, kind="low")
    assert ((scores(q, k) + 50_000).abs() < 2000).all()
    q, k, _ = oracle.qkv(2, 2, 20, 32, S=30, dtype=dtype)
    assert 2 < scores(q, k).abs().max() < 10


def test_shapes_dtypes_and_unknown_kinds():
    q, k, v = oracle.qkv(2, 3, 4, 8, S=5, dtype=F16)
    assert (q.shape, k.shape, v.shape) == ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8))
    assert {t.dtype for t in (q, k, v)} == {F16}
    with pytest.raises(ValueError, match="unknown kind 'odd'"):
        oracle.qkv(1, 1, 4, 8, kind="odd")


@each_kind
def test_layouts_hold_the_same_numbers_with_the_strides_they_claim(kind):
    B, H, T, D = 2, 3, 5, 8
    made = {}
    for layout in ("contiguous", "transposed", "strided"):
        oracle.seed(1, "layouts")
        made[layout] = oracle.qkv(B, H, T, D, kind=kind, layout=layout)
    for plain, turned, gappy in zip(*made.values(), strict=True):
        assert plain.is_contiguous()
        assert turned.stride() == (T * H * D, D, H * D, 1)
        gap = 2 * D + 3
        assert gappy.stride() == (H * T * gap, T * gap, gap, 1)
        assert torch.equal(plain, turned)
        assert torch.equal(plain, gappy)
        rows = gappy.as_strided((B * H * T, gap), (gap, 1))
        assert rows[:, D:].isnan().all(), "the gaps hold NaN"


def test_every_dtype_sees_the_same_numbers():
    made = []
    for dtype in (F64, F32, F16, BF16):
        oracle.seed(0, "dtypes")
        made.append(oracle.inputs(100, dtype=dtype))
    for x in made[1:]:
        assert torch.equal(x, made[0].to(x.dtype))


def test_seeds_are_reproducible_and_differ_by_number_and_by_test():
    def drawn(number, name):
        oracle.seed(number, name)
        return oracle.inputs(4)

    first = drawn(0, "test_a")
    assert torch.equal(first, drawn(0, "test_a"))
    assert not torch.equal(first, drawn(1, "test_a"))
    assert not torch.equal(first, drawn(0, "test_b"))
    oracle.seed(0, "test_a")
    assert not torch.equal(oracle.inputs(4), oracle.inputs(4))
