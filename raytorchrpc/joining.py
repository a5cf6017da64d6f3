"""What runs inside a member's process when a group forms, ends or is asked: the actor's side of ``group``.

The driver calls these through Ray (``actor.__ray_call__``), or directly when it takes part itself. Each is
quick and safe to repeat. A group forms in three steps, and only the last makes it visible to user code:
``probe`` changes nothing, ``prepare`` starts listening, ``commit`` meets the peers and proves the way to each.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import ray

from raytorchrpc import _compat, _nccl_env, rdt, serving, topology
from raytorchrpc.calls import exposed
from raytorchrpc.config import GroupConfig
from raytorchrpc.device_map import CPU, Device, gpu_pairs, way_back
from raytorchrpc.errors import BootstrapError, LaneUnavailable, RayTorchRpcError
from raytorchrpc.exporting import Exporter
from raytorchrpc.fabric import AgentIdentity, AgentSpec, Fabric, FabricPeer, process_fabric
from raytorchrpc.lanes.absent import AbsentLane
from raytorchrpc.lanes.base import MessageLane, PeerAddress, Pending, TensorLane
from raytorchrpc.lanes.cuda_ipc import CudaIpcLane
from raytorchrpc.lanes.loopback import LoopbackLane
from raytorchrpc.lanes.nccl import NcclLane
from raytorchrpc.lanes.nixl import NixlLane
from raytorchrpc.lanes.shm import ShmLane, default_capacity
from raytorchrpc.lanes.socket import SocketLane
from raytorchrpc.lanes.torchrpc import TorchRpcLane
from raytorchrpc.member import Absence, LocalMember, current_local, set_local
from raytorchrpc.metrics import PairStats
from raytorchrpc.peers import Member, PeerRoad, process_token
from raytorchrpc.routing import BESIDE, RoutePlan, forbidden
from raytorchrpc.shipping import Shipper
from raytorchrpc.topology import Endpoint

logger = logging.getLogger(__name__)


class Owner(NamedTuple):
    """The process that formed a group; a group outlives it only by accident."""

    job: str
    """Hex id of the Ray job."""
    actor: str | None
    """Hex id of the actor, if it was one; None for a driver."""


class Probe(NamedTuple):
    """What a process tells the driver before anything is decided."""

    endpoint: Endpoint
    node_id: str
    pid: int
    group: str | None
    """The group it is in already."""
    generation: str | None
    """Of that group."""
    owner: Owner | None
    """Who formed that group."""
    agent: AgentIdentity | None
    autograd_id: int | None


class JoinSpec(NamedTuple):
    """What one member is given to prepare."""

    group: str
    generation: str
    attempt: str
    """Names this way into it, which may be given up."""
    incarnation: int
    """Of this member, as Member.incarnation."""
    replaces: str | None
    """The generation of a group without an owner, which the member is to leave first."""
    name: str
    rank: int
    config: GroupConfig
    agent: AgentSpec
    renew_agent: bool
    """Its running agent's id is taken by another member: start a new one."""
    device_maps: Mapping[str, Mapping[int, int]]
    """By peer's member name; what leads from GPU to GPU."""
    secret: bytes
    """The group's, made for this generation."""
    tcp_host: str | None
    """Address to listen on for peers in other network namespaces; None if there are none."""
    by_tcp: tuple[str, ...]
    """Those peers."""
    beside: tuple[str, ...]
    """Lanes for tensors alone that some route of this member uses."""
    nng: bool
    """Whether some route of this member uses nng."""


class Prepared(NamedTuple):
    """A member that listens."""

    agent: AgentIdentity
    url: str
    addresses: Mapping[str, Any]
    """By lane."""
    retries: Mapping[str, int]
    """By decorated method, where it is above 0: how often a call to it may be repeated."""


class GroupInfo(NamedTuple):
    """What every process knows about a group; picklable."""

    name: str
    generation: str
    owner: Owner
    members: tuple[Member, ...]
    config: GroupConfig
    plan: RoutePlan
    device_maps: Mapping[str, Mapping[str, Mapping[Device, Device]]]
    """By member, then by peer: local gpu or "cpu" -> peer gpu or "cpu"."""


