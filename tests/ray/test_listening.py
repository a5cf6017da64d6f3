"""Where members listen: on the address of Ray's node, or on the interface that the group is told."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import pytest
import ray

import raytorchrpc as rtr
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
from tests.ray.scripts import Script


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


@pytest.mark.slow
@pytest.mark.parametrize("given", ["127.0.0.1", "127.0.0.2"])
def test_a_ray_on_a_loopback_address_keeps_its_members_there(given: str) -> None:
    """Ray itself puts the host's address in the place of 127.0.0.1, and of no other: see docs/security.md."""
    script = Script(
        f"""
        from tests.ray.test_listening import listening

        ray.init(
            address="local", include_dashboard=False, log_to_driver=False, configure_logging=False, num_cpus=4,
            object_store_memory=100 << 20, _node_ip_address={given!r},
        )
        print(ray.util.get_node_ip_address())
        pair = actors()
        of_ray = ray.get(pair[0].run.remote(listening))
        with rtr.init_group(pair, config=rtr.GroupConfig(always_tcp=True)):
            assert ray.get(pair[0].call.remote(pair[1], "double", 21)) == 42
            print(*{{address for address, _ in ray.get(pair[0].run.remote(listening)) - of_ray}})
        """
    )
    try:
        code, out, err = script.run()
    finally:
        script.end()
    assert code == 0, err
    node, *listeners = out.split()
    assert listeners
    if given == "127.0.0.1":
        assert node != given and node in listeners
    else:
        assert node == given
        assert all(ipaddress.ip_address(address).is_loopback for address in listeners)
