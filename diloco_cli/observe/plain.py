"""Displays that need no terminal: timed lines, and nothing at all; and the interface that every display has.

Must not import rich. A display never raises into the run.
Called by: observe.dashboard (make_display; the live screen falls back to plain lines).
"""

from __future__ import annotations

from typing import Protocol, TextIO

from diloco_cli.observe import figures
from diloco_cli.observe.view import LogLine, RunSnapshot, RunView, clean

PROGRESS_S = 5.0
"""Seconds between two progress lines in plain mode."""


class Display(Protocol):
    """What the launcher talks to. No method raises; stop() may be called at any time, and again."""

    def start(self, view: RunView) -> None:
        """Begin to show."""

    def update(self, view: RunView, now_s: float) -> None:
        """Show the state at `now_s` (on the clock of the records' `time`). Call a few times a second."""

    def message(self, text: str) -> None:
        """Something the user should read."""

    def stop(self) -> None:
        """Leave the terminal as it was found."""


class Quiet:
    """Shows nothing."""

    def start(self, view: RunView) -> None:
        """Nothing."""

    def update(self, view: RunView, now_s: float) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class PlainLines:
    """Timed lines for pipes, files and dumb terminals: one per event, and one of progress every few seconds."""

    def __init__(self, stream: TextIO, interval_s: float = PROGRESS_S) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._printed = 0
        self._next_progress_s: float | None = None
        self._now_s = 0.0
        self._view: RunView | None = None
        self._held: list[LogLine] = []
        self._ended = False

    def start(self, view: RunView) -> None:
        """Begin to show."""
        self._view = view

    def skip_to(self, snapshot: RunSnapshot) -> None:
        """Treat what the log holds now as already told."""
        self._printed = max((line.number for line in snapshot.log), default=0)

    def update(self, view: RunView, now_s: float) -> None:
        """Print new events, and progress when it is due."""
        try:
            self._view, self._now_s = view, now_s
            self._tell(view.snapshot(now_s), last=False)
        except Exception as error:
            self._write(f"the display failed ({type(error).__name__}: {clean(error)}); the run goes on")

    def _tell(self, snapshot: RunSnapshot, *, last: bool) -> None:
        """One line per new event. Alike ones wait for the next progress line and come once, counted."""
        for line in snapshot.log:
            if line.number <= self._printed:
                continue
            self._held = [held for held in self._held if (held.event, held.text) != (line.event, line.text)]
            if line.count == 1 and not line.routine:
                self._event(line)
            elif not line.routine:
                self._held.append(line)
        self._printed = max((line.number for line in snapshot.log), default=self._printed)
        if self._next_progress_s is None:
            self._next_progress_s = snapshot.now_s + min(1.0, self._interval_s)
        if last or snapshot.now_s >= self._next_progress_s:
            self._next_progress_s = snapshot.now_s + self._interval_s
            for line in self._held:
                self._event(line)
            self._held.clear()
            self._line(snapshot.now_s, _progress_words(snapshot))

    def _event(self, line: LogLine) -> None:
        times = f" (x{line.count})" if line.count > 1 else ""
        self._line(line.time, f"{line.event}: {line.text}{times}" if line.text else line.event)

    def message(self, text: str) -> None:
        """Print a line at the time of the last update."""
        for part in text.splitlines():
            self._line(self._now_s, clean(part, 2000))

    def stop(self) -> None:
        """Print what was held back and a last line of progress."""
        if self._ended or self._view is None:
            return
        self._ended = True
        try:
            self._tell(self._view.snapshot(self._now_s), last=True)
        except Exception as error:
            self._write(f"the display failed ({type(error).__name__}: {clean(error)})")

    def _line(self, time_s: float, text: str) -> None:
        self._write(f"{time_s:9.1f}s  {text}")

    def _write(self, text: str) -> None:
        try:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError, LookupError):  # the reader of the pipe is gone, or the stream is closed
            pass


def _progress_words(snapshot: RunSnapshot) -> str:
    """`progress key=value ...`, with what is known; numbers plain, units in the names."""
    counts = snapshot.counts()
    syncer = snapshot.syncer
    validation = snapshot.validation[-1][1] if snapshot.validation else None
    target = f"/{snapshot.target_steps}" if snapshot.target_steps else ""
    pairs: list[tuple[str, str | None]] = [
        ("step", f"{snapshot.step}{target}"),
        ("percent", None if snapshot.progress is None else f"{100 * snapshot.progress:.0f}"),
        *((state.replace(" ", "_"), str(count)) for state, count in counts.items()),
        ("loss", None if snapshot.loss is None else figures.loss(snapshot.loss)),
        ("validation", None if validation is None else figures.loss(validation)),
        ("tokens", str(snapshot.tokens)),
        ("tokens_per_s", None if snapshot.tokens_per_s is None else f"{snapshot.tokens_per_s:.0f}"),
        ("merges", str(syncer.merges)),
        ("late", str(syncer.late) if syncer.late else None),
        ("refused", str(syncer.refused) if syncer.refused else None),
        ("quorum_time_s", None if syncer.quorum_time_s is None else f"{syncer.quorum_time_s:.3f}"),
        ("goodput", None if snapshot.goodput is None else f"{snapshot.goodput:.3f}"),
        ("eta", None if snapshot.eta_s is None else figures.clock(snapshot.eta_s)),
        ("restarts", str(snapshot.restarts) if snapshot.restarts else None),
        ("syncer", "down" if snapshot.syncer_down else None),
        ("waiting_for_quorum", f"{snapshot.live}/{snapshot.quorum}" if snapshot.quorum_lost else None),
    ]
    return "progress " + " ".join(f"{key}={value}" for key, value in pairs if value is not None)
