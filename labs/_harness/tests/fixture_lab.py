"""A small repository with this one's machinery and labs of two steps, and pytest runs in it.

All labs have equal file names and equal function names; what tells them apart is their number:
`shift(x)` is x + number, in PyTorch, and `times(x)` is x * number, in a Triton kernel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from labs._impl import ROOT

SOURCE = '''"""Lab NN."""

import torch

from labs._harness.runtime import check_launch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def shift(x):
    """x + NN."""
SHIFT


if triton is not None:

    @triton.jit
    def _times_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
KERNEL


def times(x):
    """x * NN."""
    check_launch(x=x)
    y = torch.empty_like(x)
    _times_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y
'''

SHIFT_STUB = """
    # TODO step 1 (1 line)
    raise NotImplementedError("lab NN step 1: write shift")
"""
SHIFT = """
    return x + NN
"""
KERNEL_STUB = """
        # TODO step 2 (4 lines)
        tl.static_assert(False, "lab NN step 2: write _times_kernel")
"""
KERNEL = """
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < n
        x = tl.load(x_ptr + offs, mask=mask)
        tl.store(y_ptr + offs, x * NN, mask=mask)
"""

TESTS = """
import pytest
import torch

from labs._harness import isolate, oracle, runtime

isolate.GRACE = 0.5  # a process that its own time limit does not end is killed soon
STEPS = {1: "shift", 2: "times"}
needs_triton = pytest.mark.skipif(
    not runtime.setup().has_triton, reason="Triton is not installed"
)


def check(name, want, got):
    oracle.Expected(name, want, 1e-4, torch.float32, "R", {"R": 16}).check(got)


@pytest.mark.step(1)
@pytest.mark.timeout(8)  # only a fault that never ends gets that far, on a busy machine too
@pytest.mark.parametrize("n", [1, 17, 40])
def test_shift(lab, n):
    x = oracle.inputs(n)
    check("shift", x.double() + NN, lab.shift(x))


@needs_triton
@pytest.mark.step(2)
@pytest.mark.parametrize("n", [16, 40])
def test_times(lab, n):
    x = oracle.inputs(n)
    check("times", x.double() * NN, lab.times(x))
"""


def source(number: int, shift: str = SHIFT_STUB, kernel: str = KERNEL_STUB) -> str:
    """A lab's file with these bodies of its two steps, the unwritten ones unless given."""
    text = SOURCE.replace("SHIFT", shift.strip("\n")).replace("KERNEL", kernel.strip("\n"))
    return text.replace("NN", str(number))


def solution(number: int) -> str:
    return source(number, SHIFT, KERNEL)


# Imports what takes seconds, once; then each line of standard input is a command, run in a fork.
SERVER = """
import json, os, runpy, sys, traceback
import numpy, pytest, torch.utils.flop_counter
try:
    import triton.language
except ImportError:
    pass

def run(module, args, cwd, out):
    with open(out, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    sys.path[0], sys.argv = cwd, [module, *args]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return error.code
    except BaseException:
        traceback.print_exc()
        return 1

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = run(*json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
"""


class Server:
    """`python -m module args` in forks of one process that has torch and Triton imported."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *error):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def run(self, module: str, args: list[str], cwd: Path, out: Path) -> int:
        self.process.stdin.write(json.dumps([module, args, str(cwd), str(out)]) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def environment() -> dict[str, str]:
    """Kernels in the interpreter, and nothing of the pytest that runs now."""
    outside = ("PYTEST_", "PYTHONPATH", "CI", "BUILD_NUMBER")  # in CI pytest's summary is longer
    mine = {k: v for k, v in os.environ.items() if not k.startswith(outside)}
    return mine | {"COLUMNS": "100", "NO_COLOR": "1", "TRITON_INTERPRET": "1"}


@dataclass
class Run:
    """What a command printed and its exit code."""

    out: str
    code: int

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def states(self, lab: str) -> list[str]:
        """The state of each step on a lab's board."""
        board = self.board(lab)
        return [re.match(r"  step \d+  \w+ +(\w+( \w+)?)", line).group(1) for line in board[:2]]

    def board(self, lab: str) -> list[str]:
        """A lab's board: the lines after its title that are not empty."""
        start = next(i for i, line in enumerate(self.lines) if re.match(rf"=*\s?{lab}, ", line))
        rest = self.lines[start + 1 :]
        ends = [i for i, line in enumerate(rest) if re.match(r"=+ |\d\d_", line)]
        return [line for line in (rest[: ends[0]] if ends else rest) if line]

    def failures(self) -> dict[str, list[str]]:
        """Lines of the failures that are shown, by lab and test ("90_first test_shift[1]")."""
        parts = self.out.split(" FAILURES ", 1)[-1]
        parts = re.split(r"^=+ (short test summary|\d\d_)", parts, flags=re.MULTILINE)[0]
        pieces = re.split(r"^_+ (\S+) _+$", parts, flags=re.MULTILINE)
        shown = {}
        for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
            lab = re.search(r"labs/(\d\d_\w+)/", text)
            shown[f"{lab.group(1)} {name}" if lab else name] = text.strip().splitlines()
        return shown


class Repository:
    """A copy of the machinery in a folder of its own; labs are added and replaced at will."""

    def __init__(self, root: Path, server: Server):
        self.root, self.server = root, server
        (root / "labs").mkdir(parents=True)
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copyfile(ROOT / name, root / name)
        for name in ("__init__.py", "__main__.py", "_impl.py"):
            shutil.copyfile(ROOT / "labs" / name, root / "labs" / name)
        skip = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(ROOT / "labs" / "_harness", root / "labs" / "_harness", ignore=skip)

    def labs(self, **exercises: str | None) -> None:
        """Makes the repository's labs: `first_90=text` is labs/90_first with that exercise.py.

        None is the untouched stub. Reference and tests are given.
        """
        for old in [self.root / ".pytest_cache", *(self.root / "labs").glob("[0-9][0-9]_*")]:
            shutil.rmtree(old, ignore_errors=True)
        for key, text in exercises.items():
            name, number = key.split("_")
            lab = self.root / "labs" / f"{number}_{name}"
            lab.mkdir()
            (lab / "exercise.py").write_text(source(int(number)) if text is None else text)
            (lab / "solution.py").write_text(solution(int(number)))
            (lab / "test_lab.py").write_text(TESTS.replace("NN", number))

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def run(self, module: str, *args, cwd: Path | None = None, fresh: bool = False) -> Run:
        """`python -m module args` in the repository's root, or in `cwd`.

        Args:
            fresh: in a process that has imported nothing yet, which takes seconds longer.
        """
        out, cwd, args = self.root / "output.txt", cwd or self.root, list(map(str, args))
        if fresh:
            with out.open("w") as file:
                command = [sys.executable, "-m", module, *args]
                code = subprocess.run(
                    command, cwd=cwd, env=environment(), stdout=file, stderr=file, timeout=120
                ).returncode
        else:
            code = self.server.run(module, args, cwd, out)
        run = Run(out.read_text(), code)
        print(run.out)  # pytest shows it where an assertion about it fails
        return run

    def pytest(self, *args, **kwargs) -> Run:
        return self.run("pytest", *args, **kwargs)
