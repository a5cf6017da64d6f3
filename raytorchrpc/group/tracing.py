"""Traces a whole group: has every member record, collects the events and writes them to one file.

The supervisor's connections carry the requests, so a member that is busy in a method takes part too.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.spans import Event, MemberTrace, Tracer
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.roster import Roster
from raytorchrpc.process.locks import Lock

#: A member stops recording by itself after this (seconds): the process that asked for it may have ended.
LIMIT_S = 3600.0
#: To begin, and to return the events (seconds).
BEGIN_S, COLLECT_S = 5.0, 30.0
#: Round trips from which a clock is estimated.
_ROUND_TRIPS = 8

# --- at a member ----------------------------------------------------------------------------------------------------


def begin(local: LocalMember, capacity: int) -> None:
    """Start recording; drops earlier events."""
    tracer = Tracer(local.me.rank, capacity)
    local.trace(tracer)

    def stop() -> None:
        if local.tracer is tracer:
            local.trace(None)

    tracer.forget_limit = local.deadlines.at(time.monotonic() + LIMIT_S, stop)


def take(local: LocalMember) -> MemberTrace | None:
    """Stop recording; returns the events, or None if this process joined after the trace began."""
    tracer = local.tracer
    if tracer is None:
        return None
    local.trace(None)
    tracer.forget_limit()
    events, dropped, threads = tracer.taken()
    return MemberTrace(local.me.name, local.me.rank, os.getpid(), events, dropped, threads)


def clock(local: LocalMember) -> float:
    """The clock of the recorded times."""
    return time.monotonic()


# --- the supervisor ---------------------------------------------------------------------------------------------------


class Clock(NamedTuple):
    """A member's clock relative to the supervisor's (seconds)."""

    offset_s: float = 0.0
    """Subtract this from the member's times."""
    error_s: float = 0.0
    """The largest error: half of the shortest round trip it was estimated from. 0 on one host, which has one clock."""


class GroupTrace(NamedTuple):
    """The events of all members."""

    group: str
    members: Sequence[MemberTrace]
    clocks: Mapping[str, Clock]
    missing: tuple[str, ...]
    """Members that did not answer, when the trace began or when it ended."""


class Tracing:
    """One per group: begins a trace and ends it. Thread-safe."""

    def __init__(self, connections: ControlConnections) -> None:
        self._connections = connections
        self._lock = Lock()
        self._until = 0.0
        """When the current trace ends by itself; 0: there is none."""

    def begin(self, roster: Roster, capacity: int) -> None:
        """Start a trace. Raises ConfigurationError if the group is being traced already."""
        with self._lock:
            if self._until > time.monotonic():
                raise ConfigurationError(f"group {roster.name!r} is being traced already; end that trace first")
            self._until = time.monotonic() + LIMIT_S
        arguments = dict.fromkeys(roster.records, (capacity,))
        self._connections.call_all(begin, arguments, time.monotonic() + BEGIN_S)

    def end(self, roster: Roster) -> GroupTrace:
        """The events of all members. One that did not begin or answer, or has restarted meanwhile, is missing."""
        try:
            clocks = {name: self._clock(roster, name) for name in roster.records}
            everybody = dict.fromkeys(roster.records, ())
            traces, _ = self._connections.call_all(take, everybody, time.monotonic() + COLLECT_S)
        finally:
            with self._lock:
                self._until = 0.0
        members = [traces[name] for name in roster.records if traces.get(name) is not None]
        missing = roster.records.keys() - {member.name for member in members}
        return GroupTrace(roster.name, members, clocks, tuple(sorted(missing)))

    def _clock(self, roster: Roster, name: str) -> Clock:
        if roster.watcher.same_host(roster.records[name].probe.endpoint):
            return Clock()
        estimates: list[Clock] = []
        for _ in range(_ROUND_TRIPS):
            sent = time.monotonic()
            answers, _failures = self._connections.call_all(clock, {name: ()}, sent + 1.0)
            back = time.monotonic()
            if name not in answers:
                break
            estimates.append(Clock(answers[name] - (sent + back) / 2, (back - sent) / 2))
        return min(estimates, key=lambda estimate: estimate.error_s, default=Clock())


# --- what a user holds -----------------------------------------------------------------------------------------------


class Trace:
    """A trace of a group. Created by ``Group.trace``; a context manager. Its attributes are set when the block ends.

    Attributes:
        events: the number of events written.
        dropped: by member, the number of its oldest events that were dropped.
        missing: members that were not traced from beginning to end: away, added, or restarted meanwhile.
        clock_error_s: the largest error between the clocks of two hosts, in seconds; 0 on one host.
    """

    def __init__(
        self, path: str | os.PathLike[str], begin: Callable[[], object], end: Callable[[], GroupTrace]
    ) -> None:
        """``begin``, ``end``: have the members record, and return what they recorded."""
        self.path, self._begin, self._end = Path(path), begin, end
        self.events = 0
        self.dropped: dict[str, int] = {}
        self.missing: tuple[str, ...] = ()
        self.clock_error_s = 0.0

    def __enter__(self) -> Trace:
        if not self.path.parent.is_dir():  # fail before tracing, not after
            raise ConfigurationError(
                f"cannot write a trace to {self.path}: the folder {self.path.parent} does not exist"
            )
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        collected = self._end()
        self.events = sum(len(member.events) for member in collected.members)
        self.dropped = {member.name: member.dropped for member in collected.members if member.dropped}
        self.missing = collected.missing
        errors = sorted((one.error_s for one in collected.clocks.values()), reverse=True)
        self.clock_error_s = sum(errors[:2])  # between two hosts, neither of which may be the supervisor's
        self.path.write_text(json.dumps(chrome(collected)))


