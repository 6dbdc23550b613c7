"""Pictures of a simulation: what each island does when, and bandwidth against utilization.

Owns: which part of a run is shown, and the look. matplotlib (extra `plot`) is imported inside functions.
Same seed, same bytes: no dates and no random ids in the files. Called by: cli.simulate.
"""

from __future__ import annotations

import dataclasses
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_cli.config.quantities import format_duration, format_rate
from diloco_cli.config.schema import Config
from diloco_cli.errors import ConfigError, EnvironmentNotReady
from diloco_cli.sim.results import ELASTIC, figures, run_once, with_bandwidth
from diloco_cli.sim.scenario import Scenario
from diloco_cli.sim.timeline import COMPUTING, DONE, DOWN, REJOINING, STATES, WAITING, Interval, Timeline

ENDINGS = (".png", ".svg", ".html")
# Okabe and Ito's palette: told apart by everybody, and in grey.
COLOURS = {COMPUTING: "#0072B2", WAITING: "#F0C84B", DOWN: "#D55E00", REJOINING: "#CC79A7", DONE: "#D9D9D9"}
LINES = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2")
WINDOW_CYCLES = 3.5
"""Of H steps of the slowest island, in the detailed picture."""
CURVE_FACTORS = tuple(10 ** (i / 3) for i in range(-9, 7))
"""Bandwidths of the curves, around the configured one."""
CURVE_CYCLES = 6
MAX_NAMES = 24
"""More islands are numbered at the axis instead of named."""


def draw(path: Path, cfg: Config, scenario: Scenario, algorithms: Sequence[str], seed: int) -> None:
    """Write the picture; the file's ending says which kind.

    Raises:
        ConfigError: another ending, or it cannot be written.
        EnvironmentNotReady: matplotlib is not installed.
    """
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError(f"--plot: {str(path)!r} is no {', '.join(ENDINGS)}", where=str(path), hint="FILE.png")
    figure = _figure(cfg, scenario, algorithms, seed)
    try:
        if ending == ".html":
            path.write_text(_page(cfg, _svg(figure)), encoding="utf-8")
        elif ending == ".svg":
            path.write_text(_svg(figure), encoding="utf-8")
        else:
            figure.savefig(path, format="png", dpi=130, metadata={"Software": None})
    except OSError as error:
        raise ConfigError("the picture cannot be written", where=str(path), why=error.strerror or str(error)) from error


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise EnvironmentNotReady(
            "pictures need matplotlib", where="--plot", why=str(error), hint="pip install 'diloco[plot]'"
        ) from error
    return matplotlib


