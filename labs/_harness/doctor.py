"""`python -m labs doctor`: what this machine has, what runs where, and what to repair.

Facts are gathered in one place (`gather`); every check is a pure function of them, so the tests
can feed combinations that nobody here owns. A check that is broken makes the exit code 1; a note
is a limit of the machine that the labs live with.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labs._harness import runtime

CU128 = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
INSTALL = "pip install -e . -c .ci/constraints.txt"
DTYPES = ("float32", "float16", "bfloat16")
KERNELS = ("copy", "masked load", "loop", "dot")
NO_BFLOAT16 = "not supported there (computed as raw integer bits)"


@dataclass(frozen=True)
class Facts:
    """What the checks look at. A version that is None means not installed.

    Attributes:
        system: platform.system(): "Linux", "Windows" or "Darwin"; wsl: Linux under Windows.
        torch_cuda: CUDA version of the torch build, None for a CPU build.
        arch_list: GPU code in that build, such as ("sm_80", "compute_120").
        shadows: (name, path) of files or folders that hide an installed package.
        missing: distributions from pyproject.toml that are not installed.
        nvidia: how an NVIDIA card showed itself without torch, or None.
        driver, driver_cuda: driver version, and the newest CUDA that it runs.
        cuda_error: what torch said when it could not start CUDA.
        asked: the user's own TRITON_INTERPRET; problem: see runtime.Runtime.
    """

    system: str = "Linux"
    machine: str = "x86_64"
    wsl: bool = False
    python: str = "3.11.0"
    executable: str = "python"
    torch: str | None = "2.13.0"
    torch_cuda: str | None = None
    arch_list: tuple[str, ...] = ()
    triton: str | None = "3.7.1"
    numpy: str | None = "2.3.5"
    shadows: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    nvidia: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    cuda_available: bool = False
    cuda_error: str | None = None
    visible_devices: str | None = None
    card: str | None = None
    capability: tuple[int, int] | None = None
    shared_memory: int | None = None
    multiprocessors: int | None = None
    memory: int | None = None
    cards: int = 0
    interpret: bool = True
    device: str = "cpu"
    runs_on: str = ""
    asked: str | None = None
    problem: str | None = None

    @property
    def user_interprets(self) -> bool:
        """The user chose the interpreter, so an unused card is no fault."""
        return self.interpret and self.asked is not None


@dataclass(frozen=True)
class Finding:
    broken: bool
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{'broken' if self.broken else 'note'}: {self.what}; {self.cure}"


def version(text: str | None) -> tuple[int, ...]:
    """ "3.7.1+cpu" -> (3, 7, 1), for comparisons."""
    return tuple(int(n) for n in re.match(r"[\d.]*", text or "").group().split(".") if n)


# ---------------------------------------------------------------- checks: Facts -> Finding or None
def check_shadow(f: Facts) -> Finding | None:
    for name, path in f.shadows:
        return Finding(
            True,
            f"{path} hides the package {name}: Python imports it instead",
            "rename or move it",
        )


def check_torch(f: Facts) -> Finding | None:
    if any(name == "torch" for name, _ in f.shadows):
        return None
    if f.torch is None:
        return Finding(True, "PyTorch is not installed", INSTALL)
    if f.problem and f.problem.startswith("PyTorch does not import"):
        return Finding(True, *f.problem.split("; ", 1))
    if version(f.torch) < (2, 10):
        return Finding(
            True, f"torch {f.torch} is older than 2.10", "update it: pip install -U 'torch>=2.10'"
        )


def check_triton(f: Facts) -> Finding | None:
    package = "triton-windows" if f.system == "Windows" else "triton"
    if f.triton is None:
        if f.system == "Darwin":
            return Finding(
                False,
                "no Triton: there is no build of it for macOS",
                "the PyTorch parts run here, Triton tests skip; use Linux, WSL2 or Colab for them",
            )
        return Finding(True, "Triton is not installed", f"pip install '{package}>=3.6'")
    if version(f.triton) < (3, 6):
        return Finding(
            True,
            f"Triton {f.triton} is older than 3.6: kernels of labs 08 and 10 fail or return NaN",
            f"update it together with torch: pip install -U 'torch>=2.10' '{package}>=3.6'",
        )


def check_numpy(f: Facts) -> Finding | None:
    if f.numpy is None:
        return Finding(True, "NumPy is not installed: Triton's CPU interpreter needs it", INSTALL)
    if f.triton and version(f.numpy) >= (2, 4) and version(f.triton) < (3, 7):
        return Finding(
            f.interpret,
            f"NumPy {f.numpy} with Triton {f.triton}: CPU interpreters up to Triton 3.6 fail on "
            "NumPy 2.4 and newer (an error about 0-dimensional arrays)",
            "pip install 'numpy<2.4'",
        )


def check_missing(f: Facts) -> Finding | None:
    if f.missing:
        return Finding(True, f"not installed: {', '.join(f.missing)}", INSTALL)


def check_problem(f: Facts) -> Finding | None:
    """Triton imported too early, or TRITON_INTERPRET=0 without a GPU."""
    if f.problem and f.torch is not None and not f.problem.startswith("PyTorch does not import"):
        return Finding(True, *f.problem.split("; ", 1))


def check_cpu_build(f: Facts) -> Finding | None:
    if f.torch is None or f.nvidia is None or f.torch_cuda is not None or f.user_interprets:
        return None
    return Finding(
        True,
        f"torch {f.torch} is a CPU build on a machine with an NVIDIA card ({f.nvidia})",
        f"pip uninstall -y torch, then {CU128}; or set TRITON_INTERPRET=1 to stay on the CPU",
    )


def check_driver(f: Facts) -> Finding | None:
    """The driver against the CUDA version of the torch build, then whatever torch said itself."""
    if f.torch_cuda is None or f.cuda_available or f.user_interprets:
        return None
    if f.visible_devices is not None and f.visible_devices.strip() in ("", "-1"):
        return Finding(
            False,
            f"CUDA_VISIBLE_DEVICES={f.visible_devices!r} hides every card",
            "unset it to use the GPU",
        )
    error = f.cuda_error or ""
    found = re.search(r"found version (\d+)", error)  # 12040 means CUDA 12.4
    runs = f.driver_cuda or (found and f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}")
    needs = {11: 450, 12: 525, 13: 580}.get(version(f.torch_cuda)[0])
    too_old = (
        "driver on your system is too old" in error
        or (runs and version(runs)[0] < version(f.torch_cuda)[0])
        or (f.driver and needs and version(f.driver)[0] < needs)
    )
    if too_old:
        driver = f"NVIDIA driver {f.driver or '(version unknown)'}"
        runs = f", which runs CUDA {runs} at most," if runs else ""
        atleast = f" to {needs} or newer" if needs else ""
        return Finding(
            True,
            f"{driver}{runs} is too old for torch {f.torch} (CUDA {f.torch_cuda})",
            f"update the driver{atleast}, or install a torch build for an older CUDA",
        )
    if f.nvidia is None:
        return None  # a CUDA build on a machine without a card: nothing to repair
    where = "on Windows (never inside WSL)" if f.wsl else "and reboot"
    return Finding(
        True,
        f"there is an NVIDIA card ({f.nvidia}) that torch cannot use: {error or 'no reason given'}",
        f"see that nvidia-smi works; if it does not, reinstall the NVIDIA driver {where}",
    )


def check_arch(f: Facts) -> Finding | None:
    """Whether the torch build holds code for the card: machine code of its family, or PTX."""
    if f.capability is None or not f.cuda_available or not f.arch_list:
        return None
    for arch in f.arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", arch)
        if not match:
            continue
        has = (int(match[2]), int(match[3]))
        if has <= f.capability and (match[1] == "compute" or has[0] == f.capability[0]):
            return None
    blackwell = " and driver R570 or newer" if f.capability >= (10, 0) else ""
    return Finding(
        True,
        f"{f.card} is sm_{f.capability[0]}{f.capability[1]}, and torch {f.torch} (CUDA "
        f"{f.torch_cuda}) has code for {', '.join(f.arch_list)} only",
        f"install a build that has it: pip uninstall -y torch, then {CU128}{blackwell}",
    )


def check_blackwell_driver(f: Facts) -> Finding | None:
    fifty = re.search(r"RTX (PRO )?50\d\d", f.card or "") or (f.capability or (0, 0)) >= (12, 0)
    if fifty and f.driver and version(f.driver)[0] < 570:
        return Finding(
            True,
            f"{f.card} needs driver R570 or newer, got {f.driver}",
            "update the NVIDIA driver",
        )


def check_capability(f: Facts) -> Finding | None:
    if f.capability is None or f.capability >= runtime.MIN_CAPABILITY:
        return None
    has = f"{f.card} has compute capability {f.capability[0]}.{f.capability[1]}, below 8.0: no "
    has += "bfloat16, and Triton emits no tensor-core code"
    if f.interpret:
        return Finding(
            False,
            f"{has}; kernels run in the CPU interpreter",
            "TRITON_INTERPRET=0 forces the card, for correctness only",
        )
    return Finding(False, has, "use it for correctness only, not for timings")


CHECKS = (
    check_shadow,
    check_torch,
    check_triton,
    check_numpy,
    check_missing,
    check_problem,
    check_cpu_build,
    check_driver,
    check_arch,
    check_blackwell_driver,
    check_capability,
)


def diagnose(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


# ---------------------------------------------------------------- the self-test
@dataclass(frozen=True)
class Result:
    """One case of the self-test: error is None when it passed; skipped says why it was not run."""

    dtype: str
    kernel: str
    error: str | None = None
    skipped: str | None = None


CURES = (  # what Triton or the compiler says -> what to do
    (r"0-dimensional", "pip install 'numpy<2.4', or a Triton from 3.7 on"),
    (r"Failed to find C compiler", "install a C compiler: sudo apt install build-essential"),
    (r"Python\.h", "install Python's headers: sudo apt install python3-dev"),
    (r"libcuda\.so", "the driver's library is not on the loader's path: sudo ldconfig; on WSL2 "
     "add /usr/lib/wsl/lib to LD_LIBRARY_PATH"),
    (r"active drivers", "the GPU driver does not answer: see that nvidia-smi works"),
    (r"[Nn]o space left", "the disk is full, or set TRITON_CACHE_DIR to a folder with room"),
    (r"Permission denied", "set TRITON_CACHE_DIR to a folder that you may write to"),
    (r"still running after", "end other heavy programs, or give more time with --limit"),
)  # fmt: skip


def cure(error: str) -> str:
    for pattern, text in CURES:
        if re.search(pattern, error):
            return text
    return "the set-up is at fault, not your code: reinstall torch and Triton (SETUP.md)"


def self_test(facts: Facts, limit: float, command: tuple[str, ...] = ()) -> Iterator[Result]:
    """Runs known-good kernels in a child process; a crash or a hang is a failed case.

    Args:
        facts: decides which dtypes can be tried.
        limit: seconds for one child.
        command: the child's command line, without the cases; the default is selftest.py.
    """
    command = command or (sys.executable, "-m", "labs._harness.selftest")
    root = Path(runtime.__file__).resolve().parents[2]
    cases = [
        (dtype, kernel) for dtype in DTYPES for kernel in KERNELS if not _unsupported(facts, dtype)
    ]
    while cases:
        names = [f"{dtype}:{kernel}" for dtype, kernel in cases]
        try:
            child = subprocess.run(
                [*command, *names],
                cwd=root,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=limit,
            )
            out, stderr, end = child.stdout, child.stderr, _ending(child.returncode)
        except subprocess.TimeoutExpired as late:
            out, stderr = _text(late.stdout), _text(late.stderr)
            end = f"still running after {limit:g} s"
        done = {}
        for line in out.splitlines():
            if line.startswith('{"case"'):
                event = json.loads(line)
                if "error" in event:
                    done[event["case"]] = event["error"]
        rest = []
        for name, (dtype, kernel) in zip(names, cases, strict=True):
            if name in done:
                error = done[name] and _with_hint(done[name], stderr)
                yield Result(dtype, kernel, error)
            else:
                rest.append((dtype, kernel))
        if rest:  # the first of these ended the child; go on after it
            last = stderr.strip().splitlines()[-1:] or [""]
            yield Result(*rest[0], error=f"{end} {last[0]}".strip())
            if not done and f'"{names[0]}"' not in out:  # the child never got to a kernel
                for dtype, kernel in rest[1:]:
                    yield Result(dtype, kernel, skipped="not run")
                rest = rest[:1]
        cases = rest[1:]


def _unsupported(facts: Facts, dtype: str) -> str | None:
    if dtype == "bfloat16" and facts.interpret:
        return NO_BFLOAT16
    if dtype == "bfloat16" and facts.capability and facts.capability < (8, 0):
        return "not supported below compute capability 8.0"
    return None


def _ending(code: int) -> str:
    return f"crashed with signal {-code}" if code < 0 else f"ended with exit code {code}"


def _text(out: bytes | str | None) -> str:
    return out.decode(errors="replace") if isinstance(out, bytes) else out or ""


def _with_hint(error: str, stderr: str) -> str:
    """Adds the line of the compiler's output that says more than Triton's own message."""
    for line in stderr.splitlines():
        if "Python.h" in line:
            return f"{error} ({line.strip()})"
    return error


# ---------------------------------------------------------------- facts of this machine
def gather() -> Facts:
    here = runtime.setup()
    smi = _nvidia_smi()
    facts = {
        "system": platform.system(),
        "machine": platform.machine(),
        "wsl": "microsoft" in platform.release().lower(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": _installed("torch"),
        "triton": here.triton_version,
        "numpy": _installed("numpy"),
        "shadows": tuple(_shadows()),
        "missing": tuple(
            name
            for name in ("pytest", "pytest-timeout", "pytest-xdist", "matplotlib")
            if _installed(name) is None
        ),
        "nvidia": smi.get("nvidia"),
        "driver": smi.get("driver"),
        "driver_cuda": smi.get("driver_cuda"),
        "card": smi.get("card"),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "interpret": here.interpret,
        "device": here.device,
        "runs_on": here.kernels_run_on,
        "asked": here.asked,
        "problem": here.problem,
    }
    torch = runtime.torch
    if runtime.TORCH_ERROR is None:
        facts["torch"] = torch.__version__
        facts["torch_cuda"] = torch.version.cuda
        facts["cuda_available"] = torch.cuda.is_available()
        if facts["cuda_available"]:
            facts.update(_card(torch))
        elif torch.version.cuda is not None:
            try:
                torch.cuda.init()
            except Exception as error:  # RuntimeError, AssertionError or a driver's own
                facts["cuda_error"] = " ".join(str(error).split())
    return Facts(**facts)


def _card(torch) -> dict:
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "cards": torch.cuda.device_count(),
        "capability": (properties.major, properties.minor),
        "shared_memory": getattr(properties, "shared_memory_per_block_optin", None),
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "arch_list": tuple(torch.cuda.get_arch_list()),
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shadows() -> Iterator[tuple[str, str]]:
    """Names that Python resolves to something else than the package: a part of it is not there."""
    for name, part in (("torch", "nn"), ("triton", "language"), ("numpy", "linalg")):
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is None:
            continue
        folders = list(spec.submodule_search_locations or [])
        if not any((Path(folder) / part).is_dir() for folder in folders):
            yield name, str(spec.origin or folders[0])


def _nvidia_smi() -> dict[str, str]:
    """What the driver says without torch; empty where there is no NVIDIA card."""
    found = {}
    program = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    query = ("--query-gpu=name,driver_version", "--format=csv,noheader")
    if Path(program).exists():
        listed = _output(program, *query).splitlines()
        if listed and "," in listed[0]:
            found["card"], found["driver"] = (part.strip() for part in listed[0].split(",")[:2])
            found["nvidia"] = found["card"]
            header = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", _output(program))
            if header:
                found["driver_cuda"] = header[1]
    if "nvidia" not in found:
        for sign in ("/proc/driver/nvidia/version", "/dev/nvidia0"):
            if Path(sign).exists():
                found["nvidia"] = f"{sign} exists"
                break
        proc = Path("/proc/driver/nvidia/version")
        match = re.search(r"Module\D*?(\d+\.[\d.]+)", proc.read_text()) if proc.exists() else None
        if match:
            found["driver"] = match[1]
    return found


def _output(*command: str) -> str:
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return child.stdout if child.returncode == 0 else ""


# ---------------------------------------------------------------- the report
def describe(f: Facts) -> list[str]:
    """The table of facts, one line each."""
    build = f"CUDA {f.torch_cuda} build" if f.torch_cuda else "CPU build"
    driver = f.driver or "none"
    if f.driver_cuda:
        driver += f" (runs CUDA up to {f.driver_cuda})"
    lines = [
        f"python   {f.python}  {f.executable}",
        f"system   {f.system} {f.machine}{' (WSL)' if f.wsl else ''}",
        f"torch    {f'{f.torch} ({build})' if f.torch else 'not installed'}",
        f"triton   {f.triton or 'not installed'}",
        f"numpy    {f.numpy or 'not installed'}",
        f"driver   {driver}",
        f"card     {f.card or f.nvidia or 'no NVIDIA GPU'}",
    ]
    if f.capability:
        lines[-1] += f" (the first of {f.cards})" if f.cards > 1 else ""
        shared = f"{f.shared_memory:,} bytes" if f.shared_memory else "unknown"
        lines += [
            f"         compute capability {f.capability[0]}.{f.capability[1]}, "
            f"{f.multiprocessors} multiprocessors, {f.memory / 2**30:.1f} GiB",
            f"         shared memory per block (opt-in): {shared}",
        ]
    return lines + [f"kernels  {f.runs_on}", f"tensors  {f.device}"]


def report(facts: Facts, results: list[Result]) -> tuple[list[str], int]:
    """(the lines that come after the self-test, exit code)."""
    findings = diagnose(facts)
    failed: dict[str, list[str]] = {}  # error -> the cases that ended with it
    for result in results:
        if result.error:
            failed.setdefault(result.error, []).append(f"{result.dtype} {result.kernel}")
    for error, cases in failed.items():
        findings.append(Finding(True, f"self-test, {', '.join(cases)}: {error[:300]}", cure(error)))
    findings.sort(key=lambda finding: not finding.broken)
    broken = sum(finding.broken for finding in findings)
    end = f"{broken} broken: the cure is in the line." if broken else "Everything is fine."
    return [*map(str, findings), end], 1 if broken else 0


def add_arguments(parser) -> None:
    parser.add_argument(
        "--limit",
        type=float,
        default=120,
        metavar="SECONDS",
        help="time limit of the self-test's child process (default: 120)",
    )
    parser.epilog = (
        "example: python -m labs doctor\n"
        "exit code: 0 when everything is fine, 1 when something is broken"
    )


def run(args) -> int:
    facts = gather()
    print("\n".join(describe(facts)), flush=True)
    results = []
    if facts.torch is None or facts.triton is None or facts.shadows or facts.problem:
        print("\nself-test not run: kernels cannot run here", flush=True)
    else:
        print("\nself-test", flush=True)
        for result in self_test(facts, args.limit):
            results.append(result)
            state = "FAILED" if result.error else result.skipped or "ok"
            print(f"  {result.dtype:9} {result.kernel:11} {state}", flush=True)
        for dtype in DTYPES:
            if reason := _unsupported(facts, dtype):
                print(f"  {dtype:9} {reason}", flush=True)
    lines, code = report(facts, results)
    print("\n" + "\n".join(lines))
    return code
