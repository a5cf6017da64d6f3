"""The nng lane: calls over nng's Pair protocol, within a host and between hosts.

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
from asyncio import _get_running_loop
from collections.abc import Callable
from typing import Any, ClassVar

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Capabilities, Message, Pending, Released, Serve, Spawn
from raytorchrpc.lanes.common import connections, frames
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.connections import ConnectedLane, ReplyFrame, Request, WouldBlock
from raytorchrpc.lanes.common.handshake import Credentials, HungUp
from raytorchrpc.lanes.common.protection import TAG_BYTES, Protection
from raytorchrpc.lanes.nng import sockets
from raytorchrpc.lanes.nng.sockets import PairSocket
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.process import fork, tcp, threads
from raytorchrpc.process.completion import nothing, run_reported
from raytorchrpc.process.locks import Lock, interrupted_frames
from raytorchrpc.tensors.codec import Encoded

#: CPU tensors up to this size travel in band even if a tensor lane takes them (bytes).
IN_BAND_BYTES = 256 * 1024
#: A reply that makes no progress for this long ends its connection (seconds).
REPLY_PATIENCE_S = 10.0
#: The accepting end sends it after the handshake, on the thread that takes over: the other would not notice that nng is
#: not reached.
_BEGIN = b"n"
_CLOSED = "connection closed (the process ended or left the group)"
#: Messages read from one connection before others are read.
_BATCH = 64


class Connection(connections.Connection):
    """One thread reads it."""

    def __init__(
        self, sock: PairSocket, protection: Protection | None, peer: str | None, on_end: Callable[[Connection], None]
    ) -> None:
        """``protection``: of each nng message. ``on_end``: called once, before the socket is closed, to stop
        reading.
        """
        super().__init__(peer)
        self.sock = sock
        self._seal = None if protection is None else protection.seal
        self._incoming = None if protection is None else protection.incoming
        self._decrypt = None if protection is None else protection.decrypt
        self._on_end = on_end
        self._reader = frames.FrameReader()
        self._sending = threading.Lock()

    @property
    def is_free(self) -> bool:
        return not (self._sending.locked() or self.ended)

    def call(self, message: Message, deadline: float, caller_waits: bool, on_released: Released) -> Pending:
        sockets.check_process()
        check_carried(message.body)
        pending = Pending(on_released)
        number = self._begin(pending)
        try:
            self._send(frames.pack(frames.REQUEST, number, message), deadline, lambda: deadline)
        except BaseException:
            self._pending.pop(number, None)
            raise
        return pending

    def reply(self, number: int, message: Message) -> None:
        """Answer a request; each piece may take ``REPLY_PATIENCE_S``. Raises LaneUnavailable, PeerLost, RpcTimeout."""
        check_carried(message.body)
        reply = ReplyFrame(frames.pack(frames.REPLY, number, message), message.take_back)
        if _get_running_loop() is None:
            self._send_reply(reply)
        else:
            self._reply_on_loop(reply)

    def _send_reply(self, reply: ReplyFrame) -> None:
        def until() -> float:
            return time.monotonic() + REPLY_PATIENCE_S

        self._send(reply.buffers, until(), until, reply.take_back)

    def _send(
        self,
        buffers: list[Any],
        deadline: float,
        until: Callable[[], float],
        take_back: Callable[[], object] = nothing,
    ) -> None:
        """Send one frame. On an event loop this waits for ``PATIENCE_S`` only: if nothing was sent by then, it raises
        WouldBlock; else a thread sends the rest, and calls ``take_back`` if it cannot.
        """
        pause_at = None
        if _get_running_loop() is not None:
            pause_at = min(deadline, time.monotonic() + connections.PATIENCE_S)
        patience_s = (deadline if pause_at is None else pause_at) - time.monotonic()
        if not self._sending.acquire(False):
            if any(frame.f_locals.get("self") is self for frame in interrupted_frames()):
                raise connections.Interrupted
            if not self._sending.acquire(timeout=max(0.0, patience_s)):
                raise self._busy() if pause_at is None or pause_at == deadline else WouldBlock()
        rest: list[Any] = []
        try:
            if self._ended is not None:
                raise ConnectionResetError(self._ended)
            rest = self.sock.send(buffers, until, self._seal, pause_at)
            if not rest:
                return
            if sum(map(len, rest)) == sum(map(len, buffers)):
                rest = []
                raise WouldBlock()
            copies = list(map(bytes, rest))  # the program may change its tensors from now on
            threads.start(self._finish, copies, until, take_back, name="raytorchrpc-rest")
            return
        except (OSError, MemoryError, threads.ThreadShortage) as error:
            reason, rest = str(error), []
        except WouldBlock:
            raise
        except BaseException:  # as below
            self._sending.release()  # ``_close`` takes it
            rest = buffers
            self.end("a message was sent only in part")
            raise
        finally:
            if not rest:
                self._sending.release()
        # A part of the frame may have been sent, and no other frame can follow it.
        self.end(reason)
        raise PeerLost(self.peer or "the caller", reason, may_have_run=False)

    def _finish(self, rest: list[Any], until: Callable[[], float], take_back: Callable[[], object]) -> None:
        """Send the rest of a frame. ``_sending`` is held for it."""
        try:
            self.sock.send(rest, until, self._seal)
            return
        except (OSError, MemoryError) as error:
            reason = str(error)
        finally:
            self._sending.release()
        self.end(reason)
        run_reported(take_back)

    def read(self) -> list[frames.Frame]:
        """Read without blocking: completes the calls whose replies have arrived, and returns the requests."""
        gone = self.sock.gone  # read first: data that arrived before the end is still served
        requests: list[frames.Frame] = []
        try:
            for _ in range(_BATCH):
                data = self.sock.receive()
                if data is None:
                    if gone:
                        self.end(_CLOSED)
                    break
                if self._incoming is not None:
                    whole = memoryview(data)
                    data = whole[:-TAG_BYTES]
                    self._incoming.check(data, whole[-TAG_BYTES:])
                elif self._decrypt is not None:
                    data = self._decrypt(data)
                requests += self._requests_among(self._frames_in(data))
        except Exception as error:
            self.end(f"connection broke: {error}")
        return requests

    def _frames_in(self, data: Any) -> list[frames.Frame]:
        """Return the frames that a message completes. It holds a whole frame, or the next piece of one."""
        begins = self._reader.between_frames and len(data) >= frames.PREFIX_BYTES
        if begins and frames.sizes(data, 0)[1] == len(data):
            return [frames.parse(memoryview(data))]  # its large tensors stay in nng's own memory
        return self._reader.feed(memoryview(data))

    def _detach(self) -> None:
        self.sock.hang_up()
        self._on_end(self)

    def _close(self) -> None:
        with self._sending:  # a thread that was sending has been woken
            self.sock.close()


def check_carried(body: Encoded) -> None:
    """Raise LaneUnavailable for a body that this lane cannot carry."""
    if body.rrefs:
        raise LaneUnavailable("nng", "it carries no RRefs; allow torchrpc in GroupConfig.lanes")
    if any(not tensor.is_cpu for tensor in body.tensors):
        raise LaneUnavailable("nng", "it carries CPU tensors only; move them there, or allow a lane for CUDA tensors")


class NngLane(ConnectedLane[Connection]):
    """One per member. ``call`` and ``reply`` block until nng has taken the data."""

    name: ClassVar[str] = "nng"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=IN_BAND_BYTES, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(self, me: str, credentials: Credentials, *, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        super().__init__(me, credentials, tcp_host, by_tcp)
        self._by_fd: dict[int, Connection] = {}
        self._lock = Lock()
        self._reader: threading.Thread | None = None
        self._closed = False
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        for fd in self._polled:
            self._epoll.register(fd, select.EPOLLIN)
        fork.register(self)

    # --- the interface -------------------------------------------------------------------------------------

    def open(self, serve: Serve, spawn: Spawn) -> SocketAddress:
        self._serve, self._spawn = serve, spawn
        address = self._listen(self._acceptor.open, self._tcp_host)
        self.start_reader()
        return address

    def start_reader(self) -> None:
        """Read replies. Enough for a lane that only sends requests; ``open`` does it too. Raises ThreadShortage."""
        sockets.warm_up()
        self._reader = threads.start(self._read, name=f"raytorchrpc-{self._me}-nng")

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
        self._end_waits()
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

    def _connect_first(self, peer: str, request: Request) -> Pending:
        sockets.check_process()  # a forked child is refused on its own thread
        return super()._connect_first(peer, request)

    def _admit(self, sock: socket.socket, protection: Protection | None) -> None:
        def admit() -> None:  # nng's own greetings take a round trip
            try:
                super(NngLane, self)._admit(sock, protection)
            except Exception as error:
                self._acceptor.refuse(sock, error)

        threads.start(admit, name=f"raytorchrpc-{self._me}-handshake")

    def _register(
        self,
        connected: socket.socket,
        protection: Protection | None,
        peer: str | None,
        first: Request | None,
        deadline: float,
    ) -> Connection:
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tcp.detect_silence(connected)
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        if peer is None:
            connected.sendall(_BEGIN)
        elif connected.recv(len(_BEGIN)) != _BEGIN:
            raise HungUp("it hung up")
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
            self._discard(connection)

    # --- the reader ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        threads.serve(self._read_once, f"the nng reader of {self._me}")
        self._free()

    def _read_once(self) -> bool:
        for fd, _ in self._epoll.poll() if not self._closed else ():
            if (connection := self._by_fd.get(fd)) is None:
                if not self.readable(fd):
                    threads.pause()  # else epoll would report it again at once
            else:
                try:
                    for frame in connection.read():
                        self._serve_request(connection, frame.call, frame.message)
                except Exception as error:  # a peer must not end this process
                    if threads.is_shortage(error):
                        raise
                    threads.report(error, f"{self._me} closes a connection")
                    connection.end(f"a request could not be served: {error}")
        return not self._closed

    def _serve_request(self, connection: Connection, number: int, message: Message) -> None:
        work = self._serve(message, lambda answer: connection.reply(number, answer))
        if work is not None:
            self._spawn(work)


def make(setup: LaneSetup) -> NngLane:
    return NngLane(setup.member, setup.credentials, tcp_host=setup.tcp_host, by_tcp=setup.by_tcp)
