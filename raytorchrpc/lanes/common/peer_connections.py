"""The connections that a lane has made to its peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import PeerAddress
from raytorchrpc.lanes.common.acceptor import CONNECT_TIMEOUT_S


class Connectable(Protocol):
    """A connection that has, or has not, ended."""

    @property
    def ended(self) -> bool:
        """Whether it can carry nothing more."""


C = TypeVar("C", bound=Connectable)


class PeerConnections(Generic[C]):
    """At most one connection to each peer, made when it is first needed. Thread-safe."""

    def __init__(self, connect: Callable[[str, Any, float], C]) -> None:
        """``connect(peer, address, deadline)`` makes a connection; raises PeerLost. Only one runs at a time for
        a peer.
        """
        self._connect = connect
        self._lock = threading.Lock()
        self.addresses: dict[str, Any] = {}
        self.made: dict[str, C] = {}
        """By peer; some may have ended."""
        self.connecting: dict[str, threading.Lock] = {}
        """By peer; held while ``connect`` runs."""

    def add(self, peers: Sequence[PeerAddress]) -> None:
        """Make peers known."""
        for peer in peers:
            self.addresses[peer.peer] = peer.address
            self.connecting.setdefault(peer.peer, threading.Lock())

    def remove(self, peer: str) -> C | None:
        """Forget a peer; returns its connection, which the caller closes."""
        self.addresses.pop(peer, None)
        return self.made.pop(peer, None)

    def discard(self, connection: C, peer: str | None) -> None:
        """Forget a connection to a peer, if it is still the current one."""
        if peer is not None:
            with self._lock:
                if self.made.get(peer) is connection:
                    del self.made[peer]

    def get(self, peer: str, deadline: float) -> C:
        """Return the connection to a peer; make it if there is none. Blocks until the deadline at most.

        Raises PeerLost, with ``may_have_run`` False.
        """
        address = self.addresses.get(peer)
        if address is None:
            raise PeerLost(peer, "it is not in the group (any more)", may_have_run=False)
        lock = self.connecting[peer]
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerLost(peer, "no connection to it in time", may_have_run=False)
        try:
            connection = self.made.get(peer)
            if connection is None or connection.ended:
                until = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
                connection = self._connect(peer, address, until)
                with self._lock:
                    self.made[peer] = connection
            return connection
        finally:
            lock.release()
