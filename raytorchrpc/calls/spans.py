"""A member's side of a trace: spans of its calls, in a ring that drops the oldest.

Outside ``Group.trace`` calls are of classes that know nothing of it; see ``client.traced`` and ``server.traced``. All
times are ``time.monotonic`` of this process, in seconds.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from raytorchrpc.calls.scope import on_loop

#: A mark is a number within its caller, above the caller's rank, so that no two calls of a group have the same.
_RANK_SHIFT = 40


class Event(NamedTuple):
    """A span from ``begin`` to ``end``."""

    kind: str
    """``call``: a call, at its caller; ``serve``: a method, at its callee; ``ship`` and ``fetch``: out-of-band tensors,
    sent and received; ``pull`` and ``publish``: weights."""
    name: str
    begin: float
    end: float
    thread: int
    """0: the span may overlap with others of its kind, as those of coroutines do."""
    mark: int | None
    """The same for a call and for the method that it ran."""
    about: dict[str, Any]


class MemberTrace(NamedTuple):
    """What one member recorded."""

    name: str
    rank: int
    pid: int
    events: list[Event]
    dropped: int
    """The number of oldest events that the ring had no room for."""
    threads: dict[int, str]


class Tracer:
    """Records events. Thread-safe: a deque's append is, and nothing else is shared."""

    def __init__(self, rank: int, capacity: int) -> None:
        self._base = rank << _RANK_SHIFT
        self._marks = itertools.count(1)
        self._recorded = itertools.count(1)
        self._last = 0
        self._events: deque[Event] = deque(maxlen=capacity)
        self._threads: dict[int, str] = {}
        self.forget_limit: Callable[[], None] = lambda: None
        """Cancels the stop at the time limit, and holds it until then."""

    def call(self, label: str, caller_waits: bool) -> Span:
        """A call begins on this thread. ``caller_waits``: the thread waits for it at once."""
        return Span(self, "call", label, self._base + next(self._marks), self.here() if caller_waits else 0)

    def served(self, label: str, mark: int | None) -> Span:
        """A request has arrived."""
        return Span(self, "serve", label, mark, 0)

    def here(self) -> int:
        """The ident of this thread, whose name is noted."""
        ident = threading.get_ident()
        if ident not in self._threads:
            self._threads[ident] = threading.current_thread().name
        return ident

    def span(self, kind: str, name: str, begin: float, about: dict[str, Any], error: str | None) -> None:
        """Record what this thread has done since ``begin``. ``error``: the type of what it raised."""
        about = about if error is None else {**about, "error": error}
        self.add(Event(kind, name, begin, time.monotonic(), self.here(), None, about))

    def add(self, event: Event) -> None:
        self._last = next(self._recorded)
        self._events.append(event)

    def taken(self) -> tuple[list[Event], int, dict[int, str]]:
        """The events, how many were dropped, and the names of the threads."""
        events = list(self._events)
        return events, max(0, self._last - len(events)), dict(self._threads)


class Span:
    """One call, at its caller or at its callee."""

    __slots__ = ("_ended", "_kind", "_name", "_thread", "_tracer", "about", "began", "mark")

    def __init__(self, tracer: Tracer, kind: str, name: str, mark: int | None, thread: int) -> None:
        self._tracer, self._kind, self._name, self.mark, self._thread = tracer, kind, name, mark, thread
        self.about: dict[str, Any] = {}
        self._ended = False
        self.began = time.monotonic()

    def begin(self) -> None:
        """The method starts, on this thread."""
        self._thread = 0 if on_loop() else self._tracer.here()
        now = time.monotonic()
        self.about["waited_us"] = round((now - self.began) * 1e6, 1)
        self.began = now

    def beside(self, kind: str, lane: str, began: float, end: float | None = None) -> None:
        """Out-of-band tensors were exported or fetched over ``lane``, from ``began`` to ``end`` (None: now)."""
        self.about[kind] = lane
        end = time.monotonic() if end is None else end
        self._tracer.add(Event(kind, f"{kind} by {lane}", began, end, self._tracer.here(), None, {"call": self._name}))

    def end(self, **about: Any) -> None:
        """The outcome was taken, the call could not be sent, or the reply is about to be sent. Idempotent: a reply that
        no lane took is followed by another.
        """
        if not self._ended:
            self._ended = True
            now, about = time.monotonic(), {**self.about, **about}
            self._tracer.add(Event(self._kind, self._name, self.began, now, self._thread, self.mark, about))
