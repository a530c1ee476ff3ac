"""Tests of lab 05. Run `pytest labs/05_tiled_matmul`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
`oracle` gives inputs and float64 results with their error budgets.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labs._harness import cards, interpreter, memory, oracle, runtime, work, xray
from labs._harness.cases import (
    check_compiles,
    check_kept,
    interpreter_only,
    kernel_dtypes,
    needs_compiler,
    needs_triton,
    step,
)

STEPS = {
    1: "tiled_matmul",
    2: "triton_matmul",
    3: "ragged_matmul",
    4: "grouped_order",
    5: "tuned_matmul",
}

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
INF = math.inf

here = runtime.setup()
torch_dtypes = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
half_dtypes = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
kernel_half_dtypes = pytest.mark.parametrize(
    "dtype",
    [
        F16,
        pytest.param(
            BF16,
            marks=pytest.mark.skipif(
                here.interpret, reason="the interpreter computes bfloat16 as raw integer bits"
            ),
        ),
    ],
    ids=str,
)

step1 = step(1)
step2 = step(2, needs_triton)
step3 = step(3, needs_triton)
step4 = step(4)
step5 = step(5)


def matrices(M, N, K, dtype=F32, device="cpu"):
    """a (M, K) and b (K, N), standard normal."""
    a = oracle.inputs(M, K, dtype=dtype, device=device)
    return a, oracle.inputs(K, N, dtype=dtype, device=device)


def fenced(a, b):
    """The same between red zones of NaN."""
    return memory.fenced(a), memory.fenced(b)


def check(product, a, b, *tile, **options):
    """Checks product(a, b, *tile) against float64; a failure names the sizes and the tile."""
    kernel = product.__name__ != "tiled_matmul"
    c = product(a, b, *tile, **options)
    try:
        oracle.matmul(a, b, kernel=kernel, tiles=tile[:2] or None).check(c)
    except oracle.Mismatch as mismatch:
        (M, K), N = a.shape, b.shape[1]
        case = f"M, N, K = {M}, {N}, {K}; tile {tile or '(its own)'}; {a.dtype}"
        strides = f"strides of a {a.stride()}, of b {b.stride()}"
        text = f"{mismatch}\n  case: {case}; {strides}"
        raise oracle.Mismatch(text, mismatch.expected, mismatch.got) from None


def layouts(M, N, K, device):
    """Pairs (a, b) with other strides: turned, with gaps, with equal rows, and all at once."""
    a, b = matrices(M, N, K, device=device)
    gaps_a = oracle.inputs(M, K, device=device, layout="strided")
    gaps_b = oracle.inputs(K, N, device=device, layout="strided")
    turned = oracle.inputs(K, M, device=device).t()
    every_other = oracle.inputs(2 * K, 3 * N, device=device)[::2, ::3]
    return {
        "a turned": (turned, b),
        "b turned": (a, oracle.inputs(N, K, device=device).t()),
        "both turned": (turned, oracle.inputs(N, K, device=device).t()),
        "gaps": (gaps_a, gaps_b),
        "every other element": (a, every_other),
        "equal rows": (a[:1].expand(M, K), b),
    }


def long_sum(dtype, device, K=3072):
    """(a, b) of equal numbers, whose sum a half accumulator stops following on the way.

    Each 64 terms add 65. Beyond 2048 float16 has the even numbers only (bfloat16 far fewer), so a
    running sum kept in it gains 64 a time.
    """
    a = torch.full((16, K), 65 / 64, dtype=dtype, device=device)
    return a, torch.ones(K, 16, dtype=dtype, device=device)


def huge_terms(dtype, device):
    """(a, b) whose terms are 40,000 or -40,000; the running sum passes 1,280,000, the sum 20,000.

    Two such terms already pass 65,504, the largest number of float16.
    """
    a = torch.full((32, 64), 200.0, dtype=dtype, device=device)
    b = torch.full((64, 32), 200.0, dtype=dtype, device=device)
    b[32:] = -200.0
    b[-1] = -100.0
    return a, b


def check_rejects(product, a, b):
    """Shapes, dtypes and empty tensors that no product takes."""
    bad = {
        "rank of a": (a[None], b),
        "rank of b": (a, b[:, 0]),
        "K": (a[:, :16], b[:8]),
        "a turned": (a.new_empty(32, 64), b.new_empty(32, 64)),
        "dtype": (a, b.double()),
        "integers": (a.int(), b.int()),
        "no rows": (a[:0], b),
        "no columns": (a, b[:, :0]),
        "no depth": (a[:, :0], b[:0]),
        "device": (a, b.to("meta")),
    }
    for what, args in bad.items():
        try:
            product(*args)
        except ValueError as error:
            message = str(error)
        else:
            message = "(nothing was raised)"
        assert "got" in message, f"bad {what} is a ValueError that says what it got: {message}"


# ---------------------------------------------------------------- step 1

SIZES = [
    # M, N, K, and the tile
    (48, 32, 64, 16, 16, 16),
    (37, 41, 43, 16, 11, 13),
    (33, 17, 50, 16, 32, 5),
    (1, 1, 1, 16, 16, 16),
    (20, 30, 1, 16, 8, 16),
    (3, 5, 7, 16, 16, 16),
    (9, 8, 7, 1, 2, 3),
]


@step1
@torch_dtypes
def test_tiled_matmul(lab, device, dtype):
    for M, N, K, *tile in SIZES:
        check(lab.tiled_matmul, *fenced(*matrices(M, N, K, dtype, device)), *tile)


@step1
def test_tiled_matmul_worked_example(lab, device):
    a = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=F64, device=device)
    b = torch.tensor([[1, 0], [2, 1], [3, 1]], dtype=F64, device=device)
    got = lab.tiled_matmul(a, b, block_m=2, block_n=2, block_k=2)
    assert got.tolist() == [[14, 5], [32, 11], [50, 17]], f"section 2's example: got {got.tolist()}"


@step1
def test_tiled_matmul_layouts(lab, device):
    for a, b in layouts(19, 23, 31, device).values():
        check(lab.tiled_matmul, a, b, 8, 16, 8)


@step1
@half_dtypes
def test_tiled_matmul_sums_in_float32(lab, device, dtype):
    check(lab.tiled_matmul, *long_sum(dtype, device), 16, 16, 64)
    if dtype == F16:
        check(lab.tiled_matmul, *huge_terms(dtype, device), 16, 16, 16)


@step1
def test_tiled_matmul_keeps_float64(lab, device):
    a, b = matrices(5, 6, 40, F64, device)
    a[:, 0], b[0] = 1e8, 1.0
    check(lab.tiled_matmul, a, b, 4, 4, 8)


@step1
def test_tiled_matmul_not_finite(lab, device):
    a, b = matrices(20, 18, 22, device=device)
    a[3, 21], b[7, 17], a[9, 0] = math.nan, INF, -INF
    check(lab.tiled_matmul, a, b, 8, 8, 8)  # one row NaN, one column and one row infinite


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")


class Depths(TorchDispatchMode):
    """Notes the operands of each matrix product, and how far other operations read.

    Attributes:
        products: (shape of the left, shape of the right, dtype) -> how many.
        longest: the longest side of what any other operation reads; views read nothing.
    """

    def __init__(self):
        super().__init__()
        self.products = Counter()
        self.longest = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch._dynamo, which takes a second

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if func._overloadpacket.__name__ in PRODUCTS:
            left, right = (tuple(x.shape) for x in tensors[-2:])
            batch = left[0] if len(left) == 3 else 1
            self.products[left[-2:], right[-2:], tensors[-1].dtype] += batch
        elif not (facts := work.operation(func)).view:
            read = tensors[facts.reads]
            self.longest = max([self.longest, *(n for x in read for n in x.shape)])
        return func(*args, **(kwargs or {}))


@step1
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_tiled_matmul_works_on_tiles(lab, device, dtype):
    M, N, K, block_m, block_n, block_k = 32, 48, 512, 16, 24, 32
    a, b = matrices(M, N, K, dtype, device)
    with lab.guarded("tiled_matmul"), Depths() as seen:  # without what the guard does to inputs
        lab.tiled_matmul.__wrapped__(a, b, block_m, block_n, block_k)
    work = lab.work
    tiles = (block_m, block_k), (block_k, block_n)
    turned = (block_n, block_k), (block_k, block_m)  # the transposed tile of C
    for left, right, kind in seen.products:
        assert left[-1] <= block_k, (
            f"each product is of two tiles, at most block_k = {block_k} deep: got one of "
            f"{left[-1]}. The third loop is missing"
        )
        assert (left, right) in (tiles, turned), (
            f"block_m, block_n, block_k = {block_m}, {block_n}, {block_k} divide M, N and K: each "
            f"product is of tiles {tiles[0]} and {tiles[1]}; got one of {left} and {right}"
        )
        assert kind == F32, f"for {dtype} inputs products are of float32 tiles: got {kind}"
    longest = max(M, N, block_k)
    assert seen.longest <= longest, (
        f"K is {K} and is walked in pieces of block_k = {block_k}: got an operation on a tensor "
        f"with a side of {seen.longest}"
    )
    wanted = M // block_m * (N // block_n) * (K // block_k)
    got = seen.products.total()
    assert got in (0, wanted), f"{wanted} pairs of tiles, each multiplied once: got {got} products"
    most = max(M * N, block_m * block_k, block_k * block_n)
    assert work.most_elements <= 1.5 * most, (
        f"nothing larger than C or a tile ({most:,} elements) is needed: got {work.most_text}. "
        "Convert a tile at a time"
    )
    flops = 2 * M * N * K
    assert work.flops <= 1.01 * flops, (
        f"each product of tiles is computed once, {flops:,} FLOPs: got {work.flops:,}"
    )
    least = dtype.itemsize * (N // block_n * M * K + M // block_m * K * N)
    assert work.moved >= least, (
        f"a tile of C reads a row of tiles of A and a column of tiles of B: {least:,} bytes in "
        f"all; got {work.moved:,} bytes moved in PyTorch: is the product tiled?"
    )


@step1
def test_tiled_matmul_properties(lab, device):
    a, b = matrices(21, 14, 33, F64, device)
    c = lab.tiled_matmul(a, b, 8, 4, 16)
    turned = lab.tiled_matmul(b.t(), a.t(), 4, 8, 16)
    assert torch.allclose(c, turned.t(), rtol=0, atol=1e-12), "(A B)^T must be B^T A^T"
    again = lab.tiled_matmul(a, b, 5, 14, 33)
    assert torch.allclose(c, again, rtol=0, atol=1e-12), "the tile must not change the result"
    one = torch.eye(33, dtype=F64, device=device)
    assert torch.equal(lab.tiled_matmul(a, one, 8, 8, 8), a), "A times the unit matrix is A"


@step1
def test_tiled_matmul_follows_its_input(lab, device):
    check_follows(lab.tiled_matmul, *matrices(20, 18, 22, device=device))


def check_follows(product, a, b, *tile):
    """A later call sees new numbers, and does not write into an earlier result."""
    first = product(a, b, *tile)
    kept = first.clone()
    a.copy_(oracle.inputs(*a.shape, dtype=a.dtype, device=a.device))
    for _ in range(2):
        check(product, a, b, *tile)
    check_kept([first], [kept])


@step1
def test_tiled_matmul_rejects(lab, device):
    a, b = matrices(32, 32, 64, device=device)
    lab.tiled_matmul(a, b)
    check_rejects(lab.tiled_matmul, a, b)
    for name in ("block_m", "block_n", "block_k"):
        for size in (0, -1):
            with pytest.raises(ValueError, match=name):
                lab.tiled_matmul(a, b, **{name: size})


# ---------------------------------------------------------------- step 2

WHOLE = [
    # M, N, K, and the tile
    (64, 32, 32, 32, 16, 16),
    (32, 64, 48, 16, 64, 16),
    (16, 16, 16, 16, 16, 16),
    (64, 64, 32, 64, 32, 32),
]


@step2
@kernel_dtypes
def test_triton_matmul(lab, device, dtype):
    for M, N, K, *tile in WHOLE:
        check(lab.triton_matmul, *fenced(*matrices(M, N, K, dtype, device)), *tile)


@step2
def test_triton_matmul_layouts(lab, device):
    for a, b in layouts(32, 32, 32, device).values():
        check(lab.triton_matmul, a, b, 16, 32, 16)
        check_not_copied(lab)


def check_not_copied(lab):
    got, c = lab.work.allocated, lab.last_call[3]
    assert got == c.nbytes, (
        f"the kernel reads a and b where they lie, with their strides: {c.nbytes:,} bytes made, "
        f"for C; got {got:,}. contiguous() copies a turned matrix"
    )


@step2
@kernel_half_dtypes
def test_triton_matmul_sums_in_float32(lab, device, dtype):
    check(lab.triton_matmul, *long_sum(dtype, device), 16, 16, 64)
    check(lab.triton_matmul, *huge_terms(dtype, device), 32, 32, 16)


@step2
@interpreter_only
def test_triton_matmul_moves_each_tile_once(lab, device):
    M, N, K, tile = 64, 48, 64, (32, 16, 32)
    check(lab.triton_matmul, *matrices(M, N, K, device=device), *tile)
    check_work(lab.kernels, M, N, K, *tile, exact=True)


def check_work(work, M, N, K, block_m, block_n, block_k, exact=False, itemsize=4):
    """Bytes and FLOPs: no tile is loaded or multiplied twice, C is stored once."""
    tiles = math.ceil(M / block_m) * math.ceil(N / block_n)
    depth = math.ceil(K / block_k) * block_k
    loaded = itemsize * tiles * (block_m + block_n) * depth
    text = f"{tiles} programs load {block_m} rows of A and {block_n} columns of B, {depth} deep"
    assert work.bytes_loaded <= loaded, (
        f"{text}: at most {loaded:,} bytes; got {work.bytes_loaded:,} loaded. Is a tile loaded "
        "for each row, or twice?"
    )
    least = itemsize * (math.ceil(N / block_n) * M * K + math.ceil(M / block_m) * K * N)
    assert work.bytes_loaded >= (loaded if exact else least), (
        f"{text}: at least {least:,} bytes; got {work.bytes_loaded:,} loaded in kernels"
    )
    stored = itemsize * M * N
    assert work.bytes_stored == stored, (
        f"each element of C is stored once, {stored:,} bytes: got {work.bytes_stored:,} stored"
    )
    flops = 2 * tiles * block_m * block_n * depth
    assert work.dot_flops == flops, (
        f"one tl.dot for each pair of tiles, {flops:,} FLOPs: got {work.dot_flops:,}"
    )


class FirstWave(interpreter.Observer):
    """Runs the first programs of a launch only, and notes the different tiles that they load."""

    def __init__(self, programs):
        self.programs = programs
        self.tiles = defaultdict(set)

    def program(self, launch):
        return launch.program[0] < self.programs

    def load(self, launch, address, mask, itemsize):
        first = int(address[mask].min())
        self.tiles[launch.tensor_at(first)].add(first)


@step2
@interpreter_only
def test_triton_matmul_goes_row_by_row(lab, device):
    a, b = matrices(64, 48, 16, device=device)
    for programs, want in ((3, (1, 3)), (6, (2, 3))):
        with interpreter.observe(wave := FirstWave(programs)):
            lab.triton_matmul(a, b, 16, 16, 16)
        got = len(wave.tiles["a_ptr"]), len(wave.tiles["b_ptr"])
        assert got == want, (
            f"4 x 3 tiles, row by row: the first {programs} programs load {want} different tiles "
            f"of A and of B; got {got}. Program pid makes tile (pid // tiles_n, pid % tiles_n)"
        )


def far_matrix(device):
    """(16, 32) float16 whose columns lie 2**27 + 64 elements apart; little of it is real memory."""
    stride = 2**27 + 64
    try:
        storage = torch.empty(31 * stride + 16, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 8.6 GB of address space: {str(error)[:60]}")
    x = storage.as_strided((16, 32), (1, stride))
    x.copy_(oracle.inputs(16, 32, dtype=F16, device=device))
    return x


def check_far_loads(product, device):
    """Rows, columns and depth of a and b, each beyond 2**31 elements."""
    far = far_matrix(device)
    near, wide = matrices(16, 16, 32, F16, device)
    square = wide[:16]
    cases = {
        "the depth of a, within a tile": (far, wide, 32),
        "the depth of a, from one tile to the next": (far, wide, 16),
        "the rows of a": (far.t(), square, 16),
        "the depth of b, within a tile": (near, far.t(), 32),
        "the depth of b, from one tile to the next": (near, far.t(), 16),
        "the columns of b": (square, far, 16),
    }
    for what, (a, b, block_k) in cases.items():
        try:
            check(product, a, b, 16, 16, block_k)
        except AssertionError as error:
            message = f"{what} reaches beyond 2**31 elements: a 32-bit offset?\n  {error}"
            raise AssertionError(message) from None


@step2
def test_triton_matmul_offsets_beyond_32_bits(lab, device):
    check_far_loads(lab.triton_matmul, device)


def check_far_stores(lab, product, device, ragged):
    """C beyond 2**31 elements: in the interpreter only its last tile is made."""
    block, M, N = 256 if here.interpret else 128, 257 * 256 - ragged, 129 * 256 - ragged
    a, b = matrices(1, N, 16, F16, device)
    try:
        torch.empty(M, N, dtype=F16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4.4 GB of address space: {str(error)[:60]}")
    with lab.last_program_only() if here.interpret else contextlib.nullcontext():
        c = product(a.expand(M, 16), b, block, block, 16, num_warps=8)
    want = oracle.matmul(a, b[:, -40:], kernel=True)
    want.check(c[-1:, -40:])


@step2
def test_triton_matmul_stores_beyond_32_bits(lab, device):
    check_far_stores(lab, lab.triton_matmul, device, ragged=0)


@step2
@interpreter_only
def test_triton_matmul_is_the_kernels_work(lab, device):
    a, b = matrices(32, 32, 32, device=device)
    check_kernels_work(lab, lab.triton_matmul, a, b, 16, 16, 16)


def check_kernels_work(lab, product, *args):
    product(*args)
    with lab.no_program():
        c = product(*args)
    assert bool(c.isnan().all()), "no program ran, yet there are numbers: the kernel computes them"


@step2
def test_triton_matmul_follows_its_input(lab, device):
    check_follows(lab.triton_matmul, *matrices(32, 32, 32, device=device), 16, 16, 16)


def compiled(lab, request, wanted):
    """What became of the kernel of each (launcher, architecture, options)."""
    cached = hasattr(request.config, "cache")  # not with pytest -p no:cacheprovider
    found = xray.XRay(request.path, str(lab.file), cache=xray.CACHE if cached else None)
    units = [found.unit(launcher, arch, **options) for launcher, arch, options in wanted]
    found.compile(units)
    kernels = [found.of(unit)[0] for unit in units]
    for c in kernels:
        if c.unwritten:
            raise NotImplementedError(c.unwritten)
    return kernels


MAY_SPILL = 64  # bytes a thread: ptxas spills 8 to 40 of some right kernels at this tile


def check_compiled_well(lab, request, launcher, **options):
    """Compiles for every card, on tensor cores, with tiles of 128 x 64 and 64 x 64 copied ahead."""
    check_compiles(lab, request, launcher, may_spill=True, **options)
    found = compiled(lab, request, [(launcher, arch, options) for arch in cards.CARDS])
    for c in found:
        assert c.spill <= MAY_SPILL, (
            f"{c.arch}: {c.spill:,} bytes a thread are spilled, want at most {MAY_SPILL}: the "
            "kernel holds more at a time than registers have room for"
        )
        assert c.instructions["mma"] or c.instructions["wgmma"], (
            f"{c.arch}: no tensor-core instruction (mma or wgmma). tl.dot makes them of two half "
            'tiles; of float32 tiles with input_precision="ieee" it makes none'
        )
        # 128 x 64 and 64 x 64 numbers of 2 bytes, 16 bytes for each of 128 threads, 3 stages.
        got = c.instructions["cp.async"]
        assert got >= 36, (
            f"{c.arch}: want 36 asynchronous copies of 16 bytes, that is tiles of A and B copied "
            f"ahead while the tensor cores work; got {got}. The compiler must see that neighbours "
            "in a row lie side by side: wrap with %, or mask; tl.minimum hides it. And it copies "
            "ahead in a `for` loop, not in a `while` loop"
        )
    return found


@step2
@needs_compiler
@pytest.mark.timeout(240)
def test_triton_matmul_compiles_for_every_card(lab, request):
    for c in check_compiled_well(lab, request, "triton_matmul"):
        # 128 x 64 x 64: 4 warps with mma of 16 x 8 x 16, or together with wgmma of 64 x 64 x 16.
        kind, most = ("wgmma", 8) if c.instructions["wgmma"] else ("mma", 64)
        got = c.instructions[kind]
        assert got <= most, (
            f"{c.arch}: want {most} {kind} instructions for one product of two tiles, got {got}. "
            "Multiply half tiles as they are: in float32 (TF32) it takes twice as many"
        )


@step2
def test_triton_matmul_rejects(lab, device):
    a, b = matrices(32, 32, 64, device=device)
    tile = {"block_m": 16, "block_n": 16, "block_k": 16}
    lab.triton_matmul(a, b, **tile)
    check_kernel_rejects(lab.triton_matmul, a, b)
    for bad in ((a[:31], b), (a, b[:, :30]), (a[:, :60], b[:60])):
        with pytest.raises(ValueError, match="got"):
            lab.triton_matmul(*bad, **tile)


def check_kernel_rejects(product, a, b):
    check_rejects(product, a, b)
    with pytest.raises(ValueError, match="float64"):
        product(a.double(), b.double())
    for name in ("block_m", "block_n", "block_k"):
        for size in (0, 8, 24, 200):
            with pytest.raises(ValueError, match=name):
                product(a, b, **{name: size})
    if here.interpret:
        with pytest.raises(ValueError, match="bfloat16"):
            product(a.bfloat16(), b.bfloat16())


# ---------------------------------------------------------------- step 3

RAGGED = [
    # M, N, K, and the tile
    (37, 29, 43, 16, 16, 16),
    (17, 33, 49, 16, 32, 16),
    (50, 20, 40, 32, 16, 32),
    (5, 70, 33, 16, 64, 32),
    (40, 3, 16, 32, 16, 16),
    (20, 18, 2, 16, 16, 32),
    (33, 17, 1, 32, 16, 16),
    (1, 1, 1, 16, 16, 16),
    (32, 32, 64, 32, 32, 32),
]


@step3
@kernel_dtypes
def test_ragged_matmul(lab, device, dtype):
    for M, N, K, *tile in RAGGED:
        check(lab.ragged_matmul, *fenced(*matrices(M, N, K, dtype, device)), *tile)


@step3
def test_ragged_matmul_layouts(lab, device):
    for a, b in layouts(19, 23, 31, device).values():
        check(lab.ragged_matmul, a, b, 32, 16, 16)
        check_not_copied(lab)


@step3
@kernel_half_dtypes
def test_ragged_matmul_sums_in_float32(lab, device, dtype):
    check(lab.ragged_matmul, *long_sum(dtype, device), 16, 16, 64)
    check(lab.ragged_matmul, *huge_terms(dtype, device), 32, 32, 16)


@step3
def test_ragged_matmul_not_finite(lab, device):
    # Row 0 and the last are NaN: what wraps round or lies past the edge must not spread it.
    a, b = matrices(19, 18, 22, device=device)
    # Row 5 is infinite near the start of the depth, which is what an index past K wraps round to.
    a[0, 21], a[18, 3], b[7, 17], b[1, 0] = math.nan, math.nan, INF, -INF
    a[5, 2] = INF
    check(lab.ragged_matmul, *fenced(a, b), 16, 16, 16)


@step3
@interpreter_only
def test_ragged_matmul_moves_few_bytes(lab, device):
    for M, N, K, *tile in [(37, 50, 43, 16, 32, 16), (32, 32, 64, 16, 16, 32)]:
        check(lab.ragged_matmul, *matrices(M, N, K, device=device), *tile)
        check_work(lab.kernels, M, N, K, *tile)


@step3
def test_ragged_matmul_masks_no_even_depth(lab, device):
    # A kernel that is told EVEN_K trusts it. Told so of K = 24, it multiplies 16 or 32 deep; one
    # that masks in spite of it still gets 24 right.
    wide, deep = matrices(48, 48, 48, device=device)
    a, b = wide[:16, :24], deep[:24, :16]
    tile = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP": 1}
    check(lab.ragged_matmul, a, b, 16, 16, 16)
    c = torch.zeros(16, 16, device=device)
    # Not under guard, which refuses to read past K.
    lab._launch_ragged.__wrapped__(lab._ragged_kernel, a, b, c, True, **tile)
    error = (c - a @ b).abs().max().item()
    assert error > 0.1, (
        "where EVEN_K is True no load is masked along K: `if EVEN_K:` chooses between two versions "
        "of the loads. This kernel masks in both"
    )


@step3
def test_ragged_matmul_offsets_beyond_32_bits(lab, device):
    check_far_loads(lab.ragged_matmul, device)


@step3
def test_ragged_matmul_stores_beyond_32_bits(lab, device):
    check_far_stores(lab, lab.ragged_matmul, device, ragged=5)


@step3
@interpreter_only
def test_ragged_matmul_is_the_kernels_work(lab, device):
    a, b = matrices(20, 18, 22, device=device)
    check_kernels_work(lab, lab.ragged_matmul, a, b, 16, 16, 16)


@step3
def test_ragged_matmul_follows_its_input(lab, device):
    check_follows(lab.ragged_matmul, *matrices(20, 18, 22, device=device), 16, 16, 16)


@step3
@needs_compiler
@pytest.mark.timeout(240)
def test_ragged_matmul_compiles_for_every_card(lab, request):
    check_compiled_well(lab, request, "ragged_matmul")


@step3
def test_ragged_matmul_rejects(lab, device):
    a, b = matrices(32, 32, 64, device=device)
    lab.ragged_matmul(a, b)
    check_kernel_rejects(lab.ragged_matmul, a, b)
    with pytest.raises(ValueError, match="group"):
        lab.ragged_matmul(a, b, group=0)


# ---------------------------------------------------------------- step 4


def order(tiles_m, tiles_n, group):
    """The order of the handout, written out: bands, then columns, then rows."""
    found = []
    for top in range(0, tiles_m, group):
        for n in range(tiles_n):
            found += [(m, n) for m in range(top, min(top + group, tiles_m))]
    return found


ORDERS = [(1, 1, 1), (3, 4, 1), (3, 4, 2), (4, 3, 2), (7, 5, 3), (8, 2, 8), (5, 6, 9), (1, 9, 4)]


@step4
def test_grouped_order_worked_example(lab):
    got = [lab.grouped_order(pid, 3, 4, 2) for pid in range(12)]
    first, rest = [(0, 0), (1, 0), (0, 1), (1, 1)], [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert got[:4] == first, f"3 x 4 tiles, bands of 2: programs 0 to 3 make {first}; got {got[:4]}"
    assert got[8:] == rest, (
        f"the last band has one row only: programs 8 to 11 make {rest}; got {got[8:]}"
    )


@step4
def test_grouped_order_goes_band_by_band(lab):
    for tiles_m, tiles_n, group in ORDERS:
        want = order(tiles_m, tiles_n, group)
        got = [tuple(lab.grouped_order(p, tiles_m, tiles_n, group)) for p in range(len(want))]
        wrong = next((p for p, tile in enumerate(want) if got[p] != tile), None)
        assert wrong is None, (
            f"{tiles_m} x {tiles_n} tiles, bands of {group}: program {wrong} makes tile "
            f"{want[wrong]}, got {got[wrong]}. Each tile once: {len(set(got))} of {len(want)}"
        )


@step4
def test_wave_tiles(lab):
    # The handout's table: 132 programs on 64 x 64, 64 x 32 and 32 x 16 tiles.
    for tiles_m, tiles_n, group, want in [
        (64, 64, 1, (3, 64)),
        (64, 64, 8, (8, 17)),
        (64, 64, 64, (64, 3)),
        (64, 32, 1, (5, 32)),
        (64, 32, 8, (8, 17)),
        (32, 16, 1, (9, 16)),
        (32, 16, 8, (12, 16)),
    ]:
        got = tuple(lab.wave_tiles(tiles_m, tiles_n, group, 132))
        assert got == want, (
            f"{tiles_m} x {tiles_n} tiles, bands of {group}: the first 132 programs load {want} "
            f"different tiles of A and of B; got {got}"
        )


@step4
def test_wave_tiles_of_every_wave(lab):
    for tiles_m, tiles_n, group in ORDERS:
        for programs in (5, 7):
            tiles = order(tiles_m, tiles_n, group)
            for wave, start in enumerate(range(0, len(tiles), programs)):
                mine = tiles[start : start + programs]
                want = len({m for m, _ in mine}), len({n for _, n in mine})
                got = tuple(lab.wave_tiles(tiles_m, tiles_n, group, programs, wave))
                assert got == want, (
                    f"{tiles_m} x {tiles_n} tiles, bands of {group}, wave {wave} of {programs} "
                    f"programs makes {mine[:6]}...: want {want} tiles of A and B, got {got}"
                )


@step4
def test_grouped_order_rejects(lab):
    lab.grouped_order(0, 1, 1, 1)
    for bad in ({"tiles_m": 0}, {"tiles_n": -1}, {"group": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            lab.grouped_order(0, **{"tiles_m": 2, "tiles_n": 2, "group": 2, **bad})
        with pytest.raises(ValueError, match=next(iter(bad))):
            lab.wave_tiles(**{"tiles_m": 2, "tiles_n": 2, "group": 2, "programs": 2, **bad})
    with pytest.raises(ValueError, match="programs"):
        lab.wave_tiles(2, 2, 2, 0)
    # 4 tiles: two waves of 3 programs or of 2, one of 4.
    for programs, wave in ((3, 2), (3, -1), (2, 2), (4, 1)):
        with pytest.raises(ValueError, match=str(wave)):
            lab.wave_tiles(2, 2, 2, programs, wave)


@step4
@needs_triton
def test_program_order_is_grouped_order(lab, device):
    for tiles_m, tiles_n, group in ORDERS:
        got, want = (
            lab.program_order(tiles_m, tiles_n, group, device),
            order(tiles_m, tiles_n, group),
        )
        wrong = next((p for p, tile in enumerate(want) if got[p] != tile), None)
        assert wrong is None, (
            f"{tiles_m} x {tiles_n} tiles, bands of {group}: in the kernel program {wrong} makes "
            f"tile {want[wrong]}, got {got[wrong]}"
        )


@step4
@needs_triton
def test_ragged_matmul_in_grouped_order(lab, device):
    a, b = fenced(*matrices(70, 35, 20, F16, device))
    for group in (2, 3, 8):
        check(lab.ragged_matmul, a, b, 16, 16, 32, group=group)


@step4
@interpreter_only
def test_ragged_matmul_loads_the_tiles_of_its_order(lab, device):
    a, b = matrices(128, 128, 16, device=device)
    for group, want in ((1, (2, 8)), (4, (4, 4))):
        with interpreter.observe(wave := FirstWave(16)):
            lab.ragged_matmul(a, b, 16, 16, 16, group=group)
        got = len(wave.tiles["a_ptr"]), len(wave.tiles["b_ptr"])
        assert got == want, (
            f"8 x 8 tiles, bands of {group}: the first 16 programs load {want} different tiles of "
            f"A and of B; got {got}. Does the kernel take its tile from GROUP?"
        )


@step4
@needs_compiler
@pytest.mark.timeout(240)
def test_grouped_order_compiles_for_every_card(lab, request):
    check_compiled_well(lab, request, "ragged_matmul", group=8)


# ---------------------------------------------------------------- step 5


@step5
def test_shared_memory(lab):
    for major, tile, num_stages, itemsize, want in [
        (9, (128, 256, 64), 4, 2, 196_608),  # 4 tiles of A and B
        (12, (128, 256, 64), 4, 2, 147_456),  # 3: the fourth is in registers
        (8, (128, 256, 64), 3, 2, 98_304),
        (9, (128, 128, 32), 4, 4, 131_072),
        (9, (32, 128, 64), 4, 2, 61_440),  # 3: below 64 rows no wgmma
        (10, (64, 64, 64), 3, 2, 49_152),
        (8, (64, 64, 32), 1, 2, 8_192),  # never less than one
        (9, (64, 16, 32), 1, 4, 10_240),
    ]:
        got = lab.shared_memory(*tile, num_stages, itemsize, major)
        assert got == want, (
            f"tile {tile} of {itemsize} bytes an element, num_stages={num_stages}, compute "
            f"capability {major}: want {want:,} bytes, got {got:,}"
        )


# card -> (major, its limit, how many of CONFIGS fit in 16 bits, and in 32)
FITTING = {
    "sm_80": (8, 10, 7),
    "sm_86": (8, 9, 2),
    "sm_90": (9, 10, 7),
    "sm_120": (12, 9, 2),
}


@step5
@needs_triton
def test_fitting_configs_of_each_card(lab):
    for arch, (major, *counts) in FITTING.items():
        limit = cards.CARDS[arch].shared
        for itemsize, count in zip((2, 4), counts, strict=True):
            got = lab.fitting_configs(lab.CONFIGS, itemsize, major, limit)
            want = [c for c in lab.CONFIGS if _bytes(c, itemsize, major) <= limit]
            text = f"{arch}, {limit:,} bytes a program, {itemsize} bytes an element"
            assert len(want) == count, f"{text}: CONFIGS were changed: {count} of them fit"
            assert list(got) == want, (
                f"{text}: these fit: {[str(c) for c in want]}; got {[str(c) for c in got]}"
            )
    large = next(c for c in lab.CONFIGS if _bytes(c, 2, 9) == 196_608)
    assert list(lab.fitting_configs([large], 2, 9, 196_608)) == [large], "just enough is enough"
    three = [
        next(c for c in lab.CONFIGS if _bytes(c, 2, 12) == n) for n in (147_456, 55_296, 98_304)
    ]
    with pytest.raises(ValueError, match=".") as refused:
        lab.fitting_configs(three, 2, 12, 50_000)
    said = str(refused.value).replace(",", "").replace("_", "")
    assert "50000" in said, f"the message says what was wanted, at most 50,000 bytes: {said}"
    assert "55296" in said, f"the message says what the smallest needs, 55,296 bytes: {said}"


def _bytes(config, itemsize, major):
    m, n, k = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    copies = config.num_stages - (0 if major == 9 and m >= 64 else 1)
    return copies * (m + n) * k * itemsize


def pretend_card(monkeypatch, major, limit):
    """torch reports a card that is not there."""
    card = SimpleNamespace(major=major, minor=0, shared_memory_per_block_optin=limit)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)


@step5
@needs_triton
def test_prune_for_card_asks_the_card_and_the_dtype(lab, monkeypatch):
    pretend_card(monkeypatch, 12, 101_376)
    for dtype, count in ((F16, 9), (F32, 2)):
        named_args = {"a_ptr": torch.empty(4, 4, dtype=dtype), "M": 4, "N": 4, "K": 4}
        got = lab.prune_for_card(lab.CONFIGS, named_args, EVEN_K=True, grid=None)
        assert len(got) == count, f"{count} of CONFIGS fit an RTX 5060 in {dtype}: got {len(got)}"


@step5
@interpreter_only
@needs_triton
def test_autotuned_kernel_tries_what_fits_once_a_bucket(lab, monkeypatch):
    """With a pretended card and clock: the tuner's own choices, no time is taken."""
    import triton

    tuner, trials = lab.autotuned_kernel(), []
    assert lab.autotuned_kernel() is tuner, "made once: a new tuner would try everything again"
    for name in ("reset_to_zero", "restore_value"):
        assert not getattr(tuner, name, None), (
            f"{name} copies or clears a tensor in each trial; this kernel overwrites all of C"
        )

    def clock(call, quantiles=None):  # runs nothing; the third to be tried is the fastest
        trials.append(call)
        return [1.0 if len(trials) % 9 == 3 else 2.0] * 3

    lab.tuned_matmul(*matrices(1, 1, 1))  # Triton imports the rest of itself at the first launch
    pretend_card(monkeypatch, 12, 101_376)
    monkeypatch.setitem(vars(tuner), "do_bench", clock)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    for M, N, K, tried in [
        (20, 40, 70, 9),
        (30, 60, 90, 9),
        (17, 33, 128, 9),
        (33, 40, 70, 18),
        (20, 20, 70, 27),
        (20, 40, 60, 36),
    ]:
        check(lab.tuned_matmul, *matrices(M, N, K, F16))
        assert len(trials) == tried, (
            f"M, N, K = {M}, {N}, {K}: want {tried} trials so far, 9 for each new bucket (sizes "
            f"rounded up to powers of two) and none for a known one; got {len(trials)}"
        )
    third = lab.fitting_configs(lab.CONFIGS, 2, 12, 101_376)[2].kwargs
    lab.tuned_matmul(*matrices(32, 40, 65, F16))
    got, want = lab.kernels.dot_flops, 2 * third["BLOCK_M"] * third["BLOCK_N"] * 128
    assert got == want, (
        f"the fastest of the trials, {third}, is launched: one program, {want:,} FLOPs; got {got:,}"
    )
    for major, limit, dtype, count in ((9, 232_448, F16, 10), (12, 101_376, F32, 2)):
        pretend_card(monkeypatch, major, limit)
        trials.clear()
        lab.tuned_matmul(*matrices(20, 80, 60, dtype))
        assert len(trials) == count, (
            f"compute capability {major}, {limit:,} bytes, {dtype}: {count} of CONFIGS fit and are "
            f"tried; got {len(trials)}. prune_for_card asks the card and the inputs"
        )


