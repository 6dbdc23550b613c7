"""SyncerCore against the slow reference of algorithm.md, over generated histories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference

from diloco_cli.core.state import SyncerSettings
from diloco_cli.core.syncer import SyncerCore
from diloco_cli.core.types import (
    CancelTimer,
    Contribution,
    ContributionReceived,
    ContributionRefused,
    DropPayload,
    Finish,
    FragmentInstalled,
    LearnerJoined,
    LearnerLeft,
    LearnerReport,
    MergeFinished,
    Publish,
    Pull,
    SendState,
    SetTimer,
    StartMerge,
    StopLearners,
    StopRequested,
    TimerFired,
)

NAMES = ("a", "b", "c")


def as_decision(effect: Any) -> tuple[Any, ...] | None:
    """An effect in the reference's words; None for what it does not speak about."""
    match effect:
        case Pull():
            return ("pull", effect.fragment, effect.to)
        case StartMerge():
            handles = tuple(c.handle for c in effect.members)
            return ("start", effect.fragment, effect.version, handles, tuple(c.weight for c in effect.members))
        case Publish():
            return ("publish", effect.fragment, effect.version, effect.to)
        case SendState():
            return ("state", effect.learner, effect.versions)
        case DropPayload():
            return ("drop", effect.handle)
        case StopLearners():
            return ("stop", effect.to)
        case Finish():
            return ("finish", effect.status)
    return None


class Histories:
    """Turns drawn numbers into events that could happen, looking at the core only for what is under way."""

    def __init__(self, data: st.DataObject, core: SyncerCore) -> None:
        self.data = data
        self.core = core
        self.now_s = 0.0
        self.handle = 0
        self.steps = dict.fromkeys(NAMES, 0)
        self.timers: dict[str, float] = {}
        self.honest = self.draw(st.booleans())
        """Only what happens in a run without faults, so that histories get far."""

    def took(self, effects: Sequence[Any]) -> None:
        """Timers as the driver keeps them."""
        for effect in effects:
            if isinstance(effect, SetTimer) and effect.key.startswith("grace:"):
                self.timers[effect.key] = effect.at_s
            elif isinstance(effect, CancelTimer):
                self.timers.pop(effect.key, None)

    def due_timer(self, until_s: float) -> Any:
        """The first timer that is due by then; it is fired at its time."""
        due = sorted((at, key) for key, at in self.timers.items() if at <= until_s)
        if not due:
            return None
        self.now_s = max(self.now_s, due[0][0])
        del self.timers[due[0][1]]
        return TimerFired(key=due[0][1])

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def next(self) -> Any:
        later_s = self.now_s + self.draw(st.sampled_from([0.0, 0.01, 0.1, 0.5]))
        if timer := self.due_timer(later_s):
            return timer
        self.now_s = later_s
        kinds = ["report", "answer", "answer", "install", "install", "merge"]
        if not self.honest:
            kinds += ["contribute", "contribute", "grace", "join", "leave", "refuse", "start"]
            kinds += ["stop"] if self.draw(st.integers(0, 20)) == 20 else []
        kind = self.draw(st.sampled_from(kinds))
        learner = self.draw(st.sampled_from(NAMES))
        fragment = self.draw(st.integers(0, self.core.settings.num_fragments - 1))
        if self.core.phase == "gathering" and kind not in ("start", "leave", "stop"):
            kind = "join"
        return getattr(self, f"_{kind}")(learner, fragment)

    def _join(self, learner: str, fragment: int) -> Any:
        self.steps[learner] = self.core.global_step
        return LearnerJoined(learner=learner)

    def _leave(self, learner: str, fragment: int) -> Any:
        return LearnerLeft(learner=learner, reason="test") if self.draw(st.booleans()) else None

    def _start(self, learner: str, fragment: int) -> Any:
        return TimerFired(key="start")

    def _stop(self, learner: str, fragment: int) -> Any:
        return StopRequested(reason="test")

    def _report(self, learner: str, fragment: int) -> Any:
        self.steps[learner] += self.draw(st.integers(0, 3))
        return LearnerReport(
            learner=learner,
            step=self.steps[learner],
            tokens=0,
            step_time_s=self.draw(st.sampled_from([None, 0.2, 1.0])),
        )

    def _contribution(self, learner: str, fragment: int, base: int) -> Contribution:
        self.handle += 1
        steps = self.draw(st.integers(1 if self.honest else 0, 3))
        return Contribution(
            learner=learner,
            fragment=fragment,
            base_version=base,
            tokens=steps * self.draw(st.integers(1, 5)),
            steps=steps,
            sent_at_step=self.steps[learner],
            handle=self.handle,
        )

    def _contribute(self, learner: str, fragment: int) -> Any:
        """From any version, asked or not."""
        base = self.core.versions[fragment] - self.draw(st.integers(-1, 3))
        return ContributionReceived(contribution=self._contribution(learner, fragment, max(0, base)))

    def _answer(self, learner: str, fragment: int) -> Any:
        """As an honest learner that is waited for would."""
        waiting = [
            (f, m)
            for f, r in sorted(self.core.rounds.items())
            for m in sorted(r.asked - set(r.entries))
            if r.merge_started_s is None and m in self.core.learners
        ]
        if not waiting:
            return None
        fragment, learner = self.draw(st.sampled_from(waiting))
        base = self.core.learners[learner].versions[fragment]
        return ContributionReceived(contribution=self._contribution(learner, fragment, base))

    def _refuse(self, learner: str, fragment: int) -> Any:
        c = self._contribution(learner, fragment, self.core.versions[fragment])
        return ContributionRefused(contribution=c, reason="nan")

    def _install(self, learner: str, fragment: int) -> Any:
        behind = [
            (m, f)
            for m in sorted(self.core.learners)
            for f, version in enumerate(self.core.versions)
            if self.core.learners[m].versions[f] < version
        ]
        if not behind:
            return None
        learner, fragment = self.draw(st.sampled_from(behind))
        return FragmentInstalled(
            learner=learner,
            fragment=fragment,
            version=self.core.versions[fragment],
            tokens=0,
            steps=0,
            step=self.steps[learner],
            waited_s=self.draw(st.sampled_from([0.0, 0.05])),
        )

    def _merge(self, learner: str, fragment: int) -> Any:
        running = [f for f, r in sorted(self.core.rounds.items()) if r.merge_started_s is not None]
        if not running:
            return None
        fragment = self.draw(st.sampled_from(running))
        return MergeFinished(fragment=fragment, version=self.core.versions[fragment] + 1)

    def _grace(self, learner: str, fragment: int) -> Any:
        return self.due_timer(float("inf")) or TimerFired(key=f"grace:{fragment}")


