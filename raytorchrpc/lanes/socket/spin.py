"""Waiting for a socket: spinning for a moment before sleeping, and a timer for an epoll set."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_CORES = len(os.sched_getaffinity(0))
#: Longest spin (seconds). The reply to an empty call arrives within 50 microseconds, and a sleep with its wake-up costs
#: 25 on either side. With many cores a longer spin disturbs no other thread and keeps the core at its full clock: it
#: lasts for a call with a CUDA tensor.
SPIN_S = 100e-6 if _CORES < 8 else 400e-6


class Spinner:
    """Decides whether to spin, by how often it has helped of late. For one side of one connection; one thread at a
    time.

    After consecutive spins without success it skips twice as many attempts each time, so that a connection that is
    seldom used, or whose methods take long, costs almost nothing. It never spins on a single core, which the peer
    needs.
    """

    __slots__ = ("_failed", "_skip", "_skipped")

    def __init__(self) -> None:
        self._failed = False
        self._skip = 0
        self._skipped = 0

    def should_spin(self) -> bool:
        """Whether to call ``spin`` this time. To be called once for each wait."""
        if self._skipped < self._skip:
            self._skipped += 1
            return False
        return _CORES > 1

    def spin(self, ready: Callable[[], bool]) -> None:
        """Call ``ready`` until it returns True, for ``SPIN_S`` at most, yielding the core to other threads."""
        self._skipped = 0
        until = time.perf_counter() + SPIN_S
        while time.perf_counter() < until:
            if ready():
                self._failed, self._skip = False, 0
                return
            os.sched_yield()
        if self._failed:  # a single failure may be any pause between two calls
            self._skip = min(2 * self._skip + 1, 255)
        self._failed = True


_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Timer:
    """A descriptor that becomes readable once, ``after_s`` seconds after each ``set``."""

    def __init__(self, after_s: float) -> None:
        self.fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._setting = _Timer(_Timespec(0, 0), _Timespec(int(after_s), int(after_s % 1 * 1e9)))

    def set(self) -> None:
        """Start, or start over."""
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(self._setting), None)

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)
