"""Your own model, as `model.entry_point` wants it: a function that returns a torch module.

The module maps tokens [batch, time] (int64) to logits [batch, time, vocabulary] of the token that follows each.
An argument called `vocab_size` is filled in from the tokenizer; the others come from `model.entry_args`.
This one is a GRU, to show that nothing asks for a transformer. Copy the file and change it.
Called by: recipe bring-your-own-model.
"""

from __future__ import annotations

from torch import Tensor, nn


class RecurrentLM(nn.Module):
    """Embedding, GRU layers with a residual around them, output head."""

    def __init__(self, vocab_size: int, dim: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.recurrent = nn.GRU(dim, dim, num_layers, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] to logits [B, T, V]."""
        x = self.embedding(tokens)
        hidden, _ = self.recurrent(x)
        logits: Tensor = self.head(self.norm(x + hidden))
        return logits


def build(vocab_size: int, dim: int = 128, num_layers: int = 1) -> nn.Module:
    """The model with its random start; the seed is set by the program."""
    return RecurrentLM(vocab_size, dim, num_layers)
