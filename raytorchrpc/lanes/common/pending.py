"""A call under way, as the lanes that carry messages themselves complete it."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.process import threads

AnyPending = TypeVar("AnyPending", bound="PendingReply")


class PendingReply(Pending):
    """Completed by ``complete``. Thread-safe."""

    __slots__ = ("_callbacks", "_error", "_lock", "_message", "_on_released", "done")

    def __init__(self, on_released: Callable[[], None] | None = None, lock: Any = None) -> None:
        """``on_released``: see MessageLane.call. ``lock``: guards this, and perhaps state of the lane."""
        self._on_released = on_released
        self._lock = threading.Lock() if lock is None else lock
        self._message: Message | None = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.done = False

    def complete(self, message: Message | None, error: Exception | None = None) -> None:
        """Complete it, with one of the two. Once, from any thread; runs the callbacks on this one."""
        self._message, self._error = message, error
        with self._lock:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
            if callbacks:
                self._on_callbacks(False)
        if self._on_released is not None:
            callbacks = [self._on_released, *callbacks]
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # must not cost the other calls on the route theirs
                threads.report(error, "a callback of a finished call failed")

    def wait(self, timeout_s: float) -> bool:
        if self.done or timeout_s <= 0:
            return self.done
        arrived = threading.Lock()
        arrived.acquire()
        self.add_done_callback(arrived.release)
        return arrived.acquire(timeout=timeout_s)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                if len(self._callbacks) == 1:
                    self._on_callbacks(True)
                return
        callback()

    def _on_callbacks(self, begins: bool) -> None:
        """Under the lock: somebody wants to be called back from now on; or, at the end, no longer."""

    def take(self) -> Message:
        if self._error is not None:
            raise self._error
        assert self._message is not None
        return self._message


def complete_with(pending: PendingReply, reply: Message) -> None:
    """Complete it with what came; with a MemoryError if there was no memory for it."""
    if reply.unread_bytes:
        pending.complete(None, MemoryError(f"this process has no memory for the answer ({reply.unread_bytes} bytes)"))
    else:
        pending.complete(reply, None)


def fail_all(waiting: MutableMapping[int, AnyPending], peer: str, cause: str) -> None:
    """Complete all of these with PeerLost, and empty the mapping, to which nothing is added any more."""
    while waiting:
        try:
            _, pending = waiting.popitem()
        except KeyError:  # somebody has just given up the last one
            return
        try:
            pending.complete(None, PeerLost(peer, cause))
        except MemoryError as error:  # its deadline ends it
            threads.report(error, "a call of a connection that ended could not be told so")
