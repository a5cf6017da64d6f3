"""Why torchrpc's listener is guarded: what a stranger can do to it, as it asks nobody who he is; see docs/security.md.

What strangers can do to a member's: tests/ray/test_torchrpc_strangers.py.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from raytorchrpc._compat import torch_internals
from tests.conformance.peers import Process

_kept: list[Any] = []


def _start_agent() -> str:
    agent, store, url = torch_internals.start_agent(
        "a", 1, threads=4, timeout_s=10, transports=("uv",), channels=("basic",), device_maps={}, devices=()
    )
    _kept.extend((agent, store))
    return url


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
