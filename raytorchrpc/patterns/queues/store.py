"""The items that wait at the home of a queue or topic, and the requests that wait for items or for room.

Independent of members and messages. A store has one buffer for a queue, and one for each subscriber of a topic; every
item that is put goes to all of them. A request that cannot be answered at once becomes a ``DeferredReply``, which a
deadline settles when its time is over. Methods collect the replies under the lock and settle them after unlocking.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import NotFound
from raytorchrpc.patterns.handle import give_up_at
from raytorchrpc.patterns.queues.buffer import Batch, Buffer, Getter
from raytorchrpc.patterns.queues.items import Item, total_length
from raytorchrpc.process.workers import Deadlines

#: Outcomes of ``put``: accepted, no room in time, closed.
ACCEPTED, FULL, ENDED = True, None, False
#: Outcome of ``take`` besides ENDED and a Batch: no item in time.
EMPTY = None


class _Putter(NamedTuple):
    """A request that waits for room."""

    reply: DeferredReply
    items: Sequence[Item]
    size: int
    rank: int | None


class _Delivery(NamedTuple):
    """Items on their way to a getter: they go back to the buffer if it was cancelled meanwhile."""

    key: str
    batch: Batch


#: Replies, and what to settle each with.
_Replies = list[tuple[DeferredReply, Any]]


class Store:
    """The items of one queue or topic at its home. Thread-safe; ``put`` and ``take`` never block."""

    instance_id: int

    def __init__(self, deadlines: Deadlines, closes: int = 1, label: str = "store") -> None:
        """``closes``: how many calls of ``end`` end the stream. ``label``: names the store in error messages."""
        self._deadlines, self._label = deadlines, label
        self._lock = threading.Lock()
        self._buffers: dict[str, Buffer] = {}
        self._overrun: dict[str, Buffer] = {}
        """Subscriptions that ended because more was published than they hold while their members were away."""
        self._putters: deque[_Putter] = deque()
        self._closes = closes
        self._put = 0
        self._ended: dict[int | None, tuple[int, int]] = {}
        """Items taken and dropped in buffers that have ended, by subscriber."""
        self._broken: Exception | None = None

    # --- buffers -------------------------------------------------------------------------------------------------

    def add_buffer(self, key: str, buffer: Buffer) -> None:
        """Add a buffer for all items that are put from now on. No effect if the key exists."""
        with self._lock:
            self._buffers.setdefault(key, buffer)

    def remove_buffer(self, key: str) -> None:
        """Remove a buffer and its items; requests that wait there return ENDED. Idempotent."""
        replies: _Replies = []
        with self._lock:
            self._overrun.pop(key, None)
            buffer = self._buffers.pop(key, None)
            if buffer is not None:
                self._count_ended(buffer)
                replies = [(getter.reply, ENDED) for getter in buffer.getters] + self._match()
        self._settle(replies)

    # --- putting and taking --------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item], until: float, rank: int | None = None) -> bool | DeferredReply | None:
        """Add all items or none. Returns ACCEPTED, FULL, ENDED, or a reply that becomes one of them by ``until``.

        ``rank``: the member that puts; None: the home.
        """
        size = sum(item.size for item in items)
        with self._lock:
            self._check()
            if self._closes <= 0:
                return ENDED
            waits = self._putters or not self._fits(total_length(items), size)
            if waits:
                if until <= time.monotonic():
                    return FULL
                putter = _Putter(DeferredReply(), items, size, rank)
                self._putters.append(putter)
            else:
                self._append(items, size)
                replies = self._match()
        if not waits:
            self._settle(replies)
            return ACCEPTED
        return give_up_at(self._deadlines, until, putter.reply, partial(self._withdraw_putter, putter))

    def _withdraw_putter(self, putter: _Putter) -> None:
        with self._lock:
            if putter not in self._putters:
                return
            self._putters.remove(putter)
            replies = self._match()  # smaller ones behind it may fit
        self._settle([(putter.reply, FULL), *replies])

    def take(self, key: str, limit: int, until: float, rank: int | None = None, request_id: int = 0) -> Any:
        """Take the oldest items, at most ``limit``: a Batch, EMPTY, ENDED, or a reply that becomes one of them.

        ``rank`` and ``request_id`` identify the request for ``withdraw`` and ``lose``. Raises NotFound if there is no
        buffer of this key.
        """
        with self._lock:
            self._check()
            buffer = self._buffers.get(key)
            if buffer is None:
                raise NotFound(self._why_missing(key))
            if buffer.count and not buffer.getters:
                batch = buffer.take(limit)
                replies = self._match()
            elif self._closes <= 0 and not self._putters:
                return ENDED
            elif until <= time.monotonic():
                return EMPTY
            else:
                batch, replies = None, []
                getter = Getter(DeferredReply(), limit, until, rank, request_id)
                buffer.getters.append(getter)
        if batch:
            self._settle(replies)
            return batch
        withdraw = partial(self._withdraw_getters, key, lambda waiting: waiting is getter)
        return give_up_at(self._deadlines, until, getter.reply, withdraw)

    def withdraw(self, key: str, rank: int | None, request_id: int) -> None:
        """End a request that waits for items: it returns EMPTY."""
        self._withdraw_getters(key, lambda getter: (getter.rank, getter.request_id) == (rank, request_id))

    def _withdraw_getters(self, key: str, chosen: Callable[[Getter], bool]) -> None:
        with self._lock:
            buffer = self._buffers.get(key)
            getters = [] if buffer is None else list(filter(chosen, buffer.getters))
            for getter in getters:
                buffer.getters.remove(getter)  # type: ignore[union-attr]
        for getter in getters:
            getter.reply.settle(EMPTY)

    def put_back(self, key: str, batch: Batch) -> None:
        """Return items that a consumer took and does not use to their old position. Idempotent."""
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                return
            buffer.put_back(batch)
            replies = self._match()
        self._settle(replies)

    # --- its end -------------------------------------------------------------------------------------------------

    def end(self, force: bool = False) -> None:
        """Count one producer that is done; ``force``: all are. Items that wait can still be taken."""
        with self._lock:
            self._closes = 0 if force else self._closes - 1
            replies: _Replies = []
            if self._closes <= 0:
                replies = [(putter.reply, ENDED) for putter in self._putters]
                self._putters.clear()
                replies += self._match()
        self._settle(replies)

    def lose(self, rank: int) -> None:
        """See ``Served``. The items that the member has put stay, and so does its buffer, as far as it has room."""
        with self._lock:
            for buffer in self._buffers.values():
                buffer.getters = deque(getter for getter in buffer.getters if getter.rank != rank)
                buffer.away |= buffer.rank == rank
            replies = self._match()  # publishers may have waited for its buffer
        self._settle(replies)

    def keep_only(self, rank: int, process: str | None) -> None:
        ended = []
        with self._lock:
            for key, buffer in [*self._buffers.items(), *self._overrun.items()]:
                if buffer.rank == rank:
                    buffer.away = False
                    if process is None or buffer.process != process:
                        ended.append(key)
        for key in ended:
            self.remove_buffer(key)

    def close(self, error: Exception) -> None:
        with self._lock:
            self._broken = error
            waiting = [putter.reply for putter in self._putters]
            waiting += [getter.reply for buffer in self._buffers.values() for getter in buffer.getters]
            self._putters.clear()
            self._buffers.clear()
            self._overrun.clear()
        for reply in waiting:
            reply.settle(None, error)

    def stats(self, key: str | None = None) -> dict[str, int | bool]:
        """Return counts of one buffer; ``key`` None: of all buffers together."""
        with self._lock:
            buffers = [buffer for name, buffer in self._buffers.items() if key in (None, name)]
            return {
                "items": sum(buffer.count for buffer in buffers),
                "bytes": sum(buffer.bytes for buffer in buffers),
                "put": self._put,
                "taken": sum(buffer.taken for buffer in buffers),
                "dropped": sum(buffer.dropped for buffer in buffers),
                "waiting_to_put": len(self._putters),
                "waiting_to_get": sum(len(buffer.getters) for buffer in buffers),
                "buffers": len(buffers),
                "closed": self._closes <= 0,
            }

    # --- under the lock ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _why_missing(self, key: str) -> str:
        reason = f"{self._label} has no such subscription any more"
        if key in self._overrun:
            reason += (
                ": this member could not be reached for a while, and more was published than its buffer holds, so it "
                "has missed items"
            )
        return f"{reason}; subscribe again"

    def _fits(self, length: int, size: int) -> bool:
        return all(buffer.away or buffer.fits(length, size) for buffer in self._buffers.values())

    def _append(self, items: Sequence[Item], size: int) -> None:
        length = total_length(items)
        self._put += length
        for key, buffer in list(self._buffers.items()):
            if buffer.away and not buffer.fits(length, size):
                self._count_ended(self._buffers.pop(key))
                self._overrun[key] = Buffer(0, 0, buffer.policy, buffer.rank, buffer.process)
            else:
                buffer.append(items, size)

    def _count_ended(self, buffer: Buffer) -> None:
        taken, dropped = self._ended.get(buffer.rank, (0, 0))
        self._ended[buffer.rank] = taken + buffer.taken, dropped + buffer.dropped

    def _match(self) -> _Replies:
        """Serve waiting producers and consumers, first come, first served; returns the replies to settle."""
        replies: _Replies = []
        changed = True
        while changed:
            changed = False
            while self._putters and self._fits(total_length(self._putters[0].items), self._putters[0].size):
                putter = self._putters.popleft()
                if not putter.reply.cancelled():
                    self._append(putter.items, putter.size)
                    replies.append((putter.reply, ACCEPTED))
            for key, buffer in self._buffers.items():
                while buffer.count and buffer.getters:
                    getter = buffer.getters.popleft()
                    if getter.reply.cancelled():
                        continue
                    if getter.until <= time.monotonic():  # this process was stopped, and its caller waits no more
                        replies.append((getter.reply, EMPTY))
                        continue
                    replies.append((getter.reply, _Delivery(key, buffer.take(getter.limit))))
                    changed = True
        if self._closes <= 0 and not self._putters:
            for buffer in self._buffers.values():
                replies += [(getter.reply, ENDED) for getter in buffer.getters]
                buffer.getters.clear()
        return replies

    def _settle(self, replies: _Replies) -> None:
        """Settle replies. Not under the lock: their callbacks may call this store."""
        for reply, value in replies:
            if not isinstance(value, _Delivery):
                reply.settle(value)
            elif not reply.settle(value.batch):  # cancelled just now
                self.put_back(value.key, value.batch)
