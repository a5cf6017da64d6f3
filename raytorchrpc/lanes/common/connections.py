"""Connections whose two ends have authenticated each other, for message lanes that make their own: socket and nng."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Message, MessageLane, PeerAddress, Pending, Released
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.handshake import Credentials, HungUp, Identity, Instance, Refused
from raytorchrpc.lanes.common.polling import Timer
from raytorchrpc.lanes.common.protection import Protection, secure
from raytorchrpc.process import fork, threads

logger = logging.getLogger(__name__)

#: Longest time to connect and authenticate (seconds); the deadline of a call may shorten it.
CONNECT_TIMEOUT_S = 10.0
#: Handshakes that may be pending, beyond one for each peer: all peers may connect at once, for instance to a member
#: that has restarted.
_HANDSHAKES = 16
_ATTEMPTS = 3
#: How often the connections to peers are looked at, and how long one may be idle (seconds).
SWEEP_S, IDLE_S = 10.0, 60.0
#: Connections to peers that may be idle from one sweep to the next: to make one anew takes a millisecond at both ends,
#: so groups in which all call each other keep theirs.
MOST_IDLE = 256
_IDLE = "it was idle"
_TIMEVAL = struct.Struct("@ll")
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


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
    """The listening sockets of one lane, and accepted connections whose other end has not authenticated itself yet.

    Each of those runs its handshake on a thread of its own. Beyond a limit the oldest is dropped, so that strangers
    which send nothing cannot keep members out. Thread-safe.
    """

    def __init__(
        self,
        service: str,
        me: str,
        credentials: Credentials,
        peers: Callable[[], int],
        admit: Callable[[socket.socket, Protection | None], object],
    ) -> None:
        """``service``: names the lane in handshakes. ``me``: this member, for thread names and logs. ``peers``: returns
        how many members may connect at once. ``admit``: takes over an authenticated connection, on a thread of its own;
        may raise OSError or RayTorchRpcError to refuse it.
        """
        self._service, self._me, self._credentials = service, me, credentials
        self._peers, self._admit = peers, admit
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, None] = {}  # oldest first
        self._closed = False
        self.listeners: dict[int, socket.socket] = {}
        """By descriptor. They do not block: poll them, and call ``accept`` when one is readable."""
        self.address = SocketAddress("", None, credentials.instance)

    def open(self, tcp_host: str | None) -> SocketAddress:
        """Listen on a Unix socket and, if ``tcp_host`` is given, on that address for other hosts. Raises OSError."""
        unix = fork.ABSTRACT + os.urandom(12).hex()
        self._listen(socket.AF_UNIX, "\0" + unix)
        self.address = self.address._replace(unix=unix)
        return self.address if tcp_host is None else self.open_tcp(tcp_host)

    def open_tcp(self, host: str) -> SocketAddress:
        """Also listen on that address of this host, on a port that the kernel chooses. Raises OSError."""
        bound = self._listen(_family(host), (host, 0)).getsockname()[:2]
        self.address = self.address._replace(tcp=bound)
        return self.address

    def _listen(self, family: int, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"cannot listen on {address!r}: {error.strerror or error}") from error
        listener.setblocking(False)
        self.listeners[listener.fileno()] = listener
        return listener

    def accept(self, fd: int) -> bool:
        """Accept one connection of a listener, and start its handshake. Never blocks.

        Returns False if the process has no descriptor for it; it then stays in the backlog. Raises ThreadShortage
        after closing it.
        """
        try:
            sock, _ = self.listeners[fd].accept()
        except OSError as error:  # also if the other end has closed it already
            return error.errno not in _NO_ROOM
        oldest = None
        with self._lock:
            if not (closed := self._closed):
                if len(self._pending) >= _HANDSHAKES + self._peers():
                    oldest = next(iter(self._pending))
                    del self._pending[oldest]
                self._pending[sock] = None
        if closed:
            sock.close()
            return True
        if oldest is not None:
            _hang_up(oldest)
        try:
            threads.start(self._authenticate, sock, name=f"raytorchrpc-{self._me}-handshake")
        except BaseException:  # closing it informs the other end
            self._is_pending(sock)
            sock.close()
            raise
        return True

    def _is_pending(self, sock: socket.socket) -> bool:
        """Whether the connection was still pending, which it is no more."""
        with self._lock:
            return self._pending.pop(sock, True) is None

    def _authenticate(self, sock: socket.socket) -> None:
        try:
            me = listener_identity(self._service, self._credentials, self.address, sock.family)
            protection = secure(sock, self._credentials, me, None, CONNECT_TIMEOUT_S)
            if not self._is_pending(sock):
                raise Refused("its handshake took too long")
            self._admit(sock, protection)
        except Exception as error:
            self._is_pending(sock)
            sock.close()
            if not isinstance(error, (OSError, RayTorchRpcError)):
                raise
            logger.debug("%s refused a connection: %s", self._me, error)

    def retract(self, known: Collection[int], address: SocketAddress) -> None:
        """Stop listening but by these descriptors, at this address."""
        for fd in self.listeners.keys() - known:
            self.listeners.pop(fd).close()
        self.address = address

    def close(self) -> None:
        """Stop listening, and drop pending handshakes. Idempotent."""
        for listener in self.listeners.values():
            listener.close()
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for sock in pending:
            _hang_up(sock)


class ClosedWhileIdle(Exception):
    """Nothing was sent: the connection has just been closed, and another one can be made."""


class Connection(ABC):
    """One connection of a lane. Sends requests and receives replies (``peer`` is set), or receives requests."""

    def __init__(self, peer: str | None) -> None:
        self.peer = peer
        self._state = threading.Lock()
        self._pending: dict[int, Any] = {}
        """By number: the calls in flight."""
        self._number = 0
        """Of the last call."""
        self._seen, self._used = -1, 0.0  # see last_used
        self._ended: str | None = None

    @abstractmethod
    def call(self, message: Message, deadline: float, caller_waits: bool, on_released: Released) -> Pending:
        """See MessageLane.call."""

    @property
    def ended(self) -> bool:
        """Whether it can carry nothing more."""
        return self._ended is not None

    def _begin(self, pending: Pending) -> int:
        """Under ``_state``: give a call its number; its reply can arrive from now on."""
        if self._ended is _IDLE:
            raise ClosedWhileIdle
        if self._ended is not None:
            raise PeerLost(self.peer or "?", self._ended, may_have_run=False)
        self._number += 1
        self._pending[self._number] = pending
        return self._number

    def last_used(self, now: float) -> float:
        """When it was last seen in use: ``now`` if it has been used since it was last asked. For one thread."""
        if self._pending or self._number != self._seen:
            self._seen, self._used = self._number, now
        return self._used

    def _requests_among(self, arrived: Sequence[frames.Frame]) -> list[frames.Frame]:
        """Complete the calls whose replies have arrived, and return the requests."""
        requests = []
        for frame in arrived:
            if frame.kind == frames.REQUEST:
                requests.append(frame)
            elif (pending := self._pending.pop(frame.call, None)) is None:
                continue  # it was abandoned
            elif size := frame.message.unread_bytes:
                pending.settle(None, MemoryError(f"this process has no memory for the answer ({size} bytes)"))
            else:
                pending.settle(frame.message)
        return requests

    def _busy(self) -> RpcTimeout:
        return RpcTimeout(f"the route to {self.peer or 'the caller'} was busy until the deadline")

    def end_idle(self) -> bool:
        """Close it if no call is in flight, and if it has carried one. Returns whether it did.

        Only the end that made the connection may do this. It has read the replies to all requests that it sent, so
        nothing is on the way in either direction. The other end takes it for no sign of life or death.
        """
        return self._end(_IDLE, lambda: self._number > 0 and not self._pending)

    def end(self, reason: str) -> None:
        """Close it; calls in flight fail with PeerLost. Idempotent. Not to be called while sending."""
        self._end(reason, lambda: True)

    def _end(self, reason: str, may: Callable[[], bool]) -> bool:
        with self._state:
            if self._ended is not None or not may():
                return False
            self._ended = reason
        try:  # even if memory runs out, both the other end and the waiting callers must be told
            self._detach()
        finally:
            try:
                self._close()
            finally:
                self._fail_calls(reason)
        return True

    @abstractmethod
    def _detach(self) -> None:
        """Have nothing more read."""

    @abstractmethod
    def _close(self) -> None:
        """Tell the other end, and release the socket."""

    def _fail_calls(self, reason: str) -> None:
        while self._pending:
            try:
                _, pending = self._pending.popitem()
            except KeyError:  # another thread has just abandoned the last one
                return
            try:
                pending.settle(None, PeerLost(self.peer or "?", reason))
            except MemoryError as error:  # the call ends at its deadline
                threads.report(error, "a call could not be told that its connection ended")


C = TypeVar("C", bound=Connection)


class ConnectedLane(MessageLane, Generic[C]):
    """Listens on Unix and TCP sockets. Connects to a peer when it is called, and closes connections that are idle.

    A connection carries the requests of the end that made it, and the replies. That end closes it while no reply is
    outstanding: after ``IDLE_S`` without a call; earlier if more than ``MOST_IDLE`` are idle; at once if the process
    has no descriptor left. The next call makes another connection.
    """

    def __init__(self, me: str, credentials: Credentials, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        """``tcp_host``: address to listen on for other hosts, or None. ``by_tcp``: the peers on other hosts."""
        self._me, self._credentials = me, credentials
        self._tcp_host, self._by_tcp = tcp_host, by_tcp
        self._addresses: dict[str, SocketAddress] = {}
        self._made: dict[str, C] = {}  # by peer; some may have ended
        self._connecting: dict[str, threading.Lock] = {}  # by peer; held while a connection is made
        self._made_lock = threading.Lock()
        self._sweeps = Timer(SWEEP_S)  # set while there are connections to peers
        self._acceptor = Acceptor(self.name, me, credentials, self._addresses.__len__, self._admit)

    @abstractmethod
    def _poll(self, fd: int) -> None:
        """Have ``_readable`` called when this descriptor, a listening socket or the timer, is readable."""

    def _readable(self, fd: int) -> bool:
        """Returns False if this is to be called again after a pause: the process has no descriptor left."""
        if fd in self._acceptor.listeners:
            return self._acceptor.accept(fd) or self._close_idle()
        if fd == self._sweeps.fd:
            self._sweep()
        return True

    @abstractmethod
    def _register(self, sock: socket.socket, protection: Protection | None, peer: str | None, deadline: float) -> C:
        """Make the connection of an authenticated socket, which the caller closes if this raises.

        ``peer``: the member at the other end; None if that made the connection. Raises PeerLost, Refused or OSError.
        """

    def _listen(self, begin: Callable[[Any], SocketAddress], tcp_host: str | None) -> SocketAddress:
        acceptor = self._acceptor
        known, before = set(acceptor.listeners), acceptor.address
        try:
            address = begin(tcp_host)
            for fd in acceptor.listeners.keys() - known:
                self._poll(fd)
        except BaseException as error:
            acceptor.retract(known, before)  # so that a later attempt begins anew
            if isinstance(error, OSError):
                raise LaneUnavailable(self.name, str(error)) from error
            raise
        return address

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> SocketAddress | None:
        self._by_tcp = by_tcp
        if tcp_host is None or self._acceptor.address.tcp is not None:
            return None
        return self._listen(self._acceptor.open_tcp, tcp_host)

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        for peer in peers:
            self._addresses[peer.peer] = peer.address
            self._connecting.setdefault(peer.peer, threading.Lock())

    def disconnect(self, peer: str) -> None:
        self._addresses.pop(peer, None)
        connection = self._made.pop(peer, None)
        if connection is not None:
            connection.end("it was removed from the group")

    def call(
        self, peer: str, message: Message, timeout_s: float, *, caller_waits: bool = False, on_released: Released = None
    ) -> Pending:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(ClosedWhileIdle):
                return self._connection(peer, deadline).call(message, deadline, caller_waits, on_released)

    def _sweep(self) -> None:
        """Close connections that have been idle for long, and those idle longest beyond the limit."""
        with self._made_lock:
            if self._sweeps.fd < 0:  # the lane was closed meanwhile
                return
            self._sweeps.clear()
            if self._made:
                self._sweeps.set()
            made = list(self._made.values())
        now = time.monotonic()
        idle = sorted(
            ((used, connection) for connection in made if (used := connection.last_used(now)) < now),
            key=lambda each: each[0],
        )
        for number, (used, connection) in enumerate(idle):
            if number < len(idle) - MOST_IDLE or now - used >= IDLE_S:
                connection.end_idle()

    def _close_idle(self) -> bool:
        """Close all connections that carry no call; returns whether that freed a descriptor."""
        return any([connection.end_idle() for connection in list(self._made.values())])

    def _close_timer(self) -> None:
        with self._made_lock:
            self._sweeps.close()

    def _connection(self, peer: str, deadline: float) -> C:
        """Return the connection to a peer; make it if there is none. Blocks until the deadline at most.

        Raises PeerLost, with ``may_have_run`` False.
        """
        connection = self._made.get(peer)
        if connection is not None and connection._ended is None:
            return connection
        address = self._addresses.get(peer)
        if address is None:
            raise PeerLost(peer, "it is not in the group (any more)", may_have_run=False)
        lock = self._connecting[peer]
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerLost(peer, "no connection to it in time", may_have_run=False)
        try:
            connection = self._made.get(peer)
            if connection is None or connection.ended:
                until = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
                try:
                    connection = self._connect(peer, address, until)
                except OSError as error:
                    if error.errno not in _NO_ROOM or not self._close_idle():
                        raise
                    connection = self._connect(peer, address, until)
                with self._made_lock:
                    if not self._made:
                        self._sweeps.set()
                    self._made[peer] = connection
            return connection
        except (OSError, Refused) as error:
            raise PeerLost(peer, f"no connection to it: {error}", may_have_run=False) from error
        finally:
            lock.release()

    def _connect(self, peer: str, address: SocketAddress, deadline: float) -> C:
        """Connect, and authenticate both ends. Raises PeerLost, Refused or OSError."""
        by_tcp = peer in self._by_tcp
        if by_tcp and address.tcp is None:
            raise Refused("it does not listen for other hosts")
        where: Any = address.tcp if by_tcp else "\0" + address.unix
        family = _family(where[0]) if by_tcp else socket.AF_UNIX
        own = self._acceptor.address
        me, its = (listener_identity(self.name, self._credentials, each, family) for each in (own, address))
        for attempt in range(_ATTEMPTS):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                left = max(0.001, deadline - time.monotonic())
                # With a full backlog, connecting to a Unix socket fails at once, unless the call may block.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))
                sock.settimeout(left if by_tcp else None)
                sock.connect(where)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, 0))
                if by_tcp:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                protection = secure(sock, self._credentials, me, its, left)
            except (HungUp, ConnectionResetError, BrokenPipeError):  # a crowded listener hangs up
                sock.close()
                if attempt == _ATTEMPTS - 1:
                    raise
            except BaseException:
                sock.close()
                raise
            else:
                break
        try:
            return self._register(sock, protection, peer, deadline)
        except BaseException:
            sock.close()
            raise

    def _discard(self, connection: C) -> None:
        """Forget a connection to a peer, if it is still the current one."""
        with self._made_lock:
            if connection.peer is not None and self._made.get(connection.peer) is connection:
                del self._made[connection.peer]

    def _admit(self, sock: socket.socket, protection: Protection | None) -> None:
        self._register(sock, protection, None, time.monotonic() + CONNECT_TIMEOUT_S)

    def _left(self, peer: str | None) -> PeerLost:
        return PeerLost(peer or "the caller", "this member has left the group", may_have_run=False)

    def _tcp_addresses(self) -> list[fork.Address]:
        """Return the addresses of all connections over TCP, for ``after_fork``."""
        known = (self._acceptor.address, *self._addresses.values())
        return [address.tcp for address in known if address.tcp is not None]


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes the thread of its handshake, which closes it
