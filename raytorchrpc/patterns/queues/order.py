"""The order of puts that are under way at once: coroutines number what they send, the home admits it in that order.

Messages of one producer may take different lanes, and each is served on a thread of its own, so they arrive in any
order. A thread that blocks in ``put`` has one put under way and needs none of this.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.patterns.handle import Steps
from raytorchrpc.patterns.queues.items import Item
from raytorchrpc.patterns.queues.store import FULL, Clock

#: (id of a producer's Puts, number of this put, the last unanswered one before it (0: none), the first unanswered one).
Mark = tuple[int, int, int, int]

#: A put that has arrived waits so much longer than its timeout for those before it (seconds); its producer waits for
#: the answer longer than that.
_HOLD_S = 0.15
#: Of one event loop and of one home, idle ones included.
_KEPT = 1000

# --- at the producer -----------------------------------------------------------------------------------------


class Turn:
    """The right to send. Idempotent ``leave`` passes it on."""

    def __init__(self, puts: Puts) -> None:
        self._puts: Puts | None = puts

    def leave(self) -> None:
        """The next coroutine may send."""
        puts, self._puts = self._puts, None
        if puts is not None:
            puts.pass_on()


class Puts:
    """The puts of one event loop into one queue or topic. Used by that loop's thread."""

    def __init__(self) -> None:
        self.id = secrets.randbits(62)
        self._last = 0
        self._unanswered: dict[int, int | None] = {}
        """Number -> life of the object, in the order in which they were sent."""
        self._sending = False
        self._waiting: deque[DeferredReply] = deque()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._sending or self._unanswered)

    @property
    def first(self) -> int:
        """The first that is unanswered; the next to be sent if there is none."""
        return next(iter(self._unanswered), self._last + 1)

    def enter(self, until: float, clock: Clock) -> Steps[Turn | None]:
        """Wait for the turn, first come first served; None at ``until``.

        Only a coroutine that sends several messages, or has to find the object first, keeps it for long.
        """
        if not self._sending:
            self._sending = True
            return Turn(self)
        later = DeferredReply()
        self._waiting.append(later)
        prevent = clock.at(until, partial(_settle, [(later, False)]))
        try:
            granted = yield later
        except BaseException:
            if not later.cancel() and later.outcome():  # granted just now
                self.pass_on()
            raise
        finally:
            prevent()
        return Turn(self) if granted else None

    def pass_on(self) -> None:
        """See Turn.leave."""
        while self._waiting:
            if self._waiting.popleft().settle(True):
                return
        self._sending = False

    def mark(self, life: int | None) -> Mark:
        """For the next put; ``sent`` says that it is on its way."""
        before = next(reversed(self._unanswered), 0)
        if before and self._unanswered[before] != life:
            before = 0  # it went to another object of that name
        return self.id, self._last + 1, before, self.first

    def sent(self, life: int | None) -> int:
        """Returns the number of the put that has just been sent, for ``answered``."""
        self._last += 1
        self._unanswered[self._last] = life
        return self._last

    def answered(self, number: int) -> None:
        """Or failed, or nobody waits for it."""
        self._unanswered.pop(number, None)


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Puts]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def puts_here(key: Any, make: bool) -> Puts | None:
    """Those of the event loop that runs on this thread into what ``key`` names; ``make``: if there are none yet."""
    loop = asyncio._get_running_loop()
    if loop is None:
        return None
    with _lock:
        of_loop = _by_loop.setdefault(loop, {})
    puts = of_loop.get(key)
    if puts is None and make:
        if len(of_loop) >= _KEPT:
            for name in [name for name, known in of_loop.items() if known.idle]:
                del of_loop[name]
        puts = of_loop[key] = Puts()
    return puts


# --- at home -------------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """One that has arrived before its predecessor."""

    number: int
    items: Sequence[Item]
    until: float
    later: DeferredReply


