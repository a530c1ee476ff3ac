"""Tests of lab 10. Run `pytest labs/10_fast_attention`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
`oracle` gives inputs and float64 results with their error budgets. The rungs of the ladder are held
to the same numerics: the same checks run on each.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from labs._harness import interpreter, memory, oracle, runtime, xray
from labs._harness.cards import CARDS, FITS, complaint, state, verdict
from labs._harness.cases import (
    check_kept,
    check_not_written,
    fenced_qkv,
    interpreter_only,
    kernel_dtypes,
    needs_compiler,
    needs_triton,
    step,
)
from labs._harness.compiler import Compiled

STEPS = {
    1: "attention_exp2",
    2: "attention_two_loops",
    3: "attention_ordered",
    4: "attention_tuned",
    5: "attention_tma",
    6: "attention_fp8",
}

# Most elements of a row that torch's softmax or logsumexp may see at a time, by function.
ROW_LIMITS = dict.fromkeys([*STEPS.values(), "attend_fp8", "quantise"], 0)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3 = torch.float8_e4m3fn

here = runtime.setup()
causal_or_full = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
late_or_not = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
score_kinds = pytest.mark.parametrize("kind", ["large", "growing", "shrinking", "low"])
lengths = pytest.mark.parametrize("T", [1, 37])
# (T, block_m, block_n): tiles higher than wide and wider than high, ragged, whole, one above.
tilings = pytest.mark.parametrize(
    ("T", "block_m", "block_n"),
    [(65, 32, 16), (50, 16, 32), (50, 64, 16), (64, 32, 32), (33, 32, 16)],
)

step1 = step(1, needs_triton)
step2 = step(2, needs_triton)
step3 = step(3, needs_triton)
step4 = step(4, needs_triton)
step5 = step(5, needs_triton)
step6 = step(6, needs_triton)


# ---------------------------------------------------------------- what all rungs are held to


def rung(lab, step, late=False):
    """The function of a step as f(q, k, v, causal, scale, block_m, block_n)."""
    if step == 4:

        def tuned(q, k, v, causal=False, scale=None, block_m=16, block_n=16):
            config = lab.Config(block_m, block_n, 4, 2, late)
            return lab.attention_tuned(q, k, v, causal, scale, config=config)

        return tuned
    function = getattr(lab, STEPS[step])

    def run(q, k, v, causal=False, scale=None, block_m=16, block_n=16):
        return function(q, k, v, causal, scale, block_m=block_m, block_n=block_n)

    return run


def check(run, q, k, v, causal=False, scale=None, block_m=16, block_n=16):
    got = run(q, k, v, causal, scale, block_m, block_n)
    want = oracle.attention(q, k, v, causal, kernel=True, tiles=(block_m, block_n), scale=scale)
    oracle.check_all(want, got, "attention")


def check_huge_equal_scores(run, device):
    """Scores near +-1e11: equal scores weigh equally, however they were rounded on the way."""
    dtype = F32 if here.interpret else BF16
    for D, sign, causal in ((32, 1, False), (64, 1, True), (64, -1, True)):
        x = torch.full((1, 1, 33, D), 133120.0, dtype=dtype, device=device)
        out, lse = run(x, sign * x, x, causal)
        assert (out == x).all().item(), (
            f"equal scores weigh equally: want 133120, got {out[0, 0, -1, 0].item()}"
        )
        want = sign * 133120.0**2 * math.sqrt(D)
        off = (lse.double() / want - 1).abs().max().item()
        assert off < 1e-6, (
            f"lse is the score itself here: want {want:.7g}, got {lse[0, 0, -1].item():.7g}, "
            f"{off:.2g} of it off; usual causes: HUGE is not the same limit in p and in lse, or "
            "`steep` counts as `slope`"
        )


def check_other_heads_unread(run, device, dtype=F32, causal=False):
    """NaN in the heads before and behind must not reach this one: T is ragged on purpose."""
    q, k, v = oracle.qkv(1, 3, 21, 32, dtype=dtype, device=device)
    for x in (q, k, v):
        x[:, 0], x[:, 2] = math.nan, math.nan
    out, lse = run(q, k, v, causal, None, 32, 32)
    middle = tuple(x[:, 1:2] for x in (q, k, v))
    want = oracle.attention(*middle, causal, kernel=True)
    oracle.check_all(want, (out[:, 1:2], lse[:, 1:2]), "attention")


def check_layouts_and_scale(run, device, dtype=F32):
    q, k, v = oracle.qkv(1, 2, 17, 16, dtype=dtype, device=device, layout="transposed")
    check(run, q, k, v, True)
    check(run, q.contiguous(), k.contiguous(), v, False)  # only V has other strides
    check(run, q, k, v, False, scale=0.75)


def check_key_lengths(run, device, dtype=F32):
    for S in (1, 33):
        q, k, v = oracle.qkv(1, 2, 9, 16, S=S, dtype=dtype, device=device)
        check(run, q, k, v, block_n=32)


def check_follows_its_input(run, device, dtype=F32):
    q, k, v = oracle.qkv(1, 1, 20, 16, dtype=dtype, device=device)
    out, lse = run(q, k, v)
    kept = out.clone(), lse.clone()
    for x in (q, k, v):
        x.copy_(oracle.inputs(1, 1, 20, 16, dtype=dtype, device=device))
    check(run, q, k, v)
    check_kept((out, lse), kept)


def check_is_the_kernels_work(lab, run, device, dtype=F32):
    q, k, v = oracle.qkv(1, 1, 20, 16, dtype=dtype, device=device)
    run(q, k, v)
    with lab.no_program():
        results = run(q, k, v)
    check_not_written(**dict(zip(("out", "lse"), results, strict=True)))


def check_moves_few_bytes(lab, run, device, block_m, block_n, causal, dtype=F32):
    B, H, T, D = 1, 1, 70, 16
    q, k, v = oracle.qkv(B, H, T, D, dtype=dtype, device=device)
    check(run, q, k, v, causal, None, block_m, block_n)
    work, row = lab.kernels, D * q.element_size()
    keys = flops = 0
    for start in range(0, T, block_m):
        tiles = math.ceil((min(start + block_m, T) if causal else T) / block_n)
        keys += min(tiles * block_n, T)
        flops += tiles * 4 * block_m * block_n * D
    want = B * H * (T + 2 * keys) * row
    assert work.bytes_loaded <= want, (
        f"q once, and for each query tile the keys and values that it sees: {want} bytes; "
        f"got {work.bytes_loaded}"
    )
    assert work.dot_flops == B * H * flops, (
        f"two products a visited tile: {B * H * flops} FLOPs; got {work.dot_flops}"
    )
    stored = B * H * T * (row + 4)
    assert work.bytes_stored == stored, (
        f"out and lse are written once: {stored} bytes; got {work.bytes_stored}"
    )


def check_rejects(lab, run, device, dtype=F32):
    q, k, v = oracle.qkv(1, 1, 8, 16, dtype=dtype, device=device)
    run(q, k, v)
    short = k[:, :, :5]
    for bad in ((q[0], k, v), (q, k[..., :8], v), (q, k, v.half() if dtype == F32 else v.float())):
        with pytest.raises(ValueError, match="got"):
            run(*bad)
    with pytest.raises(ValueError, match="T=8, S=5"):
        run(q, short, short, True)
    with pytest.raises(ValueError, match="12"):
        run(*(x[..., :12] for x in (q, k, v)))
    with pytest.raises(ValueError, match="float64"):
        run(q.double(), k.double(), v.double())
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="scale"):
            run(q, k, v, False, scale)
    for block in (0, 8, 24):
        with pytest.raises(ValueError, match="block_m"):
            run(q, k, v, block_m=block)
        with pytest.raises(ValueError, match="block_n"):
            run(q, k, v, block_n=block)
    if here.interpret:
        with pytest.raises(ValueError, match="bfloat16"):
            run(q.bfloat16(), k.bfloat16(), v.bfloat16())


def lazy(*shape, dtype, device):
    """A tensor whose memory is taken as it is written; skips where there is no room for it."""
    try:
        return torch.empty(*shape, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4 to 7 GB of address space: {str(error)[:60]}")


# H, T, D, block_m and block_n: few programs in the interpreter, small tiles on a card.
HEADS_BEYOND_32_BITS = 16_400, 520, 256, 512 if here.interpret else 64, 64


def check_offsets_beyond_32_bits(lab, run, device):
    """The last query tile of many heads: its head begins past element 2**31 of q, k, v, out."""
    H, T, D, block_m, block_n = HEADS_BEYOND_32_BITS
    x = lazy(1, H, T, D, dtype=F16, device=device)
    x[:, -1:] = oracle.inputs(1, 1, T, D, dtype=F16, device=device)
    few = lab.last_program_only() if here.interpret else contextlib.nullcontext()
    with few:
        out, lse = run(x, x, x, False, None, block_m, block_n)
    last, rows = x[:, -1:], slice(512, T)
    want = oracle.attention(last[:, :, rows], last, last, kernel=True)
    oracle.check_all(want, (out[:, -1:, rows], lse[:, -1:, rows]), "the last head")


def name_of_config(config) -> str:
    """Such as "128x64, 8 warps, 3 stages, late"."""
    late = "late" if config.late else "not late"
    warps, stages = config.num_warps, config.num_stages
    return f"{config.block_m}x{config.block_n}, {warps} warps, {stages} stages, {late}"


def check_compiles(lab, request, launcher, archs=tuple(CARDS), config_on=None, **options):
    """For each card: compiles, fits, and spills nothing.

    Args:
        config_on: arch such as 90 -> the Config that is launched there; None: that of `options`.
    """
    cached = hasattr(request.config, "cache")  # not with pytest -p no:cacheprovider
    x = xray.XRay(request.path, str(lab.file), cache=xray.CACHE if cached else None)
    units = [x.unit(launcher, arch, card=arch, **options) for arch in archs]
    x.compile(units)
    kernels = [c for unit in units for c in x.of(unit)]
    for c in kernels:
        if c.unwritten:
            raise NotImplementedError(c.unwritten)
    bad = []
    for c in kernels:
        if state(c) != FITS:
            of = {name: c.options[name] for name in lab.Config._fields if name in c.options}
            config = config_on(int(c.arch[3:])) if config_on else lab.Config(**of)
            D = c.options["head_dim"]
            where = launcher if config_on else f"{launcher} D={D}"
            bad.append(f"{where}, {name_of_config(config)}: {c.kernel} on {c.arch} {verdict(c)}")
            bad += complaint(c, lab.file) if c.error else []
    if bad:
        bad.append(
            "want each to fit without spills; usual causes: too large a tile for its warps, "
            "pointers computed anew in the loop, a state that is not float32, an int64 number as a "
            "descriptor's coordinate, a condition in a loop that takes none"
        )
    assert not bad, "\n".join(bad)
    return kernels


@contextlib.contextmanager
def interpreter_with(**methods):
    """The interpreter's builder with some methods replaced; the test is skipped where it has none.

    Each is made by a function of the method that it replaces.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    for name in methods:
        if not hasattr(builder, name):
            pytest.skip(f"this Triton's interpreter has no {name}")
    before = {name: getattr(builder, name) for name in methods}
    for name, make in methods.items():
        setattr(builder, name, make(before[name]))
    try:
        yield
    finally:
        for name in methods:
            delattr(builder, name)  # what is left is the class's own


