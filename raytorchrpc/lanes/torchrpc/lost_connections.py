"""Closes the connections of a torchrpc agent to a lost peer. TensorPipe notices their end only when it reads."""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from raytorchrpc._compat import torch_internals
from raytorchrpc.process.fork import Address, addresses_in

#: The request that finds the connections closed fails at once; this is for one that does not (seconds).
_FAILS_S = 10.0


def close(worker: Any, url: str, others: Collection[str]) -> None:
    """Close the connections to a peer that nothing uses any more.

    An idle pipe of TensorPipe reads nothing, so it would keep its descriptors until this process ends. One request
    fails on the closed connections, and the pipe gives all of its descriptors back. Nothing is sent.

    Args:
        worker: torch's WorkerInfo of the peer, which the agent still has.
        url: where the peer listens.
        others: where other peers listen, to which connections stay.
    """
    elsewhere = {address for other in others for address in addresses_in(other)}
    if _shut(set(addresses_in(url)) - elsewhere):
        with suppress(RuntimeError):
            torch_internals.invoke_async(worker, operator.not_, (True,), _FAILS_S)


def _shut(addresses: Collection[Address]) -> bool:
    """Shut all connections of this process to these addresses; whether there is any."""
    found = False
    with suppress(OSError):  # no descriptor left, even to list them
        for entry in os.listdir("/proc/self/fd") if addresses else ():
            with suppress(OSError):  # closed meanwhile, or no socket
                if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(entry))) as connection:
                        if connection.family in (socket.AF_INET, socket.AF_INET6):
                            found |= _shut_if_to(connection, addresses)
    return found


def _shut_if_to(connection: socket.socket, addresses: Collection[Address]) -> bool:
    if connection.getpeername()[:2] not in addresses:
        return False
    connection.shutdown(socket.SHUT_RDWR)
    return True
