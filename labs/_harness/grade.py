"""`python -m labs grade DIR`: a folder of submissions, each tested alone, with limits.

Every submission gets a folder of its own with a copy of the repository without the references, and
a process of its own with limits on time, memory and output. All submissions are copied before the
first one runs. How points are counted is in `marks`.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from labs._harness import bench, handout, marks, results, sandbox, steps
from labs._impl import ROOT, LoadError, find_lab

POINTS = 20.0  # of a step, unless --points says otherwise
LARGEST_FILE = 1 << 20  # bytes of a submission
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")
TURN = 0.15  # seconds between two looks at the running processes


# ---------------------------------------------------------------- submissions
@dataclass
class Submission:
    """One file to grade, or why there is none.

    Attributes:
        name: of the file or folder that was handed in.
        file: what is tested.
        problem: why it cannot be graded, or None.
    """

    name: str
    file: Path | None = None
    problem: str | None = None


def find_submissions(folder: Path, lab: str) -> tuple[list[Submission], list[str]]:
    """(submissions in a folder by name, names of what else lies there).

    A submission is `name.py`, `name/exercise.py`, or a student's whole repository `name/`. An
    archive is one that cannot be graded, unless what was in it lies beside it.
    """
    found, ignored = {}, []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name.lower()):
        if entry.name.startswith((".", "__")):
            continue
        if entry.is_dir():
            places = [entry / "exercise.py", entry / "labs" / lab / "exercise.py"]
            file = next((p for p in places if p.is_file()), None)
            name = entry.name
        elif entry.suffix == ".py":
            file, name = entry, entry.stem
        elif entry.suffix.lower() in ARCHIVES and entry.name.split(".")[0] not in found:
            problem = f"a {entry.suffix[1:].lower()}; unpack it first"
            found[entry.name] = Submission(entry.name, problem=problem)
            continue
        else:
            ignored.append(entry.name)
            continue
        if name in found:
            raise LoadError(f"two submissions in {folder} are called {name!r}; rename one")
        found[name] = Submission(name, file, _problem(folder, file, lab))
    return list(found.values()), ignored


def _problem(folder: Path, file: Path | None, lab: str) -> str | None:
    if file is None:
        return f"no exercise.py in it (nor labs/{lab}/exercise.py)"
    for path in (file, *file.parents):
        if path == folder:
            break
        if path.is_symlink():
            return f"{path.relative_to(folder)} is a link; links are not followed"
    size = file.stat().st_size
    if size > LARGEST_FILE:
        return f"{file.name} has {size} bytes; the most is {LARGEST_FILE}"
    return None


def why_not_loaded(file: Path) -> str | None:
    """What the loader will say of a file that is empty or no Python; nothing of it is run."""
    if not file.read_bytes().strip():
        return "submission.py is empty"
    command = [sys.executable, "-I", "-W", "ignore", "-c", _COMPILE, str(file)]
    with suppress(subprocess.TimeoutExpired):  # that, and a crash of the compiler: the run will say
        child = subprocess.run(command, capture_output=True, timeout=10, check=False)
        return results.one_line(child.stdout.decode(errors="replace")) or None
    return None


# In a process of its own: there are texts that crash Python's compiler. In labs._impl.load's words.
_COMPILE = """
import sys
try:
    compile(open(sys.argv[1], "rb").read(), sys.argv[1], "exec")
except SyntaxError as error:
    at = f"line {error.lineno}" if error.lineno else "unknown line"
    text = f": {error.text.strip()}" if error.text else ""
    said = f"submission.py, {at}: {type(error).__name__}: {error.msg}{text}"
    sys.stdout.buffer.write(said.encode(errors="replace"))
except Exception:
    pass
"""


# ---------------------------------------------------------------- what changed on the disk
def snapshot(folder: Path, files: list[Path] | None = None, content: bool = True) -> dict[str, str]:
    """Path -> a text that changes with the file, for all files below `folder` or for `files`."""
    found = {}
    if files is None:
        files = [
            Path(at, name).relative_to(folder) for at, _, names in os.walk(folder) for name in names
        ]
    for path in files:
        full = folder / path
        with suppress(OSError):
            about = os.lstat(full)
            if content and stat.S_ISREG(about.st_mode) and about.st_size <= 4 * LARGEST_FILE:
                found[str(path)] = hashlib.sha256(full.read_bytes()).hexdigest()
            else:
                found[str(path)] = f"{about.st_mode} {about.st_size} {about.st_mtime_ns}"
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One phrase a file: made, changed or deleted."""
    found = [f"made {path}" for path in sorted(after.keys() - before.keys())]
    for path in sorted(before):
        if path not in after:
            found.append(f"deleted {path}")
        elif before[path] != after[path]:
            found.append(f"changed {path}")
    return found


