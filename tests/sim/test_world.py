"""The simulator against the protocol's test world, a real run, closed forms, and itself."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from e2e_runs import SMALL, start_small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world import Rules
from world import World as CoreWorld

from diloco_cli.config.compose import compose
from diloco_cli.config.schema import Config, Link, LinkDirection
from diloco_cli.core.faults import Fault
from diloco_cli.core.learner import LearnerSettings
from diloco_cli.core.state import SyncerSettings
from diloco_cli.errors import ConfigError
from diloco_cli.run import settings as run_settings
from diloco_cli.sim import results, scenario, world
from diloco_cli.sim.engine import Streams
from diloco_cli.sim.scenario import Scenario, world_spec
from diloco_cli.sim.world import LearnerSpec, RandomFaults, World, WorldSpec
from diloco_cli.train.model import meta_model, tensor_inventory
from diloco_cli.wire import messages


@functools.cache
def config(*overrides: str) -> Config:
    return compose(list(overrides), None)


def tape(spec: WorldSpec, *, jump: bool = False, seed: int = 0) -> tuple[World, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    sim = World(
        spec, Streams(seed), jump=jump, on_record=lambda t, e, data: lines.append({"time": t, "event": e, **data})
    )
    return sim.run(), lines


def merges(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (m["fragment"], m["version"], tuple(m["learners"]), tuple(m["steps"]), tuple(m["base_versions"]))
        for m in lines
        if m["event"] == "merge"
    ]


# ---- one protocol ----------------------------------------------------------------------------------


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    # Odd step times, so that nothing happens at the same instant at two learners, where the order would be anyone's.
    speeds = draw(st.lists(st.sampled_from([1.0, 1.137, 0.713, 2.291, 0.517]), min_size=1, max_size=4, unique=True))
    names = [f"island-{i}" for i in range(len(speeds))]
    lockstep = draw(st.booleans())
    inner = draw(st.integers(2, 8))
    latency_s = draw(st.sampled_from([0.01, 0.083]))
    return Rules(
        step_s=dict(zip(names, speeds, strict=True)),
        num_fragments=draw(st.integers(1, 4)),
        inner_steps=inner,
        overlap_steps=draw(st.integers(1, inner)),
        quorum=draw(st.integers(1, len(names))),
        grace_safety=draw(st.sampled_from([0.0, 0.9])),
        target_steps=draw(st.integers(5, 40)),
        keep_late=draw(st.booleans()),
        lockstep=lockstep,
        same_offset=lockstep and draw(st.booleans()),
        max_drift_steps=draw(st.none() | st.integers(inner, 2 * inner)),
        finish_tolerance=draw(st.sampled_from([0.0, 0.3])),
        finish_wait_s=draw(st.sampled_from([0.0, 3.0])),
        latency_s=(latency_s, latency_s),
        merge_s=(0.0, 0.0),
        jitter=0.0,
    )


def same_world(r: Rules) -> WorldSpec:
    """The rules as the simulator takes them: unlimited links that only have latency."""
    direction = LinkDirection(rate_bps=math.inf, latency_s=r.latency_s[0], jitter_s=0.0)
    sizes = (1000,) * r.num_fragments
    return WorldSpec(
        syncer=SyncerSettings(
            num_fragments=r.num_fragments,
            chips=dict.fromkeys(r.step_s, 1),
            inner_steps=r.inner_steps,
            overlap_steps=r.overlap_steps,
            quorum=r.quorum,
            grace_safety=r.grace_safety,
            keep_late=r.keep_late,
            lockstep=r.lockstep,
            target_steps=r.target_steps,
            finish_tolerance=r.finish_tolerance,
            finish_wait_s=math.inf if r.lockstep else r.finish_wait_s,
            heartbeat_timeout_s=r.heartbeat_timeout_s,
            start_timeout_s=r.start_timeout_s,
        ),
        learner=LearnerSettings(
            num_fragments=r.num_fragments,
            inner_steps=r.inner_steps,
            overlap_steps=0 if r.same_offset else r.overlap_steps,
            target_steps=r.target_steps,
            lockstep=r.lockstep,
            same_offset=r.same_offset,
            max_drift_steps=r.max_drift_steps,
        ),
        learners={m: LearnerSpec(step_s=s, tokens=5, link=Link(direction, direction)) for m, s in r.step_s.items()},
        sizes=sizes,
        up_bytes=sizes,
        down_bytes=sizes,
    )


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rules())
def test_the_same_merges_as_the_two_cores_have_in_their_own_test_world(r: Rules) -> None:
    expected = CoreWorld(r).run()
    sim, lines = tape(same_world(r))
    assert merges(lines) == merges([{"event": e, **data} for _, e, data in expected.records])
    assert sim.finish is not None
    assert expected.finished is not None
    assert sim.finish.status == expected.finished.status


@pytest.mark.e2e
def test_a_real_deterministic_run_has_the_merges_that_were_simulated(tmp_path) -> None:
    overrides = ["islands.count=3", "run.deterministic=true", "run.steps=30", "islands.named.island-1.batch=8"]
    real = start_small(tmp_path / "run", *overrides)
    assert real.error is None
    sim, lines = tape(world_spec(config(*SMALL, *overrides), Scenario(step_time_s=0.01)))

    def by_fragment(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        # Fragments of one instant finish in an order that is the machine's own.
        return sorted(found)

    assert by_fragment(merges(lines)) == by_fragment(merges(real.events))
    account = {k: round(v) for k, v in sim.tally().tokens.items()}
    # Tokens without padding: only what the real run counted can differ, and by little.
    assert account["processed"] == pytest.approx(real.summary["tokens"]["processed"], rel=0.02)
    for name, sent in real.summary["bytes"].items():
        steps, _, _, up, down = sim.tally().learners[name]
        assert steps == 30
        assert down == pytest.approx(sent["down"], rel=0.15), name
        assert up == pytest.approx(sent["up"], rel=0.25), name


@pytest.mark.parametrize("overrides", [(), ("model.tied=false",), ("model.num_experts=3", "model.num_layers=1")])
def test_sizes_are_those_of_the_built_model(overrides: tuple[str, ...]) -> None:
    cfg = config(*overrides)
    inventory = tensor_inventory(meta_model(cfg.model, 256))
    assert scenario.llama_tensors(cfg.model, 256) == sorted(inventory, key=lambda t: t.name)
    layout = run_settings.model_layout(cfg, meta_model(cfg.model, 256))
    assert scenario.fragment_sizes(cfg, Scenario()) == tuple(f.numel for f in layout.fragments)


def test_messages_have_the_sizes_that_are_written() -> None:
    record = 22
    pull = len(messages.encode_message(messages.PullMsg(fragment=3), 0)) + record
    beat = messages.Report(step=1000, tokens=123456, step_time_s=None, metrics={}, phases={})
    merged = messages.MergedMsg(
        fragment=3, version=100, wire="bfloat16", numel=123456, taken=True, global_step=1000, part=0, num_parts=1
    )
    assert pull == pytest.approx(world.PULL_BYTES, abs=4)
    assert len(messages.encode_message(beat, 0)) + record == pytest.approx(world.HEARTBEAT_BYTES, abs=8)
    assert len(messages.encode_message(merged, 1)) + 32 + record == pytest.approx(world.MERGED_HEAD_BYTES, abs=8)


# ---- closed forms -----------------------------------------------------------------------------------


def run(cfg: Config, algorithm: str, **of_scenario: Any) -> dict[str, Any]:
    found = results.simulate(cfg, Scenario(**of_scenario), algorithms=[algorithm])["algorithms"][algorithm]
    return {k: v["mean"] if isinstance(v, dict) and "mean" in v else v for k, v in found.items()}


def test_data_parallel_over_two_islands_is_compute_over_compute_plus_bits_over_bandwidth() -> None:
    cfg = config("islands.count=2", "network.bandwidth=1gbps", "network.latency=0ms", "run.steps=100")
    bits = 16 * 10**8
    found = run(cfg, "data_parallel", step_time_s=2.0, parameters=10**8)
    assert found["compute_utilization"] == pytest.approx(2.0 / (2.0 + bits / 1e9), rel=1e-6)
    assert found["wall_time_s"] == pytest.approx(100 * (2.0 + bits / 1e9), rel=1e-6)


def test_diloco_waits_for_the_model_up_and_down_every_h_steps() -> None:
    cfg = config(
        "islands.count=3",
        "network.bandwidth=1gbps",
        "network.latency=100ms",
        "run.steps=2039",
        "sync=diloco",
        "sync.fragments=1",
    )
    found = run(cfg, "diloco", step_time_s=0.5, parameters=10**7)
    wait_s = 2 * (16 * 10**7 / 1e9 - 0.02) + 2 * 0.1  # less the credit of an idle link
    syncs = 2039 // cfg.sync.inner_steps
    assert found["compute_utilization"] == pytest.approx(2039 * 0.5 / (2039 * 0.5 + syncs * wait_s), rel=1e-3)


def test_endless_bandwidth_and_no_failures_lose_nothing() -> None:
    cfg = config("network.bandwidth=unlimited", "network.latency=0ms", "run.steps=200")
    for algorithm in results.ALGORITHMS:
        found = run(cfg, algorithm)
        assert found["goodput"] == pytest.approx(1.0, abs=0.01), algorithm
        assert found["compute_utilization"] == pytest.approx(1.0, abs=1e-9), algorithm
        assert found["uptime"] == 1.0


def test_more_bandwidth_never_lowers_utilization() -> None:
    for algorithm in ("data_parallel", "diloco", "streaming"):
        found = [
            run(config(f"network.bandwidth={b}", "network.latency=0ms", "run.steps=120"), algorithm, parameters=10**9)[
                "compute_utilization"
            ]
            for b in ("500mbps", "5gbps", "unlimited")
        ]
        assert found == sorted(found), algorithm
        assert found[0] < 0.9 < found[-1]


def test_staleness_of_a_fragment_installed_every_h_steps() -> None:
    cfg = config("run.steps=2400", "sync.inner_steps=24", "sync.fragments=2")
    assert run(cfg, "streaming")["staleness_steps"] == pytest.approx(12.5, rel=0.02)


# ---- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["crash", "hang", "partition"])
def test_an_island_that_comes_back_joins_again_and_tokens_add_up(kind: str) -> None:
    cfg = config("run.steps=150", "sync.fragments=4", "run.finish_tolerance=0")
    faults = (Fault(kind=kind, target="island-1", at_s=20.3, duration_s=40.0),)
    sim, lines = tape(world_spec(cfg, Scenario(faults=faults, parameters=10**7)))
    assert sim.finish is not None
    assert sim.finish.status == "completed"
    leave = next(line for line in lines if line["event"] == "leave" and line["learner"] == "island-1")
    missed_s = leave["time"] - 20.3
    assert missed_s < 0.1 if kind == "crash" else 9.0 < missed_s < 14.0
    joins = [line["time"] for line in lines if line["event"] == "join" and line["learner"] == "island-1"]
    assert len(joins) == 2
    assert 60.3 < joins[1] < 61.5
    tokens = {k: round(v) for k, v in sim.tally().tokens.items()}
    assert tokens["processed"] == sum(tokens[k] for k in ("merged", "late", "refused", "lost", "pending")), tokens
    assert tokens["lost"] > 0
    away = [m for m in lines if m["event"] == "merge" and 36.0 < m["time"] < 60.0]
    assert away
    assert not any("island-1" in m["learners"] for m in away)
    assert any("island-1" in m["learners"] for m in lines if m["event"] == "merge" and m["time"] > 70.0)


def test_a_short_hang_or_cut_is_sat_out() -> None:
    cfg = config("run.steps=60", "sync.fragments=4")
    for kind in ("hang", "partition"):
        faults = (Fault(kind=kind, target="island-1", at_s=20.3, duration_s=4.0),)
        sim, lines = tape(world_spec(cfg, Scenario(faults=faults)))
        assert [line for line in lines if line["event"] == "leave"] == []
        assert sim.finish is not None
        assert sim.finish.status == "completed"
        assert sim.learners["island-1"].steps == 60


def test_failures_stop_data_parallel_but_not_the_others() -> None:
    cfg = config("run.steps=1000", "network.bandwidth=unlimited", "network.latency=0ms", "islands.count=4")
    faults = tuple(Fault(kind="crash", target=f"island-{i}", at_s=100.0 + 200 * i, duration_s=100.0) for i in range(4))
    found = {a: run(cfg, a, faults=faults, restart_s=10.0) for a in results.ALGORITHMS}
    # Four times: half a step lost, 100 s of repair, 10 s of restart.
    assert found["data_parallel"]["wall_time_s"] == pytest.approx(1000 + 4 * 110, abs=4)
    assert found["data_parallel"]["uptime"] == pytest.approx(1000 / 1440, abs=0.01)
    assert found["data_parallel_elastic"]["wall_time_s"] == pytest.approx(1000 + 8 * 10, abs=4)
    assert found["decoupled"]["uptime"] == 1.0
    assert found["decoupled"]["goodput"] == pytest.approx(0.9, abs=0.02)
    assert found["decoupled"]["goodput"] > found["data_parallel_elastic"]["goodput"] > found["data_parallel"]["goodput"]


def test_an_island_that_never_fails_changes_no_failure_of_the_others() -> None:
    random_faults = RandomFaults(mean_time_between_s=100.0, mean_repair_s=10.0)

    def times(count: int) -> list[tuple[float, str]]:
        cfg = config(
            "run.steps=300",
            f"islands.count={count}",
            "sync.quorum=1",
            "run.finish_tolerance=0",
            "run.finish_wait=0s",
        )
        _, lines = tape(world_spec(cfg, Scenario(random_faults=random_faults)))
        found = [(f["time"], f["learner"]) for f in lines if f["event"] == "fault"]
        return [(t, name) for t, name in found if name in ("island-0", "island-1")]

    two, four = times(2), times(4)
    shared = min(len(two), len(four))
    assert shared >= 3
    assert two[:shared] == four[:shared]


# ---- jumps ------------------------------------------------------------------------------------------


@pytest.fixture
def early_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jumps in runs that are short enough to be simulated exactly, too."""
    monkeypatch.setattr(world, "JUMP_ABOVE_LEARNER_STEPS", 1000)
    monkeypatch.setattr(world, "HALF_WINDOW_LEARNER_STEPS", 400)
    monkeypatch.setattr(world, "WINDOW_LEARNER_STEPS", 4000)


