"""Trace: what it says of known code, of planted faults, and of code written in other ways."""

import argparse
import json
import math

import pytest
import torch

from labs import __main__, _impl
from labs._harness import bench, interpreter, mutants, tilemap, trace

LAB = "06_attention_kernels"
FIGURE = ["D..", "DD.", "FD.", "FFD", "FFD"]  # T = 33, 7 x 11, causal: the handout's picture

needs_interpreter = pytest.mark.skipif(
    interpreter.unavailable() is not None, reason=str(interpreter.unavailable())
)
pytestmark = pytest.mark.skipif(
    not (_impl.LABS / LAB / "solution.py").is_file(), reason="needs the lab's reference"
)


def options(*args):
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    return parser.parse_args(["06", *map(str, args)])


SMALL = options("--step", 2, "--T", 33, "--causal", "--block-m", 7, "--block-n", 11)
KERNEL = options("--step", 5, "--T", 65, "--causal", "--block-m", 32)


def traced(impl, chosen):
    module = bench.lab_bench(_impl.LABS / LAB)
    choices = module.traced(_impl.load(LAB, str(impl)), chosen)
    return next(t for t in choices if t.step == chosen.step)


def of_mutant(name, chosen, folder):
    mutant = next(m for m in mutants.of_lab(LAB) if m.id == name)
    return trace.trace(traced(mutants.write(mutant, LAB, folder), chosen), chosen)


def of_call(call, chosen, kernel=False):
    return trace.trace(trace.Traced(chosen.step, "mine", call, kernel), chosen)


def letters(found):
    return ["".join(tilemap.LETTERS[cell.kind] for cell in row) for row in found.cells]


def orders(found):
    return [[cell.orders for cell in row] for row in found.cells]


# ---------------------------------------------------------------- the reference


def test_small_case_visits_what_the_handout_draws():
    found = trace.trace(traced("solution", SMALL), SMALL)
    assert letters(found) == FIGURE
    assert dict(found.counts) == {"full": 5, "diagonal": 6, "skipped": 4}
    assert [cell.orders for row in found.cells for cell in row if cell.orders] == [
        [n] for n in range(1, 12)
    ]
    assert [n / least for _, n, least in found.numbers] == [1.0, 1.0]
    assert "right" in found.verdict


def test_small_case_without_a_mask_visits_all():
    chosen = options("--step", 2, "--block-m", 7, "--block-n", 11)
    found = trace.trace(traced("solution", chosen), chosen)
    assert letters(found) == ["FFF"] * 5
    assert [n / least for _, n, least in found.numbers] == [1.0, 1.0]


@needs_interpreter
def test_kernel_visits_in_the_order_of_its_programs():
    found = trace.trace(traced("solution", KERNEL), KERNEL)
    assert letters(found) == ["DD...", "FFDD.", "FFFFF"]
    assert orders(found)[1] == [[1], [2], [3], [4], []]
    assert orders(found)[2] == [[1], [2], [3], [4], [5]]
    assert [n / least for _, n, least in found.numbers] == [1.0, 1.0]
    assert "right" in found.verdict


@needs_interpreter
@pytest.mark.parametrize("step", [3, 4, 5])
def test_decoding_shows_chunks_and_tiles(step):
    """Lab 09: query heads stand for queries, and each chunk counts its tiles from 1."""
    lab = "09_flash_decoding"
    if not (_impl.LABS / lab / "solution.py").is_file():
        pytest.skip("needs the lab's reference")
    chosen = options("--step", step, "--T", 100, "--block-m", 64)
    choices = bench.lab_bench(_impl.LABS / lab).traced(_impl.load(lab, "solution"), chosen)
    found = trace.trace(next(t for t in choices if t.step == step), chosen)
    assert letters(found) == ["F" * 7] * 2
    assert orders(found) == [[[1], [2], [3], [1], [2], [3], [4]]] * 2
    assert found.numbers[1][1] == found.numbers[1][2]
    assert "right" in found.verdict


