"""Compile a lab's kernels for cards that are not here.

Triton compiles for any NVIDIA architecture without a card. With TRITON_INTERPRET=1 in the process
it cannot, so this runs in a process with the variable set to 0, the `Server`, which forks for each
job (`stream`). There the lab's own launchers are called on CPU tensors, their launches are recorded
instead of run, and each recorded kernel is compiled with the arguments' types and divisibility, as
a launch would. Every compilation runs in a fork of the job's process: one that crashes or never
ends costs only itself.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import inspect
import itertools
import json
import linecache
import multiprocessing
import multiprocessing.connection
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from labs import _impl
from labs._harness import gluon_emulator, runtime, sandbox, sass, steps, triton_private

TIME_LIMIT = 60.0  # seconds of one compilation; most take 1 or 2
START_LIMIT = 120.0  # seconds until the child has imported torch and Triton
GRACE = 10.0  # seconds more that the child may be silent
MOST_AT_ONCE = 8
MESSAGE = 180  # most characters of a compiler's message


@dataclass
class Compiled:
    """One kernel compiled for one architecture, or why it was not.

    Attributes:
        launcher: the function that launched it. arch: "sm_90".
        options: the configuration that the launcher was called with.
        kernel: its name; "" where the launcher did not get as far as a launch.
        num_warps, num_stages: as the launch passed them.
        error: what the compiler or the launcher said, or None. line, text: where, and that line.
        timed_out: it was stopped; the error says after how long.
        shared: bytes of shared memory a block.
        registers: a thread's. spill: bytes a thread keeps in local memory, because registers ran
            out.
        instructions: counts of tensor-core and asynchronous-copy instructions in the PTX.
        order: what the PTX does one after another, equal ones in a row once: "load", "store",
            "product", "shuffle" (lanes exchange what they have), and of programmatic dependent
            launch "wait" and "launch".
        early: launched so that it may begin before the kernel in front of it has ended.
        serialized: the assembler lets wgmma instructions wait for one another (its remark C7510
            and the like): asynchronous in the source only.
        lost: it destroys a wgmma's operand in a loop (see `sass`): the results would be wrong.
        seconds: what it took.
    """

    launcher: str
    arch: str
    options: dict
    kernel: str = ""
    num_warps: int = 4
    num_stages: int = 3
    gluon: bool = False  # then the kernel itself says how many warps and stages
    error: str | None = None
    line: int | None = None
    text: str = ""
    timed_out: bool = False
    shared: int = 0
    registers: int = 0
    spill: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    early: bool = False
    serialized: bool = False
    lost: bool = False
    seconds: float = 0.0

    @property
    def unwritten(self) -> str | None:
        """The reminder of a step that is not written yet, or None."""
        found = steps.UNWRITTEN.search(self.error or "")
        return found.group(0) if found else None


class CompileFailed(RuntimeError):
    """The child process did not get as far as compiling; the message is one line."""


class NotLoaded(CompileFailed):
    """The file under test does not load; the message is the loader's."""


