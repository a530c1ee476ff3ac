"""Tests of lab 07. Run `pytest labs/07_attention_backward`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
`oracle` gives inputs and float64 results with their error budgets. A step's tests take what earlier
steps would have computed from the oracle, so each step is scored on its own.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F

from labs._harness import interpreter, memory, oracle, runtime, work
from labs._harness.cases import (
    check_compiles,
    check_kept,
    interpreter_only,
    kernel_dtypes,
    needs_compiler,
    needs_triton,
    step,
)
from labs._impl import LABS

STEPS = {
    1: "attention_delta",
    2: "attention_dkdv",
    3: "attention_dq",
    4: "TritonFlashAttention",
    5: "causal_self_attention",
}

# Most elements of a row that torch's softmax or logsumexp may see at a time, by function.
ROW_LIMITS = dict.fromkeys(
    ("attention_delta", "attention_dkdv", "attention_dq", "flash_attention"), 0
)

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
INF = math.inf

here = runtime.setup()
causal_or_full = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
odd_tiles = pytest.mark.parametrize(
    ("T", "block_m", "block_n"),
    [(1, 16, 16), (65, 32, 16), (65, 16, 32), (64, 32, 16), (50, 64, 16), (97, 16, 64)],
)
lengths = pytest.mark.parametrize(("T", "S"), [(1, 40), (40, 1), (13, 50), (50, 13), (16, 48)])
step1 = step(1, needs_triton)
step2 = step(2, needs_triton)
step3 = step(3, needs_triton)
step4 = step(4, needs_triton)
step5 = step(5, needs_triton)


# ---------------------------------------------------------------- inputs


def problem(B, H, T, D, S=None, fence=True, **options):
    """q, k, v and dout, each between red zones of NaN unless it has a layout of its own."""
    layout = options.get("layout", "contiguous")
    q, k, v = oracle.qkv(B, H, T, D, S=S, **options)
    options = {name: options[name] for name in ("dtype", "device") if name in options}
    dout = oracle.inputs(B, H, T, D, layout=layout, **options)
    if fence and layout == "contiguous":
        q, k, v, dout = map(memory.fenced, (q, k, v, dout))
    return q, k, v, dout


def far_apart(T, D, device, span=200.0):
    """q, k, v, dout whose scores rise along the keys from -span to span."""
    q, k, v, dout = problem(1, 2, T, D, device=device, fence=False)
    q, k = q * 0.1, k * 0.1
    q[..., 0] = 10 * math.sqrt(D)
    k[..., 0] = torch.linspace(-span / 10, span / 10, T, device=device)
    return tuple(map(memory.fenced, (q, k, v, dout)))


def saved(q, k, v, dout, causal, **options):
    """(lse, delta) as a right forward and step 1 leave them for the two kernels."""
    out, lse = oracle.attention(q, k, v, causal, **options)
    delta = (out.value.to(out.dtype).double() * dout.double()).sum(dim=-1)
    return memory.fenced(lse.value.to(F32)), memory.fenced(delta.to(F32))


def want_gradients(q, k, v, dout, causal=False, tiles=None, **options):
    """Expected dq, dk, dv of a kernel."""
    return oracle.attention_gradients(q, k, v, dout, causal, kernel=True, tiles=tiles, **options)


def check_dkdv(lab, q, k, v, dout, causal=False, block_m=16, block_n=16, scale=None, **more):
    lse, delta = saved(q, k, v, dout, causal, scale=scale)
    sizes = {"block_m": block_m, "block_n": block_n} | more
    got = lab.attention_dkdv(q, k, v, dout, lse, delta, causal=causal, scale=scale, **sizes)
    _, *want = want_gradients(q, k, v, dout, causal, (block_m, block_n), scale=scale)
    oracle.check_all(tuple(want), got, "attention_dkdv")


def check_dq(lab, q, k, v, dout, causal=False, block_m=16, block_n=16, scale=None, **more):
    lse, delta = saved(q, k, v, dout, causal, scale=scale)
    sizes = {"block_m": block_m, "block_n": block_n} | more
    got = lab.attention_dq(q, k, v, dout, lse, delta, causal=causal, scale=scale, **sizes)
    want = want_gradients(q, k, v, dout, causal, (block_m, block_n), scale=scale)[0]
    want.check(got)


def rows_far_apart(device):
    """(1, 1, 3, 16) whose third row begins past 2**31 elements."""
    stride = 2**30 + 64
    x = torch.empty(2 * stride + 16, dtype=F16, device=device)
    x = x.as_strided((1, 1, 3, 16), (16, 16, stride, 1))
    return x.copy_(oracle.inputs(1, 1, 3, 16, dtype=F16, device=device))


def unseen_row(device, T=20, S=24, row=3):
    """An input of which one query saw no key: (q, k, v, dout), lse, delta, and who sees what."""
    given = problem(1, 2, T, 16, S=S, device=device)
    visible = torch.ones(T, S, dtype=torch.bool, device=device)
    visible[row] = False
    return given, *saved(*given, False, visible=visible), visible


# ---------------------------------------------------------------- step 1


def check_delta(lab, out, dout):
    product = out.double() * dout.double()
    want = product.sum(dim=-1)
    plain = (out.float() * dout.float()).sum(dim=-1).double()
    terms = float(product.abs().sum(dim=-1).max())
    budget = 2 * float((plain - want).abs().max()) + 4 * oracle.eps(F32) * terms
    expected = oracle.Expected("delta", want, budget, F32, "BHT", {"T": 64})
    got = lab.attention_delta(out, dout)
    expected.check(got)
    assert got.is_contiguous(), "delta is (B, H, T), contiguous: steps 2 and 3 read it so"


def outs(*shape, **options):
    return memory.fenced(oracle.inputs(*shape, **options))


@step1
@kernel_dtypes
@pytest.mark.parametrize("T", [1, 37, 65, 128])
def test_delta(lab, device, dtype, T):
    options = {"dtype": dtype, "device": device}
    check_delta(lab, outs(2, 3, T, 16, **options), outs(2, 3, T, 16, **options))


@step1
@pytest.mark.parametrize("D", [16, 64, 128, 256])
def test_delta_head_dims(lab, device, D):
    check_delta(lab, outs(1, 2, 21, D, device=device), outs(1, 2, 21, D, device=device))


@step1
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_delta_strides_of_out_and_dout_differ(lab, device, layout):
    plain = oracle.inputs(2, 3, 21, 16, device=device)
    other = oracle.inputs(2, 3, 21, 16, device=device, layout=layout)
    check_delta(lab, plain, other)
    check_delta(lab, other, plain)
    check_delta(lab, other, other)


@step1
def test_delta_of_an_expanded_dout(lab, device):
    out = outs(2, 3, 21, 16, device=device)
    one = torch.ones((), device=device)
    check_delta(lab, out, one.expand(2, 3, 21, 16))  # the gradient of out.sum(): strides 0
    check_delta(lab, out, oracle.inputs(2, 3, 1, 16, device=device).expand(2, 3, 21, 16))
    check_delta(lab, out, oracle.inputs(21, 1, device=device).expand(2, 3, 21, 16))


@step1
def test_delta_of_a_slice(lab, device):
    wide = oracle.inputs(3, 5, 40, 35, device=device)
    part = wide[1:, 1:4, 7:28, 2:34:2]  # rows and elements with gaps
    check_delta(lab, outs(2, 3, 21, 16, device=device), part)
    columns = oracle.inputs(2, 3, 16, 21, device=device).transpose(2, 3)
    check_delta(lab, columns, part)


@step1
def test_delta_half_products_do_not_overflow(lab, device):
    out = outs(1, 2, 20, 64, dtype=F16, device=device) * 300
    check_delta(lab, out, outs(1, 2, 20, 64, dtype=F16, device=device) * 300)


@step1
@interpreter_only
def test_delta_reads_and_writes_once(lab, device):
    out, dout = (oracle.inputs(2, 2, 100, 16, device=device) for _ in range(2))
    lab.attention_delta(out, dout)
    counts = lab.kernels
    assert counts.bytes_loaded == 2 * out.nbytes, (
        f"out and dout once each, {2 * out.nbytes} bytes: got {counts.bytes_loaded} loaded"
    )
    assert counts.bytes_stored == 4 * 400, (
        f"one float32 a row, {4 * 400} bytes: got {counts.bytes_stored} stored"
    )
    assert lab.work.allocated <= 4 * 400, (
        f"delta is all that is made, {4 * 400} bytes: got {lab.work.allocated} bytes of tensors"
    )


@step1
def test_delta_offsets_beyond_32_bits(lab, device):
    stride = 2**30 + 64
    try:
        storage = torch.empty(2 * stride + 20 * 16, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4.3 GB of address space: {str(error)[:60]}")
    x = storage.as_strided((3, 1, 20, 16), (stride, 20 * 16, 16, 1))  # little of it is real memory
    x.copy_(oracle.inputs(3, 1, 20, 16, dtype=F16, device=device))
    check_delta(lab, x, x)


def far_tensor(device, B, H, T, D):
    """(x, one): x (B, H, T, D) float16 with more than 2**31 elements; its last head holds one."""
    try:
        x = torch.empty(B, H, T, D, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4.4 GB of address space: {str(error)[:60]}")
    one = oracle.inputs(1, 1, T, D, dtype=F16, device=device)
    x[-1:, -1:] = one
    return x, one


@step1
def test_delta_rows_far_apart(lab, device):
    x = rows_far_apart(device)
    check_delta(lab, x, x)


@step1
@needs_compiler
@pytest.mark.timeout(240)
def test_delta_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "attention_delta")


@step1
def test_delta_follows_its_input(lab, device):
    out, dout = outs(1, 1, 20, 16, device=device), outs(1, 1, 20, 16, device=device)
    first = lab.attention_delta(out, dout)
    kept = first.clone()
    dout.copy_(oracle.inputs(1, 1, 20, 16, device=device))
    check_delta(lab, out, dout)
    check_kept([first], [kept])


@step1
def test_delta_rejects(lab, device):
    out = oracle.inputs(1, 2, 8, 16, device=device)
    lab.attention_delta(out, out)
    for bad in (out[0], out[:, :1], out[:, :, :4], out[..., :8], out.half(), out.to("meta")):
        with pytest.raises(ValueError, match="got"):
            lab.attention_delta(out, bad)
    for both in (out.double(), out.int(), out[:, :, :0], out[..., :12]):
        with pytest.raises(ValueError, match="got"):
            lab.attention_delta(both, both)
    if here.interpret:
        with pytest.raises(ValueError, match="bfloat16"):
            lab.attention_delta(out.bfloat16(), out.bfloat16())


# ---------------------------------------------------------------- step 2


@step2
@causal_or_full
@kernel_dtypes
@pytest.mark.parametrize(("B", "T"), [(1, 32), (2, 37)])
def test_dkdv(lab, device, B, T, dtype, causal):
    check_dkdv(lab, *problem(B, 2, T, 16, dtype=dtype, device=device), causal)


@step2
@causal_or_full
@odd_tiles
def test_dkdv_tiles(lab, device, T, block_m, block_n, causal):
    check_dkdv(lab, *problem(1, 1, T, 16, device=device), causal, block_m, block_n)


@step2
@lengths
def test_dkdv_lengths(lab, device, T, S):
    given = problem(1, 2, T, 16, S=S, device=device)
    check_dkdv(lab, *given, False, 16, 32)
    check_dkdv(lab, *given, False, 32, 16)


@step2
@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_dkdv_head_dims(lab, device, D):
    check_dkdv(lab, *problem(1, 2, 21, D, device=device), True, 16, 16)


@step2
@causal_or_full
@pytest.mark.parametrize("kind", ["large", "growing", "shrinking", "equal"])
def test_dkdv_score_ranges(lab, device, kind, causal):
    check_dkdv(lab, *problem(1, 1, 40, 32, kind=kind, device=device), causal)


@step2
def test_dkdv_masked_scores_do_not_overflow(lab, device):
    # Keys of the future score 400 above what a row sees: exp(s - lse) of them is inf.
    check_dkdv(lab, *far_apart(40, 16, device), True, 16, 16)
    check_dkdv(lab, *far_apart(40, 16, device), True, 32, 16)


@step2
def test_dkdv_row_that_saw_no_key(lab, device):
    given, lse, delta, visible = unseen_row(device)
    got = lab.attention_dkdv(*given, lse, delta, block_m=16, block_n=16)
    _, *want = want_gradients(*given, visible=visible)
    oracle.check_all(tuple(want), got, "attention_dkdv")


@step2
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_dkdv_layouts(lab, device, layout):
    q, k, v, dout = problem(2, 2, 21, 16, device=device, layout=layout)
    sizes = 16, 32  # one key tile, two query tiles
    check_dkdv(lab, q, k, v, dout, True, *sizes)
    plain = q.contiguous(), k.contiguous(), v.contiguous(), dout.contiguous()
    for i, view in enumerate((q, k, v, dout)):  # only one of them has other strides
        check_dkdv(lab, *plain[:i], view, *plain[i + 1 :], True, *sizes)


@step2
def test_dkdv_of_an_expanded_dout(lab, device):
    q, k, v, _ = problem(2, 2, 21, 16, device=device)
    check_dkdv(lab, q, k, v, torch.ones((), device=device).expand(2, 2, 21, 16))
    check_dkdv(lab, q, k, v, oracle.inputs(2, 2, 1, 16, device=device).expand(2, 2, 21, 16))


@step2
@pytest.mark.parametrize("scale", [0.5, 0.05, -0.25, 0.0])
def test_dkdv_scale(lab, device, scale):
    check_dkdv(lab, *problem(1, 2, 21, 32, device=device), True, scale=scale)


@step2
def test_dkdv_sums_and_permuted_keys(lab, device):
    q, k, v, dout = problem(1, 2, 40, 16, S=24, device=device)
    lse, delta = saved(q, k, v, dout, False)
    dk, dv = lab.attention_dkdv(q, k, v, dout, lse, delta, block_m=16, block_n=16)
    close = {"rtol": 0, "atol": 1e-4 if here.interpret else 5e-2}
    assert torch.allclose(dv.sum(dim=2), dout.sum(dim=2), **close), "the weights of a row add to 1"
    assert torch.allclose(dk.sum(dim=2), torch.zeros_like(dk[:, :, 0]), **close), (
        "adding one vector to every key changes nothing, so the dk of all keys add to 0"
    )
    order = torch.randperm(24, device=device)
    again = lab.attention_dkdv(
        q, k[:, :, order], v[:, :, order], dout, lse, delta, block_m=16, block_n=16
    )
    assert torch.allclose(dk[:, :, order], again[0], **close), "keys permuted, dk permuted"
    assert torch.allclose(dv[:, :, order], again[1], **close)


@step2
def test_dkdv_is_deterministic(lab, device):
    given = problem(1, 1, 50, 16, device=device)
    lse, delta = saved(*given, True)
    first = lab.attention_dkdv(*given, lse, delta, causal=True, block_m=16, block_n=32)
    again = lab.attention_dkdv(*given, lse, delta, causal=True, block_m=16, block_n=32)
    for name, a, b in zip(("dk", "dv"), first, again, strict=True):
        assert torch.equal(a, b), f"two runs on one input: {name} must be bit-equal"


@step2
@interpreter_only
@causal_or_full
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_dkdv_moves_few_bytes(lab, device, block_m, block_n, causal):
    B, H, T, D = 1, 1, 70, 16
    given = problem(B, H, T, D, device=device, fence=False)
    lse, delta = saved(*given, causal)
    sizes = {"block_m": block_m, "block_n": block_n}
    lab.attention_dkdv(*given, lse, delta, causal=causal, **sizes)
    rows = flops = 0
    for start in range(0, T, block_n):
        lo = start // block_m * block_m if causal else 0
        rows += T - lo
        flops += math.ceil((T - lo) / block_m) * 8 * block_m * block_n * D
    counts, row = lab.kernels, 4 * D
    want = B * H * (2 * T * row + rows * (2 * row + 8))
    assert counts.bytes_loaded <= want, (
        "k and v once, and for each key tile the q, dout, lse and delta of the rows that see it: "
        f"{want} bytes; got {counts.bytes_loaded} loaded"
    )
    assert counts.dot_flops <= B * H * flops, (
        f"four products a visited tile: {B * H * flops} FLOPs; got {counts.dot_flops}"
    )
    stored = B * H * 2 * T * row
    assert counts.bytes_stored == stored, (
        f"dk and dv are written once: {stored} bytes; got {counts.bytes_stored}"
    )
    most = stored + 6 * 4 * B * H * T  # and a few numbers a row
    assert lab.work.allocated <= most, (
        f"dk and dv are all of that size that is made, {most} bytes with a few numbers a row: got "
        f"{lab.work.allocated} bytes of tensors"
    )


@step2
@interpreter_only
def test_dkdv_offsets_beyond_32_bits(lab, device):
    x, one = far_tensor(device, 6554, 5, 258, 256)
    lse, delta = (torch.zeros(6554, 5, 258, device=device) for _ in range(2))
    lse[-1:, -1:], delta[-1:, -1:] = saved(one, one, one, one, False)
    with lab.last_program_only():
        got = lab.attention_dkdv(x, x, x, x, lse, delta, block_m=256, block_n=256)
    _, *want = want_gradients(one, one, one, one)
    for expected, result in zip(want, got, strict=True):
        expected.value = expected.value[:, :, 256:]
        expected.check(result[-1:, -1:, 256:])


@step2
def test_dkdv_operands_in_registers(lab, device):
    check_dkdv(lab, *problem(1, 2, 37, 32, dtype=F16, device=device), registers=True)
    q, k, v, dout = problem(1, 1, 20, 16, device=device)
    with pytest.raises(ValueError, match="causal"):
        lab.attention_dkdv(q, k, v, dout, *saved(q, k, v, dout, True), causal=True, registers=True)


@step2
@interpreter_only
def test_dkdv_makes_operands_of_registers_once(lab, device):
    given = problem(1, 1, 64, 16, dtype=F16, device=device)
    lab.attention_dkdv(*given, *saved(*given, False), block_m=16, block_n=16, registers=True)
    # 16 pairs of tiles of four products; 4 key tiles of two products with the identity.
    most = 16 * 4 * 2 * 16**3 + 4 * 2 * 2 * 16**3
    assert lab.kernels.dot_flops <= most, (
        f"registers=True: {most:,} FLOPs at most, got {lab.kernels.dot_flops:,}. _in_registers "
        "stands before the loop: what it makes does not change there"
    )


@step2
def test_dkdv_sums_many_turns_in_float32(lab, device):
    q, k, v, dout = problem(1, 1, 4096, 16, S=16, dtype=F16, device=device)
    q.zero_()
    dout.fill_(1.07)
    check_dkdv(lab, q, k, v, dout)


@step2
def test_dkdv_rows_far_apart(lab, device):
    x = rows_far_apart(device)
    check_dkdv(lab, x, x, x, x, True)


@step2
@needs_compiler
@pytest.mark.timeout(240)
def test_dkdv_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "attention_dkdv", block_m=32, block_n=32)
    check_compiles(lab, request, "attention_dkdv", may_spill=True)  # tiles of 64 x 64 must fit


@step2
def test_dkdv_follows_its_input(lab, device):
    q, k, v, dout = problem(1, 1, 20, 16, device=device)
    lse, delta = saved(q, k, v, dout, False)
    first = lab.attention_dkdv(q, k, v, dout, lse, delta, block_m=16, block_n=16)
    kept = [x.clone() for x in first]
    for x in (q, k, v, dout):
        x.copy_(oracle.inputs(1, 1, 20, 16, device=device))
    check_dkdv(lab, q, k, v, dout)
    assert all(map(torch.equal, first, kept)), "a second call wrote into the first one's result"


@step2
def test_dkdv_rejects(lab, device):
    check_rejects(lab.attention_dkdv, device)


def check_rejects(gradient, device):
    """What neither of the two large launchers takes."""
    q, k, v, dout = problem(1, 1, 8, 16, device=device)
    lse, delta = saved(q, k, v, dout, False)
    gradient(q, k, v, dout, lse, delta, block_m=16, block_n=16)
    bad = {
        "rank": (q[0], k[0], v[0], dout[0], lse[0], delta[0]),
        "heads": (q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), dout, lse, delta),
        "k and v lengths": (q, k, v[:, :, :4], dout, lse, delta),
        "dtype of v": (q, k, v.half(), dout, lse, delta),
        "float64": (q.double(), k.double(), v.double(), dout.double(), lse, delta),
        "head dim": (*(x[..., :12] for x in (q, k, v, dout)), lse, delta),
        "shape of dout": (q, k, v, dout[:, :, :4], lse, delta),
        "dtype of dout": (q, k, v, dout.half(), lse, delta),
        "shape of lse": (q, k, v, dout, lse[..., None], delta),
        "dtype of lse": (q, k, v, dout, lse.double(), delta),
        "shape of delta": (q, k, v, dout, lse, delta[:, :, :4]),
        "dtype of delta": (q, k, v, dout, lse, delta.half()),
        "no keys": (q, k[:, :, :0], v[:, :, :0], dout, lse, delta),
    }
    for what, args in bad.items():
        try:
            gradient(*args)
        except ValueError as error:
            message = str(error)
        else:
            message = "(nothing was raised)"
        assert "got" in message, f"bad {what} is a ValueError that says what it got: {message}"
    with pytest.raises(ValueError, match="T=8, S=6"):
        gradient(q, k[:, :, :6], v[:, :, :6], dout, lse, delta, causal=True)
    for name in ("block_m", "block_n"):
        for size in (0, 8, 24):
            with pytest.raises(ValueError, match=name):
                gradient(q, k, v, dout, lse, delta, **{name: size})
    many = [x[:1, :1, :1].expand(70_000, 1, 1, 16) for x in (q, k, v, dout)]
    few = [x[:1, :1, :1].expand(70_000, 1, 1) for x in (lse, delta)]
    with pytest.raises(ValueError, match="65,535"):
        gradient(*many, *few)


# ---------------------------------------------------------------- step 3


@step3
@causal_or_full
@kernel_dtypes
@pytest.mark.parametrize(("B", "T"), [(1, 32), (2, 37)])
def test_dq(lab, device, B, T, dtype, causal):
    check_dq(lab, *problem(B, 2, T, 16, dtype=dtype, device=device), causal)


@step3
@causal_or_full
@odd_tiles
def test_dq_tiles(lab, device, T, block_m, block_n, causal):
    check_dq(lab, *problem(1, 1, T, 16, device=device), causal, block_m, block_n)


@step3
@lengths
def test_dq_lengths(lab, device, T, S):
    given = problem(1, 2, T, 16, S=S, device=device)
    check_dq(lab, *given, False, 16, 32)
    check_dq(lab, *given, False, 32, 16)


@step3
@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_dq_head_dims(lab, device, D):
    check_dq(lab, *problem(1, 2, 21, D, device=device), True, 16, 16)


@step3
@causal_or_full
@pytest.mark.parametrize("kind", ["large", "growing", "shrinking", "equal"])
def test_dq_score_ranges(lab, device, kind, causal):
    check_dq(lab, *problem(1, 1, 40, 32, kind=kind, device=device), causal)


@step3
def test_dq_masked_scores_do_not_overflow(lab, device):
    check_dq(lab, *far_apart(40, 16, device), True, 16, 16)
    check_dq(lab, *far_apart(40, 16, device), True, 16, 32)


@step3
def test_dq_padding_keys_do_not_overflow(lab, device):
    # Every score is near -200, a padding key's is 0: exp(0 - lse) is inf, and inf * 0 is NaN.
    q, k, v, dout = problem(1, 2, 37, 16, device=device)
    q[..., 0], k[..., 0] = 4 * math.sqrt(16), -50.0
    check_dq(lab, q, k, v, dout, False, 16, 16)
    check_dq(lab, q, k, v, dout, True, 16, 16)


@step3
def test_dq_row_that_saw_no_key(lab, device):
    given, lse, delta, visible = unseen_row(device)
    got = lab.attention_dq(*given, lse, delta, block_m=16, block_n=16)
    want_gradients(*given, visible=visible)[0].check(got)
    assert bool((got[:, :, 3] == 0).all()), "what a query that saw no key asked for has no effect"


@step3
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_dq_layouts(lab, device, layout):
    q, k, v, dout = problem(2, 2, 21, 16, device=device, layout=layout)
    sizes = 32, 16  # one query tile, two key tiles
    check_dq(lab, q, k, v, dout, True, *sizes)
    plain = q.contiguous(), k.contiguous(), v.contiguous(), dout.contiguous()
    for i, view in enumerate((q, k, v, dout)):
        check_dq(lab, *plain[:i], view, *plain[i + 1 :], True, *sizes)


@step3
def test_dq_of_an_expanded_dout(lab, device):
    q, k, v, _ = problem(2, 2, 21, 16, device=device)
    check_dq(lab, q, k, v, torch.ones((), device=device).expand(2, 2, 21, 16))
    check_dq(lab, q, k, v, oracle.inputs(2, 2, 1, 16, device=device).expand(2, 2, 21, 16))


@step3
@pytest.mark.parametrize("scale", [0.5, 0.05, -0.25, 0.0])
def test_dq_scale(lab, device, scale):
    check_dq(lab, *problem(1, 2, 21, 32, device=device), True, scale=scale)


@step3
def test_dq_is_deterministic(lab, device):
    given = problem(1, 1, 50, 16, device=device)
    lse, delta = saved(*given, True)
    first, again = (
        lab.attention_dq(*given, lse, delta, causal=True, block_m=32, block_n=16) for _ in "ab"
    )
    assert torch.equal(first, again), "two runs on one input: dq must be bit-equal"


class _BytesByProgram(interpreter.Observer):
    """Bytes loaded by each program of head 0, in the order that the grid starts them."""

    def __init__(self):
        self.bytes = defaultdict(int)

    def load(self, launch, address, mask, itemsize):
        if launch.program[1] == 0:
            self.bytes[launch.program[0]] += int(mask.sum()) * itemsize


@step3
@interpreter_only
def test_dq_starts_with_the_longest_tile(lab, device):
    given = problem(1, 2, 128, 16, device=device, fence=False)
    lse, delta = saved(*given, True)
    seen = _BytesByProgram()
    with interpreter.observe(seen):
        lab.attention_dq(*given, lse, delta, causal=True, block_m=32, block_n=32)
    order = [seen.bytes[pid] for pid in sorted(seen.bytes)]
    assert order == sorted(order, reverse=True), (
        "the last query tile has the most keys to walk over, and a long tile that starts last runs "
        f"alone: want programs 0, 1, ... to load less and less, got {order} bytes"
    )


@step3
@interpreter_only
@causal_or_full
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_dq_moves_few_bytes(lab, device, block_m, block_n, causal):
    B, H, T, D = 1, 1, 70, 16
    given = problem(B, H, T, D, device=device, fence=False)
    lse, delta = saved(*given, causal)
    sizes = {"block_m": block_m, "block_n": block_n}
    lab.attention_dq(*given, lse, delta, causal=causal, **sizes)
    keys = flops = 0
    for start in range(0, T, block_m):
        tiles = math.ceil((min(start + block_m, T) if causal else T) / block_n)
        keys += min(tiles * block_n, T)
        flops += tiles * 6 * block_m * block_n * D
    counts, row = lab.kernels, 4 * D
    want = B * H * (T * (2 * row + 8) + keys * 2 * row)
    assert counts.bytes_loaded <= want, (
        "q, dout, lse and delta once, and for each query tile the k and v that it sees: "
        f"{want} bytes; got {counts.bytes_loaded} loaded"
    )
    assert counts.dot_flops <= B * H * flops, (
        f"three products a visited tile: {B * H * flops} FLOPs; got {counts.dot_flops}"
    )
    stored = B * H * T * row
    assert counts.bytes_stored == stored, (
        f"dq is written once: {stored} bytes; got {counts.bytes_stored}"
    )
    most = stored + 6 * 4 * B * H * T
    assert lab.work.allocated <= most, (
        f"dq is all of that size that is made, {most} bytes with a few numbers a row: got "
        f"{lab.work.allocated} bytes of tensors"
    )


@step3
@interpreter_only
@causal_or_full
def test_dq_offsets_beyond_32_bits(lab, device, causal):
    x, one = far_tensor(device, 6554, 5, 258, 256)
    lse, delta = (torch.zeros(6554, 5, 258, device=device) for _ in range(2))
    lse[-1:, -1:], delta[-1:, -1:] = saved(one, one, one, one, causal)
    with lab.last_program_only():
        got = lab.attention_dq(x, x, x, x, lse, delta, causal, block_m=256, block_n=256)
    want = want_gradients(one, one, one, one, causal)[0]
    rows = slice(0, 256) if causal else slice(256, 258)  # causal starts with the last tile
    want.value = want.value[:, :, rows]
    want.check(got[-1:, -1:, rows])


@step3
@causal_or_full
def test_dq_operand_in_registers(lab, device, causal):
    given = problem(1, 2, 37, 32, dtype=F16, device=device)
    check_dq(lab, *given, causal, registers=True)


@step3
def test_dq_waits_before_it_stores(lab, device):
    check_dq(lab, *problem(1, 1, 16, 16, device=device))  # says so while the step is unwritten
    lines, guarded = defaultdict(list), []  # where its names of tl stand; waits under OVERLAP alone
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(lab._dq_kernel.fn)))):
        if isinstance(node, ast.Attribute):
            lines[node.attr].append(node.lineno)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "OVERLAP":
            guarded += [x.lineno for x in ast.walk(node) if isinstance(x, ast.Call)]
    if "gdc_wait" not in lines:
        pytest.skip("optional: _dq_kernel does not call gdc_wait (handout section 3)")
    assert set(lines["gdc_wait"]) <= set(guarded), "gdc_wait() is called under `if OVERLAP:` alone"
    assert max(lines["gdc_wait"]) < min(lines["store"]), (
        "_dq_kernel begins while the kernel before it still runs, which may still read the memory "
        "that dq now has: gdc_wait comes before tl.store"
    )


@step3
def test_dq_rows_far_apart(lab, device):
    x = rows_far_apart(device)
    check_dq(lab, x, x, x, x, True)


@step3
@needs_compiler
@pytest.mark.timeout(240)
def test_dq_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "attention_dq", block_m=32, block_n=32)
    check_compiles(lab, request, "attention_dq", may_spill=True)  # tiles of 64 x 64 must fit


@step3
def test_dq_follows_its_input(lab, device):
    q, k, v, dout = problem(1, 1, 20, 16, device=device)
    lse, delta = saved(q, k, v, dout, False)
    first = lab.attention_dq(q, k, v, dout, lse, delta, block_m=16, block_n=16)
    kept = first.clone()
    for x in (q, k, v, dout):
        x.copy_(oracle.inputs(1, 1, 20, 16, device=device))
    check_dq(lab, q, k, v, dout)
    assert torch.equal(first, kept), "a second call wrote into the first one's result"


@step3
def test_dq_rejects(lab, device):
    check_rejects(lab.attention_dq, device)


# ---------------------------------------------------------------- step 4


def check_autograd(lab, q, k, v, dout, causal=False, scale=None):
    """flash_attention's output and gradients against float64, on leaves with the same strides."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = lab.flash_attention(*leaves, causal=causal, scale=scale)
    with lab.guarded(
        "flash_attention's backward", row_limit=0, inputs=(q, k, v, dout), engine_calls=1
    ):
        got = torch.autograd.grad(out, leaves, dout)
    oracle.attention(q, k, v, causal, kernel=True, scale=scale)[0].check(out)
    want = want_gradients(q, k, v, dout, causal, scale=scale)
    oracle.check_all(want, got, "the backward of flash_attention")
    return got


