"""Where a member's methods run: its workers, the gate that keeps the actor's own concurrency, call chains.

A gate admits as many methods at a time as Ray would (one for a sync actor). Whoever is admitted holds a
seat, and every call made from there carries the tokens of the seats held along its way. A call that comes
back to an actor it is already inside names a seat held there, so it does not queue behind itself: it runs on
the very thread that waits for it, or, in an async actor, on the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from raytorchrpc import _compat

Token = str


class Workers:
    """Daemon threads that run methods: made when none is idle, kept after. Hot path.

    Daemons, because a method that never returns must not keep the process from ending.
    """

    def __init__(self, name: str, limit: int = 512) -> None:
        self._name, self._limit = name, limit
        self._tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads waiting for a task, less the tasks waiting for a thread
        self._threads = 0

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run ``function(*args)``, which must not raise, on a worker; returns at once."""
        with self._lock:
            self._idle -= 1
            if self._idle < 0 and self._threads < self._limit:
                self._threads += 1
                self._idle += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._tasks.put((function, args))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, args = task
            function(*args)
            del task, function, args  # an idle worker keeps no tensor alive
            with self._lock:
                self._idle += 1

    def stop(self) -> None:
        """Let idle threads end now and busy ones after their task. Does not wait."""
        with self._lock:
            for _ in range(self._threads):
                self._tasks.put(None)


Work = Callable[[], None]


class Job(Protocol):
    """One method call waiting for its turn."""

    def admit(self, seat: Seat) -> Work | None:
        """Its turn has come. Returns the work, for the calling thread to do or to ``spawn``; None if it went
        elsewhere (to an event loop). Quick, never raises. The work ends with ``seat.gate.leave``.
        """

    def spawn(self, work: Work) -> None:
        """Do the work on some other thread."""

    def run_inside(self, seat: Seat) -> None:
        """Do the work here and now, inside a seat that its chain already holds. Does not raise."""


class _Turn:
    """A Job that only tells a waiting caller that its turn has come."""

    def __init__(self, told: Callable[[Seat], None]) -> None:
        self.told = told

    def admit(self, seat: Seat) -> Work | None:
        self.told(seat)
        return None

    def spawn(self, work: Work) -> None:
        raise AssertionError("a turn has no work of its own")

    def run_inside(self, seat: Seat) -> None:
        raise AssertionError("a turn is never posted to a seat")


class Seat:
    """Admission to a gate, held while one method runs (and whatever comes back to it meanwhile)."""

    __slots__ = ("blocks_loop", "changed", "gate", "inbox", "owner", "token")

    def __init__(self, gate: Gate, token: Token) -> None:
        self.gate = gate
        self.token = token
        self.owner: int | None = None
        """Ident of the thread the method runs on; None on an event loop."""
        self.blocks_loop = False
        """Whether the method waits for a call without ``await``, so that its loop stands still."""
        self.inbox: deque[Job] = deque()
        self.changed = threading.Condition(gate.lock)


class Gate:
    """Admits ``limit`` methods at a time, first come first served."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self._limit = limit
        self._seats: dict[Token, Seat] = {}
        self._queue: deque[Job] = deque()

    def request(self, job: Job) -> Work | None:
        """Admit the job now, returning its work, or queue it: then it starts when somebody leaves."""
        with self.lock:
            if len(self._seats) >= self._limit:
                self._queue.append(job)
                return None
            seat = self._admit()
        return job.admit(seat)

    def enter(self) -> Seat:
        """Block this thread until admitted, as Ray's own queue would."""
        seat = self.enter_now()
        if seat is None:
            admitted: list[Seat] = []
            turn = threading.Lock()
            turn.acquire()

            def told(mine: Seat) -> None:
                admitted.append(mine)
                turn.release()

            self.request(_Turn(told))
            turn.acquire()
            seat = admitted[0]
        seat.owner = threading.get_ident()
        return seat

    def enter_now(self) -> Seat | None:
        """A seat if one is free and nobody queues for it; never blocks."""
        with self.lock:
            return self._admit() if len(self._seats) < self._limit else None

    async def enter_on_loop(self) -> Seat:
        """As ``enter``, from a coroutine."""
        seat = self.enter_now()
        if seat is not None:
            return seat
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Seat] = loop.create_future()

        def settle(mine: Seat) -> None:
            if turn.cancelled():
                self.leave(mine)
            else:
                turn.set_result(mine)

        self.request(_Turn(lambda mine: _discard(loop.call_soon_threadsafe(settle, mine))))
        return await turn

    def held(self, path: tuple[Token, ...]) -> Seat | None:
        """The seat here that a call chain already holds, if it has come back."""
        for token in reversed(path):
            seat = self._seats.get(token)
            if seat is not None:
                return seat
        return None

    def post(self, seat: Seat, job: Job) -> bool:
        """Have the thread that holds ``seat`` run this when it next waits; False if the seat was given up."""
        with self.lock:
            if seat.token not in self._seats:
                return False
            seat.inbox.append(job)
            seat.changed.notify_all()
            return True

    def leave(self, seat: Seat) -> None:
        """Give the seat up; the next in line starts, on a thread of its own."""
        following = self.pass_on(seat)
        if following is not None:
            job, work = following
            job.spawn(work)

    def pass_on(self, seat: Seat) -> tuple[Job, Work] | None:
        """Give the seat up; returns the next in line for this thread to run, if it needs a thread.

        What is left in the seat's inbox queues like anybody else.
        """
        with self.lock:
            del self._seats[seat.token]
            self._queue.extend(seat.inbox)
            if not self._queue:
                return None
            job, following = self._queue.popleft(), self._admit()
        work = job.admit(following)
        return None if work is None else (job, work)

    def _admit(self) -> Seat:
        seat = Seat(self, _new_token())
        self._seats[seat.token] = seat
        return seat


