"""Replies that wait at a home for something that is not there yet, and ends of what lost readers have."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.this_process import has_ended
from raytorchrpc.process.workers import Deadlines

K = TypeVar("K")

#: How often to check whether the process of a lost reader has ended (seconds).
_CHECK_S = 1.0


def give_up_at(deadlines: Deadlines, until: float, reply: DeferredReply, give_up: Callable[[], Any]) -> DeferredReply:
    """Call ``give_up`` at ``until``, or when ``reply`` is cancelled, unless it is settled before. Returns ``reply``."""
    cancel_deadline = deadlines.at(until, give_up)

    def done(_: object) -> None:
        cancel_deadline()
        if reply.cancelled():
            give_up()

    reply.add_done_callback(done)
    return reply


def once_ended(deadlines: Deadlines, pid: int, over: Callable[[], object], is_wanted: Callable[[], object]) -> None:
    """Call ``over`` once the process of a lost reader on this host has ended, as long as ``is_wanted()``.

    Its sockets close earlier, while it may go on reading memory.
    """
    if has_ended(pid):
        over()
    elif is_wanted():
        deadlines.at(time.monotonic() + _CHECK_S, partial(once_ended, deadlines, pid, over, is_wanted))


class ReplyLock:
    """Protects what replies wait for. They are settled once it is free: their callbacks may take it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._after: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        self._lock.once("an operation at its home").acquire()

    def __exit__(self, *raised: object) -> None:
        after, self._after = self._after, []
        self._lock.release()
        for call in after:
            call()

    def after(self, call: Callable[..., object], *args: Any) -> None:
        """Call this once the lock is free. The caller holds it."""
        self._after.append(partial(call, *args))


class Waits(Generic[K]):
    """Replies that wait, each for something of its own. The owner holds the lock while it calls a method."""

    def __init__(self, deadlines: Deadlines, lock: ReplyLock) -> None:
        self._deadlines, self._lock = deadlines, lock
        self._waiting: list[tuple[K, DeferredReply]] = []

    def add(
        self,
        wanted: K,
        until: float,
        give_up: Callable[[], tuple[Any, Exception | None]],
        reply: DeferredReply | None = None,
    ) -> DeferredReply:
        """Have a reply wait for ``settle``; at ``until``, ``give_up``, under the lock, returns what settles it."""
        waits = wanted, reply or DeferredReply()

        def end() -> None:
            with self._lock:
                if waits in self._waiting:  # else it is settled
                    self._waiting.remove(waits)
                    self._lock.after(waits[1].settle, *give_up())

        self._waiting.append(waits)
        return give_up_at(self._deadlines, until, waits[1], end)

    def settle(
        self,
        is_due: Callable[[K], bool] = lambda wanted: True,
        value: Any = None,
        error: Exception | None = None,
        *,
        value_of: Callable[[K], Any] | None = None,
    ) -> None:
        """Settle the replies whose wait is over; all by default. ``value_of``: returns each its value."""
        waiting = []
        for wanted, reply in self._waiting:
            if is_due(wanted):
                self._lock.after(reply.settle, value if value_of is None else value_of(wanted), error)
            else:
                waiting.append((wanted, reply))
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)
