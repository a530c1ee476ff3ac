"""Runs of pytest over two small labs with equal file names: the board and the short failures."""

import json
import re
import sys
from collections import Counter

import pytest

from labs._harness import runtime, steps
from labs._harness.tests import fixture_lab
from labs._harness.tests.fixture_lab import KERNEL, SHIFT, solution, source

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="each test runs in a process on Linux only"),
    pytest.mark.timeout(120),
]


def of_lab(lines, lab):
    return [line for line in lines if lab in line]


# ---------------------------------------------------------------- nothing written yet


@pytest.fixture(scope="module")
def stubs(repository):
    """(pytest on untouched stubs, python -m labs after it)."""
    repository.labs(first_90=None, second_91=None)
    return repository.pytest(fresh=True), repository.run("labs", fresh=True)


def test_untouched_stubs_are_one_line_a_step_and_exit_code_1(stubs):
    run, _ = stubs
    assert run.code == 1
    assert len(run.lines) <= 60
    assert "10 not written in" in run.lines[-1]
    for words in ("Traceback", "Error", "raise ", "exercise.py:", "FAILURES"):
        assert words not in run.out
    for lab, number in (("90_first", 90), ("91_second", 91)):
        assert run.states(lab) == ["not written", "not written"]
        shown = f"labs/{lab}/exercise.py"
        line = source(number).splitlines().index("    # TODO step 1 (1 line)") + 1
        at = run.board(lab).index(f"next: step 1, write shift in {shown}, line {line}; then run")
        assert run.board(lab)[at + 1].strip() == f"pytest labs/{lab} --step 1"


def test_header_says_what_is_tested_where_kernels_run_and_how_tests_are_kept_apart(stubs):
    lines = stubs[0].lines
    assert "labs: testing exercise, seed 0" in lines
    assert any(re.match(r"kernels: Triton [\d.]+ CPU interpreter \(", line) for line in lines)
    kept_apart = r"tests: each test in its own process, \d at a time, 10 s at most"
    assert any(re.fullmatch(kept_apart, line) for line in lines)


def test_python_m_labs_shows_the_last_board(stubs):
    run, board = stubs
    assert board.code == 0
    for lab in ("90_first", "91_second"):
        last = [line for line in run.board(lab) if line.startswith(("  step", "next", "      "))]
        assert len(last) == 4
        assert board.board(lab) == last


# ---------------------------------------------------------------- each lab its own code


@pytest.fixture(scope="module")
def mixed(repository):
    """Lab 90 with step 1 written, lab 91 with both, 92 too and has a benchmark; no cache."""
    repository.labs(first_90=source(90, SHIFT), second_91=solution(91), third_92=solution(92))
    repository.write("labs/92_third/bench.py", "")
    return repository.pytest("-p", "no:cacheprovider")


def test_writing_step_1_turns_step_1_green_and_nothing_else(mixed):
    assert mixed.states("90_first") == ["passed", "not written"]
    assert mixed.states("91_second") == ["passed", "passed"]
    assert any("next: step 2, write _times_kernel in" in line for line in mixed.board("90_first"))
    assert "all steps pass; next: labs/92_third/README.md" in mixed.board("91_second")
    assert "all steps pass; next: python -m labs bench 92" in mixed.board("92_third")
    assert mixed.code == 1
    assert "13 passed, 2 not written in" in mixed.lines[-1]


def test_the_board_needs_no_cache(mixed):
    assert len(of_lab(mixed.board("90_first"), "step")) == 4  # two rows, and what to do next


@pytest.fixture(scope="module")
def references(repository):
    """The references, two workers, from a working directory inside another lab."""
    repository.labs(first_90="broken(", second_91=None)
    folder = repository.root / "labs" / "91_second"
    return repository.pytest("-n", "2", "--impl=solution", "..", cwd=folder)


def test_one_run_tests_each_labs_own_reference(references):
    # The labs' tests want other numbers, so one lab's code in place of another's would fail.
    assert references.code == 0
    assert "10 passed in" in references.lines[-1]
    assert "labs: testing solution, seed 0" in references.lines
    for lab in ("90_first", "91_second"):
        assert references.states(lab) == ["passed", "passed"]


def test_equal_file_names_are_not_what_makes_it_pass(repository):
    repository.labs(first_90=solution(91), second_91=solution(90))
    run = repository.pytest()
    assert run.states("90_first") == run.states("91_second") == ["failing", "failing"]
    assert "passed" not in run.lines[-1]


