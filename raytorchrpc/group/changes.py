"""Changes of a group's membership: requested by users, and reported to listeners."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Literal, NamedTuple

from raytorchrpc.errors import BootstrapError
from raytorchrpc.process import threads
from raytorchrpc.process.locks import Lock

logger = logging.getLogger(__name__)

#: How many changes a ChangeLog keeps, and how long one request for changes waits for them (seconds).
_LOGGED, POLL_S = 1000, 10.0


class Change(NamedTuple):
    """A change of a group's membership, as ``Group.on_change`` reports it. Picklable.

    Examples:
        >>> rtr.Change("lost", ("collector",), cause="its process ended").members
        ('collector',)
    """

    kind: Literal["lost", "back", "dead", "added", "removed"]
    """``lost``: its process ended, or cannot be reached. ``back``: it can be called again, restarted or not. ``dead``:
    Ray will not restart it, so it has left the group. ``added`` and ``removed``: by ``Group.add`` and ``Group.remove``.
    """
    members: tuple[str, ...]
    """The names of the members that it concerns."""
    cause: str = ""
    """Why, for ``lost`` and ``dead``."""


class ChangeLog:
    """Keeps the latest changes of a group, numbered from 1, for those that follow them. Thread-safe."""

    def __init__(self) -> None:
        self._changes: deque[Change] = deque(maxlen=_LOGGED)
        self._last = 0
        self._closed = False
        self._grown = threading.Condition()

    def put(self, change: Change) -> None:
        with self._grown:
            self._changes.append(change)
            self._last += 1
            self._grown.notify_all()

    def close(self) -> None:
        """No more changes come: the group ends."""
        with self._grown:
            self._closed = True
            self._grown.notify_all()

    def after(self, number: int | None, wait_s: float) -> tuple[int, list[Change]]:
        """Return the number of the last change, and the changes after ``number``, as far as they are kept.

        Blocks until there is one, at most ``wait_s`` seconds. ``number`` None: return no changes, at once.
        """
        with self._grown:
            if number is None:
                return self._last, []
            self._grown.wait_for(lambda: self._last > number or self._closed, wait_s)
            old = max(0, len(self._changes) - (self._last - number))
            return self._last, list(self._changes)[old:]

    def lasts(self, number: int) -> bool:
        """Whether there are changes after ``number``, or may be some."""
        return not self._closed or number < self._last


#: Returns the changes after a number, see ``ChangeLog.after``, for which it may block so many seconds; None: there are
#: no more. Never raises where the number is not None.
Fetch = Callable[["int | None", float], "tuple[int, list[Change]] | None"]


class ChangeFeed:
    """Calls listeners with every change of a log, in order, on one thread, which runs while there are listeners."""

    def __init__(self, group: str, fetch: Fetch, lasts: Callable[[int], bool]) -> None:
        """``lasts``: whether there may be changes after a number."""
        self._group, self._fetch, self._lasts = group, fetch, lasts
        self._listeners: dict[object, Callable[[Change], object]] = {}
        self._lock = Lock()
        self._runs = self._stopped = False
        self._last = 0
        """The number of the last change that was delivered."""
        self.thread: threading.Thread | None = None

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``listener`` with every change from now on; returns a function that ends it.

        Raises what ``fetch`` raises, and ThreadShortage.
        """
        key = object()  # it may be given twice

        def remove() -> None:
            self._listeners.pop(key, None)

        with self._lock:
            if not self._listeners or not self._runs:
                self._last, _ = self._fetch(None, 0.0) or (0, [])
            self._listeners[key] = listener
            if not self._runs:
                about, name = f"the changes of group {self._group!r}", f"raytorchrpc-changes-{self._group}"
                try:
                    self.thread = threads.start(threads.serve, self._deliver_next, about, name=name)
                except BaseException:
                    remove()
                    raise
                self._runs = True
        return remove

    def stop(self) -> None:
        """End the thread. Idempotent, never blocks."""
        self._stopped = True

    def is_wanted(self) -> bool:
        """Whether somebody listens, and there may be more to hear."""
        return bool(self._listeners) and not self._stopped and self._lasts(self._last)

    def _deliver_next(self) -> bool:
        with self._lock:
            self._runs = self.is_wanted()
            if not self._runs:
                return False
        if (answer := self._fetch(self._last, POLL_S)) is None:
            self._runs = False
            return False
        last, changes = answer
        begin = last - len(changes)  # the number of the change before these
        if begin > self._last:
            missed = begin - self._last
            logger.warning("group %r: %d changes were missed, as a callback took too long", self._group, missed)
        new = changes[max(0, self._last - begin) :]
        self._last = max(self._last, last)  # a listener that came meanwhile has asked for a later one
        for change in new:
            for listener in list(self._listeners.values()):
                try:
                    if not self._stopped:
                        listener(change)
                except BaseException:  # such as sys.exit(): this thread goes on
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
        if self._done.set_running_or_notify_cancel():
            threads.settle(self._done, self._work)

    def result(self, patience_s: float) -> Any:
        """Block for the result of ``work``; BootstrapError after ``patience_s`` seconds."""
        try:
            wait([self._done], patience_s)
        except BaseException:  # Ctrl-C; a change that has begun is quick
            if not self._done.cancel():
                wait([self._done], patience_s)
            raise
        if self._done.done():
            return self._done.result()
        if self._done.cancel():
            raise BootstrapError(f"group {self._group!r} is busy with another change; this one did not begin")
        raise BootstrapError(f"group {self._group!r}: this change began and has not finished after {patience_s:g} s")
