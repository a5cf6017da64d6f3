"""Futures: what stands for the results of calls in flight."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import types
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from raytorchrpc.calls.options import checked_timeout, takes_timeout
from raytorchrpc.calls.scope import on_loop, refuse_on_loop, wait_serving
from raytorchrpc.errors import CancelledError, ConfigurationError, RpcTimeout
from raytorchrpc.process import fork, locks
from raytorchrpc.process.completion import Completion
from raytorchrpc.process.locks import Turn, interrupted
from raytorchrpc.tensors import thread_modes
from raytorchrpc.tensors.kept_errors import again

logger = logging.getLogger(__name__)

T = TypeVar("T")


#: An ``outgoing.OutgoingCall``, in a module above this one.
Call = Any


def result_of(call: Call) -> Any:
    """The result of a call that no ``Future`` stands for; raises the call's error. Blocks until its deadline."""
    awaited = outcome = None
    try:
        while outcome is None:  # once more if it was sent again
            awaited = call if call.repeats is not None else call.pending
            if wait_serving(awaited, call.deadline - time.monotonic()):
                outcome = call.outcome()
            elif not call.remaining():
                outcome = call.expire()
        if outcome[1] is None:
            return outcome[0]
        raise outcome[1]
    finally:
        del call, awaited, outcome  # the traceback of the error holds this frame


