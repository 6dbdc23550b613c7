"""Transport: mutually authenticated TLS connections with emulated links, in threads with blocking sockets.

    LinkShaper   one direction of one island's link: rate, latency, jitter; shared by the island's connections
    Channel      one connection: send(message, payload), receive(allocate)
    Outbox       a thread that sends for one channel, with a bounded queue in which newer items replace older ones
    connect      the dialling side (learners); Listener  the accepting side (syncer)

Threads: a channel has at most one thread that sends, one that receives and, where its link has latency, one that
releases delayed chunks. close() may come from anywhere and unblocks all of them.
Owns: sockets, TLS, link emulation, bounds on what a peer may cost. Must not: decide anything of the protocol or
touch tensors. Called by: run.syncer_main (Listener), run.learner_main (connect), both (Outbox).

Bytes on a connection: TLS 1.3 records (handshake, all frame heads, so all of control) and, for payloads only, sealed
chunks. A frame head that announces a payload is followed, inside TLS, by 32 random bytes: the key of this one payload.
The payload comes as AES-256-GCM chunks of up to CHUNK_BYTES, chunk i under nonce i::

    TLS record      type 0x14..0x17, 0x03, 0x03 or 0x01, length u16, body
    sealed chunk    type 0x44, length u32 of the plain bytes, ciphertext, tag of 16 bytes

Why that is sound: a key is used for one payload, so no nonce comes twice; keys travel under TLS's authentication and
forward secrecy; the payload's length is in the authenticated head, so chunks cannot be cut off, added, swapped (nonce)
or taken from another payload (key). Why not TLS for payloads too: Python gives TLS one record of 16 KiB per call, and
its OpenSSL may be an old one. CPU seconds per GB moved over loopback, sender + receiver, best of 4 runs of 6 x 64 MiB
on 2 shared cores (OpenSSL 3.0.19 in ssl, 4.0.3 in cryptography):

    plain TCP, 1 MiB calls, bbr / cubic           0.37 / 0.27
    ssl.SSLSocket, TLS 1.3 AES-256-GCM            1.24
    ssl.SSLObject, socket calls of 256 KiB - 1 MiB  1.19 - 1.06
    the same, TLS 1.2 AES-128-GCM                 1.03
    sealed chunks of 256 KiB                      0.51 - 0.57

Encryption and decryption alone: TLS over memory BIOs 0.75, pyOpenSSL with OpenSSL 4.0.3 0.68, sealed chunks 0.20.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.x509.oid import NameOID

from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.run.credentials import SYNCER, Credentials
from diloco_cli.wire.frames import PREFIX_BYTES, FrameReader, ProtocolError, parse_header, parse_prefix
from diloco_cli.wire.messages import Hello, Message, decode_message, encode_message

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
MIN_CHUNK_BYTES = 4 * 1024
# Credit a link may save up while idle or while its sender's thread gets no core.
BURST_S = 0.02
# Bytes under way on a link without a rate limit but with latency; a limited link holds rate * latency.
DELAY_LINE_BYTES = 64 * 1024 * 1024

RECORD_HEAD_BYTES = 5
TLS_RECORD_MAX_BYTES = 16 * 1024 + 256
TLS_TYPES = (0x14, 0x15, 0x16, 0x17)
SEALED_TYPE = 0x44
KEY_BYTES = 32
TAG_BYTES = 16

_RECORD_HEAD = struct.Struct(">BI")

Payload = memoryview | bytes | bytearray
Allocate = Callable[[Message, int], memoryview | None]


class ChannelClosed(ConnectionError):
    """The connection is over: closed by us, by the peer, or damaged. The message says which."""


# ---- link emulation -----------------------------------------------------------------------------


class LinkRule:
    """When a chunk handed over at a given time leaves the sender and arrives at the other end. No clock in here.

    A virtual queue: a chunk departs when all before it have, plus its own bits / rate. An idle link keeps up to
    BURST_S of credit, so over any window of W seconds at most rate * (W + BURST_S) plus one chunk departs.
    Release = departure + latency + U(0, jitter), never before that of an earlier chunk: order is kept.

    Args:
        rate_bps: bits per second, None for unlimited.
        latency_s, jitter_s: seconds.
        seed: of the jitter.
    """

    def __init__(self, rate_bps: float | None, latency_s: float = 0.0, jitter_s: float = 0.0, seed: int = 0) -> None:
        self.rate_bps = rate_bps
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self._random = random.Random(seed)
        self._busy_until = float("-inf")
        self._last_release = float("-inf")

    def reserve(self, now_s: float, num_bytes: int) -> tuple[float, float]:
        """Take the link's next free time for `num_bytes`; returns (depart_s, release_s)."""
        if self.rate_bps is None:
            depart = now_s
        else:
            start = max(self._busy_until, now_s - BURST_S)
            self._busy_until = start + num_bytes * 8 / self.rate_bps
            depart = max(self._busy_until, now_s)
        jitter = self._random.uniform(0.0, self.jitter_s) if self.jitter_s > 0 else 0.0
        self._last_release = max(self._last_release, depart + self.latency_s + jitter)
        return depart, self._last_release


