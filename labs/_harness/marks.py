"""Points and reports of `python -m labs grade`: a row for each submission, as CSV, JSON and table.

Points of a step are its share of tests that pass, among the tests that an untouched stub does not
pass: one missed corner case costs what it weighs, and doing nothing earns nothing.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from labs._harness import results, steps
from labs._impl import LoadError

if TYPE_CHECKING:
    from labs._harness.grade import Job, Options

CHATTY = 100_000  # bytes that one test may print before that is reported

# How a test can end other than by passing or by failing by itself -> how a report says it.
HOW = {
    "time-out": "hung",
    "crash": "ended its process",
    "memory": "killed for memory",
}


def test_name(nodeid: str) -> str:
    """A test as a report shows it: without the path of its file."""
    return nodeid.split("::", 1)[-1]


def gigabytes(size: float) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.3g} GB"


# ---------------------------------------------------------------- scoring
@dataclass
class StepRow:
    """One step of one submission: points, and how its tests ended."""

    points: float
    of: float
    passed: int
    failed: int
    tests: int
    state: str


@dataclass
class Row:
    """One submission's line in the report.

    Attributes:
        points: sum over the steps; None where nothing could be graded.
        steps: step -> StepRow.
        first_failure: name of the first failing test, and `reason` one line why.
        guard: what the guard found, one line each.
        events: what else happened: hung, crashed, killed for memory, printed much, wrote files.
        failures: every failing test with its step, its state on the board (not written, waiting,
            not loaded, None) and one line of reason.
        seconds: wall time; `peak_mb` the most memory; `printed` bytes of output.
        log: file with the output of pytest, or None.
    """

    name: str
    points: float | None = None
    of: float = 0.0
    steps: dict[int, StepRow] = field(default_factory=dict)
    first_failure: str = ""
    reason: str = ""
    guard: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    failures: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    peak_mb: float = 0.0
    printed: int = 0
    log: str | None = None


@dataclass
class Baseline:
    """What an untouched stub gives: all tests, and which of them need no work to pass.

    Attributes:
        tests: node id -> step, in the order in which they run.
        passed: node ids that the stub passes.
        skipped: node ids that are skipped on this machine.
    """

    tests: dict[str, int]
    passed: set[str]
    skipped: set[str]

    def graded(self, step: int) -> bool:
        """Whether the step has tests here that a submission can fail."""
        return any(
            s == step and t not in self.skipped and t not in self.passed
            for t, s in self.tests.items()
        )


def baseline(job: Job) -> Baseline:
    """The baseline from a finished run of the stub. Raises LoadError when it is no good."""
    lines, lab = job.lines, job.options.lab
    if not lines.tests or not lines.finished:
        last = [line for line in job.ends[-1].output.splitlines() if line.strip()][-1:]
        said = results.one_line(last[0]) if last else "it printed nothing"
        raise LoadError(f"pytest does not run here on labs/{lab}/exercise.py: {said}")
    states = {step: Counter() for step in job.options.steps}
    for line in lines.outcome.values():
        states[line["step"]][line["state"] or line["outcome"]] += 1
    for step, counts in states.items():
        if counts["passed"] + counts["failed"] and not counts[steps.NOT_WRITTEN]:
            raise LoadError(
                f"labs/{lab}/exercise.py is no untouched stub (step {step} is written), and points "
                "are counted from the stub; put it back, then try again"
            )
    by = {o: {t for t, line in lines.outcome.items() if line["outcome"] == o} for o in _OUTCOMES}
    return Baseline(lines.tests, by["passed"], by["skipped"])


_OUTCOMES = ("passed", "skipped")


def score(job: Job, base: Baseline) -> Row:
    """A finished submission's row."""
    row = Row(job.submission.name)
    row.seconds = round(job.seconds, 1)
    row.peak_mb = round(max((e.peak for e in job.ends), default=0) / 2**20)
    memory_kills = sum(len(e.memory_kills) for e in job.ends)
    lines = {
        test: _judged(job, test, step, memory_kills)
        for test, step in base.tests.items()
        if test not in base.skipped
    }
    for step in job.options.steps:
        mine = {t: line for t, line in lines.items() if base.tests[t] == step}
        of = job.options.points[step] if base.graded(step) else 0.0
        row.steps[step] = _score_step(mine, base, of)
    row.points = _floor(sum(s.points for s in row.steps.values()))
    row.of = sum(s.of for s in row.steps.values())
    for test, line in lines.items():
        if line["outcome"] == "failed":
            name, reason = test_name(test), line["reason"]
            kind = line["kind"] or "error"
            about = {"test": name, "step": base.tests[test], "state": line["state"]}
            row.failures.append({**about, "kind": kind, "reason": reason})
    if row.failures:
        row.first_failure, row.reason = row.failures[0]["test"], row.failures[0]["reason"]
    row.printed = sum(line["printed"] for line in lines.values()) + sum(e.printed for e in job.ends)
    row.guard = _guard_findings(row, job)
    row.events = _events(row, job, lines)
    return row


