"""What waits at the home of a queue or topic: items in buffers, and requests for items or for room.

Independent of members and messages. A store has one buffer for a queue, and one for each subscriber of a topic; every
item that is put goes to all of them. A request that cannot be answered at once becomes a ``DeferredReply``, which a
deadline settles when its time is over. Methods collect the replies under the lock and settle them after unlocking.

Requests for items stand in line at their buffer. All items that wait are for the first one, until there are as many as
it needs; meanwhile the buffer has room for them, whatever its limits are. So no request can starve: each is the first
after those before it have been served or have given up, and then the next items are its own.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import NotFound
from raytorchrpc.patterns.queues.items import MESSAGE_BYTES, Item, split_run, total_length
from raytorchrpc.patterns.waits import ReplyLock, Waits, give_up_at
from raytorchrpc.process.workers import Deadlines
from raytorchrpc.tensors.kept_errors import again

Policy = Literal["block", "drop_oldest", "latest"]

#: Identifies items that were taken together: (number of the batch, position of each item or run).
BatchId = tuple[int, tuple[int, ...]]
#: Numbers of batches, of all stores of this process.
_batch_numbers = itertools.count(1)
#: How many returned batches are remembered, so that one that is sent twice is put back once, and withdrawn requests.
_REMEMBERED = 1000
#: Outcomes of ``put``: accepted, no room in time, closed.
ACCEPTED, FULL, ENDED = True, None, False
#: Outcome of ``take`` besides ENDED and a Batch: no item in time.
EMPTY = None
_NO_OUTCOME = object()

#: An iteration whose request was in vain keeps its place in the line for so long, to ask again (seconds).
_ASKS_AGAIN_S = 1.0


class Batch(list[Item]):
    """Items of one buffer that were taken together, in order."""

    def __init__(self, items: Iterable[Item], number: int, positions: tuple[int, ...]) -> None:
        """``number``, ``positions``: see ``BatchId``."""
        super().__init__(items)
        self.batch_id: BatchId = number, positions

    def part(self, begin: int, end: int | None = None) -> Batch:
        """Return the items from ``begin`` up to ``end``, as a batch that can be put back."""
        number, positions = self.batch_id
        return Batch(self[begin:end], number, positions[begin:end])


class Request(NamedTuple):
    """What a consumer asks for."""

    limit: int
    least: int = 1
    """At least so many items; fewer at the end of the stream and, unless it is of an iteration, after the timeout."""
    iteration: int = 0
    """The number of an iteration of the consumer's process; 0: of none. It asks again after a request in vain."""


class Getter:
    """A request that waits for items."""

    __slots__ = ("is_absent", "rank", "reply", "request", "request_id", "until")

    def __init__(self, request: Request, until: float, rank: int | None, request_id: int) -> None:
        self.request, self.until, self.rank, self.request_id = request, until, rank, request_id
        self.reply = DeferredReply()
        self.is_absent = False
        """Its time is over, and it only keeps the place of its iteration, up to a new ``until``."""


