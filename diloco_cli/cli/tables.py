"""How the answers of `diloco simulate` look as text.

Owns: the lines about the scenario, and the tables; in a pipe one line per row, without a limit to its width.
Must not compute what is answered. Text from files is shown as text, never as markup.
Called by: cli.simulate.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_cli.cli.app import printable
from diloco_cli.config.quantities import format_bytes, format_count, format_duration, format_rate
from diloco_cli.config.schema import Config
from diloco_cli.sim.paper import Cell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 10_000
GRID_STEP = 1.21
"""Of the bandwidths in the utilization table."""


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# Figure -> label, and how its values look.
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens/s", format_count),
    "wall_time_s": ("time", format_duration),
    "goodput": ("goodput", _percent),
    "uptime": ("uptime", _percent),
    "compute_utilization": ("utilization", _percent),
    "quorum_filled": ("quorum filled", _percent),
    "staleness_steps": ("staleness, steps", _plain),
    "merges": ("merges", _plain),
    "bytes_per_link": ("bytes per link", format_bytes),
    "cost": ("cost", lambda value: f"{value:,.2f}"),
}
UNITS = {"goodput": "percent", "utilization": "Gbit/s", "heterogeneous": "percent", "scavenging": "relative time"}


def console() -> Console:
    """Of stdout: colours and the terminal's width, or neither."""
    from rich.console import Console

    piped = not sys.stdout.isatty()
    return Console(file=sys.stdout, width=PIPE_WIDTH if piped else None, highlight=False, markup=False, emoji=False)


