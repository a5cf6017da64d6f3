"""What waits at the home of a queue or topic: items in buffers, and requests for items or for room.

Independent of members and messages. A store has one buffer for a queue, and one for each subscriber of a topic; every
item that is put goes to all of them. A request that cannot be answered at once becomes a ``DeferredReply``, which a
deadline settles when its time is over. Methods collect the replies under the lock and settle them after unlocking.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import NotFound
from raytorchrpc.patterns.queues.items import MESSAGE_BYTES, Item, split_run, total_length
from raytorchrpc.patterns.waits import ReplyLock, give_up_at
from raytorchrpc.process.workers import Deadlines
from raytorchrpc.tensors.kept_errors import again

Policy = Literal["block", "drop_oldest", "latest"]

#: Identifies items that were taken together: (number of the batch, position of its first item).
BatchId = tuple[int, int]
#: How many returned batches are remembered, so that one that is sent twice is put back once.
_REMEMBERED = 1000
#: Outcomes of ``put``: accepted, no room in time, closed.
ACCEPTED, FULL, ENDED = True, None, False
#: Outcome of ``take`` besides ENDED and a Batch: no item in time.
EMPTY = None

#: Place of one put in its producer's sequence: (id of the PutSequence, number of this put, number of the last
#: unanswered put before it (0: none), number of the first unanswered put).
SequenceMark = tuple[int, int, int, int]

#: A put that has arrived waits this much longer than its timeout for those before it; its producer waits even longer
#: for the answer (seconds).
_HOLD_S = 0.15
#: Most producers that a home remembers while they are idle.
_KEPT = 1000


class Batch(list[Item]):
    """Consecutive items of one buffer that were taken together."""

    def __init__(self, items: Sequence[Item], batch_id: BatchId) -> None:
        super().__init__(items)
        self.batch_id = batch_id

    def part(self, begin: int, end: int | None = None) -> Batch:
        """Return the items from ``begin`` up to ``end``, as a batch that can be put back."""
        number, position = self.batch_id
        return Batch(self[begin:end], (number, position + total_length(self[:begin])))


class Getter(NamedTuple):
    """A request that waits for items."""

    reply: DeferredReply
    limit: int
    until: float
    rank: int | None
    request_id: int


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
        self.count = self.bytes = self.taken = self.dropped = 0
        self._items: deque[tuple[int, Item, float]] = deque()
        """With positions (how many items were in the buffer before), and since when they wait. In order; items that are
        taken leave gaps.
        """
        self._end = 0  # the position of the next new item
        self._batches = 0
        self._put_back: dict[BatchId, None] = {}

    def oldest_s(self) -> float:
        """How long the oldest item has waited, in seconds; 0 if there is none."""
        return time.monotonic() - self._items[0][2] if self._items else 0.0

    def fits(self, length: int, size: int) -> bool:
        """Whether there is room for this many items and bytes. An empty buffer has room for anything."""
        if self.policy != "block" or not self.count:
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
        self._trim()

    def _trim(self) -> None:
        if self.policy == "block":
            return
        while self.count > self.maxsize or (self.bytes > self.max_bytes and self.count > 1):
            _, item, _ = self._items.popleft()
            self.bytes -= item.size
            self.count -= item.length
            self.dropped += item.length

    def put_back(self, batch: Batch) -> None:
        """Return items to their old position, before all items that were added after them. Idempotent."""
        if batch.batch_id in self._put_back:
            return
        self._put_back[batch.batch_id] = None
        if len(self._put_back) > _REMEMBERED:
            del self._put_back[next(iter(self._put_back))]
        position = batch.batch_id[1]
        since = self._items[0][2] if self._items else time.monotonic()  # older than those behind them, or just returned
        returned = []
        for item in batch if self.policy == "block" else _one_by_one(batch):
            returned.append((position, item, since))
            position += item.length
            self.bytes += item.size
            self.count += item.length
            self.taken -= item.length
        if self._items and self._items[0][0] < position:  # items that were taken before these are back already
            self._items = deque(sorted([*returned, *self._items], key=itemgetter(0)))
        else:
            self._items.extendleft(reversed(returned))
        self._trim()

    def take(self, limit: int) -> Batch:
        """Take the oldest items: at least one, at most ``limit``, and no more bytes than one message may have."""
        begin = self._items[0][0]
        taken = [self._pop(limit)]
        length, size = taken[0].length, taken[0].size
        while self._items and length < limit:
            position, item, _ = self._items[0]
            if position != begin + length or size + item.size > MESSAGE_BYTES:
                break
            taken.append(self._pop(limit - length))
            length += taken[-1].length
            size += taken[-1].size
        self.bytes -= size
        self.count -= length
        self.taken += length
        self._batches += 1
        return Batch(taken, (self._batches, begin))

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


class _Held(NamedTuple):
    """A put that has arrived before its predecessor."""

    before: int
    items: Sequence[Item]
    until: float
    reply: DeferredReply


@dataclass
class _Producer:
    """What a home knows of one PutSequence."""

    rank: int | None
    last: int = 0  # all puts up to this number were admitted, or will never arrive
    held: dict[int, _Held] = field(default_factory=dict)  # by number


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
        self._closes = closes
        self._put = 0
        self._ended: dict[int | None, tuple[int, int]] = {}
        """Items taken and dropped in buffers that have ended, by subscriber."""
        self._producers: dict[int, _Producer] = {}
        self._broken: Exception | None = None

    # --- buffers -------------------------------------------------------------------------------------------------

    def add_buffer(self, key: str, buffer: Buffer) -> None:
        """Add a buffer for all items that are put from now on. No effect if the key exists."""
        with self._lock:
            self._buffers.setdefault(key, buffer)

    def remove_buffer(self, key: str) -> None:
        """Remove a buffer and its items; requests that wait there return ENDED. Idempotent."""
        with self._lock:
            self._overrun.pop(key, None)
            if (buffer := self._buffers.pop(key, None)) is not None:
                self._count_ended(buffer)
                self._end_getters(buffer)
                self._match()

    # --- putting and taking --------------------------------------------------------------------------------------

    def put(
        self, items: Sequence[Item], until: float, rank: int | None = None, mark: SequenceMark | None = None
    ) -> bool | DeferredReply | None:
        """Add all items or none. Returns ACCEPTED, FULL, ENDED, or a reply that becomes one of them by ``until``.

        ``rank``: the member that puts; None: the home. ``mark``: puts that have one wait for those of their producer
        that were sent before; FULL if these do not arrive by ``until``.
        """
        with self._lock:
            self._check()
            if mark is None:
                return self._admit(items, until, rank)
            sequence_id, number, before, first = mark
            producer = self._producer(rank, sequence_id)
            self._admit_up_to(producer, first - 1)
            if before <= producer.last:
                outcome = self._admit(items, until, rank)
                self._admit_up_to(producer, number)
                return outcome
            reply = DeferredReply()
            producer.held[number] = _Held(before, items, until, reply)
        return give_up_at(self._deadlines, until + _HOLD_S, reply, partial(self._expire, producer, number))

    def skip(self, rank: int, sequence_id: int, first: int) -> None:
        """Do not wait for puts of a producer before number ``first`` any more."""
        with self._lock:
            self._admit_up_to(self._producer(rank, sequence_id), first - 1)

    def _expire(self, producer: _Producer, number: int) -> None:
        """Fail a put that has waited too long; puts that wait for it now wait for its predecessor."""
        with self._lock:
            expired = producer.held.pop(number, None)
            if expired is None:
                return  # admitted just now
            for other, held in producer.held.items():
                if held.before == number:
                    producer.held[other] = held._replace(before=expired.before)
            self._lock.after(expired.reply.settle, FULL)

    def _withdraw_putter(self, putter: _Putter) -> None:
        with self._lock:
            if putter in self._putters:
                self._putters.remove(putter)
                self._lock.after(putter.reply.settle, FULL)
                self._match()  # smaller ones behind it may fit

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
                self._match()
                return batch
            if self._closes <= 0 and not self._putters:
                return ENDED
            if until <= time.monotonic():
                return EMPTY
            getter = Getter(DeferredReply(), limit, until, rank, request_id)
            buffer.getters.append(getter)
        withdraw = partial(self._withdraw_getters, key, lambda waiting: waiting is getter)
        return give_up_at(self._deadlines, until, getter.reply, withdraw)

    def withdraw(self, key: str, rank: int | None, request_id: int) -> None:
        """End a request that waits for items: it returns EMPTY."""
        self._withdraw_getters(key, lambda getter: (getter.rank, getter.request_id) == (rank, request_id))

    def _withdraw_getters(self, key: str, chosen: Callable[[Getter], bool]) -> None:
        with self._lock:
            buffer = self._buffers.get(key)
            for getter in () if buffer is None else list(filter(chosen, buffer.getters)):
                buffer.getters.remove(getter)  # type: ignore[union-attr]
                self._lock.after(getter.reply.settle, EMPTY)

    def put_back(self, key: str, batch: Batch) -> None:
        """Return items that a consumer took and does not use to their old position. Idempotent."""
        with self._lock:
            if (buffer := self._buffers.get(key)) is not None:
                buffer.put_back(batch)
                self._match()

    # --- its end -------------------------------------------------------------------------------------------------

    def end(self, force: bool = False) -> None:
        """Count one producer that is done; ``force``: all are. Items that wait can still be taken."""
        with self._lock:
            self._closes = 0 if force else self._closes - 1
            if self._closes <= 0:
                for putter in self._putters:
                    self._lock.after(putter.reply.settle, ENDED)
                self._putters.clear()
                self._match()

    def lose(self, rank: int) -> None:
        """See ``Served``. The items that the member has put stay, and so does its buffer, as far as it has room."""
        with self._lock:
            for producer in self._producers.values():
                if producer.rank == rank and producer.held:  # what has not arrived by now never will
                    self._admit_up_to(producer, max(producer.held))
            for buffer in self._buffers.values():
                buffer.getters = deque(getter for getter in buffer.getters if getter.rank != rank)
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
            waiting += [held.reply for held in self._held()]
            for reply in waiting:
                self._lock.after(reply.settle, None, error)
            self._putters.clear()
            self._buffers.clear()
            self._overrun.clear()
            self._producers.clear()

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
                "waiting_to_put": len(self._putters) + len(self._held()),
                "waiting_to_get": sum(len(buffer.getters) for buffer in buffers),
                "buffers": len(buffers),
                "closed": self._closes <= 0,
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

    def _held(self) -> list[_Held]:
        return [held for producer in self._producers.values() for held in producer.held.values()]

    def _producer(self, rank: int | None, sequence_id: int) -> _Producer:
        producer = self._producers.get(sequence_id)
        if producer is None:
            if len(self._producers) >= _KEPT:
                for idle in [key for key, known in self._producers.items() if not known.held][: _KEPT // 2]:
                    del self._producers[idle]
            producer = self._producers[sequence_id] = _Producer(rank)
        return producer

    def _admit(
        self, items: Sequence[Item], until: float, rank: int | None, reply: DeferredReply | None = None
    ) -> bool | DeferredReply | None:
        """``reply``: to be settled if the items have to wait for room; None: a new one."""
        size = sum(item.size for item in items)
        if self._closes <= 0:
            return ENDED
        if not self._putters and self._fits(total_length(items), size):
            self._append(items, size)
            self._match()
            return ACCEPTED
        if until <= time.monotonic():
            return FULL
        putter = _Putter(reply or DeferredReply(), items, size, rank)
        self._putters.append(putter)
        self._lock.after(give_up_at, self._deadlines, until, putter.reply, partial(self._withdraw_putter, putter))
        return putter.reply

    def _admit_up_to(self, producer: _Producer, last: int) -> None:
        """Wait no more for puts up to ``last``; admits those that waited for them."""
        producer.last = max(producer.last, last)
        for number in sorted(producer.held):
            held = producer.held[number]
            if held.before <= producer.last:
                del producer.held[number]
                producer.last = max(producer.last, number)
                outcome = self._admit(held.items, held.until, producer.rank, held.reply)
                if outcome is not held.reply:
                    self._lock.after(held.reply.settle, outcome)

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
                    getter = buffer.getters.popleft()
                    if getter.reply.cancelled():
                        continue
                    if getter.until <= time.monotonic():  # this process was stopped, and its caller waits no more
                        self._lock.after(getter.reply.settle, EMPTY)
                        continue
                    self._lock.after(self._deliver, getter.reply, key, buffer.take(getter.limit))
                    changed = True
        if self._closes <= 0 and not self._putters:
            for buffer in self._buffers.values():
                self._end_getters(buffer)

    def _end_getters(self, buffer: Buffer) -> None:
        for getter in buffer.getters:
            self._lock.after(getter.reply.settle, ENDED)
        buffer.getters.clear()

    # --- not under the lock --------------------------------------------------------------------------------------

    def _deliver(self, reply: DeferredReply, key: str, batch: Batch) -> None:
        if not reply.settle(batch):  # cancelled just now
            self.put_back(key, batch)
