"""The X-ray: what is compiled in a child process, verdicts, suggestions, cache and reports."""

import argparse
import contextlib
import json
import time
from pathlib import Path

import pytest

from labs import __main__, _impl
from labs._harness import cards, compiler, gluon_emulator, triton_private, xray
from labs._harness.cards import CARDS, Change, changes, state, verdict
from labs._harness.compiler import Compiled, CompileFailed, Unit

LAB = "06_attention_kernels"
SOLUTION = _impl.LABS / LAB / "solution.py"
SOFTMAX, FLASH = "triton_softmax", "triton_flash_attention"

pytestmark = pytest.mark.timeout(180)
needs_compiler = pytest.mark.skipif(
    compiler.unavailable() is not None, reason=str(compiler.unavailable())
)


def kernel(arch="sm_120", launcher=FLASH, **found):
    """A compiled kernel that fits, but for what is given."""
    options = {"block_m": 128, "block_n": 64, "num_warps": 4, "num_stages": 2}
    options |= found.pop("options", {})
    facts = {"kernel": "_kernel", "registers": 168, "shared": 24_576} | found
    return Compiled(launcher, arch, options, **facts)


def edited(tmp_path, *edits, append=""):
    """The reference with pieces of text replaced, in a file of its own."""
    text = SOLUTION.read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = tmp_path / "student.py"
    file.write_text(text + append)
    return file


def one(file, launcher=FLASH, arch="sm_80", limit=60.0, **options) -> Compiled:
    """One kernel of a file, really compiled, not kept."""
    found = xray.XRay(LAB, str(file), limit, cache=None)
    unit = found.unit(launcher, arch, **options)
    found.compile([unit])
    return found.of(unit)[0]


# ---------------------------------------------------------------- cards, verdicts, suggestions


def test_cards_are_the_five_of_the_handout():
    assert {card.arch: card.shared for card in CARDS.values()} == {
        "sm_80": 166_912,
        "sm_86": 101_376,
        "sm_89": 101_376,
        "sm_90": 232_448,
        "sm_120": 101_376,
    }
    assert all(arch == card.arch for arch, card in CARDS.items())


@pytest.mark.parametrize(
    ("found", "word", "text"),
    [
        ({}, "fits", "fits; 0 spills"),
        ({"shared": 101_376}, "fits", "fits; 0 spills"),
        ({"spill": 1424}, "spills", "spills 1,424 bytes a thread: slow"),
        (
            {"shared": 131_072},
            "no launch",
            "will not launch on an RTX 5060: needs 131,072 of 101,376 bytes",
        ),
        (
            {"shared": 131_072, "spill": 8},
            "no launch",
            "will not launch on an RTX 5060: needs 131,072 of 101,376 bytes, and spills 8 bytes a "
            "thread",
        ),
        (
            {"serialized": True, "arch": "sm_90"},
            "in turn",
            "each wgmma waits for the one before: an accumulator in flight is touched",
        ),
        (
            {"lost": True, "spill": 8, "arch": "sm_90"},
            "wrong",
            "WRONG: ptxas overwrites a wgmma's register operand in the loop; keep branches out of "
            "it, or the operand in shared memory",
        ),
        ({"error": "NameError: x"}, "error", "does not compile"),
        ({"error": "ValueError: x", "kernel": ""}, "error", "launches nothing"),
        ({"error": "still compiling", "timed_out": True}, "not known", "still compiling"),
        (
            {"error": "CompileTimeAssertionFailure: lab 06 step 5: write _kernel"},
            "not written",
            "lab 06 step 5: write _kernel",
        ),
    ],
)
def test_verdicts(found, word, text):
    assert state(kernel(**found)) == word
    assert verdict(kernel(**found)) == text


