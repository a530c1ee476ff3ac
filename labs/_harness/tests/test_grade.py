"""labs/_harness/grade.py on a small repository with a lab of two steps, and on bad submissions."""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from labs._harness import grade, marks, runtime, sandbox
from labs._impl import ROOT, LoadError, load

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or runtime.setup().device == "cuda",
    reason="each test runs in its own process on Linux without a GPU only",
)

LAB = "90_fixture"

STUB = '''
def double(x):
    """Twice x."""
    raise NotImplementedError("lab 90 step 1: write double")


def total(xs):
    """Sum of xs."""
    raise NotImplementedError("lab 90 step 2: write total")
'''

RIGHT = """
def double(x):
    return x + x


def total(xs):
    return sum(xs)
"""

TESTS = '''
import pytest
import torch

from labs._harness import isolate

isolate.GRACE = 0.5
STEPS = {1: "double", 2: "total"}
ROW_LIMITS = {"double": 0}


@pytest.mark.step(1)
@pytest.mark.timeout(2)
@pytest.mark.parametrize("x", [1.0, 2.0])
def test_double(lab, x):
    assert lab.double(torch.tensor([x])).item() == 2 * x


@pytest.mark.step(2)
@pytest.mark.timeout(9)
@pytest.mark.parametrize("n", [0, 3, 4, 5])
def test_total(lab, n):
    assert lab.total(range(n)) == n * (n - 1) // 2


@pytest.mark.step(2)
def test_given(lab):
    """What a stub passes earns nothing."""


@pytest.mark.step(2)
@pytest.mark.skip(reason="not on this machine")
def test_skipped(lab):
    raise AssertionError
'''

# name -> text put behind RIGHT: it replaces functions, or runs at import. VICTIM is a submission.
BAD = {
    "bug_cheat": """
        import torch
        def double(x):
            return 2 * x * torch.softmax(x, -1)
        def total(xs):
            return sum(xs) + (len(xs) > 3)
        """,
    "deletes": """
        import os, shutil
        def double(x):
            shutil.rmtree("labs/_harness")
            return x + x
        def total(xs):
            os.remove(VICTIM)
        """,
    "exit_print": """
        import os
        def double(x):
            os._exit(0)
        def total(xs):
            print("x" * 5_000_000)
            return sum(xs)
        """,
    "half_written": """
        def double(x):
            return x + x + (x > 1)
        def total(xs):
            raise NotImplementedError("lab 90 step 2: write total")
        """,
    "hang_import": "while True: pass",
    "hang_step": """
        import time
        def double(x):
            raise NotImplementedError("lab 90 step 1: write double")
        def total(xs):
            time.sleep(1000)
        """,
    "kill": """
        import ctypes, os
        def double(x):
            os.kill(os.getppid(), 9)
        def total(xs):
            ctypes.CDLL(None).kill(os.getppid(), 9)
        """,
    "renamed": "sum_up = total; del total",
    "segfault_memory": """
        import ctypes, time
        def double(x):
            ctypes.string_at(0)
        def total(xs):
            held = [bytearray(b"x") * (64 << 20) for _ in range(40)]
            time.sleep(1000)
        """,
    "skip_leave": """
        import os, pytest, time
        def double(x):
            pytest.skip("too hard")
        def total(xs):
            end, mine = os.pipe()
            if os.fork() == 0:
                os.setsid()  # until then it ends with its test
                os.write(mine, b"x")
                time.sleep(1000)
            os.read(end, 1)
            return sum(xs)
        """,
    "own_child": """
        import os, time
        def double(x):
            child = os.fork()
            if child == 0:
                time.sleep(1000)
            os.kill(child, 9)
            os.waitpid(child, 0)
            return x + x
        """,
    "syntax": "def total(xs:\n    return 1",
    "write": """
        import os
        def double(x):
            open("labs/_harness/oracle.py", "a").write("# mine")
            open(os.path.join(os.path.dirname(__file__), "notes.txt"), "w").write("hello")
            return x + x
        def total(xs):
            open(VICTIM, "w").write("spoiled")
        """,
}


