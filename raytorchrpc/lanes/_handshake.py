"""How two ends of a fresh connection prove to each other that they have the group's secret.

Three fixed-size messages, each answer bound to both sides' nonces and to its role, so that nothing can be
replayed or reflected. It authenticates and does not encrypt.
"""

from __future__ import annotations

import hmac
import os
import struct
import time
from typing import Protocol

from raytorchrpc.errors import RayTorchRpcError

_HELLO = b"raytorchrpc/1\0\0\0"
_NONCE = 32
_RANK = struct.Struct("<i")


class Stream(Protocol):
    """What of a socket is needed."""

    def settimeout(self, seconds: float | None, /) -> None:
        """For each step that follows."""

    def sendall(self, data: bytes, /) -> None:
        """Send. Raises OSError."""

    def recv(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none once the other end hung up. Raises OSError, TimeoutError."""


class Refused(RayTorchRpcError):
    """The other end has no part in this group, or did not answer in time."""


class HungUp(Refused):
    """The other end closed the connection before it was proved; it may be crowded, so another try can do."""


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes, rank: bytes = b"") -> bytes:
    return hmac.digest(secret, role + first + second + rank, "sha256")


def offer(sock: Stream, secret: bytes, rank: int, timeout_s: float) -> None:
    """The connecting end: prove itself as ``rank``, and check the other end. Raises Refused or OSError."""
    deadline = time.monotonic() + timeout_s
    mine = os.urandom(_NONCE)
    sock.settimeout(timeout_s)
    sock.sendall(_HELLO + mine)
    answer = _receive(sock, _NONCE + 32, deadline)
    its, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"accept", mine, its)):
        raise Refused("the process at that address does not have this group's secret")
    who = _RANK.pack(rank)
    sock.sendall(who + _proof(secret, b"offer", its, mine, who))
    _receive(sock, 1, deadline)
    sock.settimeout(None)


def accept(sock: Stream, secret: bytes, timeout_s: float) -> int:
    """The accepting end; returns the rank the other end proved. Raises Refused or OSError."""
    deadline = time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    hello = _receive(sock, len(_HELLO) + _NONCE, deadline)
    if not hello.startswith(_HELLO):
        raise Refused("it does not speak this protocol")
    its, mine = hello[len(_HELLO) :], os.urandom(_NONCE)
    sock.sendall(mine + _proof(secret, b"accept", its, mine))
    answer = _receive(sock, _RANK.size + 32, deadline)
    who, proof = answer[: _RANK.size], answer[_RANK.size :]
    if not hmac.compare_digest(proof, _proof(secret, b"offer", mine, its, who)):
        raise Refused("it does not have this group's secret")
    sock.sendall(b"\1")
    sock.settimeout(None)
    rank: int = _RANK.unpack(who)[0]
    return rank


def _receive(sock: Stream, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise Refused("it did not prove itself in time")
        sock.settimeout(remaining)
        try:
            part = sock.recv(size - len(data))
        except TimeoutError:
            raise Refused("it did not prove itself in time") from None
        if not part:
            raise HungUp("it hung up")
        data += part
    return data
