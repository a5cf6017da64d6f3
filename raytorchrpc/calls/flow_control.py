"""Back-pressure: limits the calls and bytes in flight to each peer.

Calls that a method makes on behalf of the call it serves have credit windows of their own, one set for each served
call. They must not wait for other calls: in a chain of calls that comes back, those may be waiting for them.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque

from raytorchrpc.calls.scope import on_loop, wait_serving
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import PeerBusy, RpcTimeout
from raytorchrpc.process.completion import Completion
from raytorchrpc.process.locks import Lock, interrupted_frames

#: The modules of the calls that a signal handler may interrupt.
_CLIENT = "raytorchrpc.calls.client."

#: A call that waits for credit: its number, its bytes, and what is complete once it has the credit.
Queued = tuple[int, int, Completion]


class CreditWindow:
    """Limits calls and bytes in flight from one caller to one peer. First come, first served. Thread-safe; hot path.

    A call that is larger than the whole window may go when nothing else is in flight.

    What ``take`` and ``give_back`` change, they change in statements without a call or a jump. Python changes threads
    and runs signal handlers only at those, so they need no lock, and an interrupt finds credit either taken or not. On
    Python 3.10 threads may change after ``take`` has looked, so each thread may take one call more than the window has.
    """

    __slots__ = ("bytes", "calls", "lock", "max_bytes", "max_calls", "queue", "sizes")

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.max_calls, self.max_bytes = max_calls, max_bytes
        self.calls = self.bytes = 0
        self.sizes: dict[int, int] = {}
        """The bytes of each call that has credit, by its number."""
        self.queue: deque[Queued] = deque()
        self.lock = Lock()
        """Of the queue."""

    def take(self, call: int, size: int) -> bool:
        """Take credit for the call of that number, of so many bytes; False if the window is full."""
        if self.queue or (self.calls and (self.calls >= self.max_calls or self.bytes + size > self.max_bytes)):
            return False
        self.sizes[call] = size
        self.calls += 1
        self.bytes += size
        return True

    def give_back(self, call: int) -> None:
        """The call is over, or was not sent. Idempotent, from any thread, never blocks."""
        try:
            self.bytes -= self.sizes[call]
            self.calls -= 1
            del self.sizes[call]
        except KeyError:
            return
        if self.queue:
            self._grant()

    def enqueue(self, call: int, size: int) -> Queued:
        queued = call, size, Completion()
        self.queue.append(queued)
        self._grant()
        return queued

    def cancel(self, queued: Queued) -> None:
        """Leave the queue, or give the credit back if it was granted meanwhile."""
        with self.lock, contextlib.suppress(ValueError):
            self.queue.remove(queued)
        self.give_back(queued[0])

    def _grant(self) -> None:
        granted: list[Completion] = []
        with self.lock:
            while self.queue:
                call, size, waiting = self.queue[0]
                if self.calls and (self.calls >= self.max_calls or self.bytes + size > self.max_bytes):
                    break
                self.sizes[call] = size
                self.calls += 1
                self.bytes += size
                self.queue.popleft()  # last: until then others queue behind it
                granted.append(waiting)
        for waiting in granted:
            waiting.complete()


class CreditWindows:
    """The credit windows of one member, by peer."""

    def __init__(self, config: GroupConfig, max_bytes: int) -> None:
        self._max_calls, self._max_bytes = config.max_calls_in_flight, max_bytes
        self._rejects = config.when_full == "reject"
        self.by_rank: dict[int, CreditWindow] = {}
        """Those for calls that are not made on behalf of others; see ``Limit.windows``."""

    def open(self, windows: dict[int, CreditWindow], rank: int) -> CreditWindow:
        """Add the window of a peer that has none among these."""
        return windows.setdefault(rank, CreditWindow(self._max_calls, self._max_bytes))

    def in_flight(self, rank: int) -> tuple[int, int]:
        """Calls to a peer without a reply, and bytes of their arguments; leaves out calls made on behalf of others."""
        window = self.by_rank.get(rank)
        return (0, 0) if window is None else (window.calls, window.bytes)

    def wait(self, window: CreditWindow, peer: str, method: str, call: int, size: int, deadline: float) -> None:
        """Take credit from a window that is full: block until it is not, at most until ``deadline``.

        Raises PeerBusy, RpcTimeout. In a signal handler that has interrupted a call, returns without credit.
        """
        if any(frame.f_globals["__name__"].startswith(_CLIENT) for frame in interrupted_frames()):
            return  # the calls that this one has interrupted go on only after it
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
        queued = window.enqueue(call, size)
        try:
            if not wait_serving(queued[2], max(0.0, deadline - time.monotonic())):
                raise RpcTimeout(f"{peer}.{method} was not sent by its deadline: {in_flight}")
        except BaseException:
            window.cancel(queued)
            raise
