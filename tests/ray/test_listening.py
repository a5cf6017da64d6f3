"""Where members listen: on the address of Ray's node, or on the interface that the group is told."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import ray

import raytorchrpc as rtr
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn


def listening() -> set[tuple[str, int]]:
    """(address, port) of each TCP listener of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                found.add(sock.getsockname()[:2])
    return found


def test_members_of_one_host_listen_on_loopback_where_that_is_asked_for(spawn: Spawn) -> None:
    pair = [spawn(Peer), spawn(Peer)]
    of_ray = ray.get([peer.run.remote(listening) for peer in pair], timeout=60)
    config = rtr.GroupConfig(interface="lo", always_tcp=True)
    with rtr.init_group({"a": pair[0], "b": pair[1]}, config=config):
        assert ray.get(pair[0].call.remote("b", "double", 21), timeout=60) == 42
        for peer, before in zip(pair, of_ray, strict=True):
            ours = ray.get(peer.run.remote(listening), timeout=60) - before
            assert ours and {address for address, _ in ours} == {"127.0.0.1"}
