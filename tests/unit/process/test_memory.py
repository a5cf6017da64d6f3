"""What malloc keeps of freed memory."""

from __future__ import annotations

import ctypes
import os

import pytest

from raytorchrpc.process.memory import MallocTrimmer
from tests.conformance.peers import wait_until

BLOCK, BLOCKS = 64 << 10, 6400


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library has no mallinfo2")
def test_what_malloc_keeps_is_returned() -> None:
    """As after messages whose memory another thread frees."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [libc.malloc(BLOCK) for _ in range(BLOCKS)]  # too small for pages of their own
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        libc.free(block)
    kept, trimmer = resident(), MallocTrimmer()
    trimmer.count(100 << 20)
    trimmer.count(200 << 20)
    try:
        assert wait_until(lambda: kept - resident() > BLOCK * BLOCKS // 2, 20)
    finally:
        libc.free(blocks[-1])