class LinkShaper:
    """One direction of one island's link, shared by the connections that go over it. Thread-safe.

    Each sending thread has one chunk of `chunk_bytes` (2 ms of the rate) reserved at a time, so a small message
    waits for about one chunk of each other sender and no more. `bytes_sent` grows as chunks depart: what a
    dashboard should derive rates from.
    """

    def __init__(
        self, rate_bps: float | None = None, latency_s: float = 0.0, jitter_s: float = 0.0, seed: int = 0
    ) -> None:
        self._rule = LinkRule(rate_bps, latency_s, jitter_s, seed)
        self._lock = threading.Lock()
        self._bytes_sent = 0
        self.limited = rate_bps is not None
        self.delayed = latency_s > 0 or jitter_s > 0
        self.chunk_bytes = CHUNK_BYTES
        self.delay_line_bytes = DELAY_LINE_BYTES
        if rate_bps is not None:
            self.chunk_bytes = _chunk_bytes(rate_bps)
            self.delay_line_bytes = int(rate_bps / 8 * (latency_s + jitter_s + 2 * BURST_S)) + 4 * CHUNK_BYTES

    @property
    def bytes_sent(self) -> int:
        """Bytes (encrypted, as on the wire) that have departed since the start."""
        return self._bytes_sent

    def reserve(self, num_bytes: int) -> tuple[float, float]:
        """(depart_s, release_s) on time.monotonic()'s clock for a chunk handed over now."""
        with self._lock:
            return self._rule.reserve(time.monotonic(), num_bytes)

    def departed(self, num_bytes: int) -> None:
        """Count bytes that were reserved and whose departure time has come."""
        with self._lock:
            self._bytes_sent += num_bytes


def _chunk_bytes(rate_bps: float) -> int:
    """2 ms of the rate; at least 4 KiB, unless even that would take the link for more than 20 ms."""
    least = min(MIN_CHUNK_BYTES, rate_bps * 0.02 / 8)
    return int(min(max(rate_bps * 0.002 / 8, least, 64), CHUNK_BYTES))


class _DelayLine:
    """Chunks that have departed but not arrived: written to the socket when their time comes, by a thread."""

    def __init__(self, write: Callable[[Payload], None], limit_bytes: int, name: str) -> None:
        self._write = write
        self._limit = limit_bytes
        self._chunks: deque[tuple[float, Payload]] = deque()
        self._held = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, release_s: float, data: Payload) -> None:
        """Hand over a chunk; waits while a peer that reads slowly has filled the line."""
        with self._changed:
            while self._held > self._limit and not self._closed and self._error is None:
                self._changed.wait()
            if self._closed or self._error is not None:
                raise ChannelClosed(str(self._error or "closed by this side"))
            self._chunks.append((release_s, data))
            self._held += len(data)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written; False when it took longer."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._closed, timeout_s)
            return not self._held and self._error is None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while (data := self._next()) is not None:
            try:
                self._write(data)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._chunks.clear()
                    self._held = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._held -= len(data)
                self._changed.notify_all()

    def _next(self) -> Payload | None:
        with self._changed:
            while not self._closed:
                if not self._chunks:
                    self._changed.wait()
                    continue
                wait = self._chunks[0][0] - time.monotonic()
                if wait <= 0:
                    return self._chunks.popleft()[1]
                self._changed.wait(wait)
        return None


# ---- one connection -----------------------------------------------------------------------------


