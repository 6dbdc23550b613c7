"""Each kind of fault has the effect that can be worked out by hand, on the protocol, the baselines and the links."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import pytest

from diloco_cli.config.compose import compose
from diloco_cli.config.schema import Config
from diloco_cli.core.faults import Fault
from diloco_cli.run.settings import fault_plan
from diloco_cli.sim import results, world
from diloco_cli.sim.engine import Engine, Streams
from diloco_cli.sim.network import SimLink
from diloco_cli.sim.scenario import Scenario, world_spec
from diloco_cli.sim.world import CONNECT_ROUND_TRIPS, RESTART_S, World

Line = dict[str, Any]


@functools.cache
def config(*overrides: str) -> Config:
    """Free links, and nobody is waited for at the end: what is lost is the fault's doing."""
    base = ["network.bandwidth=unlimited", "network.latency=0ms", "sync.fragments=2", "sync.inner_steps=8"]
    end = ["sync.quorum=1", "run.finish_tolerance=0", "run.finish_wait=0s"]
    return compose([*base, *end, "sync.overlap_steps=2", *overrides])


def run(cfg: Config, *faults: Fault, jump: bool = False) -> tuple[World, list[Line]]:
    lines: list[Line] = []

    def record(t: float, event: str, data: Any) -> None:
        lines.append({"time": t, "event": event, **data})

    sim = World(world_spec(cfg, Scenario(faults=faults)), Streams(0), jump=jump, on_record=record).run()
    assert sim.finish is not None
    assert sim.finish.status == "completed"
    tokens = {k: round(v) for k, v in sim.tally().tokens.items()}
    assert tokens["processed"] == sum(tokens[k] for k in ("merged", "late", "refused", "lost", "pending")), tokens
    return sim, lines


def of(lines: list[Line], event: str, learner: str = "island-1") -> list[Line]:
    return [line for line in lines if line["event"] == event and line.get("learner") == learner]


def fault(kind: str, at_s: float = 20.3, **rest: Any) -> Fault:
    return Fault(kind=kind, target="island-1", at_s=at_s, **rest)


# ---- processes --------------------------------------------------------------------------------------


def test_half_speed_for_half_the_time_is_three_quarters_of_the_steps() -> None:
    sim, lines = run(config("run.steps=400"), fault("slow", 100.3, factor=0.5, duration_s=200.0))
    assert sim.learners["island-0"].steps == 400
    assert sim.learners["island-1"].steps == pytest.approx(300, abs=1)
    assert of(lines, "leave") == []
    figures = results.figures(dict.fromkeys(sim.learners, 1), sim.tally())
    # Of four islands one has lost a quarter.
    assert figures["goodput"] == pytest.approx(1 - 0.25 / 4, abs=0.01)


@pytest.mark.parametrize("factor", [0.5, 0.9, 0.25])
@pytest.mark.parametrize("lasts_s", [0.2, 4.0, 7.77])
def test_a_slow_island_needs_just_so_much_longer_wherever_in_a_step_it_begins(factor: float, lasts_s: float) -> None:
    cfg = config("run.steps=40", "islands.count=1")
    slow = Fault(kind="slow", target="island-0", at_s=10.35, factor=factor, duration_s=lasts_s)
    calm, slowed = (run(cfg, *faults)[0].tally().time_s for faults in ((), (slow,)))
    assert slowed - calm == pytest.approx(lasts_s * (1 - factor), abs=1e-6)


@pytest.mark.parametrize(("duration_s", "away_s"), [(30.0, 30.0), (None, RESTART_S)])
def test_a_crash_is_back_after_its_duration_or_its_restart(duration_s: float | None, away_s: float) -> None:
    sim, lines = run(config("run.steps=100"), fault("crash", duration_s=duration_s, rank=0))
    assert of(lines, "leave")[0]["time"] == pytest.approx(20.3)
    assert of(lines, "join")[1]["time"] == pytest.approx(20.3 + away_s)
    # Half a step is lost at most, and one at the end.
    assert sim.learners["island-1"].steps == pytest.approx(100 - away_s, abs=1)


def test_a_hang_without_end_is_noticed_and_restarted() -> None:
    cfg = config("run.steps=100")
    sim, lines = run(cfg, fault("hang"))
    away_s = cfg.sync.heartbeat_timeout_s + RESTART_S
    assert of(lines, "join")[1]["time"] == pytest.approx(20.3 + away_s)
    assert sim.learners["island-1"].steps == pytest.approx(100 - away_s, abs=1)


