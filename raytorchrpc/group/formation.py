"""Forms a group, or admits members to one: names, probe, prepare, commit, and the way back from each step."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.peers import Member, described, find, keys_of
from raytorchrpc.calls.rejoin import Owner
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError, RayTorchRpcError
from raytorchrpc.group import join, ray_calls, worker_ids
from raytorchrpc.group.control_connections import Arguments
from raytorchrpc.group.messages import GroupInfo, GroupOf, JoinRequest, Listening, Prepared, Probe, packed
from raytorchrpc.group.restarted import lasts
from raytorchrpc.group.roster import Roster, is_actor
from raytorchrpc.lanes import registry
from raytorchrpc.process.fan_out import Answers
from raytorchrpc.topology import device_map

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: How long a rollback waits for the participants, usually and where they return; and how long beyond the deadline of
#: the attempt (seconds).
_UNDO_S, _LATE_S = (5.0, 0.5), 1.0
#: Longer messages go through Ray's object store; shorter ones within the call (bytes).
_LONG = 16 << 10
#: The name of a driver that is a member.
DRIVER = "driver"


def current_owner() -> Owner:
    """This process, as the owner of the groups it forms."""
    context = ray.get_runtime_context()
    actor_id = context.get_actor_id()
    worker = context.get_worker_id() if actor_id is None and ray_internals.runs_tasks() else None
    return Owner(context.get_job_id(), actor_id, os.getpid(), context.get_node_id(), worker)


def participants_of(
    actors: Any, include_driver: bool, first_rank: int = 0, *, others_join: bool = False, taken: Collection[str] = ()
) -> dict[str, Any]:
    """Members by name, in rank order; the driver's handle is None. Raises ConfigurationError.

    ``taken``: names that others have, so that none is generated twice.
    """
    if not ray.is_initialized():
        raise ConfigurationError("call ray.init() before init_group")
    if isinstance(actors, ActorHandle) or not isinstance(actors, (Mapping, Sequence)) or isinstance(actors, str):
        raise ConfigurationError(f"init_group takes a list or a dict of actor handles, not {actors!r}")
    pairs = list(actors.items()) if isinstance(actors, Mapping) else [(None, actor) for actor in actors]
    if not pairs and not (include_driver and others_join):
        raise ConfigurationError(
            "init_group needs at least one actor handle; the list is empty (a driver can wait for others to join: "
            "include_driver=True and GroupConfig(joinable_by='cluster'))"
        )
    named: dict[str, Any] = {}
    seen: dict[str, str] = {}
    blocked = ray_internals.blocked_actor()
    for rank, (given, handle) in enumerate(pairs):
        label = f"actors[{rank if given is None else given!r}]"
        if not isinstance(handle, ActorHandle):
            raise ConfigurationError(
                f"{label} is not an actor handle but {handle!r}; pass what Class.remote() or ray.get_actor() returns"
            )
        member = _generated_name(handle, first_rank + rank, taken) if given is None else given
        check_name(label, member)
        actor_id = ray_internals.actor_id_of(handle)
        if actor_id == blocked:
            raise ConfigurationError(
                f"{label} is this actor, which cannot answer while this method runs: leave it out; include_driver=True "
                f"makes this process a member"
            )
        if actor_id in seen:
            raise ConfigurationError(f"{label} is the same actor as {seen[actor_id]}")
        seen[actor_id] = label
        named[member] = handle
    if include_driver:
        if DRIVER in named:
            raise ConfigurationError(f"the name {DRIVER!r} is the driver's own with include_driver=True")
        named[DRIVER] = None
    return named


def check_name(label: str, name: Any) -> None:
    """Raise ConfigurationError for what cannot name a member."""
    if not isinstance(name, str) or not re.fullmatch(r"(?!\d+$)[A-Za-z0-9_.:-]{1,64}", name):
        raise ConfigurationError(
            f"{label}: {name!r} cannot name a member; use up to 64 letters, digits or '_.:-', not digits alone"
        )


def with_named_maps(config: GroupConfig, participants: Mapping[str, Any]) -> GroupConfig:
    """The settings, with the members of device maps by name. Raises ConfigurationError.

    ``participants``: as ``participants_of`` returns them.
    """
    if not config.device_maps:
        return config
    actors = [None if handle is None else ray_internals.actor_key(handle) for handle in participants.values()]
    by_key = {
        key: name
        for rank, (name, actor) in enumerate(zip(participants, actors, strict=True))
        for key in keys_of(rank, name, actor)
    }

    def name_of(target: Any) -> str:
        return find(target, by_key, lambda: described("the group", enumerate(participants)))

    return replace(config, device_maps=device_map.given_maps(config, name_of))


def _generated_name(handle: Any, rank: int, taken: Collection[str]) -> str:
    ascii_only = re.sub(r"[^A-Za-z0-9_]", "_", ray_internals.actor_class_name(handle))
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", ascii_only).lower()
    return next(name for number in itertools.count(rank) if (name := f"{snake[:48]}_{number}") not in taken)


class Formation:
    """The steps by which members join: for ``init_group``, ``Group.add`` and the return of a restarted actor."""

    def __init__(
        self,
        roster: Roster,
        participants: dict[str, Any],
        timeout_s: float,
        call_all: Callable[..., Answers] | None = None,
        *,
        deadline: float | None = None,
        patience: ray_calls.Patience | None = None,
        attempt: str | None = None,
        returns: bool = False,
    ) -> None:
        """``participants``: the handles of those that join, by name. ``roster``: of the members so far.

        ``call_all``: calls the participants, as ``ray_calls.call_all`` does, but without Ray's references to objects;
        None: that. ``deadline``: None: ``timeout_s`` from now on, or that of ``patience``, which ``call_all`` then
        takes. ``attempt``: see JoinSpec; None: a new one. ``returns``: they are back after a restart. Then the others
        join without those that cannot be probed or prepared, unless that is all of them.
        """
        self.participants = participants
        self.left_out: list[str] = []
        """Former participants that have failed."""
        self._returns = returns
        self.roster = self._before = roster
        self.timeout_s, self._undo_s = timeout_s, _UNDO_S[returns]
        self._began, self._patience = time.monotonic(), patience
        self._deadline = self._began + timeout_s if deadline is None else deadline
        self._call_all, self._by_reference = call_all or ray_calls.call_all, call_all is None
        self._attempt = attempt or uuid.uuid4().hex[:12]
        self._restarting = False
        """Ray reported that a participant restarts when the attempt was rolled back."""

    @property
    def ranks(self) -> dict[str, int]:
        """Of the participants, by name, once they are assigned."""
        return {name: self.roster.records[name].member.rank for name in self.participants}

    @property
    def deadline(self) -> float:
        """Of all steps together (``time.monotonic``)."""
        return self._deadline if self._patience is None else self._patience.deadline

    def probe(self) -> None:
        """Have every process describe itself. Changes nothing there."""
        lanes = registry.foreign(self.roster.config.lanes)
        arguments = {member: (member, lanes) for member in self.participants}
        probes = self._ask("could not be probed", join.probe, arguments, retry_restarting=True)
        self._probes = self._leaving({member: probes[member] for member in self.participants})
        self._elsewhere = worker_ids.highest_elsewhere([*self.roster.handles.values(), *self.participants.values()])

    def assign(self, roster: Roster, beside: Roster | None = None) -> None:
        """Give the participants ranks and ids, beside the members of ``roster``, and decide routes and device maps.

        ``beside``: see ``Roster.admit``.
        """
        self._before = roster
        highest = max(roster.highest_id, self._elsewhere)
        self.roster = replace(roster, highest_id=highest).admit(self.participants, self._probes, beside)

    def has_others(self, roster: Roster) -> bool:
        """Whether ``roster`` has other members, the participants aside, than the participants were told; then they are
        told those by the next ``prepare``.
        """

        def others(of: Roster) -> dict[str, Member]:
            return {name: record.member for name, record in of.records.items() if name not in self.participants}

        if others(roster) == others(self.roster):
            return False
        self._before, self.roster = roster, roster.with_members(self.roster, self.participants)
        return True

    def _leaving(self, probes: Mapping[str, Probe]) -> dict[str, Probe]:
        """What was probed, with those groups alone that the participants leave first: groups that have ended, and this
        generation, where an earlier attempt was answered too late. Raises BootstrapError for one that is in a group of
        this name already.
        """
        lasting = functools.cache(lasts)

        def leaves(member: str, group: GroupOf) -> bool:
            if group.generation in (self.roster.generation, *ray_calls.ended_here) or not lasting(group.owner):
                return True
            if group.name == self.roster.name:
                raise BootstrapError(
                    f"{member!r} is already in group {group.name!r}; end that one first "
                    f"(get_group({group.name!r}).shutdown() in the process that formed it), or choose another name=",
                    members=(member,),
                )
            return False

        return {
            member: probe._replace(groups=tuple(group for group in probe.groups if leaves(member, group)))
            for member, probe in probes.items()
        }

    def prepare(self) -> dict[str, Prepared]:
        """Have every participant start to listen."""
        records = self.roster.records
        if any(records[name].starts_agent for name in self.participants):
            # All of them: whoever has known an id that a newcomer gets must not meet another process under it, even if
            # the group is not formed in the end.
            worker_ids.record(each.member for each in records.values())
        group = self._shared(self.roster.description)
        specs = {name: (self.roster.spec(name, self._attempt), group(name)) for name in self.participants}
        prepared: dict[str, Prepared] = self._ask("could not start", join.prepare, specs)
        if others := tuple(name for name, answer in prepared.items() if answer.pid != records[name].probe.pid):
            raise BootstrapError(
                f"group {self.roster.name!r} {self._begun()}: Ray restarted {', '.join(others)} meanwhile",
                members=others,
            )
        highest = max(answer.agent.highest_id for answer in prepared.values())
        self.roster = replace(self.roster, highest_id=max(self.roster.highest_id, highest))
        return prepared

    def raise_unless_restarted(self, error: RayTorchRpcError) -> None:
        """Raise the error of this attempt, unless another one may succeed.

        An actor that went away for a restart after it was probed returns as another process.
        """
        if isinstance(error, ConfigurationError) or time.monotonic() >= self.deadline:
            raise error
        if not isinstance(error.__cause__, ActorUnavailableError) and not self.has_restarted():
            raise error

    def has_restarted(self) -> bool:
        """Whether Ray has restarted a participant since it was probed, or is about to: for an attempt that failed."""
        if self._restarting:
            return True
        for name in self.participants.keys() & self.roster.records.keys():
            record = self.roster.records[name]
            if is_actor(record.handle):
                actor = ray_internals.actor_state(ray_internals.actor_id_of(record.handle))
                same = (actor.pid, actor.node_id) == (record.probe.pid, record.probe.node_id)
                if actor.state != "DEAD" and not (same and actor.state == "ALIVE"):
                    return True
        return False

    def commit(
        self,
        prepared: Mapping[str, Prepared],
        away: Mapping[str, str] | None = None,
        silent: Collection[str] = (),
        version: int = 1,
    ) -> None:
        """Have every participant connect to the other members. ``prepared``: of the whole roster. ``away``, ``silent``:
        members that cannot be reached; these and ``version``: see Listening.
        """
        remaining_s = max(1.0, self.deadline - time.monotonic())
        peers = {name: prepared[name] for name in self.roster.records}
        group = self.roster.name, self.roster.generation
        listening = self._shared(Listening(*group, peers, remaining_s, dict(away or {}), tuple(silent), version))
        arguments = {member: (listening(member),) for member in self.participants}
        self._ask("could not reach the others", join.commit, arguments)

    def _shared(self, message: GroupInfo | Listening) -> Callable[[str], Any]:
        """By participant, the argument by which it gets a message that all of them get: packed once, and where it is
        long put once into Ray's object store, which moves one copy to each node.
        """
        data = packed(message)
        stored = ray.put(data) if self._by_reference and len(data) > _LONG else data
        return lambda member: data if self.participants[member] is None else stored

    def roll_back(self) -> None:
        """Undo what was begun. A participant that is stuck undoes it as soon as it runs again."""
        now = time.monotonic()
        until = min(now + self._undo_s, max(now, self.deadline) + _LATE_S)
        arguments = {member: (self._attempt,) for member in self.participants}
        _, failures = self._call_all(self.participants, join.give_up, arguments, until)
        self._restarting = any(isinstance(error, ActorUnavailableError) for error in failures.values())

    def _ask(
        self, failure: str, function: Callable[..., Any], arguments: Arguments, retry_restarting: bool = False
    ) -> dict[str, Any]:
        """Results by member. Raises ConfigurationError or BootstrapError; ``failure``: what they failed to do."""
        options: dict[str, Any] = {"fail_fast": True, "retry_restarting": retry_restarting, "patience": self._patience}
        answers, failures = self._call_all(self.participants, function, arguments, self.deadline, **options)
        if not failures:
            return answers
        if answers and self._returns:
            self._leave_out(failures)
            return answers
        silent = [member for member, error in failures.items() if isinstance(error, TimeoutError)][: ray_calls.NAMED]
        why = ray_calls.why_silent({name: handle for name in silent if is_actor(handle := self.participants[name])})
        reasons = "; ".join(f"{member!r}: {self._reason(error, why.get(member))}" for member, error in failures.items())
        cause = next(iter(failures.values()))
        if isinstance(cause, ConfigurationError):
            raise cause
        # A participant that reports another one is named with it.
        named = [name for error in failures.values() for name in getattr(error, "members", ())]
        count = f"{len(failures)} of {len(self.participants)}"
        raise BootstrapError(
            f"group {self.roster.name!r} {self._begun()}: {count} {failure}: {reasons}",
            members=tuple(dict.fromkeys((*failures, *named))),
        ) from cause

    def _leave_out(self, failures: Mapping[str, Exception]) -> None:
        for name, error in failures.items():
            logger.warning("group %r %s: %s: %s", self.roster.name, self._begun(), name, self._reason(error, None))
        out = {name: self.participants[name] for name in failures}
        self.participants = {name: handle for name, handle in self.participants.items() if name not in out}
        self.left_out += out
        self.roster = self.roster.with_former(self._before, out)
        self._call_all(out, join.give_up, dict.fromkeys(out, (self._attempt,)), time.monotonic())

    def _begun(self) -> str:
        coming_in = any(name not in self.participants for name in self.roster.records)
        return "did not admit them" if coming_in else "was not formed"

    def _reason(self, error: Exception, why_silent: str | None) -> str:
        if isinstance(error, TimeoutError):
            why = why_silent or "is it still starting, waiting for resources, or busy?"
            waited = time.monotonic() - self._began  # longer than the timeout while processes load
            seconds = self.timeout_s if waited < self.timeout_s + 1 else round(waited)
            return f"no answer within {seconds:g} s: {why} (a sync actor answers between its methods)"
        text = re.sub(r"\x1b\[\d*m|^[ ~^]+$", "", str(error), flags=re.MULTILINE)  # Ray's colours, marks of tracebacks
        return " ".join(text.split()) or repr(error)


class ClientFormation(Formation):
    """The steps by which a process becomes a client."""

    def __init__(self, roster: Roster, request: JoinRequest, rank: int, call_all: Callable[..., Answers]) -> None:
        newcomer = {request.name: request.process}
        super().__init__(roster, newcomer, request.timeout_s, call_all, attempt=request.attempt)
        self.name, self._process, self._rank = request.name, request.process, rank

    def assign(self, roster: Roster, beside: Roster | None = None) -> None:
        self.roster = roster.as_seen_by(self.name, self._process, self._probes[self.name], self._rank)

    def _leaving(self, probes: Mapping[str, Probe]) -> dict[str, Probe]:
        """A client leaves no group."""
        return {member: probe._replace(groups=()) for member, probe in probes.items()}


def form_group(
    roster: Roster,
    participants: dict[str, Any],
    timeout_s: float,
    finish: Callable[[Roster, Mapping[str, Prepared]], T],
) -> T:
    """Form a new group; returns what ``finish`` makes of it. Leaves nothing behind if either fails."""
    try:
        patience = ray_calls.Patience(roster.name, timeout_s)
        while True:
            formation = Formation(roster, participants, timeout_s, patience=patience)
            try:
                formation.probe()
                formation.assign(roster)
                try:
                    prepared = formation.prepare()
                    formation.commit(prepared)
                    return finish(formation.roster, prepared)
                except BaseException:
                    formation.roll_back()
                    raise
            except (BootstrapError, ConfigurationError) as error:
                formation.raise_unless_restarted(error)
    except BaseException:
        ray_calls.ended_here.append(roster.generation)  # Ctrl-C may have ended the rollback, too
        raise
