"""A call that has been sent, up to its outcome. Its result may have to be fetched over another lane."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from raytorchrpc.calls import incoming
from raytorchrpc.calls.counters import CallCounters
from raytorchrpc.calls.event_loops import Token
from raytorchrpc.calls.out_of_band import Payload, PayloadSplitter, joined, owned
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.receive_into import Receiver
from raytorchrpc.calls.spans import CallSpan
from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError, RpcTimeout, SerializationError, shown
from raytorchrpc.lanes.base import MessageLane, Pending
from raytorchrpc.process import fork
from raytorchrpc.process.deadlines import Deadlines
from raytorchrpc.process.deferred_cleanup import DeferredCleanup
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors.codec import Codec, Encoded
from raytorchrpc.tensors.exceptions import decode_exception

logger = logging.getLogger(__name__)


class Caller(Protocol):
    """The member that sent a call: what the call needs of it until its outcome is taken."""

    codec: Codec
    counters: CallCounters
    workers: Workers
    deadlines: Deadlines
    cleanup: DeferredCleanup
    splitter: PayloadSplitter

    def system(self, route: PeerRoute, lane: MessageLane, kind: int, *fields: Any, timeout_s: float) -> Pending:
        """Send a request of the group's own."""

    def why_gone(self, route: PeerRoute) -> str | None:
        """Why the process that a route leads to cannot be called any more; None if it can, as far as is known here."""

    def note_weight(self, rank: int, method: str, heavy: bool) -> None:
        """Remember whether a method's results need the lane for tensors."""


class CallUnderWay:
    """What a Future needs of its call."""

    span: CallSpan | None = None
    """If it is traced."""
    peer_was_lost = False
    """Once the outcome was taken: it is the loss of the peer, and no exception of the method's."""

    def __init__(
        self,
        local: Caller,
        route: PeerRoute,
        method: str,
        lane: MessageLane,
        pending: Pending,
        started: float,
        deadline: float,
        loop_token: Token | None,
        shipped: Payload,
        keep: bool = False,
        into: Receiver | None = None,
    ) -> None:
        self._local, self._route, self._method = local, route, method
        self._lane, self._pending = lane, pending
        self._started, self._deadline = started, deadline
        self.loop_token = loop_token
        self._shipped, self._keep, self._into = shipped, keep, into
        self._sent_by = shipped.lane or lane.name
        self._taken = False
        self._lock = threading.Lock()
        self._fetch: Pending | None = None
        self._error: Exception | None = None

    @property
    def label(self) -> str:
        """member.method, for messages."""
        return f"{self._route.member.name}.{self._method}"

    def remaining(self) -> float:
        """Seconds until the call's deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    # What wait_serving waits for.

    def wait(self, timeout_s: float) -> bool:
        """Block until the outcome can be taken, at most ``timeout_s``."""
        until = time.monotonic() + timeout_s
        if not self._pending.wait(timeout_s):
            return False
        final = self._final()
        return final is None or final.wait(max(0.0, until - time.monotonic()))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, which is short, when the outcome can be taken."""

        def arrived() -> None:
            final = self._final()
            if final is None or final is self._pending:
                callback()
            else:
                final.add_done_callback(callback)

        self._pending.add_done_callback(arrived)

    def _final(self) -> Pending | None:
        """What carries the result: the call itself, or the fetch that follows it (begun here); None if it failed."""
        with self._lock:
            if self._fetch is None and self._error is None:
                try:
                    self._fetch = self._begin_fetch()
                except Exception as error:
                    self._error = error.with_traceback(None)  # it would hold this call, which holds it
            return self._fetch

    def _begin_fetch(self) -> Pending:
        message = self._pending.take()
        if message.header[0] != incoming.KEPT:
            return self._pending
        self._local.note_weight(self._route.member.rank, self._method, heavy=True)
        self._lane = self._route.tensors
        number, left = message.header[1], max(0.001, self.remaining())
        try:
            return self._local.system(self._route, self._lane, incoming.FETCH, number, timeout_s=left)
        except RayTorchRpcError as error:
            raise self._since_answered(error) from error

    def _since_answered(self, error: RayTorchRpcError) -> RayTorchRpcError:
        """What became of a result that has been announced. The method ran, whatever kept its result from arriving."""
        if isinstance(error, LaneUnavailable) and (why := self._local.why_gone(self._route)) is not None:
            return PeerLost(self._route.member.name, f"{why}; its result had not been fetched")
        if isinstance(error, PeerLost) and not error.may_have_run:
            return PeerLost(error.peer, error.cause)
        return error

    def lost(self) -> PeerLost | None:
        """Why the peer was lost meanwhile, if it was; only once ``wait`` has returned True. Takes nothing."""
        final = self._final()
        if final is None:
            return self._error if isinstance(self._error, PeerLost) else None
        try:
            final.take()
        except PeerLost as lost:
            return lost.with_traceback(None)
        except RayTorchRpcError:
            return None
        return None

    def outcome(self) -> tuple[Any, BaseException | None]:
        """Unpack the result, once it is there: (value, None) or (None, what was raised). To be called once."""
        final = self._final()
        if final is None:
            return self._failed()
        size, came_by, error, value = 0, self._sent_by, None, None
        try:
            message = final.take()
            self._taken = True
            message.make_current()
            for export in self._shipped.exports:
                export.finished()
            body = message.body
            if body.tensors:
                came_by = self._lane.name
            if message.manifests:
                came_by = message.manifests[0][0]
            if message.manifests and self.span is not None:
                self.span.lap()
            into = self._into if message.header[0] == incoming.OK else None
            if into is not None:
                parcels = self._local.splitter.receive(self._route.member.name, message.manifests)
                body, value = into.receive(self._local.codec, body, parcels, self.label, self._keep)
            else:
                if message.manifests:
                    body = joined(body, self._local.splitter.receive(self._route.member.name, message.manifests))
                if self._keep:
                    body = owned(body)
            if message.manifests and self.span is not None:
                self.span.fetched(came_by)
            size = body_bytes(body)
            if message.header[0] == incoming.OK:
                if self._lane is not self._route.calls and not message.body.tensors:
                    self._local.note_weight(self._route.member.rank, self._method, heavy=False)
                if into is None:
                    value = self._local.codec.decode(*body)
            else:
                error = decode_exception(self._local.codec, body, self.label)
                # Not the method's: the server refused it.
                self.peer_was_lost = (
                    isinstance(error, PeerLost) and error.peer == self._route.member.name and not error.may_have_run
                )
                if final is not self._pending and isinstance(error, RayTorchRpcError):
                    error = self._since_answered(error)
        except RpcTimeout:
            error = self._late()
        except Exception as failure:
            error = failure
            if isinstance(failure, SerializationError) or not isinstance(failure, RayTorchRpcError):
                # the result's own unpickling code
                error = SerializationError(f"the result of {self.label} cannot be unpickled here: {shown(failure)}")
                error.__cause__ = failure
            elif self._taken or final is not self._pending:
                error = self._since_answered(failure)
            self.peer_was_lost = isinstance(error, PeerLost)
        self._count(size, came_by, error)
        return value, error

    def expire(self) -> tuple[None, RpcTimeout]:
        """The outcome of a call whose deadline has passed."""
        late = self._late()
        self._count(0, self._sent_by, late)
        return None, late

    def _late(self) -> RpcTimeout:
        return RpcTimeout(f"{self.label} did not answer by its deadline; it may still run there")

    def _failed(self) -> tuple[None, Exception]:
        """The outcome of a call whose lane brought no result. Not raised here: the traceback would hold the call."""
        error = self._error
        assert error is not None
        if isinstance(error, RpcTimeout):
            error = self._late()
        elif not isinstance(error, (RayTorchRpcError, MemoryError)):
            error = SerializationError(f"the answer of {self.label} cannot be read here: {shown(error)}")
        self.peer_was_lost = isinstance(error, PeerLost)
        self._count(0, self._sent_by, error)
        return None, error

    def __del__(self) -> None:
        # Nobody asked for the result, or not in time: what it brings beside the message has to be given back.
        if not self._taken and self._error is None and not fork.forked():  # then it is the parent's
            with contextlib.suppress(Exception):
                local = self._local
                local.cleanup.leave(_give_back_later, local.splitter, self._route.member.name, self._pending)

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback``, which is short, when the deadline passes; returns what prevents it."""
        return self._local.deadlines.at(self._deadline, callback)

    def _count(self, size: int, came_by: str, error: BaseException | None) -> None:
        elapsed = time.monotonic() - self._started
        self._local.counters.finished(self._route.member.name, self._sent_by, came_by, size, elapsed, error)
        if self.span is not None:
            self.span.end(size, error)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Run a user's callback on a worker."""
        self._local.workers.submit(call_back, callback, argument)


