"""What handles of queues and topics share: they put items into a store at a home, and take some from its buffers."""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.scope import Limit, Scope, current_scope, on_loop
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import (
    Closed,
    Full,
    PeerLost,
    RayTorchRpcError,
    RpcTimeout,
    SerializationError,
    no_memory,
)
from raytorchrpc.patterns.handle import Handle, Steps, arun, request_ids, run
from raytorchrpc.patterns.queues.items import (
    Item,
    UndecodableItem,
    decode_items,
    encode_items,
    messages,
    pack,
    private_copy,
    total_length,
    unpack,
)
from raytorchrpc.patterns.queues.services import END, PUT, PUT_BACK, SKIP, STATS, TAKE, WITHDRAW, HomeStore
from raytorchrpc.patterns.queues.store import EMPTY, ENDED, FULL, Batch, Request, SequenceMark
from raytorchrpc.patterns.waits import give_up_at
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import Deadlines

#: For how long, and how often, items are returned to a home that cannot be reached (seconds).
_RETURN_S, RETURNS = 60.0, 10
#: How long a handle takes what its abandoned requests may bring for waiting items (seconds).
_LATE_S = 5.0
#: Most sequences of one event loop that are kept while idle.
_KEPT = 1000


class Channel(Handle):
    """A handle of a queue or topic."""

    def _set_state(self, *state: Any) -> None:
        super()._set_state(*state)
        self._returning: set[DeferredReply] = set()
        """What may be on its way back to the home: items of abandoned requests."""

    def close(self, *, force: bool = False) -> None:
        """Declare that this producer has put its last item. Blocks for an answer of the home.

        The stream ends once all ``producers`` (of a topic: ``publishers``) have closed it. Then ``put`` and ``publish``
        raise Closed at once. Items that wait can still be taken; after them, iterations end and ``get`` raises Closed.

        Args:
            force: end the stream now, for all producers.
        """
        run(self._request_store(END, force))

    async def aclose(self, *, force: bool = False) -> None:
        """Like ``close``, for coroutines."""
        await arun(self._request_store(END, force))

    def _stats(self, key: str | None) -> dict[str, int | bool]:
        stats: dict[str, int | bool] = run(self._request_store(STATS, key))
        return stats

    def _request_store(self, service: str, *args: Any) -> Steps[Any]:
        local, _ = yield from self._begin()
        yield from self._bind(local)
        return (yield from self._request(local, service, (*self._address, *args)))

    # --- putting -------------------------------------------------------------------------------------------------

    @property
    def _message_length(self) -> int:
        """How many items one message may have."""
        raise NotImplementedError

    def _put(self, values: Sequence[Any], timeout: float | None, *, in_turn: bool = False) -> Steps[None]:
        """``in_turn``: after the puts that coroutines of this event loop have begun before."""
        local, wait_s = yield from self._begin(timeout)
        until = time.monotonic() + wait_s
        sequence = running_sequence((local.incoming.token, self.kind, self._home, self._name), in_turn)
        with ExitStack() as turn:
            if in_turn and sequence is not None:
                if not (yield from sequence.enter(until, local.deadlines)):
                    raise self._full(0)
                turn.callback(sequence.pass_on)
            at_home = yield from self._bind(local, max(0.0, until - time.monotonic()))
            parts = list(messages(self._encode(local, values), self._message_length))
            accepted = 0
            for number, items in enumerate(parts, 1):
                outcome: Any
                response = None
                if at_home:
                    outcome = self._object(local).put([private_copy(item) for item in items], until)
                else:
                    response = self._send_items(local, items, max(0.0, until - time.monotonic()), sequence)
                if number == len(parts):
                    turn.close()
                if response is not None:
                    outcome = yield from response
                elif isinstance(outcome, DeferredReply):
                    outcome = yield outcome
                if outcome is FULL:
                    raise self._full(accepted)
                if outcome is ENDED:
                    raise Closed(f"{self.kind} {self._name!r} in {self._home!r} is closed", accepted)
                accepted += total_length(items)

    def _full(self, accepted: int) -> Full:
        return Full(f"{self.kind} {self._name!r} in {self._home!r} had no room in time", accepted)

    def _encode(self, local: LocalMember, values: Sequence[Any]) -> list[Item]:
        try:
            return encode_items(local.codec, values, self._message_length)
        except SerializationError as error:
            value = values[0] if len(values) == 1 else values
            why = local.codec.explain(f"an item for {self.kind} {self._name!r}", value, error)
            raise SerializationError(why) from error
        except MemoryError as error:
            raise no_memory("this process", f"an item for {self.kind} {self._name!r}", error) from error

    def _send_items(
        self, local: LocalMember, items: Sequence[Item], wait_s: float, sequence: PutSequence | None
    ) -> Steps[Any]:
        """Send items at once; the steps that this returns wait for the response."""
        mark = None if sequence is None else sequence.mark(self._instance_id)
        sent = self._send(local, PUT, (*self._address, pack(items), wait_s, mark), wait_s)
        response = self._response(sent)
        del sent  # see _response
        if sequence is None:
            return response
        return self._in_sequence(local, response, sequence, sequence.sent(self._instance_id))

    def _in_sequence(self, local: LocalMember, response: Steps[Any], sequence: PutSequence, number: int) -> Steps[Any]:
        is_lost = True
        try:
            outcome = yield from response
            is_lost = False
            return outcome
        finally:
            if sequence.answered(number, is_lost):  # the puts behind a lost one need not wait for it
                self._notify_home(local, SKIP, (*self._address, sequence.id, sequence.first))

    # --- taking --------------------------------------------------------------------------------------------------

    def _take_from(self, key: str, request: Request, timeout: float | None, keep: bool) -> Steps[Any]:
        """Take items: values, EMPTY or ENDED."""
        local, wait_s = yield from self._begin(timeout)
        until = time.monotonic() + wait_s
        at_home = yield from self._bind(local, wait_s)
        if not at_home:  # items that go back come before those that wait there
            for returned in [*self._returning]:
                yield self._wait_until_returned(local, returned, until)
        while True:
            returning = [*self._returning]  # before the home looks: they may be back when its answer comes
            if at_home:
                batch = yield from self._take_here(local, key, request, until)
                if batch and (keep or self._object(local).shared):
                    batch = Batch(map(private_copy, batch), *batch.batch_id)
            else:
                batch = yield from self._take_there(local, key, request, until, keep)
            if batch is not ENDED or not (returning := [*returning, *self._returning]):
                break
            if time.monotonic() >= until:  # those are waiting items, too
                return EMPTY
            yield self._wait_until_returned(local, returning[0], until)
        return (yield from self._decode(local, key, batch)) if batch else batch

    def _return_at_once(self, local: LocalMember, key: str, batch: Batch) -> None:
        """Return items to the home without waiting, as far as it can be reached."""
        if not batch:
            return
        if self._is_home(local):
            with suppress(RayTorchRpcError):
                self._return(local, key, batch)
        else:
            self._put_back(local, (*self._address, key, batch.batch_id, pack(batch)), self._begin_return(local))

    def _take_here(self, local: LocalMember, key: str, request: Request, until: float) -> Steps[Any]:
        store: HomeStore = self._object(local)
        taken = store.take(key, request, until)
        if isinstance(taken, DeferredReply):
            try:
                return (yield taken)
            except BaseException:
                with suppress(RayTorchRpcError):  # this process may have left the group
                    if not taken.cancel() and (batch := taken.outcome()):  # settled just now
                        store.put_back(key, batch)
                raise
        return taken

    def _take_there(self, local: LocalMember, key: str, request: Request, until: float, keep: bool) -> Steps[Any]:
        request_id, wait_s = next(request_ids), max(0.0, until - time.monotonic())
        future = self._send(local, TAKE, (*self._address, key, *request, wait_s, request_id), wait_s, keep=keep)
        try:
            taken = yield from self._response(future)
        except RpcTimeout:
            self._return_late(local, key, future)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled, or interrupted
                self._return_late(local, key, future)
                self._notify_home(local, WITHDRAW, (*self._address, key, request_id))
            raise
        finally:
            del future  # see _response
        return Batch(unpack(taken[1]), *taken[0]) if taken else taken

    def _home_lost(self, lost: PeerLost) -> PeerLost:
        error = super()._home_lost(lost)
        if not lost.may_have_run:
            return error
        return PeerLost(lost.peer, f"{error.cause}; an item that was on its way may be lost", True)

    def _decode(self, local: LocalMember, key: str, batch: Batch) -> Steps[list[Any]]:
        """Return the values before the first item that cannot be decoded, and return the items after it to the home.

        If the very first item cannot be decoded, it is lost and raises SerializationError. For want of memory, all go
        back.
        """
        try:
            return decode_items(local.codec, batch)
        except UndecodableItem as undecodable:
            taken, position, cause = undecodable.values, undecodable.position, undecodable.cause
        except BaseException:  # interrupted, or there is no memory
            self._return_at_once(local, key, batch)
            raise
        if rest := batch.part(max(1, position)):
            yield from self._wait_for_return(local, key, rest, batch.part(0, position))
        if taken:
            return taken
        label = f"an item of {self.kind} {self._name!r} in {self._home!r}"
        try:
            raise SerializationError(f"{label} cannot be unpickled here; it is lost: {cause!r}") from cause
        finally:
            del cause  # its traceback holds this frame

    # --- returning items to the home -----------------------------------------------------------------------------

    def _wait_for_return(self, local: LocalMember, key: str, rest: Batch, decoded: Batch) -> Steps[None]:
        """Return items and wait for the answer, so that the next ``get`` finds them; all of them, if cancelled."""
        answer = self._return(local, key, rest)
        try:
            if answer is not None:
                yield answer
        except BaseException as error:
            if not isinstance(error, Exception):
                if answer is not None:
                    settle = self._begin_return(local)
                    answer.add_done_callback(lambda _: settle())
                self._return_at_once(local, key, decoded)
            raise
        finally:
            del answer

    def _begin_return(self, local: LocalMember) -> Callable[[], object]:
        """Have the next ``get`` wait until what this returns is called: items are on their way back."""
        returned = DeferredReply()
        settle = partial(returned.settle, None)
        self._returning.add(returned)
        returned.add_done_callback(self._returning.discard)
        give_up_at(local.deadlines, time.monotonic() + _LATE_S, returned, settle)
        return settle

    def _return_late(self, local: LocalMember, key: str, future: Future[Any]) -> None:
        """Return the items of an abandoned request, however late they arrive."""
        call: Any = future._call
        settle = self._begin_return(local)

        def put_back() -> None:
            taken, error = call.outcome()
            if error is None and taken:
                self._put_back(local, (*self._address, key, *taken), settle)
            else:
                settle()

        call.add_done_callback(lambda: local.workers.submit(put_back))

    def _put_back(self, local: LocalMember, args: tuple[Any, ...], settle: Callable[[], object]) -> None:
        """Return the items of an abandoned request, of whose loss nobody would hear, and call ``settle``."""
        try:
            sent = self._send_urgently(local, PUT_BACK, args, RETURNS)
        except RayTorchRpcError:
            settle()
        else:
            sent.add_done_callback(lambda _: settle())

    def _wait_until_returned(self, local: LocalMember, returned: DeferredReply, until: float) -> DeferredReply:
        waiting = DeferredReply()
        settle = partial(waiting.settle, None)
        returned.add_done_callback(lambda _: settle())
        return give_up_at(local.deadlines, until, waiting, settle)

    def _return(self, local: LocalMember, key: str, batch: Batch) -> Future[None] | None:
        """Return items to the home. The result is None if they are there. Raises if they cannot be sent."""
        if self._is_home(local):
            self._object(local).put_back(key, batch)
            return None
        return self._send_urgently(local, PUT_BACK, (*self._address, key, batch.batch_id, pack(batch)), RETURNS)

    def _notify_home(self, local: LocalMember, service: str, args: tuple[Any, ...], retry: int = 0) -> None:
        """Send a request without waiting: on an event loop by a worker thread, as a connection may be busy for long."""

        def send() -> None:
            with suppress(RayTorchRpcError):
                self._send_urgently(local, service, args, retry)

        if on_loop():
            local.workers.submit(send)
        else:
            send()

    def _send_urgently(self, local: LocalMember, service: str, args: tuple[Any, ...], retry: int) -> Future[None]:
        """Send a request beside the limits on calls in flight, and even if the current deadline has passed."""
        before = current_scope.set(Scope(limit=Limit(time.monotonic() + _RETURN_S)))  # with flow control of its own
        try:
            sent = Future[None](local.outgoing.call(self._home, service, args, {}, CallOptions(_RETURN_S, retry=retry)))
        finally:
            current_scope.reset(before)
        if retry:
            sent.add_done_callback(lambda _: None)  # waiting for the response is what makes it send again
        return sent


