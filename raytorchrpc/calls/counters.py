"""Counters of a member's calls, and the statistics that a group shows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raytorchrpc.text import tables as text_tables


@dataclass(frozen=True)
class PairStats:
    """Calls from one member to another over one lane since the group was formed.

    ``bytes_out`` and ``bytes_in`` count pickles and tensors. ``seconds`` is the total time from sending a call to
    taking its result, of the calls whose result was taken. ``latency[n]`` counts those that took at least 2 ** (n - 1)
    and less than 2 ** n microseconds; the last entry counts all longer ones. ``errors`` counts failed calls by the name
    of the exception's type.
    """

    caller: str
    peer: str
    lane: str
    calls: int = 0
    failures: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0
    errors: tuple[tuple[str, int], ...] = ()
    latency: tuple[int, ...] = ()

    @property
    def finished(self) -> int:
        """Calls whose result was taken."""
        return sum(self.latency)


#: Entries of ``PairStats.latency``: the last but one ends at 67 s.
BUCKETS = 28
_LAST = BUCKETS - 1


class GroupStats(tuple[PairStats, ...]):
    """Rows of ``PairStats``; prints as a table.

    Attributes:
        missing: members that did not answer in time (busy in a method, of which Ray runs one at a time).
    """

    missing: tuple[str, ...]

    def __new__(cls, rows: Iterable[PairStats] = (), missing: Sequence[str] = ()) -> GroupStats:
        self = super().__new__(cls, rows)
        self.missing = tuple(missing)
        return self

    def __getnewargs__(self) -> tuple[tuple[PairStats, ...], tuple[str, ...]]:
        return tuple(self), self.missing

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int | None = None) -> str:
        """The rows as text. ``width``: columns that are available; None: those of the terminal, or 120 without one."""
        width = text_tables.terminal_columns() if width is None else width
        rows = [
            (
                *(row.caller, row.peer, row.lane, str(row.calls), str(row.failures)),
                *(f"{row.bytes_out / 1e6:.3f}", f"{row.bytes_in / 1e6:.3f}"),
                f"{1000 * row.seconds / row.calls if row.calls else 0.0:.3f}",
            )
            for row in self
        ]
        heads = ("caller", "peer", "lane", "calls", "failed", "MB out", "MB in", "ms/call")
        text = text_tables.table(heads, rows, width=width, right=5)
        return f"{text}\nno answer from: {', '.join(self.missing)} (busy or gone)" if self.missing else text


class _Counter:
    __slots__ = ("bytes_in", "bytes_out", "calls", "errors", "failures", "latency", "seconds")

    def __init__(self) -> None:
        self.calls = self.failures = self.bytes_out = self.bytes_in = 0
        self.seconds = 0.0
        self.errors: dict[str, int] = {}
        self.latency = [0] * BUCKETS


class CallCounters:
    """One member's counters. Thread-safe; one short lock per event."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, str], _Counter] = {}

    def sent(self, peer: str, lane: str, size: int) -> None:
        """A call with ``size`` bytes was sent."""
        with self._lock:
            counter = self._counters.get((peer, lane)) or self._new_counter(peer, lane)
            counter.calls += 1
            counter.bytes_out += size

    def finished(
        self, peer: str, lane: str, came_by: str, size: int, seconds: float, error: BaseException | None
    ) -> None:
        """The outcome of a call over ``lane`` was taken; ``size`` bytes came back, over ``came_by``."""
        bucket = min(int(seconds * 1e6).bit_length(), _LAST)
        with self._lock:
            counter = self._counters.get((peer, lane)) or self._new_counter(peer, lane)
            counter.seconds += seconds
            counter.latency[bucket] += 1
            if error is not None:
                counter.failures += 1
                name = type(error).__name__
                counter.errors[name] = counter.errors.get(name, 0) + 1
            if came_by != lane:
                counter = self._counters.get((peer, came_by)) or self._new_counter(peer, came_by)
            counter.bytes_in += size

    def _new_counter(self, peer: str, lane: str) -> _Counter:
        counter = self._counters[peer, lane] = _Counter()
        return counter

    def rows(self, caller: str) -> list[PairStats]:
        """A snapshot of the counters."""
        with self._lock:
            return [
                PairStats(
                    *(caller, peer, lane, c.calls, c.failures, c.bytes_out, c.bytes_in, c.seconds),
                    errors=tuple(c.errors.items()),
                    latency=tuple(c.latency),
                )
                for (peer, lane), c in self._counters.items()
            ]
