"""Who is no member gets no byte to torchrpc, and ends nothing: as another user of the host, at every port of a member.

See docs/security.md, and tests/conformance/test_guard.py for the guard by itself.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.conformance.peers import Process
from tests.insides import in_actor
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")

GARBAGE = {
    "seven bytes": b"1234567",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(5000),
    "a large length": struct.pack("<Q", 1 << 60) * 8,
}
_RESET = struct.pack("ii", 1, 0)
_open: list[socket.socket] = []


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {name: spawn_for_module(Peer) for name in "abc"}


@pytest.fixture
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        yield group


@pytest.fixture
def nobody() -> Iterator[Process]:
    process = Process()
    process.run(become_nobody)
    try:
        yield process
    finally:
        process.kill()


def become_nobody() -> None:
    user = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)


def works(peer: str) -> bool:
    """Calls, RRefs, torch's own API and distributed autograd, from this member to a peer."""
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc

    assert rtr.rpc_sync(peer).double(torch.ones(3)).sum() == 6
    assert rtr.remote(peer).double(torch.ones(2)).to_here().sum() == 4
    name = next(member.rpc_name for member in rtr.get_group().members if member.name == peer)
    with dist_autograd.context() as context:
        weight = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync(name, torch.mul, args=(weight, 3.0)).sum()
        dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[weight].tolist() == [3.0, 3.0]
    return True


def listening(pid: int, host: str) -> list[tuple[str, int]]:
    """Where a process listens for TCP over IPv4."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed just now
            own.add(os.readlink(entry))
    return [address for inode, address in _listeners(host) if f"socket:[{inode}]" in own]


def _listeners(host: str) -> list[tuple[str, tuple[str, int]]]:
    """What listens at an address, or on all: inode and address."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        where = socket.inet_ntoa(bytes.fromhex(address)[::-1])
        if words[3] == "0A" and where in (host, "0.0.0.0"):
            found.append((words[9], (host, int(port, 16))))
    return found


def torchrpc_ports(actor: Any) -> list[tuple[str, int]]:
    """Where an actor listens: its Ray worker, torchrpc and gloo."""
    return listening(in_actor(actor, os.getpid), in_actor(actor, node_ip))


def node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def say(where: list[tuple[str, int]], said: bytes, end: str) -> int:
    """Connect to each, say that, and end as told; how many could be connected to."""
    connected = 0
    for address in where:
        with suppress(OSError):
            sock = socket.create_connection(address, timeout=0.3)
            connected += 1
            sock.settimeout(0.3)
            with suppress(OSError):
                sock.sendall(said)
                if end == "shutdown":
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(1)
            if end == "open":
                _open.append(sock)
                continue
            if end == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
    return connected


def connect_again_and_again(where: list[tuple[str, int]], seconds: float) -> int:
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        count += say(where, GARBAGE["seven bytes"], "open" if count % 2 else "close")
        while len(_open) > 50:
            _open.pop(0).close()
    return count


def test_garbage_at_every_port_harms_nobody(nobody: Process, spawn: Spawn) -> None:
    actors = {name: spawn(Peer) for name in "ab"}
    with rtr.init_group(actors):
        _garbage_at_every_port(actors, nobody)


def _garbage_at_every_port(actors: dict[str, Any], nobody: Process) -> None:
    seen = 0
    for _ in range(2):  # torchrpc may not have started there yet; it runs
        where = nobody.run(answering, torchrpc_ports(actors["b"]))
        assert len(where) > seen
        seen = len(where)
        for said in (*GARBAGE.values(), b""):
            for end in ("close", "reset", "shutdown", "open"):
                nobody.run(say, where, said, end)
        assert in_actor(actors["a"], works, "b") and in_actor(actors["b"], works, "a")


def test_a_strangers_agent_runs_no_code(
    group: rtr.Group, actors: dict[str, Any], nobody: Process, tmp_path: Path
) -> None:
    assert in_actor(actors["a"], works, "b")
    pid = in_actor(actors["b"], os.getpid)
    tmp_path.chmod(0o777)
    for host, port in nobody.run(answering, torchrpc_ports(actors["b"]))[:4]:
        stranger = Process()
        stranger.run(become_nobody)
        assert stranger.run(insides.call_as_a_stranger, host, port, str(tmp_path / f"{port}")) != ""
        stranger.kill()
    assert list(tmp_path.iterdir()) == []
    assert in_actor(actors["b"], os.getpid) == pid
    assert in_actor(actors["c"], works, "b")


def test_strangers_that_connect_while_members_do(group: rtr.Group, actors: dict[str, Any], nobody: Process) -> None:
    where = nobody.run(answering, torchrpc_ports(actors["b"]))
    nobody.begin(connect_again_and_again, where, 1.5)
    for caller, peer in ("ab", "cb", "ba", "ac"):
        assert in_actor(actors[caller], works, peer)
    assert nobody.result() > 0


def test_networks_in_torchrpc_from_are_let_in_unasked(nobody: Process, spawn: Spawn, tmp_path: Path) -> None:
    """Addresses are translated there, so no member knows its own."""
    tmp_path.chmod(0o777)
    actors = {name: spawn(Peer) for name in "ab"}
    for networks, error in (((), True), (("0.0.0.0/0",), False)):
        with rtr.init_group(actors, config=rtr.GroupConfig(torchrpc_from=networks)):
            host, port = in_actor(actors["b"], insides.agent_address)
            stranger = Process()
            stranger.run(become_nobody)
            timeout_s = 3.0 if error else 40.0
            said = stranger.run(insides.call_as_a_stranger, host, port, str(tmp_path / "made"), timeout_s)
            assert bool(said) is error, said
            stranger.kill()
    assert in_actor(actors["b"], os.path.exists, str(tmp_path / "made"))


def test_a_group_that_has_ended_listens_to_nobody(nobody: Process, spawn: Spawn) -> None:
    actors = {name: spawn(Peer) for name in "ab"}
    before = torchrpc_ports(actors["b"])
    with rtr.init_group(actors):
        assert in_actor(actors["a"], works, "b")
        opened = [address for address in torchrpc_ports(actors["b"]) if address not in before]
        assert nobody.run(answering, opened), "the guard accepts, and closes"
    assert nobody.run(answering, opened) == []
    with rtr.init_group(actors):
        assert in_actor(actors["a"], works, "b"), "the same agent serves the next group"


def answering(where: list[tuple[str, int]]) -> list[tuple[str, int]]:
    found = []
    for address in where:
        with suppress(OSError):
            socket.create_connection(address, timeout=0.1).close()
            found.append(address)
    return found
