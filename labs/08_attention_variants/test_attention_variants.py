"""Tests of lab 08. Run `pytest labs/08_attention_variants`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
`oracle` gives inputs and float64 results with their error budgets.
"""

from __future__ import annotations

import contextlib
import math
import re

import pytest
import torch

from labs._harness import memory, oracle, runtime
from labs._harness.cases import (
    check_compiles,
    fenced_qkv,
    interpreter_only,
    kernel_dtypes,
    needs_compiler,
    needs_triton,
    step,
)

STEPS = {
    1: "online_attention",
    2: "attention",
    3: "_attend",
    4: "projected_attention",
    5: "varlen_attention",
    6: "attention_backward",
}

# Most elements of a row that torch's softmax or logsumexp may see at a time, by function.
ROW_LIMITS = {
    "online_attention": "tile",
    "attention": 0,
    "projected_attention": 0,
    "varlen_attention": 0,
    "attention_backward": "tile",
}

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
INF = math.inf

here = runtime.setup()
SCORE_KINDS = ("large", "growing", "shrinking", "equal", "low")
step1 = step(1)
step2 = step(2, needs_triton)
step3 = step(3, needs_triton)
step4 = step(4, needs_triton)
step5 = step(5, needs_triton)
step6 = step(6)


@contextlib.contextmanager
def case(**values):
    """Adds to a failure within the block which case of the test it is."""
    try:
        yield
    except AssertionError as error:
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        error.args = (f"{error}\n  in the case {text}",)
        raise


def seen(T, S, offset=None, window=None, device="cpu"):
    """(T, S) bool: the definition. Query i stands at offset + i and sees keys up to there."""
    place = (S - T if offset is None else offset) + torch.arange(T, device=device)[:, None]
    key = torch.arange(S, device=device)[None, :]
    visible = key <= place
    return visible if window is None else visible & (key > place - window)


def refuses(what, match, function, *args, **kwargs):
    """The function raises a ValueError that says `match`; `what` says what it should refuse."""
    said = None
    try:
        function(*args, **kwargs)
    except ValueError as error:
        said = str(error)
    assert said is not None, f"not refused with a ValueError: {what}"
    assert re.search(match, said), f"{what}: the message says nothing of {match!r}: {said}"


def check_rejects(attention, q, k, v):
    """Shapes, dtypes and empty tensors that no attention function takes."""
    bad = {
        "rank": (q[0], k[0], v[0]),
        "batch": (q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)),
        "heads that are no multiple": (q[:, :3], k, v),
        "more key heads than query heads": (q[:, :1], k, v),
        "key and value heads": (q, k, v[:, :1]),
        "head dim": (q, k.repeat(1, 1, 1, 2), v),
        "k and v lengths": (q, k, v[:, :, :4]),
        "dtype": (q, k, v.double()),
        "integers": (q.int(), k.int(), v.int()),
        "no queries": (q[:, :, :0], k, v),
        "no keys": (q, k[:, :, :0], v[:, :, :0]),
    }
    for what, arguments in bad.items():
        refuses(what, "got", attention, *arguments)


# ---------------------------------------------------------------- step 1


def check_online(lab, q, k, v, tile=16, queries=None, keys=None):
    B, T, S, device = q.shape[0], q.shape[2], k.shape[2], q.device
    with case(T=T, S=S, tile=tile):
        got = lab.online_attention(q, k, v, query_positions=queries, key_positions=keys, tile=tile)
        queries = torch.arange(S - T, S, device=device) if queries is None else queries
        keys = torch.arange(S, device=device) if keys is None else keys
        visible = keys.expand(B, S)[:, None, None, :] <= queries.expand(B, T)[:, None, :, None]
        want, _ = oracle.attention(q, k, v, visible=visible, tiles=(T, tile))
        want.name = "online_attention"
        want.check(got)


