"""core.ledger: every token has one fate; goodput's share and uptime by hand."""

from __future__ import annotations

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.core.ledger import LATE, LOST, MERGED, REFUSED, Ledger, Uptime


def test_by_hand() -> None:
    ledger = Ledger(2)
    ledger.join("a")
    ledger.join("b")
    ledger.processed("a", 100)
    ledger.processed("b", 50)
    ledger.settle("a", 0, MERGED, 60)
    ledger.settle("a", 0, LATE, 10, overlap=True)
    ledger.settle("a", 1, LATE, 20)
    ledger.settle("b", 0, REFUSED, 5)
    assert ledger.of_fragment(0) == {
        "processed": 150, MERGED: 60, LATE: 10, REFUSED: 5, LOST: 0, "pending": 75,
    }  # fmt: skip
    assert ledger.of_fragment(1) == {
        "processed": 150, MERGED: 0, LATE: 20, REFUSED: 0, LOST: 0, "pending": 130,
    }  # fmt: skip
    ledger.leave("b")
    assert ledger.of_fragment(0)["lost"] == 45
    assert ledger.of_fragment(1)["lost"] == 50
    assert ledger.processed_tokens == 150
    # 300 token-fragments; wasted: 20 late beyond overlap, 5 refused, 95 lost.
    assert ledger.useful_share == pytest.approx(1 - 120 / 300)
    # `late: next`: the 20 late ones of fragment 1 are merged after all.
    ledger.reclaim(1, LATE, 20)
    assert ledger.of_fragment(1)[MERGED] == 20
    assert ledger.of_fragment(1)[LATE] == 0
    assert ledger.useful_share == pytest.approx(1 - 100 / 300)


def test_nothing_processed() -> None:
    assert Ledger(3).useful_share is None
    assert Ledger(3).summary() == {"processed": 0, MERGED: 0, LATE: 0, REFUSED: 0, LOST: 0, "pending": 0}


def test_contribution_overtakes_the_report_of_its_steps() -> None:
    ledger = Ledger(1)
    ledger.join("a")
    ledger.settle("a", 0, MERGED, 30)
    assert ledger.of_fragment(0)["processed"] == 30
    ledger.processed("a", 20)  # an older report
    assert ledger.of_fragment(0)["processed"] == 30
    ledger.processed("a", 40)
    assert ledger.of_fragment(0)["pending"] == 10


def test_a_second_stay_has_its_own_account() -> None:
    ledger = Ledger(1)
    ledger.join("a")
    ledger.processed("a", 10)
    ledger.join("a")
    assert ledger.of_fragment(0)["lost"] == 10
    ledger.processed("a", 5)
    assert ledger.of_fragment(0) == {"processed": 15, MERGED: 0, LATE: 0, REFUSED: 0, LOST: 10, "pending": 5}
    ledger.leave("nobody")


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "processed", MERGED, LATE, REFUSED]),
        st.sampled_from("abc"),
        st.integers(0, 2),
        st.integers(0, 1000),
    )
)


@settings(max_examples=examples(150))
@given(ACTIONS)
def test_accounts_always_add_up(actions: list[tuple[str, str, int, int]]) -> None:
    ledger = Ledger(3)
    here: set[str] = set()
    for action, learner, fragment, tokens in actions:
        if action == "join":
            ledger.join(learner)
            here.add(learner)
        elif action == "leave":
            ledger.leave(learner)
            here.discard(learner)
        elif learner in here and action == "processed":
            ledger.processed(learner, tokens)
        elif learner in here:
            ledger.settle(learner, fragment, action, tokens)
        for f in range(3):
            row = ledger.of_fragment(f)
            assert row["processed"] == sum(n for fate, n in row.items() if fate != "processed")
            assert min(row.values()) >= 0
        summary = ledger.summary()
        assert summary["processed"] == sum(n for fate, n in summary.items() if fate != "processed")
        share = ledger.useful_share
        assert share is None or 0.0 <= share <= 1.0
    for learner in here:
        ledger.leave(learner)
    assert all(ledger.of_fragment(f)["pending"] == 0 for f in range(3))


def test_uptime_by_hand() -> None:
    uptime = Uptime()
    assert uptime.share(5.0) is None
    uptime.change(10.0, 0)
    uptime.change(10.0, 2)
    assert uptime.share(10.0) is None
    assert uptime.share(20.0) == 1.0
    uptime.change(20.0, 1)
    uptime.change(30.0, 0)
    assert uptime.share(40.0) == pytest.approx(20 / 30)
    uptime.change(50.0, 1)
    assert uptime.share(60.0) == pytest.approx(30 / 50)
