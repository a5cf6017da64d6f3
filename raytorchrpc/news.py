"""What happens to the members of a group, for those who want to be told."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

logger = logging.getLogger(__name__)


class Change(NamedTuple):
    """What happened to members of a group; see ``Group.on_change``."""

    kind: Literal["lost", "back", "dead", "added", "removed"]
    """lost: its process ended, or cannot be reached; back: it can be called again; dead: Ray will not restart it."""
    members: tuple[str, ...]
    cause: str = ""


class News:
    """Tells listeners of changes, in order, on a thread of its own. Thread-safe."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._listeners: list[Callable[[Change], object]] = []
        self.thread = threading.Thread(target=self._tell, name=f"raytorchrpc-news-{group}", daemon=True)

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
        while (change := self._changes.get()) is not None:
            for listener in list(self._listeners):
                try:
                    listener(change)
                except Exception:
                    logger.exception("a callback of group %r raised", self._group)
