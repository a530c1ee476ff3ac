"""Every name of Triton that the labs use and Triton does not promise, in one place.

`interpreter` watches kernels with the first list, `compiler` compiles them for cards that are not
here with the second, and lab 11 writes kernels in Gluon with the third. Where a release has moved a
name, each says so in the same words, and tests that need it skip with that reason.
"""

from __future__ import annotations

import contextlib
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
    "run Gluon kernels for Hopper": (
        ("triton.experimental.gluon._runtime", "GluonJITFunction.run", ("grid", "warmup")),
        ("triton.experimental.gluon._runtime", "GluonASTSource", ("fn", "signature", "attrs")),
        ("triton.experimental.gluon.language", "warp_specialize", ()),
        ("triton.experimental.gluon.language", "allocate_shared_memory", ()),
        ("triton.experimental.gluon.language", "NVMMADistributedLayout", ("instr_shape",)),
        ("triton.experimental.gluon.language", "NVMMASharedLayout.get_default_for", ()),
        ("triton.experimental.gluon.language.nvidia.hopper", "fence_async_shared", ()),
        ("triton.experimental.gluon.language.nvidia.hopper", "warpgroup_mma", ("is_async",)),
        ("triton.experimental.gluon.language.nvidia.hopper", "warpgroup_mma_wait", ("deps",)),
        ("triton.experimental.gluon.language.nvidia.hopper", "mbarrier.expect", ()),
        ("triton.experimental.gluon.language.nvidia.hopper", "mbarrier.arrive", ("count",)),
        ("triton.experimental.gluon.language.nvidia.hopper", "tma.store_wait", ("pendings",)),
        ("triton.experimental.gluon.nvidia.hopper", "TensorDescriptor", ("base", "block_shape")),
    ),
}
INTERPRET, COMPILE, GLUON = USES

# Gluon's TMA copies: the name of a release, newest first. Triton 3.9 keeps the old ones as stubs
# that raise.
TMA_LOAD = ("async_load", "async_copy_global_to_shared")
TMA_STORE = ("async_store", "async_copy_shared_to_global")


def tma_copies() -> tuple:
    """(load, store): Gluon's TMA copies, by whatever names this release has them."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return tuple(
        next(getattr(tma, name) for name in names if hasattr(tma, name))
        for names in (TMA_LOAD, TMA_STORE)
    )


def moved(use: str) -> str | None:
    """The name that this release of Triton has moved or changed and `use` needs, in one line.

    Args:
        use: INTERPRET, COMPILE or GLUON.

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
    """Does what each fork that compiles would do again: 0.3 s for the hash of Triton's own files,
    0.1 s for a module that is imported late.

    Only a matter of time: where a release has moved them, nothing is lost.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.compiler.code_generator")
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        triton_key = getattr(importlib.import_module(module), "triton_key", None)
        if callable(triton_key):
            triton_key()
            return