def _judged(job: Job, test: str, step: int, memory_kills: int) -> dict:
    """The outcome of one test: also of one that never ran, or that the submission skipped."""
    line = job.lines.outcome.get(test)
    if line is None:
        how = job.died.get(step) or job.died.get(None) or "it gave no result"
        line = {"outcome": "failed", "kind": "not run", "reason": f"not run: {how}", "printed": 0}
        line["state"] = None
    elif line["outcome"] == "skipped":
        line = {**line, "outcome": "failed", "reason": f"skips itself: {line['reason']}"}
    elif line["kind"] == "crash" and "SIGKILL" in line["reason"] and memory_kills:
        used = gigabytes(job.options.memory)
        line = {**line, "kind": "memory", "reason": f"killed: it held more than {used} of memory"}
    reason = line["reason"].replace(f"{job.room}/submission/", "")
    return {**line, "reason": _MISSING.sub(r"submission.py does not define \1", reason)}


# What Python says where a test asks the file for a function that it lacks.
_MISSING = re.compile(
    r"AttributeError: module 'labs_loaded\.submission_\w+' has no attribute '(\w+)'"
)


def _score_step(lines: dict[str, dict], base: Baseline, of: float) -> StepRow:
    passed = {t for t, line in lines.items() if line["outcome"] == "passed"}
    failed = {t for t, line in lines.items() if line["outcome"] == "failed"}
    earned = len(passed - base.passed)
    counted = earned + len(failed)
    points = _floor(of * earned / counted) if counted else 0.0
    if not failed:
        state = "passed" if passed else "skipped"
    else:
        states = {lines[test]["state"] or "failing" for test in failed} - {steps.WAITING}
        state = states.pop() if len(states) == 1 else "failing" if states else steps.WAITING
    return StepRow(points, of, len(passed), len(failed), len(passed) + len(failed), state)


def _floor(points: float) -> float:
    """Two decimals, never rounded up: full points mean that every test passes."""
    return math.floor(points * 100 + 1e-6) / 100


def _guard_findings(row: Row, job: Job) -> list[str]:
    """Each finding once, with the tests that had it."""
    found: dict[str, list[str]] = {}
    for failure in row.failures:
        if failure["kind"] == "guard":
            found.setdefault(failure["reason"], []).append(failure["test"])
    for test, text in job.lines.refused:
        if text.startswith("read of the reference"):
            found.setdefault(text, []).append(test_name(test))
    return [f"{text} ({_tests(tests)})" for text, tests in found.items()]


def _events(row: Row, job: Job, lines: dict[str, dict]) -> list[str]:
    """What a submission did beside passing and failing tests, one line each."""
    events = []
    for failure in row.failures:
        if failure["kind"] in HOW:
            events.append(f"{HOW[failure['kind']]} in {failure['test']}: {failure['reason']}")
    for step, how in job.died.items():
        events.append(f"{'whole run' if step is None else f'step {step}'}: {how}")
    for test, line in lines.items():
        if line["printed"] > CHATTY:
            events.append(f"printed {line['printed'] / 1e6:.1f} MB in {test_name(test)}")
    outside = sum(e.printed for e in job.ends)
    if outside > CHATTY:
        events.append(f"printed {outside / 1e6:.1f} MB past pytest")
    refused: dict[str, list[str]] = {}
    for test, text in job.lines.refused:
        if not text.startswith("read of the reference"):
            refused.setdefault(text, []).append(test_name(test))
    events += [f"refused: {text} ({_tests(tests)})" for text, tests in list(refused.items())[:5]]
    if len(refused) > 5:
        events.append(f"refused: {len(refused) - 5} more")
    changes = list(dict.fromkeys(job.changes))
    events += [f"{change} in its own copy" for change in changes[:5]]
    if len(changes) > 5:
        events.append(f"{len(changes) - 5} more files made, changed or deleted in its own copy")
    left = sum(e.left for e in job.ends)
    if left:
        events.append(f"left {left} processes running; ended")
    return events


def _tests(tests: list[str]) -> str:
    unique = list(dict.fromkeys(tests))
    return unique[0] + (f" and {len(unique) - 1} more" if len(unique) > 1 else "")


