"""System calls that never wait, made without releasing the interpreter lock.

Python releases the lock around each call on a socket. In a process with other busy threads it then has to win the lock
back every time, which takes up to a switch interval (5 ms), while the call itself takes a microsecond.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading

#: Most bytes received at a time.
CHUNK = 1 << 16

_libc = ctypes.PyDLL(None, use_errno=True)
_send, _recv, _poll = _libc.send, _libc.recv, _libc.poll
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = _recv.restype = ctypes.c_ssize_t
_poll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_NOTHING_NOW = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})


class _Room(threading.local):
    """Where this thread receives."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(CHUNK))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


_room = _Room()


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("happened", ctypes.c_short))


def send_now(sock: socket.socket, data: bytes) -> int:
    """Send what the kernel takes at once; returns how many bytes, perhaps none. Raises OSError."""
    sent: int = _send(sock.fileno(), data, len(data), _AT_ONCE)
    return sent if sent >= 0 else _or_raise()


def receive_now(sock: socket.socket) -> bytes | None:
    """Receive what is there, at most ``CHUNK`` bytes; b"" at the end of the stream, None if nothing is there.

    Raises OSError.
    """
    count: int = _recv(sock.fileno(), _room.address, CHUNK, _AT_ONCE)
    if count < 0:
        _or_raise()
        return None
    return _room.view[:count].tobytes()


def _or_raise() -> int:
    error = ctypes.get_errno()
    if error in _NOTHING_NOW:
        return 0
    raise OSError(error, os.strerror(error))


class ReadableNow:
    """Tells whether a descriptor is readable, for a thread that asks often."""

    def __init__(self, fd: int) -> None:
        self._asked = _PollFd(fd, 1, 0)  # POLLIN
        self._address = ctypes.addressof(self._asked)

    def __call__(self) -> bool:
        return bool(_poll(self._address, 1, 0) > 0)
