"""Protects the frames of a connection after its handshake, where others can reach the bytes: on TCP.

By default a keyed tag follows each frame: BLAKE2b for small frames, which it starts fastest on, and HMAC-SHA256 for
larger ones, for which processors have instructions. The tag covers the frame and its position in the stream, under a
key of this connection and direction. A frame that was changed, injected, replayed, dropped or reordered is refused
before any of it is used. With ``GroupConfig(tls=True)`` TLS does the same, and encrypts (see ``tls``).
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Sequence
from typing import Any

from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.credentials import Credentials, Identity
from raytorchrpc.lanes.common.handshake import SessionKeys
from raytorchrpc.lanes.common.tls import TlsSession

TAG_BYTES = 16
#: From this size on HMAC-SHA256 is faster than BLAKE2b (bytes; Python 3.11, a processor with SHA instructions).
_LARGE_BYTES = 2048
#: A single buffer below this size is copied, which is faster than sending two (bytes).
_COPIED_BYTES = 4096


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


#: How one connection protects both directions. One thread at a time in each. ``seal`` is for outgoing frames. For
#: incoming data, ``decrypt`` and ``incoming``, which checks the tag of each frame, are None where they do not apply.
Protection = Tagged | TlsSession


def secure_dialed(
    sock: socket.socket, credentials: Credentials, me: Identity, peer: Identity, timeout_s: float
) -> Protection | None:
    """Authenticate the connecting end of a new connection as ``me``, and verify that the other end is ``peer``.

    Returns what protects the connection from now on; None for a Unix socket, which other processes cannot reach. Blocks
    for at most ``timeout_s`` seconds. Raises Refused or OSError; close it then.
    """
    tls = _tls(sock, credentials, timeout_s, accepting=False)
    keys = handshake.offer(tls or sock, credentials.secret, me, peer, timeout_s)
    return tls or (None if sock.family == socket.AF_UNIX else Tagged(keys))


def secure_accepted(
    sock: socket.socket, credentials: Credentials, me: Identity, timeout_s: float
) -> tuple[Identity, Protection | None]:
    """Authenticate the accepting end likewise; also returns the verified identity of the other end."""
    tls = _tls(sock, credentials, timeout_s, accepting=True)
    peer, keys = handshake.accept(tls or sock, credentials.secret, me, timeout_s)
    return peer, tls or (None if sock.family == socket.AF_UNIX else Tagged(keys))


def _tls(sock: socket.socket, credentials: Credentials, timeout_s: float, *, accepting: bool) -> TlsSession | None:
    """Begin TLS where the connection needs it. Raises Refused if the other end runs as another user, or OSError."""
    handshake.check_user(sock, credentials)
    if sock.family == socket.AF_UNIX or credentials.tls is None:
        return None
    return TlsSession(sock, credentials.tls, accepting=accepting, timeout_s=timeout_s)
