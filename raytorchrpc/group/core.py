"""Decides what a group's supervisor does: from events and the time to instructions. No thread, no clock and no I/O.

The supervisor carries out the instructions, and reports what came of them as further events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Literal, NamedTuple, Protocol

from raytorchrpc.calls.peers import Absence
from raytorchrpc.errors import BootstrapError
from raytorchrpc.group.changes import Change
from raytorchrpc.group.messages import Prepared
from raytorchrpc.group.roster import Roster
from raytorchrpc.group.view import JOINING, Answer, Delta, Peer, View

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


#: What has happened: a call of one of the methods of ``Core`` that are named as events.
Event = Callable[[], None]
#: Names a process: its member's rank, which no other member gets, and its incarnation. A report may come when another
#: member has the name.
ProcessId = tuple[int, int]


class Announce(NamedTuple):
    """Send a delta to these processes, by name; each answer is reported by ``answered``."""

    delta: Delta
    members: Mapping[str, ProcessId]


class AskRay(NamedTuple):
    """Ask Ray about the actors of these members: ``ray_said``."""

    names: Sequence[str]
    ended: Collection[str]
    """Those whose end is known, so that the next process may listen."""


class Dial(NamedTuple):
    """Connect to these members and watch the connections: ``dialled``, later ``broke``."""

    names: Sequence[str]
    patience_s: float


class Forget(NamedTuple):
    """Close the connections to these members."""

    names: Sequence[str]


class Post(NamedTuple):
    """The roster has changed: post it. ``arrived``: the handles of those that have joined, by name."""

    arrived: Mapping[str, Any] = {}


class Admit(NamedTuple):
    """Admit the new processes of these members, by name the rank: ``coming`` and then ``arrived``, or ``failed``."""

    ranks: Mapping[str, int]
    patience_s: float


class Report(NamedTuple):
    """Report a change to listeners."""

    change: Change


Instruction = Announce | AskRay | Dial | Forget | Post | Admit | Report


class Step(Enum):
    """How far an attempt to admit processes has come."""

    BEGUN = auto()
    """They describe themselves."""
    ASSIGNED = auto()
    """They have ranks and routes, and prepare: they start to listen."""
    ANNOUNCED = auto()
    """The members prepare for them. That is waited for, for a while."""
    CONNECTING = auto()
    """They connect to the members."""
    JOINED = auto()


class Attempt(Protocol):
    """Processes that are to join together, and the group as they have it; see ``formation.Formation``."""

    participants: dict[str, Any]
    """Their handles, by name."""
    roster: Roster

    @property
    def ranks(self) -> dict[str, int]:
        """By name, once they are assigned."""

    def assign(self, roster: Roster, beside: Roster | None = None) -> None:
        """Give them ranks and routes beside the members of ``roster``; see ``Roster.admit``."""

    def has_others(self, roster: Roster) -> bool:
        """Whether ``roster`` has other members than they were told; then they are told those from now on."""


class Admission:
    """An attempt to admit processes. ``assign``, ``announce``, ``connect`` and ``arrive`` of ``Core`` take it through
    its steps; the supervisor carries out what each of them calls for.
    """

    def __init__(self, kind: Literal["added", "back", "client"], attempt: Attempt) -> None:
        self.kind, self.attempt, self.step = kind, attempt, Step.BEGUN
        self.version = 0
        """Of the view, with which they join."""
        self.prepared: dict[str, Prepared] = {}
        """Where the members and they listen, by name."""
        self.away: dict[str, str] = {}
        self.silent: set[str] = set()
        """Members that cannot be called, and why; and those that do not answer."""


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
        self.rank, self.process = rank, (rank, incarnation)
        self.version = version
        """Of the view, as it has acknowledged."""
        self.is_watched = False
        """It has been connected to."""
        self.is_late = self.is_slow = False
        """It did not answer in the time of a report, or in that of a change: the next ones of that kind do not wait for
        it until it does.
        """


class _Pending(NamedTuple):
    """A change that is reported once members have followed."""

    version: int
    until: float
    change: Change


class Core:
    """Used by one thread, but for what any thread may ask."""

    def __init__(self, roster: Roster, prepared: Mapping[str, Prepared]) -> None:
        """``prepared``: where the members of the roster listen, by name. The group has formed."""
        self.view, self.roster = View(roster.peers(prepared)), roster
        self._admissions: list[Admission] = []
        """Those whose participants are assigned and have not joined yet, clients aside."""
        self._members: dict[str, _Member] = {}
        self.lost: dict[str, _Loss] = {}
        self._asked: dict[str, float] = {}
        """Members that have not answered yet, and when they were asked; the oldest first."""
        self._behind: dict[str, float] = {}
        """Members that have not acknowledged the view, and when they may be asked."""
        self.clients: dict[str, Peer] = {}
        """Processes that follow the view and are not in it."""
        self._coming: dict[int, Peer] = {}
        """By rank; ``_connecting``: the ranks of those of them that connect."""
        self._connecting, self._parting = set[int](), set[str]()
        self.promised = 0
        """The version at which those join that have announced themselves last."""
        self._reports: deque[_Pending] = deque()
        self._now = 0.0
        self._has_answers = False
        """Members have answered, among the events that are being handled."""
        self._out: list[Instruction] = []
        for entry in self.view.entries.values():
            self._add(entry.peer, self.view.version)

    def _add(self, peer: Peer, version: int) -> None:
        name = peer.member.name
        self._members[name] = _Member(peer.member.rank, peer.member.incarnation, version)
        self._drop(name)

    def _found(self, name: str, process: ProcessId) -> _Member | None:
        """The member of that name, if that is its process."""
        member = self._members.get(name)
        return member if member is not None and member.process == process else None

    def handle(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """What to do next, in order. ``now``: ``time.monotonic()``. What these events change is announced at once."""
        self._now, self._out, self._has_answers = now, [], False
        before = self.view.version
        for event in events:
            event()
        if self._has_answers:
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
        """When ``tick`` is due (``time.monotonic``); None: not before another event."""
        times = [loss.next_poll for loss in self.lost.values() if loss.phase is not Phase.RETURNING]
        times += [when for name, when in self._behind.items() if when > self._now and name not in self._asked]
        times += [when + _ASK_AGAIN_S for when in list(self._asked.values())[:1]]
        times += [pending.until for pending in list(self._reports)[:1]]
        return min(times, default=None)

    def awaited(self, version: int) -> set[str]:
        """The members that answer in time and have not followed that version of the view. Any thread may ask."""
        behind = ((name, self._members.get(name)) for name in self._behind.copy() if name not in self.clients)
        return {name for name, member in behind if member and member.version < version and not member.is_slow}

    def listening(self) -> dict[str, Prepared]:
        """Where each member listens. Any thread may ask."""
        return {entry.peer.member.name: entry.peer.prepared for entry in self.view.entries.copy().values()}

    def causes(self) -> dict[str, str]:
        """Why each lost member is lost, by name. Any thread may ask."""
        return {name: loss.cause for name, loss in self.lost.copy().items() if name not in self.clients}

    def away(self) -> dict[str, str]:
        """The same of those whose loss was announced. Any thread may ask."""
        return {name: loss.cause for name, loss in self.lost.copy().items() if loss.is_announced}

    def unready(self) -> dict[str, str]:
        """The members that cannot be called by all, and why. Any thread may ask."""
        behind = (name for name in self._behind.copy() if name not in self.clients)
        return {**dict.fromkeys(behind, BEHIND), **self.causes()}

    # --- announcements ------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Have each member follow that has answered before. Those at one version get the same delta."""
        groups: dict[int, dict[str, ProcessId]] = {}
        for name, when in self._behind.items():
            if name not in self._asked and when <= self._now and (member := self._members[name]).is_watched:
                groups.setdefault(member.version, {})[name] = member.process
        for version, members in groups.items():
            self._out.append(Announce(self.view.since(version), members))
            self._asked.update(dict.fromkeys(members, self._now))

    def answered(self, answers: Mapping[tuple[str, ProcessId], Answer | None]) -> None:
        """Event: answers of members to deltas, by name and process; None: it failed, or could not be asked."""
        moved: dict[int, Prepared] = {}
        self._has_answers = True
        for (name, process), answer in answers.items():
            member, loss = self._found(name, process), self.lost.get(name)
            if member is None or self._asked.pop(name, None) is None:
                continue
            if loss is not None and loss.phase is not Phase.AWAY:
                continue
            member.is_late = member.is_slow = answer is None
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

    def overdue(self, version: int) -> None:
        """Event: a change does not wait any longer for members to follow that version of the view."""
        for name in self.awaited(version):
            self._members[name].is_slow = True

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report_later(self, change: Change) -> None:
        """Once all members have followed, or so much later."""
        until = self._now + min(_REPORT_S + _REPORT_EACH_S * len(self._members), _LONGEST_REPORT_S)
        self._reports.append(_Pending(self.view.version, until, change))

    def _report(self) -> None:
        while self._reports:
            version, until, change = self._reports[0]
            awaited = [member for name in self.awaited(version) if not (member := self._members[name]).is_late]
            if awaited and self._now < until:
                return
            for member in awaited:
                member.is_late = True
            self._reports.popleft()
            self._out.append(Report(change))

    # --- losses -------------------------------------------------------------------------------------------------------

    def broke(self, name: str, process: ProcessId, cause: str) -> None:
        """Event: a connection to a member's process broke."""
        if self._found(name, process) and name not in self.lost and name not in self._parting:
            self.lost[name] = _Loss(cause, self._now)  # polled with others reported by then
            self._drop(name)

    def tick(self) -> None:
        """Event: the time of ``due`` has come."""
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

    def ray_said(self, fates: Mapping[str, tuple[Fate, str]], took_s: float = 0.0) -> None:
        """Event: what Ray said of lost members, by name, with the cause of a death."""
        dead, ended = dict[str, _Loss](), list[str]()
        for name, (fate, cause) in fates.items():
            if (loss := self.lost.get(name)) is None or loss.phase is Phase.RETURNING:
                continue
            loss.next_poll += 2 * took_s  # Ray's control store is busy while it restarts many actors
            if fate is Fate.DEAD:
                loss.cause = f"its actor died: {cause.removesuffix('.')}" if cause else "its actor died"
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
        known = {name: loss for name, loss in dead.items() if name not in self.clients}
        if known:
            self.view.remove(
                {self._members[name].rank: Absence(loss.cause, True, True) for name, loss in known.items()}
            )
        self._strike(dead)
        for name, loss in known.items():
            self._report_later(Change("dead", (name,), loss.cause))

    def _dial(self, name: str, loss: _Loss) -> None:
        if self._now < loss.next_dial:
            return
        patience_s = min(_DIAL_S * 2**loss.dials, _LONGEST_AWAY_DIAL_S if loss.is_announced else _LONGEST_DIAL_S)
        loss.dials, loss.next_dial = min(loss.dials + 1, 10), float("inf")
        self._asked.pop(name, None)
        self._out.append(Dial([name], patience_s))

    def dialled(
        self, name: str, process: ProcessId, error: str | None, *, refused: bool = False, ended: bool = False
    ) -> None:
        """Event: it was tried to connect to a member's process.

        ``refused``: nothing listened there any more. ``ended``: its process has ended, and there will be no other.
        """
        loss, member = self.lost.get(name), self._found(name, process)
        if member is None:
            return
        if error is None:
            member.is_watched = True
            if loss is not None and loss.phase is Phase.SUSPECTED:
                self._recover(name)
            elif loss is not None and loss.phase is Phase.AWAY:
                loss.next_dial = self._now + _RECONNECT_S
                self._asked[name] = self._now
                self._out.append(Announce(self.view.since(member.version, reconnects=True), {name: process}))
        elif ended:
            self._bury({name: _Loss("its process ended", self._now)})
        elif loss is None:
            self.broke(name, process, error)  # it has just joined
        else:
            loss.next_dial = self._now + _SLOW_POLL_S
            # One that only hangs would have accepted it. Nobody hears of a client: this waits for it as long as for one
            # that does not answer, as it goes on with the view that it has.
            if refused and loss.phase is Phase.SUSPECTED and name not in self.clients:
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
        self.roster = self.roster.without(gone := list(names))
        for name in gone:
            self._drop(name)
            self.lost.pop(name, None)
            self._parting.discard(name)
            self.clients.pop(name, None)
            del self._members[name]
        self._out += [Forget(gone), Post()]

    def parting(self, names: Iterable[str]) -> None:
        """Event: these are asked to leave. That they break their connections is no loss: ``removed`` follows."""
        self._parting.update(names)

    def removed(self, names: Sequence[str]) -> None:
        """Event: a user removes these members."""
        self.view.remove({self._members[name].rank: None for name in names})
        self._strike(names)
        self._report_later(Change("removed", tuple(names)))

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
            self._out.append(Admit({name: self._members[name].rank for name in names}, patience_s))

    def assign(self, admission: Admission) -> None:
        """Event: the participants have described themselves. Raises BootstrapError, ConfigurationError."""
        attempt = admission.attempt
        if admission.kind == "client":
            # It has the view as it is now, so it follows as a member does that has acknowledged this version. A promise
            # to it would have those that are promised one already come anew; see ``View.arrive``.
            attempt.assign(self._with_coming())
            admission.version = self.view.version
            self._tell_where_members_are(admission)
        else:
            self._check_present(admission)
            beside = self.roster
            for other in (each.attempt for each in self._admissions):
                # An attempt for one of these names is for a member that was removed, and will fail.
                beside = beside.with_members(other.roster, other.participants.keys() - attempt.participants.keys())
            attempt.assign(self.roster, beside if self._admissions else None)
            self._admissions.append(admission)
            self.roster = self.roster.after_failure(attempt.roster, attempt.participants)  # ids and ranks are taken
        admission.step = Step.ASSIGNED

    def _with_coming(self) -> Roster:
        """The roster with those that the members prepare for, as the view has them."""
        roster = self.roster
        for attempt in (each.attempt for each in self._admissions):
            # Some may have been removed meanwhile.
            names = [name for name, rank in attempt.ranks.items() if rank in self._coming and rank in self.view.entries]
            roster = roster.with_members(attempt.roster, names)
        return roster

    def announce(self, admission: Admission, coming: Mapping[str, Prepared]) -> None:
        """Event: the participants listen. If the members have changed meanwhile, they are to prepare again, and the
        step stays. Raises BootstrapError.
        """
        if admission.kind == "client":
            admission.prepared.update(coming)
            admission.step = Step.CONNECTING
            return
        self._check_present(admission)
        if admission.attempt.has_others(self.roster):
            return
        admission.prepared = {**self.listening(), **coming}
        self.coming(admission.attempt.roster.peers(admission.prepared, coming))
        admission.version, admission.step = self.promised, Step.ANNOUNCED

    def connect(self, admission: Admission) -> None:
        """Event: the members have followed, or are not waited for any longer."""
        self.connecting(admission.attempt.ranks.values())
        self._tell_where_members_are(admission)
        admission.step = Step.CONNECTING

    def arrive(self, admission: Admission) -> None:
        """Event: the participants have joined. Raises BootstrapError."""
        attempt = admission.attempt
        if admission.kind == "client":
            for client in attempt.roster.peers(admission.prepared, attempt.participants):
                self.roster = self.roster.with_client(client.member.name, attempt.roster)
                self.client_arrived(client, admission.version)
        else:
            self._check_present(admission)
            self.roster = self.roster.with_members(attempt.roster, attempt.participants)
            self.arrived(admission.kind, list(attempt.ranks.values()), admission.version)
            self._admissions.remove(admission)
            self._out.append(Post(dict(attempt.participants)))
        admission.step = Step.JOINED

    def give_up(self, admission: Admission) -> None:
        """Event: the attempt has failed. For members that were to come back, ``failed`` follows."""
        if admission in self._admissions:
            self._admissions.remove(admission)
            if admission.kind == "added":
                self.failed(admission.attempt.ranks)

    def _check_present(self, admission: Admission) -> None:
        """Raise BootstrapError if participants that were members have left: another may have the name by now."""
        now, before = self.roster.records, admission.attempt.roster.records
        if admission.kind == "back" and (
            gone := [
                name
                for name in admission.attempt.participants.keys() & before.keys()
                if name not in now or now[name].member.rank != before[name].member.rank
            ]
        ):
            raise BootstrapError(f"{', '.join(gone)} left the group meanwhile", members=tuple(gone))

    def _tell_where_members_are(self, admission: Admission) -> None:
        names = admission.attempt.ranks.keys()
        listening = self.listening()
        admission.prepared.update({name: published for name, published in listening.items() if name not in names})
        others = [name for name in admission.attempt.roster.records if name not in names]
        gone = {name: "it has left the group" for name in others if name not in listening}
        entries = self.view.entries.values()
        joining = {entry.peer.member.name: JOINING.cause for entry in entries if entry.state.absence == JOINING}
        away = {**joining, **self.away(), **gone}
        admission.away = {name: away[name] for name in others if name in away}
        admission.silent = self.unready().keys() - admission.away.keys() - names

    def client_arrived(self, client: Peer, version: int) -> None:
        """Event: a client has joined at that version. The members are not told."""
        name = client.member.name
        self.clients[name] = client
        self._add(client, version)
        if version < self.view.version:
            self._behind[name] = self._now
        self._out.append(Dial([name], _CONNECT_S))

    def coming(self, peers: Sequence[Peer]) -> None:
        """Event: these have prepared to join, with the view as it is; the other members are to prepare for them."""
        self._coming.update({peer.member.rank: peer for peer in peers})
        self.view.admit(peers, JOINING)
        self.promised = self.view.promise()

    def connecting(self, ranks: Iterable[int]) -> None:
        """Event: these are told where the other members listen, and connect."""
        self._connecting.update(ranks)

    def arrived(self, kind: Literal["added", "back"], ranks: Sequence[int], version: int) -> None:
        """Event: these have joined. ``version``: ``promised`` after their ``coming``."""
        arrived = [self._coming.pop(rank) for rank in ranks]
        names = [peer.member.name for peer in arrived]
        self._connecting.difference_update(ranks)
        self.view.arrive(arrived, version)
        for peer in arrived:
            self.lost.pop(peer.member.name, None)
            self._add(peer, version)
        self._out.append(Dial(names, _CONNECT_S))
        self._report_later(Change(kind, tuple(names)))

    def failed(self, ranks: Mapping[str, int], later: Collection[str] = ()) -> None:
        """Event: an attempt to admit these has failed. ``later``: those that try again later; the others at once."""
        came = [rank for rank in ranks.values() if self._coming.pop(rank, None) is not None]
        self._connecting.difference_update(ranks.values())
        here = {name: rank for name, rank in ranks.items() if name in self.lost and self._members[name].rank == rank}
        if lost := {rank: self.lost[name].absence for name, rank in here.items() if rank in came}:
            self.view.mark(lost)
        if new := [rank for rank in came if rank not in lost and rank in self.view.entries]:
            self.view.remove(dict.fromkeys(new))
        for name in here:
            if (loss := self.lost[name]).phase is not Phase.RETURNING:
                continue
            if name in later:
                loss.phase = Phase.ENDED  # others that return by then do not wait for it
                loss.next_poll = self._now + min(_FIRST_RETRY_S * loss.backoff, _LONGEST_RETRY_S)
                loss.backoff *= 2
            else:
                loss.phase, loss.next_poll = Phase.RESTARTED, self._now
