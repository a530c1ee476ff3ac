"""Where kernels run: on the GPU, or in Triton's CPU interpreter.

`setup()` must act before Triton is imported, because Triton reads TRITON_INTERPRET while its own
modules are being defined. torch.testing and torch.utils.flop_counter import Triton, so it must act
before those too; `import labs` calls it. Nothing in the harness stands below this module.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass

try:
    import torch

    TORCH_ERROR = None if hasattr(torch, "cuda") else f"{torch!r} is not PyTorch"
except (ImportError, OSError) as error:  # setup() reports it, so that `python -m labs doctor` can
    torch = None
    TORCH_ERROR = str(error).strip().split("\n")[0]

MIN_CAPABILITY = (8, 0)  # below it Triton emits no tensor-core code, and bfloat16 does not compile


@dataclass(frozen=True)
class Runtime:
    """What `setup` decided.

    Attributes:
        device: "cuda" or "cpu", where tests and benchmarks put their tensors.
        interpret: whether kernels run in Triton's CPU interpreter.
        triton_version: the installed version, or None where there is no Triton.
        reason: why, in a few words, for the pytest header and `python -m labs doctor`.
        problem: what stops kernels from running at all and what to do about it, or None; the two
            are parted by a semicolon.
        asked: the user's own TRITON_INTERPRET, or None where the harness chose.
    """

    device: str
    interpret: bool
    triton_version: str | None
    reason: str
    problem: str | None = None
    asked: str | None = None

    @property
    def has_triton(self) -> bool:
        return self.triton_version is not None

    @property
    def kernels_run_on(self) -> str:
        """One line: where kernels run and why."""
        if not self.has_triton:
            return "nowhere: Triton is not installed (PyTorch parts only)"
        if self.problem:
            return f"nowhere: {self.problem}"
        if self.interpret:
            return f"Triton {self.triton_version} CPU interpreter ({self.reason})"
        return f"Triton {self.triton_version} on {self.reason}"


def _triton_version() -> str | None:
    for name in ("triton", "triton-windows", "pytorch-triton"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if importlib.util.find_spec("triton") is not None:
            return version
    return None


def _usable_gpu() -> tuple[bool, str]:
    """(usable, one phrase that says which card, or why there is none)."""
    if not torch.cuda.is_available():
        return False, "no NVIDIA GPU"
    if torch.version.hip is not None:
        return False, "AMD GPUs are not supported"
    name = torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return False, (
            f"{name} has compute capability {capability[0]}.{capability[1]}, below 8.0; "
            "TRITON_INTERPRET=0 forces the card"
        )
    return True, name


@functools.cache
def setup() -> Runtime:
    """Decides where kernels run, once per process, and sets TRITON_INTERPRET to match.

    The user's own TRITON_INTERPRET wins: 1 interprets on a machine with a GPU, 0 forces a card
    that is older than compute capability 8.0.
    """
    version = _triton_version()
    asked = os.environ.get("TRITON_INTERPRET")
    if TORCH_ERROR is not None:
        problem = f"PyTorch does not import ({TORCH_ERROR}); see SETUP.md and reinstall torch"
        return Runtime("cpu", True, version, "no PyTorch", problem, asked)
    usable, phrase = _usable_gpu()
    if asked is None:
        interpret = not usable
    else:
        interpret = asked.strip().lower() in ("1", "true", "yes", "on", "y")
        if interpret:
            phrase = "TRITON_INTERPRET=1 is set"
        elif torch.cuda.is_available():
            phrase = f"{torch.cuda.get_device_name()} (TRITON_INTERPRET={asked} is set)"
    device, problem = "cpu" if interpret else "cuda", None
    if not interpret and not torch.cuda.is_available():
        device, problem = "cpu", _NO_GPU.format(asked)
    elif version is not None and _loaded_to_interpret() not in (None, interpret):
        problem = _TOO_EARLY.format("CPU interpreter" if interpret else "GPU compiler")
    elif version is not None and interpret and asked is None:
        os.environ["TRITON_INTERPRET"] = "1"
    return Runtime(device, interpret, version, phrase, problem, asked)


def _loaded_to_interpret() -> bool | None:
    """Whether Triton's language was loaded for the interpreter; None where it is not loaded yet.

    Triton decorates its own functions (tl.zeros and others) at import, by the TRITON_INTERPRET of
    that moment. A later change reaches the kernels but not those, and fails deep inside a launch.
    """
    zeros = getattr(sys.modules.get("triton.language"), "zeros", None)
    return None if zeros is None else type(zeros).__name__ == "InterpretedFunction"


_TOO_EARLY = (
    "Triton was imported before the labs could choose its {}; import labs before triton (or "
    "torch.testing), or set TRITON_INTERPRET before both, then restart Python"
)
_NO_GPU = "TRITON_INTERPRET={} turns the CPU interpreter off and there is no GPU; unset it"


compiling_for: tuple[int, int] | None = None  # set by the compiler, which has no card


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the card that a launch on `device` is for: (9, 0) for an H200.

    On the CPU that of the card being compiled for; in the interpreter a Hopper card's, so that what
    is written for it is tested, too.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return compiling_for or (9, 0)


def check_launch(**tensors: torch.Tensor) -> None:
    """Refuses, before a launch, what would fail or give wrong numbers inside a kernel.

    Args:
        **tensors: the tensors that the kernel will read, by the name to use in messages.

    Raises:
        RuntimeError: Triton is not installed, or cannot run here.
        ValueError: the tensors are not of one dtype and on one device, not where kernels run, or
            bfloat16 in the interpreter (releases up to 3.9 compute it as raw integer bits).
    """
    here = setup()
    if not here.has_triton:
        raise RuntimeError("Triton is not installed; see SETUP.md, or stay with the PyTorch steps")
    if here.problem:
        raise RuntimeError(here.problem)
    first, x = next(iter(tensors.items()))
    for name, y in tensors.items():
        if y.dtype != x.dtype:
            raise ValueError(
                f"{', '.join(tensors)} must have one dtype: got {first} {x.dtype}, "
                f"{name} {y.dtype}; convert one with .to()"
            )
        if y.device != x.device:
            raise ValueError(
                f"{', '.join(tensors)} must be on one device: got {first} on {x.device}, "
                f"{name} on {y.device}; move one with .to()"
            )
    if not here.interpret and x.device.type != "cuda":
        raise ValueError(
            f"kernels run on the GPU here: {first} must be a cuda tensor, got {x.device}; "
            "move it with .cuda(), or set TRITON_INTERPRET=1 to run on the CPU"
        )
    if here.interpret and x.dtype == torch.bfloat16:
        raise ValueError(
            "bfloat16 is computed as raw integer bits by Triton's CPU interpreter: "
            "use float16 or float32 here, or run on a GPU"
        )
