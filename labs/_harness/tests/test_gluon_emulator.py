"""The emulator of Gluon kernels: barriers, what is asynchronous, deadlocks, refusals."""

import re

import numpy as np
import pytest
import torch

from labs._harness import gluon_emulator as ge
from labs._harness import gluon_memory, triton_private
from labs._harness.gluon_values import Deadlock, GluonError, Int, Unsupported, rounded

if ge.unavailable():
    pytest.skip(str(ge.unavailable()), allow_module_level=True)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

async_load, async_store = triton_private.tma_copies()
LATE, EARLY, MIXED = 0, 1, 2
every_mood = pytest.mark.parametrize("seed", [LATE, EARLY, MIXED], ids=["late", "early", "mixed"])
ACC = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


def described(x, block):
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16)
    return TensorDescriptor.from_tensor(x, block, layout)


def run(kernel, *args, seed=LATE, grid=(1,), **constants):
    with ge.emulate(seed) as work:
        kernel[grid](*args, num_warps=4, **constants)
    return work


# ---------------------------------------------------------------- barriers


def test_a_barrier_counts_arrivals_and_bytes():
    bar = gluon_memory.Barrier(count=2, pending=2)
    bar.arrive(1, "bar")
    assert (bar.phase, bar.pending) == (0, 1)
    bar.bytes += 64
    bar.arrive(1, "bar")
    assert bar.phase == 0, "bytes are still to come"
    bar.bytes -= 64
    bar.settle()
    assert (bar.phase, bar.pending) == (1, 2), "the next phase wants its arrivals anew"
    with pytest.raises(GluonError, match=r"arrives twice.*or a loop came round"):
        bar.arrive(3, "bar")


@gluon.jit
def _parity_kernel(PARITY: gl.constexpr, ARRIVALS: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    for _ in gl.static_range(ARRIVALS):
        mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, PARITY)


@pytest.mark.parametrize(("arrivals", "passes"), [(0, 1), (1, 0), (2, 1), (3, 0)])
def test_a_wait_passes_for_the_phase_that_does_not_run(arrivals, passes):
    run(_parity_kernel, PARITY=passes, ARRIVALS=arrivals)
    with pytest.raises(Deadlock, match=f"parity {1 - passes} of bar"):
        run(_parity_kernel, PARITY=1 - passes, ARRIVALS=arrivals)


def test_a_parity_is_0_or_1():
    with pytest.raises(GluonError, match="phase & 1"):
        run(_parity_kernel, PARITY=2, ARRIVALS=0)


# ---------------------------------------------------------------- TMA


