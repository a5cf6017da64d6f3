"""A group as one versioned view: the supervisor changes it, and members follow by the differences between versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from raytorchrpc.calls.peers import Absence, Member
from raytorchrpc.group.messages import GroupInfo, Prepared
from raytorchrpc.process.locks import Lock
from raytorchrpc.routing.pairs import Kind

#: Of a member that the others are to prepare for, and that has not joined yet.
JOINING = Absence("it has not joined yet", for_good=False, joins=True)
#: How many departures are kept for members that have not followed them yet. One that is further behind gets all.
_KEPT = 1000


class Peer(NamedTuple):
    """A process that is a member, and how it is reached."""

    member: Member
    prepared: Prepared
    kind: Kind
    """What decides its routes."""


class State(NamedTuple):
    """Whether a member can be called."""

    rank: int
    absence: Absence | None
    """None: it can be. Of a member that has left: None if it was removed, else why it died."""
    version: int
    """Of the view, when this changed last."""


class Entry(NamedTuple):
    """A member as the view has it. The numbers are versions of the view."""

    peer: Peer
    entered: int
    """When its process came, or came back after nobody could reach it."""
    described: int
    """When ``peer`` changed last."""
    state: State


class Delta(NamedTuple):
    """What changed between two versions of a view. Applying it again changes nothing."""

    base: int
    """A member at this version or a later one can follow. 0: any can; what is not listed has left."""
    version: int
    entries: tuple[Entry, ...]
    """Members that came, or listen elsewhere."""
    states: tuple[State, ...]
    """Of other members."""
    departed: tuple[State, ...]
    reconnects: bool = False
    """The receiver was unreachable: it replaces its connections."""


class Answer(NamedTuple):
    """A member's answer to a delta."""

    version: int
    """The one that it has now."""
    prepared: Prepared | None
    """Where it listens, if that has changed since the delta's base."""


