"""The loss curve as lines of text: a braille chart with axes, mean and range over the learners.

Pure: numbers in, styled text out. Knows nothing of runs and must not import rich.
Called by: observe.dashboard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from diloco_cli.observe import figures

Span = tuple[str, str]
"""Text (without line breaks) and a style in rich's words."""
Line = list[Span]

DIM = "bright_black"
BAND = "blue"
MEAN = "bold cyan"
VALIDATION = "bold yellow"

Curve = Sequence[tuple[float, float]]


def chart(curves: Sequence[Curve], marks: Curve, width: int, height: int) -> list[Line]:
    """Braille chart with axes: mean and range of the curves over the step, marks on top. Cells are 2 x 4 dots."""
    points = [point for curve in curves for point in curve]
    if not points or width < 16 or height < 4:
        text = "no loss yet" if not points else ""
        return [*([[]] * max(0, height // 2 - 1)), [(" " * max(0, (width - len(text)) // 2) + text, DIM)]]
    columns, rows = width - 8, height - 2
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    bands = _bands(curves, first, last, 2 * columns)
    low, high = _limits(bands, marks)
    if high - low < 1e-3 * max(1.0, abs(high)):
        middle = (low + high) / 2
        low, high = middle - 5e-4 * max(1.0, abs(middle)), middle + 5e-4 * max(1.0, abs(middle))
    grid = _Dots(columns, rows)
    scale = (4 * rows - 1) / (high - low)
    previous: int | None = None
    for column, band in enumerate(bands):
        if band is None:
            previous = None
            continue
        bottom, mean, top = (round((high - value) * scale) for value in band)
        for dot in range(max(0, top), bottom + 1):
            if (dot + column) % 2 == 0:
                grid.dot(column, dot, BAND)
        start, end = (mean, mean) if previous is None else sorted((previous, mean))
        for dot in range(max(0, start), end + 1):
            grid.dot(column, dot, MEAN)
        previous = mean
    for x, y in marks:
        place = 0.0 if last <= first else (min(max(x, first), last) - first) / (last - first)
        grid.mark(round(place * (columns - 1)), round((high - y) * scale) // 4, "◆", VALIDATION)
    return _with_axes(grid, low, high, first, last, width)


def _limits(bands: Sequence[tuple[float, float, float] | None], marks: Curve) -> tuple[float, float]:
    """Lowest and highest value shown. The steep first twentieth may leave the chart, or the rest would be flat."""
    known = [band for band in bands if band is not None]
    settled = known[len(known) // 20 :]
    low = min([band[0] for band in known] + [y for _, y in marks])
    return low, max([band[2] for band in settled] + [y for _, y in marks])


def _bands(curves: Sequence[Curve], first: float, last: float, columns: int) -> list[tuple[float, float, float] | None]:
    """(lowest, mean, highest) over the curves at each dot column; None where no curve reaches."""
    sampled = [_sample(curve, first, last, columns) for curve in curves]
    bands: list[tuple[float, float, float] | None] = []
    for column in range(columns):
        values = [value for samples in sampled if (value := samples[column]) is not None]
        bands.append((min(values), math.fsum(values) / len(values), max(values)) if values else None)
    return bands


def _sample(curve: Curve, first: float, last: float, columns: int) -> list[float | None]:
    """A curve at `columns` even places: the mean of the points that fall there, else between its neighbours."""
    out: list[float | None] = [None] * columns
    if not curve:
        return out
    scale = (columns - 1) / (last - first) if last > first else 0.0
    places: dict[int, list[float]] = {}
    for x, y in curve:
        places.setdefault(round((x - first) * scale), []).append(y)
    known = sorted((place, math.fsum(ys) / len(ys)) for place, ys in places.items())
    for (a, ya), (b, yb) in pairwise(known):
        for place in range(a, b):
            out[place] = ya + (yb - ya) * (place - a) / (b - a)
    out[known[-1][0]] = known[-1][1]
    return out


# Bits of the dots of a braille cell, by row then column.
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class _Dots:
    """A grid of braille cells. A cell has one style; where the mean passes, only the mean is drawn."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._bits: dict[tuple[int, int], dict[str, int]] = {}
        self._marks: dict[tuple[int, int], Span] = {}

    def dot(self, x: int, y: int, style: str) -> None:
        cell = (min(max(y, 0) // 4, self.rows - 1), min(max(x, 0) // 2, self.columns - 1))
        bits = self._bits.setdefault(cell, {})
        bits[style] = bits.get(style, 0) | _BRAILLE[y % 4][x % 2]

    def mark(self, column: int, row: int, sign: str, style: str) -> None:
        self._marks[(min(max(row, 0), self.rows - 1), min(max(column, 0), self.columns - 1))] = (sign, style)

    def line(self, row: int) -> Line:
        spans: Line = []
        for column in range(self.columns):
            text, style = self._cell((row, column))
            if spans and spans[-1][1] == style:
                spans[-1] = (spans[-1][0] + text, style)
            else:
                spans.append((text, style))
        return spans

    def _cell(self, cell: tuple[int, int]) -> Span:
        if cell in self._marks:
            return self._marks[cell]
        bits = self._bits.get(cell)
        if not bits:
            return (" ", "")
        style = MEAN if MEAN in bits else next(iter(bits))
        return (chr(0x2800 + bits[style]), style)


def _with_axes(grid: _Dots, low: float, high: float, first: float, last: float, width: int) -> list[Line]:
    rows = grid.rows
    step = max(2, rows // max(1, min(5, rows // 2)))
    lines: list[Line] = []
    for row in range(rows):
        labelled = row % step == 0 or row == rows - 1
        if rows - 1 - row < step and row != rows - 1 and row % step == 0 and rows > 2 and rows - 1 - row < 2:
            labelled = False  # too near the lowest label
        value = high - (high - low) * row / max(1, rows - 1)
        label = f"{_axis(value, high - low):>6} " if labelled else " " * 7
        lines.append([(label, DIM), ("┤" if labelled else "│", DIM), *grid.line(row)])
    lines.append([(" " * 7 + "└" + "─" * (width - 8), DIM)])
    left, right, name = figures.steps(int(first)), figures.steps(int(last)), "step"
    gap = width - 8 - len(left) - len(right)
    middle = name.center(gap) if gap >= len(name) + 2 else " " * max(0, gap)
    lines.append([(" " * 8 + left + middle + right, DIM)])
    return lines


def _axis(value: float, span: float) -> str:
    if abs(value) >= 1e4:
        return f"{value:.0e}"
    digits = 0 if span <= 0 else min(3, max(0, 1 - math.floor(math.log10(span))))
    return f"{value:.{digits}f}"[:6]