@needs_interpreter
@pytest.mark.parametrize("impl", ["exercise", "solution"])
def test_forward_of_the_backward_lab(impl):
    """Lab 07: its forward is given, so an untouched stub shows the same map."""
    lab = "07_attention_backward"
    if not (_impl.LABS / lab / f"{impl}.py").is_file():
        pytest.skip("needs the lab")
    choice, *_ = bench.lab_bench(_impl.LABS / lab).traced(_impl.load(lab, impl), KERNEL)
    found = trace.trace(choice, KERNEL)
    assert letters(found) == ["DD...", "FFDD.", "FFFFF"]
    assert [n / least for _, n, least in found.numbers] == [1.0, 1.0]
    assert "right" in found.verdict


@needs_interpreter
@pytest.mark.parametrize(
    ("step", "agree", "order"),
    [
        (
            2,
            "dk and dv agree",
            [[[1], [1], [], [], []], [[2], [2], [1], [1], []], [[3], [3], [2], [2], [1]]],
        ),
        (
            3,
            "dq agrees",
            [[[1], [2], [], [], []], [[1], [2], [3], [4], []], [[1], [2], [3], [4], [5]]],
        ),
    ],
)
def test_backward_walks_down_columns_and_along_rows(step, agree, order):
    """Lab 07: dk and dv count the query tiles of each key tile, dq the key tiles of each row."""
    lab = "07_attention_backward"
    if not (_impl.LABS / lab / "solution.py").is_file():
        pytest.skip("needs the lab's reference")
    choices = bench.lab_bench(_impl.LABS / lab).traced(_impl.load(lab, "solution"), KERNEL)
    found = trace.trace(next(t for t in choices if t.step == step), KERNEL)
    assert letters(found) == ["DD...", "FFDD.", "FFFFF"]
    assert orders(found) == order
    assert [n / least for _, n, least in found.numbers] == [1.0, 1.0]
    assert found.verdict == f"the result is right: {agree} with float64"


@needs_interpreter
@pytest.mark.parametrize(
    ("args", "want"),
    [(["--causal"], "leave out --causal"), (["--block-n", 11], "block_n must be a power of two")],
)
def test_decoding_refuses_in_one_line(args, want, capsys):
    assert command("09", "--impl", "solution", *args) == 2
    captured = capsys.readouterr()
    assert want in captured.err
    assert len(captured.err.splitlines()) == 1


@needs_interpreter
@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_variants_show_what_each_step_skips(step):
    """Lab 08: step 1 takes all queries at once, kernels end at the last key that a tile sees."""
    lab = "08_attention_variants"
    if not (_impl.LABS / lab / "solution.py").is_file():
        pytest.skip("needs the lab's reference")
    kernel = {True: ["DD...", "FFDD.", "FFFFF"], False: ["F" * 5] * 3}
    online = {True: ["DDUUU", "FFDDU", "FFFFF"], False: ["F" * 5] * 3}
    for causal in (True, False):
        flag = ["--causal"] if causal else []
        chosen = options("--step", step, "--T", 65, "--block-m", 32, *flag)
        choices = bench.lab_bench(_impl.LABS / lab).traced(_impl.load(lab, "solution"), chosen)
        found = trace.trace(next(t for t in choices if t.step == step), chosen)
        assert letters(found) == (online if step == 1 else kernel)[causal]
        assert orders(found)[2] == [[1], [2], [3], [4], [5]]
        assert "right" in found.verdict
        if step != 1:
            assert found.numbers[1][1] == found.numbers[1][2]


GOLDEN = """\
    key    0   11   22
query
   0..6   D1    .    .
  7..13   D2   D3    .
 14..20   F4   D5    .
 21..27   F6   F7   D8
 28..32   F9  F10  D11

F full, D diagonal, . skipped; the number is the order of visit"""


def test_text_of_the_small_case():
    found = trace.trace(traced("solution", SMALL), SMALL)
    assert "\n".join(tilemap.tile_text(found)) == GOLDEN
    assert found.captions() == [
        "bytes of K read: 6,592; needed 6,592: 1.00 times",
        "FLOPs of products: 41,920; needed 41,920: 1.00 times",
    ]


