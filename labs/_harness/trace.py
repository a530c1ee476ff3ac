"""`python -m labs trace NN`: run attention and show which tiles it really visited.

Elements of q and k carry marks that follow them through PyTorch's views and copies (`Marks`). In
PyTorch code a tile is visited where marked queries and marked keys meet in one operation; in a
kernel, where a program loads marked keys. So it does not matter how the code is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from labs._harness import bench, interpreter, memory, oracle, steps, tilemap, work
from labs._impl import ROOT, LoadError, find_lab, load, source_file

EPILOG = """examples:
  python -m labs trace 06 --step 2 --T 33 --causal --block-m 7 --block-n 11
  python -m labs trace 06 --step 5 --T 100 --causal --block-m 32 --block-n 16 --row 50"""
MOST_TILES = 80  # of one axis: more would not fit in a line, and not be legible in the picture
MOST_T = 4096


@dataclass
class Traced:
    """One function that can be traced; a lab's bench.py gives a list of them, the best one first.

    Attributes:
        step: the step it belongs to.
        function: its name.
        call: (q, k, v) -> (out, lse), with the tile sizes that the user asked for.
        want: (q, k, v) -> what the call must return, where that is not out and lse, as `oracle`
            gives it; the path of a row is that of a forward, and left out then.
        least: (bytes to load, FLOPs) that suffice with these tiles, where it is not a forward.
        kernel: whether a Triton kernel does the work.
        stats: blocks of one row -> (m, l), the lab's running statistics, or None.
    """

    step: int
    function: str
    call: Callable
    kernel: bool = False
    stats: Callable | None = None
    want: Callable | None = None
    least: tuple[int, int] | None = None


# ---------------------------------------------------------------- what the code reads


class Marks(TorchDispatchMode):
    """Follows the elements of q and k through views and copies, and notes where they meet.

    An element of k carries 1 + its index, one of q the negative of that. Marks belong to a
    storage, so a view needs no care; elementwise operations and moves hand them on; products and
    reductions drop them.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor):
        super().__init__()
        self.head_dim = q.shape[-1]
        self.met: list[tuple[np.ndarray, np.ndarray]] = []  # marks of queries, marks of keys
        self._marks: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # by address
        for t, sign in ((q, -1), (k, 1)):
            self._mark(t, sign * (1 + torch.arange(t.numel(), dtype=torch.int32)).view(t.shape))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled; True imports torch._dynamo

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Marks of a tensor's elements, in its shape; None where no element carries one."""
        storage, marks = self._marks.get(t.untyped_storage().data_ptr(), (None, None))
        if marks is None or t.numel() == 0:
            return None
        size = t.element_size()
        if storage.nbytes() // size != marks.numel():
            return None  # the storage is read as another dtype
        seen = marks.as_strided(t.shape, t.stride(), t.storage_offset())
        return seen if bool(seen.any()) else None

    def at(self, address: np.ndarray, itemsize: int) -> np.ndarray | None:
        """Marks at these addresses, or None where the first lies in no marked storage."""
        for base, (storage, marks) in self._marks.items():
            if base <= int(address[0]) < base + storage.nbytes():
                index = (address - np.uint64(base)).astype(np.int64) // itemsize
                inside = (index >= 0) & (index < marks.numel())
                return marks.numpy()[index[inside]]
        return None

    def rows(self, marks: np.ndarray) -> np.ndarray:
        """The rows that marked elements lie in."""
        return np.unique((np.abs(marks) - 1) // self.head_dim)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        found = [(t, self.of(t)) for t in inputs]
        queries = [m for _, m in found if m is not None and int(m.max()) <= 0]
        keys = [m for _, m in found if m is not None and int(m.min()) >= 0]
        together = bool(queries and keys) and func._overloadpacket.__name__ not in _MOVES
        if together:
            self.met.append((_present(queries[0]), _present(keys[0])))
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in inputs}
        for t in outputs:
            if func._schema.is_mutable or t.untyped_storage().data_ptr() not in known:
                self._mark(t, None if together else self._handed_on(func, args, kwargs, t, found))
        return result

    def _handed_on(self, func, args, kwargs, output, found) -> torch.Tensor | None:
        """Marks that an operation's output takes over from its inputs."""
        name = func._overloadpacket.__name__
        if name == "copy_":
            found = found[1:2]
        marked = [m for _, m in found if m is not None]
        if not marked or name in _PRODUCTS:
            return None
        if name in _MOVES:

            def swap(x):
                if not isinstance(x, torch.Tensor) or x.dtype in (torch.bool, torch.int64):
                    return x
                marks = self.of(x)
                return torch.zeros(x.shape, dtype=torch.int32) if marks is None else marks

            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                return func(*tree_map(swap, args), **tree_map(swap, kwargs))
            return None
        with contextlib.suppress(RuntimeError):
            return marked[0].expand(output.shape)
        return None

    def _mark(self, t: torch.Tensor, marks: torch.Tensor | None) -> None:
        storage = t.untyped_storage()
        key = storage.data_ptr()
        if key not in self._marks:
            if marks is None:
                return
            # Holding the storage keeps its address from being used again.
            size = storage.nbytes() // t.element_size()
            self._marks[key] = storage, torch.zeros(size, dtype=torch.int32)
        whole = self._marks[key][1]
        if whole.numel() * t.element_size() == storage.nbytes():
            part = whole.as_strided(t.shape, t.stride(), t.storage_offset())
            part.copy_(marks) if marks is not None else part.zero_()


