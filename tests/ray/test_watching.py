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
from raytorchrpc.group.detached import cluster_status
from raytorchrpc.group.status import GroupStatus
from tests.ray.actors import Latch, Peer
from tests.ray.commands import Command
from tests.ray.conftest import Spawn


def settled(check: Callable[[list[GroupStatus]], bool], name: str) -> list[GroupStatus]:
    """Poll: the cluster's store offers nothing to wait on."""
    until = time.monotonic() + 60
    while not check(found := cluster_status(name)) and time.monotonic() < until:
        time.sleep(0.05)
    assert check(found), found
    return found


def test_a_group_that_posts_is_seen_with_its_busy_members_and_not_after_its_end(
    peers: list[Any], latch: Callable[[], Latch]
) -> None:
    a, b, _ = peers
    held = latch()
    config = rtr.GroupConfig(metrics_period_s=0.1)
    with rtr.init_group({"a": a, "b": b}, name="posted", config=config):
        ray.get(a.call.remote("b", "double", 4))
        waiting = a.call.remote("b", "hold", held)  # Ray's queue of a is busy, and so is b
        arrived = held.await_arrival()
        (seen,) = settled(
            lambda found: bool(
                found
                and found[0].under_way
                and not found[0].silent  # none was slow to answer
                and [row.calls for row in found[0].rows] == [2]
            ),
            "posted",
        )
        held.release(arrived)
        assert ray.get(waiting) == "released"
        assert (seen.members, seen.away, seen.silent) == (("a", "b"), {}, ())
        assert [(one.caller, one.peer, one.calls) for one in seen.under_way] == [("a", "b", 1)]
        assert [(row.caller, row.peer, row.lane, row.calls) for row in seen.rows] == [("a", "b", "socket", 2)]
        assert cluster_status("another") == []
    settled(lambda found: not found, "posted")


def test_a_group_that_does_not_post_is_not_seen(peers: list[Any]) -> None:
    with rtr.init_group({"a": peers[0], "b": peers[1]}, name="quiet"):
        assert cluster_status("quiet") == []


@pytest.mark.slow
def test_a_detached_group_is_shown_by_top_in_a_process_of_its_own_and_can_be_traced(
    spawn: Spawn, tmp_path: Path
) -> None:
    a, b = (spawn(Peer, lifetime="detached", name=name, namespace="top") for name in ("a", "b"))
    address = ray.get_runtime_context().gcs_address
    group = rtr.init_group({"a": a, "b": b}, name="seen", detached=True)
    top = Command("top")
    try:
        ray.get(a.call.remote("b", "double", 4))
        code, out, err = top.run("--address", address, "--group", "seen", "--once", "--json", "--interval", "0.2")
        assert code == 0, err
        (seen,) = json.loads(out)
        assert seen["members"] == ["a", "b"] and [pair["lane"] for pair in seen["pairs"]] == ["socket"]
        code, out, err = top.run("--address", address, "--group", "absent", "--once")
        assert (code, out) == (2, "") and err.count("\n") == 1 and "metrics_period_s" in err
        with rtr.get_group("seen").trace(tmp_path / "run.json") as trace:
            ray.get(a.call.remote("b", "double", 4))
        assert (trace.events, trace.missing) == (2, ())
    finally:
        top.end()
        group.shutdown()