@dataclass(frozen=True)
class Unit:
    """What is compiled at a time: all kernels of one launcher, for one architecture."""

    launcher: str
    arch: str
    options: dict


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, or None if they can."""
    if sys.platform != "linux":
        return "Triton's compiler for cards that are not here is checked on Linux only"
    if not runtime.setup().has_triton:
        return "Triton is not installed"
    reason = triton_private.moved(triton_private.COMPILE)
    if reason:
        return reason
    import triton

    try:
        tools = triton.knobs.nvidia.ptxas, triton.knobs.nvidia.cuobjdump
        missing = [tool.path for tool in tools if not os.access(tool.path, os.X_OK)]
    except RuntimeError as error:
        return f"this Triton brings no NVIDIA tools ({error})"
    return f"this Triton brings no NVIDIA tools (no {missing[0]})" if missing else None


class Server:
    """A process that has torch and Triton imported and forks for each job, which begins at once.

    It is started at the first job: `asked` becomes readable, and whoever made the Server calls
    `start`. Forks of that process can ask for jobs, too.
    """

    def __init__(self):
        self._ask, self.asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile("w+")
        self._owner, self._process = os.getpid(), None

    @property
    def started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Starts the process, which takes 4 s of a core to import what it needs."""
        env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(_impl.ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "labs._harness.compiler", str(self.asked.fileno())],
            pass_fds=[self.asked.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env={**env, "CUDA_VISIBLE_DEVICES": ""},
            cwd=_impl.ROOT,
        )
        self.asked.close()  # only the process has it now, so that its end is seen

    def begin(self, folder: str) -> socket.socket:
        """Asks for the job of a folder: what to do is in its job.json, complaints go to errors.txt.

        Returns:
            A connection that gives lines of JSON. Closing it ends the job.
        """
        if os.getpid() == self._owner and not self.started:
            self.start()
        ours, its = socket.socketpair()
        with its, contextlib.suppress(OSError):  # the process has ended: then no line comes
            socket.send_fds(self._ask, [folder.encode()], [its.fileno()])
        return ours

    def last_words(self) -> str:
        """What the process itself said last."""
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["it said nothing"])[-1]

    def close(self) -> None:
        """Ends the process and its jobs."""
        self._ask.close()
        self.asked.close()
        if self.started:
            _kill_tree(self._process.pid)
            self._process.wait()
        self._errors.close()


shared: Server | None = None  # serves a whole run of pytest


def stream(
    lab: str, impl: str, units: Iterable[Unit], limit: float = TIME_LIMIT
) -> Iterator[tuple[Unit, list[Compiled]]]:
    """Compiles units in another process and gives each one as soon as it is done, in any order.

    Args:
        lab: name of the lab folder, whose bench.py has `launches(module, **options)`.
        impl: "exercise", "solution" or a path.
        units: what to compile.
        limit: seconds until one compilation is stopped.

    Yields:
        (unit, its kernels): one Compiled a launch. Closing the generator ends the job.

    Raises:
        CompileFailed: the file does not load, a launcher hangs, or the job's process dies.
    """
    units = list(units)
    job = {"lab": lab, "impl": str(impl), "units": [asdict(u) for u in units], "limit": limit}
    with contextlib.ExitStack() as stack:
        server = shared or stack.enter_context(contextlib.closing(Server()))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="labs-xray-"))
        env = {**os.environ, "TRITON_CACHE_DIR": folder, "TMPDIR": folder}
        Path(folder, "job.json").write_text(json.dumps({**job, "env": env}))
        connection = stack.enter_context(server.begin(folder))
        doing, done, lines = "start", 0, _Lines(connection, START_LIMIT)
        for line in lines:
            entry = json.loads(line)
            if "failed" in entry:
                raise NotLoaded(entry["failed"])
            doing, lines.seconds = entry.get("doing", doing), limit + GRACE
            if "unit" in entry:
                done += 1
                yield units[entry["unit"]], [Compiled(**kernel) for kernel in entry["kernels"]]
        if done < len(units):
            if not lines.ended:
                raise CompileFailed(f"{doing}: no end after {lines.seconds:g} s; stopped")
            errors = Path(folder, "errors.txt")
            said = errors.read_text().strip().splitlines() if errors.exists() else []
            last = said[-1] if said else server.last_words()
            raise CompileFailed(f"{doing}: the compiler's process ended early: {last}")


class _Lines:
    """Lines of a connection until it has `ended`, or until nothing has come for `seconds`."""

    def __init__(self, connection: socket.socket, seconds: float):
        self.connection, self.seconds, self.ended = connection, seconds, False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        while select.select([self.connection], [], [], self.seconds)[0]:
            data = self.connection.recv(1 << 16)
            if not data:
                self.ended = True
                return
            *whole, rest = (rest + data).split(b"\n")
            yield from whole


