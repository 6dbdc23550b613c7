"""The chaos recipe beside the same run without failures, and random kill points: nothing stops the run."""

from __future__ import annotations

import pytest
from e2e_runs import Outcome, assert_tokens_add_up, processes_of
from kill_points import KillPoints

from diloco_cli.config.compose import compose
from diloco_cli.core import faults
from diloco_cli.observe.events import read_jsonl
from diloco_cli.run.launcher import run_training


def run(path, *overrides: str) -> Outcome:
    cfg = compose(["launcher=forkserver", *overrides], "chaos")
    return Outcome(path, run_training(cfg, list(overrides), run_dir=path, quiet=True), None)


@pytest.mark.timeout(900)
def test_chaos_ends_by_itself_within_three_percent_of_a_calm_run(tmp_path):
    chaos = run(tmp_path / "chaos")
    assert processes_of(tmp_path / "chaos") == []
    calm = run(tmp_path / "calm", "failures.events=[]")
    summary = chaos.summary
    assert summary["status"] == "completed"
    assert sum(summary["faults"].values()) >= 25
    assert set(summary["faults"]) == set(faults.KINDS)
    assert len(chaos.of("fault")) == sum(summary["faults"].values())
    assert max(summary["steps"].values()) == 1000
    assert 0.0 < summary["goodput"] < calm.summary["goodput"]
    assert summary["uptime"] == pytest.approx(1.0, abs=1e-6)
    assert_tokens_add_up(summary)
    lines = read_jsonl(tmp_path / "chaos" / "metrics.jsonl")
    for line in (line for line in lines if line["source"] == "syncer"):
        account = line["tokens"]
        assert account["processed"] == sum(v for k, v in account.items() if k != "processed")
    # The syncer's crashes lost no version, and made none twice.
    for fragment in range(4):
        versions = [e["version"] for e in chaos.of("merge") if e["fragment"] == fragment]
        assert versions == list(range(1, len(versions) + 1))
    assert summary["restarts"] >= 10
    assert summary["loss"]["validation"] < 1.03 * calm.summary["loss"]["validation"]


@pytest.mark.timeout(1500)
def test_two_hundred_random_kills(tmp_path):
    points = KillPoints(tmp_path / "run", seed=11, torchrun=False)
    points.run(200)
    assert min(points.hits[t] for t in ("learner", "rank", "syncer", "supervisor")) > 5
