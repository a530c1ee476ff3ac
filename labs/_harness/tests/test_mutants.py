"""Planted faults on a small lab: the kill matrix, edits that do not fit, and the diagnosis."""

import sys

import pytest

from labs._harness import mutants, runtime
from labs._harness.mutants import Mutant, StaleEdit
from labs._harness.tests.fixture_lab import KERNEL, SHIFT, solution, source

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        runtime.setup().device == "cuda", reason="faults are planted in forks, on a CPU"
    ),
]
linux = pytest.mark.skipif(sys.platform != "linux", reason="planting faults needs a fork")

# id -> (how it ends, the mutant without its id)
BANK = {
    "wrong": (
        "caught",
        """"bug", 1, "the number is not added", "test_shift",
        (("return x + NN", "return x + 0"),)""",
    ),
    "tail": (
        "caught",
        """"bug", 2, "the last tile is dropped", "test_times",
        (("offs < n", "offs < n - n % 16"),)""",
    ),
    "cheat": (
        "caught",
        """"cheat", 2, "torch does it", "test_times", append="def times(x):\\n    return x - 1" """,
    ),
    "harmless": (
        "survived",
        """"bug", 1, "nothing", "test_shift", (("return x + NN", "return NN + x"),)""",
    ),
    "other-test": (
        "survived",
        """"bug", 1, "another test sees", "test_times", (("return x + NN", "return x"),)""",
    ),
    "no-such-test": (
        "survived",
        """"bug", 1, "nobody looks", "test_gone", (("return x + NN", "return x"),)""",
    ),
    "crash": (
        "crash",
        """"bug", 1, "it crashes", "test_shift",
        append="def shift(x):\\n    import ctypes\\n    ctypes.string_at(0)" """,
    ),
    "loop": (
        "time-out",
        """"bug", 1, "it never ends", "test_shift", (("return x + NN", "while True: pass"),)""",
    ),
    "stale": (
        "stale",
        """"bug", 1, "it does not apply", "test_shift", (("x - NN", "x"),)""",
    ),
    "no-import": (
        "not loaded",
        """"bug", 1, "it does not load", "test_shift", append="import no_such_module" """,
    ),
}
BAD = [name for name, (outcome, _) in BANK.items() if outcome != "caught"]


def bank(number: int, *names: str) -> str:
    lines = [f"    Mutant({name!r}, {BANK[name][1]})," for name in names]
    text = "\n".join(
        ["from labs._harness.mutants import Mutant", "", "MUTANTS = [", *lines, "]", ""]
    )
    return text.replace("NN", str(number))


# ---------------------------------------------------------------- the kill matrix


@pytest.fixture(scope="module")
def mixed(repository):
    """Lab 90 with faults that end in every way; lab 91 with a reference that is itself wrong."""
    repository.labs(first_90=None, second_91=None)
    repository.write("labs/90_first/mutants.py", bank(90, *BANK))
    repository.write("labs/91_second/mutants.py", bank(91, "wrong", "tail"))
    repository.write("labs/91_second/solution.py", source(91, SHIFT.replace("NN", "NN + 0.5")))
    return repository.pytest("--mutants")


def row(run, lab, name) -> str:
    at = run.lines.index(f"planted faults of {lab}")
    return next(line for line in run.lines[at:] if f" {name} " in line)


@linux
@pytest.mark.parametrize("name", BANK)
def test_how_a_planted_fault_ended(mixed, name):
    outcome, _ = BANK[name]
    cells = row(mixed, "90_first", name).split("  ")
    assert [cell.strip() for cell in cells if cell][3] == outcome


@linux
def test_every_fault_that_was_not_caught_is_a_failure_of_its_own(mixed):
    assert mixed.code == 1
    for name in BANK:
        line = f"FAILED labs/90_first/mutants.py::{name} - "
        assert (line in mixed.out) == (name in BAD), name
    for words in (
        "survived test_times: every case of it passes",
        "crash in test_shift[1]: the test's process was killed by SIGSEGV",
        "time-out in test_shift[1]",
        "the edit no longer applies: stale: 'x - 90' occurs 0 times, wanted once",
        "not loaded in test_shift[1]",
    ):
        assert words in mixed.out
    assert "no test test_gone in 90_first" in mixed.out


@linux
def test_the_score_counts_what_was_caught_by_kind(mixed):
    assert "caught 3 of 10: 2 of 9 bugs, 1 of 1 cheats" in mixed.lines


@linux
def test_a_reference_that_fails_the_named_test_is_an_error(mixed):
    assert "the reference fails test_shift[1]: " in mixed.out
    assert "FAILED 91_second::reference[test_shift] - " in mixed.out


@pytest.fixture(scope="module")
def perfect(repository):
    """(--mutants where every fault is caught, handout that it wrote into)."""
    repository.labs(first_90=None, second_91=None)
    repository.write("labs/91_second/mutants.py", bank(91, "wrong", "tail", "cheat"))
    handout = repository.write(
        "labs/91_second/README.md", "before\n{}\nold\n{}\nafter\n".format(*mutants.MARKERS)
    )
    return repository.pytest("--mutants", "--write-handout", "labs/91_second"), handout