class Future(Generic[T]):
    """The result of a direct call that may not have arrived yet. Made by ``rpc_async``; awaitable.

    The result is unpickled once, by the thread that asks first (and on its CUDA stream). Thread-safe. On an event loop,
    ``wait``, ``result`` and ``exception`` raise RayTorchRpcError, done or not, until it was awaited or ``done`` has
    returned True: use ``await`` there.

    Examples:
        >>> future = rtr.rpc_async("learner").double(21)
        >>> future.wait(), future.done(), future.result()
        (42, True, 42)
    """

    _cancelled = _was_done = False
    """Whether ``cancel``, and ``done``, have returned True."""
    _arrival: Completion | None = None
    """Complete when the outcome can be taken or the call is cancelled; made when it is first watched."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._taking = Turn()
        """Held while the outcome is decided: taken from the call, or cancelled."""
        self._outcome: tuple[Any, BaseException | None] | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Future stays in its process: pass what its result() returns")

    def done(self) -> bool:
        """Whether ``result`` would return or raise at once. Never blocks."""
        if self._outcome is not None or fork.forked():
            return True
        self._was_done = self._call.wait(0) or self._call.remaining() == 0
        return self._was_done

    def cancelled(self) -> bool:
        """Whether ``cancel`` has cancelled the call."""
        return self._cancelled

    def cancel(self) -> bool:
        """Cancel the call. Returns whether it is cancelled: False if it was done before, and keeps its result.

        From now on ``result``, ``wait`` and ``exception`` raise CancelledError, and ``await`` raises
        ``asyncio.CancelledError``. A thread that waits already is woken when the target has confirmed.

        At the target, a coroutine is cancelled (``asyncio.CancelledError`` is raised in it), and a method that has not
        begun will not run. A method that runs on a thread continues; its result is dropped. The target's confirmation
        also frees the call's part of ``GroupConfig.max_calls_in_flight`` and ``max_bytes_in_flight``.

        A task that is cancelled while it awaits this future cancels the call too; ``asyncio.shield`` prevents that.
        """
        fork.check_process()
        # Another thread takes the result, or cancels; or this one does, and a signal handler has interrupted that.
        if self._taking._is_owned() or not self._taking.acquire(blocking=False):
            return self._cancelled
        try:
            if self._cancelled or self.done():
                return self._cancelled
            self._cancelled = True  # first: who sees the outcome sees this too
            self._outcome = None, CancelledError(f"the call of {self._call.label} was cancelled")
        finally:
            self._taking.release()
        self._call.cancel()
        if self._arrival is not None:
            self._arrival.complete()
        return True

    def wait(self) -> T:
        """Block until the result has arrived or the call's deadline has passed; return it or raise the call's error."""
        return self._get(self._call.remaining())

    def result(self, timeout: float | None = None) -> T:
        """As ``wait``, but block at most ``timeout`` seconds; then raise RpcTimeout. The call goes on: ask again."""
        return self._get(self._longest_wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the call, or None if it returned. Blocks like ``result``, and raises RpcTimeout and
        CancelledError like it.
        """
        self._settle(self._longest_wait(timeout))
        assert self._outcome is not None
        error = self._outcome[1]
        if self._cancelled and error is not None:
            raise again(error)
        return error

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``callback(self)`` on a thread of the member's own once the call is done, or at once if it is done.

        A call is done, too, when its deadline has passed, or when it is cancelled. The callback may block and may make
        calls. An exception from it is logged.
        """
        fork.check_process()
        if getattr(callback, "__module__", None) == asyncio.wait.__module__:  # it would be called on another thread
            raise ConfigurationError("asyncio.wait takes tasks: pass it asyncio.ensure_future(future)")
        first = threading.Lock()

        def run() -> None:
            if first.acquire(blocking=False):
                self._call.run_callback(callback, self)

        prevent = self._call.at_deadline(run)

        def arrived() -> None:
            prevent()
            run()

        self._watch(arrived)

    def __await__(self) -> Generator[Any, None, T]:
        try:
            while not (yield from self._arrives_on_loop(self._call.remaining())):
                pass
        except asyncio.CancelledError:
            if self._call.cancellable:
                self.cancel()
            raise
        if self._cancelled:
            raise asyncio.CancelledError(f"the call of {self._call.label} was cancelled")
        return self._get(0)

    def _longest_wait(self, timeout: float | None) -> float:
        remaining: float = self._call.remaining()
        return remaining if timeout is None else min(checked_timeout(timeout), remaining)

    def _get(self, timeout_s: float) -> T:
        self._settle(timeout_s)
        assert self._outcome is not None
        value, error = self._outcome
        if error is None:
            return value  # type: ignore[no-any-return]
        raise again(error)

    def _settle(self, timeout_s: float) -> None:
        if timeout_s > 0 and self._outcome is None and not self._was_done and on_loop():
            refuse_on_loop(f"waiting for {self._call.label}", "`await future`")
        while not self._arrives(timeout_s):
            if self._call.remaining() > 0:
                waited = f"within {timeout_s:.3g} s; the call goes on: ask again"
                raise RpcTimeout(f"{self._call.label} has not answered {waited}")

    def _arrives(self, timeout_s: float) -> bool:
        """Wait, and take the outcome; False if it has not arrived in time."""
        until = time.monotonic() + timeout_s
        while self._outcome is None:
            fork.check_process()  # the reply comes to the parent
            arrived = wait_serving(self._call, timeout_s)
            if not arrived and not self._cancelled and self._call.remaining() > 0:
                return False
            if self._taking._is_owned():
                raise interrupted(f"the result of {self._call.label}")
            with self._taking:
                if self._outcome is None:
                    self._outcome = self._call.outcome() if arrived else self._call.expire()
                    if self._outcome is None and self._arrival is not None and self._arrival.done:
                        vars(self).pop("_arrival", None)  # that of the attempt before: the call is sent again
            timeout_s = max(0.0, until - time.monotonic())
        return True

    @types.coroutine
    def _arrives_on_loop(self, timeout_s: float) -> Generator[Any, None, bool]:
        """As ``_arrives``, without blocking the event loop."""
        until = time.monotonic() + timeout_s
        while not (self.done() and self._arrives(0)):
            remaining = until - time.monotonic()
            if remaining <= 0:
                return False
            yield from self._watched(remaining)
        return True

    def _watched(self, timeout_s: float) -> Generator[Any, None, None]:
        """Wait on an event loop until the outcome may be there, or the time has passed."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def arrived() -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile: nothing waits any more
                loop.call_soon_threadsafe(wake)

        self._watch(arrived)
        deadline = loop.call_later(timeout_s, wake)  # a peer that is stuck sends nothing
        try:
            yield from woken
        finally:
            deadline.cancel()
            self._unwatch(arrived)

    # --- for several futures -----------------------------------------------------------------------------------------

    def _watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher``, which is short, on any thread, when the outcome can be taken or the call is cancelled.

        Perhaps at once. The deadline does not count.
        """
        arrival = self._arrival
        if arrival is not None and arrival.done and not self._cancelled and not self.done():
            vars(self).pop("_arrival", None)  # late, after the call was sent again
            arrival = None
        if arrival is None:
            made = Completion()
            arrival = vars(self).setdefault("_arrival", made)  # one, whichever thread is first
            if arrival is made:
                self._call.add_done_callback(made.complete)
        if self._cancelled:
            arrival.complete()
        arrival.add_done_callback(watcher)

    def _unwatch(self, watcher: Callable[[], None]) -> None:
        if self._arrival is not None:
            self._arrival.discard_callback(watcher)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            remedy = ": use result(), wait() or await" if name == "get" else ""
            raise AttributeError(f"a Future has no attribute {name!r}{remedy}", name=name, obj=self)

    def __repr__(self) -> str:
        state = "cancelled" if self._cancelled else "done" if self.done() else "pending"
        return f"<raytorchrpc.Future {self._call.label} {state}>"


def call_back(callback: Callable[[Any], object], argument: Any) -> None:
    """Run a user's callback; an exception from it is logged."""
    try:
        thread_modes.run(callback, argument)
    except BaseException:
        logger.exception("a callback of %r raised", argument)


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

    Examples:
        >>> done, late = rtr.wait([rtr.rpc_async(name).double(1) for name in ("learner", "collector")], num_returns=2)
        >>> [future.result() for future in done], late
        ([2, 2], [])
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
            arrivals.collect(0, 0)
            done = [future for future in everything if future.done()]
            remaining = until - time.monotonic()
            if len(done) >= num_returns or remaining <= 0:
                break
            patience_s = min(remaining, _first_deadline(set(everything).difference(done)))
            arrivals.collect(num_returns - len(done), patience_s)
    chosen = set(done[:num_returns])
    return done[:num_returns], [future for future in everything if future not in chosen]