def _kill_tree(pid: int) -> None:
    for victim in sandbox.Table.now().below(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(victim, signal.SIGKILL)


# ---------------------------------------------------------------- in a job: what is launched


@dataclass
class _Launch:
    """One recorded launch, ready to be compiled for any architecture."""

    fn: object
    signature: dict
    constexprs: dict
    attrs: dict
    options: dict

    def digest(self) -> str:
        parts = self.signature, self.constexprs, self.attrs, sorted(self.options.items())
        return hashlib.sha256(repr((id(self.fn), *parts)).encode()).hexdigest()


def _record(launch) -> list[_Launch]:
    """Calls a launcher with JITFunction.run replaced by a recorder."""
    from triton.runtime.jit import JITFunction

    recorded = []
    run = JITFunction.run

    def recorder(self, *args, grid, warmup=False, **kwargs):
        values = dict(zip(self.arg_names, args, strict=False))
        values |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        rest = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        recorded.append(_Launch(self, *_specialise(self, values), rest))

    JITFunction.run = recorder
    try:
        launch()
    finally:
        JITFunction.run = run
    return recorded


def _specialise(fn, values: dict) -> tuple[dict, dict, dict]:
    """(signature, constexprs, attrs) as Triton's launcher makes them from the arguments."""
    signature, constexprs, attrs = {}, {}, {}
    for place, param in enumerate(fn.params):
        value = values.get(param.name, getattr(param, "default", None))
        kind = _type_of(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if param.is_constexpr or kind is None:
            signature[param.name], constexprs[(place,)] = "constexpr", value
        elif whole and value == 1 and not param.do_not_specialize:
            signature[param.name], constexprs[(place,)] = "constexpr", 1
        else:
            signature[param.name] = kind
            address = value.data_ptr() if kind.startswith("*") else value if whole else 1
            free = param.do_not_specialize or param.do_not_specialize_on_alignment
            if address % 16 == 0 and not free:
                attrs[(place,)] = [["tt.divisibility", 16]]
    return signature, constexprs, attrs


def _type_of(value) -> str | None:
    """Triton's name of an argument's type; None for what can only be a constexpr."""
    import torch

    if type(value).__name__ == "TensorDescriptor":  # made on the host; Gluon's has a layout
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{_type_of(value.base)[1:]}{list(value.block_shape)}{layout}>"

    if isinstance(value, torch.Tensor):
        names = {
            torch.float16: "fp16",
            torch.bfloat16: "bf16",
            torch.float32: "fp32",
            torch.float64: "fp64",
            torch.int64: "i64",
            torch.int32: "i32",
            torch.int16: "i16",
            torch.int8: "i8",
            torch.uint8: "u8",
            torch.bool: "i1",
            torch.float8_e4m3fn: "fp8e4nv",
            torch.float8_e5m2: "fp8e5",
        }
        return f"*{names[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else None


# ---------------------------------------------------------------- in a fork of the job


def _compile(launch: _Launch, blank: Compiled) -> Compiled:
    """One launch compiled for the architecture of `blank`, whose other fields are filled in."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = launch.options
    result = replace(
        blank,
        kernel=launch.fn.__name__,
        num_warps=options.get("num_warps", blank.num_warps),
        num_stages=options.get("num_stages", blank.num_stages),
        gluon=getattr(launch.fn, "is_gluon", bool)(),
        early=bool(options.get("launch_pdl")),
    )
    start = time.monotonic()
    try:
        source_type = ASTSource
        if result.gluon:
            from triton.experimental.gluon._runtime import GluonASTSource as source_type
        source = source_type(launch.fn, launch.signature, launch.constexprs, launch.attrs)
        target = GPUTarget("cuda", int(blank.arch.removeprefix("sm_")), 32)
        kernel = triton.compile(source, target=target, options=dict(options))
    except Exception as error:
        file = launch.fn.fn.__code__.co_filename
        result.error, result.line = explain(error, file)
        helper = re.search(r"Unsupported function referenced: (\w+)", result.error)
        if helper and result.line is None:  # found before any line is compiled
            result.line = _first_line(launch.fn, helper[1])
        if result.line:
            result.text = linecache.getline(file, result.line).strip()
    else:
        result.shared = kernel.metadata.shared
        result.registers, result.spill = _registers(kernel.asm["cubin"])
        result.instructions = {
            name: len(re.findall(pattern, kernel.asm["ptx"]))
            for name, pattern in _INSTRUCTIONS.items()
        }
        result.order = _order(kernel.asm["ptx"])
        if _FROM_REGISTERS.search(kernel.asm["ptx"]):
            result.lost = bool(sass.lost_operands(_cuobjdump(kernel.asm["cubin"], "-sass")))
    result.seconds = time.monotonic() - start
    return result


def _registers(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and the bytes of its stack, which only spills need.

    ptxas for Blackwell also writes zeros to a stack that nobody reads: no spill.
    """
    said = _cuobjdump(cubin, "-res-usage")
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    if stack and not re.search(r"\bLDL\b", _cuobjdump(cubin, "-sass")):
        stack = 0
    return registers, stack


_INSTRUCTIONS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "cp.async": r"\bcp\.async\.c[ag]",
    "bulk": r"\bcp\.async\.bulk",
}


_STEPS = {
    "wait": r"griddepcontrol\.wait",
    "launch": r"griddepcontrol\.launch_dependents",
    "load": r"\bld\.global|\bcp\.async\.c[ag]",
    "store": r"\bst\.global",
    "shuffle": r"\bshfl\.sync",
    "product": r"\bmma\.sync|\bwgmma\.mma_async",
}


def _order(ptx: str) -> list[str]:
    """See Compiled.order."""
    patterns = "|".join(f"(?P<{name}>{pattern})" for name, pattern in _STEPS.items())
    found = [match.lastgroup for match in re.finditer(patterns, ptx)]
    return [name for name, _ in itertools.groupby(found)]


_FROM_REGISTERS = re.compile(r"wgmma\.mma_async\S* \{[^}]*\}, \{")  # a left operand in registers


def _cuobjdump(cubin: bytes, what: str) -> str:
    """What the tool that comes with Triton says of a compiled kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _first_line(fn, word: str) -> int | None:
    """Number of the first line of a kernel that has a word."""
    for number, line in enumerate(*inspect.getsourcelines(fn.fn)):
        if re.search(rf"\b{word}\b", line):
            return number
    return None


def explain(error: BaseException, file: str) -> tuple[str, int | None]:
    """(message in one line, line number in `file` or None) of a compile error.

    Triton wraps the error once for each function that it was inside of; the innermost one says
    what is wrong. Its line counts from that function's `def`.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    placed = [e for e in chain if getattr(getattr(e, "node", None), "lineno", None)]
    last = chain[-1]
    text = getattr(last, "error_message", None) or ("" if last in placed else str(last))
    kind, words = type(last).__name__, " ".join(str(text).split()) or "does not compile"
    quoted = re.fullmatch(r"(\w+)\((['\"].*['\"])\)", words)  # Triton keeps some as repr(error)
    if quoted:
        kind = quoted[1]
        with contextlib.suppress(SyntaxError, ValueError):
            words = ast.literal_eval(quoted[2])
    message = words if kind == "CompilationError" else f"{kind}: {words}"
    message = re.sub(r"<function (\w+) at 0x\w+>", r"\1", message)
    return clip(message), _line(placed[-1], file) if placed else None


def clip(text: str) -> str:
    """At most MESSAGE characters, cut after a sentence where there is one."""
    if len(text) <= MESSAGE:
        return text
    end = text.rfind(". ", 0, MESSAGE)
    return text[: end + 1] if end > 0 else text[: MESSAGE - 3].rstrip() + "..."


def _line(error, file: str) -> int | None:
    """Number of the line in `file` that a CompilationError is about."""
    source = getattr(error, "src", None) or ""
    name = re.match(r"def\s+(\w+)", source)
    if not name:
        return None
    starts = [
        node.lineno
        for node in ast.walk(ast.parse("".join(linecache.getlines(file)) or "pass"))
        if isinstance(node, ast.FunctionDef) and node.name == name[1]
    ]
    wanted = source.splitlines()[error.node.lineno - 1].strip()
    found = [start + error.node.lineno - 1 for start in starts]
    return next((n for n in found if linecache.getline(file, n).strip() == wanted), None)


def _compile_all(launches: list[_Launch], blank: Compiled, pipe) -> None:
    """The body of a fork: compiles, and sends the results as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this
    with tempfile.TemporaryFile("w+") as said:
        os.dup2(said.fileno(), 1)  # what the assembler says, printed by Triton
        os.dup2(said.fileno(), 2)  # Triton's passes write there
        _say_what_ptxas_says()
        results = []
        for launch in launches:
            result = _compile(launch, blank)
            sys.stdout.flush()
            said.seek(0)
            text = said.read()
            result.serialized = re.search(r"wgmma\S* instructions are serialized", text) is not None
            said.seek(0)
            said.truncate()
            printed = re.search(r"(\S+\.py):(\d+):\d+: error: (.*)", text)
            if result.error and result.line is None and printed:
                result.line, result.error = int(printed[2]), clip(printed[3])
                result.text = linecache.getline(printed[1], result.line).strip()
            results.append(asdict(result))
        pipe.send_bytes(json.dumps(results).encode())


def _say_what_ptxas_says() -> None:
    """Triton then prints the assembler's remarks; one release or another may not have that."""
    import triton

    if hasattr(triton.knobs.nvidia, "dump_ptxas_log"):
        triton.knobs.nvidia.dump_ptxas_log = True


@dataclass
class _Running:
    process: multiprocessing.Process
    key: tuple
    blank: Compiled
    deadline: float


def _compile_each(work: dict[tuple, tuple], limit: float) -> Iterator[tuple[tuple, list[dict]]]:
    """(key, results) for each key -> (launches, blank), several at once, each in a fork."""
    context = multiprocessing.get_context("fork")
    waiting = list(work.items())
    running: dict[multiprocessing.connection.Connection, _Running] = {}
    at_once = min(MOST_AT_ONCE, len(os.sched_getaffinity(0)))
    while waiting or running:
        while waiting and len(running) < at_once:
            key, (launches, blank) = waiting.pop(0)
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_compile_all, args=(launches, blank, writer))
            process.start()
            writer.close()
            running[reader] = _Running(process, key, blank, time.monotonic() + limit)
        first = min(r.deadline for r in running.values())
        ready = multiprocessing.connection.wait(list(running), max(0, first - time.monotonic()))
        late = [pipe for pipe, r in running.items() if time.monotonic() > r.deadline]
        for pipe in {*ready, *late}:
            r = running.pop(pipe)
            if pipe in ready:
                results = _received(pipe, r)
            else:
                error = f"still compiling after {limit:g} s; stopped"
                results = [asdict(replace(r.blank, error=error, timed_out=True, seconds=limit))]
                _kill_tree(r.process.pid)
            r.process.join()
            pipe.close()
            yield r.key, results


