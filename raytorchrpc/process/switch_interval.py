"""Python's switch interval: short while this member calls or is called, the program's own at all other times.

A thread that wants the interpreter lock asks for it after an interval, so a call to a member that runs Python waits for
at least one. Only a thread that has the lock can set the interval, so the first call of several waits for a long one.
"""

from __future__ import annotations

import sys
import time

from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import Deadlines

#: Python's own interval (microseconds). Another one was set by the program, and is left alone.
_PYTHONS_US = 5000
#: The interval stays short for so long after a call, at most twice as long (seconds).
LEASE_S = 0.1


class SwitchInterval:
    """Of one member. Thread-safe."""

    def __init__(self, short_s: float, deadlines: Deadlines) -> None:
        self._short_us, self._deadlines = round(short_s * 1e6), deadlines
        self._lock = Lock()
        self._is_short = self._ended = False
        self.used = False
        """Whether there was a call of late; if not, a call is to ``shorten`` the interval."""
        fork.register(self)

    def shorten(self) -> None:
        """Shorten the interval, unless the program has set it. Quick."""
        with self._lock:
            self.used = True
            if not (self._is_short or self._ended) and _interval_us() == _PYTHONS_US:
                self._watch()
                self._is_short = True
                sys.setswitchinterval(self._short_us / 1e6)

    def _watch(self) -> None:
        self._deadlines.at(time.monotonic() + LEASE_S, self._restore_if_unused)

    def _restore_if_unused(self) -> None:
        with self._lock:
            if self.used:
                self.used = False
                self._watch()
            else:
                self._restore()

    def _restore(self) -> None:
        if self._is_short and _interval_us() == self._short_us:
            sys.setswitchinterval(_PYTHONS_US / 1e6)
        self._is_short = False

    def end(self) -> None:
        """Leave the interval as it was, for good. Idempotent."""
        with self._lock:
            self._ended = True
            self._restore()

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware. The child lacks the thread that would restore it."""
        self._lock = Lock()
        self.end()
        return ()


def _interval_us() -> int:
    return round(sys.getswitchinterval() * 1e6)
