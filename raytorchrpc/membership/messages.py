"""The messages by which a member joins a group and follows its changes. Data only, picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.rejoin import Owner
from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, AgentSpec
from raytorchrpc.routing.routes import RoutePlan
from raytorchrpc.tensors.devices import Device
from raytorchrpc.topology.endpoint import Endpoint


class Probe(NamedTuple):
    """What a process reports before routes are planned."""

    endpoint: Endpoint
    node_id: str
    pid: int
    group: str | None
    """The group that it is a member of."""
    generation: str | None
    """Of that group."""
    owner: Owner | None
    """The process that formed that group."""
    agent: AgentIdentity | None
    autograd_id: int | None


class JoinSpec(NamedTuple):
    """What one member needs in order to prepare."""

    member: Member
    credentials: Credentials
    """What its connections authenticate with."""
    attempt: str
    """Identifies this attempt to join, which may be rolled back."""
    replaces: str | None
    """The generation of a group whose owner has ended: the member leaves it first."""
    config: GroupConfig
    agent: AgentSpec
    renew_agent: bool
    """Another member has the id of its running torchrpc agent: start a new agent."""
    device_maps: Mapping[str, Mapping[int, int]]
    """By peer name: local GPU -> GPU there."""
    tcp_host: str | None
    """Address to listen on for peers in other network namespaces; None if there are none."""
    by_tcp: tuple[str, ...]
    """Those peers, by name."""
    lanes: tuple[str, ...]
    """The lanes that some route of this member uses."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def group(self) -> str:
        return self.credentials.group

    @property
    def generation(self) -> str:
        return self.credentials.generation


class Prepared(NamedTuple):
    """A participant that listens."""

    agent: AgentIdentity
    addresses: Mapping[str, Any]
    """By lane name."""
    retries: Mapping[str, int]
    """By exposed method: how often a call may be sent again, where that is above 0."""
    pid: int


#: By member, then by peer: local gpu or "cpu" -> peer gpu or "cpu".
DeviceMaps = Mapping[str, Mapping[str, Mapping[Device, Device]]]


class GroupInfo(NamedTuple):
    """The public description of a group."""

    name: str
    generation: str
    owner: Owner
    members: tuple[Member, ...]
    config: GroupConfig
    plan: RoutePlan
    device_maps: DeviceMaps


class Table(NamedTuple):
    """What a member needs in order to connect to its peers."""

    info: GroupInfo
    peers: Mapping[str, Prepared]
    """By member name."""
    timeout_s: float = 0.0
    """For the peers to answer."""
    away: Mapping[str, str] = {}
    """Members that cannot be called for now, and why."""
    silent: tuple[str, ...] = ()
    """Members that did not answer recently: connections to them are not tested."""

    def merged(self, new: Table) -> Table:
        """This table with the entries of ``new`` added, or in place of older ones."""
        before, now = self.info, new.info
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
                stay = {peer: pairs for peer, pairs in row.items() if peer not in coming}
                maps[name] = {**stay, **maps.get(name, {})}
        info = now._replace(members=tuple(members), plan=plan, device_maps=maps)
        return new._replace(info=info, peers={**self.peers, **new.peers})


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