@step1
@pytest.mark.parametrize(("H", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
def test_online_attention_matches_definition(lab, device, H, kv_heads):
    for T, S, tile in ((1, 1, 16), (33, 33, 7), (33, 33, 64), (5, 40, 16), (1, 37, 5), (29, 30, 1)):
        q, k, v = oracle.qkv(2, H, T, 8, S=S, kv_heads=kv_heads, device=device)
        check_online(lab, q, k, v, tile)


@step1
def test_online_attention_dtypes(lab, device):
    for dtype in (F64, F32, F16, BF16):
        q, k, v = oracle.qkv(1, 4, 21, 16, S=29, kv_heads=2, dtype=dtype, device=device)
        check_online(lab, q, k, v, 8)


@step1
def test_online_attention_sums_in_float32(lab, device):
    # 400 equal terms, one key a tile: a sum kept in bfloat16 (8 bits) stops growing at 256.
    q, k, v = oracle.qkv(1, 2, 1, 8, S=400, kv_heads=1, dtype=BF16, device=device)
    check_online(lab, q * 0, k, v + 1, 1)


@step1
def test_online_attention_score_ranges(lab, device):
    for kind in SCORE_KINDS:
        with case(kind=kind):
            check_online(lab, *oracle.qkv(1, 2, 40, 16, kind=kind, device=device), 8)


@step1
def test_online_attention_field_report_offsets(lab, device):
    # q = 0 and V = the identity: row i is the mean of the keys it sees, told by its non-zeros.
    for T, S in ((1, 6), (2, 5), (4, 4)):
        q = torch.zeros(1, 1, T, 4, dtype=F64, device=device)
        k = oracle.inputs(1, 1, S, 4, dtype=F64, device=device)
        v = torch.eye(S, dtype=F64, device=device)[None, None]
        out = lab.online_attention(q, k, v, tile=2)
        want = seen(T, S, device=device).double()
        want = want / want.sum(dim=1, keepdim=True)
        assert torch.allclose(out[0, 0], want, atol=1e-12), (
            f"T={T}, S={S}: the queries are the newest tokens, so row i averages keys 0 to "
            f"i + {S - T}: got weights {out[0, 0].tolist()}"
        )


@step1
def test_online_attention_positions(lab, device):
    B, T, S = 2, 5, 23
    q, k, v = oracle.qkv(B, 4, T, 8, S=S, kv_heads=2, device=device)
    order = torch.stack([torch.randperm(S) for _ in range(B)]).to(device)
    each = torch.tensor([[4, 5, 6, 7, 8], [10, 40, 12, 13, 90]], device=device)
    for tile in (3, 16):
        check_online(lab, q, k, v, tile, keys=order)  # as in a cache that wraps around
        check_online(lab, q, k, v, tile, queries=torch.tensor([3, 22, 7, 0, 11], device=device))
        check_online(lab, q, k, v, tile, queries=each, keys=order)
        check_online(lab, q, k, v, tile, queries=each[:, :1])  # (B, 1) broadcasts
        check_online(lab, q, k, v, tile, keys=order[:1].int())


@step1
def test_online_attention_rows_blind_in_the_first_tiles(lab, device):
    # Keys in falling order: the first tiles of keys are in the future of most queries.
    q, k, v = oracle.qkv(1, 2, 20, 8, S=32, device=device)
    falling = torch.arange(31, -1, -1, device=device)
    for tile in (4, 16):
        check_online(lab, q, k, v, tile, queries=torch.arange(20, device=device), keys=falling)


@step1
def test_online_attention_value_dim(lab, device):
    q, k, _ = oracle.qkv(2, 4, 9, 8, S=13, kv_heads=2, device=device)
    for DV in (1, 5, 24):
        with case(DV=DV):
            check_online(lab, q, k, oracle.inputs(2, 2, 13, DV, device=device), 4)


@step1
def test_online_attention_layouts(lab, device):
    for layout in ("transposed", "strided"):
        q, k, v = oracle.qkv(2, 4, 21, 8, kv_heads=2, device=device, layout=layout)
        with case(layout=layout):
            check_online(lab, q, k, v, 8)
            check_online(lab, q.contiguous(), k.contiguous(), v, 8)


@step1
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_online_attention_work(lab, device, dtype):
    B, H, kv_heads, T, S, D, tile = 1, 8, 2, 1, 1024, 64, 32
    q, k, v = oracle.qkv(B, H, T, D, S=S, kv_heads=kv_heads, dtype=dtype, device=device)
    check_online(lab, q, k, v, tile)
    want = 4 * B * H * T * S * D
    assert lab.work.flops <= 1.03 * want, (
        f"two products for each query and key, {want:,} FLOPs: got {lab.work.flops:,}"
    )
    most = max(B * H * T * max(tile, D), B * kv_heads * tile * D)
    assert lab.work.most_elements <= most, (
        f"a tile of scores has {B * H * T * tile:,} elements, and so has a tile of K: "
        f"got {lab.work.most_text}"
    )
    repeated = B * H * S * D * 4
    assert lab.work.allocated < repeated, (
        f"{lab.work.allocated:,} bytes made in all; K repeated for each query head would be "
        f"{repeated:,}: share it within the group"
    )


@step1
def test_online_attention_follows_its_input(lab, device):
    q, k, v = oracle.qkv(1, 2, 9, 8, device=device)
    out = lab.online_attention(q, k, v)
    kept = out.clone()
    for x in (q, k, v):
        x.copy_(oracle.inputs(1, 2, 9, 8, device=device))
    check_online(lab, q, k, v)
    assert torch.equal(out, kept), "a second call must not write into the first one's result"


@step1
def test_online_attention_rejects(lab, device):
    q, k, v = oracle.qkv(1, 4, 8, 4, kv_heads=2, device=device)
    lab.online_attention(q, k, v)
    check_rejects(lab.online_attention, q, k, v)
    for tile in (0, -1, 2.0):
        with pytest.raises(ValueError, match="tile"):
            lab.online_attention(q, k, v, tile=tile)
    places = torch.arange(8, device=device)
    bad = {
        "a query before every key": {"query_positions": places - 1},
        "more queries than keys": {"key_positions": places + 3},
        "a shape that does not broadcast": {"query_positions": places[:7]},
        "a batch that does not fit": {"key_positions": places.expand(3, 8)},
        "floating point": {"query_positions": places.float()},
    }
    for what, arguments in bad.items():
        refuses(what, "got", lab.online_attention, q, k, v, **arguments)
    with pytest.raises(ValueError, match="got"):
        lab.online_attention(q, k[:, :, :5], v[:, :, :5])  # queries 0 to 2 stand before key 0


# ---------------------------------------------------------------- steps 2 and 3: what both share


def check_attention(lab, q, k, v, offset=None, window=None, block_m=16, block_n=16):
    tiles, (T, S) = {"block_m": block_m, "block_n": block_n}, (q.shape[2], k.shape[2])
    with case(T=T, S=S, offset=offset, window=window, **tiles):
        got = lab.attention(q, k, v, query_offset=offset, window=window, **tiles)
        visible = seen(T, S, offset, window, q.device)
        # kernel=False: the products of float32 inputs are float32 on a GPU, too.
        want = oracle.attention(q, k, v, visible=visible, tiles=(block_m, block_n))
        oracle.check_all(want, got, "attention")


def check_bytes(lab, q, k, v, window, block_m, block_n, offset=None):
    """Bytes and FLOPs of the tiles that hold a key that some query of the tile sees."""
    check_attention(lab, q, k, v, offset, window, block_m, block_n)
    (B, H, T, D), S = q.shape, k.shape[2]
    offset = S - T if offset is None else offset
    keys = flops = 0
    for start in range(0, T, block_m):
        stop = min(start + block_m, T)
        lo = 0 if window is None else max(offset + start - window + 1, 0)
        lo = lo // block_n * block_n
        if lo >= S:
            continue  # the window has left every key behind
        tiles = math.ceil((min(offset + stop, S) - lo) / block_n)
        keys += min(lo + tiles * block_n, S) - lo
        flops += tiles * 4 * block_m * block_n * D
    work, row = lab.kernels, D * q.element_size()
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
    assert lab.work.allocated == stored, (
        f"out and lse are all that is made, {stored} bytes: got {lab.work.allocated}. "
        "K and V are not repeated, nothing is copied"
    )
    return work.bytes_loaded


def check_far_offsets(lab, device, window):
    """K and V of the last head begin past element 2**31."""
    heads, D = 33_554_560, 64
    try:
        x = torch.empty(1, heads, 1, D, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4.3 GB of address space: {str(error)[:60]}")
    x[:, -1:] = oracle.inputs(1, 1, 1, D, dtype=F16, device=device)
    last = x[:, -1:]
    if here.interpret:  # one program; no other head is real memory
        q = last.expand(1, 1, 1, D)
        k = x.as_strided((1, 1, 2, D), (D, D, D * (heads - 1), 1))
        k[:, :, 0] = oracle.inputs(1, 1, D, dtype=F16, device=device)[0]
        check_attention(lab, q, k, k, None, window)
        wide = x.as_strided((2, 1, 1, D), (D * (heads - 1), D, D, 1))
        wide[0] = oracle.inputs(1, 1, 1, D, dtype=F16, device=device)[0]
        check_attention(lab, wide, wide, wide, None, window)
        far = 2**30 + 64  # a stride in 32 bits: only its product with 2 is too large
        for shape, strides in (((1, 3, 1, D), (D, far, D, 1)), ((3, 1, 1, D), (far, D, D, 1))):
            apart = x.as_strided(shape, strides)
            apart.copy_(oracle.inputs(*shape, dtype=F16, device=device))
            check_attention(lab, apart, apart, apart, None, window)
        rows = x.as_strided((1, 1, 33, D), (D, D, D * ((heads - 1) // 32), 1))
        rows.copy_(oracle.inputs(1, 1, 33, D, dtype=F16, device=device))
        check_attention(lab, rows, rows, rows, None, window, 64, 16)
        check_attention(lab, rows, rows, rows, None, window, 16, 64)


def check_huge_equal_scores(lab, device, window):
    # Scores near 1e11: exp(s - m) must be exactly 1, however s and m were rounded on the way,
    # and scores near -1e11 lie below every finite number that could stand for -inf.
    dtype = F32 if here.interpret else BF16
    for sign in (1, -1):
        x = torch.full((1, 1, 40, 32), 133120.0, dtype=dtype, device=device)
        out, lse = lab.attention(x, sign * x, x, window=window, block_m=16, block_n=16)
        assert (out == x).all().item(), (
            f"equal scores weigh equally: want 133120, got {out[0, 0, -1, 0].item()}. Take the "
            "maximum of the very numbers that it is subtracted from, before anything scales them"
        )
        assert torch.isfinite(lse).all()


def check_sums_in_float32(lab, device, window):
    # Weight 1 for the first tile's keys and exp(-8) for all others: what each later tile adds to
    # l and acc is less than half a unit in the last place of a float16 sum.
    q = torch.ones(1, 1, 1, 16, dtype=F16, device=device)
    k = torch.full((1, 1, 656, 16), -2.0, dtype=F16, device=device)
    k[:, :, :16] = 0
    check_attention(lab, q, k, torch.ones_like(k), None, window)


def check_follows_its_input(lab, device, window):
    q, k, v = oracle.qkv(1, 2, 20, 16, device=device)
    first = lab.attention(q, k, v, window=window, block_m=16, block_n=16)
    kept = [x.clone() for x in first]
    for x in (q, k, v):
        x.copy_(oracle.inputs(1, 2, 20, 16, device=device))
    check_attention(lab, q, k, v, None, window)
    for x, old in zip(first, kept, strict=True):
        assert torch.equal(x, old), "a second call must not write into the first one's result"


def check_is_the_kernels_work(lab, device, window):
    q, k, v = oracle.qkv(1, 1, 20, 16, device=device)
    lab.attention(q, k, v, window=window)
    with lab.no_program():
        results = lab.attention(q, k, v, window=window)
    for name, x in zip(("out", "lse"), results, strict=True):
        assert bool(x.isnan().all()), f"no program ran, yet {name} has numbers: the kernel's work"


# ---------------------------------------------------------------- step 2


@step2
@kernel_dtypes
def test_attention_matches_definition(lab, device, dtype):
    for H, kv_heads, T in ((6, 2, 21), (2, 2, 37), (4, 1, 17)):
        q, k, v = fenced_qkv(2, H, T, 32, kv_heads=kv_heads, dtype=dtype, device=device)
        with case(H=H, kv_heads=kv_heads):
            check_attention(lab, q, k, v)


@step2
def test_attention_tiles_and_lengths(lab, device):
    for T, S, block_m, block_n in (
        (1, 1, 16, 16),
        (65, 65, 32, 16),
        (65, 65, 16, 32),
        (17, 80, 16, 64),
        (50, 97, 64, 16),
        (1, 70, 16, 32),
    ):
        q, k, v = fenced_qkv(1, 2, T, 16, S=S, kv_heads=1, device=device)
        check_attention(lab, q, k, v, block_m=block_m, block_n=block_n)


@step2
def test_attention_head_dims(lab, device):
    dtype = F32 if here.interpret else F16
    for D in (16, 64, 128, 256):
        with case(D=D):
            check_attention(lab, *fenced_qkv(1, 2, 21, D, kv_heads=1, dtype=dtype, device=device))


@step2
def test_attention_field_report_offsets(lab, device):
    # q = 0 and V = the identity: row i is the mean of the keys it sees, told by its non-zeros.
    for T, S, offset in ((1, 6, None), (2, 5, None), (2, 5, 0), (3, 6, 1), (3, 5, 9), (4, 6, -2)):
        q = torch.zeros(1, 1, T, 16, device=device)
        k = oracle.inputs(1, 1, S, 16, device=device)
        v = torch.eye(16, device=device)[None, None, :S].contiguous()
        out, lse = lab.attention(q, k, v, query_offset=offset, block_m=16, block_n=16)
        want = seen(T, S, offset, device=device).float()
        count = want.sum(dim=1)
        want = want / count.clamp(min=1)[:, None]
        assert torch.allclose(out[0, 0, :, :S], want, atol=1e-6), (
            f"T={T}, S={S}, offset {offset}: got weights {out[0, 0, :, :S].tolist()}, "
            f"want {want.tolist()}"
        )
        # Scores are 0: lse is the natural logarithm of the number of keys (0.6931 for two).
        assert torch.allclose(lse[0, 0], count.log(), atol=1e-6), f"lse: got {lse[0, 0].tolist()}"


@step2
def test_attention_offsets(lab, device):
    # Rows before key 0 have out 0 and lse -inf.
    for T, S, offset in ((20, 50, 0), (20, 50, 13), (33, 20, None), (40, 30, -7), (9, 20, 100)):
        q, k, v = fenced_qkv(1, 2, T, 16, S=S, kv_heads=1, device=device)
        check_attention(lab, q, k, v, offset)
        check_attention(lab, q, k, v, offset, block_m=32, block_n=16)


@step2
def test_attention_chunks_and_decode_equal_prefill(lab, device):
    q, k, v = oracle.qkv(1, 4, 40, 16, kv_heads=2, device=device)
    whole, lse = lab.attention(q, k, v, block_m=16, block_n=16)
    cuts = (0, 16, 29, 39, 40)  # a chunk, a ragged one, a short one, then one token
    for a, b in zip(cuts, cuts[1:], strict=False):
        out, part = lab.attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], block_m=16, block_n=16)
        assert torch.allclose(out, whole[:, :, a:b], atol=1e-5), f"queries {a} to {b - 1}"
        assert torch.allclose(part, lse[:, :, a:b], atol=1e-5), f"queries {a} to {b - 1}"


@step2
def test_attention_score_ranges(lab, device):
    for kind in SCORE_KINDS:
        with case(kind=kind):
            check_attention(lab, *fenced_qkv(1, 1, 40, 32, kind=kind, device=device))


@step2
def test_attention_huge_equal_scores(lab, device):
    check_huge_equal_scores(lab, device, None)


@step2
def test_attention_half_scores_do_not_overflow(lab, device):
    q, k, v = fenced_qkv(1, 1, 20, 64, dtype=F16, device=device)
    check_attention(lab, q * 60, k * 60, v)  # q.k before scaling passes 65,504


@step2
def test_attention_sums_in_float32(lab, device):
    check_sums_in_float32(lab, device, None)


@step2
def test_attention_float32_is_not_tf32(lab, device):
    # Integers of 12 bits: TF32 keeps 11 of them, float32 all.
    q = torch.full((1, 1, 16, 16), 2049.0, device=device) / 64
    k = torch.eye(16, device=device)[None, None].contiguous() / 16
    check_attention(lab, q, k, oracle.inputs(1, 1, 16, 16, device=device) + 100)


@step2
def test_attention_many_heads(lab, device):
    # More heads than grid axes 1 and 2 can hold.
    heads = 70_000
    q, k, v = oracle.qkv(1, 1, 1, 16, S=3, device=device)
    many = (
        q.expand(heads, 1, 1, 16).contiguous() if not here.interpret else q.expand(heads, 1, 1, 16)
    )
    with lab.last_program_only() if here.interpret else contextlib.nullcontext():
        out, lse = lab.attention(
            many, k.expand(heads, 1, 3, 16), v.expand(heads, 1, 3, 16), block_m=16, block_n=16
        )
    want = oracle.attention(q, k, v, visible=seen(1, 3, device=device))
    oracle.check_all(want, (out[-1:], lse[-1:]), "attention")


@step2
@interpreter_only
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_attention_moves_few_bytes(lab, device, block_m, block_n):
    for T in (100, 30, 1):
        q, k, v = oracle.qkv(1, 2, T, 16, S=100, kv_heads=1, device=device)
        check_bytes(lab, q, k, v, None, block_m, block_n)
    check_bytes(lab, q, k, v, None, block_m, block_n, offset=0)  # T = 1: padding rows see nothing
    check_bytes(lab, q, k[:, :, :9], v[:, :, :9], None, block_m, block_n, offset=70)


@step2
@interpreter_only
def test_attention_offsets_beyond_32_bits(lab, device):
    check_far_offsets(lab, device, None)


@step2
def test_attention_follows_its_input(lab, device):
    check_follows_its_input(lab, device, None)


@step2
@interpreter_only
def test_attention_is_the_kernels_work(lab, device):
    check_is_the_kernels_work(lab, device, None)


@step2
@needs_compiler
@pytest.mark.timeout(240)
def test_attention_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "attention", block_m=32, block_n=32)


@step2
def test_attention_rejects(lab, device):
    q, k, v = oracle.qkv(1, 4, 8, 16, kv_heads=2, device=device)
    lab.attention(q, k, v, block_m=16, block_n=16)
    check_rejects(lab.attention, q, k, v)
    with pytest.raises(ValueError, match="float64"):
        lab.attention(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="12"):
        lab.attention(*(x[..., :12].contiguous() for x in (q, k, v)))
    with pytest.raises(ValueError, match="head dim|D"):
        lab.attention(q, k, v.repeat(1, 1, 1, 2))
    for block in (0, 7, 8, 24):
        with pytest.raises(ValueError, match="block_m"):
            lab.attention(q, k, v, block_m=block)
        with pytest.raises(ValueError, match="block_n"):
            lab.attention(q, k, v, block_n=block)
    for offset in (1.0, 2**40, -(2**40), "0"):
        with pytest.raises(ValueError, match="query_offset"):
            lab.attention(q, k, v, query_offset=offset)
    if here.interpret:
        with pytest.raises(ValueError, match="bfloat16"):
            lab.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())


# ---------------------------------------------------------------- step 3


@step3
@kernel_dtypes
def test_window_matches_definition(lab, device, dtype):
    for B, H, kv_heads, window in ((1, 2, 1, 1), (1, 4, 2, 7), (2, 2, 1, 33), (1, 2, 2, 200)):
        q, k, v = fenced_qkv(B, H, 55, 32, kv_heads=kv_heads, dtype=dtype, device=device)
        with case(B=B, H=H, kv_heads=kv_heads):
            check_attention(lab, q, k, v, None, window)


@step3
@pytest.mark.parametrize("window", [1, 13, 16, 50])
def test_window_tiles(lab, device, window):
    q, k, v = fenced_qkv(1, 1, 97, 16, device=device)
    for block_m, block_n in ((16, 16), (32, 16), (16, 32), (64, 16), (16, 64)):
        check_attention(lab, q, k, v, None, window, block_m, block_n)


@step3
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_window_wide_tiles(lab, device, dtype):
    # Full tiles of 128 keys, cut ones of 64; F16 on a Hopper card and here by descriptor.
    for T, S, window, offset, block_m in (
        (130, 560, 420, None, 128),  # two cut tiles, two full ones, two cut ones
        (90, 300, 100, None, 32),  # none is full
        (70, 401, 300, None, 32),
        (70, 401, 129, 200, 32),
        (40, 300, 200, 420, 32),  # the last full tile would end past the last key
    ):
        q, k, v = fenced_qkv(1, 1, T, 16, S=S, dtype=dtype, device=device)
        check_attention(lab, q, k, v, offset, window, block_m, 128)


@step3
def test_window_half_at_any_address(lab, device):
    # The copy engine takes multiples of 16 bytes only; other rows are read by pointers.
    for gap, shift in ((1, 0), (8, 1), (8, 8), (4, 0)):
        x = oracle.inputs(3, 1, 2, 90, 32 + gap, dtype=F16, device=device)
        q, k, v = x[..., shift : shift + 32]
        with case(gap=gap, shift=shift):
            check_attention(lab, q, k, v, None, 50)


@step3
@pytest.mark.parametrize("window", [5, 40])
def test_window_lengths_and_offsets(lab, device, window):
    # Offset 24 with a window of 5: the later queries have left every key behind.
    for T, S, offset in (
        (1, 1, None),
        (1, 70, None),
        (20, 90, None),
        (40, 90, 11),
        (33, 20, None),
        (9, 20, 24),
        (9, 20, 90),
    ):
        q, k, v = fenced_qkv(1, 2, T, 16, S=S, kv_heads=1, device=device)
        check_attention(lab, q, k, v, offset, window)
        check_attention(lab, q, k, v, offset, window, 32, 16)


@step3
def test_window_head_dims(lab, device):
    dtype = F32 if here.interpret else F16
    for D in (16, 64, 128, 256):
        q, k, v = fenced_qkv(1, 1, 37, D, dtype=dtype, device=device)
        with case(D=D):
            check_attention(lab, q, k, v, None, 11)


@step3
def test_window_field_report_off_by_one(lab, device):
    # q = 0 and V = the identity: the non-zeros of row 5 are the keys it sees.
    q = torch.zeros(1, 1, 6, 16, device=device)
    k = oracle.inputs(1, 1, 6, 16, device=device)
    v = torch.eye(16, device=device)[None, None, :6].contiguous()
    for window, want in ((1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (6, [0, 1, 2, 3, 4, 5])):
        out, lse = lab.attention(q, k, v, window=window, block_m=16, block_n=16)
        keys = out[0, 0, 5].nonzero().flatten().tolist()
        assert keys == want, f"W={window} is the query itself and {window - 1} before: got {keys}"
        got, count = lse[0, 0, 5].item(), math.log(len(want))
        assert abs(got - count) < 1e-6, f"lse of {len(want)} scores of 0: want {count}, got {got}"


@step3
def test_window_first_tile_wholly_masked(lab, device):
    # Row 31 of a tile of 32 starts 31 keys later than row 0: with W=3 the tile's first 16 keys
    # hold nothing for it, and exp(-inf - (-inf)) is NaN.
    q, k, v = fenced_qkv(1, 1, 64, 16, device=device)
    check_attention(lab, q, k, v, None, 3, 32, 16)
    check_attention(lab, q, k, v, None, 3, 64, 16)
    check_attention(lab, q * 0 + 30.0, k * 0 - 30.0, v, None, 3, 32, 16)  # and all scores are low


@step3
def test_window_wide_equals_none(lab, device):
    q, k, v = oracle.qkv(1, 2, 50, 16, device=device)
    wide, lse = lab.attention(q, k, v, window=50, block_m=16, block_n=16)
    wider, lse_wider = lab.attention(q, k, v, window=2**30, block_m=16, block_n=16)
    assert torch.equal(wide, wider), "a window of S keys is no limit, nor is a larger one"
    assert torch.equal(lse, lse_wider)


@step3
def test_window_score_ranges(lab, device):
    for kind in SCORE_KINDS:
        with case(kind=kind):
            q, k, v = fenced_qkv(1, 1, 60, 32, kind=kind, device=device)
            check_attention(lab, q, k, v, None, 21)


@step3
def test_window_huge_equal_scores(lab, device):
    check_huge_equal_scores(lab, device, 25)


@step3
def test_window_half_scores_do_not_overflow(lab, device):
    q, k, v = fenced_qkv(1, 1, 40, 64, dtype=F16, device=device)
    check_attention(lab, q * 60, k * 60, v, None, 19)


@step3
def test_window_sums_in_float32(lab, device):
    check_sums_in_float32(lab, device, 1000)


@step3
@interpreter_only
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32), (16, 16)])
def test_window_moves_few_bytes(lab, device, block_m, block_n):
    for T in (128, 40, 1):
        q, k, v = oracle.qkv(1, 2, T, 16, S=128, kv_heads=1, device=device)
        check_bytes(lab, q, k, v, 20, block_m, block_n)
    check_bytes(lab, q, k, v, 20, block_m, block_n, offset=0)  # T = 1: padding rows see nothing
    for offset in (25, 70):  # the window holds the last 3 of the 9 keys, or none
        check_bytes(lab, q, k[:, :, :9], v[:, :, :9], 20, block_m, block_n, offset)


