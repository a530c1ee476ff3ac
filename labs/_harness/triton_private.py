"""Every name of Triton that the labs use and Triton does not promise, in one place.

`interpreter` watches kernels with the first list, `compiler` compiles them for cards that are not
here with the second. Where a release has moved a name, both say so in the same words, and tests
that need it skip with that reason.
"""

from __future__ import annotations

import importlib
import inspect

from labs._harness import runtime

# Uses: what needs the names -> (module, name), and for callables the parameters that they must
# have. A name may lead through attributes; "()" after it asks for an instance, see _instance.
USES = {
    "watch a kernel in the CPU interpreter": (
        ("triton.runtime.interpreter", "_interpreter.load", ()),
        ("triton.runtime.interpreter", "_interpreter.store", ()),
        ("triton.runtime.interpreter", "_interpreter.atomic_rmw", ()),
        ("triton.runtime.interpreter", "_interpreter.atomic_cas", ()),
        ("triton.runtime.interpreter", "_get_np_dtype", ()),
        ("triton.runtime.interpreter", "TensorHandle", ("data", "dtype")),
        ("triton.runtime.interpreter", "GridExecutor", ("fn", "arg_names", "grid")),
        ("triton.runtime.interpreter", "GridExecutor.__call__", ()),
        ("triton.runtime.interpreter", "interpreter_builder.create_dot", ()),
        ("triton.runtime.interpreter", "interpreter_builder.create_masked_load", ()),
        ("triton.runtime.interpreter", "interpreter_builder.set_grid_dim", ()),
        ("triton.runtime.interpreter", "interpreter_builder.set_grid_idx", ()),
    ),
    "compile a kernel for a card that is not here": (
        ("triton.runtime.jit", "JITFunction.run", ("grid", "warmup")),
        ("triton.runtime.jit", "JITFunction().arg_names", ()),
        ("triton.runtime.jit", "JITFunction().params", ()),
        ("triton.runtime.jit", "JITFunction().fn", ()),
        ("triton.compiler", "ASTSource", ("fn", "signature", "constexprs", "attrs")),
        ("triton.compiler", "compile", ("src", "target", "options")),
        ("triton.backends.compiler", "GPUTarget", ("backend", "arch", "warp_size")),
        ("triton", "knobs.nvidia.ptxas", ()),
        ("triton", "knobs.nvidia.cuobjdump", ()),
    ),
}
INTERPRET, COMPILE = USES


def moved(use: str) -> str | None:
    """The name that this release of Triton has moved or changed and `use` needs, in one line.

    Args:
        use: INTERPRET or COMPILE.

    Returns:
        None where every name is in its place.
    """
    version = runtime.setup().triton_version
    for module, name, parameters in USES[use]:
        change = _change(module, name, parameters)
        if change:
            return (
                f"Triton {version} has {change} {module}.{name}: the labs need it to {use}; "
                "install the Triton of .ci/constraints.txt"
            )
    return None


def _change(module: str, name: str, parameters: tuple[str, ...]) -> str | None:
    """ "moved" or "changed", or None where the name is there and takes these parameters."""
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            made = part.endswith("()")
            value = getattr(value, part.removesuffix("()"))
            value = _instance(value) if made else value
    except (ImportError, AttributeError):
        return "moved"
    except RuntimeError:  # a tool that is not in its place on the disk: no matter of names
        return None
    try:
        missing = set(parameters) - set(inspect.signature(value).parameters) if parameters else ()
    except (TypeError, ValueError):
        return "changed"
    return "changed" if missing else None


def _sample(x_ptr, BLOCK=16):
    """What _instance makes a kernel of; it is never compiled."""


def _instance(jit_function):
    """A kernel of that class, to see the attributes that its constructor makes."""
    return jit_function(_sample)


def warm_up() -> None:
    """Computes the hash of Triton's own files, which each fork would compute again (0.3 s).

    Only a matter of time: where a release has moved it, nothing is lost.
    """
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        triton_key = getattr(importlib.import_module(module), "triton_key", None)
        if callable(triton_key):
            triton_key()
            return
