"""Random kill points: SIGKILL to learners, ranks, supervisors (launcher, torchrun agents) and the syncer of a real run.

    python tests/e2e/kill_points.py --kills 200 --seed 0 [--torchrun]      # as many as asked; CI runs 200

After each kill the run must go on: merges come again within a bound, whatever was hit. A launcher that was killed
takes everything with it, and `diloco resume` goes on. What must hold: a version that any learner has installed is
never made again, no process is left, and the tokens add up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from e2e_runs import SMALL, assert_tokens_add_up, processes_of

from diloco_cli.observe.events import Tail, read_jsonl

DILOCO = Path(sys.executable).with_name("diloco")
OPTIONS = [
    "islands.count=3",
    # Most of a step is sleep, so that what is killed is there again soon, on two cores that other tests share.
    "islands.each.speed=0.1",
    "+islands.named.island-2.nproc_per_node=2",
    "run.steps=10000000",
    "run.snapshot_every=5s",
    "sync.heartbeat_interval=200ms",
    "sync.heartbeat_timeout=3s",
    "launcher.max_restarts=1000",
    "launcher.restart_backoff=50ms",
]
TARGETS = ["learner"] * 5 + ["rank"] * 5 + ["syncer"] * 6 + ["supervisor"] * 2
NO_MERGE_S = 60.0
"""Longest time without any merge, whatever was killed meanwhile; on a busy machine starts take long."""


class KillPoints:
    """One long run, and what is done to it."""

    def __init__(self, path: Path, seed: int, *, torchrun: bool) -> None:
        self.path = path
        self.torchrun = torchrun
        self.chance = random.Random(seed)
        self.hits: Counter[str] = Counter()
        self._tail = Tail(path / "events.jsonl")
        self._merged_s = time.monotonic()
        launcher = ["launcher=torchrun"] if torchrun else []
        self.command = self._start("train", *SMALL, *OPTIONS, *launcher, "--run-dir", str(path))

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [str(DILOCO), *words, "-q"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)

    def run(self, kills: int) -> None:
        """So many kills, then an orderly end."""
        self._wait_for_merges(3)
        while self.hits.total() < kills:
            # Sometimes at once after the one before, sometimes in calm water.
            self._watch(self.chance.choice([0.0, 0.05, 0.3, 1.0, 2.0]) * self.chance.random())
            self._hit(self.chance.choice(TARGETS))
        self._wait_for_merges(3)
        self.command.send_signal(signal.SIGINT)
        _, stderr = self.command.communicate(timeout=60)
        assert self.command.returncode == 130, stderr.decode()
        self.check()

    def _hit(self, target: str) -> None:
        pids = self._pids(target)
        if not pids:
            return
        try:
            os.kill(self.chance.choice(pids), signal.SIGKILL)
        except ProcessLookupError:
            return
        self.hits[target] += 1
        if target == "supervisor":
            self._after_supervisor()

    def _pids(self, target: str) -> list[int]:
        def read(name: str) -> list[int]:
            try:
                return [int((self.path / "alive" / name).read_text())]
            except (OSError, ValueError):
                return []

        if target == "learner":
            return [pid for name in ("island-0.0", "island-1.0") for pid in read(name)]
        if target == "rank":
            return [pid for name in ("island-2.0", "island-2.1") for pid in read(name)]
        if target == "syncer":
            return read("syncer")
        agents = [pid for pid in processes_of(self.path) if b"diloco_cli.run.agent" in _command_line(pid)]
        return [*agents, self.command.pid]

    def _after_supervisor(self) -> None:
        """The launcher takes all with it; an agent only its island."""
        deadline_s = time.monotonic() + 1.0
        while self.command.poll() is None:
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.01)
        assert self.command.stderr is not None
        self.command.stderr.close()
        self._wait_for_no_process()
        self.command = self._start("resume", str(self.path))
        self._wait_for_merges(1)

    def _wait_for_no_process(self) -> None:
        deadline_s = time.monotonic() + 20
        while left := processes_of(self.path):
            assert time.monotonic() < deadline_s, f"left running: {left}"
            time.sleep(0.02)

    def _watch(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while True:
            self._poll()
            if time.monotonic() >= deadline_s:
                return
            time.sleep(min(0.02, max(0.0, deadline_s - time.monotonic())))

    def _poll(self) -> int:
        merges = sum(e["event"] == "merge" for e in self._tail.poll())
        now_s = time.monotonic()
        if merges:
            self._merged_s = now_s
        assert now_s - self._merged_s < NO_MERGE_S, f"no merge for {NO_MERGE_S:g} s"
        if self.command.poll() is not None:
            _, stderr = self.command.communicate()
            raise AssertionError(f"the run ended: {stderr.decode()}")
        return merges

    def _wait_for_merges(self, count: int) -> None:
        while count > 0:
            count -= self._poll()
            time.sleep(0.02)

    def check(self) -> None:
        """No process left, no installed version made again, tokens add up."""
        self._wait_for_no_process()
        installed: set[tuple[int, int]] = set()
        merged: dict[int, int] = {}
        for e in read_jsonl(self.path / "events.jsonl"):
            if e["event"] == "install":
                installed.add((e["fragment"], e["version"]))
            elif e["event"] == "merge":
                made = (e["fragment"], e["version"])
                assert made not in installed, f"{made} was installed, and is made again at {e['time']}"
                merged[e["fragment"]] = max(merged.get(e["fragment"], 0), e["version"])
        for fragment, version in installed:
            assert version <= merged[fragment], f"version {version} of fragment {fragment} is installed, and lost"
        summary = json.loads((self.path / "summary.json").read_text())
        assert_tokens_add_up(summary)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def main() -> None:
    """The long mode."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true", help="islands as users have them; starts take seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        began_s = time.monotonic()
        points = KillPoints(Path(folder).resolve() / "run", args.seed, torchrun=args.torchrun)
        points.run(args.kills)
        print(f"{args.kills} kills in {time.monotonic() - began_s:.0f} s, all went on: {dict(points.hits)}")


if __name__ == "__main__":
    main()
