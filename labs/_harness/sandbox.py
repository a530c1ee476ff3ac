"""A command in a process tree of its own, with limits on time, memory, processes and output.

The tree is everything that the command started: its children, and whoever carries the mark that it
was given in the environment, so that a process that left its session or lost its parent is found,
too. Nothing here waits; whoever runs several polls each of them.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None

MARK = "LABS_SANDBOX"
MOST_PROCESSES = 200
MOST_FILE_BYTES = 256 << 20  # of one file that the command writes
KEPT_OUTPUT = 32 << 10  # bytes kept of the beginning and of the end of the output
PROC = Path("/proc")


def unavailable() -> str | None:
    """Why commands cannot be contained on this system, or None."""
    if os.name != "posix":
        return "needs Linux or macOS (on Windows: WSL2)"
    return None


@dataclass
class Ended:
    """What became of a command.

    Attributes:
        code: exit code; negative is the signal that ended it.
        seconds: wall time.
        killed: why the whole tree was ended ("time", "memory", "processes", "stopped"), or None.
        memory_kills: bytes that the tree held at each time its largest process was ended for it.
        peak: most bytes that the tree held at a time; shared pages count once a process.
        printed: bytes of output.
        output: beginning and end of the output.
        left: processes that were still there when the command had ended.
    """

    code: int
    seconds: float
    killed: str | None
    memory_kills: list[int]
    peak: int
    printed: int
    output: str
    left: int


class Output:
    """Keeps the beginning and the end of what is fed to it, and counts the rest."""

    def __init__(self):
        self.head, self.tail, self.size = b"", b"", 0

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        room = KEPT_OUTPUT - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[room:])[-KEPT_OUTPUT:]

    def text(self) -> str:
        missing = self.size - len(self.head) - len(self.tail)
        gap = f"\n... {missing} bytes left out ...\n".encode() if missing else b""
        return (self.head + gap + self.tail).decode(errors="replace")


@dataclass
class Table:
    """A snapshot of the system's processes: pid -> (parent, bytes of memory, start)."""

    rows: dict[int, tuple[int, int, str]] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Table:
        return cls(_proc_rows() if PROC.joinpath("self").exists() else _ps_rows())

    def below(self, pid: int) -> set[int]:
        """`pid` and all its descendants that are there."""
        found = {pid} & self.rows.keys()
        grown = True
        while grown:
            more = {p for p, (parent, _, _) in self.rows.items() if parent in found} - found
            grown = bool(more)
            found |= more
        return found


def _proc_rows() -> dict[int, tuple[int, int, str]]:
    rows, page = {}, os.sysconf("SC_PAGE_SIZE")
    for entry in os.scandir(PROC):
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):  # it ended meanwhile
                stat = Path(entry.path, "stat").read_text(errors="replace")
                fields = stat.rpartition(")")[2].split()
                if fields[0] != "Z":
                    rows[int(entry.name)] = int(fields[1]), int(fields[21]) * page, fields[19]
    return rows


def _ps_rows() -> dict[int, tuple[int, int, str]]:
    listed = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,rss=,stat="], capture_output=True, text=True, check=False
    )
    rows = {}
    for line in listed.stdout.splitlines():
        pid, parent, kilobytes, state = line.split()[:4]
        if not state.startswith("Z"):
            rows[int(pid)] = int(parent), int(kilobytes) << 10, ""
    return rows