# ---------------------------------------------------------------- files that do not load


@pytest.fixture(scope="module")
def broken(repository):
    repository.labs(
        first_90=source(90, SHIFT).replace("return x + 90", "return x +"),
        second_91=solution(91),
        third_92="import torch\nimport no_such_module\n",
    )
    return repository.pytest()


def test_a_syntax_error_is_one_line_and_harms_no_other_lab(broken):
    (line,) = of_lab(broken.board("90_first"), "SyntaxError")
    assert line.startswith("next: mend labs/90_first/exercise.py, line 16: SyntaxError: invalid")
    assert line.endswith(": return x +")
    assert broken.out.count("SyntaxError") == 1
    assert broken.states("90_first") == ["not loaded", "not loaded"]
    assert broken.states("91_second") == ["passed", "passed"]


def test_a_missing_import_is_one_line_and_harms_no_other_lab(broken):
    (line,) = of_lab(broken.board("92_third"), "ModuleNotFoundError")
    assert line == (
        "next: mend labs/92_third/exercise.py, line 2: ModuleNotFoundError: "
        "No module named 'no_such_module'"
    )
    assert broken.out.count("no_such_module") == 1
    assert "Traceback" not in broken.out
    assert "5 passed, 10 not loaded in" in broken.lines[-1]
    assert broken.code == 1


# ---------------------------------------------------------------- the choice of implementation


@pytest.mark.parametrize(
    ("impl", "says"),
    [
        ("solutoin", "unknown implementation 'solutoin': wanted "),
        ("gone/mine.py", "no file 'gone/mine.py' (working directory "),
    ],
)
def test_a_wrong_impl_is_a_usage_error_of_one_line(repository, impl, says):
    run = repository.pytest(f"--impl={impl}")
    assert run.code == 4
    (line,) = [line for line in run.lines if line]
    assert line.startswith(f"ERROR: --impl: {says}")
    assert line.endswith("the path of a .py file")


@pytest.fixture(scope="module")
def elsewhere(repository, tmp_path_factory):
    """(file kept elsewhere, with step 2 wrong; pytest --impl=FILE on lab 90)."""
    repository.labs(first_90=None)
    file = tmp_path_factory.mktemp("submissions") / "ada.py"
    file.write_text(source(90, SHIFT, KERNEL.replace("x * NN", "x * undefined_name")))
    return file, repository.pytest(f"--impl={file}", "labs/90_first")


def test_a_file_kept_elsewhere_is_what_is_tested_and_shown(elsewhere):
    file, run = elsewhere
    assert run.states("90_first") == ["passed", "failing"]
    assert f"labs: testing {file}, seed 0" in run.lines
    assert any(f"90_first, {file}" in line for line in run.lines)
    assert run.board("90_first")[-1].strip() == f"pytest labs/90_first --impl={file} --step 2"


def test_an_error_inside_a_kernel_is_shown_as_the_students_line_and_error(elsewhere):
    file, run = elsewhere
    failure = run.failures()["90_first test_times[16]"]
    assert failure[0].startswith("labs/90_first/test_lab.py:")
    statement = "tl.store(y_ptr + offs, x * undefined_name, mask=mask)"
    line = [s.strip() for s in file.read_text().splitlines()].index(statement) + 1
    at = failure.index(f"{file}:{line}: in _times_kernel")
    assert failure[at + 1].strip() == statement
    assert failure[-1] == "NameError: name 'undefined_name' is not defined"
    assert len(failure) <= 10
    assert "InterpreterError" not in run.out
    assert "site-packages" not in run.out


@pytest.fixture(scope="module")
def one_step_in_process(repository):
    """-s and --step 1, on code that prints."""
    shift = "    import os\n    print('printed in', os.getpid())" + SHIFT
    repository.labs(first_90=source(90, shift))
    return repository.pytest("-s", "--step", "1", "labs/90_first")


def test_minus_s_runs_in_pytests_own_process(one_step_in_process):
    run = one_step_in_process
    assert run.out.count("printed in") == 3
    (_,) = {line.split("printed in")[1] for line in run.lines if "printed in" in line}
    assert any(line.startswith("tests: in this process, 120 s a test") for line in run.lines)


def test_step_runs_the_tests_of_that_step_only(one_step_in_process):
    run = one_step_in_process
    assert run.states("90_first") == ["passed", "not run"]
    assert "3 passed, 2 deselected in" in run.lines[-1]
    assert run.code == 0


