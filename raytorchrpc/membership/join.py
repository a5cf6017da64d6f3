"""What runs inside a member's process when a group forms, ends or is asked: the actor's side of ``group``.

The driver calls these through Ray (``actor.__ray_call__``), or directly when it takes part itself. Each is
quick and safe to repeat. A group forms in three steps, and only the last makes it visible to user code:
``probe`` changes nothing, ``prepare`` starts listening, ``commit`` meets the peers and proves the way to each.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import ray

from raytorchrpc import rdt
from raytorchrpc._compat import torch_internals
from raytorchrpc.calls import incoming
from raytorchrpc.calls.counters import PairStats
from raytorchrpc.calls.current import current_local, set_local
from raytorchrpc.calls.member import Absence, LocalMember
from raytorchrpc.calls.out_of_band import PayloadSplitter
from raytorchrpc.calls.peers import Member, PeerRoute, process_token
from raytorchrpc.errors import BootstrapError, RayTorchRpcError
from raytorchrpc.lanes.base import MessageLane, PeerAddress, Pending, TensorLane
from raytorchrpc.lanes.torchrpc.agent import FabricPeer, process_fabric
from raytorchrpc.lanes.torchrpc.lane import AbsentLane
from raytorchrpc.membership.local_setup import (
    asked_for_gpu,
    endpoint,
    exposed_methods,
    message_lanes,
    nng_lane,
    open_tensor_lanes,
)
from raytorchrpc.membership.messages import GroupInfo, JoinSpec, Prepared, Probe, Table
from raytorchrpc.membership.ray_metrics import Exporter
from raytorchrpc.process.memory import default_capacity
from raytorchrpc.routing.planner import BESIDE, forbidden
from raytorchrpc.tensors.devices import CPU
from raytorchrpc.topology.device_map import gpu_pairs, way_back

logger = logging.getLogger(__name__)


class _Preparing(NamedTuple):
    spec: JoinSpec
    local: LocalMember


class _Joined(NamedTuple):
    spec: JoinSpec
    table: Table


changing = threading.RLock()  # in a threaded actor ``leave`` may come while ``prepare`` or ``commit`` runs
_preparing: _Preparing | None = None
_joined: _Joined | None = None
#: Attempts, and generations, for which this process may still be asked to prepare; the latest will do.
_given_up: deque[str] = deque(maxlen=64)


def probe(instance: Any, name: str) -> Probe:
    """Describe this process. Changes nothing."""
    context = ray.get_runtime_context()
    wants_gpu = asked_for_gpu(instance)
    local, fabric = current_local(), process_fabric()
    return Probe(
        endpoint=endpoint(name, wants_gpu),
        node_id=context.get_node_id(),
        pid=os.getpid(),
        group=local.group if local else None,
        generation=local.generation if local else None,
        owner=_joined.table.info.owner if _joined else None,
        agent=fabric.identity,
        autograd_id=torch_internals.autograd_id(),
    )


def prepare(instance: Any, spec: JoinSpec) -> Prepared:
    """Start listening for a group that is forming. Raises BootstrapError; then nothing is left of it."""
    with changing:
        return _prepare(instance, spec)


def _prepare(instance: Any, spec: JoinSpec) -> Prepared:
    global _preparing
    if spec.attempt in _given_up or spec.generation in _given_up:
        raise BootstrapError(f"group {spec.group!r} was given up before {spec.name!r} could prepare")
    if (stale := current_local()) is not None:
        if stale.generation != spec.replaces:
            raise BootstrapError(f"{spec.name!r} has joined group {stale.group!r} meanwhile")
        logger.warning("%s leaves group %r: whoever formed it is gone", stale.me.name, stale.group)
        leave(instance, stale.generation)
    if _preparing is not None:  # an earlier attempt that nobody rolled back
        leave(instance, _preparing.spec.generation)
    fabric = process_fabric()
    url = fabric.start(spec.agent, renew=spec.renew_agent)
    identity = fabric.identity
    if identity is None:
        raise BootstrapError(f"the torchrpc agent of {spec.name!r} was stopped while it joined")
    me = Member(
        rank=spec.rank,
        name=spec.name,
        actor_id=None if instance is None else ray.get_runtime_context().get_actor_id(),
        node_id=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        rpc_name=identity.name,
        worker_id=identity.worker_id,
        incarnation=spec.incarnation,
    )
    max_bytes = spec.config.max_bytes_in_flight or default_capacity()
    methods = exposed_methods(instance)
    local = LocalMember(spec.group, spec.generation, me, spec.config, instance, methods, max_bytes)
    _preparing = _Preparing(spec, local)  # from here on ``leave`` undoes it
    addresses = open_tensor_lanes(spec, local)
    for lane in message_lanes(instance, spec, fabric):
        local.lanes.append(lane)
        addresses[lane.name] = lane.open(partial(local.server.serve, lane), local.workers.submit)
    retries = {name: note.retry for name, note in local.server.methods.items() if note.retry}
    return Prepared(identity, url, addresses, retries)


def commit(instance: Any, table: Table) -> None:
    """Meet the peers, prove that each answers, then become a member. Raises BootstrapError naming who does not."""
    global _preparing, _joined
    preparing = _preparing
    if preparing is None or preparing.spec.generation != table.info.generation:
        raise BootstrapError(f"group {table.info.name!r} was given up while it formed")
    spec, local = preparing
    for peer in table.info.members:
        if peer.name == spec.name:
            local.me = peer
    local.splitter = PayloadSplitter(local.tensor_lanes, local.cleanup.leave)
    meet_peers(local, table, [peer for peer in table.info.members if peer.name != spec.name])
    local.know(route_to(local, local.me, table))
    for name, cause in table.away.items():
        local.miss(local.route(name).member.rank, Absence(cause, for_good=False))
    _reach_all(local, table, frozenset(spec.by_tcp))
    with changing:
        if _preparing is not preparing:
            raise BootstrapError(f"group {table.info.name!r} was given up while it formed")
        if spec.config.metrics_period_s is not None:
            local.at_end.append(_export(local, spec.config.metrics_period_s))
        set_local(local)
        _preparing, _joined = None, _Joined(spec, table)
    rdt.enable_where_possible()  # also in actors that Ray restarted, or that another actor made


def _export(local: LocalMember, period_s: float) -> Callable[[], None]:
    """Put into Ray's metrics what it counts, from now on; returns what ends that."""
    exporter = Exporter(local.group, local.me.name, lambda: (local.counters.rows(local.me.name), local.under_way()))
    return exporter.start(period_s)


