"""Tests that crash, exit or hang: the reason, the rest of the step, and the other steps."""

import re
import sys

import pytest

from labs._harness.tests.fixture_lab import KERNEL, SHIFT, source

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="each test runs in a process on Linux only"),
    pytest.mark.timeout(120),
]

SEGFAULT = """
    import ctypes
    ctypes.string_at(0)
"""
EXIT = """
    import os
    os._exit(0)
"""
LOOP = """
    while True:
        pass
"""
DEAF = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    while True:
        pass
"""
SPOIL = """
    if len(x) == 1:
        torch.set_default_dtype(torch.float64)
        torch.add = None
    return x + NN
"""
KERNEL_SEGFAULT = """
        import ctypes
        ctypes.string_at(0)
"""


@pytest.fixture(scope="module")
def run(repository):
    repository.labs(
        crash_90=source(90, SEGFAULT, KERNEL),
        exit_91=source(91, EXIT, KERNEL),
        loop_92=source(92, LOOP, KERNEL),
        deaf_93=source(93, DEAF, KERNEL),
        spoil_94=source(94, SPOIL, KERNEL),
        kernel_95=source(95, SHIFT, KERNEL_SEGFAULT),
        quit_96=source(96, "    raise KeyboardInterrupt", KERNEL),
    )
    return repository.pytest("-v")


def reason(run, lab: str, test: str) -> str:
    """The text of a failure. -v shows all of them, in the order in which they failed."""
    names = re.findall(r"^labs/(\S+)/test_lab.py::(\S+) FAILED", run.out, flags=re.MULTILINE)
    texts = re.split(r"^_+ \S+ _+$", run.out, flags=re.MULTILINE)[1:]
    return re.split(r"^=+ ", texts[names.index((lab, test))], flags=re.MULTILINE)[0].strip()


@pytest.mark.parametrize(
    ("lab", "test", "says"),
    [
        ("90_crash", "test_shift[1]", r"killed by SIGSEGV, in shift \(exercise.py line 17\)"),
        ("91_exit", "test_shift[1]", r"process ended early with exit code 0"),
        ("92_loop", "test_shift[1]", r"in shift\n.*\n.*still running after 8(\.0)? s"),
        ("93_deaf", "test_shift[1]", r"still running after [89] s; stopped, in shift \(exercise"),
        ("95_kernel", "test_times[16]", r"killed by SIGSEGV, in _times_kernel \(exercise.py line"),
        ("96_quit", "test_shift[1]", r"process ended early with exit code 1"),
    ],
)
def test_the_failure_names_the_reason(run, lab, test, says):
    assert re.search(says, reason(run, lab, test)), reason(run, lab, test)


@pytest.mark.parametrize(
    ("lab", "first", "how"),
    [
        ("90_crash", "test_shift[1]", "crashed"),
        ("91_exit", "test_shift[1]", "crashed"),
        ("92_loop", "test_shift[1]", "ran out of time"),
        ("93_deaf", "test_shift[1]", "ran out of time"),
        ("95_kernel", "test_times[16]", "crashed"),
    ],
)
def test_the_steps_remaining_tests_fail_at_once_with_that_reason(run, lab, first, how):
    rest = ("test_shift[17]", "test_shift[40]") if "shift" in first else ("test_times[40]",)
    for test in rest:
        assert reason(run, lab, test) == f"not run: {first} of this step {how}"


def test_other_steps_and_labs_still_run(run):
    for lab in ("90_crash", "91_exit", "92_loop", "93_deaf", "96_quit"):
        assert run.states(lab) == ["failing", "passed"]
    assert run.states("95_kernel") == ["passed", "failing"]
    assert run.code == 1
    total = re.search(r"in ([\d.]+)s", run.lines[-1])
    assert float(total.group(1)) < 30, "one limit for each loop, not one for each test"


def test_what_a_test_does_to_its_process_no_other_test_sees(run):
    assert run.states("94_spoil") == ["passed", "passed"]


IN_PROCESS = """
import os
import time
import pytest

PARENT = os.getpid()
STEPS = {1: "shift", 2: "times"}


@pytest.mark.step(1)
def test_forked(lab):
    assert os.getpid() != PARENT


@pytest.mark.step(1)
@pytest.mark.parametrize("name", ["one", "other"])
def test_two_at_a_time(name):
    here = os.path.dirname(__file__)
    open(os.path.join(here, name), "w").close()
    end = time.monotonic() + 3
    while not all(os.path.exists(os.path.join(here, n)) for n in ("one", "other")):
        assert time.monotonic() < end, "the other test has not begun"
        time.sleep(0.01)


def test_without_a_step():
    assert os.getpid() == PARENT


@pytest.fixture
def torn_down():
    yield
    raise RuntimeError("in tear-down")


@pytest.mark.step(2)
def test_tear_down(torn_down):
    pass


@pytest.fixture
def not_set_up():
    raise RuntimeError("in set-up")


@pytest.mark.step(2)
def test_set_up(not_set_up):
    pass


@pytest.mark.step(2)
@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure():
    assert False


@pytest.mark.step(2)
@pytest.mark.skip(reason="not today")
def test_skipped():
    pass


@pytest.mark.step(2)
def test_output():
    print("said by the test")
    assert False, "on purpose"
"""


@pytest.fixture(scope="module")
def reports(repository):
    repository.labs(first_90=source(90, SHIFT, KERNEL))
    repository.write("labs/90_first/test_lab.py", IN_PROCESS)
    return repository.pytest("-rs", "--forks=2")


def test_tests_of_a_step_are_forked_and_others_are_not(reports):
    assert reports.states("90_first")[0] == "passed"
    assert "1 failed, 5 passed, 1 skipped, 1 xfailed, 2 errors" in reports.lines[-1]


def test_as_many_tests_run_at_a_time_as_asked_for(reports):
    assert "tests: each test in its own process, 2 at a time, 10 s at most" in reports.lines
    assert "test_two_at_a_time" not in reports.out


def test_one_at_a_time(repository):
    repository.labs(first_90=source(90, SHIFT, KERNEL))
    repository.write("labs/90_first/test_lab.py", IN_PROCESS)
    one = repository.pytest("-x", "--forks=1", "-k", "two_at_a_time")
    assert "the other test has not begun" in one.out


def test_a_test_begins_while_one_of_another_folder_runs(repository):
    repository.labs(first_90=source(90, SHIFT, KERNEL), second_91=source(91, SHIFT, KERNEL))
    repository.write("labs/90_first/extras/test_extra.py", "def test_extra():\n    pass\n")
    run = repository.pytest("--forks=3")
    assert run.states("90_first") == run.states("91_second") == ["passed", "passed"]
    assert "11 passed" in run.lines[-1]


def test_reports_of_set_up_tear_down_skips_and_output_come_back(reports):
    assert re.search(r"^SKIPPED \[1\] labs/90_first/test_lab.py:\d+: not today$", reports.out, re.M)
    assert "RuntimeError: in tear-down" in reports.out
    assert "RuntimeError: in set-up" in reports.out
    assert "said by the test" in reports.out
    assert "on purpose" in reports.out
