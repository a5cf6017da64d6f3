"""What tests see inside a member: each function reads the member of the process that it runs in, such as an actor's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from raytorchrpc.calls.counters import PairStats
from raytorchrpc.calls.member import process_member

saved: Any = SimpleNamespace()
"""What a test saves in a process for its next call there. Say ``insides.saved``: a module is pickled by its name."""


def actor() -> Any:
    """The actor of this process."""
    return process_member().incoming.callee.instance


def tensor_lane(name: str) -> Any:
    return process_member().tensor_lanes[name]


def tensor_lanes() -> set[str]:
    """The names of the lanes that this member has for tensors."""
    return {*process_member().tensor_lanes}


def lanes_to(peer: str) -> tuple[str, str]:
    """The names of the lanes for calls and for calls with tensors to this peer."""
    route: Any = process_member().peers.route(peer)
    return route.calls.name, route.tensors.name


def served(kind: str) -> dict[str, Any]:
    """The objects of a kind of which this member is the home, by name."""
    services = process_member().services
    return {name: services.get(kind, name) for name in services.names(kind)}


def at_home(handle: Any) -> Any:
    """The queue, topic or weights of this handle, of which this member is the home."""
    return served(handle.kind)[handle.name]


def counted_calls() -> list[PairStats]:
    """This member's calls, by peer, lane and method."""
    return process_member().counters.rows("")


def is_traced() -> bool:
    local = process_member()
    return local.tracer is not None or local.incoming.tracer is not None


def in_flight() -> dict[str, tuple[int, int]]:
    """By peer: calls without a reply, and bytes of their arguments."""
    return process_member().outgoing.in_flight


def in_flight_to(rank: int) -> tuple[int, int]:
    """Those of one peer."""
    return process_member().credit.in_flight(rank)


def away() -> set[str]:
    """The names of the peers that are away."""
    return {*process_member().peers.away()}


def pretend(nodes: dict[str, str]) -> None:
    """Let this member take itself and the others for members on these nodes. By name; the others stay."""
    local = process_member()
    for route in local.peers.routes:
        node = nodes.get(route.member.name, route.member.node_id)
        local.peers.add_peer(dataclasses.replace(route, member=dataclasses.replace(route.member, node_id=node)))
    local.me = local.peers.route(local.me.rank).member
