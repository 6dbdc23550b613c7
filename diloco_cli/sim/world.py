"""One SyncerCore and many LearnerCores in virtual time: what run.syncer_main and run.ranks do with sockets and torch.

Owns: the drivers of the two state machines, the model of time (steps, merges, copies, links, faults), and the tally of
what happened. Must not: decide anything of the protocol. Called by: sim.results, tests.

Theory of operation

A learner steps, feeds StepFinished, reports (when that is due, at once if it must wait now), takes what has come in,
merged fragments before the rest, and goes on; while it waits every message is taken as it comes. A joining one starts
when the welcome and all fragments are there. The syncer takes every event as it comes, and has one merge worker.
Heartbeats are not events: just before the syncer looks who is silent it is told of the newest one of each learner.

Faults are those of core.faults, on whole islands: what happens to a rank happens to its island. A crash is back after
its duration; without one after RESTART_S, as its supervisor sees to it, and a hang is then noticed after the heartbeat
timeout first. Who is preempted ends the step under way. A slow island takes longer over its steps. Bad bytes break the
connection, NaN is refused, and a full disk costs no time. As in run.injector, a fault whose target is away waits.

A syncer that crashes (one that hangs: that its supervisor has ended) goes on from what core.recovery dumped last; what
was on the links or in its hands is lost, learners train on and return with their counters. One that is slow merges more
slowly.

Jumps. A run of 64 islands and 100,000 steps is 25 million messages. A long stretch without faults is steady: cycles of
H steps look like each other. So when two halves of a window agree within STEADY, the window's figures are taken k times
over and the learners' step counts move on by as much: the clock, the counters and everything in flight stay as they
are, since the protocol only knows differences of them. A jump ends well before the target and the next fault, and what
disturbs (a join, a fault) is followed by a new window; small worlds never jump, and `jump=False` forbids it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from diloco_cli.config.schema import Link
from diloco_cli.core import recovery
from diloco_cli.core.faults import CORRUPT, DEFAULT_DURATION_S, DEGRADE, PARTITION, SYNCER, Due, Fault
from diloco_cli.core.learner import LearnerCore, LearnerSettings
from diloco_cli.core.state import SyncerSettings
from diloco_cli.core.syncer import RUNNING, SyncerCore
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
    InstallFragment,
    LearnerAlive,
    LearnerEffect,
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
    SyncerEffect,
    SyncerEvent,
    TimerFired,
)
from diloco_cli.sim.engine import ARRIVAL, STEP, TIMER, Engine, Streams
from diloco_cli.sim.network import SimLink
from diloco_cli.sim.timeline import COMPUTING, DONE, DOWN, REJOINING, WAITING, Timeline

# Bytes on the wire of each message: frame, header and TLS record as run.channel writes them, typical values inside.
REPORT_BYTES, PULL_BYTES, INSTALLED_BYTES, FINISH_BYTES, HEARTBEAT_BYTES = 337, 60, 132, 89, 119
WELCOME_BYTES, WELCOME_BYTES_PER_FRAGMENT = 110, 4
CONTRIBUTION_HEAD_BYTES, MERGED_HEAD_BYTES = 213, 194
CONNECT_ROUND_TRIPS = 3
"""TCP, TLS 1.3, hello."""
RETURNING_BYTES, RETURNING_BYTES_PER_FRAGMENT = 150, 20
RESTART_S = 5.0
"""Until the supervisor of what has crashed has it running again, where nothing else was said."""
ON_THE_LINK = (PARTITION, DEGRADE, CORRUPT)

# Learner steps that are simulated without ever jumping: a second or two of computing.
JUMP_ABOVE_LEARNER_STEPS = 40_000
# A half window has at least so many steps of the foremost learner, and of all learners together.
HALF_WINDOW_STEPS, HALF_WINDOW_LEARNER_STEPS = 64, 2_000
STEADY = 0.005
# What never settles (many speeds, much chance) is taken as it is on average over so many steps of all learners.
WINDOW_LEARNER_STEPS = 60_000


@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Crashes of each island as an independent process: exponential times between them, and to repair."""

    mean_time_between_s: float
    mean_repair_s: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the machines' own work costs in time. Bytes are of float32 values.

    Attributes:
        merge_bytes_per_s: of the syncer, over the bytes of all contributions, Theta and the outer state.
        codec_bytes_per_s: encoding and decoding of a fragment, in the background of a learner.
        copy_bytes_per_s: gathering and installing a fragment, in which a learner does not train.
        step_overhead_s: of every step, neither computing nor waiting.
    """

    merge_bytes_per_s: float = math.inf
    codec_bytes_per_s: float = math.inf
    copy_bytes_per_s: float = math.inf
    step_overhead_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """One island: step_s seconds per inner step, `tokens` in each, `chips` of it."""

    step_s: float
    tokens: int
    link: Link
    chips: int = 1


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """Everything that a world is made from.

    Attributes:
        sizes: elements of each fragment; up_bytes and down_bytes their payloads on the wire.
        step_jitter: half width, as a share, of the uniform distribution of a step's time.
        duration_s: stop then, if the target is not reached before.
    """

    syncer: SyncerSettings
    learner: LearnerSettings
    learners: Mapping[str, LearnerSpec]
    sizes: tuple[int, ...]
    up_bytes: tuple[int, ...]
    down_bytes: tuple[int, ...]
    heartbeat_interval_s: float = 1.0
    step_jitter: float = 0.0
    costs: Costs = Costs()
    faults: tuple[Fault, ...] = ()
    random_faults: RandomFaults | None = None
    duration_s: float = math.inf


@dataclass(slots=True)
class Tally:
    """What happened, as numbers that add up: of two moments, the difference is what happened in between.

    Attributes:
        wasted: tokens lost, refused or late beyond the planned overlap (mean over fragments).
        members: contributions over all merges.
        stale: sum over installs of 1 + 2 + ... + n for the n steps since the last install of the fragment; over
            `stale_steps`, the sum of the n, it is the mean age of a fragment in steps.
        running_s: time since the first learner began; training_s: of it, with at least one learner training.
        learners: per island: steps, compute_s, wait_s (for merges), bytes up, bytes down.
    """

    time_s: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)
    wasted: float = 0.0
    merges: float = 0.0
    members: float = 0.0
    stale: float = 0.0
    stale_steps: float = 0.0
    running_s: float = 0.0
    training_s: float = 0.0
    learners: dict[str, list[float]] = field(default_factory=dict)

    def plus(self, other: Tally, times: float = 1.0) -> Tally:
        """Self + times * other."""

        def add(a: float, b: float) -> float:
            return a + times * b

        return Tally(
            add(self.time_s, other.time_s),
            {k: add(self.tokens.get(k, 0), v) for k, v in other.tokens.items()},
            add(self.wasted, other.wasted),
            add(self.merges, other.merges),
            add(self.members, other.members),
            add(self.stale, other.stale),
            add(self.stale_steps, other.stale_steps),
            add(self.running_s, other.running_s),
            add(self.training_s, other.training_s),
            {
                k: [add(a, b) for a, b in zip(self.learners.get(k, [0.0] * len(v)), v, strict=True)]
                for k, v in other.learners.items()
            },
        )


@dataclass(slots=True)
class _Merged:
    """A merged fragment at a learner: what MergedMsg says, and when it came."""

    fragment: int
    version: int
    arrived_s: float


class SimLearner:
    """An island's state: its process, its links, and in each stay a LearnerCore."""

    def __init__(self, name: str, spec: LearnerSpec, up: SimLink, down: SimLink) -> None:
        self.name = name
        self.spec = spec
        self.up = up
        self.down = down
        self.stay = 0
        self.connected = False
        self.announced = True
        """The syncer knows of it on this connection."""
        self.hung = False
        self.core: LearnerCore | None = None
        self.skipped_steps = 0
        self.steps = 0
        self.compute_s = 0.0
        self.wait_s = 0.0
        self.heartbeat_bytes = 0.0
        self.connected_s = 0.0
        self.down_until_s = -math.inf
        self.slow_until_s = -math.inf
        self.slow_factor = 1.0
        self.num_degraded = 0
        self.waiting_faults: deque[Fault] = deque()
        self.num_sessions = 0
        self.begin_stay()

    @property
    def session(self) -> str:
        """Of its process, as the syncer knows it."""
        return f"{self.name}/{self.num_sessions}"

    def begin_stay(self) -> None:
        """Forget what belongs to one connection."""
        self.stay += 1
        self.core = None
        self.busy = False
        self.leaving = False
        self.corrupt = ""
        self.step_ends_s = -math.inf
        self.waits_since_s: float | None = None
        self.inbox: list[PullReceived | StopReceived | _Merged] = []
        self.states: dict[int, _Merged] = {}
        self.welcome: SendState | None = None
        self.held: dict[int, _Merged] = {}
        self.unanswered: dict[int, Contribution] = {}
        self.joined_at_step = 0
        self.tokens = 0
        self.stall_s = 0.0
        self.slowed_s = 0.0
        self.reported_s = -math.inf
        self.progress_steps = 0
        self.progress_s = 0.0


