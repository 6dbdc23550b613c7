"""`diloco simulate`: its options and help, and what happens for each way to call it.

Owns: which option goes with which, and the documents on stdout. What options mean is sim.options, what is simulated
is sim.results (and paper, learn, calibrate), how it looks is cli.tables.
Must not import anything heavy at module level: `diloco --help` reads this file.
Called by: cli.app (register), tests.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from diloco_cli.errors import EXIT_OK, ConfigError, DilocoError

if TYPE_CHECKING:
    from diloco_cli.config.schema import Config
    from diloco_cli.sim.options import Asked, Target
    from diloco_cli.sim.scenario import Scenario

PLOT_ENDINGS = (".png", ".svg", ".html")
RUN, FLEET, FAIL, LENGTH, ANSWER, OTHER = (
    "What runs",
    "Chips and step time",
    "Failures",
    "How long, and chance",
    "What is answered",
    "Output",
)

EPILOG = """\b
Examples:
  diloco simulate --islands 4 --bandwidth 3gbps
  diloco simulate conf=thin-links --algorithm diloco,decoupled sync.quorum=2
  diloco simulate --islands 8 --model 12b --bandwidth 5gbps --chip h100 --chips 512 islands.each.batch=64
  diloco simulate --islands 16 --chips 2.4m --mtbi 365d --hours 24
  diloco simulate --islands 4 --model 1b --step-time 1s --solve bandwidth --utilization 0.95
  diloco simulate --chips 600k --mtbi 365d --hours 24 --solve learners --goodput 0.9
  diloco simulate --reproduce goodput
  diloco simulate runs/first-run-20260101-120000