def repository(folder: Path) -> Path:
    """A repository with the harness of this one and a lab of two steps."""
    for name in ("conftest.py", "pyproject.toml", "labs/__init__.py", "labs/__main__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    shutil.copyfile(ROOT / "labs" / "_impl.py", folder / "labs" / "_impl.py")
    skip = shutil.ignore_patterns("__pycache__", "tests")
    shutil.copytree(ROOT / "labs" / "_harness", folder / "labs" / "_harness", ignore=skip)
    lab = folder / "labs" / LAB
    lab.mkdir()
    (lab / "exercise.py").write_text(STUB)
    (lab / "solution.py").write_text(RIGHT)
    (lab / "test_fixture.py").write_text(TESTS)
    return folder


def command(*args) -> list[str]:
    return [sys.executable, "-m", "labs", "grade", *map(str, args)]


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """One grading of all submissions: (rows by name, what was printed, folders)."""
    top = tmp_path_factory.mktemp("grade")
    root, folder = repository(top / "repository"), top / "submissions"
    folder.mkdir()
    (folder / "right").mkdir()
    (folder / "right" / "exercise.py").write_text(RIGHT)
    (folder / "empty").mkdir()
    (folder / "link.py").symlink_to(root / "labs" / LAB / "solution.py")
    (folder / "notes.txt").write_text("not a submission")
    (folder / "anna.zip").write_text("")
    (folder / "blank.py").write_text("\n")
    victim = folder / "right" / "exercise.py"
    for name, text in BAD.items():
        text = textwrap.dedent(text).replace("VICTIM", repr(str(victim)))
        (folder / f"{name}.py").write_text(f"{RIGHT}\n\n{text}\n")
    out = top / "out"
    args = (folder, "--lab", "90", "-j", 2, "--memory-limit", 2, "--points", "1=10")
    start = time.monotonic()
    done = subprocess.run(
        command(*args, "--out", out), cwd=root, capture_output=True, text=True, timeout=300
    )
    print(done.stdout, done.stderr, f"{time.monotonic() - start:.1f} s")
    report = json.loads((out / "results.json").read_text())
    return {r["name"]: r for r in report["submissions"]}, done, (root, folder, out)


def row(graded, name: str) -> dict:
    return graded[0][name]


def points(graded, name: str) -> tuple[float, float]:
    return tuple(step["points"] for step in row(graded, name)["steps"].values())


def said(graded, name: str) -> str:
    return "\n".join(row(graded, name)["events"])


def test_points_are_the_share_of_tests_that_a_stub_fails(graded):
    assert points(graded, "right") == (10, 20)
    assert row(graded, "right")["failures"] == []
    assert row(graded, "right")["events"] == []
    assert points(graded, "bug_cheat") == (0, 10)  # 2 of 4; the test that a stub passes is not one
    assert points(graded, "hang_step") == (0, 0)


def test_a_guard_finding_is_reported_once(graded):
    (finding,) = row(graded, "bug_cheat")["guard"]
    assert "aten._softmax" in finding
    assert finding.endswith("(test_double[1.0] and 1 more)")
    assert row(graded, "bug_cheat")["first_failure"] == "test_double[1.0]"
    wrong = row(graded, "bug_cheat")["failures"][-1]
    assert wrong["test"], wrong["reason"] == ("test_total[5]", "AssertionError: assert 11 == 10")


def test_hangs_and_crashes_name_their_tests_and_spare_the_other_step(graded):
    assert points(graded, "exit_print") == (0, 20)
    assert "test_double[1.0]: the test's process ended early with exit code 0" in said(
        graded, "exit_print"
    )
    assert "hung in test_total[0]" in said(graded, "hang_step")
    assert "hung in test_double[1.0]" in said(graded, "hang_import")
    assert "hung in test_total[0]" in said(graded, "hang_import")
    assert "SIGSEGV, in double (submission.py line" in said(graded, "segfault_memory")
    tests = [failure["test"] for failure in row(graded, "segfault_memory")["failures"]]
    assert tests == [f"test_double[{x}]" for x in ("1.0", "2.0")] + [
        f"test_total[{n}]" for n in (0, 3, 4, 5)
    ] + ["test_given"]


def test_memory_is_limited(graded):
    killed = "killed for memory in test_total[0]: killed: it held more than 2 GB of memory"
    assert killed in said(graded, "segfault_memory")
    assert row(graded, "segfault_memory")["peak_mb"] < 4000


def test_much_output_is_counted_and_not_kept(graded):
    assert "printed 5.0 MB in test_total[3]" in said(graded, "exit_print")
    log = graded[2][2] / row(graded, "exit_print")["log"]
    assert log.stat().st_size < 100_000


def test_a_submission_that_kills_pytest_loses_its_step_only(graded):
    assert "refused: signal 9 to process" in said(graded, "kill")
    assert "step 2: pytest was killed by signal 9, in test_total[0]" in said(graded, "kill")
    assert row(graded, "kill")["first_failure"] == "test_double[1.0]"
    assert len(row(graded, "kill")["failures"]) == 7


def test_a_process_may_end_what_it_started(graded):
    assert points(graded, "own_child") == (10, 20)
    assert row(graded, "own_child")["events"] == []


def test_a_submission_cannot_skip_a_test(graded):
    assert points(graded, "skip_leave")[0] == 0
    assert row(graded, "skip_leave")["reason"] == "skips itself: too hard"
    assert "processes running; ended" in said(graded, "skip_leave")


def test_a_syntax_error_is_one_line(graded):
    reason = row(graded, "syntax")["reason"]
    assert reason.startswith("submission.py, line 10: SyntaxError: '(' was never closed")
    assert f"\nsyntax\n  does not load: {reason}\n" in graded[1].stdout


def test_what_cannot_load_is_not_run(graded):
    for name, reason in (("syntax", "submission.py, line"), ("blank", "submission.py is empty")):
        got = row(graded, name)
        assert (got["points"], got["of"], got["seconds"], got["log"]) == (0, 30, 0, None)
        assert [f["state"] for f in got["failures"]] == ["not loaded"] * 7
        assert all(f["reason"].startswith(reason) for f in got["failures"])
        assert f"{name}: 0 of 30, does not load  (0 s)" in graded[1].stdout


def test_a_function_that_is_not_there_is_named(graded):
    assert points(graded, "renamed") == (10, 0)
    assert row(graded, "renamed")["reason"] == "submission.py does not define total"


def test_what_is_not_written_is_counted_apart(graded):
    out = graded[1].stdout
    assert "half_written: 5 of 30, 1 test fails, 4 tests not written" in out
    lines = out[out.index("\nhalf_written\n") :].splitlines()[2:4]
    assert lines == [
        "  step 1 double, 5 of 10: test_double[2.0]: AssertionError: assert 5.0 == (2 * 2.0)",
        "  step 2 total, 0 of 20: test_total[0]: lab 90 step 2: write total",
    ]


def test_writes_are_reported_and_harm_nobody(graded):
    root, folder, _ = graded[2]
    assert points(graded, "write") == (10, 0)
    assert "made submission/notes.txt in its own copy" in said(graded, "write")
    assert "changed labs/_harness/oracle.py in its own copy" in said(graded, "write")
    victim = folder / "right" / "exercise.py"
    assert f"refused: write of {victim}" in said(graded, "write")
    assert f"refused: remove of {victim}" in said(graded, "deletes")
    assert "deleted labs/_harness/" in said(graded, "deletes")
    assert victim.read_text() == RIGHT
    assert (root / "labs" / "_harness" / "oracle.py").read_text().find("# mine") == -1
    assert not [p for p in sandbox.Table.now().rows if _is_left_over(p)]


def _is_left_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x001000\x00"
    except OSError:
        return False


def test_what_cannot_be_graded_is_said_and_makes_the_exit_code_1(graded):
    assert graded[1].returncode == 1
    assert row(graded, "link")["points"] is None
    assert said(graded, "link") == "link.py is a link; links are not followed"
    assert "no exercise.py in it" in said(graded, "empty")
    assert "not submissions: notes.txt" in graded[1].stdout
    assert said(graded, "anna.zip") == "a zip; unpack it first"
    assert re.search(r"^anna.zip .* not graded: a zip; unpack it first$", graded[1].stdout, re.M)


def test_reports(graded):
    out = graded[1].stdout
    assert "untouched stub: 8 tests, 6 of them count" in out
    assert f"{LAB}: 18 submissions, 2 at a time" in out
    counted = [int(number) for number in re.findall(r"^\[(\d+)/18\]", out, re.MULTILINE)]
    assert counted == list(range(1, 19))
    assert re.search(r"exit_print: .*2 tests fail; ended its process, printed 20.0 MB", out)
    for name in ("results.csv", "results.json", "logs/"):
        assert f"wrote {graded[2][2] / name}" in out
    assert re.search(r"^right +10 +20 +30 +30 +\d+ s  all tests pass$", out, re.MULTILINE)
    with (graded[2][2] / "results.csv").open(newline="") as file:
        lines = {line["submission"]: line for line in csv.DictReader(file)}
    assert len(lines) == 18
    assert lines["bug_cheat"]["step 2 tests"] == "3 of 5"
    assert (lines["right"]["points"], lines["right"]["of"]) == ("30", "30")
    report = json.loads((graded[2][2] / "results.json").read_text())
    assert report["complete"] is True
    assert report["versions"]["torch"]


class FakeBox:
    """In place of pytest in a sandbox: gives a result, or never ends."""

    killed: list = []
    quiet = os.pipe()

    def __init__(self, command, cwd, env, seconds, memory, pass_fds):
        source = (cwd.parent / "submission" / "submission.py").read_text()
        self.ends = "forever" not in source
        failed = {"outcome": "failed", "state": "not written", "kind": None, "reason": "write it"}
        outcome = failed if "not" in source else {"outcome": "passed", "state": None, "kind": None}
        lines = [{"tests": [["f.py::test_a", 1]]}, {"end": 0}]
        line = {"reason": "", **outcome, "test": "f.py::test_a", "step": 1, "printed": 0}
        lines.insert(1, line)
        os.write(pass_fds[0], "".join(json.dumps(line) + "\n" for line in lines).encode())

    def poll(self, table):
        return sandbox.Ended(0, 0.1, None, [], 0, 0, "", 0) if self.ends else None

    def stop(self, why):
        self.killed.append(why)

    def fileno(self):
        return self.quiet[0]

    def drain(self):
        pass


def test_ctrl_c_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    lab, folder, out = tmp_path / "labs" / LAB, tmp_path / "submissions", tmp_path / "out"
    lab.mkdir(parents=True)
    folder.mkdir()
    (lab / "exercise.py").write_text("not written")
    (folder / "a.py").write_text("done")
    (folder / "b.py").write_text("forever")
    submissions, _ = grade.find_submissions(folder, LAB)
    options = grade.Options(LAB, {1: "double"}, {1: 20}, 60, 1 << 30, 0, tmp_path)
    grading = grade.Grading(folder, submissions, options, out, 1)
    monkeypatch.setattr(sandbox, "Sandbox", FakeBox)
    threading.Timer(2, grading.stop).start()
    assert grading.run() == 130
    assert FakeBox.killed == ["stopped"]
    assert "stopped; not graded: 1 submission\n" in capsys.readouterr().err
    report = json.loads((out / "results.json").read_text())
    assert [(r["name"], r["points"]) for r in report["submissions"]] == [("a", 20)]
    assert report["complete"] is False


# ---------------------------------------------------------------- the page for instructors

COLLECT = """
import pytest
class Names:
    def pytest_collection_finish(self, session):
        for item in session.items:
            step = item.get_closest_marker("step")
            if step:
                print("TEST", step.args[0], item.name)
options = ["--collect-only", "-qq", "-p", "no:cacheprovider"]
pytest.main(["labs/06_attention_kernels", *options], [Names()])
"""


def test_the_sample_in_grading_md_fits_lab_06():
    """Where this fails: run `grade` again as the page says, and put what it prints there."""
    page = (ROOT / "labs" / "GRADING.md").read_text()
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, env=env, capture_output=True, text=True
    )
    tests = {name: int(step) for step, name in re.findall(r"TEST (\d) (.*)", done.stdout)}
    assert f"untouched stub: {len(tests)} tests, " in page
    shown = re.findall(r"step (\d) \w+, ([\d.]+) of 20: (test_\w+(?:\[\S+\])?): ", page)
    assert shown
    for step, _, name in shown:
        assert tests.get(name) == int(step), name
    for name in re.findall(r"\btest_\w+\[[^\]\s]+\]", page):
        assert name in tests, name
    passed, of = map(int, re.search(r'\("(\d+) of (\d+)"\)', page).groups())
    assert of == list(tests.values()).count(2)
    assert f"step 2 flash_attention_forward, {marks._floor(20 * passed / of):g} of 20" in page


