"""The member's side of joining and leaving a group.

The driver calls these functions through Ray (``actor.__ray_call__``), or directly if it is a member itself. Each is
quick and can be repeated. A group forms in three steps: ``probe`` changes nothing, ``prepare`` starts to listen, and
``commit`` connects to the peers and makes the group visible to user code.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.current import current_local, set_local
from raytorchrpc.calls.exposed import take_turns
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.peer_table import Absence
from raytorchrpc.calls.peers import Member, PeerRoute, process_token
from raytorchrpc.calls.waiting import allow_calls
from raytorchrpc.errors import BootstrapError, ConfigurationError, NotAMember, RayTorchRpcError
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import PeerAddress, PeerLane, Pending
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, process_fabric
from raytorchrpc.lanes.torchrpc.lane import AbsentLane
from raytorchrpc.membership.local_setup import asked_for_gpu, endpoint, exposed_methods, open_lanes
from raytorchrpc.membership.messages import GroupInfo, JoinSpec, Prepared, Probe, Table
from raytorchrpc.membership.ray_metrics import TOTALS_S, Exporter, reading
from raytorchrpc.process.this_process import default_capacity
from raytorchrpc.rdt.api import enable_where_possible
from raytorchrpc.routing.planner import forbidden
from raytorchrpc.tensors.devices import CPU
from raytorchrpc.topology.device_map import gpu_pairs, inverse, way_back

logger = logging.getLogger(__name__)


changing = threading.RLock()  # in a threaded actor ``leave`` may run beside ``prepare`` or ``commit``
_preparing: tuple[JoinSpec, LocalMember] | None = None
_joined: tuple[JoinSpec, Table] | None = None
#: Attempts and generations that were rolled back: a ``prepare`` for them that arrives late is refused.
_given_up: deque[str] = deque(maxlen=64)


def probe(instance: Any, name: str, lanes: Sequence[str] = ()) -> Probe:
    """Describe this process. Changes nothing. ``lanes``: those of other distributions that the group asks for."""
    context, local, info = ray.get_runtime_context(), current_local(), group_info()
    return Probe(
        endpoint=endpoint(name, asked_for_gpu(instance), lanes),
        node_id=context.get_node_id(),
        pid=os.getpid(),
        group=local.group if local else None,
        generation=local.generation if local else None,
        owner=info.owner if info else None,
        agent=process_fabric().identity,
        autograd_id=torch_internals.autograd_id(),
    )


def prepare(instance: Any, spec: JoinSpec) -> Prepared:
    """Start to listen for a group that is forming. Leaves nothing behind if it raises BootstrapError."""
    with changing:
        local = _start(instance, spec)
        addresses = open_lanes(spec, local)
        retries = {name: note.retry for name, note in local.incoming.methods.items() if note.retry}
        return Prepared(AgentIdentity(local.me.rpc_name, local.me.worker_id), addresses, retries, os.getpid())


def _worker_of_rank(rank: int) -> str | None:
    """torch's name of the member of this rank, for torch's own API; None if there is none.

    Raises ConfigurationError if the number is another member's worker id.
    """
    if (local := current_local()) is None:
        return None
    try:
        found = local.peers.route(rank).member
    except NotAMember:
        return None
    if found.worker_id == rank:
        return found.rpc_name
    others = (route.member for route in local.peers.routes)
    other = next((member for member in others if member.worker_id == rank), None)
    if other is not None:
        raise ConfigurationError(
            f"{rank} is the rank of {found.name!r} and the worker id of {other.name!r}: pass the rpc_name of the Member"
        )
    return found.rpc_name


def _start(instance: Any, spec: JoinSpec) -> LocalMember:
    """The member, without lanes; ends what this process was a part of before."""
    global _preparing
    if spec.attempt in _given_up or spec.generation in _given_up:
        raise BootstrapError(f"group {spec.group!r} was rolled back before {spec.name!r} could prepare")
    if (stale := current_local()) is not None:
        if stale.generation != spec.replaces:
            raise BootstrapError(f"{spec.name!r} has joined group {stale.group!r} meanwhile")
        if stale.generation != spec.generation:
            logger.warning("%s leaves group %r, which has ended", stale.me.name, stale.group)
        leave(instance, stale.generation)
    if _preparing is not None:  # an earlier attempt that was not rolled back
        leave(instance, _preparing[0].generation)
    fabric = process_fabric()
    fabric.start(spec.agent, renew=spec.renew_agent)
    identity = fabric.identity
    if identity is None:
        raise BootstrapError(f"the torchrpc agent of {spec.name!r} was stopped while it joined")
    torch_internals.find_workers_by(_worker_of_rank)
    torch_internals.wait_for_rrefs_inside(allow_calls)
    me = replace(spec.member, rpc_name=identity.name, worker_id=identity.worker_id)
    max_bytes = spec.config.max_bytes_in_flight or default_capacity()
    methods = exposed_methods(instance)
    take_turns()
    local = LocalMember(spec.group, spec.generation, me, spec.config, instance, methods, max_bytes)
    _preparing = spec, local  # from here on ``leave`` undoes it
    if spec.config.switch_interval_s is not None:
        local.at_end.append(partial(sys.setswitchinterval, sys.getswitchinterval()))
        sys.setswitchinterval(spec.config.switch_interval_s)
    return local


def commit(instance: Any, table: Table) -> None:
    """Connect to the peers, check that they answer, then become a member. Raises BootstrapError naming those that do
    not.
    """
    global _preparing, _joined
    preparing = _preparing
    if preparing is None or preparing[0].generation != table.info.generation:
        raise BootstrapError(f"group {table.info.name!r} was rolled back while it formed")
    spec, local = preparing
    for peer in table.info.members:
        if peer.name == spec.name:
            local.me = peer
    add_peers(local, table, [peer for peer in table.info.members if peer.name != spec.name])
    local.peers.add_peer(route_to(local, local.me, table))
    for name, cause in table.away.items():
        local.peers.mark_away(local.peers.route(name).member.rank, Absence(cause, for_good=False))
    _reach_all(local, table, frozenset(spec.by_tcp))
    with changing:
        if _preparing is not preparing:
            raise BootstrapError(f"group {table.info.name!r} was rolled back while it formed")
        if (period_s := spec.config.metrics_period_s) != 0:
            read, fine = partial(reading, local, peers=False), period_s is not None
            Exporter(local.group, local.me.name, read, fine).start(local, TOTALS_S if period_s is None else period_s)
        set_local(local)
        _preparing, _joined = None, (spec, table)
    enable_where_possible()  # also in actors that Ray restarted, or that another actor created


def add_peers(local: LocalMember, table: Table, peers: Sequence[Member]) -> None:
    """Add peers. Quick: the first call connects."""
    me, maps = local.me.name, table.info.device_maps
    back = {peer.name: inverse(gpu_pairs(maps.get(peer.name, {}).get(me, {}))) for peer in peers}
    for lane in lanes_of(local):
        lane.connect(
            [
                PeerAddress(peer.name, addresses[lane.name], back[peer.name])
                for peer in peers
                if lane.name in (addresses := table.peers[peer.name].addresses)
            ]
        )
    for peer in peers:
        local.peers.add_peer(route_to(local, peer, table))


def route_to(local: LocalMember, peer: Member, table: Table) -> PeerRoute:
    """The lanes by which this member reaches ``peer``, or itself."""
    me, info, prepared = local.me, table.info, table.peers[peer.name]
    lanes = {lane.name: lane for lane in local.lanes}
    token = process_token(info.generation, peer.rank, peer.incarnation)
    if peer.rank == me.rank:
        refused = forbidden(info.config, registry.FABRIC)
        fabric = AbsentLane(refused) if refused else lanes[registry.FABRIC]
        return PeerRoute(peer, lanes[registry.LOOPBACK], lanes[registry.LOOPBACK], fabric, token=token)
    route = info.plan.route(me.name, peer.name)
    outward = info.device_maps.get(me.name, {}).get(peer.name, {})
    inward = info.device_maps.get(peer.name, {}).get(me.name, {})
    refused = route.why_not(registry.FABRIC)
    fabric = AbsentLane(refused) if refused else lanes[registry.FABRIC]
    best = {choice.traffic: choice for choice in reversed(route.tensor_lanes)}  # the preferred lane for each kind
    opened = local.tensor_lanes.keys() & prepared.addresses.keys()
    return PeerRoute(
        peer,
        lanes[route.message_lane],
        lanes[route.in_band_lane] if route.in_band_lane else fabric,
        fabric,
        {kind: choice.lane for kind, choice in best.items() if choice.out_of_band and choice.lane in opened},
        outward,
        way_back(inward),
        inward.get(CPU),
        frozenset(route.same_gpus_from(me.name)),
        token,
        prepared.retries,
        same_clock=me.node_id == peer.node_id,
    )


def extend(local: LocalMember, spec: JoinSpec, table: Table) -> Prepared:
    """Open the lanes that arrivals need and that are not open yet; returns all addresses of this member."""
    before = table.peers[spec.name]
    process_fabric().admit(spec.agent.admitted)
    addresses = {**before.addresses, **open_lanes(spec, local)}
    for each in lanes_of(local):
        changed = each.reach(spec.tcp_host, frozenset(spec.by_tcp))
        if changed is not None:
            addresses[each.name] = changed
    return before._replace(addresses=addresses)


def record_arrivals(spec: JoinSpec, table: Table, prepared: Prepared) -> None:
    """Record the group with its arrivals. ``table`` may hold only what is new."""
    global _joined
    if _joined is not None:
        table = _merged(_joined[1], table)
    _joined = spec, table._replace(peers={**table.peers, spec.name: prepared})


def _merged(known: Table, new: Table) -> Table:
    """The known table, with the entries of ``new`` added or in place of older ones."""
    before, now = known.info, new.info
    coming = {member.name for member in now.members}
    members = sorted((*(m for m in before.members if m.name not in coming), *now.members), key=lambda m: m.rank)
    agents = {**before.plan.agents, **now.plan.agents}
    plan = replace(
        before.plan,
        agents={member.name: agents[member.name] for member in members},
        routes={**before.plan.routes, **now.plan.routes},
    )
    maps = {name: dict(now.device_maps.get(name, {})) for name in agents}
    for name, row in before.device_maps.items():
        if name not in coming:
            maps[name] = {**{peer: pairs for peer, pairs in row.items() if peer not in coming}, **maps.get(name, {})}
    info = now._replace(members=tuple(members), plan=plan, device_maps=maps)
    return new._replace(info=info, peers={**known.peers, **new.peers})


def record_removal(names: Sequence[str]) -> None:
    """Record the group without these members."""
    global _joined
    if _joined is not None:
        spec, table = _joined
        members = tuple(member for member in table.info.members if member.name not in names)
        _joined = spec, table._replace(info=table.info._replace(members=members))


def lanes_of(local: LocalMember) -> list[PeerLane]:
    return [*local.lanes, *local.tensor_lanes.values()]


def _reach_all(local: LocalMember, table: Table, far_away: Set[str]) -> None:
    """Check that this member reaches the others.

    Between network namespaces, ping every peer over every message lane, as a firewall may block one of them. Within a
    namespace one ping per listener is enough, from its neighbour in rank: forming a group of n members on one host then
    takes n pings instead of n * (n - 1).
    """
    deadline = time.monotonic() + table.timeout_s
    asked: list[tuple[str, str, Pending]] = []
    silent: dict[str, str] = {}
    left_out = {*table.away, *table.silent}
    reachable = [route for route in local.peers.routes if route.member.name not in left_out]
    ranks = [route.member.rank for route in reachable]
    neighbour = ranks[(ranks.index(local.me.rank) + 1) % len(ranks)]
    for route in reachable:
        far = route.member.name in far_away
        if route.member.rank == local.me.rank or not (far or route.member.rank == neighbour):
            continue
        routes = {route.calls, route.tensors, route.fabric} if far else {route.calls}
        for lane in (lane for lane in routes if not isinstance(lane, AbsentLane)):
            try:
                pending = local.outgoing.control(route, lane, protocol.PING, table.timeout_s)
                asked.append((route.member.name, lane.name, pending))
            except RayTorchRpcError as error:
                silent[route.member.name] = f"{error}"
    for name, lane_name, pending in asked:
        try:
            if not pending.wait(max(0.0, deadline - time.monotonic())):
                raise BootstrapError(f"no answer over {lane_name} in time")
            pending.take()
        except RayTorchRpcError as error:
            silent[name] = f"{error}"
    if silent:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in silent.items())
        raise BootstrapError(f"{local.me.name!r} cannot reach {reasons}", members=(local.me.name, *silent))


def leave(instance: Any, generation: str, for_good: bool = False) -> None:
    """Leave that generation of a group, formed or forming. Idempotent.

    ``for_good``: the generation has ended; a ``prepare`` for it that arrives later is refused.
    """
    if for_good:
        _given_up.append(generation)
    with changing:
        _leave(lambda spec: spec.generation == generation)


def give_up(instance: Any, attempt: str) -> None:
    """Roll back an attempt to join; a ``prepare`` for it that arrives later is refused. Idempotent."""
    with changing:
        _given_up.append(attempt)
        _leave(lambda spec: spec.attempt == attempt)


def _leave(meant: Callable[[JoinSpec], bool]) -> None:
    global _preparing, _joined
    if _preparing is not None and meant(_preparing[0]):
        (_, local), _preparing = _preparing, None
        _end(local)
    current = current_local()
    if current is not None and _joined is not None and meant(_joined[0]):
        set_local(None)
        _joined = None
        _end(current)


def _end(local: LocalMember) -> None:
    try:
        local.leave()
    except BaseException:  # Ctrl-C, in a driver: finish leaving first
        local.leave()
        raise


def group_info() -> GroupInfo | None:
    """The group that this process is a member of, or None."""
    return _joined[1].info if _joined else None


def member_of(generation: str) -> LocalMember:
    """This process's membership in that generation of a group. Raises NotAMember if it has left it."""
    local = current_local()
    if local is None or local.generation != generation:
        raise NotAMember(f"this process has left generation {generation} of the group")
    return local
