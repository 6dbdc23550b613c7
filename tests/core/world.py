"""A world of one SyncerCore and many LearnerCores on a virtual clock, with invariants checked after every event.

Links: each stay of a learner has four first-in first-out channels (control and bulk, up and down). Every message gets
its own latency, so control and bulk overtake each other, but nothing overtakes within a channel. A closed connection
loses what is in it. Learners follow the driver rules of core.learner: events at step boundaries only, merged
fragments before pulls.

The world keeps its own books (which tokens of which stay are in which contribution), and never looks at the cores'
books except to compare.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from diloco_cli.core import recovery
from diloco_cli.core.learner import LearnerCore, LearnerSettings
from diloco_cli.core.state import SyncerSettings
from diloco_cli.core.syncer import DONE, FINAL, SyncerCore
from diloco_cli.core.types import (
    AcceptReturn,
    CancelTimer,
    Contribution,
    ContributionReceived,
    ContributionRefused,
    DiscardPayload,
    Disconnect,
    DropPayload,
    Finish,
    FragmentInstalled,
    FragmentsBack,
    FragmentsLost,
    FragmentsReached,
    InstallFragment,
    LearnerAlive,
    LearnerJoined,
    LearnerLeft,
    LearnerReport,
    LearnerReturned,
    MergedReceived,
    MergeFinished,
    Persist,
    Publish,
    Pull,
    PullReceived,
    Reconnected,
    Record,
    SendFragment,
    SendState,
    SetTimer,
    StartMerge,
    StepFinished,
    StopLearners,
    StopReceived,
    StopRequested,
    TakeSnapshot,
    TimerFired,
)

EPSILON_S = 1e-6


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    kill | hang | join | reconnect   a learner's process and connections
    poison | heal                    from now on its contributions are bad, or good again
    duplicate                        its last contribution arrives once more
    slow                             its steps take `factor` times as long
    cut                              nothing passes its link for `factor` seconds; what was sent waits
    slow_link                        its latency is `factor` times as long
    clock                            the syncer's clock jumps forward by `factor` seconds (a machine that slept)
    syncer                           the syncer's process is killed, and there again after `factor` seconds
    shard                            the same of the process that holds every second fragment

    It happens at a time, or just before the event with that number (`at_event`), whatever that is.
    """

    at_s: float
    kind: str
    learner: str
    factor: float = 1.0
    at_event: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """One world's constants."""

    step_s: Mapping[str, float]
    num_fragments: int = 3
    inner_steps: int = 6
    overlap_steps: int = 2
    quorum: int = 1
    grace_safety: float = 0.9
    target_steps: int = 30
    keep_late: bool = False
    lockstep: bool = False
    same_offset: bool = False
    max_drift_steps: int | None = None
    finish_tolerance: float = 0.1
    finish_wait_s: float = 10.0
    heartbeat_timeout_s: float = 4.0
    start_timeout_s: float = 20.0
    quorum_timeout_s: float = 0.0
    """Above zero: killed learners count as ones that may come back."""
    max_bad_in_a_row: int = 3
    latency_s: tuple[float, float] = (0.001, 0.05)
    merge_s: tuple[float, float] = (0.001, 0.02)
    jitter: float = 0.1
    report_every: int = 1
    present: frozenset[str] | None = None
    """Who joins at the start; None: everybody."""
    faults: tuple[Fault, ...] = ()
    stop_at_s: float | None = None
    seed: int = 0


@dataclass
class Stay:
    """One connection's life: from joining to leaving."""

    number: int
    learner: str
    open: bool = True
    hung: bool = False
    connection: int = 0
    """Grows with each loss of the connection; what was sent on an older one never arrives."""
    connected: bool = True
    reached: list[int] = field(default_factory=list)
    """Per fragment: the life of its shard that it is connected with."""
    held_state: SendState | None = None
    """What it joins with, until all fragments have come."""
    announced: bool = True
    """The syncer has heard who this is, where it stands, and so talks with it."""
    contributes: bool = True
    """The learner has heard that it may go on."""
    session: str = ""
    """Of the process, which may have several stays."""
    joined_at_step: int = 0
    unsettled: dict[int, Contribution] = field(default_factory=dict)
    """Lock-step: per fragment, what was sent and has had no answer: sent again on a new connection."""
    core: LearnerCore | None = None
    busy: bool = False
    inbox: list[Any] = field(default_factory=list)
    tokens: int = 0
    """Tokens processed in this stay."""
    base_tokens: list[int] = field(default_factory=list)
    """Per fragment: `tokens` when it was last installed."""
    last_delivery_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    under_way: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    """Per channel, in the order of sending: what to do when it arrives, and when it is lost."""
    taken_steps: int = 0
    reported_step: int = 0
    step_times: list[float] = field(default_factory=list)
    arrived_s: dict[int, float] = field(default_factory=dict)
    history: list[tuple[Any, ...]] = field(default_factory=list)
    """Everything that the learner did, without times: ('step',), ('send', f, base, ...), ('install', f, v)."""


@dataclass
class Sent:
    """A contribution as the world knows it: which tokens of which stay."""

    stay: int
    fragment: int
    first_token: int
    last_token: int
    bad: bool = False
    """It holds NaN, say: the driver refuses it."""
    fate: str = ""