def _discard(_: object) -> None:
    return None


_tokens = itertools.count()
_process = os.urandom(6).hex()


def _new_token() -> Token:
    return f"{_process}.{next(_tokens)}"


class Scope(NamedTuple):
    """What the code running in this context belongs to; calls it makes carry this on."""

    path: tuple[Token, ...] = ()
    """Seats held along the chain of calls, oldest first, this process's included."""
    deadline: float | None = None
    """Of the call being served (``time.monotonic``); calls made on its behalf end by then too."""
    seat: Seat | None = None


NO_SCOPE = Scope()
current_scope: ContextVar[Scope] = ContextVar("raytorchrpc_scope", default=NO_SCOPE)


class Waitable(Protocol):
    """What a wait is for: a call under way."""

    def wait(self, timeout_s: float) -> bool:
        """Block until done, at most ``timeout_s``; whether it is done."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, which is short, when done."""


def wait_serving(pending: Waitable, timeout_s: float) -> bool:
    """Block until ``pending`` is done, running meanwhile what comes back to the seat held on this thread.

    False if ``timeout_s`` ran out first.
    """
    seat = current_scope.get().seat
    if seat is None:
        return pending.wait(timeout_s)
    if seat.owner is None:
        seat.blocks_loop = on_loop()
        try:
            return pending.wait(timeout_s)
        finally:
            seat.blocks_loop = False
    if seat.owner != threading.get_ident():  # a thread of the method's own, in a copied context
        return pending.wait(timeout_s)
    return _serve_inbox(seat, pending, time.monotonic() + timeout_s)


def _serve_inbox(seat: Seat, pending: Waitable, deadline: float) -> bool:
    finished = False

    def finish() -> None:
        nonlocal finished
        with seat.changed:
            finished = True
            seat.changed.notify_all()

    pending.add_done_callback(finish)
    while True:
        with seat.changed:
            while not finished and not seat.inbox:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not seat.changed.wait(remaining):
                    return finished
            if finished:
                return True
            job = seat.inbox.popleft()
        job.run_inside(seat)


def on_loop() -> bool:
    """Whether this thread runs an event loop just now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# --- the actor in this process ---------------------------------------------------------------------------

_actor: Any = None
_gates: dict[str | None, Gate] = {}
_gates_lock = threading.Lock()


def gate_of(instance: Any, group: str | None) -> Gate | None:
    """The gate of this actor's methods in Ray concurrency group ``group``; None for any other object.

    Each group has a gate of its own, as wide as the actor's ``max_concurrency``: Ray does not tell the
    actor's process how wide the group is.
    """
    global _actor
    if instance is not _actor:
        if instance is None or _compat.actor_instance() is not instance:
            return None
        with _gates_lock:
            _actor = instance
            _gates.clear()
    gate = _gates.get(group)
    if gate is None:
        with _gates_lock:
            gate = _gates.setdefault(group, Gate(_compat.actor_max_concurrency()))
    return gate


# --- coroutines under distributed autograd --------------------------------------------------------------


class _InContext:
    """Awaits a coroutine with a distributed autograd context entered at each of its steps.

    torch keeps the context per thread, and a loop's thread runs other coroutines in between.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context_id: int) -> None:
        self._coroutine, self._context_id = coroutine, context_id

    def __await__(self) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            try:
                with _compat.autograd_context(self._context_id):
                    step = self._coroutine.throw(error) if error is not None else self._coroutine.send(value)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            try:
                value = yield step
            except BaseException as thrown:  # cancellation too goes into the coroutine
                error = thrown


def in_autograd_context(coroutine: Coroutine[Any, Any, Any], context_id: int) -> Any:
    """An awaitable of ``coroutine`` that runs it inside an existing distributed autograd context."""
    return coroutine if context_id == _compat.NO_CONTEXT else _InContext(coroutine, context_id)
