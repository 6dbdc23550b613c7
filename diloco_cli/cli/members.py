"""`diloco join` and `diloco leave`: change the islands of a running run from another terminal.

Owns: how a new island's settings are written and checked, and what is printed. The launcher of the run acts on it
(run.members).
Must not import anything heavy at module level: `diloco --help` reads this file.
Called by: cli.app (register), tests.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from diloco_cli.errors import EXIT_OK, ConfigError

SCHEMA_VERSION = 1

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A running run's folder, or its name under ./runs.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(join)
    app.command()(leave)


def join(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SETTING]...",
            help="What the new island has of its own: speed=0.5, nproc_per_node=2, bandwidth=1gbps, latency=20ms, ...",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
    debug: Debug = False,
) -> int:
    """Add an island to a running run.

    It starts on the launcher's machine as the others do, and takes part as soon as it is up.
    """
    from diloco_cli.cli.commands import find_run
    from diloco_cli.config.schema import load_config
    from diloco_cli.config.validate import validate
    from diloco_cli.run.members import ask, not_running, with_island
    from diloco_cli.run.rundir import RunDir, is_alive

    folder = RunDir(find_run(run).resolve())
    island, link = own_settings(overrides or [])
    if not is_alive(folder):
        raise not_running(folder)
    # Checked here, where the rules are, so that nothing reaches the run that it would choke on.
    _, cfg = with_island(load_config(folder.config), island, link)
    validate(cfg, {})
    answer = ask(folder, {"command": "join", "island": island, "link": link})
    done = bool(answer["done"])
    _print(answer, json_output, "has joined" if done else "is starting; it has not joined yet")
    return EXIT_OK


def leave(
    run: Run,
    island: Annotated[str, typer.Argument(metavar="ISLAND", help="Which one (island-2).")],
    json_output: Json = False,
    debug: Debug = False,
) -> int:
    """Take an island out of a running run, for good."""
    from diloco_cli.cli.commands import find_run
    from diloco_cli.run.members import ask
    from diloco_cli.run.rundir import RunDir

    folder = RunDir(find_run(run).resolve())
    answer = ask(folder, {"command": "leave", "island": island})
    _print(answer, json_output, "has left" if answer["done"] else "is leaving")
    return EXIT_OK


def own_settings(overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """KEY=VALUE as what the new island has of its own: (islands.named.NAME, network.named.NAME).

    Raises:
        ConfigError: no such key, or a value of another type.
    """
    import dataclasses

    from diloco_cli.config.schema import IslandNetwork, IslandOverride
    from diloco_cli.config.validate import nearest

    of_island = [f.name for f in dataclasses.fields(IslandOverride)]
    of_link = [f.name for f in dataclasses.fields(IslandNetwork) if f.name not in ("up", "down")]
    island: dict[str, Any] = {}
    link: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is no KEY=VALUE", where=text, hint="speed=0.5")
        if key in of_link:
            link[key] = value
        elif key in of_island:
            island[key] = _typed(IslandOverride, key, value)
        else:
            close = nearest(key, [*of_island, *of_link])
            what = f"an island has no setting {key!r}"
            hint = f"{close}={value}" if close else ", ".join([*of_island, *of_link])
            raise ConfigError(what, where=text, hint=hint)
    return island, link


def _typed(kind: type, key: str, text: str) -> Any:
    """A value as the field of that name has it, as JSON can hold it."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), {key: yaml.safe_load(text)})
        return OmegaConf.to_container(merged, enum_to_str=True)[key]  # type: ignore[call-overload, index]
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"{key}: {text!r} makes no sense", where=f"{key}={text}", why=why) from error


def _print(answer: dict[str, Any], json_output: bool, says: str) -> None:
    if json_output:
        document = {"schema_version": SCHEMA_VERSION, "island": answer["island"], "done": bool(answer["done"])}
        print(json.dumps(document))
    else:
        print(f"{answer['island']} {says}")