@step4
@causal_or_full
@kernel_dtypes
@pytest.mark.parametrize("T", [1, 33])
def test_autograd(lab, device, T, dtype, causal):
    check_autograd(lab, *problem(1, 2, T, 16, dtype=dtype, device=device), causal)


@step4
@pytest.mark.parametrize("causal", [False, True])
def test_autograd_keeps_its_flags(lab, device, causal):
    # A backward that forgets causal or scale is right for its own default only.
    check_autograd(lab, *problem(1, 1, 32, 16, device=device), causal)
    check_autograd(lab, *problem(1, 1, 32, 16, device=device), causal, scale=0.6)


@step4
@pytest.mark.parametrize(("T", "S"), [(13, 70), (70, 13)])
def test_autograd_lengths(lab, device, T, S):
    check_autograd(lab, *problem(1, 2, T, 16, S=S, device=device))


@step4
@pytest.mark.parametrize("S", [8, 16, 31])
def test_autograd_of_ones_one_query_more(lab, device, S):
    q, k, v, dout = (torch.ones(1, 2, n, 16, device=device) for n in (S + 1, S, S, S + 1))
    check_autograd(lab, q, k, v, dout)


@step4
@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_autograd_head_dims(lab, device, D):
    check_autograd(lab, *problem(1, 1, 40, D, device=device), True)


