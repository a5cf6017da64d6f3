"""The status of a group: its members' counters, calls in flight, and members that are away.

Members answer on threads of their own, so no method is disturbed or waited for. Another driver asks the host actor of
a detached group; it sees other groups only if they post their status in the cluster's key-value store, which
``GroupConfig.metrics_period_s`` turns on.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.counters import PairStats
from raytorchrpc.calls.weight_counters import WeightStats
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.roster import Roster
from raytorchrpc.membership.join import member_of
from raytorchrpc.membership.ray_metrics import Reading, reading
from raytorchrpc.process import threads

if TYPE_CHECKING:
    from pydantic import TypeAdapter

logger = logging.getLogger(__name__)

#: For the members to answer (seconds).
STATUS_S = 2.0
#: Where statuses are posted.
_POSTS = "looks/"


class UnderWay(NamedTuple):
    """Calls of one member to another that have no answer yet, and bytes of their arguments."""

    caller: str
    peer: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class GroupStatus:
    """The status of a group at one time. Goes to JSON and back (``to_json``, ``from_json``)."""

    group: str
    generation: str
    at: float
    """Seconds, by a clock that is the same for every status of this group."""
    members: tuple[str, ...]
    rows: tuple[PairStats, ...]
    under_way: tuple[UnderWay, ...]
    away: dict[str, str]
    """Members that are away, and why."""
    silent: tuple[str, ...]
    """Members that did not answer, though they are not known to be away."""
    posted: float = 0.0
    """Time of day when it was posted (seconds), 0 if it was not."""
    period_s: float = 0.0
    """How often it is posted."""
    weights: tuple[WeightStats, ...] = ()

    def to_json(self) -> bytes:
        return _as_json().dump_json(self)


@functools.cache
def _as_json() -> TypeAdapter[GroupStatus]:
    from pydantic import TypeAdapter  # takes as long to load as the whole of raytorchrpc

    return TypeAdapter(GroupStatus)


def from_json(text: bytes) -> GroupStatus:
    """Raises ValueError for anything else."""
    return _as_json().validate_json(text)


def member_status(generation: str) -> Reading:
    """What this member has counted."""
    return reading(member_of(generation))


def group_status(
    roster: Roster, connections: ControlConnections, away: Mapping[str, str], timeout_s: float = STATUS_S
) -> GroupStatus:
    """Ask all members that are not away. Blocks until all have answered, at most ``timeout_s``."""
    asked = {name: (roster.generation,) for name in roster.records if name not in away}
    found, failures = connections.call_all(member_status, asked, time.monotonic() + timeout_s)
    in_order = {name: found[name] for name in asked if name in found}
    return GroupStatus(
        roster.name,
        roster.generation,
        time.monotonic(),
        tuple(roster.records),
        tuple(row for one in in_order.values() for row in one.rows),
        tuple(
            UnderWay(name, peer, *counts)
            for name, one in in_order.items()
            for peer, counts in one.in_flight.items()
            if counts[0]
        ),
        dict(away),
        tuple(failures),
        weights=tuple(row for one in in_order.values() for row in one.weights),
    )


def post_status(
    status: Callable[[], GroupStatus | None], generation: str, period_s: float, stopped: threading.Event
) -> None:
    """Post the status in the cluster's key-value store, until the group is stopped, and remove the post then.

    Also ends when ``status`` returns None: the cluster is gone. Runs on a thread of its own.
    """
    key = _POSTS + generation
    warned = False

    def post() -> bool:
        nonlocal warned
        try:
            now = status()
            if now is None:
                return False
            ray_internals.store(key, replace(now, posted=time.time(), period_s=period_s).to_json())
        except Exception as error:
            if not warned and not stopped.is_set():
                logger.warning("the status of group generation %s cannot be posted: %s", key, error)
            warned = True
        return not stopped.wait(period_s)

    threads.serve(post, f"the post of group {key}")
    if stopped.is_set():  # else the cluster is not there
        try:
            ray_internals.store(key, None)
        except Exception as error:  # the cluster is gone
            logger.debug("the status of a group stays posted: %s", error)


def posted() -> list[GroupStatus]:
    """The posts that are not out of date: a process that was killed leaves its post behind."""
    found = []
    for text in map(ray_internals.stored, ray_internals.stored_keys(_POSTS)):
        if text is None:  # removed meanwhile
            continue
        try:
            one = from_json(text)
        except ValueError as error:
            logger.debug("posted by another release: %s", error)
            continue
        # Clocks of hosts differ, by seconds at worst.
        if abs(time.time() - one.posted) < 3 * one.period_s + 2 * STATUS_S + 5:
            found.append(one)
    return found
