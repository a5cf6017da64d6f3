"""System calls that never wait, made without releasing the interpreter lock, and a spin before a sleep.

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
from collections.abc import Callable

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


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("happened", ctypes.c_short))


class AnyReadable:
    """Tells whether one of some descriptors is readable, for a thread that asks often."""

    def __init__(self, *fds: int) -> None:
        self._asked = (_PollFd * len(fds))(*[_PollFd(fd, select.POLLIN, 0) for fd in fds])
        self._address, self._count = ctypes.c_void_p(ctypes.addressof(self._asked)), ctypes.c_ulong(len(fds))

    def __call__(self) -> bool:
        return bool(_poll(self._address, self._count, _NO_TIME) > 0)


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
