"""The socket lane: authenticated sockets, Unix on one host and TCP between hosts. A small call takes a fifth to a tenth
of its time over torchrpc.

It carries calls without tensors, and small CPU tensors in band. Threads of its own read requests (see ``selector``). A
caller that waits reads its own connection meanwhile, so that a reply costs one wake-up too.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import Capabilities, Message, Serve, Spawn
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.connections import ConnectedLane, Request, SocketAddress
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.socket.connection import Connection, tune
from raytorchrpc.lanes.socket.selector import Selector
from raytorchrpc.process import fork, threads
from raytorchrpc.tensors.codec import body_bytes

Work = Callable[[], None]

#: CPU tensors up to this size travel in band: two copies through the kernel cost less than a second message (bytes).
IN_BAND_BYTES = 256 * 1024
#: The first request of a connection goes with the handshake up to this size: the kernel takes it at once (bytes).
FIRST_BYTES = 16 * 1024


class SocketLane(ConnectedLane[Connection]):
    """One per member. ``serve`` may return work, which a thread of the selector then runs."""

    name: ClassVar[str] = "socket"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=IN_BAND_BYTES, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(self, me: str, credentials: Credentials, *, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        super().__init__(me, credentials, tcp_host, by_tcp)
        self._selector: Selector[Connection] = Selector(me, self._read, self._readable, self.close)
        for fd in self._polled:
            self._selector.listen_to(fd)

    # --- the interface -------------------------------------------------------------------------------------

    def open(self, serve: Serve, spawn: Spawn) -> SocketAddress:
        self._serve, self._spawn = serve, spawn
        address = self._listen(self._acceptor.open, self._tcp_host)
        fork.register(self)
        try:
            self._selector.start(lambda work: self._spawn(work))
        except threads.ThreadShortage as error:
            self.close()
            raise LaneUnavailable(self.name, str(error)) from error
        return address

    def close(self) -> None:
        if not self._selector.close():
            return
        self._acceptor.close()
        self._close_timer()
        for connection in list(self._selector.connections.values()):
            connection.end("this member left the group")
        self._made.clear()
        self._selector.retire(0)  # frees the descriptors if no thread is left to do it

    def after_fork(self) -> list[fork.Address]:
        addresses = [] if self._selector.closed else self._tcp_addresses()
        self._selector.after_fork()
        self._sweeps.close()
        for connection in self._selector.connections.values():
            connection.after_fork()
        self._made.clear()
        return addresses

    # --- connections -----------------------------------------------------------------------------------------

    def _pack_first(self, message: Message) -> bytes:
        if body_bytes(message.body) > FIRST_BYTES:
            return b""
        frame = b"".join(frames.pack(frames.REQUEST, 1, message))
        return frame if len(frame) <= FIRST_BYTES else b""

    def _register(
        self,
        sock: socket.socket,
        protection: Protection | None,
        peer: str | None,
        first: Request | None,
        deadline: float,
    ) -> Connection:
        tune(sock)
        connection = Connection(self._selector, sock, peer, protection, self._discard, first)
        if not self._selector.add(connection):
            raise self._left(peer)
        return connection

    # --- serving ---------------------------------------------------------------------------------------------

    def _read(self, connection: Connection, tasks: deque[tuple[Work, Connection | None]]) -> None:
        """Read what has arrived, and add the work that it brought. Requests enter their queues in the order sent."""
        if not connection.acquire_read():
            return  # a caller reads it
        try:
            for frame in connection.read():
                if (work := self._serve(frame.message, partial(connection.reply, frame.call))) is not None:
                    try:
                        tasks.append((work, connection))
                    except MemoryError:  # its method may be admitted, and would keep others out for ever
                        work()
        except BaseException as error:  # requests that have been accepted are served; the rest were not answered
            threads.report(error, f"{self._me} closes a connection")
            connection.end(f"a request could not be accepted: {error}")
        finally:
            connection.release_read()


def make(setup: LaneSetup) -> SocketLane:
    return SocketLane(setup.member, setup.credentials, tcp_host=setup.tcp_host, by_tcp=setup.by_tcp)
