"""guard.py: each rule finds what it is for, and leaves its allowed twin alone."""

import subprocess
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from labs import _impl
from labs._harness import guard, interpreter, memory, oracle
from labs._harness.guard import Finding, Guarded

needs_interpreter = pytest.mark.skipif(
    interpreter.unavailable() is not None, reason=str(interpreter.unavailable())
)

PROLOGUE = """
import torch
import torch.nn.functional as F
from labs._harness import memory, oracle
"""

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def _double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, 2 * tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)

def double(x, n=None, block=16):
    y = torch.empty_like(x)
    _double_kernel[(1,)](x, y, x.numel() if n is None else n, BLOCK=block)
    return y

def swallows(x):
    try:
        double(x, n=x.numel() + 1)
    except BaseException:
        pass
    return x * 2
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """lab(code, name, row_limits) -> that code under guard, as a file of its own."""
    monkeypatch.setattr(_impl, "_loaded", {})

    def load(code: str, name="exercise.py", limits=None) -> Guarded:
        file = tmp_path / name
        file.write_text(PROLOGUE + textwrap.dedent(code))
        return Guarded(file, lambda: _impl.load("06", str(file)), limits)

    return load


def finding(function, *args, **kwargs) -> str:
    with pytest.raises(Finding) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def x(*shape):
    return oracle.inputs(*(shape or (2, 32)))


# ---------------------------------------------------------------- PyTorch's own attention, softmax


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_own_attention_is_found(lab, causal, grad):
    code = lab(f"def f(q): return F.scaled_dot_product_attention(q, q, q, is_causal={causal})")
    q = x(1, 2, 16, 8).requires_grad_(grad)
    assert "f: calls PyTorch's own attention (aten." in finding(code.f, q)


