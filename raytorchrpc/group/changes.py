"""Changes of a group's membership: requested by threads of users, and delivered to listeners."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Literal, NamedTuple

from raytorchrpc.errors import BootstrapError
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
        about = f"the event thread of group {self._group!r}"
        return threads.start(threads.serve, self._deliver_next, about, name=f"raytorchrpc-events-{self._group}")

    def put(self, change: Change) -> None:
        """Queue a change. Never blocks."""
        self._changes.put(change)

    def stop(self) -> None:
        """End the thread once it has delivered what was queued before."""
        self._changes.put(None)

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Add a listener. Returns a function that removes it."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

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


class RequestedChange:
    """A change that a user's thread requests and the supervisor's thread makes, at most once.

    One that was given up before its turn never runs.
    """

    def __init__(self, group: str, work: Callable[[], Any]) -> None:
        """``work`` checks all its input before it changes anything."""
        self._group, self._work = group, work
        self._done: Future[Any] = Future()

    def run(self) -> None:
        """Make the change. Never raises."""
        if not self._done.set_running_or_notify_cancel():
            return
        try:
            self._done.set_result(self._work())
        except BaseException as error:
            self._done.set_exception(error)

    def result(self, patience_s: float) -> Any:
        """Block for the result of ``work``; BootstrapError after ``patience_s`` seconds."""
        try:
            wait([self._done], patience_s)
        except BaseException:  # Ctrl-C
            self._done.cancel()
            raise
        if self._done.done():
            return self._done.result()
        if self._done.cancel():
            raise BootstrapError(f"group {self._group!r} is busy with another change; this one did not begin")
        raise BootstrapError(f"group {self._group!r}: this change began and has not finished after {patience_s:g} s")
