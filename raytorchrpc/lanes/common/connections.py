"""Connections whose two ends have authenticated each other, for message lanes that make their own: socket and nng."""

from __future__ import annotations

import itertools
import logging
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Sequence, Set
from enum import Enum
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from raytorchrpc.errors import LaneUnavailable, PeerLost, RpcTimeout, no_memory
from raytorchrpc.lanes.base import GONE, Message, MessageLane, PeerAddress, Pending, Released
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.acceptor import (
    CONNECT_TIMEOUT_S,
    NO_ROOM,
    Acceptor,
    SocketAddress,
    family_of,
    listener_identity,
)
from raytorchrpc.lanes.common.handshake import Credentials, HungUp, Refused, Unfinished, run
from raytorchrpc.lanes.common.polling import Timer
from raytorchrpc.lanes.common.protection import Protection, secure
from raytorchrpc.process import fork, threads
from raytorchrpc.process.completion import run_reported
from raytorchrpc.process.locks import Lock, interrupted
from raytorchrpc.tensors.dtypes import copied

logger = logging.getLogger(__name__)

#: How long a caller's own thread waits for a connection (seconds). A peer that is busy answers sooner.
PATIENCE_S = 0.02
#: Pause before the second attempt to connect, and the longest one (seconds): each is twice as long as the last.
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
#: How often the connections to peers are looked at, and how long one may be idle (seconds).
SWEEP_S, IDLE_S = 10.0, 60.0
#: Connections to peers that may be idle from one sweep to the next: to make one anew takes a millisecond at both ends,
#: so groups in which all call each other keep theirs.
MOST_IDLE = 256
_IDLE = "it was idle"
_TIMEVAL = struct.Struct("@ll")


class Phase(Enum):
    """Of a request that needs a connection first."""

    WAITS = "for the connection, and its caller with it"
    LEFT = "its caller has gone on, and left copies of the tensors"
    SENDING = "its caller waits until all is sent, as in any call"
    OVER = "sent, or failed"


class Request(Pending):
    """A request that needs a connection first. It ends as its call on that connection does.

    Two threads have it: its caller's, and the one that connects and sends it. ``_lock`` guards ``phase``, which orders
    them: the caller leaves before sending begins, or once it is over.
    """

    __slots__ = ("_over", "apart", "caller_waits", "deadline", "message", "on_released", "phase", "sent", "unsent")

    def __init__(self, message: Message, deadline: float, caller_waits: bool, on_released: Released) -> None:
        super().__init__(on_released)
        self.message, self.deadline, self.caller_waits, self.on_released = message, deadline, caller_waits, on_released
        self.phase, self.apart = Phase.WAITS, False
        """``apart``: its caller has left."""
        self._over = threading.Lock()  # not an Event: a signal handler that interrupts its wait would stop its set
        self._over.acquire()
        self.sent: Pending | None = None
        """Its call on the connection."""
        self.unsent = True

    def leave(self) -> bool:
        """Called by its caller, which may change its tensors once this returns True, and not while it is sent."""
        with self._lock:
            if self.phase is Phase.WAITS:
                tensors = [copied(tensor) for tensor in self.message.body.tensors]
                self.message = self.message._replace(body=self.message.body._replace(tensors=tensors))
                self.phase, self.apart, self.caller_waits = Phase.LEFT, True, False
            return self.apart

    def sent_in(self, patience_s: float) -> Pending:
        """Called by its caller: waits until it is sent, or leaves it. Returns what completes with the reply.

        Raises why it was not sent, if that is known.
        """
        try:
            if not self.apart and not self._over.acquire(timeout=patience_s) and not self.leave():
                self._over.acquire()
        except BaseException:
            self.withdraw()
            raise
        if self.done and not self.apart:
            self.take()
        return self.sent or self

    def withdraw(self) -> None:
        """Called by its caller, which was interrupted, and takes back what the message tells of. It is sent no more."""
        self.deadline = 0.0

    def is_due(self) -> bool:
        """Whether to send it now. One that is ``unsent`` at its deadline remains so."""
        self.unsent = False
        self.unsent = time.monotonic() >= self.deadline
        return not self.unsent

    def send(self, connection: Connection) -> Pending:
        """Send it, unless its deadline has passed."""
        with self._lock:
            self.phase = Phase.LEFT if self.apart else Phase.SENDING
        if not self.is_due():
            raise RpcTimeout(f"no connection to {connection.peer!r} by the deadline: others waited for it too")
        return connection.call(self.message, self.deadline, self.caller_waits, self.on_released)

    def follow(self, sent: Pending) -> None:
        """It was sent, as this call."""
        with self._lock:
            self.phase, self.sent, self._on_released = Phase.OVER, sent, None
            del self.message
        self._over.release()
        if self.apart:
            sent.add_done_callback(lambda: self.settle(sent._message, sent._error))

    def fail(self, error: Exception) -> None:
        with self._lock:
            self.phase = Phase.OVER
        try:
            if self.apart:
                run_reported(self.message.take_back)
            del self.message  # its tensors may be copies
            self.settle(None, error)
        finally:
            self._over.release()


