"""Checks that the connections which gloo has accepted come from members.

gloo has no authentication: it accepts any connection that names a member which has not connected yet. A connection is
identified by its two addresses, so each member publishes its own connections in the process group's store, which only
members can write to, and compares.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from raytorchrpc.errors import BootstrapError
from raytorchrpc.process import tcp

Address = tuple[str, int]
Connection = tuple[Address, Address]
"""Local address, remote address."""


def check(store: Store, rank: int, size: int, before: tcp.Listeners, translated: Sequence[str]) -> None:
    """Raise BootstrapError if a listener that is not in ``before`` has accepted a connection that no member made.

    Every rank calls this after connecting; blocks for all of them. ``translated``: networks in which members appear
    under translated addresses; connections from there are not checked.
    """
    ports = {_ends(fd)[0][1] for inode, fd in tcp.listening().items() if inode not in before}
    connections = _connections()
    accepted = {(here, there) for here, there in connections if here[1] in ports}
    keys = [f"connections/{number}" for number in range(size)]
    store.set(keys[rank], json.dumps(sorted(connections - accepted)))
    others = [json.loads(store.get(key)) for number, key in enumerate(keys) if number != rank]
    made = {(tuple(there), tuple(here)) for connections_there in others for here, there in connections_there}
    networks = tcp.networks(translated)
    strangers = [
        f"{host}:{port}"
        for _, (host, port) in accepted - made
        if not any(ipaddress.ip_address(host) in network for network in networks)
    ]
    if strangers:
        raise BootstrapError(
            f"gloo accepted a connection from {', '.join(strangers)}, which no member made: another process connects "
            f"to members' ports. Block it (firewall, GroupConfig(interface=...)); if the network translates addresses, "
            f"name the addresses under which members appear in GroupConfig(torchrpc_from=...)"
        )


def _connections() -> set[Connection]:
    """This process's TCP connections."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                here, there = _ends(int(entry))
                if there is not None:
                    found.add((here, there))
    return found


def _ends(fd: int) -> tuple[Address, Address | None]:
    """The addresses of a TCP socket; the remote one is None for a listener. Raises OSError for other sockets."""
    sock = socket.socket(fileno=fd)
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            raise OSError("not a TCP socket")
        here = _address(sock.getsockname())
        with contextlib.suppress(OSError):
            return here, _address(sock.getpeername())
        return here, None
    finally:
        sock.detach()


def _address(name: tuple[str, int]) -> Address:
    return name[0].partition("%")[0].removeprefix("::ffff:"), name[1]
