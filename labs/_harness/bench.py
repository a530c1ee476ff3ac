"""`python -m labs bench NN`: one honest picture of a lab's code on this card.

On a GPU it times: two ceilings of the card first, then every provider of the lab's sweeps, with the
timed output checked against float64. Without a GPU it counts instead: bytes moved and peak extra
memory, taken while the real code runs, beside the handout's formulas. It never times the
interpreter.

A lab's bench.py says what is compared. It defines

    timed(module, options, gpu) -> list[Sweep]      what to time on a GPU
    counted(module, options) -> list[Sweep]         what to count without one
    check(module, options, gpu) -> list[Check]      what --check wants (optional)
    closing(module, options, report, rows, folder) -> (text, files)
                                                    what the lab adds to the report (optional)
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch

from labs._harness import interpreter, runtime, work
from labs._impl import LABS, ROOT, LoadError, find_lab, labs, load

ROUNDS = 2  # each provider is timed in turn, then each once more, so that a drift hits all alike
L2_FLUSH_BYTES = 256 << 20
CARD_LAB = "03"  # the one that predicts for a card that is not here
UNWRITTEN = re.compile(r"lab \d+ step \d+: write \w+")

EPILOG = """examples:
  python -m labs bench 06                         your code; times on a GPU, counts without one
  python -m labs bench 06 --impl solution         the reference
  python -m labs bench 06 --tune --lengths 2048   the best tile sizes at T=2048 (GPU)
  python -m labs bench 06 --check                 pass or fail, for scripts (GPU)
  python -m labs bench 03 --card T4               predict for a card that is not here (no GPU)

