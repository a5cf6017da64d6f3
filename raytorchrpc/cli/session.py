"""A Ray for the time of one command."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def ray_session(address: str | None, cpus: int) -> Iterator[None]:
    """A quiet local Ray, or the cluster at ``address``; left in order however the block ends.

    Raises ConnectionError where no cluster answers at ``address``.
    """
    if address is not None:
        _check_answers(address)  # before anything that would have to be undone: this process may use a Ray already
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            with _ctrl_c_held_back():
                ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)
        else:
            ray.init(address, **quiet)
        yield
    finally:
        with _ctrl_c_held_back():
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Fail at once where Ray would try for minutes. Raises ConnectionError."""
    host, _, port = address.rpartition(":")
    if host and "//" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise ConnectionError(f"no Ray cluster answers at {address}: {error}") from error


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Let a Ctrl-C take effect at the end: a Ray that is stopped halfway through its start can crash."""
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
