"""What of the syncer outlives its process: Theta, the outer state and the core's dump, in RUN/syncer/.

    fragment-003-v17.safetensors   theta and outer state (float32) of a fragment at a version: written after its merge
    core.json                      core.recovery.dump and what else the syncer goes on from: renamed into place at each
                                   Persist, which makes the versions that it names the ones that hold

Theory: a fragment's file is there before the core.json that names it, and stays until one names its successor's
successor. So whenever the process is killed, core.json and the files that it names belong together. They reach the
page cache, not the disk: they outlive the process, and a snapshot (run.snapshots) outlives the machine. A snapshot is a
set of hard links to these files, made in an instant between two merges. Version 0 has no file: it is the initial model.

A disk that takes nothing does not stop the run: it is said, the files that are missing are written with the next merge,
and until then a syncer that is killed goes back to what was kept last.
Owns: RUN/syncer/. Called by: run.syncer_main (write: the merge worker; the rest: the actor), cli.resume.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco_cli.run.global_model import GlobalModel
from diloco_cli.run.snapshots import SnapshotDamaged

CORE = "core.json"
KEPT_BEFORE_NEWEST = 1
"""Older versions of a fragment that are kept, since learners may still start from them."""


def fragment_file(fragment: int, version: int) -> str:
    """The name of a fragment's file."""
    return f"fragment-{fragment:03d}-v{version}.safetensors"


class Durable:
    """The files of one syncer. `failed`: why something is not on the disk; empty if all is."""

    def __init__(self, folder: Path, num_fragments: int) -> None:
        self.folder = folder
        self.failed = ""
        self._on_disk: list[set[int]] = [{0} for _ in range(num_fragments)]
        self._lock = threading.Lock()

    # ---- writing -------------------------------------------------------------------------------------

    def write(self, fragment: int, version: int, model: GlobalModel) -> None:
        """Write a fragment as it is now. For the merge worker, which alone changes it."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self.folder / fragment_file(fragment, version)
        temporary = path.with_name(path.name + ".tmp")
        theta, outer = model.values(fragment)
        try:
            self.folder.mkdir(exist_ok=True)
            save_file({"theta": theta, "outer": outer}, temporary)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            self._fail(error)
            return
        with self._lock:
            self._on_disk[fragment].add(version)

    def missing(self, versions: list[int]) -> list[int]:
        """Fragments whose newest version is not on the disk."""
        with self._lock:
            return [f for f, version in enumerate(versions) if version not in self._on_disk[f]]

    def commit(self, saved: Mapping[str, Any]) -> bool:
        """Make `saved` (with core.recovery's dump under "core") what a restarted syncer goes on from."""
        versions = saved["core"]["versions"]
        if self.missing(versions):
            return False
        path = self.folder / CORE
        temporary = path.with_name(CORE + ".tmp")
        try:
            self.folder.mkdir(exist_ok=True)
            temporary.write_text(json.dumps(saved, allow_nan=False), encoding="ascii")
            os.replace(temporary, path)
            self._remove_old(versions)
        except OSError as error:
            self._fail(error)
            return False
        self.failed = ""
        return True

    def _remove_old(self, versions: list[int]) -> None:
        for f, newest in enumerate(versions):
            with self._lock:
                old = {v for v in self._on_disk[f] if 0 < v < newest - KEPT_BEFORE_NEWEST}
                self._on_disk[f] -= old
            for version in old:
                (self.folder / fragment_file(f, version)).unlink(missing_ok=True)

    def _fail(self, error: Exception) -> None:
        self.failed = f"{self.folder}: {getattr(error, 'strerror', None) or error}"

    def cut(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Put what `saved` names into a snapshot's folder, as links.

        Raises:
            OSError: the disk does not take it, or has not taken a fragment before.
        """
        versions = saved["core"]["versions"]
        if missing := self.missing(versions):
            raise OSError(f"fragment {missing[0]} is not on the disk ({self.failed})")
        (folder / "syncer").mkdir()
        for f, version in enumerate(versions):
            if version:
                name = fragment_file(f, version)
                os.link(self.folder / name, folder / "syncer" / name)
        (folder / CORE).write_text(json.dumps(saved, allow_nan=False), encoding="ascii")

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

    def load(self, versions: list[int], model: GlobalModel) -> None:
        """Put the fragments at these versions, and the ones before where they are kept, into the model.

        Raises:
            SnapshotDamaged: a file is missing or not whole.
        """
        for path in self.folder.glob("*.tmp"):
            path.unlink(missing_ok=True)
        for f, newest in enumerate(versions):
            for version in range(max(0, newest - KEPT_BEFORE_NEWEST), newest + 1):
                if version == newest or (self.folder / fragment_file(f, version)).exists():
                    self._load_one(f, version, model)
                    self._on_disk[f].add(version)
        named = {fragment_file(f, v) for f, known in enumerate(self._on_disk) for v in known}
        for path in self.folder.glob("fragment-*.safetensors"):
            if path.name not in named:
                path.unlink(missing_ok=True)  # of a merge that was never committed

    def _load_one(self, fragment: int, version: int, model: GlobalModel) -> None:
        if version == 0:
            return
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.folder / fragment_file(fragment, version)
        try:
            tensors: dict[str, Tensor] = load_file(path)
            model.load(fragment, version, tensors["theta"], tensors["outer"])
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise SnapshotDamaged("a fragment cannot be read", where=str(path), why=str(error)) from error
