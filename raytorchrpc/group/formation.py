"""How a group forms: the driver's questions to the members, step by step, and the way back from each."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from raytorchrpc._compat import ray_internals
from raytorchrpc.errors import BootstrapError, ConfigurationError, RayTorchRpcError
from raytorchrpc.group.roster import Roster
from raytorchrpc.membership import join
from raytorchrpc.membership.messages import GroupInfo, Owner, Prepared, Probe

#: While an actor restarts, it is asked again this often (seconds).
_RESTART_POLL_S = 0.05
#: The name of a driver that takes part.
DRIVER = "driver"


class Questions(Protocol):
    """What a group asks several processes, one question after another."""

    def all(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        fail_fast: bool = False,
        retry_restarting: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """See Round.all."""


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
    """A group on its way, or members on their way into one: the steps of ``init_group``, of ``Group.add`` and of a
    restarted actor's return.
    """

    def __init__(
        self,
        roster: Roster,
        participants: dict[str, Any],
        deadline: float,
        timeout_s: float,
        tried: Mapping[str, int] | None = None,
        rounds: Callable[[Mapping[str, Any], float], Questions] = Round,
    ) -> None:
        """``participants``: who is to come in, by name. ``roster``: who is there already.

        ``tried``: see Roster.admit. ``rounds``: how the participants are asked.
        """
        self.participants = participants
        self._tried = tried
        self.roster = roster
        self.timeout_s = timeout_s
        self.deadline = deadline
        self._rounds, self._round = rounds, rounds(participants, deadline)
        self._attempt = uuid.uuid4().hex[:12]

    def probe(self) -> None:
        """Ask every process what it is, and decide routes and device maps. Changes nothing there."""
        arguments = {member: (member,) for member in self.participants}
        found, failures = self._round.all(join.probe, arguments, fail_fast=True, retry_restarting=True)
        self._raise("could not be asked to join", failures)
        probes: dict[str, Probe] = {member: found[member] for member in self.participants}
        self._refuse_taken(probes)
        self.roster = self.roster.admit(self.participants, probes, self._tried)

    def _refuse_taken(self, probes: Mapping[str, Probe]) -> None:
        taken = {member: probe for member, probe in probes.items() if probe.group is not None}
        if not taken:
            return
        gone = ray_internals.dead_jobs()
        for member, probe in taken.items():
            if probe.owner is None or self._is_gone(probe.owner, gone):
                continue  # prepare() leaves it
            raise BootstrapError(
                f"{member!r} is already in group {probe.group!r}; end that one first "
                f"(get_group({probe.group!r}).shutdown() in the process that formed it)",
                members=(member,),
            )

    def _is_gone(self, owner: Owner, dead_jobs: frozenset[str]) -> bool:
        if owner.actor is not None:  # a detached one outlives its job
            return ray_internals.actor_is_dead(owner.actor)
        return owner.job in dead_jobs

    def prepare(self) -> dict[str, Prepared]:
        """Have every member listen."""
        specs = {member: (self.roster.spec(member, self._attempt),) for member in self.participants}
        prepared, failures = self._round.all(join.prepare, specs, fail_fast=True)
        self._raise("could not start", failures)
        return prepared

    def commit(
        self,
        info: GroupInfo,
        prepared: Mapping[str, Prepared],
        away: Mapping[str, str] | None = None,
        silent: Collection[str] = (),
    ) -> None:
        """Have every member meet the others. ``prepared``: of everybody in the roster. ``away``, ``silent``: who of
        them is not there, see Table.
        """
        left = max(1.0, self.deadline - time.monotonic())
        tables = {}
        for member in self.participants:
            table = self.roster.table(member, info, prepared, left)
            tables[member] = (table._replace(away=dict(away or {}), silent=tuple(silent)),)
        _, failures = self._round.all(join.commit, tables, fail_fast=True)
        self._raise("could not reach the others", failures)

    def roll_back(self) -> None:
        """Undo what was begun. A member that is stuck is told too, and undoes it when it gets to it."""
        patience = time.monotonic() + min(5.0, self.timeout_s)
        arguments = {member: (self._attempt,) for member in self.participants}
        self._rounds(self.participants, patience).all(join.give_up, arguments)

    def _raise(self, what: str, failures: Mapping[str, Exception]) -> None:
        if not failures:
            return
        reasons = "; ".join(f"{member!r}: {self._reason(error)}" for member, error in failures.items())
        cause = next(iter(failures.values()))
        if isinstance(cause, ConfigurationError):
            raise cause
        coming_in = any(name not in self.participants for name in self.roster.seats)
        begun = "did not take them in" if coming_in else "was not formed"
        raise BootstrapError(
            f"group {self.roster.name!r} {begun}: {len(failures)} of {len(self.participants)} {what}: {reasons}",
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


def current_session() -> tuple[str, ...]:
    """Names this process's present connection to Ray; empty if there is none. A job's id alone is the same again in the
    next cluster that a process starts.
    """
    if not ray.is_initialized():
        return ()
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id(), context.get_actor_id() or ""


def participants_of(actors: Any, include_driver: bool, first_rank: int = 0) -> dict[str, Any]:
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
        member = _generated_name(handle, first_rank + rank) if given is None else given
        _check_member_name(member, label)
        actor_id = ray_internals.actor_id_of(handle)
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
    ascii_only = re.sub(r"[^A-Za-z0-9_]", "_", ray_internals.actor_class_name(handle))
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", ascii_only).lower()
    return f"{snake[:_LONGEST_STEM]}_{rank}"


def _check_member_name(name: Any, label: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"(?!\d+$)[A-Za-z0-9_.:-]{1,64}", name):
        raise ConfigurationError(
            f"{label}: {name!r} cannot name a member; use up to 64 letters, digits or '_.:-', not digits alone"
        )
