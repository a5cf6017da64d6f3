"""Waiting for a socket: whether to look again for a moment before sleeping, and a timer for an epoll set."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_CORES = len(os.sched_getaffinity(0))
#: Look again for at most this long (seconds). An empty call's answer comes within 50 microseconds, and being put to
#: sleep and woken costs 25 on either side. With many cores a longer look is in nobody's way, and the core stays quick:
#: enough for a call with a CUDA tensor.
LOOK_S = 100e-6 if _CORES < 8 else 400e-6


class Patience:
    """Whether looking again has paid off of late. For one connection and one side of it; one thread at a time.

    Each time it was in vain again, the next tries are left out, twice as many as before: a connection that is used now
    and then, or whose methods take long, costs next to nothing. With a single core it would only keep the peer from
    answering.
    """

    __slots__ = ("_left_out", "_skip", "_vain")

    def __init__(self) -> None:
        self._vain = False
        self._skip = 0
        self._left_out = 0

    def is_left(self) -> bool:
        """Whether to ``look`` this time. To be asked once for each time."""
        if self._left_out < self._skip:
            self._left_out += 1
            return False
        return _CORES > 1

    def look(self, at: Callable[[], bool]) -> None:
        """Call ``at`` until it is true, for at most ``LOOK_S``, giving way to whoever else wants the core."""
        self._left_out = 0
        until = time.perf_counter() + LOOK_S
        while time.perf_counter() < until:
            if at():
                self._vain, self._skip = False, 0
                return
            os.sched_yield()
        if self._vain:  # once is what every pause looks like
            self._skip = min(2 * self._skip + 1, 255)
        self._vain = True


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
        """Start over."""
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(self._setting), None)

    def clear(self) -> None:
        """Make it unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)
