"""Each test of a lab in a process of its own, so that nothing hangs and nothing kills the run.

On Linux with kernels on the CPU a test runs in a fork of pytest: a crash is a failed test, a loop
without end is cut short, and what one test does to the process no other test sees. Elsewhere, and
with -s or --pdb, tests run in pytest's own process.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
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
from _pytest.skipping import evaluate_skip_marks

from labs import _impl
from labs._harness import compiler, guard, interpreter, oracle

LIMIT = 10.0  # seconds for the body of one test; pytest-timeout interrupts it and shows where it is
GRACE = 5.0  # seconds more until the process is killed
LIMIT_IN_PROCESS = 120.0  # on a GPU the first launch of each configuration compiles
# Autograd imports the first when it is given gradients (half a second), Triton the second at its
# first launch (an eighth). After a fork that needed one pytest's own process imports it, too, so
# that later forks have it.
SLOW_IMPORTS = ("torch.fx.experimental.symbolic_shapes", "triton.experimental.gluon")


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


def cores() -> int:
    """Processor cores that this process may use; 8 at most, for the memory of as many tests."""
    given = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))
    return min(len(given(0)), 8)


def describe(config: pytest.Config) -> str:
    if enabled(config):
        at_once = 1 if hasattr(config, "workerinput") else config.getoption("forks")
        return f"each test in its own process, {at_once} at a time, {LIMIT:.0f} s at most"
    return f"in this process, {LIMIT_IN_PROCESS:.0f} s a test at most (a crash ends the run)"


# What is still frozen at the end is never freed, and Triton 3.9 (nanobind) reports it as leaked.
atexit.register(gc.unfreeze)


class Fork:
    """One test on its way in a fork of pytest: started here, waited for by `over`."""

    def __init__(self, item: pytest.Item, before=None):
        """Starts the test.

        Args:
            item: the collected test.
            before: called in the child before the test, for instance to choose an implementation.
        """
        self.item = item
        self.start = time.monotonic()
        self.limit = _limit(item) + GRACE
        self.written, self.trace = tempfile.TemporaryFile(), tempfile.TemporaryFile(mode="w+")
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # the child's collector then leaves this process's pages alone
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # fork beside pytest-xdist's threads
            self.pid = os.fork()
        if self.pid == 0:
            self._run(before)
        self.child = os.pidfd_open(self.pid)

    def _run(self, before) -> None:
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            faulthandler.enable(file=self.trace)
            faulthandler.dump_traceback_later(self.limit - 0.5, file=self.trace)
            torch.set_num_threads(1)  # a fork after threaded torch work hangs without this
            _capture_apart(self.item.config)
            if before is not None:
                before()
            # What pytest has set up for the test that runs there now is none of this one's.
            self.item.session._setupstate.stack.clear()
            reports = runtestprotocol(self.item, log=False, nextitem=None)
            config = self.item.config
            data = [
                config.hook.pytest_report_to_serializable(config=config, report=report)
                for report in reports
            ]
            imported = [name for name in SLOW_IMPORTS if name in sys.modules]
            text = json.dumps([data, imported], default=str)
            self.written.write(text.encode())
            self.written.flush()
            status = 0
        finally:
            os._exit(status)  # no atexit handlers, no flush of pytest's own buffers

    def seconds_left(self) -> float:
        return max(0.0, self.start + self.limit - time.monotonic())

    def reports(self) -> list[pytest.TestReport]:
        """Ends the test's process if it still runs.

        Returns:
            The reports of set-up, call and tear-down, or a single failed one after a crash or a
            time-out; its user property "ended" is then ("ended", "crash" | "time-out").
        """
        ended, _, _ = select.select([self.child], [], [], 0)
        status = self.kill()
        seconds = time.monotonic() - self.start
        config = self.item.config
        with suppress(Exception):  # nothing written, or the code under test wrote there, too
            self.written.seek(0)
            entries, imported = json.loads(self.written.read())
            reports = [
                config.hook.pytest_report_from_serializable(config=config, data=entry)
                for entry in entries
            ]
            for name in set(imported) & set(SLOW_IMPORTS):
                importlib.import_module(name)
            if SLOW_IMPORTS[1] in imported:
                interpreter.warm_up()
            for report in reports:
                if isinstance(report.longrepr, list):  # JSON has no tuples; -rs wants one
                    report.longrepr = tuple(report.longrepr)
            return reports
        if not ended:
            how, text = "time-out", f"still running after {self.limit:.0f} s; stopped"
        else:
            how, text = "crash", _exit_text(status)
        return [_failed_report(self.item, f"{text}{_last_line(self.trace)}", how, seconds)]

    def kill(self) -> int:
        """Ends the test's process and what it left behind; gives its exit status."""
        os.close(self.child)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]