exit codes: 0 everything of yours ran and is right; 1 something is wrong, or not written yet;
2 bad arguments, or --check or --tune without a GPU; 130 stopped by Ctrl-C (what was done is
kept)"""


# ---------------------------------------------------------------- what a lab's bench.py gives
@dataclass(frozen=True)
class Provider:
    """One piece of code in a comparison.

    Attributes:
        name: at most 22 characters, for tables and legends; one that begins with "yours" begins
            with "reference" where the reference runs.
        run: run(*inputs) -> the output to check, a tensor.
        yours: from the lab's file under test; its outputs decide the exit code.
        kernel: runs a Triton kernel, so it needs Triton, and its bytes are counted in the
            interpreter. Otherwise the bytes of PyTorch operations are counted.
        context: a context manager entered around its runs, to pin a backend.
        checked: whether the output is compared with the reference (a plain copy has none).
        moved, peak: the handout's formulas, size -> bytes, for counting.
        config: settings such as tile sizes, for the results.
    """

    name: str
    run: Callable[..., torch.Tensor]
    yours: bool = False
    kernel: bool = False
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    checked: bool = True
    moved: Callable[[int], int] | None = None
    peak: Callable[[int], int] | None = None
    config: str = ""

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        with self.context():
            return self.run(*inputs)


@dataclass(frozen=True)
class Sweep:
    """Providers against sizes: one table, and one or two pictures.

    Attributes:
        name: stem of its files. title: says the fixed sizes and the dtype.
        axis: what the sizes are, such as "T". sizes: in the order to run them.
        inputs: size -> tensors on the device, random normal, never zeros.
        verify: verify(inputs, output) -> (error, budget), against float64.
        unit, work: the rate: size -> FLOP for "TFLOP/s", bytes for "TB/s".
        ceiling: which measured bound the percentage is of, "matmul" or "copy".
        tune: configurations to try per size; the fastest right one runs as `tuned`.
        cost: names of the providers in the picture of latency and memory; empty: no such picture.
        exact: whether a count of bytes that is not its formula is WRONG: where the formula is the
            lab's own code.
    """

    name: str
    title: str
    axis: str
    sizes: list[int]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    providers: list[Provider]
    verify: Callable[[tuple[torch.Tensor, ...], torch.Tensor], tuple[float, float]]
    unit: str = ""
    work: Callable[[int], float] | None = None
    ceiling: str = "matmul"
    tune: list[Provider] = field(default_factory=list)
    tuned: str = ""
    cost: tuple[str, ...] = ()
    exact: bool = False


@dataclass(frozen=True)
class Check:
    """One requirement of --check: what was measured, what was wanted, whether it holds."""

    what: str
    got: str
    wanted: str
    ok: bool


@dataclass
class Row:
    """One provider at one size. Times in ms; memory and traffic in bytes; percent of the ceiling.

    `status` is "ok", "OOM", "n/a" (cannot run here), "WRONG" (not ranked), "unwritten" or "error";
    `reason` says why. `error` is that of the output that was timed or counted.
    """

    sweep: str
    size: int
    provider: str
    yours: bool
    config: str = ""
    status: str = "ok"
    reason: str = ""
    ms: float | None = None
    ms_q1: float | None = None
    ms_q3: float | None = None
    rate: float | None = None
    unit: str = ""
    percent: float | None = None
    moved: int | None = None
    moved_formula: int | None = None
    peak: int | None = None
    peak_formula: int | None = None
    error: float | None = None
    budget: float | None = None


class ContextLost(RuntimeError):
    """A kernel broke the CUDA context; nothing more can run in this process."""


# ---------------------------------------------------------------- what attention labs share
def sdpa(name: str, backend: str, causal: bool) -> Provider:
    """SDPA with one backend pinned; is_causal, because a mask would send it to a slower path.

    Runs on q, k and v, grouped or not, and leaves inputs behind them alone.
    """

    def context():
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, backend))

    def run(q, k, v, *_):
        grouped = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=grouped
        )

    return Provider(name, run, context=context)


def attention_error(inputs, out, causal=True, window=None, tf32=True) -> tuple[float, float]:
    """(largest relative error of a sampled row, budget), against float64.

    Up to 4 heads and 32 query rows are compared: the first two, the last, and random ones.
    The error is |out - want| / |want| over the row; the budget 8 ulp of the dtype (of TF32 at
    least, which a GPU may use for float32; of 16 bits on a CPU and without `tf32`).

    Args:
        inputs: q, k, v of one length; k and v may have fewer heads, each for a group of q's.
        window: keys that a query sees, itself the last; needs causal.
    """
    q, k, v = inputs
    B, H, T, D = q.shape
    budget = 8 * max(torch.finfo(q.dtype).eps, 2**-10 if q.is_cuda and tf32 else 2**-16)
    if not isinstance(out, torch.Tensor) or out.shape != q.shape:
        return math.inf, budget
    pick = torch.Generator().manual_seed(T)
    random_rows = torch.randint(0, T, (29,), generator=pick)
    rows = torch.cat([torch.tensor([0, min(1, T - 1), T - 1]), random_rows]).unique().to(q.device)
    heads = {0, B * H - 1, *torch.randint(0, B * H, (2,), generator=pick).tolist()}
    behind = rows[:, None] - torch.arange(T, device=q.device)[None, :]
    hidden = (behind < 0) | (behind >= (window or T))
    errors = []
    for b, h in (divmod(head, H) for head in heads):
        g = h // (H // k.shape[1])
        s = q[b, h, rows].double() @ k[b, g].double().T / math.sqrt(D)
        if causal:
            s = s.masked_fill(hidden, float("-inf"))
        want = s.softmax(dim=-1) @ v[b, g].double()
        errors.append((out[b, h, rows].double() - want).norm(dim=-1) / want.norm(dim=-1))
    return torch.cat(errors).max().item(), budget


# ---------------------------------------------------------------- the card
def flushes_for(host_ms, kernel_ms, flush_ms=0.05) -> int:
    """How often to flush so that the card is busy for twice the time that a launch takes the host.

    Args:
        host_ms: of launching a call. kernel_ms: of the card, for the call.
        flush_ms: of the card, for a flush: 256 MiB are written in 0.06 ms at 4.2 TB/s, and slower
            cards take longer.

    Returns:
        from 1 to 20: a call that waits for its own result is not worth more.
    """
    return max(1, min(20, math.ceil((2 * host_ms - kernel_ms) / flush_ms)))


class Gpu:
    """The card that times are taken on. Tests stand in for it with a fake clock."""

    device = "cuda"

    def sync(self) -> None:
        torch.cuda.synchronize()

    def settle(self) -> None:
        """Gives cached memory back, after running out of it."""
        gc.collect()
        torch.cuda.empty_cache()

    def free(self) -> int:
        """Bytes of memory that tensors can still take."""
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached

    def cap_memory(self) -> None:
        """Makes what does not fit run out of memory, also where the driver would swap to the host.

        On Windows and in WSL the driver pages to system memory instead, and times mean nothing.
        """
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(0.97 * free / total)

    def time(self, fn: Callable[[], object], warmup_ms=100.0, rep_ms=150.0) -> list[float]:
        """Times calls with CUDA events, the L2 cache flushed before each.

        Where a call takes the host longer to launch than the card to run, it is flushed more than
        once: the card is busy until the launch is there, and the time is the card's alone.

        Returns:
            ms of each call after the warm-up, at least 3 and at most 1000 of them.

        Raises:
            RuntimeError: kernels run in the interpreter, whose times would mean nothing.
        """
        if runtime.setup().interpret:
            raise RuntimeError("kernels run in the CPU interpreter here: its times mean nothing")
        flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=self.device)

        def calls(n):
            events = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(n)]
            for start, end in events:
                for _ in range(flushes):
                    flush.zero_()
                start.record()
                fn()
                end.record()
            self.sync()
            return [start.elapsed_time(end) for start, end in events]

        def launch_ms():
            began = time.perf_counter()
            fn()
            took = 1e3 * (time.perf_counter() - began)
            self.sync()
            return took

        flushes = 1
        fn()
        each = max(statistics.median(calls(3)), 1e-3)
        host = statistics.median(launch_ms() for _ in range(3))
        flushes = flushes_for(host, each)
        calls(min(1000, math.ceil(warmup_ms / each)))
        return calls(min(1000, max(3, math.ceil(rep_ms / each))))

    def medians(self, calls: dict[str, Callable[[], object]], rounds=4) -> dict[str, float]:
        """Median ms of each call, timed in turn, in every other round the other way about.

        A card that heats up or throttles meanwhile then does so for all of them alike.
        """
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds):
            for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
                times[name] += self.time(call, warmup_ms=200.0 / rounds, rep_ms=300.0 / rounds)
        return {name: statistics.median(samples) for name, samples in times.items()}

    def peak(self, fn: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
        """(output, most bytes allocated during the call beyond those before it)."""
        self.sync()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = fn()
        self.sync()
        return output, torch.cuda.max_memory_allocated() - before

    def check_alive(self, culprit: str) -> None:
        """Raises ContextLost if the last error has broken the CUDA context."""
        try:
            self.sync()
        except RuntimeError as error:
            first = str(error).split("\n")[0]
            raise ContextLost(f"the CUDA context was lost in {culprit}: {first}") from None

    def describe(self) -> dict:
        """Name, compute capability, memory, driver, and clock and power as they are now."""
        p = torch.cuda.get_device_properties(0)
        info = {
            "card": p.name,
            "capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_gib": round(p.total_memory / 2**30, 1),
        }
        fields = "driver_version,clocks.sm,clocks.mem,power.draw"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
            values = text.strip().split("\n")[0].split(", ")
            info |= dict(zip(fields.split(","), values, strict=True))
        except (OSError, ValueError, subprocess.SubprocessError):
            info["driver_version"] = "unknown (no nvidia-smi)"
        return info


def ceilings(gpu: Gpu) -> dict[str, tuple[float, str, str]]:
    """What the card can do at best, measured: {"matmul": (rate, unit, how), "copy": ...}."""
    n = 8192
    while n > 128 and 6 * n * n > gpu.free() / 4:
        n //= 2
    a, b = (torch.randn(n, n, device=gpu.device, dtype=torch.bfloat16) for _ in range(2))
    ms = statistics.median(gpu.time(lambda: a @ b))
    found = {"matmul": (2 * n**3 / ms / 1e9, "TFLOP/s", f"bf16 matmul {n}x{n}x{n}")}
    size = min(1 << 30, gpu.free() // 8) // 4
    x = torch.randn(size, device=gpu.device)
    y = torch.empty_like(x)
    ms = statistics.median(gpu.time(lambda: y.copy_(x)))
    how = f"device copy of {size * 4 / 2**20:,.0f} MiB, read + write"
    found["copy"] = (2 * 4 * size / ms / 1e9, "TB/s", how)
    return found


def fit(wanted: int, bytes_each: int, gpu: Gpu) -> int:
    """The largest of wanted, wanted/2, ... whose bytes fit in 80% of the free memory; 1 or more."""
    while wanted > 1 and wanted * bytes_each > 0.8 * gpu.free():
        wanted //= 2
    return wanted


# ---------------------------------------------------------------- running one provider
def unwritten(error: BaseException | None) -> str | None:
    """The message of an unwritten step, if that is what an exception (or its cause) says."""
    while error is not None:
        match = UNWRITTEN.search(str(error))
        if match:
            return match[0]
        error = error.__cause__ or error.__context__
    return None


def _attempt(row: Row, provider: Provider, action: Callable[[], None], gpu: Gpu | None) -> bool:
    """Runs `action` for a row; a failure becomes the row's status. Returns whether it is ok."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with provider.context(), torch.no_grad():
                action()
            return row.status == "ok"
        except torch.OutOfMemoryError:
            row.status, row.reason = "OOM", "out of memory"
        except Exception as error:
            step = unwritten(error)
            lines = [line.strip() for line in str(error).split("\n") if line.strip()] or [""]
            row.reason = f"{type(error).__name__}: {lines[0]}"
            if step:
                row.status, row.reason = "unwritten", step
            elif provider.yours:
                row.status = "error"
            else:
                row.status = "n/a"
                row.reason = _backend_reason(caught) or row.reason
    if gpu is not None:  # outside the handler, which holds the tensors of the failed call
        gpu.check_alive(row.provider)
        gpu.settle()
    return False