def both(cfg: Config, **of_scenario: Any) -> tuple[dict[str, float], dict[str, float]]:
    spec = world_spec(cfg, Scenario(**of_scenario))
    found = []
    for jump in (False, True):
        sim = World(spec, Streams(1), jump=jump).run()
        assert (sim.num_jumps > 0) == jump
        t = sim.tally()
        figures = results.figures(dict.fromkeys(t.learners, 1), t)
        found.append({**figures, **{f"tokens {k}": v for k, v in t.tokens.items()}})
    return found[0], found[1]


@pytest.mark.usefixtures("early_jumps")
@pytest.mark.parametrize("overrides", [(), ("sync=streaming",), ("sync=diloco",)])
def test_a_jump_over_what_repeats_itself_changes_nothing(overrides: tuple[str, ...]) -> None:
    exact, jumped = both(config("run.steps=1500", "sync.fragments=2", *overrides))
    assert jumped == pytest.approx(exact, rel=1e-9)


@pytest.mark.usefixtures("early_jumps")
def test_a_jump_over_chance_and_mixed_speeds_is_right_on_average() -> None:
    cfg = config("run.steps=4000", "sync.fragments=2", "islands.named.island-1.speed=0.37", "network.jitter=20ms")
    exact, jumped = both(cfg, step_jitter=0.1, parameters=10**7)
    for name in ("tokens_per_s", "wall_time_s", "goodput", "compute_utilization", "bytes_per_link", "merges"):
        assert jumped[name] == pytest.approx(exact[name], rel=0.01), name


