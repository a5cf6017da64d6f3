"""Waiting for what nobody tells, in tests. A module of its own: actors import it with their test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    try:
        stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # one of them has ended meanwhile
        return False
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}


def suspend(pid: int) -> None:
    """Stop a process, and wait until no thread of it runs: until one has taken the signal, the others go on."""
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: stands_still(pid), 20)


def allowed(seconds: float) -> float:
    """What is promised of a machine that has cores to spare, in seconds; so much more as others use them.

    The load is an average over the last minute, so it tells late of a burst. For how much of the last ten seconds some
    thread has waited for a core tells sooner.
    """
    load = 2.0 * os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, load, min(5.0, 1 / (1.001 - _starved())))


def _starved() -> float:
    try:
        pressure = Path("/proc/pressure/cpu").read_text()
    except OSError:  # this kernel does not tell
        return 0.0
    return float(pressure.partition("avg10=")[2].split()[0]) / 100
