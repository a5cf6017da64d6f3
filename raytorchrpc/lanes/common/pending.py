"""A call in flight, for lanes that complete it themselves."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.process import threads
from raytorchrpc.process.completion import Completion, run_reported

AnyPending = TypeVar("AnyPending", bound="PendingReply")


class PendingReply(Completion, Pending):
    """Waits for a reply, until it is completed with one."""

    __slots__ = ("_error", "_message", "_on_released")

    def __init__(self, on_released: Callable[[], None] | None = None, lock: Any = None) -> None:
        """``on_released``: see MessageLane.call. ``lock``: see Completion."""
        super().__init__(lock)
        self._on_released = on_released
        self._message: Message | None = None
        self._error: Exception | None = None

    def settle(self, message: Message | None, error: Exception | None = None) -> None:
        """Complete it with a message or an error. Once, from any thread, which runs the callbacks."""
        self._message, self._error = message, error
        if self._on_released is not None:  # first: the caller may send its next call as soon as it sees this one done
            run_reported(self._on_released)
        self.complete()

    def take(self) -> Message:
        if self._error is not None:
            raise self._error
        assert self._message is not None
        return self._message


def complete_with(pending: PendingReply, reply: Message) -> None:
    """Complete it with a reply, or with a MemoryError if this process had no memory for the reply."""
    if reply.unread_bytes:
        pending.settle(None, MemoryError(f"this process has no memory for the answer ({reply.unread_bytes} bytes)"))
    else:
        pending.settle(reply, None)


def fail_all(waiting: MutableMapping[int, AnyPending], peer: str, cause: str) -> None:
    """Complete all calls with PeerLost, and empty the mapping, to which no other thread adds any more."""
    while waiting:
        try:
            _, pending = waiting.popitem()
        except KeyError:  # another thread has just abandoned the last one
            return
        try:
            pending.settle(None, PeerLost(peer, cause))
        except MemoryError as error:  # the call ends at its deadline
            threads.report(error, "a call could not be told that its connection ended")
