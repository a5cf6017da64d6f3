"""The socket lane: authenticated sockets, Unix on one host and TCP between hosts. A small call takes a fifth to a tenth
of its time over torchrpc.

It carries calls, and in band the CPU tensors that are small or that no tensor lane takes. Threads of its own read
requests (see ``selector``). A caller that waits reads its own connection meanwhile, so that a reply costs one wake-up
too.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Set
from enum import Enum
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, cast

from raytorchrpc.errors import PeerLost, RayTorchRpcError
from raytorchrpc.lanes.base import Capabilities, Message, Pending, Released, Reply, Serve, Spawn
from raytorchrpc.lanes.common import connections, frames
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.connections import ConnectedLane, ReplyFrame, Request
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.common.polling import AnyReadable, PromptSocket
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.socket.selector import Spinner, Task, enter
from raytorchrpc.process import fork, tcp, threads
from raytorchrpc.process.completion import nothing, run_reported
from raytorchrpc.process.locks import Lock, interrupted, interrupted_frames
from raytorchrpc.tensors.codec import body_bytes

#: CPU tensors up to this size travel in band even if a tensor lane takes them: two copies through the kernel cost less
#: (bytes).
IN_BAND_BYTES = 256 * 1024
#: The first request of a connection goes with the handshake up to this size: the kernel takes it at once (bytes).
FIRST_BYTES = 16 * 1024
#: A caller that reads checks its deadline this often (seconds).
SLICE_S = 1
#: A peer that reads nothing for this long, of a reply or of the rest of a request whose deadline passed midway, loses
#: its connection (seconds).
FINISH_S = 10.0
#: For each Unix socket; the kernel doubles it, so that this is twice its default, and senders of large messages wait
#: half as often. With a megabyte, messages take longer: data leaves the cache before the peer reads it (bytes).
_SEND_BYTES = 208 * 1024
_NOT_TAKEN = "it did not take the data in time"
_IOV_MAX = 1024
_ONE_CHUNK = (frames.CHUNK,)
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def tune(sock: socket.socket) -> None:
    """Set the options of an authenticated socket."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.detect_silence(sock)
        tcp.limit_unacknowledged(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, connections.timeval(SLICE_S))


class Polled(Enum):
    """Whether the leader polls a connection, if no caller reads it."""

    NOT = "not polled"
    """No reply is to come, or a caller that waits is about to read it."""
    SOON = "polled soon, if no caller reads it"
    NOW = "polled"


NOT, SOON, NOW = Polled  # to look them up there takes longer


