"""Queues and topics on their way: what a member asks of their home, and what the home does.

An item crosses from who puts it to the home, waits there, and crosses to who takes it. It is taken from the home once,
whatever becomes of it afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from raytorchrpc import handles
from raytorchrpc._items import (
    Chunk,
    Item,
    Loans,
    all_taken_apart,
    chunks,
    count,
    packed,
    private,
    put_together,
    unpacked,
)
from raytorchrpc._store import ENDED, FULL, Store
from raytorchrpc.calls import Future
from raytorchrpc.errors import Closed, ConfigurationError, Full, RayTorchRpcError, SerializationError
from raytorchrpc.handles import Handle, Steps, arun, new_ticket, patience, run, wait_at_home
from raytorchrpc.member import LocalMember, process_member
from raytorchrpc.services import Later

#: Of the shared memory of one sender, what its items may hold while they wait in another member.
_LENT_SHARE = 4


class Home(Store):
    """A queue or a topic in its home."""

    def __init__(self, local: LocalMember, settings: Any, closes: int, *, shared: bool) -> None:
        """``shared``: several consumers get the same item."""
        super().__init__(local.alarms, closes)
        self.settings, self.shared = settings, shared
        self.loans = Loans((local.config.shm_bytes or local.max_bytes) // _LENT_SHARE)


class Channel(Handle):
    """What the handles of queues and topics share."""

    def _home_of(self, local: LocalMember) -> Home:
        return _found(local, *self._object)

    @property
    def _most(self) -> int:
        """Items that one message may have."""
        raise NotImplementedError

    def _put(self, values: Sequence[Any], timeout: float | None) -> Steps[None]:
        local = process_member()
        wait_s = patience(local, timeout)
        until = time.monotonic() + wait_s
        road = yield from self._ready(local, wait_s)
        accepted = 0
        for items in chunks(self._apart(local, values), self._most):
            wait_s = max(0.0, until - time.monotonic())
            outcome: Any
            if road is None:
                outcome = self._home_of(local).put([private(item) for item in items], until)
                if isinstance(outcome, Later):
                    outcome = yield outcome
            else:
                outcome = yield from self._ask(
                    local, _PUT, (*self._object, packed(items), wait_at_home(wait_s)), wait_s
                )
            if outcome is FULL:
                raise Full(f"{self.kind} {self._name!r} in {self._home!r} had no room within {wait_s:.3g} s", accepted)
            if outcome is ENDED:
                raise Closed(f"{self.kind} {self._name!r} in {self._home!r} is closed", accepted)
            accepted += count(items)

    def _apart(self, local: LocalMember, values: Sequence[Any]) -> list[Item]:
        try:
            return all_taken_apart(local.codec, values, self._most)
        except SerializationError as error:
            raise SerializationError(f"an item for {self.kind} {self._name!r} cannot be pickled: {error}") from error

    def _take(self, key: str, limit: int, timeout: float | None, keep: bool) -> Steps[Any]:
        """A list of values; EMPTY or ENDED."""
        local = process_member()
        wait_s = patience(local, timeout)
        until = time.monotonic() + wait_s
        road = yield from self._ready(local, wait_s)
        if road is None:
            home = self._home_of(local)
            taken = home.take(key, limit, until)
            if isinstance(taken, Later):
                try:
                    taken = yield taken
                except BaseException:
                    with suppress(RayTorchRpcError):  # it may have left the group
                        if not taken.cancel() and (come := taken.outcome()):  # just now
                            home.put_back(key, come)
                    raise
            if taken and (keep or home.shared):
                taken = [private(item) for item in taken]
        else:
            ticket, wait_s = new_ticket(), max(0.0, until - time.monotonic())
            args = (*self._object, key, limit, wait_at_home(wait_s), ticket)
            future = self._sent(local, _TAKE, args, wait_s, keep=keep)
            try:
                taken = yield from self._answered(future)
            except BaseException as error:
                if not isinstance(error, Exception):  # cancelled, or interrupted
                    self._let_go(local, key, ticket, future)
                raise
            finally:
                del future  # it holds what it raised, which holds this frame
            if taken:
                taken = unpacked(taken)
        return put_together(local.codec, taken) if taken else taken

    def _let_go(self, local: LocalMember, key: str, ticket: int, future: Future[Any]) -> None:
        """Nobody waits for these any more: what comes all the same goes back to the front."""

        def give_back(done: Future[Any]) -> None:
            with suppress(RayTorchRpcError):
                taken = done.result(0)
                if taken:
                    local.call(self._home, _PUT_BACK, (*self._object, key, taken), {}, None, retry=0)

        with suppress(RayTorchRpcError):
            future.add_done_callback(give_back)
            local.call(self._home, _WITHDRAW, (*self._object, key, ticket), {}, None, retry=0)

    def _end(self, force: bool) -> Steps[None]:
        local = process_member()
        road = yield from self._ready(local)
        if road is None:
            self._home_of(local).end(force)
        else:
            yield from self._ask(local, _END, (*self._object, force), None)

    def _numbers(self, key: str | None) -> Steps[Any]:
        local = process_member()
        road = yield from self._ready(local)
        if road is None:
            return self._home_of(local).numbers(key)
        return (yield from self._ask(local, _NUMBERS, (*self._object, key), None))


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


# --- at home -------------------------------------------------------------------------------------------------

_PUT, _TAKE, _PUT_BACK = "raytorchrpc.put", "raytorchrpc.take", "raytorchrpc.put_back"
_WITHDRAW, _END, _NUMBERS = "raytorchrpc.withdraw", "raytorchrpc.end", "raytorchrpc.numbers"


def _found(local: LocalMember, kind: str, name: str, life: int | None) -> Home:
    home: Home = local.services.find(kind, name, life, local.me.name)
    return home


def _put(local: LocalMember, caller: int, kind: str, name: str, life: int, chunk: Chunk, wait_s: float) -> Any:
    home = _found(local, kind, name, life)
    return home.put(unpacked(chunk, caller, home.loans), time.monotonic() + wait_s)


def _take(
    local: LocalMember, caller: int, kind: str, name: str, life: int, key: str, limit: int, wait_s: float, ticket: int
) -> Any:
    taken = _found(local, kind, name, life).take(key, limit, time.monotonic() + wait_s, caller, ticket)
    if isinstance(taken, Later):
        taken.convert = _packed
        return taken
    return _packed(taken)


def _packed(taken: Any) -> Any:
    return packed(taken) if taken else taken


def _put_back(local: LocalMember, caller: int, kind: str, name: str, life: int, key: str, chunk: Chunk) -> None:
    home = _found(local, kind, name, life)
    home.put_back(key, unpacked(chunk, caller, home.loans))


def _withdraw(local: LocalMember, caller: int, kind: str, name: str, life: int, key: str, ticket: int) -> None:
    _found(local, kind, name, life).withdraw(key, caller, ticket)


def _end(local: LocalMember, caller: int, kind: str, name: str, life: int, force: bool) -> None:
    _found(local, kind, name, life).end(force)


def _numbers(local: LocalMember, caller: int, kind: str, name: str, life: int, key: str | None) -> Any:
    return _found(local, kind, name, life).numbers(key)


for _name, _function in (
    (_PUT, _put),
    (_TAKE, _take),
    (_PUT_BACK, _put_back),
    (_WITHDRAW, _withdraw),
    (_END, _end),
    (_NUMBERS, _numbers),
):
    handles.serve(_name, _function)
