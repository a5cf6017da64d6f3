"""A timer that can be polled like a socket."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

_libc = ctypes.PyDLL(None, use_errno=True)  # these calls never wait


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
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(self._setting), None)

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
