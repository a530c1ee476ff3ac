"""pytest plugin of `python -m labs grade`: one JSON line for each test, as soon as it has ended.

Lines go to a file without a name that the grader handed down, so that nothing under test can find,
delete or truncate it, and what was done before a crash is kept. The plugin also refuses and notes
what the file under test tries to do outside the folder that the grader made for it. It keeps people
honest and their accidents small; it is not a sandbox.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from labs._harness import guard, memory, steps

FD, ROOM, REPOSITORY = "LABS_RESULTS_FD", "LABS_RESULTS_ROOM", "LABS_RESULTS_REPOSITORY"
REASON = 300  # most characters of one line of reason

# Audit events -> positions of the paths that they change. An optional folder number (dir_fd)
# follows the path where there is one.
_CHANGES = {
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.link": ((1, 3),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.utime": ((0, 3),),
    "shutil.rmtree": ((0, 1),),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFERENCE = re.compile(r"/\d\d_\w+/(extras/)?(__pycache__/)?(solution|mutants|\w+_solution)\.\w+")


def pytest_configure(config: pytest.Config) -> None:
    plugin = Results(int(os.environ[FD]))
    config.pluginmanager.register(plugin, "labs-results")
    watch(os.environ[ROOM], os.environ[REPOSITORY], plugin.notes)
    for name in (FD, ROOM, REPOSITORY):
        del os.environ[name]


def one_line(text: str) -> str:
    """The first line that says something, without control characters."""
    lines = [line for line in str(text).splitlines() if line.strip()] or [""]
    clean = "".join(c if c.isprintable() else " " for c in lines[0]).strip()
    return clean if len(clean) <= REASON else clean[: REASON - 3] + "..."


def explain(error: BaseException) -> tuple[str, str]:
    """(kind, one line) of what a test raised; kind is "guard", "time-out" or "error"."""
    reminder = steps.unwritten(error)
    if reminder:
        return "error", reminder
    error = steps.causes(error)[-1]
    message = one_line(error)
    if isinstance(error, (guard.Finding, memory.StrayAccess)):
        return "guard", message
    if isinstance(error, pytest.fail.Exception) and message.startswith("Timeout (>"):
        return "time-out", f"still running after {message[10:].split('s)')[0]} s; stopped"
    if type(error).__name__ in ("Mismatch", "LoadError", "Failed"):
        return "error", message
    return "error", f"{type(error).__name__}: {message}"


class Results:
    """Writes what happened to the file `fd`; processes forked from here cannot."""

    def __init__(self, fd: int):
        self.file = os.fdopen(fd, "a", encoding="utf-8")
        self.notes: list[str] = []  # what this process was refused since the last report
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self):
        os.close(self.file.fileno())
        self.notes.clear()

    def write(self, **line) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def pytest_collection_finish(self, session):
        marked = [(i, i.get_closest_marker("step")) for i in session.items]
        self.write(tests=[(item.nodeid, mark.args[0]) for item, mark in marked if mark])

    def pytest_runtest_logstart(self, nodeid):
        self.write(start=nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """In the process that runs the test: what is lost when the report is turned into text."""
        outcome = yield
        report = outcome.get_result()
        if report.failed and call.excinfo is not None:
            kind, reason = explain(call.excinfo.value)
            report.user_properties += [("kind", kind), ("reason", reason)]
        if self.notes:
            report.user_properties.append(("refused", list(self.notes)))
            self.notes.clear()

    def pytest_runtest_logreport(self, report):
        """In pytest's own process, which is another one where each test runs in a fork."""
        properties = dict(report.user_properties)
        if "refused" in properties:
            self.write(refused=properties["refused"], test=report.nodeid)
        if "step" not in properties or (report.when != "call" and report.passed):
            return
        kind = properties.get("ended") or properties.get("kind")
        reason = properties.get("reason") or one_line(_longrepr(report))
        self.write(
            test=report.nodeid,
            step=properties["step"],
            outcome=report.outcome,
            state=properties.get("state"),
            kind=kind,
            reason="" if report.passed else reason,
            seconds=round(report.duration, 3),
            printed=sum(len(text) for name, text in report.sections if "std" in name),
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus):
        self.write(end=int(exitstatus))


def _longrepr(report) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr or "")


def watch(room: str, repository: str, notes: list[str]) -> None:
    """From now on refuses, and notes, what Python code of this process does outside `room`.

    Args:
        room: the folder below which everything is allowed.
        repository: where the references are, which nothing here may open.
        notes: gets one line for each refusal.
    """
    room, repository = os.path.realpath(room), os.path.realpath(repository)
    pytest_process = os.getpid()

    def refuse(text):
        notes.append(text)
        raise PermissionError(f"refused while grading: {text}")

    def changes(event, path):
        if not (_below(path, room) or _below(path, "/dev") or _below(path, "/proc/self")):
            refuse(f"{event} of {path}")

    def hook(event, args):
        if event == "open":
            path = _path(args[0])
            if path is None:
                return
            flags = args[2] if isinstance(args[2], int) else 0
            real = os.path.realpath(path)
            if flags & _WRITING:
                changes("write", real)
            elif _below(real, repository) and _REFERENCE.search(real):
                refuse(f"read of the reference {os.path.basename(real)}")
        elif event in _CHANGES:
            for at, folder_at in _CHANGES[event]:
                path = _path(args[at])
                if path is not None:
                    folder = args[folder_at] if folder_at is not None else None
                    changes(event.split(".")[1], _entry(path, folder))
        elif event in ("os.kill", "os.killpg") and os.getpid() != pytest_process:
            if args[0] != 0 and not _descends(args[0]):
                refuse(f"signal {int(args[1])} to process {args[0]}")

    sys.addaudithook(hook)


def _descends(pid: int) -> bool:
    """Whether a process is this one or was started by it, directly or not."""
    while pid > 1 and pid != os.getpid():
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
    return pid == os.getpid()


def _path(value) -> str | None:
    """A path as text; None for the number of an open file."""
    if isinstance(value, (str, bytes, os.PathLike)):
        return os.fsdecode(value)
    return None


def _entry(path: str, folder: int | None) -> str:
    """Full path of a folder's entry: links above it are followed, it itself is not."""
    if not os.path.isabs(path) and isinstance(folder, int) and folder >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    head, tail = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(head), tail)


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