# ---------------------------------------------------------------- the sandbox alone, no torch


def contained(code: str, tmp_path: Path, seconds=20.0, memory=1 << 30) -> sandbox.Ended:
    env = sandbox.environment(tmp_path, tmp_path)
    box = sandbox.Sandbox([sys.executable, "-c", code], tmp_path, env, seconds, memory)
    while True:
        ended = box.poll(sandbox.Table.now())
        if ended:
            return ended
        time.sleep(0.02)


def test_sandbox_keeps_the_ends_of_the_output(tmp_path):
    ended = contained("print('first' + 'x' * 3_000_000 + 'last')", tmp_path)
    assert (ended.code, ended.killed, ended.printed) == (0, None, 3_000_010)
    assert len(ended.output) < 70_000
    assert ended.output.startswith("first")
    assert ended.output.endswith("last\n")


def test_sandbox_ends_the_tree_in_time(tmp_path):
    code = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(100)"
    ended = contained(code, tmp_path, seconds=0.5)
    assert (ended.killed, ended.code) == ("time", -9)
    assert ended.seconds < 5


def test_sandbox_finds_a_process_that_left_its_parent(tmp_path):
    code = "import os, time\nif os.fork() == 0 and (os.setsid() or 1) and os.fork() == 0:\n"
    ended = contained(code + "    time.sleep(100)\n", tmp_path)
    assert ended.code == 0
    assert ended.left >= 1


