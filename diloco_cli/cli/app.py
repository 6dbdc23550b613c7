"""The command line: commands and options, the one place where errors are printed, and exit codes.

Owns: what `diloco` and `diloco COMMAND --help` say, and how every end becomes an exit code.
Must not import anything heavy: the bodies are in cli.commands, and that is imported when one is called.
Called by: the console script `diloco`, `python -m diloco_cli`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli import __version__
from diloco_cli.cli import inspect as inspect_commands
from diloco_cli.cli import look_back as look_back_commands
from diloco_cli.cli import members as members_commands
from diloco_cli.cli import resume as resume_command
from diloco_cli.cli import simulate as simulate_command
from diloco_cli.errors import EXIT_CONFIG, EXIT_SIGINT, DilocoError

EXIT_INTERNAL = 70

app = typer.Typer(
    name="diloco",
    help="Decoupled DiLoCo: train language models on scattered machines over ordinary links.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under ./runs.")]
EntryPoint = Annotated[
    str | None,
    typer.Option(
        "--trust-entry-point",
        metavar="MODULE:FUNCTION",
        help="Import the run's own model.entry_point, if it is this one: that runs its code.",
    ),
]
DeviceName = Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Where to compute.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"diloco {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def _complete_override(incomplete: str) -> list[str]:
    from diloco_cli.cli.commands import complete_override

    # bash breaks words at "=", so that `conf=th` comes as three words and only the last is replaced.
    words, current = os.environ.get("COMP_WORDS", "").split(), os.environ.get("COMP_CWORD", "")
    if current.isdigit() and "=" in words[: int(current) + 1][-2:]:
        before = words[: int(current) + 1]
        key = before[before.index("=", len(before) - 2) - 1]
        value = "" if incomplete == "=" else incomplete
        return [found.partition("=")[2] for found in complete_override(f"{key}={value}")]
    return complete_override(incomplete)


@app.command()
def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[conf=RECIPE] [OVERRIDE]...",
            help="A recipe (a file, or a name from `diloco recipes`) and settings as KEY=VALUE.",
            autocompletion=_complete_override,
            show_default=False,
        ),
    ] = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Run every combination of values such as outer.lr=0.5,0.7.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print configuration and plan; start nothing.")] = False,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run folder, instead of runs/NAME-DATE-TIME.")
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No live display.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> int:
    """Train a model over decoupled islands.

    Starts islands and syncer on this machine, shows them at work and saves the result. Without arguments: the
    recipe first-run. `diloco config` lists the settings.
    """
    from diloco_cli.cli import commands

    options = commands.TrainOptions(
        run_dir=run_dir, quiet=quiet, json_output=json_output, dry_run=dry_run, multirun=multirun, debug=debug
    )
    return commands.train(overrides or [], options)


resume_command.register(app)
inspect_commands.register(app)
look_back_commands.register(app)
members_commands.register(app)
simulate_command.register(app)


@app.command()
def evaluate(
    run: Run,
    max_sequences: Annotated[int, typer.Option(min=1, help="Validation sequences to read.")] = 256,
    device: DeviceName = "auto",
    trust_entry_point: EntryPoint = None,
    json_output: Json = False,
    debug: Debug = False,
) -> int:
    """Measure the validation loss of a run."""
    from diloco_cli.cli import commands

    return commands.evaluate(run, max_sequences, device, trust_entry_point, json_output)


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k likeliest tokens; 0: among all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    device: DeviceName = "auto",
    trust_entry_point: EntryPoint = None,
    json_output: Json = False,
    debug: Debug = False,
) -> int:
    """Write text with what a run has trained."""
    from diloco_cli.cli import commands

    sampling = {"max_new_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    return commands.generate(run, prompt, sampling, device, trust_entry_point, json_output)


@app.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A new folder for the files.")],
    trust_entry_point: EntryPoint = None,
    json_output: Json = False,
    debug: Debug = False,
) -> int:
    """Write a run in Hugging Face's layout."""
    from diloco_cli.cli import commands

    return commands.export(run, to, trust_entry_point, json_output)


@app.command()
def recipes(json_output: Json = False, debug: Debug = False) -> int:
    """List the shipped recipes."""
    from diloco_cli.cli import commands

    return commands.recipes(json_output)


@app.command()
def config(
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]", help="model, data, islands, ...")] = None,
    json_output: Json = False,
    debug: Debug = False,
) -> int:
    """List the settings and what they mean."""
    from diloco_cli.cli import commands

    return commands.config(group, json_output)


# ---- ends -----------------------------------------------------------------------------------------


def main() -> None:
    """Entry point: run the command, print what went wrong, leave with the documented code."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    # Read by hand, because an error in the arguments themselves must come out in the form that they ask for.
    json_output, debug = "--json" in arguments, "--debug" in arguments
    try:
        result = app(args=arguments, prog_name="diloco", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except DilocoError as error:
        _report(error, error.exit_code, json_output, debug)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_SIGINT
    except BrokenPipeError:
        # The reader of stdout has gone; so that the interpreter does not complain while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        return _unexpected(error, arguments, json_output, debug)


def _unexpected(error: Exception, arguments: list[str], json_output: bool, debug: bool) -> int:
    """Typer's own errors are wrong usage; anything else is a bug of ours."""
    # Typer carries a private copy of click (or click itself, in older versions), so its errors are told by their form.
    format_message = getattr(error, "format_message", None)
    if callable(format_message):
        message = str(format_message())
        usage = DilocoError(message.rstrip("."), hint=_usage_hint(message, arguments, error))
        _report(usage, EXIT_CONFIG, json_output, debug=False)
        return EXIT_CONFIG
    if type(error).__name__ == "Abort":
        print("stopped", file=sys.stderr)
        return EXIT_SIGINT
    internal = DilocoError(
        f"internal error: {type(error).__name__}: {error}", hint="" if debug else "--debug shows the traceback"
    )
    internal.__cause__ = error
    _report(internal, EXIT_INTERNAL, json_output, debug)
    return EXIT_INTERNAL


def _usage_hint(message: str, arguments: list[str], error: Exception) -> str:
    """For `--islands.count=4`: the same without dashes; else the help of the command."""
    for argument in arguments:
        bare = argument.lstrip("-")
        if argument.startswith("-") and "=" in argument and bare.partition("=")[0] in message and "." in bare:
            return f"settings have no dashes: {bare}"
    context: Any = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'diloco'} --help"


def _report(error: DilocoError, exit_code: int, json_output: bool, debug: bool) -> None:
    """`error:` lines on stderr, and with --json a document on stdout."""
    if debug:
        import traceback

        traceback.print_exception(error.__cause__ or error)
    lines = [f"error: {error.what}"]
    lines += [f"  {name}: {text}" for name in ("where", "why", "hint") if (text := getattr(error, name))]
    print(printable("\n".join(lines)), file=sys.stderr)
    if json_output:
        summary = getattr(error, "summary", None)
        if isinstance(summary, dict):
            # A run that failed has its own summary, which says more.
            document = summary
        else:
            document = {"schema_version": 1, "status": "failed", "error": {**error.as_dict(), "exit_code": exit_code}}
        print(json.dumps(document))


def printable(text: str) -> str:
    """Text from outside without control characters, so that it cannot steer the terminal."""
    return "".join(c if c in "\n\t" or (c.isprintable() or c == " ") else "\ufffd" for c in text)
