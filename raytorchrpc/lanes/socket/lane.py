"""The socket lane: authenticated sockets, Unix on one host and TCP between hosts; 5 to 10 times quicker than
torchrpc for a small call. It carries calls without tensors, and small CPU tensors in band.

Threads ("listeners") wait together in one epoll set; the kernel wakes one per message. A listener that finds a
request runs it itself, after making sure that another one listens, so a request costs one wake-up and a busy
method keeps nobody from being heard. A caller that waits reads its own connection meanwhile: one wake-up too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Capabilities, Message, MessageLane, PeerAddress, Pending, Serve, Spawn
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.acceptor import CONNECT_TIMEOUT_S, Acceptor, SocketAddress, dial
from raytorchrpc.lanes.common.credentials import Credentials, Identity
from raytorchrpc.lanes.common.handshake import Refused
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.lanes.socket.connection import Connection, SocketPending, tune
from raytorchrpc.lanes.socket.spin import Timer
from raytorchrpc.process import fork, threads

Work = Callable[[], None]

logger = logging.getLogger(__name__)

#: CPU tensors up to this travel in the message: two copies through the kernel cost less than a second message.
IN_BAND_BYTES = 256 * 1024

#: A reply that no caller comes to read is read after this, or twice as long (seconds).
ATTEND_S = 0.001
#: Idle listeners kept; more appear while many methods run at once.
_SPARE_LISTENERS = 4
#: Between attempts to accept where descriptors have run out (seconds).
_BREATH_S = 0.05
_NOTHING = ((-1, 0),)
_READ = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class SocketLane(MessageLane):
    """One per member. See the module for its threads; ``serve`` may return work, which a listener then runs."""

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
        one_at_a_time: bool = False,
    ) -> None:
        """``tcp_host``: address to listen on for other hosts, None for Unix only. ``by_tcp``: the peers there.
        ``one_at_a_time``: what is served runs one after another anyway, so nothing is lost if a request that comes
        behind a brief one is read by the thread that serves that one.
        """
        self._me, self._credentials = me, credentials
        self._one_at_a_time = one_at_a_time
        self._tcp_host, self._by_tcp = tcp_host, by_tcp
        self._addresses: dict[str, SocketAddress] = {}
        self._connections: dict[str, Connection] = {}
        self._connecting: dict[str, threading.Lock] = {}
        self._by_fd: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._standing_in = False
        self._acceptor = Acceptor(self.name, me, credentials, lambda: len(self._addresses), self._admit)
        self._closed = False
        self._epoll = select.epoll()
        # Level-triggered: once rung, every listener hears it.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._watched: list[Connection] = []
        self._timer = Timer(ATTEND_S)
        self._epoll.register(self._timer.fd, _READ)

    # --- the interface -------------------------------------------------------------------------------------

    def open(self, serve: Serve, spawn: Spawn) -> SocketAddress:
        self._serve, self._spawn = serve, spawn
        try:
            address = self._acceptor.open(self._tcp_host)
        except OSError as error:
            raise LaneUnavailable(self.name, str(error)) from error
        for fd in self._acceptor.listeners:
            self._epoll.register(fd, _READ)
        fork.register(self)
        self._add_listener()
        return address

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> SocketAddress | None:
        self._by_tcp = by_tcp
        if tcp_host is None or self._acceptor.address.tcp is not None:
            return None
        known = set(self._acceptor.listeners)
        try:
            address = self._acceptor.open_tcp(tcp_host)
        except OSError as error:
            raise LaneUnavailable(self.name, str(error)) from error
        for fd in self._acceptor.listeners.keys() - known:
            self._epoll.register(fd, _READ)
        return address

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
        deadline = time.monotonic() + timeout_s
        connection = self._connections.get(peer)
        if connection is None or connection.ended:
            connection = self._connect(peer, deadline)
        pending = SocketPending(connection, deadline, on_released)
        connection.begin(pending, caller_waits)
        try:
            connection.send(frames.pack(frames.REQUEST, pending.call, message), deadline)
        except BaseException:
            connection.forget(pending)
            raise
        return pending

    def disconnect(self, peer: str) -> None:
        self._addresses.pop(peer, None)
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.end("it was removed from the group")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._bell, 1)  # under the lock: the last listener to see it closes the bell
        self._acceptor.close()
        for connection in list(self._by_fd.values()):
            connection.end("this member left the group")
        self._connections.clear()
        self._retire(0)  # frees epoll and bell if no listener is left to do it

    def after_fork(self) -> list[fork.Address]:
        """See forking.ForkAware."""
        closed, self._closed = self._closed, True
        self._lock = threading.Lock()
        for connection in self._by_fd.values():
            connection.after_fork()
        self._connections.clear()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            # This process's descriptors alone: the set itself, and what is in it, are the parent's.
            self._epoll.close()
            self._timer.close()
            os.close(bell)
        known = [] if closed else [self._acceptor.address, *self._addresses.values()]
        return [address.tcp for address in known if address.tcp is not None]

    # --- connections -----------------------------------------------------------------------------------------

    def _connect(self, peer: str, deadline: float) -> Connection:
        address = self._addresses.get(peer)
        if address is None or self._closed:
            raise PeerLost(peer, "it is not in the group (any more)", may_have_run=False)
        lock = self._connecting[peer]
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerLost(peer, "no connection to it in time", may_have_run=False)
        try:
            connection = self._connections.get(peer)
            if connection is not None and not connection.ended:
                return connection
            patience = min(CONNECT_TIMEOUT_S, max(0.001, deadline - time.monotonic()))
            connection = self._register(*self._dial(peer, address, patience), peer)
            self._connections[peer] = connection
            return connection
        finally:
            lock.release()

    def _dial(self, peer: str, address: SocketAddress, patience: float) -> tuple[socket.socket, Protection | None]:
        try:
            own, by_tcp = self._acceptor.address, peer in self._by_tcp
            sock, protection = dial(self.name, self._credentials, own, address, by_tcp, patience)
            tune(sock)
            return sock, protection
        except (OSError, Refused) as error:
            raise PeerLost(peer, f"no connection to it: {error}", may_have_run=False) from error

    def _admit(self, sock: socket.socket, protection: Protection | None, peer: Identity) -> None:
        tune(sock)
        self._register(sock, protection, None)

    def _register(self, sock: socket.socket, protection: Protection | None, peer: str | None) -> Connection:
        connection = Connection(self, sock, peer, protection)
        with self._lock:
            if self._closed:
                sock.close()
                raise PeerLost(peer or "the caller", "this member has left the group", may_have_run=False)
            self._by_fd[connection.fd] = connection
            self._epoll.register(connection.fd, _READ if connection.accepted else 0)
        return connection

    def watch(self, connection: Connection) -> None:
        """See Listeners."""
        with self._lock:
            self._watched.append(connection)
            if len(self._watched) == 1 and not self._closed:
                self._timer.set()

    def _attend(self) -> None:
        with self._lock:
            watched, self._watched = self._watched, []
        try:
            again = [connection for connection in watched if connection.attend()]
        except BaseException:
            with self._lock:
                self._watched += watched
            raise
        with self._lock:
            if self._closed:
                return
            self._watched += again
            self._timer.clear()
            self._epoll.modify(self._timer.fd, _READ)
            if self._watched:
                self._timer.set()

    def forget(self, connection: Connection) -> None:
        """See Listeners."""
        with self._lock:
            self._by_fd.pop(connection.fd, None)
            if connection.peer is not None and self._connections.get(connection.peer) is connection:
                del self._connections[connection.peer]
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(connection.fd)

    def arm(self, fd: int) -> None:
        """See Listeners."""
        try:
            self._epoll.modify(fd, _READ)
        except (OSError, ValueError):  # closed meanwhile
            return

    def disarm(self, fd: int) -> None:
        """See Listeners."""
        try:
            self._epoll.modify(fd, 0)
        except (OSError, ValueError):
            return

    # --- listeners -------------------------------------------------------------------------------------------

    def _add_listener(self) -> None:
        """Raises ThreadShortage."""
        number = self._count_listener()
        if not number:
            return
        try:
            threads.start(self._listener, name=f"raytorchrpc-{self._me}-listener-{number}")
        except threads.ThreadShortage:
            with self._lock:
                self._idle -= 1
            self._retire(1)
            raise

    def _count_listener(self) -> int:
        with self._lock:
            if self._closed:
                return 0
            self._threads += 1
            self._idle += 1
            return self._threads

    def _let_another_listen(self) -> None:
        """This thread is going to do something that may block."""
        if self._idle > 0:
            return
        try:
            self._add_listener()
        except threads.ThreadShortage as error:
            threads.report(error, f"{self._me} listens when a thread has time for it")
            if not self._standing_in:
                self._have_stand_in()

    def _have_stand_in(self) -> None:
        try:
            self._standing_in = True
            self._spawn(self._stand_in)
        except Exception as error:
            self._standing_in = False
            threads.report(error, f"{self._me} listens when its methods are done")

    def _stand_in(self) -> None:
        """Listen for a moment, on a thread that was made for other work, until a listener can be started."""
        with contextlib.suppress(threads.ThreadShortage):
            if self._idle == 0:
                self._add_listener()
        if self._idle > 0 or not self._count_listener():
            self._standing_in = False
            return
        try:
            stays = self._handle_next(threads.PAUSE_S)
        except BaseException:
            self._let_go_of_stand_in()
            self._standing_in = False
            self._listen_to_all_again()
            raise
        if stays:
            self._let_go_of_stand_in()
        self._have_stand_in()

    def _let_go_of_stand_in(self) -> None:
        with self._lock:
            self._idle -= 1
        self._retire(1)

    def _listener(self) -> None:
        threads.serve(
            self._handle_next, f"a listener of {self._me}", restore=self._listen_to_all_again, give_up=self.close
        )

    def _handle_next(self, patience_s: float = -1) -> bool:
        """Wait for one event, for so long or for ever, and do what it asks for; False: this listener is to end."""
        if self._closed:
            self._retire(1)
            return False
        try:
            ((fd, _),) = self._epoll.poll(patience_s, 1) or _NOTHING
        except InterruptedError:
            return True
        if fd == -1:
            return True
        if fd == self._bell:
            self._retire(1)
            return False
        with self._lock:
            self._idle -= 1
        try:
            if fd == self._timer.fd:
                self._attend()
            elif (listener := self._acceptor.listeners.get(fd)) is not None:
                self._welcome(listener)
            elif (connection := self._by_fd.get(fd)) is not None:
                self._serve_all(connection)
                del connection
        except BaseException:
            with self._lock:
                self._idle += 1
            raise
        with self._lock:
            if self._idle >= _SPARE_LISTENERS:
                self._threads -= 1
                return False
            self._idle += 1
        return True

    def _listen_to_all_again(self) -> None:
        """Whatever a listener failed at may be something that nobody listens to any more."""
        for fd in list(self._acceptor.listeners):
            self.arm(fd)
        for connection in list(self._by_fd.values()):
            connection.listen_again()
        with self._lock:
            if not self._closed:
                self._epoll.modify(self._timer.fd, _READ)
                if self._watched:
                    self._timer.set()

    def _retire(self, leaving: int) -> None:
        with self._lock:
            self._threads -= leaving
            last = self._closed and self._threads == 0 and self._bell >= 0
            if last:
                bell, self._bell = self._bell, -1
        if last:
            self._epoll.close()
            self._timer.close()
            os.close(bell)

    def _serve_all(self, connection: Connection) -> None:
        """Read what arrived and do the work that came with it, for as long as more arrives at once."""
        tasks = self._hear(connection, partial(connection.read, socket.MSG_DONTWAIT))
        while tasks:
            began = time.perf_counter()
            while tasks:
                self._do(tasks.pop(0), connection)
            connection.brief = time.perf_counter() - began < ATTEND_S
            connection.keep_to_oneself()
            tasks = self._hear(connection, connection.await_requests)

    def _do(self, task: Work, connection: Connection) -> None:
        try:
            task()
        except BaseException as error:  # whoever asked may not have been answered
            threads.report(error, f"{self._me} ends a connection")
            connection.end(f"a request could not be served: {error}")

    def _hear(self, connection: Connection, read: Callable[[], list[frames.Frame]]) -> list[Work]:
        """Read, let others listen on, and return the work that is left for this thread.

        Requests take their turns before anybody else reads this connection: they are served in the order sent.
        """
        if not connection.take_reading():
            return []  # somebody reads it, and lets listeners have it again
        tasks: list[Work] = []
        try:
            for frame in read():
                if (task := self._request(connection, frame)) is not None:
                    tasks.append(task)
        except BaseException as error:  # what was taken in before is served; the rest nobody has answered
            threads.report(error, f"{self._me} ends a connection")
            connection.end(f"a request could not be taken in: {error}")
        finally:
            # A second thread that listened meanwhile would fight for the interpreter with brief work like this.
            connection.give_reading(lazily=bool(tasks) and self._one_at_a_time and connection.brief)
        if tasks:
            # What follows may block: in a method, or in a reply to somebody who stands still.
            self._let_another_listen()
        while len(tasks) > 1:  # several requests in one read: each may block
            try:
                self._spawn(tasks[1])
            except Exception as error:
                threads.report(error, f"{self._me} serves requests one after another")
                break
            del tasks[1]
        return tasks

    def _request(self, connection: Connection, frame: frames.Frame) -> Work | None:
        def reply(message: Message) -> None:
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            connection.send(frames.pack(frames.REPLY, frame.call, message), deadline)

        return self._serve(frame.message, reply)

    def _welcome(self, listener: socket.socket) -> None:
        try:
            if not self._acceptor.accept(listener):
                self._breathe()
        finally:
            self.arm(listener.fileno())

    def _breathe(self) -> None:
        """No descriptor is left for a connection that waits to be accepted, so epoll would tell of it at once again."""
        with contextlib.suppress(threads.ThreadShortage):
            if self._idle == 0:
                self._add_listener()
        threading.Event().wait(_BREATH_S)
