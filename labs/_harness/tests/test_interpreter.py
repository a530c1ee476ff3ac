"""interpreter.py: what observers are told of kernels, and that nothing of the watching stays."""

import numpy as np
import pytest
import torch

from labs._harness import interpreter
from labs._harness.runtime import Runtime

try:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter as ti
except ImportError:
    triton = None

pytestmark = pytest.mark.skipif(
    interpreter.unavailable() is not None, reason=str(interpreter.unavailable())
)

if triton is not None:

    @triton.jit
    def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)

    @triton.jit
    def _atomic_kernel(x_ptr, y_ptr):
        offs = tl.arange(0, 8)
        tl.atomic_add(x_ptr + offs, 1.0, mask=offs < 5)
        tl.atomic_cas(y_ptr, 0, 7)

    @triton.jit
    def _dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
        a = tl.load(a_ptr + m * K + k[None, :])  # (M, K)
        b = tl.load(b_ptr + k[:, None] * N + n)  # (K, N)
        tl.store(c_ptr + m * N + n, tl.dot(a, b))

    @triton.jit
    def _block_pointer_kernel(x_ptr, y_ptr, n):
        x = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (16,), (0,))
        y = tl.make_block_ptr(y_ptr, (n,), (1,), (0,), (16,), (0,))
        tl.store(y, tl.load(x, boundary_check=(0,), padding_option="zero"), boundary_check=(0,))

    @triton.jit
    def _descriptor_kernel(x, y):
        y.store([0, 0], x.load([1, 0]))

    @triton.jit
    def _scalar_kernel(x_ptr, y_ptr):
        tl.store(y_ptr + tl.program_id(1), tl.load(x_ptr + tl.program_id(0)))

    @triton.jit
    def _masked_kernel(x_ptr, y_ptr, z_ptr, n):
        offs = tl.arange(0, 8)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n))
        tl.store(z_ptr + offs, tl.load(x_ptr + offs, mask=offs < n, other=5))

    @triton.jit
    def _one_element_kernel(x_ptr, y_ptr, n):
        offs = tl.arange(0, 1)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n, other=0.0))

    @triton.jit
    def _broken_kernel(x_ptr):
        tl.load(x_ptr + undefined_name)  # noqa: F821

    @triton.jit
    def _larger_kernel(x_ptr, y_ptr, z_ptr):
        offs = tl.arange(0, 4)
        x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
        tl.store(z_ptr + offs, tl.maximum(x, y))
        tl.store(z_ptr + 4 + offs, tl.minimum(x, y))

    @triton.jit
    def _joined_masks_kernel(x_ptr, y_ptr, n):
        offs = tl.arange(0, 8)
        mask = (offs < n) & (tl.program_id(0) < tl.num_programs(0))
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=0.0), mask=mask)

    _INTERPRETER, _CALL = ti._interpreter, ti.GridExecutor.__call__
    _PATCH = getattr(ti, "_patch_lang", None)


class Recorder(interpreter.Observer):
    """Keeps everything it is told."""

    def __init__(self):
        self.launches, self.programs, self.events, self.dots = [], [], [], []

    def launch(self, launch):
        self.launches.append(launch)

    def program(self, launch):
        self.programs.append((launch.kernel, launch.program))
        return True

    def load(self, launch, address, mask, itemsize):
        self._keep("load", launch, address, mask, itemsize)

    def store(self, launch, address, mask, itemsize):
        self._keep("store", launch, address, mask, itemsize)

    def dot(self, launch, m, n, k):
        self.dots.append((launch.kernel, m, n, k))

    def _keep(self, what, launch, address, mask, itemsize):
        assert address.dtype == np.uint64
        assert mask.shape == address.shape
        active = address[mask]
        names = {launch.tensor_at(int(a)) for a in active.ravel()}
        self.events.append((what, "".join(sorted(names)), len(active), itemsize))


def recorded(kernel, grid, *args, **kwargs) -> Recorder:
    recorder = Recorder()
    with interpreter.observe(recorder):
        kernel[grid](*args, **kwargs)
    return recorder


def test_masked_loads_and_stores_of_each_program():
    x, y = torch.randn(20), torch.zeros(20)
    found = recorded(_copy_kernel, (2,), x, y, n=20, BLOCK=16)
    assert torch.equal(x, y)
    assert found.events == [
        ("load", "x_ptr", 16, 4),
        ("store", "y_ptr", 16, 4),
        ("load", "x_ptr", 4, 4),
        ("store", "y_ptr", 4, 4),
    ]


def test_a_launch_is_announced_once_with_its_grid_and_tensors():
    x, y = torch.randn(20), torch.zeros(20)
    found = recorded(_copy_kernel, (2,), x, y_ptr=y, n=20, BLOCK=16)
    (launch,) = found.launches
    assert (launch.kernel, launch.grid, launch.programs) == ("_copy_kernel", (2, 1, 1), 2)
    assert list(launch.tensors) == ["x_ptr", "y_ptr"]
    assert launch.tensors["y_ptr"] is y
    assert [p for _, p in found.programs] == [(0, 0, 0), (1, 0, 0)]
    assert launch.tensor_at(x.data_ptr() + 4) == "x_ptr"
    assert launch.tensor_at(x.data_ptr() - 1) == "?"