class _Tls:
    """A TLS session over memory BIOs: bytes in, bytes out, no socket.

    OpenSSL sessions are not for two threads at once, hence the lock around every call; it is never held during a
    socket operation. What reading makes OpenSSL want to send (alerts) stays in the outgoing BIO, in order, until the
    next write.
    """

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._in, self._out, server_side=server)
        self._lock = threading.Lock()

    def handshake(self, data: Payload | None = None) -> tuple[bool, bytes]:
        """Feed received bytes; returns whether the handshake is done, and bytes to send."""
        with self._lock:
            if data:
                self._in.write(data)
            try:
                self._object.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            return done, self._out.read()

    def pending_output(self) -> bytes:
        with self._lock:
            return self._out.read()

    def encrypt(self, data: Payload) -> bytes:
        with self._lock:
            self._object.write(data)
            return self._out.read()

    def feed(self, data: Payload) -> None:
        with self._lock:
            self._in.write(data)

    def decrypt_into(self, buffer: memoryview) -> int:
        """Decrypted bytes put into `buffer`: 0 when more must be fed first. Raises ChannelClosed at the end."""
        with self._lock:
            try:
                count = self._object.read(len(buffer), buffer)
            except ssl.SSLWantReadError:
                return 0
            except ssl.SSLZeroReturnError:
                raise ChannelClosed("closed by the peer") from None
            except ssl.SSLError as error:
                raise ChannelClosed(f"damaged or refused by the peer: {error.reason}") from None
        if not count:
            raise ChannelClosed("closed by the peer")
        return int(count)

    def close_notify(self) -> bytes:
        with self._lock, suppress(ssl.SSLError):
            self._object.unwrap()
        return self.pending_output()

    def peer_name(self) -> str:
        """The common name in the peer's certificate, which the authority has signed."""
        certificate = self._object.getpeercert(binary_form=True)
        assert certificate is not None, "the context demands a certificate"
        subject = x509.load_der_x509_certificate(certificate).subject
        names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if len(names) != 1:
            raise ProtocolError("certificate without exactly one common name")
        return str(names[0].value)