@step4
def test_autograd_of_transposed_views(lab, device):
    views = problem(2, 2, 21, 16, device=device, layout="transposed")
    got = check_autograd(lab, *views, True)
    want = check_autograd(lab, *(x.contiguous() for x in views), True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), "the same numbers in another layout: the same gradients"


@step4
def test_autograd_of_a_sum(lab, device):
    q, k, v, _ = problem(1, 2, 40, 16, device=device)
    check_autograd(lab, q, k, v, torch.ones((), device=device).expand(q.shape))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with lab.guarded("out.sum().backward()", engine_calls=1):
        lab.flash_attention(*leaves).sum().backward()
    want = want_gradients(q, k, v, torch.ones_like(q))
    oracle.check_all(want, tuple(x.grad for x in leaves), "the backward of flash_attention")


@step4
def test_autograd_is_deterministic(lab, device):
    q, k, v, dout = problem(1, 1, 70, 16, device=device)
    first, again = (check_autograd(lab, q, k, v, dout, True) for _ in "ab")
    for name, a, b in zip(("dq", "dk", "dv"), first, again, strict=True):
        assert torch.equal(a, b), f"two runs on one input: {name} must be bit-equal"


@step4
def test_autograd_saves_nothing_of_size_t_squared(lab, device):
    leaves = [x.requires_grad_() for x in problem(1, 1, 256, 16, device=device, fence=False)[:3]]
    out = lab.flash_attention(*leaves)
    alive = lab.work.live
    with lab.guarded("flash_attention's backward", engine_calls=1):
        torch.autograd.grad(out.sum(), leaves)
    assert alive <= 1.5 * out.nbytes, (
        f"out and lse are all that is kept beside q, k, v: got {alive} bytes alive after the "
        f"forward, out has {out.nbytes}"
    )
    if here.device == "cpu":  # on a GPU the backward runs in a thread of its own, unseen
        assert lab.work.peak <= 8 * out.nbytes, (
            f"delta, dq, dk, dv and their like: got {lab.work.peak} bytes alive at once in the "
            f"backward, out has {out.nbytes}"
        )


