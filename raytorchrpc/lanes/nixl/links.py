"""The NIXL agents of this member's peers, as it reads from them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import PeerAddress
from raytorchrpc.lanes.nixl.agent import LANE, Agent, Lost
from raytorchrpc.lanes.nixl.memory import Place


@dataclass(eq=False)
class Link:
    """One peer's agent."""

    agent: str
    connection: bytes
    cuda_obstacle: str | None
    known: set[int] = field(default_factory=set)
    """Its memory that this agent has loaded, by the peer's number."""
    connected: bool = False
    lost: str | None = None
    """Why this link is broken. That is final: the sender may have reused its memory since."""
    users: int = 0
    """Reads in progress."""


class Links:
    """The links of one member, by peer. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._links: dict[str, Link] = {}
        self.agent: Agent | None = None
        self.closed = False
        self.reading = 0
        """Threads that read."""

    def add(self, peers: Sequence[PeerAddress]) -> None:
        """Make peers known."""
        self._links.update((peer.peer, Link(*peer.address)) for peer in peers)

    def get(self, peer: str) -> tuple[Agent, Link]:
        """This process's agent, and the link to a peer. Raises LaneUnavailable."""
        agent, link = self.agent, self._links.get(peer)
        if agent is None or self.closed:
            raise LaneUnavailable(LANE, "the lane is closed")
        if link is None:
            raise LaneUnavailable(LANE, f"member {peer!r} is unknown here, or has left")
        return agent, link

    def connect(self, agent: Agent, link: Link) -> None:
        """Connect to the peer's agent, once. Raises Lost."""
        with self._changed:
            if link.lost is not None:
                raise Lost(link.lost)
            if not link.connected:
                agent.connect(link.connection)
                link.connected = True

    def load(self, agent: Agent, link: Link, places: Sequence[Place]) -> None:
        """Load the peer's memory that these pieces of a message lie in. Raises Lost."""
        for number, blob, _, size in places:
            if size and number not in link.known:
                agent.load(blob)
                link.known.add(number)

    @contextlib.contextmanager
    def reading_from(self, agent: Agent, link: Link) -> Iterator[None]:
        """Keep the link while a thread reads."""
        self.retain(link)
        with self._changed:
            self.reading += 1
        try:
            yield
        finally:
            with self._changed:
                self.reading -= 1
                self._changed.notify_all()
            self.release(agent, link)

    def retain(self, link: Link) -> None:
        """Note that a read has begun."""
        with self._changed:
            link.users += 1

    def release(self, agent: Agent | None, link: Link) -> None:
        """Note that a read has ended. A broken link without reads is disconnected."""
        with self._changed:
            link.users -= 1
            if agent is not None and link.lost is not None and not link.users and link.connected:
                link.connected = False
                agent.disconnect(link.agent)

    def remove(self, peer: str, why: str) -> Link | None:
        """Break the link to a peer; reads from it are abandoned."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.lost = why
            self.retain(link)
            self.release(self.agent, link)
        return link

    def close(self, timeout_s: float) -> Agent | None:
        """Wait for the threads that read, for so long at most; returns the agent, which nothing uses from now on."""
        with self._changed:
            self._changed.wait_for(lambda: not self.reading, timeout_s)
            agent, self.agent = self.agent, None
        return agent

    def disconnect_all(self, agent: Agent) -> None:
        """Disconnect from all peers."""
        for link in self._links.values():
            if link.connected:
                agent.disconnect(link.agent)
