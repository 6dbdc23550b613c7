"""Snapshots, `diloco resume` and `diloco replay`: the installed commands on small runs with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from e2e_runs import SMALL, assert_tokens_add_up, pid_of, processes_of
from safetensors.torch import load_file

from diloco_cli.config.compose import compose
from diloco_cli.errors import ConfigError
from diloco_cli.observe.events import Tail, read_jsonl
from diloco_cli.run import resume, snapshots

DILOCO = Path(sys.executable).with_name("diloco")


def diloco(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(DILOCO), *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def train(path: Path, *overrides: str) -> subprocess.Popen[str]:
    return diloco("train", *SMALL, *overrides, "--run-dir", path, "--json", "-q")


def ended(command: subprocess.Popen[str], code: int = 0) -> tuple[dict[str, Any], str]:
    """The JSON document and stderr of a command that ends with `code`."""
    stdout, stderr = command.communicate(timeout=100)
    assert command.returncode == code, stderr
    assert "Traceback" not in stderr
    return json.loads(stdout), stderr


def wait_for(path: Path, command: subprocess.Popen[str], event: str, count: int) -> None:
    """Until so many more such events are on the tape; what an earlier part of the run has written does not count."""
    tail = Tail(path / "events.jsonl")
    tail.poll()
    seen = 0
    deadline_s = time.monotonic() + 90
    while seen < count:
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline_s, f"no {event}"
        seen += sum(e["event"] == event for e in tail.poll())
        time.sleep(0.02)


def stop_after(path: Path, command: subprocess.Popen[str], merges: int) -> tuple[dict[str, Any], str]:
    wait_for(path, command, "merge", merges)
    command.send_signal(signal.SIGINT)
    return ended(command, 130)


def digests(path: Path) -> dict[tuple[int, int], str]:
    merges = [e for e in read_jsonl(path / "events.jsonl") if e["event"] == "merge"]
    return {(e["fragment"], e["version"]): e["digest"] for e in merges}


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_a_run_that_was_stopped_twice_and_resumed_has_the_bits_of_one_that_never_was(tmp_path, wire):
    options = ["islands.count=2", "run.steps=150", "run=deterministic", f"network.wire_up={wire}"]
    straight, _ = ended(train(tmp_path / "straight", *options))
    path = tmp_path / "stopped"
    first, stderr = stop_after(path, train(path, *options), 9)
    assert 0 < first["steps"]["island-0"] < 150
    assert "diloco resume" in stderr
    second, stderr = stop_after(path, diloco("resume", path, "--json", "-q"), 15)
    assert first["steps"]["island-0"] < second["steps"]["island-0"] < 150
    last, _ = ended(diloco("resume", path, "--json", "-q"))
    assert last["status"] == "completed"
    assert digests(path) == digests(tmp_path / "straight")
    assert last["tokens"] == straight["tokens"]
    assert last["loss"]["validation"] == straight["loss"]["validation"]
    final = [load_file(p / "final" / "model.safetensors") for p in (path, tmp_path / "straight")]
    assert all(final[0][name].equal(final[1][name]) for name in final[1])
    assert processes_of(path) == []


def test_settings_that_may_change_do_and_the_others_are_refused_with_the_reason(tmp_path):
    path = tmp_path / "run"
    stop_after(path, train(path, "islands.count=2", "run.steps=100000"), 9)
    for override, why in (("model.dim=64", "another model"), ("network=thin", "not a whole group")):
        refused = diloco("resume", path, override)
        _, stderr = refused.communicate(timeout=60)
        assert refused.returncode == 2
        assert why in stderr
    before = json.loads((path / "summary.json").read_text())
    steps = max(before["steps"].values()) + 150
    summary, stderr = ended(
        diloco("resume", path, f"run.steps={steps}", "islands.count=3", "network.bandwidth=50mbps", "--json", "-q")
    )
    assert f"changed: run.steps: 100000 -> {steps}" in stderr
    assert "changed: islands.count: 2 -> 3" in stderr
    assert "changed: network.bandwidth: 3gbps -> 50mbps" in stderr
    assert set(summary["steps"]) == {"island-0", "island-1", "island-2"}
    tape = read_jsonl(path / "events.jsonl")
    assert not [e for e in tape if e["event"] in ("error", "given_up")]
    assert {e["learner"] for e in tape if e["event"] == "return"} == {"island-0", "island-1"}
    assert summary["merges"] > before["merges"]
    assert_tokens_add_up(summary)
    assert (path / "config-1.yaml").exists()
    (resumed,) = [e for e in read_jsonl(path / "events.jsonl") if e["event"] == "resumed"]
    times = [e["time"] for e in read_jsonl(path / "events.jsonl")]
    assert times.index(resumed["time"]) > 9
    assert resumed["time"] >= max(times[: times.index(resumed["time"])]) - 0.5, "the clock goes on"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("data.seq_len=16", "belong to the data"),
        ("data.tokenizer=other.json", "belong to the data"),
        ("sync.fragments=2", "saved layout"),
        ("sync.strategy=strided", "saved layout"),
        ("run.seed=3", "order of the data"),
        ("inner.optimizer=muon", "another kind"),
        ("algorithm=streaming", "middle of what"),
        ("islands.count=3", ""),
        ("network.bandwidth=1gbps", ""),
        ("sync.quorum=2", ""),
        ("run.steps=7", ""),
        ("+islands.named.island-1.speed=0.5", ""),
    ],
)
def test_what_may_change_when_a_run_goes_on(tmp_path, monkeypatch, override, why):
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    found = resume.changes(compose(SMALL, None), compose([*SMALL, override], None))
    assert found
    if not why:
        resume.check_changes(found)
        return
    with pytest.raises(ConfigError) as caught:
        resume.check_changes(found)
    assert why in caught.value.why


def test_a_completed_run_says_so_and_goes_on_with_more_steps(tmp_path):
    path = tmp_path / "run"
    first, _ = ended(train(path, "islands.count=2", "run.steps=40"))
    refused = diloco("resume", path)
    _, stderr = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "reached its 40 steps" in stderr
    assert "run.steps=80" in stderr
    more, _ = ended(diloco("resume", path, "run.steps=80", "--json", "-q"))
    assert more["status"] == "completed"
    assert more["steps"] == {"island-0": 80, "island-1": 80}
    assert more["tokens"]["processed"] == 2 * first["tokens"]["processed"]


def test_a_damaged_snapshot_is_named_and_passed_over_for_the_one_before(tmp_path):
    path = tmp_path / "run"
    options = ["islands.count=2", "run.steps=100000", "run.snapshot_every=step 40", "run.snapshot_keep=3"]
    command = train(path, *options)
    wait_for(path, command, "snapshot", 2)
    command.send_signal(signal.SIGINT)
    ended(command, 130)
    folders = sorted((path / "checkpoints").iterdir(), key=snapshots.step_of)
    assert len(folders) == 3
    newest, before = folders[-1], folders[-2]
    damaged = newest / "islands" / "island-1" / "rank-0.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 4
    damaged.write_bytes(data)
    # What the syncer kept is newer than the snapshot; it is gone too, as on another machine.
    shutil.rmtree(path / "syncer")
    command = diloco("resume", path, "--json", "-q")
    wait_for(path, command, "resumed", 1)
    command.send_signal(signal.SIGINT)
    summary, stderr = ended(command, 130)
    assert f"passed over: {damaged}: its checksum is another one" in stderr
    assert f"from snapshot {before.name}" in stderr
    assert_tokens_add_up(summary)


def test_a_run_that_was_killed_as_a_whole_loses_no_merge(tmp_path):
    """torchrun: with the launcher dies everything, the syncer included, at once. Nobody has time for a snapshot."""
    path = tmp_path / "run"
    command = train(path, "islands.count=2", "run.steps=100000", "run.snapshot_every=step 30", "launcher=torchrun")
    wait_for(path, command, "snapshot", 1)
    wait_for(path, command, "merge", 12)
    command.kill()
    command.communicate()
    deadline_s = time.monotonic() + 10
    while processes_of(path):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    installed: dict[int, int] = {}
    for e in read_jsonl(path / "events.jsonl"):
        if e["event"] == "install":
            installed[e["fragment"]] = max(installed.get(e["fragment"], 0), e["version"])
    command = diloco("resume", path, "--json", "-q")
    wait_for(path, command, "resumed", 1)
    wait_for(path, command, "join", 2)
    wait_for(path, command, "merge", 9)
    command.send_signal(signal.SIGINT)
    summary, stderr = ended(command, 130)
    assert "from the merges that its syncer had kept" in stderr
    lines = read_jsonl(path / "events.jsonl")
    at = next(i for i, e in enumerate(lines) if e["event"] == "resumed")
    after = [e for e in lines[at:] if e["event"] == "merge"]
    for fragment, version in installed.items():
        first = min(e["version"] for e in after if e["fragment"] == fragment)
        assert first > version, "a version that a learner had installed was made once more"
    assert_tokens_add_up(summary)


def test_a_running_run_is_not_resumed(tmp_path):
    path = tmp_path / "run"
    command = train(path, "islands.count=1", "run.steps=100000")
    wait_for(path, command, "merge", 1)
    second = diloco("resume", path)
    _, stderr = second.communicate(timeout=60)
    assert second.returncode == 3
    assert "running already" in stderr
    command.send_signal(signal.SIGINT)
    ended(command, 130)


def test_replay_confirms_every_merge_of_a_run_with_a_killed_syncer_and_finds_what_was_changed(tmp_path):
    path = tmp_path / "run"
    options = ["islands.count=3", "run.steps=400", "sync.record=true", "network.wire_up=int8", "outer.anchor=global"]
    command = train(path, *options)
    wait_for(path, command, "merge", 9)
    os.kill(pid_of(path, "syncer"), signal.SIGKILL)
    summary, _ = ended(command)
    assert summary["restarts"] == 1
    document, _ = ended(diloco("replay", path, "--json"))
    assert document["merges"] == summary["merges"] == len(digests(path))
    # A changed byte in a record, and a changed weight on the tape.
    damaged = path / "record" / "f001" / "v00003.safetensors"
    right = damaged.read_bytes()
    damaged.write_bytes(right[:-3] + bytes([right[-3] ^ 1]) + right[-2:])
    wrong = diloco("replay", path)
    _, stderr = wrong.communicate(timeout=60)
    assert wrong.returncode == 1
    assert "f001/v00003.safetensors" in stderr
    assert "its checksum is another one" in stderr
    damaged.write_bytes(right)
    tape = path / "events.jsonl"
    lines = tape.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"event":"merge"' in line and '"fragment":2' in line)
    changed = json.loads(lines[at])
    changed["weights"][0] += 0.25
    tape.write_text("\n".join([*lines[:at], json.dumps(changed), *lines[at + 1 :]]) + "\n")
    wrong = diloco("replay", path)
    _, stderr = wrong.communicate(timeout=60)
    assert wrong.returncode == 1
    assert f"fragment 2, version {changed['version']}: weights" in stderr


def test_replay_of_a_run_that_kept_nothing_says_how_to(tmp_path):
    path = tmp_path / "run"
    ended(train(path, "islands.count=1", "run.steps=20"))
    refused = diloco("replay", path)
    _, stderr = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "sync.record=true" in stderr
