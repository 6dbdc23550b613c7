"""What of the syncer outlives its process: Theta, the outer state and the core's dump, in RUN/syncer/.

    fragment-003-s1.safetensors    theta and outer state (float32) of a fragment at some version: a *slot*
    core.json                      core.recovery.dump and what else the syncer goes on from, with the slot of each
                                   version that holds; renamed into place at each Persist

Theory: a merge is written to a slot that core.json does not name, and then core.json is made to name it. So whenever
the process is killed, core.json and the slots that it names belong together. Slots are written over in place, since
that is twenty times faster than a new file (blocks and pages are there already). They reach the page cache, not the
disk: they outlive the process, and a snapshot (run.snapshots) outlives the machine. A snapshot pins the slots that hold
at the cut, and copies them in the background. Version 0 has no slot: it is the initial model.

A disk that takes nothing does not stop the run: it is said, the fragments that are missing are written with the next
merge, and until then a syncer that is killed goes back to what was kept last.
Owns: RUN/syncer/. Called by: run.syncer_main (write: the merge worker; copy: a snapshot's thread; the rest: the actor),
run.resume (adopt).
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco_cli.run.buffers import view
from diloco_cli.run.global_model import GlobalModel
from diloco_cli.run.snapshots import SnapshotDamaged

CORE = "core.json"
KEPT_BEFORE_NEWEST = 1
"""Older versions of a fragment that are kept, since learners may still start from them."""


def slot_file(fragment: int, slot: int) -> str:
    """The name of a slot's file."""
    return f"fragment-{fragment:03d}-s{slot}.safetensors"


def version_file(fragment: int, version: int) -> str:
    """The name of a fragment's file in a snapshot."""
    return f"fragment-{fragment:03d}-v{version}.safetensors"


