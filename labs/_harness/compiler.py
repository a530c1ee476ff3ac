"""Compile a lab's kernels for cards that are not here.

Triton compiles for any NVIDIA architecture without a card. With TRITON_INTERPRET=1 in the process
it cannot, so this runs as a child process with the variable set to 0 (`compile_in_child`). There
the lab's own launchers are called on CPU tensors, their launches are recorded instead of run, and
each recorded kernel is compiled with the arguments' types and divisibility, as a launch would.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field

from labs import _impl
from labs._harness import runtime

TIME_LIMIT = (
    60.0  # seconds for one child; sm_75 can take minutes on a tile that sm_80 compiles in 1
)


@dataclass
class Compiled:
    """One kernel compiled for one architecture.

    Attributes:
        kernel: its name. launcher: the function that launched it. arch: "sm_90".
        options: the configuration it was asked for.
        num_warps, num_stages: as the launch passed them.
        error: the compiler's message, or None. line, text: where, and that line of source.
        shared: bytes of shared memory a block. registers, stack: a thread's, stack in bytes.
        spill: bytes a thread stores to and loads from local memory because registers ran out.
        instructions: counts of tensor-core and asynchronous-copy instructions in the PTX.
    """

    kernel: str
    launcher: str
    arch: str
    options: dict
    num_warps: int = 4
    num_stages: int = 3
    error: str | None = None
    line: int | None = None
    text: str = ""
    shared: int = 0
    registers: int = 0
    stack: int = 0
    spill: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class CompileFailed(RuntimeError):
    """The child process did not get as far as compiling; the message is one line."""


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, or None if they can."""
    if sys.platform != "linux":
        return "Triton's compiler for other cards is checked on Linux only"
    if not runtime.setup().has_triton:
        return "Triton is not installed"
    return None


