"""Planted faults: edits of a reference that a lab's tests must catch, each by the test it names.

A lab lists them in mutants.py. `pytest --mutants` plants each in turn and runs its test; the same
list lets a wrong result be recognised as a known bug (`Diagnosis`).
"""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import re
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from labs import _impl
from labs._harness import compiler, guard, interpreter, isolate, memory, oracle, steps

KINDS = ("bug", "waste", "cheat")


class StaleEdit(Exception):
    """An edit that no longer applies to the reference."""


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        id: short name, unique in its lab.
        kind: "bug" (wrong numbers), "waste" (right, but more work or memory than the lesson
            allows) or "cheat" (right, but not by doing the lesson).
        step: the step it belongs to.
        teaches: completes "your output is what you get when ...".
        caught_by: name of the test that must fail.
        edits: (old, new) pieces of text; `old` occurs once in the file, or once in `inside`.
        inside: the function that the edits are looked up in; "" for the whole file.
        append: code added at the end of the file, for an override.
    """

    id: str
    kind: str
    step: int
    teaches: str
    caught_by: str
    edits: tuple[tuple[str, str], ...] = ()
    inside: str = ""
    append: str = ""

    def apply(self, source: str) -> str:
        """The reference with this fault planted. Raises StaleEdit where an edit does not fit."""
        start, end = _lines_of(source, self.inside) if self.inside else (0, len(source))
        piece = source[start:end]
        for old, new in self.edits:
            if piece.count(old) != 1:
                raise StaleEdit(f"{self.id}: {old!r} occurs {piece.count(old)} times, wanted once")
            piece = piece.replace(old, new)
        mutated = source[:start] + piece + source[end:]
        if self.append:
            mutated += "\n\n" + self.append.strip("\n") + "\n"
        ast.parse(mutated)
        return mutated


def _lines_of(source: str, function: str) -> tuple[int, int]:
    """Where a function's text begins and ends."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            lines = source.splitlines(keepends=True)
            return sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno]))
    raise StaleEdit(f"no function {function} in the reference")


def of_lab(lab: str) -> list[Mutant]:
    """The planted faults of a lab; none in the student edition, which has no mutants.py."""
    file = _impl.LABS / lab / "mutants.py"
    if not file.is_file() or not (file.parent / "solution.py").is_file():
        return []
    namespace: dict = {"__name__": f"labs_mutants_{lab}"}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    return list(namespace["MUTANTS"])


def write(mutant: Mutant, lab: str, folder: Path) -> Path:
    """Writes a planted fault to a file of its own: kernels need their source on disk."""
    source = (_impl.LABS / lab / "solution.py").read_text()
    file = folder / f"{lab}_{re.sub(r'[^0-9a-z]+', '_', mutant.id.lower())}.py"
    file.write_text(mutant.apply(source))
    return file


# ---------------------------------------------------------------- pytest --mutants


@dataclass(frozen=True)
class Verdict:
    """What became of one planted fault: "caught", or how it got away."""

    mutant: Mutant
    outcome: str
    detail: str
    seconds: float