class Sandbox:
    """A running command. Call `poll` a few times a second until it gives an `Ended`."""

    def __init__(
        self,
        command: list[str],
        cwd: Path,
        env: dict[str, str],
        seconds: float,
        memory: int,
        pass_fds: tuple[int, ...] = (),
    ):
        """Starts `command`; it is ended after `seconds`, or when its tree holds `memory` bytes."""
        self.mark = f"{MARK}={secrets.token_hex(8)}"
        name, value = self.mark.split("=")
        self.limit, self.memory = seconds, memory
        self.killed, self.memory_kills, self.peak = None, [], 0
        self.output, self.marked = Output(), {}
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**env, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        self._limit_resources()

    def _limit_resources(self) -> None:
        if hasattr(resource, "prlimit"):
            with suppress(OSError, ValueError):
                resource.prlimit(self.process.pid, resource.RLIMIT_CORE, (0, 0))
                size = (MOST_FILE_BYTES, MOST_FILE_BYTES)
                resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, size)
        with suppress(OSError):  # if the system itself runs out of memory, it is to end this first
            PROC.joinpath(str(self.process.pid), "oom_score_adj").write_text("1000")

    def fileno(self) -> int:
        """Of the output, for select."""
        return self.process.stdout.fileno()

    def tree(self, table: Table) -> set[int]:
        """Processes of this command."""
        found = table.below(self.process.pid)
        for pid, (_, _, start) in table.rows.items():
            if pid not in found and self._is_marked(pid, start):
                found |= table.below(pid)
        return found

    def _is_marked(self, pid: int, start: str) -> bool:
        if (pid, start) not in self.marked:
            env = b""
            with suppress(OSError):
                env = PROC.joinpath(str(pid), "environ").read_bytes()
            if not env:  # just born, or not ours to read: look again next time
                return False
            self.marked[pid, start] = self.mark.encode() in env.split(b"\0")
        return self.marked[pid, start]

    def poll(self, table: Table) -> Ended | None:
        """Holds the limits; gives the end when it has come."""
        self.drain()
        if self.process.poll() is None:
            self._hold(table)
            return None
        seconds = time.monotonic() - self.start
        left = self.tree(Table.now()) - {self.process.pid}
        self.kill()
        self.drain()
        self.process.stdout.close()
        return Ended(
            self.process.returncode,
            seconds,
            self.killed,
            self.memory_kills,
            self.peak,
            self.output.size,
            self.output.text(),
            0 if self.killed else len(left),
        )

    def _hold(self, table: Table) -> None:
        tree = self.tree(table)
        used = {pid: table.rows[pid][1] for pid in tree}
        total = sum(used.values())
        self.peak = max(self.peak, total)
        if time.monotonic() - self.start > self.limit:
            self.stop("time")
        elif len(tree) > MOST_PROCESSES:
            self.stop("processes")
        elif total > self.memory:
            largest = max(used, key=used.get)
            if largest == self.process.pid:
                self.stop("memory")
            else:  # a test's own process: the command goes on without it
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(largest, signal.SIGKILL)
                self.memory_kills.append(total)

    def stop(self, why: str) -> None:
        """Ends the whole tree; `poll` then gives the end."""
        self.killed = self.killed or why
        self.kill()

    def kill(self) -> None:
        """Ends every process of the tree, until none is left."""
        for _ in range(50):
            with suppress(ProcessLookupError, PermissionError):
                if self.process.returncode is None:
                    os.killpg(self.process.pid, signal.SIGKILL)
            tree = self.tree(Table.now())
            if not tree:
                break
            for pid in tree:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)

    def drain(self) -> None:
        """Takes in the output that waits in the pipe."""
        for _ in range(256):  # at most 16 MB a turn, so that no chatterbox holds up the others
            try:
                data = os.read(self.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            self.output.feed(data)


def environment(home: Path, tmp: Path) -> dict[str, str]:
    """What a command needs of this process's environment, with a home and a TMPDIR of its own.

    Nothing else is handed on: a grader's environment may hold tokens.
    """
    import site

    kept = ("PATH", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH")
    kept += ("DYLD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CC")
    env = {k: v for k, v in os.environ.items() if k in kept or k.startswith(("LC_", "NVIDIA_"))}
    env |= {"HOME": str(home), "TMPDIR": str(tmp), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    if sys.prefix == sys.base_prefix:  # packages installed with pip --user are looked up from HOME
        env["PYTHONUSERBASE"] = site.getuserbase()
    return env
