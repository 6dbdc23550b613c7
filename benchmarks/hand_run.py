"""A run started by hand, for benchmarks that need to look inside a learner: the real syncer process, and learner
processes that are this program's own classes with timing around them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run_by_hand(script: str, overrides: list[str]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Start a syncer, and `script --worker RUN ISLAND` for every island.

    Returns:
        What each worker printed (one JSON value), in the order of the islands, and the event tape.
    """
    from diloco_cli.config.compose import compose
    from diloco_cli.observe.events import read_jsonl
    from diloco_cli.run import rundir
    from diloco_cli.run.children import CHILD_ENVIRONMENT, Children
    from diloco_cli.run.credentials import SYNCER, issue, make_authority
    from diloco_cli.run.launcher import listening_socket

    os.environ.update(CHILD_ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parent)})
    cfg = compose(overrides, None)
    with tempfile.TemporaryDirectory() as folder, listening_socket(cfg) as listening:
        run = rundir.create(cfg, overrides, Path(folder) / "run")
        make_authority(run.keys)
        for name in (SYNCER, *cfg.island_names()):
            issue(run.keys, name)
        host, port = listening.getsockname()[:2]
        address = {"host": host, "port": port, "started_monotonic_s": time.monotonic()}
        rundir.write_json(run.path / "syncer.json", address)
        children = Children(run, cfg, listening)
        syncer = children.start_syncer()
        workers = [
            subprocess.Popen([sys.executable, script, "--worker", str(run.path), name], stdout=subprocess.PIPE)
            for name in cfg.island_names()
        ]
        said = [json.loads(worker.communicate()[0]) for worker in workers]
        while syncer.poll() is None:
            time.sleep(0.05)
        children.close()
        return said, read_jsonl(run.events)
