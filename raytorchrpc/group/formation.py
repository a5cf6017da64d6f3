"""Forms a group, or admits members to one: probe, prepare, commit, and the way back from each step."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

from ray.exceptions import ActorUnavailableError

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.mailbox import Owner
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.group.ray_round import Round
from raytorchrpc.group.roster import Roster
from raytorchrpc.lanes import registry
from raytorchrpc.membership import join
from raytorchrpc.membership.messages import GroupInfo, Prepared, Probe

T = TypeVar("T")


class Questions(Protocol):
    """Calls several processes, one question after another."""

    def all(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        fail_fast: bool = False,
        retry_restarting: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """See Round.all."""


class Formation:
    """The steps by which members join: for ``init_group``, ``Group.add`` and the return of a restarted actor."""

    def __init__(
        self,
        roster: Roster,
        participants: dict[str, Any],
        deadline: float,
        timeout_s: float,
        tried: Mapping[str, int] | None = None,
        rounds: Callable[[Mapping[str, Any], float], Questions] = Round,
    ) -> None:
        """``participants``: the handles of those that join, by name. ``roster``: of the members so far.

        ``tried``: see Roster.admit. ``rounds``: calls the participants.
        """
        self.participants = participants
        self._tried = tried
        self.roster = roster
        self.timeout_s = timeout_s
        self.deadline = deadline
        self._rounds, self._round = rounds, rounds(participants, deadline)
        self._attempt = uuid.uuid4().hex[:12]

    def probe(self) -> None:
        """Have every process describe itself, and decide routes and device maps. Changes nothing there."""
        lanes = registry.foreign(self.roster.config.lanes)
        arguments = {member: (member, lanes) for member in self.participants}
        found, failures = self._round.all(join.probe, arguments, fail_fast=True, retry_restarting=True)
        self._raise("could not be probed", failures)
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
        """Have every participant start to listen."""
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
        """Have every participant connect to the other members. ``prepared``: of the whole roster. ``away``, ``silent``:
        members that cannot be reached, see Table.
        """
        left = max(1.0, self.deadline - time.monotonic())
        tables = {}
        for member in self.participants:
            table = self.roster.table(member, info, prepared, left)
            tables[member] = (table._replace(away=dict(away or {}), silent=tuple(silent)),)
        _, failures = self._round.all(join.commit, tables, fail_fast=True)
        self._raise("could not reach the others", failures)

    def roll_back(self) -> None:
        """Undo what was begun. A participant that is stuck undoes it as soon as it runs again."""
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
        coming_in = any(name not in self.participants for name in self.roster.records)
        begun = "did not admit them" if coming_in else "was not formed"
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


def form_group(
    roster: Roster,
    participants: dict[str, Any],
    timeout_s: float,
    finish: Callable[[Roster, GroupInfo, Mapping[str, Prepared]], T],
) -> T:
    """Form a new group; returns what ``finish`` makes of it. Leaves nothing behind if either fails."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            formation = Formation(roster, participants, deadline, timeout_s)
            formation.probe()
            try:
                prepared = formation.prepare()
                info = formation.roster.info(prepared)
                formation.commit(info, prepared)
                return finish(formation.roster, info, prepared)
            except BaseException:
                formation.roll_back()
                raise
        except BootstrapError as error:
            # An actor that went away for a restart after it was probed returns as another process: begin again.
            if not isinstance(error.__cause__, ActorUnavailableError) or time.monotonic() >= deadline:
                raise
