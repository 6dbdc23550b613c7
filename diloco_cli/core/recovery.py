"""The syncer's state as plain data and back: what a crashed syncer goes on from, and what a snapshot holds.

Owns: `dump` and `load`, the inverse of each other but for what a crash loses: rounds that were open, merges that had
not finished, contributions in hand. Their bookings are taken back in the dump, so the account is as if they had never
arrived; their learners, who return with their own counters, will be asked again. Friend of core.syncer: the only other
file that knows its private attributes. Holds no tensor and no payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_cli.core.ledger import LATE, LOST, MERGED, REFUSED, LearnerAccount
from diloco_cli.core.state import Closed, Counted, LearnerState, SyncerSettings
from diloco_cli.core.syncer import DONE, FINAL, GATHERING, RUNNING, SyncerCore
from diloco_cli.core.types import SetTimer, SyncerEffect

FORMAT = 1


def dump(core: SyncerCore, now_s: float) -> dict[str, Any]:
    """The core's state at this moment; JSON-able."""
    ledger = core.ledger
    saved: dict[str, Any] = {
        "format": FORMAT,
        "saved_at_s": now_s,
        "phase": core.phase if core.phase in (GATHERING, FINAL) else RUNNING,
        "versions": list(core.versions),
        "target_steps": core.settings.target_steps,
        "global_step": core.global_step,
        "num_merges": core.num_merges,
        "clock": core._clock,
        # What was being collected is due at once.
        "due": [min(due, core._clock) if f in core.rounds else due for f, due in enumerate(core._due)],
        "merged_cuts": list(core._merged_cuts),
        "snapshot_due": core._snapshot_due,
        "learners": {name: _dump_learner(state) for name, state in sorted(core.learners.items())},
        "absent": sorted(core.absent | core.expected),
        "taken_steps": dict(core._taken_steps),
        "closed": {s: [c.tokens, c.step, c.step_time_s, c.expelled] for s, c in core._closed.items()},
        "ledger": {
            "before": ledger._processed_before,
            "fates": {fate: list(counts) for fate, counts in ledger._fates.items()},
            "overlap": list(ledger._overlap),
            "open": {name: [a.processed, list(a.settled)] for name, a in sorted(ledger._open.items())},
        },
        "quorum_time_s": core.quorum_time.value,
        "sync_time_s": core.sync_time.value,
        "busy_s_of_gone": core._busy_s_of_gone,
        "released_chip_s": core._released_chip_s,
        "started_s": core._started_s,
        "added_at_s": dict(core._added_at_s),
        "uptime": [core.uptime.started_s, core.uptime.training_since_s, core.uptime.training_s],
    }
    _take_back_what_is_in_hand(core, saved)
    return saved


def _dump_learner(state: LearnerState) -> dict[str, Any]:
    return {
        "session": state.session,
        "versions": list(state.versions),
        "merged_base": list(state.merged_base),
        "counted": [{str(b): [c.tokens, c.refused, c.overlap] for b, c in f.items()} for f in state.counted],
        "last_cuts": list(state.last_cuts),
        "joined_at_step": state.joined_at_step,
        "step": state.step,
        "step_time_s": state.step_time.value,
        "busy_s": state.busy_s,
        "bad_in_a_row": state.bad_in_a_row,
        "bad_of_fragment": {str(f): n for f, n in state.bad_of_fragment.items()},
    }


def _take_back_what_is_in_hand(core: SyncerCore, saved: dict[str, Any]) -> None:
    """Contributions in rounds are counted, and those of merges under way booked: neither outlasts a crash."""
    fates, open_accounts = saved["ledger"]["fates"], saved["ledger"]["open"]
    for f, current in core.rounds.items():
        booked = {id(b.entry): b for b in current.booked}
        if current.merge_started_s is None:
            for entry in current.entries.values():
                _uncount(saved, entry.contribution.learner, f, entry.contribution.base_version, entry.unsettled)
        for b in reversed(booked.values()):
            entry, c = b.entry, b.entry.contribution
            fates[MERGED][f] -= entry.unsettled + entry.late + entry.refused
            fates[LATE][f] += entry.late
            fates[REFUSED][f] += entry.refused
            saved["ledger"]["overlap"][f] += entry.overlap
            if core.learners.get(c.learner) is not b.state:
                fates[LOST][f] += entry.unsettled
                continue
            open_accounts[c.learner][1][f] -= entry.unsettled
            saved["learners"][c.learner]["merged_base"][f] = b.merged_base_before
            _uncount(saved, c.learner, f, c.base_version, entry.unsettled)


