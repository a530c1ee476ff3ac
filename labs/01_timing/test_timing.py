"""Tests of lab 01. Run `pytest labs/01_timing`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
Nothing here looks at the real clock of a CPU: times come from a simulated GPU (simulated_gpu.py),
whose figures are exact. Tests named test_gpu_* need a real one.
"""

from __future__ import annotations

import inspect
import math
import statistics
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from labs._harness import runtime
from labs._harness.cases import step
from labs._impl import load

STEPS = {
    1: "quantiles",
    2: "median_time_ms",
    3: "achieved",
    4: "buffers_to_defeat_cache",
    5: "compare",
}

INF, NAN = math.inf, math.nan
LAUNCH = 0.005  # ms that the simulated host spends on a launch
LINE = 128  # bytes
MiB = 1 << 20

needs_gpu = pytest.mark.skipif(
    runtime.setup().device != "cuda",
    reason="times of real kernels need an NVIDIA GPU, compute capability 8.0 or newer",
)

step1 = step(1)
step2 = step(2)
step3 = step(3)
step4 = step(4)
step5 = step(5)


# ---------------------------------------------------------------- the test's own tools


def simulated(**options):
    """A simulated GPU; its class is read from simulated_gpu.py, never from the student's file."""
    return load(__file__, str(Path(__file__).with_name("simulated_gpu.py"))).SimulatedGpu(**options)


def check(case, got, want, known=(), unit=" ms", rel=1e-6):
    """Fails unless got is want; `known` holds (wrong value, what usually gives it)."""
    assert got is not None, f"{case}: got None; is the return missing?"
    got = float(got)
    meaning = next((text for value, text in known if math.isclose(got, value, rel_tol=rel)), None)
    text = f"{case}: want {want:.6g}{unit}, got {got:.6g}{unit}"
    assert math.isclose(got, want, rel_tol=rel, abs_tol=1e-12), text + (
        f". That is {meaning}" if meaning else ""
    )


def script(gpu, times, calls=None, name=""):
    """A function that asks for a kernel of the next of `times` (ms), the last one ever after.

    It appends `name` to the list `calls` each time it is called.
    """
    calls = [] if calls is None else calls
    mine = 0

    def fn():
        nonlocal mine
        calls.append(name)
        gpu.launch(times[min(mine, len(times) - 1)])
        mine += 1

    return fn


def true_quantile(samples, q):
    """Definition 7 in exact fractions."""
    ordered = sorted(map(Fraction, samples))
    place = Fraction(q) * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


def true_median(samples):
    return true_quantile(samples, 0.5)


def unguarded(function):
    """The function itself, without the guard around it."""
    return getattr(function, "__wrapped__", function)


def watched(function, *args):
    """[(name, file)] of all that `function(*args)` calls, in order; built-ins have no file."""
    seen = []

    def watch(frame, event, arg):
        if event == "call":
            seen.append((frame.f_code.co_name, frame.f_code.co_filename))
        elif event == "c_call":
            seen.append((arg.__name__, ""))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return seen


def mean(samples):
    return math.fsum(samples) / len(samples)


def random_times(n):
    """n times between 1 and 3 ms, from the test's seed."""
    return (1 + 2 * torch.rand(n, dtype=torch.float64)).tolist()


# ---------------------------------------------------------------- step 1


def check_quantiles(lab, samples, qs):
    got = lab.quantiles(samples, qs)
    case = f"quantiles of {len(samples)} samples"
    if len(samples) <= 6:
        case = f"quantiles of {samples}"
    assert isinstance(got, (list, tuple)), f"{case}: want a list, got {type(got).__name__}"
    assert len(got) == len(qs), f"{case}: want one value for each of {len(qs)} qs, got {len(got)}"
    ordered = sorted(samples)
    for q, x in zip(qs, got, strict=True):
        n = len(ordered)
        known = [
            (ordered[min(int(q * n), n - 1)], "the sample at place q * n, without interpolation"),
            (ordered[math.floor(q * (n - 1))], "the sample below: interpolate between neighbours"),
            (ordered[math.ceil(q * (n - 1))], "the sample above: interpolate between neighbours"),
            (true_quantile(samples, 1 - q), "the quantile of 1 - q: are the two weights swapped?"),
        ]
        check(f"{case}, q = {q}", x, true_quantile(samples, q), known, unit="", rel=1e-12)


@step1
def test_quantiles_worked_example(lab):
    check_quantiles(lab, [1.0, 2.0, 3.0, 4.0], [0.25, 0.5, 0.75])  # 1.75, 2.5, 3.25
    check_quantiles(lab, [2.0, 2.1, 2.0, 9.0, 2.2], [0.25, 0.5, 0.75, 0.9])  # 2, 2.1, 2.2, 6.28


@step1
def test_quantiles_interpolate(lab):
    for n in (1, 2, 3, 4, 7, 100, 101):
        qs = [0.0, 0.125, 0.25, 0.5, 0.625, 0.75, 1.0, 0.1, 0.9, 0.99]
        check_quantiles(lab, random_times(n), qs)
    check_quantiles(lab, random_times(1000), [1 / 3, 0.123456789, 0.987654321])


@step1
def test_quantiles_ends(lab):
    for samples in ([7], [3.0, 1.0], [5.0, 2.0, 9.0, 4.0]):
        got = lab.quantiles(samples, [0, 1])
        assert got == [min(samples), max(samples)], (
            f"q = 0 and 1 of {samples}: want the smallest and the largest, "
            f"{min(samples)} and {max(samples)}; got {got}"
        )


