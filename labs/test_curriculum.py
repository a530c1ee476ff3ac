"""Stubs, references, tests and handouts agree. For authors: runs with --impl=solution only.

Nothing here imports a lab's code: files are parsed, and handout snippets run in a child process.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labs._harness import runtime, steps
from labs._impl import LABS, ROOT, labs

HANDOUTS = [lab for lab in labs() if (LABS / lab / "README.md").is_file()]
COMPLETE = [lab for lab in labs() if (LABS / lab / "solution.py").is_file()]
PAGES = sorted(
    p
    for p in [*ROOT.glob("*.md"), *LABS.rglob("*.md")]
    if not {".venv", "runs", "build"} & set(p.relative_to(ROOT).parts)
)

each_lab = pytest.mark.parametrize("lab", COMPLETE)


def functions(file: Path) -> dict[str, ast.FunctionDef]:
    """Every function of a file by name, those inside `if` and classes included."""
    tree = ast.parse(file.read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def reminders(function: ast.FunctionDef) -> list[str]:
    """Reminders ("lab 06 step 1: write ...") in the body of a function."""
    strings = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant)]
    return [s for s in strings if isinstance(s, str) and steps.UNWRITTEN.fullmatch(s)]


def without_step_bodies(file: Path, names: set[str]) -> str:
    """A file's code with the bodies of the step functions cut down to their docstrings."""
    tree = ast.parse(file.read_text())
    tree.body = tree.body[1:]  # the module docstrings differ
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            doc = ast.get_docstring(node)
            node.body = [ast.Expr(ast.Constant(doc))] if doc else [ast.Pass()]
    return ast.unparse(tree)


def names_of_tests(lab: str) -> dict[str, ast.FunctionDef]:
    found = {}
    for file in (LABS / lab).rglob("test_*.py"):
        found |= {n: f for n, f in functions(file).items() if n.startswith("test_")}
    return found


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@each_lab
def test_steps_are_numbered_from_one(lab):
    declared = steps.declared(lab)
    assert list(declared) == list(range(1, len(declared) + 1))
    assert declared, "the test module declares STEPS"


@each_lab
def test_stub_and_reference_differ_in_step_bodies_only(lab):
    folder = LABS / lab
    stub = functions(folder / "exercise.py")
    unwritten = {name for name, function in stub.items() if reminders(function)}
    assert len(unwritten) >= len(steps.declared(lab)), "a reminder for each step"
    assert without_step_bodies(folder / "exercise.py", unwritten) == without_step_bodies(
        folder / "solution.py", unwritten
    )


@each_lab
def test_stub_names_lab_and_step_in_order(lab):
    file = LABS / lab / "exercise.py"
    in_order = sorted(functions(file).values(), key=lambda f: f.lineno)
    found = [m for f in in_order for m in reminders(f)]
    parsed = [steps.UNWRITTEN.fullmatch(text).groups() for text in found]
    declared = steps.declared(lab)
    # A step may have several functions, one after the other.
    in_order = dict.fromkeys((int(n), int(step)) for n, step, _ in parsed)
    assert list(in_order) == [(int(lab[:2]), step) for step in declared]
    for step in declared:
        assert steps.todo_line(file, step), f"step {step} has a TODO comment"
    assert not any(reminders(f) for f in functions(LABS / lab / "solution.py").values())


@each_lab
def test_every_test_of_the_lab_belongs_to_a_step(lab):
    for file in (LABS / lab).glob("test_*.py"):
        for name, test in functions(file).items():
            if name.startswith("test_"):
                marks = [ast.unparse(d) for d in test.decorator_list]
                assert any(re.match(r"step\d+$|pytest\.mark\.step\(", m) for m in marks), name


@each_lab
def test_handout_has_a_section_for_each_step(lab):
    text = (LABS / lab / "README.md").read_text()
    for step, name in steps.declared(lab).items():
        assert re.search(rf"^## \d+\. Step {step}: `{name}`$", text, re.M), (
            f"a heading `Step {step}: {name}`"
        )


@each_lab
def test_handout_sections_named_in_the_stub_exist(lab):
    stub, text = (LABS / lab / "exercise.py").read_text(), (LABS / lab / "README.md").read_text()
    for step, section in re.findall(r"TODO step (\d+) \(.*?handout section (\d+)\)", stub):
        assert re.search(rf"^## {section}\. Step {step}:", text, re.M), f"section {section}"


@pytest.mark.parametrize("lab", HANDOUTS)
def test_handout_names_tests_that_exist(lab):
    text = (LABS / lab / "README.md").read_text()
    named = set(re.findall(r"\btest_\w+", text))
    modules = {p.stem for p in LABS.rglob("test_*.py")}
    assert named - modules - set(names_of_tests(lab)) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue  # links that leave the repository
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes for a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    kept = (re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings)
    return set(kept)


@pytest.mark.parametrize("lab", HANDOUTS)
def test_snippets_run(lab, tmp_path):
    """A handout's Python blocks run in order, in one namespace; those for a GPU only on one."""
    on_gpu = runtime.setup().device == "cuda"
    parts = []
    for block in blocks(LABS / lab / "README.md", "python"):
        if 'device="cuda"' in block:
            if not on_gpu:
                compile(block, lab, "exec")
                continue
            block = block.replace('"exercise"', '"solution"')  # as the handout invites one to do
        parts.append(block)
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(parts))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ---------------------------------------------------------------- the harness


def imported_modules(file: Path) -> set[str]:
    """Modules of the harness and the loader that a file imports, other than for type checkers."""
    found, trees = set(), [ast.parse(file.read_text())]
    while trees:
        node = trees.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        trees += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labs"):
            found |= {node.module.rpartition(".")[2], *(name.name for name in node.names)}
    return found


def test_imports_of_the_harness_run_one_way():
    page = (LABS / "_harness" / "README.md").read_text()
    listed = re.findall(r"^\| `(?:\.\./)?(\w+)(?:\.py)?` \|", page, re.MULTILINE)
    files = {file.stem: file for file in (LABS / "_harness").glob("[!_]*.py")}
    files["_impl"] = LABS / "_impl.py"
    assert sorted(listed) == sorted(files), "the table in labs/_harness/README.md has each module"
    for number, name in enumerate(listed):
        below = imported_modules(files[name]) & set(listed[number:])
        assert not below, f"{name} imports {', '.join(sorted(below))}, which stands below it"
