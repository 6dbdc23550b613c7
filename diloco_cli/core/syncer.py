"""The syncer's decisions as one state machine: events and the time in, effects out.

Owns: which fragment is collected when, from whom, when a merge goes ahead, who gets it, what counts as late or
refused, who counts as live, and how a run ends. Holds no tensor, socket, clock or thread: `run.syncer_main` drives it
with real ones, the simulator with virtual ones. Sources: algorithm.md; Decoupled DiLoCo, arXiv 2604.21428.

Theory of operation

Phases of a run::

    gathering --all expected joined, or start_timeout with a quorum--> running
    running   --global step reaches the target--> finishing (learners close to the target are waited for)
    finishing --those are there--> final (learners stop; every fragment is merged once more, from everybody)
    final     --every learner has installed every final version--> done(completed)
    any       --fewer learners left than the quorum--> done(quorum_lost)       --StopRequested--> done(stopped)

One *round* collects one version of one fragment::

    (none) --due, and a slot is free--> open: asked --K in--> open: grace --window over or all in--> merging --> (none)

* The global step is the largest step count reported by any live learner. A fragment is due H global steps after its
  last round was opened, so neither a fast link nor a fast learner shrinks H. At most max(1, tau) rounds at once.
* A learner is asked only when it has installed something newer than what its last merged contribution started from;
  therefore no step of a learner enters two merges of a fragment. If it installs while the round is open it is asked
  then, but not waited for.
* In lock-step (`streaming`, `diloco`) learners send by their own schedule, a round opens with the first contribution,
  and waits for all live learners.
* Iteration over learners and fragments is in sorted order; effects come in the order in which they must be performed.
* Unknown, late or duplicate input is answered by an effect with a reason, never by an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_cli.core.fragments import due_offset_steps
from diloco_cli.core.ledger import LATE, MERGED, REFUSED, Ledger, Uptime
from diloco_cli.core.quorum import Average, decide, grace_window_s
from diloco_cli.core.types import (
    CancelTimer,
    Contribution,
    ContributionReceived,
    ContributionRefused,
    Disconnect,
    DropPayload,
    Finish,
    FragmentInstalled,
    LearnerAlive,
    LearnerJoined,
    LearnerLeft,
    LearnerReport,
    MergeFinished,
    Publish,
    Pull,
    Record,
    SendState,
    SetTimer,
    StartMerge,
    StopLearners,
    StopRequested,
    SyncerEffect,
    SyncerEvent,
    TimerFired,
)

GATHERING, RUNNING, FINISHING, FINAL, DONE = "gathering", "running", "finishing", "final", "done"
COMPLETED, STOPPED, QUORUM_LOST = "completed", "stopped", "quorum_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerSettings:
    """What the syncer decides by. Steps are inner steps, times seconds; see config.schema for the meaning."""

    num_fragments: int
    chips: Mapping[str, int]
    """Expected learners and the ranks of each."""
    inner_steps: int = 24
    overlap_steps: int = 2
    quorum: int = 1
    grace_safety: float = 0.9
    keep_late: bool = False
    lockstep: bool = False
    target_steps: int = 1000
    finish_tolerance: float = 0.2
    heartbeat_timeout_s: float = 10.0
    start_timeout_s: float = 120.0
    anchor_history: int = 4
    """Versions a contribution's base may be behind; older ones are unknown (nobody keeps their parameters)."""


@dataclass(slots=True)
class LearnerState:
    """What the syncer knows of a live learner."""

    last_seen_s: float
    versions: list[int]
    """Per fragment: the version it last installed."""
    merged_base: list[int]
    """Per fragment: base version of its last contribution that a merge took; -1 if none."""
    sent_tokens: list[int]
    """Per fragment: tokens of its counters that are in a contribution already, since the last install."""
    step: int = 0
    step_time: Average = field(default_factory=Average)
    busy_s: float = 0.0


@dataclass(slots=True)
class Entry:
    """A contribution in a round, with its part in the token account: to settle now, or to move from late."""

    contribution: Contribution
    unsettled_tokens: int
    settled_late_tokens: int


@dataclass(slots=True)
class Round:
    """One collection of one fragment."""

    opened_at_s: float
    asked: set[str]
    awaited: set[str]
    """Asked when the round opened: these are waited for, within the grace window."""
    wait_for_all: bool
    refused: set[str] = field(default_factory=set)
    """Answered, but with something that may not be merged: nobody waits for them in this round."""
    entries: dict[str, Entry] = field(default_factory=dict)
    kept: list[Entry] = field(default_factory=list)
    quorum_at_s: float | None = None
    grace_until_s: float | None = None
    merge_started_s: float | None = None
    merge_reason: str = ""
    members: tuple[Contribution, ...] = ()


