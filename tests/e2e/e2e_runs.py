"""Whole runs with real processes and sockets. Most start from a forkserver that has torch loaded already."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from diloco_cli.config.compose import compose
from diloco_cli.observe.events import read_jsonl
from diloco_cli.run.launcher import RunFailed, run_training

# Small enough that a run is mostly protocol: 4 learners take some 200 steps a second together.
SMALL = [
    "launcher=forkserver",
    "model.dim=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=64",
    "data.seq_len=32",
    "islands.each.batch=4",
    "run.eval_sequences=32",
    "sync.fragments=3",
    "sync.min_fragment_bytes=4KiB",
    "sync.inner_steps=10",
    "sync.overlap_steps=4",
    "network.latency=2ms",
    "run.steps=60",
    "inner.warmup_steps=5",
    "logging.interval=0.2s",
]


class Outcome:
    """A finished run: its summary, files and error."""

    def __init__(self, path: Path, summary: dict[str, Any], error: RunFailed | None) -> None:
        self.path = path
        self.summary = summary
        self.error = error
        self.events = read_jsonl(path / "events.jsonl")
        self.metrics = read_jsonl(path / "metrics.jsonl")

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


def start_small(path: Path, *overrides: str) -> Outcome:
    """A run of SMALL settings plus overrides, to its end. No process of it may be left."""
    cfg = compose([*SMALL, *overrides], None)
    error = None
    try:
        summary = run_training(cfg, list(overrides), run_dir=path, quiet=True)
    except RunFailed as failed:
        error, summary = failed, failed.summary
    assert processes_of(path) == []
    assert json.loads((path / "summary.json").read_text()) == summary
    return Outcome(path, summary, error)


def processes_of(run: Path) -> list[int]:
    """Processes (not this one) that have a file of the run's folder open, as every process of a run has its log."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            links = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith(f"{run}{os.sep}") for link in links):
            found.append(int(entry.name))
    return found


def assert_tokens_add_up(summary: dict[str, Any]) -> None:
    tokens = summary["tokens"]
    assert tokens["processed"] == sum(tokens[k] for k in ("merged", "late", "refused", "lost", "pending")), tokens
