"""Islands that join a running run, or leave it: what other terminals ask for, through files in RUN/commands.

    ID.json         {"command": "join", "island": {...}, "link": {...}} or {"command": "leave", "island": NAME}
    ID.answer.json  {"ok": true, "island": NAME, ...} or {"ok": false, "error": {"what", "where", "why", "hint", ...}}

Theory: both are written under another name and then renamed, so that nobody reads half of one. The folder is for the
owner of the run alone, who is also whom the launcher's processes belong to: nobody else can ask.
Owns: those files and what is not answered yet. The launcher does what is asked. Called by: run.launcher (Members),
cli.members (ask).
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from diloco_cli.config.schema import AUTO, Config, IslandNetwork, IslandOverride, dump_config, load_config
from diloco_cli.errors import EXIT_FAILED, ConfigError, DilocoError, EnvironmentNotReady
from diloco_cli.run.groups import Group
from diloco_cli.run.rundir import RunDir, is_alive, write_json

ANSWER_TIMEOUT_S = 30.0
# The launcher answers before the asker gives up.
LAUNCHER_ANSWERS_S = 25.0
POLL_S = 0.05
MAX_COMMAND_BYTES = 64 * 1024


class Host(Protocol):
    """What the launcher does for this module."""

    cfg: Config

    def add_island(self, cfg: Config, name: str) -> Group:
        """Take on the configuration with the new island, and start it."""

    def remove_island(self, name: str, reason: str) -> Group:
        """Have an island leave for good; `removed` is set when it has."""

    def islands_left(self) -> list[str]:
        """Islands that run or will run again."""


@dataclass(slots=True)
class Waiting:
    """A command under way."""

    ask: str
    group: Group
    done: Callable[[Group], bool]
    deadline_s: float


class Members:
    """The launcher's side."""

    def __init__(self, run: RunDir, host: Host) -> None:
        self._run = run
        self._host = host
        self._waiting: list[Waiting] = []
        run.commands.mkdir(mode=0o700, exist_ok=True)
        for stale in run.commands.iterdir():
            stale.unlink()

    def poll(self) -> None:
        """Take what is asked, answer what is done."""
        for file in sorted(self._run.commands.glob("*.json")):
            if not file.name.endswith(".answer.json"):
                self._take(file)
        now_s = time.monotonic()
        for waiting in list(self._waiting):
            if self._is_answered(waiting, now_s):
                self._waiting.remove(waiting)

    def close(self, reason: str) -> None:
        """The run is over."""
        for waiting in self._waiting:
            self._refuse(waiting.ask, DilocoError(reason, where=waiting.group.name))
        self._waiting.clear()

    def _take(self, file: Path) -> None:
        ask = file.name.removesuffix(".json")
        try:
            text = file.read_text(encoding="utf-8") if file.stat().st_size <= MAX_COMMAND_BYTES else ""
            file.unlink()
            asked = json.loads(text)
            command = asked["command"]
            if command == "join":
                self._join(ask, dict(asked.get("island") or {}), dict(asked.get("link") or {}))
            elif command == "leave":
                self._leave(ask, str(asked["island"]))
            else:
                raise ConfigError(f"there is no command {command!r}")
        except DilocoError as error:
            self._refuse(ask, error)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._refuse(ask, ConfigError("the command makes no sense", where=str(file), why=str(error)))

    def _join(self, ask: str, island: dict[str, Any], link: dict[str, Any]) -> None:
        name, cfg = with_island(self._host.cfg, island, link)
        store_config(self._run, cfg)
        # What the processes will read, types checked.
        cfg = load_config(self._run.config)
        group = self._host.add_island(cfg, name)
        self._wait(ask, group, lambda g: g.joined)

    def _leave(self, ask: str, name: str) -> None:
        check_leave(self._host.cfg, name, self._host.islands_left())
        group = self._host.remove_island(name, "taken out")
        self._wait(ask, group, lambda g: g.removed)

    def _wait(self, ask: str, group: Group, done: Callable[[Group], bool]) -> None:
        self._waiting.append(Waiting(ask, group, done, time.monotonic() + LAUNCHER_ANSWERS_S))

    def _is_answered(self, waiting: Waiting, now_s: float) -> bool:
        group = waiting.group
        if waiting.done(group):
            self._answer(waiting.ask, {"ok": True, "island": group.name, "done": True})
        elif not group.returns and not group.removed:
            error = group.last_error
            why = "" if error is None else f"{error.what}: {error.why}" if error.why else error.what
            self._refuse(waiting.ask, DilocoError(f"{group.name} could not be started", where=group.name, why=why))
        elif now_s > waiting.deadline_s:
            self._answer(waiting.ask, {"ok": True, "island": group.name, "done": False})
        else:
            return False
        return True

    def _refuse(self, ask: str, error: DilocoError) -> None:
        self._answer(ask, {"ok": False, "error": error.as_dict()})

    def _answer(self, ask: str, answer: dict[str, Any]) -> None:
        with suppress(OSError):  # a full disk: the asker times out
            write_json(self._run.commands / f"{ask}.answer.json", answer)


