"""Order of events, streams of chance, and links against the rule that real links follow."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.run import links, secure
from diloco_cli.sim import network
from diloco_cli.sim.engine import ARRIVAL, STEP, TIMER, Engine, Streams
from diloco_cli.sim.network import SimLink


def test_events_run_by_time_then_priority_then_order_of_asking() -> None:
    engine, seen = Engine(), []
    for when, priority, name in [(1.0, STEP, "e"), (1.0, TIMER, "d"), (1.0, ARRIVAL, "b"), (1.0, ARRIVAL, "c")]:
        engine.at(when, priority, seen.append, name)
    engine.at(0.5, STEP, lambda: engine.at(0.1, ARRIVAL, seen.append, "a, asked for in the past"))
    assert not engine.run(lambda: False)
    assert seen == ["a, asked for in the past", "b", "c", "d", "e"]
    assert engine.now_s == 1.0


def test_streams_do_not_depend_on_each_other() -> None:
    alone, together = Streams(7), Streams(7)
    together.of("another").random()
    assert [alone.of("a").random() for _ in range(3)] == [together.of("a").random() for _ in range(3)]
    assert Streams(7, 1).of("a").random() != Streams(7, 0).of("a").random() != Streams(8).of("a").random()
    # Fixed for ever: strings seed through SHA-512, not through hash().
    assert Streams(0).of("a").random() == random.Random("0/0/a").random()


@pytest.mark.parametrize("rate_bps", [1e3, 1e5, 1e6, 3e7, 1e9, 1e11])
def test_chunks_and_credit_are_those_of_real_links(rate_bps: float) -> None:
    assert network.chunk_bytes(rate_bps) == links._chunk_bytes(rate_bps)
    assert network.BURST_S == links.BURST_S
    assert network.CHUNK_BYTES == links.CHUNK_BYTES
    assert secure.sealed_bytes(1) - 1 == network.SEAL_BYTES


def by_the_rule(rate_bps: float, latency_s: float, sends: list[tuple[float, int]]) -> list[float]:
    """Arrivals of bulk messages, chunk by chunk through the rule of real links."""
    rule = links.LinkRule(rate_bps, latency_s)
    chunk = links._chunk_bytes(rate_bps)
    arrivals, free_s = [], 0.0
    for sent_s, size in sends:
        now_s = max(sent_s, free_s)
        left = size
        while left > 0:
            now_s, release_s = rule.reserve(now_s, min(chunk, left) + network.SEAL_BYTES)
            left -= chunk
        free_s = now_s
        arrivals.append(release_s)
    return arrivals


def simulated(rate_bps: float, latency_s: float, sends: list[tuple[float, int]], control: list[float]) -> tuple:
    engine, bulk, small = Engine(), {}, {}
    link = SimLink(engine, rate_bps, latency_s, 0.0, random.Random(0))
    for i, (sent_s, size) in enumerate(sends):
        engine.at(sent_s, STEP, link.bulk, i, size, lambda i=i: bulk.__setitem__(i, engine.now_s))
    for i, sent_s in enumerate(control):
        engine.at(sent_s, STEP, link.control, 100, lambda i=i: small.__setitem__(i, engine.now_s))
    engine.run(lambda: False)
    return [bulk[i] for i in range(len(sends))], [small[i] for i in range(len(control))], link


@settings(max_examples=100)
@given(
    st.sampled_from([1e5, 1e6, 1e8]),
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 200_000)), min_size=1, max_size=5),
)
def test_bulk_arrives_when_the_real_rule_says(rate_bps: float, sends: list[tuple[float, int]]) -> None:
    sends.sort(key=lambda s: s[0])
    bulk, _, link = simulated(rate_bps, 0.04, sends, [])
    assert bulk == pytest.approx(by_the_rule(rate_bps, 0.04, sends), abs=1e-6)
    assert link.bytes_sent >= sum(size for _, size in sends)


def test_control_waits_for_one_chunk_of_bulk_and_delays_it_by_its_own_length() -> None:
    rate_bps, size = 1e6, 125_000  # a second of bulk
    alone, _, _ = simulated(rate_bps, 0.0, [(0.0, size)], [])
    bulk, small, _ = simulated(rate_bps, 0.0, [(0.0, size)], [0.1, 0.5])
    chunk_s = network.chunk_bytes(rate_bps) * 8 / rate_bps
    own_s = 100 * 8 / rate_bps
    for sent_s, arrived_s in zip([0.1, 0.5], small, strict=True):
        assert own_s - 1e-9 <= arrived_s - sent_s <= chunk_s + own_s + 1e-9
    assert bulk[0] == pytest.approx(alone[0] + 2 * own_s, abs=1e-6)


def test_unlimited_links_have_latency_only() -> None:
    bulk, small, _ = simulated(math.inf, 0.2, [(0.0, 10**9), (0.0, 10**9)], [0.0])
    assert bulk == pytest.approx([0.2, 0.2])
    assert small == pytest.approx([0.2])


def test_a_newer_bulk_message_takes_the_place_of_one_that_waits() -> None:
    engine, seen = Engine(), []
    link = SimLink(engine, 1e6, 0.0, 0.0, random.Random(0))
    for name in ("under way", "replaced", "newer"):
        link.bulk("fragment 0", 50_000, seen.append, name)
    link.bulk("fragment 1", 50_000, seen.append, "other")
    engine.run(lambda: False)
    assert seen == ["under way", "newer", "other"]


def test_a_cut_holds_everything_up_and_closing_loses_it() -> None:
    engine, seen = Engine(), []
    link = SimLink(engine, 1e6, 0.1, 0.0, random.Random(0))
    link.bulk(0, 125_000, lambda: seen.append(("bulk", engine.now_s)))
    engine.at(0.5, TIMER, link.cut, 10.0)
    engine.at(2.0, TIMER, link.control, 100, lambda: seen.append(("control", engine.now_s)))
    engine.run(lambda: False)
    assert [name for name, _ in seen] == ["control", "bulk"]
    assert all(when >= 10.0 for _, when in seen)
    assert seen[1][1] == pytest.approx(1.1 + 9.5 - network.BURST_S, abs=0.02)
    link.bulk(0, 125_000, seen.append, "lost")
    link.close()
    engine.run(lambda: False)
    assert len(seen) == 2


def test_jitter_keeps_the_order() -> None:
    engine, seen = Engine(), []
    link = SimLink(engine, 1e7, 0.01, 0.5, random.Random(3))
    for i in range(50):
        engine.at(0.01 * i, STEP, link.control, 100, seen.append, i)
    engine.run(lambda: False)
    assert seen == list(range(50))