def gather(*futures: Future[Any], return_exceptions: bool = False) -> list[Any]:
    """Block until all futures are done; return their results in the order of the arguments.

    If a call fails, its error is raised at once, and the other calls continue; their errors are not logged. With
    ``return_exceptions`` the errors take their places among the results. Other methods of a sync actor may run
    meanwhile.

    Raises RayTorchRpcError on an event loop; use ``await asyncio.gather(*futures)`` there.

    Examples:
        >>> rtr.gather(rtr.rpc_async("learner").double(1), rtr.rpc_async("collector").double(2))
        [2, 4]
    """
    refuse_on_loop("raytorchrpc.gather", "`await asyncio.gather(*futures)`")
    if len(futures) == 1 and isinstance(futures[0], (list, tuple)):
        raise ConfigurationError("raytorchrpc.gather takes futures, not a list of them: write gather(*futures)")
    failed = _settle(_checked(futures), return_exceptions)
    if failed is not None:
        failed.result(0)
    outcomes = [future._outcome or (None, None) for future in futures]
    return [value if error is None else error for value, error in outcomes]


def _settle(futures: Iterable[Future[Any]], return_exceptions: bool) -> Future[Any] | None:
    """Take all outcomes. Returns the first future that failed, at once, unless errors are to be returned."""
    pending, deadline = set(futures), 0.0
    with _Arrivals(pending) as arrivals:
        while pending:
            if time.monotonic() >= deadline:
                deadline = time.monotonic() + _first_deadline(pending)
            arrived = arrivals.collect(1, max(0.0, deadline - time.monotonic()))
            for future in arrived or [future for future in pending if future.done()]:
                if not future._arrives(0):
                    arrivals.watch(future)  # it was sent again
                    continue
                pending.discard(future)
                if not return_exceptions and future._outcome is not None and future._outcome[1] is not None:
                    for other in pending:
                        other._call.forget_failure()
                    return future
    return None


class _Arrivals:
    """Collects futures as they become done, but not those whose deadline passes."""

    def __init__(self, futures: Collection[Future[Any]]) -> None:
        self._futures = futures
        self._watchers: list[tuple[Future[Any], Callable[[], None]]] = []
        self._arriving: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._arrived: list[Future[Any]] = []
        self._wanted, self._is_checked = 0, False

    def __enter__(self) -> _Arrivals:
        for future in self._futures:
            self.watch(future)
        return self

    def __exit__(self, *_: object) -> None:
        for future, watcher in self._watchers:
            future._unwatch(watcher)
        self._watchers.clear()  # without them, the futures can be freed

    def watch(self, future: Future[Any]) -> None:
        """Collect the future once."""
        watcher = partial(self._arriving.put, future)
        self._watchers.append((future, watcher))
        future._watch(watcher)

    def collect(self, wanted: int, timeout_s: float) -> list[Future[Any]]:
        """Those that have arrived since the last time. Blocks until there are so many, at most ``timeout_s``."""
        self._wanted = wanted
        if timeout_s > 0 and not self._is_checked:
            self._is_checked = True  # what this thread has interrupted stays so meanwhile
            locks.check_wait()
            for future in self._futures:
                if future._outcome is None:
                    future._call.check_reader()
        wait_serving(self, timeout_s)
        arrived, self._arrived = self._arrived, []
        return arrived

    def wait(self, timeout_s: float) -> bool:
        """For ``wait_serving``."""
        until = time.monotonic() + timeout_s
        while len(self._arrived) < self._wanted or not self._arriving.empty():
            try:
                self._arrived.append(self._arriving.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                return False
        return True


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
    first: float = min(future._call.remaining() for future in futures)
    return first
