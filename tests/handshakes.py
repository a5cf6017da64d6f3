"""The handshake of the socket and nng lanes, for a test that stands at one end of it."""

from __future__ import annotations

import socket
import time
from typing import TypeVar

from raytorchrpc.lanes.common.handshake import HungUp, Steps, Unfinished

T = TypeVar("T")


def run(sock: socket.socket, steps: Steps[T], timeout_s: float) -> T:
    """Run one end of it. Blocks for at most ``timeout_s`` seconds. Raises Refused or OSError."""
    deadline = time.monotonic() + timeout_s
    try:
        sending, size = next(steps)
        while True:
            if data := b"".join(sending):
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.sendall(data)
            if size:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                if not (data := sock.recv(size)):
                    raise HungUp("it hung up")
            sending, size = steps.send(data)
    except StopIteration as done:
        sock.settimeout(None)
        outcome: T = done.value
        return outcome
    except TimeoutError:
        raise Unfinished("it did not complete the handshake in time") from None
