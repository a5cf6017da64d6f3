"""The two ends of one direction between two members, and the order in which they post transfers.

The receiver requests one fetch at a time. The sender answers in that order, when its data is complete. Then both post.
A transfer posted at one end therefore waits only for the other end, which is about to post it too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.nccl.carrier import RECEIVER, SENDER, Broken, Carrier, Channel, Mark
from raytorchrpc.lanes.nccl.control_connection import HUNG_UP, ControlConnection, Disconnected, TimedOut
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
