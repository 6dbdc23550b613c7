"""A slow, obvious syncer, written from algorithm.md: after every event all facts are worked out from the whole history.

It keeps two lists only, what happened and what was decided, and answers every question by reading them from the start.
It covers the decoupled protocol with `late: drop`; heartbeats, lock-step and the token account are checked by
test_protocol.py. Decisions come as plain tuples, to be compared with the effects of SyncerCore:

    ("state", learner, versions)   ("pull", fragment, learners)   ("start", fragment, version, handles, weights)
    ("publish", fragment, version, learners)   ("drop", handle)   ("stop", learners)   ("finish", status)
    inside: ("go",) ("open", f, all, clock) ("close", f) ("enter" | "refuse", contribution) ("installed", event)
    ("quorum", f, grace until) ("quorum time", seconds) ("joined" | "replaced", m) ("finishing", awaited) ("final",)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco_cli.core.state import SyncerSettings
from diloco_cli.core.types import (
    Contribution,
    ContributionReceived,
    ContributionRefused,
    FragmentInstalled,
    LearnerJoined,
    LearnerLeft,
    LearnerReport,
    MergeFinished,
    StopRequested,
    TimerFired,
)

OUTSIDE = ("state", "pull", "start", "publish", "drop", "stop", "finish")


class Reference:
    def __init__(self, settings: SyncerSettings) -> None:
        self.s = settings
        self.log: list[tuple[float, str, Any]] = []
        """(time, "event" or "decision", what), in order."""

    # ---- facts, each read off the whole log ----

    def events(self, kind: type, start: int = 0) -> Iterator[tuple[int, float, Any]]:
        for i, (t, what, e) in enumerate(self.log):
            if i >= start and what == "event" and isinstance(e, kind):
                yield i, t, e

    def decisions(self, *names: str, start: int = 0) -> Iterator[tuple[int, float, Any]]:
        for i, (t, what, d) in enumerate(self.log):
            if i >= start and what == "decision" and d[0] in names:
                yield i, t, d

    def did(self, name: str) -> bool:
        return any(True for _ in self.decisions(name))

    @property
    def phase(self) -> str:
        for name, phase in (("finish", "done"), ("final", "final"), ("finishing", "finishing"), ("go", "running")):
            if self.did(name):
                return phase
        return "gathering"

    def joined_at(self) -> dict[str, int]:
        """Live learners, with the place in the log at which they joined."""
        live: dict[str, int] = {}
        for i, (_, what, e) in enumerate(self.log):
            if what == "decision" and e[0] == "joined":
                live[e[1]] = i
            if (what == "event" and isinstance(e, LearnerLeft)) or (what == "decision" and e[0] == "replaced"):
                live.pop(e.learner if what == "event" else e[1], None)
        return live

    def expected(self) -> set[str]:
        """Who has neither come nor gone, until the start timer gives them up."""
        waited, gathering = set(self.s.chips), True
        for _, what, e in self.log:
            if what == "event" and isinstance(e, LearnerJoined | LearnerLeft):
                waited.discard(e.learner)
            if what == "event" and isinstance(e, TimerFired) and e.key == "start" and gathering:
                waited.clear()
            if what == "decision" and e[0] == "go":
                gathering = False
        return waited

    def version(self, f: int) -> int:
        return sum(1 for _, _, e in self.events(MergeFinished) if e.fragment == f)

    def version_at(self, f: int, place: int) -> int:
        return sum(1 for i, _, e in self.events(MergeFinished) if e.fragment == f and i < place)

    def given(self, learner: str) -> tuple[int, list[int]]:
        """Where in the log the learner was sent its state, and with which versions."""
        at = self.joined_at()[learner]
        for i, _, d in self.decisions("state", start=at):
            if d[1] == learner:
                return i, list(d[2])
        return at, [self.version_at(f, at) for f in range(self.s.num_fragments)]

    def installed(self, learner: str, f: int) -> int:
        start, versions = self.given(learner)
        newest = versions[f]
        for i, _, e in self.events(FragmentInstalled, start):
            if e.learner == learner and e.fragment == f and newest < e.version <= self.version_at(f, i):
                newest = e.version
        return newest

    def had_version(self, learner: str, f: int, version: int) -> bool:
        start, versions = self.given(learner)
        had = {versions[f]}
        for i, _, e in self.events(FragmentInstalled, start):
            if e.learner == learner and e.fragment == f and max(had) < e.version <= self.version_at(f, i):
                had.add(e.version)
        return version in had or version > max(had)

    def merged_base(self, learner: str, f: int) -> int:
        """The newest base of this stay's contributions that were merged."""
        start = self.joined_at()[learner]
        bases = [-1]
        for _, _, d in self.decisions("start", start=start):
            if d[1] == f:
                bases += [c.base_version for c in self.contributions_by_handle(d[3], start) if c.learner == learner]
        return max(bases)

    def contributions_by_handle(self, handles: tuple[int, ...], start: int = 0) -> list[Contribution]:
        return [
            e.contribution for _, _, e in self.events(ContributionReceived, start) if e.contribution.handle in handles
        ]

    def step(self, learner: str) -> int:
        at = self.joined_at()[learner]
        reports = [e.step for _, _, e in self.events(LearnerReport, at) if e.learner == learner]
        return max([self.global_step(at), *reports])

    def global_step(self, before: int | None = None) -> int:
        return self.walk(before)[0]

    def clock(self) -> int:
        return self.walk()[1]

    def walk(self, before: int | None = None) -> tuple[int, int]:
        """Global step, and the steps by which the foremost training learner has moved on."""
        steps: dict[str, int] = {}
        top = clock = 0
        for i, (_, what, e) in enumerate(self.log):
            if before is not None and i >= before:
                break
            if what == "decision" and e[0] == "joined":
                steps[e[1]] = top
            elif what == "decision" and e[0] == "replaced":
                steps.pop(e[1], None)
            elif what == "event" and isinstance(e, LearnerLeft):
                steps.pop(e.learner, None)
            elif what == "event" and isinstance(e, LearnerReport) and e.learner in steps and e.step > steps[e.learner]:
                front = max((n for n in steps.values() if n < self.s.target_steps), default=e.step)
                clock += max(0, e.step - front)
                steps[e.learner] = e.step
                top = max(top, e.step)
        return top, clock

    # ---- rounds ----

    def open_rounds(self) -> dict[int, tuple[int, bool]]:
        """Fragment -> place of its opening, and whether it waits for all. Merging rounds are open, too."""
        rounds: dict[int, tuple[int, bool]] = {}
        for i, (_, what, e) in enumerate(self.log):
            if what == "decision" and e[0] == "open":
                rounds[e[1]] = (i, e[2])
            if (what == "decision" and e[0] == "close") or (what == "event" and isinstance(e, MergeFinished)):
                rounds.pop(e.fragment if what == "event" else e[1])
        return rounds

    def merging(self, f: int) -> bool:
        rounds = self.open_rounds()
        return f in rounds and any(d[1] == f for _, _, d in self.decisions("start", start=rounds[f][0]))

    def stay_start(self, learner: str, f: int) -> int:
        """From where on the learner's answers to the open round of f count: the opening, or its joining."""
        return max(self.open_rounds()[f][0], self.joined_at().get(learner, len(self.log)))

    def asked(self, f: int) -> set[str]:
        place = self.open_rounds()[f][0]
        return {
            m
            for i, _, d in self.decisions("pull", start=place)
            for m in d[2]
            if d[1] == f and m in self.joined_at() and i >= self.joined_at()[m]
        }

    def asked_at_opening(self, f: int) -> set[str]:
        place, everybody = self.open_rounds()[f]
        at_opening = {m for m, at in self.joined_at().items() if at < place}
        if everybody:
            return at_opening
        first = next(((i, d) for i, _, d in self.decisions("pull", start=place)), None)
        if first is None or first[0] != place + 1 or first[1][1] != f:
            return set()
        return set(first[1][2]) & at_opening

    def entries(self, f: int) -> dict[str, Contribution]:
        place = self.open_rounds()[f][0]
        found = {}
        for _, _, d in self.decisions("enter", start=place):
            c: Contribution = d[1]
            if c.fragment == f and c.learner in self.joined_at():
                found[c.learner] = c
        return {m: c for m, c in found.items() if self.entered_at(c) >= self.joined_at()[m]}

    def entered_at(self, c: Contribution) -> int:
        return next(i for i, _, d in self.decisions("enter") if d[1] == c)

    def refusers(self, f: int) -> set[str]:
        place = self.open_rounds()[f][0]
        return {
            d[1].learner
            for i, _, d in self.decisions("refuse", start=place)
            if d[1].fragment == f and d[1].learner in self.joined_at() and i >= self.joined_at()[d[1].learner]
        }

    # ---- moving averages ----

    @staticmethod
    def average(values: list[float]) -> float | None:
        result = None
        for v in values:
            result = v if result is None else result + 0.2 * (v - result)
        return result

    def step_time(self, learner: str) -> float | None:
        """Of its reports but the first of this stay, whose steps were a warm-up (a choice of the program)."""
        at = self.joined_at()[learner]
        step, values = self.global_step(at), []
        for _, _, e in self.events(LearnerReport, at):
            if e.learner == learner and e.step > step:
                step = e.step
                values.append(e.step_time_s)
        return self.average([v for v in values[1:] if v is not None])

    def step_times(self) -> list[float]:
        """One average for each live learner that has been measured."""
        return [value for m in self.joined_at() if (value := self.step_time(m)) is not None]

    def sync_time(self) -> float | None:
        values = []
        for i, t, e in self.events(FragmentInstalled):
            if not any(d[1] is e for _, _, d in self.decisions("installed")):
                continue
            recent = range(
                self.version_at(e.fragment, i) - self.s.anchor_history + 1, self.version_at(e.fragment, i) + 1
            )
            for _, started, d in self.decisions("start"):
                if d[1] == e.fragment and d[2] == e.version and e.version in recent:
                    values.append(max(0.0, t - started - e.waited_s))
        return self.average(values)

    def grace_until(self, f: int) -> float | None:
        place = self.open_rounds()[f][0]
        return next((d[2] for _, _, d in self.decisions("quorum", start=place) if d[1] == f), None)

    # ---- deciding ----

    def handle(self, event: Any, t: float) -> list[tuple[Any, ...]]:
        """Take one event; return the decisions that are seen from outside."""
        if self.phase == "done":
            return []
        place = len(self.log)
        if isinstance(event, LearnerJoined):
            self.join(event, t)
        else:
            if isinstance(event, LearnerLeft):
                self.drop_entries(event.learner, t)
            self.log.append((t, "event", event))
            self.react(event, t)
        return [d for _, what, d in self.log[place:] if what == "decision" and d[0] in OUTSIDE]

    def decide(self, t: float, *decision: Any) -> None:
        self.log.append((t, "decision", decision))

    def drop_entries(self, learner: str, t: float) -> None:
        if learner in self.joined_at():
            for f in self.open_rounds():
                if not self.merging(f) and learner in self.entries(f):
                    self.decide(t, "drop", self.entries(f)[learner].handle)

    def join(self, event: LearnerJoined, t: float) -> None:
        replaced = event.learner in self.joined_at()
        if replaced:
            self.drop_entries(event.learner, t)
            self.decide(t, "replaced", event.learner)
        self.log.append((t, "event", event))
        if self.phase in ("running", "gathering"):
            self.decide(t, "joined", event.learner)
            if self.phase == "running":
                self.decide(t, "state", event.learner, tuple(self.version(f) for f in range(self.s.num_fragments)))
        self.settle(t, quorum_matters=not replaced or self.phase not in ("running", "gathering"))

    def react(self, event: Any, t: float) -> None:
        match event:
            case StopRequested():
                self.decide(t, "finish", "stopped")
                return
            case TimerFired(key="start") if self.phase == "gathering":
                if len(self.joined_at()) < self.s.quorum:
                    self.decide(t, "finish", "quorum_lost")
                    return
            case ContributionReceived():
                self.contribution(event.contribution, "", t)
            case ContributionRefused():
                self.contribution(event.contribution, event.reason, t)
            case MergeFinished():
                self.decide(t, "publish", event.fragment, event.version, tuple(sorted(self.joined_at())))
            case FragmentInstalled():
                self.note_install(event, t)
        self.settle(t, may_open=isinstance(event, LearnerReport | MergeFinished))

    def note_install(self, e: FragmentInstalled, t: float) -> None:
        """Does this install tell anything new?"""
        self.log.pop()
        if e.learner in self.joined_at() and self.installed(e.learner, e.fragment) < e.version <= self.version(
            e.fragment
        ):
            self.decide(t, "installed", e)
        self.log.append((t, "event", e))

    def contribution(self, c: Contribution, problem: str, t: float) -> None:
        """Refused, late, or in."""
        f = c.fragment
        if c.learner not in self.joined_at():
            self.decide(t, "drop", c.handle)
            return
        # The final cut takes what was sent after the last step.
        too_soon = f in self.open_rounds() and self.open_rounds()[f][1] and c.sent_at_step < self.step(c.learner)
        unknown = c.base_version > self.version(f) or c.base_version < self.version(f) - self.s.anchor_history
        if problem or unknown or not self.had_version(c.learner, f, c.base_version):
            collecting = f in self.open_rounds() and not self.merging(f)
            if collecting and c.learner not in self.entries(f) and not too_soon:
                self.decide(t, "refuse", c)
            self.decide(t, "drop", c.handle)
        elif (
            too_soon
            or c.base_version <= self.merged_base(c.learner, f)
            or f not in self.open_rounds()
            or self.merging(f)
            or c.learner in self.entries(f)
        ):
            self.decide(t, "drop", c.handle)
        else:
            self.decide(t, "enter", c)

    def settle(self, t: float, *, quorum_matters: bool = True, may_open: bool = False) -> None:
        """Everything that follows from the facts as they are now, until nothing more follows."""
        available = len(self.joined_at()) + len(self.expected())
        if quorum_matters and available < self.s.quorum:
            self.decide(t, "finish", "quorum_lost")
            return
        if self.phase == "gathering":
            if self.joined_at() and not self.expected():
                self.decide(t, "go")
                for m in sorted(self.joined_at()):
                    self.decide(t, "state", m, tuple(self.version(f) for f in range(self.s.num_fragments)))
            return
        changed = True
        while changed and self.phase != "done":
            size = len(self.log)
            self.ask_latecomers(t)
            for f in sorted(self.open_rounds()):
                if f in self.open_rounds() and not self.merging(f):
                    may_open |= self.advance(f, t)
            if may_open:
                self.open_due(t)
            may_open |= self.check_end(t)
            if may_open:
                self.open_due(t)
            changed = len(self.log) != size

    def may_be_asked(self, learner: str, f: int) -> bool:
        return self.installed(learner, f) > self.merged_base(learner, f)

    def open_due(self, t: float) -> None:
        rounds = self.open_rounds()
        if self.phase == "final":
            waiting = [f for f in range(self.s.num_fragments) if f not in rounds and not self.final_round_over(f)]
        elif self.phase in ("running", "finishing"):
            due = {f: self.due(f) for f in range(self.s.num_fragments) if f not in rounds}
            waiting = sorted((f for f in due if due[f] <= self.clock()), key=lambda f: (due[f], f))
        else:
            return
        for f in waiting[: max(0, max(1, self.s.overlap_steps) - len(rounds))]:
            self.decide(t, "open", f, self.phase == "final", self.clock())
            asked = tuple(m for m in sorted(self.joined_at()) if self.may_be_asked(m, f))
            if asked:
                self.decide(t, "pull", f, asked)

    def final_round_over(self, f: int) -> bool:
        return any(d[1] == f and d[2] for _, _, d in self.decisions("open")) and f not in self.open_rounds()

    def due(self, f: int) -> int:
        """p H / P at first (H rather than 0), then H after the last opening."""
        first = f * self.s.inner_steps // self.s.num_fragments or self.s.inner_steps
        opened = [d[3] + self.s.inner_steps for _, _, d in self.decisions("open") if d[1] == f]
        return opened[-1] if opened else first

    def ask_latecomers(self, t: float) -> None:
        for f in sorted(self.open_rounds()):
            if self.merging(f):
                continue
            place = self.open_rounds()[f][0]
            for m in sorted(self.joined_at()):
                news = [
                    i
                    for i, _, d in self.decisions("installed", start=place)
                    if d[1].learner == m and d[1].fragment == f
                ]
                joined = self.joined_at()[m] > place
                if m not in self.asked(f) and (joined or news) and self.may_be_asked(m, f):
                    self.decide(t, "pull", f, (m,))

    def advance(self, f: int, t: float) -> bool:
        """Quorum, grace, merge. True if the round was closed without a merge, so that a slot is free."""
        everybody = self.open_rounds()[f][1]
        entries = self.entries(f)
        counted = {m for m, c in entries.items() if c.steps > 0}
        may_come = set(self.joined_at()) - set(entries) - self.refusers(f)
        awaited = self.asked_at_opening(f) & may_come
        if self.grace_until(f) is None and len(counted) >= self.s.quorum:
            opened = self.log[self.open_rounds()[f][0]][0]
            self.decide(t, "quorum time", t - opened)
            quorum_time = self.average([d[1] for _, _, d in self.decisions("quorum time")])
            sync_time, step_times = self.sync_time(), self.step_times()
            window = 0.0
            if step_times and sync_time is not None and quorum_time is not None:
                slack = self.s.overlap_steps * min(step_times) - (quorum_time + sync_time)
                window = self.s.grace_safety * max(0.0, slack)
            self.decide(t, "quorum", f, t + window)
        until = self.grace_until(f)
        if everybody:
            ready = not awaited
        else:
            ready = len(counted) >= self.s.quorum and (not awaited or (until is not None and t >= until))
        if ready:
            return self.start(f, t)
        if not may_come:
            return self.close(f, t)
        return False

    def grace_timers(self, t: float) -> dict[int, float]:
        """Open windows: what timers there must be."""
        windows = {}
        for f, (_, everybody) in self.open_rounds().items():
            until = self.grace_until(f)
            counted = [c for c in self.entries(f).values() if c.steps > 0]
            if until is not None and not everybody and not self.merging(f) and len(counted) >= self.s.quorum:
                windows[f] = until
        return windows

    def start(self, f: int, t: float) -> bool:
        entries = self.entries(f)
        taken = [entries[m] for m in sorted(entries) if entries[m].tokens > 0 and entries[m].steps > 0]
        if not taken:
            return self.close(f, t)
        for m in sorted(entries):
            if entries[m] not in taken:
                self.decide(t, "drop", entries[m].handle)
        weights = tuple(c.tokens * c.tokens / c.steps for c in taken)
        self.decide(t, "start", f, self.version(f) + 1, tuple(c.handle for c in taken), weights)
        return False

    def close(self, f: int, t: float) -> bool:
        for m in sorted(self.entries(f)):
            self.decide(t, "drop", self.entries(f)[m].handle)
        self.decide(t, "close", f)
        return True

    def worth_waiting_for(self, learner: str, t: float) -> bool:
        """It needs little more time, in seconds or as a share of the run (or nobody knows how much)."""
        missing, step_time = self.s.target_steps - self.step(learner), self.step_time(learner)
        started = next(at for _, at, _ in self.decisions("go"))
        patience = max(self.s.finish_wait_s, self.s.finish_tolerance * (t - started))
        return missing <= 0 or step_time is None or missing * step_time <= patience

    def check_end(self, t: float) -> bool:
        """True if the final cut began, so that rounds may be opened."""
        target, live = self.s.target_steps, self.joined_at()
        if self.phase == "running" and self.global_step() >= target:
            self.decide(t, "finishing", tuple(m for m in live if self.worth_waiting_for(m, t)))
        if self.phase == "finishing":
            awaited = next(d[1] for _, _, d in self.decisions("finishing"))
            if not [m for m in awaited if m in live and self.step(m) < target]:
                self.decide(t, "final")
                self.decide(t, "stop", tuple(sorted(live)))
                return True
        if self.phase == "final" and not self.open_rounds():
            fragments = range(self.s.num_fragments)
            if all(self.final_round_over(f) for f in fragments) and all(
                self.installed(m, f) == self.version(f) for m in live for f in fragments
            ):
                self.decide(t, "finish", "completed")
        return False
