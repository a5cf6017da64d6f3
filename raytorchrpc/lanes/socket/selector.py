"""The threads of the socket lanes of a process: a leader, which polls the connections, and its followers.

The leader reads what has arrived on any connection, and runs the methods of the requests itself, one after another.
While it runs brief methods nobody polls, because a second thread would only compete for the interpreter lock. A
follower takes over when a method has run for ``BRIEF_S``, or at once if the methods of late have not been brief; see
``leadership``. So a request costs one wake-up, and a long method delays no other request for long.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from raytorchrpc.lanes.common.polling import AnyReadable, Timer
from raytorchrpc.lanes.socket.leadership import BRIEF_S, Leadership, Listener
from raytorchrpc.process import threads
from raytorchrpc.process.locks import Lock

#: A reply that no caller comes to read is read after this time, or twice as long (seconds).
_UNREAD_S = BRIEF_S
#: Callers do not spin for this time after a request was served (seconds).
_SERVING_S = 0.001
#: Pause between attempts to accept while the process has no descriptor left (seconds).
_ACCEPT_PAUSE_S = 0.05
#: Followers kept. More are started while many methods run at once.
_FOLLOWERS = 4
_CORES = len(os.sched_getaffinity(0))
#: Longest spin (seconds). The reply to an empty call arrives within 50 microseconds, and a sleep with its wake-up costs
#: 25 on either side. With many cores a longer spin disturbs no other thread and keeps the core at its full clock: it
#: lasts for a call with a CUDA tensor.
SPIN_S = 100e-6 if _CORES < 8 else 400e-6
#: Longest time without a spin after one that was in vain (seconds).
_REST_S = 0.02
#: A spin that ends so late while this process computed has given its core to a busy thread of it, and the next spin
#: would too. There is none for ``_LONG_REST_S``: a thread that sleeps gets a core when its data arrives (seconds).
_LATE_S, _LONG_REST_S = 0.002, 0.5
_MOST_EVENTS = 64
_READ = select.EPOLLIN | select.EPOLLRDHUP
_READ_ONCE = _READ | select.EPOLLONESHOT

Task = Callable[[], None]


#: A connection of the lane: a ``lane.Connection``, in the module above this one.
Connection = Any


class Spinner:
    """Decides whether to spin, by whether it has helped of late. For one thread at a time.

    After each spin without success it waits twice as long before it spins again, up to ``_REST_S``, so that a
    connection that is seldom used, or whose methods take long, costs little. A sleep that a spin would have spared ends
    that. It never spins on a single core, which the peer needs.
    """

    __slots__ = ("_failed", "_late", "_rests_until")

    def __init__(self) -> None:
        self._failed, self._late = 0, False
        self._rests_until = 0.0

    def should_spin(self) -> bool:
        """Whether to call ``spin`` this time."""
        return _CORES > 1 and (not self._failed or time.perf_counter() >= self._rests_until)

    def spin(self, ready: Callable[[], bool]) -> None:
        """Call ``ready`` until it returns True, for ``SPIN_S`` at most, yielding the core to other threads."""
        computed_s, began = time.process_time(), time.perf_counter()
        until = began + SPIN_S
        while (now := time.perf_counter()) < until:
            if ready():
                self._failed, self._late = 0, False
                return
            os.sched_yield()
        self._late = now - until > _LATE_S and time.process_time() - computed_s > 0.8 * (now - began)
        self._rests_until = now + (_LONG_REST_S if self._late else min(SPIN_S * 2 ** min(self._failed, 10), _REST_S))
        self._failed += 1

    def slept(self, seconds: float) -> None:
        """The thread has slept for so long instead."""
        if seconds < SPIN_S and not self._late:
            self._failed = 0


class Selector:
    """Polls the connections of lanes, and runs the methods of the requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        """Held to write the fields down to ``_tasks``. A single one is read without."""
        self.closed = False
        """Written once, when the last lane leaves."""
        self.connections: dict[int, Connection] = {}
        """By descriptor. Written by who adds or ends one."""
        self._unread: list[Connection] = []
        """See ``enable_later``. Callers add to it, and the leader empties it."""
        self._threads = self._idle = 0
        """``_idle``: of these, the leader and its followers, unless they run methods. Each thread counts itself."""
        self._tasks: deque[Task] = deque()
        """The methods to run. The leader adds what it reads, without the lock; the leader, or one that ends, takes."""
        self._polled = 0.0
        """When the leader last polled. It alone uses this, and the spinner."""
        self._spinner = Spinner()
        self._lanes = set[Any]()
        """Written under the lock, as is the next."""
        self._listening: dict[int, Any] = {}
        """By descriptor that is no connection: its lane."""
        # The rest is fixed before the threads start.
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # level-triggered: it wakes every thread
        self._enabling = Timer(_UNREAD_S)
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        self._epoll.register(self._end, select.EPOLLIN)
        self._epoll.register(self._enabling.fd, select.EPOLLIN)
        self._has_events = AnyReadable(self.fd)
        self._lead = Leadership(self._lock, self._end)
        self.step_down = self._lead.step_down

    # --- what is polled --------------------------------------------------------------------------------------

    def enter(self, lane: Any) -> bool:
        """Serve a lane. Returns False if the last one has left."""
        with self._lock:
            if not self.closed:
                self._lanes.add(lane)
            return not self.closed

    def listen_to(self, lane: Any, fd: int) -> None:
        """Have a lane's ``readable`` called when this descriptor is that."""
        with self._lock:
            self._listening[fd] = lane
            self._epoll.register(fd, _READ_ONCE)

    def leave(self, lane: Any, reason: str) -> None:
        """Serve a lane no more, and end its connections. After the last one, all threads end. Idempotent."""
        with self._lock:
            for fd in [fd for fd, whose in self._listening.items() if whose is lane]:
                del self._listening[fd]
                self._epoll.unregister(fd)
            self._lanes.discard(lane)
            if not self._lanes and not self.closed:
                self.closed = True
                os.eventfd_write(self._end, 1)  # under the lock: the last thread to see it closes it
        for connection in self.of(lane):
            connection.end(reason)
        self.retire(0)  # frees the descriptors if no thread is left to do it

    def of(self, lane: Any) -> list[Connection]:
        """The connections of a lane."""
        return [connection for connection in [*self.connections.values()] if connection.lane is lane]

    def add(self, connection: Connection, *, polled: bool = True) -> bool:
        """Add a connection, which is polled from now on, or once it is enabled. Returns False if its lane has left."""
        with self._lock:
            if is_served := connection.lane in self._lanes:
                self._epoll.register(connection.fd, _READ if polled else 0)
                self.connections[connection.fd] = connection
            return is_served

    def remove(self, connection: Connection) -> None:
        with self._lock:
            self.connections.pop(connection.fd, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(connection.fd)

    def enable(self, fd: int, events: int = _READ) -> None:
        """Poll this descriptor; with no ``events``, do not: a caller reads it."""
        try:  # contextlib.suppress would take longer
            self._epoll.modify(fd, events)
        except (OSError, ValueError):  # closed meanwhile
            return

    def enable_later(self, connection: Connection) -> None:
        """Call ``enable_if_unread`` soon: a caller is expected to read the connection before."""
        with self._lock:
            if not self._unread and not self.closed:
                self._enabling.set()
            self._unread.append(connection)

    def _enable_unread(self) -> None:
        with self._lock:
            unread, self._unread = self._unread, []
            if not self.closed:
                self._enabling.clear()
        again = [connection for connection in unread if connection.enable_if_unread()]
        with self._lock:
            self._unread += again
            if self._unread and not self.closed:
                self._enabling.set()

    @property
    def busy(self) -> bool:
        """Whether another thread serves requests, is about to, or did a moment ago. A thread that spins would compete
        with it for the interpreter lock.
        """
        if self._lead.is_mine:
            return False
        lead = self._lead
        return lead.began != 0.0 or time.monotonic() - lead.served < _SERVING_S or self._has_events()

    # --- begin and end ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. Raises ThreadShortage."""
        self._add_thread()
        self._add_thread()

    def retire(self, leaving: int) -> None:
        """End so many threads. After the last lane, free the descriptors if none is left."""
        with self._lock:
            self._threads -= leaving
            if self.closed and self._threads == 0:
                self._free()

    def after_fork(self) -> None:
        """Close this process's descriptors. The epoll sets and their content belong to the parent."""
        self.closed = True
        self._lock = Lock()
        self._lead.after_fork(self._lock)
        self._free()

    def _free(self) -> None:
        end, self._end = self._end, -1
        if end >= 0:
            for part in (self._epoll, self._enabling, self._lead):
                part.close()
            os.close(end)

    # --- how many threads ------------------------------------------------------------------------------------

    def _add_thread(self) -> None:
        with self._lock:
            if self.closed:
                return
            self._threads += 1
            self._idle += 1
            number = self._threads
        step, name = partial(self._step, Listener()), f"raytorchrpc-listener-{number}"
        try:
            threads.start(threads.serve, step, "a listener", name=name)
        except threads.ThreadShortage:
            self.retire(1)
            raise

    # --- one thread ------------------------------------------------------------------------------------------

    def _step(self, me: Listener) -> bool | Task:
        """Lead, or follow, until something has happened. Returns the next task for this thread to run, if any; False
        if it is to end.
        """
        if me.runs:
            with self._lock:
                self._idle += 1
                self._lead.end(me)
            if self._lead.leader is not me and self._is_surplus():
                return False
        while not self.closed:
            if self._lead.leader is None:
                self._lead.take(me)
            if self._lead.leader is me:
                if not self._tasks or time.monotonic() - self._polled >= BRIEF_S:  # methods have kept it from polling
                    self._poll(wait=not self._tasks)
                return self._next_task(me) if self._tasks else True
            self._lead.follow(me)
        with self._lock:
            if self._tasks:  # their methods may be admitted, and would keep others out for ever
                return self._tasks.popleft()
        self.retire(1)
        return False

    def _is_surplus(self) -> bool:
        with self._lock:
            if self._idle <= _FOLLOWERS or self.closed:
                return False
            self._idle -= 1
            self._threads -= 1
            return True

    def _poll(self, *, wait: bool) -> None:
        events: list[tuple[int, int]] = []

        def poll_now() -> bool:
            events[:] = self._epoll.poll(0, _MOST_EVENTS)
            return bool(events)

        if wait and self._spinner.should_spin():
            self._spinner.spin(poll_now)
        if not events:
            began = time.perf_counter()
            try:
                events = self._epoll.poll(-1 if wait else 0, _MOST_EVENTS)
            except InterruptedError:
                return
            self._spinner.slept(time.perf_counter() - began)
        for fd, _ in events:
            if (connection := self.connections.get(fd)) is not None:
                connection.lane.read(connection, self._tasks)
            elif fd == self._enabling.fd:
                self._enable_unread()
            elif (lane := self._listening.get(fd)) is not None:
                self._tasks.append(partial(self._accept, lane, fd))
        self._polled = time.monotonic()

    def _next_task(self, me: Listener) -> bool | Task:
        """As the leader, take the next task. While it runs another thread may become the leader."""
        if self._idle <= 1:  # this thread is about to do what may block
            self._add_thread()
        with self._lock:
            if not self._tasks:  # another thread has taken it, as the selector was closed
                return True
            self._lead.begin(me)
            self._idle -= 1
            return self._tasks.popleft()

    def _accept(self, lane: Any, fd: int) -> None:
        try:
            if not lane.readable(fd):  # the connection waits in the backlog, so epoll would report it again at once
                threading.Event().wait(_ACCEPT_PAUSE_S)
        finally:
            with self._lock:
                if self._listening.get(fd) is lane:  # else the number may be another file's
                    self.enable(fd, _READ_ONCE)


_selector: Selector | None = None
"""That of this process, from the first of its lanes to the last."""
_entering = Lock()


def enter(lane: Any) -> Selector:
    """Have this process's selector serve a lane, until it leaves. Raises ThreadShortage."""
    global _selector
    with _entering:
        if _selector is None or not _selector.enter(lane):
            made = Selector()
            made.enter(lane)
            try:
                made.start()
            except BaseException:
                made.leave(lane, "no thread can read it")
                raise
            _selector = made
        return _selector
