"""core.fragments: every element in one fragment, balance, own fragments for embedding and head, hash, offsets."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter, defaultdict

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.core.fragments import (
    BUFFER,
    EMBEDDING,
    HEAD,
    WEIGHT,
    Layout,
    TensorSpec,
    build_layout,
    due_offset_steps,
    fingerprint,
    first_difference,
)
from diloco_cli.errors import ConfigError

STRATEGIES = ("balanced", "strided", "sequential")


def llama(
    dim: int, layers: int, ffn: int, vocab: int, kv_dim: int | None = None, tied: bool = False
) -> list[TensorSpec]:
    """The inventory of a Llama-style decoder."""
    kv_dim = kv_dim or dim
    tensors = [TensorSpec("embed.weight", (vocab, dim), EMBEDDING), TensorSpec("norm.weight", (dim,), WEIGHT)]
    if not tied:
        tensors.append(TensorSpec("head.weight", (vocab, dim), HEAD))
    for i in range(layers):
        at = f"layers.{i}"
        tensors += [
            TensorSpec(f"{at}.attention.q.weight", (dim, dim), WEIGHT),
            TensorSpec(f"{at}.attention.k.weight", (kv_dim, dim), WEIGHT),
            TensorSpec(f"{at}.attention.v.weight", (kv_dim, dim), WEIGHT),
            TensorSpec(f"{at}.attention.o.weight", (dim, dim), WEIGHT),
            TensorSpec(f"{at}.ffn.gate.weight", (ffn, dim), WEIGHT),
            TensorSpec(f"{at}.ffn.up.weight", (ffn, dim), WEIGHT),
            TensorSpec(f"{at}.ffn.down.weight", (dim, ffn), WEIGHT),
            TensorSpec(f"{at}.norm1.weight", (dim,), WEIGHT),
            TensorSpec(f"{at}.norm2.weight", (dim,), WEIGHT),
        ]
    return tensors


SIZES = {
    "150m": llama(896, 12, 2432, 32000),
    "150m tied": llama(896, 12, 2432, 32000, tied=True),
    "1b": llama(2048, 16, 8192, 128256, 512, tied=True),
    "1b untied": llama(2048, 22, 5632, 32000, 256),
    "12b": llama(5120, 40, 14336, 131072, 1024),
    "bytes": llama(256, 6, 704, 256, tied=True),
}


def check_partition(layout: Layout) -> None:
    """Every row of every tensor exactly once; offsets fill the flat vector without gap or overlap."""
    rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
    by_name = {t.name: t for t in layout.tensors}
    assert [f.fragment for f in layout.fragments] == list(range(len(layout)))
    for fragment in layout.fragments:
        assert fragment.slices
        offset = 0
        for piece in fragment.slices:
            tensor = by_name[piece.name]
            assert piece.offset == offset
            assert piece.role == tensor.role
            assert piece.num_rows > 0
            assert piece.numel == piece.num_rows * (tensor.numel // tensor.num_rows)
            offset += piece.numel
            rows[piece.name].append((piece.row_start, piece.row_start + piece.num_rows))
        assert offset == fragment.numel
    for tensor in layout.tensors:
        pieces = sorted(rows.pop(tensor.name, []))
        if tensor.numel == 0:
            assert not pieces
            continue
        assert pieces[0][0] == 0
        assert pieces[-1][1] == tensor.num_rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert not rows
    assert layout.numel == sum(t.numel for t in layout.tensors)


# ---- properties ---------------------------------------------------------------------------------------


@st.composite
def inventories(draw: st.DrawFn) -> list[TensorSpec]:
    count = draw(st.integers(1, 12))
    tensors = []
    for i in range(count):
        shape = tuple(draw(st.lists(st.integers(0 if draw(st.booleans()) else 1, 40), max_size=3)))
        role = draw(st.sampled_from([WEIGHT, WEIGHT, WEIGHT, EMBEDDING, HEAD, BUFFER]))
        prefix = draw(st.sampled_from(["", "layers.0.", "layers.1.", "layers.10.", "norm."]))
        tensors.append(TensorSpec(f"{prefix}t{i}", shape, role))
    tensors.append(TensorSpec("last.weight", (draw(st.integers(1, 500)), 3), WEIGHT))
    return tensors


@settings(max_examples=examples(200))
@given(inventories(), st.integers(1, 30), st.sampled_from(STRATEGIES), st.sampled_from([1, 64, 4096]))
def test_every_row_once(tensors: list[TensorSpec], count: int, strategy: str, least: int) -> None:
    layout = build_layout(tensors, num_fragments=count, strategy=strategy, min_fragment_bytes=least)
    check_partition(layout)
    assert 1 <= len(layout) <= count
    assert layout.requested == count
    # Fewer than asked for is said, with a reason; and nothing is said otherwise.
    assert bool(layout.reason) == (len(layout) < count)


@settings(max_examples=examples(50))
@given(inventories(), st.integers(1, 30), st.sampled_from(STRATEGIES), st.randoms(use_true_random=False))
def test_order_of_the_inventory_does_not_matter(
    tensors: list[TensorSpec], count: int, strategy: str, chance: random.Random
) -> None:
    one = build_layout(tensors, num_fragments=count, strategy=strategy, min_fragment_bytes=1)
    chance.shuffle(tensors)
    assert build_layout(iter(tensors), num_fragments=count, strategy=strategy, min_fragment_bytes=1) == one


# ---- balance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [24, 8])
def test_largest_within_four_thirds_of_ideal(size: str, count: int) -> None:
    layout = build_layout(SIZES[size], num_fragments=count)
    check_partition(layout)
    assert len(layout) == count
    largest = max(f.numel for f in layout.fragments)
    assert largest <= 4 / 3 * layout.numel / count


def test_one_huge_embedding_does_not_set_the_peak() -> None:
    layout = build_layout(SIZES["1b"], num_fragments=24)
    assert max(f.numel for f in layout.fragments) < SIZES["1b"][0].numel / 3


def test_a_lone_huge_matrix_is_cut_by_rows() -> None:
    tensors = [TensorSpec("big", (1000, 100), WEIGHT), TensorSpec("small", (10,), WEIGHT)]
    layout = build_layout(tensors, num_fragments=8, min_fragment_bytes=1)
    check_partition(layout)
    assert max(f.numel for f in layout.fragments) <= 4 / 3 * layout.numel / 8


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", ["150m", "1b", "12b"])
def test_embedding_and_head_alone(size: str, strategy: str) -> None:
    layout = build_layout(SIZES[size], num_fragments=24, strategy=strategy)
    for fragment in layout.fragments:
        roles = {s.role for s in fragment.slices}
        assert len(roles) == 1, roles
    seen = {s.role for f in layout.fragments for s in f.slices}
    assert (HEAD in seen) == (size != "1b")


def test_tied_weights_are_one_tensor() -> None:
    layout = build_layout(SIZES["1b"], num_fragments=24)
    rows = Counter({s.name: 0 for f in layout.fragments for s in f.slices})
    for fragment in layout.fragments:
        for piece in fragment.slices:
            rows[piece.name] += piece.num_rows
    assert rows["embed.weight"] == 128256
    assert "head.weight" not in rows


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_travel_with_their_layer(strategy: str) -> None:
    tensors = llama(64, 4, 128, 256) + [TensorSpec(f"layers.{i}.attention.q.seen", (), BUFFER) for i in range(4)]
    layout = build_layout(tensors, num_fragments=6, strategy=strategy, min_fragment_bytes=1)
    check_partition(layout)
    for i in range(4):
        (home,) = [f for f in layout.fragments if any(s.name == f"layers.{i}.attention.q.seen" for s in f.slices)]
        assert any(s.name.startswith(f"layers.{i}.") and s.role == WEIGHT for s in home.slices)


def test_buffers_do_not_count_as_parameters() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        build_layout([TensorSpec("seen", (5,), BUFFER)], num_fragments=2)
    with pytest.raises(ConfigError, match="no parameters"):
        build_layout([], num_fragments=2)
    with pytest.raises(ConfigError, match="no parameters"):
        build_layout([TensorSpec("empty", (0, 5), WEIGHT)], num_fragments=2)


# ---- strategies --------------------------------------------------------------------------------------


def layers_of(layout: Layout) -> list[set[int]]:
    return [{int(s.name.split(".")[1]) for s in f.slices if s.name.startswith("layers.")} for f in layout.fragments]


def test_strided_and_sequential_layers() -> None:
    tensors = llama(64, 12, 128, 256)
    strided = layers_of(build_layout(tensors, num_fragments=6, strategy="strided", min_fragment_bytes=1))
    sequential = layers_of(build_layout(tensors, num_fragments=6, strategy="sequential", min_fragment_bytes=1))
    # Two of the six are embedding and head.
    assert sorted(map(sorted, strided))[-4:] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert sorted(map(sorted, sequential))[-4:] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_layers_by_number_not_by_text() -> None:
    sequential = layers_of(
        build_layout(llama(32, 12, 64, 64), num_fragments=14, strategy="sequential", min_fragment_bytes=1)
    )
    assert sorted(map(sorted, sequential))[-12:] == [[i] for i in range(12)]


def test_whole_layers_are_not_cut() -> None:
    layout = build_layout(llama(64, 5, 128, 256), num_fragments=24, strategy="strided", min_fragment_bytes=1)
    by_name = {t.name: t for t in layout.tensors}
    assert all(s.num_rows == by_name[s.name].num_rows for f in layout.fragments for s in f.slices if s.role == WEIGHT)
    assert len(layout) == 7
    assert "7 fragments" in layout.reason
    assert "strided" in layout.reason


def test_small_models_get_fewer_and_say_so() -> None:
    layout = build_layout(llama(16, 2, 32, 64), num_fragments=24)
    assert len(layout) < 24
    assert "bytes" in layout.reason
    assert "65536" in layout.reason
    assert build_layout(llama(16, 2, 32, 64), num_fragments=24, min_fragment_bytes=1).reason == ""


# ---- hash and first difference ---------------------------------------------------------------------


def test_hash_changes_with_anything_and_the_difference_is_named() -> None:
    tensors = llama(64, 2, 128, 256)
    base = build_layout(tensors, num_fragments=6, min_fragment_bytes=1)
    changed = {
        "layers.1.ffn.up.weight": [
            dataclasses.replace(t, shape=(129, 64)) if t.name == "layers.1.ffn.up.weight" else t for t in tensors
        ],
        "norm.weight": [dataclasses.replace(t, role=BUFFER) if t.name == "norm.weight" else t for t in tensors],
        "layers.0.norm1.renamed": [
            dataclasses.replace(t, name="layers.0.norm1.renamed") if t.name == "layers.0.norm1.weight" else t
            for t in tensors
        ],
        f"{len(tensors)} tensors here, {len(tensors) + 1} there": [*tensors, TensorSpec("zzz", (3,), WEIGHT)],
    }
    for naming, other in changed.items():
        layout = build_layout(other, num_fragments=6, min_fragment_bytes=1)
        assert layout.hash != base.hash
        assert naming in first_difference(fingerprint(base), fingerprint(layout))
    # A transposed shape of the same size is a difference, too.
    turned = [dataclasses.replace(t, shape=t.shape[::-1]) if "up" in t.name else t for t in tensors]
    layout = build_layout(turned, num_fragments=6, min_fragment_bytes=1)
    assert layout.hash != base.hash
    assert "ffn.up" in first_difference(fingerprint(base), fingerprint(layout))
    for more in ({"num_fragments": 5}, {"num_fragments": 6, "strategy": "strided"}):
        layout = build_layout(tensors, **{"min_fragment_bytes": 1, **more})
        assert layout.hash != base.hash
        assert "fragments" in first_difference(fingerprint(base), fingerprint(layout))
    again = build_layout(tensors, num_fragments=6, min_fragment_bytes=1)
    assert again.hash == base.hash
    assert first_difference(fingerprint(base), fingerprint(again)) == ""


def test_different_hashes_have_a_named_difference() -> None:
    """Two layouts of the same tensors and the same fragment sizes, cut differently, still differ by something said."""
    tensors = [TensorSpec(f"layers.{i}.w", (8, 8), WEIGHT) for i in range(4)]
    strided = build_layout(tensors, num_fragments=2, strategy="strided", min_fragment_bytes=1)
    sequential = build_layout(tensors, num_fragments=2, strategy="sequential", min_fragment_bytes=1)
    assert strided.hash != sequential.hash
    assert first_difference(fingerprint(strided), fingerprint(sequential)) != ""


# ---- when ------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 200))
def test_offsets_are_spread_evenly(count: int, inner_steps: int) -> None:
    offsets = [due_offset_steps(f, count, inner_steps) for f in range(count)]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert all(0 <= o < inner_steps for o in offsets)
    per_step = Counter(offsets)
    assert max(per_step.values()) <= -(-count // inner_steps)
    gaps = [b - a for a, b in zip(offsets, [*offsets[1:], inner_steps], strict=True)]
    assert max(gaps) - min(gaps) <= 1
