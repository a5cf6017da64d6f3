"""One connection of the socket lane, and a call under way on it."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from raytorchrpc.errors import PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.common import frames as _frames
from raytorchrpc.lanes.common.pending import PendingReply, complete_with, fail_all
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.lanes.socket.spin import Patience
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: A caller that reads looks at its deadline this often (seconds).
SLICE_S = 1
#: For the rest of a request whose deadline passed in the middle (seconds); a peer that does not take it is given up.
FINISH_S = 10.0
_NOT_TAKEN = "it did not take the data in time"
_IOV_MAX = 1024
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Listeners(Protocol):
    """Who reads a connection when no caller does: what a connection needs of its lane."""

    def arm(self, fd: int) -> None:
        """Hear this descriptor again."""

    def disarm(self, fd: int) -> None:
        """Keep away from it: a caller reads."""

    def watch(self, connection: Connection) -> None:
        """See to it that it is read soon, if nobody else comes to do it: call ``attend`` in a while."""

    def forget(self, connection: Connection) -> None:
        """It has ended."""


#: A host that is gone without a word (power, cable, a firewall that forgot us) costs its connections after this
#: (seconds): nothing else would ever tell an idle one, and Linux goes on for 15 minutes with data that nobody
#: acknowledges. A network that is back within five seconds costs nothing: the kernel sends again after at most that
#: long again, well before. An idle connection asks after 5 s, then every 2 s. Linux counts a peer that lives but reads
#: nothing the same way, so that one loses the connection too, but only once its buffers are full.
SILENCE_S = 15
_ASK_AFTER_S, _ASK_EVERY_S = 5, 2


def tune(sock: socket.socket) -> None:
    """Settings of a proved socket."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_AFTER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENCE_S - _ASK_AFTER_S) // _ASK_EVERY_S)
        # It bounds data that is not acknowledged, and takes the place of TCP_KEEPCNT for an idle connection.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(SLICE_S))


def _timeval(seconds: int) -> bytes:
    return seconds.to_bytes(8, "little") + bytes(8)


