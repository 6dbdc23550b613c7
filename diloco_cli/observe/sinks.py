"""TensorBoard and Weights & Biases, fed from the very records that go into metrics.jsonl.

Owns: the names there, SOURCE/KEY (island-0/loss, syncer/merges_per_s), against the record's step. Off by
default. A package that is missing, a login that fails or a write that raises is a warning for the user and the end
of that sink, never of the run. Both packages are imported inside functions: most runs need neither.
Called by: run (the process that writes metrics.jsonl).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from diloco_cli.config.schema import LoggingConfig

_NOT_A_METRIC = frozenset({"time", "source", "step"})


class Sink(Protocol):
    """Takes metric records. `failed` says why it takes no more; None while it works. Never raises."""

    failed: str | None

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record of metrics.jsonl."""

    def close(self) -> None:
        """Write out what is buffered. Harmless when called again."""


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(SOURCE/KEY, value) of every finite number in a record; SOURCE/KEY/INNER for a mapping (the token ledger)."""
    source = str(record.get("source", "run"))
    for key, value in record.items():
        if key in _NOT_A_METRIC:
            continue
        items = value.items() if isinstance(value, Mapping) else [(None, value)]
        for inner, number in items:
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                continue
            yield (f"{source}/{key}" if inner is None else f"{source}/{key}/{inner}"), float(number)


def _step(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    return int(step) if isinstance(step, int | float) and math.isfinite(step) else 0


class TensorBoardSink:
    """Event files in RUN/tensorboard. Uses the tensorboard package itself: no torch, no tensorflow."""

    def __init__(self, run_dir: Path, started_at: float) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.failed: str | None = None
        self._started_at = started_at
        self._writer: Any = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=5)

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record; its `time` (seconds since the run's start) becomes TensorBoard's wall time."""
        if self.failed is not None:
            return
        try:
            self._write(record)
        except Exception as error:  # whatever it is: a tracker must not end a run
            self.failed = f"TensorBoard takes no more: {error}"

    def _write(self, record: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record)]
        if values:
            wall_time = self._started_at + float(record.get("time") or 0.0)
            self._writer.add_event(Event(wall_time=wall_time, step=_step(record), summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the files."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:
            self.failed = f"TensorBoard: the last lines were not written: {error}"
        else:
            self.failed = self.failed or "closed"


class WandbSink:
    """One W&B run named like the run folder. Honours the standard variables; asks nothing on the terminal."""

    def __init__(self, run_dir: Path, project: str) -> None:
        import wandb

        self.failed: str | None = None
        self.note: str | None = None
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not os.environ.get("WANDB_API_KEY") and not wandb.api.api_key:
            # Without this wandb asks for a key on the terminal and waits.
            mode = "offline"
            self.note = f"Weights & Biases: not logged in, so written offline; later: wandb sync {run_dir}/wandb/*"
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", project),
            name=run_dir.name,
            dir=str(run_dir),
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
        self._known_sources: set[str] = set()

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record. Sources count their own steps, so each gets its own x-axis (SOURCE/step)."""
        if self.failed is not None:
            return
        try:
            source = str(record.get("source", "run"))
            if source not in self._known_sources:
                self._known_sources.add(source)
                self._run.define_metric(f"{source}/*", step_metric=f"{source}/step")
            self._run.log({**dict(scalars(record)), f"{source}/step": _step(record)})
        except Exception as error:
            self.failed = f"Weights & Biases takes no more: {error}"

    def close(self) -> None:
        """Finish the W&B run."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish()
        except Exception as error:
            self.failed = f"Weights & Biases: the end was not written: {error}"
        else:
            self.failed = self.failed or "closed"


def make_sinks(logging: LoggingConfig, run_dir: Path, started_at: float | None = None) -> tuple[list[Sink], list[str]]:
    """The sinks that the settings ask for, and warnings about those that cannot be had.

    Args:
        logging: the settings.
        run_dir: the run folder; both write below it.
        started_at: Unix time that the records' `time` counts from; None: now.
    """
    sinks: list[Sink] = []
    warnings: list[str] = []
    if logging.tensorboard:
        try:
            sinks.append(TensorBoardSink(run_dir, time.time() if started_at is None else started_at))
        except Exception as error:
            warnings.append(_unavailable("TensorBoard", "logging.tensorboard", error))
    if logging.wandb:
        try:
            wandb_sink = WandbSink(run_dir, logging.wandb_project)
        except Exception as error:
            warnings.append(_unavailable("Weights & Biases", "logging.wandb", error))
        else:
            sinks.append(wandb_sink)
            if wandb_sink.note:
                warnings.append(wandb_sink.note)
    return sinks, warnings


def _unavailable(name: str, key: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        return f'{name} is not written: its package is missing (pip install "diloco[track]", or {key}=false)'
    return f"{name} is not written: {error}"
