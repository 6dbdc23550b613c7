"""Whole runs with real processes and sockets. Most start from a forkserver that has torch loaded already."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_cli.config.compose import compose
from diloco_cli.observe.events import Tail, read_jsonl
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


def when(
    path: Path, condition: Callable[[dict[str, Any]], bool], act: Callable[[], object], timeout_s: float = 60.0
) -> threading.Thread:
    """A thread that follows the event tape and acts once, when `condition(record)` holds."""

    def follow() -> None:
        tail = Tail(path / "events.jsonl")
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if any(condition(record) for record in tail.poll()):
                act()
                return
            time.sleep(0.005)
        raise AssertionError("the event did not come")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread


def pid_of(path: Path, process: str) -> int:
    """The pid of a process of a run, of its newest start."""
    return int((path / "alive" / process).read_text())


class Script:
    """What a test does to a run while it runs, in a thread of its own; the run is stopped at its end.

    The body gets this object; `wait` blocks until the event tape has a record for which the condition holds, from where
    the last wait ended.
    """

    def __init__(self, path: Path, body: Callable[[Script], object], timeout_s: float = 60.0) -> None:
        self.path = path
        self._tail = Tail(path / "events.jsonl")
        self._records: list[dict[str, Any]] = []
        self._deadline_s = time.monotonic() + timeout_s
        self._failed: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while not self._over.is_set():
            while self._records:
                record = self._records.pop(0)
                if condition(record):
                    return record
            assert time.monotonic() < self._deadline_s, "the event did not come"
            self._records += self._tail.poll()
            time.sleep(0.005)
        raise AssertionError("the run ended before the event came")

    def wait_for_merge_of(self, island: str) -> dict[str, Any]:
        return self.wait(lambda e: e["event"] == "merge" and island in e["learners"])

    def wait_for_return_of(self, island: str) -> None:
        """Until it has joined again, and something of it was merged since."""
        self.wait(lambda e: e["event"] == "join" and e["learner"] == island)
        self.wait_for_merge_of(island)

    def check(self) -> None:
        """Raise what failed in the thread. The run has ended."""
        self._over.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _run(self, body: Callable[[Script], object]) -> None:
        try:
            body(self)
        except BaseException as failed:
            self._failed = failed
        if not self._over.is_set():
            # run_training() runs in this process's main thread, and has its handler there.
            os.kill(os.getpid(), signal.SIGINT)
