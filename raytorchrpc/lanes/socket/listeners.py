"""The threads that read the socket lane's connections.

Listeners wait in one epoll set, and the kernel wakes one per event. A listener that finds a request runs its method
itself, after it has made sure that another listener waits: a request costs one wake-up, and a long method delays no
other request.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from raytorchrpc.lanes.base import Spawn
from raytorchrpc.lanes.socket.spin import Timer
from raytorchrpc.process import threads

#: A reply that no caller comes to read is read after this time, or twice as long (seconds).
ATTEND_S = 0.001
#: Idle listeners kept. More are started while many methods run at once.
_SPARE_LISTENERS = 4
#: Pause between attempts to accept while the process has no descriptor left (seconds).
_ACCEPT_PAUSE_S = 0.05
_NOTHING = ((-1, 0),)
_READ = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class Readable(Protocol):
    """A connection, as listeners see it."""

    fd: int
    accepted: bool

    def attend(self) -> bool:
        """Called soon after ``Listeners.watch``. Returns whether to call it again."""

    def rearm(self) -> None:
        """Called after a listener failed: have listeners poll the connection again, if no thread reads it."""


R = TypeVar("R", bound=Readable)


class Listeners(Generic[R]):
    """The listener threads of one lane, and what they poll. Thread-safe."""

    def __init__(
        self, me: str, serve: Callable[[R], None], accept: Callable[[int], bool], give_up: Callable[[], None]
    ) -> None:
        """``serve`` handles a readable connection. ``accept`` handles a readable listening socket; it returns False if
        the process has no descriptor left. ``give_up`` is called if listeners fail without end.
        """
        self._me, self._serve, self._accept, self._give_up = me, serve, accept, give_up
        self.connections: dict[int, R] = {}
        """By descriptor."""
        self._listening: set[int] = set()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._standing_in = False
        self._spawn: Spawn | None = None
        self.closed = False
        self._epoll = select.epoll()
        # Level-triggered: once rung, it wakes every listener.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._watched: list[R] = []
        self._timer = Timer(ATTEND_S)
        self._epoll.register(self._timer.fd, _READ)

    # --- what they poll --------------------------------------------------------------------------------------

    def start(self, spawn: Spawn) -> None:
        """Start the first listener. ``spawn``: runs work on a thread of the member. Raises ThreadShortage."""
        self._spawn = spawn
        self._add_listener()

    def listen_to(self, fd: int) -> None:
        """Poll a listening socket."""
        self._listening.add(fd)
        self._epoll.register(fd, _READ)

    def add(self, connection: R) -> bool:
        """Add a connection; accepted ones are polled from now on. Returns False after ``close``."""
        with self._lock:
            if not self.closed:
                self.connections[connection.fd] = connection
                self._epoll.register(connection.fd, _READ if connection.accepted else 0)
            return not self.closed

    def remove(self, connection: R) -> None:
        """Stop polling a connection."""
        with self._lock:
            self.connections.pop(connection.fd, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(connection.fd)

    def arm(self, fd: int) -> None:
        """Poll this descriptor until it is readable once."""
        try:  # contextlib.suppress would take longer
            self._epoll.modify(fd, _READ)
        except (OSError, ValueError):  # closed meanwhile
            return

    def disarm(self, fd: int) -> None:
        """Do not poll this descriptor: a caller reads it."""
        try:
            self._epoll.modify(fd, 0)
        except (OSError, ValueError):
            return

    def watch(self, connection: R) -> None:
        """Call the connection's ``attend`` soon."""
        with self._lock:
            self._watched.append(connection)
            if len(self._watched) == 1 and not self.closed:
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
            if self.closed:
                return
            self._watched += again
            self._timer.clear()
            self._epoll.modify(self._timer.fd, _READ)
            if self._watched:
                self._timer.set()

    def close(self) -> bool:
        """Wake all listeners so that they end. The last one frees the epoll set. Returns False if closed before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            os.eventfd_write(self._bell, 1)  # under the lock: the last listener to see it closes the bell
        return True

    def after_fork(self) -> None:
        """Close this process's descriptors. The epoll set and its content belong to the parent."""
        self.closed = True
        self._lock = threading.Lock()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            self._epoll.close()
            self._timer.close()
            os.close(bell)

    # --- threads ---------------------------------------------------------------------------------------------

    def _add_listener(self) -> None:
        number = self._count_listener()
        if not number:
            return
        try:
            threads.start(self._listen, name=f"raytorchrpc-{self._me}-listener-{number}")
        except threads.ThreadShortage:
            self._discount_listener()
            raise

    def _count_listener(self) -> int:
        with self._lock:
            if self.closed:
                return 0
            self._threads += 1
            self._idle += 1
            return self._threads

    def _discount_listener(self) -> None:
        with self._lock:
            self._idle -= 1
        self.retire(1)

    def ensure_another(self) -> None:
        """Have another listener wait: the calling one is about to do something that may block."""
        if self._idle > 0:
            return
        try:
            self._add_listener()
        except threads.ThreadShortage as error:
            threads.report(error, f"{self._me} reads requests when a thread is free")
            if not self._standing_in:
                self._have_stand_in()

    def _have_stand_in(self) -> None:
        assert self._spawn is not None
        try:
            self._standing_in = True
            self._spawn(self._stand_in)
        except Exception as error:
            self._standing_in = False
            threads.report(error, f"{self._me} reads requests when its methods are done")

    def _stand_in(self) -> None:
        """Listen for a moment, on a thread that was started for other work, until a listener can be started."""
        with contextlib.suppress(threads.ThreadShortage):
            if self._idle == 0:
                self._add_listener()
        if self._idle > 0 or not self._count_listener():
            self._standing_in = False
            return
        try:
            stays = self._handle_next(threads.PAUSE_S)
        except BaseException:
            self._discount_listener()
            self._standing_in = False
            self._restore()
            raise
        if stays:
            self._discount_listener()
        self._have_stand_in()

    def _listen(self) -> None:
        what = f"a listener of {self._me}"
        threads.serve(self._handle_next, what, restore=self._restore, give_up=self._give_up)

    def _handle_next(self, patience_s: float = -1) -> bool:
        """Wait for one event, without a limit by default, and handle it. Returns False if this listener is to end."""
        if self.closed:
            self.retire(1)
            return False
        try:
            ((fd, _),) = self._epoll.poll(patience_s, 1) or _NOTHING
        except InterruptedError:
            return True
        if fd == -1:
            return True
        if fd == self._bell:
            self.retire(1)
            return False
        with self._lock:
            self._idle -= 1
        try:
            if (connection := self.connections.get(fd)) is not None:
                self._serve(connection)
                del connection
            elif fd == self._timer.fd:
                self._attend()
            elif fd in self._listening:
                self._accept_from(fd)
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

    def _accept_from(self, fd: int) -> None:
        try:
            if not self._accept(fd):  # the connection waits in the backlog, so epoll would report it again at once
                with contextlib.suppress(threads.ThreadShortage):
                    if self._idle == 0:
                        self._add_listener()
                threading.Event().wait(_ACCEPT_PAUSE_S)
        finally:
            self.arm(fd)

    def _restore(self) -> None:
        """After a listener failed, what it was handling may not be polled any more: poll everything."""
        for fd in list(self._listening):
            self.arm(fd)
        for connection in list(self.connections.values()):
            connection.rearm()
        with self._lock:
            if not self.closed:
                self._epoll.modify(self._timer.fd, _READ)
                if self._watched:
                    self._timer.set()

    def retire(self, leaving: int) -> None:
        """End so many listeners. After ``close``, free the descriptors if none is left."""
        with self._lock:
            self._threads -= leaving
            last = self.closed and self._threads == 0 and self._bell >= 0
            if last:
                bell, self._bell = self._bell, -1
        if last:
            self._epoll.close()
            self._timer.close()
            os.close(bell)
