"""`diloco replay`: repeat a run's merges and say whether they come out the same.

Owns: the command and what it prints. The rule is in run.record. Called by: cli.app.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def replay(
        run: Annotated[
            str | None,
            typer.Argument(metavar="[RUN]", help="A run folder, or its name under ./runs (default: the newest)."),
        ] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ) -> int:
        """Repeat a run's merges and compare every bit.

        The run must have been recorded (sync.record=true).
        """
        return run_replay(run, json_output)


def run_replay(name: str | None, json_output: bool) -> int:
    """The command's body; returns the exit code. A difference is an error, exit code 1."""
    from diloco_cli.cli import commands
    from diloco_cli.run.record import replay
    from diloco_cli.run.rundir import RunDir

    run = RunDir(commands.find_run(name).resolve())
    began_s = time.monotonic()
    digests: dict[int, tuple[int, str]] = {}
    count = 0
    for fragment, version, digest in replay(run):
        digests[fragment] = (version, digest)
        count += 1
    if json_output:
        commands.print_json(
            {
                "schema_version": commands.SCHEMA_VERSION,
                "run_dir": str(run.path),
                "merges": count,
                "identical": True,
                "fragments": [{"fragment": f, "version": v, "digest": d} for f, (v, d) in sorted(digests.items())],
            }
        )
        return 0
    print(f"{count} merges repeated in {time.monotonic() - began_s:.1f} s, every result the same as in the run")
    for fragment, (version, digest) in sorted(digests.items()):
        print(f"fragment {fragment:>3}  version {version:>5}  {digest}")
    return 0