def test_a_verdict_says_what_to_try():
    assert verdict(kernel(spill=424), Change({"num_warps": 8}, 0)) == (
        "spills 424 bytes a thread: slow; try num_warps=8"
    )
    assert verdict(kernel(shared=131_072), Change({"num_stages": 2}, 0)).endswith(
        "of 101,376 bytes; try num_stages=2"
    )
    assert verdict(kernel(spill=424), Change({"block_n": 32}, 24)).endswith(
        "try block_n=32 (the least spills of what was tried: 24 bytes)"
    )


def test_changes_are_small_and_possible():
    assert list(changes(kernel(spill=8)))[0] == {"num_warps": 8}
    assert list(changes(kernel(shared=131_072, options={"num_stages": 3})))[0] == {"num_stages": 2}
    tiny = {"block_m": 16, "block_n": 16, "num_warps": 16, "num_stages": 2}
    assert list(changes(kernel(spill=8, shared=131_072, options=tiny))) == []
    assert list(changes(kernel())) == []
    assert list(changes(Compiled(SOFTMAX, "sm_80", {"columns": 64}, kernel="k", spill=8))) == []


@pytest.mark.parametrize(
    ("stack", "code", "spill"),
    [
        (0, None, 0),
        (8, "STL.64 [R1], RZ ;", 0),
        (24, "STL.64 [R1], R4 ;\nLDL.64 R4, [R1] ;", 24),
    ],
)
def test_a_stack_that_nobody_reads_is_no_spill(monkeypatch, stack, code, spill):
    said = {"-res-usage": f" Function _k:\n  REG:128 STACK:{stack} SHARED:0", "-sass": code}
    monkeypatch.setattr(compiler, "_cuobjdump", lambda cubin, what: said[what])
    assert compiler._registers(b"") == (128, spill)


@pytest.mark.parametrize(
    ("message", "part"),
    [
        ("unsupported AST node type: Break", "left early"),
        ("unsupported AST node type: With", "not part of Triton"),
        ("Cannot access global variable SCALE from within", "as an argument"),
        ("Loop-carried variable l_i has initial type fp32 but", "dtype and shape"),
        ("Both operands must be same dtype. Got fp32 and fp16", ".to()"),
        ("Boolean value of Tensor with more than one value", "tl.where"),
        ("Unsupported function referenced: helper", "@triton.jit"),
        ("AttributeError(\"'int' object has no attribute 'to'\")", "in place of the stride"),
        ("cannot convert largest of type <class 'str'> to tensor", "take the print out"),
        ("NameError('breakpoint is not defined')", "interpreter only"),
        ("simultaneous multiple comparison is not supported", "in parentheses"),
    ],
)
def test_hints(message, part):
    assert part in cards.hint(message)
    assert cards.hint("something else") is None


