"""Gates that keep an actor's own concurrency for its methods, and let chains of calls come back to it.

The gate of a sync actor is a monitor: it admits one method at a time, and a method that waits in a blocking operation
of the package lends its admission until it goes on. Other gates admit as many methods as Ray would, and a method keeps
its admission while it waits. Only calls of its own chain may run inside it then, one at a time: each such admission has
a monitor of its own. A call carries the tokens of all admissions that its chain holds.

Calls come to a gate in two ways. A direct call is a job: it is queued, and a thread or event loop runs it once it is
admitted. A call through Ray has its thread or coroutine already, which queues a waiter and blocks or awaits it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from functools import partial
from typing import Any, NamedTuple

from raytorchrpc.calls.scope import GIVEN_UP, HELD, LENT, AdmissionState, Token, new_token
from raytorchrpc.errors import RayTorchRpcError, RpcTimeout
from raytorchrpc.process.completion import Completion
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import Deadlines

logger = logging.getLogger(__name__)

#: Methods that may have lent their admission to a monitor at a time: each holds a thread. From then on it admits only
#: methods that have begun, and calls of chains that come back to the actor.
MOST_LENT = 256
#: The same with the calls of chains. More are almost certainly an infinite recursion.
MOST_NESTED = 2000
#: A call that has waited for so long because one method runs is logged (seconds).
SLOW_S = 1.0
#: A call that is still queued this share of its time before its deadline is refused, so that its caller learns why;
#: at least and at most so many seconds before.
_EARLY, _LEAST_EARLY_S, _MOST_EARLY_S = 0.02, 0.01, 0.25


#: A direct call that waits for an admission: a ``served_call.ServedCall``, in a module above this one.
Job = Any


class _Waiter(Completion):
    """What a thread or coroutine queues in place of a job. Complete once it has the admission."""

    __slots__ = ("admission", "deadline", "label", "path")
    admission: Admission

    def __init__(self, label: str, path: tuple[Token, ...] = ()) -> None:
        super().__init__()
        self.label, self.path, self.deadline = label, path, None

    def check_wait(self) -> None:
        """An admission that was lent comes back, whatever was interrupted: without it nothing can go on."""

    def admit(self, admission: Admission) -> bool:
        self.admission = admission
        self.complete()
        return False  # a thread or coroutine waits for it: it needs no other


class _Queued(NamedTuple):
    """A job, or a waiter, in a gate's queue."""

    job: Any
    since: float
    back: Admission | None = None
    """The admission that a waiter has lent and wants back, if it is not a new one."""

    @property
    def refused_at(self) -> float:
        """When it is refused (``time.monotonic``)."""
        deadline = self.job.deadline
        if deadline is None:
            return math.inf
        return float(deadline - min(max(_EARLY * (deadline - self.since), _LEAST_EARLY_S), _MOST_EARLY_S))


class Admission:
    """Admission to a gate, of one method. It may be lent and regained, any number of times, before it is given up."""

    __slots__ = ("direct", "gate", "label", "monitor", "owner", "since", "state", "token")

    def __init__(self, gate: Gate, token: Token, label: str, direct: bool) -> None:
        self.gate, self.token, self.label, self.direct = gate, token, label, direct
        self.owner: int | None = None
        """Ident of the thread the method runs on; None on an event loop."""
        self.state: AdmissionState = HELD
        self.since = time.monotonic()
        """When its method began, or went on."""
        self.monitor: Gate | None = gate if gate.lends else None
        """In which its method runs; made when it is first needed."""

    def __repr__(self) -> str:
        return f"<admission of {self.label}: {self.state.value}>"

    def lend(self) -> None:
        """Let others run in the monitor until ``regain``. On the thread that owns it."""
        monitor = self.monitor
        if monitor is None:
            with self.gate.lock:
                monitor = self.gate.monitor_of(self)
        if (following := monitor.pass_on(self, lends=True)) is not None:
            following.spawn()

    def regain(self) -> None:
        """Block until it is this method's turn again."""
        monitor = self.monitor
        assert monitor is not None
        try:
            with monitor.lock:
                if not monitor._running:
                    monitor._give_back(self)
            if self.state is not HELD:
                monitor._await(_Waiter(self.label), back=self)
        finally:
            self.owner = threading.get_ident()

    def leave(self) -> None:
        """Give it up; the next in the queue starts on a thread of its own."""
        if (following := self.gate.pass_on(self)) is not None:
            following.spawn()


