"""memory.py: red zones, gaps, and the check of each access of a kernel."""

import re

import pytest
import torch

from labs._harness import interpreter, memory, oracle

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

needs_interpreter = pytest.mark.skipif(
    interpreter.unavailable() is not None, reason=str(interpreter.unavailable())
)
LAYOUTS = ["contiguous", "transposed", "strided"]

if triton is not None:

    @triton.jit
    def _rows_kernel(
        x_ptr,
        y_ptr,
        stride_x,
        stride_y,
        first,
        n_read,
        n_written,
        BLOCK: tl.constexpr,
    ):
        """Row by row: loads columns `first` to n_read, stores columns 0 to n_written."""
        row = tl.program_id(0)
        offs = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + first + offs, mask=first + offs < n_read, other=0.0)
        tl.store(y_ptr + row * stride_y + offs, x, mask=offs < n_written)

    @triton.jit
    def _far_kernel(x_ptr, stride, WIDE: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
        tl.store(x_ptr + row * stride, 1)

    @triton.jit
    def _add_kernel(x_ptr, n):
        tl.atomic_add(x_ptr + tl.arange(0, 8), 1.0, mask=tl.arange(0, 8) < n)


# ---------------------------------------------------------------- red zones


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_fenced_copy_has_the_same_numbers_strides_and_dtype(layout, dtype):
    x = oracle.inputs(2, 3, 5, 4, dtype=dtype, layout=layout)
    copy = memory.fenced(x)
    assert torch.equal(copy, x)
    assert (copy.stride(), copy.dtype, copy.shape) == (x.stride(), x.dtype, x.shape)
    assert copy.data_ptr() != x.data_ptr()
    assert memory.fence_intact(copy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_around_and_between_the_elements_is_nan(layout):
    x = memory.fenced(oracle.inputs(2, 3, 5, 4, layout=layout))
    span = interpreter.span(x)
    buffer = x.as_strided((span + 2 * memory.RED_ZONE,), (1,), 0)
    assert buffer[: memory.RED_ZONE].isnan().all()
    assert buffer[-memory.RED_ZONE :].isnan().all()
    assert int((~buffer.isnan()).sum()) == x.numel()


@pytest.mark.parametrize("place", ["before", "after", "far after", "gap"])
def test_a_write_outside_is_seen(place):
    x = memory.fenced(oracle.inputs(3, 4, layout="strided"))
    span = interpreter.span(x)
    assert memory.fence_intact(x)
    x[1, 2] = 7.0
    assert memory.fence_intact(x), "its own elements may be written"
    at = {"before": -1, "after": span, "far after": span + memory.RED_ZONE - 1, "gap": 4}[place]
    x.as_strided((1,), (1,), x.storage_offset() + at).fill_(0.0)
    assert not memory.fence_intact(x)


def test_a_fence_is_not_part_of_autograd():
    x = oracle.inputs(3).requires_grad_()
    assert not memory.fenced(x).requires_grad


def test_fresh_memory_is_poisoned_by_type():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.zeros(3, dtype=dtype)
        memory.poison(x)
        assert x.isnan().all()
    for dtype in (torch.int32, torch.int64, torch.uint8):
        x = torch.zeros(3, dtype=dtype)
        memory.poison(x)
        assert (x == torch.iinfo(dtype).max).all()
    x = torch.zeros(3, dtype=torch.bool)
    memory.poison(x)
    assert not x.any()


# ---------------------------------------------------------------- each access of a kernel


def rows(x, y, first=0, n_read=None, n_written=None, kernel_stride=None) -> memory.AccessCheck:
    """Copies the rows of x to y under check; the arguments make it stray."""
    check = memory.AccessCheck()
    with interpreter.observe(check):
        _rows_kernel[(x.shape[0],)](
            x,
            y,
            kernel_stride or x.stride(0),
            y.stride(0),
            first,
            x.shape[1] if n_read is None else n_read,
            y.shape[1] if n_written is None else n_written,
            BLOCK=16,
        )
    return check


def stray(*args, **kwargs) -> str:
    """What is said of the access, through the interpreter's own exception."""
    check = memory.AccessCheck()
    check_all = rows if not callable(args[0]) else args[0]
    args = args if check_all is rows else args[1:]
    with pytest.raises(Exception, match="stray") as caught:
        check = check_all(*args, **kwargs)
    assert not check.findings
    error = caught.value
    while not isinstance(error, memory.StrayAccess):
        error = error.__cause__
    return str(error)


def matrix(n_rows=3, n_cols=10, layout="contiguous"):
    return memory.fenced(oracle.inputs(n_rows, n_cols, layout=layout))


@needs_interpreter
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_what_is_right_passes(layout):
    x, y = matrix(layout=layout), matrix(layout=layout)
    assert not rows(x, y).findings
    assert torch.equal(x, y)
    wide = matrix(3, 40)
    assert not rows(wide[:, 5:15], y).findings, "part of a larger tensor"
    assert torch.equal(wide[:, 5:15], y)
    assert not rows(matrix(1, 10).expand(3, 10), y).findings, "one row for all"
    assert not rows(x.t().t(), y).findings
    assert not rows(matrix(3, 10), matrix(3, 10), n_read=0, n_written=0).findings, "no lane active"
    assert memory.fence_intact(x)
    assert memory.fence_intact(y)


@needs_interpreter
def test_a_load_past_the_end_names_tensor_program_and_offset():
    text = stray(matrix(), matrix(), n_read=16)
    assert text.startswith("stray load in _rows_kernel, program (2, 0, 0): 6 of 16 lanes lie out")
    assert "The first is element 30 of x_ptr, shape (3, 10), strides (10, 1): 30 elements" in text
    assert text.endswith("Is a mask missing, or a stride or a descriptor's shape wrong?")


@needs_interpreter
def test_a_store_past_the_end_is_stopped_before_it_happens():
    y = matrix()
    text = stray(matrix(), y, n_written=11)
    assert text.startswith("stray store in _rows_kernel, program (2, 0, 0): 1 of 11 lanes lie out")
    assert "element 30 of y_ptr" in text
    assert memory.fence_intact(y)


@needs_interpreter
@pytest.mark.parametrize(
    ("kwargs", "what", "name", "element"),
    [
        ({"n_read": 11}, "load", "x_ptr", 10),
        ({"n_written": 11}, "store", "y_ptr", 10),
        ({"first": 10, "n_read": 11}, "load", "x_ptr", 10),
    ],
)
def test_a_gap_between_strided_rows_is_outside(kwargs, what, name, element):
    x, y = matrix(layout="strided"), matrix(layout="strided")
    text = stray(x, y, **kwargs)
    assert text.startswith(f"stray {what} in _rows_kernel, program (0, 0, 0): 1 of")
    assert f"element {element} of {name}, shape (3, 10), strides (23, 1)" in text
    assert memory.fence_intact(y)


@needs_interpreter
def test_a_gap_holds_also_where_the_tensor_is_turned():
    x = matrix(10, 6).t()[:, :4]  # shape (6, 4), strides (1, 6): columns 4 and on are outside
    text = stray(x, matrix(6, 4), n_read=1, kernel_stride=25)
    assert "element 25 of x_ptr, shape (6, 4), strides (1, 6)" in text


@needs_interpreter
def test_an_offset_before_the_first_element_is_negative():
    text = stray(matrix(), matrix(), first=-2)
    assert "program (0, 0, 0): 2 of 12 lanes" in text
    assert "element -2 of x_ptr" in text


@needs_interpreter
def test_a_wrong_stride_is_found_though_the_values_are_thrown_away():
    text = stray(matrix(), matrix(), kernel_stride=40, n_written=0)
    assert "program (1, 0, 0): 10 of 10 lanes" in text
    assert "element 40 of x_ptr" in text


@needs_interpreter
def test_an_atomic_is_checked():
    def add(n):
        check, x = memory.AccessCheck(), memory.fenced(torch.zeros(5))
        with interpreter.observe(check):
            _add_kernel[(1,)](x, n)
        return check

    assert not add(5).findings
    assert "element 5 of x_ptr" in stray(add, 6)


@needs_interpreter
def test_a_finding_is_kept_where_the_exception_was_swallowed():
    check = memory.AccessCheck()
    x, y = matrix(), matrix()
    with interpreter.observe(check):
        try:
            _rows_kernel[(3,)](x, y, 10, 10, 0, 16, 10, BLOCK=16)
        except Exception:  # noqa: BLE001
            pass
    assert len(check.findings) == 1
    assert check.findings[0].startswith("stray load")


@needs_interpreter
def test_each_launch_has_tensors_of_its_own():
    check = memory.AccessCheck()
    with interpreter.observe(check):
        for n in (10, 3, 16):
            x = matrix(2, n)
            _rows_kernel[(2,)](x, matrix(2, n), n, n, 0, n, n, BLOCK=16)
    assert not check.findings


# ---------------------------------------------------------------- far away


def far(stride=2**30, n=3):
    try:
        return torch.empty((n - 1) * stride + 1, dtype=torch.int8)
    except RuntimeError as error:
        pytest.skip(f"needs 2 GB of address space: {str(error)[:60]}")


@needs_interpreter
def test_the_last_program_only_writes_beyond_32_bits():
    x = far()
    touched = []

    class Stores(interpreter.Observer):
        def store(self, launch, address, mask, itemsize):
            touched.append((launch.program, int(address.ravel()[0]) - x.data_ptr()))

    with interpreter.observe(memory.LastProgramOnly(), memory.AccessCheck(), Stores()):
        _far_kernel[(3,)](x, 2**30, WIDE=True)
    assert touched == [((2, 0, 0), 2**31)]
    assert x[-1] == 1


@needs_interpreter
def test_a_product_that_wraps_is_a_stray_access_with_that_question():
    def launch():
        with interpreter.observe(memory.LastProgramOnly(), memory.AccessCheck()):
            _far_kernel[(3,)](far(), 2**30, WIDE=False)

    text = stray(launch)
    assert re.search(rf"element {-(2**31)} of x_ptr", text)
    assert "wrap past 2**31" in text


def programs(observer, *grid) -> list[tuple]:
    launch = interpreter.Launch("k", {}, grid)
    every = [(i, j, k) for i in range(grid[0]) for j in range(grid[1]) for k in range(grid[2])]
    return [launch.program for launch.program in every if observer.program(launch)]


def test_which_programs_are_the_last():
    assert programs(memory.LastProgramOnly(), 3, 1, 1) == [(2, 0, 0)]
    assert programs(memory.LastProgramOnly(), 1, 1, 1) == [(0, 0, 0)]
    # With several axes, those of all tiles on axis 0: a kernel may deal them out in any order.
    assert programs(memory.LastProgramOnly(), 2, 3, 1) == [(0, 2, 0), (1, 2, 0)]
    assert programs(memory.LastProgramOnly(), 2, 3, 2) == [(0, 2, 1), (1, 2, 1)]
    assert programs(memory.NoProgram(), 2, 3, 2) == []
