"""JSON lines: how metrics.jsonl and events.jsonl are written, read whole, and followed.

Owns: the one way in which a record becomes a line and a line becomes a record. Knows nothing about what
the records mean (observe.dashboard folds them) and must not import rich, torch or `run`.
Called by: run (the syncer writes, the launcher follows), cli (status, watch, report read).

A line is written with one write() on an O_APPEND descriptor, so that several threads and processes may
append to one file without mixing their lines. A full disk must not stop a training run: the writer keeps
the lines it could not write (a bounded number), says so in `failed`, and tries again at the next write.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

PENDING_LINES_MAX = 10_000
"""Lines kept in memory while the disk takes none; the oldest go first beyond that."""

LINE_BYTES_MAX = 16 * 2**20
"""A reader gives up on a line longer than this (it is not one of ours)."""

_READ_BYTES = 2**20


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities become null, unknown objects their text."""
    if value is None or isinstance(value, str | bool | int):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, Enum):
        return _plain(value.value)
    item = getattr(value, "item", None)  # numpy scalars, 0-d tensors
    if callable(item) and getattr(value, "ndim", 0) == 0:
        return _plain(item())
    return str(value)


def to_line(record: Mapping[str, Any]) -> bytes:
    """One record as one line, newline included. ASCII only, so that no text can hold a line break of its own."""
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError):  # NaN, keys of other kinds: seldom, and three times slower
        text = json.dumps(_plain(record), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line, or None if it is no JSON object (NaN and infinities read as null)."""
    try:
        record = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class JsonlWriter:
    """Appends records to a file; safe between threads, and between processes that append to the same file.

    Raises OSError when it is made and the file cannot be opened; never afterwards.

    Attributes:
        failed: why the latest write did not reach the disk, in words; None while all is written.
        num_failures: writes that failed, ever.
        lost_lines: records given up because too many were waiting.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.failed: str | None = None
        self.num_failures = 0
        self.lost_lines = 0
        self._pending: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not self._ends_with_newline():  # a crash left half a line: end it, or it would spoil the next one
            self._pending.append(b"\n")

    def _ends_with_newline(self) -> bool:
        try:
            with open(self.path, "rb") as file:
                if not os.path.isfile(self.path) or file.seek(0, os.SEEK_END) == 0:
                    return True
                file.seek(-1, os.SEEK_END)
                return file.read(1) == b"\n"
        except OSError:
            return True

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. A record that JSON cannot hold is a bug of ours and raises."""
        line = to_line(record)
        with self._lock:
            self._pending.append(line)
            self._flush()
            while len(self._pending) > PENDING_LINES_MAX:
                self._pending.popleft()
                self.lost_lines += 1

    def _flush(self) -> None:
        """Write what waits, oldest first, until the disk refuses. The lock is held."""
        while self._pending:
            line = self._pending[0]
            try:
                if self._fd < 0:
                    raise OSError("the file is closed")
                written = os.write(self._fd, line)
            except OSError as error:
                self._fail(error.strerror or str(error))
                return
            if written < len(line):
                # Half a line is on the disk. It is ended (as garbage) and then written again as a whole.
                self._pending[0] = line if line.startswith(b"\n") else b"\n" + line
                self._fail("the disk took only part of a line")
                return
            self._pending.popleft()
        self.failed = None

    def _fail(self, why: str) -> None:
        self.failed = f"{self.path}: {why}"
        self.num_failures += 1

    def close(self) -> None:
        """Try once more to write what waits, then close. Harmless when called again."""
        with self._lock:
            if self._fd < 0:
                return
            self._flush()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tail:
    """Follows a JSON-lines file that others append to.

    Attributes:
        garbage_lines: whole lines that held no JSON object, so far.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.garbage_lines = 0
        self._offset = 0
        self._inode: int | None = None
        self._partial = bytearray()
        self._overlong = False  # inside a line beyond LINE_BYTES_MAX: skip to its end

    def poll(self) -> list[dict[str, Any]]:
        """The records whose lines were completed since the last call; none while the file does not exist."""
        records: list[dict[str, Any]] = []
        try:
            with open(self.path, "rb") as file:
                self._start_over_if_replaced(os.fstat(file.fileno()))
                file.seek(self._offset)
                while chunk := file.read(_READ_BYTES):
                    self._offset += len(chunk)
                    self._take(chunk, records)
        except OSError:  # not there yet, or not readable for a moment: the next call may find it
            pass
        return records

    def _start_over_if_replaced(self, status: os.stat_result) -> None:
        if self._inode is not None and (status.st_ino != self._inode or status.st_size < self._offset):
            self._offset = 0
            self._partial.clear()
            self._overlong = False
        self._inode = status.st_ino

    def _take(self, chunk: bytes, records: list[dict[str, Any]]) -> None:
        """Cut a chunk into lines; what comes after the last newline waits for the next chunk."""
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            if self._partial:
                line = bytes(self._partial) + line
                self._partial.clear()
            if self._overlong:
                self._overlong = False
                self.garbage_lines += 1
            elif line.strip():
                record = _parse(line)
                if record is None:
                    self.garbage_lines += 1
                else:
                    records.append(record)
        self._partial += rest
        if self._overlong or len(self._partial) > LINE_BYTES_MAX:
            self._overlong = True
            self._partial.clear()

    @property
    def partial(self) -> bytes:
        """What follows the last newline."""
        return bytes(self._partial)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a file. A torn last line and lines that hold no JSON object are skipped.

    Raises:
        FileNotFoundError: there is no such file.
    """
    os.stat(path)
    tail = Tail(path)
    records = tail.poll()
    last = _parse(tail.partial)  # a last line without newline counts if it is whole
    return records if last is None else [*records, last]
