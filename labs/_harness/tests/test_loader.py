"""labs/_impl.py: which file is loaded, under which name, and what each error says."""

import inspect
import os
import py_compile
import sys
from pathlib import Path

import pytest

from labs import _impl
from labs._harness.runtime import Runtime
from labs._impl import LoadError, find_lab, load, source_file

LAB06 = _impl.LABS / "06_attention_kernels"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository of its own with two labs whose files have equal names."""
    for name, value in (("01_one", 1), ("02_two", 2)):
        lab = tmp_path / "labs" / name
        lab.mkdir(parents=True)
        (lab / "exercise.py").write_text(f"VALUE = {value}\n")
        (lab / "solution.py").write_text(f"VALUE = {value * 10}\n")
    monkeypatch.setattr(_impl, "ROOT", tmp_path)
    monkeypatch.setattr(_impl, "LABS", tmp_path / "labs")
    monkeypatch.setattr(_impl, "_loaded", {})
    monkeypatch.setattr(_impl, "_default_impl", "exercise")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error(path, impl=None) -> str:
    """The message of the LoadError, which must be one line."""
    with pytest.raises(LoadError) as caught:
        load(path, impl)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_snippet_of_the_handout_loads_both_implementations():
    for impl in ("exercise", "solution"):
        module = load("labs/06_attention_kernels/x.py", impl)
        assert Path(module.__file__) == LAB06 / f"{impl}.py"


@pytest.mark.parametrize(
    "path",
    [
        "labs/01_one/x.py",  # the file need not exist
        "labs/01_one",
        "labs/01_one/deep/er/x.py",
        "01_one",
        "01",
        "1",
        Path("labs") / "01_one" / "exercise.py",
    ],
)
@pytest.mark.parametrize("folder", [".", "labs", "elsewhere", "labs/02_two"])
def test_a_lab_is_found_from_any_working_directory(root, monkeypatch, path, folder):
    (root / "elsewhere").mkdir()
    monkeypatch.chdir(root / folder)
    assert find_lab(path) == root / "labs" / "01_one"


def test_a_path_relative_to_the_working_directory_or_absolute(root, monkeypatch):
    monkeypatch.chdir(root / "labs" / "02_two")
    assert load("x.py").VALUE == 2
    assert load("../01_one/x.py").VALUE == 1
    assert load(root / "labs" / "01_one" / "x.py").VALUE == 1
    monkeypatch.chdir("/")
    assert load("labs/02_two/x.py").VALUE == 2


def test_equal_file_names_in_two_labs_are_two_modules(root):
    one, two = load("01"), load("02")
    assert (one.VALUE, two.VALUE) == (1, 2)
    assert one.__name__ != two.__name__
    assert sys.modules[one.__name__] is one
    assert load("01", "solution").VALUE == 10
    assert load("02").VALUE == 2


def test_the_default_of_the_run_and_an_explicit_choice(root):
    assert load("01").VALUE == 1
    _impl.set_default("solution")
    assert (load("01").VALUE, load("02").VALUE) == (10, 20)
    assert load("01", "exercise").VALUE == 1
    assert not any("solution" in value for value in os.environ.values())


def test_a_submission_kept_elsewhere(root, tmp_path):
    files = []
    for name in ("ada", "bob"):
        files.append(tmp_path / "submissions" / name / "exercise.py")
        files[-1].parent.mkdir(parents=True)
        files[-1].write_text(f"VALUE = {name!r}\n")
    assert [load("01", str(f)).VALUE for f in files] == ["ada", "bob"]
    assert load("01", "submissions/ada/exercise.py").VALUE == "ada"
    assert load("01").VALUE == 1


def test_the_same_module_until_the_file_is_edited(root):
    first = load("01")
    assert load("labs/01_one/exercise.py") is first
    file = root / "labs" / "01_one" / "exercise.py"
    stat = file.stat()
    file.write_text("VALUE = 7\n")  # same size, and below the same time
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load("01").VALUE == 7
    assert first.VALUE == 1


def test_source_is_that_of_the_edited_file(root):
    file = root / "labs" / "01_one" / "exercise.py"
    file.write_text("def f():\n    return 'before'\n")
    assert "before" in inspect.getsource(load("01").f)
    file.write_text("def f():\n    return 'behind'\n")
    assert "behind" in inspect.getsource(load("01").f)


def test_a_stale_compiled_file_is_not_used(root):
    file = root / "labs" / "01_one" / "exercise.py"
    file.write_text("VALUE = 666\n")
    py_compile.compile(file, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    file.write_text("VALUE = 8\n")
    assert load("01").VALUE == 8


def test_unknown_lab_lists_the_labs(root):
    for path in ("99", "labs/99_none/x.py", "elsewhere/x.py", "", "/"):
        assert error(path) == f"no lab at {path!r}; the labs are: 01_one, 02_two"


def test_a_numbered_folder_above_the_repository_is_no_lab(root, monkeypatch):
    numbered = root / "03_projects" / "deep"
    numbered.mkdir(parents=True)
    monkeypatch.chdir(numbered)
    assert error("x.py").startswith("no lab at 'x.py'")
    assert find_lab("labs/01_one/x.py") == root / "labs" / "01_one"


@pytest.mark.parametrize("impl", ["solutoin", "", "labs/01_one/exercise", "exercise.txt"])
def test_unknown_implementation_says_what_is_wanted(root, impl):
    want = f'unknown implementation {impl!r}: wanted "exercise", "solution" or the path of a .py'
    assert error("01", impl).startswith(want)
    with pytest.raises(LoadError, match="unknown implementation"):
        _impl.set_default(impl)
    assert _impl.default_impl() == "exercise"


def test_a_missing_file_says_where_it_looked(root):
    assert error("01", "gone/exercise.py").startswith(
        f"no file 'gone/exercise.py' (working directory {root}): wanted"
    )
    (root / "labs" / "01_one" / "exercise.py").unlink()
    assert error("01") == f"{Path('labs/01_one')} has no exercise.py"


def write(root, text) -> str:
    (root / "labs" / "01_one" / "exercise.py").write_text(text)
    return str(Path("labs") / "01_one" / "exercise.py")


def test_a_syntax_error_shows_file_line_and_text(root):
    shown = write(root, "x = 1\n\ndef f(:\n    pass\n")
    text = error("01")
    assert text.startswith(f"{shown}, line 3: SyntaxError: ")
    assert text.endswith(": def f(:")
    assert load("02").VALUE == 2


def test_wrong_indentation_and_a_null_byte_are_syntax_errors(root):
    shown = write(root, "def f():\nreturn 1\n")
    assert error("01").startswith(f"{shown}, line 2: IndentationError: ")
    shown = write(root, "x = 1\0\n")
    assert error("01").startswith(shown)


def test_bytes_that_are_no_text_are_one_line(root):
    (root / "labs" / "01_one" / "exercise.py").write_bytes(b"x = '\xff'\n")
    assert "exercise.py" in error("01")


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("import no_such_module\n", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\nx / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("def f():\n    return y\n\n\nf()\n", 2, "NameError: name 'y' is not defined"),
        ("raise ValueError('one\\ntwo')\n", 1, "ValueError: one"),
    ],
)
def test_an_error_while_importing_shows_the_line_in_the_students_file(root, text, line, says):
    shown = write(root, text)
    assert error("01") == f"{shown}, line {line}: {says}"
    assert load("02").VALUE == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        ("import pytest\npytest.skip('no', allow_module_level=True)\n", "line 2: Skipped: no"),
    ],
)
def test_a_file_that_ends_the_program_or_skips_is_an_error(root, text, says):
    shown = write(root, text)
    assert error("01") == f"{shown}, {says}"


def test_a_repaired_file_loads(root):
    write(root, "def f(:\n")
    error("01")
    write(root, "VALUE = 3\n")
    assert load("01").VALUE == 3


def test_nothing_is_left_of_a_file_that_failed(root):
    before = set(sys.modules)
    write(root, "import no_such_module\n")
    error("01")
    assert set(sys.modules) == before


def test_where_kernels_cannot_run_the_reason_is_the_error(root, monkeypatch):
    fixed = Runtime("cpu", True, "3.7.1", "test", "Triton was imported before; restart")
    monkeypatch.setattr(_impl.runtime, "setup", lambda: fixed)
    assert error("01") == "Triton was imported before; restart"


def test_source_file_does_not_load(root):
    write(root, "raise RuntimeError\n")
    assert source_file("01") == root / "labs" / "01_one" / "exercise.py"


def test_compiling_ahead_runs_nothing_and_load_does_not_compile_again(root, monkeypatch):
    file = root / "labs/01_one/exercise.py"
    file.write_text("import sys\nsys.ran_ahead = True\n")
    _impl.compile_ahead(file)
    assert not hasattr(sys, "ran_ahead")
    monkeypatch.setattr("builtins.compile", None)
    load("01")
    assert sys.ran_ahead
    del sys.ran_ahead


@pytest.mark.parametrize(
    ("text", "says"), [("def f(:\n", "invalid syntax"), ("1 / 0\n", "ZeroDivisionError")]
)
def test_compiling_ahead_leaves_errors_to_load(root, text, says):
    file = root / "labs/01_one/exercise.py"
    file.write_text(text)
    _impl.compile_ahead(file)
    assert says in error("01")


def test_compiling_ahead_leaves_warnings_to_load(root, recwarn):
    file = root / "labs/01_one/exercise.py"
    file.write_text("VALUE = 1 is 1\n")
    _impl.compile_ahead(file)
    assert not recwarn
    with pytest.warns(SyntaxWarning, match="literal"):
        load("01")