@step3
@interpreter_only
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_window_cut_tiles_are_narrow(lab, device, dtype):
    # One tile of 64 rows that see keys 257 to 576, 320 to 513 all of them: one tile of 64 keys,
    # one of 128, and two of 64.
    q, k, v = oracle.qkv(1, 1, 64, 16, S=577, dtype=dtype, device=device)
    check_attention(lab, q, k, v, None, 257, 64, 128)
    work, row = lab.kernels, 16 * q.element_size()
    keys = 320
    want = (64 + 2 * keys) * row
    assert work.bytes_loaded <= want, (
        f"tiles that the window or the diagonal cuts are at most 64 keys wide: {keys} keys here, "
        f"{want} bytes with q; got {work.bytes_loaded}"
    )
    want = 4 * 64 * keys * 16
    assert work.dot_flops <= want, f"and {want} FLOPs; got {work.dot_flops}"


@step3
@interpreter_only
def test_window_bytes_grow_with_T_times_W(lab, device):
    loaded = {}
    for T, window in ((128, 16), (256, 16), (256, 32)):
        q, k, v = oracle.qkv(1, 1, T, 16, device=device)
        loaded[T, window] = check_bytes(lab, q, k, v, window, 16, 16)
    twice = loaded[256, 16] / loaded[128, 16]
    assert twice < 2.2, f"twice as many tokens, twice as many bytes: got {twice:.2f} times"
    wider = loaded[256, 32] / loaded[256, 16]
    assert wider < 2, f"twice the window, less than twice the bytes: got {wider:.2f} times"


