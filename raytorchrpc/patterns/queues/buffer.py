"""One buffer of waiting items at a home: a queue has one, a topic has one for each subscriber."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.patterns.queues.items import MESSAGE_BYTES, Item, split_run, total_length

Policy = Literal["block", "drop_oldest", "latest"]

#: Identifies items that were taken together: (number of the batch, position of its first item).
BatchId = tuple[int, int]
#: How many returned batches are remembered, so that one that is sent twice is put back once.
_REMEMBERED = 1000


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


class _Returned(NamedTuple):
    """Items that were put back while items behind them are still taken."""

    position: int
    items: deque[Item]


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
        self._items: deque[Item] = deque()
        self._position = 0
        """Of the first of ``_items``: how many items were in the buffer before it."""
        self._returned: list[_Returned] = []
        """By position; all of them before ``_items``."""
        self._batches = 0
        self._put_back: dict[BatchId, None] = {}

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
        self._items.extend(items)
        self.bytes += size
        self.count += total_length(items)
        self._trim()

    def _trim(self) -> None:
        if self.policy == "block":
            return
        while self.count > self.maxsize or (self.bytes > self.max_bytes and self.count > 1):
            item = self._oldest().popleft()
            self._advance(item.length)
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
        position, length = batch.batch_id[1], total_length(batch)
        items: Sequence[Item] = batch if self.policy == "block" else list(_one_by_one(batch))
        if position + length == self._position:
            self._items.extendleft(reversed(items))
            self._position = position
        else:
            bisect.insort(self._returned, _Returned(position, deque(items)), key=lambda returned: returned.position)
        self.bytes += sum(item.size for item in items)
        self.count += length
        self.taken -= length
        self._trim()

    def take(self, limit: int) -> Batch:
        """Take the oldest items: at least one, at most ``limit``, and no more bytes than one message may have."""
        waiting = self._oldest()
        position = self._returned[0].position if self._returned else self._position
        taken = [self._pop(waiting, limit)]
        length, size = taken[0].length, taken[0].size
        while waiting and length < limit and size + waiting[0].size <= MESSAGE_BYTES:
            taken.append(self._pop(waiting, limit - length))
            length += taken[-1].length
            size += taken[-1].size
        self._advance(length)
        self.bytes -= size
        self.count -= length
        self.taken += length
        self._batches += 1
        return Batch(taken, (self._batches, position))

    def _oldest(self) -> deque[Item]:
        return self._returned[0].items if self._returned else self._items

    def _advance(self, length: int) -> None:
        """Account for this many items that have left ``_oldest``."""
        if not self._returned:
            self._position += length
            return
        position, items = self._returned[0]
        if items:
            self._returned[0] = _Returned(position + length, items)
        else:
            del self._returned[0]

    def _pop(self, waiting: deque[Item], limit: int) -> Item:
        """Remove the oldest item; splits its run if that is longer than ``limit``."""
        item = waiting.popleft()
        if item.length <= limit:
            return item
        first, *others = split_run(item)
        self.bytes += first.size + sum(other.size for other in others) - item.size
        waiting.extendleft(reversed(others))
        return first


def _one_by_one(items: Sequence[Item]) -> Iterator[Item]:
    for item in items:
        if item.length > 1:
            yield from split_run(item)
        else:
            yield item
