"""What options come to: overrides, step times, failures; with the arithmetic done again by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from diloco_cli.config.compose import compose, group_options
from diloco_cli.config.schema import Config
from diloco_cli.core.faults import Fault
from diloco_cli.errors import ConfigError
from diloco_cli.run.settings import fault_plan
from diloco_cli.sim import options
from diloco_cli.sim.options import Asked
from diloco_cli.sim.scenario import Scenario, fragment_sizes

PRESETS = [name for name in group_options("model") if name not in ("custom", "huggingface")]


@functools.cache
def config(*overrides: str) -> Config:
    return compose(list(overrides), None)


def scenario(*overrides: str, **asked: Any) -> Scenario:
    return options.scenario(Asked(**asked), config(*overrides), PRESETS)[1]


def test_options_are_overrides_in_front() -> None:
    asked = Asked(islands="6", bandwidth="2 gbps", latency="10ms", model="1b", tokens="3m", seed="5")
    cfg = compose(options.overrides(asked, PRESETS), "thin-links")
    assert cfg.islands.count == 6
    assert cfg.model.name == "1b"
    assert cfg.run.tokens == "3m"
    assert cfg.run.seed == 5
    # The recipe has its own rate up; island-3 keeps its own link.
    for direction in (cfg.link("island-0").up, cfg.link("island-0").down):
        assert direction.rate_bps == 2e9
        assert direction.latency_s == 0.01
    assert cfg.link("island-3").up.rate_bps == 3e6
    assert options.overrides(Asked(), PRESETS) == []


def test_step_time_of_a_chip_is_operations_over_what_it_does() -> None:
    cfg = config("islands.named.island-1.batch=16", "islands.named.island-2.speed=0.5")
    found = scenario(
        "islands.named.island-1.batch=16",
        "islands.named.island-2.speed=0.5",
        chip="h100",
        mfu="50%",
        model="1b",
        chips="32",
    )
    # Asked for a preset, but the configuration here has the tiny model: its size counts.
    parameters = sum(fragment_sizes(cfg, Scenario()))
    expected = 6 * parameters * 8 * 128 / (8 * 989e12 * 0.5)
    assert found.step_s(cfg, "island-0") == pytest.approx(expected)
    assert found.step_s(cfg, "island-1") == pytest.approx(2 * expected)
    assert found.step_s(cfg, "island-2") == pytest.approx(2 * expected)
    assert "989 TFLOP/s (h100, bfloat16) x 50%" in found.notes[0]


def test_a_mixture_of_experts_computes_with_the_chosen_ones_only() -> None:
    dense = config("model.num_experts=0")
    moe = config("model.num_experts=8", "model.experts_per_token=2")
    feed_forward = 3 * dense.model.dim * dense.model.ffn_dim * dense.model.num_layers
    router = 8 * dense.model.dim * dense.model.num_layers
    expected = options.active_parameters(dense, Scenario()) + feed_forward + router
    assert options.active_parameters(moe, Scenario()) == expected


def test_the_assumed_step_time_is_stated_and_never_below_a_small_models() -> None:
    small = scenario()
    assert small.step_s(config(), "island-0") == options.SMALL_STEP_S
    assert "no --step-time or --chip was given" in small.notes[0]
    large = scenario(model="100b")
    assert large.step_s(config(), "island-0") == pytest.approx(6 * 100e9 * 1024 / (989e12 * 0.4))
    assert "h100" in large.notes[0]


def test_chips_are_dealt_out_evenly_and_fail_one_by_one() -> None:
    few = scenario(chips="10", mtbi="100h", repair="5min")
    assert few.chips == {"island-0": 3, "island-1": 3, "island-2": 2, "island-3": 2}
    assert few.random_faults is not None
    assert few.interruptions is None
    assert few.random_faults.mean_time_between_s == pytest.approx(100 * 3600 * 4 / 10)
    assert few.random_faults.mean_repair_s == 300
    many = scenario(chips="4096", mtbi="100h", repair="5min")
    assert many.random_faults is None
    assert many.interruptions is not None
    assert (many.interruptions.mtbi_s, many.interruptions.return_s) == (360_000, 300)
    assert scenario(chips="1024", mtbi="1h").interruptions is None
    assert scenario(chips="1028", mtbi="1h").interruptions is not None


def test_the_plan_of_the_configuration_is_what_is_simulated() -> None:
    events = "failures.events=[{at: step 9, kind: partition, link: island-2}, {at: 2s, kind: hang, island: island-0}]"
    found = scenario(events)
    assert found.faults == (
        Fault(kind="hang", target="island-0", at_s=2.0),
        Fault(kind="partition", target="island-2", at_step=9, duration_s=5.0),
    )
    assert any("is back after 5s" in note for note in found.notes)
    repaired = scenario(events, repair="30s")
    assert [f.duration_s for f in repaired.faults] == [30.0, 5.0]
    assert not any("is back after" in note for note in repaired.notes)
    random = ("failures.random.mean_time_between=2h", "failures.random.repair_time=5min")
    assert scenario(*random).faults == fault_plan(config(*random)) != ()
    assert scenario(*random, "run.seed=1").faults != scenario(*random).faults
    assert scenario(*random, "run.seed=1", "failures.random.seed=0").faults == scenario(*random).faults


def test_hours_set_the_steps_unless_they_were_typed() -> None:
    cfg, found = options.scenario(Asked(hours="2", step_time="1s"), config("run.tokens=1b"), PRESETS)
    assert found.duration_s == 7200
    assert cfg.target_steps() == 7201
    kept, _ = options.scenario(Asked(hours="2", step_time="1s"), config("run.steps=5"), PRESETS, length_typed=True)
    assert kept.target_steps() == 5


def test_algorithms_in_their_order_once_each() -> None:
    asked = Asked(algorithm=("decoupled,data-parallel", "decoupled"))
    assert options.algorithms(asked) == ["data_parallel", "decoupled"]


@pytest.mark.parametrize(("text", "value"), [("0.95", 0.95), ("95%", 0.95), ("1", 1.0), (".5", 0.5), ("12.5 %", 0.125)])
def test_shares(text: str, value: float) -> None:
    assert options.share("--mfu", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["0", "1.01", "-0.5", "95", "101%", "half", "", "nan", "1e-1"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ConfigError, match="not a share"):
        options.share("--mfu", text)
