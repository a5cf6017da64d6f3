"""The member's side of a group: it joins, follows the group's changes, and leaves.

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
from typing import Any, TypeVar

import ray

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.member import LocalMember, current_local, set_local
from raytorchrpc.calls.peers import Absence, Member, PeerRoute, process_token
from raytorchrpc.calls.server.exposed import methods_of, take_turns
from raytorchrpc.calls.server.gates import allow_calls
from raytorchrpc.errors import BootstrapError, ConfigurationError, LaneUnavailable, NotAMember, RayTorchRpcError
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import MessageLane, PeerAddress, PeerLane, Pending
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, process_fabric, unreachable
from raytorchrpc.lanes.torchrpc.lane import AbsentLane
from raytorchrpc.membership import process_group
from raytorchrpc.membership.messages import Arrival, GroupInfo, JoinSpec, Loss, Prepared, Probe, Table
from raytorchrpc.membership.ray_metrics import TOTALS_S, Exporter, reading
from raytorchrpc.membership.vouching import vouched
from raytorchrpc.patterns import home
from raytorchrpc.process.guard import process_guard
from raytorchrpc.process.this_process import default_capacity
from raytorchrpc.rdt import enable_where_possible, load_where_possible, transfer
from raytorchrpc.routing.planner import forbidden
from raytorchrpc.tensors.devices import CPU
from raytorchrpc.topology import probe as topology_probe
from raytorchrpc.topology.device_map import gpu_pairs, inverse, way_back
from raytorchrpc.topology.endpoint import Endpoint

T = TypeVar("T")

logger = logging.getLogger(__name__)

_JOINING = Absence("it has not joined yet", for_good=False)

_changing = threading.RLock()  # in a threaded actor ``leave`` may run beside ``prepare`` or ``commit``
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
    with _changing:
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
    fabric.prepare(spec.agent, renew=spec.renew_agent)
    identity = fabric.identity
    if identity is None:
        raise BootstrapError(f"the torchrpc agent of {spec.name!r} was stopped while it joined")
    torch_internals.find_workers_by(_worker_of_rank)
    torch_internals.wait_for_rrefs_inside(allow_calls)
    me = replace(spec.member, rpc_name=identity.name, worker_id=identity.worker_id)
    max_bytes = spec.config.max_bytes_in_flight or default_capacity()
    methods = methods_of(instance)
    take_turns()
    services = {**home.services(), **transfer.SERVICES, **process_group.SERVICES}
    local = LocalMember(spec.group, spec.generation, me, spec.config, instance, methods, max_bytes, services)
    process_guard().vouch = partial(vouched, local, {})
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
    with _changing:
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
    for lane in _lanes_of(local):
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
    # A ping over torchrpc would start the agents of both ends.
    agents = local.config.torchrpc == "at once"
    if not agents:
        urls = {
            route.member.name: table.peers[route.member.name].addresses[registry.FABRIC].url
            for route in reachable
            if route.member.name in far_away and not isinstance(route.fabric, AbsentLane)
        }
        silent.update(unreachable(urls, deadline))
    for route in reachable:
        far = route.member.name in far_away
        if route.member.rank == local.me.rank or not (far or route.member.rank == neighbour):
            continue
        routes = {route.calls, route.tensors, route.fabric} if far else {route.calls}
        routes -= set() if agents else {route.fabric}
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
    with _changing:
        _leave(lambda spec: spec.generation == generation)


def give_up(instance: Any, attempt: str) -> None:
    """Roll back an attempt to join; a ``prepare`` for it that arrives later is refused. Idempotent."""
    with _changing:
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
    process_fabric().rest()
    try:
        local.leave()
    except BaseException:  # Ctrl-C, in a driver: finish leaving first
        local.leave()
        raise


def group_info() -> GroupInfo | None:
    """The group that this process is a member of, or None."""
    return _joined[1].info if _joined else None


# --- what this process brings into a group ----------------------------------------------------------------------------


def endpoint(name: str, wants_gpu: bool = False, lanes: Sequence[str] = ()) -> Endpoint:
    """Describe this process. ``lanes``: lanes of other distributions to look for; see ``Endpoint.lanes``."""
    node_ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    found = topology_probe.probe(name=name, node_ip=node_ip, wants_gpu=wants_gpu)
    return found.changed({"lanes": registry.distributions(lanes)}) if lanes else found


def asked_for_gpu(instance: Any) -> bool:
    """Whether the actor asked Ray for a GPU. For a driver: whether it has initialised CUDA."""
    if instance is None:  # a driver sees every GPU, and joining a group must not initialise CUDA in it
        import torch

        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))


def open_lanes(spec: JoinSpec, local: LocalMember) -> dict[str, Any]:
    """Open the lanes of ``spec`` that this member has not open yet; returns the new ones' addresses, by name.

    Raises LaneUnavailable if a message lane cannot open. A tensor lane that cannot is left out with a warning.
    """
    setup = LaneSetup(
        member=spec.name,
        credentials=spec.credentials,
        config=spec.config,
        endpoint=partial(endpoint, spec.name),
        tcp_host=spec.tcp_host,
        by_tcp=frozenset(spec.by_tcp),
        interface=spec.agent.interface,
        devices=spec.agent.devices,
        device_maps=spec.device_maps,
    )
    opened = local.tensor_lanes.keys() | {lane.name for lane in local.lanes}
    names = dict.fromkeys([*(row.name for row in registry.LANES if row.always), *spec.lanes])
    missing = [registry.lane(name) for name in names if name not in opened]
    addresses = {}
    for row in sorted(missing, key=lambda row: not row.out_of_band):  # a message lane serves as soon as it is open
        lane = setup.make(row)
        if isinstance(lane, MessageLane):
            local.lanes.append(lane)
            addresses[row.name] = lane.open(partial(local.incoming.serve, lane), local.workers.submit)
            continue
        try:
            addresses[row.name] = lane.open()
        except LaneUnavailable as error:
            logger.warning("%s: %s; %s carries its tensors instead", spec.name, error, registry.FABRIC)
            continue
        local.tensor_lanes[row.name] = lane
    return addresses


def preload() -> None:
    """Import what joining a group needs, while the process of an actor starts: a group waits for its slowest member."""
    for row in registry.LANES:
        if row.always or row.carries == ("cpu",):
            registry.resolve(row, row.make)
    load_where_possible()


# --- changes of the group: the supervisor calls these, on a thread of the member's own, busy or not ------------------


def apply(local: LocalMember, step: int, change: Callable[..., T], *args: Any) -> T:
    """Run ``change(local, *args)``, one of the functions below; changes run one at a time and in order.

    Refuses one that arrives late, as after a broken network: the supervisor had no answer to it, and sends the full
    state instead (``resync``).
    """
    with _changing:
        if local is not current_local():
            raise NotAMember(f"{local.me.name!r} has left the group")
        if step <= local.step:
            raise NotAMember(f"a later change than {step} has taken effect already")
        local.step = step
        return change(local, *args)


def prepare_arrivals(local: LocalMember, arrival: Arrival) -> Prepared:
    """Open the lanes that the arrivals need, and prepare connections to them; ``activate`` makes them callable.

    Returns this member's own addresses.
    """
    global _joined
    spec, table = arrival.spec, arrival.table
    process_fabric().admit(spec.agent.admitted)
    addresses = {**table.peers[spec.name].addresses, **open_lanes(spec, local)}
    for lane in _lanes_of(local):
        changed = lane.reach(spec.tcp_host, frozenset(spec.by_tcp))
        if changed is not None:
            addresses[lane.name] = changed
    prepared = table.peers[spec.name]._replace(addresses=addresses)
    coming = [member for member in table.info.members if member.name in arrival.names]
    for member in coming:
        local.peers.mark_away(member.rank, _JOINING)
        _part(local, member.name, "it left and came back")
    add_peers(local, table, coming)
    if _joined is not None:
        table = _joined[1].merged(table)
    _joined = spec, table._replace(peers={**table.peers, spec.name: prepared})
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
    _record_removal([loss.name for loss in losses if loss.for_good])


def remove_peers(local: LocalMember, names: Sequence[str]) -> None:
    for name in names:
        local.peers.remove_peer(local.peers.route(name).member.rank)
        _part(local, name, "it was removed from the group")
    _record_removal(names)


def _part(local: LocalMember, name: str, cause: str) -> None:
    """Disconnect from a peer, and end a process group that includes it."""
    process_group.collectives_of(local).lose(name, cause)
    for lane in _lanes_of(local):
        lane.disconnect(name)


def _record_removal(names: Sequence[str]) -> None:
    global _joined
    if _joined is not None:
        spec, table = _joined
        members = tuple(member for member in table.info.members if member.name not in names)
        _joined = spec, table._replace(info=table.info._replace(members=members))


def _lanes_of(local: LocalMember) -> list[PeerLane]:
    return [*local.lanes, *local.tensor_lanes.values()]