def _backend_reason(caught) -> str:
    """Why SDPA refused a backend: it says so in warnings, "X not used because:", then the cause."""
    texts = [re.sub(r"\s*\(Triggered internally.*", "", str(w.message)) for w in caught]
    texts = [text.strip().split("\n")[0] for text in texts]
    idle = ("because:", "runtime disabled.")  # a heading; the backends that were not asked for
    causes = [text for text in texts if not text.endswith(idle)]
    return causes[0] if causes else ""


def _judge(row: Row, provider: Provider, sweep: Sweep, inputs, output) -> None:
    """Compares an output with float64; marks the row WRONG if it is outside its budget."""
    if not provider.checked:
        return
    row.error, row.budget = sweep.verify(inputs, output)
    if not row.error <= row.budget:  # NaN is wrong too
        row.status = "WRONG"
        row.reason = f"relative error {row.error:.2g}, budget {row.budget:.2g}"


def _cannot_run(provider: Provider, counting: bool) -> str | None:
    if not provider.kernel:
        return None
    if counting:
        return interpreter.unavailable()
    return None if runtime.setup().has_triton else "Triton is not installed"


# ---------------------------------------------------------------- timing
def time_size(sweep: Sweep, size: int, gpu: Gpu, ceiling: float, rows: list[Row], say) -> None:
    """Times all providers of a sweep at one size, interleaved, and checks what was timed.

    Rows are appended even when it is interrupted, with the samples taken so far.
    """
    inputs = _inputs(sweep, size, gpu, rows)
    if inputs is None:
        return
    providers = sweep.providers
    best = _tune(sweep, size, inputs, gpu, ceiling, rows, say)
    if best is not None:
        providers = [replace(best, name=p.name) if p.name == sweep.tuned else p for p in providers]
    trials: list[tuple[Provider, Row, list[float]]] = []
    try:
        for p in providers:
            trials.append((p, _new_row(sweep, size, p), []))
            _start(trials[-1][1], p, sweep, inputs, gpu)
        for _ in range(ROUNDS):
            for p, row, samples in trials:
                if row.status == "ok":
                    _time(row, p, sweep, inputs, gpu, samples)
    finally:
        for _, row, samples in trials:
            _finish(row, sweep, samples, ceiling)
            if row.ms is not None or row.status != "ok":
                rows.append(row)
                say(_progress(row, sweep))


