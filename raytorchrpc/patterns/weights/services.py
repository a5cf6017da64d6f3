"""The services of members that have weights: the home of a store, and members that relay its weights."""

from __future__ import annotations

import time
from typing import Any

import torch

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.patterns.handle import give_up_at, register_factory, register_method
from raytorchrpc.patterns.weights.published import PublishedWeights, Readable
from raytorchrpc.patterns.weights.relays import HOME
from raytorchrpc.patterns.weights.snapshots import Places

KIND, RELAYED = "weight store", "relayed weights"

#: Of a home.
WAIT, LEASE = "raytorchrpc.weights.wait", "raytorchrpc.weights.lease"
ADVISE, REPORT = "raytorchrpc.weights.advise", "raytorchrpc.weights.report"
#: Of a member that relays.
LEASE_RELAYED = "raytorchrpc.weights.lease_relayed"
#: Of both.
TENSORS, PIECES = "raytorchrpc.weights.tensors", "raytorchrpc.weights.pieces"
RELEASE = "raytorchrpc.weights.release"


def relayed_name(name: str, instance_id: int | None) -> str:
    """Return the name under which members relay the weights of this instance of a store."""
    return f"{name} {instance_id}"


def _lease(
    local: LocalMember,
    caller: int,
    weights: PublishedWeights,
    version: int | None,
    since: int | None,
    layout: int,
    seconds: float,
    device_type: str | None,
) -> tuple[tuple[Any, ...], list[torch.Tensor]] | None:
    """``device_type``: if the caller can read all tensors in place on such a device, the answer brings their memory."""
    lease = weights.lease(caller, version, since, layout, seconds)
    if lease is None:
        return None
    in_place = lease.lease and device_type is not None
    whole = weights.pool.leased(lease.lease).whole(device_type) if in_place else []  # type: ignore[arg-type]
    return tuple(lease), _reachable(local, caller, whole)


def _reachable(local: LocalMember, caller: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return no tensors if a device map lacks a mapping to the caller; its next request raises which."""
    try:
        local.payloads.check_reply(local.peers.route_back(caller), tensors)
    except LaneUnavailable:
        return []
    return tensors


def _pieces(
    local: LocalMember, caller: int, weights: Readable, lease: int, places: Places, device_type: str
) -> list[torch.Tensor]:
    return _reachable(local, caller, weights.pool.leased(lease).pieces(device_type, places))


def _advise(local: LocalMember, caller: int, weights: PublishedWeights, what: tuple[Any, ...], wait_s: float) -> Any:
    """Return from where the caller pulls ``what``; see ``relays``. After ``wait_s``, from the home."""
    advice = weights.relays.ask(what, _node(local, caller), caller)
    if not isinstance(advice, DeferredReply):
        return advice

    def pull_from_home() -> None:
        advice.settle(HOME)

    return give_up_at(local.deadlines, time.monotonic() + wait_s, advice, pull_from_home)


def _report(
    local: LocalMember, caller: int, weights: PublishedWeights, what: tuple[Any, ...], leader: int, done: bool
) -> None:
    """Note whether the leader has pulled ``what`` for its node. A reader reports a leader that has lost it."""
    (weights.relays.done if done else weights.relays.failed)(what, _node(local, leader), leader)


def _node(local: LocalMember, rank: int) -> str:
    return next((route.member.node_id for route in local.peers.routes if route.member.rank == rank), "")


register_factory(KIND, lambda local, name, settings: PublishedWeights(local, settings))
register_method(WAIT, lambda _, caller, weights, version, wait_s: weights.wait(version, time.monotonic() + wait_s))
register_method(LEASE, _lease)
register_method(ADVISE, _advise)
register_method(REPORT, _report)
register_method(LEASE_RELAYED, lambda _, caller, weights, *pull: weights.lease(caller, *pull))
register_method(TENSORS, lambda _, caller, weights, lease, places: weights.pool.leased(lease).tensors(places))
register_method(PIECES, _pieces)
register_method(RELEASE, lambda _, caller, weights, lease: weights.pool.release(lease))
