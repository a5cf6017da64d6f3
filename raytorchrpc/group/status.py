"""A group as it is now, for whoever watches it: what its members counted, what is under way, who is away.

Members answer on threads of their own, so a look disturbs no method and waits for none. A process of another driver
sees a detached group by asking the actor that looks after it; any other group it sees only where that posts its looks
in the cluster, which ``GroupConfig.metrics_period_s`` asks for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.counters import PairStats
from raytorchrpc.calls.current import current_local
from raytorchrpc.errors import NotAMember, RayTorchRpcError
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.roster import Roster
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: For the members to answer (seconds).
LOOK_S = 2.0
#: Where looks are posted.
_LOOKS = "looks/"


class UnderWay(NamedTuple):
    """Calls of one member to another that have no answer yet, and bytes of their arguments."""

    caller: str
    peer: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class GroupStatus:
    """One look at a group. Goes to JSON and back (``to_json``, ``from_json``)."""

    group: str
    generation: str
    at: float
    """Seconds, by a clock that is the same for all looks at this group."""
    members: tuple[str, ...]
    rows: tuple[PairStats, ...]
    under_way: tuple[UnderWay, ...]
    away: dict[str, str]
    """Who is gone for now, and why."""
    silent: tuple[str, ...]
    """Who did not answer, though nobody says that they are gone."""
    posted: float = 0.0
    """Time of day when it was posted (seconds), 0 if it was not."""
    period_s: float = 0.0
    """How often it is posted."""

    def to_json(self) -> bytes:
        """As ``from_json`` reads it."""
        return _AS_JSON.dump_json(self)


_AS_JSON = TypeAdapter(GroupStatus)


def from_json(text: bytes) -> GroupStatus:
    """Raises ValueError for what is no look."""
    return _AS_JSON.validate_json(text)


class MemberLook(NamedTuple):
    """One member's part."""

    rows: list[PairStats]
    under_way: dict[str, tuple[int, int]]


def look_here(generation: str) -> MemberLook:
    """This member's."""
    local = current_local()
    if local is None or local.generation != generation:
        raise NotAMember(f"this process has left generation {generation} of the group")
    return MemberLook(local.counters.rows(local.me.name), local.outgoing.in_flight())


def look(roster: Roster, lines: ControlConnections, away: Mapping[str, str], timeout_s: float = LOOK_S) -> GroupStatus:
    """Ask everybody who is there. Blocks until all have answered, at most ``timeout_s``."""
    asked = {name: (roster.generation,) for name in roster.records if name not in roster.local and name not in away}
    found, failures = lines.ask(look_here, asked, time.monotonic() + timeout_s)
    for name in roster.local:
        try:
            found[name] = look_here(roster.generation)
        except RayTorchRpcError as error:
            failures[name] = error
    looks: dict[str, MemberLook] = {name: found[name] for name in roster.records if name in found}
    return GroupStatus(
        roster.name,
        roster.generation,
        time.monotonic(),
        tuple(roster.records),
        tuple(row for each in looks.values() for row in each.rows),
        tuple(
            UnderWay(name, peer, *counts)
            for name, each in looks.items()
            for peer, counts in each.under_way.items()
            if counts[0]
        ),
        dict(away),
        tuple(failures),
    )


# --- where others see it ----------------------------------------------------------------------------------------------


class Post:
    """Posts looks in the cluster's key-value store, on a thread of its own, until the group ends."""

    def __init__(self, look: Callable[[], GroupStatus | None], generation: str, period_s: float) -> None:
        """``look`` returns None once there is nothing to be seen any more: the cluster is not there."""
        self._look, self._key, self._period_s = look, _LOOKS + generation, period_s
        self._stopped = threading.Event()
        self._told = False

    def start(self) -> threading.Thread:
        """Begin to post. Raises ThreadShortage."""
        return threads.start(self._work, name=f"raytorchrpc-post-{self._key}")

    def _work(self) -> None:
        threads.serve(self._post_once, f"the post of group {self._key}")
        if not self._stopped.is_set():  # the cluster is not there
            return
        try:
            ray_internals.store(self._key, None)
        except Exception as error:  # the cluster is gone
            logger.debug("a look at a group stays posted: %s", error)

    def _post_once(self) -> bool:
        try:
            now = self._look()
            if now is None:
                return False
            values = {**now.__dict__, "posted": time.time(), "period_s": self._period_s}
            ray_internals.store(self._key, GroupStatus(**values).to_json())
        except Exception as error:
            if not self._told and not self._stopped.is_set():
                logger.warning("group of generation %s cannot be seen by others: %s", self._key, error)
            self._told = True
        return not self._stopped.wait(self._period_s)

    def stop(self) -> None:
        """Take it down, soon. Idempotent."""
        self._stopped.set()


def posted() -> list[GroupStatus]:
    """What is posted and not out of date: a process that was killed takes nothing down."""
    found = []
    for text in map(ray_internals.stored, ray_internals.stored_keys(_LOOKS)):
        if text is None:  # taken down meanwhile
            continue
        try:
            one = from_json(text)
        except ValidationError as error:
            logger.debug("posted by another release: %s", error)
            continue
        # Clocks of hosts differ, by seconds at worst.
        if abs(time.time() - one.posted) < 3 * one.period_s + 2 * LOOK_S + 5:
            found.append(one)
    return found
