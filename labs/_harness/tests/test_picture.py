"""pytest --picture: what a failure says, what is drawn, and what stays undrawn."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labs._harness import oracle, picture

image = pytest.importorskip("matplotlib.image")

TESTS = """
import pytest
import torch

from labs._harness import oracle

STEPS = {1: "shift", 2: "times"}


def check(lab, got_from):
    x = oracle.inputs(2, 1, 40, 8)
    got = lab.shift(x)
    got_from(got, x)


def compare(got, x):
    oracle.Expected("y", x.double() + 90, 1e-4, torch.float32, "BHTD", {"T": 16}).check(got)


@pytest.mark.step(1)
@pytest.mark.parametrize("n", [1, 2])
def test_first(lab, n):
    check(lab, compare)


@pytest.mark.step(1)
def test_second(lab):
    check(lab, compare)


@pytest.mark.step(1)
def test_third(lab):
    check(lab, compare)


@pytest.mark.step(1)
def test_fourth(lab):
    check(lab, compare)


@pytest.mark.step(1)
def test_of_a_number(lab):
    oracle.Expected("z", torch.tensor(1.0).double(), 0.1, torch.float32).check(torch.tensor(2.0))


@pytest.mark.step(1)
def test_of_a_shape(lab):
    check(lab, lambda got, x: compare(got[0], x))
"""
WRONG = """
    x = x + 90
    x[1, :, 20:] += 1e-3
    x[1, 0, 30, 4] = float("nan")
    return x
"""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the copy's tests run in forks")


@pytest.fixture
def wrong(repository):
    from labs._harness.tests.fixture_lab import source

    repository.labs(first_90=source(90, WRONG))
    repository.write("labs/90_first/test_lab.py", TESTS)
    for old in (repository.root / "runs").glob("pictures/*"):
        old.unlink()
    return repository


def pictures(repository):
    return sorted(p.name for p in (repository.root / "runs" / "pictures").glob("*"))


@on_linux
def test_failures_name_their_pictures(wrong):
    run = wrong.pytest("--picture", "-v")
    assert pictures(wrong) == [f"90-exercise-step1-{n}.png" for n in (1, 2, 3)]
    lines = [line.strip() for line in run.lines if line.strip().startswith("picture: ")]
    assert lines == [f"picture: runs/pictures/{name}" for name in pictures(wrong)]
    shown = run.failures()
    for test, number in (("test_first[1]", 1), ("test_second", 2), ("test_third", 3)):
        file = f"runs/pictures/{pictures(wrong)[number - 1]}"
        assert shown[f"90_first {test}"][-1] == f"  picture: {file}"
    for test in ("test_first[2]", "test_fourth", "test_of_a_number", "test_of_a_shape"):
        assert "picture" not in "\n".join(shown[f"90_first {test}"])
    for name in pictures(wrong):
        assert image.imread(wrong.root / "runs" / "pictures" / name)[..., :3].std() > 0.1


def test_old_pictures_of_the_same_code_go_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "FOLDER", tmp_path)
    monkeypatch.setattr(picture, "default_impl", lambda: "mine/submission.py")
    other = ["06-exercise-step1-1.png", "06-solution-step1-1.png"]
    for name in ("06-submission-step1-1.png", "06-submission-step5-3.png", *other):
        (tmp_path / name).touch()
    picture.Pictures(SimpleNamespace(workerinput={}))  # a worker of xdist leaves all
    assert len(list(tmp_path.iterdir())) == 4
    picture.Pictures(SimpleNamespace())
    assert sorted(p.name for p in tmp_path.iterdir()) == other


@on_linux
def test_a_worker_of_xdist_keeps_what_others_drew(wrong):
    run = wrong.pytest("--picture", "-n", "1", "-v", "-k", "test_second or test_third")
    assert pictures(wrong) == ["90-exercise-step1-1.png", "90-exercise-step1-2.png"]
    assert sum("picture: " in line for line in run.lines) == 2


def test_a_step_has_three_pictures_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "FOLDER", tmp_path / "pictures")
    files = [picture._next_free("90-exercise-step1") for _ in range(5)]
    assert [f and f.name[-5:] for f in files] == ["1.png", "2.png", "3.png", None, None]


@on_linux
def test_nothing_is_drawn_unasked(wrong):
    run = wrong.pytest("-k", "test_second")
    assert run.code == 1
    assert "picture" not in run.out
    assert pictures(wrong) == []


# ---------------------------------------------------------------- the map itself


def drawn(expected, got, tmp_path) -> Path:
    from labs._harness import draw

    file = draw.error_map(tmp_path / "map.png", expected, got, "test_of_mine[1]")
    assert image.imread(file)[..., :3].std() > 0.05
    return file


def colour_in(file, colour) -> float:
    """The share of a picture's pixels that have a colour."""
    pixels = (image.imread(file)[..., :3] * 255).round().astype(int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((abs(pixels - wanted).max(axis=-1) <= 1).mean())


def attention(T=33, D=8):
    torch.manual_seed(0)
    q, k, v = oracle.qkv(1, 2, T, D)
    out, lse = oracle.attention(q, k, v, True, tiles=(7, 11))
    return out, lse, out.value.float(), lse.value.float()


def test_error_map_is_grey_where_right_and_has_nan_in_its_own_colour(tmp_path):
    from labs._harness import draw

    out, _, got, _ = attention()
    got[0, 1, 11:] += 1e-3
    before = drawn(out, got, tmp_path)
    grey, orange = colour_in(before, "#EDEDED"), colour_in(before, draw.VERMILION)
    assert grey > 0.1
    assert orange == 0
    got[0, 1, 22:] = math.nan
    after = drawn(out, got, tmp_path)
    assert colour_in(after, "#EDEDED") == pytest.approx(grey, rel=0.1)
    assert colour_in(after, draw.VERMILION) > 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e30])
def test_error_map_of_one_value_throughout(value, tmp_path):
    out, _, got, _ = attention()
    drawn(out, torch.full_like(got, value), tmp_path)


def test_error_map_of_rows(tmp_path):
    _, lse, _, got = attention()
    got[0, 0, 20:] += 1e-2
    got[0, 0, 25] = math.nan
    drawn(lse, got, tmp_path)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 37), (1, 1, 1, 1), (2, 300, 3)])
def test_error_map_of_any_shape(shape, tmp_path):
    axes = {1: "R", 2: "RC", 3: "", 4: "BHTD"}[len(shape)]
    value = torch.zeros(shape, dtype=torch.float64)
    expected = oracle.Expected("y", value, 0.0, torch.float32, axes)
    drawn(expected, torch.rand(shape), tmp_path)


def test_pictures_folder_is_one_that_git_ignores():
    assert picture.FOLDER.parts[-2:] == ("runs", "pictures")
