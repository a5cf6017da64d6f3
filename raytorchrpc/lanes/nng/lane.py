"""The nng lane: calls with any number of CPU tensors over nng's Pair protocol, within a host and between hosts.

It does not need torchrpc, and authenticates both ends of every connection. One thread reads all connections of a
member; methods run on the member's own threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import Capabilities, Message, Pending, Serve, Spawn
from raytorchrpc.lanes.common.acceptor import CONNECT_TIMEOUT_S, SocketAddress
from raytorchrpc.lanes.common.connected_lane import ConnectedLane
from raytorchrpc.lanes.common.credentials import Credentials
from raytorchrpc.lanes.common.handshake import Refused
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.lanes.nng import sockets
from raytorchrpc.lanes.nng.connection import Connection
from raytorchrpc.lanes.nng.sockets import PairSocket
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.process import fork, keepalive, threads

#: A reply that makes no progress for this long ends its connection (seconds).
REPLY_PATIENCE_S = 10.0
#: The connecting end sends it after the handshake. Until then the accepting end leaves the connection alone: with TLS,
#: the other might read what nng sends as a part of the handshake.
_BEGIN = b"n"


class NngLane(ConnectedLane[Connection]):
    """One per member. ``call`` and ``reply`` block until nng has taken the data."""

    name: ClassVar[str] = "nng"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=None, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(self, me: str, credentials: Credentials, *, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        """See ConnectedLane."""
        super().__init__(me, credentials, tcp_host, by_tcp)
        self._by_fd: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._closed = False
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        fork.register(self)

    # --- the interface -------------------------------------------------------------------------------------

    def open(self, serve: Serve, spawn: Spawn) -> SocketAddress:
        self._serve, self._spawn = serve, spawn
        address = self._listen(self._acceptor.open, self._tcp_host)
        try:
            self.start_reader()
        except threads.ThreadShortage as error:
            self._acceptor.close()
            raise LaneUnavailable(self.name, str(error)) from error
        return address

    def start_reader(self) -> None:
        """Read replies. Enough for a lane that only sends requests; ``open`` does it too. Raises ThreadShortage."""
        sockets.warm_up()
        self._reader = threads.start(self._read, name=f"raytorchrpc-{self._me}-nng")

    def call(
        self,
        peer: str,
        message: Message,
        timeout_s: float,
        *,
        caller_waits: bool = False,
        on_released: Callable[[], None] | None = None,
    ) -> Pending:
        sockets.check_process()
        deadline = time.monotonic() + timeout_s
        connection = self._made.get(peer)
        if connection is None or connection.ended:
            connection = self._connection(peer, deadline)
        return connection.call(message, deadline, on_released)

    def disconnect(self, peer: str) -> None:
        if not sockets.forked():
            super().disconnect(peer)

    def close(self) -> None:
        if sockets.forked():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._bell, 1)
            connections = set(self._by_fd.values())
        self._acceptor.close()
        for connection in connections:
            connection.end("this member left the group")
        self._made.clear()
        if self._reader is None:
            self._free()
        elif self._reader is not threading.current_thread():
            self._reader.join(1)

    def _free(self) -> None:
        with self._lock:  # close() rings the bell under it
            self._epoll.close()
            os.close(self._bell)

    def after_fork(self) -> list[fork.Address]:
        sockets.after_fork()
        return self._tcp_addresses()

    # --- connections -----------------------------------------------------------------------------------------

    def _poll(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    def _register(
        self, connected: socket.socket, protection: Protection | None, peer: str | None, deadline: float
    ) -> Connection:
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keepalive.detect_silence(connected)
        if peer is not None:
            connected.sendall(_BEGIN)
        else:
            connected.settimeout(CONNECT_TIMEOUT_S)
            if connected.recv(len(_BEGIN)) != _BEGIN:
                raise Refused("it hung up")
        sock = PairSocket(connected, deadline)
        connection = Connection(sock, protection, peer, self._forget)
        with self._lock:
            if self._closed:
                sock.close()
                raise self._left(peer)
            for fd in (sock.recv_fd, sock.gone_fd):
                self._by_fd[fd] = connection
                self._epoll.register(fd, select.EPOLLIN)
        return connection

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            for fd in (connection.sock.recv_fd, connection.sock.gone_fd):
                self._by_fd.pop(fd, None)
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(fd)
            self._discard(connection, connection.peer)

    # --- the reader ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        threads.serve(self._read_once, f"the nng reader of {self._me}", give_up=self.close)
        self._free()

    def _read_once(self) -> bool:
        for fd, _ in self._epoll.poll() if not self._closed else ():
            if (listener := self._acceptor.listeners.get(fd)) is not None:
                if not self._acceptor.accept(listener):
                    threads.pause()  # else epoll would report it again at once
            elif (connection := self._by_fd.get(fd)) is not None:
                try:
                    for frame in connection.read():
                        self._serve_request(connection, frame.call, frame.message)
                except BaseException as error:  # some requests may never be answered
                    threads.report(error, f"{self._me} closes a connection")
                    connection.end(f"a request could not be served: {error}")
        return not self._closed

    def _serve_request(self, connection: Connection, number: int, message: Message) -> None:
        work = self._serve(message, lambda answer: connection.reply(number, answer, REPLY_PATIENCE_S))
        if work is not None:
            self._spawn(work)


def make(setup: LaneSetup) -> NngLane:
    """See registry.Lane.make."""
    return NngLane(setup.member, setup.credentials, tcp_host=setup.tcp_host, by_tcp=setup.by_tcp)
