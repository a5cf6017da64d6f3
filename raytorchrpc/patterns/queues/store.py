"""What waits at the home of a queue or a topic, and who waits for it. Knows nothing of members and messages.

A store has outlets: a queue one, a topic one for each subscriber. What is put goes to all of them. Whoever finds
nothing, or no room, is parked as a ``DeferredReply``; an alarm of the member's settles it when its time is over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import NotFound
from raytorchrpc.patterns.queues.items import Item, count
from raytorchrpc.patterns.queues.outlet import Batch, Getter, Outlet

#: What putting comes to: accepted, no room in time, closed.
PUT, FULL, ENDED = True, None, False
#: What taking comes to besides a list of items: nothing in time, closed and empty.
EMPTY = None


class Clock(Protocol):
    """See workers.Deadlines."""

    def at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back at ``when``; returns what prevents it."""


class _Putter(NamedTuple):
    later: DeferredReply
    items: Sequence[Item]
    size: int


class Store:
    """One queue or topic at its home. Thread-safe; ``put`` and ``take`` never block."""

    life: int

    def __init__(self, clock: Clock, closes: int = 1, label: str = "store") -> None:
        """``closes``: how many calls of ``end`` it takes to end it. ``label`` names it in messages."""
        self._clock, self._label = clock, label
        self._lock = threading.Lock()
        self._outlets: dict[str, Outlet] = {}
        self._overrun: dict[str, Outlet] = {}
        """Dropped with what was in them: more was put than they hold while their members were away."""
        self._putters: deque[_Putter] = deque()
        self._closes = closes
        self._put = 0
        self._broken: Exception | None = None

    # --- outlets -------------------------------------------------------------------------------------------------

    def add(self, key: str, outlet: Outlet) -> None:
        """From now on, what is put goes there too. No effect if there is one of that key."""
        with self._lock:
            self._outlets.setdefault(key, outlet)

    def remove(self, key: str) -> None:
        """With all that waits in it; who waits there is told ENDED. Idempotent."""
        told: list[tuple[DeferredReply, Any]] = []
        with self._lock:
            self._overrun.pop(key, None)
            outlet = self._outlets.pop(key, None)
            if outlet is not None:
                told += [(getter.later, ENDED) for getter in outlet.getters]
                told += self._match()
        self._settle(told)

    # --- putting and taking --------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item], until: float) -> bool | DeferredReply | None:
        """PUT, FULL, ENDED, or what becomes one of them by ``until`` (``time.monotonic``). All of them or none."""
        size = sum(item.size for item in items)
        with self._lock:
            self._check()
            if self._closes <= 0:
                return ENDED
            parked = self._putters or not self._fit(count(items), size)
            if parked:
                if until <= time.monotonic():
                    return FULL
                later = DeferredReply()
                putter = _Putter(later, items, size)
                self._putters.append(putter)
            else:
                self._accept(items, size)
                told = self._match()
        if not parked:
            self._settle(told)
            return PUT
        self._watch(later, until, partial(self._give_up_putting, putter))
        return later

    def _watch(self, later: DeferredReply, until: float, give_up: Callable[[], None]) -> None:
        """Give up at that time, or when nobody waits any more."""
        prevent = self._clock.at(until, give_up)

        def done(_: object) -> None:
            prevent()
            if later.cancelled():
                give_up()

        later.add_done_callback(done)

    def _give_up_putting(self, putter: _Putter) -> None:
        with self._lock:
            if putter not in self._putters:
                return
            self._putters.remove(putter)
            told = self._match()  # it may have been in the way of smaller ones
        self._settle([(putter.later, FULL), *told])

    def take(self, key: str, limit: int, until: float, rank: int | None = None, ticket: int = 0) -> Any:
        """A Batch of at least one item and at most ``limit``; EMPTY; ENDED; or what becomes one of them by ``until``.

        ``rank`` and ``ticket`` name who asks, for ``withdraw`` and ``lose``. Raises NotFound if there is no outlet.
        """
        with self._lock:
            self._check()
            outlet = self._outlets.get(key)
            if outlet is None:
                raise NotFound(self._why_not(key))
            if outlet.count and not outlet.getters:
                taken = outlet.take(limit)
                told = self._match()
            elif self._closes <= 0 and not self._putters:
                return ENDED
            elif until <= time.monotonic():
                return EMPTY
            else:
                taken, told = None, []
                later = DeferredReply()
                getter = Getter(later, limit, until, rank, ticket)
                outlet.getters.append(getter)
        if taken:
            self._settle(told)
            return taken
        self._watch(later, until, partial(self._give_up_taking, key, getter))
        return later

    def _give_up_taking(self, key: str, getter: Getter) -> None:
        with self._lock:
            outlet = self._outlets.get(key)
            if outlet is None or getter not in outlet.getters:
                return
            outlet.getters.remove(getter)
        getter.later.settle(EMPTY)

    def withdraw(self, key: str, rank: int | None, ticket: int) -> None:
        """Who asked does not want it any more: it is told EMPTY."""
        with self._lock:
            outlet = self._outlets.get(key)
            found = [g for g in outlet.getters if (g.rank, g.ticket) == (rank, ticket)] if outlet is not None else []
            for getter in found:
                outlet.getters.remove(getter)  # type: ignore[union-attr]
        for getter in found:
            getter.later.settle(EMPTY)

    def put_back(self, key: str, batch: Batch) -> None:
        """To where they were: they were taken for somebody who does not want them any more. Idempotent."""
        with self._lock:
            outlet = self._outlets.get(key)
            if outlet is None:
                return
            outlet.give_back(batch)
            told = self._match()
        self._settle(told)

    # --- its end -------------------------------------------------------------------------------------------------

    def end(self, force: bool = False) -> None:
        """One of those who put has done so for the last time; ``force``: all have. What waits can still be taken."""
        with self._lock:
            self._closes = 0 if force else self._closes - 1
            told: list[tuple[DeferredReply, Any]] = []
            if self._closes <= 0:
                told = [(putter.later, ENDED) for putter in self._putters]
                self._putters.clear()
                told += self._match()
        self._settle(told)

    def lose(self, rank: int) -> None:
        """See services.Served. What it has put stays, and so does what waits for it, as far as there is room."""
        with self._lock:
            for outlet in self._outlets.values():
                outlet.getters = deque(getter for getter in outlet.getters if getter.rank != rank)
                outlet.away |= outlet.rank == rank
            told = self._match()  # what it did not take may have been in the way of others
        self._settle(told)

    def keep_only(self, rank: int, process: str | None) -> None:
        """See services.Served."""
        gone = []
        with self._lock:
            for outlets in (self._outlets, self._overrun):
                for key, outlet in outlets.items():
                    if outlet.rank == rank:
                        outlet.away = False
                        if process is None or outlet.process != process:
                            gone.append(key)
        for key in gone:
            self.remove(key)

    def close(self, error: Exception) -> None:
        """See services.Served."""
        with self._lock:
            self._broken = error
            waiting = [putter.later for putter in self._putters]
            waiting += [getter.later for outlet in self._outlets.values() for getter in outlet.getters]
            self._putters.clear()
            self._outlets.clear()
            self._overrun.clear()
        for later in waiting:
            later.settle(None, error)

    def numbers(self, key: str | None = None) -> dict[str, int | bool]:
        """What there is now, and was so far; of one outlet, or of all together."""
        with self._lock:
            outlets = [outlet for name, outlet in self._outlets.items() if key in (None, name)]
            return {
                "items": sum(outlet.count for outlet in outlets),
                "bytes": sum(outlet.bytes for outlet in outlets),
                "put": self._put,
                "taken": sum(outlet.taken for outlet in outlets),
                "dropped": sum(outlet.dropped for outlet in outlets),
                "waiting_to_put": len(self._putters),
                "waiting_to_get": sum(len(outlet.getters) for outlet in outlets),
                "outlets": len(outlets),
                "closed": self._closes <= 0,
            }

    # --- under the lock ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _why_not(self, key: str) -> str:
        gone = f"{self._label} has no such subscription any more"
        if key in self._overrun:
            gone += (
                ": this member could not be reached for a while, and more was published than its buffer holds, so it "
                "has missed items"
            )
        return f"{gone}; subscribe again"

    def _fit(self, number: int, size: int) -> bool:
        return all(outlet.away or outlet.fits(number, size) for outlet in self._outlets.values())

    def _accept(self, items: Sequence[Item], size: int) -> None:
        number = count(items)
        self._put += number
        overrun = []
        for key, outlet in self._outlets.items():
            if outlet.away and not outlet.fits(number, size):
                overrun.append(key)
            else:
                outlet.accept(items, size)
        for key in overrun:
            gone = self._outlets.pop(key)
            self._overrun[key] = Outlet(0, 0, gone.policy, gone.rank, gone.process)

    def _match(self) -> list[tuple[DeferredReply, Any]]:
        """Bring together who puts and who takes, first come first served; whom to tell what afterwards."""
        told: list[tuple[DeferredReply, Any]] = []
        changed = True
        while changed:
            changed = False
            while self._putters and self._fit(count(self._putters[0].items), self._putters[0].size):
                putter = self._putters.popleft()
                if putter.later.cancelled():
                    continue
                self._accept(putter.items, putter.size)
                told.append((putter.later, PUT))
            for key, outlet in self._outlets.items():
                while outlet.count and outlet.getters:
                    getter = outlet.getters.popleft()
                    if getter.later.cancelled():
                        continue
                    if getter.until <= time.monotonic():  # this process stood still: nobody waits for the answer now
                        told.append((getter.later, EMPTY))
                        continue
                    told.append((getter.later, _Handover(key, outlet.take(getter.limit))))
                    changed = True
        if self._closes <= 0 and not self._putters:
            for outlet in self._outlets.values():
                told += [(getter.later, ENDED) for getter in outlet.getters]
                outlet.getters.clear()
        return told

    def _settle(self, told: Sequence[tuple[DeferredReply, Any]]) -> None:
        """Not under the lock: whoever is told may come back here."""
        for later, value in told:
            if isinstance(value, _Handover):
                if not later.settle(value.batch):  # cancelled just now
                    self.put_back(value.key, value.batch)
            else:
                later.settle(value)


class _Handover(NamedTuple):
    key: str
    batch: Batch