class Gate:
    """Admits ``limit`` methods at a time, first come, first served. Thread-safe.

    ``lends``: it is a monitor. A method that waits does not count, and ``token`` is that of all its admissions.

    ``named``: the name of its concurrency group, unless that is the default one. Ray does not report the group's width,
    so it may be above ``limit``, and calls that Ray has admitted may wait for each other. They wait here only for
    direct calls, and enter beyond the limit where none runs; direct calls wait for a place below the limit.
    """

    _review_at = math.inf
    """When ``review`` is due (``time.monotonic``)."""

    def __init__(
        self, limit: int, *, named: str = "", lends: bool = False, token: Token = "", lock: Any = None
    ) -> None:
        self.lock = Lock() if lock is None else lock
        self.lends = lends
        self._limit, self._named, self._token = limit, named, token
        self._is_wider = False
        """Whether Ray was seen to run more methods of the named group than ``limit``."""
        # Admissions that are held, those of them that direct calls hold, and those that are lent. While this is locked
        # they agree with the states of the admissions, and nothing is queued that may be admitted.
        self._running = self._direct = self._lent = 0
        self._admitted: dict[Token, Admission] = {}  # not in a monitor, where calls of chains queue like others
        self._queue: deque[_Queued] = deque()
        self._latest: Admission | None = None
        self._logged: set[tuple[str, str]] = set()

    # --- entering ----------------------------------------------------------------------------------------------------

    def request(self, job: Job) -> bool:
        """Admit the job now, or queue it until an admission is free. Returns whether a thread has to run it now.

        Raises RayTorchRpcError if its chain of calls has come back too often.
        """
        path = job.path
        with self.lock:
            outer = self.held(path) if self._admitted else None
            if outer is None or outer.owner is not None:
                gate = self if outer is None else self.monitor_of(outer)
                if gate._lent > MOST_NESTED and gate._token in path:
                    raise RayTorchRpcError(
                        f"{job.label} was not called: its chain of calls has come back to that actor {MOST_NESTED} "
                        f"times already, which is the limit; end the recursion earlier, or make it a loop"
                    )
                if gate._running >= gate._limit or (gate._lent >= MOST_LENT and gate._token not in path):
                    gate._queue.append(_Queued(job, time.monotonic()))
                    return False
                admission = gate._admit(job.label, direct=True)
        runs: bool
        if outer is not None and outer.owner is None:
            # Its chain awaits it on an event loop, which takes care that only one of them runs at an instant.
            runs = job.admit(outer, inside=True)
            return runs
        try:
            runs = job.admit(admission)
        except BaseException:
            admission.leave()
            raise
        return runs

    def enter(self, label: str = "a method", path: tuple[Token, ...] = ()) -> Admission:
        """Block this thread until admitted, as Ray's own queue would. ``path``: of the method's scope."""
        gate = self
        if path:
            with self.lock:
                if (outer := self.held(path)) is not None:
                    gate = self.monitor_of(outer)
        admission = gate.enter_now(label, path)
        if admission is None:
            admission = gate._await(_Waiter(label, path))
        admission.owner = threading.get_ident()
        return admission

    def enter_now(self, label: str = "a method", path: tuple[Token, ...] = ()) -> Admission | None:
        """An admission if one is free; never blocks."""
        with self.lock:
            if not self._is_free(path, direct=False):
                return None
            admission = self._admit(label, direct=False)
            is_news, running = self._running > self._limit and not self._is_wider, self._running
            self._is_wider |= is_news
        if is_news:
            logger.warning(
                "Ray runs %d methods of concurrency group %r at a time here, and %d is declared: direct calls of the "
                "group wait until fewer run. Declare its width at one of its methods: "
                "@raytorchrpc.method(max_concurrency=...)",
                running,
                self._named,
                self._limit,
            )
        return admission

    async def enter_on_loop(self, label: str = "a method") -> Admission:
        """As ``enter``, from a coroutine."""
        admission = self.enter_now(label)
        if admission is not None:
            return admission
        loop, waiter, admitted = asyncio.get_running_loop(), _Waiter(label), asyncio.Event()
        waiter.add_done_callback(lambda: loop.call_soon_threadsafe(admitted.set))
        self._queue_up(waiter)
        try:
            await admitted.wait()
        except asyncio.CancelledError:
            if not self.withdraw(waiter):  # it has its admission, or is about to
                waiter.add_done_callback(lambda: waiter.admission.leave())
            raise
        return waiter.admission

    def _await(self, waiter: _Waiter, back: Admission | None = None) -> Admission:
        """Block until the waiter is admitted. An interrupt is raised afterwards, so that no admission is lost."""
        interrupt = None
        self._queue_up(waiter, back)
        while not waiter.done:
            try:
                if not waiter.wait(SLOW_S):
                    self.review()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            if back is None:
                waiter.admission.leave()
            raise interrupt
        return waiter.admission

    def _queue_up(self, waiter: _Waiter, back: Admission | None = None) -> None:
        with self.lock:
            self._queue.append(_Queued(waiter, time.monotonic(), back))
            ready = self._admit_next()
        _hand_over(ready)  # no job that needs a thread: those that may be admitted are not in the queue

    # --- leaving -----------------------------------------------------------------------------------------------------

    def pass_on(self, admission: Admission, lends: bool = False) -> Job | None:
        """Give the admission up, or lend it; returns the next in the queue for this thread to run, if it needs one.

        Calls of its chain that have not begun when it is given up move to the queue.
        """
        state = LENT if lends else GIVEN_UP
        with self.lock:
            # It is lent still if a signal handler's exception has ended ``lend`` or ``regain``.
            lent_to = admission.monitor if admission.state is LENT else None
            # No call and no jump in between: a signal handler finds all of this done, or nothing.
            self._running -= lent_to is not self
            self._lent += lends - (lent_to is self)
            admission.state = state
            if not lends:
                self._direct -= admission.direct
                self._admitted.pop(admission.token, None)
                if admission.monitor not in (None, self):
                    self._close(admission.monitor, lent_to is not None)
            if not self._queue:
                return None
            ready = self._admit_next()
        return _hand_over(ready)

    def _close(self, monitor: Any, was_lent: bool) -> None:
        """Under the lock: the method whose admission this was the monitor of is over. ``was_lent``: to the monitor.

        Methods of its chain that have begun and outlive it go on.
        """
        begun: deque[_Queued] = deque()
        for queued in monitor._queue:
            (self._queue if queued.back is None else begun).append(queued)
        monitor._queue, monitor._running = begun, monitor._running - (not was_lent)
        monitor._lent -= was_lent
        _hand_over(monitor._admit_next())  # a waiter alone: it needs no thread

    # --- under the lock ----------------------------------------------------------------------------------------------

    def _is_free(self, path: tuple[Token, ...], direct: bool) -> bool:
        """Whether a method may be admitted now. ``path``: of its chain of calls."""
        if self._running >= self._limit:
            return bool(self._named) and not direct and not self._direct
        return self._lent < MOST_LENT or self._token in path

    def _admit_next(self) -> list[tuple[Job, Admission]]:
        """Take out of the queue what may be admitted now, in order, with its admission: one at most, unless the end of
        a direct call in a named group lets in all those that Ray has admitted.
        """
        ready: list[tuple[Job, Admission]] = []
        place = 0
        while place < len(self._queue) and (self._running < self._limit or (self._named and not self._direct)):
            job, _, back = self._queue[place]
            if back is not None and back.state is not LENT:  # its method ended while it began to queue
                del self._queue[place]
                continue
            direct = not isinstance(job, _Waiter)
            if back is None and not self._is_free(job.path, direct):
                place += 1
                continue
            del self._queue[place]
            if back is None:
                ready.append((job, self._admit(job.label, direct=direct)))
            else:
                self._give_back(back)
                ready.append((job, back))
        return ready

    def _give_back(self, admission: Admission) -> None:
        self._lent -= 1
        self._running += 1
        admission.state = HELD
        self._latest, admission.since = admission, time.monotonic()

    def _admit(self, label: str, *, direct: bool) -> Admission:
        admission = self._latest = Admission(self, self._token if self.lends else new_token(), label, direct)
        self._running += 1
        self._direct += direct
        if not self.lends:
            self._admitted[admission.token] = admission
        return admission

    def held(self, path: tuple[Token, ...]) -> Admission | None:
        """The admission that a chain of calls holds, if it has come back; None in a monitor, where it queues."""
        for token in reversed(path):
            if (admission := self._admitted.get(token)) is not None:
                return admission
        return None

    def monitor_of(self, admission: Admission) -> Gate:
        """The monitor in which the admission's method runs."""
        if admission.monitor is None:
            monitor = Gate(1, lends=True, token=admission.token, lock=self.lock)
            monitor._running, monitor._latest = 1, admission
            if admission.monitor is None:  # else a signal handler has been here
                admission.monitor = monitor
        return admission.monitor

    def _queues(self) -> list[deque[_Queued]]:
        monitors = (admission.monitor for admission in self._admitted.values())
        return [self._queue, *(monitor._queue for monitor in monitors if monitor is not None)]

    # --- jobs that wait ----------------------------------------------------------------------------------------------

    def withdraw(self, job: Job) -> bool:
        """Remove a job that waits for an admission; False if there is none."""
        with self.lock:
            for queue in self._queues():
                for queued in queue:
                    if queued.job is job:
                        queue.remove(queued)
                        return True
        return False

    def watch(self, job: Job, deadlines: Deadlines) -> None:
        """Review the jobs that wait when that is due for this one, which waits from now on, and as long as any wait."""
        now, deadline = time.monotonic(), job.deadline
        if self._review_at < now - SLOW_S:  # a group that has ended meanwhile was to do it
            self._review_at = math.inf
        if self._review_at > now + SLOW_S or (deadline is not None and self._review_at > deadline - _MOST_EARLY_S):
            self._review_by(min(_Queued(job, now).refused_at, now + SLOW_S), deadlines)

    def _review_by(self, due: float, deadlines: Deadlines) -> None:
        if due < self._review_at:
            self._review_at = due
            deadlines.at(due, partial(self._review_again, deadlines))

    def _review_again(self, deadlines: Deadlines) -> None:
        self._review_at = math.inf  # first: who queues from now on asks again
        self._review_by(self.review(), deadlines)

    def review(self) -> float:
        """Log calls that one method keeps waiting, and refuse those whose deadlines pass. Returns when it is due again
        (``time.monotonic``).
        """
        due, refused, slow = math.inf, [], None
        with self.lock:
            now, latest = time.monotonic(), self._latest
            runs_s = now - latest.since if latest is not None and latest.state is HELD else 0.0
            for queue in self._queues():
                for queued in list(queue):
                    if now >= queued.refused_at:
                        queue.remove(queued)
                        refused.append(queued)
                        continue
                    due = min(due, queued.refused_at, now + SLOW_S)
                    is_slow = min(runs_s, now - queued.since) >= 0.9 * SLOW_S and queued.job.label != "a method"
                    if is_slow and slow is None and latest is not None:
                        slow = queued.job.label, latest.label
            if slow in self._logged:
                slow = None
            elif slow is not None:
                self._logged.add(slow)
        if slow is not None:
            logger.warning(
                "%s waits for %s, which has run in this actor for %.3g s: let calls in while that waits, by `with "
                "raytorchrpc.allow_calls():`, or make one of them @raytorchrpc.method(concurrent=True)",
                *slow,
                runs_s,
            )
        for job, since, _ in refused:
            because = "other calls" if latest is None else latest.label
            job.refuse(
                RpcTimeout(
                    f"{job.label} waited for its turn for {now - since:.3g} s, until its deadline, and did not run: "
                    f"{because} was running in that actor"
                )
            )
        return due


def _hand_over(ready: list[tuple[Job, Admission]]) -> Job | None:
    """Give those that were admitted their admissions; returns the one that needs a thread, if any."""
    needs_thread: Job | None = None
    for job, admission in ready:
        if job.admit(admission):
            needs_thread = job
    return needs_thread