def test_its_plain_form_is_found_as_a_softmax_over_whole_rows(lab):
    code = lab(
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def f(q, block=8):
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, q, q)
        """,
        limits={"f": "block"},
    )
    assert "softmax over 16 elements of a row" in finding(code.f, x(1, 2, 16, 8))


def test_attention_written_out_is_not(lab):
    code = lab("def f(q): return (q @ q.mT).softmax(-1) @ q")
    assert code.f(x(1, 2, 16, 8)).shape == (1, 2, 16, 8)


WAYS = {
    "method": "x.softmax(-1)",
    "first axis": "x.t().softmax(0)",
    "function": "torch.softmax(x, dim=1)",
    "functional": "F.softmax(x, dim=-1)",
    "log": "x.log_softmax(-1)",
    "logsumexp": "x.logsumexp(-1)",
    "two axes": "x.logsumexp((0, 1))",
    "module": "torch.nn.Softmax(dim=-1)(x)",
}


@pytest.mark.parametrize("way", WAYS)
def test_softmax_over_more_than_a_tile_is_found(lab, way):
    code = lab(f"def f(x, block=16): return {WAYS[way]}", limits={"f": "block"})
    length = 64 if way == "two axes" else 32
    text = finding(code.f, x(2, 32))
    assert f" over {length} elements of a row; this function sees at most 16" in text
    assert "softmax" in text or "logsumexp" in text
    code.f(x(2, 8))  # one tile
    code.f(x(2, 32), block=64)
    code.f(x(2, 32), 64)


def test_the_limit_is_a_number_the_default_of_an_argument_or_none(lab):
    text = "def f(x, block=16): return x.softmax(-1)\ndef g(x): return x.softmax(-1)"
    code = lab(text, limits={"f": 0})
    assert "sees at most 0 of them" in finding(code.f, x(2, 1))
    code.g(x(2, 5000))
    assert "at most 16" in finding(lab(text, "b.py", {"f": "block"}).f, x(2, 17))


def test_wrong_arguments_are_the_functions_own_error(lab):
    code = lab("def f(x, block): return x", limits={"f": "block"})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'block'"):
        code.f(x())


# ---------------------------------------------------------------- autograd


@pytest.mark.parametrize(
    "body",
    [
        "return torch.autograd.grad((x * x).sum(), x)[0]",
        "(x * x).sum().backward(); return x.grad",
        "return torch.autograd.functional.vjp(lambda t: t * t, x, x)[1]",
        "return torch.func.grad(lambda t: (t * t).sum())(x)",
    ],
)
def test_the_autograd_engine_is_found(lab, body):
    code = lab(f"""
        def f(x):
            x = x.detach().requires_grad_()
            {body}
    """)
    assert "f: calls autograd: the gradients are yours to write" in finding(code.f, x())


def test_gradients_written_out_and_calls_that_a_test_allows_are_not(lab):
    code = lab("""
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x
            @staticmethod
            def backward(ctx, dy):
                (x,) = ctx.saved_tensors
                return 2 * x * dy
        def f(x): return Square.apply(x)
        def g(x): return 2 * x
    """)
    leaf = x().requires_grad_()
    code.g(x())
    out = code.f(leaf)
    with code.guarded("the backward", engine_calls=1):
        (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(grad, 2 * leaf.detach())

    def twice():
        with code.guarded("the backward", engine_calls=1):
            torch.autograd.grad(code.f(leaf).sum(), leaf)
            torch.autograd.grad(code.f(leaf).sum(), leaf)

    assert finding(twice) == "the backward: calls autograd: the gradients are yours to write"


def test_the_engine_is_itself_again_afterwards(lab):
    code = lab("def f(x): raise ZeroDivisionError")
    before = torch.autograd._engine_run_backward
    with pytest.raises(ZeroDivisionError):
        code.f(x())
    assert torch.autograd._engine_run_backward is before


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("x.mul_(2)", 0),
        ("x[0, 0] = 9.0", 0),
        ("x.mul_(2).div_(2)", 0),
        ("y.zero_()", 1),
        ("y.copy_(float('nan') * y)", 1),
        ("scale.t()[1] += 1.0", 2),
    ],
)
def test_a_modified_input_is_found(lab, body, number):
    code = lab(f"""
        def f(x, y, scale):
            {body}
            return x + y
    """)
    args = x(), x(), x()
    assert f"f: modifies its input number {number} (shape (2, 32))" in finding(
        code.f, args[0], args[1], scale=args[2]
    )


def test_a_modified_array_is_found(lab):
    code = lab("def f(x, a): a *= 2; return x")
    array = np.array([1.0, np.nan])
    assert "f: modifies its argument number 1 (shape (2,))" in finding(code.f, x(), array)
    code = lab("def f(a): return a * 2")
    assert code.f(array)[0] == 4.0


def test_a_copy_may_be_modified_and_nan_is_equal_to_itself(lab):
    code = lab("def f(x, n): return x.clone().mul_(2)")
    given = x()
    given[0, 0] = float("nan")
    code.f(given, 3)
    code.f(torch.arange(4), [given])


# ---------------------------------------------------------------- the reference

SOLUTION = _impl.LABS / "06_attention_kernels" / "solution.py"
COMPILED = SOLUTION.parent / "__pycache__" / "solution.cpython-311.pyc"


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ("open({path!r}).read()", SOLUTION),
        ("open({path!r}, 'rb').read()", COMPILED),
        ("import pathlib; pathlib.Path({path!r}).read_text()", SOLUTION),
        ("import os; os.open({path!r}, os.O_RDONLY)", SOLUTION),
        ("from labs._impl import load; load('06', 'solution')", SOLUTION),
        ("import runpy; runpy.run_path({path!r})", SOLUTION),
        (
            "import importlib.machinery as m; m.SourcelessFileLoader('s', {path!r}).get_code('s')",
            COMPILED,
        ),
    ],
)
def test_opening_the_reference_is_found_in_a_call_and_at_import(lab, how, path):
    how = how.format(path=str(path))
    code = lab(f"def f(x):\n    {how}\n    return x")
    with pytest.raises(Exception, match="opens solution.*: write your own"):
        code.f(x())
    with pytest.raises(_impl.LoadError, match="opens solution.*: write your own"):
        lab(how, "at_import.py")


def test_other_files_may_be_opened_and_the_reference_may_open_itself(lab, tmp_path):
    (tmp_path / "resolution.py").write_text("")
    code = lab(f"""
        def f(x):
            open({str(tmp_path / "resolution.py")!r}).close()
            open(__file__).close()
            return x
    """)
    code.f(x())
    reference = Guarded(SOLUTION, lambda: _impl.load("06", "solution"))
    with reference.guarded("f"):
        SOLUTION.read_text()


@needs_interpreter
@pytest.mark.parametrize(
    "how", ["import os; os.system('true')", "import subprocess; subprocess.run(['true'])"]
)
def test_another_program_is_found(lab, how):
    code = lab(f"def f(x):\n    {how}\n    return x")
    with pytest.raises(Finding, match="starts another program"):
        code.f(x())
    subprocess.run(["true"], check=True)  # outside of a call anything may run


def test_outside_of_a_call_nothing_is_watched(lab):
    code = lab("def f(x): return x")
    code.f(x())
    assert SOLUTION.read_text()
    with pytest.raises(ZeroDivisionError), code.guarded("f"):
        raise ZeroDivisionError
    assert SOLUTION.read_text()


# ---------------------------------------------------------------- the harness


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (oracle, "attention"),
        (oracle, "Expected"),
        (oracle.Expected, "check"),
        (memory.AccessCheck, "_check"),
        (interpreter, "span"),
        (guard.Guarded, "last_program_only"),
        (torch, "unravel_index"),
    ],
)
def test_a_changed_harness_is_found(lab, monkeypatch, owner, name):
    code = lab("def f(x, change): change(); return x\ndef g(x): return x")
    code.g(x())
    with monkeypatch.context() as patch:
        text = finding(code.f, x(), lambda: patch.setattr(owner, name, lambda *args: None))
        assert text == "f: changes the code that checks it (labs._harness)"
        assert "changes the code" in finding(code.g, x()), "also by a change made earlier"
    code.g(x())


def test_code_swapped_inside_a_function_is_found(lab, monkeypatch):
    code = lab("def f(x, change): change(); return x")
    with monkeypatch.context() as patch:
        easy = (lambda self, got: None).__code__
        change = lambda: patch.setattr(oracle.Expected.check, "__code__", easy)  # noqa: E731
        assert "changes the code that checks it" in finding(code.f, x(), change)


def test_the_harness_may_be_used(lab):
    code = lab("def f(x): oracle.softmax(x); return memory.fenced(x)")
    code.f(x())


# ---------------------------------------------------------------- kernels, counts, what comes back


@needs_interpreter
def test_a_stray_access_is_found_also_where_it_is_swallowed(lab):
    code = lab(KERNEL)
    assert torch.equal(code.double(x(10)), code.last_call[3])
    with pytest.raises(Exception, match="stray load in _double_kernel"):
        code.double(x(10), n=11)
    assert "swallows: stray load in _double_kernel" in finding(code.swallows, x(10))


@needs_interpreter
def test_an_output_that_is_not_written_is_nan(lab):
    code = lab(KERNEL)
    y = code.double(x(10), n=7)
    assert y[7:].isnan().all()
    assert not y[:7].isnan().any()


def test_fresh_memory_is_nan_in_each_of_its_forms(lab):
    code = lab("""
        def f(x):
            return (torch.empty(3), torch.empty_like(x), x.new_empty(3),
                    torch.empty_strided((2, 3), (5, 1)), x.new_empty_strided((2,), (1,)))
        def g(x): return torch.zeros(3), torch.full_like(x, 2.0), x.new_ones(3)
    """)
    for y in code.f(x()):
        assert y.isnan().all()
    for y in code.g(x()):
        assert not y.isnan().any()


@needs_interpreter
def test_counts_are_those_of_the_last_call(lab):
    code = lab(KERNEL + "\ndef f(x): return x @ x.t()\ndef g(x): return x\n")
    code.double(x(10))
    assert code.kernels.launches == {"_double_kernel": 1}
    assert (code.kernels.bytes_loaded, code.kernels.bytes_stored) == (40, 40)
    code.double(x(4))
    assert (code.kernels.bytes_loaded, code.kernels.bytes_stored) == (16, 16)
    code.f(x(2, 8))
    assert code.work.flops == 2 * 2 * 8 * 2
    assert code.work.largest_shape == (2, 2)
    assert code.kernels.bytes_moved == 0
    code.g(x(2, 8))
    assert (code.work.flops, code.work.allocated) == (0, 0)


@needs_interpreter
def test_the_last_program_only(lab):
    code = lab(
        KERNEL.replace("offs = tl", "offs = tl.program_id(0) * BLOCK + tl").replace(
            "[(1,)]", "[(2,)]"
        )
    )
    with code.last_program_only():
        code.double(x(32))
        assert code.kernels.bytes_stored == 64, "16 of 32 numbers"
    y = code.double(x(32))
    assert code.kernels.bytes_stored == 128
    assert not y.isnan().any()
    with code.no_program():
        assert code.double(x(32)).isnan().all(), "nothing but the kernel writes the output"
    assert not code.double(x(32)).isnan().any()


def test_the_last_call_is_kept_and_other_names_are_plain(lab):
    code = lab("LIMIT = 3\nclass C: pass\ndef f(x, k=1): return x * k\ndef g(x): return 1 / 0")
    given = x()
    y = code.f(given, k=2)
    name, args, kwargs, result = code.last_call
    assert (name, kwargs) == ("f", {"k": 2})
    assert args[0] is given
    assert result is y
    assert code.LIMIT == 3
    assert isinstance(code.C(), code.C)
    with pytest.raises(ZeroDivisionError):
        code.g(given)
    assert code.last_call[0] == "f", "the last call that returned"
    assert not hasattr(code, "no_such_name")


def test_poisoned_memory_ends_with_its_block():
    with guard.poisoned():
        assert torch.empty(3).isnan().all()
        assert not F.relu(torch.zeros(3)).isnan().any()
    kept = torch.empty(3).fill_(1.0)
    assert not kept.isnan().any()