@step1
def test_quantiles_take_any_iterable_in_any_order(lab):
    samples, want = [5.0, 1.0, 4.0, 2.0, 3.0], [4.0, 2.0, 3.0]  # qs are not in order either
    kinds = {
        "a list": samples,
        "a tuple": tuple(samples),
        "a generator": (x for x in samples),
        "a NumPy array": np.array(samples),
        "a tensor": torch.tensor(samples),
        "whole numbers": [5, 1, 4, 2, 3],
    }
    for kind, given in kinds.items():
        got = lab.quantiles(given, (q for q in (0.75, 0.25, 0.5)))
        assert list(map(float, got)) == want, f"{kind}: want {want}, got {got}"
    assert list(lab.quantiles(samples, [])) == [], "no q: want an empty list"


@step1
def test_quantiles_leave_the_samples_as_they_are(lab):
    samples, qs = [3.0, 1.0, 2.0], [0.9, 0.1]
    lab.quantiles(samples, qs)
    assert samples == [3.0, 1.0, 2.0], (
        f"the caller's list was changed, to {samples}: work on a list of your own"
    )
    assert qs == [0.9, 0.1], f"the caller's qs were changed, to {qs}"


@step1
def test_quantiles_properties(lab):
    samples, qs = random_times(23), [0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0]
    base = lab.quantiles(samples, qs)
    assert all(a <= b + 1e-12 for a, b in zip(base, base[1:], strict=False)), (
        f"quantiles do not fall as q grows: got {base}"
    )
    mixed = [samples[i] for i in torch.randperm(23).tolist()]
    others = {
        "the samples in another order": lab.quantiles(mixed, qs),
        "5 ms added to all": [x - 5 for x in lab.quantiles([x + 5 for x in samples], qs)],
        "microseconds": [x / 1e3 for x in lab.quantiles([1e3 * x for x in samples], qs)],
        "the signs turned around": [
            -x for x in lab.quantiles([-x for x in samples], [1 - q for q in qs])
        ],
    }
    for case, got in others.items():
        assert np.allclose(got, base, rtol=1e-9), f"{case}: want {base}, got {got}"


@step1
def test_quantiles_outlier(lab):
    samples = random_times(99)
    calm = lab.quantiles(samples, [0.25, 0.5, 0.75])
    samples[samples.index(max(samples))] = 1e6
    assert list(lab.quantiles(samples, [0.25, 0.5, 0.75])) == list(calm), (
        "the largest of 99 samples grew to 1e6: median and quartiles stay as they were"
    )


@step1
def test_quantiles_extremes(lab):
    check_quantiles(lab, [2.5] * 6, [0.0, 0.3, 0.5, 1.0])
    check_quantiles(lab, [1e-300, 3e-300, 2e-300], [0.25, 0.5])
    check_quantiles(lab, [1e300, 3e300, 2e300], [0.25, 0.5])
    check_quantiles(lab, [0.0, -1.0, 0.0, 1.0], [0.25, 0.5, 0.75])


@step1
def test_quantiles_reject(lab):
    lab.quantiles([1.0], [0.5])
    for samples in ([], [1.0, NAN], [INF, 1.0], [-INF]):
        with pytest.raises(ValueError, match="got"):
            lab.quantiles(samples, [0.5])
    for q in (-0.01, 1.01, 50, NAN):
        with pytest.raises(ValueError, match="got"):
            lab.quantiles([1.0, 2.0], [q])


@step1
def test_quantiles_are_written_out(lab):
    homes = (str(Path(np.__file__).parent), str(Path(torch.__file__).parent), statistics.__file__)
    for qs in ([0.25], [0.5]):
        for name, file in watched(unguarded(lab.quantiles), [3.0, 1.0, 2.0, 4.0], qs):
            library = not file or file.startswith(homes)
            theirs = library and any(w in name for w in ("quantile", "percentile", "median"))
            assert not theirs, f"quantiles calls a library's {name}: this step is to write it out"


# ---------------------------------------------------------------- step 2

TOO_EARLY = "the launch alone: the clock was read again before the device was done"


@step2
def test_time_call_waits_for_the_device(lab):
    gpu = simulated()
    for ms in (2.0, 0.001, 400.0):
        got = lab.time_call_ms(lambda ms=ms: gpu.launch(ms), gpu.clock, gpu.synchronize)
        want = LAUNCH + ms
        known = [(LAUNCH, TOO_EARLY), (1e-3 * want, "seconds"), (1e3 * want, "microseconds")]
        check(f"a launch of {LAUNCH} ms, a kernel of {ms} ms", got, want, known)


@step2
def test_time_call_starts_with_an_idle_device(lab):
    gpu = simulated()
    for _ in range(2):
        gpu.launch(50.0)  # somebody else's work, still in the queue
    got = lab.time_call_ms(lambda: gpu.launch(2.0), gpu.clock, gpu.synchronize)
    known = [
        (101.995, "100 ms of earlier work too: wait for the device before you read the clock"),
        (
            102.0,
            "clock, wait, call: the clock was running while earlier work ended. Wait, then read",
        ),
        (LAUNCH, TOO_EARLY),
    ]
    check("a kernel of 2 ms, 100 ms of other work in the queue", got, LAUNCH + 2.0, known)


@step2
def test_time_call_with_several_kernels(lab):
    gpu = simulated()

    def three():
        for ms in (1.0, 0.001, 2.0):
            gpu.launch(ms)

    got = lab.time_call_ms(three, gpu.clock, gpu.synchronize)
    check(
        "kernels of 1, 0.001 and 2 ms in one call", got, LAUNCH + 3.001, [(3 * LAUNCH, TOO_EARLY)]
    )

    def hundred():
        for _ in range(100):
            gpu.launch(0.001)

    got = lab.time_call_ms(hundred, gpu.clock, gpu.synchronize)
    known = [(100 * LAUNCH, TOO_EARLY), (0.1, "the kernels alone: launches are part of the time")]
    check("100 kernels of 1 µs, launched every 5 µs", got, 100 * LAUNCH + 0.001, known)


