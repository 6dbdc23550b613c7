"""Recorded merges and their repetition: `sync.record`, `diloco replay`.

    RUN/record/f003/v00017.{safetensors,json}   everything that went into version 17 of fragment 3

Theory: a merge is a function of Theta, the outer state, and the contributions with their tokens, steps and bases. Those
are recorded as they were given to core.merge. The event tape says which merges happened, and what came out of each
(digest). Repeating them from the initial model, with the same code and no network, clock or chance, must give the same
bits. A run that was resumed has merged some versions twice: the later line, and the later record, count.
Owns: these files. Called by: run.syncer_main (Recorder, in the merge worker), cli.look_back (replay).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from diloco_cli.config.schema import load_config
from diloco_cli.core.merge import MergeInput
from diloco_cli.errors import ConfigError, DilocoError
from diloco_cli.observe.events import read_jsonl
from diloco_cli.run import snapshots
from diloco_cli.run.global_model import GlobalModel
from diloco_cli.run.rundir import RunDir


def stem_of(record: Path, fragment: int, version: int) -> Path:
    """Where a merge is recorded (without suffix)."""
    return record / f"f{fragment:03d}" / f"v{version:05d}"


def write(record: Path, fragment: int, version: int, inputs: Sequence[MergeInput]) -> None:
    """Record what is about to be merged.

    Raises:
        OSError: the disk does not take it.
    """
    state = {
        "fragment": fragment,
        "version": version,
        "inputs": [
            {
                "learner": i.learner,
                "tokens": i.tokens,
                "steps": i.steps,
                "is_drift": i.is_drift,
                "values": i.values,
                "base": i.base,
            }
            for i in inputs
        ],
    }
    snapshots.write_state(stem_of(record, fragment, version), state)


def read(record: Path, fragment: int, version: int) -> list[MergeInput]:
    """What was merged.

    Raises:
        SnapshotDamaged: the record is missing or not whole.
    """
    stem = stem_of(record, fragment, version)
    state = snapshots.read_state(stem)
    try:
        if (state["fragment"], state["version"]) != (fragment, version):
            raise ValueError(f"it is of fragment {state['fragment']}, version {state['version']}")
        return [MergeInput(**each) for each in state["inputs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise snapshots.SnapshotDamaged("a recorded merge cannot be read", where=str(stem), why=str(error)) from error


class Difference(DilocoError):
    """A merge that did not come out as it did in the run."""

    def __init__(self, fragment: int, version: int, says: str) -> None:
        super().__init__(f"fragment {fragment}, version {version}: {says}")


def merges_on_tape(run: RunDir) -> dict[tuple[int, int], dict[str, Any]]:
    """(fragment, version) -> the last line of the tape about that merge."""
    return {(e["fragment"], e["version"]): e for e in read_jsonl(run.events) if e.get("event") == "merge"}


def replay(run: RunDir) -> Iterator[tuple[int, int, str]]:
    """Repeat every merge of a run, fragment by fragment; yields (fragment, version, digest) as each is confirmed.

    Raises:
        ConfigError: the run was not recorded.
        Difference: the first merge that comes out otherwise, or whose record and line contradict each other.
        SnapshotDamaged: a record is missing or not whole.
    """
    if not run.record.is_dir():
        raise ConfigError(
            "the run kept no contributions", where=str(run.path), hint="diloco train sync.record=true ... keeps them"
        )
    cfg = load_config(run.config)
    model = GlobalModel(cfg)
    lines = merges_on_tape(run)
    for fragment in range(len(model.layout)):
        newest = max((v for f, v in lines if f == fragment), default=0)
        for version in range(1, newest + 1):
            line = lines.get((fragment, version))
            if line is None:
                raise Difference(fragment, version, "the tape has no line about this merge")
            inputs = read(run.record, fragment, version)
            _compare(fragment, version, line, inputs)
            model.merge(fragment, inputs)
            digest = model.digest(fragment)
            if digest != line["digest"]:
                raise Difference(fragment, version, f"{digest}, in the run it was {line['digest']}")
            yield fragment, version, digest
    _compare_final(run, model)


def _compare(fragment: int, version: int, line: dict[str, Any], inputs: list[MergeInput]) -> None:
    """The tape and the record tell of the same contributions."""
    total = sum(i.weight for i in inputs)
    for what, told, recorded in (
        ("learners", line["learners"], [i.learner for i in inputs]),
        ("tokens", line["tokens"], [i.tokens for i in inputs]),
        ("steps", line["steps"], [i.steps for i in inputs]),
        ("weights", line["weights"], [i.weight / total for i in inputs]),
    ):
        if told != recorded:
            raise Difference(fragment, version, f"{what} {told} on the tape, {recorded} in the record")


def _compare_final(run: RunDir, model: GlobalModel) -> None:
    """The final parameters are those of the last versions."""
    path = run.final / "model.safetensors"
    if not path.exists():
        return
    from safetensors.torch import load_file

    saved = load_file(path)
    for name, tensor in model.tensors().items():
        if name in saved and not torch.equal(saved[name], tensor):
            raise DilocoError(f"{name} differs from what the last merges gave", where=str(path))