def meet_peers(local: LocalMember, table: Table, peers: Sequence[Member]) -> None:
    """Make these callable. Quick: connections are made by the first call."""
    for lane in local.lanes:
        known = [peer.name for peer in peers if lane.name != "nng" or "nng" in table.peers[peer.name].addresses]
        lane.connect([PeerAddress(peer, _address(table, local.me.name, peer, lane.name)) for peer in known])
    for tensor_lane in local.tensor_lanes.values():
        addresses = {peer.name: table.peers[peer.name].addresses.get(tensor_lane.name) for peer in peers}
        tensor_lane.connect([PeerAddress(peer, address) for peer, address in addresses.items() if address is not None])
    for peer in peers:
        local.know(route_to(local, peer, table))


def route_to(local: LocalMember, peer: Member, table: Table) -> PeerRoute:
    """How messages of this member reach ``peer``, or itself."""
    me, info, prepared = local.me, table.info, table.peers[peer.name]
    lanes = {lane.name: lane for lane in local.lanes}
    token = process_token(info.generation, peer.rank, peer.incarnation)
    if peer.rank == me.rank:
        refused = forbidden(info.config, "torchrpc")
        fabric = AbsentLane(refused) if refused else lanes["torchrpc"]
        return PeerRoute(peer, lanes["loopback"], lanes["loopback"], fabric, token=token)
    route = info.plan.route(me.name, peer.name)
    outward = info.device_maps.get(me.name, {}).get(peer.name, {})
    inward = info.device_maps.get(peer.name, {}).get(me.name, {})
    refused = route.why_not("torchrpc")
    fabric = AbsentLane(refused) if refused else lanes["torchrpc"]
    best: dict[str, str] = {}
    for choice in route.tensor_lanes:
        best.setdefault(choice.traffic, choice.lane)
    opened = local.tensor_lanes.keys() & prepared.addresses.keys()
    return PeerRoute(
        peer,
        lanes[route.message_lane],
        lanes[route.in_band_lane] if route.in_band_lane else fabric,
        fabric,
        {kind: lane for kind, lane in best.items() if lane in BESIDE and lane in opened},
        outward,
        way_back(inward),
        inward.get(CPU),
        frozenset(route.same_gpus_from(me.name)),
        token,
        prepared.retries,
        same_clock=me.node_id == peer.node_id,
    )


