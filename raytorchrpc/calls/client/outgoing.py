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
from raytorchrpc.calls.counters import PACKAGES_OWN, CallCounters, PairStats, counted_name
from raytorchrpc.calls.flow_control import CreditWindows
from raytorchrpc.calls.options import DEFAULTS, MAX_TIMEOUT_S, CallOptions, checked_timeout
from raytorchrpc.calls.payload import IN_BAND, Payloads, is_out_of_band, tensor_lane, with_rrefs
from raytorchrpc.calls.peers import PeerRoute, PeerTable
from raytorchrpc.calls.protocol import ControlHeader, ReplyHeader, RequestHeader
from raytorchrpc.calls.receive_into import receiver
from raytorchrpc.calls.scope import Scope, current_scope, on_loop
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
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded, body_bytes, nbytes_of
from raytorchrpc.tensors.cuda_streams import follow_thread
from raytorchrpc.tensors.exceptions import decode_exception
from raytorchrpc.tensors.kept_errors import untraced

#: A request that nobody waits for blocks at most this long, on a busy connection (seconds).
_NOTICE_S = 10.0
#: Packing that takes no longer than this is not counted, since every call would pay for it (seconds).
_SOON_S = 0.005
NO_REPLY = Message((protocol.OK,), NOTHING)


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


class Repeats:
    """What it takes to send a call again from another thread: it stays in its chain of calls and keeps its deadline."""

    def __init__(self, args: tuple[Any, ...], kwargs: Any, target: Any, count: int) -> None:
        """``count``: how often it may be sent again if ``target`` is lost; each time once that is back."""
        self.arguments, self.target, self.count = (args, kwargs), target, count
        self.scope, self.context = current_scope.get(), torch_internals.current_autograd_context()
        self.follow = follow_thread()
        self.is_cancelled = False


