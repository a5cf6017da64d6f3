"""The member's side of a group: it joins, follows the group's changes, and leaves.

The driver calls these functions through Ray (``actor.__ray_call__``), or directly if it is a member itself. Each is
quick and can be repeated. A group forms in three steps: ``probe`` changes nothing, ``prepare`` starts to listen, and
``commit`` connects to the peers and makes the group visible to user code.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import ray

from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.clients import Supervision
from raytorchrpc.calls.member import LocalMember, current, process_member, set_locals
from raytorchrpc.calls.peers import Absence, Member, PeerRoute, is_client, process_token
from raytorchrpc.calls.scope import allow_calls
from raytorchrpc.calls.server.exposed import methods_of, note_modes, take_turns
from raytorchrpc.errors import BootstrapError, ConfigurationError, LaneUnavailable, NotAMember, RayTorchRpcError
from raytorchrpc.group import process_group
from raytorchrpc.group.here import asked_for_gpu, endpoint, place
from raytorchrpc.group.messages import GroupInfo, GroupOf, JoinSpec, Listening, Prepared, Probe, unpacked
from raytorchrpc.group.status import TOTALS_S, Exporter, reading
from raytorchrpc.group.tickets import consent, parent
from raytorchrpc.group.view import JOINING, Answer, Delta, Difference, Table
from raytorchrpc.group.vouching import vouched
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import MessageLane, PeerAddress, PeerLane, Pending
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, AgentSpec, process_agent, unreachable
from raytorchrpc.lanes.torchrpc.lane import AbsentLane
from raytorchrpc.patterns import home
from raytorchrpc.process.guard import Vouch, process_guard
from raytorchrpc.process.switch_interval import SwitchInterval
from raytorchrpc.process.this_process import default_capacity
from raytorchrpc.rdt import enable_where_possible, load_where_possible, transfer
from raytorchrpc.routing.pairs import forbidden
from raytorchrpc.tensors.devices import CPU
from raytorchrpc.topology.device_map import inverse, way_back

logger = logging.getLogger(__name__)


@dataclass
class Membership:
    """This process as a member of a group, from ``prepare`` on."""

    spec: JoinSpec
    local: LocalMember
    table: Table
    """Until ``commit`` without addresses."""
    supervision: Supervision = field(default_factory=Supervision)
    """Of a client."""
    changed: int = 0
    """The version of the group's view at which this member's own addresses changed last."""
    has_joined: bool = False
    """Since ``commit``."""
    vouch: Vouch | None = None
    """Of a member: vouches for the other members' connections."""
    no_agent: str = ""
    """Why the torchrpc agent of this process does not serve this group: there is one, and another group needs it."""

    @property
    def is_client(self) -> bool:
        """Whether this process is a client of the group; see ``calls.clients``."""
        return is_client(self.spec.member.rank)

    def route(self, peer: Member) -> PeerRoute:
        """The lanes by which this member reaches ``peer``, or itself."""
        local, table = self.local, self.table
        me, plan, prepared = local.me, table.plan, table.peers[peer.name]
        lanes = {lane.name: lane for lane in local.lanes}
        token = process_token(table.generation, peer.rank, peer.incarnation)
        if self.is_client:
            lane, same_node = lanes[registry.CONTROL], me.node_id == peer.node_id
            absent = AbsentLane("a client of a group has no torchrpc agent", "init_group(..., include_driver=True)")
            return PeerRoute(
                peer, lane, absent, through_cpu=None, token=token, retries=prepared.retries, same_clock=same_node
            )
        if peer.rank == me.rank:
            torchrpc = self._torchrpc(peer, forbidden(table.config, registry.TORCHRPC))
            return PeerRoute(peer, lanes[registry.LOOPBACK], torchrpc, token=token)
        route = plan.route(me.name, peer.name)
        outward, inward = plan.device_map(me.name, peer.name), plan.device_map(peer.name, me.name)
        torchrpc = self._torchrpc(peer, route.why_not(registry.TORCHRPC))
        calls = torchrpc if route.message_lane == registry.TORCHRPC else lanes[route.message_lane]
        opened = local.tensor_lanes.keys() & prepared.addresses.keys()
        usable = [choice for choice in route.tensor_lanes if choice.out_of_band and choice.lane in opened]
        return PeerRoute(
            peer,
            lanes[registry.CONTROL] if isinstance(calls, AbsentLane) else calls,
            torchrpc,
            {choice.traffic: choice.lane for choice in reversed(usable)},  # the preferred lane for each kind
            route.through_cpu(),
            outward,
            way_back(inward),
            inward.get(CPU),
            frozenset(route.same_gpus_from(me.name)),
            token,
            prepared.retries,
            same_clock=me.node_id == peer.node_id,
        )

    def _torchrpc(self, peer: Member, refused: str | None) -> MessageLane:
        """The lane to ``peer``. ``refused``: why their route has none."""
        if refused:
            return AbsentLane(refused)
        remedy = "have this process in one group alone"
        if self.no_agent:
            return AbsentLane(self.no_agent, remedy)
        if registry.TORCHRPC not in self.table.peers[peer.name].addresses:
            return AbsentLane(f"the torchrpc agent of {peer.name!r} serves another group, and not this one", remedy)
        return next(lane for lane in self.local.lanes if lane.name == registry.TORCHRPC)


