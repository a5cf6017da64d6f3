"""Announces membership changes to all members in order; resynchronises a member that missed one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from raytorchrpc.errors import PeerLost
from raytorchrpc.group.control_connections import Arguments, ControlConnections
from raytorchrpc.group.roster import Roster
from raytorchrpc.group.state import GroupState
from raytorchrpc.membership import join
from raytorchrpc.membership.messages import Arrival, GroupInfo, Loss, Prepared
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: How long members have to prepare for arrivals, and to activate or remove members (seconds).
_PREPARE_S, _ACTIVATE_S = 2.0, 0.5
#: The same to prepare for a member that returns. The whole group waits for it, and a suspended member takes all of it.
RETURN_S = 0.5
#: The same for a loss, of which callbacks are to hear within 0.2 s: a base, and more for each member (seconds).
_LOSS_S, _LOSS_EACH_S = 0.05, 0.01
#: Pause before a member that did not answer is resynchronised (seconds).
_RETRY_S = 0.5


class Announcer:
    """Used by the supervisor's thread."""

    def __init__(
        self,
        state: GroupState,
        connections: ControlConnections,
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        """``submit`` runs a function on the supervisor's thread."""
        self._state, self._connections, self._submit = state, connections, submit
        self._step = 0
        """Numbers the announcements."""
        self.behind: dict[str, float] = {}
        """Members that missed an announcement, and when each is resynchronised (``time.monotonic``)."""

    def mark_behind(self, names: Iterable[str]) -> None:
        """Resynchronise these members as soon as possible."""
        self.behind.update(dict.fromkeys(names, 0.0))

    def mark_current(self, names: Iterable[str]) -> None:
        for name in names:
            self.behind.pop(name, None)
        self._state.notify()

    def others(self, names: Collection[str]) -> list[str]:
        """All other members that can be reached and have missed nothing."""
        out = {*names, *self._state.lost, *self.behind}
        return [name for name in self._state.roster.records if name not in out]

    def _announce(self, change: Callable[..., Any], arguments: Arguments, patience_s: float) -> dict[str, Any]:
        """Apply a change, one of ``join``'s, in each of these members; returns the answers in time."""
        self._step += 1
        group, generation = self._state.roster.name, self._state.roster.generation
        asked = {name: (generation, self._step, change, *args) for name, args in arguments.items()}
        results, failures = self._connections.call_all(join.apply, asked, time.monotonic() + patience_s)
        for name, error in failures.items():
            self.behind[name] = time.monotonic()
            if not isinstance(error, PeerLost):  # the failure detector reports that
                logger.info("group %r: %s missed a change and will be resynchronised: %s", group, name, error)
        return results

    def prepare_arrivals(
        self,
        names: Sequence[str],
        others: Iterable[str],
        roster: Roster,
        info: GroupInfo,
        prepared: Mapping[str, Prepared],
        patience_s: float = _PREPARE_S,
    ) -> dict[str, Prepared]:
        """Have other members prepare for new or restarted ones; returns where they listen then.

        ``roster``, ``info``, ``prepared``: of the group with the arrivals. A member that does not answer within
        ``patience_s`` is resynchronised.
        """
        arrivals = {peer: (roster.arrival(peer, info, prepared, names),) for peer in others}
        return self._announce(join.prepare_arrivals, arrivals, patience_s)

    def activate(self, names: Sequence[str], others: Iterable[str]) -> None:
        ready = [peer for peer in others if peer not in self.behind]  # the others are resynchronised
        self._announce(join.activate, {peer: (names,) for peer in ready}, _ACTIVATE_S)

    def announce_removal(self, names: Sequence[str]) -> None:
        others = self.others(names)
        self._announce(join.remove_peers, {peer: (names,) for peer in others}, _ACTIVATE_S)

    def announce_losses(self, losses: Sequence[Loss]) -> None:
        """Blocks shortly: a member that does not answer in time is resynchronised later, on a thread that may block."""
        others = self.others(())
        self._announce(join.mark_lost, {peer: (losses,) for peer in others}, _LOSS_S + _LOSS_EACH_S * len(others))

    def reunite(self, name: str) -> bool:
        """Reconnect a member that was unreachable but did not end. False if it does not answer yet."""
        arrival = self._arrival(name, tuple(self._state.roster.records))
        told = self._announce(join.resync, {name: (arrival, self._away(name))}, _PREPARE_S)
        if name not in told:
            return False
        self._state.prepared.update(told)
        self.mark_current([name])
        self._reconnect(name)
        return True

    def _reconnect(self, name: str) -> None:
        """Have the other members connect to the same process again, as they dropped it or its addresses changed."""
        state, others = self._state, self.others([name])
        state.prepared.update(self.prepare_arrivals([name], others, state.roster, state.info, state.prepared))
        self.activate([name], others)

    def _arrival(self, name: str, coming: tuple[str, ...]) -> Arrival:
        roster = self._state.roster
        return Arrival(roster.spec(name), roster.table(name, self._state.info, self._state.prepared), coming)

    def _away(self, name: str) -> list[Loss]:
        """The losses that the other members know of."""
        lost = self._state.lost.items()
        away = [self._state.loss(other) for other, its in lost if its.announced and other != name]
        return [*away, *self._state.dead.values()]

    def due(self) -> list[float]:
        """When members are resynchronised next (``time.monotonic``)."""
        return [when for name, when in self.behind.items() if name not in self._state.lost and when < math.inf]

    def resync_due(self) -> None:
        """Send the full state to members whose time has come, on threads that may block."""
        now = time.monotonic()
        for name, when in list(self.behind.items()):
            if when <= now and name not in self._state.lost:
                self._resync(name)

    def _resync(self, name: str) -> None:
        if name not in self._state.roster.records:
            self.mark_current([name])
            return
        self.behind[name] = math.inf
        self._step += 1
        step = self._step
        generation, arrival, away = self._state.roster.generation, self._arrival(name, ()), self._away(name)
        arguments = {name: (generation, step, join.resync, arrival, away)}

        def resync() -> None:
            answers: dict[str, Any] = {}
            try:
                answers, failures = self._connections.call_all(join.apply, arguments, time.monotonic() + _PREPARE_S)
                for error in failures.values():
                    logger.info("%s could not be resynchronised yet: %s", name, error)
            finally:
                done = answers.get(name)
                threads.persist(lambda: self._submit(lambda: self._handle_resynced(name, step, done)), _PREPARE_S)

        try:
            threads.start(resync, name=f"raytorchrpc-resync-{name}")
        except threads.ThreadShortage:
            self.behind[name] = time.monotonic() + _RETRY_S
            raise

    def _handle_resynced(self, name: str, step: int, prepared: Prepared | None) -> None:
        if name not in self._state.roster.records:
            self.mark_current([name])
        elif prepared is None:
            self.behind[name] = time.monotonic() + _RETRY_S
        elif step != self._step:
            self.behind[name] = 0.0  # there was another change meanwhile
        else:
            before, self._state.prepared[name] = self._state.prepared[name], prepared
            if prepared.addresses != before.addresses:
                self._reconnect(name)
            self.mark_current([name])