class Buffer:
    """Waiting items, and the requests that wait for some. Used under its store's lock."""

    def __init__(
        self, maxsize: int, max_bytes: int, policy: Policy, rank: int | None = None, process: str | None = None
    ) -> None:
        """``rank``, ``process``: the subscriber, and the token of its process; None for a queue's buffer."""
        self.maxsize, self.max_bytes, self.policy = maxsize, max_bytes, policy
        self.rank, self.process = rank, process
        self.away = False
        """The subscriber cannot be reached, but its process may still live. Meanwhile it holds up no publisher."""
        self.getters: deque[Getter] = deque()
        """First come, first served."""
        self.count = self.bytes = self.taken = self.dropped = 0
        self._items: deque[tuple[int, Item, float]] = deque()
        """With positions (how many items were in the buffer before), and since when they wait. In order; items that are
        taken leave gaps.
        """
        self._end = 0  # the position of the next new item
        self.returned: dict[tuple[int, int], None] = {}
        """The batches that were put back: (number, position of the first item)."""

    def oldest_s(self) -> float:
        """How long the oldest item has waited, in seconds; 0 if there is none."""
        return time.monotonic() - self._items[0][2] if self._items else 0.0

    @property
    def needed(self) -> int:
        """How many items the first request needs. A buffer with fewer has room for anything."""
        return self.getters[0].request.least if self.getters else 1

    def fits(self, length: int, size: int) -> bool:
        """Whether there is room for this many items and bytes."""
        if self.policy != "block" or self.count < self.needed:
            return True
        return self.count + length <= self.maxsize and self.bytes + size <= self.max_bytes

    def append(self, items: Sequence[Item], size: int) -> None:
        """Add items; then a policy that drops items drops those beyond the limits."""
        if self.policy != "block":
            items = list(_one_by_one(items))
            size = sum(item.size for item in items)
        now = time.monotonic()
        for item in items:
            self._items.append((self._end, item, now))
            self._end += item.length
            self.count += item.length
        self.bytes += size
        self.trim()

    def trim(self) -> None:
        """Drop items beyond the limits, if the policy says so."""
        if self.policy == "block":
            return
        needed = self.needed
        while self.count > max(self.maxsize, needed) or (self.bytes > self.max_bytes and self.count > needed):
            _, item, _ = self._items.popleft()
            self.bytes -= item.size
            self.count -= item.length
            self.dropped += item.length

    def put_back(self, batch: Batch) -> None:
        """Return items to their old position, before all items that were added after them. Idempotent."""
        number, positions = batch.batch_id
        if (number, positions[0]) in self.returned:
            return
        self.returned[number, positions[0]] = None
        if len(self.returned) > _REMEMBERED:
            del self.returned[next(iter(self.returned))]
        since = self._items[0][2] if self._items else time.monotonic()  # older than those behind them, or just returned
        returned = []
        for position, item in zip(positions, batch, strict=True):
            for place, one in enumerate((item,) if self.policy == "block" else _one_by_one((item,))):
                returned.append((position + place, one, since))
                self.bytes += one.size
                self.count += one.length
                self.taken -= one.length
        if self._items and self._items[0][0] < returned[-1][0]:  # others that were taken before are back already
            self._items = deque(sorted([*returned, *self._items], key=itemgetter(0)))
        else:
            self._items.extendleft(reversed(returned))
        self.trim()

    def take(self, limit: int, least: int = 1) -> Batch:
        """Take the oldest items, at most ``limit``, and beyond ``least`` no more bytes than one message may have."""
        taken: list[Item] = []
        positions: list[int] = []
        length = size = 0
        while self._items and length < limit:
            if length >= least and size + self._items[0][1].size > MESSAGE_BYTES:
                break
            positions.append(self._items[0][0])
            taken.append(item := self._pop(limit - length))
            length += item.length
            size += item.size
        self.bytes -= size
        self.count -= length
        self.taken += length
        return Batch(taken, next(_batch_numbers), tuple(positions))

    def line_up(self, getter: Getter) -> None:
        """Put a request at the end of the line, or where its iteration stood before."""
        if getter.request.iteration:
            key = getter.rank, getter.request.iteration
            for place, before in enumerate(self.getters):
                if before.is_absent and (before.rank, before.request.iteration) == key:
                    self.getters[place] = getter
                    return
        self.getters.append(getter)

    def _pop(self, limit: int) -> Item:
        """Remove the oldest item; splits its run if that is longer than ``limit``."""
        position, item, since = self._items.popleft()
        if item.length <= limit:
            return item
        items = split_run(item)
        self._items.extendleft((position + place, items[place], since) for place in range(len(items) - 1, 0, -1))
        self.bytes += sum(one.size for one in items) - item.size
        return items[0]


def _one_by_one(items: Sequence[Item]) -> Iterator[Item]:
    for item in items:
        if item.length > 1:
            yield from split_run(item)
        else:
            yield item


class _Putter(NamedTuple):
    """A request that waits for room."""

    reply: DeferredReply
    items: Sequence[Item]
    size: int
    rank: int | None


