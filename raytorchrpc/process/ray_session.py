"""Ray sessions for the duration of one command."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import ray
from ray.exceptions import RayError

from raytorchrpc._compat import ray_internals
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError


@contextmanager
def ray_session(address: str | None, cpus: int) -> Iterator[None]:
    """Start a quiet local Ray, or connect to the cluster at ``address``; always shuts down at the end of the block.

    Raises ConfigurationError, with one line, if this process cannot connect to a cluster at ``address``.
    """
    if address is not None:
        _check_answers(address)  # before the try block: this process may already use Ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            with _delayed_ctrl_c():
                ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)
        else:
            with _reported(address):
                ray.init(address, **quiet)
        yield
    finally:
        with _delayed_ctrl_c():
            ray.shutdown()


@contextmanager
def running_cluster(address: str | None) -> Iterator[None]:
    """Connect to the cluster at ``address``, at RAY_ADDRESS, or on this machine, in this order.

    Raises ConfigurationError with one line if there is none; Ray's errors inside the block become one too. An error of
    a pipe that its reader has closed is raised as it is. Inside the block sys.stdout is stderr, because Ray prints
    notices of the whole cluster there, whatever ``log_to_driver`` says.
    """
    environment = os.environ.get("RAY_ADDRESS")
    where = address or (environment if environment != "local" else None) or "auto"
    if where == "local":
        raise ConfigurationError("--address local would start a new cluster; name one that runs")
    with redirect_stdout(sys.stderr), _reported(where), ray_session(where, cpus=0):
        yield


@contextmanager
def _reported(address: str) -> Iterator[None]:
    """Raise an error of Ray as a ConfigurationError with one line that names the address."""
    try:
        yield
    except (RayError, RuntimeError, ValueError, OSError) as error:
        if isinstance(error, (RayTorchRpcError, BrokenPipeError)):
            raise
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if isinstance(error, ConnectionError):  # its message names the address
            raise ConfigurationError(why + _hint(why)) from error
        raise ConfigurationError(f"no Ray cluster at {address}: {why}") from error


def _hint(why: str) -> str:
    """Ray reports a refused token only as a failed connection."""
    if "Failed to connect" not in why:
        return ""
    if ray_internals.ray_token() == "off":
        return ". Token authentication is off here; if it is on there, set RAY_AUTH_MODE=token and the cluster's token"
    return ". If a cluster runs there, it refused this process's token"


def _check_answers(address: str) -> None:
    """Fail at once; Ray would retry for minutes. Raises ConfigurationError."""
    if address.startswith("ray://"):
        raise ConfigurationError(f"commands cannot use Ray Client ({address}): run them on a node of the cluster")
    host, _, port = address.rpartition(":")
    if host and "//" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"no Ray cluster answers at {address}: {error}") from error
    elif not host and address not in ("auto", "local"):
        raise ConfigurationError(f"no Ray cluster at {address}: it is not HOST:PORT")


@contextmanager
def _delayed_ctrl_c() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, because Ray can crash if its start is interrupted."""
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
