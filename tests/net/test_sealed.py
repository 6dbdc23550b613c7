"""Sealed payloads against an attacker on the path and against a peer with a certificate that plays false."""

from __future__ import annotations

import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from net_helpers import WAIT_S, Server, contribution, hello

from diloco_cli.run import credentials
from diloco_cli.run.channel import Channel
from diloco_cli.run.connecting import connect
from diloco_cli.run.links import CHUNK_BYTES, LinkShaper
from diloco_cli.run.secure import KEY_BYTES, RECORD_HEAD_BYTES, TAG_BYTES, ChannelClosed, Opener, Sealer, sealed_bytes
from diloco_cli.wire.frames import ProtocolError
from diloco_cli.wire.messages import Heartbeat, PullMsg, encode_message

SEALED = 0x44
# Payloads here go in chunks of 5000 bytes, the first of which is never the last.
RATE_BPS = 20e6
CHUNK = 5000


def into_memory(_message, size: int) -> memoryview:
    return memoryview(bytearray(size))


# ---- the cipher


@given(st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=8), st.data())
def test_chunks_open_in_their_order_and_no_other(chunks, data):
    sealer = Sealer()
    sealed = [bytes(sealer.seal(memoryview(c), memoryview(bytearray(200)))) for c in chunks]
    assert [len(s) for s in sealed] == [sealed_bytes(len(c)) for c in chunks]
    order = data.draw(st.permutations(range(len(chunks))))
    opener = Opener(sealer.key)
    for index, at in enumerate(order):
        plain = memoryview(bytearray(len(chunks[at])))
        body = memoryview(sealed[at])[RECORD_HEAD_BYTES:]
        if at == index:
            opener.open(body, plain)
            assert plain == chunks[at]
        else:
            with pytest.raises(ChannelClosed, match="damaged"):
                opener.open(body, plain)
            break


@given(st.binary(min_size=1, max_size=64), st.data())
def test_any_changed_bit_is_found(chunk, data):
    sealer = Sealer()
    sealed = bytearray(sealer.seal(memoryview(chunk), memoryview(bytearray(200))))[RECORD_HEAD_BYTES:]
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ChannelClosed):
        Opener(sealer.key).open(memoryview(sealed), memoryview(bytearray(len(chunk))))


def test_every_payload_has_a_key_of_its_own():
    keys = {Sealer().key for _ in range(1000)}
    assert len(keys) == 1000
    assert {len(key) for key in keys} == {KEY_BYTES}


# ---- on the path


class Attacker:
    """Forwards records from client to server through `change(chunk, record) -> records`.

    `chunk` counts the sealed chunks from 0 and is -1 for TLS records.
    """

    def __init__(self, target: tuple[str, int], change: Callable[[int, bytes], list[bytes]]) -> None:
        self.target, self.change = target, change
        self.passed = 0
        self.records: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def close(self) -> None:
        self.thread.join(timeout=WAIT_S)
        assert not self.thread.is_alive()
        self.listener.close()

    def _run(self) -> None:
        client, _ = self.listener.accept()
        with client, socket.create_connection(self.target) as server:
            back = threading.Thread(target=self._back, args=(server, client))
            back.start()
            with suppress(OSError):
                for record in iter(lambda: read_record(client), b""):
                    self.records.append(record)
                    chunk = self.passed if record[0] == SEALED else -1
                    self.passed += chunk >= 0
                    for changed in self.change(chunk, record):
                        server.sendall(changed)
            for sock in (client, server):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            back.join()

    @staticmethod
    def _back(server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


def read_record(sock: socket.socket) -> bytes:
    """One TLS record or sealed chunk; nothing at the end."""
    head = read_exactly(sock, RECORD_HEAD_BYTES)
    if not head:
        return b""
    kind, length = struct.unpack(">BI", head)
    return head + read_exactly(sock, length + TAG_BYTES if kind == SEALED else length & 0xFFFF)


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := sock.recv(count - len(data))):
            return b""
        data += more
    return data


def swap_first_two(kept: list[bytes]):
    def change(chunk: int, record: bytes) -> list[bytes]:
        if chunk == 0:
            kept.append(record)
            return []
        return [record, *kept] if chunk == 1 else [record]

    return change


def head_before_last_chunk(kept: list[bytes]):
    """Holds chunk 1 (of 0..1) back until the next TLS record, the next frame's head, has gone ahead of it."""

    def change(chunk: int, record: bytes) -> list[bytes]:
        if chunk == 1:
            kept.append(record)
            return []
        if chunk == -1 and kept:
            return [record, kept.pop()]
        return [record]

    return change


def whole_payload_again(kept: list[bytes]):
    """Head, key and all, after the last chunk."""

    def change(chunk: int, record: bytes) -> list[bytes]:
        kept.append(record)
        return [record, *kept[-3:]] if chunk == 1 else [record]

    return change


def shorter_length(_kept: list[bytes]):
    def change(chunk: int, record: bytes) -> list[bytes]:
        return [struct.pack(">BI", SEALED, 100) + record[5:]] if chunk == 0 else [record]

    return change


