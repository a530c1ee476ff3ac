"""Tests of lab 04. Run `pytest labs/04_triton_first_kernels`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py):
a kernel that leaves its tensors fails there and then. What is right is computed here, in float64.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter

import pytest
import torch

from labs._harness import interpreter, memory, oracle, runtime
from labs._harness.cases import (
    check_compiles,
    check_kept,
    interpreter_only,
    kernel_dtypes,
    needs_compiler,
    needs_triton,
    step,
)

STEPS = {1: "vector_add", 2: "row_sum", 3: "copy_2d", 4: "bias_silu", 5: "row_max"}

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = math.inf, math.nan

here = runtime.setup()
DTYPES = (F32, F16) if here.interpret else (F32, F16, BF16)  # the interpreter's bfloat16 is wrong

step1 = step(1, needs_triton)
step2 = step(2, needs_triton)
step3 = step(3, needs_triton)
step4 = step(4, needs_triton)
step5 = step(5, needs_triton)


# ---------------------------------------------------------------- what the steps have in common


def check_exact(got, want, name, axes, **tiles):
    """The result is `want`, exactly; `tiles` are the blocks along the axes, for the message."""
    oracle.Expected(name, want.double(), 0.0, want.dtype, axes, tiles).check(got)


class Programs(interpreter.Observer):
    """What the programs of the last launch do, each for itself.

    Attributes:
        grid: how many there are along each axis.
        loaded, stored: elements, by program.
        widest: lanes of the widest load, masked ones counted.
    """

    def __init__(self):
        self.grid, self.loaded, self.stored, self.widest = (), Counter(), Counter(), 0

    def launch(self, launch):
        self.grid = launch.grid

    def load(self, launch, address, mask, itemsize):
        self.loaded[launch.program] += int(mask.sum())
        self.widest = max(self.widest, address.size)

    def store(self, launch, address, mask, itemsize):
        self.stored[launch.program] += int(mask.sum())


def check_work(lab, call, loaded, stored, why, grid, most):
    """What the kernel of `call` loads and stores, in all and in one program.

    Args:
        loaded, stored: bytes that it must load and store, exactly. why: where `loaded` comes from.
        grid: programs along axes 0 and 1.
        most: elements that one program may load, and store.

    Returns:
        Programs.
    """
    programs = Programs()
    with interpreter.observe(programs):
        call()
    work = lab.kernels
    assert work.bytes_loaded == loaded, (
        f"want {loaded:,} bytes loaded: {why}. Got {work.bytes_loaded:,}, "
        f"{work.bytes_loaded / loaded:.2f} times that, in {work.launches.total()} programs.\n"
        "  0: no kernel did the work. More: an element is read twice, or a lane that should be "
        "masked off is read. Less: elements are left out"
    )
    assert work.bytes_stored == stored, (
        f"want {stored:,} bytes stored, each element of the result once: got "
        f"{work.bytes_stored:,}, {work.bytes_stored / stored:.2f} times that. Is the store in a "
        "loop, or made by programs that share an element?"
    )
    assert lab.work.allocated <= stored, (
        f"want no memory but the result's {stored:,} bytes: got {lab.work.allocated:,} bytes of "
        "new tensors. Is there a pass in PyTorch, such as a copy, beside the kernel's?"
    )
    assert programs.grid[:2] == grid, (
        f"want {grid[0]} programs on grid axis 0 and {grid[1]} on axis 1: got {programs.grid[:2]}"
    )
    for what, counts, limit in zip(
        ("load", "store"), (programs.loaded, programs.stored), most, strict=True
    ):
        program, count = counts.most_common(1)[0]
        assert count <= limit, (
            f"want each program to {what} its own part, at most {limit} elements: program "
            f"{program} of {grid} {what}s {count}. Does one program do the work of others? On a "
            "GPU they run at the same time, and this one would run alone"
        )
    for name in work.launches:
        check_kernel_is_general(name, getattr(getattr(lab, name, None), "fn", None))
    return programs


def check_kernel_is_general(name, fn):
    """Sizes and strides are run-time numbers, and nothing is computed in float64."""
    if fn is None:
        return
    for parameter in inspect.signature(fn).parameters.values():
        fixed = "constexpr" in str(parameter.annotation)
        assert not fixed or parameter.name.startswith("BLOCK"), (
            f"{name}: want {parameter.name} to be a run-time number, got a tl.constexpr. Each new "
            "size of the data would compile the kernel anew"
        )
    assert "float64" not in fn.__code__.co_names, (
        f"{name}: want float32, got tl.float64, which a consumer card computes 64 times slower"
    )


def check_computed_anew(lab, call, check, *inputs):
    """Results follow inputs that change in place, old ones stay, and a kernel computes them."""
    first = call()
    kept = first.clone()
    for x in inputs:
        x.copy_(oracle.inputs(*x.shape, dtype=x.dtype, device=x.device))
        for _ in range(2):
            check()
    check_kept([first], [kept])
    if here.interpret:
        with lab.no_program():
            out = call()
        assert bool(out.isnan().all()), (
            "no program of the kernel ran, yet there are numbers: want fresh memory (NaN here), "
            "got results. The kernel must compute them, not PyTorch around it"
        )


def large(elements, device, beside=0):
    """An uninitialised float16 vector; little of it becomes real memory on a CPU.

    Skips the test where there is no room for it, or for `beside` more elements at the same time.
    """
    try:
        room = torch.empty(beside, dtype=F16, device=device)
        x = torch.empty(elements, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs {2 * (elements + beside) / 1e9:.1f} GB: {str(error)[:60]}")
    del room
    return x


def far_rows(device, N=40):
    """(M, N) float16, rows 2**30 and a little apart: row 2 begins past 2**31, row 4 past 2**32."""
    M, stride = 5 if here.interpret else 3, 2**30 + 64  # on a GPU the gaps are real memory
    x = large((M - 1) * stride + N, device).as_strided((M, N), (stride, 1))
    x.copy_(oracle.inputs(M, N, dtype=F16, device=device))
    return x


def last_program(lab):
    """In the interpreter only the last program runs: far offsets without the way there."""
    return lab.last_program_only() if here.interpret else contextlib.nullcontext()


def check_rejects_matrices(call, x):
    """Ranks, empty matrices and dtypes that no function of a matrix takes."""
    call(x)
    for bad in (x[0], x[None], x[:0], x[:, :0], x.int(), x.double()):
        with pytest.raises(ValueError, match="got"):
            call(bad)
    if here.interpret:
        with pytest.raises(ValueError, match="bfloat16"):
            call(x.bfloat16())


def check_rejects_blocks(call, **names):
    """Blocks that no tile can have: call(**{name: size}) raises ValueError and says the name."""
    for name in names:
        for size in (0, -16, 8, 24, 200):
            with pytest.raises(ValueError, match=f"{name}.*got {size}"):
                call(**{name: size})
    with pytest.raises(ValueError, match="65,536"):
        call(**names)


# ---------------------------------------------------------------- step 1


def check_add(lab, x, y, block=1024):
    want = (x.double() + y.double()).to(x.dtype)
    got = lab.vector_add(x, y, block=block)
    check_exact(got, want, f"vector_add, {block=},", "N", N=block)


def vectors(n, dtype, device):
    """Two vectors between red zones."""
    return tuple(memory.fenced(oracle.inputs(n, dtype=dtype, device=device)) for _ in "xy")


@step1
@kernel_dtypes
def test_vector_add(lab, device, dtype):
    for N, block in ((16, 16), (17, 16), (1, 16), (997, 64), (1024, 1024), (2500, 1024)):
        check_add(lab, *vectors(N, dtype, device), block)


@step1
def test_vector_add_special_values(lab, device):
    for dtype in DTYPES:
        big, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 8
        pairs = [(INF, 1), (-INF, INF), (NAN, 1), (big, big), (-big, -big), (big, -big)]
        pairs += [(tiny, tiny), (tiny, -tiny), (0.0, -0.0), (1, torch.finfo(dtype).eps / 2)]
        x, y = torch.tensor(pairs, dtype=dtype, device=device).unbind(1)
        check_add(lab, memory.fenced(x), memory.fenced(y), 16)


@step1
def test_vector_add_any_strides(lab, device):
    wide = oracle.inputs(200, device=device)
    check_add(lab, wide[::4], wide[100:150], 16)  # only x has gaps
    check_add(lab, wide[100:150], wide[::4], 16)
    check_add(lab, wide[:1].expand(50), oracle.inputs(50, 50, device=device)[:, 7], 16)


@step1
def test_vector_add_split_and_swap(lab, device):
    x, y = vectors(300, F32, device)
    whole = lab.vector_add(x, y, block=64)
    assert torch.equal(lab.vector_add(y, x, block=64), whole), "x + y is y + x"
    parts = [lab.vector_add(x[part], y[part], block=64) for part in (slice(101), slice(101, 300))]
    assert torch.equal(torch.cat(parts), whole), "an element does not depend on the others"
    assert torch.equal(lab.vector_add(x, y, block=512), whole), "nor on the block"


@step1
@interpreter_only
def test_vector_add_reads_and_writes_once(lab, device):
    for n in (128, 100):
        x, y = vectors(n, F32, device)
        add = lambda: lab.vector_add(x, y, block=32)  # noqa: B023, E731
        why = f"each of the {n} elements of x and of y once"
        check_work(lab, add, 8 * n, 4 * n, why, grid=(4, 1), most=(64, 32))


@step1
@pytest.mark.parametrize("first", [2**31, 2**32], ids=["2**31", "2**32"])
def test_vector_add_offsets_beyond_32_bits(lab, device, first):
    x = large(first + 100, device, beside=first + 100)
    if here.interpret:
        x[-100:] = oracle.inputs(100, dtype=F16, device=device)
    else:
        x.normal_()
    with last_program(lab):  # its first element is number `first`
        out = lab.vector_add(x, x, block=65_536)
    check_exact(out[-100:], 2 * x[-100:], f"vector_add, elements from {first:,} on", "N")


@step1
def test_vector_add_is_computed_anew(lab, device):
    x, y = vectors(50, F32, device)
    check_computed_anew(lab, lambda: lab.vector_add(x, y), lambda: check_add(lab, x, y), x, y)


@step1
@needs_compiler
@pytest.mark.timeout(240)
def test_vector_add_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "vector_add")


@step1
def test_vector_add_rejects(lab, device):
    x = oracle.inputs(20, device=device)
    lab.vector_add(x, x)
    for bad in ((x[:19], x), (x, x[None]), (x[None], x[None]), (x[:0], x[:0])):
        with pytest.raises(ValueError, match="got"):
            lab.vector_add(*bad)
    for bad in ((x.int(), x.int()), (x.double(), x.double()), (x, x.half())):
        with pytest.raises(ValueError, match="got"):
            lab.vector_add(*bad)
    check_rejects_blocks(lambda **sides: lab.vector_add(x, x, **sides), block=131_072)
    if here.interpret:
        with pytest.raises(ValueError, match="bfloat16"):
            lab.vector_add(x.bfloat16(), x.bfloat16())


# ---------------------------------------------------------------- step 2


def check_sum(lab, x):
    """Against float64: twice the error of plain float32, and 4 ulp of the sum of |x|."""
    want = x.double().sum(dim=1)
    ok = want.isfinite()
    error = (x.float().sum(dim=1).double() - want)[ok].abs()
    terms = x.double().abs().sum(dim=1)[ok]
    budget = 0.0
    if ok.any():
        budget = float(2 * error.max() + 4 * oracle.eps(F32) * terms.max())
    oracle.Expected("row_sum", want, budget, F32, "R").check(lab.row_sum(x))


def check_integer_sum(lab, x):
    """Whole numbers below 2**24 add up exactly in float32, in any order."""
    check_exact(lab.row_sum(x), x.double().sum(dim=1).float(), "row_sum of whole numbers", "R")


def whole_numbers(*shape, dtype=F32, device="cpu", most=1000):
    return torch.randint(-most, most + 1, shape).to(device=device, dtype=dtype)


@step2
@kernel_dtypes
def test_row_sum(lab, device, dtype):
    for N in (128, 37, 1, 1000):
        check_sum(lab, memory.fenced(oracle.inputs(3, N, dtype=dtype, device=device)))


@step2
def test_row_sum_shapes(lab, device):
    widest = 8192 if here.interpret else 65_536  # the interpreter is slow at a tl.reduce
    for M, N in ((1, 1), (1, 2), (7, 17), (30, 33), (1, widest)):
        x = whole_numbers(M, N, most=100, device=device)
        check_integer_sum(lab, memory.fenced(x))


@step2
def test_row_sum_accumulates_in_float32(lab, device):
    for dtype in DTYPES:
        x = whole_numbers(4, 700, most=200, dtype=dtype, device=device)
        x[0] = 200  # 140,000: float16 ends at 65,504
        x[1], x[1, 0] = 1, 256 if dtype == BF16 else 2048  # no half can tell 2049 from 2048
        x[2, ::2], x[2, 1::2] = 199, -199
        check_integer_sum(lab, memory.fenced(x))
        most = 256 if dtype == BF16 else 2048  # the sum of two of these may be no half
        for N in (1500, 3000):  # wider tiles, too
            check_integer_sum(lab, whole_numbers(2, N, most=most, dtype=dtype, device=device))


@step2
def test_row_sum_row_strides(lab, device):
    wide = whole_numbers(6, 100, device=device)
    check_integer_sum(lab, wide[::2, 30:70])
    check_integer_sum(lab, wide[:1].expand(3, 100))
    check_integer_sum(lab, wide[:, :9].t())
    check_integer_sum(lab, memory.fenced(wide[:3, :40]))


@step2
def test_row_sum_rows_that_are_not_finite(lab, device):
    for dtype in DTYPES:
        x = oracle.inputs(6, 50, dtype=dtype, device=device)
        x[0, 3] = NAN
        x[1, 49] = INF
        x[2, 0] = -INF
        x[3, 7], x[3, 8] = INF, -INF  # NaN
        x[4] = -INF
        check_sum(lab, x)


@step2
def test_row_sum_scale_and_order(lab, device):
    x = whole_numbers(4, 60, device=device)
    sums = lab.row_sum(x)
    order = torch.randperm(60, device=device)
    assert torch.equal(lab.row_sum(x[:, order]), sums), "the order of the columns does not matter"
    assert torch.equal(lab.row_sum(x * -2), sums * -2), "a factor can be taken out"
    parts = lab.row_sum(x[:, :23]) + lab.row_sum(x[:, 23:])
    assert torch.equal(parts, sums), "a sum is the sum of the sums of its parts"


@step2
@interpreter_only
def test_row_sum_reads_once(lab, device):
    for dtype in DTYPES:
        x = oracle.inputs(4, 100, dtype=dtype, device=device)
        why = "each element of x once, no lane past the row's end"
        row_sum = lambda: lab.row_sum(x)  # noqa: B023, E731
        check_work(lab, row_sum, x.nbytes, 4 * 4, why, grid=(4, 1), most=(100, 1))


@step2
def test_row_sum_offsets_beyond_32_bits(lab, device):
    check_sum(lab, far_rows(device))


@step2
def test_row_sum_is_computed_anew(lab, device):
    x = oracle.inputs(3, 20, device=device)
    check_computed_anew(lab, lambda: lab.row_sum(x), lambda: check_sum(lab, x), x)


@step2
@needs_compiler
@pytest.mark.timeout(240)
def test_row_sum_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "row_sum")


@step2
def test_row_sum_rejects(lab, device):
    check_rejects_matrices(lab.row_sum, oracle.inputs(2, 8, device=device))
    with pytest.raises(ValueError, match="65,?537"):
        lab.row_sum(oracle.inputs(1, 65_537, device=device))


# ---------------------------------------------------------------- step 3


# M, N, block_m, block_n
TILES = [(35, 45, 16, 32), (45, 35, 32, 16), (64, 64, 64, 64), (1, 1, 16, 16), (1, 50, 16, 64)]
TILES += [(50, 1, 64, 16)]


def check_copy(lab, x, block_m=32, block_n=64, what="a matrix"):
    got = lab.copy_2d(x, block_m=block_m, block_n=block_n)
    name = f"copy_2d of {what}, strides {x.stride()}, {block_m=}, {block_n=},"
    check_exact(got, x, name, "RC", R=block_m, C=block_n)
    assert got.is_contiguous(), f"want strides ({x.shape[1]}, 1), got {got.stride()}"
    return got


@step3
@kernel_dtypes
def test_copy_2d_transposed_view(lab, device, dtype):
    for M, N, block_m, block_n in TILES:
        stored = memory.fenced(oracle.inputs(N, M, dtype=dtype, device=device))
        check_copy(lab, stored.t(), block_m, block_n, "a transposed view")


@step3
def test_copy_2d_any_strides(lab, device):
    x = oracle.inputs(40, 90, device=device)
    views = {
        "a contiguous matrix": x,
        "every second row, every third column": x[::2, 5:80:3],
        "one row for all, stride 0": x[1:2].expand(40, 90),
        "one column for all, stride 0": x[:, 1:2].expand(40, 90),
        "a slice of three axes": oracle.inputs(20, 3, 35, device=device)[:, 1],
        "a part of a transposed view, between red zones": memory.fenced(x.t()[:50, ::2]),
    }
    for what, view in views.items():
        check_copy(lab, view, 64, 128, what)


@step3
def test_copy_2d_bit_for_bit(lab, device):
    for dtype in DTYPES:
        if dtype == F32:  # some of everything: subnormals, a quiet and a signalling NaN
            bits = torch.randint(-(2**31), 2**31, (48, 40), dtype=torch.int64).int()
            bits[0] = torch.arange(40)
            bits[1, :4] = torch.tensor([0x7FC12345, 0x7F800001, -0x3EDCBB, -(2**31)])
        else:  # every number that there is
            bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(256, 256)
        bits = bits.to(device)
        got = check_copy(lab, bits.view(dtype).t()).view(bits.dtype)
        wrong = (got != bits.t()).nonzero().tolist()
        r, c = wrong[0] if wrong else (0, 0)
        pattern = (1 << 8 * dtype.itemsize) - 1  # as a number without a sign, for the message
        assert not wrong, (
            f"want the bits of each {dtype} number, got others at {len(wrong)} places; element "
            f"[{r}, {c}]: want {bits[c, r].item() & pattern:#x}, got "
            f"{got[r, c].item() & pattern:#x}.\n"
            "  Arithmetic and conversions change some: -0.0 + 0.0 is 0.0, and a NaN has many "
            "patterns, of which they keep few. Store what was loaded"
        )


@step3
def test_copy_2d_there_and_back(lab, device):
    x = oracle.inputs(37, 21, device=device)
    there = lab.copy_2d(x.t(), block_m=16, block_n=16)
    back = lab.copy_2d(there.t(), block_m=16, block_n=16)
    assert torch.equal(back, x), "transposed twice, a matrix is what it was"
    assert torch.equal(lab.copy_2d(x.t(), block_m=32, block_n=64), there), "whatever the tile"


@step3
@interpreter_only
def test_copy_2d_reads_and_writes_once(lab, device):
    x = oracle.inputs(45, 67, device=device)
    for view in (x.t(), x, x[:1].expand(45, 67), x[::2, ::3]):
        copy = lambda: lab.copy_2d(view, block_m=16, block_n=32)  # noqa: B023, E731
        n, grid = 4 * view.numel(), (math.ceil(len(view) / 16), math.ceil(view.shape[1] / 32))
        why = "each element once, and no lane past the edges"
        programs = check_work(lab, copy, n, n, why, grid, most=(16 * 32, 16 * 32))
        assert programs.widest == 16 * 32, (
            f"want a program to load its tile at once, 16 x 32 lanes: got {programs.widest}. A "
            "row at a time leaves most of its threads idle, and of a transposed view no two lanes "
            "lie side by side"
        )


@step3
def test_copy_2d_offsets_beyond_32_bits(lab, device):
    x = far_rows(device)
    check_copy(lab, x)
    check_copy(lab, x.t())  # here it is the columns that are far apart


@step3
def test_copy_2d_stores_beyond_32_bits(lab, device):
    x = rows_beyond_32_bits(device)
    with last_program(lab):
        got = lab.copy_2d(x, block_m=16, block_n=4096)
    check_exact(got[-10:], x[-10:], "copy_2d, rows from element 2**31 of the result on", "RC")


def rows_beyond_32_bits(device):
    """(2**19 + 10, 4096) float16, one row over and over: in a result row 2**19 is past 2**31."""
    shape = 2**19 + 10, 4096
    large(0, device, beside=math.prod(shape))
    return oracle.inputs(1, 4096, dtype=F16, device=device).expand(shape)


@step3
def test_copy_2d_is_computed_anew(lab, device):
    x = oracle.inputs(20, 30, device=device)
    check_computed_anew(lab, lambda: lab.copy_2d(x.t()), lambda: check_copy(lab, x.t()), x)


@step3
@needs_compiler
@pytest.mark.timeout(240)
def test_copy_2d_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "copy_2d")


@step3
def test_copy_2d_rejects(lab, device):
    x = oracle.inputs(20, 30, device=device)
    check_rejects_matrices(lab.copy_2d, x)
    check_rejects_blocks(lambda **sides: lab.copy_2d(x, **sides), block_m=512, block_n=256)
    wide = x[:1, :1].expand(1, 65_535 * 16 + 1)
    with last_program(lab), pytest.raises(ValueError, match="65,535.*got 65,536"):
        lab.copy_2d(wide, block_m=16, block_n=16)


# ---------------------------------------------------------------- step 4


def expected_silu(x, bias, block_m, block_n):
    """From float64; budget: twice the error of plain float32, and 4 ulp of the largest result."""
    z = x.double() + bias.double()
    want = z * torch.sigmoid(z)
    plain = torch.nn.functional.silu(x.float() + bias.float()).to(x.dtype).double()
    ok = want.isfinite() & plain.isfinite()
    budget = 2 * (plain - want)[ok].abs().max() + 4 * oracle.eps(x.dtype) * want[ok].abs().max()
    name, tiles = f"bias_silu, {block_m=}, {block_n=},", {"R": block_m, "C": block_n}
    return oracle.Expected(name, want, float(budget), x.dtype, "RC", tiles)


def check_silu(lab, x, bias, block_m=64, block_n=128):
    got = lab.bias_silu(x, bias, block_m=block_m, block_n=block_n)
    expected_silu(x, bias, block_m, block_n).check(got)


def rows_and_bias(M, N, dtype=F32, device="cpu"):
    """x (M, N) and bias (N,), between red zones."""
    shapes = (M, N), (N,)
    return tuple(memory.fenced(oracle.inputs(*s, dtype=dtype, device=device) * 2) for s in shapes)


@step4
@kernel_dtypes
def test_bias_silu(lab, device, dtype):
    for M, N, block_m, block_n in TILES:
        check_silu(lab, *rows_and_bias(M, N, dtype, device), block_m, block_n)


@step4
def test_bias_silu_worked_example(lab, device):
    x = torch.tensor([[-1.0, 0.0, 1.0], [0.0, 1.0, 2.0]], device=device)
    got = lab.bias_silu(x, torch.tensor([1.0, 1.0, -1.0], device=device))
    want = [[0.0, 0.7311, 0.0], [0.7311, 1.7616, 0.7311]]
    got = [[round(v, 4) for v in row] for row in got.tolist()]
    assert got == want, f"section 5's example: want {want}, got {got}"


@step4
def test_bias_silu_each_element(lab, device):
    for dtype in DTYPES:
        x, bias = rows_and_bias(64, 128, dtype, device)
        check_each(lab, x * 2, bias)
        for far in (60_000.0, -60_000.0):  # x + bias overflows in float16
            check_each(lab, torch.full_like(x, far), torch.full_like(bias, far))
    tail = torch.linspace(-80, -15, 512, device=device).view(4, 128)  # small, and not 0
    check_each(lab, tail, torch.zeros(128, device=device))


def check_each(lab, x, bias):
    """Each element to 1 ulp of its own, and to what float32 may lose on the way."""
    got = lab.bias_silu(x, bias, block_m=64, block_n=128)
    z = x.double() + bias.double()
    want = z * torch.sigmoid(z)
    info = torch.finfo(x.dtype)
    ulp = torch.exp2(want.abs().clamp(min=info.smallest_normal).log2().floor()) * info.eps
    budget = ulp + (16 + 4 * z.abs()) * 2**-24 * want.abs()  # exp of a rounded z is off by z ulp
    off = (got.double() - want).abs() / budget
    off[got == want.to(x.dtype)] = 0.0  # equal infinities, too
    off = off.nan_to_num(math.inf)
    at = divmod(int(off.argmax()), off.shape[1])
    assert off[at] <= 1, (
        f"bias_silu, {x.dtype}, z = {z[at]:.5g} at {list(at)}: want {want[at]:.6g}, got "
        f"{got[at]:.6g}, off by {off[at] * budget[at] / ulp[at]:.3g} ulp of that element. Is z, or "
        "its sigmoid, in half precision, or a tail cut off? Convert x and bias before the sum, and "
        "round once, in the store"
    )


@step4
def test_bias_silu_saturates(lab, device):
    for dtype in DTYPES:
        x, bias = rows_and_bias(20, 40, dtype, device)
        for factor in (100, -100, 10, -10):  # exp(88.8) is more than float32 holds
            check_silu(lab, x.abs() * factor, bias)


@step4
def test_bias_silu_numbers_that_are_not_finite(lab, device):
    for dtype in DTYPES:
        x, bias = rows_and_bias(20, 40, dtype, device)
        x[1, 3], x[2, 4], x[3, 5] = NAN, INF, -INF
        bias[7], bias[8] = NAN, INF
        x[4, 8] = -INF
        check_silu(lab, x, bias)


@step4
def test_bias_silu_strides(lab, device):
    wide, bias = oracle.inputs(40, 90, device=device), oracle.inputs(90, device=device)
    check_silu(lab, wide[::2, 10:60], bias[10:60])
    check_silu(lab, wide[:, ::2], bias[::2])
    check_silu(lab, wide.t(), bias[:40])
    check_silu(lab, wide[:1].expand(40, 90), bias[:1].expand(90))
    check_silu(lab, memory.fenced(wide[:, :50]), memory.fenced(bias[::2][:40].repeat(2)[:50]))


@step4
def test_bias_silu_bias_goes_with_the_columns(lab, device):
    x, bias = rows_and_bias(30, 50, device=device)
    out = lab.bias_silu(x, bias, block_m=16, block_n=32)
    order = torch.randperm(50, device=device)
    moved = lab.bias_silu(x[:, order], bias[order], block_m=16, block_n=32)
    assert torch.equal(moved, out[:, order]), "columns may change places with their biases"
    rows = torch.randperm(30, device=device)
    assert torch.equal(lab.bias_silu(x[rows], bias), out[rows]), "rows may change places"
    zero = torch.zeros_like(bias)
    z = x + bias
    mirrored = lab.bias_silu(z, zero) - lab.bias_silu(-z, zero)  # silu(z) - silu(-z) is z
    assert torch.allclose(mirrored, z, rtol=0, atol=1e-5), "silu(z) - silu(-z) is z"


@step4
@interpreter_only
def test_bias_silu_reads_and_writes_once(lab, device):
    for dtype in DTYPES:
        x, bias = rows_and_bias(45, 70, dtype, device)
        silu = lambda: lab.bias_silu(x, bias, block_m=16, block_n=32)  # noqa: B023, E731
        one, tiles = x.element_size(), math.ceil(45 / 16)
        why = f"x once, and bias once for each of the {tiles} tiles below each other, not each row"
        loaded, stored, tile = (45 + tiles) * 70 * one, 45 * 70 * one, 16 * 32
        check_work(lab, silu, loaded, stored, why, grid=(tiles, 3), most=(tile + 32, tile))


@step4
def test_bias_silu_offsets_beyond_32_bits(lab, device):
    x = far_rows(device)
    check_silu(lab, x, oracle.inputs(x.shape[1], dtype=F16, device=device))


@step4
def test_bias_silu_stores_beyond_32_bits(lab, device):
    x = rows_beyond_32_bits(device)
    bias = oracle.inputs(4096, dtype=F16, device=device)
    with last_program(lab):
        got = lab.bias_silu(x, bias, block_m=16, block_n=4096)
    expected_silu(x[-10:], bias, 16, 4096).check(got[-10:])


@step4
def test_bias_silu_is_computed_anew(lab, device):
    x, bias = rows_and_bias(20, 30, device=device)
    check = lambda: check_silu(lab, x, bias)  # noqa: E731
    check_computed_anew(lab, lambda: lab.bias_silu(x, bias), check, x, bias)


@step4
@needs_compiler
@pytest.mark.timeout(240)
def test_bias_silu_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "bias_silu")


@step4
def test_bias_silu_rejects(lab, device):
    x, bias = rows_and_bias(20, 30, device=device)
    check_rejects_matrices(lambda m: lab.bias_silu(m, bias.to(m.dtype)), x)
    for bad in (bias[:29], bias[None], bias[:1], x[:, 0], bias.int(), bias.half()):
        with pytest.raises(ValueError, match="got"):
            lab.bias_silu(x, bad)
    tall = bias[:1].expand(65_535 * 16 + 1)
    with last_program(lab), pytest.raises(ValueError, match="65,535.*got 65,536"):
        lab.bias_silu(tall[None], tall, block_m=16, block_n=16)
    check_rejects_blocks(
        lambda **kwargs: lab.bias_silu(x, bias, **kwargs), block_m=512, block_n=256
    )


# ---------------------------------------------------------------- step 5


def check_max(lab, x, block=16):
    got = lab.row_max(x, block=block)
    name = f"row_max of {x.shape[1]} columns, {block=},"
    check_exact(got, x.amax(dim=1), name, "R")


@step5
@kernel_dtypes
def test_row_max(lab, device, dtype):
    for N, block in ((16, 16), (17, 16), (33, 16), (1, 16), (1000, 256), (2049, 1024)):
        x = oracle.inputs(2, N, dtype=dtype, device=device)
        check_max(lab, memory.fenced(x), block)


@step5
def test_row_max_in_each_block(lab, device):
    x = -10 - oracle.inputs(7, 33, device=device).abs()
    for row, col in enumerate((0, 1, 15, 16, 17, 31, 32)):
        x[row, col] = -1.0  # the maximum, below a padding of 0
    check_max(lab, memory.fenced(x), 16)


@step5
def test_row_max_growing_shrinking_equal_low(lab, device):
    x = oracle.inputs(4, 50, device=device)
    x[:2] = x[:2].sort(dim=1).values * 300
    x[1] *= -1
    x[2] = -88.0
    x[3] -= 3e38  # below every finite number that could stand for -inf
    check_max(lab, memory.fenced(x))


@step5
def test_row_max_wide_rows(lab, device):
    for N, block in ((65_537, 1024), (3001, 2048)):
        x = oracle.inputs(2, N, device=device)
        x[0, -1] = 100.0  # in the last, ragged block
        x[1, 0] = 100.0
        check_max(lab, memory.fenced(x), block)
    x = torch.full((1, 1_100_000), -2.0, device=device)  # past any bound that a loop might have
    x[0, -1] = -1.0
    check_max(lab, x, 65_536)


@step5
def test_row_max_rows_that_are_not_finite(lab, device):
    try:
        check_not_finite(lab, device)
    except oracle.Mismatch as mismatch:
        raise AssertionError(
            f"{mismatch}\n  tl.maximum(a, b) is a where b is NaN, on a GPU and as these tests run. "
            "Ask for NaN: propagate_nan=tl.PropagateNan.ALL; or look for x != x"
        ) from None


def check_not_finite(lab, device):
    """Rows with NaN at the start, in the middle and at the end, and with infinities."""
    for dtype in DTYPES:
        x = oracle.inputs(11, 50, dtype=dtype, device=device)
        x[0, 0] = NAN
        x[1, 20] = NAN
        x[2, 49] = NAN
        x[3, 5], x[3, 6] = NAN, INF
        x[4, 49] = INF
        x[5, :49] = -INF
        x[6] = -INF
        x[7, 3], x[7, 9] = INF, -INF  # their sum is NaN, and the row has none
        x[8, 20], x[8, 21] = NAN, NAN
        x[9] = NAN
        x[10, 0], x[10, 48] = NAN, NAN
        check_max(lab, x)


@step5
def test_row_max_row_strides(lab, device):
    wide = oracle.inputs(6, 60, device=device)
    check_max(lab, wide[::2, 20:53])
    check_max(lab, wide[:1].expand(3, 60))
    check_max(lab, wide[:, :4].t())
    check_max(lab, memory.fenced(wide[:3, :40]))


@step5
def test_row_max_split_and_shift(lab, device):
    x = whole_numbers(2, 90, device=device)
    whole = lab.row_max(x, block=16)
    for block in (32, 128):
        assert torch.equal(lab.row_max(x, block=block), whole), "the block does not matter"
    parts = [lab.row_max(part, block=16) for part in x.split(37, dim=1)]
    assert torch.equal(torch.stack(parts).amax(dim=0), whole), "the maximum of the parts' maxima"
    order = torch.randperm(90, device=device)
    assert torch.equal(lab.row_max(x[:, order], block=16), whole), "the order does not matter"
    assert torch.equal(lab.row_max(x - 500, block=16), whole - 500), "it follows a shift"


@step5
@interpreter_only
def test_row_max_reads_once(lab, device):
    for dtype in DTYPES:
        x = oracle.inputs(4, 50, dtype=dtype, device=device)
        why = "each element of x once, in one pass, and no lane past the row's end"
        row_max = lambda: lab.row_max(x, block=16)  # noqa: B023, E731
        stored = 4 * x.element_size()
        programs = check_work(lab, row_max, x.nbytes, stored, why, grid=(4, 1), most=(50, 1))
        assert programs.widest <= 16, f"block=16 columns at a time: a load has {programs.widest}"


@step5
def test_row_max_offsets_beyond_32_bits(lab, device):
    check_max(lab, far_rows(device))


@step5
def test_row_max_is_computed_anew(lab, device):
    x = oracle.inputs(3, 40, device=device)
    check = lambda: check_max(lab, x)  # noqa: E731
    check_computed_anew(lab, lambda: lab.row_max(x, block=16), check, x)


@step5
@needs_compiler
@pytest.mark.timeout(240)
def test_row_max_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "row_max")


@step5
def test_row_max_rejects(lab, device):
    x = oracle.inputs(2, 40, device=device)
    check_rejects_matrices(lab.row_max, x)
    check_rejects_blocks(lambda **sides: lab.row_max(x, **sides), block=131_072)
