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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from raytorchrpc.lanes.base import Spawn
from raytorchrpc.lanes.socket.polling import AnyReadable, Spinner, Timer
from raytorchrpc.process import threads

#: A leader whose method takes longer is replaced. A reply that no caller comes to read is read after this time, or
#: twice as long (seconds).
ATTEND_S = 0.001
#: Callers do not spin for this time after a request was served (seconds).
_SERVING_S = 0.001
#: Pause between attempts to accept while the process has no descriptor left (seconds).
_ACCEPT_PAUSE_S = 0.05
_MOST_EVENTS = 64
#: Idle threads kept beside the leader. More are started while many methods run at once.
_SPARE_THREADS = 4
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


class ListenerThreads(ABC):
    """The threads of one lane's ``Listeners``, which says what they do. Thread-safe."""

    def __init__(self, me: str, give_up: Callable[[], None]) -> None:
        """``me``: the member. ``give_up`` is called if listeners fail without end."""
        self._me, self._give_up = me, give_up
        self._lock = threading.Lock()
        self._idle = 0  # threads that lead or wait to
        self._threads = 0
        self._standing_in = False
        self._spawn: Spawn | None = None
        self._alone = f"{me} reads requests when its methods are done"
        self.closed = False

    # --- what they do ----------------------------------------------------------------------------------------

    @abstractmethod
    def _step(self, me: object, patience_s: float = -1) -> bool:
        """Lead, or wait to lead, until something has happened. Returns False if this thread is to end.

        ``me``: stands for the calling thread. ``patience_s``: longest wait; without a limit if negative.
        """

    @abstractmethod
    def _step_aside(self, me: object) -> None:
        """Have another thread lead, if this one does or was about to."""

    @abstractmethod
    def _restore(self, me: object) -> None:
        """Repair the effects of a step that failed."""

    @abstractmethod
    def _free(self) -> None:
        """Under the lock, after ``close``: the last thread has ended."""

    # --- one thread ------------------------------------------------------------------------------------------

    def start(self, spawn: Spawn) -> None:
        """Start the first thread. ``spawn``: runs work on a thread of the member. Raises ThreadShortage."""
        self._spawn = spawn
        self._add_thread()

    def _listen(self) -> None:
        me = object()

        def step() -> bool:
            try:
                return self._step(me)
            except BaseException:
                self._step_aside(me)  # before the pause that follows
                raise

        def give_up() -> None:
            self._give_up()
            self.retire(1)

        threads.serve(step, f"a listener of {self._me}", restore=lambda: self._restore(me), give_up=give_up)

    def _stays(self) -> bool:
        """Whether this thread, which is not the leader any more, is kept."""
        with self._lock:
            if self._idle <= _SPARE_THREADS or self.closed:
                return True
            self._idle -= 1
            self._threads -= 1
            return False

    # --- how many threads ------------------------------------------------------------------------------------

    def _add_thread(self) -> None:
        number = self._count_thread()
        if not number:
            return
        try:
            threads.start(self._listen, name=f"raytorchrpc-{self._me}-listener-{number}")
        except BaseException:
            self._discount_thread()
            raise

    def _count_thread(self) -> int:
        with self._lock:
            if self.closed:
                return 0
            self._threads += 1
            self._idle += 1
            return self._threads

    def _discount_thread(self) -> None:
        with self._lock:
            self._idle -= 1
        self.retire(1)

    def _ensure_another(self) -> None:
        """Have another thread wait to lead: the calling one is about to do something that may block."""
        if self._idle > 1:
            return
        try:
            self._add_thread()
        except (threads.ThreadShortage, MemoryError) as error:
            threads.report(error, f"{self._me} reads requests when a thread is free")

    def _begin_work(self) -> bool:
        """Under the lock: this thread neither leads nor waits to. Returns whether to call ``_have_stand_in``."""
        self._idle -= 1
        alone = not (self._idle or self._standing_in or self.closed)
        if alone:
            self._standing_in = True
        return alone

    def _have_stand_in(self) -> None:
        """Have a thread listen that was started for other work. Never raises."""
        assert self._spawn is not None
        try:
            self._spawn(self._stand_in)
        except Exception as error:
            self._standing_in = False
            threads.report(error, self._alone)

    def _stand_in(self) -> None:
        """Listen for a moment, on a thread that was started for other work, until a listener can be started."""
        with contextlib.suppress(threads.ThreadShortage, MemoryError):
            if self._idle == 0:
                self._add_thread()
        with self._lock:
            if self._idle > 0 or self.closed:
                self._standing_in = False
                return
            self._threads += 1
            self._idle += 1
        me = object()
        try:
            stays = self._step(me, threads.PAUSE_S)
        except BaseException:
            self._standing_in = False
            self._discount_thread()
            self._restore(me)
            raise
        self._step_aside(me)
        if stays:
            self._discount_thread()
        self._have_stand_in()

    def retire(self, leaving: int) -> None:
        """End so many threads. After ``close``, free the descriptors if none is left."""
        with self._lock:
            self._threads -= leaving
            if self.closed and self._threads == 0:
                self._free()


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
