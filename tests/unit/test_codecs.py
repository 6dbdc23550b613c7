"""Codecs against their definitions, by properties and by slow element-by-element references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.wire.codecs import BLOCK, CHUNK, WIRES, ErrorFeedback, decode, encode, encoded_bytes

BLOCKED = ("int8", "int4", "e3m0")
# Around the ends of blocks and chunks, odd and even.
SIZES = [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + BLOCK + 3]

vectors = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=3 * BLOCK).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)


def sample(numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    return values * torch.logspace(-3, 3, numel)


def block_max(flat: torch.Tensor) -> torch.Tensor:
    """max|x| of each element's block."""
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return padded.abs().amax(dim=1, keepdim=True).expand(-1, BLOCK).reshape(-1)[: len(flat)]


def round_trip(flat: torch.Tensor, wire: str) -> torch.Tensor:
    return decode(encode(flat, wire), wire, len(flat))


@pytest.mark.parametrize(
    ("wire", "size"), [("float32", 2052), ("bfloat16", 1026), ("int8", 525), ("int4", 269), ("e3m0", 269)]
)
def test_sizes_by_hand(wire, size):
    assert encoded_bytes(513, wire) == size


def test_an_unknown_wire_is_an_error():
    with pytest.raises(ValueError, match="int5"):
        encoded_bytes(1, "int5")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("numel", SIZES)
def test_given_buffers_are_filled_and_sizes_are_exact(wire, numel):
    flat = sample(numel)
    before = flat.clone()
    payload = torch.full((encoded_bytes(numel, wire),), 0xAB, dtype=torch.uint8)
    assert encode(flat, wire, payload) is payload
    values = torch.full((numel,), torch.nan)
    assert decode(payload, wire, numel, values) is values
    assert torch.equal(values, round_trip(flat, wire)), "what the buffers held before must not matter"
    assert torch.equal(flat, before), "encode must leave its input alone"


@given(vectors)
def test_float32_is_exact(flat):
    assert round_trip(flat, "float32").view(torch.int32).equal(flat.view(torch.int32))


@given(vectors)
def test_bfloat16_is_torchs_cast(flat):
    assert torch.equal(encode(flat, "bfloat16").view(torch.bfloat16), flat.to(torch.bfloat16))
    assert torch.equal(round_trip(flat, "bfloat16"), flat.to(torch.bfloat16).float())


@given(flat=vectors, wire=st.sampled_from(BLOCKED))
def test_finite_stays_finite_and_zeros_stay_zero(flat, wire):
    values = round_trip(flat, wire)
    assert torch.isfinite(values).all()
    assert torch.equal(round_trip(torch.zeros_like(flat), wire), torch.zeros_like(flat))


@given(flat=vectors, wire=st.sampled_from(["int8", "int4"]))
def test_integers_err_by_at_most_half_a_level(flat, wire):
    levels = {"int8": 127, "int4": 7}[wire]
    error = (round_trip(flat, wire).double() - flat.double()).abs()
    bound = block_max(flat).double() / levels * 0.5 * (1 + 1e-5) + 2.0**-148 * levels
    assert (error <= bound).all()


@pytest.mark.parametrize("wire", BLOCKED)
@pytest.mark.parametrize("numel", SIZES)
def test_blocks_do_not_see_each_other(wire, numel):
    """Each block decodes as it would alone: a wrong stride or scale shows at once."""
    flat = sample(numel)
    whole = round_trip(flat, wire)
    for start in {0, (numel - 1) // BLOCK * BLOCK, numel // BLOCK // 2 * BLOCK}:
        block = flat[start : start + BLOCK].clone()
        assert torch.equal(whole[start : start + BLOCK], round_trip(block, wire))


def test_e3m0_takes_the_nearest_value():
    scale = 4.0
    values = torch.tensor([0.0] + [2.0 ** (e - 7) for e in range(1, 8)], dtype=torch.float64) * scale
    table = torch.cat([values, -values])
    flat = torch.linspace(-scale, scale, 20_001)
    flat = torch.cat([flat, torch.full((-len(flat) % BLOCK,), scale)]).view(BLOCK, -1).t().contiguous()
    flat[:, 0] = scale  # every block has the same scale
    got = round_trip(flat.view(-1), "e3m0").double()
    distances = (flat.view(-1, 1).double() - table).abs()
    assert torch.isin(got, table).all()
    assert torch.allclose((got - flat.view(-1)).abs(), distances.amin(dim=1), atol=0, rtol=1e-6)


def test_e3m0_and_int4_bytes_by_hand():
    scale = torch.tensor([2.0]).view(torch.uint8)
    payload = encode(torch.tensor([2.0, -1.0, 0.0]), "e3m0")
    assert payload.tolist() == [*scale.tolist(), 0x07 | (8 + 6) << 4, 0x00]
    payload = encode(torch.tensor([7.0, -7.0, 1.0]), "int4")
    assert payload.tolist() == [*torch.tensor([1.0]).view(torch.uint8).tolist(), 0xF | 0x1 << 4, 0x9]


@pytest.mark.parametrize("wire", BLOCKED)
def test_any_payload_decodes_without_an_exception(wire):
    numel = 3 * BLOCK + 5
    payload = torch.randint(0, 256, (encoded_bytes(numel, wire),), dtype=torch.uint8)
    assert decode(payload, wire, numel).shape == (numel,)


@pytest.mark.parametrize("wire", WIRES)
def test_error_feedback_sums_to_the_truth(wire):
    numel, rounds = CHUNK + 3 * BLOCK + 5, 8
    feedback = ErrorFeedback(numel)
    truth, sent = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    largest = torch.zeros(numel)
    for seed in range(rounds):
        flat = sample(numel, seed)
        sent += decode(feedback.encode(flat, wire), wire, numel)
        truth += flat
        largest = torch.maximum(largest, block_max(flat))
    # What is still owed is the residual, up to float32 rounding of numbers as large as the block's largest.
    error = (sent + feedback.residual - truth).abs()
    assert (error <= rounds * 2.0**-22 * largest).all()
    feedback.reset()
    assert not feedback.residual.any()


def test_error_feedback_beats_plain_encoding_over_many_sends():
    flat = sample(2 * BLOCK)
    feedback = ErrorFeedback(len(flat))
    rounds = 64
    total = sum(decode(feedback.encode(flat, "e3m0"), "e3m0", len(flat)) for _ in range(rounds))
    plain = round_trip(flat, "e3m0")
    assert (total / rounds - flat).norm() < 0.2 * (plain - flat).norm()


@settings(max_examples=30)
@given(flat=vectors, wire=st.sampled_from(WIRES))
def test_error_feedback_without_a_past_is_plain_encoding(flat, wire):
    payload = ErrorFeedback(len(flat)).encode(flat, wire)
    assert torch.equal(decode(payload, wire, len(flat)), round_trip(flat, wire))


@pytest.mark.parametrize("wire", BLOCKED)
@pytest.mark.parametrize("extreme", [torch.finfo(torch.float32).max, 2.0**-149, 2.0**-126, 1e-40])
def test_the_ends_of_float32(wire, extreme):
    flat = torch.tensor([extreme, -extreme, 0.0, extreme / 2])
    values = round_trip(flat, wire)
    assert torch.isfinite(values).all()
    assert (values.abs() <= torch.finfo(torch.float32).max).all()
