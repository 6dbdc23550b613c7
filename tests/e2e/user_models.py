"""Models of users, for the tests: one that is well, one that goes bad on demand, one that can not be built."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    """Embedding, one hidden layer, logits. `poison`: a buffer that turns NaN after so many forward passes."""

    def __init__(self, vocab_size: int, dim: int = 16, poison_after: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.hidden = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, vocab_size)
        self.register_buffer("marker", torch.zeros(4))
        self.poison_after = poison_after
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.poison_after is not None and self.calls > self.poison_after:
            self.marker.fill_(float("nan"))
        return self.out(torch.tanh(self.hidden(self.embed(tokens))))


def well() -> nn.Module:
    return Tiny(256)


def poisoned() -> nn.Module:
    """NaN in a buffer after 10 steps, in the island whose environment says so."""
    return Tiny(256, poison_after=10 if os.environ.get("POISON") else None)


def broken() -> nn.Module:
    raise RuntimeError("this model needs a left-handed optimizer")


def broken_at_the_island() -> nn.Module:
    """Builds at the syncer, and only there: the learners' processes have RANK."""
    if "RANK" in os.environ:
        raise RuntimeError("this model needs a left-handed optimizer")
    return Tiny(256)


def killed_at_each_start() -> nn.Module:
    """A process that dies by itself, without a word, in the islands whose environment says so."""
    if os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    return Tiny(256)
