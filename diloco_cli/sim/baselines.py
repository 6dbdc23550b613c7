"""Data parallelism over the same links and failures: what the decoupled run is compared with.

Owns: the time of a step with a ring all-reduce of the gradients, and what failures do to it (algorithm.md, Baselines).
Called by: sim.results.

Model. A step takes as long as its slowest island computes, and then the all-reduce: nothing overlaps. A ring of m
islands makes 2 (m - 1) rounds, in each of which every island sends 1/m of the gradients (in network.wire_up) to its
neighbour, over its own link up and the neighbour's link down. A failure loses the step under way.

    data_parallel           all stop until everybody is repaired, and then restart (`restart_s`)
    data_parallel_elastic   when it is noticed the others regroup (`restart_s`) and go on; whoever comes back is waited
                            for once more: it regroups, and gets the parameters and two moments in float32 over its link

Between failures all steps are alike: long stretches are not counted out, but taken from the mean of SAMPLED_STEPS.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diloco_cli.sim.engine import Streams
from diloco_cli.sim.timeline import COMPUTING, DOWN, REJOINING, WAITING, Timeline
from diloco_cli.sim.world import Fault, Tally, WorldSpec

SAMPLED_STEPS = 2_000
STATE_BYTES_PER_PARAMETER = 12
# Failures that come faster than restarts leave no time to train: such a run is given up.
GIVE_UP_AFTER = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went: status as core.syncer has it, or stalled: failures leave no time to train."""

    status: str
    tally: Tally


def faults_of(spec: WorldSpec, streams: Streams) -> Iterator[Fault]:
    """All faults in the order of their times: the same draws as in sim.world."""
    upcoming = [(f.at_s, f.island, i, f) for i, f in enumerate(spec.faults)]
    random_faults = spec.random_faults

    def draw(island: str, from_s: float) -> tuple[float, str, int, Fault]:
        assert random_faults is not None
        chance = streams.of(f"faults/{island}")
        at_s = from_s + chance.expovariate(1.0 / random_faults.mean_time_between_s)
        repair_s = chance.expovariate(1.0 / random_faults.mean_repair_s) if random_faults.mean_repair_s > 0 else 0.0
        return at_s, island, -1, Fault(at_s=at_s, island=island, duration_s=repair_s)

    if random_faults is not None:
        upcoming += [draw(island, 0.0) for island in spec.learners]
    heapq.heapify(upcoming)
    while upcoming:
        at_s, island, number, fault = heapq.heappop(upcoming)
        yield fault
        if number < 0:
            heapq.heappush(upcoming, draw(island, at_s + fault.duration_s))


def all_reduce_s(spec: WorldSpec, group: list[str]) -> float:
    """Seconds of one ring all-reduce of all gradients."""
    count = len(group)
    if count < 2:
        return 0.0
    links = [spec.learners[name].link for name in group]
    rate_bps = min(min(link.up.rate_bps, link.down.rate_bps) for link in links)
    delay_s = max(sum(d.latency_s + d.jitter_s / 2 for d in (link.up, link.down)) for link in links)
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
            event_s = min(fault.at_s if fault else math.inf, returns[0][0] if returns else math.inf)
            self._train_until(min(event_s, self.spec.duration_s))
            if self.steps_left <= 0:
                break
            if self.tally.time_s >= self.spec.duration_s:
                return self._end("stopped")
            if math.isinf(event_s):
                return self._end("quorum_lost")
            if fault is not None and fault.at_s <= event_s:
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

    def _train_until(self, end_s: float) -> None:
        """Whole steps until then; the one that does not fit is lost. Time passes in any case."""
        t = self.tally
        if t.time_s >= end_s:
            return
        if self.group:
            self._steps_until(end_s)
        if self.steps_left > 0 and math.isfinite(end_s):
            t.time_s = max(t.time_s, end_s)

    def _steps_until(self, end_s: float) -> None:
        t = self.tally
        began_s = t.time_s
        reduce_s = all_reduce_s(self.spec, self.group)
        overhead_s = reduce_s + self.spec.costs.step_overhead_s
        counted, computing_s = 0, dict.fromkeys(self.group, 0.0)
        while self.steps_left > 0:
            took = self._one_step()
            step_s = max(took.values()) + overhead_s
            if t.time_s + step_s > end_s:
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
                steps = self.steps_left if room > self.steps_left else max(0, int(room) - 1)
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
            took[name] = step_s
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
            mine[1] += s
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
        self._draw((n for n in self.group if n != fault.island), WAITING, self.tally.time_s)
        self._draw([fault.island], DOWN, self.tally.time_s)
        if fault.island not in self.group:
            # It is down, or waiting for the others' repair, already: down for longer, at most.
            for i, (at_s, island) in enumerate(returns):
                if island == fault.island:
                    returns[i] = (max(at_s, fault.at_s + fault.duration_s), island)
            heapq.heapify(returns)
            return
        heapq.heappush(returns, (fault.at_s + fault.duration_s, fault.island))
        if not self.elastic:
            self.group = []
            return
        self.group.remove(fault.island)
        noticed_s = 0.0 if fault.kind == "crash" else self.spec.syncer.heartbeat_timeout_s
        self._stand_still(noticed_s + self.restart_s)

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
