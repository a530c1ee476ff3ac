"""Fixtures of the machinery's own tests."""

import pytest

from labs._harness.tests.fixture_lab import Repository, Server


@pytest.fixture(scope="session")
def server():
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def repository(tmp_path_factory, server):
    """A copy of the machinery, for labs made by the test: see fixture_lab."""
    return Repository(tmp_path_factory.mktemp("fixture") / "repository", server)
