"""The members of a group: what they published, the routes that follow from it, and what each needs to join."""

from __future__ import annotations

import itertools
import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.rejoin import Owner
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError, NotAMember
from raytorchrpc.group import worker_ids
from raytorchrpc.group.messages import GroupInfo, JoinedProcess, JoinSpec, Prepared, Probe
from raytorchrpc.group.view import Peer
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.routing import planner
from raytorchrpc.routing.routes import RoutePlan
from raytorchrpc.topology import device_map
from raytorchrpc.topology.endpoint import Endpoint


def is_actor(handle: Any) -> bool:
    return handle is not None and not isinstance(handle, JoinedProcess)


def _actor_id(handle: Any) -> str | None:
    """Hex id of the actor in a member's process, if it holds one."""
    if isinstance(handle, JoinedProcess):
        return handle.actor_id
    return None if handle is None else ray_internals.actor_id_of(handle)


@dataclass(frozen=True)
class MemberRecord:
    """One member as it is now. A restarted actor keeps its rank and gets the next incarnation."""

    member: Member
    handle: Any
    """An actor's, a JoinedProcess, or None for the driver itself."""
    probe: Probe
    renew_agent: bool
    """Another member has the id of its running torchrpc agent: it starts a new agent."""

    @property
    def starts_agent(self) -> bool:
        """Whether its process gets a torchrpc agent with an id that it did not have."""
        return self.member.worker_id >= 0 and (self.probe.agent is None or self.renew_agent)

    @property
    def process(self) -> tuple[int, int]:
        return self.member.rank, self.member.incarnation


