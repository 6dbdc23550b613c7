"""Dialling: from an address and credentials to a channel on which both sides' names are proved.

Owns: the client's handshake, and patience with a syncer that is not up yet. Must not: wait for what the other side
answers. Called by: run.learner_link.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress

from diloco_cli.errors import LostConnection
from diloco_cli.run.channel import Channel, tune_socket
from diloco_cli.run.credentials import SYNCER, Credentials
from diloco_cli.run.links import LinkShaper
from diloco_cli.run.secure import RECORD_HEAD_BYTES, ChannelClosed, TlsSession, tls_record_length
from diloco_cli.wire.frames import ProtocolError
from diloco_cli.wire.messages import Hello


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
        LostConnection: nobody there, not who they should be, or not in time.
    """
    host, port = parse_address(address) if isinstance(address, str) else address
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    deadline = time.monotonic() + timeout_s
    pause = 0.05
    while True:
        try:
            return _connect_once((host, port), credentials, shaper, hello, deadline, peer)
        except (ssl.SSLError, ProtocolError) as error:
            raise LostConnection(f"no secure connection to the {peer} at {where}", why=str(error)) from None
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise LostConnection(
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
        tune_socket(sock)
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


def _client_handshake(sock: socket.socket, credentials: Credentials, deadline: float) -> TlsSession:
    tls = TlsSession(credentials.context(server=False), server=False)
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
            end += tls_record_length(record)
    return record
