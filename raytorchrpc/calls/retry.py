"""A call that is sent again when the member it was sent to is lost and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from raytorchrpc.calls.event_loops import Token
from raytorchrpc.calls.outgoing import CallUnderWay, call_back
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.errors import PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.process.deadlines import Deadlines
from raytorchrpc.process.workers import Workers

Send = Callable[[float], CallUnderWay]
"""``send(seconds left)``: sends the call, once. Raises PeerLost if it cannot."""


class Returns(Protocol):
    """The member that makes the call: what a repeated one needs of it besides."""

    workers: Workers
    deadlines: Deadlines

    def incarnation(self, target: Any) -> int:
        """Of the peer's process that a call would go to now."""

    def await_return(self, target: Any, after: int, until: float) -> bool:
        """Block until the peer is back as a later incarnation than ``after``, or still there after all; False at
        ``until``. Raises PeerLost if it will never be back.
        """


class RetriedCall:
    """What a Future needs of its call; see CallUnderWay. Thread-safe."""

    def __init__(self, local: Returns, target: Any, label: str, send: Send, seconds: float, repeats: int) -> None:
        """Sends it the first time; a lost peer does not show before ``wait``. ``seconds``: until its deadline."""
        self._local, self._target, self.label, self._send = local, target, label, send
        self._deadline = time.monotonic() + seconds
        self._repeats = repeats
        self._scope = current_scope.get()
        self._lock = threading.Lock()
        self._current: CallUnderWay | None = None
        self._lost: RayTorchRpcError | None = None
        self._may_have_run = False
        """At some attempt."""
        self._sent_to = -1
        self._attempt()

    def _attempt(self) -> None:
        # A chain of calls stays one, and its deadline, whichever thread sends.
        before = current_scope.set(self._scope)
        self._sent_to = self._local.incarnation(self._target)
        try:
            self._current, self._lost = self._send(max(0.001, self.remaining())), None
        except PeerLost as lost:
            self._current, self._lost = None, lost.with_traceback(None)
        finally:
            current_scope.reset(before)

    @property
    def loop_token(self) -> Token | None:
        """See CallUnderWay."""
        current = self._current
        return None if current is None else current.loop_token

    def remaining(self) -> float:
        """Seconds until the call's deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def wait(self, timeout_s: float) -> bool:
        """Block until the outcome can be taken, at most ``timeout_s``: of the last attempt, if several are due."""
        until = min(self._deadline, time.monotonic() + timeout_s)
        while True:
            current = self._current
            if current is not None and not current.wait(max(0.0, until - time.monotonic())):
                return False
            lost = self._lost if current is None else current.lost()
            if isinstance(lost, PeerLost):
                self._may_have_run |= lost.may_have_run
            if lost is None or self._repeats <= 0:
                return True
            if time.monotonic() >= until:
                return False
            try:
                if not self._local.await_return(self._target, self._sent_to, until):
                    return False
            except RayTorchRpcError as final:  # it is gone for good, or a member no longer
                with self._lock:
                    self._current, self._lost, self._repeats = None, final.with_traceback(None), 0
                return True
            with self._lock:
                if self._current is current and self._repeats > 0:
                    self._repeats -= 1
                    try:
                        self._attempt()
                    except RayTorchRpcError as final:  # not sent again, for another reason
                        self._current, self._lost, self._repeats = None, final.with_traceback(None), 0

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, which is short, when the outcome can be taken, or the deadline has passed."""

        def follow() -> None:
            self.wait(self.remaining())
            callback()

        current = self._current
        if current is None:
            self._local.workers.submit(follow)
        else:
            current.add_done_callback(lambda: self._local.workers.submit(follow))

    def outcome(self) -> tuple[Any, BaseException | None] | None:
        """As CallUnderWay's, of the last attempt. None if its result was lost on the way: ``wait`` sends it again."""
        current = self._current
        value, error = (None, self._lost) if current is None else current.outcome()
        if self._repeats > 0 and self.remaining() > 0 and (current is None or current.peer_was_lost):
            with self._lock:
                if self._current is current and isinstance(error, RayTorchRpcError):
                    self._current, self._lost = None, error.with_traceback(None)
            return None
        if isinstance(error, PeerLost) and self._may_have_run and not error.may_have_run:
            error = PeerLost(error.peer, error.cause)  # not at the last attempt, but before
        return value, error

    def expire(self) -> tuple[None, RpcTimeout]:
        """The outcome of a call whose deadline has passed."""
        current, lost = self._current, self._lost
        if current is not None:
            return current.expire()
        return None, RpcTimeout(f"{self.label} did not answer by its deadline; at the last attempt: {lost}")

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        """See CallUnderWay."""
        return self._local.deadlines.at(self._deadline, callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Run a user's callback on a worker."""
        self._local.workers.submit(call_back, callback, argument)