# --- the order of puts ------------------------------------------------------------------------------------------------
#
# Coroutines number the puts they have in flight, and the home admits them in that order: messages of one producer may
# take different lanes, and each is served on a thread of its own, so they arrive in any order. A thread that blocks in
# ``put`` has one put in flight and needs no number.


class PutSequence:
    """The puts of one event loop into one queue or topic. Used by that loop's thread only."""

    def __init__(self) -> None:
        self.id = secrets.randbits(62)
        self._last = 0
        self._unanswered: dict[int, int | None] = {}
        """Number -> instance id of the object, in the order in which they were sent."""
        self._lost: set[int] = set()
        """Puts that may never arrive, of which the home does not know."""
        self._sending = False
        self._waiting: deque[DeferredReply] = deque()

    @property
    def idle(self) -> bool:
        """Whether no put is in flight or being sent."""
        return not (self._sending or self._unanswered)

    @property
    def first(self) -> int:
        """The number of the first unanswered put; of the next put if all are answered."""
        return next(iter(self._unanswered), self._last + 1)

    def enter(self, until: float, deadlines: Deadlines) -> Steps[bool]:
        """Wait for the turn to send, first come, first served; whether it came before ``until``."""
        if not self._sending:
            self._sending = True
            return True
        reply = DeferredReply()
        self._waiting.append(reply)
        try:
            return (yield give_up_at(deadlines, until, reply, partial(reply.settle, False)))  # type: ignore[no-any-return]
        except BaseException:
            if not reply.cancel() and reply.outcome():  # granted just now
                self.pass_on()
            raise

    def pass_on(self) -> None:
        while self._waiting:
            if self._waiting.popleft().settle(True):
                return
        self._sending = False

    def mark(self, instance_id: int | None) -> SequenceMark:
        """Return the mark of the next put, which ``sent`` then counts."""
        before = next(reversed(self._unanswered), 0)
        if before and self._unanswered[before] != instance_id:
            before = 0  # it went to another object of this name
        return self.id, self._last + 1, before, self.first

    def sent(self, instance_id: int | None) -> int:
        """Count a put that has just been sent; returns its number, for ``answered``."""
        self._last += 1
        self._unanswered[self._last] = instance_id
        return self._last

    def answered(self, number: int, is_lost: bool) -> bool:
        """Forget a put; whether to tell the home from where on to wait. ``is_lost``: it may never arrive there.

        The home is told once everything before the lost one is answered, as that has to be admitted first.
        """
        self._unanswered.pop(number, None)
        if is_lost:
            self._lost.add(number)
        if not self._lost or min(self._lost) > self.first:
            return False
        self._lost = {lost for lost in self._lost if lost > self.first}
        return not self.idle


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, PutSequence]] = weakref.WeakKeyDictionary()
_lock = Lock()


def running_sequence(key: Any, create: bool) -> PutSequence | None:
    """The sequence of the event loop that runs on this thread into the object that ``key`` names, if any."""
    loop = asyncio._get_running_loop()
    if loop is None:
        return None
    with _lock:
        of_loop = _by_loop.setdefault(loop, {})
    sequence = of_loop.get(key)
    if sequence is None and create:
        if len(of_loop) >= _KEPT:
            for idle in [name for name, known in of_loop.items() if known.idle]:
                del of_loop[idle]
        sequence = of_loop[key] = PutSequence()
    return sequence
