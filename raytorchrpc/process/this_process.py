"""What tells this process from others of its host, and what processes use: memory, descriptors, processor time."""

from __future__ import annotations

import ctypes
import os
import resource

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.process import threads

unique = ""
"""Of this process alone: 16 characters. A forked child has another one, so read it each time."""


def _renew() -> None:
    global unique
    unique = os.urandom(8).hex()


_renew()
os.register_at_fork(after_in_child=_renew)


def _stat(pid: int) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from the third, the state, on. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def processor_s(pid: int) -> float:
    """The processor time that the process with this pid has used (seconds). Raises OSError if there is none."""
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def has_ended(pid: int) -> bool:
    """Whether the process with this pid, which existed before, has ended."""
    try:
        state = _stat(pid)[0]
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return state in (b"Z", b"X")


#: What malloc keeps is looked at after so many bytes, and returned to the system if it is more (bytes).
_KEPT = 256 << 20
_LIBC = ctypes.CDLL(None)


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (*(f"unused{number}" for number in range(8)), "free", "top")]


class MallocTrimmer:
    """Bounds the free memory that malloc keeps where a lane's library allocates and frees each message.

    Before version 2.38, glibc finds no room for an aligned block, such as that of a tensor, where one of the same size
    was freed. Each thread also keeps free memory of its own. In a loop of pulls of 50 MB, a process grew by 2 GB.
    """

    def __init__(self) -> None:
        self._size, self._trims = 0, hasattr(_LIBC, "mallinfo2") and hasattr(_LIBC, "malloc_trim")
        if self._trims:
            _LIBC.mallinfo2.restype = _MallInfo

    def count(self, size: int) -> None:
        """Note that so many bytes are allocated for a message. Quick; a thread of its own trims."""
        self._size += size  # another thread's count may be lost
        if self._size >= _KEPT:
            self._size = 0
            if self._trims:
                threads.start(self._trim, name="raytorchrpc-trim")

    @staticmethod
    def _trim() -> None:
        if _LIBC.mallinfo2().free > _KEPT:
            _LIBC.malloc_trim(0)


def default_capacity() -> int:
    """Return a quarter of the memory that this process may use (physical, or its control group's limit), in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            text = file.read().strip()
        total = min(total, int(text)) if text.isdigit() else total
    except OSError:
        pass  # no control group here
    return max(64 << 20, total // 4)


#: Left to others by ``reserve_descriptors``.
_SPARE = 64


def reserve_descriptors(count: int, purpose: str) -> None:
    """Have room for so many more descriptors; raises the soft limit of this process as far as necessary.

    Raises ConfigurationError, which begins with ``purpose``, if the hard limit is too low.
    """
    used = len(os.listdir("/proc/self/fd"))
    wanted = used + count + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ConfigurationError(
            f"{purpose} takes {count} file descriptors; this process has {used} and may have {hard}: raise its limit "
            f"on open files (ulimit -n, LimitNOFILE of a systemd unit) to {wanted}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
