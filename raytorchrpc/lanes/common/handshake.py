"""The handshake by which the two ends of a new connection authenticate each other as members of the same group.

Each proof covers fresh random numbers of both ends, the direction, and the identity of both ends: group, generation,
rank, incarnation and listening address. A proof can therefore be neither replayed nor reflected, and a process that
relays the messages between two members is refused, because each of them names the peer it expects. Both ends derive the
same session keys, one for each direction, which authenticate the frames that follow where others could change them.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from raytorchrpc.errors import RayTorchRpcError

_HELLO = b"raytorchrpc/2\0\0\0"
_NONCE, _PROOF = 32, 32
_LENGTH = struct.Struct("<H")
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
#: Longest identity read from a peer that is not authenticated yet (bytes).
_IDENTITY_BYTES = 4096


class Identity(NamedTuple):
    """One end of a connection. Both ends must describe both ends in the same way."""

    group: str
    generation: str
    rank: int
    """-1 for a process that is not a member."""
    incarnation: int
    address: str
    """The address on which it listens, unique among all processes that ever listened."""

    def encode(self) -> bytes:
        """Encode as bytes that are the same in every process."""
        return repr(tuple(self)).encode()


@dataclass(frozen=True)
class Credentials:
    """Authenticates a process on the connections of one lane or service."""

    secret: bytes = field(repr=False)
    rank: int = -1
    incarnation: int = 0
    group: str = ""
    generation: str = ""
    across_users: bool = False
    """Accept peers of other users on Unix sockets."""
    tls: bytes | None = field(default=None, repr=False)
    """Private key and certificate of the group as PEM, for TLS on TCP; None: frames are only authenticated."""

    def peer(self, instance: Instance, address: str) -> Identity:
        """Return the identity of a process of the group, under its listening address."""
        return Identity(self.group, self.generation, instance.rank, instance.incarnation, address)

    @property
    def instance(self) -> Instance:
        """What this process publishes with its listening addresses."""
        return Instance(self.rank, self.incarnation)


class Instance(NamedTuple):
    """The process of a group that an address belongs to."""

    rank: int
    incarnation: int


class Stream(Protocol):
    """The part of a socket that the handshake needs."""

    def settimeout(self, seconds: float | None, /) -> None:
        """Set the time limit of each following operation."""

    def sendall(self, data: bytes, /) -> None:
        """Send. Raises OSError."""

    def recv(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; none once the other end hung up. Raises OSError, TimeoutError."""


class Refused(RayTorchRpcError):
    """The other end is not the expected member of this group, or did not answer in time."""


class HungUp(Refused):
    """The other end closed the connection during the handshake. It may have too many pending: try again."""


class SessionKeys(NamedTuple):
    """Secrets of one connection, 32 bytes each."""

    sending: bytes
    receiving: bytes


def offer(sock: Stream, secret: bytes, me: Identity, peer: Identity, timeout_s: float) -> SessionKeys:
    """Run the connecting end of the handshake: prove to be ``me``, and verify that the other end is ``peer``.

    Blocks for at most ``timeout_s`` seconds. Raises Refused or OSError; close the connection then.
    """
    deadline = time.monotonic() + timeout_s
    mine = os.urandom(_NONCE)
    sock.settimeout(timeout_s)
    sock.sendall(_HELLO + mine)
    answer = _receive(sock, _NONCE + _PROOF, deadline)
    its, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _mac(secret, b"accept", mine, its, peer.encode())):
        raise Refused("the process at that address does not have this group's secret, or is not the expected member")
    name = me.encode()
    sock.sendall(_LENGTH.pack(len(name)) + name + _mac(secret, b"offer", its, mine, peer.encode(), name))
    session = _mac(secret, b"session", mine, its, peer.encode(), name)
    if not hmac.compare_digest(_receive(sock, _PROOF, deadline), _mac(session, b"ready")):
        raise Refused("the confirmation of the handshake was modified in transit")
    sock.settimeout(None)
    return SessionKeys(_mac(session, b"from the connecting end"), _mac(session, b"from the accepting end"))


def accept(sock: Stream, secret: bytes, me: Identity, timeout_s: float) -> SessionKeys:
    """Run the accepting end of the handshake: prove to be ``me``, and verify that the other end has the secret.

    Blocks for at most ``timeout_s`` seconds. Raises Refused or OSError; close the connection then.
    """
    deadline = time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    hello = _receive(sock, len(_HELLO) + _NONCE, deadline)
    if not hello.startswith(_HELLO):
        raise Refused("it does not speak this protocol")
    its, mine = hello[len(_HELLO) :], os.urandom(_NONCE)
    sock.sendall(mine + _mac(secret, b"accept", its, mine, me.encode()))
    size: int = _LENGTH.unpack(_receive(sock, _LENGTH.size, deadline))[0]
    if size > _IDENTITY_BYTES:
        raise Refused("it does not speak this protocol")
    answer = _receive(sock, size + _PROOF, deadline)
    name, proof = answer[:size], answer[size:]
    if not hmac.compare_digest(proof, _mac(secret, b"offer", mine, its, me.encode(), name)):
        raise Refused("it does not have this group's secret")
    session = _mac(secret, b"session", its, mine, me.encode(), name)
    sock.sendall(_mac(session, b"ready"))
    sock.settimeout(None)
    return SessionKeys(_mac(session, b"from the accepting end"), _mac(session, b"from the connecting end"))


def check_user(sock: socket.socket, credentials: Credentials) -> None:
    """Raise Refused if the other end of a Unix socket runs as another user than this process."""
    if sock.family == socket.AF_UNIX and not credentials.across_users:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        uid = _PEER_CREDENTIALS.unpack(raw)[1]
        if uid != os.geteuid():
            raise Refused(
                f"the process at that address runs as another user (uid {uid}; this one has uid {os.geteuid()}); "
                "GroupConfig(across_users=True) lets members of several users connect"
            )


def _mac(key: bytes, role: bytes, *parts: bytes) -> bytes:
    # Each part is prefixed by its length, so that no two lists of parts give the same bytes.
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "little") + part for part in (role, *parts)), "sha256")


def _receive(sock: Stream, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        try:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            sock.settimeout(remaining)
            part = sock.recv(size - len(data))
        except TimeoutError:
            raise Refused("it did not complete the handshake in time") from None
        if not part:
            raise HungUp("it hung up")
        data += part
    return data
