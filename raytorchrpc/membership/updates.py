"""A member's side of membership changes. The supervisor calls these functions, on a thread of the member's own.

So a member that is busy in a method takes part too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.current import current_local
from raytorchrpc.calls.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import MAX_TIMEOUT_S, CallOptions
from raytorchrpc.calls.peer_table import Absence
from raytorchrpc.calls.scope import Limit, Scope, current_scope
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import NotAMember, RpcTimeout
from raytorchrpc.lanes.base import MessageLane, TensorLane
from raytorchrpc.lanes.torchrpc.agent import process_fabric
from raytorchrpc.membership import join
from raytorchrpc.membership.messages import JoinSpec, Prepared, Table
from raytorchrpc.membership.process_group import Meeting, ProcessGroupInfo, collectives_of
from raytorchrpc.membership.rendezvous import MemberStore, StoreAddress
from raytorchrpc.patterns import handle

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


def prepare_arrivals(generation: str, step: int, arrival: Arrival) -> Prepared:
    """Prepare connections to the arrivals; ``activate`` makes them callable. Returns this member's own addresses."""
    with _applying(generation, step) as local:
        return _prepare_arrivals(local, arrival)


def activate(generation: str, step: int, names: Sequence[str]) -> None:
    """Make arrivals callable: they are members now."""
    with _applying(generation, step) as local:
        _activate(local, names)


def resync(generation: str, step: int, arrival: Arrival, away: Sequence[Loss]) -> Prepared:
    """Apply the full state of the group after a missed announcement: its members, and those away or dead."""
    with _applying(generation, step) as local:
        known = {route.member.name: route.member for route in local.peers.routes}
        members = {member.name: member for member in arrival.table.info.members}
        dead = {loss.name for loss in away if loss.for_good}
        _remove_peers(local, [name for name in known if name not in members and name not in dead])
        late = [
            name
            for name, member in members.items()
            if name not in known or known[name].incarnation < member.incarnation or name in arrival.names
        ]
        for name in known.keys() & set(arrival.names):  # this member was unreachable
            process_fabric().distrust(known[name].rpc_name)
        prepared = _prepare_arrivals(
            local, arrival._replace(names=tuple(name for name in late if name != local.me.name))
        )
        missing = {loss.name for loss in away}
        _activate(local, [name for name in members if name not in missing])
        # A member that joined and died meanwhile was never known here.
        _mark_lost(local, [loss for loss in away if loss.name in members or loss.name in known])
        return prepared


def mark_lost(generation: str, step: int, losses: Sequence[Loss]) -> None:
    """Mark members as lost: calls in flight to them fail, later ones fail at once, and what they held is released."""
    with _applying(generation, step) as local:
        _mark_lost(local, losses)


def remove_peers(generation: str, step: int, names: Sequence[str]) -> None:
    """Remove members from the group."""
    with _applying(generation, step) as local:
        _remove_peers(local, names)


# --- process groups: no changes of the group, so these have no step --------------------------------------------------


def prepare_process_group(generation: str, info: ProcessGroupInfo, is_home: bool, timeout_s: float) -> str | None:
    """See Collectives.prepare."""
    return collectives_of(_member_of(generation)).prepare(info, is_home, timeout_s)


def make_process_group(generation: str, meeting: Meeting) -> None:
    """See Collectives.make."""
    store = MemberStore(partial(_send_to_home, generation, meeting.store))
    collectives_of(_member_of(generation)).make(meeting, store)


def stay_out_of_process_group(generation: str, info: ProcessGroupInfo) -> None:
    """See Collectives.stay_out."""
    collectives_of(_member_of(generation)).stay_out(info)


def give_up_process_group(generation: str, number: int, cause: str) -> None:
    """See Collectives.give_up."""
    collectives_of(_member_of(generation)).give_up(number, cause)


_STORE = "raytorchrpc.process_group_store"
#: The home answers in time that a key is missing; a request waits so much longer for that answer (seconds).
_ANSWER_S = 5.0


