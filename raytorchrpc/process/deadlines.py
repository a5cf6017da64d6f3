"""Callbacks at deadlines, on one thread."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

from raytorchrpc.process import threads


class _Deadline:
    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: _Deadline) -> bool:
        return self.when < other.when


class Deadlines:
    """Calls back when a deadline passes, on one daemon thread. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Raises ThreadShortage."""
        self._changed = threading.Condition()
        self._heap: list[_Deadline] = []
        self._cancelled = 0
        self._stopped = False
        # Now, not with the first deadline: a member that cannot end its waits must not join.
        threads.start(self._watch, f"the deadlines of {name}", name=f"{name}-deadlines")

    def at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback``, which is short and does not raise, at ``when`` (``time.monotonic``). Returns a function
        that cancels it. A callback that fails for lack of memory is called again.
        """
        deadline = _Deadline(when, callback)
        with self._changed:
            heapq.heappush(self._heap, deadline)
            if self._heap[0] is deadline:
                self._changed.notify()

        def cancel() -> None:
            with self._changed:
                if deadline.callback is not None:
                    deadline.callback = None  # it may hold large objects
                    self._cancelled += 1
                if self._cancelled > 64 and self._cancelled > len(self._heap) // 2:
                    self._heap = [kept for kept in self._heap if kept.callback is not None]
                    heapq.heapify(self._heap)
                    self._cancelled = 0

        return cancel

    def _watch(self, who: str) -> None:
        threads.serve(self._call_next, who)

    def _call_next(self) -> bool:
        with self._changed:
            while not self._stopped and (not self._heap or self._heap[0].when > time.monotonic()):
                self._changed.wait(self._heap[0].when - time.monotonic() if self._heap else None)
            if self._stopped:
                return False
            deadline = heapq.heappop(self._heap)
            callback, deadline.callback = deadline.callback, None
            if callback is None:
                self._cancelled -= 1
                return True
        try:
            callback()
        except Exception as error:
            if threads.is_shortage(error):
                with self._changed:
                    if not self._stopped:
                        deadline.callback, deadline.when = callback, time.monotonic() + threads.PAUSE_S
                        heapq.heappush(self._heap, deadline)
            raise
        return True

    def stop(self) -> None:
        """Call back no more."""
        with self._changed:
            self._stopped = True
            self._heap.clear()
            self._changed.notify()