def _inputs(sweep, size, gpu, rows) -> tuple[torch.Tensor, ...] | None:
    """The inputs of one size; None, and a row for each provider, where they do not fit."""
    try:
        return sweep.inputs(size)
    except torch.OutOfMemoryError:
        for p in sweep.providers:
            row = _new_row(sweep, size, p)
            row.status, row.reason = "OOM", "the inputs alone do not fit"
            rows.append(row)
    gpu.settle()
    return None


def _new_row(sweep, size, provider) -> Row:
    return Row(sweep.name, size, provider.name, provider.yours, provider.config, unit=sweep.unit)


def _start(row, provider, sweep, inputs, gpu) -> None:
    """First runs of a provider: compiles, checks once on poisoned memory, measures peak memory."""
    missing = _cannot_run(provider, counting=False)
    if missing:
        row.status, row.reason = "n/a", missing
        return

    def first():
        # Poison is for the code under test: SDPA refuses some backends in deterministic mode.
        with _poisoned_empty() if provider.yours else contextlib.nullcontext():
            _judge(row, provider, sweep, inputs, provider.run(*inputs))
        _, row.peak = gpu.peak(lambda: provider.run(*inputs))

    _attempt(row, provider, first, gpu)


@contextlib.contextmanager
def _poisoned_empty():
    """torch.empty hands out NaN: a kernel that writes nothing shows, whatever lay there before."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _time(row, provider, sweep, inputs, gpu, samples, rep_ms=150.0) -> None:
    """Times one provider once, and checks the very output that was timed last."""
    last = [None]

    def call():
        last[0] = provider.run(*inputs)
        return last[0]

    def timed():
        samples.extend(gpu.time(call, rep_ms=rep_ms))
        _judge(row, provider, sweep, inputs, last[0])

    _attempt(row, provider, timed, gpu)


def _finish(row: Row, sweep: Sweep, samples: list[float], ceiling: float) -> None:
    if row.status != "ok" or not samples:
        return
    row.ms = statistics.median(samples)
    row.ms_q1, _, row.ms_q3 = (
        statistics.quantiles(samples, n=4) if len(samples) > 1 else [row.ms] * 3
    )
    row.rate = sweep.work(row.size) / row.ms / 1e9  # FLOP (bytes) per ms -> TFLOP/s (TB/s)
    row.percent = 100 * row.rate / ceiling


def _tune(sweep, size, inputs, gpu, ceiling, rows, say) -> Provider | None:
    """Tries each configuration on its own, adding a row for each; the fastest right one."""
    best, best_ms = None, math.inf
    for provider in sweep.tune:
        row, samples = _new_row(sweep, size, provider), []
        row.sweep = f"{sweep.name}-tune"
        _start(row, provider, sweep, inputs, gpu)
        if row.status == "ok":
            _time(row, provider, sweep, inputs, gpu, samples, rep_ms=60.0)
        _finish(row, sweep, samples, ceiling)
        say(f"tune {_progress(row, sweep)}")
        rows.append(row)
        if row.status == "unwritten":
            break
        if row.ms is not None and row.ms < best_ms:
            best, best_ms = provider, row.ms
    return best


def _progress(row: Row, sweep: Sweep) -> str:
    what = f"{sweep.axis}={row.size} {row.provider} {row.config}".strip()
    if row.status != "ok":
        return f"{what}: {row.status} ({row.reason})"
    if row.ms is not None:
        return f"{what}: {row.ms:.3f} ms, {row.rate:.3g} {sweep.unit}"
    return f"{what}: {row.moved / 2**20:,.2f} MiB moved"


# ---------------------------------------------------------------- counting
def count_size(sweep: Sweep, size: int, rows: list[Row], say) -> None:
    """Counts bytes moved and peak extra memory of all providers of a sweep at one size."""
    inputs = sweep.inputs(size)
    for provider in sweep.providers:
        row = _new_row(sweep, size, provider)
        missing = _cannot_run(provider, counting=True)
        # A formula may be the lab's own code, and not written yet.
        if _attempt(row, provider, lambda p=provider, r=row: _formulas(r, p, size), None):
            if missing:
                row.status, row.reason = "n/a", missing
            else:
                _attempt(row, provider, lambda p=provider, r=row: _count(r, p, sweep, inputs), None)
        say(_progress(row, sweep))
        rows.append(row)


def _formulas(row: Row, provider: Provider, size: int) -> None:
    row.moved_formula = provider.moved(size) if provider.moved else None
    row.peak_formula = provider.peak(size) if provider.peak else None


def _count(row: Row, provider: Provider, sweep: Sweep, inputs) -> None:
    kernels = work.count_kernels() if provider.kernel else contextlib.nullcontext()
    with work.count_torch() as torch_work, kernels as kernel_work:
        output = provider.run(*inputs)
    row.moved = kernel_work.bytes_moved if provider.kernel else torch_work.moved
    row.peak = torch_work.peak
    _judge(row, provider, sweep, inputs, output)
    if sweep.exact and row.status == "ok" and row.moved != row.moved_formula:
        row.status = "WRONG"
        row.reason = f"counted {row.moved:,} bytes, the formula says {row.moved_formula:,}"


# ---------------------------------------------------------------- tables
def table(headers: list[str], rows: list[list[str]], width: int = 100) -> str:
    """An aligned table of at most `width` columns; the first column and the last lean left."""
    cells = [headers, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    left = {i for i, name in enumerate(headers) if name in ("code", "note")}
    lines = []
    for row in cells:
        padded = [
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip()[:width])
    return "\n".join([lines[0], "-" * min(width, max(map(len, lines))), *lines[1:]])


def _mib(n: int | None) -> str:
    if n is None:
        return "-"
    return f"{n / 2**20:,.0f}" if n >= 100 << 20 else f"{n / 2**20:.3g}"


def _ms(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}" if x < 10 else f"{x:.1f}"


def _num(x: float | None, spec: str) -> str:
    return "-" if x is None else format(x, spec)


def timed_table(sweep: Sweep, rows: list[Row]) -> str:
    """Rows of a timed sweep, the fastest first at each size; what is not right is not ranked."""
    headers = [sweep.axis, "#", "code", sweep.unit, "% bound", "ms", "q1..q3", "extra MiB", "note"]
    body = []
    for size in sweep.sizes:
        at = [r for r in rows if r.size == size and r.sweep == sweep.name]
        for i, r in enumerate(sorted(at, key=lambda r: (r.status != "ok", -(r.rate or 0)))):
            ok = r.status == "ok"
            spread = f"{_ms(r.ms_q1)}..{_ms(r.ms_q3)}" if ok and r.ms else "-"
            body.append(
                [
                    str(size) if i == 0 else "",
                    str(i + 1) if ok else "",
                    r.provider,
                    _num(r.rate, ".1f" if sweep.unit == "TFLOP/s" else ".2f"),
                    _num(r.percent, ".0f"),
                    _ms(r.ms),
                    spread,
                    _mib(r.peak),
                    r.config if ok else r.status,
                ]
            )
    return table(headers, body)


def counted_table(sweep: Sweep, rows: list[Row]) -> str:
    """Rows of a counted sweep: each count, the handout's formula, and their ratio."""
    headers = [
        sweep.axis,
        "code",
        "moved MiB",
        "formula",
        "ratio",
        "extra MiB",
        "formula",
        "ratio",
        "note",
    ]
    body = []
    for size in sweep.sizes:
        at = [r for r in rows if r.size == size and r.sweep == sweep.name]
        for i, r in enumerate(at):
            pairs = ((r.moved, r.moved_formula), (r.peak, r.peak_formula))
            figures = [
                text
                for got, formula in pairs
                for text in (_mib(got), _mib(formula), _num(_ratio(got, formula), ".2f"))
            ]
            note = "" if r.status == "ok" else r.status
            body.append([str(size) if i == 0 else "", r.provider, *figures, note])
    return table(headers, body)


