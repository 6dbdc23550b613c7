"""The syncer's fragments when a part of the syncer fails: a *shard* is a process that holds some of them.

Decisions are made in one place, core.syncer, whatever process holds a fragment's parameters; so there is one clock, one
account and one snapshot. While a shard is away its fragments stand still and all others go on. What it had in hand is
taken back in the account, as core.recovery does it for the whole syncer: contributions in open rounds are as if they
had never arrived, merges under way as if they had not begun. A version that was finished is on the shard's disk, and
holds.

When the shard is back its fragments are due at once, and each learner that has found it again gets their newest
version (it may have missed it, or may be joining) and is asked again (what it sent is lost).
Owns: these three moments. Friend of core.syncer, like core.recovery. Called by: core.syncer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diloco_cli.core.ledger import LATE
from diloco_cli.core.state import Round
from diloco_cli.core.types import CancelTimer, DropPayload, FragmentsReached, Publish

if TYPE_CHECKING:
    from diloco_cli.core.syncer import SyncerCore


def lose(core: SyncerCore, fragments: Sequence[int], reason: str, now_s: float) -> None:
    """These fragments' process is gone."""
    lost = sorted(set(fragments) - core.away)
    if not lost:
        return
    core.away.update(lost)
    core._record("shard_lost", fragments=lost, reason=reason)
    for f in lost:
        for entry in core._kept_late[f]:
            core._out.append(DropPayload(handle=entry.contribution.handle, reason=reason))
        core._kept_late[f] = []
        for c, _ in [e for e in core._early if e[0].fragment == f]:
            core._out.append(DropPayload(handle=c.handle, reason=reason))
        core._early = [e for e in core._early if e[0].fragment != f]
        # Lock-step: what was sent for the cut that was being collected is sent once more.
        core._cuts[f] = core._merged_cuts[f]
        if (current := core.rounds.pop(f, None)) is not None:
            core._due[f] = min(core._due[f], core._clock)
            core._out.append(CancelTimer(key=f"grace:{f}"))
            _take_back(core, f, current, reason)
    # Their slots are free for others.
    core._open_due(now_s)
    core._check_end(now_s)


def _take_back(core: SyncerCore, f: int, current: Round, reason: str) -> None:
    if current.merge_started_s is None:
        for entry in current.entries.values():
            _uncount(core, entry.contribution.learner, f, entry.contribution.base_version, entry.unsettled)
        for entry in [*current.entries.values(), *current.kept]:
            core._out.append(DropPayload(handle=entry.contribution.handle, reason=reason))
    for b in reversed(current.booked):
        entry, c = b.entry, b.entry.contribution
        here = core.learners.get(c.learner) is b.state
        core.ledger.unmerge(
            c.learner if here else None,
            f,
            entry.unsettled,
            late=entry.late,
            refused=entry.refused,
            overlap=entry.overlap,
        )
        if here:
            b.state.merged_base[f] = b.merged_base_before
            _uncount(core, c.learner, f, c.base_version, entry.unsettled)


def _uncount(core: SyncerCore, learner: str, f: int, base: int, tokens: int) -> None:
    """Tokens are not in hand any more. They will come again, unless their learner has installed something since."""
    state = core.learners[learner]
    counted = state.counted[f].get(base)
    if counted is None:
        return
    if base < state.versions[f]:
        core.ledger.settle(learner, f, LATE, tokens, overlap=True)
        counted.overlap += tokens
    else:
        counted.tokens -= tokens


def regain(core: SyncerCore, fragments: Sequence[int], now_s: float) -> None:
    """Their process is back, with the versions that the core knows of."""
    back = sorted(core.away & set(fragments))
    if not back:
        return
    core.away.difference_update(back)
    core._record("shard_back", fragments=back, versions=[core.versions[f] for f in back])
    core._open_due(now_s)
    core._check_end(now_s)


def reach(core: SyncerCore, event: FragmentsReached, now_s: float) -> None:
    """A learner has found the process of these fragments again."""
    learner = event.learner
    if learner not in core.learners:
        return
    for f, sent_at in zip(event.fragments, event.sent_at, strict=True):
        if f in core.away:
            continue
        core._out.append(Publish(fragment=f, version=core.versions[f], to=(learner,), taken=()))
        if event.step is not None:
            # What it had sent before its last install is lost, and does not come again.
            core.learners[learner].last_cuts[f] = event.step if sent_at < 0 else sent_at - 1
        current = core.rounds.get(f)
        if current is None or learner in current.entries:
            continue
        current.asked.discard(learner)
        core._ask_later(learner, f)
        if not current.pulled and core.learners[learner].last_cuts[f] >= core._cuts[f]:
            current.awaited.discard(learner)
            core._advance(f, now_s)
    core._check_end(now_s)
