"""Runs that go well, of every shape that the configuration offers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from e2e_runs import assert_tokens_add_up

from diloco_cli.observe.events import read_jsonl
from diloco_cli.train.export import evaluate_run


def test_four_learners_train_merge_and_leave_everything_behind(run_small):
    run = run_small()
    summary = run.summary
    assert run.error is None
    assert summary["status"] == "completed"
    assert summary["steps"] == {f"island-{i}": 60 for i in range(4)}
    assert summary["tokens"]["processed"] == 4 * 60 * 4 * 32
    assert_tokens_add_up(summary)
    assert summary["tokens"]["pending"] == 0
    merges = run.of("merge")
    assert summary["merges"] == len(merges) >= 3 * (60 // 10 - 1)
    for fragment in range(3):
        versions = [m["version"] for m in merges if m["fragment"] == fragment]
        assert versions == list(range(1, len(versions) + 1))
    assert all(math.isclose(sum(m["weights"]), 1.0) and m["digest"] for m in merges)
    assert {m["source"] for m in run.metrics} == {*summary["steps"], "syncer"}
    assert summary["loss"]["validation"] < 5.0 < math.log(256)
    for name in ("config.yaml", "overrides.yaml", "environment.json", "logs/syncer.log", "final/model.safetensors"):
        assert (run.path / name).stat().st_size > 0


def test_final_parameters_evaluate_to_the_loss_in_the_summary(run_small):
    run = run_small("islands.count=2", "network.wire_down=float32")
    again = evaluate_run(run.path, 32)
    assert again["loss"]["validation"] == pytest.approx(run.summary["loss"]["validation"], rel=1e-4)
    assert again["loss"]["bigram"] == pytest.approx(run.summary["loss"]["bigram"], rel=1e-9)


def test_install_follows_every_merge_at_every_learner(run_small):
    run = run_small("islands.count=3")
    installed = Counter((e["fragment"], e["version"]) for e in run.of("install"))
    final = {f: max(m["version"] for m in run.of("merge") if m["fragment"] == f) for f in range(3)}
    assert all(installed[(f, v)] == 3 for f, v in final.items())


def test_two_ranks_in_one_island_are_one_learner(run_small):
    run = run_small("islands.count=2", "+islands.named.island-1.nproc_per_node=2", "run.trace_samples=true")
    assert run.summary["steps"] == {"island-0": 60, "island-1": 60}
    assert run.summary["tokens"]["processed"] == 2 * 60 * 4 * 32
    assert_tokens_add_up(run.summary)
    seen = {}
    for island, ranks in (("island-0", 1), ("island-1", 2)):
        lines = read_jsonl(run.path / "samples" / f"{island}.jsonl")
        assert {line["rank"] for line in lines} == set(range(ranks))
        assert len(lines) == 60 * ranks
        ids = [i for line in lines for i in line["ids"]]
        assert len(ids) == len(set(ids)) == 60 * 4
        seen[island] = set(ids)
    assert not seen["island-0"] & seen["island-1"]


def test_fsdp_island_beside_a_plain_one(run_small):
    run = run_small("islands.count=2", "+islands.named.island-0={nproc_per_node: 2, parallel: fsdp}", "sync.quorum=2")
    assert run.summary["status"] == "completed"
    assert run.summary["steps"] == {"island-0": 60, "island-1": 60}
    assert any(m["learners"] == ["island-0", "island-1"] for m in run.of("merge"))
    assert run.summary["loss"]["validation"] < 5.0


def test_a_slow_island_slows_nobody_and_takes_part(run_small):
    run = run_small("islands.count=3", "+islands.named.island-2.speed=0.1", "run.steps=600", "run.finish_wait=4s")
    steps = run.summary["steps"]
    assert steps["island-0"] == steps["island-1"] == 600
    assert 20 <= steps["island-2"] <= 450
    assert_tokens_add_up(run.summary)
    assert any("island-2" in m["learners"] for m in run.of("merge"))


@pytest.mark.parametrize("algorithm", ["streaming", "diloco"])
def test_lock_step_algorithms_merge_everybody_every_time(run_small, algorithm):
    run = run_small(f"algorithm={algorithm}", "islands.count=3")
    merges = run.of("merge")
    assert run.summary["algorithm"] == algorithm
    assert run.summary["status"] == "completed"
    assert all(m["learners"] == ["island-0", "island-1", "island-2"] for m in merges)
    if algorithm == "diloco":
        assert all(m["steps"] == [10, 10, 10] for m in merges)


def test_deterministic_runs_end_with_the_same_bits(run_small):
    first, second = (run_small("run.deterministic=true", "islands.count=2", name=n) for n in ("first", "second"))

    def digests(run):
        return sorted((m["fragment"], m["version"], m["digest"]) for m in run.of("merge"))

    assert digests(first) == digests(second)
    assert (first.path / "final/model.safetensors").read_bytes() == (
        second.path / "final/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("wire", ["float32", "int8", "int4", "e3m0"])
def test_every_wire_type_trains(run_small, wire):
    run = run_small(f"network.wire_up={wire}", "islands.count=2", "run.steps=100")
    assert run.summary["status"] == "completed"
    assert not run.of("refused")
    assert run.summary["loss"]["validation"] < 4.5


def test_late_contributions_can_be_kept_for_the_next_round(run_small):
    run = run_small("sync.late=next", "sync.quorum=1", "sync.overlap_steps=1", "network.latency=20ms")
    assert run.summary["status"] == "completed"
    assert_tokens_add_up(run.summary)
    kept = [e for e in run.of("late") if e["kept"]]
    assert kept, "the links are slow enough that some contributions are late"
    assert any(
        len(set(m["learners"])) < len(m["learners"]) or max(m["base_versions"]) > min(m["base_versions"])
        for m in run.of("merge")
    )


def test_measured_rate_stays_under_the_configured_one(run_small):
    run = run_small("network.bandwidth=2mbps", "islands.count=2", "sync.overlap_steps=8", "run.steps=800")
    rates = [m[key] for m in run.metrics for key in ("link_up_bps", "link_down_bps") if m.get(key) is not None]
    assert rates
    assert max(rates) <= 1.1 * 2e6
    assert max(rates) > 0.2 * 2e6


def test_periodic_validation_falls(run_small):
    run = run_small("run.eval_every_steps=20", "islands.count=2", "outer.lr=1", "outer.momentum=0", "sync.quorum=2")
    losses = [e["loss"] for e in run.of("evaluation") if not e["final"]]
    assert len(losses) >= 3
    assert losses[-1] < losses[0]
