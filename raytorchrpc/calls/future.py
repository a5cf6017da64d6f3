"""The future of a direct call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from raytorchrpc.calls import waiting
from raytorchrpc.calls.deferred import DeferredCall
from raytorchrpc.calls.outgoing import CallUnderWay, until_done
from raytorchrpc.calls.retry import RetriedCall
from raytorchrpc.errors import RpcTimeout
from raytorchrpc.process import fork

T = TypeVar("T")


UnderWay = CallUnderWay | RetriedCall | DeferredCall


class Future(Generic[T]):
    """The result of a direct call, on its way. Made by ``rpc_async``; awaitable.

    The result is unpickled once, by whoever asks first, in that thread (and on its CUDA stream). Thread-safe.
    """

    def __init__(self, call: UnderWay) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._outcome: tuple[Any, BaseException | None] | None = None

    def done(self) -> bool:
        """Whether ``result`` would return or raise at once. Never blocks."""
        if self._outcome is not None or fork.forked():
            return True
        return self._call.wait(0) or self._call.remaining() == 0

    def wait(self) -> T:
        """Block until the result is there, or the call's own deadline; return it or raise what the call raised."""
        try:
            return self._get(self._call.remaining())
        finally:
            del self  # see _get

    def result(self, timeout: float | None = None) -> T:
        """As ``wait``, but at most ``timeout`` seconds. Then RpcTimeout is raised and the call goes on: ask again."""
        remaining = self._call.remaining()
        try:
            return self._get(remaining if timeout is None else min(timeout, remaining))
        finally:
            del self  # see _get

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or None if it returned. Blocks like ``result``, raises RpcTimeout like it."""
        remaining = self._call.remaining()
        self._settle(remaining if timeout is None else min(timeout, remaining))
        assert self._outcome is not None
        return self._outcome[1]

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``callback(self)`` once done, on a thread of the member's own (soon, if it is done already).

        A call is done also when its deadline has passed. The callback may block and may make calls. What it
        raises is logged.
        """
        fork.check_process()
        first = threading.Lock()

        def run() -> None:
            if first.acquire(blocking=False):
                self._call.run_callback(callback, self)

        prevent = self._call.at_deadline(run)

        def arrived() -> None:
            prevent()
            run()

        self._call.add_done_callback(arrived)

    def __await__(self) -> Generator[Any, None, T]:
        while not (self.done() and self._settled(0)):
            yield from until_done(self._call)
        try:
            return self._get(0)
        finally:
            del self  # see _get

    def _get(self, timeout_s: float) -> T:
        self._settle(timeout_s)
        assert self._outcome is not None
        value, error = self._outcome
        if error is None:
            return value  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            # Its traceback holds these frames and the caller's, with all their tensors. Did it hold itself too, by way
            # of this Future, they would live until garbage is collected, and tensors do not make Python collect it.
            del self, error

    def _settle(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not self._settled(max(until - time.monotonic(), 0)):
            if time.monotonic() >= until and self._call.remaining() > 0:
                raise RpcTimeout(f"{self._call.label} has not answered within {timeout_s:.3g} s")

    def _settled(self, timeout_s: float) -> bool:
        """Wait, and take the outcome; False if it is not there yet, or the call had to be sent again."""
        if self._outcome is not None:
            return True
        fork.check_process()  # the answer comes to the parent
        arrived = waiting.wait_serving(self._call, timeout_s)
        if not arrived and self._call.remaining() > 0:
            return False
        with self._lock:
            if self._outcome is None:
                self._outcome = self._call.outcome() if arrived else self._call.expire()
            return self._outcome is not None

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        return f"<raytorchrpc.Future {self._call.label} {state}>"
