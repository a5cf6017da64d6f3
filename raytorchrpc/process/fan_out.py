"""Asks several processes at once, and takes their answers as they come."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from raytorchrpc.errors import RpcTimeout
from raytorchrpc.process import threads

#: Returns what came of one request, or raises.
Outcome = Callable[[], Any]
#: ``begin(name, answered)`` begins a request, without blocking, and calls ``answered(outcome)`` at most once, on any
#: thread. It may raise instead.
Begin = Callable[[str, Callable[[Outcome], object]], object]
#: Results and failures by name.
Answers = tuple[dict[str, Any], dict[str, Exception]]


def failed(error: Exception) -> Outcome:
    """The outcome of a request that has failed."""

    def outcome() -> Any:
        raise error

    return outcome


class Requests:
    """Requests in flight to several processes, by name."""

    def __init__(self, names: Iterable[str], begin: Begin) -> None:
        self._begin = begin
        self._answers: queue.SimpleQueue[tuple[str, Outcome]] = queue.SimpleQueue()
        self.unanswered: dict[str, None] = {}
        for name in names:
            self.ask(name)

    def ask(self, name: str) -> None:
        """Begin a request; one that cannot begin is answered by its failure."""
        self.unanswered[name] = None
        try:
            self._begin(name, lambda outcome: self._answers.put((name, outcome)))
        except Exception as error:
            self._answers.put((name, failed(error)))

    def next(self, until: float) -> tuple[str, Outcome] | None:
        """The next answer. Blocks for it until then (``time.monotonic``); None: there was none."""
        try:
            name, outcome = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        self.unanswered.pop(name, None)
        return name, outcome


def ask_all(
    names: Iterable[str],
    begin: Begin,
    deadline: float,
    *,
    gap_s: float = math.inf,
    fail_fast: bool = False,
    extend: Callable[[Collection[str]], float] = lambda names: 0.0,
    again: Callable[[Exception], bool] = lambda error: False,
) -> Answers:
    """Ask all of these. Blocks for their answers; an RpcTimeout stands for none by the deadline.

    ``gap_s``: once one has answered, wait for each further answer only so long. ``fail_fast``: the first failure ends
    the wait, and those that have not answered are in neither. ``extend``: is given those, once the deadline has passed,
    and returns the next one. ``again``: whether to repeat a request that has failed so.
    """
    results: dict[str, Any] = {}
    failures: dict[str, Exception] = {}
    requests, until = Requests(names, begin), deadline
    while requests.unanswered:
        answer = requests.next(until)
        if answer is None:
            until = extend(requests.unanswered)
            if time.monotonic() < until:
                continue
            failures.update((name, RpcTimeout(f"{name!r} did not answer in time")) for name in requests.unanswered)
            break
        name, outcome = answer
        try:
            results[name] = outcome()
        except Exception as error:
            if time.monotonic() < until and again(error):
                threads.pause()
                requests.ask(name)
                continue
            failures[name] = error
            if fail_fast:
                break
        if gap_s < math.inf:
            until = min(deadline, time.monotonic() + gap_s)
    return results, failures
