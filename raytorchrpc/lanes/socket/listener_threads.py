"""Starts and counts the listener threads of the socket lane, and makes up for a lack of threads."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from raytorchrpc.lanes.base import Spawn
from raytorchrpc.process import threads

#: Idle threads kept beside the leader. More are started while many methods run at once.
_SPARE_THREADS = 4


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