@step3
@interpreter_only
def test_window_offsets_beyond_32_bits(lab, device):
    check_far_offsets(lab, device, 20)


@step3
def test_window_follows_its_input(lab, device):
    check_follows_its_input(lab, device, 9)


@step3
@interpreter_only
def test_window_is_the_kernels_work(lab, device):
    check_is_the_kernels_work(lab, device, 9)


@step3
@needs_compiler
@pytest.mark.timeout(240)
def test_window_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "_attend", block_m=32, block_n=32)


@step3
def test_window_rejects(lab, device):
    q, k, v = oracle.qkv(1, 2, 8, 16, device=device)
    lab.attention(q, k, v, window=3, block_m=16, block_n=16)
    for window in (0, -1, -(2**31), 2.0, 2**40):
        with pytest.raises(ValueError, match="window"):
            lab.attention(q, k, v, window=window)


# ---------------------------------------------------------------- step 4


def projection(B, T, heads, kv_heads, D, dtype=F32, device="cpu", gap=0):
    """x (B, T, (heads + 2 kv_heads) D) between red zones, and contiguous copies of q, k, v."""
    width = (heads + 2 * kv_heads) * D
    x = oracle.inputs(B, T, width + gap, dtype=dtype, device=device)[..., gap:]
    x = memory.fenced(x)
    parts = x.reshape(B, T, heads + 2 * kv_heads, D).transpose(1, 2).contiguous()
    return x, parts.split((heads, kv_heads, kv_heads), dim=1)


