"""Steps of a lab: what each test belongs to, the board after a run, and short failures.

A lab declares STEPS = {1: "function", ...} once, in its test module, and marks its tests with
@pytest.mark.step(n). An unwritten step reports itself with the text of `UNWRITTEN`, wherever it is
raised: in Python, inside a kernel in the interpreter, or by the GPU compiler.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import linecache
import os
import re
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from labs._impl import LABS, ROOT, LoadError, default_impl, find_lab, labs, source_file

UNWRITTEN = re.compile(r"lab (\d+) step (\d+): write (\w+)")
CACHE_KEY = "labs/board"
SHOWN_IN_FULL = 3  # failures of one step; the rest are counted
MESSAGE_LINES = 6  # of an exception that is not ours

# What a test of a step can end as, beside pytest's own passed, failed and skipped.
NOT_WRITTEN, NOT_LOADED, WAITING = "not written", "not loaded", "waiting"
PARTLY = "partly run"  # state of a step: nothing is wrong in what ran, but not all of it ran


def declared(lab: str) -> dict[int, str]:
    """The STEPS of a lab, read from its test module without importing it."""
    for file in sorted((LABS / lab).glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "STEPS":
                return ast.literal_eval(node.value)
    return {}


def todo_line(file: Path, step: int) -> int | None:
    """Line number of `TODO step n` in a file, or None."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if re.search(rf"TODO step {step}\b", line):
            return number
    return None


def first_unwritten(file: Path, step: int) -> tuple[str, int] | None:
    """Name of the first function of a step that is still to write, and the line to begin at.

    A step may have several; the reminders that are left in the file say which are not written.
    """
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        match = UNWRITTEN.search(line)
        if match and int(match.group(2)) == step:
            for above in range(number, 0, -1):
                if re.search(rf"TODO step {step}\b", lines[above - 1]):
                    return match.group(3), above
                if lines[above - 1].lstrip().startswith("def "):
                    break
            return match.group(3), number
    return None


def lab_of(path: Path) -> str | None:
    """Name of the lab folder that a test file lies in."""
    for folder in path.parents:
        if re.match(r"\d\d_", folder.name):
            return folder.name
    return None


def step_of(item: pytest.Item) -> tuple[str, int] | None:
    """(lab, step) that a test belongs to, or None."""
    marker, lab = item.get_closest_marker("step"), lab_of(item.path)
    return (lab, marker.args[0]) if marker and lab else None


def check_folders(args: list[str]) -> None:
    """Raises pytest.UsageError for `pytest labs/06`: names the folder of the lab that is meant."""
    for arg in args:
        number = re.match(r"\d{1,2}(?=_|$)", Path(arg).name)
        if number and not Path(arg).exists():
            try:
                meant = os.path.relpath(find_lab(number.group()))
            except LoadError as error:
                raise pytest.UsageError(str(error)) from None
            raise pytest.UsageError(f"no folder {arg}; did you mean {meant}?")


def unwritten(error: BaseException) -> str | None:
    """The reminder that an unwritten step raised, also from under Triton's own exceptions."""
    seen = set()
    while error is not None and id(error) not in seen:
        match = UNWRITTEN.search(str(error))
        if match:
            return match.group(0)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def causes(error: BaseException) -> list[BaseException]:
    """An exception and what the interpreter or compiler wrapped in it; the last is to be read."""
    chain = [error]
    while type(error).__name__ in ("InterpreterError", "CompilationError") and error.__cause__:
        error = error.__cause__
        chain.append(error)
    return chain


