"""Credentials: the certificate authority of one run, and the certificates that it gives to syncer and islands.

Every run makes its own authority. Whoever holds a certificate of it may join, under the name in the certificate and
no other; nobody else gets past the TLS handshake. Files, in RUN/keys (0700, each file 0600):

    ca.pem         the authority's certificate: what both sides check the other against
    ca-key.pem     its private key, kept on the launcher's machine, for islands that join later
    NAME.pem       private key and certificate of the syncer ("syncer") or of an island (the island's name)

Theory: an island's certificate is for clients only and the syncer's for servers only (extended key usage), so a
stolen island key cannot pose as the syncer. Mutual TLS 1.3 only, without session tickets.
Owns: key files and TLS contexts. Must not: log or print a key, or put one on a command line or into the environment.
Called by: run.launcher (make_authority, issue), run.connecting and run.listener (contexts).
"""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SYNCER = "syncer"
VALID_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = {"ca", "ca-key"}


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where one party's key and certificate lie.

    Attributes:
        name: the name in the certificate.
        own: file with the private key and the certificate.
        authority: file with the run's CA certificate.
    """

    name: str
    own: Path
    authority: Path

    def context(self, *, server: bool) -> ssl.SSLContext:
        """A TLS 1.3 context that shows our certificate and demands one of the same authority from the peer."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Names are islands, not hosts: the transport compares the certificate's common name itself.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.own)
        if server:
            context.num_tickets = 0
        return context


def make_authority(keys: Path) -> None:
    """Make RUN/keys with a new certificate authority. An existing one stays (a run that goes on keeps its islands)."""
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    keys.chmod(0o700)
    if (keys / "ca.pem").exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("diloco run authority")
    builder = _builder(name, name, key.public_key(), key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write_private(keys / "ca-key.pem", _key_pem(key))
    _write_private(keys / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))


def issue(keys: Path, name: str) -> Credentials:
    """Make a key and certificate for the syncer or an island, signed by the authority in `keys`.

    Raises:
        ValueError: a name that is no file name of at most 64 characters, or reserved.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ValueError(f"{name!r} cannot be a name in a certificate")
    authority = x509.load_pem_x509_certificate((keys / "ca.pem").read_bytes())
    authority_key = serialization.load_pem_private_key((keys / "ca-key.pem").read_bytes(), password=None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    usage = ExtendedKeyUsageOID.SERVER_AUTH if name == SYNCER else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = _builder(_common_name(name), authority.subject, key.public_key(), authority_key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    certificate = builder.sign(authority_key, hashes.SHA256())
    _write_private(keys / f"{name}.pem", _key_pem(key) + certificate.public_bytes(serialization.Encoding.PEM))
    return load(keys, name)


def load(keys: Path, name: str) -> Credentials:
    """The credentials of `name` that were issued into `keys` (or copied there)."""
    return Credentials(name, keys / f"{name}.pem", keys / "ca.pem")


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
) -> x509.CertificateBuilder:
    # A day back: the clocks of islands may be behind.
    start = datetime.now(UTC) - timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that nobody else can read at any moment, replacing an older one in one step."""
    partial = path.with_name(path.name + ".part")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    partial.replace(path)