@step5
@needs_triton
def test_every_config_is_right_alone(lab, device):
    # Together one may hide behind what another has written.
    for config in lab.CONFIGS:
        m, n, _ = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        if not here.interpret and config not in lab.prune_for_card(
            lab.CONFIGS, {"a_ptr": torch.empty(1, dtype=F16, device=device)}
        ):
            continue  # does not fit on this card
        for K in (65, 192):
            a, b = matrices(m - 1, n - 3, K, F16, device)
            check(lab.tuned_matmul, *fenced(a, b), config=config)


@step5
@needs_triton
@kernel_dtypes
def test_tuned_matmul(lab, device, dtype, monkeypatch):
    if here.interpret:
        from triton.runtime.autotuner import Autotuner

        def run(*args, **kwargs):
            raise AssertionError("in the interpreter nothing is timed: launch INTERPRETED")

        monkeypatch.setattr(Autotuner, "run", run)
    for M, N, K in [(50, 70, 64), (33, 17, 45), (1, 1, 1)]:
        check(lab.tuned_matmul, *fenced(*matrices(M, N, K, dtype, device)))


@step5
@needs_triton
@pytest.mark.skipif(here.interpret, reason="there is nothing to time in the interpreter")
def test_tuned_matmul_tries_once_a_bucket_on_a_gpu(lab, device):
    tuner = lab.autotuned_kernel()
    before = len(tuner.cache)  # of other tests in this process
    for M, N, K, known in [(200, 300, 100, 1), (160, 257, 128, 1), (300, 300, 100, 2)]:
        check(lab.tuned_matmul, *matrices(M, N, K, BF16, device))
        new = len(tuner.cache) - before
        assert new == known, f"M, N, K = {M}, {N}, {K}: want {known} buckets tried, got {new}"


