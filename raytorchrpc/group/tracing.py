"""Traces a whole group: has every member record, collects the events and writes them to one file.

The supervisor's connections carry the requests, so a member that is busy in a method takes part too.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from raytorchrpc.calls.current import current_local
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.spans import MemberTrace, Tracer
from raytorchrpc.errors import ConfigurationError, NotAMember, RayTorchRpcError
from raytorchrpc.group.chrome_trace import Clock, GroupTrace, chrome
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.host import GroupHost
from raytorchrpc.group.roster import Roster

#: A member stops recording by itself after this (seconds): the process that asked for it may have ended.
LIMIT_S = 3600.0
#: To begin, and to return the events (seconds).
BEGIN_S, COLLECT_S = 5.0, 30.0
#: Round trips from which a clock is estimated.
_ROUND_TRIPS = 8

# --- at a member ----------------------------------------------------------------------------------------------------


def begin(generation: str, capacity: int) -> None:
    """Start recording; drops earlier events."""
    local = _member_of(generation)
    tracer = Tracer(local.me.rank, capacity)
    local.trace(tracer)

    def stop() -> None:
        if local.tracer is tracer:
            local.trace(None)

    tracer.forget_limit = local.deadlines.at(time.monotonic() + LIMIT_S, stop)


def take(generation: str) -> MemberTrace | None:
    """Stop recording; returns the events, or None if this process joined after the trace began."""
    local = _member_of(generation)
    tracer = local.tracer
    if tracer is None:
        return None
    local.trace(None)
    tracer.forget_limit()
    events, dropped, threads = tracer.taken()
    return MemberTrace(local.me.name, local.me.rank, os.getpid(), events, dropped, threads)


def clock() -> float:
    """The clock of the recorded times."""
    return time.monotonic()


def _member_of(generation: str) -> LocalMember:
    local = current_local()
    if local is None or local.generation != generation:
        raise NotAMember(f"this process has left generation {generation} of the group")
    return local


# --- the supervisor ---------------------------------------------------------------------------------------------------


class Tracing:
    """One per group: begins a trace and ends it. Thread-safe."""

    def __init__(self, connections: ControlConnections) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._until = 0.0
        """When the current trace ends by itself; 0: there is none."""
        self._missing: set[str] = set()

    def begin(self, roster: Roster, capacity: int) -> None:
        """Start a trace. Raises ConfigurationError if the group is being traced already."""
        with self._lock:
            if self._until > time.monotonic():
                raise ConfigurationError(f"group {roster.name!r} is being traced already; end that trace first")
            self._until = time.monotonic() + LIMIT_S
        self._missing = self._ask(roster, begin, (roster.generation, capacity), BEGIN_S)[1]

    def end(self, roster: Roster) -> GroupTrace:
        """The events of all members. One that was lost, or has restarted meanwhile, is listed as missing."""
        try:
            clocks = {name: self._clock(roster, name) for name in roster.records}
            found, silent = self._ask(roster, take, (roster.generation,), COLLECT_S)
        finally:
            with self._lock:
                self._until = 0.0
        members = [member for member in found.values() if member is not None]
        there = {member.name for member in members}
        missing = sorted((self._missing | silent | roster.records.keys()) - there)
        return GroupTrace(roster.name, members, clocks, tuple(missing))

    def _ask(
        self, roster: Roster, function: Any, arguments: tuple[Any, ...], patience_s: float
    ) -> tuple[dict[str, Any], set[str]]:
        others = [name for name in roster.records if name not in roster.local]
        found, failures = self._connections.call_all(
            function, dict.fromkeys(others, arguments), time.monotonic() + patience_s
        )
        for name in roster.local:
            try:
                found[name] = function(*arguments)
            except RayTorchRpcError as error:
                failures[name] = error
        return {name: found[name] for name in roster.records if name in found}, set(failures)

    def _clock(self, roster: Roster, name: str) -> Clock:
        if roster.watcher.same_host(roster.records[name].probe.endpoint):
            return Clock()
        best = Clock(0.0, float("inf"))
        for _ in range(_ROUND_TRIPS):
            sent = time.monotonic()
            found, _failures = self._connections.call_all(clock, {name: ()}, sent + 1.0)
            back = time.monotonic()
            if name not in found:
                break
            if (back - sent) / 2 < best.error_s:
                best = Clock(found[name] - (sent + back) / 2, (back - sent) / 2)
        return best if best.error_s < float("inf") else Clock()


# --- what a user holds -----------------------------------------------------------------------------------------------


class Trace:
    """A trace of a group. Created by ``Group.trace``; a context manager. Its attributes are set when the block ends.

    Attributes:
        events: the number of events written.
        dropped: by member, the number of its oldest events that were dropped.
        missing: members that were not traced from beginning to end: away, added, or restarted meanwhile.
        clock_error_s: the largest error between the clocks of two hosts, in seconds; 0 on one host.
    """

    def __init__(self, host: GroupHost, path: str | os.PathLike[str], capacity: int) -> None:
        self._host, self.path, self._capacity = host, Path(path), capacity
        self.events = 0
        self.dropped: dict[str, int] = {}
        self.missing: tuple[str, ...] = ()
        self.clock_error_s = 0.0

    def __enter__(self) -> Trace:
        if not self.path.parent.is_dir():  # fail before tracing, not after
            raise ConfigurationError(
                f"cannot write a trace to {self.path}: the folder {self.path.parent} does not exist"
            )
        self._host.begin_trace(self._capacity)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        found = self._host.end_trace()
        self.events = sum(len(member.events) for member in found.members)
        self.dropped = {member.name: member.dropped for member in found.members if member.dropped}
        self.missing = found.missing
        errors = sorted((one.error_s for one in found.clocks.values()), reverse=True)
        self.clock_error_s = sum(errors[:2])  # between two hosts, neither of which may be the supervisor's
        self.path.write_text(json.dumps(chrome(found)))
