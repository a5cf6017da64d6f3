"""Reclaims the memory of exports."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from raytorchrpc.process import threads
from raytorchrpc.process.locks import Lock

#: A longer pause of a Janitor can be ended by ``wake`` (seconds).
_SHORT_S = 0.05
#: Rounds between two checks which peers live.
_ROUNDS_PER_CENSUS = 50


class Janitor:
    """A thread that reclaims the memory of fetched exports, from time to time while there are any. Thread-safe.

    It is started with the first export.
    """

    def __init__(self, name: str, reclaim: Callable[[bool], float | None]) -> None:
        """``reclaim(census)`` does one round; it returns the seconds until the next, or None if nothing is left to
        reclaim. ``census``: whether to check too which peers live, from time to time.
        """
        self._name, self._reclaim = name, reclaim
        self._rounds = itertools.count(1)
        self._lock = Lock()
        self._thread: threading.Thread | None = None
        self._woken, self._hurry = threading.Event(), threading.Event()
        self._closed = False

    def wake(self, *, hurry: bool = True) -> None:
        """There is something to reclaim. ``hurry``: ends a long pause between two rounds. Hot path."""
        if self._thread is None:
            self._start()
        if not self._woken.is_set():
            self._woken.set()
        if hurry and not self._hurry.is_set():
            self._hurry.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                label = f"the thread {self._name}"
                step = threads.surviving(self._reclaim_all, label)
                self._thread = threads.start(threads.serve, step, label, name=self._name)

    def _reclaim_all(self) -> bool:
        self._woken.wait()
        self._woken.clear()  # before the first round: what is exported from now on wakes it again
        try:
            while (pause := self._reclaim(next(self._rounds) % _ROUNDS_PER_CENSUS == 0)) is not None:
                if pause > _SHORT_S:
                    self._hurry.wait(pause)
                    self._hurry.clear()
                else:
                    time.sleep(pause)
        except BaseException:
            self._woken.set()
            raise
        return not self._closed

    def close(self, timeout_s: float = 0.0) -> None:
        """Have the thread end once nothing is left to reclaim; wait for that, for so long at most."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._woken.set()
        self._hurry.set()
        if timeout_s and thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