class Durable:
    """The files of one syncer. `failed`: why something is not on the disk; empty if all is."""

    def __init__(self, folder: Path, num_fragments: int) -> None:
        self.folder = folder
        self.failed = ""
        self._slots: list[dict[int, int]] = [{} for _ in range(num_fragments)]
        """Per fragment: version -> slot, of what is on the disk."""
        self._committed: list[set[int]] = [set() for _ in range(num_fragments)]
        """Per fragment: slots that core.json names."""
        self._pinned: list[list[int]] = [[] for _ in range(num_fragments)]
        """Per fragment: slots that a snapshot still copies."""
        self._lock = threading.Lock()

    # ---- writing -------------------------------------------------------------------------------------

    def write(self, fragment: int, version: int, model: GlobalModel) -> None:
        """Write a fragment as it is now. For the merge worker, which alone changes it."""
        slot = self._free_slot(fragment)
        theta, outer = model.values(fragment)
        try:
            self.folder.mkdir(exist_ok=True)
            _write_over(self.folder / slot_file(fragment, slot), {"theta": theta, "outer": outer})
        except OSError as error:
            self._fail(error)
            return
        with self._lock:
            self._slots[fragment][version] = slot

    def _free_slot(self, fragment: int) -> int:
        """A slot that nobody needs any more, whose version is then forgotten."""
        with self._lock:
            taken = self._committed[fragment] | set(self._pinned[fragment])
            slot = next(s for s in range(len(taken) + 1) if s not in taken)
            self._slots[fragment] = {v: s for v, s in self._slots[fragment].items() if s != slot}
            return slot

    def missing(self, versions: list[int]) -> list[int]:
        """Fragments whose newest version is not on the disk."""
        with self._lock:
            return [f for f, version in enumerate(versions) if version and version not in self._slots[f]]

    def commit(self, saved: Mapping[str, Any]) -> bool:
        """Make `saved` (with core.recovery's dump under "core") what a restarted syncer goes on from."""
        versions = saved["core"]["versions"]
        if self.missing(versions):
            return False
        with self._lock:
            kept = [
                {v: s for v, s in slots.items() if newest - KEPT_BEFORE_NEWEST <= v <= newest}
                for slots, newest in zip(self._slots, versions, strict=True)
            ]
        path = self.folder / CORE
        temporary = path.with_name(CORE + ".tmp")
        try:
            self.folder.mkdir(exist_ok=True)
            temporary.write_text(json.dumps({**saved, "slots": kept}, allow_nan=False), encoding="ascii")
            os.replace(temporary, path)
        except OSError as error:
            self._fail(error)
            return False
        with self._lock:
            self._committed = [set(slots.values()) for slots in kept]
        self.failed = ""
        return True

    def _fail(self, error: OSError) -> None:
        self.failed = f"{self.folder}: {error.strerror or error}"

    # ---- snapshots -----------------------------------------------------------------------------------

    def pin(self, versions: list[int]) -> dict[tuple[int, int], int]:
        """Keep what these versions are in until copy() is over: (fragment, version) -> slot.

        Raises:
            OSError: something is not on the disk.
        """
        if missing := self.missing(versions):
            raise OSError(f"fragment {missing[0]} is not on the disk ({self.failed})")
        with self._lock:
            pinned = {(f, v): self._slots[f][v] for f, v in enumerate(versions) if v}
            for (f, _), slot in pinned.items():
                self._pinned[f].append(slot)
            return pinned

    def copy(self, pinned: Mapping[tuple[int, int], int], folder: Path) -> None:
        """Copy pinned slots into a snapshot's folder, and let them go. Any thread.

        Raises:
            OSError: the disk does not take it.
        """
        try:
            (folder / "syncer").mkdir(exist_ok=True)
            for (f, version), slot in pinned.items():
                shutil.copyfile(self.folder / slot_file(f, slot), folder / "syncer" / version_file(f, version))
        finally:
            with self._lock:
                for (f, _), slot in pinned.items():
                    self._pinned[f].remove(slot)

    # ---- reading -------------------------------------------------------------------------------------

    def read(self) -> dict[str, Any] | None:
        """What was committed last; None if nothing ever was.

        Raises:
            SnapshotDamaged: it cannot be read.
        """
        path = self.folder / CORE
        try:
            saved = json.loads(path.read_text(encoding="ascii"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise SnapshotDamaged("the syncer's state cannot be read", where=str(path), why=str(error)) from error
        assert isinstance(saved, dict)
        return saved

    def load(self, saved: Mapping[str, Any], model: GlobalModel) -> None:
        """Put the fragments at the versions that `read` has told of, and the ones before, into the model.

        Raises:
            SnapshotDamaged: a slot is missing or not whole.
        """
        for f, slots in enumerate(saved["slots"]):
            for version in sorted(map(int, slots)):
                slot = slots[str(version)]
                self._load_one(f, version, slot, model)
                self._slots[f][version] = slot
                self._committed[f].add(slot)

    def _load_one(self, fragment: int, version: int, slot: int, model: GlobalModel) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.folder / slot_file(fragment, slot)
        try:
            tensors: dict[str, Tensor] = load_file(path)
            model.load(fragment, version, tensors["theta"], tensors["outer"])
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise SnapshotDamaged("a fragment cannot be read", where=str(path), why=str(error)) from error


def adopt(folder: Path, snapshot: Path) -> None:
    """Make a snapshot's part of the syncer what a syncer in `folder` goes on from."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    saved = json.loads((snapshot / CORE).read_text(encoding="ascii"))
    versions = saved["core"]["versions"]
    for f, version in enumerate(versions):
        if version:
            shutil.copyfile(snapshot / "syncer" / version_file(f, version), folder / slot_file(f, 0))
    slots = [{version: 0} if version else {} for version in versions]
    (folder / CORE).write_text(json.dumps({**saved, "slots": slots}), encoding="ascii")


def _write_over(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write float32 vectors as a safetensors file, over what is there: a JSON header and the bytes of each.

    safetensors' own writer makes a new file each time, and a copy of everything before that.
    """
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        place = _write_all(descriptor, len(head).to_bytes(8, "little") + head, 0)
        for tensor in tensors.values():
            place = _write_all(descriptor, view(tensor.view(torch.uint8)), place)
        os.ftruncate(descriptor, place)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes | memoryview, place: int) -> int:
    """Write at `place`, however many calls it takes; returns the place behind it."""
    rest = memoryview(data)
    while len(rest):
        written = os.pwrite(descriptor, rest[: 1 << 30], place)
        rest, place = rest[written:], place + written
    return place