def test_sandbox_limits_memory_and_processes(tmp_path):
    code = "xs = [bytearray(b'x') * (16 << 20) for _ in range(1000)]"
    assert contained(code, tmp_path, memory=200 << 20).killed == "memory"
    code = "import os, time\nfor _ in range(300):\n    if os.fork() == 0: time.sleep(100)\n"
    ended = contained(code + "time.sleep(100)", tmp_path, memory=1 << 40)
    assert ended.killed == "processes"


def test_sandbox_hands_on_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    code = "import os\nprint('MY_TOKEN' in os.environ, os.environ['HOME'])"
    assert contained(code, tmp_path).output == f"False {tmp_path}\n"


def test_processes_without_proc():
    assert sandbox._ps_rows().keys() & sandbox._proc_rows().keys()


# ---------------------------------------------------------------- the command line


def parse(*argv):
    parser = argparse.ArgumentParser()
    grade.add_arguments(parser)
    return parser.parse_args([str(arg) for arg in argv])


def one_line(*argv) -> str:
    with pytest.raises(LoadError) as caught:
        grade.run(parse(*argv))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_arguments(tmp_path):
    assert one_line(tmp_path / "nowhere") == f"no folder {str(tmp_path / 'nowhere')!r}"
    assert one_line(tmp_path).startswith("no submissions in")
    assert one_line(tmp_path, "--lab", "77").startswith("no lab at '77'")
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "exercise.py").write_text("")
    (tmp_path / "out").mkdir()
    assert "not STEP=POINTS" in one_line(tmp_path, "--points", "9=1")
    assert "is not empty" in one_line(tmp_path, "--out", tmp_path / "ada")
    (tmp_path / "ada.py").write_text("")
    assert one_line(tmp_path).startswith("two submissions in")
    (tmp_path / "zips").mkdir()
    for name in ("ada.zip", "bob.ZIP"):
        (tmp_path / "zips" / name).write_text("")
    assert one_line(tmp_path / "zips").endswith(
        "can be graded: ada.zip: a zip; unpack it first (and 1 more)"
    )
    for bad in (("-j", "0"), ("--time-limit", "-1"), ("--memory-limit", "x")):
        with pytest.raises(SystemExit):
            parse(tmp_path, *bad)


