"""Accepts and dials connections, and hands over only those whose two ends have authenticated each other.

``PendingHandshakes`` and ``retry_if_hung_up`` serve every lane that makes its own connections. ``Acceptor`` and
``dial`` apply them to Unix and TCP sockets, for the socket lane and for the control connections of the nccl lane.
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
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.credentials import Credentials, Identity, Instance
from raytorchrpc.lanes.common.protection import Protection, secure_accepted, secure_stream
from raytorchrpc.process import fork, threads

logger = logging.getLogger(__name__)

#: Longest time to connect and authenticate (seconds); the deadline of a call may shorten it.
CONNECT_TIMEOUT_S = 10.0
#: Handshakes that may be pending, beyond one for each peer: all peers may connect at once, for instance to a member
#: that has restarted.
_HANDSHAKES = 16
_ATTEMPTS = 3
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Closable(Protocol):
    """A connection, hashable by identity."""

    def close(self) -> None:
        """Close it."""


C = TypeVar("C", bound=Closable)
T = TypeVar("T")
#: Takes over an authenticated connection, on a thread of its own: the connection, its protection, the peer's identity.
#: May raise RayTorchRpcError to refuse the connection, which is then closed.
Admit = Callable[[C, Protection | None, Identity], None]
#: Runs the accepting end of the handshake: returns the peer's identity and what protects the connection from then on.
Secure = Callable[[C], tuple[Identity, Protection | None]]


class PendingHandshakes(Generic[C]):
    """Accepted connections whose other end has not authenticated itself yet. Thread-safe.

    Each runs its handshake on a thread of its own. Beyond the limit the oldest is dropped, so that strangers which send
    nothing cannot keep members out.
    """

    def __init__(
        self, me: str, peers: Callable[[], int], hang_up: Callable[[C], None], admit: Admit[C], role: str = "handshake"
    ) -> None:
        """``me``: this member, for thread names and logs. ``peers``: returns how many members may connect at once.
        ``hang_up``: wakes the thread that runs a connection's handshake. ``role``: the suffix of the threads' names;
        they also run ``admit``.
        """
        self._me, self._thread_name = me, f"raytorchrpc-{me}-{role}"
        self._peers, self._hang_up, self._admit = peers, hang_up, admit
        self._lock = threading.Lock()
        self._pending: dict[C, None] = {}  # oldest first
        self._closed = False

    def start(self, connection: C, secure: Secure[C]) -> bool:
        """Authenticate a new connection on a thread of its own. Never blocks.

        Returns False after ``close``. The connection is closed then, and also where this raises ThreadShortage.
        """
        oldest = None
        with self._lock:
            if self._closed:
                connection.close()
                return False
            if len(self._pending) >= _HANDSHAKES + self._peers():
                oldest = next(iter(self._pending))
                del self._pending[oldest]
            self._pending[connection] = None
        if oldest is not None:
            self._hang_up(oldest)
        try:
            threads.start(self._run, connection, secure, name=self._thread_name)
        except BaseException:  # closing it informs the other end
            self._forget(connection)
            connection.close()
            raise
        return True

    def _forget(self, connection: C) -> bool:
        """Whether the connection was still pending."""
        with self._lock:
            return self._pending.pop(connection, True) is None

    def _run(self, connection: C, secure: Secure[C]) -> None:
        try:
            peer, protection = secure(connection)
            if not self._forget(connection):
                raise handshake.Refused("its handshake took too long")
            self._admit(connection, protection, peer)
        except Exception as error:
            self._forget(connection)
            connection.close()
            if not isinstance(error, (OSError, RayTorchRpcError)):
                raise
            logger.debug("%s refused a connection: %s", self._me, error)

    def close(self) -> None:
        """Drop all pending connections, and accept no more. Idempotent."""
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for connection in pending:
            self._hang_up(connection)


def retry_if_hung_up(connect: Callable[[], T]) -> T:
    """Return what ``connect`` returns. If the other end hangs up, which a crowded one does, try three times in all."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(handshake.HungUp, ConnectionResetError, BrokenPipeError):
            return connect()
    return connect()


# --- Unix and TCP sockets ------------------------------------------------------------------------------------------


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


class Acceptor:
    """The listening sockets of one lane. Thread-safe."""

    def __init__(
        self,
        service: str,
        me: str,
        credentials: Credentials,
        peers: Callable[[], int],
        admit: Admit[socket.socket],
        role: str = "handshake",
    ) -> None:
        """``service``: names the lane in handshakes. The others: see PendingHandshakes."""
        self._service, self._credentials = service, credentials
        self._handshakes = PendingHandshakes(me, peers, _hang_up, admit, role)
        self.listeners: dict[int, socket.socket] = {}
        """By descriptor. They do not block: poll them, and call ``accept`` when one is readable."""
        self.address = SocketAddress("", None, credentials.instance)

    def open(self, tcp_host: str | None) -> SocketAddress:
        """Listen on a Unix socket and, if ``tcp_host`` is given, on that address for other hosts. Raises OSError."""
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
        """Accept one connection, and start its handshake. Never blocks.

        Returns False if the process has no descriptor for it; it then stays in the backlog. Raises ThreadShortage
        after closing it.
        """
        try:
            sock, _ = listener.accept()
        except OSError as error:  # also if the other end has closed it already
            return error.errno not in _NO_ROOM
        self._handshakes.start(sock, self._secure)
        return True

    def _secure(self, sock: socket.socket) -> tuple[Identity, Protection | None]:
        handshake.check_user(sock, self._credentials)
        me = listener_identity(self._service, self._credentials, self.address, sock.family)
        exposed = sock.family != socket.AF_UNIX
        return secure_accepted(sock, self._credentials, me, CONNECT_TIMEOUT_S, exposed=exposed)

    def close(self) -> None:
        """Stop listening, and drop pending handshakes. Idempotent."""
        for listener in self.listeners.values():
            listener.close()
        self._handshakes.close()


def dial(
    service: str, credentials: Credentials, own: SocketAddress, address: SocketAddress, by_tcp: bool, timeout_s: float
) -> tuple[socket.socket, Protection | None]:
    """Connect, and authenticate both ends. ``own``: where this process listens.

    Returns the socket and what protects it. Blocks for at most ``timeout_s`` seconds. Raises Refused or OSError.
    """
    if by_tcp and address.tcp is None:
        raise handshake.Refused("it does not listen for other hosts")
    family = _family(address.tcp[0]) if by_tcp and address.tcp is not None else socket.AF_UNIX
    where: Any = address.tcp if by_tcp else "\0" + address.unix
    me, peer = (listener_identity(service, credentials, each, family) for each in (own, address))
    deadline = time.monotonic() + timeout_s

    def connect() -> tuple[socket.socket, Protection | None]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            left = max(0.001, deadline - time.monotonic())
            sock.settimeout(left)
            sock.connect(where)
            if by_tcp:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake.check_user(sock, credentials)
            return sock, secure_stream(sock, credentials, me, peer, left, exposed=by_tcp)
        except BaseException:
            sock.close()
            raise

    return retry_if_hung_up(connect)


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes the thread of its handshake, which closes it
