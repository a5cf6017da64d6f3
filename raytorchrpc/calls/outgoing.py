"""Outgoing calls: how a member sends a call, and how its caller takes the outcome."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.counters import CallCounters
from raytorchrpc.calls.event_loops import Token, token_on_loop
from raytorchrpc.calls.flow_control import CreditWindows
from raytorchrpc.calls.future import Call, call_back
from raytorchrpc.calls.options import DEFAULTS, CallOptions, checked_timeout
from raytorchrpc.calls.out_of_band import Payload
from raytorchrpc.calls.payload import PayloadStep
from raytorchrpc.calls.peer_table import PeerTable
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.protocol import ControlHeader, ReplyHeader, RequestHeader
from raytorchrpc.calls.receive_into import Receiver, receiver
from raytorchrpc.calls.retry import RetriedCall
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.calls.spans import CallSpan, Tracer
from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError, RpcTimeout, SerializationError, shown
from raytorchrpc.lanes.base import Message, MessageLane, Pending
from raytorchrpc.process import fork
from raytorchrpc.process.deadlines import Deadlines
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors import host_device_copy, unpicklable
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded, body_bytes
from raytorchrpc.tensors.exceptions import decode_exception


class OutgoingCall(Call):
    """One call that was sent, up to its outcome. Its result may have to be fetched over another lane."""

    span: CallSpan | None = None
    """If it is traced."""

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
        loop_token: Token | None = None,
    ) -> None:
        self._calls, self._route, self._method = calls, route, method
        self._lane, self._pending = lane, pending
        self._started, self._deadline = started, deadline
        self._payload, self._options = payload, options
        self.loop_token = loop_token
        self.sent_by = payload.lane or lane.name
        """The lane of its payload."""
        self._taken = False
        self._lock = threading.Lock()
        self._fetch: Pending | None = None
        self._error: Exception | None = None

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

    def outcome(self) -> tuple[Any, BaseException | None]:
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
            raised = ReplyHeader(*message.header).kind == protocol.RAISED
            into = None if raised or self._options.into is None else receiver(self._options.into)
            body, value = self._body(message, came_by, into)
            size = body_bytes(body)
            if raised:
                error = self._raised(body, fetched=final is not self._pending)
            else:
                if self._lane is not self._route.calls and not message.body.tensors:
                    self._route.heavy_results.discard(self._method)
                if into is None:
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

    def _body(self, message: Message, came_by: str, into: Receiver | None) -> tuple[Encoded, Any]:
        """The body of the reply with all its tensors, and the value received into ``into``, if given."""
        calls, options, value = self._calls, self._options, None
        span = self.span if message.manifests else None
        if span is not None:
            span.lap()
        pending = calls.payloads.receive(self._route, message) if message.manifests else []
        if into is None:
            body = calls.payloads.unpack(message, pending, keep=options.keep)
        else:
            body, value = into.receive(calls.codec, message.body, pending, self.label, options.keep)
        if span is not None:
            span.fetched(came_by)
        return body, value

    def _raised(self, body: Encoded, fetched: bool) -> BaseException:
        """The exception in a reply."""
        error = decode_exception(self._calls.codec, body, self.label)
        # An exception of the callee's server, which refused the call, and not of the method.
        self.peer_was_lost = (
            isinstance(error, PeerLost) and error.peer == self._route.member.name and not error.may_have_run
        )
        return self._after_reply(error) if fetched and isinstance(error, RayTorchRpcError) else error

    def expire(self) -> tuple[None, RpcTimeout]:
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
        if not self._taken and self._error is None and not fork.forked():  # in a fork the call is the parent's
            with contextlib.suppress(Exception):
                self._calls.payloads.discard_reply(self._route, self._pending)

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._calls.deadlines.at(self._deadline, callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        self._calls.workers.submit(call_back, callback, argument)

    def _count(self, size: int, came_by: str, error: BaseException | None) -> None:
        elapsed = time.monotonic() - self._started
        self._calls.counters.finished(self._route.member.name, self.sent_by, came_by, size, elapsed, error)
        if self.span is not None:
            self.span.end(size, error)


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
            return self._send(route, method, args, kwargs, options)
        label = f"{route.member.name}.{method}"

        def send(seconds: float) -> Call:
            again = options._replace(timeout=seconds, caller_waits=False)
            return self._send(self.peers.route_for_call(target), method, args, kwargs, again)

        budget = self._budget(route.member.name, method, options.timeout)
        return RetriedCall(self.peers, self.workers, self.deadlines, target, label, send, budget, retries)

    def _send(
        self, route: PeerRoute, method: str, args: tuple[Any, ...], kwargs: Any, options: CallOptions
    ) -> OutgoingCall:
        self.peers.check_present(route)
        peer, tracer = route.member.name, self.tracer
        span = None if tracer is None else tracer.call(f"{peer}.{method}", options.caller_waits)
        loop_token = token_on_loop()
        header, body = self._request(protocol.CALL, route, method, args, kwargs, options.timeout, loop_token)
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
        call = OutgoingCall(self, route, method, lane, pending, started, deadline, payload, options, loop_token)
        self.counters.sent(peer, call.sent_by, size)
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
        header, body = self._request(protocol.REMOTE, route, method, args, kwargs, timeout, None)
        lane: Any = route.fabric
        message = Message(tuple(header), host_device_copy.outbound(body, route.devices))
        rref = lane.remote(route.member.name, message, header.seconds)
        self.counters.sent(route.member.name, lane.name, body_bytes(body))
        return rref

    def control(self, route: PeerRoute, lane: MessageLane, kind: int, timeout_s: float, number: int = 0) -> Pending:
        """Send a request without a body to the peer's process itself: PING, WATCH or FETCH."""
        header = ControlHeader(kind, self._rank, route.token, number)
        return lane.call(route.member.name, Message(tuple(header), NOTHING), timeout_s)

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
        loop_token: Token | None,
    ) -> tuple[RequestHeader, Encoded]:
        budget = self._budget(route.member.name, method, timeout)
        until = time.monotonic() + budget if route.same_clock else None
        keep_graph = torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT
        try:
            body = self.codec.encode((args, kwargs or {}) if args or kwargs else None, keep_graph=keep_graph, own=True)
        except SerializationError as error:
            label = f"{route.member.name}.{method}"
            raise SerializationError(unpicklable.argument(self.codec, label, args, kwargs or {}, error)) from error
        path = current_scope.get().path
        if loop_token is not None:
            path = (*path, loop_token)
        return RequestHeader(kind, self._rank, route.token, method, path, budget, until), body

    def _budget(self, peer: str, method: str, timeout: float | None) -> float:
        """Seconds until the deadline of a call that is made now."""
        budget = self._timeout_s if timeout is None else checked_timeout(timeout)
        deadline = current_scope.get().deadline
        if deadline is not None:
            budget = min(budget, deadline - time.monotonic())
        if budget <= 0:
            raise RpcTimeout(f"no time left to call {peer}.{method}: the deadline has passed")
        return budget