@dataclass(frozen=True)
class Roster:
    """Immutable: admitting a member makes another roster, so a failed attempt changes nothing."""

    name: str
    config: GroupConfig
    owner: Owner
    watcher: Endpoint
    """The supervisor's process: members that it cannot reach by Unix socket listen on TCP."""
    generation: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    tls: bytes | None = field(default=None, repr=False)
    """The key and certificate of a group that encrypts."""
    records: Mapping[str, MemberRecord] = field(default_factory=dict)
    """By member, in rank order."""
    clients: Mapping[str, MemberRecord] = field(default_factory=dict)
    """By name, processes that use the group and that its members do not know."""
    plan: RoutePlan = field(default_factory=lambda: RoutePlan(GroupConfig(), (), {}))
    highest_id: int = -1
    """The highest torchrpc id that a member has, or had, or that is in use elsewhere; see ``worker_ids``."""
    next_rank: int = 0
    tried: Mapping[int, int] = field(default_factory=dict)
    """By rank, the latest incarnation that was to be admitted: some member may know it."""

    def admit(self, handles: Mapping[str, Any], probes: Mapping[str, Probe], beside: Roster | None = None) -> Roster:
        """The roster with these members, new or restarted. Raises ConfigurationError, BootstrapError.

        ``beside``: this roster with members that others are admitting: these have to suit those too, as both may come.
        """
        if beside is not None:
            highest = max(self.highest_id, beside.highest_id)
            return self.with_members(replace(beside, highest_id=highest).admit(handles, probes), probes)
        records, fresh = dict(self.records), itertools.count(self.next_rank)
        ranks = {name: records[name].member.rank if name in records else next(fresh) for name in probes}
        taken = {record.member.worker_id for record in records.values()}
        highest = worker_ids.highest_known(self.highest_id, probes)
        ids, renew = worker_ids.assign(ranks, probes, taken, highest)
        for name, probe in probes.items():
            before = records[name].member if name in records else None
            actor_id = _actor_id(handles[name])
            member = Member(
                rank=ranks[name],
                name=name,
                actor_id=actor_id,
                node_id=probe.node_id,
                pid=probe.pid,
                rpc_name=_rpc_name(actor_id, probe),
                worker_id=ids[name],
                incarnation=max(before.incarnation if before else -1, self.tried.get(ranks[name], -1)) + 1,
                group=self.name,
            )
            records[name] = MemberRecord(member, handles[name], probe, name in renew)
        highest = max(highest, *ids.values())
        return replace(self, highest_id=highest, next_rank=next(fresh))._planned(records, probes)

    def _planned(self, records: Mapping[str, MemberRecord], new: Iterable[str]) -> Roster:
        """This roster with these members, of which some are new."""
        endpoints = {name: record.probe.endpoint for name, record in records.items()}
        if not self.config.across_users and not self.config.always_tcp:
            _check_users({**endpoints, "the process that forms the group": self.watcher})
        device_map.check(self.config, endpoints)
        plan = planner.plan(endpoints, self.config)
        if self.plan.kind_of:  # the agents of running processes stay as they are
            plan = self.plan.merged(plan.part(new), endpoints)
        return replace(self, records=records, plan=plan)

    def as_seen_by(self, name: str, client: JoinedProcess, probe: Probe, rank: int) -> Roster:
        """The group as this client has it: with itself as the last member. Raises ConfigurationError."""
        member = Member(
            rank, name, client.actor_id, probe.node_id, probe.pid, rpc_name="", worker_id=-1, group=self.name
        )
        return self._planned({**self.records, name: MemberRecord(member, client, probe, False)}, [name])

    def with_client(self, name: str, seen: Roster) -> Roster:
        """This roster with a client, which has the group as ``seen``."""
        return replace(self, clients={**self.clients, name: seen.records[name]})

    def record(self, name: str) -> MemberRecord:
        return self.records.get(name) or self.clients[name]

    def after_failure(self, attempt: Roster, names: Iterable[str]) -> Roster:
        """This roster after an attempt to admit these members, which some member may know: ids and ranks are taken."""
        tried = [attempt.records[name].member for name in names if name in attempt.records]
        incarnations = {member.rank: member.incarnation for member in tried}
        highest_id, next_rank = max(self.highest_id, attempt.highest_id), max(self.next_rank, attempt.next_rank)
        return replace(self, tried={**self.tried, **incarnations}, highest_id=highest_id, next_rank=next_rank)

    def with_members(self, other: Roster, names: Iterable[str]) -> Roster:
        """This roster with these members as they are in the other one."""
        merged = {**self.records, **{name: other.records[name] for name in names}}
        records = {name: merged[name] for name in sorted(merged, key=lambda name: merged[name].member.rank)}
        plan = self.plan.merged(other.plan.part(names), records) if self.plan.kind_of else other.plan.part(names)
        return replace(self, records=records, plan=plan).after_failure(other, names)

    def with_former(self, before: Roster, names: Iterable[str]) -> Roster:
        """This roster with these members as they were before, as their admission has failed."""
        former = [name for name in names if name in self.records]
        return self.with_members(before, former).after_failure(self, former)

    @property
    def credentials(self) -> Credentials:
        """What the supervisor authenticates with. It does not make it a member."""
        return Credentials(
            self.secret,
            group=self.name,
            generation=self.generation,
            across_users=self.config.across_users,
            tls=self.tls,
        )

    def check_newcomers(self, handles: dict[str, Any], joining: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return these. Raises ConfigurationError for actors or names that are members already, or are joining."""
        members = {**self.handles, **(joining or {})}
        known = {actor_id: name for name, handle in members.items() if (actor_id := _actor_id(handle))}
        for name, handle in handles.items():
            if name in members:
                raise ConfigurationError(f"group {self.name!r} has a member {name!r} already")
            if (taken := known.get(_actor_id(handle) or "")) is not None:
                raise ConfigurationError(f"{name!r} is a member of group {self.name!r} already, as {taken!r}")
        return handles

    def check_leavers(self, names: Sequence[str]) -> None:
        """Raise ConfigurationError unless all of these can be removed; NotAMember for names that are not members."""
        for name in names:
            if name not in self.records:
                raise NotAMember(f"{name!r} is not in group {self.name!r} any more")
            if names.count(name) > 1:
                raise ConfigurationError(f"remove takes each member once: {name!r} is named {names.count(name)} times")
            if self.records[name].handle is None:
                raise ConfigurationError("the driver stays as long as its group: use shutdown()")
        if not names:
            raise ConfigurationError("remove takes at least one member; the list is empty")
        if len(names) == len(self.records):
            raise ConfigurationError(f"{', '.join(names)}: no member would be left in the group: use shutdown()")

    def without(self, names: Iterable[str]) -> Roster:
        """The roster without these members. Their ranks are not used again."""
        gone = set(names)
        remaining = {name: record for name, record in self.records.items() if name not in gone}
        clients = {name: record for name, record in self.clients.items() if name not in gone}
        return replace(self, records=remaining, clients=clients, plan=self.plan.part(remaining))

    @property
    def handles(self) -> dict[str, Any]:
        return {name: record.handle for name, record in self.records.items()}

    @property
    def by_themselves(self) -> set[str]:
        """Members that joined by themselves: their processes may be busy for ever, and Ray may not reach them."""
        return {name for name, record in self.records.items() if isinstance(record.handle, JoinedProcess)}

    def reached_by_tcp(self, name: str) -> bool:
        """Whether the supervisor needs TCP to reach this member or client."""
        return self.config.always_tcp or not self.record(name).probe.endpoint.same_network(self.watcher)

    def spec(self, member: str, attempt: str = "") -> JoinSpec:
        """What only this member needs in order to prepare. ``attempt``: see JoinSpec."""
        record = self.records[member]
        me = record.member
        return JoinSpec(
            member=me,
            credentials=replace(self.credentials, rank=me.rank, incarnation=me.incarnation),
            attempt=attempt,
            replaces=tuple(group.generation for group in record.probe.groups),
            renew_agent=record.renew_agent,
            supervised_by_tcp=self.reached_by_tcp(member),
        )

    @property
    def description(self) -> GroupInfo:
        """The group as it is planned, before its members listen: the same for all."""
        members = tuple(record.member for record in self.records.values())
        return GroupInfo(self.name, self.generation, self.owner, members, self.config, self.plan)

    def info(self, prepared: Mapping[str, Prepared]) -> GroupInfo:
        return self.description.with_agents(prepared)

    def peers(self, prepared: Mapping[str, Prepared], names: Iterable[str] | None = None) -> list[Peer]:
        """These members, or all, as the others reach them."""
        info = self.info(prepared)
        these = {*(self.records if names is None else names)}
        return [
            Peer(member, prepared[member.name], self.plan.kind(member.name))
            for member in info.members
            if member.name in these
        ]


def _rpc_name(actor_id: str | None, probe: Probe) -> str:
    if probe.agent is not None:
        return probe.agent.name
    # No colon: torch's RemoteModule takes "name/device" and reads a colon as "rank:".
    return f"rtr-driver-{probe.node_id[:12]}-{probe.pid}" if actor_id is None else f"rtr-{actor_id}"


def _check_users(endpoints: Mapping[str, Endpoint]) -> None:
    """Raise ConfigurationError if two processes that would connect by Unix sockets run as different users."""
    first: dict[str, tuple[str, Endpoint]] = {}
    for name, endpoint in endpoints.items():
        network = f"{endpoint.boot_id} {endpoint.namespaces.get('net', name)}"
        other_name, other = first.setdefault(network, (name, endpoint))
        if other.uid != endpoint.uid or other.namespaces.get("user") != endpoint.namespaces.get("user"):
            raise ConfigurationError(
                f"{other_name} (uid {other.uid}) and {name} (uid {endpoint.uid}) share a host and run as "
                "different users, or in different user namespaces; if all of them may run code as each other, use "
                "GroupConfig(across_users=True)"
            )