@contextlib.contextmanager
def counting(method):
    """A list with one entry more for each call of that method of the interpreter's builder."""
    calls = []

    def counted(before):
        def call(*args, **kwargs):
            calls.append(method)
            return before(*args, **kwargs)

        return call

    with interpreter_with(**{method: counted}):
        yield calls


@contextlib.contextmanager
def true_fma():
    """Within the block tl.fma rounds once, as on a GPU; the interpreter itself rounds twice."""

    def make(_):
        from triton.runtime.interpreter import TensorHandle

        def create_fma(x, y, z):
            exact = x.data.astype(np.float64) * y.data + z.data  # 48 bits of product fit in 53
            return TensorHandle(exact.astype(np.float32), z.dtype.scalar)

        return create_fma

    with interpreter_with(create_fma=make) if here.interpret else contextlib.nullcontext():
        yield


class Events(interpreter.Observer):
    """What the programs of an attention kernel do, in order; B = H = 1, and no two sides alike.

    Attributes:
        of: program -> its events. ("load", name, row, masked) for a tile loaded, of the tensor
            "q", "k" or "v" from `row` on; ("dot", "scores" or "values"); (name, "tile") for an
            operation on a tile of scores, such as ("exp2", "tile").
    """

    OPERATIONS = ("select", "fma", "exp2", "exp", "fmul", "fadd", "fsub", "fdiv")

    def __init__(self, block_m, block_n, D):
        assert len({block_m, block_n, D, 1}) == 4
        self.block_m, self.block_n, self.D = block_m, block_n, D
        self.of: dict[int, list[tuple]] = {}
        self.launch_now, self.plain, self.now = None, False, []

    def program(self, launch):
        self.launch_now = launch
        kept = self.of if {"k_ptr", "k_desc"} & launch.tensors.keys() else {}
        self.now = kept.setdefault(launch.program[0], [])
        return True

    def load(self, launch, address, mask, itemsize):
        if address.ndim == 2 and self.plain is not None and mask.any():
            name = launch.tensor_at(int(address[mask].min()))
            if name != "?":
                x = launch.tensors[name]
                place = (int(address[mask].min()) - x.data_ptr()) // itemsize
                row = place // x.stride(-2) if x.shape[-1] == self.D else place
                self.now.append(("load", name.removesuffix("_ptr"), row, not self.plain))

    def dot(self, launch, m, n, k):
        self.now.append(("dot", "scores" if (n, k) == (self.block_n, self.D) else "values"))

    def watching(self, descriptors):
        """The context in which the interpreter tells the rest, descriptors' loads if wanted."""
        return interpreter_with(
            create_load=self._plain,
            **({"create_descriptor_load": self._by_descriptor} if descriptors else {}),
            **{f"create_{name}": self._counted(name) for name in self.OPERATIONS},
        )

    def _plain(self, inner):
        def create(*args):
            self.plain = True
            try:
                return inner(*args)
            finally:
                self.plain = False

        return create

    def _by_descriptor(self, inner):
        def create(descriptor, indices, *args):
            name = self.launch_now.tensor_at(int(descriptor.base.data.item()))
            turned = self.launch_now.tensors[name].shape[-1] != self.D  # its columns are keys
            row = int(indices[-1 if turned else -2].data.item())
            self.now.append(("load", name.removesuffix("_desc"), row, False))
            self.plain = None  # its own load is told of
            try:
                return inner(descriptor, indices, *args)
            finally:
                self.plain = False

        return create

    def _counted(self, name):
        def make(inner):
            def create(*args):
                result = inner(*args)
                if np.shape(result.data) == (self.block_m, self.block_n):
                    self.now.append((name, "tile"))
                return result

            return create

        return make


def events_of(run, q, k, v, causal, block_m, block_n, descriptors=False) -> dict[int, list[tuple]]:
    """The events of each program of run(q, k, v, causal, None, block_m, block_n)."""
    seen = Events(block_m, block_n, q.shape[-1])
    with interpreter.observe(seen), seen.watching(descriptors):
        run(q, k, v, causal, None, block_m, block_n)
    return seen.of


def check_operations(events, also=0):
    """A score costs one multiply-add and one exp2, and `also` multiplications before them."""
    everything = [event for program in events.values() for event in program]
    tiles = max(1, everything.count(("dot", "scores")))
    got = {name: everything.count((name, "tile")) / tiles for name in Events.OPERATIONS[1:]}
    want = dict.fromkeys(got, 0) | {"fma": 1, "exp2": 1, "fmul": also}
    assert got == want, (
        f"operations a score: want {want}, got {got}; usual causes: exp for exp2, a product and a "
        "difference where tl.fma does both, 2**SHIFT as a factor and not in the addend"
    )


def masked_tiles(T, block_m, block_n, causal, late=False) -> int:
    """Key tiles whose scores have to be masked; late, the first of each query tile always is."""
    total = 0
    for start in range(0, T, block_m):
        seen = min(start + 1, T) if causal else T
        tiles = math.ceil((min(start + block_m, T) if causal else T) / block_n)
        whole = seen // block_n
        total += tiles - whole + (late and whole > 0)
    return total


def check_masks(events, T, block_m, block_n, causal, late=False):
    """Scores are masked, and keys and values loaded with a mask, only where some are missing."""
    everything = [event for program in events.values() for event in program]
    want = masked_tiles(T, block_m, block_n, causal, late)
    got = everything.count(("select", "tile"))
    assert got == want, (
        f"{want} tiles of scores need a mask: got {got} masked; usual causes: MASKED is not passed "
        "on, or `full` is too small"
    )
    masked = {"k": 0, "v": 0}
    for what, *event in everything:
        if what == "load" and event[0] in masked:
            masked[event[0]] += event[2]
    most = {"k": want, "v": math.ceil(T / block_m) if late else want}
    assert all(masked[name] <= most[name] for name in most), (
        f"loads with a mask: want at most {most}, got {masked}; the usual cause: `_load` is asked "
        "for a mask in the loop over whole tiles, too, which costs a comparison and a select each"
    )


def check_late(events, block_n):
    """The order of a late program: scores of a tile, product of the tile before, softmax."""
    for program, found in events.items():
        order, loads = [], []
        for event in found:
            if event[0] == "load" and event[1] in ("k", "v"):
                loads.append((event[1], event[2]))
            elif event[0] == "dot" or event == ("exp2", "tile"):
                order.append(event[1] if event[0] == "dot" else "exp2")
        n = order.count("scores")
        want = ["scores", "exp2"] + ["scores", "values", "exp2"] * (n - 1) + ["values"]
        assert order == want, (
            f"program {program}, products and exp2: want {want}, got {order}; the usual cause: the "
            "product with v stands before the next scores or after their softmax, so nothing runs "
            "while the softmax is computed"
        )
        rows = [block_n * i for i in range(n)]
        want = [("k", 0)]
        for before, row in zip(rows, rows[1:], strict=False):
            want += [("k", row), ("v", before)]
        want.append(("v", rows[-1]))
        assert loads == want, (
            f"program {program}, tiles loaded, by first rows: want {want}, got {loads}; usual "
            "causes: v is loaded with k and not with its p, or a tile of v is loaded twice"
        )


# ---------------------------------------------------------------- step 1


@step1
@causal_or_full
@kernel_dtypes
@lengths
def test_exp2(lab, device, T, dtype, causal):
    check(rung(lab, 1), *fenced_qkv(2, 1, T, 32, dtype=dtype, device=device), causal)


@step1
@causal_or_full
@tilings
def test_exp2_tiles(lab, device, T, block_m, block_n, causal):
    q, k, v = fenced_qkv(1, 2, T, 16, device=device)
    check(rung(lab, 1), q, k, v, causal, None, block_m, block_n)


@step1
@pytest.mark.parametrize("D", [16, 64, 128, 256])
def test_exp2_head_dims(lab, device, D):
    check(rung(lab, 1), *fenced_qkv(1, 2, 21, D, device=device), True)


@step1
@causal_or_full
@score_kinds
def test_exp2_score_ranges(lab, device, kind, causal):
    check(rung(lab, 1), *fenced_qkv(1, 1, 40, 32, kind=kind, device=device), causal)


@step1
def test_exp2_huge_equal_scores(lab, device):
    with true_fma():
        check_huge_equal_scores(rung(lab, 1), device)


@step1
@pytest.mark.parametrize("power", [6, 10, 13, 17, 20])
def test_exp2_tiles_agree_on_their_reference(lab, device, power):
    # All scores of a row are equal and large: out is the mean of the values so far. The rounding
    # of the maximum must be the same in p, in alpha and in lse, or early tiles weigh more than
    # late ones.
    x = 1.375 * 2.0**power  # few bits: the products are exact in TF32, too
    q = torch.full((1, 1, 80, 16), x, device=device)
    v = oracle.inputs(1, 1, 80, 16, device=device) + 2
    with true_fma():
        out, lse = rung(lab, 1)(q, q, v, True)
    count = torch.arange(1, 81, device=device)
    want = v.double().cumsum(2) / count[:, None]
    eps = 1e-5 if here.interpret else 1e-2
    score = 16 * x * x / 4
    same = (
        "usual causes: alpha, p and lse do not use the same rounded maximum; from HUGE on the "
        "factor is not `steep`, which is lse's unit there"
    )
    off = ((out.double() - want).abs().max() / want.abs().max()).item()
    assert off < eps, (
        f"equal scores of {score:.3g}, so out is the mean of the values so far: off by {off:.2g} "
        f"of the largest, want less than {eps:g}; {same}"
    )
    wanted = score + count.log().double()
    error = (lse[0, 0].double() - wanted).abs()
    i = int(error.argmax())
    assert error[i].item() < 4e-7 * score, (
        f"equal scores of {score:.3g}: lse of row {i}: want {wanted[i].item():.7g}, got "
        f"{lse[0, 0, i].item():.7g}, off by {error[i].item() / score:.2g} of the score; {same}"
    )


