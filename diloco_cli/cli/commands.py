"""What the commands do: compose, hand over to the layer that does the work, print the result.

Owns: results on stdout (text, or one JSON document), the choice of a run folder by name, sweeps.
Must not draw the live display or train: it calls run.launcher and train.export. Everything heavy is imported
inside functions, because `diloco recipes` needs no torch.
Called by: cli.app.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_QUORUM_LOST, EXIT_SIGINT, ConfigError, DilocoError

if TYPE_CHECKING:
    from diloco_cli.config.schema import Config

SCHEMA_VERSION = 1
_EXIT_BY_STATUS = {"completed": EXIT_OK, "stopped": EXIT_SIGINT, "waiting": EXIT_QUORUM_LOST}


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """The options of `diloco train`."""

    run_dir: Path | None = None
    quiet: bool = False
    json_output: bool = False
    dry_run: bool = False
    multirun: bool = False
    debug: bool = False


# ---- train ----------------------------------------------------------------------------------------


def train(arguments: list[str], options: TrainOptions) -> int:
    """Compose, then plan, run, or run a sweep. Returns the exit code."""
    from diloco_cli.config.compose import compose

    conf, overrides = split_conf(arguments)
    if options.multirun:
        return _sweep(conf, overrides, options)
    cfg = compose(overrides, conf)
    cfg.launcher.debug = cfg.launcher.debug or options.debug
    if options.dry_run:
        _show_plans([(overrides, cfg)], options)
        return EXIT_OK
    _check_run_dir(options.run_dir)
    from diloco_cli.run.launcher import run_training

    try:
        summary = run_training(cfg, arguments, run_dir=options.run_dir, quiet=options.quiet)
    except DilocoError as error:
        # What a stopped run has got done is a result; cli.app prints the rest (and, with --json, the summary).
        stopped = getattr(error, "summary", None)
        if stopped and stopped.get("status") == "stopped" and not options.json_output:
            print_summary(stopped, cfg.model.entry_point)
        raise
    if options.json_output:
        print_json(summary)
    else:
        print_summary(summary, cfg.model.entry_point)
    return exit_code(summary)


def split_conf(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `conf=RECIPE` out of what was typed."""
    chosen = [a.removeprefix("conf=") for a in arguments if a.startswith("conf=")]
    if len(chosen) > 1:
        raise ConfigError(f"conf: one recipe at a time, not {len(chosen)}", where=" ".join(f"conf={c}" for c in chosen))
    if chosen == [""]:
        raise ConfigError("conf: say which recipe", where="conf=", hint="diloco recipes lists what is shipped")
    return (chosen[0] if chosen else None), [a for a in arguments if not a.startswith("conf=")]


def exit_code(summary: Mapping[str, Any]) -> int:
    """Only a run that reached its target gives 0."""
    return _EXIT_BY_STATUS.get(str(summary.get("status")), EXIT_FAILED)


def _check_run_dir(run_dir: Path | None) -> None:
    """Nothing that is there already may be written over."""
    if run_dir is not None and run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError("the run folder is there already and is not empty", where=f"--run-dir {run_dir}")


