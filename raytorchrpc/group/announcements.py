"""What a group is now, and telling its members: every change in order, and all of it to who has missed one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from raytorchrpc.errors import PeerLost
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.state import GroupState
from raytorchrpc.membership import updates
from raytorchrpc.membership.messages import Prepared
from raytorchrpc.membership.updates import Arrival, Loss
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: How long members have to get ready for others, and to take note of something (seconds).
MEET_S = 2.0
WORD_S = 0.5
#: The same for a loss, of which callbacks are to hear within 0.2 s, and so much more for each member (seconds).
_LOSS_S, _LOSS_EACH_S = 0.05, 0.01
#: One that did not answer is told again after this (seconds).
_AGAIN_S = 0.5


class Announcer:
    """Used by the one thread that looks after the group."""

    def __init__(
        self,
        now: GroupState,
        lines: ControlConnections,
        soon: Callable[[Callable[[], None]], None],
        caught_up: Callable[[], None],
    ) -> None:
        """``soon`` has that thread run something. ``caught_up`` is called when somebody is ``behind`` no longer."""
        self._now, self._lines, self._soon, self._caught_up = now, lines, soon, caught_up
        self._step = 0
        """Counts the changes that members are told."""
        self._behind: dict[str, float] = {}
        """Members that have missed some change, and when each is to be told again."""

    @property
    def behind(self) -> Collection[str]:
        """Who has missed something."""
        return self._behind.keys()

    def missed(self, names: Iterable[str]) -> None:
        """These are to be told everything as soon as may be."""
        self._behind.update(dict.fromkeys(names, 0.0))

    def told(self, names: Iterable[str]) -> None:
        """These know everything."""
        for name in names:
            self._behind.pop(name, None)
        self._caught_up()

    def others(self, names: Collection[str]) -> list[str]:
        """Everybody else who is there, but those who will be told everything at once."""
        out = {*names, *self._now.missing, *self._behind}
        return [name for name in self._now.roster.records if name not in out]

    def tell(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], patience_s: float
    ) -> dict[str, Any]:
        """Have ``function(generation, step, *arguments[name])`` run at each; returns what those answered who did."""
        self._step += 1
        change = (self._now.roster.generation, self._step)
        results: dict[str, Any] = {}
        asked = {}
        for name, args in arguments.items():
            if self._now.roster.records[name].handle is None:
                results[name] = function(*change, *args)
            else:
                asked[name] = (*change, *args)
        answers, failures = self._lines.ask(function, asked, time.monotonic() + patience_s)
        for name, error in failures.items():
            self._behind[name] = time.monotonic()
            if not isinstance(error, PeerLost):  # of that its own line tells
                logger.info("group %r: %s did not take part in a change yet: %s", self._now.roster.name, name, error)
        return {**results, **answers}

    def tell_losses(self, losses: Sequence[Loss]) -> None:
        """One that does not take note in the time for a loss is told again, on a thread that may wait."""
        there = self.others(())
        self.tell(updates.lose, {peer: (losses,) for peer in there}, _LOSS_S + _LOSS_EACH_S * len(there))

    def reunite(self, name: str) -> bool:
        """It was out of reach, but has lived on: it and the others make new connections. False if it cannot yet."""
        everybody = tuple(self._now.roster.records)
        told = self.tell(updates.catch_up, {name: (self._arrival(name, everybody), self._away(name))}, MEET_S)
        if name not in told:
            return False
        self._now.prepared.update(told)
        self.told([name])
        self._acquaint(name)
        return True

    def _acquaint(self, name: str) -> None:
        """The same process as before, but the others have let go of it, or its addresses have changed."""
        now, there = self._now, self.others([name])
        arrivals = {peer: (now.roster.arrival(peer, now.info, now.prepared, MEET_S, (name,)),) for peer in there}
        now.prepared.update(self.tell(updates.meet, arrivals, MEET_S))
        self.tell(updates.welcome, {peer: ([name],) for peer in there}, WORD_S)

    def _arrival(self, name: str, coming: tuple[str, ...]) -> Arrival:
        table = self._now.roster.table(name, self._now.info, self._now.prepared, MEET_S)
        return Arrival(self._now.roster.spec(name), table, coming)

    def _away(self, name: str) -> list[Loss]:
        """Who of the others cannot be called, or never again."""
        away = [
            Loss(other, self._now.roster.records[other].incarnation, missing.cause, False)
            for other, missing in self._now.missing.items()
            if missing.told and other != name
        ]
        return [*away, *self._now.dead.values()]

    # --- who has missed something -----------------------------------------------------------------------------------

    def due(self) -> list[float]:
        """When somebody is to be told again (``time.monotonic``)."""
        return [when for name, when in self._behind.items() if name not in self._now.missing and when < math.inf]

    def bring_up_to_date(self, now: float) -> None:
        """Tell those for whom it is time how the group is, on threads that may wait."""
        for name, when in list(self._behind.items()):
            if when <= now and name not in self._now.missing:
                self._bring_up_to_date(name)

    def _bring_up_to_date(self, name: str) -> None:
        if name not in self._now.roster.records:
            self.told([name])
            return
        self._behind[name] = math.inf
        self._step += 1
        step = self._step
        arguments = {name: (self._now.roster.generation, step, self._arrival(name, ()), self._away(name))}
        local = self._now.roster.handles[name] is None

        def ask() -> None:
            answers: dict[str, Any] = {}
            try:
                if local:
                    answers = {name: updates.catch_up(*arguments[name])}
                else:
                    answers, _ = self._lines.ask(updates.catch_up, arguments, time.monotonic() + MEET_S)
            finally:
                done = answers.get(name)
                threads.persist(lambda: self._soon(lambda: self._brought_up_to_date(name, step, done)), MEET_S)

        try:
            threads.start(ask, name=f"raytorchrpc-catch-up-{name}")
        except threads.ThreadShortage:
            self._behind[name] = time.monotonic() + _AGAIN_S
            raise

    def _brought_up_to_date(self, name: str, step: int, prepared: Prepared | None) -> None:
        if name not in self._now.roster.records:
            self.told([name])
        elif prepared is None:
            self._behind[name] = time.monotonic() + _AGAIN_S
        elif step != self._step:
            self._behind[name] = 0.0  # there was another change meanwhile
        else:
            before, self._now.prepared[name] = self._now.prepared[name], prepared
            if prepared.addresses != before.addresses:
                self._acquaint(name)
            self.told([name])
