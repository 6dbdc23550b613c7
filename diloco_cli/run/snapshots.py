"""Snapshots on disk: states as safetensors and JSON, a manifest with checksums, the newest good one, retention.

    RUN/checkpoints/step-N/
      manifest.json                           sizes and CRC-32 of all files; the snapshot counts when this is there
      core.json                               core.recovery.dump
      syncer/fragment-003-v17.safetensors     theta and the outer optimizer's state of a fragment
      islands/island-0/rank-0.{safetensors,json}

Theory: files are written under temporary names and renamed, the manifest last, after everything is on the disk. A
folder without a manifest, or with a file that is not as it says, is torn: it is named, and passed over for the
one before. Nothing here is ever unpickled or evaluated.
Owns: these files. Must not: know what a state means. Called by: run.syncer_main, run.ranks, run.learner_main,
run.resume, run.record.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco_cli.errors import DilocoError
from diloco_cli.run.rundir import write_text

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_OLD = ".old"
_READ_BYTES = 1 << 20


class SnapshotDamaged(DilocoError):
    """A file of a snapshot is not what it should be."""


# ---- states: any nesting of dicts, lists, numbers, texts and tensors ----------------------------------


def copied(state: Any) -> Any:
    """The state with every tensor copied to the CPU (of a sharded one this rank's part), so that training may go on."""
    if isinstance(state, Tensor):
        part = state.to_local() if hasattr(state, "to_local") else state
        return part.detach().to("cpu", copy=True).contiguous()
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list | tuple) else state


def write_state(stem: Path, state: Mapping[str, Any]) -> None:
    """Write `stem`.safetensors and then `stem`.json, each whole or not at all.

    Raises:
        OSError: the disk does not take it.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    skeleton = _pack(state, tensors)
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_name(stem.name + ".safetensors")
    temporary = path.with_name(path.name + ".tmp")
    data = save(tensors)
    text = json.dumps({"crc32": f"{zlib.crc32(data):08x}", "state": skeleton}, allow_nan=False)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
        write_text(stem.with_name(stem.name + ".json"), text)
    except OSError:
        for left in (temporary, stem.with_name(stem.name + ".json.tmp")):
            left.unlink(missing_ok=True)
        raise


def read_state(stem: Path) -> dict[str, Any]:
    """What write_state wrote.

    Raises:
        SnapshotDamaged: it is not there, or not whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = stem.with_name(stem.name + ".safetensors")
    try:
        data = path.read_bytes()
        said = json.loads(stem.with_name(stem.name + ".json").read_text(encoding="utf-8"))
        if said["crc32"] != f"{zlib.crc32(data):08x}":
            raise ValueError("its checksum is another one")
        state = _unpack(said["state"], load(data))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, SafetensorError) as e:
        raise SnapshotDamaged("a saved state cannot be read", where=str(path), why=str(e).partition("\n")[0]) from e
    assert isinstance(state, dict)
    return state


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON, tensors taken out: what JSON has not got is a list that begins with its kind."""
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = copied(value)
        return ["tensor", name]
    if isinstance(value, Mapping):
        return ["dict", [[_pack(k, tensors), _pack(v, tensors)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        return ["list", [_pack(v, tensors) for v in value]]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(value)]
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, inside = value
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in inside}
    if kind == "list":
        return [_unpack(v, tensors) for v in inside]
    if kind == "float":
        return float(inside)
    raise ValueError(f"unknown kind {str(kind)[:40]}")


# ---- snapshots ----------------------------------------------------------------------------------------


def folder_of(checkpoints: Path, step: int) -> Path:
    """The folder of the snapshot at a step."""
    return checkpoints / f"step-{step}"


def step_of(folder: Path) -> int:
    """The step in a snapshot folder's name; -1 if it is none."""
    number = folder.name.removeprefix("step-").removesuffix(_OLD)
    return int(number) if folder.name.startswith("step-") and number.isdigit() else -1