class Connection(connections.Connection):
    """At most one thread reads it at a time: the leader, or a caller that waits. ``_state`` guards which.

    The leader always polls an accepted connection. It polls one of our own only while replies are to come that no
    caller reads: a caller that waits in a process that serves no requests reads its own reply, and those of others
    meanwhile. One that a caller has just left is polled soon, unless a caller has read it again by then.
    """

    def __init__(
        self,
        lane: SocketLane,
        sock: socket.socket,
        peer: str | None,
        protection: Protection | None,
        first: Request | None = None,
    ) -> None:
        """``first``: has been sent as the call number 1."""
        super().__init__(peer)
        self.lane, self._selector, self.sock = lane, lane.selector, sock
        self.accepted = peer is None
        """Whether the peer opened it, so that it receives requests."""
        self.fd = sock.fileno()
        self._prompt = PromptSocket(sock)
        self._readable = AnyReadable(self.fd, lane.selector.fd)
        self._protection = protection
        self._reader = frames.FrameReader(protection)
        self._sending = threading.Lock()
        self.polled = NOW if self.accepted or (first is not None and not first.caller_waits) else NOT
        self._read_lately = False
        """A caller has read it since it was to be polled soon."""
        self._callbacks = 0
        """Calls in flight that have a callback, which no caller reads for."""
        self._spinner = Spinner()
        if first is not None:
            self.first = pending = SocketPending(first.on_released, self._state)
            pending.connection = self
            self._begin(pending)

    def __repr__(self) -> str:
        if self._ended is not None:
            state = f"ended: {self._ended}"
        else:
            state = (
                f"{'read by a thread' if self._reading else self.polled.value}, {len(self._pending)} calls in flight"
            )
        return f"<connection {'from a caller' if self.peer is None else f'to {self.peer!r}'}, {state}>"

    # Calls.

    def call(self, message: Message, deadline: float, caller_waits: bool, on_released: Released) -> Pending:
        if self._reading and self._reading == get_ident():
            raise connections.Interrupted
        pending = SocketPending(on_released, self._state)
        pending.connection = self
        number = self._begin(pending)
        try:
            if not caller_waits:
                with self._state:
                    self._ensure_reader()
            self.send(frames.pack(frames.REQUEST, number, message), deadline)
        except BaseException:
            self._pending.pop(number, None)
            raise
        return pending

    def _ensure_reader(self) -> None:
        """Under ``_state``: have the data to come read. A caller that waits will do that; if none does so soon, a
        leader does.
        """
        if self._callbacks:
            self._enable()
        elif self.polled is NOT and not self._reading:
            self._selector.enable_later(self)
            self.polled = SOON

    def enable_if_unread(self) -> bool:
        """Called soon after ``Selector.enable_later``. Returns whether to call it again."""
        with self._state:
            was_read, self._read_lately = self._read_lately, False
            if self.polled is not SOON:
                return False
            if self._pending and was_read:
                return True
            self.polled = NOT
            if self._pending:
                self._enable()
            return False

    def _enable(self) -> None:
        """Under ``_state``: have the leader poll it, unless a thread reads it."""
        if self.polled is not NOW and not self._reading and self._ended is None:
            self._selector.enable(self.fd)
            self.polled = NOW  # afterwards: a signal handler may run before

    def send(self, buffers: list[Any], deadline: float, take_back: Callable[[], object] = nothing) -> None:
        """Send one frame. Raises PeerLost, and RpcTimeout for a request of which nothing was sent by the deadline. On
        an event loop this waits for ``PATIENCE_S`` only: if nothing was sent by then, it raises WouldBlock.

        If a part of a request was sent by then, this returns, and another thread sends the rest: a partial frame would
        cost the other calls on this connection their replies. So it is with a reply on an event loop. A reply that is
        not read ends the connection. ``take_back`` is called if that happens after this has returned.
        """
        until = deadline
        if _get_running_loop() is not None:
            until = min(deadline, time.monotonic() + connections.PATIENCE_S)
        rest: list[memoryview] = []
        may_hold = True  # ``_sending``, and will not release it, if a signal handler raises now
        try:
            if not self._sending.acquire(False):
                may_hold = False
                if any(frame.f_locals.get("self") is self for frame in interrupted_frames()):
                    raise connections.Interrupted
                if not self._sending.acquire(timeout=max(0.0, until - time.monotonic())):
                    raise self._unsent(until, deadline)
            try:
                may_hold = False
                rest = self._send_by(until, deadline, buffers)
            finally:
                if not rest:
                    self._sending.release()
                    if self._ended is not None:
                        self._free_if_unused()
            if rest:
                self._finish_later(rest, deadline if self.accepted else deadline + FINISH_S, take_back)
        except BaseException:
            if may_hold or rest:
                self.end("a message was interrupted as it was sent")
            raise

    def _unsent(self, until: float, deadline: float) -> Exception:
        return self._busy() if until == deadline else connections.WouldBlock()

    def reply(self, call: int, message: Message) -> None:
        buffers = frames.pack(frames.REPLY, call, message)
        if _get_running_loop() is None:
            self.send(buffers, time.monotonic() + FINISH_S)
        else:
            self._reply_on_loop(ReplyFrame(buffers, message.take_back))

    def _send_reply(self, reply: ReplyFrame) -> None:
        self.send(reply.buffers, time.monotonic() + FINISH_S, reply.take_back)

    def _send_by(self, until: float, deadline: float, buffers: list[Any]) -> list[memoryview]:
        """Send one frame; returns what is left of it at ``until``, if the rest must follow."""
        sealed = self._protection is not None  # a sealed frame has its position in the stream: it must be sent
        try:
            if self._protection is not None:
                buffers = self._protection.seal(buffers)
            if len(buffers) > 1:
                sent = self._send_at_once(buffers)
            elif (sent := self._prompt.send(buffers[0])) == len(buffers[0]):
                return []
            parts = [memoryview(part).cast("B") for part in buffers]
            size = sum(map(len, parts))
            rest = self._send_rest(parts, sent, until, renews=self.accepted and until == deadline)
            if rest and self.accepted and until == deadline:
                raise TimeoutError(_NOT_TAKEN)
            if not sealed and sum(map(len, rest)) == size:
                raise self._unsent(until, deadline)
            return rest
        except (RayTorchRpcError, connections.WouldBlock):
            raise
        except OSError as error:  # also TimeoutError
            self.end(str(error))
            # A partial request does not run.
            raise PeerLost(self.peer or "the caller", self._ended or str(error), may_have_run=False) from error
        except BaseException:  # no other frame can follow a partial one
            self.end("a message was sent only in part")
            raise

    def _send_at_once(self, buffers: list[Any]) -> int:
        """Send what the kernel takes now; returns how many bytes. Raises OSError."""
        try:
            return self.sock.sendmsg(buffers[:_IOV_MAX], (), _AT_ONCE)
        except BlockingIOError:
            return 0

    def _finish_later(self, rest: list[memoryview], until: float, take_back: Callable[[], object]) -> None:
        try:
            copies = [memoryview(bytes(part)) for part in rest]  # the program may change its tensors from now on
            threads.start(self._finish, copies, until, take_back, name="raytorchrpc-rest")
        except BaseException as error:
            self._sending.release()
            self.end(f"a message was sent in part, and the rest of it cannot be sent: {error}")
            raise PeerLost(self.peer or "the caller", self._ended or "", may_have_run=False) from error

    def _send_rest(self, parts: list[memoryview], sent: int, deadline: float, renews: bool) -> list[memoryview]:
        """Send what follows the first ``sent`` bytes; returns what is left at the deadline. Raises OSError.

        ``renews``: go on after the deadline while the peer takes data, with pauses of at most ``FINISH_S``.
        """
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while True:
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if not parts:
                return parts
            parts[0] = parts[0][sent:]
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return parts
            sent = self._send_at_once(parts)
            if renews:
                deadline = max(deadline, time.monotonic() + FINISH_S)

    def _finish(self, rest: list[memoryview], until: float, take_back: Callable[[], object]) -> None:
        """Send the rest of a frame. ``_sending`` is held for it."""
        try:
            if self._send_rest(rest, 0, until, renews=True):
                raise TimeoutError(_NOT_TAKEN)
        except OSError as error:
            self.end(str(error))
            run_reported(take_back)
        finally:
            self._sending.release()
            if self._ended is not None:
                self._free_if_unused()

    # Reading.

    @property
    def is_free(self) -> bool:
        return not (self._reading or self._sending.locked() or self.ended)

    def acquire_read(self) -> bool:
        """Become the thread that reads. Returns False if another one reads, or if the connection has ended."""
        me = get_ident()
        with self._state:
            if self._reading or self._ended is not None:
                return False
            self._reading = me
            return True

    def exclude_selector(self) -> None:
        """Called by the reading thread, which is about to wait: the leader need not wake."""
        with self._state:
            if self.polled is NOW and self._ended is None:  # after the end its descriptor may have been reused
                self.polled = NOT
                self._selector.enable(self.fd, 0)

    def release_read(self) -> None:
        """Let other threads read. The calling thread is likely to read again soon, so the leader polls this connection
        only if it does not, or for a caller that waits.
        """
        if self.accepted:
            self._reading = 0
            if self._ended is not None:
                self._free_if_unused()
            return
        with self._state:
            self._reading = 0
            if self._ended is not None:
                self._free()
            elif self._pending:
                self._read_lately = True
                self._ensure_reader()

    def read(self, *, wait: bool = False) -> list[frames.Frame]:
        """Read once: completes the calls whose replies have arrived, and returns the requests."""
        came: list[Any] = []  # filled within one call of C, so that a signal handler that raises hides nothing
        try:
            try:
                data: Any
                if self._reader.large is not None and (rooms := self._reader.room()):
                    came += map(self.sock.recvmsg_into, (rooms,), (0,), (0 if wait else socket.MSG_DONTWAIT,))
                    del rooms  # they hold the tensors, whose receiver asks whether it is the only one
                    data = came[0][0]
                    arrived = self._reader.received(data) if data else []
                else:
                    if wait:
                        came += map(self.sock.recv, _ONE_CHUNK)
                        data = came[0]
                    else:
                        data = self._prompt.receive()
                    if data:
                        arrived = self._reader.feed(data)
                if data is None:
                    return []
                if not data:
                    raise EOFError
            except BlockingIOError:
                return []
            except Exception as error:  # whatever it is, the stream is out of step
                self.end(_why(error))
                return []
            return self._requests_among(arrived)
        except BaseException:
            if came or not wait:  # what was received is lost
                self.end("the thread that read it was interrupted")
            raise

    def read_until(self, pending: SocketPending, deadline: float) -> None:
        """As the reading thread, read until this call is done or the deadline passes."""
        if self._spinner.should_spin() and not self._selector.busy:

            def read_reply() -> bool:
                if not self._readable():
                    return False
                self.read()
                return pending.done or self._selector.busy

            self._spinner.spin(read_reply)
            if pending.done:
                return
        self._selector.step_down()
        began = time.perf_counter()
        self._read_sleeping(pending, deadline)
        self._spinner.slept(time.perf_counter() - began)

    def _read_sleeping(self, pending: SocketPending, deadline: float) -> None:
        poll = None
        while not pending.done:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if remaining < SLICE_S:
                poll = poll or _poll_in(self.fd)
                if not poll.poll(remaining * 1000):
                    return
            self.read(wait=True)

    def after_fork(self) -> None:
        """See fork.ForkAware. The calls in flight are the parent's; in the child they never end."""
        self._state, self._sending, self._late = Lock(), threading.Lock(), None
        self._ended = "this process was forked"

    def _detach(self) -> None:
        self._selector.remove(self)
        self.lane._discard(self)

    def _close(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
        finally:
            self._free_if_unused()

    def _free(self) -> None:
        """Under ``_state``, after the end: close the descriptor, unless a thread may be about to use it.

        Once closed, its number may stand for another file.
        """
        if not self._reading and self._sending.acquire(False):
            self._prompt.forget()
            self.sock.close()
            self._sending.release()

    def _free_if_unused(self) -> None:
        with self._state:
            self._free()


def _poll_in(fd: int) -> select.poll:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll


def _why(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "connection closed (the process ended or left the group)"
    return f"connection broke: {error}"


class SocketPending(Pending):
    """One call in flight on a connection."""

    __slots__ = ("connection",)

    connection: Connection

    def wait(self, timeout_s: float) -> bool:
        connection, deadline = self.connection, time.monotonic() + timeout_s
        if not self.done and not connection._reading:  # so if this thread reads it from now on, it is for this call
            try:
                if connection.acquire_read():
                    if timeout_s > 0:
                        if connection.polled is NOW:
                            connection.exclude_selector()
                        connection.read_until(self, deadline)
                    else:
                        connection.read()
                    connection.release_read()
            except BaseException:
                with connection._state:
                    if connection._reading in (0, get_ident()):
                        connection.release_read()
                raise
        return self.done or super().wait(deadline - time.monotonic())

    def check_reader(self) -> None:
        if self.connection._reading == get_ident():
            raise interrupted("waiting for a call that was sent before")

    def _on_callbacks(self, begins: bool) -> None:
        connection = self.connection
        connection._callbacks += 1 if begins else -1
        if begins:
            connection._enable()
            connection._selector.step_down()


class SocketLane(ConnectedLane[Connection]):
    """One per member. ``serve`` may return work, which a thread of the selector then runs."""

    name: ClassVar[str] = "socket"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=IN_BAND_BYTES, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(self, me: str, credentials: Credentials, *, tcp_host: str | None, by_tcp: Set[str]) -> None:
        super().__init__(me, credentials, tcp_host, by_tcp)
        self.selector: Any = None
        """That of this process, since it is open."""

    # --- the interface -------------------------------------------------------------------------------------

    def open(self, serve: Serve, spawn: Spawn) -> SocketAddress:
        self._serve = serve
        address = self._listen(self._acceptor.open, self._tcp_host)
        self.selector = enter(self)
        fork.register(self)
        for fd in self._polled:
            self.selector.listen_to(self, fd)
        return address

    def close(self) -> None:
        if self.selector is not None:
            self.selector.leave(self, "this member left the group")
        self._acceptor.close()
        self._end_waits()
        self._made.clear()
        self._aside.clear()

    def after_fork(self) -> list[fork.Address]:
        addresses = [] if self._acceptor.closed else self._tcp_addresses()
        self.selector.after_fork()
        self._sweeps.close()
        for connection in self.selector.of(self):
            connection.after_fork()
        self._made.clear()
        self._aside.clear()
        self._waiting.clear()
        return addresses

    @property
    def has_unread(self) -> bool:
        return self.selector is not None and self.selector.busy

    def count_silence(self, peer: str) -> None:
        """The host of this peer may be silent: what is sent next does not prolong the time until that is noticed."""
        if (connection := self._made.get(peer)) is not None:
            with contextlib.suppress(OSError):  # it has ended
                tcp.count_silence(connection.sock)

    def watch(self, reply: Reply) -> Pending:
        connection: Connection = cast(Any, reply).func.__self__  # as ``read`` makes it
        return connection.watch()

    # --- connections -----------------------------------------------------------------------------------------

    def _pack_first(self, message: Message) -> bytes:
        if body_bytes(message.body) > FIRST_BYTES:
            return b""
        frame = b"".join(frames.pack(frames.REQUEST, 1, message))
        return frame if len(frame) <= FIRST_BYTES else b""

    def _register(
        self,
        sock: socket.socket,
        protection: Protection | None,
        peer: str | None,
        first: Request | None,
        deadline: float,
    ) -> Connection:
        tune(sock)
        connection = Connection(self, sock, peer, protection, first)
        if not self.selector.add(connection, polled=connection.polled is NOW):
            raise self._left(peer)
        return connection

    # --- serving ---------------------------------------------------------------------------------------------

    def read(self, connection: Connection, tasks: deque[Task]) -> None:
        """Read what has arrived, and add the work that it brought. Requests enter their queues in the order sent."""
        if connection.accepted:  # Nobody else reads it, so no lock is needed. Its end looks at this after it is noted.
            connection._reading = get_ident()
        elif not connection.acquire_read():
            return  # a caller reads it
        try:
            for frame in connection.read():
                if (work := self._serve(frame.message, partial(connection.reply, frame.call))) is not None:
                    tasks.append(work)
        except Exception as error:  # those that have been accepted are served; a peer must not end this process
            if threads.is_shortage(error):
                raise
            threads.report(error, f"{self._me} closes a connection")
            connection.end(f"a request could not be accepted: {error}")
        finally:
            connection.release_read()


def make(setup: LaneSetup) -> SocketLane:
    return SocketLane(setup.member, setup.credentials, tcp_host=setup.tcp_host, by_tcp=setup.by_tcp)