# ---------------------------------------------------------------- with a pretended compiler


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Sets what compiling a unit gives; the list that it returns gets the units compiled."""
    monkeypatch.setattr(xray, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(compiler, "unavailable", lambda: None)

    def install(facts):
        compiled = []

        def stream(lab, impl, units, limit):
            for unit in units:
                compiled.append(unit)
                found = facts(unit)
                yield unit, [Compiled(unit.launcher, unit.arch, unit.options, **found)]

        monkeypatch.setattr(compiler, "stream", stream)
        return compiled

    return install


def clean(unit):
    return {"kernel": f"_{unit.launcher}", "registers": 100, "shared": 1000}


def command(tmp_path, *args):
    """Exit code of `python -m labs xray 06 --impl=solution` with results in tmp_path."""
    return __main__.main(["xray", "06", "--impl=solution", f"--out={tmp_path / 'out'}", *args])


def test_everything_fits(pretend, tmp_path, capsys):
    compiled = pretend(clean)
    assert command(tmp_path) == 0
    assert len(compiled) == 10
    out, err = capsys.readouterr()
    assert out.count("fits; 0 spills") == 10
    assert "10 of 10: triton_flash_attention sm_120: fits" in err
    assert max(map(len, out.splitlines()[2:])) <= 100
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [(r["launcher"], r["arch"], r["state"]) for r in rows[:2]] == [
        (SOFTMAX, "sm_80", "fits"),
        (SOFTMAX, "sm_86", "fits"),
    ]
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 11


def test_results_are_kept_until_source_or_options_change(pretend, tmp_path):
    compiled = pretend(clean)
    file = edited(tmp_path)
    run = ["--impl", str(file), "--arch=sm_90"]
    command(tmp_path, *run)
    command(tmp_path, *run)
    assert len(compiled) == 2
    command(tmp_path, *run, "--block-m=128")
    assert len(compiled) == 4
    command(tmp_path, *run, "--no-cache")
    assert len(compiled) == 6
    file.write_text(file.read_text() + "# edited\n")
    command(tmp_path, *run)
    assert len(compiled) == 8
    for kept in (tmp_path / "cache").iterdir():
        kept.write_text("{cut short")
    command(tmp_path, *run)
    assert len(compiled) == 10


def test_what_ran_out_of_time_is_tried_again(pretend, tmp_path):
    compiled = pretend(lambda unit: {"error": "still compiling", "timed_out": True})
    assert command(tmp_path, "--arch=sm_90") == 1
    assert command(tmp_path, "--arch=sm_90") == 1
    assert len(compiled) == 4


def test_the_cache_does_not_grow_without_end(pretend, tmp_path, monkeypatch):
    pretend(clean)
    monkeypatch.setattr(xray, "KEPT", 8)
    for size in (16, 32, 64):
        command(tmp_path, f"--block-m={size}")
    assert len(list((tmp_path / "cache").iterdir())) <= 9


def test_spills_are_told_and_do_not_fail_unless_strict(pretend, tmp_path, capsys):
    pretend(lambda unit: clean(unit) | {"spill": 0 if unit.options["num_warps"] == 8 else 424})
    assert command(tmp_path, "--arch=sm_90") == 0
    assert "spills 424 bytes a thread: slow; try num_warps=8" in capsys.readouterr().out
    assert command(tmp_path, "--arch=sm_90", "--strict") == 1


def test_a_suggestion_was_compiled_and_holds(pretend, tmp_path, capsys):
    def facts(unit):
        if unit.launcher == SOFTMAX:
            return clean(unit)
        shared = 50_000 * unit.options["num_stages"] * unit.options["block_n"] // 64
        return clean(unit) | {"shared": shared, "spill": 8 * (unit.options["block_n"] < 64)}

    pretend(facts)
    assert command(tmp_path, "--arch=sm_120", "--num-stages=3") == 1
    out = capsys.readouterr().out
    assert "needs 150,000 of 101,376 bytes; try num_stages=2" in " ".join(out.split())


def test_no_suggestion_where_none_holds(pretend, tmp_path, capsys):
    compiled = pretend(lambda unit: clean(unit) | {"spill": 424})
    command(tmp_path, "--arch=sm_120")
    out = capsys.readouterr().out
    assert "spills 424 bytes a thread: slow\n" in out
    assert "try" not in out
    assert len(compiled) <= 2 * (1 + xray.ROUNDS * xray.AT_A_TIME)


def test_compile_error_is_two_lines_with_the_source_line(pretend, tmp_path, capsys):
    error = {
        "kernel": "_k",
        "error": "UnsupportedLanguageConstruct: unsupported AST node type: Break",
    }
    pretend(lambda unit: {**error, "line": 212, "text": "break"})
    assert command(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("_k, launched by triton_flash_attention")
    assert lines[at + 1 : at + 5] == [
        "  does not compile: sm_80, sm_86, sm_89, sm_90, sm_120",
        f"    labs/{LAB}/solution.py:212: {error['error']}",
        "        break",
        "    hint: a kernel's loop cannot be left early: bound its range",
    ]


def test_sweep_is_a_table_of_what_fits_where(pretend, tmp_path, capsys):
    def facts(unit):
        if unit.launcher == SOFTMAX:
            return clean(unit)
        large = unit.arch == "sm_120" and unit.options["block_n"] == 128
        return clean(unit) | {
            "shared": 110_000 if large else 1000,
            "spill": 24 if unit.options["num_warps"] == 4 else 0,
        }

    compiled = pretend(facts)
    assert command(tmp_path, "--sweep", "--num-stages=2", "--head-dim=128") == 0
    assert len(compiled) == 2 * 2 * 12
    assert all(unit.options["head_dim"] == 128 for unit in compiled)
    out = capsys.readouterr().out
    assert "block_m  block_n  num_warps   sm_120 RTX 5060, 5090        sm_90 H100, H200\n" in out
    row = "     64      128          8   no launch 110,000 bytes      fits      100 registers\n"
    assert row in out
    assert "of 12 configurations fit without spills: 4 on an RTX 5060, 6 on an H100" in out
    assert "triton_softmax: the same in every configuration; sm_120 fits 100 registers" in out
    assert command(tmp_path, "--sweep", "--num-stages=2", "--strict") == 1


@pytest.mark.parametrize("sweep", [[], ["--sweep"]])
def test_ctrl_c_keeps_what_is_done(pretend, tmp_path, capsys, sweep):
    count = 0

    def facts(unit):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return clean(unit)

    pretend(facts)
    assert command(tmp_path, *sweep) == 130
    out, err = capsys.readouterr()
    assert "stopped by Ctrl-C; what was done is kept" in err
    assert "fits" in out
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(report["rows"]) == 3
    assert report["partial"]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["06", "--arch=sm_75"], "unknown 'sm_75'; known are sm_80, sm_86"),
        (["06", "--arch=,"], "no architecture"),
        (["06", "--block-m=0"], "--block-m: must be a whole number, 1 or more: got '0'"),
        (["06", "--dtype=int8"], "invalid choice: 'int8'"),
        (["06", "--time-limit=-1"], "invalid number of seconds"),
        (["77"], "no lab at '77'"),
        (["01"], "error: lab 01 has no kernels to X-ray; labs 04, 05, "),
        (["02"], "error: lab 02 has no kernels to X-ray; labs 04, 05, "),
        (["06", "--impl=nobody.py"], "no file 'nobody.py'"),
    ],
)
def test_bad_arguments_are_one_line(args, part, capsys):
    try:
        code = __main__.main(["xray", *args])
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2
    assert part in said


def test_an_option_that_a_lab_does_not_have(pretend, monkeypatch, capsys):
    pretend(clean)
    lab = argparse.Namespace(launches=lambda module, columns=64: {})
    monkeypatch.setattr(xray.bench, "lab_bench", lambda folder, *needs: lab)
    assert __main__.main(["xray", "06", "--impl=solution", "--block-m=64"]) == 2
    assert "has no option --block-m; it has: --columns" in capsys.readouterr().err


def test_where_nothing_can_be_compiled(monkeypatch, capsys):
    monkeypatch.setattr(compiler, "unavailable", lambda: "Triton is not installed")
    assert __main__.main(["xray", "06"]) == 2
    assert capsys.readouterr().err == "error: cannot compile here: Triton is not installed\n"


def test_private_names_that_a_release_has_moved(monkeypatch):
    use = triton_private.COMPILE
    names = (("triton.runtime.jit", "JITFunction.launch_it", ()),)
    monkeypatch.setitem(triton_private.USES, use, names)
    assert "has moved triton.runtime.jit.JITFunction.launch_it: the labs need it to compile" in (
        compiler.unavailable()
    )
    names = (("triton.compiler", "ASTSource", ("fn", "signs")),)
    monkeypatch.setitem(triton_private.USES, use, names)
    assert "has changed triton.compiler.ASTSource" in compiler.unavailable()
    monkeypatch.setitem(triton_private.USES, use, (("triton.nowhere", "x", ()),))
    assert "has moved triton.nowhere.x" in compiler.unavailable()


# ---------------------------------------------------------------- a lab's test


def test_check_says_what_the_interpreter_let_through(pretend):
    error = {"kernel": "_k", "error": "NameError: Cannot access global variable X", "line": 9}
    pretend(lambda unit: {**error, "text": "x = X"})
    with pytest.raises(AssertionError) as caught:
        xray.check(LAB, SOLUTION, FLASH)
    lines = str(caught.value).splitlines()
    assert lines[:4] == [
        f"{FLASH}: does not compile for any card",
        f"  labs/{LAB}/solution.py:9: {error['error']}",
        "      x = X",
        "  hint: a kernel sees no global variables: pass the value as an argument",
    ]
    assert lines[4].startswith("The interpreter runs a kernel as Python")


def test_check_fails_on_spills_and_on_too_much_shared_memory(pretend):
    pretend(lambda unit: clean(unit) | {"spill": 8, "shared": 110_000})
    with pytest.raises(AssertionError, match="no shared memory that could run out") as caught:
        xray.check(LAB, SOLUTION, FLASH)
    assert "  sm_80: spills 8 bytes a thread: slow" in str(caught.value)
    assert "  sm_120: will not launch on an RTX 5060" in str(caught.value)


def test_check_may_let_spills_pass_and_take_other_options(pretend):
    compiled = pretend(lambda unit: clean(unit) | {"spill": 8 * (unit.options["block_m"] > 16)})
    xray.check(LAB, SOLUTION, FLASH, may_spill=True)
    xray.check(LAB, SOLUTION, FLASH, block_m=16)
    assert [unit.options["block_m"] for unit in compiled] == [64] * 5 + [16] * 5
    with pytest.raises(AssertionError, match="spills 8 bytes a thread: slow"):
        xray.check(LAB, SOLUTION, FLASH)


def test_an_unwritten_step_is_not_compiled(pretend, capsys):
    compiled = pretend(clean)
    stub = _impl.LABS / LAB / "exercise.py"
    if xray.reminder(stub, FLASH) is None:
        pytest.skip("the stub has been solved")
    with pytest.raises(NotImplementedError, match="lab 06 step 5: write _flash_fwd_kernel"):
        xray.check(LAB, stub, FLASH)
    assert __main__.main(["xray", "06", "--arch=sm_90"]) == 1
    assert compiled == []
    assert (
        "triton_flash_attention: not written yet (lab 06 step 5: write _flash_fwd_kernel)"
        in capsys.readouterr().out.splitlines()
    )


def test_a_reminder_counts_for_the_launcher_that_names_its_kernel(tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(
        'def _k():\n    tl.static_assert(False, "lab 06 step 4: write _k")\n'
        "def f():\n    _k[1]()\n"
        'def g():\n    "lab 06 step 5: write g, some day"\n'
    )
    assert xray.reminder(stub, "f") == "lab 06 step 4: write _k"
    assert xray.reminder(stub, "g") is None
    assert xray.reminder(stub, "h") is None


# ---------------------------------------------------------------- really compiled

# Each with the architecture that it is compiled for: block_m, block_n, num_stages, head_dim.
CONFIGURATIONS = [
    ("sm_90", 64, 64, 2, 64),
    ("sm_90", 64, 64, 3, 64),
    ("sm_90", 64, 32, 2, 64),
    ("sm_90", 128, 32, 3, 64),
    ("sm_90", 64, 16, 2, 128),
    ("sm_90", 32, 64, 2, 64),
    ("sm_90", 16, 64, 3, 64),
    ("sm_90", 32, 16, 2, 256),
    ("sm_120", 64, 64, 2, 64),
    ("sm_120", 16, 16, 2, 16),
    ("sm_120", 128, 16, 2, 32),
    ("sm_120", 64, 32, 4, 64),
    ("sm_120", 32, 32, 2, 128),
    ("sm_120", 64, 64, 2, 128),
    ("sm_80", 64, 32, 2, 64),
    ("sm_80", 32, 64, 2, 64),
    ("sm_86", 64, 64, 3, 64),
    ("sm_86", 16, 32, 3, 128),
    ("sm_89", 16, 64, 3, 64),
    ("sm_89", 64, 16, 2, 128),
]


@needs_compiler
def test_shared_memory_is_what_the_formula_of_the_lab_says():
    lab = xray.XRay(LAB, "solution")
    names = "block_m", "block_n", "num_stages", "head_dim"
    units = [
        lab.unit(FLASH, arch, **dict(zip(names, sizes, strict=True)))
        for arch, *sizes in CONFIGURATIONS
    ]
    lab.compile(units)
    compiled = {c: lab.of(unit)[0].shared for c, unit in zip(CONFIGURATIONS, units, strict=True)}
    assert compiled == {c: lab.bench.shared_memory(*c) for c in CONFIGURATIONS}


@needs_compiler
def test_large_tiles_spill_on_large_cards_and_do_not_launch_on_small_ones():
    lab = xray.XRay(LAB, "solution")
    large = {"block_m": 128, "block_n": 128, "head_dim": 128, "num_warps": 4, "num_stages": 3}
    units = [lab.unit(FLASH, arch, **large) for arch in ("sm_80", "sm_86", "sm_90", "sm_120")]
    lab.compile(units)
    found = {unit.arch: lab.of(unit)[0] for unit in units}
    assert {arch: state(c) for arch, c in found.items()} == {
        "sm_80": "spills",
        "sm_86": "no launch",
        "sm_90": "spills",
        "sm_120": "no launch",
    }
    assert verdict(found["sm_120"]).startswith(
        "will not launch on an RTX 5060: needs 163,840 of 101,376 bytes, and spills "
    )
    assert found["sm_90"].spill > 500
    assert found["sm_90"].instructions["wgmma"] > 0
    assert found["sm_120"].instructions["mma"] > 0


@needs_compiler
def test_the_place_of_a_compile_error(tmp_path):
    file = edited(
        tmp_path,
        ("acc * alpha[:, None])", "_rescale(acc, alpha))"),
        (
            "    @triton.jit\n    def _flash_fwd_kernel(",
            "    @triton.jit\n    def _rescale(acc, alpha):\n        # a helper of one's own\n"
            "        return acc * (alpha[:, None] @ acc)\n\n"
            "    @triton.jit\n    def _flash_fwd_kernel(",
        ),
    )
    found = one(file)
    assert state(found) == "error"
    assert found.text == "return acc * (alpha[:, None] @ acc)"
    assert file.read_text().splitlines()[found.line - 1].strip() == found.text
    assert "\n" not in found.error


@needs_compiler
def test_a_helper_that_is_no_kernel_is_found(tmp_path):
    append = "\ndef rescaled(acc, alpha):\n    return acc * alpha[:, None]\n"
    file = edited(tmp_path, ("acc * alpha[:, None])", "rescaled(acc, alpha))"), append=append)
    found = one(file)
    assert state(found) == "error"
    assert "rescaled" in found.error
    assert found.text == "acc = tl.dot(p.to(v.dtype), v, rescaled(acc, alpha))"


@needs_compiler
def test_a_launcher_that_raises(tmp_path):
    found = one(SOLUTION, block_m=24)
    assert found.error.startswith("ValueError: block_m must be a power of two")
    assert verdict(found) == "launches nothing"
    file = edited(tmp_path, append="\ndef triton_softmax(x):\n    return x.softmax(1)\n")
    assert "triton_softmax launched no kernel" in one(file, SOFTMAX).error


@needs_compiler
def test_a_compilation_that_takes_for_ever(tmp_path):
    unrolled = "for i in tl.static_range(1000000):\n            x = x * 2 + i\n        "
    file = edited(tmp_path, ("p = tl.exp(x - tl.max", f"{unrolled}p = tl.exp(x - tl.max"))
    start = time.monotonic()
    found = one(file, SOFTMAX, limit=2.0)
    assert found.error == "still compiling after 2 s; stopped"
    assert state(found) == "not known"
    assert time.monotonic() - start < 60


@needs_compiler
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("while True:\n    pass", "loading the file: no end after 2 s; stopped"),
        (
            "def triton_softmax(x):\n    while True:\n        pass",
            "calling triton_softmax: no end after 2 s; stopped",
        ),
        ("import os\nos._exit(3)", "loading the file: the compiler's process ended early"),
        ("1 / 0", "student.py, line 1: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_hangs_or_dies(tmp_path, monkeypatch, code, says):
    monkeypatch.setattr(compiler, "GRACE", 1.0)
    file = tmp_path / "student.py"
    file.write_text(code + "\n")
    with pytest.raises(CompileFailed) as caught:
        one(file, SOFTMAX, limit=1.0)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_compiler
@pytest.mark.parametrize(
    ("code", "says"), [("def f(:", "SyntaxError: invalid syntax"), ("1 / 0", "ZeroDivisionError")]
)
def test_a_file_that_does_not_load_is_an_argument_that_is_wrong(tmp_path, capsys, code, says):
    file = tmp_path / "student.py"
    file.write_text(code + "\n")
    assert __main__.main(["xray", "06", "--arch=sm_90", "--impl", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"error: {file}, line 1: {says}" in err
    assert err.count("\n") == 1


@needs_compiler
def test_a_crash_of_the_compiler_costs_one_kernel_only(tmp_path):
    crash = """
