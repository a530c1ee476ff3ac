"""Tests of lab 11. Run `pytest labs/11_warp_specialization`; `--step 3` runs one step's tests.

Kernels run in the emulator (labs/_harness/gluon_emulator.py) with what is asynchronous as late, as
early and as mixed as it may be; on a machine with a Hopper card they run there, too. `lab` is the
code under test, `oracle` gives inputs and float64 results with their error budgets.
"""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch

from labs._harness import gluon_emulator, gluon_values, memory, oracle
from labs._harness.cases import check_compiles, check_kept, fenced_qkv, needs_compiler, step

STEPS = {
    1: "_tma_copy_kernel",
    2: "_wgmma_kernel",
    3: "_attention_producer_consumer_kernel",
    4: "_attention_overlap_kernel",
    5: "_attention_persistent_kernel",
}

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LATE, EARLY, MIXED, CARD = 0, 1, 2, -1

GLUON = gluon_emulator.unavailable()
HOPPER = GLUON is None and gluon_emulator.hopper()
needs_gluon = pytest.mark.skipif(GLUON is not None, reason=str(GLUON))
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper card (H100, H200)")
half_dtypes = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
causal_or_full = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
head_dims = pytest.mark.parametrize("D", [64, 128])
# Where a check runs: seeds of the emulator, and the card if there is one.
SEEDS = {LATE: "late", EARLY: "early", MIXED: "mixed", 5: "mixed, otherwise", 8: "mixed again"}
CARDS = (CARD,) if HOPPER else ()
EVERYWHERE, ONCE = (LATE, EARLY, MIXED, 5, *CARDS), (*CARDS, LATE)

step1 = step(1, needs_gluon)
step2 = step(2, needs_gluon)
step3 = step(3, needs_gluon)
step4 = step(4, needs_gluon)
step5 = step(5, needs_gluon)


@contextlib.contextmanager
def running(where, multiprocessors=gluon_emulator.MULTIPROCESSORS):
    """(device, what the emulator counts or None), with launches taken over unless on the card."""
    if where == CARD:
        yield "cuda", None
    else:
        with gluon_emulator.emulate(where, multiprocessors) as work:
            yield "cpu", work


@contextlib.contextmanager
def saying(line, *given):
    """A failure within the block ends with what line(*given) gives, if it gives something."""
    try:
        yield
    except (AssertionError, gluon_values.GluonError) as error:
        if more := line(*given):
            error.args = (f"{error}\n  {more}", *error.args[1:])
        raise


def named(where):
    """A failure within the block also says where it happened."""
    if where == CARD:
        return saying(str, "on the card")
    place = f"in the emulator, {SEEDS[where]} (seed {where})"
    if where == LATE:
        place += ": a tile that is used before it came, or given back too early, is NaN here"
    return saying(str, place)


# ---------------------------------------------------------------- step 1


def check_copy(lab, places, x, **tiles):
    for where in places:
        with named(where):
            with running(where) as (device, work):
                y = lab.tma_copy(x.to(device), **tiles)
            check_equal(x, y.cpu())
            check_stored(work, out=y)


def check_stored(work, **outputs):
    """What a function returns is what its kernel stored, and nothing was done to it afterwards."""
    for name, tensor in outputs.items():
        assert work is None or work.is_as_written(tensor), (
            f"{name} must be what the kernel stored: it lies elsewhere, or was changed afterwards"
        )


def check_equal(x, y):
    assert y.shape == x.shape, f"want shape {tuple(x.shape)}, got {tuple(y.shape)}"
    assert y.dtype == x.dtype, f"want {x.dtype}, got {y.dtype}"
    wrong = ~(y == x)
    if wrong.any():
        row, col = (int(i) for i in wrong.nonzero()[0])
        got = float(y[row, col])
        why = " (NaN: it had not arrived yet, or was never stored)" if math.isnan(got) else ""
        raise AssertionError(
            f"{int(wrong.sum())} of {x.numel()} elements differ, the first at [{row}, {col}]: got "
            f"{got:.6g}, want {float(x[row, col]):.6g}{why}"
        )


@step1
@half_dtypes
@pytest.mark.parametrize(("R", "C"), [(64, 64), (256, 128), (200, 136), (1, 8), (65, 200)])
def test_tma_copy(lab, R, C, dtype):
    check_copy(lab, EVERYWHERE, memory.fenced(oracle.inputs(R, C, dtype=dtype)))


@step1
@pytest.mark.parametrize(("block_r", "block_c"), [(8, 64), (32, 128), (128, 64), (16, 256)])
def test_tma_copy_tiles(lab, block_r, block_c):
    x = memory.fenced(oracle.inputs(150, 328, dtype=F16))
    check_copy(lab, EVERYWHERE, x, block_r=block_r, block_c=block_c)


@step1
def test_tma_copy_row_strides(lab):
    wide = oracle.inputs(100, 400, dtype=F16)
    for x in (wide[::2, 40:240], wide[:, 41:241], wide[:96].t()[:, :96], wide[:1].expand(70, 400)):
        check_copy(lab, ONCE, x)


@step1
def test_tma_copy_moves_each_tile_once(lab):
    x = oracle.inputs(200, 136, dtype=F16)
    with running(LATE) as (_, work):
        lab.tma_copy(x)
    tiles = 4 * 3 * 64 * 64 * 2
    assert (work.bytes_loaded, work.bytes_stored) == (tiles, tiles), (
        f"4 x 3 tiles of 8,192 bytes, in and out once: got {work.bytes_loaded:,} bytes loaded and "
        f"{work.bytes_stored:,} stored by TMA"
    )
    assert work.shared <= 64 * 64 * 2 + 16, (
        f"one tile and a barrier: got {work.shared:,} bytes of shared memory"
    )


@step1
@needs_compiler
@pytest.mark.timeout(180)
def test_tma_copy_compiles(lab, request):
    check_compiles(lab, request, "tma_copy", "bulk")


@step1
def test_tma_copy_rejects(lab):
    x = oracle.inputs(64, 64, dtype=F16)
    with running(LATE):
        lab.tma_copy(x)
        for bad in (x[0], x[:0], x.float(), x[:, :60]):
            with pytest.raises(ValueError, match="got"):
                lab.tma_copy(bad)
        for block in (0, 4, 24, 512):
            with pytest.raises(ValueError, match="block_r"):
                lab.tma_copy(x, block_r=block)
        with pytest.raises(ValueError, match="block_c"):
            lab.tma_copy(x, block_c=32)
    with pytest.raises(RuntimeError, match="Hopper"):
        lab.tma_copy(x)


# ---------------------------------------------------------------- step 2


def check_products(lab, places, T, S, D, dtype, scale):
    q, k, v = (memory.fenced(oracle.inputs(n, D, dtype=dtype)) for n in (T, S, S))
    for where in places:
        with named(where):
            with running(where) as (device, work):
                out = lab.wgmma_products(*(x.to(device) for x in (q, k, v)), scale)
                check_stored(work, out=out)
            check_product(q, k, v, scale, out.cpu())
    return work


