"""Tests of lab 03. Run `pytest labs/03_roofline`; `--step 2` runs one step's tests.

`lab` is the code under test; each call of its functions runs under guard (labs/_harness/guard.py).
What is right comes from counting: masks, tensors, operations that really run, tiles walked through
one by one. The figures of the handouts of labs 03 and 06 are recomputed with the code under test.
"""

from __future__ import annotations

import ast
import math
import numbers
import re
import tracemalloc
from dataclasses import dataclass
from fractions import Fraction

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import same_color, to_hex, to_rgba
from matplotlib.lines import Line2D
from matplotlib.text import Text

from labs._harness import work
from labs._harness.cases import step
from labs._impl import LABS

STEPS = {
    1: "attention_flops",
    2: "attention_bytes",
    3: "ridge_point",
    4: "predict_ms",
    5: "roofline_plot",
}

# (B, H, T, D): one of everything, primes, powers of two, the shapes of the handouts.
SHAPES = [(1, 1, 1, 1), (1, 1, 7, 16), (2, 3, 37, 24), (1, 8, 1024, 64), (8, 16, 2048, 64)]
SMALL = [(1, 1, 1, 16), (1, 1, 7, 16), (2, 3, 37, 24)]

step1 = step(1)
step2 = step(2)
step3 = step(3)
step4 = step(4)
step5 = step(5)


def check(got, want, call: str, causes: dict[float, str] | None = None, exact=True):
    """Fails unless `got` is `want`, saying by what factor it is off and what usually causes that.

    Args:
        got, want: numbers. Where `want` is an int, `got` must be one (NumPy's will do).
        call: the call, for the message.
        causes: factor got / want -> what usually causes it.
        exact: whether the numbers must be equal, or agree to 12 digits.
    """
    number = isinstance(got, (int, float, np.number)) and not isinstance(got, bool)
    assert number, f"{call}: want a number, got {type(got).__name__}"
    if isinstance(want, int):
        whole = isinstance(got, numbers.Integral)
        assert whole, f"{call}: a count is an int, got {got!r}, a {type(got).__name__}"
    if got == want or (not exact and math.isclose(got, want, rel_tol=1e-12)):
        return
    text = f"{call}: want {want:,}, got {got:,}"
    if want and math.isfinite(got):
        ratio = got / want
        near_one = abs(ratio - 1) < 0.01
        text += f"; off by {got - want:+,}" if near_one else f"; that is {ratio:.4g} times as much"
        for factor, cause in (causes or {}).items():
            if math.isclose(ratio, factor, rel_tol=1e-3):
                text += f": {cause}"
    raise AssertionError(text)


def rejects(function, *args, names=(), **kwargs):
    """Fails unless the call raises ValueError, with each of `names` and what it got in its text."""
    try:
        got = function(*args, **kwargs)
    except ValueError as error:
        message = str(error)
    else:
        call = f"{function.__name__}{args or kwargs}"
        raise AssertionError(f"{call} must raise ValueError: it returned {got}")
    for part in (*names, "got"):
        assert part in message, f"the message of ValueError says nothing of {part}: {message}"


# ---------------------------------------------------------------- step 1


def counted_pairs(queries, keys, causal, window=None):
    """The pairs of a mask, counted one by one."""
    position = keys - queries + np.arange(queries)[:, None]
    key = np.arange(keys)[None, :]
    visible = np.ones((queries, keys), dtype=bool)
    if causal:
        visible &= key <= position
    if window is not None:
        visible &= key > position - window
    return int(visible.sum())


@step1
def test_visible_pairs_matches_a_counted_mask(lab):
    for sizes in ((1, 1), (2, 5), (5, 2), (1, 6), (6, 1), (7, 7), (37, 64), (64, 37)):
        for causal in (False, True):
            got = lab.visible_pairs(*sizes, causal)
            check(got, counted_pairs(*sizes, causal), f"visible_pairs{(*sizes, causal)}")


FIRST_TOKEN = dict.fromkeys((1 / 3, 3.0), "causal is aligned at the first token")


@step1
def test_visible_pairs_queries_are_the_newest_tokens(lab):
    # Field reports: 9 of 10 pairs, and 3 of 10. Aligned at the first token it would be 3 and 9.
    check(lab.visible_pairs(2, 5, True), 9, "visible_pairs(2, 5, True)", FIRST_TOKEN)
    check(lab.visible_pairs(5, 2, True), 3, "visible_pairs(5, 2, True)", FIRST_TOKEN)
    check(lab.visible_pairs(1, 4096, True), 4096, "visible_pairs(1, 4096, True): decoding")


@step1
def test_visible_pairs_window(lab):
    # W counts the query itself and the W - 1 keys before it.
    for sizes in ((6, 6), (2, 9), (9, 2), (64, 64)):
        for window in (1, 2, 3, 7, 64, 1000):
            want = counted_pairs(*sizes, True, window)
            got = lab.visible_pairs(*sizes, True, window)
            check(got, want, f"visible_pairs{(*sizes, True, window)}")


@step1
def test_visible_pairs_of_one_token_more(lab):
    cases = [(1, 1, None), (4, 4, None), (3, 11, 5), (11, 3, 5), (100, 100, 5), (100, 100, None)]
    for queries, keys, window in cases:
        more = lab.visible_pairs(queries + 1, keys + 1, True, window)
        rise = more - lab.visible_pairs(queries, keys, True, window)
        want = min(keys + 1, window or keys + 1)
        assert rise == want, (
            f"one more token after {keys}, window {window}: it sees {want} keys, and "
            f"visible_pairs rises by {rise}"
        )