def test_faults_are_met_at_their_time_between_jumps() -> None:
    cfg = config("run.steps=20000", "sync.fragments=1")
    faults = (Fault(kind="crash", target="island-2", at_s=9000.5, duration_s=3000.0),)
    spec = world_spec(cfg, Scenario(faults=faults))
    sim, lines = tape(spec, jump=True)
    assert sim.num_jumps >= 2
    assert next(f["time"] for f in lines if f["event"] == "fault") == pytest.approx(9000.5)
    joins = [f["time"] for f in lines if f["event"] == "join" and f["learner"] == "island-2"]
    assert joins[1] == pytest.approx(12000.5, abs=1.0)
    assert sim.learners["island-2"].skipped_steps + sim.learners["island-2"].core.step <= 2 * 20000
    assert sim.tally().learners["island-2"][0] == pytest.approx(17000, abs=20)
    assert sim.tally().time_s == pytest.approx(20000.6, abs=2)


@pytest.mark.parametrize("overrides", [(), ("sync=streaming",)])
def test_64_islands_for_100_000_steps_take_seconds_and_leave_nothing_behind(overrides: tuple[str, ...]) -> None:
    cfg = config("islands.count=64", "run.steps=100000", *overrides)
    spec = world_spec(cfg, Scenario(step_jitter=0.1))
    began_s = time.process_time()
    sim = World(spec, Streams(0)).run()
    assert time.process_time() - began_s < 30
    assert sim.tally().learners["island-0"][0] == pytest.approx(100_000, rel=0.01)
    held = [len(m.held) + len(m.inbox) for m in sim.learners.values()]
    assert max(held) <= 2 * len(spec.sizes)


