"""Members of a group as data: they follow the deltas of its view, and have no threads, lanes or processes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from raytorchrpc.group.messages import Prepared
from raytorchrpc.group.roster import Roster
from raytorchrpc.group.view import JOINING, Absence, Answer, Delta, Peer, Table, View
from tests.unit import clusters
from tests.unit.group.test_roster import formed, prepared_of, probes_of


class Follower:
    """One process of a member, which joined at that version of the view."""

    def __init__(
        self,
        rank: int,
        roster: Roster,
        view: View,
        version: int | None = None,
        prepared: Mapping[str, Prepared] | None = None,
    ) -> None:
        """``prepared``: where the members of ``roster`` listen; None: those of the view, as the view has it."""
        listening = {its.peer.member.name: its.peer.prepared for its in view.entries.values()}
        members = tuple(view.entries[rank].peer.member for rank in sorted(view.entries))
        if prepared is not None:
            members, listening = roster.description.members, {name: prepared[name] for name in roster.records}
        info = roster.description._replace(members=members)
        self.rank, self.table = rank, Table(info, listening, view.version if version is None else version)
        known = {member.rank for member in members} - {rank}
        self.absent = {r: its.state.absence for r, its in view.entries.items() if its.state.absence and r in known}
        self.seen = {rank: member.incarnation for rank, member in self.table.members.items()}
        self.reconnected: list[str] = []

    def follow(self, delta: Delta) -> Answer:
        """As ``group.join.follow``."""
        delta = pickle.loads(pickle.dumps(delta))
        if (difference := self.table.difference(delta, self.rank)) is not None:
            for member, _ in difference.gone:
                self.absent.pop(member.rank, None)
            for peer in difference.coming:
                rank, incarnation = peer.member.rank, peer.member.incarnation
                assert incarnation >= self.seen.get(rank, 0), "an older process came after a newer one"
                self.seen[rank] = incarnation
                self.reconnected.append(peer.member.name)
            for rank, absence, _ in difference.states:
                self.absent[rank] = absence
            self.absent = {rank: absence for rank, absence in self.absent.items() if absence is not None}
            self.table.update(difference)
            self.table.version = delta.version
        return Answer(self.table.version, None)

    def check(self, view: View) -> None:
        """It has the same group as the view, itself aside."""
        others = {rank: its for rank, its in view.entries.items() if rank != self.rank}
        assert self.table.version == view.version
        info = self.table.info
        assert [member.rank for member in info.members] == sorted([*others, self.rank])
        for rank, its in others.items():
            member = its.peer.member
            assert self.table.members[rank] == member
            assert self.table.peers[member.name] == its.peer.prepared
            assert info.plan.kind(member.name) == self.table.plan.kind(member.name) == its.peer.kind
        assert self.absent == {rank: its.state.absence for rank, its in others.items() if its.state.absence}


class Group:
    """A view of a group on hosts of eight, its roster, and what it takes to have members return or come."""

    def __init__(self, hosts: int) -> None:
        self.cluster = clusters.hosts_of(hosts, 8)
        self.roster, self.prepared = formed(self.cluster)
        self.view = View(self.roster.peers(self.prepared))
        self._lives = 0

    def follower(self, rank: int = 0) -> Follower:
        return Follower(rank, self.roster, self.view)

    def rank(self, name: str) -> int:
        return self.roster.records[name].member.rank

    def restarted(self, *names: str) -> list[Peer]:
        """The next processes of these members; new members, if they have none."""
        self._lives += 1
        probes = {name: probes_of(self.cluster, self._lives)[name] for name in names}
        self.roster = self.roster.admit(dict.fromkeys(names), probes)
        self.prepared.update({name: its for name, its in prepared_of(self.roster).items() if name in names})
        return self.roster.peers(self.prepared, names)

    def away(self, *names: str, cause: str = "killed") -> Mapping[int, Absence]:
        return {self.rank(name): Absence(cause, False, True) for name in names}

    def back(self, *names: str) -> None:
        """Announce that these are lost, come, and can be called."""
        self.view.mark(self.away(*names))
        self.view.admit(self.restarted(*names), JOINING)
        self.view.mark({self.rank(name): None for name in names})


def elsewhere(prepared: Prepared) -> Prepared:
    """A member that listens on another lane too."""
    return prepared._replace(addresses={**prepared.addresses, "shm": "memory"})