def test_who_is_preempted_ends_its_step_and_comes_back() -> None:
    sim, lines = run(config("run.steps=100"), fault("preempt", duration_s=30.0))
    (left,) = of(lines, "leave")
    assert (left["time"], left["reason"]) == (pytest.approx(21.0), "preempted")
    assert of(lines, "join")[1]["time"] == pytest.approx(50.3)
    assert sim.learners["island-1"].steps == pytest.approx(70, abs=1)
    # A preemption that is shorter than the step under way: it has left before it comes back.
    _, lines = run(config("run.steps=100"), fault("preempt", duration_s=0.1))
    assert [of(lines, "leave")[0]["time"], of(lines, "join")[1]["time"]] == pytest.approx([21.0, 21.0])


def test_a_full_disk_takes_no_time() -> None:
    cfg = config("run.steps=60")
    calm, full = (run(cfg, *faults)[1] for faults in ((), (fault("disk-full", duration_s=10.0),)))
    assert [line for line in full if line["event"] != "fault"] == calm
    assert len(of(full, "fault")) == 1


def test_a_fault_waits_for_an_island_that_is_away() -> None:
    _, lines = run(
        config("run.steps=100"),
        fault("crash", duration_s=10.0),
        fault("crash", 25.0, duration_s=7.0),
        fault("partition", 26.0, duration_s=3.0),
    )
    assert [(f["kind"], pytest.approx(f["time"])) for f in of(lines, "fault")] == [
        ("crash", 20.3),
        ("crash", 30.3),
        ("partition", 37.3),
    ]


# ---- contributions and links ------------------------------------------------------------------------


def test_one_contribution_with_nan_is_refused_and_the_island_stays() -> None:
    _, lines = run(config("run.steps=60"), fault("corrupt", payload="nan"))
    (unhealthy,) = of(lines, "unhealthy")
    assert (unhealthy["in_a_row"], unhealthy["reason"]) == (1, "it holds NaN")
    assert 20.3 < unhealthy["time"] < 20.3 + 8
    assert of(lines, "leave") == []


def test_three_bad_contributions_in_a_row_take_an_island_out_until_it_joins_again() -> None:
    _, lines = run(config("run.steps=100"), *(fault("corrupt", 20.3 + 4 * i) for i in range(3)))
    assert [u["in_a_row"] for u in of(lines, "unhealthy")] == [1, 2, 3]
    assert len(of(lines, "leave")) == 1
    assert len(of(lines, "join")) == 2


def test_bytes_that_fail_their_seal_break_the_connection_which_is_made_again() -> None:
    _, lines = run(config("run.steps=60", "network.latency=50ms"), fault("corrupt", payload="bytes"))
    (left,) = of(lines, "leave")
    assert 20.3 < left["time"] < 20.3 + 8
    assert of(lines, "join")[1]["time"] - left["time"] == pytest.approx(CONNECT_ROUND_TRIPS * 0.1)
    assert of(lines, "unhealthy") == []


def arrivals(actions: list[tuple[float, Any]], rate_bps: float = 8e6, until_s: float = 100.0) -> list[float]:
    engine, found = Engine(), list[float]()
    link = SimLink(engine, rate_bps, 0.1, 0.0, random.Random(0))
    for at_s, action in actions:
        engine.at(at_s, 0, action, link, lambda: found.append(engine.now_s))
    engine.at(until_s, 0, lambda: None)
    engine.run(lambda: engine.now_s >= until_s)
    return found


def test_what_is_under_way_departs_at_the_rate_that_a_link_has_at_that_moment() -> None:
    def send(link: SimLink, arrived: Any) -> None:
        link.bulk("a", 10**6, arrived)

    (calm,) = arrivals([(0.0, send)])
    worse = (0.4, lambda link, _: link.degrade(2e6, 0.3, 0.0))
    (late,) = arrivals([(0.0, send), worse])
    # Of the second that it takes, what is left after 0.4 s takes four times as long; and the longer delay.
    assert late == pytest.approx(0.4 + 4 * (calm - 0.1 - 0.4) + 0.3)
    (between,) = arrivals([(0.0, send), worse, (0.8, lambda link, _: link.restore())])
    assert between == pytest.approx(calm + 0.4 * (1 - 1 / 4))
    # An unlimited link sends at once, and again when it is as before.
    assert arrivals([(0.0, lambda link, _: link.degrade(2e6, None, 0.0)), (0.0, send)], math.inf) == [
        pytest.approx(4.0 - 0.02 + 0.1, rel=1e-3)
    ]
    more = [(0.0, lambda link, _: link.degrade(2e6, None, 0.0)), (0.0, send), (1.0, lambda link, _: link.restore())]
    assert arrivals(more, math.inf) == [pytest.approx(1.1)]


