"""The counts of work.py against sums done by hand."""

import pytest
import torch

from labs._harness import interpreter, work
from labs._impl import load

F32 = 4
needs_interpreter = pytest.mark.skipif(
    interpreter.unavailable() is not None, reason=str(interpreter.unavailable())
)


def counted(fn):
    with work.count_torch() as found:
        fn()
    return found


def test_a_matrix_product_reads_both_and_writes_one():
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    found = counted(lambda: a @ b)
    assert found.flops == 2 * 8 * 16 * 4
    assert found.moved == F32 * (8 * 16 + 16 * 4 + 8 * 4)
    assert found.allocated == found.largest == F32 * 8 * 4
    assert found.largest_shape == (8, 4)


@pytest.mark.parametrize(
    ("operation", "moved"),
    [
        (lambda x: x.view(-1), 0),
        (lambda x: x[:2].transpose(0, 1), 0),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: x.new_empty(9), 0),
        (lambda x: torch.zeros_like(x), 32),
        (lambda x: x.zero_(), 32),
        (lambda x: x.copy_(torch.ones(1).expand(4, 8)), 32 + 32 + 1),  # ones write 1, read 32 times
        (lambda x: x.add_(1.0), 64),
        (lambda x: x.exp(), 64),
    ],
    ids="view slice empty_like new_empty zeros_like zero_ copy_ add_ exp".split(),
)
def test_elements_moved(operation, moved):
    x = torch.randn(4, 8)
    assert counted(lambda: operation(x)).moved == F32 * moved


def test_batched_product_is_not_counted_again_for_its_view():
    a, b = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)  # @ ends in _unsafe_view
    assert counted(lambda: a @ b).moved == 3 * F32 * a.numel()


def test_peak_is_what_lives_at_one_time():
    x = torch.randn(1000)

    def chain():
        y = x + 1  # 4000
        y = y + 1  # 8000 while both live
        return y + 1

    found = counted(chain)
    assert found.peak == 8000
    assert found.allocated == 12000
    assert found.live == 0


@needs_interpreter
def test_a_kernel_is_counted_by_tensor_and_its_launch_makes_only_the_output():
    lab = load("06", "solution")
    x = torch.randn(5, 37)
    with work.count_torch() as made, work.count_kernels() as found:
        y = lab.triton_softmax(x)
    assert found.loaded == {("_softmax_kernel", "x_ptr"): F32 * 5 * 37}
    assert found.stored == {("_softmax_kernel", "y_ptr"): F32 * 5 * 37}
    assert found.launches == {"_softmax_kernel": 5}
    assert made.peak == F32 * y.numel()


@needs_interpreter
def test_dot_flops_of_a_kernel():
    lab = load("06", "solution")
    q = torch.randn(1, 2, 32, 16)
    with work.count_kernels() as found:
        lab.triton_flash_attention(q, q, q, causal=True, block_m=16, block_n=16)
    tiles = 2 * 3  # heads, tiles up to the diagonal
    assert found.dot_flops == tiles * 2 * (2 * 16 * 16 * 16)


@needs_interpreter
def test_a_kernel_that_never_ran_counts_zero():
    with work.count_kernels() as found:
        torch.softmax(torch.randn(4, 4), dim=-1)
    assert found.bytes_moved == 0
    assert not found.launches
