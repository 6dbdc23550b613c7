"""The global parameters Theta, the outer state, and contributions in memory, as the syncer process holds them.

Owns: one flat float32 vector of Theta and of the outer state per fragment, the encoded copies that learners get, and
received payloads by handle. Decides nothing. Called by: run.syncer_main (actor and merge worker), run.peers.

Memory: 2 float32 models (Theta, outer state), 1 to KEPT_VERSIONS models in the wire type of the broadcast, and
the contributions of the rounds under way.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_cli.config.schema import Anchor, Config, MergeRule, OuterOptimizerKind
from diloco_cli.core.fragments import BUFFER as BUFFER_ROLE
from diloco_cli.core.fragments import WEIGHT, FragmentSpec, Layout, Slice
from diloco_cli.core.merge import AVERAGE, BUFFER, RDA, MergeInput, Segment, merge
from diloco_cli.core.types import Contribution
from diloco_cli.run.buffers import BufferPool, view
from diloco_cli.run.settings import model_layout
from diloco_cli.wire.codecs import DRIFT_WIRES, decode, encode, encoded_bytes

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def segments(fragment: FragmentSpec, rule: MergeRule) -> list[Segment]:
    """The merge rule of each tensor: rda for weights if asked for, the average for embeddings and head."""
    rules = {BUFFER_ROLE: BUFFER, WEIGHT: RDA if rule is MergeRule.rda else AVERAGE}
    return [Segment(s.offset, s.numel, rules.get(s.role, AVERAGE)) for s in fragment.slices]


class GlobalModel:
    """Theta and everything that is computed from it."""

    def __init__(self, cfg: Config) -> None:
        from diloco_cli.train.model import initial_values, state_tensors
        from diloco_cli.train.tokenizer import load_tokenizer

        self._cfg = cfg
        self.tokenizer = load_tokenizer(cfg.data.tokenizer)
        # Tensor by tensor: a whole model beside Theta would set the peak of this process.
        vocab_size = cfg.model.vocab_size or self.tokenizer.vocab_size
        model, values = initial_values(cfg.model, vocab_size, cfg.run.seed)
        self.layout = model_layout(cfg, model)
        self._shapes = {name: (tuple(t.shape), t.dtype) for name, t in state_tensors(model).items()}
        self._places = _places(self.layout)
        self._theta = [torch.empty(f.numel) for f in self.layout.fragments]
        for name, tensor in values:
            for place in self._places.get(name, ()):
                self._rows(place, tensor).copy_(place.rows_of(tensor.detach()))
        del model, values
        self._state = [torch.zeros(f.numel) for f in self.layout.fragments]
        self._segments = [segments(f, cfg.outer.merge) for f in self.layout.fragments]
        self._wire = cfg.network.wire_down.value
        self._payloads: list[dict[int, Tensor]] = [{0: self._encoded(f)} for f in range(len(self.layout))]
        self._newest = [0] * len(self.layout)

    def merge(self, fragment: int, inputs: Sequence[MergeInput]) -> Tensor:
        """Merge into Theta and take the outer step; returns the payload to broadcast. For the merge worker."""
        outer = self._cfg.outer
        nesterov = outer.optimizer is OuterOptimizerKind.nesterov
        merge(
            self._theta[fragment],
            self._state[fragment],
            inputs,
            lr=outer.lr,
            momentum=outer.momentum,
            nesterov=nesterov,
            segments=self._segments[fragment],
            in_place=True,
        )
        return self._encoded(fragment)

    def adopt(self, fragment: int, version: int, payload: Tensor) -> None:
        """From now on `payload` is what learners get as `version`. For the actor, when the merge is finished."""
        assert version == self._newest[fragment] + 1
        self._newest[fragment] = version
        self._payloads[fragment][version] = payload

    def values(self, fragment: int) -> tuple[Tensor, Tensor]:
        """Theta and the outer state of a fragment, float32 [numel] each: the very ones."""
        return self._theta[fragment], self._state[fragment]

    def load(self, fragment: int, version: int, theta: Tensor, outer: Tensor) -> None:
        """Go on from a stored version; versions of a fragment are loaded in rising order. Before anything is merged.

        Raises:
            ValueError: it has another size.
        """
        if theta.shape != self._theta[fragment].shape or outer.shape != self._state[fragment].shape:
            raise ValueError(f"{tuple(theta.shape)} values where {tuple(self._theta[fragment].shape)} belong")
        self._theta[fragment].copy_(theta)
        self._state[fragment].copy_(outer)
        self._newest[fragment] = version
        self._payloads[fragment][version] = self._encoded(fragment)

    def digest(self, fragment: int) -> str:
        """CRC-32 of Theta's bytes: tells whether a replay came to the same bits."""
        return f"crc32:{zlib.crc32(view(self._theta[fragment].view(torch.uint8))):08x}"

    def wire_payload(self, fragment: int) -> memoryview:
        """The newest version of a fragment as it goes over the wire."""
        return view(self._payloads[fragment][self._newest[fragment]])

    def knows(self, fragment: int, version: int) -> bool:
        """Whether what starts from that version can be merged: its parameters are here, or nobody asks for them."""
        is_drift = self._cfg.network.wire_up.value in DRIFT_WIRES
        needs_base = is_drift is (self._cfg.outer.anchor is Anchor.global_)  # see merge_input
        return not needs_base or version in self._payloads[fragment]

    def forget(self, fragment: int, keep: Set[int]) -> None:
        """Drop all versions but the newest and those in `keep` (core.syncer: bases_in_use)."""
        for version in [v for v in self._payloads[fragment] if v not in keep and v != self._newest[fragment]]:
            del self._payloads[fragment][version]

    def merge_input(self, c: Contribution, values: Tensor, *, is_drift: bool) -> MergeInput:
        """A contribution as core.merge takes it, with its anchor (outer.anchor)."""
        newest = self._newest[c.fragment]
        base: Tensor | None = None
        if c.base_version != newest:
            if self._cfg.outer.anchor is Anchor.base and not is_drift:
                base = self._decoded(c.fragment, c.base_version)
            elif self._cfg.outer.anchor is Anchor.global_ and is_drift:
                values, is_drift = values + self._decoded(c.fragment, c.base_version), False
        return MergeInput(
            learner=c.learner, values=values, tokens=c.tokens, steps=c.steps, base=base, is_drift=is_drift
        )

    def tensors(self) -> Mapping[str, Tensor]:
        """Theta by name, in the model's shapes and dtypes. Each is put together when it is asked for."""
        return _Tensors(self._shapes, self._tensor)

    def _tensor(self, name: str) -> Tensor:
        shape, dtype = self._shapes[name]
        whole = torch.empty(shape)
        for place in self._places.get(name, ()):
            rows = place.rows_of(whole)
            rows.copy_(self._rows(place, whole))
        return _as_dtype(whole, dtype)

    def _rows(self, place: _Place, tensor: Tensor) -> Tensor:
        """Where rows of a tensor lie in Theta, in their shape."""
        s = place.slice
        return self._theta[place.fragment][s.offset : s.offset + s.numel].view(place.rows_of(tensor).shape)

    def _encoded(self, fragment: int) -> Tensor:
        theta = self._theta[fragment]
        return encode(theta, self._wire, torch.empty(encoded_bytes(theta.numel(), self._wire), dtype=torch.uint8))

    def _decoded(self, fragment: int, version: int) -> Tensor:
        return decode(self._payloads[fragment][version], self._wire, self.layout.fragments[fragment].numel)


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows of a tensor, and where in which fragment they are."""

    fragment: int
    slice: Slice

    def rows_of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(0, self.slice.row_start, self.slice.num_rows) if tensor.ndim else tensor


def _places(layout: Layout) -> dict[str, list[_Place]]:
    places: dict[str, list[_Place]] = {}
    for index, fragment in enumerate(layout.fragments):
        for s in fragment.slices:
            places.setdefault(s.name, []).append(_Place(index, s))
    return places


class _Tensors(Mapping[str, Tensor]):
    """Tensors by name that are made each time they are asked for, so that no two of them need be in memory."""

    def __init__(self, names: Collection[str], make: Callable[[str], Tensor]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:
        return tensor >= 0.5
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)


@dataclass(slots=True)
class _Held:
    """A received contribution: what to merge, and the buffer that it lies in."""

    values: Tensor
    is_drift: bool
    buffer: Tensor
    owner: str


class PayloadStore:
    """Contributions in memory, by handle. Receivers put, the actor frees. Thread-safe.

    A learner may have `limit` contributions here at once; more wait in its receiver, so that memory is bounded
    whatever it sends.
    """

    def __init__(self, cfg: Config, layout: Layout) -> None:
        self._wire = cfg.network.wire_up.value
        self._layout = layout
        self._limit = len(layout) + max(1, cfg.sync.overlap_steps)
        self._pool = BufferPool(max_kept=max(4, cfg.islands.count))
        self._held: dict[int, _Held] = {}
        self._room: dict[str, threading.Semaphore] = {}
        self._lock = threading.Lock()
        self._next_handle = 1

    def take_buffer(self, owner: str, num_bytes: int) -> Tensor:
        """Memory for one payload; waits while this learner has too much here already."""
        with self._lock:
            room = self._room.setdefault(owner, threading.Semaphore(self._limit))
        room.acquire()
        return self._pool.take(num_bytes)

    def give_back(self, owner: str, buffer: Tensor) -> None:
        """A payload that never became a contribution."""
        self._pool.give(buffer)
        self._room[owner].release()

    def put(self, owner: str, buffer: Tensor, fragment: int) -> tuple[int, str]:
        """Keep a received payload; returns its handle, and what is wrong with its values, if anything is."""
        numel = self._layout.fragments[fragment].numel
        is_drift = self._wire in DRIFT_WIRES
        values = decode(buffer, self._wire, numel) if is_drift else buffer.view(_PLAIN[self._wire])
        problem = _problem(values)
        with self._lock:
            handle = self._next_handle
            self._next_handle += 1
            self._held[handle] = _Held(values, is_drift, buffer, owner)
        return handle, problem

    def merge_inputs(self, members: Sequence[Contribution], model: GlobalModel) -> list[MergeInput]:
        """The contributions as core.merge takes them."""
        with self._lock:
            held = [self._held[c.handle] for c in members]
        return [model.merge_input(c, h.values, is_drift=h.is_drift) for c, h in zip(members, held, strict=True)]

    def free(self, handle: int) -> None:
        """The contribution is merged or dropped."""
        with self._lock:
            held = self._held.pop(handle)
        self.give_back(held.owner, held.buffer)

    @property
    def num_held(self) -> int:
        """Contributions in memory."""
        return len(self._held)


def _problem(values: Tensor) -> str:
    """Why these values may not reach Theta. aminmax hands NaN through and needs no second vector."""
    low, high = torch.aminmax(values)
    if torch.isfinite(low) and torch.isfinite(high):
        return ""
    return "it contains NaN" if torch.isnan(low) or torch.isnan(high) else "it contains infinity"
