"""``Group.trace`` of living members: calls, methods, tensors beside messages, in one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.ray.actors import Latch


class Ask:
    """Calls on when it is called; picklable by name."""

    def __init__(self, target: str, then: Ask | None = None) -> None:
        self.target, self.then = target, then

    def __call__(self) -> Any:
        target = rtr.rpc_sync(self.target)
        return target.double(21) if self.then is None else target.give(self.then)


def many(target: str) -> list[int]:
    futures = [rtr.rpc_async(target).double(n) for n in range(5)]
    return [future.wait() for future in futures]


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    result = json.loads(path.read_text())
    return result["traceEvents"], result["otherData"]


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On one track, what begins inside something ends inside it: else a viewer shows nonsense."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in events:
        if one["ph"] == "X":
            tracks.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 0.002:  # rounded to a nanosecond
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002
            open_until.append(end)


def test_a_trace_shows_calls_methods_and_tensors_and_leads_from_one_to_the_other(
    peers: list[Any], special: dict[str, Any], tmp_path: Path, latch: Callable[[], Latch]
) -> None:
    a, b, c = peers
    path, held = tmp_path / "run.json", latch()
    with rtr.init_group({"a": a, "b": b, "busy": c, "loop": special["asynchronous"]}) as group:
        waiting = c.busy.remote(held)
        arrived = held.await_arrival()
        with group.trace(path) as trace:
            assert ray.get(a.run.remote(Ask("b", Ask("a", Ask("b"))))) == 42  # comes back to b, which waits
            assert ray.get(b.run.remote(many, "loop")) == [0, 2, 4, 6, 8]
            ray.get(a.call.remote("b", "double", torch.ones(1 << 20)))
            with pytest.raises(TypeError):
                ray.get(a.call.remote("b", "double"))
        held.release(arrived)
        assert not any(ray.get([one.run.remote(insides.is_traced) for one in (a, b)]))
        ray.get(waiting)
    events, other = read(path)
    check_nesting(events)
    assert (trace.missing, trace.dropped, trace.clock_error_s) == ((), {}, 0.0)
    assert other["group"] == "default" and other["missing"] == []

    def found(category: str, name: str) -> list[dict[str, Any]]:
        return [one for one in events if one["ph"] == "X" and (one["cat"], one["name"]) == (category, name)]

    pids = {one["args"]["name"].split()[0]: one["pid"] for one in events if one["name"] == "process_name"}
    assert set(pids) == {"a", "b", "busy", "loop"}
    assert [one["pid"] for one in found("call", "loop.double")] == [pids["b"]] * 5
    assert {one["pid"] for one in found("serve", "loop.double")} == {pids["loop"]}
    failed = [one for one in found("call", "b.double") if "error" in one["args"]]
    assert [one["args"]["error"] for one in failed] == ["TypeError"]
    assert [one["pid"] for one in found("ship", "ship by shm")] == [pids["a"], pids["b"]]
    assert sorted(one["pid"] for one in found("fetch", "fetch by shm")) == [pids["a"], pids["b"]]
    # The method that came back ran while the call that led to it was waited for.
    (outer,) = found("call", "a.give")
    inner = [one for one in found("serve", "b.double") if outer["ts"] <= one["ts"]]
    assert inner[0]["pid"] == outer["pid"] and inner[0]["ts"] + inner[0]["dur"] <= outer["ts"] + outer["dur"]
    starts = {one["id"]: one for one in events if one["ph"] == "s"}
    ends = {one["id"]: one for one in events if one["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 10
    assert all(starts[mark]["ts"] <= ends[mark]["ts"] for mark in starts)  # one clock on one host
    assert trace.events == sum(one["ph"] == "X" for one in events)


def test_one_trace_at_a_time_and_errors_before_anything_is_recorded(peers: list[Any], tmp_path: Path) -> None:
    with rtr.init_group({"a": peers[0], "b": peers[1]}, include_driver=True) as group:
        with (
            pytest.raises(rtr.ConfigurationError, match="does not exist"),
            group.trace(tmp_path / "not" / "there.json"),
        ):
            pass
        with pytest.raises(rtr.ConfigurationError, match="events is the number"):
            group.trace(tmp_path / "x.json", events=0)
        assert not insides.is_traced()
        with group.trace(tmp_path / "first.json", events=3) as first:
            with pytest.raises(rtr.ConfigurationError, match="traced already"), group.trace(tmp_path / "second.json"):
                pass
            for n in range(5):
                rtr.rpc_sync("a").double(n)
        assert first.dropped == {"a": 2, "driver": 2} and first.events == 6
        assert not insides.is_traced()
        with group.trace(tmp_path / "second.json") as second:
            rtr.rpc_sync("b").double(1)
        assert second.events == 2
