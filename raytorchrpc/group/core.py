"""Decides what a group's supervisor does: from events and the time to instructions. No thread, no clock and no I/O.

The supervisor carries out the instructions, and reports what came of them as further events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Literal, NamedTuple

from raytorchrpc.calls.peers import Absence
from raytorchrpc.group.changes import Change
from raytorchrpc.membership.messages import Prepared
from raytorchrpc.membership.view import JOINING, Answer, Delta, Peer, View

#: How often Ray is asked about a lost actor (seconds): at first, and after a minute.
_POLL_S, _SLOW_POLL_S, _SLOW_AFTER_S = 0.02, 0.5, 60.0
#: To connect to a member that has just joined (seconds).
_CONNECT_S = 2.0
#: To connect again to a member that Ray believes alive (seconds). A host without power answers nothing, and Ray may
#: believe in its actors for half a minute, so the other members learn of the loss only after this time. Doubled each
#: time, up to a limit: a process that is slow, for instance because its host starts many others, needs longer. The
#: limit is lower for a member that could not be reached: the kernel repeats a request to connect more and more rarely.
_DIAL_S, _LONGEST_DIAL_S, _LONGEST_AWAY_DIAL_S = 0.4, 10.0, 2.0
#: After so long a process that joined by itself, and cannot be reached, is given up: nobody knows whether it has ended.
_GONE_S = 60.0
#: How long a member that was unreachable may take to replace its connections (seconds).
_RECONNECT_S = 2.0
#: Pause before another attempt to admit a restarted actor (seconds): doubled each time, up to the limit.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
#: How long an attempt may take (seconds): doubled each time, up to the limit. The process may be suspended, and losses
#: of others are announced only after the attempt.
_FIRST_PATIENCE_S, _LONGEST_PATIENCE_S = 2.0, 10.0
#: How long a change waits to be reported for members that have not followed it (seconds): a base, and more for each,
#: up to a limit. Callbacks are to hear of a loss within 0.2 s.
_REPORT_S, _REPORT_EACH_S, _LONGEST_REPORT_S = 0.05, 0.01, 0.2
#: A member that failed to follow is asked again after this time, and one that does not answer (seconds).
_RETRY_S, _ASK_AGAIN_S = 0.5, 10.0

BEHIND = "it has not yet learned who else is a member"


class Broke(NamedTuple):
    """A connection to a member's process broke."""

    name: str
    incarnation: int
    cause: str


class Dialled(NamedTuple):
    """It was tried to connect to a member's process."""

    name: str
    incarnation: int
    error: str | None
    refused: bool = False
    """Nothing listened there any more."""
    ended: bool = False
    """Its process has ended, and there will be no other."""


class Fate(Enum):
    """What Ray says of a lost member's actor."""

    DEAD = auto()
    """For good."""
    SAME = auto()
    """The process that was lost still runs."""
    ENDED = auto()
    """That process has ended."""
    RESTARTED = auto()
    """And the next one can be admitted."""
    UNKNOWN = auto()
    """Ray knows nothing of it: it joined by itself."""


class RaySaid(NamedTuple):
    """What Ray said of lost members, by name, with the cause of a death."""

    fates: Mapping[str, tuple[Fate, str]]
    took_s: float = 0.0


class Answered(NamedTuple):
    """Answers of members to deltas, by name and incarnation; None: it failed, or could not be asked."""

    answers: Mapping[tuple[str, int], Answer | None]


class Coming(NamedTuple):
    """These have prepared to join, with the view as it is; the other members are to prepare for them."""

    peers: Sequence[Peer]


class Connecting(NamedTuple):
    """These are told where the other members listen, and connect."""

    names: Sequence[str]


class Arrived(NamedTuple):
    """These have joined."""

    kind: Literal["added", "back"]
    names: Sequence[str]
    version: int
    """``Core.promised`` after their ``Coming``."""


class Failed(NamedTuple):
    """An attempt to admit these has failed."""

    names: Sequence[str]
    later: Sequence[str] = ()
    """Those of them that may try again later; the others at once."""


class Parting(NamedTuple):
    """These are asked to leave, and break their connections: that is no loss, because ``Removed`` follows."""

    names: Sequence[str]


