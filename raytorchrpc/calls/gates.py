"""Gates that keep an actor's own concurrency for direct calls, and let chains of calls come back to it.

A gate admits as many methods at a time as Ray would (one for a sync actor). An admitted method holds an admission, and
each call that it makes carries the tokens of all admissions held along its chain of calls. A call that comes back to
an actor of its chain names an admission held there, so it does not queue behind itself: it runs on the thread that
waits for it or, in an async actor, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.event_loops import Token, new_token
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.process import threads

#: Calls that come back run on the waiting thread, one inside the other. After this many, the next runs on a thread of
#: its own: each takes a dozen frames besides the method's, and Python's limit is a thousand.
ON_ONE_STACK = 8
#: Calls that may be inside one admission at a time. More are almost certainly an infinite recursion.
MOST_NESTED = 2000


Work = Callable[[], None]


class Job(Protocol):
    """A method call that waits for an admission."""

    @property
    def label(self) -> str:
        """member.method, for messages."""

    def admit(self, admission: Admission) -> Work | None:
        """Take the admission. Returns the work, for the calling thread to do or to ``spawn``; None if it went to an
        event loop. Quick, never raises. The work ends with ``admission.gate.leave``.
        """

    def spawn(self, work: Work) -> None:
        """Do the work on another thread."""

    def run_inside(self, admission: Admission) -> None:
        """Do the work now, on this thread, inside an admission that its chain holds. Does not raise."""


class _Waiter:
    """A Job that only hands the admission to a waiting thread or coroutine."""

    label = "a waiter"

    def __init__(self, receive: Callable[[Admission], None]) -> None:
        self.receive = receive

    def admit(self, admission: Admission) -> Work | None:
        self.receive(admission)
        return None

    def spawn(self, work: Work) -> None:
        raise AssertionError("a waiter has no work of its own")

    def run_inside(self, admission: Admission) -> None:
        raise AssertionError("a waiter is never posted to an admission")


class Admission:
    """Admission to a gate, held while one method runs, and the calls that come back to it meanwhile."""

    __slots__ = ("_changed", "direct", "gate", "inbox", "nested", "owner", "token")

    def __init__(self, gate: Gate, token: Token, direct: bool) -> None:
        self.gate = gate
        self.direct = direct
        self.token = token
        self.owner: int | None = None
        """Ident of the thread the method runs on; None on an event loop."""
        self.inbox: deque[Job] = deque()
        self.nested = 0
        """Calls that came back and have not returned, one inside the other."""
        self._changed: threading.Condition | None = None

    @property
    def changed(self) -> threading.Condition:
        """On the gate's lock: notified of each job in the inbox. Made when first needed; most admissions never wait."""
        if self._changed is None:
            self._changed = threading.Condition(self.gate.lock)
        return self._changed

    @property
    def taken(self) -> bool:
        """Whether it is still held."""
        return self.gate.held((self.token,)) is self


