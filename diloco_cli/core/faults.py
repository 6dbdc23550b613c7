"""Failures on purpose as seeded data: drawn before a run, stored with it, applied by whoever drives the run.

Owns: what a fault is, how random ones are drawn, and which are due. Must not apply one: run.injector does it to
processes and links, sim.world to virtual ones. Chance comes in as stream objects.

Theory of draw(): each island has a stream of its own, and each fault takes the same number of draws from it whatever
its kind: time, length, kind, detail. So another island, or another kind in the list, moves no time that was drawn.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diloco_cli.errors import ConfigError

CRASH, HANG, SLOW, PARTITION, DEGRADE, PREEMPT, CORRUPT, DISK_FULL = (
    "crash",
    "hang",
    "slow",
    "partition",
    "degrade",
    "preempt",
    "corrupt",
    "disk-full",
)
KINDS = (CRASH, HANG, SLOW, PARTITION, DEGRADE, PREEMPT, CORRUPT, DISK_FULL)
SYNCER = "syncer"

EXPONENTIAL, WEIBULL, FIXED = "exponential", "weibull", "fixed"
WEIBULL_SHAPE = 0.7
"""Below 1: short times and long ones are more frequent than those between, so that failures come in bursts."""
RANDOM_LOSS = 0.1
"""What a random degrade does to a link."""
DEFAULT_DURATION_S = 5.0
"""Of what ends by itself, where nothing was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong on purpose.

    Attributes:
        kind: crash (SIGKILL), hang (SIGSTOP), slow (runs at `factor` of its speed), partition (its link lets nothing
            through), degrade (its link is worse), preempt (leaves in order and comes back after `duration_s`), corrupt
            (its next contribution is bad), disk-full (its processes can write nothing).
        target: an island's name, or "syncer".
        at_s: seconds since the run started; None: see at_step.
        at_step: step of the foremost learner; None: see at_s. Exactly one of the two is given.
        duration_s: how long it lasts; None: until whoever supervises the target has repaired it (crash, hang).
        rank: crash, hang, slow: this rank of the island only; None: all.
        factor: slow: the speed that is left, in (0, 1).
        rate_bps, latency_s, loss: degrade: what the link is meanwhile, both directions; None: as before.
        payload: corrupt: "nan" or "bytes".
    """

    kind: str
    target: str
    at_s: float | None = None
    at_step: int | None = None
    duration_s: float | None = None
    rank: int | None = None
    factor: float = 0.5
    rate_bps: float | None = None
    latency_s: float | None = None
    loss: float = 0.0
    payload: str = "nan"


class Stream(Protocol):
    """What is needed of random.Random."""

    def random(self) -> float:
        """Uniform in [0, 1)."""

    def expovariate(self, lambd: float) -> float:
        """Exponential with mean 1 / lambd."""

    def weibullvariate(self, alpha: float, beta: float) -> float:
        """Weibull with scale alpha and shape beta."""


def ordered(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """By time, then those by step; at the same moment as they were given."""
    return tuple(sorted(faults, key=lambda f: (f.at_s is None, f.at_s or 0.0, f.at_step or 0)))


def draw(
    islands: Sequence[str],
    stream: Callable[[str], Stream],
    *,
    mean_time_between_s: float,
    repair_time_s: float,
    distribution: str = EXPONENTIAL,
    kinds: Sequence[str] = (CRASH,),
    horizon_s: float,
) -> tuple[Fault, ...]:
    """Random faults of each island until the horizon, in order. An island's next one comes after the end of the last.

    Args:
        stream: an island's own chance.
        mean_time_between_s: from the end of one to the next, above zero; repair_time_s: mean length.
        kinds: equally likely.
    """
    return ordered(
        fault
        for island in islands
        for fault in _draw_for(
            island, stream(island), mean_time_between_s, repair_time_s, distribution, kinds, horizon_s
        )
    )


def _draw_for(
    island: str,
    stream: Stream,
    between_s: float,
    repair_s: float,
    distribution: str,
    kinds: Sequence[str],
    horizon_s: float,
) -> Iterable[Fault]:
    now_s = 0.0
    while True:
        at_s = now_s + _time_s(stream, between_s, distribution)
        lasts_s = _time_s(stream, repair_s, distribution)
        kind = kinds[int(stream.random() * len(kinds))]
        detail = stream.random()
        if at_s >= horizon_s:
            return
        # Milliseconds: what is printed is what is meant.
        yield Fault(
            kind=kind,
            target=island,
            at_s=round(at_s, 3),
            duration_s=None if kind == CORRUPT else max(0.001, round(lasts_s, 3)),
            loss=RANDOM_LOSS if kind == DEGRADE else 0.0,
            payload="bytes" if kind == CORRUPT and detail >= 0.5 else "nan",
        )
        now_s = at_s + lasts_s


def _time_s(stream: Stream, mean_s: float, distribution: str) -> float:
    if distribution == FIXED:
        return mean_s
    if distribution == WEIBULL:
        return stream.weibullvariate(mean_s / math.gamma(1.0 + 1.0 / WEIBULL_SHAPE), WEIBULL_SHAPE)
    assert distribution == EXPONENTIAL
    return mean_s * stream.expovariate(1.0)


# ---- a plan as a file, and in words ---------------------------------------------------------------


def to_json(plan: Iterable[Fault]) -> list[dict[str, Any]]:
    """What differs from the defaults, one dictionary per fault."""
    return [
        {f.name: v for f in dataclasses.fields(fault) if (v := getattr(fault, f.name)) != f.default} for fault in plan
    ]


def from_json(items: Sequence[Mapping[str, Any]]) -> tuple[Fault, ...]:
    """The inverse of to_json.

    Raises:
        ConfigError: this is no plan.
    """
    plan = []
    for i, item in enumerate(items):
        try:
            fault = Fault(**item)
        except TypeError as error:
            raise ConfigError(f"fault {i} of the plan cannot be read", why=str(error)) from error
        if fault.kind not in KINDS or (fault.at_s is None) == (fault.at_step is None):
            raise ConfigError(f"fault {i} of the plan cannot be read", why="its kind or its moment is unknown")
        plan.append(fault)
    return tuple(plan)


def describe(fault: Fault) -> str:
    """One line, as in "at 30 s: island-1 rank 0 crash"."""
    when = f"step {fault.at_step}" if fault.at_s is None else f"{_number(fault.at_s)} s"
    who = fault.target if fault.rank is None else f"{fault.target} rank {fault.rank}"
    lasts = "" if fault.duration_s is None else f" for {_number(fault.duration_s)} s"
    return f"at {when}: {who} {fault.kind}{_details(fault)}{lasts}"


def _details(fault: Fault) -> str:
    if fault.kind == SLOW:
        return f" to {fault.factor:.4g} of its speed"
    if fault.kind == CORRUPT:
        return f" ({fault.payload})"
    if fault.kind != DEGRADE:
        return ""
    parts = []
    if fault.rate_bps is not None:
        parts.append(f"{fault.rate_bps / 1e6:.4g} Mbit/s")
    if fault.latency_s is not None:
        parts.append(f"{fault.latency_s * 1e3:.4g} ms")
    if fault.loss:
        parts.append(f"{fault.loss:.4g} lost")
    return f" ({', '.join(parts)})"


def _number(value: float) -> str:
    """Up to milliseconds, without an exponent."""
    return f"{value:.3f}".rstrip("0").rstrip(".") if math.isfinite(value) else "ever"


class Due:
    """The faults of a plan that are still to come."""

    def __init__(self, plan: Iterable[Fault]) -> None:
        faults = ordered(plan)
        self._timed = deque(f for f in faults if f.at_s is not None)
        self._stepped = deque(f for f in faults if f.at_s is None)

    def take(self, now_s: float, step: int) -> tuple[Fault, ...]:
        """Those whose moment has come, each once.

        Args:
            now_s: seconds since the run started; step: of the foremost learner.
        """
        taken = []
        while self._timed and self._timed[0].at_s is not None and self._timed[0].at_s <= now_s:
            taken.append(self._timed.popleft())
        while (due := self.next_step) is not None and due <= step:
            taken.append(self._stepped.popleft())
        return tuple(taken)

    @property
    def next_s(self) -> float | None:
        """When the next one is due by time; None: there is none."""
        return self._timed[0].at_s if self._timed else None

    @property
    def next_step(self) -> int | None:
        """At which step the next one is due by step; None: there is none."""
        return self._stepped[0].at_step if self._stepped else None
