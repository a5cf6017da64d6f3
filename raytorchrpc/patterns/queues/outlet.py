"""What waits for one kind of consumer at the home of a queue or a topic."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.patterns.queues.items import CHUNK_BYTES, Item, count, singles

Policy = Literal["block", "drop_oldest", "latest"]

#: (number of the handover, place of its first item): what a consumer returns with items that it gives back.
Stub = tuple[int, int]
#: Handovers that came back and are remembered: the same ones, sent again, are not taken twice.
_REMEMBERED = 1000


class Batch(list[Item]):
    """Items handed over together. They lay one behind the other."""

    def __init__(self, items: Sequence[Item], stub: Stub) -> None:
        super().__init__(items)
        self.stub = stub

    def part(self, begin: int, end: int | None = None) -> Batch:
        """Those from ``begin`` up to ``end`` (a slice), to be given back."""
        number, place = self.stub
        return Batch(self[begin:end], (number, place + count(self[:begin])))


class Getter(NamedTuple):
    """Who waits for an item."""

    later: DeferredReply
    limit: int
    until: float
    rank: int | None
    ticket: int


class _Returned(NamedTuple):
    """Items given back; others that were taken lay between them and what still waits."""

    place: int
    items: deque[Item]


class Outlet:
    """Used under its store's lock."""

    def __init__(
        self, maxsize: int, max_bytes: int, policy: Policy, rank: int | None = None, process: str | None = None
    ) -> None:
        """``rank``, ``process``: the member that it belongs to, and the token of that member's process, if to one."""
        self.maxsize, self.max_bytes, self.policy = maxsize, max_bytes, policy
        self.rank, self.process = rank, process
        self.away = False
        """Its member cannot be reached, but its process may still live. It holds up nobody meanwhile."""
        self.getters: deque[Getter] = deque()
        self.count = self.bytes = self.taken = self.dropped = 0
        self._items: deque[Item] = deque()
        self._place = 0
        """Of the first of ``_items``: how many have lain before it."""
        self._returned: list[_Returned] = []
        """By place; all before ``_items``."""
        self._handovers = 0
        self._came_back: dict[Stub, None] = {}

    def fits(self, number: int, size: int) -> bool:
        """Whether so much more may come in. What is larger than all the room comes in when nothing else is there."""
        if self.policy != "block" or not self.count:
            return True
        return self.count + number <= self.maxsize and self.bytes + size <= self.max_bytes

    def accept(self, items: Sequence[Item], size: int) -> None:
        """Take them in. A policy that drops does so here, one by one."""
        if self.policy != "block":
            items = [single for item in items for single in (singles(item) if item.many > 1 else (item,))]
            size = sum(item.size for item in items)
        self._items.extend(items)
        self.bytes += size
        self.count += count(items)
        self._trim()

    def _trim(self) -> None:
        if self.policy == "block":
            return
        while self.count > self.maxsize or (self.bytes > self.max_bytes and self.count > 1):
            item = self._source().popleft()
            self._taken(item.many)
            self.bytes -= item.size
            self.count -= item.many
            self.dropped += item.many

    def give_back(self, batch: Batch) -> None:
        """To where they were before: in front of all that was taken in after them. Idempotent."""
        if batch.stub in self._came_back:
            return
        self._came_back[batch.stub] = None
        if len(self._came_back) > _REMEMBERED:
            del self._came_back[next(iter(self._came_back))]
        place, number = batch.stub[1], count(batch)
        items: Sequence[Item] = batch
        if self.policy != "block":
            items = [single for item in batch for single in (singles(item) if item.many > 1 else (item,))]
        if place + number == self._place:
            self._items.extendleft(reversed(items))
            self._place = place
        else:
            bisect.insort(self._returned, _Returned(place, deque(items)), key=lambda returned: returned.place)
        self.bytes += sum(item.size for item in items)
        self.count += number
        self.taken -= number
        self._trim()

    def take(self, limit: int) -> Batch:
        """The oldest: at least one, at most so many, and not more bytes than one message is to have."""
        waiting = self._source()
        place = self._returned[0].place if self._returned else self._place
        taken = [self._first(waiting, limit)]
        number, size = taken[0].many, taken[0].size
        while waiting and number < limit and size + waiting[0].size <= CHUNK_BYTES:
            taken.append(self._first(waiting, limit - number))
            number += taken[-1].many
            size += taken[-1].size
        self._taken(number)
        self.bytes -= size
        self.count -= number
        self.taken += number
        self._handovers += 1
        return Batch(taken, (self._handovers, place))

    def _source(self) -> deque[Item]:
        return self._returned[0].items if self._returned else self._items

    def _taken(self, number: int) -> None:
        """So many have left ``_source``."""
        if not self._returned:
            self._place += number
            return
        place, items = self._returned[0]
        if items:
            self._returned[0] = _Returned(place + number, items)
        else:
            del self._returned[0]

    def _first(self, waiting: deque[Item], limit: int) -> Item:
        """The oldest, out of its run if that has more than ``limit``."""
        item = waiting.popleft()
        if item.many <= limit:
            return item
        apart = singles(item)
        self.bytes += sum(single.size for single in apart) - item.size
        waiting.extendleft(reversed(apart[1:]))
        return apart[0]
