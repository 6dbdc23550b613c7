"""Fixtures of the whole-run tests."""

from __future__ import annotations

import pytest
from e2e_runs import start_small


@pytest.fixture
def run_small(tmp_path):
    """start_small in a folder of the test's own; `name` tells several runs of one test apart."""
    return lambda *overrides, name="run": start_small(tmp_path / name, *overrides)
