"""The failure model at scale: cases done by hand, properties, the same bytes from a seed, limits of time and memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.errors import ConfigError
from diloco_cli.sim.scale import FailureModel, Learner, Outcome, expected_goodput, fleet, simulate

MODEL = FailureModel()
SLICE = MODEL.chips_per_slice
# Hours of 100,000 chips in which some 12,000 of them are interrupted.
LONG_HOURS = 12_000 * MODEL.mtbi_s / 100_000 / 3600


def goodput(
    chips: int, learners: int = 1, *, elastic: bool = True, model: FailureModel = MODEL, seed: int = 0
) -> float:
    hours = LONG_HOURS * 100_000 / chips
    return simulate(fleet(chips, learners, elastic=elastic), model, hours=hours, seed=seed).goodput


# ---- by hand -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("learners", [1, 16])
def test_without_interruptions_nothing_is_lost(learners: int, elastic: bool) -> None:
    model = FailureModel(mtbi_s=math.inf)
    outcome = simulate(fleet(2_400_000, learners, elastic=elastic), model, hours=24, seed=0)
    assert outcome.goodput == pytest.approx(1, abs=1e-12)
    assert (outcome.uptime, outcome.uptime_of_all, outcome.interruptions) == (1, 1, 0)
    assert expected_goodput(fleet(2_400_000, learners, elastic=elastic), model) == 1


@pytest.mark.parametrize("elastic", [True, False])
def test_interruptions_that_cost_nothing_lose_nothing(elastic: bool) -> None:
    model = FailureModel(notice_s=0, shrink_s=0, grow_s=0, return_s=0)
    outcome = simulate(fleet(100_000, 2, elastic=elastic), model, hours=24, seed=0)
    assert outcome.interruptions > 200
    assert outcome.goodput == pytest.approx(1, abs=1e-9)


def test_a_learner_that_cannot_shrink_runs_for_its_mean_time_and_stops_until_the_chip_is_back() -> None:
    model = replace(MODEL, notice_s=5.0, return_s=200.0, grow_s=115.36)
    running_s = 365 * 86400 / 100_000 + 5.0  # 320.36 s
    by_hand = running_s / (running_s + 200.0 + 115.36)
    assert expected_goodput(fleet(100_000, 1, elastic=False), model) == pytest.approx(by_hand, rel=1e-12)
    assert goodput(100_000, elastic=False, model=model) == pytest.approx(by_hand, abs=0.01)


def test_shrinking_alone_costs_its_stop_and_the_slice_that_is_away() -> None:
    """grow_s = 0: each interruption costs one stop of all, and then one slice until it is back."""
    model = FailureModel(notice_s=0, shrink_s=50, grow_s=0, return_s=450, chips_per_slice=5_000)
    rate = 100_000 / model.mtbi_s
    running = 1 / (1 + rate * 50)
    # Slices leave at the rate of a running chip, as a stopped or absent one is not hit: away / up = rate x time away.
    away = rate / 20 * (450 - 50) * running
    assert goodput(100_000, model=model) == pytest.approx(running / (1 + away), abs=0.01)


def test_a_learner_of_one_slice_waits_until_it_is_back() -> None:
    model = FailureModel(notice_s=0, shrink_s=10, grow_s=30, return_s=270, chips_per_slice=100_000)
    assert goodput(100_000, model=model) == pytest.approx(315.36 / (315.36 + 300), abs=0.01)


def test_speed_variance_makes_slices_wait_for_the_slowest() -> None:
    """The slowest of three values spread evenly over [-a, a] is a / 2 above the mean; a = sqrt(3) deviations."""
    model = FailureModel(mtbi_s=math.inf, speed_variance=0.1)
    by_hand = 1 / (1 + math.sqrt(3) * 0.1 / 2)
    for elastic in (True, False):
        assert simulate(fleet(3 * SLICE, 1, elastic=elastic), model, hours=1, seed=0).goodput == pytest.approx(by_hand)
    assert simulate(fleet(3 * SLICE, 3), model, hours=1, seed=0).goodput == pytest.approx(1)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("learners", [1, 4])
@pytest.mark.parametrize("chips", [150_000, 600_000, 2_400_000])
def test_simulation_and_closed_form_agree(chips: int, learners: int, elastic: bool) -> None:
    expected = expected_goodput(fleet(chips, learners, elastic=elastic), MODEL)
    # Exact for learners that cannot shrink (the rest is chance); elastic stops and returns are taken as independent.
    assert goodput(chips, learners, elastic=elastic) == pytest.approx(expected, abs=0.015 if elastic else 0.01)


# ---- properties ----------------------------------------------------------------------------------------------------

models = st.builds(
    FailureModel,
    mtbi_s=st.floats(1e5, 1e9),
    notice_s=st.floats(0, 60),
    shrink_s=st.floats(0, 300),
    grow_s=st.floats(0, 300),
    return_s=st.floats(0, 3600),
    chips_per_slice=st.sampled_from([1, 64, 256, 4096]),
    speed_variance=st.floats(0, 0.2),
)


@settings(max_examples=100, deadline=None)
@given(models, st.integers(1, 500), st.integers(1, 500), st.sampled_from([1, 2, 8]), st.booleans(), st.floats(1, 100))
def test_more_chips_or_more_interruptions_never_help(
    model: FailureModel, slices: int, more: int, learners: int, elastic: bool, longer: float
) -> None:
    """For whole slices, and as long as an interruption's stop costs no less than the growth stop it may save."""
    model = replace(model, shrink_s=model.grow_s + model.shrink_s)

    def expected(num_slices: int, m: FailureModel) -> float:
        return expected_goodput(fleet(num_slices * m.chips_per_slice * learners, learners, elastic=elastic), m)

    base = expected(slices, model)
    assert 0 < base <= 1
    assert expected(slices + more, model) <= base + 1e-12
    assert expected(slices, replace(model, mtbi_s=model.mtbi_s * longer)) >= base - 1e-12


