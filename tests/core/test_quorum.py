"""core.quorum: the decision as a table, the grace window against its formula, and properties of both."""

from __future__ import annotations

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.core.quorum import Average, decide, grace_window_s

CASES = [
    # quorum, counted, awaited, grace_until, now, wait_for_all -> merge, words, until
    (1, "", "ab", None, 0.0, False, False, "quorum 0/1", None),
    (2, "a", "b", None, 0.0, False, False, "quorum 1/2", None),
    (2, "a", "", None, 0.0, False, False, "quorum 1/2", None),
    (1, "a", "b", 5.0, 4.9, False, False, "grace window open for b", 5.0),
    (1, "a", "b", 5.0, 5.0, False, True, "without b", None),
    (1, "a", "bc", 5.0, 9.0, False, True, "without b, c", None),
    (1, "a", "", 5.0, 0.0, False, True, "all live", None),
    (2, "ab", "", 5.0, 0.0, False, True, "all live", None),
    (2, "a", "b", 5.0, 9.0, False, False, "quorum 1/2", None),  # one left after the window was opened
    (1, "a", "b", None, 9.0, True, False, "waiting for b", None),
    (2, "a", "", None, 9.0, True, True, "all live", None),
    (2, "", "", None, 9.0, True, True, "all live", None),
]


@pytest.mark.parametrize(("quorum", "counted", "awaited", "until", "now", "everybody", "merge", "words", "wait"), CASES)
def test_decisions(
    quorum: int,
    counted: str,
    awaited: str,
    until: float | None,
    now: float,
    everybody: bool,
    merge: bool,
    words: str,
    wait: float | None,
) -> None:
    decision = decide(
        now_s=now,
        quorum=quorum,
        counted=set(counted),
        awaited=set(awaited),
        grace_until_s=until,
        wait_for_all=everybody,
    )
    assert decision.merge == merge
    assert words in decision.reason
    assert decision.until_s == wait


@settings(max_examples=examples(100))
@given(
    st.sets(st.sampled_from("abcde")),
    st.sets(st.sampled_from("vwxyz")),
    st.integers(1, 5),
    st.floats(0, 10),
    st.floats(0, 10),
)
def test_never_below_quorum_and_never_longer_than_the_window(
    counted: set[str], awaited: set[str], quorum: int, now: float, until: float
) -> None:
    decision = decide(
        now_s=now, quorum=quorum, counted=counted, awaited=awaited, grace_until_s=until, wait_for_all=False
    )
    assert decision.merge == (len(counted) >= quorum and (not awaited or now >= until))
    if decision.until_s is not None:
        assert decision.until_s > now


@pytest.mark.parametrize(
    ("gamma", "tau", "step", "quorum", "sync", "window"),
    [
        (0.9, 2, 1.0, 0.5, 0.5, 0.9),
        (0.9, 2, 1.0, 1.5, 0.5, 0.0),
        (0.9, 2, 1.0, 9.0, 9.0, 0.0),
        (0.0, 2, 1.0, 0.0, 0.0, 0.0),
        (0.5, 10, 0.1, 0.0, 0.2, 0.4),
        (0.9, 0, 1.0, 0.0, 0.0, 0.0),
        # With no measurement yet there is no window.
        (0.9, 2, None, 0.5, 0.5, 0.0),
        (0.9, 2, 1.0, None, 0.5, 0.0),
        (0.9, 2, 1.0, 0.5, None, 0.0),
    ],
)
def test_window(
    gamma: float, tau: int, step: float | None, quorum: float | None, sync: float | None, window: float
) -> None:
    got = grace_window_s(
        grace_safety=gamma, overlap_steps=tau, step_time_s=step, quorum_time_s=quorum, sync_time_s=sync
    )
    assert got == pytest.approx(window)


@given(st.floats(0, 1), st.integers(0, 50), st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_window_is_between_zero_and_the_slack(gamma: float, tau: int, step: float, quorum: float, sync: float) -> None:
    got = grace_window_s(
        grace_safety=gamma, overlap_steps=tau, step_time_s=step, quorum_time_s=quorum, sync_time_s=sync
    )
    assert 0.0 <= got <= gamma * tau * step


def test_average_forgets() -> None:
    average = Average()
    assert average.value is None
    average.add(1.0)
    assert average.value == 1.0
    average.add(2.0)
    assert average.value == pytest.approx(1.2)
    average.add(1000.0)  # an outlier
    for _ in range(60):
        average.add(1.0)
    assert average.value == pytest.approx(1.0, abs=0.01)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_average_stays_within_what_was_measured(values: list[float]) -> None:
    average = Average()
    for value in values:
        average.add(value)
    assert average.value is not None
    assert min(values) * (1 - 1e-9) <= average.value <= max(values) * (1 + 1e-9)
