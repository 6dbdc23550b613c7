"""When something is started again and when it counts as hung: run.supervisor, without a process or a clock."""

from __future__ import annotations

import pytest

from diloco_cli.errors import DilocoError
from diloco_cli.run.supervisor import MAX_BACKOFF_S, End, Pulse, Supervised

KILLED = End(code=-9, error=DilocoError("killed"))
OWN = End(code=1, error=DilocoError("its own"), own=True)
LOST = End(code=3, error=DilocoError("lost"), own=True, again=True)
CONFIG = End(code=2, error=DilocoError("wrong"), own=True)


def delays(policy: Supervised, end: End, starts: int) -> list[float | None]:
    """Fail at each start, at time 100 of each: the waits, None when it is given up."""
    found: list[float | None] = []
    for _ in range(starts):
        policy.started()
        assert policy.due_s is None
        returns = policy.ended(100.0, end)
        assert returns == (policy.due_s is not None)
        found.append(policy.due_s - 100.0 if policy.due_s is not None else None)
    return found


def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long_up_to_the_bound():
    found = delays(Supervised(8, 1.0), KILLED, 9)
    assert found == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_BACKOFF_S, MAX_BACKOFF_S, None]


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_it_is_given_up_after_so_many_restarts_that_came_to_nothing(max_restarts):
    policy = Supervised(max_restarts, 1.0)
    assert delays(policy, KILLED, max_restarts + 1).count(None) == 1
    assert policy.restarts == max_restarts


def test_a_start_that_came_to_something_ends_the_row():
    policy = Supervised(2, 1.0)
    for _ in range(50):
        assert delays(policy, KILLED, 2) == [0.0, 1.0]
        policy.started()
        policy.good()
        assert policy.ended(0.0, KILLED)
        assert policy.due_s == 0.0
        policy.started()
        policy.good()
    assert policy.starts == 50 * 4
    assert policy.restarts == policy.starts - 1


def test_joining_alone_does_not_end_the_row():
    policy = Supervised(1, 1.0)
    policy.started()
    policy.proved()
    assert policy.ended(0.0, KILLED)
    policy.started()
    policy.proved()
    assert not policy.ended(0.0, KILLED)


def test_what_would_fail_again_is_not_tried():
    for end, proven, returns in (
        (OWN, False, False),
        (OWN, True, True),
        (LOST, False, True),
        (LOST, True, True),
        (CONFIG, False, False),
        (CONFIG, True, False),
        (KILLED, False, True),
        (End(code=0), False, True),
    ):
        policy = Supervised(5, 1.0)
        policy.started()
        if proven:
            policy.proved()
        assert policy.ended(0.0, end) is returns, (end, proven)


def test_an_end_that_was_asked_for_is_no_failure_and_waits_for_its_time():
    policy = Supervised(0, 1.0)
    policy.started()
    policy.hold(7.0)
    assert policy.ended(5.0, End(code=0), asked=True)
    assert policy.due_s == 7.0
    policy.started()
    assert policy.in_a_row == 0
    policy.retire()
    assert policy.due_s is None


def look(pulse: Pulse, times: list[float], marks) -> list[str]:
    return [pulse.look(t, marks(t)) for t in times]


def seconds(start: float, end: float, step: float = 0.1) -> list[float]:
    return [start + i * step for i in range(round((end - start) / step) + 1)]


def test_one_silent_rank_of_several_is_found_after_the_timeout():
    pulse = Pulse(2.0, 60.0)
    pulse.started(0.0)
    times = seconds(0.1, 20.0)
    # Both beat every second; rank 1 does no more after 10 s.
    said = look(pulse, times, lambda t: {"island-0.0": int(t), "island-0.1": min(int(t), 10)})
    at = next(t for t, text in zip(times, said, strict=True) if text)
    assert 12.0 < at < 12.3
    assert "island-0.1" in next(filter(None, said))


def test_before_the_first_beat_the_start_timeout_holds():
    pulse = Pulse(2.0, 30.0)
    pulse.started(0.0)
    said = look(pulse, seconds(0.1, 31.0, 0.25), lambda t: {"a": 1 if t > 1 and t < 0 else None})
    assert said.index(next(filter(None, said))) == pytest.approx(30.0 / 0.25, abs=3)
    pulse.started(100.0)
    assert pulse.look(101.0, {"a": None}) == ""


def test_neither_a_clock_that_is_set_nor_a_pause_of_the_watcher_looks_like_silence():
    pulse = Pulse(10.0, 60.0)
    pulse.started(0.0)
    beats = {1.0: 1_000, 2.0: 5, 3.0: 99_999_999, 4.0: 7}
    assert [pulse.look(t, {"a": mark}) for t, mark in beats.items()] == [""] * 4
    # The watcher was stopped for an hour, and so was everybody: the process has not beaten yet when it looks.
    assert pulse.look(3600.0, {"a": 7}) == ""
    assert pulse.look(3601.0, {"a": 8}) == ""
