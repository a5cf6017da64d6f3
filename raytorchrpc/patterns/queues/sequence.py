"""Sequence numbers of puts: coroutines number the puts they have in flight, and the home admits them in that order.

Messages of one producer may take different lanes, and each is served on a thread of its own, so they arrive in any
order. A thread that blocks in ``put`` has one put in flight and needs no number.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.patterns.handle import Steps
from raytorchrpc.patterns.queues.items import Item
from raytorchrpc.patterns.queues.store import FULL
from raytorchrpc.process.workers import Deadlines

#: Place of one put in its producer's sequence: (id of the PutSequence, number of this put, number of the last
#: unanswered put before it (0: none), number of the first unanswered put).
SequenceMark = tuple[int, int, int, int]

#: A put that has arrived waits this much longer than its timeout for those before it; its producer waits even longer
#: for the answer (seconds).
_HOLD_S = 0.15
#: Most sequences of one event loop, and of one home, that are kept while idle.
_KEPT = 1000

# --- at the producer -----------------------------------------------------------------------------------------


class Turn:
    """The right to send the next put of a PutSequence."""

    def __init__(self, sequence: PutSequence) -> None:
        self._sequence: PutSequence | None = sequence

    def leave(self) -> None:
        """Pass the right to the next coroutine. Idempotent."""
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            sequence.pass_on()


class PutSequence:
    """The puts of one event loop into one queue or topic. Used by that loop's thread only."""

    def __init__(self) -> None:
        self.id = secrets.randbits(62)
        self._last = 0
        self._unanswered: dict[int, int | None] = {}
        """Number -> instance id of the object, in the order in which they were sent."""
        self._sending = False
        self._waiting: deque[DeferredReply] = deque()

    @property
    def idle(self) -> bool:
        """Whether no put is in flight or being sent."""
        return not (self._sending or self._unanswered)

    @property
    def first(self) -> int:
        """The number of the first unanswered put; of the next put if all are answered."""
        return next(iter(self._unanswered), self._last + 1)

    def enter(self, until: float, deadlines: Deadlines) -> Steps[Turn | None]:
        """Wait for the turn to send, first come, first served; None at ``until``.

        A coroutine keeps it for long only if it sends several messages, or has to bind its handle first.
        """
        if not self._sending:
            self._sending = True
            return Turn(self)
        reply = DeferredReply()
        self._waiting.append(reply)
        cancel_deadline = deadlines.at(until, partial(_settle, [(reply, False)]))
        try:
            granted = yield reply
        except BaseException:
            if not reply.cancel() and reply.outcome():  # granted just now
                self.pass_on()
            raise
        finally:
            cancel_deadline()
        return Turn(self) if granted else None

    def pass_on(self) -> None:
        while self._waiting:
            if self._waiting.popleft().settle(True):
                return
        self._sending = False

    def mark(self, instance_id: int | None) -> SequenceMark:
        """Return the mark of the next put, which ``sent`` then counts."""
        before = next(reversed(self._unanswered), 0)
        if before and self._unanswered[before] != instance_id:
            before = 0  # it went to another object of this name
        return self.id, self._last + 1, before, self.first

    def sent(self, instance_id: int | None) -> int:
        """Count a put that has just been sent; returns its number, for ``answered``."""
        self._last += 1
        self._unanswered[self._last] = instance_id
        return self._last

    def answered(self, number: int) -> None:
        """Forget a put that was answered, has failed or was cancelled."""
        self._unanswered.pop(number, None)


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, PutSequence]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def running_sequence(key: Any, create: bool) -> PutSequence | None:
    """Return the sequence of the event loop that runs on this thread into the object that ``key`` names, if any.

    ``create``: make one if there is none yet.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        return None
    with _lock:
        of_loop = _by_loop.setdefault(loop, {})
    sequence = of_loop.get(key)
    if sequence is None and create:
        if len(of_loop) >= _KEPT:
            for idle in [name for name, known in of_loop.items() if known.idle]:
                del of_loop[idle]
        sequence = of_loop[key] = PutSequence()
    return sequence


# --- at the home ---------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """A put that has arrived before its predecessor."""

    before: int
    items: Sequence[Item]
    until: float
    reply: DeferredReply


@dataclass
class _Producer:
    """What a home knows of one PutSequence."""

    rank: int
    last: int = 0  # all puts up to this number were admitted, or will never arrive
    held: dict[int, _Held] = field(default_factory=dict)  # by number


class ReorderBuffer:
    """Admits the puts of each producer in the order in which they were sent. Thread-safe, never blocks."""

    def __init__(self, put: Callable[[Sequence[Item], float, int], Any], deadlines: Deadlines) -> None:
        self._put, self._deadlines = put, deadlines
        self._lock = threading.Lock()
        self._producers: dict[int, _Producer] = {}

    def put(self, rank: int, mark: SequenceMark, items: Sequence[Item], until: float) -> Any:
        """Call ``Store.put`` once all puts before this one were admitted. FULL if they do not arrive by ``until``."""
        sequence_id, number, before, first = mark
        outcome: Any
        reply: DeferredReply | None = None
        with self._lock:
            producer = self._producer(rank, sequence_id)
            replies = self._admit_up_to(producer, first - 1)
            if before > producer.last:
                outcome = reply = DeferredReply()
                producer.held[number] = _Held(before, items, until, reply)
            else:
                outcome = self._put(items, until, rank)
                replies += self._admit_up_to(producer, number)
        _settle(replies)
        if reply is not None:
            cancel_deadline = self._deadlines.at(until + _HOLD_S, partial(self._expire, producer, number))
            reply.add_done_callback(lambda _: cancel_deadline())
        return outcome

    def skip(self, rank: int, sequence_id: int, first: int) -> None:
        """Do not wait for puts before number ``first`` any more."""
        with self._lock:
            replies = self._admit_up_to(self._producer(rank, sequence_id), first - 1)
        _settle(replies)

    def lose(self, rank: int) -> None:
        """Do not wait for puts of this member that have not arrived by now."""
        replies = []
        with self._lock:
            for producer in self._producers.values():
                if producer.rank == rank and producer.held:
                    replies += self._admit_up_to(producer, max(producer.held))
        _settle(replies)

    @property
    def held(self) -> int:
        """How many puts have arrived and wait for an earlier one."""
        with self._lock:
            return sum(len(producer.held) for producer in self._producers.values())

    def close(self, error: Exception) -> None:
        """End every wait with this error."""
        with self._lock:
            waiting = [held.reply for producer in self._producers.values() for held in producer.held.values()]
            self._producers.clear()
        for reply in waiting:
            reply.settle(None, error)

    # --- under the lock ------------------------------------------------------------------------------------------

    def _producer(self, rank: int, sequence_id: int) -> _Producer:
        producer = self._producers.get(sequence_id)
        if producer is None:
            if len(self._producers) >= _KEPT:
                for idle in [key for key, known in self._producers.items() if not known.held][: _KEPT // 2]:
                    del self._producers[idle]
            producer = self._producers[sequence_id] = _Producer(rank)
        return producer

    def _admit_up_to(self, producer: _Producer, last: int) -> list[tuple[DeferredReply, Any]]:
        """Wait no more for puts up to ``last``; admits those that waited for them, and returns replies to settle."""
        producer.last = max(producer.last, last)
        replies: list[tuple[DeferredReply, Any]] = []
        for number in sorted(producer.held):
            held = producer.held[number]
            if held.before > producer.last:
                continue
            del producer.held[number]
            producer.last = max(producer.last, number)
            try:
                outcome = self._put(held.items, held.until, producer.rank)
            except RayTorchRpcError as error:
                outcome = error
            replies.append((held.reply, outcome))
        return replies

    def _expire(self, producer: _Producer, number: int) -> None:
        """Fail a put that has waited too long; puts that wait for it now wait for its predecessor."""
        with self._lock:
            expired = producer.held.pop(number, None)
            if expired is None:
                return  # admitted just now
            for other, held in producer.held.items():
                if held.before == number:
                    producer.held[other] = held._replace(before=expired.before)
        expired.reply.settle(FULL)


def _settle(replies: Sequence[tuple[DeferredReply, Any]]) -> None:
    for reply, outcome in replies:
        if isinstance(outcome, DeferredReply):
            outcome.add_done_callback(partial(_forward, reply))
        elif isinstance(outcome, Exception):
            reply.settle(None, outcome)
        else:
            reply.settle(outcome)


def _forward(reply: DeferredReply, source: Any) -> None:
    error = source.exception()
    reply.settle(source.result() if error is None else None, error)
