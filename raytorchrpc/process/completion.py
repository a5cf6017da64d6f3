"""Something that happens once, for threads that wait for it and callbacks that follow it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from raytorchrpc.process import locks, threads
from raytorchrpc.process.locks import Lock


class Completion:
    """Complete from the first ``complete`` on. Thread-safe; hot path: one lock for each callback, and one at the end.

    A subclass sets what it completes with before it calls ``complete``.
    """

    __slots__ = ("_callbacks", "_lock", "done")

    def __init__(self, lock: Any = None) -> None:
        """``lock``: guards this, and perhaps state of whoever completes it."""
        self._lock = Lock() if lock is None else lock
        self._callbacks: list[Callable[[], object]] = []
        self.done = False

    def complete(self) -> None:
        """End all waits, and run the callbacks on this thread; an exception from one is reported. Idempotent."""
        with self._lock:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
            if callbacks:
                self._on_callbacks(False)
        for callback in callbacks:
            run_reported(callback)

    def wait(self, timeout_s: float) -> bool:
        """Block until it is complete, at most ``timeout_s``; whether it is."""
        if self.done or timeout_s <= 0:
            return self.done
        self.check_wait()
        arrived = threading.Lock()
        arrived.acquire()
        self.add_done_callback(arrived.release)
        return arrived.acquire(timeout=timeout_s)

    def check_wait(self) -> None:
        """Raise RayTorchRpcError if only what this thread has interrupted can complete it."""
        self.check_reader()
        locks.check_wait()

    def check_reader(self) -> None:
        """Raise RayTorchRpcError if this thread was about to complete it as it was interrupted."""

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback``, which is short and does not block, on completion; at once if it is complete."""
        with self._lock:
            if not self.done:
                is_first = not self._callbacks
                self._callbacks.append(callback)
                if is_first:
                    self._on_callbacks(True)
                return
        callback()

    def discard_callback(self, callback: Callable[[], object]) -> None:
        """Call it no more, if it has not been called."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def _on_callbacks(self, begins: bool) -> None:
        """Called under the lock, when the first callback is added, and when it is completed with callbacks."""


def nothing() -> None:
    """A callback for those that need none."""


def run_reported(task: Callable[[], object], failure: str = "a callback of a finished call failed") -> None:
    """Run a task of a thread that has to go on; log its exception. Lack of memory or threads ends this process: others
    may wait for what the task was to do.
    """
    try:
        task()
    except BaseException as error:  # a user's code may raise SystemExit
        if threads.is_shortage(error):
            threads.end_process(error, "a thread that serves others")
        threads.report(error, failure)
