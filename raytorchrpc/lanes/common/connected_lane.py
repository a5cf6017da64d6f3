"""What message lanes share that make connections of their own: where they listen, and a connection to each peer."""

from __future__ import annotations

import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import MessageLane, PeerAddress
from raytorchrpc.lanes.common.acceptor import CONNECT_TIMEOUT_S, Acceptor, SocketAddress, dial
from raytorchrpc.lanes.common.credentials import Credentials
from raytorchrpc.lanes.common.handshake import Refused
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.process import fork


class Connection(Protocol):
    """A connection of such a lane."""

    @property
    def ended(self) -> bool:
        """Whether it can carry nothing more."""

    def end(self, reason: str) -> None:
        """Close it. Idempotent."""


C = TypeVar("C", bound=Connection)


class ConnectedLane(MessageLane, Generic[C]):
    """Listens on Unix and TCP sockets, and connects to each peer when it is first called."""

    def __init__(self, me: str, credentials: Credentials, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        """``tcp_host``: address to listen on for other hosts, or None. ``by_tcp``: the peers on other hosts."""
        self._me, self._credentials = me, credentials
        self._tcp_host, self._by_tcp = tcp_host, by_tcp
        self._addresses: dict[str, SocketAddress] = {}
        self._made: dict[str, C] = {}  # by peer; some may have ended
        self._connecting: dict[str, threading.Lock] = {}  # by peer; held while a connection is made
        self._made_lock = threading.Lock()
        self._acceptor = Acceptor(self.name, me, credentials, self._addresses.__len__, self._admit)

    @abstractmethod
    def _poll(self, fd: int) -> None:
        """Have ``Acceptor.accept`` called when this listening socket is readable."""

    @abstractmethod
    def _register(self, sock: socket.socket, protection: Protection | None, peer: str | None, deadline: float) -> C:
        """Make the connection of an authenticated socket, which the caller closes if this raises.

        ``peer``: the member at the other end; None if that made the connection. Raises PeerLost, Refused or OSError.
        """

    def _listen(self, begin: Callable[[Any], SocketAddress], tcp_host: str | None) -> SocketAddress:
        known = set(self._acceptor.listeners)
        try:
            address = begin(tcp_host)
        except OSError as error:
            raise LaneUnavailable(self.name, str(error)) from error
        for fd in self._acceptor.listeners.keys() - known:
            self._poll(fd)
        return address

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> SocketAddress | None:
        self._by_tcp = by_tcp
        if tcp_host is None or self._acceptor.address.tcp is not None:
            return None
        return self._listen(self._acceptor.open_tcp, tcp_host)

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        for peer in peers:
            self._addresses[peer.peer] = peer.address
            self._connecting.setdefault(peer.peer, threading.Lock())

    def disconnect(self, peer: str) -> None:
        self._addresses.pop(peer, None)
        connection = self._made.pop(peer, None)
        if connection is not None:
            connection.end("it was removed from the group")

    def _connection(self, peer: str, deadline: float) -> C:
        """Return the connection to a peer; make it if there is none. Blocks until the deadline at most.

        Raises PeerLost, with ``may_have_run`` False.
        """
        address = self._addresses.get(peer)
        if address is None:
            raise PeerLost(peer, "it is not in the group (any more)", may_have_run=False)
        lock = self._connecting[peer]
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerLost(peer, "no connection to it in time", may_have_run=False)
        try:
            connection = self._made.get(peer)
            if connection is None or connection.ended:
                until = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
                connection = self._connect(peer, address, until)
                with self._made_lock:
                    self._made[peer] = connection
            return connection
        finally:
            lock.release()

    def _discard(self, connection: C, peer: str | None) -> None:
        """Forget a connection to a peer, if it is still the current one."""
        if peer is not None:
            with self._made_lock:
                if self._made.get(peer) is connection:
                    del self._made[peer]

    def _connect(self, peer: str, address: SocketAddress, deadline: float) -> C:
        own, by_tcp = self._acceptor.address, peer in self._by_tcp
        try:
            left = max(0.001, deadline - time.monotonic())
            sock, protection = dial(self.name, self._credentials, own, address, by_tcp, left)
            try:
                return self._register(sock, protection, peer, deadline)
            except BaseException:
                sock.close()
                raise
        except (OSError, Refused) as error:
            raise PeerLost(peer, f"no connection to it: {error}", may_have_run=False) from error

    def _admit(self, sock: socket.socket, protection: Protection | None, _: Any) -> None:
        self._register(sock, protection, None, time.monotonic() + CONNECT_TIMEOUT_S)

    def _left(self, peer: str | None) -> PeerLost:
        return PeerLost(peer or "the caller", "this member has left the group", may_have_run=False)

    def _tcp_addresses(self) -> list[fork.Address]:
        """Return the addresses of all connections over TCP, for ``after_fork``."""
        known = (self._acceptor.address, *self._addresses.values())
        return [address.tcp for address in known if address.tcp is not None]