@step4
@interpreter_only
def test_autograd_runs_on_kernels_only(lab, device):
    leaves = [x.requires_grad_() for x in problem(1, 1, 40, 16, device=device)[:3]]
    out = lab.flash_attention(*leaves)
    with lab.guarded("flash_attention's backward", engine_calls=1):
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    ran = set(lab.kernels.launches)
    assert {"_delta_kernel", "_dkdv_kernel", "_dq_kernel"} <= ran, f"the backward ran {ran} only"
    assert lab.work.flops == 0, "the products are the kernels' work: PyTorch did some in backward"


@step4
@interpreter_only
def test_autograd_computes_what_is_asked_for(lab, device):
    q, k, v, dout = problem(1, 1, 20, 16, device=device)
    for needed, idle in ((0, "_dkdv_kernel"), (1, "_dq_kernel"), (2, "_dq_kernel")):
        leaves = [x.detach().requires_grad_(i == needed) for i, x in enumerate((q, k, v))]
        out = lab.flash_attention(*leaves)
        with lab.guarded("flash_attention's backward", engine_calls=1):
            (got,) = torch.autograd.grad(out, [leaves[needed]], dout)
        want_gradients(q, k, v, dout)[needed].check(got)
        assert lab.kernels.launches[idle] == 0, (
            f"only {'qkv'[needed]} needs a gradient (ctx.needs_input_grad): {idle} need not run"
        )


