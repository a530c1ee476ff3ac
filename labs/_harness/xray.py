"""`python -m labs xray NN`: will a lab's kernels run on cards that are not here, and how well?

Each kernel that the lab's launchers launch is compiled for each card: does it compile, does its
shared memory fit, do its registers suffice? Nothing runs, and no card is needed.

A lab's bench.py says what is launched. It defines

    launches(module, **options) -> {launcher: call}   each option with a default; does not look
                                                      into `module` before a call is made
    GRID = {option: values}                           what --sweep tries (optional)
    ARCHS = ("sm_90",)                                the cards it is for, if not all (optional)
"""

from __future__ import annotations

import argparse
import ast
import csv
import datetime
import hashlib
import inspect
import itertools
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

from labs import _impl
from labs._harness import bench, compiler, runtime, sass, steps
from labs._harness.cards import (
    CARDS,
    ERROR,
    FITS,
    LOST,
    NOT_WRITTEN,
    SERIALIZED,
    SPILLS,
    TOO_LARGE,
    UNKNOWN,
    Change,
    changes,
    complaint,
    hint,
    named,
    state,
    verdict,
)
from labs._harness.compiler import Compiled, CompileFailed, NotLoaded, Unit
from labs._impl import ROOT, LoadError

CACHE = ROOT / "runs" / "xray-cache"
KEPT = 2000  # files in the cache
GRID = {
    "block_m": (64, 128),
    "block_n": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3),
}
SWEEP_ARCHS = ("sm_120", "sm_90")
ROUNDS, AT_A_TIME = 3, 2  # of looking for a configuration to suggest

EPILOG = """examples:
  python -m labs xray 06                                    your kernels on five cards
  python -m labs xray 06 --impl solution --head-dim 128 --block-m 128 --arch sm_90,sm_120
  python -m labs xray 06 --sweep --head-dim 128             which tiles fit where

exit codes: 0 every kernel compiles and fits on every card asked for; 1 one does not, is not
written yet, or was not done in time; 2 bad arguments; 130 stopped by Ctrl-C (what was done is
kept). Spills are reported and leave the code 0; --strict makes it 1. With --sweep, where some
configurations are not meant to fit, the code is 0 when all could be compiled."""


