"""The two ends of one direction between two members, and the order in which they post transfers.

The receiver requests one fetch at a time. The sender answers in that order, when its data is complete. Then both post.
A transfer posted at one end therefore waits only for the other end, which is about to post it too.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Message
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.connections import CONNECT_TIMEOUT_S, SocketAddress, dial
from raytorchrpc.lanes.common.handshake import Credentials, Refused
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.lanes.nccl.carrier import RECEIVER, SENDER, Broken, Carrier, Channel, Mark
from raytorchrpc.tensors.codec import NOTHING
from raytorchrpc.tensors.dtypes import Shape

logger = logging.getLogger(__name__)

# Requests of the receiver: (FETCH, number, source, target), (JOIN, source, target, ticket), (DISCARD, number). Answers
# to the first two: (GO,), (NO, reason).
FETCH, JOIN, DISCARD, GO, NO = range(5)

#: A thread that waits for a device first spins, then sleeps for a fraction of the time it has waited (seconds).
_SPIN_S, _STEP, _LONGEST_STEP_S = 0.0005, 32, 0.001
#: Time for transfers in progress to complete when a lane closes (seconds).
_LAST_S = 1.0
#: Time for a failed transfer into the caller's own memory to stop writing (seconds).
_OVER_S = 10.0
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


def wait(done: Callable[[], bool], control: ControlConnection | None, deadline: float) -> None:
    """Block until ``done()``. Raises Disconnected, TimedOut, or what ``done`` raises.

    Neither NCCL nor CUDA can wake a thread at a deadline or a hang-up, so this polls.
    """
    began = time.monotonic()
    while True:
        finished = done()
        if control is not None and control.hung_up():  # even then: the data may be what an abort has left
            raise Disconnected(HUNG_UP)
        if finished:
            return
        now = time.monotonic()
        if now > deadline:
            raise TimedOut
        time.sleep(0 if now - began < _SPIN_S else min(_LONGEST_STEP_S, (now - began) / _STEP))


@dataclass(eq=False)
class Kept:
    """An export that has not been fetched."""

    peer: str
    pieces: list[torch.Tensor]
    """None of them is empty."""
    complete: Mark
    channel: Channel | None = None
    """The channel that sent it."""

    def precede(self) -> None:
        """See Channel.precede."""
        if self.channel is not None:
            self.channel.precede()


class Receiving:
    """The receiving end. Its connection and its channels end together, and the other end with them."""

    def __init__(self, peer: str, lane: str, control: ControlConnection, carrier: Carrier) -> None:
        self.peer, self.control = peer, control
        self._lane, self._carrier = lane, carrier
        self._turn = threading.Lock()
        self._channels: dict[tuple[int, int], Channel] = {}

    def fetch(
        self,
        number: int,
        source: int,
        target: int,
        pieces: Sequence[Sequence[Shape]],
        into: Sequence[torch.Tensor | None],
        deadline: float,
    ) -> tuple[list[torch.Tensor], Channel]:
        """Fetch all pieces of one export. Blocks until they have arrived.

        ``into``: for each piece, the tensor to receive it, or None. Nothing is written there after this has raised.

        Raises PeerLost if the sender does not have the export any more, and LaneUnavailable if the two ends cannot make
        a channel; nothing was transferred then, and this end stays usable. After any other error, call ``end``.
        """
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimedOut
        try:
            channel = self._channels.get((source, target)) or self._join(source, target, deadline)
            made = iter(channel.room([piece for piece, own in zip(pieces, into, strict=True) if own is None]))
            room = [next(made) if own is None else own for own in into]
            given = [own for own in into if own is not None]
            self.control.send((FETCH, number, source, target), deadline)
            if (refusal := self._refusal(deadline)) is not None:
                raise PeerLost(self.peer, refusal)
            with _writing_to(given, channel):
                if given:
                    channel.follow(given)
                channel.receive([tensor for tensor in room if tensor.nbytes])
                wait(channel.enqueued, self.control, deadline)
                reached = channel.mark()
        finally:
            self._turn.release()

        def arrived() -> bool:
            done = reached()
            channel.enqueued()  # raises if the channel broke, which also lets the mark be reached
            return done

        with _writing_to(given, channel):
            wait(arrived, self.control, deadline)
        return room, channel

    def _join(self, source: int, target: int, deadline: float) -> Channel:
        ticket = self._carrier.ticket()
        self.control.send((JOIN, source, target, ticket), deadline)
        channel = self._carrier.join(ticket, RECEIVER, target)
        try:
            wait(lambda: self.control.readable() or channel.enqueued(), self.control, deadline)
            if (refusal := self._refusal(deadline)) is not None:
                raise LaneUnavailable(self._lane, refusal)
            wait(channel.enqueued, self.control, deadline)
        except BaseException:
            channel.abort()
            raise
        self._channels[source, target] = channel
        if self.control.hung_up():  # ended meanwhile, before this channel was known
            channel.abort()
        return channel

    def _refusal(self, deadline: float) -> str | None:
        answer = self.control.receive(deadline)
        return None if answer[0] == GO else answer[1]

    def discard(self, number: int, deadline: float) -> None:
        """Tell the sender that this export will not be fetched. Raises Disconnected or TimedOut."""
        self.control.send((DISCARD, number), deadline)

    def end(self) -> None:
        """Close the connection and its channels. Idempotent; from any thread."""
        self.control.close()
        for channel in list(self._channels.values()):
            channel.abort()


@contextlib.contextmanager
def _writing_to(given: Sequence[torch.Tensor], channel: Channel) -> Iterator[None]:
    """On a failure, abort the channel and wait until it writes no more into the caller's own tensors."""
    try:
        yield
    except BaseException:
        if given:
            channel.abort()
            try:
                wait(channel.over, None, time.monotonic() + _OVER_S)
            except TimedOut:
                what = "a failed transfer has not ended within %g s, so it may still write into the buffers"
                logger.warning(what, _OVER_S)
        raise