def _svg(figure: Any) -> str:
    matplotlib = _matplotlib()
    out = io.StringIO()
    # Text as text: small files, and it can be searched for.
    with matplotlib.rc_context({"svg.hashsalt": "diloco", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def _page(cfg: Config, svg: str) -> str:
    """One file without anything from elsewhere."""
    title = html.escape(f"diloco simulate: {cfg.islands.count} islands")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{font-family:sans-serif;margin:1.5em auto;max-width:1100px}svg{width:100%;height:auto}</style>"
        f"</head>\n<body><h1>{title}</h1>\n{svg[svg.index('<svg') :]}\n"
        f"<p>{html.escape(CAPTION)}</p></body></html>\n"
    )


CAPTION = (
    "Lanes: what each island does; a merge is a mark above them. Utilization: computing over computing and waiting, in"
    " short runs without failures; dotted, for decoupled: contributions in a merge over islands, since its learners"
    " wait for no link, but miss merges on a thin one."
)


# ---- the figure -------------------------------------------------------------------------------------


def _figure(cfg: Config, scenario: Scenario, algorithms: Sequence[str], seed: int) -> Any:
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    runs = [(name, *_recorded(cfg, scenario, name, seed)) for name in algorithms]
    failing = bool(scenario.faults) or scenario.random_faults is not None
    panel = min(max(0.9, 0.26 * cfg.islands.count), 4.0) + 0.75
    heights = [panel * len(runs), 3.2]
    with matplotlib.rc_context({"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}):
        figure: Any = Figure(figsize=(14 if failing else 10, sum(heights)), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=heights)
        axes = top.subplots(len(runs), 2 if failing else 1, squeeze=False)
        for row, (name, timeline, end_s) in zip(axes, runs, strict=True):
            fine_s = min(end_s, timeline.fine_s)
            part = "" if fine_s >= end_s else f", the first {format_duration(fine_s)} of {format_duration(end_s)}"
            _lanes(row[0], _in_order(cfg, timeline.fine(end_s)), f"{name}{part}", fine_s, timeline.merges)
            if failing:
                _lanes(row[1], _in_order(cfg, timeline.coarse(end_s)), f"{name}, the whole run", end_s, [])
        _legend(top, failing)
        _curves(bottom.subplots(), cfg, scenario, algorithms, seed)
    return figure


def _recorded(cfg: Config, scenario: Scenario, algorithm: str, seed: int) -> tuple[Timeline, float]:
    """One run's lanes, and how long it took."""
    slowest_s = max(scenario.step_s(cfg, name) for name in cfg.island_names())
    latency_s = max(d.latency_s for n in cfg.island_names() for d in (cfg.link(n).up, cfg.link(n).down))
    timeline = Timeline(WINDOW_CYCLES * (cfg.sync.inner_steps * slowest_s + 2 * latency_s))
    outcome = run_once(cfg, scenario, algorithm, seed=seed, timeline=timeline)
    return timeline, outcome.tally.time_s


def _in_order(cfg: Config, lanes: Mapping[str, Sequence[Interval]]) -> dict[str, Sequence[Interval]]:
    return {name: lanes[name] for name in cfg.island_names() if name in lanes}


def _lanes(
    axes: Any, lanes: Mapping[str, Sequence[Interval]], title: str, end_s: float, merges: Sequence[tuple[float, int]]
) -> None:
    names = list(lanes)
    unit, name_of_unit = _time_unit(end_s)
    for y, name in enumerate(names):
        for state in STATES:
            spans = [(begin / unit, (until - begin) / unit) for s, begin, until in lanes[name] if s == state]
            if spans:
                axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=COLOURS[state], linewidth=0)
    if merges:
        axes.vlines([t / unit for t, _ in merges], -1.3, -0.6, colors="black", linewidth=0.8)
    axes.set_xlim(0, end_s / unit)
    axes.set_ylim(len(names) - 0.5, -1.4 if merges else -0.6)
    step = 1 if len(names) <= MAX_NAMES else max(1, len(names) // 8)
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(name_of_unit)


def _time_unit(end_s: float) -> tuple[float, str]:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if end_s >= 3 * unit:
            return unit, name
    return 1.0, "seconds"


def _legend(figure: Any, failing: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [s for s in STATES if failing or s != DOWN]
    handles: list[Any] = [Patch(color=COLOURS[s], label=s) for s in shown]
    handles.append(Line2D([], [], color="black", marker="|", linestyle="none", label="merge"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def _curves(axes: Any, cfg: Config, scenario: Scenario, algorithms: Sequence[str], seed: int) -> None:
    """Utilization over bandwidths around the configured one, in short runs without failures."""
    links = [cfg.link(name) for name in cfg.island_names()]
    configured = min(min(link.up.rate_bps, link.down.rate_bps) for link in links)
    middle = configured if math.isfinite(configured) else 1e9
    rates = [middle * factor for factor in CURVE_FACTORS]
    short = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run))
    short.run.tokens = None
    short.run.steps = min(cfg.target_steps(), CURVE_CYCLES * cfg.sync.inner_steps)
    calm = dataclasses.replace(scenario, faults=(), random_faults=None, duration_s=math.inf)
    for colour, algorithm in zip(LINES, algorithms, strict=False):
        # Its line often lies upon plain data parallelism's.
        style = "--" if algorithm == ELASTIC else "-"
        found = [_at_rate(short, calm, algorithm, rate, seed) for rate in rates]
        axes.plot(
            rates, [f["compute_utilization"] for f in found], color=colour, marker=".", linestyle=style, label=algorithm
        )
        if algorithm == "decoupled":
            axes.plot(rates, [f["quorum_filled"] for f in found], color=colour, linestyle=":", label="its quorums")
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1.03)
    ticks = rates[::3]
    axes.set_xticks(ticks, [format_rate(float(f"{rate:.2g}")) for rate in ticks])
    axes.minorticks_off()
    axes.set_xlabel("bandwidth of each link, each way")
    axes.set_ylabel("compute utilization")
    axes.grid(alpha=0.3)
    if math.isfinite(configured):
        axes.axvline(configured, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate("configured", (configured, 0.0), xytext=(3, 2), textcoords="offset points", color="grey")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _at_rate(cfg: Config, scenario: Scenario, algorithm: str, rate_bps: float, seed: int) -> dict[str, float]:
    own, same = with_bandwidth(cfg, scenario, rate_bps)
    tally = run_once(own, same, algorithm, seed=seed).tally
    chips = {name: cfg.num_ranks(name) for name in cfg.island_names()}
    return {k: math.nan if v is None else v for k, v in figures(chips, tally).items()}
