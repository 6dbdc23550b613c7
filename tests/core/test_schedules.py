"""Random schedules of faults against the protocol: none may break it, and each planted bug must be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import schedules
from schedules import KINDS, as_code, schedule, shrink, violation
from world import Fault, Rules, World

from diloco_cli.core import recovery, shards
from diloco_cli.core.learner import LearnerCore
from diloco_cli.core.syncer import SyncerCore
from diloco_cli.core.types import (
    ContributionReceived,
    ContributionRefused,
    DropPayload,
    InstallFragment,
    MergedReceived,
    MergeFinished,
    Persist,
    Publish,
    StopLearners,
)

NUM_SCHEDULES = 2_400
CHUNK = 200


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_no_schedule_breaks_the_protocol(first: int) -> None:
    for seed in range(first, first + CHUNK):
        if found := schedules.report(seed):
            pytest.fail(found)


def test_everything_that_may_go_wrong_does_go_wrong() -> None:
    happened, phases, tokens, statuses = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    by_event = 0
    for seed in range(400):
        world = World(schedule(seed)).run()
        happened.update(world.happened)
        phases.update(world.phases)
        assert world.finished is not None
        statuses[world.finished.status] += 1
        tokens.update({k: v for k, v in world.syncer.ledger.summary().items() if v})
        by_event += sum(f.at_event is not None for f in world.rules.faults)
    assert set(happened) == {*KINDS, "return"}
    assert min(happened.values()) > 15
    assert set(phases) >= {"gathering", "running", "finishing", "final", "done"}
    assert set(statuses) == {"completed", "stopped", "quorum_lost"}
    assert min(statuses.values()) > 20
    assert all(tokens[fate] for fate in ("merged", "late", "refused", "lost"))
    assert by_event > 300


def test_a_seed_is_a_schedule_for_good() -> None:
    assert schedule(7) == schedule(7) != schedule(8)
    first, second = World(schedule(7)).run(), World(schedule(7)).run()
    assert first.effects == second.effects
    rules = schedule(7)
    assert eval(as_code(rules), {"Rules": Rules, "Fault": Fault, "frozenset": frozenset}) == rules


# ---- planted bugs -----------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def _filtered(patch: Patch, keep: Callable[[Any], Any]) -> None:
    """The syncer's effects go through `keep`, which may change one or leave it out (None)."""
    handle = SyncerCore.handle

    def changed(self: SyncerCore, event: Any, now_s: float) -> tuple[Any, ...]:
        return tuple(e for effect in handle(self, event, now_s) if (e := keep(effect)) is not None)

    patch.setattr(SyncerCore, "handle", changed)


def leaks_late_payloads(patch: Patch) -> None:
    _filtered(patch, lambda e: None if isinstance(e, DropPayload) and e.reason == "late" else e)


def forgets_a_learner_when_it_publishes(patch: Patch) -> None:
    _filtered(patch, lambda e: replace(e, to=e.to[:-1]) if isinstance(e, Publish) and len(e.to) > 2 else e)


def publishes_an_old_version(patch: Patch) -> None:
    _filtered(patch, lambda e: replace(e, version=e.version - 1) if isinstance(e, Publish) and e.version > 2 else e)


def stops_only_the_first(patch: Patch) -> None:
    _filtered(patch, lambda e: replace(e, to=e.to[:1]) if isinstance(e, StopLearners) else e)


def merges_below_the_quorum(patch: Patch) -> None:
    init = SyncerCore.__init__
    patch.setattr(SyncerCore, "__init__", lambda self, s: init(self, replace(s, quorum=max(1, s.quorum - 1))))


def waits_twice_as_long_in_grace(patch: Patch) -> None:
    init = SyncerCore.__init__
    patch.setattr(SyncerCore, "__init__", lambda self, s: init(self, replace(s, grace_safety=2 * s.grace_safety)))


def never_ends_a_grace_window(patch: Patch) -> None:
    timer = SyncerCore._timer
    patch.setattr(SyncerCore, "_timer", lambda self, k, t: None if k.startswith("grace") else timer(self, k, t))


def never_misses_a_silent_learner(patch: Patch) -> None:
    patch.setattr(SyncerCore, "_check_liveness", lambda self, now_s: None)


def merges_a_step_twice(patch: Patch) -> None:
    patch.setattr(SyncerCore, "_may_contribute", lambda self, learner, fragment: True)


