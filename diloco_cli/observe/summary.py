"""summary.json in words: the table at the end of a run, as rows of label, value and style.

Pure; must not import rich. What was not measured is said to be so, never invented.
Called by: observe.dashboard.render_summary.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from diloco_cli.observe import figures
from diloco_cli.observe.view import clean


def _get(mapping: Any, *keys: str) -> Any:
    for key in keys:
        mapping = mapping.get(key) if isinstance(mapping, Mapping) else None
    return mapping


def _real(mapping: Any, *keys: str) -> float | None:
    value = _get(mapping, *keys)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def summary_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(label, value, style) of every row, in order. Rows that continue the one above have no label."""
    status = clean(_get(summary, "status") or "unknown")
    yield ("status", status, "bold cyan" if status == "completed" else "bold red")
    if error := _get(summary, "error"):
        words = _get(error, "what") or _get(error, "message") or error
        yield ("error", clean(words, 2000), "red")
    yield _run_row(summary)
    train, wall = _real(summary, "loss", "train"), _real(summary, "wall_time_s")
    yield ("train loss", f"{figures.loss(train)} nats/token" if train is not None else "not measured", "")
    yield ("validation", _comparison(_real(summary, "loss", "validation"), _real(summary, "loss", "bigram")), "")
    yield ("tokens", fates_in_words(_get(summary, "tokens")), "")
    yield ("goodput", _shares_in_words(summary), "")
    speed = _real(summary, "tokens_per_s")
    yield ("time", f"{figures.clock(wall)}" + (f", {figures.count(speed)} tokens/s" if speed is not None else ""), "")
    yield from _byte_rows(_get(summary, "bytes"))
    faults, restarts = _get(summary, "faults"), _real(summary, "restarts")
    if isinstance(faults, Mapping) and any(faults.values()):
        yield ("faults", ", ".join(f"{clean(v)} {clean(k)}" for k, v in faults.items() if v), "")
    if restarts:
        yield ("restarts", f"{restarts:.0f}", "")


def _run_row(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    learners, steps = _get(summary, "learners"), _get(summary, "steps")
    count = len(learners) if isinstance(learners, list | tuple | Mapping) else learners
    parts = [clean(_get(summary, "algorithm") or "")]
    if isinstance(count, int):
        parts.append(f"{count} learner{'' if count == 1 else 's'}")
    if isinstance(steps, Mapping) and steps:
        numbers = [int(v) for v in steps.values() if isinstance(v, int | float)]
        if numbers:
            low, high = min(numbers), max(numbers)
            parts.append(f"{high} steps" if low == high else f"{low} to {high} steps")
    merges = _real(summary, "merges")
    if merges is not None:
        parts.append(f"{merges:.0f} merges")
    return ("run", ", ".join(part for part in parts if part), "")


def _comparison(validation: float | None, bigram: float | None) -> str:
    """The validation loss against a bigram model's on the same text, in words."""
    if validation is None:
        return "not measured"
    text = f"{figures.loss(validation)} nats/token"
    if bigram is None:
        return text
    gap = bigram - validation
    share = f" ({100 * abs(gap) / bigram:.0f}%)" if bigram > 0 else ""
    words = f"{abs(gap):.3f}{share} {'better' if gap > 0 else 'worse'} than" if abs(gap) >= 5e-4 else "the same as"
    return f"{text}: {words} a bigram model on the same text ({figures.loss(bigram)})"


def fates_in_words(tokens: Any) -> str:
    """The token account, each fate with its share."""
    processed = _real(tokens, "processed")
    if processed is None:
        return "not measured"
    names = ("merged", "late", "refused", "lost", "pending")
    fates = {name: _real(tokens, name) for name in names}
    words = []
    for name, value in fates.items():
        if value or name == "merged":
            share = f" ({100 * value / processed:.1f}%)" if value is not None and processed else ""
            words.append(f"{figures.count(value)} {name}{share}")
    rest = processed - math.fsum(value for value in fates.values() if value is not None)
    if all(value is not None for value in fates.values()) and rest:
        words.append(f"{rest:+.0f} unaccounted for")
    return f"{figures.count(processed)} processed: " + ", ".join(words)


def _shares_in_words(summary: Mapping[str, Any]) -> str:
    labels = (("", "goodput"), ("uptime ", "uptime"), ("compute utilization ", "compute_utilization"))
    values = [(label, _real(summary, key)) for label, key in labels]
    return ", ".join(f"{label}{'not measured' if value is None else figures.percent(value)}" for label, value in values)


def _byte_rows(sent: Any) -> Iterator[tuple[str, str, str]]:
    """`bytes` as {island: {up, down}}, or {up: {island: n}, down: {island: n}}."""
    if not isinstance(sent, Mapping) or not sent:
        return
    if set(sent) <= {"up", "down"} and all(isinstance(value, Mapping) for value in sent.values()):
        names = dict.fromkeys(name for value in sent.values() for name in value)
        sent = {name: {way: _get(sent, way, name) for way in ("up", "down")} for name in names}
    elif set(sent) <= {"up", "down"}:
        sent = {"": sent}
    rows = [(clean(name, 64), _real(value, "up"), _real(value, "down")) for name, value in sent.items()]
    for index, (name, up, down) in enumerate(rows[:8]):
        words = f"{figures.count(up)}B up, {figures.count(down)}B down"
        yield ("sent" if index == 0 else "", f"{name}: {words}" if name else words, "")
    if len(rows) > 8:
        total_up, total_down = math.fsum(row[1] or 0.0 for row in rows), math.fsum(row[2] or 0.0 for row in rows)
        yield ("", f"all {len(rows)}: {figures.count(total_up)}B up, {figures.count(total_down)}B down", "")


def next_commands(summary: Mapping[str, Any], entry_point: str | None = None) -> list[str]:
    """What one would type next, to be copied as it is; `entry_point`: of a model of the user's own."""
    run_dir = summary.get("run_dir")
    if not isinstance(run_dir, str) or not run_dir:
        return []
    run = shlex.quote(run_dir)
    if summary.get("status") == "completed":
        trust = f" --trust-entry-point {shlex.quote(entry_point)}" if entry_point else ""
        return [f'diloco generate {run} --prompt "def "{trust}', f"diloco evaluate {run}{trust}"]
    logs = [f"ls {run}/logs   # each process's own output"] if summary.get("status") == "failed" else []
    return [f"diloco status {run}", f"diloco resume {run}", *logs]