def short_failure(error: BaseException, files: list[Path]) -> str | None:
    """A failure as the lines of the test and of the student's file that led to it, and the error.

    Args:
        error: what the test raised.
        files: the files whose lines are worth showing.

    Returns:
        A few lines of text, or None where no frame lies in `files`.
    """
    chain = causes(error)
    lines = []
    for cause in chain:
        for frame, number in traceback.walk_tb(cause.__traceback__):
            path = Path(frame.f_code.co_filename)
            if path in files:
                shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
                entry = f"{shown}:{number}: in {frame.f_code.co_name}"
                if entry not in lines:
                    lines += [entry, "    " + linecache.getline(str(path), number).strip()]
    if not lines:
        return None
    return "\n".join([*lines, _message(chain[-1])])


def _message(error: BaseException) -> str:
    """What an exception says, without what pytest adds to an assertion that says enough."""
    text = str(error).strip() or "(no message)"
    if text.startswith("Timeout (>"):
        return f"still running after {text[10:].split('s)')[0]} s: a loop that does not end?"
    if isinstance(error, AssertionError):
        said = text.split("\nassert ")[0]
        return said.removeprefix("AssertionError: ")
    lines = f"{type(error).__name__}: {text}".splitlines()
    if len(lines) > MESSAGE_LINES:  # a compiler says what is wrong at the end
        lines[3:-2] = [f"... ({len(lines) - 5} lines more)"]
    return "\n".join(lines)


@dataclass
class StepResult:
    """Counts of one step's tests by outcome, and its first failing test."""

    outcomes: Counter = field(default_factory=Counter)
    first_failure: str | None = None
    reason: str | None = None  # why the file does not load
    skips: Counter = field(default_factory=Counter)  # reasons of the tests that were skipped
    waits_for: int | None = None  # another step that some of its tests need first
    of: int = 0  # tests that the step has, those that were not asked for included
    file: str | None = None  # digest of the file that was tested

    @property
    def state(self) -> str:
        if self.outcomes[NOT_LOADED]:
            return NOT_LOADED
        if self.outcomes["failed"]:
            return "failing"
        if self.outcomes[NOT_WRITTEN]:
            return NOT_WRITTEN
        if self.outcomes[WAITING]:
            return WAITING
        if 0 < sum(self.outcomes.values()) < self.of:
            return PARTLY
        if self.outcomes["passed"]:
            return "passed"
        return "skipped" if self.outcomes["skipped"] else "not run"


