"""What each island does when, for pictures: a lane of states per island, and the merges.

Owns: recording states as transitions, in bounded memory however long the simulated run. The drivers (sim.world,
sim.baselines) say when a state begins; recording changes nothing of what happens.

Two resolutions. *Fine* lanes hold every transition of the first `fine_s` seconds: steps and waits. *Coarse* lanes hold
the whole run, in which an island trains, is down, rejoins, or is done. Called by: sim.plot.
"""

from __future__ import annotations

import math

COMPUTING, WAITING, DOWN, REJOINING, DONE = "computing", "waiting", "down", "rejoining", "done"
STATES = (COMPUTING, WAITING, DOWN, REJOINING, DONE)
MAX_TRANSITIONS = 20_000
"""Of one lane; what comes after them is left out, and the lane ends there."""

Interval = tuple[str, float, float]
"""State, from, until; in seconds."""


class Timeline:
    """Recorder of one simulated run.

    Args:
        fine_s: length of the part that is recorded in detail.
    """

    def __init__(self, fine_s: float) -> None:
        self.fine_s = fine_s
        self.merges: list[tuple[float, int]] = []
        """Time and fragment of each merge within fine_s."""
        self._fine: dict[str, list[tuple[float, str]]] = {}
        self._coarse: dict[str, list[tuple[float, str]]] = {}

    def begin(self, lane: str, state: str, time_s: float) -> None:
        """From now on the island is in this state. Times of one lane only grow."""
        if time_s <= self.fine_s:
            _append(self._fine.setdefault(lane, []), time_s, state)
        _append(self._coarse.setdefault(lane, []), time_s, COMPUTING if state == WAITING else state)

    def merge(self, time_s: float, fragment: int) -> None:
        """A merge was decided."""
        if time_s <= self.fine_s and len(self.merges) < MAX_TRANSITIONS:
            self.merges.append((time_s, fragment))

    def fine(self, end_s: float) -> dict[str, list[Interval]]:
        """Intervals of each lane up to fine_s, or the run's end if that is sooner; they cover it without overlap."""
        return {lane: _intervals(moves, min(end_s, self.fine_s)) for lane, moves in sorted(self._fine.items())}

    def coarse(self, end_s: float) -> dict[str, list[Interval]]:
        """Intervals of each lane over the whole run."""
        return {lane: _intervals(moves, end_s) for lane, moves in sorted(self._coarse.items())}


def _append(moves: list[tuple[float, str]], time_s: float, state: str) -> None:
    if moves and moves[-1][0] == time_s:
        moves.pop()  # a state without any time in it
    if (not moves or moves[-1][1] != state) and len(moves) < MAX_TRANSITIONS:
        assert not moves or moves[-1][0] < time_s, (moves[-1], time_s)
        moves.append((time_s, state))


def _intervals(moves: list[tuple[float, str]], end_s: float) -> list[Interval]:
    ends = [time_s for time_s, _ in moves[1:]] + [end_s if len(moves) < MAX_TRANSITIONS else math.nan]
    pairs = zip(moves, ends, strict=True)
    return [(state, begin_s, min(until_s, end_s)) for (begin_s, state), until_s in pairs if begin_s < until_s]
