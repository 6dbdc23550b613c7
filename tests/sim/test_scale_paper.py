"""The papers' tables (../shared/oracles): our copies are theirs, and our models meet them; the step model by hand."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.errors import ConfigError
from diloco_cli.sim import paper
from diloco_cli.sim.paper import Cell, reproduce
from diloco_cli.sim.scale import YEAR_S, FailureModel, fleet, simulate
from diloco_cli.sim.utilization import Method, StepModel, compute_utilization, cycle_s, needed_gbps, read_off_grid

ORACLES = Path(__file__).resolve().parents[2].parent / "shared" / "oracles"


def oracle(name: str) -> dict[str, Any]:
    if not ORACLES.is_dir():
        pytest.skip(f"NO ORACLES: {ORACLES} is not there, so the copied figures are compared with nothing")
    return json.loads((ORACLES / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def goodput() -> list[Cell]:
    return reproduce("goodput")


@pytest.fixture(scope="module")
def utilization() -> list[Cell]:
    return reproduce("utilization")


def rows(cells: list[Cell]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for cell in cells:
        found.setdefault(cell.row, []).append(cell.ours)
    return found


def known(cells: list[Cell]) -> list[tuple[float, float]]:
    return [(cell.paper, cell.ours) for cell in cells if cell.paper is not None]


# ---- our copies of the figures are the oracles' --------------------------------------------------------------------


def test_copied_goodput() -> None:
    table = oracle("goodput")
    assert tuple(table["chips"]) == paper.GOODPUT_CHIPS
    assert table["mean_time_between_interruptions_per_chip_s"] == YEAR_S == FailureModel().mtbi_s
    theirs = {(r["system"], r["learners"], r["elastic"]): tuple(r["goodput"]) for r in table["rows"]}
    assert theirs == {k: v for k, v in paper.GOODPUT.items() if v is not None}


def test_copied_utilization() -> None:
    table = oracle("compute_utilization")
    assert tuple(table["compute_utilization"]) == paper.UTILIZATIONS
    assert table["inner_steps_H"] == paper.TABLE_INNER_STEPS
    assert table["fragment_layers"] == paper.FRAGMENT_LAYERS
    assert {size: StepModel(**m) for size, m in table["models"].items()} == paper.TABLE_MODELS
    theirs = {(size, method): tuple(v) for size, row in table["rows"].items() for method, v in row.items()}
    assert theirs == paper.NEEDED_GBPS


def test_copied_experiments() -> None:
    mixed = oracle("heterogeneous")["rows"]
    assert {(r["quorum"], r["grace"]): r["goodput"] for r in mixed} == paper.HETEROGENEOUS
    borrowed = oracle("scavenging")
    assert tuple(borrowed["extra_compute_percent"]) == paper.EXTRA_PERCENT
    assert {name: tuple(borrowed[name]) for name in paper.SCAVENGING} == paper.SCAVENGING


# ---- the tables are met --------------------------------------------------------------------------------------------


def test_goodput_is_met(goodput: list[Cell]) -> None:
    errors = [abs(theirs - ours) for theirs, ours in known(goodput)]
    assert len(errors) == 15
    assert sum(errors) / len(errors) <= 1.5
    assert max(errors) <= 3


def test_left_out_goodput_follows(goodput: list[Cell]) -> None:
    """More learners are never worse, more chips never better, and M learners are about one on an M-th of the chips."""
    ours = rows(goodput)
    order = ["data_parallel", "data_parallel elastic", *(f"decoupled_diloco M={m}" for m in (2, 4, 8, 16))]
    assert list(ours) == order
    for fewer, more in pairwise(order):
        assert all(a < b for a, b in zip(ours[fewer], ours[more], strict=True)), (fewer, more)
    for values in ours.values():
        assert all(a > b for a, b in pairwise(values))
    for m in (2, 4, 8, 16):
        alone = [
            100 * simulate(fleet(chips // m, 1), FailureModel(), hours=8000 * YEAR_S * m / chips / 3600, seed=0).goodput
            for chips in paper.GOODPUT_CHIPS
        ]
        assert ours[f"decoupled_diloco M={m}"] == pytest.approx(alone, abs=1)


def test_uptime_is_about_all_with_four_or_more_learners() -> None:
    for learners in (4, 8, 16):
        outcome = simulate(fleet(2_400_000, learners), FailureModel(), hours=24, seed=0)
        assert outcome.uptime > 0.98
    assert simulate(fleet(2_400_000, 1), FailureModel(), hours=24, seed=0).uptime < 0.5


def test_utilization_is_met(utilization: list[Cell]) -> None:
    ratios = [max(theirs / ours, ours / theirs) for theirs, ours in known(utilization)]
    assert len(ratios) == 35
    assert sum(r <= 1.21 for r in ratios) >= 0.9 * len(ratios)
    assert max(ratios) <= 1.21**2


def test_left_out_utilization_follows(utilization: list[Cell]) -> None:
    ours = rows(utilization)
    assert len(ours) == 15
    for size in paper.TABLE_MODELS:
        names = ("data_parallel", "diloco", "streaming", "streaming_overlap", "streaming_overlap_fp4")
        for worse, better in pairwise(names):
            assert all(a >= b for a, b in zip(ours[f"{size} {worse}"], ours[f"{size} {better}"], strict=True))
    for values in ours.values():
        assert all(a <= b for a, b in pairwise(values))


def test_mixed_chips_are_met() -> None:
    cells = reproduce("heterogeneous")
    assert all(abs(theirs - ours) <= 5 for theirs, ours in known(cells))
    all_of_them, one, one_and_grace = (cell.ours for cell in cells)
    assert all_of_them < one == one_and_grace == 100


def test_borrowed_capacity_is_met() -> None:
    cells = reproduce("scavenging")
    assert len(known(cells)) == 10
    assert all(abs(theirs - ours) <= 0.05 for theirs, ours in known(cells))
    ours = rows(cells)
    assert all(d < p for d, p in zip(ours["decoupled_diloco"][1:], ours["data_parallel"][1:], strict=True))
    assert all(a > b for a, b in pairwise(ours["decoupled_diloco"]))
    # As in the paper: a little borrowed capacity makes data parallel slower than none, a lot makes it faster.
    assert ours["data_parallel"][1] > 1 > ours["data_parallel"][4]


def test_reproducing_twice_gives_the_same_cells() -> None:
    assert reproduce("heterogeneous") == reproduce("heterogeneous")
    with pytest.raises(ConfigError, match="no table 'x'"):
        reproduce("x")


# ---- the small models by hand --------------------------------------------------------------------------------------


def test_waiting_for_a_quorum() -> None:
    """Three learners of 1, 2 and 5 s: two wait for the second or for the last; with a quorum of one nobody waits."""
    for quorum, share in ((1, 1.0), (2, 8 / 9), (3, 8 / 15)):
        assert paper.quorum_goodput((1.0, 2.0, 5.0), quorum=quorum, speed_variance=0, rounds=3) == pytest.approx(share)
    for quorum in (0, 4):
        with pytest.raises(ConfigError):
            paper.quorum_goodput((1.0, 2.0, 5.0), quorum=quorum, speed_variance=0)


def test_borrowing_one_piece() -> None:
    """Half of the time one piece as big as the job is there: two states, each equally likely after each other."""
    spare = paper.SpareCapacity(share_of_time=0.5, mean_amount=1e12, hold_s=100, piece=1.0)
    model = FailureModel(shrink_s=20, grow_s=10)
    # Held spans: empty after empty 1, empty after a shrink 0.8, full after a growth 2 x 0.9, full after full 2.
    together = (1 + 0.8 + 1.8 + 2) / 4
    apart = (1 + 1 + 1.9 + 2) / 4
    assert paper.training_time(1.0, decoupled=False, spare=spare, model=model) == pytest.approx(1 / together)
    assert paper.training_time(1.0, decoupled=True, spare=spare, model=model) == pytest.approx(1 / apart)
    for decoupled in (True, False):
        assert paper.training_time(0.0, decoupled=decoupled, spare=spare, model=model) == 1


# ---- the step model ------------------------------------------------------------------------------------------------

MODEL = StepModel(parameters=1e9, layers=24, step_time_s=0.1)


def step_by_step(model: StepModel, method: Method, gbps: float, cycles: int) -> float:
    """The last cycle's seconds, by walking over every layer of every step (no shortcut over free steps)."""
    back: dict[tuple[int, int], float] = {}  # (step, layer) -> when it must be and is back
    now = link = 0.0
    starts = []
    part = model.step_time_s / 3 / model.layers
    for step in range(cycles * method.inner_steps):
        if step % method.inner_steps == 0:
            starts.append(now)
        for layer in range(model.layers):
            now = max(now, back.get((step, layer), 0.0)) + part
        for layer in reversed(range(model.layers)):
            now += 2 * part
            fragment = layer % method.fragments
            if step % method.inner_steps == fragment * method.inner_steps // method.fragments:
                link = max(link, now) + model.parameters / model.layers * method.wire_bits / (gbps * 1e9)
                back[step + 1 + method.overlap_steps, layer] = link
    return now - starts[-1]