class _Line:
    """Those of one producer."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last = 0
        """All up to this number were admitted, or will never come."""
        self.held: dict[int, list[_Held]] = {}
        """By predecessor."""


class Arrivals:
    """Admits the puts of each producer in the order in which they were sent. Thread-safe, never blocks."""

    def __init__(self, put: Callable[[Sequence[Item], float], Any], clock: Clock) -> None:
        """``put``: see Store.put."""
        self._put, self._clock = put, clock
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}

    def put(self, rank: int, mark: Mark, items: Sequence[Item], until: float) -> Any:
        """As Store.put, once all before it were admitted. FULL if they have not come by then."""
        producer, number, before, first = mark
        outcome: Any
        held = None
        with self._lock:
            line = self._line(rank, producer)
            done = self._pass(line, first - 1)
            if before > line.last:
                held = _Held(number, items, until, DeferredReply())
                line.held.setdefault(before, []).append(held)
                outcome = held.later
            else:
                outcome = self._put(items, until)
                done += self._admitted(line, number)
        _settle(done)
        if held is not None:
            prevent = self._clock.at(until + _HOLD_S, partial(self._drop, line, before, held))
            held.later.add_done_callback(lambda _: prevent())
        return outcome

    def skip(self, rank: int, producer: int, first: int) -> None:
        """Those before ``first`` will not come."""
        with self._lock:
            done = self._pass(self._line(rank, producer), first - 1)
        _settle(done)

    def lose(self, rank: int) -> None:
        """What that member has sent and what has not arrived by now will not come."""
        done = []
        with self._lock:
            for line in self._lines.values():
                if line.rank == rank and line.held:
                    done += self._pass(line, max(line.held))
        _settle(done)

    @property
    def held(self) -> int:
        """How many puts have arrived and wait for one that has not."""
        with self._lock:
            return sum(len(each) for line in self._lines.values() for each in line.held.values())

    def close(self, error: Exception) -> None:
        """Whoever waits gets the error."""
        with self._lock:
            waiting = [held for line in self._lines.values() for each in line.held.values() for held in each]
            self._lines.clear()
        for held in waiting:
            held.later.settle(None, error)

    # --- under the lock ------------------------------------------------------------------------------------------

    def _line(self, rank: int, producer: int) -> _Line:
        line = self._lines.get(producer)
        if line is None:
            if len(self._lines) >= _KEPT:
                for name in [name for name, known in self._lines.items() if not known.held][: _KEPT // 2]:
                    del self._lines[name]
            line = self._lines[producer] = _Line(rank)
        return line

    def _pass(self, line: _Line, number: int) -> list[tuple[DeferredReply, Any]]:
        """Nobody waits for those up to ``number`` any more. Returns what to settle."""
        if number <= line.last:
            return []
        done = []
        for before in sorted(before for before in line.held if before <= number):
            done += self._admitted(line, before)
        line.last = max(line.last, number)
        return done

    def _admitted(self, line: _Line, number: int) -> list[tuple[DeferredReply, Any]]:
        done: list[tuple[DeferredReply, Any]] = []
        due = deque([number])
        while due:
            number = due.popleft()
            line.last = max(line.last, number)
            for held in line.held.pop(number, ()):
                try:
                    outcome = self._put(held.items, held.until)
                except RayTorchRpcError as error:
                    outcome = error
                done.append((held.later, outcome))
                due.append(held.number)
        return done

    def _drop(self, line: _Line, before: int, held: _Held) -> None:
        """It has waited long enough; those behind it wait for its predecessor in its place."""
        with self._lock:
            same = line.held.get(before, [])
            others = [each for each in same if each is not held]
            if len(others) == len(same):
                return  # admitted just now
            others += line.held.pop(held.number, ())
            line.held[before] = others
            if not others:
                del line.held[before]
        held.later.settle(FULL)


def _settle(done: Sequence[tuple[DeferredReply, Any]]) -> None:
    for later, outcome in done:
        if isinstance(outcome, DeferredReply):
            outcome.add_done_callback(partial(_follow, later))
        elif isinstance(outcome, Exception):
            later.settle(None, outcome)
        else:
            later.settle(outcome)


def _follow(later: DeferredReply, parked: Any) -> None:
    error = parked.exception()
    later.settle(parked.result() if error is None else None, error)