@pytest.mark.parametrize("tiles", [10, 40, 80])
def test_text_fits_in_its_columns(tiles):
    rows = torch.arange(tiles * 2).numpy()
    visits = [tilemap.Visit(n, rows[2 * n : 2 * n + 2], rows) for n in range(tiles)]
    found = tilemap.TileMap(tiles * 2, 2, 2, False, visits)
    lines = tilemap.tile_text(found)
    assert max(map(len, lines)) <= tilemap.WIDTH
    assert sum(line.count("F") for line in lines[:-1]) == tiles**2


# ---------------------------------------------------------------- planted faults


@pytest.mark.parametrize(
    ("name", "chosen", "want"),
    [
        ("forward-no-tile-skip", SMALL, ["DUU", "DDU", "FDU", "FFD", "FFD"]),
        ("forward-skip-early", SMALL, ["M..", "MM.", "FM.", "FMM", "FFM"]),
        ("forward-skip-one-short", SMALL, ["M..", "DM.", "FM.", "FFM", "FFM"]),
        pytest.param(
            "kernel-no-tile-skip", KERNEL, ["DDUUU", "FFDDU", "FFFFF"], marks=needs_interpreter
        ),
        pytest.param(
            "kernel-skip-early", KERNEL, ["DM...", "FFDM.", "FFFFF"], marks=needs_interpreter
        ),
        pytest.param(
            "kernel-k-unmasked", KERNEL, ["DD...", "FFDD.", "FFFFM"], marks=needs_interpreter
        ),
    ],
)
def test_planted_fault_shows(name, chosen, want, tmp_path):
    found = of_mutant(name, chosen, tmp_path)
    assert letters(found) == want


def test_pairs_that_are_missing_are_named(tmp_path):
    found = of_mutant("forward-skip-one-short", SMALL, tmp_path)
    assert found.missing.sum() == 5
    assert "missing: queries 7..13 with keys 11..21: 1 of 6 visible pairs never met" in (
        tilemap.missing_text(found)
    )
    assert found.missing_keys(13).tolist() == [13]
    points, true, lse = tilemap.path(found, 13, SMALL)
    lines = tilemap.path_text(found, 13, points, true, lse)
    assert "never met: key 13; the path ends beside the true value" in lines


def test_a_tile_computed_twice_is_two_visits(tmp_path):
    found = of_mutant("forward-scores-twice", SMALL, tmp_path)
    assert orders(found)[0] == [[1, 2], [], []]
    assert found.cells[0][0].label == "1x2"


@needs_interpreter
def test_q_read_again_for_each_key_tile_costs_bytes_not_visits(tmp_path):
    found = of_mutant("kernel-q-in-the-loop", KERNEL, tmp_path)
    assert orders(found)[1] == [[1], [2], [3], [4], []]
    assert found.numbers[0][1] > 1.4 * found.numbers[0][2]


@needs_interpreter
def test_code_that_stops_shows_why_and_what_it_had_visited(tmp_path):
    found = of_mutant("kernel-k-unmasked", KERNEL, tmp_path)
    assert "stray load" in found.error
    assert found.verdict == "no result"


# ---------------------------------------------------------------- written in other ways


def tiles(T, m, n):
    """(rows, keys) of the tiles that a causal forward needs, query tiles outside."""
    for i0 in range(0, T, m):
        i1 = min(i0 + m, T)
        for j0 in range(0, i1, n):
            yield slice(i0, i1), slice(j0, min(j0 + n, T))


def scaled_first(q, k, rows, keys):
    q, k = q.double() * 0.25, k.double()
    return q[:, :, rows] @ k[:, :, keys].transpose(-2, -1)


def transposed_first(q, k, rows, keys):
    kt = k.transpose(-2, -1).contiguous()
    return q[:, :, rows] @ kt[..., keys]


def one_head_at_a_time(q, k, rows, keys):
    return torch.mm(q[0, 0][rows], k[0, 0][keys].t())


def einsum(q, k, rows, keys):
    return torch.einsum("bhtd,bhsd->bhts", q[:, :, rows], k[:, :, keys])


def without_a_product(q, k, rows, keys):
    return (q[:, :, rows, None] * k[:, :, None, keys]).sum(-1)


def through_a_buffer(q, k, rows, keys):
    buffer = torch.zeros(1, 1, 16, q.shape[-1])
    buffer[:, :, : keys.stop - keys.start] = k[:, :, keys]
    return torch.baddbmm(torch.zeros(1), q[0, :, rows], buffer[0].transpose(-2, -1))