@linux
def test_all_caught_is_exit_code_0(perfect):
    run, _ = perfect
    assert run.code == 0
    assert "caught 3 of 3: 2 of 2 bugs, 1 of 1 cheats" in run.lines
    assert "3 passed in" in run.lines[-1]


@linux
def test_the_handout_gets_score_and_table_between_its_markers(perfect):
    text = perfect[1].read_text()
    assert text.startswith(f"before\n{mutants.MARKERS[0]}\n")
    assert text.endswith(f"\n{mutants.MARKERS[1]}\nafter\n")
    assert "old" not in text
    assert "caught 3 of 3: 2 of 2 bugs, 1 of 1 cheats." in text
    assert "| 2 | bug | tail | the last tile is dropped | `test_times` |" in text


@linux
def test_one_fault_alone(repository):
    repository.labs(third_92=None)
    repository.write("labs/92_third/mutants.py", bank(92, "wrong", "tail", "cheat"))
    run = repository.pytest("--mutant", "tail")
    assert run.code == 0
    assert "caught 1 of 1: 1 of 1 bugs" in run.lines
    run = repository.pytest("--mutant", "wrong", "--mutant", "gone")
    assert "ERROR: --mutant gone: no such planted fault" in run.lines
    run = repository.pytest("--mutant", "tail", "--write-handout")
    assert "--write-handout wants all planted faults" in run.out


# ---------------------------------------------------------------- the diagnosis


def said(run, lab: str, test: str) -> str:
    """The text of a failure under -v."""
    return "\n".join(run.failures()[f"{lab} {test}"])


def tail_dropped() -> str:
    return KERNEL.replace("offs < n", "offs < n - n % 16")


@pytest.fixture(scope="module")
def diagnosed(repository):
    """Each lab wrong in both steps: in one as a planted bug is wrong, in the other in its own way.

    Lab 92 is wrong as the planted bug of the other step is, and as a fault that is no bug.
    """
    repository.labs(
        first_90=source(90, "    return x + 0", KERNEL.replace("x * NN", "x * NN + 1")),
        second_91=source(91, "    return x + NN / 2", tail_dropped()),
        third_92=source(92, "    return x + 1", KERNEL.replace("x * NN", "x - 1")),
    )
    for lab, number in (("90_first", 90), ("91_second", 91), ("92_third", 92)):
        faults = bank(number, "stale", "no-import", "cheat", "wrong", "tail")
        repository.write(f"labs/{lab}/mutants.py", faults)
    return repository.pytest("-v")


def test_a_result_that_a_planted_bug_gives_is_named(diagnosed):
    text = said(diagnosed, "90_first", "test_shift[17]")
    assert text.splitlines()[-1].strip() == "This is what you get when the number is not added."
    assert len(text.splitlines()) <= 10


def test_memory_that_a_planted_bug_leaves_unwritten_is_compared_too(diagnosed):
    text = said(diagnosed, "91_second", "test_times[40]")
    assert "8 of 40 values wrong, 8 of them NaN" in text
    assert text.endswith("This is what you get when the last tile is dropped.")


@pytest.mark.parametrize(
    ("lab", "test"),
    [
        ("90_first", "test_times[40]"),
        ("91_second", "test_shift[17]"),
        ("92_third", "test_shift[17]"),
        ("92_third", "test_times[40]"),  # as the cheat gives it, which is not a bug
    ],
)
def test_an_unrelated_wrong_result_is_not_named(diagnosed, lab, test):
    assert "values wrong" in said(diagnosed, lab, test)
    assert "This is what you get" not in said(diagnosed, lab, test)


# ---------------------------------------------------------------- edits

TEXT = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x + 1\n"


def mutant(*edits, **kwargs) -> Mutant:
    return Mutant("name", "bug", 1, "it is", "test_f", edits, **kwargs)


def test_an_edit_is_looked_up_in_one_function():
    edited = mutant(("x + 1", "x - 1"), inside="g").apply(TEXT)
    assert edited == "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x - 1\n"
    assert mutant(append="f = g\n").apply(TEXT) == TEXT + "\n\nf = g\n"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (mutant(("x + 1", "x")), "name: 'x [+] 1' occurs 2 times, wanted once"),
        (mutant(("x - 1", "x"), inside="f"), "name: 'x - 1' occurs 0 times, wanted once"),
        (mutant(("x", "y"), inside="h"), "no function h in the reference"),
    ],
)
def test_an_edit_that_does_not_fit_is_stale(fault, says):
    with pytest.raises(StaleEdit, match=says):
        fault.apply(TEXT)


def test_an_edit_that_is_no_python_is_an_error():
    with pytest.raises(SyntaxError):
        mutant(("return x + 1", "return (x"), inside="f").apply(TEXT)


def test_the_student_edition_has_no_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants._impl, "LABS", tmp_path)
    (tmp_path / "90_first").mkdir()
    assert mutants.of_lab("90_first") == []
    (tmp_path / "90_first" / "mutants.py").write_text(bank(90, "wrong"))
    assert mutants.of_lab("90_first") == [], "no reference to plant them in"
    (tmp_path / "90_first" / "solution.py").write_text(solution(90))
    (fault,) = mutants.of_lab("90_first")
    file = mutants.write(fault, "90_first", tmp_path)
    assert file.name == "90_first_wrong.py"
    assert "return x + 0" in file.read_text()
