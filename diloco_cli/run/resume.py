"""Going on with a run: from which snapshot, with which settings, and what has to be in the folder before it starts.

Owns: which settings may differ from those of the run so far, the choice of the state to go on from, and the run
folder's preparation. Must not compose configurations or print: cli.resume does. Called by: cli.resume.

Where it goes on from: the newest whole snapshot. A run that was ended in order has one of its very end. One whose
launcher died has merges in RUN/syncer/ that are newer than any snapshot; they are kept, and the learners join anew,
with the optimizers of the snapshot. In deterministic mode it goes on from the snapshot all the same: only that gives
the bits of a run that was never stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from diloco_cli.config.schema import Config, dump_config
from diloco_cli.errors import ConfigError, DilocoError, EnvironmentNotReady
from diloco_cli.observe.events import read_jsonl
from diloco_cli.run import durable, snapshots
from diloco_cli.run.durable import CORE
from diloco_cli.run.rundir import RunDir, is_alive

# What a run is made of: with another value it would be another run. The reasons are for the user.
_FIXED = {
    "model": "the saved parameters are those of another model",
    "data": "the islands' places in the data, and the tokenizer, belong to the data of the saved run",
    "sync.algorithm": "learners and syncer are in the middle of what the saved algorithm does",
    "sync.fragments": "versions and outer momentum are kept per fragment of the saved layout",
    "sync.strategy": "versions and outer momentum are kept per fragment of the saved layout",
    "sync.min_fragment_bytes": "versions and outer momentum are kept per fragment of the saved layout",
    "inner.optimizer": "the saved optimizer states are of another kind",
    "run.seed": "the order of the data follows from it",
    "run.deterministic": "learners and syncer are in the middle of what the saved mode does",
    "run.name": "it is the run folder's name",
    "run.dir": "it is where the run folder lies",
}


@dataclass(frozen=True)
class Start:
    """What a run goes on from.

    Attributes:
        source: "step-N", or "syncer" for merges that are newer than any snapshot.
        step: global step of it.
        return_to: step of the snapshot that the learners return to; None: they join anew.
        passed_over: a sentence for each newer snapshot that is not whole.
        time_s: the run's clock when it ended.
    """

    source: str
    step: int
    return_to: int | None
    passed_over: list[str]
    time_s: float


def changes(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """(key, before, after) of every setting that differs."""
    old, new = _flat(before), _flat(after)
    different = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return [(key, old.get(key), new.get(key)) for key in different]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, below in value.items():
            found |= _flat(below, f"{prefix}.{key}" if prefix else str(key))
        return found
    if isinstance(value, list):
        value = [_flat(v) if dataclasses.is_dataclass(v) else v for v in value]
    return {prefix: value.value if isinstance(value, Enum) else value}


def check_changes(found: list[tuple[str, Any, Any]]) -> None:
    """Refuse a change of what the run is made of.

    Raises:
        ConfigError: with the reason.
    """
    for key, old, new in found:
        for fixed, reason in _FIXED.items():
            if key == fixed or key.startswith(fixed + "."):
                raise ConfigError(
                    f"{key}={new} may not change when a run goes on (it is {old})",
                    where=key,
                    why=reason,
                    hint="leave it out, or start a new run: diloco train",
                )


def choose_start(run: RunDir, cfg: Config) -> Start:
    """Find out where to go on from; changes nothing.

    Raises:
        DilocoError: there is nothing to go on from.
    """
    if is_alive(run):
        raise EnvironmentNotReady(
            "the run is running already", where=str(run.path), hint=f"look at it: diloco watch {run.path}"
        )
    folder, passed_over = snapshots.newest_good(run.checkpoints)
    kept = _core_of(run.durable / CORE)
    saved = None if folder is None else _core_of(folder / CORE)
    is_newer = kept is not None and (saved is None or kept["num_merges"] > saved["num_merges"])
    if kept is not None and is_newer and not cfg.run.deterministic:
        return Start("syncer", kept["global_step"], None, passed_over, _last_time_s(run))
    if folder is None or saved is None:
        why = "; ".join(passed_over) or f"there is none in {run.checkpoints}"
        raise DilocoError(
            "the run has no snapshot to go on from",
            where=str(run.path),
            why=why,
            hint="start it again: diloco train; run.snapshot_every says how often one is taken",
        )
    return Start(folder.name, saved["global_step"], snapshots.step_of(folder), passed_over, _last_time_s(run))


def _core_of(path: Path) -> dict[str, Any] | None:
    try:
        core = json.loads(path.read_text(encoding="ascii"))["core"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return core if isinstance(core, dict) and core.get("phase") != "gathering" else None


def _last_time_s(run: RunDir) -> float:
    """The run's clock goes on from its last record."""
    times = [0.0]
    for path in (run.events, run.metrics):
        try:
            times += [float(r["time"]) for r in read_jsonl(path)[-50:] if isinstance(r.get("time"), int | float)]
        except FileNotFoundError:
            continue
    return max(times)


def prepare(run: RunDir, cfg: Config, start: Start, overrides: list[str], changed: bool) -> None:
    """Put in place what the processes of the run go on from.

    Raises:
        EnvironmentNotReady: the folder cannot be written.
    """
    try:
        if start.source != "syncer":
            snapshots.set_aside(run.checkpoints, start.step)
            durable.adopt(run.durable, snapshots.put_back(run.checkpoints / start.source))
        _mark(run, start.source)
        if changed:
            _keep_old(run.config)
            dump_config(cfg, run.config)
        with open(run.path / "overrides.yaml", "a", encoding="utf-8") as file:
            file.write(f"# resumed at step {start.step}\n" + "".join(f"- {json.dumps(o)}\n" for o in overrides))
    except OSError as error:
        raise EnvironmentNotReady(
            "the run folder cannot be written", where=str(run.path), why=error.strerror or str(error)
        ) from error


def _mark(run: RunDir, source: str) -> None:
    """Tell the syncer that the run stood still, until it writes its own state."""
    path = run.durable / CORE
    saved = json.loads(path.read_text(encoding="ascii"))
    temporary = path.with_name(CORE + ".tmp")
    temporary.write_text(json.dumps({**saved, "resumed_from": source}), encoding="ascii")
    os.replace(temporary, path)


def _keep_old(path: Path) -> None:
    """config.yaml -> config-1.yaml, config-2.yaml, ..."""
    number = 1
    while (old := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    shutil.copy(path, old)