def check_product(q, k, v, scale, out):
    dtype = q.dtype
    p = (q.double() @ k.double().T * scale).to(dtype)
    # p may round the other way where it lies between two numbers: an ulp of it, times v.
    slack = (oracle.eps(dtype) * p.double().abs() @ v.double().abs()).max()
    expected = oracle.matmul(p, v)
    expected.budget += float(slack)
    expected.check(out)


@step2
@half_dtypes
@head_dims
@pytest.mark.parametrize(("T", "S"), [(64, 64), (128, 128), (100, 128), (1, 64)])
def test_wgmma_products(lab, T, S, D, dtype):
    check_products(lab, EVERYWHERE, T, S, D, dtype, 0.25)


@step2
def test_wgmma_products_scale_before_rounding(lab):
    check_products(lab, (LATE,), 64, 64, 64, F16, 1e-4)
    q = torch.full((64, 64), 60.0, dtype=F16)  # products of 230,400: scaled first, they fit
    with running(LATE):
        out = lab.wgmma_products(q, q, torch.ones_like(q), 2.0**-9)
    assert bool((out == 64 * 450).all()), f"want 28,800, got {float(out[0, 0])}"


@step2
def test_wgmma_products_work(lab):
    work = check_products(lab, (LATE,), 128, 128, 64, F16, 1.0)
    want = 2 * 4 * 64 * 128 * 64
    assert work.flops == want, f"two products a program, {want:,} FLOPs: got {work.flops:,}"
    loaded = 2 * (64 + 2 * 128) * 64 * 2
    assert work.bytes_loaded == loaded, (
        f"a tile each of q, k and v a program, {loaded:,} bytes: got {work.bytes_loaded:,}"
    )


@step2
@needs_compiler
@pytest.mark.timeout(180)
def test_wgmma_products_compiles(lab, request):
    check_compiles(lab, request, "wgmma_products", "wgmma", "bulk")


@step2
def test_wgmma_products_rejects(lab):
    q = oracle.inputs(64, 64, dtype=F16)
    with running(LATE):
        lab.wgmma_products(q, q, q)
        bad = [(q[0], q, q), (q[:0], q, q), (q, q[:32], q[:32]), (q, q, q[:32]), (q[:, :32], q, q)]
        bad += [(q.float(), q, q), (q.float(), q.float(), q.float()), (q, q.bfloat16(), q)]
        for args in bad:
            with pytest.raises(ValueError, match="got"):
                lab.wgmma_products(*args)


# ---------------------------------------------------------------- what steps 3 to 5 share

SIMPLE, OVERLAP = "attention_producer_consumer", "attention_overlap"
BEST, CONFIGURED = "hopper_attention", "attention_persistent"


def check_attention(lab, name, places, q, k, v, causal=False, scale=None, mps=3, **options):
    """out and lse of one of the attention functions against float64; what the last run did."""
    args = (scale,) if name == SIMPLE else (causal, scale)
    want = oracle.attention(q, k, v, causal, kernel=True, tiles=(128, 128), scale=scale)
    for where in places:
        with named(where), running(where, mps) as (device, work):
            x = (t if t.device.type == device else t.to(device) for t in (q, k, v))
            got = getattr(lab, name)(*x, *args, **options)
            rows = 64 * getattr(options.get("config"), "consumers", 2)
            with saying(later_tiles, work, q, want[0], got[0], rows):
                oracle.check_all(want, tuple(t.to(q.device) for t in got), name)
            check_stored(work, out=got[0], lse=got[1])
    return work


def later_tiles(work, q, want, out, rows) -> str:
    """A hint where no program's first tile has errors, and later ones have; else nothing."""
    if work is None or out.shape != q.shape:
        return ""
    wrong = ~((out.double() - want.value).abs() <= want.budget).all(-1)  # (B, H, T); of NaN, too
    first, later = [], []
    for tiles in tiles_of(work, q, rows).values():
        bad = [bool(wrong[b, h, rows * m : rows * (m + 1)].any()) for b, h, m in tiles]
        first += bad[:1]
        later += bad[1:]
    if any(first) or not any(later):
        return ""
    return (
        "each program's first tile is right and later ones are not: what goes on from tile to tile "
        "(`first`, `turn`, the list) does not, or what begins anew does not"
    )


def check_layouts(lab, name, T, **options):
    """Inputs that TMA can read where they lie, and others."""
    where = ONCE
    for layout in ("transposed", "strided"):
        q, k, v = oracle.qkv(2, 3, T, 64, dtype=F16, layout=layout)
        work = check_attention(lab, name, where, q, k, v, **options)
        if layout == "transposed":
            read = {event.tensor.data_ptr() for event in work.of("load")}
            assert read == {x.data_ptr() for x in (q, k, v)}, (
                "TMA can read (B, T, H, D) transposed where it lies: nothing needs a copy"
            )
        check_attention(lab, name, where, q.contiguous(), k.contiguous(), v, **options)
    wide = oracle.inputs(2, 3, T, 72, dtype=F16)
    for x in (wide[..., 8:], wide[..., 1:65]):
        check_attention(lab, name, where, x, x, x, **options)
    shared = oracle.inputs(1, 1, T, 64, dtype=F16).expand(2, 3, T, 64)
    q = oracle.inputs(2, 3, T, 64, dtype=F16)
    check_attention(lab, name, where, q, shared, shared, **options)


def check_huge_equal_scores(lab, name, T, sign, size=133120.0, **options):
    """Scores near 1e11: exp(s - m) must be exactly 1, however s and m were rounded on the way."""
    args = () if name == SIMPLE else (sign < 0,)
    for where in ONCE:
        with named(where):
            with running(where) as (device, _):
                x = torch.full((1, 1, T, 64), size, dtype=BF16, device=device)
                out, lse = getattr(lab, name)(x, sign * x, x, *args, **options)
            got = out[0, 0, -1, 0].item()
            why = (
                "inf - inf or 0 / 0: does a state or a mask begin at a finite number?"
                if math.isnan(got)
                else "x * scale - round(max * scale) in one fused multiply-add is not 0; nor is a "
                "finite number below all scores"
            )
            assert bool((out == x).all()), (
                f"equal scores weigh equally: want {size:g}, got {got}. {why}"
            )
            assert bool(torch.isfinite(lse).all()), "lse is the score itself here: finite"


