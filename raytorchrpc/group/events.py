"""What happens to the members of a group, for those who want to be told."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

from raytorchrpc.process import threads

logger = logging.getLogger(__name__)


class Change(NamedTuple):
    """What happened to members of a group; see ``Group.on_change``."""

    kind: Literal["lost", "back", "dead", "added", "removed"]
    """lost: its process ended, or cannot be reached; back: it can be called again; dead: Ray will not restart it."""
    members: tuple[str, ...]
    cause: str = ""


class EventBus:
    """Tells listeners of changes, in order, on a thread of its own. Thread-safe."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._listeners: list[Callable[[Change], object]] = []
        self._untold: Change | None = None

    def start(self) -> threading.Thread:
        """Begin to call listeners. Raises ThreadShortage."""
        return threads.start(self._tell, name=f"raytorchrpc-news-{self._group}")

    def put(self, change: Change) -> None:
        """Returns before anybody is told."""
        self._changes.put(change)

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """What this returns ends it."""
        self._listeners.append(listener)

        def forget() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return forget

    def stop(self) -> None:
        """After what was put before."""
        self._changes.put(None)

    def _tell(self) -> None:
        threads.serve(self._tell_next, f"group {self._group!r}: the thread that calls back")

    def _tell_next(self) -> bool:
        if self._untold is None:
            self._untold = self._changes.get()
        if self._untold is None:
            return False
        listeners = list(self._listeners)
        change, self._untold = self._untold, None
        for listener in listeners:
            try:
                listener(change)
            except Exception:
                logger.exception("a callback of group %r raised", self._group)
        return True