class Store:
    """The items of one queue or topic at its home. Thread-safe; ``put`` and ``take`` never block."""

    instance_id: int

    def __init__(self, deadlines: Deadlines, closes: int = 1, label: str = "store") -> None:
        """``closes``: how many calls of ``end`` end the stream. ``label``: names the store in error messages."""
        self._deadlines, self._label = deadlines, label
        self._lock = ReplyLock()
        self._buffers: dict[str, Buffer] = {}
        self._overrun: dict[str, Buffer] = {}
        """Subscriptions that ended because more was published than they hold while their members were away."""
        self._putters: deque[_Putter] = deque()
        self._until_full: Waits[None] = Waits(deadlines, self._lock)
        self._closes = closes
        self._has_ended = self._rests = False
        self._put = 0
        self._ended: dict[int | None, tuple[int, int]] = {}
        """Items taken and dropped in buffers that have ended, by subscriber."""
        self._withdrawn: dict[tuple[int | None, int], None] = {}
        """Requests that were withdrawn and may still arrive."""
        self._broken: Exception | None = None

    # --- buffers -------------------------------------------------------------------------------------------------

    def add_buffer(self, key: str, buffer: Buffer) -> None:
        """Add a buffer for all items that are put from now on. No effect if the key exists, or nothing can be put."""
        with self._lock:
            if not self._rests:
                self._buffers.setdefault(key, buffer)

    def remove_buffer(self, key: str) -> None:
        """Remove a buffer and its items; requests that wait there return ENDED. Idempotent."""
        with self._lock:
            self._overrun.pop(key, None)
            if (buffer := self._buffers.pop(key, None)) is not None:
                self._count_ended(buffer)
                self._drop_getters(buffer, lambda getter: True, ENDED)
                self._match()

    # --- putting and taking --------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item], until: float, rank: int | None = None) -> bool | DeferredReply | None:
        """Add all items or none. Returns ACCEPTED, FULL, ENDED, or a reply that becomes one of them by ``until``.

        ``rank``: the member that puts; None: the home.
        """
        size = sum([item.size for item in items])
        with self._lock:
            self._check()
            if self._has_ended:
                return ENDED
            if not self._putters and self._fits(total_length(items), size):
                self._append(items, size)
                self._match()
                return ACCEPTED
            if until <= time.monotonic():
                return FULL
            putter = _Putter(DeferredReply(), items, size, rank)
            self._putters.append(putter)
            self._until_full.settle(value=True)
        return give_up_at(self._deadlines, until, putter.reply, partial(self._withdraw_putter, putter))

    def await_full(self, until: float) -> bool | DeferredReply:
        """Whether requests wait for room, or a reply that becomes True once some do, or False at ``until``."""
        with self._lock:
            self._check()
            return bool(self._putters) or self._until_full.add(None, until, lambda: (False, None))

    def _withdraw_putter(self, putter: _Putter) -> None:
        with self._lock:
            if putter in self._putters:
                self._putters.remove(putter)
                self._lock.after(putter.reply.settle, FULL)
                self._match()  # smaller ones behind it may fit

    def take(self, key: str, request: Request, until: float, rank: int | None = None, request_id: int = 0) -> Any:
        """Take the oldest items: a Batch, EMPTY, ENDED, or a reply that becomes one of them.

        ``rank`` and ``request_id`` identify the request for ``withdraw`` and ``lose``. Raises NotFound if there is no
        buffer of this key.
        """
        with self._lock:
            self._check()
            buffer = self._buffers.get(key)
            if buffer is None:
                if self._has_ended and key not in self._overrun:
                    return ENDED  # subscribed after the end, maybe before an item came back
                raise NotFound(self._why_missing(key))
            if self._withdrawn and self._withdrawn.pop((rank, request_id), _NO_OUTCOME) is None:
                return EMPTY
            in_time = until > time.monotonic()
            is_first = buffer.count > 0 and not buffer.getters
            suffices = buffer.count >= request.least or self._has_ended or not (in_time or request.iteration)
            if is_first and suffices:
                batch = buffer.take(request.limit, request.least)
                self._match()
                return batch
            if self._has_ended:
                self._match()
                return ENDED
            if not in_time:
                return EMPTY
            getter = Getter(request, until, rank, request_id)
            buffer.line_up(getter)
            if buffer.count or self._putters:  # it may be the first, and there may be room for what it needs
                self._match()
        return give_up_at(self._deadlines, until, getter.reply, partial(self._give_up, key, getter))

    def _give_up(self, key: str, getter: Getter) -> None:
        """End a request that was cancelled, or whose time is over."""
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is not None and getter in buffer.getters:
                self._end_wait(key, buffer, getter)
                self._match()

    def withdraw(self, key: str, rank: int | None, request_id: int) -> None:
        """End a request that waits for items: it returns EMPTY."""
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                return
            if self._drop_getters(buffer, lambda one: (one.rank, one.request_id) == (rank, request_id), EMPTY):
                self._match()
            else:  # it was answered, or this has overtaken it
                self._withdrawn[rank, request_id] = None
                if len(self._withdrawn) > _REMEMBERED:
                    del self._withdrawn[next(iter(self._withdrawn))]

    def put_back(self, key: str, batch: Batch) -> None:
        """Return items that a consumer took and does not use to their old position. Idempotent."""
        with self._lock:
            if (buffer := self._buffers.get(key)) is not None:
                self._wake()
                buffer.put_back(batch)
                self._match()

    # --- its end -------------------------------------------------------------------------------------------------

    def end(self, force: bool = False) -> None:
        """Count one producer that is done; ``force``: all are. Items that wait can still be taken."""
        with self._lock:
            self._closes = 0 if force else self._closes - 1
            if self._closes <= 0:
                self._has_ended = True
                for putter in self._putters:
                    self._lock.after(putter.reply.settle, ENDED)
                self._putters.clear()
                self._match()

    def lose(self, rank: int) -> None:
        """See ``Served``. The items that the member has put stay, and so does its buffer, as far as it has room."""
        with self._lock:
            self._withdrawn = {request: None for request in self._withdrawn if request[0] != rank}
            for buffer in self._buffers.values():
                self._drop_getters(buffer, lambda getter: getter.rank == rank)
                buffer.away |= buffer.rank == rank
            self._match()  # publishers may have waited for its buffer

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
            for reply in waiting:
                self._lock.after(reply.settle, None, error)
            self._until_full.settle(error=error)
            self._putters.clear()
            self._buffers.clear()
            self._overrun.clear()

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
                "closed": self._has_ended,
            }

    # --- under the lock ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._broken is not None:
            raise again(self._broken)

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

    def _match(self) -> None:
        """Serve waiting producers and consumers, first come, first served."""
        changed = True
        while changed:
            changed = False
            while self._putters and self._fits(total_length(self._putters[0].items), self._putters[0].size):
                putter = self._putters.popleft()
                if not putter.reply.cancelled():
                    self._append(putter.items, putter.size)
                    self._lock.after(putter.reply.settle, ACCEPTED)
            for key, buffer in self._buffers.items():
                while buffer.count and buffer.getters:
                    getter = buffer.getters[0]
                    if getter.until <= time.monotonic() or getter.reply.cancelled():  # its deadline is late
                        self._end_wait(key, buffer, getter)
                    elif getter.is_absent and not self._has_ended:
                        break  # it is about to ask again
                    elif getter.is_absent:
                        buffer.getters.popleft()
                    elif buffer.count >= getter.request.least or self._has_ended:
                        buffer.getters.popleft()
                        batch = buffer.take(getter.request.limit, getter.request.least)
                        self._lock.after(self._deliver, getter.reply, key, batch)
                    else:
                        break
                    changed = True
        if self._has_ended:
            for buffer in self._buffers.values():
                self._drop_getters(buffer, lambda getter: True, ENDED)
            if not self._overrun and not any(buffer.count or buffer.away for buffer in self._buffers.values()):
                self._rest()

    def _rest(self) -> None:
        """The store is closed and empty, and nobody waits."""

    def _wake(self) -> None:
        """An item comes back. Raises NotFound if the store rests, and is not kept any more."""

    def _end_wait(self, key: str, buffer: Buffer, getter: Getter) -> None:
        """End a request in vain: the first one gets what there is, if it may."""
        if getter.request.iteration and not (getter.is_absent or getter.reply.cancelled()):
            getter.is_absent, getter.until = True, time.monotonic() + _ASKS_AGAIN_S
            self._lock.after(getter.reply.settle, EMPTY)
            self._lock.after(self._deadlines.at, getter.until, partial(self._give_up, key, getter))
            return
        outcome: Any = EMPTY
        # What comes after the time of a request for one item is not for it: its caller waits no more.
        if getter is buffer.getters[0] and buffer.count and getter.request.least > 1 and not getter.reply.done():
            outcome = buffer.take(getter.request.limit, getter.request.least)
        self._drop_getters(buffer, lambda waiting: waiting is getter)
        self._lock.after(self._deliver, getter.reply, key, outcome)

    def _drop_getters(self, buffer: Buffer, chosen: Callable[[Getter], bool], outcome: Any = _NO_OUTCOME) -> bool:
        """Remove requests from the line; whether there were any. ``outcome``: what they return."""
        dropped = list(filter(chosen, buffer.getters))
        for getter in dropped:
            buffer.getters.remove(getter)
            if outcome is not _NO_OUTCOME:
                self._lock.after(getter.reply.settle, outcome)
        if dropped:
            buffer.trim()  # it needs no more than usual
        return bool(dropped)

    # --- not under the lock --------------------------------------------------------------------------------------

    def _deliver(self, reply: DeferredReply, key: str, batch: Batch | None) -> None:
        if not reply.settle(batch) and batch:  # cancelled just now
            self.put_back(key, batch)