def test_scalar_accesses_and_two_axes_of_programs():
    x, y = torch.randn(2).half(), torch.zeros(3).half()
    found = recorded(_scalar_kernel, (2, 3), x, y)
    assert found.events[:2] == [("load", "x_ptr", 1, 2), ("store", "y_ptr", 1, 2)]
    assert {p for _, p in found.programs} == {(i, j, 0) for i in range(2) for j in range(3)}


def test_atomics_are_a_load_and_a_store():
    x, y = torch.zeros(8), torch.zeros(1, dtype=torch.int32)
    found = recorded(_atomic_kernel, (1,), x, y)
    assert x.tolist() == [1.0] * 5 + [0.0] * 3
    assert y.item() == 7
    assert found.events == [
        ("load", "x_ptr", 5, 4),
        ("store", "x_ptr", 5, 4),
        ("load", "y_ptr", 1, 4),
        ("store", "y_ptr", 1, 4),
    ]


def test_a_dot_is_told_with_its_sizes():
    a, b, c = torch.randn(16, 64), torch.randn(64, 32), torch.zeros(16, 32)
    found = recorded(_dot_kernel, (1,), a, b, c, M=16, N=32, K=64)
    assert found.dots == [("_dot_kernel", 16, 32, 64)]
    assert torch.allclose(c, a @ b, atol=1e-4)


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointers_are_watched_within_their_bounds():
    x, y = torch.randn(11), torch.zeros(11)
    try:
        found = recorded(_block_pointer_kernel, (1,), x, y, 11)
    except Exception as error:
        if "Block pointers have been removed" not in str(error):
            raise
        pytest.skip("this release of Triton has no block pointers any more")
    assert torch.equal(x, y)
    assert found.events == [("load", "x_ptr", 11, 4), ("store", "y_ptr", 11, 4)]


