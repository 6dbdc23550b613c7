"""Groups and faults on small real processes: what each fault does to them, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.core.faults import Fault
from diloco_cli.run.children import CHILD_ENVIRONMENT, _PopenChild
from diloco_cli.run.groups import Group
from diloco_cli.run.injector import Injector
from diloco_cli.run.process import PARENT
from diloco_cli.run.rundir import RunDir
from diloco_cli.run.supervisor import End, Pulse, Supervised

# Each rank beats, counts (so that its CPU time and its output tell that it runs), and leaves in order on SIGTERM.
BODY = """
import os, signal, subprocess, sys, time
from pathlib import Path
from diloco_cli.run import process
from diloco_cli.run.rundir import RunDir
run, name, ranks = RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
process.die_with_parent()
def rank(index):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    process.beat(run, f"{name}.{index}", 0.05)
    out = os.open(run.path / f"{name}.{index}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        for _ in range(20000):
            pass
        try:
            os.write(out, b".")
        except OSError:
            pass
pids = []
for index in range(1, ranks):
    if (pid := os.fork()) == 0:
        process.die_with_parent(os.getppid())
        rank(index)
    pids.append(pid)
rank(0)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    for name in ("alive", "logs"):
        (tmp_path / name).mkdir()
    return run


@pytest.fixture
def make(run: RunDir) -> Iterator[Callable[..., Group]]:
    groups = []

    def start(name: str, ranks: int) -> _PopenChild:
        with open(run.log(name), "ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-c", BODY, str(run.path), name, str(ranks)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **CHILD_ENVIRONMENT, PARENT: str(os.getpid())},
            )
        return _PopenChild(name, popen)

    def make(name: str = "island-0", ranks: int = 1, timeout_s: float = 1.0) -> Group:
        policy, pulse = Supervised(5, 0.05), Pulse(timeout_s, 30.0)
        processes = [f"{name}.{r}" for r in range(ranks)]
        group = Group(name, run, lambda: start(name, ranks), processes, policy, pulse)
        groups.append(group)
        group.start()
        until(lambda: group.is_up)
        group.joined = True
        return group

    yield make
    for group in groups:
        for pid in group.pids():
            os.kill(pid, signal.SIGCONT)
        group.end_now()


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)
    return found


def end_of(group: Group) -> End:
    return until(lambda: group.poll(time.monotonic()))


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Bench:
    """An injector with what it told."""

    def __init__(self, *faults: Fault, groups: list[Group]) -> None:
        self.told: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.began_s = time.monotonic()
        self.injector = Injector(
            faults,
            {group.name: group for group in groups},
            self.told.append,
            lambda event, data: self.events.append((event, data)),
            stop_timeout_s=5.0,
        )

    def poll(self, step: int = 0) -> None:
        self.injector.poll(time.monotonic() - self.began_s, step)

    def names(self) -> list[tuple[str, str]]:
        return [(event, data["kind"]) for event, data in self.events]


def test_crash_kills_a_rank_and_with_it_the_group_which_stays_away_for_the_duration(make):
    group = make(ranks=2)
    pids = group.pids()
    bench = Bench(Fault(kind="crash", target="island-0", at_step=5, rank=1, duration_s=0.5), groups=[group])
    bench.poll(step=4)
    assert bench.events == []
    bench.poll(step=5)
    until(lambda: state(pids[1]) in "ZX")
    group.kill("one rank has died")
    end = end_of(group)
    assert end.code == -signal.SIGKILL
    assert not end.own
    assert group.policy.ended(time.monotonic(), end)
    assert group.policy.due_s is not None
    assert 0.2 < group.policy.due_s - time.monotonic() <= 0.5
    bench.poll()
    assert bench.names() == [("fault", "crash")]
    group.start()
    until(lambda: group.is_up)
    group.joined = True
    bench.poll()
    assert bench.names() == [("fault", "crash"), ("repaired", "crash")]
    assert not set(group.pids()) & set(pids)


def test_a_hung_rank_of_several_is_found_and_a_short_hang_is_over_by_itself(make):
    group = make(ranks=2, timeout_s=1.0)
    bench = Bench(Fault(kind="hang", target="island-0", at_s=0.0, rank=0, duration_s=0.2), groups=[group])
    bench.poll()
    pid = group.pids(0)[0]
    until(lambda: state(pid) == "T")
    assert group.poll(time.monotonic()) is None
    until(lambda: bench.poll() or state(pid) != "T")
    assert bench.names() == [("fault", "hang"), ("repaired", "hang")]
    hang = Bench(Fault(kind="hang", target="island-0", at_s=0.0, rank=1), groups=[group])
    began_s = time.monotonic()
    hang.poll()
    end = end_of(group)
    # From the last beat that was seen, which was a little before.
    assert 0.5 < time.monotonic() - began_s < 4.0
    assert end.error is not None
    assert end.error.what == "island-0.1: no sign of life for 1 s"