class SyncerCore:
    """The state machine. Call start() once, then handle() for every event, in the order of their times."""

    def __init__(self, settings: SyncerSettings) -> None:
        count = settings.num_fragments
        assert count >= 1
        assert 1 <= settings.quorum <= len(settings.chips)
        self.settings = settings
        self.phase = GATHERING
        self.versions = [0] * count
        self.global_step = 0
        self.learners: dict[str, LearnerState] = {}
        self.expected = set(settings.chips)
        self.rounds: dict[int, Round] = {}
        self.num_merges = 0
        self.ledger = Ledger(count)
        self.uptime = Uptime()
        self.quorum_time = Average()
        self.sync_time = Average()
        self._due = [due_offset_steps(f, count, settings.inner_steps) or settings.inner_steps for f in range(count)]
        self._kept_late: list[list[Entry]] = [[] for _ in range(count)]
        self._merge_started_s: dict[tuple[int, int], float] = {}
        self._finish_awaited: set[str] = set()
        self._final_left: set[int] = set()
        self._busy_s_of_gone = 0.0
        self._started_s: float | None = None
        self._out: list[SyncerEffect] = []

    # ---- driving ---------------------------------------------------------------------------------

    def start(self, now_s: float) -> tuple[SyncerEffect, ...]:
        """Begin to wait for learners."""
        self._out.append(SetTimer(key="start", at_s=now_s + self.settings.start_timeout_s))
        self._out.append(SetTimer(key="liveness", at_s=now_s + self.settings.heartbeat_timeout_s / 4))
        return self._drain()

    def handle(self, event: SyncerEvent, now_s: float) -> tuple[SyncerEffect, ...]:
        """Take one event; return what the driver must do, in order.

        After `Finish` only merges that were under way are still booked; every other event is ignored."""
        if self.phase == DONE and not isinstance(event, MergeFinished):
            return ()
        match event:
            case LearnerReport():
                self._report(event, now_s)
            case LearnerAlive():
                self._seen(event.learner, now_s)
            case ContributionReceived():
                self._contribution(event.contribution, now_s)
            case ContributionRefused():
                self._refuse(event.contribution, event.reason, now_s)
            case FragmentInstalled():
                self._installed(event, now_s)
            case MergeFinished():
                self._merge_finished(event, now_s)
            case TimerFired():
                self._timer(event.key, now_s)
            case LearnerJoined():
                self._joined(event.learner, now_s)
            case LearnerLeft():
                self._left(event.learner, event.reason, now_s)
            case StopRequested():
                self._finish(STOPPED, event.reason)
        return self._drain()

    def _drain(self) -> tuple[SyncerEffect, ...]:
        effects, self._out = tuple(self._out), []
        return effects

    def _record(self, event: str, **data: object) -> None:
        self._out.append(Record(event=event, data=data))

    def _live(self) -> tuple[str, ...]:
        return tuple(sorted(self.learners))

    # ---- learners come and go ----------------------------------------------------------------------

    def _joined(self, learner: str, now_s: float) -> None:
        if learner in self.learners:
            self._left(learner, "a newer connection of the same island", now_s)
            if self.phase == DONE:
                return
        if self.phase in (FINAL, FINISHING):
            self._out.append(Disconnect(learner=learner, reason="the run is ending"))
            return
        count = self.settings.num_fragments
        self.learners[learner] = LearnerState(
            last_seen_s=now_s,
            versions=list(self.versions),
            merged_base=[-1] * count,
            sent_tokens=[0] * count,
            step=self.global_step,
        )
        self.expected.discard(learner)
        self.ledger.join(learner)
        self._record("join", learner=learner, step=self.global_step)
        if self.phase == RUNNING:
            self._send_state(learner, now_s)
        elif not self.expected:
            self._go(now_s)

    def _go(self, now_s: float) -> None:
        """Everybody starts together, from version 0."""
        self.phase = RUNNING
        self._started_s = now_s
        self._out.append(CancelTimer(key="start"))
        for learner in self._live():
            self._send_state(learner, now_s)

    def _send_state(self, learner: str, now_s: float) -> None:
        self.learners[learner].versions = list(self.versions)
        self._out.append(SendState(learner=learner, global_step=self.global_step, versions=tuple(self.versions)))
        self.uptime.change(now_s, len(self.learners))

    def _left(self, learner: str, reason: str, now_s: float) -> None:
        known = learner in self.learners or learner in self.expected
        if not known:
            return
        self.expected.discard(learner)
        state = self.learners.pop(learner, None)
        if state is not None:
            self._busy_s_of_gone += state.busy_s * self.settings.chips.get(learner, 1)
        self.ledger.leave(learner)
        self._record("leave", learner=learner, reason=reason)
        if self.phase != GATHERING:
            self.uptime.change(now_s, len(self.learners))
        for fragment in sorted(self.rounds):
            current = self.rounds[fragment]
            if current.merge_started_s is None and (entry := current.entries.pop(learner, None)):
                self._out.append(DropPayload(handle=entry.contribution.handle, reason="its learner is gone"))
        available = len(self.learners) + len(self.expected)
        if available < self.settings.quorum:
            self._finish(
                QUORUM_LOST, f"{available} learners left, the quorum is {self.settings.quorum}; {learner}: {reason}"
            )
            return
        if self.phase == GATHERING and self.learners and not self.expected:
            self._go(now_s)
        for fragment in sorted(self.rounds):
            self._advance(fragment, now_s)
        self._check_end(now_s)

    def _seen(self, learner: str, now_s: float) -> None:
        if learner in self.learners:
            self.learners[learner].last_seen_s = now_s

    def _report(self, event: LearnerReport, now_s: float) -> None:
        state = self.learners.get(event.learner)
        if state is None:
            return
        state.last_seen_s = now_s
        self.ledger.processed(event.learner, event.tokens)
        if event.step_time_s is not None and event.step > state.step:
            state.step_time.add(event.step_time_s)
            state.busy_s += event.step_time_s * (event.step - state.step)
        state.step = max(state.step, event.step)
        self.global_step = max(self.global_step, state.step)
        self._open_due(now_s)
        self._check_end(now_s)

    # ---- rounds ------------------------------------------------------------------------------------

    def _may_contribute(self, learner: str, fragment: int) -> bool:
        state = self.learners[learner]
        return state.versions[fragment] > state.merged_base[fragment]

    def _open_due(self, now_s: float) -> None:
        """Open the rounds that are due, the longest due first, as far as there are slots."""
        if self.phase == FINAL:
            waiting = [f for f in sorted(self._final_left) if f not in self.rounds]
        elif self.phase in (RUNNING, FINISHING) and not self.settings.lockstep:
            due = [f for f, at in enumerate(self._due) if at <= self.global_step and f not in self.rounds]
            waiting = sorted(due, key=lambda f: (self._due[f], f))
        else:
            return
        slots = max(1, self.settings.overlap_steps) - len(self.rounds)
        for fragment in waiting[: max(0, slots)]:
            self._open(fragment, now_s, wait_for_all=self.phase == FINAL)

    def _open(self, fragment: int, now_s: float, *, wait_for_all: bool) -> None:
        live = set(self.learners)
        asked = {m for m in live if self._may_contribute(m, fragment)}
        current = Round(
            opened_at_s=now_s,
            asked=asked,
            awaited=set(live) if wait_for_all else set(asked),
            wait_for_all=wait_for_all,
            kept=self._kept_late[fragment],
        )
        self._kept_late[fragment] = []
        self.rounds[fragment] = current
        self._due[fragment] = self.global_step + self.settings.inner_steps
        pushed = self.settings.lockstep and self.phase != FINAL
        if not pushed and asked:
            self._out.append(Pull(fragment=fragment, to=tuple(sorted(asked))))
            self._record("pull", fragment=fragment, learners=sorted(asked), global_step=self.global_step)

    def _contribution(self, c: Contribution, now_s: float) -> None:
        state = self.learners.get(c.learner)
        if state is None:
            self._out.append(DropPayload(handle=c.handle, reason="its learner is gone"))
            return
        state.last_seen_s = now_s
        reason = self._unacceptable(c, state)
        if reason:
            self._refuse(c, reason, now_s)
            return
        entry = self._enter(c, state)
        if self.settings.lockstep and c.fragment not in self.rounds and c.base_version == self.versions[c.fragment]:
            self._open(c.fragment, now_s, wait_for_all=True)
        current = self.rounds.get(c.fragment)
        if current is None or current.merge_started_s is not None:
            self._late(entry)
            return
        if c.learner in current.entries:
            self._refuse_entry(entry, "a second contribution to the same round")
            return
        self._record_contribution("contribution", c)
        current.entries[c.learner] = entry
        self._advance(c.fragment, now_s)

    def _unacceptable(self, c: Contribution, state: LearnerState) -> str:
        """Why a contribution can not enter any merge; empty if it can."""
        newest = self.versions[c.fragment]
        if c.base_version > newest:
            return f"it starts from version {c.base_version}, the newest is {newest}"
        if c.base_version < newest - self.settings.anchor_history:
            return f"it starts from version {c.base_version}, which is no longer known (newest {newest})"
        if c.base_version <= state.merged_base[c.fragment]:
            return f"its steps since version {c.base_version} were merged before"
        return ""

    def _enter(self, c: Contribution, state: LearnerState) -> Entry:
        """Book a contribution's tokens as being in hand.

        If its learner has installed something newer meanwhile, the install has settled them as late already.
        """
        if c.base_version < state.versions[c.fragment]:
            return Entry(c, 0, c.tokens)
        unsettled = max(0, c.tokens - state.sent_tokens[c.fragment])
        state.sent_tokens[c.fragment] = max(c.tokens, state.sent_tokens[c.fragment])
        return Entry(c, unsettled, 0)

    def _late(self, entry: Entry) -> None:
        c = entry.contribution
        self.ledger.settle(c.learner, c.fragment, LATE, entry.unsettled_tokens)
        keep = self.settings.keep_late and self.phase != FINAL and c.steps > 0
        self._record_contribution("late", c, kept=keep)
        if not keep:
            self._out.append(DropPayload(handle=c.handle, reason="late"))
            return
        waiting = self._kept_late[c.fragment]
        for older in [e for e in waiting if e.contribution.learner == c.learner]:
            waiting.remove(older)
            self._out.append(
                DropPayload(handle=older.contribution.handle, reason="a newer late one of the same learner")
            )
        waiting.append(Entry(c, 0, entry.settled_late_tokens + entry.unsettled_tokens))

    def _refuse(self, c: Contribution, reason: str, now_s: float) -> None:
        state = self.learners.get(c.learner)
        if state is None:
            self._out.append(DropPayload(handle=c.handle, reason="its learner is gone"))
            return
        state.last_seen_s = now_s
        self._refuse_entry(self._enter(c, state), reason)
        current = self.rounds.get(c.fragment)
        if current is not None and current.merge_started_s is None and c.learner not in current.entries:
            current.refused.add(c.learner)
            self._advance(c.fragment, now_s)

    def _refuse_entry(self, entry: Entry, reason: str) -> None:
        c = entry.contribution
        self.ledger.settle(c.learner, c.fragment, REFUSED, entry.unsettled_tokens)
        self._record_contribution("refused", c, reason=reason)
        self._out.append(DropPayload(handle=c.handle, reason=reason))

    def _record_contribution(self, event: str, c: Contribution, **more: object) -> None:
        self._record(
            event,
            learner=c.learner,
            fragment=c.fragment,
            base_version=c.base_version,
            tokens=c.tokens,
            steps=c.steps,
            step=c.sent_at_step,
            staleness_versions=self.versions[c.fragment] - c.base_version,
            **more,
        )

    # ---- quorum, grace, merge ------------------------------------------------------------------------

    def _advance(self, fragment: int, now_s: float) -> None:
        """Merge, open the grace window, or go on waiting."""
        current = self.rounds.get(fragment)
        if current is None or current.merge_started_s is not None:
            return
        counted = {m for m, e in current.entries.items() if e.contribution.steps > 0}
        may_come = set(self.learners) - set(current.entries) - current.refused
        awaited = current.awaited & may_come
        if current.quorum_at_s is None and len(counted) >= self.settings.quorum:
            self._open_grace(fragment, current, counted, now_s)
        decision = decide(
            now_s=now_s,
            quorum=self.settings.quorum,
            counted=counted,
            awaited=awaited,
            grace_until_s=current.grace_until_s,
            wait_for_all=current.wait_for_all,
        )
        if decision.merge:
            self._start_merge(fragment, current, decision.reason, now_s)
        elif not may_come:
            # Too few are left who could still answer: collect again when the fragment is next due.
            self._close_without_merge(fragment, current, decision.reason, now_s)
        elif decision.until_s is not None:
            self._out.append(SetTimer(key=f"grace:{fragment}", at_s=decision.until_s))

    def _open_grace(self, fragment: int, current: Round, counted: set[str], now_s: float) -> None:
        current.quorum_at_s = now_s
        self.quorum_time.add(now_s - current.opened_at_s)
        step_times = [s.step_time.value for s in self.learners.values() if s.step_time.value is not None]
        window_s = grace_window_s(
            grace_safety=self.settings.grace_safety,
            overlap_steps=self.settings.overlap_steps,
            # The fastest learner's slack is the tightest: the window must cost nobody anything.
            step_time_s=min(step_times, default=None),
            quorum_time_s=self.quorum_time.value,
            sync_time_s=self.sync_time.value,
        )
        current.grace_until_s = now_s + window_s
        self._record(
            "quorum",
            fragment=fragment,
            learners=sorted(counted),
            quorum_time_s=now_s - current.opened_at_s,
            grace_window_s=window_s,
        )

    def _start_merge(self, fragment: int, current: Round, reason: str, now_s: float) -> None:
        self._out.append(CancelTimer(key=f"grace:{fragment}"))
        entries = [*current.entries.values(), *current.kept]
        entries.sort(key=lambda e: (e.contribution.learner, e.contribution.base_version))
        taken = [e for e in entries if e.contribution.weight > 0.0]
        if not taken:
            self._close_without_merge(fragment, current, "no learner has taken a step since its last install", now_s)
            return
        for entry in entries:
            if entry.contribution.weight <= 0.0:
                self._out.append(DropPayload(handle=entry.contribution.handle, reason="zero steps weigh zero"))
        for entry in taken:
            self._book_merged(entry)
        current.merge_started_s = now_s
        current.merge_reason = reason
        current.members = tuple(e.contribution for e in taken)
        version = self.versions[fragment] + 1
        self._out.append(StartMerge(fragment=fragment, version=version, members=current.members))

    def _book_merged(self, entry: Entry) -> None:
        c = entry.contribution
        if entry.unsettled_tokens:
            self.ledger.settle(c.learner, c.fragment, MERGED, entry.unsettled_tokens)
        if entry.settled_late_tokens:
            self.ledger.reclaim(c.fragment, entry.settled_late_tokens)
        if state := self.learners.get(c.learner):
            state.merged_base[c.fragment] = max(state.merged_base[c.fragment], c.base_version)

    def _close_without_merge(self, fragment: int, current: Round, reason: str, now_s: float) -> None:
        del self.rounds[fragment]
        for entry in [*current.entries.values(), *current.kept]:
            c = entry.contribution
            if c.learner in self.learners:
                self.ledger.settle(c.learner, fragment, LATE, entry.unsettled_tokens)
            self._out.append(DropPayload(handle=c.handle, reason=reason))
        if current.wait_for_all:
            self._final_left.discard(fragment)
        self._record("merge_skipped", fragment=fragment, reason=reason)
        self._open_due(now_s)
        self._check_end(now_s)

    def _merge_finished(self, event: MergeFinished, now_s: float) -> None:
        fragment = event.fragment
        current = self.rounds.pop(fragment)
        assert current.merge_started_s is not None
        assert event.version == self.versions[fragment] + 1
        self.versions[fragment] = event.version
        self.num_merges += 1
        self._merge_started_s[(fragment, event.version)] = current.merge_started_s
        self._merge_started_s.pop((fragment, event.version - self.settings.anchor_history), None)
        learners = tuple(sorted({c.learner for c in current.members}))
        self._out.append(Publish(fragment=fragment, version=event.version, to=self._live(), taken=learners))
        total = sum(c.weight for c in current.members)
        quorum_at_s = current.quorum_at_s if current.quorum_at_s is not None else current.merge_started_s
        self._record(
            "merge",
            fragment=fragment,
            version=event.version,
            learners=[c.learner for c in current.members],
            weights=[c.weight / total for c in current.members],
            tokens=[c.tokens for c in current.members],
            steps=[c.steps for c in current.members],
            base_versions=[c.base_version for c in current.members],
            quorum_time_s=quorum_at_s - current.opened_at_s,
            grace_time_s=current.merge_started_s - quorum_at_s,
            merge_time_s=now_s - current.merge_started_s,
            reason=current.merge_reason,
            global_step=self.global_step,
        )
        if self.phase == FINAL and current.wait_for_all:
            self._final_left.discard(fragment)
        self._open_due(now_s)
        self._check_end(now_s)

    def _installed(self, event: FragmentInstalled, now_s: float) -> None:
        state = self.learners.get(event.learner)
        if state is None or event.version <= state.versions[event.fragment]:
            return
        f = event.fragment
        state.last_seen_s = now_s
        # What was processed while the sync was under way is overwritten by the install.
        overwritten = max(0, event.tokens - state.sent_tokens[f])
        self.ledger.settle(event.learner, f, LATE, overwritten, overlap=state.sent_tokens[f] > 0)
        state.sent_tokens[f] = 0
        state.versions[f] = event.version
        if (started_s := self._merge_started_s.get((f, event.version))) is not None:
            # Merging and sending; the wait for the step boundary is not a cost of the sync but its slack.
            self.sync_time.add(max(0.0, now_s - started_s - event.waited_s))
        self._record(
            "install", learner=event.learner, fragment=f, version=event.version, step=event.step, steps=event.steps
        )
        current = self.rounds.get(f)
        if current is not None and current.merge_started_s is None and event.learner not in current.asked:
            current.asked.add(event.learner)
            self._out.append(Pull(fragment=f, to=(event.learner,)))
        self._check_end(now_s)

    # ---- time and end --------------------------------------------------------------------------------

    def _timer(self, key: str, now_s: float) -> None:
        if key.startswith("grace:"):
            self._advance(int(key.removeprefix("grace:")), now_s)
        elif key == "liveness":
            self._check_liveness(now_s)
        elif key == "start" and self.phase == GATHERING:
            missing = ", ".join(sorted(self.expected))
            if len(self.learners) >= self.settings.quorum:
                self._record("warning", message=f"starting without {missing}: not there in time")
                self._go(now_s)
            else:
                self._finish(QUORUM_LOST, f"not there within {self.settings.start_timeout_s:g} s: {missing}")

    def _check_liveness(self, now_s: float) -> None:
        timeout_s = self.settings.heartbeat_timeout_s
        for learner in self._live():
            state = self.learners.get(learner)
            if state is not None and now_s - state.last_seen_s > timeout_s:
                self._out.append(Disconnect(learner=learner, reason=f"unheard of for {timeout_s:g} s"))
                self._left(learner, f"unheard of for {timeout_s:g} s", now_s)
                if self.phase == DONE:
                    return
        self._out.append(SetTimer(key="liveness", at_s=now_s + timeout_s / 4))

    def _check_end(self, now_s: float) -> None:
        """Move on through finishing and final when what they wait for has happened."""
        target = self.settings.target_steps
        if self.phase == RUNNING and self.global_step >= target:
            self.phase = FINISHING
            close = (1.0 - self.settings.finish_tolerance) * target
            self._finish_awaited = {m for m, s in self.learners.items() if s.step >= close}
        if self.phase == FINISHING:
            behind = [m for m in self._finish_awaited if m in self.learners and self.learners[m].step < target]
            if not behind:
                self._start_final_cut(now_s)
        elif self.phase == FINAL and not self._final_left and not self.rounds:
            if any(s.versions != self.versions for s in self.learners.values()):
                return
            self._finish(COMPLETED, f"all learners hold the final version of all {len(self.versions)} fragments")

    def _start_final_cut(self, now_s: float) -> None:
        """Learners stop; each fragment is merged once more from everybody, so that no work is left out."""
        self.phase = FINAL
        self._final_left = set(range(self.settings.num_fragments))
        self._record("final_cut", global_step=self.global_step)
        self._out.append(StopLearners(to=self._live(), reason="the run has reached its target"))
        for fragment in sorted(self.rounds):
            self._advance(fragment, now_s)
        self._open_due(now_s)
        self._check_end(now_s)

    def _finish(self, status: str, reason: str) -> None:
        self.phase = DONE
        self._record("finish", status=status, reason=reason)
        self._out.append(Finish(status=status, reason=reason))

    # ---- figures -------------------------------------------------------------------------------------

    def goodput(self, now_s: float) -> float | None:
        """Chip-seconds of steps that were not wasted, over chip-seconds allotted since the start.

        Source: algorithm.md, Goodput and uptime; what counts as wasted: Ledger.useful_share.
        """
        useful = self.ledger.useful_share
        if self._started_s is None or now_s <= self._started_s or useful is None:
            return None
        chips = self.settings.chips
        busy_s = self._busy_s_of_gone + sum(s.busy_s * chips.get(m, 1) for m, s in self.learners.items())
        return useful * busy_s / (sum(chips.values()) * (now_s - self._started_s))
