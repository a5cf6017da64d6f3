"""Daemon threads that run what is given to them: methods, callbacks at deadlines, and what finalizers leave."""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from raytorchrpc.process import locks, threads
from raytorchrpc.process.completion import nothing, run_reported
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.threads import ThreadShortage

T = TypeVar("T")

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

    def __init__(self, name: str, limit: int = 512, idle_s: float = _IDLE_S) -> None:
        """``limit``: most threads. ``idle_s``: seconds without a task after which a thread ends."""
        self._name, self._limit, self._idle_s = name, limit, idle_s
        self._tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = Lock()
        self._idle = 0  # threads waiting for a task, less the tasks waiting for a thread
        self._threads = 0
        self._stopped = False

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run ``function(*args)``, which must not raise, on a worker. Does not block.

        Raises ThreadShortage, without running the task, if a thread for it cannot be started.

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
        if not late and grows:
            self._start()  # outside the lock, because this waits for the thread to begin
        with self._lock:
            if not late and not self._stopped:
                self._tasks.put((function, args))  # under the lock, to precede what stop() adds
                return
        threads.start(function, *args, name=f"{self._name}-late")

    def _start(self) -> None:
        """Start a thread that was counted already, for a task that was counted too."""
        try:
            name = f"{self._name}-{self._threads}"
            threads.start(threads.serve, self._do_next, f"a worker of {self._name}", name=name)
        except ThreadShortage:
            with self._lock:
                self._threads -= 1
            raise

    def _do_next(self) -> bool:
        try:
            task = self._tasks.get(timeout=self._idle_s)
        except queue.Empty:
            with self._lock:
                # A task that this thread was counted for may be about to arrive.
                if self._idle <= 0 or self._stopped:
                    return True
                self._threads -= 1
                self._idle -= 1
                return False
        if task is None:
            return False
        function, args = task
        try:
            run_reported(partial(function, *args), f"a task of {self._name} failed")
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


class _Shared(Generic[T]):
    """A thread that all of a process share, from its first user to its last."""

    def __init__(self, make: Callable[[], T], end: Callable[[T], object]) -> None:
        self._make, self._end = make, end
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # it has none of the threads

    def _forget(self) -> None:
        self._lock, self._users = Lock(), 0
        self._made: T | None = None

    def enter(self) -> T:
        """For one user more. Raises ThreadShortage."""
        with self._lock:
            self._made = self._make() if self._made is None else self._made
            self._users += 1
            return self._made

    def leave(self, made: T) -> None:
        """For one user less of what ``enter`` returned."""
        with self._lock:
            if self._made is made:
                self._users -= 1
                if not self._users:
                    self._made = None
                    self._end(made)


class _Deadline:
    __slots__ = ("callback", "owner")

    def __init__(self, callback: Callable[[], None], owner: Deadlines) -> None:
        self.callback: Callable[[], None] | None = callback
        self.owner = owner


class _Clock:
    """The deadlines of this process, and the daemon thread that calls back."""

    def __init__(self) -> None:
        """Raises ThreadShortage."""
        self._changed = locks.condition()
        # When and a number first, so that no code of Python runs in the middle of heapq's, nor a signal handler.
        self._heap: list[tuple[float, int, _Deadline]] = []
        self._wanted: dict[int, tuple[float, int, _Deadline]] = {}
        """By number: what is in the heap and was not cancelled."""
        self._numbers = itertools.count()
        self._ended = False
        threads.start(threads.serve, self._call_next, "the deadlines", name="raytorchrpc-deadlines")

    def at(self, when: float, deadline: _Deadline) -> Callable[[], None]:
        number = next(self._numbers)
        entry = when, number, deadline
        with self._changed:
            if deadline.owner.stopped:
                return nothing
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
            while not self._ended and (not self._heap or self._heap[0][0] > time.monotonic()):
                self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
            if self._ended:
                return False
            _, number, deadline = heapq.heappop(self._heap)
            self._wanted.pop(number, None)
            callback, deadline.callback = deadline.callback, None
        if callback is not None:
            run_reported(callback, "a callback at a deadline failed")
        return True

    def stop(self, owner: Deadlines) -> bool:
        """Call back no more for an owner. Returns whether it was not stopped before."""
        with self._changed:
            was_stopped, owner.stopped = owner.stopped, True
            for number in [number for number, (*_, deadline) in self._wanted.items() if deadline.owner is owner]:
                self._wanted.pop(number)[2].callback = None
            return not was_stopped

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()


_clock = _Shared(_Clock, _Clock.end)


class Deadlines:
    """Calls back when a deadline passes, on a daemon thread that all of a process share. Thread-safe."""

    stopped = False

    def __init__(self) -> None:
        """Raises ThreadShortage."""
        self._clock = _clock.enter()

    def at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback``, which is short and does not raise, at ``when`` (``time.monotonic``). Returns a function
        that cancels it.
        """
        return self._clock.at(when, _Deadline(callback, self))

    def stop(self) -> None:
        """Call back no more. Idempotent."""
        if self._clock.stop(self):
            _clock.leave(self._clock)


@functools.cache
def process_deadlines() -> Deadlines:
    """Those of a process that is no member yet. They stay with it. Raises ThreadShortage."""
    return Deadlines()


os.register_at_fork(after_in_child=process_deadlines.cache_clear)


class _Cleanup:
    """What finalizers of this process leave, and the daemon thread that runs it."""

    def __init__(self) -> None:
        """Raises ThreadShortage."""
        self.tasks = queue.SimpleQueue[tuple[DeferredCleanup, Callable[..., object], tuple[Any, ...]] | None]()
        threads.start(threads.serve, self._do_next, "the cleanup of finalizers", name="raytorchrpc-cleanup")

    def _do_next(self) -> bool:
        task = self.tasks.get()
        if task is None:
            return False
        owner, function, args = task
        if not owner.stopped:
            run_reported(partial(function, *args), "cleanup left by a finalizer failed")
        return True

    def end(self) -> None:
        self.tasks.put(None)


_cleanup = _Shared(_Cleanup, _Cleanup.end)


class DeferredCleanup:
    """Runs the cleanup that finalizers leave, on a daemon thread that all of a process share.

    Python may run a finalizer at any point, on a thread that holds any lock, so a finalizer that takes a lock can
    deadlock with itself.
    """

    stopped = False

    def __init__(self) -> None:
        """Raises ThreadShortage."""
        self._cleanup = _cleanup.enter()

    def leave(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` soon, but not after ``stop``. Takes no lock. Its exceptions are logged."""
        if not self.stopped:
            self._cleanup.tasks.put((self, function, args))

    def stop(self) -> None:
        """Run nothing more. Idempotent."""
        if not self.stopped:
            self.stopped = True
            _cleanup.leave(self._cleanup)