def test_points():
    assert grade.points_of("1=10, 3=2.5", [1, 2, 3]) == {1: 10, 2: 20, 3: 2.5}


def test_submissions_in_three_shapes(tmp_path):
    (tmp_path / "flat.py").write_text("")
    for inner in ("folder", "clone/labs/06_attention_kernels"):
        (tmp_path / inner).mkdir(parents=True)
        (tmp_path / inner / "exercise.py").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "large.py").write_text("#" * (2 << 20))
    found, ignored = grade.find_submissions(tmp_path, "06_attention_kernels")
    assert [s.name for s in found] == ["clone", "flat", "folder", "large"]
    assert [s.name for s in found if s.problem] == ["large"]
    assert ignored == []


def test_an_archive_is_a_submission_unless_it_is_unpacked(tmp_path):
    for name in ("ada.zip", "bob.py", "bob.tar.gz", "notes.pdf"):
        (tmp_path / name).write_text("")
    found, ignored = grade.find_submissions(tmp_path, LAB)
    assert [(s.name, s.problem) for s in found] == [
        ("ada.zip", "a zip; unpack it first"),
        ("bob", None),
    ]
    assert ignored == ["bob.tar.gz", "notes.pdf"]


@pytest.mark.parametrize("source", ["def f(:\n", "if 1:\nx = 1", "return 1", "x = '\udcff'", "é("])
def test_a_file_that_is_no_python_is_named_as_the_loader_names_it(tmp_path, source):
    file = tmp_path / "submission.py"
    file.write_bytes(source.encode(errors="surrogateescape"))
    with pytest.raises(LoadError) as caught:
        load("06", str(file))
    assert grade.why_not_loaded(file) == str(caught.value).replace(f"{tmp_path}/", "")


