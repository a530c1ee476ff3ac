"""`load(path, impl=None)`: the one way to get at a lab's code.

    from labs._impl import load
    ak = load("labs/06_attention_kernels/x.py", "exercise")

The choice of implementation lives in this process only; it is never written to the environment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import linecache
import re
import sys
import traceback
import warnings
from pathlib import Path
from types import CodeType, ModuleType

from labs._harness import runtime

LABS = Path(__file__).resolve().parent
ROOT = LABS.parent
IMPLS = ("exercise", "solution")

_default_impl = "exercise"
_loaded: dict[Path, tuple[str, ModuleType]] = {}  # file -> (digest of its source, module)


class LoadError(Exception):
    """A lab or an implementation that cannot be loaded; the message is one line that says why."""


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the file itself, never a stale or a planted file in __pycache__."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return _code(path, self.get_data(path))


@functools.lru_cache(maxsize=64)
def _code(path: str, source: bytes) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def compile_ahead(path: str | Path) -> None:
    """Compiles what `load(path)` will run, without running it, for all forks of this process.

    What does not compile, or not without a warning, is left to `load`, which says so.
    """
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("error")
        file = source_file(path)
        _code(str(file), file.read_bytes())


def labs() -> list[str]:
    """Folder names of all labs, in order."""
    return sorted(p.name for p in LABS.iterdir() if re.match(r"\d\d_", p.name) and p.is_dir())


def find_lab(path: str | Path) -> Path:
    """The lab folder that `path` lies in.

    Args:
        path: a lab's number ("06") or folder name, or any path inside its folder (which need not
            exist): absolute, relative to the working directory, or to the repository root.

    Raises:
        LoadError: no such lab.
    """
    text = str(path)
    if re.fullmatch(r"\d{1,2}", text):
        matches = [name for name in labs() if name.startswith(f"{int(text):02d}_")]
        if matches:
            return LABS / matches[0]
    named = [part for part in Path(path).parts if re.match(r"\d\d_", part)]
    for base in (Path.cwd(), ROOT, LABS):
        full = (base / path).resolve()
        for folder in (full, *full.parents):
            # A path that names a lab means that one, also from inside the folder of another.
            if _is_lab(folder) and (not named or folder.name in named):
                return folder
    raise LoadError(f"no lab at {text!r}; the labs are: {', '.join(labs())}")


def _is_lab(folder: Path) -> bool:
    numbered = re.match(r"\d\d_", folder.name)
    return bool(numbered) and any((folder / f"{impl}.py").is_file() for impl in IMPLS)


def set_default(impl: str) -> None:
    """Sets what `load(path)` gives for the rest of this process (pytest's --impl)."""
    global _default_impl
    check_impl(impl)
    _default_impl = impl


def default_impl() -> str:
    return _default_impl


def check_impl(impl: str) -> None:
    """Raises LoadError unless `impl` is "exercise", "solution" or the path of a .py file."""
    if impl in IMPLS:
        return
    wanted = 'wanted "exercise", "solution" or the path of a .py file'
    if not str(impl).endswith(".py"):
        raise LoadError(f"unknown implementation {str(impl)!r}: {wanted}")
    if not Path(impl).is_file():
        raise LoadError(f"no file {str(impl)!r} (working directory {Path.cwd()}): {wanted}")


def source_file(path: str | Path, impl: str | None = None) -> Path:
    """The file that `load(path, impl)` would load. Raises LoadError as `load` does."""
    impl = str(impl if impl is not None else _default_impl)
    check_impl(impl)
    lab = find_lab(path)
    file = lab / f"{impl}.py" if impl in IMPLS else Path(impl).resolve()
    if not file.is_file():
        raise LoadError(f"{_shown(lab)} has no {file.name}")
    return file


def load(path: str | Path, impl: str | None = None) -> ModuleType:
    """Loads one implementation of one lab.

    Args:
        path: any path inside the lab folder; the file need not exist. See `find_lab`.
        impl: "exercise", "solution", or the path of a .py file kept anywhere. None means the
            choice of the run: pytest's --impl, else "exercise".

    Returns:
        The module, under a name unique to its file. The same module again while the file is
        unchanged, a new one once it has been edited.

    Raises:
        LoadError: unknown lab, missing file, or a file that does not import; one line.
    """
    file = source_file(path, impl)
    here = runtime.setup()
    if here.problem:
        raise LoadError(here.problem)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if file in _loaded and _loaded[file][0] == digest:
        return _loaded[file][1]
    name = f"labs_loaded.{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_SourceLoader(name, str(file)))
    module = importlib.util.module_from_spec(spec)
    linecache.checkcache(str(file))  # Triton and tracebacks read the source through linecache
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        at = f"line {error.lineno}" if error.lineno else "unknown line"
        text = f": {error.text.strip()}" if error.text else ""
        shown = _shown(Path(error.filename or file))
        raise LoadError(f"{shown}, {at}: {type(error).__name__}: {error.msg}{text}") from None
    except KeyboardInterrupt:
        del sys.modules[name]
        raise
    except BaseException as error:  # sys.exit() and pytest.skip() in a student's file, too
        del sys.modules[name]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
        at = f", line {frames[-1].lineno}" if frames else ""
        first = str(error).strip().split("\n")[0]
        raise LoadError(f"{_shown(file)}{at}: {type(error).__name__}: {first}") from error
    _loaded[file] = (digest, module)
    return module


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