def _present(marks: torch.Tensor) -> np.ndarray:
    """The marks that are there, each once."""
    marks = marks.unique().numpy()
    return marks[marks != 0]


_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot", "linear", "matmul"}
_MOVES = {
    "cat",
    "stack",
    "index",
    "index_select",
    "gather",
    "constant_pad_nd",
    "repeat",
    "flip",
    "roll",
    "slice_scatter",
    "narrow_copy",
}


class Reads(interpreter.Observer):
    """Which marked elements each program of the kernels loads, in order."""

    def __init__(self, marks: Marks):
        self.marks = marks
        self.programs: list[list[tuple[str, np.ndarray]]] = []

    def program(self, launch):
        self.programs.append([])
        return True

    def load(self, launch, address, mask, itemsize):
        active = address[mask]
        if active.size:
            marks = self.marks.at(active, itemsize)
            if marks is not None:
                for kind, found in (("q", marks[marks < 0]), ("k", marks[marks > 0])):
                    if found.size:
                        self.programs[-1].append((kind, np.unique(found)))


def met_in(program: list[tuple[str, np.ndarray]], rows) -> list[tuple[np.ndarray, np.ndarray]]:
    """Which queries met which keys in one program, from the order of its loads.

    A program that holds one tile of queries meets each tile of keys as it loads it; one that
    holds one tile of keys, the other way round. With several of both, what it loads first is what
    it holds.
    """
    if not {"q", "k"} <= {kind for kind, _ in program}:
        return []
    sets = {
        kind: {rows(marks).tobytes() for other, marks in program if other == kind} for kind in "qk"
    }
    holds = "q" if len(sets["q"]) == 1 else "k" if len(sets["k"]) == 1 else program[0][0]
    held = next(marks for kind, marks in program if kind == holds)
    met = []
    for kind, marks in program:
        if kind == holds:
            held = marks
        else:
            met.append((held, marks) if holds == "q" else (marks, held))
    return met


def visits_of(met, rows) -> list[tilemap.Visit]:
    """Visits from pairs of marks; a tile that is read in pieces of the head dim is one visit."""
    visits: list[tilemap.Visit] = []
    read = np.empty(0, dtype=np.int32)
    for q, k in met:
        q_rows, k_rows = rows(q), rows(k)
        last = visits[-1] if visits else None
        if (
            last is not None
            and np.array_equal(last.rows, q_rows)
            and np.array_equal(last.keys, k_rows)
            and not np.isin(k, read).any()
        ):
            read = np.concatenate([read, k])
        else:
            visits.append(tilemap.Visit(len(visits) + 1, q_rows, k_rows))
            read = k
    return visits


