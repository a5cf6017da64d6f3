"""The handshake by which the two ends of a new connection authenticate each other as members of the same group.

Each proof covers fresh random numbers of both ends, the direction, and the identity of both ends: group, generation,
rank, incarnation and listening address. A proof can therefore be neither replayed nor reflected, and a process that
relays the messages between two members is refused, because each of them names the peer it expects. Both ends derive the
same session keys, one for each direction, which authenticate the frames that follow where others could change them.

    connecting end                                accepting end
    hello, random number            ->
                                    <-            random number, proof
    identity, proof, first frame    ->
                                    <-            confirmation

The accepting end reads no frame before it has confirmed. The ends do no input or output themselves: each is a generator
(``Steps``), so that one thread can run many.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from raytorchrpc.errors import RayTorchRpcError

T = TypeVar("T")

#: One end of a handshake. Yields the parts to send and then the most bytes to receive, perhaps none, and is sent what
#: has been received: at least one byte. Returns its outcome; raises Refused.
Steps = Generator[tuple[tuple[bytes, ...], int], bytes, T]

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


class Refused(RayTorchRpcError):
    """The other end is not the expected member of this group, or did not answer in time."""


class Unfinished(Refused):
    """The handshake was broken off. The other end may have too much to do: try again."""


class HungUp(Unfinished):
    """The other end closed the connection, and had not confirmed the handshake."""


class SessionKeys(NamedTuple):
    """Secrets of one connection, 32 bytes each."""

    sending: bytes
    receiving: bytes


def _nothing(keys: SessionKeys) -> bytes:
    return b""


def offer(
    secret: bytes, me: Identity, peer: Identity, first: Callable[[SessionKeys], bytes] = _nothing
) -> Steps[SessionKeys]:
    """The connecting end: prove to be ``me``, and verify that the other end is ``peer``.

    ``first``: called once that is verified; what it returns is sent with this end's own proof.
    """
    own_nonce = os.urandom(_NONCE)
    answer = yield from receive(_NONCE + _PROOF, _HELLO + own_nonce)
    peer_nonce, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _mac(secret, b"accept", own_nonce, peer_nonce, peer.encode())):
        raise Refused("the process at that address does not have this group's secret, or is not the expected member")
    name = me.encode()
    own = _LENGTH.pack(len(name)) + name + _mac(secret, b"offer", peer_nonce, own_nonce, peer.encode(), name)
    session = _mac(secret, b"session", own_nonce, peer_nonce, peer.encode(), name)
    keys = SessionKeys(_mac(session, b"from the connecting end"), _mac(session, b"from the accepting end"))
    if not hmac.compare_digest((yield from receive(_PROOF, own, first(keys))), _mac(session, b"ready")):
        raise Refused("the confirmation of the handshake was modified in transit")
    return keys


def accept(secret: bytes, me: Identity) -> Steps[SessionKeys]:
    """The accepting end: prove to be ``me``, and verify that the other end has the secret. Receives nothing beyond."""
    hello = yield from receive(len(_HELLO) + _NONCE)
    if not hello.startswith(_HELLO):
        raise Refused("it does not speak this protocol")
    peer_nonce, own_nonce = hello[len(_HELLO) :], os.urandom(_NONCE)
    length = yield from receive(_LENGTH.size, own_nonce + _mac(secret, b"accept", peer_nonce, own_nonce, me.encode()))
    size: int = _LENGTH.unpack(length)[0]
    if size > _IDENTITY_BYTES:
        raise Refused("it does not speak this protocol")
    answer = yield from receive(size + _PROOF)
    name, proof = answer[:size], answer[size:]
    if not hmac.compare_digest(proof, _mac(secret, b"offer", own_nonce, peer_nonce, me.encode(), name)):
        raise Refused("it does not have this group's secret")
    session = _mac(secret, b"session", peer_nonce, own_nonce, me.encode(), name)
    yield (_mac(session, b"ready"),), 0
    return SessionKeys(_mac(session, b"from the accepting end"), _mac(session, b"from the connecting end"))


def receive(size: int, *sending: bytes) -> Steps[bytes]:
    """Send these parts, and receive so many bytes."""
    data = b""
    while len(data) < size:
        data += yield sending, size - len(data)
        sending = ()
    return data


def run(sock: socket.socket, steps: Steps[T], timeout_s: float) -> T:
    """Run one end of a handshake. Blocks for at most ``timeout_s`` seconds.

    Raises Refused or OSError; close the connection then.
    """
    deadline = time.monotonic() + timeout_s
    try:
        sending, size = next(steps)
        while True:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if data := b"".join(sending):
                sock.sendall(data)
            if size and not (data := sock.recv(size)):
                raise HungUp("it hung up")
            sending, size = steps.send(data)
    except StopIteration as done:
        sock.settimeout(None)
        outcome: T = done.value
        return outcome
    except TimeoutError:
        raise Unfinished("it did not complete the handshake in time") from None


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