def test_more_chips_or_more_interruptions_never_help_in_simulation() -> None:
    for elastic in (True, False):
        by_chips = [goodput(chips, elastic=elastic) for chips in (37_500, 150_000, 600_000, 2_400_000)]
        assert by_chips == sorted(by_chips, reverse=True)
        by_mtbi = [
            simulate(
                fleet(400_000, 2, elastic=elastic), replace(MODEL, mtbi_s=days * 86400.0), hours=48, seed=0
            ).goodput
            for days in (50, 365, 2000, 20000)
        ]
        assert by_mtbi == sorted(by_mtbi)


@settings(max_examples=60, deadline=None)
@given(models, st.integers(1, 3000), st.integers(1, 8), st.booleans(), st.integers(0, 5))
def test_every_simulation_ends_with_shares(
    model: FailureModel, chips: int, learners: int, elastic: bool, seed: int
) -> None:
    outcome = simulate(fleet(chips + learners, learners, elastic=elastic), model, hours=200, seed=seed)
    assert 0 <= outcome.goodput <= 1 + 1e-9
    assert 0 <= outcome.uptime_of_all <= outcome.uptime <= 1 + 1e-9
    # No learner does more than it would while it trains.
    assert outcome.goodput <= outcome.uptime + 1e-9


def test_one_decoupled_learner_is_elastic_data_parallel() -> None:
    """Data parallel over 8 slices of a pod is the fleet of one; only a second learner makes it decoupled."""
    alone = simulate(fleet(8 * SLICE, 1), MODEL, hours=24 * 365, seed=3)
    by_hand = simulate([Learner(name="learner-0", chips=8 * SLICE, elastic=True)], MODEL, hours=24 * 365, seed=3)
    assert alone == by_hand
    assert alone.uptime == alone.uptime_of_all
    assert goodput(600_000, 8) > goodput(600_000, 1) + 0.1


def test_who_is_never_interrupted_changes_nothing_for_the_others() -> None:
    others = fleet(400_000, 4)
    quiet = Learner(name="a-quiet-one", chips=5_000, mtbi_s=math.inf)
    without = simulate(others, MODEL, hours=48, seed=7)
    together = simulate([others[0], quiet, *others[1:]], MODEL, hours=48, seed=7)
    assert together.learners[1] == pytest.approx(1, abs=1e-12)
    assert (together.learners[0], *together.learners[2:]) == without.learners
    assert together.interruptions == without.interruptions
    assert together.uptime == pytest.approx(1)


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    code = (
        "from diloco_cli.sim.scale import *\n"
        "for e in (True, False): print(simulate(fleet(2_400_000, 16, elastic=e), FailureModel(), hours=6, seed=11))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": h}, capture_output=True, check=True
        ).stdout
        for h in ("0", "1", "4711")
    }
    assert len(outputs) == 1
    here = [simulate(fleet(2_400_000, 16, elastic=e), MODEL, hours=6, seed=11) for e in (True, False)]
    assert outputs.pop().decode().splitlines() == [repr(outcome) for outcome in here]
    assert here[0] != simulate(fleet(2_400_000, 16), MODEL, hours=6, seed=12)


# ---- limits --------------------------------------------------------------------------------------------------------


def _peak_bytes(hours: float) -> tuple[int, Outcome]:
    tracemalloc.start()
    outcome = simulate(fleet(2_400_000, 16), MODEL, hours=hours, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, outcome


def test_a_day_of_2_4_million_chips_is_quick_and_small_and_a_longer_time_takes_no_more_memory() -> None:
    started = time.perf_counter()
    simulate(fleet(2_400_000, 16), MODEL, hours=24, seed=0)
    assert time.perf_counter() - started < 10
    short, _ = _peak_bytes(2)
    long, outcome = _peak_bytes(40)
    assert outcome.interruptions > 5_000
    assert long < 1 << 20
    assert long < 1.5 * short


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FailureModel(mtbi_s=0),
        lambda: FailureModel(mtbi_s=math.nan),
        lambda: FailureModel(shrink_s=-1),
        lambda: FailureModel(return_s=math.inf),
        lambda: FailureModel(chips_per_slice=0),
        lambda: Learner(name="x", chips=0),
        lambda: fleet(3, 4),
        lambda: fleet(3, 0),
        lambda: simulate([], MODEL, hours=1, seed=0),
        lambda: simulate(fleet(8, 1) * 2, MODEL, hours=1, seed=0),
        lambda: simulate(fleet(8, 1), MODEL, hours=0, seed=0),
    ],
)
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        wrong()