@step2
def test_time_call_includes_the_host(lab):
    gpu = simulated()

    def fn():
        gpu.launch(1.0)
        gpu.work_on_host(3.0)

    got = lab.time_call_ms(fn, gpu.clock, gpu.synchronize)
    check("a kernel of 1 ms behind 3 ms of Python", got, LAUNCH + 3.0)


@step2
def test_time_call_calls_once(lab):
    gpu, calls = simulated(), []
    lab.time_call_ms(script(gpu, [1.0], calls), gpu.clock, gpu.synchronize)
    assert len(calls) == 1, f"time_call_ms: want 1 call of fn, got {len(calls)}"


@step2
def test_time_call_times_the_call_and_nothing_else(lab):
    def clock():
        return 0.0

    def fn():
        pass

    def wait():
        pass

    names = [name for name, _ in watched(unguarded(lab.time_call_ms), fn, clock, wait)]
    assert "fn" in names, f"fn was not called; these were: {names}"
    before = names[: names.index("fn")]
    assert "clock" in before, f"the clock was not read before fn was called; calls: {names}"
    start = len(before) - before[::-1].index("clock")
    extra = [name for name in before[start:] if name not in ("append", "__enter__")]
    assert not extra, f"between the first reading of the clock and fn, these were called: {extra}"


@step2
def test_time_call_subtracts_nothing(lab):
    gpu = simulated()

    def wait():  # costs the host 3 µs of its own, as a real one does
        gpu.synchronize()
        gpu.work_on_host(0.003)

    got = lab.time_call_ms(lambda: gpu.launch(2.0), gpu.clock, wait)
    known = [(LAUNCH + 2.0, "the time less that of a wait: subtract nothing")]
    check("a kernel of 2 ms, a wait that costs 0.003 ms itself", got, LAUNCH + 2.003, known)


@step2
def test_time_call_lets_errors_through(lab):
    gpu = simulated()

    def broken():
        raise ZeroDivisionError

    for name, args in (
        ("time_call_ms", ()),
        ("median_time_ms", (0, 1)),
        ("median_time_ms", (1, 1)),
    ):
        try:
            getattr(lab, name)(broken, *args, gpu.clock, gpu.synchronize)
        except ZeroDivisionError:
            continue
        pytest.fail(f"{name}{args}: fn raised an error, and a time came back: let it through")


@step2
def test_time_call_waits_for_a_real_gpu_by_default(lab, monkeypatch):
    for name in ("time_call_ms", "median_time_ms"):
        default = inspect.signature(getattr(lab, name)).parameters["clock"].default
        assert default is time.perf_counter, f"{name}: the default clock is time.perf_counter"
    events = pretend_gpu(monkeypatch)
    unguarded(lab.time_call_ms)(lambda: events.append("call"))
    text = "torch.cuda.synchronize, call, torch.cuda.synchronize"
    assert events[0] == events[-1] == "wait", f"time_call_ms on a GPU: want {text}, got {events}"
    events.clear()
    unguarded(lab.median_time_ms)(lambda: events.append("call"), 1, 1)
    assert events[-3:] == ["wait", "call", "wait"], (
        f"median_time_ms on a GPU: want it to end in {text}, got {events}"
    )


def pretend_gpu(monkeypatch):
    """Makes torch believe that a GPU is in use; returns the list that its waits are noted in."""
    events = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: events.append("wait"))
    return events


def median_of(lab, times, warmup, repeats, gpu=None):
    """(result, number of calls) of median_time_ms on kernels of the given times."""
    gpu, calls = gpu or simulated(), []
    fn = script(gpu, times, calls)
    got = lab.median_time_ms(fn, warmup, repeats, gpu.clock, gpu.synchronize)
    return got, len(calls)


@step2
def test_median_time_waits_for_the_device(lab):
    got, _ = median_of(lab, [2.0], warmup=3, repeats=5)
    check("kernels of 2 ms", got, LAUNCH + 2.0, [(LAUNCH, TOO_EARLY)])


@step2
def test_median_time_leaves_the_warmup_out(lab):
    # The first calls compile and find a sleeping clock: 40 ms each.
    for warmup, repeats in ((6, 5), (1, 1), (130, 2)):
        got, calls = median_of(lab, [40.0] * warmup + [2.0] * repeats, warmup, repeats)
        case = f"warm-up of {warmup} calls of 40 ms, then {repeats} of 2 ms"
        assert calls == warmup + repeats, f"{case}: want {warmup + repeats} calls, got {calls}"
        samples = [40.0] * warmup + [2.0] * repeats
        known = [
            (LAUNCH + true_median(samples), "the median with the warm-up calls among the samples"),
            (LAUNCH + mean(samples), "the mean of all calls, warm-up included"),
            (LAUNCH + 40.0, "a warm-up call: the warm-up was skipped, or counted"),
        ]
        check(case, got, LAUNCH + 2.0, known)


@step2
def test_median_time_first_sample_starts_idle(lab):
    # With one or two repeats the median cannot hide a first sample that waited for the warm-up.
    for repeats in (1, 2):
        got, _ = median_of(lab, [50.0] * 3 + [2.0] * repeats, warmup=3, repeats=repeats)
        assert abs(float(got) - (LAUNCH + 2.0)) < 1e-6, (
            f"three warm-up calls of 50 ms, then {repeats} timed of 2 ms: want {LAUNCH + 2.0} ms, "
            f"got {float(got):.6g} ms. The first sample must not wait for the warm-up: the device "
            "must be idle at both readings of the clock"
        )


