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
#: Longest time without a spin after one that was in vain (seconds).
_REST_S = 0.02


class Spinner:
    """Decides whether to spin, by whether it has helped of late. For one thread at a time.

    After each spin without success it waits twice as long before it spins again, up to ``_REST_S``, so that a
    connection that is seldom used, or whose methods take long, costs little. A sleep that a spin would have spared ends
    that. It never spins on a single core, which the peer needs.
    """

    __slots__ = ("_failed", "_rests_until")

    def __init__(self) -> None:
        self._failed = 0
        self._rests_until = 0.0

    def should_spin(self) -> bool:
        """Whether to call ``spin`` this time."""
        return _CORES > 1 and (not self._failed or time.perf_counter() >= self._rests_until)

    def spin(self, ready: Callable[[], bool]) -> None:
        """Call ``ready`` until it returns True, for ``SPIN_S`` at most, yielding the core to other threads."""
        until = time.perf_counter() + SPIN_S
        while (now := time.perf_counter()) < until:
            if ready():
                self._failed = 0
                return
            os.sched_yield()
        self._rests_until = now + min(SPIN_S * 2 ** min(self._failed, 10), _REST_S)
        self._failed += 1

    def slept(self, seconds: float) -> None:
        """The thread has slept for so long instead."""
        if seconds < SPIN_S:
            self._failed = 0


_libc = ctypes.PyDLL(None, use_errno=True)


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