@step1
def test_exp2_half_scores_do_not_overflow(lab, device):
    q, k, v = fenced_qkv(1, 1, 20, 64, dtype=F16, device=device)
    check(rung(lab, 1), q * 60, k * 60, v)  # q.k before scaling passes 65,504


@step1
def test_exp2_lse_is_natural(lab, device):
    v = oracle.inputs(1, 1, 2, 16, device=device)
    _, lse = rung(lab, 1)(torch.zeros_like(v), v, v)
    got = lse[0, 0].tolist()
    assert max(abs(x - math.log(2)) for x in got) < 1e-6, (
        f"two equal scores of 0: want lse log 2 = 0.6931 in both rows, got {got}"
    )


@step1
def test_exp2_layouts_and_scale(lab, device):
    check_layouts_and_scale(rung(lab, 1), device)


@step1
def test_exp2_key_lengths(lab, device):
    check_key_lengths(rung(lab, 1), device)


@step1
@interpreter_only
@causal_or_full
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_exp2_moves_few_bytes(lab, device, block_m, block_n, causal):
    check_moves_few_bytes(lab, rung(lab, 1), device, block_m, block_n, causal)


@step1
@interpreter_only
def test_exp2_costs_one_multiply_add_and_one_exp2(lab, device):
    q, k, v = oracle.qkv(1, 1, 40, 64, device=device)
    check_operations(events_of(rung(lab, 1), q, k, v, True, 32, 16))


@step1
def test_exp2_offsets_beyond_32_bits(lab, device):
    check_offsets_beyond_32_bits(lab, rung(lab, 1), device)


@step1
@interpreter_only
def test_exp2_is_the_kernels_work(lab, device):
    check_is_the_kernels_work(lab, rung(lab, 1), device)


@step1
def test_exp2_follows_its_input(lab, device):
    check_follows_its_input(rung(lab, 1), device)


@step1
def test_exp2_rejects(lab, device):
    check_rejects(lab, rung(lab, 1), device)
    q = oracle.inputs(1, 1, 1, 16, device=device).expand(70_000, 1, 1, 16)
    with pytest.raises(ValueError, match="65,535"):
        rung(lab, 1)(q, q, q)


@step1
@needs_compiler
@pytest.mark.timeout(300)
def test_exp2_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "attention_exp2")


# ---------------------------------------------------------------- step 2


@step2
@causal_or_full
@kernel_dtypes
@lengths
def test_two_loops(lab, device, T, dtype, causal):
    check(rung(lab, 2), *fenced_qkv(1, 2, T, 32, dtype=dtype, device=device), causal)


@step2
@causal_or_full
@tilings
def test_two_loops_tiles(lab, device, T, block_m, block_n, causal):
    q, k, v = fenced_qkv(1, 2, T, 16, device=device)
    check(rung(lab, 2), q, k, v, causal, None, block_m, block_n)


@step2
@causal_or_full
@score_kinds
def test_two_loops_score_ranges(lab, device, kind, causal):
    check(rung(lab, 2), *fenced_qkv(1, 1, 40, 32, kind=kind, device=device), causal)


@step2
def test_two_loops_huge_equal_scores(lab, device):
    with true_fma():
        check_huge_equal_scores(rung(lab, 2), device)


@step2
def test_two_loops_other_heads_unread(lab, device):
    check_other_heads_unread(rung(lab, 2), device)


@step2
def test_two_loops_layouts_and_key_lengths(lab, device):
    check_layouts_and_scale(rung(lab, 2), device)
    check_key_lengths(rung(lab, 2), device)


@step2
@interpreter_only
@causal_or_full
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_two_loops_moves_few_bytes(lab, device, block_m, block_n, causal):
    check_moves_few_bytes(lab, rung(lab, 2), device, block_m, block_n, causal)


@step2
@interpreter_only
@causal_or_full
@pytest.mark.parametrize(
    ("T", "block_m", "block_n"), [(128, 64, 16), (128, 16, 64), (100, 64, 16), (65, 16, 64)]
)
def test_two_loops_masks_only_where_needed(lab, device, T, block_m, block_n, causal):
    q, k, v = oracle.qkv(1, 1, T, 32, device=device)
    events = events_of(rung(lab, 2), q, k, v, causal, block_m, block_n)
    check_masks(events, T, block_m, block_n, causal)


@step2
def test_two_loops_offsets_beyond_32_bits(lab, device):
    check_offsets_beyond_32_bits(lab, rung(lab, 2), device)


@step2
@interpreter_only
def test_two_loops_is_the_kernels_work(lab, device):
    check_is_the_kernels_work(lab, rung(lab, 2), device)


@step2
def test_two_loops_follows_its_input(lab, device):
    check_follows_its_input(rung(lab, 2), device)


@step2
def test_two_loops_rejects(lab, device):
    check_rejects(lab, rung(lab, 2), device)


@step2
@needs_compiler
@pytest.mark.timeout(300)
def test_two_loops_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "attention_two_loops")


# ---------------------------------------------------------------- step 3


@step3
@causal_or_full
@kernel_dtypes
@lengths
def test_ordered(lab, device, T, dtype, causal):
    check(rung(lab, 3), *fenced_qkv(2, 1, T, 32, dtype=dtype, device=device), causal)


@step3
@causal_or_full
@pytest.mark.parametrize("group", [1, 2, 3, 99])
def test_ordered_groups(lab, device, group, causal):
    def run(q, k, v, causal, scale, block_m, block_n):
        return lab.attention_ordered(
            q, k, v, causal, scale, block_m=block_m, block_n=block_n, group=group
        )

    check(run, *fenced_qkv(1, 5, 20, 16, device=device), causal, None, 16, 16)


@step3
def test_ordered_huge_equal_scores(lab, device):
    with true_fma():
        check_huge_equal_scores(rung(lab, 3), device)


@step3
def test_ordered_other_heads_unread(lab, device):
    check_other_heads_unread(rung(lab, 3), device, causal=True)