def test_slow_leaves_a_share_of_the_time_and_then_all_of_it(make):
    group = make(timeout_s=10.0)
    bench = Bench(Fault(kind="slow", target="island-0", at_s=0.0, factor=0.2, duration_s=60.0), groups=[group])
    pid = group.pids()[0]

    def share() -> float:
        before_cpu, before_s = cpu_s(pid), time.monotonic()
        time.sleep(0.6)  # measures a rate: there is nothing to wait for
        return (cpu_s(pid) - before_cpu) / (time.monotonic() - before_s)

    usual = share()
    bench.poll()
    assert share() < 0.5 * usual
    bench.injector.close()
    assert state(pid) in "RS"
    assert share() > 0.6 * usual


def test_with_a_full_disk_writes_fail_and_later_succeed_again(make, run):
    group = make()
    out = run.path / "island-0.0.out"
    bench = Bench(Fault(kind="disk-full", target="island-0", at_s=0.0, duration_s=0.4), groups=[group])
    until(lambda: out.stat().st_size)
    bench.poll()
    cpu = cpu_s(group.pids()[0])
    size = out.stat().st_size
    until(lambda: cpu_s(group.pids()[0]) > cpu + 0.1)
    assert out.stat().st_size == size
    assert group.poll(time.monotonic()) is None
    until(lambda: bench.poll() or bench.names()[-1] == ("repaired", "disk-full"))
    until(lambda: out.stat().st_size > size)


def test_preempt_ends_it_in_order_and_is_no_error(make):
    group = make(ranks=2)
    bench = Bench(Fault(kind="preempt", target="island-0", at_s=0.0, duration_s=3.0), groups=[group])
    bench.poll()
    end = end_of(group)
    assert (end.code, end.error) == (0, None)
    assert group.asked
    assert group.policy.ended(time.monotonic(), end, asked=True)
    assert group.policy.due_s is not None
    assert group.policy.due_s - time.monotonic() > 1.0


def test_links_are_the_syncers_and_a_new_syncer_hears_what_is_left(make):
    island, syncer = make(), make("syncer")
    faults = [
        Fault(kind="partition", target="island-0", at_s=0.0, duration_s=60.0),
        Fault(kind="degrade", target="island-0", at_s=0.0, duration_s=0.0, rate_bps=1e6, latency_s=0.1, loss=0.2),
        Fault(kind="corrupt", target="island-0", at_s=0.0, payload="bytes"),
    ]
    bench = Bench(*faults, groups=[island, syncer])
    island.joined = False
    bench.poll()
    assert bench.told == []
    island.joined = True
    bench.poll()
    assert [t["kind"] for t in bench.told] == ["partition", "degrade", "corrupt"]
    assert bench.told[1] == {
        "event": "fault",
        "island": "island-0",
        "kind": "degrade",
        "duration_s": 0.0,
        "rate_bps": 1e6,
        "latency_s": 0.1,
        "loss": 0.2,
    }
    assert bench.told[2]["payload"] == "bytes"
    bench.poll()
    assert bench.names()[3:] == [("repaired", "degrade")]
    bench.told.clear()
    bench.injector.syncer_restarted(10.0)
    (left,) = bench.told
    assert (left["kind"], left["duration_s"]) == ("partition", pytest.approx(50.0, abs=1.0))


def test_a_fault_waits_until_its_target_runs_and_keeps_its_turn(make):
    group = make()
    bench = Bench(
        Fault(kind="crash", target="island-0", at_s=0.0),
        Fault(kind="hang", target="island-0", at_s=0.0, duration_s=0.0),
        groups=[group],
    )
    bench.poll()
    bench.poll()
    assert bench.names() == [("fault", "crash")]
    assert group.policy.ended(time.monotonic(), end_of(group))
    bench.poll()
    group.start()
    bench.poll()
    assert bench.names() == [("fault", "crash")]
    until(lambda: bench.poll() or ("fault", "hang") in bench.names())
    assert bench.injector.counts == {"crash": 1, "hang": 1}


def test_an_error_file_of_an_earlier_start_says_nothing_of_this_one(make, run):
    group = make()
    run.error("island-0.0").write_text('{"what": "old"}')
    os.kill(group.pids()[0], signal.SIGKILL)
    end_of(group)
    group.start()
    assert not run.error("island-0.0").exists()
    until(lambda: group.is_up)
    group.ask_to_end(5.0)
    assert end_of(group).code == 0


def test_what_does_not_end_when_it_is_asked_to_is_killed(make):
    group = make(timeout_s=30.0)
    os.kill(group.pids()[0], signal.SIGSTOP)
    group.ask_to_end(0.2)
    end = end_of(group)
    assert end.code == -signal.SIGKILL