# ---------------------------------------------------------------- one run of pytest
@dataclass
class Lines:
    """What the plugin `results` wrote in one or more runs of pytest.

    Attributes:
        tests: node id -> step, of all tests collected.
        outcome: node id -> the line of the test's outcome.
        refused: (node id, what was refused) in order.
        running: the test that had begun and not ended, or None.
        finished: whether pytest came to its end.
    """

    tests: dict[str, int] = field(default_factory=dict)
    outcome: dict[str, dict] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    running: str | None = None
    finished: bool = False

    def read(self, file: io.TextIOBase) -> None:
        file.seek(0)
        self.running, self.finished = None, False
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:  # cut short
                continue
            if "tests" in line:
                self.tests.update({nodeid: step for nodeid, step in line["tests"]})
            elif "start" in line:
                self.running = line["start"]
            elif "refused" in line:
                self.refused += [(line["test"], text) for text in line["refused"]]
            elif "test" in line:
                old = self.outcome.get(line["test"])
                if old is None or old["outcome"] != "failed":
                    self.outcome[line["test"]] = line
                self.running = None
            elif "end" in line:
                self.finished = line["end"] in (0, 1)  # all passed, some failed


@dataclass
class Options:
    """What the whole grading has in common."""

    lab: str
    steps: dict[int, str]
    points: dict[int, float]
    seconds: float
    memory: int
    seed: int
    root: Path = ROOT


class Job:
    """One submission on its way through pytest: usually one run, more after an early end."""

    def __init__(self, submission: Submission, file: Path, room: Path, options: Options, template):
        self.submission, self.file, self.room, self.options = submission, file, room, options
        self.template = template  # the repository as it was when grading began
        self.lines, self.ends, self.changes = Lines(), [], []
        self.died: dict[int | None, str] = {}  # step run (None: all of them) -> how pytest ended
        self.todo: list[int | None] = [None]
        self.step: int | None = None
        self.box: sandbox.Sandbox | None = None
        self.start = 0.0
        self.seconds = 0.0

    def fail_all(self, tests: dict[str, int], reason: str) -> None:
        """Instead of a run: every test ends as not loaded."""
        common = {"outcome": "failed", "state": steps.NOT_LOADED, "kind": None, "reason": reason}
        for test, step in tests.items():
            self.lines.outcome[test] = {"test": test, "step": step, **common, "printed": 0}

    def begin(self) -> None:
        """Starts the next run, in a fresh copy of the repository."""
        self.start = self.start or time.monotonic()
        self.step = self.todo.pop(0)
        shutil.rmtree(self.room, ignore_errors=True)
        for name in ("home", "tmp", "submission"):
            (self.room / name).mkdir(parents=True)
        shutil.copytree(self.template, self.room / "repository")
        under_test = self.room / "submission" / "submission.py"
        shutil.copyfile(self.file, under_test)
        self.before = self._snapshot()
        self.report = tempfile.TemporaryFile("w+", encoding="utf-8")
        wanted = list(self.options.steps) if self.step is None else [self.step]
        command = [sys.executable, "-m", "pytest", f"labs/{self.options.lab}", "-q"]
        command += [f"--impl={under_test}", f"--seed={self.options.seed}", "--show-capture=no"]
        command += ["-p", "no:cacheprovider", "-p", "labs._harness.results"]
        command += ["--forks=1"]  # the limits on memory and processes are for one test at a time
        command += [f"--step={number}" for number in wanted]
        env = sandbox.environment(self.room / "home", self.room / "tmp")
        env["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", "1")
        env[results.FD] = str(self.report.fileno())
        env[results.ROOM] = str(self.room)
        env[results.REPOSITORY] = str(self.options.root)
        self.box = sandbox.Sandbox(
            command,
            self.room / "repository",
            env,
            max(1.0, self.start + self.options.seconds - time.monotonic()),
            self.options.memory,
            pass_fds=(self.report.fileno(),),
        )

    def _snapshot(self) -> dict[str, str]:
        found = {}
        for name in ("repository", "submission", "home"):
            for path, text in snapshot(self.room / name).items():
                if "__pycache__" not in path:
                    found[f"{name}/{path}" if name != "repository" else path] = text
        return found

    def poll(self, table: sandbox.Table) -> bool:
        """Whether the submission is through."""
        ended = self.box.poll(table)
        if ended is None:
            return False
        self.seconds = time.monotonic() - self.start
        self.ends.append(ended)
        self.lines.read(self.report)
        self.report.close()
        self.changes += [c for c in differences(self.before, self._snapshot())]
        if not self.lines.finished:
            self._after_early_end(ended)
        if ended.killed in ("time", "stopped"):
            self.todo.clear()
        if self.todo:
            self.begin()
            return False
        shutil.rmtree(self.room, ignore_errors=True)
        return True

    def _after_early_end(self, ended: sandbox.Ended) -> None:
        """pytest itself is gone: each step that it did not finish gets a run of its own."""
        memory = marks.gigabytes(self.options.memory)
        how = {
            "time": f"the run was ended after {self.options.seconds:g} s",
            "memory": f"the run was ended: it held more than {memory}",
            "processes": f"the run was ended: more than {sandbox.MOST_PROCESSES} processes",
            "stopped": "grading was stopped",
        }.get(ended.killed) or f"pytest {_code_text(ended.code)}"
        running, self.lines.running = self.lines.running, None
        self.died[self.step] = how + (f", in {marks.test_name(running)}" if running else "")
        if running:
            kind = {"time": "time-out", "memory": "memory"}.get(ended.killed, "crash")
            self.lines.outcome[running] = {
                "test": running,
                "step": self.lines.tests.get(running),
                "outcome": "failed",
                "state": None,
                "kind": kind,
                "reason": how,
                "seconds": 0.0,
                "printed": 0,
            }
        if self.step is None:
            missing = {s for t, s in self.lines.tests.items() if t not in self.lines.outcome}
            self.todo = sorted(missing) if self.lines.tests else list(self.options.steps)