def test_a_single_step_keeps_the_others_on_the_stored_board(repository):
    repository.labs(first_90=source(90, SHIFT))
    repository.pytest("labs/90_first", "--step", "2")
    repository.pytest("labs/90_first", "--step", "1")
    assert repository.run("labs").states("90_first") == ["passed", "not written"]


# ---------------------------------------------------------------- a part of a step

NOT_17 = "    return x if len(x) == 17 else x + NN"
ONE_TEST = "labs/90_first/test_lab.py::test_shift[1]"
REST = "{} of {} tests passed, the rest not run"


def test_some_tests_that_pass_are_no_pass_of_their_step(repository):
    repository.labs(first_90=source(90, NOT_17))
    failing = "failing      1 of 3 tests; first: test_shift[17]"
    assert failing in repository.pytest("labs/90_first", "--step", "1").out
    for passed, args in ((2, ["labs/90_first", "-k", "shift and not 17"]), (1, [ONE_TEST])):
        run = repository.pytest(*args)
        assert run.code == 0
        assert run.states("90_first") == ["partly run", "not run"]
        assert run.board("90_first")[0].endswith(REST.format(passed, 3))
        assert "next: step 1, shift: run all its tests" in run.board("90_first")
    assert failing in repository.run("labs").out  # the stored result stays
    repository.write("labs/90_first/exercise.py", source(90, SHIFT))
    run = repository.pytest("labs/90_first", "--step", "1", "--lf")
    assert run.board("90_first")[0].endswith(REST.format(1, 3))


def test_a_part_of_each_step_is_not_all_steps(repository):
    repository.labs(first_90=solution(90))
    run = repository.pytest("labs/90_first", "-k", "not 17 and not 40")
    assert run.states("90_first") == ["partly run", "partly run"]
    assert "all steps pass" not in run.out
    assert REST.format(1, 3) in repository.run("labs").out  # kept, as nothing else is known


def test_a_stored_pass_outlives_a_part_that_passes_and_not_one_that_fails(repository):
    repository.labs(first_90=solution(90))
    assert "all steps pass" in repository.pytest("labs/90_first").out
    run = repository.pytest(ONE_TEST)
    assert run.states("90_first") == ["partly run", "passed"]
    assert "all steps pass" not in run.out
    repository.pytest(ONE_TEST, "--impl=solution")
    board = repository.run("labs")
    assert board.states("90_first") == ["passed", "passed"]
    assert "all steps pass" in board.out

    repository.write("labs/90_first/exercise.py", source(90, "    return x", KERNEL))
    repository.pytest(ONE_TEST)
    line = repository.run("labs").board("90_first")[0]
    assert line.endswith("failing      1 of 1 test run, 3 in all; first: test_shift[1]")


# ---------------------------------------------------------------- results of a file since changed


@pytest.fixture
def green(repository):
    """Lab 90 is solved, and the board says so."""
    repository.labs(first_90=solution(90))
    repository.pytest("labs/90_first")
    return repository


def test_the_board_says_that_the_file_has_changed_since(green):
    green.write("labs/90_first/exercise.py", "broken(")
    board = green.run("labs").board("90_first")
    for line in board[:2]:
        assert line.endswith("tests (before exercise.py changed)")
    assert board[2:] == ["exercise.py has changed since this run: pytest labs/90_first"]

    green.write("labs/90_first/exercise.py", solution(90) + "# mended\n")
    run = green.pytest("labs/90_first", "--step", "2")
    assert run.board("90_first")[0].endswith("(an earlier run, before exercise.py changed)")
    assert "all steps pass" not in run.out
    assert "exercise.py has changed since step 1 ran: pytest labs/90_first" in run.lines

    (green.root / "labs/90_first/exercise.py").unlink()
    board = green.run("labs")
    assert board.code == 0
    assert board.board("90_first")[-1] == "next: labs/90_first has no exercise.py"


def test_a_board_without_digests_is_shown_as_it_is(green):
    file = green.root / ".pytest_cache/v" / steps.CACHE_KEY
    stored = json.loads(file.read_text())
    for row in stored["90_first"]["rows"].values():
        del row["file"], row["of"]
    file.write_text(json.dumps(stored))
    green.write("labs/90_first/exercise.py", "broken(")
    board = green.run("labs")
    assert board.states("90_first") == ["passed", "passed"]
    assert "changed" not in board.out


