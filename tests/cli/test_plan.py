"""The plan of --dry-run against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_cli.config.compose import compose, list_recipes
from diloco_cli.config.schema import WireType
from diloco_cli.run.plan import make_plan, render_plan, wire_bytes


@pytest.fixture(autouse=True)
def _no_thread_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_links_and_memory_by_hand() -> None:
    cfg = compose(
        [
            "network.bandwidth=8mbps",
            "network.latency=100ms",
            "network.wire_up=float32",
            "sync.inner_steps=10",
            "sync.overlap_steps=2",
        ]
    )
    plan = make_plan(cfg)
    sizes = [f["elements"] for f in plan["fragments"]["sizes"]]
    parameters = plan["parameters"]
    assert sum(sizes) == parameters
    assert [f["fragment"] for f in plan["fragments"]["sizes"]] == list(range(len(sizes)))
    link = plan["links"][0]
    # 8 Mbit/s carry a million bytes per second.
    assert link["up"]["bytes_per_round"] == 4 * parameters
    assert link["down"]["bytes_per_round"] == 2 * parameters
    assert link["up"]["round_time_s"] == pytest.approx(4 * parameters / 1e6)
    assert link["up"]["bytes_per_step"] == pytest.approx(4 * parameters / 10)
    assert link["up"]["fragment_time_s"] == pytest.approx(4 * max(sizes) / 1e6 + 0.1)
    assert link["full_link_step_time_s"] == pytest.approx(4 * parameters / 1e6 / 10)
    assert link["hidden_step_time_s"] == pytest.approx((6 * max(sizes) / 1e6 + 0.2) / 2)
    learner, syncer = plan["processes"][0]["memory_bytes"], plan["processes"][-1]["memory_bytes"]
    assert (learner["parameters"], learner["gradients"], learner["optimizer"]) == tuple(
        n * parameters for n in (4, 4, 8)
    )
    assert learner["total"] == sum(v for k, v in learner.items() if k != "total")
    assert (syncer["parameters"], syncer["momentum"]) == (4 * parameters, 4 * parameters)
    json.dumps(plan, allow_nan=False)


def test_unlimited_links_are_null_in_json_and_words_on_screen() -> None:
    plan = make_plan(compose(["network=unlimited"]))
    assert plan["links"][0]["up"]["rate_bps"] is None
    json.dumps(plan, allow_nan=False)
    assert "unlimited" in render_plan(plan)


def test_fsdp_shares_parameters_over_ranks() -> None:
    plan = make_plan(compose([], "fsdp-island"))
    sharded, whole = (plan["processes"][i]["memory_bytes"] for i in (0, 1))
    assert sharded["parameters"] == pytest.approx(whole["parameters"] / 2, abs=4)


def test_tokens_count_a_slow_island_for_what_it_does() -> None:
    plan = make_plan(compose(["islands.named.island-1.speed=0.5", "run.steps=100", "islands.count=2"]))
    assert plan["tokens"] == 150 * 8 * 128
    plan = make_plan(compose(["islands.count=2", "run.tokens=1m"]))
    assert plan["tokens"] == plan["steps"] * plan["tokens_per_step"] >= 1_000_000


def test_12b_is_planned_without_its_memory() -> None:
    import resource

    plan = make_plan(compose(["model=12b", "islands.each.parallel=fsdp"]))
    assert plan["parameters"] == pytest.approx(12e9, rel=0.05)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # KiB


@pytest.mark.parametrize(
    ("model", "parameters"), [("tiny", 0.2e6), ("small", 3e6), ("150m", 150e6), ("1b", 1.1e9), ("moe-tiny", 0.65e6)]
)
def test_presets_are_as_large_as_they_say(model: str, parameters: float) -> None:
    assert make_plan(compose([f"model={model}"]))["parameters"] == pytest.approx(parameters, rel=0.15)


@pytest.mark.parametrize("name", [r.name for r in list_recipes()])
def test_every_recipe_can_be_planned(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    cfg = compose([f"data.path={tmp_path}"] if name == "your-own-text" else [], name)
    text = render_plan(make_plan(cfg))
    assert "plan" in text
    assert all(f"{name} " in text or f"{name} .." in text for name in ("island-0", "syncer"))


def test_processes_have_the_threads_that_the_launcher_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    shown = make_plan(compose(["islands.named.island-2={nproc_per_node: 2, threads: 3}"]))["processes"]
    assert [(p["process"], p["ranks"], p["threads_per_rank"]) for p in shown[1:3]] == [
        ("island-1", 1, 7),
        ("island-2", 2, 3),
    ]


def test_wire_bytes() -> None:
    assert wire_bytes(1000, WireType.float32) == 4000
    assert wire_bytes(1000, WireType.bfloat16) == 2000
    assert wire_bytes(1000, WireType.int8) == 1000 + 4 * 4
    assert wire_bytes(1001, WireType.int4) == 501 + 4 * 4


def test_the_faults_are_listed_and_those_that_do_not_fit_are_counted() -> None:
    plan = make_plan(compose(["failures.events=[{at: 30s, kind: crash, island: island-1, rank: 0}]"]))
    assert plan["faults"] == [{"kind": "crash", "target": "island-1", "at_s": 30.0, "rank": 0}]
    assert render_plan(plan).endswith("1 fault on purpose\n    at 30 s: island-1 rank 0 crash")
    many = make_plan(compose(["failures=flaky"]))
    json.dumps(many, allow_nan=False)
    lines = render_plan(many).splitlines()
    assert sum(line.startswith("    at ") for line in lines) == 30
    assert lines[-1] == f"    and {len(many['faults']) - 30} more"
    assert make_plan(compose([]))["faults"] == []
