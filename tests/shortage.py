"""A process that is short of memory or threads, in tests."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: As torch raises it.
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


class Shortage:
    """Of threads, or none, in this process. The kernel refuses a thread whose stack is larger than any memory."""

    def begin(self) -> None:
        threading.stack_size(1 << 47)

    def end(self) -> None:
        threading.stack_size(0)


@pytest.fixture
def shortage() -> Iterator[Shortage]:
    one = Shortage()
    yield one
    one.end()


class Failing:
    """Raises these errors, one each time, and then does what it is told."""

    def __init__(self, errors: list[BaseException], then: Callable[..., Any]) -> None:
        self.errors, self.then = errors, then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return self.then(*args, **kwargs)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no file meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