@settings(max_examples=80, deadline=None)
@given(
    layers=st.integers(1, 12),
    inner_steps=st.integers(1, 12),
    fragments=st.integers(1, 14),
    overlap=st.integers(0, 3),
    gbps=st.floats(0.5, 2000),
)
def test_shortcuts_change_nothing(layers: int, inner_steps: int, fragments: int, overlap: int, gbps: float) -> None:
    model = StepModel(parameters=1e9, layers=layers, step_time_s=0.1)
    method = Method(inner_steps=inner_steps, fragments=fragments, overlap_steps=overlap)
    assert cycle_s(model, method, gbps) == pytest.approx(step_by_step(model, method, gbps, 3), rel=1e-9)


def test_without_overlap_it_is_compute_over_compute_plus_transfer() -> None:
    """One layer cannot leave before the backward pass ends: 16 Gbit at 10 Gbit/s are 1.6 s after 100 steps of 0.1 s."""
    one_layer = StepModel(parameters=1e9, layers=1, step_time_s=0.1)
    assert compute_utilization(one_layer, Method(inner_steps=100), 10) == pytest.approx(10 / 11.6, rel=1e-6)
    assert needed_gbps(one_layer, Method(inner_steps=100), 0.5) == pytest.approx(1.6, rel=1e-5)


