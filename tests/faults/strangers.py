"""What processes without the group's secret may say to the sockets that its members listen on.

``python -m tests.faults.strangers --messages 1000000``: so many messages to every such socket of a group under load;
prints what became of it. Each message has a connection of its own. Exits with 1 where a member ended, served one of
them, kept anything, or failed a call of its own group.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import raytorchrpc as rtr
from raytorchrpc.group.supervisor import Supervisor
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.acceptor import listener_identity
from raytorchrpc.lanes.common.handshake import Credentials, Identity

HELLO = b"raytorchrpc/2\0\0\0"
#: Groups whose members together have every socket that asks for the secret, each by Unix sockets and by TCP.
GROUPS: dict[str, dict[str, Any]] = {
    "socket": {"lanes": ("socket", "shm", "torchrpc"), "always_tcp": True},
    "nng": {"lanes": ("nng",), "always_tcp": True},
}
#: All that a member says before the other end has proved itself (bytes).
PROVED = 64
_RESET = struct.pack("ii", 1, 0)
_LISTENS_TO = 0.1
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
    prepared = _supervisor_of(group)._core.listening()[member]
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
        handshake.run(recorder, handshake.offer(known.secret, known.peer(known.instance, "a test"), door.identity), 10)
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


def send(
    doors: Sequence[Door], seed: int, count: int, told: bytes, until: float = math.inf
) -> tuple[Counter[str], Counter[str], int]:
    """``count`` messages, each to a drawn door, as fast as it goes: what was sent by then, what was not, and the most
    bytes that were heard.
    """
    draw = random.Random(seed)
    sent, unsent, most_heard = Counter[str](), Counter[str](), 0
    for _ in range(count):
        if time.monotonic() > until:
            break
        door, kind = draw.choice(doors), draw.choice(list(SAID))
        try:
            sock = door.dial(20)
        except OSError as error:
            unsent[f"{door.kind}: {error}"] += 1
            continue
        with sock:
            if not isinstance(door.where, str):  # a closed connection would keep its port for a minute
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sent[f"{door.kind}: {kind}"] += 1
            with suppress(OSError):
                sock.sendall(SAID[kind](draw, told))
                if draw.random() < _LISTENS_TO:
                    sock.shutdown(socket.SHUT_WR)
                    heard = 0
                    while data := sock.recv(4096):
                        heard += len(data)
                    most_heard = max(most_heard, heard)
    return sent, unsent, most_heard


def told_of(door: Door, known: Credentials) -> bytes:
    """``recorded``, or something of that form where nobody answers."""
    try:
        return recorded(door, known)
    except (OSError, rtr.RayTorchRpcError):
        return HELLO + os.urandom(32 + 36)


def main() -> None:
    from tests.faults.faults import Siege  # which needs this module
    from tests.faults.running import ray_here, run_faults

    parser = argparse.ArgumentParser(prog="python -m tests.faults.strangers", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="send no longer than this, in each group")
    parser.add_argument("--groups", default="socket,nng", help="socket, nng, torchrpc (whose listener asks nobody)")
    given = parser.parse_args()
    groups, failed = given.groups.split(","), False
    with ray_here():
        for lane in groups:
            siege = Siege("c0", lane, -(-given.messages // len(groups)), given.seed, given.processes, given.seconds)
            report = run_faults("calls", [[siege]], given.seed, **GROUPS.get(lane, {"lanes": ("torchrpc",)}))
            print(f"{lane}: {dict(report.struck[0].sent)}\n{report}", flush=True)
            failed |= bool(report.violations)
    sys.exit(failed)


if __name__ == "__main__":
    main()
