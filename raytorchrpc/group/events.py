"""Delivers changes of a group's membership to listeners."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

from raytorchrpc.process import threads

logger = logging.getLogger(__name__)


class Change(NamedTuple):
    """What happened to members of a group; see ``Group.on_change``."""

    kind: Literal["lost", "back", "dead", "added", "removed"]
    """lost: its process ended, or cannot be reached; back: it can be called again; dead: Ray will not restart it."""
    members: tuple[str, ...]
    cause: str = ""


class EventBus:
    """Calls listeners with every change, in order, on a thread of its own. Thread-safe."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._listeners: list[Callable[[Change], object]] = []
        self._undelivered: Change | None = None

    def start(self) -> threading.Thread:
        """Start the thread. Raises ThreadShortage."""
        return threads.start(self._deliver, name=f"raytorchrpc-events-{self._group}")

    def put(self, change: Change) -> None:
        """Queue a change. Never blocks."""
        self._changes.put(change)

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Add a listener. Returns a function that removes it."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    def stop(self) -> None:
        """End the thread once it has delivered what was queued before."""
        self._changes.put(None)

    def _deliver(self) -> None:
        threads.serve(self._deliver_next, f"the event thread of group {self._group!r}")

    def _deliver_next(self) -> bool:
        if self._undelivered is None:  # else a shortage of memory interrupted its delivery
            self._undelivered = self._changes.get()
        if self._undelivered is None:
            return False
        listeners = list(self._listeners)
        change, self._undelivered = self._undelivered, None
        for listener in listeners:
            try:
                listener(change)
            except Exception:
                logger.exception("a callback of group %r raised", self._group)
        return True