def _received(pipe, r: _Running) -> list[dict]:
    try:
        return json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        r.process.join()
        code = r.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return [asdict(replace(r.blank, error=f"Triton's compiler crashed ({how})"))]


def _answer(job: dict, tell) -> None:
    """Compiles what a job asks for; `tell` sends an entry to who asked."""
    bench = _impl.load(job["lab"], str(_impl.LABS / job["lab"] / "bench.py"))
    tell(doing="loading the file")
    try:
        module = _impl.load(job["lab"], job["impl"])
    except _impl.LoadError as error:
        return tell(failed=str(error))
    units = [Unit(**unit) for unit in job["units"]]
    work, wanted = {}, {}  # key -> (launches, blank); key -> numbers of the units that it serves
    for n, unit in enumerate(units):
        tell(doing=f"calling {unit.launcher}")
        blank = Compiled(unit.launcher, unit.arch, unit.options)
        runtime.compiling_for = divmod(int(unit.arch.removeprefix("sm_")), 10)
        try:
            launches = _record(bench.launches(module, **unit.options)[unit.launcher])
            if not launches:
                raise RuntimeError(f"{unit.launcher} launched no kernel")
        except Exception as error:
            blank.error, blank.line, blank.text = _launcher_error(error, module.__file__)
            tell(unit=n, kernels=[asdict(blank)])
            continue
        key = unit.launcher, unit.arch, *(launch.digest() for launch in launches)
        work.setdefault(key, (launches, blank))
        wanted.setdefault(key, []).append(n)
    tell(doing="compiling")
    for key, results in _compile_each(work, job["limit"]):
        for n in wanted[key]:
            for result in results:
                result["options"] = units[n].options
            tell(unit=n, kernels=results)
    return None


