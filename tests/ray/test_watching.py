"""Looks at a group: from the process that formed it, posted in the cluster, and as ``raytorchrpc top`` shows them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from raytorchrpc.group.status import ClusterWatch, GroupStatus
from tests import insides
from tests.polling import wait_until
from tests.ray.actors import Latch, Peer
from tests.ray.commands import Command
from tests.ray.conftest import Spawn


def settled(watch: ClusterWatch, check: Callable[[list[GroupStatus]], bool], name: str) -> list[GroupStatus]:
    """Poll: the cluster's store offers nothing to wait on."""
    until = time.monotonic() + 60
    while not check(found := watch.groups(name)) and time.monotonic() < until:
        time.sleep(0.05)
    assert check(found), found
    return found


def test_a_group_without_a_setting_is_seen_with_its_busy_members_and_not_after_its_end(
    peers: list[Any], latch: Callable[[], Latch]
) -> None:
    a, b, c = peers
    held, watch = latch(), ClusterWatch()

    def wait_for_items() -> None:
        with pytest.raises(rtr.Closed):
            rtr.Queue("empty", home="b").get()

    with rtr.init_group({"a": a, "b": b, "c": c}, name="seen") as group:
        ray.get(a.call.remote("b", "double", 4))
        getting = c.run.remote(wait_for_items)
        waiting = a.call.remote("b", "hold", held)  # Ray's queue of a is busy, and so is b
        arrived = held.await_arrival()

        def is_complete(found: list[GroupStatus]) -> bool:
            """None was slow to answer, or answered before its call was under way."""
            if not found or found[0].silent:
                return False
            in_flight = {row.member: row.in_flight for row in found[0].reading.members}
            return in_flight == {"a": {"b": 1}, "b": {}, "c": {"b": 1}} and bool(found[0].reading.queues[0].getting)

        (seen,) = settled(watch, is_complete, "seen")
        held.release(arrived)
        assert ray.get(waiting) == "released"
        ray.get(b.run.remote(lambda: rtr.Queue("empty").close()))
        ray.get(getting)
        assert (seen.members, seen.away) == (("a", "b", "c"), {})
        rows = {(row.caller, row.peer, row.lane, row.method, row.calls) for row in seen.reading.calls}
        assert {("a", "b", "socket", "double", 1), ("a", "b", "socket", "hold", 1)} <= rows
        assert [(row.name, row.getting) for row in seen.reading.queues] == [("empty", ("c",))]
        assert watch.groups("another") == []
    assert wait_until(lambda: not insides.stored_keys(f"status/{group.generation}"), 20)
    assert watch.groups("seen") == []


@pytest.mark.slow
@pytest.mark.parametrize("detached", [False, True])
def test_a_group_is_shown_by_top_in_a_process_of_its_own_and_can_be_traced(
    detached: bool, spawn: Spawn, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"lifetime": "detached", "namespace": "top"} if detached else {}
    a, b = (spawn(Peer, **options, **({"name": name} if detached else {})) for name in ("a", "b"))
    address = ray.get_runtime_context().gcs_address
    group = rtr.init_group({"a": a, "b": b}, name="seen", detached=detached)
    top = Command("top")
    try:
        ray.get(a.call.remote("b", "double", 4))
        code, out, err = top.run("--address", address, "--group", "seen", "--once", "--json", "--interval", "0.2")
        assert code == 0, err
        (seen,) = json.loads(out)
        assert [row["member"] for row in seen["members"]] == ["a", "b"] and [
            pair["lane"] for pair in seen["pairs"]
        ] == ["socket"]
        assert [row["method"] for row in seen["methods"]] == ["double"] and seen["seconds"] > 0
        code, out, err = top.run("--address", address, "--group", "absent", "--once")
        assert (code, out) == (2, "") and err.count("\n") == 1 and "no group 'absent'" in err
        process = top.start("--address", address, "--group", "seen", "--interval", "0.2")
        assert process.stdout is not None and process.stderr is not None
        assert (
            process.stdout.readline() == "group seen, 2 members, since it was formed\n"
        )  # without a terminal, as `top | head` shows it
        process.stdout.close()
        assert process.wait(60) == 1 and "pipe" not in process.stderr.read()
        with rtr.get_group("seen").trace(tmp_path / "run.json") as trace:
            ray.get(a.call.remote("b", "double", 4))
        assert (trace.events, trace.missing) == (2, ())
    finally:
        top.end()
        group.shutdown()
