"""The two ends of one direction between two members: who asks, who answers, and in what order both post.

The receiver asks, one fetch at a time; the sender answers in that order, when its data is complete; then both post. So
what has been posted at one end waits for nothing but the other end, which is posting too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.nccl.carrier import RECEIVER, SENDER, Broken, Carrier, Channel, Mark
from raytorchrpc.lanes.nccl.control_connection import Control, Gone, Late
from raytorchrpc.tensors.dtypes import Shape

logger = logging.getLogger(__name__)

# What the receiver says: (FETCH, number, source, target), (JOIN, source, target, ticket), (DISCARD, number); and the
# answers to the first two: (GO,), (NO, reason).
FETCH, JOIN, DISCARD, GO, NO = range(5)

#: How a thread waits for a device: without sleeping at first, then in steps of a part of what it has waited (seconds).
_SPIN_S, _STEP, _LONGEST_STEP_S = 0.0005, 32, 0.001
#: What is being sent when a lane closes has this long to get there (seconds).
_LAST_S = 1.0
#: What is being received into somebody's own memory when it fails has this long to end.
_OVER_S = 10.0


def wait(done: Callable[[], bool], control: Control | None, deadline: float) -> None:
    """Until ``done``. Raises Gone, Late, or what ``done`` raises.

    Neither NCCL nor CUDA can wake a thread at a deadline or a hang-up, so this looks from time to time.
    """
    began = time.monotonic()
    while True:
        finished = done()
        if control is not None and control.hung_up():  # also then: what came last may be what an abort left
            raise Gone("connection closed (the process ended or left the group)")
        if finished:
            return
        now = time.monotonic()
        if now > deadline:
            raise Late
        time.sleep(0 if now - began < _SPIN_S else min(_LONGEST_STEP_S, (now - began) / _STEP))


@dataclass(eq=False)
class Kept:
    """An export that waits to be asked for."""

    peer: str
    pieces: list[torch.Tensor]
    """None of them is empty."""
    complete: Mark
    channel: Channel | None = None
    """By which it went."""


class Receiving:
    """The end that asks. Its connection and its channels end together, and the other end with them."""

    def __init__(self, peer: str, lane: str, control: Control, carrier: Carrier) -> None:
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
        deadline: float,
        into: Sequence[torch.Tensor | None] | None = None,
    ) -> tuple[list[torch.Tensor], Channel]:
        """One export's pieces, whole. Blocks until they are here.

        ``into``: for each piece, where it is to arrive, or None. Nothing is written there after this has raised.

        Raises PeerLost if the sender does not have it any more, and LaneUnavailable if the two ends cannot make a
        channel; then nothing moved and all is well. After anything else this has to be ended.
        """
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Late
        try:
            channel = self._channels.get((source, target)) or self._join(source, target, deadline)
            room = _room(channel, pieces, into)
            self.control.send((FETCH, number, source, target), deadline)
            if (refusal := self._refusal(deadline)) is not None:
                raise PeerLost(self.peer, refusal)
            try:
                mark = self._receive(channel, room, into, deadline)
            except BaseException:
                if into is not None:
                    _leave_alone(channel)
                raise
        finally:
            self._turn.release()

        def arrived() -> bool:
            reached = mark.reached()
            channel.enqueued()  # raises if it broke: that too lets the mark be reached
            return reached

        try:
            wait(arrived, self.control, deadline)
        except BaseException:
            if into is not None:
                _leave_alone(channel)
            raise
        return room, channel

    def _receive(
        self,
        channel: Channel,
        room: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor | None] | None,
        deadline: float,
    ) -> Mark:
        given = [tensor for tensor in into or () if tensor is not None]
        if given:
            channel.follow(given)
        channel.receive([tensor for tensor in room if tensor.nbytes])
        wait(channel.enqueued, self.control, deadline)
        return channel.mark()

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
        if self.control.hung_up():  # ended meanwhile, when this channel was not known
            channel.abort()
        return channel

    def _refusal(self, deadline: float) -> str | None:
        answer = self.control.receive(deadline)
        return None if answer[0] == GO else answer[1]

    def discard(self, number: int, deadline: float) -> None:
        """Say that nobody will ask for this one. Raises Gone or Late."""
        self.control.send((DISCARD, number), deadline)

    def end(self) -> None:
        """Idempotent; any thread."""
        self.control.close()
        for channel in list(self._channels.values()):
            channel.abort()


def _room(
    channel: Channel, pieces: Sequence[Sequence[Shape]], into: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor]:
    """Where each piece is to arrive."""
    if into is None:
        return channel.room(pieces)
    made = iter(channel.room([piece for piece, given in zip(pieces, into, strict=True) if given is None]))
    return [next(made) if given is None else given for given in into]


def _leave_alone(channel: Channel) -> None:
    """The memory that it was to fill is its owner's again."""
    channel.abort()
    try:
        wait(channel.over, None, time.monotonic() + _OVER_S)
    except Late:
        logger.warning("a transfer that failed has not ended within %g s; it may still write into buffers", _OVER_S)


class Sending:
    """The end that answers."""

    def __init__(
        self, control: Control, carrier: Carrier, timeout_s: float, take: Callable[[int], Kept | None]
    ) -> None:
        """``timeout_s``: for each answer. ``take``: the export of that number, if this peer may have it."""
        self.control = control
        self._carrier, self._timeout_s, self._take = carrier, timeout_s, take
        self._channels: dict[tuple[int, int], Channel] = {}

    def serve(self) -> None:
        """Answer until the connection ends. Blocks; to be called once."""
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
            self.control.close()  # first: what an aborted kernel leaves at the other end must not pass for data
            for channel in self._channels.values():
                channel.abort()

    def _send(self, number: int, devices: tuple[int, int], deadline: float) -> None:
        channel = self._channels.get(devices)
        kept = None if channel is None else self._take(number)
        if kept is None or channel is None:
            self.control.send((NO, "the sender does not have these tensors any more"), deadline)
            return
        wait(kept.complete.reached, self.control, deadline)
        kept.channel = channel
        channel.send(kept.pieces)
        self.control.send((GO,), deadline)  # before it settles: the first transfer settles only with the other end
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
        """Let what is being sent arrive, for a second at most, and hang up. Any thread; ``serve`` then returns."""
        deadline = time.monotonic() + _LAST_S
        try:
            for channel in list(self._channels.values()):
                wait(channel.enqueued, self.control, deadline)
                wait(channel.mark().reached, self.control, deadline)
        except (Gone, Late, Broken) as error:
            logger.debug("a channel did not come to rest: %s", error)
        self.control.close()