class KillMatrix:
    """The pytest plugin behind --mutants: runs each fault's test on it instead of the suite."""

    def __init__(self, config: pytest.Config, folder: Path):
        self.config = config
        self.folder = folder
        self.items: dict[tuple[str, str], list[pytest.Item]] = {}
        self.verdicts: list[tuple[str, Verdict]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed:
            return None  # the collection failed: pytest's own loop says so
        for item in session.items:
            lab = steps.lab_of(item.path)
            if lab and item.get_closest_marker("step"):
                self.items.setdefault((lab, item.originalname), []).append(item)
        labs = sorted({lab for lab, _ in self.items})
        work = [(lab, mutant) for lab in labs for mutant in of_lab(lab) if self._wanted(mutant)]
        baseline = sorted({(lab, mutant.caught_by) for lab, mutant in work})
        session.testscollected = len(work)
        with multiprocessing.get_context("fork").Pool(os.cpu_count(), _begin_worker) as pool:
            global _matrix
            for (lab, name), problem in pool.imap(_try_reference, baseline):
                if problem:
                    self._log(f"{lab}::reference[{name}]", problem)
            for lab, verdict in pool.imap(_try_mutant, work):
                self.verdicts.append((lab, verdict))
                problem = "" if verdict.outcome == "caught" else verdict.detail
                self._log(f"labs/{lab}/mutants.py::{verdict.mutant.id}", problem)
        return True

    def _wanted(self, mutant: Mutant) -> bool:
        chosen = self.config.getoption("mutant")
        return not chosen or mutant.id in chosen

    def _log(self, nodeid: str, problem: str) -> None:
        report = pytest.TestReport(
            nodeid=nodeid,
            location=(nodeid.split("::")[0], None, nodeid),
            keywords={},
            outcome="failed" if problem else "passed",
            longrepr=problem or None,
            when="call",
        )
        self.config.hook.pytest_runtest_logreport(report=report)

    def try_reference(self, lab: str, name: str) -> str:
        """Why the reference fails a test that planted faults name; empty when it passes."""
        items = self.items.get((lab, name), [])
        if not items:
            return f"no test {name} in {lab}"
        for item in items:
            for report in isolate.run_in_fork(item, lambda: _impl.set_default("solution")):
                if report.failed:
                    return f"the reference fails {item.name}: {report.longrepr}"
        return ""

    def try_mutant(self, lab: str, mutant: Mutant) -> Verdict:
        start = time.monotonic()
        try:
            file = write(mutant, lab, self.folder)
        except (StaleEdit, SyntaxError) as error:
            return Verdict(mutant, "stale", f"the edit no longer applies: {error}", 0.0)
        outcome, detail = "survived", f"survived {mutant.caught_by}: every case of it passes"
        for item in self.items.get((lab, mutant.caught_by), []):
            reports = isolate.run_in_fork(item, lambda: _impl.set_default(str(file)))
            failed = [r for r in reports if r.failed]
            if not failed:
                continue
            properties = dict(failed[0].user_properties)
            if properties.get("ended") or properties.get("state"):
                how = properties.get("ended") or properties.get("state")
                outcome, detail = how, f"{how} in {item.name}: {failed[0].longrepr}"
                break
            outcome, detail = "caught", item.name
            break
        return Verdict(mutant, outcome, detail, time.monotonic() - start)

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.table():
            terminalreporter.write_line(line)
        if self.config.getoption("write_handout"):
            for lab in sorted({lab for lab, _ in self.verdicts}):
                self.write_handout(lab)

    def write_handout(self, lab: str) -> None:
        """Puts the score, and each fault with its test, between the markers of a lab's handout."""
        rows = [v for name, v in self.verdicts if name == lab]
        lines = [MARKERS[0], f"`pytest --mutants labs/{lab}`: {score(rows)}.", ""]
        lines += [
            "<details><summary>Every planted fault, and the test that catches it</summary>",
            "",
        ]
        lines += ["| step | kind | fault | what is wrong | test |", "|---|---|---|---|---|"]
        for v in rows:
            m = v.mutant
            what = re.sub(r" \(handout .*?\)$", "", m.teaches).replace("|", "\\|")
            result = f"`{m.caught_by}`" if v.outcome == "caught" else f"**{v.outcome}**"
            lines.append(f"| {m.step} | {m.kind} | {m.id} | {what} | {result} |")
        lines += ["", "</details>"]
        file = _impl.LABS / lab / "README.md"
        before, _, rest = file.read_text().partition(MARKERS[0])
        after = rest.partition(MARKERS[1])[2]
        file.write_text(before + "\n".join([*lines, MARKERS[1]]) + after)

    def table(self) -> list[str]:
        """The kill matrix as lines of text, a score for each lab at its end."""
        lines = []
        for lab in sorted({lab for lab, _ in self.verdicts}):
            rows = [v for name, v in self.verdicts if name == lab]
            width = max(len(v.mutant.id) for v in rows)
            lines += ["", f"planted faults of {lab}"]
            for v in rows:
                m = v.mutant
                lines.append(
                    f"  step {m.step}  {m.kind:<5}  {m.id:<{width}}  {v.outcome:<8}  {m.caught_by}"
                )
            lines.append(score(rows))
        return lines


def score(rows: list[Verdict]) -> str:
    """One line: how many were caught, by kind."""
    caught = Counter(v.mutant.kind for v in rows if v.outcome == "caught")
    total = Counter(v.mutant.kind for v in rows)
    kinds = ", ".join(f"{caught[k]} of {total[k]} {_PLURAL[k]}" for k in KINDS if total[k])
    return f"caught {sum(caught.values())} of {sum(total.values())}: {kinds}"


MARKERS = "<!-- generated:kill-matrix -->", "<!-- end generated -->"
_PLURAL = {"bug": "bugs", "waste": "wastes", "cheat": "cheats"}
_matrix: KillMatrix | None = None  # for the pool's workers, which inherit it by fork


def register(config: pytest.Config, folder: Path) -> None:
    """Makes this run plant faults instead of testing. Raises UsageError where it cannot fork."""
    global _matrix
    if not isolate.enabled(config):
        raise pytest.UsageError("--mutants needs Linux and kernels on the CPU (TRITON_INTERPRET=1)")
    chosen = set(config.getoption("mutant") or ())
    unknown = chosen - {mutant.id for lab in _impl.labs() for mutant in of_lab(lab)}
    if unknown:
        raise pytest.UsageError(f"--mutant {min(unknown)}: no such planted fault")
    if chosen and config.getoption("write_handout"):
        raise pytest.UsageError("--write-handout wants all planted faults: leave --mutant out")
    _matrix = KillMatrix(config, folder)
    config.pluginmanager.register(_matrix, "labs-mutants")


def _begin_worker() -> None:
    torch.set_num_threads(1)
    compiler.shared = compiler.Server()


def _try_reference(args):
    return args, _matrix.try_reference(*args)


def _try_mutant(args):
    return args[0], _matrix.try_mutant(*args)


# ---------------------------------------------------------------- diagnosis of a wrong result

DIAGNOSIS_SECONDS = 4.0  # for one failing test; as many are diagnosed as are shown in full


class Diagnosis:
    """The pytest plugin that says of a wrong result which planted bug gives the very same one.

    It is never a guess: the bug's result on the same input matches within the error budget.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.failures: Counter = Counter()

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        report = outcome.get_result()
        error = call.excinfo.value if call.excinfo else None
        if not isinstance(error, oracle.Mismatch) or error.expected is None:
            return
        lab, marker = steps.lab_of(item.path), item.get_closest_marker("step")
        if lab is None or marker is None or not isinstance(report.longrepr, str):
            return
        if self.failures[lab, marker.args[0]] < steps.SHOWN_IN_FULL:
            line = self.diagnose(lab, marker.args[0], item.funcargs["lab"].last_call, error)
            if line:
                report.longrepr += f"\n  {line}"

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if report.failed and "step" in properties:
            self.failures[properties["lab"], properties["step"]] += 1

    def diagnose(self, lab: str, step: int, last_call, mismatch: oracle.Mismatch) -> str | None:
        """Which planted bug of a step gives this very result, in one line; None if none does.

        Args:
            last_call: (name, args, kwargs, result) of the call that gave the result.
            mismatch: what was wrong with it.
        """
        name, args, kwargs, result = last_call or (None, (), {}, None)
        results = result if isinstance(result, tuple) else (result,)
        place = next((i for i, r in enumerate(results) if r is mismatch.got), None)
        if place is None:
            return None
        deadline = time.monotonic() + DIAGNOSIS_SECONDS
        for mutant in of_lab(lab):
            if mutant.kind != "bug" or mutant.step != step or time.monotonic() > deadline:
                continue
            try:
                module = _impl.load(lab, str(write(mutant, lab, self.folder)))
                with _watched(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # NaN is what some planted bugs are about
                    theirs = getattr(module, name)(*args, **kwargs)
            except Exception:  # a bug that crashes gave no result
                continue
            theirs = theirs if isinstance(theirs, tuple) else (theirs,)
            if mismatch.expected.agree(mismatch.got, theirs[place]):
                return f"This is what you get when {mutant.teaches}."
        return None


@contextlib.contextmanager
def _watched():
    """A planted bug gets NaN in fresh memory, as code under test does; stray accesses end it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(guard.poisoned())
        if interpreter.unavailable() is None:
            stack.enter_context(interpreter.observe(memory.AccessCheck()))
        yield
