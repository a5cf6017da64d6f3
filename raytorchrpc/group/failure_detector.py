"""Detects that a member's process has ended, and what became of its actor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.peers import process_token
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.ray_calls import RestartedActors
from raytorchrpc.group.state import GroupState, LostMember
from raytorchrpc.process import threads

#: How often Ray is asked about a lost actor (seconds): at first, and after ten seconds.
_POLL_S, _SLOW_POLL_S, _SLOW_AFTER_S = 0.02, 0.5, 10.0
#: To connect to a member for the first time (seconds).
_CONNECT_S = 2.0
#: To connect again to a member that Ray believes alive (seconds). A host without power answers nothing, and Ray may
#: believe in its actors for half a minute, so the other members learn of the loss only after this time.
_DIAL_S = 0.4
#: For a dialling thread to report its result, when the process is short of memory (seconds).
_REPORT_S = 10.0

#: ``dialled(name, lost, error)``: the result of an attempt to connect again, on the supervisor's thread.
Dialled = Callable[[str, LostMember, Exception | None], None]


class Findings(NamedTuple):
    """What one poll found, as names of members."""

    lost: list[str]
    """Their processes have ended; not announced yet."""
    ended: list[str]
    """The same of members that were announced as lost, when they might have come back as they were."""
    dead: list[str]
    """Ray will not restart them."""
    restarted: list[str]
    """Their new processes can be admitted."""


class FailureDetector:
    """Watches a connection to each member, and asks Ray about those whose connection broke.

    Used by the supervisor's thread; threads that may block report to it through ``submit``.
    """

    def __init__(
        self,
        state: GroupState,
        connections: ControlConnections,
        restarts: RestartedActors,
        submit: Callable[[Callable[[], None]], None],
        dialled: Dialled,
    ) -> None:
        """``submit`` runs a function on the supervisor's thread, unless the group has ended."""
        self._state, self._connections, self._restarts = state, connections, restarts
        self._submit, self._dialled = submit, dialled

    def watch(self, names: Sequence[str], patience_s: float = _CONNECT_S) -> None:
        """Connect to these members. Blocks, for each at most ``patience_s``; one that cannot be reached is lost."""
        roster = self._state.roster
        self._connections.reach({name for name in roster.records if roster.reached_by_tcp(name)})
        for name in names:
            self._set_address(name)
            incarnation = roster.records[name].member.incarnation
            try:
                self._connect(name, incarnation, patience_s)
            except RayTorchRpcError as error:
                self._suspect(name, incarnation, str(error))

    def _set_address(self, name: str) -> None:
        record = self._state.roster.records[name]
        token = process_token(self._state.roster.generation, record.member.rank, record.member.incarnation)
        self._connections.set_address(name, token, self._state.prepared[name].addresses["socket"])

    def _connect(self, name: str, incarnation: int, patience_s: float) -> None:
        def ended(cause: str) -> None:
            self._submit(lambda: self._suspect(name, incarnation, cause))

        self._connections.watch(name, ended, patience_s)

    def _suspect(self, name: str, incarnation: int, cause: str) -> None:
        record = self._state.roster.records.get(name)
        if record is not None and record.member.incarnation == incarnation and name not in self._state.lost:
            self._state.lose(name, cause)  # handled by the next poll, with others reported by then

    def due(self) -> list[float]:
        """When lost members are polled next (``time.monotonic``)."""
        return [lost.next_poll for lost in self._state.lost.values()]

    def poll(self) -> Findings:
        """Ask Ray about lost members that are due. Reconnects, on a thread, to those that Ray believes alive."""
        now = time.monotonic()
        found = Findings([], [], [], [])
        for name, lost in list(self._state.lost.items()):
            if lost.next_poll > now:
                continue
            record = self._state.roster.records[name]
            actor = ray_internals.actor_state(ray_internals.actor_id_of(record.handle))
            lost.next_poll = now + (_POLL_S if now - lost.since < _SLOW_AFTER_S else _SLOW_POLL_S)
            same = (actor.pid, actor.node_id) == (record.probe.pid, record.probe.node_id)
            lost.restarted = actor.state == "ALIVE" and not same and self._restarts.is_listening(record.handle, actor)
            if actor.state == "DEAD":
                lost.cause = f"its actor died: {actor.cause}" if actor.cause else "its actor died"
                found.dead.append(name)
            elif actor.state == "ALIVE" and same:
                self._dial(name, lost, now)
            elif not lost.announced:
                lost.ended = True
                found.lost.append(name)
            elif not lost.ended and not lost.restarted:  # its return would say the same
                lost.ended = True
                found.ended.append(name)
        found.restarted.extend(
            name for name, lost in self._state.lost.items() if lost.restarted and lost.next_poll > now
        )
        return found

    def _dial(self, name: str, lost: LostMember, now: float) -> None:
        if lost.dialling or now < lost.next_dial:
            return
        lost.dialling, lost.next_dial = True, now + _SLOW_POLL_S
        incarnation = self._state.roster.records[name].member.incarnation
        self._set_address(name)

        def dial() -> None:
            error: Exception | None = None
            try:
                self._connect(name, incarnation, _DIAL_S)
            except Exception as failure:
                error = failure
            threads.persist(lambda: self._submit(lambda: self._report(name, lost, error)), _REPORT_S)

        try:
            threads.start(dial, name=f"raytorchrpc-dial-{name}")
        except threads.ThreadShortage:  # the next poll tries again
            lost.dialling = False
            raise

    def _report(self, name: str, lost: LostMember, error: Exception | None) -> None:
        lost.dialling = False
        if self._state.lost.get(name) is lost:
            self._dialled(name, lost, error)
