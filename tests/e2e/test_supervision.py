"""What ended comes back: killed and hung islands, faults on purpose, islands that join and leave a running run."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from e2e_runs import Outcome, Script, assert_tokens_add_up, pid_of

from diloco_cli.errors import ConfigError, DilocoError, EnvironmentNotReady
from diloco_cli.observe.events import read_jsonl
from diloco_cli.run.members import ask
from diloco_cli.run.rundir import RunDir

HERE = Path(__file__).parent
ENDLESS = "run.steps=1000000"
# Silence is noticed at once, so that no test waits for it.
QUICK = ["sync.heartbeat_interval=100ms", "sync.heartbeat_timeout=1500ms", "launcher.restart_backoff=50ms"]


def scripted(run_small, path: Path, body, *overrides: str) -> Outcome:
    """A run without an end of its own, with a script that acts on it and then ends it."""
    script = Script(path, body)
    run = run_small(ENDLESS, *QUICK, *overrides)
    script.check()
    assert run.error is not None
    assert run.summary["status"] == "stopped"
    assert_tokens_add_up(run.summary)
    return run


@pytest.mark.parametrize("process", ["island-2.0", "island-1.1"])
def test_a_killed_island_comes_back_and_so_does_a_hung_one(run_small, tmp_path, process):
    """island-1.1 is one of two ranks: the island is killed and started again as a whole."""
    path = tmp_path / "run"
    island = process.partition(".")[0]
    ended: list[float] = []

    def body(script: Script) -> None:
        script.wait_for_merge_of(island)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before = pid_of(path, process)
            os.kill(before, number)
            ended.append(time.monotonic())
            script.wait_for_return_of(island)
            ended[-1] = time.monotonic() - ended[-1]
            assert pid_of(path, process) != before

    run = scripted(run_small, path, body, "islands.count=3", "+islands.named.island-1.nproc_per_node=2")
    assert run.summary["restarts"] == 2
    killed, hung = run.of("restart")
    assert killed["process"] == hung["process"] == island
    assert "SIGKILL" in killed["reason"]
    assert "no sign of life" in hung["reason"]
    # Something of it was merged in between, so the second end is the first in its row again.
    assert [(e["attempt"], e["delay_s"]) for e in (killed, hung)] == [(1, 0.0), (1, 0.0)]
    assert max(ended) < 15
    others = {"island-0", "island-1", "island-2"} - {island}
    assert not [e for e in run.of("leave") if e["learner"] in others and e["time"] < run.of("finish")[0]["time"]]


def test_what_dies_at_each_start_is_given_up_and_the_run_goes_on(run_small, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    path = tmp_path / "run"

    def body(script: Script) -> None:
        script.wait(lambda e: e["event"] == "given_up")
        script.wait_for_merge_of("island-0")

    run = scripted(
        run_small,
        path,
        body,
        "model=custom",
        "model.entry_point=user_models:killed_at_each_start",
        "islands.count=2",
        "+islands.named.island-1.env={DIES: '1'}",
        "launcher.max_restarts=3",
    )
    restarts = run.of("restart")
    assert [e["attempt"] for e in restarts] == [1, 2, 3]
    assert [e["delay_s"] for e in restarts] == [0.0, 0.05, 0.1]
    (given_up,) = run.of("given_up")
    assert given_up["process"] == "island-1"
    assert "SIGKILL" in given_up["reason"]
    assert run.summary["restarts"] == 3
    times = [e["time"] for e in run.of("error")]
    assert all(later - earlier >= e["delay_s"] for earlier, later, e in zip(times, times[1:], restarts, strict=False))


def test_faults_of_a_schedule_happen_each_at_its_step(run_small, tmp_path):
    path = tmp_path / "run"
    faults = [
        "{at: step 20, kind: slow, island: island-0, factor: 0.3, duration: 1s}",
        "{at: step 20, kind: hang, island: island-1, duration: 300ms}",
        "{at: step 30, kind: disk-full, island: island-2, duration: 500ms}",
        "{at: step 40, kind: crash, island: island-2}",
        "{at: step 60, kind: preempt, island: island-1, duration: 1s}",
    ]

    def body(script: Script) -> None:
        back = set()

        def all_are_over(record: dict) -> bool:
            if record["event"] == "repaired":
                back.add((record["target"], record["kind"]))
            if record["event"] == "repaired" and record["kind"] == "slow":
                enough.append(record["time"] + 2.5)  # until then its usual steps are to be seen, below
            return len(back) == len(faults)

        enough: list[float] = []
        script.wait(all_are_over)
        script.wait_for_merge_of("island-1")
        script.wait(lambda e: e["event"] == "merge" and e["time"] > enough[0])

    overrides = ["islands.count=3", f"failures.events=[{', '.join(faults)}]"]
    run = scripted(run_small, path, body, *overrides)
    applied = {(e["target"], e["kind"]): e["time"] for e in run.of("fault")}
    over = {(e["target"], e["kind"]): e["time"] for e in run.of("repaired")}
    assert run.summary["faults"] == {"crash": 1, "disk-full": 1, "hang": 1, "preempt": 1, "slow": 1}
    assert 1.0 <= over["island-0", "slow"] - applied["island-0", "slow"] < 1.5
    assert 0.3 <= over["island-1", "hang"] - applied["island-1", "hang"] < 0.8
    # The preempted island is not started before its time is over, and neither is an error.
    starts = {e["process"]: e for e in run.of("restart")}
    assert starts.keys() == {"island-1", "island-2"}
    assert over["island-1", "preempt"] - applied["island-1", "preempt"] > 1.0
    assert [e["process"] for e in run.of("error")] == ["island-2"]
    assert run.summary["restarts"] == 2
    # Step times tell the slow island's time from its others.
    lines = [m for m in run.metrics if m["source"] == "island-0" and m.get("step_time_s")]
    since, until = applied["island-0", "slow"], over["island-0", "slow"]
    slow = [m["step_time_s"] for m in lines if since + 0.4 < m["time"] <= until]
    usual = sorted(m["step_time_s"] for m in lines if m["time"] > until + 1.5)
    assert slow
    assert max(slow) > 1.5 * usual[len(usual) // 2]


def test_an_island_joins_a_running_run_and_another_one_leaves(run_small, tmp_path):
    path = tmp_path / "run"
    run_dir = RunDir(path)
    refused: list[DilocoError] = []

    def refuse(command: dict) -> None:
        with pytest.raises(ConfigError if "island" not in command else DilocoError) as caught:
            ask(run_dir, command)
        refused.append(caught.value)

    def body(script: Script) -> None:
        script.wait_for_merge_of("island-1")
        answer = ask(run_dir, {"command": "join", "island": {"speed": 0.7}, "link": {"latency": "1ms"}})
        assert answer == {"ok": True, "island": "island-2", "done": True}
        script.wait_for_merge_of("island-2")
        for command in (
            {"command": "leave", "island": "island-7"},
            {"command": "join", "island": {"spede": 1}},
            {"command": "join", "island": {"speed": "fast"}},
        ):
            refuse(command)
        answer = ask(run_dir, {"command": "leave", "island": "island-0"})
        assert answer == {"ok": True, "island": "island-0", "done": True}
        refuse({"command": "leave", "island": "island-0"})
        refuse({"command": "leave", "island": "island-1"})
        script.wait_for_merge_of("island-2")

    run = scripted(run_small, path, body, "islands.count=2", "sync.quorum=2")
    said = [f"{e.what}; {e.hint}" for e in refused]
    assert [e.exit_code for e in refused] == [2] * 5
    assert "no island 'island-7'" in said[0]
    assert "'spede'" in said[1]
    assert "has left already" in said[3]
    assert "the quorum is 2" in said[4]
    left_s = next(e["time"] for e in run.of("leave") if e["learner"] == "island-0")
    assert all(e["learner"] != "island-0" for e in run.of("contribution") if e["time"] > left_s)
    # A merge that was under way when it left has its contribution in it.
    assert all("island-0" not in e["learners"] for e in run.of("merge") if e["time"] > left_s + 1.0)
    assert run.of("restart") == run.of("error") == []
    assert list((path / "commands").iterdir()) == []
    with pytest.raises(EnvironmentNotReady, match="not running"):
        ask(run_dir, {"command": "leave", "island": "island-1"})
    assert read_jsonl(path / "events.jsonl")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_syncer_comes_back_and_costs_no_learner_its_place(run_small, tmp_path, number):
    path = tmp_path / "run"

    def body(script: Script) -> None:
        script.wait_for_merge_of("island-1")
        before = pid_of(path, "syncer")
        os.kill(before, number)
        script.wait(lambda e: e["event"] == "restart")
        script.wait_for_merge_of("island-0")
        script.wait_for_merge_of("island-1")
        assert pid_of(path, "syncer") != before

    run = scripted(run_small, path, body, "islands.count=2")
    assert [e["process"] for e in run.of("restart")] == ["syncer"]
    assert run.summary["restarts"] == 1
    assert sorted(e["learner"] for e in run.of("join")) == ["island-0", "island-1"]
    versions = [(e["fragment"], e["version"]) for e in run.of("merge")]
    assert len(set(versions)) == len(versions)


def test_faults_of_the_syncer_and_of_links(run_small, tmp_path):
    path = tmp_path / "run"
    faults = [
        "{at: step 10, kind: slow, syncer: true, factor: 0.3, duration: 300ms}",
        "{at: step 20, kind: disk-full, syncer: true, duration: 300ms}",
        "{at: step 30, kind: crash, syncer: true}",
        "{at: step 40, kind: partition, island: island-1, duration: 500ms}",
        "{at: step 50, kind: degrade, island: island-0, duration: 500ms, latency: 50ms, loss: 0.1}",
        "{at: step 60, kind: corrupt, island: island-0}",
    ]

    def body(script: Script) -> None:
        for _ in faults:
            script.wait(lambda e: e["event"] == "fault")
        script.wait(lambda e: e["event"] == "refused" and e["learner"] == "island-0")
        script.wait_for_merge_of("island-0")
        script.wait_for_merge_of("island-1")

    overrides = ["islands.count=2", f"failures.events=[{', '.join(faults)}]"]
    run = scripted(run_small, path, body, *overrides)
    kinds = ["corrupt", "crash", "degrade", "disk-full", "partition", "slow"]
    assert run.summary["faults"] == dict.fromkeys(kinds, 1)
    assert [e["process"] for e in run.of("restart")] == ["syncer"]
    plan = json.loads((path / "failures.json").read_text())["faults"]
    assert [f["kind"] for f in plan] == ["slow", "disk-full", "crash", "partition", "degrade", "corrupt"]


def test_a_full_disk_pauses_snapshots_and_says_so_but_not_training(run_small, tmp_path):
    def body(script: Script) -> None:
        script.wait(lambda e: e["event"] == "snapshot")
        script.wait(lambda e: e["event"] == "fault")
        script.wait(lambda e: e["event"] == "repaired")
        script.wait(lambda e: e["event"] == "snapshot")

    run = scripted(
        run_small,
        tmp_path / "run",
        body,
        "islands.count=2",
        "run.snapshot_every=300ms",
        "failures.events=[{at: step 100, kind: disk-full, syncer: true, duration: 1500ms}]",
    )
    (full,), (free,) = run.of("fault"), run.of("repaired")
    failed = [e for e in run.of("snapshot_failed") if full["time"] < e["time"] < free["time"] + 1.0]
    assert failed
    assert all("File too large" in e["reason"] or "not on the disk" in e["reason"] for e in failed)
    assert all("training goes on" in e["reason"] for e in failed)
    # What could not be written meanwhile was written afterwards, in order: merges went on.
    during = [e for e in run.of("merge") if full["time"] + 0.2 < e["time"] < free["time"]]
    assert len(during) > 3
    assert any("merges are not kept on the disk" in e["message"] for e in run.of("warning"))
    for fragment in range(3):
        versions = [e["version"] for e in run.of("merge") if e["fragment"] == fragment]
        assert versions == list(range(1, len(versions) + 1))


def test_the_third_bad_contribution_in_a_row_takes_an_island_out_until_it_is_restarted(
    run_small, tmp_path, monkeypatch
):
    monkeypatch.chdir(HERE)

    def body(script: Script) -> None:
        script.wait(lambda e: e["event"] == "expelled")
        script.wait(lambda e: e["event"] == "join" and e["learner"] == "island-1")
        script.wait_for_merge_of("island-0")

    run = scripted(
        run_small,
        tmp_path / "run",
        body,
        "islands.count=2",
        "model=custom",
        "model.entry_point=user_models:poisoned",
        "+islands.named.island-1.env={POISON: '1'}",
    )
    rows = [e["in_a_row"] for e in run.of("unhealthy") if e["learner"] == "island-1"]
    assert rows[:3] == [1, 2, 3]
    expelled = run.of("expelled")[0]
    restart = next(e for e in run.of("restart") if e["process"] == "island-1")
    assert restart["time"] >= expelled["time"]
    assert "3 bad contributions in a row" in restart["reason"]
    bad = {e["fragment"] for e in run.of("refused")}
    assert bad
    assert not [e for e in run.of("merge") if "island-1" in e["learners"] and e["fragment"] in bad]
    assert run.summary["tokens"]["refused"] > 0
