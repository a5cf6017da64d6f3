"""Exports a member's counters to Ray's metrics, on a thread of its own, never on the path of a call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from raytorchrpc.calls.counters import BUCKETS, PairStats
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: A member's rows, and what is in flight by peer: (calls, bytes of arguments).
Reading = tuple[Sequence[PairStats], Mapping[str, tuple[int, int]]]

#: How long the end of a membership waits for the last export (seconds).
_STOP_S = 1.0
_WHO = ("group", "member")
_PAIR = (*_WHO, "peer", "lane")
#: Name -> (description, tags).
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "raytorchrpc_calls": ("Calls sent.", _PAIR),
    "raytorchrpc_failures": ("Calls that failed, by the type of what they raised.", (*_PAIR, "error")),
    "raytorchrpc_bytes": ("Payload and tensors of calls and results.", (*_PAIR, "direction")),
    "raytorchrpc_call_seconds_sum": ("From the sending of calls to their results.", _PAIR),
    "raytorchrpc_call_seconds_bucket": ("Calls that took at most le seconds.", (*_WHO, "lane", "le")),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "raytorchrpc_calls_in_flight": ("Calls without an answer yet.", (*_WHO, "peer")),
    "raytorchrpc_bytes_in_flight": ("Bytes of their arguments.", (*_WHO, "peer")),
}


class Meters(Protocol):
    """Where values go."""

    def add(self, name: str, value: float, tags: dict[str, str]) -> None:
        """Increase one of ``COUNTERS``; ``value`` is above 0."""

    def set(self, name: str, value: float, tags: dict[str, str]) -> None:
        """Set one of ``GAUGES``."""


class RayMeters:
    """The meters of ``ray.util.metrics``."""

    def __init__(self) -> None:
        from ray.util.metrics import Counter, Gauge  # most groups do not export

        self._counters: dict[str, Any] = {name: Counter(name, *about) for name, about in COUNTERS.items()}
        self._gauges: dict[str, Any] = {name: Gauge(name, *about) for name, about in GAUGES.items()}

    def add(self, name: str, value: float, tags: dict[str, str]) -> None:
        self._counters[name].inc(value, tags)

    def set(self, name: str, value: float, tags: dict[str, str]) -> None:
        self._gauges[name].set(value, tags)


class Exporter:
    """One per member. Not thread-safe: after ``start`` only its own thread uses it."""

    def __init__(
        self, group: str, member: str, read: Callable[[], Reading], meters: Callable[[], Meters] = RayMeters
    ) -> None:
        self._who = {"group": group, "member": member}
        self._read, self._make = read, meters
        self._meters: Meters | None = None
        self._before: dict[tuple[str, str], PairStats] = {}
        self._seen: set[str] = set()

    def start(self, period_s: float) -> Callable[[], None]:
        """Record every ``period_s`` seconds. Returns a function that stops it and waits shortly for the last export.

        Raises ThreadShortage.
        """
        stopped = threading.Event()

        warned = False

        def step() -> bool:
            nonlocal warned
            last = stopped.wait(period_s)
            try:
                self.record(last)
            except Exception as error:
                if not warned and not last:
                    logger.warning("%s cannot export its counters to Ray's metrics: %s", self._who["member"], error)
                warned = True
            return not last

        what = f"raytorchrpc-{self._who['member']}-metrics"
        thread = threads.start(threads.serve, step, what, name=what)

        def stop() -> None:
            stopped.set()
            thread.join(_STOP_S)

        return stop

    def record(self, last: bool = False) -> None:
        """Export what was counted since the last time. ``last``: also set the gauges to 0."""
        if self._meters is None:
            self._meters = self._make()
        rows, under_way = self._read()
        for row in rows:
            before = self._before.get((row.peer, row.lane)) or PairStats(row.caller, row.peer, row.lane)
            self._before[row.peer, row.lane] = row
            self._difference(row, before)
        for peer, (calls, size) in under_way.items():
            # A peer that was never called makes no series.
            if calls or peer in self._seen:
                self._seen.add(peer)
                tags = {**self._who, "peer": peer}
                self._meters.set("raytorchrpc_calls_in_flight", 0 if last else calls, tags)
                self._meters.set("raytorchrpc_bytes_in_flight", 0 if last else size, tags)
        for peer in self._seen.difference(under_way):  # it was removed
            self._seen.discard(peer)
            for name in GAUGES:
                self._meters.set(name, 0, {**self._who, "peer": peer})

    def _difference(self, row: PairStats, before: PairStats) -> None:
        pair = {**self._who, "peer": row.peer, "lane": row.lane}
        self._add("raytorchrpc_calls", row.calls - before.calls, pair)
        self._add("raytorchrpc_call_seconds_sum", row.seconds - before.seconds, pair)
        self._add("raytorchrpc_bytes", row.bytes_out - before.bytes_out, {**pair, "direction": "out"})
        self._add("raytorchrpc_bytes", row.bytes_in - before.bytes_in, {**pair, "direction": "in"})
        known = dict(before.errors)
        for error, count in row.errors:
            self._add("raytorchrpc_failures", count - known.get(error, 0), {**pair, "error": error})
        if row.finished == before.finished:
            return
        # Ray's histograms take one value at a time; so this one is made of counters, cumulative as Prometheus's are.
        lane, total = {**self._who, "lane": row.lane}, 0
        for place, (now, then) in enumerate(zip(row.latency, before.latency or (0,) * BUCKETS, strict=True)):
            total += now - then
            bound = "+Inf" if place == BUCKETS - 1 else f"{2**place / 1e6:g}"
            self._add("raytorchrpc_call_seconds_bucket", total, {**lane, "le": bound})

    def _add(self, name: str, value: float, tags: dict[str, str]) -> None:
        if value > 0 and self._meters is not None:
            self._meters.add(name, value, tags)