def by_index(q, k, rows, keys):
    return q[:, :, rows] @ k.index_select(2, torch.arange(33)[keys]).transpose(-2, -1)


def in_halves(q, k, rows, keys):
    parts = zip(q[:, :, rows].split(8, -1), k[:, :, keys].split(8, -1), strict=True)
    return sum(a @ b.transpose(-2, -1) for a, b in parts)


@pytest.mark.parametrize(
    "score",
    [
        scaled_first,
        transposed_first,
        one_head_at_a_time,
        einsum,
        without_a_product,
        through_a_buffer,
        by_index,
        in_halves,
    ],
)
def test_pytorch_code_is_followed_however_it_is_written(score):
    def call(q, k, v):
        for rows, keys in tiles(33, 7, 11):
            score(q, k, rows, keys)
        return None, None

    found = of_call(call, SMALL)
    assert found.error is None
    assert letters(found) == FIGURE
    assert len(found.visits) == 11


def test_key_tiles_outside_is_seen_in_the_order():
    def call(q, k, v):
        for rows, keys in sorted(tiles(33, 7, 11), key=lambda t: t[1].start):
            scaled_first(q, k, rows, keys)

    found = of_call(call, SMALL)
    assert letters(found) == FIGURE
    assert [row[0].orders for row in found.cells] == [[1], [2], [3], [4], [5]]


def test_whole_scores_are_one_visit_of_every_tile():
    found = of_call(lambda q, k, v: (q @ k.transpose(-2, -1), None), SMALL)
    assert letters(found) == ["DUU", "DDU", "FDU", "FFD", "FFD"]
    assert len(found.visits) == 1


def test_code_that_reads_nothing_cannot_be_told():
    assert of_call(lambda q, k, v: (v, None), SMALL).visits == []


if interpreter.unavailable() is None:
    import triton
    import triton.language as tl

    @triton.jit
    def _loads_kernel(
        held_ptr,
        other_ptr,
        stride_ht,
        stride_hd,
        stride_ot,
        stride_od,
        T,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        HOLDS_KEYS: tl.constexpr,
        TILES: tl.constexpr,
    ):
        """Holds TILES tiles of one tensor in turn and loads those of the other that it needs."""
        offs, offs_d = tl.arange(0, BLOCK), tl.arange(0, D)
        for turn in range(0, TILES):
            first = (tl.program_id(0) * TILES + turn) * BLOCK
            rows = (first + offs)[:, None]
            x = tl.load(held_ptr + rows * stride_ht + offs_d * stride_hd, mask=rows < T, other=0.0)
            start, end = (first, T) if HOLDS_KEYS else (0, first + BLOCK)
            for other in range(start, end, BLOCK):
                rows = (other + offs)[:, None]
                ptrs = other_ptr + rows * stride_ot + offs_d * stride_od
                tl.sum(x * tl.load(ptrs, mask=rows < T, other=0.0), axis=1)


