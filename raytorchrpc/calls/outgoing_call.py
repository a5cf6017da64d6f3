"""One outgoing call, from the moment it was sent to its outcome."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from raytorchrpc.calls import protocol
from raytorchrpc.calls.future import Call, call_back
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.out_of_band import Payload
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.protocol import ReplyHeader
from raytorchrpc.calls.receive_into import Receiver, receiver
from raytorchrpc.calls.sender import Sender
from raytorchrpc.calls.spans import CallSpan
from raytorchrpc.calls.stream import Stream
from raytorchrpc.errors import (
    CancelledError,
    ConfigurationError,
    LaneUnavailable,
    PeerLost,
    RayTorchRpcError,
    RpcTimeout,
    SerializationError,
    shown,
)
from raytorchrpc.lanes.base import Message, MessageLane, Pending
from raytorchrpc.process import fork
from raytorchrpc.tensors.codec import NOTHING, Encoded, body_bytes
from raytorchrpc.tensors.exceptions import decode_exception

_NO_PAYLOAD = Payload(NOTHING)


class OutgoingCall(Call):
    """One call that was sent, up to its outcome. Its result may have to be fetched over another lane."""

    span: CallSpan | None = None
    """If it is traced."""
    counted = ""
    """The name under which it is counted."""
    _is_reported = False
    """A failure is logged if this is dropped."""

    def __init__(
        self,
        calls: Sender,
        route: PeerRoute,
        method: str,
        lane: MessageLane,
        pending: Pending,
        started: float,
        deadline: float,
        payload: Payload,
        options: CallOptions,
        number: int = 0,
    ) -> None:
        """``number``: see ``RequestHeader.number``."""
        self._taken = False
        self._error: Exception | None = None
        self._calls, self._route, self._method = calls, route, method
        self._lane, self._pending = lane, pending
        self._started, self._deadline = started, deadline
        self._payload, self._options = payload, options
        self._number = number
        if number:
            self.cancellable = self._is_reported = True
        self.sent_by = payload.lane or lane.name
        """The lane of its payload."""
        self._lock = threading.Lock()
        self._fetch: Pending | None = None

    @property
    def label(self) -> str:
        return f"{self._route.member.name}.{self._method}"

    def remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        if not self._pending.wait(timeout_s):
            return False
        final = self._final()
        return final is None or final is self._pending or final.wait(max(0.0, until - time.monotonic()))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        def arrived() -> None:
            final = self._final()
            if final is None or final is self._pending:
                callback()
            else:
                final.add_done_callback(callback)

        self._pending.add_done_callback(arrived)

    def _final(self) -> Pending | None:
        """The request whose reply is the result: the call or, sent here, the fetch that follows it; None: it failed."""
        final = self._fetch
        if final is not None:
            return final
        with self._lock:
            if self._fetch is None and self._error is None:
                try:
                    self._fetch = self._begin_fetch()
                except Exception as error:
                    self._error = error.with_traceback(None)  # it would hold this call, which holds it
            return self._fetch

    def _begin_fetch(self) -> Pending:
        header = ReplyHeader(*self._pending.take().header)
        if header.kind != protocol.KEPT:
            return self._pending
        self._route.heavy_results.add(self._method)
        self._lane = self._route.tensors
        left = max(0.001, self.remaining())
        try:
            return self._calls.control(self._route, self._lane, protocol.FETCH, left, header.number)
        except RayTorchRpcError as error:
            raise self._after_reply(error) from error

    def _after_reply(self, error: RayTorchRpcError) -> RayTorchRpcError:
        """The error for a result that was announced and did not arrive: the method has run."""
        if isinstance(error, LaneUnavailable) and (why := self._calls.peers.why_unreachable(self._route)) is not None:
            return PeerLost(self._route.member.name, f"{why}; its result had not been fetched")
        if isinstance(error, PeerLost) and not error.may_have_run:
            return PeerLost(error.peer, error.cause)
        return error

    def cancel(self) -> None:
        self._count(0, self.sent_by, CancelledError())
        self._is_reported = False
        self._taken, self._payload = True, _NO_PAYLOAD
        self._discard(self._fetch or self._pending)
        if self._number:
            self._calls.notify(self._route, self._lane, protocol.CANCEL, self._number)

    def lost(self) -> PeerLost | None:
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

    def forget_failure(self) -> None:
        self._is_reported = False

    def outcome(self) -> tuple[Any, BaseException | None]:
        self._is_reported = False
        final = self._final()
        if final is None:
            return self._failed()
        size, came_by, value = 0, self.sent_by, None
        error: BaseException | None = None
        try:
            message = final.take()
            self._taken = True
            message.make_current()
            for export in self._payload.exports:
                export.finished()
            if message.body.tensors:
                came_by = self._lane.name
            if message.manifests:
                came_by = message.manifests[0][0]
            header = ReplyHeader(*message.header)
            raised = header.kind == protocol.RAISED
            wanted = self._options.into if header.kind == protocol.OK else None
            into = None if wanted is None else receiver(wanted)
            body, size, value = self._body(message, came_by, into)
            if raised:
                error = self._raised(body, fetched=final is not self._pending)
            else:
                if self._lane is not self._route.calls and not message.body.tensors:
                    self._route.heavy_results.discard(self._method)
                if header.kind == protocol.STREAM:
                    value = self._stream(header)
                elif into is None:
                    value = self._calls.codec.decode(*body)
        except RpcTimeout:
            error = self._late()
        except Exception as failure:
            error = failure
            if isinstance(failure, SerializationError) or not isinstance(failure, RayTorchRpcError):
                # the result's own unpickling code
                error = SerializationError(f"the result of {self.label} cannot be unpickled here: {shown(failure)}")
                error.__cause__ = failure
            elif self._taken or final is not self._pending:
                error = self._after_reply(failure)
            self.peer_was_lost = isinstance(error, PeerLost)
        self._count(size, came_by, error)
        return value, error

    def _body(self, message: Message, came_by: str, into: Receiver | None) -> tuple[Encoded, int, Any]:
        """The body of the reply with all its tensors, its bytes, and the value received into ``into``, if given."""
        calls, options, body, value = self._calls, self._options, message.body, None
        span = self.span if message.manifests else None
        if span is not None:
            span.lap()
        pending = calls.payloads.receive(self._route, message) if message.manifests else []
        if into is None:
            body = calls.payloads.unpack(message, pending, keep=options.keep)
            size = body_bytes(body)
        else:
            size, value = into.receive(calls.codec, body, pending, self.label, options.keep)
        if span is not None:
            span.fetched(came_by)
        return body, size, value

    def _stream(self, header: ReplyHeader) -> Stream[Any]:
        """The stream that the call has opened."""
        ahead = header.ahead if self._options.into is None else 0
        stream: Stream[Any] = Stream(self._calls, self._route, self._method, header.number, ahead, self._options)
        if self._options.into is not None:
            stream.close()
            raise ConfigurationError(f"{self.label} is a generator: into= needs a method that returns its result")
        return stream

    def _raised(self, body: Encoded, fetched: bool) -> BaseException:
        """The exception in a reply."""
        error = decode_exception(self._calls.codec, body, self.label)
        # An exception of the callee's server, which refused the call, and not of the method.
        self.peer_was_lost = (
            isinstance(error, PeerLost) and error.peer == self._route.member.name and not error.may_have_run
        )
        return self._after_reply(error) if fetched and isinstance(error, RayTorchRpcError) else error

    def expire(self) -> tuple[None, RpcTimeout]:
        self._is_reported = False
        late = self._late()
        self._count(0, self.sent_by, late)
        return None, late

    def _late(self) -> RpcTimeout:
        return RpcTimeout(f"{self.label} did not answer by its deadline; it may still run there")

    def _failed(self) -> tuple[None, Exception]:
        """The outcome of a call without a reply. Not raised here: the traceback would hold the call."""
        error = self._error
        assert error is not None
        if isinstance(error, RpcTimeout):
            error = self._late()
        elif not isinstance(error, (RayTorchRpcError, MemoryError)):
            error = SerializationError(f"the answer of {self.label} cannot be read here: {shown(error)}")
        self.peer_was_lost = isinstance(error, PeerLost)
        self._count(0, self.sent_by, error)
        return None, error

    def __del__(self) -> None:
        # Nobody took the result, or not in time: out-of-band tensors that arrive with it have to be discarded.
        # An interrupt may have ended __init__. In a fork the call is the parent's.
        with contextlib.suppress(Exception):
            if self._taken or fork.forked():
                return
            if self._is_reported:
                final, member = self._fetch or self._pending, self._route.member
                self._calls.unretrieved.watch(final, member.name, self._method, self._deadline)
            if self._error is None:
                self._discard(self._pending)

    def _discard(self, pending: Pending) -> None:
        calls, route = self._calls, self._route
        calls.payloads.discard_reply(
            route, pending, partial(calls.notify, route, route.calls, protocol.CLOSE, later=True)
        )

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._calls.deadlines.at(self._deadline, callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        self._calls.workers.submit(call_back, callback, argument)

    def _count(self, size: int, came_by: str, error: BaseException | None) -> None:
        elapsed = time.monotonic() - self._started
        peer, lane = self._route.member.name, self.sent_by
        self._calls.counters.finished(peer, lane, self.counted, came_by, size, elapsed, error)
        if self.span is not None:
            self.span.end(size, error)