def _ratio(got, formula):
    return got / formula if got is not None and formula else None


def remarks(rows: list[Row]) -> list[str]:
    """One line for each thing that is not ok, sizes put together; an unwritten step once."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for r in rows:
        if r.status != "ok" and not r.sweep.endswith("-tune"):
            key = (
                ("", "", r.reason) if r.status == "unwritten" else (r.provider, r.status, r.reason)
            )
            found.setdefault(key, []).append(r.size)
    lines = []
    for (provider, status, reason), sizes in found.items():
        where = f"{provider}: {status} at {', '.join(map(str, sizes))}: " if provider else ""
        lines.append(f"{where}{reason}")
    return lines


# ---------------------------------------------------------------- files
def versions() -> dict:
    """Versions of what takes part in a measurement."""
    here = runtime.setup()
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["triton"] = here.triton_version or "not installed"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["numpy"] = importlib.metadata.version("numpy")
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    with contextlib.suppress(Exception):
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found | {"platform": platform.platform(), "kernels_run_on": here.kernels_run_on}


def write(folder: Path, report: dict, rows: list[Row]) -> list[Path]:
    """Writes results.csv (columns that are used) and results.json (everything)."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(r) for r in rows]
    used = [k for k in Row.__dataclass_fields__ if any(r[k] not in (None, "") for r in records)]
    files = [folder / "results.csv", folder / "results.json"]
    with files[0].open("w", newline="") as f:
        writer = csv.DictWriter(f, used, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(records)
    text = json.dumps(_finite({**report, "rows": records}), indent=1)
    files[1].write_text(text + "\n")
    return files


def _finite(x):
    """JSON has no NaN or infinity: they become strings."""
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def pictures(folder: Path, sweeps: list[Sweep], rows: list[Row], report: dict) -> list[Path]:
    """Draws what was measured; none where matplotlib is missing or nothing was measured."""
    try:
        from labs._harness import plot
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return []
    files = []
    for sweep in sweeps:
        mine = [r for r in rows if r.sweep == sweep.name]
        subtitle = f"{sweep.title}\n{report['impl']} · {report['where']}"
        if report["mode"] == "counted":
            if any(r.moved is not None for r in mine):
                files.append(
                    plot.counts(folder / f"{sweep.name}-counts.png", sweep, mine, subtitle)
                )
            continue
        if any(r.rate is not None for r in mine):
            bound = report["ceilings"][sweep.ceiling]
            files.append(
                plot.rates(folder / f"{sweep.name}-rate.png", sweep, mine, subtitle, bound)
            )
            if sweep.cost:
                files.append(plot.costs(folder / f"{sweep.name}-cost.png", sweep, mine, subtitle))
    return files


# ---------------------------------------------------------------- command line
def _lengths(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise argparse.ArgumentTypeError(f"lengths must be numbers such as 512,1024: got {text!r}")
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"lengths must be 1 or more: got {min(values)}")
    return sorted(set(values))


def positive(text: str) -> int:
    """A whole number from 1 up, for argparse; the tools share it."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more: got {text!r}")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m labs bench`. A default of None is the lab's choice."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("lab", help="the lab's number, such as 06")
    add("--impl", default="exercise", help="exercise (default), solution, or a .py file")
    add("--check", action="store_true", help="check error and speed against what the lab wants")
    add("--only", metavar="NAME", help="run one sweep, such as attention or softmax")
    add("--lengths", type=_lengths, metavar="T,T,...", help="sequence lengths to run")
    add("--dtype", choices=["float16", "bfloat16", "float32"], help="of the inputs")
    add("--batch", type=positive, help="batch size B")
    add("--heads", type=positive, help="heads H")
    add("--head-dim", type=positive, default=64, help="head dim D (default 64)")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument(
        "--causal", dest="causal", action="store_true", default=True, help="(default)"
    )
    mask.add_argument("--full", dest="causal", action="store_false", help="no causal mask")
    add("--block-m", type=positive, default=64, help="query rows of a tile (default 64)")
    add("--block-n", type=positive, default=64, help="key rows of a tile (default 64)")
    add("--num-warps", type=positive, default=4, help="warps of a program (default 4)")
    add("--num-stages", type=positive, help="key tiles in flight (default: the lab's own)")
    add("--card", metavar="NAME", help="lab 03 without a GPU: the card to predict for")
    add("--tune", action="store_true", help="try tile sizes and report the best per length (GPU)")
    add("--out", type=Path, help="folder for results (default runs/bench-NN-IMPL-TIME)")


def lab_bench(
    lab: Path, function: str = "counted", lacks: str = "has no benchmark; {} have one"
) -> ModuleType:
    """The lab's bench.py, loaded by file. Raises LoadError if it does not define `function`.

    Args:
        lacks: what the error says then; {} stands for the labs that have it.
    """
    file = lab / "bench.py"
    if not (file.is_file() and _defines(file, function)):
        raise LoadError(f"lab {lab.name[:2]} {lacks.format(labs_with(function))}")
    spec = importlib.util.spec_from_file_location(f"labs_bench.{lab.name}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def labs_with(function: str) -> str:
    """Such as "labs 06, 07 and 10": those whose bench.py defines a function."""
    files = [(name[:2], LABS / name / "bench.py") for name in labs()]
    *most, last = [n for n, file in files if file.is_file() and _defines(file, function)]
    return f"labs {', '.join(most)} and {last}" if most else f"lab {last}"


def _defines(file: Path, function: str) -> bool:
    return re.search(rf"^def {function}\(", file.read_text(), re.M) is not None


def named_reference(sweep: Sweep) -> Sweep:
    """A sweep of the reference: where the lab says "yours (Triton)", "reference (Triton)"."""

    def renamed(name: str) -> str:
        return re.sub(r"^yours\b", "reference", name)

    def all_renamed(providers: list[Provider]) -> list[Provider]:
        return [replace(p, name=renamed(p.name)) for p in providers]

    return replace(
        sweep,
        providers=all_renamed(sweep.providers),
        tune=all_renamed(sweep.tune),
        tuned=renamed(sweep.tuned),
        cost=tuple(map(renamed, sweep.cost)),
    )


def run(args: argparse.Namespace, gpu: Gpu | None = None) -> int:
    """The command. `gpu` is for tests; otherwise the card is used where kernels run on one."""
    lab = find_lab(args.lab)
    here = runtime.setup()
    if here.problem:
        raise LoadError(here.problem)
    if gpu is None and here.device == "cuda":
        gpu = Gpu()
    for option in ("check", "tune"):
        if getattr(args, option) and gpu is None:
            print(f"bench --{option} needs a GPU: {here.reason}", file=sys.stderr)
            return 2
    if args.card and lab.name[:2] != CARD_LAB:
        raise LoadError(f"--card is an option of lab {CARD_LAB} only: got lab {lab.name[:2]}")
    bench, module = lab_bench(lab), load(lab, args.impl)
    if args.check:
        return _run_check(bench, module, args, gpu)
    if gpu is not None:
        gpu.cap_memory()
    else:
        torch.set_num_threads(1)  # tiles are small: more threads only wait for each other
    sweeps = bench.timed(module, args, gpu) if gpu else bench.counted(module, args)
    if args.impl == "solution":
        sweeps = [named_reference(s) for s in sweeps]
    if args.only:
        names = [s.name for s in sweeps]
        sweeps = [s for s in sweeps if s.name == args.only]
        if not sweeps:
            raise LoadError(f"no sweep {args.only!r} in {lab.name}; there are: {', '.join(names)}")
    report = {
        "lab": lab.name,
        "impl": args.impl if args.impl in ("exercise", "solution") else Path(args.impl).name,
        "mode": "timed" if gpu else "counted",
        "command": shlex.join(["python", "-m", "labs", *sys.argv[1:]]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "versions": versions(),
        "machine": gpu.describe() if gpu else {},
        "sweeps": {s.name: s.title for s in sweeps},
    }
    report["where"] = report["machine"].get("card", "counted on the CPU")
    closing = getattr(bench, "closing", None)
    return _measure(sweeps, report, args, gpu, closing and functools.partial(closing, module, args))


def _measure(sweeps: list[Sweep], report: dict, args, gpu: Gpu | None, closing=None) -> int:
    """Runs the sweeps and reports; Ctrl-C and a lost context keep what is done so far."""
    rows: list[Row] = []
    stopped = None
    try:
        if gpu:
            _progress_line("measuring the card's ceilings")
            report["ceilings"] = ceilings(gpu)
            report["machine_after_matmul"] = gpu.describe()
        _run_sweeps(sweeps, report, gpu, rows)
    except KeyboardInterrupt:
        stopped = "stopped by Ctrl-C"
    except ContextLost as error:
        stopped = str(error)
    report["partial"] = stopped or False
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"bench-{report['lab'][:2]}-{Path(report['impl']).stem}-{stamp}"
    folder = args.out or ROOT / "runs" / name
    files = write(folder, report, rows) + pictures(folder, sweeps, rows, report)
    text, more, closed = _closing(closing, report, rows, folder)
    _print_report(sweeps, rows, report, text, files + more)
    if stopped:
        return 130 if stopped.startswith("stopped") else 1
    return exit_code(rows) if closed else 1


def _closing(closing, report, rows, folder) -> tuple[str, list[Path], bool]:
    """What the lab adds to the report: text, files, and whether its code for that ran."""
    if closing is None:
        return "", [], True
    try:
        return *closing(report, rows, folder), True
    except Exception as error:  # the lab's own code draws here
        first = (str(error).strip().split("\n") or [""])[0]
        return unwritten(error) or f"failed: {type(error).__name__}: {first}", [], False


def _run_sweeps(sweeps: Iterable[Sweep], report: dict, gpu: Gpu | None, rows: list[Row]) -> None:
    for sweep in sweeps:
        for size in sweep.sizes:

            def say(text, sweep=sweep):
                _progress_line(f"{sweep.name}: {text}")

            if gpu:
                say(f"{sweep.axis}={size}: timing {len(sweep.providers)} in turn")
                time_size(sweep, size, gpu, report["ceilings"][sweep.ceiling][0], rows, say)
                gpu.settle()
            else:
                count_size(sweep, size, rows, say)


def _progress_line(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _print_report(sweeps, rows, report, text, files) -> None:
    print(f"{report['lab']}, {report['impl']}: {report['versions']['kernels_run_on']}")
    for rate, unit, how in report.get("ceilings", {}).values():
        print(f"measured bound: {rate:.4g} {unit} ({how})")
    if report["mode"] == "counted":
        print("No GPU: bytes are counted while the code runs; nothing is timed.")
    for sweep in sweeps:
        if not any(r.sweep == sweep.name for r in rows):
            continue
        render = timed_table if report["mode"] == "timed" else counted_table
        print(f"\n{sweep.title}\n{render(sweep, rows)}")
        for r in rows if sweep.tune else []:
            if r.sweep == sweep.name and r.provider == sweep.tuned and r.status == "ok":
                print(f"best at {sweep.axis}={r.size}: {r.config}, {r.rate:.1f} {r.unit}")
    print()
    for line in remarks(rows):
        print(textwrap.fill(line, 100, subsequent_indent="  "))
    if text and text not in remarks(rows):
        print(text)
    if report["partial"]:
        print(f"partial: {report['partial']}")
    for file in files:
        print(f"wrote {os.path.relpath(file)}")


def exit_code(rows: list[Row]) -> int:
    """0 if everything of yours ran and is right, else 1. Out of memory is a result, not a fault."""
    mine = [r for r in rows if r.yours and not r.sweep.endswith("-tune")]
    faults = [r for r in rows if r.status == "WRONG" and not r.sweep.endswith("-tune")]
    faults += [r for r in mine if r.status in ("unwritten", "error")]
    return 1 if faults or not any(r.status == "ok" for r in mine) else 0


def _run_check(bench, module, args, gpu) -> int:
    """--check: prints each figure with what was wanted; 0 if all hold, else 1."""
    if not hasattr(bench, "check"):
        raise LoadError(f"lab {args.lab} has no --check")
    try:
        with torch.no_grad():
            checks = bench.check(module, args, gpu)
    except Exception as error:
        first = (str(error).strip().split("\n") or [""])[0]
        print(unwritten(error) or f"failed: {type(error).__name__}: {first}")
        return 1
    for c in checks:
        print(f"{'ok  ' if c.ok else 'FAIL'} {c.what}: {c.got} (wanted {c.wanted})")
    return 0 if all(c.ok for c in checks) else 1