class Channel:
    """One mutually authenticated connection that carries frames.

    Attributes:
        peer: the name that the other side's certificate proves (an island, or "syncer").
        address: the other side's address, for people.
        bytes_received: encrypted bytes that came in; grows while a payload is on its way.
        last_received_s: time.monotonic() of the last bytes; bulk progress is a sign of life too.
    """

    def __init__(self, sock: socket.socket, tls: _Tls, peer: str, shaper: LinkShaper) -> None:
        self.peer = peer
        self.address = _address_text(sock)
        self.bytes_received = 0
        self.last_received_s = time.monotonic()
        self._sock = sock
        self._tls = tls
        self._shaper = shaper
        self._closed = threading.Event()
        self._close_reason = ""
        self._send_lock = threading.Lock()
        self._sealed_in = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
        # Buffers of sealed chunks that may be written again: touching fresh memory costs more than the encryption.
        self._spare: deque[memoryview] = deque()
        self._record = memoryview(bytearray(RECORD_HEAD_BYTES + TLS_RECORD_MAX_BYTES))
        self._delay_line: _DelayLine | None = None
        if shaper.delayed:
            self._delay_line = _DelayLine(self._write, shaper.delay_line_bytes, f"delay-{peer}")

    @property
    def closed(self) -> bool:
        """Whether close() was called or the connection was lost."""
        return self._closed.is_set()

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Send one message; returns when its last byte has left for the link, and `payload` may be reused.

        Raises:
            ChannelClosed: the connection is over. The message may have arrived in part; the peer drops that.
        """
        body = memoryview(payload).cast("B") if payload is not None else memoryview(b"")
        head = encode_message(message, len(body))
        with self._send_lock:
            key = os.urandom(KEY_BYTES) if len(body) else b""
            step = self._shaper.chunk_bytes
            record = self._tls.encrypt(head + key)
            for start in range(0, len(record), step):
                self._send_chunk(record[start : start + step])
            if not len(body):
                return
            cipher = AESGCM(key)
            for index, start in enumerate(range(0, len(body), step)):
                self._send_chunk(self._seal(cipher, index, body[start : start + step]))

    def receive(
        self, allocate: Allocate, on_progress: Callable[[int], None] | None = None
    ) -> tuple[Message, memoryview | None]:
        """Wait for the next message.

        Args:
            allocate: called with the message and its payload's length before any byte of the payload is taken, for
                messages that have one. Returns the buffer of exactly that length to receive into, or None to skip
                the payload, or raises ProtocolError to refuse.
            on_progress: called with the number of bytes after each piece of payload.

        Raises:
            ChannelClosed: the connection is over; nothing of an unfinished message is delivered.
            ProtocolError: the peer broke the protocol; the channel is closed.
        """
        try:
            return self._receive(allocate, on_progress)
        except ProtocolError as error:
            self.close(str(error))
            raise
        except ChannelClosed as error:
            reason = self._close_reason or str(error)
            self.close(reason)
            raise ChannelClosed(reason) from None

    def close(self, reason: str = "") -> None:
        """End the connection now; what is not sent is lost. Unblocks senders and the receiver. Idempotent."""
        if self._closed.is_set():
            return
        self._close_reason = reason or "closed by this side"
        self._closed.set()
        self._say_goodbye()
        if self._delay_line is not None:
            self._delay_line.close()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._delay_line is not None:
            self._delay_line.join()
        self._sock.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was sent has also passed the delay line; False when it took longer."""
        return self._delay_line is None or self._delay_line.drain(timeout_s)

    def _say_goodbye(self) -> None:
        """Send TLS's close_notify, if nothing is under way that it would cut into, and never waiting."""
        if not self._send_lock.acquire(blocking=False):
            return
        try:
            if self.flush(0.0):
                with suppress(OSError):
                    self._sock.send(self._tls.close_notify(), socket.MSG_DONTWAIT)
        finally:
            self._send_lock.release()

    # -- sending

    def _seal(self, cipher: AESGCM, index: int, plain: memoryview) -> memoryview:
        """One sealed chunk, in a buffer that _write gives back."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = memoryview(bytearray(RECORD_HEAD_BYTES + self._shaper.chunk_bytes + TAG_BYTES))
        out = buffer[: RECORD_HEAD_BYTES + len(plain) + TAG_BYTES]
        _RECORD_HEAD.pack_into(out, 0, SEALED_TYPE, len(plain))
        cipher.encrypt_into(_nonce(index), plain, None, out[RECORD_HEAD_BYTES:])
        return out

    def _send_chunk(self, data: Payload) -> None:
        if self._closed.is_set():
            raise ChannelClosed(self._close_reason)
        shaper = self._shaper
        if not shaper.limited and not shaper.delayed:
            self._write(data)
            shaper.departed(len(data))
            return
        depart_s, release_s = shaper.reserve(len(data))
        wait = depart_s - time.monotonic()
        if wait > 0 and self._closed.wait(wait):
            raise ChannelClosed(self._close_reason)
        shaper.departed(len(data))
        if self._delay_line is not None:
            try:
                self._delay_line.put(release_s, data)
            except ChannelClosed as error:
                raise ChannelClosed(self._close_reason or str(error)) from None
        else:
            self._write(data)

    def _write(self, data: Payload) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise ChannelClosed(self._close_reason or f"lost while sending: {error}") from None
        if isinstance(data, memoryview):
            assert isinstance(data.obj, bytearray)
            self._spare.append(memoryview(data.obj))

    # -- receiving

    def _receive(
        self, allocate: Allocate, on_progress: Callable[[int], None] | None
    ) -> tuple[Message, memoryview | None]:
        prefix = parse_prefix(self._read_exactly(PREFIX_BYTES))
        header = parse_header(prefix, self._read_exactly(prefix.header_len))
        size = prefix.payload_len
        message = decode_message(prefix.message_type, header, size)
        if not size:
            return message, None
        buffer = allocate(message, size)
        if buffer is None:
            self._skip(size, on_progress)
            return message, None
        target = buffer.cast("B")
        if len(target) != size:
            raise ProtocolError(f"payload of {size} bytes where {len(target)} were expected")
        self._open_payload(target, on_progress)
        return message, buffer

    def _read_exactly(self, count: int) -> bytearray:
        """`count` bytes of what comes inside TLS."""
        data = bytearray(count)
        target, done = memoryview(data), 0
        while done < count:
            got = self._tls.decrypt_into(target[done:])
            if not got:
                self._feed_record(self._read_record_head())
            done += got
        return data

    def _skip(self, size: int, on_progress: Callable[[int], None] | None) -> None:
        """Take a payload of `size` bytes and throw it away, in constant memory."""
        self._open_payload(None, on_progress, size)

    def _open_payload(
        self, target: memoryview | None, on_progress: Callable[[int], None] | None, size: int | None = None
    ) -> None:
        cipher = AESGCM(bytes(self._read_exactly(KEY_BYTES)))
        total = len(target) if target is not None else (size or 0)
        scratch = memoryview(bytearray(CHUNK_BYTES)) if target is None else None
        index = done = 0
        while done < total:
            kind, length = self._read_record_head()
            if kind != SEALED_TYPE:
                # The peer ends the session; anything else has no place here.
                self._feed_record((kind, length))
                if self._tls.decrypt_into(self._sealed_in):
                    raise ProtocolError("another frame within a payload")
                continue
            if not 0 < length <= min(CHUNK_BYTES, total - done):
                raise ProtocolError(f"sealed chunk of {length} bytes where {total - done} are left")
            sealed = self._sealed_in[: length + TAG_BYTES]
            self._receive_exactly(sealed)
            plain = scratch[:length] if target is None else target[done : done + length]  # type: ignore[index]
            try:
                cipher.decrypt_into(_nonce(index), sealed, None, plain)
            except InvalidTag:
                raise ChannelClosed("damaged on the way: a chunk of payload is not what was sent") from None
            index, done = index + 1, done + length
            if on_progress is not None:
                on_progress(length)

    def _read_record_head(self) -> tuple[int, int]:
        """(type, length) of the next record on the wire, length within what its type may have."""
        head = self._record[:RECORD_HEAD_BYTES]
        self._receive_exactly(head)
        kind = head[0]
        if kind == SEALED_TYPE:
            return kind, int(_RECORD_HEAD.unpack(head)[1])
        return kind, _tls_record_length(head)

    def _feed_record(self, head: tuple[int, int]) -> None:
        """Hand the record that `head` begins to TLS."""
        kind, length = head
        if kind == SEALED_TYPE:
            raise ProtocolError("payload that no frame has announced")
        end = RECORD_HEAD_BYTES + length
        self._receive_exactly(self._record[RECORD_HEAD_BYTES:end])
        self._tls.feed(self._record[:end])

    def _receive_exactly(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                count = self._sock.recv_into(target[done:])
            except OSError as error:
                raise ChannelClosed(self._close_reason or f"lost while receiving: {error}") from None
            if not count:
                raise ChannelClosed(self._close_reason or "closed by the peer")
            done += count
            self.bytes_received += count
            self.last_received_s = time.monotonic()


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")


def _tls_record_length(head: memoryview | bytes | bytearray) -> int:
    """Length of the TLS record with these first five bytes."""
    length = (head[3] << 8) | head[4]
    if head[0] not in TLS_TYPES or head[1] != 3 or length > TLS_RECORD_MAX_BYTES:
        raise ProtocolError("not a TLS record")
    return length


# ---- sending in the background ------------------------------------------------------------------


@dataclass(slots=True)
class _Item:
    message: Message
    payload: Payload | None
    on_sent: Callable[[], None] | None
    on_dropped: Callable[[], None] | None


class Outbox:
    """Sends for one channel in a thread of its own.

    Invariant: at most `max_items` items wait, and of items put with a key at most one per key: the newer takes the
    older one's place in the queue. So a peer that reads slowly costs one payload per key plus the one under way.
    Every item put ends in exactly one of on_sent (its payload may be reused) and on_dropped (replaced, or the channel
    is over). Both are called from arbitrary threads and must be quick.

    Args:
        channel: closed when sending fails or too much waits; its receiver thread then learns of it.
        on_error: called once with the reason when sending fails.
        max_items: above this the peer is taken for dead and the channel is closed.
    """

    def __init__(
        self, channel: Channel, *, on_error: Callable[[str], None] | None = None, max_items: int = 1024
    ) -> None:
        self.channel = channel
        self._on_error = on_error
        self._max_items = max_items
        self._items: OrderedDict[object, _Item] = OrderedDict()
        self._sending = False
        self._closing = False
        self._lost = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"outbox-{channel.peer}", daemon=True)
        self._thread.start()

    def put(
        self,
        message: Message,
        payload: Payload | None = None,
        *,
        key: object = None,
        on_sent: Callable[[], None] | None = None,
        on_dropped: Callable[[], None] | None = None,
    ) -> bool:
        """Queue a message, never blocking. False (and on_dropped) when the channel is over or the queue is full."""
        item = _Item(message, payload, on_sent, on_dropped)
        dropped: _Item | None = None
        overflow = False
        with self._changed:
            slot = key if key is not None else object()
            if self._closing or self.channel.closed:
                dropped = item
            elif slot in self._items:
                dropped, self._items[slot] = self._items[slot], item
            elif len(self._items) >= self._max_items:
                dropped, overflow, self._lost = item, True, True
            else:
                self._items[slot] = item
            self._changed.notify_all()
        if overflow:
            self.channel.close(f"{self.channel.peer} does not read: {self._max_items} messages wait")
        if dropped is not None and dropped.on_dropped is not None:
            dropped.on_dropped()
        return dropped is not item

    @property
    def waiting(self) -> int:
        """Items in the queue, without the one under way."""
        return len(self._items)

    def close(self, flush_s: float = 0.0) -> bool:
        """Stop, after waiting up to `flush_s` for what is queued. True when all of it was sent. Closes no channel
        that was flushed; one that is stuck is closed, since its thread cannot be stopped otherwise."""
        deadline = time.monotonic() + flush_s
        with self._changed:
            if flush_s > 0:
                self._changed.wait_for(lambda: self.channel.closed or not (self._items or self._sending), flush_s)
            flushed = not (self._items or self._sending or self._lost)
            self._closing = True
            self._changed.notify_all()
        if flushed:
            flushed = self.channel.flush(max(deadline - time.monotonic(), 0.0))
        else:
            # Its thread may be stuck in a send, which nothing else would end.
            self.channel.close("not flushed in time")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        return flushed

    def _run(self) -> None:
        while (item := self._take()) is not None:
            try:
                self.channel.send(item.message, item.payload)
            except ChannelClosed as error:
                self._fail(item, str(error))
                return
            except Exception as error:
                log.exception("sending to %s failed", self.channel.peer)
                self._fail(item, f"internal error: {error}")
                return
            if item.on_sent is not None:
                item.on_sent()
            with self._changed:
                self._sending = False
                self._changed.notify_all()
        self._drop_rest()

    def _take(self) -> _Item | None:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closing)
            if self._closing:
                return None
            self._sending = True
            return self._items.popitem(last=False)[1]

    def _fail(self, item: _Item, reason: str) -> None:
        self.channel.close(reason)
        if item.on_dropped is not None:
            item.on_dropped()
        with self._changed:
            was_closing, self._closing, self._sending = self._closing, True, False
            self._lost = True
        self._drop_rest()
        if self._on_error is not None and not was_closing:
            self._on_error(reason)

    def _drop_rest(self) -> None:
        with self._changed:
            rest = list(self._items.values())
            self._items.clear()
            self._changed.notify_all()
        for item in rest:
            if item.on_dropped is not None:
                item.on_dropped()


# ---- connecting ---------------------------------------------------------------------------------


def parse_address(text: str) -> tuple[str, int]:
    """("host", port) from "host:port" or "[::1]:port".

    Raises:
        ValueError: neither of the two.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address of the form host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host, int(port)


