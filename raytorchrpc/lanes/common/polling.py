"""System calls that never wait, made without releasing the interpreter lock, and timers.

Python releases the lock around each call on a socket. In a process with other busy threads it then has to win the lock
back every time, which takes up to a switch interval (5 ms), while the call itself takes a microsecond.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import threading
import time

from raytorchrpc.lanes.common.frames import CHUNK

_libc = ctypes.PyDLL(None, use_errno=True)
_send, _recv, _poll = _libc["send"], _libc["recv"], _libc["poll"]
_send.restype = _recv.restype = ctypes.c_ssize_t
# Arguments are made once where possible: converting one takes as long as a quick call.
_AT_ONCE = ctypes.c_int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_CHUNK = ctypes.c_size_t(CHUNK)
_NO_TIME = ctypes.c_int(0)
_NOTHING_NOW = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})


class _Room(threading.local):
    """Where this thread receives."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(CHUNK))
        self.address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.view)))


_room = _Room()


class PromptSocket:
    """Sends and receives on a socket without waiting."""

    def __init__(self, sock: socket.socket) -> None:
        self._fd = ctypes.c_int(sock.fileno())

    def send(self, data: bytes) -> int:
        """Send what the kernel takes at once; returns how many bytes, perhaps none. Raises OSError."""
        sent: int = _send(self._fd, data, ctypes.c_size_t(len(data)), _AT_ONCE)
        return sent if sent >= 0 else _or_raise()

    def receive(self) -> bytes | None:
        """Receive what is there, at most ``CHUNK`` bytes; b"" at the end of the stream, None if nothing is there.

        Raises OSError.
        """
        count: int = _recv(self._fd, _room.address, _CHUNK, _AT_ONCE)
        if count < 0:
            _or_raise()
            return None
        return _room.view[:count].tobytes()

    def forget(self) -> None:
        """Call this before the socket is closed: afterwards its number may stand for another file."""
        self._fd.value = -1


def _or_raise() -> int:
    error = ctypes.get_errno()
    if error in _NOTHING_NOW:
        return 0
    raise OSError(error, os.strerror(error))


def signal(event_fd: int) -> None:
    """Make an eventfd readable."""
    if _libc.eventfd_write(event_fd, ctypes.c_uint64(1)) < 0:
        _or_raise()


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("happened", ctypes.c_short))


class AnyReadable:
    """Tells whether one of some descriptors is readable, for a thread that asks often."""

    def __init__(self, *fds: int) -> None:
        self._asked = (_PollFd * len(fds))(*[_PollFd(fd, select.POLLIN, 0) for fd in fds])
        self._address, self._count = ctypes.c_void_p(ctypes.addressof(self._asked)), ctypes.c_ulong(len(fds))

    def __call__(self) -> bool:
        return bool(_poll(self._address, self._count, _NO_TIME) > 0)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


def _setting(after_s: float) -> _Timer:
    return _Timer(_Timespec(0, 0), _Timespec(int(after_s), int(after_s % 1 * 1e9)))


_expired = ctypes.create_string_buffer(8)


class Timer:
    """A descriptor that becomes readable once, some time after each ``set``."""

    def __init__(self, after_s: float) -> None:
        """``after_s``: of ``set`` (seconds)."""
        self.fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._usual, self.is_set = _setting(after_s), False
        """``is_set``: since it was last cleared."""

    def set(self, after_s: float | None = None) -> None:
        """``after_s``: another time than the usual one."""
        self.is_set = True
        setting = self._usual if after_s is None else _setting(after_s)
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(setting), None)

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        self.is_set = False
        if _libc.read(self.fd, _expired, 8) < 0:
            _or_raise()

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
