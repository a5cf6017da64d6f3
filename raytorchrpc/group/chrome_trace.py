"""Converts recorded events to Chrome's trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raytorchrpc.calls.spans import Event, MemberTrace

#: Tracks of events that may overlap, by kind.
_OVERLAPPING = {"call": "calls in flight", "serve": "coroutines"}


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


def chrome(trace: GroupTrace) -> dict[str, Any]:
    """The whole file, as data for ``json``. Times are microseconds since the first event."""
    begins = [event.begin - trace.clocks[member.name].offset_s for member in trace.members for event in member.events]
    start = min(begins, default=0.0)
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
    tracks = _Tracks(member)
    found: list[dict[str, Any]] = []
    for event in sorted(member.events, key=lambda event: (event.begin, -event.end)):
        where = {"pid": member.rank, "tid": tracks.of(event), "ts": round((event.begin - start) * 1e6, 3)}
        duration = round((event.end - event.begin) * 1e6, 3)
        found.append({"ph": "X", "name": event.name, "cat": event.kind, "dur": duration, "args": event.about, **where})
        if event.mark in joined:
            arrow = {"ph": "s"} if event.kind == "call" else {"ph": "f", "bp": "e"}
            found.append({**arrow, "name": "call", "cat": "call", "id": f"{event.mark:x}", **where})
    about: list[dict[str, Any]] = [
        {"name": "process_name", "args": {"name": f"{member.name} (pid {member.pid})"}},
        {"name": "process_sort_index", "args": {"sort_index": member.rank}},
    ]
    about += [{"name": "thread_name", "tid": tid, "args": {"name": name}} for tid, name in tracks.names.items()]
    return [{"ph": "M", "pid": member.rank, **each} for each in about] + found


class _Tracks:
    """One track per thread, and as many as needed for events that overlap: on one track, events have to nest."""

    def __init__(self, member: MemberTrace) -> None:
        self._threads = member.threads
        self._known: dict[int, int] = {}
        self._free_at: dict[str, list[tuple[float, int]]] = {kind: [] for kind in _OVERLAPPING}
        self.names: dict[int, str] = {}

    def of(self, event: Event) -> int:
        """The track of an event. Call it in the order in which events begin."""
        if event.thread:
            if event.thread not in self._known:
                self._known[event.thread] = self._new(self._threads.get(event.thread, "thread"))
            return self._known[event.thread]
        rows = self._free_at[event.kind]
        for place, (end, tid) in enumerate(rows):
            if end <= event.begin:
                rows[place] = (event.end, tid)
                return tid
        tid = self._new(f"{_OVERLAPPING[event.kind]} {len(rows) + 1}")
        rows.append((event.end, tid))
        return tid

    def _new(self, name: str) -> int:
        tid = len(self.names) + 1
        self.names[tid] = name
        return tid