# ---------------------------------------------------------------- reports
def _cell(value) -> str:
    """Text of a CSV cell; a spreadsheet must not take it for a formula."""
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def write_csv(rows: list[Row], options: Options, file: Path) -> None:
    """One line a submission."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    numbers = list(options.steps)
    writer.writerow(
        ["submission", "points", "of"]
        + [f"step {n}" for n in numbers]
        + [f"step {n} tests" for n in numbers]
        + ["first failure", "reason", "guard", "events", "seconds", "peak MB", "printed bytes"]
    )
    for row in rows:
        got = [row.steps.get(n) for n in numbers]
        line = [row.name, "" if row.points is None else f"{row.points:g}", f"{row.of:g}"]
        line += ["" if s is None else f"{s.points:g}" for s in got]
        line += ["" if s is None else f"{s.passed} of {s.tests}" for s in got]
        line += [row.first_failure, row.reason, "; ".join(row.guard), "; ".join(row.events)]
        writer.writerow(map(_cell, [*line, row.seconds, f"{row.peak_mb:g}", row.printed]))
    _replace(file, out.getvalue())


def write_json(rows: list[Row], options: Options, file: Path, about: dict) -> None:
    """Everything, with versions, limits and the command."""
    report = {
        **about,
        "lab": options.lab,
        "steps": {str(n): name for n, name in options.steps.items()},
        "points": {str(n): p for n, p in options.points.items()},
        "limits": {"seconds": options.seconds, "memory_gb": options.memory / 2**30},
        "seed": options.seed,
        "submissions": [asdict(row) for row in rows],
    }
    _replace(file, json.dumps(report, indent=1) + "\n")


def _replace(file: Path, text: str) -> None:
    fresh = file.with_suffix(file.suffix + ".part")
    fresh.write_text(text)
    os.replace(fresh, file)


def table(rows: list[Row], options: Options) -> list[str]:
    """One row a submission, then what happened to those that did not pass."""
    width = max([len("submission"), *(len(_clip(row.name, 28)) for row in rows)])
    head = f"{'submission':<{width}}" + "".join(f"{f'step {n}':>9}" for n in options.steps)
    lines = [head + f"{'points':>9}{'of':>5}{'time':>8}  what happened"]
    lines.append("-" * len(lines[0]))
    for row in rows:
        text = f"{_clip(row.name, 28):<{width}}"
        for n in options.steps:
            step = row.steps.get(n)
            text += f"{'-' if step is None or not step.of else f'{step.points:g}':>9}"
        points = "-" if row.points is None else f"{row.points:g}"
        text += f"{points:>9}{row.of:>5g}{row.seconds:>6.0f} s  {summary(row)}"
        lines.append(text.rstrip())
    for row in rows:
        details = _details(row, options)
        if details:
            lines += ["", row.name, *(f"  {_clip(line, 180)}" for line in details)]
    return lines


def summary(row: Row) -> str:
    """A submission in a few words."""
    if row.points is None:
        return f"not graded: {row.reason}"
    kinds = Counter(f["kind"] for f in row.failures)
    also = [text for kind, text in HOW.items() if kinds[kind]]
    if row.guard:
        also.append("guard")
    if any(event.startswith("printed") for event in row.events):
        also.append(f"printed {row.printed / 1e6:.1f} MB")
    for sign, text in (("refused", "refused"), ("left", "left processes")):
        if any(event.startswith(sign) for event in row.events):
            also.append(text)
    if any("in its own copy" in event for event in row.events):
        also.append("wrote files")
    return "; ".join(filter(None, [_verdict(row), ", ".join(also)]))


_UNTOUCHED = (steps.NOT_WRITTEN, steps.WAITING)


def _verdict(row: Row) -> str:
    """How the tests ended; those that fail are counted apart from those that nobody has written."""
    if not row.failures:
        return "all tests pass"
    if any(s.state == steps.NOT_LOADED for s in row.steps.values()):
        return "does not load"
    if all(s.state in _UNTOUCHED for s in row.steps.values() if s.of):
        return "not written"
    states = Counter(f["state"] for f in row.failures)
    failing = len(row.failures) - sum(states[state] for state in _UNTOUCHED)
    words = [f"{steps.count(failing)} {'fails' if failing == 1 else 'fail'}"] if failing else []
    words += [f"{steps.count(states[s])} {s}" for s in _UNTOUCHED if states[s]]
    return ", ".join(words)


def _details(row: Row, options: Options) -> list[str]:
    """What there is to say about a submission: a line for each step below its full points."""
    if row.points is None:  # its row in the table has said why
        return []
    lines, verdict = [], _verdict(row)
    if verdict == "does not load":
        lines.append(f"does not load: {row.reason}")
    elif verdict != "not written":
        lines += _step_lines(row, options)
    lines += [f"guard: {text}" for text in row.guard[:3]]
    if len(row.guard) > 3:
        lines.append(f"guard: {len(row.guard) - 3} more findings")
    news = [event for event in row.events if not any(_said(event, line) for line in lines)]
    lines += news[:8]
    if len(news) > 8:
        lines.append(f"{len(news) - 8} more events, in results.json")
    return lines


def _step_lines(row: Row, options: Options) -> list[str]:
    """Name, points and first failing test of each step below its full points."""
    lines = []
    for number, step in row.steps.items():
        if step.points < step.of:
            mine = [f for f in row.failures if f["step"] == number]
            first = next((f for f in mine if f["state"] not in _UNTOUCHED), mine[0])
            head = f"step {number} {options.steps[number]}, {step.points:g} of {step.of:g}"
            lines.append(f"{head}: {first['test']}: {first['reason']}")
    return lines


def _said(event: str, line: str) -> bool:
    """Whether a step's line has named the test and the reason of an event like "hung in TEST"."""
    how, _, rest = event.partition(" in ")
    return how in HOW.values() and line.endswith(rest)


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