class Violation(AssertionError):
    """An invariant of the protocol does not hold."""


class World:
    """Run one world to its end with run()."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.chance = random.Random(rules.seed)
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.timers: dict[str, float] = {}
        self.stays: list[Stay] = []
        self.current: dict[str, Stay] = {}
        self.sent: dict[int, Sent] = {}
        self._flying: set[int] = set()
        self.published: dict[int, str] = {}
        self.merged_tokens: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.poisoned: set[str] = set()
        self.speed = dict.fromkeys(rules.step_s, 1.0)
        self.link_factor = dict.fromkeys(rules.step_s, 1.0)
        self.cut_until_s = dict.fromkeys(rules.step_s, 0.0)
        self.clock_offset_s = 0.0
        self.jumped_at_s = -math.inf
        self.happened: Counter[str] = Counter()
        self.phases: set[str] = set()
        self.records: list[tuple[float, str, dict[str, Any]]] = []
        self.effects: list[tuple[float, Any]] = []
        self.merging: dict[int, int] = {}
        self.down = False
        """The syncer's process is not there."""
        self.life = 0
        self.shard_life = [0] * rules.num_fragments
        self.away: set[int] = set()
        """Fragments whose shard is not there."""
        self.durable: str = ""
        self._volatile: dict[tuple[int, int], list[tuple[tuple[int, int], tuple[int, int]]]] = {}
        """Per merge that is not persisted yet: whose tokens are in it."""
        self.finished: Finish | None = None
        self.finished_s = 0.0
        self.num_events = 0
        self._last_contribution: dict[str, tuple[Contribution, int]] = {}
        self.final = False
        self.settings = SyncerSettings(
            num_fragments=rules.num_fragments,
            chips=dict.fromkeys(rules.step_s, 1),
            inner_steps=rules.inner_steps,
            overlap_steps=rules.overlap_steps,
            quorum=rules.quorum,
            grace_safety=rules.grace_safety,
            keep_late=rules.keep_late,
            lockstep=rules.lockstep,
            target_steps=rules.target_steps,
            finish_tolerance=rules.finish_tolerance,
            finish_wait_s=math.inf if rules.lockstep else rules.finish_wait_s,
            heartbeat_timeout_s=rules.heartbeat_timeout_s,
            start_timeout_s=rules.start_timeout_s,
            quorum_timeout_s=rules.quorum_timeout_s,
            max_bad_in_a_row=rules.max_bad_in_a_row,
        )
        self.syncer = SyncerCore(self.settings)
        self.reaching = ""
        """The learner that has just reached a shard."""
        self.kept_bases: list[set[int]] = [{0} for _ in range(len(self.syncer.versions))]

    # ---- clock ----

    @property
    def syncer_s(self) -> float:
        """The syncer's clock."""
        return self.now_s + self.clock_offset_s

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, action))

    def run(self, limit_s: float | None = None) -> World:
        limit_s = self.bound_s() if limit_s is None else limit_s
        self._perform(self.syncer.start(0.0))
        present = self.rules.present if self.rules.present is not None else frozenset(self.rules.step_s)
        for learner in sorted(present):
            self.at(self._latency(), lambda m=learner: self._join(m))
        at_events: dict[int, list[Fault]] = defaultdict(list)
        for fault in self.rules.faults:
            if fault.at_event is None:
                self.at(fault.at_s, lambda f=fault: self._fault(f))
            else:
                at_events[fault.at_event].append(fault)
        if self.rules.stop_at_s is not None:
            self.at(self.rules.stop_at_s, lambda: self._tell(StopRequested(reason="ctrl-c")))
        while self._heap and self.finished is None:
            self.now_s, _, action = heapq.heappop(self._heap)
            if self.now_s > limit_s:
                raise Violation(f"no end after {limit_s:g} s: {self.describe()}")
            self.num_events += 1
            if self.num_events > 200_000:
                raise Violation(f"too many events: {self.describe()}")
            for fault in at_events.pop(self.num_events, ()):
                if self.finished is None:
                    self._fault(fault)
            if self.finished is None:
                action()
        if self.finished is None:
            raise Violation(f"nothing happens any more: {self.describe()}")
        self._check_end()
        return self

    def bound_s(self) -> float:
        """Within this time every run must have ended: the last fault, then the work, then what ends are allowed."""
        r = self.rules
        slowest = (
            max(r.step_s.values()) * (1 + r.jitter) * max([1.0, *(f.factor for f in r.faults if f.kind == "slow")])
        )
        last_fault = max([0.0, *(f.at_s for f in r.faults)]) + sum(f.factor for f in r.faults if f.kind == "cut")
        if any(f.at_event is not None for f in r.faults):
            last_fault += (r.target_steps + 1) * slowest
        crashes = [f.factor for f in r.faults if f.kind in ("syncer", "shard")]
        last_fault += sum(crashes) + len(crashes) * (r.heartbeat_timeout_s + r.start_timeout_s) + r.quorum_timeout_s
        latency_s = r.latency_s[1] * max([1.0, *(f.factor for f in r.faults if f.kind == "slow_link")])
        round_trip_s = 4 * latency_s + r.merge_s[1] + slowest
        per_step = slowest + (r.num_fragments * round_trip_s if r.lockstep or r.max_drift_steps else 0.0)
        tail = 4 * r.num_fragments * round_trip_s + 6 * r.heartbeat_timeout_s + r.start_timeout_s
        if r.max_drift_steps:
            tail += len(r.faults) * 3 * r.heartbeat_timeout_s
        return last_fault + (r.target_steps + 1) * per_step + tail + 20 * slowest

    def describe(self) -> str:
        s = self.syncer
        learners = {
            m: (st.core.step, st.core.waits_for, st.core.steps, st.core.versions) if st.core else None
            for m, st in self.current.items()
        }
        return f"t={self.now_s:.2f} {s.phase} versions={s.versions} step={s.global_step} {s.rounds} {learners}"

    def _latency(self) -> float:
        return self.chance.uniform(*self.rules.latency_s)

    # ---- links ----

    def _link(
        self, stay: Stay, channel: str, deliver: Callable[[], None], lost: Callable[[], None] | None = None
    ) -> None:
        if not stay.connected or self.down:
            if lost is not None:
                lost()
            return
        connection = stay.connection
        latency_s = self._latency() * self.link_factor[stay.learner]
        when = max(self.now_s + latency_s, stay.last_delivery_s[channel], self.cut_until_s[stay.learner])
        stay.last_delivery_s[channel] = when

        stay.under_way[channel].append((deliver, lost))

        def arrive() -> None:
            if stay.connection != connection:
                return  # lost with its connection
            until_s = self.cut_until_s[stay.learner]
            if stay.open and until_s > self.now_s:  # cut while it was on its way
                self.at(until_s, arrive)
                return
            # The oldest of the channel, whichever this was: nothing overtakes within a channel.
            deliver, lost = stay.under_way[channel].popleft()
            if stay.open and not (stay.hung and channel.startswith("up")):
                deliver()
            elif lost is not None:
                lost()

        self.at(when, arrive)

    # ---- the syncer's driver ----

    def _tell(self, event: Any) -> None:
        if self.finished is not None or self.down:
            return
        before, phase = list(self.syncer.versions), self.syncer.phase
        effects = self.syncer.handle(event, self.syncer_s)
        self.phases.add(self.syncer.phase)
        self._check_versions(before, phase, event)
        self._perform(effects)
        self._forget_bases()
        self._check_state()

    def _forget_bases(self) -> None:
        """As run.global_model does: of older versions only those are kept that the core says are in use."""
        for f, kept in enumerate(self.kept_bases):
            kept.add(self.syncer.versions[f])
            kept &= self.syncer.bases_in_use(f)

    def _perform(self, effects: Sequence[Any]) -> None:
        self.returning: set[str] = set()
        for effect in effects:
            if self.finished is not None:
                raise Violation(f"{effect} after the end")
            self.effects.append((self.now_s, effect))
            match effect:
                case Pull():
                    self._check_addressees(effect)
                    if effect.fragment in self.away:
                        raise Violation(f"{effect}, whose shard is away")
                    for learner in effect.to:
                        self._down(learner, "control", PullReceived(fragment=effect.fragment))
                case Persist():
                    self.durable = json.dumps(recovery.dump(self.syncer, self.syncer_s))
                    versions = self.syncer.versions
                    self._volatile = {k: v for k, v in self._volatile.items() if k[1] > versions[k[0]]}
                case AcceptReturn():
                    self._check_addressees(effect)
                    self.returning.add(effect.learner)
                    self._down(effect.learner, "control", effect)
                case TakeSnapshot():
                    pass
                case Publish():
                    self._check_addressees(effect)
                    if effect.version != self.syncer.versions[effect.fragment]:
                        raise Violation(f"published {effect}, the newest is {self.syncer.versions}")
                    if self.reaching:
                        if effect.to != (self.reaching,):
                            raise Violation(f"{effect} is not for {self.reaching}")
                    elif self.returning:
                        if not set(effect.to) <= self.returning:
                            raise Violation(f"{effect} is not for {self.returning}")
                    elif set(effect.to) != set(self.syncer.learners):
                        raise Violation(f"{effect} is not for all of {sorted(self.syncer.learners)}")
                    for learner in effect.to:
                        self._down_bulk(learner, effect)
                case SendState():
                    self._check_addressees(effect)
                    self._begin_anew(effect.learner)
                    self._down(effect.learner, "control", effect)
                case StopLearners():
                    self.final = True
                    self._check_addressees(effect)
                    for learner in effect.to:
                        self._down(learner, "control", StopReceived(reason=effect.reason))
                case StartMerge():
                    self._start_merge(effect)
                case DropPayload():
                    self._settle(effect.handle, "dropped")
                case SetTimer():
                    self._set_timer(effect)
                case CancelTimer():
                    self.timers.pop(effect.key, None)
                case Disconnect():
                    stay = self.current.get(effect.learner)
                    if stay is not None and effect.learner not in self.syncer.learners:
                        self._cut_off(stay, effect.reason)
                case Record():
                    self.records.append((self.now_s, effect.event, dict(effect.data)))
                case Finish():
                    self.finished, self.finished_s = effect, self.now_s
                case _:
                    raise Violation(f"unknown effect {effect}")

    def _check_addressees(self, effect: Any) -> None:
        to = (effect.learner,) if isinstance(effect, SendState | AcceptReturn) else effect.to
        # Who was there when the syncer died is spoken to until it is missed.
        gone = [m for m in to if m not in self.current or not (self.current[m].open or self.life)]
        if gone or list(to) != sorted(set(to)) or not to:
            raise Violation(f"{effect} to {gone}, who are gone (or no order, or nobody)")

    def _set_timer(self, effect: SetTimer) -> None:
        self.timers[effect.key] = effect.at_s

        self._wake(effect.key, effect.at_s)

    def _wake(self, key: str, at_s: float) -> None:
        life = self.life

        def fire() -> None:
            if life == self.life and self.timers.get(key) == at_s and self.syncer_s >= at_s - EPSILON_S:
                del self.timers[key]
                self._tell(TimerFired(key=key))

        self.at(at_s - self.clock_offset_s, fire)

    def _start_merge(self, effect: StartMerge) -> None:
        s, r = self.syncer, self.rules
        if effect.fragment in self.merging:
            raise Violation(f"two merges of fragment {effect.fragment} at once")
        if effect.version != s.versions[effect.fragment] + 1:
            raise Violation(f"{effect} after version {s.versions[effect.fragment]}")
        keys = [(c.learner, c.base_version) for c in effect.members]
        if keys != sorted(set(keys)):
            raise Violation(f"members out of order or twice: {keys}")
        with_steps = {c.learner for c in effect.members if c.steps >= 1}
        current = s.rounds[effect.fragment]
        members: list[tuple[tuple[int, int], tuple[int, int]]] = []
        if not r.lockstep and not (s.phase == FINAL and current.wait_for_all) and len(with_steps) < r.quorum:
            raise Violation(f"a merge of {sorted(with_steps)} with a quorum of {r.quorum}")
        for c in effect.members:
            if c.base_version not in self.kept_bases[effect.fragment]:
                raise Violation(f"the base of {c} was forgotten")
            if c.weight <= 0 or c.base_version > s.versions[effect.fragment]:
                raise Violation(f"{c} may not be merged")
            if c.base_version < s.versions[effect.fragment] - s.settings.anchor_history:
                raise Violation(f"the base of {c} is known no more")
            if c.learner not in s.learners:
                raise Violation(f"absent {c.learner} has a weight")
            self._settle(c.handle, "merged")
            sent = self.sent[c.handle]
            if sent.bad:
                raise Violation(f"{c} was refused, and is merged")
            if sent.fragment != effect.fragment:
                raise Violation(f"{c} in a merge of fragment {effect.fragment}")
            runs = self.merged_tokens[sent.stay, sent.fragment]
            for first, last in runs:
                if sent.first_token < last and first < sent.last_token:
                    raise Violation(f"{c}: tokens {sent} were merged before as {(first, last)}")
            runs.append((sent.first_token, sent.last_token))
            members.append(((sent.stay, sent.fragment), runs[-1]))
        self.merging[effect.fragment] = effect.version
        self._volatile[effect.fragment, effect.version] = members
        life, shard_life = self.life, self.shard_life[effect.fragment]

        def finish() -> None:
            if life != self.life or shard_life != self.shard_life[effect.fragment]:
                return
            del self.merging[effect.fragment]
            self._tell(MergeFinished(fragment=effect.fragment, version=effect.version))

        self.at(self.now_s + self.chance.uniform(*r.merge_s), finish)

    def _settle(self, handle: int, fate: str) -> None:
        sent = self.sent.get(handle)
        if sent is None:
            raise Violation(f"handle {handle} was never given")
        if sent.fate:
            raise Violation(f"handle {handle} {fate} after it was {sent.fate}")
        sent.fate = fate

    # ---- invariants ----

    def _check_versions(self, before: list[int], phase: str, event: Any) -> None:
        after = self.syncer.versions
        grown = [f for f, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        wanted = [event.fragment] if isinstance(event, MergeFinished) and phase != DONE else []
        if grown != wanted and not (isinstance(event, MergeFinished) and not grown and self.finished):
            raise Violation(f"{event} changed versions {before} to {after}")
        if any(after[f] != before[f] + 1 for f in grown):
            raise Violation(f"versions went from {before} to {after}")

    def _check_state(self) -> None:
        s, r = self.syncer, self.rules
        if not r.lockstep and len(s.rounds) > max(1, r.overlap_steps):
            raise Violation(f"{len(s.rounds)} rounds at once")
        available = len(s.learners) + len(s.expected)
        waits = bool(r.quorum_timeout_s) and "quorum" in self.timers
        if available < r.quorum and self.finished is None and s.phase != FINAL and not waits:
            raise Violation(f"{available} learners left with a quorum of {r.quorum}, and no end")
        for fragment in range(r.num_fragments):
            row = s.ledger.of_fragment(fragment)
            if row["processed"] != sum(v for k, v in row.items() if k != "processed") or min(row.values()) < 0:
                raise Violation(f"the token account of fragment {fragment} does not add up: {row}")
            merged = sum(b - a for (_, f), runs in self.merged_tokens.items() if f == fragment for a, b in runs)
            if row["merged"] != merged:
                raise Violation(f"fragment {fragment}: {merged} tokens were merged, the account says {row}")
        for fragment, current in s.rounds.items():
            until_s = current.grace_until_s
            over = until_s is not None and self.syncer_s > until_s + EPSILON_S and self.now_s > self.jumped_at_s
            met = sum(e.contribution.steps > 0 for e in current.entries.values()) >= r.quorum
            if over and met and current.merge_started_s is None and not current.wait_for_all:
                raise Violation(f"fragment {fragment} still waits after its grace window, which ended at {until_s}")
        truth = sum(stay.tokens for stay in self.stays)
        if s.ledger.processed_tokens > truth:
            raise Violation(f"{s.ledger.processed_tokens} tokens in the account, {truth} were processed")
        share = s.ledger.useful_share
        if share is not None and not 0.0 <= share <= 1.0:
            raise Violation(f"useful share {share}")
        for t, event, data in self.records[-4:]:
            if event == "quorum" and t == self.now_s:
                longest = r.grace_safety * r.overlap_steps * max(self._slowest_step_s(), 0.0)
                if not 0.0 <= data["grace_window_s"] <= longest + EPSILON_S:
                    raise Violation(f"a grace window of {data['grace_window_s']}, at most {longest} is right")

    def _slowest_step_s(self) -> float:
        return max((max(stay.step_times, default=0.0) for stay in self.stays), default=0.0)

    def _check_end(self) -> None:
        s, r = self.syncer, self.rules
        assert self.finished is not None
        left = len(s.learners) + len(s.expected)
        if self.finished.status == "quorum_lost" and not left < r.quorum:
            raise Violation(f"{self.finished} with {left} left and a quorum of {r.quorum}")
        if self.finished.status == "completed":
            if left < r.quorum and not self.of("final_cut"):
                raise Violation(f"completed with {left} left and a quorum of {r.quorum}")
            for learner in s.learners:
                core = self.current[learner].core
                if core is None or core.versions != s.versions:
                    raise Violation(f"{learner} ends at {core and core.versions}, the syncer at {s.versions}")
                if not core.parked:
                    raise Violation(f"{learner} was never stopped")
            for fragment in range(r.num_fragments):
                if s.ledger.of_fragment(fragment)["pending"]:
                    raise Violation(f"tokens pending at the end: {s.ledger.of_fragment(fragment)}")
            if s.rounds or self.merging:
                raise Violation("completed with open rounds")
            held = [h for h, sent in self.sent.items() if not sent.fate and h not in self._in_flight()]
            if held:
                raise Violation(f"payloads {held} leaked")
        elif self.finished.status == "stopped" and r.stop_at_s is None:
            raise Violation("nobody asked for a stop")

    def _in_flight(self) -> set[int]:
        return {h for h, sent in self.sent.items() if sent.fate == "" and h in self._flying}

    # ---- learners ----

    def _join(self, learner: str) -> None:
        if self.finished is not None:
            return
        old = self.current.get(learner)
        if old is not None and old.open:
            self._close(old, tell=False)
        stay = Stay(len(self.stays), learner, session=f"session {len(self.stays)}", reached=self._shards_here())
        self.stays.append(stay)
        self.current[learner] = stay
        if self.down:
            stay.connected = False  # it knocks until somebody is there
            return
        stay.announced = True
        self._tell(LearnerJoined(learner=learner, session=stay.session))
        if learner in self.syncer.learners:
            self.at(self.now_s + self.rules.heartbeat_timeout_s / 3, lambda: self._heartbeat(stay))
        elif self.finished is None:
            self._close(stay, tell=False)

    def _heartbeat(self, stay: Stay) -> None:
        if stay.open and stay.connected and self.finished is None:
            self._up_control(stay, LearnerAlive(learner=stay.learner))
            self.at(self.now_s + self.rules.heartbeat_timeout_s / 3, lambda: self._heartbeat(stay))

    def _close(self, stay: Stay, *, tell: bool = False, reason: str = "killed") -> None:
        was_open, stay.open = stay.open, False
        if was_open and tell and stay.connected:
            returns = self.rules.quorum_timeout_s > 0
            self._tell(LearnerLeft(learner=stay.learner, reason=reason, returns=returns))

    # ---- connections that end, and come back ----

    def _begin_anew(self, learner: str) -> None:
        """A learner that has trained before is told to start from Theta: its counters count no more."""
        stay = self.current[learner]
        if stay.core is None:
            return
        self._disconnect(stay)
        stay.open = False
        self.current[learner] = Stay(len(self.stays), learner, session=stay.session, reached=stay.reached)
        self.stays.append(self.current[learner])
        self._heartbeat(self.current[learner])

    def _disconnect(self, stay: Stay) -> None:
        """Its connection is gone, with all that was on it; its process goes on."""
        stay.connected = False
        stay.connection += 1
        for channel in stay.under_way.values():
            for _, lost in channel:
                if lost is not None:
                    lost()
            channel.clear()
        stay.last_delivery_s.clear()

    def _cut_off(self, stay: Stay, reason: str) -> None:
        """The syncer closed its connection. One that lives, and was not turned away, tries again."""
        if not stay.open or not stay.connected:
            return
        if stay.hung or stay.core is None or "ending" in reason or self.syncer.is_expelled(stay.session):
            self._close(stay)
            return
        self._disconnect(stay)
        at_s = max(self.cut_until_s[stay.learner], self.now_s) + self._latency()
        self.at(at_s, lambda: self._reconnect(stay))

    def _reconnect(self, stay: Stay) -> None:
        if not stay.open or stay.hung or stay.connected or self.down or self.finished is not None:
            return
        stay.connected = True
        stay.reached = self._shards_here()
        self.happened["return"] += 1
        core = stay.core
        if core is None:
            self._tell(LearnerJoined(learner=stay.learner, session=stay.session))
        else:
            self._learner_effects(stay, core.handle(Reconnected()))
            event = LearnerReturned(
                learner=stay.learner,
                session=stay.session,
                step=core.step,
                tokens=stay.tokens,
                joined_at_step=stay.joined_at_step,
                versions=tuple(core.versions),
                fragment_tokens=tuple(core.tokens),
                sent_at=core.sent_at,
            )
            stay.reported_step = core.step
            stay.announced = stay.contributes = False

            def announce() -> None:
                stay.announced = True
                self._tell(event)

            self._link(stay, "up control", announce)
        if stay.open:
            self.at(self.now_s + self.rules.heartbeat_timeout_s / 3, lambda: self._heartbeat(stay))

    def _syncer_dies(self, back_after_s: float) -> None:
        self.down = True
        self.life += 1
        self.timers.clear()
        self.merging.clear()
        for merged in self._volatile.values():
            for key, run in merged:
                self.merged_tokens[key].remove(run)
        self._volatile.clear()
        for stay in self.stays:
            if stay.open and stay.connected:
                self._disconnect(stay)
        for handle, sent in self.sent.items():
            if not sent.fate and handle not in self._flying:
                sent.fate = "lost with the syncer"
        self.at(self.now_s + back_after_s, lambda: self._syncer_is_back(back_after_s))

    def _syncer_is_back(self, elapsed_s: float) -> None:
        self.down = False
        if self.durable:
            saved = json.loads(self.durable)
            elapsed_s = self.syncer_s - saved["saved_at_s"]
            self.syncer, effects = recovery.load(
                self.settings,
                saved,
                self.syncer_s,
                elapsed_s=elapsed_s,
                patience_s=self.rules.heartbeat_timeout_s,
            )
        else:
            self.syncer = SyncerCore(self.settings)
            effects = self.syncer.start(self.syncer_s)
        # Its shards are started with it.
        self.shard_life = [life + 1 for life in self.shard_life]
        self.away.clear()
        self.final = self.syncer.phase == FINAL
        self.kept_bases = [{v, max(0, v - 1)} for v in self.syncer.versions]
        for stay in self.stays:
            if (
                stay.open
                and stay.core is not None
                and any(v > newest for v, newest in zip(stay.core.versions, self.syncer.versions, strict=True))
            ):
                raise Violation(f"{stay.learner} has {stay.core.versions}, the syncer only {self.syncer.versions}")
        self._perform(effects)
        for stay in self.stays:
            if stay.open and self.current.get(stay.learner) is stay:
                self.at(self.now_s + self._latency(), lambda s=stay: self._reconnect(s))

    # ---- shards ----

    def _shards_here(self) -> list[int]:
        """What a learner that connects now is connected with; -1: that shard is away."""
        return [-1 if f in self.away else life for f, life in enumerate(self.shard_life)]

    def _shard_dies(self, fragments: tuple[int, ...], back_after_s: float) -> None:
        self.away.update(fragments)
        for f in fragments:
            self.shard_life[f] += 1
            if (version := self.merging.pop(f, None)) is not None:
                for key, run in self._volatile.pop((f, version), ()):
                    self.merged_tokens[key].remove(run)
        lives = [self.shard_life[f] for f in fragments]
        self._tell(FragmentsLost(fragments=fragments, reason="killed"))
        for f in fragments:
            self.kept_bases[f] = {self.syncer.versions[f], max(0, self.syncer.versions[f] - 1)}
        for handle, sent in self.sent.items():
            if not sent.fate and sent.fragment in fragments and handle not in self._flying:
                raise Violation(f"handle {handle} is kept, but its shard is gone")

        def back() -> None:
            if self.finished is None and not self.down and lives == [self.shard_life[f] for f in fragments]:
                self.away.difference_update(fragments)
                self._tell(FragmentsBack(fragments=fragments))
                for stay in self.stays:
                    if stay.open:
                        self.at(self.now_s + self._latency(), partial(self._reach, stay, fragments, lives))

        self.at(self.now_s + back_after_s, back)

    def _reach(self, stay: Stay, fragments: tuple[int, ...], lives: list[int]) -> None:
        """A learner has found a shard again."""
        usable = stay.open and stay.connected and not self.down and self.finished is None
        if not usable or lives != [self.shard_life[f] for f in fragments] or lives[0] == stay.reached[fragments[0]]:
            return
        for f, life in zip(fragments, lives, strict=True):
            stay.reached[f] = life
        if not stay.announced:
            return  # it has yet to say where it stands, and is told all that it lacks then
        self.reaching = stay.learner
        core = stay.core
        event = FragmentsReached(
            learner=stay.learner,
            fragments=fragments,
            step=core.step if core is not None else None,
            sent_at=tuple(core.sent_at[f] if core is not None else -1 for f in fragments),
        )
        self._tell(event)
        self.reaching = ""
        if stay.held_state is not None and stay.reached == self.shard_life:
            held, stay.held_state = stay.held_state, None
            self._deliver(stay, held)
        self._send_unsettled(stay, fragments)

    def _send_unsettled(self, stay: Stay, fragments: Sequence[int]) -> None:
        for c in [c for f, c in stay.unsettled.items() if f in fragments]:
            again = replace(c, handle=self._new_handle(self.sent[c.handle]))
            # To the same effect as before.
            self._send_contribution(stay, again, refused=self.sent[c.handle].bad)

    def _fault(self, fault: Fault) -> None:
        stay = self.current.get(fault.learner)
        alive = stay is not None and stay.open and not stay.hung
        match fault.kind:
            case "kill" if stay is not None and stay.open:
                self._close(stay, tell=True)
            case "hang" if stay is not None and alive:
                stay.hung = True
            case "join" if not alive:
                self._join(fault.learner)
            case "reconnect" if alive:
                self._join(fault.learner)
            case "poison":
                self.poisoned.add(fault.learner)
            case "heal":
                self.poisoned.discard(fault.learner)
            case "slow":
                self.speed[fault.learner] = fault.factor
            case "slow_link":
                self.link_factor[fault.learner] = fault.factor
            case "cut":
                self.cut_until_s[fault.learner] = max(self.cut_until_s[fault.learner], self.now_s + fault.factor)
            case "clock":
                self.clock_offset_s += fault.factor
                self.jumped_at_s = self.now_s
                for key, at_s in list(self.timers.items()):
                    self._wake(key, at_s)
            case "syncer" if not self.down:
                self._syncer_dies(fault.factor)
            case "shard" if not self.down and self.finished is None:
                odd = sum(map(ord, fault.learner)) % 2
                fragments = tuple(f for f in range(self.rules.num_fragments) if f % 2 == odd)
                if not fragments or self.away & set(fragments):
                    return
                self._shard_dies(fragments, fault.factor)
            case "duplicate" if stay is not None and alive:
                self._repeat(stay)
            case _:
                return
        self.happened[fault.kind] += 1

    def _repeat(self, stay: Stay) -> None:
        """The last contribution of this stay arrives once more."""
        known = self._last_contribution.get(stay.learner)
        if known is None or known[1] != stay.number:
            return
        c = known[0]
        handle = self._new_handle(self.sent[c.handle])
        again = Contribution(
            learner=c.learner,
            fragment=c.fragment,
            base_version=c.base_version,
            tokens=c.tokens,
            steps=c.steps,
            sent_at_step=c.sent_at_step,
            handle=handle,
        )
        self._send_contribution(stay, again, refused=self.sent[handle].bad)

    def _new_handle(self, like: Sent) -> int:
        handle = len(self.sent) + 1
        self.sent[handle] = Sent(like.stay, like.fragment, like.first_token, like.last_token, like.bad)
        return handle

    def _down(self, learner: str, channel: str, message: Any) -> None:
        stay = self.current[learner]
        if not stay.announced:
            return
        self._link(stay, f"down {channel}", lambda: self._deliver(stay, message))

    def _down_bulk(self, learner: str, effect: Publish) -> None:
        stay = self.current[learner]
        if not stay.announced:
            return
        handle = len(self.published) + 1
        self.published[handle] = ""
        message = MergedReceived(fragment=effect.fragment, version=effect.version, handle=handle)
        life = self.shard_life[effect.fragment]
        if not self._is_connected(stay, effect.fragment, life):
            return

        def arrive() -> None:
            if self._is_connected(stay, effect.fragment, life):
                self._deliver(stay, message)

        self._link(stay, "down bulk", arrive)

    def _is_connected(self, stay: Stay, fragment: int, life: int) -> bool:
        """Whether what is sent over the connection with a shard in this life of it arrives."""
        return self.shard_life[fragment] == life == stay.reached[fragment]

    def _up_control(self, stay: Stay, event: Any) -> None:
        self._link(stay, "up control", lambda: self._tell(event))

    def _deliver(self, stay: Stay, message: Any) -> None:
        if stay.hung:
            return
        if isinstance(message, SendState) and stay.reached != self.shard_life:
            stay.held_state = message
            return
        if isinstance(message, SendState):
            r = self.rules
            stay.joined_at_step = message.global_step
            stay.core = LearnerCore(
                LearnerSettings(
                    num_fragments=r.num_fragments,
                    inner_steps=r.inner_steps,
                    overlap_steps=0 if r.same_offset else r.overlap_steps,
                    target_steps=r.target_steps,
                    lockstep=r.lockstep,
                    same_offset=r.same_offset,
                    max_drift_steps=r.max_drift_steps,
                ),
                step=message.global_step,
                versions=message.versions,
            )
            stay.base_tokens = [0] * r.num_fragments
            stay.reported_step = message.global_step
            self._boundary(stay)
            return
        if isinstance(message, AcceptReturn):
            # What was sent before may not have arrived, and in lock-step is waited for.
            stay.contributes = True
            self._send_unsettled(stay, range(self.rules.num_fragments))
            return
        if isinstance(message, MergedReceived):
            stay.arrived_s[message.handle] = self.now_s
        stay.inbox.append(message)
        if not stay.busy:
            self._boundary(stay)

    def _boundary(self, stay: Stay) -> None:
        """Feed what has come in, then begin a step if one may be taken."""
        core = stay.core
        if core is None:
            return
        inbox, stay.inbox = stay.inbox, []
        for message in sorted(inbox, key=lambda m: not isinstance(m, MergedReceived)):
            self._learner_effects(stay, core.handle(message))
        if core.waits_for:
            self._report(stay)
            return
        stay.busy = True
        duration = self.rules.step_s[stay.learner] * self.speed[stay.learner]
        duration *= 1 + self.rules.jitter * self.chance.random()
        self.at(self.now_s + duration, lambda: self._step_finished(stay, duration))

    def _step_finished(self, stay: Stay, duration: float) -> None:
        if not stay.open or stay.hung or self.finished is not None:
            return
        core = stay.core
        assert core is not None
        stay.busy = False
        # Tokens depend on learner and step alone, so that lock-step histories can be compared.
        tokens = 1 + hash((len(stay.learner), stay.learner[-1] == "0", core.step)) % 9
        stay.tokens += tokens
        stay.step_times.append(duration)
        stay.history.append(("step",))
        self._learner_effects(stay, core.handle(StepFinished(tokens=tokens)))
        if core.step - stay.reported_step >= self.rules.report_every:
            self._report(stay)
        self._boundary(stay)

    def _report(self, stay: Stay) -> None:
        core = stay.core
        assert core is not None
        new = core.step - stay.reported_step
        if not new:
            return
        recent = stay.step_times[-new:]
        stay.reported_step = core.step
        self._up_control(
            stay,
            LearnerReport(
                learner=stay.learner, step=core.step, tokens=stay.tokens, step_time_s=sum(recent) / len(recent)
            ),
        )

    def _learner_effects(self, stay: Stay, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case SendFragment():
                    self._send(stay, effect)
                case InstallFragment():
                    self._install(stay, effect)
                case DiscardPayload():
                    self._use(effect.handle, "discarded")

    def _send(self, stay: Stay, effect: SendFragment) -> None:
        f = effect.fragment
        if effect.tokens != stay.tokens - stay.base_tokens[f]:
            raise Violation(f"{effect} of {stay.learner}, who has processed {stay.tokens} since {stay.base_tokens[f]}")
        stay.history.append(("send", f, effect.base_version, effect.tokens, effect.steps, effect.sent_at_step))
        bad = stay.learner in self.poisoned
        handle = self._new_handle(Sent(stay.number, f, stay.base_tokens[f], stay.tokens, bad))
        c = Contribution(
            learner=stay.learner,
            fragment=f,
            base_version=effect.base_version,
            tokens=effect.tokens,
            steps=effect.steps,
            sent_at_step=effect.sent_at_step,
            handle=handle,
        )
        self._last_contribution[stay.learner] = (c, stay.number)
        if self.rules.lockstep:
            stay.unsettled[f] = c
        self._send_contribution(stay, c, refused=bad)

    def _send_contribution(self, stay: Stay, c: Contribution, *, refused: bool) -> None:
        event: Any = ContributionReceived(contribution=c)
        if refused:
            event = ContributionRefused(contribution=c, reason="nan", bad=True)
        life = self.shard_life[c.fragment]
        if not stay.contributes or not self._is_connected(stay, c.fragment, life):
            self._settle(c.handle, "not sent")
            return
        self._flying.add(c.handle)

        def arrive() -> None:
            self._flying.discard(c.handle)
            if not self._is_connected(stay, c.fragment, life):
                self._settle(c.handle, "lost with its shard")
                return
            if not stay.announced:
                self._settle(c.handle, "came before its learner was known")
                return
            # As run.syncer_main does: what starts from parameters that a restarted syncer has not got is refused.
            known = c.base_version in self.kept_bases[c.fragment] or c.base_version > self.syncer.versions[c.fragment]
            self._tell(event if known or refused else ContributionRefused(contribution=c, reason="base unknown"))

        self._link(stay, "up bulk", arrive, lambda: self._settle(c.handle, "lost on the way"))

    def _install(self, stay: Stay, effect: InstallFragment) -> None:
        core, f = stay.core, effect.fragment
        assert core is not None
        stay.unsettled.pop(f, None)
        self._use(effect.handle, "installed")
        if effect.tokens != stay.tokens - stay.base_tokens[f]:
            raise Violation(f"{effect}: the counters do not match {stay.tokens - stay.base_tokens[f]} tokens")
        stay.base_tokens[f] = stay.tokens
        stay.history.append(("install", f, effect.version, core.step))
        self._up_control(
            stay,
            FragmentInstalled(
                learner=stay.learner,
                fragment=f,
                version=effect.version,
                tokens=effect.tokens,
                steps=effect.steps,
                step=core.step,
                waited_s=self.now_s - stay.arrived_s[effect.handle],
            ),
        )

    def _use(self, handle: int, fate: str) -> None:
        if self.published[handle]:
            raise Violation(f"payload {handle} {fate} after it was {self.published[handle]}")
        self.published[handle] = fate

    # ---- for tests to look at ----

    def of(self, event: str) -> list[dict[str, Any]]:
        return [{"t": t, **data} for t, name, data in self.records if name == event]
