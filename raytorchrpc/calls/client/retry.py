"""A call that is sent again when the member it was sent to is lost and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from raytorchrpc.calls.client.future import Call, call_back
from raytorchrpc.calls.client.unretrieved import UnretrievedFailures
from raytorchrpc.calls.peers import PeerTable
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.errors import PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.process.workers import Deadlines, Workers

Send = Callable[[float], Call]
"""``send(seconds left)``: sends the call once. Raises PeerLost if it cannot."""


class RetriedCall(Call):
    """A call of which each attempt is a call of its own. Thread-safe."""

    unretrieved: UnretrievedFailures | None = None
    """Logs a failure if this is dropped and no attempt is under way, which would do so."""

    def __init__(
        self,
        peers: PeerTable,
        workers: Workers,
        deadlines: Deadlines,
        target: Any,
        label: str,
        send: Send,
        seconds: float,
        retries: int,
    ) -> None:
        """Makes the first attempt; a lost peer does not show before ``wait``. ``seconds``: until the deadline."""
        self._peers, self._workers, self._deadlines = peers, workers, deadlines
        self._target, self._label, self._send = target, label, send
        self._deadline = time.monotonic() + seconds
        self._retries = retries
        self._scope = current_scope.get()
        self._lock = threading.Lock()
        self._current: Call | None = None
        self._lost: RayTorchRpcError | None = None
        self._cancelled = False
        self._may_have_run = False
        """In any attempt."""
        self._sent_to = -1
        self._attempt()

    def _attempt(self) -> None:
        # Whichever thread sends, the call stays in its chain of calls and keeps its deadline.
        before = current_scope.set(self._scope)
        self._sent_to = self._peers.incarnation(self._target)
        try:
            self._current, self._lost = self._send(max(0.001, self.remaining())), None
        except PeerLost as lost:
            self._current, self._lost = None, lost.with_traceback(None)
        finally:
            current_scope.reset(before)

    @property
    def label(self) -> str:
        return self._label

    def remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def wait(self, timeout_s: float) -> bool:
        """As ``Call.wait``; sends the call again as often as that is due."""
        until = min(self._deadline, time.monotonic() + timeout_s)
        while True:
            current = self._current
            if current is not None and not current.wait(max(0.0, until - time.monotonic())):
                return False
            lost = self._lost if current is None else current.lost()
            if isinstance(lost, PeerLost):
                self._may_have_run |= lost.may_have_run
            if lost is None or self._retries <= 0:
                return True
            if time.monotonic() >= until:
                return False
            try:
                if not self._peers.await_return(self._target, self._sent_to, until):
                    return False
            except RayTorchRpcError as final:  # the peer is gone for good, or was removed
                with self._lock:
                    self._current, self._lost, self._retries = None, final.with_traceback(None), 0
                return True
            with self._lock:
                if self._current is current and self._retries > 0:
                    self._retries -= 1
                    if current is not None:
                        current.forget_failure()
                    try:
                        self._attempt()
                    except RayTorchRpcError as final:  # not sent again, for another reason
                        self._current, self._lost, self._retries = None, final.with_traceback(None), 0
                    if self._cancelled and self._current is not None:  # meanwhile
                        self._current.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """As ``Call.add_done_callback``; also when the deadline has passed."""

        def follow() -> None:
            self.wait(self.remaining())
            callback()

        current = self._current
        if current is None:
            self._workers.submit(follow)
        else:
            current.add_done_callback(lambda: self._workers.submit(follow))

    def outcome(self) -> tuple[Any, BaseException | None] | None:
        self.unretrieved = None
        current = self._current
        outcome = (None, self._lost) if current is None else current.outcome()
        assert outcome is not None  # an attempt does not retry by itself
        value, error = outcome
        if self._retries > 0 and self.remaining() > 0 and (current is None or current.peer_was_lost):
            with self._lock:
                if self._current is current and isinstance(error, RayTorchRpcError):
                    self._current, self._lost = None, error.with_traceback(None)
            return None
        if isinstance(error, PeerLost) and self._may_have_run and not error.may_have_run:
            error = PeerLost(error.peer, error.cause)  # in an earlier attempt
        return value, error

    def forget_failure(self) -> None:
        self.unretrieved = None
        if (current := self._current) is not None:
            current.forget_failure()

    def __del__(self) -> None:
        lost, unretrieved = getattr(self, "_lost", None), self.unretrieved
        if lost is not None and unretrieved is not None:
            unretrieved.report(self._label, lost)

    def cancel(self) -> None:
        self._cancelled, self._retries, self.unretrieved = True, 0, None
        current = self._current
        if current is not None:
            current.cancel()

    def expire(self) -> tuple[None, RpcTimeout]:
        self.unretrieved = None
        current, lost = self._current, self._lost
        if current is not None:
            return current.expire()
        return None, RpcTimeout(f"{self._label} did not answer by its deadline; at the last attempt: {lost}")

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._deadlines.at(self._deadline, callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        self._workers.submit(call_back, callback, argument)
