"""How a group forms: the driver's questions to the members, step by step, and the way back from each."""

from __future__ import annotations

import random
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from raytorchrpc import _compat, device_map, joining, routing
from raytorchrpc.config import GroupConfig
from raytorchrpc.device_map import DeviceMap
from raytorchrpc.errors import BootstrapError, ConfigurationError, RayTorchRpcError
from raytorchrpc.fabric import AgentSpec
from raytorchrpc.joining import GroupInfo, JoinSpec, Owner, Prepared, Probe, Table
from raytorchrpc.peers import Member

#: torchrpc ids are 16-bit and signed.
_WORKER_IDS = range(1, 2**15)
#: While an actor restarts, it is asked again this often (seconds).
_RESTART_POLL_S = 0.05
#: The name of a driver that takes part.
DRIVER = "driver"


class Round:
    """One question to several members at once, with one deadline."""

    def __init__(self, participants: Mapping[str, Any], deadline: float) -> None:
        self._participants, self._deadline = participants, deadline

    def all(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        fail_fast: bool = False,
        retry_restarting: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Run ``function(instance, *arguments[name])`` at every named member.

        Returns results and failures by name; TimeoutError stands for no answer by the deadline. With
        ``fail_fast`` the first failure ends the wait, and members still silent are in neither. With
        ``retry_restarting`` an actor that restarts is asked again.
        """
        results: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        pending: dict[Any, str] = {}
        for member, args in arguments.items():
            handle = self._participants[member]
            if handle is not None:
                try:
                    pending[handle.__ray_call__.remote(function, *args)] = member
                except RayError as error:  # its queue is full
                    failures[member] = error
        for member, args in arguments.items():
            if self._participants[member] is None:
                try:
                    results[member] = function(None, *args)
                except RayTorchRpcError as error:
                    failures[member] = error
        while pending and not (fail_fast and failures):
            remaining = max(0.0, self._deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=remaining)
            if not ready:
                failures.update({member: TimeoutError("no answer") for member in pending.values()})
                break
            member = pending.pop(ready[0])
            try:
                results[member] = ray.get(ready[0], timeout=max(1.0, remaining))
            except RayTaskError as error:
                cause = error.cause if isinstance(error.cause, Exception) else error
                failures[member] = cause
            except ActorUnavailableError as error:
                if not retry_restarting or time.monotonic() >= self._deadline:
                    failures[member] = error
                    continue
                threading.Event().wait(_RESTART_POLL_S)  # it is restarting; Ray offers nothing to wait on
                pending[self._participants[member].__ray_call__.remote(function, *arguments[member])] = member
            except RayError as error:
                failures[member] = error
        for reference in pending:  # Ray prints an error that nobody looks at
            reference.future().add_done_callback(lambda late: late.exception())
        return results, failures


class Forming:
    """A group on its way: the steps of ``init_group``."""

    def __init__(
        self,
        name: str,
        config: GroupConfig,
        participants: dict[str, Any],
        deadline: float,
        timeout_s: float,
    ) -> None:
        self.name, self.config, self.participants = name, config, participants
        self.generation = uuid.uuid4().hex[:12]
        self.timeout_s = timeout_s
        self.deadline = deadline
        self.owner = current_owner()
        self._round = Round(participants, deadline)

    def probe(self) -> dict[str, Probe]:
        """Ask every process what it is. Changes nothing there."""
        arguments = {member: (member,) for member in self.participants}
        found, failures = self._round.all(joining.probe, arguments, fail_fast=True, retry_restarting=True)
        self._raise("could not be asked to join", failures)
        probes: dict[str, Probe] = {member: found[member] for member in self.participants}
        self._refuse_taken(probes)
        return probes

    def _refuse_taken(self, probes: Mapping[str, Probe]) -> None:
        taken = {member: probe for member, probe in probes.items() if probe.group is not None}
        if not taken:
            return
        gone = _compat.dead_jobs()
        for member, probe in taken.items():
            if probe.owner is None or self._is_gone(probe.owner, gone):
                continue  # prepare() leaves it
            raise BootstrapError(
                f"{member!r} is already in group {probe.group!r}; end that one first "
                f"(get_group({probe.group!r}).shutdown() in the process that formed it)",
                members=(member,),
            )

    def _is_gone(self, owner: Owner, dead_jobs: frozenset[str]) -> bool:
        if owner.job in dead_jobs:
            return True
        return owner.actor is not None and _compat.actor_is_dead(owner.actor)

    def decide(self, probes: Mapping[str, Probe]) -> tuple[routing.RoutePlan, dict[str, DeviceMap]]:
        """Routes and device maps, from the evidence alone."""
        endpoints = {member: probe.endpoint for member, probe in probes.items()}
        maps = device_map.resolve(self.config, list(endpoints), endpoints)
        return routing.plan(endpoints, self.config), maps

    def prepare(
        self, probes: Mapping[str, Probe], plan: routing.RoutePlan, maps: Mapping[str, DeviceMap]
    ) -> dict[str, Prepared]:
        """Have every member listen."""
        ids, renew = _worker_ids(probes)
        rpc_names = {member: self._rpc_name(member, probe) for member, probe in probes.items()}
        secret = secrets.token_bytes(32)
        specs: dict[str, tuple[JoinSpec]] = {}
        for rank, (member, agent) in enumerate(plan.agents.items()):
            pairs = {peer: device_map.gpu_pairs(maps[member].for_peer(peer)) for peer in plan.agents}
            outgoing = {peer: mapping for peer, mapping in pairs.items() if mapping}
            devices = {gpu for mapping in outgoing.values() for gpu in mapping}
            devices |= {gpu for other in maps.values() for gpu in device_map.gpu_pairs(other.for_peer(member)).values()}
            agent_spec = AgentSpec(
                name=rpc_names[member],
                worker_id=ids[member],
                interface=agent.interface,
                transports=agent.transports,
                channels=agent.channels,
                threads=self.config.torchrpc_threads,
                timeout_s=self.config.rpc_timeout_s,
                device_maps={rpc_names[peer]: mapping for peer, mapping in outgoing.items()},
                devices=tuple(sorted(devices)),
            )
            endpoint = probes[member].endpoint
            elsewhere = tuple(
                peer
                for peer, probe in probes.items()
                if peer != member and (self.config.always_tcp or not probe.endpoint.same_network(endpoint))
            )
            spec = JoinSpec(
                group=self.name,
                generation=self.generation,
                replaces=probes[member].generation,
                name=member,
                rank=rank,
                config=self.config,
                agent=agent_spec,
                renew_agent=member in renew,
                device_maps=outgoing,
                secret=secret,
                tcp_host=agent.address if elsewhere else None,
                by_tcp=elsewhere,
                beside=plan.beside(member),
                nng=plan.uses(member, "nng"),
            )
            specs[member] = (spec,)
        prepared, failures = self._round.all(joining.prepare, specs, fail_fast=True)
        self._raise("could not start", failures)
        return prepared

    def commit(
        self,
        probes: Mapping[str, Probe],
        prepared: Mapping[str, Prepared],
        plan: routing.RoutePlan,
        maps: Mapping[str, DeviceMap],
    ) -> GroupInfo:
        """Have every member meet the others."""
        members = tuple(
            Member(
                rank=rank,
                name=member,
                actor_id=_actor_id(handle),
                node_id=probes[member].node_id,
                pid=probes[member].pid,
                rpc_name=prepared[member].agent.name,
                worker_id=prepared[member].agent.worker_id,
            )
            for rank, (member, handle) in enumerate(self.participants.items())
        )
        texts = {member: {str(peer): mapping for peer, mapping in maps[member].to_dict().items()} for member in maps}
        info = GroupInfo(self.name, self.generation, self.owner, members, self.config, plan, texts)
        left = max(1.0, self.deadline - time.monotonic())
        tables = {
            member: (Table(info._replace(plan=plan.for_member(member)), prepared, left),)
            for member in self.participants
        }
        _, failures = self._round.all(joining.commit, tables, fail_fast=True)
        self._raise("could not reach the others", failures)
        return info

    def roll_back(self) -> None:
        """Undo what was begun. A member that is stuck is told too, and undoes it when it gets to it."""
        patience = time.monotonic() + min(5.0, self.timeout_s)
        arguments = {member: (self.generation,) for member in self.participants}
        Round(self.participants, patience).all(joining.leave, arguments)

    def _rpc_name(self, member: str, probe: Probe) -> str:
        if probe.agent is not None:
            return probe.agent.name
        actor = _actor_id(self.participants[member])
        # No colon: torch's RemoteModule takes "name/device" and reads a colon as "rank:".
        return f"rtr-{actor}" if actor else f"rtr-driver-{probe.node_id[:12]}-{probe.pid}"

    def _raise(self, what: str, failures: Mapping[str, Exception]) -> None:
        if not failures:
            return
        reasons = "; ".join(f"{member!r}: {self._reason(error)}" for member, error in failures.items())
        cause = next(iter(failures.values()))
        if isinstance(cause, ConfigurationError):
            raise cause
        raise BootstrapError(
            f"group {self.name!r} was not formed: {len(failures)} of {len(self.participants)} {what}: {reasons}",
            members=tuple(failures),
        ) from cause

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return (
                f"no answer within {self.timeout_s:g} s (a sync actor answers between its methods; is it still "
                f"starting, waiting for resources, or busy?)"
            )
        return " ".join(str(error).split()) or repr(error)


def current_owner() -> Owner:
    """This process, as the owner of the groups it forms."""
    context = ray.get_runtime_context()
    return Owner(context.get_job_id(), context.get_actor_id())


def participants_of(actors: Any, include_driver: bool) -> dict[str, Any]:
    """Members by name, in rank order; the driver's handle is None. Raises ConfigurationError."""
    if not ray.is_initialized():
        raise ConfigurationError("call ray.init() before init_group")
    if isinstance(actors, ActorHandle) or not isinstance(actors, (Mapping, Sequence)) or isinstance(actors, str):
        raise ConfigurationError(f"init_group takes a list or a dict of actor handles, not {actors!r}")
    pairs = list(actors.items()) if isinstance(actors, Mapping) else [(None, actor) for actor in actors]
    if not pairs:
        raise ConfigurationError("init_group needs at least one actor handle; the list is empty")
    named: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for rank, (given, handle) in enumerate(pairs):
        label = f"actors[{rank if given is None else given!r}]"
        if not isinstance(handle, ActorHandle):
            raise ConfigurationError(
                f"{label} is not an actor handle but {handle!r}; pass what Class.remote() or ray.get_actor() returns"
            )
        member = _generated_name(handle, rank) if given is None else given
        _check_member_name(member, label)
        actor_id = _compat.actor_id_of(handle)
        if actor_id in seen:
            raise ConfigurationError(f"{label} is the same actor as {seen[actor_id]}")
        seen[actor_id] = label
        named[member] = handle
    if include_driver:
        if DRIVER in named:
            raise ConfigurationError(f"the name {DRIVER!r} is the driver's own with include_driver=True")
        named[DRIVER] = None
    return named


_LONGEST_STEM = 48


def _generated_name(handle: Any, rank: int) -> str:
    ascii_only = re.sub(r"[^A-Za-z0-9_]", "_", _compat.actor_class_name(handle))
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", ascii_only).lower()
    return f"{snake[:_LONGEST_STEM]}_{rank}"


def _check_member_name(name: Any, label: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"(?!\d+$)[A-Za-z0-9_.:-]{1,64}", name):
        raise ConfigurationError(
            f"{label}: {name!r} cannot name a member; use up to 64 letters, digits or '_.:-', not digits alone"
        )


def _actor_id(handle: Any) -> str | None:
    return None if handle is None else _compat.actor_id_of(handle)


def _worker_ids(probes: Mapping[str, Probe]) -> tuple[dict[str, int], set[str]]:
    """An id for every member, unique in the group, and who has to give its present one up.

    A running agent keeps its own. The others get random ones, because distributed autograd keeps a process's
    first id for life and must not meet it again in a later group.
    """
    ids: dict[str, int] = {}
    renew: set[str] = set()
    used = {probe.autograd_id for probe in probes.values()}
    for member, probe in probes.items():
        if probe.agent is not None and probe.agent.worker_id not in ids.values():
            ids[member] = probe.agent.worker_id
        elif probe.agent is not None:
            renew.add(member)
    free = [number for number in _WORKER_IDS if number not in used and number not in ids.values()]
    missing = [member for member in probes if member not in ids]
    ids.update(zip(missing, random.SystemRandom().sample(free, len(missing)), strict=True))
    return ids, renew