class Table(NamedTuple):
    """Everything a member needs to meet its peers."""

    info: GroupInfo
    peers: Mapping[str, Prepared]
    """By member name."""
    timeout_s: float
    away: Mapping[str, str] = {}
    """Who cannot be called for now, and why."""
    silent: tuple[str, ...] = ()
    """Who has not answered of late: the way to these is not tried."""


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
    wants_gpu = _asked_for_gpu(instance)
    local, fabric = current_local(), process_fabric()
    return Probe(
        endpoint=endpoint(name, wants_gpu),
        node_id=context.get_node_id(),
        pid=os.getpid(),
        group=local.group if local else None,
        generation=local.generation if local else None,
        owner=_joined.table.info.owner if _joined else None,
        agent=fabric.identity,
        autograd_id=_compat.autograd_id(),
    )


def endpoint(name: str, wants_gpu: bool = False) -> Endpoint:
    """What this process is and has."""
    return topology.probe(name=name, node_ip=_node_ip(), wants_gpu=wants_gpu)


def _asked_for_gpu(instance: Any) -> bool:
    if instance is None:  # a driver sees every GPU; use those it already uses, and wake none
        import torch

        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


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
    methods = _exposed_methods(instance)
    local = LocalMember(spec.group, spec.generation, me, spec.config, instance, methods, max_bytes)
    _preparing = _Preparing(spec, local)  # from here on ``leave`` undoes it
    addresses = open_tensor_lanes(spec, local)
    for lane in _lanes(instance, spec, fabric):
        local.lanes.append(lane)
        addresses[lane.name] = lane.open(partial(local.server.serve, lane), local.workers.submit)
    retries = {name: note.retry for name, note in local.server.methods.items() if note.retry}
    return Prepared(identity, url, addresses, retries)


def _lanes(instance: Any, spec: JoinSpec, fabric: Fabric) -> list[MessageLane]:
    maps = {peer: dict(mapping) for peer, mapping in spec.device_maps.items()}
    one_at_a_time = instance is not None and _compat.actor_max_concurrency() == 1 and not _compat.actor_is_async()
    by_tcp = frozenset(spec.by_tcp)
    socket_lane = SocketLane(
        spec.name,
        spec.rank,
        spec.secret,
        tcp_host=spec.tcp_host,
        by_tcp=by_tcp,
        one_at_a_time=one_at_a_time,
    )
    lanes = [LoopbackLane(), socket_lane, TorchRpcLane(spec.name, fabric, spec.agent.devices, maps)]
    if spec.nng:
        lanes.append(nng_lane(spec))
    return lanes


def nng_lane(spec: JoinSpec) -> MessageLane:
    """Not open yet."""
    from raytorchrpc.lanes.nng import NngLane  # most groups do without it, and without its library

    return NngLane(spec.name, spec.rank, spec.secret, tcp_host=spec.tcp_host, by_tcp=frozenset(spec.by_tcp))


def _exposed_methods(instance: Any) -> dict[str, Any]:
    cls = type(instance)
    found = {}
    for name in dir(cls) if instance is not None else ():
        function = inspect.getattr_static(cls, name, None)  # a descriptor of the class may do anything
        note = exposed(function)
        if note is not None:
            # ray.method may have been applied after ours: then the group's name is on the wrapper.
            group = note.concurrency_group or _compat.concurrency_group_of(function)
            found[name] = note._replace(concurrency_group=group)
    return found


def open_tensor_lanes(spec: JoinSpec, local: LocalMember) -> dict[str, Any]:
    """Open those of ``spec.beside`` that this member has not open yet; returns their addresses."""
    addresses = {}
    for lane in _tensor_lanes(spec, [name for name in spec.beside if name not in local.tensor_lanes]):
        try:
            addresses[lane.name] = lane.open()
        except LaneUnavailable as error:
            logger.warning("%s: %s; tensors go by torchrpc", spec.name, error)
            continue
        local.tensor_lanes[lane.name] = lane
    return addresses


