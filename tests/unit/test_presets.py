"""Warnings about outer settings: silent where it was measured well, one line where it was not."""

from __future__ import annotations

import pytest

from diloco_cli.config.compose import compose
from diloco_cli.config.presets import grace_step_s, preset_warnings
from diloco_cli.config.schema import Config, IslandNetwork, MergeRule


def good() -> Config:
    """The best of what was measured (docs/outer-presets.md)."""
    cfg = Config()
    cfg.outer.lr, cfg.outer.momentum, cfg.outer.merge = 0.7, 0.5, MergeRule.rda
    cfg.sync.inner_steps, cfg.sync.overlap_steps, cfg.sync.quorum = 24, 8, 3
    return cfg


def test_what_was_measured_best_is_silent() -> None:
    assert preset_warnings(good()) == []


def test_the_recipe_that_runs_by_default_is_silent() -> None:
    assert preset_warnings(compose([])) == []


@pytest.mark.parametrize(
    ("lr", "momentum", "inner_steps", "warned"),
    [(0.7, 0.9, 24, True), (0.7, 0.9, 199, True), (0.7, 0.9, 200, False), (1.0, 0.0, 24, False), (1.0, 0.5, 24, False)],
)
def test_a_strong_outer_step_at_short_h_is_warned_of(
    lr: float, momentum: float, inner_steps: int, warned: bool
) -> None:
    cfg = good()
    cfg.outer.lr, cfg.outer.momentum, cfg.sync.inner_steps = lr, momentum, inner_steps
    assert any(line.startswith("outer.lr=") for line in preset_warnings(cfg)) is warned


def test_plain_sgd_has_no_momentum_to_warn_of() -> None:
    cfg = compose(["outer=sgd", "outer.momentum=0.9"])
    assert not any(line.startswith("outer.lr=") for line in preset_warnings(cfg))


def test_a_minority_quorum_without_grace_is_warned_of_with_the_step_time_that_opens_it() -> None:
    cfg = good()
    cfg.sync.quorum, cfg.sync.overlap_steps = 1, 2
    # 2 x 40 ms down, 40 ms up, in 2 - 1/2 steps.
    assert grace_step_s(cfg) == pytest.approx(0.08)
    (line,) = preset_warnings(cfg)
    assert "80 ms" in line
    assert "sync.quorum=1 of 4" in line
    cfg.network.latency = "0.2ms"
    assert preset_warnings(cfg) == []


def test_the_longest_link_decides_about_grace() -> None:
    cfg = good()
    cfg.network.latency = "1ms"
    cfg.network.named["island-2"] = IslandNetwork(latency="100ms")
    assert grace_step_s(cfg) == pytest.approx(0.3 / 7.5)


def test_a_majority_quorum_needs_no_grace() -> None:
    cfg = good()
    cfg.sync.overlap_steps = 1
    assert preset_warnings(cfg) == []


def test_a_quorum_of_all_ends_with_the_first_loss() -> None:
    cfg = good()
    cfg.sync.quorum = 4
    (line,) = preset_warnings(cfg)
    assert "as soon as one island is lost" in line


def test_everything_that_was_not_measured_is_in_one_line() -> None:
    cfg = good()
    cfg.model.dim, cfg.model.name = 256, "small"
    cfg.islands.count, cfg.sync.inner_steps = 8, 96
    cfg.sync.quorum = 6
    (line,) = preset_warnings(cfg)
    assert "model small, 8 islands, sync.inner_steps=96" in line


@pytest.mark.parametrize("algorithm", ["diloco", "streaming"])
def test_other_algorithms_and_single_islands_are_not_ours(algorithm: str) -> None:
    assert preset_warnings(compose([f"algorithm={algorithm}", "outer.momentum=0.9"])) == []
    assert preset_warnings(compose(["islands.count=1", "sync.quorum=1", "outer.momentum=0.9"])) == []
