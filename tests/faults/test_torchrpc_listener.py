"""What a stranger can do to torchrpc's own listener, which asks nobody who he is, and what keeps strangers from other
hosts away from it; see docs/security.md. The first tests tell when torch has changed it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raytorchrpc._compat import torch_internals
from raytorchrpc.lanes.torchrpc.agent import AgentSpec, Fabric
from tests.conformance.peers import Process

_kept: list[Any] = []


def _start_agent() -> str:
    agent, store, url = torch_internals.start_agent(
        "a", 1, threads=4, timeout_s=10, transports=("uv",), channels=("basic",), device_maps={}, devices=()
    )
    _kept.extend((agent, store))
    return url


def _start_guarded() -> str:
    fabric = Fabric()
    _kept.append(fabric)
    spec = AgentSpec("a", 1, "lo", ("uv",), ("mpt_uv", "basic"), 4, 10.0, {}, (), admitted=("127.0.0.1",))
    return fabric.start(spec)


def _admit(*hosts: str) -> None:
    _kept[0].admit(hosts)


@contextmanager
def _running(start: Callable[[], str]) -> Iterator[tuple[Process, tuple[str, int]]]:
    process = Process()
    try:
        found = re.search(r"uv://([^:;]+):(\d+)", process.run(start))
        assert found is not None
        yield process, (found[1], int(found[2]))
    finally:
        process.kill()


@pytest.fixture
def agent() -> Iterator[tuple[Process, tuple[str, int]]]:
    with _running(_start_agent) as running:
        yield running


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(500)], ids=["http", "zeros"])
def test_garbage_ends_the_process(agent: tuple[Process, tuple[str, int]], said: bytes) -> None:
    running, where = agent
    with socket.create_connection(where, timeout=10) as sock:
        sock.sendall(said)
        running.process.join(30)
        assert running.process.exitcode in (-signal.SIGABRT, -signal.SIGSEGV)


def test_a_connection_that_ends_without_a_word_ends_the_listening(
    agent: tuple[Process, tuple[str, int]],
) -> None:
    running, where = agent
    refused = False
    for _ in range(50):
        with suppress(ConnectionResetError):
            try:
                with socket.create_connection(where, timeout=10) as sock:
                    sock.shutdown(socket.SHUT_WR)
                    sock.settimeout(10)
                    sock.recv(1)
            except ConnectionRefusedError:
                refused = True
                break
    assert refused
    assert running.process.is_alive(), "the process itself lives"


def test_garbage_from_elsewhere_does_not_get_in() -> None:
    """Every listener of the agent, its channels' too, drops what does not come from a member's host."""
    with _running(_start_guarded) as (running, where):
        assert running.process.pid is not None
        ports = {port for address, port in _listening(running.process.pid) if address == where[0]}
        assert where[1] in ports and len(ports) > 1, "a channel of its own listens too"
        with ThreadPoolExecutor(len(ports)) as threads:
            assert not any(threads.map(partial(_lets_in, where[0]), ports))
        assert running.process.is_alive()
        running.run(_admit, "127.0.0.1", "127.0.0.7")
        socket.create_connection(where, timeout=10, source_address=("127.0.0.7", 0)).close()


def _lets_in(host: str, port: int) -> bool:
    """Whether a listener takes a connection from another host. One that rejects it would raise an error."""
    try:
        socket.create_connection((host, port), timeout=0.5, source_address=("127.0.0.7", 0)).close()
    except TimeoutError:
        return False
    return True


def _listening(pid: int) -> list[tuple[str, int]]:
    """IPv4 addresses on which that process listens."""
    own = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        host, port = words[1].split(":")
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found
