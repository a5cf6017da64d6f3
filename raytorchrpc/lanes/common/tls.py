"""TLS 1.3 for groups formed with ``GroupConfig(tls=True)``.

The process that forms the group makes one key and certificate, which reach the members together with the group's
secret. Each end of a connection presents that certificate and accepts no other. TLS runs on memory buffers, so that it
works on non-blocking sockets and on nng connections alike.
"""

from __future__ import annotations

import datetime
import functools
import os
import ssl
import threading
import time
from typing import Any

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes.common.handshake import HungUp, Refused, Stream

#: Read from TLS at a time (bytes); a record has no more.
_RECORD = 1 << 14
#: Buffers of a frame below this total size are encrypted as one (bytes).
_JOINED_BYTES = 1 << 16
#: Largest difference between the clocks of two hosts.
_SKEW = datetime.timedelta(days=2)
_LIFE = datetime.timedelta(days=3650)


def make_identity(name: str) -> bytes:
    """Make a key and its certificate, as PEM. Raises ConfigurationError if cryptography is not installed."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigurationError(
            "GroupConfig(tls=True) needs the package cryptography in the process that forms the group: "
            "pip install '.[tls]' in a checkout"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return bytes(private + certificate.public_bytes(serialization.Encoding.PEM))


@functools.lru_cache(maxsize=8)
def _context(identity: bytes, accepting: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepting else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the handshake that follows verifies the identity
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity[identity.index(b"-----BEGIN CERTIFICATE") :].decode())
    fd = os.memfd_create("raytorchrpc-tls", os.MFD_CLOEXEC)  # OpenSSL reads only files, and this one has no name
    try:
        os.write(fd, identity)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    if accepting:
        context.num_tickets = 0  # the client does not read before it sends
    return context


class TlsSession:
    """TLS over another stream: first the Stream of the handshake, then what protects the connection."""

    incoming = None

    def __init__(self, stream: Stream, identity: bytes, *, accepting: bool, timeout_s: float) -> None:
        """Run TLS's own handshake. Blocks for at most ``timeout_s`` seconds. Raises Refused or OSError."""
        self._stream: Stream | None = stream
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = _context(identity, accepting).wrap_bio(self._arrived, self._leaving, server_side=accepting)
        self._lock = threading.Lock()  # OpenSSL allows one thread at a time for a connection
        self._until = time.monotonic() + timeout_s
        self._do(self._tls.do_handshake)

    # --- the handshake's stream ---------------------------------------------------------------------------

    def settimeout(self, seconds: float | None) -> None:
        """See Stream. None ends the handshake."""
        if seconds is not None:
            self._until = time.monotonic() + seconds
        elif self._stream is not None:
            self._stream.settimeout(None)
            self._stream = None

    def sendall(self, data: bytes) -> None:
        """See Stream."""
        self._do(lambda: self._tls.write(data))

    def recv(self, size: int) -> bytes:
        """See Stream."""
        return bytes(self._do(lambda: self._tls.read(size)))

    def _do(self, step: Any) -> Any:
        stream = self._stream
        assert stream is not None
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise Refused(f"TLS: {error.reason or error}; it does not have this group's certificate") from error
            finally:
                if self._leaving.pending:
                    stream.settimeout(max(0.001, self._until - time.monotonic()))
                    stream.sendall(self._leaving.read())
            stream.settimeout(max(0.001, self._until - time.monotonic()))
            data = stream.recv(_RECORD)
            if not data:
                raise HungUp("it hung up")
            self._arrived.write(data)

    # --- the connection's protection ----------------------------------------------------------------------

    def seal(self, buffers: list[Any]) -> list[Any]:
        """See Tagged.seal."""
        if sum(memoryview(part).nbytes for part in buffers) < _JOINED_BYTES:
            buffers = [b"".join(buffers)]
        with self._lock:
            for part in buffers:
                if len(part):
                    self._tls.write(part)
            return [self._leaving.read()]

    def decrypt(self, data: Any) -> bytearray:
        """Decrypt bytes of the incoming stream; the result may be empty. Raises OSError if they are not authentic."""
        plain = bytearray()
        with self._lock:
            self._arrived.write(data)
            try:
                while record := self._tls.read(_RECORD):
                    plain += record
            except ssl.SSLWantReadError:  # the rest of a record is still in transit
                pass
        return plain