import os
_compile = triton.compile
triton.compile = lambda src, target, options: (
    os.abort() if target.arch == 86 else _compile(src, target=target, options=options)
)
"""
    lab = xray.XRay(LAB, str(edited(tmp_path, append=crash)), cache=None)
    units = [lab.unit(SOFTMAX, arch) for arch in ("sm_80", "sm_86", "sm_90")]
    lab.compile(units)
    found = [lab.of(unit)[0] for unit in units]
    assert [state(c) for c in found] == ["fits", "error", "fits"]
    assert found[1].error == "Triton's compiler crashed (was killed by SIGABRT)"


@needs_compiler
def test_equal_launches_are_compiled_once(tmp_path):
    units = [Unit(SOFTMAX, "sm_90", {"block_m": m}) for m in (16, 32, 64)]
    found = dict((u.options["block_m"], k) for u, k in compiler.stream(LAB, "solution", units))
    assert len({found[m][0].seconds for m in found}) == 1
    assert [found[m][0].options for m in (16, 32, 64)] == [u.options for u in units]


def child_of(pid: int) -> int:
    """The only child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.fixture
def server(monkeypatch):
    with contextlib.closing(compiler.Server()) as one:
        monkeypatch.setattr(compiler, "shared", one)
        yield one


@needs_compiler
def test_jobs_share_one_process_and_see_nothing_of_one_another(tmp_path, server):
    assert not server.started
    spoil = "\nimport triton\ntriton.compile = None\n"
    spoilt = one(edited(tmp_path, append=spoil), SOFTMAX)
    process = server._process.pid
    assert "TypeError" in spoilt.error
    assert state(one(SOLUTION, SOFTMAX)) == "fits"
    assert server._process.pid == process


