"""What a stranger can do to torchrpc's own listener, which asks nobody who he is; see docs/security.md.

These tests tell when torch has changed it.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

AGENT = """
import sys
from raytorchrpc import _compat
agent, store, url = _compat.start_agent(
    "a", 1, threads=4, timeout_s=10, transports=("uv",), channels=("basic",), device_maps={}, devices=()
)
print(url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def agent() -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    pipe = subprocess.PIPE
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        found = re.search(r"uv://([^:;]+):(\d+)", process.stdout.readline())
        assert found is not None
        yield process, (found[1], int(found[2]))
        process.kill()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(500)], ids=["http", "zeros"])
def test_garbage_ends_the_process(agent: tuple[subprocess.Popen[str], tuple[str, int]], said: bytes) -> None:
    process, where = agent
    with socket.create_connection(where, timeout=10) as sock:
        sock.sendall(said)
        assert process.wait(30) in (-signal.SIGABRT, -signal.SIGSEGV)


def test_a_connection_that_ends_without_a_word_ends_the_listening(
    agent: tuple[subprocess.Popen[str], tuple[str, int]],
) -> None:
    process, where = agent
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
    assert process.poll() is None, "the process itself lives"