def spied(lab, monkeypatch) -> list[tuple[str, dict]]:
    """The calls of the two large launchers from now on, each with its arguments by name."""
    calls = []
    for name in ("attention_dkdv", "attention_dq"):
        launcher = getattr(lab, name).__wrapped__

        def noted(*args, launcher=launcher, name=name, **kwargs):
            calls.append((name, inspect.signature(launcher).bind(*args, **kwargs).arguments))
            return launcher(*args, **kwargs)

        monkeypatch.setitem(launcher.__globals__, name, noted)
    return calls


@step4
def test_autograd_overlaps_only_behind_dkdv(lab, device, monkeypatch):
    calls = spied(lab, monkeypatch)
    q, k, v, dout = problem(1, 1, 16, 16, device=device)
    for needed in ((0, 1, 2), (0,), (0, 2)):
        calls.clear()
        leaves = [x.detach().requires_grad_(i in needed) for i, x in enumerate((q, k, v))]
        out = lab.flash_attention(*leaves)
        torch.autograd.grad(out, [leaves[i] for i in needed], dout)
        early = [i for i, (_, given) in enumerate(calls) if given.get("overlap")]
        assert all(i > 0 and calls[i - 1][0] == "attention_dkdv" for i in early), (
            f"gradients of {', '.join('qkv'[i] for i in needed)}: overlap=True is for attention_dq "
            f"right behind attention_dkdv, got the calls {[name for name, _ in calls]}, with "
            f"overlap=True number {early}, from 0"
        )


