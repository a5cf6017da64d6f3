"""What handles of queues and topics share: they put items into a store at a home, and take some from its buffers."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
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
from raytorchrpc.patterns.queues.services import END, FULL_UP, PUT, PUT_BACK, STATS, TAKE, WITHDRAW, HomeStore
from raytorchrpc.patterns.queues.store import EMPTY, ENDED, FULL, Batch, Request
from raytorchrpc.patterns.waits import give_up_at
from raytorchrpc.process.locks import Lock

#: For how long, and how often, items are returned to a home that cannot be reached (seconds).
_RETURN_S, RETURNS = 60.0, 10
#: How long a handle takes what its abandoned requests may bring for waiting items (seconds).
_LATE_S = 5.0
#: How long a question whether there is room waits at the home (seconds). One that is silent is noticed a little later.
_ASK_S = 0.5


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

    def _put(self, values: Sequence[Any], timeout: float | None) -> Steps[None]:
        local, wait_s = yield from self._begin(timeout)
        yield from self._put_until(local, values, time.monotonic() + wait_s)

    async def _aput(self, values: Sequence[Any], timeout: float | None) -> None:
        """Put items after those whose put coroutines of this event loop have begun before."""
        local, wait_s = await arun(self._begin(timeout))
        until = time.monotonic() + wait_s
        turns = turns_of_loop((local.incoming.token, self.kind, self._home, self._name))
        if not await turns.enter(wait_s, partial(self._await_full, local)):
            raise self._full(0)
        try:
            await arun(self._put_until(local, values, until))
        finally:
            turns.pass_on()

    async def _await_full(self, local: LocalMember) -> None:
        """Wait until puts wait for room at the home, which then has none for another one that does not wait."""
        current_scope.set(Scope(limit=Limit(time.monotonic() + _RETURN_S)))  # of this task: beside limits on calls
        await arun(self._bind(local, 0.0))
        while not await arun(self._request(local, FULL_UP, (*self._address, _ASK_S), _ASK_S)):
            pass

    def _put_until(self, local: LocalMember, values: Sequence[Any], until: float) -> Steps[None]:
        at_home = yield from self._bind(local, max(0.0, until - time.monotonic()))
        accepted = 0
        for items in messages(self._encode(local, values), self._message_length):
            outcome: Any
            if at_home:
                outcome = self._object(local).put([private_copy(item) for item in items], until)
                if isinstance(outcome, DeferredReply):
                    outcome = yield outcome
            else:
                wait_s = max(0.0, until - time.monotonic())
                outcome = yield from self._response(
                    self._send(local, PUT, (*self._address, pack(items), wait_s), wait_s)
                )
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
        return self._decode(local, key, batch) if batch else batch

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

    def _decode(self, local: LocalMember, key: str, batch: Batch) -> list[Any]:
        """Return the values before the first item that cannot be decoded, and return the items after it to the home.

        If the very first item cannot be decoded, it is lost and raises SerializationError. For want of memory, all go
        back.
        """
        try:
            return decode_items(local.codec, batch)
        except UndecodableItem as undecodable:
            taken, position, cause = undecodable.values, undecodable.position, undecodable.cause
        except BaseException:  # interrupted, or there is no memory
            self._return(local, key, batch)
            raise
        if rest := batch.part(max(1, position)):
            self._return(local, key, rest)
        if taken:
            return taken
        label = f"an item of {self.kind} {self._name!r} in {self._home!r}"
        try:
            raise SerializationError(f"{label} cannot be unpickled here; it is lost: {cause!r}") from cause
        finally:
            del cause  # its traceback holds this frame

    # --- returning items to the home -----------------------------------------------------------------------------

    def _return(self, local: LocalMember, key: str, batch: Batch) -> None:
        """Return items to the home without waiting, as far as it can be reached."""
        if self._is_home(local):
            with suppress(RayTorchRpcError):
                self._object(local).put_back(key, batch)
        else:
            self._put_back(local, (*self._address, key, batch.batch_id, pack(batch)), self._begin_return(local))

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
# Messages may take different lanes, and each is served on a thread of its own, so they arrive in any order. A thread
# has one put in flight, and so has an event loop: its coroutines take turns.


class PutTurns:
    """The turns of the coroutines of one event loop that put into one queue or topic. Used by that loop's thread."""

    def __init__(self) -> None:
        self.is_taken = False
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def enter(self, wait_s: float, await_full: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Wait for the turn, first come, first served. Then call ``pass_on``.

        False: ``wait_s`` is over, and then ``await_full`` returned: there is no room. Raises what that raises. Until
        then a late one keeps its place: there may be room, and the answer to the put before it is about to come.
        """
        if not self.is_taken:
            self.is_taken = True
            return True
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        asking, granted = None, False
        try:
            await asyncio.wait([turn], timeout=wait_s)
            if not turn.done():
                asking = asyncio.ensure_future(await_full())
                await asyncio.wait([turn, asking], return_when=asyncio.FIRST_COMPLETED)
            if not turn.done() and asking is not None:
                asking.result()
            granted = turn.done()
            return granted
        finally:
            if not granted and not turn.cancel():  # granted just now
                self.pass_on()
            if asking is not None and not asking.cancel():
                asking.exception()  # else asyncio would log it

    def pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.is_taken = False


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, PutTurns]] = weakref.WeakKeyDictionary()
_lock = Lock()


def turns_of_loop(key: Any) -> PutTurns:
    """The turns of the event loop that runs on this thread to put into the object that ``key`` names."""
    with _lock:
        of_loop = _by_loop.setdefault(asyncio.get_running_loop(), {})
    if key not in of_loop:
        for idle in [name for name, turns in of_loop.items() if not turns.is_taken]:
            del of_loop[idle]
        of_loop[key] = PutTurns()
    return of_loop[key]