def check_projected(lab, x, q, k, v, window=None, offset=None):
    heads, kv_heads = q.shape[1], k.shape[1]
    with case(heads=heads, kv_heads=kv_heads, offset=offset, window=window):
        got = lab.projected_attention(
            x, heads, kv_heads, query_offset=offset, window=window, block_m=16, block_n=16
        )
        visible = seen(q.shape[2], k.shape[2], offset, window, q.device)
        out, lse = oracle.attention(q, k, v, visible=visible, tiles=(16, 16))
        out.value, out.axes = out.value.transpose(1, 2).flatten(2), "BTC"
        oracle.check_all((out, lse), got, "projected_attention")
    return got


@step4
@kernel_dtypes
@pytest.mark.parametrize("window", [None, 9])
def test_projected_matches_definition(lab, device, window, dtype):
    x, (q, k, v) = projection(2, 29, 4, 2, 16, dtype=dtype, device=device)
    check_projected(lab, x, q, k, v, window)


@step4
def test_projected_head_counts(lab, device):
    for heads, kv_heads, D in ((1, 1, 16), (6, 2, 16), (4, 1, 32), (3, 3, 64)):
        x, (q, k, v) = projection(1, 19, heads, kv_heads, D, device=device)
        check_projected(lab, x, q, k, v)
        check_projected(lab, x, q, k, v, offset=-3)


@step4
def test_projected_reads_a_slice(lab, device):
    x, (q, k, v) = projection(2, 20, 4, 2, 16, device=device, gap=48)
    check_projected(lab, x, q, k, v)
    check_projected(lab, x, q, k, v, 5)


@step4
@pytest.mark.parametrize("window", [None, 9])
def test_projected_copies_nothing(lab, device, window):
    x, (q, k, v) = projection(2, 17, 4, 2, 16, device=device)
    out, lse = check_projected(lab, x, q, k, v, window)
    made = out.nbytes + lse.nbytes
    assert lab.work.allocated == made, (
        f"out and lse are all that is made, {made} bytes: got {lab.work.allocated}"
    )
    assert out.is_contiguous(), f"the output projection reads it in order: strides {out.stride()}"


@step4
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_layouts(lab, device, layout, window):
    x, (q, k, v) = projection(1, 16, 2, 1, 16, device=device)
    check_projected(lab, x, q, k, v, window)
    q, k, v = oracle.qkv(2, 2, 21, 16, S=25, kv_heads=1, device=device, layout=layout)
    dense = q.contiguous(), k.contiguous(), v.contiguous()
    for what, args in {
        "all": (q, k, v),
        "q": (q, *dense[1:]),
        "k": (dense[0], k, dense[2]),
        "v": (*dense[:2], v),  # a field report
    }.items():
        with case(other_strides=what):
            check_attention(lab, *args, None, window, 32, 16)


@step4
@pytest.mark.parametrize("window", [None, 9])
def test_layouts_of_a_cache(lab, device, window):
    # A decode step reads the filled part of (B, capacity, H_kv, D) caches, unlike in their gaps.
    x, (q, k, v) = projection(2, 1, 4, 2, 16, device=device)
    check_projected(lab, x, q, k, v, window)
    k_cache = torch.full((2, 50, 2, 16), math.nan, device=device)
    v_cache = torch.full((2, 2, 64, 16), math.nan, device=device)
    k_cache[:, :33] = oracle.inputs(2, 33, 2, 16, device=device)
    v_cache[:, :, :33] = oracle.inputs(2, 2, 33, 16, device=device)
    k, v = k_cache[:, :33].transpose(1, 2), v_cache[:, :, :33]
    check_attention(lab, q, k, v, None, window)
    made = q.nbytes + 4 * 2 * 4
    assert lab.work.allocated == made, f"nothing is copied: {made} bytes, got {lab.work.allocated}"
    shared = k[:, :1].expand(2, 2, 33, 16)  # stride 0: both key heads are one
    check_attention(lab, q, shared, v, None, window)


