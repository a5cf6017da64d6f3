"""What members ask of the home of weights, and of one another: the services, at the side that has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.patterns import handle
from raytorchrpc.patterns.weights.published import Mirror, Readable, Weights
from raytorchrpc.patterns.weights.relays import HOME

KIND, MIRROR = "weight store", "mirror of weights"

WAIT, LOOK, WHOLE, PULL = ("raytorchrpc.weights." + name for name in ("wait", "look", "whole", "pull"))
RELEASE, ADVISE, PULLED = ("raytorchrpc.weights." + name for name in ("release", "advise", "pulled"))
LOOK_HERE = "raytorchrpc.weights.look_here"


def weights_of(local: LocalMember, name: str, life: int | None) -> Weights:
    """Raises NotFound."""
    found: Weights = local.services.find(KIND, name, life, local.me.name)
    return found


def mirror_of(local: LocalMember, name: str, life: int | None, home: int) -> Mirror:
    """Of the store of that name and life, whose home has that rank. Made with its first use."""
    return local.services.open(MIRROR, f"{name} {life}", lambda: Mirror(local, home))


def _readable(local: LocalMember, name: str, life: int, mirror: bool) -> Readable:
    if not mirror:
        return weights_of(local, name, life)
    found: Mirror = local.services.find(MIRROR, f"{name} {life}", None, local.me.name)
    return found


def _wait(local: LocalMember, caller: int, name: str, life: int, version: int, wait_s: float) -> int | DeferredReply:
    return weights_of(local, name, life).wait(version, time.monotonic() + wait_s, local.deadlines.at)


def _look(
    local: LocalMember,
    caller: int,
    name: str,
    life: int,
    version: int | None,
    since: int | None,
    layout: int,
    seconds: float,
    kind: str | None,
) -> tuple[tuple[Any, ...], list[torch.Tensor]] | None:
    """``kind``: of the device where the caller would read all of them where they are."""
    weights = weights_of(local, name, life)
    found = weights.look(caller, version, since, layout, seconds)
    if found is None:
        return None
    whole = weights.shelf.leased(found.lease).whole(kind) if found.lease and kind is not None else []
    return tuple(found), _on_the_way(local, caller, whole)


def _on_the_way(local: LocalMember, caller: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """None of them, if a device map is missing: what is asked for next says which."""
    try:
        local.payloads.check_reply(local.peers.route_back(caller), tensors)
    except LaneUnavailable:
        return []
    return tensors


def _pull(
    local: LocalMember,
    caller: int,
    name: str,
    life: int,
    mirror: bool,
    lease: int,
    wanted: Sequence[tuple[int, str | None]],
) -> list[torch.Tensor]:
    return _readable(local, name, life, mirror).shelf.leased(lease).tensors(wanted)


def _whole(
    local: LocalMember,
    caller: int,
    name: str,
    life: int,
    mirror: bool,
    lease: int,
    wanted: Sequence[tuple[int, str | None]],
    kind: str,
) -> list[torch.Tensor]:
    """See Snapshot.wholes."""
    return _on_the_way(local, caller, _readable(local, name, life, mirror).shelf.leased(lease).wholes(kind, wanted))


def _release(local: LocalMember, caller: int, name: str, life: int, mirror: bool, lease: int) -> None:
    _readable(local, name, life, mirror).shelf.release(lease)


def _advise(local: LocalMember, caller: int, name: str, life: int, what: tuple[Any, ...], wait_s: float) -> Any:
    """Where this caller pulls from; see ``_relays``."""
    advice = weights_of(local, name, life).relays.ask(what, _node(local, caller), caller)
    if isinstance(advice, DeferredReply):
        later = advice

        def give_up() -> None:
            later.settle(HOME)

        prevent = local.deadlines.at(time.monotonic() + wait_s, give_up)
        later.add_done_callback(lambda _: prevent())
    return advice


def _pulled(
    local: LocalMember, caller: int, name: str, life: int, what: tuple[Any, ...], leader: int, done: bool
) -> None:
    """It has what it was to pull for its node; or will not (``done`` False); or who led does not have it any more."""
    relays = weights_of(local, name, life).relays
    (relays.done if done else relays.failed)(what, _node(local, leader), leader)


def _look_here(
    local: LocalMember, caller: int, name: str, life: int, signature: str, version: int, seconds: float
) -> int:
    mirror: Mirror | None = local.services.get(MIRROR, f"{name} {life}")
    return 0 if mirror is None else mirror.look(caller, signature, version, seconds)


def _node(local: LocalMember, rank: int) -> str:
    return next((route.member.node_id for route in local.peers.routes if route.member.rank == rank), "")


handle.makes(KIND, lambda local, name, settings: Weights(local, settings))
for _name, _function in (
    (WAIT, _wait),
    (LOOK, _look),
    (PULL, _pull),
    (WHOLE, _whole),
    (RELEASE, _release),
    (ADVISE, _advise),
    (PULLED, _pulled),
    (LOOK_HERE, _look_here),
):
    handle.serve(_name, _function)
