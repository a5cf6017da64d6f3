"""The socket lane: authenticated sockets, Unix on one host and TCP between hosts. A small call takes a fifth to a tenth
of its time over torchrpc.

It carries calls without tensors, and small CPU tensors in band. Listener threads read requests (see ``listeners``). A
caller that waits reads its own connection meanwhile, so that a reply costs one wake-up too.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Capabilities, Message, MessageLane, PeerAddress, Pending, Serve, Spawn
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.acceptor import CONNECT_TIMEOUT_S, Acceptor, SocketAddress, dial
from raytorchrpc.lanes.common.credentials import Credentials
from raytorchrpc.lanes.common.handshake import Refused
from raytorchrpc.lanes.common.peer_connections import PeerConnections
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.socket.connection import Connection, SocketPending, tune
from raytorchrpc.lanes.socket.listeners import Listeners
from raytorchrpc.process import fork, threads

Work = Callable[[], None]

#: CPU tensors up to this size travel in band: two copies through the kernel cost less than a second message (bytes).
IN_BAND_BYTES = 256 * 1024


class SocketLane(MessageLane):
    """One per member. ``serve`` may return work, which a listener then runs."""

    name: ClassVar[str] = "socket"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=IN_BAND_BYTES, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(
        self,
        me: str,
        credentials: Credentials,
        *,
        tcp_host: str | None,
        by_tcp: frozenset[str],
    ) -> None:
        """``tcp_host``: address to listen on for other hosts, or None. ``by_tcp``: the peers on other hosts."""
        self._me, self._credentials = me, credentials
        self._tcp_host, self._by_tcp = tcp_host, by_tcp
        self._peers: PeerConnections[Connection] = PeerConnections(self._connect)
        self._made = self._peers.made
        self._acceptor = Acceptor(self.name, me, credentials, lambda: len(self._peers.addresses), self._admit)
        self._listeners: Listeners[Connection] = Listeners(me, self._read, self._accept, self.close)

    # --- the interface -------------------------------------------------------------------------------------

    def open(self, serve: Serve, spawn: Spawn) -> SocketAddress:
        self._serve, self._spawn = serve, spawn
        address = self._listen(self._acceptor.open, self._tcp_host)
        fork.register(self)
        self._listeners.start(lambda work: self._spawn(work))
        return address

    def _listen(self, begin: Callable[[Any], SocketAddress], tcp_host: str | None) -> SocketAddress:
        known = set(self._acceptor.listeners)
        try:
            address = begin(tcp_host)
        except OSError as error:
            raise LaneUnavailable(self.name, str(error)) from error
        for fd in self._acceptor.listeners.keys() - known:
            self._listeners.listen_to(fd)
        return address

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> SocketAddress | None:
        self._by_tcp = by_tcp
        if tcp_host is None or self._acceptor.address.tcp is not None:
            return None
        return self._listen(self._acceptor.open_tcp, tcp_host)

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._peers.add(peers)

    def call(
        self,
        peer: str,
        message: Message,
        timeout_s: float,
        *,
        caller_waits: bool = False,
        on_released: Callable[[], None] | None = None,
    ) -> Pending:
        deadline = time.monotonic() + timeout_s
        connection = self._made.get(peer)
        if connection is None or connection.ended:
            connection = self._peers.get(peer, deadline)
        pending = SocketPending(connection, deadline, on_released)
        connection.begin(pending, caller_waits)
        try:
            connection.send(frames.pack(frames.REQUEST, pending.call, message), deadline)
        except BaseException:
            connection.abandon(pending)
            raise
        return pending

    def disconnect(self, peer: str) -> None:
        connection = self._peers.remove(peer)
        if connection is not None:
            connection.end("it was removed from the group")

    def close(self) -> None:
        if not self._listeners.close():
            return
        self._acceptor.close()
        for connection in list(self._listeners.connections.values()):
            connection.end("this member left the group")
        self._made.clear()
        self._listeners.retire(0)  # frees the descriptors if no listener is left to do it

    def after_fork(self) -> list[fork.Address]:
        """See fork.ForkAware."""
        known = [] if self._listeners.closed else [self._acceptor.address, *self._peers.addresses.values()]
        self._listeners.after_fork()
        for connection in self._listeners.connections.values():
            connection.after_fork()
        self._made.clear()
        return [address.tcp for address in known if address.tcp is not None]

    # --- connections -----------------------------------------------------------------------------------------

    def _connect(self, peer: str, address: SocketAddress, deadline: float) -> Connection:
        try:
            left = max(0.001, deadline - time.monotonic())
            own, by_tcp = self._acceptor.address, peer in self._by_tcp
            sock, protection = dial(self.name, self._credentials, own, address, by_tcp, left)
            return self._register(sock, protection, peer)
        except (OSError, Refused) as error:
            raise PeerLost(peer, f"no connection to it: {error}", may_have_run=False) from error

    def _accept(self, fd: int) -> bool:
        return self._acceptor.accept(self._acceptor.listeners[fd])

    def _admit(self, sock: socket.socket, protection: Protection | None, _: Any) -> None:
        self._register(sock, protection, None)

    def _register(self, sock: socket.socket, protection: Protection | None, peer: str | None) -> Connection:
        tune(sock)
        connection = Connection(self._listeners, sock, peer, protection, self._peers.discard)
        if not self._listeners.add(connection):
            sock.close()
            raise PeerLost(peer or "the caller", "this member has left the group", may_have_run=False)
        return connection

    # --- serving ---------------------------------------------------------------------------------------------

    def _read(self, connection: Connection) -> list[Work]:
        """Read what has arrived, and return the work that it brought.

        Requests enter their queues in the order sent.
        """
        if not connection.acquire_read():
            return []  # a caller reads it
        tasks: list[Work] = []
        try:
            for frame in connection.read():
                if (task := self._request(connection, frame)) is not None:
                    tasks.append(partial(self._run, task, connection))
        except BaseException as error:  # requests that have been accepted are served; the rest were not answered
            threads.report(error, f"{self._me} closes a connection")
            connection.end(f"a request could not be accepted: {error}")
        finally:
            connection.release_read()
        return tasks

    def _run(self, task: Work, connection: Connection) -> None:
        try:
            task()
        except BaseException as error:  # the caller may not have been answered
            threads.report(error, f"{self._me} closes a connection")
            connection.end(f"a request could not be served: {error}")

    def _request(self, connection: Connection, frame: frames.Frame) -> Work | None:
        def reply(message: Message) -> None:
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            connection.send(frames.pack(frames.REPLY, frame.call, message), deadline)

        return self._serve(frame.message, reply)


def make(setup: LaneSetup) -> SocketLane:
    """See registry.Lane.make."""
    return SocketLane(
        setup.member,
        setup.credentials,
        tcp_host=setup.tcp_host,
        by_tcp=setup.by_tcp,
    )
