"""Daemon threads that run what is given to them: methods, callbacks at deadlines, and what finalizers leave."""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from raytorchrpc.process import locks, threads
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.threads import ThreadShortage

logger = logging.getLogger(__name__)

#: A worker that is idle for this time ends, so that one burst does not keep its threads (seconds).
_IDLE_S = 30.0


class AtOnce:
    """A task that waits for no other one to end: a reply. The methods that hold all workers may wait for it."""

    may_not_wait = True

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._function, self._args = function, args

    def run(self) -> None:
        """To be passed to ``Workers.submit``."""
        self._function(*self._args)


class Workers:
    """Runs tasks on daemon threads, which are started when none is idle and kept for a while. Hot path.

    The threads are daemons so that a method that never returns does not keep the process from ending.
    """

    def __init__(
        self,
        name: str,
        limit: int = 512,
        idle_s: float = _IDLE_S,
        *,
        keep: bool = False,
        deadlines: Deadlines | None = None,
    ) -> None:
        """``limit``: most threads. ``idle_s``: seconds without a task after which a thread ends.

        ``keep``: start the first thread now and keep it until ``stop``, so that tasks run even if no other thread can
        be started. ``deadlines``: used to retry then. Raises ThreadShortage.
        """
        self._name, self._limit, self._idle_s = name, limit, idle_s
        self._keep, self._deadlines = int(keep), deadlines
        self._tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = Lock()
        self._idle = 0  # threads waiting for a task, less the tasks waiting for a thread
        self._threads = 0
        self._retrying = False
        self._stopped = False
        if keep:
            self._threads = self._idle = 1
            self._start(1)

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run ``function(*args)``, which must not raise, on a worker. Does not block.

        If no thread can be started, the task waits for an existing one. Raises ThreadShortage, without running the
        task, if there is none; never with ``keep``.

        After ``stop`` the task runs on a thread of its own: a method that waited for its admission must give that back.
        So does a task beyond the limit whose object has ``may_not_wait`` set.
        """
        with self._lock:
            full = self._idle <= 0 and self._threads >= self._limit
            late = self._stopped or (full and getattr(getattr(function, "__self__", None), "may_not_wait", False))
            if not late:
                self._idle -= 1
                grows = self._idle < 0 and self._threads < self._limit
                if grows:
                    self._threads += 1
                    self._idle += 1
        if late:
            self._run_late(function, args)
            return
        # Outside the lock, because this waits for the thread to begin.
        if grows and not self._start_one() and not self._is_waited_for():
            raise ThreadShortage(self._name, "no memory, or no more threads")
        with self._lock:
            if not self._stopped:
                try:
                    self._tasks.put((function, args))  # under the lock, to precede what stop() adds
                    return
                except MemoryError:
                    self._idle += 1
        self._run_late(function, args)

    def _run_late(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            threads.start(function, *args, name=f"{self._name}-late")
        except ThreadShortage as error:
            threads.report(error, f"{self._name} runs a task on the thread that submitted it")
            function(*args)

    def _start_one(self) -> bool:
        """Start a thread that was counted already; if that fails, undo the count."""
        try:
            self._start(self._threads)
        except ThreadShortage as error:
            threads.report(error, f"{self._name}: tasks wait for a thread")
            with self._lock:
                self._threads -= 1
                self._idle -= 1
            return False
        return True

    def _is_waited_for(self) -> bool:
        """Whether an existing thread will run a task that has none; if so, more threads are started later."""
        with self._lock:
            if not self._threads:
                self._idle += 1
                return False
            retries = self._deadlines is not None and not self._retrying
            if retries:
                self._retrying = True
        if retries and self._deadlines is not None:
            try:
                self._deadlines.at(time.monotonic() + threads.PAUSE_S, self._grow)
            except MemoryError:  # the existing thread has to suffice
                self._retrying = False
        return True

    def _grow(self) -> None:
        """Start the threads that tasks wait for, as far as possible."""
        grows = True
        while grows:
            with self._lock:
                self._retrying = False
                grows = not self._stopped and self._idle < 0 and self._threads < self._limit
                if grows:
                    self._threads += 1
                    self._idle += 1
            if grows and not self._start_one():
                self._is_waited_for()
                return

    def _start(self, number: int) -> None:
        threads.start(threads.serve, self._do_next, f"a worker of {self._name}", name=f"{self._name}-{number}")

    def _do_next(self) -> bool:
        try:
            task = self._tasks.get(timeout=self._idle_s)
        except queue.Empty:
            with self._lock:
                # A task that this thread was counted for may be about to arrive.
                if self._idle <= 0 or self._threads <= self._keep or self._stopped:
                    return True
                self._threads -= 1
                self._idle -= 1
                return False
        if task is None:
            return False
        function, args = task
        try:
            function(*args)
        finally:
            del task, function, args  # an idle worker must not keep a tensor alive
            with self._lock:
                self._idle += 1
        return True

    def stop(self) -> None:
        """End idle threads now and busy ones after their task. Does not wait. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for _ in range(self._threads):
                self._tasks.put(None)


