"""The screen of a run: drawing a snapshot, the drivers that put it on a terminal, and the summary at the end.

Owns: layout, colours, the terminal's state while the live screen is up. Reads only observe.view's snapshots.
Three drivers with one interface, chosen by make_display:

    LiveScreen   a terminal: full-window display on the alternate screen, redrawn by the caller's update()
    PlainLines   anything else: timed lines, no cursor movement, no colour
    Quiet        nothing

A driver never raises into the run: an error while drawing ends the live screen, is told once, and plain lines go on.
Nothing drawn is wider or higher than the window, whatever the records held; text from outside is text, never markup.
Called by: run's launcher, cli (status, watch).
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from diloco_cli.observe import figures
from diloco_cli.observe.chart import BAND, DIM, MEAN, VALIDATION, Line, chart
from diloco_cli.observe.plain import Display, PlainLines, Quiet
from diloco_cli.observe.summary import next_commands as next_commands_for
from diloco_cli.observe.summary import summary_rows
from diloco_cli.observe.view import ATTENTION, IslandSnapshot, LogLine, RunSnapshot, RunView, clean

__all__ = [
    "Display",
    "Frame",
    "LiveScreen",
    "PlainLines",
    "Quiet",
    "RunView",
    "make_display",
    "render",
    "render_summary",
]

REFRESH_S = 0.2
"""The live screen draws at most this often, however often it is told to."""


# Words carry the meaning, colours only help; blue, yellow and bold red stay apart for colour-blind eyes.
_STATE_LOOKS = {
    "training": ("●", "cyan"),
    "waiting": ("◐", "yellow"),
    "starting": ("○", "bright_black"),
    "finished": ("✓", "blue"),
    "gone": ("✗", "bold red"),
    "given up": ("✗", "bold red"),
    "restarting": ("↻", "yellow"),
    "unhealthy": ("!", "bold red"),
    "left": ("–", "bright_black"),
}
_STANDS_STILL = ("gone", "given up", "left")
_LEVEL_STYLES = {"good": "cyan", "info": "", "warn": "yellow", "bad": "bold red"}


# ---- lines, boxes, columns ----------------------------------------------------------------------


@lru_cache(maxsize=512)
def _style(definition: str) -> Style:
    return Style.parse(definition) if definition else Style.null()


def _width(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def _fit(line: Line, width: int) -> Line:
    """The line cut (with an ellipsis) or padded to exactly `width` cells."""
    if width <= 0:
        return []
    out: Line = []
    left = width
    for index, (text, style) in enumerate(line):
        cells = cell_len(text)
        if cells > left or (cells == left and any(t for t, _ in line[index + 1 :])):
            out.append((_cut(text, left), style))
            return out
        out.append((text, style))
        left -= cells
    if left:
        out.append((" " * left, ""))
    return out


def _cut(text: str, width: int) -> str:
    """`text` in exactly `width` cells, ended by an ellipsis where something is missing."""
    if width <= 0:
        return ""
    return set_cell_size(text, width - 1) + "…"


def _pad(text: str, width: int, right: bool = False) -> str:
    cells = cell_len(text)
    if cells > width:
        return _cut(text, width)
    blank = " " * (width - cells)
    return blank + text if right else text + blank


def _box(title: Line, body: list[Line], width: int, height: int) -> list[Line]:
    """`body` in a frame of exactly width x height, the title in its upper edge."""
    inner = width - 2
    shown = _fit([(" ", ""), *title, (" ", "")], min(_width(title) + 2, max(0, inner - 2))) if inner > 6 else []
    top = [("╭─", DIM), *shown, ("─" * (inner - 1 - _width(shown)) + "╮", DIM)]
    rows = [*body[: height - 2], *([[]] * (height - 2 - len(body)))]
    middle = [[("│", DIM), *_fit(row, inner), ("│", DIM)] for row in rows]
    return [top, *middle, [("╰" + "─" * inner + "╯", DIM)]]


def _beside(left: list[Line], right: list[Line]) -> list[Line]:
    return [[*a, *b] for a, b in zip(left, right, strict=True)]


class Frame:
    """Exactly `height` lines of exactly `width` cells, as a rich renderable that no console reflows."""

    def __init__(self, lines: Sequence[Line], width: int, height: int) -> None:
        rows = [*lines[:height], *([[]] * (height - len(lines)))]
        self.lines: list[Line] = [_fit(row, width) for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = options.ascii_only
        for index, line in enumerate(self.lines):
            if index:
                yield Segment.line()
            for text, style in line:
                yield Segment(_ascii(text) if ascii_only else text, _style(style))

    @property
    def plain(self) -> str:
        """The text alone."""
        return "\n".join("".join(text for text, _ in line) for line in self.lines)


_ASCII = {
    **dict.fromkeys(map(ord, "╭╮╰╯┤└┬"), "+"), **dict.fromkeys(map(ord, "─━"), "-"), ord("╸"): "-", ord("│"): "|",
    ord("●"): "*", ord("◐"): "~", ord("○"): "o", ord("✓"): "v", ord("✗"): "x", ord("…"): "~", ord("·"): "-",
    ord("–"): "-", ord("◆"): "V", ord("∞"): "-", ord("→"): ">", ord("±"): "~", ord("×"): "x", ord("↻"): "r",
    0x2800: " ",
}  # fmt: skip


def _ascii(text: str) -> str:
    """For terminals without UTF-8: a stand-in of the same width for each of our own signs, ? for the rest."""
    if text.isascii():
        return text
    out = []
    for char in text.translate(_ASCII):
        if char.isascii():
            out.append(char)
        else:
            out.append("*" if 0x2800 < ord(char) < 0x2900 else "?" * cell_len(char))
    return "".join(out)


# ---- the parts of the screen --------------------------------------------------------------------


def render(snapshot: RunSnapshot, width: int, height: int) -> Frame:
    """The whole screen, exactly width x height cells."""
    width, height = max(1, width), max(1, height)
    if height < 10 or width < 44:
        lines = _tiny(snapshot, width, height)
    elif width >= 150 and height >= 28:
        lines = _wide(snapshot, width, height)
    else:
        lines = _tall(snapshot, width, height)
    return Frame(lines, width, height)


def _tiny(snapshot: RunSnapshot, width: int, height: int) -> list[Line]:
    """No frames: progress, losses, islands, and the last events in what remains."""
    lines = [_progress_line(snapshot, width)]
    if height >= 3:
        lines.append(_facts_line(snapshot, width))
    rows = max(0, height - len(lines) - (1 if height >= 5 else 0))
    lines += _island_rows(snapshot, width, rows, heading=rows > 4)
    lines += _log_lines(snapshot.log, width, height - len(lines))
    return lines


def _tall(snapshot: RunSnapshot, width: int, height: int) -> list[Line]:
    """Header, islands over the full width, curve beside syncer, events. Rows go first to the islands."""
    header = _header(snapshot, width, height)
    left = height - len(header)
    events_min = 4 if height < 20 else 5
    crowded = len(snapshot.islands) + 3 > left - events_min - 8 and height < 32
    curve_min = 0 if height < 20 or crowded else 8
    table = min(len(snapshot.islands) + 3, max(6, left - events_min - max(1, curve_min)))
    left -= table
    curve = 0 if left < events_min + 7 else min(left - events_min, max(8, round(left * 0.62)))
    lines = [*header, *_islands_box(snapshot, width, table)]
    if curve:
        side = min(46, max(32, round(width * 0.36)))
        lines += _beside(_curve_box(snapshot, width - side, curve), _syncer_box(snapshot, side, curve))
        left -= curve
    elif left >= 4 + 1:
        lines.append(_syncer_line(snapshot))
        left -= 1
    return [*lines, *_log_box(snapshot, width, left)] if left >= 3 else lines


def _wide(snapshot: RunSnapshot, width: int, height: int) -> list[Line]:
    """Header, islands, then the curve on the left and syncer over events on the right."""
    header = _header(snapshot, width, height)
    left = height - len(header)
    table = min(len(snapshot.islands) + 3, max(6, round(left * 0.6)))
    left -= table
    side = min(84, round(width * 0.42))
    syncer = min(12, left - 4) if left >= 12 else 0
    right = (_syncer_box(snapshot, side, syncer) if syncer else []) + _log_box(snapshot, side, left - syncer)
    return [
        *header,
        *_islands_box(snapshot, width, table),
        *_beside(_curve_box(snapshot, width - side, left), right),
    ]


def _header(snapshot: RunSnapshot, width: int, height: int) -> list[Line]:
    room = max(12, width // 4)
    name = snapshot.name if cell_len(snapshot.name) <= room else _cut(snapshot.name, room)
    title: Line = [(" diloco ", "bold reverse"), (f" {name} ", "bold")]
    if snapshot.algorithm and width >= 70:
        title.append((f"· {snapshot.algorithm} ", DIM))
    title.append(("· ", DIM))
    title += _state_words(snapshot)
    right: Line = [(f" {figures.clock(snapshot.now_s)}{' elapsed' if width >= 70 else ''} ", "")]
    gap = width - _width(right)
    lines = [[*_fit(title, gap), *right] if gap > 20 else title]
    lines.append(_progress_line(snapshot, width))
    if height >= 16:
        lines.append(_facts_line(snapshot, width))
    return lines


def _state_words(snapshot: RunSnapshot) -> Line:
    """What the run is doing: its end, a lost quorum, or how many islands are in which state."""
    if snapshot.status is not None:
        style = "bold cyan" if snapshot.status == "completed" else "bold red"
        reason = f": {snapshot.status_reason}" if snapshot.status_reason else ""
        return [(f"{snapshot.status}{reason}", style)]
    line: Line = []
    if snapshot.quorum_lost:
        line = [(f"waiting for quorum {snapshot.live}/{snapshot.quorum}", "bold red")]
    if snapshot.syncer_down:
        state = "given up" if snapshot.syncer_down.startswith("given up") else "restarting"
        line += [(", " if line else "", DIM), (f"syncer {state}", "bold red")]
    if snapshot.quorum_lost:
        return line
    for state, count in snapshot.counts().items():
        line += [(", " if line else "", DIM), (f"{count} {state}", _STATE_LOOKS[state][1])]
    return line or [("starting", DIM)]


def _progress_line(snapshot: RunSnapshot, width: int) -> Line:
    """Bar, share, step, speed and the time that is left."""
    target = f"/{figures.steps(snapshot.target_steps)}" if snapshot.target_steps else ""
    words = f" step {figures.steps(snapshot.step)}{target}"
    if snapshot.progress is not None:
        words = f" {math.floor(100 * snapshot.progress):>3}%" + words
    tail = f"  ETA {figures.clock(snapshot.eta_s)}" if snapshot.status is None else ""
    speed = f"  {figures.count(snapshot.tokens_per_s)} tok/s" if snapshot.tokens_per_s is not None else ""
    bar = width - 2 - len(words) - len(tail) - len(speed)
    if bar < 10 and speed:
        bar, speed = bar + len(speed), ""
    line: Line = [(" ", "")]
    if bar >= 6 and snapshot.progress is not None:
        line += _bar(snapshot.progress, min(bar, 120))
    return [*line, (words, "bold"), (speed, ""), (tail, "cyan")]


def _bar(share: float, width: int) -> Line:
    halves = round(2 * width * min(1.0, max(0.0, share)))
    full, half = divmod(halves, 2)
    done = "━" * full + ("╸" if half else "")
    return [(done, "cyan"), ("─" * (width - len(done)), DIM)]


def _facts_line(snapshot: RunSnapshot, width: int) -> Line:
    """Loss, validation against the bigram model, goodput, uptime, tokens: as many as fit."""
    validation = snapshot.validation[-1][1] if snapshot.validation else None
    bigram = (
        f" (bigram {figures.loss(snapshot.bigram)})" if snapshot.bigram is not None and validation is not None else ""
    )
    facts = [
        ("loss", figures.loss(snapshot.loss)),
        ("validation", figures.loss(validation) + bigram),
        ("goodput", figures.percent(snapshot.goodput)),
        ("uptime", figures.percent(snapshot.uptime)),
        ("tokens", figures.count(snapshot.tokens)),
    ]
    line: Line = []
    for label, value in facts:
        if value == "–" and width < 100:
            continue
        part: Line = [("  " if line else " ", ""), (f"{label} ", DIM), (value, "")]
        if _width(line) + _width(part) > width:
            break
        line += part
    return line


# ---- islands ----

# Title, width, aligned right, narrowest inner width of the table at which the column is shown.
_COLUMNS: tuple[tuple[str, int, bool, int], ...] = (
    ("island", 10, False, 0),
    ("state", 10, False, 0),
    ("step", 6, True, 0),
    ("tok/s", 6, True, 36),
    ("loss", 6, True, 43),
    ("up bit/s", 9, True, 74),
    ("down bit/s", 10, True, 74),
    ("age", 4, True, 54),
    ("last merge", 10, True, 90),
    ("merge", 6, True, 48),
    ("late", 5, True, 104),
    ("refused", 7, True, 104),
    ("step time", 9, True, 118),
    ("tokens", 7, True, 128),
    ("restarts", 8, True, 138),
    ("time goes to", 30, False, 165),
)


def _columns(inner: int, names: Iterable[str]) -> list[tuple[str, int, bool]]:
    chosen = [(title, size, right) for title, size, right, at in _COLUMNS if inner >= at]
    if inner >= 90:
        chosen = [column for column in chosen if column[0] != "merge"]
    spare = max(0, inner - 1 - sum(size + 1 for _, size, _ in chosen))
    longest = max((cell_len(name) for name in names), default=0)
    name_width = 10 + min(spare, max(0, longest - 10), 18)
    # What is still free makes the gaps wider, evenly.
    wider = min(4, (spare - (name_width - 10)) // max(1, len(chosen) - 1))
    return [(title, name_width if title == "island" else size + wider, right) for title, size, right in chosen]


def _cells(island: IslandSnapshot) -> dict[str, str]:
    fragment = island.last_merge_fragment
    merge = figures.ago(island.last_merge_age_s)
    return {
        "step": figures.steps(island.step),
        "tok/s": figures.count(island.tokens_per_s),
        "loss": figures.loss(island.loss),
        "up bit/s": figures.rate(island.link_up_bps, island.link_up_max_bps),
        "down bit/s": figures.rate(island.link_down_bps, island.link_down_max_bps),
        "age": "–" if island.staleness_steps is None else figures.steps(island.staleness_steps),
        "last merge": merge if fragment is None else f"{merge} f{fragment}",
        "merge": merge,
        "late": str(island.late) if island.late else "–",
        "refused": str(island.refused) if island.refused else "–",
        "restarts": str(island.restarts) if island.restarts else "–",
        "step time": figures.span(island.step_time_s),
        "tokens": figures.count(island.tokens) if island.tokens else "–",
        "time goes to": _phases(island.phases),
    }


def _phases(phases: Mapping[str, float]) -> str:
    total = math.fsum(value for value in phases.values() if value > 0)
    if total <= 0:
        return "–"
    parts = sorted(phases.items(), key=lambda item: -item[1])[:3]
    return " ".join(f"{name} {100 * value / total:.0f}%" for name, value in parts if value > 0)


def _island_line(island: IslandSnapshot, columns: Sequence[tuple[str, int, bool]], now_s: float, width: int) -> Line:
    sign, style = _STATE_LOOKS.get(island.state, ("?", ""))
    state = "silent" if island.silent_s is not None else island.state
    style = "yellow" if island.silent_s is not None else style
    name_width, state_width = columns[0][1], columns[1][1]
    line: Line = [(" ", ""), (_pad(island.name, name_width), "bold"), (" ", "")]
    words = f"{sign} {state}"
    silent = island.silent_s is not None
    reason = f"no report for {figures.ago(island.silent_s)}" if silent else island.reason
    if island.state in _STANDS_STILL or silent or (reason and island.state not in ("training", "finished")):
        # Why it stands still is worth more than numbers that stand still.
        since = f", {figures.ago(max(0.0, now_s - island.since_s))} ago" if island.state in _STANDS_STILL else ""
        # A long word takes its cells from the step's column, so that the reasons begin below one another.
        state_cells = max(state_width, cell_len(words))
        step_width = max(len(figures.steps(island.step)), columns[2][1] + state_width - state_cells)
        line += [(_pad(words, state_cells), style), (" ", "")]
        line += [(_pad(figures.steps(island.step), step_width, right=True), DIM), (" ", "")]
        rest = max(0, width - _width(line) - cell_len(since) - 1)
        reason = reason if cell_len(reason) <= rest else _cut(reason, rest)
        return [*line, (reason, style), (since, DIM)]
    line += [(_pad(words, state_width), style), (" ", "")]
    cells = _cells(island)
    for title, size, right in columns[2:]:
        text = cells[title]
        line += [(_pad(text, size, right), DIM if text == "–" else ""), (" ", "")]
    return line


def _island_rows(snapshot: RunSnapshot, width: int, rows: int, heading: bool = True) -> list[Line]:
    """At most `rows` lines. Where not all fit, those in trouble come first and the rest is counted."""
    if rows <= 0:
        return []
    columns = _columns(width, (island.name for island in snapshot.islands))
    lines: list[Line] = []
    if heading:
        head: Line = [(" ", "")]
        for title, size, right in columns:
            head += [(_pad(title, size, right), DIM), (" ", "")]
        lines.append(head)
    room = rows - len(lines)
    islands = list(snapshot.islands)
    hidden: list[IslandSnapshot] = []
    if len(islands) > room:
        islands.sort(key=lambda island: (ATTENTION.get(island.state, 9), island.silent_s is None))
        islands, hidden = islands[: max(0, room - 1)], islands[max(0, room - 1) :]
    lines += [_island_line(island, columns, snapshot.now_s, width) for island in islands]
    if hidden and room > 0:
        lines.append(_hidden_line(hidden))
    return lines


def _hidden_line(hidden: Sequence[IslandSnapshot]) -> Line:
    states = [island.state for island in hidden]
    counted = [(state, states.count(state)) for state in ATTENTION if state in states]
    if len(counted) == 1:
        return [(f" … and {len(hidden)} more {counted[0][0]}", DIM)]
    line: Line = [(f" … and {len(hidden)} more: ", DIM)]
    for state, count in counted:
        line += [(", " if len(line) > 1 else "", DIM), (f"{count} {state}", _STATE_LOOKS[state][1])]
    return line


def _islands_box(snapshot: RunSnapshot, width: int, height: int) -> list[Line]:
    title: Line = [("islands", "bold")]
    if width >= 74:
        title.append(("  age: steps since its last merged fragment came in", DIM))
    return _box(title, _island_rows(snapshot, width - 2, height - 2), width, height)


# ---- syncer ----


def _syncer_box(snapshot: RunSnapshot, width: int, height: int) -> list[Line]:
    syncer = snapshot.syncer
    rate = f" ({figures.count(syncer.merges_per_s)}/s)" if syncer.merges_per_s is not None else ""
    last = f"{figures.ago(syncer.last_merge_age_s)} ago" if syncer.last_merge_age_s is not None else "none yet"
    members = f" from {syncer.last_learners} of {snapshot.live}" if syncer.last_learners is not None else ""
    versions, bars = _versions(syncer.versions, width - 2)
    rows: list[Line] = [
        _pair("merges", f"{syncer.merges}{rate}"),
        _pair("last", last + members),
        _pair("quorum", f"{figures.span(syncer.quorum_time_s)} ({snapshot.quorum} of {snapshot.live})"),
        _pair("grace", f"{figures.span(syncer.grace_time_s)}, merge {figures.span(syncer.merge_time_s)}"),
        *versions,
        *_fates(snapshot, width - 2),
        *bars,
    ]
    if snapshot.syncer_down:
        rows.insert(0, _pair("down", snapshot.syncer_down, "bold red"))
    if snapshot.snapshot is not None:
        age = figures.ago(max(0.0, snapshot.now_s - snapshot.snapshot.time_s))
        step = snapshot.snapshot.step
        rows.append(_pair("snapshot", f"{'step ' + str(step) if step is not None else 'taken'}, {age} ago"))
    if snapshot.faults or snapshot.restarts:
        faults, restarts = sum(snapshot.faults.values()), snapshot.restarts
        counted = f"{faults} fault{'' if faults == 1 else 's'}, {restarts} restart{'' if restarts == 1 else 's'}"
        rows.append(_pair("failures", counted))
    if not syncer.tokens and (syncer.late or syncer.refused):
        rows.append(_pair("lost", f"{syncer.late} late, {syncer.refused} refused"))
    return _box([("syncer", "bold")], rows, width, height)


def _pair(label: str, value: str, style: str = "") -> Line:
    return [(f" {label:<9}", DIM), (value, style)]


def _fates(snapshot: RunSnapshot, width: int) -> list[Line]:
    """Where the tokens went: merged, pending, late, refused, lost."""
    ledger = dict(snapshot.syncer.tokens)
    total = ledger.pop("processed", 0)
    if not ledger:
        return []
    order = ["merged", "pending", "late", "refused", "lost"]
    names = [name for name in order if name in ledger] + [name for name in ledger if name not in order]
    shown = [name for name in names if ledger[name] or name == "merged"]
    words = [f"{figures.share(ledger[name], total)} {name}" for name in shown]
    lines: list[Line] = []
    text = ""
    for word in words:
        piece = f", {word}" if text else word
        if text and cell_len(text + piece) > width - 11:
            lines.append(_pair("" if lines else "tokens", text + ","))
            text, piece = "", word
        text += piece
    return [*lines, _pair("" if lines else "tokens", text)]


_LEVELS = "▁▂▃▄▅▆▇█"


def _versions(versions: Sequence[int], width: int) -> tuple[list[Line], list[Line]]:
    """The versions in words, and one bar per fragment: the least merged ones are lowest."""
    if not versions:
        return [], []
    low, high = min(versions), max(versions)
    words = f"v{low}" if low == high else f"v{low} to v{high}"
    room = width - 10
    bars: list[Line] = []
    if 1 < len(versions) <= room:
        span = max(3, high - low)
        levels = "".join(_LEVELS[7 - round(7 * (high - version) / span)] for version in versions)
        bars = [_pair("spread", levels, "cyan")]
    return [_pair("versions", f"{words}, {len(versions)} fragments")], bars


def _syncer_line(snapshot: RunSnapshot) -> Line:
    """The syncer in one line, for low windows."""
    syncer = snapshot.syncer
    rate = f" ({figures.count(syncer.merges_per_s)}/s)" if syncer.merges_per_s is not None else ""
    return [
        (" merges ", DIM), (f"{syncer.merges}{rate}", ""),
        ("  quorum ", DIM), (figures.span(syncer.quorum_time_s), ""),
        ("  grace ", DIM), (figures.span(syncer.grace_time_s), ""),
    ]  # fmt: skip


# ---- events ----


def _log_lines(log: Sequence[LogLine], width: int, rows: int) -> list[Line]:
    shown = log[-rows:] if rows > 0 else ()
    return [_log_line(line) for line in shown]


def _log_line(line: LogLine) -> Line:
    style = _LEVEL_STYLES.get(line.level, "")
    times = f" (×{line.count})" if line.count > 1 else ""
    return [
        (f"{figures.clock(line.time):>7} ", DIM),
        (f"{_pad(line.event, 8)} ", style or "bold"),
        (line.text, style if line.level != "good" else ""),
        (times, DIM),
    ]


def _log_box(snapshot: RunSnapshot, width: int, height: int) -> list[Line]:
    return _box([("events", "bold")], _log_lines(snapshot.log, width, height - 2), width, height)


# ---- the loss curve ----


def _curve_box(snapshot: RunSnapshot, width: int, height: int) -> list[Line]:
    curves = [island.history for island in snapshot.islands if island.history]
    title: Line = [("loss", "bold")]
    if len(curves) > 1:
        title += [("  mean", MEAN), (" and ", DIM), ("range", BAND), (f" of {len(curves)}", DIM)]
    if snapshot.validation:
        title += [("  ◆ validation", VALIDATION)]
    return _box(title, chart(curves, snapshot.validation, width - 2, height - 2), width, height)


# ---- the summary at the end ---------------------------------------------------------------------


def render_summary(summary: Mapping[str, Any], next_commands: Sequence[str] | None = None) -> Text:
    """summary.json as a table for people. `.plain` is the same without colour; print with soft_wrap=True.

    Args:
        summary: keys as in spec/interface.md; what is null or missing is said to be not measured, or left out.
        next_commands: replaces the commands proposed at the end.
    """
    rows = list(summary_rows(summary))
    run_dir = summary.get("run_dir")
    commands = list(next_commands) if next_commands is not None else next_commands_for(summary)
    label_width = max((len(label) for label, _, _ in rows), default=0)
    text = Text()
    for label, value, style in rows:
        text.append(f"{label:<{label_width}}  ", "bold" if value else "")
        text.append(f"{value}\n", style)
    if run_dir:
        text.append(f"{'everything':<{label_width}}  ", "bold")
        text.append(f"{clean(run_dir, 4096)}\n")
    for index, command in enumerate(commands):
        text.append(f"{'next' if index == 0 else '':<{label_width}}  ", "bold")
        text.append(f"{clean(command, 4096)}\n", "cyan")
    text.rstrip()
    return text


# ---- drivers ------------------------------------------------------------------------------------


def make_display(*, quiet: bool = False, stream: TextIO | None = None, plain: bool = False) -> Display:
    """The display for `stream` (default: stderr): live on a terminal, plain lines elsewhere, nothing when quiet."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Quiet()
    # Not Console.is_terminal: FORCE_COLOR makes that true on a pipe.
    if plain or not _isatty(stream) or os.environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        return PlainLines(stream)
    return LiveScreen(stream)