@step4
def test_layouts_rejects(lab, device):
    x, _ = projection(1, 8, 4, 2, 16, device=device)
    lab.projected_attention(x, 4, 2, block_m=16, block_n=16)
    for bad in (x[0], x[None], x[..., :-1], x[:, :0]):
        with pytest.raises(ValueError, match="got"):
            lab.projected_attention(bad, 4, 2)
    for heads, kv_heads in ((3, 2), (0, 2), (4, 0), (4, -1), (4.0, 2)):
        with pytest.raises(ValueError, match="got"):
            lab.projected_attention(x, heads, kv_heads)
    for wrong in ({"block_m": 24}, {"block_n": 24}, {"window": 0}, {"query_offset": 0.5}):
        refuses(f"{wrong}, passed on", "got", lab.projected_attention, x, 4, 2, **wrong)
    q, k, v = oracle.qkv(1, 2, 16, 16, device=device)
    for place in range(3):
        args = [x.transpose(2, 3) if i == place else x for i, x in enumerate((q, k, v))]
        with pytest.raises(ValueError, match="adjacent"):
            lab.attention(*args)


# ---------------------------------------------------------------- step 5

LENGTHS = [0, 17, 1, 0, 0, 38, 16]
KEYS = [5, 17, 20, 0, 7, 29, 33]