class Steps:
    """The pytest plugin: the board, and one line instead of a traceback for an unwritten step."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.results: dict[tuple[str, int], StepResult] = defaultdict(StepResult)
        self.known: dict[tuple[str, int], set[str]] = defaultdict(set)  # tests of each step
        self.solved: list[str] = []  # what --expect-unsolved found wrong

    # -- while tests run (in the process that runs them)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_make_collect_report(self):
        """Notes every test of a module: a node id, -k or --lf drops tests only after this."""
        outcome = yield
        for item in outcome.get_result().result or ():
            if isinstance(item, pytest.Item) and step_of(item):
                self.known[step_of(item)].add(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        wanted = config.getoption("step")
        kept, dropped = [], []
        for item in items:
            key = step_of(item)
            if key:
                properties = {"lab": key[0], "step": key[1], "of": len(self.known[key])}
                item.user_properties += properties.items()
                item.repr_failure = functools.partial(self._repr_failure, item, item.repr_failure)
            (kept if wanted is None or (key and key[1] in wanted) else dropped).append(item)
        if wanted and not kept and items:
            lines = [f"--step {wanted[0]}: no such step in what was collected; the steps are:"]
            for lab in sorted({lab_of(item.path) for item in items} - {None}):
                names = ", ".join(f"{number} {name}" for number, name in declared(lab).items())
                lines.append(f"  {lab}: {names}")
            raise pytest.UsageError("\n".join(lines))
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    def _repr_failure(self, item, default, excinfo, style=None):
        """A failure in short, unless --tb asks for another form."""
        if self.config.getoption("tbstyle") == "short":
            files = [item.path, source_file(item.path, default_impl())]
            text = short_failure(excinfo.value, files)
            if text:
                return text
        return default(excinfo, style) if style else default(excinfo)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        report = outcome.get_result()
        marker = item.get_closest_marker("step")
        if not report.failed or call.excinfo is None or not marker:
            return
        error = call.excinfo.value
        reminder = unwritten(error)
        if isinstance(error, LoadError):
            report.longrepr = str(error)
            report.user_properties.append(("state", NOT_LOADED))
        elif reminder:
            step = int(UNWRITTEN.search(reminder).group(2))
            report.longrepr = reminder
            if step == marker.args[0]:
                report.user_properties.append(("state", NOT_WRITTEN))
            else:
                report.user_properties += [("state", WAITING), ("waits_for", step)]

    # -- as reports arrive (in the process that prints)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        state = dict(report.user_properties).get("state")
        if state == NOT_WRITTEN:
            return NOT_WRITTEN, "n", "NOT WRITTEN"
        if state == NOT_LOADED:
            return NOT_LOADED, "L", "NOT LOADED"
        if state == WAITING:
            return WAITING, "w", "WAITING"
        return None

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if "step" not in properties or (report.when != "call" and report.passed):
            return
        key = properties["lab"], properties["step"]
        result = self.results[key]
        result.of = properties["of"]
        result.file = result.file or _digest(properties["lab"], default_impl())
        result.outcomes[properties.get("state", report.outcome)] += 1
        if report.skipped and report.longrepr:
            result.skips[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
        if report.failed:
            result.waits_for = properties.get("waits_for", result.waits_for)
            if properties.get("state") == NOT_LOADED:
                result.reason = str(report.longrepr)
            if properties.get("state") is None:
                result.first_failure = result.first_failure or report.nodeid.split("::", 1)[-1]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.config.getoption("expect_unsolved") and self.results:
            self.solved = self._not_as_unwritten()
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if self.solved else pytest.ExitCode.OK
        self._keep_first_failures()

    def _not_as_unwritten(self) -> list[str]:
        """What --expect-unsolved finds wrong: steps that do not fail as unwritten, and only so."""
        wrong = []
        for lab, rows in self.board().items():
            for number, row in rows.items():
                allowed = (NOT_WRITTEN, WAITING, "skipped")
                others = {k: n for k, n in row["tests"].items() if k not in allowed}
                if others or not row["tests"].get(NOT_WRITTEN):
                    counts = ", ".join(f"{n} {k}" for k, n in others.items()) or "no test ran"
                    wrong.append(f"{lab} step {number}: want every test not written, got {counts}")
        return wrong

    def _keep_first_failures(self) -> None:
        """Keeps the first failures of each step for the report, and counts the rest."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or self.config.get_verbosity() > 0:
            return
        shown, more, seen = [], [], defaultdict(set)
        for report in terminal.stats.get("failed", []):
            properties = dict(report.user_properties)
            key, test = (properties.get("lab"), properties.get("step")), report.nodeid.split("[")[0]
            if None in key:
                shown.append(report)
            elif test not in seen[key] and len(seen[key]) < SHOWN_IN_FULL:
                seen[key].add(test)  # one case of each test says more than many of one
                shown.append(report)
            else:
                more.append(report)
        if more:
            terminal.stats["failed"] = shown
            terminal.stats["more failed (-v shows them)"] = more

    def pytest_terminal_summary(self, terminalreporter):
        board = self.board()
        if self.config.getoption("expect_unsolved"):
            for line in self.solved or ["every step of every stub fails as not written"]:
                terminalreporter.write_line(line)
        elif board:
            cache = getattr(self.config, "cache", None)
            stored = cache.get(CACHE_KEY, {}) if cache is not None else {}
            for lab, rows in board.items():
                old = stored.get(lab, {})
                kept = old.get("rows", {}) if old.get("impl") == default_impl() else {}
                ran = {n: row for n, row in rows.items() if row["state"] != "not run"}
                for row in kept.values():
                    row["earlier"] = True
                merged = {**rows, **kept, **ran}
                for line in render(lab, merged, default_impl(), terminalreporter.write_sep):
                    terminalreporter.write_line(line)
                new = worth_keeping(ran, old.get("rows", {}))
                if new:
                    stored[lab] = {"impl": default_impl(), "rows": {**kept, **new}}
            if cache is not None:
                cache.set(CACHE_KEY, stored)

    def board(self) -> dict[str, dict[str, dict]]:
        """lab -> step number -> row, for the labs that ran."""
        board = {}
        for lab in sorted({lab for lab, _ in self.results}):
            board[lab] = {}
            for number in declared(lab):
                result = self.results.get((lab, number), StepResult())
                board[lab][str(number)] = {
                    "state": result.state,
                    "tests": dict(result.outcomes),
                    "first_failure": result.first_failure,
                    "reason": result.reason or _why(result.skips),
                    "waits_for": result.waits_for,
                    "of": result.of,
                    "file": result.file,
                }
        return board