def written_by_program(run, tiles, heads, D, dtype, device) -> list[tuple[int, int]]:
    """(head, query tile) that each program of run(q, k, v, block_m) writes, in their order."""
    block = 16

    class Places(interpreter.Observer):
        def __init__(self):
            self.found = {}

        def store(self, launch, address, mask, itemsize):
            active = address[mask]
            if active.size and launch.tensor_at(int(active.min())) == "out_ptr":
                out = launch.tensors["out_ptr"]
                row = (int(active.min()) - out.data_ptr()) // (out.element_size() * D)
                self.found[launch.program[0]] = divmod(row, tiles * block)

    q, k, v = oracle.qkv(1, heads, tiles * block, D, dtype=dtype, device=device)
    places = Places()
    with interpreter.observe(places):
        run(q, k, v, block)
    found = [places.found[n] for n in range(tiles * heads)]
    return [(head, row // block) for head, row in found]


def check_order(lab, run, group, causal, D, dtype, device, tiles=2, heads=3):
    want = lab.program_order(tiles, heads, group, causal)
    got = written_by_program(run, tiles, heads, D, dtype, device)
    assert got == want, (
        f"(head, query tile) of each program: `program_order` says {want}, the kernel computes "
        f"{got}; usual causes in `_tile_of_program`: not from the last tile when causal, heads of "
        "a group not in turn, the last group taken for a whole one; in the launcher: `group` not "
        "passed on, `heads` not B * H"
    )


@step3
@interpreter_only
@causal_or_full
@pytest.mark.parametrize(
    ("tiles", "heads", "group"), [(1, 1, 1), (3, 2, 1), (3, 2, 2), (2, 5, 2), (3, 4, 3)]
)
def test_program_order_is_what_the_kernel_does(lab, device, tiles, heads, group, causal):
    def run(q, k, v, block):
        lab.attention_ordered(q, k, v, causal, block_m=block, block_n=block, group=group)

    check_order(lab, run, group, causal, 16, F32, device, tiles, heads)


@step3
@interpreter_only
@causal_or_full
def test_ordered_groups_heads_when_causal(lab, device, causal):
    def run(q, k, v, block):
        lab.attention_ordered(q, k, v, causal, block_m=block, block_n=block)

    check_order(lab, run, 4 if causal else 1, causal, 16, F32, device, 2, 6)


@step3
def test_program_order_worked_examples(lab):
    for given, want in (
        ((3, 2, 1, True), [(0, 2), (0, 1), (0, 0), (1, 2), (1, 1), (1, 0)]),
        ((2, 2, 2, True), [(0, 1), (1, 1), (0, 0), (1, 0)]),
        ((2, 3, 2, False), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]),
    ):
        got = lab.program_order(*given)
        assert got == want, f"program_order{given}: want (head, tile) {want}, got {got}"


@step3
@causal_or_full
@pytest.mark.parametrize(("tiles", "heads", "group"), [(7, 5, 2), (1, 9, 4), (6, 1, 8), (5, 6, 3)])
def test_program_order_visits_each_tile_once(lab, tiles, heads, group, causal):
    order = lab.program_order(tiles, heads, group, causal)
    every = [(h, t) for h in range(heads) for t in range(tiles)]
    assert sorted(order) == every, (
        f"want each of {heads} x {tiles} (head, tile) once, got {len(order)}, {len(set(order))} of "
        f"them different: {order}"
    )
    if causal:
        for first in range(0, heads, group):
            mine = [tile for head, tile in order if first <= head < first + group]
            assert mine == sorted(mine, reverse=True), (
                f"the longest tiles of a group come first: got tiles in the order {mine}"
            )


@step3
def test_makespan(lab):
    for work, slots, want in (
        ([3, 3, 2, 2, 2], 2, 7),
        ([5], 3, 5),
        ([1] * 132, 132, 1),
        ([1] * 133, 132, 2),
    ):
        got = lab.makespan(work, slots)
        some = f"{work[:5]}{' ...' if work[5:] else ''}"
        assert got == want, f"makespan({some}, {slots}), {len(work)} pieces: want {want}, got {got}"
    assert lab.makespan(range(1, 9), 4) > lab.makespan(range(8, 0, -1), 4), "long ones last wait"


@step3
def test_longest_first_balances_a_card(lab):
    tiles, heads, slots = 16, 32, 132
    order = lab.program_order(tiles, heads, heads, True)
    work = [tile + 1 for _, tile in order]
    ideal = sum(work) / slots
    longest, shortest = lab.makespan(work, slots) / ideal, lab.makespan(sorted(work), slots) / ideal
    assert longest < 1.08, f"longest first: want less than 1.08 of the mean load, got {longest:.3f}"
    assert shortest > 1.15, f"shortest first: want more than 1.15 of it, got {shortest:.3f}"


@step3
def test_heads_per_group(lab):
    for given, want, why in (
        ((16384, 128, 2, 50 << 20), 3, "8 MiB a head, half of 50 MiB"),
        ((16384, 128, 2, 47 << 20), 2, "whole heads only: 2.94"),
        ((16384, 64, 2, 24 << 20), 3, "4 MiB a head, half of 24 MiB"),
        ((16384, 128, 1, 24 << 20), 3, "one byte an element"),
        ((1 << 20, 128, 2, 50 << 20), 1, "at least one"),
        ((512, 64, 2, 50 << 20), 4, "four at most, however small"),
    ):
        got = lab.heads_per_group(*given)
        assert got == want, f"heads_per_group{given}: want {want} ({why}), got {got}"


@step3
def test_ordered_takes_any_number_of_heads(lab, device):
    q = oracle.inputs(1, 1, 1, 16, device=device).expand(70_000, 1, 1, 16)
    few = lab.last_program_only() if here.interpret else contextlib.nullcontext()
    with few:
        out, lse = lab.attention_ordered(q, q, q, block_m=16, block_n=16)
    last = q[-1:]
    want = oracle.attention(last, last, last, kernel=True)
    oracle.check_all(want, (out[-1:], lse[-1:]), "attention_ordered")


@step3
def test_ordered_offsets_beyond_32_bits(lab, device):
    def run(q, k, v, causal, scale, block_m, block_n):
        return lab.attention_ordered(q, k, v, block_m=block_m, block_n=block_n, group=1)

    check_offsets_beyond_32_bits(lab, run, device)


@step3
def test_ordered_follows_its_input(lab, device):
    check_follows_its_input(rung(lab, 3), device)


@step3
@interpreter_only
def test_ordered_is_the_kernels_work(lab, device):
    check_is_the_kernels_work(lab, rung(lab, 3), device)


@step3
def test_ordered_rejects(lab, device):
    check_rejects(lab, rung(lab, 3), device)
    q = oracle.inputs(1, 1, 4, 16, device=device)
    for group in (0, -1, 1.5):
        with pytest.raises(ValueError, match="group"):
            lab.attention_ordered(q, q, q, group=group)


@step3
@needs_compiler
@pytest.mark.timeout(300)
def test_ordered_compiles_for_every_card(lab, request):
    check_compiles(lab, request, "attention_ordered")


# ---------------------------------------------------------------- step 4


@step4
@late_or_not
@causal_or_full
@kernel_dtypes
@lengths
def test_tuned(lab, device, T, dtype, causal, late):
    check(rung(lab, 4, late), *fenced_qkv(1, 2, T, 32, dtype=dtype, device=device), causal)


@step4
@causal_or_full
@tilings
def test_late_tiles(lab, device, T, block_m, block_n, causal):
    q, k, v = fenced_qkv(1, 2, T, 16, device=device)
    check(rung(lab, 4, True), q, k, v, causal, None, block_m, block_n)


@step4
@causal_or_full
@score_kinds
def test_late_score_ranges(lab, device, kind, causal):
    check(rung(lab, 4, True), *fenced_qkv(1, 1, 40, 32, kind=kind, device=device), causal)


@step4
def test_late_huge_equal_scores(lab, device):
    with true_fma():
        check_huge_equal_scores(rung(lab, 4, True), device)


@step4
def test_late_other_heads_unread(lab, device):
    check_other_heads_unread(rung(lab, 4, True), device)
    check_key_lengths(rung(lab, 4, True), device)


@step4
@interpreter_only
@causal_or_full
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_late_moves_few_bytes(lab, device, block_m, block_n, causal):
    check_moves_few_bytes(lab, rung(lab, 4, True), device, block_m, block_n, causal)


@step4
@interpreter_only
@causal_or_full
def test_late_order_of_products(lab, device, causal):
    T, block_m, block_n = 70, 32, 16
    q, k, v = oracle.qkv(1, 1, T, 64, device=device)
    events = events_of(rung(lab, 4, True), q, k, v, causal, block_m, block_n)
    check_late(events, block_n)
    check_masks(events, T, block_m, block_n, causal, late=True)


@step4
@causal_or_full
@pytest.mark.parametrize("D", [16, 64, 128])
def test_tuned_default_configuration(lab, device, D, causal):
    q, k, v = fenced_qkv(1, 1, 130, D, dtype=F16, device=device)
    got = lab.attention_tuned(q, k, v, causal, tune=False)
    oracle.check_all(oracle.attention(q, k, v, causal, kernel=True), got, "attention_tuned")


@step4
@interpreter_only
def test_tuned_never_times_the_interpreter(lab, device, monkeypatch):
    def timed(*args, **kwargs):
        raise AssertionError("the interpreter's times mean nothing: run the default configuration")

    monkeypatch.setattr("triton.testing.do_bench", timed)
    q, k, v = fenced_qkv(1, 1, 40, 16, device=device)
    oracle.check_all(
        oracle.attention(q, k, v, kernel=True), lab.attention_tuned(q, k, v), "attention_tuned"
    )


# (BLOCK_M, BLOCK_N, warps, stages, late), D, archs: what the formula is checked on.
FORMULA = [
    ((64, 64, 4, 2, False), 64),
    ((64, 64, 4, 3, False), 128),
    ((128, 64, 8, 2, False), 128),
    ((128, 64, 8, 3, False), 64),
    ((64, 32, 4, 3, False), 128),
    ((64, 64, 4, 2, True), 64),
    ((128, 64, 8, 3, True), 128),
]


@step4
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("config", "D"), FORMULA, ids=str)
def test_shared_bytes_is_what_the_compiler_takes(lab, request, config, D):
    config = lab.Config(*config)
    lab.shared_bytes(config, D, 2, 90)  # before anything is compiled: it may not be written yet
    cached = hasattr(request.config, "cache")
    x = xray.XRay(request.path, str(lab.file), cache=xray.CACHE if cached else None)
    names = ("block_m", "block_n", "num_warps", "num_stages", "late")
    options = dict(zip(names, config, strict=True)) | {"head_dim": D}
    units = {arch: x.unit("attention_tuned", arch, **options) for arch in CARDS}
    x.compile(list(units.values()))
    for arch, unit in units.items():
        (c,) = x.of(unit)
        if c.unwritten:
            raise NotImplementedError(c.unwritten)
        got = lab.shared_bytes(config, D, 2, int(arch.removeprefix("sm_")))
        assert got == c.shared, f"{arch}: the compiler takes {c.shared:,} bytes, got {got:,}"


@step4
def test_shared_bytes_worked_examples(lab):
    eight = lab.Config(128, 64, 8, 2)
    assert lab.shared_bytes(eight, 128, 2, 120) == 65_536
    assert lab.shared_bytes(eight._replace(num_stages=3), 128, 2, 86) == 98_304
    assert lab.shared_bytes(eight._replace(num_stages=4), 128, 2, 86) == 131_072, "too much there"
    assert lab.shared_bytes(eight._replace(num_stages=3), 128, 2, 90) == 131_072
    assert lab.shared_bytes(eight._replace(num_stages=3, late=True), 128, 2, 90) == 147_456
    assert lab.shared_bytes(eight, 64, 4, 90) == 2 * lab.shared_bytes(eight, 64, 2, 90)
    few = lab.Config(32, 64, 4, 3)
    assert lab.shared_bytes(few, 128, 2, 90) == 77_824, "below 64 rows no wgmma"
    assert lab.shared_bytes(few._replace(num_stages=2), 64, 4, 86) == 49_152, "P is float32, too"


@step4
def test_occupancy(lab):
    # (registers, shared, warps, arch) -> programs on a multiprocessor, and what ends first
    assert lab.occupancy(255, 0, 4, 90) == 2  # registers: 256 * 128 of 65,536
    assert lab.occupancy(128, 0, 8, 90) == 2  # registers
    assert lab.occupancy(129, 0, 8, 90) == 1  # one more is a piece of 8 more
    assert lab.occupancy(170, 0, 4, 90) == 2  # 5,440 a warp are handed out as 5,632
    assert lab.occupancy(32, 114_688, 4, 90) == 2  # 115,712 with the driver's, of 233,472
    assert lab.occupancy(32, 116_736, 4, 90) == 1
    assert lab.occupancy(32, 1024, 4, 86) == 12  # 48 warps
    assert lab.occupancy(32, 1024, 1, 86) == 16  # blocks
    assert lab.occupancy(32, 1024, 1, 90) == 32
    assert lab.occupancy(64, 50_176, 4, 120) == 2
    assert lab.occupancy(32, 240_000, 4, 90) == 0


@step4
def test_register_estimate(lab):
    small, wide = lab.Config(64, 64, 4, 2), lab.Config(128, 128, 4, 2)
    assert lab.register_estimate(small, 64) == 128
    assert lab.register_estimate(lab.Config(128, 64, 8, 3), 128) == 160, "64 + 32, and 64"
    assert lab.register_estimate(lab.Config(128, 64, 8, 3, late=True), 128) == 192
    assert lab.register_estimate(wide, 128) > 255, "acc and s alone take 256"
    assert lab.register_estimate(small._replace(late=True), 64) > lab.register_estimate(small, 64)
    assert lab.register_estimate(wide._replace(num_warps=8), 128) < 255


@step4
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 120])
@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
def test_defaults_and_candidates_fit(lab, D, arch):
    limit = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}[arch]
    default = lab.default_config(D, arch)
    assert lab.shared_bytes(default, D, 2, arch) <= limit
    assert lab.fits(default, D, 2, arch)
    kept = [c for c in lab.CANDIDATES if lab.fits(c, D, 2, arch)]
    assert kept or D == 256, "something is left to try"
    assert all(lab.shared_bytes(c, D, 2, arch) <= limit for c in kept)
    assert len(kept) <= 12, "a search takes under a minute"


