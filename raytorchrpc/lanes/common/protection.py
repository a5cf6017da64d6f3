"""Protects the frames of a connection after its handshake, where others can reach the bytes: on TCP.

By default a keyed tag follows each frame: BLAKE2b for small frames, which it starts fastest on, and HMAC-SHA256 for
larger ones, for which processors have instructions. The tag covers the frame and its position in the stream, under a
key of this connection and direction. A frame that was changed, injected, replayed, dropped or reordered is refused
before any of it is used. With ``GroupConfig(tls=True)`` TLS does the same, and encrypts (see ``TlsSession``).
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import hmac
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.handshake import Credentials, Identity, Refused, SessionKeys, Steps
from raytorchrpc.process.locks import Lock

TAG_BYTES = 16
#: From this size on HMAC-SHA256 is faster than BLAKE2b (bytes; Python 3.11, a processor with SHA instructions).
_LARGE_BYTES = 2048
#: A single buffer below this size is copied, which is faster than sending two (bytes).
_COPIED_BYTES = 4096
#: Read from TLS at a time (bytes); a record has no more.
_RECORD = 1 << 14
#: Of a record, which ends with the size of its body (bytes).
_HEADER = 5
#: Buffers of a frame below this total size are encrypted as one (bytes).
_JOINED_BYTES = 1 << 16
#: Largest difference between the clocks of two hosts.
_SKEW = datetime.timedelta(days=2)
_LIFE = datetime.timedelta(days=3650)


class Forged(ValueError):
    """A frame is not what the other end of the connection sent at this position."""

    def __init__(self) -> None:
        super().__init__("a frame was changed, injected or replayed in transit")


class FrameAuthenticator:
    """Makes or checks the tags of one direction of one connection. One thread at a time."""

    def __init__(self, key: bytes) -> None:
        small, large = (hmac.digest(key, use, "sha256") for use in (b"small frames", b"large frames"))
        self._small = hashlib.blake2b(key=small, digest_size=TAG_BYTES)
        self._large = hmac.new(large, digestmod="sha256")
        self._position = 0

    def begin(self, size: int) -> Any:
        """Return the hash object of the next frame, of ``size`` bytes. ``update`` it with all of them, in order."""
        frame: Any = (self._small if size < _LARGE_BYTES else self._large).copy()
        frame.update(self._position.to_bytes(8, "little"))
        self._position += 1
        return frame

    def tag(self, parts: Sequence[Any]) -> bytes:
        """Return the tag of the next frame, which consists of these buffers."""
        frame = self.begin(sum(memoryview(part).nbytes for part in parts))
        for part in parts:
            frame.update(part)
        return bytes(frame.digest()[:TAG_BYTES])

    def check(self, frame: Any, tag: Any) -> None:
        """Raise Forged unless ``frame``, a whole frame, has this tag."""
        check_tag(self.tag((frame,)), tag)


def check_tag(expected: bytes, tag: Any) -> None:
    """Raise Forged unless the tag is as expected. Compares in constant time."""
    if not hmac.compare_digest(expected[:TAG_BYTES], bytes(tag)):
        raise Forged


class Tagged:
    """Protects by tags: frames cannot be changed, but can be read on the path."""

    decrypt = None

    def __init__(self, keys: SessionKeys) -> None:
        self.incoming = FrameAuthenticator(keys.receiving)
        self._outgoing = FrameAuthenticator(keys.sending)

    def seal(self, buffers: list[Any]) -> list[Any]:
        """Return the buffers to send for one frame. All of them must be sent, in the order of the calls."""
        tag = self._outgoing.tag(buffers)
        if len(buffers) == 1 and len(buffers[0]) < _COPIED_BYTES and isinstance(buffers[0], bytes):
            return [buffers[0] + tag]
        return [*buffers, tag]


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
    """TLS 1.3: first around the handshake, then what protects the connection.

    The process that forms the group makes one key and certificate, which reach the members together with the group's
    secret. Each end presents that certificate and accepts no other. It works on memory buffers, so that it suits
    non-blocking sockets and nng connections alike.
    """

    incoming = None

    def __init__(self, identity: bytes, *, accepting: bool) -> None:
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = _context(identity, accepting).wrap_bio(self._arrived, self._leaving, server_side=accepting)
        self._lock = Lock()  # OpenSSL allows one thread at a time for a connection

    def around(self, steps: Steps[SessionKeys]) -> Steps[SessionKeys]:
        """TLS's own handshake, and then this one inside. Each part that is sent is a record."""
        yield from self._do(self._tls.do_handshake)
        sending, size = next(steps)
        while True:
            for part in filter(None, sending):
                self._tls.write(part)
            if size:
                received = yield from self._do(functools.partial(self._tls.read, size))
            else:
                received = yield (self._leaving.read(),), 0
            try:
                sending, size = steps.send(received)
            except StopIteration as done:
                keys: SessionKeys = done.value
                return keys

    def _do(self, step: Callable[[], Any]) -> Steps[Any]:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                if self._leaving.pending:
                    yield (self._leaving.read(),), 0  # it tells the other end why
                raise Refused(f"TLS: {error.reason or error}; it does not have this group's certificate") from error
            # One record: what follows the handshake is not to be received with it.
            header = yield from handshake.receive(_HEADER, self._leaving.read())
            self._arrived.write(header + (yield from handshake.receive(int.from_bytes(header[-2:], "big"))))

    # --- the connection's protection ----------------------------------------------------------------------

    def seal(self, buffers: list[Any]) -> list[Any]:
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


#: How one connection protects both directions. One thread at a time in each. ``seal`` is for outgoing frames. For
#: incoming data, ``decrypt`` and ``incoming``, which checks the tag of each frame, are None where they do not apply.
Protection = Tagged | TlsSession


def secure(
    sock: socket.socket,
    credentials: Credentials,
    me: Identity,
    peer: Identity | None = None,
    first: Callable[[], bytes] = bytes,
) -> Steps[Protection | None]:
    """Authenticate both ends of a new connection: this one as ``me``, the other as ``peer``; None: any of the group.

    ``peer`` is None at the accepting end. ``first``: called when the connecting end sends its proof; returns a frame
    that goes with it, or nothing. Returns what protects the connection; None for a Unix socket, which other processes
    cannot reach.
    """
    handshake.check_user(sock, credentials)
    local, tagged = sock.family == socket.AF_UNIX, None
    tls = None if local or credentials.tls is None else TlsSession(credentials.tls, accepting=peer is None)

    def sealed_first(keys: SessionKeys) -> bytes:
        nonlocal tagged
        frame = first()
        if local or tls is not None:
            return frame
        tagged = Tagged(keys)
        return frame and b"".join(tagged.seal([frame]))

    if peer is None:
        steps = handshake.accept(credentials.secret, me)
    else:
        steps = handshake.offer(credentials.secret, me, peer, sealed_first)
    keys = yield from (steps if tls is None else tls.around(steps))
    return tls or (None if local else tagged or Tagged(keys))