def extend(local: LocalMember, spec: JoinSpec, table: Table) -> Prepared:
    """Open what those who come in need and this member has not open yet; returns all its addresses."""
    before = table.peers[spec.name]
    process_fabric().admit(spec.agent.admitted)
    addresses = {**before.addresses, **open_tensor_lanes(spec, local)}
    if spec.nng and not any(lane.name == "nng" for lane in local.lanes):
        lane = nng_lane(spec)
        addresses[lane.name] = lane.open(partial(local.server.serve, lane), local.workers.submit)
        local.lanes.append(lane)
    everything: list[MessageLane | TensorLane] = [*local.lanes, *local.tensor_lanes.values()]
    for each in everything:
        changed = each.reach(spec.tcp_host, frozenset(spec.by_tcp))
        if changed is not None:
            addresses[each.name] = changed
    return before._replace(addresses=addresses)


def rejoined(spec: JoinSpec, table: Table, prepared: Prepared) -> None:
    """Somebody has come in: remember the group as it is now. ``table`` may hold only what is new."""
    global _joined
    if _joined is not None:
        table = _merged(_joined.table, table)
    _joined = _Joined(spec, table._replace(peers={**table.peers, spec.name: prepared}))


def _merged(known: Table, news: Table) -> Table:
    """What was known, and in its place what the news says of those in it."""
    before, now = known.info, news.info
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
    return news._replace(info=info, peers={**known.peers, **news.peers})


def removed(names: Sequence[str]) -> None:
    """They have left: remember the group without them."""
    global _joined
    if _joined is not None:
        info = _joined.table.info
        left = info._replace(members=tuple(member for member in info.members if member.name not in names))
        _joined = _joined._replace(table=_joined.table._replace(info=left))


def _address(table: Table, me: str, peer: str, lane: str) -> Any:
    prepared = table.peers[peer]
    if lane != "torchrpc":
        return prepared.addresses[lane]
    inverse = {its: mine for mine, its in gpu_pairs(table.info.device_maps.get(peer, {}).get(me, {})).items()}
    return FabricPeer(prepared.agent.name, prepared.agent.worker_id, prepared.url, inverse)


def _reach_all(local: LocalMember, table: Table, far_away: Set[str]) -> None:
    """Make sure that this member reaches the others.

    Across networks everybody is asked, by every lane of messages: there one route can be blocked alone. Within a
    network namespace nothing can lie between, so it is enough that somebody asks each listener: the neighbour in rank.
    That keeps forming a group of n on one host at n questions instead of n * (n - 1) connections.
    """
    deadline = time.monotonic() + table.timeout_s
    asked: list[tuple[str, str, Pending]] = []
    silent: dict[str, str] = {}
    left_out = {*table.away, *table.silent}
    roads_to = [route for route in local.routes if route.member.name not in left_out]
    ranks = [route.member.rank for route in roads_to]
    neighbour = ranks[(ranks.index(local.me.rank) + 1) % len(ranks)]
    for route in roads_to:
        far = route.member.name in far_away
        if route.member.rank == local.me.rank or not (far or route.member.rank == neighbour):
            continue
        routes = {route.calls, route.tensors, route.fabric} if far else {route.calls}
        for lane in (lane for lane in routes if not isinstance(lane, AbsentLane)):
            try:
                pending = local.system(route, lane, incoming.PING, timeout_s=table.timeout_s)
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

    ``for_good``: that generation is over; a way into it that is begun elsewhere and gets here later is refused.
    """
    if for_good:
        _given_up.append(generation)
    with changing:
        _leave(lambda spec: spec.generation == generation)


def give_up(instance: Any, attempt: str) -> None:
    """Leave what came of that attempt to join; a later ``prepare`` for it is refused. Idempotent."""
    with changing:
        _given_up.append(attempt)
        _leave(lambda spec: spec.attempt == attempt)


def _leave(meant: Callable[[JoinSpec], bool]) -> None:
    global _preparing, _joined
    if _preparing is not None and meant(_preparing.spec):
        preparing, _preparing = _preparing, None
        _part(preparing.local)
    local = current_local()
    if local is not None and _joined is not None and meant(_joined.spec):
        set_local(None)
        _joined = None
        _part(local)


def _part(local: LocalMember) -> None:
    try:
        local.leave()
    except BaseException:  # Ctrl-C, in a driver: it is not to leave half of it behind
        local.leave()
        raise


def stats(instance: Any, generation: str) -> list[PairStats]:
    """What this member counted; empty if it has left that generation."""
    local = current_local()
    if local is None or local.generation != generation:
        return []
    return local.counters.rows(local.me.name)


def group_info() -> GroupInfo | None:
    """The group this process is in."""
    return _joined.table.info if _joined else None