def forgets_bases_that_are_in_use(patch: Patch) -> None:
    patch.setattr(SyncerCore, "bases_in_use", lambda self, fragment: {self.versions[fragment]})


def merges_what_was_refused(patch: Patch) -> None:
    handle = SyncerCore.handle

    def changed(self: SyncerCore, event: Any, now_s: float) -> tuple[Any, ...]:
        if isinstance(event, ContributionRefused):
            event = ContributionReceived(contribution=event.contribution)
        return handle(self, event, now_s)

    patch.setattr(SyncerCore, "handle", changed)


def counts_tokens_twice(patch: Patch) -> None:
    count = LearnerCore._count

    def changed(self: LearnerCore, tokens: int) -> None:
        count(self, tokens)
        self.tokens[0] += tokens

    patch.setattr(LearnerCore, "_count", changed)


def keeps_its_counters_after_an_install(patch: Patch) -> None:
    install = LearnerCore._install

    def changed(self: LearnerCore, merged: MergedReceived) -> InstallFragment:
        tokens = self.tokens[merged.fragment]
        effect = install(self, merged)
        self.tokens[merged.fragment] = tokens
        return effect

    patch.setattr(LearnerCore, "_install", changed)


def sends_nothing_when_parked(patch: Patch) -> None:
    patch.setattr(LearnerCore, "_send_due", lambda self, *, stepped: [])


def persists_only_the_start(patch: Patch) -> None:
    handle = SyncerCore.handle

    def changed(self: SyncerCore, event: Any, now_s: float) -> tuple[Any, ...]:
        effects = handle(self, event, now_s)
        return tuple(e for e in effects if not (isinstance(e, Persist) and isinstance(event, MergeFinished)))

    patch.setattr(SyncerCore, "handle", changed)


def dumps_merges_that_are_under_way(patch: Patch) -> None:
    patch.setattr(recovery, "_take_back_what_is_in_hand", lambda core, saved: None)


def settles_nothing_on_return(patch: Patch) -> None:
    def changed(self: SyncerCore, state: Any, event: Any, f: int) -> None:
        state.versions[f] = event.versions[f]

    patch.setattr(SyncerCore, "_settle_returned", changed)


def counts_on_learners_that_have_returned_already(patch: Patch) -> None:
    returned = SyncerCore._returned

    def changed(self: SyncerCore, event: Any, now_s: float) -> None:
        rounds, self.rounds = self.rounds, {}
        returned(self, event, now_s)
        self.rounds |= rounds

    patch.setattr(SyncerCore, "_returned", changed)


def keeps_the_account_of_a_lost_shard(patch: Patch) -> None:
    patch.setattr(shards, "_take_back", lambda core, f, current, reason: None)


def asks_nobody_again_who_reached_a_shard(patch: Patch) -> None:
    patch.setattr(shards, "reach", lambda core, event, now_s: None)


def collects_what_is_away(patch: Patch) -> None:
    lose = shards.lose

    def changed(core: SyncerCore, fragments: Any, reason: str, now_s: float) -> None:
        lose(core, fragments, reason, now_s)
        core.away.clear()

    patch.setattr(shards, "lose", changed)


BUGS = [
    keeps_the_account_of_a_lost_shard,
    asks_nobody_again_who_reached_a_shard,
    collects_what_is_away,
    persists_only_the_start,
    dumps_merges_that_are_under_way,
    settles_nothing_on_return,
    counts_on_learners_that_have_returned_already,
    leaks_late_payloads,
    forgets_a_learner_when_it_publishes,
    publishes_an_old_version,
    stops_only_the_first,
    merges_below_the_quorum,
    waits_twice_as_long_in_grace,
    never_ends_a_grace_window,
    never_misses_a_silent_learner,
    merges_a_step_twice,
    forgets_bases_that_are_in_use,
    merges_what_was_refused,
    counts_tokens_twice,
    keeps_its_counters_after_an_install,
    sends_nothing_when_parked,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found_and_made_short(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    rules = next(rules for seed in range(NUM_SCHEDULES) if violation(rules := schedule(seed)))
    small = shrink(rules, violation, budget=400)
    assert violation(small)
    assert len(small.faults) <= 2, as_code(small)
    assert len(small.faults) <= len(rules.faults)
    assert small.target_steps <= rules.target_steps
    monkeypatch.undo()
    assert not violation(small), "the schedule itself is harmless"