@step4
@interpreter_only
def test_autograd_does_not_run_the_forward_again(lab, device):
    leaves = [x.detach().requires_grad_() for x in problem(1, 1, 20, 16, device=device)[:3]]
    out = lab.flash_attention(*leaves)
    with lab.guarded("flash_attention's backward", engine_calls=1):
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert lab.kernels.launches["_forward_kernel"] == 0, "out and lse are saved: see forward"


@step4
def test_autograd_uses_the_sizes_of_each_kernel(lab, device, monkeypatch):
    plain = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2}
    sizes = {"forward": plain, "dkdv": plain | {"block_n": 32}, "dq": plain | {"block_m": 32}}
    monkeypatch.setitem(lab.attention_dq.__wrapped__.__globals__, "tiles", lambda *args: sizes)
    calls = spied(lab, monkeypatch)
    leaves = [x.detach().requires_grad_() for x in problem(1, 1, 20, 16, device=device)[:3]]
    torch.autograd.grad(lab.flash_attention(*leaves).sum(), leaves)
    got = {name: {what: given.get(what) for what in plain} for name, given in calls}
    want = {name: sizes[name.removeprefix("attention_")] for name in got}
    assert got == want, f"each kernel has its own entry of ctx.sizes: want {want}, got {got}"


@step4
def test_autograd_has_no_second_derivative(lab, device):
    leaves = [x.requires_grad_() for x in problem(1, 1, 16, 16, device=device)[:3]]
    out = lab.flash_attention(*leaves)
    (dq,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError):  # an error, and not silently a gradient of 0
        (dq.sum() + leaves[0].square().sum()).backward()