def _operate(
    local: LocalMember, caller: int, store_id: str, seconds: float, operation: str, args: tuple[Any, ...]
) -> Any:
    """At the home: run an operation of the store. A wait is answered after so many seconds at the latest."""
    keys = collectives_of(local).keys(store_id)
    result = keys.operate(operation, *args)
    if isinstance(result, DeferredReply):

        def time_out() -> None:
            missing = ", ".join(keys.missing(args[0]))
            keys.give_up(result, RpcTimeout(f"nobody has set {missing} within {seconds:.3g} s"))

        cancel = local.deadlines.at(time.monotonic() + seconds, time_out)
        result.add_done_callback(lambda _: cancel())
    return result


handle.register_service(_STORE, _operate)


def _send_to_home(generation: str, store: StoreAddress, seconds: float, operation: str, args: tuple[Any, ...]) -> Any:
    """See MemberStore. Waits only for the home: neither for an admission to the actor nor for calls in flight."""
    local = _member_of(generation)
    budget = min(MAX_TIMEOUT_S, seconds + _ANSWER_S)
    if store.home == local.me.name:
        result = _operate(local, local.me.rank, store.store_id, seconds, operation, args)
        if not isinstance(result, DeferredReply):
            return result
        result.exception(budget)
        return result.outcome()
    # A scope of its own: torch's timeout counts here, and what the caller has sent to the home does not hold this up.
    before = current_scope.set(Scope(limit=Limit(time.monotonic() + budget)))
    try:
        with torch_internals.autograd_context(torch_internals.NO_CONTEXT):
            request = (store.store_id, seconds, operation, args)
            return Future(local.outgoing.call(store.home, _STORE, request, {}, CallOptions(budget, retry=0))).wait()
    finally:
        current_scope.reset(before)


def _member_of(generation: str) -> LocalMember:
    local = current_local()
    if local is None or local.generation != generation:
        raise NotAMember(f"this process has left generation {generation} of the group")
    return local


@contextmanager
def _applying(generation: str, step: int) -> Iterator[LocalMember]:
    """Applies changes one at a time and in order. Refuses one that arrives late, as after a broken network: the
    supervisor had no answer to it, and sends the full state instead (``resync``).
    """
    local = _member_of(generation)
    with join.changing:
        if step <= local.step:
            raise NotAMember(f"a later change than {step} has taken effect already")
        local.step = step
        yield local


def _prepare_arrivals(local: LocalMember, arrival: Arrival) -> Prepared:
    prepared = join.extend(local, arrival.spec, arrival.table)
    coming = [member for member in arrival.table.info.members if member.name in arrival.names]
    for member in coming:
        local.peers.mark_away(member.rank, _JOINING)
        collectives_of(local).lose(member.name, "it left and came back")
        _part(local, member.name)
    join.add_peers(local, arrival.table, coming)
    join.record_arrivals(arrival.spec, arrival.table, prepared)
    return prepared


def _activate(local: LocalMember, names: Sequence[str]) -> None:
    for name in names:
        local.peers.activate(local.peers.route(name).member.rank)


def _mark_lost(local: LocalMember, losses: Sequence[Loss]) -> None:
    for loss in losses:
        member = local.peers.route(loss.name).member
        if member.incarnation <= loss.incarnation:  # an earlier incarnation was lost before
            local.peers.mark_away(member.rank, Absence(loss.cause, loss.for_good))
            collectives_of(local).lose(loss.name, loss.cause)
            process_fabric().distrust(member.rpc_name)
            _part(local, loss.name)
    join.record_removal([loss.name for loss in losses if loss.for_good])


def _remove_peers(local: LocalMember, names: Sequence[str]) -> None:
    for name in names:
        rank = local.peers.route(name).member.rank
        local.peers.remove_peer(rank)
        collectives_of(local).lose(name, "it was removed from the group")
        _part(local, name)
    join.record_removal(names)


def _part(local: LocalMember, name: str) -> None:
    everything: list[MessageLane | TensorLane] = [*local.lanes, *local.tensor_lanes.values()]
    for lane in everything:
        lane.disconnect(name)
