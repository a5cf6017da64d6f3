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
from ray.exceptions import RayError

from raytorchrpc._compat import ray_internals
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError


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


@contextmanager
def running_cluster(address: str | None) -> Iterator[None]:
    """The cluster at ``address``, else the one of RAY_ADDRESS, else the one that runs on this machine.

    Raises ConfigurationError, in one line, where there is none, also for what Ray raises inside the block.
    """
    surroundings = os.environ.get("RAY_ADDRESS")
    where = address or (surroundings if surroundings != "local" else None) or "auto"
    if where == "local":
        raise ConfigurationError("--address local would start a cluster of its own; name one that runs")
    try:
        with ray_session(where, cpus=0):
            yield
    except (RayError, RuntimeError, ValueError, OSError) as error:
        if isinstance(error, RayTorchRpcError):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[0] if lines else type(error).__name__
        if isinstance(error, ConnectionError):  # names the address itself
            raise ConfigurationError(why + _hint(why)) from error
        raise ConfigurationError(f"no Ray cluster at {where}: {why}") from error


def _hint(why: str) -> str:
    """Ray says of a token that is refused no more than that it could not connect."""
    if "Failed to connect" not in why:
        return ""
    if ray_internals.ray_token() == "off":
        return ". Token authentication is off here; if it is on there: RAY_AUTH_MODE=token, and the cluster's token"
    return ". If something answers there, it refused this process's token"


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
