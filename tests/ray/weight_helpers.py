"""What tests of weights run in actors and readers, and one fixture of theirs."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from raytorchrpc.calls.member import process_member
from tests.conformance.peers import wait_until


@pytest.fixture(autouse=True)
def no_group_is_left() -> None:
    """Here one group serves the tests of a module."""


def pretend(nodes: dict[str, str]) -> None:
    """Let this member take itself and the others for members on these nodes."""
    local = process_member()
    for route in local.peers.routes:
        node = nodes.get(route.member.name, route.member.node_id)
        local.peers.add_peer(dataclasses.replace(route, member=dataclasses.replace(route.member, node_id=node)))
    local.me = local.peers.route(local.me.rank).member


def came_from() -> dict[str, int]:
    """Bytes that came to this member, by peer."""
    found: dict[str, int] = {}
    for row in process_member().counters.rows(""):
        found[row.peer] = found.get(row.peer, 0) + row.bytes_in
    return found


def no_readers(store: rtr.WeightStore) -> bool:
    """Whether soon nobody reads from a store of which this member is the home."""
    pool = process_member().services.find(store.kind, store.name, None, "").pool
    return wait_until(lambda: pool.readers == 0, 20)


def pid_of(actor: Any) -> int | None:
    """The process of an actor; None while it restarts."""
    try:
        return int(ray.get(actor.run.remote(os.getpid), timeout=60))
    except ray.exceptions.RayActorError:
        return None
