"""The syncer's door: accepts connections and hands on those that have proved who they are.

Owns: the bounds on what anybody who is not proved may cost, in connections, time and memory. Must not: know what
learners are for (run.peers does). Called by: run.syncer_main.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from diloco_cli.run.channel import Channel, address_text, tune_socket
from diloco_cli.run.credentials import Credentials
from diloco_cli.run.links import LinkShaper
from diloco_cli.run.secure import RECORD_HEAD_BYTES, TlsSession, tls_record_length
from diloco_cli.wire.frames import FrameReader, ProtocolError
from diloco_cli.wire.messages import Hello, decode_message

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A connection that has not proved itself: what it may cost is bounded here."""

    sock: socket.socket
    address: str
    deadline_s: float
    tls: TlsSession
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
            tune_socket(sock)
        except OSError:
            sock.close()
            return
        if len(self._pending) >= self._max_pending:
            self._refuse(next(iter(self._pending.values())), "too many connections that have not proved themselves")
        deadline = time.monotonic() + self._deadline_s
        pending = _Pending(sock, address_text(sock), deadline, TlsSession(self._context, server=True))
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
        end = RECORD_HEAD_BYTES + (0 if head_only else tls_record_length(pending.record))
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
        if len(pending.record) < RECORD_HEAD_BYTES + tls_record_length(pending.record):
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
