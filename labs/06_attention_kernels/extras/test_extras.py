"""Tests of the reading aids: the NumPy twin, the first kernel, and the optional C++ exercise."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from labs._harness.runtime import setup

HERE = Path(__file__).resolve().parent
SIZES = [(1, 1), (1, 16), (17, 16), (37, 5), (64, 16), (40, 100)]  # (keys, block)


def _load(name):
    spec = importlib.util.spec_from_file_location(f"lab06_extras_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _case(S, D=8, spread=1.0):
    rng = np.random.default_rng(S)
    return spread * rng.standard_normal(D), rng.standard_normal((S, D)), rng.standard_normal((S, D))


def _softmax_attention(q, k, v):
    """float64, all scores at once."""
    s = k @ q / np.sqrt(q.size)
    weights = np.exp(s - s.max())
    return weights @ v / weights.sum(), s.max() + np.log(weights.sum())


@pytest.mark.parametrize(("S", "block"), SIZES)
@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_numpy_twin(S, block, spread):
    q, k, v = _case(S, spread=spread)
    out, lse = _load("one_query").one_query(q, k, v, block)
    want_out, want_lse = _softmax_attention(q, k, v)
    np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_first_kernel():
    if not setup().has_triton:
        pytest.skip("Triton is not installed")
    import torch

    torch.manual_seed(0)
    a = torch.randint(-3, 4, (37, 50), device=setup().device).half()
    b = torch.randint(-3, 4, (20, 50), device=setup().device).half()
    got = _load("first_kernel").matmul_nt(a, b)
    assert torch.equal(got.double(), a.double() @ b.double().T)  # small integers: exact


def test_handout_shows_the_first_kernel():
    source = (HERE / "first_kernel.py").read_text(encoding="utf-8")
    kernel = re.search(r"# handout: begin\n(.*?)\n+# handout: end", source, re.DOTALL).group(1)
    shown = (HERE.parent / "README.md").read_text(encoding="utf-8")
    assert kernel.replace("  # fmt: skip", "") in shown, "README.md shows another kernel"


def _build(source, folder):
    """The compiled function, or a skip that says what is missing."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("cl")):
        pytest.skip("no C++ compiler")
    try:
        from torch.utils import cpp_extension
    except ImportError as error:  # it needs setuptools
        pytest.skip(f"torch.utils.cpp_extension does not import: {error}")
    if not cpp_extension.is_ninja_available():
        pytest.skip("no ninja: pip install ninja")
    library = cpp_extension.load(
        f"lab06_{source.stem}", [str(source)], build_directory=str(folder), is_python_module=False
    )
    function = ctypes.CDLL(library or str(next(folder.glob("lab06_*.so")))).one_query
    floats = np.ctypeslib.ndpointer(np.float32, flags="C_CONTIGUOUS")
    long = ctypes.c_int64
    function.argtypes = [floats, floats, floats, long, long, long, floats, floats]
    function.restype = ctypes.c_int
    return function


def test_cpp_twin(tmp_path, pytestconfig):
    impl = pytestconfig.getoption("--impl", default="exercise")
    source = HERE / ("one_query_solution.cpp" if impl == "solution" else "one_query.cpp")
    if not source.is_file():
        pytest.skip(f"no {source.name} here")
    function = _build(source, tmp_path)
    for S, block in SIZES:
        q, k, v = (np.ascontiguousarray(x, dtype=np.float32) for x in _case(S))
        out, lse = np.full(q.size, np.nan, np.float32), np.full(1, np.nan, np.float32)
        code = function(q, k, v, S, q.size, block, out, lse)
        if code == -1:
            pytest.skip("optional exercise not written")
        assert code == 0, f"one_query returned {code}"
        want_out, want_lse = _softmax_attention(*(x.astype(np.float64) for x in (q, k, v)))
        np.testing.assert_allclose(out, want_out, rtol=1e-6, atol=1e-6, err_msg=f"S={S} {block=}")
        np.testing.assert_allclose(lse[0], want_lse, rtol=1e-6, atol=1e-6)