class View:
    """The supervisor's. A change costs time in proportion to what changes, and so does ``since``."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        self.version = 1
        self.entries: dict[int, Entry] = {}
        """By rank; those that changed last come last, as in ``departed``."""
        self.departed: dict[int, State] = {}
        self._forgotten = 0
        """Departures up to this version are not kept any more."""
        self._promised = 0
        """The latest version that was promised to newcomers."""
        for peer in peers:
            self._put(peer, 1, 1, None)

    def _put(self, peer: Peer, entered: int, described: int, absence: Absence | None) -> None:
        rank = peer.member.rank
        self.entries.pop(rank, None)
        self.entries[rank] = Entry(peer, entered, described, State(rank, absence, self.version))

    def _grow(self) -> None:
        self.version = max(self.version, self._promised) + 1

    def promise(self) -> int:
        """A version for processes that join with the view as it is now. No other change gets it."""
        self._promised = max(self.version, self._promised) + 1
        return self._promised

    def arrive(self, peers: Iterable[Peer], promised: int) -> None:
        """These have joined at the version that they were promised."""
        if self._promised > promised:  # others that were promised one later do not know these
            self.admit(peers)
        elif self.version > promised:
            self.mark({peer.member.rank: None for peer in peers})
        else:  # nothing has changed meanwhile: they are up to date
            self.version = promised
            for peer in peers:
                old = self.entries[peer.member.rank]
                self._put(old.peer, old.entered, old.described, None)

    def admit(self, peers: Iterable[Peer], absence: Absence | None = None) -> None:
        """Add processes: new members, restarted ones, and those that were unreachable."""
        self._grow()
        for peer in peers:
            self.departed.pop(peer.member.rank, None)
            self._put(peer, self.version, self.version, absence)

    def describe(self, prepared: Mapping[int, Prepared]) -> None:
        """Note that these members listen elsewhere."""
        self._grow()
        for rank, new in prepared.items():
            old = self.entries[rank]
            self._put(old.peer._replace(prepared=new), old.entered, self.version, old.state.absence)

    def amend(self, prepared: Mapping[int, Prepared]) -> None:
        """As ``describe``, where nobody needs to know but those that join next."""
        for rank, new in prepared.items():
            old = self.entries[rank]
            self.entries[rank] = old._replace(peer=old.peer._replace(prepared=new))

    def mark(self, absences: Mapping[int, Absence | None]) -> None:
        """Set whether these members can be called."""
        self._grow()
        for rank, absence in absences.items():
            old = self.entries[rank]
            self._put(old.peer, old.entered, old.described, absence)

    def remove(self, departed: Mapping[int, Absence | None]) -> None:
        """Remove members: by a user (None), or because they died."""
        self._grow()
        for rank, absence in departed.items():
            del self.entries[rank]
            self.departed[rank] = State(rank, absence, self.version)

    def since(self, version: int, reconnects: bool = False) -> Delta:
        """What changed after that version; everything, if it is too old."""
        base = 0 if version < self._forgotten else version
        changed = list(takewhile(lambda entry: entry.state.version > base, reversed(self.entries.values())))
        departed = takewhile(lambda state: state.version > base, reversed(self.departed.values()))
        return Delta(
            base,
            self.version,
            tuple(entry for entry in changed if entry.described > base),
            tuple(entry.state for entry in changed if entry.described <= base),
            tuple(departed),
            reconnects,
        )

    def forget(self, version: int) -> None:
        """Drop departures that all members have followed, as they are at this version or later; and very many."""
        for state in list(takewhile(lambda state: state.version <= version, self.departed.values())):
            self._forget(state)
        while len(self.departed) > _KEPT:
            self._forget(next(iter(self.departed.values())))

    def _forget(self, state: State) -> None:
        del self.departed[state.rank]
        self._forgotten = state.version


class Difference(NamedTuple):
    """What a member does to follow a delta, in this order."""

    gone: list[tuple[Member, Absence | None]]
    """Members that left; an absence says why one died."""
    coming: list[Peer]
    """Those to connect to anew."""
    moved: list[tuple[Peer, Mapping[str, Any]]]
    """Those that listen elsewhere, with the addresses that are new, by lane."""
    states: list[State]
    """Of all members, as far as they have changed."""


class Table:
    """The group as one of its members keeps it. Following a delta takes time for what changes alone; ``info`` makes a
    copy when it is asked for. One thread changes it, others may read.
    """

    def __init__(self, info: GroupInfo, peers: Mapping[str, Prepared], version: int) -> None:
        """``peers``: by name, where each listens; without them, before they do."""
        self.version = version
        self.config, self.generation = info.config, info.generation
        self.members = {member.rank: member for member in info.members}
        self.peers = dict(peers)
        self.plan = replace(info.plan, kind_of=dict(info.plan.kind_of))  # this table changes the dictionary
        self.has_settled = True
        """Whether the member's settings fit the kinds of all members."""
        self._lock = Lock()
        self._info: GroupInfo | None = info
        self._last_info = info

    @property
    def info(self) -> GroupInfo:
        with self._lock:
            if self._info is None:
                members = tuple(self.members[rank] for rank in sorted(self.members))
                plan = self.plan.part(member.name for member in members)
                self._info = self._last_info = self._last_info._replace(members=members, plan=plan)
            return self._info

    def difference(self, delta: Delta, me: int) -> Difference | None:
        """What the member of rank ``me`` does to follow; None: nothing, or it cannot. Changes nothing."""
        if not delta.base <= self.version < delta.version:
            return None
        gone = [(self.members[state.rank], state.absence) for state in delta.departed if state.rank in self.members]
        if delta.base == 0:
            listed = {me, *(each.peer.member.rank for each in delta.entries), *(state.rank for state in delta.departed)}
            gone += [(member, None) for rank, member in self.members.items() if rank not in listed]
        news = [entry for entry in delta.entries if entry.state.version > self.version and entry.peer.member.rank != me]
        coming = {entry.peer.member.rank: entry.peer for entry in news if entry.entered > self.version}
        moved = [(each.peer, self._new(each.peer)) for each in news if each.entered <= self.version < each.described]
        if delta.reconnects:
            lost = {me, *(member.rank for member, _ in gone)}
            known = {rank: self._peer(member) for rank, member in self.members.items() if rank not in lost}
            coming, moved = {**known, **{peer.member.rank: peer for peer, _ in moved}, **coming}, []
        states = [*(entry.state for entry in news), *delta.states]
        states = [state for state in states if state.version > self.version and state.rank != me]
        return Difference(gone, [coming[rank] for rank in sorted(coming)], moved, states)

    def _peer(self, member: Member) -> Peer:
        return Peer(member, self.peers[member.name], self.plan.kind(member.name))

    def _new(self, peer: Peer) -> Mapping[str, Any]:
        known = self.peers[peer.member.name].addresses
        return {lane: address for lane, address in peer.prepared.addresses.items() if known.get(lane) != address}

    def update(self, difference: Difference) -> None:
        """Change it accordingly, but for the version."""
        with self._lock:
            self._info = None
            for member, absence in difference.gone:
                del self.members[member.rank]
                if absence is None:  # calls to one that is dead name the cause
                    del self.peers[member.name], self.plan.kind_of[member.name]
            for peer in (*(peer for peer, _ in difference.moved), *difference.coming):
                self.members[peer.member.rank] = peer.member
                self.peers[peer.member.name] = peer.prepared
                self._note_kind(peer.member.name, peer.kind)

    def _note_kind(self, name: str, kind: Kind) -> None:
        kinds, number = self.plan.kinds, self.plan.kind_of.get(name)
        if number is None or kinds[number] != kind:
            if kind not in kinds:
                self.plan = replace(self.plan, kinds=(*kinds, kind))
            self.plan.kind_of[name] = self.plan.kinds.index(kind)
            self.has_settled = False
