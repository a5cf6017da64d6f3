"""Starts all threads of this package, and keeps serving threads running.

A process can run out of memory or threads for a moment. A serving thread then loses only its current step, logs that,
and continues. Code that starts a thread gets an error at once if there is none.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import errno
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from raytorchrpc.errors import RayTorchRpcError

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: A serving thread whose step failed waits this long before the next (seconds).
PAUSE_S = 0.05
#: Shortest time between two log records of the same failure of the same thread (seconds).
_REPORT_S = 10.0
#: A thread that has not run its first line after this time never will (seconds).
_START_S = 30.0
#: A serving thread gives up after failing at every step for this time, but not for lack of memory (seconds).
_HOPELESS_S = 30.0

_prctl = ctypes.PyDLL(None).prctl
_SET_TIMER_SLACK, _ONE_NS = ctypes.c_int(29), ctypes.c_ulong(1)

_pause = threading.Lock()
_pause.acquire()
_reported: dict[tuple[str, type[BaseException]], tuple[float, int]] = {}
"""When a failure was logged last, and how many have not been since."""


class ThreadShortage(RayTorchRpcError):
    """This process cannot start a thread at the moment."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"cannot start the thread {name}: {reason}; raise the limit on memory (ulimit -v, the container's) or on "
            f"threads (ulimit -u, the container's pids.max)"
        )
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.reason)


def is_shortage(error: BaseException) -> bool:
    """Whether an error is due to a lack of memory or threads, so that a later attempt may succeed."""
    if isinstance(error, (MemoryError, ThreadShortage)):
        return True
    if isinstance(error, RuntimeError):  # from torch's allocator, and from Python for a thread
        text = str(error)
        return "can't allocate memory" in text or "can't start new thread" in text
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


class _Started(threading.Event):
    """The event that ``Thread.start`` waits for. A thread without memory for its first lines never sets it."""

    boot: weakref.ref[_Boot] | None = None
    """What the new thread runs. It lives as long as the thread."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        until = time.monotonic() + _START_S
        while not super().wait(PAUSE_S):
            over = self.boot is not None and self.boot() is None
            if (over or time.monotonic() > until) and not self.is_set():
                raise RuntimeError("no memory for it")
        return True


class _Boot:
    """A thread's first lines. It is dropped when they end, even if there is no memory to report a failure."""

    __slots__ = ("__weakref__", "_thread")

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def __call__(self) -> None:
        threading.Thread._bootstrap(self._thread)  # type: ignore[attr-defined]


class _Thread(threading.Thread):
    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work: tuple[Callable[..., object], tuple[Any, ...]] | None = (target, args)
        self._started = _Started()

    @property
    def _bootstrap(self) -> _Boot:
        boot = _Boot(self)
        self._started.boot = weakref.ref(boot)
        return boot

    def give_up(self) -> bool:
        """Have the thread do nothing if it begins later. Returns False if it has begun."""
        try:
            del self._work  # succeeds in only one of the two threads
        except AttributeError:
            return False
        return True

    def run(self) -> None:
        try:
            target, args = self.__dict__.pop("_work")
        except KeyError:  # given up
            return
        try:
            # Linux adds 50 us to each timed wait of a thread, also to that for the interpreter lock of a busy process.
            _prctl(_SET_TIMER_SLACK, _ONE_NS)
            target(*args)
        except BaseException as error:
            report(error, f"the thread {self.name} has ended")
        finally:
            del target, args  # the frames of an error that one of these keeps lead to this one