def test_what_is_next_is_read_from_the_file_and_not_from_an_older_result(repository):
    repository.labs(first_90=None)
    repository.pytest("labs/90_first")
    repository.write("labs/90_first/exercise.py", solution(90))
    board = repository.pytest("labs/90_first", "--step", "1").board("90_first")
    assert "not written  (an earlier run, before exercise.py changed)" in board[1]
    assert board[2] == "next: step 2, times: run its tests"


# ---------------------------------------------------------------- python -m labs, for chosen labs


def test_the_board_of_chosen_labs(green):
    green.labs(first_90=solution(90), second_91=None, third_92=None)
    green.pytest("labs/90_first")
    lines = green.run("labs").lines
    for number, lab in enumerate(("91_second", "92_third")):
        assert lines[number] == f"{lab}: not run yet; next: pytest labs/{lab}"
    assert lines[2:4] == ["", "90_first, exercise"]

    assert green.run("labs", "board", "91").lines == lines[:1]
    assert green.run("labs", "board", "labs/90_first", "90").lines == lines[2:]
    run = green.run("labs", "board", "77")
    assert run.code == 2
    assert run.lines == ["error: no lab at '77'; the labs are: 90_first, 91_second, 92_third"]


# ---------------------------------------------------------------- wrong names


def test_a_step_that_is_not_there_lists_those_that_are(repository):
    repository.labs(first_90=None, second_91=None)
    run = repository.pytest("labs/90_first", "--step", "9")
    assert run.code == 4
    at = run.lines.index("ERROR: --step 9: no such step in what was collected; the steps are:")
    assert run.lines[at + 1] == "  90_first: 1 shift, 2 times"


@pytest.mark.parametrize(
    ("arg", "says"),
    [
        ("labs/90", "no folder labs/90; did you mean labs/90_first?"),
        ("91_", "no folder 91_; did you mean labs/91_second?"),
        ("77", "no lab at '77'; the labs are: 90_first, 91_second"),
    ],
)
def test_the_number_of_a_lab_in_place_of_its_folder(repository, arg, says):
    repository.labs(first_90=None, second_91=None)
    run = repository.pytest(arg)
    assert run.code == 4
    assert [line for line in run.lines if line] == [f"ERROR: {says}"]


# ---------------------------------------------------------------- without Triton

NO_TRITON = """
import importlib.metadata
import sys
from collections import Counter


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}")


def version(name, inner=importlib.metadata.version):
    if "triton" in name:
        raise importlib.metadata.PackageNotFoundError(name)
    return inner(name)


sys.meta_path.insert(0, Blocker())
importlib.metadata.version = version
"""


def test_of_several_reasons_for_a_skip_the_rarest_comes_first():
    assert steps._why(Counter()) is None
    assert steps._why(Counter(["no card"] * 3)) == "no card"
    assert steps._why(Counter(["no card"] * 3 + ["optional"])) == "1 optional; 3 no card"


@pytest.mark.skipif(runtime.setup().device == "cuda", reason="a machine without Triton has no GPU")
def test_skips_are_counted_apart_where_there_is_no_triton(repository):
    repository.labs(first_90=None, second_91=solution(91))
    repository.write("no_triton.py", NO_TRITON)
    run = repository.pytest("-p", "no_triton", fresh=True)
    assert run.states("90_first") == ["not written", "skipped"]
    assert run.states("91_second") == ["passed", "skipped"]
    assert run.board("91_second")[1].endswith("Triton is not installed")
    assert "all steps pass" not in run.out
    assert "3 passed, 4 skipped, 3 not written in" in run.lines[-1]
    assert "kernels: nowhere: Triton is not installed (PyTorch parts only)" in run.lines


# ---------------------------------------------------------------- failures


MORE_TESTS = """
import pytest


@pytest.mark.step(1)
def test_b(lab):
    assert lab.shift(0) == 90, "b: want 90"


@pytest.mark.step(1)
def test_c(lab):
    assert lab.shift(1) == 91, "c: want 91"


@pytest.mark.step(1)
def test_d(lab):
    assert lab.shift(2) == 92, "d: want 92"
"""


@pytest.fixture(scope="module")
def wrong(repository):
    """Lab 90 gives wrong numbers in both steps; step 1 of lab 91 raises a long message."""
    long = "    raise ValueError('first line\\n' + 'and another line\\n' * 50)"
    repository.labs(
        first_90=source(90, "    return x - NN", KERNEL.replace("x * NN", "x + NN")),
        second_91=source(91, long, KERNEL),
    )
    repository.write("labs/90_first/test_more.py", MORE_TESTS)
    return repository.pytest()


