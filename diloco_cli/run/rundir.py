"""The run folder: its layout, its making, and how one is found again.

Owns: every path inside RUN (interface.md, "Run folder"), environment.json, summary.json. Called by: all processes
of a run, and the commands that look back at one.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from diloco_cli import __version__
from diloco_cli.config.schema import Config, dump_config
from diloco_cli.errors import EnvironmentNotReady


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, read by every process."""
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        """The event tape."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """Figures over time."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Written at the end of every run."""
        return self.path / "summary.json"

    @property
    def keys(self) -> Path:
        """Credentials of the run, owner only."""
        return self.path / "keys"

    @property
    def final(self) -> Path:
        """The trained parameters."""
        return self.path / "final"

    def log(self, process: str) -> Path:
        """A process's own output."""
        return self.path / "logs" / f"{process}.log"

    def error(self, process: str) -> Path:
        """What a process says of its own death, for the launcher to show."""
        return self.path / "logs" / f"{process}.error.json"

    def samples(self, island: str) -> Path:
        """Sample ids of every step (run.trace_samples)."""
        return self.path / "samples" / f"{island}.jsonl"


def create(cfg: Config, overrides: list[str], wanted: Path | None) -> RunDir:
    """Make the run folder with the files that say what the run is.

    Args:
        wanted: exactly this folder (new or empty); None: run.dir/NAME-YYYYMMDD-HHMMSS, with -2, -3, ... if taken.

    Raises:
        EnvironmentNotReady: it cannot be made, or holds something already.
    """
    try:
        path = _claim(wanted) if wanted is not None else _claim_new(Path(cfg.run.dir), cfg.run.name)
        run = RunDir(path.resolve())
        (path / "logs").mkdir()
        if cfg.run.trace_samples:
            (path / "samples").mkdir()
        dump_config(cfg, run.config)
        write_json(run.path / "environment.json", environment(cfg))
        (path / "overrides.yaml").write_text("".join(f"- {json.dumps(o)}\n" for o in overrides) or "[]\n")
    except OSError as error:
        raise EnvironmentNotReady(
            "the run folder cannot be made",
            where=str(wanted or cfg.run.dir),
            why=error.strerror or str(error),
            hint="give another place with --run-dir or run.dir",
        ) from error
    return run


def _claim(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise EnvironmentNotReady(
            "the run folder is not empty", where=str(path), hint="give a new one; nothing is ever overwritten"
        )
    return path


def _claim_new(parent: Path, name: str) -> Path:
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1, 1000):
        path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError(f"a thousand runs named {stem}")


def environment(cfg: Config) -> dict[str, Any]:
    """Versions, machine, seed, command and commit of a run. Imports nothing heavy."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for package in ("torch", "numpy", "hydra-core", "omegaconf", "safetensors", "cryptography", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "diloco": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "git_commit": _git_commit(),
        "seed": cfg.run.seed,
    }


def _git_commit() -> str | None:
    """Commit of the folder the command was typed in, if it is a git work tree."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then rename: a reader sees all of it or nothing."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
