"""Waits for several futures: ``wait`` and ``gather``."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from raytorchrpc.calls import waiting
from raytorchrpc.calls.event_loops import refuse_on_loop
from raytorchrpc.calls.future import Future
from raytorchrpc.calls.options import checked_timeout, takes_timeout
from raytorchrpc.errors import ConfigurationError


@takes_timeout
def wait(
    futures: Sequence[Future[Any]], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Future[Any]], list[Future[Any]]]:
    """Block until ``num_returns`` futures are done; return ``(done, not_done)``, as ``ray.wait`` does.

    Both lists keep the order of ``futures``. ``done`` has at most ``num_returns`` futures, and fewer only after the
    timeout; ``not_done`` has the rest. A future is done, too, if its call failed, was cancelled or passed its deadline:
    ``result`` raises the error. Other methods of a sync actor may run meanwhile.

    Raises RayTorchRpcError on an event loop, unless ``timeout`` is 0; use ``asyncio.wait`` there.

    Args:
        futures: from ``rpc_async``, each of them once.
        num_returns: from 1 to the number of futures.
        timeout: seconds; 0 only looks. None waits until the calls' deadlines.
    """
    everything = _checked(futures)
    if len(set(everything)) < len(everything):
        raise ConfigurationError("futures= holds a future twice")
    count: Any = num_returns
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"num_returns= must be a whole number of at least 1, not {num_returns!r}")
    if num_returns > max(1, len(everything)):
        raise ConfigurationError(f"num_returns={num_returns} exceeds the {len(everything)} futures")
    until = math.inf if timeout is None else time.monotonic() + checked_timeout(timeout)
    if timeout != 0:
        refuse_on_loop(
            "raytorchrpc.wait", "`await asyncio.wait([asyncio.ensure_future(future) for future in futures])`"
        )
    num_returns = min(num_returns, len(everything))
    with _Arrivals(everything) as arrivals:
        while True:
            arrivals.take()
            done = [future for future in everything if future.done()]
            left = until - time.monotonic()
            if len(done) >= num_returns or left <= 0:
                break
            arrivals.wanted = num_returns - len(done)
            waiting.wait_serving(arrivals, min(left, _first_deadline(set(everything).difference(done))))
    chosen = set(done[:num_returns])
    return done[:num_returns], [future for future in everything if future not in chosen]


def gather(*futures: Future[Any], return_exceptions: bool = False) -> list[Any]:
    """Block until all futures are done; return their results in the order of the arguments.

    If a call fails, its error is raised at once, and the other calls continue; their errors are not logged. With
    ``return_exceptions`` the errors take their places among the results. Other methods of a sync actor may run
    meanwhile.

    Raises RayTorchRpcError on an event loop; use ``await asyncio.gather(*futures)`` there.
    """
    refuse_on_loop("raytorchrpc.gather", "`await asyncio.gather(*futures)`")
    failed = _settle(_checked(futures), return_exceptions)
    try:
        if failed is not None:
            failed.result(0)
        outcomes = [future._outcome or (None, None) for future in futures]
        return [value if error is None else error for value, error in outcomes]
    finally:
        del futures, failed  # see Future._get


def _settle(futures: Iterable[Future[Any]], return_exceptions: bool) -> Future[Any] | None:
    """Take all outcomes. Returns the first future that failed, at once, unless errors are to be returned."""
    pending, deadline = set(futures), 0.0
    with _Arrivals(pending) as arrivals:
        while pending:
            if time.monotonic() >= deadline:
                deadline = time.monotonic() + _first_deadline(pending)
            arrivals.wanted = 1
            arrived = waiting.wait_serving(arrivals, max(0.0, deadline - time.monotonic()))
            for future in arrivals.take() if arrived else [future for future in pending if future.done()]:
                if not future._settled(0):
                    arrivals.watch(future)  # it was sent again
                    continue
                pending.discard(future)
                if not return_exceptions and future._outcome is not None and future._outcome[1] is not None:
                    for other in pending:
                        other._call.forget_failure()
                    return future
    return None


class _Arrivals:
    """Collects futures as they become done, but not those whose deadline passes; see ``waiting.Waitable``."""

    def __init__(self, futures: Collection[Future[Any]]) -> None:
        self.wanted = 1
        """Done when so many have arrived since ``take``."""
        self._futures = futures
        self._watchers: list[tuple[Future[Any], Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._arrived: deque[Future[Any]] = deque()
        self._callbacks: list[Callable[[], None]] = []

    def __enter__(self) -> _Arrivals:
        for future in self._futures:
            self.watch(future)
        return self

    def __exit__(self, *_: object) -> None:
        for future, watcher in self._watchers:
            future._unwatch(watcher)
        self._watchers.clear()  # they lead back here; without them, the futures can be freed

    def watch(self, future: Future[Any]) -> None:
        """Collect the future once."""
        watcher = partial(self._arrive, future)
        self._watchers.append((future, watcher))
        future._watch(watcher)

    def _arrive(self, future: Future[Any]) -> None:
        callbacks: list[Callable[[], None]] = []
        with self._lock:
            self._arrived.append(future)
            if len(self._arrived) >= self.wanted:
                callbacks, self._callbacks = self._callbacks, callbacks
        for callback in callbacks:
            callback()

    def take(self) -> list[Future[Any]]:
        """Those that have arrived since the last time."""
        with self._lock:
            arrived = list(self._arrived)
            self._arrived.clear()
        return arrived

    def wait(self, timeout_s: float) -> bool:
        woken = threading.Lock()
        woken.acquire()
        self.add_done_callback(woken.release)
        return woken.acquire(timeout=timeout_s)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if len(self._arrived) < self.wanted:
                self._callbacks.append(callback)
                return
        callback()


def _checked(futures: Iterable[Any]) -> list[Future[Any]]:
    if isinstance(futures, Future):
        raise ConfigurationError("futures= is a list of futures, not a single one")
    checked = list(futures)
    for future in checked:
        if not isinstance(future, Future):
            raise ConfigurationError(f"{future!r} is not a raytorchrpc.Future, as rpc_async(target).method() returns")
    return checked


def _first_deadline(futures: Iterable[Future[Any]]) -> float:
    """Seconds until the first deadline."""
    return min(future._call.remaining() for future in futures)