Rates are bits per second (3gbps), times have units (40ms, 1.5s, 30d), counts may have k, m, b, t (12b).
The meaning of each figure, and which model answers what: docs/simulate.md.
"""


class Grouped(TyperCommand):
    """Help with one heading per group of options (their `rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """As click has it, by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "option":
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or OTHER, []).append(record)
        for name in (RUN, FLEET, FAIL, LENGTH, ANSWER, OTHER):
            if groups.get(name):
                with formatter.section(name):
                    formatter.write_dl(groups[name])


def _option(*names: str, metavar: str, text: str, group: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=group, show_default=False)


def _complete(incomplete: str) -> list[str]:
    from diloco_cli.cli.app import _complete_override

    return _complete_override(incomplete)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=Grouped, epilog=EPILOG)(simulate)


def simulate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[conf=RECIPE] [OVERRIDE]... or RUN",
            autocompletion=_complete,
            show_default=False,
        ),
    ] = None,
    islands: Annotated[str | None, _option("--islands", metavar="N", text="Islands (learners).", group=RUN)] = None,
    bandwidth: Annotated[
        str | None, _option("--bandwidth", metavar="RATE", text="Of each island's link, each way: 3gbps.", group=RUN)
    ] = None,
    latency: Annotated[
        str | None, _option("--latency", metavar="TIME", text="Of each island's link, one way: 40ms.", group=RUN)
    ] = None,
    model: Annotated[
        str | None,
        _option("--model", metavar="PRESET|COUNT", text="A preset (12b), or so many parameters (700m).", group=RUN),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        _option(
            "--algorithm",
            metavar="NAME",
            text="data_parallel, data_parallel_elastic, diloco, streaming, decoupled; several times, or with commas. "
            "All without it (with --solve and --learn: the configuration's).",
            group=RUN,
        ),
    ] = None,
    step_time: Annotated[
        str | None, _option("--step-time", metavar="TIME", text="Of one inner step of an island.", group=FLEET)
    ] = None,
    chip: Annotated[
        str | None,
        _option(
            "--chip",
            metavar="NAME",
            text="Derive the step time from the peak of this chip: a100, h100, h200, b200, l40s, rtx4090, mi300x, "
            "tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e.",
            group=FLEET,
        ),
    ] = None,
    mfu: Annotated[
        str | None, _option("--mfu", metavar="SHARE", text="Share of that peak that is reached; 0.4.", group=FLEET)
    ] = None,
    step_jitter: Annotated[
        str | None,
        _option(
            "--step-jitter",
            metavar="SHARE",
            text="Steps last up to so much longer or shorter, by chance: 0.1.",
            group=FLEET,
        ),
    ] = None,
    chips: Annotated[
        str | None,
        _option("--chips", metavar="N", text="Over all islands, dealt out evenly; else one per rank.", group=FLEET),
    ] = None,
    price: Annotated[
        str | None, _option("--price", metavar="PRICE", text="Of a chip for an hour.", group=FLEET)
    ] = None,
    price_egress: Annotated[
        str | None, _option("--price-egress", metavar="PRICE", text="Of a gigabyte sent.", group=FLEET)
    ] = None,
    mtbi: Annotated[
        str | None,
        _option("--mtbi", metavar="TIME", text="Mean time between interruptions of one chip: 365d.", group=FAIL),
    ] = None,
    repair: Annotated[
        str | None, _option("--repair", metavar="TIME", text="Until what failed is there again.", group=FAIL)
    ] = None,
    hours: Annotated[
        str | None, _option("--hours", metavar="N", text="Simulated time, instead of the recipe's steps.", group=LENGTH)
    ] = None,
    tokens: Annotated[
        str | None, _option("--tokens", metavar="COUNT", text="Over all islands, instead of steps: 300b.", group=LENGTH)
    ] = None,
    seed: Annotated[
        str | None, _option("--seed", metavar="N", text="Same seed, same output; run.seed.", group=LENGTH)
    ] = None,
    trials: Annotated[
        str | None,
        _option("--trials", metavar="N", text="Runs that differ by chance, where there is any; 3.", group=LENGTH),
    ] = None,
    solve: Annotated[
        str | None,
        _option(
            "--solve",
            metavar="bandwidth|learners|inner-steps",
            text="The smallest that reaches a target, one of the next four.",
            group=ANSWER,
        ),
    ] = None,
    utilization: Annotated[
        str | None, _option("--utilization", metavar="SHARE", text="Target: compute utilization.", group=ANSWER)
    ] = None,
    goodput: Annotated[str | None, _option("--goodput", metavar="SHARE", text="Target: goodput.", group=ANSWER)] = None,
    uptime: Annotated[str | None, _option("--uptime", metavar="SHARE", text="Target: uptime.", group=ANSWER)] = None,
    tokens_per_s: Annotated[
        str | None, _option("--tokens-per-s", metavar="COUNT", text="Target: tokens per second.", group=ANSWER)
    ] = None,
    reproduce: Annotated[
        str | None,
        _option(
            "--reproduce",
            metavar="TABLE",
            text="A paper's table beside ours: goodput, utilization, heterogeneous, scavenging.",
            group=ANSWER,
        ),
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Train a small real model in virtual time.", rich_help_panel=ANSWER)
    ] = False,
    plot: Annotated[
        list[Path] | None,
        _option(
            "--plot", metavar="FILE", text="Timeline and utilization as .png, .svg or .html; several.", group=OTHER
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=OTHER)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OTHER)
    ] = False,
) -> int:
    """See a whole run before paying for it: the protocol of `diloco train` in virtual time.

    Prints tokens/s, time, goodput, uptime, utilization, bytes, staleness, quorums and cost, for each algorithm side by
    side. Recipe and overrides are those of `diloco train`; without any, the recipe first-run. With a finished run
    (a folder, or its name under ./runs) the simulation is held against what was measured.
    """
    from diloco_cli.sim.options import Asked
    from diloco_cli.sim.options import target as read_target

    asked = Asked(
        islands=islands,
        bandwidth=bandwidth,
        latency=latency,
        model=model,
        step_time=step_time,
        chip=chip,
        mfu=mfu,
        step_jitter=step_jitter,
        chips=chips,
        mtbi=mtbi,
        repair=repair,
        hours=hours,
        tokens=tokens,
        seed=seed,
        trials=trials,
        algorithm=tuple(algorithm or ()),
        price=price,
        price_egress=price_egress,
    )
    typed = words or []
    plots = plot or []
    target = read_target(solve, utilization=utilization, goodput=goodput, uptime=uptime, tokens_per_s=tokens_per_s)
    modes = {"--solve": target is not None, "--reproduce": reproduce is not None, "--learn": learn}
    chosen = [name for name, on in modes.items() if on]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other", where=" ".join(chosen), hint="one at a time")
    run = _run_of(typed)
    if reproduce is not None:
        _alone("--reproduce", asked, typed, plots)
        return _reproduce(reproduce, json_output)
    if run is not None:
        _alone(f"a finished run ({run})", asked, [w for w in typed if w != run], plots, *chosen)
        return _compare(run, json_output)
    _check_plots(plots)
    cfg, scenario = _compose(typed, asked)
    if target is not None:
        _draw(plots, cfg, scenario, asked)
        return _solve(cfg, scenario, asked, target, json_output)
    if learn:
        _draw(plots, cfg, scenario, asked)
        return _learn(cfg, scenario, asked, json_output)
    return _simulate(cfg, scenario, asked, plots, json_output)


# ---- what was asked ---------------------------------------------------------------------------------


def _run_of(typed: list[str]) -> str | None:
    """The word that is neither conf= nor an override: a run."""
    runs = [word for word in typed if "=" not in word and not word.startswith(("~", "+"))]
    if len(runs) > 1:
        raise ConfigError(f"{runs[0]!r} and {runs[1]!r}: one run at a time", where=" ".join(runs))
    return runs[0] if runs else None


def _alone(what: str, asked: Asked, typed: list[str], plots: list[Path], *modes: str) -> None:
    """Nothing else was asked for."""
    defaults = type(asked)()
    given = [
        f"--{f.name.replace('_', '-')}"
        for f in dataclasses.fields(asked)
        if getattr(asked, f.name) != getattr(defaults, f.name)
    ]
    others = [*modes, *given, *(["--plot"] if plots else []), *typed]
    if others:
        raise ConfigError(f"{what} takes its settings from itself", where=others[0], hint=f"leave out {others[0]}")


def _check_plots(plots: list[Path]) -> None:
    """Before the work that would be lost."""
    for path in plots:
        if path.suffix.lower() not in PLOT_ENDINGS:
            hint = f"--plot {path.stem or 'timeline'}.png"
            raise ConfigError(f"--plot: {str(path)!r} is no .png, .svg or .html", where=f"--plot {path}", hint=hint)
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(
                f"--plot: {str(path)!r} cannot be written", where=f"--plot {path}", hint="is the folder there?"
            )


def _compose(typed: list[str], asked: Asked) -> tuple[Config, Scenario]:
    from diloco_cli.cli.commands import split_conf
    from diloco_cli.config.compose import compose, group_options
    from diloco_cli.sim import options

    for word in typed:
        if word.partition("=")[0].lstrip("+") in ("algorithm", "sync") and "data_parallel" in word:
            name = word.partition("=")[2]
            raise ConfigError(
                f"{word}: no configuration of train; an option here", where=word, hint=f"--algorithm {name}"
            )
    presets = [name for name in group_options("model") if name not in ("custom", "huggingface")]
    implied = options.overrides(asked, presets)
    options.algorithms(asked)
    options.trials(asked)
    conf, overrides = split_conf(typed)
    cfg = compose([*implied, *overrides], conf)
    keys = {word.partition("=")[0].lstrip("+~") for word in overrides}
    counted = asked.model is not None and asked.model not in presets
    return options.scenario(
        asked,
        cfg,
        presets,
        sizes=() if counted else _loaded_sizes(cfg),
        length_typed=bool(keys & {"run.steps", "run.tokens", "run"}),
    )


def _loaded_sizes(cfg: Config) -> tuple[int, ...]:
    """Elements per fragment of a model (or a vocabulary) that has to be loaded to be measured; else nothing."""
    from diloco_cli.config.schema import ModelKind

    known = cfg.model.kind is ModelKind.llama and (cfg.model.vocab_size is not None or cfg.data.tokenizer == "bytes")
    if known:
        return ()
    from diloco_cli.run.plan import make_plan

    try:
        return tuple(fragment["elements"] for fragment in make_plan(cfg)["fragments"]["sizes"])
    except DilocoError as error:
        # Only the size is needed here, and that can be said.
        error.hint = f"{error.hint}{', or ' if error.hint else ''}--model COUNT, such as 700m"
        raise


def _one_algorithm(asked: Asked, cfg: Config) -> str:
    """For --solve: the one that was asked for, else the configuration's."""
    from diloco_cli.sim import options

    if not asked.algorithm:
        return cfg.sync.algorithm.value
    names = options.algorithms(asked)
    if len(names) > 1:
        raise ConfigError(
            f"--solve is for one algorithm, not {len(names)}", where="--algorithm", hint=f"--algorithm {names[-1]}"
        )
    return names[0]


# ---- what is answered -------------------------------------------------------------------------------


def _simulate(cfg: Config, scenario: Scenario, asked: Asked, plots: list[Path], json_output: bool) -> int:
    from diloco_cli.cli import tables
    from diloco_cli.sim import options, results

    names = options.algorithms(asked)
    document = results.simulate(cfg, scenario, algorithms=names, trials=options.trials(asked))
    _draw(plots, cfg, scenario, asked)
    if json_output:
        _print_json(document)
    else:
        tables.show_scenario(cfg, document["scenario"])
        tables.show_algorithms(document["algorithms"])
        tables.show_plots(plots)
    return EXIT_OK


def _draw(plots: list[Path], cfg: Config, scenario: Scenario, asked: Asked) -> None:
    if not plots:
        return
    from diloco_cli.sim import options
    from diloco_cli.sim.plot import draw

    for path in plots:
        draw(path, cfg, scenario, options.algorithms(asked), cfg.run.seed)


def _solve(cfg: Config, scenario: Scenario, asked: Asked, target: Target, json_output: bool) -> int:
    from diloco_cli.cli import tables
    from diloco_cli.sim import options, results

    document = results.solve(
        cfg,
        scenario,
        target.what,
        metric=target.metric,
        target=target.value,
        algorithm=_one_algorithm(asked, cfg),
        trials=options.trials(asked),
    )
    if target.note:
        document["scenario"]["assumptions"].insert(0, target.note)
    if json_output:
        _print_json(document)
    else:
        tables.show_solved(cfg, document)
    return EXIT_OK


def _learn(cfg: Config, scenario: Scenario, asked: Asked, json_output: bool) -> int:
    from diloco_cli.cli import tables
    from diloco_cli.sim import options
    from diloco_cli.sim.learn import learn

    names = options.algorithms(asked) if asked.algorithm else [cfg.sync.algorithm.value]
    trials = 1 if asked.trials is None else options.trials(asked)
    document = learn(cfg, scenario, algorithms=names, seed=cfg.run.seed, trials=trials)
    if json_output:
        _print_json(document)
    else:
        tables.show_scenario(cfg, document["scenario"])
        tables.show_learned(document)
    return EXIT_OK


def _reproduce(name: str, json_output: bool) -> int:
    from diloco_cli.cli import tables
    from diloco_cli.sim import paper

    cells = paper.reproduce(name)
    if json_output:
        _print_json(tables.reproduced(name, cells))
    else:
        tables.show_reproduced(name, cells)
    return EXIT_OK


def _compare(run: str, json_output: bool) -> int:
    from diloco_cli.cli import tables
    from diloco_cli.cli.commands import find_run

    folder = find_run(run)
    from diloco_cli.sim.calibrate import compare

    document = compare(folder)
    if json_output:
        _print_json(document)
    else:
        tables.show_compared(document)
    return EXIT_OK


def _print_json(document: Any) -> None:
    print(json.dumps(document, allow_nan=False))
