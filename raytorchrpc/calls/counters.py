"""Counters of a member's calls."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

Row = TypeVar("Row")

#: Entries of ``PairStats.latency``: the last but one ends at 67 s.
BUCKETS = 28
_LAST = BUCKETS - 1
#: Upper ends of the latencies, in seconds, as Prometheus writes them.
_BOUNDS = (*(f"{2**place / 1e6:g}" for place in range(_LAST)), "+Inf")


@dataclass(slots=True)
class PairStats:
    """Calls from one member to another over one lane since the group was formed.

    ``method`` is a method of the peer, or an operation of one of its queues, topics or stores: ``queue batches.put``.
    Fields that a row adds up over, such as ``method`` in the rows of ``GroupStats`` itself, are empty.

    ``bytes_out`` and ``bytes_in`` count pickles and tensors. ``seconds`` is the total time from sending a call to
    taking its result, of the calls whose result was taken. ``latency[n]`` counts those that took at least 2 ** (n - 1)
    and less than 2 ** n microseconds; the last entry counts all longer ones. ``errors`` counts failed calls by the name
    of the exception's type. ``in_flight``: calls by all lanes without an answer, in rows of ``GroupStats``.
    """

    KEY: ClassVar = ("caller", "peer", "lane", "method")
    COUNTS: ClassVar = ("calls", "bytes_out", "bytes_in", "seconds", "errors", "latency")

    caller: str = ""
    peer: str = ""
    lane: str = ""
    method: str = ""
    calls: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    latency: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    in_flight: int = 0

    @property
    def failures(self) -> int:
        """Calls that failed."""
        return sum(self.errors.values())

    @property
    def finished(self) -> int:
        """Calls whose result was taken."""
        return sum(self.latency)

    @property
    def mean_ms(self) -> float | None:
        """Mean time of the calls whose result was taken, in milliseconds; None if there are none."""
        return 1000 * self.seconds / self.finished if self.finished else None

    @property
    def buckets(self) -> dict[str, int]:
        """By seconds: calls that took at most so long, as Prometheus has them."""
        return dict(zip(_BOUNDS, accumulate(self.latency), strict=True)) if self.finished else {}


def difference(now: Row, then: Row) -> Row:
    """``now`` with what its counts have grown by."""

    def grown(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return {key: count - b.get(key, 0) for key, count in a.items() if count > b.get(key, 0)}
        return [*map(operator.sub, a, b)] if isinstance(a, list) else a - b

    row: Any = now
    counts: Row = replace(row, **{name: grown(getattr(now, name), getattr(then, name)) for name in row.COUNTS})
    return counts


def merged(rows: Iterable[PairStats], *keep: str) -> list[PairStats]:
    """Add up the rows that are alike in the fields ``keep``, such as "peer" and "method"; the others become empty."""
    alike: dict[tuple[str, ...], list[PairStats]] = {}
    for row in rows:
        alike.setdefault(tuple(getattr(row, name) for name in keep), []).append(row)
    found = []
    for key, parts in alike.items():
        who: dict[str, Any] = dict(zip(keep, key, strict=True))
        totals = {name: sum(getattr(row, name) for row in parts) for name in PairStats.COUNTS[:4]}
        errors: Counter[str] = Counter()
        for row in parts:
            errors.update(row.errors)
        latency = [*map(sum, zip(*(row.latency for row in parts), strict=True))]
        found.append(PairStats(**who, **totals, errors=dict(errors), latency=latency))
    return found


def counted_name(method: str, args: tuple[Any, ...]) -> str:
    """The name under which a call is counted and traced: a service names its object, as in ``queue batches.put``."""
    if not method.startswith("raytorchrpc."):
        return method
    operation = method.rpartition(".")[2]
    named = len(args) > 1 and type(args[0]) is type(args[1]) is str
    return f"{args[0]} {args[1]}.{operation}" if named else f"({operation})"


class CallCounters:
    """One member's counters, by peer, lane and method. Thread-safe; one short lock per event."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, str, str], PairStats] = {}

    def sent(self, peer: str, lane: str, method: str, size: int) -> None:
        """A call with ``size`` bytes was sent. ``method``: see ``counted_name``."""
        with self._lock:
            counter = self._counters.get((peer, lane, method)) or self._new_counter(peer, lane, method)
            counter.calls += 1
            counter.bytes_out += size

    def finished(
        self, peer: str, lane: str, method: str, came_by: str, size: int, seconds: float, error: BaseException | None
    ) -> None:
        """The outcome of a call over ``lane`` was taken; ``size`` bytes came back, over ``came_by``."""
        bucket = min(int(seconds * 1e6).bit_length(), _LAST)
        with self._lock:
            counter = self._counters.get((peer, lane, method)) or self._new_counter(peer, lane, method)
            counter.seconds += seconds
            counter.latency[bucket] += 1
            if error is not None:
                name = type(error).__name__
                counter.errors[name] = counter.errors.get(name, 0) + 1
            if came_by != lane:
                counter = self._counters.get((peer, came_by, method)) or self._new_counter(peer, came_by, method)
            counter.bytes_in += size

    def _new_counter(self, peer: str, lane: str, method: str) -> PairStats:
        counter = self._counters[peer, lane, method] = PairStats("", peer, lane, method)
        return counter

    def rows(self, caller: str) -> list[PairStats]:
        """A snapshot of the counters."""
        with self._lock:
            counters = self._counters.values()
            return [replace(row, caller=caller, errors={**row.errors}, latency=[*row.latency]) for row in counters]
