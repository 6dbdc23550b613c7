"""`diloco train` as typed: a sweep of real runs, and ends that are not a success."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DILOCO = str(Path(sys.executable).parent / "diloco")
QUICK = ["launcher=forkserver", "islands.count=1", "run.steps=4", "run.eval_sequences=4", "sync.inner_steps=2"]


def diloco(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.run(
        [DILOCO, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """A small text, so that the run's time is not spent on reading one."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(30):
        (folder / f"{index}.txt").write_text(f"{index} the quick brown fox jumps over the lazy dog. " * 60)
    return ["data=text", f"data.path={folder}", "data.seq_len=32"]


@pytest.mark.e2e
def test_a_sweep_is_one_run_after_the_other(tmp_path: Path, text: list[str]) -> None:
    here = tmp_path / "work"
    here.mkdir()
    done = diloco("train", "-m", "--json", "--quiet", *QUICK, *text, "run.seed=1,2", cwd=here)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [r["status"] for r in results] == ["completed", "completed"]
    assert [r["overrides"][-1] for r in results] == ["run.seed=1", "run.seed=2"]
    (folder,) = (here / "multirun").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["0", "1"]
    assert os.listdir(here) == ["multirun"]
    for index, seed in enumerate((1, 2)):
        written = yaml.safe_load((folder / str(index) / "config.yaml").read_text())
        assert written["run"]["seed"] == seed
        assert (folder / str(index) / "summary.json").is_file()


def test_a_taken_port_is_3_and_leaves_no_folder(tmp_path: Path, text: list[str]) -> None:
    here = tmp_path / "work"
    here.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = diloco("train", "--json", "--quiet", *QUICK, *text, f"network.port={port}", cwd=here)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"]["exit_code"] == 3
    assert str(port) in done.stderr
    assert os.listdir(here) == []
