"""`diloco simulate RUN`: real runs of the default model and links, predicted from their own step times within 10%."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from e2e_runs import Outcome

from diloco_cli.config.compose import compose
from diloco_cli.errors import ConfigError
from diloco_cli.run.launcher import run_training
from diloco_cli.sim.calibrate import HELD, LIMIT, compare

KINDS = {
    "default": [],
    "an island at half speed": ["+islands.named.island-2.speed=0.5"],
    "links ten times thinner": ["network.bandwidth=300mbps"],
}


def short_run(path: Path, *overrides: str) -> Outcome:
    """The first-run recipe, only shorter, and forked."""
    cfg = compose(["launcher=forkserver", "run.steps=140", "run.eval_sequences=16", *overrides], None)
    return Outcome(path, run_training(cfg, list(overrides), run_dir=path, quiet=True), None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_run_is_predicted(kind: str, tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", *KINDS[kind])
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}
    document = compare(run.path)
    found = {name: document["figures"][name] for name in HELD}
    assert all(abs(row["difference"]) <= LIMIT for row in found.values()), found
    assert document["within"]
    # What is compared is what the run's own summary says.
    assert found["merges"]["measured"] == run.summary["merges"] == len(run.of("merge"))
    assert found["goodput"]["measured"] == run.summary["goodput"]
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*")} == before
    assert json.dumps(compare(run.path)) == json.dumps(document)
    if kind == "default":
        assert_another_protocol_is_not_predicted_as_this_one(run.path)


def assert_another_protocol_is_not_predicted_as_this_one(path: Path) -> None:
    """The prediction follows from the configuration: with twice the H it has half the merges and bytes."""
    config = path / "config.yaml"
    text = config.read_text()
    assert "inner_steps: 24" in text
    config.write_text(text.replace("inner_steps: 24", "inner_steps: 48"))
    document = compare(path)
    assert not document["within"]
    assert -0.65 < document["figures"]["merges"]["difference"] < -0.35
    assert document["figures"]["bytes_up"]["difference"] < -0.25


def test_lock_step_is_predicted(run_small) -> None:
    run = run_small("algorithm=streaming", "islands.count=3", "run.steps=100")
    figures = compare(run.path)["figures"]
    assert figures["merges"]["difference"] == pytest.approx(0, abs=0.05)
    assert figures["members_per_merge"]["predicted"]["mean"] == figures["members_per_merge"]["measured"] == 3
    # What an install overwrites is known exactly: tau steps of each cut.
    assert figures["late_share"]["difference"] == pytest.approx(0, abs=1e-6)


def test_what_is_no_finished_run_is_refused(run_small, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config\.yaml"):
        compare(tmp_path)
    run = run_small("islands.count=2", "run.steps=20")
    cases = {
        "summary.json": ("{", "cannot be read"),
        "events.jsonl": ('{"event": "merge", "fragment": "x"}\n', "make no sense"),
        "config.yaml": ("islands: {count: -3", "config.yaml"),
    }
    for name, (text, said) in cases.items():
        broken = tmp_path / f"broken-{name}"
        shutil.copytree(run.path, broken)
        (broken / name).write_text(text)
        with pytest.raises(ConfigError) as refused:
            compare(broken)
        assert said in str(refused.value.as_dict())
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run.path, unfinished)
    (unfinished / "summary.json").unlink()
    with pytest.raises(ConfigError) as refused:
        compare(unfinished)
    assert "has not ended" in refused.value.hint
    (unfinished / "summary.json").write_text(json.dumps({**run.summary, "status": "stopped"}))
    with pytest.raises(ConfigError, match="did not reach its target: stopped"):
        compare(unfinished)