@step5
@needs_triton
def test_tuned_matmul_rejects(lab, device):
    a, b = matrices(32, 32, 64, device=device)
    lab.tuned_matmul(a, b)
    lab.autotuned_kernel()
    check_rejects(lab.tuned_matmul, a, b)
    with pytest.raises(ValueError, match="float64"):
        lab.tuned_matmul(a.double(), b.double())


# architecture -> numbers of the CONFIGS that are compiled for it
COMPILED = {"sm_80": (0,), "sm_90": (0, 4, 7, 9), "sm_120": (1, 4, 8)}


def options(config):
    """A triton.Config as options of the X-ray."""
    tile = {name.lower(): config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
    return {**tile, "num_warps": config.num_warps, "num_stages": config.num_stages}


@step5
@needs_compiler
@pytest.mark.timeout(180)
def test_shared_memory_is_what_the_compiler_says(lab, request):
    lab.shared_memory(16, 16, 16, 2, 2, 8)
    wanted = [
        (arch, lab.CONFIGS[number]) for arch, numbers in COMPILED.items() for number in numbers
    ]
    found = compiled(lab, request, [("tuned_matmul", arch, options(c)) for arch, c in wanted])
    for (arch, config), c in zip(wanted, found, strict=True):
        assert c.error is None, f"{arch}, {config}: {c.error}"
        m, n, k = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        said = lab.shared_memory(m, n, k, config.num_stages, 2, int(arch[3:]) // 10)
        assert said == c.shared, (
            f"{arch}, {config}: compiled, your kernel takes {c.shared:,} bytes of shared memory; "
            f"shared_memory says {said:,}"
        )
        kind = "wgmma" if arch == "sm_90" and m >= 64 else "mma"
        assert c.instructions[kind], f"{arch}, {config}: no tensor-core instruction ({kind})"