class Sending:
    """The sending end."""

    def __init__(
        self, control: ControlConnection, carrier: Carrier, timeout_s: float, take: Callable[[int], Kept | None]
    ) -> None:
        """``timeout_s``: for each answer. ``take``: returns the export of that number, if it is for this peer."""
        self.control = control
        self._carrier, self._timeout_s, self._take = carrier, timeout_s, take
        self._channels: dict[tuple[int, int], Channel] = {}

    def serve(self) -> None:
        """Answer requests until the connection ends. Blocks. To be called once."""
        try:
            while True:
                request = self.control.receive(None)
                deadline = time.monotonic() + self._timeout_s
                if request[0] == FETCH:
                    _, number, source, target = request
                    self._send(number, (source, target), deadline)
                elif request[0] == JOIN:
                    _, source, target, ticket = request
                    self._join((source, target), ticket, deadline)
                else:
                    self._take(request[1])
        finally:
            self.control.close()  # first: what an aborted kernel leaves at the other end must not be taken for data
            for channel in self._channels.values():
                channel.abort()

    def _send(self, number: int, devices: tuple[int, int], deadline: float) -> None:
        channel = self._channels.get(devices)
        if channel is None or (kept := self._take(number)) is None:
            self.control.send((NO, "the sender does not have these tensors any more"), deadline)
            return
        wait(kept.complete, self.control, deadline)
        kept.channel = channel
        channel.send(kept.pieces)
        self.control.send((GO,), deadline)  # before it is enqueued: the first transfer waits for the other end
        wait(channel.enqueued, self.control, deadline)
        kept.pieces = []

    def _join(self, devices: tuple[int, int], ticket: bytes, deadline: float) -> None:
        channel = None
        try:
            channel = self._carrier.join(ticket, SENDER, devices[0])
            wait(channel.enqueued, self.control, deadline)
        except BaseException as error:
            if channel is not None:
                channel.abort()
            if not isinstance(error, Broken):
                raise
            self.control.send((NO, f"the sender cannot join: {error}"), deadline)
            return
        self._channels[devices] = channel
        self.control.send((GO,), deadline)

    def end(self) -> None:
        """Complete transfers in progress, for a second at most, and hang up, so that ``serve`` returns."""
        deadline = time.monotonic() + _LAST_S
        try:
            for channel in list(self._channels.values()):
                wait(channel.enqueued, self.control, deadline)
                wait(channel.mark(), self.control, deadline)
        except (Disconnected, TimedOut, Broken) as error:
            logger.debug("a transfer did not complete: %s", error)
        self.control.close()
