"""From a model's tensors to P fragments, and when each is due.

Owns: the layout (which rows of which tensor travel in which fragment), its hash, and the schedule.
The layout is a pure function of (tensor inventory, settings): learners and syncer compute it on their own and
compare hashes when they meet. Called by: run (real), sim (virtual), cli (--dry-run).

Rules (algorithm.md, "Fragments"; Decoupled DiLoCo, arXiv 2604.21428; Streaming DiLoCo, 2501.18512):

* balanced: pieces in order of size, largest first, each into the lightest fragment, ties by name. A tensor larger
  than the ideal fragment is cut by rows, and cut again while the largest fragment is over 4/3 of the ideal.
* Embeddings and head get fragments of their own (as long as there are enough fragments).
* strided and sequential deal out whole layers.
* Buffers travel in the fragment of the tensor whose name is closest to theirs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cli.errors import ConfigError

EMBEDDING, HEAD, WEIGHT, BUFFER = "embedding", "head", "weight", "buffer"
LARGEST_OVER_IDEAL = 4 / 3


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model. role: embedding | head | weight | buffer. Tied weights are one tensor."""

    name: str
    shape: tuple[int, ...]
    role: str = WEIGHT

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows along dimension 0; a scalar is one row."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [row_start, row_start + num_rows) of a tensor, at `offset` of its fragment's flat vector."""

    name: str
    role: str
    row_start: int
    num_rows: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class FragmentSpec:
    """One fragment: its slices in the order in which they lie in the flat float32 vector of `numel` elements."""

    fragment: int
    slices: tuple[Slice, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All fragments of a model. `reason` says why there are fewer than `requested`, if so."""

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[FragmentSpec, ...]
    requested: int
    reason: str
    hash: str

    def __len__(self) -> int:
        return len(self.fragments)

    @property
    def numel(self) -> int:
        """Elements of all fragments together."""
        return sum(f.numel for f in self.fragments)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of rows on its way into a fragment."""

    tensor: TensorSpec
    row_start: int
    num_rows: int

    @property
    def numel(self) -> int:
        return self.num_rows * (self.tensor.numel // self.tensor.num_rows) if self.tensor.num_rows else 0

    def halves(self) -> tuple[_Piece, _Piece]:
        half = self.num_rows // 2
        return (
            _Piece(self.tensor, self.row_start, half),
            _Piece(self.tensor, self.row_start + half, self.num_rows - half),
        )


def due_offset_steps(fragment: int, num_fragments: int, inner_steps: int) -> int:
    """Global step, modulo H, at which a fragment is due: p * H / P, so that traffic is even."""
    return fragment * inner_steps // num_fragments


def build_layout(
    tensors: Iterable[TensorSpec],
    *,
    num_fragments: int,
    strategy: str = "balanced",
    min_fragment_bytes: int = 65536,
) -> Layout:
    """Lay a model out in at most `num_fragments` fragments.

    Args:
        tensors: the inventory; names are unique.
        num_fragments: P, as asked for.
        strategy: balanced | strided | sequential.
        min_fragment_bytes: float32 bytes below which a mean fragment is not worth a message; P is cut to respect it.

    Raises:
        ConfigError: a model without parameters.
    """
    assert num_fragments >= 1, num_fragments
    inventory = tuple(sorted(tensors, key=lambda t: t.name))
    names = [t.name for t in inventory]
    assert len(set(names)) == len(names), "tensor names must be unique"
    parameters = [t for t in inventory if t.role != BUFFER and t.numel > 0]
    if not parameters:
        raise ConfigError("the model has no parameters to train", where="model")
    allowed, reason = _allowed_fragments(parameters, num_fragments, strategy, min_fragment_bytes)
    groups = _groups(parameters, allowed)
    bins: list[list[_Piece]] = []
    for group, count in groups:
        bins += _pack(group, count, strategy, ideal=sum(t.numel for t in parameters) / allowed)
    bins = [b for b in bins if b]
    if len(bins) < allowed:
        reason = f"the model's tensors have rows for {len(bins)} fragments"
    _add_buffers(bins, [t for t in inventory if t.role == BUFFER and t.numel > 0])
    fragments = tuple(_fragment(i, pieces) for i, pieces in enumerate(bins))
    return Layout(inventory, fragments, num_fragments, reason, _hash(inventory, fragments))


def fingerprint(layout: Layout) -> dict[str, Any]:
    """What two sides compare to name their first difference: tensors and fragment sizes, JSON-able."""
    return {
        "tensors": [[t.name, list(t.shape), t.role] for t in layout.tensors],
        "fragments": [f.numel for f in layout.fragments],
        "hash": layout.hash,
    }


def first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Name the first difference of two fingerprints in words; empty if there is none."""
    for a, b in zip(ours["tensors"], theirs["tensors"], strict=False):
        if a != b:
            return f"{a[0]} {tuple(a[1])} ({a[2]}) here, {b[0]} {tuple(b[1])} ({b[2]}) there"
    if len(ours["tensors"]) != len(theirs["tensors"]):
        return f"{len(ours['tensors'])} tensors here, {len(theirs['tensors'])} there"
    if ours["fragments"] != theirs["fragments"]:
        return f"{len(ours['fragments'])} fragments here, {len(theirs['fragments'])} there, or other sizes"
    if ours.get("hash") != theirs.get("hash"):
        return "the same tensors in fragments of the same sizes, but dealt out differently (sync.strategy?)"
    return ""


def _allowed_fragments(
    parameters: Sequence[TensorSpec], requested: int, strategy: str, min_fragment_bytes: int
) -> tuple[int, str]:
    """P cut to what the model allows, and why."""
    total_bytes = 4 * sum(t.numel for t in parameters)
    by_bytes = max(1, total_bytes // max(1, min_fragment_bytes))
    own = len({t.role for t in parameters if t.role in (EMBEDDING, HEAD)})
    by_layers = requested
    if strategy != "balanced":
        by_layers = own + max(1, len({_layer(t.name) for t in parameters if t.role == WEIGHT} - {None}))
    allowed = min(requested, by_bytes, by_layers)
    if allowed == requested:
        return allowed, ""
    if by_bytes <= by_layers:
        return allowed, f"{total_bytes} bytes of parameters in fragments of at least {min_fragment_bytes} bytes"
    return allowed, f"the model has layers for {by_layers} fragments ({strategy})"


def _groups(parameters: Sequence[TensorSpec], num_fragments: int) -> list[tuple[list[TensorSpec], int]]:
    """Split into embedding, head and the rest, with the number of fragments of each.

    Each group gets one, and then one after the other goes to the group with the largest mean fragment, which makes
    the largest mean as small as it can be. With fewer fragments than groups, all share.
    """
    groups = [[t for t in parameters if t.role == role] for role in (EMBEDDING, HEAD, WEIGHT)]
    groups = [g for g in groups if g]
    if num_fragments < len(groups):
        return [(list(parameters), num_fragments)]
    sizes = [sum(t.numel for t in g) for g in groups]
    counts = [1] * len(groups)
    for _ in range(num_fragments - len(groups)):
        counts[max(range(len(groups)), key=lambda i: sizes[i] / counts[i])] += 1
    return list(zip(groups, counts, strict=True))


def _pack(group: Sequence[TensorSpec], count: int, strategy: str, ideal: float) -> list[list[_Piece]]:
    """Deal one group's tensors into `count` bins."""
    pieces = [_Piece(t, 0, t.num_rows) for t in group]
    if strategy == "balanced" or any(t.role != WEIGHT for t in group):
        return _pack_balanced(pieces, count, ideal)
    # What belongs to no layer (the last norm) goes with the last one.
    last = max((n for t in group if (n := _layer(t.name)) is not None), default=0)
    layer_of = {t.name: last if (n := _layer(t.name)) is None else n for t in group}
    layers = sorted(set(layer_of.values()))
    place = {
        layer: (i % count if strategy == "strided" else i * count // len(layers)) for i, layer in enumerate(layers)
    }
    bins: list[list[_Piece]] = [[] for _ in range(count)]
    for piece in pieces:
        bins[place[layer_of[piece.tensor.name]]].append(piece)
    return bins


def _pack_balanced(pieces: list[_Piece], count: int, ideal: float) -> list[list[_Piece]]:
    """Largest first into the lightest; cut the largest bin's largest piece until it fits within 4/3 of the ideal.

    `ideal` is the whole model's; a group whose own mean is above it can only come close to that mean.
    """
    work = list(pieces)
    mean = _load(pieces) / count
    limit = max(LARGEST_OVER_IDEAL * ideal, 1.1 * mean)
    while True:
        oversized = [p for p in work if p.numel > max(ideal, mean) and p.num_rows > 1]
        if not oversized:
            bins = _largest_first(work, count)
            heaviest = max(bins, key=_load)
            if _load(heaviest) <= limit:
                return bins
            oversized = sorted((p for p in heaviest if p.num_rows > 1), key=_order)[:1]
            # Cutting below an eighth of the ideal buys balance with more slices than it is worth.
            if not oversized or oversized[0].numel < ideal / 8:
                return bins
        for piece in oversized:
            work.remove(piece)
            work.extend(piece.halves())


def _largest_first(pieces: Sequence[_Piece], count: int) -> list[list[_Piece]]:
    bins: list[list[_Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=_order):
        lightest = min(range(count), key=lambda i: (loads[i], i))
        bins[lightest].append(piece)
        loads[lightest] += piece.numel
    return bins


def _order(piece: _Piece) -> tuple[int, str, int]:
    return (-piece.numel, piece.tensor.name, piece.row_start)


def _load(pieces: Sequence[_Piece]) -> int:
    return sum(p.numel for p in pieces)


def _layer(name: str) -> int | None:
    """The layer a tensor belongs to, from the first number in its dotted name; None if it has none."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found.group(1)) if found else None


def _add_buffers(bins: list[list[_Piece]], buffers: Sequence[TensorSpec]) -> None:
    """Put each buffer beside the tensor with the longest common beginning of the dotted name."""

    def closeness(a: str, b: str) -> int:
        common = 0
        for x, y in zip(a.split("."), b.split("."), strict=False):
            if x != y:
                break
            common += 1
        return common

    homes = [(i, piece.tensor.name) for i, pieces in enumerate(bins) for piece in pieces]
    for buffer in buffers:
        home = max(homes, key=lambda h: (closeness(buffer.name, h[1]), -h[0]))[0]
        bins[home].append(_Piece(buffer, 0, buffer.num_rows))


def _fragment(index: int, pieces: Sequence[_Piece]) -> FragmentSpec:
    slices, offset = [], 0
    for piece in sorted(pieces, key=lambda p: (p.tensor.name, p.row_start)):
        slices.append(Slice(piece.tensor.name, piece.tensor.role, piece.row_start, piece.num_rows, piece.numel, offset))
        offset += piece.numel
    return FragmentSpec(index, tuple(slices), offset)


def _hash(inventory: Sequence[TensorSpec], fragments: Sequence[FragmentSpec]) -> str:
    plain = {
        "tensors": [[t.name, list(t.shape), t.role] for t in inventory],
        "fragments": [[[s.name, s.row_start, s.num_rows, s.offset] for s in f.slices] for f in fragments],
    }
    return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()