# ---------------------------------------------------------------- step 5


def sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def layer(x, w_qkv, w_out, n_heads):
    """The attention layer, one head at a time: the definition."""
    C = x.shape[-1]
    D = C // n_heads
    q, k, v = (x @ w for w in w_qkv.split(C, dim=1))
    heads = []
    for h in range(n_heads):
        columns = slice(h * D, (h + 1) * D)
        s = q[..., columns] @ k[..., columns].transpose(1, 2) / math.sqrt(D)
        future = torch.ones_like(s, dtype=torch.bool).triu(1)
        heads.append(s.masked_fill(future, -INF).softmax(dim=-1) @ v[..., columns])
    return torch.cat(heads, dim=-1) @ w_out


def weights(C, T, device, dtype=F64):
    x = oracle.inputs(2, T, C, dtype=dtype, device=device)
    w_qkv, w_out = oracle.inputs(C, 3 * C, device=device), oracle.inputs(C, C, device=device)
    return x, (w_qkv / math.sqrt(C)).to(dtype), (w_out / math.sqrt(C)).to(dtype)


@step5
@pytest.mark.parametrize(("C", "n_heads", "T"), [(32, 2, 19), (48, 3, 7), (16, 1, 1), (64, 4, 20)])
def test_layer_matches_its_definition(lab, device, C, n_heads, T):
    x, w_qkv, w_out = weights(C, T, device)
    got = lab.causal_self_attention(x, w_qkv, w_out, n_heads, sdpa_in_float64)
    want = layer(x, w_qkv, w_out, n_heads)
    assert got.shape == want.shape, f"want {tuple(want.shape)}, got {tuple(got.shape)}"
    error = (got - want).abs().max().item()
    assert error < 1e-9, f"the layer with {n_heads} heads is off by {error:.2g}"


