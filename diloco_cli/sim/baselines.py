"""Data parallelism over the same links and failures: what the decoupled run is compared with.

Owns: the time of a step with a ring all-reduce of the gradients, and what failures do to it (algorithm.md, Baselines).
Called by: sim.results.

Model. A step takes as long as its slowest island computes, and then the all-reduce: nothing overlaps. A ring of m
islands makes 2 (m - 1) rounds, in each of which every island sends 1/m of the gradients (in network.wire_up) to its
neighbour, over its own link up and the neighbour's link down. A failure loses the step under way.

    data_parallel           all stop until everybody is repaired, and then restart (`restart_s`)
    data_parallel_elastic   when it is noticed the others regroup (`restart_s`) and go on; whoever comes back is waited
                            for once more: it regroups, and gets the parameters and two moments in float32 over its link

Whoever is slow, or has a degraded link, is waited for by all: from the end of the step under way, while it lasts (what
is lost on a link costs rate here, not delay). Corrupt gradients and full disks cost nothing here.

Between failures all steps are alike: long stretches are not counted out, but taken from the mean of SAMPLED_STEPS.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from diloco_cli.core.faults import (
    CORRUPT,
    CRASH,
    DEFAULT_DURATION_S,
    DEGRADE,
    DISK_FULL,
    HANG,
    PREEMPT,
    SLOW,
    Due,
    Fault,
)
from diloco_cli.sim.engine import Streams
from diloco_cli.sim.timeline import COMPUTING, DOWN, REJOINING, WAITING, Timeline
from diloco_cli.sim.world import RESTART_S, Tally, WorldSpec

SAMPLED_STEPS = 2_000
STATE_BYTES_PER_PARAMETER = 12
# Failures that come faster than restarts leave no time to train: such a run is given up.
GIVE_UP_AFTER = 200
# What all wait for, but nobody stops for; and what is not felt at all.
GENTLE, UNFELT = (SLOW, DEGRADE), (CORRUPT, DISK_FULL)
NOTHING: Mapping[str, Fault] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went: status as core.syncer has it, or stalled: failures leave no time to train."""

    status: str
    tally: Tally


def faults_of(spec: WorldSpec, streams: Streams) -> Iterator[Fault]:
    """All faults of islands with a time, in their order: the same draws as in sim.world. There is no syncer here."""
    upcoming = [
        (f.at_s, f.target, i, f) for i, f in enumerate(spec.faults) if f.at_s is not None and f.target in spec.learners
    ]
    random_faults = spec.random_faults

    def draw(island: str, from_s: float) -> tuple[float, str, int, Fault]:
        assert random_faults is not None
        chance = streams.of(f"faults/{island}")
        at_s = from_s + chance.expovariate(1.0 / random_faults.mean_time_between_s)
        repair_s = chance.expovariate(1.0 / random_faults.mean_repair_s) if random_faults.mean_repair_s > 0 else 0.0
        return at_s, island, -1, Fault(kind=CRASH, target=island, at_s=at_s, duration_s=repair_s)

    if random_faults is not None:
        upcoming += [draw(island, 0.0) for island in spec.learners]
    heapq.heapify(upcoming)
    while upcoming:
        at_s, island, number, fault = heapq.heappop(upcoming)
        yield fault
        if number < 0:
            assert fault.duration_s is not None
            heapq.heappush(upcoming, draw(island, at_s + fault.duration_s))


def lasts_s(spec: WorldSpec, fault: Fault) -> float:
    """Its length, or what sim.world takes where nothing was said."""
    if fault.duration_s is not None:
        return fault.duration_s
    if fault.kind == HANG:
        return spec.syncer.heartbeat_timeout_s + RESTART_S
    return RESTART_S if fault.kind == CRASH else DEFAULT_DURATION_S


def all_reduce_s(spec: WorldSpec, group: list[str], degraded: Mapping[str, Fault] = NOTHING) -> float:
    """Seconds of one ring all-reduce of all gradients; some links are worse than usual."""
    count = len(group)
    if count < 2:
        return 0.0
    rates, delays = [], []
    for name in group:
        link, fault = spec.learners[name].link, degraded.get(name)
        directions = (link.up, link.down)
        if fault is None:
            rates += [d.rate_bps for d in directions]
            delays.append(sum(d.latency_s + d.jitter_s / 2 for d in directions))
            continue
        rates += [(fault.rate_bps or d.rate_bps) * (1.0 - fault.loss) for d in directions]
        worse_s = fault.latency_s
        delays.append(sum((d.latency_s if worse_s is None else worse_s) + d.jitter_s / 2 for d in directions))
    rate_bps, delay_s = min(rates), max(delays)
    return 2 * (count - 1) * (sum(spec.up_bytes) / count * 8 / rate_bps + delay_s)


