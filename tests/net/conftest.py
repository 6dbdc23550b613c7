"""A run's certificates, and a listener with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_helpers import Server, wait_until

from diloco_cli.run import credentials


@pytest.fixture(scope="session")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "keys"
    credentials.make_authority(folder)
    for name in ("syncer", "island-0", "island-1"):
        credentials.issue(folder, name)
    return folder


@pytest.fixture
def server(keys) -> Iterator[Server]:
    before = threading.active_count()
    made = Server(keys)
    yield made
    made.close()
    wait_until(lambda: threading.active_count() <= before)
