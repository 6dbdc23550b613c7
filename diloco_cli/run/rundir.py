"""The run folder: its layout, its making, and how one is found again.

Owns: every path inside RUN (interface.md, "Run folder"), environment.json, summary.json, and the lock that says
whether a launcher is at work on it. Called by: all processes of a run, and the commands that look back at one.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
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
    def lock(self) -> Path:
        """Held by the launcher for as long as it lives."""
        return self.path / "lock"

    @property
    def keys(self) -> Path:
        """Credentials of the run, owner only."""
        return self.path / "keys"

    @property
    def final(self) -> Path:
        """The trained parameters."""
        return self.path / "final"

    @property
    def checkpoints(self) -> Path:
        """Snapshots, step-N each."""
        return self.path / "checkpoints"

    @property
    def durable(self) -> Path:
        """What a syncer that was killed goes on from."""
        return self.path / "syncer"

    def left_state(self, island: str, rank: int) -> Path:
        """What a rank saved of itself when it left in order (without a suffix: see run.snapshots.write_state)."""
        return self.path / "left" / island / f"rank-{rank}"

    @property
    def record(self) -> Path:
        """Merged contributions (sync.record)."""
        return self.path / "record"

    def log(self, process: str) -> Path:
        """A process's own output."""
        return self.path / "logs" / f"{process}.log"

    def error(self, process: str) -> Path:
        """What a process says of its own death, for the launcher to show."""
        return self.path / "logs" / f"{process}.error.json"

    def alive(self, process: str) -> Path:
        """Touched by a process as a sign of life; holds its pid."""
        return self.path / "alive" / process

    @property
    def commands(self) -> Path:
        """What other terminals ask of the launcher, and its answers."""
        return self.path / "commands"

    @property
    def failures(self) -> Path:
        """The failures on purpose, as drawn before the start."""
        return self.path / "failures.json"

    @property
    def measure(self) -> Path:
        """What islands with `batch: auto` and the launcher say to each other before the start (run.measure)."""
        return self.path / "measure"

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


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename: a reader sees all of it or nothing."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """A JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


# ---- is somebody at work on it? -------------------------------------------------------------------

LOCK_WAIT_S = 1.0
"""`is_alive` holds a shared lock for an instant; a launcher that meets it tries again for so long."""

_held: set[int] = set()


def _close_in_child() -> None:
    # A lock lives as long as any descriptor of it: a forked child must not keep a dead launcher's.
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """A held lock; released by close() or by the end of this process, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _held.add(fd)

    def close(self) -> None:
        """Release. Harmless when called again, and in a forked child."""
        if self._fd in _held:
            _held.discard(self._fd)
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hold_lock(run: RunDir) -> RunLock:
    """Claim the run folder for this process; the lock file's time is then when that was.

    Raises:
        EnvironmentNotReady: another launcher has it, or its file system knows no locks.
    """
    deadline_s = time.monotonic() + LOCK_WAIT_S
    fd = -1
    try:
        fd = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.utime(fd)
                return RunLock(fd)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, BlockingIOError):
            raise EnvironmentNotReady(
                "the run is running already", where=str(run.path), hint=f"look at it: diloco watch {run.path}"
            ) from None
        raise EnvironmentNotReady(
            "the run folder cannot be locked",
            where=str(run.lock),
            why=error.strerror or str(error),
            hint="run.dir on a disk of this machine",
        ) from error


def summary_is_current(run: RunDir) -> bool:
    """Whether summary.json is of the launcher that last had the run, not of one before (`diloco resume`)."""
    try:
        written_ns = run.summary.stat().st_mtime_ns
    except OSError:
        return False
    try:
        return written_ns >= run.lock.stat().st_mtime_ns
    except OSError:
        return True


def is_alive(run: RunDir) -> bool:
    """Whether a launcher is at work on the run. Only reads, so it may be asked about somebody else's run."""
    try:
        fd = os.open(run.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