def _launcher_error(error: Exception, file: str) -> tuple[str, int | None, str]:
    """(message, line, text) of what a launcher raised before it launched anything."""
    words = " ".join(str(error).split())
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            number = trace.tb_lineno
        trace = trace.tb_next
    text = linecache.getline(file, number).strip() if number else ""
    return clip(f"{type(error).__name__}: {words}"), number, text


# ---------------------------------------------------------------- in the server


def _serve(asked: socket.socket) -> None:
    """Forks for each job, until nobody is left who could ask for one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this ends it
    version = runtime.setup().triton_version
    runtime.setup = lambda: runtime.Runtime("cpu", False, version, "compiling only")
    runtime.check_launch = gluon_emulator.check_launch = lambda **tensors: None
    triton_private.warm_up()  # imports the compiler, too: once, for all jobs
    gc.freeze()  # the forks' collectors then leave this process's pages alone
    jobs: dict[int, tuple[int, socket.socket]] = {}  # file of the process -> process, connection
    while True:
        waits = {connection.fileno(): file for file, (_, connection) in jobs.items()}
        ready, _, _ = select.select([asked, *jobs, *waits], [], [])
        for file in {waits.get(one, one) for one in ready if one is not asked}:
            _stop(file, *jobs.pop(file))  # it is done, or nobody waits for it
        if asked in ready:
            folder, files, _, _ = socket.recv_fds(asked, 4096, 1)
            if not folder:
                break
            connection = socket.socket(fileno=files[0])
            process = os.fork()
            if process == 0:
                _run_job(folder.decode(), connection)
            jobs[os.pidfd_open(process)] = process, connection
    for file in jobs:
        _stop(file, *jobs[file])


def _stop(file: int, process: int, connection: socket.socket) -> None:
    _kill_tree(process)
    os.waitpid(process, 0)
    os.close(file)
    with contextlib.suppress(OSError):  # who asked has gone
        connection.shutdown(socket.SHUT_RDWR)  # in other jobs, which have inherited it, too
    connection.close()


def _run_job(folder: str, connection: socket.socket) -> None:
    """The body of a job's process."""
    status = 1
    try:
        with open(Path(folder, "errors.txt"), "w") as errors:
            os.dup2(errors.fileno(), 1)  # whatever the lab's code prints
            os.dup2(errors.fileno(), 2)
        job = json.loads(Path(folder, "job.json").read_text())
        os.environ.update(job["env"], TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
        tempfile.tempdir = None  # TMPDIR is another now
        _answer(job, lambda **entry: connection.sendall(json.dumps(entry).encode() + b"\n"))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