def worth_keeping(ran: dict[str, dict], stored: dict[str, dict]) -> dict[str, dict]:
    """The rows of this run that replace what is stored.

    Some tests that pass say nothing about the others, so they replace no result of a whole step.
    One that fails is the truth about the step, whatever the rest would do.
    """
    return {
        number: row
        for number, row in ran.items()
        if row["state"] != PARTLY or stored.get(number, row)["state"] == PARTLY
    }


def _digest(lab: str, impl: str) -> str | None:
    """Digest of the file under test, or None where there is no such file."""
    try:
        return hashlib.sha256(source_file(lab, impl).read_bytes()).hexdigest()
    except LoadError:
        return None


def _why(skips: Counter) -> str | None:
    """The reason of skipped tests; of several the rarest first, with their counts."""
    if len(skips) < 2:
        return next(iter(skips), None)
    return "; ".join(f"{n} {reason}" for reason, n in reversed(skips.most_common()))


def render(lab: str, rows: dict[str, dict], impl: str, section=None) -> list[str]:
    """The board of one lab as lines of text, ending with the next thing to do."""
    title = f"{lab}, {impl}"
    lines = []
    if section:
        section("=", title)
    else:
        lines.append(title)
    names = declared(lab)
    width = max(map(len, names.values()), default=0)
    shown = {n: rows.get(str(n), {"state": "not run", "tests": {}}) for n in names}
    now = _digest(lab, impl)
    todo, changed = [], []
    for number, row in shown.items():
        name, state, remarks = names[number], row["state"], []
        if row.get("earlier"):
            remarks.append("an earlier run")
        if now and row.get("file") not in (None, now):  # boards of old had no digest
            remarks.append(f"before {source_file(lab, impl).name} changed")
            changed.append(number)
        remark = f"({', '.join(remarks)})" if remarks else ""
        note = f"{_note(row)} {remark}".strip()
        lines.append(f"  step {number}  {name:<{width}}  {state:<12} {note}".rstrip())
        if state not in ("passed", "skipped", WAITING):
            stale = number in changed  # then what is to be done is in the file, not in the row
            todo.append((number, name, {**row, "state": "not run"} if stale else row))
    return lines + _advice(lab, impl, shown, todo, changed)


def _note(row: dict) -> str:
    """What is beside a step's state on the board: how many tests, the first that failed, why."""
    state, tests = row["state"], row["tests"]
    ran, passed, skipped = sum(tests.values()), tests.get("passed", 0), tests.get("skipped", 0)
    of = row.get("of") or ran
    if state == "failing":
        total = count(ran) if ran >= of else f"{count(ran)} run, {of} in all"
        return f"{tests['failed']} of {total}; first: {row['first_failure']}"
    if state == "passed":
        more = f", {skipped} skipped: {_clip(row.get('reason'))}" if skipped else ""
        return count(passed) + more
    if state == PARTLY:
        more = f", {skipped} skipped" if skipped else ""
        return f"{passed} of {count(of)} passed{more}, the rest not run"
    if state == WAITING:
        need = f"{tests[WAITING]} {'needs' if tests[WAITING] == 1 else 'need'}"
        return f"{count(passed)} passed, {need} step {row['waits_for']} first"
    return _clip(row.get("reason")) if state == "skipped" else ""


