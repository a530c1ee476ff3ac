"""`pytest --picture`: an error map of a failed comparison, beside the text that says what is wrong.

Matplotlib is imported only once there is something to draw.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from labs._harness import oracle, steps
from labs._impl import ROOT, default_impl

FOLDER = ROOT / "runs" / "pictures"
MOST = 3  # pictures of one step: of the first failing case of each test


class Pictures:
    """The pytest plugin behind --picture."""

    def __init__(self, config: pytest.Config):
        self.seen: set[tuple] = set()  # (lab, step, test) that has failed before
        impl = default_impl()
        self.impl = impl if impl in ("exercise", "solution") else Path(impl).stem
        if not hasattr(config, "workerinput"):  # once, not in each of pytest-xdist's workers
            for old in FOLDER.glob(f"*-{self.impl}-step*.png"):
                old.unlink()

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        report = outcome.get_result()
        error = call.excinfo.value if call.excinfo else None
        if not isinstance(error, oracle.Mismatch) or error.expected is None:
            return
        lab, marker = steps.lab_of(item.path), item.get_closest_marker("step")
        if lab is None or marker is None or not isinstance(report.longrepr, str):
            return
        step = marker.args[0]
        drawable = isinstance(error.got, torch.Tensor) and error.got.dim()
        if drawable and (lab, step, item.originalname) not in self.seen:
            line = self.draw(f"{lab[:2]}-{self.impl}-step{step}", item.name, error)
            if line:
                report.longrepr += f"\n  {line}"

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if report.failed and "step" in properties:
            test = re.sub(r"\[.*", "", report.nodeid.split("::")[-1], flags=re.DOTALL)
            self.seen.add((properties["lab"], properties["step"], test))
            if "\n  picture: " in str(report.longrepr):
                from labs._harness import draw  # noqa: F401  once here, not in each test's fork

    def draw(self, stem: str, test: str, mismatch: oracle.Mismatch) -> str | None:
        """Draws one error map and says where it is; None where the step has its pictures."""
        file = _next_free(stem)
        if file is None:
            return None
        try:
            from labs._harness import draw

            draw.error_map(file, mismatch.expected, mismatch.got, test)
        except Exception as error:  # a picture is a help: its own fault must not hide the failure
            file.unlink()
            return f"no picture: {type(error).__name__}: {error}"
        return f"picture: {os.path.relpath(file)}"


def _next_free(stem: str) -> Path | None:
    """A file that no other worker has: made empty at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in range(1, MOST + 1):
        file = FOLDER / f"{stem}-{number}.png"
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            continue
        return file
    return None