def _give_back_later(splitter: PayloadSplitter, peer: str, pending: Pending) -> None:
    pending.add_done_callback(lambda: _give_back(splitter, peer, pending))


def _give_back(splitter: PayloadSplitter, peer: str, pending: Pending) -> None:
    try:
        message = pending.take()
    except RayTorchRpcError as error:  # it failed: nothing came
        error.__traceback__ = None  # nobody else has seen it; its frames lead to the call, which leads to it
        return
    with contextlib.suppress(RayTorchRpcError):
        splitter.receive(peer, message.manifests).clear()


class Awaitable(Protocol):
    """A call, perhaps a repeated one, on an event loop."""

    def remaining(self) -> float:
        """Seconds until its deadline."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """See CallUnderWay."""


def until_done(call: Awaitable) -> Generator[Any, None, None]:
    """For ``__await__``: until the call's outcome can be taken, or its deadline has passed."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def arrived() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(wake)

    call.add_done_callback(arrived)
    deadline = loop.call_later(call.remaining(), wake)  # a peer that is stuck sends nothing
    try:
        yield from woken
    finally:
        deadline.cancel()


def call_back(callback: Callable[[Any], object], argument: Any) -> None:
    """Run a user's callback; what it raises is logged."""
    try:
        callback(argument)
    except BaseException:
        logger.exception("a callback of %r raised", argument)


def body_bytes(body: Encoded) -> int:
    """Bytes that cross for this body: the pickle and the tensors' data."""
    return len(body.payload) + sum(tensor.nbytes for tensor in body.tensors)