@step2
def test_median_time_is_the_median(lab):
    check_median(lab, [3.0])
    check_median(lab, [1.0, 9.0, 3.5, 4.0, 3.0])
    check_median(lab, [9.0, 1.0, 4.0, 2.0])
    check_median(lab, [4.0, 2.0])
    for repeats in (7, 30, 131):
        check_median(lab, random_times(repeats))


@step2
def test_median_time_outlier(lab):
    check_median(lab, [2.0] * 5 + [120.0] + [2.0] * 4)


def check_median(lab, times):
    ordered, n = sorted(times), len(times)
    got, calls = median_of(lab, times, warmup=0, repeats=n)
    case = f"timed calls of {times} ms" if n <= 10 else f"{n} random times"
    assert calls == n, f"{case}: want {n} calls, got {calls}"
    known = [
        (LAUNCH + mean(times), "the mean: one slow call moves it"),
        (LAUNCH + ordered[0], "the minimum"),
        (LAUNCH + ordered[n // 2], "the upper of the two in the middle: take their mean"),
        (LAUNCH + ordered[(n - 1) // 2], "the lower of the two in the middle: take their mean"),
        (LAUNCH + times[n // 2], "the sample in the middle before sorting"),
    ]
    check(case, got, LAUNCH + true_median(times), known)


@step2
def test_median_time_on_a_device_that_heats_up(lab):
    # Warm-up is kernels 0 to 9, so the timed ones are 10 to 30 and the median is number 20.
    gpu = simulated(pace=lambda n: 1 + 0.01 * n)
    got, _ = median_of(lab, [2.0], warmup=10, repeats=21, gpu=gpu)
    check("kernel n takes 2 * (1 + 0.01 n) ms, 10 + 21 calls", got, LAUNCH + 2.4)


@step2
def test_median_time_measures_anew_each_time(lab):
    gpu, calls = simulated(), []
    fn = script(gpu, [40.0] * 2 + [2.0] * 3 + [40.0] * 2 + [5.0] * 3, calls)
    for round_number, ms in enumerate((2.0, 5.0), start=1):
        got = lab.median_time_ms(fn, 2, 3, gpu.clock, gpu.synchronize)
        case = f"the same fn, measurement {round_number} of 2, warm-up of 2 and 3 repeats each"
        assert len(calls) == 5 * round_number, f"{case}: want 5 more calls, got {len(calls)} in all"
        check(case, got, LAUNCH + ms, [(LAUNCH + 2.0, "the result of the first measurement")])


@step2
def test_median_time_needs_no_gpu(lab, device):
    calls = []
    got = lab.median_time_ms(lambda: calls.append(torch.ones(4, device=device).sum()))
    assert len(calls) == 110, f"default warm-up of 10 and 100 repeats: got {len(calls)} calls"
    assert math.isfinite(got), f"want a time in ms, got {got}"
    assert got >= 0, f"want a time in ms, got {got}"
    assert math.isfinite(lab.time_call_ms(lambda: None))


@step2
def test_median_time_rejects(lab):
    gpu, calls = simulated(), []
    fn = script(gpu, [1.0], calls)
    lab.median_time_ms(fn, 0, 1, gpu.clock, gpu.synchronize)
    calls.clear()
    for warmup, repeats in ((-1, 5), (1.5, 5), (5, 0), (5, -2), (5, 2.0), (None, 5)):
        with pytest.raises(ValueError, match="got"):
            lab.median_time_ms(fn, warmup, repeats, gpu.clock, gpu.synchronize)
    assert not calls, "bad numbers are refused before fn is called"


# ---------------------------------------------------------------- step 3


@step3
def test_achieved_worked_examples(lab):
    flop = 2 * 8192**3  # a matrix product
    got = lab.achieved(flop, 1.3676, "TFLOP/s")
    known = [
        (flop / 1.3676 / 1e12, "work over ms: divide by seconds"),
        (flop / 1.3676e-3, "FLOP/s"),
    ]
    check("2 * 8192³ FLOP in 1.3676 ms", got, 803.972, known, unit=" TFLOP/s")
    moved = 2 * 2**30  # a copy of 1 GiB: read and written
    got = lab.achieved(moved, 0.5065, "TB/s")
    known = [
        (2 * 2**30 / 0.5065e-3 / 2**40, "TiB/s: a TB is 1e12 bytes"),
        (2 * 2**30 / 0.5065 / 1e12, "work over ms: divide by seconds"),
    ]
    check("a copy of 1 GiB in 0.5065 ms", got, 4.239850, known, unit=" TB/s")


@step3
def test_achieved_units(lab):
    cases = [(1e12, 1.0), (3.0e9, 0.25), (7, 1e-3), (10**15, 12345.678), (0, 1.0)]
    for unit, scale, binary in (
        ("TFLOP/s", 1e12, 2.0**40),
        ("GFLOP/s", 1e9, 2.0**30),
        ("TB/s", 1e12, 2.0**40),
        ("GB/s", 1e9, 2.0**30),
    ):
        for work, ms in cases:
            check_rate(lab, work, ms, unit, scale, binary)


def check_rate(lab, work, ms, unit, scale, binary):
    want = work / (ms / 1e3) / scale
    known = [
        (work / (ms / 1e3) / binary, "in powers of 1024: these units are decimal"),
        (want / 1e3, "a thousandth: is ms taken for seconds?"),
        (work / (ms / 1e3) / 1e12, "in tera, whatever the unit asked for"),
        (work / (ms / 1e3) / 1e9, "in giga, whatever the unit asked for"),
        (work / (ms / 1e3), "in FLOP or bytes a second"),
    ]
    got = lab.achieved(work, ms, unit)
    check(f"work {work} in {ms} ms", got, want, known, unit=f" {unit}", rel=1e-12)


@step3
def test_achieved_properties(lab):
    base = lab.achieved(5e11, 2.0, "TFLOP/s")
    check("twice the work", lab.achieved(1e12, 2.0, "TFLOP/s"), 2 * base, unit=" TFLOP/s")
    check("twice the time", lab.achieved(5e11, 4.0, "TFLOP/s"), base / 2, unit=" TFLOP/s")
    check("in giga", lab.achieved(5e11, 2.0, "GFLOP/s"), 1e3 * base, unit=" GFLOP/s")


@step3
def test_achieved_rejects(lab):
    lab.achieved(1.0, 1.0, "TB/s")
    for unit in ("TFLOPS", "tb/s", "TiB/s", "", None):
        with pytest.raises(ValueError, match="got"):
            lab.achieved(1.0, 1.0, unit)
    for work, ms in ((1.0, 0.0), (1.0, -1.0), (-1.0, 1.0), (NAN, 1.0), (1.0, NAN), (1.0, INF)):
        with pytest.raises(ValueError, match="got"):
            lab.achieved(work, ms, "TB/s")


# ---------------------------------------------------------------- step 4


@step4
def test_buffers_examples(lab):
    for call, cache, want in (
        (8 * MiB, 32 * MiB, 5),
        (8 * MiB, 32 * MiB + 1, 6),
        (8 * MiB, 32 * MiB - 1, 5),
        (4 * MiB, 50 * MiB, 14),
        (32 * MiB, 32 * MiB, 2),
        (64 * MiB, 32 * MiB, 2),
        (1 << 30, (1 << 30) + 1, 3),
        (3, 10, 5),
        (1, 7, 8),
        (7, 0, 1),
    ):
        got = lab.buffers_to_defeat_cache(call, cache)
        case = f"{call:,} bytes a call, a cache of {cache:,}"
        assert isinstance(got, int), f"{case}: want a whole number (int), got {got!r}"
        known = [
            (want - 1, "one too few: it is the n - 1 others that must fill the cache, all of it"),
            (want + 1, "one more than needed"),
            (cache, "the cache's size, not a number of sets"),
        ]
        check(case, got, want, known, unit=" sets")


def hits_in_turn(n, lines, cache, order):
    """Lines found in a cache of `cache` lines when n sets of `lines` lines are read in turn.

    order(turn, lines) gives the order in which a call reads the lines of its set.
    """
    gpu, hits = simulated(cache_bytes=cache * LINE), 0
    for turn in range(3):
        for buffer in range(n):
            gpu.read([buffer * lines + line for line in order(turn, lines)])
            hits += gpu.hits
    return hits


@step4
def test_buffers_leave_nothing_in_the_cache(lab):
    for lines in (16, 24, 63, 64, 100):
        check_nothing_left(lab, lines, cache=64)


def check_nothing_left(lab, lines, cache):
    n = lab.buffers_to_defeat_cache(lines * LINE, cache * LINE)
    case = f"{n} sets of {lines} lines in turn, a cache of {cache} lines"
    orders = {
        "forward": lambda turn, lines: range(lines),
        "forward and backward in turn": lambda turn, lines: range(lines)[:: 1 - 2 * (turn % 2)],
        "any order": lambda turn, lines: torch.randperm(lines).tolist(),
    }
    for name, order in orders.items():
        hits = hits_in_turn(n, lines, cache, order)
        assert hits == 0, f"{case}, read {name}: want no line found in the cache, got {hits}"
    to_and_fro = orders["forward and backward in turn"]
    assert hits_in_turn(n - 1, lines, cache, to_and_fro) > 0, f"{case}: {n - 1} sets do, too"


@step4
def test_buffers_properties(lab):
    last = 10**9
    for call in (1, 2, 3, 7, 10, 33, 49, 50, 51, 99, 100, 101, 1000):
        n = lab.buffers_to_defeat_cache(call, 100)
        case = f"{n} sets of {call} bytes, a cache of 100"
        assert (n - 1) * call >= 100, f"{case}: the others hold {(n - 1) * call}, want 100 or more"
        assert (n - 2) * call < 100, f"{case}: one set less is enough"
        assert n <= last, (
            f"a call of {call} bytes needs more sets ({n}) than a smaller one ({last})"
        )
        assert lab.buffers_to_defeat_cache(1024 * call, 1024 * 100) == n, "bytes or KiB: the same n"
        last = n


@step4
def test_buffers_rejects(lab):
    lab.buffers_to_defeat_cache(1, 1)
    for args in ((0, 10), (-1, 10), (2.5, 10), (1, -1), (1, 10.0), (None, 10)):
        with pytest.raises(ValueError, match="got"):
            lab.buffers_to_defeat_cache(*args)


@step4
def test_rotate_takes_the_inputs_in_turn(lab):
    for n in (1, 2, 5):
        check_rotation(lab, n)


def check_rotation(lab, n):
    inputs = [(i, chr(97 + i)) for i in range(n)]
    seen = []
    call = lab.rotate(lambda *args: seen.append(args), inputs)
    assert not seen, "rotate itself calls nothing"
    for _ in range(2 * n + 1):
        call()
    want = (inputs * 3)[: 2 * n + 1]
    assert seen == want, f"{2 * n + 1} calls on {n} inputs: want {want}, got {seen}"
    for number in range(2 * n + 1, 1000):
        try:
            call()
        except (StopIteration, IndexError) as error:
            pytest.fail(f"call {number + 1} on {n} inputs: {type(error).__name__}; it never ends")
    assert seen == (inputs * 1000)[:1000], f"1000 calls on {n} inputs: not in turn"
    assert inputs == [(i, chr(97 + i)) for i in range(n)], "the caller's inputs were changed"


@step4
def test_rotate_returns_what_fn_returns(lab):
    call = lab.rotate(lambda a, b: a - b, [(5, 3), (7, 1)])
    got = [call(), call(), call()]
    assert got == [2, 6, 2], f"results of fn: want [2, 6, 2], got {got}"


@step4
def test_rotate_keeps_its_own_place(lab):
    first = lab.rotate(lambda x: x, [(1,), (2,), (3,)])
    second = lab.rotate(lambda x: x, [(10,), (20,)])
    got = [first(), first(), second(), first(), second(), second(), first()]
    want = [1, 2, 10, 3, 20, 10, 1]
    assert got == want, f"two rotations side by side: want {want}, got {got}"

    def fn(x):
        return x

    inputs = [(1,), (2,), (3,)]
    first, second = lab.rotate(fn, inputs), lab.rotate(fn, inputs)
    got = [first(), first(), second(), first(), second()]
    want = [1, 2, 1, 3, 2]
    assert got == want, f"two rotations of the same fn and inputs: want {want}, got {got}"


@step4
def test_rotate_takes_tensors(lab, device):
    xs = torch.arange(12.0, device=device).view(3, 4)
    ys = torch.zeros_like(xs)
    call = lab.rotate(lambda x, y: y.copy_(x), list(zip(xs, ys, strict=True)))
    for _ in range(3):
        call()
    assert torch.equal(xs, ys), "three calls copy all three rows"


@step4
def test_rotate_rejects(lab):
    lab.rotate(lambda x: x, [(1,)])
    with pytest.raises(ValueError, match="got"):
        lab.rotate(lambda x: x, [])


@step4
def test_rotate_through_enough_buffers_reads_from_memory(lab):
    # A cache of 4 sets. In turn over enough of them each call takes as long as the first one ever.
    gpu = simulated(cache_bytes=64 * LINE)
    n = lab.buffers_to_defeat_cache(16 * LINE, 64 * LINE)
    inputs = [(range(16 * i, 16 * i + 16),) for i in range(n)]
    call = lab.rotate(gpu.read, inputs)
    for number in range(3 * n):
        call()
        assert gpu.misses == 16, (
            f"call {number + 1} of {n} sets in turn: want all of 16 lines from memory, "
            f"got {gpu.misses}"
        )


# ---------------------------------------------------------------- step 5


def run_compare(lab, a, b, pairs, warmup=0, gpu=None):
    """(ratio, q1, q3), and the calls in their order, of kernels that take times a and b."""
    gpu, calls = gpu or simulated(), []
    fn_a, fn_b = script(gpu, a, calls, "A"), script(gpu, b, calls, "B")
    got = lab.compare(fn_a, fn_b, pairs, warmup, gpu.clock, gpu.synchronize)
    fields = getattr(got, "_fields", None)
    assert fields == ("ratio", "q1", "q3"), f"compare: want a Comparison, got {type(got).__name__}"
    counts = {name: calls.count(name) for name in "AB"}
    want = pairs + warmup
    assert counts == {"A": want, "B": want}, (
        f"pairs = {pairs}, warm-up of {warmup}: want {want} calls of each function, got {counts}"
    )
    return got, calls


def check_ratio(case, got, want, known=(), rel=1e-6):
    known = [*known, (1 / want, "B over A, upside down")] if want != 1 else known
    check(f"{case}: ratio", got, want, known, unit="", rel=rel)


@step5
def test_compare_two_kernels(lab):
    (ratio, q1, q3), _ = run_compare(lab, [3.0], [2.0], pairs=10, warmup=2)
    want = 3.005 / 2.005
    known = [(1.0, "the ratio of two launches: wait for the device"), (want - 1, "a / b - 1")]
    for name, got in (("ratio", ratio), ("q1", q1), ("q3", q3)):
        known_here = [*known, (1 / want, "B over A, upside down")]
        check(f"A takes 3 ms, B 2 ms, all pairs alike: {name}", got, want, known_here, unit="")


@step5
def test_compare_takes_turns(lab):
    for pairs, warmup in ((1, 0), (4, 0), (5, 2), (7, 3)):
        check_turns(lab, pairs, warmup)


def check_turns(lab, pairs, warmup):
    _, calls = run_compare(lab, [3.0], [2.0], pairs, warmup)
    timed = "".join(calls[2 * warmup :])
    want = ("ABBA" * pairs)[: 2 * pairs]
    known = {
        "A" * pairs + "B" * pairs: "all of A before B: a drift then counts for one of them only",
        "AB" * pairs: "A always first: let every other pair begin with B",
        ("BAAB" * pairs)[: 2 * pairs]: "the first pair begins with A",
    }
    assert timed == want, f"pairs = {pairs}: want the calls {want}, got {timed}. " + known.get(
        timed, "Is the warm-up over, both functions, before the first pair?"
    )


def median_ratio(a, b):
    return true_median([x / y for x, y in zip(a, b, strict=True)])


def turns(times):
    """The times of A and of B, in the order of the pairs, of calls in the order A B B A A B ..."""
    firsts, seconds = times[::2], times[1::2]
    pairs = [
        (y, x) if i % 2 else (x, y) for i, (x, y) in enumerate(zip(firsts, seconds, strict=True))
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


@step5
def test_compare_on_a_device_that_drifts(lab):
    for rate, pairs in ((0.01, 50), (-0.004, 50), (0.01, 7)):
        check_drift(lab, rate, pairs)


def check_drift(lab, rate, pairs):
    # Two equal kernels. Kernel n takes 1 + rate * n of its time: the device gets hot, or wakes up.
    # An even number of pairs comes out within a thousandth of 1, an odd one keeps a whole step.
    gpu = simulated(pace=lambda n: 1 + rate * n)
    (ratio, q1, q3), _ = run_compare(lab, [1.0], [1.0], pairs=pairs, warmup=10, gpu=gpu)
    times = [LAUNCH + 1 + rate * n for n in range(20, 20 + 2 * pairs)]
    want = median_ratio(*turns(times))
    known = [
        (
            median_ratio(times[:pairs], times[pairs:]),
            "what A first and then B gives: the drift of the device, not of the code",
        ),
        (
            median_ratio(times[::2], times[1::2]),
            "what pairs give in which A is always first: B is a step later in each",
        ),
        (1.0, "rounded: return what was measured"),
    ]
    check_ratio(f"equal kernels, {rate:+.1%} a call, pairs = {pairs}", ratio, want, known)
    assert q1 <= 1 <= q3, f"equal kernels on a drifting device: want q1 <= 1 <= q3, got {q1}, {q3}"


@step5
def test_compare_after_too_short_a_warmup(lab):
    # The first 60 kernels take 1.28 times as long, as 11.23 ms against 8.79 (triton issue 2306).
    gpu = simulated(pace=lambda n: 1.28 if n < 60 else 1.0)
    (ratio, _, _), _ = run_compare(lab, [2.0], [2.0], pairs=50, warmup=4, gpu=gpu)
    known = [(2.565 / 2.005, "what comes out when all of A runs first, on the cold device")]
    check_ratio("equal kernels, the first 60 calls slow", ratio, 1.0, known)


@step5
def test_compare_with_itself(lab):
    gpu, calls = simulated(pace=lambda n: 1 + 0.01 * n), []
    fn = script(gpu, [1.0], calls)
    same = "fn_a and fn_b may be the same: keep the times in two lists, not in a dict by function"
    for before in (0, 22):
        got = lab.compare(fn, fn, 7, 4, gpu.clock, gpu.synchronize)
        case = f"a function and itself, pairs = 7, warm-up of 4, {before} calls before"
        made = len(calls) - before
        assert made == 22, f"{case}: want 22 calls of it, 11 for each side, got {made}"
        a, b = turns([LAUNCH + 1 + 0.01 * n for n in range(before + 8, before + 22)])
        known = [(1.0, f"exactly 1, which no measurement gives here. {same}")]
        check_ratio(case, got.ratio, median_ratio(a, b), known, rel=1e-9)
        assert got.q1 < 1 < got.q3, f"{case}: want q1 < 1 < q3, got {got.q1}, {got.q3}. {same}"


@step5
def test_compare_lets_errors_through(lab):
    gpu = simulated()

    def broken():
        raise ZeroDivisionError("the function under test")

    def fine():
        gpu.launch(1.0)

    for fns in ((broken, fine), (fine, broken)):
        for warmup in (0, 1):
            try:
                lab.compare(*fns, 1, warmup, gpu.clock, gpu.synchronize)
            except ZeroDivisionError as error:
                if "under test" in str(error):
                    continue
            pytest.fail("one of the two functions raised an error: let it through")


@step5
def test_compare_leaves_the_warmup_out(lab):
    slow = [90.0] * 6
    (ratio, q1, q3), _ = run_compare(lab, slow + [3.0] * 5, slow + [2.0] * 5, pairs=5, warmup=6)
    known = [(1.0, "what the warm-up calls give, 90 ms each, when they count")]
    check_ratio("6 slow calls of each, then 3 ms and 2 ms", ratio, 3.005 / 2.005, known)
    assert (q1, q3) == pytest.approx((ratio, ratio)), "no warm-up call among the pairs"


@step5
def test_compare_each_sample_starts_idle(lab):
    # One pair after a warm-up that is still in the queue: whoever does not wait pays for it.
    (ratio, _, _), _ = run_compare(lab, [50.0] * 3 + [3.0], [50.0] * 3 + [2.0], pairs=1, warmup=3)
    known = [(1.0, "the ratio of two launches: wait for the device before each second reading")]
    check_ratio("3 ms against 2 ms, behind 300 ms of warm-up", ratio, 3.005 / 2.005, known)


def times_of(a, b):
    """(launch included) what a right timer reads for kernels of a and b."""
    return [LAUNCH + x for x in a], [LAUNCH + x for x in b]


@step5
def test_compare_is_the_median_of_the_pairs(lab):
    a, b = [2.0, 3.0, 9.0], [1.0, 4.0, 6.0]
    (ratio, _, _), _ = run_compare(lab, a, b, pairs=3)
    ta, tb = times_of(a, b)
    pairs = [x / y for x, y in zip(ta, tb, strict=True)]
    known = [
        (true_median(ta) / true_median(tb), "the ratio of the two medians: divide pair by pair"),
        (mean(ta) / mean(tb), "the ratio of means"),
        (mean(pairs), "the mean of the pairs' ratios"),
        (min(ta) / min(tb), "the ratio of minima"),
    ]
    check_ratio(f"A {a} ms, B {b} ms", ratio, true_median(pairs), known)


@step5
def test_compare_quartiles_are_of_the_pairs(lab):
    # Each pair has its own disturbance, up to a factor of 3, which hits both of its calls alike.
    noise = [1.0, 3.0, 1.5, 2.0, 2.5, 1.2, 1.1, 2.8]
    gpu = simulated(launch_us=0.0, pace=lambda n: noise[n // 2])
    (ratio, q1, q3), _ = run_compare(lab, [2.5], [2.0], pairs=8, gpu=gpu)
    check_ratio("A 2.5 ms, B 2 ms, each pair slowed down as a whole", ratio, 1.25)
    assert (q1, q3) == pytest.approx((1.25, 1.25), rel=1e-6), (
        f"both calls of a pair are slowed down alike, so every pair says 1.25: got quartiles "
        f"{q1:.6g} and {q3:.6g}. Divide within each pair, then take the quartiles"
    )


@step5
def test_compare_random_times(lab):
    for pairs in (1, 2, 5, 8, 131):
        check_compare(lab, pairs)


def check_compare(lab, pairs):
    a, b = random_times(pairs), random_times(pairs)
    (ratio, q1, q3), _ = run_compare(lab, a, b, pairs)
    ta, tb = times_of(a, b)
    ratios = [x / y for x, y in zip(ta, tb, strict=True)]
    upside_down = [y / x for x, y in zip(ta, tb, strict=True)]
    case = f"random times, pairs = {pairs}"
    known = [(true_median(ta) / true_median(tb), "the ratio of the two medians: divide in pairs")]
    check_ratio(case, ratio, true_median(ratios), known if pairs > 1 else ())
    for name, q, got in (("q1", 0.25, q1), ("q3", 0.75, q3)):
        known = [
            (true_quantile(ratios, 1 - q), "the other quartile"),
            (true_quantile(upside_down, q), "of b / a, upside down"),
            (min(ratios) if q < 0.5 else max(ratios), "the smallest or largest ratio"),
            (true_quantile(ta, q) / true_median(tb), "of a alone, over B's median"),
        ]
        check(f"{case}: {name}", got, true_quantile(ratios, q), known, unit="")


@step5
def test_compare_outlier(lab):
    a = [3.0] * 10 + [3000.0] + [3.0] * 10
    (ratio, q1, q3), _ = run_compare(lab, a, [2.0] * 21, pairs=21)
    known = [(mean(times_of(a, a)[0]) / 2.005, "the ratio of means: one slow call moves it")]
    check_ratio("one of 21 calls of A takes 3 s", ratio, 3.005 / 2.005, known)
    assert (q1, q3) == pytest.approx((ratio, ratio)), f"quartiles move too: got {q1}, {q3}"


@step5
def test_compare_needs_no_gpu(lab, device):
    calls = []
    x = torch.ones(4, device=device)
    got = lab.compare(lambda: calls.append(x.sum()), lambda: calls.append(x.sum()))
    assert len(calls) == 120, f"defaults, 50 pairs and a warm-up of 10: got {len(calls)} calls"
    assert all(math.isfinite(x) and x > 0 for x in got), f"want three ratios, got {got}"


@step5
def test_compare_waits_for_a_real_gpu_by_default(lab, monkeypatch):
    default = inspect.signature(lab.compare).parameters["clock"].default
    assert default is time.perf_counter, "compare: the default clock is time.perf_counter"
    events = pretend_gpu(monkeypatch)
    unguarded(lab.compare)(lambda: events.append("A"), lambda: events.append("B"), 1, 0)
    between = events[events.index("A") : events.index("B")]
    assert events[0] == events[-1] == "wait" == between[-1], (
        "compare on a GPU, one pair: want torch.cuda.synchronize before and after both calls, "
        f"got {events}"
    )


@step5
def test_compare_rejects(lab):
    gpu, calls = simulated(), []
    fn = script(gpu, [1.0], calls)
    lab.compare(fn, fn, 1, 0, gpu.clock, gpu.synchronize)
    calls.clear()
    for pairs, warmup in ((0, 1), (-1, 1), (2.5, 1), (3, -1), (3, 0.5), (None, 0)):
        with pytest.raises(ValueError, match="got"):
            lab.compare(fn, fn, pairs, warmup, gpu.clock, gpu.synchronize)
    assert not calls, "bad numbers are refused before anything is called"


# ---------------------------------------------------------------- on a real GPU


def matmul_and_copy():
    """Two calls of a millisecond or so: far above the cost of a launch, far beyond any L2 cache."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(1 << 28, device="cuda")  # 1 GiB
    y = torch.empty_like(x)
    return {"matmul": lambda: torch.mm(a, b), "copy": lambda: y.copy_(x)}


@step2
@needs_gpu
@pytest.mark.parametrize("what", ["matmul", "copy"])
def test_gpu_median_time_agrees_with_do_bench(lab, what):
    do_bench = pytest.importorskip("triton.testing").do_bench
    fn = matmul_and_copy()[what]
    mine = [lab.median_time_ms(fn, warmup=30, repeats=50)]
    theirs = do_bench(fn, warmup=100, rep=300, return_mode="median")
    mine.append(lab.median_time_ms(fn, warmup=5, repeats=50))
    got = min(mine, key=lambda ms: abs(ms - theirs))
    assert abs(got - theirs) <= 0.1 * theirs, (
        f"{what}: triton.testing.do_bench says {theirs:.4f} ms (median); want within 10% of it, "
        f"got {mine[0]:.4f} before and {mine[1]:.4f} ms after"
    )


@step5
@needs_gpu
@pytest.mark.parametrize("what", ["matmul", "copy"])
def test_gpu_compare_with_itself(lab, what):
    fn = matmul_and_copy()[what]
    ratio, q1, q3 = lab.compare(fn, fn, pairs=40, warmup=20)
    assert 0.95 <= ratio <= 1.05, f"{what} against itself: want 1 within 5%, got {ratio:.4f}"
    assert q1 <= q3, f"want q1 <= q3, got {q1} and {q3}"
