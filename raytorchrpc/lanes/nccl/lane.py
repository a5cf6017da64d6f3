"""The nccl lane: CUDA tensors to another GPU, of this host or of another, by NCCL's own transports.

NCCL is two-sided: both ends post each transfer, in the same order. The receiver therefore requests each transfer of the
sender, one at a time of a channel, over a message lane of their own. The sender answers once its data is complete. Then
both post: a transfer posted at one end waits only for the other end, which is about to post it too. Each pair of GPUs
has a communicator of two, a channel. It ends at both ends: when the peer ends, when NCCL fails, or at a deadline. The
next read makes a new one.

``read`` returns when the data has arrived: a CUDA stream that waits for NCCL cannot be told that the peer died, while
the calling thread can raise an exception.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost, RpcTimeout
from raytorchrpc.lanes.base import (
    Arrived,
    Copies,
    Export,
    Message,
    MessageLane,
    PeerAddress,
    Pending,
    Reply,
    TensorCapabilities,
    TensorLane,
    arrived,
    checked,
    whole_targets,
)
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.nccl.carrier import RECEIVER, SENDER, Broken, Carrier, Channel, Mark, carrier
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.process import threads
from raytorchrpc.process.locks import Lock, Turn
from raytorchrpc.process.workers import DeferredCleanup
from raytorchrpc.tensors.codec import NOTHING
from raytorchrpc.tensors.dtypes import Shape
from raytorchrpc.topology import nccl_env

logger = logging.getLogger(__name__)

# Requests, each followed by the member that makes it: (WATCH), (JOIN, source, ticket), (FETCH, number, ticket),
# (DISCARD, number), (END, ticket, cause). The answer has one field: None, or why the request is refused. A WATCH is
# never answered: it fails when the connection to the other member ends.
WATCH, JOIN, FETCH, DISCARD, END = range(5)

#: Longest time to tell a peer what it need not know (seconds), and for transfers in progress to complete when a lane
#: closes.
_PATIENCE_S = 1.0
_LOST = "connection closed (the process ended or left the group)"
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
        if self.channel is not None:
            self.channel.precede()


@dataclass(eq=False)
class End:
    """One end of a channel that both members have joined."""

    peer: str
    ticket: bytes
    """Identifies the channel at both ends."""
    channel: Channel
    turn: Turn = field(default_factory=Turn)
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

    @contextmanager
    def taking_turn(self, deadline: float) -> Iterator[None]:
        """Hold ``turn``. Raises TimedOut."""
        if not self.turn.once("a transfer by nccl").acquire(timeout=max(0.0, deadline - time.monotonic())):
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

    @contextmanager
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
                    text = "a failed transfer has not ended within %g s, so it may still write into the buffers"
                    logger.warning(text, _OVER_S)
            raise


class NcclAddress(NamedTuple):
    """Where a member's lane listens, and its GPUs."""

    control: Any
    """Of its message lane."""
    devices: dict[int, str]
    """A unique identity of each GPU, by the member's own index."""