@step1
def test_visible_pairs_long_and_exact(lab):
    T = 131_072
    check(lab.visible_pairs(T, T, True), T * (T + 1) // 2, f"visible_pairs({T}, {T}, True)")
    want = 4096 * 4097 // 2 + (T - 4096) * 4096
    check(lab.visible_pairs(T, T, True, 4096), want, f"visible_pairs({T}, {T}, True, 4096)")
    # Beyond 2^53 a float has no room for the last digits.
    long = 10**17 + 1
    check(lab.visible_pairs(3, long, True), 3 * 10**17, f"visible_pairs(3, {long}, True)")
    odd = (10**9 + 7, 10**9 + 9)
    check(lab.visible_pairs(*odd, False), odd[0] * odd[1], f"visible_pairs{(*odd, False)}")


@step1
def test_visible_pairs_makes_no_mask(lab):
    T = 2048
    for args in ((T, T, True), (T, T, False), (T, T, True, 1024)):
        tracemalloc.start()
        lab.visible_pairs(*args)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peak = max(peak, lab.work.largest)
        assert peak < T * T // 8, (
            f"visible_pairs{args} took {peak:,} bytes: a mask of T^2 elements? That is 16 GiB at "
            "T = 131,072"
        )


@step1
def test_visible_pairs_rejects(lab):
    lab.visible_pairs(4, 4, True, 2)
    rejects(lab.visible_pairs, 0, 4, True, names=["queries"])
    rejects(lab.visible_pairs, 4, 0, False, names=["keys"])
    rejects(lab.visible_pairs, 4, 4, True, 0, names=["window"])
    rejects(lab.visible_pairs, 4, 4, False, 2, names=["causal", "window"])
    rejects(lab.visible_pairs, 4, 4, 2, names=["causal"])


FLOP_CAUSES = {
    2.0: "causal computes half of the square",
    0.5: "a multiplication and an addition are 2 FLOP, and there are two products",
    0.25: "a multiplication and an addition are 2 FLOP, and there are two products",
}


@step1
def test_attention_flops_pins(lab):
    got = lab.attention_flops(1, 8, 1024, 64, False)
    check(got, 2**31, "attention_flops(1, 8, 1024, 64, False)", FLOP_CAUSES)
    got = lab.attention_flops(8, 16, 2048, 64, True)
    check(got, 68_719_476_736, "attention_flops(8, 16, 2048, 64, True)", FLOP_CAUSES)
    T = 10**7 + 1  # more digits than a float has
    got = lab.attention_flops(3, 5, T, 129, True)
    check(got, 30 * T * T * 129, f"attention_flops(3, 5, {T}, 129, True)", FLOP_CAUSES)


@step1
def test_attention_flops_causal_is_half(lab):
    for shape in SHAPES:
        full, causal = (lab.attention_flops(*shape, c) for c in (False, True))
        B, H, T, D = shape
        check(full, 4 * B * H * T * T * D, f"attention_flops{(*shape, False)}", FLOP_CAUSES)
        check(2 * causal, full, f"2 * attention_flops{(*shape, True)}", FLOP_CAUSES)


@step1
def test_attention_flops_of_products_that_run(lab):
    for shape in SMALL:
        got = lab.attention_flops(*shape, False)
        q, k, v = (torch.ones(*shape) for _ in range(3))
        with work.count_torch() as counted:
            naive_attention(q, k, v, causal=False)
        check(got, counted.flops, f"attention_flops{(*shape, False)}, counted", FLOP_CAUSES)


@step1
def test_attention_flops_against_visible_pairs(lab):
    for shape in SHAPES:
        B, H, T, D = shape
        for causal in (False, True):
            exact = 4 * B * H * D * counted_pairs(T, T, causal)
            got = lab.attention_flops(*shape, causal)
            # The convention leaves half of the diagonal out: 1 part in T + 1 of the visible pairs.
            least = exact * T // (T + 1) if causal else exact
            assert least <= got <= exact, (
                f"attention_flops{(*shape, causal)}: got {got:,}, a counted mask has 4 B H D pairs "
                f"= {exact:,} FLOP"
            )


@step1
def test_attention_flops_rejects(lab):
    lab.attention_flops(1, 1, 1, 1, False)
    for place, name in enumerate(("batch", "heads", "seq", "head_dim")):
        for bad in (0, -1, 2.5):
            sizes = [1, 1, 8, 16]
            sizes[place] = bad
            rejects(lab.attention_flops, *sizes, False, names=[name])
    rejects(lab.attention_flops, 1, 1, 8, 16, 2, names=["causal"])


# ---------------------------------------------------------------- step 2


