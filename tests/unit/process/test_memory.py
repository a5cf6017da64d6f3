"""What malloc keeps of freed memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raytorchrpc.process.this_process import MallocTrimmer
from tests.polling import wait_until

BLOCK, BLOCKS = 64 << 10, 6400

needs_mallinfo = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this libc has no mallinfo2")


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def freed_memory() -> Iterator[None]:
    """Have malloc keep 400 MB of this process: a block behind them is in use."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [libc.malloc(BLOCK) for _ in range(BLOCKS)]  # too small for pages of their own
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        libc.free(block)
    try:
        yield
    finally:
        libc.free(blocks[-1])


@needs_mallinfo
def test_what_malloc_keeps_is_returned() -> None:
    with freed_memory():
        kept, trimmer = resident(), MallocTrimmer()
        trimmer.count(100 << 20)
        trimmer.count(200 << 20)
        assert wait_until(lambda: kept - resident() > BLOCK * BLOCKS // 2, 20)
