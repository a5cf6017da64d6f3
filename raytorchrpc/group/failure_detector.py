"""Detects that a member's process has ended, and what became of its actor."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.peers import process_token
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.restarts import RestartedActors
from raytorchrpc.group.roster import GroupState, LostMember, Phase
from raytorchrpc.membership.messages import JoinedProcess
from raytorchrpc.process import threads
from raytorchrpc.process.this_process import reserve_descriptors

#: How often Ray is asked about a lost actor (seconds): at first, and after a minute.
_POLL_S, _SLOW_POLL_S, _SLOW_AFTER_S = 0.02, 0.5, 60.0
#: To connect to a member for the first time (seconds).
_CONNECT_S = 2.0
#: To connect again to a member that Ray believes alive (seconds). A host without power answers nothing, and Ray may
#: believe in its actors for half a minute, so the other members learn of the loss only after this time. Doubled each
#: time, up to a limit: a process that is slow, for instance because its host starts many others, needs longer. The
#: limit is lower for a member that could not be reached: the kernel repeats a request to connect more and more rarely.
_DIAL_S, _LONGEST_DIAL_S, _LONGEST_AWAY_DIAL_S = 0.4, 10.0, 2.0
#: After so long a process that joined by itself, and cannot be reached, is given up: nobody knows whether it has ended.
_GONE_S = 60.0
#: How many members it connects to at a time.
_AT_A_TIME = 8
#: For a dialling thread to report its result, when the process is short of memory (seconds).
_REPORT_S = 10.0

#: ``dialled(name, lost, error)``: the result of an attempt to connect again, on the supervisor's thread.
Dialled = Callable[[str, LostMember, Exception | None], None]


class Findings(NamedTuple):
    """What one poll found, as names of members."""

    ended: list[str]
    """Their processes have ended, which the other members do not know."""
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

    def reserve(self, count: int) -> None:
        """Have room for the connections to so many members. Raises ConfigurationError."""
        reserve_descriptors(count, f"watching {count} members of group {self._state.roster.name!r}")

    def watch(self, names: Sequence[str], patience_s: float = _CONNECT_S) -> None:
        """Connect to these members; this process itself, if it is one of them, is not watched.

        Blocks, for each at most ``patience_s``, for several at a time; one that cannot be reached is lost.
        """
        roster = self._state.roster
        self._connections.reach({name for name in roster.records if roster.reached_by_tcp(name)})
        for name in names:
            self._set_address(name)
        incarnations = {name: roster.records[name].member.incarnation for name in names}
        left, failed = [name for name in names if roster.records[name].handle is not None], dict[str, str]()

        def connect() -> None:
            while True:
                try:
                    name = left.pop()
                except IndexError:
                    return
                try:
                    self._connect(name, incarnations[name], patience_s)
                except RayTorchRpcError as error:
                    failed[name] = str(error)

        beside = list[threading.Thread]()
        with suppress(threads.ThreadShortage):  # then fewer connect
            for _ in range(min(len(left), _AT_A_TIME) - 1):
                beside.append(threads.start(connect, name="raytorchrpc-watch"))
        connect()
        for thread in beside:
            thread.join()
        for name, cause in failed.items():
            self._suspect(name, incarnations[name], cause)

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
        found = Findings([], [], [])
        polled = [(name, lost) for name, lost in self._state.lost.items() if lost.next_poll <= now]
        for name, lost in polled:
            lost.next_poll = now + (_POLL_S if now - lost.since < _SLOW_AFTER_S else _SLOW_POLL_S)
            record = self._state.roster.records[name]
            if isinstance(record.handle, JoinedProcess):
                if now - lost.since > _GONE_S:
                    lost.cause = f"its process could not be reached for {_GONE_S:g} s"
                    found.dead.append(name)
                else:
                    self._dial(name, lost, now)
                continue
            actor = ray_internals.actor_state(ray_internals.actor_id_of(record.handle))
            if actor.state == "DEAD":
                lost.cause = f"its actor died: {actor.cause}" if actor.cause else "its actor died"
                found.dead.append(name)
            elif actor.state == "ALIVE" and (actor.pid, actor.node_id) == (record.probe.pid, record.probe.node_id):
                self._dial(name, lost, now)
            elif lost.phase in (Phase.SUSPECTED, Phase.AWAY):
                found.ended.append(name)
            elif actor.state == "ALIVE" and self._restarts.is_listening(record.handle, actor):
                lost.phase = Phase.RESTARTED
            else:
                lost.phase = Phase.ENDED
        busy_s = time.monotonic() - now  # Ray's control store is busy while it restarts many actors
        for _, lost in polled:
            lost.next_poll += 2 * busy_s
        found.restarted.extend(name for name, lost in self._state.lost.items() if lost.phase is Phase.RESTARTED)
        return found

    def _dial(self, name: str, lost: LostMember, now: float) -> None:
        if now < lost.next_dial:
            return
        lost.next_dial = math.inf  # while a thread tries
        patience_s = min(_DIAL_S * 2**lost.dials, _LONGEST_AWAY_DIAL_S if lost.is_announced else _LONGEST_DIAL_S)
        lost.dials = min(lost.dials + 1, 10)
        incarnation = self._state.roster.records[name].member.incarnation
        self._set_address(name)

        def report(error: Exception | None) -> None:
            lost.next_dial = max(now + _SLOW_POLL_S, time.monotonic())
            if self._state.lost.get(name) is lost:
                self._dialled(name, lost, error)

        def dial() -> None:
            error: Exception | None = None
            try:
                self._connect(name, incarnation, patience_s)
            except Exception as failure:
                error = failure
            threads.persist(lambda: self._submit(lambda: report(error)), _REPORT_S)

        try:
            threads.start(dial, name=f"raytorchrpc-dial-{name}")
        except threads.ThreadShortage:  # the next poll tries again
            lost.next_dial = now + _SLOW_POLL_S
            raise
