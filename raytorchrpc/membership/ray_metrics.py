"""Exports a member's counters to Ray's metrics, on a thread of its own, never on the path of a call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from raytorchrpc.calls.counters import BUCKETS, PairStats
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.weight_counters import WeightStats
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """What a member has counted."""

    rows: Sequence[PairStats]
    in_flight: Mapping[str, tuple[int, int]]
    """By peer: (calls, bytes of arguments)."""
    weights: Sequence[WeightStats]


#: ``meter(value, tags)``: increases a counter by a value above 0, or sets a gauge.
Meter = Callable[[float, dict[str, str]], None]

#: How long the end of a membership waits for the last export (seconds).
_STOP_S = 1.0
_WHO = ("group", "member")
_PAIR = (*_WHO, "peer", "lane")
_STORE = (*_WHO, "store", "home")
#: Name -> (description, tags).
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "raytorchrpc_calls": ("Calls sent.", _PAIR),
    "raytorchrpc_failures": ("Calls that failed, by the type of what they raised.", (*_PAIR, "error")),
    "raytorchrpc_bytes": ("Payload and tensors of calls and results.", (*_PAIR, "direction")),
    "raytorchrpc_call_seconds_sum": ("From the sending of calls to their results.", _PAIR),
    "raytorchrpc_call_seconds_bucket": ("Calls that took at most le seconds.", (*_WHO, "lane", "le")),
    "raytorchrpc_weight_pulls": ("Pulls of weights, by outcome.", (*_STORE, "outcome")),
    "raytorchrpc_weight_bytes": (
        "Weights that the member brought, and that others brought from it.",
        (*_STORE, "direction"),
    ),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "raytorchrpc_calls_in_flight": ("Calls without an answer yet.", (*_WHO, "peer")),
    "raytorchrpc_bytes_in_flight": ("Bytes of their arguments.", (*_WHO, "peer")),
    "raytorchrpc_weight_version": ("The version of weights pulled or published last.", (*_STORE, "role")),
    "raytorchrpc_weight_version_bytes": ("Bytes of that version, or of the one that arrives.", (*_STORE, "state")),
}


def ray_meters() -> dict[str, Meter]:
    """The meters of ``ray.util.metrics``, by name."""
    from ray.util.metrics import Counter, Gauge  # most groups do not export

    counters = {name: Counter(name, *about).inc for name, about in COUNTERS.items()}
    return {**counters, **{name: Gauge(name, *about).set for name, about in GAUGES.items()}}


def reading(local: LocalMember) -> Reading:
    """What this member has counted up to now."""
    me = local.me.name
    return Reading(local.counters.rows(me), local.outgoing.in_flight(), local.weights.rows(me))


class Exporter:
    """One per member. Not thread-safe: after ``start`` only its own thread uses it."""

    def __init__(
        self,
        group: str,
        member: str,
        read: Callable[[], Reading],
        meters: Callable[[], Mapping[str, Meter]] = ray_meters,
    ) -> None:
        self._who = {"group": group, "member": member}
        self._read, self._make = read, meters
        self._meters: Mapping[str, Meter] = {}
        self._before: dict[tuple[str, str], PairStats] = {}
        self._weights_before: dict[tuple[str, str], WeightStats] = {}
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
        self._meters = self._meters or self._make()
        rows, under_way, weights = self._read()
        for row in rows:
            before = self._before.get((row.peer, row.lane)) or PairStats(row.caller, row.peer, row.lane)
            self._before[row.peer, row.lane] = row
            self._difference(row, before)
        self._seen.update(peer for peer, (calls, _) in under_way.items() if calls)  # others make no series
        for peer in list(self._seen):
            now = (0, 0) if last else under_way.get(peer, (0, 0))
            for name, value in zip(("raytorchrpc_calls_in_flight", "raytorchrpc_bytes_in_flight"), now, strict=True):
                self._meters[name](value, {**self._who, "peer": peer})
            if peer not in under_way:  # it was removed
                self._seen.discard(peer)

        for store in weights:
            self._record_weights(store, last)

    def _record_weights(self, now: WeightStats, last: bool) -> None:
        key, tags = (now.store, now.home), {**self._who, "store": now.store, "home": now.home}
        before = self._weights_before.get(key) or WeightStats(now.member, *key)
        self._weights_before[key] = now
        self._add("raytorchrpc_weight_pulls", now.pulls - before.pulls, {**tags, "outcome": "ok"})
        self._add("raytorchrpc_weight_pulls", now.failures - before.failures, {**tags, "outcome": "failed"})
        self._add("raytorchrpc_weight_bytes", now.bytes_in - before.bytes_in, {**tags, "direction": "in"})
        self._add("raytorchrpc_weight_bytes", now.bytes_out - before.bytes_out, {**tags, "direction": "out"})
        missing = 0 if last else now.missing
        for role, version in (("pulled", now.pulled), ("arriving", now.arriving), ("published", now.published)):
            self._meters["raytorchrpc_weight_version"](version, {**tags, "role": role})
        for state, size in (("brought", now.brought), ("missing", missing), ("served", now.served_of_newest)):
            self._meters["raytorchrpc_weight_version_bytes"](size, {**tags, "state": state})

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
        if value > 0:
            self._meters[name](value, tags)
