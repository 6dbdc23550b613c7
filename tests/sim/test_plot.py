"""The recorder of lanes against what must have happened, and the files that pictures end up in."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from diloco_cli.config.compose import compose
from diloco_cli.config.schema import Config
from diloco_cli.core.faults import Fault
from diloco_cli.errors import ConfigError
from diloco_cli.sim.plot import draw
from diloco_cli.sim.results import ALGORITHMS, run_once
from diloco_cli.sim.scenario import Scenario
from diloco_cli.sim.timeline import COMPUTING, DONE, DOWN, MAX_TRANSITIONS, REJOINING, WAITING, Timeline

CRASH = Fault(kind="crash", target="island-1", at_s=10.0, duration_s=5.0)


def config(*overrides: str) -> Config:
    return compose(
        ["islands.count=2", "run.steps=300", "network.bandwidth=100mbps", "network.latency=10ms", *overrides], None
    )


def recorded(cfg: Config, scenario: Scenario, algorithm: str = "decoupled") -> tuple[Timeline, float]:
    timeline = Timeline(fine_s=1e9)
    tally = run_once(cfg, scenario, algorithm, seed=0, timeline=timeline).tally
    return timeline, tally.time_s


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_recording_changes_nothing(algorithm: str) -> None:
    scenario = Scenario(step_time_s=0.1, step_jitter=0.2, faults=(CRASH,))
    plain = run_once(config(), scenario, algorithm, seed=1)
    assert run_once(config(), scenario, algorithm, seed=1, timeline=Timeline(fine_s=5.0)) == plain


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lanes_cover_the_run_without_overlap(algorithm: str) -> None:
    timeline, end_s = recorded(config(), Scenario(step_time_s=0.1, step_jitter=0.2, faults=(CRASH,)), algorithm)
    for lanes in (timeline.fine(end_s), timeline.coarse(end_s)):
        assert list(lanes) == ["island-0", "island-1"]
        for spans in lanes.values():
            assert spans[0][1] == 0.0
            assert spans[-1][2] == pytest.approx(end_s)
            assert all(a[2] == b[1] and a[0] != b[0] for a, b in itertools.pairwise(spans))


def test_a_crash_is_down_then_rejoining_until_the_first_step() -> None:
    timeline, end_s = recorded(config(), Scenario(step_time_s=0.1, faults=(CRASH,)))
    spans = timeline.coarse(end_s)["island-1"]
    assert [s for s, _, _ in spans] == [REJOINING, COMPUTING, DOWN, REJOINING, COMPUTING, DONE]
    _, computing, down, rejoining, _, _ = spans
    assert computing[2] == down[1] == 10.0
    assert down[2] == rejoining[1] == 15.0
    # Six one-way trips to connect, one for the state, which has to come over the link.
    assert rejoining[2] - 15.0 == pytest.approx(7 * 0.01, abs=0.2)
    other = [s for s, _, _ in timeline.coarse(end_s)["island-0"]]
    assert other == [REJOINING, COMPUTING, DONE]


def test_merges_are_those_of_the_run() -> None:
    cfg, scenario = config(), Scenario(step_time_s=0.1)
    timeline, _ = recorded(cfg, scenario)
    assert len(timeline.merges) == run_once(cfg, scenario, "decoupled", seed=0).tally.merges
    assert {fragment for _, fragment in timeline.merges} == set(range(cfg.sync.fragments))
    times = [time_s for time_s, _ in timeline.merges]
    assert times == sorted(times)


def test_lock_step_waits_on_a_slow_link() -> None:
    cfg = config("network.bandwidth=1mbps")
    timeline, end_s = recorded(cfg, Scenario(step_time_s=0.01), "diloco")
    waited_s = sum(b - a for s, a, b in timeline.fine(end_s)["island-0"] if s == WAITING)
    tally = run_once(cfg, Scenario(step_time_s=0.01), "diloco", seed=0).tally
    assert waited_s == pytest.approx(tally.learners["island-0"][2])
    assert waited_s > 0.5 * end_s


def test_memory_is_bounded() -> None:
    timeline = Timeline(fine_s=1e9)
    for i in range(3 * MAX_TRANSITIONS):
        timeline.begin("x", (DOWN, COMPUTING)[i % 2], float(i))
        timeline.merge(float(i), 0)
    assert len(timeline.coarse(1e9)["x"]) < MAX_TRANSITIONS
    assert len(timeline.merges) == MAX_TRANSITIONS


@pytest.mark.parametrize("faults", [(), (CRASH,)])
def test_files(faults: tuple[Fault, ...], tmp_path: Path) -> None:
    cfg = config("run.steps=60")
    scenario = Scenario(step_time_s=0.1, step_jitter=0.1, faults=faults)
    for ending in (".svg", ".html", ".png"):
        first, second = tmp_path / f"first{ending}", tmp_path / f"second{ending}"
        for path in (first, second):
            draw(path, cfg, scenario, ["data_parallel", "decoupled"], seed=3)
        assert first.read_bytes() == second.read_bytes()
    text = "".join(ET.parse(tmp_path / "first.svg").getroot().itertext())
    assert all(word in text for word in ("island-0", "island-1", "data_parallel", "decoupled", "compute utilization"))
    assert ("the whole run" in text) == bool(faults)
    page = (tmp_path / "first.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(ConfigError, match=r"\.png"):
        draw(tmp_path / "x.pdf", cfg, scenario, ["decoupled"], seed=0)
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(tmp_path / "none" / "x.svg", cfg, scenario, ["decoupled"], seed=0)
