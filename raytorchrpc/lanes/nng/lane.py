"""The nng lane: calls with any number of CPU tensors over nng's Pair protocol, within a host and between hosts.

It needs no torchrpc, and it authenticates. A member listens at a door, where a peer asks for a wire: nng's Pair takes
one peer per socket, so each connection gets one of its own. On it both ends prove that they have the group's secret
before anything is served. One thread reads all wires of a member; methods run on the member's own threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError
from raytorchrpc.lanes.base import Capabilities, Message, MessageLane, PeerAddress, Pending, Serve, Spawn
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.credentials import Credentials, Identity, Instance
from raytorchrpc.lanes.common.protection import Protection, secure_accepted, secure_stream
from raytorchrpc.lanes.nng import sockets
from raytorchrpc.lanes.nng.connection import Channel, Line
from raytorchrpc.process import fork, threads

logger = logging.getLogger(__name__)

#: Time for a connection to be made and proved (seconds), at most; a call's deadline may cut it.
CONNECT_TIMEOUT_S = 10.0
#: A reply ends its connection if no piece of it was taken for this long (seconds).
REPLY_PATIENCE_S = 10.0
#: Wires being proved at a time besides one for each peer, as all may come at once, to a member that is back for
#: instance; for one more, the oldest is hung up on.
_HANDSHAKES = 16
_ATTEMPTS = 3
#: Values that an NngServer sends at a time.
_SERVING = 4
_SERVER = "the process that offers values"
#: What a peer asks for at the door.
_LOCAL, _TCP = b"raytorchrpc/1 local", b"raytorchrpc/1 tcp"


class NngAddress(NamedTuple):
    """Where a member's door is, as URLs."""

    local: str
    """In Linux's abstract socket namespace: no file, gone with the process."""
    tcp: str | None
    instance: Instance
    """Which process listens there."""


