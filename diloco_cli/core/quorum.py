"""May this fragment merge now, and why: quorum first, then the grace window.

Owns: the decision and the grace arithmetic (algorithm.md, Syncer 1 and 2). Pure functions of what is passed in.
Called by: core.syncer only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeDecision:
    """Merge now, or wait (until `until_s`, if that is known), with the reason in words."""

    merge: bool
    reason: str
    until_s: float | None = None


@dataclass(slots=True)
class Average:
    """Exponential moving average of a duration; None until something was measured."""

    value: float | None = None
    share_of_new: float = 0.2

    def add(self, measured: float) -> None:
        """Take one more measurement in."""
        self.value = measured if self.value is None else self.value + self.share_of_new * (measured - self.value)


def grace_window_s(
    *,
    grace_safety: float,
    overlap_steps: int,
    step_time_s: float | None,
    quorum_time_s: float | None,
    sync_time_s: float | None,
) -> float:
    """gamma * max(0, tau * step_time - (quorum_time + sync_time)); no window while something is unmeasured.

    The slack of a sync is what its tau steps last, less what collecting a quorum and merging, sending and
    installing take: waiting longer than that would make the result late at the learners.
    Source: algorithm.md, Syncer 2.
    """
    if step_time_s is None or quorum_time_s is None or sync_time_s is None:
        return 0.0
    return grace_safety * max(0.0, overlap_steps * step_time_s - (quorum_time_s + sync_time_s))


def decide(
    *,
    now_s: float,
    quorum: int,
    counted: Collection[str],
    awaited: Collection[str],
    grace_until_s: float | None,
    wait_for_all: bool,
) -> MergeDecision:
    """Decide about one round.

    Args:
        quorum: K.
        counted: live learners whose contribution (of at least one step) is in.
        awaited: live learners that were asked and have not answered.
        grace_until_s: end of the grace window; None before the quorum was met.
        wait_for_all: lock-step, or the final cut: no contribution of a live learner is left out.
    """
    if wait_for_all:
        if awaited:
            return MergeDecision(merge=False, reason=f"waiting for {', '.join(sorted(awaited))}")
        return MergeDecision(merge=True, reason="all live learners are in")
    if len(counted) < quorum:
        return MergeDecision(merge=False, reason=f"waiting for quorum {len(counted)}/{quorum}")
    if not awaited:
        return MergeDecision(merge=True, reason="all live learners are in")
    assert grace_until_s is not None, "the window opens when the quorum is met"
    if now_s >= grace_until_s:
        return MergeDecision(merge=True, reason=f"grace window over, without {', '.join(sorted(awaited))}")
    return MergeDecision(
        merge=False, reason=f"grace window open for {', '.join(sorted(awaited))}", until_s=grace_until_s
    )