def count(number: int, thing: str = "test") -> str:
    """Text such as "1 test" and "3 tests"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _advice(lab: str, impl: str, shown: dict, todo: list[tuple], changed: list[int]) -> list[str]:
    """The lines that end a board: what to do next.

    Args:
        shown: step number -> row, of all steps.
        todo: (number, name, row) of the steps that are not done.
        changed: numbers of the steps that ran before the file was changed.
    """
    try:
        file = source_file(lab, impl)
    except LoadError as error:
        return ["", f"next: {error}"]
    ran = [number for number, row in shown.items() if row["state"] != "not run"]
    since = f"{file.name} has changed since"
    command = f"pytest labs/{lab}{_option(impl)}"
    if changed and len(changed) == len(ran):
        return ["", f"{since} this run: {command}"]
    if todo:  # what is known of this file comes before what did not run
        found = [entry for entry in todo if entry[2]["state"] != "not run"]
        return ["", *_next(lab, impl, file, *(found or todo)[0])]
    if changed:
        steps = f"step{'s' * (len(changed) > 1)} {', '.join(map(str, changed))}"
        return ["", f"{since} {steps} ran: {command}"]
    if all(row["state"] == "passed" for row in shown.values()):
        return ["", f"all steps pass{_after(lab)}"]
    return []


def _after(lab: str) -> str:
    """What to do when a lab is done: its benchmark, or the handout of the next lab."""
    if (LABS / lab / "bench.py").is_file():
        return f"; next: python -m labs bench {lab[:2]}"
    later = [name for name in labs() if name > lab]
    return f"; next: labs/{later[0]}/README.md" if later else ""


def _next(lab: str, impl: str, file: Path, number: int, name: str, row: dict) -> list[str]:
    shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    if row["state"] == NOT_LOADED:
        return [f"next: mend {row['reason']}"]
    command = f"pytest labs/{lab}{_option(impl)} --step {number}"
    left = first_unwritten(file, number)
    if row["state"] == NOT_WRITTEN or (row["state"] == "not run" and left):
        at = f"{left[0]} in {shown}, line {left[1]}" if left else f"{name} in {shown}"
        return [f"next: step {number}, write {at}; then run", f"      {command}"]
    if row["state"] in ("not run", PARTLY):
        all_of = "all " if row["state"] == PARTLY else ""
        return [f"next: step {number}, {name}: run {all_of}its tests", f"      {command}"]
    return [f"next: step {number}, {name} fails {row['first_failure']}", f"      {command}"]


def _option(impl: str) -> str:
    return "" if impl == "exercise" else f" --impl={impl}"


def _clip(text: str | None, width: int = 70) -> str:
    text = text or ""
    return text if len(text) <= width else text[: width - 3] + "..."


# -- python -m labs: the boards of labs, from pytest's own cache


def add_arguments(parser) -> None:
    parser.epilog = "example: python -m labs board 06"
    text = "numbers or folders of labs, such as 06 (default: all)"
    parser.add_argument("labs", nargs="*", metavar="LAB", help=text)


def run(args) -> int:
    file = ROOT / ".pytest_cache" / "v" / CACHE_KEY
    stored = json.loads(file.read_text()) if file.is_file() else {}
    chosen = sorted({find_lab(lab).name for lab in args.labs} or labs())
    for lab in chosen:
        if lab not in stored:
            print(f"{lab}: not run yet; next: pytest labs/{lab}")
    for lab in chosen:
        if lab in stored:
            print("\n" + "\n".join(render(lab, stored[lab]["rows"], stored[lab]["impl"])))
    return 0
