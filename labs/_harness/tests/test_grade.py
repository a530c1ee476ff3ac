"""labs/_harness/grade.py on a small repository with a lab of two steps, and on bad submissions."""

import argparse
import csv
import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from labs._harness import grade, handout, sandbox
from labs._impl import ROOT, LoadError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="each test runs in its own process on Linux only"
)

LAB = "90_fixture"

STUB = '''
def double(x):
    """Twice x."""
    raise NotImplementedError("lab 90 step 1: write double")


def total(xs):
    """Sum of xs."""
    raise NotImplementedError("lab 90 step 2: write total")
'''

RIGHT = """
def double(x):
    return x + x


def total(xs):
    return sum(xs)
"""

TESTS = '''
import pytest
import torch

from labs._harness import isolate

isolate.GRACE = 0.5
STEPS = {1: "double", 2: "total"}
ROW_LIMITS = {"double": 0}


@pytest.mark.step(1)
@pytest.mark.timeout(1)
@pytest.mark.parametrize("x", [1.0, 2.0])
def test_double(lab, x):
    assert lab.double(torch.tensor([x])).item() == 2 * x


@pytest.mark.step(2)
@pytest.mark.timeout(1)
@pytest.mark.parametrize("n", [0, 3, 4, 5])
def test_total(lab, n):
    assert lab.total(range(n)) == n * (n - 1) // 2


@pytest.mark.step(2)
def test_given(lab):
    """What a stub passes earns nothing."""


@pytest.mark.step(2)
@pytest.mark.skip(reason="not on this machine")
def test_skipped(lab):
    raise AssertionError
'''

# name -> text put behind RIGHT, which replaces one of its functions or runs at import
BAD = {
    "bug": "def total(xs):\n    return sum(xs) + (len(xs) > 3)\n",
    "hang_import": "while True: pass\n",
    "hang_step": "import time\ndef total(xs):\n    time.sleep(1000)\n",
    "exit": "import os\ndef double(x):\n    os._exit(0)\n",
    "segfault": "import ctypes\ndef double(x):\n    ctypes.string_at(0)\n",
    "memory": "def double(x):\n    return len(bytearray(b'x') * (30 << 30))\n",
    "prints": "def double(x):\n    print('x' * 5_000_000)\n    return x + x\n",
    "writes": """
        import os
        def double(x):
            open("labs/_harness/oracle.py", "a").write("# mine")
            open(os.path.join(os.path.dirname(__file__), "notes.txt"), "w").write("hello")
            return x + x
        def total(xs):
            open(VICTIM, "w").write("spoiled")
        """,
    "syntax": "def total(xs:\n    return 1\n",
    "deletes": """
        import os, shutil
        def double(x):
            shutil.rmtree("labs")
            return x + x
        def total(xs):
            os.remove(VICTIM)
        """,
    "cheat": "import torch\ndef double(x):\n    return 2 * x * torch.softmax(x, -1)\n",
    "kills": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "kills_pytest": """
        import ctypes, os
        def double(x):
            ctypes.CDLL(None).kill(os.getppid(), 9)
        """,
    "skips": "import pytest\ndef double(x):\n    pytest.skip('too hard')\n",
    "leaves": """
        import subprocess
        def double(x):
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return x + x
        """,
}


def repository(folder: Path) -> Path:
    """A repository with the harness of this one and a lab of two steps."""
    for name in ("conftest.py", "pyproject.toml", "labs/__init__.py", "labs/__main__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    shutil.copyfile(ROOT / "labs" / "_impl.py", folder / "labs" / "_impl.py")
    skip = shutil.ignore_patterns("__pycache__", "tests")
    shutil.copytree(ROOT / "labs" / "_harness", folder / "labs" / "_harness", ignore=skip)
    lab = folder / "labs" / LAB
    lab.mkdir()
    (lab / "exercise.py").write_text(STUB)
    (lab / "solution.py").write_text(RIGHT)
    (lab / "test_fixture.py").write_text(TESTS)
    return folder


def command(root: Path, *args) -> list[str]:
    return [sys.executable, "-m", "labs", "grade", *map(str, args)]


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """One grading of all submissions: (rows by name, what was printed, folders)."""
    top = tmp_path_factory.mktemp("grade")
    root, folder = repository(top / "repository"), top / "submissions"
    folder.mkdir()
    (folder / "right.py").write_text(RIGHT)
    (folder / "untouched").mkdir()
    (folder / "untouched" / "exercise.py").write_text(STUB)
    (folder / "empty").mkdir()
    (folder / "link.py").symlink_to(root / "labs" / LAB / "solution.py")
    (folder / "notes.txt").write_text("not a submission")
    for name, text in BAD.items():
        text = textwrap.dedent(text).replace("VICTIM", repr(str(folder / "right.py")))
        (folder / f"{name}.py").write_text(RIGHT + "\n\n" + text)
    out = top / "out"
    args = (folder, "--lab", "90", "-j", 2, "--memory-limit", 2, "--points", "1=10")
    start = time.monotonic()
    done = subprocess.run(
        command(root, *args, "--out", out), cwd=root, capture_output=True, text=True, timeout=100
    )
    print(done.stdout, done.stderr, f"{time.monotonic() - start:.1f} s")
    report = json.loads((out / "results.json").read_text())
    return {r["name"]: r for r in report["submissions"]}, done, (root, folder, out)


def test_debug(graded):
    print("ok")
