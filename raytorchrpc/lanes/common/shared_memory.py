"""Shared memory between processes of one host, addressed by process and file descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import NamedTuple

import numpy

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process.this_process import has_ended

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
#: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FREE_PAGES = 3


class SharedAddress(NamedTuple):
    """Where a peer finds shared memory of this process."""

    pid: int
    fd: int
    name: str
    size: int

    @property
    def tag(self) -> str:
        """A short identity, different for any other memory that a member shares or has shared."""
        return self.name[-8:]


def is_gone(address: SharedAddress) -> bool:
    """Whether the process of an address has ended, and with it all use of the memory."""
    return has_ended(address.pid)


class SharedBytes:
    """Memory of this process that peers may map. It lives as long as any process uses it."""

    def __init__(self, size: int) -> None:
        """Raises LaneUnavailable."""
        name = "raytorchrpc-" + os.urandom(12).hex()
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            mapped = mmap.mmap(fd, size)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise LaneUnavailable("shm", f"cannot map {size} bytes of shared memory: {error}") from error
        _advise(mapped)
        self.address = SharedAddress(os.getpid(), fd, name, size)
        self.bytes = numpy.frombuffer(mapped, dtype=numpy.uint8)

    def close(self, *, free: bool = False) -> None:
        """Prevent peers from mapping it from now on. Idempotent.

        ``free``: return its pages to the system, though peers still have it mapped; all its bytes become 0.
        """
        fd, self.address = self.address.fd, self.address._replace(fd=-1)
        if fd >= 0:
            if free and self.address.pid == os.getpid():  # in a forked child the memory is still the parent's
                LIBC.fallocate(fd, _FREE_PAGES, 0, self.address.size)
            os.close(fd)


class Gone(LaneUnavailable):
    """The shared memory is gone: its process ended, or closed it."""


def map_shared(address: SharedAddress) -> numpy.ndarray:
    """Map a peer's SharedBytes. Raises Gone, or LaneUnavailable if this process may not or cannot map them."""
    try:
        fd = open_shared(address)
        try:
            mapped = mmap.mmap(fd, address.size)
        finally:
            os.close(fd)
    except FileNotFoundError as error:
        raise Gone("shm", f"the peer's memory is gone: {error}") from error
    except (OSError, ValueError) as error:
        raise LaneUnavailable("shm", f"cannot map the peer's memory: {error}") from error
    _advise(mapped)
    return numpy.frombuffer(mapped, dtype=numpy.uint8)


def open_shared(address: SharedAddress) -> int:
    """Open a peer's shared memory; returns the descriptor. Raises OSError or Gone."""
    path = f"/proc/{address.pid}/fd/{address.fd}"
    if address.name not in os.readlink(path):
        raise Gone("shm", "another process has that pid now")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def is_open(address: SharedAddress) -> bool:
    """Whether the process of an address lives and has not closed the memory."""
    with contextlib.suppress(OSError):
        return address.name in os.readlink(f"/proc/{address.pid}/fd/{address.fd}")
    return False


def _advise(mapped: mmap.mmap) -> None:
    # Takes effect if the kernel allows huge pages for shared memory (shmem_enabled=advise), and costs nothing
    # otherwise.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