class Body(Protocol):
    """What really is in the fragments, where somebody wants to know (sim.learn): tensors, training, merging.

    Called at the moment at which it happens in virtual time. Without one, a world is about time alone.
    """

    def load(self, learner: str, step: int, versions: Sequence[int]) -> None:
        """A process begins, with these versions of all fragments."""

    def step(self, learner: str) -> int:
        """One inner step; its tokens."""

    def send(self, learner: str, contribution: Contribution) -> None:
        """A fragment is copied out; it is known by its handle from now on."""

    def install(self, learner: str, fragment: int, version: int) -> None:
        """A merged fragment is put in."""

    def merge(self, effect: StartMerge) -> None:
        """The contributions make a new version."""

    def drop(self, handle: int) -> None:
        """A contribution is not merged."""


class World:
    """Run one world to its end with run(); `on_record` gets (time_s, event, data) of every line of the event tape.

    `timeline` records what each island does when.
    """

    def __init__(
        self,
        spec: WorldSpec,
        streams: Streams,
        *,
        on_record: Callable[[float, str, Mapping[str, Any]], None] | None = None,
        jump: bool = True,
        timeline: Timeline | None = None,
        body: Body | None = None,
    ) -> None:
        self.spec = spec
        self._timeline = timeline
        self._body = body
        self.streams = streams
        self.engine = Engine()
        self.syncer = SyncerCore(spec.syncer)
        self.finish: Finish | None = None
        self.skipped = Tally()
        self.num_jumps = 0
        self._on_record = on_record
        self.learners = {name: self._learner(name, s) for name, s in spec.learners.items()}
        self._faults = Due(spec.faults)
        self._syncer_may_crash = any(f.target == SYNCER for f in spec.faults)
        self._saved: dict[str, Any] = {}
        """What a crashed syncer goes on from."""
        self._syncer_down = False
        self._syncer_life = 0
        self._slow_merges_until_s = -math.inf
        self._slow_merges_factor = 1.0
        self._steps_left_out = 0
        self._timers: dict[str, float] = {}
        self._handle = 0
        self._merge_free_s = 0.0
        self._merges = 0
        self._members = 0
        self._stale = 0.0
        self._stale_steps = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._plan_round = 0
        self._plan_count = 0
        half = max(HALF_WINDOW_STEPS, HALF_WINDOW_LEARNER_STEPS // len(spec.learners))
        inner = spec.syncer.inner_steps
        self._half = inner * math.ceil(half / inner)
        steps = len(spec.learners) * spec.syncer.target_steps
        self._may_jump = jump and steps > JUMP_ABOVE_LEARNER_STEPS
        self._marks: list[tuple[int, Tally]] = []
        self._next_mark: float = math.inf

    def _learner(self, name: str, spec: LearnerSpec) -> SimLearner:
        def link(direction: str) -> SimLink:
            d = getattr(spec.link, direction)
            chance = self.streams.of(f"link/{name}/{direction}")
            return SimLink(self.engine, d.rate_bps, d.latency_s, d.jitter_s, chance)

        return SimLearner(name, spec, link("up"), link("down"))

    # ---- time ----

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start, those that were jumped over included."""
        return self.engine.clock.now_s + self.skipped.time_s

    def run(self) -> World:
        """From the start to the protocol's end, or to spec.duration_s."""
        self._perform(self.syncer.start(0.0))
        for learner in self.learners.values():
            self._connect(learner)
        self._plan_next_fault()
        for name in self.learners:
            self._plan_random_fault(name, 0.0)
        if math.isfinite(self.spec.duration_s):
            self._plan(self.spec.duration_s, self._feed, StopRequested(reason="the simulated time is over"))
        self._disturbed()
        ended = self.engine.run(lambda: self.finish is not None)
        assert ended, "nothing happens any more, and the run has not ended"
        return self

    def _plan(self, at_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do something at a time that jumps do not move."""
        if math.isinf(at_s):
            return
        self._plan_count += 1
        self._planned.append((at_s, self._plan_count, action, args))
        self._push_plan(self._planned[-1])

    def _push_plan(self, plan: tuple[float, int, Callable[..., None], tuple[Any, ...]]) -> None:
        self.engine.at(plan[0] - self.skipped.time_s, TIMER, self._carry_out, plan, self._plan_round)

    def _carry_out(self, plan: tuple[float, int, Callable[..., None], tuple[Any, ...]], plan_round: int) -> None:
        if plan_round != self._plan_round:
            return
        self._planned.remove(plan)
        self._disturbed()
        plan[2](*plan[3])

    # ---- the syncer's driver (run.syncer_main) ----

    def _feed(self, event: SyncerEvent) -> None:
        if self.finish is None and not self._syncer_down:
            self._perform(self.syncer.handle(event, self.engine.clock.now_s))

    def _perform(self, effects: tuple[SyncerEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case Record():
                    self._record(effect.event, effect.data)
                case Pull():
                    pull = PullReceived(fragment=effect.fragment)
                    for name in effect.to:
                        self._tell(name, PULL_BYTES, pull)
                case StartMerge():
                    self._start_merge(effect)
                case Publish():
                    for name in effect.to:
                        self._send_fragment(name, effect.fragment, effect.version)
                case Persist():
                    self._persist()
                case AcceptReturn():
                    learner = self.learners[effect.learner]
                    learner.down.control(WELCOME_BYTES, self._accepted, learner)
                case SendState():
                    if self.learners[effect.learner].core is not None:
                        self.learners[effect.learner].begin_stay()  # its counters count no more
                    size = WELCOME_BYTES + WELCOME_BYTES_PER_FRAGMENT * len(effect.versions)
                    learner = self.learners[effect.learner]
                    learner.down.control(size, self._welcomed, learner, effect)
                    for fragment, version in enumerate(effect.versions):
                        self._send_fragment(effect.learner, fragment, version)
                case SetTimer():
                    self._timers[effect.key] = effect.at_s
                    self.engine.at(effect.at_s, TIMER, self._timer, effect.key, effect.at_s)
                case CancelTimer():
                    self._timers.pop(effect.key, None)
                case StopLearners():
                    for name in effect.to:
                        self._tell(name, FINISH_BYTES, StopReceived(reason=effect.reason))
                case Disconnect():
                    self._disconnected(self.learners[effect.learner])
                case DropPayload():
                    if self._body is not None:
                        self._body.drop(effect.handle)
                case Finish():
                    self.finish = effect

    def _record(self, event: str, data: Mapping[str, Any]) -> None:
        if event == "merge":
            self._merges += 1
            self._members += len(data["learners"])
            if self._timeline is not None:
                self._timeline.merge(self.now_s, data["fragment"])
        if self._on_record is not None:
            self._on_record(self.now_s, event, data)

    def _timer(self, key: str, at_s: float) -> None:
        if self._timers.get(key) != at_s:
            return
        del self._timers[key]
        if key == "liveness":
            self._tell_heartbeats()
        self._feed(TimerFired(key=key))

    def _tell_heartbeats(self) -> None:
        """Signs of life of those that a real syncer would have heard within an interval."""
        now_s = self.engine.clock.now_s
        for learner in self.learners.values():
            if learner.connected and not learner.hung and not learner.up.is_cut(now_s):
                self._feed(LearnerAlive(learner=learner.name))

    def _start_merge(self, effect: StartMerge) -> None:
        """One worker merges, in the order in which it was asked to."""
        num_bytes = 4 * self.spec.sizes[effect.fragment] * (len(effect.members) + 2)
        begin_s = max(self.engine.clock.now_s, self._merge_free_s)
        self._merge_free_s = begin_s + num_bytes / self.spec.costs.merge_bytes_per_s
        if self._body is not None:
            self._body.merge(effect)
        if self._slow_merges_until_s > self.now_s:
            self._merge_free_s = begin_s + (self._merge_free_s - begin_s) / self._slow_merges_factor
        finished = MergeFinished(fragment=effect.fragment, version=effect.version)
        self.engine.at(self._merge_free_s, ARRIVAL, self._merged, finished, self._syncer_life)

    def _merged(self, finished: MergeFinished, life: int) -> None:
        if life == self._syncer_life:
            self._feed(finished)

    def _tell(self, name: str, num_bytes: int, message: PullReceived | StopReceived) -> None:
        learner = self.learners[name]
        if learner.connected and learner.announced:
            learner.down.control(num_bytes, self._arrived, learner, message)

    def _send_fragment(self, name: str, fragment: int, version: int) -> None:
        learner = self.learners[name]
        if learner.connected and learner.announced:
            size = MERGED_HEAD_BYTES + self.spec.down_bytes[fragment]
            learner.down.bulk(fragment, size, self._merged_arrived, learner, fragment, version)

    # ---- a learner's link and joining (run.learner_link, run.learner_main) ----

    def _connect(self, learner: SimLearner) -> None:
        """Dial; the syncer hears of it some round trips later."""
        if self.finish is not None or learner.connected:
            return
        learner.begin_stay()
        self._lane(learner, REJOINING)
        wait_s = CONNECT_ROUND_TRIPS * (learner.up.latency_s + learner.down.latency_s)
        self.engine.at(self.engine.clock.now_s + wait_s, ARRIVAL, self._joined, learner, learner.stay)

    def _joined(self, learner: SimLearner, stay: int) -> None:
        if learner.stay != stay or learner.connected or learner.hung or learner.down_until_s > self.now_s:
            return
        if self._syncer_down:
            return  # it is called when somebody is there again
        learner.connected = learner.announced = True
        learner.connected_s = self.engine.clock.now_s
        self._disturbed()
        learner.num_sessions += 1
        self._feed(LearnerJoined(learner=learner.name, session=learner.session))
        self._apply_waiting(learner)

    def _disconnected(self, learner: SimLearner) -> None:
        """The syncer closes its connections. Who is only out of reach comes back when that is over."""
        self._close(learner)
        if learner.down_until_s > self.now_s:
            return
        if self.syncer.phase == RUNNING:
            self._connect(learner)

    def _close(self, learner: SimLearner) -> None:
        if learner.connected:
            learner.connected = False
            learner.heartbeat_bytes += self._heartbeat_bytes(learner)
        self._end_wait(learner)
        learner.begin_stay()
        learner.up.close()
        learner.down.close()
        self._disturbed()

    def _heartbeat_bytes(self, learner: SimLearner) -> float:
        connected_s = self.engine.clock.now_s - learner.connected_s
        return HEARTBEAT_BYTES * (connected_s / self.spec.heartbeat_interval_s)

    def _welcomed(self, learner: SimLearner, welcome: SendState) -> None:
        learner.welcome = welcome
        self._maybe_begin(learner)

    def _merged_arrived(self, learner: SimLearner, fragment: int, version: int) -> None:
        """Decoded in the background, then in the inbox."""
        arrived_s = self.engine.clock.now_s
        decode_s = 4 * self.spec.sizes[fragment] / self.spec.costs.codec_bytes_per_s
        merged = _Merged(fragment, version, arrived_s)
        if decode_s > 0:
            self.engine.at(arrived_s + decode_s, ARRIVAL, self._decoded, learner, learner.stay, merged)
        else:
            self._decoded(learner, learner.stay, merged)

    def _decoded(self, learner: SimLearner, stay: int, merged: _Merged) -> None:
        if learner.stay != stay:
            return
        if learner.core is None:
            known = learner.states.get(merged.fragment)
            if known is None or known.version <= merged.version:
                learner.states[merged.fragment] = merged
            self._maybe_begin(learner)
        else:
            self._arrived(learner, merged)

    def _maybe_begin(self, learner: SimLearner) -> None:
        """Begin when the welcome and a new enough version of every fragment are there."""
        welcome = learner.welcome
        if learner.core is not None or welcome is None or len(learner.states) < len(welcome.versions):
            return
        versions = [learner.states[f].version for f in range(len(welcome.versions))]
        if any(have < want for have, want in zip(versions, welcome.versions, strict=True)):
            return
        settings = replace(self.spec.learner, target_steps=self.syncer.settings.target_steps)
        core = LearnerCore(settings, step=welcome.global_step, versions=versions)
        for f, (have, want) in enumerate(zip(versions, welcome.versions, strict=True)):
            if have > want:
                self._tell_installed(learner, f, have, tokens=0, steps=0, step=core.step, waited_s=0.0)
        learner.core = core
        learner.joined_at_step = core.step
        learner.states = {}
        if self._body is not None:
            self._body.load(learner.name, core.step, versions)
        self._take(learner)
        self._go_on(learner)

    def _arrived(self, learner: SimLearner, message: PullReceived | StopReceived | _Merged) -> None:
        inbox = learner.inbox
        if isinstance(message, _Merged):
            # Of a fragment only the newest waits, in its place.
            for i, other in enumerate(inbox):
                if isinstance(other, _Merged) and other.fragment == message.fragment:
                    if other.version < message.version:
                        inbox[i] = message
                    return
        inbox.append(message)
        if learner.waits_since_s is not None and not learner.hung:
            self._end_wait(learner)
            self._take(learner)
            self._go_on(learner)

    # ---- a learner's steps (run.ranks) ----

    def _go_on(self, learner: SimLearner) -> None:
        """Begin a step, or wait for messages."""
        core = learner.core
        assert core is not None
        now_s = self.engine.clock.now_s
        if learner.leaving:
            self._leave(learner)
            return
        if core.waits_for:
            self._report(learner, force=True)
            learner.waits_since_s = now_s
            self._lane(learner, DONE if core.parked else WAITING)
            return
        self._lane(learner, COMPUTING)
        learner.busy = True
        step_s = learner.spec.step_s
        if self.spec.step_jitter > 0:
            u = self.streams.of(f"step/{learner.name}").random()
            step_s *= 1.0 + self.spec.step_jitter * (2.0 * u - 1.0)
        until_s = now_s + learner.stall_s + step_s + self.spec.costs.step_overhead_s
        learner.stall_s = 0.0
        learner.slowed_s = 0.0
        if learner.slow_until_s > self.now_s:
            until_s = self._slowed_end_s(learner, until_s - now_s)
        learner.step_ends_s = until_s
        self.engine.at(until_s, STEP, self._step_done, learner, learner.stay, step_s)

    def _step_done(self, learner: SimLearner, stay: int, step_s: float) -> None:
        if learner.stay != stay:
            return
        if learner.hung:
            # The process stands still; the step ends when it goes on.
            if math.isfinite(learner.down_until_s):
                until_s = learner.down_until_s - self.skipped.time_s
                self.engine.at(until_s, STEP, self._step_done, learner, stay, step_s)
            return
        if learner.step_ends_s > self.engine.clock.now_s:
            # It was slowed down meanwhile.
            self.engine.at(learner.step_ends_s, STEP, self._step_done, learner, stay, step_s)
            return
        core = learner.core
        assert core is not None
        learner.busy = False
        learner.steps += 1
        learner.compute_s += step_s
        learner.progress_steps += 1
        learner.progress_s += step_s + learner.slowed_s
        tokens = learner.spec.tokens if self._body is None else self._body.step(learner.name)
        learner.tokens += tokens
        self._perform_learner(learner, core.handle(StepFinished(tokens=tokens)))
        self._report(learner, force=bool(core.waits_for))
        self._take(learner)
        self._go_on(learner)
        at_step = self._faults.next_step
        if at_step is not None and core.step + self._steps_left_out >= at_step:
            for fault in self._faults.take(-math.inf, core.step + self._steps_left_out):
                self._disturbed()
                self._fault(fault)

    def _end_wait(self, learner: SimLearner) -> None:
        if learner.waits_since_s is not None:
            core = learner.core
            # Whoever is done waits for the others, not for the network.
            if core is not None and not core.parked:
                learner.wait_s += self.engine.clock.now_s - learner.waits_since_s
            learner.waits_since_s = None

    def _take(self, learner: SimLearner) -> None:
        """Feed what has come in, merged fragments first."""
        inbox = learner.inbox
        if not inbox:
            return
        learner.inbox = []
        core = learner.core
        assert core is not None
        if len(inbox) > 1:
            inbox.sort(key=lambda m: not isinstance(m, _Merged))
        for message in inbox:
            if isinstance(message, _Merged):
                self._handle += 1
                learner.held[self._handle] = message
                event = MergedReceived(fragment=message.fragment, version=message.version, handle=self._handle)
                self._perform_learner(learner, core.handle(event))
            else:
                self._perform_learner(learner, core.handle(message))

    def _perform_learner(self, learner: SimLearner, effects: tuple[LearnerEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case SendFragment():
                    self._send_contribution(learner, effect)
                case InstallFragment():
                    self._install(learner, effect)
                case DiscardPayload():
                    del learner.held[effect.handle]

    def _send_contribution(self, learner: SimLearner, effect: SendFragment) -> None:
        self._handle += 1
        contribution = Contribution(
            learner=learner.name,
            fragment=effect.fragment,
            base_version=effect.base_version,
            tokens=effect.tokens,
            steps=effect.steps,
            sent_at_step=effect.sent_at_step,
            handle=self._handle,
        )
        if self._body is not None:
            self._body.send(learner.name, contribution)
        costs = self.spec.costs
        num_bytes = 4 * self.spec.sizes[effect.fragment]
        learner.stall_s += num_bytes / costs.copy_bytes_per_s
        ready_s = learner.stall_s + num_bytes / costs.codec_bytes_per_s
        if ready_s > 0:
            now_s = self.engine.clock.now_s
            self.engine.at(now_s + ready_s, ARRIVAL, self._encoded, learner, learner.stay, contribution)
        else:
            self._encoded(learner, learner.stay, contribution)

    def _encoded(self, learner: SimLearner, stay: int, c: Contribution) -> None:
        if learner.stay != stay:
            return
        if self.spec.learner.lockstep:
            learner.unanswered[c.fragment] = c
        self._put_on_link(learner, c)

    def _put_on_link(self, learner: SimLearner, c: Contribution) -> None:
        if not (learner.connected and learner.announced):
            return
        size = CONTRIBUTION_HEAD_BYTES + self.spec.up_bytes[c.fragment]
        corrupt, learner.corrupt = learner.corrupt, ""
        if corrupt == "bytes":
            learner.up.bulk(c.fragment, size, self._broken, learner)
        elif corrupt:
            refused = ContributionRefused(contribution=c, reason="it holds NaN", bad=True)
            learner.up.bulk(c.fragment, size, self._feed, refused)
        else:
            learner.up.bulk(c.fragment, size, self._feed, ContributionReceived(contribution=c))

    def _install(self, learner: SimLearner, effect: InstallFragment) -> None:
        merged = learner.held.pop(effect.handle)
        learner.unanswered.pop(effect.fragment, None)
        core = learner.core
        assert core is not None
        if self._body is not None:
            self._body.install(learner.name, effect.fragment, effect.version)
        waited_s = self.engine.clock.now_s + learner.stall_s - merged.arrived_s
        learner.stall_s += 4 * self.spec.sizes[effect.fragment] / self.spec.costs.copy_bytes_per_s
        self._stale += effect.steps * (effect.steps + 1) / 2
        self._stale_steps += effect.steps
        self._tell_installed(
            learner,
            effect.fragment,
            effect.version,
            tokens=effect.tokens,
            steps=effect.steps,
            step=core.step,
            waited_s=waited_s,
        )

    def _tell_installed(
        self, learner: SimLearner, fragment: int, version: int, *, tokens: int, steps: int, step: int, waited_s: float
    ) -> None:
        event = FragmentInstalled(
            learner=learner.name,
            fragment=fragment,
            version=version,
            tokens=tokens,
            steps=steps,
            step=step,
            waited_s=waited_s,
        )
        if learner.connected and learner.announced:
            learner.up.control(INSTALLED_BYTES, self._feed, event)

    def _report(self, learner: SimLearner, *, force: bool) -> None:
        now_s = self.engine.clock.now_s
        core = learner.core
        assert core is not None
        if not (force or core.settings.report_is_due(learner.progress_steps, now_s - learner.reported_s)):
            return
        learner.reported_s = now_s
        steps, learner.progress_steps = learner.progress_steps, 0
        total_s, learner.progress_s = learner.progress_s, 0.0
        mean_s = total_s / steps if steps else None
        step = core.step - learner.skipped_steps
        if learner.connected and learner.announced:
            learner.up.control(REPORT_BYTES, self._reported, learner, step, learner.tokens, mean_s)

    def _reported(self, learner: SimLearner, step: int, tokens: int, mean_s: float | None) -> None:
        step += learner.skipped_steps
        self._feed(LearnerReport(learner=learner.name, step=step, tokens=tokens, step_time_s=mean_s))
        if self.syncer.global_step >= self._next_mark:
            self._mark()

    # ---- faults ----

    def _plan_next_fault(self) -> None:
        """One at a time: a day of random faults is thousands."""
        at_s = self._faults.next_s
        if at_s is not None:
            self._plan(at_s, self._timed_faults, at_s)

    def _timed_faults(self, at_s: float) -> None:
        due = self._faults.take(at_s, -1)
        self._plan_next_fault()
        for fault in due:
            self._fault(fault)

    # ---- a syncer that fails ----

    def _persist(self) -> None:
        if self._syncer_may_crash:
            self._saved = recovery.dump(self.syncer, self.engine.clock.now_s)

    def _syncer_fault(self, fault: Fault) -> None:
        if self._syncer_down or self.finish is not None:
            return
        if self._on_record is not None:
            self._on_record(self.now_s, "fault", {"learner": SYNCER, "kind": fault.kind, "for_s": fault.duration_s})
        if fault.kind == "slow":
            lasts_s = DEFAULT_DURATION_S if fault.duration_s is None else fault.duration_s
            self._slow_merges_until_s, self._slow_merges_factor = self.now_s + lasts_s, fault.factor
            self._plan(self._slow_merges_until_s, self._disturbed)
        elif fault.kind == "hang":
            # Silent until its supervisor ends it, or for as long as it was said.
            noticed_s = self.spec.syncer.heartbeat_timeout_s if fault.duration_s is None else fault.duration_s
            for learner in self.learners.values():
                learner.up.cut(self.engine.clock.now_s + noticed_s)
                learner.down.cut(self.engine.clock.now_s + noticed_s)
            if fault.duration_s is None:
                self._plan(self.now_s + noticed_s, self._syncer_dies, RESTART_S)
        elif fault.kind == "crash":
            self._syncer_dies(RESTART_S if fault.duration_s is None else fault.duration_s)

    def _syncer_dies(self, back_after_s: float) -> None:
        if not self._saved:
            self._saved = recovery.dump(self.syncer, self.engine.clock.now_s)
        self._syncer_down = True
        self._syncer_life += 1
        self._timers.clear()
        self._merge_free_s = self.engine.clock.now_s
        for learner in self.learners.values():
            if learner.connected:
                learner.connected = False
                learner.heartbeat_bytes += self._heartbeat_bytes(learner)
            learner.up.close()
            learner.down.close()
            if learner.core is None:
                learner.begin_stay()
        self._disturbed()
        self._plan(self.now_s + back_after_s, self._syncer_is_back)

    def _syncer_is_back(self) -> None:
        self._syncer_down = False
        now_s = self.engine.clock.now_s
        settings = self.syncer.settings
        self.syncer, effects = recovery.load(
            settings,
            self._saved,
            now_s,
            elapsed_s=now_s - self._saved["saved_at_s"],
            patience_s=settings.heartbeat_timeout_s,
        )
        self._perform(effects)
        for learner in self.learners.values():
            if learner.down_until_s > self.now_s or learner.hung:
                continue
            if learner.core is None:
                self._connect(learner)
                continue
            wait_s = CONNECT_ROUND_TRIPS * (learner.up.latency_s + learner.down.latency_s)
            self.engine.at(now_s + wait_s, ARRIVAL, self._reconnected, learner, learner.stay, self._syncer_life)

    def _reconnected(self, learner: SimLearner, stay: int, life: int) -> None:
        """Say where it stands; a step under way has not happened yet."""
        core = learner.core
        gone = learner.stay != stay or learner.connected or learner.hung or learner.down_until_s > self.now_s
        if gone or core is None or life != self._syncer_life:
            return
        learner.connected, learner.announced = True, False
        learner.connected_s = self.engine.clock.now_s
        self._perform_learner(learner, core.handle(Reconnected()))
        event = LearnerReturned(
            learner=learner.name,
            session=learner.session,
            step=core.step,
            tokens=learner.tokens,
            joined_at_step=learner.joined_at_step,
            versions=tuple(core.versions),
            fragment_tokens=tuple(core.tokens),
            sent_at=core.sent_at,
        )
        size = RETURNING_BYTES + RETURNING_BYTES_PER_FRAGMENT * len(core.versions)
        learner.up.control(size, self._announced, learner, event)

    def _announced(self, learner: SimLearner, event: LearnerReturned) -> None:
        learner.announced = True
        self._feed(event)
        self._apply_waiting(learner)

    def _accepted(self, learner: SimLearner) -> None:
        """In lock-step, what has had no answer goes once more."""
        for c in learner.unanswered.values():
            self._put_on_link(learner, c)

    def _fault(self, fault: Fault) -> None:
        if fault.target == SYNCER:
            self._syncer_fault(fault)
            return
        learner = self.learners[fault.target]
        learner.waiting_faults.append(fault)
        self._apply_waiting(learner)

    def _apply_waiting(self, learner: SimLearner) -> None:
        """The faults of an island happen in order, each when there is something for it to happen to."""
        waiting = learner.waiting_faults
        while waiting and self.finish is None and learner.down_until_s <= self.now_s:
            if waiting[0].kind in ON_THE_LINK and not learner.connected:
                return
            self._apply(learner, waiting.popleft())

    def _apply(self, learner: SimLearner, fault: Fault) -> None:
        now_s = self.now_s
        lasts_s = fault.duration_s
        if lasts_s is None:
            lasts_s = RESTART_S if fault.kind in ("crash", "hang") else DEFAULT_DURATION_S
        if self._on_record is not None:
            self._on_record(now_s, "fault", {"learner": learner.name, "kind": fault.kind, "for_s": lasts_s})
        match fault.kind:
            case "crash":
                self._crash(learner, lasts_s)
            case "hang":
                # A supervisor notices the silence and ends the process.
                noticed_s = self.spec.syncer.heartbeat_timeout_s if fault.duration_s is None else lasts_s
                learner.hung = True
                self._lane(learner, DOWN)
                learner.up.cut(self.engine.clock.now_s + noticed_s)
                learner.down_until_s = now_s + noticed_s
                if fault.duration_s is None:
                    self._plan(learner.down_until_s, self._crash, learner, lasts_s)
                else:
                    self._plan(learner.down_until_s, self._return, learner)
            case "partition":
                learner.up.cut(self.engine.clock.now_s + lasts_s)
                learner.down.cut(self.engine.clock.now_s + lasts_s)
                learner.down_until_s = now_s + lasts_s
                self._plan(learner.down_until_s, self._return, learner)
            case "preempt":
                self._preempt(learner, lasts_s)
            case "slow":
                self._slow(learner, fault.factor, lasts_s)
            case "degrade":
                learner.num_degraded += 1
                for link in (learner.up, learner.down):
                    link.degrade(fault.rate_bps, fault.latency_s, fault.loss)
                self._plan(now_s + lasts_s, self._restore, learner)
            case "corrupt":
                learner.corrupt = fault.payload

    def _crash(self, learner: SimLearner, lasts_s: float) -> None:
        """Its process is gone, and another one starts after so long (infinity: never)."""
        learner.hung = False
        learner.slow_until_s = -math.inf
        self._close(learner)
        self._lane(learner, DOWN)
        left = LearnerLeft(learner=learner.name, reason="its process ended", returns=math.isfinite(lasts_s))
        self.engine.at(self.engine.clock.now_s + learner.up.latency_s, ARRIVAL, self._feed, left)
        learner.down_until_s = self.now_s + lasts_s
        self._plan(learner.down_until_s, self._return, learner)

    def _preempt(self, learner: SimLearner, lasts_s: float) -> None:
        """It ends the step under way, says good-bye, and comes back after so long."""
        learner.down_until_s = self.now_s + lasts_s
        self._plan(learner.down_until_s, self._return, learner)
        if learner.core is None:
            self._leave(learner)
            return
        learner.leaving = True
        if not learner.busy:
            self._end_wait(learner)
            self._leave(learner)

    def _leave(self, learner: SimLearner) -> None:
        if learner.core is not None:
            self._report(learner, force=True)
        self._lane(learner, DOWN)
        learner.slow_until_s = -math.inf
        if learner.connected:
            learner.up.control(FINISH_BYTES, self._has_left, learner)
        else:
            learner.begin_stay()

    def _has_left(self, learner: SimLearner) -> None:
        self._close(learner)
        self._lane(learner, DOWN)
        self._feed(LearnerLeft(learner=learner.name, reason="preempted", returns=True))
        if learner.down_until_s <= self.now_s:
            self._connect(learner)

    def _slow(self, learner: SimLearner, factor: float, lasts_s: float) -> None:
        """Every step from now on, and what is left of the one under way, at this speed."""
        now_s = self.engine.clock.now_s
        left_s = max(0.0, learner.step_ends_s - now_s) if learner.busy else 0.0
        learner.slow_until_s, learner.slow_factor = self.now_s + lasts_s, factor
        # A jump must end before everything is at its own speed again.
        self._plan(learner.slow_until_s, self._disturbed)
        if left_s > 0:
            learner.step_ends_s = max(learner.step_ends_s, self._slowed_end_s(learner, left_s))

    def _slowed_end_s(self, learner: SimLearner, work_s: float) -> float:
        """When work that would take so long is done, if it is begun now."""
        now_s = self.engine.clock.now_s
        window_s = learner.slow_until_s - self.now_s
        slowly_s = min(work_s, window_s * learner.slow_factor)
        took_s = slowly_s / learner.slow_factor + (work_s - slowly_s)
        learner.slowed_s += took_s - work_s
        return now_s + took_s

    def _restore(self, learner: SimLearner) -> None:
        learner.num_degraded -= 1
        if learner.num_degraded == 0:
            learner.up.restore()
            learner.down.restore()

    def _broken(self, learner: SimLearner) -> None:
        """Bytes that fail their seal: both sides give the connection up, and the island dials again."""
        self._close(learner)
        self._feed(LearnerLeft(learner=learner.name, reason="its connection broke", returns=True))
        self._connect(learner)

    def _return(self, learner: SimLearner) -> None:
        """Repaired. Whoever is connected still goes on where it stopped; everybody else joins again."""
        learner.down_until_s = -math.inf
        was_hung, learner.hung = learner.hung, False
        if not learner.connected:
            self._connect(learner)
        elif was_hung and learner.busy:
            self._lane(learner, COMPUTING)
        elif was_hung and learner.waits_since_s is not None:
            self._end_wait(learner)
            self._take(learner)
            self._go_on(learner)
        self._apply_waiting(learner)

    def _plan_random_fault(self, name: str, from_s: float) -> None:
        """The next crash of one island. Its times depend on nothing but its own stream."""
        faults = self.spec.random_faults
        if faults is None:
            return
        chance = self.streams.of(f"faults/{name}")
        at_s = from_s + chance.expovariate(1.0 / faults.mean_time_between_s)
        repair_s = chance.expovariate(1.0 / faults.mean_repair_s) if faults.mean_repair_s > 0 else 0.0
        self._plan(at_s, self._random_fault, Fault(kind="crash", target=name, at_s=at_s, duration_s=repair_s))

    def _random_fault(self, fault: Fault) -> None:
        assert fault.at_s is not None
        assert fault.duration_s is not None
        self._plan_random_fault(fault.target, fault.at_s + fault.duration_s)
        self._fault(fault)

    # ---- figures ----

    def _lane(self, learner: SimLearner, state: str) -> None:
        """For the picture: the island does this from now on."""
        if self._timeline is not None:
            self._timeline.begin(learner.name, state, self.now_s)

    def tally(self) -> Tally:
        """What happened until now, jumps included."""
        return self.skipped.plus(self._counted()) if self.num_jumps else self._counted()

    def _counted(self) -> Tally:
        core, now_s = self.syncer, self.engine.clock.now_s
        account: dict[str, float] = dict(core.ledger.summary())
        useful = core.ledger.useful_share
        uptime = core.uptime
        running_s = now_s - uptime.started_s if uptime.started_s is not None else 0.0
        return Tally(
            time_s=now_s,
            tokens=account,
            wasted=(1.0 - useful) * account["processed"] if useful is not None else 0.0,
            merges=self._merges,
            members=self._members,
            stale=self._stale,
            stale_steps=self._stale_steps,
            running_s=running_s,
            training_s=running_s * (uptime.share(now_s) or 0.0),
            learners={name: self._counted_of(learner) for name, learner in self.learners.items()},
        )

    def _counted_of(self, learner: SimLearner) -> list[float]:
        beats = learner.heartbeat_bytes + (self._heartbeat_bytes(learner) if learner.connected else 0.0)
        up = learner.up.bytes_sent + beats
        return [learner.steps, learner.compute_s, learner.wait_s, up, learner.down.bytes_sent]

    # ---- jumps ----

    def _disturbed(self) -> None:
        """Something happened that does not happen in every cycle: a window must begin after it has settled."""
        self._marks.clear()
        if self._may_jump:
            self._next_mark = self.syncer.global_step + max(self._half, 2 * self.spec.syncer.inner_steps)

    def _mark(self) -> None:
        """Half a window more; jump if the two halves of the window agree, else look at twice as long a one."""
        core = self.syncer
        self._next_mark = core.global_step + self._half
        now_s = self.engine.clock.now_s
        if core.phase != RUNNING or any(m.up.is_cut(now_s) for m in self.learners.values()):
            return
        at_step = self._faults.next_step
        if at_step is None:
            at_step = core.settings.target_steps + self._steps_left_out
        self._marks.append((core.global_step, self._counted()))
        halves = len(self._marks) - 1
        enough = (self._marks[-1][0] - self._marks[0][0]) * len(self.learners) >= WINDOW_LEARNER_STEPS
        if halves < 2 or (halves & (halves - 1) and not enough):
            return
        (first, a), (middle, b), (last, c) = self._marks[0], self._marks[halves // 2], self._marks[-1]
        if not enough and not _alike(b.plus(a, -1.0), middle - first, c.plus(b, -1.0), last - middle):
            return
        window, steps = c.plus(a, -1.0), last - first
        last_step = min(core.settings.target_steps, at_step - self._steps_left_out)
        room = last_step - core.global_step - 2 * self._half
        planned_s = min((p[0] for p in self._planned), default=math.inf) - self.now_s - window.time_s
        times = int(min(room / steps, planned_s / window.time_s))
        if times >= 1:
            self._jump(window, steps, times)

    def _jump(self, window: Tally, steps: int, times: int) -> None:
        """Take what happened in the window `times` more times as having happened."""
        jumped_s = times * window.time_s
        # What is pending is so at any moment, and does not pile up.
        window.tokens["merged"] += window.tokens.pop("pending")
        self.skipped = self.skipped.plus(window, times)
        self.num_jumps += 1
        # Nobody overtakes the foremost, as chance might have it if a small lead were taken many times.
        moved = {name: round(times * min(steps, window.learners[name][0])) for name in self.learners}
        if self.syncer.settings.lockstep:
            # All are at the same step, so that the target can come closer instead.
            target = self.syncer.settings.target_steps - times * steps
            self.syncer.settings = replace(self.syncer.settings, target_steps=target)
            self._steps_left_out += times * steps
            for learner in self.learners.values():
                if learner.core is not None:
                    learner.core.settings = replace(learner.core.settings, target_steps=target)
        else:
            self.syncer.move_on(moved, jumped_s)
            for name, learner in self.learners.items():
                learner.skipped_steps += moved[name]
                if learner.core is not None:
                    learner.core.step += moved[name]
        if self._on_record is not None:
            self._on_record(self.now_s, "jump", {"seconds": jumped_s, "steps": times * steps})
        self._persist()
        self._plan_round += 1
        for plan in self._planned:
            self._push_plan(plan)
        self._disturbed()


def _alike(a: Tally, steps_a: int, b: Tally, steps_b: int) -> bool:
    """Whether two stretches are the same per step, within STEADY.

    What is a share of something is compared beside the whole: a small wait that doubles is no change.
    """

    def per_step(t: Tally, steps: int) -> list[float]:
        taken, compute_s, wait_s, up, down = (sum(values) for values in zip(*t.learners.values(), strict=True))
        processed = t.tokens["processed"]
        late = processed + t.tokens["late"]
        missing = t.merges * len(t.learners) + t.members
        figures = (t.time_s, processed, late, processed + t.wasted, missing, taken, compute_s + wait_s, up, down)
        return [x / steps for x in figures]

    return all(
        abs(x - y) <= STEADY * max(abs(x), abs(y))
        for x, y in zip(per_step(a, steps_a), per_step(b, steps_b), strict=True)
    )
