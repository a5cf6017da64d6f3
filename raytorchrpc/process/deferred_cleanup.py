"""Cleanup that finalizers leave to a thread."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

from raytorchrpc.process import threads

logger = logging.getLogger(__name__)


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