class OutgoingCall:
    """One call, from its first request to its outcome: what a ``Future`` waits for. Thread-safe.

    Its phase changes under ``_lock``, or in one statement with what belongs to it: Python changes threads and runs
    signal handlers only where a function is called, or code jumps, which it does not where a condition holds.
    """

    mark: int | None = None
    """Links it to its method in a trace; see ``traced``."""

    def __init__(self, calls: OutgoingCalls, route: PeerRoute, method: str, options: CallOptions) -> None:
        self._calls, self._route, self._method, self._options = calls, route, method, options
        self._lock = Lock()
        self._phase, self._message = UNSENT, NO_REPLY
        self.pending: Any = None
        """Complete when the call can move on: its request, or while it is lost, a completion."""
        self._error: BaseException | None = None
        """Why it was lost or has failed."""
        self._row: PairStats | None = None
        """Its counters, from when it was sent until its outcome is counted."""
        self.repeats: Repeats | None = None
        """If it may be sent again."""
        self.cancellable = self._is_reported = self._may_have_run = False
        """Whether ``cancel`` reaches the callee; whether a failure is logged if this is dropped; whether the method may
        have run before this request.
        """

    def send_often(self, args: tuple[Any, ...], kwargs: Any, count: int, target: Any) -> None:
        """As ``send``, and again up to ``count`` times if ``target`` is lost; each time once that is back."""
        peer, options = self._route.member.name, self._options
        self.deadline = time.monotonic() + self._calls.budget(peer, self._method, options.timeout)
        self.repeats = Repeats(args, kwargs, target, count)
        self.cancellable = self._is_reported = options.cancellable
        self.pending = Completion()
        self.pending.complete()  # nothing to wait for, if it is not sent at all
        self._attempt(self.repeats)

    def _attempt(self, repeats: Repeats) -> None:
        try:
            self.send(*repeats.arguments, max(0.001, self.remaining()))
        except PeerLost as lost:
            with self._lock:
                self._lose(untraced(lost))

    def send(self, args: tuple[Any, ...], kwargs: Any, timeout: float | None) -> None:
        """Send its request. Raises what keeps it from being sent."""
        began = time.monotonic()
        calls, route, method, options = self._calls, self._route, self._method, self._options
        if calls.interval is not None and not calls.interval.used:
            calls.interval.shorten()
        if calls.peers.absences:
            calls.peers.check_present(route, timeout)
        peer, scope = route.member, current_scope.get()
        body, seconds, in_context = calls.encoded(route, method, args, kwargs, timeout, scope)
        deadline, size = began + seconds, len(body.payload)
        if body.tensors:
            size = sum(map(nbytes_of, body.tensors), size)
        limit, number = scope.limit, next(calls.numbers)
        windows = calls.credit.by_rank
        if limit is not None and not limit.over:
            windows = limit.windows.setdefault(calls.generation, {})
        window = windows.get(peer.rank) or calls.credit.open(windows, peer.rank)
        give_back, beside = partial(window.give_back, number), IN_BAND
        try:
            if not window.take(number, size):
                calls.credit.wait(window, peer.name, method, number, size, deadline)
                calls.peers.check_open()
                calls.peers.check_present(route)
            lane, body, beside = calls.payloads.pack_request(route, body, options.share, in_context)
            started = time.monotonic()
            if (took := started - began) > _SOON_S:
                if took >= seconds:
                    raise RpcTimeout(f"{self.label} was not sent: its deadline passed before its arguments were packed")
                seconds -= took
            if not options.cancellable:
                number = 0
            until = deadline if route.same_clock else None
            header = protocol.CALL, calls.rank, route.token, method, scope.path, seconds, until, self.mark, number
            message = Message(header, body, nothing, beside.manifests, 0, beside.cancel)
            self._lane, self._beside, self._number, self._size = lane, beside, number, size
            self._started, self.deadline = started, started + seconds
            pending = lane.call(peer.name, message, seconds, caller_waits=options.caller_waits, on_released=give_back)
        except BaseException:
            give_back()
            beside.cancel()
            raise
        if self._phase is UNSENT:
            self.pending, self._phase = pending, SENT  # at once: from now on ``__del__`` has the reply discarded
        name = counted_name(method, args) if method.startswith(PACKAGES_OWN) else method
        sent_by = tensor_lane(beside.manifests) or lane.name if beside.manifests else lane.name
        self._row = calls.counters.sent(peer.name, sent_by, name, size)
        self.cancellable = self._is_reported = options.cancellable
        if self.pending is not pending:
            with self._lock:  # another thread may add a callback while the call is sent again
                self.pending, self._phase = pending, SENT

    @property
    def label(self) -> str:
        return f"{self._route.member.name}.{self._options.method or self._method}"

    def remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    # --- phases --------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> bool:
        """Block until the outcome can be taken, at most ``timeout_s``; whether it can."""
        until = time.monotonic() + timeout_s
        pending = self.pending
        if not pending.wait(timeout_s):
            return False
        while not self._advance(pending):
            pending = self.pending
            if not pending.wait(max(0.0, until - time.monotonic())):
                return False
        return True

    def check_reader(self) -> None:
        self.pending.check_reader()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, which is short, when the outcome can be taken."""
        pending = self.pending

        def arrived() -> None:
            if self._advance(pending):
                callback()
            else:
                self.add_done_callback(callback)

        pending.add_done_callback(arrived)

    def _advance(self, pending: Any) -> bool:
        """Move on after ``pending``, which is complete; whether the outcome can be taken."""
        if self._phase in _DECIDED or pending is not self.pending or self._phase is not SENT:
            return self._phase in _DECIDED
        try:
            message = pending.take()
        except Exception as failure:
            error = untraced(failure)
        else:
            if pending is self.pending and self._phase is SENT:
                self._message, self._phase = message, ARRIVED
            return self._phase in _DECIDED
        with self._lock.once(self.label) if self._lock._is_owned() else self._lock:
            if pending is self.pending and self._phase is SENT:
                self._fail(error)
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
        repeats = self.repeats
        if repeats is None or repeats.count <= 0 or not self.remaining():
            return False
        repeats.count -= 1
        self._may_have_run |= isinstance(lost, PeerLost) and lost.may_have_run
        self._phase, self.pending = LOST, Completion()
        self._calls.repeats.submit(self._send_again, repeats, self.pending)
        return True

    def _send_again(self, repeats: Repeats, lost: Completion) -> None:
        """On a worker: wait until the peer is back, and send the call once more."""
        error: BaseException = self._late()
        before = current_scope.set(repeats.scope)
        try:
            if not repeats.is_cancelled and (route := self._next_route(repeats)) is not None:
                self._route, self._options = route, self._options._replace(caller_waits=False)
                repeats.follow()
                with torch_internals.autograd_context(repeats.context):
                    self._attempt(repeats)
        except Exception as failure:  # the peer is gone for good, or the call is not sent for another reason
            error = untraced(failure)
        finally:
            current_scope.reset(before)
        self._end_sending(repeats, lost, error)

    def _next_route(self, repeats: Repeats) -> PeerRoute | None:
        """Wait until the peer is back: the route to it, or None if the deadline passes first."""
        peers = self._calls.peers
        if peers.await_return(repeats.target, self._route.member.incarnation, self.deadline):
            return peers.route_for_call(repeats.target)
        return None

    def _end_sending(self, repeats: Repeats, lost: Completion, error: BaseException) -> None:
        """``error``: why it was not sent again, if it was not."""
        with self._lock:
            if self._phase is LOST and self.pending is lost:
                self._error, self._phase = untraced(error), FAILED
        lost.complete()
        if repeats.is_cancelled:  # meanwhile
            self._abandon()

    def _after_reply(self, error: RayTorchRpcError) -> RayTorchRpcError:
        return _after_reply(self._calls.peers, self._route, error)

    # --- the outcome ---------------------------------------------------------------------------------------------

    def outcome(self) -> tuple[Any, BaseException | None] | None:
        """Unpack the result: (value, None) or (None, error). To be called once, after ``wait`` has returned True.

        None if the result was lost on its way and the call is sent again: ``wait`` once more.
        """
        self._is_reported = False
        pending = self.pending
        if self._phase not in _DECIDED and not (pending.done and self._advance(pending)):
            return None  # it is sent again
        size, came_by, value = 0, "", None
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
                error = PeerLost(error.peer, error.cause)
        return value, error

    def _take(self) -> tuple[Any, BaseException | None, int, str]:
        """The value or the exception in the reply, its bytes, and the lane that brought them ("": the request's)."""
        message, options = self._message, self._options
        self._phase, self._message = TAKEN, NO_REPLY
        if message.make_current is not nothing:
            message.make_current()
        for export in self._beside.exports:
            export.finished()
        kind, body, value = message.header[0], message.body, None
        came_by = self._lane.name if body.tensors else ""
        into = options.into if kind == protocol.OK else None
        if message.manifests or options.keep or into is not None:
            body, value, size, came_by = self._receive(message, into, came_by)
        else:
            size = len(body.payload)
            if body.tensors:
                size = sum(map(nbytes_of, body.tensors), size)
        if kind == protocol.RAISED:
            return None, decode_exception(self._calls.codec, body, self.label), size, came_by
        if kind == protocol.STREAM:
            value = self._stream(ReplyHeader(*message.header))
        elif into is None:
            value = self._calls.codec.decode(*body)
        return value, None, size, came_by

    def _receive(self, message: Message, into: Any, came_by: str) -> tuple[Encoded, Any, int, str]:
        """As ``_take``, of a reply that is more than its message: its body, or the value received ``into``."""
        calls, route, body, keep = self._calls, self._route, message.body, self._options.keep
        came_by = tensor_lane(message.manifests) or came_by
        pending = calls.payloads.receive(route.member.name, message.manifests) if message.manifests else []
        if pending and is_out_of_band(body):
            body, pending = calls.payloads.unpack(body, pending, keep=False), []  # with RRefs
        if into is None:
            body = calls.payloads.unpack(body, pending, message.manifests, keep=keep)
            return body, None, body_bytes(body), came_by
        body, pending = with_rrefs(body, pending)
        row: Any = self._row
        into = receiver(into)
        into.count = partial(calls.counters.came, row.peer, came_by or row.lane, row.method)
        into.error_of = partial(_after_reply, calls.peers, route)  # leads to no call, which leads to it
        size, value = into.receive(calls.codec, body, pending, self.label, keep)
        return body, value, size, came_by

    def _stream(self, header: ReplyHeader) -> Stream[Any]:
        calls, route, options, number = self._calls, self._route, self._options, header.number
        unlimited = CallOptions(MAX_TIMEOUT_S, keep=options.keep, method=self._method)

        def request(item: int) -> OutgoingCall:
            call = calls.make(calls, route, NEXT, unlimited)
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
        self._count(0, "", late)
        return None, late

    def _late(self) -> RpcTimeout:
        if self._phase is SENT and self.pending.unsent:
            return RpcTimeout(f"no connection to {self._route.member.name!r} by the deadline of {self.label}")
        why = f"at the last attempt: {self._error}" if self._phase is LOST else "it may still run there"
        timeout, deadline = self._options.timeout, current_scope.get().deadline
        if deadline is not None and deadline <= self.deadline + _SOON_S:
            limit = "by the deadline of the call that this method serves"
        elif timeout is None:
            limit = f"within {self._calls.timeout_s:g} s (rpc_timeout_s); for another limit pass timeout="
        else:
            limit = f"within {round(timeout, 3):g} s (timeout)"
        return RpcTimeout(f"{self.label} did not answer {limit}; {why}")

    # --- without an outcome --------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Have the callee drop or stop the call, as far as it can; nobody takes the outcome any more. Waits end when
        the callee has answered.
        """
        self._count(0, "", CancelledError())
        self._is_reported = False
        if self.repeats is not None:
            self.repeats.is_cancelled, self.repeats.count = True, 0
        self._abandon()

    def _abandon(self) -> None:
        with self._lock:
            under_way, self._phase = self._phase in _UNDER_WAY, TAKEN
        if under_way:
            self._is_reported = False
            self._beside = IN_BAND
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
        calls.payloads.leave(calls.discard_reply, self._route, self.pending, label, self.deadline)

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._calls.deadlines.at(self.deadline, callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        self._calls.workers.submit(call_back, callback, argument)

    def _count(self, size: int, came_by: str, error: BaseException | None) -> None:
        row, self._row = self._row, None
        if row is not None:  # else no attempt was sent, or the last one has been counted
            elapsed = time.monotonic() - self._started
            self._calls.counters.finished(row, came_by or row.lane, size, elapsed, error)


class OutgoingCalls:
    """Sends the calls of one member. Thread-safe."""

    make: Callable[..., OutgoingCall] = OutgoingCall
    """Makes a call; while the group is traced, a traced one."""
    interval: SwitchInterval | None = None
    """To be short while calls are made."""

    def __init__(self, local: Any) -> None:
        """``local``: the LocalMember with the parts that the calls use."""
        self.rank: int = local.me.rank
        self.generation: str = local.generation
        self.timeout_s: float = local.config.rpc_timeout_s
        self.peers: PeerTable = local.peers
        self.payloads: Payloads = local.payloads
        self.codec: Codec = local.codec
        self.credit: CreditWindows = local.credit
        self.counters: CallCounters = local.counters
        self.workers: Workers = local.workers
        self.deadlines: Deadlines = local.deadlines
        self._autograd_context = torch_internals.autograd_context_reader()
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
        call = self.make(self, route, method, options)
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
        began, scope = time.monotonic(), current_scope.get()
        body, seconds, _ = self.encoded(route, method, args, kwargs, timeout, scope)
        until = began + seconds if route.same_clock else None
        header = RequestHeader(protocol.REMOTE, self.rank, route.token, method, scope.path, seconds, until)
        lane: Any = route.torchrpc
        message = Message(tuple(header), host_device_copy.outbound(body, route.devices))
        rref = lane.remote(route.member.name, message, seconds)
        self.counters.sent(route.member.name, lane.name, method, body_bytes(body))
        return rref

    def control(self, route: PeerRoute, lane: MessageLane, kind: int, timeout_s: float, number: int = 0) -> Pending:
        """Send a request without a body to the peer's process itself: PING or WATCH."""
        header = ControlHeader(kind, self.rank, route.token, number)
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

    def encoded(
        self, route: PeerRoute, method: str, args: tuple[Any, ...], kwargs: Any, timeout: float | None, scope: Scope
    ) -> tuple[Encoded, float, bool]:
        """The body of a request, the seconds until its deadline, and whether it belongs to a distributed autograd
        context.
        """
        seconds = self.timeout_s
        if timeout is not None or scope.limit is not None:
            seconds = self.budget(route.member.name, method, timeout)
        keep_graph = self._autograd_context() != torch_internals.NO_CONTEXT
        if not args and not kwargs:
            return NOTHING, seconds, keep_graph
        try:
            return self.codec.encode((args, kwargs or {}), keep_graph=keep_graph, own=True), seconds, keep_graph
        except SerializationError as error:
            why = self.codec.explain_argument(f"{route.member.name}.{method}", args, kwargs or {}, error)
            raise SerializationError(why) from error
        except MemoryError as error:
            raise no_memory("this process", f"the arguments of {route.member.name}.{method}", error) from error

    def budget(self, peer: str, method: str, timeout: float | None) -> float:
        """Seconds until the deadline of a call that is made now."""
        budget = self.timeout_s if timeout is None else checked_timeout(timeout)
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