class NcclLane(TensorLane):
    """One per member. ``export`` neither copies nor sends; it keeps the memory until the receiver has fetched it."""

    name: ClassVar[str] = "nccl"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(devices=frozenset({"cuda"}))

    def __init__(
        self,
        me: str,
        devices: Sequence[int],
        make_control: Callable[[], MessageLane],
        *,
        timeout_s: float = 60.0,
        get_carrier: Callable[[], Carrier] = carrier,
    ) -> None:
        """``devices``: local CUDA indices that tensors come from or arrive on. ``make_control``: makes the
        lane for requests to the same lane of peers. ``timeout_s``: for one fetch. The caller sets NCCL's variables
        before the first lane of the process opens.
        """
        self._me, self._devices, self._make_control = me, tuple(devices), make_control
        self._timeout_s, self._get_carrier = timeout_s, get_carrier
        self._lock = Lock()
        self._peers: dict[str, NcclAddress] = {}
        self._watches: dict[str, Pending] = {}
        self._receiving: dict[tuple[str, int, int], End] = {}
        """By the sender, its GPU and this process's."""
        self._joining: dict[str, Turn] = {}
        """By the sender; held while a channel is made."""
        self._sending: dict[bytes, End] = {}
        """By ticket."""
        # Random: a peer may still discard numbers of an earlier process of this member.
        self._numbers = itertools.count(random.SystemRandom().getrandbits(48))
        self._kept: dict[int, Kept] = {}
        self._closed = True  # until it is open

    @property
    def outstanding(self) -> int:
        return len(self._kept)

    def open(self) -> NcclAddress:
        self._carrier = self._get_carrier()
        self._identities = dict(self._carrier.open(self._devices))
        self._control = self._make_control()
        try:
            control = self._control.open(self._serve, self._spawn)
            self._cleanup = DeferredCleanup()
        except threads.ThreadShortage as error:
            self._control.close()
            raise LaneUnavailable(self.name, str(error)) from error
        self._closed = False
        return NcclAddress(control, self._identities)

    def _spawn(self, work: Callable[[], None]) -> None:
        threads.start(work, name=f"raytorchrpc-{self._me}-nccl-sender")

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        # A lane opened for one host stays so: torchrpc reaches members that join from other hosts.
        self._control.reach(None, by_tcp)

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        for peer in peers:
            self._joining.setdefault(peer.peer, Turn())
            self._peers[peer.peer] = peer.address
        self._control.connect([PeerAddress(peer.peer, peer.address.control) for peer in peers])

    # --- requests ------------------------------------------------------------------------------------------

    def _begin(self, peer: str, request: tuple[Any, ...], deadline: float, *, caller_waits: bool = True) -> Pending:
        header = (request[0], self._me, *request[1:])
        remaining_s = max(0.0, deadline - time.monotonic())
        return self._control.call(peer, Message(header, NOTHING), remaining_s, caller_waits=caller_waits)

    def _ask(self, peer: str, request: tuple[Any, ...], deadline: float) -> str | None:
        """Make a request; returns why it is refused, or None. Raises PeerLost, RpcTimeout or TimedOut."""
        return self._answer_to(self._begin(peer, request, deadline), deadline)

    def _answer_to(self, pending: Pending, deadline: float) -> str | None:
        if not pending.wait(max(0.0, deadline - time.monotonic())):
            raise TimedOut
        refusal: str | None = pending.take().header[0]
        return refusal

    def _watch(self, peer: str, deadline: float) -> Pending:
        """Have this lane notice when the process of a peer ends. Raises PeerLost or RpcTimeout."""
        with self._lock:
            watch = self._watches.get(peer)
        if watch is None:
            watch = self._begin(peer, (WATCH,), deadline, caller_waits=False)
            with self._lock:
                self._watches[peer] = watch  # of two threads that begin one, either does
            watch.add_done_callback(partial(self._lose, peer, watch))
        return watch

    def _lose(self, peer: str, watch: Pending) -> None:
        with self._lock:
            if self._watches.get(peer) is watch:
                del self._watches[peer]
        self._forget(peer)

    def _forget(self, peer: str) -> None:
        """Release everything that concerns a peer which will not answer any more."""
        for number in [number for number, kept in self._kept.copy().items() if kept.peer == peer]:
            self._kept.pop(number, None)
        for end in self._receiving.copy().values():
            if end.peer == peer:
                self._end_here(end, _LOST)
        for end in self._sending.copy().values():
            if end.peer == peer:
                self._spawn(partial(self._leave, end))

    def _leave(self, end: End) -> None:
        """End a channel whose receiver may live, even if this member does not count it as a peer any more."""
        deadline = time.monotonic() + self._timeout_s
        if end.peer in self._peers:
            self._end_at_receiver(end, _LOST, deadline)
            return
        with suppress(Broken, TimedOut), end.taking_turn(deadline):  # it cannot be told: what it asked for is sent
            end.wait(end.channel.enqueued, deadline)
            end.wait(end.channel.mark(), deadline)
            self._abort(end, _LOST)
        self._abort(end, _LOST)

    def _abort(self, end: End, cause: str) -> None:
        """End a channel here. Never blocks; idempotent."""
        end.ended = end.ended or cause
        self._sending.pop(end.ticket, None)
        for key in [key for key, other in self._receiving.copy().items() if other is end]:
            self._receiving.pop(key, None)
        end.channel.abort()

    def _serve(self, message: Message, reply: Reply) -> Callable[[], None] | None:
        kind, peer, *request = message.header
        if kind == WATCH:
            return None
        if kind == JOIN:
            return partial(_unless_gone, self._join_as_sender, peer, request[0], request[1], reply)
        if kind == FETCH:
            return partial(_unless_gone, self._send, peer, request[0], request[1], reply)
        if kind == DISCARD:
            self._take(peer, *request)
        else:
            for end in (*self._receiving.copy().values(), *self._sending.copy().values()):
                if (end.peer, end.ticket) == (peer, request[0]):
                    self._abort(end, request[1])
        _unless_gone(reply, _answer(None))
        return None

    # --- sending -------------------------------------------------------------------------------------------

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[int, int]) -> Export:
        opened = {own: theirs for own, theirs in devices.items() if own in self._identities}
        source = packing.source_of(tensors, opened, self.name)
        address, target = self._peers.get(peer), devices[source]
        if address is None or self._closed:
            raise LaneUnavailable(self.name, f"member {peer!r} is unknown here, or has left")
        if target not in address.devices:
            raise LaneUnavailable(self.name, f"{peer!r} has not opened cuda:{target} for this lane")
        if (gpu := self._identities[source]) and address.devices[target] == gpu:
            raise LaneUnavailable(self.name, f"both ends are on GPU {gpu} and NCCL needs two; allow cuda_ipc")
        try:
            watch = self._watch(peer, time.monotonic() + self._timeout_s)
        except (PeerLost, RpcTimeout) as error:
            raise LaneUnavailable(self.name, f"no connection to {peer!r}: {error}") from error
        pieces = [piece for piece in packing.pack(tensors)[1] if piece.nbytes]
        kept = Kept(peer, pieces, self._carrier.mark(source))
        number = next(self._numbers)
        self._kept[number] = kept
        if watch.wait(0):
            self._kept.pop(number, None)
            raise LaneUnavailable(self.name, f"the connection to {peer!r} has just ended")
        descriptor = (number, source, target, tuple(piece.nbytes for piece in pieces))
        return Export(descriptor, partial(self._kept.pop, number, None), kept.precede)

    def _take(self, peer: str, number: int) -> Kept | None:
        """Remove and return the export of that number, if it is for this peer."""
        kept = self._kept.get(number)
        return self._kept.pop(number, None) if kept is not None and kept.peer == peer else None

    def _join_as_sender(self, peer: str, source: int, ticket: bytes, reply: Reply) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            end = End(peer, ticket, self._carrier.join(ticket, SENDER, source))
            self._sending[ticket] = end
            if self._closed:
                self._abort(end, "this member has left the group")
            self._watch(peer, deadline)
            end.wait(end.channel.enqueued, deadline)
        except Exception as error:
            self._log(error, peer)
            if (joined := self._sending.get(ticket)) is not None:
                self._abort(joined, str(error))
            reply(_answer(f"the sender cannot join: {str(error) or 'not in time'}"))
        else:
            reply(_answer(None))

    def _send(self, peer: str, number: int, ticket: bytes, reply: Reply) -> None:
        deadline = time.monotonic() + self._timeout_s
        end = self._sending.get(ticket)
        if end is None or (kept := self._take(peer, number)) is None:
            reply(_answer("the sender does not have these tensors any more"))
            return
        answered = False
        try:
            with end.taking_turn(deadline):
                end.wait(kept.complete, deadline)
                kept.channel = end.channel
                end.channel.send(kept.pieces)
                reply(_answer(None))  # before it is enqueued: the first transfer waits for the other end
                answered = True
                end.wait(end.channel.enqueued, deadline)
                kept.pieces = []
        except Exception as error:
            self._log(error, peer)
            cause = str(error) or f"the sender did not complete a transfer within {self._timeout_s:g} s"
            self._end_at_receiver(end, cause, time.monotonic() + self._timeout_s)
            if not answered:
                reply(_answer(cause))

    def _log(self, error: Exception, peer: str) -> None:
        expected = isinstance(error, (Broken, TimedOut, PeerLost, RpcTimeout))
        logger.log(logging.DEBUG if expected else logging.ERROR, "%s cannot send to %s", self._me, peer, exc_info=error)

    def _end_at_receiver(self, end: End, cause: str, deadline: float) -> None:
        """End a channel at both ends, first at the receiver: it must not take for data what an aborted kernel leaves.

        A receiver that does not answer gives up by itself, at its own deadline.
        """
        if end.ended is None:
            with suppress(PeerLost, RpcTimeout, TimedOut):
                self._ask(end.peer, (END, end.ticket, cause), deadline)
        self._abort(end, cause)

    # --- receiving -----------------------------------------------------------------------------------------

    @checked
    def read(self, peer: str, descriptor: Any, shapes: Sequence[Shape], copies: Copies | None = None) -> Arrived:
        number, source, target, sizes = descriptor
        if target not in self._devices:
            raise LaneUnavailable(self.name, f"{peer!r} sends to cuda:{target}, which was not opened for this lane")
        deadline = time.monotonic() + self._timeout_s
        kinds = [(dtype, dtype.itemsize * math.prod(extents)) for dtype, extents in shapes]
        places = packing.pieces(kinds)
        expected = [sum(kinds[index][1] for index in place) for place in places]
        pieces = [[shapes[index] for index in place] for place in places]
        targets = whole_targets(copies, shapes, self._carrier.device(target))
        own = [targets[place[0]] if len(place) == 1 else None for place in places]
        try:
            if tuple(size for size in expected if size) != tuple(sizes):
                raise LaneUnavailable(
                    self.name, f"{peer!r} packs tensors in another way; run one release of raytorchrpc everywhere"
                )
            end = self._joined(peer, source, target, deadline)
            try:
                room = end.receive(
                    lambda: self._ask(peer, (FETCH, number, end.ticket), deadline), pieces, own, deadline
                )
            except (NotSent, torch.OutOfMemoryError):
                raise  # nothing was posted
            except BaseException as error:
                self._end_here(end, str(error) or type(error).__name__)  # the two ends may be out of step
                raise
        except BaseException as error:
            self.release(peer, descriptor)
            if isinstance(error, (Broken, NotSent, TimedOut, RpcTimeout)):
                late = f"it did not send tensors within {self._timeout_s:g} s"
                raise PeerLost(peer, late if isinstance(error, RpcTimeout) else str(error) or late) from error
            raise
        end.channel.make_current(room)
        return arrived(packing.unpack(room, places, shapes), copies)

    def _joined(self, peer: str, source: int, target: int, deadline: float) -> End:
        """The channel from a GPU of a peer to one of this process; made if there is none."""
        if (end := self._receiving.get((peer, source, target))) is not None:
            return end
        joining = self._joining.get(peer)
        if joining is None or self._closed:
            raise PeerLost(peer, "it is unknown here, or has left")
        if not joining.once("a transfer by nccl").acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimedOut
        try:
            return self._receiving.get((peer, source, target)) or self._join(peer, source, target, deadline)
        finally:
            joining.release()

    def _join(self, peer: str, source: int, target: int, deadline: float) -> End:
        watch = self._watch(peer, deadline)
        ticket = self._carrier.ticket()
        end = End(peer, ticket, self._carrier.join(ticket, RECEIVER, target))
        try:
            pending = self._begin(peer, (JOIN, source, ticket), deadline)
            end.wait(lambda: pending.wait(0) or end.channel.enqueued(), deadline)
            if (refusal := self._answer_to(pending, deadline)) is not None:
                raise LaneUnavailable(self.name, refusal)
            end.wait(end.channel.enqueued, deadline)
            self._receiving[peer, source, target] = end
            if watch.wait(0) or self._closed:  # ended meanwhile, before this channel was known
                raise Broken(_LOST)
        except BaseException as error:
            self._end_here(end, str(error) or type(error).__name__)
            raise
        return end

    def _end_here(self, end: End, cause: str) -> None:
        """End a channel as its receiver; the sender is told soon."""
        if end.ended is None:
            self._cleanup.leave(self._tell, end.peer, (END, end.ticket, f"the receiver gave up: {cause}"))
        self._abort(end, cause)

    def _tell(self, peer: str, request: tuple[Any, ...]) -> None:
        # The answer is not awaited: a peer that is suspended must not keep others from hearing of theirs.
        with suppress(PeerLost, RpcTimeout):  # it has ended, or will notice at its deadline
            self._begin(peer, request, time.monotonic() + _PATIENCE_S, caller_waits=False)

    def release(self, peer: str, descriptor: Any) -> None:
        # Only left to a thread: the garbage collector may call this at any point.
        self._cleanup.leave(self._tell, peer, (DISCARD, descriptor[0]))

    # --- the end ---------------------------------------------------------------------------------------------

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._control.disconnect(peer)
        self._forget(peer)

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        deadline = time.monotonic() + _PATIENCE_S
        for end in list(self._sending.values()):
            try:
                end.wait(end.channel.enqueued, deadline)
                end.wait(end.channel.mark(), deadline)
            except (Broken, TimedOut) as error:
                logger.debug("a transfer did not complete: %s", error)
                self._end_at_receiver(end, _LOST, deadline + _PATIENCE_S)
        self._control.close()
        for end in (*self._receiving.copy().values(), *self._sending.copy().values()):
            self._abort(end, _LOST)
        self._cleanup.stop()
        self._kept.clear()


def _unless_gone(serve: Callable[..., None], *request: Any) -> None:
    """Serve a request, unless its peer is gone: nobody waits for the answer then."""
    with suppress(PeerLost):
        serve(*request)


def _answer(refusal: str | None) -> Message:
    return Message((refusal,), NOTHING)


def make(setup: LaneSetup) -> NcclLane:
    """See registry.Lane.make. Sets NCCL's environment variables in this process, where the user has not."""
    # Also where all members share a host: NCCL reads them once, and the next group may span hosts.
    chosen = nccl_env.apply(setup.endpoint(), interface=setup.config.interface)
    logger.debug("%s: set for NCCL: %s", setup.member, chosen)
    return NcclLane(
        setup.member, setup.devices, partial(setup.control_lane, "nccl"), timeout_s=setup.config.rpc_timeout_s
    )