def naive_attention(q, k, v, causal):
    """The five operations that naive_attention_bytes counts, as in lab 06."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ v


@step2
def test_scores_bytes_pins(lab):
    check(lab.scores_bytes(8, 16, 2048, 2), 2**30, "scores_bytes(8, 16, 2048, 2), 1 GiB")
    check(lab.scores_bytes(1, 1, 8192, 2), 2**27, "scores_bytes(1, 1, 8192, 2), 128 MiB")


@step2
def test_bytes_of_tensors(lab):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8):
        for shape in SMALL:
            size, (B, H, T, _) = dtype.itemsize, shape
            scores = torch.empty(B, H, T, T, dtype=dtype)
            check(lab.scores_bytes(B, H, T, size), scores.nbytes, f"scores_bytes{(B, H, T, size)}")
            tensors = [torch.empty(shape, dtype=dtype) for _ in ("q", "k", "v", "out")]
            causes = {0.75: "the output is written, too"}
            got, want = lab.attention_bytes(*shape, False, size), sum(t.nbytes for t in tensors)
            check(got, want, f"attention_bytes{(*shape, False, size)}", causes)


@step2
def test_attention_bytes_do_not_depend_on_causal(lab):
    for shape in SHAPES:
        full, causal = (lab.attention_bytes(*shape, c, 2) for c in (False, True))
        check(causal, full, f"attention_bytes{(*shape, True, 2)}: the last query sees every key")


@step2
def test_intensity_of_the_ideal(lab):
    nbytes = lab.attention_bytes(1, 8, 1024, 64, False, 2)
    causes = {4 / 3: "the output is forgotten", 2.0: "q, k, v and out: 4"}
    check(2**31 / nbytes, 512.0, "FLOP a byte at B=1 H=8 T=1024 D=64", causes)


@step2
def test_naive_attention_bytes_of_operations_that_run(lab):
    for shape in reversed(SMALL):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for causal in (False, True):
                check_naive_bytes(lab, shape, dtype, causal)


def check_naive_bytes(lab, shape, dtype, causal):
    got = lab.naive_attention_bytes(*shape, causal, dtype.itemsize)
    q, k, v = (torch.ones(*shape, dtype=dtype) for _ in range(3))
    with work.count_torch() as counted:
        naive_attention(q, k, v, causal)
    B, H, T, D = shape
    one = B * H * T * T * dtype.itemsize  # one pass over the scores
    off = (got - counted.moved) / one
    assert isinstance(got, numbers.Integral), f"a count is an int, got {got!r}"
    assert got == counted.moved, (
        f"naive_attention_bytes{(*shape, causal, dtype.itemsize)}: want {counted.moved:,}, counted "
        f"while the five operations run; got {got:,}: {off:+.3g} passes over the scores (the mask "
        f"is {4 * T * T / one:.3g} of one)"
    )


@step2
def test_naive_attention_bytes_pins(lab):
    # One head of lab 06's table: 8 passes over the scores are 67 MB, q, k, v and out 1.05 MB.
    got = lab.naive_attention_bytes(1, 1, 2048, 64, True, 2)
    check(
        got,
        16 * 2048**2 + 8 * 2048 * 64 + 4 * 2048**2,
        "naive_attention_bytes(1, 1, 2048, 64, True, 2)",
    )
    got = lab.naive_attention_bytes(8, 16, 2048, 64, True, 2)
    want = 128 * (16 * 2048**2 + 8 * 2048 * 64) + 4 * 2048**2
    check(got, want, "naive_attention_bytes(8, 16, 2048, 64, True, 2): one mask for all heads")
    for size in (1, 2, 4, 8):  # the mask has 1 byte an element whatever the scores have
        got = lab.naive_attention_bytes(1, 1, 10, 16, True, size)
        want = (8 * 100 + 4 * 10 * 16) * size + 4 * 100
        check(got, want, f"naive_attention_bytes(1, 1, 10, 16, True, {size})")


def walked_bytes(batch, heads, seq, head_dim, causal, size, block_m, block_n):
    """Bytes that a flash kernel asks for: every tile walked through, row by row."""
    nbytes = 0
    for i0 in range(0, seq, block_m):
        queries = range(i0, min(i0 + block_m, seq))
        nbytes += len(queries) * (2 * head_dim * size + 4)  # q, out and lse
        for j0 in range(0, seq, block_n):
            keys = range(j0, min(j0 + block_n, seq))
            if not causal or any(j <= i for i in queries for j in keys):
                nbytes += len(keys) * 2 * head_dim * size  # k and v
    return batch * heads * nbytes


@step2
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flash_attention_bytes_of_tiles_walked_through(lab, causal):
    for tiles in ((16, 16), (16, 64), (64, 16), (7, 11), (1, 1), (37, 5), (128, 128), (1, 64)):
        for shape, size in (((1, 1, 1, 16), 2), ((1, 2, 37, 16), 2), ((2, 3, 65, 24), 4)):
            got = lab.flash_attention_bytes(*shape, causal, size, *tiles)
            want = walked_bytes(*shape, causal, size, *tiles)
            off = (got - want) / (shape[0] * shape[1] * 2 * shape[3] * size)
            call = f"flash_attention_bytes{(*shape, causal, size, *tiles)}"
            check(got, want, f"{call}, off by {off:+.3g} rows of K and V a head")


@step2
def test_flash_attention_bytes_default_block_n(lab):
    args = (1, 2, 200, 64, True, 2, 32)
    check(lab.flash_attention_bytes(*args), walked_bytes(*args, 64), f"flash_attention_bytes{args}")


@step2
def test_flash_attention_bytes_of_one_tile_are_the_ideal_and_lse(lab):
    B, H, T, D, size = 2, 3, 40, 32, 2
    for causal in (False, True):
        got = lab.flash_attention_bytes(B, H, T, D, causal, size, 64, 64)
        want = lab.attention_bytes(B, H, T, D, causal, size) + 4 * B * H * T
        check(got, want, "one tile holds all queries: every byte once, and 4 bytes of lse a row")


@step2
def test_flash_attention_bytes_lse_is_float32(lab):
    for size in (1, 2, 4, 8):
        got = lab.flash_attention_bytes(1, 1, 10, 16, False, size, 16, 16)
        check(got, 4 * 10 * 16 * size + 4 * 10, f"flash_attention_bytes of {size}-byte elements")


@step2
def test_intensity_grows_with_block_m(lab):
    # A row of K and V feeds block_m queries: 2 block_m / dtype_bytes FLOP a byte where T is long.
    shape = (1, 1, 8192, 64)
    for causal in (False, True):
        flops = 4 * shape[2] ** 2 * shape[3] // (2 if causal else 1)
        for size, block_m in ((1, 64), (2, 16), (2, 64), (2, 128), (4, 64)):
            got = flops / lab.flash_attention_bytes(*shape, causal, size, block_m, 64)
            want = 2 * block_m / size
            assert 0.95 * want <= got <= want, (
                f"block_m = {block_m}, {size} bytes an element: {got:.4g} FLOP a byte, want just "
                f"under 2 block_m / bytes = {want:.4g}"
            )


@step2
def test_bytes_reject(lab):
    good = {"batch": 1, "heads": 1, "seq": 8, "head_dim": 16, "causal": False, "dtype_bytes": 2}
    functions = {
        lab.scores_bytes: {name: good[name] for name in ("batch", "heads", "seq", "dtype_bytes")},
        lab.attention_bytes: good,
        lab.naive_attention_bytes: good,
        lab.flash_attention_bytes: {**good, "block_m": 16, "block_n": 16},
    }
    for function, sizes in functions.items():
        function(**sizes)
        for name in sizes:
            bad = 2 if name == "causal" else 0
            rejects(function, **{**sizes, name: bad}, names=[name])


# ---------------------------------------------------------------- step 3


TIME_CAUSES = {1e-3: "seconds instead of ms?", 1e3: "us instead of ms?", 1e-6: "units?"}
WORKS = [(2**40, 2**20, 1), (2**20, 2**33, 1), (1, 1, 40), (0, 2**30, 1), (2**40, 0, 3), (0, 0, 1)]


def three_times(work, card, launch_us):
    """The three limits in ms, exactly."""
    return (
        Fraction(work.flops) / Fraction(card.peak_flops) * 1000,
        Fraction(work.nbytes) / Fraction(card.bandwidth) * 1000,
        Fraction(work.launches) * Fraction(launch_us) / 1000,
    )


def toy(lab, peak=2.0**40, bandwidth=2.0**33):
    """A card whose numbers are powers of two, so that equal times are equal bits. Ridge: 128."""
    return lab.Card("toy", peak, bandwidth, 2.0**33, "made up")


@step3
def test_ridge_point_of_the_cards(lab):
    want = {
        "A100": 153.0,
        "H100": 295.4,
        "H200": 206.1,
        "RTX 3090": 75.9,
        "RTX 4090": 163.9,
        "RTX 5060": 85.7,
        "RTX 5090": 116.9,
        "T4": 203.1,
        "H200, measured": 189.6,
    }
    for name, ridge in want.items():
        card = lab.CARDS[name]
        got = lab.ridge_point(card.peak_flops, card.bandwidth)
        assert math.isclose(got, ridge, abs_tol=0.05), (
            f"ridge point of the {name}: want {ridge} FLOP a byte, got {got:.4g}"
            + ("; that is its inverse" if math.isclose(1 / got, ridge, rel_tol=1e-3) else "")
        )


@step3
def test_ridge_point_is_exact(lab):
    for peak, bandwidth in ((3.0, 2.0), (1.0, 7.0), (312e12, 2039e9), (5, 5)):
        got = lab.ridge_point(peak, bandwidth)
        check(got, peak / bandwidth, f"ridge_point({peak:g}, {bandwidth:g})", exact=False)


@step3
def test_ridge_point_rejects(lab):
    lab.ridge_point(1.0, 1.0)
    for bad in (0, -1.0, math.inf, math.nan):
        rejects(lab.ridge_point, bad, 1.0, names=["peak_flops"])
        rejects(lab.ridge_point, 1.0, bad, names=["bandwidth"])


@step3
def test_limits_are_three_times_in_ms(lab):
    own = lab.Card("a card of your own", 123e12, 456e9, 2.0**33, "made up")
    for card in (lab.CARDS["T4"], lab.CARDS["H200"], toy(lab), own):
        for sizes in WORKS:
            for launch_us in (0.0, 0.3, 2.5, 1000.0):
                made = lab.Work(*sizes)
                got = lab.limits(made, card, launch_us)
                call = f"limits({made}, {card.name}, {launch_us})"
                names = ["compute", "memory", "launch"]
                is_right = isinstance(got, dict) and sorted(got) == sorted(names)
                assert is_right, f"{call}: want a dict from {names} to ms, got {got!r}"
                for name, want in zip(names, three_times(made, card, launch_us), strict=True):
                    check(got[name], float(want), f"{call}[{name!r}]", TIME_CAUSES, exact=False)
    free = lab.limits(lab.Work(1, 1, 1000), toy(lab))
    check(free["launch"], 0.0, "limits without launch_us: 'launch'", exact=False)


@step3
def test_limits_rejects(lab):
    card, some = toy(lab), lab.Work(1, 1)
    lab.limits(some, card, 0.0)
    for bad in (-1.0, math.inf, math.nan):
        rejects(lab.limits, some, card, bad, names=["launch_us"])


def bound(lab, card, want, *work, launch_us=None):
    """Fails unless bound_by gives `want`."""
    made = lab.Work(*work)
    got = lab.bound_by(made, card) if launch_us is None else lab.bound_by(made, card, launch_us)
    assert got == want, (
        f"bound_by({made}, {card.name}, launch_us={launch_us}): want {want!r}, got {got!r}; "
        f"intensity {made.intensity:.4g}, ridge {card.peak_flops / card.bandwidth:.4g}"
    )


@step3
def test_bound_by_intensity_against_the_ridge(lab):
    card = toy(lab)
    for intensity in (1, 64, 127, 129, 1024):
        bound(lab, card, "compute" if intensity > 128 else "memory", intensity * 2**20, 2**20)
    bound(lab, card, "memory", 0, 1)  # a copy
    bound(lab, card, "compute", 1, 0)  # all in registers


@step3
def test_bound_by_equal_times(lab):
    card = toy(lab)  # 2^20 us = 2^40 FLOP / 10^-6: launches that last a second
    bound(lab, card, "compute", 2**40, 2**33)  # right at the ridge
    bound(lab, card, "compute", 2**40, 2**30, 1, launch_us=1_000_000)
    bound(lab, card, "memory", 2**30, 2**33, 1, launch_us=1_000_000)
    bound(lab, card, "compute", 0, 0)
    # One part in a million longer is longer.
    bound(lab, card, "memory", 2**40, 2**33 + 2**13)
    bound(lab, card, "launch", 2**40, 2**33, 1, launch_us=1_000_001)


@step3
def test_bound_by_launches(lab):
    card = lab.CARDS["RTX 5060"]
    small = (4 * 512 * 512 * 64, 4 * 2**20)  # naive attention, B = H = 1, T = 512: 9 us of bytes
    bound(lab, card, "memory", *small, 8)  # no cost of a launch given: none counts
    bound(lab, card, "launch", *small, 8, launch_us=5)
    bound(lab, card, "memory", *small, 1, launch_us=5)  # one launch is hidden behind the bytes
    big = tuple(1000 * x for x in small)
    bound(lab, card, "memory", *big, 8, launch_us=5)
    bound(lab, card, "launch", 0, 2**30, 1000, launch_us=5)  # 5 ms of launches, 2.4 ms of bytes


@step3
def test_bound_by_of_kernels_that_one_knows(lab):
    for card in lab.CARDS.values():
        softmax = lab.softmax_work(32_768, 4096, 4)
        bound(lab, card, "memory", softmax.flops, softmax.nbytes)
        bound(lab, card, "compute", 2 * 8192**3, 3 * 2 * 8192**2)  # a matrix product
        bound(lab, card, "memory", 2 * 8192**2, 2 * 8192**2)  # a matrix times a vector
    a100 = lab.CARDS["A100"]
    bound(lab, a100, "compute", 2**31, 2**22)  # ideal attention: 512 FLOP a byte
    bound(lab, a100, "memory", 2**31, 6 * 2**24 + 2**22)  # naive attention, 6 passes


@step3
def test_bound_by_rejects(lab):
    card, some = toy(lab), lab.Work(1, 1)
    lab.bound_by(some, card, 0.0)
    for bad in (-1.0, math.inf, math.nan):
        rejects(lab.bound_by, some, card, bad, names=["launch_us"])


# ---------------------------------------------------------------- step 4


@step4
def test_predict_ms_is_the_longest_of_three(lab):
    own = lab.Card("a card of your own", 123e12, 456e9, 2.0**33, "made up")
    for sizes in WORKS:
        for launch_us in (0.0, 0.3, 2.5, 5, 1000.0):
            for card in (lab.CARDS["T4"], lab.CARDS["H200"], toy(lab), own):
                check_prediction(lab, lab.Work(*sizes), card, launch_us)


def check_prediction(lab, made, card, launch_us):
    times = three_times(made, card, launch_us)
    want = float(max(times))
    causes = dict(TIME_CAUSES)
    for wrong, cause in (
        (sum(times), "the three are added up; they overlap"),
        (min(times), "the shortest of the three"),
    ):
        if want and abs(float(wrong) / want - 1) > 0.01:  # else it tells nothing
            causes[float(wrong) / want] = cause
    got = lab.predict_ms(made, card, launch_us)
    check(got, want, f"predict_ms({made}, {card.name}, {launch_us})", causes, exact=False)


@step4
def test_predict_ms_without_a_cost_of_launches(lab):
    card = toy(lab)
    got = lab.predict_ms(lab.Work(2**30, 0, 1000), card)
    call = "predict_ms(Work(2**30, 0, 1000), toy): a thousand launches that cost nothing"
    check(got, 1000 / 1024, call, TIME_CAUSES, exact=False)


@step4
def test_predict_ms_at_the_ridge_both_are_equal(lab):
    card = toy(lab)
    for flops, nbytes in ((2**40, 2**33), (2**40, 0), (0, 2**33)):
        got = lab.predict_ms(lab.Work(flops, nbytes), card)
        check(
            got,
            1000.0,
            f"predict_ms({flops} FLOP, {nbytes} bytes)",
            {2.0: "added up; they overlap"},
        )


@step4
def test_predict_ms_of_lab_06(lab):
    # The predictions that lab 06 asks for: B=8 H=16 T=2048 D=64, bfloat16, causal.
    rtx, h200 = lab.CARDS["RTX 5060"], lab.CARDS["H200, measured"]
    products = lab.Work(68_719_476_736, 0)
    for card, want in ((rtx, 1.790), (h200, 0.0855)):
        got = lab.predict_ms(products, card)
        assert math.isclose(got, want, rel_tol=1e-3), f"{card.name}: want {want} ms, got {got}"
    got = lab.predict_ms(lab.Work(2 * 68_719_476_736, 8 * 2**30, 8), rtx, 5)
    assert math.isclose(got, 19.17, rel_tol=1e-3), f"{rtx.name}, naive: want 19.17 ms, got {got}"


@step4
def test_predict_ms_launches_are_a_floor(lab):
    card = lab.CARDS["H200"]
    tiny = lab.Work(1000, 1000, 8)
    got = lab.predict_ms(tiny, card, 5)
    check(got, 0.040, "8 launches of 5 us", {**TIME_CAUSES, 0.125: "one launch only"}, exact=False)
    # A kernel that runs for a ms hides its launch: the host is ahead.
    long = lab.Work(0, card.bandwidth * 1e-3)
    check(lab.predict_ms(long, card, 5), 1.0, "a kernel of 1 ms and its launch", exact=False)


@step4
def test_predict_ms_agrees_with_bound_by(lab):
    for card in lab.CARDS.values():
        for sizes in WORKS[:-1]:
            made = lab.Work(*sizes)
            name = lab.bound_by(made, card, 5)
            alone = {
                "compute": (lab.Work(made.flops, 0), 0),
                "memory": (lab.Work(0, made.nbytes), 0),
                "launch": (lab.Work(0, 0, made.launches), 5),
            }[name]
            got, want = lab.predict_ms(made, card, 5), lab.predict_ms(alone[0], card, alone[1])
            check(got, want, f"{made} on {card.name} is bound by {name}: its time", exact=False)


@step4
def test_predict_ms_rejects(lab):
    card, some = toy(lab), lab.Work(1, 1)
    lab.predict_ms(some, card, 0.0)
    for bad in (-1.0, math.inf, math.nan):
        rejects(lab.predict_ms, some, card, bad, names=["launch_us"])


# ---------------------------------------------------------------- the figures of the handouts


@dataclass(frozen=True)
class Figure:
    """One row of a table in a handout that says what a call of this lab's functions gives."""

    page: str
    what: str
    code: str
    shown: str