def trace(traced: Traced, options, file: Path | None = None) -> tilemap.TileMap:
    """Runs the code once on one head of random float32 inputs and says what it visited.

    Args:
        traced: what to run.
        options: T, head_dim, block_m, block_n, causal.
        file: the student's file, whose lines are shown where the code stops with an error.

    Raises:
        LoadError: kernels cannot be watched here, the step is not written, or the function refuses
            these sizes.
    """
    if traced.kernel:
        _needs_interpreter()
    T, D = options.T, options.head_dim
    if math.ceil(T / options.block_m) * math.ceil(T / options.block_n) > 400:
        print(f"  running {traced.function}, watched", file=sys.stderr, flush=True)
    q, k, v = tilemap.inputs(T, D)
    marks, kernels, torch_work = Marks(q, k), work.KernelWork(), work.TorchWork()
    reads, result, error = Reads(marks), None, None
    with contextlib.ExitStack() as stack:
        if traced.kernel:
            stack.enter_context(interpreter.observe(memory.AccessCheck(), kernels, reads))
        stack.enter_context(torch_work)
        stack.enter_context(marks)
        try:
            result = traced.call(q, k, v)
        except Exception as raised:
            reminder = steps.unwritten(raised)
            refused = isinstance(raised, ValueError) and not marks.met and not reads.programs
            if reminder or refused:
                raise LoadError(reminder or f"{traced.function}: {raised}") from None
            error = _stopped(raised, file)
    if traced.kernel:
        programs = [met_in(program, marks.rows) for program in reads.programs]
        visits = [visit for met in programs for visit in visits_of(met, marks.rows)]
        nbytes, flops = kernels.bytes_loaded, kernels.dot_flops
        what = "bytes loaded" if traced.least else "bytes loaded (Q, K, V)"
    else:
        visits = visits_of(marks.met, marks.rows)
        nbytes, flops = q.element_size() * sum(k.size for _, k in marks.met), torch_work.flops
        what = "bytes of K read"
    found = tilemap.TileMap(
        T, options.block_m, options.block_n, options.causal, visits, error=error
    )
    sizes = (T, options.block_m, options.block_n, options.causal, D, q.element_size())
    enough, least_flops = traced.least or tilemap.least(*sizes, traced.kernel)
    found.numbers = [(what, nbytes, enough), ("FLOPs of products", flops, least_flops)]
    found.verdict = _verdict(q, k, v, options, traced, result) if error is None else "no result"
    return found


def _needs_interpreter() -> None:
    reason = interpreter.unavailable()
    if reason and "GPU" in reason:
        reason = "a kernel is traced in Triton's CPU interpreter: set TRITON_INTERPRET=1"
    if reason:
        raise LoadError(reason)


def _stopped(error: Exception, file: Path | None) -> str:
    text = steps.short_failure(error, [file]) if file else None
    return text or f"{type(error).__name__}: {str(error).strip()}"


def _verdict(q, k, v, options, traced, result) -> str:
    tiles = (options.block_m, options.block_n)
    if traced.want:
        want = traced.want(q, k, v)
    else:
        want = oracle.attention(q, k, v, options.causal, kernel=traced.kernel, tiles=tiles)
    try:
        oracle.check_all(want, result, traced.function)
    except oracle.Mismatch as mismatch:
        return f"the result is wrong: {str(mismatch).splitlines()[0]}"
    names = " and ".join(expected.name for expected in want)
    agree = "agree" if len(want) > 1 else "agrees"
    return f"the result is right: {names} {agree} with float64"


# ---------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("lab", help="the lab's number, such as 06")
    add("--impl", default="exercise", help="exercise (default), solution, or a .py file")
    add("--step", type=int, help="which step's function (default: one that takes these tiles)")
    add("--T", type=bench.positive, default=33, help="sequence length (default 33)")
    add("--causal", action="store_true", help="query i sees keys 0 to i only")
    add("--block-m", type=bench.positive, default=16, help="queries of a tile (default 16)")
    add("--block-n", type=bench.positive, default=16, help="keys of a tile (default 16)")
    add("--head-dim", type=bench.positive, default=16, help="head dim D (default 16)")
    add("--row", type=int, help="query whose path is shown (default: one that misses keys, or T-1)")
    add("--out", type=Path, help="folder for the results (default runs/trace-NN-IMPL)")


def run(args: argparse.Namespace) -> int:
    lab = find_lab(args.lab)
    _check(args)
    module = bench.lab_bench(lab, "traced", "has nothing to trace; {} have")
    torch.set_num_threads(1)  # tiles are small: more threads only wait for each other
    choices = module.traced(load(lab, args.impl), args)
    traced = next((t for t in choices if args.step in (None, t.step)), None)
    known = " or ".join(str(t.step) for t in sorted(choices, key=lambda t: t.step))
    if traced is None:
        raise LoadError(f"{lab.name} can trace step {known}: got --step {args.step}")
    file = source_file(lab, args.impl)
    try:
        found = trace(traced, args, file)
    except LoadError as error:
        others = [t for t in choices if t.step != traced.step]
        hint = f" (--step {others[0].step} traces {others[0].function})" if others else ""
        raise LoadError(f"{error}{hint}") from None
    return _report(lab, file, traced, args, found)