class _Deadline:
    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback


class Deadlines:
    """Calls back when a deadline passes, on one daemon thread. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Raises ThreadShortage."""
        self._changed = locks.condition()
        # When and a number first, so that no code of Python runs in the middle of heapq's, nor a signal handler.
        self._heap: list[tuple[float, int, _Deadline]] = []
        self._wanted: dict[int, tuple[float, int, _Deadline]] = {}
        """By number: what is in the heap and was not cancelled."""
        self._numbers = itertools.count()
        self._stopped = False
        # Now, not with the first deadline: a member that cannot end its waits must not join.
        threads.start(threads.serve, self._call_next, f"the deadlines of {name}", name=f"{name}-deadlines")

    def at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback``, which is short and does not raise, at ``when`` (``time.monotonic``). Returns a function
        that cancels it. A callback that fails for lack of memory is called again.
        """
        deadline, number = _Deadline(callback), next(self._numbers)
        entry = when, number, deadline
        with self._changed:
            self._add(entry)
            if self._heap[0] is entry:
                self._changed.notify()

        def cancel() -> None:
            with self._changed:
                deadline.callback = None  # it may hold large objects
                self._wanted.pop(number, None)
                if len(self._heap) > 2 * len(self._wanted) + 64:
                    self._heap[:] = self._wanted.values()  # no signal handler runs before the next line has
                    heapq.heapify(self._heap)

        return cancel

    def _add(self, entry: tuple[float, int, _Deadline]) -> None:
        self._wanted[entry[1]] = entry
        heapq.heappush(self._heap, entry)

    def _call_next(self) -> bool:
        with self._changed:
            while not self._stopped and (not self._heap or self._heap[0][0] > time.monotonic()):
                self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
            if self._stopped:
                return False
            _, number, deadline = heapq.heappop(self._heap)
            self._wanted.pop(number, None)
            callback, deadline.callback = deadline.callback, None
            if callback is None:
                return True
        try:
            callback()
        except Exception as error:
            if threads.is_shortage(error):
                with self._changed:
                    if not self._stopped:
                        deadline.callback = callback
                        self._add((time.monotonic() + threads.PAUSE_S, number, deadline))
            raise
        return True

    def stop(self) -> None:
        """Call back no more."""
        with self._changed:
            self._stopped = True
            self._heap.clear()
            self._wanted.clear()
            self._changed.notify()


@functools.cache
def process_deadlines() -> Deadlines:
    """Those of a process that is no member yet. They stay with it. Raises ThreadShortage."""
    return Deadlines("raytorchrpc")


class DeferredCleanup:
    """Runs the cleanup that finalizers leave, on one daemon thread.

    Python may run a finalizer at any point, on a thread that holds any lock, so a finalizer that takes a lock can
    deadlock with itself.
    """

    def __init__(self, name: str) -> None:
        """Raises ThreadShortage."""
        self._left: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._stopped = False
        threads.start(threads.serve, self._do_next, f"the cleanup of {name}", name=f"{name}-cleanup")

    def leave(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` soon, but not after ``stop``. Takes no lock. Its exceptions are logged."""
        if not self._stopped:
            self._left.put((function, args))

    def _do_next(self) -> bool:
        task = self._left.get()
        if task is None:
            return False
        if self._stopped:
            return True
        function, args = task
        try:
            function(*args)
        except Exception as error:
            if not threads.is_shortage(error):
                logger.exception("cleanup left by a finalizer failed")
                return True
            self._left.put(task)  # try again, or the resource would be lost
            raise
        return True

    def stop(self) -> None:
        """Run nothing more. Idempotent."""
        self._stopped = True
        self._left.put(None)