def test_tensors_of_host_descriptors_are_watched_within_their_bounds():
    descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
    x, y = torch.randn(3, 16), torch.zeros(4, 16)
    tiles = (descriptor.from_tensor(z, [4, 16]) for z in (x, y))
    found = recorded(_descriptor_kernel, (1,), *tiles)
    assert torch.equal(y[:2], x[1:])
    assert not y[2:].any()
    assert found.events == [("load", "x", 32, 4), ("store", "y", 64, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_masked_load_without_other_gives_nan(dtype):
    x, y, z = torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    recorded(_masked_kernel, (1,), x, y, z, 3)
    assert y[:3].tolist() == [1.0] * 3
    assert y[3:].isnan().all()
    assert z.tolist() == [1.0] * 3 + [5.0] * 5


def test_a_masked_load_of_one_element_has_its_zero():
    x, y = torch.ones(1), torch.full((1,), 7.0)
    recorded(_one_element_kernel, (1,), x, y, 0)
    assert y.item() == 0


def test_a_masked_load_of_integers_is_left_as_it_is():
    x, y, z = (torch.ones(8, dtype=torch.int32) for _ in range(3))
    recorded(_masked_kernel, (1,), x, y, z, 3)
    assert y[:3].tolist() == [1] * 3
    assert z.tolist() == [1] * 3 + [5] * 5


def test_an_observer_can_skip_programs():
    class Second(Recorder):
        def program(self, launch):
            super().program(launch)
            return launch.program == (1, 0, 0)

    x, y = torch.randn(40), torch.zeros(40)
    second, other = Second(), Recorder()
    with interpreter.observe(second, other):
        _copy_kernel[(3,)](x, y, 40, BLOCK=16)
    assert torch.equal(y[16:32], x[16:32])
    assert not y[:16].any()
    assert not y[32:].any()
    assert len(other.programs) == 3, "all observers are asked"
    assert len(other.events) == 2


def test_observers_nest():
    x, y = torch.randn(4), torch.zeros(4)
    outer, inner = Recorder(), Recorder()
    with interpreter.observe(outer):
        with interpreter.observe(inner):
            _copy_kernel[(1,)](x, y, 4, BLOCK=4)
        _copy_kernel[(1,)](x, y, 4, BLOCK=4)
    _copy_kernel[(1,)](x, y, 4, BLOCK=4)
    assert len(inner.events) == 2
    assert len(outer.events) == 4
    assert len(outer.launches) == 2


def test_a_mask_joined_with_a_number_selects_the_same_lanes():
    x, y = torch.randn(5), torch.zeros(5)
    recorder = recorded(_joined_masks_kernel, (1,), x, y, 5)
    assert recorder.events == [("load", "x_ptr", 5, 4), ("store", "y_ptr", 5, 4)]


def test_the_larger_of_a_number_and_nan_is_the_number_as_on_a_gpu():
    x, y = torch.tensor([1.0, np.nan, np.nan, -1.0]), torch.tensor([np.nan, 2.0, np.nan, 3.0])
    z = torch.zeros(8)
    recorded(_larger_kernel, (1,), x, y, z)
    want = torch.tensor([1.0, 2.0, np.nan, 3.0, 1.0, 2.0, np.nan, -1.0])
    assert torch.equal(z.nan_to_num(9.0), want.nan_to_num(9.0))


def parts() -> tuple:
    """The private parts of the interpreter that are replaced while kernels are watched."""
    own = sorted(n for n in vars(ti.interpreter_builder) if n.startswith("create_"))
    return ti._interpreter, ti.GridExecutor.__call__, own, getattr(ti, "_patch_lang", None)


def test_what_is_replaced_is_what_the_other_tests_look_at():
    assert parts()[2] == []
    with interpreter.observe(Recorder()):
        assert {"create_dot", "create_masked_load"} <= set(parts()[2])
        assert parts()[0] is ti._interpreter is not _INTERPRETER
        assert parts()[1] is not _CALL
    assert parts() == (_INTERPRETER, _CALL, [], _PATCH)


def test_nothing_is_left_of_the_watching():
    before = parts()
    x, y = torch.randn(4), torch.zeros(4)
    recorder = Recorder()
    with interpreter.observe(recorder):
        assert parts() != before
        with interpreter.observe(Recorder()):
            pass
        assert parts() != before, "the inner block must not end the outer one"
    assert parts() == before
    with pytest.raises(ZeroDivisionError), interpreter.observe(recorder):
        raise ZeroDivisionError
    assert parts() == before
    _copy_kernel[(1,)](x, y, 4, BLOCK=4)
    assert not recorder.events


def test_nothing_is_left_after_an_error_in_a_kernel_or_in_an_observer():
    class Angry(interpreter.Observer):
        def load(self, launch, address, mask, itemsize):
            raise AssertionError("no")

    before = parts()
    x, y = torch.randn(4), torch.zeros(4)
    with pytest.raises(Exception, match="undefined_name"), interpreter.observe(Recorder()):
        _broken_kernel[(1,)](x)
    with pytest.raises(Exception, match="no"), interpreter.observe(Angry()):
        _copy_kernel[(1,)](x, y, 4, BLOCK=4)
    assert parts() == before
    assert interpreter._state.launch is None
    found = recorded(_copy_kernel, (1,), x, y, 4, BLOCK=4)
    assert len(found.events) == 2, "a later block is not disturbed by it"


# ---------------------------------------------------------------- where kernels cannot be watched


@pytest.mark.parametrize(
    ("here", "says"),
    [
        (Runtime("cpu", True, None, "test"), "Triton is not installed"),
        (Runtime("cuda", False, "3.7.1", "test"), "kernels run on the GPU; watching them needs"),
    ],
)
def test_the_reason_where_there_is_no_interpreter(monkeypatch, here, says):
    monkeypatch.setattr(interpreter.runtime, "setup", lambda: here)
    assert interpreter.unavailable().startswith(says)
    with pytest.raises(RuntimeError, match=says), interpreter.observe(Recorder()):
        pass


MISSING = """
import labs
from triton.runtime import interpreter as ti

del {what}.{name}

from labs._harness import interpreter

print(interpreter.unavailable())
try:
    with interpreter.observe():
        pass
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("ti._interpreter", "load"),
        ("ti._interpreter", "store"),
        ("ti._interpreter", "atomic_cas"),
        ("ti", "GridExecutor"),
        ("type(ti.interpreter_builder)", "create_masked_load"),
        ("type(ti.interpreter_builder)", "create_dot"),
    ],
)
def test_the_reason_where_a_release_has_moved_a_private_name(repository, what, name):
    repository.write("missing.py", MISSING.format(what=what, name=name))
    reason, error = repository.run("missing").lines
    assert reason.startswith("Triton 3.")
    assert "has moved" in reason
    assert name in reason
    assert error == reason


def test_span_counts_the_gaps():
    assert interpreter.span(torch.zeros(3, 4)) == 12
    assert interpreter.span(torch.zeros(3, 10)[:, :4]) == 24
    assert interpreter.span(torch.zeros(4).expand(3, 4)) == 4
    assert interpreter.span(torch.zeros(0, 4)) == 0
    assert interpreter.span(torch.zeros(())) == 1


def test_types_of_tiles_are_those_that_triton_makes():
    make = tl.block_type.__init__
    wanted = [
        (tl.float32, [16]),
        (tl.float16, [16]),
        (tl.float16, [16, 32]),
        (tl.float16, [32, 16]),
    ]
    plain = [tl.block_type(*one) for one in wanted]
    with interpreter.observe(interpreter.Observer()):
        for _ in "ab":
            got = [tl.block_type(*one) for one in wanted]
            assert [vars(one)["name"] for one in got] == [one.name for one in plain]
            assert got == plain
            for bad in ([12], []):
                with pytest.raises((TypeError, ValueError)):
                    tl.block_type(tl.float32, bad)
    assert tl.block_type.__init__ is make