def _isatty(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (ValueError, OSError, AttributeError):
        return False


class LiveScreen:
    """The full-window display. It lives on the terminal's alternate screen, so that a resize or a long run leaves
    nothing behind; what should stay readable is printed below the prompt when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, force_terminal=True, force_interactive=True, highlight=False, markup=False)
        self._live: Live | None = None
        self._plain: PlainLines | None = None
        self._view: RunView | None = None
        self._now_s = 0.0
        self._drawn_s: float | None = None
        self._size = (0, 0)
        self._messages: deque[str] = deque(maxlen=50)

    def start(self, view: RunView) -> None:
        """Take over the window."""
        self._view = view
        atexit.register(self._restore)
        try:
            self._fit_window()
            self._live = Live(
                Text(""),
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        except Exception as error:
            self._fall_back(error)
        self.update(view, self._now_s)

    def update(self, view: RunView, now_s: float) -> None:
        """Draw, unless the last frame is younger than REFRESH_S and the window kept its size."""
        self._view, self._now_s = view, now_s
        if self._plain is not None:
            self._plain.update(view, now_s)
            return
        if self._live is None:
            return
        try:
            size = self._fit_window()
            young = self._drawn_s is not None and 0 <= now_s - self._drawn_s < REFRESH_S
            if young and size == self._size:
                return
            self._drawn_s, self._size = now_s, size
            self._live.update(render(view.snapshot(now_s), *size), refresh=True)
        except Exception as error:
            self._fall_back(error)

    def _fit_window(self) -> tuple[int, int]:
        """The window's size now. Asked of the terminal itself: COLUMNS and LINES do not follow a resize."""
        try:
            width, height = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError, AttributeError):
            width, height = 80, 24
        width, height = (width or 80), (height or 24)
        self._console.size = ConsoleDimensions(width, height)
        return width, height

    def message(self, text: str) -> None:
        """Show a message among the events; it is printed again when the live screen ends."""
        if self._plain is not None:
            self._plain.message(text)
            return
        try:
            for part in text.splitlines():
                self._messages.append(clean(part, 2000))
                if self._view is not None:
                    self._view.note(part, time_s=self._now_s)
        except Exception as error:
            self._fall_back(error)

    def stop(self) -> None:
        """Give the window back and print what is worth keeping of the last frame."""
        if self._plain is not None:
            self._plain.stop()
            return
        if self._live is None:
            return
        self._restore()
        try:
            if self._view is not None:
                self._print_last(self._view.snapshot(self._now_s))
        except Exception as error:
            self._say_failed(error)

    def _print_last(self, snapshot: RunSnapshot) -> None:
        """State, progress, islands, and the warnings, errors and messages of the run."""
        width = min(self._console.size.width, 120)
        rows = _island_rows(snapshot, width, min(len(snapshot.islands) + 1, 13))
        title: Line = [(f" {snapshot.name} · ", "bold"), *_state_words(snapshot)]
        lines = [title, _progress_line(snapshot, width), _facts_line(snapshot, width), *rows]
        trouble = [line for line in snapshot.log if line.level in ("warn", "bad")][-10:]
        lines += [_log_line(line) for line in trouble]
        self._console.print(Frame(lines, width, len(lines)))
        for text in self._messages:
            self._console.print(Text(text), soft_wrap=True)

    def _restore(self) -> None:
        """Cursor and screen as they were; harmless when called again."""
        live, self._live = self._live, None
        if live is None:
            return
        atexit.unregister(self._restore)
        try:
            live.stop()
        except Exception:  # then at least say so to the terminal directly
            try:
                self._stream.write("\x1b[?1049l\x1b[?25h\x1b[0m")
                self._stream.flush()
            except (OSError, ValueError):
                pass

    def _fall_back(self, error: Exception) -> None:
        """The screen failed: give it back, say so once, go on in plain lines."""
        self._restore()
        if self._plain is None:
            self._plain = PlainLines(self._stream)
            self._say_failed(error)
            for text in self._messages:
                self._plain.message(text)
            if self._view is not None:
                self._plain.start(self._view)

    def _say_failed(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {clean(error)}"
        (self._plain or PlainLines(self._stream)).message(
            f"the live display failed ({why}); plain lines from here on, the run is not affected"
        )
