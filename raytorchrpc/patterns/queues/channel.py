"""What queues and topics share: handles of a store at a home, and consumers that take items from one of its buffers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.scope import Limit, Scope, current_scope, on_loop
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import (
    Closed,
    ConfigurationError,
    Full,
    PeerLost,
    RayTorchRpcError,
    RpcTimeout,
    SerializationError,
)
from raytorchrpc.patterns.handle import Handle, Steps, arun, checked_count, request_ids, run
from raytorchrpc.patterns.queues.buffer import Batch
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
from raytorchrpc.patterns.queues.sequence import PutSequence, Turn, running_sequence
from raytorchrpc.patterns.queues.services import END, PUT, PUT_BACK, SKIP, STATS, TAKE, WITHDRAW, HomeStore
from raytorchrpc.patterns.queues.store import EMPTY, ENDED, FULL

#: For how long, and how often, items are returned to a home that cannot be reached (seconds).
_RETURN_S, RETURNS = 60.0, 10


class Channel(Handle):
    """A handle of a queue or topic."""

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
        turn = None
        if in_turn and sequence is not None:
            turn = yield from sequence.enter(until, local.deadlines)
            if turn is None:
                raise self._full(0)
        try:
            yield from self._put_messages(local, values, until, sequence, turn)
        finally:
            if turn is not None:
                turn.leave()

    def _put_messages(
        self, local: LocalMember, values: Sequence[Any], until: float, sequence: PutSequence | None, turn: Turn | None
    ) -> Steps[None]:
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
            if turn is not None and number == len(parts):
                turn.leave()
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
            raise SerializationError(f"an item for {self.kind} {self._name!r} cannot be pickled: {error}") from error

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
        try:
            return (yield from response)
        except Exception:
            sequence.answered(number)
            if not sequence.idle:  # it may never arrive: the puts behind it need not wait for it
                self._notify_home(local, SKIP, (*self._address, sequence.id, sequence.first))
            raise
        finally:
            sequence.answered(number)

    # --- taking --------------------------------------------------------------------------------------------------

    def _take_from(self, key: str, limit: int, timeout: float | None, keep: bool, least: int = 1) -> Steps[Any]:
        """Take items from a buffer: at least ``least``, unless the timeout or the end of the stream comes first.

        Returns a list of values, EMPTY or ENDED.
        """
        local, wait_s = yield from self._begin(timeout)
        until = time.monotonic() + wait_s
        at_home = yield from self._bind(local, wait_s)
        batches: list[Batch] = []
        missing, most = least, limit
        batch: Any = None
        try:
            while missing > 0 and (not batches or time.monotonic() < until):
                if at_home:
                    batch = yield from self._take_here(local, key, most, until)
                    if batch and (keep or self._object(local).shared):
                        batch = Batch([private_copy(item) for item in batch], batch.batch_id)
                else:
                    batch = yield from self._take_there(local, key, most, until, keep)
                if not batch:
                    break
                batches.append(batch)
                missing, most = missing - total_length(batch), most - total_length(batch)
        except BaseException as error:
            if not batches or not isinstance(error, RayTorchRpcError):  # else the next operation raises it
                self._return_all(local, key, batches)
                raise
        if not batches:
            return batch
        return (yield from self._decode(local, key, batches))

    def _return_all(self, local: LocalMember, key: str, batches: Sequence[Batch]) -> None:
        """Return items to the home without waiting, as far as it can be reached."""
        for batch in batches:
            with suppress(RayTorchRpcError):
                self._return(local, key, batch)

    def _take_here(self, local: LocalMember, key: str, limit: int, until: float) -> Steps[Any]:
        store: HomeStore = self._object(local)
        taken = store.take(key, limit, until)
        if isinstance(taken, DeferredReply):
            try:
                return (yield taken)
            except BaseException:
                with suppress(RayTorchRpcError):  # this process may have left the group
                    if not taken.cancel() and (batch := taken.outcome()):  # settled just now
                        store.put_back(key, batch)
                raise
        return taken

    def _take_there(self, local: LocalMember, key: str, limit: int, until: float, keep: bool) -> Steps[Any]:
        request_id, wait_s = next(request_ids), max(0.0, until - time.monotonic())
        future = self._send(local, TAKE, (*self._address, key, limit, wait_s, request_id), wait_s, keep=keep)
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
        return Batch(unpack(taken[1]), taken[0]) if taken else taken

    def _home_lost(self, lost: PeerLost) -> PeerLost:
        error = super()._home_lost(lost)
        if not lost.may_have_run:
            return error
        return PeerLost(lost.peer, f"{error.cause}; an item that was on its way may be lost", True)

    def _decode(self, local: LocalMember, key: str, batches: list[Batch]) -> Steps[list[Any]]:
        """Return the values before the first item that cannot be decoded, and return the items after it to the home.

        If the very first item cannot be decoded, it is lost and raises SerializationError.
        """
        taken: list[Any] = []
        for number, batch in enumerate(batches):
            try:
                taken += decode_items(local.codec, batch)
            except UndecodableItem as undecodable:
                values, position, cause = undecodable.values, undecodable.position, undecodable.cause
            except BaseException:  # interrupted
                self._return_all(local, key, batches)
                raise
            else:
                continue
            taken += values
            rest = [batch.part(position if taken else max(1, position)), *batches[number + 1 :]]
            decoded = [*batches[:number], batch.part(0, position)]
            yield from self._wait_for_return(local, key, list(filter(None, rest)), list(filter(None, decoded)))
            if taken:
                return taken
            label = f"an item of {self.kind} {self._name!r} in {self._home!r}"
            raise SerializationError(f"{label} cannot be unpickled here; it is lost: {cause!r}") from cause
        return taken

    # --- returning items to the home -----------------------------------------------------------------------------

    def _wait_for_return(
        self, local: LocalMember, key: str, rest: Sequence[Batch], rest_if_cancelled: Sequence[Batch]
    ) -> Steps[None]:
        """Return items and wait for the answers, so that the next ``get`` finds them."""
        answers = [answer for batch in rest if (answer := self._return(local, key, batch)) is not None]
        try:
            while answers:
                yield answers.pop()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._return_all(local, key, rest_if_cancelled)
            raise
        finally:
            del answers

    def _return_late(self, local: LocalMember, key: str, future: Future[Any]) -> None:
        """Return the items of an abandoned request, however late they arrive."""
        call: Any = future._call

        def put_back() -> None:
            taken, error = call.outcome()
            if error is None and taken:
                with suppress(RayTorchRpcError):
                    self._send_urgently(local, PUT_BACK, (*self._address, key, *taken), RETURNS)

        call.add_done_callback(lambda: local.workers.submit(put_back))

    def _return(self, local: LocalMember, key: str, batch: Batch) -> Future[None] | None:
        """Return items to the home. The result is None if they are there. Raises if they cannot be sent."""
        if self._is_home(local):
            self._object(local).put_back(key, batch)
            return None
        return self._send_urgently(local, PUT_BACK, (*self._address, key, batch.batch_id, pack(batch)), RETURNS)

    def _notify_home(self, local: LocalMember, service: str, args: tuple[Any, ...], retry: int = 0) -> None:
        """Send a request as ``_send_urgently`` does, but wait for no answer and ignore errors.

        On an event loop a worker thread sends it: the connection may be busy for as long as a large message takes.
        """

        def send() -> None:
            with suppress(RayTorchRpcError):
                self._send_urgently(local, service, args, retry)

        if on_loop():
            local.workers.submit(send)
        else:
            send()

    def _send_urgently(self, local: LocalMember, service: str, args: tuple[Any, ...], retry: int) -> Future[None]:
        """Send a request beside the limits on calls in flight, and even if the current deadline has passed.

        ``retry``: how often it is sent again, by a worker thread, while the home cannot be reached.
        """
        before = current_scope.set(Scope(limit=Limit(time.monotonic() + _RETURN_S)))  # with flow control of its own
        try:
            sent = Future[None](local.outgoing.call(self._home, service, args, {}, CallOptions(_RETURN_S, retry=retry)))
        finally:
            current_scope.reset(before)
        if retry:
            sent.add_done_callback(lambda _: None)  # waiting for the response is what makes it send again
        return sent


# --- consumers ---------------------------------------------------------------------------------------------------


class Items:
    """Iterates over the items that arrive, by ``for`` or ``async for``, until the stream ends."""

    #: How many items the next step needs.
    _least = 1

    def __init__(self, take: Callable[[int], Steps[Any]], batch: int) -> None:
        self._take, self._batch = take, checked_count("batch", batch)
        self._taken: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while len(self._taken) < self._least:
            if self._is_over(run(self._take(self._batch - len(self._taken)))):
                raise StopIteration
        return self._next()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while len(self._taken) < self._least:
            if self._is_over(await arun(self._take(self._batch - len(self._taken)))):
                raise StopAsyncIteration
        return self._next()

    def _is_over(self, taken: Any) -> bool:
        """Add what was taken. Returns whether there is nothing more to yield."""
        if taken is ENDED:
            self._least = 1  # the last batch is smaller
            return not self._taken
        self._taken.extend(taken or ())
        return False

    def _next(self) -> Any:
        return self._taken.popleft()


class Batches(Items):
    """Iterates over the items that arrive as batches of equal size, collated, until the stream ends."""

    def __init__(
        self, take: Callable[[int], Steps[Any]], size: int, collate: Callable[[list[Any]], Any] | None, drop_last: bool
    ) -> None:
        super().__init__(take, checked_count("size", size))
        self._least, self._collate, self._drop_last = size, collate, drop_last

    def _is_over(self, taken: Any) -> bool:
        if taken is ENDED and self._drop_last:
            self._taken.clear()
        return super()._is_over(taken)

    def _next(self) -> Any:
        items, collate = list(self._taken), self._collate
        self._taken.clear()
        if collate is not None:
            return collate(items)
        from torch.utils.data import default_collate

        try:
            return default_collate(items)
        except (TypeError, RuntimeError, KeyError) as error:
            raise ConfigurationError(
                f"these {len(items)} items do not collate, and are lost: {error}; put items of like shapes, or pass "
                f"batches(..., collate=f), where f takes their list (collate=list leaves them as they are)"
            ) from error


class Consumer:
    """Takes items from one buffer at the home."""

    def _take(self, limit: int, timeout: float | None, keep: bool, least: int = 1) -> Steps[Any]:
        """Take items: a list of values, EMPTY or ENDED; see ``Channel._take_from``."""
        raise NotImplementedError

    def _nothing(self, ended: bool) -> Exception:
        """The error for ENDED, or for EMPTY."""
        raise NotImplementedError

    def get(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """Take the oldest item.

        Blocks until there is one. Raises Empty after the timeout, Closed at the end of the stream.

        Args:
            timeout: seconds; None: ``rpc_timeout_s``.
            keep: copy the item's tensors into memory of their own, see ``rpc_sync``.
        """
        return self._checked(run(self._take(1, timeout, keep)))[0]

    def get_many(self, limit: int, timeout: float | None = None, *, min: int = 1, keep: bool = False) -> list[Any]:
        """Take up to ``limit`` items, with few messages.

        Blocks until there are ``min`` items, by default one; then returns those that wait, at most 32 MiB beyond
        ``min``. Returns fewer than ``min`` at the end of the stream, or after the timeout, if there is at least one.
        ``timeout``, ``keep`` and errors are those of ``get``.
        """
        taken: list[Any] = self._checked(run(self._take_many(limit, timeout, min, keep)))
        return taken

    def _take_many(self, limit: int, timeout: float | None, least: int, keep: bool) -> Steps[Any]:
        if checked_count("min", least) > checked_count("limit", limit):
            raise ConfigurationError(f"min={least} exceeds limit={limit}, the most items to take")
        return self._take(limit, timeout, keep, least)

    async def aget(self, timeout: float | None = None, *, keep: bool = False) -> Any:
        """Like ``get``, for coroutines. If it is cancelled, an item that arrives for it goes back to its place."""
        return self._checked(await arun(self._take(1, timeout, keep)))[0]

    async def aget_many(
        self, limit: int, timeout: float | None = None, *, min: int = 1, keep: bool = False
    ) -> list[Any]:
        """Like ``get_many``, for coroutines. If it is cancelled, items that arrive for it go back to their place."""
        taken: list[Any] = self._checked(await arun(self._take_many(limit, timeout, min, keep)))
        return taken

    def _checked(self, taken: Any) -> Any:
        if taken is EMPTY or taken is ENDED:
            raise self._nothing(taken is ENDED)
        return taken

    def items(self, *, batch: int = 1, keep: bool = False) -> Items:
        """Return an iterator, for ``for`` and ``async for``, that yields single items until the stream ends.

        Args:
            batch: most items that one message brings. This consumer then has all of them; no other one gets them.
            keep: as for ``get``.
        """
        return Items(lambda limit: self._take(limit, None, keep), batch)

    def batches(
        self,
        size: int,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        keep: bool = False,
    ) -> Batches:
        """Return an iterator, for ``for`` and ``async for``, that yields batches until the stream ends.

        Waits for ``size`` items and stacks them along a new first dimension: items ``{"x": tensor of shape (84, 84)}``
        become ``{"x": tensor of shape (size, 84, 84)}``.

        Args:
            size: items in a batch. The last one of the stream may be smaller.
            collate: makes the batch of a list of items. None: ``torch.utils.data.default_collate``, which takes
                tensors, arrays and numbers of like shapes, also in dicts, tuples and lists. ``list``: leave the items
                as they are.
            drop_last: leave out a last batch that is smaller.
            keep: as for ``get``; useful only with a ``collate`` that keeps the items.

        The iteration raises ConfigurationError for items that ``default_collate`` cannot collate; they are lost.
        """
        return Batches(lambda limit: self._take(limit, None, keep, limit), size, collate, drop_last)

    def __iter__(self) -> Iterator[Any]:
        return self.items()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.items()
