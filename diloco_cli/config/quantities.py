"""Quantities as people write them ("3gbps", "40ms", "64MiB", "12b") and back.

Owns: the spellings that are right, and the one-sentence refusals of those that are not.
Must not guess: a number without its unit, a unit that exists in two readings (GBps) and anything below zero are
refused with the nearest right spelling. Arithmetic is exact (fractions) up to the last step.
Called by: config.schema (every quantity of the configuration), screens and plans (the format functions).

Bandwidth is bits per second and decimal: 3gbps = 3Gbps = 3Gbit/s = 3000mbps = 3e9 bit/s, and 3GB/s = 24e9 bit/s.
Letter case is free except for b (bit) and B (byte).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from fractions import Fraction

from diloco_cli.errors import ConfigError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

# Canonical spelling -> value of one unit. Bits per second; seconds; bytes; things.
_RATE_UNITS: dict[str, Fraction] = {
    **{f"{p}bps": Fraction(m) for p, m in _DECIMAL.items()},
    **{f"{p if p == 'k' else p.upper()}bit/s": Fraction(m) for p, m in _DECIMAL.items()},
    **{f"{p if p == 'k' else p.upper()}b/s": Fraction(m) for p, m in _DECIMAL.items()},
    **{f"{p if p == 'k' else p.upper()}B/s": Fraction(8 * m) for p, m in _DECIMAL.items()},
    **{f"{p.capitalize()}B/s": Fraction(8 * m) for p, m in _BINARY.items()},
}
_DURATION_UNITS: dict[str, Fraction] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_BYTE_UNITS: dict[str, Fraction] = {
    **{f"{p if p == 'k' else p.upper()}B": Fraction(m) for p, m in _DECIMAL.items()},
    **{f"{p.capitalize()}B": Fraction(m) for p, m in _BINARY.items()},
}
_COUNT_UNITS: dict[str, Fraction] = {
    **{p: Fraction(m) for p, m in _DECIMAL.items() if p in ("", "k", "m", "t")},
    "b": Fraction(10**9),
}

# At most 18 digits on either side: enough for anything real, and no way to make a huge integer.
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z/]*)", re.ASCII)
_STEP = re.compile(r"steps? ?([0-9]{1,12})|([0-9]{1,12}) ?steps?", re.ASCII)
_LOOSE = re.compile(r"\s*([+-]?)\s*([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\s*(.*?)\s*", re.DOTALL)


def parse_rate_bps(text: str, key: str = "") -> float:
    """Bits per second; `math.inf` for "unlimited".

    Args:
        text: 3gbps, 250mbps, 3Gbit/s, 3Gb/s (bits) or 3GB/s, 64MiB/s (bytes), or unlimited; above zero.
        key: full name of the setting, for the message.
    """
    if text.strip().lower() == "unlimited":
        return math.inf
    return float(_parse(text, key, "a bandwidth", _RATE_UNITS, example="3gbps", zero=False, also=' or "unlimited"'))


def parse_duration_s(text: str, key: str = "") -> float:
    """Seconds from ns, us, ms, s, min, h, d; zero ("0s") is allowed."""
    return float(_parse(text, key, "a duration", _DURATION_UNITS, example="40ms", zero=True))


def is_step(text: str) -> bool:
    """Whether this says a number of steps (step 200, 200 steps) rather than a time."""
    return "step" in text.lower()


def parse_step(text: str, key: str = "") -> int:
    """Steps from "step 200" or "200 steps"; at least 1."""
    found = _STEP.fullmatch(text.strip().lower())
    number = int(found[1] or found[2]) if found else 0
    if number < 1:
        raise ConfigError(f"{key or 'step'}: {text!r} is not a number of steps", where=key, hint="step 200")
    return number


def parse_bytes(text: str, key: str = "") -> int:
    """Bytes from B, kB, MB, GB, TB (decimal) and KiB, MiB, GiB, TiB (binary), rounded to whole ones; above zero."""
    value = _parse(text, key, "a size", _BYTE_UNITS, example="64MiB", zero=False)
    if value < 1:
        raise _refusal(text, key, "a size", 'at least one byte, such as "64MiB"')
    return round(value)


def parse_count(text: str, key: str = "") -> int:
    """A whole number above zero: 12000, 1.5k, 300m, 12b, 2t (thousand, million, billion, trillion)."""
    value = _parse(text, key, "a count", _COUNT_UNITS, example="300m", zero=False)
    if value.denominator != 1:
        raise _refusal(text, key, "a count", f'a whole number, such as "{max(1, round(value))}"')
    return int(value)


def format_rate(bps: float) -> str:
    """3e9 -> "3gbps", infinity -> "unlimited"; four significant digits; parse_rate_bps reads it back."""
    if math.isinf(bps):
        return "unlimited"
    return _format(bps, {f"{p}bps": m for p, m in _DECIMAL.items()})


def format_duration(seconds: float) -> str:
    """0.04 -> "40ms", 90 -> "1.5min"; four significant digits; parse_duration_s reads it back."""
    return _format(seconds, {unit: float(value) for unit, value in _DURATION_UNITS.items()}, zero_unit="s")


def format_bytes(num_bytes: float) -> str:
    """67108864 -> "64MiB"; four significant digits; parse_bytes reads it back."""
    return _format(num_bytes, {"B": 1, **{f"{p.capitalize()}B": m for p, m in _BINARY.items()}})


def format_count(number: float) -> str:
    """12e9 -> "12b", 1500 -> "1.5k"; four significant digits; whole numbers read back with parse_count."""
    return _format(number, {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12})


def _parse(
    text: str, key: str, noun: str, units: Mapping[str, Fraction], *, example: str, zero: bool, also: str = ""
) -> Fraction:
    """The exact value of `text` in base units, or a ConfigError that names the nearest right spelling."""
    match = _QUANTITY.fullmatch(text.strip())
    value = None
    if match:
        scale = _unit_value(match[2], units)
        value = Fraction(match[1]) * scale if scale is not None else None
    if value is None:
        raise _refusal(text, key, noun, _nearest(text, units, example, zero))
    if value == 0 and not zero:
        raise _refusal(text, key, noun, f'a value above zero, such as "{example}"{also}')
    return value


def _unit_value(unit: str, units: Mapping[str, Fraction]) -> Fraction | None:
    """Value of one `unit`: case is free, but b and B must be as in the table (GBps is neither bits nor bytes)."""
    for spelling, value in units.items():
        if spelling.lower() != unit.lower():
            continue
        # Counts have no bytes in them: 12B tokens is common usage.
        is_count = units is _COUNT_UNITS
        if is_count or [c for c in spelling if c in "bB"] == [c for c in unit if c in "bB"]:
            return value
    return None


def _nearest(text: str, units: Mapping[str, Fraction], example: str, zero: bool) -> str:
    """`"3gbps"` for "3gbs": what was most likely meant, quoted."""
    match = _LOOSE.fullmatch(text)
    number = (match[2] or "").replace(",", "").replace("_", "") if match else ""
    unit = match[3] if match else ""
    if number.startswith("."):
        number = f"0{number}"
    if not number or len(number.partition(".")[0]) > 18 or re.search(r"[0-9][eE][+-]?[0-9]", text):
        return f'"{example}"'
    if not zero and not number.strip("0."):
        return f'"{example}"'
    example_unit = example.lstrip("0123456789")
    if unit.lower().replace("i", "") in ("gbps", "mbps", "kbps", "tbps") and "B" in unit:
        # Megabytes or megabits? Say both.
        return f'"{number}{unit[0].lower()}bps" (bits) or "{number}{_upper(unit[0])}B/s" (bytes)'
    return f'"{number}{_nearest_unit(unit, units, example_unit)}"'


def _upper(prefix: str) -> str:
    return "k" if prefix in "kK" else prefix.upper()


def _nearest_unit(unit: str, units: Mapping[str, Fraction], default: str) -> str:
    by_lower = {spelling.lower(): spelling for spelling in reversed(list(units))}
    if not unit:
        return "" if "" in by_lower else default
    if unit.lower() in by_lower:
        return by_lower[unit.lower()]
    starts = [s for s in units if s.lower().startswith(unit.lower())]
    starts += [s for s in by_lower.values() if s and len(s) > 1 and unit.lower().startswith(s.lower())]
    starts += [s for s in by_lower.values() if len(s) == 1 and unit.lower().startswith(s)]
    if starts:
        return starts[0]
    close = difflib.get_close_matches(unit.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else default


def _refusal(text: str, key: str, noun: str, right: str) -> ConfigError:
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    what = f"{key}: {shown!r} is not {noun}" if key else f"{shown!r} is not {noun}"
    return ConfigError(what, hint=f"write {right}")


def _format(value: float, units: Mapping[str, float], zero_unit: str | None = None) -> str:
    """`value` in the largest unit that leaves at least 1 (the smallest unit if none does)."""
    if not math.isfinite(value) or value < 0:
        return f"{value}"
    if value == 0:
        return f"0{zero_unit if zero_unit is not None else next(iter(units))}"
    unit = next(iter(units))
    for name, size in units.items():
        # 0.99995 rounds up to 1 at four digits, so it belongs to this unit already.
        if value / size >= 0.99995:
            unit = name
    scaled = value / units[unit]
    if scaled >= 1000:
        return f"{scaled:.0f}{unit}"
    digits = min(17, max(0, 3 - math.floor(math.log10(scaled))))
    text = f"{scaled:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}{unit}"
