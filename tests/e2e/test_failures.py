"""Runs in which something dies, misbehaves or is stopped. What is checked: who is told what, and what is left."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e_runs import SMALL, assert_tokens_add_up, pid_of, processes_of, when

from diloco_cli.config.compose import compose
from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.observe.events import Tail, read_jsonl
from diloco_cli.run.launcher import run_training

HERE = Path(__file__).parent


@pytest.fixture
def user_models(monkeypatch):
    """user_models.py is importable in the run's processes, as a user's own module in the working folder is."""
    monkeypatch.chdir(HERE)
    return "user_models"


def test_a_killed_learner_delays_nobody_and_the_run_goes_on(run_small, tmp_path):
    path = tmp_path / "run"
    killed_at: list[float] = []

    def kill() -> None:
        os.kill(pid_of(path, "island-2.0"), signal.SIGKILL)
        killed_at.append(time.time())

    thread = when(path, lambda e: e["event"] == "merge" and e["version"] >= 3, kill)
    run = run_small("run.trace_samples=true", "run.steps=400", "islands.count=3", "launcher.max_restarts=0")
    thread.join()
    assert run.error is None
    assert run.summary["status"] == "completed"
    assert run.summary["steps"]["island-0"] == run.summary["steps"]["island-1"] == 400
    (leave,) = [e for e in run.of("leave") if e["learner"] == "island-2"]
    late = [e for e in run.of("merge") if e["time"] > leave["time"]]
    assert late
    assert all("island-2" not in m["learners"] for m in late)
    assert_tokens_add_up(run.summary)
    for island in ("island-0", "island-1"):
        times = [line["time"] for line in read_jsonl(path / "samples" / f"{island}.jsonl")]
        gaps = [(b - a, a) for a, b in itertools.pairwise(times)]
        around = max(g for g, at in gaps if killed_at[0] - 0.1 < at < killed_at[0] + 1.0)
        elsewhere = max(g for g, at in gaps[20:] if not killed_at[0] - 0.1 < at < killed_at[0] + 1.0)
        assert around < elsewhere + 0.05


def test_below_the_quorum_the_run_ends_then_and_there(run_small, tmp_path):
    path = tmp_path / "run"
    thread = when(
        path,
        lambda e: e["event"] == "merge" and e["version"] >= 2,
        lambda: os.kill(pid_of(path, "island-1.0"), signal.SIGKILL),
    )
    run = run_small(
        "islands.count=2",
        "sync.quorum=2",
        "run.steps=100000",
        "sync.heartbeat_timeout=300s",
        "sync.quorum_timeout=0s",
        "launcher.max_restarts=0",
    )
    thread.join()
    assert run.error is not None
    assert run.error.exit_code == 4
    assert run.summary["status"] == "waiting"
    assert "quorum" in str(run.error)
    assert run.error.hint == f"diloco resume {path}"
    (leave,) = [e for e in run.of("leave") if e["learner"] == "island-1"]
    (finish,) = run.of("finish")
    assert finish["time"] - leave["time"] < 0.5
    assert (path / "final" / "model.safetensors").exists()


def test_a_learner_that_cannot_start_shows_its_own_error(run_small, user_models):
    began = time.monotonic()
    run = run_small("model=custom", f"model.entry_point={user_models}:broken_at_the_island", "islands.count=2")
    assert run.error is not None
    assert run.error.exit_code == 1
    assert "left-handed optimizer" in str(run.error)
    assert "island-" in run.error.where
    assert time.monotonic() - began < 30
    assert run.of("restart") == []
    assert run.summary["error"]["what"] == run.error.what
    assert run.summary["error"]["exit_code"] == 1


def test_a_model_that_breaks_everywhere_shows_the_same(run_small, user_models):
    run = run_small("model=custom", f"model.entry_point={user_models}:broken", "islands.count=2")
    assert run.error is not None
    assert run.error.exit_code in (1, 2)
    assert "left-handed optimizer" in str(run.error)


def test_own_model_trains_and_its_buffers_travel(run_small, user_models):
    run = run_small("model=custom", f"model.entry_point={user_models}:well", "islands.count=2", "run.steps=100")
    assert run.error is None
    assert run.summary["loss"]["validation"] < 5.2


def test_nan_contributions_are_refused_and_never_reach_theta(run_small, user_models):
    run = run_small(
        "model=custom",
        f"model.entry_point={user_models}:poisoned",
        "+islands.named.island-1.env={POISON: '1'}",
        "islands.count=2",
        "network.wire_down=float32",
    )
    refused = run.of("refused")
    assert refused
    assert all(e["learner"] == "island-1" and "NaN" in e["reason"] for e in refused)
    assert run.summary["tokens"]["refused"] > 0
    assert_tokens_add_up(run.summary)
    from safetensors.torch import load_file

    tensors = load_file(run.path / "final" / "model.safetensors")
    assert all(t.isfinite().all() for t in tensors.values())


def test_a_hung_learner_is_missed_after_the_heartbeat_timeout(run_small, tmp_path):
    path = tmp_path / "run"
    thread = when(
        path,
        lambda e: e["event"] == "merge" and e["version"] >= 2,
        lambda: os.kill(pid_of(path, "island-0.0"), signal.SIGSTOP),
    )
    run = run_small(
        "islands.count=3",
        "run.steps=600",
        "sync.heartbeat_interval=100ms",
        "sync.heartbeat_timeout=700ms",
        "launcher.max_restarts=0",
    )
    thread.join()
    assert run.error is None
    (leave,) = [e for e in run.of("leave") if e["learner"] == "island-0"]
    (error,) = run.of("error")
    assert "0.7" in leave["reason"] or "0.7" in error["message"]  # whoever of syncer and launcher was first
    assert run.summary["steps"]["island-1"] == 600


def test_a_taken_port_is_an_error_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cfg = compose([*SMALL, f"network.port={port}"], None)
        with pytest.raises(EnvironmentNotReady) as caught:
            run_training(cfg, [], run_dir=tmp_path / "run", quiet=True)
    assert caught.value.exit_code == 3
    assert str(port) in caught.value.what
    assert not (tmp_path / "run").exists()


def test_keys_are_for_the_owner_only(run_small):
    run = run_small("islands.count=1", "run.steps=10")
    assert (run.path / "keys").stat().st_mode & 0o777 == 0o700
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in (run.path / "keys").iterdir())


def start_command(path: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """The installed command itself, with torchrun groups."""
    small = [o for o in SMALL if not o.startswith("launcher")]
    diloco = Path(sys.executable).with_name("diloco")
    return subprocess.Popen(
        [diloco, "train", *small, *overrides, "--run-dir", path, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_merges(path: Path, command: subprocess.Popen[bytes], count: int, timeout_s: float = 90.0) -> None:
    tail = Tail(path / "events.jsonl")
    deadline_s = time.monotonic() + timeout_s
    seen = 0
    while seen < count:
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline_s, "no merges"
        seen += sum(e["event"] == "merge" for e in tail.poll())
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_in_order(tmp_path, number, code):
    path = tmp_path / "run"
    command = start_command(path, "run.steps=1000000", "islands.count=2")
    wait_for_merges(path, command, 3)
    began = time.monotonic()
    command.send_signal(number)
    stdout, stderr = command.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert command.returncode == code
    summary = json.loads(stdout)
    assert summary["status"] == "stopped"
    assert summary["merges"] >= 3
    assert (path / "final" / "model.safetensors").exists()
    assert processes_of(path) == []
    assert b"Traceback" not in stderr


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    path = tmp_path / "run"
    command = start_command(path, "run.steps=1000000", "islands.count=2", "+islands.named.island-0.nproc_per_node=2")
    wait_for_merges(path, command, 1)
    assert len(processes_of(path)) >= 6  # syncer, two agents, three ranks
    command.kill()
    command.communicate()
    deadline_s = time.monotonic() + 10
    while processes_of(path):
        assert time.monotonic() < deadline_s, processes_of(path)
        time.sleep(0.05)