def offsets(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def packed(lengths, keys, H, kv_heads, D, dtype=F32, device="cpu", spare=0):
    """q, k, v of the sequences one after the other, between red zones; spare tokens are NaN."""
    made = []
    for n, heads in ((sum(lengths), H), (sum(keys), kv_heads), (sum(keys), kv_heads)):
        x = torch.full((n + spare, heads, D), math.nan, dtype=dtype, device=device)
        x[:n] = oracle.inputs(n, heads, D, dtype=dtype, device=device)
        made.append(memory.fenced(x))
    return tuple(made)


def check_varlen(lab, qkv, lengths, keys, causal=True, window=None, block_m=16, block_n=16):
    q, k, v = qkv
    cu_q, cu_k = offsets(lengths, q.device), offsets(keys, q.device)
    tiles = {"block_m": block_m, "block_n": block_n}
    out, lse = lab.varlen_attention(q, k, v, cu_q, cu_k, causal=causal, window=window, **tiles)
    assert out.shape == q.shape, f"out: want shape {tuple(q.shape)}, got {tuple(out.shape)}"
    want = q.shape[1], len(q)
    assert lse.shape == want, f"lse: want shape {want}, got {tuple(lse.shape)}"
    i = j = 0
    for n, (T, S) in enumerate(zip(lengths, keys, strict=True)):
        rows, part, name = out[i : i + T], lse[:, i : i + T], f"sequence {n} (T={T}, S={S})"
        if T and S:
            args = (q[i : i + T], k[j : j + S], v[j : j + S])
            args = (x.transpose(0, 1)[None] for x in args)
            visible = seen(T, S, None, window, q.device) if causal else None
            expected = oracle.attention(*args, visible=visible, tiles=(block_m, block_n))
            expected[0].name, expected[1].name = f"out of {name}", f"lse of {name}"
            got = rows.transpose(0, 1)[None], part[None]
            oracle.check_all(expected, got, "varlen_attention")
        else:
            assert (rows == 0).all(), f"{name}: without keys out is 0"
            assert (part == -INF).all(), f"{name}: without keys lse is -inf"
        i, j = i + T, j + S
    assert (out[i:] == 0).all(), "tokens of no sequence: out is 0"
    assert (lse[:, i:] == -INF).all(), "tokens of no sequence: lse is -inf"


causal_or_full = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@step5
@causal_or_full
@kernel_dtypes
def test_varlen_matches_definition(lab, device, causal, dtype):
    qkv = packed(LENGTHS, KEYS, 2, 1, 16, dtype=dtype, device=device)
    check_varlen(lab, qkv, LENGTHS, KEYS, causal)
    three = packed([20], [25], 6, 2, 16, dtype=dtype, device=device)  # groups of three
    check_varlen(lab, three, [20], [25], causal)


@step5
@causal_or_full
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_varlen_tiles(lab, device, causal, block_m, block_n):
    qkv = packed(LENGTHS, KEYS, 2, 1, 32, device=device)
    check_varlen(lab, qkv, LENGTHS, KEYS, causal, None, block_m, block_n)


@step5
def test_varlen_batches(lab, device):
    for lengths in ([1], [16], [37], [1, 1, 1], [0, 20], [20, 0]):
        with case(lengths=lengths):
            check_varlen(lab, packed(lengths, lengths, 2, 2, 16, device=device), lengths, lengths)


@step5
def test_varlen_window(lab, device):
    qkv = packed(LENGTHS, KEYS, 1, 1, 16, device=device)
    for window in (1, 9, 200):
        with case(window=window):
            check_varlen(lab, qkv, LENGTHS, KEYS, True, window)


@step5
@causal_or_full
def test_varlen_sequences_are_apart(lab, device, causal):
    # Another sequence's tokens are NaN: neither its keys nor its queries may reach this one.
    lengths = [20, 21, 19]
    qkv = packed(lengths, lengths, 1, 1, 16, device=device)
    cu = offsets(lengths, device)
    tiles = {"block_m": 16, "block_n": 16}
    clean, _ = lab.varlen_attention(*qkv, cu, cu, causal=causal, **tiles)
    for x in qkv:
        x[20:41] = math.nan
    out, lse = lab.varlen_attention(*qkv, cu, cu, causal=causal, **tiles)
    for a, b in ((0, 20), (41, 60)):
        assert torch.equal(out[a:b], clean[a:b]), "a token of another sequence was used"
        assert torch.isfinite(lse[:, a:b]).all()


@step5
@causal_or_full
def test_varlen_spare_tokens(lab, device, causal):
    qkv = packed([17, 5], [20, 5], 2, 1, 16, device=device, spare=9)  # NaN beyond the last offset
    check_varlen(lab, qkv, [17, 5], [20, 5], causal)


@step5
def test_varlen_no_token_at_all(lab, device):
    qkv = packed([3], [3], 2, 2, 16, device=device)
    check_varlen(lab, qkv, [3], [3])
    check_varlen(lab, qkv, [0, 0], [3, 0])
    check_varlen(lab, qkv, [3], [0])


@step5
def test_varlen_layouts(lab, device):
    lengths = [17, 0, 20]
    q, k, v = (
        oracle.inputs(1, heads, 37, 16, device=device, layout="strided")[0].transpose(0, 1)
        for heads in (2, 1, 1)
    )  # (37, heads, 16) over memory in the order (heads, 37, gaps)
    check_varlen(lab, (q, k, v), lengths, lengths)
    dense = q.contiguous(), k.contiguous(), v.contiguous()
    check_varlen(lab, (dense[0], k, dense[2]), lengths, lengths)
    check_varlen(lab, (dense[0], dense[1], v), lengths, lengths)


@step5
@interpreter_only
def test_varlen_moves_few_bytes(lab, device):
    lengths, block = [5, 64, 16, 40], 16
    q, k, v = qkv = packed(lengths, lengths, 2, 1, 16, device=device)
    check_varlen(lab, qkv, lengths, lengths, True, None, block, block)
    keys = flops = 0
    for n in lengths:
        for start in range(0, n, block):
            tiles = math.ceil(min(start + block, n) / block)
            keys += min(tiles * block, n)
            flops += tiles * 4 * block * block * 16
    work, row, H = lab.kernels, 16 * 4, 2
    offsets_read = 4 * 4 * work.launches["_varlen_kernel"]  # four offsets a program
    want = H * (sum(lengths) + 2 * keys) * row + offsets_read
    assert work.bytes_loaded <= want, (
        f"each token of q once, K and V tiles up to the diagonal, no padding: {want} bytes; "
        f"got {work.bytes_loaded} loaded"
    )
    assert work.dot_flops <= H * flops, (
        f"two products a visited tile, {H * flops} FLOPs: got {work.dot_flops}"
    )
    made = q.nbytes + 4 * H * len(q)
    assert work.bytes_stored == made, f"each row once, {made} bytes: got {work.bytes_stored}"
    assert lab.work.allocated <= made, (
        f"out and lse are all that is made, {made} bytes: got {lab.work.allocated}; no padding"
    )


@step5
@interpreter_only
def test_varlen_offsets_beyond_32_bits(lab, device):
    # Three tokens so far apart that the third begins past element 2**31.
    far, D = 2**30 + 64, 16
    try:
        storage = torch.empty(2 * far + D, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4.3 GB of address space: {str(error)[:60]}")
    x = storage.as_strided((3, 1, D), (far, D, 1))
    x.copy_(oracle.inputs(3, 1, D, dtype=F16, device=device))
    dense = x.contiguous()
    check_varlen(lab, (dense, x, x), [2, 1], [2, 1])
    check_varlen(lab, (x.expand(3, 1, D)[:3], dense, dense), [2, 1], [2, 1])
    heads = storage.as_strided((1, 3, D), (D, far, 1))
    check_varlen(lab, (heads, heads, heads), [1], [1])


@step5
def test_varlen_follows_its_input(lab, device):
    qkv = packed([20, 9], [20, 9], 2, 2, 16, device=device)
    cu = offsets([20, 9], device)
    first = lab.varlen_attention(*qkv, cu, cu, block_m=16, block_n=16)
    kept = [x.clone() for x in first]
    for x in qkv:
        x.copy_(oracle.inputs(29, 2, 16, device=device))
    check_varlen(lab, qkv, [20, 9], [20, 9])
    check_varlen(lab, qkv, [9, 20], [9, 20])
    for x, old in zip(first, kept, strict=True):
        assert torch.equal(x, old), "a second call must not write into the first one's result"


@step5
@interpreter_only
def test_varlen_is_the_kernels_work(lab, device):
    qkv, cu = packed([20], [20], 2, 2, 16, device=device), offsets([20], device)
    lab.varlen_attention(*qkv, cu, cu, block_m=16, block_n=16)
    with lab.no_program():
        results = lab.varlen_attention(*qkv, cu, cu)
    for name, x in zip(("out", "lse"), results, strict=True):
        assert bool(x.isnan().all()), f"no program ran, yet {name} has numbers: the kernel's work"


@step5
@needs_compiler
@pytest.mark.timeout(240)
def test_varlen_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "varlen_attention", block_m=32, block_n=32)


@step5
def test_varlen_rejects(lab, device):
    q, k, v = packed([8], [8], 4, 2, 16, device=device)

    def cu(*numbers, dtype=torch.int32):
        return torch.tensor(numbers, dtype=dtype, device=device)

    fine = cu(0, 3, 8)
    lab.varlen_attention(q, k, v, fine, fine, block_m=16, block_n=16)
    bad = {
        "falling": cu(0, 5, 3, 8),
        "not from 0": cu(1, 3, 8),
        "negative": cu(0, -1, 8),
        "past the end": cu(0, 3, 9),
        "int64": cu(0, 3, 8, dtype=torch.int64),
        "floating point": cu(0, 3, 8, dtype=F32),
        "one number": cu(0),
        "rank": cu(0, 3, 8)[None],
        "a list": [0, 3, 8],
        "a view with gaps": cu(0, 0, 3, 0, 8)[::2],
    }
    for what, numbers in bad.items():
        refuses(what, "cu_seqlens_q", lab.varlen_attention, q, k, v, numbers, fine)
        refuses(what, "cu_seqlens_k", lab.varlen_attention, q, k, v, fine, numbers)
    with pytest.raises(ValueError, match="one length"):
        lab.varlen_attention(q, k, v, fine, cu(0, 8))
    with pytest.raises(ValueError, match="causal"):
        lab.varlen_attention(q, k, v, fine, fine, causal=False, window=4)
    for window in (0, -1):
        with pytest.raises(ValueError, match="window"):
            lab.varlen_attention(q, k, v, fine, fine, window=window)
    for args in ((q[None], k, v), (q[:, :3], k, v), (q, k[:5], v), (q, k, v.half()), (q[:0], k, v)):
        with pytest.raises(ValueError, match="got"):
            lab.varlen_attention(*args, fine, fine)
    with pytest.raises(ValueError, match="block_m"):
        lab.varlen_attention(q, k, v, fine, fine, block_m=24)


# ---------------------------------------------------------------- step 6


def forward_results(q, k, v, visible):
    """out and lse as the oracle has them, in the dtypes that the forward gives."""
    out, lse = oracle.attention(q, k, v, visible=visible)
    return out.value.to(out.dtype), lse.value.to(lse.dtype)


def check_backward(lab, q, k, v, dout, offset=None, window=None, tile=16):
    T, S = q.shape[2], k.shape[2]
    visible = seen(T, S, offset, window, q.device)
    out, lse = forward_results(q, k, v, visible)
    with case(T=T, S=S, offset=offset, window=window, tile=tile):
        got = lab.attention_backward(
            q, k, v, out, lse, dout, query_offset=offset, window=window, tile=tile
        )
        want = oracle.attention_gradients(q, k, v, dout, visible=visible, tiles=(T, tile))
        oracle.check_all(want, got, "attention_backward")
    return got


def with_dout(H, kv_heads, T, S, D=8, B=2, dtype=F64, device="cpu", **kwargs):
    """q, k, v, dout."""
    q, k, v = oracle.qkv(B, H, T, D, S=S, kv_heads=kv_heads, dtype=dtype, device=device, **kwargs)
    return q, k, v, oracle.inputs(B, H, T, D, dtype=dtype, device=device)


@step6
@pytest.mark.parametrize("window", [None, 1, 7, 20])
def test_backward_matches_autograd(lab, device, window):
    for T, S, tile in ((1, 1, 16), (29, 29, 7), (29, 29, 64), (9, 40, 16)):
        check_against_autograd(lab, T, S, tile, window, device)


def check_against_autograd(lab, T, S, tile, window, device):
    q, k, v, dout = with_dout(6, 2, T, S, device=device)
    got = check_backward(lab, q, k, v, dout, None, window, tile)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(3, dim=1) for x in leaves[1:])
    s = leaves[0] @ keys.transpose(-2, -1) / math.sqrt(8)
    hidden = ~seen(T, S, None, window, device)
    out = s.masked_fill(hidden, -INF).softmax(dim=-1) @ values
    for name, a, b in zip(
        ("dq", "dk", "dv"), got, torch.autograd.grad(out, leaves, dout), strict=True
    ):
        off = (a - b).abs().max().item()
        assert off < 1e-12, f"{name}: off autograd of the definition by {off:.2g}"


@step6
def test_backward_groups(lab, device):
    for H, kv_heads in ((1, 1), (4, 4), (6, 2), (4, 1)):
        with case(H=H, kv_heads=kv_heads):
            check_backward(lab, *with_dout(H, kv_heads, 19, 23, device=device), tile=8)


