"""The corpus as token streams, and who reads which part of it.

Owns: joining documents to streams, cutting windows, the shard of every learner, the cursor that walks through it,
and the bigram baseline. Must not know of models, optimizers or the network.
Called by: train.loop (batches, validation), run.launcher (sizes for the plan), `diloco evaluate`.

How text becomes windows:
    documents (files, JSON lines, rows) in the order of their names; behind each the tokenizer's separator (NUL for
    bytes), all joined to one stream. Token files (.bin) are joined as they are. Window w of the stream predicts tokens
    w*L+1 .. (w+1)*L from the token before each, so every token but the first is predicted exactly once per epoch;
    the last window is padded with target -100 (input 0). The number w is the window's id, as `ids` of a batch has it.
How validation is held out:
    whole documents, in the order of a hash of their names, until validation_fraction of the tokens is reached; where
    documents are too few or too large for that, the last fraction of every document. Two streams, no shared token.
How shards are made:
    learner i of M owns the i-th of M equal slices of the window numbers; a share (1 - heterogeneity) of the windows,
    drawn by seed over the whole corpus, is permuted among the places that hold them. So shards are disjoint and
    together complete whatever the heterogeneity. Each epoch walks the shard in a new order; an island's batch is the
    next `batch` windows, split evenly over its ranks. Random numbers are raw Philox output, which no numpy release
    changes.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco_cli.config.schema import DataConfig, DataKind
from diloco_cli.errors import ConfigError
from diloco_cli.train.documents import Document, Reader, holdout_cuts, resolve_kind
from diloco_cli.train.tokenizer import Tokenizer, Tokens, load_tokenizer

IGNORE = -100
"""Target of padding, as torch's cross_entropy ignores it."""
SCAN_LIMIT_BYTES = 1 << 30
"""Token files up to this size are checked for ids out of range when opened; larger ones as they are read."""
BIGRAM_LIMIT_TOKENS = 1 << 27


