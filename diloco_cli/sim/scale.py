"""Interruptions at scale: what share of the chips' time ends up in the model, for millions of chips.

Theory (docs/failure-model.md has the derivation). Chips come in slices. A running chip is interrupted as a Poisson
process, independently of the others; a stopped one is not. An interruption takes the chip away `notice_s` after it is
announced; interruptions announced meanwhile share its stop. What the stop is depends on the learner:

    elastic      the learner stops for `shrink_s` and goes on without the slices that were hit; `return_s` after they
                 left they are back and the learner stops for `grow_s` to take them in. Whatever is back when a stop
                 ends joins there and costs nothing more, and what is back during a notice waits for that stop.
    not elastic  the learner stops until the chips are back and all have started again (`return_s + grow_s`).

Data parallel is one learner of all chips; decoupled learners are hit, stop and shrink one by one. The simulation goes
from interruption to interruption, never from step to step, and holds a few numbers per learner however long it runs.

Owns: the parameters, the simulation, and the closed forms that check it.
Must not: know the papers' tables (sim.paper does), read a clock, or draw from an unnamed random stream.
Called by: sim.paper, `diloco simulate --chips`, benchmarks/fit_failure_model.py.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from diloco_cli.errors import ConfigError

YEAR_S = 365 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """Physical parameters; the defaults are the same for every cell of every table (docs/failure-model.md).

    Attributes:
        mtbi_s: mean time between two interruptions of one running chip, seconds.
        notice_s: from the announcement of an interruption until the chip is gone; work goes on and counts.
        shrink_s: a learner's stop until it goes on without the slices that left (detection and the lost step included).
        grow_s: a learner's stop to take slices that are back in, or to start all again.
        return_s: from the moment a chip is gone until it (or its replacement) can be used.
        chips_per_slice: chips that leave and return together.
        speed_variance: standard deviation of a slice's step time over its mean (evenly spread around it). Slices of one
            learner go in lock-step, so each step lasts as long as the slowest one's.
    """

    mtbi_s: float = YEAR_S
    notice_s: float = 2.25
    shrink_s: float = 17.0
    grow_s: float = 10.0
    return_s: float = 71.0
    chips_per_slice: int = 256
    speed_variance: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not self.mtbi_s > 0:
            raise ConfigError(f"the mean time between interruptions must be above zero, not {self.mtbi_s} s")
        if self.chips_per_slice < 1:
            raise ConfigError(f"a slice has at least one chip, not {self.chips_per_slice}")
        for name in ("notice_s", "shrink_s", "grow_s", "return_s", "speed_variance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be zero or more and finite, not {getattr(self, name)}")

    def lockstep_speed(self, num_slices: int) -> float:
        """Speed of slices in lock-step over that of each alone: 1 / E[largest of n step times, mean 1].

        The largest of n values evenly spread over [-a, a] has the mean a (n - 1) / (n + 1), and a is sqrt(3) standard
        deviations.
        """
        if num_slices < 1:
            return 0.0
        return 1 / (1 + math.sqrt(3) * self.speed_variance * (num_slices - 1) / (num_slices + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """One learner of a fleet. `mtbi_s` overrides the model's (math.inf: is never interrupted)."""

    name: str
    chips: int
    elastic: bool = True
    mtbi_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse a learner without chips."""
        if self.chips < 1:
            raise ConfigError(f"a learner needs at least one chip; {self.name} has {self.chips}")


def fleet(chips: int, learners: int, *, elastic: bool = True) -> list[Learner]:
    """`chips` spread evenly over `learners`; one learner is (elastic) data parallel."""
    if not 1 <= learners <= chips:
        raise ConfigError(f"{chips} chips cannot be spread over {learners} learners")
    base, more = divmod(chips, learners)
    return [Learner(name=f"learner-{i}", chips=base + (i < more), elastic=elastic) for i in range(learners)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one simulation.

    Attributes:
        goodput: chip-seconds spent on steps that end up in the model, over chip-seconds allotted (0..1).
        uptime: share of the time in which at least one learner trains.
        uptime_of_all: share of the time in which every learner trains.
        interruptions: number of interruptions.
        learners: goodput of each learner, in the fleet's order.
    """

    goodput: float
    uptime: float
    uptime_of_all: float
    interruptions: int
    learners: tuple[float, ...]


@dataclass(slots=True)
class _Account:
    """What a learner has done so far."""

    useful_chip_s: float = 0.0
    interruptions: int = 0