# ---------------------------------------------------------------- compiling, with a cache
class XRay:
    """Kernels of one implementation of one lab, compiled at most once.

    Attributes:
        file: the implementation. launchers: names of what launches its kernels.
        defaults: options of the lab's launches, with their default values.
        unwritten: launcher -> reminder of a step that is not written yet.
        archs: the cards that the lab's kernels are for.
    """

    def __init__(self, lab: str, impl: str, limit=compiler.TIME_LIMIT, cache: Path | None = CACHE):
        """cache: folder of kept results; None keeps nothing."""
        self.lab = _impl.find_lab(lab).name
        self.file = _impl.source_file(self.lab, impl)
        self.limit, self.cache = limit, cache
        folder, lacks = _impl.LABS / self.lab, "has no kernels to X-ray; {} have"
        self.bench = bench.lab_bench(folder, "launches", lacks)
        parameters = list(inspect.signature(self.bench.launches).parameters.values())[1:]
        self.defaults = {p.name: p.default for p in parameters}
        self.launchers = list(self.bench.launches(None))
        self.archs = list(getattr(self.bench, "ARCHS", CARDS))
        found = {name: reminder(self.file, name) for name in self.launchers}
        self.unwritten = {name: text for name, text in found.items() if text}
        self.done: dict[str, list[Compiled]] = {}
        sources = self.file, folder / "bench.py", Path(compiler.__file__), Path(sass.__file__)
        environment = {k: v for k, v in os.environ.items() if k.startswith("TRITON_PTXAS")}
        parts = [*(file.read_text() for file in sources), runtime.setup().triton_version]
        self._base = repr((parts, sorted(environment.items())))

    def unit(self, launcher: str, arch: str, **options) -> Unit:
        return Unit(launcher, arch, {**self.defaults, **options})

    def key(self, unit: Unit) -> str:
        what = unit.launcher, unit.arch, sorted(unit.options.items())
        return hashlib.sha256(f"{self._base}{what!r}".encode()).hexdigest()[:32]

    def compile(self, units: list[Unit], say: Callable[[str], None] = lambda text: None) -> None:
        """Compiles what is not known yet. What is done when this is interrupted is kept."""
        missing = {}
        for unit in units:
            if not self._known(unit):
                missing[self.key(unit)] = unit
        with closing(self._stream(list(missing.values()))) as results:
            for number, (unit, kernels) in enumerate(results, 1):
                self.done[self.key(unit)] = kernels
                self._keep(unit, kernels)
                others = {k: v for k, v in unit.options.items() if v != self.defaults.get(k)}
                where = f"{unit.launcher} {unit.arch} {named(others)}".rstrip()
                words = ", ".join(verdict(c) for c in kernels)
                say(f"{number} of {len(missing)}: {where}: {words}")

    def _stream(self, units: list[Unit]) -> Iterator[tuple[Unit, list[Compiled]]]:
        if units:
            yield from compiler.stream(self.lab, str(self.file), units, self.limit)

    def of(self, unit: Unit) -> list[Compiled]:
        """The kernels of a unit; none where it was not compiled."""
        return self.done.get(self.key(unit), [])

    def _known(self, unit: Unit) -> bool:
        key = self.key(unit)
        if unit.launcher in self.unwritten:
            error = self.unwritten[unit.launcher]
            self.done[key] = [Compiled(unit.launcher, unit.arch, unit.options, error=error)]
        if key not in self.done and self.cache is not None:
            with suppress(OSError, ValueError, TypeError):
                kept = json.loads((self.cache / f"{key}.json").read_text())
                self.done[key] = [Compiled(**kernel) for kernel in kept]
        return key in self.done

    def _keep(self, unit: Unit, kernels: list[Compiled]) -> None:
        if self.cache is None or any(c.timed_out for c in kernels):
            return
        with suppress(OSError):  # a folder that cannot be written to costs time only
            self.cache.mkdir(parents=True, exist_ok=True)
            file = self.cache / f"{self.key(unit)}.json"
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps([asdict(c) for c in kernels]))
            draft.replace(file)
            kept = list(self.cache.iterdir())
            if len(kept) > KEPT:
                for old in sorted(kept, key=lambda f: f.stat().st_mtime)[: KEPT // 4]:
                    old.unlink()

    def advise(self, problems: list[Compiled], say=lambda text: None) -> dict[tuple, Change]:
        """name_of(kernel) -> a small change of options that fits there, if one was found.

        Everything in the result was compiled. Without spills is preferred; with them it is there
        only if it has far fewer, or launches where the kernel did not.
        """
        best: dict[tuple, Change] = {}
        left = {name_of(c): (c, changes(c)) for c in problems}
        for _ in range(ROUNDS):
            tries = []
            for name, (c, some) in left.items():
                if name not in best or best[name].spill:
                    for change in itertools.islice(some, AT_A_TIME):
                        unit = Unit(c.launcher, c.arch, {**c.options, **change})
                        tries.append((name, change, unit))
            self.compile([unit for *_, unit in tries], lambda text: say(f"to suggest: {text}"))
            for name, change, unit in tries:
                kernels = [k for k in self.of(unit) if name_of(k) == name]
                if not kernels or any(state(k) not in (FITS, SPILLS) for k in kernels):
                    continue
                c, spill = left[name][0], max(k.spill for k in kernels)
                good = spill < c.spill // 4 or state(c) == TOO_LARGE or not spill
                if good and (name not in best or spill < best[name].spill):
                    best[name] = Change(change, spill)
        return best


def name_of(c: Compiled) -> tuple[str, str, str]:
    """A kernel on a card, whatever its options."""
    return c.launcher, c.kernel, c.arch


def reminder(file: Path, launcher: str) -> str | None:
    """The reminder in a launcher or in a kernel that it names: it is not written yet."""
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, ValueError):  # loading it says what is wrong
        return None
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    nodes = list(ast.walk(functions[launcher])) if launcher in functions else []
    kernels = [functions[n.id] for n in nodes if isinstance(n, ast.Name) and n.id in functions]
    for node in itertools.chain(nodes, *map(ast.walk, kernels)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if steps.UNWRITTEN.fullmatch(node.value):
                return node.value
    return None


# ---------------------------------------------------------------- a lab's test
def check(
    lab: str,
    file: Path,
    launcher: str,
    cached: bool = True,
    *,
    archs: tuple[str, ...] = (),
    may_spill: bool = False,
    contains: tuple[str, ...] = (),
    **options,
) -> list[Compiled]:
    """Fails unless a launcher's kernels compile for every card of the lab and fit, without spills.

    Args:
        lab: the lab's number or folder.
        file: the implementation under test.
        launcher: name of its function.
        cached: keep results under runs/.
        archs: the cards, if not all of the lab.
        may_spill: let registers spill, which is slow and not wrong.
        contains: instructions that each kernel must have, such as "wgmma" or "bulk".
        **options: of the lab's `launches`, where its defaults are not meant.

    Returns:
        The kernels.

    Raises:
        NotImplementedError: with the reminder of a step that is not written.
        AssertionError: says what went wrong, where, and why the interpreter did not mind.
    """
    xray = XRay(lab, str(file), cache=CACHE if cached else None)
    units = [xray.unit(launcher, arch, **options) for arch in archs or xray.archs]
    try:
        xray.compile(units)
    except CompileFailed as error:
        raise AssertionError(f"{launcher} was not compiled: {error}") from None
    kernels = [c for unit in units for c in xray.of(unit)]
    for c in kernels:
        if c.unwritten:
            raise NotImplementedError(c.unwritten)
    bad = [c for c in kernels if state(c) not in ((FITS, SPILLS) if may_spill else (FITS,))]
    if bad:
        raise AssertionError("\n".join(explanation(bad, len(kernels), file)))
    for c, name in itertools.product(kernels, contains):
        if not c.instructions.get(name):
            raise AssertionError(
                f"{c.kernel} has no {_INSTRUCTION_NAMES[name]} instruction for {c.arch}: got "
                f"{', '.join(f'{n} {k}' for k, n in c.instructions.items() if n) or 'none of any'}"
            )
    return kernels


_INSTRUCTION_NAMES = {
    "mma": "mma.sync",
    "wgmma": "wgmma.mma_async",
    "cp.async": "cp.async",
    "bulk": "cp.async.bulk (TMA)",
}
INTERPRETED = (
    "The interpreter runs a kernel as Python, on whole arrays. It lets through what a GPU's\n"
    "compiler does not: break, global variables, lists, f-strings, an `if` on a tile, helpers\n"
    "without @triton.jit, a variable whose dtype or shape changes in a loop."
)
EMULATED = (
    "The emulator runs a kernel as Python. It lets through what the compiler does not: break,\n"
    "lists, helpers without @gluon.jit, a variable whose type changes in a loop; numbers and\n"
    "layouts that went through a name, or a tuple with a name, and are no constants any more."
)
UNLIMITED = (
    "The interpreter has no registers and no shared memory that could run out; a GPU has few."
)


def explanation(bad: list[Compiled], total: int, file: Path) -> list[str]:
    """Why a kernel that passes in the interpreter does not on a GPU, in a few lines."""
    first = bad[0]
    archs = [c.arch for c in bad if (c.error, c.line) == (first.error, first.line)]
    where = "for any card" if len(archs) == total else f"for {', '.join(archs)}"
    if state(first) != ERROR:
        what = f"{first.launcher} compiles for a GPU, but:"
        return [what, *(f"  {c.arch}: {verdict(c)}" for c in bad), UNLIMITED]
    lines = [f"{first.launcher}: {verdict(first)} {where}"]
    lines += [f"  {line}" for line in complaint(first, file)]
    if hint(first.error):
        lines.append(f"  hint: {hint(first.error)}")
    return [*lines, EMULATED if first.gluon else INTERPRETED] if first.kernel else lines


# ---------------------------------------------------------------- the report
def report(xray: XRay, kernels: list[Compiled], advice: dict) -> list[str]:
    """What was found, kernel by kernel, as lines of text."""
    lines = []
    for launcher in xray.launchers:
        mine = [c for c in kernels if c.launcher == launcher]
        for name in dict.fromkeys(c.kernel for c in mine):
            lines += ["", *_kernel([c for c in mine if c.kernel == name], advice, xray.file)]
    return lines


def _kernel(rows: list[Compiled], advice: dict, file: Path) -> list[str]:
    first = rows[0]
    if all(c.unwritten for c in rows):
        return [f"{first.launcher}: not written yet ({first.unwritten})"]
    lines = [f"{first.kernel or 'no kernel'}, launched by {first.launcher}"]
    compiled = [c for c in rows if not c.error]
    if compiled:
        if not first.gluon:
            lines[0] += f": {first.num_warps} warps, num_stages={first.num_stages}"
        form = "  {:<7}{:<15}{:>9}{:>8} {:>18} {:>11} {:>10}  {}"
        titles = "card", "", "registers", "spilled", "shared of limit", "tensor core", "async copy"
        lines.append(form.format(*titles, "verdict"))
        for c in compiled:
            card, text = CARDS[c.arch], verdict(c, advice.get(name_of(c)))
            shared = f"{c.shared:,} of {card.shared:,}"
            numbers = c.registers, f"{c.spill:,}", shared, *_instructions(c)
            fits = state(c) == FITS
            lines.append(form.format(c.arch, card.names, *numbers, text if fits else state(c)))
            lines += [] if fits else textwrap.wrap(text, 100, **_INDENT)
    seen = {}
    for c in rows:
        if c.error:
            seen.setdefault((c.error, c.line), []).append(c)
    for same in seen.values():
        archs = ", ".join(c.arch for c in same)
        lines.append(f"  {verdict(same[0])}: {archs}")
        if not same[0].timed_out:
            lines += [f"    {line}" for line in complaint(same[0], file)]
            lines += [f"    hint: {hint(same[0].error)}"] if hint(same[0].error) else []
    return lines


_INDENT = {"initial_indent": " " * 9, "subsequent_indent": " " * 9}


def _instructions(c: Compiled) -> tuple[str, str]:
    """Tensor-core and asynchronous-copy instructions, as text for the table."""
    tensor = [f"{c.instructions[n]} {n}" for n in ("mma", "wgmma") if c.instructions.get(n)]
    copies = [str(c.instructions[n]) for n in ("cp.async", "bulk") if c.instructions.get(n)]
    return " ".join(tensor) or "-", "+".join(copies) or "-"


def sweep_table(xray: XRay, given: dict, rows: list[dict], archs: list[str]) -> list[str]:
    """Which configurations fit where: a table for each launcher that they make a difference to."""
    lines = []
    for launcher in xray.launchers:
        cells = [
            [xray.of(xray.unit(launcher, arch, **given, **row)) for arch in archs] for row in rows
        ]
        kinds = {json.dumps([_facts(kernels) for kernels in line]) for line in cells if all(line)}
        if len(kinds) == 1 and all(map(all, cells)):
            words = [
                f"{arch} {' '.join(_cell(kernels).split())}"
                for arch, kernels in zip(archs, cells[0], strict=True)
            ]
            lines += ["", f"{launcher}: the same in every configuration; {', '.join(words)}"]
        elif kinds:
            lines += ["", launcher, *_grid(rows, cells, archs)]
    return lines


def _facts(kernels: list[Compiled]) -> list:
    return [(c.shared, c.registers, c.spill, c.error, c.num_warps, c.num_stages) for c in kernels]


def _grid(rows: list[dict], cells: list[list], archs: list[str]) -> list[str]:
    names = list(rows[0])
    widths = [max(len(name), 6) for name in names]
    head = "".join(f"{name:>{w + 2}}" for name, w in zip(names, widths, strict=True))
    head += "".join(f"   {arch + ' ' + CARDS[arch].names:<26}" for arch in archs)
    lines = [head.rstrip(), "-" * len(head.rstrip())]
    for row, line in zip(rows, cells, strict=True):
        text = "".join(f"{v!s:>{w + 2}}" for v, w in zip(row.values(), widths, strict=True))
        lines.append((text + "".join(f"   {_cell(kernels):<26}" for kernels in line)).rstrip())
    counts = []
    for arch, column in zip(archs, zip(*cells, strict=True), strict=True):
        good = sum(bool(kernels) and _worst(kernels) == FITS for kernels in column)
        counts.append(f"{good} on {CARDS[arch].one}")
    return [*lines, f"of {len(rows)} configurations fit without spills: {', '.join(counts)}"]


def _worst(kernels: list[Compiled]) -> str:
    order = NOT_WRITTEN, ERROR, UNKNOWN, LOST, TOO_LARGE, SPILLS, SERIALIZED, FITS
    return min((state(c) for c in kernels), key=order.index)


def _cell(kernels: list[Compiled]) -> str:
    """One configuration on one card, in at most 26 characters."""
    if not kernels:
        return "not done"
    worst = _worst(kernels)
    c = next(c for c in kernels if state(c) == worst)
    detail = {
        FITS: f"{c.registers} registers",
        SPILLS: f"{c.spill:,} bytes",
        TOO_LARGE: f"{c.shared:,} bytes",
    }
    return f"{worst:<10}{detail.get(worst, '')}".strip()


# ---------------------------------------------------------------- command line
def _archs(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    for arch in found:
        if arch not in CARDS:
            raise argparse.ArgumentTypeError(f"unknown {arch!r}; known are {', '.join(CARDS)}")
    if not found:
        raise argparse.ArgumentTypeError(f"no architecture; known are {', '.join(CARDS)}")
    return list(dict.fromkeys(found))


def _seconds(text: str) -> float:
    if not 0 < float(text) < 1e6:
        raise ValueError
    return float(text)


_seconds.__name__ = "number of seconds"
OPTIONS = "block_m block_n num_warps num_stages head_dim dtype causal registers".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m labs xray`. What is not given is the lab's default."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("lab", help="the lab's number, such as 06")
    add("--impl", default="exercise", help="exercise (default), solution, or a .py file")
    add("--arch", type=_archs, metavar="SM,SM,...", help=f"of {', '.join(CARDS)} (default all)")
    add("--block-m", type=bench.positive, help="query rows of a tile")
    add("--block-n", type=bench.positive, help="key rows of a tile")
    add("--num-warps", type=bench.positive, help="warps of a program")
    add("--num-stages", type=bench.positive, help="key tiles in flight")
    add("--head-dim", type=bench.positive, help="head dim D")
    add("--dtype", choices=["float16", "bfloat16", "float32"], help="of the inputs")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=None, help="causal mask")
    mask.add_argument("--full", dest="causal", action="store_false", help="no causal mask")
    text = "lab 07: operands in registers that a loop does not change"
    add("--registers", action="store_true", default=None, help=text)
    text = f"try tiles, warps and stages (on {', '.join(SWEEP_ARCHS)}); what is given stays fixed"
    add("--sweep", action="store_true", help=text)
    add("--strict", action="store_true", help="spills make the exit code 1, too")
    limit = compiler.TIME_LIMIT
    text = f"seconds until one compilation is stopped (default {limit:g})"
    add("--time-limit", type=_seconds, default=limit, metavar="S", help=text)
    add("--no-cache", action="store_true", help="neither use nor keep earlier results")
    add("--out", type=Path, help="folder for results (default runs/xray-NN-IMPL-TIME)")


def run(args: argparse.Namespace) -> int:
    """The command."""
    xray = XRay(args.lab, args.impl, args.time_limit, None if args.no_cache else CACHE)
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    unknown = [name for name in given if name not in xray.defaults]
    if unknown:
        name = unknown[0].replace("_", "-")
        has = ", ".join(f"--{n.replace('_', '-')}" for n in xray.defaults) or "none"
        raise LoadError(f"{xray.lab} has no option --{name}; it has: {has}")
    reason = compiler.unavailable()
    if reason:
        raise LoadError(f"cannot compile here: {reason}")
    known = [arch for arch in (SWEEP_ARCHS if args.sweep else CARDS) if arch in xray.archs]
    archs = args.arch or known
    if set(archs) - set(xray.archs):
        raise LoadError(f"{xray.lab} is for {', '.join(xray.archs)} only")
    grid = getattr(xray.bench, "GRID", GRID) if args.sweep else {}
    grid = {k: v for k, v in grid.items() if k in xray.defaults and k not in given}
    rows = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    units = [
        xray.unit(launcher, arch, **given, **row)
        for row in rows
        for launcher in xray.launchers
        for arch in archs
    ]
    fixed = {k: v for k, v in {**xray.defaults, **given}.items() if k not in grid}
    version = runtime.setup().triton_version
    print(f"{xray.lab}, {xray.file.name}: {named(fixed)} (Triton {version})", flush=True)
    ended, advice = None, {}
    try:
        xray.compile(units, _progress)
        if not args.sweep:
            found = [c for unit in units for c in xray.of(unit)]
            advice = xray.advise([c for c in found if state(c) in (SPILLS, TOO_LARGE)], _progress)
    except KeyboardInterrupt:
        ended = "stopped by Ctrl-C; what was done is kept"
    except NotLoaded as error:
        raise LoadError(str(error)) from None
    except CompileFailed as error:
        ended = f"error: {error}"
    kernels = [c for unit in units for c in xray.of(unit)]
    if args.sweep:
        print("\n".join(sweep_table(xray, given, rows, archs)))
    else:
        print("\n".join(report(xray, kernels, advice)))
    print()
    for file in write(args, xray, kernels, advice, ended) if kernels else []:
        print(f"wrote {os.path.relpath(file)}")
    if ended:
        print(ended, file=sys.stderr)
        return 130 if ended.startswith("stopped") else 1
    return exit_code(kernels, args)


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def exit_code(kernels: list[Compiled], args) -> int:
    """See EPILOG."""
    bad = {ERROR, UNKNOWN, NOT_WRITTEN} | (set() if args.sweep else {TOO_LARGE})
    bad |= {SPILLS} if args.strict else set()
    return 1 if not kernels or any(state(c) in bad for c in kernels) else 0


def write(args, xray: XRay, kernels: list[Compiled], advice: dict, ended: str | None) -> list[Path]:
    """results.csv and results.json, one row a kernel, card and configuration."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = args.out or ROOT / "runs" / f"xray-{xray.lab[:2]}-{xray.file.stem}-{stamp}"
    rows = []
    for c in kernels:
        change = advice.get(name_of(c))
        about = {"card": CARDS[c.arch].names, "shared_limit": CARDS[c.arch].shared}
        row = {"state": state(c), "verdict": verdict(c, change), **about, **asdict(c)}
        rows.append({**row.pop("options"), **row, **row.pop("instructions")})
    about = {
        "lab": xray.lab,
        "impl": str(xray.file.name),
        "command": shlex.join(["python", "-m", "labs", *sys.argv[1:]]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": bench.versions(),
        "partial": ended or False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "results.csv", folder / "results.json"]
    with files[0].open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(k for row in rows for k in row)))
        writer.writeheader()
        writer.writerows(rows)
    files[1].write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return files
