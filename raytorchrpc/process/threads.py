"""Starts all threads of this package, and ends the process if one on which others depend cannot go on."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from raytorchrpc.errors import RayTorchRpcError

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: A pause before what failed is tried again (seconds).
PAUSE_S = 0.05
#: Shortest time between two log records of the same failure of the same thread (seconds).
_REPORT_S = 10.0
#: A thread that has not run its first line in so many waits of ``PAUSE_S`` never will. Not one long wait, which would
#: pass while the process is suspended.
_MOST_WAITS = 600

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

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        for _ in range(_MOST_WAITS):
            if super().wait(PAUSE_S):
                return True
        raise RuntimeError("it does not begin")


class _Thread(threading.Thread):
    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = target, args
        self._started = _Started()

    def give_up(self) -> bool:
        """Whether it has not begun, and so will do nothing if it still begins."""
        return self.__dict__.pop("_work", None) is not None

    def run(self) -> None:
        work = self.__dict__.pop("_work", None)
        if work is None:
            return
        target, args = work
        del work
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
    """Sleep briefly, so that what was lacking, such as a descriptor, may be freed."""
    _pause.acquire(True, seconds)


def report(error: BaseException, failure: str) -> None:
    """Log a failure after which the process continues. Repetitions are counted, and rarely logged."""
    now, key = time.monotonic(), (failure, type(error))
    last, more = _reported.get(key, (-_REPORT_S, 0))
    if now - last < _REPORT_S:
        _reported[key] = last, more + 1
        return
    if len(_reported) > 256:
        _reported.clear()
    _reported[key] = now, 0
    others = f" (and {more} more such failures before)" if more else ""
    logger.error("%s%s", failure, others, exc_info=error)


def serve(step: Callable[[], bool | Callable[[], object]], thread: str) -> None:
    """Call ``step`` until it returns False, and run the work that it returns instead of True.

    An exception ends this process; see ``end_process``. ``thread``: names it in the log.
    """
    work: bool | Callable[[], object] = False
    try:
        while work := step():
            if work is not True:
                work()
            work = False  # an idle thread must not keep what the work had
    except BaseException as error:
        end_process(error, thread)


def surviving(step: Callable[[], bool], thread: str) -> Callable[[], bool]:
    """A step for ``serve`` that logs its failures and is then tried again, but not for lack of memory or threads.

    For a thread whose work nobody waits for.
    """

    def attempt() -> bool:
        try:
            return step()
        except Exception as error:
            if is_shortage(error):
                raise
            report(error, f"{thread} goes on after a failure")
        pause()
        return True

    return attempt


def end_process(error: BaseException, thread: str) -> None:
    """End this process, because a thread that others wait for cannot go on. One log record names the cause.

    Peers learn of it from the kernel, which closes its connections without memory or threads. Ray restarts an actor.
    """
    if sys.is_finalizing():  # it ends anyway, and its modules are being cleared
        return
    try:
        name, why = type(error).__name__, str(error) or "no memory"
        traceback = None if is_shortage(error) else error
        logger.critical("this process ends, as %s cannot go on: %s: %s", thread, name, why, exc_info=traceback)
    finally:
        os._exit(1)