@gluon.jit
def _copy_kernel(
    x_desc,
    y_desc,
    row,
    READY: gl.constexpr,
    EXPECT: gl.constexpr,
    WAIT: gl.constexpr,
    FENCE: gl.constexpr,
    END: gl.constexpr,
    THROUGH_REGISTERS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    tile = gl.allocate_shared_memory(x_desc.dtype, [64, 64], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    if READY:
        fence_async_shared()
    if EXPECT:
        mbarrier.expect(bar, x_desc.block_type.nbytes)
    async_load(x_desc, [row, 0], bar, tile)
    if WAIT:
        mbarrier.wait(bar, 0)
    if THROUGH_REGISTERS:
        values = tile.load(LAYOUT)
        tile.store((values * 2.0).to(gl.float16))
    if FENCE:
        fence_async_shared()
    async_store(y_desc, [row, 0], tile)
    if END:
        tma.store_wait(pendings=0)
    if not WAIT:
        mbarrier.wait(bar, 0)


def copied(seed=LATE, row=0, rows=64, **changes):
    x, y = torch.randn(rows, 64).half(), torch.full((rows, 64), 7.0).half()
    options = dict(READY=True, EXPECT=True, WAIT=True, FENCE=True, END=True)
    options |= dict(THROUGH_REGISTERS=False, LAYOUT=ACC)
    work = run(
        _copy_kernel,
        described(x, [64, 64]),
        described(y, [64, 64]),
        row,
        seed=seed,
        **{**options, **changes},
    )
    return x, y, work


def test_tma_does_not_see_a_barrier_that_was_not_fenced():
    with pytest.raises(GluonError, match="no fence_async_shared since it was initialised"):
        copied(READY=False)


@gluon.jit
def _half_barrier_kernel(INDEX: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    words = gl.allocate_shared_memory(gl.int32, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bars if INDEX else words, count=1)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (False, r"words is no mbarrier but int32: allocate it as gl\.int64"),
        (True, "index it first"),
    ],
)
def test_what_is_no_mbarrier(index, message):
    with pytest.raises(GluonError, match=message):
        run(_half_barrier_kernel, INDEX=index)


@every_mood
def test_a_copy(seed):
    x, y, work = copied(seed)
    assert torch.equal(x, y)
    assert (work.bytes_loaded, work.bytes_stored, work.programs) == (8192, 8192, 1)
    assert work.shared == 8192 + 8


def test_bytes_that_nobody_expected():
    with pytest.raises(Deadlock, match="8,192 bytes more have landed than were expected"):
        copied(EXPECT=False)


def test_rows_outside_are_zeros_and_dropped():
    x, y, _ = copied(rows=40)
    assert torch.equal(x, y)
    x, y, _ = copied(row=30, rows=64)
    assert torch.equal(y[30:], x[30:])
    assert bool((y[:30] == 7).all())


def test_a_load_has_not_arrived_before_its_barrier_says_so():
    assert bool(copied(WAIT=False)[1].isnan().all())


@every_mood
def test_tma_sees_what_was_written_before_a_fence(seed):
    x, y, _ = copied(seed, THROUGH_REGISTERS=True)
    assert torch.equal(y, x * 2)
    x, y, _ = copied(seed, THROUGH_REGISTERS=True, FENCE=False)
    assert torch.equal(y, x), "the store reads what TMA wrote"


def test_a_program_may_not_end_while_a_store_reads():
    with pytest.raises(GluonError, match="store_wait"):
        copied(END=False)


# ---------------------------------------------------------------- products


@gluon.jit
def _product_kernel(
    x_desc,
    y_desc,
    WAIT: gl.constexpr,
    SPOIL: gl.constexpr,
    STORE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    a = gl.allocate_shared_memory(x_desc.dtype, [64, 64], x_desc.layout)
    out = gl.allocate_shared_memory(x_desc.dtype, [64, 64], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    async_load(x_desc, [0, 0], bar, a)
    mbarrier.wait(bar, 0)
    zero = gl.zeros([64, 64], gl.float32, LAYOUT)
    c = warpgroup_mma(a, a, zero, use_acc=False, is_async=True)
    if SPOIL:  # somebody overwrites the operand while it is read
        mbarrier.expect(bar, x_desc.block_type.nbytes)
        async_load(x_desc, [64, 0], bar, a)
        mbarrier.wait(bar, 1)
    if STORE:
        a.store(zero.to(gl.float16))
    if WAIT:
        c = warpgroup_mma_wait(0, [c])
    out.store(c.to(gl.float16))
    fence_async_shared()
    async_store(y_desc, [0, 0], out)
    tma.store_wait(pendings=0)


def product(seed, WAIT=True, SPOIL=False, STORE=False):
    x, y = torch.randn(128, 64).half(), torch.empty(64, 64).half()
    descs = described(x, [64, 64]), described(y, [64, 64])
    options = dict(WAIT=WAIT, SPOIL=SPOIL, STORE=STORE, LAYOUT=ACC)
    work = run(_product_kernel, *descs, seed=seed, **options)
    return (x[:64].float() @ x[:64].float()).half(), y, work


@every_mood
def test_a_product(seed):
    want, got, work = product(seed)
    assert torch.allclose(want, got, atol=0.05)
    assert work.flops == 2 * 64**3
    assert [(e.what, e.loads, e.products, e.stores) for e in work.events if e.what != "wait"] == [
        ("load", 0, 0, 0),
        ("product", 0, 0, 0),
        ("product wait", 0, 1, 0),
        ("store", 0, 0, 0),
        ("store wait", 0, 0, 1),
    ]
    assert work.is_as_written(got)
    got[0, 0] += 1
    assert not work.is_as_written(got)
    assert not work.is_as_written(got.clone())


def test_nobody_stores_into_what_a_product_reads():
    with pytest.raises(GluonError, match=r"a.store: the product of line \d+ is in flight"):
        product(LATE, STORE=True)


def test_a_product_reads_its_operands_until_it_is_waited_for():
    want, got, _ = product(LATE, SPOIL=True)
    assert not torch.allclose(want, got, atol=0.05)
    want, got, _ = product(EARLY, SPOIL=True)
    assert torch.allclose(want, got, atol=0.05), "as early as can be it has read them already"


@every_mood
def test_a_product_in_flight_has_no_numbers(seed):
    with pytest.raises(GluonError, match=r"product of line \d+ is in flight"):
        product(seed, WAIT=False)


# ---------------------------------------------------------------- partitions


@gluon.jit
def _multiply(x, LAYOUT: gl.constexpr):
    zero = gl.zeros([64, 64], gl.float32, LAYOUT)
    warpgroup_mma(x, x, zero, use_acc=False)


@gluon.jit
def _nothing():
    pass


@gluon.jit
def _registers_kernel(LAYOUT: gl.constexpr, SHARED: gl.constexpr, REGISTERS: gl.constexpr):
    x = gl.allocate_shared_memory(gl.float16, [64, 64], SHARED)
    gl.warp_specialize([(_nothing, ()), (_multiply, (x, LAYOUT))], [4], [REGISTERS])


def test_products_need_registers():
    shared = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    run(_registers_kernel, LAYOUT=ACC, SHARED=shared, REGISTERS=40)
    with pytest.raises(GluonError, match="_multiply has 24 registers .* in flight hold 32"):
        run(_registers_kernel, LAYOUT=ACC, SHARED=shared, REGISTERS=24)


@gluon.jit
def _twice_kernel(INVALIDATE: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    if INVALIDATE:
        mbarrier.invalidate(bar)
    mbarrier.init(bar, count=2)
    mbarrier.arrive(bar, count=2)


def test_a_barrier_is_initialised_once():
    run(_twice_kernel, INVALIDATE=True)
    with pytest.raises(GluonError, match="bar: initialised a second time"):
        run(_twice_kernel, INVALIDATE=False)


@gluon.jit
def _ping(order, log_ptr, ROUNDS: gl.constexpr, MINE: gl.constexpr, FORGETS: gl.constexpr):
    lane = gl.arange(0, 2, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(ROUNDS):
        mbarrier.wait(order.index(MINE), (i & 1) ^ (MINE == 0))
        gl.store(log_ptr + 2 * i + lane, MINE, mask=lane == MINE)
        if not FORGETS:
            mbarrier.arrive(order.index(1 - MINE), count=1)


@gluon.jit
def _turns_kernel(log_ptr, ROUNDS: gl.constexpr, FORGETS: gl.constexpr):
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    gl.warp_specialize(
        [
            (_ping, (order, log_ptr, ROUNDS, 0, False)),
            (_ping, (order, log_ptr, ROUNDS, 1, FORGETS)),
        ],
        [4],
        [96],
    )


@every_mood
def test_partitions_take_turns(seed):
    log = torch.full((20,), -1, dtype=torch.int32)
    run(_turns_kernel, log, seed=seed, ROUNDS=10, FORGETS=False)
    assert log.tolist() == [0, 1] * 10


@every_mood
def test_a_deadlock_says_who_waits_for_what(seed):
    log = torch.full((20,), -1, dtype=torch.int32)
    with pytest.raises(Deadlock) as caught:
        run(_turns_kernel, log, seed=seed, ROUNDS=10, FORGETS=True)
    text = str(caught.value)
    assert re.search(r"_ping 0, line \d+: waits for parity 0 of order\[0\]", text), text
    assert "lacks 1 of 1 arrivals" in text


@gluon.jit
def _pair(x):
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    return x, full


@gluon.jit
def _take(ring):
    mbarrier.wait(ring[1].index(0), 0)


@gluon.jit
def _taker(rings, PLACE: gl.constexpr):
    _take(rings[PLACE])


@gluon.jit
def _rings_kernel(k_ptr, v_ptr, PLACE: gl.constexpr):
    rings = (
        _pair(k_ptr),
        _pair(v_ptr),
    )
    gl.warp_specialize([(_taker, (rings, PLACE)), (_taker, (rings, 0))], [4], [96])


@pytest.mark.parametrize(("place", "name"), [(0, "k_ptr"), (1, "v_ptr")])
def test_a_deadlock_says_from_where_and_which_ring(place, name):
    x = torch.zeros(8)
    with pytest.raises(Deadlock) as caught:
        run(_rings_kernel, x, x.clone(), PLACE=place)
    text = str(caught.value)
    want = rf"_taker 0, line \d+ in _take, from line \d+: .* of _pair\({name}\)\.full\[0\]"
    assert re.search(want, text), text


def test_an_error_in_a_partition_ends_the_others():
    log = torch.full((1,), -1, dtype=torch.int32)
    with pytest.raises(GluonError, match="element 1 of log_ptr, which has 1"):
        run(_turns_kernel, log, ROUNDS=10, FORGETS=False)


# ---------------------------------------------------------------- values


@gluon.jit
def _residual_kernel(x_ptr, y_ptr, c, FMA: gl.constexpr, LAYOUT: gl.constexpr):
    lane = gl.arange(0, 64, layout=LAYOUT)
    x = gl.load(x_ptr + lane)
    m = gl.maximum(x * c, x * c)  # rounded
    gl.store(y_ptr + lane, gl.fma(x, c, -m) if FMA else x * c - m)


BLOCKED = gl.BlockedLayout([1], [32], [4], [0])


@pytest.mark.parametrize("fma", [False, True], ids=["two operators", "gl.fma"])
def test_a_product_and_a_sum_are_fused(fma):
    x, y = torch.full((64,), 1.1327e12), torch.empty(64)
    run(_residual_kernel, x, y, 0.1803368, FMA=fma, LAYOUT=BLOCKED)
    assert bool((y != 0).all()), "x * c - round(x * c) is what rounding took away"
    assert float(y.abs().max()) < 2**15


@gluon.jit
def _matrix_kernel(y_ptr, FUSED: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    x = gl.full([16, 32], 2.0, gl.float32, LAYOUT)
    y = gl.zeros_like(x) + gl.full_like(x, 3.0)
    m = gl.expand_dims(gl.sum(x, 1), 1)
    x = x * y - m if FUSED else (x - m) * y
    gl.store(y_ptr + rows, gl.max(x, 1))


@pytest.mark.parametrize(("fused", "want", "operations"), [(True, -58, 2), (False, -186, 3)])
def test_arithmetic_on_matrices_is_counted(fused, want, operations):
    y = torch.empty(16)
    layout = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    work = run(_matrix_kernel, y, FUSED=fused, LAYOUT=layout)
    assert y.tolist() == [want] * 16
    assert work.amount("arithmetic") == operations * 16 * 32


@gluon.jit
def _layouts_kernel(y_ptr, A: gl.constexpr, B: gl.constexpr, CONVERT: gl.constexpr):
    x = gl.arange(0, 64, layout=A)
    y = gl.arange(0, 64, layout=B)
    if CONVERT:
        y = gl.convert_layout(y, A)
    gl.store(y_ptr + x, x + y)


def test_two_layouts_do_not_meet():
    other = gl.BlockedLayout([2], [32], [4], [0])
    y = torch.empty(64, dtype=torch.int32)
    run(_layouts_kernel, y, A=BLOCKED, B=other, CONVERT=True)
    assert y.tolist() == [2 * i for i in range(64)]
    with pytest.raises(GluonError, match="different layouts"):
        run(_layouts_kernel, y, A=BLOCKED, B=other, CONVERT=False)


@gluon.jit
def _words_kernel(x_ptr, y_ptr, ROWS: gl.constexpr, ASM: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    places = rows[:, None] * 4 + cols[None, :]
    x = gl.load(x_ptr + places)
    first, second = gl.split(x.reshape([ROWS, 2, 2]))
    words = gl.inline_asm_elementwise(ASM, "=r,r,r", [first, second], gl.int32, True, 1)
    TAKE: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    KINDS: gl.constexpr = (gl.int16, gl.int16)
    low, high = gl.inline_asm_elementwise(TAKE, "=h,=h,r", [words], KINDS, True, 1)
    bits = gl.join(low, high).reshape([ROWS, 4])
    halves = bits.to(gl.float16, bitcast=True)
    gl.store(y_ptr + places, gl.convert_layout(halves, LAYOUT))


MATRIX = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])


@pytest.mark.parametrize(("order", "columns"), [("$2, $1", [0, 1, 2, 3]), ("$1, $2", [1, 0, 3, 2])])
def test_pairs_of_halves_in_words(order, columns):
    """The first operand of the conversion goes to the upper half."""
    x = torch.randn(128, 4)
    y = torch.zeros(128, 4, dtype=torch.float16)
    run(_words_kernel, x, y, ROWS=128, ASM=f"cvt.rn.f16x2.f32 $0, {order};", LAYOUT=MATRIX)
    assert torch.equal(y, x.half()[:, columns])


@gluon.jit
def _times_kernel(x_ptr, factors_ptr, y_ptr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    places = rows[:, None] * 4 + cols[None, :]
    x = gl.load(x_ptr + places)
    factors = gl.load(factors_ptr + rows)[:, None]
    TIMES: gl.constexpr = (
        "{ .reg .pred p; setp.neu.f32 p, $2, 0f3F800000; mov.f32 $0, $1; @p mul.f32 $0, $1, $2; }"
    )
    y = gl.inline_asm_elementwise(TIMES, "=f,f,f", [x, factors], gl.float32, True, 1)
    gl.store(y_ptr + places, y)


def test_a_multiplication_that_is_off_where_the_factor_is_1():
    """The event counts the elements that are multiplied; there is one where none is, too."""
    x, y = torch.randn(128, 4), torch.zeros(128, 4)
    for changed, value in ((0, 1.0), (3, 0.5), (128, 0.0), (1, float("nan"))):
        factors = torch.ones(128)
        factors[:changed] = value
        work = run(_times_kernel, x, factors, y, LAYOUT=MATRIX)
        assert torch.equal(y.nan_to_num(7), (x * factors[:, None]).nan_to_num(7))
        assert [event.amount for event in work.of("times")] == [4 * changed]


def test_other_assembler_is_refused():
    x, y = torch.randn(128, 4), torch.zeros(128, 4, dtype=torch.float16)
    with pytest.raises(Unsupported, match=r"does not know this assembler: add\.f32"):
        run(_words_kernel, x, y, ROWS=128, ASM="add.f32 $0, $1, $2;", LAYOUT=MATRIX)


@gluon.jit
def _parts_kernel(x_ptr, y_ptr, LAYOUT: gl.constexpr, SIDES: gl.constexpr):
    rows = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.load(x_ptr + rows[:, None] * 16 + cols[None, :])
    parts = gl.sum(gl.sum(x.reshape(SIDES), 3), 1)
    gl.store(y_ptr + rows, gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, LAYOUT)))


def test_sums_in_parts():
    x, y = torch.randn(128, 16), torch.zeros(128)
    run(_parts_kernel, x, y, LAYOUT=MATRIX, SIDES=[128, 2, 4, 2])
    torch.testing.assert_close(y, x.sum(1))
    with pytest.raises(GluonError, match="has other elements than"):
        run(_parts_kernel, x, y, LAYOUT=MATRIX, SIDES=[128, 2, 4, 4])


def test_integers_are_those_of_a_card():
    assert Int(-7) // 2 == -3
    assert Int(-7) % 2 == -1
    assert (Int(1 << 20).to(gl.int64) * (1 << 20)).bits == 64
    with pytest.raises(GluonError, match="does not fit an int32"):
        Int(1 << 20) * (1 << 20)
    assert 5 - Int(2) == 3
    assert isinstance(2 * Int(2), Int)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_numbers_are_rounded_to_nearest_even(dtype):
    x = torch.randn(10_000) * 100
    want = x.to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(rounded(x.numpy(), getattr(gl, dtype)), want)


# ---------------------------------------------------------------- refusals


@gluon.jit
def _large_kernel(N: gl.constexpr, LAYOUT: gl.constexpr):
    gl.allocate_shared_memory(gl.float16, [N, 64], LAYOUT)


def test_shared_memory_is_limited():
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    run(_large_kernel, N=1024, LAYOUT=layout)
    with pytest.raises(GluonError, match="262,144 bytes"):
        run(_large_kernel, N=2048, LAYOUT=layout)


@gluon.jit
def _unknown_kernel(y_ptr, LAYOUT: gl.constexpr):
    gl.store(y_ptr + gl.arange(0, 64, layout=LAYOUT), gl.histogram(0, 0))


def test_what_is_not_emulated_says_so():
    with pytest.raises(Unsupported, match="no language.histogram"):
        run(_unknown_kernel, torch.empty(64), LAYOUT=BLOCKED)


def test_only_within_the_block():
    x = torch.empty(4)
    with pytest.raises(RuntimeError, match="Hopper card"):
        ge.check_launch(x=x)
    with ge.emulate():
        ge.check_launch(x=x)
        with pytest.raises(ValueError, match="one dtype"):
            ge.check_launch(x=x, y=x.half())
    from triton.experimental.gluon._runtime import GluonJITFunction

    assert "run" not in vars(GluonJITFunction), "launches go to the card again"


def test_the_same_seed_gives_the_same_order():
    runs = [[copied(seed, rows=40)[2] for seed in (2, 5, 8)] for _ in range(2)]
    assert runs[0] == runs[1]