class TokenStream:
    """Tokens of many documents behind one another, in memory or memory-mapped; read by window.

    Attributes:
        names: of the documents, in order. num_tokens: length of the whole.
    """

    def __init__(self, documents: list[Document], *, vocab_size: int | None = None, offsets: list[int] | None = None):
        """`vocab_size`: check every id that is read; `offsets`: where each document starts in its file, in tokens."""
        self.names = [d.name for d in documents]
        self.segments = [d.tokens for d in documents]
        self._paths = [d.path for d in documents]
        self._offsets = offsets or [0] * len(documents)
        self._vocab_size = vocab_size
        self._mapped = [_is_mapped(s) for s in self.segments]
        self._starts = np.concatenate(([0], np.cumsum([len(s) for s in self.segments], dtype=np.int64)))
        self.num_tokens = int(self._starts[-1])

    def num_windows(self, seq_len: int) -> int:
        """Windows of seq_len predictions each, the last one possibly padded."""
        return max(0, math.ceil((self.num_tokens - 1) / seq_len))

    def read(self, start: int, out: np.ndarray[Any, Any]) -> int:
        """Copy tokens from `start` into out [n]; how many there were before the end of the stream."""
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        done, stop = 0, min(start + len(out), self.num_tokens)
        while start + done < stop:
            offset = start + done - int(self._starts[index])
            if self._mapped[index]:
                self._check_mapped(index, offset + len(out) - done)
            piece = self.segments[index][offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            if self._vocab_size is not None and len(piece) and piece.max() >= self._vocab_size:
                self._refuse(index, offset, piece)
            done += len(piece)
            index += 1
        return done

    def windows(self, ids: Iterable[int], seq_len: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets int64 [n, seq_len] of the windows, padded with 0 and IGNORE."""
        ids = list(ids)
        rows = np.zeros((len(ids), seq_len + 1), dtype=np.int64)
        short = []
        for row, window in zip(rows, ids, strict=True):
            count = self.read(window * seq_len, row)
            if count <= seq_len:
                short.append((row, count))
        tokens = torch.from_numpy(rows[:, :-1]).clone(memory_format=torch.contiguous_format)
        for row, count in short:
            row[count:] = IGNORE
        return tokens, torch.from_numpy(rows[:, 1:]).contiguous()

    def chunks(self, size: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        """The stream in pieces of up to size + 1 tokens that overlap by one, so that every adjacent pair is in one."""
        for start in range(0, self.num_tokens - 1, size):
            out = np.empty(min(size + 1, self.num_tokens - start), dtype=np.int64)
            self.read(start, out)
            yield out

    def check_range(self) -> None:
        """Read everything once and refuse ids outside the vocabulary, naming file and offset."""
        for index, segment in enumerate(self.segments):
            for offset in range(0, len(segment), 1 << 22):
                piece = segment[offset : offset + (1 << 22)]
                if self._vocab_size is not None and piece.max() >= self._vocab_size:
                    self._refuse(index, offset, piece)

    def _check_mapped(self, index: int, stop: int) -> None:
        """Reading a mapped file beyond its end would kill the process (SIGBUS). A stat costs a microsecond."""
        segment, path = self.segments[index], self._paths[index]
        wanted = (self._offsets[index] + min(stop, len(segment))) * segment.itemsize
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise ConfigError(f"cannot read {path}", where="data.path", why=error.strerror or str(error)) from None
        if size < wanted:
            raise ConfigError(
                f"{path}: the file ends at byte {size}, and is read up to byte {wanted}",
                where="data.path",
                why="it has become shorter since the run began",
            )

    def _refuse(self, index: int, offset: int, piece: Tokens) -> None:
        bad = int(np.argmax(piece >= self._vocab_size))  # type: ignore[operator]
        token = self._offsets[index] + offset + bad
        raise ConfigError(
            f"{self._paths[index]}: token id {int(piece[bad])} at token {token} (byte {token * piece.itemsize}) "
            f"is outside the vocabulary of {self._vocab_size}",
            where="data.path",
            hint="set data.tokenizer to the tokenizer the file was made with, or model.vocab_size, or data.token_dtype",
        )


def _is_mapped(tokens: Tokens) -> bool:
    """Whether an array lies in a mapped file."""
    base: object = tokens
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


@dataclass(frozen=True)
class Corpus:
    """What is trained on and what is held out.

    Attributes:
        vocab_size: every id is below it.
        digest: SHA-256 (hex) over tokenizer, split and tokens (of token files: names, sizes and samples).
        warnings: what a user should know of the text, one sentence each.
    """

    train: TokenStream
    validation: TokenStream
    tokenizer: Tokenizer
    vocab_size: int
    seq_len: int
    digest: str
    warnings: tuple[str, ...] = ()

    @property
    def num_windows(self) -> int:
        """Training windows; their ids are 0..num_windows-1."""
        return self.train.num_windows(self.seq_len)


def build_corpus(cfg: DataConfig, vocab_size: int | None = None) -> Corpus:
    """Read, tokenize and split what `cfg` names; the same on every machine that has the same text.

    Args:
        vocab_size: of the model, where it is set; null: the tokenizer's. Ids of token files must lie below it.
    """
    if cfg.seq_len < 1:
        raise ConfigError(f"data.seq_len={cfg.seq_len} must be at least 1", where="data.seq_len")
    if cfg.validation_path is None and not 0 < cfg.validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction={cfg.validation_fraction} must lie between 0 and 1",
            where="data.validation_fraction",
            hint="0.05, or a data.validation_path",
        )
    tokenizer = load_tokenizer(cfg.tokenizer)
    vocab_size = vocab_size or tokenizer.vocab_size
    kind = resolve_kind(cfg.kind, cfg.path)
    reader = Reader(cfg, tokenizer)
    documents = reader.read(kind, cfg.path, "data.path", excluded=cfg.validation_path)
    if cfg.validation_path is None:
        cuts = holdout_cuts([d.name for d in documents], [len(d.tokens) for d in documents], cfg.validation_fraction)
        held_out = [(d, cut) for d, cut in zip(documents, cuts, strict=True) if cut < len(d.tokens)]
        documents = [d.part(0, cut) for d, cut in zip(documents, cuts, strict=True) if cut]
    else:
        other = resolve_kind(DataKind.auto if kind is DataKind.stdlib else cfg.kind, cfg.validation_path)
        held_out = [(d, 0) for d in reader.read(other, cfg.validation_path, "data.validation_path")]
        kind = DataKind.tokens if DataKind.tokens in (kind, other) else kind
    if kind is DataKind.tokens:
        train = TokenStream(documents, vocab_size=vocab_size)
        tails = [d.part(cut, len(d.tokens)) for d, cut in held_out]
        validation = TokenStream(tails, vocab_size=vocab_size, offsets=[cut for _, cut in held_out])
        if sum(s.nbytes for s in train.segments) <= SCAN_LIMIT_BYTES:
            train.check_range()
            validation.check_range()
    else:
        train = _join(documents, tokenizer)
        validation = _join([d.part(cut, len(d.tokens)) for d, cut in held_out], tokenizer)
    _check_size(train, validation, cfg, kind)
    digest = _digest(train, validation, cfg)
    return Corpus(train, validation, tokenizer, vocab_size, cfg.seq_len, digest, tuple(reader.warnings()))


def _join(documents: list[Document], tokenizer: Tokenizer) -> TokenStream:
    """One array of all documents, the separator behind each."""
    ends = [] if tokenizer.separator is None else [np.array([tokenizer.separator], dtype=tokenizer.dtype)]
    pieces = [piece for document in documents for piece in (document.tokens, *ends)]
    joined = np.concatenate(pieces) if pieces else np.zeros(0, dtype=tokenizer.dtype)
    stream = TokenStream([Document("", "", joined)])
    stream.names = [d.name for d in documents]
    return stream


def _check_size(train: TokenStream, validation: TokenStream, cfg: DataConfig, kind: DataKind) -> None:
    source = cfg.path or kind.value
    if train.num_tokens <= cfg.seq_len:
        raise ConfigError(
            f"{source} has {train.num_tokens} tokens to train on, too few for one window of {cfg.seq_len} + 1",
            where="data.path",
            hint=f"data.seq_len={max(1, (train.num_tokens - 1) // 2)}, or more text",
        )
    if validation.num_tokens < 2:
        raise ConfigError(
            f"{cfg.validation_path or source} leaves {validation.num_tokens} tokens for validation",
            where="data.validation_path" if cfg.validation_path else "data.validation_fraction",
            hint="a larger data.validation_fraction, or more text",
        )


def _digest(train: TokenStream, validation: TokenStream, cfg: DataConfig) -> str:
    hasher = hashlib.sha256(f"{cfg.tokenizer} {len(train.names)}".encode())
    for segment in (*train.segments, *validation.segments):
        hasher.update(f"{segment.dtype} {len(segment)} ".encode())
        # Files larger than memory are told apart by size and by samples from all over.
        step = max(1, len(segment) >> 26)
        hasher.update(np.ascontiguousarray(segment[::step]).data)
    return hasher.hexdigest()


# ---- shards and cursor --------------------------------------------------------------------------


def permutation(size: int, *stream: object) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A permutation of 0..size-1 that depends on the named stream alone, the same under every numpy release."""
    key = int.from_bytes(hashlib.blake2b(repr(stream).encode(), digest_size=16).digest(), "little")
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def shard_windows(
    num_windows: int, learner_index: int, num_learners: int, seed: int, heterogeneity: float
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids of the learner's windows: over all learners disjoint and complete, their numbers differing by one at most."""
    windows = np.arange(num_windows)
    mixed = permutation(num_windows, "shards", seed)[: round((1.0 - heterogeneity) * num_windows)]
    windows[np.sort(mixed)] = mixed
    return windows[num_windows * learner_index // num_learners : num_windows * (learner_index + 1) // num_learners]


class ShardCursor:
    """Walks one rank of one island through the island's shard, for ever, each epoch in a new order.

    The place is one number, the sequences that the island has taken: it is the same on every rank, does not depend on
    the batch, and with the constructor's arguments gives everything that follows.
    """

    def __init__(
        self,
        corpus: Corpus,
        learner_index: int,
        num_learners: int,
        rank: int,
        num_ranks: int,
        batch: int,
        seed: int,
        heterogeneity: float = 0.0,
    ) -> None:
        """`batch`: sequences per call over all ranks of the island; each rank gets batch / num_ranks of them."""
        assert 0 <= learner_index < num_learners, (learner_index, num_learners)
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        if batch < 1 or batch % num_ranks:
            raise ConfigError(
                f"a batch of {batch} sequences does not divide among {num_ranks} ranks",
                where="islands.each.batch",
                hint=f"{max(1, round(batch / num_ranks)) * num_ranks}",
            )
        if not 0.0 <= heterogeneity <= 1.0:
            raise ConfigError(
                f"data.heterogeneity={heterogeneity} must lie between 0 and 1", where="data.heterogeneity"
            )
        if corpus.num_windows < num_learners:
            raise ConfigError(
                f"{corpus.num_windows} windows of {corpus.seq_len} tokens are too few for {num_learners} learners",
                where="data.path",
                hint="more text, a smaller data.seq_len, or fewer islands",
            )
        self.corpus, self.rank, self.per_rank, self.batch = corpus, rank, batch // num_ranks, batch
        self.seed, self.learner_index = seed, learner_index
        self.shard = shard_windows(corpus.num_windows, learner_index, num_learners, seed, heterogeneity)
        self.position = 0
        self._identity = {
            "learner_index": learner_index,
            "num_learners": num_learners,
            "seed": seed,
            "heterogeneity": heterogeneity,
            "digest": corpus.digest,
        }
        self._epoch = -1
        self._order = self.shard

    @property
    def epoch(self) -> int:
        """Times that the island has been through its shard."""
        return self.position // len(self.shard)

    def next_batch(self) -> tuple[Tensor, Tensor, list[str]]:
        """This rank's part of the island's next batch.

        Returns:
            tokens and targets int64 [batch / num_ranks, seq_len], targets IGNORE where padded, and the windows' ids.
        """
        first = self.position + self.rank * self.per_rank
        ids = self._ids(first, first + self.per_rank)
        self.position += self.batch
        tokens, targets = self.corpus.train.windows(ids, self.corpus.seq_len)
        return tokens, targets, [str(i) for i in ids]

    def state_dict(self) -> dict[str, Any]:
        """The place and what it is a place in; JSON-able."""
        return {"position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place; refused if it is one in other data or another shard (the batch may differ)."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise ConfigError(
                    f"the saved data position belongs to {key}={state.get(key)}, this run has {key}={value}",
                    hint="resume with the data, seed and number of islands of the saved run",
                )
        self.position = int(state["position"])

    def _ids(self, start: int, stop: int) -> list[int]:
        """Window ids at places start..stop of the endless walk; a batch may reach into the next epoch."""
        found: list[int] = []
        while start < stop:
            epoch, place = divmod(start, len(self.shard))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = self.shard[permutation(len(self.shard), "epoch", self.seed, self.learner_index, epoch)]
            found += self._order[place : place + stop - start].tolist()
            start += min(stop - start, len(self.shard) - place)
        return found


# ---- validation ---------------------------------------------------------------------------------


def validation_windows(corpus: Corpus, seq_len: int, max_sequences: int | None) -> list[int]:
    """Which validation windows are evaluated: all, or max_sequences spread evenly over the held-out text."""
    total = corpus.validation.num_windows(seq_len)
    count = total if max_sequences is None else min(total, max_sequences)
    return [i * total // count for i in range(count)]


def validation_batches(
    corpus: Corpus, seq_len: int, batch: int, max_sequences: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets int64 [<= batch, seq_len] of the held-out text, the same ones each time."""
    ids = validation_windows(corpus, seq_len, max_sequences)
    for start in range(0, len(ids), batch):
        yield corpus.validation.windows(ids[start : start + batch], seq_len)


def bigram_loss(
    corpus: Corpus, max_vocab: int = 4096, *, seq_len: int | None = None, max_sequences: int | None = None
) -> float | None:
    """Mean nats per predicted token of an add-one smoothed bigram model, on the windows that the model is evaluated on.

    Counted over the training stream (of token files its first BIGRAM_LIMIT_TOKENS). None above max_vocab, where the
    table of vocab_size^2 counts gets too large.
    """
    size = corpus.vocab_size
    if size > max_vocab:
        return None
    counts = np.zeros(size * size, dtype=np.int64)
    seen = 0
    for chunk in corpus.train.chunks(1 << 22):
        pairs = chunk[:-1] * size + chunk[1:]
        counts += np.bincount(pairs, minlength=size * size)
        seen += len(pairs)
        if seen >= BIGRAM_LIMIT_TOKENS:
            break
    totals = counts.reshape(size, size).sum(1)
    nats, tokens = 0.0, 0
    for inputs, targets in validation_batches(corpus, seq_len or corpus.seq_len, 1024, max_sequences):
        real = (targets != IGNORE).numpy()
        before, after = inputs.numpy()[real], targets.numpy()[real]
        nats += float(np.log((totals[before] + size) / (counts[before * size + after] + 1.0)).sum())
        tokens += len(after)
    return nats / tokens
