"""The syncer's decisions as one state machine: events and the time in, effects out.

Owns: which fragment is collected when, from whom, when a merge goes ahead, who gets it, what counts as late or
refused, who counts as live, and how a run ends. Holds no tensor, socket, clock or thread: `run.syncer_main` drives it
with real ones, the simulator with virtual ones. Sources: algorithm.md; Decoupled DiLoCo, arXiv 2604.21428.

Theory of operation

Phases of a run::

    gathering --all expected joined, or start_timeout with a quorum--> running
    running   --global step reaches the target--> finishing (learners close to the target are waited for)
    finishing --those are there--> final (learners stop; every fragment is merged once more, from everybody)
    final     --every learner has installed every final version, or none is left--> done(completed)
    others    --fewer learners than the quorum, and they do not come back in time--> done(quorum_lost)
    any       --StopRequested--> done(stopped)

One *round* collects one version of one fragment::

    (none) --due, and a slot is free--> open: asked --K in--> open: grace --window over or all in--> merging --> (none)

* The global step is the largest step count that any learner reported. A fragment is due H steps of the clock after its
  last round was opened, so neither a fast link nor a fast learner shrinks H. The clock counts the steps by which the
  foremost training learner moves on: the global step, but it does not stand still when the foremost one goes away or
  has reached the target. At most max(1, tau) rounds at once.
* A learner is asked only when it has installed something newer than what its last merged contribution started from;
  therefore no step of a learner enters two merges of a fragment. If it installs, or joins, while the round is open it
  is asked then, but not waited for.
* In lock-step (`streaming`, `diloco`) learners send by their own schedule, a round opens with the first contribution,
  and waits for all live learners. As they wait for its result, a round in which everything was refused is a merge of
  nothing: the version grows, the parameters stay. A joining learner starts after the last cut that was opened.
* A merge is persisted, together with core.recovery's dump of this state, before it is published, and so are the start
  and the final cut. A syncer that is started again goes on from there: learners return with their counters, and no
  version that any of them has installed is missing. A learner that was counted as gone meanwhile joins anew.
* Fragments may be held by several processes (core.shards): one that is gone takes its fragments out until it is back.
* Iteration over learners and fragments is in sorted order; effects come in the order in which they must be performed.
* Unknown, late or duplicate input is answered by an effect with a reason, never by an exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco_cli.core import shards
from diloco_cli.core.fragments import due_offset_steps
from diloco_cli.core.ledger import LATE, MERGED, REFUSED, Ledger, Uptime
from diloco_cli.core.quorum import Average, decide, grace_window_s
from diloco_cli.core.state import Booked, Closed, Counted, Entry, LearnerState, Round, SyncerSettings
from diloco_cli.core.types import (
    AcceptReturn,
    CancelTimer,
    Contribution,
    ContributionReceived,
    ContributionRefused,
    Disconnect,
    DropPayload,
    Finish,
    FragmentInstalled,
    FragmentsBack,
    FragmentsLost,
    FragmentsReached,
    IslandAdded,
    IslandRemoved,
    LearnerAlive,
    LearnerJoined,
    LearnerLeft,
    LearnerReport,
    LearnerReturned,
    MergeFinished,
    Persist,
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
    TakeSnapshot,
    TimerFired,
)

GATHERING, RUNNING, FINISHING, FINAL, DONE = "gathering", "running", "finishing", "final", "done"
COMPLETED, STOPPED, QUORUM_LOST = "completed", "stopped", "quorum_lost"
# Stays that are over, and are remembered in case their learner comes back.
MAX_CLOSED = 1024


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
        self.chips = dict(settings.chips)
        self.expected = set(settings.chips)
        """Who has not come yet, and is waited for."""
        self.absent: set[str] = set()
        """Who has gone and may come back."""
        self.rounds: dict[int, Round] = {}
        self.away: set[int] = set()
        """Fragments whose shard is gone (core.shards): nothing is collected of them."""
        self.num_merges = 0
        self.ledger = Ledger(count)
        self.uptime = Uptime()
        self.quorum_time = Average()
        self.sync_time = Average()
        self._clock = 0
        self._cuts = [-1] * count
        """Lock-step, per fragment: the step at which the learners sent what the newest round collects."""
        self._early: list[tuple[Contribution, str]] = []
        """Lock-step: for a cut whose round can not be opened yet, with the reason if the driver refused it."""
        self._due = [due_offset_steps(f, count, settings.inner_steps) or settings.inner_steps for f in range(count)]
        self._kept_late: list[list[Entry]] = [[] for _ in range(count)]
        self._merge_started_s: dict[tuple[int, int], float] = {}
        self._finish_awaited: set[str] = set()
        self._final_left: set[int] = set()
        self._busy_s_of_gone = 0.0
        self._started_s: float | None = None
        self._added_at_s: dict[str, float] = {}
        self._released_chip_s = 0.0
        """Chip-seconds that were allotted to islands which were taken out."""
        self._taken_steps: dict[str, int] = {}
        """Per island: steps in all its stays."""
        self._closed: dict[str, Closed] = {}
        """By session: stays that are over."""
        self._merged_cuts = [-1] * count
        """Lock-step, per fragment: the step at which the learners sent what the newest merge collected."""
        self._out_of_time = False
        """Nobody else is waited for to begin."""
        self._below_quorum_since_s: float | None = None
        self._snapshot_due = settings.snapshot_every_steps
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
                self._refuse(event.contribution, event.reason, now_s, bad=event.bad)
            case FragmentInstalled():
                self._installed(event, now_s)
            case MergeFinished():
                self._merge_finished(event, now_s)
            case TimerFired():
                self._timer(event.key, now_s)
            case LearnerJoined():
                self._joined(event.learner, event.session, now_s)
            case LearnerReturned():
                self._returned(event, now_s)
            case LearnerLeft():
                self._left([event.learner], event.reason, now_s, returns=event.returns)
            case IslandAdded():
                self.chips[event.learner] = event.chips
                self._added_at_s[event.learner] = now_s
            case IslandRemoved():
                self._left([event.learner], event.reason, now_s, returns=False)
                self._release(event.learner, now_s)
            case FragmentsLost():
                shards.lose(self, event.fragments, event.reason, now_s)
            case FragmentsBack():
                shards.regain(self, event.fragments, now_s)
            case FragmentsReached():
                shards.reach(self, event, now_s)
            case StopRequested():
                self._finish(STOPPED, event.reason)
        return self._drain()

    def move_on(self, steps: Mapping[str, int], elapsed_s: float) -> None:
        """For a simulator that jumps over a steady stretch: learners are so many steps further, and the run has gone on
        for so much longer. The clock, versions and accounts stay, as only differences of them count. Not in lock-step.
        """
        assert not self.settings.lockstep
        for learner, state in self.learners.items():
            state.step += steps[learner]
            state.joined_at_step += steps[learner]
        self.global_step += max(steps.values())
        if self._started_s is not None:
            self._started_s -= elapsed_s
        self._added_at_s = {learner: at_s - elapsed_s for learner, at_s in self._added_at_s.items()}

    def _drain(self) -> tuple[SyncerEffect, ...]:
        effects, self._out = tuple(self._out), []
        return effects

    def _record(self, event: str, **data: object) -> None:
        self._out.append(Record(event=event, data=data))

    def _live(self) -> tuple[str, ...]:
        return tuple(sorted(self.learners))

    # ---- learners come and go ----------------------------------------------------------------------

    def _joined(self, learner: str, session: str, now_s: float) -> None:
        newer = "a newer connection of the same island"
        if self.phase in (FINAL, FINISHING):
            if learner in self.learners:
                self._left([learner], newer, now_s, returns=True)
            if self.phase == DONE:
                return
            self._out.append(Disconnect(learner=learner, reason="the run is ending"))
            return
        if learner in self.learners:
            # It is here again at this very moment, so nothing is concluded from its absence.
            self._forget(learner, newer, now_s)
        self.global_step = max(self.global_step, *self._cuts)
        self._open_stay(learner, session, self.global_step, self.versions, now_s)
        self._record("join", learner=learner, step=self.global_step)
        self._quorum_may_be_back()
        if self.phase == RUNNING:
            self._send_state(learner, now_s)
            for fragment in sorted(self.rounds):
                self._ask_later(learner, fragment)
                self._advance(fragment, now_s)
            self._check_end(now_s)
        elif not self.expected:
            self._go(now_s)

    def _open_stay(self, learner: str, session: str, step: int, versions: Sequence[int], now_s: float) -> None:
        count = self.settings.num_fragments
        self._closed.pop(session, None)  # of an earlier stay, which this one does not go on with
        self.learners[learner] = LearnerState(
            last_seen_s=now_s,
            versions=list(versions),
            merged_base=[-1] * count,
            counted=[{} for _ in range(count)],
            progress_at_s=now_s,
            last_cuts=[step] * count,
            session=session,
            joined_at_step=step,
            step=step,
        )
        self.expected.discard(learner)
        self.absent.discard(learner)
        self.ledger.join(learner)

    def _returned(self, event: LearnerReturned, now_s: float) -> None:
        """A learner that trained on while it, or this syncer, was away."""
        closed = self._closed.pop(event.session, None)
        if closed is not None:
            self._lost_meanwhile(event, closed)
        ahead = any(v > newest for v, newest in zip(event.versions, self.versions, strict=True))
        if closed is not None or ahead or self.phase == GATHERING:
            # Its counters mean nothing here any more.
            self._joined(event.learner, event.session, now_s)
            return
        state = self.learners.get(event.learner)
        if state is None or state.session != event.session:
            # It joined after the snapshot that we came back from, so no merge has happened since.
            if state is not None:
                self._forget(event.learner, "a newer process of the same island", now_s)
            self._open_stay(event.learner, event.session, event.joined_at_step, event.versions, now_s)
            state = self.learners[event.learner]
        self.ledger.processed(event.learner, event.tokens)
        for f in range(self.settings.num_fragments):
            self._settle_returned(state, event, f)
        self._progress(event.learner, state, event.step, state.step_time.value, now_s)
        self._record("return", learner=event.learner, step=event.step)
        self._quorum_may_be_back()
        self._out.append(AcceptReturn(learner=event.learner, global_step=self.global_step))
        self.uptime.change(now_s, len(self.learners))
        for f, version in enumerate(event.versions):
            if version < self.versions[f]:
                self._out.append(Publish(fragment=f, version=self.versions[f], to=(event.learner,), taken=()))
        if self.phase == FINAL:
            self._out.append(StopLearners(to=(event.learner,), reason="the run has reached its target"))
        for fragment in sorted(self.rounds):
            self.rounds[fragment].asked.discard(event.learner)
            self._ask_later(event.learner, fragment)
        self._open_due(now_s)
        self._check_end(now_s)

    def _settle_returned(self, state: LearnerState, event: LearnerReturned, f: int) -> None:
        """What was processed before its last install, and met no fate that is known here, was overwritten by it."""
        version = event.versions[f]
        since = state.counted[f].get(version)
        before_install = self.ledger.settled(event.learner, f) - (since.tokens if since else 0)
        missing = event.tokens - event.fragment_tokens[f] - before_install
        if missing > 0:
            self.ledger.settle(event.learner, f, LATE, missing, overlap=True)
        oldest = self.versions[f] - self.settings.anchor_history
        state.counted[f] = {base: c for base, c in state.counted[f].items() if base >= oldest}
        state.counted[f].setdefault(version, Counted())
        state.versions[f] = version
        state.last_cuts[f] = event.step if event.sent_at[f] < 0 else event.sent_at[f] - 1

    def _lost_meanwhile(self, event: LearnerReturned, closed: Closed) -> None:
        """It was counted as gone, and trained on: those tokens enter no merge either."""
        self.ledger.lose(max(0, event.tokens - closed.tokens))
        steps = max(0, event.step - closed.step)
        self._taken_steps[event.learner] = self._taken_steps.get(event.learner, 0) + steps
        self._busy_s_of_gone += steps * (closed.step_time_s or 0.0) * self.chips.get(event.learner, 1)

    def _go(self, now_s: float) -> None:
        """Everybody starts together, from version 0."""
        self.phase = RUNNING
        self._started_s = now_s
        self._out.append(CancelTimer(key="start"))
        self._set_snapshot_timer(now_s)
        self._out.append(Persist())
        for learner in self._live():
            self._send_state(learner, now_s)

    def _send_state(self, learner: str, now_s: float) -> None:
        self.learners[learner].versions = list(self.versions)
        self._out.append(
            SendState(
                learner=learner,
                global_step=self.global_step,
                versions=tuple(self.versions),
                taken_steps=self._taken_steps.get(learner, 0),
            )
        )
        self.uptime.change(now_s, len(self.learners))

    def _left(self, learners: Sequence[str], reason: str, now_s: float, *, returns: bool) -> None:
        """Go on without these: all of them are forgotten before anything is concluded."""
        here = [m for m in learners if m in self.learners or m in self.expected]
        known = here if returns else [m for m in learners if m in here or m in self.absent]
        for learner in here:
            self._forget(learner, reason, now_s, returns=returns)
        (self.absent.update if returns else self.absent.difference_update)(known)
        if returns and self.phase == GATHERING and not self._out_of_time:
            self.expected.update(here)
            self.absent.difference_update(here)
        if not known:
            return
        self._check_quorum(f"{', '.join(known)}: {reason}", now_s)
        if self.phase == DONE:
            return
        if self.phase == GATHERING and self.learners and not self.expected:
            self._go(now_s)
        for fragment in sorted(self.rounds):
            self._advance(fragment, now_s)
        for fragment in sorted({c.fragment for c, _ in self._early}):
            self._take_early(fragment, now_s)
        self._check_end(now_s)

    def _check_quorum(self, why: str, now_s: float) -> None:
        """With fewer learners than the quorum: wait for those that may come back, or end.

        In the final cut everything that is left is merged whoever it is from, so nobody else is needed.
        """
        available, quorum = len(self.learners) + len(self.expected), self.settings.quorum
        if available >= quorum:
            return
        if self.phase == FINAL:
            for current in self.rounds.values():
                current.wait_for_all = True
                current.awaited = set(self.learners)
            return
        if available + len(self.absent) < quorum or self.settings.quorum_timeout_s <= 0:
            self._finish(QUORUM_LOST, f"{available} learners left, the quorum is {quorum}; {why}")
        elif self._below_quorum_since_s is None:
            self._below_quorum_since_s = now_s
            timeout_s = self.settings.quorum_timeout_s
            self._out.append(SetTimer(key="quorum", at_s=now_s + timeout_s))
            self._record("waiting_for_quorum", available=available, quorum=quorum, timeout_s=timeout_s)

    def _quorum_may_be_back(self) -> None:
        if self._below_quorum_since_s is not None and len(self.learners) + len(self.expected) >= self.settings.quorum:
            self._below_quorum_since_s = None
            self._out.append(CancelTimer(key="quorum"))
            self._record("quorum_back", available=len(self.learners), quorum=self.settings.quorum)

    def _release(self, learner: str, now_s: float) -> None:
        """An island's chips are not allotted any more."""
        chips = self.chips.pop(learner, 0)
        since_s = self._added_at_s.pop(learner, self._started_s)
        if since_s is not None:
            self._released_chip_s += chips * (now_s - since_s)

    def _forget(self, learner: str, reason: str, now_s: float, *, returns: bool = True) -> None:
        """Close a learner's account and drop what is in hand of it: absent learners weigh zero."""
        self.expected.discard(learner)
        state = self.learners.pop(learner, None)
        if state is not None:
            self._busy_s_of_gone += state.busy_s * self.chips.get(learner, 1)
            if state.session:
                tokens = self.ledger.processed_by(learner)
                expelled = state.longest_bad_row >= self.settings.max_bad_in_a_row
                self._closed[state.session] = Closed(tokens, state.step, state.step_time.value, expelled)
                if len(self._closed) > MAX_CLOSED:
                    del self._closed[next(iter(self._closed))]
        self.ledger.leave(learner)
        self._record("leave", learner=learner, reason=reason, returns=returns)
        if self.phase != GATHERING:
            self.uptime.change(now_s, len(self.learners))
        for c, _ in [e for e in self._early if e[0].learner == learner]:
            self._out.append(DropPayload(handle=c.handle, reason="its learner is gone"))
        self._early = [e for e in self._early if e[0].learner != learner]
        for fragment in range(self.settings.num_fragments):
            self._drop_kept(self._kept_late[fragment], learner, "its learner is gone")
            current = self.rounds.get(fragment)
            if current is None or current.merge_started_s is not None:
                continue
            self._drop_kept(current.kept, learner, "its learner is gone")
            if entry := current.entries.pop(learner, None):
                self._out.append(DropPayload(handle=entry.contribution.handle, reason="its learner is gone"))
            # If it comes back while the round is open it has not been asked, and has not answered.
            current.asked.discard(learner)
            current.awaited.discard(learner)
            current.refused.discard(learner)

    def _drop_kept(self, kept: list[Entry], learner: str, reason: str, bases: range | None = None) -> None:
        """Drop a learner's kept late contributions (those that start from `bases`)."""
        for entry in [e for e in kept if e.contribution.learner == learner]:
            if bases is None or entry.contribution.base_version in bases:
                kept.remove(entry)
                self._out.append(DropPayload(handle=entry.contribution.handle, reason=reason))

    def _seen(self, learner: str, now_s: float) -> None:
        if learner in self.learners:
            self.learners[learner].last_seen_s = now_s

    def _report(self, event: LearnerReport, now_s: float) -> None:
        state = self.learners.get(event.learner)
        if state is None:
            return
        state.last_seen_s = now_s
        self.ledger.processed(event.learner, event.tokens)
        if event.step_time_s is not None and event.step > state.step > state.joined_at_step:
            # Not the first one, which warms up: it would look like slow hardware for a while.
            state.step_time.add(event.step_time_s)
        self._progress(event.learner, state, event.step, event.step_time_s, now_s)
        self._open_due(now_s)
        self._check_end(now_s)

    def _progress(self, learner: str, state: LearnerState, step: int, step_time_s: float | None, now_s: float) -> None:
        """A learner is at `step` now; each new one took `step_time_s`, as far as that is known."""
        if step > state.step:
            state.busy_s += (step_time_s or 0.0) * (step - state.step)
            self._taken_steps[learner] = self._taken_steps.get(learner, 0) + step - state.step
            training = [s.step for s in self.learners.values() if s.step < self.settings.target_steps]
            self._clock += max(0, step - max(training, default=step))
            state.step = step
            state.progress_at_s = now_s
        self.global_step = max(self.global_step, state.step)
        if self._snapshot_due is not None and self._clock >= self._snapshot_due and self.phase in (RUNNING, FINISHING):
            assert self.settings.snapshot_every_steps is not None
            self._snapshot_due = self._clock + self.settings.snapshot_every_steps
            self._out.append(TakeSnapshot(step=self.global_step))

    def _set_snapshot_timer(self, now_s: float) -> None:
        if self.settings.snapshot_every_s is not None:
            self._out.append(SetTimer(key="snapshot", at_s=now_s + self.settings.snapshot_every_s))

    # ---- rounds ------------------------------------------------------------------------------------

    def _has_fragment(self, fragment: int) -> bool:
        return 0 <= fragment < self.settings.num_fragments

    def _may_contribute(self, learner: str, fragment: int) -> bool:
        state = self.learners[learner]
        return state.versions[fragment] > state.merged_base[fragment]

    def has_merged(self, learner: str, fragment: int, base: int) -> bool:
        """Whether a merge took what this learner sends from that base; in lock-step it may send it once more."""
        state = self.learners.get(learner)
        return state is not None and self._has_fragment(fragment) and base <= state.merged_base[fragment]

    def _open_due(self, now_s: float) -> None:
        """Open the rounds that are due, the longest due first, as far as there are slots."""
        if self.phase == FINAL:
            waiting = [f for f in sorted(self._final_left - self.away) if f not in self.rounds]
        elif self.phase in (RUNNING, FINISHING) and not self.settings.lockstep:
            here = [f for f in range(self.settings.num_fragments) if f not in self.rounds and f not in self.away]
            due = [f for f in here if self._due[f] <= self._clock]
            waiting = sorted(due, key=lambda f: (self._due[f], f))
        else:
            return
        slots = max(1, self.settings.overlap_steps) - len(self.rounds)
        for fragment in waiting[: max(0, slots)]:
            self._open(fragment, now_s, wait_for_all=self.phase == FINAL)

    def _open(self, fragment: int, now_s: float, *, wait_for_all: bool) -> None:
        live = set(self.learners)
        asked = {m for m in live if self._may_contribute(m, fragment)}
        pulled = not self.settings.lockstep or self.phase == FINAL
        awaited = live if wait_for_all else asked
        if not pulled:
            # Who joined at or after the step of this cut will not send it.
            awaited = {m for m in live if self.learners[m].last_cuts[fragment] < self._cuts[fragment]}
        current = Round(
            opened_at_s=now_s,
            asked=asked,
            awaited=set(awaited),
            wait_for_all=wait_for_all,
            pulled=pulled,
            kept=self._kept_late[fragment],
        )
        self._kept_late[fragment] = []
        oldest = self.versions[fragment] - self.settings.anchor_history
        for entry in list(current.kept):
            self._drop_kept(current.kept, entry.contribution.learner, "its base is no longer known", range(oldest))
        self.rounds[fragment] = current
        self._due[fragment] = self._clock + self.settings.inner_steps
        if current.pulled and asked:
            self._pull(fragment, asked)

    def _pull(self, fragment: int, asked: set[str]) -> None:
        self._out.append(Pull(fragment=fragment, to=tuple(sorted(asked))))
        self._record("pull", fragment=fragment, learners=sorted(asked), global_step=self.global_step)

    def _ask_later(self, learner: str, fragment: int) -> None:
        """Ask a learner that could not be asked when the round opened. It is not waited for, except for a quorum.

        The report of an install can be overtaken by the merge of what was sent after it: such a one changes nothing.
        """
        current = self.rounds[fragment]
        may_be_asked = learner not in current.asked and self._may_contribute(learner, fragment)
        if current.pulled and current.merge_started_s is None and may_be_asked:
            current.asked.add(learner)
            self._pull(fragment, {learner})

    def _contribution(self, c: Contribution, now_s: float) -> None:
        state = self.learners.get(c.learner)
        if state is None or not self._has_fragment(c.fragment):
            self._out.append(DropPayload(handle=c.handle, reason="there is no such learner or fragment"))
            return
        state.last_seen_s = now_s
        if c.fragment in self.away:
            self._out.append(DropPayload(handle=c.handle, reason="its shard is gone"))
            return
        reason = self._unacceptable(c, state)
        if reason:
            self._refuse(c, reason, now_s)
            return
        if self._hold_early(c):
            return
        entry = state.take_in_hand(c, self.versions[c.fragment])
        self._open_pushed(c, now_s)
        current = self.rounds.get(c.fragment)
        if c.base_version <= state.merged_base[c.fragment]:
            self._late(entry, keep=False)
        elif current is None or current.merge_started_s is not None or not self._belongs(c, current):
            self._late(entry, keep=self.settings.keep_late and self.phase != FINAL)
        elif c.learner in current.entries:
            self._late(entry, keep=False)
        else:
            state.count_good(c.fragment)
            self._record_contribution("contribution", c)
            # A contribution contains the earlier ones from the same base.
            same_base = range(c.base_version, c.base_version + 1)
            self._drop_kept(current.kept, c.learner, "a newer one from the same base", same_base)
            current.entries[c.learner] = entry
            self._advance(c.fragment, now_s)

    def _open_pushed(self, c: Contribution, now_s: float) -> None:
        """In lock-step a contribution, even one that is refused, opens its round."""
        if not self.settings.lockstep or self.phase not in (RUNNING, FINISHING):
            return
        if c.fragment not in self.rounds and c.sent_at_step > self._cuts[c.fragment]:
            self._cuts[c.fragment] = c.sent_at_step
            self._open(c.fragment, now_s, wait_for_all=True)

    def _hold_early(self, c: Contribution, refused: str = "") -> bool:
        """Hold what was sent for a later cut than the one whose turn it is.

        Who joins does not wait for the rounds that were open then, and so may run ahead of the others.
        """
        cut, opened = c.sent_at_step, self._cuts[c.fragment]
        current = self.rounds.get(c.fragment)
        if not self.settings.lockstep or cut <= opened or (current is not None and current.pulled):
            return False
        if current is None:
            # A fragment's cuts are H steps apart. Will anybody send an earlier one?
            starts = [max(opened, s.last_cuts[c.fragment]) for s in self.learners.values()]
            if self.phase == FINAL or all((cut - start - 1) // self.settings.inner_steps <= 0 for start in starts):
                return False
        self._early.append((c, refused))
        return True

    def _take_early(self, fragment: int, now_s: float) -> None:
        """What was held may have its turn now: a round is over, or a learner has gone."""
        early = [e for e in self._early if e[0].fragment == fragment]
        self._early = [e for e in self._early if e[0].fragment != fragment]
        for contribution, refused in sorted(early, key=lambda e: e[0].sent_at_step):
            if refused:
                self._refuse(contribution, refused, now_s)
            else:
                self._contribution(contribution, now_s)

    def _belongs(self, c: Contribution, current: Round) -> bool:
        """In lock-step a round collects one cut; the final cut takes what was sent after the learner's last step."""
        if not current.pulled:
            return c.sent_at_step == self._cuts[c.fragment]
        return not current.wait_for_all or c.sent_at_step >= self.learners[c.learner].step

    def _unacceptable(self, c: Contribution, state: LearnerState) -> str:
        """Why a contribution can not enter any merge; empty if it can."""
        newest = self.versions[c.fragment]
        if c.base_version > newest:
            return f"it starts from version {c.base_version}, the newest is {newest}"
        if c.base_version < newest - self.settings.anchor_history:
            return f"it starts from version {c.base_version}, which is no longer known (newest {newest})"
        if c.base_version < state.versions[c.fragment] and c.base_version not in state.counted[c.fragment]:
            return f"it starts from version {c.base_version}, which this learner never had"
        return ""

    def _late(self, entry: Entry, *, keep: bool) -> None:
        c = entry.contribution
        self.ledger.settle(c.learner, c.fragment, LATE, entry.unsettled)
        keep = keep and c.weight > 0.0
        self._record_contribution("late", c, kept=keep)
        if not keep:
            self._out.append(DropPayload(handle=c.handle, reason="late"))
            return
        waiting = self._kept_late[c.fragment]
        self._drop_kept(waiting, c.learner, "a newer late one of the same learner")
        entry.late += entry.unsettled
        entry.unsettled = 0
        waiting.append(entry)

    def _refuse(self, c: Contribution, reason: str, now_s: float, *, bad: bool = False) -> None:
        state = self.learners.get(c.learner)
        if state is None or not self._has_fragment(c.fragment):
            self._out.append(DropPayload(handle=c.handle, reason=reason if state else "its learner is gone"))
            return
        state.last_seen_s = now_s
        if c.fragment in self.away:
            self._out.append(DropPayload(handle=c.handle, reason="its shard is gone"))
            return
        if bad and self._is_one_too_many(c, state, reason):
            self._refuse_entry(state.take_in_hand(c, self.versions[c.fragment]), reason)
            self._expel(c.learner, state, reason, now_s)
            return
        if self._hold_early(c, reason):
            return
        self._refuse_entry(state.take_in_hand(c, self.versions[c.fragment]), reason)
        self._open_pushed(c, now_s)
        current = self.rounds.get(c.fragment)
        if current is None or current.merge_started_s is not None or not self._belongs(c, current):
            return
        if c.learner not in current.entries:
            current.refused.add(c.learner)
            self._advance(c.fragment, now_s)

    def _is_one_too_many(self, c: Contribution, state: LearnerState, reason: str) -> bool:
        """Count a bad contribution of a learner."""
        in_a_row = state.count_bad(c.fragment)
        self._record("unhealthy", learner=c.learner, reason=reason, in_a_row=in_a_row)
        return in_a_row >= self.settings.max_bad_in_a_row

    def _expel(self, learner: str, state: LearnerState, reason: str, now_s: float) -> None:
        """It takes part no more, until its process is another one."""
        why = f"{state.longest_bad_row} bad contributions in a row, the last one: {reason}"
        self._record("expelled", learner=learner, reason=why)
        self._out.append(Disconnect(learner=learner, reason=why))
        self._left([learner], why, now_s, returns=True)

    def is_expelled(self, session: str) -> bool:
        """Whether this learner process was taken out; another one of its island may come."""
        closed = self._closed.get(session)
        return closed is not None and closed.expelled

    def _refuse_entry(self, entry: Entry, reason: str) -> None:
        c = entry.contribution
        self.ledger.settle(c.learner, c.fragment, REFUSED, entry.unsettled)
        if counted := self.learners[c.learner].counted[c.fragment].get(c.base_version):
            counted.refused += entry.unsettled
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
        if current is None or current.merge_started_s is not None or self.phase == DONE:
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
        if not taken and current.pulled:
            self._close_without_merge(fragment, current, "no learner has taken a step since its last install", now_s)
            return
        for entry in entries:
            if entry.contribution.weight <= 0.0:
                self._out.append(DropPayload(handle=entry.contribution.handle, reason="zero steps weigh zero"))
        for entry in taken:
            self._book_merged(entry, current)
        current.merge_started_s = now_s
        current.merge_reason = reason
        current.members = tuple(e.contribution for e in taken)
        version = self.versions[fragment] + 1
        self._out.append(StartMerge(fragment=fragment, version=version, members=current.members))

    def _book_merged(self, entry: Entry, current: Round) -> None:
        c = entry.contribution
        state = self.learners[c.learner]
        current.booked.append(Booked(entry, state, state.merged_base[c.fragment]))
        self.ledger.settle(c.learner, c.fragment, MERGED, entry.unsettled)
        self.ledger.reclaim(c.fragment, LATE, entry.late, overlap=entry.overlap)
        self.ledger.reclaim(c.fragment, REFUSED, entry.refused)
        state.merged_base[c.fragment] = max(state.merged_base[c.fragment], c.base_version)

    def _close_without_merge(self, fragment: int, current: Round, reason: str, now_s: float) -> None:
        del self.rounds[fragment]
        for entry in [*current.entries.values(), *current.kept]:
            c = entry.contribution
            self.ledger.settle(c.learner, fragment, LATE, entry.unsettled)
            self._out.append(DropPayload(handle=c.handle, reason=reason))
        if current.wait_for_all:
            self._final_left.discard(fragment)
        self._record("merge_skipped", fragment=fragment, reason=reason)
        self._open_due(now_s)
        self._check_end(now_s)

    def _merge_finished(self, event: MergeFinished, now_s: float) -> None:
        fragment = event.fragment
        if fragment in self.away:
            return  # it was taken back
        current = self.rounds.pop(fragment)
        assert current.merge_started_s is not None
        assert event.version == self.versions[fragment] + 1
        self.versions[fragment] = event.version
        self.num_merges += 1
        self._merge_started_s[(fragment, event.version)] = current.merge_started_s
        self._merge_started_s.pop((fragment, event.version - self.settings.anchor_history), None)
        if not current.pulled:
            self._merged_cuts[fragment] = self._cuts[fragment]
        learners = tuple(sorted({c.learner for c in current.members}))
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
        self._out.append(Persist())
        if self.learners:
            self._out.append(Publish(fragment=fragment, version=event.version, to=self._live(), taken=learners))
        if self.phase == FINAL and current.wait_for_all and current.pulled:
            self._final_left.discard(fragment)
        self._take_early(fragment, now_s)
        self._open_due(now_s)
        self._check_end(now_s)

    def _installed(self, event: FragmentInstalled, now_s: float) -> None:
        state = self.learners.get(event.learner)
        f = event.fragment
        if state is None or not self._has_fragment(f) or not state.versions[f] < event.version <= self.versions[f]:
            return
        state.last_seen_s = now_s
        counted = state.counted[f].setdefault(state.versions[f], Counted())
        # What was processed while the sync was under way is overwritten by the install.
        overwritten = max(0, event.tokens - counted.tokens)
        overlap = counted.tokens > 0
        self.ledger.settle(event.learner, f, LATE, overwritten, overlap=overlap)
        counted.overlap = overwritten if overlap else 0
        counted.tokens += overwritten
        oldest = self.versions[f] - self.settings.anchor_history
        state.counted[f] = {base: c for base, c in state.counted[f].items() if base >= oldest}
        state.versions[f] = event.version
        if (started_s := self._merge_started_s.get((f, event.version))) is not None:
            # Merging and sending; the wait for the step boundary is not a cost of the sync but its slack.
            self.sync_time.add(max(0.0, now_s - started_s - event.waited_s))
        self._record(
            "install", learner=event.learner, fragment=f, version=event.version, step=event.step, steps=event.steps
        )
        if f in self.rounds:
            self._ask_later(event.learner, f)
        self._check_end(now_s)

    def bases_in_use(self, fragment: int) -> set[int]:
        """Versions that something may still be measured against: the driver must keep their parameters.

        They are what a live learner holds, may yet install, or may have sent a contribution from that is still on its
        way; and what the contributions in hand start from.
        """
        newest = self.versions[fragment]
        used = {newest}
        for state in self.learners.values():
            used |= set(range(state.versions[fragment], newest))
            used |= {base for base in state.counted[fragment] if base > state.merged_base[fragment]}
        used = {base for base in used if base >= newest - self.settings.anchor_history}
        in_hand = [entry.contribution for entry in self._kept_late[fragment]]
        if current := self.rounds.get(fragment):
            in_hand += [entry.contribution for entry in (*current.entries.values(), *current.kept)]
        in_hand += [c for c, _ in self._early if c.fragment == fragment]
        return used | {c.base_version for c in in_hand}

    # ---- time and end --------------------------------------------------------------------------------

    def _timer(self, key: str, now_s: float) -> None:
        if key.startswith("grace:"):
            self._advance(int(key.removeprefix("grace:")), now_s)
        elif key == "liveness":
            self._check_liveness(now_s)
        elif key == "quorum" and self._below_quorum_since_s is not None:
            timeout_s, quorum = self.settings.quorum_timeout_s, self.settings.quorum
            self._finish(QUORUM_LOST, f"{len(self.learners)} learners for {timeout_s:g} s, the quorum is {quorum}")
        elif key == "snapshot" and self.phase in (RUNNING, FINISHING):
            self._out.append(TakeSnapshot(step=self.global_step))
            self._set_snapshot_timer(now_s)
        elif key == "start" and self.phase != GATHERING:
            missing = ", ".join(sorted(self.expected))
            self.expected.clear()
            self._check_quorum(f"{missing}: not there in time", now_s)
        elif key == "start":
            missing = ", ".join(sorted(self.expected))
            # They may still join, but nobody counts on them any more.
            self.expected.clear()
            self._out_of_time = True
            if len(self.learners) >= self.settings.quorum:
                self._record("warning", message=f"starting without {missing}: not there in time")
                self._go(now_s)
            else:
                self._finish(QUORUM_LOST, f"not there within {self.settings.start_timeout_s:g} s: {missing}")

    def _check_liveness(self, now_s: float) -> None:
        timeout_s = self.settings.heartbeat_timeout_s
        silent = [m for m in self._live() if now_s - self.learners[m].last_seen_s > timeout_s]
        reason = f"unheard of for {timeout_s:g} s"
        for learner in silent:
            self._out.append(Disconnect(learner=learner, reason=reason))
        self._left(silent, reason, now_s, returns=True)
        if self.phase == DONE:
            return
        self._out.append(SetTimer(key="liveness", at_s=now_s + timeout_s / 4))
        if not self.rounds and self.learners and all(self._stalled(s, now_s) for s in self.learners.values()):
            # Nobody steps, so no fragment gets due; with a bound on drift that would be for ever.
            self._clock = max(self._clock, min(self._due))
            self._open_due(now_s)
        self._check_end(now_s)

    def _stalled(self, state: LearnerState, now_s: float) -> bool:
        """It lives, but has taken no step for long (a bound on drift, an evaluation): the end does not wait for it."""
        patience_s = max(self.settings.heartbeat_timeout_s, 4 * (state.step_time.value or 0.0))
        return not self.settings.lockstep and now_s - state.progress_at_s > patience_s

    def _check_end(self, now_s: float) -> None:
        """Move on through finishing and final when what they wait for has happened."""
        target = self.settings.target_steps
        if self._below_quorum_since_s is not None:
            return  # those who are away may come back, and the end wants a quorum to begin with
        if self.phase == RUNNING and self.global_step >= target:
            self.phase = FINISHING
            self._finish_awaited = {m for m in self.learners if self._worth_waiting_for(m, now_s)}
        if self.phase == FINISHING:
            awaited = [self.learners[m] for m in self._finish_awaited if m in self.learners]
            if all(s.step >= target or self._stalled(s, now_s) for s in awaited):
                self._start_final_cut(now_s)
        elif self.phase == FINAL and not self.learners and self._nothing_is_merging:
            self.rounds.clear()
            self._finish(COMPLETED, "the target is reached, and all learners have gone")
        elif self.phase == FINAL and not self._final_left and not self.rounds:
            if any(s.versions != self.versions for s in self.learners.values()):
                return
            self._finish(COMPLETED, f"all learners hold the final version of all {len(self.versions)} fragments")

    @property
    def _nothing_is_merging(self) -> bool:
        return all(current.merge_started_s is None for current in self.rounds.values())

    def _worth_waiting_for(self, learner: str, now_s: float) -> bool:
        """Whether the end waits until this learner has taken the target's steps too.

        Yes if it needs little more time, in seconds or against the run so far; slower hardware would keep all others
        idle, so its run ends where it is.
        """
        state = self.learners[learner]
        missing = self.settings.target_steps - state.step
        if missing <= 0 or state.step_time.value is None:
            return True
        assert self._started_s is not None
        patience_s = max(self.settings.finish_wait_s, self.settings.finish_tolerance * (now_s - self._started_s))
        return missing * state.step_time.value <= patience_s

    def _start_final_cut(self, now_s: float) -> None:
        """Learners stop; each fragment is merged once more from everybody, so that no work is left out."""
        self.phase = FINAL
        self._final_left = set(range(self.settings.num_fragments))
        self._record("final_cut", global_step=self.global_step)
        self._out.append(Persist())
        if self.learners:
            self._out.append(StopLearners(to=self._live(), reason="the run has reached its target"))
        for fragment in sorted({c.fragment for c, _ in self._early}):
            self._take_early(fragment, now_s)
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
        busy_s = self._busy_s_of_gone + sum(s.busy_s * self.chips.get(m, 1) for m, s in self.learners.items())
        allotted = sum(chips * (now_s - self._added_at_s.get(m, self._started_s)) for m, chips in self.chips.items())
        return useful * busy_s / (allotted + self._released_chip_s)