class _Queue(deque[Request]):
    """Requests that wait for a connection to one peer, in order. As long as there is one, all calls join it."""

    def __init__(self, first: Request) -> None:
        super().__init__((first,))
        self.connects = threading.get_ident()
        """The caller's thread that makes it, or is about to start the one that does; else 0."""


def fail_all(queue: deque[Request], error: PeerLost) -> None:
    while queue:
        queue.popleft().fail(error)


class ClosedWhileIdle(Exception):
    """Nothing was sent: the connection has just been closed, and another one can be made."""


class Interrupted(Exception):
    """Nothing was sent: this runs in a signal handler or a finalizer, and this thread is using the connection below."""


class WouldBlock(Exception):
    """Nothing was sent: this thread runs an event loop, and the peer does not read. Another thread has to wait."""


class ReplyFrame(NamedTuple):
    """One that is to be sent."""

    buffers: list[Any]
    take_back: Callable[[], object]
    """See Message."""


class Connection(ABC):
    """One connection of a lane. Sends requests and receives replies (``peer`` is set), or receives requests."""

    _late: deque[ReplyFrame] | None = None
    """Replies for which an event loop would have to wait, in order; None: no thread sends such."""

    def __init__(self, peer: str | None) -> None:
        self.peer = peer
        self._state = Lock()
        self._pending: dict[int, Any] = {}
        """By number: the calls in flight."""
        self._number = 0
        """Of the last call."""
        self.first: Pending | None = None
        """The call whose request was sent with the handshake."""
        self._seen, self._used = -1, 0.0  # see last_used
        self._ended: str | None = None
        self._reading = 0
        """Ident of the thread that reads it, as long as no other may."""

    @property
    @abstractmethod
    def is_free(self) -> bool:
        """Whether no thread is using it."""

    @abstractmethod
    def call(self, message: Message, deadline: float, caller_waits: bool, on_released: Released) -> Pending:
        """See MessageLane.call."""

    @abstractmethod
    def _send_reply(self, reply: ReplyFrame) -> None:
        """Send a reply. Raises PeerLost; on an event loop WouldBlock if nothing is sent within ``PATIENCE_S``."""

    def _reply_on_loop(self, reply: ReplyFrame) -> None:
        """Send a reply from an event loop. If that would have to wait, a thread sends it, and later ones behind it."""
        if self._late is None:
            try:
                self._send_reply(reply)
                return
            except WouldBlock:
                pass
        reply = reply._replace(buffers=list(map(bytes, reply.buffers)))  # the actor may change its tensors from now on
        with self._state:
            is_first = self._late is None
            self._late = self._late or deque()
            self._late.append(reply)
        if is_first:
            try:
                threads.start(self._send_late, name="raytorchrpc-replies")
            except BaseException as error:
                self._late = None
                self.end(f"a reply was late, and no thread can send it: {error}")
                raise PeerLost(self.peer or "the caller", self._ended or "", may_have_run=False) from error

    def _send_late(self) -> None:
        while True:
            with self._state:
                if not self._late:
                    self._late = None
                    return
                reply = self._late.popleft()
            try:
                self._send_reply(reply)
            except Exception as error:  # the caller's lane reports it
                run_reported(reply.take_back)
                logger.debug("a late reply could not be sent: %s", error)

    @property
    def ended(self) -> bool:
        """Whether it can carry nothing more."""
        return self._ended is not None

    def _begin(self, pending: Pending) -> int:
        """Give a call its number; its reply can arrive from now on."""
        with self._state:
            if self._ended is None:
                self._number = number = self._number + 1
                self._pending[number] = pending
                return number
        if self._ended is _IDLE:
            raise ClosedWhileIdle
        raise PeerLost(self.peer or "?", self._ended, may_have_run=False)

    def watch(self) -> Pending:
        """A call that is never sent, so that it fails when this connection ends. Raises PeerLost."""
        pending = Pending()
        self._begin(pending)
        return pending

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
                pending.settle(None, no_memory("this process", f"an answer of {size} bytes", MemoryError()))
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
        self._detach()
        self._close()
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
            pending.settle(None, PeerLost(self.peer or "?", reason))


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
        self._made: dict[str, C] = {}  # by peer; some may have ended
        self._aside: dict[str, list[C]] = {}  # by peer: those that were in use when a signal handler made a call
        self._waiting: dict[str, _Queue] = {}  # by peer: while a connection to it is made, what waits, in order
        self._made_lock = Lock()
        self._sweeps = Timer(SWEEP_S)
        self._acceptor = Acceptor(self.name, me, credentials, self._addresses.__len__, self._admit)

    def readable(self, fd: int) -> bool:
        """Call this when a descriptor of ``_polled`` is readable. Returns False if it is to be called again after a
        pause: the process has no descriptor left.
        """
        if fd == self._sweeps.fd:
            self._sweep()
            return True
        has_room = self._acceptor.handle() or self._close_idle()
        self._sweep_later()
        return has_room

    @property
    def _polled(self) -> tuple[int, int]:
        return self._sweeps.fd, self._acceptor.fd

    @abstractmethod
    def _register(
        self,
        sock: socket.socket,
        protection: Protection | None,
        peer: str | None,
        first: Request | None,
        deadline: float,
    ) -> C:
        """Make the connection of an authenticated socket, which the caller closes if this raises.

        ``peer``: the member at the other end; None if that made the connection. ``first``: it has been sent. Raises
        PeerLost, Refused or OSError.
        """

    def _pack_first(self, message: Message) -> bytes:
        """Return the first request of a connection, if it is small enough to be sent with the handshake."""
        return b""

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
        self._addresses.pop(peer, None)
        with self._made_lock:
            queue = self._waiting.pop(peer, None)
            ended = self._aside.pop(peer, [])
            if (connection := self._made.pop(peer, None)) is not None:
                ended.append(connection)
        fail_all(queue or deque(), self._unknown(peer))
        for connection in ended:
            connection.end(GONE)

    def call(
        self, peer: str, message: Message, timeout_s: float, *, caller_waits: bool = False, on_released: Released = None
    ) -> Pending:
        deadline = time.monotonic() + timeout_s
        connection = self._made.get(peer)
        if connection is not None and connection._ended is None and peer not in self._waiting:
            try:
                return connection.call(message, deadline, caller_waits, on_released)
            except Interrupted:
                self._set_aside(peer, connection)
            except (ClosedWhileIdle, WouldBlock):
                pass
        return self._connect_first(peer, Request(message, deadline, caller_waits, on_released))

    def _set_aside(self, peer: str, connection: C) -> None:
        """Have calls use another connection, until a signal handler finds that one in use."""
        with self._made_lock:
            if self._made.get(peer) is connection:
                del self._made[peer]
                aside = self._aside.setdefault(peer, [])
                if (free := next((other for other in aside if other.is_free), None)) is not None:
                    aside.remove(free)
                    self._made[peer] = free
                aside.append(connection)

    def _sweep_later(self) -> None:
        with self._made_lock:
            if not self._sweeps.is_set and self._sweeps.fd >= 0:  # else the lane was closed meanwhile
                self._sweeps.set()

    def _sweep(self) -> None:
        """Close connections that have been idle for long, and those idle longest beyond the limit."""
        with self._made_lock:
            if self._sweeps.fd < 0:
                return
            self._sweeps.clear()
            made = self._own()
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

    def _close_idle(self) -> bool:
        """Close all connections that carry no call; returns whether that freed a descriptor."""
        return any([connection.end_idle() for connection in self._own()])

    def _own(self) -> list[C]:
        return [*self._made.values(), *itertools.chain(*self._aside.values())]

    def _end_waits(self) -> None:
        with self._made_lock:
            self._sweeps.close()
            abandoned, self._waiting = self._waiting, {}
        for peer, queue in abandoned.items():
            fail_all(queue, self._left(peer))

    # --- connecting ------------------------------------------------------------------------------------------

    def _connect_first(self, peer: str, request: Request) -> Pending:
        """Have a thread connect, unless one does already, and send it after the requests that wait.

        Connecting takes a millisecond, or until the deadline, and a caller may have no time for that. So it never does
        it itself: it waits for ``PATIENCE_S``, then leaves the request to that thread. Raises PeerLost and RpcTimeout.
        """
        queue, on_loop = None, _get_running_loop() is not None
        if on_loop or peer in self._waiting:
            request.leave()  # not under the lock: it copies the tensors
        try:
            with self._made_lock:
                if peer not in self._addresses:
                    raise self._unknown(peer)
                if (waiting := self._waiting.get(peer)) is None:
                    queue = self._waiting[peer] = _Queue(request)
                elif waiting.connects == threading.get_ident():
                    raise interrupted(f"a call to {peer!r}, to which this thread connects,")
                elif request.apart:
                    waiting.append(request)
                    return request
            if queue is not None:
                threads.start(self._open, peer, queue, name=f"raytorchrpc-{self._me}-connect")
                queue.connects = 0
        except BaseException as error:
            if queue is None or on_loop or not isinstance(error, threads.ThreadShortage):
                request.withdraw()  # a thread may have it already
                if queue is not None:
                    self._abandon(peer, queue)
                raise
            self._open(peer, queue)  # Python starts no thread while it ends, when goodbyes are said
        if queue is None:  # another caller has just begun one
            request.leave()
            return self._connect_first(peer, request)
        return request.sent_in(PATIENCE_S)

    def _open(self, peer: str, queue: _Queue) -> None:
        """Connect, and send the requests that wait; until none does, others join them. Then calls go directly."""
        try:
            self._send_all(peer, queue)
        except BaseException:
            self._abandon(peer, queue)
            raise

    def _abandon(self, peer: str, queue: _Queue) -> None:
        """Nothing may wait for ever for a thread that was interrupted."""
        with self._made_lock:
            if self._waiting.get(peer) is queue:
                del self._waiting[peer]
        fail_all(queue, PeerLost(peer, "the thread that connected to it was interrupted", may_have_run=False))

    def _send_all(self, peer: str, queue: _Queue) -> None:
        connection = self._made.get(peer)  # another thread may just have made it, or its peer does not read
        request = self._next(peer, queue, connection)
        while request is not None:
            try:
                first = None
                if connection is None or connection.ended:
                    connection = self._connect_in_time(peer, queue, request)
                    first, connection.first = connection.first, None
                end = partial(request.follow, first or request.send(connection))
            except ClosedWhileIdle:
                continue
            except Exception as error:
                end = partial(request.fail, error)
            try:
                request = self._next(peer, queue, connection)
            finally:
                end()  # only now: the next request of its caller need not wait here

    def _next(self, peer: str, queue: _Queue, connection: C | None) -> Request | None:
        """Return the next request that waits. If none does, let calls go directly by the connection."""
        with self._made_lock:  # under which callers join the queue
            if queue:
                return queue.popleft()
            if is_current := self._waiting.get(peer) is queue:
                del self._waiting[peer]
                if connection is not None:
                    self._made[peer] = connection
            elif connection is self._made.get(peer) or connection in self._aside.get(peer, ()):
                connection = None  # others use it
        if is_current:
            self._sweep_later()
        elif connection is not None:
            connection.end(GONE)
        return None

    def _connect_in_time(self, peer: str, queue: _Queue, request: Request) -> C:
        """Connect; again if the peer listens and an attempt is broken off: many may connect to it at this moment."""
        pause_s = _PAUSE_S
        while True:
            if (address := self._addresses.get(peer)) is None or self._waiting.get(peer) is not queue:
                raise self._unknown(peer)
            if self._acceptor.closed:
                raise self._left(peer)
            try:
                return self._connect(peer, address, request)
            except (PeerLost, RpcTimeout):  # they are OSErrors too
                raise
            except (Unfinished, ConnectionResetError, BrokenPipeError, BlockingIOError, TimeoutError) as error:
                if time.monotonic() + pause_s >= request.deadline:
                    raise RpcTimeout(f"no connection to {peer!r} by the deadline: {error}") from error
            except (OSError, Refused) as error:
                if getattr(error, "errno", None) not in NO_ROOM or not self._close_idle():
                    raise PeerLost(peer, f"no connection to it: {error}", may_have_run=False) from error
            threads.pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connect(self, peer: str, address: SocketAddress, request: Request) -> C:
        """Connect and authenticate both ends, within ``CONNECT_TIMEOUT_S``. A small request goes with the handshake.

        Raises Refused or OSError if the request has not run, else PeerLost or RpcTimeout.
        """
        by_tcp = peer in self._by_tcp
        if by_tcp and address.tcp is None:
            raise Refused("it does not listen for other hosts")
        where: Any = address.tcp if by_tcp else "\0" + address.unix
        family = family_of(where[0]) if by_tcp else socket.AF_UNIX
        own = self._acceptor.address
        me, listener = (listener_identity(self.name, self._credentials, each, family) for each in (own, address))
        deadline = min(request.deadline, time.monotonic() + CONNECT_TIMEOUT_S)
        with request._lock:  # its caller cannot leave, and change its tensors
            frame, sent = self._pack_first(request.message), False

        def remaining_s() -> float:
            return max(0.001, deadline - time.monotonic())

        def first() -> bytes:
            nonlocal sent
            sent = bool(frame) and request.is_due()
            return frame if sent else b""

        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # With a full backlog, connecting to a Unix socket fails at once, unless the call may block.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(remaining_s()))
            sock.settimeout(remaining_s() if by_tcp else None)
            sock.connect(where)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(0))
            if by_tcp:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            protection = run(sock, secure(sock, self._credentials, me, listener, first), remaining_s())
            return self._register(sock, protection, peer, request if sent else None, deadline)
        except BaseException as error:
            sock.close()
            # The peer reads no request before it has confirmed the handshake. Only on a path between hosts may a
            # confirmation be lost when the connection is reset.
            refused = (HungUp, BrokenPipeError) if by_tcp else (HungUp, BrokenPipeError, ConnectionResetError)
            if not sent or isinstance(error, refused) or not isinstance(error, (OSError, Refused)):
                raise
            if time.monotonic() >= request.deadline:
                raise RpcTimeout(f"{peer!r} did not confirm its connection by the deadline") from error
            raise PeerLost(peer, f"its connection broke: {error}") from error

    def _discard(self, connection: C) -> None:
        """Forget a connection to a peer, if it is still the current one."""
        with self._made_lock:
            if connection.peer is not None and self._made.get(connection.peer) is connection:
                del self._made[connection.peer]
            elif connection in (aside := self._aside.get(connection.peer or "", [])):
                aside.remove(connection)

    def _admit(self, sock: socket.socket, protection: Protection | None) -> None:
        """Take over a connection whose other end has authenticated itself. Must not block; may raise to refuse it."""
        self._register(sock, protection, None, None, time.monotonic() + CONNECT_TIMEOUT_S)

    def _left(self, peer: str | None) -> PeerLost:
        return PeerLost(peer or "the caller", "this member has left the group", may_have_run=False)

    def _tcp_addresses(self) -> list[fork.Address]:
        """Return the addresses of all connections over TCP, for ``after_fork``."""
        known = (self._acceptor.address, *self._addresses.values())
        return [address.tcp for address in known if address.tcp is not None]


def timeval(seconds: float) -> bytes:
    """Encode a time for SO_SNDTIMEO and SO_RCVTIMEO."""
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