_changing = threading.RLock()  # in a threaded actor ``leave`` may run beside ``prepare`` or ``commit``
_memberships: dict[str, Membership] = {}
"""Of this process, as a member or a client, by generation: from ``prepare`` until it has left."""
#: Attempts and generations that were rolled back: a ``prepare`` for them that arrives late is refused.
_given_up: deque[str] = deque(maxlen=64)


def probe(instance: Any, name: str, lanes: Sequence[str] = ()) -> Probe:
    """Describe this process. Changes nothing. ``lanes``: those of other distributions that the group asks for."""
    return Probe(
        endpoint=endpoint(name, asked_for_gpu(instance), lanes),
        node_id=place().node_id,
        pid=os.getpid(),
        groups=tuple(GroupOf(info.name, info.generation, info.owner) for info in infos()),
        agent=process_agent().identity,
        autograd_id=torch_internals.autograd_id(),
    )


def prepare(instance: Any, spec: JoinSpec, group: bytes) -> Prepared:
    """Start to listen for a group that is forming. Leaves nothing behind if it raises BootstrapError.

    ``group``: a packed GroupInfo.
    """
    info: GroupInfo = unpacked(group)
    with _changing:
        addresses: dict[str, Any] = {}
        preparing = _start(instance, spec, info)
        local = preparing.local
        _open_lanes(preparing, settings_of(spec, info), addresses)
        retries = {name: note.retry for name, note in local.incoming.methods.items() if note.retry}
        agent = None if preparing.no_agent else process_agent().identity
        agent = agent or AgentIdentity(local.me.rpc_name, local.me.worker_id)
        return Prepared(agent, addresses, retries, os.getpid())


def _worker_of_rank(rank: int) -> str | None:
    """torch's name of the member of this rank, for torch's own API; None if there is none.

    Raises ConfigurationError if the number is another member's worker id.
    """
    local = process_member() if current.members else None
    if local is None or (member := local.peers.known(rank)) is None:
        return None
    if member.worker_id == rank:
        return member.rpc_name
    other = next((peer for peer in local.peers.members if peer.worker_id == rank), None)
    if other is not None:
        raise ConfigurationError(
            f"{rank} is the rank of {member.name!r} and the worker id of {other.name!r}: pass a Member's rpc_name"
        )
    return member.rpc_name