# ---- what may be asked ------------------------------------------------------------------------------


def with_island(cfg: Config, island: dict[str, Any], link: dict[str, Any]) -> tuple[str, Config]:
    """The next free name, and the configuration with an island of that name.

    Args:
        island, link: what it has of its own (islands.named.NAME, network.named.NAME).

    Raises:
        ConfigError: keys that there are not.
    """
    for kind, given in ((IslandOverride, island), (IslandNetwork, link)):
        known = {f.name for f in dataclasses.fields(kind)}
        if unknown := sorted(set(given) - known):
            raise ConfigError(f"an island has no setting {unknown[0]!r}", hint=", ".join(sorted(known)))
    name = f"island-{cfg.islands.count + cfg.islands.joined}"
    islands, network = cfg.islands, cfg.network
    if island:
        islands = dataclasses.replace(islands, named={**islands.named, name: IslandOverride(**island)})
    if link:
        network = dataclasses.replace(network, named={**network.named, name: IslandNetwork(**link)})
    islands = dataclasses.replace(islands, joined=islands.joined + 1)
    cfg = dataclasses.replace(cfg, islands=islands, network=network)
    if cfg.island(name).batch == AUTO:
        raise ConfigError(
            "batch: auto is measured before a run's start; an island that joins later needs a number", hint="batch=8"
        )
    return name, cfg


def store_config(run: RunDir, cfg: Config) -> None:
    """Put a configuration in place of the run's, whole or not at all, if it can be read back.

    Raises:
        ConfigError: a value of another type.
    """
    written = run.config.with_name(run.config.name + ".tmp")
    try:
        dump_config(cfg, written)
        load_config(written)
        # The newest run is told by this file's time (cli.commands.find_run).
        before = run.config.stat()
        os.utime(written, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(written, run.config)
    except (ConfigError, OSError):
        written.unlink(missing_ok=True)
        raise
    except Exception as error:  # OmegaConf's own, which this layer does not know by name
        written.unlink(missing_ok=True)
        raise ConfigError("the new island's settings make no sense", why=str(error).partition("\n")[0]) from error


def check_leave(cfg: Config, name: str, left: list[str]) -> None:
    """Raise ConfigError if island `name` may not leave. left: those that run or will again."""
    if name not in left:
        what = f"{name} has left already" if name in cfg.island_names() else f"there is no island {name!r}"
        raise ConfigError(what, where="diloco leave", hint=f"there are {', '.join(left) or 'none'}")
    if len(left) - 1 < cfg.sync.quorum:
        raise ConfigError(
            f"without {name} {len(left) - 1} islands would be left, and the quorum is {cfg.sync.quorum}",
            where="sync.quorum",
            hint="another one may join before: diloco join RUN",
        )


# ---- the asker's side -------------------------------------------------------------------------------


def ask(run: RunDir, command: dict[str, Any], timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """Ask the launcher of a running run, and wait for its answer.

    Raises:
        EnvironmentNotReady: the run is not running, or its launcher does not answer.
        DilocoError: it refused, with the reason.
    """
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    answer = run.commands / f"{name}.answer.json"
    if not is_alive(run):
        raise not_running(run)
    run.commands.mkdir(mode=0o700, exist_ok=True)
    write_json(run.commands / f"{name}.json", command)
    deadline_s = time.monotonic() + timeout_s
    while not answer.exists():
        if not is_alive(run):
            raise not_running(run)
        if time.monotonic() > deadline_s:
            (run.commands / f"{name}.json").unlink(missing_ok=True)
            raise EnvironmentNotReady(f"the launcher did not answer within {timeout_s:g} s", where=str(run.path))
        time.sleep(POLL_S)
    said = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink(missing_ok=True)
    if said["ok"]:
        return dict(said)
    told = said["error"]
    error = DilocoError(str(told["what"]), where=told["where"] or "", why=told["why"] or "", hint=told["hint"] or "")
    error.exit_code = int(told.get("exit_code") or EXIT_FAILED)
    raise error


def not_running(run: RunDir) -> EnvironmentNotReady:
    """The error for a run that nobody is at work on."""
    return EnvironmentNotReady("the run is not running", where=str(run.path), hint=f"diloco resume {run.path}")
