"""The handshake of the socket and nng lanes, for a test that stands at one end of it."""

from __future__ import annotations

import socket
from typing import TypeVar

from raytorchrpc.lanes.common.handshake import Steps, run

T = TypeVar("T")


def shake_hands(sock: socket.socket, steps: Steps[T], timeout_s: float) -> T:
    """Run one end of it. Blocks for at most ``timeout_s`` seconds. Raises Refused or OSError."""
    running = run(sock, steps, timeout_s, timeout_s)
    try:
        while True:
            next(running)
    except StopIteration as done:
        outcome: T = done.value
        return outcome
