"""Frames: round trip, any cutting into pieces, and nothing but ProtocolError from any bytes."""

from __future__ import annotations

import json
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.wire.frames import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    FrameReader,
    ProtocolError,
    encode_frame,
    parse_header,
    parse_prefix,
)

headers = st.dictionaries(
    st.text(max_size=8), st.integers() | st.text(max_size=8) | st.none() | st.booleans(), max_size=4
)


def raw_prefix(magic=b"DLCO", version=1, kind=1, flags=0, header_len=2, payload_len=0, crc=None, body=b"{}") -> bytes:
    crc = zlib.crc32(body) if crc is None else crc
    return struct.pack(">4sBBHIQI", magic, version, kind, flags, header_len, payload_len, crc)


@given(kind=st.integers(0, 255), header=headers, payload=st.binary(max_size=64))
def test_round_trip_of_one_frame(kind, header, payload):
    data = encode_frame(kind, header, len(payload)) + payload
    (frame,) = FrameReader(max_payload=64).feed(data)
    assert (frame.message_type, frame.header, frame.payload) == (kind, header, payload)


@given(frames=st.lists(st.tuples(st.integers(0, 255), headers, st.binary(max_size=20)), max_size=4), data=st.data())
def test_frames_survive_any_cutting(frames, data):
    stream = b"".join(encode_frame(kind, header, len(payload)) + payload for kind, header, payload in frames)
    reader = FrameReader(max_payload=20)
    got = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        got += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert [(f.message_type, f.header, f.payload) for f in got] == frames
    assert reader.pending == 0


def test_one_byte_at_a_time():
    stream = encode_frame(3, {"a": 1}, 5) + b"hello" + encode_frame(4, {})
    reader = FrameReader(max_payload=5)
    counts = [len(reader.feed(stream[i : i + 1])) for i in range(len(stream))]
    assert sum(counts) == 2
    assert counts[-1] == 1, "the last frame is whole only with its last byte"


@given(st.binary(max_size=200))
def test_random_bytes_give_protocol_errors_only(data):
    reader = FrameReader(max_payload=16)
    try:
        for i in range(len(data)):
            reader.feed(data[i : i + 1])
    except ProtocolError:
        return
    assert data[:4] == b"DLCO"[: len(data)], "garbage must be told by its first bytes"


@given(header=headers, position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_flipped_byte_is_never_taken_for_the_same_frame(header, position, flip):
    data = bytearray(encode_frame(7, header))
    position %= len(data)
    data[position] ^= flip
    try:
        frames = FrameReader().feed(data)
    except ProtocolError:
        return
    # The type is not under the checksum (TLS covers it); a longer header length just waits for more.
    assert not frames or (position == 5 and frames[0].message_type != 7)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (raw_prefix(magic=b"HTTP"), "not a diloco frame"),
        (raw_prefix(version=2), "protocol version 2"),
        (raw_prefix(flags=1), "flags"),
        (raw_prefix(header_len=MAX_HEADER_BYTES + 1), "header of 65537 bytes"),
        (raw_prefix(payload_len=10**15), "payload of 1000000000000000 bytes"),
        (raw_prefix()[:-1], "prefix of 23 bytes"),
    ],
)
def test_prefixes_that_are_refused(wrong, text):
    with pytest.raises(ProtocolError, match=text):
        parse_prefix(wrong)


@pytest.mark.parametrize(
    "body",
    [b"[1]", b"1", b"{", b'{"a":1,"a":2}', b"\xff\xfe", b"[" * 30_000, b'{"a":' + b"9" * 10_000 + b"}", b""],
    ids=["list", "number", "cut", "twice", "not utf-8", "deep", "long number", "empty"],
)
def test_headers_that_are_refused(body):
    prefix = parse_prefix(raw_prefix(header_len=len(body), body=body))
    with pytest.raises(ProtocolError):
        parse_header(prefix, body)


def test_wrong_checksum_is_refused():
    with pytest.raises(ProtocolError, match="checksum"):
        FrameReader().feed(raw_prefix(crc=1) + b"{}")


def test_announced_lengths_cost_no_memory():
    reader = FrameReader(max_payload=16)
    with pytest.raises(ProtocolError):
        reader.feed(raw_prefix(payload_len=17))
    assert reader.pending <= PREFIX_BYTES


def test_a_header_that_is_too_long_is_our_own_error():
    with pytest.raises(ValueError, match="over the limit"):
        encode_frame(1, {"a": "x" * MAX_HEADER_BYTES})


def test_the_layout_on_the_wire_is_fixed():
    body = json.dumps({"k": 1}, separators=(",", ":")).encode()
    expected = b"DLCO" + bytes([1, 9, 0, 0]) + (7).to_bytes(4, "big") + (300).to_bytes(8, "big")
    assert encode_frame(9, {"k": 1}, 300) == expected + zlib.crc32(body).to_bytes(4, "big") + body