def _uncount(saved: dict[str, Any], learner: str, f: int, base: int, tokens: int) -> None:
    counted = saved["learners"][learner]["counted"][f].get(str(base))
    if counted is not None:
        counted[0] -= tokens


def load(
    settings: SyncerSettings,
    saved: Mapping[str, Any],
    now_s: float,
    *,
    elapsed_s: float,
    patience_s: float,
) -> tuple[SyncerCore, tuple[SyncerEffect, ...]]:
    """A core that goes on from `dump`, and its first effects; call it instead of start().

    Args:
        settings: today's; quorum, times and target may differ from those of the dump, fragments may not.
        elapsed_s: how much later it is by the run's own clock: the time a crashed syncer was away, in which learners
            trained; 0 when the whole run stood still.
        patience_s: how long its learners may take to return before they are missed.
    """
    assert saved["format"] == FORMAT
    assert len(saved["versions"]) == settings.num_fragments
    core = SyncerCore(settings)
    if saved["phase"] == GATHERING:
        return core, core.start(now_s)  # nobody has begun
    shift_s = now_s - elapsed_s - saved["saved_at_s"]

    def shifted(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + shift_s

    core.phase = saved["phase"]
    core.versions = list(saved["versions"])
    core.global_step = saved["global_step"]
    core.num_merges = saved["num_merges"]
    core._clock = saved["clock"]
    core._due = list(saved["due"])
    core._merged_cuts = list(saved["merged_cuts"])
    core._cuts = list(saved["merged_cuts"])
    if settings.snapshot_every_steps is not None:
        core._snapshot_due = core._clock + settings.snapshot_every_steps
    core._taken_steps = dict(saved["taken_steps"])
    core._closed = {session: Closed(*values) for session, values in saved["closed"].items()}
    core.quorum_time.value = saved["quorum_time_s"]
    core.sync_time.value = saved["sync_time_s"]
    core._busy_s_of_gone = saved["busy_s_of_gone"]
    core._released_chip_s = saved["released_chip_s"]
    core._started_s = shifted(saved["started_s"])
    core._added_at_s = {m: at_s + shift_s for m, at_s in saved["added_at_s"].items() if m in settings.chips}
    started_s, since_s, training_s = saved["uptime"]
    core.uptime.started_s, core.uptime.training_since_s = shifted(started_s), shifted(since_s)
    core.uptime.training_s = training_s
    _load_ledger(core, saved["ledger"])
    last_seen_s = now_s + max(0.0, patience_s - settings.heartbeat_timeout_s)
    for name, learner in saved["learners"].items():
        core.learners[name] = _load_learner(learner, last_seen_s)
    core.expected -= set(core.learners)
    gone = [m for m in core.learners if m not in settings.chips]
    effects: tuple[SyncerEffect, ...] = (
        SetTimer(key="liveness", at_s=now_s + settings.heartbeat_timeout_s / 4),
        SetTimer(key="start", at_s=now_s + max(patience_s, settings.start_timeout_s)),
    )
    if core.phase == FINAL:
        if saved["target_steps"] >= settings.target_steps:
            core._final_left = set(range(settings.num_fragments))
        else:
            core.phase = RUNNING  # the target was moved
    if core.phase == RUNNING:
        core._set_snapshot_timer(now_s)
    if gone:
        core._left(gone, "not in this run any more", now_s, returns=False)
    if core.phase != DONE:
        core._open_due(now_s)
        core._check_end(now_s)
    return core, (*effects, *core._drain())


def _load_learner(saved: Mapping[str, Any], last_seen_s: float) -> LearnerState:
    state = LearnerState(
        last_seen_s=last_seen_s,
        versions=list(saved["versions"]),
        merged_base=list(saved["merged_base"]),
        counted=[{int(b): Counted(*c) for b, c in f.items()} for f in saved["counted"]],
        progress_at_s=last_seen_s,
        last_cuts=list(saved["last_cuts"]),
        session=saved["session"],
        joined_at_step=saved["joined_at_step"],
        step=saved["step"],
        busy_s=saved["busy_s"],
        bad_in_a_row=saved["bad_in_a_row"],
        bad_of_fragment={int(f): n for f, n in saved["bad_of_fragment"].items()},
    )
    state.step_time.value = saved["step_time_s"]
    return state


def _load_ledger(core: SyncerCore, saved: Mapping[str, Any]) -> None:
    ledger = core.ledger
    ledger._processed_before = saved["before"]
    ledger._fates = {fate: list(counts) for fate, counts in saved["fates"].items()}
    ledger._overlap = list(saved["overlap"])
    for name, (processed, settled) in saved["open"].items():
        account = LearnerAccount(ledger.num_fragments)
        account.processed, account.settled = processed, list(settled)
        ledger._open[name] = account