def connect(
    address: tuple[str, int] | str,
    credentials: Credentials,
    shaper: LinkShaper,
    hello: Hello,
    timeout_s: float,
    *,
    peer: str = SYNCER,
) -> Channel:
    """Dial what the user wrote, prove both sides' names, and send `hello`; the answer is the caller's to receive.

    A refused or broken connection is tried again until `timeout_s` is over: the other side may not be up yet, or its
    door crowded. A wrong certificate is final.

    Raises:
        EnvironmentNotReady: nobody there, not who they should be, or not in time.
    """
    host, port = parse_address(address) if isinstance(address, str) else address
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    deadline = time.monotonic() + timeout_s
    pause = 0.05
    while True:
        try:
            return _connect_once((host, port), credentials, shaper, hello, deadline, peer)
        except (ssl.SSLError, ProtocolError) as error:
            raise EnvironmentNotReady(f"no secure connection to the {peer} at {where}", why=str(error)) from None
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise EnvironmentNotReady(
                    f"cannot reach the {peer} at {where} within {timeout_s:g} s",
                    why=str(error),
                    hint="check the address, firewalls in between, and that the keys are those of this run",
                ) from None
        time.sleep(pause)
        pause = min(pause * 2, 1.0)


def _connect_once(
    address: tuple[str, int],
    credentials: Credentials,
    shaper: LinkShaper,
    hello: Hello,
    deadline: float,
    peer: str,
) -> Channel:
    sock = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.01))
    channel: Channel | None = None
    try:
        _tune(sock)
        tls = _client_handshake(sock, credentials, deadline)
        name = tls.peer_name()
        if name != peer:
            raise ProtocolError(f"the other side proved to be {name!r}, not {peer!r}")
        sock.settimeout(None)
        channel = Channel(sock, tls, name, shaper)
        channel.send(hello)
    except BaseException:
        if channel is not None:
            channel.close()
        sock.close()
        raise
    return channel