class DataParallel:
    """One run; use run()."""

    def __init__(
        self,
        spec: WorldSpec,
        streams: Streams,
        *,
        elastic: bool,
        restart_s: float,
        timeline: Timeline | None = None,
    ) -> None:
        self.spec = spec
        self._timeline = timeline
        self.streams = streams
        self.elastic = elastic
        self.restart_s = restart_s
        self.group = sorted(spec.learners)
        self.steps_left = spec.syncer.target_steps
        self.slow: dict[str, float] = {}
        self.degraded: dict[str, Fault] = {}
        self._by_step = Due(f for f in spec.faults if f.at_step is not None and f.target in spec.learners)
        self._ends: list[tuple[float, int, Fault]] = []
        self._count = itertools.count()
        self.tally = Tally(
            tokens=dict.fromkeys(("processed", "merged", "late", "refused", "lost"), 0.0),
            learners={name: [0.0] * 5 for name in spec.learners},
        )

    def run(self) -> Outcome:
        """From the start to the target, to spec.duration_s, or to a failure that nobody repairs."""
        faults = faults_of(self.spec, self.streams)
        returns: list[tuple[float, str]] = []
        fault = next(faults, None)
        slowest_s = max(m.step_s for m in self.spec.learners.values())
        step_s = slowest_s + all_reduce_s(self.spec, self.group) + self.spec.costs.step_overhead_s
        give_up_s = GIVE_UP_AFTER * (self.steps_left * step_s + self.restart_s)
        while self.steps_left > 0:
            if self.tally.time_s > give_up_s:
                return self._end("stalled")
            fault_s = fault.at_s if fault is not None and fault.at_s is not None else math.inf
            hard_s = min(fault_s, returns[0][0] if returns else math.inf)
            gentle_s = self._ends[0][0] if self._ends else math.inf
            if fault is not None and fault.kind in (*GENTLE, *UNFELT) and fault_s == hard_s:
                gentle_s = min(gentle_s, fault_s)
            event_s = min(hard_s, gentle_s)
            gently = gentle_s == event_s and event_s < self.spec.duration_s
            self._train_until(min(event_s, self.spec.duration_s), gently=gently)
            if self.steps_left <= 0:
                break
            if due := self._by_step.take(-math.inf, self._steps):
                for one in due:
                    self._fail(one, returns)
                continue
            if self.tally.time_s >= self.spec.duration_s:
                return self._end("stopped")
            if math.isinf(event_s):
                return self._end("quorum_lost")
            if self._ends and self._ends[0][0] <= event_s:
                self._recover(heapq.heappop(self._ends)[2])
            elif fault is not None and fault_s <= event_s:
                self._fail(fault, returns)
                fault = next(faults, None)
            else:
                _, island = heapq.heappop(returns)
                self._come_back(island, returns)
        return self._end("completed")

    def _end(self, status: str) -> Outcome:
        t = self.tally
        t.running_s = t.time_s
        return Outcome(status, t)

    # ---- steps ----

    @property
    def _steps(self) -> int:
        """Steps done."""
        return self.spec.syncer.target_steps - self.steps_left

    def _train_until(self, end_s: float, *, gently: bool) -> None:
        """Whole steps until then, or the next fault by step; the one that does not fit is lost, or gently goes on.

        Time passes in any case.
        """
        t = self.tally
        if t.time_s >= end_s:
            return
        if self.group:
            self._steps_until(end_s, gently=gently)
        at_step = self._by_step.next_step
        if at_step is not None and self._steps >= at_step:
            return
        if self.steps_left > 0 and math.isfinite(end_s):
            t.time_s = max(t.time_s, end_s)

    def _steps_until(self, end_s: float, *, gently: bool) -> None:
        t = self.tally
        began_s = t.time_s
        reduce_s = all_reduce_s(self.spec, self.group, self.degraded)
        at_step = self._by_step.next_step
        left_then = 0 if at_step is None else max(0, self.spec.syncer.target_steps - at_step)
        overhead_s = reduce_s + self.spec.costs.step_overhead_s
        counted, computing_s = 0, dict.fromkeys(self.group, 0.0)
        while self.steps_left > left_then and t.time_s < end_s:
            took = self._one_step()
            step_s = max(took.values()) + overhead_s
            if t.time_s + step_s > end_s and not gently:
                self._draw(took, COMPUTING, t.time_s)
                self._book_lost(took, end_s - t.time_s)
                return
            for name, s in took.items():
                computing_s[name] += s
            counted += 1
            self._draw_step(took)
            self._book(computing_s=took, steps=1, seconds=step_s, reduce_s=reduce_s)
            drawn = self._timeline is not None and t.time_s <= self._timeline.fine_s
            if not drawn and (counted >= SAMPLED_STEPS or self.spec.step_jitter == 0.0):
                mean_s = (t.time_s - began_s) / counted
                room = (end_s - t.time_s) / mean_s
                left = self.steps_left - left_then
                steps = left if room > left else max(0, int(room) - 1)
                mean = {name: s * steps / counted for name, s in computing_s.items()}
                self._book(computing_s=mean, steps=steps, seconds=steps * mean_s, reduce_s=steps * reduce_s)
                began_s, computing_s = t.time_s, dict.fromkeys(self.group, 0.0)
                counted = 0

    def _one_step(self) -> dict[str, float]:
        jitter = self.spec.step_jitter
        took = {}
        for name in self.group:
            step_s = self.spec.learners[name].step_s
            if jitter > 0:
                step_s *= 1.0 + jitter * (2.0 * self.streams.of(f"step/{name}").random() - 1.0)
            took[name] = step_s / self.slow.get(name, 1.0)
        return took

    def _draw_step(self, took: dict[str, float]) -> None:
        """For the picture: each computes, then waits for the others and the reduction."""
        if self._timeline is not None:
            for name, s in took.items():
                self._timeline.begin(name, COMPUTING, self.tally.time_s)
                self._timeline.begin(name, WAITING, self.tally.time_s + s)

    def _draw(self, names: Iterable[str], state: str, time_s: float) -> None:
        if self._timeline is not None:
            for name in names:
                self._timeline.begin(name, state, time_s)

    def _book(self, *, computing_s: dict[str, float], steps: int, seconds: float, reduce_s: float) -> None:
        t, count = self.tally, len(self.group)
        sent = 2 * (count - 1) / count * sum(self.spec.up_bytes) * steps
        tokens = steps * sum(self.spec.learners[name].tokens for name in self.group)
        t.time_s += seconds
        t.training_s += seconds
        t.tokens["processed"] += tokens
        t.tokens["merged"] += tokens
        t.merges += steps
        t.members += steps * count
        self.steps_left -= steps
        slowest_s = seconds - steps * self.spec.costs.step_overhead_s
        for name, s in computing_s.items():
            mine = t.learners[name]
            mine[0] += steps
            mine[1] += s * self.slow.get(name, 1.0)
            mine[2] += slowest_s - s
            mine[3] += sent
            mine[4] += sent

    def _book_lost(self, took: dict[str, float], seconds: float) -> None:
        """A step that a failure broke off: computed in part, and for nothing."""
        t = self.tally
        t.training_s += seconds
        for name, s in took.items():
            done = min(1.0, seconds / s) if s > 0 else 0.0
            tokens = done * self.spec.learners[name].tokens
            t.tokens["processed"] += tokens
            t.tokens["lost"] += tokens
            t.wasted += tokens
            t.learners[name][1] += done * s

    # ---- failures ----

    def _fail(self, fault: Fault, returns: list[tuple[float, str]]) -> None:
        name = fault.target
        if fault.kind in UNFELT:
            return
        at_s = self.tally.time_s if fault.at_s is None else fault.at_s
        back_s = at_s + lasts_s(self.spec, fault)
        if fault.kind in GENTLE:
            if fault.kind == SLOW:
                self.slow[name] = fault.factor
            else:
                self.degraded[name] = fault
            heapq.heappush(self._ends, (back_s, next(self._count), fault))
            return
        self._draw((n for n in self.group if n != name), WAITING, self.tally.time_s)
        self._draw([name], DOWN, self.tally.time_s)
        if name not in self.group:
            # It is down, or waiting for the others' repair, already: down for longer, at most.
            for i, (until_s, island) in enumerate(returns):
                if island == name:
                    returns[i] = (max(until_s, back_s), island)
            heapq.heapify(returns)
            return
        heapq.heappush(returns, (back_s, name))
        if not self.elastic:
            self.group = []
            return
        self.group.remove(name)
        noticed_s = 0.0 if fault.kind in (CRASH, PREEMPT) else self.spec.syncer.heartbeat_timeout_s
        self._stand_still(noticed_s + self.restart_s)

    def _recover(self, fault: Fault) -> None:
        """What was slow or degraded is no more, unless something else of its kind has begun since."""
        if fault.kind == SLOW and self.slow.get(fault.target) == fault.factor:
            del self.slow[fault.target]
        elif fault.kind == DEGRADE and self.degraded.get(fault.target) is fault:
            del self.degraded[fault.target]

    def _come_back(self, island: str, returns: list[tuple[float, str]]) -> None:
        if not self.elastic:
            self._draw([island], WAITING, self.tally.time_s)
            if not returns:
                self.group = sorted(self.spec.learners)
                self._draw(self.group, REJOINING, self.tally.time_s)
                self._stand_still(self.restart_s)
            return
        link = self.spec.learners[island].link
        transfer_s = STATE_BYTES_PER_PARAMETER * sum(self.spec.sizes) * 8 / link.down.rate_bps
        alone = not self.group
        self._draw(self.group, WAITING, self.tally.time_s)
        self._draw([island], REJOINING, self.tally.time_s)
        self.group = sorted([*self.group, island])
        self._stand_still(self.restart_s + (0.0 if alone else transfer_s))

    def _stand_still(self, seconds: float) -> None:
        """Nobody trains; failures meanwhile are taken up when it is over."""
        self.tally.time_s += seconds


def run_data_parallel(
    spec: WorldSpec, streams: Streams, *, elastic: bool, restart_s: float, timeline: Timeline | None = None
) -> Outcome:
    """One run of data parallelism across the islands of `spec`."""
    return DataParallel(spec, streams, elastic=elastic, restart_s=restart_s, timeline=timeline).run()
