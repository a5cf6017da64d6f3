"""A call in flight, for lanes that complete it themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.process import threads

AnyPending = TypeVar("AnyPending", bound="PendingReply")


class PendingReply(Pending):
    """Waits for a reply, until ``complete`` is called. Thread-safe."""

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
        """Complete it with a message or an error. Once, from any thread, which runs the callbacks."""
        self._message, self._error = message, error
        if self._on_released is not None:  # first: the caller may send its next call as soon as it sees this one done
            _run(self._on_released)
        with self._lock:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
            if callbacks:
                self._on_callbacks(False)
        for callback in callbacks:
            _run(callback)

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
        """Called under the lock, when the first callback is added, and when it is completed with callbacks."""

    def take(self) -> Message:
        if self._error is not None:
            raise self._error
        assert self._message is not None
        return self._message


def _run(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception as error:  # the other calls on the connection must still get their replies
        threads.report(error, "a callback of a finished call failed")


def complete_with(pending: PendingReply, reply: Message) -> None:
    """Complete it with a reply, or with a MemoryError if this process had no memory for the reply."""
    if reply.unread_bytes:
        pending.complete(None, MemoryError(f"this process has no memory for the answer ({reply.unread_bytes} bytes)"))
    else:
        pending.complete(reply, None)


def fail_all(waiting: MutableMapping[int, AnyPending], peer: str, cause: str) -> None:
    """Complete all calls with PeerLost, and empty the mapping, to which no other thread adds any more."""
    while waiting:
        try:
            _, pending = waiting.popitem()
        except KeyError:  # another thread has just abandoned the last one
            return
        try:
            pending.complete(None, PeerLost(peer, cause))
        except MemoryError as error:  # the call ends at its deadline
            threads.report(error, "a call could not be told that its connection ended")