def test_loss_takes_rate_and_a_round_trip() -> None:
    lossy = (0.0, lambda link, _: link.degrade(None, None, 0.25))
    (bulk,) = arrivals([lossy, (0.0, lambda link, arrived: link.bulk("a", 10**6, arrived))])
    # Nearly every chunk loses a packet: three crossings instead of one.
    assert bulk == pytest.approx(1.0 / 0.75 + 0.3, rel=0.02)
    small = [(float(i), lambda link, arrived: link.control(100, arrived)) for i in range(400)]
    late = [t % 1 for t in arrivals([lossy, *small], until_s=500.0)]
    assert len(late) == 400
    assert sum(t > 0.25 for t in late) / 400 == pytest.approx(0.25, abs=0.06)
    assert {round(t, 1) for t in late} == {0.1, 0.3}


def test_a_degraded_link_is_its_own_again_afterwards() -> None:
    cfg = config("run.steps=200", "network.bandwidth=100mbps", "network.latency=10ms")
    sim, lines = run(cfg, fault("degrade", 50.3, rate_bps=1e5, duration_s=60.0))
    assert (sim.learners["island-1"].up.rate_bps, sim.learners["island-1"].down.latency_s) == (1e8, 0.01)

    def share(begin_s: float, end_s: float) -> float:
        merges = [m for m in lines if m["event"] == "merge" and begin_s < m["time"] < end_s]
        return sum("island-1" in m["learners"] for m in merges) / len(merges)

    assert min(share(0.0, 50.0), share(130.0, 190.0)) > 0.9
    assert share(60.0, 110.0) < 0.2
    assert sim.learners["island-1"].steps == 200


# ---- when --------------------------------------------------------------------------------------------


def test_a_fault_by_step_happens_when_the_foremost_learner_gets_there() -> None:
    cfg = config("run.steps=100", "islands.named.island-1.speed=0.5")
    _, lines = run(cfg, Fault(kind="crash", target="island-1", at_step=40, duration_s=5.0))
    assert of(lines, "fault")[0]["time"] == pytest.approx(40.0)


@pytest.mark.parametrize("overrides", [(), ("sync=streaming", "sync.quorum=1")])
def test_no_jump_goes_over_a_fault_by_step_or_the_end_of_one(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "JUMP_ABOVE_LEARNER_STEPS", 1000)
    monkeypatch.setattr(world, "HALF_WINDOW_LEARNER_STEPS", 400)
    cfg = config("run.steps=4000", "sync.inner_steps=8", "sync.fragments=2", "sync.overlap_steps=2", *overrides)
    by_step = Fault(kind="crash", target="island-2", at_step=1300, duration_s=50.0)
    slow = fault("slow", 2000.4, factor=0.5, duration_s=600.0)
    by_jump, exact = (run(cfg, by_step, slow, jump=jump) for jump in (True, False))
    assert by_jump[0].num_jumps >= 2
    assert exact[0].num_jumps == 0
    when = [[line["time"] for line in lines if line["event"] == "fault"] for _, lines in (by_jump, exact)]
    assert when[0] == pytest.approx(when[1])
    for name, figures in exact[0].tally().learners.items():
        assert by_jump[0].tally().learners[name][0] == pytest.approx(figures[0], abs=2), name
    assert by_jump[0].tally().time_s == pytest.approx(exact[0].tally().time_s, rel=1e-6)


def test_the_plan_of_a_configuration_is_what_happens() -> None:
    cfg = config("failures=mixed", "failures.random.mean_time_between=60s", "run.steps=400", "sync.quorum=1")
    plan = fault_plan(cfg)
    _, lines = run(cfg, *plan)
    end_s = lines[-1]["time"]
    happened = sorted((f["learner"], f["kind"]) for f in lines if f["event"] == "fault")
    planned = sorted((f.target, f.kind) for f in plan if f.at_s is not None and f.at_s < end_s - 30)
    assert len(planned) > 15
    assert len({kind for _, kind in planned}) >= 6
    missing = [f for f in planned if planned.count(f) > happened.count(f)]
    assert missing == []


