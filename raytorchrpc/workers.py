"""A member's own threads: those that run methods, the one that watches deadlines, and the one that tidies up."""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

#: A worker that had nothing to do for so long ends (seconds): one burst is not to cost its threads for ever.
_IDLE_S = 30.0


class Workers:
    """Daemon threads that run methods: made when none is idle, kept for a while after. Hot path.

    Daemons, because a method that never returns must not keep the process from ending.
    """

    def __init__(self, name: str, limit: int = 512, idle_s: float = _IDLE_S) -> None:
        """``limit``: threads at most. ``idle_s``: seconds without a task after which one ends."""
        self._name, self._limit, self._idle_s = name, limit, idle_s
        self._tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads waiting for a task, less the tasks waiting for a thread
        self._threads = 0
        self._stopped = False

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run ``function(*args)``, which must not raise, on a worker; returns at once.

        After ``stop`` too, on a thread of its own: a method that waited for its turn holds a seat now, and has
        to give it back. Beyond the limit too, if it is the method of an object that ``may_not_wait``.
        """
        with self._lock:
            full = self._idle <= 0 and self._threads >= self._limit
            if self._stopped or (full and getattr(getattr(function, "__self__", None), "may_not_wait", False)):
                threading.Thread(target=function, args=args, name=f"{self._name}-late", daemon=True).start()
                return
            self._idle -= 1
            if self._idle < 0 and self._threads < self._limit:
                self._threads += 1
                self._idle += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
            self._tasks.put((function, args))  # under the lock: not behind what stop() puts there

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if not self._tasks.empty():  # submitted just now, with this thread counted as idle
                        continue
                    self._threads -= 1
                    self._idle -= 1
                    return
            if task is None:
                return
            function, args = task
            function(*args)
            del task, function, args  # an idle worker keeps no tensor alive
            with self._lock:
                self._idle += 1

    def stop(self) -> None:
        """Let idle threads end now and busy ones after their task. Does not wait. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for _ in range(self._threads):
                self._tasks.put(None)


class _Alarm:
    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: _Alarm) -> bool:
        return self.when < other.when


class Alarms:
    """Calls back when a deadline passes, on one daemon thread that is made with the first. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._heap: list[_Alarm] = []
        self._cancelled = 0
        self._started = self._stopped = False

    def at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback``, which is short and does not raise, at ``when`` (``time.monotonic``), unless what
        this returns is called before.
        """
        alarm = _Alarm(when, callback)
        with self._changed:
            heapq.heappush(self._heap, alarm)
            if self._heap[0] is alarm:
                self._changed.notify()
            if not self._started:
                self._started = True
                threading.Thread(target=self._watch, name=f"{self._name}-alarms", daemon=True).start()

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

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (not self._heap or self._heap[0].when > time.monotonic()):
                    self._changed.wait(self._heap[0].when - time.monotonic() if self._heap else None)
                if self._stopped:
                    return
                callback, alarm = None, heapq.heappop(self._heap)
                if alarm.callback is None:
                    self._cancelled -= 1
                else:
                    callback, alarm.callback = alarm.callback, None
            if callback is not None:
                callback()
            del alarm, callback

    def stop(self) -> None:
        """No alarm goes off any more."""
        with self._changed:
            self._stopped = True
            self._heap.clear()
            self._changed.notify()


class Leftovers:
    """What finalizers leave to be done, on one daemon thread.

    Python may run a finalizer in the middle of anything, on a thread that holds any lock: one that takes a lock can
    wait for itself for ever.
    """

    def __init__(self, name: str) -> None:
        self._left: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._stopped = False
        threading.Thread(target=self._work, name=f"{name}-leftovers", daemon=True).start()

    def leave(self, function: Callable[..., object], *args: Any) -> None:
        """Have ``function(*args)`` run soon, but not after ``stop``. Takes no lock. What it raises is logged."""
        if not self._stopped:
            self._left.put((function, args))

    def _work(self) -> None:
        while (task := self._left.get()) is not None:
            if self._stopped:
                continue
            function, args = task
            try:
                function(*args)
            except Exception:
                logger.exception("what a finalizer has left could not be done")
            del task, function, args  # an idle thread keeps nothing alive

    def stop(self) -> None:
        """Nothing more is done. Idempotent."""
        self._stopped = True
        self._left.put(None)
