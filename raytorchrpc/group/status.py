"""The status of a group: its members' figures, and members that are away; and their export to Ray's metrics.

Members answer on threads of their own, so no method is disturbed or waited for. ``raytorchrpc top``, in another
process, asks through the cluster's key-value store: groups post their status there while somebody looks.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.counters import merged
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.metrics import METRICS, MemberStats, Reading, Samples, samples
from raytorchrpc.process import threads
from raytorchrpc.process.locks import Lock

if TYPE_CHECKING:
    from pydantic import TypeAdapter

logger = logging.getLogger(__name__)

#: For the members to answer (seconds).
STATUS_S = 2.0
#: How often a group checks whether somebody looks, and posts its status while somebody does (seconds).
PERIOD_S = 1.0
#: A look ends unless it is renewed within this time, and a post counts as old (seconds).
_LOOK_S = 10.0
#: In a post, members of a larger group add up their calls over all peers: its size is linear in the members.
MOST_WITH_PEERS = 32
#: Where statuses are posted, and where a process that looks changes the value.
_POSTS, _LOOKS = "status/", "looking"

#: ``meter(value, tags)``: increases a counter by a value above 0, or sets a gauge.
Meter = Callable[[float, dict[str, str]], None]

#: How often the totals are exported (seconds): as often as Ray sends metrics to the agent of the node.
TOTALS_S = 10.0


@dataclass(frozen=True)
class GroupStatus:
    """The status of a group at one time. Goes to JSON and back (``as_json``)."""

    group: str
    generation: str
    at: float
    """Seconds, by a clock that is the same for every status of this group."""
    members: tuple[str, ...]
    away: dict[str, str]
    """Members that are away, and why."""
    silent: tuple[str, ...]
    """Members that did not answer, though they are not known to be away."""
    reading: Reading


@functools.cache
def as_json() -> TypeAdapter[GroupStatus]:
    from pydantic import TypeAdapter  # takes as long to load as the whole of raytorchrpc

    return TypeAdapter(GroupStatus)


def post_status(
    status: Callable[[], GroupStatus], generation: str, stopped: threading.Event, lasts: Callable[[], bool]
) -> None:
    """Post the status in the cluster's key-value store while somebody looks, until the group is stopped.

    ``lasts``: whether this process is still connected to the cluster; this ends otherwise. Runs on a thread of its own.
    """
    key = _POSTS + generation
    look, until, posted, warned = b"", 0.0, False, False

    def step() -> bool:
        nonlocal look, until, posted, warned
        if stopped.wait(PERIOD_S) or not lasts():
            return False
        try:
            now = ray_internals.stored(_LOOKS) or b""
            if now != look:
                look, until = now, time.monotonic() + _LOOK_S
            if time.monotonic() < until:
                ray_internals.store(key, as_json().dump_json(status()))
                posted = True
            elif posted:
                ray_internals.store(key, None)
                posted = False
        except Exception as error:
            if not warned and not stopped.is_set():
                logger.warning("the status of group generation %s cannot be posted: %s", key, error)
            warned = True
        return True

    about = f"the post of group {key}"
    threads.serve(threads.surviving(step, about), about)
    if posted and stopped.is_set():  # else the cluster is not there
        try:
            ray_internals.store(key, None)
        except Exception as error:  # the cluster is gone
            logger.debug("the status of a group stays posted: %s", error)


class ClusterWatch:
    """Looks at the groups of a cluster. They begin to post within ``PERIOD_S``."""

    def __init__(self) -> None:
        self._posts: dict[str, tuple[float, float, bool]] = {}
        """By key: time of the post by the group's clock, when it was first seen here, and whether it has changed."""

    def groups(self, name: str | None = None) -> list[GroupStatus]:
        """The latest status of each group, or of those of one name. Call it at least every few seconds.

        A post that has not changed since the watch began may be that of a process that was killed, and is left out.
        """
        ray_internals.store(_LOOKS, secrets.token_bytes(8))
        statuses = []
        for key in ray_internals.stored_keys(_POSTS):
            try:
                if (text := ray_internals.stored(key)) is None:  # removed meanwhile
                    continue
                one = as_json().validate_json(text)
            except ValueError as error:
                logger.debug("posted by another release: %s", error)
                continue
            now, (at, seen, changed) = time.monotonic(), self._posts.get(key, (one.at, 0.0, False))
            if at != one.at or key not in self._posts:
                self._posts[key] = at, seen, changed = one.at, now, key in self._posts
            if changed and now < seen + _LOOK_S and name in (None, one.group):
                statuses.append(one)
        return sorted(statuses, key=lambda status: (status.group, status.generation))


# --- what a member has counted ---------------------------------------------------------------------------------------


def _in_ascii(value: str) -> str:
    """As Ray has the values of labels; one that is not would keep all that a member counts from being exported."""
    return value.encode("ascii", "backslashreplace").decode()


def ray_meters() -> dict[str, Meter]:
    """The meters of ``ray.util.metrics``, by the keys of METRICS."""
    from ray.util.metrics import Counter, Gauge  # here: joining does not need them

    meters: dict[str, Meter] = {}
    for key, metric in METRICS.items():
        about = f"raytorchrpc_{key}", metric.help, ("group", "member", *metric.labels)
        meters[key] = Counter(*about).inc if metric.kind == "counter" else Gauge(*about).set
    return meters


def reading(local: LocalMember, peers: bool = True) -> Reading:
    """What this member has counted up to now. ``peers`` False: calls are added up over all peers."""
    me, calls = local.me, local.counters.rows(local.me.name)
    credits = local.outgoing.in_flight()
    in_flight = {peer: count for peer, (count, _) in credits.items() if count}
    if not peers:
        calls, in_flight = merged(calls, "caller", "lane", "method"), {"": sum(in_flight.values())}
    away, size = len(local.peers.away()), sum(size for _, size in credits.values())
    member = MemberStats(me.name, max(0, me.incarnation), away, in_flight, size)
    return Reading(calls, local.services.metric_rows(), local.weights.rows(me.name), [member])


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
        self._who = {"group": _in_ascii(group), "member": member}
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
            current = samples(self._read(), self._fine)
            gone = {series: 0.0 for series in self._before if METRICS[series[0]].kind == "gauge"}
            for (key, values), now in (gone | current).items():
                tags = {**self._who, **dict(zip(METRICS[key].labels, map(_in_ascii, values), strict=True))}
                if METRICS[key].kind == "gauge":
                    self._meters[key](0 if last else now, tags)
                elif (grown := now - self._before.get((key, values), 0)) > 0:
                    self._meters[key](grown, tags)
                else:  # items that return to a queue were not taken
                    current[key, values] = self._before.get((key, values), 0)
            self._before = current
