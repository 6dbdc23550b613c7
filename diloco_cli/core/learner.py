"""The learner's side of the protocol as a state machine: counters, what to send, what to install, when to stop.

Owns: algorithm.md, "Learner", points 1, 3 and 4. Holds no tensor, socket or clock. Driven by run.learner_main at step
boundaries, and by the simulator.

Theory of operation

The driver calls handle() only at a step boundary: StepFinished first, then what came in during the step, merged
fragments before pulls, so that a contribution does not start from a version that is about to be replaced. Every event
takes effect at once. A fragment that has taken no step since its install is not sent until it has, unless no step
will follow (`parked`). While `waits_for` says why, the driver takes no step and feeds messages as they come.

In lock-step a fragment is sent by schedule, and its merge is installed exactly tau steps after the sending: sooner
arrivals wait, and the learner waits for later ones. That makes the run independent of timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cli.core.fragments import due_offset_steps
from diloco_cli.core.types import (
    DiscardPayload,
    InstallFragment,
    LearnerEffect,
    LearnerEvent,
    MergedReceived,
    PullReceived,
    Reconnected,
    SendFragment,
    StepFinished,
    StopReceived,
)

# A report costs both sides about 0.4 ms of CPU time, so short steps share one. But the syncer's clock counts by
# reports: there are at least two per cut, as long as that is not too often.
REPORT_INTERVAL_S = 0.25
MIN_REPORT_INTERVAL_S = 0.02
REPORTS_PER_CUT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """What the learner decides by; see config.schema for the meaning."""

    num_fragments: int
    inner_steps: int = 24
    overlap_steps: int = 2
    target_steps: int = 1000
    lockstep: bool = False
    same_offset: bool = False
    """Lock-step only: all fragments at the same step (`diloco`)."""
    max_drift_steps: int | None = None

    def report_is_due(self, num_steps: int, elapsed_s: float) -> bool:
        """Whether to report now: so many steps and seconds after the last report."""
        enough = REPORTS_PER_CUT * self.num_fragments * num_steps >= self.inner_steps
        return elapsed_s >= (MIN_REPORT_INTERVAL_S if enough else REPORT_INTERVAL_S)


class LearnerCore:
    """The state machine of one learner, from one joining on."""

    def __init__(self, settings: LearnerSettings, *, step: int, versions: Sequence[int]) -> None:
        assert len(versions) == settings.num_fragments
        self.settings = settings
        self.step = step
        self.versions = list(versions)
        self.steps = [0] * settings.num_fragments
        self.tokens = [0] * settings.num_fragments
        self.stopped_because = ""
        self._asked: set[int] = set()
        self._arrived: dict[int, MergedReceived] = {}
        self._sent_at: dict[int, int] = {}
        """Lock-step: fragments sent and not yet installed, with the step of the sending."""

    def dump(self) -> dict[str, Any]:
        """Its state as plain data, for a snapshot; merged fragments that have arrived come again."""
        return {
            "step": self.step,
            "versions": list(self.versions),
            "steps": list(self.steps),
            "tokens": list(self.tokens),
            "sent_at": dict(self._sent_at),
        }

    @classmethod
    def load(cls, settings: LearnerSettings, saved: Mapping[str, Any]) -> LearnerCore:
        """A core that goes on from `dump`."""
        core = cls(settings, step=saved["step"], versions=saved["versions"])
        core.steps, core.tokens = list(saved["steps"]), list(saved["tokens"])
        core._sent_at = dict(saved["sent_at"])
        return core

    @property
    def sent_at(self) -> tuple[int, ...]:
        """Lock-step, per fragment: the step of a sending whose merge is not installed yet; -1: none."""
        return tuple(self._sent_at.get(f, -1) for f in range(self.settings.num_fragments))

    @property
    def parked(self) -> bool:
        """No step will follow: told to stop, or at the target. Only installs and the final cut are left."""
        return bool(self.stopped_because) or self.step >= self.settings.target_steps

    @property
    def waits_for(self) -> str:
        """Why the learner may not take another step now; empty if it may."""
        if self.stopped_because:
            return self.stopped_because
        if self.step >= self.settings.target_steps:
            return "the target is reached"
        overdue = [f for f, at in self._sent_at.items() if self.step - at >= self._overlap_steps]
        if overdue:
            return f"lock-step: the merge of fragment {min(overdue)}"
        # Lock-step bounds the drift by itself, and an install there may have to wait for steps.
        bound = None if self.settings.lockstep else self.settings.max_drift_steps
        if bound is not None and min(self.steps) >= bound:
            return f"{bound} steps without any merge (sync.max_drift_steps)"
        return ""

    def handle(self, event: LearnerEvent) -> tuple[LearnerEffect, ...]:
        """Take one event at a step boundary; return what to do now, in order."""
        effects: list[LearnerEffect] = []
        match event:
            case StepFinished():
                assert not self.waits_for, "stepped while waiting"
                self._count(event.tokens)
            case PullReceived():
                self._asked.add(event.fragment)
            case MergedReceived():
                effects += self._arrive(event)
            case StopReceived():
                self.stopped_because = event.reason
            case Reconnected():
                # It will ask again; in lock-step what is sent is due by schedule, and goes out once more.
                self._asked.clear()
        return (*effects, *self._install_due(), *self._send_due(stepped=isinstance(event, StepFinished)))

    def _count(self, tokens: int) -> None:
        self.step += 1
        for fragment in range(self.settings.num_fragments):
            self.steps[fragment] += 1
            self.tokens[fragment] += tokens

    def _arrive(self, event: MergedReceived) -> list[LearnerEffect]:
        """Keep the newest version of each fragment until the boundary."""
        older = self._arrived.get(event.fragment)
        newest = max(self.versions[event.fragment], older.version if older else -1)
        if event.version <= newest:
            return [DiscardPayload(handle=event.handle)]
        self._arrived[event.fragment] = event
        return [DiscardPayload(handle=older.handle)] if older else []

    def _install_due(self) -> list[LearnerEffect]:
        return [self._install(self._arrived.pop(f)) for f in sorted(self._arrived) if self._may_install(f)]

    def _send_due(self, *, stepped: bool) -> list[LearnerEffect]:
        if stepped and self.settings.lockstep:
            self._asked |= {f for f in range(self.settings.num_fragments) if self._scheduled(f)}
        # In lock-step everybody answers every cut, be it with nothing: the others wait for it.
        at_once = self.parked or self.settings.lockstep
        return [self._send(f) for f in sorted(self._asked) if self.steps[f] > 0 or at_once]

    @property
    def _overlap_steps(self) -> int:
        """Lock-step: tau, below H, since an install in the step of the next sending would leave nothing to send."""
        return min(self.settings.overlap_steps, self.settings.inner_steps - 1)

    def _may_install(self, fragment: int) -> bool:
        """In lock-step exactly tau steps after the sending (a parked learner takes none); otherwise at once."""
        sent_at = self._sent_at.get(fragment)
        return sent_at is None or self.parked or self.step - sent_at >= self._overlap_steps

    def _install(self, merged: MergedReceived) -> InstallFragment:
        f = merged.fragment
        effect = InstallFragment(
            fragment=f, version=merged.version, handle=merged.handle, tokens=self.tokens[f], steps=self.steps[f]
        )
        self.versions[f] = merged.version
        self.steps[f] = self.tokens[f] = 0
        self._sent_at.pop(f, None)
        return effect

    def _send(self, fragment: int) -> SendFragment:
        self._asked.discard(fragment)
        if self.settings.lockstep:
            self._sent_at[fragment] = self.step
        return SendFragment(
            fragment=fragment,
            base_version=self.versions[fragment],
            tokens=self.tokens[fragment],
            steps=self.steps[fragment],
            sent_at_step=self.step,
        )

    def _scheduled(self, fragment: int) -> bool:
        """Lock-step: due every H steps at the fragment's offset (Streaming DiLoCo, 2501.18512)."""
        s = self.settings
        offset = 0 if s.same_offset else due_offset_steps(fragment, s.num_fragments, s.inner_steps)
        return self.step % s.inner_steps == offset % s.inner_steps and fragment not in self._sent_at
