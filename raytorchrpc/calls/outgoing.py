"""Outgoing calls: how a member sends a call, and how its caller takes the outcome."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from typing import Any

from ray import ObjectRef

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.counters import CallCounters, counted_name
from raytorchrpc.calls.event_loops import on_loop
from raytorchrpc.calls.flow_control import CreditWindows
from raytorchrpc.calls.future import Call
from raytorchrpc.calls.options import DEFAULTS, CallOptions, checked_timeout
from raytorchrpc.calls.out_of_band import Payload
from raytorchrpc.calls.outgoing_call import OutgoingCall
from raytorchrpc.calls.payload import PayloadStep
from raytorchrpc.calls.peer_table import PeerTable
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.protocol import ControlHeader, RequestHeader
from raytorchrpc.calls.receive_into import receiver
from raytorchrpc.calls.retry import RetriedCall
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.calls.unretrieved import UnretrievedFailures
from raytorchrpc.errors import (
    RayTorchRpcError,
    RpcTimeout,
    SerializationError,
)
from raytorchrpc.lanes.base import Message, MessageLane, Pending
from raytorchrpc.process.workers import Deadlines, Workers
from raytorchrpc.tensors import host_device_copy, unpicklable
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded, body_bytes

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
            raise SerializationError(unpicklable.argument(self.codec, label, args, kwargs or {}, error)) from error
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
