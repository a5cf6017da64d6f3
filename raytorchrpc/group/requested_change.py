"""A change of a group that one thread asks for and the thread that looks after the group makes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from raytorchrpc.errors import BootstrapError


class RequestedChange:
    """Made once, or never: one that was given up before its turn is not made later."""

    def __init__(self, group: str, work: Callable[[], Any]) -> None:
        """``work`` checks all that it needs before it changes anything."""
        self._group, self._work = group, work
        self._done: Future[Any] = Future()

    def run(self) -> None:
        """Make it. Raises nothing."""
        if not self._done.set_running_or_notify_cancel():
            return
        try:
            self._done.set_result(self._work())
        except BaseException as error:
            self._done.set_exception(error)

    def result(self, patience_s: float) -> Any:
        """What ``work`` returned or raised; BootstrapError if that takes longer than ``patience_s``."""
        try:
            wait([self._done], patience_s)
        except BaseException:  # Ctrl-C
            self._done.cancel()
            raise
        if self._done.done():
            return self._done.result()
        if self._done.cancel():
            raise BootstrapError(f"group {self._group!r} is busy with another change; this one was not begun")
        raise BootstrapError(f"group {self._group!r}: this change has begun and is not done after {patience_s:g} s")
