"""Numbers as people read them on a screen: short, of bounded width, a dash for what is not known.

Pure. Quantities that must be read back in have config.quantities instead.
Called by: observe.dashboard, observe.plain, observe.chart, observe.summary.
"""

from __future__ import annotations

import math


def count(value: float | None) -> str:
    """1234 -> 1.23k; at most 5 characters for anything below 1e18."""
    if value is None:
        return "–"
    if abs(value) < 1000:
        digits = 0 if abs(value) >= 99.95 or float(value).is_integer() else 1 if abs(value) >= 9.995 else 2
        return f"{value:.{digits}f}"
    for scale, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P")):
        scaled = value / scale
        if abs(scaled) < 999.5:
            return (
                f"{scaled:.2f}{unit}"
                if abs(scaled) < 9.995
                else f"{scaled:.1f}{unit}"
                if abs(scaled) < 99.95
                else f"{scaled:.0f}{unit}"
            )
    return f"{value:.0e}"


def steps(value: int) -> str:
    """Exact below a million."""
    return str(value) if value < 1_000_000 else count(value)


def loss(value: float | None) -> str:
    """Three decimals."""
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share, 0.983 -> 98.3%."""
    return "–" if value is None else f"{100 * value:.1f}%" if abs(value) < 10 else ">999%"


def clock(seconds: float | None) -> str:
    """75 -> 1:15, 3675 -> 1:01:15, beyond two days: 2d 3h."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    total = round(max(0.0, seconds))
    if total >= 48 * 3600:
        return f"{total // 86400}d {total % 86400 // 3600}h"
    hours, minutes, rest = total // 3600, total % 3600 // 60, total % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(seconds: float | None) -> str:
    """A short duration: 340 us, 12 ms, 1.23 s, 45 s, 3:20."""
    if seconds is None:
        return "–"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us" if seconds > 0 else "0 ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 99.5 else clock(seconds)


def ago(seconds: float | None) -> str:
    """An age in few characters: 3.2s, 45s, 3:20."""
    if seconds is None:
        return "–"
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s" if seconds < 99.5 else clock(seconds)


def rate(now: float | None, limit: float | None) -> str:
    """Rate in use over the configured one, bits per second: 1.23G/3G."""
    if now is None and limit is None:
        return "–"
    if limit is None:
        return count(now)
    return f"{count(now)}/{'∞' if math.isinf(limit) else short_count(limit)}"


def short_count(value: float) -> str:
    """As count, without zeros that say nothing: 3.00G -> 3G."""
    text = count(value)
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


def share(part: float, total: float) -> str:
    """A part of a total as a percentage; the count itself where there is no total."""
    return percent(part / total) if total else count(part)
