"""The reservation rule of emulated links, by properties and without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.run.links import BURST_S, CHUNK_BYTES, LinkRule, LinkShaper

# (seconds since the one before, bytes)
arrivals = st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 300_000)), min_size=1, max_size=60)
rates = st.floats(1e5, 1e10)


def run(rule: LinkRule, arrivals) -> list[tuple[float, int, float, float]]:
    now, rows = 0.0, []
    for gap, size in arrivals:
        now += gap
        rows.append((now, size, *rule.reserve(now, size)))
    return rows


@given(arrivals=arrivals, rate=rates, latency=st.floats(0, 1), jitter=st.floats(0, 1), seed=st.integers(0, 9))
def test_order_latency_and_rate(arrivals, rate, latency, jitter, seed):
    rows = run(LinkRule(rate, latency, jitter, seed), arrivals)
    departs = [depart for _, _, depart, _ in rows]
    releases = [release for _, _, _, release in rows]
    assert departs == sorted(departs)
    assert releases == sorted(releases), "jitter must keep the order"
    for (now, _, depart, release), earlier in zip(rows, [float("-inf"), *releases], strict=False):
        assert depart >= now
        assert release >= depart + latency
        assert release <= max(depart + latency + jitter, earlier) + 1e-9
    # Over any window from one departure to another: the rate, the burst and the chunk that opens the window.
    for first in range(len(rows)):
        sent = 0
        for last in range(first, len(rows)):
            sent += rows[last][1] * 8
            window = departs[last] - departs[first]
            allowed = rate * (window + BURST_S) + rows[first][1] * 8
            assert sent <= allowed * (1 + 1e-6) + 1


@given(arrivals=arrivals, rate=rates, latency=st.floats(0, 1))
def test_a_busy_link_wastes_nothing(arrivals, rate, latency):
    """All handed over at once: the last departs exactly when the bits are through, less the credit; latency or not."""
    rows = run(LinkRule(rate, latency), [(0.0, size) for _, size in arrivals])
    bits = sum(size for _, size in arrivals) * 8
    assert rows[-1][2] == pytest.approx(max(bits / rate - BURST_S, 0.0), abs=1e-6)


@given(arrivals)
def test_unlimited_without_latency_passes_at_once(arrivals):
    for now, _, depart, release in run(LinkRule(None), arrivals):
        assert depart == release == now


@given(rates)
def test_idling_saves_no_more_than_the_burst(rate):
    rule = LinkRule(rate)
    rule.reserve(0.0, 1000)
    size = int(rate) // 8  # one second's worth
    depart, _ = rule.reserve(1e6, size)
    assert depart - 1e6 == pytest.approx(size * 8 / rate - BURST_S, abs=1e-3)


def test_jitter_follows_its_seed():
    def times(seed: int) -> list[float]:
        rule = LinkRule(None, 0.01, 0.01, seed)
        return [rule.reserve(float(i), 1)[1] for i in range(20)]

    assert times(1) == times(1)
    assert times(1) != times(2)


@pytest.mark.parametrize(
    ("rate", "chunk"), [(None, CHUNK_BYTES), (3e9, CHUNK_BYTES), (200e6, 50_000), (4e6, 4096), (1e6, 2500), (1e4, 64)]
)
def test_chunks_are_two_milliseconds_within_bounds(rate, chunk):
    assert LinkShaper(rate).chunk_bytes == chunk