@step4
def test_fits_counts_registers_too(lab):
    assert lab.fits(lab.Config(128, 128, 8, 2), 128, 2, 90)
    for tile in ((128, 128, 4, 2), (128, 64, 4, 3)):
        assert not lab.fits(lab.Config(*tile), 128, 2, 90), f"{tile}: 256 registers a thread"


@step4
def test_prune_leaves_what_the_card_can_launch(lab, device):
    q = torch.empty(1, 1, 1, 128, dtype=F16, device=device)
    arch = 86 if here.interpret else None
    if arch is None:
        major, minor = torch.cuda.get_device_capability()
        arch = max(a for a in (80, 86, 89, 90, 120) if a <= 10 * major + minor)
    configs = [lab._triton_config(c) for c in lab.CANDIDATES]
    kept = lab.prune(configs, {"q_ptr": q}, D=128)
    want = [c for c in lab.CANDIDATES if lab.fits(c, 128, 2, arch)]
    assert [lab._config_of(c) for c in kept] == want
    assert 0 < len(kept)
    kept = lab.prune(configs, {"q_ptr": q.float()}, D=128)  # twice the bytes
    want = [c for c in lab.CANDIDATES if lab.fits(c, 128, 4, arch)]
    assert [lab._config_of(c) for c in kept] == (want or [lab.default_config(128, arch)])
    for D in (64, 256):
        kept = lab.prune(configs, {"q_ptr": q}, D=D)
        want = [c for c in lab.CANDIDATES if lab.fits(c, D, 2, arch)]
        assert [lab._config_of(c) for c in kept] == (want or [lab.default_config(D, arch)]), D
    huge = [lab._triton_config(lab.Config(256, 256, 8, 4))]
    kept = lab.prune(huge, {"q_ptr": q}, D=256)
    assert [lab._config_of(c) for c in kept] == [lab.default_config(256, arch)]


@step4
@pytest.mark.parametrize("arch", [86, 90])
def test_prune_asks_the_card(lab, monkeypatch, arch):
    configs = [
        lab.Config(128, 64, 8, 3),
        lab.Config(128, 64, 8, 4),  # more than a consumer card has
        lab.Config(128, 128, 8, 4),  # more than any has
        lab.Config(64, 64, 4, 2),
    ]
    q = SimpleNamespace(
        device=torch.device("cuda"), dtype=F16, shape=(1, 1, 1, 128), element_size=lambda: 2
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: divmod(arch, 10))
    kept = lab.prune([lab._triton_config(c) for c in configs], {"q_ptr": q}, D=128)
    kept, limit = [lab._config_of(c) for c in kept], 232_448 if arch == 90 else 101_376
    want = [c for c in configs if lab.shared_bytes(c, 128, 2, arch) <= limit]
    assert kept == want, (
        f"sm_{arch} has {limit:,} bytes: want {[*map(name_of_config, want)]}, got "
        f"{[*map(name_of_config, kept)]}; the usual cause: the arch is not that of q's device"
    )


@step4
def test_autotuner_key(lab):
    assert lab.fits(lab.CANDIDATES[1], 64, 2, 90)  # the key is given: it counts once the rest is
    keys = set(lab._tuned_kernel.keys)
    assert {"bucket", "D", "CAUSAL"} <= keys, "the best tile depends on all of these"
    assert not keys & {"T", "S", "heads"}, "a search for each length would never end"


@step4
@interpreter_only
def test_bucket_is_a_power_of_two(lab, device):
    for T, want in ((1, 16), (16, 16), (17, 32), (1000, 1024), (1024, 1024), (1025, 2048)):
        q = torch.empty(1, 1, T, 16, device=device)
        assert lab._sizes(q, q, 1, None, True)[4] == want


@step4
@interpreter_only
def test_tuned_is_the_kernels_work(lab, device):
    check_is_the_kernels_work(lab, rung(lab, 4, True), device)


@step4
def test_tuned_follows_its_input(lab, device):
    check_follows_its_input(rung(lab, 4, True), device)


@step4
def test_tuned_rejects(lab, device):
    check_rejects(lab, rung(lab, 4), device)


@step4
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_tuned_defaults_compile_for_every_card(lab, request, D):
    lab.default_config(D, 90)
    launcher = f"attention_tuned D={D}"
    check_compiles(lab, request, launcher, config_on=lambda arch: lab.default_config(D, arch))


@step4
def test_message_of_a_spill_names_the_configuration(lab, request, monkeypatch):
    config = lab.Config(128, 64, 8, 3, late=True)
    assert lab.fits(config, 64, 2, 90)  # what is tested is given: it counts once the rest is
    c = Compiled("launcher", "sm_90", {"head_dim": 64}, kernel="kernel", spill=8)
    monkeypatch.setattr(xray.XRay, "compile", lambda *_: None)
    monkeypatch.setattr(xray.XRay, "of", lambda *_: [c])
    with pytest.raises(AssertionError, match="128x64, 8 warps, 3 stages, late: kernel on sm_90"):
        check_compiles(lab, request, "attention_tuned D=64", ("sm_90",), lambda _: config)


# ---------------------------------------------------------------- step 5


@step5
@causal_or_full
@lengths
@pytest.mark.parametrize("dtype", [F16], ids=str)
def test_tma(lab, device, T, dtype, causal):
    check(rung(lab, 5), *fenced_qkv(2, 1, T, 32, dtype=dtype, device=device), causal)


@step5
@causal_or_full
@tilings
def test_tma_tiles(lab, device, T, block_m, block_n, causal):
    q, k, v = fenced_qkv(1, 2, T, 16, dtype=F16, device=device)
    check(rung(lab, 5), q, k, v, causal, None, block_m, block_n)


@step5
@causal_or_full
@score_kinds
def test_tma_score_ranges(lab, device, kind, causal):
    check(rung(lab, 5), *fenced_qkv(1, 1, 40, 32, dtype=F16, kind=kind, device=device), causal)


@step5
@interpreter_only
def test_tma_huge_equal_scores(lab, device):
    # As large as float16 allows: 61440**2 * 64 / 8 = 3e10.
    x = torch.full((1, 1, 40, 64), 61440.0, dtype=F16, device=device)
    for sign, causal in ((1, False), (-1, True)):
        with true_fma():
            out, _ = rung(lab, 5)(x, sign * x, x, causal)
        assert (out == x).all().item(), (
            f"equal scores weigh equally: want 61440, got {out[0, 0, -1, 0].item()}"
        )


@step5
@causal_or_full
def test_tma_other_heads_unread(lab, device, causal):
    check_other_heads_unread(rung(lab, 5), device, F16, causal)


@pytest.fixture
def no_copy_engine(monkeypatch):
    """Launches in the interpreter are as for a card of compute capability 8.6."""
    monkeypatch.setattr(runtime, "compiling_for", (8, 6))


def specialised(lab):
    """The warp specialised form as f(q, k, v, causal, scale, ...); its tile is 128x64."""
    if not here.interpret and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warp specialisation needs compute capability 9")

    def run(q, k, v, causal=False, scale=None, *_):
        tile = {"block_m": 128, "block_n": 64}
        return lab.attention_tma(q, k, v, causal, scale, **tile, warp_specialize=True)

    return run


@step5
@causal_or_full
@pytest.mark.parametrize("T", [128, 130])
def test_tma_warp_specialised_form(lab, device, T, causal):
    q, k, v = fenced_qkv(1, 2, T, 64, dtype=F16, device=device)
    got = specialised(lab)(q, k, v, causal)
    oracle.check_all(oracle.attention(q, k, v, causal, kernel=True), got, "attention_tma")


@step5
@causal_or_full
def test_tma_specialised_form_other_heads_unread(lab, device, causal):
    check_other_heads_unread(specialised(lab), device, F16, causal)


@step5
@interpreter_only
@causal_or_full
@pytest.mark.usefixtures("no_copy_engine")
def test_tma_without_a_copy_engine(lab, device, causal):
    run = rung(lab, 5)
    check(run, *fenced_qkv(2, 2, 50, 16, dtype=F16, device=device), causal, None, 32, 16)
    check_other_heads_unread(run, device, F16, causal)


@step5
@interpreter_only
def test_tma_loads_by_descriptor(lab, device):
    q, k, v = oracle.qkv(1, 1, 64, 16, dtype=F16, device=device)
    with counting("create_descriptor_load") as loads:
        rung(lab, 5)(q, k, v, False, None, 32, 32)
    descriptors = len(loads)
    assert descriptors == 2 * (1 + 2 * 2), f"q, and each tile of k and v: got {descriptors} loads"


@step5
@interpreter_only
def test_tma_makes_its_descriptors_on_the_host(lab, device):
    q, k, v = oracle.qkv(1, 2, 64, 16, dtype=F16, device=device)
    with counting("create_make_tensor_descriptor") as calls:
        rung(lab, 5)(q, k, v, False, None, 32, 32)
        mine = len(calls)
        specialised(lab)(*oracle.qkv(1, 3, 128, 16, dtype=F16, device=device))
    made = len(calls) - mine
    assert mine <= 3, (
        f"4 programs, not specialised: want 3 descriptors in all, for q, k and v; got {mine}; the "
        "usual cause: they are made in the kernel, by each program for itself"
    )
    assert made == 9, f"3 programs, specialised: want 3 descriptors in each, got {made} in all"


@step5
@interpreter_only
@causal_or_full
def test_tma_masks_only_where_needed(lab, device, causal):
    T, block_m, block_n = 70, 32, 16
    q, k, v = oracle.qkv(1, 1, T, 64, dtype=F16, device=device)
    events = events_of(rung(lab, 5), q, k, v, causal, block_m, block_n, descriptors=True)
    check_masks(events, T, block_m, block_n, causal)


@step5
@interpreter_only
@pytest.mark.parametrize(("T", "causal"), [(128, False), (130, False), (128, True)])
def test_tma_specialised_form_masks_all_or_nothing(lab, device, T, causal):
    q, k, v = oracle.qkv(1, 1, T, 32, dtype=F16, device=device)
    events = events_of(specialised(lab), q, k, v, causal, 128, 64)
    everything = [event for program in events.values() for event in program]
    want = everything.count(("dot", "scores")) if causal or T % 64 else 0
    got = everything.count(("select", "tile"))
    assert got == want, (
        f"want {want} tiles of scores masked, got {got}; the usual causes: too many, MASKED is "
        "True and not CAUSAL or RAGGED; too few, tiles before `full` are left out, which takes a "
        "condition"
    )


