"""`python -m labs handout DIR`: the student edition, the repository without its references.

Left out are the references (solution.py, mutants.py, extras/*_solution.*), the authors' tests, and
the CI that runs both. The pages lose what is for instructors or needs a reference. Everything else
is copied as it is, and the suite runs there.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from labs._harness import steps
from labs._impl import ROOT

# Pattern of paths in the repository -> why students do not get them.
LEFT_OUT = {
    "labs/[0-9][0-9]_*/solution.py": "reference",
    "labs/[0-9][0-9]_*/mutants.py": "planted faults",
    "labs/[0-9][0-9]_*/extras/*_solution.*": "reference",
    "labs/_harness/tests/*": "tests of the machinery, for authors",
    "labs/test_curriculum.py": "tests of the labs themselves, for authors",
    ".ci/run": "what CI of this repository runs",
    ".ci/versions": "what CI of this repository runs at night",
    ".github/workflows/*": "CI of this repository",
}

# Without git: what is no part of the repository.
NOT_OURS = (
    ".*_cache __pycache__ *.egg-info .venv venv .git .ipynb_checkpoints runs build node_modules "
    ".DS_Store *.pyc"
).split()

NOTE = """
> **Student edition.** The references are not here. Begin at "You are a student" below.
"""

# In README.md, between its first paragraph and the table of labs: INSTALL is what stands there.
FIRST_COMMANDS = """
Install, and check the machine:

```sh
INSTALL.venv/bin/python -m labs doctor
```

Test lab 06; the board at the end says what to write first:

```sh
INSTALL.venv/bin/pytest labs/06_attention_kernels
```
"""

PAGES = ("README.md", "SETUP.md", "labs/README.md", "labs/[0-9][0-9]_*/README.md")
OPTION = r"--impl[= ]solution\b"

# What a page says to people who have the references -> what it says to students. In this order.
REWORDED = {
    # sections for instructors, and links to them
    r"(?ms)^## (?:\d+\. For instructors|You are an instructor)$.*?(?=^## |\Z)": "",
    r" · \[\d+ For instructors\]\([^)]*\)": "",
    # the same command twice, for yours and for the reference
    rf"(?m)^python -m labs .*{OPTION} +# the reference\n": "",
    rf"(?m) +# {OPTION}: the reference$": "",
    r"(?m)^\d+\. `python -m labs bench 06` does the same for your own `exercise\.py`\.\n": "",
    r"the first two time S = ": "the first times S = ",
    # asides
    rf" \((?:for your own kernels leave out )?`{OPTION}`\)": "",
    r'Change "exercise" to "solution" to see the reference\. ': "",
    # any other command: without the option; what stands in columns behind it stays in its column
    rf" {OPTION}((?: ?\S)*)(?=  )": r"\1" + " " * len(" --impl=solution"),
    rf" {OPTION}": "",
}


def repository_files(root: Path = ROOT) -> list[Path]:
    """Files of the repository, relative to `root`: git's tracked ones, or without git a walk."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached"]
    try:
        listed = subprocess.run(git, capture_output=True, check=False)
    except OSError:  # no git
        listed = None
    if listed is not None and listed.returncode == 0 and listed.stdout:
        names = listed.stdout.decode().rstrip("\0").split("\0")
        return sorted(Path(name) for name in set(names) if (root / name).is_file())
    return walk(root)


def walk(root: Path) -> list[Path]:
    """Files below `root`, relative to it, without caches, environments and results."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _not_ours(name)]
        found += [Path(folder, name).relative_to(root) for name in files if not _not_ours(name)]
    return sorted(found)


def _not_ours(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in NOT_OURS)


def why_left_out(path: Path) -> str | None:
    """The reason why students do not get this file, or None for a file that they do get."""
    for pattern, reason in LEFT_OUT.items():
        if fnmatch.fnmatch(path.as_posix(), pattern):
            return reason
    return None


def written_steps(lab: Path) -> list[int]:
    """Steps of a lab whose stub no longer says that it is unwritten."""
    stub = lab / "exercise.py"
    text = stub.read_text() if stub.is_file() else ""
    unwritten = {int(match[2]) for match in steps.UNWRITTEN.finditer(text)}
    return [number for number in steps.declared(lab.name) if number not in unwritten]


def copy(root: Path, files: list[Path], folder: Path) -> None:
    """Copies files of `root`, given relative to it, to the same places below `folder`."""
    for path in files:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, target)
        shutil.copymode(root / path, target)


def without_faults(text: str) -> str:
    """A lab's handout without the list of planted faults, which is for instructors."""
    from labs._harness.mutants import MARKERS

    before, start, rest = text.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    return f"{before}The list is in the instructors' repository.{after}" if start and end else text


def for_students(text: str) -> str:
    """A page without what needs a reference or is for instructors."""
    text = without_faults(text)
    for pattern, new in REWORDED.items():
        text = re.sub(pattern, new, text)
    return text.rstrip() + "\n"


def student_readme(text: str) -> str:
    """README.md with a note and the students' first commands, not those that run the references."""
    title, _, rest = text.partition("\n")
    shown = re.search(r"(?ms)^Try it, with the benchmark.*?(?=^\| lab \|)", rest)
    if shown:
        install = re.search(r"(?m)^python3 .* && ", shown[0])[0]
        commands = FIRST_COMMANDS.lstrip().replace("INSTALL", install)
        rest = rest[: shown.start()] + commands + "\n" + rest[shown.end() :]
    return f"{title}\n{NOTE}{for_students(rest)}"


def add_arguments(parser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    parser.epilog = (
        "example: python -m labs handout ../attention-labs-students\n"
        "labs/GRADING.md says how to hand it out and how to grade what comes back"
    )


def refusal(folder: Path) -> str | None:
    """Why the student edition cannot be written to `folder`, or None."""
    full = folder.resolve()
    if full.is_relative_to(ROOT.resolve()):
        return f"{folder} lies inside the repository; wanted a folder outside it"
    if full.exists() and not full.is_dir():
        return f"{folder} is a file; wanted a new or empty folder"
    if full.is_dir() and any(full.iterdir()):
        return f"{folder} is not empty; wanted a new or empty folder"
    for lab in sorted(ROOT.glob("labs/[0-9][0-9]_*")):
        solved = written_steps(lab)
        if solved:
            return (
                f"{lab.relative_to(ROOT)}/exercise.py is no untouched stub (step {solved[0]} is "
                "written), and would be handed out; put the stub back, then try again"
            )
    return None


def run(args) -> int:
    problem = refusal(args.folder)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    reasons = {path: why_left_out(path) for path in repository_files(ROOT)}
    kept = [path for path, reason in reasons.items() if reason is None]
    copy(ROOT, kept, args.folder)
    for page in (page for pattern in PAGES for page in args.folder.glob(pattern)):
        rewrite = student_readme if page == args.folder / "README.md" else for_students
        page.write_text(rewrite(page.read_text()))
    print(f"wrote {len(kept)} files to {args.folder}; README.md has a note for students on top")
    print("left out:")
    shown: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        if reason:
            shown.setdefault(reason, []).append(path.as_posix())
    for reason, paths in shown.items():
        where = paths if len(paths) <= 3 else [f"{paths[0]} and {len(paths) - 1} more"]
        print(f"  {', '.join(where)}: {reason}")
    lab = next(iter(sorted(p for p in kept if re.match(r"labs/\d\d_\w+/exercise\.py", str(p)))))
    print(f"check it: cd {args.folder} && python -m pytest {lab.parent.as_posix()}")
    print("          every step must be reported as not written")
    return 0
