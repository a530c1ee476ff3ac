"""Lab 01, the reference: time a kernel without fooling yourself.

Times are milliseconds. A clock is a function without arguments that gives seconds, and only
differences of its values mean something. `synchronize` is a function without arguments that
returns when the device has done everything it was asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "TB/s": 1e12, "GB/s": 1e9}  # FLOP or bytes a second


def wait_for_gpu() -> None:
    """Returns when the GPU has done all it was asked for; at once where none is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _check_count(least: int, **counts) -> None:
    """Raises ValueError unless every count, given by name, is a whole number from `least` up."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < least:
            raise ValueError(f"{name} must be a whole number from {least} up: got {count!r}")


def _check_finite(**numbers) -> None:
    """Raises ValueError unless every number, given by name, is finite."""
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite: got {number!r}")


# ---------------------------------------------------------------- step 1
def quantiles(samples: Iterable[float], qs: Iterable[float]) -> list[float]:
    """Values below which given shares of the samples lie, interpolated between neighbours.

    Method: Hyndman and Fan, "Sample quantiles in statistical packages" (1996), definition 7, which
    NumPy and torch use too. The lesson is the definition: their functions, and those of
    `statistics`, are not allowed in this step.

    Args:
        samples: n finite numbers, at least one, in any order; any iterable.
        qs: shares from 0 to 1; any iterable.

    Returns:
        One float for each q, in the order of qs. Counted from 0 in sorted order, it lies at place
        q * (n - 1); between two places it is their weighted mean. So 0 gives the smallest sample,
        0.5 the median, 1 the largest. The samples stay as they are.

    Raises:
        ValueError: no sample, a sample that is not finite, or a q outside 0 to 1.
    """
    samples, qs = [float(x) for x in samples], [float(q) for q in qs]
    _check_count(1, **{"the number of samples": len(samples)})
    _check_finite(**{f"samples[{i}]": x for i, x in enumerate(samples)})
    for q in qs:
        if not 0 <= q <= 1:
            raise ValueError(f"every q must lie between 0 and 1: got {q}")
    ordered = sorted(samples)
    last = len(ordered) - 1
    found = []
    for q in qs:
        place = q * last
        below = math.floor(place)
        above = min(below + 1, last)
        weight = place - below
        found.append((1 - weight) * ordered[below] + weight * ordered[above])
    return found


# ---------------------------------------------------------------- step 2
def time_call_ms(
    fn: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] = wait_for_gpu,
) -> float:
    """Time of one call, from an idle device until the device is idle again.

    Args:
        fn: what to time; called once, without arguments.
        clock: gives seconds.
        synchronize: returns when the device is idle.

    Returns:
        Milliseconds: the launches, the kernels and the waiting of this call, and nothing of what
        the device was asked for before it. Nothing is subtracted, and nothing but fn and
        synchronize runs between the two readings of the clock. An error in fn is not caught.
    """
    synchronize()
    start = clock()
    fn()
    synchronize()
    return 1e3 * (clock() - start)


def median_time_ms(
    fn: Callable[[], object],
    warmup: int = 10,
    repeats: int = 100,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] = wait_for_gpu,
) -> float:
    """Median time of a call, each call timed by itself, after a warm-up that does not count.

    Args:
        fn: what to time; called warmup + repeats times, without arguments, each time that
            median_time_ms is called: nothing is remembered from one measurement to the next.
        warmup: calls before the first timed one, from 0 up.
        repeats: timed calls, from 1 up.
        clock, synchronize: as in time_call_ms.

    Returns:
        Milliseconds. With an even number of repeats, the mean of the two in the middle.

    Raises:
        ValueError: warmup or repeats is not such a number; fn is not called then.
    """
    _check_count(0, warmup=warmup)
    _check_count(1, repeats=repeats)
    for _ in range(warmup):
        fn()
    samples = [time_call_ms(fn, clock, synchronize) for _ in range(repeats)]
    return quantiles(samples, [0.5])[0]


# ---------------------------------------------------------------- step 3
def achieved(work: float, ms: float, unit: str) -> float:
    """The rate at which work was done.

    Args:
        work: FLOP or bytes of one call, from 0 up.
        ms: milliseconds of that call, above 0.
        unit: one of UNITS, all decimal: 1 TFLOP/s is 1e12 FLOP a second, 1 TB/s is 1e12 bytes.

    Returns:
        The rate in `unit`.

    Raises:
        ValueError: another unit; work or ms out of range, or not finite.
    """
    _check_finite(work=work, ms=ms)
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}: got {unit!r}")
    if work < 0 or ms <= 0:
        raise ValueError(f"work must be 0 or more, ms above 0: got work={work}, ms={ms}")
    return work / (1e-3 * ms) / UNITS[unit]


# ---------------------------------------------------------------- step 4
def buffers_to_defeat_cache(bytes_per_call: int, cache_bytes: int) -> int:
    """How many sets of buffers to use in turn, so that no call finds its data in the cache.

    Args:
        bytes_per_call: bytes that one call reads and writes, from 1 up.
        cache_bytes: size of the cache, from 0 up.

    Returns:
        The smallest number n of sets such that the n - 1 others, used between two calls on the
        same one, hold at least cache_bytes together.

    Raises:
        ValueError: the numbers are not such.
    """
    _check_count(1, bytes_per_call=bytes_per_call)
    _check_count(0, cache_bytes=cache_bytes)
    return 1 + -(-cache_bytes // bytes_per_call)  # rounded up


def rotate(fn: Callable[..., object], inputs: Sequence[tuple]) -> Callable[[], object]:
    """A function without arguments that calls fn on one set of inputs after the other.

    Args:
        fn: what to call; not called yet.
        inputs: sets of arguments, at least one: fn(*inputs[0]) first, and after the last one again
            from the start.

    Returns:
        The function. It returns what fn returns, may be called any number of times, and keeps its
        own place among the inputs, whatever other rotations exist of the same fn and inputs.

    Raises:
        ValueError: inputs is empty.
    """
    _check_count(1, **{"the number of inputs": len(inputs)})
    calls = 0

    def call():
        nonlocal calls
        args = inputs[calls % len(inputs)]
        calls += 1
        return fn(*args)

    return call


# ---------------------------------------------------------------- step 5
class Comparison(NamedTuple):
    """How A compares with B, pair by pair: below 1, A is faster."""

    ratio: float  # median of the pairs' ratios
    q1: float  # between q1 and q3 lies the middle half of them
    q3: float


def compare(
    fn_a: Callable[[], object],
    fn_b: Callable[[], object],
    pairs: int = 50,
    warmup: int = 10,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] = wait_for_gpu,
) -> Comparison:
    """Compares two functions on a device that drifts, by timing them in turn.

    Args:
        fn_a, fn_b: what to compare; each is called warmup + pairs times, without arguments. They
            may be the same function, which is then called for both.
        pairs: timed pairs of one call each, from 1 up. The order changes from pair to pair: A B,
            then B A, then A B and so on, so that neither is always the later one. Prefer an even
            number: a steady drift cancels only between a pair and its mirror image.
        warmup: calls of each before the first pair, not timed, from 0 up.
        clock, synchronize: as in time_call_ms; each call is timed as time_call_ms does. The clock
            must be fine enough that no time is 0: dividing by it is an error.

    Returns:
        A Comparison: median, lower and upper quartile (0.5, 0.25 and 0.75, as `quantiles` defines
        them) of the ratios a / b, where a and b are the two times of one pair.

    Raises:
        ValueError: pairs or warmup is not such a number; nothing is called then.
    """
    _check_count(1, pairs=pairs)
    _check_count(0, warmup=warmup)
    for _ in range(warmup):
        fn_a()
        fn_b()
    times_a, times_b = [], []
    for i in range(pairs):
        turns = [(fn_a, times_a), (fn_b, times_b)]
        for fn, times in turns if i % 2 == 0 else reversed(turns):
            times.append(time_call_ms(fn, clock, synchronize))
    ratios = [a / b for a, b in zip(times_a, times_b, strict=True)]
    q1, ratio, q3 = quantiles(ratios, [0.25, 0.5, 0.75])
    return Comparison(ratio, q1, q3)