def sdpa_in_float64(q, k, v, causal=False):
    """Attention by its formula, which the guard lets pass."""
    B, H, T, D = q.shape
    s = q @ k.transpose(-2, -1) / math.sqrt(D)
    if causal:
        s = s.masked_fill(torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1), -INF)
    return s.softmax(dim=-1) @ v


@step5
def test_layer_asks_for_causal_heads(lab, device):
    asked = []

    def spy(q, k, v, causal=False):
        asked.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), causal))
        return v

    x, w_qkv, w_out = weights(32, 5, device)
    lab.causal_self_attention(x, w_qkv, w_out, 2, spy)
    shape = (2, 2, 5, 16)
    assert asked == [(shape, shape, shape, True)], (
        f"one call on (B, n_heads, T, C / n_heads) = {shape} with causal=True: got {asked}"
    )


@step5
def test_layer_of_the_kernels(lab, device):
    x, w_qkv, w_out = weights(32, 21, device, F32)
    leaves = [t.requires_grad_() for t in (x, w_qkv, w_out)]
    attention = lab.flash_attention.__wrapped__  # under the layer's own guard
    out = lab.causal_self_attention(*leaves, 2, attention)
    dout = oracle.inputs(2, 21, 32, device=device)
    with lab.guarded("the layer's backward", engine_calls=1):
        got = torch.autograd.grad(out, leaves, dout)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(layer(*doubles, 2), doubles, dout.double())
    budget = 1e-4 if here.interpret else 2e-2
    for name, a, b in zip(("x", "w_qkv", "w_out"), got, want, strict=True):
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        assert error < budget, f"the gradient of {name} is off by {error:.2g} of its largest value"


class Reference(torch.nn.Module):
    """The language model of this lab over, on SDPA, with the parameters of another."""

    def __init__(self, model, dtype):
        super().__init__()
        self.heads = model.heads
        for name, p in model.named_parameters():
            setattr(self, name, torch.nn.Parameter(p.detach().clone().to(dtype)))

    def forward(self, tokens):
        x = self.token[tokens] + self.place[: tokens.shape[1]]
        B, T, C = x.shape
        parts = (x @ self.w_qkv).split(C, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        x = x + sdpa(q, k, v, True).transpose(1, 2).flatten(2) @ self.w_out
        return F.layer_norm(x, (C,)) @ self.w_logits


def training_text():
    return (LABS / "07_attention_backward" / "README.md").read_text()


@step5
def test_language_model_trains_as_with_sdpa(lab, device):
    # Small in the interpreter, where a kernel takes a tenth of a second.
    sizes = {"width": 32, "heads": 2, "context": 24} if here.interpret else {"context": 256}
    steps, batch = (5, 1) if here.interpret else (100, 16)
    model = lab.TinyLM(lab.flash_attention.__wrapped__, **sizes).to(device)
    references = [Reference(model, dtype).to(device) for dtype in (F64, F32)]
    text = training_text()
    want, plain = (losses(r, model, text, steps, batch) for r in references)
    with lab.guarded("training", engine_calls=steps):
        got = model.fit(text, steps, batch)
    assert len(got) == steps
    assert here.interpret or plain[-1] < 0.8 * plain[0], "the test's own model must learn"
    slack = 1e-5 if here.interpret else 2e-2  # TF32 in the kernels on a GPU
    for n, (a, b, p) in enumerate(zip(got, want, plain, strict=True)):
        budget = 2 * abs(p - b) + slack * (n + 1)
        assert abs(a - b) <= budget, (
            f"the loss of step {n} is {a:.6f}; with SDPA in float64 it is {b:.6f}, "
            f"budget {budget:.2g}. All losses: {[round(x, 4) for x in got]}"
        )


def losses(reference, model, text, steps, batch):
    """The losses of the reference on the pieces of text that the model is trained on."""
    reference.context = model.context
    return type(model).fit(reference, text, steps, batch)


@step5
def test_layer_copies_nothing_for_the_kernels(lab, device):
    x, w_qkv, w_out = weights(32, 32, device, F32)
    made = []

    def spy(q, k, v, causal=False):
        made.append(counted.allocated)
        return v

    with work.count_torch() as counted:
        lab.causal_self_attention.__wrapped__(x, w_qkv, w_out, 2, spy)
    assert made[0] <= 3 * x.nbytes, (
        f"x @ w_qkv is {3 * x.nbytes} bytes; q, k and v are views of it: got {made[0]} bytes made "
        "before attention is called"
    )
