"""When a process that ended is started again, and when a silent one counts as hung. Pure: time is an argument.

    Supervised   the restarts of one process group (an island's ranks, the syncer)
    Pulse        its signs of life

Theory: the first restart comes at once, each further one in a row waits twice as long as the one before. A start has
come to something when something of the process was merged after it; that ends the row. What would only fail again
is not tried: a wrong configuration, or the process's own error before it has ever taken part.
Owns: the policy. Must not start, end or look at a process: run.groups does. Called by: run.groups, run.launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diloco_cli.errors import EXIT_CONFIG, DilocoError

MAX_BACKOFF_S = 30.0
# A watcher that was itself stopped for a while must not take its own pause for others' silence.
MAX_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a process group ended.

    Attributes:
        code: its exit code; negative: the signal.
        error: what went wrong; None after an orderly end.
        own: it said so itself, in its error file.
        again: its own error is one that may pass (a lost connection).
    """

    code: int
    error: DilocoError | None = None
    own: bool = False
    again: bool = False

    @property
    def reason(self) -> str:
        """In words, for the tape."""
        return self.error.what if self.error is not None else "its process ended"


class Supervised:
    """The restarts of one process group.

    Attributes:
        due_s: when it is to be started next; None: it runs, or is never started again.
        starts, restarts: how often it was started, ever, and how often again after an end.
        in_a_row: restarts since the last start that came to something.
        proven: it has taken part at some time, so that it can.
    """

    def __init__(self, max_restarts: int, backoff_s: float) -> None:
        self.due_s: float | None = 0.0
        self.starts = 0
        self.restarts = 0
        self.in_a_row = 0
        self.proven = False
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._hold_until_s = 0.0
        self._was_good = False

    def started(self) -> None:
        """It has been started."""
        self.due_s = None
        self.restarts += self.starts > 0
        self.starts += 1
        self._was_good = False

    def proved(self) -> None:
        """It takes part."""
        self.proven = True

    def good(self) -> None:
        """Something of it was merged since its start."""
        self.proven = self._was_good = True
        self.in_a_row = 0

    def hold(self, until_s: float) -> None:
        """It is not to be started again before this time."""
        self._hold_until_s = until_s

    def ended(self, now_s: float, end: End, *, asked: bool = False) -> bool:
        """It has ended; returns whether it will be started again, at `due_s`. asked: somebody wanted it to end."""
        if asked:
            delay_s = 0.0
        elif self._is_hopeless(end) or self.in_a_row >= self._max_restarts:
            self.due_s = None
            return False
        else:
            delay_s = 0.0 if self.in_a_row == 0 else min(self._backoff_s * 2.0 ** (self.in_a_row - 1), MAX_BACKOFF_S)
            self.in_a_row += 1
        self.due_s = max(now_s + delay_s, self._hold_until_s)
        return True

    def retire(self) -> None:
        """It is never started again."""
        self.due_s = None

    def _is_hopeless(self, end: End) -> bool:
        """Whether it would fail again in the same way."""
        return end.own and (end.code == EXIT_CONFIG or (not end.again and not self.proven))


class Pulse:
    """The signs of life of one group: how long each of its processes has been silent.

    Silence is counted on the watcher's clock, from one look to the next, so that neither a clock that is set nor a
    pause of the watcher makes anybody look hung.
    """

    def __init__(self, timeout_s: float, start_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._looked_s = 0.0
        self._marks: dict[str, int | None] = {}
        self._silent_s: dict[str, float] = {}

    def started(self, now_s: float) -> None:
        """The group is a new one."""
        self._looked_s = now_s
        self._marks = {}
        self._silent_s = {}

    def look(self, now_s: float, marks: Mapping[str, int | None]) -> str:
        """Why the group counts as hung; empty if it does not.

        Args:
            marks: process -> something that changes with every beat (its file's time); None before the first.
        """
        passed_s = min(now_s - self._looked_s, MAX_LOOK_S, self._timeout_s / 4)
        self._looked_s = now_s
        for process, mark in marks.items():
            changed = mark != self._marks.get(process)
            self._marks[process] = mark
            silent_s = 0.0 if changed else self._silent_s.get(process, 0.0) + passed_s
            self._silent_s[process] = silent_s
            if mark is not None and silent_s > self._timeout_s:
                return f"{process}: no sign of life for {self._timeout_s:g} s"
            if mark is None and silent_s > self._start_timeout_s:
                return f"{process}: not up within {self._start_timeout_s:g} s"
        return ""