@step5
@interpreter_only
@causal_or_full
def test_tma_order(lab, device, causal):
    def run(q, k, v, block):
        lab.attention_tma(q, k, v, causal, block_m=block, block_n=block, group=2)

    check_order(lab, run, 2, causal, 16, F16, device)


def by_descriptor(lab):
    """attention_tma as f(q, k, v, causal, scale, block_m, block_n); a descriptor has 256 rows."""

    def run(q, k, v, causal, scale, block_m, block_n):
        return lab.attention_tma(q, k, v, block_m=min(block_m, 256), block_n=block_n, group=1)

    return run


@step5
def test_tma_offsets_beyond_32_bits(lab, device):
    check_offsets_beyond_32_bits(lab, by_descriptor(lab), device)


@step5
@interpreter_only
@pytest.mark.usefixtures("no_copy_engine")
def test_tma_descriptors_of_heads_beyond_32_bits(lab, device):
    check_offsets_beyond_32_bits(lab, by_descriptor(lab), device)


@step5
def test_tma_layouts_and_key_lengths(lab, device):
    check_layouts_and_scale(rung(lab, 5), device, F16)
    check_key_lengths(rung(lab, 5), device, F16)


@step5
@interpreter_only
def test_tma_is_the_kernels_work(lab, device):
    check_is_the_kernels_work(lab, rung(lab, 5), device, F16)


@step5
def test_tma_follows_its_input(lab, device):
    check_follows_its_input(rung(lab, 5), device, F16)


@step5
def test_tma_rejects(lab, device):
    check_rejects(lab, rung(lab, 5), device, F16)
    q = oracle.inputs(1, 1, 8, 16, dtype=F16, device=device)
    with pytest.raises(ValueError, match="float32"):
        lab.attention_tma(q.float(), q.float(), q.float())
    with pytest.raises(ValueError, match="256"):
        lab.attention_tma(q, q, q, block_n=512)
    for wrong in ({"num_warps": 8}, {"block_m": 64}):
        with pytest.raises(ValueError, match="warp_specialize"):
            lab.attention_tma(q, q, q, warp_specialize=True, **wrong)


@step5
@needs_compiler
@pytest.mark.timeout(600)
def test_tma_compiles_for_every_card(lab, request):
    for c in check_compiles(lab, request, "attention_tma"):
        copies = "bulk" if int(c.arch[3:]) >= 90 else "cp.async"
        assert c.instructions[copies], (
            f"{c.arch}: no copy by {copies}, so tiles pass through registers, one at a time; the "
            "usual cause below sm_90: descriptors are made on the host, and Triton does not see "
            "that neighbours lie side by side"
        )


@step5
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("D", [64, 128])
def test_tma_warp_specialised_compiles_for_hopper(lab, request, D):
    launcher = "attention_tma"
    tile = {"block_m": 128, "block_n": 128, "head_dim": D}
    kernels = check_compiles(lab, request, launcher, ("sm_90",), **tile)
    # 12 warps of 32 threads share 65,536 registers. 4 warps have up to 255 and need more: acc and
    # s alone are 64 and 128 of them at D = 64.
    got = kernels[0].registers
    assert got <= 168, (
        f"specialised, its 4 warps become 12: want 168 registers at most, got {got}; the usual "
        "causes: warp_specialize does not reach tl.range, or something in the loop is conditional"
    )
    assert all(kernels[0].instructions[name] for name in ("bulk", "wgmma"))


@step5
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("D", "block_m", "block_n", "num_warps", "num_stages"),
    [
        (64, 64, 64, 4, 3),
        (64, 128, 64, 4, 3),
        (128, 64, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (256, 128, 32, 8, 2),
    ],
)
def test_tma_compiles_for_hopper(lab, request, D, block_m, block_n, num_warps, num_stages):
    tile = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps}
    tile |= {"num_stages": num_stages, "head_dim": D, "dtype": "bfloat16", "specialised": False}
    (c,) = check_compiles(lab, request, "attention_tma", ("sm_90",), **tile)
    assert c.instructions["bulk"], "no bulk copy: tiles are not fetched by descriptor"
    # 64 rows and 16 of the summed index an instruction, D of them for the scores, block_n for out.
    want = block_m // 64 * 4 // num_warps * (D + block_n) // 16
    assert c.instructions["wgmma"] == want, (
        f"{want} wgmma are the products of one tile: got {c.instructions['wgmma']}; the usual "
        "cause: more than one loop, and copies that start anew in each (handout section 6)"
    )
    after = c.order[len(c.order) - c.order[::-1].index("product") :]
    assert "shuffle" in after, (
        "lanes are to meet after the loop, to add up the parts of a row's sum: no shuffle follows "
        "the last product; the usual cause: l_i is not of PARTS columns (handout section 6)"
    )


# ---------------------------------------------------------------- step 6


@pytest.fixture
def exact_e4m3():
    """The interpreter rounds float32 to e4m3 without carrying into the exponent: 124 becomes 64.

    Here it rounds as a GPU does, which stops at 448.
    """
    if not here.interpret:
        yield
        return
    import triton.language as tl
    import triton.runtime.interpreter as ti

    if not hasattr(ti, "_convert_float"):
        pytest.skip("this Triton's interpreter has no _convert_float")
    inner = ti._convert_float

    def convert(data, source, target, rounding):
        if source == tl.float32 and target == tl.float8e4nv:
            x = torch.from_numpy(np.ascontiguousarray(data)).view(F32).clamp(-448, 448)
            return x.to(E4M3).view(torch.uint8).numpy()
        return inner(data, source, target, rounding)

    ti._convert_float = convert
    yield
    ti._convert_float = inner


fp8 = pytest.mark.usefixtures("exact_e4m3")


def needs_e4m3(test):
    old = not here.interpret and torch.cuda.get_device_capability() < (8, 9)
    return fp8(pytest.mark.skipif(old, reason="e4m3 needs compute capability 8.9")(test))


def dequantised(x):
    """The (B, H, T, D) that quantised tokens stand for, in float64; of channels (B, H, D, S')."""
    return x.values.double() * x.scales.double()[..., None]


# Which token of each 16 lies where in quantised channels: see `Quantised`.
KEY_ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def in_key_order(x, back=False):
    """x with each 16 of its last axis in the order of quantised channels, or back from it."""
    order = torch.tensor(KEY_ORDER, device=x.device)
    return x.unflatten(-1, (-1, 16))[..., order.argsort() if back else order].flatten(-2)


def dequantised_channels(x, S):
    """The (B, H, S, D) that quantised channels stand for, in float64."""
    return in_key_order(dequantised(x), back=True)[..., :S].transpose(2, 3)


def quantised_in_torch(x):
    """Tokens in e4m3 by PyTorch: values and scales."""
    scales = x.float().abs().amax(-1) / 448
    return (x.float() / scales[..., None]).clamp(-448, 448).to(E4M3), scales


def check_quantised(got, shape, scales, what):
    """Dtypes and shapes of values and scales, and the scales of each token or channel."""
    for name, x, size, dtype in (
        ("values", got.values, shape, E4M3),
        ("scales", got.scales, scales.shape, F32),
    ):
        made = f"{tuple(x.shape)} {x.dtype}"
        assert (tuple(x.shape), x.dtype) == (tuple(size), dtype), (
            f"{name}: want {tuple(size)} {dtype}, got {made}"
        )
    off = (got.scales.double() / scales.double() - 1).abs().flatten()
    i = int(off.nan_to_num(math.inf).argmax())
    assert off[i].item() <= 1e-6, (
        f"the scale of a {what} is its largest size / 448: want {scales.flatten()[i].item():.6g}, "
        f"got {got.scales.flatten()[i].item():.6g}"
    )


def check_rounded(got, x, largest):
    """What was quantised is x to within half a step of e4m3, 2**-4 of the largest."""
    off = ((got - x.double()).abs() / largest.double()).max().item()
    assert off < 2.0**-4, f"values times scales are x: want less than 1/16 off, got {off:.2g}"


@step6
@needs_e4m3
@kernel_dtypes
@pytest.mark.parametrize(("T", "D"), [(1, 32), (37, 64), (64, 128), (5, 256)])
def test_quantise_tokens(lab, device, dtype, T, D):
    x = memory.fenced(oracle.inputs(2, 3, T, D, dtype=dtype, device=device))
    got = lab.quantise(x)
    values, scales = quantised_in_torch(x)
    check_quantised(got, x.shape, scales, "token")
    tops = got.values.float().abs().amax(-1)
    assert tops.eq(448).all(), (
        f"the largest of each token is 448: got {tops.min().item():g} to {tops.max().item():g}"
    )
    same = (got.values.float() == values.float()).float().mean().item()
    assert same > 0.99, (
        f"e4m3 numbers: want all but a few on the edge between two to be those of PyTorch, got "
        f"{same:.1%} the same"
    )
    check_rounded(dequantised(got), x, x.abs().amax(-1, keepdim=True))


@step6
@needs_e4m3
@pytest.mark.parametrize("S", [1, 16, 37, 300])
def test_quantise_channels(lab, device, S):
    x = memory.fenced(oracle.inputs(1, 2, S, 32, device=device))
    got = lab.quantise(x, "channel")
    padded = math.ceil(S / 16) * 16
    # Transposed, rows of 16 byte pieces.
    check_quantised(got, (1, 2, 32, padded), x.abs().amax(2) / 448, "channel")
    padding = (in_key_order(got.values.float(), back=True)[..., S:] != 0).sum().item()
    assert padding == 0, f"tokens from {S} on only pad: want 0 in all of them, got {padding} others"
    check_rounded(dequantised_channels(got, S), x, x.abs().amax(2, keepdim=True))


