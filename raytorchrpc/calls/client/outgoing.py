"""Outgoing calls: how a member sends them, what phases each goes through, and how its caller takes the outcome."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
import traceback
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.client.future import call_back
from raytorchrpc.calls.client.stream import NEXT, Stream
from raytorchrpc.calls.counters import PACKAGES_OWN, CallCounters, counted_name
from raytorchrpc.calls.flow_control import CreditWindows
from raytorchrpc.calls.options import DEFAULTS, MAX_TIMEOUT_S, CallOptions, checked_timeout
from raytorchrpc.calls.payload import Payload, Payloads, is_out_of_band, tensor_lane, with_rrefs
from raytorchrpc.calls.peers import PeerRoute, PeerTable
from raytorchrpc.calls.protocol import ControlHeader, ReplyHeader, RequestHeader
from raytorchrpc.calls.receive_into import receiver
from raytorchrpc.calls.scope import current_scope, on_loop
from raytorchrpc.calls.spans import Span, Tracer
from raytorchrpc.errors import (
    CancelledError,
    ConfigurationError,
    LaneUnavailable,
    PeerLost,
    RayTorchRpcError,
    RpcTimeout,
    SerializationError,
    no_memory,
    shown,
)
from raytorchrpc.lanes.base import Message, MessageLane, Pending
from raytorchrpc.process import fork, threads
from raytorchrpc.process.completion import Completion, nothing
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.switch_interval import SwitchInterval
from raytorchrpc.process.workers import Deadlines, Workers
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded, body_bytes
from raytorchrpc.tensors.cuda_streams import follow_thread
from raytorchrpc.tensors.exceptions import decode_exception
from raytorchrpc.tensors.kept_errors import untraced

#: A request that nobody waits for blocks at most this long, on a busy connection (seconds).
_NOTICE_S = 10.0
#: Packing that takes no longer than this is not counted, since every call would pay for it (seconds).
_SOON_S = 0.005
_NO_PAYLOAD, _OK = Payload(NOTHING), ReplyHeader(protocol.OK)
NO_REPLY = Message(tuple(_OK), NOTHING)


class Phase(Enum):
    """Where a call is; ``OutgoingCall._advance`` moves it on."""

    UNSENT = "its request was not sent"
    SENT = "its request is in flight"
    LOST = "its peer was lost, and it is sent again once the peer is back"
    ARRIVED = "its reply is here"
    FAILED = "no reply comes"
    TAKEN = "its outcome was taken, or is not wanted"


UNSENT, SENT, LOST, ARRIVED, FAILED, TAKEN = Phase  # to look them up there takes longer
_UNDER_WAY = (SENT, ARRIVED)
_DECIDED = (ARRIVED, FAILED, TAKEN)


class OutgoingCall:
    """One call, from its first request to its outcome: what a ``Future`` waits for. Thread-safe."""

    _lane: MessageLane
    """Of its request, once that is sent."""
    _deadline: float

    def __init__(self, calls: OutgoingCalls, route: PeerRoute, method: str, options: CallOptions) -> None:
        self._calls, self._route, self._method, self._options = calls, route, method, options
        self._lock = Lock()
        self._phase, self._payload = UNSENT, _NO_PAYLOAD
        self._message, self._header = NO_REPLY, _OK
        self._pending: Any = None
        """Complete when the call can move on."""
        self._error: BaseException | None = None
        """Why it was lost or has failed."""
        self._span: Span | None = None
        """If it is traced."""
        self.cancellable = self._is_reported = False
        """Whether ``cancel`` reaches the callee; whether a failure is logged if this is dropped."""
        self._may_have_run = self._is_cancelled = False
        self._counted = self._sent_by = ""
        """The name under which it is counted; the lane of its payload."""
        self._started, self._number, self._retries = 0.0, 0, 0

    def send_often(self, args: tuple[Any, ...], kwargs: Any, retries: int, target: Any) -> None:
        """As ``send``, and again up to ``retries`` times if ``target`` is lost; each time once that is back."""
        peer, options = self._route.member.name, self._options
        self._deadline = time.monotonic() + self._calls.budget(peer, self._method, options.timeout)
        self._retries = retries
        self._keep(args, kwargs, target)
        self.cancellable = self._is_reported = options.cancellable
        self._pending = Completion()
        self._pending.complete()  # nothing to wait for, if it is not sent at all
        self._attempt()

    def _keep(self, args: tuple[Any, ...], kwargs: Any, target: Any) -> None:
        """Keep what it takes to send it from another thread: it stays in its chain of calls and keeps its deadline."""
        self._arguments, self._target = (args, kwargs), target
        self._scope, self._context = current_scope.get(), torch_internals.current_autograd_context()
        self._follow = follow_thread()

    def _attempt(self) -> None:
        try:
            self.send(*self._arguments, max(0.001, self.remaining()))
        except PeerLost as lost:
            with self._lock:
                self._lose(untraced(lost))

    def send(self, args: tuple[Any, ...], kwargs: Any, timeout: float | None) -> None:
        """Send its request. Raises what keeps it from being sent."""
        began = time.monotonic()
        calls, route, method, options = self._calls, self._route, self._method, self._options
        if calls.interval is not None and not calls.interval.used:
            calls.interval.shorten()
        calls.peers.check_present(route, timeout)
        peer, tracer = route.member.name, calls.tracer
        span = None
        if tracer is not None:
            span = tracer.call(f"{peer}.{counted_name(method, args)}", options.caller_waits)
        number = next(calls.numbers) if options.cancellable else 0
        header, body, in_context = calls.request(protocol.CALL, route, method, args, kwargs, timeout, number)
        size = body_bytes(body) if body.tensors else len(body.payload)
        credit, has_waited = calls.credit.take(route.member, method, size, began + header.seconds)
        payload: Payload | None = None
        try:
            if has_waited:
                calls.peers.check_open()
                calls.peers.check_present(route)
            if span is not None:
                header = header._replace(mark=span.mark)
                span.lap()
            lane, payload = calls.payloads.pack_request(route, body, options.share, in_context)
            started = time.monotonic()
            if (took := started - began) > _SOON_S:
                if took >= header.seconds:
                    raise RpcTimeout(f"{self.label} was not sent: its deadline passed before its arguments were packed")
                header = header._replace(seconds=header.seconds - took)
            message = Message(tuple(header), payload.body, manifests=payload.manifests, take_back=payload.cancel)
            pending = lane.call(
                peer, message, header.seconds, caller_waits=options.caller_waits, on_released=credit.give_back
            )
        except BaseException as error:
            credit.give_back()
            if payload is not None:
                payload.cancel()
            if span is not None:
                span.end(bytes_in=0, error=type(error).__name__)
            raise
        self._lane, self._payload, self._number = lane, payload, number
        self._started, self._deadline = started, started + header.seconds
        self._counted = counted_name(method, args) if method.startswith(PACKAGES_OWN) else method
        self._sent_by = tensor_lane(payload.manifests) or lane.name if payload.manifests else lane.name
        self.cancellable = self._is_reported = options.cancellable
        calls.counters.sent(peer, self._sent_by, self._counted, size)
        if span is not None:
            span.about.update(lane=lane.name, bytes_out=size)
            if payload.manifests:
                span.beside("ship", self._sent_by, started)
            self._span = span
        if self._phase is UNSENT:
            self._pending, self._phase = pending, SENT
            return
        with self._lock:  # another thread may add a callback while the call is sent again
            self._pending, self._phase = pending, SENT

    @property
    def label(self) -> str:
        return f"{self._route.member.name}.{self._options.method or self._method}"

    def remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    # --- phases --------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> bool:
        """Block until the outcome can be taken, at most ``timeout_s``; whether it can."""
        until = time.monotonic() + timeout_s
        pending = self._pending
        if not pending.wait(timeout_s):
            return False
        while not self._advance(pending):
            pending = self._pending
            if not pending.wait(max(0.0, until - time.monotonic())):
                return False
        return True

    def check_reader(self) -> None:
        """See Completion.check_reader."""
        self._pending.check_reader()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, which is short, when the outcome can be taken."""
        pending = self._pending

        def arrived() -> None:
            if self._advance(pending):
                callback()
            else:
                self.add_done_callback(callback)

        pending.add_done_callback(arrived)

    def _advance(self, pending: Any) -> bool:
        """Move on after ``pending``, which is complete; whether the outcome can be taken."""
        if self._phase in _DECIDED:
            return True
        header: ReplyHeader | None = None
        error: Exception | None = None
        message = NO_REPLY
        if pending is self._pending and self._phase is SENT:
            try:
                message = pending.take()
                header = ReplyHeader(*message.header)
            except Exception as failure:
                error = untraced(failure)
        with self._lock.once(self.label) if self._lock._is_owned() else self._lock:
            if pending is self._pending and self._phase is SENT:
                if error is not None:
                    self._fail(error)
                elif header is not None:
                    self._message, self._header, self._phase = message, header, ARRIVED
            return self._phase in _DECIDED

    def _fail(self, error: Exception) -> None:
        """Under the lock: the request has failed."""
        if isinstance(error, RpcTimeout):
            error = RpcTimeout(*error.args)  # the lane's own leads to this call, once it is raised
        elif not isinstance(error, (RayTorchRpcError, MemoryError)):
            error = SerializationError(f"the answer of {self.label} cannot be read here: {shown(error)}")
        if not (isinstance(error, PeerLost) and self._lose(error)):
            self._error, self._phase = error, FAILED

    def _lose(self, lost: RayTorchRpcError) -> bool:
        """Under the lock: the peer was lost. Returns whether the call will be sent again."""
        self._error, self._phase = lost, FAILED
        if self._retries <= 0 or not self.remaining():
            return False
        self._retries -= 1
        self._may_have_run |= isinstance(lost, PeerLost) and lost.may_have_run
        self._phase, self._pending = LOST, Completion()
        self._calls.repeats.submit(self._send_again, self._pending)
        return True

    def _send_again(self, lost: Completion) -> None:
        """On a worker: wait until the peer is back, and send the call once more."""
        error: BaseException = self._late()
        before = current_scope.set(self._scope)
        try:
            if not self._is_cancelled and (route := self._next_route()) is not None:
                self._route, self._options = route, self._options._replace(caller_waits=False)
                self._follow()
                with torch_internals.autograd_context(self._context):
                    self._attempt()
        except Exception as failure:  # the peer is gone for good, or the call is not sent for another reason
            error = untraced(failure)
        finally:
            current_scope.reset(before)
        self._end_sending(lost, error)

    def _next_route(self) -> PeerRoute | None:
        """Wait until the peer is back: the route to it, or None if the deadline passes first."""
        peers = self._calls.peers
        if peers.await_return(self._target, self._route.member.incarnation, self._deadline):
            return peers.route_for_call(self._target)
        return None

    def _end_sending(self, lost: Completion, error: BaseException) -> None:
        """``error``: why it was not sent again, if it was not."""
        with self._lock:
            if self._phase is LOST and self._pending is lost:
                self._error, self._phase = untraced(error), FAILED
        lost.complete()
        if self._is_cancelled:  # meanwhile
            self._abandon()

    def _after_reply(self, error: RayTorchRpcError) -> RayTorchRpcError:
        return _after_reply(self._calls.peers, self._route, error)

    # --- the outcome ---------------------------------------------------------------------------------------------

    def outcome(self) -> tuple[Any, BaseException | None] | None:
        """Unpack the result: (value, None) or (None, error). To be called once, after ``wait`` has returned True.

        None if the result was lost on its way and the call is sent again: ``wait`` once more.
        """
        self._is_reported = False
        if self._phase not in _DECIDED:
            return None  # another thread has waited too, and found that it is sent again
        size, came_by, value = 0, self._sent_by, None
        error: BaseException | None = self._error
        lost = self._phase is FAILED and isinstance(error, PeerLost)
        if self._phase is not FAILED:
            try:
                value, error, size, came_by = self._take()
                if isinstance(error, RayTorchRpcError):
                    # The callee's server refused the call, because its process is another one, or leaves.
                    peer = self._route.member.name
                    lost = isinstance(error, PeerLost) and error.peer == peer and not error.may_have_run
            except RpcTimeout:
                error = self._late()
            except Exception as failure:
                error = failure
                if isinstance(failure, SerializationError) or not isinstance(failure, RayTorchRpcError):
                    # the result's own unpickling code
                    if threads.is_shortage(failure):
                        error = no_memory("this process", f"the result of {self.label}", failure)
                    else:
                        why = f"the result of {self.label} cannot be unpickled here: {shown(failure)}{_place(failure)}"
                        error = SerializationError(why)
                    error.__cause__ = failure
                else:
                    error = self._after_reply(failure)
                lost = isinstance(error, PeerLost)
                untraced(failure)  # the caller keeps it
        self._count(size, came_by, error)
        if lost and isinstance(error, RayTorchRpcError):
            with self._lock:
                if self._lose(untraced(error)):
                    return None
            if isinstance(error, PeerLost) and self._may_have_run and not error.may_have_run:
                error = PeerLost(error.peer, error.cause)  # in an earlier attempt
        return value, error

    def _take(self) -> tuple[Any, BaseException | None, int, str]:
        """The value or the exception in the reply, its bytes, and the lane that brought them."""
        message, header, calls, route = self._message, self._header, self._calls, self._route
        self._phase, self._message = TAKEN, NO_REPLY
        if message.make_current is not nothing:
            message.make_current()
        for export in self._payload.exports:
            export.finished()
        came_by = self._lane.name if message.body.tensors else self._sent_by
        span = None
        if message.manifests:
            came_by, span = tensor_lane(message.manifests) or came_by, self._span
        if span is not None:
            span.lap()
        pending = calls.payloads.receive(route.member.name, message.manifests) if message.manifests else []
        value: Any = None
        body = message.body
        if pending and is_out_of_band(body):
            body, pending = calls.payloads.unpack(body, pending, keep=False), []  # with RRefs
        if header.kind == protocol.OK and self._options.into is not None:
            body, pending = with_rrefs(body, pending)
            into = receiver(self._options.into)
            into.count = partial(calls.counters.came, route.member.name, came_by, self._counted)
            into.error_of = partial(_after_reply, calls.peers, route)  # leads to no call, which leads to it
            size, value = into.receive(calls.codec, body, pending, self.label, self._options.keep)
        else:
            if message.manifests or self._options.keep:
                body = calls.payloads.unpack(body, pending, message.manifests, keep=self._options.keep)
            size = body_bytes(body) if body.tensors else len(body.payload)
        if span is not None:
            span.beside("fetch", came_by)
        if header.kind == protocol.RAISED:
            return None, decode_exception(calls.codec, body, self.label), size, came_by
        if header.kind == protocol.STREAM:
            value = self._stream(header)
        elif self._options.into is None:
            value = calls.codec.decode(*body)
        return value, None, size, came_by

    def _stream(self, header: ReplyHeader) -> Stream[Any]:
        """The stream that the call has opened."""
        calls, route, options, number = self._calls, self._route, self._options, header.number
        unlimited = CallOptions(MAX_TIMEOUT_S, keep=options.keep, method=self._method)

        def request(item: int) -> OutgoingCall:
            call = OutgoingCall(calls, route, NEXT, unlimited)
            call._may_have_run = item > 0  # the generator, whatever became of this request
            try:
                call.send((number, item), {}, unlimited.timeout)
            except PeerLost as lost:
                raise PeerLost(lost.peer, lost.cause, item > 0 or lost.may_have_run) from None
            return call

        stream: Stream[Any] = Stream(
            self.label,
            request,
            partial(calls.budget, route.member.name, self._method, options.timeout),
            partial(calls.notify, route, route.calls, protocol.CLOSE, number),
            header.ahead if options.into is None else 0,
        )
        if self._options.into is not None:
            stream.close()
            raise ConfigurationError(f"{self.label} is a generator: into= needs a method that returns its result")
        return stream

    def expire(self) -> tuple[None, RpcTimeout]:
        """The outcome of a call whose deadline has passed."""
        self._is_reported = False
        with self._lock:
            decided = self._error if self._phase is FAILED else None  # at this very deadline, by a worker
        late = decided if isinstance(decided, RpcTimeout) else self._late()
        self._count(0, self._sent_by, late)
        return None, late

    def _late(self) -> RpcTimeout:
        if self._phase is SENT and self._pending.unsent:
            return RpcTimeout(f"no connection to {self._route.member.name!r} by the deadline of {self.label}")
        why = f"at the last attempt: {self._error}" if self._phase is LOST else "it may still run there"
        return RpcTimeout(f"{self.label} did not answer by its deadline; {why}")

    # --- without an outcome --------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Have the callee drop or stop the call, as far as it can; nobody takes the outcome any more. Waits end when
        the callee has answered.
        """
        self._count(0, self._sent_by, CancelledError())
        self._is_reported, self._is_cancelled, self._retries = False, True, 0
        self._abandon()

    def _abandon(self) -> None:
        with self._lock:
            under_way, self._phase = self._phase in _UNDER_WAY, TAKEN
        if under_way:
            self._is_reported = False
            self._payload = _NO_PAYLOAD
            self._discard()
            if self._number:
                self._calls.notify(self._route, self._lane, protocol.CANCEL, self._number)

    def forget_failure(self) -> None:
        """Log nothing if the call fails and nobody takes the outcome."""
        self._is_reported = False

    def __del__(self) -> None:
        # Nobody took the result, or not in time: out-of-band tensors that arrive with it have to be discarded.
        # An interrupt may have ended __init__. In a fork the call is the parent's.
        if getattr(self, "_phase", TAKEN) is TAKEN or fork.forked():
            return
        with contextlib.suppress(Exception):
            if self._phase in _UNDER_WAY:
                self._discard()
            elif self._is_reported and self._error is not None:
                self._calls.payloads.leave(self._calls.report_dropped, self.label, self._error)

    def _discard(self) -> None:
        """Have the reply discarded; for finalizers: takes no lock."""
        calls, label = self._calls, self.label if self._is_reported else ""
        calls.payloads.leave(calls.discard_reply, self._route, self._pending, label, self._deadline)

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._calls.deadlines.at(self._deadline, callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        self._calls.workers.submit(call_back, callback, argument)

    def _count(self, size: int, came_by: str, error: BaseException | None) -> None:
        if not self._started:  # no attempt was sent, or the last one has been counted
            return
        elapsed, self._started = time.monotonic() - self._started, 0.0
        peer = self._route.member.name
        self._calls.counters.finished(peer, self._sent_by, self._counted, came_by, size, elapsed, error)
        if self._span is not None:
            failed = {} if error is None else {"error": type(error).__name__}
            self._span.end(bytes_in=size, **failed)


class OutgoingCalls:
    """Sends the calls of one member. Thread-safe."""

    tracer: Tracer | None = None
    """While the group is traced."""
    interval: SwitchInterval | None = None
    """To be short while calls are made."""

    def __init__(self, local: Any) -> None:
        """``local``: the LocalMember with the parts that the calls use."""
        self._rank: int = local.me.rank
        self._timeout_s: float = local.config.rpc_timeout_s
        self.peers: PeerTable = local.peers
        self.payloads: Payloads = local.payloads
        self.codec: Codec = local.codec
        self.credit: CreditWindows = local.credit
        self.counters: CallCounters = local.counters
        self.workers: Workers = local.workers
        self.deadlines: Deadlines = local.deadlines
        self.repeats = Workers("raytorchrpc-repeats")  # of their own: they wait long, and others are to be served
        self.numbers = itertools.count(secrets.randbits(60))  # unlike those of an earlier process of this rank

    def call(
        self,
        target: Any,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        options: CallOptions = DEFAULTS,
    ) -> OutgoingCall:
        """Send a call; returns before its result. Blocks while the credit window is full, and while tensors are copied.

        Raises what keeps the call from being sent.
        """
        if options.into is not None:
            options = options._replace(into=receiver(options.into))
        route = self.peers.route_for_call(target, options.timeout)
        call = OutgoingCall(self, route, method, options)
        if retries := route.retries.get(method, 0) if options.retry is None else options.retry:
            call.send_often(args, kwargs, retries, target)
        else:
            call.send(args, kwargs, options.timeout)
        return call

    def close(self) -> None:
        """End the threads that send calls again, once they have ended their waits."""
        self.repeats.stop()

    def remote(
        self, target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        """Send a call whose result stays in the target; returns torch's RRef to it."""
        route = self.peers.route_for_call(target, timeout)
        self.peers.check_present(route, timeout)
        header, body, _ = self.request(protocol.REMOTE, route, method, args, kwargs, timeout)
        lane: Any = route.fabric
        message = Message(tuple(header), host_device_copy.outbound(body, route.devices))
        rref = lane.remote(route.member.name, message, header.seconds)
        self.counters.sent(route.member.name, lane.name, method, body_bytes(body))
        return rref

    def control(self, route: PeerRoute, lane: MessageLane, kind: int, timeout_s: float, number: int = 0) -> Pending:
        """Send a request without a body to the peer's process itself: PING or WATCH."""
        header = ControlHeader(kind, self._rank, route.token, number)
        return lane.call(route.member.name, Message(tuple(header), NOTHING), timeout_s)

    def notify(self, route: PeerRoute, lane: MessageLane, kind: int, number: int, *, later: bool = False) -> None:
        """As ``control``, but wait for no reply and ignore errors: a peer that is lost has nothing to stop.

        On an event loop a worker thread sends it: the connection may be busy for as long as a large message takes.
        ``later``: for finalizers, which may take no lock.
        """
        if later:
            self.payloads.leave(self._notify, route, lane, kind, number)
        elif on_loop():
            self.workers.submit(self._notify, route, lane, kind, number)
        else:
            self._notify(route, lane, kind, number)

    def _notify(self, route: PeerRoute, lane: MessageLane, kind: int, number: int) -> None:
        with contextlib.suppress(RayTorchRpcError):
            self.control(route, lane, kind, _NOTICE_S, number)

    def in_flight(self) -> dict[str, tuple[int, int]]:
        """By peer: calls that have no reply yet, and bytes of their arguments; see CreditWindows.in_flight."""
        return {member.name: self.credit.in_flight(member.rank) for member in self.peers.members}

    def request(
        self,
        kind: int,
        route: PeerRoute,
        method: str,
        args: tuple[Any, ...],
        kwargs: Any,
        timeout: float | None,
        number: int = 0,
    ) -> tuple[RequestHeader, Encoded, bool]:
        """The header and the body of a request, and whether it belongs to a distributed autograd context."""
        scope, budget = current_scope.get(), self._timeout_s
        if timeout is not None or scope.limit is not None:
            budget = self.budget(route.member.name, method, timeout)
        until = time.monotonic() + budget if route.same_clock else None
        keep_graph = torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT
        try:
            body = self.codec.encode((args, kwargs or {}) if args or kwargs else None, keep_graph=keep_graph, own=True)
        except SerializationError as error:
            why = self.codec.explain_argument(f"{route.member.name}.{method}", args, kwargs or {}, error)
            raise SerializationError(why) from error
        except MemoryError as error:
            raise no_memory("this process", f"the arguments of {route.member.name}.{method}", error) from error
        header = RequestHeader(kind, self._rank, route.token, method, scope.path, budget, until, None, number)
        return header, body, keep_graph

    def budget(self, peer: str, method: str, timeout: float | None) -> float:
        """Seconds until the deadline of a call that is made now."""
        budget = self._timeout_s if timeout is None else checked_timeout(timeout)
        if (deadline := current_scope.get().deadline) is not None:
            budget = min(budget, deadline - time.monotonic())
        if budget <= 0:
            raise RpcTimeout(f"no time left to call {peer}.{method}: the deadline has passed")
        return budget

    # --- calls whose outcome nobody takes ----------------------------------------------------------------------------

    def discard_reply(self, route: PeerRoute, pending: Pending, label: str, deadline: float) -> None:
        """Discard the out-of-band tensors of a reply once it arrives, and close the stream that it opens.

        ``label``: of the call, if its failure is to be logged, also that of a missed deadline; else empty.
        """
        submit, in_time = self.workers.submit, nothing
        if label and not pending.done:
            late = RpcTimeout(f"{label} did not answer by its deadline; it may still run there")
            in_time = self.deadlines.at(deadline, lambda: submit(self.report_dropped, label, late))

        def arrived() -> None:
            in_time()
            try:
                message = pending.take()
            except Exception as error:  # nothing came
                if label:
                    submit(self.report_dropped, label, error)
                return
            header = ReplyHeader(*message.header)
            if header.kind == protocol.STREAM:
                self.notify(route, route.calls, protocol.CLOSE, header.number, later=True)
            if label and header.kind == protocol.RAISED:
                submit(self.report_dropped, label, message)  # unpickling it may run any code
            with contextlib.suppress(RayTorchRpcError):
                self.payloads.receive(route.member.name, message.manifests).clear()

        pending.add_done_callback(arrived)

    def report_dropped(self, label: str, failure: Message | BaseException) -> None:
        """Log a failure, unless it is the end of the group."""
        with contextlib.suppress(RayTorchRpcError):
            self.peers.check_open()
            if not isinstance(failure, BaseException):
                failure = decode_exception(self.codec, failure.body, label)
            threads.report(failure, f"the exception of a call of {label} was never retrieved: its future was dropped")


def _after_reply(peers: PeerTable, route: PeerRoute, error: RayTorchRpcError) -> RayTorchRpcError:
    """The error for a result that was announced and did not arrive: the method has run."""
    if isinstance(error, LaneUnavailable) and (why := peers.why_unreachable(route)) is not None:
        return PeerLost(route.member.name, f"{why}; its result had not been fetched")
    if isinstance(error, PeerLost) and not error.may_have_run:
        return PeerLost(error.peer, error.cause)
    return error


def _place(failure: BaseException) -> str:
    """Where an error was raised, for a message that is all that is left of its traceback."""
    at = traceback.extract_tb(failure.__traceback__)[-1:]
    return f" ({at[0].filename}:{at[0].lineno}, in {at[0].name})" if at else ""