HANDOUTS = ("03_roofline", "06_attention_kernels")
COLUMNS = "| as a call of lab 03 | figure |"
NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
UNITS = {  # how many of what the functions return (bytes, FLOP, FLOP/s, bytes/s, ms) make one
    **{"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 1e3, "MB": 1e6, "GB": 1e9},
    **{"FLOP": 1, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP/s": 1e12, "GB/s": 1e9, "TB/s": 1e12},
    **{"ms": 1, "µs": 1e-3, "ps": 1e-9, "FLOP a byte": 1},
}
WITH_UNIT = re.compile(
    rf"(?<![\w.,/])({NUMBER}) ({'|'.join(sorted(UNITS, key=len)[::-1])})(?![\w/])"
)
NEEDS = {  # function -> the step that must be written for it
    **dict.fromkeys(("visible_pairs", "attention_flops"), 1),
    **dict.fromkeys(
        ("scores_bytes", "attention_bytes", "naive_attention_bytes", "flash_attention_bytes"), 2
    ),
    **dict.fromkeys(("naive_work", "flash_work", "ideal_work"), 2),
    **dict.fromkeys(("ridge_point", "limits", "bound_by"), 3),
    "predict_ms": 4,
}


def figures(lab_name: str) -> list[Figure]:
    """All rows of such tables in a handout."""
    found, inside = [], False
    for line in (LABS / lab_name / "README.md").read_text().splitlines():
        inside = line.startswith("|") and (inside or line.endswith(COLUMNS))
        if inside and not line.endswith(COLUMNS) and not line.startswith("|---"):
            *what, code, shown = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert code.startswith("`"), f"{lab_name}: no code in {line}"
            found.append(Figure(lab_name, what[0] if what else "", code.strip("`"), shown))
    return found


class Names(dict):
    """The names of the code under test, for the rows' code."""

    def __init__(self, lab):
        super().__init__()
        self.lab = lab

    def __missing__(self, name):
        return getattr(self.lab, name)


def needed_step(code: str) -> int:
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return max((NEEDS.get(name, 1) for name in names), default=1)


def check_figures(lab, step: int):
    """Evaluates the rows that need this step and no later one, against the figure shown."""
    rows = [f for name in HANDOUTS for f in figures(name) if needed_step(f.code) == step]
    assert rows, f"no figure of the handouts needs step {step}"
    wrong = []
    for f in sorted(rows, key=lambda f: not any(name in f.code for name in NEEDS)):
        got = eval(f.code, {"__builtins__": {}}, Names(lab))
        text = f.shown.strip("*`")
        number = re.match(rf"({NUMBER})(?: (.+))?$", text)
        if number is None:
            right = got == text
        else:
            digits = number[1].replace(",", "")
            half = 0.5 * 10 ** -len(digits.partition(".")[2])
            got /= UNITS[number[2]] if number[2] else 1
            right = abs(got - float(digits)) <= half * (1 + 1e-9)
        if not right:
            shown = got if isinstance(got, str) else f"{got:.6g}"
            wrong.append(f"{f.page}: {f.code} shows {f.shown}; yours gives {shown}")
    assert not wrong, "\n  ".join([f"{len(wrong)} of {len(rows)} figures differ:", *wrong[:5]])


@step1
def test_figures_of_the_handouts_flops(lab):
    check_figures(lab, 1)


@step2
def test_figures_of_the_handouts_bytes(lab):
    check_figures(lab, 2)


@step3
def test_figures_of_the_handouts_bounds(lab):
    check_figures(lab, 3)


@step4
def test_figures_of_the_handouts_times(lab):
    check_figures(lab, 4)


def check_prose():
    """Each figure with a unit in the text stands in a table of the same page that derives it.

    In lab 03 that holds for the whole page, in lab 06 for the folded answers to its predictions.
    Called by labs/_harness/tests/test_bench.py: a student may write into the handout.
    """
    for name in HANDOUTS:
        text = (LABS / name / "README.md").read_text()
        if name != "03_roofline":
            folds = re.findall(r"<details>.*?</details>", text, re.S)
            text = "\n".join(fold for fold in folds if COLUMNS in fold)
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        text = re.sub(r"`[^`\n]*`", "", re.sub(r"^\|.*$", "", text, flags=re.M))
        known = {f.shown.strip("*`") for f in figures(name)}
        stray = sorted({" ".join(m) for m in WITH_UNIT.findall(text)} - known)
        assert not stray, f"{name}: figures in the text that no table derives: {', '.join(stray)}"


# ---------------------------------------------------------------- step 5


@dataclass(frozen=True)
class Mark:
    """One mark that can be seen: where it is, whether it is filled, and how it looks."""

    x: float
    y: float
    filled: bool
    style: tuple


def empty(colour) -> bool:
    """Whether a colour cannot be seen: none, transparent, or white as the page is."""
    return to_rgba(colour)[3] == 0 or same_color(to_rgba(colour)[:3], "white")


def seen(artist) -> bool:
    return artist.get_visible() and artist.get_alpha() != 0


def filled(artist) -> bool | None:
    """Whether the marks of a line or of a scatter are filled; None where nothing can be seen."""
    if isinstance(artist, PathCollection):
        faces, edges = artist.get_facecolor(), artist.get_edgecolor()
    else:
        faces, edges = [artist.get_markerfacecolor()], [artist.get_markeredgecolor()]
    if not seen(artist) or all(map(empty, [*faces, *edges])):
        return None
    return any(not empty(colour) for colour in faces)


class Drawn:
    """What a picture that was saved shows."""

    def __init__(self, figure):
        self.figure = figure
        self.axes = [a for a in figure.axes if a.get_visible()]
        assert self.axes, "the picture has no axes"

    @property
    def main(self):
        return self.axes[0]

    def all_texts(self):
        found = self.figure.findobj(Text)
        return [t for t in found if seen(t) and not empty(t.get_color()) and t.get_fontsize() >= 4]

    @property
    def texts(self) -> str:
        return "\n".join(t.get_text() for t in self.all_texts())

    def legends(self):
        found = [*self.figure.legends, *(a.get_legend() for a in self.axes if a.get_legend())]
        return [legend for legend in found if seen(legend)]

    @property
    def legend(self) -> list[str]:
        return [text.get_text() for legend in self.legends() for text in legend.get_texts()]

    def marks(self) -> list[Mark]:
        """Every mark that can be seen, from plot and scatter alike."""
        found = []
        for line in self.main.lines:
            kind = filled(line)
            if line.get_marker() in ("None", None, "", " ") or kind is None:
                continue
            if line.get_transform() == self.main.transData:
                face, edge = line.get_markerfacecolor(), line.get_markeredgecolor()
                style = to_hex(face if empty(edge) else edge), line.get_marker()
                found += [Mark(float(x), float(y), kind, style) for x, y in line.get_xydata()]
        for group in self.main.collections:
            if not isinstance(group, PathCollection) or filled(group) is None:
                continue
            faces, edges = group.get_facecolor(), group.get_edgecolor()
            for i, (x, y) in enumerate(np.asarray(group.get_offsets())):
                face, edge = (c[i % len(c)] if len(c) else "none" for c in (faces, edges))
                path = group.get_paths()[i % len(group.get_paths())]
                style = to_hex(face if empty(edge) else edge), path.vertices.tobytes()
                found.append(Mark(float(x), float(y), not empty(face), style))
        return found

    def mark_of(self, p) -> Mark:
        """The mark of a point."""
        x, y = p.work.flops / p.work.nbytes, p.work.flops / p.ms / 1e9
        here = [m for m in self.marks() if near(x, m.x) and near(y, m.y)]
        assert here, (
            f"{p.name} {p.note}: want a mark at {x:.4g} FLOP a byte, {y:.4g} TFLOP/s; got marks at "
            f"{[(float(f'{m.x:.4g}'), float(f'{m.y:.4g}')) for m in self.marks()]}"
        )
        return here[0]

    def lines(self):
        """(xs, ys, whether it has no marks) of every line that can be seen."""
        for line in self.main.lines:
            if not seen(line) or empty(line.get_color()) or line.get_linewidth() == 0:
                continue
            if line.get_linestyle() in ("None", "", " "):
                continue
            xs, ys = (np.asarray(values, dtype=float) for values in line.get_data())
            if line.get_transform() != self.main.transData:
                if len(set(ys)) > 1:
                    continue  # axvline
                xs = np.array([1e-300, 1e300])  # axhline: from side to side
            if len(xs) > 1 and len(set(xs)) > 1:
                yield xs, ys, line.get_marker() in ("None", None, "", " ")
        for group in self.main.collections:
            if isinstance(group, LineCollection) and seen(group):
                for segment in group.get_segments():
                    if len(set(segment[:, 0])) > 1:
                        yield segment[:, 0], segment[:, 1], True

    def lines_at(self, x: float, without_marks=False) -> list[float]:
        """Heights of all lines at x, between their vertices straight on logarithmic axes."""
        heights = []
        for xs, ys, plain in self.lines():
            if min(xs) <= x * 1.000001 and x <= max(xs) * 1.000001 and (plain or not without_marks):
                order = np.argsort(xs, kind="stable")
                logs = np.interp(math.log(x), np.log(xs[order]), np.log(ys[order]))
                heights.append(float(np.exp(logs)))
        return heights


@pytest.fixture
def draw(lab, monkeypatch, tmp_path):
    """draw(points, card) -> Drawn: calls roofline_plot and looks at the figure that it saved."""
    saved = []

    def keep(canvas, *args, **kwargs):
        saved.append(canvas.figure)
        (tmp_path / "roofline.png").touch()  # not drawn, which would take most of a test's time

    monkeypatch.setattr(FigureCanvasBase, "print_figure", keep)
    monkeypatch.setattr(FigureCanvasAgg, "print_png", keep)

    def call(points, card):
        given = list(points)
        lab.roofline_plot(points, card, tmp_path / "roofline.png")
        assert points == given, "roofline_plot has changed the list of points that it was given"
        assert len(saved) == 1, (
            f"roofline_plot saved {len(saved)} pictures through savefig or print_png: want 1"
        )
        return Drawn(saved.pop())

    return call


def some_points(lab, measured=True):
    """Points on an H200, two of one name; the last one above the roof, as cached data can be."""
    sizes = [
        ("softmax", 5 * 2**27, 2**30, 0.265, ""),
        ("naive", 2**36, 8_741_000_000, 4.58, "T=2048"),
        ("kernel", 2**32, 92_500_000, 0.0349, "T=512"),
        ("kernel", 2**36, 1_175_000_000, 0.289, "T=2048"),
        ("ideal", 2**36, 2**27, 0.289, ""),
        ("cached", 2**36, 2**29, 0.05, ""),
    ]
    return [
        lab.Point(name, lab.Work(flops, nbytes), ms, measured, note)
        for name, flops, nbytes, ms, note in sizes
    ]


def near(a, b, tolerance=1e-6):
    return math.isclose(a, b, rel_tol=tolerance)


@step5
def test_roofline_plot_writes_a_picture(lab, tmp_path):
    path = tmp_path / "new" / "folder" / "roofline.png"
    got = lab.roofline_plot(some_points(lab), lab.CARDS["H200, measured"], str(path))
    assert got == path, f"want {path!r}, got {got!r}"
    assert path.read_bytes().startswith(b"\x89PNG"), f"{path.name} is no PNG"
    try:
        picture = pyplot.imread(path)
    except Exception as error:
        raise AssertionError(f"{path.name} cannot be read as a picture: {error}") from None
    assert min(picture.shape[:2]) >= 300, f"a picture of {picture.shape[:2]} pixels is too small"
    assert picture[..., :3].std() > 0.01, "the picture is empty"


@step5
def test_roofline_plot_axes(lab, draw):
    axes = draw(some_points(lab), lab.CARDS["H200"]).main
    scales = axes.get_xscale(), axes.get_yscale()
    assert scales == ("log", "log"), f"want both axes logarithmic, got {scales}"
    units = {"x": ("FLOP a byte", "TFLOP/s"), "y": ("TFLOP/s", "FLOP a byte")}
    for axis, label in (("x", axes.get_xlabel()), ("y", axes.get_ylabel())):
        own, other = units[axis]
        assert own in label, f"the label of the {axis} axis must hold {own!r}, got {label!r}"
        assert other not in label, f"{other!r} is no unit of the {axis} axis: {label!r}"


@step5
@pytest.mark.parametrize("name", ["H200", "T4"])
def test_roofline_plot_roof(lab, draw, name):
    card = lab.CARDS[name]
    drawn = draw(some_points(lab), card)
    ridge = card.peak_flops / card.bandwidth
    places = [0.625, 2.0, 8.0, 60.0, ridge * 0.8, ridge, ridge * 1.2, 512.0]
    for x in places:
        want = min(card.peak_flops, card.bandwidth * x) / 1e12
        got = drawn.lines_at(x)
        tolerance = 0.1 if 0.7 < x / ridge < 1.4 else 0.02  # a corner may be a little rounded
        where = "left of" if x < ridge else "right of" if x > ridge else "at"
        assert any(near(y, want, tolerance) for y in got), (
            f"{name}, {where} the ridge point ({ridge:.4g}), at {x:.4g} FLOP a byte: want a line "
            f"at {want:.4g} TFLOP/s, got lines at {[float(f'{y:.4g}') for y in got] or 'no height'}"
        )
        above = [y for y in drawn.lines_at(x, without_marks=True) if y > 1.05 * want]
        assert not above, (
            f"{name}, at {x:.4g} FLOP a byte: a line at {above[0]:.4g} TFLOP/s lies above the "
            f"roof, {want:.4g}: slope and ceiling end where they meet"
        )


@step5
def test_roofline_plot_roof_spans_every_point(lab, draw):
    card = lab.CARDS["RTX 5060"]
    far = [
        lab.Point("far left", lab.Work(1e6, 1e9), 1.0, True),
        lab.Point("far right", lab.Work(1e12, 1e6), 100.0, True),
    ]
    for points in (far, far[:1], far[1:], []):
        drawn = draw(points, card)
        for x in [p.work.intensity for p in points] + [card.peak_flops / card.bandwidth]:
            want = min(card.peak_flops, card.bandwidth * x) / 1e12
            got = drawn.lines_at(x)
            assert any(near(y, want, 0.1) for y in got), (
                f"points at {[p.work.intensity for p in points]} FLOP a byte: want the roof at "
                f"{x:.4g} to be {want:.4g} TFLOP/s high, got {got or 'no line there'}"
            )


@step5
def test_roofline_plot_points(lab, draw):
    points = some_points(lab)
    for given in (points, points[:2], points):  # the second picture knows nothing of the first
        drawn = draw(given, lab.CARDS["H200, measured"])
        low, high = drawn.main.get_xlim(), drawn.main.get_ylim()
        for p in given:
            mark = drawn.mark_of(p)
            assert low[0] <= mark.x <= low[1], f"{p.name} lies beyond the sides of the picture"
            assert high[0] <= mark.y <= high[1], f"{p.name} lies beyond its top or bottom"
        marks = len(drawn.marks())
        assert marks == len(given), f"{len(given)} points: want one mark for each, got {marks}"


@step5
def test_roofline_plot_notes_stand_beside_their_marks(lab, draw):
    points = some_points(lab)
    drawn = draw(points, lab.CARDS["H200, measured"])
    drawn.figure.draw(FigureCanvasAgg(drawn.figure).get_renderer())  # finds places for everything
    inch = drawn.figure.dpi
    for p in (p for p in points if p.note):
        notes = [t for t in drawn.all_texts() if t.get_text().strip() == p.note]
        assert notes, f"the note {p.note!r} does not stand in the picture"
        mark = drawn.mark_of(p)
        x, y = drawn.main.transData.transform((mark.x, mark.y))
        away = []
        for box in (t.get_window_extent() for t in notes):
            dx, dy = max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1)
            away.append(math.hypot(dx, dy) / inch)
        assert min(away) < 1, f"{p.name}: its note {p.note!r} is {min(away):.2g} inches away"


@step5
def test_roofline_plot_says_what_is_predicted(lab, draw):
    points = some_points(lab)
    mixed = [p if p.name != "naive" else lab.Point("naive", p.work, p.ms, False) for p in points]
    for given, wanted in ((points, False), (some_points(lab, False), True), (mixed, True)):
        drawn = draw(given, lab.CARDS["H200"])
        said = "predicted, not measured" in "\n".join(drawn.legend)
        assert said == wanted, (
            f"the legend {'does not say' if wanted else 'says'} 'predicted, not measured' where "
            f"{sum(not p.measured for p in given)} of {len(given)} points are predicted"
        )
        for p in given:
            kind = "measured, so its mark is filled" if p.measured else "predicted, so it is hollow"
            assert drawn.mark_of(p).filled == p.measured, f"{p.name} is {kind}"
        assert len(drawn.marks()) == len(given), "want one mark for each point, filled or hollow"


@step5
def test_roofline_plot_predicted_says_so_for_its_own_name(lab, draw):
    made = lab.Work(2**36, 2**30)
    points = [lab.Point("kernel", made, 1.0, True), lab.Point("kernel", made, 0.5, False)]
    points.append(lab.Point("naive", lab.Work(2**36, 2**33), 3.0, True))
    for given in (points, points[::-1]):
        drawn = draw(given, lab.CARDS["H200"])
        said = {
            word: sorted("predicted, not measured" in t for t in drawn.legend if word in t)
            for word in ("kernel", "naive")
        }
        assert said == {"kernel": [False, True], "naive": [False]}, (
            "the kernel has measured points and predicted ones, naive has measured ones: want an "
            f"entry for each of these three kinds, got {drawn.legend}"
        )
        for legend in drawn.legends():
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
                if "kernel" in text.get_text() and isinstance(handle, (Line2D, PathCollection)):
                    predicted = "predicted" in text.get_text()
                    assert filled(handle) != predicted, f"wrong mark beside {text.get_text()!r}"


@step5
def test_roofline_plot_legend_names_each_kind_once(lab, draw):
    points = some_points(lab)
    for given in (points, points[:1]):
        legend = draw(given, lab.CARDS["H200"]).legend
        for name in {p.name for p in given}:
            times = sum(name in text for text in legend)
            assert times == 1, f"the legend must name {name!r} once, got {legend}"


@step5
def test_roofline_plot_tells_names_apart(lab, draw):
    made = lab.Work(2**36, 2**30)
    points = [lab.Point(f"kernel {i}", made, 1.0 + i, True) for i in range(8)]
    for given in (points[: len(lab.COLOURS)], points):  # 8 names: colours and markers start over
        drawn = draw(given, lab.CARDS["H200"])
        styles = {drawn.mark_of(p).style for p in given}
        if given is not points:
            assert len(styles) == len(given), f"{len(given)} names, drawn in {len(styles)} ways"


@step5
def test_roofline_plot_names_the_card_and_its_source(lab, draw):
    for name in ("RTX 5060", "H200, measured"):
        card = lab.CARDS[name]
        texts = draw(some_points(lab), card).texts
        for part in (card.name, card.source):
            assert part in texts, f"the picture does not say {part!r}"


@step5
def test_roofline_plot_leaves_no_figure_open(lab, draw):
    before = pyplot.get_fignums()
    for _ in range(3):
        draw(some_points(lab), lab.CARDS["H200"])
    assert pyplot.get_fignums() == before, "figures stay open in pyplot: close yours"


@step5
def test_roofline_plot_rejects(lab, draw, tmp_path):
    card = lab.CARDS["H200"]
    draw([], card)
    for flops, nbytes in ((0, 100), (100, 0)):
        bad = lab.Point("copy", lab.Work(flops, nbytes), 1.0, True)
        rejects(lab.roofline_plot, [bad], card, tmp_path / "bad.png", names=["copy"])
