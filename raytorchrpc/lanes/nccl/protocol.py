"""The two ends of a channel between two members, and the order in which they post transfers.

The receiver requests one fetch at a time of a channel. The sender answers once its data is complete. Then both post. A
transfer posted at one end therefore waits only for the other end, which is about to post it too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from raytorchrpc.lanes.nccl.carrier import Broken, Channel, Mark
from raytorchrpc.tensors.dtypes import Shape

logger = logging.getLogger(__name__)

#: A thread that waits for a device first spins, then sleeps for a fraction of the time it has waited (seconds).
_SPIN_S, _STEP, _LONGEST_STEP_S = 0.0005, 32, 0.001
#: Time for a failed transfer into the caller's own memory to stop writing (seconds).
_OVER_S = 10.0


class TimedOut(Exception):
    """The deadline has passed."""


class NotSent(Exception):
    """The sender does not have the tensors. Nothing was posted."""


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


@dataclass(eq=False)
class End:
    """One end of a channel that both members have joined."""

    peer: str
    ticket: bytes
    """Identifies the channel at both ends."""
    channel: Channel
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held from the request of a transfer until it is enqueued."""
    ended: str | None = None
    """Why this end carries nothing more."""

    def wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Block until ``done()``. Raises Broken, TimedOut, or what ``done`` raises.

        Neither NCCL nor CUDA can wake a thread at a deadline or when the peer ends, so this polls.
        """
        began = time.monotonic()
        while True:
            finished, now = done(), time.monotonic()
            if self.ended is not None:  # even if finished: the data may be what an abort has left
                raise Broken(self.ended)
            if now > deadline:  # likewise: the sender aborts after its own deadline
                raise TimedOut
            if finished:
                return
            time.sleep(0 if now - began < _SPIN_S else min(_LONGEST_STEP_S, (now - began) / _STEP))

    @contextlib.contextmanager
    def taking_turn(self, deadline: float) -> Iterator[None]:
        """Hold ``turn``. Raises TimedOut."""
        if not self.turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimedOut
        try:
            yield
        finally:
            self.turn.release()

    def receive(
        self,
        request: Callable[[], str | None],
        pieces: Sequence[Sequence[Shape]],
        into: Sequence[torch.Tensor | None],
        deadline: float,
    ) -> list[torch.Tensor]:
        """Receive all pieces of one export. Blocks until they have arrived.

        ``request``: asks the sender for them; returns why it refuses, or None. ``into``: for each piece, the tensor to
        receive it, or None. Nothing is written there after this has raised.

        Raises NotSent, Broken, TimedOut, or what ``request`` raises. After any error but NotSent, abort the channel.
        """
        with self.taking_turn(deadline):
            made = iter(self.channel.room([piece for piece, own in zip(pieces, into, strict=True) if own is None]))
            room = [next(made) if own is None else own for own in into]
            given = [own for own in into if own is not None]
            if (refusal := request()) is not None:
                raise NotSent(refusal)
            with self._writing_to(given):
                if given:
                    self.channel.follow(given)
                self.channel.receive([tensor for tensor in room if tensor.nbytes])
                self.wait(self.channel.enqueued, deadline)
                reached = self.channel.mark()

        def arrived() -> bool:
            done = reached()
            self.channel.enqueued()  # raises if the channel broke, which also lets the mark be reached
            return done

        with self._writing_to(given):
            self.wait(arrived, deadline)
        return room

    @contextlib.contextmanager
    def _writing_to(self, given: Sequence[torch.Tensor]) -> Iterator[None]:
        """On a failure, abort the channel and wait until it writes no more into the caller's own tensors."""
        try:
            yield
        except BaseException:
            if given:
                self.channel.abort()
                until = time.monotonic() + _OVER_S
                while not self.channel.over() and time.monotonic() < until:
                    time.sleep(_LONGEST_STEP_S)
                if not self.channel.over():
                    what = "a failed transfer has not ended within %g s, so it may still write into the buffers"
                    logger.warning(what, _OVER_S)
            raise
