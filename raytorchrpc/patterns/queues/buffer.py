"""One buffer of waiting items at a home: a queue has one, a topic has one for each subscriber."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

from raytorchrpc.calls.server.services import DeferredReply
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
