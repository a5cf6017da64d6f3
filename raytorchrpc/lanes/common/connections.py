"""Connections whose two ends have authenticated each other, for message lanes that make their own: socket and nng."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Any, Generic, NamedTuple, TypeVar

from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Message, MessageLane, PeerAddress, Pending, Released
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.handshake import Credentials, HungUp, Identity, Instance, Refused, Steps, Unfinished
from raytorchrpc.lanes.common.polling import Timer
from raytorchrpc.lanes.common.protection import Protection, secure
from raytorchrpc.process import fork, threads
from raytorchrpc.process.completion import run_reported

logger = logging.getLogger(__name__)

#: Longest time of one attempt to connect and authenticate (seconds); the deadline of a call may shorten it.
CONNECT_TIMEOUT_S = 10.0
#: Handshakes that may be pending, beyond one for each peer: all peers may connect at once, for instance to a member
#: that has restarted.
_HANDSHAKES = 16
#: Pause before the second attempt to connect, and the longest one (seconds): each is twice as long as the last.
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
#: A connection is made for a caller that does not come to wait from this time on (seconds).
_UNWAITED_S = 0.002
#: How often the connections to peers are looked at, and how long one may be idle (seconds).
SWEEP_S, IDLE_S = 10.0, 60.0
#: Connections to peers that may be idle from one sweep to the next: to make one anew takes a millisecond at both ends,
#: so groups in which all call each other keep theirs.
MOST_IDLE = 256
_IDLE = "it was idle"
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
#: What follows these errors is another attempt: also a full backlog of a Unix socket, or a host that is silent.
_BROKEN_OFF = (Unfinished, ConnectionResetError, BrokenPipeError, BlockingIOError, TimeoutError, threads.ThreadShortage)


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


class Handshake:
    """The handshake at one end of a new connection, run as far as that takes no waiting."""

    def __init__(self, sock: socket.socket, steps: Steps[Protection | None]) -> None:
        self.sock, self._steps, self.since = sock, steps, time.monotonic()
        sending, self._size = next(steps)
        self._unsent = b"".join(sending)
        self.protection: Protection | None = None

    @property
    def events(self) -> int:
        """What it waits for, for ``select.poll`` and ``select.epoll``."""
        return select.POLLOUT if self._unsent else select.POLLIN

    def proceed(self) -> bool:
        """Go on as far as data has arrived; returns whether to the end. Never blocks. Raises Refused or OSError."""
        while True:
            received = b""
            try:
                while self._unsent:  # a connection over TCP takes nothing before it is made
                    self._unsent = self._unsent[self.sock.send(self._unsent, _AT_ONCE) :]
                if self._size and not (received := self.sock.recv(self._size, socket.MSG_DONTWAIT)):
                    raise HungUp("it hung up")
            except BlockingIOError:
                return False
            try:
                sending, self._size = self._steps.send(received)
            except StopIteration as done:
                self.protection = done.value
                return True
            self._unsent = b"".join(sending)


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
        self._lock = threading.Lock()
        self._arrivals: dict[int, Handshake] = {}  # by descriptor, oldest first
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
        bound = self._listen(_family(host), (host, 0)).getsockname()[:2]
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
            return error.errno not in _NO_ROOM
        while len(self._arrivals) >= _HANDSHAKES + self._peers():
            oldest = next(iter(self._arrivals.values()))
            if not self._proceed(oldest):
                self.refuse(oldest.sock, HungUp("others are waiting"))
        try:
            me = listener_identity(self._service, self._credentials, self.address, sock.family)
            arrival = Handshake(sock, secure(sock, self._credentials, me))
            self._epoll.register(sock, select.EPOLLIN)
            self._arrivals[sock.fileno()] = arrival
        except Exception as error:
            self.refuse(sock, error)
        else:
            self._proceed(arrival)
        return True

    def _proceed(self, arrival: Handshake) -> bool:
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


class ClosedWhileIdle(Exception):
    """Nothing was sent: the connection has just been closed, and another one can be made."""


class _Unsent(NamedTuple):
    """A request that waits until its connection stands."""

    deadline: float
    buffers: list[Any]
    take_back: Callable[[], object]
    """See Message."""


class ConnectionPending(Pending):
    """One call in flight on a connection."""

    __slots__ = ("connection",)

    connection: Any

    def withdraw(self) -> bool:
        withdrawn: bool = self.connection.withdraw(self)
        return withdrawn


class Connection(ABC):
    """One connection of a lane. Sends requests and receives replies (``peer`` is set), or receives requests.

    One to a peer takes requests before it stands. Threads that read it make it, each as far as that takes no waiting:
    they connect and authenticate, and again where the peer breaks an attempt off, as it may while many connect to it.
    """

    # What few connections change is set here: an object with more than 30 attributes of its own is slower.
    _cause: BaseException | None = None
    """Of the end."""
    _next_attempt, _pause_s = 0.0, _PAUSE_S
    _why = "it did not answer"
    """It does not stand yet."""

    def __init__(self, lane: Any, peer: str | None = None) -> None:
        """``lane``: the ConnectedLane."""
        self.peer, self._lane = peer, lane
        self._state = threading.Lock()
        self._pending: dict[int, Any] = {}
        """By number: the calls in flight."""
        self._number = 0
        """Of the last call."""
        self._seen, self._used = -1, 0.0  # see last_used
        self._ended: str | None = None
        self.stands = False
        """Whether both ends are authenticated, so that it carries frames."""
        self._unsent: dict[int, _Unsent] = {}
        """By number, in order: requests that wait until it stands."""
        self._leaving = 0
        """The number of the one that may have been sent all the same: with the handshake, or just now."""
        self._making = threading.Lock()
        """Held by the thread that makes it."""
        self._handshake: Handshake | None = None
        """Of the present attempt."""

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
            raise self._lost(may_have_run=False)
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

    def _lost(self, may_have_run: bool) -> PeerLost:
        lost = PeerLost(self.peer or "?", self._ended or "", may_have_run)
        lost.__cause__ = self._cause
        return lost

    # --- before it stands ------------------------------------------------------------------------------------

    def _wait_in_line(self, number: int, deadline: float, buffers: list[Any], message: Message, waits: bool) -> bool:
        """Have a request sent once the connection stands. Returns False if it does. Raises PeerLost.

        ``waits``: the caller will come to ``make``.
        """
        own = [bytes(part) for part in buffers]  # the caller may change its tensors
        with self._state:
            if self.stands:
                return False
            if self._ended is not None:
                raise self._lost(may_have_run=False)
            self._unsent[number] = _Unsent(deadline, own, message.take_back)
        if waits:
            self._lane.wake_at(time.monotonic() + _UNWAITED_S)
        self.proceed(polled=not waits)
        return True

    def withdraw(self, pending: Pending | None = None) -> bool:
        """End this call, or those whose deadlines have passed, if their requests wait: they will not be sent.

        Returns whether there were any.
        """
        now, over = time.monotonic(), []
        with self._state:
            for number, unsent in list(self._unsent.items()):
                is_over = unsent.deadline <= now if pending is None else self._pending.get(number) is pending
                if is_over and number != self._leaving and (one := self._pending.pop(number, None)) is not None:
                    over.append((one, self._unsent.pop(number)))
        for one, unsent in over:
            run_reported(unsent.take_back)
            late = f"no connection to {self.peer!r} by the deadline: {self._why}"
            one.settle(None, self._busy() if self.stands else RpcTimeout(late))
        if not self.stands:
            self.end_idle()
        return bool(over)

    def proceed(self, *, polled: bool = True) -> None:
        """Make the connection, unless another thread does, as far as that takes no waiting. ``polled``: and have the
        lane go on with it.
        """
        if is_mine := self._making.acquire(False):
            try:
                self._connect()
            finally:
                self._making.release()
        self._leave(polled=is_mine and polled)

    def make(self, pending: Pending, deadline: float) -> None:
        """As the thread that waits for a call, make the connection, unless another thread does."""
        if not self._making.acquire(False):
            return
        try:
            while not (self.stands or pending.done) and (now := time.monotonic()) < deadline:
                patience_s = max(0.0, min(deadline, self._due) - now)
                if self._handshake is None:
                    threads.pause(patience_s)
                else:
                    poll = select.poll()
                    poll.register(self._handshake.sock, self._handshake.events)
                    poll.poll(patience_s * 1000)
                self._connect()
        finally:
            self._making.release()
            self._leave(polled=True)

    def _leave(self, *, polled: bool) -> None:
        """Have the lane see to it that the connection is made, and that calls end at their deadlines."""
        self.withdraw()
        with self._state:
            if self._ended is None and not self.stands:
                if polled and self._handshake is not None:
                    self._lane.poll(self, self._handshake)
                self._lane.wake_at(self._due if polled else max(self._due, time.monotonic() + _UNWAITED_S))
                return
        if self._ended is not None:
            self._drop_attempt()

    @property
    def _due(self) -> float:
        """When there is something to do even if no data arrives (``time.monotonic``)."""
        handshake = self._handshake
        attempt = self._next_attempt if handshake is None else handshake.since + CONNECT_TIMEOUT_S
        return min([attempt, *(unsent.deadline for unsent in list(self._unsent.values()))])

    def _connect(self) -> None:
        """As the thread that makes it, go on as far as that takes no waiting."""
        self.withdraw()
        now, handshake = time.monotonic(), self._handshake
        waits = handshake is None and now < self._next_attempt
        if self.stands or self._ended is not None or not self._pending or waits:
            return
        try:
            if handshake is None:
                handshake = self._handshake = self._lane.dial(self.peer, self._first)
            elif now >= handshake.since + CONNECT_TIMEOUT_S:
                raise Unfinished("it did not complete the handshake in time")
            if handshake.proceed():
                self._lane.stop_polling(handshake)
                self._stand(handshake)
        except BaseException as error:
            self._break_off(error)
            if not isinstance(error, Exception):
                raise

    def _break_off(self, error: BaseException) -> None:
        """The present attempt has failed: make another one soon, if the peer listens."""
        error = error.with_traceback(None)  # its frames lead to those of the caller
        # The peer reads no request before it has confirmed the handshake. Only on a path between hosts may a
        # confirmation be lost when the connection is reset.
        local = self._handshake is not None and self._handshake.sock.family == socket.AF_UNIX
        unread = isinstance(error, (HungUp, BrokenPipeError)) or (local and isinstance(error, ConnectionResetError))
        self._close_attempt()
        may_try = isinstance(error, _BROKEN_OFF) or not isinstance(error, Exception)
        if not may_try and getattr(error, "errno", None) in _NO_ROOM:
            may_try = self._lane.close_idle()
        pending = None
        with self._state:
            if self._ended is not None:  # by this process, so the request may be read
                return
            if unread or may_try:
                number, self._leaving = self._leaving, 0
                if not unread and (pending := self._pending.pop(number, None)) is not None:
                    self._unsent.pop(number, None)  # it may have run: its tensors stay
        if pending is not None:
            pending.settle(None, PeerLost(self.peer or "?", f"its connection broke: {error}"))
        if not may_try:
            reason = error.cause if isinstance(error, PeerLost) else f"no connection to it: {error}"
            self._end(reason, lambda: True, error)
            return
        self._why, self._next_attempt = str(error), time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _close_attempt(self) -> None:
        with self._state:
            if self._handshake is not None:
                self._lane.stop_polling(self._handshake)
                self._handshake.sock.close()
                self._handshake = None

    def _drop_attempt(self) -> None:
        """After the end: close what is left, unless a thread makes the connection, which comes here then."""
        if self._making.acquire(False):
            self._close_attempt()
            self._making.release()

    def _first(self) -> bytes:
        """Return the first request, if it is small enough to be sent with the handshake; it is leaving then."""
        return b""

    @abstractmethod
    def _stand(self, handshake: Handshake) -> None:
        """Carry frames on the authenticated socket from now on, first the requests that wait. Does not block.

        Raises OSError or RayTorchRpcError; then another attempt may follow.
        """

    def _next_unsent(self) -> _Unsent | None:
        """The first request that waits, which is leaving from now on; None if there is none to be sent."""
        with self._state:
            for number, unsent in self._unsent.items():
                if number in self._pending and self._ended is None:
                    self._leaving = number
                    return unsent
        return None

    def _send_unsent(self, send: Callable[[list[Any], float], object]) -> None:
        """As the only thread that sends, send the requests that wait, in order. ``send(buffers, deadline)`` raises
        RpcTimeout at the deadline if it has sent nothing.
        """
        while True:
            self.withdraw()
            if (unsent := self._next_unsent()) is None:
                return
            is_sent = False
            with contextlib.suppress(RpcTimeout):
                send(unsent.buffers, unsent.deadline)
                is_sent = True
            with self._state:
                number, self._leaving = self._leaving, 0
                if is_sent:
                    self._unsent.pop(number, None)

    # --- the end ---------------------------------------------------------------------------------------------

    def end_idle(self) -> bool:
        """Close it if no call is in flight, and if it has carried one. Returns whether it did.

        Only the end that made the connection may do this. It has read the replies to all requests that it sent, so
        nothing is on the way in either direction. The other end takes it for no sign of life or death.
        """
        return self._end(_IDLE, lambda: self._number > 0 and not self._pending)

    def end(self, reason: str) -> None:
        """Close it; calls in flight fail with PeerLost. Idempotent. Not to be called while sending."""
        self._end(reason, lambda: True)

    def _end(self, reason: str, may: Callable[[], bool], cause: BaseException | None = None) -> bool:
        with self._state:
            if self._ended is not None or not may():
                return False
            self._ended, self._cause = reason, cause
        try:  # even if memory runs out, both the other end and the waiting callers must be told
            self._lane.discard(self)
            if self.stands:
                self._detach()
        finally:
            try:
                if self.stands:
                    self._close()
                else:
                    with self._state, contextlib.suppress(OSError):
                        if self._handshake is not None:
                            self._handshake.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that makes it
                    self._drop_attempt()
            finally:
                self._fail_calls()
        return True

    @abstractmethod
    def _detach(self) -> None:
        """Have nothing more read."""

    @abstractmethod
    def _close(self) -> None:
        """Tell the other end, and release the socket."""

    def _fail_calls(self) -> None:
        while self._pending:
            try:
                number, pending = self._pending.popitem()
            except KeyError:  # another thread has just abandoned the last one
                return
            try:
                with self._state:
                    unsent = None if number == self._leaving else self._unsent.pop(number, None)
                if unsent is not None:
                    run_reported(unsent.take_back)
                lost = self._lost(may_have_run=unsent is None)
                pending.settle(None, self._cause if isinstance(self._cause, MemoryError) else lost)
            except MemoryError as error:  # the call ends at its deadline
                threads.report(error, "a call could not be told that its connection ended")


C = TypeVar("C", bound=Connection)


class ConnectedLane(MessageLane, Generic[C]):
    """Listens on Unix and TCP sockets. Connects to a peer when it is called, and closes connections that are idle.

    A connection carries the requests of the end that made it, and the replies. That end closes it while no reply is
    outstanding: after ``IDLE_S`` without a call; earlier if more than ``MOST_IDLE`` are idle; at once if the process
    has no descriptor left. The next call makes another connection.
    """

    def __init__(self, me: str, credentials: Credentials, tcp_host: str | None, by_tcp: Set[str]) -> None:
        """``tcp_host``: address to listen on for other hosts, or None. ``by_tcp``: the peers on other hosts."""
        self._me, self._credentials = me, credentials
        self._tcp_host, self._by_tcp = tcp_host, by_tcp
        self._addresses: dict[str, SocketAddress] = {}
        self._made: dict[str, C] = {}  # by peer; some may not stand yet, or have ended
        self._made_lock = threading.Lock()
        self._timer, self._wakes_at, self._sweeps_at = Timer(SWEEP_S), math.inf, math.inf
        self._steps, self._attempts = select.epoll(), dict[int, C]()  # by descriptor: the connections in the making
        self._steps.register(self._timer.fd, select.EPOLLIN)
        self._acceptor = Acceptor(self.name, me, credentials, self._addresses.__len__, self._admit)

    def _readable(self, fd: int) -> bool:
        """Call this when a descriptor of ``_polled`` is readable. Returns False if it is to be called again after a
        pause: the process has no descriptor left.
        """
        if fd != self._acceptor.fd:
            with self._made_lock:
                events = [] if self._steps.closed else self._steps.poll(0)
            for each, _ in events:
                if each == self._timer.fd:
                    self._wake()
                elif (connection := self._attempts.get(each)) is not None:
                    connection.proceed()
            return True
        has_room = self._acceptor.handle() or self.close_idle()
        self._sweep_later()
        return has_room

    @property
    def _polled(self) -> tuple[int, int]:
        return self._steps.fileno(), self._acceptor.fd

    #: What makes a connection of the lane to a peer.
    connection: Any

    @abstractmethod
    def _admit(self, sock: socket.socket, protection: Protection | None) -> None:
        """Take over a connection whose other end has authenticated itself. Must not block; may raise to refuse it."""

    def _listen(self, begin: Callable[[Any], SocketAddress], tcp_host: str | None) -> SocketAddress:
        try:
            return begin(tcp_host)
        except OSError as error:
            raise LaneUnavailable(self.name, str(error)) from error

    def reach(self, tcp_host: str | None, by_tcp: Set[str]) -> SocketAddress | None:
        self._by_tcp = by_tcp
        if tcp_host is None or self._acceptor.address.tcp is not None:
            return None
        return self._listen(self._acceptor.open_tcp, tcp_host)

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        for peer in peers:
            self._addresses[peer.peer] = peer.address

    def disconnect(self, peer: str) -> None:
        with self._made_lock:
            self._addresses.pop(peer, None)
            connection = self._made.pop(peer, None)
        if connection is not None:
            connection.end("it was removed from the group")

    def call(
        self, peer: str, message: Message, timeout_s: float, *, caller_waits: bool = False, on_released: Released = None
    ) -> Pending:
        deadline = time.monotonic() + timeout_s
        while True:
            connection = self._made.get(peer)
            if connection is None or connection._ended is not None:
                connection = self._connection_to(peer)
            try:
                return connection.call(message, deadline, caller_waits, on_released)
            except ClosedWhileIdle:
                continue

    def _connection_to(self, peer: str) -> C:
        with self._made_lock:
            connection = self._made.get(peer)
            if connection is None or connection.ended:
                self._address_of(peer)
                connection = self._made[peer] = self.connection(self, peer)
        self._sweep_later()
        return connection

    def _address_of(self, peer: str) -> SocketAddress:
        if (address := self._addresses.get(peer)) is None:
            raise PeerLost(peer, "it is not in the group (any more)", may_have_run=False)
        if self._acceptor.closed:
            raise self.left(peer)
        return address

    def dial(self, peer: str, first: Callable[[], bytes]) -> Handshake:
        """Begin to connect to a peer, and to authenticate both ends; ``first``: see ``secure``. Does not block.

        Raises PeerLost, Refused or OSError.
        """
        address, by_tcp = self._address_of(peer), peer in self._by_tcp
        if by_tcp and address.tcp is None:
            raise Refused("it does not listen for other hosts")
        where: Any = address.tcp if by_tcp else "\0" + address.unix
        family = _family(where[0]) if by_tcp else socket.AF_UNIX
        own = self._acceptor.address
        me, its = (listener_identity(self.name, self._credentials, each, family) for each in (own, address))
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if (error := sock.connect_ex(where)) not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            if by_tcp:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Handshake(sock, secure(sock, self._credentials, me, its, first))
        except BaseException:
            sock.close()
            raise

    def poll(self, connection: C, handshake: Handshake) -> None:
        """Have ``proceed`` called once, when there is something to do for this attempt."""
        fd, events = handshake.sock.fileno(), handshake.events | select.EPOLLONESHOT
        self._attempts[fd] = connection
        with self._made_lock, contextlib.suppress(ValueError):  # the lane was closed meanwhile
            try:
                self._steps.modify(fd, events)
            except FileNotFoundError:
                self._steps.register(fd, events)

    def stop_polling(self, handshake: Handshake) -> None:
        if self._attempts.pop(handshake.sock.fileno(), None) is not None:
            with self._made_lock, contextlib.suppress(OSError, ValueError):
                self._steps.unregister(handshake.sock)

    def wake_at(self, when: float) -> None:
        """Look after what is due then (``time.monotonic``): connections that do not stand, or a sweep."""
        if when >= self._wakes_at:
            return
        with self._made_lock:
            if when < self._wakes_at and self._timer.fd >= 0:  # else the lane was closed meanwhile
                self._wakes_at = when
                self._timer.set(max(1e-6, when - time.monotonic()))

    def _wake(self) -> None:
        with self._made_lock:
            if self._timer.fd < 0:
                return
            self._timer.clear()
            self._wakes_at = math.inf
            made = list(self._made.values())
        try:
            if self._sweeps_at <= time.monotonic():
                self._sweep()
            self.wake_at(self._sweeps_at)
            for connection in made:
                if not connection.stands:
                    connection.proceed()
        except BaseException:
            self.wake_at(time.monotonic() + _LONGEST_PAUSE_S)
            raise

    def _sweep_later(self) -> None:
        if self._sweeps_at == math.inf:
            self._sweeps_at = time.monotonic() + SWEEP_S
            self.wake_at(self._sweeps_at)

    def _sweep(self) -> None:
        """Close connections that have been idle for long, and those idle longest beyond the limit."""
        self._sweeps_at = math.inf
        made = list(self._made.values())
        if self._acceptor.drop_late() or made:
            self._sweep_later()
        now = time.monotonic()
        idle = sorted(
            ((used, connection) for connection in made if (used := connection.last_used(now)) < now),
            key=lambda each: each[0],
        )
        for number, (used, connection) in enumerate(idle):
            if number < len(idle) - MOST_IDLE or now - used >= IDLE_S:
                connection.end_idle()

    def close_idle(self) -> bool:
        """Close all connections that carry no call; returns whether that freed a descriptor."""
        return any([connection.end_idle() for connection in list(self._made.values())])

    def _close_made(self) -> None:
        """After the acceptor was closed: end all connections to peers."""
        with self._made_lock:
            self._timer.close()
            made = list(self._made.values())
        for connection in made:
            connection.end("this member left the group")
        with self._made_lock:
            self._steps.close()

    def discard(self, connection: C) -> None:
        """Forget a connection to a peer, if it is still the current one."""
        with self._made_lock:
            if connection.peer is not None and self._made.get(connection.peer) is connection:
                del self._made[connection.peer]

    def left(self, peer: str | None) -> PeerLost:
        return PeerLost(peer or "the caller", "this member has left the group", may_have_run=False)

    def _tcp_addresses(self) -> list[fork.Address]:
        """In a forked child, close connections that may have no address yet, and return the addresses of all others."""
        for connection in self._made.values():
            if connection._handshake is not None:
                connection._handshake.sock.close()
        known = (self._acceptor.address, *self._addresses.values())
        return [address.tcp for address in known if address.tcp is not None]


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