def _show_plans(runs: list[tuple[list[str], Config]], options: TrainOptions) -> None:
    """`--dry-run`: the resolved configuration and the plan of every run, on stdout."""
    from omegaconf import OmegaConf

    from diloco_cli.run.plan import make_plan, render_plan

    documents = []
    for index, (overrides, cfg) in enumerate(runs):
        plan = make_plan(cfg)
        if options.json_output:
            documents.append({"schema_version": SCHEMA_VERSION, "config": _plain(cfg), "plan": plan})
            continue
        if options.multirun:
            print(f"{'' if index == 0 else chr(10)}# run {index}: {' '.join(overrides)}")
        print(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
        print(render_plan(plan))
    if options.json_output:
        print_json(documents if options.multirun else documents[0])


def _sweep(conf: str | None, overrides: list[str], options: TrainOptions) -> int:
    """One run after the other, each combination checked before the first one starts."""
    from diloco_cli.config.compose import compose, expand_sweeps

    runs = [(each, compose(each, conf)) for each in expand_sweeps(overrides)]
    if options.dry_run:
        _show_plans(runs, options)
        return EXIT_OK
    _check_run_dir(options.run_dir)
    from diloco_cli.run.launcher import run_training

    folder = options.run_dir or Path("multirun") / time.strftime("%Y%m%d-%H%M%S")
    results: list[dict[str, Any]] = []
    code = EXIT_OK
    for index, (each, cfg) in enumerate(runs):
        cfg.launcher.debug = cfg.launcher.debug or options.debug
        typed = [*([] if conf is None else [f"conf={conf}"]), *each]
        print(f"run {index + 1} of {len(runs)}: {' '.join(each)}", file=sys.stderr)
        try:
            summary = run_training(cfg, typed, run_dir=folder / str(index), quiet=options.quiet)
            this_code = exit_code(summary)
        except DilocoError as error:
            this_code = error.exit_code
            summary = getattr(error, "summary", None) or {
                "schema_version": SCHEMA_VERSION,
                "status": "failed",
                "error": error.as_dict(),
            }
            print(f"error: {error.what}", file=sys.stderr)
        results.append({**summary, "overrides": each})
        code = code or this_code
        if this_code > 128:
            # Stopped by the user: the runs that were to follow are not wanted either.
            break
    if options.json_output:
        print_json(results)
    else:
        _print_table(["run", "overrides", "status", "validation", "tokens/s", "time"], [_row(r) for r in results])
        print(f"all in {folder}")
    return code


def _row(summary: Mapping[str, Any]) -> list[str]:
    loss = (summary.get("loss") or {}).get("validation")
    speed, wall = summary.get("tokens_per_s"), summary.get("wall_time_s")
    return [
        str(summary.get("run_dir") or "-"),
        " ".join(summary["overrides"]),
        str(summary.get("status")),
        "-" if loss is None else f"{loss:.4f}",
        "-" if speed is None else f"{speed:.0f}",
        "-" if wall is None else f"{wall:.1f}s",
    ]


def print_summary(summary: Mapping[str, Any], entry_point: str | None) -> None:
    """A run's summary as rows, and what to type next."""
    from diloco_cli.observe.summary import next_commands, summary_rows

    rows = list(summary_rows(summary))
    width = max(len(label) for label, _, _ in rows)
    for label, value, _ in rows:
        print(f"{label:<{width}}  {value}")
    print(f"{'run folder':<{width}}  {summary.get('run_dir')}")
    for index, command in enumerate(next_commands(summary, entry_point)):
        print(f"{'next' if index == 0 else '':<{width}}  {command}")


# ---- the trained parameters -----------------------------------------------------------------------


def evaluate(run: str, max_sequences: int, device: str, trust_entry_point: str | None, json_output: bool) -> int:
    """`diloco evaluate`."""
    folder = find_run(run)
    _check_device(device)
    from diloco_cli.train.export import evaluate_run

    result = evaluate_run(folder, max_sequences, allow_entry_point=trust_entry_point, device=device)
    if json_output:
        print_json({"schema_version": SCHEMA_VERSION, **result})
        return EXIT_OK
    loss = result["loss"]
    print(f"validation loss  {loss['validation']:.4f} nats per token, perplexity {result['perplexity']:.2f}")
    if loss["bigram"] is not None:
        print(f"bigram loss      {loss['bigram']:.4f}")
    print(f"measured on      {result['tokens']} tokens in {result['sequences']} sequences")
    return EXIT_OK


def generate(
    run: str,
    prompt: str,
    sampling: dict[str, Any],
    device: str,
    trust_entry_point: str | None,
    json_output: bool,
) -> int:
    """`diloco generate`: the prompt and what follows, as it is written."""
    folder = find_run(run)
    _check_device(device)
    from diloco_cli.cli.app import printable
    from diloco_cli.train import export

    loaded = export.load_final(folder, allow_entry_point=trust_entry_point)
    model = loaded.model.to(export.pick_device(device))
    show: Callable[[str], None] | None = None
    if not json_output:
        print(printable(prompt), end="", flush=True)
        show = lambda text: print(printable(text), end="", flush=True)  # noqa: E731
    text = export.generate(model, loaded.tokenizer, prompt, context=loaded.cfg.data.seq_len, on_text=show, **sampling)
    if json_output:
        print_json({"schema_version": SCHEMA_VERSION, "run_dir": str(folder), "prompt": prompt, "text": text})
    else:
        print()
    return EXIT_OK


def export(run: str, to: Path, trust_entry_point: str | None, json_output: bool) -> int:
    """`diloco export`."""
    folder = find_run(run)
    from diloco_cli.train.export import export_llama

    written = export_llama(folder, to, allow_entry_point=trust_entry_point)
    files = sorted(p.name for p in written.iterdir())
    if json_output:
        print_json({"schema_version": SCHEMA_VERSION, "folder": str(written), "files": files})
    else:
        print(f"{written}: {', '.join(files)}")
    return EXIT_OK


def find_run(run: str | None) -> Path:
    """The folder that RUN names: a path, or a name under ./runs; None: the newest run in ./runs."""
    if run is None:
        return _newest_run()
    for folder in (Path(run), Path("runs") / run):
        if run and folder.is_dir():
            return folder
    from diloco_cli.config.validate import nearest

    runs = Path("runs")
    names = sorted(p.name for p in runs.iterdir() if p.is_dir()) if runs.is_dir() else []
    close = nearest(Path(run).name, names) or next((n for n in reversed(names) if n.startswith(run) and run), "")
    hint = f"did you mean {close}?" if close else f"./runs has {', '.join(names[-3:])}" if names else "./runs is empty"
    raise ConfigError(f"there is no run {run!r}", where=str(Path.cwd()), hint=hint)


def _newest_run() -> Path:
    """The one that was started last: its config.yaml is written once, at the start."""
    found = []
    for file in Path("runs").glob("*/config.yaml"):
        try:
            found.append((file.stat().st_mtime_ns, file.parent.name, file.parent))
        except OSError:  # removed meanwhile
            continue
    if not found:
        raise ConfigError(
            "there is no run in ./runs", where=str(Path.cwd()), hint="name one, or start one: diloco train"
        )
    return max(found)[2]


def _check_device(name: str) -> None:
    from diloco_cli.config.schema import Device
    from diloco_cli.config.validate import nearest

    if name not in Device.__members__:
        close = nearest(name, list(Device.__members__))
        raise ConfigError(
            f"--device: {name!r} is not one of {', '.join(Device.__members__)}",
            where="--device",
            hint=f"--device {close}" if close else "",
        )


# ---- lists ----------------------------------------------------------------------------------------


def recipes(json_output: bool) -> int:
    """`diloco recipes`."""
    from diloco_cli.config.compose import list_recipes

    found = list_recipes()
    if json_output:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "recipes": [{**dataclasses.asdict(r), "path": str(r.path)} for r in found],
            }
        )
        return EXIT_OK
    width = max(len(r.name) for r in found)
    for recipe in found:
        purpose = recipe.purpose.partition(":")[0] if len(recipe.purpose) > 90 else recipe.purpose
        print(f"{recipe.name:<{width}}  {purpose.rstrip('.')} ({recipe.time.rstrip('.')})")
    print(f"\nfiles: {found[0].path.parent}\nstart one with: diloco train conf=NAME")
    return EXIT_OK