ATTACKS = {
    "chunk twice": lambda _kept: lambda chunk, record: [record] * (1 + (chunk == 0)),
    "chunks swapped": swap_first_two,
    "first chunk taken out": lambda _kept: lambda chunk, record: [] if chunk == 0 else [record],
    "last chunk taken out": lambda _kept: lambda chunk, record: [] if chunk == 1 else [record],
    "next head before the last chunk": head_before_last_chunk,
    "shorter length": shorter_length,
    "tag changed": lambda _kept: lambda chunk, record: [record[:-1] + bytes([record[-1] ^ (chunk == 1)])],
}


def send_all(channel: Channel, *payloads: bytes) -> None:
    with suppress(ChannelClosed):
        for number, payload in enumerate(payloads):
            channel.send(contribution(4, number), payload)


def through(server: Server, keys, change, *payloads: bytes) -> tuple[list[bytes], Exception, Attacker]:
    """Send payloads past an attacker; returns those that were delivered, how it ended, and the attacker."""
    attacker = Attacker(server.address, change)
    shaper = LinkShaper(RATE_BPS)
    ours = connect(attacker.address, credentials.load(keys, "island-0"), shaper, hello(), WAIT_S)
    theirs, _ = server.channels.get(timeout=WAIT_S)
    server.opened += [ours, theirs]

    def send() -> None:
        send_all(ours, *payloads)
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    got: list[bytes] = []
    try:
        while True:
            _, payload = theirs.receive(into_memory)
            got.append(bytes(payload))
    except (ChannelClosed, ProtocolError) as error:
        ended = error
    assert theirs.closed
    sender.join(timeout=WAIT_S)
    attacker.close()
    return got, ended, attacker


def payload_of(letter: bytes, chunks: int = 2) -> bytes:
    return letter * (CHUNK * chunks)


@pytest.mark.parametrize("attack", ATTACKS)
def test_on_the_path_nothing_false_is_delivered(server, keys, attack):
    first, second = payload_of(b"a"), payload_of(b"b")
    got, ended, _ = through(server, keys, ATTACKS[attack]([]), first, second)
    assert got == [], "the first payload is not what was sent, and the second came after it"
    if attack == "next head before the last chunk":
        assert "another frame within a payload" in str(ended)


def test_a_whole_payload_played_again_is_refused(server, keys):
    """With its head and key: TLS's own sequence numbers find it."""
    first, second = payload_of(b"a"), payload_of(b"b")
    got, ended, _ = through(server, keys, whole_payload_again([]), first, second)
    assert got == [first]
    assert "damaged" in str(ended)


def test_a_chunk_of_another_connection_or_payload_is_refused(server, keys):
    """Same place, same length, same plain text, yet another key."""
    payload = payload_of(b"a")
    got, _, attacker = through(server, keys, lambda _chunk, record: [record], payload, payload)
    assert got == [payload, payload]
    chunks = [r for r in attacker.records if r[0] == SEALED]
    assert len(chunks) == len(set(chunks)) == 4, "what is alike does not look alike"

    def other_connection(chunk: int, record: bytes) -> list[bytes]:
        return [chunks[0]] if chunk == 0 else [record]

    got, ended, _ = through(server, keys, other_connection, payload)
    assert (got, "damaged" in str(ended)) == ([], True)

    kept: list[bytes] = []

    def other_payload(chunk: int, record: bytes) -> list[bytes]:
        kept.append(record)
        return [next(r for r in kept if r[0] == SEALED)] if chunk == 2 else [record]

    got, ended, _ = through(server, keys, other_payload, payload, payload)
    assert (got, "damaged" in str(ended)) == ([payload], True)


