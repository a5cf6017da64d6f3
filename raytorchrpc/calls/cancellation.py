"""Calls whose callers can cancel them, at the callee."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raytorchrpc.calls import gates
from raytorchrpc.calls.event_loops import on_loop
from raytorchrpc.calls.job import NO_MESSAGE, Job
from raytorchrpc.errors import CancelledError, PeerLost
from raytorchrpc.lanes.base import Message, Reply

#: Cancellations that are remembered because their calls may not have arrived yet: a lane may change the order.
_MOST_EARLY = 1024


class CancellableJob(Job):
    """A job whose caller may cancel it. Its reply is dropped then, because the caller gets another one at once."""

    _cancelled = False
    _task: asyncio.Task[Any] | None = None
    """Once the job has begun on an event loop."""

    def cancel(self) -> None:
        """Do not run the job, or cancel its coroutine; a method that runs on a thread continues. Quick."""
        self._cancelled = True
        if self._task is not None:
            self._on_its_loop(self._task.cancel, self._why())
        elif not self.exposed.concurrent:
            gate = gates.gate_of(self.callee.instance, self.exposed.concurrency_group)
            if gate is not None and gate.withdraw(self):
                self.message, self.pending = NO_MESSAGE, ()  # discards the out-of-band arguments

    def _on_its_loop(self, function: Callable[..., object], *args: Any) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(function, *args)

    def _why(self) -> str:
        return f"the caller of {self.label} cancelled it"

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if on_loop():
            self._task = asyncio.current_task()
        if self._cancelled:  # asked after the task is known: one of the two threads sees the other's
            raise CancelledError(self._why())
        return super()._arguments()


class CancellableCalls:
    """The jobs of one member that may be cancelled, by the numbers of their calls. Thread-safe."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[CancellableJob, Reply]] = {}
        self._early: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, number: int, job: CancellableJob) -> None:
        """Let the caller cancel the job until it replies."""
        reply, jobs, replies_itself = job.reply, self._jobs, False

        def reply_unless_cancelled(message: Message) -> None:
            nonlocal replies_itself
            if not replies_itself:
                if jobs.pop(number, None) is None:  # atomic: either this or ``cancel`` gets it
                    raise PeerLost("the caller", "it cancelled the call")
                replies_itself = True  # again, if this reply cannot be sent
            reply(message)

        job.reply = reply_unless_cancelled
        jobs[number] = job, reply
        if self._early:
            with self._lock:
                cancelled = number in self._early
                self._early.pop(number, None)
            if cancelled:
                job.cancel()

    def cancel(self, number: int) -> Reply | None:
        """Cancel a job; returns how to reply to its call. None if it has replied, or has not arrived."""
        found = self._jobs.pop(number, None)
        if found is None:
            with self._lock:
                self._early[number] = None
                if len(self._early) > _MOST_EARLY:
                    self._early.popitem(last=False)
            found = self._jobs.pop(number, None)  # it may have arrived just now
            if found is None:
                return None
        job, reply = found
        job.cancel()
        return reply