# --- Chrome's trace event format, which Perfetto and chrome://tracing open --------------------------------------------

#: Tracks of events that may overlap, by kind.
_OVERLAPPING = {"call": "calls in flight", "serve": "coroutines"}
#: The resolution of the file's times (microseconds).
_TICK_US = 0.001


def chrome(trace: GroupTrace) -> dict[str, Any]:
    """The whole file, as data for ``json``. Times are microseconds since shortly before the first event."""
    begins = [event.begin - trace.clocks[member.name].offset_s for member in trace.members for event in member.events]
    start = min(begins, default=0.0) - _TICK_US / 1e6
    joined = _marks(trace.members, "call") & _marks(trace.members, "serve")
    events: list[dict[str, Any]] = []
    for member in trace.members:
        events += _of_member(member, start + trace.clocks[member.name].offset_s, joined)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "group": trace.group,
            "missing": list(trace.missing),
            "dropped": {member.name: member.dropped for member in trace.members if member.dropped},
            "clock_error_us": {name: round(clock.error_s * 1e6, 1) for name, clock in trace.clocks.items()},
        },
    }


def _marks(members: Sequence[MemberTrace], kind: str) -> set[int]:
    return {event.mark for member in members for event in member.events if event.kind == kind and event.mark}


def _of_member(member: MemberTrace, start: float, joined: set[int]) -> list[dict[str, Any]]:
    pid = member.rank + 1  # for viewers, 0 is the kernel
    tracks = _Tracks(member, pid)
    rows: list[dict[str, Any]] = []
    for event in sorted(member.events, key=lambda event: (event.begin, -event.end)):
        begin, end = (round((time - start) * 1e6, 3) for time in (event.begin, event.end))
        where = {"pid": pid, "tid": tracks.of(event), "ts": begin}
        duration = round(end - begin, 3)
        rows.append({"ph": "X", "name": event.name, "cat": event.kind, "dur": duration, "args": event.about, **where})
        if event.mark in joined:
            arrow = {"name": "call", "cat": "call", "id": f"{event.mark:x}", **where}
            if event.kind == "call":
                rows.append({**arrow, "ph": "s"})
            else:  # points at the next span: a fetch begins together with the method, and lies inside of it
                rows.append({**arrow, "ph": "f", "ts": round(begin - _TICK_US, 3)})
    about: list[dict[str, Any]] = [
        {"name": "process_name", "args": {"name": f"{member.name} (pid {member.pid})"}},
        {"name": "process_sort_index", "args": {"sort_index": member.rank}},
    ]
    about += [{"name": "thread_name", "tid": tid, "args": {"name": name}} for tid, name in tracks.names.items()]
    return [{"ph": "M", "pid": pid, **each} for each in about] + rows


class _Tracks:
    """One track per thread, and as many as needed for events that overlap: on one track, events have to nest."""

    def __init__(self, member: MemberTrace, pid: int) -> None:
        self._threads, self._pid = member.threads, pid
        self._numbers = itertools.count(pid + 1)
        self._of_threads: dict[int, int] = {}
        self._free_at: dict[str, dict[int, float]] = {kind: {} for kind in _OVERLAPPING}
        """By kind: when each of its tracks is free."""
        self.names: dict[int, str] = {}

    def of(self, event: Event) -> int:
        """The track of an event. Call it in the order in which events begin."""
        if event.thread:
            if event.thread not in self._of_threads:
                self._of_threads[event.thread] = self._new(self._threads.get(event.thread, "thread"))
            return self._of_threads[event.thread]
        free_at = self._free_at[event.kind]
        free = next((tid for tid, end in free_at.items() if end <= event.begin), None)
        tid = self._new(f"{_OVERLAPPING[event.kind]} {len(free_at) + 1}") if free is None else free
        free_at[tid] = event.end
        return tid

    def _new(self, name: str) -> int:
        # Viewers take the thread that has the number of its process for the main thread.
        is_main = name == "MainThread" and self._pid not in self.names
        tid = self._pid if is_main else next(self._numbers)
        self.names[tid] = name
        return tid


def check_events(events: Any) -> None:
    """Raise ConfigurationError unless this is a number of events to keep."""
    if isinstance(events, bool) or not isinstance(events, int) or events < 1:
        raise ConfigurationError(f"events is the number of events each member keeps, 1 or more; not {events!r}")
