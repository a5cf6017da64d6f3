"""Delivers the changes of a group whose supervisor runs in another process."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from raytorchrpc.group.changes import Change, Listeners
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: How long one request for changes waits at the group's host, and how much longer for its answer (seconds).
_POLL_S, _GRACE_S = 10.0, 30.0
#: How often a thread that waits for an answer checks whether it is still wanted (seconds).
_CHECK_S = 1.0

#: Starts to fetch the changes after a number, which may take that many seconds; see ``ChangeLog.after``.
Fetch = Callable[[int | None, float], "Future[tuple[int, list[Change]]]"]


class _NoAnswer(Exception):
    """The request is sent again."""


class ChangeFeed:
    """Fetches changes and calls listeners with them, in order, on one thread, which runs while there are listeners."""

    def __init__(self, group: str, fetch: Fetch, lasts: Callable[[], bool]) -> None:
        """``lasts``: whether this process can still reach the group's host."""
        self._group, self._fetch, self._lasts = group, fetch, lasts
        self._listeners = Listeners(group)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[Future[tuple[int, list[Change]]] | None] = queue.SimpleQueue()
        self._last = 0
        """The number of the last change that was delivered."""
        self._stopped = False

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``listener`` with every change from now on; returns a function that ends it.

        Blocks for an answer of the host; raises what the request raises, and ThreadShortage.
        """
        with self._lock:
            if self._thread is None:
                self._last = self._fetch(None, 0.0).result(_GRACE_S)[0]
            remove = self._listeners.add(listener)
            if self._thread is None:
                try:
                    self._thread = threads.start(self._run, name=f"raytorchrpc-changes-{self._group}")
                except BaseException:
                    remove()
                    raise

        def end() -> None:
            remove()
            self._inbox.put(None)  # wakes the thread, which ends if this was the last listener

        return end

    def stop(self) -> None:
        """End the thread. Idempotent, never blocks."""
        self._stopped = True
        self._inbox.put(None)

    def _run(self) -> None:
        threads.serve(self._deliver_next, f"the changes of group {self._group!r}")

    def _deliver_next(self) -> bool:
        if self._may_end():
            return False
        try:
            asked = self._fetch(self._last, _POLL_S)
            asked.add_done_callback(self._inbox.put)
            if not self._await(asked):
                return False
            last, changes = asked.result(0)
        except _NoAnswer:
            raise
        except Exception as error:
            if not self._stopped:
                logger.warning("group %r: no more changes are reported, as its host has ended: %s", self._group, error)
            self._end()
            return False
        if last - self._last > len(changes):
            missed = last - self._last - len(changes)
            logger.warning("group %r: %d changes were missed, as a callback took too long", self._group, missed)
        self._last = last
        for change in changes:
            if not self._stopped:
                self._listeners.call(change)
        return True

    def _await(self, asked: Future[Any]) -> bool:
        """Block until this request is done; False if the thread is to end instead."""
        waited_s = 0.0
        while not asked.done():
            try:
                self._inbox.get(timeout=_CHECK_S)
            except queue.Empty:
                waited_s += _CHECK_S
            if waited_s > _POLL_S + _GRACE_S:
                raise _NoAnswer(f"the host of group {self._group!r} has not answered within {waited_s:g} s")
            if self._may_end():
                return False
        return not self._may_end()

    def _may_end(self) -> bool:
        if self._stopped or not self._lasts():
            self._end()
            return True
        with self._lock:
            if not self._listeners:
                self._thread = None
                return True
        return False

    def _end(self) -> None:
        with self._lock:
            self._thread = None
