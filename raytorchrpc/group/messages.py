"""The messages by which a member joins a group and follows its changes. Data only, picklable."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.rejoin import Owner
from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity
from raytorchrpc.routing.routes import RoutePlan
from raytorchrpc.topology.endpoint import Endpoint


class GroupOf(NamedTuple):
    """A group that a process is a member of."""

    name: str
    generation: str
    owner: Owner
    """The process that formed it."""


class Probe(NamedTuple):
    """What a process reports before routes are planned."""

    endpoint: Endpoint
    node_id: str
    pid: int
    groups: tuple[GroupOf, ...]
    """Those that it is a member of; once it may be admitted, those that it leaves before."""
    agent: AgentIdentity | None
    autograd_id: int | None


class JoinSpec(NamedTuple):
    """What only one member needs in order to join; the rest follows from what all members share (``GroupInfo``)."""

    member: Member
    credentials: Credentials
    """What its connections authenticate with."""
    attempt: str
    """Identifies this attempt to join, which may be rolled back."""
    replaces: tuple[str, ...]
    """The generations of groups whose owners have ended: the member leaves them first."""
    renew_agent: bool
    """Another member has the id of its running torchrpc agent: start a new agent."""
    supervised_by_tcp: bool
    """The supervisor cannot reach it by Unix socket."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def group(self) -> str:
        return self.credentials.group

    @property
    def generation(self) -> str:
        return self.credentials.generation


class JoinedProcess(NamedTuple):
    """In place of an actor's handle: a process that joined by itself. The group does not ask Ray about it."""

    key: str
    """Of this process alone."""
    actor_id: str | None
    """Of the actor that it holds, if any: Ray may restart that, and then it may join again."""


class JoinRequest(NamedTuple):
    """What a process that would join tells the supervisor."""

    name: str
    address: SocketAddress
    """Where it listens meanwhile."""
    process: JoinedProcess
    consent: bytes
    attempt: str
    """See JoinSpec."""
    timeout_s: float


class LeaveRequest(NamedTuple):
    """A member that joined by itself leaves."""

    name: str
    incarnation: int
    consent: bytes


class Prepared(NamedTuple):
    """A participant that listens."""

    agent: AgentIdentity
    addresses: Mapping[str, Any]
    """By lane name."""
    retries: Mapping[str, int]
    """By exposed method: how often a call may be sent again, where that is above 0."""
    pid: int


class GroupInfo(NamedTuple):
    """The public description of a group, the same for all members."""

    name: str
    generation: str
    owner: Owner
    members: tuple[Member, ...]
    config: GroupConfig
    plan: RoutePlan

    def with_agents(self, prepared: Mapping[str, Prepared]) -> GroupInfo:
        """With the torchrpc names and ids that the members' processes have."""

        def with_agent(member: Member) -> Member:
            agent = prepared[member.name].agent
            if (agent.name, agent.worker_id) == (member.rpc_name, member.worker_id):
                return member  # as the driver has planned it, nearly always
            return replace(member, rpc_name=agent.name, worker_id=agent.worker_id)

        return self._replace(members=tuple(map(with_agent, self.members)))


class Listening(NamedTuple):
    """What the participants need in order to connect, the same for all."""

    group: str
    generation: str
    peers: Mapping[str, Prepared]
    """Of all members, by name."""
    timeout_s: float
    """For the peers to answer."""
    away: Mapping[str, str] = {}
    """Members that cannot be called for now, and why."""
    silent: tuple[str, ...] = ()
    """Members that did not answer recently: connections to them are not tested."""
    version: int = 1
    """Of the view (see ``view``) that all this is taken from, once the participants have joined."""


def packed(message: GroupInfo | Listening) -> bytes:
    """A message that is the same for all members, as bytes: most of it is repetition."""
    return zlib.compress(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), 1)


def unpacked(data: bytes) -> Any:
    """The message that ``packed`` has made bytes of."""
    return pickle.loads(zlib.decompress(data))
