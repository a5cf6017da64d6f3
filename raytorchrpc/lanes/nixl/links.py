"""The NIXL agent of one peer, as this member reads from it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from raytorchrpc.lanes.nixl.agent import Agent, Lost
from raytorchrpc.lanes.nixl.memory import Place


class Link:
    """This process's agent, and that of one peer. Thread-safe."""

    def __init__(self, agent: Agent, name: str, connection: bytes, cuda_obstacle: str | None) -> None:
        """The last three are what the peer's lane returned from ``open``."""
        self.agent, self.name, self.cuda_obstacle = agent, name, cuda_obstacle
        self._connection = connection
        self._lock = threading.Lock()
        self._connected = False
        self._known: set[int] = set()  # the peer's memory that the agent has loaded, by the peer's number
        self._users = 0  # reads in progress
        self.lost: str | None = None
        """Why this link is broken. That is final: the sender may have reused its memory since."""

    def connect(self) -> None:
        """Connect to the peer's agent, once. Raises Lost."""
        with self._lock:
            if self.lost is not None:
                raise Lost(self.lost)
            if not self._connected:
                self.agent.load(self._connection, "its NIXL agent")
                self._connected = True

    def load(self, places: Sequence[Place]) -> None:
        """Load the peer's memory that these pieces of a message lie in. Raises Lost."""
        for number, blob, _, size in places:
            if size and number not in self._known:
                self.agent.load(blob, "its memory")
                self._known.add(number)

    def notify(self, notice: bytes) -> None:
        """Connect, and send a notice. Raises Lost."""
        self.connect()
        self.agent.notify(self.name, notice)

    def retain(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Note that a read has ended. A broken link without reads is disconnected."""
        with self._lock:
            self._users -= 1
            if self.lost is not None and not self._users:
                self._disconnect()

    def end(self, why: str) -> None:
        """Break it; reads are abandoned."""
        with self._lock:
            self.lost = why
            if not self._users:
                self._disconnect()

    def disconnect(self) -> None:
        """Disconnect, though reads may be in progress: the lane is closed."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self.agent.disconnect(self.name)