def test_data_parallel_by_hand() -> None:
    """Layers leave one by one; the step ends with the last transfer, which starts after all others or after compute."""
    for gbps in (50.0, 160.0, 200.0, 700.0, 5000.0):
        on_link = 16 / 24 / gbps
        by_hand = max(0.1 / 3 + 0.2 / 3 / 24 + 24 * on_link, 0.1 + on_link)
        assert cycle_s(MODEL, Method(inner_steps=1), gbps) == pytest.approx(by_hand)


def test_more_bandwidth_longer_overlap_and_fewer_bits_never_hurt() -> None:
    grid = [0.2 * 1.3**k for k in range(25)]
    streaming = [Method(inner_steps=100, fragments=8, overlap_steps=t) for t in (0, 1, 2)]
    for method in (*streaming, Method(inner_steps=100), Method(inner_steps=1)):
        values = [compute_utilization(MODEL, method, gbps) for gbps in grid]
        assert all(a <= b + 1e-12 for a, b in pairwise(values))
        assert compute_utilization(MODEL, method, 1e9) == pytest.approx(1, abs=1e-6)
    for gbps in grid:
        values = [compute_utilization(MODEL, method, gbps) for method in streaming]
        assert all(a <= b + 1e-12 for a, b in pairwise(values))
    half = Method(inner_steps=100, wire_bits=8)
    assert needed_gbps(MODEL, half, 0.9) == pytest.approx(
        needed_gbps(MODEL, Method(inner_steps=100), 0.9) / 2, rel=1e-5
    )


def test_reading_off_the_grid() -> None:
    assert read_off_grid(1.0) == pytest.approx(0.954, abs=1e-3)
    assert read_off_grid(1.06) == pytest.approx(1.151, abs=1e-3)
    assert read_off_grid(1e-9) == pytest.approx(0.1)
    assert read_off_grid(1e9) == pytest.approx(1000)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: StepModel(parameters=1e9, layers=24, step_time_s=0),
        lambda: Method(inner_steps=0),
        lambda: Method(inner_steps=1, wire_bits=0),
        lambda: compute_utilization(MODEL, Method(inner_steps=1), 0),
        lambda: compute_utilization(MODEL, Method(inner_steps=1), math.nan),
        lambda: needed_gbps(MODEL, Method(inner_steps=1), 1.0),
    ],
)
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        wrong()
