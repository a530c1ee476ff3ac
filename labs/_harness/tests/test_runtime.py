"""The decision where kernels run, in child processes: it is made once, before Triton loads.

Most children get a stand-in for torch of a few lines, so that cards that nobody here owns can be
tried, and in milliseconds; Triton is the real one.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from labs._harness import runtime
from labs._harness.runtime import Runtime, check_launch

ROOT = Path(runtime.__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

FAKE_TORCH = """
class version:
    hip = {hip!r}

class cuda:
    is_available = staticmethod(lambda: {card!r} is not None)
    get_device_name = staticmethod(lambda: {card!r})
    get_device_capability = staticmethod(lambda: {capability!r})

class Tensor:
    pass
"""
HIDE_TRITON = """
import importlib.metadata, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Blocker())
true_version = importlib.metadata.version
def version(name):
    if "triton" in name:
        raise importlib.metadata.PackageNotFoundError(name)
    return true_version(name)
importlib.metadata.version = version
"""
SHOW = """
import os
from labs._harness import runtime
here = runtime.setup()
print(os.environ.get("TRITON_INTERPRET"), here.interpret, here.device, here.has_triton)
print(here.kernels_run_on)
print(here.problem)
"""


@pytest.fixture
def child(tmp_path):
    """child(code, torch=None or a dict for FAKE_TORCH, TRITON_INTERPRET=...) -> printed lines."""

    def run(code, fake=None, interpret=None):
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if interpret is not None:
            env["TRITON_INTERPRET"] = interpret
        path = [str(ROOT)]
        if fake is not None:
            package = tmp_path / "fake" / "torch"
            package.mkdir(parents=True, exist_ok=True)
            values = {"hip": None, "card": None, "capability": None, **fake}
            (package / "__init__.py").write_text(FAKE_TORCH.format(**values))
            path.insert(0, str(package.parent))
        env["PYTHONPATH"] = os.pathsep.join(path)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


NO_CARD = {"card": None}
H200 = {"card": "NVIDIA H200", "capability": (9, 0)}
T4 = {"card": "Tesla T4", "capability": (7, 5)}


@needs_triton
@pytest.mark.parametrize(
    ("fake", "interpret", "first", "phrase"),
    [
        (NO_CARD, None, "1 True cpu True", "CPU interpreter (no NVIDIA GPU)"),
        (NO_CARD, "1", "1 True cpu True", "CPU interpreter (TRITON_INTERPRET=1 is set)"),
        (H200, None, "None False cuda True", "on NVIDIA H200"),
        (H200, "1", "1 True cpu True", "CPU interpreter (TRITON_INTERPRET=1 is set)"),
        (H200, "0", "0 False cuda True", "on NVIDIA H200 (TRITON_INTERPRET=0 is set)"),
        (T4, None, "1 True cpu True", "7.5, below 8.0; TRITON_INTERPRET=0 forces the card"),
        (T4, "0", "0 False cuda True", "on Tesla T4 (TRITON_INTERPRET=0 is set)"),
        ({**H200, "hip": "6.4"}, None, "1 True cpu True", "AMD GPUs are not supported"),
    ],
)
def test_where_kernels_run(child, fake, interpret, first, phrase):
    lines = child(SHOW, fake, interpret)
    assert lines[0] == first
    assert phrase in lines[1]
    assert lines[2] == "None"


@needs_triton
def test_the_interpreter_off_without_a_gpu_is_a_problem(child):
    lines = child(SHOW, NO_CARD, "0")
    assert lines[0] == "0 False cpu True"
    assert lines[1].startswith("nowhere: TRITON_INTERPRET=0 turns")
    assert lines[2].endswith("there is no GPU; unset it")


@needs_triton
def test_triton_imported_too_early_is_a_problem(child):
    lines = child("import triton.language" + SHOW, NO_CARD)
    assert lines[0].startswith("None True")
    assert "imported before the labs could choose its CPU interpreter" in lines[2]
    assert "restart Python" in lines[2]


@needs_triton
def test_triton_imported_before_the_user_set_the_variable_is_a_problem(child):
    early = "import os, triton.language\nos.environ['TRITON_INTERPRET'] = '1'\n"
    assert "imported before" in child(early + SHOW, NO_CARD)[2]
    late = "import os\nos.environ['TRITON_INTERPRET'] = '1'\nimport triton.language\n"
    assert child(late + SHOW, NO_CARD)[2] == "None"


@needs_triton
def test_triton_imported_early_on_a_gpu_is_fine(child):
    assert child("import triton.language" + SHOW, H200)[2] == "None"
    lines = child(
        "import os\nos.environ['TRITON_INTERPRET'] = '1'\nimport triton.language\n"
        "del os.environ['TRITON_INTERPRET']" + SHOW,
        H200,
    )
    assert "its GPU compiler" in lines[2]


def test_without_triton_the_pytorch_parts_run(child):
    lines = child(HIDE_TRITON + SHOW, NO_CARD)
    assert lines == [
        "None True cpu False",
        "nowhere: Triton is not installed (PyTorch parts only)",
        "None",
    ]


def test_a_torch_that_is_not_pytorch_is_a_problem(child, tmp_path):
    (tmp_path / "torch.py").write_text("")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + SHOW
    line = child(code)[2]
    assert line.startswith("PyTorch does not import (<module 'torch' from")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    assert "(libcudart.so.13: cannot open); see SETUP.md" in child(code)[2]


@needs_triton
@pytest.mark.timeout(60)
def test_import_labs_acts_before_torch_testing_loads_triton(child):
    lines = child(
        "import labs, torch.testing, torch.utils.flop_counter, triton.language as tl\n"
        "print(type(tl.zeros).__name__)\n"
        "from labs._impl import load\n"
        "print(load('labs/06_attention_kernels/x.py', 'solution').triton is not None)",
        interpret=None if not torch.cuda.is_available() else "1",
    )
    assert lines == ["InterpretedFunction", "True"]


@pytest.fixture
def here(monkeypatch):
    """here(...) makes setup() return that Runtime."""

    def set_to(device="cpu", interpret=True, triton="3.7.1", problem=None):
        fixed = Runtime(device, interpret, triton, "test", problem)
        monkeypatch.setattr(runtime, "setup", lambda: fixed)

    return set_to


def test_check_launch_accepts_equal_tensors(here):
    here()
    q = torch.zeros(2, dtype=torch.float16)
    check_launch(q=q, k=q.clone(), v=q.clone())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.zeros(2, dtype=torch.float64), ["one dtype", "q torch.float32", "k torch.float64"]),
        (torch.zeros(2, device="meta"), ["one device", "q on cpu", "k on meta", ".to()"]),
    ],
)
def test_check_launch_names_both_tensors(here, other, words):
    here()
    with pytest.raises(ValueError, match="q, k, v must") as caught:
        check_launch(q=torch.zeros(2), k=other, v=torch.zeros(2))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_check_launch_refuses_bfloat16_in_the_interpreter_only(here):
    here()
    with pytest.raises(ValueError, match="raw integer bits .* use float16 or float32"):
        check_launch(x=torch.zeros(2, dtype=torch.bfloat16))


def test_check_launch_refuses_a_cpu_tensor_on_a_gpu(here):
    here("cuda", interpret=False)
    with pytest.raises(ValueError, match=r"x must be a cuda tensor, got cpu; move it with"):
        check_launch(x=torch.zeros(2))


def test_check_launch_says_what_stops_every_kernel(here):
    here(triton=None)
    with pytest.raises(RuntimeError, match="Triton is not installed; see SETUP.md"):
        check_launch(x=torch.zeros(2))
    here(problem="wrong; repair")
    with pytest.raises(RuntimeError, match="wrong; repair"):
        check_launch(x=torch.zeros(2))


def test_capability_is_that_of_the_card_that_a_launch_is_for(monkeypatch):
    cpu = torch.device("cpu")
    assert runtime.capability(cpu) == (9, 0), "in the interpreter that of a Hopper card"
    monkeypatch.setattr(runtime, "compiling_for", (8, 6))
    assert runtime.capability(cpu) == (8, 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert runtime.capability(torch.device("cuda")) == (12, 0)