class Connection:
    """One socket: requests go out and replies come in (``peer`` is set), or the other way round.

    At any time at most one thread reads it: a listener, or a caller that waits. ``_state`` guards who.
    """

    def __init__(
        self, lane: Listeners, sock: socket.socket, peer: str | None, protection: Protection | None = None
    ) -> None:
        self.lane, self.sock, self.peer = lane, sock, peer
        self.fd = sock.fileno()
        self._protection = protection
        self._reader = _frames.FrameReader(protection)
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._reading = False
        self._armed = self.accepted
        """Whether listeners hear it. They always hear an accepted one, but one of our own only while replies are
        under way that nobody comes to read: a caller that waits reads for itself, and for the others meanwhile."""
        self._watched = False
        self._read_of_late = False
        """By a caller, or by the listener that serves it. Then they will again, and no other listener has to wake."""
        self._called_back = 0  # calls under way that somebody wants to be told of at once
        self.patience = Patience()
        self.brief = True
        """Whether the work that came by it last took less than a moment."""
        self._pending: dict[int, SocketPending] = {}
        self._calls = 0
        self._ended: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether a peer made it: requests come in by it."""
        return self.peer is None

    @property
    def ended(self) -> bool:
        """Whether it can carry nothing more."""
        return self._ended is not None

    # Calls.

    def begin(self, pending: SocketPending, caller_waits: bool) -> None:
        """Give a call its number; its reply can arrive from now on. ``caller_waits``: its caller waits at once."""
        with self._state:
            if self._ended is not None:
                raise PeerLost(self.peer or "?", self._ended, may_have_run=False)
            self._calls += 1
            pending.call = self._calls
            self._pending[pending.call] = pending
            if not caller_waits:
                self._let_somebody()

    def _let_somebody(self) -> None:
        """Under ``_state``: there is something to come. Whoever waits for it will read it; only if nobody does, for a
        moment, a listener has to."""
        if self._called_back:
            self._let_listeners()
        elif not (self._armed or self._reading or self._watched):
            self._watched = True
            self.lane.watch(self)

    def attend(self) -> bool:
        """By the lane, a moment after ``watch``: whether it is to look again in another moment."""
        with self._state:
            wanted = self.accepted or bool(self._pending)
            again = wanted and self._read_of_late and not self._armed
            self._read_of_late = False
            self._watched = again
            if wanted and not again:
                self._let_listeners()
            return again

    def _let_listeners(self) -> None:
        """Under ``_state``: somebody has to read this."""
        if not self._armed and not self._reading and self._ended is None:
            self._armed = True
            self.lane.arm(self.fd)

    def listen_again(self) -> None:
        """By the lane, after it has failed in the middle of something: listeners hear it if nobody reads it."""
        with self._state:
            if not self._reading and self._ended is None and (self.accepted or self._pending):
                self._armed = True
                self.lane.arm(self.fd)

    def forget(self, pending: SocketPending) -> None:
        """Nobody waits for this call any more; its reply, if it comes, is dropped."""
        with self._state:
            self._pending.pop(pending.call, None)

    def send(self, buffers: list[Any], deadline: float) -> None:
        """Send one frame. Raises PeerLost, and RpcTimeout for a request of which nothing has gone by its deadline.

        If half of a request has gone by then, it returns, and a thread of its own sends the rest: the connection has
        other calls, which half a frame would cost theirs. A reply that is not taken in time ends the connection.
        """
        if not self._sending.acquire(False) and not self._sending.acquire(
            timeout=max(0.0, deadline - time.monotonic())
        ):
            raise self._busy()
        rest: list[memoryview] = []
        begun = self._protection is not None  # what it has sealed must be sent
        try:
            if self._protection is not None:
                buffers = self._protection.seal(buffers)
            try:
                if len(buffers) == 1:
                    sent = self.sock.send(buffers[0], _AT_ONCE)
                else:
                    sent = self.sock.sendmsg(buffers[:_IOV_MAX], (), _AT_ONCE)
            except BlockingIOError:
                sent = 0
            if len(buffers) > 1 or sent < len(buffers[0]):
                begun = True
                parts = [memoryview(part).cast("B") for part in buffers]
                size = sum(map(len, parts))
                rest = self._send_rest(parts, sent, deadline)
                if rest and self.accepted:
                    rest = []
                    raise TimeoutError(_NOT_TAKEN)
                # What has been sealed has its place in the stream, and must be sent.
                if sum(map(len, rest)) == size and self._protection is None:
                    rest = []
                    raise self._busy()
        except RayTorchRpcError:
            raise
        except OSError as error:  # so is a TimeoutError
            self.end(str(error))
            # Nobody runs a part of a request.
            raise PeerLost(self.peer or "the caller", self._ended or str(error), may_have_run=False) from error
        except BaseException:
            if begun:  # half of a frame, and nothing can follow it
                self.end("a message was not sent to its end")
            raise
        finally:
            if not rest:
                self._sending.release()
        if rest:
            self._finish_later(rest)

    def _finish_later(self, rest: list[memoryview]) -> None:
        try:
            copies = [memoryview(bytes(part)) for part in rest]  # the caller may change his tensors from now on
            threads.start(self._finish, copies, name="raytorchrpc-rest")
        except BaseException as error:
            self.end(f"a request was late in the middle, and the rest of it cannot be sent: {error}")
            self._sending.release()
            raise PeerLost(self.peer or "the caller", self._ended or "", may_have_run=False) from error

    def _busy(self) -> RpcTimeout:
        return RpcTimeout(f"the route to {self.peer or 'the caller'} was busy until the deadline")

    def _send_rest(self, parts: list[memoryview], sent: int, deadline: float) -> list[memoryview]:
        """Go on sending after ``sent`` bytes; returns what is left at the deadline. Raises OSError."""
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
            try:
                sent = self.sock.sendmsg(parts[:_IOV_MAX], (), _AT_ONCE)
            except BlockingIOError:
                sent = 0

    def _finish(self, rest: list[memoryview]) -> None:
        """Send the rest of a request that is late, for which ``_sending`` is held."""
        try:
            if self._send_rest(rest, 0, time.monotonic() + FINISH_S):
                self.end(_NOT_TAKEN)
        except OSError as error:
            self.end(str(error))
        finally:
            self._sending.release()

    # Reading.

    def take_reading(self) -> bool:
        """Become the one that reads; False if somebody reads already."""
        with self._state:
            if self._reading or self._ended is not None:
                return False
            self._reading = True
            return True

    def keep_to_oneself(self) -> None:
        """By a thread that has taken the reading, to wait: listeners need not wake."""
        with self._state:
            if self._armed and self._ended is None:  # once it ended, its descriptor may be another's
                self._armed = False
                self.lane.disarm(self.fd)

    def give_reading(self, *, lazily: bool) -> None:
        """Leave the reading to others, if there is anything to read for. ``lazily``: whoever gives it is going to
        read again, so that listeners need to wake only if it takes him too long.
        """
        with self._state:
            self._reading = False
            self._armed = False  # a listener that was woken has used it up
            if not (self.accepted or self._pending):
                return
            if lazily:
                self._read_of_late = True
                self._let_somebody()
            else:
                self._let_listeners()

    def read(self, flags: int = 0) -> list[_frames.Frame]:
        """Read once: completes the calls whose replies arrived, returns the requests. Ends with the stream."""
        try:
            frames = self._reader.read(self.sock, flags)
        except BlockingIOError:
            return []
        except Exception as error:  # of whatever kind: the stream is out of step
            self.end(_why(error))
            return []
        requests = []
        for frame in frames:
            if frame.kind == _frames.REQUEST:
                requests.append(frame)
                continue
            with self._state:
                pending = self._pending.pop(frame.call, None)
            if pending is not None:
                complete_with(pending, frame.message)
        return requests

    def read_until(self, pending: SocketPending, deadline: float) -> None:
        """Read, as the one that reads, until this call is done or the deadline passes."""
        poll = None
        if self.patience.is_left():
            self.patience.look(partial(self._look, pending))
        while not pending.done:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if remaining < SLICE_S:
                poll = poll or _poll_in(self.fd)
                if not poll.poll(remaining * 1000):
                    return
            self.read()

    def _look(self, pending: SocketPending) -> bool:
        self.read(socket.MSG_DONTWAIT)
        return pending.done

    def await_requests(self) -> list[_frames.Frame]:
        """As the one that reads: wait a moment for requests."""
        requests: list[_frames.Frame] = []

        def look() -> bool:
            requests.extend(self.read(socket.MSG_DONTWAIT))
            return bool(requests) or self.ended

        if self.patience.is_left():
            self.patience.look(look)
        else:
            look()
        return requests

    def after_fork(self) -> None:
        """See forking.ForkAware. The calls under way are the parent's: here they never end."""
        self._state, self._sending = threading.Lock(), threading.Lock()
        self._ended = "this process was forked"

    def end(self, reason: str) -> None:
        """Close; every call under way fails with PeerLost."""
        with self._state:
            if self._ended is not None:
                return
            self._ended = reason
        try:  # without memory, too: the other end has to hear of it, and those who wait
            self.lane.forget(self)
        finally:
            try:
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever reads it
            finally:
                self.sock.close()
                fail_all(self._pending, self.peer or "?", reason)


def _poll_in(fd: int) -> select.poll:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll


def _why(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "connection closed (the process ended or left the group)"
    if threads.is_shortage(error):
        return f"no memory here for what it sent: {error}"
    return f"connection broke: {error}"


class SocketPending(PendingReply):
    """One call under way on a connection."""

    __slots__ = ("_connection", "_deadline", "call")

    def __init__(self, connection: Connection, deadline: float, on_released: Callable[[], None] | None = None) -> None:
        super().__init__(on_released, connection._state)
        self._connection = connection
        self._deadline = deadline
        self.call = 0

    def wait(self, timeout_s: float) -> bool:
        if self.done:
            return True
        connection = self._connection
        if not connection.take_reading():
            return super().wait(timeout_s)
        try:
            connection.keep_to_oneself()
            if timeout_s > 0:
                connection.read_until(self, time.monotonic() + timeout_s)
            else:
                connection.read(socket.MSG_DONTWAIT)
        finally:
            connection.give_reading(lazily=True)
        return self.done

    def _listened(self, begins: bool) -> None:
        connection = self._connection
        connection._called_back += 1 if begins else -1
        if begins:
            connection._let_listeners()