def check_attention_rejects(lab, call, q, k, v):
    """Shapes, dtypes, scales and empty tensors that no attention function here takes."""
    bad = {
        "rank": (q[0], k[0], v[0]),
        "batch": (q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)),
        "heads": (q.repeat(1, 2, 1, 1), k, v),
        "head dim of k": (q, k[..., :32], v),
        "head dim": (q[..., :32], k[..., :32], v[..., :32]),
        "lengths": (q, k[:, :, :64], v[:, :, :64]),
        "float32": (q.float(), k.float(), v.float()),
        "mixed": (q, k, v.bfloat16()),
        "empty": (q[:0], k[:0], v[:0]),
    }
    for args in bad.values():
        with pytest.raises(ValueError, match="got"):
            call(*args)
    for scale in (0.0, -1.0, 1e-46, math.nan, math.inf):
        with pytest.raises(ValueError, match="scale"):
            call(q, k, v, scale=scale)


# What a program's partitions did, in order (labs/_harness/gluon_program.py, Event).


def consumers(work):
    """The events of each partition that starts products, by (program, partition)."""
    for who in sorted({(event.program, event.partition) for event in work.of("product")}):
        yield [event for event in work.events if (event.program, event.partition) == who]


def tiles_of(work, q, rows=128):
    """The tiles of so many rows that each program loads of q, in order: [(b, h, m)] by program."""
    tiles = {}
    for event in work.of("load"):
        if event.tensor.data_ptr() == q.data_ptr():
            b, h, row = event.place[:3]
            mine = tiles.setdefault(event.program, [])
            if (b, h, row // rows) not in mine[-1:]:
                mine.append((b, h, row // rows))
    return tiles


def check_loads_ahead(work, least):
    most = max(event.loads for event in work.of("load")) + 1
    assert most >= least, (
        f"the producer may have {least} copies on their way at a time, as many as there are free "
        f"stages: got {most}. Only a full ring is to be waited for"
    )


def is_scores(event):
    """Whether it starts Q @ K; P @ V has its left operand in registers."""
    return event.what == "product" and not event.registers


def check_between(work, begins, between, ends, message):
    """From an event that begins(event) a consumer comes to `between` before it comes to `ends`."""
    for events in consumers(work):
        seen = True
        for event in events:
            seen = (seen and not begins(event)) or event.what == between
            assert seen or event.what != ends, message


def check_softmax_stays_in_front(work):
    """See the handout, section 5: the assembler moves exponentials past wgmma's wait."""
    check_between(
        work,
        lambda event: event.what == "exp2" and event.products,
        "wait",
        "product wait",
        "between the softmax and the wait for P @ V an mbarrier must be waited for (the next V): "
        "else the assembler moves the exponentials behind that product",
    )


def check_k_goes_back(work):
    """K is given back when its product has ended, not kept for the softmax."""
    check_between(
        work,
        is_scores,
        "arrive",
        "exp2",
        "K goes back as soon as Q @ K has been waited for, and the next one is on its way during "
        "the softmax: here it is kept until behind it",
    )


def check_first_waits(work):
    """Before its first product a consumer waits for Q and K; for V only behind the softmax."""
    for events in consumers(work):
        kinds = [event.what for event in events]
        product, softmax = kinds.index("product"), kinds.index("exp2")
        waits = kinds[:product].count("wait"), kinds[product:softmax].count("wait")
        assert waits == (2, 0), (
            f"a consumer waits for Q and K before its first product, and for no V before the first "
            f"softmax: want 2 and 0 waits, got {waits[0]} and {waits[1]}"
        )


def check_order_of_programs(work, q, want, why):
    """The tiles of programs 0, 1, ..., of which each has one."""
    order = [tile for _, (tile,) in sorted(tiles_of(work, q).items())]
    assert order == want, f"{why}: want (b, h, m) {want[:4]} ..., got {order[:4]} ..."


TOGETHER = "programs that run at the same time share a head's K and V"


def lagging_qkv(dtype, D=64, T=384):
    """(q, k, v, scale, moves): a key block's largest score passes the last one's by 2**powers.

    Some powers are below SLACK = 8, some above, and some beyond what float16 weights could hold.
    moves: so often is an element of acc multiplied, all rows together.
    """
    powers = torch.tensor([3.9, 7.9, 8.1, 16.0, 20.0, 40.0]).repeat(T // 6)
    q, k = torch.zeros(1, 1, T, D), torch.zeros(1, 1, T, D)
    q[..., 0], k[..., 0] = powers / 4, torch.arange(T) // 128
    q[..., 1], k[..., 1] = 1.0, -oracle.inputs(T).abs()
    k[..., ::128, 1] = 0.0  # the largest of each block, exactly
    k[..., 128, 1] = -(2.0**-15)  # 16 powers less a little: a float16 weight would overflow
    v = oracle.inputs(1, 1, T, D, dtype=dtype)
    moves = D * T // 6 * (0 + 1 + 2 + 2 + 2 + 2)  # 3.9 is never 8 behind, 7.9 once
    return q.to(dtype), k.to(dtype), v, 4 * math.log(2), moves  # 1 of q @ k is 4 powers


def check_moves(work, moves):
    got = work.amount("times")
    why = (
        "too often: the maximum moves though it is not as far behind"
        if got > moves
        else "too seldom: it stays though it is further behind"
        if got
        else "none: is acc rescaled by `_rescale`, given?"
    )
    assert got == moves, (
        "a row's acc is multiplied where the maximum is more than SLACK = 8 powers of two behind, "
        f"{moves:,} elements: got {got:,}, {why}"
    )


def check_turns(work):
    """The consumers start their products in turn: both of a step, then it is the other's turn."""
    for program in {event.program for event in work.of("product")}:
        turn = None
        for event in work.of("product"):
            if event.program != program:
                continue
            if is_scores(event):
                assert event.partition != turn, (
                    f"ping-pong: consumer {turn} starts Q @ K twice, and the other one had no turn"
                )
                turn = event.partition
            elif event.products:  # P @ V, with Q @ K in flight
                assert event.partition == turn, (
                    "ping-pong: the turn ends behind both products of a step, here it ended before "
                    f"consumer {event.partition} had started P @ V"
                )


def check_turns_are_short(work):
    """A consumer passes the turn on before it waits for the products that it has started."""
    check_between(
        work,
        is_scores,
        "arrive",
        "product wait",
        "ping-pong: the turn is to be passed on before you wait for your own product; here the "
        "other consumer's products wait for this one's, and for its softmax",
    )


def check_order_of_loads(work, k, v):
    """K one block ahead of V, the order in which consumers ask for them."""
    loads = {}
    for event in work.of("load"):
        for name, tensor in (("K", k), ("V", v)):
            if event.tensor.data_ptr() == tensor.data_ptr():
                loads.setdefault(event.program, []).append((name, event.place[2]))
    for program, got in loads.items():
        rows = sorted({row for _, row in got})
        want = [("K", rows[0])]
        for before, row in itertools.pairwise(rows):
            want += [("K", row), ("V", before)]
        want.append(("V", rows[-1]))
        assert got == want, (
            f"program {program} loads K one block ahead of V, as they are asked for: want "
            f"{want[:4]} ..., got {got[:4]} ..."
        )


def check_ping_pong(work_of):
    """What work_of(where, ping_pong) gives: turns with ping_pong, none without."""
    works = [work_of(where, True) for where in (LATE, MIXED, 5, 8)]
    for work in works:
        check_turns(work)
        check_turns_are_short(work)
    turns, none = (len(work.of("arrive")) for work in (works[0], work_of(LATE, False)))
    assert turns > none, (
        "with ping_pong there are more arrivals than without, where nobody takes turns: got "
        f"{turns} and {none}. Do `_begin_turn` and `_end_turn` look at PING_PONG?"
    )


# ---------------------------------------------------------------- step 3


@step3
@half_dtypes
@head_dims
@pytest.mark.parametrize("T", [128, 384])
def test_producer_consumer(lab, T, D, dtype):
    check_attention(lab, SIMPLE, EVERYWHERE, *fenced_qkv(1, 2, T, D, dtype=dtype))


@step3
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_producer_consumer_stages(lab, stages):
    check_attention(lab, SIMPLE, EVERYWHERE, *fenced_qkv(1, 1, 640, 64, dtype=F16), stages=stages)


@step3
@pytest.mark.parametrize("kind", ["large", "growing", "shrinking", "equal", "low"])
def test_producer_consumer_score_ranges(lab, kind):
    check_attention(lab, SIMPLE, ONCE, *fenced_qkv(1, 1, 256, 64, dtype=F16, kind=kind))


@step3
@pytest.mark.parametrize("sign", [1, -1])
def test_producer_consumer_huge_equal_scores(lab, sign):
    check_huge_equal_scores(lab, SIMPLE, 256, sign)


@step3
def test_producer_consumer_layouts(lab):
    check_layouts(lab, SIMPLE, 128)


@step3
@pytest.mark.parametrize(("B", "H"), [(3, 2), (1, 5)])
def test_producer_consumer_heads_and_scale(lab, B, H):
    check_attention(lab, SIMPLE, ONCE, *fenced_qkv(B, H, 256, 64, dtype=F16), scale=0.3)


@step3
def test_producer_consumer_moves_few_bytes(lab):
    work = check_attention(lab, SIMPLE, (LATE,), *oracle.qkv(1, 1, 384, 64, dtype=F16))
    row = 64 * 2
    loaded = 384 * row + 3 * 2 * 384 * row
    assert work.bytes_loaded == loaded, (
        f"q once, K and V once for each 128 rows of q, {loaded:,} bytes: got {work.bytes_loaded:,}"
    )
    assert work.bytes_stored == 384 * row, f"out once: got {work.bytes_stored:,} bytes"
    flops = 2 * 2 * 384 * 384 * 64
    assert work.flops == flops, f"two products, {flops:,} FLOPs: got {work.flops:,}"


@step3
@pytest.mark.parametrize("stages", [1, 3])
def test_producer_consumer_copies_ahead(lab, stages):
    q, k, v = oracle.qkv(1, 1, 640, 64, dtype=F16)
    work = check_attention(lab, SIMPLE, (LATE,), q, k, v, stages=stages)
    check_loads_ahead(work, 2 * stages)
    check_k_goes_back(work)
    check_first_waits(work)


@step3
def test_producer_consumer_keeps_a_head_together(lab):
    q, k, v = oracle.qkv(1, 2, 384, 64, dtype=F16)
    want = [(0, h, m) for h in range(2) for m in range(3)]
    check_order_of_programs(check_attention(lab, SIMPLE, (LATE,), q, k, v), q, want, TOGETHER)


@step3
@needs_compiler
@pytest.mark.timeout(180)
@head_dims
def test_producer_consumer_compiles(lab, request, D):
    check_compiles(lab, request, SIMPLE, "wgmma", "bulk", head_dim=D)


@step3
def test_producer_consumer_rejects(lab):
    q, k, v = oracle.qkv(1, 2, 128, 64, dtype=F16)
    with running(LATE):
        lab.attention_producer_consumer(q, k, v)
        check_attention_rejects(lab, lab.attention_producer_consumer, q, k, v)
        with pytest.raises(ValueError, match="multiple of 128"):
            lab.attention_producer_consumer(*(x[:, :, :127] for x in (q, k, v)))


# ---------------------------------------------------------------- step 4

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 200, 300]


@step4
@causal_or_full
@half_dtypes
@pytest.mark.parametrize("T", [37, 128, 300])
def test_overlap(lab, T, dtype, causal):
    check_attention(lab, OVERLAP, EVERYWHERE, *fenced_qkv(1, 2, T, 64, dtype=dtype), causal)


@step4
@causal_or_full
def test_overlap_ragged_lengths(lab, causal):
    for T in LENGTHS:
        check_attention(lab, OVERLAP, ONCE, *fenced_qkv(2, 2, T, 64, dtype=F16), causal)


@step4
@causal_or_full
@pytest.mark.parametrize(("block_n", "stages"), [(64, 2), (64, 4), (128, 3)])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_overlap_tiles(lab, block_n, stages, ping_pong, causal):
    options = dict(block_n=block_n, stages=stages, ping_pong=ping_pong)
    check_attention(
        lab, OVERLAP, EVERYWHERE, *fenced_qkv(1, 1, 330, 64, dtype=F16), causal, **options
    )


@step4
@causal_or_full
def test_overlap_head_dim_128(lab, causal):
    check_attention(lab, OVERLAP, EVERYWHERE, *fenced_qkv(1, 1, 300, 128, dtype=BF16), causal)


@step4
@causal_or_full
@pytest.mark.parametrize("kind", ["large", "growing", "shrinking", "equal", "low"])
def test_overlap_score_ranges(lab, kind, causal):
    check_attention(lab, OVERLAP, ONCE, *fenced_qkv(1, 1, 300, 64, dtype=F16, kind=kind), causal)


@step4
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("T", [20, 300])
def test_overlap_huge_equal_scores(lab, T, sign):
    check_huge_equal_scores(lab, OVERLAP, T, sign)


@step4
@half_dtypes
@pytest.mark.parametrize(("D", "block_n"), [(64, 128), (64, 64), (128, 128)])
def test_overlap_maximum_falls_behind(lab, D, block_n, dtype):
    q, k, v, scale, moves = lagging_qkv(dtype, D)
    options = {"scale": scale, "block_n": block_n}
    check_moves(check_attention(lab, OVERLAP, ONCE, q, k, v, **options), moves)


@step4
@causal_or_full
def test_overlap_rescales_seldom(lab, causal):
    work = check_attention(lab, OVERLAP, (LATE,), *oracle.qkv(1, 1, 512, 64, dtype=F16), causal)
    later = 2 * (blocks_seen(512, 128, 128, causal)[0] - 4)
    calls, multiplied = len(work.of("times")), work.amount("times")
    assert calls == later, (
        "acc is multiplied by _rescale, which costs no power where alpha is 1, once a consumer for "
        f"each block but a tile's first: want {later} calls, got {calls}"
    )
    assert multiplied == 0, (
        "with normal inputs no block's largest score exceeds block 0's by 8 powers of two, so the "
        f"older maximum stays and alpha is exactly 1: got {multiplied:,} elements of acc multiplied"
    )


@step4
@pytest.mark.parametrize("sign", [1, -1])
def test_overlap_scores_beyond_any_mask(lab, sign):
    for T in (20, 300):
        check_huge_equal_scores(lab, OVERLAP, T, sign, 2.0**60)  # scores of 2**123 and more


@step4
def test_overlap_half_scores_do_not_overflow(lab):
    q, k, v = oracle.qkv(1, 1, 130, 64, dtype=F16)
    check_attention(lab, OVERLAP, ONCE, q * 60, k * 60, v)  # q.k before scaling passes 65,504


@step4
def test_overlap_layouts(lab):
    check_layouts(lab, OVERLAP, 70, causal=True)


def blocks_seen(T, block_m, block_n, causal):
    """(key blocks of all query tiles, those of them that need a mask)."""
    total = masked = 0
    for start in range(0, T, block_m):
        end = min(T, start + block_m) if causal else T
        n = math.ceil(end / block_n)
        total += n
        masked += n - (min(start, T) // block_n if causal else T // block_n)
    return total, masked


@step4
@causal_or_full
@pytest.mark.parametrize(("T", "block_n"), [(512, 128), (600, 128), (300, 64)])
def test_overlap_work(lab, T, block_n, causal):
    q, k, v = oracle.qkv(1, 1, T, 64, dtype=F16)
    work = check_attention(lab, OVERLAP, (LATE,), q, k, v, causal, block_n=block_n)
    total, masked = blocks_seen(T, 128, block_n, causal)
    flops = total * 4 * 128 * block_n * 64
    assert work.flops == flops, (
        f"{total} visited blocks of 128 x {block_n}, {flops:,} FLOPs: got {work.flops:,}"
    )
    assert work.masked <= 2 * masked, (
        f"only blocks that the diagonal or the end crosses need a mask, {2 * masked} for both "
        f"consumers: got {work.masked}"
    )
    tiles = math.ceil(T / 128)
    loaded = (tiles * 128 + 2 * total * block_n) * 64 * 2
    assert work.bytes_loaded == loaded, f"want {loaded:,} bytes loaded: got {work.bytes_loaded:,}"


def check_stages(work_of):
    """A stage more is a tile of K and one of V more in shared memory, 128 x 64 halves each."""
    two, four = work_of(2).shared, work_of(4).shared
    want = 2 * 2 * 128 * 64 * 2
    assert want <= four - two < want + 256, (
        f"two stages more are {want:,} bytes of K and V and a few barriers: got {four - two:,}"
    )


@step4
def test_overlap_stages_are_used(lab):
    q, k, v = oracle.qkv(1, 1, 300, 64, dtype=F16)
    check_stages(lambda n: check_attention(lab, OVERLAP, (LATE,), q, k, v, stages=n))


@step4
@causal_or_full
def test_overlap_keeps_a_product_in_flight(lab, causal):
    work = check_attention(lab, OVERLAP, (LATE,), *oracle.qkv(1, 1, 512, 64, dtype=F16), causal)
    alone = work.softmaxes - work.overlapped
    blocks = blocks_seen(512, 128, 128, causal)[0]
    assert work.softmaxes == 2 * blocks, (
        f"one a block and consumer, {2 * blocks}: got {work.softmaxes}"
    )
    assert alone <= 2 * 4, (
        "but for the first block of a tile, P @ V of the block before is in flight while the "
        f"softmax is computed: got {alone} of {work.softmaxes} without a product in flight"
    )


@step4
@causal_or_full
def test_overlap_softmax_stays_in_front(lab, causal):
    q, k, v = oracle.qkv(1, 1, 300, 64, dtype=F16)
    check_softmax_stays_in_front(check_attention(lab, OVERLAP, (LATE,), q, k, v, causal))


@step4
def test_overlap_copies_ahead(lab):
    q, k, v = oracle.qkv(1, 1, 600, 64, dtype=F16)
    work = check_attention(lab, OVERLAP, (LATE,), q, k, v, stages=4)
    check_loads_ahead(work, 8)
    check_order_of_loads(work, k, v)
    work = check_attention(lab, OVERLAP, (LATE,), q, k, v, ping_pong=False)
    check_k_goes_back(work)
    check_first_waits(work)


@step4
def test_overlap_ping_pong(lab):
    q, k, v = oracle.qkv(1, 1, 640, 64, dtype=F16)

    def work_of(where, ping_pong):
        return check_attention(lab, OVERLAP, (where,), q, k, v, ping_pong=ping_pong)

    check_ping_pong(work_of)


@step4
def test_overlap_longest_first(lab):
    q, k, v = oracle.qkv(1, 2, 600, 64, dtype=F16)
    work = check_attention(lab, OVERLAP, (LATE,), q, k, v, True)
    want = [(0, h, m) for h in range(2) for m in reversed(range(5))]
    check_order_of_programs(work, q, want, "the longest tiles of a head first")
    want = [(0, h, m) for h in range(2) for m in range(5)]
    check_order_of_programs(check_attention(lab, OVERLAP, (LATE,), q, k, v), q, want, TOGETHER)


@step4
def test_overlap_arithmetic(lab):
    work = check_attention(lab, OVERLAP, (LATE,), *oracle.qkv(1, 1, 512, 64, dtype=F16))
    scores, got = work.amount("exp2"), work.amount("arithmetic")
    want = 2 * scores + 8 * 64 * 64 + 256 * work.softmaxes  # acc / l for 8 tiles; l_i, each softmax
    assert got <= 1.1 * want, (
        f"a subtraction and a multiplication for each of {scores:,} scores, and little else: want "
        f"{want:,} operations on matrices, a tenth more at most, got {got:,}"
    )


@step4
@needs_compiler
@pytest.mark.timeout(240)
@head_dims
@causal_or_full
def test_overlap_compiles(lab, request, D, causal):
    check_compiles(lab, request, OVERLAP, "wgmma", "bulk", head_dim=D, causal=causal)


@step4
def test_overlap_rejects(lab):
    q, k, v = oracle.qkv(1, 2, 100, 64, dtype=F16)
    with running(LATE):
        lab.attention_overlap(q, k, v)
        check_attention_rejects(lab, lab.attention_overlap, q, k, v)
        for options in ({"block_n": 32}, {"block_n": 96}, {"stages": 1}, {"stages": 0}):
            with pytest.raises(ValueError, match="got"):
                lab.attention_overlap(q, k, v, **options)


# ---------------------------------------------------------------- step 5


@step5
@pytest.mark.timeout(60)
@causal_or_full
@half_dtypes
@pytest.mark.parametrize("T", [37, 300])
def test_hopper_attention(lab, T, dtype, causal):
    check_attention(lab, BEST, EVERYWHERE, *fenced_qkv(2, 3, T, 64, dtype=dtype), causal)


@step5
@causal_or_full
def test_hopper_attention_ragged_lengths(lab, causal):
    for T in LENGTHS:
        check_attention(lab, BEST, ONCE, *fenced_qkv(2, 2, T, 64, dtype=F16), causal)


@step5
@pytest.mark.timeout(60)
@causal_or_full
@pytest.mark.parametrize("multiprocessors", [1, 2, 7])
def test_hopper_attention_many_tiles_a_program(lab, multiprocessors, causal):
    q, k, v = fenced_qkv(1, 2, 600, 64, dtype=F16)
    check_attention(lab, BEST, EVERYWHERE, q, k, v, causal, mps=multiprocessors)


@step5
@causal_or_full
def test_hopper_attention_head_dim_128(lab, causal):
    check_attention(lab, BEST, EVERYWHERE, *fenced_qkv(1, 3, 270, 128, dtype=BF16), causal, mps=2)


def with_changes(*changes):
    """Configurations by what they change of the default one."""
    return pytest.mark.parametrize(
        "changes", changes, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items())
    )


@step5
@causal_or_full
@with_changes(
    {"stages": 4},
    {"block_n": 64, "stages": 4},
    {"block_n": 64, "ping_pong": False},
    {"stages": 3, "persistent": False},
    {"fused": True},
    {"stages": 3, "fused": True, "ping_pong": False},
    {"stages": 3, "fused": True, "ping_pong": False, "consumers": 3},
    {"block_n": 64, "consumers": 3},
)
def test_hopper_attention_configurations(lab, changes, causal):
    config = lab.Config(**changes)
    q, k, v = fenced_qkv(1, 2, 330, 64, dtype=F16)
    check_attention(lab, CONFIGURED, EVERYWHERE, q, k, v, causal, mps=2, config=config)


@step5
@causal_or_full
def test_hopper_attention_three_consumers(lab, causal):
    config = lab.Config(stages=3, ping_pong=False, fused=True, consumers=3)
    for T in LENGTHS:
        q, k, v = fenced_qkv(1, 2, T, 64, dtype=F16)
        check_attention(lab, CONFIGURED, ONCE, q, k, v, causal, config=config)
    q, k, v = oracle.qkv(1, 2, 600, 64, dtype=F16)
    work = check_attention(lab, CONFIGURED, (LATE,), q, k, v, causal, config=config)
    flops = 2 * blocks_seen(600, 192, 128, causal)[0] * 4 * 192 * 128 * 64
    assert (work.programs, work.flops) == (3, flops), (
        f"3 programs, tiles of 192 rows: want {flops:,} FLOPs, got {work.programs} programs and "
        f"{work.flops:,}"
    )
    masked = 2 * 3 * blocks_seen(600, 192, 128, causal)[1]
    assert work.masked <= masked, f"tiles of 192 rows: {masked} masks, got {work.masked}"
    for events in consumers(work):
        steps = sum(e.what == "product" and e.registers and e.products > 0 for e in events)
        beside = sum(e.what == "wait" and e.products == 1 for e in events)
        assert beside >= steps, (
            f"three consumers: P @ V runs while the mask and the maximum are computed, and is "
            f"waited for behind V of this block, in each of {steps} steps: got {beside}"
        )


lagging = with_changes(
    {"fused": True},
    {"stages": 3, "ping_pong": False, "fused": True, "consumers": 3},
    {"block_n": 64, "consumers": 3},
)


@step5
@half_dtypes
@lagging
def test_hopper_attention_maximum_falls_behind(lab, changes, dtype):
    q, k, v, scale, moves = lagging_qkv(dtype)
    options = {"scale": scale, "config": lab.Config(**changes)}
    check_moves(check_attention(lab, CONFIGURED, ONCE, q, k, v, **options), moves)


@step5
def test_hopper_attention_begins_each_tile_anew(lab):
    """Scores of one head are near 500, those of the other near -500: no state is carried over."""
    q, k, v = (x.clone() for x in oracle.qkv(1, 2, 300, 64, dtype=F16))
    q[..., 0] = k[:, 0, :, 0] = 64.0
    k[:, 1, :, 0] = -64.0
    for causal in (False, True):
        check_attention(lab, CONFIGURED, ONCE, q, k, v, causal, mps=1, config=lab.Config())


@step5
@causal_or_full
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["large", "growing", "shrinking", "equal", "low"])
def test_hopper_attention_score_ranges(lab, kind, fused, causal):
    q, k, v = fenced_qkv(1, 1, 300, 64, dtype=F16, kind=kind)
    config = lab.Config(fused=fused)
    check_attention(lab, CONFIGURED, ONCE, q, k, v, causal, config=config)


@step5
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("T", [1, 20, 300])
@pytest.mark.parametrize("fused", [None, False, True])
def test_hopper_attention_huge_equal_scores(lab, fused, T, sign):
    if fused is None:
        check_huge_equal_scores(lab, BEST, T, sign)
    else:
        config = lab.Config(fused=fused)
        check_huge_equal_scores(lab, CONFIGURED, T, sign, config=config)


@step5
@pytest.mark.parametrize("size", [4992.0, 39936.0])  # scores near 2e8 and 1e10
def test_hopper_attention_large_equal_scores(lab, size):
    check_huge_equal_scores(lab, BEST, 150, 1, size)


@step5
@pytest.mark.parametrize("fused", [False, True])
def test_hopper_attention_differences_of_large_scores(lab, fused):
    """Scores far from 0 that float32 holds exactly: only their differences count."""
    config, T = lab.Config(fused=fused), 128
    v = oracle.inputs(1, 1, T, 64, dtype=F16)
    below = -4.0 * (torch.arange(T) % 5)  # 3 powers of two, and 6, 9, 12
    weights = torch.exp2(0.75 * below.double())
    want = weights @ v[0, 0].double() / weights.sum()
    for power in (19, 21, 23):
        q, k = torch.zeros(1, 1, T, 64), torch.zeros(1, 1, T, 64)
        q[..., 0], k[..., 0] = 2.0 ** (power // 2), 2.0 ** (power - power // 2)
        q[..., 1], k[..., 1] = 1.0, below
        with running(LATE):
            out = lab.attention_persistent(q.half(), k.half(), v, False, 0.75 * math.log(2), config)
        error = float((out[0].double() - want).abs().max())
        assert error < 0.02, f"scores near 2**{power}: want an error below 0.02, got {error:.3g}"
    q[..., 0] = k[..., 0] = 2.0**12
    k[..., 1] = 0.0
    k[..., 5, 1] = 2.0  # the next number above 2**24, and 32 powers of two more
    with running(LATE):
        out = lab.attention_persistent(q.half(), k.half(), v, False, 16 * math.log(2), config)[0]
    assert torch.equal(out, v[..., 5:6, :].expand_as(out)), "one key outweighs all others"


@step5
def test_hopper_attention_layouts(lab):
    check_layouts(lab, BEST, 70, causal=True)


@step5
@pytest.mark.parametrize("scale", [1e-3, 0.3, 2.0])
def test_hopper_attention_scale(lab, scale):
    check_attention(lab, BEST, ONCE, *fenced_qkv(1, 2, 150, 64, dtype=F16), True, scale)


@step5
def test_hopper_attention_many_short_heads(lab):
    check_attention(lab, BEST, ONCE, *fenced_qkv(9, 5, 3, 64, dtype=F16), True)
    check_attention(lab, BEST, ONCE, *fenced_qkv(40, 1, 1, 128, dtype=BF16), False)


@step5
@causal_or_full
def test_hopper_attention_work(lab, causal):
    B, H, T = 1, 2, 600
    q, k, v = oracle.qkv(B, H, T, 64, dtype=F16)
    config = lab.Config()
    work = check_attention(lab, CONFIGURED, (LATE,), q, k, v, causal, config=config)
    total, masked = blocks_seen(T, 128, 128, causal)
    flops = B * H * total * 4 * 128 * 128 * 64
    assert work.programs == 3, f"a program for each of 3 multiprocessors: got {work.programs}"
    assert work.flops == flops, f"want {flops:,} FLOPs of products: got {work.flops:,}"
    best = check_attention(lab, BEST, (LATE,), q, k, v, causal)
    assert (best.programs, best.flops) == (3, flops), (
        f"hopper_attention is attention_persistent in its best configuration, 3 programs and "
        f"{flops:,} FLOPs: got {best.programs} and {best.flops:,}"
    )
    assert work.masked <= B * H * 2 * masked, (
        f"{B * H * 2 * masked} masks at the diagonal or the end: got {work.masked}"
    )
    alone = work.softmaxes - work.overlapped
    assert alone <= B * H * 2 * 5, f"{alone} softmaxes without a product in flight, at most 20"


@step5
@causal_or_full
def test_hopper_attention_fills_its_last_round(lab, causal):
    q, k, v = oracle.qkv(1, 5, 600, 64, dtype=F16)  # 25 tiles: 4 rounds of 8 programs, or of 7
    work = check_attention(lab, CONFIGURED, (LATE,), q, k, v, causal, mps=8, config=lab.Config())
    want = 8 if causal else 7
    assert work.programs == want, (
        f"25 tiles, 8 multiprocessors, {'causal' if causal else 'full'}: want {want} programs, got "
        f"{work.programs}. Where tiles are alike, no more than 4 rounds need"
    )


@step5
def test_hopper_attention_configuration_is_used(lab):
    q, k, v = oracle.qkv(1, 1, 300, 64, dtype=F16)

    def work_of(stages=2, **changes):
        config = lab.Config(stages=stages, **changes)
        return check_attention(lab, CONFIGURED, (LATE,), q, k, v, True, mps=2, config=config)

    check_stages(work_of)
    tiles = work_of(persistent=False).programs
    assert tiles == 3, f"not persistent: a program for each of 3 tiles, got {tiles}"
    total, _ = blocks_seen(300, 128, 64, True)
    flops, got = total * 4 * 128 * 64 * 64, work_of(block_n=64).flops
    assert got == flops, f"block_n=64: {total} blocks of 128 x 64, {flops:,} FLOPs, got {got:,}"


@step5
@causal_or_full
def test_hopper_attention_walks_its_list(lab, causal):
    B, H, T = 2, 2, 600
    q, k, v = oracle.qkv(B, H, T, 64, dtype=F16)
    config = lab.Config()
    work = check_attention(lab, CONFIGURED, (LATE,), q, k, v, causal, config=config)
    table = lab._schedule_table(T, B * H, 3, B * H, 128, 128, causal, q.device).tolist()
    got = tiles_of(work, q)
    for program in range(3):
        mine = table[table[program] : table[program + 1]]
        want = [(tile // 5 // H, tile // 5 % H, tile % 5) for tile in mine]
        assert got[program] == want, (
            f"program {program} computes the tiles that schedule_ptr lists for it, in that order: "
            f"want (b, h, m) {want}, got {got[program]}"
        )


@step5
def test_hopper_attention_copies_ahead(lab):
    q, k, v = oracle.qkv(1, 6, 100, 64, dtype=F16)  # one block a tile, six tiles
    work = check_attention(lab, CONFIGURED, (LATE,), q, k, v, mps=1, config=lab.Config())
    check_loads_ahead(work, 8)  # Q, K and V of this tile and of the next


@step5
def test_hopper_attention_computes_while_it_stores(lab):
    q, k, v = oracle.qkv(1, 3, 300, 64, dtype=F16)
    work = check_attention(lab, CONFIGURED, (LATE,), q, k, v, mps=2, config=lab.Config())
    for events in consumers(work):
        products = [event.stores for event in events if event.what == "product"]
        assert max(products) == 1, (
            "a tile's store is on its way while the next tile is computed: wait for it before the "
            "next one is written to shared memory, not at once"
        )


@step5
@causal_or_full
def test_hopper_attention_softmax_stays_in_front(lab, causal):
    q, k, v = oracle.qkv(1, 1, 300, 64, dtype=F16)
    check_softmax_stays_in_front(check_attention(lab, BEST, (LATE,), q, k, v, causal))


@step5
def test_hopper_attention_ping_pong(lab):
    q, k, v = oracle.qkv(1, 3, 330, 64, dtype=F16)

    def work_of(where, ping_pong):
        config = lab.Config(ping_pong=ping_pong)
        return check_attention(lab, CONFIGURED, (where,), q, k, v, mps=2, config=config)

    check_ping_pong(work_of)


@step5
@lagging
def test_hopper_attention_rescales_seldom(lab, changes):
    q, k, v = oracle.qkv(1, 1, 512, 64, dtype=F16)
    config = lab.Config(**changes)
    check_moves(check_attention(lab, CONFIGURED, (LATE,), q, k, v, True, config=config), 0)


@step5
def test_hopper_attention_fused_is_one_operation_a_score(lab):
    q, k, v = oracle.qkv(1, 1, 300, 64, dtype=F16)

    def work_of(fused):
        config = lab.Config(fused=fused)
        return check_attention(lab, CONFIGURED, (LATE,), q, k, v, True, config=config)

    one, two = work_of(True), work_of(False)
    scores = one.amount("exp2")
    saved = two.amount("arithmetic") - one.amount("arithmetic")
    assert saved == scores, (
        f"fused: one multiply-add for each of {scores:,} scores in place of a subtraction and a "
        f"multiplication, {scores:,} operations less: got {saved:,}"
    )


@step5
def test_hopper_attention_follows_its_input(lab):
    q, k, v = oracle.qkv(1, 2, 150, 64, dtype=F16)
    with running(LATE):
        out, lse = lab.hopper_attention(q, k, v)
    kept = out.clone(), lse.clone()
    for x in (q, k, v):
        x.copy_(oracle.inputs(1, 2, 150, 64, dtype=F16))
    check_attention(lab, BEST, (LATE,), q, k, v)
    check_attention(lab, BEST, (LATE,), q, k, v, mps=5)
    check_kept((out, lse), kept)
    x = oracle.inputs(1, 1, 70, 72, dtype=F16)[..., 1:65]  # TMA needs a copy of it
    check_attention(lab, BEST, (LATE,), x, x, x)
    x.copy_(oracle.inputs(1, 1, 70, 64, dtype=F16))
    check_attention(lab, BEST, (LATE,), x, x, x)


def balance(plan, length) -> float:
    """What programs have to do on average, over what the busiest has: 1 is perfect."""
    loads = [sum(map(length, tiles)) for tiles in plan]
    return sum(loads) / len(loads) / max(loads)


def check_schedule(lab, n_m, n_heads, programs, group, lengths):
    plan = lab.schedule(n_m, n_heads, programs, group, lengths)
    assert len(plan) == programs, f"a list for each of {programs} programs: got {len(plan)}"
    tiles = sorted(itertools.chain(*plan))
    wanted = set(range(n_m * n_heads))
    twice = sorted({a for a, b in itertools.pairwise(tiles) if a == b})
    assert tiles == sorted(wanted), (
        f"{n_m=}, {n_heads=}, {programs=}, {group=}: each tile of each head exactly once, as head "
        f"* n_m + m: missing {sorted(wanted - set(tiles))[:5]}, twice {twice[:5]}, no such tile "
        f"{sorted(set(tiles) - wanted)[:5]}"
    )
    without = [program for program, mine in enumerate(plan) if not mine]
    assert not without, (
        f"each program has a tile: programs {without[:5]} have none. Do the times at which they "
        "are free go on from group to group?"
    )
    return plan


@step5
@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize(("n_m", "n_heads", "group"), [(4, 6, 2), (1, 9, 4), (8, 1, 1), (5, 7, 3)])
def test_schedule_has_each_tile_once(lab, n_m, n_heads, group, programs):
    check_schedule(lab, n_m, n_heads, programs, group, [m + 2.0 for m in range(n_m)])
    check_schedule(lab, n_m, n_heads, programs, group, [3.0] * n_m)


@step5
@pytest.mark.parametrize(
    ("T", "D"), [(512, 128), (1024, 128), (2048, 64), (4096, 128), (16384, 128)]
)
def test_schedule_is_balanced_when_causal(lab, T, D):
    n_m, n_heads = T // 128, 16384 // T * (2048 // D)
    lengths = [m + 2.2 for m in range(n_m)]
    group = max(1, min(n_heads, lab.L2_BYTES // (4 * T * D)))
    plan = check_schedule(lab, n_m, n_heads, 132, group, lengths)
    got = balance(plan, lambda tile: lengths[tile % n_m])
    assert got >= 0.98, (
        "132 programs should end at about the same time: want the mean over the largest load at "
        f"least 0.98, got {got:.3f}. Long tiles first, of each one of every head of the group in "
        "turn, each to the program that is free first; a tile is head * n_m + m"
    )
    heads_in_turn = [tile // n_m // group for mine in plan for tile in mine[:1]]
    assert max(heads_in_turn) <= 132 // (group * n_m) + 1, (
        "the first tiles are of the first groups of heads: their keys share the cache"
    )


@step5
def test_schedule_is_made_of_lengths(lab):
    """What the launcher asks of schedule: causal tiles as long as their blocks are many."""
    cpu = torch.device("cpu")
    table = lab._schedule_table(4096, 16, 132, 4, 128, 128, True, cpu).tolist()
    plan = [table[start:stop] for start, stop in itertools.pairwise(table[:133])]
    got = balance(plan, lambda tile: tile % 32 + 2.0)
    assert got > 0.95, f"causal, T = 4096: want a balance above 0.95, got {got:.3f}"


@step5
def test_schedule_keeps_a_head_together_when_full(lab):
    plan = check_schedule(lab, 8, 4, 8, 2, [8.0] * 8)
    for turn in range(4):
        heads = {mine[turn] // 8 for mine in plan}
        assert len(heads) == 1, (
            "where all lengths are alike, head by head, whatever `group` says: 8 programs, 8 tiles "
            f"a head, want one head in turn {turn}, got {sorted(heads)}"
        )


@step5
@needs_compiler
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("D", "consumers"), [(64, 2), (64, 3), (128, 2)])
@causal_or_full
def test_hopper_attention_compiles(lab, request, D, consumers, causal):
    options = {"head_dim": D, "causal": causal, "consumers": consumers}
    check_compiles(lab, request, BEST, "wgmma", "bulk", **options)


@step5
@needs_hopper
@causal_or_full
@head_dims
@pytest.mark.timeout(300)
def test_no_hang_at_any_length(lab, D, causal):
    for T in [*range(1, 140), *range(140, 1001, 43), 1000]:
        q, k, v = oracle.qkv(1, 3, T, D, dtype=BF16, device="cuda")
        for name in (OVERLAP, BEST):
            got = getattr(lab, name)(q, k, v, causal)
            torch.cuda.synchronize()
            oracle.check_all(oracle.attention(q, k, v, causal, kernel=True), got, f"{name}, T={T}")


@step5
@needs_hopper
@causal_or_full
@pytest.mark.timeout(300)
def test_long_sequences_on_the_card(lab, causal):
    for D in (64, 128):
        q, k, v = oracle.qkv(1, 2, 4099, D, dtype=BF16, device="cuda")
        check_attention(lab, BEST, (CARD,), q, k, v, causal)
        for _ in range(20):  # a race would not show each time
            again = lab.hopper_attention(q, k, v, causal)[0]
            assert torch.equal(again, lab.hopper_attention(q, k, v, causal)[0])


@step5
def test_hopper_attention_rejects(lab):
    q, k, v = oracle.qkv(1, 2, 100, 64, dtype=F16)
    with running(LATE):
        lab.hopper_attention(q, k, v)
        check_attention_rejects(lab, lab.hopper_attention, q, k, v)
        for name, value in (
            *(("block_n", 32), ("block_n", 256), ("stages", 1), ("stages", 7)),
            *(("consumers", 1), ("consumers", 4)),
        ):
            with pytest.raises(ValueError, match="got"):
                lab.attention_persistent(q, k, v, config=lab.Config(**{name: value}))
        q, k, v = oracle.qkv(1, 1, 100, 128, dtype=F16)
        with pytest.raises(ValueError, match="consumers"):
            lab.attention_persistent(q, k, v, config=lab.Config(consumers=3))
    with pytest.raises(RuntimeError, match="Hopper"):
        lab.hopper_attention(q, k, v)
