"""pytest options, hooks and fixtures of the labs; the work is done in labs/_harness."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from labs import _impl
from labs._harness import guard, isolate, mutants, oracle, picture, runtime, steps


def pytest_addoption(parser):
    group = parser.getgroup("labs")
    group.addoption(
        "--impl",
        default="exercise",
        help='what to test: "exercise" (default), "solution", or the path of a .py file',
    )
    group.addoption(
        "--step", type=int, action="append", help="only the tests of this step; may be repeated"
    )
    group.addoption(
        "--seed", type=int, default=0, help="seed of the tests' random inputs (default 0)"
    )
    group.addoption(
        "--forks",
        type=int,
        default=isolate.cores(),
        metavar="N",
        help="tests of the labs that run at a time, each in its own process (default: the cores)",
    )
    group.addoption(
        "--expect-unsolved",
        action="store_true",
        help="pass only if every step of every stub fails as not written (for authors)",
    )
    group.addoption(
        "--mutants",
        action="store_true",
        help="plant each fault of mutants.py in the reference and print which the tests catch",
    )
    group.addoption(
        "--mutant",
        action="append",
        metavar="ID",
        help="plant only this fault; may be repeated",
    )
    group.addoption(
        "--write-handout",
        action="store_true",
        help="with --mutants: also write the result into the labs' handouts",
    )
    group.addoption(
        "--picture",
        action="store_true",
        help="of a failed comparison, also save an error map under runs/pictures",
    )


def pytest_configure(config):
    steps.check_folders(config.args)
    config.option.mutants |= bool(config.option.mutant)
    try:
        _impl.set_default(config.getoption("impl"))
    except _impl.LoadError as error:
        raise pytest.UsageError(f"--impl: {error}") from None
    config.pluginmanager.register(steps.Steps(config), "labs-steps")
    config.pluginmanager.register(isolate.Isolation(config), "labs-isolation")
    scratch = tempfile.TemporaryDirectory(prefix="labs-")
    config.add_cleanup(scratch.cleanup)
    if config.getoption("mutants"):
        mutants.register(config, Path(scratch.name))
    else:
        config.pluginmanager.register(mutants.Diagnosis(Path(scratch.name)), "labs-diagnosis")
        if config.getoption("picture"):
            config.option.forks = 1  # whether a test gets a picture depends on those before it
            config.pluginmanager.register(picture.Pictures(config), "labs-pictures")


def pytest_ignore_collect(collection_path, config):
    """Tests of the machinery and of the curriculum are for authors: --impl=solution runs them."""
    root = _impl.LABS
    for_authors = (root / "_harness" / "tests", root / "test_curriculum.py")
    named = any(str(path) in arg for arg in config.args for path in for_authors)
    stubs_only = config.getoption("expect_unsolved") or config.getoption("mutants")
    if collection_path in for_authors and not named:
        return True if stubs_only or config.getoption("impl") != "solution" else None
    return None


def pytest_report_header(config):
    return [
        f"labs: testing {config.getoption('impl')}, seed {config.getoption('seed')}",
        f"kernels: {runtime.setup().kernels_run_on}",
        f"tests: {isolate.describe(config)}",
    ]


@pytest.fixture
def impl(request) -> str:
    """What is under test: "exercise", "solution", or a path."""
    return request.config.getoption("impl")


@pytest.fixture
def device() -> str:
    """Where tests put their tensors: "cuda" or "cpu"."""
    return runtime.setup().device


@pytest.fixture
def lab(request):
    """The lab's code under test, each call of it under guard. Loaded anew for each test."""
    oracle.seed(request.config.getoption("seed"), request.node.nodeid)
    limits = getattr(request.module, "ROW_LIMITS", {})
    file = _impl.source_file(request.path)
    return guard.Guarded(file, lambda: _impl.load(request.path), limits)
