"""`diloco resume`: compose the run's own configuration with what was typed, show what differs, and go on.

Owns: the command's options and what it says before the start. What may change, and from where it goes on, is in
run.resume. Called by: cli.app.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.errors import ConfigError, DilocoError


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def resume(
        arguments: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[RUN] [OVERRIDE]...",
                help="A run folder, or its name under ./runs (default: the newest), and settings as KEY=VALUE.",
                show_default=False,
            ),
        ] = None,
        quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No live display.")] = False,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ) -> int:
        """Go on with a run from its last good snapshot.

        Settings may change where the run can bear it (steps, islands, links, quorum, ...); the others are refused.
        """
        return run_resume(arguments or [], quiet=quiet, json_output=json_output, debug=debug)


def run_resume(arguments: list[str], *, quiet: bool, json_output: bool, debug: bool) -> int:
    """The command's body; returns the exit code."""
    from diloco_cli.cli import commands
    from diloco_cli.config import keys
    from diloco_cli.config.compose import compose
    from diloco_cli.config.schema import load_config
    from diloco_cli.run import resume
    from diloco_cli.run.rundir import RunDir

    named = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if len(named) > 1:
        raise ConfigError(f"one run at a time, not {len(named)}", where=" ".join(named))
    folder = commands.find_run(named[0] if named else None)
    run = RunDir(folder.resolve())
    for override in overrides:
        key = override.partition("=")[0]
        if key in keys.groups() or key in ("algorithm", "conf"):
            raise ConfigError(
                f"{key}: a run that goes on takes single settings, not a whole group",
                where=override,
                hint=f"diloco config {key} lists them" if key in keys.groups() else "",
            )
    before = load_config(run.config)
    after = compose(overrides, str(run.config))
    after.launcher.debug = after.launcher.debug or debug
    found = resume.changes(before, after)
    resume.check_changes(found)
    start = resume.choose_start(run, after)
    steps = after.planned_steps()
    if steps is not None and start.step >= steps:
        raise ConfigError(
            f"the run has reached its {steps} steps",
            where=str(folder),
            hint=f"diloco resume {folder} run.steps={2 * steps}",
        )
    _say(run.path, found, start)
    from diloco_cli.run.launcher import resume_training

    try:
        summary = resume_training(after, run, start, overrides, changed=bool(found), quiet=quiet)
    except DilocoError as error:
        stopped: Any = getattr(error, "summary", None)
        if stopped and stopped.get("status") == "stopped" and not json_output:
            commands.print_summary(stopped, after.model.entry_point)
        raise
    if json_output:
        commands.print_json(summary)
    else:
        commands.print_summary(summary, after.model.entry_point)
    return commands.exit_code(summary)


def _say(path: Path, found: list[tuple[str, Any, Any]], start: Any) -> None:
    """On stderr: from where it goes on, what was passed over, what differs."""
    for problem in start.passed_over:
        print(f"warning: passed over: {problem}", file=sys.stderr)
    place = "the merges that its syncer had kept" if start.source == "syncer" else f"snapshot {start.source}"
    print(f"{path}: goes on at step {start.step}, from {place}", file=sys.stderr)
    for key, old, new in found:
        print(f"  changed: {key}: {_short(old)} -> {_short(new)}", file=sys.stderr)


def _short(value: Any) -> str:
    return "null" if value is None else str(value)
