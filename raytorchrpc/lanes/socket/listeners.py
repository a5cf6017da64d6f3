"""The threads that poll the socket lane's connections.

One thread at a time polls: the leader. It reads what has arrived on any connection, and runs the methods of the
requests itself, one after another. While it runs brief methods nobody polls, because a second thread would only compete
for the interpreter lock. Idle threads wait beside it. One of them becomes the leader when a method has run for
``ATTEND_S``, or at once if the methods of late have not been brief. So a request costs one wake-up, and a long method
delays no other request for long.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from raytorchrpc.lanes.socket.listener_threads import ListenerThreads
from raytorchrpc.lanes.socket.spin import Spinner, Timer
from raytorchrpc.process.system_calls import AnyReadable

#: A leader whose method takes longer is replaced. A reply that no caller comes to read is read after this time, or
#: twice as long (seconds).
ATTEND_S = 0.001
#: Callers do not spin for this time after a request was served (seconds).
_SERVING_S = 0.001
#: Pause between attempts to accept while the process has no descriptor left (seconds).
_ACCEPT_PAUSE_S = 0.05
_MOST_EVENTS = 64
_READ = select.EPOLLIN | select.EPOLLRDHUP
_READ_ONCE = _READ | select.EPOLLONESHOT

Task = Callable[[], None]


class Readable(Protocol):
    """A connection, as the leader sees it."""

    fd: int
    accepted: bool

    def attend(self) -> bool:
        """Called soon after ``Listeners.watch``. Returns whether to call it again."""

    def rearm(self) -> None:
        """Called after a listener failed: have the leader poll the connection again, if no thread reads it."""


R = TypeVar("R", bound=Readable)


class Listeners(ListenerThreads, Generic[R]):
    """The listener threads of one lane, and what they poll. Thread-safe."""

    def __init__(
        self,
        me: str,
        read: Callable[[R, deque[Task]], None],
        accept: Callable[[int], bool],
        give_up: Callable[[], None],
    ) -> None:
        """``read`` reads a readable connection and adds the methods to run. ``accept`` handles a readable listening
        socket; it returns False if the process has no descriptor left. ``give_up`` is called if listeners fail without
        end.
        """
        super().__init__(me, give_up)
        self._read, self._accept = read, accept
        self.connections: dict[int, R] = {}
        """By descriptor."""
        self._listening: set[int] = set()
        self._leader: object | None = None
        self._leading_thread = 0
        self._tasks: deque[Task] = deque()
        self._began = 0.0  # when the leader began the method that it runs; 0.0 if it runs none
        self._replacing = False  # the timer runs after which the leader may be replaced
        self._brief = True  # whether the last method was; then a leader keeps leading while it runs one
        self._served = self._polled = 0.0
        self._spinner = Spinner()
        self._epoll, self._bench = select.epoll(), select.epoll()
        self.fd = self._epoll.fileno()
        self._has_events = AnyReadable(self.fd)
        # Level-triggered: once rung, it wakes every thread.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._vacancy = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer, self._replacement = Timer(ATTEND_S), Timer(ATTEND_S)
        self._watched: list[R] = []
        self._epoll.register(self._bell, select.EPOLLIN)
        self._epoll.register(self._timer.fd, select.EPOLLIN)
        self._bench.register(self._bell, select.EPOLLIN)
        for fd in (self._vacancy, self._replacement.fd):  # edge-triggered: each event wakes one thread
            self._bench.register(fd, select.EPOLLIN | select.EPOLLET)

    # --- what they poll --------------------------------------------------------------------------------------

    def listen_to(self, fd: int) -> None:
        """Poll a listening socket."""
        self._listening.add(fd)
        self._epoll.register(fd, _READ_ONCE)

    def add(self, connection: R) -> bool:
        """Add a connection; accepted ones are polled from now on. Returns False after ``close``."""
        with self._lock:
            if not self.closed:
                self._epoll.register(connection.fd, _READ if connection.accepted else 0)
                self.connections[connection.fd] = connection
            return not self.closed

    def remove(self, connection: R) -> None:
        """Stop polling a connection."""
        with self._lock:
            self.connections.pop(connection.fd, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(connection.fd)

    def arm(self, fd: int, events: int = _READ) -> None:
        """Poll this descriptor; with no ``events``, do not: a caller reads it."""
        try:  # contextlib.suppress would take longer
            self._epoll.modify(fd, events)
        except (OSError, ValueError):  # closed meanwhile
            return

    def watch(self, connection: R) -> None:
        """Call the connection's ``attend`` soon."""
        with self._lock:
            if not self._watched and not self.closed:
                self._timer.set()
            self._watched.append(connection)

    def _attend(self) -> None:
        with self._lock:
            watched, self._watched = self._watched, []
            if not self.closed:
                self._timer.clear()
        again = [connection for connection in watched if connection.attend()]  # after a failure see _restore
        with self._lock:
            self._watched += again
            if self._watched and not self.closed:
                self._timer.set()

    @property
    def busy(self) -> bool:
        """Whether another thread serves requests, is about to, or did a moment ago. A thread that spins would compete
        with it for the interpreter lock.
        """
        if self._leading_thread == threading.get_ident():
            return False
        return self._began != 0.0 or time.monotonic() - self._served < _SERVING_S or self._has_events()

    def close(self) -> bool:
        """Wake all threads so that they end. The last one frees the descriptors. Returns False if closed before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            os.eventfd_write(self._bell, 1)  # under the lock: the last thread to see it closes the bell
        return True

    def after_fork(self) -> None:
        """Close this process's descriptors. The epoll sets and their content belong to the parent."""
        self.closed = True
        self._lock = threading.Lock()
        self._free()

    def _free(self) -> None:
        bell, self._bell = self._bell, -1
        if bell >= 0:
            for part in (self._epoll, self._bench, self._timer, self._replacement):
                part.close()
            os.close(self._vacancy)
            os.close(bell)

    # --- one thread ------------------------------------------------------------------------------------------

    def _step(self, me: object, patience_s: float = -1) -> bool:
        polled = self._polled
        while not self.closed:
            with self._lock:
                if self._leader is None:
                    self._lead(me)
            if self._leader is me:
                return self._serve(me, patience_s)
            self._wait_to_lead(me, patience_s)
            if patience_s >= 0 or self._polled != polled:  # else another leader has failed, which is no success
                return True
        self.retire(1)
        return False

    def _serve(self, me: object, patience_s: float) -> bool:
        """As the leader, poll and run methods. Returns False if this thread is to end."""
        if not self._tasks or self._is_late():
            self._poll(0 if self._tasks else patience_s)
        while self._leader is me and self._tasks:
            self._run_next(me)
            if self._is_late():
                break
        return self._leader is me or self._stays()

    def _is_late(self) -> bool:
        """Whether methods, however brief, have kept the leader from polling for so long that it polls next."""
        return time.monotonic() - self._polled >= ATTEND_S

    def _lead(self, me: object) -> None:
        """Under the lock."""
        self._leader, self._leading_thread, self._began = me, threading.get_ident(), 0.0

    def _wait_to_lead(self, me: object, patience_s: float) -> None:
        with contextlib.suppress(InterruptedError):
            if any(fd == self._replacement.fd for fd, _ in self._bench.poll(patience_s, 1)):
                self._replace(me)

    def _replace(self, me: object) -> None:
        """Become the leader if the present one has been running a method for too long."""
        with self._lock:
            if self.closed:
                return
            self._replacement.clear()
            began = self._began
            late = began and time.monotonic() - began >= ATTEND_S
            self._replacing = bool(began) and not late
            if self._replacing:
                self._replacement.set()
            if late:
                self._lead(me)
                self._brief = False

    def _poll(self, patience_s: float) -> None:
        events: list[tuple[int, int]] = []

        def look() -> bool:
            events[:] = self._epoll.poll(0, _MOST_EVENTS)
            return bool(events)

        if patience_s < 0 and self._spinner.should_spin():
            self._spinner.spin(look)
        if not events:
            began = time.perf_counter()
            try:
                events = self._epoll.poll(patience_s, _MOST_EVENTS)
            except InterruptedError:
                return
            self._spinner.slept(time.perf_counter() - began)
        for fd, _ in events:
            if (connection := self.connections.get(fd)) is not None:
                self._read(connection, self._tasks)
            elif fd == self._timer.fd:
                self._attend()
            elif fd in self._listening:
                self._tasks.append(lambda fd=fd: self._accept_from(fd))  # type: ignore[misc]
        self._polled = time.monotonic()

    def _run_next(self, me: object) -> None:
        """As the leader, run the next method, during which another thread may become the leader."""
        self._ensure_another()
        began = time.monotonic()
        with self._lock:
            keeps = self._brief
            if keeps:
                if not self._replacing:
                    self._replacement.set()
                    self._replacing = True
                self._began = began
            else:
                self._vacate()
            alone = self._begin_work()
            task = self._tasks.popleft()  # last, because a task that is taken must run: its method may be admitted
        if alone:
            self._have_stand_in()
        try:
            task()
        finally:
            with self._lock:
                self._idle += 1
                if self._leader is me:
                    self._began = 0.0
            self._served = time.monotonic()
            if self._served - began < ATTEND_S:
                self._brief = True
            elif not keeps:  # else _replace has noted it, unless the method stepped down
                self._brief = False

    def _vacate(self) -> None:
        """Under the lock: have an idle thread lead instead of this one."""
        self._leader, self._began = None, 0.0
        if not self.closed:
            os.eventfd_write(self._vacancy, 1)

    def step_down(self) -> None:
        """The calling thread is about to wait for something. If it is the leader, another one leads."""
        if self._leading_thread == threading.get_ident():
            with self._lock:
                if self._began and self._leading_thread == threading.get_ident():
                    self._vacate()

    def _step_aside(self, me: object) -> None:
        with self._lock:
            if self._leader is me or self._leader is None:  # or this thread has woken to lead, and will not
                self._vacate()

    def _accept_from(self, fd: int) -> None:
        try:
            if not self._accept(fd):  # the connection waits in the backlog, so epoll would report it again at once
                threading.Event().wait(_ACCEPT_PAUSE_S)
        finally:
            self.arm(fd, _READ_ONCE)

    def _restore(self, me: object) -> None:
        """After this thread failed, what it was handling may not be polled any more: poll everything."""
        self._step_aside(me)
        for fd in list(self._listening):
            self.arm(fd, _READ_ONCE)
        for connection in list(self.connections.values()):
            connection.rearm()
        with self._lock:
            if not self.closed:
                self._replacement.set()  # it may have been about to replace the leader
                self._replacing = True
                if self._watched:
                    self._timer.set()
