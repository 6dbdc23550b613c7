"""Frames: how one message looks as bytes. No I/O in here.

A frame is a fixed prefix of 24 bytes, a JSON header and the raw payload::

    offset  size  field
         0     4  magic, b"DLCO"
         4     1  protocol version
         5     1  message type (wire.messages)
         6     2  flags, zero
         8     4  header length in bytes, at most MAX_HEADER_BYTES
        12     8  payload length in bytes
        20     4  CRC-32 of the header
        24     .  header: one JSON object, UTF-8
         .     .  payload: the bytes that wire.codecs makes

All integers are big-endian. The CRC finds mistakes of ours; damage on the way is found by TLS, whose every record
is authenticated. Lengths are checked before anything of that length is allocated.
Owns: the layout of frames and ProtocolError. Must not: open sockets, know what messages mean, build objects from
what was received other than JSON values. Called by: run.channel, run.listener, wire.messages, tests (fuzzing).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAGIC = b"DLCO"
PROTOCOL_VERSION = 1
PREFIX_BYTES = 24
MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 1 << 40

_PREFIX = struct.Struct(">4sBBHIQI")
assert _PREFIX.size == PREFIX_BYTES


class ProtocolError(Exception):
    """The peer broke the protocol: what it sent is dropped and its connection closed."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The checked fixed part of a frame. Lengths in bytes."""

    message_type: int
    header_len: int
    payload_len: int
    header_crc: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame, as FrameReader gives it."""

    message_type: int
    header: dict[str, Any]
    payload: bytes


def encode_frame(message_type: int, header: Mapping[str, Any], payload_len: int = 0) -> bytes:
    """The prefix and header of a frame; the payload of `payload_len` bytes is to follow.

    Raises:
        ValueError: the header does not fit (a bug of ours, or a model with too many tensors).
    """
    body = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    if len(body) > MAX_HEADER_BYTES:
        raise ValueError(f"frame header of {len(body)} bytes is over the limit of {MAX_HEADER_BYTES}")
    prefix = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, message_type, 0, len(body), payload_len, zlib.crc32(body))
    return prefix + body


def parse_prefix(data: bytes | bytearray | memoryview, max_payload: int = MAX_PAYLOAD_BYTES) -> Prefix:
    """Check the first 24 bytes of a frame.

    Raises:
        ProtocolError: not a frame of ours, another protocol version, or a length over its limit.
    """
    if len(data) != PREFIX_BYTES:
        raise ProtocolError(f"frame prefix of {len(data)} bytes, expected {PREFIX_BYTES}")
    magic, version, message_type, flags, header_len, payload_len, crc = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a diloco frame (starts with {magic!r})")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
    if flags:
        raise ProtocolError(f"unknown frame flags {flags:#06x}")
    if header_len > MAX_HEADER_BYTES:
        raise ProtocolError(f"frame header of {header_len} bytes is over the limit of {MAX_HEADER_BYTES}")
    if payload_len > max_payload:
        raise ProtocolError(f"payload of {payload_len} bytes is over the limit of {max_payload}")
    return Prefix(message_type, header_len, payload_len, crc)


def parse_header(prefix: Prefix, data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Decode the header that belongs to `prefix`.

    Raises:
        ProtocolError: wrong checksum, not JSON, not an object, or a key given twice.
    """
    body = bytes(data)
    if len(body) != prefix.header_len or zlib.crc32(body) != prefix.header_crc:
        raise ProtocolError("frame header does not match its length or checksum")
    try:
        header = json.loads(body, object_pairs_hook=_unique_object)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"frame header is not JSON: {str(error)[:100]}") from None
    if not isinstance(header, dict):
        raise ProtocolError("frame header is not a JSON object")
    return header


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


class FrameReader:
    """Incremental parser: bytes in any pieces in, whole frames out.

    For connections that are not trusted yet and for tests. Bulk payloads do not come this way (run.channel
    receives them straight into their buffer), so `max_payload` is small.
    Invariant: holds at most one unfinished frame, and never more than its checked lengths plus one piece.
    """

    def __init__(self, max_payload: int = 0) -> None:
        self._max_payload = max_payload
        self._buffer = bytearray()
        self._prefix: Prefix | None = None

    @property
    def pending(self) -> int:
        """Bytes held of a frame that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Take some bytes; return the frames that they complete.

        Raises:
            ProtocolError: as soon as a wrong byte can be told. The reader must not be used after that.
        """
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        if self._prefix is None:
            if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
                raise ProtocolError(f"not a diloco frame (starts with {bytes(self._buffer[: len(MAGIC)])!r})")
            if len(self._buffer) < PREFIX_BYTES:
                return None
            self._prefix = parse_prefix(self._buffer[:PREFIX_BYTES], self._max_payload)
            del self._buffer[:PREFIX_BYTES]
        prefix = self._prefix
        end = prefix.header_len + prefix.payload_len
        if len(self._buffer) < end:
            return None
        header = parse_header(prefix, self._buffer[: prefix.header_len])
        payload = bytes(self._buffer[prefix.header_len : end])
        del self._buffer[:end]
        self._prefix = None
        return Frame(prefix.message_type, header, payload)