@needs_compiler
def test_a_job_ends_when_nobody_waits_for_it(tmp_path, server):
    file = tmp_path / "student.py"
    file.write_text("while True:\n    pass\n")
    job = {"lab": LAB, "impl": str(file), "units": [], "limit": 60, "env": {}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    with server.begin(str(tmp_path)) as connection:
        assert b"loading the file" in connection.recv(1000)
        job = child_of(server._process.pid)
    for _ in range(100):
        if not Path(f"/proc/{job}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{job}").exists()


@needs_compiler
def test_a_process_that_does_not_start_is_said(monkeypatch, server):
    monkeypatch.setattr(compiler.sys, "executable", "/bin/false")
    with pytest.raises(
        CompileFailed, match="start: the compiler.s process ended early: it said nothing"
    ):
        one(SOLUTION, SOFTMAX)


def test_the_order_of_what_a_kernel_does():
    ptx = """
        griddepcontrol.wait;
        ld.global.b32 %r1, [%rd1];
        cp.async.cg.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x10, 0x10;
        ld.shared.b32 %r3, [%r2];
        griddepcontrol.launch_dependents;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r4 }, { %r5 }, { %r6 }, { %r4 };
        st.global.b32 [%rd3], %r4;
    """
    assert compiler._order(ptx) == ["wait", "load", "launch", "product", "store"]


@needs_compiler
def test_check_gives_the_kernels_of_the_cards_asked_for():
    kernels = xray.check(LAB, SOLUTION, SOFTMAX, False, archs=("sm_90", "sm_120"))
    assert sorted(c.arch for c in kernels) == ["sm_120", "sm_90"]
    assert all((c.order[0], c.order[-1], c.early) == ("load", "store", False) for c in kernels)


# ---------------------------------------------------------------- Gluon, for one card

HOPPER_LAB = "11_warp_specialization"
HOPPER_SOLUTION = _impl.LABS / HOPPER_LAB / "solution.py"
needs_gluon = pytest.mark.skipif(
    gluon_emulator.unavailable() is not None, reason=str(gluon_emulator.unavailable())
)


@needs_gluon
def test_a_descriptor_has_the_type_that_triton_gives_it():
    import torch
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    x = torch.empty(128, 64, dtype=torch.bfloat16)
    found = compiler._type_of(TensorDescriptor.from_tensor(x, [64, 64], layout))
    assert found == f"tensordesc<bf16[64, 64],{layout!r}>"


def test_warps_and_stages_of_a_launch_are_not_those_of_a_gluon_kernel(tmp_path):
    lines = {
        gluon: xray._kernel([kernel(kernel="_k", gluon=gluon)], {}, tmp_path)[0]
        for gluon in (True, False)
    }
    assert lines[True] == "_k, launched by triton_flash_attention"
    assert lines[False].endswith("triton_flash_attention: 4 warps, num_stages=3")


def test_a_lab_for_one_card_is_compiled_for_that_one():
    found = xray.XRay(HOPPER_LAB, "solution", cache=None)
    assert found.archs == ["sm_90"]
    assert xray.XRay(LAB, "solution", cache=None).archs == list(CARDS)


def test_a_lab_for_one_card_refuses_others(capsys):
    code = __main__.main(["xray", "11", "--impl", "solution", "--arch", "sm_80"])
    assert code != 0
    assert "for sm_90 only" in capsys.readouterr().err


@needs_gluon
@needs_compiler
def test_gluon_kernels_compile_and_are_counted():
    found = xray.XRay(HOPPER_LAB, str(HOPPER_SOLUTION), cache=None)
    units = [found.unit(name, "sm_90") for name in ("tma_copy", "wgmma_products")]
    found.compile(units)
    copy, product = (found.of(unit)[0] for unit in units)
    assert (copy.error, product.error) == (None, None)
    assert copy.gluon
    assert copy.instructions["bulk"] >= 2
    assert copy.instructions["wgmma"] == 0
    assert product.instructions["wgmma"] == 16
    assert state(product) == "fits"
    assert 81_920 <= product.shared <= 82_100


@needs_gluon
@needs_compiler
def test_check_wants_the_instructions_named():
    with pytest.raises(AssertionError, match="has no wgmma.mma_async instruction for sm_90"):
        xray.check(HOPPER_LAB, HOPPER_SOLUTION, "tma_copy", False, contains=("bulk", "wgmma"))