def test_a_failure_is_ten_lines_at_most(wrong):
    failures = wrong.failures()
    assert len(failures) == 5
    for name, lines in failures.items():
        assert len(lines) <= 10, name


def test_a_wrong_result_shows_the_line_of_the_test_and_what_is_wrong(wrong):
    failure = wrong.failures()["90_first test_times[16]"]
    assert re.match(r"labs/90_first/test_lab.py:\d+: in test_times", failure[0])
    assert failure[1].strip() == 'check("times", x.double() * 90, lab.times(x))'
    assert any("times (16,) float32: 16 of 16 values wrong" in line for line in failure)


def test_an_error_of_the_students_shows_their_line(wrong):
    failure = wrong.failures()["91_second test_shift[1]"]
    at = next(i for i, line in enumerate(failure) if re.match(r"labs/91.*exercise.py:\d+", line))
    assert failure[at].endswith(": in shift")
    assert failure[at + 1].strip().startswith("raise ValueError(")
    assert failure[at + 2] == "ValueError: first line"
    assert "... (46 lines more)" in failure


def test_failures_past_the_third_of_a_step_are_counted_and_not_shown(wrong):
    shown = [name for name in wrong.failures() if name.startswith("90_first")]
    assert shown == [f"90_first test_{x}" for x in ("shift[1]", "times[16]", "b", "c")]
    assert "d: want 92" not in wrong.out
    # 3 cases of test_shift and one of each other test fail, and 2 of test_times; so do 3 in lab 91.
    assert "5 failed, 2 passed, 6 more failed (-v shows them)" in wrong.lines[-1]
    assert re.search(r"failing +6 of 6 tests; first: test_shift\[1\]$", wrong.board("90_first")[0])
    assert wrong.states("91_second") == ["failing", "passed"]


# ---------------------------------------------------------------- --expect-unsolved


def test_expect_unsolved_is_green_on_stubs(repository):
    repository.labs(first_90=None, second_91=None)
    run = repository.pytest("--expect-unsolved")
    assert run.code == 0
    assert "every step of every stub fails as not written" in run.lines


@pytest.fixture(scope="module")
def not_unsolved(repository):
    partly = "    if len(x) == 1:\n        return x + NN" + fixture_lab.SHIFT_STUB
    repository.labs(
        first_90=source(90, SHIFT),
        second_91=source(91, partly),
        third_92=source(92, "    return 1 / 0"),
        fourth_93="def shift(:\n",
        fifth_94=None,
    )
    return repository.pytest("--expect-unsolved")


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a solved stub", "90_first step 1: want every test not written, got 3 passed"),
        ("a test passes", "91_second step 1: want every test not written, got 1 passed"),
        ("another error", "92_third step 1: want every test not written, got 3 failed"),
        ("does not load", "93_fourth step 2: want every test not written, got 2 not loaded"),
    ],
)
def test_expect_unsolved_is_red_on(not_unsolved, what, line):
    assert line in not_unsolved.lines
    assert not_unsolved.code == 1
    for fine in ("90_first step 2", "92_third step 2", "94_fifth"):
        assert f"{fine}: want" not in not_unsolved.out


# ---------------------------------------------------------------- pieces


def test_a_reminder_is_found_under_the_exceptions_of_a_compiler():
    inner = NotImplementedError("lab 90 step 2: write times")
    middle, outer = RuntimeError("while compiling"), RuntimeError("1:0")
    middle.__cause__, outer.__context__ = inner, middle
    assert steps.unwritten(outer) == "lab 90 step 2: write times"
    assert steps.unwritten(RuntimeError("lab 90 is hard")) is None
    outer.__context__, middle.__cause__ = middle, outer  # a circle ends
    assert steps.unwritten(outer) is None


def test_the_line_of_a_todo(tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text("# TODO step 12\n\n# TODO step 1 (4 lines)\n")
    assert steps.todo_line(file, 1) == 3
    assert steps.todo_line(file, 12) == 1
    assert steps.todo_line(file, 2) is None


def test_the_next_function_is_the_first_of_its_step_that_is_not_written(tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text("""
def first():
    # TODO step 1 (3 lines), the comment stayed
    return 1


def second():
    # TODO step 1 (2 lines)
    raise NotImplementedError("lab 90 step 1: write second")


def third():
    raise NotImplementedError("lab 90 step 2: write third")
""")
    assert steps.first_unwritten(file, 1) == ("second", 8)
    assert steps.first_unwritten(file, 2) == ("third", 13)
    assert steps.first_unwritten(file, 3) is None
