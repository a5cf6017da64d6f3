"""Connections on which the two ends of the nccl lane agree on the next transfer, by small messages.

A connection is a Unix socket within a network namespace, TCP otherwise. Its end tells either side that the other is
gone.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import threading
import time
import weakref
from typing import Any

from raytorchrpc.lanes.base import Message
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.acceptor import CONNECT_TIMEOUT_S, SocketAddress, dial
from raytorchrpc.lanes.common.credentials import Credentials
from raytorchrpc.lanes.common.handshake import Refused
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.tensors.codec import NOTHING

#: Names these connections in handshakes.
SERVICE = "nccl"
HUNG_UP = "connection closed (the process ended or left the group)"
_OVER = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Disconnected(Exception):
    """The connection has ended, or could not be made. The text says why."""


class TimedOut(Exception):
    """The deadline passed."""


class ControlConnection:
    """One end of an authenticated connection. Any thread may send; one at a time receives."""

    def __init__(self, sock: socket.socket, protection: Protection | None) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._sending = threading.Lock()
        self._protection = protection
        self._reader = frames.FrameReader(protection)
        self._arrived: collections.deque[frames.Frame] = collections.deque()
        self._closed = False
        weakref.finalize(self, sock.close)  # not earlier: a thread may be about to poll this descriptor

    @property
    def fd(self) -> int:
        """For a poll set. Valid as long as this object lives."""
        return self._sock.fileno()

    def send(self, message: tuple[Any, ...], deadline: float) -> None:
        """Send builtins. Raises Disconnected or TimedOut; after TimedOut the stream is out of step, so close it."""
        buffers = frames.pack(frames.REQUEST, 0, Message(message, NOTHING))
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimedOut
        try:
            data = memoryview(b"".join(buffers if self._protection is None else self._protection.seal(buffers)))
            while data:
                try:
                    data = data[self._sock.send(data, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
        except OSError as error:
            raise Disconnected(f"connection broke: {error}") from error
        finally:
            self._sending.release()

    def receive(self, deadline: float | None) -> tuple[Any, ...]:
        """Return the next message. Blocks until it is there. Raises Disconnected or TimedOut."""
        try:
            while not self._arrived:
                try:
                    self._arrived.extend(self._reader.read(self._sock))
                except BlockingIOError:
                    self._wait(select.POLLIN, deadline)
            return self._arrived.popleft().message.header
        except EOFError as error:
            raise Disconnected(HUNG_UP) from error
        except (OSError, ValueError) as error:
            raise Disconnected(f"connection broke: {error}") from error

    def _wait(self, event: int, deadline: float | None) -> None:
        if not self._poll(event, None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimedOut

    def readable(self) -> bool:
        """Whether ``receive`` would return or raise at once. Never waits."""
        return bool(self._arrived) or self._closed or bool(self._poll(select.POLLIN))

    def hung_up(self) -> bool:
        """Whether either end has hung up. Never waits."""
        return self._closed or bool(self._poll(select.POLLRDHUP) & _OVER)

    def _poll(self, event: int, seconds: float | None = 0.0) -> int:
        poll = select.poll()
        poll.register(self.fd, event)
        return sum(found for _, found in poll.poll(None if seconds is None else seconds * 1000))

    def close(self) -> None:
        """Hang up, and wake the threads that wait. The descriptor is closed with this object."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def connect(
    address: SocketAddress, by_tcp: bool, credentials: Credentials, own: SocketAddress, deadline: float
) -> ControlConnection:
    """Connect, and authenticate both ends. ``own``: where this process listens. Raises Disconnected."""
    timeout_s = max(0.001, min(deadline - time.monotonic(), CONNECT_TIMEOUT_S))
    try:
        return ControlConnection(*dial(SERVICE, credentials, own, address, by_tcp, timeout_s))
    except (OSError, Refused) as error:
        raise Disconnected(f"no connection to it: {error}") from error
