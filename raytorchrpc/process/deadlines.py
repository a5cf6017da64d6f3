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
        # Now, and not with the first alarm: a member that cannot end its waits is not to join.
        threads.start(self._watch, f"the deadlines of {name}", name=f"{name}-deadlines")

    def at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback``, which is short and does not raise, at ``when`` (``time.monotonic``), unless what
        this returns is called before. A callback that finds no memory is called again.
        """
        alarm = _Deadline(when, callback)
        with self._changed:
            heapq.heappush(self._heap, alarm)
            if self._heap[0] is alarm:
                self._changed.notify()

        def cancel() -> None:
            with self._changed:
                if alarm.callback is not None:
                    alarm.callback = None  # what it holds may be large
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
            alarm = heapq.heappop(self._heap)
            callback, alarm.callback = alarm.callback, None
            if callback is None:
                self._cancelled -= 1
                return True
        try:
            callback()
        except Exception as error:
            if threads.is_shortage(error):
                with self._changed:
                    if not self._stopped:
                        alarm.callback, alarm.when = callback, time.monotonic() + threads.PAUSE_S
                        heapq.heappush(self._heap, alarm)
            raise
        return True

    def stop(self) -> None:
        """No alarm goes off any more."""
        with self._changed:
            self._stopped = True
            self._heap.clear()
            self._changed.notify()
