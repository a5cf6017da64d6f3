"""Waiting for what nobody tells, in tests. A module of its own: actors import it with their test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def allowed(seconds: float) -> float:
    """What is promised of a machine that has cores to spare, in seconds; so much more as others use them."""
    return seconds * max(1.0, 2.0 * os.getloadavg()[0] / (os.cpu_count() or 1))
