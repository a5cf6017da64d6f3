"""What is said when a member joins a group: by its process, to it, and of the group. Data alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raytorchrpc.calls.mailbox import Owner
from raytorchrpc.calls.peers import Member
from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes.common.credentials import Credentials
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, AgentSpec
from raytorchrpc.routing.routes import RoutePlan
from raytorchrpc.tensors.devices import Device
from raytorchrpc.topology.endpoint import Endpoint


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
    tls: bytes | None
    """Likewise the key and the certificate, for a group that encrypts."""
    tcp_host: str | None
    """Address to listen on for peers in other network namespaces; None if there are none."""
    by_tcp: tuple[str, ...]
    """Those peers."""
    lanes: tuple[str, ...]
    """Lanes that some route of this member uses."""

    @property
    def credentials(self) -> Credentials:
        """What its connections are proved with."""
        across_users = self.config.across_users
        return Credentials(
            self.secret, self.rank, self.incarnation, self.group, self.generation, across_users, self.tls
        )


class Prepared(NamedTuple):
    """A member that listens."""

    agent: AgentIdentity
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