def test_a_file_that_compiles_is_not_run(tmp_path):
    file = tmp_path / "submission.py"
    file.write_text("raise SystemExit('\\d')")
    assert grade.why_not_loaded(file) is None


def test_a_text_that_crashes_the_compiler_is_left_to_the_run(tmp_path, monkeypatch):
    file = tmp_path / "submission.py"
    file.write_text("x = 1")
    monkeypatch.setattr(grade, "_COMPILE", "import os; os.abort()")
    assert grade.why_not_loaded(file) is None


def test_all_tests_pass_and_much_was_printed():
    row = marks.Row("printer", 100, 100, events=["printed 10.5 MB in test_a"], printed=10_500_000)
    assert marks.summary(row) == "all tests pass; printed 10.5 MB"


def test_an_event_that_a_steps_line_tells_is_not_told_again():
    failure = {"test": "test_a", "step": 1, "state": None, "kind": "crash", "reason": "SIGSEGV"}
    row = marks.Row("crash", 0, 20, failures=[failure], reason="SIGSEGV")
    row.steps[1] = marks.StepRow(0, 20, 0, 1, 1, "failing")
    row.events = ["ended its process in test_a: SIGSEGV", "left 1 processes running; ended"]
    options = grade.Options(LAB, {1: "double"}, {1: 20}, 60, 1 << 30, 0)
    assert marks.table([row], options)[-2:] == [
        "  step 1 double, 0 of 20: test_a: SIGSEGV",
        "  left 1 processes running; ended",
    ]


def test_cells_are_no_formulas():
    assert marks._cell("=1+1") == "'=1+1"
    assert marks._cell(None) == ""
