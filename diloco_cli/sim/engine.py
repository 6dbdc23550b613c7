"""Virtual time: a clock, events in a heap, and named streams of chance.

Owns: the order of events. Events at the same instant run by priority, then in the order in which they were asked for,
so that equal inputs give equal runs whatever the hash seed. Must not: know what events mean.
Called by: sim.world, sim.network, sim.baselines.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

# At one instant messages arrive first, then timers fire, then steps end: a message that arrives at the very moment of
# a step boundary is there for it.
ARRIVAL, TIMER, STEP = 0, 1, 2

_Event = tuple[float, int, int, Callable[..., None], tuple[Any, ...]]


class SimClock:
    """Seconds of virtual time. Only the engine moves it."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0


class Engine:
    """A heap of (time, priority, sequence) and the clock that follows it."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.num_events = 0
        self._heap: list[_Event] = []
        self._sequence = 0

    @property
    def now_s(self) -> float:
        """The current virtual time."""
        return self.clock.now_s

    def at(self, when_s: float, priority: int, action: Callable[..., None], *args: Any) -> None:
        """Run `action(*args)` at `when_s`, or now if that is past. There is no cancelling: actions check for themselves
        whether they still apply, and what they hold is freed when their time comes."""
        self._sequence += 1
        now_s = self.clock.now_s
        heapq.heappush(self._heap, (when_s if when_s > now_s else now_s, priority, self._sequence, action, args))

    def run(self, until: Callable[[], bool]) -> bool:
        """Run events until `until()`; False if there are no more of them before that."""
        heap, clock, pop = self._heap, self.clock, heapq.heappop
        while not until():
            if not heap:
                return False
            clock.now_s, _, _, action, args = pop(heap)
            self.num_events += 1
            action(*args)
        return True


class Streams:
    """A stream of random numbers per name, each independent of which others exist and of how much they are used.

    Strings seed random.Random through SHA-512, so streams do not depend on PYTHONHASHSEED or the machine.
    """

    def __init__(self, seed: int, trial: int = 0) -> None:
        self._root = f"{seed}/{trial}"
        self._streams: dict[str, random.Random] = {}

    def of(self, name: str) -> random.Random:
        """The stream called `name`, made when it is first asked for."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = random.Random(f"{self._root}/{name}")
        return stream