class Removed(NamedTuple):
    """A user removes these members."""

    names: Sequence[str]


class Overdue(NamedTuple):
    """The supervisor does not wait any longer for members to follow that version of the view."""

    version: int


class Tick(NamedTuple):
    """The time of ``Core.due`` has come."""


Event = (
    Broke | Dialled | RaySaid | Answered | Coming | Connecting | Arrived | Failed | Parting | Removed | Overdue | Tick
)


class Announce(NamedTuple):
    """Send a delta to these members, by name the incarnation; each answer is an ``Answered``."""

    delta: Delta
    members: Mapping[str, int]


class AskRay(NamedTuple):
    """Ask Ray about the actors of these members: ``RaySaid``."""

    names: Sequence[str]
    ended: Collection[str]
    """Those whose end is known, so that the next process may listen."""


class Dial(NamedTuple):
    """Connect to these members and watch the connections: ``Dialled``, later ``Broke``."""

    names: Sequence[str]
    patience_s: float


class Forget(NamedTuple):
    """Close the connections to these members."""

    names: Sequence[str]


class Strike(NamedTuple):
    """Take off the roster those that are not in the view any more."""


class Admit(NamedTuple):
    """Admit the new processes of these members: ``Coming`` and then ``Arrived``, or ``Failed``."""

    names: Sequence[str]
    patience_s: float


class Report(NamedTuple):
    """Report a change to listeners."""

    change: Change


Instruction = Announce | AskRay | Dial | Forget | Strike | Admit | Report


class Phase(Enum):
    """What is known of a lost member."""

    SUSPECTED = auto()
    """Its connection broke. The other members have not been told."""
    AWAY = auto()
    """Announced. Its process may come back as it was."""
    ENDED = auto()
    """Announced. It can only come back as another process."""
    RESTARTED = auto()
    """Ray has restarted the actor, and its new process listens for requests."""
    RETURNING = auto()
    """That process is being admitted."""


class _Loss:
    """Of a member whose process has ended, or may have."""

    def __init__(self, cause: str, now: float) -> None:
        self.cause, self.phase = cause, Phase.SUSPECTED
        self.since = self.next_poll = self.next_dial = now
        self.dials = 0
        """How often it was tried to connect to it again."""
        self.backoff = 1.0
        """Doubled with each attempt to admit it that failed."""

    @property
    def patience_s(self) -> float:
        """How long the next attempt to admit it may take."""
        return min(_FIRST_PATIENCE_S * self.backoff, _LONGEST_PATIENCE_S)

    @property
    def is_announced(self) -> bool:
        return self.phase is not Phase.SUSPECTED

    @property
    def absence(self) -> Absence:
        return Absence(self.cause, False, self.phase in (Phase.ENDED, Phase.RESTARTED, Phase.RETURNING))


class _Member:
    """One process."""

    def __init__(self, rank: int, incarnation: int, version: int) -> None:
        self.rank, self.incarnation = rank, incarnation
        self.version = version
        """Of the view, as it has acknowledged."""
        self.is_watched = False
        """It has been connected to."""
        self.is_slow = False
        """It did not answer in time: nobody waits for it until it does."""


class _Pending(NamedTuple):
    """A change that is reported once members have followed."""

    version: int
    until: float
    change: Change


