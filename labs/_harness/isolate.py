"""Each test of a lab in a process of its own, so that nothing hangs and nothing kills the run.

On Linux with kernels on the CPU a test runs in a fork of pytest: a crash is a failed test, a loop
without end is cut short, and what one test does to the process no other test sees. Elsewhere, and
with -s or --pdb, tests run in pytest's own process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress

import pytest
import torch
from _pytest.runner import runtestprotocol

LIMIT = 10.0  # seconds for the body of one test; pytest-timeout interrupts it and shows where it is
GRACE = 5.0  # seconds more until the process is killed
LIMIT_IN_PROCESS = 120.0  # on a GPU the first launch of each configuration compiles


def enabled(config: pytest.Config) -> bool:
    """Whether this run forks for each test of a lab."""
    from labs._harness import runtime

    return (
        sys.platform == "linux"
        and runtime.setup().device == "cpu"
        and config.getoption("capture") != "no"
        and not config.getoption("usepdb")
        and not config.getoption("trace")
    )


def describe(config: pytest.Config) -> str:
    if enabled(config):
        return f"each test in its own process, {LIMIT:.0f} s at most"
    return f"in this process, {LIMIT_IN_PROCESS:.0f} s a test at most (a crash ends the run)"


def run_in_fork(item: pytest.Item, before=None) -> list[pytest.TestReport]:
    """Runs one test in a fork and gives its reports.

    Args:
        item: the collected test.
        before: called in the child before the test, for instance to choose an implementation.

    Returns:
        The reports of set-up, call and tear-down, or a single failed one after a crash or a
        time-out; its user property "ended" is then ("ended", "crash" | "time-out").
    """
    reader, writer = os.pipe()
    trace = tempfile.TemporaryFile(mode="w+")
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside pytest-xdist's threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            faulthandler.enable(file=trace)
            faulthandler.dump_traceback_later(_limit(item) + GRACE - 0.5, file=trace)
            torch.set_num_threads(1)  # a fork after threaded torch work hangs without this
            if before is not None:
                before()
            reports = runtestprotocol(item, log=False, nextitem=None)
            hook = item.config.hook
            data = [
                hook.pytest_report_to_serializable(config=item.config, report=report)
                for report in reports
            ]
            with os.fdopen(writer, "w") as pipe:
                json.dump(data, pipe, default=str)
            status = 0
        finally:
            os._exit(status)  # no atexit handlers, no flush of pytest's own buffers
    os.close(writer)
    start = time.monotonic()
    data = None
    try:
        data = _read_all(reader, pid, start + _limit(item) + GRACE)
    finally:  # also on Ctrl-C
        os.close(reader)
        if data is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - start
    if data:
        hook = item.config.hook
        with suppress(Exception):  # the code under test wrote into the pipe: no report then
            reports = [
                hook.pytest_report_from_serializable(config=item.config, data=entry)
                for entry in json.loads(data)
            ]
            for report in reports:
                if isinstance(report.longrepr, list):  # JSON has no tuples; -rs wants one
                    report.longrepr = tuple(report.longrepr)
            return reports
    if data is None:
        ended, text = "time-out", f"still running after {_limit(item) + GRACE:.0f} s; stopped"
    else:
        ended, text = "crash", _exit_text(status)
    return [_failed_report(item, f"{text}{_last_line(trace)}", ended, seconds)]


def _read_all(reader: int, pid: int, deadline: float) -> bytes | None:
    """Bytes until the pipe closes or the child ends, or None when the deadline passes first.

    A process that the code under test left behind may hold the pipe open: the child's end counts.
    """
    parts = []
    child = os.pidfd_open(pid)
    try:
        while True:
            wait = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([reader, child], [], [], wait)
            if reader in ready:
                part = os.read(reader, 1 << 16)
                if not part:
                    return b"".join(parts)
                parts.append(part)
            elif ready:  # the child has ended, and all that it wrote has been read
                return b"".join(parts)
            else:
                return None
    finally:
        os.close(child)


def _exit_text(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"the test's process was killed by {signal.Signals(number).name}"
    return f"the test's process ended early with exit code {os.WEXITSTATUS(status)}"


def _last_line(trace) -> str:
    """Where the crash happened, as faulthandler saw it: the innermost line outside libraries."""
    trace.seek(0)
    for file, line, name in re.findall(r'File "(.+?)", line (\d+) in (\S+)', trace.read()):
        if "site-packages" not in file and "/lib/python" not in file:
            return f", in {name} ({os.path.basename(file)} line {line})"
    return ""


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker and marker.args else LIMIT


def _failed_report(item, text, ended, seconds=0.0) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={item.name: 1},
        outcome="failed",
        longrepr=text,
        when="call",
        duration=seconds,
        user_properties=[*item.user_properties, ("ended", ended)],
    )


class Isolation:
    """The pytest plugin: forks for tests that carry a step, and stops a step that hung or crashed.

    After a hang or a crash the step's remaining tests fail at once with that reason: one endless
    loop costs one time limit, not fifty.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.enabled = enabled(config)
        self.ended: dict[tuple, str] = {}  # step -> why its remaining tests do not run

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            if item.get_closest_marker("step") and not item.get_closest_marker("timeout"):
                limit = LIMIT if self.enabled else LIMIT_IN_PROCESS
                item.add_marker(pytest.mark.timeout(limit))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call):
        outcome = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, pytest.fail.Exception) and str(error).startswith("Timeout (>"):
            outcome.get_result().user_properties.append(("ended", "time-out"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not self.enabled or not item.get_closest_marker("step"):
            return None
        step = (str(item.path), item.get_closest_marker("step").args[0])
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if step in self.ended:
            reports = [_failed_report(item, f"not run: {self.ended[step]}", "not run")]
        else:
            reports = run_in_fork(item)
            for report in reports:
                how = dict(report.user_properties).get("ended")
                if how:
                    self.ended[step] = f"{item.name} of this step {_HOW[how]}"
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.session._setupstate.teardown_exact(nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


_HOW = {"time-out": "ran out of time", "crash": "crashed"}
