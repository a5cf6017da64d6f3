"""From what members recorded to Chrome's trace events: one clock, arrows, tracks on which events nest."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from raytorchrpc.calls.spans import Event, MemberTrace, Tracer
from raytorchrpc.group.tracing import Clock, GroupTrace, chrome


def event(kind: str, begin: float, end: float, *, thread: int = 0, mark: int | None = None, name: str = "b.f") -> Event:
    return Event(kind, name, begin, end, thread, mark, {})


def member(name: str, rank: int, *events: Event, dropped: int = 0) -> MemberTrace:
    return MemberTrace(name, rank, 100 + rank, list(events), dropped, {7: "worker"})


def made(*members: MemberTrace, clocks: dict[str, Clock] | None = None) -> dict[str, Any]:
    known = {one.name: Clock() for one in members} | (clocks or {})
    result = chrome(GroupTrace("g", members, known, ()))
    assert json.loads(json.dumps(result)) == result
    return result


def phase(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [one for one in result["traceEvents"] if one["ph"] == kind]


def test_a_call_and_its_method_are_joined_by_an_arrow() -> None:
    caller = member("a", 0, event("call", 10.0, 10.004, thread=7, mark=5))
    callee = member("b", 1, event("serve", 10.001, 10.003, thread=7, mark=5))
    result = made(caller, callee)
    call, serve = phase(result, "X")
    assert (call["pid"], call["ts"], call["dur"]) == (1, 0.001, 4000.0)
    assert (serve["pid"], serve["ts"], serve["dur"]) == (2, 1000.001, 2000.0)
    (start,), (finish,) = phase(result, "s"), phase(result, "f")
    assert start["id"] == finish["id"]
    for arrow, on in ((start, call), (finish, serve)):
        assert [arrow[key] for key in ("pid", "tid")] == [on[key] for key in ("pid", "tid")]
    assert start["ts"] == call["ts"]
    assert 0 < serve["ts"] - finish["ts"] < 0.002 and "bp" not in finish, "it leads to the next span"
    names = {one["args"].get("name") for one in phase(result, "M")}
    assert {"a (pid 100)", "b (pid 101)", "worker"} <= names


def test_clocks_of_other_hosts_are_brought_to_ours() -> None:
    clocks = {"b": Clock(offset_s=1000.0, error_s=25e-6)}
    caller = member("a", 0, event("call", 10.0, 10.004, thread=7, mark=5))
    callee = member("b", 1, event("serve", 1010.001, 1010.003, thread=7, mark=5))
    result = made(caller, callee, clocks=clocks)
    assert [round(one["ts"]) for one in phase(result, "X")] == [0, 1000]
    assert result["otherData"]["clock_error_us"] == {"a": 0, "b": 25.0}


def test_what_overlaps_has_tracks_of_its_own_and_gives_them_back() -> None:
    flights = [event("call", begin, begin + 3, mark=begin) for begin in (1, 2, 3, 4, 5, 6)]
    result = made(member("a", 0, *flights, event("serve", 1, 9)))
    calls = [one for one in phase(result, "X") if one["cat"] == "call"]
    by_track: dict[int, list[tuple[float, float]]] = {}
    for one in calls:
        by_track.setdefault(one["tid"], []).append((one["ts"], one["ts"] + one["dur"]))
    assert len(by_track) == 3
    for spans in by_track.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))
    assert {one["tid"] for one in phase(result, "X") if one["cat"] == "serve"}.isdisjoint(by_track)


def test_a_full_ring_forgets_the_oldest_and_says_how_many() -> None:
    tracer = Tracer(0, 3)
    for number in range(5):
        tracer.call(f"b.f{number}", caller_waits=True).end()
    events, dropped, threads = tracer.taken()
    assert [one.name for one in events] == ["b.f2", "b.f3", "b.f4"] and dropped == 2
    assert list(threads) == [events[0].thread]
    result = made(MemberTrace("a", 0, 1, events, dropped, threads))
    assert result["otherData"]["dropped"] == {"a": 2}


def test_the_main_thread_alone_has_the_number_of_its_process() -> None:
    """Viewers go by that. And no process has 0, which is the kernel's."""
    threads = {7: "worker", 8: "MainThread"}
    events = [event("call", 1, 2, thread=7), event("call", 3, 4), event("call", 5, 6, thread=8)]
    result = made(*[MemberTrace(name, rank, 1, events, 0, threads) for rank, name in enumerate("ab")])
    named = [one for one in phase(result, "M") if one["name"] == "thread_name"]
    assert {one["pid"] for one in named} == {1, 2}
    for one in named:
        assert (one["pid"] == one["tid"]) == (one["args"]["name"] == "MainThread")