def start(target: Callable[..., object], *args: Any, name: str) -> threading.Thread:
    """Run ``target(*args)`` on a daemon thread of that name. Its exceptions are logged. Raises ThreadShortage."""
    try:
        thread = _Thread(target, args, name)
        try:
            thread.start()
        except RuntimeError:
            if thread.give_up():
                raise
        return thread
    except (RuntimeError, MemoryError, OSError) as error:
        raise ThreadShortage(name, str(error) or "no memory") from error


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Like ``asyncio.to_thread``, on a thread of its own. If none can be started, nothing is left to run later."""
    done: Future[T] = Future()

    def work(done: Future[T], context: contextvars.Context) -> None:
        if not done.set_running_or_notify_cancel():  # its task was cancelled
            return
        try:
            done.set_result(context.run(function, *args, **kwargs))
        except BaseException as error:
            # A coroutine cannot raise StopIteration.
            done.set_exception(RuntimeError(f"it raised {error!r}") if isinstance(error, StopIteration) else error)
        finally:
            del done  # its error holds this frame

    start(work, done, contextvars.copy_context(), name="raytorchrpc-await")
    arrival = asyncio.wrap_future(done)
    del done  # its error holds this frame
    try:
        return await arrival
    finally:
        del arrival


def uninterrupted(function: Callable[..., T], *args: Any, name: str) -> T:
    """Run ``function(*args)`` on a thread of that name; blocks for what it returns or raises. Ctrl-C never breaks it
    off halfway, and is raised once it has ended. Raises ThreadShortage.
    """
    done: Future[T] = Future()
    start(settle, done, function, *args, name=name)
    interrupt: BaseException | None = None
    while not done.done():
        try:
            wait([done])
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    try:
        return done.result()
    finally:
        del done  # its error holds this frame


def settle(done: Future[T], function: Callable[..., T], *args: Any) -> None:
    """Give a future what the function returns or raises."""
    try:
        done.set_result(function(*args))
    except BaseException as error:
        done.set_exception(error)
    finally:
        del done  # its error holds this frame


def pause(seconds: float = PAUSE_S) -> None:
    """Sleep briefly, so that memory or threads may be freed. Allocates nothing."""
    _pause.acquire(True, seconds)


def report(error: BaseException, what: str) -> None:
    """Log a failure after which the process continues. Never raises. Repetitions are counted, and rarely logged."""
    try:
        now, key = time.monotonic(), (what, type(error))
        last, more = _reported.get(key, (-_REPORT_S, 0))
        if now - last < _REPORT_S:
            _reported[key] = last, more + 1
            return
        if len(_reported) > 256:
            _reported.clear()
        _reported[key] = now, 0
        others = f" (and {more} more such failures before)" if more else ""
        if is_shortage(error):
            logger.warning("%s%s: %s", what, others, str(error) or "no memory")
        else:
            logger.error("%s%s", what, others, exc_info=error)
    except Exception:  # no memory for that either
        return


def persist(function: Callable[[], T], seconds: float) -> T:
    """Call ``function`` until it does not fail for lack of memory or threads, for ``seconds`` at most. Blocks."""
    until = time.monotonic() + seconds
    while True:
        try:
            return function()
        except Exception as error:
            if not is_shortage(error) or time.monotonic() > until:
                raise
        pause()


def serve(
    step: Callable[[], bool | Callable[[], object]],
    what: str,
    *,
    restore: Callable[[], None] | None = None,
    give_up: Callable[[], None] | None = None,
) -> None:
    """Call ``step`` until it returns False, and run the work that it returns instead of True. An exception costs only
    that step: it is logged, and the next step follows.

    ``what``: names the thread in logs. ``restore``: called after a step has failed, to repair its effects. ``give_up``:
    called once, before this returns, if every step has failed for half a minute, but not for lack of memory or threads.
    Without it, this never gives up.
    """
    failing_since: float | None = None
    while True:
        work: bool | Callable[[], object] = False
        try:
            while work := step():
                if work is not True:
                    work()
                work, failing_since = False, None  # an idle thread must not keep what the work had
            return
        except BaseException as error:
            failing_since = _failed(error, what, failing_since)
        if give_up is not None and failing_since is not None and time.monotonic() - failing_since > _HOPELESS_S:
            logger.critical("%s: cannot continue; this member closes its connections", what)
            give_up()
            return
        if restore is not None:
            try:
                restore()
            except BaseException as error:
                failing_since = _failed(error, what, failing_since)


def _failed(error: BaseException, what: str, since: float | None) -> float | None:
    """Log an error and pause; returns since when steps have failed for reasons other than a shortage. Never raises."""
    try:
        report(error, f"{what} goes on after a failure")
        pause()
        return None if is_shortage(error) else since or time.monotonic()
    except BaseException:
        return since