def begin(checkpoints: Path, step: int) -> Path:
    """An empty folder for a snapshot. One of the same step that is finished is set aside until this one is, too."""
    folder = folder_of(checkpoints, step)
    if (folder / MANIFEST).exists():
        aside = folder.with_name(folder.name + _OLD)
        _remove(aside)
        os.replace(folder, aside)
    _remove(folder)
    folder.mkdir(parents=True)
    return folder


def put_back(folder: Path) -> Path:
    """Give a snapshot that was set aside its own name again: what was to take its place was never finished."""
    own = folder_of(folder.parent, step_of(folder))
    if folder != own:
        _remove(own)
        os.replace(folder, own)
    return own


def set_aside(checkpoints: Path, after_step: int) -> None:
    """Snapshots of later steps are of a past that a resumed run does not have: they do not count any more."""
    for folder in _all(checkpoints):
        if step_of(folder) > after_step:
            aside = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder, aside)


def finish(folder: Path, meta: Mapping[str, Any]) -> int:
    """Make everything in the folder count: checksums, to the disk, manifest. Returns the bytes of all files.

    Raises:
        OSError: the disk does not take it; the snapshot does not count.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    body = {**meta, "files": files}
    for path in (p for p in folder.rglob("*") if p.is_dir()):
        _sync(path)
    manifest, temporary = folder / MANIFEST, folder / (MANIFEST + ".tmp")
    try:
        temporary.write_text(_manifest_text({"schema_version": SCHEMA_VERSION, **body, "crc32": _crc_of(body)}))
        _sync(temporary)
        os.replace(temporary, manifest)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    for path in (folder, folder.parent):
        _sync(path)
    return sum(int(f["bytes"]) for f in files.values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest.

    Raises:
        SnapshotDamaged: there is none, or it is not as it was written.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except FileNotFoundError:
        raise SnapshotDamaged("the snapshot has no manifest: it was not finished", where=str(folder)) from None
    except (OSError, ValueError) as error:
        raise SnapshotDamaged("the manifest cannot be read", where=str(path), why=str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        raise SnapshotDamaged("the manifest is of another version", where=str(path))
    body = {key: value for key, value in manifest.items() if key not in ("schema_version", "crc32")}
    if _crc_of(body) != manifest.get("crc32") or _manifest_text(manifest) != text:
        raise SnapshotDamaged("the manifest has changed", where=str(path), why="its checksum is another one")
    return manifest


def verify(folder: Path) -> str:
    """What is wrong with a snapshot, in a sentence; empty if it is whole."""
    try:
        manifest = read_manifest(folder)
    except SnapshotDamaged as error:
        return f"{error.where}: {error.what}" + (f" ({error.why})" if error.why else "")
    for name, expected in manifest["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path}: {size} bytes instead of {expected['bytes']}"
            if _crc32(path) != expected["crc32"]:
                return f"{path}: its checksum is another one"
        except OSError as error:
            return f"{path}: {error.strerror or error}"
    return ""


def newest_good(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest whole snapshot, and a sentence for each newer one that is not."""
    problems: list[str] = []
    for folder in reversed(_all(checkpoints)):
        problem = verify(folder)
        if not problem:
            return folder, problems
        problems.append(problem)
    return None, problems


def retain(checkpoints: Path, keep: int) -> None:
    """Remove what is older than the newest `keep` whole snapshots. Damaged and unfinished ones count for nothing."""
    kept = 0
    for folder in reversed(_all(checkpoints)):
        if kept >= keep:
            _remove(folder)
        elif not verify(folder):
            kept += 1


def _all(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    found = [f for f in checkpoints.iterdir() if f.is_dir() and step_of(f) >= 0]
    return sorted(found, key=lambda f: (step_of(f), not f.name.endswith(_OLD)))


def _remove(folder: Path) -> None:
    """The manifest goes first, so that half a folder never counts."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _crc32(path: Path) -> str:
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            crc = zlib.crc32(data, crc)
    return f"{crc:08x}"


def _manifest_text(manifest: Mapping[str, Any]) -> str:
    """The one way in which a manifest is written, so that any other text is a damaged one."""
    return json.dumps(manifest, indent=1, allow_nan=False) + "\n"


def _crc_of(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
