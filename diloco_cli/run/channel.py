"""One connection between a learner and the syncer: messages with payloads over TLS and an emulated link.

Threads, blocking sockets: a channel has at most one thread that sends, one that receives and, where its link has
latency, one that releases delayed chunks. close() may come from anywhere and unblocks all of them.
Owns: the socket and what goes over it once both sides are proved. Must not: decide anything of the protocol or touch
tensors; know how connections come about (run.connecting, run.listener). Called by: run.outbox, run.peers,
run.learner_link.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from diloco_cli.run.links import CHUNK_BYTES, DelayLine, LinkShaper
from diloco_cli.run.secure import (
    KEY_BYTES,
    RECORD_HEAD_BYTES,
    SEALED_TYPE,
    TAG_BYTES,
    TLS_RECORD_MAX_BYTES,
    ChannelClosed,
    Opener,
    Payload,
    Sealer,
    TlsSession,
    record_head,
    sealed_bytes,
)
from diloco_cli.wire.frames import PREFIX_BYTES, ProtocolError, parse_header, parse_prefix
from diloco_cli.wire.messages import Message, decode_message, encode_message

Allocate = Callable[[Message, int], memoryview | None]


class Channel:
    """One mutually authenticated connection that carries frames.

    Attributes:
        peer: the name that the other side's certificate proves (an island, or "syncer").
        address: the other side's address, for people.
        bytes_received: encrypted bytes that came in; grows while a payload is on its way.
        last_received_s: time.monotonic() of the last bytes; bulk progress is a sign of life too.
    """

    def __init__(self, sock: socket.socket, tls: TlsSession, peer: str, shaper: LinkShaper) -> None:
        self.peer = peer
        self.address = address_text(sock)
        self.bytes_received = 0
        self.last_received_s = time.monotonic()
        self._sock = sock
        self._tls = tls
        self._shaper = shaper
        self._closed = threading.Event()
        self._close_reason = ""
        self._send_lock = threading.Lock()
        self._spoil_next = False
        self._sealed_in = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
        # Buffers of sealed chunks that may be written again: touching fresh memory costs more than the encryption.
        self._spare: deque[memoryview] = deque()
        self._record = memoryview(bytearray(RECORD_HEAD_BYTES + TLS_RECORD_MAX_BYTES))
        self._delay_line: DelayLine | None = None
        if shaper.delayed:
            self._delay_line = DelayLine(self._write, shaper.delay_line_bytes, f"delay-{peer}")

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
            if self._closed.is_set():
                raise ChannelClosed(self._close_reason)
            sealer = Sealer() if len(body) else None
            step = self._shaper.chunk_bytes
            record = self._tls.encrypt(head + sealer.key if sealer else head)
            for start in range(0, len(record), step):
                self._send_chunk(record[start : start + step])
            if sealer is None:
                return
            for start in range(0, len(body), step):
                sealed = sealer.seal(body[start : start + step], self._spare_buffer())
                if self._spoil_next:
                    self._spoil_next = False
                    sealed[-1] ^= 1
                self._send_chunk(sealed)

    def spoil_next(self) -> None:
        """Change a byte of the next payload on its way: a failure on purpose, which the peer must notice."""
        self._spoil_next = True

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

    def _spare_buffer(self) -> memoryview:
        """A buffer for one sealed chunk, which _write gives back."""
        try:
            return self._spare.pop()
        except IndexError:
            return memoryview(bytearray(sealed_bytes(self._shaper.chunk_bytes)))

    def _send_chunk(self, data: Payload) -> None:
        if self._closed.is_set():
            raise ChannelClosed(self._close_reason)
        shaper = self._shaper
        if shaper.passes:
            self._write(data)
            shaper.departed(len(data))
            return
        depart_s, release_s = shaper.reserve(len(data))
        wait = depart_s - time.monotonic()
        if wait > 0 and self._closed.wait(wait):
            raise ChannelClosed(self._close_reason)
        shaper.departed(len(data))
        if self._delay_line is None and release_s > depart_s:
            # The link has become slow.
            self._delay_line = DelayLine(self._write, shaper.delay_line_bytes, f"delay-{self.peer}")
        if self._delay_line is None:
            self._write(data)
        elif not self._delay_line.put(release_s, data):
            raise ChannelClosed(self._close_reason or str(self._delay_line.error))

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
        opener = Opener(bytes(self._read_exactly(KEY_BYTES)))
        total = len(target) if target is not None else (size or 0)
        scratch = memoryview(bytearray(CHUNK_BYTES)) if target is None else None
        done = 0
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
            opener.open(sealed, plain)
            done += length
            if on_progress is not None:
                on_progress(length)

    def _read_record_head(self) -> tuple[int, int]:
        """(type, length) of the next record on the wire, length within what its type may have."""
        head = self._record[:RECORD_HEAD_BYTES]
        self._receive_exactly(head)
        return record_head(head)

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
                # Woken once per chunk, not once per packet.
                count = self._sock.recv_into(target[done:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise ChannelClosed(self._close_reason or f"lost while receiving: {error}") from None
            if not count:
                raise ChannelClosed(self._close_reason or "closed by the peer")
            done += count
            self.bytes_received += count
            self.last_received_s = time.monotonic()


def tune_socket(sock: socket.socket) -> None:
    """Options that every connection wants."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # bbr paces even loopback, to about 2.2 GB/s, at twice the CPU time of cubic. Real links keep the system's choice.
    if _is_loopback(sock) and hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _is_loopback(sock: socket.socket) -> bool:
    host = sock.getpeername()[0]
    return bool(host.startswith("127.") or host == "::1")


def address_text(sock: socket.socket) -> str:
    """The other side's address, for people."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