@needs_interpreter
@pytest.mark.parametrize("copy", ["k itself", "a copy of k"])
@pytest.mark.parametrize("how", ["queries outside", "keys outside", "one program"])
def test_kernel_is_followed_however_it_loads(how, copy):
    chosen = options("--step", 5, "--T", 40, "--causal")

    def call(q, k, v):
        if copy == "a copy of k":
            k = (k.double() * 0.25).transpose(-2, -1).contiguous().transpose(-2, -1)
        held, other = (k, q) if how == "keys outside" else (q, k)
        strides = (*held.stride()[2:], *other.stride()[2:])
        tiles = 3 if how == "one program" else 1
        options = {"D": 16, "BLOCK": 16, "HOLDS_KEYS": how == "keys outside", "TILES": tiles}
        _loads_kernel[(3 // tiles,)](held, other, *strides, 40, **options)

    found = of_call(call, chosen, kernel=True)
    assert found.error is None
    assert letters(found) == ["D..", "FD.", "FFD"]
    if how == "keys outside":
        assert orders(found)[2] == [[3], [2], [1]]


# ---------------------------------------------------------------- one row


def test_path_ends_at_the_true_value():
    found = trace.trace(traced("solution", SMALL), SMALL)
    stats = _impl.load(LAB, "solution").online_softmax_stats
    points, true, lse = tilemap.path(found, 32, SMALL, stats)
    assert [tilemap.span(p.keys) for p in points] == ["0..10", "11..21", "22..32"]
    assert points[0].m < points[1].m < points[2].m
    assert abs(points[-1].out - true).max() < 1e-12
    assert points[-1].m + math.log(points[-1].l) == pytest.approx(lse, abs=1e-12)
    lines = tilemap.path_text(found, 32, points, true, lse)
    assert (
        lines[-1] == "your online_softmax_stats over the same blocks: the same m and l after each"
    )


def test_path_shows_where_the_labs_own_statistics_leave_it(tmp_path):
    mutant = next(m for m in mutants.of_lab(LAB) if m.id == "stats-no-rescale")
    stats = _impl.load(LAB, str(mutants.write(mutant, LAB, tmp_path))).online_softmax_stats
    found = trace.trace(traced("solution", SMALL), SMALL)
    lines = tilemap.path_text(found, 32, *tilemap.path(found, 32, SMALL, stats))
    assert "after tile 2 it gives m = 2.0968, l = " in lines[-1]


# ---------------------------------------------------------------- the command


def command(*args):
    return __main__.main(["trace", *map(str, args)])


def test_command_writes_pictures_that_are_not_blank(tmp_path, capsys):
    image = pytest.importorskip("matplotlib.image")
    args = ("--step", 2, "--causal", "--block-m", 7, "--block-n", 11, "--out", tmp_path)
    assert command("06", "--impl", "solution", *args) == 0
    out = capsys.readouterr().out
    assert GOLDEN in out
    assert max(map(len, out.splitlines())) <= tilemap.WIDTH
    record = json.loads((tmp_path / "step2.json").read_text())
    assert record["counts"] == {"full": 5, "diagonal": 6, "skipped": 4}
    for name in ("step2-tiles.png", "step2-row.png"):
        assert name in out
        assert image.imread(tmp_path / name)[..., :3].std() > 0.1


@pytest.mark.parametrize(
    ("args", "want"),
    [
        (["--step", "2"], "lab 06 step 2: write flash_attention_forward"),
        (["--step", "3"], "can trace step 2 or 5: got --step 3"),
        (["--T", "9000"], "--T must be at most 4,096: got 9,000"),
        (["--T", "4000"], "at most 80 tiles a side: --block-m 16 cuts T = 4000 into 250"),
        (["--row", "33"], "--row must lie between 0 and 32: got 33"),
        (["--step", "5", "--block-m", "7", "--impl", "solution"], "block_m must be a power of two"),
    ],
)
def test_command_refuses_in_one_line(args, want, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(interpreter, "unavailable", lambda: None)
    if "--impl" not in args:
        args = [*args, "--impl", str(stub(tmp_path))]
    assert command("06", *args) == 2
    captured = capsys.readouterr()
    assert want in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize("lab", ["01", "02"])
def test_a_lab_without_attention_says_which_labs_can_be_traced(capsys, lab):
    assert command(lab) == 2
    want = f"error: lab {lab} has nothing to trace; labs 06, 07, 08, 09 and 10 have\n"
    assert capsys.readouterr().err == want


def stub(folder):
    """The untouched exercise, whatever has become of the one in the lab's folder."""
    file = folder / "stub.py"
    source = (_impl.LABS / LAB / "solution.py").read_text()
    head = "def flash_attention_forward(q, k, v, causal=False, block_q=16, block_k=16):"
    unwritten = '\n    raise NotImplementedError("lab 06 step 2: write flash_attention_forward")\n'
    file.write_text(source + f"\n\n{head}{unwritten}")
    return file


def test_a_gpu_machine_is_told_what_to_set(capsys, monkeypatch):
    reason = "kernels run on the GPU; watching them needs Triton's CPU interpreter"
    monkeypatch.setattr(interpreter, "unavailable", lambda: reason)
    assert command("06", "--step", "5", "--impl", "solution") == 2
    err = capsys.readouterr().err
    assert "set TRITON_INTERPRET=1" in err
    assert len(err.splitlines()) == 1
