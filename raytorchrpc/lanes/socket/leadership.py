"""Which thread of the socket lane leads: the one that polls the connections, and runs what they bring.

A leader runs brief methods itself, and nobody polls meanwhile. It ceases to lead in two ways: it steps down, before a
method that is not expected to be brief and before a wait, or a follower takes over, because its method has run for
``BRIEF_S``.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from threading import get_ident

from raytorchrpc.lanes.common import polling
from raytorchrpc.lanes.common.polling import Timer
from raytorchrpc.process.locks import Lock

#: A leader whose method takes longer is replaced (seconds).
BRIEF_S = 0.001


class Listener:
    """One thread of a selector. It alone writes this."""

    __slots__ = ("began", "ident", "keeps", "runs")

    def __init__(self) -> None:
        self.ident = 0
        """Of the thread, once it has led."""
        self.runs = self.keeps = False
        """``runs``: a method, or is about to. ``keeps``: it began it as the leader, and went on to lead."""
        self.began = 0.0
        """When it began its last method."""


class Leadership:
    """One per selector. ``lock``, the selector's, is held to write; a single field is read without."""

    def __init__(self, lock: Lock, end: int) -> None:
        """``end``: a descriptor that wakes followers for good."""
        self._lock = lock
        self.leader: Listener | None = None
        """Written by the thread that begins to lead, and by the leader as it steps down."""
        self.began = 0.0
        """When the leader began the method that it runs while it leads; 0.0 if it runs none. Written by the leader, and
        reset by its successor."""
        self.served = 0.0
        """When a method last ended. Written by the thread that ran it."""
        self._brief = True
        """Whether the last method was, and so the next one is expected to be. Written by the thread that ran it, or by
        a follower that takes over before it ends."""
        self._vacancy = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._overtime = Timer(BRIEF_S)
        """Goes off when the leader's method has perhaps run for too long. Set by the leader as it begins one."""
        self._followers = select.epoll()
        self._followers.register(end, select.EPOLLIN)
        for fd in (self._vacancy, self._overtime.fd):  # edge-triggered: each event wakes one follower
            self._followers.register(fd, select.EPOLLIN | select.EPOLLET)

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread leads."""
        leader = self.leader
        return leader is not None and leader.ident == get_ident()

    def take(self, me: Listener) -> None:
        """Lead if nobody does."""
        with self._lock:
            if self.leader is None:
                self._become(me)

    def _become(self, me: Listener) -> None:
        me.ident = get_ident()
        self.leader, self.began = me, 0.0

    def begin(self, me: Listener) -> None:
        """Under the lock, by the leader: begin a method, as the leader or not."""
        me.runs, me.began, me.keeps = True, time.monotonic(), self._brief
        if not me.keeps:
            self._vacate()
            return
        self.began = me.began
        if not self._overtime.is_set:
            self._overtime.set()

    def end(self, me: Listener) -> None:
        """Under the lock, by the thread that ran a method."""
        me.runs, self.served = False, time.monotonic()
        if self.leader is me:
            self.began = 0.0
        if self.served - me.began < BRIEF_S:
            self._brief = True
        elif not me.keeps:  # else who took over has noted it, unless the method stepped down
            self._brief = False

    def step_down(self) -> None:
        """The calling thread is about to wait for something. If it leads, another one is to lead."""
        if self.is_mine:
            with self._lock:
                if self.began and self.is_mine:  # nobody has taken over meanwhile
                    self._vacate()

    def _vacate(self) -> None:
        self.leader, self.began = None, 0.0
        polling.signal(self._vacancy)

    def follow(self, me: Listener) -> None:
        """Wait until there is no leader, or take over from the present one."""
        with contextlib.suppress(InterruptedError):
            if any(fd == self._overtime.fd for fd, _ in self._followers.poll(-1, 1)):
                with self._lock:
                    self._take_over(me)

    def _take_over(self, me: Listener) -> None:
        self._overtime.clear()
        began, now = self.began, time.monotonic()
        if began and now - began >= BRIEF_S:
            self._become(me)
            self._brief = False
        elif began or now - self.served < 2 * BRIEF_S:  # for the methods to come too, which need not set it then
            self._overtime.set(BRIEF_S if began else 2 * BRIEF_S)

    def after_fork(self, lock: Lock) -> None:
        """None of the threads is in the child."""
        self._lock, self.leader = lock, None

    def close(self) -> None:
        """Free the descriptors, once no thread can use them."""
        self._followers.close()
        self._overtime.close()
        os.close(self._vacancy)
