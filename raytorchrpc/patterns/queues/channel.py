"""Handles of queues and topics: what a member asks of their home.

An item crosses from who puts it to the home, waits there, and crosses to who takes it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from raytorchrpc.calls.event_loops import on_loop
from raytorchrpc.calls.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.scope import Limit, Scope, current_scope
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import (
    Closed,
    ConfigurationError,
    Full,
    PeerLost,
    RayTorchRpcError,
    RpcTimeout,
    SerializationError,
)
from raytorchrpc.patterns.handle import Handle, Steps, arun, membership, new_ticket, run
from raytorchrpc.patterns.queues.home import END, NUMBERS, PUT, PUT_BACK, SKIP, TAKE, WITHDRAW, Home, home_of
from raytorchrpc.patterns.queues.items import (
    Item,
    Unusable,
    all_taken_apart,
    chunks,
    count,
    packed,
    private,
    put_together,
    unpacked,
)
from raytorchrpc.patterns.queues.order import Puts, Turn, puts_here
from raytorchrpc.patterns.queues.outlet import Batch
from raytorchrpc.patterns.queues.store import ENDED, FULL

#: How long, and how often, items are sent back whose home cannot be reached (seconds).
_RETURN_S, RETURNS = 60.0, 10


class Channel(Handle):
    """What the handles of queues and topics share."""

    def _home_of(self, local: LocalMember) -> Home:
        return home_of(local, *self._object)

    @property
    def _most(self) -> int:
        """Items that one message may have."""
        raise NotImplementedError

    def _put(self, values: Sequence[Any], timeout: float | None, *, in_turn: bool = False) -> Steps[None]:
        """``in_turn``: after the puts that coroutines of this event loop have begun before."""
        local, wait_s = yield from membership(timeout)
        until = time.monotonic() + wait_s
        puts, turn = puts_here((local.incoming.token, self.kind, self._home, self._name), in_turn), None
        if in_turn and puts is not None:
            turn = yield from puts.enter(until, local.deadlines)
            if turn is None:
                raise self._full(0)
        try:
            yield from self._put_parts(local, values, until, puts, turn)
        finally:
            if turn is not None:
                turn.leave()

    def _put_parts(
        self, local: LocalMember, values: Sequence[Any], until: float, puts: Puts | None, turn: Turn | None
    ) -> Steps[None]:
        route = yield from self._ready(local, max(0.0, until - time.monotonic()))
        parts = list(chunks(self._apart(local, values), self._most))
        accepted = 0
        for number, items in enumerate(parts, 1):
            outcome: Any
            answer = None
            if route is None:
                outcome = self._home_of(local).put([private(item) for item in items], until)
            else:
                answer = self._send_part(local, items, max(0.0, until - time.monotonic()), puts)
            if turn is not None and number == len(parts):
                turn.leave()
            if answer is not None:
                outcome = yield from answer
            elif isinstance(outcome, DeferredReply):
                outcome = yield outcome
            if outcome is FULL:
                raise self._full(accepted)
            if outcome is ENDED:
                raise Closed(f"{self.kind} {self._name!r} in {self._home!r} is closed", accepted)
            accepted += count(items)

    def _full(self, accepted: int) -> Full:
        return Full(f"{self.kind} {self._name!r} in {self._home!r} had no room in time", accepted)

    def _send_part(self, local: LocalMember, items: Sequence[Item], wait_s: float, puts: Puts | None) -> Steps[Any]:
        """Sends them at once; what this returns waits for the answer."""
        mark = None if puts is None else puts.mark(self._life)
        sent = self._sent(local, PUT, (*self._object, packed(items), wait_s, mark), wait_s)
        answer = self._answered(sent)
        del sent  # see there
        return answer if puts is None else self._in_order(local, answer, puts, puts.sent(self._life))

    def _in_order(self, local: LocalMember, answer: Steps[Any], puts: Puts, number: int) -> Steps[Any]:
        try:
            return (yield from answer)
        except Exception:
            puts.answered(number)
            if not puts.idle:  # it may never arrive: those behind it need not wait for it
                self._tell_home(local, SKIP, (*self._object, puts.id, puts.first))
            raise
        finally:
            puts.answered(number)

    def _apart(self, local: LocalMember, values: Sequence[Any]) -> list[Item]:
        try:
            return all_taken_apart(local.codec, values, self._most)
        except SerializationError as error:
            raise SerializationError(f"an item for {self.kind} {self._name!r} cannot be pickled: {error}") from error

    def _take(self, key: str, limit: int, timeout: float | None, keep: bool) -> Steps[Any]:
        """A list of values; EMPTY or ENDED."""
        local, wait_s = yield from membership(timeout)
        until = time.monotonic() + wait_s
        route = yield from self._ready(local, wait_s)
        if route is None:
            batch = yield from self._take_here(local, key, limit, until)
            if batch and (keep or self._home_of(local).shared):
                batch = Batch([private(item) for item in batch], batch.stub)
        else:
            batch = yield from self._take_there(local, key, limit, until, keep)
        return (yield from self._values(local, key, batch)) if batch else batch

    def _take_here(self, local: LocalMember, key: str, limit: int, until: float) -> Steps[Any]:
        home = self._home_of(local)
        taken = home.take(key, limit, until)
        if isinstance(taken, DeferredReply):
            try:
                return (yield taken)
            except BaseException:
                with suppress(RayTorchRpcError):  # it may have left the group
                    if not taken.cancel() and (come := taken.outcome()):  # just now
                        home.put_back(key, come)
                raise
        return taken

    def _take_there(self, local: LocalMember, key: str, limit: int, until: float, keep: bool) -> Steps[Any]:
        ticket, wait_s = new_ticket(), max(0.0, until - time.monotonic())
        future = self._sent(local, TAKE, (*self._object, key, limit, wait_s, ticket), wait_s, keep=keep)
        try:
            taken = yield from self._answered(future)
        except RpcTimeout:
            self._give_back_late(local, key, future)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled, or interrupted
                self._give_back_late(local, key, future)
                self._tell_home(local, WITHDRAW, (*self._object, key, ticket))
            raise
        finally:
            del future  # it holds what it raised, which holds this frame
        return Batch(unpacked(taken[1]), taken[0]) if taken else taken

    def _lost(self, lost: PeerLost) -> PeerLost:
        error = super()._lost(lost)
        if not lost.may_have_run:
            return error
        return PeerLost(lost.peer, f"{error.cause}; an item that was on its way may be lost", True)

    def _values(self, local: LocalMember, key: str, batch: Batch) -> Steps[list[Any]]:
        """Those before the first that cannot be unpickled; the others go back, but that one if it is in front."""
        try:
            return put_together(local.codec, batch)
        except Unusable as unusable:
            good, place, cause = unusable.values, unusable.place, unusable.cause
        except BaseException:  # interrupted
            with suppress(RayTorchRpcError):
                self._return(local, key, batch)
            raise
        if rest := batch.part(max(1, place)) if not good else batch.part(place):
            yield from self._wait_for_return(local, key, rest, batch.part(0, place))
        if good:
            return good
        raise SerializationError(
            f"an item of {self.kind} {self._name!r} in {self._home!r} cannot be unpickled here; it is lost: {cause!r}"
        ) from cause

    def _wait_for_return(self, local: LocalMember, key: str, rest: Batch, rest_if_cancelled: Batch) -> Steps[None]:
        """Whoever takes next is to find them."""
        answer = self._return(local, key, rest)
        try:
            if answer is not None:
                yield answer
        except BaseException as error:
            if not isinstance(error, Exception) and rest_if_cancelled:
                with suppress(RayTorchRpcError):
                    self._return(local, key, rest_if_cancelled)
            raise
        finally:
            del answer

    def _give_back_late(self, local: LocalMember, key: str, future: Future[Any]) -> None:
        """Nobody waits for these any more: what comes all the same, however late, goes back."""
        call: Any = future._call

        def give_back() -> None:
            taken, error = call.outcome()
            if error is None and taken:
                with suppress(RayTorchRpcError):
                    self._urgent(local, PUT_BACK, (*self._object, key, *taken), RETURNS)

        call.add_done_callback(lambda: local.workers.submit(give_back))

    def _return(self, local: LocalMember, key: str, batch: Batch) -> Future[None] | None:
        """Give them back to the home; None if that is done. Raises what keeps them from being sent."""
        if self._route(local) is None:
            self._home_of(local).put_back(key, batch)
            return None
        return self._urgent(local, PUT_BACK, (*self._object, key, batch.stub, packed(batch)), RETURNS)

    def _tell_home(self, local: LocalMember, service: str, args: tuple[Any, ...], retry: int = 0) -> None:
        """As ``_urgent``; nobody waits for the answer, or can do anything if it cannot be sent.

        An event loop leaves it to a worker: the connection may be busy for as long as a large message takes.
        """

        def tell() -> None:
            with suppress(RayTorchRpcError):
                self._urgent(local, service, args, retry)

        if on_loop():
            local.workers.submit(tell)
        else:
            tell()

    def _urgent(self, local: LocalMember, service: str, args: tuple[Any, ...], retry: int) -> Future[None]:
        """Send it whatever else is under way, and whether or not a deadline has passed. ``retry``: so often again, on a
        worker, if the home is away for a while.
        """
        before = current_scope.set(Scope(limit=Limit(time.monotonic() + _RETURN_S)))  # its flow control is its own
        try:
            told = Future[None](local.outgoing.call(self._home, service, args, {}, CallOptions(_RETURN_S, retry=retry)))
        finally:
            current_scope.reset(before)
        if retry:
            told.add_done_callback(lambda _: None)  # whoever waits for the answer sends again
        return told

    def _end(self, force: bool) -> Steps[None]:
        local, _ = yield from membership()
        route = yield from self._ready(local)
        if route is None:
            self._home_of(local).end(force)
        else:
            yield from self._ask(local, END, (*self._object, force), None)

    def _numbers(self, key: str | None) -> Steps[Any]:
        local, _ = yield from membership()
        route = yield from self._ready(local)
        if route is None:
            return self._home_of(local).numbers(key)
        return (yield from self._ask(local, NUMBERS, (*self._object, key), None))


class Items:
    """Iterates over what comes, by ``for`` or ``async for``, until the end of the stream."""

    def __init__(self, take: Callable[[int], Steps[Any]], batch: int) -> None:
        if batch < 1:
            raise ConfigurationError(f"batch= is how many items may come in one message, 1 or more; not {batch!r}")
        self._take, self._batch = take, batch
        self._here: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._here:
            taken = run(self._take(self._batch))
            if taken is ENDED:
                raise StopIteration
            self._here.extend(taken or ())
        return self._here.popleft()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while not self._here:
            taken = await arun(self._take(self._batch))
            if taken is ENDED:
                raise StopAsyncIteration
            self._here.extend(taken or ())
        return self._here.popleft()