@step6
def test_backward_dtypes(lab, device):
    for dtype in (F64, F32, F16, BF16):
        args = with_dout(4, 2, 21, 29, D=16, dtype=dtype, device=device)
        for window in (None, 9):
            check_backward(lab, *args, None, window, 8)


@step6
@pytest.mark.parametrize("window", [None, 6])
def test_backward_offsets_and_empty_rows(lab, device, window):
    # Rows before key 0 see nothing: lse is -inf there, and every gradient is finite.
    for T, S, offset in ((8, 30, 0), (8, 30, 11), (20, 12, None), (20, 12, -5)):
        q, k, v, dout = with_dout(4, 2, T, S, device=device)
        check_backward(lab, q, k, v, dout, offset, window, 5)
        check_backward(lab, q, k, v, dout, 100, window, 16)  # the window has left every key behind


@step6
def test_backward_score_ranges(lab, device):
    for kind in SCORE_KINDS:
        args = with_dout(2, 1, 40, 40, D=16, dtype=F32, device=device, kind=kind)
        with case(kind=kind):
            check_backward(lab, *args, None, None, 8)
            check_backward(lab, *args, None, 13, 8)


@step6
def test_backward_value_dim(lab, device):
    q, k, _, _ = with_dout(4, 2, 9, 13, device=device)
    for DV in (1, 5, 24):
        v = oracle.inputs(2, 2, 13, DV, dtype=F64, device=device)
        dout = oracle.inputs(2, 4, 9, DV, dtype=F64, device=device)
        with case(DV=DV):
            check_backward(lab, q, k, v, dout, tile=4)


@step6
def test_backward_layouts(lab, device):
    for layout in ("transposed", "strided"):
        q, k, v, dout = with_dout(4, 2, 21, 21, device=device, layout=layout)
        check_backward(lab, q, k, v, dout, None, 9, 8)
        laid = oracle.inputs(2, 4, 21, 8, dtype=F64, device=device, layout=layout)
        check_backward(lab, q.contiguous(), k, v, laid, None, 9, 8)
    one = torch.ones((), dtype=F64, device=device).expand(2, 4, 21, 8)  # as after .sum()
    check_backward(lab, q, k, v, one, None, 9, 8)


@step6
def test_backward_sums_in_float32(lab, device):
    # 400 equal terms, one key a tile: a sum kept in bfloat16 (8 bits) stops growing at 256.
    sign = torch.ones(400, 1, dtype=BF16, device=device)
    sign[::2] = -1
    v = k = sign.expand(1, 1, 400, 8).contiguous()
    q = torch.zeros(1, 1, 1, 8, dtype=BF16, device=device)
    check_backward(lab, q, k, v, torch.ones_like(q), None, None, 1)


@step6
@pytest.mark.parametrize("window", [16, 48])
def test_backward_work_grows_with_T_times_W(lab, device, window):
    H, T, D, tile = 2, 256, 8, 16
    check_backward(lab, *with_dout(H, 1, T, T, D=D, B=1, device=device), None, window, tile)
    pairs = sum(min(window + tile - 1, T - j) * tile for j in range(0, T, tile))
    want = 10 * H * pairs * D
    assert lab.work.flops <= 1.03 * want, (
        f"five products of the queries that see a key of the tile, {want:,} FLOPs: got "
        f"{lab.work.flops:,}, {lab.work.flops / want:.2f} times as many"
    )
    assert lab.work.moved >= 4 * 8 * H * pairs // 2, (
        "the scores are computed where they can be seen, in PyTorch"
    )
    most = H * max(T * D, (window + tile) * tile)
    assert lab.work.most_elements <= most, f"no larger than q or a tile: got {lab.work.most_text}"


@step6
def test_backward_causal_skips_rows(lab, device):
    H, T, D, tile = 2, 192, 8, 16
    check_backward(lab, *with_dout(H, 1, T, T, D=D, B=1, device=device), None, None, tile)
    want = 10 * H * D * sum((T - j) * tile for j in range(0, T, tile))
    assert lab.work.flops <= 1.03 * want, (
        f"queries before a tile's first key see nothing of it: {want:,} FLOPs, got "
        f"{lab.work.flops:,}"
    )


@step6
def test_backward_shares_keys_within_the_group(lab, device):
    # Many query heads, few queries: K repeated for each head would be most of what is made.
    q, k, v, dout = with_dout(16, 1, 2, 256, D=16, B=1, dtype=F32, device=device)
    check_backward(lab, q, k, v, dout, None, None, 32)
    repeated = 16 * k.nbytes
    assert lab.work.allocated < 1.5 * repeated, (
        f"{lab.work.allocated:,} bytes made; K repeated for 16 heads would be {repeated:,}, and "
        "so would its gradient: let the products sum over the group"
    )


@step6
def test_backward_uses_lse_and_out(lab, device):
    # P is exp(s - lse): with lse + log 2 every weight is half as large, and so is every gradient.
    q, k, v, dout = with_dout(4, 2, 12, 20, device=device)
    out, lse = forward_results(q, k, v, seen(12, 20, None, 7, device))
    whole = lab.attention_backward(q, k, v, out, lse, dout, window=7)
    halves = lab.attention_backward(q, k, v, out, lse + math.log(2), dout, window=7)
    for name, a, b in zip(("dq", "dk", "dv"), whole, halves, strict=True):
        off = (a - 2 * b).abs().max().item()
        assert off < 1e-10, f"{name}: recompute P from lse; it does not follow lse (off {off:.2g})"
    no_delta = lab.attention_backward(q, k, v, out * 0, lse, dout, window=7)
    assert torch.equal(no_delta[2], whole[2]), "dv does not depend on out"
    off = (no_delta[0] - whole[0]).abs().max().item()
    assert off > 1e-3, "delta is rowsum(dout * out): dq does not follow out"


@step6
def test_backward_follows_its_input(lab, device):
    q, k, v, dout = with_dout(4, 2, 12, 12, device=device)
    grads = lab.attention_backward(
        q, k, v, *forward_results(q, k, v, seen(12, 12, device=device)), dout
    )
    kept = [g.clone() for g in grads]
    for x in (q, k, v, dout):
        x.copy_(oracle.inputs(*x.shape, dtype=F64, device=device))
    check_backward(lab, q, k, v, dout)
    for g, old in zip(grads, kept, strict=True):
        assert torch.equal(g, old), "a second call must not write into the first one's result"


@step6
def test_backward_rejects(lab, device):
    q, k, v, dout = with_dout(4, 2, 8, 8, D=4, B=1, device=device)
    out, lse = forward_results(q, k, v, seen(8, 8, device=device))
    lab.attention_backward(q, k, v, out, lse, dout)
    with pytest.raises(ValueError, match="got"):
        lab.attention_backward(q[:, :3], k, v, out[:, :3], lse[:, :3], dout[:, :3])
    with pytest.raises(ValueError, match="got"):
        lab.attention_backward(q, k.float(), v, out, lse, dout)
    for tile in (0, -1):
        with pytest.raises(ValueError, match="tile"):
            lab.attention_backward(q, k, v, out, lse, dout, tile=tile)
    for window in (0, -3):
        with pytest.raises(ValueError, match="window"):
            lab.attention_backward(q, k, v, out, lse, dout, window=window)