def _start(instance: Any, spec: JoinSpec, info: GroupInfo) -> Membership:
    """The membership, without lanes. Ends those that it replaces, and earlier attempts that were not rolled back."""
    if spec.attempt in _given_up or spec.generation in _given_up:
        raise BootstrapError(f"group {spec.group!r} was rolled back before {spec.name!r} could prepare")
    as_client = is_client(spec.member.rank)
    for earlier in [*_memberships.values()]:
        generation, rival = earlier.spec.generation, earlier.has_joined and not earlier.is_client
        if generation == spec.generation and as_client and rival:
            raise BootstrapError(f"this process is a member of group {spec.group!r} now")
        if generation == spec.generation or generation in spec.replaces:
            if generation != spec.generation:
                logger.warning("%s leaves group %r, which has ended", earlier.spec.name, earlier.spec.group)
            _leave(earlier)
        elif earlier.spec.group == spec.group and not as_client and not earlier.is_client:
            if rival:
                raise BootstrapError(f"{spec.name!r} has joined group {spec.group!r} meanwhile")
            _leave(earlier)
    max_bytes = info.config.max_bytes_in_flight or default_capacity()
    if as_client:  # it serves no methods, and changes nothing else in this process
        local = LocalMember(spec.group, spec.generation, spec.member, info.config, None, {}, max_bytes)
        made = _memberships[spec.generation] = Membership(spec, local, Table(info, {}, 0))
        local.incoming.on_watch = made.supervision.begin
        return made
    me, no_agent = spec.member, ""
    try:
        process_agent().prepare(settings_of(spec, info).agent, spec.generation, renew=spec.renew_agent)
        identity = process_agent().identity
        if identity is None:
            raise BootstrapError(f"the torchrpc agent of {spec.name!r} was stopped while it joined")
        me = replace(me, rpc_name=identity.name, worker_id=identity.worker_id)
    except LaneUnavailable as error:
        no_agent = error.reason
        logger.warning("%s has no torchrpc in group %r, nor RRefs: %s", spec.name, spec.group, no_agent)
    torch_internals.find_workers_by(_worker_of_rank)
    torch_internals.wait_for_rrefs_inside(allow_calls)
    methods = methods_of(instance)
    if ray_internals.runs_tasks():
        take_turns()
        note_modes(instance)
    services = {**home.services(), **transfer.SERVICES, **process_group.SERVICES}
    local = LocalMember(spec.group, spec.generation, me, info.config, instance, methods, max_bytes, services)
    vouch = partial(vouched, local, {})
    made = Membership(spec, local, Table(info, {}, 0), vouch=vouch, no_agent=no_agent)
    _memberships[spec.generation] = made  # from here on ``leave`` undoes it
    process_guard().start(vouch)
    if info.config.switch_interval_s is not None:
        local.outgoing.interval = local.incoming.interval = SwitchInterval(
            info.config.switch_interval_s, local.deadlines
        )
        local.at_end.append(local.incoming.interval.end)
    return made


def commit(instance: Any, peers: bytes) -> None:
    """Connect to the peers, check that they answer, then become a member. Raises BootstrapError naming those that do
    not. A client connects to a member when it first calls it. ``peers``: a packed Listening.
    """
    listening: Listening = unpacked(peers)
    preparing = _memberships.get(listening.generation)
    if preparing is None or (preparing.has_joined and not preparing.is_client):
        raise BootstrapError(f"group {listening.group!r} was rolled back while it formed")
    if preparing.is_client:
        with _changing:
            _meet(preparing, listening)
            preparing.has_joined = True
        return
    local, info = preparing.local, _meet(preparing, listening)
    local.peers.add_peer(preparing.route(local.me))
    _reach_all(preparing, listening)
    with _changing:
        if _memberships.get(listening.generation) is not preparing:
            raise BootstrapError(f"group {info.name!r} was rolled back while it formed")
        preparing.has_joined = True
        if (period_s := info.config.metrics_period_s) != 0 and ray.is_initialized():
            read, fine = partial(reading, local, peers=False), period_s is not None
            Exporter(local.group, local.me.name, read, fine).start(local, TOTALS_S if period_s is None else period_s)
        if info.config.joinable_by != "nobody":
            parent().serve(local, preparing.spec.credentials.secret)
        _announce()
    enable_where_possible()  # also in actors that Ray restarted, or that another actor created


def _announce() -> None:
    """Have calls find the groups that this process is a member of."""
    set_locals(*(each.local for each in _memberships.values() if each.has_joined and not each.is_client))


def _meet(preparing: Membership, listening: Listening) -> GroupInfo:
    """Add the peers to what is going to be a member or a client; returns the group."""
    local, name = preparing.local, preparing.spec.name
    info = preparing.table.info.with_agents(listening.peers)
    preparing.table = Table(info, listening.peers, listening.version)
    local.me = next(member for member in info.members if member.name == name)
    add_peers(preparing, [member for member in info.members if member.name != name])
    for away, cause in listening.away.items():
        absence = JOINING if cause == JOINING.cause else Absence(cause, for_good=False)
        local.peers.mark_away(local.peers.member(away).rank, absence)
    return info


