"""Listening sockets, and the handshakes of those who connect to them; see ``connections`` for what follows."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.lanes.common.handshake import Credentials, HungUp, Identity, Instance, Refused, Steps
from raytorchrpc.lanes.common.protection import Protection, secure
from raytorchrpc.process import fork, threads
from raytorchrpc.process.locks import Lock

logger = logging.getLogger(__name__)

#: Longest time of one attempt to connect and authenticate (seconds); the deadline of a call may shorten it.
CONNECT_TIMEOUT_S = 10.0
#: Errors of a process that lacks a descriptor or memory for a connection.
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Handshakes that may be pending, beyond one for each peer: all peers may connect at once, for instance to a member
#: that has restarted.
_HANDSHAKES = 16
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class SocketAddress(NamedTuple):
    """Where a process listens."""

    unix: str
    """Name in Linux's abstract socket namespace, which leaves no file behind."""
    tcp: tuple[str, int] | None
    instance: Instance
    """The process that listens there."""


def listener_identity(service: str, credentials: Credentials, address: SocketAddress, family: int) -> Identity:
    """Return the identity of a listener as seen by a process that connects over this socket family."""
    where = address.unix if family == socket.AF_UNIX else f"{address.unix} {address.tcp}"
    return credentials.peer(address.instance, f"{service} {where}")


class _Arrival:
    """An accepted connection whose other end has not authenticated itself yet."""

    def __init__(self, sock: socket.socket, steps: Steps[Protection | None]) -> None:
        self.sock, self._steps, self.since = sock, steps, time.monotonic()
        _, self._size = next(steps)  # the accepting end listens first
        self.protection: Protection | None = None

    def proceed(self) -> bool:
        """Run the handshake as far as its data has arrived; returns whether to its end. Never blocks.

        Raises Refused or OSError.
        """
        while True:
            received = b""
            if self._size:
                try:
                    received = self.sock.recv(self._size, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                if not received:
                    raise HungUp("it hung up")
            try:
                sending, self._size = self._steps.send(received)
            except StopIteration as done:
                self.protection = done.value
                return True
            if (data := b"".join(sending)) and self.sock.send(data, _AT_ONCE) < len(data):
                raise Refused("it does not read")


class Acceptor:
    """The listening sockets of one lane, and accepted connections whose other end has not authenticated itself yet.

    One thread runs all their handshakes, each as far as its data has arrived. Beyond a limit the oldest is dropped, so
    that strangers which send nothing cannot keep members out. Thread-safe.
    """

    def __init__(
        self,
        service: str,
        me: str,
        credentials: Credentials,
        peers: Callable[[], int],
        admit: Callable[[socket.socket, Protection | None], object],
    ) -> None:
        """``service``: names the lane in handshakes. ``me``: this member, for logs. ``peers``: returns how many members
        may connect at once. ``admit``: takes over an authenticated connection without blocking; may raise to refuse it.
        """
        self._service, self._me, self._credentials = service, me, credentials
        self._peers, self._admit = peers, admit
        self._lock = Lock()
        self._arrivals: dict[int, _Arrival] = {}  # by descriptor, oldest first
        self._listeners: dict[int, socket.socket] = {}  # by descriptor
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        """Call ``handle`` when it is readable."""
        self.closed = False
        self.address = SocketAddress("", None, credentials.instance)

    def open(self, tcp_host: str | None) -> SocketAddress:
        """Listen on a Unix socket and, if ``tcp_host`` is given, on that address for other hosts. Raises OSError."""
        unix = fork.ABSTRACT + os.urandom(12).hex()
        self._listen(socket.AF_UNIX, "\0" + unix)
        self.address = self.address._replace(unix=unix)
        return self.address if tcp_host is None else self.open_tcp(tcp_host)

    def open_tcp(self, host: str) -> SocketAddress:
        """Also listen on that address of this host, on a port that the kernel chooses. Raises OSError."""
        bound = self._listen(family_of(host), (host, 0)).getsockname()[:2]
        self.address = self.address._replace(tcp=bound)
        return self.address

    def _listen(self, family: int, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
            listener.setblocking(False)
            self._listeners[listener.fileno()] = listener
            self._epoll.register(listener, select.EPOLLIN)
        except OSError as error:
            self._listeners.pop(listener.fileno(), None)
            listener.close()
            raise OSError(error.errno, f"cannot listen on {address!r}: {error.strerror or error}") from error
        return listener

    def handle(self) -> bool:
        """Accept connections, and run handshakes. Never blocks.

        Returns False if the process has no descriptor for a connection, which then stays in the backlog.
        """
        has_room = True
        with self._lock:
            for fd, _ in () if self.closed else self._epoll.poll(0):
                if fd in self._listeners:
                    has_room = self._accept(self._listeners[fd]) and has_room
                elif (arrival := self._arrivals.get(fd)) is not None:
                    self._proceed(arrival)
        return has_room

    def _accept(self, listener: socket.socket) -> bool:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # also if the other end has closed it already
            return error.errno not in NO_ROOM
        while len(self._arrivals) >= _HANDSHAKES + self._peers():
            oldest = next(iter(self._arrivals.values()))
            if not self._proceed(oldest):
                self.refuse(oldest.sock, HungUp("others are waiting"))
        try:
            me = listener_identity(self._service, self._credentials, self.address, sock.family)
            arrival = _Arrival(sock, secure(sock, self._credentials, me))
            self._epoll.register(sock, select.EPOLLIN)
            self._arrivals[sock.fileno()] = arrival
        except Exception as error:
            self.refuse(sock, error)
        else:
            self._proceed(arrival)
        return True

    def _proceed(self, arrival: _Arrival) -> bool:
        """Returns whether it is no longer pending."""
        try:
            if not arrival.proceed():
                return False
            self._remove(arrival.sock)
            self._admit(arrival.sock, arrival.protection)
        except Exception as error:
            self.refuse(arrival.sock, error)
        return True

    def _remove(self, sock: socket.socket) -> None:
        if self._arrivals.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock)

    def refuse(self, sock: socket.socket, error: Exception) -> None:
        """Close an accepted connection."""
        self._remove(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # else TCP reports a reset if it has sent more, and not that no reply came
        sock.close()
        if isinstance(error, (OSError, RayTorchRpcError)):
            logger.debug("%s refused a connection: %s", self._me, error)
        else:
            threads.report(error, f"{self._me} refused a connection")

    def drop_late(self) -> bool:
        """Drop connections whose handshake takes too long. Returns whether others are pending."""
        with self._lock:
            for arrival in list(self._arrivals.values()):
                if time.monotonic() - arrival.since < CONNECT_TIMEOUT_S:
                    return True
                self.refuse(arrival.sock, Refused("it did not complete the handshake in time"))
        return False

    def close(self) -> None:
        """Stop listening, and drop pending handshakes. Idempotent."""
        with self._lock:
            self.closed = True
            for arrival in list(self._arrivals.values()):
                self.refuse(arrival.sock, HungUp("this member left the group"))
            for listener in self._listeners.values():
                listener.close()
            self._epoll.close()


def family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
