"""Reads what a member has counted, and exports it to Ray's metrics, never on the path of a call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from raytorchrpc.calls.counters import merged
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.metrics import METRICS, MemberStats, Reading, Samples, samples
from raytorchrpc.process.locks import Lock

logger = logging.getLogger(__name__)

#: ``meter(value, tags)``: increases a counter by a value above 0, or sets a gauge.
Meter = Callable[[float, dict[str, str]], None]

#: How often the totals are exported (seconds): as often as Ray sends metrics to the agent of the node.
TOTALS_S = 10.0


def ray_meters() -> dict[str, Meter]:
    """The meters of ``ray.util.metrics``, by the keys of METRICS."""
    from ray.util.metrics import Counter, Gauge  # here: joining does not need them

    found: dict[str, Meter] = {}
    for key, metric in METRICS.items():
        about = f"raytorchrpc_{key}", metric.help, ("group", "member", *metric.labels)
        found[key] = Counter(*about).inc if metric.kind == "counter" else Gauge(*about).set
    return found


def reading(local: LocalMember, peers: bool = True) -> Reading:
    """What this member has counted up to now. ``peers`` False: calls are added up over all peers."""
    me, calls = local.me, local.counters.rows(local.me.name)
    credits = local.outgoing.in_flight()
    in_flight = {peer: count for peer, (count, _) in credits.items() if count}
    if not peers:
        calls, in_flight = merged(calls, "caller", "lane", "method"), {"": sum(in_flight.values())}
    away, size = len(local.peers.away()), sum(size for _, size in credits.values())
    mine = MemberStats(me.name, max(0, me.incarnation), away, in_flight, size)
    return Reading(calls, local.services.metric_rows(), local.weights.rows(me.name), [mine])


class Exporter:
    """One per member."""

    def __init__(
        self,
        group: str,
        member: str,
        read: Callable[[], Reading],
        fine: bool,
        meters: Callable[[], Mapping[str, Meter]] = ray_meters,
    ) -> None:
        """``fine``: export all labels and metrics, not the totals alone."""
        self._who = {"group": group, "member": member}
        self._read, self._fine, self._make = read, fine, meters
        self._meters: Mapping[str, Meter] = {}
        self._before: Samples = {}
        self._lock = Lock()
        self._stopped = self._warned = False

    def start(self, local: LocalMember, period_s: float) -> None:
        """Record every ``period_s`` seconds on a worker of the member, and once more when it leaves."""

        def step() -> None:
            self._try_to_record(last=False)
            again()

        def again() -> None:
            local.deadlines.at(time.monotonic() + period_s, lambda: local.workers.submit(step))

        local.before_end.append(lambda: self._try_to_record(last=True))
        again()

    def _try_to_record(self, last: bool) -> None:
        try:
            self.record(last)
        except Exception as error:
            if not self._warned and not last:
                logger.warning("%s cannot export its counters to Ray's metrics: %s", self._who["member"], error)
            self._warned = True

    def record(self, last: bool = False) -> None:
        """Export what was counted since the last time. ``last``: set the gauges to 0, and record no more."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = last
            self._meters = self._meters or self._make()
            found = samples(self._read(), self._fine)
            gone = {series: 0.0 for series in self._before if METRICS[series[0]].kind == "gauge"}
            for (key, values), now in (gone | found).items():
                tags = {**self._who, **dict(zip(METRICS[key].labels, values, strict=True))}
                if METRICS[key].kind == "gauge":
                    self._meters[key](0 if last else now, tags)
                elif (grown := now - self._before.get((key, values), 0)) > 0:
                    self._meters[key](grown, tags)
                else:  # items that return to a queue were not taken
                    found[key, values] = self._before.get((key, values), 0)
            self._before = found
