"""Lab 03, your file: FLOPs, bytes and time of attention, predicted before anything is measured.

Write the eleven places marked TODO, in order; everything else is given. The handout, README.md
beside this file, leads through them. See where you stand with: pytest labs/03_roofline

Plain Python numbers, no tensors. Counts are ints; nothing is rounded. Letters: B batch, H heads,
T sequence length, D head dim. Units: FLOP, bytes, FLOP/s, bytes/s; times in ms, the cost of a
launch in us.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from labs._harness.checks import check_blocks

LSE_BYTES = 4  # a flash kernel also stores one float32 for each query row, whatever the dtype
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito
MARKERS = "osD^vP"


def _check_from_zero(**values) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:  # NaN is refused too
            raise ValueError(f"{name} must be a finite number from 0 up: got {value!r}")


def _check_positive(**values) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0: got {value!r}")


def _check_sizes(causal, **sizes) -> None:
    """Refuses a `causal` that is no bool (a size in its place), and sizes below 1."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False: got {causal!r}")
    check_blocks(**sizes)


# ---------------------------------------------------------------- given: what is talked about
@dataclass(frozen=True)
class Card:
    """The two numbers of a card, and where they come from.

    Attributes:
        name: such as "RTX 5060".
        peak_flops: FLOP/s of dense half-precision matrix products with float32 accumulation.
        bandwidth: bytes/s between the chip and its DRAM.
        memory: bytes of DRAM.
        source: the document, or how it was measured.
        measured: whether both numbers were measured; False for a data sheet's.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory: float
    source: str
    measured: bool = False

    def __post_init__(self):
        _check_positive(peak_flops=self.peak_flops, bandwidth=self.bandwidth, memory=self.memory)


@dataclass(frozen=True)
class Work:
    """What a piece of code has to do: FLOP, bytes moved between chip and DRAM, kernel launches."""

    flops: float
    nbytes: float
    launches: int = 1

    def __post_init__(self):
        _check_from_zero(flops=self.flops, nbytes=self.nbytes)
        check_blocks(launches=self.launches)

    @property
    def intensity(self) -> float:
        """FLOP for each byte moved; infinite where nothing is moved."""
        return self.flops / self.nbytes if self.nbytes else math.inf


@dataclass(frozen=True)
class Point:
    """One mark in a roofline picture.

    Attributes:
        name: what the legend calls it; points of one name share colour and marker.
        work: FLOP and bytes, which give its place from left to right.
        ms: the time, which with the FLOP gives its height.
        measured: whether `ms` was measured; False for a prediction.
        note: short text beside the mark, such as "T=2048".
    """

    name: str
    work: Work
    ms: float
    measured: bool
    note: str = ""

    def __post_init__(self):
        _check_positive(ms=self.ms)

    @property
    def tflops(self) -> float:
        """The rate in TFLOP/s."""
        return self.work.flops / self.ms / 1e9


CARDS = {
    card.name: card
    for card in (
        Card("A100", 312e12, 2039e9, 80e9, "NVIDIA A100 80GB data sheet, SXM"),
        Card("H100", 989.5e12, 3.35e12, 80e9, "NVIDIA H100 data sheet, SXM: half of 1,979 sparse"),
        Card("H200", 989.5e12, 4.8e12, 141e9, "NVIDIA H200 data sheet, SXM: half of 1,979 sparse"),
        Card("RTX 3090", 71e12, 936e9, 24e9, "NVIDIA Ampere GA102 whitepaper, appendix A"),
        Card("RTX 4090", 165.2e12, 1008e9, 24e9, "NVIDIA Ada GPU whitepaper, appendix A"),
        # 512 FLOP a clock and multiprocessor, as for the other RTX cards here, 30 of them, 2.5 GHz.
        Card("RTX 5060", 38.4e12, 448e9, 8e9, "NVIDIA RTX 5060 product page, 512 x 30 x 2.5 GHz"),
        Card("RTX 5090", 209.5e12, 1792e9, 32e9, "NVIDIA RTX Blackwell GPU whitepaper"),
        Card("T4", 65e12, 320e9, 16e9, "NVIDIA T4 data sheet; 256 bits at 10 Gbit/s"),
        Card(
            "H200, measured",
            804e12,
            4.24e12,
            141e9,
            "measured: bf16 matmul 8192^3 and device copy, torch 2.11, triton 3.6",
            measured=True,
        ),
    )
}


def softmax_work(rows, columns, dtype_bytes) -> Work:
    """A row softmax in one kernel: the pattern of every count below.

    Args:
        rows, columns: shape of the matrix. dtype_bytes: bytes of one element.

    Returns:
        Work: 5 FLOP an element (compare, subtract, exponentiate, add, divide), each element read
        once and written once, 1 launch.

    Raises:
        ValueError: a size below 1.
    """
    check_blocks(rows=rows, columns=columns, dtype_bytes=dtype_bytes)
    return Work(5 * rows * columns, 2 * rows * columns * dtype_bytes)


# ---------------------------------------------------------------- step 1
def visible_pairs(queries, keys, causal, window=None):
    """How many (query, key) pairs are computed at all, counted exactly, for one head.

    Query i stands at position keys - queries + i: the queries are the newest tokens. When causal it
    sees the keys at its own position and before it; a query at a negative position sees none.

    Args:
        queries, keys: how many there are.
        causal: whether a query is kept from seeing later keys.
        window: most keys that a query sees, itself included; None for no limit. Needs causal.

    Returns:
        The number of pairs, exact, an int. No mask is made: memory and time grow with `queries` at
        most, never with queries times keys.

    Raises:
        ValueError: a size or a window below 1, a window without causal, a causal that is no bool.
    """
    _check_sizes(causal, queries=queries, keys=keys)
    if window is not None:
        check_blocks(window=window)
        if not causal:
            raise ValueError(f"a window needs causal=True: got causal={causal}, window={window}")
    # TODO step 1 (about 4 lines; handout section 2)
    #   all pairs unless causal; else add up, query by query, how many keys each one sees
    #   mind: a query before the first key sees none, and a window caps what one sees
    raise NotImplementedError("lab 03 step 1: write visible_pairs")


def attention_flops(batch, heads, seq, head_dim, causal):
    """FLOP of attention forward as benchmarks count them: two products, half when causal.

    The convention counts a multiplication and an addition as 2 FLOP, leaves the softmax out, and
    takes exactly half of the square when causal. Source: Dao, "FlashAttention-2" (2023), section
    4.1.

    Args:
        batch, heads, seq, head_dim: B, H, T and D, as many keys as queries.
        causal: whether a query is kept from seeing later keys.

    Returns:
        FLOP of both products together, exact, an int.

    Raises:
        ValueError: a size below 1, or a causal that is no bool.
    """
    _check_sizes(causal, batch=batch, heads=heads, seq=seq, head_dim=head_dim)
    # TODO step 1, second half (about 2 lines; handout section 2)
    #   two products of 2 B H T T D each; half of that when causal, and a whole number
    raise NotImplementedError("lab 03 step 1: write attention_flops")


# ---------------------------------------------------------------- step 2
def scores_bytes(batch, heads, seq, dtype_bytes):
    """Bytes of one whole score matrix, (B, H, T, T): what a flash kernel never stores.

    Args:
        batch, heads, seq: B, H and T. dtype_bytes: bytes of one score.

    Returns:
        Bytes, an int.

    Raises:
        ValueError: a size below 1.
    """
    check_blocks(batch=batch, heads=heads, seq=seq, dtype_bytes=dtype_bytes)
    # TODO step 2 (1 line; handout section 3)
    #   elements of (B, H, T, T), times the bytes of one
    raise NotImplementedError("lab 03 step 2: write scores_bytes")


def attention_bytes(batch, heads, seq, head_dim, causal, dtype_bytes):
    """The ideal: Q, K and V read once, the output written once, nothing else.

    Args:
        batch, heads, seq, head_dim: B, H, T and D.
        causal: has no influence; here so that this function and the next two begin with the same
            five arguments, (batch, heads, seq, head_dim, causal).
        dtype_bytes: bytes of one element.

    Returns:
        Bytes, an int: no correct code can move fewer.

    Raises:
        ValueError: a size below 1, or a causal that is no bool.
    """
    sizes = {"batch": batch, "heads": heads, "seq": seq, "head_dim": head_dim}
    _check_sizes(causal, **sizes, dtype_bytes=dtype_bytes)
    # TODO step 2, second part (1 line; handout section 3)
    #   how many tensors of (B, H, T, D) cross between chip and memory at the least?
    raise NotImplementedError("lab 03 step 2: write attention_bytes")


def naive_attention_bytes(batch, heads, seq, head_dim, causal, dtype_bytes):
    """Bytes moved by attention as separate PyTorch operations, each with its own trip to memory.

    Counted by the operation: each reads its inputs once and writes its output once. They are the
    product q k^T, the division by sqrt(D), when causal masked_fill, softmax, the product with v.
    When causal also a mask of 1 byte an element, one for all heads, is written by ones, read and
    written by triu, and read by masked_fill.

    Args:
        batch, heads, seq, head_dim, causal, dtype_bytes: as in `attention_bytes`.

    Returns:
        Bytes, an int.

    Raises:
        ValueError: a size below 1, or a causal that is no bool.
    """
    sizes = {"batch": batch, "heads": heads, "seq": seq, "head_dim": head_dim}
    _check_sizes(causal, **sizes, dtype_bytes=dtype_bytes)
    # TODO step 2, third part (about 4 lines; handout section 3)
    #   how often the scores cross: once for each operation that reads them, and for each that
    #   writes them; then q, k, v and the output; when causal, the mask
    raise NotImplementedError("lab 03 step 2: write naive_attention_bytes")


def flash_attention_bytes(batch, heads, seq, head_dim, causal, dtype_bytes, block_m, block_n=64):
    """Bytes that a flash kernel asks for: K and V streamed past every tile of queries.

    Each tile of block_m queries is a program of its own. It reads its queries once, then the keys
    and values in whole tiles of block_n (none past the last key), all of them, or when causal those
    up to the tile that holds its own last row; it writes its rows of the output, and of lse in
    float32. Source: Dao, "FlashAttention-2" (2023), algorithm 1.

    Args:
        batch, heads, seq, head_dim, causal, dtype_bytes: as in `attention_bytes`.
        block_m, block_n: rows of a query tile and of a key tile, any number from 1 up.

    Returns:
        Bytes asked for, an int. Caches are not in this count: of what is asked for twice,
        DRAM may see less.

    Raises:
        ValueError: a size below 1, or a causal that is no bool.
    """
    sizes = {"batch": batch, "heads": heads, "seq": seq, "head_dim": head_dim}
    _check_sizes(causal, **sizes, dtype_bytes=dtype_bytes, block_m=block_m, block_n=block_n)
    # TODO step 2, last part (about 6 lines; handout section 3)
    #   for each tile of queries: how many rows of K it loads; add them up
    #   then the bytes of one head: q and out by row, K and V by row, lse; times the heads
    raise NotImplementedError("lab 03 step 2: write flash_attention_bytes")


# ---------------------------------------------------------------- step 3
def ridge_point(peak_flops, bandwidth):
    """The intensity from which on a card is limited by arithmetic and no longer by memory.

    Source: Williams, Waterman and Patterson, "Roofline" (2009).

    Args:
        peak_flops: FLOP/s. bandwidth: bytes/s.

    Returns:
        FLOP a byte.

    Raises:
        ValueError: a number that is not finite and above 0.
    """
    _check_positive(peak_flops=peak_flops, bandwidth=bandwidth)
    # TODO step 3 (1 line; handout section 4)
    #   at which intensity do the two times, for the FLOP and for the bytes, come out equal?
    raise NotImplementedError("lab 03 step 3: write ridge_point")


def limits(work, card, launch_us=0.0):
    """The three times that a piece of work takes at the least: arithmetic, memory, launches.

    Args:
        work: Work; each of its launches counts.
        card: Card.
        launch_us: microseconds that the host needs to start one kernel.

    Returns:
        A dict of three times in ms: "compute", "memory", "launch", in this order. A time is 0
        where there is nothing of its kind to do.

    Raises:
        ValueError: launch_us is negative or not finite.
    """
    _check_from_zero(launch_us=launch_us)
    # TODO step 3, second part (about 5 lines; handout section 4)
    #   a dict of three times in ms: what is to be done, divided by how much of it goes in a second
    raise NotImplementedError("lab 03 step 3: write limits")


def bound_by(work, card, launch_us=0.0):
    """Which of the three limits takes the longest.

    Args:
        work, card, launch_us: as in `limits`.

    Returns:
        "compute", "memory" or "launch". Of two that take equally long, the one named first here.

    Raises:
        ValueError: as `limits`.
    """
    # TODO step 3, last part (about 2 lines; handout section 4)
    #   the name of the longest of the three; equal times go to the name that comes first
    raise NotImplementedError("lab 03 step 3: write bound_by")


# ---------------------------------------------------------------- step 4
def predict_ms(work, card, launch_us=0.0):
    """The time that no code with this work on this card can beat.

    The three limits overlap: while one kernel computes, its next bytes are on their way and the
    host starts the next kernel. So the longest of the three counts, and not their sum.

    Args:
        work, card, launch_us: as in `limits`.

    Returns:
        ms, a lower bound.

    Raises:
        ValueError: as `limits`.
    """
    # TODO step 4 (1 line; handout section 5)
    #   what do three limits that overlap make together?
    raise NotImplementedError("lab 03 step 4: write predict_ms")


def naive_work(batch, heads, seq, head_dim, causal, dtype_bytes) -> Work:
    """Work of lab 06's naive_attention. Given; arguments as in `naive_attention_bytes`.

    Its products compute the whole square, also when causal. Launches are counted like the bytes, by
    the operation: product, division, softmax, product; when causal also ones, triu, masked_fill.
    (PyTorch runs masked_fill as two kernels, a copy and a fill: in truth it is one more.)
    """
    flops = attention_flops(batch, heads, seq, head_dim, False)
    nbytes = naive_attention_bytes(batch, heads, seq, head_dim, causal, dtype_bytes)
    return Work(flops, nbytes, launches=7 if causal else 4)


def flash_work(batch, heads, seq, head_dim, causal, dtype_bytes, block_m, block_n=64) -> Work:
    """Work of a flash kernel. Given; arguments as in `flash_attention_bytes`."""
    flops = attention_flops(batch, heads, seq, head_dim, causal)
    sizes = (batch, heads, seq, head_dim, causal, dtype_bytes)
    return Work(flops, flash_attention_bytes(*sizes, block_m, block_n))


def ideal_work(batch, heads, seq, head_dim, causal, dtype_bytes) -> Work:
    """The least work that attention is. Given; arguments as in `attention_bytes`."""
    flops = attention_flops(batch, heads, seq, head_dim, causal)
    return Work(flops, attention_bytes(batch, heads, seq, head_dim, causal, dtype_bytes))


# ---------------------------------------------------------------- step 5
def roofline_plot(points, card, path: str | Path) -> Path:
    """Draws points under the roof of a card, both axes logarithmic, and saves the picture.

    What the picture holds:
    - From left to right FLOP a byte, upwards TFLOP/s; each axis label holds its own of these words
      and not the other's.
    - The roof: bandwidth times intensity up to the ridge point, peak_flops from there on. It
      reaches from the leftmost point to the rightmost, over the ridge point at least. No other
      line without marks rises above it; upright lines may.
    - One mark for each point, at (work.intensity, tflops), wherever that is, also above the roof;
      no other marks. Measured ones are filled, predicted ones hollow (face colour "none" or white).
      Names differ in colour or marker, as long as there are no more names than COLOURS.
    - The note of each point that has one, less than an inch from its mark.
    - A legend, also for a single point, with one entry for each kind. A kind is a name with all of
      its measured points, or with all of its predicted ones. The entry holds the name, and for
      predicted points also the words "predicted, not measured".
    - The card's name and source. Nothing of this is transparent, or white on white.

    Args:
        points: list of Points, any number; a name may have measured and predicted ones. The list is
            left as it is.
        card: Card.
        path: of the PNG, text or Path; its folder is made where it is missing. Written with
            savefig (or the canvas's print_png), once.

    Returns:
        The path as a Path. No figure stays open in pyplot.

    Raises:
        ValueError: a point without FLOP or without bytes: it has no place on logarithmic axes.
    """
    for p in points:
        if not 0 < p.work.intensity < math.inf:
            raise ValueError(f"{p.name} has no place on log axes: got {p.work}")
    # TODO step 5 (about 35 lines; handout section 6)
    #   from matplotlib.figure import Figure: a figure of your own, which pyplot knows nothing of
    #   figure.subplots(), axes.loglog for the roof, with a corner at the ridge point
    #   axes.plot for the points of each (name, measured), with a label; annotate for the notes
    #   labels, title, legend; make the folder, figure.savefig, return the path
    raise NotImplementedError("lab 03 step 5: write roofline_plot")