@step6
@needs_e4m3
@pytest.mark.parametrize("S", [1, 16, 20, 300])
def test_quantise_order_of_keys(lab, device, S):
    # Numbers that e4m3 holds, of each 16 another, and 448 as the largest: nothing is rounded.
    numbers = torch.arange(111, 127, dtype=torch.uint8).view(E4M3).float().flip(0)
    numbers = numbers.repeat(math.ceil(S / 16))
    x = numbers[:S, None].expand(1, 1, S, 32).contiguous().to(device)
    got = lab.quantise(x, "channel").values.float()[0, 0, -1].cpu()
    numbers[S:] = 0
    wrong = (got != in_key_order(numbers)).nonzero()
    if len(wrong):
        group = slice(first := wrong[0].item() // 16 * 16, first + 16)
        held = numbers[group].tolist()
        lie = [held.index(n) if n in held else "?" for n in got[group].tolist()]
        raise AssertionError(
            f"places {first} to {first + 15}: want tokens {KEY_ORDER} of the 16 there, got {lie}; "
            "usual causes: pair and lane are swapped, or a column is loaded where it is stored"
        )


@step6
@needs_e4m3
def test_quantise_zeros_and_strides(lab, device):
    x = oracle.inputs(1, 2, 20, 32, device=device)
    x[:, :, 3] = 0
    got = lab.quantise(x)
    back = dequantised(got)
    others = (back[:, :, 3] != 0).sum().item()
    assert others == 0, (
        f"a token of zeros: want zeros, got {others} others such as {back[0, 0, 3, 0].item():g}"
    )
    bad = (~back.isfinite()).sum().item()
    assert bad == 0, f"values times scales: want finite numbers, got {bad} that are not"
    turned = lab.quantise(x.transpose(1, 2).contiguous().transpose(1, 2)).values.float()
    differ = (turned != got.values.float()).sum().item()
    assert differ == 0, (
        f"the same x with other strides: want the same e4m3 numbers, got {differ} others"
    )


@step6
@needs_e4m3
@pytest.mark.parametrize("power", [-66, -20, 60])
@pytest.mark.parametrize("per", ["token", "channel"])
def test_quantise_any_size(lab, device, per, power):
    x = oracle.inputs(1, 1, 20, 32, device=device)
    want, got = lab.quantise(x, per), lab.quantise(x * 2.0**power, per)
    ratio = (got.scales.double() / want.scales.double() / 2.0**power).flatten()[0].item()
    assert torch.allclose(got.scales, want.scales * 2.0**power, rtol=1e-6, atol=0.0), (
        f"x times 2**{power}: want each scale times that, got the first {ratio:.3g} times that; "
        "the usual cause: a smallest scale stands in for 'not zero'"
    )
    same = torch.equal(got.values.float(), want.values.float())
    assert same, f"x times 2**{power}: want the same e4m3 numbers, got others; see the scales"


@step6
@needs_e4m3
@pytest.mark.parametrize("large", ["head", "row", "column"])
def test_quantise_offsets_beyond_32_bits(lab, device, large):
    # Three heads or tokens that lie 2**30 and a little apart: the last begins past 2**31. Tokens
    # are rows of x as it is, and columns where x is transposed.
    axis, apart = 1 if large == "head" else 2, 2**30 + 64
    shape, strides = [1, 2, 2, 32], [0, 64, 32, 1]
    shape[axis], strides[axis] = 3, apart
    x = lazy(2 * apart + 256, dtype=F16, device=device).as_strided(shape, strides)
    x.copy_(oracle.inputs(*shape, dtype=F16, device=device))
    per = "channel" if large == "column" else "token"
    got, want = lab.quantise(x, per), lab.quantise(x.contiguous(), per)
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert torch.equal(a.float(), b.float()), (
            f"{large}s 2**30 apart: want the {name} of a contiguous x, got others; the usual "
            f"cause: {large} times stride in int32"
        )


@step6
@needs_e4m3
def test_quantise_stores_beyond_32_bits(lab, device):
    # Wide rows in the interpreter: few programs to skip.
    H, T, D = (5, 110_000, 4096) if here.interpret else (5, 1_760_016, 256)
    x = lazy(1, H, T, D, dtype=F16, device=device)
    rows = slice(T // 32 * 32, T)  # the last program's
    x[:, -1:, rows] = oracle.inputs(1, 1, 16, D, dtype=F16, device=device)
    few = lab.last_program_only() if here.interpret else contextlib.nullcontext()
    with few:
        got = lab.quantise(x)
    values, scales = quantised_in_torch(x[:, -1:, rows])
    off = (got.scales[:, -1:, rows].double() / scales.double() - 1).abs().max().item()
    assert off <= 1e-6, (
        f"scales of the last head: want largest size / 448, got {off:.2g} of that off; the usual "
        "cause: head times rows in int32"
    )
    same = (got.values[:, -1:, rows].float() == values.float()).float().mean().item()
    assert same > 0.99, f"the last head's e4m3 numbers: want all but a few, got {same:.1%} the same"


@step6
@needs_e4m3
@interpreter_only
def test_quantise_is_the_kernels_work(lab, device):
    x = oracle.inputs(1, 1, 20, 32, device=device)
    lab.quantise(x)
    with lab.no_program():
        got = lab.quantise(x)
    numbers = got.scales.numel() - got.scales.isnan().sum().item()
    assert numbers == 0, f"no program ran: want no scales, got {numbers}; the kernel writes them"


@step6
def test_quantise_rejects(lab, device):
    x = oracle.inputs(1, 1, 4, 32, device=device)
    lab.quantise(x)
    for bad in (x[0], x[:, :, :0], x.double(), x.int()):
        with pytest.raises(ValueError, match="got"):
            lab.quantise(bad)
    with pytest.raises(ValueError, match="per="):
        lab.quantise(x, "tensor")


def exact_attention(lab, q, k, v, causal=False):
    """Float64 attention of what the quantised tensors stand for: rounding of p is all that is left.

    Args:
        q, k: quantised per token. v: quantised per channel, or a tensor.
    """
    if not isinstance(v, torch.Tensor):
        v = dequantised_channels(v, k.values.shape[2])
    return oracle.attention(dequantised(q), dequantised(k), v.double(), causal)


@step6
@needs_e4m3
@causal_or_full
@pytest.mark.parametrize("values", [False, True], ids=["scores", "all"])
@pytest.mark.parametrize(
    ("T", "block_m", "block_n"),
    [(1, 16, 32), (17, 32, 32), (37, 32, 32), (70, 16, 64), (64, 64, 32), (100, 32, 64)],
)
def test_fp8_is_attention_of_what_was_quantised(lab, device, T, block_m, block_n, values, causal):
    q, k, v = fenced_qkv(1, 2, T, 32, dtype=F16, device=device)
    parts = lab.quantise(q), lab.quantise(k), lab.quantise(v, "channel") if values else v
    tiles = {"block_m": block_m, "block_n": block_n}
    out, lse = lab.attend_fp8(*parts, causal, out_dtype=F32 if values else F16, **tiles)
    want, want_lse = exact_attention(lab, *parts, causal)
    slack = 1e-4 if here.interpret else 2e-2  # e4m3 products are summed in fewer bits
    off = (lse.double() - want_lse.value).flatten()
    off = off[int(off.abs().nan_to_num(math.inf).argmax())].item()
    assert abs(off) < slack, (
        f"lse: want less than {slack:g} off, got {off:+.4g}; 8 log 2 = 5.545 too small: `_weights` "
        "leaves SHIFT out; as much too large: p and l have it, and lse does not take it off again"
    )
    # p has 4 bits of precision in e4m3: 2**-4 of the largest value, less by averaging.
    limit = (2.0**-4 if values else 2.0**-9) * v.abs().max().item()
    error = (out.double() - want.value).abs().max().item()
    assert error < limit, f"error {error:.2g}, limit {limit:.2g}"


@step6
@needs_e4m3
@pytest.mark.parametrize("S", [1, 17, 100])
def test_fp8_gives_each_key_its_value(lab, device, S):
    # Query i picks key i, all others weigh nothing: what comes out is value i, to e4m3's precision.
    T, D = S, 128
    q = torch.zeros(1, 1, T, D, device=device)
    q[0, 0].fill_diagonal_(1.0)
    v = torch.linspace(-1.0, 1.0, S, device=device)[:, None].expand(1, 1, S, D).contiguous()
    out, _ = lab.attention_fp8(q, q, v, scale=64.0, block_m=16, block_n=64)
    off = (out - v).abs().amax(-1).flatten()
    i = int(off.nan_to_num(math.inf).argmax())
    nearest = int((v[0, 0, :, 0] - out[0, 0, i, 0]).abs().argmin())
    assert off[i].item() < 0.04, (
        f"query {i} sees only key {i}: want its value, {v[0, 0, i, 0].item():.3f}, got "
        f"{out[0, 0, i, 0].item():.3f}, as of key {nearest}; usual causes: the columns of p are "
        "not in the order of v's tokens, v is of another tile than k"
    )


@step6
@needs_e4m3
@interpreter_only
@causal_or_full
@pytest.mark.usefixtures("no_copy_engine")
@pytest.mark.parametrize("values", [False, True], ids=["scores", "all"])
def test_fp8_without_a_copy_engine(lab, device, values, causal):
    q, k, v = fenced_qkv(2, 2, 50, 32, dtype=F16, device=device)
    parts = lab.quantise(q), lab.quantise(k), lab.quantise(v, "channel") if values else v
    out, _ = lab.attend_fp8(*parts, causal, block_m=16, block_n=32, out_dtype=F16)
    want = exact_attention(lab, *parts, causal)[0].value
    error = (out.double() - want).abs().max().item()
    limit = (2.0**-4 if values else 2.0**-9) * v.abs().max().item()
    assert error < limit, (
        f"as for sm_86: error {error:.2g}, limit {limit:.2g}; usual causes: a descriptor that is "
        "made in the kernel begins at another head, or ends at S and not at the padded length"
    )


@step6
@needs_e4m3
@causal_or_full
def test_fp8_from_half(lab, device, causal):
    q, k, v = fenced_qkv(1, 2, 70, 64, dtype=F16, device=device)
    want, _ = oracle.attention(q, k, v, causal)
    out, lse = lab.attention_fp8(q, k, v, causal, block_m=32, block_n=32)
    dtypes = out.dtype, lse.dtype
    assert dtypes == (F16, F32), f"dtypes of out, lse: want {F16}, {F32}, got {dtypes}"
    error = lab.rmse(out, want.value)
    assert error < 0.03, f"all in e4m3: want an RMSE below 0.03, got {error:.2g}"
    scores_only, _ = lab.attention_fp8(q, k, v, causal, values=False, block_m=32, block_n=32)
    less = lab.rmse(scores_only, want.value)
    assert less < error, f"v not quantised: want an RMSE below {error:.2g}, got {less:.2g}"


@step6
@needs_e4m3
def test_fp8_small_weights_do_not_vanish(lab, device):
    # One key of score 0 and value 1, 1024 keys of score -7 and value -1: weights of e**-7 = 9e-4
    # lie below what e4m3 can hold (2**-10), and together they are half of the whole.
    S, D = 1025, 32
    q, k = torch.zeros(1, 1, 1, D, device=device), torch.zeros(1, 1, S, D, device=device)
    q[..., 0], k[:, :, 1:, 0] = 1.0, -7.0
    v = torch.full((1, 1, S, D), -1.0, device=device)
    v[:, :, 0] = 1.0
    out, lse = lab.attention_fp8(q, k, v, scale=1.0, block_m=16, block_n=128)
    total = 1 + 1024 * math.exp(-7)
    want = (2 - total) / total
    assert abs(out.mean().item() - want) < 0.02, f"want {want:.3f}, got {out.mean().item():.3f}"
    got = lse.item()
    assert abs(got - math.log(total)) < 1e-2, f"lse: want {math.log(total):.4f}, got {got:.4f}"


@step6
@needs_e4m3
def test_fp8_token_scales_against_one_scale(lab, device):
    """The bar of this step: outliers cost at most half as much with a scale for each token."""
    torch.manual_seed(10)
    q, k, v = (torch.randn(1, 4, 128, 64, device=device) for _ in range(3))
    k = lab.with_outliers(k)
    want = oracle.attention(q, k, v)[0].value

    def one_scale(x):
        scale = x.abs().amax() / 448
        return lab.Quantised((x / scale).to(E4M3), scale.expand(x.shape[:3]).contiguous())

    def error(quantise):
        q8, k8 = quantise(q), quantise(k)
        out, _ = lab.attend_fp8(q8, k8, v, block_m=64, block_n=64, out_dtype=F32)
        return lab.rmse(out, want)

    token, tensor = error(lab.quantise), error(one_scale)
    assert token <= 0.5 * tensor, f"RMSE {token:.4f} per token, {tensor:.4f} per tensor"


@step6
@needs_e4m3
@pytest.mark.parametrize("values", [False, True], ids=["scores", "all"])
@pytest.mark.parametrize("x", [1208.0, 4096.0, 133120.0])  # scores near 2**24, 2**27, 2**38
def test_fp8_huge_equal_scores(lab, device, x, values):
    dtype = F32 if here.interpret else BF16
    for sign in (1, -1):
        q = torch.full((1, 1, 40, 64), x, dtype=dtype, device=device)
        with true_fma():
            out, lse = lab.attention_fp8(q, sign * q, q, sign < 0, values=values, block_m=32)
        want, got = sign * x**2 * 8, lse[0, 0, 0].item()
        assert (lse.double() / want - 1).abs().max().item() < 1e-5, (
            f"want lse {want:.7g}, got {got:.7g}; the usual cause: LIMIT is not the same in p, in "
            "m_new and in lse: HUGE over 2**SHIFT"
        )
        wrong = (out.double() / x - 1).abs().max().item()
        assert wrong < 1e-6 + oracle.eps(dtype), (
            f"equal scores weigh equally, want {x:g} everywhere, got {out[0, 0, -1, 0].item():g}; "
            "the usual cause where scores pass 2**27: SHIFT is added to a maximum that is rounded "
            "to multiples of 16"
        )


@step6
@needs_e4m3
def test_fp8_scales_of_any_size(lab, device):
    # A power of two moved from q to k changes no score; scales of 1e-22 are as good as others.
    q, k, v = oracle.qkv(1, 1, 20, 32, device=device)
    tiles = {"block_m": 16, "block_n": 32}
    want = lab.attention_fp8(q, k, v, True, **tiles)
    for power in (-66, 50):
        got = lab.attention_fp8(q * 2.0**power, k * 2.0**-power, v, True, **tiles)
        for name, a, b in zip(("out", "lse"), want, got, strict=True):
            error = (a - b).abs().max().item()
            assert error < 1e-4, (
                f"q times 2**{power}, k divided by it: want the same {name}, got one {error:.2g} "
                "off; the usual cause: scales are kept above some smallest number"
            )


@step6
@needs_e4m3
@interpreter_only
@causal_or_full
def test_fp8_masks_and_products_only_where_needed(lab, device, causal):
    def run(q, k, v, causal, scale, block_m, block_n):
        v = lab.quantise(v, "channel")
        lab.attend_fp8(
            lab.quantise(q), lab.quantise(k), v, causal, block_m=block_m, block_n=block_n
        )

    T, block_m, block_n = 70, 16, 32
    q, k, v = oracle.qkv(1, 1, T, 64, dtype=F16, device=device)
    events = events_of(run, q, k, v, causal, block_m, block_n, descriptors=True)
    check_masks(events, T, block_m, block_n, causal)
    check_operations(events, also=1)  # the keys' scales


@step6
@needs_e4m3
@interpreter_only
@causal_or_full
def test_fp8_order(lab, device, causal):
    def run(q, k, v, block):
        q, k, v = lab.quantise(q), lab.quantise(k), lab.quantise(v, "channel")
        lab.attend_fp8(q, k, v, causal, block_m=block, block_n=32, group=2, out_dtype=F16)

    check_order(lab, run, 2, causal, 32, F16, device)


@step6
@needs_e4m3
def test_fp8_offsets_beyond_32_bits(lab, device):
    H, T, D, block_m, block_n = HEADS_BEYOND_32_BITS
    q = lab.Quantised(
        lazy(1, H, T, D, dtype=E4M3, device=device), lazy(1, H, T, dtype=F32, device=device)
    )
    v = lazy(1, H, T, D, dtype=F16, device=device)
    last = oracle.inputs(1, 1, T, D, dtype=F16, device=device)
    few = lab.last_program_only() if here.interpret else contextlib.nullcontext()
    for x, part in zip((*q, v), (*quantised_in_torch(last), last), strict=True):
        x[:, -1:] = part
    with few:
        out, _ = lab.attend_fp8(q, q, v, block_m=block_m, block_n=block_n, group=1, out_dtype=F16)
    mine = lab.Quantised(*(x[:, -1:] for x in q))
    want = exact_attention(lab, mine, mine, last)[0].value
    error = (out[:, -1:, 512:].double() - want[:, :, 512:]).abs().max().item()
    assert error < 1e-2, f"the last head of {H:,}: error {error:.2g}; is the head int64?"


@step6
@needs_e4m3
@score_kinds
def test_fp8_score_ranges_are_finite(lab, device, kind):
    q, k, v = fenced_qkv(1, 2, 100, 32, dtype=F16, kind=kind, device=device)
    out, lse = lab.attention_fp8(q, k, v, True, block_m=32, block_n=32)
    for name, x in (("out", out), ("lse", lse)):
        bad = (~x.isfinite()).sum().item()
        assert bad == 0, f"{name}: want finite numbers, got {bad} of {x.numel()} that are not"
    most, largest = out.abs().max().item(), v.abs().max().item()
    assert most <= 1.1 * largest, (
        f"weights add up to 1: want out within the values, up to {largest:.3g}; got {most:.3g}"
    )


@step6
@needs_e4m3
@pytest.mark.parametrize("values", [False, True], ids=["scores", "all"])
def test_fp8_other_heads_unread(lab, device, values):
    q, k, v = oracle.qkv(1, 3, 21, 32, dtype=F16, device=device)
    for x in (q, k, v):
        x[:, 0], x[:, 2] = math.nan, math.nan
    out, _ = lab.attention_fp8(q, k, v, values=values, block_m=32, block_n=32)
    want = oracle.attention(*(x[:, 1:2] for x in (q, k, v)))[0].value
    error = lab.rmse(out[:, 1:2], want)
    assert error < 0.06, (
        f"NaN in the other heads: want an RMSE below 0.06 in this one, got {error:.2g}; usual "
        "causes: rows past the head's end are loaded, or the heads' offsets are wrong"
    )


@step6
def test_fp8_refuses_cards_without_it(lab, device):
    lab.quantise(oracle.inputs(1, 1, 2, 32, device=device))  # the check is given: as above
    for arch in (80, 86):
        with pytest.raises(ValueError, match=f"sm_{arch}"):
            lab.check_e4m3(arch)
    for arch in (89, 90, 120):
        lab.check_e4m3(arch)


@step6
@needs_e4m3
def test_fp8_rejects(lab, device):
    q, k, v = oracle.qkv(1, 1, 8, 32, dtype=F16, device=device)
    lab.attention_fp8(q, k, v, block_m=16, block_n=32)
    with pytest.raises(ValueError, match="D=16"):
        lab.attention_fp8(*(x[..., :16] for x in (q, k, v)))
    for block_n in (16, 512):
        with pytest.raises(ValueError, match=f"block_n={block_n}"):
            lab.attention_fp8(q, k, v, block_n=block_n)
    with pytest.raises(ValueError, match="block_m"):
        lab.attention_fp8(q, k, v, block_m=24)
    with pytest.raises(ValueError, match="scale"):
        lab.attention_fp8(q, k, v, scale=-1.0)
    with pytest.raises(ValueError, match="T=8, S=5"):
        lab.attention_fp8(q, k[:, :, :5], v[:, :, :5], True)


@step6
def test_rmse(lab, device):
    lab.quantise(oracle.inputs(1, 1, 2, 32, device=device))  # given, too
    a, b = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 6.0])
    for x, y, want in ((a, b, 1.0), (a.half(), a, 0.0)):
        got = lab.rmse(x, y)
        assert got == want, f"rmse of {x.tolist()} against {y.tolist()}: want {want}, got {got}"


@step6
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("D", [64, 128])
def test_fp8_compiles_for_cards_that_have_it(lab, request, D):
    cards = "sm_89", "sm_90", "sm_120"
    kernels = check_compiles(lab, request, "attention_fp8", cards, head_dim=D)
    copies = {c.arch: c.instructions["cp.async"] for c in kernels if c.kernel == "_fp8_kernel"}
    assert copies["sm_89"] > copies["sm_90"], (
        f"copies by cp.async: want more on sm_89, k and v, than on sm_90, which has the keys' "
        f"scales only: got {copies}; see the message of test_tma_compiles_for_every_card"
    )
    for block_n in (64, 128):
        tile = {"block_m": 64, "block_n": block_n, "num_warps": 4, "num_stages": 3}
        kernels = check_compiles(
            lab, request, "attention_fp8", ("sm_90",), **tile, head_dim=D, dtype="bfloat16"
        )
        assert all(kernels[-1].instructions[name] for name in ("bulk", "wgmma"))