def _check(args) -> None:
    """Raises LoadError where a picture would not be legible or the row does not exist."""
    if args.T > MOST_T:
        raise LoadError(f"--T must be at most {MOST_T:,}: got {args.T:,}")
    for name, size in (("--block-m", args.block_m), ("--block-n", args.block_n)):
        if math.ceil(args.T / size) > MOST_TILES:
            raise LoadError(
                f"at most {MOST_TILES} tiles a side: {name} {size} cuts T = {args.T} into "
                f"{math.ceil(args.T / size)}"
            )
    if args.row is not None and not 0 <= args.row < args.T:
        raise LoadError(f"--row must lie between 0 and {args.T - 1}: got {args.row}")


def _report(lab: Path, file: Path, traced: Traced, args, found: tilemap.TileMap) -> int:
    mask = "causal" if args.causal else "full"
    print(f"{lab.name}, step {traced.step}: {traced.function} of {file.name}")
    sizes = f"T = {args.T}, {mask}, tiles of {args.block_m} queries x {args.block_n} keys"
    print(f"{sizes}, D = {args.head_dim}, float32, one head\n")
    if found.error:
        print(f"stopped:\n{found.error}\n")
    if not found.visits:
        if found.error:
            what = "nothing was visited before it stopped"
        elif traced.kernel:
            what = "cannot tell what was visited: no kernel loaded rows of k that could be followed"
        else:
            what = "cannot tell what was visited: no operation joins rows of q and k that could be "
            what += "followed"
        print(f"{what}\n{found.verdict}")
        return 1
    row = args.row
    if row is None:
        lacking = (r for r in range(args.T) if found.missing_keys(r).size)
        row = next(lacking, args.T - 1) if found.counts["missing"] else args.T - 1
    points, true, lse = [], None, None
    if not traced.want:
        points, true, lse = tilemap.path(found, row, args, traced.stats)
    lines = [*tilemap.tile_text(found), found.summary(), *found.captions(), found.verdict]
    print("\n".join([*lines, *tilemap.missing_text(found), ""]))
    if points:
        print("\n".join(tilemap.path_text(found, row, points, true, lse)), end="\n\n")
    for written in _write(lab, traced, args, found, row, points, true, lse):
        print(f"wrote {os.path.relpath(written)}")
    return 1 if found.error else 0


def _write(lab, traced, args, found, row, points, true, lse) -> list[Path]:
    name = args.impl if args.impl in ("exercise", "solution") else Path(args.impl).name
    folder = args.out or ROOT / "runs" / f"trace-{lab.name[:2]}-{Path(name).stem}"
    stem = f"step{traced.step}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "lab": lab.name,
        "impl": str(args.impl),
        "step": traced.step,
        "function": traced.function,
        "command": shlex.join(["python", "-m", "labs", *sys.argv[1:]]),
        "versions": bench.versions(),
        "T": args.T,
        "head_dim": args.head_dim,
        "block_m": args.block_m,
        "block_n": args.block_n,
        "causal": args.causal,
        "counts": dict(found.counts),
        "numbers": {what: {"counted": n, "needed": m} for what, n, m in found.numbers},
        "verdict": found.verdict,
        "visits": [
            {"order": v.order, "rows": tilemap.span(v.rows), "keys": tilemap.span(v.keys)}
            for v in found.visits
        ],
        "row": {"row": row, "m": [p.m for p in points], "l": [p.l for p in points]},
    }
    file = folder / f"{stem}.json"
    file.write_text(json.dumps(bench._finite(record), indent=1) + "\n")
    try:
        from labs._harness import draw
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return [file]
    title = f"lab {lab.name[:2]} step {traced.step}: {traced.function} of {name}"
    files = [file, draw.tile_map(folder / f"{stem}-tiles.png", found, title, traced.kernel)]
    if points:
        picture = folder / f"{stem}-row.png"
        files.append(draw.row_path(picture, found, row, points, true, lse, title))
    return files
