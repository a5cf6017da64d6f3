"""Copies out of the memory of another process of this host, by address: one system call for many pieces."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy

_LIBC = ctypes.CDLL(None, use_errno=True)
_read: Any = getattr(_LIBC, "process_vm_readv", None)
if _read is not None:
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
#: Most pieces, and bytes, of one call. The kernel allows 1024 (IOV_MAX), and 2 GiB.
_PIECES, _BYTES = 1024, 64 << 20
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)


def admit_readers() -> None:
    """Let other processes of the same user read this one's memory where Yama, as on Ubuntu, needs a word for that."""
    with suppress(OSError), open(_YAMA) as file:
        if file.read().strip() == "1":
            _LIBC.prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)


def copies(pid: int, targets: numpy.ndarray, sources: numpy.ndarray, width: int) -> list[Callable[[], None]]:
    """The parts of a copy of pieces of ``width`` bytes out of the process ``pid``, each to be run on any thread.

    ``targets``, ``sources``: addresses (int64), the first in this process. A part releases the interpreter lock, and
    raises OSError: ESRCH if the process has ended, EFAULT for memory that it does not have, and EPERM or ENOSYS if the
    kernel does not let this process read it.
    """
    if width > _BYTES:
        steps = numpy.arange(0, width - _BYTES, _BYTES)
        rest = int(steps[-1]) + _BYTES
        parts = [(steps, _BYTES), (numpy.array([rest]), width - rest)]
        moved = [((targets[:, None] + at).ravel(), (sources[:, None] + at).ravel(), size) for at, size in parts]
        return [part for each in moved for part in copies(pid, *each)]
    both = numpy.empty((2, len(targets), 2), numpy.uint64)
    both[0, :, 0], both[1, :, 0], both[:, :, 1] = targets, sources, width
    at_once = max(1, min(_PIECES, _BYTES // max(1, width)))
    return [partial(_copy, pid, both[:, at : at + at_once], width) for at in range(0, len(targets), at_once)]


def _copy(pid: int, both: numpy.ndarray, width: int) -> None:
    number = both.shape[1]
    read = -1 if _read is None else _read(pid, both[0].ctypes.data, number, both[1].ctypes.data, number, 0)
    if read != number * width:
        code = errno.EFAULT if read >= 0 else errno.ENOSYS if _read is None else ctypes.get_errno()
        raise OSError(code, os.strerror(code))