def _client_handshake(sock: socket.socket, credentials: Credentials, deadline: float) -> _Tls:
    tls = _Tls(credentials.context(server=False), server=False)
    received = b""
    while True:
        sock.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            done, output = tls.handshake(received)
        except ssl.SSLError:
            with suppress(OSError):
                sock.sendall(tls.pending_output())
            raise
        if output:
            sock.sendall(output)
        if done:
            return tls
        received = _receive_record(sock)


def _receive_record(sock: socket.socket) -> bytes:
    """One TLS record of the handshake, and not a byte more."""
    record = b""
    end = RECORD_HEAD_BYTES
    while len(record) < end:
        data = sock.recv(end - len(record))
        if not data:
            raise ChannelClosed("closed by the peer during the TLS handshake")
        record += data
        if len(record) == RECORD_HEAD_BYTES:
            end += _tls_record_length(record)
    return record


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # bbr paces even loopback, to about 2.2 GB/s, at twice the CPU time of cubic. Real links keep the system's choice.
    if _is_loopback(sock) and hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _is_loopback(sock: socket.socket) -> bool:
    host = sock.getpeername()[0]
    return bool(host.startswith("127.") or host == "::1")


def _address_text(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- listening ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pending:
    """A connection that has not proved itself: what it may cost is bounded here."""

    sock: socket.socket
    address: str
    deadline_s: float
    tls: _Tls
    peer: str = ""
    received: int = 0
    record: bytearray = field(default_factory=bytearray)
    reader: FrameReader = field(default_factory=FrameReader)


class Listener:
    """Accepts connections and hands those over that finished TLS and said Hello under their certificate's name.

    One thread with non-blocking sockets. Until it is handed over, a connection costs one slot of `max_pending` (the
    oldest is closed for a new one), `deadline_s` seconds and MAX_UNPROVEN_BYTES of reading.

    Args:
        sock: a listening socket (the launcher makes it, so a taken port is an error before anything starts).
        credentials: the syncer's.
        on_channel: called with the channel and its Hello from the listener's thread; must be quick.
        shaper_for: the shaper of the link towards an island.
        on_refused: called with (address, reason), once per host and reason.
    """

    MAX_UNPROVEN_BYTES = 16 * 1024
    MAX_HELLO_BYTES = 80 * 1024

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        on_channel: Callable[[Channel, Hello], None],
        *,
        shaper_for: Callable[[str], LinkShaper] | None = None,
        on_refused: Callable[[str, str], None] | None = None,
        max_pending: int = 64,
        deadline_s: float = 5.0,
    ) -> None:
        self._sock = sock
        self._context = credentials.context(server=True)
        self._on_channel = on_channel
        self._shaper_for = shaper_for or (lambda _island: LinkShaper())
        self._on_refused = on_refused or (lambda address, reason: log.warning("refused %s: %s", address, reason))
        self._max_pending = max_pending
        self._deadline_s = deadline_s
        self._refused: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._closing = False
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Connections that have not proved themselves yet."""
        return len(self._pending)

    def close(self) -> None:
        """Stop accepting; channels handed over stay open."""
        self._closing = True
        with suppress(OSError):
            self._wake_write.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closing:
            timeout = None
            if self._pending:
                timeout = max(next(iter(self._pending.values())).deadline_s - time.monotonic(), 0.0)
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._sock:
                    self._accept()
                elif key.data is not None:
                    self._serve(key.data)
            now = time.monotonic()
            for pending in list(self._pending.values()):
                if pending.deadline_s > now:
                    break
                self._refuse(pending, f"silent for {self._deadline_s:g} s" if not pending.peer else "no Hello in time")
        for pending in list(self._pending.values()):
            self._forget(pending)
            pending.sock.close()
        self._selector.close()
        self._sock.close()
        self._wake_read.close()
        self._wake_write.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of file descriptors, or gone before we came to it: make room, go on.
            self._say_refused("unknown", f"accept failed: {error}")
            if self._pending:
                self._refuse(next(iter(self._pending.values())), "too many connections")
            else:
                time.sleep(0.05)  # the socket stays readable: without a pause this would be a busy loop
            return
        try:
            sock.setblocking(False)
            _tune(sock)
        except OSError:
            sock.close()
            return
        if len(self._pending) >= self._max_pending:
            self._refuse(next(iter(self._pending.values())), "too many connections that have not proved themselves")
        deadline = time.monotonic() + self._deadline_s
        pending = _Pending(sock, _address_text(sock), deadline, _Tls(self._context, server=True))
        self._pending[sock.fileno()] = pending
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _serve(self, pending: _Pending) -> None:
        """Take what one unproven connection has sent, one step further."""
        if self._pending.get(pending.sock.fileno()) is not pending:
            return
        try:
            hello = self._advance(pending)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            with suppress(OSError):
                pending.sock.send(pending.tls.pending_output())
            self._refuse(pending, _reason_text(error))
            return
        if hello is not None:
            self._hand_over(pending, hello)

    def _advance(self, pending: _Pending) -> Hello | None:
        record = self._next_record(pending)
        if record is None:
            return None
        if pending.peer:
            pending.tls.feed(record)
            return self._hello(pending)
        done, output = pending.tls.handshake(record)
        # A few KiB into an empty socket buffer: what does not fit there means a peer up to no good.
        if output and pending.sock.send(output) != len(output):
            raise ProtocolError("does not read during the TLS handshake")
        if done:
            pending.peer = pending.tls.peer_name()
            pending.received = 0
        return None

    def _next_record(self, pending: _Pending) -> bytearray | None:
        """The next whole TLS record, once it is there. Never takes a byte beyond it: the Channel goes on from there."""
        head_only = len(pending.record) < RECORD_HEAD_BYTES
        end = RECORD_HEAD_BYTES + (0 if head_only else _tls_record_length(pending.record))
        data = pending.sock.recv(end - len(pending.record))
        if not data:
            raise ProtocolError("closed before it proved itself")
        limit = self.MAX_HELLO_BYTES if pending.peer else self.MAX_UNPROVEN_BYTES
        pending.received += len(data)
        if pending.received > limit:
            raise ProtocolError(f"more than {limit} bytes before its Hello")
        pending.record += data
        if len(pending.record) < RECORD_HEAD_BYTES:
            return None
        if len(pending.record) < RECORD_HEAD_BYTES + _tls_record_length(pending.record):
            return None
        record, pending.record = pending.record, bytearray()
        return record

    def _hello(self, pending: _Pending) -> Hello | None:
        scratch = memoryview(bytearray(16 * 1024))
        while count := pending.tls.decrypt_into(scratch):
            frames = pending.reader.feed(scratch[:count])
            if not frames:
                continue
            hello = decode_message(frames[0].message_type, frames[0].header)
            if not isinstance(hello, Hello) or len(frames) > 1 or pending.reader.pending:
                raise ProtocolError("expected one Hello and then to be answered")
            if hello.island != pending.peer:
                raise ProtocolError(f"says it is {hello.island[:64]!r}, but its certificate is of {pending.peer!r}")
            return hello
        return None

    def _hand_over(self, pending: _Pending, hello: Hello) -> None:
        self._forget(pending)
        pending.sock.setblocking(True)
        channel = Channel(pending.sock, pending.tls, pending.peer, self._shaper_for(pending.peer))
        try:
            self._on_channel(channel, hello)
        except Exception:
            log.exception("handing over the connection of %s failed", pending.peer)
            channel.close("internal error")

    def _forget(self, pending: _Pending) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(pending.sock)
        self._pending.pop(pending.sock.fileno(), None)

    def _refuse(self, pending: _Pending, reason: str) -> None:
        self._forget(pending)
        pending.sock.close()
        self._say_refused(pending.address, reason)

    def _say_refused(self, address: str, reason: str) -> None:
        seen = (address.rpartition(":")[0], reason)
        if seen in self._refused:
            return
        self._refused[seen] = None
        if len(self._refused) > 1024:
            self._refused.popitem(last=False)
        self._on_refused(address, reason)


def _reason_text(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS handshake failed: {error.reason or error}"
    return str(error) or type(error).__name__