class NngLane(MessageLane):
    """One per member. ``call`` and ``reply`` block until nng has taken the data."""

    name: ClassVar[str] = "nng"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=None, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(self, me: str, credentials: Credentials, *, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        """``tcp_host``: address to listen on for other hosts, None for none. ``by_tcp``: the peers there."""
        self._me, self._credentials = me, credentials
        self._tcp_host, self._by_tcp = tcp_host, by_tcp
        self._address = NngAddress("", None, credentials.instance)  # until it listens, if it does
        self._addresses: dict[str, NngAddress] = {}
        self._lines: dict[str, Line] = {}
        self._connecting: dict[str, threading.Lock] = {}
        self._by_fd: dict[int, Line] = {}
        self._proving: dict[sockets.PairSocket, None] = {}  # oldest first
        self._lock = threading.Lock()
        self._door: sockets.Door | None = None
        self._reader: threading.Thread | None = None
        self._closed = False
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)

    # --- the interface -------------------------------------------------------------------------------------

    def open(self, serve: Serve, spawn: Spawn) -> NngAddress:
        self._serve, self._spawn = serve, spawn
        self._door = door = sockets.Door()
        try:
            local = door.listen(_local_url())
            tcp = None if self._tcp_host is None else door.listen(_tcp_url(self._tcp_host))
        except OSError as error:
            door.close()
            raise LaneUnavailable(self.name, f"cannot listen: {error}") from error
        self._address = NngAddress(local, tcp, self._credentials.instance)
        self._epoll.register(door.fd, select.EPOLLIN)
        try:
            self._start_reader()
        except threads.ThreadShortage as error:
            door.close()
            raise LaneUnavailable(self.name, str(error)) from error
        return self._address

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> NngAddress | None:
        self._by_tcp = by_tcp
        if tcp_host is None or self._tcp_host is not None or self._door is None:
            return None
        try:
            self._address = self._address._replace(tcp=self._door.listen(_tcp_url(tcp_host)))
        except OSError as error:
            raise LaneUnavailable(self.name, f"cannot listen on {tcp_host}: {error}") from error
        self._tcp_host = tcp_host
        return self._address

    def _start_reader(self) -> None:
        self._reader = threads.start(self._read, name=f"raytorchrpc-{self._me}-nng")

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        for peer in peers:
            self._addresses[peer.peer] = peer.address
            self._connecting.setdefault(peer.peer, threading.Lock())

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
        line = self._lines.get(peer)
        if line is None or line.ended:
            line = self._connect(peer, deadline)
        return line.call(message, deadline, on_released)

    def disconnect(self, peer: str) -> None:
        self._addresses.pop(peer, None)
        line = self._lines.pop(peer, None)
        if line is not None and not sockets.forked():
            line.end("it was removed from the group")

    def close(self) -> None:
        if sockets.forked():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._bell, 1)
            proving, lines = list(self._proving), set(self._by_fd.values())
        for wire in proving:
            wire.hang_up()
        for line in lines:
            line.end("this member left the group")
        self._lines.clear()
        if self._reader is None:
            self._free()
        elif self._reader is not threading.current_thread():
            self._reader.join(1)

    def _free(self) -> None:
        if self._door is not None:
            self._door.close()
        with self._lock:  # close() rings the bell under it
            self._epoll.close()
            os.close(self._bell)

    # --- connections -----------------------------------------------------------------------------------------

    def _connect(self, peer: str, deadline: float) -> Line:
        address = self._addresses.get(peer)
        if address is None or self._closed:
            raise PeerLost(peer, "it is not in the group (any more)", may_have_run=False)
        lock = self._connecting[peer]
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerLost(peer, "no connection to it in time", may_have_run=False)
        try:
            line = self._lines.get(peer)
            if line is None or line.ended:
                until = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
                line = self._register(*self._dial(peer, address, until), peer)
                self._lines[peer] = line
            return line
        finally:
            lock.release()

    def _dial(self, peer: str, address: NngAddress, deadline: float) -> tuple[sockets.PairSocket, Protection | None]:
        by_tcp = peer in self._by_tcp
        url, question = (address.tcp, _TCP) if by_tcp else (address.local, _LOCAL)
        if url is None:
            raise PeerLost(peer, "it does not listen for other hosts", may_have_run=False)
        me, its = (listener_identity(self._credentials, each, by_tcp) for each in (self._address, address))
        for attempt in range(_ATTEMPTS):  # the other end may hang up on strangers, and be in doubt about us
            wire: sockets.PairSocket | None = None
            try:
                where = sockets.ask(url, question, deadline).decode("ascii")
                wire = sockets.PairSocket()
                wire.dial(where, deadline)
                _check_user(wire, self._credentials, by_tcp)
                left = max(0.001, deadline - time.monotonic())
                return wire, secure_stream(Channel(wire), self._credentials, me, its, left, exposed=by_tcp)
            except (OSError, ValueError, handshake.Refused) as error:
                if wire is not None:
                    wire.close()
                hung_up = isinstance(error, (handshake.HungUp, ConnectionResetError))
                if not hung_up or attempt == _ATTEMPTS - 1:
                    raise PeerLost(peer, f"no connection to it: {error}", may_have_run=False) from error
        raise AssertionError("unreachable")

    def _register(self, wire: sockets.PairSocket, protection: Protection | None, peer: str | None) -> Line:
        line = Line(wire, protection, peer, self._forget)
        with self._lock:
            if self._closed:
                wire.close()
                raise PeerLost(peer or "the caller", "this member has left the group", may_have_run=False)
            for fd in (wire.recv_fd, wire.gone_fd):
                self._by_fd[fd] = line
                self._epoll.register(fd, select.EPOLLIN)
        return line

    def _forget(self, line: Line) -> None:
        with self._lock:
            for fd in (line.wire.recv_fd, line.wire.gone_fd):
                self._by_fd.pop(fd, None)
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(fd)
            if line.peer is not None and self._lines.get(line.peer) is line:
                del self._lines[line.peer]

    # --- the reader ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        threads.serve(self._read_once, f"the nng reader of {self._me}", give_up=self.close)
        self._free()

    def _read_once(self) -> bool:
        door = self._door
        for fd, _ in self._epoll.poll() if not self._closed else ():
            if door is not None and fd == door.fd:
                door.answer(self._at_door)
            elif (line := self._by_fd.get(fd)) is not None:
                try:
                    for frame in line.read():
                        self._request(line, frame.call, frame.message)
                except BaseException as error:  # requests may be left that nobody answers
                    threads.report(error, f"{self._me} ends a connection")
                    line.end(f"a request could not be taken in: {error}")
        return not self._closed

    def _request(self, line: Line, number: int, message: Message) -> None:
        work = self._serve(message, lambda answer: line.reply(number, answer, REPLY_PATIENCE_S))
        if work is not None:
            self._spawn(work)

    def _at_door(self, question: bytes) -> bytes | None:
        if question not in (_LOCAL, _TCP) or (question == _TCP and self._tcp_host is None):
            return None
        try:
            wire = sockets.PairSocket()
        except (OSError, RayTorchRpcError) as error:
            logger.warning("%s cannot accept a connection: %s", self._me, error)
            return None
        try:
            where = wire.listen(_local_url() if question == _LOCAL else _tcp_url(self._tcp_host or ""))
        except OSError as error:
            wire.close()
            logger.warning("%s cannot accept a connection: %s", self._me, error)
            return None
        with self._lock:
            closed = self._closed
            crowded = len(self._proving) >= _HANDSHAKES + len(self._addresses)
            oldest = next(iter(self._proving)) if crowded else None
            if oldest is not None:
                del self._proving[oldest]
            if not closed:
                self._proving[wire] = None
        if closed:  # close() has hung up on all the others already
            wire.close()
            return None
        if oldest is not None:  # strangers who say nothing must not keep members out
            oldest.hang_up()
        try:
            threads.start(self._prove, wire, question == _TCP, name=f"raytorchrpc-{self._me}-handshake")
        except threads.ThreadShortage as error:
            with self._lock:
                self._proving.pop(wire, None)
            wire.close()
            logger.warning("%s cannot accept a connection: %s", self._me, error)
            return None
        return where.encode("ascii")

    def _prove(self, wire: sockets.PairSocket, by_tcp: bool) -> None:
        try:
            me = listener_identity(self._credentials, self._address, by_tcp)
            stream = Channel(wire)
            _, protection = secure_accepted(stream, self._credentials, me, CONNECT_TIMEOUT_S, exposed=by_tcp)
            _check_user(wire, self._credentials, by_tcp)
            with self._lock:
                still = self._proving.pop(wire, True) is None
            if not still:
                raise handshake.Refused("it took too long")
            self._register(wire, protection, None)
        except Exception as error:
            with self._lock:
                self._proving.pop(wire, None)
            wire.close()
            if not isinstance(error, (OSError, RayTorchRpcError)):
                raise
            logger.debug("%s refused a connection: %s", self._me, error)


def listener_identity(credentials: Credentials, address: NngAddress, by_tcp: bool) -> Identity:
    """Who listens at that address, named as for those who connect in this way."""
    where = f"{address.local} {address.tcp}" if by_tcp else address.local
    return credentials.peer(address.instance, f"nng {where}")


def _check_user(wire: sockets.PairSocket, credentials: Credentials, by_tcp: bool) -> None:
    if not by_tcp and not credentials.across_users:
        handshake.check_uid(-1 if wire.peer_uid is None else wire.peer_uid)


# --- values for processes that are no members ------------------------------------------------------------------


def _local_url() -> str:
    return f"abstract://{fork.ABSTRACT}{os.urandom(12).hex()}"


def _tcp_url(host: str) -> str:
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
