"""labs/_harness/handout.py: what students get, what they do not, and that the suite runs there."""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labs._harness import handout, steps
from labs._impl import LABS, ROOT

LAB = "06_attention_kernels"
WRITTEN = [n for lab in sorted(LABS.glob("[0-9][0-9]_*")) for n in handout.written_steps(lab)]
untouched = pytest.mark.skipif(bool(WRITTEN), reason="an exercise.py has been written in")


def run(folder) -> int:
    parser = argparse.ArgumentParser()
    handout.add_arguments(parser)
    return handout.run(parser.parse_args([str(folder)]))


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """The student edition of this repository."""
    folder = tmp_path_factory.mktemp("handout") / "students"
    assert run(folder) == 0
    return folder


def board_of(edition: Path, *args) -> str:
    command = [sys.executable, "-m", "pytest", f"labs/{LAB}", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, cwd=edition, capture_output=True, text=True, timeout=120).stdout


@untouched
def test_the_references_are_left_out_and_the_rest_is_the_same(edition):
    given = {p.relative_to(edition).as_posix() for p in edition.rglob("*") if p.is_file()}
    for name in given:
        assert not re.search(r"(solution|\d\d_\w+/mutants)\.\w+$", name), name
        assert not name.startswith((".github/workflows", "labs/_harness/tests"))
    for name in given - {"README.md"}:
        mine = (ROOT / name).read_bytes()
        if name in pages(edition):
            mine = handout.for_students(mine.decode()).encode()
        assert (edition / name).read_bytes() == mine
    assert {"conftest.py", "labs/_harness/mutants.py", f"labs/{LAB}/exercise.py"} <= given


def pages(folder: Path) -> set[str]:
    """Paths of the pages that are rewritten for students."""
    found = (page for pattern in handout.PAGES for page in folder.glob(pattern))
    return {page.relative_to(folder).as_posix() for page in found}


@untouched
def test_no_page_asks_for_a_reference_or_speaks_to_instructors(edition):
    assert len(pages(edition)) > 10
    for name in pages(edition):
        text = (edition / name).read_text()
        for gone in (handout.OPTION, r"#.* instructor", r"instructors\]", "planted fault"):
            assert not re.search(gone, text), (name, gone)


@untouched
def test_the_readme_begins_with_the_students_commands(edition):
    text = (edition / "README.md").read_text()
    assert text.index("Student edition") < text.index("python3 -m venv") < text.index("| lab |")
    commands = re.findall(r"^python3 -m venv .*-e \. .* && (.*)$", text, re.MULTILINE)
    assert [c.split()[0] for c in commands] == [".venv/bin/python", ".venv/bin/pytest"]
    assert "bench 06" not in text[: text.index("| lab |")]


@pytest.mark.parametrize("pattern", handout.REWORDED)
def test_each_rewording_has_its_place(pattern):
    assert any(re.search(pattern, (ROOT / name).read_text()) for name in pages(ROOT))


def test_a_page_for_students():
    lines = [
        "# Lab",
        "Contents: [1 A](#1-a) · [2 For instructors](#2-for-instructors)",
        "This is it (`--impl=solution`), or `labs bench 06 --impl solution` here.",
        "python -m labs bench 06                     # yours",
        "python -m labs bench 06 --impl=solution     # the reference",
        "python -m labs xray 06 --impl=solution --x  # cards",
        "## 2. For instructors",
        "marks",
        "### more",
        "## 3. The rest",
    ]
    assert handout.for_students("\n".join(lines)).splitlines() == [
        "# Lab",
        "Contents: [1 A](#1-a)",
        "This is it, or `labs bench 06` here.",
        "python -m labs bench 06                     # yours",
        "python -m labs xray 06 --x                  # cards",
        "## 3. The rest",
    ]


@untouched
def test_the_stub_and_a_right_submission_run_there(edition, tmp_path):
    assert re.search(
        r"step 1  online_softmax_stats +not written", board_of(edition, "--step", "1", "-q")
    )
    reference = LABS / LAB / "solution.py"
    if reference.is_file():
        shutil.copyfile(reference, tmp_path / "mine.py")
        option = f"--impl={tmp_path / 'mine.py'}"
        assert re.search(
            r"step 1  online_softmax_stats +passed", board_of(edition, "--step", "1", option)
        )


def small(folder: Path) -> Path:
    """A repository without git whose lab has one step."""
    lab = folder / "labs" / "90_small"
    files = {
        "README.md": "# Title\ntext\n",
        "labs/90_small/exercise.py": 'raise NotImplementedError("lab 90 step 1: write f")\n',
        "labs/90_small/solution.py": "",
        "labs/90_small/test_small.py": 'STEPS = {1: "f"}\n',
        "labs/90_small/__pycache__/solution.cpython-311.pyc": "",
        "labs/90_small/extras/twin_solution.cpp": "",
        "runs/grade-90/results.csv": "",
        ".venv/lib/x.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert lab.is_dir()
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = small(tmp_path / "repository")
    monkeypatch.setattr(handout, "ROOT", folder)
    monkeypatch.setattr(steps, "LABS", folder / "labs")
    return folder


def test_without_git(root, tmp_path, capsys):
    assert run(tmp_path / "students") == 0
    given = {p.name for p in (tmp_path / "students").rglob("*") if p.is_file()}
    assert given == {"README.md", "exercise.py", "test_small.py"}
    out = capsys.readouterr().out
    assert "wrote 3 files" in out
    assert "labs/90_small/extras/twin_solution.cpp, labs/90_small/solution.py: reference" in out
    assert "python -m pytest labs/90_small" in out


def test_untracked_files_stay_at_home(root, tmp_path):
    for command in (["init", "-q"], ["add", "README.md", "labs/90_small/exercise.py"]):
        if subprocess.run(["git", "-C", root, *command], check=False).returncode:
            pytest.skip("no git")
    (root / "marks.csv").write_text("secret")
    assert run(tmp_path / "students") == 0
    given = {p.name for p in (tmp_path / "students").rglob("*") if p.is_file()}
    assert given == {"README.md", "exercise.py"}


def test_refusals(root, tmp_path, capsys):
    def error(folder) -> str:
        assert run(folder) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    assert "lies inside the repository" in error(root / "students")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    assert "is not empty" in error(tmp_path / "full")
    assert "is a file" in error(tmp_path / "full" / "x")
    (root / "labs" / "90_small" / "exercise.py").write_text("def f():\n    return 1\n")
    assert "no untouched stub (step 1 is written)" in error(tmp_path / "students")
    assert not (tmp_path / "students").exists()


def test_the_list_of_planted_faults_stays_at_home(root, tmp_path):
    listed = "<!-- generated:kill-matrix -->\n| off-by-one |\n<!-- end generated -->"
    (root / "labs" / "90_small" / "README.md").write_text(f"# Lab\n{listed}\nthe end\n")
    assert run(tmp_path / "students") == 0
    page = (tmp_path / "students" / "labs" / "90_small" / "README.md").read_text()
    assert page == "# Lab\nThe list is in the instructors' repository.\nthe end\n"
    assert "off-by-one" in (root / "labs" / "90_small" / "README.md").read_text()
