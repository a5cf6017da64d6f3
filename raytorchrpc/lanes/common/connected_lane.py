"""What message lanes share that make connections of their own: where they listen, and a connection to each peer."""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import MessageLane, PeerAddress
from raytorchrpc.lanes.common.acceptor import CONNECT_TIMEOUT_S, Acceptor, SocketAddress, dial
from raytorchrpc.lanes.common.credentials import Credentials
from raytorchrpc.lanes.common.handshake import Refused
from raytorchrpc.lanes.common.peer_connections import C, PeerConnections
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.process import fork


class ConnectedLane(MessageLane, Generic[C]):
    """Listens on Unix and TCP sockets, and connects to each peer when it is first called."""

    def __init__(self, me: str, credentials: Credentials, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        """``tcp_host``: address to listen on for other hosts, or None. ``by_tcp``: the peers on other hosts."""
        self._me, self._credentials = me, credentials
        self._tcp_host, self._by_tcp = tcp_host, by_tcp
        self._peers: PeerConnections[C] = PeerConnections(self._connect)
        self._acceptor = Acceptor(self.name, me, credentials, lambda: len(self._peers.addresses), self._admit)

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
        self._peers.add(peers)

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
        known = (self._acceptor.address, *self._peers.addresses.values())
        return [address.tcp for address in known if address.tcp is not None]
