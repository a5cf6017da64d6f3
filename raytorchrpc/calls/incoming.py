"""Calls in: what a member does with a request, from a lane's thread to the answer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from raytorchrpc import errors
from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.calls import gates
from raytorchrpc.calls.autograd import in_autograd_context
from raytorchrpc.calls.event_loops import start_on_loop
from raytorchrpc.calls.gates import Admission, Work
from raytorchrpc.calls.out_of_band import Payload, PendingTensors, TensorManifest, joined, owned, snapshot
from raytorchrpc.calls.scope import Limit, Scope, current_scope
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.calls.spans import ServedSpan, Tracer
from raytorchrpc.errors import LaneUnavailable, NotAMember, PeerLost, RayTorchRpcError, RpcTimeout, SerializationError
from raytorchrpc.lanes.base import Message, MessageLane, Reply
from raytorchrpc.process import threads
from raytorchrpc.process.deadlines import Deadlines
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded
from raytorchrpc.tensors.cuda_streams import handoff_streams
from raytorchrpc.tensors.exceptions import encode_exception

logger = logging.getLogger(__name__)

# Kinds of request. A header is (kind, caller's rank, token of the process it is meant for, ...).
CALL = 0
"""Run a method, answer with its result: (..., method, path, seconds left, deadline by the clock of a common node)."""
REMOTE = 1
"""The same, but the result stays here, in an RRef."""
PING = 2
"""Answer."""
FETCH = 3
"""Answer with a result that was kept in the outbox: (..., number)."""
WATCH = 4
"""Never answered: the caller hears by it that this process has ended."""
ASK = 5
"""Run a function of this package, (function, arguments) in the body, on a thread of the member's own."""

#: A member that has no memory for an answer tries so long to say so (seconds).
_STARVED_S = 10.0

# How a reply begins.
OK = 0
RAISED = 1
KEPT = 2
"""The result has tensors that this lane cannot carry: fetch it over another, by the number that follows."""


#: Methods of the package's own that every member serves: name -> an ``Exposed``, as for ``Server``.
builtin_services: dict[str, Any] = {}


class _Kept(NamedTuple):
    message: Message
    fetched: Callable[[], None]
    """Prevents that it is dropped."""


