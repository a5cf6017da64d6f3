"""A change of a group that a user's thread requests and the supervisor's thread makes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from raytorchrpc.errors import BootstrapError


class RequestedChange:
    """Runs at most once. A change that was given up before its turn never runs."""

    def __init__(self, group: str, work: Callable[[], Any]) -> None:
        """``work`` checks all its input before it changes anything."""
        self._group, self._work = group, work
        self._done: Future[Any] = Future()

    def run(self) -> None:
        """Make the change. Never raises."""
        if not self._done.set_running_or_notify_cancel():
            return
        try:
            self._done.set_result(self._work())
        except BaseException as error:
            self._done.set_exception(error)

    def result(self, patience_s: float) -> Any:
        """Block for the result of ``work``; BootstrapError after ``patience_s`` seconds."""
        try:
            wait([self._done], patience_s)
        except BaseException:  # Ctrl-C
            self._done.cancel()
            raise
        if self._done.done():
            return self._done.result()
        if self._done.cancel():
            raise BootstrapError(f"group {self._group!r} is busy with another change; this one did not begin")
        raise BootstrapError(f"group {self._group!r}: this change began and has not finished after {patience_s:g} s")