def _tensor_lanes(spec: JoinSpec, names: Sequence[str]) -> list[TensorLane]:
    lanes: list[TensorLane] = []
    for name in names:
        if name == "shm":
            lanes.append(ShmLane(spec.config.shm_bytes or default_capacity(), spec.config.copy_threads))
        elif name == "cuda_ipc":
            lanes.append(CudaIpcLane(spec.agent.devices))
        elif name == "nccl":
            # Also where all share a host: NCCL reads them once, and the next group may span hosts.
            made = _nccl_env.apply(endpoint(spec.name), interface=spec.config.interface)
            logger.debug("%s: set for NCCL: %s", spec.name, made)
            lanes.append(
                NcclLane(
                    spec.name,
                    spec.rank,
                    spec.secret,
                    spec.agent.devices,
                    tcp_host=spec.tcp_host,
                    by_tcp=frozenset(spec.by_tcp),
                    timeout_s=spec.config.rpc_timeout_s,
                )
            )
        elif name == "nixl":
            capacity = spec.config.shm_bytes or default_capacity()
            settings = _ucx_settings(spec)
            lanes.append(NixlLane(capacity, spec.agent.devices, spec.config.rpc_timeout_s, settings))
    return lanes


def _ucx_settings(spec: JoinSpec) -> dict[str, str]:
    """UCX reads for anybody who reaches its TCP ports, so it opens them only where the lane was asked for by name."""
    if "nixl" not in (spec.config.lanes or ()):
        return {"TLS": "^tcp"}
    here = endpoint(spec.name)
    rdma = any(port.state == "ACTIVE" for hca in here.hcas for port in hca.ports)
    return {} if rdma or not spec.agent.interface else {"NET_DEVICES": spec.agent.interface}


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
    local.shipper = Shipper(local.tensor_lanes, local.leftovers.leave)
    meet_peers(local, table, [peer for peer in table.info.members if peer.name != spec.name])
    local.know(road_to(local, local.me, table))
    for name, cause in table.away.items():
        local.miss(local.road(name).member.rank, Absence(cause, for_good=False))
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
        local.know(road_to(local, peer, table))


def road_to(local: LocalMember, peer: Member, table: Table) -> PeerRoad:
    """How messages of this member reach ``peer``, or itself."""
    me, info, prepared = local.me, table.info, table.peers[peer.name]
    lanes = {lane.name: lane for lane in local.lanes}
    token = process_token(info.generation, peer.rank, peer.incarnation)
    if peer.rank == me.rank:
        refused = forbidden(info.config, "torchrpc")
        fabric = AbsentLane(refused) if refused else lanes["torchrpc"]
        return PeerRoad(peer, lanes["loopback"], lanes["loopback"], fabric, token=token)
    route = info.plan.route(me.name, peer.name)
    outward = info.device_maps.get(me.name, {}).get(peer.name, {})
    inward = info.device_maps.get(peer.name, {}).get(me.name, {})
    refused = route.why_not("torchrpc")
    fabric = AbsentLane(refused) if refused else lanes["torchrpc"]
    best: dict[str, str] = {}
    for choice in route.tensor_lanes:
        best.setdefault(choice.traffic, choice.lane)
    opened = local.tensor_lanes.keys() & prepared.addresses.keys()
    return PeerRoad(
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

    Across networks everybody is asked, by every lane of messages: there one road can be blocked alone. Within a
    network namespace nothing can lie between, so it is enough that somebody asks each listener: the neighbour in rank.
    That keeps forming a group of n on one host at n questions instead of n * (n - 1) connections.
    """
    deadline = time.monotonic() + table.timeout_s
    asked: list[tuple[str, str, Pending]] = []
    silent: dict[str, str] = {}
    left_out = {*table.away, *table.silent}
    roads_to = [road for road in local.roads if road.member.name not in left_out]
    ranks = [road.member.rank for road in roads_to]
    neighbour = ranks[(ranks.index(local.me.rank) + 1) % len(ranks)]
    for road in roads_to:
        far = road.member.name in far_away
        if road.member.rank == local.me.rank or not (far or road.member.rank == neighbour):
            continue
        roads = {road.calls, road.tensors, road.fabric} if far else {road.calls}
        for lane in (lane for lane in roads if not isinstance(lane, AbsentLane)):
            try:
                pending = local.system(road, lane, serving.PING, timeout_s=table.timeout_s)
                asked.append((road.member.name, lane.name, pending))
            except RayTorchRpcError as error:
                silent[road.member.name] = f"{error}"
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
