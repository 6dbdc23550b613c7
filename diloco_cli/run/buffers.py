"""Byte buffers for payloads, used again: a fresh 64 MB costs 16 ms of page faults, a kept one nothing.

Called by: run.syncer_main and run.learner_link. Thread-safe.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class BufferPool:
    """uint8 tensors by size. At most `max_kept` of each size are kept for later; more are let go."""

    def __init__(self, max_kept: int = 4) -> None:
        self._max_kept = max_kept
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """A uint8 tensor of exactly this size, with anything in it."""
        with self._lock:
            free = self._free.get(num_bytes)
            if free:
                return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Hand a buffer back. Nobody may use it any more."""
        with self._lock:
            free = self._free.setdefault(buffer.numel(), [])
            if len(free) < self._max_kept:
                free.append(buffer)


def view(buffer: Tensor) -> memoryview:
    """The buffer's memory, for sockets."""
    array: Any = buffer.numpy()
    return memoryview(array)