def add_peers(
    membership: Membership, peers: Sequence[Member], addresses: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Add peers. Quick: the first call to one decides its route and connects.

    ``addresses``: by peer and lane, those to connect to; None: all.
    """
    local, table = membership.local, membership.table
    names = [peer.name for peer in peers]
    maps = table.plan.gpu_maps(local.me.name, inward=True, others=names)
    listens = {name: table.peers[name].addresses for name in names} if addresses is None else addresses
    for lane in _lanes_of(local):
        lane.connect(
            [
                PeerAddress(name, listens[name][lane.name], inverse(maps.get(name, {})))
                for name in names
                if lane.name in listens[name]
            ]
        )
    local.peers.add_peers(peers, membership.route)


def _reach_all(membership: Membership, listening: Listening) -> None:
    """Check that this member reaches the others.

    Within a network namespace one ping per listener is enough, from its neighbour in rank. Between namespaces, a member
    of each pings each listener over every message lane, as a firewall may block one of them; the members of a namespace
    divide the listeners among them. So forming a group of n members on h hosts takes about n * h pings.
    """
    local, deadline = membership.local, time.monotonic() + listening.timeout_s
    asked: list[tuple[str, str, Pending]] = []
    silent: dict[str, str] = {}
    neighbours, far = whom_to_ping(local.me, membership.table.info, {*listening.away, *listening.silent})
    agents = local.config.torchrpc == "at once"  # else a ping over torchrpc would start the agents of both ends
    if not agents:
        urls = {
            name: membership.table.peers[name].addresses[registry.TORCHRPC].url
            for name in far
            if not isinstance(local.peers.route(name).torchrpc, AbsentLane)
        }
        silent.update(unreachable(urls, deadline))
    for name in (*neighbours, *far):
        route = local.peers.route(name)
        lanes = {route.calls, route.torchrpc} if name in far else {route.calls}
        lanes -= set() if agents else {route.torchrpc}
        for lane in (lane for lane in lanes if not isinstance(lane, AbsentLane)):
            try:
                pending = local.outgoing.control(route, lane, protocol.PING, listening.timeout_s)
                asked.append((name, lane.name, pending))
            except RayTorchRpcError as error:
                silent[name] = f"{error}"
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


def whom_to_ping(me: Member, info: GroupInfo, left_out: Set[str]) -> tuple[list[str], list[str]]:
    """The members that this one checks within its network namespace, and in others. Pure.

    ``left_out``: members that are not checked.
    """
    far = {*info.plan.far_from(me.name)}
    ring = [member for member in info.members if member.name not in left_out]
    here = [member.name for member in ring if member.name not in far]
    place = here.index(me.name)
    neighbour = ring[(ring.index(me) + 1) % len(ring)].name
    neighbours = [neighbour] if neighbour not in far and neighbour != me.name else []
    listeners = [member.name for member in ring if member.name in far]
    return neighbours, [name for number, name in enumerate(listeners) if number % len(here) == place]


def leave(instance: Any, generation: str, for_good: bool = False) -> None:
    """Leave that generation of a group, formed or forming, as a member or a client. Idempotent.

    ``for_good``: the generation has ended; a ``prepare`` for it that arrives later is refused.
    """
    if for_good:
        _given_up.append(generation)
    with _changing:
        if (membership := _memberships.get(generation)) is not None:
            _leave(membership)


def give_up(instance: Any, attempt: str) -> None:
    """Roll back an attempt to join; a ``prepare`` for it that arrives later is refused. Idempotent."""
    with _changing:
        _given_up.append(attempt)
        for membership in [each for each in _memberships.values() if each.spec.attempt == attempt]:
            _leave(membership)


def _leave(leaving: Membership) -> None:
    local = leaving.local
    try:
        if leaving.has_joined and not leaving.is_client:
            leaving.has_joined = False
            _announce()
        process_agent().rest(leaving.spec.generation)
        if leaving.vouch is not None:
            process_guard().stop(leaving.vouch)
        local.leave()
    except BaseException:  # Ctrl-C, in a process that has joined by itself: finish leaving first
        local.leave()
        raise
    finally:
        for generation in [each for each, membership in _memberships.items() if membership is leaving]:
            del _memberships[generation]


def client(generation: str) -> Membership | None:
    """This process as a client of that group."""
    membership = _memberships.get(generation)
    return membership if membership is not None and membership.is_client else None


def forget(generation: str) -> Membership | None:
    """In a forked child: drop what the parent is, without ending it. Returns that, for the caller to keep or not."""
    return _memberships.pop(generation, None)


def joined(generation: str) -> Membership | None:
    """This process as a member of that group, since it has joined."""
    membership = _memberships.get(generation)
    is_member = membership is not None and current.members.get(generation) is membership.local
    return membership if is_member else None


def own_consent(generation: str) -> bytes:
    """Shows the supervisor that a request is a member's: this process's."""
    if (membership := joined(generation)) is None:
        raise NotAMember("this process has left its group")
    return consent(membership.spec.credentials.secret, generation)


def infos() -> list[GroupInfo]:
    """The groups that this process is a member of."""
    return [membership.table.info for each in current.members if (membership := joined(each)) is not None]


def group_info(group: str) -> GroupInfo | None:
    """The one of that name or generation, or None."""
    return next((info for info in infos() if group in (info.name, info.generation)), None)


# --- what this process brings into a group ----------------------------------------------------------------------------


class Settings(NamedTuple):
    """See ``settings_of``."""

    agent: AgentSpec
    device_maps: Mapping[str, Mapping[int, int]]
    """By peer name: local GPU -> GPU there."""
    tcp_host: str | None
    """Address to listen on for peers in other network namespaces; None if there are none."""
    by_tcp: frozenset[str]
    """Those peers, by name."""
    lanes: tuple[str, ...]
    """The lanes that it opens: those that every member has, and those that some route of it uses."""


def settings_of(spec: JoinSpec, info: GroupInfo) -> Settings:
    """The settings of the member that ``spec`` is for. Pure."""
    plan, config, me = info.plan, info.config, spec.member
    agent, maps = plan.kind(me.name).agent, plan.gpu_maps(me.name)
    rpc_names = {member.name: member.rpc_name for member in info.members} if maps else {}
    by_tcp = frozenset(plan.far_from(me.name))
    agent_spec = AgentSpec(
        name=me.rpc_name,
        worker_id=me.worker_id,
        interface=agent.interface,
        address=agent.address,
        transports=agent.transports,
        channels=agent.channels,
        threads=config.torchrpc_threads,
        timeout_s=config.rpc_timeout_s,
        device_maps={rpc_names[peer]: pairs for peer, pairs in maps.items()},
        devices=plan.gpus_of(me.name),
        # torchrpc connects from whichever address leads to the peer.
        admitted=(*plan.addresses(), *config.torchrpc_from),
        at_once=config.torchrpc == "at once",
    )
    if is_client(me.rank):  # no member connects to it
        return Settings(
            agent_spec, maps, agent.address if spec.supervised_by_tcp else None, by_tcp, (registry.CONTROL,)
        )
    tcp_host = agent.address if by_tcp or spec.supervised_by_tcp else None
    lanes = [*(row.name for row in registry.LANES if row.always), *plan.lanes_of(me.name)]
    return Settings(agent_spec, maps, tcp_host, by_tcp, tuple(dict.fromkeys(lanes)))


def _open_lanes(opening: Membership, settings: Settings, addresses: dict[str, Any]) -> None:
    """Open the lanes of ``settings`` that this member has not open yet. ``addresses``: gets that of each as it opens.

    Raises LaneUnavailable if a message lane cannot open. A tensor lane that cannot is left out with a warning.
    """
    spec, local = opening.spec, opening.local
    setup = LaneSetup(
        member=spec.name,
        credentials=spec.credentials,
        config=local.config,
        endpoint=partial(endpoint, spec.name),
        tcp_host=settings.tcp_host,
        by_tcp=settings.by_tcp,
        interface=settings.agent.interface,
        devices=settings.agent.devices,
        device_maps=settings.device_maps,
    )
    opened = local.tensor_lanes.keys() | {lane.name for lane in local.lanes}
    opened |= {registry.TORCHRPC} if opening.no_agent else set()
    missing = [registry.lane(name) for name in settings.lanes if name not in opened]
    for row in sorted(missing, key=lambda row: not row.out_of_band):  # a message lane serves as soon as it is open
        lane = setup.make(row)
        if isinstance(lane, MessageLane):
            local.lanes.append(lane)
            try:
                addresses[row.name] = lane.open(partial(local.incoming.serve, lane), local.workers.submit)
            except BaseException:
                local.lanes.remove(lane)
                lane.close()
                raise
            if lane.beside is not None:
                local.tensor_lanes[row.name] = lane.beside
            continue
        try:
            addresses[row.name] = lane.open()
        except LaneUnavailable as error:
            logger.warning("%s: %s; the next lane of its routes carries its tensors instead", spec.name, error)
            continue
        local.tensor_lanes[row.name] = lane


def preload() -> None:
    """Import what joining a group needs, while the process of an actor starts: a group waits for its slowest member."""
    for row in registry.LANES:
        if row.always or row.carries == ("cpu",):
            registry.resolve(row, row.make)
    load_where_possible()


# --- changes of the group: the supervisor calls this, on a thread of the member's own, busy or not -------------------


def follow(local: LocalMember, delta: Delta) -> Answer:
    """Apply what has changed in the group, unless that has been done. After an error it can be applied again."""
    with _changing:
        following = _memberships.get(local.generation)
        if following is None or local is not following.local or not (following.has_joined or following.is_client):
            raise NotAMember(f"{local.me.name!r} has left the group")
        if (difference := following.table.difference(delta, local.me.rank)) is not None:
            if delta.reconnects:
                for peer in difference.coming:
                    process_agent().distrust(peer.member.rpc_name)
            _apply(following, difference, delta.version)
            following.table.version = delta.version
        own = following.table.peers[local.me.name] if following.changed > delta.base else None
        return Answer(following.table.version, own)


def _apply(following: Membership, difference: Difference, version: int) -> None:
    local, table = following.local, following.table
    for member, absence in difference.gone:
        if absence is None:
            local.peers.remove_peer(member.rank)
            _part(local, member.name, "it was removed from the group")
        else:
            _lose(local, member, absence)
    known = {peer.member.rank: table.members.get(peer.member.rank) for peer in difference.coming}
    table.update(difference)
    if not table.has_settled:
        _settle(following, version)
    states, away = {state.rank: state.absence for state in difference.states}, local.peers.away()
    for peer in difference.coming:
        rank, name = peer.member.rank, peer.member.name
        if rank in states or name not in away:
            local.peers.mark_away(rank, JOINING)
            states.setdefault(rank, None)
        if (before := known[rank]) is not None:
            process_agent().distrust(before.rpc_name)
        _part(local, name, "it left and came back")
    add_peers(following, [peer.member for peer in difference.coming])
    add_peers(
        following,
        [peer.member for peer, _ in difference.moved],
        {peer.member.name: new for peer, new in difference.moved},
    )
    for rank, absence in states.items():
        if absence is None:
            local.peers.activate(rank)
        elif absence != JOINING:
            _lose(local, table.members[rank], absence)


def _lose(local: LocalMember, member: Member, absence: Absence) -> None:
    """Calls in flight to this member fail, later ones fail at once, and what it held is released."""
    local.peers.mark_away(member.rank, absence)
    process_agent().distrust(member.rpc_name)
    _part(local, member.name, absence.cause)


def _settle(following: Membership, version: int) -> None:
    """Open the lanes that the present members need, and listen for them. Raises LaneUnavailable."""
    local, table, spec = following.local, following.table, following.spec
    settings = settings_of(spec, table.info)
    if not following.no_agent and not following.is_client:
        process_agent().admit(settings.agent.admitted, spec.generation)
    addresses: dict[str, Any] = {}
    try:
        _open_lanes(following, settings, addresses)
        for lane in _lanes_of(local):
            changed = lane.reach(settings.tcp_host, settings.by_tcp)
            if changed is not None:
                addresses[lane.name] = changed
    finally:  # if one cannot open, the others are not opened again by the next attempt
        if addresses:
            own = table.peers[spec.name]
            table.peers[spec.name] = own._replace(addresses={**own.addresses, **addresses})
            following.changed = version
    table.has_settled = True


def _part(local: LocalMember, name: str, cause: str) -> None:
    """Disconnect from a peer, and end a process group that includes it."""
    process_group.collectives_of(local).lose(name, cause)
    for lane in _lanes_of(local):
        lane.disconnect(name)


def _lanes_of(local: LocalMember) -> list[PeerLane]:
    return [*local.lanes, *local.tensor_lanes.values()]