@dataclass(slots=True)
class _Track:
    """One learner's life as a sequence of spans of running; made anew for each simulation."""

    learner: Learner
    model: FailureModel
    horizon_s: float
    stream: random.Random
    account: _Account = field(default_factory=_Account)

    @property
    def chip_rate(self) -> float:
        """Interruptions per second of one running chip."""
        return 1 / (self.model.mtbi_s if self.learner.mtbi_s is None else self.learner.mtbi_s)

    def spans(self) -> Iterator[tuple[float, float]]:
        """(start, end) of every span in which the learner trains, in order, up to the horizon."""
        return self._elastic() if self.learner.elastic else self._rigid()

    def _next_exposure(self) -> float:
        """Chip-seconds of running until the next interruption; one draw for each interruption."""
        return self.stream.expovariate(1.0) / self.chip_rate if self.chip_rate else math.inf

    def _elastic(self) -> Iterator[tuple[float, float]]:
        model, chips = self.model, self.learner.chips
        num_slices = math.ceil(chips / model.chips_per_slice)
        back_at: deque[float] = deque()  # when each slice that is away can be used again; at most num_slices entries
        leaving, leave_s = 0, math.inf  # slices that were given notice, and when they go
        now_s, exposure = 0.0, self._next_exposure()
        while now_s < self.horizon_s:
            up = num_slices - len(back_at)
            if up == 0:  # nothing is left to run on: wait for the first slice
                now_s = back_at[0] + model.grow_s
            else:
                running, exposed = chips * up / num_slices, chips * (up - leaving) / num_slices
                interrupted_s = now_s + exposure / exposed if exposed else math.inf
                returns_s = back_at[0] if back_at and not leaving else math.inf
                end_s = min(interrupted_s, returns_s, leave_s, self.horizon_s)
                self.account.useful_chip_s += (end_s - now_s) * running * model.lockstep_speed(up)
                if end_s > now_s:
                    yield now_s, end_s
                exposure = max(0.0, exposure - (end_s - now_s) * exposed)
                now_s = end_s
                if end_s == self.horizon_s:
                    return
                if end_s == interrupted_s:
                    self.account.interruptions += 1
                    exposure = self._next_exposure()
                    leaving, leave_s = leaving + 1, min(leave_s, now_s + model.notice_s)
                elif end_s == leave_s:
                    back_at.extend([now_s + model.return_s] * leaving)
                    now_s += model.shrink_s
                    leaving, leave_s = 0, math.inf
                else:
                    now_s += model.grow_s
            while back_at and back_at[0] <= now_s and not leaving:
                back_at.popleft()

    def _rigid(self) -> Iterator[tuple[float, float]]:
        model, chips = self.model, self.learner.chips
        speed = model.lockstep_speed(math.ceil(chips / model.chips_per_slice))
        now_s = 0.0
        while now_s < self.horizon_s:
            announced_s = now_s + self._next_exposure() / chips
            self.account.interruptions += announced_s < self.horizon_s
            end_s = min(announced_s + model.notice_s, self.horizon_s)
            self.account.useful_chip_s += (end_s - now_s) * chips * speed
            yield now_s, end_s
            now_s = end_s + model.return_s + model.grow_s


def simulate(learners: Sequence[Learner], model: FailureModel, *, hours: float, seed: int) -> Outcome:
    """Run a fleet for `hours` of virtual time.

    Each learner draws from a stream named by the seed and its own name, so that the fate of one does not depend on who
    else is there. Memory: a few numbers per learner and per slice that is away.
    """
    horizon_s = hours * 3600
    if not 0 < horizon_s < math.inf:
        raise ConfigError(f"the simulated time must be above zero and finite, not {hours} h")
    if len({learner.name for learner in learners}) != len(learners) or not learners:
        raise ConfigError("a fleet needs learners, each with a name of its own")
    tracks = [
        # A string seeds by its SHA-512: the same on every machine, whatever PYTHONHASHSEED is.
        _Track(learner, model, horizon_s, random.Random(f"{seed}/{learner.name}/interruptions"))
        for learner in learners
    ]
    some_s = all_s = since_s = 0.0
    training = 0
    for at_s, change in heapq.merge(*(_changes(track) for track in tracks)):
        some_s += (at_s - since_s) * (training > 0)
        all_s += (at_s - since_s) * (training == len(tracks))
        since_s, training = at_s, training + change
    useful = [track.account.useful_chip_s for track in tracks]
    return Outcome(
        goodput=math.fsum(useful) / (sum(learner.chips for learner in learners) * horizon_s),
        uptime=some_s / horizon_s,
        uptime_of_all=all_s / horizon_s,
        interruptions=sum(track.account.interruptions for track in tracks),
        learners=tuple(u / (t.learner.chips * horizon_s) for u, t in zip(useful, tracks, strict=True)),
    )


def _changes(track: _Track) -> Iterator[tuple[float, int]]:
    """(time, +1 | -1): the learner starts or stops to train."""
    for start_s, end_s in track.spans():
        yield start_s, 1
        yield end_s, -1


def expected_goodput(learners: Sequence[Learner], model: FailureModel) -> float:
    """Goodput in the long run: exact for learners that cannot shrink, a close approximation for elastic ones."""
    useful = math.fsum(learner.chips * _expected_of_one(learner, model) for learner in learners)
    return useful / sum(learner.chips for learner in learners)


def _expected_of_one(learner: Learner, model: FailureModel) -> float:
    mtbi_s = model.mtbi_s if learner.mtbi_s is None else learner.mtbi_s
    num_slices = math.ceil(learner.chips / model.chips_per_slice)
    speed = model.lockstep_speed(num_slices)
    rate = learner.chips / mtbi_s
    if rate == 0:
        return speed
    runs_s = 1 / rate + model.notice_s  # running time from the end of one stop to the next interruption's stop
    if not learner.elastic:
        return speed * runs_s / (runs_s + model.return_s + model.grow_s)
    # The share u of time running solves u (1 + (shrink + grow s) / runs) = 1, where s is the share of returns that need
    # a stop of their own: those that fall into running time (u) outside of a notice (1 / (rate x runs)).
    b, a = 1 + model.shrink_s / runs_s, model.grow_s / (runs_s * rate * runs_s)
    running = 2 / (b + math.sqrt(b * b + 4 * a))
    # Each interruption takes one slice away for what is left of its return after the stop.
    away = max(0.0, model.return_s - model.shrink_s) * running * rate / num_slices
    return speed * running / (1 + away)