class Gate:
    """Admits ``limit`` methods at a time, first come, first served.

    ``elastic``: Ray does not report the limit (of a concurrency group). Then calls through Ray wait only for direct
    calls, and there may be as many direct calls at a time as Ray was ever seen to admit.
    """

    def __init__(self, limit: int, *, elastic: bool = False) -> None:
        self.lock = threading.Lock()
        self._limit = limit
        self._elastic = elastic
        self._direct = 0  # admissions of direct calls
        self._admitted: dict[Token, Admission] = {}
        self._queue: deque[Job] = deque()

    def request(self, job: Job) -> Work | None:
        """Admit the job now and return its work, or queue it until an admission is free."""
        with self.lock:
            if len(self._admitted) >= self._limit:
                self._queue.append(job)
                return None
            admission = self._admit(direct=True)
        try:
            return job.admit(admission)
        except BaseException:
            self.leave(admission)
            raise

    def enter(self) -> Admission:
        """Block this thread until admitted, as Ray's own queue would."""
        admission = self.enter_now()
        if admission is None:
            received: list[Admission] = []
            admitted = threading.Lock()
            admitted.acquire()

            def receive(mine: Admission) -> None:
                received.append(mine)
                admitted.release()

            self._queue_up(_Waiter(receive))
            admitted.acquire()
            admission = received[0]
        admission.owner = threading.get_ident()
        return admission

    def enter_now(self) -> Admission | None:
        """An admission if one is free and no job queues for it; never blocks."""
        with self.lock:
            if len(self._admitted) >= self._limit:
                if not self._elastic or self._direct:
                    return None
                self._limit = len(self._admitted) + 1
            return self._admit(direct=False)

    async def enter_on_loop(self) -> Admission:
        """As ``enter``, from a coroutine."""
        admission = self.enter_now()
        if admission is not None:
            return admission
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[Admission] = loop.create_future()

        def settle(mine: Admission) -> None:
            if admitted.cancelled():
                self.leave(mine)
            else:
                admitted.set_result(mine)

        def receive(mine: Admission) -> None:
            loop.call_soon_threadsafe(settle, mine)

        self._queue_up(_Waiter(receive))
        try:
            return await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # cancelled between its admission and its next step
                self.leave(admitted.result())
            raise

    def _queue_up(self, waiter: _Waiter) -> None:
        with self.lock:
            if len(self._admitted) >= self._limit:
                self._queue.append(waiter)
                return
            admission = self._admit(direct=False)
        waiter.admit(admission)

    def held(self, path: tuple[Token, ...]) -> Admission | None:
        """The admission of this gate that a chain of calls holds, if it has come back."""
        for token in reversed(path):
            admission = self._admitted.get(token)
            if admission is not None:
                return admission
        return None

    def post(self, admission: Admission, job: Job) -> bool:
        """Have the thread that holds ``admission`` run the job when it next waits; False if it holds it no more.

        Raises RayTorchRpcError if too many calls run inside it.
        """
        if admission.nested >= MOST_NESTED:
            raise RayTorchRpcError(
                f"{job.label} was not called: its chain of calls has come back to that actor {MOST_NESTED} times "
                f"already, which is the limit; end the recursion earlier, or make it a loop"
            )
        with self.lock:
            if admission.token not in self._admitted:
                return False
            admission.inbox.append(job)
            if admission._changed is not None:
                admission._changed.notify_all()
            return True

    def withdraw(self, job: Job) -> bool:
        """Remove a job that waits for an admission, or for the thread that holds one; False if there is none."""
        with self.lock:
            for waiting in (self._queue, *(admission.inbox for admission in self._admitted.values())):
                if job in waiting:
                    waiting.remove(job)
                    return True
        return False

    def leave(self, admission: Admission) -> None:
        """Give the admission up; the next in the queue starts on a thread of its own."""
        following = self.pass_on(admission)
        if following is not None:
            job, work = following
            job.spawn(work)

    def pass_on(self, admission: Admission) -> tuple[Job, Work] | None:
        """Give the admission up; returns the next in the queue for this thread to run, if it needs a thread.

        Jobs left in the admission's inbox move to the queue.
        """
        with self.lock:
            del self._admitted[admission.token]
            self._direct -= admission.direct
            self._queue.extend(admission.inbox)
            if not self._queue:
                return None
            following = self._admit(direct=not isinstance(self._queue[0], _Waiter))
            job = self._queue.popleft()
        work = job.admit(following)
        return None if work is None else (job, work)

    def _admit(self, *, direct: bool) -> Admission:
        admission = Admission(self, new_token(), direct)
        self._direct += direct
        self._admitted[admission.token] = admission
        return admission


def run_on_another_stack(admission: Admission, job: Job) -> None:
    """Run the job on a thread of its own, which holds the admission meanwhile. Blocks."""
    mine, done = admission.owner, threading.Event()

    def run() -> None:
        admission.owner = threading.get_ident()
        try:
            job.run_inside(admission)
        finally:
            admission.owner = mine
            done.set()

    context = contextvars.copy_context()
    try:
        threads.start(context.run, run, name="raytorchrpc-chain")
    except threads.ThreadShortage:  # no thread can be started: this stack may have room left
        job.run_inside(admission)
        return
    done.wait()


# --- the actor in this process ---------------------------------------------------------------------------

_actor: Any = None
_gates: dict[str | None, Gate] = {}
_gates_lock = threading.Lock()


def gate_of(instance: Any, group: str | None) -> Gate | None:
    """The gate of this actor's methods in Ray concurrency group ``group``; None for any other object.

    Each group has a gate of its own. Ray does not report a named group's limit to the actor's process, so its gate
    starts with the actor's ``max_concurrency`` and grows with what Ray admits.
    """
    global _actor
    if instance is not _actor:
        if instance is None or ray_internals.actor_instance() is not instance:
            return None
        with _gates_lock:
            _actor = instance
            _gates.clear()
    gate = _gates.get(group)
    if gate is None:
        with _gates_lock:
            width = ray_internals.actor_max_concurrency()
            gate = _gates.setdefault(group, Gate(width, elastic=group is not None))
    return gate