class ReplyRoutes(Protocol):
    """The ways to the other members, by rank: what a server needs of its member."""

    deadlines: Deadlines
    strangers: Set[int]
    """Ranks of those who were removed."""

    def ship_back(self, rank: int, body: Encoded, share: bool, frozen: bool) -> Payload | None:
        """Lay a result's tensors out beside its message; None if it cannot be done. ``share``: see calls.method.
        ``frozen``: nobody here changes them.
        """

    def staged_back(self, rank: int, body: Encoded) -> Encoded:
        """A result that nothing of is laid out: its CUDA tensors that are to arrive on the CPU, copied there."""

    def arrived(self, rank: int, body: Encoded) -> Encoded:
        """A request's body, its CPU tensors on the GPU where they are to arrive."""

    def receive(self, rank: int, manifests: Sequence[TensorManifest]) -> list[PendingTensors]:
        """Take charge of what came beside a request."""

    def check_back(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """Raise LaneUnavailable for a result on a GPU that has no mapping to that member."""


class Server:
    """Serves one member's requests. Thread-safe; never blocks a lane's thread."""

    def __init__(
        self,
        name: str,
        token: str,
        instance: Any,
        methods: Mapping[str, Any],
        codec: Codec,
        workers: Workers,
        routes: ReplyRoutes,
    ) -> None:
        """``methods``: name -> what ``calls.method`` noted (function, concurrent, group, coroutine, keep, frozen)."""
        self.name, self.token = name, token
        self.instance, self.methods, self.codec = instance, methods, codec
        self.workers = workers
        self.routes = routes
        self.is_async = instance is not None and ray_internals.actor_is_async()
        self.tasks: set[asyncio.Task[None]] = set()
        self.tracer: Tracer | None = None
        """While the group is traced."""
        self._outbox: dict[int, _Kept] = {}
        self._numbers = itertools.count()
        # Made now: it is for when there is no memory to make an answer.
        starved = MemoryError(f"{name} has no memory for its answer; the call may have run there")
        self._starved = Message((RAISED,), encode_exception(codec, starved))
        self._starved_remote = Message((True, starved), NOTHING)

    def serve(self, lane: MessageLane, message: Message, reply: Reply) -> Work | None:
        """Take a request; returns the work it needs a thread for, if any. A reply is work too: its taker may stand
        still."""
        kind, caller, token = message.header[:3]
        try:
            # First of all: a request that is refused gives back what it brought.
            parcels = self._parcels(caller, message) if message.manifests else []
            if message.unread_bytes:
                raise MemoryError(
                    f"{self.name} has no memory for a request of {message.unread_bytes} bytes; it did not run there"
                )
            if token != self.token:
                raise PeerLost(self.name, "it belongs to another generation of the group", may_have_run=False)
            if caller in self.routes.strangers:
                raise NotAMember(f"the caller was removed from the group of {self.name!r}")
            if kind == PING:
                return partial(self._send, reply, lambda: Message((OK,), NOTHING))
            if kind == WATCH:
                return None
            if kind == ASK:
                return partial(self._ask, message, reply)
            if kind == FETCH:
                kept = self._take(message.header[3])
                kept.make_current()
                return partial(self._send, reply, lambda: kept)
            method, path, budget, until = message.header[3:7]
            note = self._exposed(method)
            limit = Limit(time.monotonic() + budget if until is None else until)
            job = _Job(self, lane, note, method, message, reply, Scope(path, limit), parcels)
            tracer = self.tracer
            if tracer is not None:
                # A caller that is not traced, or not yet, gave no mark.
                job.span = tracer.served(job.label, message.header[7] if len(message.header) > 7 else None)
                job.reply = job.span.until(reply)
            return self._dispatch(job)
        except Exception as error:
            # Encoded here: the error itself leads to this frame, and by it to what the request brought.
            refusal = self._refusal(kind, error)
            return partial(self._send, reply, lambda: refusal)

    def _parcels(self, caller: int, message: Message) -> list[PendingTensors]:
        try:
            return self.routes.receive(caller, message.manifests)
        except LaneUnavailable as error:
            raise PeerLost(self.name, "it has left the group", may_have_run=False) from error

    def _ask(self, message: Message, reply: Reply) -> None:
        try:
            function, arguments = self.codec.decode(*message.body)
            answer = Message((OK,), self.codec.encode(function(*arguments)))
        except Exception as error:
            answer = self._refusal(ASK, error)
        self._send(reply, lambda: answer)

    def _exposed(self, name: str) -> Any:
        note = self.methods.get(name) or builtin_services.get(name)
        if note is not None:
            return note
        if self.instance is None:
            raise NotAMember(f"{self.name!r} is a driver: it exposes no methods")
        offered = ", ".join(sorted(self.methods)) or "none"
        cls = type(self.instance).__name__
        if callable(getattr(type(self.instance), name, None)):
            raise NotAMember(
                f"{cls}.{name} is not exposed: decorate it with @raytorchrpc.method, or call {name}.remote() "
                f"(exposed: {offered})"
            )
        raise NotAMember(f"{cls} has no method {name!r} (exposed: {offered})")

    def _dispatch(self, job: _Job) -> Work | None:
        if job.note.concurrent:
            return job.admit(None)
        gate = gates.gate_of(self.instance, job.note.concurrency_group)
        if gate is None:
            raise NotAMember(f"the actor of member {self.name!r} is gone from its process")
        admission = gate.held(job.scope.path) if job.scope.path else None
        if admission is None:
            return gate.request(job)
        if admission.owner is not None:
            return None if gate.post(admission, job) else gate.request(job)
        job.run_inside(admission)
        return None

    # --- results that another lane has to carry ------------------------------------------------------------

    def keep(self, message: Message, seconds: float) -> int:
        """Keep a result for the caller to fetch; dropped after ``seconds``, as callers may have lost interest."""
        number = next(self._numbers)
        fetched = self.routes.deadlines.at(time.monotonic() + seconds, partial(self._drop, number))
        self._outbox[number] = _Kept(message, fetched)
        return number

    def _drop(self, number: int) -> None:
        self._outbox.pop(number, None)

    def _take(self, number: int) -> Message:
        kept = self._outbox.pop(number, None)
        if kept is None:
            raise RpcTimeout(f"the result was kept for {self.name!r}'s caller until its deadline, and dropped")
        kept.fetched()
        return kept.message

    def refuse(self, kind: int, error: BaseException, reply: Reply) -> None:
        """Answer with an exception."""
        self._send(reply, lambda: self._refusal(kind, error), kind)

    def _refusal(self, kind: int, error: BaseException) -> Message:
        if kind == REMOTE:
            return Message((True, error), NOTHING)
        return Message((RAISED,), encode_exception(self.codec, error))

    def _send(self, reply: Reply, make: Callable[[], Message], kind: int = CALL) -> None:
        try:
            try:
                reply(make())
            except LaneUnavailable as error:  # a kept result that no lane takes
                reply(Message((RAISED,), encode_exception(self.codec, error)))
        except PeerLost as lost:
            logger.debug("%s could not answer a call: %s", self.name, lost)  # the caller knows
        except Exception as error:
            threads.report(error, f"{self.name} could not answer a call")
            if threads.is_shortage(error):
                self.answer_without_memory(kind, reply)

    def answer_without_memory(self, kind: int, reply: Reply) -> None:
        """Whoever called is to hear something, as soon as there is memory for that. Blocks."""
        try:
            threads.persist(lambda: reply(self._starved_remote if kind == REMOTE else self._starved), _STARVED_S)
        except Exception as error:
            logger.debug("%s could not answer a call: %s", self.name, error)

    def close(self) -> None:
        """Drop what was kept."""
        self._outbox.clear()


class _Job:
    """One method call being served; see ``execution.Job``."""

    span: ServedSpan | None = None
    """If it is traced."""

    def __init__(
        self,
        server: Server,
        lane: MessageLane,
        note: Any,
        method: str,
        message: Message,
        reply: Reply,
        scope: Scope,
        parcels: list[PendingTensors],
    ) -> None:
        self.server, self.lane, self.note = server, lane, note
        self.message, self.reply, self.scope = message, reply, scope
        self.caller: int = message.header[1]
        self.parcels = parcels
        self.kind = message.header[0]
        self.context = torch_internals.current_autograd_context()
        self.label = f"{server.name}.{method}"
        self.admission: Admission | None = None

    def admit(self, admission: Admission | None) -> Work | None:
        if self.note.is_coroutine or (self.server.is_async and not self.note.concurrent):
            self._start_on_loop(admission, admission)
            return None
        self.admission = admission
        return self._work

    @property
    def may_not_wait(self) -> bool:
        """See Workers.submit: what holds the last thread may wait for this very call."""
        return self.scope.holds_a_thread

    def spawn(self, work: Work) -> None:
        self.server.workers.submit(work)

    def run_inside(self, admission: Admission) -> None:
        if admission.owner is None:
            self._start_on_loop(admission, None)
        else:
            self._run(admission)

    def _work(self) -> None:
        """Run, then all who are next in line for the admission, on the same thread. The line may be of any length."""
        job: Any = self
        while job is not None:
            job = job._take_turn()

    def _take_turn(self) -> Any:
        """Returns the job that comes next, if this thread is to run it; only jobs like this one need a thread."""
        admission, following = self.admission, None
        if admission is None:
            self._run(None)
            return None
        admission.owner = threading.get_ident()
        try:
            self._run(admission)
        except BaseException as error:
            threads.report(error, f"{self.label} was not served to its end")
            self.server.answer_without_memory(self.kind, self.reply)
        finally:
            following = admission.gate.pass_on(admission)
        return following and following[0]

    def _start_on_loop(self, admission: Admission | None, to_leave: Admission | None) -> None:
        loop = ray_internals.actor_event_loop(self.note.concurrency_group)
        tasks = self.server.tasks

        def create() -> None:
            task = loop.create_task(self._run_on_loop(admission, to_leave))
            tasks.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(tasks.discard)

        def refuse() -> None:
            error = RayTorchRpcError(
                f"{self.label} was called back while this async actor's event loop stands still in a blocking "
                f"call of the same chain; use `await rpc_async(...)` there"
            )
            self.spawn(partial(self.server.refuse, self.kind, error, self.reply))
            if to_leave is not None:
                to_leave.gate.leave(to_leave)

        start_on_loop(loop, self.scope.path, create, refuse)

    def _run(self, admission: Admission | None) -> None:
        """On a thread of the member's own, or on the one that waits inside ``admission``."""
        before = None
        try:
            before = current_scope.set(self.scope.on_a_thread(admission))
            if self.context == torch_internals.NO_CONTEXT:
                self._call()
            else:
                with torch_internals.autograd_context(self.context):
                    self._call()
        except BaseException as error:
            self.server.refuse(self.kind, error, self.reply)
        finally:
            self._over()
            if before is not None:
                current_scope.reset(before)

    def _call(self) -> None:
        args, kwargs = self._arguments()
        if self.note.service:
            result = self.note.function(self.server.routes, self.caller, *args, **kwargs)
        else:
            result = self.note.function(self.server.instance, *args, **kwargs)
        del args, kwargs
        if isinstance(result, DeferredReply):
            # Whoever settles it may have other things to do than to send, which can take long.
            result.add_done_callback(partial(self.server.workers.submit, self._answer_later))
            return
        body = self._encoded(result)
        if self.kind != REMOTE:
            result = None  # what the actor still holds can be told from what only the reply holds
        self._answer(body, result)

    def _answer_later(self, later: Any) -> None:
        try:
            self._answer(self._encoded(later.outcome()), None)
        except BaseException as error:
            self.server.refuse(self.kind, error, self.reply)
        finally:
            host_device_copy.reap_copies()

    async def _run_on_loop(self, admission: Admission | None, to_leave: Admission | None) -> None:
        current_scope.set(self.scope.inside(admission))  # a task has a context of its own: nothing to put back
        try:
            args, kwargs = self._arguments()
            if self.note.is_coroutine:
                coroutine = self.note.function(self.server.instance, *args, **kwargs)
                result = await in_autograd_context(coroutine, self.context)
            else:
                with torch_internals.autograd_context(self.context):
                    result = self.note.function(self.server.instance, *args, **kwargs)
            del args, kwargs
            body = self._encoded(result)
            if self.kind != REMOTE:
                result = None
            self._answer(body, result)
        except BaseException as error:
            self.server.refuse(self.kind, error, self.reply)
        finally:
            self._over()
            if to_leave is not None:
                to_leave.gate.leave(to_leave)

    def _over(self) -> None:
        host_device_copy.reap_copies()
        if self.scope.limit is not None:
            self.scope.limit.over = True

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.span is not None:
            self.span.begin()
        deadline = self.scope.deadline
        if deadline is not None and time.monotonic() > deadline:
            raise RpcTimeout(f"{self.label} waited for its turn until the deadline; it did not run")
        self.message.make_current()
        try:
            body = self.server.routes.arrived(self.caller, joined(self.message.body, self.parcels))
            if self.parcels and self.span is not None:
                self.span.beside("fetch", self.message.manifests[0][0])
            decoded = self.server.codec.decode(*(owned(body) if self.note.keep else body))
            del body  # the method alone is to hold its arguments
            args, kwargs = decoded or ((), {})  # a call without arguments has no payload
        except PeerLost as lost:
            cause = f"it could not fetch the arguments: {lost.cause}"
            raise PeerLost(self.server.name, cause, may_have_run=False) from lost
        except Exception as error:
            if isinstance(error, RayTorchRpcError) and not isinstance(error, SerializationError):
                raise
            why = errors.shown(error)
            raise SerializationError(f"an argument of {self.label} cannot be unpickled there: {why}") from error
        self.message = Message((), NOTHING)  # the method alone holds its arguments now
        return args, kwargs

    def _encoded(self, result: Any) -> Encoded:
        if self.kind == REMOTE:
            return NOTHING
        try:
            keep_graph = self.context != torch_internals.NO_CONTEXT
            return self.server.codec.encode(result, keep_graph=keep_graph, own=self.note.frozen)
        except SerializationError as error:
            raise SerializationError(f"the result of {self.label} cannot be pickled: {error}") from error

    def _answer(self, body: Encoded, result: Any) -> None:
        for parcel in self.parcels:
            parcel.used()
        if self.kind == REMOTE:
            self.reply(Message((False, result), NOTHING))
            return
        self.server.routes.check_back(self.caller, body.tensors)
        can = self.lane.capabilities
        if can.carries(body.tensors) and (can.rrefs or not body.rrefs):
            if body.tensors:
                body = self.server.routes.staged_back(self.caller, body)
            kept_graph = any(tensor.requires_grad for tensor in body.tensors)
            self.reply(Message((OK,), body if can.copies_at_once or kept_graph else self._snapshot(body)))
            return
        note = self.note
        if self.span is not None:
            self.span.lap()
        shipped = None if body.rrefs else self.server.routes.ship_back(self.caller, body, note.share, note.frozen)
        if shipped is not None:
            if self.span is not None and shipped.lane is not None:
                self.span.beside("ship", shipped.lane)
            try:
                self.reply(Message((OK,), shipped.body, manifests=shipped.manifests))
            except BaseException as error:
                shipped.cancel()
                if not isinstance(error, PeerLost):
                    raise
            return
        body = self._snapshot(self.server.routes.staged_back(self.caller, body))
        left = max(1.0, (self.scope.deadline or 0.0) - time.monotonic())
        number = self.server.keep(Message((OK,), body, handoff_streams(body.tensors)), left)
        self.reply(Message((KEPT, number), NOTHING))

    def _snapshot(self, body: Encoded) -> Encoded:
        # A lane that reads CUDA tensors later cannot be told when they may change again: those are copied even so.
        if self.note.frozen and not any(tensor.is_cuda for tensor in body.tensors):
            return body
        return snapshot(body)