def compile_in_child(
    lab: str, impl: str, requests: list[dict], archs: list[str], limit: float = TIME_LIMIT
) -> list[Compiled]:
    """Compiles what a lab launches, for each request and architecture.

    Args:
        lab: name of the lab folder, whose bench.py has `launches(module, **options)`.
        impl: "exercise", "solution" or a path.
        requests: options for `launches`, one dict a configuration.
        archs: such as ["sm_80", "sm_90"].
        limit: seconds until the child is stopped.

    Returns:
        One Compiled for each kernel, request and architecture that was finished in time.

    Raises:
        CompileFailed: the file does not load, a launcher raises, or nothing came back in time.
    """
    job = {"lab": lab, "impl": str(impl), "requests": requests, "archs": archs}
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(_impl.ROOT)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    with tempfile.TemporaryDirectory(prefix="labs-xray-") as cache:
        env |= {"TRITON_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""}
        child = subprocess.Popen(
            [sys.executable, "-m", "labs._harness.compiler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=_impl.ROOT,
            start_new_session=True,
        )
        try:
            out, err = child.communicate(json.dumps(job), timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            out, err = child.communicate()
            err = f"stopped after {limit:.0f} s"
    results = []
    for line in out.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            if "failed" in entry:
                raise CompileFailed(entry["failed"])
            results.append(Compiled(**entry))
    if not results:
        last = err.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise CompileFailed(f"the compiler's process gave nothing: {last[0]}")
    return results


# ---------------------------------------------------------------- in the child


@dataclass
class _Recorded:
    fn: object
    launcher: str
    options: dict
    signature: dict
    constexprs: dict
    attrs: dict
    launch_options: dict


def _record(module, launches, options: dict) -> list[_Recorded]:
    """Calls each launcher with JITFunction.run replaced by a recorder."""
    import triton
    from triton.runtime.jit import JITFunction

    recorded = []
    run = JITFunction.run
    current = ""

    def recorder(self, *args, grid, warmup=False, **kwargs):
        names = {name: value for name, value in zip(self.arg_names, args, strict=False)}
        names |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        rest = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        signature, constexprs, attrs = _specialise(self, names)
        recorded.append(_Recorded(self, current, options, signature, constexprs, attrs, rest))

    JITFunction.run = recorder
    try:
        for name, launch in launches(module, **options).items():
            current = name
            launch()
    finally:
        JITFunction.run = run
    assert triton is not None
    return recorded


def _specialise(fn, values: dict) -> tuple[dict, dict, dict]:
    """(signature, constexprs, attrs) as Triton's launcher makes them from the arguments."""
    signature, constexprs, attrs = {}, {}, {}
    for place, param in enumerate(fn.params):
        name = param.name
        value = values.get(name, getattr(param, "default", None))
        kind = _type_of(value)
        if param.is_constexpr or value is None or kind is None:
            signature[name] = "constexpr"
            constexprs[(place,)] = value
        elif kind.startswith("i") and value == 1 and not isinstance(value, bool):
            signature[name] = "constexpr"  # Triton specialises on 1
            constexprs[(place,)] = 1
        else:
            signature[name] = kind
            address = value.data_ptr() if kind.startswith("*") else value
            if not isinstance(address, (bool, float)) and address % 16 == 0:
                attrs[(place,)] = [["tt.divisibility", 16]]
    return signature, constexprs, attrs


def _type_of(value) -> str | None:
    import torch

    if isinstance(value, torch.Tensor):
        names = {
            torch.float16: "fp16",
            torch.bfloat16: "bf16",
            torch.float32: "fp32",
            torch.float64: "fp64",
            torch.int32: "i32",
            torch.int64: "i64",
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
    if isinstance(value, float):
        return "fp32"
    return None


def _compile(recorded: _Recorded, arch: str) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = recorded.launch_options
    result = Compiled(
        recorded.fn.__name__,
        recorded.launcher,
        arch,
        recorded.options,
        options.get("num_warps", 4),
        options.get("num_stages", 3),
    )
    start = time.monotonic()
    log = io.StringIO()
    try:
        source = ASTSource(recorded.fn, recorded.signature, recorded.constexprs, recorded.attrs)
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(log):
            kernel = triton.compile(
                source, target=GPUTarget("cuda", int(arch[3:]), 32), options=dict(options)
            )
    except Exception as error:
        _explain(result, recorded.fn, error)
    else:
        result.shared = kernel.metadata.shared
        _read_resources(result, kernel, log.getvalue())
    result.seconds = time.monotonic() - start
    return result


def _explain(result: Compiled, fn, error: Exception) -> None:
    """The innermost message of a compile error, and the line of source it is about."""
    node_error = error
    while error is not None:
        if getattr(error, "node", None) is not None:
            node_error = error
        if error.__cause__ is None:
            break
        error = error.__cause__
    node = getattr(node_error, "node", None)
    lines = [line for line in str(error).strip().splitlines() if line.strip(" ^")]
    result.error = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:300]
    if node is not None:
        result.line = fn.starting_line_number + node.lineno - 1
        result.text = linecache.getline(fn.fn.__code__.co_filename, result.line).strip()


def _read_resources(result: Compiled, kernel, log: str) -> None:
    """Registers, stack and spills as ptxas reports them, instruction counts from the PTX."""
    found = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    if found:
        result.stack, result.spill = int(found[1]), int(found[2])
    found = re.search(r"Used (\d+) registers", log)
    if found:
        result.registers = int(found[1])
    ptx = kernel.asm["ptx"]
    result.instructions = {
        name: len(re.findall(pattern, ptx)) for name, pattern in _INSTRUCTIONS.items()
    }


_INSTRUCTIONS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "cp.async": r"\bcp\.async\.c[ag]",
    "bulk": r"\bcp\.async\.bulk",
}


def _main() -> None:
    # The answer goes to the real stdout; whatever the lab's code prints goes to stderr.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(entry: dict) -> None:
        answer.write(json.dumps(entry) + "\n")
        answer.flush()

    job = json.loads(sys.stdin.read())
    version = runtime.setup().triton_version
    runtime.setup = lambda: runtime.Runtime("cpu", False, version, "compiling only")
    runtime.check_launch = lambda **tensors: None
    try:
        module = _impl.load(job["lab"], job["impl"])
        bench = _impl.load(job["lab"], str(_impl.LABS / job["lab"] / "bench.py"))
        recorded = []
        for options in job["requests"]:
            recorded += _record(module, bench.launches, options)
    except Exception as error:
        first = str(error).strip().splitlines() or [""]
        return tell({"failed": f"{type(error).__name__}: {first[0]}"})
    work = [(r, arch) for r in recorded for arch in job["archs"]]
    global _work
    _work = work
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for result in pool.imap(_compile_nth, range(len(work))):
            tell(asdict(result))
    return None


_work: list = []  # for the pool's workers, which inherit it by fork


def _compile_nth(n: int) -> Compiled:
    return _compile(*_work[n])


if __name__ == "__main__":
    _main()
