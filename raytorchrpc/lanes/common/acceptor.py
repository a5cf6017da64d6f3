"""Listens and dials on Unix and TCP sockets, and hands over only connections whose both ends are proved.

Every lane that makes its own sockets does it by this: the socket lane and the control connections of the nccl lane.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.credentials import Credentials, Identity, Instance
from raytorchrpc.lanes.common.protection import Protection, secure_incoming, secure_outgoing
from raytorchrpc.process import fork, threads

logger = logging.getLogger(__name__)

#: Time for a connection to be made and proved (seconds), at most; a call's deadline may cut it.
CONNECT_TIMEOUT_S = 10.0
#: Connections being proved at a time besides one for each peer, as all may come at once, to a member that is back for
#: instance; for one more, the oldest is closed.
_HANDSHAKES = 16
_ATTEMPTS = 3
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

#: Takes over a proved connection, on a thread of its own: the socket, what protects it, who is at the other end.
Admit = Callable[[socket.socket, Protection | None, Identity], None]


class SocketAddress(NamedTuple):
    """Where a process listens."""

    unix: str
    """Name in Linux's abstract socket namespace: no file, gone with the process."""
    tcp: tuple[str, int] | None
    instance: Instance
    """Which process listens there."""


def listener_identity(service: str, credentials: Credentials, address: SocketAddress, family: int) -> Identity:
    """The identity of a listener, as those name it who connect to it by this family of sockets."""
    where = address.unix if family == socket.AF_UNIX else f"{address.unix} {address.tcp}"
    return credentials.peer(address.instance, f"{service} {where}")


class Acceptor:
    """The listening sockets of one lane. Thread-safe."""

    def __init__(
        self,
        service: str,
        me: str,
        credentials: Credentials,
        peers: Callable[[], int],
        admit: Admit,
        threads_do: str = "handshake",
    ) -> None:
        """``service``: names the lane in proofs. ``me``: this member, for threads and logs. ``peers``: how many members
        may connect at once. ``admit`` may raise RayTorchRpcError to refuse the connection, which is closed then.
        ``threads_do``: names the threads that prove, and then run ``admit``.
        """
        self._service, self._me, self._credentials = service, me, credentials
        self._thread_name = f"raytorchrpc-{me}-{threads_do}"
        self._peers, self._admit = peers, admit
        self._lock = threading.Lock()
        self._proving: dict[socket.socket, None] = {}  # oldest first
        self.listeners: dict[int, socket.socket] = {}
        """By descriptor. They do not block: poll them, and call ``accept`` when one is readable."""
        self.address = SocketAddress("", None, credentials.instance)

    def open(self, tcp_host: str | None) -> SocketAddress:
        """Listen on a Unix socket, and for other hosts on that address; None: for no others. Raises OSError."""
        unix = fork.ABSTRACT + os.urandom(12).hex()
        self._listen(socket.AF_UNIX, "\0" + unix)
        self.address = self.address._replace(unix=unix)
        try:
            return self.address if tcp_host is None else self.open_tcp(tcp_host)
        except OSError:
            self.close()
            raise

    def open_tcp(self, host: str) -> SocketAddress:
        """Also listen on that address of this host, on a port that the kernel chooses. Raises OSError."""
        bound = self._listen(_family(host), (host, 0)).getsockname()[:2]
        self.address = self.address._replace(tcp=bound)
        return self.address

    def _listen(self, family: int, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(256)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"cannot listen on {address!r}: {error.strerror or error}") from error
        listener.setblocking(False)
        self.listeners[listener.fileno()] = listener
        return listener

    def accept(self, listener: socket.socket) -> bool:
        """Take one connection, and have it proved on a thread of its own. Never blocks.

        Returns False where no descriptor is left for it: it still waits. Raises ThreadShortage; it is closed then.
        """
        try:
            sock, _ = listener.accept()
        except OSError as error:  # or it is gone again
            return error.errno not in _NO_ROOM
        with self._lock:
            crowded = len(self._proving) >= _HANDSHAKES + self._peers()
            oldest = next(iter(self._proving)) if crowded else None
            if oldest is not None:
                del self._proving[oldest]
            self._proving[sock] = None
        if oldest is not None:  # strangers who say nothing must not keep members out
            _hang_up(oldest)
        try:
            threads.start(self._prove, sock, name=self._thread_name)
        except BaseException:  # the other end hears that it was hung up on
            with self._lock:
                self._proving.pop(sock, None)
            sock.close()
            raise
        return True

    def _prove(self, sock: socket.socket) -> None:
        try:
            me = listener_identity(self._service, self._credentials, self.address, sock.family)
            peer, protection = secure_incoming(sock, self._credentials, me, CONNECT_TIMEOUT_S)
            with self._lock:
                still = self._proving.pop(sock, True) is None
            if not still:
                raise handshake.Refused("it took too long")
            self._admit(sock, protection, peer)
        except Exception as error:
            with self._lock:
                self._proving.pop(sock, None)
            sock.close()
            if not isinstance(error, (OSError, RayTorchRpcError)):
                raise
            logger.debug("%s refused a connection: %s", self._me, error)

    def close(self) -> None:
        """Stop listening, and hang up on those that are being proved. Idempotent."""
        for listener in self.listeners.values():
            listener.close()
        with self._lock:
            proving = list(self._proving)
        for sock in proving:
            _hang_up(sock)


def dial(
    service: str, credentials: Credentials, own: SocketAddress, address: SocketAddress, by_tcp: bool, timeout_s: float
) -> tuple[socket.socket, Protection | None]:
    """Connect, and prove to each other who both are. ``own``: where this process listens.

    Returns the socket and what protects it. Blocks for at most ``timeout_s`` seconds. Raises Refused or OSError.
    """
    family: int = socket.AF_UNIX
    where: Any = "\0" + address.unix
    if by_tcp:
        if address.tcp is None:
            raise handshake.Refused("it does not listen for other hosts")
        family, where = _family(address.tcp[0]), address.tcp
    me, peer = (listener_identity(service, credentials, each, family) for each in (own, address))
    until = time.monotonic() + timeout_s
    for attempt in range(_ATTEMPTS):  # the other end may hang up on strangers, and be in doubt about us
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            left = max(0.001, until - time.monotonic())
            sock.settimeout(left)
            sock.connect(where)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock, secure_outgoing(sock, credentials, me, peer, left)
        except (OSError, handshake.Refused) as error:
            sock.close()
            hung_up = isinstance(error, (handshake.HungUp, ConnectionResetError, BrokenPipeError))
            if not hung_up or attempt == _ATTEMPTS - 1:
                raise
        except BaseException:
            sock.close()
            raise
    raise AssertionError("unreachable")


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # its handshake thread wakes, and closes it
