"""What somebody without the group's secret may say to the sockets that its members listen on."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import raytorchrpc as rtr
from raytorchrpc.group.supervisor import Supervisor
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.connections import listener_identity
from raytorchrpc.lanes.common.handshake import Credentials, Identity

HELLO = b"raytorchrpc/2\0\0\0"
#: nng's own greeting on a connection: the protocol's number follows (0x30: Req, 0x10: Pair).
GREETING = b"\0SP\0"


class Door(NamedTuple):
    """A socket that a member listens on."""

    member: str
    lane: str
    where: tuple[str, int] | str
    """(host, port), or a name in Linux's abstract socket namespace."""
    identity: Identity | None = None
    """Whom a member expects there, if it proves itself there by the handshake."""

    @property
    def kind(self) -> str:
        return f"{self.lane} over {'unix' if isinstance(self.where, str) else 'tcp'}"

    def dial(self, timeout_s: float = 10) -> socket.socket:
        """Raises OSError."""
        if not isinstance(self.where, str):
            return socket.create_connection(self.where, timeout=timeout_s)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + self.where)
        except BaseException:
            sock.close()
            raise
        return sock


def _supervisor_of(group: rtr.Group) -> Supervisor:
    host = group._host
    assert isinstance(host, Supervisor), "the group was formed elsewhere"
    return host


def doors(group: rtr.Group, member: str) -> list[Door]:
    """All of the package's that this member has open, torchrpc's too."""
    prepared = _supervisor_of(group)._state.prepared[member]
    found: list[Door] = []
    addresses = prepared.addresses
    known = credentials(group)
    for lane in ("socket", "nng"):
        if (address := addresses.get(lane)) is not None:
            for family, where in ((socket.AF_UNIX, address.unix), (socket.AF_INET, address.tcp)):
                if where is not None:
                    found.append(Door(member, lane, where, listener_identity(lane, known, address, family)))
    url = addresses["torchrpc"].url if "torchrpc" in addresses else ""
    for host, port in re.findall(r"uv://([^:;]+):(\d+)", url):
        found.append(Door(member, "torchrpc", (host, int(port))))
    return found


def credentials(group: rtr.Group) -> Credentials:
    """For what a member would say, that is recorded and said again."""
    return _supervisor_of(group).roster.credentials


class _Recorder:
    """A member's socket that remembers what went out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.sent = sock, b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def recorded(door: Door, known: Credentials) -> bytes:
    """All that a member says to prove itself at a door that has an identity."""
    assert door.identity is not None
    with door.dial() as sock:
        recorder = _Recorder(sock)
        handshake.offer(recorder, known.secret, known.peer(known.instance, "a test"), door.identity, 10)
        return recorder.sent


Say = Callable[[random.Random, bytes], bytes]

#: By kind; given a recorded handshake.
SAID: dict[str, Say] = {
    "nothing": lambda draw, told: b"",
    "noise": lambda draw, told: draw.randbytes(draw.randrange(1, 4096)),
    "much noise": lambda draw, told: draw.randbytes(100_000),
    "zeros": lambda draw, told: bytes(draw.randrange(1, 4096)),
    "ones": lambda draw, told: b"\xff" * draw.randrange(1, 4096),
    "http": lambda draw, told: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a hello": lambda draw, told: (HELLO + draw.randbytes(32))[: draw.randrange(1, 48)],
    "a hello": lambda draw, told: HELLO + draw.randbytes(32),
    "a hello, and a wrong proof": lambda draw, told: HELLO + draw.randbytes(32 + 36),
    "a recorded handshake": lambda draw, told: told,
    "a recorded handshake, one bit changed": lambda draw, told: _changed(draw, told),
    "a recorded handshake, and a request": lambda draw, told: told + b"\x80\x04" + draw.randbytes(500),
    "huge length": lambda draw, told: draw.choice((2 << 30, 1 << 40, (1 << 63) - 1)).to_bytes(8, "little") * 8,
    "nng's greeting": lambda draw, told: GREETING + draw.choice((b"\x00\x30", b"\x00\x10")) + b"\0\0",
    "nng's greeting, and a huge message": lambda draw, told: (
        GREETING + b"\x00\x30\0\0" + (2 << 30).to_bytes(8, "big") + draw.randbytes(2000)
    ),
    "nng's greeting, and noise": lambda draw, told: (
        GREETING + b"\x00\x30\0\0" + b"\x01" + (64).to_bytes(8, "big") + draw.randbytes(64)
    ),
}


def _changed(draw: random.Random, told: bytes) -> bytes:
    place = draw.randrange(len(told))
    return told[:place] + bytes([told[place] ^ (1 << draw.randrange(8))]) + told[place + 1 :]


def throw(door: Door, kind: str, draw: random.Random, told: bytes, listen: bool) -> int:
    """One message on a connection of its own. ``listen``: until one is hung up on. Returns the bytes heard."""
    heard = 0
    with suppress(OSError), door.dial() as sock:
        sock.sendall(SAID[kind](draw, told))
        if listen:
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(4096):
                heard += len(data)
    return heard


def throw_many(doors_: list[Door], seed: int, count: int, told: bytes) -> int:
    """``count`` messages to each door, of seeded kinds; returns how many were sent."""
    draw = random.Random(seed)
    for door in doors_:
        for _ in range(count):
            throw(door, draw.choice(list(SAID)), draw, told, listen=draw.random() < 0.2)
    return count * len(doors_)


def told_of(door: Door, known: Credentials) -> bytes:
    """``recorded``, or something of that form where nobody answers."""
    try:
        return recorded(door, known)
    except (OSError, rtr.RayTorchRpcError):
        return HELLO + os.urandom(32 + 36)
