"""The benchmark, with a fake card: a clock that says what the test wants, tensors on the CPU."""

import argparse
import csv
import importlib
import importlib.util
import json
import types
import warnings

import pytest
import torch

from labs._harness import bench, interpreter, plot, runtime, work
from labs._impl import LoadError, find_lab, load

needs_interpreter = pytest.mark.skipif(
    interpreter.unavailable() is not None, reason=str(interpreter.unavailable())
)


class FakeGpu(bench.Gpu):
    """Runs on the CPU; a call takes the ms that `clock` gives for the function's output."""

    device = "cpu"

    def __init__(self, clock=lambda output: 1.0, memory=20 << 20):
        self.clock, self.memory, self.settled, self.lost = clock, memory, 0, False

    def sync(self):
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def settle(self):
        self.settled += 1

    def free(self):
        return self.memory

    def cap_memory(self):
        pass

    def time(self, fn, warmup_ms=100.0, rep_ms=150.0):
        fn()
        ms = self.clock(fn())
        return [0.9 * ms, ms, 1.2 * ms]

    def peak(self, fn):
        with work.count_torch() as found:
            output = fn()
        return output, found.peak

    def describe(self):
        return {"card": "fake card"}


def doubled(x):
    return 2 * x


def sweep(*providers, **changes):
    """A sweep whose right answer is 2 x."""
    fields = {
        "name": "double",
        "title": "Doubling",
        "axis": "n",
        "sizes": [8, 16],
        "inputs": lambda n: (torch.arange(n, dtype=torch.float32) + 1,),
        "providers": list(providers),
        "verify": lambda inputs, y: ((y - 2 * inputs[0]).abs().max().item(), 1e-6),
        "unit": "TB/s",
        "work": lambda n: 8e9 * n,
        "ceiling": "copy",
    }
    return bench.Sweep(**{**fields, **changes})


def timed(made, gpu=None, size=8):
    rows = []
    bench.time_size(made, size, gpu or FakeGpu(), 32.0, rows, lambda text: None)
    return {row.provider if not row.config else row.config: row for row in rows}


def parse(*argv):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([str(a) for a in argv])


# ---------------------------------------------------------------- timing
def test_rate_quartiles_percent_and_memory():
    row = timed(sweep(bench.Provider("mine", doubled, yours=True)))["mine"]
    assert row.status == "ok"
    assert row.ms == 1.0
    assert row.ms_q1 <= row.ms <= row.ms_q3
    assert row.rate == 64.0  # 8e9 * 8 bytes in a ms
    assert row.percent == 200.0
    assert row.peak == 32
    assert row.error == 0.0


def nan_output(x):
    return 2 * x * float("nan")