class Core:
    """Used by one thread, but for what any thread may ask."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        """``peers``: the members of a group that has formed."""
        self.view = View(peers)
        self._members: dict[str, _Member] = {}
        self.lost: dict[str, _Loss] = {}
        self._asked: dict[str, float] = {}
        """Members that have not answered yet, and when they were asked; the oldest first."""
        self._behind: dict[str, float] = {}
        """Members that have not acknowledged the view, and when they may be asked."""
        self._coming: dict[str, Peer] = {}
        self._connecting, self._parting = set[str](), set[str]()
        self.promised = 0
        """The version at which those join that have announced themselves last."""
        self._reports: deque[_Pending] = deque()
        self._now = 0.0
        self._out: list[Instruction] = []
        for entry in self.view.entries.values():
            self._add(entry.peer, self.view.version)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Broke: self._broke,
            Dialled: self._dialled,
            RaySaid: self._ray_said,
            Answered: self._answered,
            Coming: self._prepare_for,
            Connecting: lambda event: self._connecting.update(event.names),
            Arrived: self._arrived,
            Failed: self._failed,
            Parting: lambda event: self._parting.update(event.names),
            Removed: self._removed,
            Overdue: lambda event: self._stop_waiting(event.version),
            Tick: self._poll,
        }

    def _add(self, peer: Peer, version: int) -> None:
        name = peer.member.name
        self._members[name] = _Member(peer.member.rank, peer.member.incarnation, version)
        self._drop(name)

    def handle(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """What to do next, in order. ``now``: ``time.monotonic()``. What these events change is announced at once."""
        self._now, self._out = now, []
        before, answered = self.view.version, False
        for event in events:
            self._handlers[type(event)](event)
            answered |= isinstance(event, Answered)
        if answered:
            self.view.forget(min((member.version for member in self._members.values()), default=0))
        if self.view.version != before:
            for name, member in self._members.items():
                if member.version < self.view.version and name not in self.lost:
                    self._behind.setdefault(name, now)
        self._announce()
        self._report()
        return self._out

    # --- what the supervisor asks -------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When ``Tick`` is due (``time.monotonic``); None: not before another event."""
        times = [loss.next_poll for loss in self.lost.values() if loss.phase is not Phase.RETURNING]
        times += [when for name, when in self._behind.items() if when > self._now and name not in self._asked]
        times += [when + _ASK_AGAIN_S for when in list(self._asked.values())[:1]]
        times += [pending.until for pending in list(self._reports)[:1]]
        return min(times, default=None)

    def awaited(self, version: int) -> set[str]:
        """The members that answer in time and have not followed that version of the view. Any thread may ask."""
        found = ((name, self._members.get(name)) for name in self._behind.copy())
        return {name for name, its in found if its and its.version < version and not its.is_slow}

    def listening(self) -> dict[str, Prepared]:
        """Where each member listens. Any thread may ask."""
        return {its.peer.member.name: its.peer.prepared for its in self.view.entries.copy().values()}

    def causes(self) -> dict[str, str]:
        """Why each lost member is lost, by name. Any thread may ask."""
        return {name: loss.cause for name, loss in self.lost.copy().items()}

    def away(self) -> dict[str, str]:
        """The same of those whose loss was announced. Any thread may ask."""
        return {name: loss.cause for name, loss in self.lost.copy().items() if loss.is_announced}

    def unready(self) -> dict[str, str]:
        """The members that cannot be called by all, and why. Any thread may ask."""
        return {**dict.fromkeys(self._behind.copy(), BEHIND), **self.causes()}

    # --- announcements ------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Have each member follow that has answered before. Those at one version get the same delta."""
        groups: dict[int, dict[str, int]] = {}
        for name, when in self._behind.items():
            if name not in self._asked and when <= self._now and (member := self._members[name]).is_watched:
                groups.setdefault(member.version, {})[name] = member.incarnation
        for version, members in groups.items():
            self._out.append(Announce(self.view.since(version), members))
            self._asked.update(dict.fromkeys(members, self._now))

    def _answered(self, event: Answered) -> None:
        moved: dict[int, Prepared] = {}
        for (name, incarnation), answer in event.answers.items():
            member, loss = self._members.get(name), self.lost.get(name)
            if member is None or member.incarnation != incarnation or self._asked.pop(name, None) is None:
                continue
            if loss is not None and loss.phase is not Phase.AWAY:
                continue
            member.is_slow = answer is None
            if answer is None:
                if loss is None:
                    self._behind[name] = self._now + _RETRY_S
                continue
            member.version = answer.version
            if answer.version >= self.view.version:
                self._behind.pop(name, None)
            if loss is not None:
                self._return(name, answer.prepared)
            elif answer.prepared is not None and answer.prepared != self.view.entries[member.rank].peer.prepared:
                moved[member.rank] = answer.prepared
        # Those that come get it when they connect, and nobody else needs it.
        if moved and self._coming and not self._connecting:
            self.view.amend(moved)
        elif moved:
            self.view.describe(moved)

    def _return(self, name: str, prepared: Prepared | None) -> None:
        """A process that was unreachable has replaced its connections: the others do so too."""
        peer = self.view.entries[self._members[name].rank].peer
        self.view.admit([peer if prepared is None else peer._replace(prepared=prepared)])
        self._recover(name)
        self._report_later(Change("back", (name,)))

    def _recover(self, name: str) -> None:
        del self.lost[name]
        member = self._members[name]
        if member.version < self.view.version:
            self._behind[name] = self._now

    def _drop(self, name: str) -> None:
        """Expect no answer of this member any more."""
        self._behind.pop(name, None)
        self._asked.pop(name, None)

    def _stop_waiting(self, version: int) -> None:
        for name in self._behind:
            member = self._members[name]
            member.is_slow |= member.version < version

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report_later(self, change: Change) -> None:
        """Once all members have followed, or so much later."""
        until = self._now + min(_REPORT_S + _REPORT_EACH_S * len(self._members), _LONGEST_REPORT_S)
        self._reports.append(_Pending(self.view.version, until, change))

    def _report(self) -> None:
        while self._reports:
            version, until, change = self._reports[0]
            if self.awaited(version):
                if self._now < until:
                    return
                self._stop_waiting(version)
            self._reports.popleft()
            self._out.append(Report(change))

    # --- losses -------------------------------------------------------------------------------------------------------

    def _broke(self, event: Broke) -> None:
        member = self._members.get(event.name)
        if member is None or member.incarnation != event.incarnation:
            return
        if event.name not in self.lost and event.name not in self._parting:
            self.lost[event.name] = _Loss(event.cause, self._now)  # polled with others reported by then
            self._drop(event.name)

    def _poll(self, _: Tick) -> None:
        while self._asked and (oldest := next(iter(self._asked.items())))[1] + _ASK_AGAIN_S <= self._now:
            del self._asked[oldest[0]]
            self._members[oldest[0]].is_slow = True
        polled = [
            name
            for name, loss in self.lost.items()
            if loss.next_poll <= self._now and loss.phase is not Phase.RETURNING
        ]
        for name in polled:
            loss = self.lost[name]
            loss.next_poll = self._now + (_POLL_S if self._now - loss.since < _SLOW_AFTER_S else _SLOW_POLL_S)
        if polled:
            ended = [name for name in polled if self.lost[name].phase in (Phase.ENDED, Phase.RESTARTED)]
            self._out.append(AskRay(polled, ended))

    def _ray_said(self, event: RaySaid) -> None:
        dead, ended = dict[str, _Loss](), list[str]()
        for name, (fate, cause) in event.fates.items():
            if (loss := self.lost.get(name)) is None or loss.phase is Phase.RETURNING:
                continue
            loss.next_poll += 2 * event.took_s  # Ray's control store is busy while it restarts many actors
            if fate is Fate.DEAD:
                loss.cause = f"its actor died: {cause}" if cause else "its actor died"
                dead[name] = loss
            elif fate is Fate.UNKNOWN and self._now - loss.since > _GONE_S:
                loss.cause = f"its process could not be reached for {_GONE_S:g} s"
                dead[name] = loss
            elif fate in (Fate.SAME, Fate.UNKNOWN):
                self._dial(name, loss)
            elif not loss.is_announced or loss.phase is Phase.AWAY:
                ended.append(name)
            else:
                loss.phase = Phase.RESTARTED if fate is Fate.RESTARTED else Phase.ENDED
        if ended:
            self._lose(ended, Phase.ENDED)
        if dead:
            self._bury(dead)
        self._readmit()

    def _bury(self, dead: Mapping[str, _Loss]) -> None:
        """These will not come back."""
        self.view.remove({self._members[name].rank: Absence(loss.cause, True, True) for name, loss in dead.items()})
        self._strike(dead)
        for name, loss in dead.items():
            self._report_later(Change("dead", (name,), loss.cause))

    def _dial(self, name: str, loss: _Loss) -> None:
        if self._now < loss.next_dial:
            return
        patience_s = min(_DIAL_S * 2**loss.dials, _LONGEST_AWAY_DIAL_S if loss.is_announced else _LONGEST_DIAL_S)
        loss.dials, loss.next_dial = min(loss.dials + 1, 10), float("inf")
        self._asked.pop(name, None)
        self._out.append(Dial([name], patience_s))

    def _dialled(self, event: Dialled) -> None:
        name, loss, member = event.name, self.lost.get(event.name), self._members.get(event.name)
        if member is None or member.incarnation != event.incarnation:
            return
        if event.error is None:
            member.is_watched = True
            if loss is not None and loss.phase is Phase.SUSPECTED:
                self._recover(name)
            elif loss is not None and loss.phase is Phase.AWAY:
                loss.next_dial = self._now + _RECONNECT_S
                self._asked[name] = self._now
                self._out.append(Announce(self.view.since(member.version, reconnects=True), {name: member.incarnation}))
        elif event.ended:
            self._bury({name: _Loss("its process ended", self._now)})
        elif loss is None:
            self._broke(Broke(name, event.incarnation, event.error))  # it has just joined
        else:
            loss.next_dial = self._now + _SLOW_POLL_S
            if event.refused and loss.phase is Phase.SUSPECTED:  # one that only hangs would have accepted it
                self._lose([name], Phase.AWAY)

    def _lose(self, names: Sequence[str], phase: Phase) -> None:
        """Announce the loss of these members, or more about it."""
        news = [name for name in names if not self.lost[name].is_announced]
        for name in names:
            self.lost[name].phase = phase
            self._drop(name)
        self._out.append(Forget(names))
        self.view.mark({self._members[name].rank: self.lost[name].absence for name in names})
        for name in news:
            self._report_later(Change("lost", (name,), self.lost[name].cause))

    def _strike(self, names: Iterable[str]) -> None:
        for name in (gone := list(names)):
            self._drop(name)
            self.lost.pop(name, None)
            self._parting.discard(name)
            del self._members[name]
        self._out += [Forget(gone), Strike()]

    def _removed(self, event: Removed) -> None:
        self.view.remove({self._members[name].rank: None for name in event.names})
        self._strike(event.names)
        self._report_later(Change("removed", tuple(event.names)))

    # --- arrivals -----------------------------------------------------------------------------------------------------

    def _readmit(self) -> None:
        # Together, but for those that have failed more often: one that does not answer holds up all that come with it.
        # So do those that come while it is waited for.
        returning = {loss.patience_s for loss in self.lost.values() if loss.phase is Phase.RETURNING}
        back: dict[float, list[str]] = {}
        for name, loss in self.lost.items():
            if loss.phase is Phase.RESTARTED and loss.patience_s not in returning:
                back.setdefault(loss.patience_s, []).append(name)
        for patience_s, names in sorted(back.items()):
            for name in names:
                self.lost[name].phase = Phase.RETURNING
            self._out.append(Admit(names, patience_s))

    def _prepare_for(self, event: Coming) -> None:
        self._coming.update({peer.member.name: peer for peer in event.peers})
        self.view.admit(event.peers, JOINING)
        self.promised = self.view.promise()

    def _arrived(self, event: Arrived) -> None:
        arrived = [self._coming.pop(name) for name in event.names]
        self._connecting.difference_update(event.names)
        self.view.arrive(arrived, event.version)
        for peer in arrived:
            self.lost.pop(peer.member.name, None)
            self._add(peer, event.version)
        self._out.append(Dial(event.names, _CONNECT_S))
        self._report_later(Change(event.kind, tuple(event.names)))

    def _failed(self, event: Failed) -> None:
        came = [its.member for name in event.names if (its := self._coming.pop(name, None)) is not None]
        self._connecting.difference_update(event.names)
        lost = {its.rank: self.lost[its.name] for its in came if its.name in self.lost}
        if lost:
            self.view.mark({rank: loss.absence for rank, loss in lost.items()})
        if new := [its.rank for its in came if its.rank not in lost and its.rank in self.view.entries]:
            self.view.remove(dict.fromkeys(new))
        for name in event.names:
            if (loss := self.lost.get(name)) is None or loss.phase is not Phase.RETURNING:
                continue
            if name in event.later:
                loss.phase = Phase.ENDED  # others that return by then do not wait for it
                loss.next_poll = self._now + min(_FIRST_RETRY_S * loss.backoff, _LONGEST_RETRY_S)
                loss.backoff *= 2
            else:
                loss.phase, loss.next_poll = Phase.RESTARTED, self._now