def config(group: str | None, json_output: bool) -> int:
    """`diloco config [GROUP]`."""
    from diloco_cli.config import keys
    from diloco_cli.config.compose import group_options
    from diloco_cli.config.validate import nearest

    groups = keys.groups()
    if group is not None and group not in groups:
        close = nearest(group, list(groups))
        raise ConfigError(
            f"there is no group {group!r}; there are {', '.join(groups)}",
            where="diloco config",
            hint=f"diloco config {close}" if close else "",
        )
    shown = list(groups) if group is None else [group]
    if json_output:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "groups": [
                    {
                        "group": name,
                        "doc": groups[name],
                        "options": group_options(name),
                        "settings": [
                            {**dataclasses.asdict(s), "default": _plain(s.default)} for s in keys.settings(name)
                        ],
                    }
                    for name in shown
                ],
            }
        )
        return EXIT_OK
    if group is None:
        width = max(len(name) for name in groups)
        for name, doc in groups.items():
            print(f"{name:<{width}}  {doc} Options: {', '.join(group_options(name))}.")
        print("\nsettings of a group: diloco config GROUP")
        return EXIT_OK
    print(f"{group}: {groups[group]}\n\noptions ({group}=NAME)")
    _print_table(None, [[f"  {name}", doc] for name, doc in group_options(group).items()])
    print("\nsettings (KEY=VALUE)")
    rows = [[f"  {s.key}={_short(s.default)}", s.kind, s.doc] for s in keys.settings(group)]
    _print_table(None, rows)
    return EXIT_OK


def complete_override(incomplete: str) -> list[str]:
    """Candidates for one argument of `diloco train`: recipes, options of a group, keys."""
    from diloco_cli.config import keys
    from diloco_cli.config.compose import group_options, list_recipes

    key, equals, _ = incomplete.partition("=")
    if not equals:
        names = ["conf", "algorithm", *keys.groups(), *(s.key for s in keys.settings())]
        return [f"{name}=" for name in names if name.startswith(incomplete)]
    if key == "conf":
        values = [recipe.name for recipe in list_recipes()]
    elif key in keys.groups() or key == "algorithm":
        values = list(group_options("sync" if key == "algorithm" else key))
    else:
        kind = keys.type_of(key)
        is_choice = isinstance(kind, type) and issubclass(kind, Enum)
        values = list(kind.__members__) if is_choice else ["true", "false"] if kind is bool else []
    return [f"{key}={value}" for value in values if f"{key}={value}".startswith(incomplete)]


# ---- printing -------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Dataclasses and enums as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    """A default as one would type it."""
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, allow_nan=False))


def _print_table(header: list[str] | None, rows: list[list[str]]) -> None:
    table = [header, *rows] if header else rows
    if not table:
        return
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