def never_writes(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("wrong", [torch.clone, nan_output, never_writes])
def test_a_wrong_result_is_not_ranked_and_fails(wrong):
    right = bench.Provider("right", doubled)
    made = sweep(right, bench.Provider("mine", wrong, yours=True))
    rows = timed(made)
    assert rows["mine"].status == "WRONG"
    assert rows["mine"].rate is None
    assert rows["right"].status == "ok"
    assert bench.exit_code(list(rows.values())) == 1
    assert bench.timed_table(made, list(rows.values())).split("\n")[3].endswith("WRONG")


def test_the_output_that_was_timed_is_the_one_checked():
    calls = []

    def goes_wrong(x):
        calls.append(1)
        return 2 * x if len(calls) < 3 else 3 * x

    assert timed(sweep(bench.Provider("mine", goes_wrong, yours=True)))["mine"].status == "WRONG"


def test_out_of_memory_is_marked_and_survived():
    def hungry(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu = FakeGpu()
    rows = timed(sweep(bench.Provider("big", hungry), bench.Provider("mine", doubled, True)), gpu)
    assert rows["big"].status == "OOM"
    assert gpu.settled
    assert rows["mine"].status == "ok"
    assert bench.exit_code(list(rows.values())) == 0


def test_inputs_that_do_not_fit_are_out_of_memory_too():
    def hungry(n):
        raise torch.OutOfMemoryError("CUDA out of memory")

    rows = timed(sweep(bench.Provider("mine", doubled, yours=True), inputs=hungry))
    assert rows["mine"].status == "OOM"


def test_a_missing_backend_is_named_with_its_reason():
    def refused(x):
        warnings.warn("cuDNN attention has been runtime disabled.", stacklevel=1)
        warnings.warn("Flash attention kernel not used because:", stacklevel=1)
        warnings.warn("Expected fp16. (Triggered internally at x.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    rows = timed(sweep(bench.Provider("SDPA", refused), bench.Provider("mine", doubled, True)))
    assert rows["SDPA"].status == "n/a"
    assert rows["SDPA"].reason == "Expected fp16."


def test_an_unwritten_step_is_one_line_and_the_rest_is_timed():
    def stub(x):
        raise RuntimeError("at 3:4: ...") from AssertionError("lab 06 step 5: write _kernel")

    made = sweep(bench.Provider("mine", stub, yours=True), bench.Provider("naive", doubled))
    rows = [*timed(made).values(), *timed(made, size=16).values()]
    assert bench.remarks(rows) == ["lab 06 step 5: write _kernel"]
    assert [r.status for r in rows if r.provider == "naive"] == ["ok", "ok"]
    assert bench.exit_code(rows) == 1


def test_a_lost_context_stops_and_names_the_culprit():
    gpu = FakeGpu()

    def crash(x):
        gpu.lost = True
        raise RuntimeError("illegal memory access")

    rows = []
    made = sweep(bench.Provider("mine", crash, yours=True))
    with pytest.raises(bench.ContextLost, match="lost in mine"):
        bench.time_size(made, 8, gpu, 1.0, rows, print)
    assert rows[0].status == "error"


def test_tune_takes_the_fastest_that_is_right():
    def provider(config, factor):
        return bench.Provider("mine", lambda x: factor * x, yours=True, config=config)

    ms = {2.0: 3.0, 3.0: 1.0, 2.001: 2.0}
    made = sweep(
        provider("default", 2.0),
        tune=[provider("slow", 2.0), provider("wrong", 3.0), provider("fast", 2.001)],
        tuned="mine",
        verify=lambda inputs, y: ((y - 2 * inputs[0]).abs().max().item(), 0.1),
    )
    gpu = FakeGpu(clock=lambda y: ms[min(ms, key=lambda f: abs(f - (y[-1] / 8).item()))])
    rows = []
    bench.time_size(made, 8, gpu, 1.0, rows, lambda text: None)
    assert [r.status for r in rows] == ["ok", "WRONG", "ok", "ok"]
    assert rows[-1].sweep == "double"
    assert rows[-1].config == "fast"
    assert bench.exit_code(rows) == 0  # a configuration that fails is a result, not a fault


def test_providers_are_interleaved():
    order = []

    class Recorder(FakeGpu):
        def time(self, fn, **kwargs):
            order.append(fn)
            return super().time(fn, **kwargs)

    timed(sweep(bench.Provider("a", doubled), bench.Provider("b", doubled)), Recorder())
    assert len(order) == 2 * bench.ROUNDS


def test_ceilings_on_a_small_card_are_smaller():
    found = bench.ceilings(FakeGpu())
    assert found["matmul"][1:] == ("TFLOP/s", "bf16 matmul 512x512x512")
    assert found["matmul"][0] == pytest.approx(2 * 512**3 / 1e9)
    assert found["copy"][1] == "TB/s"


@pytest.mark.parametrize(("wanted", "each", "fits"), [(8, 1, 8), (8, 20, 4), (8, 1000, 1)])
def test_fit_halves_until_it_fits(wanted, each, fits):
    assert bench.fit(wanted, each, FakeGpu(memory=100)) == fits


def test_times_of_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr(runtime, "setup", lambda: runtime.Runtime("cpu", True, "3", "test"))
    with pytest.raises(RuntimeError, match="mean nothing"):
        bench.Gpu().time(lambda: None)


def test_events_are_paired_and_warm_up_is_dropped(monkeypatch):
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, end):
            return end.at - self.at

    def call():
        clock[0] += 10.0

    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(bench, "L2_FLUSH_BYTES", 16)
    monkeypatch.setattr(runtime, "setup", lambda: runtime.Runtime("cuda", False, "3", "test"))
    assert bench.Gpu.time(gpu, call, warmup_ms=50, rep_ms=40) == [10.0] * 4
    assert clock[0] == 10.0 * (1 + 3 + 3 + 5 + 4)  # first, to guess, to launch, warm-up, timed


@pytest.mark.parametrize(
    ("host_ms", "kernel_ms", "want"),
    [(0.02, 0.01, 1), (0.1, 0.1, 2), (0.2, 0.12, 6), (0.2, 3.0, 1), (50.0, 50.0, 20)],
)
def test_the_card_never_waits_for_a_launch(host_ms, kernel_ms, want):
    assert bench.flushes_for(host_ms, kernel_ms, flush_ms=0.05) == want


# ---------------------------------------------------------------- the command
def run_with(monkeypatch, sweeps, tmp_path, gpu):
    """bench.run on lab 06 with other sweeps."""
    lab = types.SimpleNamespace(timed=lambda *a: sweeps, counted=lambda *a: sweeps)
    monkeypatch.setattr(bench, "lab_bench", lambda folder: lab)
    return bench.run(parse("06", "--impl", "solution", "--out", tmp_path), gpu)


def test_ctrl_c_keeps_what_is_done(monkeypatch, tmp_path, capsys):
    def stopped(n):
        if n == 16:
            raise KeyboardInterrupt
        return (torch.ones(n),)

    made = sweep(bench.Provider("mine", doubled, yours=True), inputs=stopped)
    assert run_with(monkeypatch, [made], tmp_path, FakeGpu()) == 130
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["partial"] == "stopped by Ctrl-C"
    assert [r["size"] for r in report["rows"]] == [8]
    assert "partial: stopped by Ctrl-C" in capsys.readouterr().out


def test_files_say_what_was_run(monkeypatch, tmp_path, capsys):
    made = sweep(bench.Provider("mine", doubled, yours=True), cost=("mine",))
    assert run_with(monkeypatch, [made], tmp_path, FakeGpu()) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    assert {"command", "date", "versions", "machine", "settings", "ceilings"} <= set(report)
    assert report["machine"]["card"] == "fake card"
    with (tmp_path / "results.csv").open() as f:
        assert [row["rate"] for row in csv.DictReader(f)] == ["64.0", "128.0"]
    for name in ("double-rate.png", "double-cost.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert max(map(len, capsys.readouterr().out.split("\n")[:-5])) <= 100


@pytest.mark.parametrize("option", ["--check", "--tune"])
def test_check_and_tune_without_a_gpu_are_one_line(monkeypatch, capsys, option):
    monkeypatch.setattr(runtime, "setup", lambda: runtime.Runtime("cpu", True, "3", "no GPU"))
    assert bench.run(parse("06", option)) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err == f"bench {option} needs a GPU: no GPU\n"


@pytest.mark.parametrize("gpu", [None, FakeGpu()])
def test_a_card_is_for_lab_03_only(gpu):
    with pytest.raises(LoadError, match="--card is an option of lab 03 only: got lab 06"):
        bench.run(parse("06", "--card", "T4"), gpu)


def test_a_lab_without_a_benchmark_says_which_have_one():
    with pytest.raises(LoadError, match=r"^lab 02 has no benchmark; labs 01, 03, .* and 11 have"):
        bench.run(parse("02"))


@pytest.mark.parametrize(("impl", "word"), [("solution", "reference"), ("exercise", "yours")])
def test_the_reference_is_not_called_yours(monkeypatch, tmp_path, capsys, impl, word):
    made = sweep(
        bench.Provider("yours (fast)", doubled, yours=True),
        bench.Provider("not yours", doubled),
        tune=[bench.Provider("yours (fast)", doubled, yours=True, config="8x8")],
        tuned="yours (fast)",
        cost=("yours (fast)",),
    )
    lab = types.SimpleNamespace(timed=lambda *a: [made])
    monkeypatch.setattr(bench, "lab_bench", lambda folder: lab)
    assert bench.run(parse("06", "--impl", impl, "--out", tmp_path), FakeGpu()) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {r["provider"] for r in rows} == {f"{word} (fast)", "not yours"}
    assert "best at n=8: 8x8" in capsys.readouterr().out


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_check_prints_got_and_wanted(monkeypatch, capsys, ok, code):
    found = [bench.Check("error", "2e-3", "<= 1e-3", ok)]
    lab = types.SimpleNamespace(check=lambda *a: found)
    monkeypatch.setattr(bench, "lab_bench", lambda folder: lab)
    assert bench.run(parse("06", "--check", "--impl", "solution"), FakeGpu()) == code
    assert "error: 2e-3 (wanted <= 1e-3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (["--lengths", "0"], "lengths must be 1 or more: got 0"),
        (["--lengths", "64,-3"], "lengths must be 1 or more: got -3"),
        (["--lengths", "x"], "lengths must be numbers such as 512,1024: got 'x'"),
        (["--batch", "-1"], "--batch: must be a whole number, 1 or more: got '-1'"),
    ],
)
def test_bad_arguments_are_refused(bad, says, capsys):
    with pytest.raises(SystemExit) as stop:
        parse("06", *bad)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_unknown_sweep(tmp_path):
    with pytest.raises(LoadError, match="attention, softmax"):
        bench.run(parse("06", "--only", "x", "--impl", "solution"), FakeGpu())


def test_tables_end_at_100_columns():
    text = bench.table(["code", "note"], [["a", "x" * 200]])
    assert max(map(len, text.split("\n"))) == 100


# ---------------------------------------------------------------- what a lab adds
def counted(made):
    rows = []
    bench.count_size(made, 8, rows, lambda text: None)
    return rows[0]


def test_a_formula_that_is_not_written_is_one_line():
    def formula(n):
        raise NotImplementedError("lab 03 step 2: write attention_bytes")

    row = counted(sweep(bench.Provider("mine", doubled, yours=True, moved=formula)))
    assert (row.status, row.moved) == ("unwritten", None)
    assert bench.remarks([row]) == ["lab 03 step 2: write attention_bytes"]


@pytest.mark.parametrize(
    ("exact", "formula", "status"), [(True, 64, "ok"), (True, 65, "WRONG"), (False, 65, "ok")]
)
def test_a_count_that_is_not_its_formula_is_wrong_where_that_is_the_lab(exact, formula, status):
    made = sweep(bench.Provider("mine", doubled, yours=True, moved=lambda n: formula), exact=exact)
    row = counted(made)
    assert row.status == status
    assert row.reason == ("counted 64 bytes, the formula says 65" if status == "WRONG" else "")


def unwritten_picture(*args):
    raise NotImplementedError("lab 03 step 5: write roofline_plot")


@pytest.mark.parametrize(
    ("closing", "code", "said"),
    [
        (lambda module, options, report, rows, folder: ("in closing", [folder / "x"]), 0, "x\n"),
        (unwritten_picture, 1, "\nlab 03 step 5: write roofline_plot\n"),
        (lambda *args: 1 / 0, 1, "\nfailed: ZeroDivisionError: division by zero\n"),
    ],
    ids=["adds", "unwritten", "crashes"],
)
def test_closing(monkeypatch, tmp_path, capsys, closing, code, said):
    made = sweep(bench.Provider("mine", doubled, yours=True))
    lab = types.SimpleNamespace(timed=lambda *a: [made], closing=closing)
    monkeypatch.setattr(bench, "lab_bench", lambda folder: lab)
    assert bench.run(parse("06", "--impl", "solution", "--out", tmp_path), FakeGpu()) == code
    assert said in capsys.readouterr().out


def test_many_versions_have_a_line_each():
    """Lab 10 draws eleven at a time."""
    versions = [bench.Provider(f"v{n}", doubled) for n in range(40)]
    styles = plot._styles(sweep(bench.Provider("mine", doubled, yours=True), *versions))
    looks = {(style["color"], style["marker"]) for style in styles.values()}
    assert len(styles) == len(looks) == 41


def axis_of(sizes):
    """The size axis of a figure with two panels, as it is drawn."""
    figure, panels = plot.plt.subplots(1, 2, figsize=(14, 7))
    plot._size_axis(panels[0], sweep(sizes=sizes))
    plot.plt.close(figure)
    return panels[0]


def test_sizes_lie_where_their_numbers_are():
    axes = axis_of([1000, 1024, 4096, 16384])
    assert axes.get_xscale() == "log"
    assert list(axes.get_xticks()) == [1000, 1024, 4096, 16384]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["1,000", "\n1,024", "4,096", "16,384"]  # close ones one below the other


def test_one_size_has_an_axis_and_a_formula_that_shows(tmp_path, monkeypatch):
    low, high = axis_of([1000]).get_xlim()
    assert low < 1000 < high
    lines = []

    def save(figure, path):
        lines.extend((x.get_label(), x.get_marker()) for x in figure.axes[0].lines)
        return path

    monkeypatch.setattr(plot, "_save", save)
    made = sweep(bench.Provider("mine", doubled, yours=True), sizes=[8])
    row = bench.Row("double", 8, "mine", True, moved=64, peak=32, moved_formula=64)
    plot.counts(tmp_path / "x.png", made, [row], "title")
    assert [marker for _, marker in lines] == ["_", "o", "None"]
    assert lines[-1][0] == "line: the handout's formula"
    lines.clear()
    row.moved_formula = None
    plot.counts(tmp_path / "x.png", made, [row], "title")
    assert not any("formula" in label for label, _ in lines)
    plot.plt.close("all")


# ---------------------------------------------------------------- lab 06
lab06 = bench.lab_bench(find_lab("06"))


@needs_interpreter
@pytest.mark.parametrize("mask", ["--causal", "--full"])
@pytest.mark.parametrize(("m", "n"), [(16, 16), (16, 64), (64, 32)])
def test_counts_of_the_reference_equal_the_formulas(mask, m, n):
    options = parse("06", mask, "--lengths", "50,96", "--heads", 2, "--block-m", m, "--block-n", n)
    rows = []
    for made in lab06.counted(load("06", "solution"), options):
        for size in made.sizes[:2]:
            bench.count_size(made, size, rows, lambda text: None)
    assert [r.status for r in rows] == ["ok"] * 10
    for r in rows:
        assert (r.moved, r.peak) == (r.moved_formula, r.peak_formula), r


@needs_interpreter
def test_kernel_bytes_stay_far_below_naive():
    sizes = dict(heads=1, D=64, e=4, causal=True)
    naive = lab06.naive_bytes(4096, **sizes)
    assert naive > 8 * lab06.kernel_bytes(4096, block_m=64, block_n=64, **sizes)


@pytest.mark.parametrize("causal", [True, False])
def test_flops_against_a_counted_mask(causal):
    T, D = 64, 16
    pairs = torch.ones(T, T).tril().sum().item() if causal else T * T
    exact = 2 * 3 * 4 * D * pairs
    assert lab06.flops(2, 3, T, D, causal) == pytest.approx(exact, rel=1 / T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_budget_fits_plain_pytorch_and_nothing_wrong(dtype):
    naive = load("06", "solution").naive_attention
    q, k, v = lab06._qkv(1, 2, 64, dtype, "cpu", 1024)
    out = naive(q, k, v, causal=True)
    error, budget = lab06.attention_error((q, k, v), out, causal=True)
    assert error <= budget
    for wrong in (naive(q, k, v), out * 1.1, out.roll(1, dims=2), out * float("nan")):
        error, budget = lab06.attention_error((q, k, v), wrong, causal=True)
        assert not error <= budget


@needs_interpreter
def test_untouched_stubs_exit_1_with_a_line_for_each_step(tmp_path, capsys):
    assert bench.run(parse("06", "--lengths", "16,32", "--out", tmp_path)) == 1
    out = capsys.readouterr().out
    for line in ("2: write flash_attention_forward", "5: write _flash_fwd_k", "4: write _softmax"):
        assert out.count(f"lab 06 step {line}") == 1


@needs_interpreter
def test_the_whole_timed_path_on_a_fake_card(tmp_path, capsys):
    argv = "06 --impl solution --dtype float32 --batch 1 --heads 2 --lengths 16,64".split()
    assert bench.run(parse(*argv, "--out", tmp_path), FakeGpu()) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    status = {r["provider"]: r["status"] for r in report["rows"]}
    for name in ("reference (Triton)", "reference (tiled PyTorch)", "naive", "SDPA MATH", "copy"):
        assert status[name] == "ok"
    assert set(status.values()) <= {"ok", "n/a"}
    assert max(map(len, capsys.readouterr().out.split("\n")[:40])) <= 100


@pytest.mark.parametrize(
    ("yours_ms", "shift", "oks"), [(1, 0, "yyy"), (4, 0, "yny"), (1, 1, "nyn")]
)
def test_check_of_lab_06(monkeypatch, yours_ms, shift, oks):
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def fake_kernel(q, k, v, causal, block_m, block_n):
        return sdpa(q, k, v, is_causal=causal) + shift, None

    class Clock(FakeGpu):
        def time(self, fn, **kwargs):
            fn()
            return [yours_ms if "tiles" in fn.__code__.co_freevars else 3.5]

    small = lab06._qkv
    monkeypatch.setattr(
        lab06, "_qkv", lambda B, H, D, dtype, dev, T: small(1, 1, D, dtype, dev, 64)
    )
    ak = types.SimpleNamespace(triton_flash_attention=fake_kernel)
    found = lab06.check(ak, parse("06"), Clock())
    assert "".join("y" if c.ok else "n" for c in found) == oks


def test_without_triton_the_pytorch_parts_are_counted(monkeypatch):
    monkeypatch.setattr(interpreter, "unavailable", lambda: "Triton is not installed")
    rows = []
    made = lab06.counted(load("06", "solution"), parse("06", "--lengths", "32"))[0]
    bench.count_size(made, 32, rows, lambda text: None)
    assert [r.status for r in rows] == ["ok", "ok", "n/a"]
    assert bench.exit_code(rows) == 0
    assert "Triton is not installed" in bench.remarks(rows)[0]


# ---------------------------------------------------------------- lab 03
lab03 = bench.lab_bench(find_lab("03"))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("e", [2, 4])
def test_lab_03_and_lab_06_have_the_same_formulas(causal, e):
    module = load("03", "solution")
    for B, H, T, D in ((1, 1, 1, 16), (2, 3, 37, 24), (1, 8, 1024, 64), (8, 16, 2048, 64)):
        sizes = dict(heads=B * H, D=D, e=e, causal=causal)
        assert module.attention_flops(B, H, T, D, causal) == lab06.flops(B, H, T, D, causal)
        naive = module.naive_attention_bytes(B, H, T, D, causal, e)
        assert naive == lab06.naive_bytes(T, **sizes)
        for m, n in ((16, 16), (16, 64), (64, 32), (128, 128)):
            flash = module.flash_attention_bytes(B, H, T, D, causal, e, m, n)
            assert flash == lab06.kernel_bytes(T, **sizes, block_m=m, block_n=n)


@needs_interpreter
@pytest.mark.parametrize("mask", ["--causal", "--full"])
def test_bench_03_counts_what_the_formulas_say(tmp_path, capsys, mask):
    argv = ["03", "--impl", "solution", mask, "--lengths", "37,64", "--block-m", 32, "--card", "T4"]
    assert bench.run(parse(*argv, "--out", tmp_path)) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [r["status"] for r in rows] == ["ok"] * 6
    assert [r["moved"] for r in rows] == [r["moved_formula"] for r in rows]
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "Predicted, not measured: T4" in out
    assert max(map(len, out.split("\n")[:-6])) <= 100


@needs_interpreter
def test_bench_03_where_lab_06_is_not_written_yet(monkeypatch, tmp_path, capsys):
    """As in a student edition; and the lines that lab 03's handout shows are those it prints."""
    monkeypatch.setattr(lab03, "_lab06", lambda: (load("06", "exercise"), False))
    monkeypatch.setattr(bench, "lab_bench", lambda lab: lab03 if lab.name[:2] == "03" else lab06)
    argv = ["03", "--impl", "solution", "--lengths", "64,512", "--out", tmp_path]
    assert bench.run(parse(*argv)) == 0
    out = capsys.readouterr().out
    assert "lab 06 step 5: write _flash_fwd_kernel" in out
    page = (find_lab("03") / "README.md").read_text()
    shown = page.partition("Predicted, not measured: ")[2].partition("```")[0].split("\n")[1:-1]
    assert len(shown) == 7
    for line in shown:
        assert line in out


def test_figures_in_the_text_of_lab_03_stand_in_its_tables():
    importlib.import_module("labs.03_roofline.test_roofline").check_prose()


def test_the_measured_rates_on_lab_03s_page_are_those_of_lab_06():
    spec = importlib.util.spec_from_file_location(
        "draw_roofline", find_lab("03") / "figures" / "draw_roofline.py"
    )
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    page = (find_lab("03") / "README.md").read_text()
    rates = draw.measured_rates()
    for rate, T in ((rates[2048][1], 2048), (rates[2048][0], 2048), (rates[16384][0], 16384)):
        row = f"measured, {rate:g} TFLOP/s | `attention_flops(8, 16, {T}, 64, True) / {rate:g}e12"
        assert row in page
    assert f"measured, {draw.softmax_rate():g} TB/s" in page


@needs_interpreter
def test_bench_03_on_a_fake_card_measures_both_numbers(tmp_path, capsys):
    argv = "03 --impl solution --dtype float32 --batch 1 --heads 2 --lengths 16,64".split()
    gpu = FakeGpu(memory=8 << 20)
    assert bench.run(parse(*argv, "--out", tmp_path), gpu) == 0
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "Your card: " in out
    assert "Predicted" not in out
    for name in (lab03.NAIVE, lab03.ASKED, lab03.IDEAL, lab03.SOFTMAX):
        assert name in out


def test_bench_03_knows_its_cards():
    with pytest.raises(LoadError, match=r"RTX 5060; .*T4"):
        bench.run(parse("03", "--impl", "solution", "--card", "GTX 970"))


def test_measure_prints_a_line_for_the_table_of_cards():
    measure = importlib.import_module("labs.03_roofline.measure")
    text = measure.measure(FakeGpu())
    module = load("03", "solution")
    card = eval(text.strip().split("\n")[-1].rstrip(","), {"Card": module.Card})
    peak, bandwidth = (rate for rate, _, _ in bench.ceilings(FakeGpu()).values())
    assert card.measured
    assert card.peak_flops == pytest.approx(peak * 1e12, rel=1e-3)
    assert card.bandwidth == pytest.approx(bandwidth * 1e12, rel=1e-3)
