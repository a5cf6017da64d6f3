"""Outgoing calls: how a member sends a call, and how its caller takes the outcome."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ray import ObjectRef

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.client.future import Call, call_back
from raytorchrpc.calls.client.retry import RetriedCall
from raytorchrpc.calls.client.stream import Stream
from raytorchrpc.calls.client.unretrieved import UnretrievedFailures
from raytorchrpc.calls.counters import CallCounters, counted_name
from raytorchrpc.calls.flow_control import CreditWindows
from raytorchrpc.calls.options import DEFAULTS, CallOptions, checked_timeout
from raytorchrpc.calls.payload import Payload, PayloadStep
from raytorchrpc.calls.peers import PeerRoute, PeerTable
from raytorchrpc.calls.protocol import ControlHeader, ReplyHeader, RequestHeader
from raytorchrpc.calls.receive_into import Receiver, receiver
from raytorchrpc.calls.scope import current_scope, on_loop
from raytorchrpc.calls.spans import CallSpan, Tracer
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
from raytorchrpc.process.workers import Deadlines, Workers
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded, body_bytes
from raytorchrpc.tensors.exceptions import decode_exception


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
        calls: OutgoingCalls,
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


#: A request that nobody waits for blocks at most this long, on a busy connection (seconds).
_NOTICE_S = 10.0
_NO_PAYLOAD = Payload(NOTHING)


class OutgoingCalls:
    """Sends the calls of one member. Thread-safe."""

    tracer: Tracer | None = None
    """While the group is traced."""

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        peers: PeerTable,
        payloads: PayloadStep,
        codec: Codec,
        credit: CreditWindows,
        counters: CallCounters,
        workers: Workers,
        deadlines: Deadlines,
    ) -> None:
        """``rank``: of this member. ``timeout_s``: of calls that do not say."""
        self._rank, self._timeout_s = rank, timeout_s
        self.peers, self.payloads, self.codec, self._credit = peers, payloads, codec, credit
        self.counters, self.workers, self.deadlines = counters, workers, deadlines
        self.unretrieved = UnretrievedFailures(peers, codec, workers, deadlines, payloads.cleanup)
        self._numbers = itertools.count(secrets.randbits(60))  # unlike those of an earlier process of this rank

    def call(
        self,
        target: Any,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        options: CallOptions = DEFAULTS,
    ) -> Call:
        """Send a call; returns before its result. Blocks while the credit window is full, and while tensors are copied.

        Raises what keeps the call from being sent.
        """
        if options.into is not None:
            options = options._replace(into=receiver(options.into))
        route = self.peers.route_for_call(target)
        retries = route.retries.get(method, 0) if options.retry is None else options.retry
        if not retries:
            return self.send(route, method, args, kwargs, options)
        label = f"{route.member.name}.{method}"

        def send(seconds: float) -> Call:
            again = options._replace(timeout=seconds, caller_waits=False)
            return self.send(self.peers.route_for_call(target), method, args, kwargs, again)

        budget = self.budget(route.member.name, method, options.timeout)
        call = RetriedCall(self.peers, self.workers, self.deadlines, target, label, send, budget, retries)
        if options.cancellable:
            call.cancellable, call.unretrieved = True, self.unretrieved
        return call

    def send(
        self, route: PeerRoute, method: str, args: tuple[Any, ...], kwargs: Any, options: CallOptions
    ) -> OutgoingCall:
        """As ``call``, once, by this route."""
        self.peers.check_present(route)
        peer, tracer, counted = route.member.name, self.tracer, counted_name(method, args)
        span = None if tracer is None else tracer.call(f"{peer}.{counted}", options.caller_waits)
        number = next(self._numbers) if options.cancellable else 0
        header, body = self._request(protocol.CALL, route, method, args, kwargs, options.timeout, number)
        size = body_bytes(body)
        credit, waited_s = self._credit.take(route.member, method, size, header.seconds)
        payload: Payload | None = None
        try:
            if waited_s:
                self.peers.check_open()
                self.peers.check_present(route)
                header = header._replace(seconds=max(0.001, header.seconds - waited_s))
            if span is not None:
                header = header._replace(mark=span.mark)
                span.lap()
            lane, payload = self.payloads.pack_request(route, method, body, options.share)
            started = time.monotonic()
            message = Message(tuple(header), payload.body, manifests=payload.manifests)
            pending = lane.call(
                peer, message, header.seconds, caller_waits=options.caller_waits, on_released=credit.give_back
            )
        except BaseException as error:
            credit.give_back()
            if payload is not None:
                payload.cancel()
            if span is not None:
                span.end(0, error)
            raise
        deadline = started + header.seconds
        call = OutgoingCall(self, route, method, lane, pending, started, deadline, payload, options, number)
        call.counted = counted
        self.counters.sent(peer, call.sent_by, counted, size)
        if span is not None:
            span.sent(lane.name, payload.lane, size, started)
            call.span = span
        return call

    def remote(
        self, target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        """Send a call whose result stays in the target; returns torch's RRef to it."""
        route = self.peers.route_for_call(target)
        self.peers.check_present(route)
        header, body = self._request(protocol.REMOTE, route, method, args, kwargs, timeout)
        lane: Any = route.fabric
        message = Message(tuple(header), host_device_copy.outbound(body, route.devices))
        rref = lane.remote(route.member.name, message, header.seconds)
        self.counters.sent(route.member.name, lane.name, method, body_bytes(body))
        return rref

    def control(self, route: PeerRoute, lane: MessageLane, kind: int, timeout_s: float, number: int = 0) -> Pending:
        """Send a request without a body to the peer's process itself: PING, WATCH or FETCH."""
        header = ControlHeader(kind, self._rank, route.token, number)
        return lane.call(route.member.name, Message(tuple(header), NOTHING), timeout_s)

    def notify(self, route: PeerRoute, lane: MessageLane, kind: int, number: int, *, later: bool = False) -> None:
        """As ``control``, but wait for no reply and ignore errors: a peer that is lost has nothing to stop.

        On an event loop a worker thread sends it: the connection may be busy for as long as a large message takes.
        ``later``: for finalizers, which may take no lock.
        """
        if later:
            self.payloads.cleanup.leave(self._notify, route, lane, kind, number)
        elif on_loop():
            self.workers.submit(self._notify, route, lane, kind, number)
        else:
            self._notify(route, lane, kind, number)

    def _notify(self, route: PeerRoute, lane: MessageLane, kind: int, number: int) -> None:
        with contextlib.suppress(RayTorchRpcError):
            self.control(route, lane, kind, _NOTICE_S, number)

    def in_flight(self) -> dict[str, tuple[int, int]]:
        """By peer: calls that have no reply yet, and bytes of their arguments; see CreditWindows.in_flight."""
        return {route.member.name: self._credit.in_flight(route.member.rank) for route in self.peers.routes}

    def _request(
        self,
        kind: int,
        route: PeerRoute,
        method: str,
        args: tuple[Any, ...],
        kwargs: Any,
        timeout: float | None,
        number: int = 0,
    ) -> tuple[RequestHeader, Encoded]:
        budget = self.budget(route.member.name, method, timeout)
        until = time.monotonic() + budget if route.same_clock else None
        keep_graph = torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT
        if (args and ObjectRef in map(type, args)) or (kwargs and ObjectRef in map(type, kwargs.values())):
            raise _object_ref(f"{route.member.name}.{method}", args, kwargs or {})
        try:
            body = self.codec.encode((args, kwargs or {}) if args or kwargs else None, keep_graph=keep_graph, own=True)
        except SerializationError as error:
            label = f"{route.member.name}.{method}"
            raise SerializationError(self.codec.explain_argument(label, args, kwargs or {}, error)) from error
        path = current_scope.get().path
        return RequestHeader(kind, self._rank, route.token, method, path, budget, until, None, number), body

    def budget(self, peer: str, method: str, timeout: float | None) -> float:
        """Seconds until the deadline of a call that is made now."""
        budget = self._timeout_s if timeout is None else checked_timeout(timeout)
        deadline = current_scope.get().deadline
        if deadline is not None:
            budget = min(budget, deadline - time.monotonic())
        if budget <= 0:
            raise RpcTimeout(f"no time left to call {peer}.{method}: the deadline has passed")
        return budget


def _object_ref(label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SerializationError:
    """The error for an argument that is an ObjectRef: Ray would pass its value, and we would pass the reference."""
    named = [*((f"argument {place}", value) for place, value in enumerate(args)), *kwargs.items()]
    which = next(name for name, value in named if type(value) is ObjectRef)
    return SerializationError(
        f"{which} of {label} is an ObjectRef, which direct calls do not resolve: pass ray.get(ref), or its method call "
        f"as .remote(ref); to pass the reference itself, put it in a list: [ref]"
    )