# ---- documents --------------------------------------------------------------------------------------

SCRIPT = """
import json
from diloco_cli.config.compose import compose
from diloco_cli.sim.results import simulate
from diloco_cli.sim.scenario import Scenario
from diloco_cli.sim.world import RandomFaults
cfg = compose(["run.steps=60", "network.jitter=5ms"], None)
faults = RandomFaults(mean_time_between_s=50, mean_repair_s=5)
print(json.dumps(simulate(cfg, Scenario(random_faults=faults, step_jitter=0.2), trials=2, seed=5)))
"""


def test_same_seed_same_bytes_in_any_process() -> None:
    found = set()
    for hash_seed in ("0", "1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        found.add(subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, check=True).stdout)
    assert len(found) == 1
    document = json.loads(found.pop())
    assert set(document["algorithms"]) == set(results.ALGORITHMS)
    for row in document["algorithms"].values():
        for name in ("goodput", "uptime", "compute_utilization", "tokens_per_s", "wall_time_s", "bytes_per_link"):
            assert row[name]["low"] <= row[name]["mean"] <= row[name]["high"], name
        assert set(row["staleness_steps"]) == set(row["quorum_filled"]) == {"mean", "low", "high"}


def test_solving_for_the_smallest_bandwidth() -> None:
    cfg = config("run.steps=200", "islands.count=2", "network.latency=0ms")
    found = results.solve(
        cfg,
        Scenario(parameters=10**8),
        "bandwidth",
        metric="compute_utilization",
        target=0.8,
        algorithm="data_parallel",
    )
    # compute 1 s, bits / bandwidth = 0.25 s
    assert found["answer"] == pytest.approx(16e8 / 0.25, rel=0.01)
    rows = {r["value"]: r["compute_utilization"] for r in found["table"]}
    assert rows[found["answer"]] >= 0.8
    assert min(rows.values()) < 0.8
    assert list(rows.values()) == sorted(rows.values())


def test_solving_for_inner_steps() -> None:
    cfg = config("run.steps=200", "islands.count=2", "network.bandwidth=100mbps", "network.latency=0ms")
    found = results.solve(
        cfg, Scenario(parameters=10**8), "inner-steps", metric="compute_utilization", target=0.9, algorithm="diloco"
    )
    wait_s = 2 * 16e8 / 1e8
    assert found["answer"] == pytest.approx(9 * wait_s, rel=0.15)


@pytest.mark.parametrize(
    ("change", "of_scenario", "words"),
    [
        (lambda c: setattr(c.sync, "quorum", 5), {}, "a quorum of 5 with 4 islands"),
        (lambda c: None, {"step_time_s": 0.0}, "takes 0 s"),
        (lambda c: None, {"step_time_s": math.nan}, "takes nan s"),
        (lambda c: None, {"step_jitter": 1.5}, "jitter"),
        (lambda c: setattr(c.network, "bandwidth", "0gbps"), {}, "0gbps"),
        (lambda c: None, {"faults": (Fault(kind="crash", target="island-9", at_s=1),)}, "there is no island-9"),
        (lambda c: None, {"duration_s": 0.0}, "no time"),
        (lambda c: setattr(c.model, "kind", scenario.ModelKind.entry_point), {}, "size of this model"),
    ],
)
def test_nonsense_gets_one_sentence(change: Any, of_scenario: dict[str, Any], words: str) -> None:
    cfg = copy.deepcopy(config())
    change(cfg)
    with pytest.raises(ConfigError, match=words):
        results.simulate(cfg, Scenario(**of_scenario))
