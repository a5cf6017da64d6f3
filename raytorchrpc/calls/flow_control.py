"""Back-pressure: limits the calls and bytes in flight to each peer.

Calls that a method makes on behalf of the call it serves have credit windows of their own, one set for each served
call. They must not wait for other calls: in a chain of calls that comes back, those may be waiting for them.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque

from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.scope import current_scope, on_loop, wait_serving
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import PeerBusy, RpcTimeout
from raytorchrpc.process.completion import Completion
from raytorchrpc.process.locks import Lock, interrupted_frames

#: The modules of the calls that a signal handler may interrupt.
_CLIENT = "raytorchrpc.calls.client."


class Credit:
    """The credit of one call, until ``give_back``."""

    __slots__ = ("_bytes", "_window")

    def __init__(self, window: CreditWindow | None, size: int) -> None:
        """``window``: None as long as it is queued for."""
        self._window, self._bytes = window, size

    def give_back(self) -> None:
        """The call is over, or was not sent. Idempotent, from any thread, never blocks."""
        window = self._window
        if window is None:
            return
        with window.lock:
            if self._window is None:
                return
            self._window = None
            window.calls -= 1
            window.bytes -= self._bytes
            if not window.queue:
                return
            granted = window.grant()
        for each in granted:
            each.complete()


class CreditWindow:
    """Limits calls and bytes in flight from one caller to one peer. First come, first served. Thread-safe; hot path.

    A call that is larger than the whole window may go when nothing else is in flight.
    """

    __slots__ = ("bytes", "calls", "lock", "max_bytes", "max_calls", "queue")

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.max_calls, self.max_bytes = max_calls, max_bytes
        self.calls = self.bytes = 0
        self.lock = Lock()
        self.queue: deque[tuple[Credit, Completion]] = deque()

    def take(self, size: int) -> Credit | None:
        """Credit for a call of this many bytes; None if the window is full."""
        with self.lock:
            # No function is called here, so that no signal handler runs in between; likewise in grant().
            if self.queue or (self.calls and (self.calls >= self.max_calls or self.bytes + size > self.max_bytes)):
                return None
            self.calls += 1
            self.bytes += size
        return Credit(self, size)

    def enqueue(self, size: int) -> tuple[Credit, Completion]:
        """Queue for credit; returns it with what is complete once it is granted."""
        queued = Credit(None, size), Completion()
        with self.lock:
            self.queue.append(queued)
            granted = self.grant()
        for each in granted:
            each.complete()
        return queued

    def cancel(self, queued: tuple[Credit, Completion]) -> None:
        """Leave the queue, or give the credit back if it was granted meanwhile."""
        with self.lock, contextlib.suppress(ValueError):
            self.queue.remove(queued)
        queued[0].give_back()

    def grant(self) -> list[Completion]:
        """Under the lock; returns what is to be completed after unlocking."""
        granted: list[Completion] = []
        while self.queue:
            size = self.queue[0][0]._bytes
            if self.calls and (self.calls >= self.max_calls or self.bytes + size > self.max_bytes):
                break
            credit, waiting = self.queue.popleft()
            self.calls += 1
            self.bytes += credit._bytes
            credit._window = self
            granted.append(waiting)
        return granted


class CreditWindows:
    """The credit windows of one member, by peer."""

    def __init__(self, config: GroupConfig, max_bytes: int) -> None:
        self._max_calls, self._max_bytes = config.max_calls_in_flight, max_bytes
        self._rejects = config.when_full == "reject"
        self._by_rank: dict[int, CreditWindow] = {}

    def in_flight(self, rank: int) -> tuple[int, int]:
        """Calls to a peer without a reply, and bytes of their arguments; leaves out calls made on behalf of others."""
        window = self._by_rank.get(rank)
        return (0, 0) if window is None else (window.calls, window.bytes)

    def take(self, peer: Member, method: str, size: int, deadline: float) -> tuple[Credit, bool]:
        """Credit for a call, and whether it had to wait.

        Blocks while the window is full, at most until ``deadline``. Raises PeerBusy, RpcTimeout.
        """
        limit = current_scope.get().limit
        windows = self._by_rank if limit is None or limit.over else limit.windows
        window = windows.get(peer.rank)
        if window is None:
            window = windows.setdefault(peer.rank, CreditWindow(self._max_calls, self._max_bytes))
        credit = window.take(size)
        if credit is None:
            return self._wait(window, peer.name, method, size, deadline), True
        return credit, False

    def _wait(self, window: CreditWindow, peer: str, method: str, size: int, deadline: float) -> Credit:
        if any(frame.f_globals["__name__"].startswith(_CLIENT) for frame in interrupted_frames()):
            return Credit(None, size)  # the calls that this one has interrupted go on only after it
        calls, many = window.calls, window.bytes
        in_flight = f"{calls} calls with {many / 2**20:.1f} MiB of arguments are in flight to {peer!r}"
        looping = on_loop()
        if looping or self._rejects:
            remedy = "await some of them" if looping else "wait for some of them"
            raise PeerBusy(
                f"{peer}.{method} was not sent: {in_flight}; {remedy} first, or raise "
                f"GroupConfig.max_calls_in_flight ({self._max_calls}) or max_bytes_in_flight ({self._max_bytes})",
                peer,
                calls,
                many,
            )
        queued = window.enqueue(size)
        try:
            if not wait_serving(queued[1], max(0.0, deadline - time.monotonic())):
                raise RpcTimeout(f"{peer}.{method} was not sent by its deadline: {in_flight}")
        except BaseException:
            window.cancel(queued)
            raise
        return queued[0]
