"""Failure plans: order, independence of chance, the file's round trip, and that each fault is due once."""

from __future__ import annotations

import json
import random

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.validate import FAILURE_KINDS
from diloco_cli.core.faults import KINDS, Due, Fault, describe, draw, from_json, ordered, to_json
from diloco_cli.errors import ConfigError

ISLANDS = [f"island-{i}" for i in range(5)]

times = st.floats(0.0, 1e5) | st.integers(0, 100).map(float)
faults = st.builds(
    lambda moment, kind, **rest: Fault(kind=kind, **moment, **rest),
    moment=times.map(lambda t: {"at_s": t}) | st.integers(1, 100).map(lambda s: {"at_step": s}),
    kind=st.sampled_from(KINDS),
    target=st.sampled_from([*ISLANDS, "syncer"]),
    duration_s=st.none() | times,
    rank=st.none() | st.integers(0, 7),
    factor=st.floats(0.1, 0.9),
    rate_bps=st.none() | st.floats(1e3, 1e10),
    latency_s=st.none() | times,
    loss=st.floats(0.0, 0.9),
    payload=st.sampled_from(["nan", "bytes"]),
)
plans = st.lists(faults, max_size=20)


def drawn(islands: list[str], seed: int, **rates: object) -> tuple[Fault, ...]:
    rules = {"mean_time_between_s": 100.0, "repair_time_s": 10.0, "horizon_s": 2000.0, **rates}
    return draw(islands, lambda island: random.Random(f"{seed}/{island}"), **rules)  # type: ignore[arg-type]


def test_the_configuration_knows_the_same_kinds() -> None:
    assert FAILURE_KINDS == KINDS


@settings(max_examples=examples(200))
@given(plans)
def test_a_plan_is_ordered_and_comes_back_from_json(plan: list[Fault]) -> None:
    found = ordered(plan)
    assert sorted(map(repr, found)) == sorted(map(repr, plan))
    moments = [(f.at_s is None, f.at_s or f.at_step or 0.0) for f in found]
    assert moments == sorted(moments)
    items = to_json(found)
    assert from_json(json.loads(json.dumps(items, allow_nan=False))) == found
    assert all(item.get("loss") != 0.0 and None not in item.values() for item in items)


@settings(max_examples=examples(200))
@given(plans, st.lists(st.tuples(times, st.integers(0, 120)), max_size=10))
def test_each_fault_is_due_once_and_not_before_its_moment(plan: list[Fault], looks: list[tuple[float, int]]) -> None:
    due, taken = Due(plan), []
    now_s, step = 0.0, 0
    for at_s, at_step in looks:
        now_s, step = max(now_s, at_s), max(step, at_step)
        new = due.take(now_s, step)
        assert all((f.at_s is not None and f.at_s <= now_s) or (f.at_step or 1000) <= step for f in new)
        taken += new
        assert due.take(now_s, step) == ()
        assert due.next_s is None or due.next_s > now_s
        assert due.next_step is None or due.next_step > step
    taken += due.take(1e9, 1000)
    assert sorted(map(repr, taken)) == sorted(map(repr, plan))


@pytest.mark.parametrize("distribution", ["exponential", "weibull", "fixed"])
def test_another_island_or_kind_moves_no_time_that_was_drawn(distribution: str) -> None:
    few = drawn(ISLANDS[:2], 7, distribution=distribution)
    more = drawn(ISLANDS, 7, distribution=distribution)
    assert few == tuple(f for f in more if f.target in ISLANDS[:2])
    assert len(few) > 10
    mixed = drawn(ISLANDS[:2], 7, distribution=distribution, kinds=KINDS[:-1])
    assert [(f.at_s, f.target) for f in mixed] == [(f.at_s, f.target) for f in few]
    assert {f.kind for f in mixed} != {"crash"}
    both = [(a.duration_s, b.duration_s) for a, b in zip(few, mixed, strict=True) if b.kind != "corrupt"]
    assert all(a == b for a, b in both)
    assert drawn(ISLANDS, 8, distribution=distribution) != more or distribution == "fixed"


@pytest.mark.parametrize("distribution", ["exponential", "weibull", "fixed"])
def test_means_are_those_that_were_asked_for_and_faults_of_an_island_do_not_overlap(distribution: str) -> None:
    plan = drawn(["a"], 3, distribution=distribution, horizon_s=4e6, kinds=["crash", "slow"])
    ends = [0.0, *((f.at_s or 0) + (f.duration_s or 0) for f in plan)]
    gaps = [(f.at_s or 0.0) - end for f, end in zip(plan, ends, strict=False)]
    assert min(gaps) >= -0.002  # milliseconds are rounded
    assert sum(gaps) / len(gaps) == pytest.approx(100.0, rel=0.03)
    assert sum(f.duration_s or 0 for f in plan) / len(plan) == pytest.approx(10.0, rel=0.03)
    assert sum(f.kind == "slow" for f in plan) / len(plan) == pytest.approx(0.5, abs=0.02)
    assert all((f.at_s or 0) < 4e6 for f in plan)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault(kind="crash", target="island-1", at_s=30.0, rank=0), "at 30 s: island-1 rank 0 crash"),
        (Fault(kind="hang", target="syncer", at_step=200), "at step 200: syncer hang"),
        (
            Fault(kind="slow", target="i", at_s=86399.1234, duration_s=5.0),
            "at 86399.123 s: i slow to 0.5 of its speed for 5 s",
        ),
        (
            Fault(kind="degrade", target="i", at_s=0.5, rate_bps=1e6, latency_s=0.2, loss=0.05, duration_s=2.0),
            "at 0.5 s: i degrade (1 Mbit/s, 200 ms, 0.05 lost) for 2 s",
        ),
        (Fault(kind="corrupt", target="i", at_s=1.0, payload="bytes"), "at 1 s: i corrupt (bytes)"),
    ],
)
def test_a_fault_in_words(fault: Fault, text: str) -> None:
    assert describe(fault) == text


@pytest.mark.parametrize(
    "item", [{"kind": "crash"}, {"kind": "crash", "target": "a", "at_s": 1, "x": 2}, {"kind": "crash", "target": "a"}]
)
def test_what_is_no_plan_is_refused(item: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="fault 0 of the plan cannot be read"):
        from_json([item])
