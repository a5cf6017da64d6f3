"""Cleanup that finalizers leave to a thread."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

from raytorchrpc.process import threads

logger = logging.getLogger(__name__)


class DeferredCleanup:
    """What finalizers leave to be done, on one daemon thread.

    Python may run a finalizer in the middle of anything, on a thread that holds any lock: one that takes a lock can
    wait for itself for ever.
    """

    def __init__(self, name: str) -> None:
        """Raises ThreadShortage."""
        self._left: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._stopped = False
        threads.start(self._work, f"the cleanup of {name}", name=f"{name}-cleanup")

    def leave(self, function: Callable[..., object], *args: Any) -> None:
        """Have ``function(*args)`` run soon, but not after ``stop``. Takes no lock. What it raises is logged."""
        if not self._stopped:
            self._left.put((function, args))

    def _work(self, who: str) -> None:
        threads.serve(self._do_next, who)

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
                logger.exception("what a finalizer has left could not be done")
                return True
            self._left.put(task)  # else it would never be given back
            raise
        return True

    def stop(self) -> None:
        """Nothing more is done. Idempotent."""
        self._stopped = True
        self._left.put(None)
