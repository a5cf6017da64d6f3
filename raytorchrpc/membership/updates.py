"""A member's side of membership changes. The supervisor calls these functions, on a thread of the member's own.

So a member that is busy in a method takes part too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.peer_table import Absence
from raytorchrpc.errors import NotAMember
from raytorchrpc.lanes.torchrpc.agent import process_fabric
from raytorchrpc.membership import join
from raytorchrpc.membership.messages import JoinSpec, Prepared, Table
from raytorchrpc.membership.process_group import collectives_of

T = TypeVar("T")

_JOINING = Absence("it has not joined yet", for_good=False)


class Arrival(NamedTuple):
    """Members that join, as another member needs them."""

    spec: JoinSpec
    """The receiving member's own, extended for the arrivals."""
    table: Table
    """Of the arrivals and the receiving member; of all members for ``resync``."""
    names: tuple[str, ...]
    """The arrivals: new members, and restarted ones."""


class Loss(NamedTuple):
    """One member that is away."""

    name: str
    incarnation: int
    cause: str
    for_good: bool
    ended: bool = False
    """See ``Absence``."""


def apply(generation: str, step: int, change: Callable[..., T], *args: Any) -> T:
    """Run ``change(local, *args)``, one of the functions below; changes run one at a time and in order.

    Refuses one that arrives late, as after a broken network: the supervisor had no answer to it, and sends the full
    state instead (``resync``).
    """
    local = join.member_of(generation)
    with join.changing:
        if step <= local.step:
            raise NotAMember(f"a later change than {step} has taken effect already")
        local.step = step
        return change(local, *args)


def prepare_arrivals(local: LocalMember, arrival: Arrival) -> Prepared:
    """Prepare connections to the arrivals; ``activate`` makes them callable. Returns this member's own addresses."""
    prepared = join.extend(local, arrival.spec, arrival.table)
    coming = [member for member in arrival.table.info.members if member.name in arrival.names]
    for member in coming:
        local.peers.mark_away(member.rank, _JOINING)
        _part(local, member.name, "it left and came back")
    join.add_peers(local, arrival.table, coming)
    join.record_arrivals(arrival.spec, arrival.table, prepared)
    return prepared


def activate(local: LocalMember, names: Sequence[str]) -> None:
    """Make arrivals callable: they are members now."""
    for name in names:
        local.peers.activate(local.peers.route(name).member.rank)


def resync(local: LocalMember, arrival: Arrival, away: Sequence[Loss]) -> Prepared:
    """Apply the full state of the group after a missed announcement: its members, and those away or dead."""
    known = {route.member.name: route.member for route in local.peers.routes}
    members = {member.name: member for member in arrival.table.info.members}
    dead = {loss.name for loss in away if loss.for_good}
    remove_peers(local, [name for name in known if name not in members and name not in dead])
    arriving = tuple(
        name
        for name, member in members.items()
        if name != local.me.name
        and (name not in known or known[name].incarnation < member.incarnation or name in arrival.names)
    )
    for name in known.keys() & set(arrival.names):  # this member was unreachable
        process_fabric().distrust(known[name].rpc_name)
    prepared = prepare_arrivals(local, arrival._replace(names=arriving))
    missing = {loss.name for loss in away}
    activate(local, [name for name in members if name not in missing])
    # A member that joined and died meanwhile was never known here.
    mark_lost(local, [loss for loss in away if loss.name in members or loss.name in known])
    return prepared


def mark_lost(local: LocalMember, losses: Sequence[Loss]) -> None:
    """Mark members as lost: calls in flight to them fail, later ones fail at once, and what they held is released."""
    for loss in losses:
        member = local.peers.route(loss.name).member
        if member.incarnation <= loss.incarnation:  # an earlier incarnation was lost before
            local.peers.mark_away(member.rank, Absence(loss.cause, loss.for_good, loss.ended))
            process_fabric().distrust(member.rpc_name)
            _part(local, loss.name, loss.cause)
    join.record_removal([loss.name for loss in losses if loss.for_good])


def remove_peers(local: LocalMember, names: Sequence[str]) -> None:
    for name in names:
        local.peers.remove_peer(local.peers.route(name).member.rank)
        _part(local, name, "it was removed from the group")
    join.record_removal(names)


def _part(local: LocalMember, name: str, cause: str) -> None:
    """Disconnect from a peer, and end a process group that includes it."""
    collectives_of(local).lose(name, cause)
    for lane in join.lanes_of(local):
        lane.disconnect(name)
