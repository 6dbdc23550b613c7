"""What makes a connection private: a TLS 1.3 session without a socket, and sealed chunks for payloads.

Bytes on a connection: TLS records (handshake, all frame heads, so all of control) and, for payloads only, sealed
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

Owns: all cryptography of a connection. Must not: touch sockets, or know of messages. Called by: run.channel,
run.connecting, run.listener.
"""

from __future__ import annotations

import os
import ssl
import struct
import threading
from contextlib import suppress

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.x509.oid import NameOID

from diloco_cli.wire.frames import ProtocolError

RECORD_HEAD_BYTES = 5
TLS_RECORD_MAX_BYTES = 16 * 1024 + 256
TLS_TYPES = (0x14, 0x15, 0x16, 0x17)
SEALED_TYPE = 0x44
KEY_BYTES = 32
TAG_BYTES = 16

_RECORD_HEAD = struct.Struct(">BI")

Payload = memoryview | bytes | bytearray


class ChannelClosed(ConnectionError):
    """The connection is over: closed by us, by the peer, or damaged. The message says which."""


class TlsSession:
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
        """What OpenSSL wants sent of its own accord: alerts, answers."""
        with self._lock:
            return self._out.read()

    def encrypt(self, data: Payload) -> bytes:
        """Records that carry `data`, after what OpenSSL wanted to send before. Raises ChannelClosed at the end."""
        with self._lock:
            try:
                self._object.write(data)
            except ssl.SSLError as error:
                # Another thread has just said goodbye, or has met a damaged record.
                raise ChannelClosed(f"the TLS session has ended: {error.reason}") from None
            return self._out.read()

    def feed(self, data: Payload) -> None:
        """Take received records, for decrypt_into."""
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
        """The record that ends the session in order."""
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


class Sealer:
    """Seals one payload, chunk after chunk, under a key of its own."""

    def __init__(self) -> None:
        self.key = os.urandom(KEY_BYTES)
        self._cipher = AESGCM(self.key)
        self._index = 0

    def seal(self, plain: memoryview, buffer: memoryview) -> memoryview:
        """The next chunk, in the first bytes of `buffer` (sealed_bytes(len(plain)) or more)."""
        out = buffer[: sealed_bytes(len(plain))]
        _RECORD_HEAD.pack_into(out, 0, SEALED_TYPE, len(plain))
        self._cipher.encrypt_into(_nonce(self._index), plain, None, out[RECORD_HEAD_BYTES:])
        self._index += 1
        return out


class Opener:
    """Opens one payload's chunks, in the order in which they were sealed."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._index = 0

    def open(self, sealed: memoryview, plain: memoryview) -> None:
        """Decrypt the next chunk (ciphertext and tag, without its head) into `plain` of the plain bytes' length.

        Raises:
            ChannelClosed: not the chunk that was sealed next. `plain` then holds nothing of use.
        """
        try:
            self._cipher.decrypt_into(_nonce(self._index), sealed, None, plain)
        except InvalidTag:
            raise ChannelClosed("damaged on the way: a chunk of payload is not what was sent") from None
        self._index += 1


def sealed_bytes(num_bytes: int) -> int:
    """Length on the wire of a chunk of `num_bytes` plain bytes."""
    return RECORD_HEAD_BYTES + num_bytes + TAG_BYTES


def record_head(head: memoryview | bytes | bytearray) -> tuple[int, int]:
    """(type, length) from the first RECORD_HEAD_BYTES of what comes next on the wire.

    The length is that of a TLS record's body, within its bounds, or as announced that of a sealed chunk's plain bytes.
    """
    if head[0] == SEALED_TYPE:
        kind, length = _RECORD_HEAD.unpack(head)
        return kind, length
    return head[0], tls_record_length(head)


def tls_record_length(head: memoryview | bytes | bytearray) -> int:
    """Length of the TLS record with these first five bytes."""
    length = (head[3] << 8) | head[4]
    if head[0] not in TLS_TYPES or head[1] != 3 or length > TLS_RECORD_MAX_BYTES:
        raise ProtocolError("not a TLS record")
    return length


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")