def _code_text(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended early with exit code {code}"


# ---------------------------------------------------------------- the command
def add_arguments(parser) -> None:
    """Options of `python -m labs grade`."""
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="submissions: name.py or name/exercise.py")
    add("--lab", default="06", help="the lab's number or folder (default 06)")
    add("-j", dest="jobs", type=_count, metavar="N", help="run N at a time (default: all cores)")
    add("--time-limit", type=_size, default=120.0, metavar="S", help="seconds each (default 120)")
    add("--memory-limit", type=_size, default=4.0, metavar="GB", help="memory each (default 4)")
    add("--points", default="", metavar="1=10,2=25", help=f"points of steps (default {POINTS:g})")
    add("--seed", type=int, default=0, help="seed of the tests' random inputs (default 0)")
    add("--out", type=Path, help="folder for results (default runs/grade-NN-TIME)")
    parser.epilog = (
        "example: python -m labs grade submissions --lab 06 -j 2 --points 1=10,5=30\n"
        "exit code: 0 when every submission was graded, whatever its points\n"
        "labs/GRADING.md says how points are counted and what is watched"
    )


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _size(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


_count.__name__, _size.__name__ = "positive whole number", "positive number"


def points_of(text: str, numbers: list[int]) -> dict[int, float]:
    """Points of each step from "1=10,2=25"; the others keep the default."""
    points = dict.fromkeys(numbers, POINTS)
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(\d+)\s*=\s*(\d+(?:\.\d+)?)\s*", part)
        if not match or int(match[1]) not in points:
            known = ", ".join(map(str, numbers))
            raise LoadError(f"--points: {part!r} is not STEP=POINTS with a step of {known}")
        points[int(match[1])] = float(match[2])
    return points


def run(args) -> int:
    """The command."""
    problem = sandbox.unavailable()
    if problem:
        raise LoadError(f"grade {problem}")
    lab = find_lab(args.lab).name
    declared = steps.declared(lab)
    if not declared:
        raise LoadError(f"labs/{lab} declares no STEPS")
    if not args.folder.is_dir():
        raise LoadError(f"no folder {str(args.folder)!r}")
    folder = args.folder.resolve()
    submissions, ignored = find_submissions(folder, lab)
    if not submissions:
        raise LoadError(f"no submissions in {args.folder}: wanted name.py or name/exercise.py")
    if all(submission.problem for submission in submissions):
        first = f"{submissions[0].name}: {submissions[0].problem}"
        more = f" (and {len(submissions) - 1} more)" if len(submissions) > 1 else ""
        raise LoadError(f"nothing in {args.folder} can be graded: {first}{more}")
    options = Options(
        lab,
        declared,
        points_of(args.points, list(declared)),
        args.time_limit,
        int(args.memory_limit * 2**30),
        args.seed,
    )
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    out = (args.out or ROOT / "runs" / f"grade-{lab[:2]}-{stamp}").resolve()
    if out.is_dir() and any(out.iterdir()):
        raise LoadError(f"--out: {args.out} is not empty; results go to a new or empty folder")
    grading = Grading(folder, submissions, options, out, args.jobs or _cores())
    if ignored:
        grading.warnings.append(f"not submissions: {', '.join(ignored[:5])}")
    return grading.run()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Grading:
    """All submissions of a folder, some at a time; reports are written after each."""

    def __init__(self, folder, submissions, options: Options, out: Path, jobs: int):
        self.folder, self.submissions, self.options = folder, submissions, options
        self.out, self.jobs = out, jobs
        self.rows: dict[str, marks.Row] = {}
        self.warnings: list[str] = []
        self.asked_to_stop = False
        self.about = {
            "command": shlex.join(["python", "-m", "labs", *sys.argv[1:]]),
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "versions": bench.versions(),
        }

    def run(self) -> int:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "logs").mkdir(exist_ok=True)
        root = self.options.root
        files = [
            path
            for path in handout.walk(root)
            if handout.why_left_out(path) is None
            and (path.parts[0] == "labs" or path.name in ("conftest.py", "pyproject.toml"))
        ]
        self.watched = {root: handout.walk(root), self.folder: None}
        self.seen = {place: self._look(place) for place in self.watched}
        work = Path(tempfile.mkdtemp(prefix="labs-grade-"))
        interrupted = False
        try:
            old = [(s, signal.signal(s, self.stop)) for s in (signal.SIGINT, signal.SIGTERM)]
        except ValueError:  # not in the main thread
            old = []
        try:
            handout.copy(root, files, work / "template")
            queue = self._prepare(work)
            self.base = self._baseline(work)
            self._run_all(queue)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            for number, handler in old:
                signal.signal(number, handler)
            shutil.rmtree(work, ignore_errors=True)
        if interrupted and not self.rows:
            raise KeyboardInterrupt
        return self._report(interrupted)

    def stop(self, *_) -> None:
        """Ctrl-C: what runs is ended at the next turn, and what is done is reported."""
        self.asked_to_stop = True

    def _prepare(self, work: Path) -> list[Job]:
        """Copies all submissions, before any of them runs."""
        queue = []
        (work / "handed-in").mkdir()
        for number, submission in enumerate(self.submissions, 1):
            if submission.problem:
                row = marks.Row(submission.name, None, reason=submission.problem)
                row.events.append(submission.problem)
                self.rows[submission.name] = row
                continue
            kept = work / "handed-in" / f"{number}.py"
            shutil.copyfile(submission.file, kept)
            room = work / f"{number}"
            queue.append(Job(submission, kept, room, self.options, work / "template"))
        return queue

    def _baseline(self, work: Path) -> marks.Baseline:
        template = work / "template"
        lab = template / "labs" / self.options.lab
        stub = Submission("the untouched stub", lab / "exercise.py")
        limits = f"{self.options.seconds:g} s, {marks.gigabytes(self.options.memory)} each"
        number = f"{steps.count(len(self.submissions), 'submission')}, {self.jobs} at a time"
        print(f"{self.options.lab}: {number}; {limits}", flush=True)
        job = Job(stub, stub.file, work / "stub", self.options, template)
        self._loop([job], lambda job: None)
        base = marks.baseline(job)
        todo = len(base.tests) - len(base.passed) - len(base.skipped)
        text = f"untouched stub: {len(base.tests)} tests, {todo} of them count"
        print(f"{text}  ({job.seconds:.0f} s)", flush=True)
        if job.seconds > self.options.seconds / 3:
            self.warnings.append(
                f"the untouched stub took {job.seconds:.0f} s: this machine is slow or busy; use a "
                "lower -j and a higher --time-limit, or right submissions may run out of time"
            )
            print(f"note: {self.warnings[-1]}", flush=True)
        for step in self.options.steps:
            if not base.graded(step):
                self.warnings.append(f"step {step} cannot be graded on this machine: all skipped")
        return base

    def _run_all(self, queue: list[Job]) -> None:
        total, start = len(self.submissions), time.monotonic()
        for number, row in enumerate(self.rows.values(), 1):
            print(f"[{number}/{total}] {row.name}: {marks.summary(row)}", flush=True)
        ran, waiting = 0, []

        def finished(job: Job):
            nonlocal ran
            ran += bool(job.ends)
            row = marks.score(job, self.base)
            row.log = self._keep_log(job)
            self.rows[row.name] = row
            self._write()
            left = (time.monotonic() - start) / max(1, ran) * (len(waiting) - ran)
            rest = f"  about {left / 60:.0f} min left" if left > 90 else ""
            said = f"{row.points:g} of {row.of:g}, {marks.summary(row)}  ({row.seconds:.0f} s)"
            print(f"[{len(self.rows)}/{total}] {row.name}: {said}{rest}", flush=True)

        for job in queue:
            reason = why_not_loaded(job.file)
            if reason is None:
                waiting.append(job)
            else:
                job.fail_all(self.base.tests, reason)
                finished(job)
        self._loop(waiting, finished)

    def _loop(self, queue: list[Job], finished) -> None:
        """Runs jobs, `self.jobs` at a time; calls `finished` after each."""
        queue, running = list(queue), []
        try:
            while queue or running:
                while queue and len(running) < self.jobs:
                    running.append(queue.pop(0))
                    running[-1].begin()
                if self.asked_to_stop:
                    raise KeyboardInterrupt
                table = sandbox.Table.now()
                ended = [job for job in running if job.poll(table)]
                if ended:
                    self._look_again([job.submission.name for job in running])
                running = [job for job in running if job not in ended]
                for job in ended:
                    finished(job)
                deadline = time.monotonic() + TURN
                while running and (left := deadline - time.monotonic()) > 0:
                    ready, _, _ = select.select([job.box for job in running], [], [], left)
                    if ready:
                        for job in running:
                            job.box.drain()
                        time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))
        finally:
            for job in running:  # after Ctrl-C
                if job.box is not None:
                    job.box.stop("stopped")

    def _look(self, place: Path) -> dict[str, str]:
        found = snapshot(place, self.watched[place], content=False)
        if self.out.is_relative_to(place):
            inside = str(self.out.relative_to(place))
            found = {path: text for path, text in found.items() if not path.startswith(inside)}
        return found

    def _look_again(self, names: list[str]) -> None:
        """Says what changed in the real folders: by a submission that ran, or by somebody else."""
        for place, before in self.seen.items():
            after = self._look(place)
            changed = differences(before, after)
            if changed:
                shown = ", ".join(changed[:3])
                more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
                self.warnings.append(
                    f"in {place}, somebody or {' or '.join(names)} {shown}{more}; grading goes on "
                    "with the copies made at its start"
                )
            self.seen[place] = after

    def _keep_log(self, job: Job) -> str | None:
        text = "\n".join(end.output for end in job.ends).replace(f"{job.room}/submission/", "")
        if not text.strip():
            return None
        name = re.sub(r"[^\w.-]", "_", job.submission.name)
        file = self.out / "logs" / f"{name}.txt"
        file.write_text(text)
        return str(file.relative_to(self.out))

    def _ordered(self) -> list[marks.Row]:
        return [self.rows[s.name] for s in self.submissions if s.name in self.rows]

    def _write(self) -> list[Path]:
        files = [self.out / "results.csv", self.out / "results.json"]
        marks.write_csv(self._ordered(), self.options, files[0])
        about = {**self.about, "warnings": self.warnings}
        about["complete"] = len(self.rows) == len(self.submissions)
        marks.write_json(self._ordered(), self.options, files[1], about)
        return files

    def _report(self, interrupted: bool) -> int:
        files, rows = self._write(), self._ordered()
        print("\n" + "\n".join(marks.table(rows, self.options)) + "\n")
        for text in self.warnings:
            print(f"note: {text}")
        out = self.out.relative_to(Path.cwd()) if self.out.is_relative_to(Path.cwd()) else self.out
        for file in files:
            print(f"wrote {out / file.name}")
        print(f"wrote {out / 'logs'}/")
        if interrupted:
            missing = steps.count(len(self.submissions) - len(rows), "submission")
            print(f"stopped; not graded: {missing}", file=sys.stderr)
            return 130
        return 1 if any(row.points is None for row in rows) else 0
