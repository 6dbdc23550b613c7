"""Messages: every one survives the wire; what is wrong in any way is a ProtocolError and nothing else."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.wire.frames import FrameReader, ProtocolError
from diloco_cli.wire.messages import (
    MESSAGE_TYPES,
    WITH_PAYLOAD,
    ContributionMsg,
    Heartbeat,
    Hello,
    MergedMsg,
    Message,
    PullMsg,
    Report,
    Validation,
    decode_message,
    encode_message,
)

ints = st.integers(0, (1 << 63) - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | ints | floats | st.text(max_size=5), lambda c: st.lists(c, max_size=3)
)
BY_KIND: dict[Any, st.SearchStrategy] = {
    int: ints,
    float: floats,
    float | None: floats | st.none(),
    bool: st.booleans(),
    str: st.text(max_size=20),
    list[int]: st.lists(ints, max_size=5),
    list[str]: st.lists(st.text(max_size=20), max_size=5),
    dict[str, float]: st.dictionaries(st.text(max_size=5), floats, max_size=4),
    dict[str, Any]: st.dictionaries(st.text(max_size=5), json_values, max_size=4),
}


def messages_of(cls: type) -> st.SearchStrategy:
    hints = get_type_hints(cls)
    fields = {f.name: BY_KIND[hints[f.name]] for f in dataclasses.fields(cls)}
    if cls is Hello:
        fields["kind"] = st.sampled_from(["control", "bulk"])
    if cls in WITH_PAYLOAD:
        fields |= {"numel": st.integers(1, 1 << 40), "part": st.just(0), "num_parts": st.integers(1, 8)}
    return st.builds(cls, **fields)


any_message = st.one_of([messages_of(cls) for cls in MESSAGE_TYPES.values()])
EXAMPLE = PullMsg(fragment=3)


def through_the_wire(message, payload_len: int):
    (frame,) = FrameReader(max_payload=8).feed(encode_message(message, payload_len) + bytes(payload_len))
    return decode_message(frame.message_type, frame.header, len(frame.payload))


@given(any_message)
def test_round_trip(message):
    assert through_the_wire(message, 8 if isinstance(message, WITH_PAYLOAD) else 0) == message


def test_numbers_are_unique_and_cover_all_messages():
    assert len(MESSAGE_TYPES) == len(Message.__args__)
    assert all(number == cls.TYPE for number, cls in MESSAGE_TYPES.items())


@given(kind=st.integers(0, 255), header=st.dictionaries(st.text(max_size=12), json_values, max_size=10), payload=ints)
def test_any_header_gives_a_message_or_a_protocol_error(kind, header, payload):
    try:
        decode_message(kind, header, payload)
    except ProtocolError:
        pass


@given(
    message=any_message,
    value=json_values | st.dictionaries(st.text(max_size=3), json_values, max_size=2),
    data=st.data(),
)
def test_any_value_in_any_field_gives_a_message_or_a_protocol_error(message, value, data):
    header = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    if not header:
        return
    header[data.draw(st.sampled_from(sorted(header)))] = value
    try:
        decode_message(message.TYPE, header, 8 if isinstance(message, WITH_PAYLOAD) else 0)
    except ProtocolError:
        pass


CONTRIBUTION = {
    "fragment": 0, "base_version": 0, "tokens": 1, "steps": 1, "sent_at_step": 1, "wire": "float32", "numel": 2,
    "part": 0, "num_parts": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "header", "payload", "text"),
    [
        (99, {}, 0, "unknown message type 99"),
        (PullMsg.TYPE, {}, 0, "fragment"),
        (PullMsg.TYPE, {"fragment": 1, "more": 2}, 0, "more"),
        (PullMsg.TYPE, {"fragment": "1"}, 0, "not of type int"),
        (PullMsg.TYPE, {"fragment": True}, 0, "not of type int"),
        (PullMsg.TYPE, {"fragment": 1.0}, 0, "not of type int"),
        (PullMsg.TYPE, {"fragment": -1}, 0, "not of type int"),
        (PullMsg.TYPE, {"fragment": 1 << 63}, 0, "not of type int"),
        (PullMsg.TYPE, {"fragment": 1}, 5, "payload of 5 bytes"),
        (Heartbeat.TYPE, {"x": 1}, 0, "'x'"),
        (ContributionMsg.TYPE, CONTRIBUTION, 0, "payload of 0 bytes"),
        (ContributionMsg.TYPE, CONTRIBUTION | {"numel": 0}, 8, "numel"),
        (ContributionMsg.TYPE, CONTRIBUTION | {"part": 1}, 8, "part"),
        (ContributionMsg.TYPE, CONTRIBUTION | {"num_parts": 0}, 8, "part"),
    ],
)
def test_refused(kind, header, payload, text):
    with pytest.raises(ProtocolError, match=text):
        decode_message(kind, header, payload)


def test_hello_of_an_unknown_kind_is_refused():
    hello = Hello(island="a", kind="bulk", layout_hash="", version="", session="", batch_tokens=1)
    header = {f.name: getattr(hello, f.name) for f in dataclasses.fields(hello)}
    with pytest.raises(ProtocolError, match="neither control nor bulk"):
        decode_message(Hello.TYPE, header | {"kind": "other"})


def test_a_diverged_loss_travels_and_a_non_finite_time_does_not():
    validation = Validation(step=1, loss=math.nan, bigram=None, tokens=1, final=True)
    assert math.isnan(through_the_wire(validation, 0).loss)
    report = Report(step=1, tokens=1, step_time_s=0.1, metrics={"loss": math.inf}, phases={})
    assert through_the_wire(report, 0) == report
    with pytest.raises(ProtocolError, match="step_time_s"):
        through_the_wire(dataclasses.replace(report, step_time_s=math.inf), 0)


def test_parts_default_to_one_whole():
    merged = MergedMsg(fragment=0, version=1, wire="float32", numel=2, taken=True, global_step=1)
    assert (merged.part, merged.num_parts) == (0, 1)
