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

import torch

MIN_CAPABILITY = (8, 0)  # below it Triton emits no tensor-core code, and bfloat16 does not compile


@dataclass(frozen=True)
class Runtime:
    """What `setup` decided.

    Attributes:
        device: "cuda" or "cpu", where tests and benchmarks put their tensors.
        interpret: whether kernels run in Triton's CPU interpreter.
        triton_version: the installed version, or None where there is no Triton.
        reason: why, in a few words, for the pytest header and `python -m labs doctor`.
        problem: what stops kernels from running at all and what to do about it, or None.
    """

    device: str
    interpret: bool
    triton_version: str | None
    reason: str
    problem: str | None = None

    @property
    def has_triton(self) -> bool:
        return self.triton_version is not None

    @property
    def kernels_run_on(self) -> str:
        """One line: where kernels run and why."""
        if not self.has_triton:
            return "nowhere: Triton is not installed (PyTorch parts only)"
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
    usable, phrase = _usable_gpu()
    if asked is not None:
        interpret = asked.strip().lower() in ("1", "true", "yes", "on", "y")
        if interpret:
            phrase = "TRITON_INTERPRET=1 is set"
        elif torch.cuda.is_available():
            phrase = f"{torch.cuda.get_device_name()} (TRITON_INTERPRET={asked} is set)"
    else:
        interpret = not usable
        if version is not None and interpret:
            # Triton's language modules are decorated at import: too late once they are loaded.
            if "triton.language" in sys.modules:
                return Runtime("cpu", True, version, phrase, problem=_TOO_EARLY)
            os.environ["TRITON_INTERPRET"] = "1"
    if interpret:
        return Runtime("cpu", True, version, phrase)
    if torch.cuda.is_available():
        return Runtime("cuda", False, version, phrase)
    return Runtime(
        "cpu",
        False,
        version,
        phrase,
        problem=f"TRITON_INTERPRET={asked} turns the CPU interpreter off and there is no GPU; "
        "unset it",
    )


_TOO_EARLY = (
    "Triton was imported before the labs could choose its CPU interpreter, and there is no GPU; "
    "import labs before triton (or torch.testing), or set TRITON_INTERPRET=1, then restart Python"
)


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