def _capture_apart(config: pytest.Config) -> None:
    """Gives this process files of its own for what pytest captures.

    The files that it has from pytest are the other forks', too: each reads and empties them.
    """
    manager = config.pluginmanager.getplugin("capturemanager")
    capturing = getattr(manager, "_global_capturing", None)  # pytest tells nobody else
    for name in ("out", "err"):
        with suppress(AttributeError, OSError, ValueError):  # captured in memory, or not at all
            with tempfile.TemporaryFile() as own:
                os.dup2(own.fileno(), getattr(capturing, name).tmpfile.fileno())


def over(forks: list[Fork]) -> list[Fork]:
    """Waits a while; gives the tests that have ended, and those whose time is over.

    Where a test has asked for the compiler, its process is started meanwhile.
    """
    server = compiler.shared
    asked = [server.asked] if server and not server.started else []
    seconds = min(fork.seconds_left() for fork in forks)
    ready, _, _ = select.select([*asked, *(fork.child for fork in forks)], [], [], seconds)
    if asked and server.asked in ready:
        server.start()
    return [fork for fork in forks if fork.child in ready or not fork.seconds_left()]


def _warm_up() -> None:
    """Does once what each fork would do again: PyTorch's first look at each operation, watched."""
    importlib.import_module("labs._harness.checks")  # which most labs import
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no thread pool that a fork could hang on
    x = torch.ones(1, 1, 2, 2)
    with guard.poisoned(), torch.no_grad():
        for dtype in (torch.float32, torch.float16):
            oracle.attention_gradients(*[x.to(dtype)] * 4, causal=True)
            oracle.attention(*[x.to(dtype)] * 3)[0].check(x.to(dtype))
    torch.set_num_threads(threads)


def run_in_fork(item: pytest.Item, before=None) -> list[pytest.TestReport]:
    """Runs one test in a fork and gives its reports, see Fork."""
    fork = Fork(item, before)
    try:
        while not over([fork]):
            pass
    finally:  # also on Ctrl-C
        reports = fork.reports()
    return reports


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

    As many tests run at a time as there are cores; their reports come in order all the same. After
    a hang or a crash the step's remaining tests fail at once with that reason: one endless loop
    costs one time limit, not fifty.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.enabled = enabled(config)
        self.ended: dict[tuple, str] = {}  # step -> why its remaining tests do not run
        self.waiting: list[pytest.Item] = []  # tests to fork for that have not begun, last first
        self.running: dict[str, Fork] = {}  # by node id
        self.done: dict[str, list[pytest.TestReport]] = {}  # what is to be reported in its turn
        self.stuck: set[tuple] = set()  # steps with a test that hung or crashed

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

    def pytest_runtestloop(self, session):
        if sys.platform == "linux":
            compiler.shared = compiler.Server()
        if self.enabled and any(map(_step, session.items)):
            _warm_up()
            for path in {item.path for item in session.items if _step(item)}:
                _impl.compile_ahead(path)
        if self.enabled and not hasattr(self.config, "workerinput"):  # under xdist one at a time
            self.waiting = [item for item in session.items if _forked(item)][::-1]

    def _reports(self, item) -> list[pytest.TestReport]:
        """A test's reports. Until it has ended, others that come after it begin as cores get free.

        Nothing begins once it has ended: with one test at a time, the next sees what this one led
        to.
        """
        name = item.nodeid
        if name not in self.done and name not in self.running:
            self.waiting = [other for other in self.waiting if other is not item]
            self.running[name] = Fork(item)
        self._begin_more()
        while name not in self.done:
            self._begin_more()
            for fork in over(list(self.running.values())):
                del self.running[fork.item.nodeid]
                reports = self.done[fork.item.nodeid] = fork.reports()
                if any(map(_ended, reports)):
                    self.stuck.add(_step(fork.item))
        return self.done.pop(name)

    def _begin_more(self) -> None:
        while self.waiting and len(self.running) < self.config.getoption("forks"):
            item = self.waiting.pop()
            if _step(item) not in self.stuck:
                self.running[item.nodeid] = Fork(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not self.enabled or not _forked(item):
            return None
        step = _step(item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if step in self.ended:
            reports = [_failed_report(item, f"not run: {self.ended[step]}", "not run")]
            self.done.pop(item.nodeid, None)
            if item.nodeid in self.running:
                self.running.pop(item.nodeid).kill()
        else:
            reports = self._reports(item)
            for how in filter(None, map(_ended, reports)):
                self.ended[step] = f"{item.name} of this step {_HOW[how]}"
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.session._setupstate.teardown_exact(nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self):
        while self.running:  # after Ctrl-C, or with -x
            self.running.popitem()[1].kill()
        if compiler.shared:
            compiler.shared.close()
            compiler.shared = None


def _step(item) -> tuple | None:
    """(file, number) of the step that a test belongs to."""
    marker = item.get_closest_marker("step")
    return (str(item.path), marker.args[0]) if marker else None


def _ended(report) -> str | None:
    """How a test ended that did not get to its end: a key of _HOW."""
    return dict(report.user_properties).get("ended")


def _forked(item) -> bool:
    """Whether a test belongs to a step and its marks do not skip it."""
    return _step(item) is not None and evaluate_skip_marks(item) is None


_HOW = {"time-out": "ran out of time", "crash": "crashed"}