def show(renderable: Any) -> None:
    """Print a table; without the spaces at the ends of lines, where nobody sees them."""
    screen = console()
    with screen.capture() as captured:
        screen.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _table(*header: str) -> Table:
    """First column to the left, figures to the right; without a header: all to the left."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="left" if i == 0 else "right", overflow="fold")
    return table


# ---- scenario ---------------------------------------------------------------------------------------


def show_scenario(cfg: Config, scenario: Mapping[str, Any]) -> None:
    """What is simulated and what was assumed, in a few lines."""
    from rich.text import Text

    rows = [
        ("islands", _islands(scenario)),
        ("model", _model(cfg, scenario)),
        ("length", _length(scenario)),
        ("step time", _by_island(scenario["step_time_s"], format_duration)),
        ("links", _links(scenario)),
        (
            "sync",
            f"{cfg.sync.algorithm.value}: H {scenario['inner_steps']}, tau {scenario['overlap_steps']}, quorum"
            f" {scenario['quorum']}; {scenario['wire_up']} up, {scenario['wire_down']} down",
        ),
        ("failures", _failures(scenario)),
    ]
    table = _table()
    for label, text in rows:
        table.add_row(Text(label, style="bold"), Text(printable(text)))
    for i, text in enumerate(scenario["assumptions"]):
        table.add_row(Text("" if i else "assumed", style="bold"), Text(printable(text), style="dim"))
    show(table)
    print()


def _by_island(values: Mapping[str, Any], say: Callable[[Any], str]) -> str:
    """What most have, and those that differ by name."""
    shown = {name: say(value) for name, value in values.items()}
    common = max(shown.values(), key=list(shown.values()).count)
    others = [f"{name} {text}" for name, text in shown.items() if text != common]
    more = f"; and {len(others) - 4} more" if len(others) > 4 else ""
    return "; ".join([common, *others[:4]]) + more


def _islands(scenario: Mapping[str, Any]) -> str:
    chips = scenario["chips"]
    total = sum(chips.values())
    return f"{scenario['islands']}, {format_count(total)} chips: {_by_island(chips, lambda n: f'{n:,}')} each"


def _model(cfg: Config, scenario: Mapping[str, Any]) -> str:
    parameters, fragments = scenario["parameters"], scenario["fragments"]
    name = f"{cfg.model.name}, " if scenario["named_model"] else ""
    return f"{name}{format_count(parameters)} parameters in {fragments} fragment{'s' if fragments > 1 else ''}"


def _length(scenario: Mapping[str, Any]) -> str:
    chance = f"seed {scenario['seed']}, {scenario['trials']} trials where there is chance"
    per_step = format_count(scenario["tokens_per_step"])
    if scenario["duration_s"] is not None:
        until = f"{format_duration(scenario['duration_s'])}, or {scenario['steps']:,} steps"
    else:
        until = f"{scenario['steps']:,} steps"
    return f"{until}, of {per_step} tokens; {chance}"


def _links(scenario: Mapping[str, Any]) -> str:
    names = list(scenario["step_time_s"])
    each = zip(scenario["up_bps"], scenario["down_bps"], scenario["latency_s"], strict=True)

    def say(link: Any) -> str:
        up, down, (up_s, down_s) = link
        rates = [format_rate(math.inf if rate is None else rate) for rate in (up, down)]
        rate = f"{rates[0]} each way" if rates[0] == rates[1] else f"{rates[0]} up, {rates[1]} down"
        delays = [format_duration(s) for s in (up_s, down_s)]
        return f"{rate}, {' and '.join(dict.fromkeys(delays))} one way"

    return _by_island(dict(zip(names, each, strict=True)), say)


def _failures(scenario: Mapping[str, Any]) -> str:
    found = []
    if scenario["faults"]:
        found.append(f"{len(scenario['faults'])} planned (failures.events, failures.random)")
    if random := scenario["random_faults"]:
        found.append(
            f"an island goes every {format_duration(random['mean_time_between_s'])} on average and is back after"
            f" {format_duration(random['mean_repair_s'])}"
        )
    if chips := scenario["interruptions"]:
        found.append(f"a chip is interrupted every {format_duration(chips['mtbi_s'])} on average")
    return "; ".join(found) or "none"


# ---- answers ----------------------------------------------------------------------------------------


LEARNED: dict[str, tuple[str, Callable[[float], str]]] = {
    "validation_loss": ("validation loss", lambda value: f"{value:.4f}"),
    "tokens": ("tokens", format_count),
    "late_share": ("late tokens", _percent),
    **{name: FIGURES[name] for name in ("tokens_per_s", "goodput", "quorum_filled", "staleness_steps", "merges")},
    "wall_time_s": ("virtual time", format_duration),
}


def show_learned(document: Mapping[str, Any]) -> None:
    """What was learned under each algorithm, a row per figure."""
    found = document["algorithms"]
    table = _table("", *found)
    for figure, (label, say) in LEARNED.items():
        values = [found[name][figure] for name in found]
        if any(value["mean"] is not None for value in values):
            table.add_row(label, *(_spread(value, say, " ") for value in values))
    show(table)
    print(f"\nbigram model on the same text: {document['bigram_loss']:.4f}")


def show_algorithms(found: Mapping[str, Any]) -> None:
    """One row per figure, one column per algorithm; the spread over trials where there is one."""
    narrow = sys.stdout.isatty()
    table = _table("", *(name.replace("_", "\n") if narrow else name for name in found))
    for figure, (label, say) in FIGURES.items():
        values = [found[name][figure] for name in found]
        if any(value is not None for value in values):
            table.add_row(label, *(_spread(value, say, "\n" if narrow else " ") for value in values))
    if any(set(one["status"]) != {"completed"} for one in found.values()):
        table.add_row("ended", *(_status(one["status"]) for one in found.values()))
    show(table)


def _spread(value: Mapping[str, Any] | None, say: Callable[[float], str], between: str) -> str:
    if value is None or value["mean"] is None:
        return "-"
    mean, low, high = (say(value[k]) for k in ("mean", "low", "high"))
    if low == high:
        return mean
    # In a terminal the columns are as narrow as one figure needs, more or less.
    long = between == "\n" and len(low) + len(high) > 11
    return f"{mean}{between}({low}..{between if long else ''}{high})"


WORDS = {"stopped": "time over", "quorum_lost": "quorum lost"}


def _status(statuses: Mapping[str, int]) -> str:
    total = sum(statuses.values())
    words = [(WORDS.get(name, name), count) for name, count in statuses.items()]
    return ", ".join(word if count == total else f"{count}x {word}" for word, count in words)


def show_plots(paths: Sequence[Path]) -> None:
    """What was drawn."""
    for path in paths:
        print(f"drawn: {path}")


def show_solved(cfg: Config, document: Mapping[str, Any]) -> None:
    """The answer, what was assumed, and the table around it."""
    label, say = FIGURES[document["metric"]]
    what = {"bandwidth": "bandwidth of each link, each way", "learners": "learners", "inner-steps": "inner steps (H)"}
    print(
        f"{document['answer_text']}: the smallest {what[document['solve']]} with a {label} of at least"
        f" {say(document['target'])} ({document['algorithm']})\n"
    )
    show_scenario(cfg, document["scenario"])
    rows = document["table"]
    shown = [name for name in FIGURES if name in rows[0]]
    table = _table(document["solve"], *(FIGURES[name][0] for name in shown), "")
    for row in rows:
        value = format_rate(row["value"]) if document["solve"] == "bandwidth" else f"{row['value']:,.0f}"
        cells = ["-" if row[name] is None else FIGURES[name][1](row[name]) for name in shown]
        table.add_row(value, *cells, "<- answer" if row["value"] == document["answer"] else "")
    show(table)


# ---- a finished run ---------------------------------------------------------------------------------

COMPARED: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens/s", format_count),
    "training_time_s": ("training time", format_duration),
    "goodput": ("goodput", _percent),
    "bytes_up": ("bytes up, per island", format_bytes),
    "bytes_down": ("bytes down, per island", format_bytes),
    "merges": ("merges", _plain),
    "members_per_merge": ("islands in a merge", _plain),
    "late_share": ("late tokens", _percent),
}


def show_compared(document: Mapping[str, Any]) -> None:
    """What was taken from the run, then measured, predicted and their difference, a line per figure."""
    inputs = document["inputs"]
    rates = {n: format_rate(math.inf if r is None else r) for n, r in inputs["up_bps"].items()}
    print(f"run         {printable(document['run'])} ({document['algorithm']})")
    print(f"step time   {_by_island(inputs['step_time_s'], format_duration)} (measured)")
    print(f"links up    {_by_island(rates, str)} (configured)\n")
    table = _table("", "measured", "predicted", "difference")
    for figure, row in document["figures"].items():
        label, say = COMPARED[figure]
        measured = "-" if row["measured"] is None else say(row["measured"])
        difference = "-" if row["difference"] is None else f"{100 * row['difference']:+.1f}%"
        table.add_row(label, measured, _spread(row["predicted"], say, " "), difference)
    show(table)
    largest = document["largest_difference"]
    if largest is not None:
        verdict = "within" if document["within"] else "not within"
        print(f"\ntokens/s, goodput, bytes and merges: {verdict} 10% (largest difference {100 * largest:.1f}%)")


# ---- papers -----------------------------------------------------------------------------------------


def reproduced(name: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """The document of `--reproduce NAME --json`; differences in the table's unit, or in grid steps for Gbit/s."""
    known = [_difference(name, cell) for cell in cells if cell.paper is not None]
    return {
        "schema_version": 1,
        "reproduce": name,
        "unit": UNITS[name],
        "cells": [
            {"row": cell.row, "column": cell.column, "paper": cell.paper, "ours": float(f"{cell.ours:.6g}")}
            for cell in cells
        ],
        "difference_unit": "grid steps" if name == "utilization" else UNITS[name],
        "mean_difference": float(f"{math.fsum(abs(d) for d in known) / len(known):.6g}"),
        "max_difference": float(f"{max(abs(d) for d in known):.6g}"),
    }


def _difference(name: str, cell: Cell) -> float:
    assert cell.paper is not None
    if name == "utilization":
        return math.log(cell.ours / cell.paper) / math.log(GRID_STEP)
    return cell.ours - cell.paper


def show_reproduced(name: str, cells: Sequence[Cell]) -> None:
    """Paper, ours and their difference, a line per cell, and the errors."""
    document = reproduced(name, cells)
    digits = 2 if name == "scavenging" else 1
    table = _table(name, "", "paper", "ours", "difference")
    for cell in cells:
        paper = "-" if cell.paper is None else f"{cell.paper:.{digits}f}"
        difference = "-" if cell.paper is None else f"{_difference(name, cell) + 0.0:+.{digits}f}"
        table.add_row(cell.row, cell.column, paper, f"{cell.ours:.{digits}f}", difference)
    show(table)
    unit = document["difference_unit"]
    print(
        f"\nin {document['unit']}; difference in {unit}: mean {document['mean_difference']:.{digits + 1}f},"
        f" largest {document['max_difference']:.{digits + 1}f}, over {sum(c.paper is not None for c in cells)} cells"
    )
