"""Waits for a call while serving the calls of its chain that come back to this actor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from raytorchrpc.calls.event_loops import Token, blocking_loop, on_loop
from raytorchrpc.calls.gates import ON_ONE_STACK, Admission, run_on_another_stack
from raytorchrpc.calls.scope import current_scope


class Waitable(Protocol):
    """Something to wait for, as a call in flight."""

    @property
    def loop_token(self) -> Token | None:
        """In the path of the call, if it was made on an event loop."""

    def wait(self, timeout_s: float) -> bool:
        """Block until done, at most ``timeout_s``; whether it is done."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, which is short, when done."""


def wait_serving(pending: Waitable, timeout_s: float) -> bool:
    """Block until ``pending`` is done, and meanwhile run the calls that come back to this thread's admission.

    False if ``timeout_s`` passes first.
    """
    if pending.loop_token is not None and on_loop():
        with blocking_loop(pending.loop_token):
            return pending.wait(timeout_s)
    admission = current_scope.get().admission
    # A thread that the method started may have copied its context.
    if admission is None or admission.owner != threading.get_ident():
        return pending.wait(timeout_s)
    return _serve_inbox(admission, pending, time.monotonic() + timeout_s)


def _serve_inbox(admission: Admission, pending: Waitable, deadline: float) -> bool:
    finished = False
    with admission.gate.lock:
        changed = admission.changed

    def finish() -> None:
        nonlocal finished
        with changed:
            finished = True
            changed.notify_all()

    pending.add_done_callback(finish)
    while True:
        with changed:
            while not finished and not admission.inbox:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not changed.wait(remaining):
                    return finished
            if finished:
                return True
            job = admission.inbox.popleft()
        admission.nested += 1
        try:
            if admission.nested % ON_ONE_STACK:
                job.run_inside(admission)
            else:
                run_on_another_stack(admission, job)
        finally:
            admission.nested -= 1