@settings(max_examples=examples(150))
@given(st.data())
def test_core_decides_as_the_reference(data: st.DataObject) -> None:
    rules = SyncerSettings(
        num_fragments=data.draw(st.integers(1, 3)),
        chips=dict.fromkeys(NAMES[: data.draw(st.integers(1, 3))], 1),
        inner_steps=data.draw(st.integers(1, 4)),
        overlap_steps=data.draw(st.integers(1, 3)),
        quorum=1,
        grace_safety=data.draw(st.sampled_from([0.5, 0.9])),
        target_steps=data.draw(st.integers(4, 12)),
        finish_tolerance=data.draw(st.sampled_from([0.0, 0.2, 1.0])),
        finish_wait_s=data.draw(st.sampled_from([0.0, 1.0, 10.0])),
        heartbeat_timeout_s=1e6,
        anchor_history=data.draw(st.integers(1, 4)),
    )
    quorum = data.draw(st.integers(1, len(rules.chips)))
    rules = SyncerSettings(**{**{f: getattr(rules, f) for f in rules.__slots__}, "quorum": quorum})
    core, reference = SyncerCore(rules), Reference(rules)
    core.start(0.0)
    source = Histories(data, core)
    for name in sorted(rules.chips):
        if data.draw(st.integers(0, 9)):
            _compare(core, reference, source, LearnerJoined(learner=name))
    for _ in range(60):
        event = source.next()
        if event is None:
            continue
        _compare(core, reference, source, event)
        if core.phase == "done":
            break


def _compare(core: SyncerCore, reference: Reference, source: Histories, event: Any) -> None:
    now_s = source.now_s
    effects = core.handle(event, now_s)
    source.took(effects)
    got = [d for e in effects if (d := as_decision(e)) is not None]
    want = reference.handle(event, now_s)
    assert sorted(got, key=repr) == sorted(want, key=repr), (event, now_s)
    assert core.phase == reference.phase
    assert core.versions == [reference.version(f) for f in range(core.settings.num_fragments)]
    assert sorted(core.rounds) == sorted(reference.open_rounds())
    assert core.global_step == reference.global_step()
    for fragment, until in reference.grace_timers(now_s).items():
        assert source.timers[f"grace:{fragment}"] == until
