"""Method calls being served: what they share in a member, one call up to its reply, and the replies."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

from raytorchrpc import errors
from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.calls.payload import Payloads, PendingTensors
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.protocol import ASK, CALL, OK, RAISED, REMOTE
from raytorchrpc.calls.scope import Limit, Scope, current_scope
from raytorchrpc.calls.server.exposed import Exposed, gate_of
from raytorchrpc.calls.server.gates import Admission
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import (
    CancelledError,
    PeerLost,
    RayTorchRpcError,
    RpcTimeout,
    SerializationError,
)
from raytorchrpc.lanes.base import Message, MessageLane, Reply
from raytorchrpc.process import threads
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import AtOnce, Deadlines, Workers
from raytorchrpc.tensors import host_device_copy, thread_modes
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded
from raytorchrpc.tensors.exceptions import encode_exception
from raytorchrpc.tensors.kept_errors import untraced

logger = logging.getLogger(__name__)

#: Cancellations that are remembered because their calls may not have arrived yet: a lane may change the order.
_MOST_EARLY = 1024


class Replies:
    """Answers requests, with results or exceptions. Thread-safe."""

    def __init__(self, name: str, codec: Codec) -> None:
        """``name``: of this member."""
        self._name, self._codec = name, codec

    def refusal(self, kind: int, error: BaseException) -> Message:
        """The reply with an exception, to a request of that kind."""
        if kind == REMOTE:
            return Message((True, error), NOTHING)
        encoded = encode_exception(self._codec, error)
        untraced(error)  # a method's frame may hold it: ``error = ValueError(); raise error``
        return Message((RAISED,), encoded)

    def refuse(self, kind: int, error: BaseException, reply: Reply) -> None:
        """Reply with an exception. Blocks while it is sent; does not raise."""
        self.send(reply, lambda: self.refusal(kind, error), kind)

    def run(self, function: Callable[..., Any], message: Message) -> Message:
        """The reply to a request to run something: with what ``function`` returns for what was sent, or raises."""
        try:
            asked, arguments = self._codec.decode(*message.body)
            return Message((OK,), self._codec.encode(function(asked, *arguments)))
        except BaseException as error:
            return self.refusal(ASK, error)

    def send(self, reply: Reply, make: Callable[[], Message], kind: int = CALL) -> None:
        """Reply with what ``make`` returns. Blocks while it is sent; does not raise.

        Without memory even for the reply that says so, this process ends, as its caller waits.
        """
        try:
            try:
                reply(make())
            except Exception as error:
                if not threads.is_shortage(error):
                    raise
                reply(self.refusal(kind, error))
        except PeerLost as lost:
            logger.debug("%s could not answer a call: %s", self._name, lost)  # the caller's lane reports it
        except Exception as error:
            if threads.is_shortage(error):
                threads.end_process(error, f"{self._name}, which has to answer a call,")
            threads.report(error, f"{self._name} could not answer a call")


class CancellableCalls:
    """The served calls of one member that may be cancelled, until they reply. Thread-safe."""

    def __init__(self) -> None:
        self._calls: dict[int, ServedCall] = {}
        self._early: OrderedDict[int, None] = OrderedDict()
        self.lock = Lock()
        """Also guards the phases of the calls."""

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: ServedCall) -> bool:
        """Let the caller cancel the call until it replies; False if it has done so before the call arrived."""
        self._calls[call.number] = call
        if not self._early:
            return True
        with self.lock:
            is_early = call.number in self._early
            self._early.pop(call.number, None)
        return not is_early or self.remove(call.number) is None

    def remove(self, number: int) -> ServedCall | None:
        """The call of that number; None for all but the first who ask."""
        return self._calls.pop(number, None)  # atomic

    def cancel(self, number: int) -> ServedCall | None:
        """Cancel a call; returns it if its caller is still to get a reply. One that has not arrived is remembered."""
        call = self.remove(number)
        if call is None:
            with self.lock:
                self._early[number] = None
                if len(self._early) > _MOST_EARLY:
                    self._early.popitem(last=False)
            call = self.remove(number)  # it may have arrived just now
        return call if call is not None and call.cancel() else None


class StreamTable(dict[int, Any]):
    """The streams that are open, by number; see ``services.Served``."""

    instance_id = 0

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def add(self, stream: Any) -> int:
        number = next(self._numbers)
        self[number] = stream
        return number

    def lose(self, rank: int) -> None:
        """Close the streams of a member that is away or gone."""
        for stream in self.copy().values():  # another thread may open or end some
            if stream.route.member.rank == rank:
                stream.close()

    def keep_only(self, rank: int, process: str | None) -> None:
        """A member that was away has no streams."""

    def close(self, error: Exception) -> None:
        for stream in self.copy().values():
            stream.close()


class Callee:
    """The parts of one member that all its served calls share."""

    def __init__(
        self,
        name: str,
        instance: Any,
        local: Any,
        codec: Codec,
        payloads: Payloads,
        workers: Workers,
        deadlines: Deadlines,
    ) -> None:
        """``instance``: the actor; None in a driver. ``local``: what services get instead of the actor."""
        self.name, self.instance, self.local = name, instance, local
        self.generation: str = getattr(local, "generation", "")
        self.codec, self.payloads, self.workers, self.deadlines = codec, payloads, workers, deadlines
        self.replies, self.cancellable, self.streams = (
            Replies(name, codec),
            CancellableCalls(),
            StreamTable(),
        )
        self.is_async = instance is not None and ray_internals.actor_is_async()
        self.tasks: set[asyncio.Task[None]] = set()
        """The calls on event loops."""


class Phase(Enum):
    """Where a served call is; ``ServedCall._advance`` moves it on."""

    QUEUED = "it waits for its admission"
    ADMITTED = "it runs, or is about to, on a thread or on an event loop"
    REPLIED = "its reply is sent; that of a stream says only that it is open"
    CANCELLED = "its caller has cancelled it, and gets another reply at once"


QUEUED, ADMITTED, REPLIED, CANCELLED = Phase  # to look them up there takes longer


class ServedCall:
    """One method call, from its request to its reply.

    The gate admits it; ``run``, or a task on an event loop, runs ``_call``, and that replies.
    """

    admission: Admission | None = None
    phase: Phase = QUEUED
    _leaves = True
    """It gives its admission up at its end."""
    _task: asyncio.Task[Any] | None = None
    """Once it has begun on an event loop."""

    def __init__(
        self,
        callee: Callee,
        lane: MessageLane,
        route: PeerRoute,
        exposed: Exposed,
        message: Message,
        pending: Sequence[PendingTensors],
        send: Reply,
    ) -> None:
        """``lane``: that brought the request, ``message``. ``route``: back to the caller. ``pending``: the out-of-band
        arguments. ``send``: sends a reply.
        """
        self.callee, self.lane, self.route, self.exposed = callee, lane, route, exposed
        self.message, self.pending, self.send = message, pending, send
        # A protocol.RequestHeader; to make one takes longer.
        self.kind, _, _, self.method, self.path, self.seconds, until, self.mark, self.number = message.header
        self.label = f"{callee.name}.{self.method}"
        self.limit = Limit(time.monotonic() + self.seconds if until is None else until)
        self.scope = Scope(self.path, self.limit, None, callee.generation)
        self.context = torch_internals.NO_CONTEXT
        if lane.capabilities.rrefs:  # else the lane records no hop
            self.context = torch_internals.current_autograd_context()

    @property
    def deadline(self) -> float | None:
        """It is not to run after that (``time.monotonic``)."""
        return self.scope.deadline

    @property
    def may_not_wait(self) -> bool:
        """See Workers.submit: the methods that hold all threads may wait for this very call, or for its admission."""
        return self.scope.holds_a_thread or (self.admission is not None and self.admission.gate.lends)

    def _advance(self, phase: Phase) -> bool:
        """Move on a call that may be cancelled; False if it is, or is to be and has replied."""
        with self.callee.cancellable.lock:
            if self.phase is CANCELLED or (self.phase is REPLIED and phase is CANCELLED):
                return False
            self.phase = phase
        if phase is REPLIED:
            self.callee.cancellable.remove(self.number)
        return True

    # --- at the gate ---------------------------------------------------------------------------------------------

    def admit(self, admission: Admission | None, *, inside: bool = False) -> bool:
        """Take the admission. Returns whether a thread has to run it: this one, or another by ``spawn``; else it runs
        on an event loop. Quick, never raises. It leaves the admission at its end.

        ``inside``: it runs on the event loop, inside an admission that its chain holds there and leaves itself.
        """
        self.admission, self._leaves = admission, not inside
        if self.number:
            self._advance(ADMITTED)
        else:
            self.phase = ADMITTED
        if inside or self.exposed.is_coroutine or (self.callee.is_async and not self.exposed.concurrent):
            self._start_on_loop()
            return False
        return True

    def spawn(self) -> None:
        """Run it on another thread."""
        self.callee.workers.submit(self.run)

    def refuse(self, error: Exception) -> None:
        """Answer with this error, on another thread."""
        self._drop_arguments()
        self.callee.workers.submit(AtOnce(self._refuse, error).run)

    def cancel(self) -> bool:
        """Do not run it, or cancel its coroutine; a method that runs on a thread continues. Quick.

        Returns whether its caller is still to get a reply: ``answer_cancelled``.
        """
        was_queued = self.phase is QUEUED
        if not self._advance(CANCELLED):
            return False
        if self._task is not None:
            self._on_its_loop(self._task.cancel, self._why())
        elif was_queued and not self.exposed.concurrent:
            gate = gate_of(self.callee.instance, self.exposed.concurrency_group)
            if gate is not None and gate.withdraw(self):
                self._drop_arguments()
        return True

    def answer_cancelled(self) -> None:
        """Reply, which frees what the caller keeps for the call. Blocks while it is sent; does not raise."""
        self.callee.replies.refuse(CALL, CancelledError("the call was cancelled"), self.send)

    def _why(self) -> str:
        return f"the caller of {self.label} cancelled it"

    def _drop_arguments(self) -> None:
        self.message, self.pending = NO_MESSAGE, ()  # discards those that are out of band

    # --- on a thread, or on an event loop ------------------------------------------------------------------------

    def run(self) -> None:
        """Run this call, then all that inherit the admission, on this thread. The queue may be of any length."""
        call: Any = self
        while call is not None:
            admission = call.admission
            if admission is not None:
                admission.owner = threading.get_ident()
            try:
                before = current_scope.set(call.scope.on_a_thread(admission))
                try:
                    if call.context == torch_internals.NO_CONTEXT:
                        if (coroutine := call._call()) is not None:
                            complete(coroutine)
                    else:
                        with torch_internals.autograd_context(call.context):
                            if (coroutine := call._call()) is not None:
                                complete(coroutine)
                except BaseException as error:
                    call._refuse(error)
                finally:
                    host_device_copy.reap_copies()
                    call.limit.over = True
                    current_scope.reset(before)
            except BaseException as error:
                if threads.is_shortage(error):
                    raise
                threads.report(error, f"{call.label} was not served to its end")
            finally:
                call = None if admission is None else admission.gate.pass_on(admission)

    def _start_on_loop(self) -> None:
        loop = ray_internals.actor_event_loop(self.exposed.concurrency_group)
        tasks = self.callee.tasks

        def create() -> None:
            task = loop.create_task(self._run_on_loop())
            tasks.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(tasks.discard)

        loop.call_soon_threadsafe(create)

    async def _run_on_loop(self) -> None:
        self._task = asyncio.current_task()
        try:
            current_scope.set(self.scope.inside(self.admission))  # a task has a context of its own: nothing to reset
            with torch_internals.autograd_context(self.context):
                coroutine = self._call()
            if coroutine is not None:
                await _in_autograd_context(coroutine, self.context)
        except BaseException as error:
            self._refuse(error)
        finally:
            host_device_copy.reap_copies()
            self.limit.over = True
            if self.admission is not None and self._leaves:
                self.admission.leave()

    def _on_its_loop(self, function: Callable[..., object], *args: Any) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(function, *args)

    def _call(self) -> Coroutine[Any, Any, None] | None:
        """From the arguments to the reply. Returns what is left of that to await; on a thread it does not suspend."""
        result = self._invoked()
        if self.exposed.is_coroutine:
            return self._await(result)
        if isinstance(result, DeferredReply):
            if result.done():
                self._answer_later(result)
            else:  # the thread that settles it may have other things to do than to send, which can take long
                result.add_done_callback(partial(self.callee.workers.submit, self._answer_later))
            return None
        body = self._encoded(result)
        if self.kind != REMOTE:
            result = None  # so that tensors which only the reply holds can be told from those that the actor holds
        self._answer(body, result)
        return None

    async def _await(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        result = await coroutine
        body = self._encoded(result)
        if self.kind != REMOTE:
            result = None
        self._answer(body, result)

    def _invoked(self) -> Any:
        """What the method returns. Only the method holds its arguments."""
        args, kwargs = self._arguments()
        if self.exposed.service:
            return self.exposed.function(self.callee.local, self.route.member.rank, *args, **kwargs)
        if self._task is None:
            return thread_modes.run(self.exposed.function, self.callee.instance, *args, **kwargs)
        # The actor's own event loop has the modes of torch that Ray's calls have.
        return self.exposed.function(self.callee.instance, *args, **kwargs)

    def _answer_later(self, later: Any) -> None:
        try:
            with later.context():
                self._answer(self._encoded(later.outcome()), None)
        except BaseException as error:
            self._refuse(error)
        finally:
            host_device_copy.reap_copies()

    # --- arguments and reply -------------------------------------------------------------------------------------

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.phase is CANCELLED:  # asked after the task is known: one of the two threads sees the other's
            raise CancelledError(self._why())
        if time.monotonic() > self.limit.at:
            raise RpcTimeout(f"{self.label} waited for its turn until its deadline, and did not run")
        callee, message = self.callee, self.message
        if message.make_current is not nothing:
            message.make_current()
        try:
            body, arrives_on = message.body, self.route.cpu_arrives_on
            if message.manifests or self.exposed.keep or (arrives_on is not None and body.tensors):
                body = self._unpacked(message)
            decoded = callee.codec.decode(*body)
            del body  # only the method is to hold its arguments
            args, kwargs = decoded or ((), {})  # a call without arguments has no payload
        except PeerLost as lost:
            cause = f"it could not fetch the arguments: {lost.cause}"
            raise PeerLost(callee.name, cause, may_have_run=False) from lost
        except Exception as error:
            if isinstance(error, RayTorchRpcError) and not isinstance(error, SerializationError):
                raise
            if threads.is_shortage(error):
                why = f"an argument of {self.label}, which did not run"
                raise errors.no_memory(callee.name, why, error) from error
            why = errors.shown(error)
            raise SerializationError(f"an argument of {self.label} cannot be unpickled there: {why}") from error
        self.message = NO_MESSAGE  # only the method holds its arguments now
        return args, kwargs

    def _unpacked(self, message: Message) -> Encoded:
        arrives_on, keep = self.route.cpu_arrives_on, self.exposed.keep
        unpack = self.callee.payloads.unpack
        return unpack(message.body, self.pending, message.manifests, arrives_on=arrives_on, keep=keep)

    def _encoded(self, result: Any) -> Encoded:
        if self.kind == REMOTE:
            return NOTHING
        try:
            keep_graph = self.context != torch_internals.NO_CONTEXT
            return self.callee.codec.encode(result, keep_graph=keep_graph, own=self.exposed.frozen)
        except SerializationError as error:
            raise SerializationError(self._explained(result, error)) from error
        except MemoryError as error:
            raise errors.no_memory(self.callee.name, f"the result of {self.label}", error) from error

    def _explained(self, result: Any, error: Exception) -> str:
        """The message for a result that ``error`` kept from being pickled."""
        if inspect.iscoroutine(result):
            result.close()
            return (
                f"the result of {self.label} is a coroutine that nothing awaits: a decorator of this method, such as "
                f"torch.no_grad, is not made for coroutines; use it in the method as a context"
            )
        return self.callee.codec.explain(f"the result of {self.label}", result, error)

    def _answer(self, body: Encoded, result: Any) -> None:
        for tensors in self.pending:
            tensors.used()
        if self.kind == REMOTE:
            self.reply(Message((False, result), NOTHING))
            return
        share, frozen = self.exposed.share, self.exposed.frozen
        body, beside = self.callee.payloads.pack_reply(self.route, self.lane, body, share, frozen)
        try:
            self.reply(Message((OK,), body, nothing, beside.manifests, 0, beside.cancel))
        except BaseException as error:
            beside.cancel()
            if not isinstance(error, PeerLost):
                raise

    def reply(self, message: Message) -> None:
        """Send a reply. Raises PeerLost if the caller is gone, or has cancelled the call and has another reply."""
        if not self.number:
            self.phase = REPLIED
        elif not self._advance(REPLIED):  # again, if an earlier reply could not be sent
            raise PeerLost("the caller", "it cancelled the call")
        self.send(message)

    def _refuse(self, error: BaseException) -> None:
        self.callee.replies.refuse(self.kind, error, self.reply)


NO_MESSAGE = Message((), NOTHING)


class _InContext:
    """Awaits a coroutine with a distributed autograd context entered at each of its steps.

    torch keeps the context per thread, and a loop's thread runs other coroutines in between.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context_id: int) -> None:
        self._coroutine, self._context_id = coroutine, context_id

    def __await__(self) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            try:
                with torch_internals.autograd_context(self._context_id):
                    step = self._coroutine.throw(error) if error is not None else self._coroutine.send(value)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            try:
                value = yield step
            except BaseException as thrown:  # cancellation too goes into the coroutine
                error = thrown


def complete(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run to its end, on this thread, what is left of a call."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("a call on a thread has waited for an event loop")


def _in_autograd_context(coroutine: Coroutine[Any, Any, Any], context_id: int) -> Any:
    """An awaitable of ``coroutine`` that runs it inside an existing distributed autograd context."""
    return coroutine if context_id == torch_internals.NO_CONTEXT else _InContext(coroutine, context_id)