# ---- baselines ---------------------------------------------------------------------------------------


def data_parallel(*faults: Fault, steps: int = 100, **more: Any) -> dict[str, Any]:
    cfg = config(f"run.steps={steps}", *more.pop("overrides", ()))
    scenario = Scenario(faults=faults, restart_s=3.0, **more)
    found = results.simulate(cfg, scenario, algorithms=["data_parallel"])["algorithms"]["data_parallel"]
    return {k: v["mean"] if isinstance(v, dict) and "mean" in v else v for k, v in found.items()}


def test_everybody_waits_for_a_slow_island() -> None:
    found = data_parallel(fault("slow", 20.0, factor=0.5, duration_s=40.0))
    assert found["wall_time_s"] == pytest.approx(120.0, abs=1e-6)
    assert found["goodput"] == pytest.approx(100 / 120, abs=1e-6)


def test_everybody_waits_for_a_degraded_link() -> None:
    overrides = ("network.bandwidth=1gbps", "islands.count=2")
    calm = data_parallel(parameters=10**8, overrides=overrides)["wall_time_s"]
    reduce_s = 16e8 / 1e9
    assert calm == pytest.approx(100 * (1 + reduce_s))
    worse = Fault(kind="degrade", target="island-1", at_step=10, rate_bps=5e8, duration_s=10 * (1 + 2 * reduce_s))
    assert data_parallel(worse, parameters=10**8, overrides=overrides)["wall_time_s"] == pytest.approx(
        calm + 10 * reduce_s
    )


def test_a_crash_by_step_stops_everybody_and_what_is_not_felt_does_not() -> None:
    crash = Fault(kind="crash", target="island-1", at_step=50)
    assert data_parallel(crash)["wall_time_s"] == pytest.approx(100 + RESTART_S + 3.0)
    unfelt = (fault("corrupt"), fault("disk-full", 30.5, duration_s=5.0))
    assert data_parallel(*unfelt)["wall_time_s"] == pytest.approx(100.0)


# ---- the syncer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["decoupled", "streaming", "diloco"])
@pytest.mark.parametrize("kind", ["crash", "hang", "slow", "disk-full"])
def test_a_fault_of_the_syncer_loses_no_step_and_no_version(algorithm: str, kind: str) -> None:
    cfg = config("run.steps=120", "network.latency=10ms", f"algorithm={algorithm}", "sync.heartbeat_timeout=4s")
    calm, _ = run(cfg)
    sim, lines = run(cfg, Fault(kind=kind, target="syncer", at_s=30.3, duration_s=None, factor=0.5))
    assert {m: s.steps for m, s in sim.learners.items()} == dict.fromkeys(sim.learners, 120)
    assert sim.tally().tokens["processed"] == calm.tally().tokens["processed"]
    for fragment in range(2):
        versions = [line["version"] for line in lines if line["event"] == "merge" and line["fragment"] == fragment]
        assert versions == list(range(1, len(versions) + 1))
    returned = [line["learner"] for line in lines if line["event"] == "return"]
    if kind in ("crash", "hang"):
        assert sorted(set(returned)) == sorted(sim.learners)
        merges = [line["time"] for line in lines if line["event"] == "merge"]
        # Nothing is merged while it is away: 5 s, after 4 s of silence if it hung.
        away_s = RESTART_S + (4.0 if kind == "hang" else 0.0)
        assert not [t for t in merges if 30.4 < t < 30.3 + away_s]
        assert [t for t in merges if t > 30.3 + away_s]
    else:
        assert returned == []
    assert results.figures(dict.fromkeys(sim.learners, 1), sim.tally())["uptime"] == pytest.approx(1.0)


def test_learners_of_a_decoupled_run_do_not_wait_for_a_syncer_that_is_away() -> None:
    cfg = config("run.steps=120", "network.latency=10ms")
    calm, _ = run(cfg)
    sim, _ = run(cfg, Fault(kind="crash", target="syncer", at_s=30.3, duration_s=20.0))
    assert sim.tally().time_s == pytest.approx(calm.tally().time_s, abs=1.5)
    assert all(s.wait_s < 1.5 for s in sim.learners.values())