@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
def test_cut_off_anywhere_only_whole_payloads_count(server, keys, chunks):
    """The connection ends after so many chunks, be it between two frames, without TLS's own end."""

    def cut(chunk: int, record: bytes) -> list[bytes]:
        if chunk == chunks:
            raise OSError("cut")
        return [record]

    first, second = payload_of(b"a"), payload_of(b"b")
    got, ended, _ = through(server, keys, cut, first, second)
    assert got == [first][: chunks // 2]
    assert isinstance(ended, ChannelClosed)


# ---- a peer that plays false


def raw(channel: Channel, *parts: bytes) -> None:
    """Bytes past the channel's own rules."""
    with suppress(OSError):
        for part in parts:
            channel._sock.sendall(part)


def tls(channel: Channel, data: bytes) -> bytes:
    return channel._tls.encrypt(data)


def chunk_of(sealer: Sealer, plain: bytes) -> bytes:
    return bytes(sealer.seal(memoryview(plain), memoryview(bytearray(sealed_bytes(len(plain))))))


def test_tls_within_a_payload_is_refused(server):
    ours, theirs = server.pair()
    sealer = Sealer()
    head = encode_message(contribution(4), 20)
    raw(ours, tls(ours, head + sealer.key), chunk_of(sealer, bytes(10)), tls(ours, encode_message(Heartbeat())))
    with pytest.raises(ProtocolError, match="another frame within a payload"):
        theirs.receive(into_memory)
    assert theirs.closed


def test_false_tls_records_within_a_payload_end_it(server):
    ours, theirs = server.pair()
    sealer = Sealer()
    raw(ours, tls(ours, encode_message(contribution(4), 20) + sealer.key), chunk_of(sealer, bytes(10)))
    ended: list[Exception] = []

    def receive() -> None:
        try:
            theirs.receive(into_memory)
        except (ChannelClosed, ProtocolError) as error:
            ended.append(error)

    receiver = threading.Thread(target=receive)
    receiver.start()
    raw(ours, *(b"\x17\x03\x03\x00\x11" + bytes(17) for _ in range(100)))
    receiver.join(timeout=WAIT_S)
    assert not receiver.is_alive()
    assert isinstance(ended[0], ChannelClosed)


@pytest.mark.parametrize("length", [0, 11, CHUNK_BYTES + 1, 0xFFFFFFFF])
def test_chunks_of_impossible_lengths_are_refused_at_their_head(server, length):
    ours, theirs = server.pair()
    size = 2 * CHUNK_BYTES if length == CHUNK_BYTES + 1 else 10
    raw(ours, tls(ours, encode_message(contribution(4), size) + Sealer().key), struct.pack(">BI", SEALED, length))
    with pytest.raises(ProtocolError, match=f"sealed chunk of {length} bytes"):
        theirs.receive(into_memory)


def test_a_chunk_without_a_frame_is_refused(server):
    ours, theirs = server.pair()
    raw(ours, chunk_of(Sealer(), bytes(10)))
    with pytest.raises(ProtocolError, match="no frame has announced"):
        theirs.receive(into_memory)


def test_a_chunk_too_many_is_refused(server):
    ours, theirs = server.pair()
    sealer = Sealer()
    chunks = [chunk_of(sealer, b"0123456789"), chunk_of(sealer, b"x")]
    raw(ours, tls(ours, encode_message(contribution(4), 10) + sealer.key), *chunks)
    assert theirs.receive(into_memory)[1] == b"0123456789"
    with pytest.raises(ProtocolError, match="no frame has announced"):
        theirs.receive(into_memory)


def test_frames_in_one_record_are_taken_one_by_one(server):
    """Whatever the records' borders are: the head of the next frame may lie in the record of this one's key."""
    ours, theirs = server.pair()
    sealer = Sealer()
    record = tls(ours, encode_message(contribution(4), 3) + sealer.key + encode_message(PullMsg(fragment=7)))
    raw(ours, record, chunk_of(sealer, b"abc"))
    assert theirs.receive(into_memory)[1] == b"abc"
    assert theirs.receive(into_memory)[0] == PullMsg(fragment=7)


def test_an_announcement_alone_allocates_nothing(server):
    """10**12 bytes announced: it is for `allocate` to refuse, before a byte is taken."""
    ours, theirs = server.pair()
    asked = []

    def refuse(_message, size: int) -> memoryview:
        asked.append(size)
        raise ProtocolError("too much")

    raw(ours, tls(ours, encode_message(contribution(4), 10**12)))
    with pytest.raises(ProtocolError, match="too much"):
        theirs.receive(refuse)
    assert asked == [10**12]


def test_a_payload_costs_chunks_of_memory_on_either_side(server):
    size = 24 << 20
    ours, theirs = server.pair()
    source, target = bytes(size), bytearray(size)
    sender = threading.Thread(target=ours.send, args=(contribution(4), source))
    tracemalloc.start()
    try:
        sender.start()
        theirs.receive(lambda _message, _size: memoryview(target))
        sender.join()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * CHUNK_BYTES


# ---- rate


def test_no_second_shows_more_than_the_rate(server):
    """A counter read every 50 ms while two connections fill a link of 20 Mbit/s, after a pause that saved up credit."""
    rate = 20e6
    shaper = LinkShaper(rate, latency_s=0.005, jitter_s=0.002)
    ends = [server.pair(shaper=shaper) for _ in range(2)]
    received = threading.Barrier(3)

    def receive(channel: Channel) -> None:
        channel.receive(into_memory)
        received.wait(WAIT_S)

    threads = [threading.Thread(target=receive, args=(theirs,)) for _, theirs in ends]
    threads += [threading.Thread(target=send_all, args=(ours, bytes(4_000_000))) for ours, _ in ends]
    readings: list[tuple[float, int, float]] = []
    tick = threading.Event()

    def read() -> None:
        before = time.monotonic()
        readings.append((before, shaper.bytes_sent, time.monotonic()))

    read()
    for thread in threads:
        thread.start()
    while received.n_waiting < 2:
        tick.wait(0.05)
        read()
    received.wait(WAIT_S)
    for thread in threads:
        thread.join()
    took = readings[-1][0] - readings[0][0]
    assert readings[-1][1] * 8 / took > 0.8 * rate, "the link was meant to be full"
    for i, (since, before, _) in enumerate(readings):
        for _, count, until in readings[i:]:
            if until - since <= 1.0:
                assert (count - before) * 8 <= rate * 1.1
    assert all(a[1] <= b[1] for a, b in pairwise(readings))
