"""Functions that tests run on threads beside their own; what fails there fails the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

PATIENCE_S = 30.0


def in_thread(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Run it on a thread of its own. Returns what waits for its end, for at most so many seconds (``PATIENCE_S`` unless
    it is given another number), and returns what it returns or raises what it raises.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join(patience_s: float = PATIENCE_S) -> Any:
        thread.join(patience_s)
        assert not thread.is_alive(), "it did not return"
        return outcome.result(0)

    return join


def in_threads(function: Callable[[int], object], count: int) -> None:
    """Run it on so many threads at a time, with their numbers, until all have ended."""
    joins = [in_thread(function, number) for number in range(count)]
    for join in joins:
        join(2 * PATIENCE_S)
