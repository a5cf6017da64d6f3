"""A limit on how much of its senders' shared memory a home keeps in use for waiting items."""

from __future__ import annotations

import threading
from collections import Counter, deque


class SharedMemoryBudget:
    """Counts the bytes that waiting items hold in their senders' shared memory, by sender. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """``limit``: most bytes of one sender. Items beyond it are copied instead."""
        self.limit = limit
        self._used: Counter[int] = Counter()
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def reserve(self, rank: int, size: int) -> Reservation | None:
        """Reserve ``size`` bytes of this sender's; None if that would exceed the limit."""
        with self._lock:
            while self._released:
                sender, released = self._released.popleft()
                self._used[sender] -= released
            if self._used[rank] + size > self.limit:
                return None
            self._used[rank] += size
        return Reservation(self, rank, size)

    def release(self, rank: int, size: int) -> None:
        """Note that a reservation has ended. Takes no lock: finalizers run in the middle of anything."""
        self._released.append((rank, size))


class Reservation:
    """Bytes of a sender's shared memory; released when the item that holds this is deleted."""

    __slots__ = ("_budget", "_rank", "_size")

    def __init__(self, budget: SharedMemoryBudget, rank: int, size: int) -> None:
        self._budget, self._rank, self._size = budget, rank, size

    def __del__(self) -> None:
        self._budget.release(self._rank, self._size)
