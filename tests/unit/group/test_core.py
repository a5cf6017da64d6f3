"""What a supervisor decides: from events to instructions, without threads, clocks or actors."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from raytorchrpc.group import core
from raytorchrpc.group.core import BEHIND, Core, Fate
from raytorchrpc.group.messages import JoinedProcess, Prepared
from raytorchrpc.group.roster import Roster
from raytorchrpc.group.view import Absence, Answer, Peer, View
from tests.unit import clusters
from tests.unit.group.followers import Follower, Group, elsewhere
from tests.unit.group.test_roster import prepared_of, probes_of

CLIENT = 1 << 32
"""A rank that no member has."""
A, B, C = "worker_0", "worker_1", "worker_2"


def original(name: str) -> core.ProcessId:
    """The process that a member begins with."""
    return int(name.removeprefix("worker_")), 0


class Supervised:
    """A group of eight whose events a test makes. Members that are not told otherwise follow at once."""

    def __init__(self) -> None:
        self.group, self.now = Group(1), 100.0
        self.core = Core(self.group.roster, self.group.prepared)
        self.names = list(self.group.roster.records)
        self.silent: set[str] = set()
        self.asked: list[core.Announce] = []
        for name in self.names:
            assert self.tell(self.core.dialled, name, original(name), None) == []

    def tell(
        self, event: Callable[..., None], *about: Any, after_s: float = 0.0, **more: Any
    ) -> list[core.Instruction]:
        """What is to be done, but for announcements to members that answer, and what follows from their answers."""
        self.now += after_s
        done = []
        todo = self.core.handle([partial(event, *about, **more)], self.now)
        while todo:
            its = todo.pop(0)
            if isinstance(its, core.Announce):
                self.asked.append(its)
                answers = {
                    key: Answer(its.delta.version, None) for key in its.members.items() if key[0] not in self.silent
                }
                todo += self.core.handle([partial(self.core.answered, answers)], self.now)
            else:
                done.append(its)
        return done

    def said(self, fate: Fate, *names: str, cause: str = "") -> list[core.Instruction]:
        return self.tell(self.core.ray_said, {name: (fate, cause) for name in names})

    def lose(self, *names: str) -> None:
        """These have ended, which has been reported."""
        for name in names:
            self.tell(self.core.broke, name, self.group.roster.records[name].process, "connection closed")
        self.said(Fate.ENDED, *names)

    def admit(self, *names: str) -> None:
        peers = self.group.restarted(*names)
        self.tell(self.core.coming, peers)
        self.arrive("back", peers, self.core.promised)
        for name in names:
            self.tell(self.core.dialled, name, self.group.roster.records[name].process, None)

    def arrive(self, kind: str, peers: Sequence[Peer], version: int) -> list[core.Instruction]:
        return self.tell(self.core.arrived, kind, [peer.member.rank for peer in peers], version)


@pytest.fixture
def its() -> Supervised:
    return Supervised()


def reported(instructions: Sequence[core.Instruction]) -> list[tuple[str, tuple[str, ...], str]]:
    return [tuple(each.change) for each in instructions if isinstance(each, core.Report)]  # type: ignore[misc]


# --- losses ----------------------------------------------------------------------------------------------------------


def test_a_loss_is_announced_and_then_reported(its: Supervised) -> None:
    assert its.tell(its.core.broke, A, original(A), "connection closed") == []
    assert its.core.due() == its.now and its.core.causes() == {A: "connection closed"}
    assert its.tell(its.core.tick) == [core.AskRay([A], [])]
    done = its.said(Fate.ENDED, A)
    assert done == [core.Forget([A]), core.Report(core.Change("lost", (A,), "connection closed"))]
    (told,) = its.asked
    assert set(told.members) == {*its.names} - {A}, "all get one delta"
    assert [state.absence.cause for state in told.delta.states if state.absence] == ["connection closed"]
    assert its.tell(its.core.tick, after_s=0.05) == [core.AskRay([A], [A])], "its next process may listen"


def test_losses_that_come_together_are_announced_together(its: Supervised) -> None:
    for name in (A, B):
        its.tell(its.core.broke, name, original(name), "connection closed")
    assert its.tell(its.core.tick) == [core.AskRay([A, B], [])]
    assert [change[1] for change in reported(its.said(Fate.ENDED, A, B))] == [(A,), (B,)]
    assert len(its.asked) == 1


def test_members_that_are_found_lost_one_by_one_are_announced_together(its: Supervised) -> None:
    """Each announcement goes to all members: a tenth of n, each by itself, would take time with n^2."""
    lost = its.names[:3]
    for name in lost:
        its.tell(its.core.broke, name, original(name), "connection closed")
        its.said(Fate.SAME, name)
    refused = [partial(its.core.dialled, name, original(name), "refused", refused=True) for name in lost]
    (told,) = [each for each in its.core.handle(refused, its.now) if isinstance(each, core.Announce)]
    assert len(told.delta.states) == 3 and {*told.members} == {*its.names} - {*lost}


def test_listeners_hear_in_time_of_many_that_are_lost_while_the_others_are_busy() -> None:
    """Processes that start again take the cores that the others need to follow."""
    group = Group(32)
    supervised, now = Core(group.roster, group.prepared), 0.0
    names = list(group.roster.records)
    supervised.handle([partial(supervised.dialled, name, original(name), None) for name in names], now)
    supervised.handle([partial(supervised.broke, name, original(name), "closed") for name in names[::10]], now)
    done = supervised.handle([partial(supervised.ray_said, {name: (Fate.ENDED, "") for name in names[::10]})], now)
    while (due := supervised.due()) is not None and due <= 0.2:
        done += supervised.handle([supervised.tick], now := max(now + 0.01, due))
    assert [change[1] for change in reported(done)] == [(name,) for name in names[::10]]
    assert now < 0.25


def test_ray_is_asked_rarely_after_a_minute_and_when_it_is_busy(its: Supervised) -> None:
    its.lose(A)
    for after_s, took_s, pause_s in ((1.0, 0.0, 0.02), (1.0, 0.5, 1.02), (70.0, 0.0, 0.5)):
        its.tell(its.core.tick, after_s=after_s)
        its.tell(its.core.ray_said, {A: (Fate.ENDED, "")}, took_s)
        assert its.core.due() == pytest.approx(its.now + pause_s)


def test_a_client_follows_the_group_and_is_not_in_it(its: Supervised) -> None:
    name, process = "client", (CLIENT, 0)
    first = its.core.view.entries[0].peer
    client = first._replace(member=replace(first.member, name=name, rank=CLIENT))
    assert its.tell(its.core.client_arrived, client, its.core.view.version) == [core.Dial([name], 2.0)]
    its.tell(its.core.dialled, name, process, None)
    assert its.asked == [] and CLIENT not in its.core.view.entries
    its.silent.add(name)
    its.lose(A)
    assert any(name in told.members for told in its.asked) and its.core.awaited(its.core.view.version) == set()
    assert its.core.unready().keys() == {A}
    assert its.tell(its.core.broke, name, process, "connection closed") == []
    assert its.core.away().keys() == its.core.causes().keys() == {A}
    its.said(Fate.UNKNOWN, name)
    version, asked = its.core.view.version, len(its.asked)
    assert its.tell(its.core.dialled, name, process, "refused", ended=True) == [core.Forget([name]), core.Post()]
    assert (its.core.view.version, len(its.asked), its.core.clients) == (version, asked, {})


class Newcomers:
    """An attempt to admit members, as ``formation.Formation`` has it."""

    def __init__(self, its: Supervised, *names: str) -> None:
        self.participants: dict[str, Any] = dict.fromkeys(names)
        self.roster, self._probes = its.core.roster, probes_of(clusters.hosts_of(2, 8))

    @property
    def ranks(self) -> dict[str, int]:
        return {name: self.roster.records[name].member.rank for name in self.participants}

    def assign(self, roster: Roster, beside: Roster | None = None) -> None:
        self.roster = roster.admit(self.participants, {name: self._probes[name] for name in self.participants}, beside)

    def has_others(self, roster: Roster) -> bool:
        changed = (roster.records.keys() ^ self.roster.records.keys()) > self.participants.keys()
        self.roster = roster.with_members(self.roster, self.participants)
        return changed

    def prepare(self) -> dict[str, Prepared]:
        prepared = prepared_of(self.roster)
        return {name: prepared[name] for name in self.participants}


def test_processes_join_step_by_step(its: Supervised) -> None:
    new, other = "worker_8", "worker_9"
    first, second = (core.Admission("added", Newcomers(its, name)) for name in (new, other))
    for each in (first, second):
        its.tell(its.core.assign, each)
    assert (first.attempt.ranks, second.attempt.ranks) == ({new: 8}, {other: 9}) and len(its.core.roster.records) == 8
    its.tell(its.core.removed, [A])
    its.tell(its.core.announce, first, first.attempt.prepare())
    assert first.step is core.Step.ASSIGNED, "the members have changed: it prepares again"
    its.tell(its.core.announce, first, first.attempt.prepare())
    assert first.step is core.Step.ANNOUNCED and its.core.view.entries[8].state.absence is not None
    its.tell(its.core.connect, first)
    assert first.prepared.keys() == {*its.names, new} - {A} and first.away == {} and first.silent == set()
    done = its.tell(its.core.arrive, first)
    assert done == [core.Dial([new], 2.0), core.Post({new: None}), core.Report(core.Change("added", (new,)))]
    assert first.step is core.Step.JOINED and new in its.core.roster.records

    its.tell(its.core.announce, second, second.attempt.prepare())
    its.tell(its.core.announce, second, second.attempt.prepare())
    its.tell(its.core.give_up, second)
    assert 9 not in its.core.view.entries and other not in its.core.roster.records
    assert its.core.roster.next_rank == 10, "some member may know the rank"


class NewClient(Newcomers):
    """The same of a client, as ``formation.ClientFormation`` has it."""

    def assign(self, roster: Roster, beside: Roster | None = None) -> None:
        process = JoinedProcess("1@node/1", None)
        self.roster = roster.as_seen_by("client", process, self._probes[A], CLIENT)

    def follower(self, admission: core.Admission) -> Follower:
        """What its process knows once it has joined."""
        assert admission.prepared.keys() >= self.roster.records.keys() >= admission.away.keys()
        follower = Follower(CLIENT, self.roster, View([]), admission.version, admission.prepared)
        ranks = {name: self.roster.records[name].member.rank for name in admission.away}
        follower.absent = {rank: Absence(admission.away[name], False) for name, rank in ranks.items()}
        return follower

    def prepare(self) -> dict[str, Prepared]:
        return {"client": prepared_of(self.roster)["client"]}


@pytest.mark.parametrize("kind", ["added", "back"])
@pytest.mark.parametrize("arrives", ["before the client", "after it", "never", "it is removed"])
@pytest.mark.parametrize("changes", [False, True])
def test_a_client_joins_while_a_member_does(its: Supervised, kind: Any, arrives: str, changes: bool) -> None:
    name, rank = ("worker_8", 8) if kind == "added" else (A, 0)
    if kind == "back":
        its.lose(A)
        its.said(Fate.RESTARTED, A)
    other = Follower(1, its.core.roster, its.core.view)
    member, joining = core.Admission(kind, Newcomers(its, name)), NewClient(its, "client")
    client = core.Admission("client", joining)
    its.tell(its.core.assign, member)
    its.tell(its.core.announce, member, member.attempt.prepare())  # type: ignore[attr-defined]
    assert member.step is core.Step.ANNOUNCED
    if arrives == "it is removed" and kind == "back":
        its.tell(its.core.removed, [A])
    its.tell(its.core.assign, client)
    its.tell(its.core.announce, client, joining.prepare())
    follower = joining.follower(client)
    if changes:
        its.lose(C)

    def end() -> None:
        its.tell(its.core.connect, member)
        if arrives in ("never", "it is removed"):
            its.tell(its.core.give_up, member)
            its.tell(its.core.failed, {name: rank})
        else:
            its.tell(its.core.arrive, member)
            process = its.core.roster.records[name].process
            its.tell(its.core.dialled, name, process, None)

    if arrives == "before the client":
        end()
    its.tell(its.core.arrive, client)
    its.tell(its.core.dialled, "client", (CLIENT, 0), None)
    if arrives != "before the client":
        end()
    its.tell(its.core.tick)
    for told in its.asked:
        if "client" in told.members:
            follower.follow(told.delta)
        if B in told.members:
            other.follow(told.delta)
    assert other.reconnected == [name], "the member came once, and keeps its connections"
    assert follower.reconnected == [], "the client knows it from the beginning"
    other.check(its.core.view)
    assert follower.table.version == its.core.view.version
    expected = {its.peer.member for its in its.core.view.entries.values()}
    assert {member for rank, member in follower.table.members.items() if rank != CLIENT} == expected
    assert follower.absent.keys() == other.absent.keys()


def test_a_client_that_cannot_be_reached_for_a_while_stays_one(its: Supervised) -> None:
    """It does not learn that it is struck, and would have an old view for ever."""
    name, process = "client", (CLIENT, 0)
    first = its.core.view.entries[0].peer
    client = first._replace(member=replace(first.member, name=name, rank=CLIENT))
    its.tell(its.core.client_arrived, client, its.core.view.version)
    its.tell(its.core.dialled, name, process, None)
    its.tell(its.core.broke, name, process, "connection closed")
    for _ in range(2):
        assert [type(each) for each in its.tell(its.core.ray_said, {name: (Fate.UNKNOWN, "")})] == [core.Dial]
        assert its.tell(its.core.dialled, name, process, "no route to host", refused=True, after_s=10.0) == []
        its.now += 10.0
    its.lose(A)
    assert all(name not in told.members for told in its.asked)
    its.said(Fate.UNKNOWN, name)
    assert its.tell(its.core.dialled, name, process, None) == [] and its.core.clients.keys() == {name}
    assert its.asked[-1].members.keys() == {name} and its.asked[-1].delta.version == its.core.view.version
    its.tell(its.core.broke, name, process, "connection closed")
    its.now += 61.0
    assert its.said(Fate.UNKNOWN, name) == [core.Forget([name]), core.Post()], "after a minute it is given up"


def test_a_member_that_is_dead_leaves(its: Supervised) -> None:
    its.lose(A)
    done = its.said(Fate.DEAD, A, cause="killed.")
    assert done == [core.Forget([A]), core.Post(), core.Report(core.Change("dead", (A,), "its actor died: killed"))]
    assert its.core.unready() == {} and 0 not in its.core.view.entries
    assert its.tell(its.core.broke, A, original(A), "late") == its.said(Fate.ENDED, A) == []
    assert its.core.due() is None


def test_a_connection_that_broke_is_made_again(its: Supervised) -> None:
    its.tell(its.core.broke, A, original(A), "reset")
    assert its.said(Fate.SAME, A) == [core.Dial([A], 0.4)]
    assert its.said(Fate.SAME, A) == [], "a thread is at it"
    assert its.tell(its.core.dialled, A, original(A), None) == []
    assert its.core.unready() == {} and its.asked == []


@pytest.mark.parametrize(("announced", "longest"), [(False, 10.0), (True, 2.0)])
def test_a_process_that_is_slow_to_answer_is_given_more_time(its: Supervised, announced: bool, longest: float) -> None:
    """Each attempt connects anew, so that none would succeed if all were as short."""
    its.tell(its.core.broke, A, original(A), "reset")
    patience = []
    for attempt in range(8):
        (dial,) = its.said(Fate.SAME, A)
        assert isinstance(dial, core.Dial)
        patience.append(dial.patience_s)
        done = its.tell(its.core.dialled, A, original(A), "no answer", refused=announced and not attempt)
        assert bool(done) == (announced and not attempt), "one that is refused is away"
        its.now += 1
    assert patience[:2] == [0.4, 0.8] and patience[-2:] == [longest, longest]


def test_a_member_that_could_not_be_reached_replaces_its_connections_and_so_do_the_others(its: Supervised) -> None:
    its.tell(its.core.broke, A, original(A), "reset")
    its.said(Fate.SAME, A)
    assert reported(its.tell(its.core.dialled, A, original(A), "refused", refused=True)) == [("lost", (A,), "reset")]
    its.said(Fate.SAME, A)
    its.silent.add(A)
    its.now += 1
    its.said(Fate.SAME, A)
    assert its.tell(its.core.dialled, A, original(A), None) == []
    alone = its.asked[-1]
    assert set(alone.members) == {A} and alone.delta.reconnects
    new = elsewhere(its.group.prepared[A])
    its.silent.clear()
    done = its.tell(its.core.answered, {(A, original(A)): Answer(alone.delta.version, new)})
    assert done == [core.Report(core.Change("back", (A,)))]
    others = its.asked[-1]
    (entry,) = others.delta.entries
    assert set(others.members) == {*its.names}
    assert (entry.peer.prepared, entry.entered, entry.state.absence) == (new, others.delta.version, None)


def test_a_process_that_ended_while_it_could_not_be_reached_is_not_back(its: Supervised) -> None:
    its.silent.add(A)
    its.tell(its.core.broke, A, original(A), "reset")
    its.said(Fate.SAME, A)
    its.tell(its.core.dialled, A, original(A), "refused", refused=True)
    its.now += 1
    its.said(Fate.SAME, A)
    its.tell(its.core.dialled, A, original(A), None)
    version = its.asked[-1].delta.version
    assert reported(its.said(Fate.ENDED, A)) == [], "it is lost already"
    (state,) = its.asked[-1].delta.states
    assert state.absence is not None and state.absence.ended
    assert its.tell(its.core.answered, {(A, original(A)): Answer(version, None)}) == [] and A in its.core.unready()


# --- members that follow late ----------------------------------------------------------------------------------------


def test_a_change_is_reported_without_a_member_that_does_not_answer(its: Supervised) -> None:
    its.silent.add(B)
    its.tell(its.core.broke, A, original(A), "closed")
    assert reported(its.said(Fate.ENDED, A)) == []
    due = its.core.due()
    assert due is not None and due - its.now <= 0.2
    assert reported(its.tell(its.core.tick, after_s=0.2)) == [("lost", (A,), "closed")]
    assert its.core.unready() == {A: "closed", B: BEHIND}
    its.tell(its.core.broke, C, original(C), "closed")
    assert reported(its.said(Fate.ENDED, C)) == [("lost", (C,), "closed")], "no report waits for B any more"
    assert its.core.awaited(its.core.view.version) == {B}, "but a change does, and longer"
    its.tell(its.core.overdue, its.core.view.version)
    assert not its.core.awaited(its.core.view.version)
    first = its.asked[0].delta
    its.silent.clear()
    its.tell(its.core.answered, {(B, original(B)): Answer(first.version, None)})
    assert its.asked[-1].delta.base == first.version and set(its.asked[-1].members) == {B}
    assert B not in its.core.unready()


def test_a_member_is_asked_again_after_it_failed_or_was_silent_for_long(its: Supervised) -> None:
    its.silent |= {B, C}
    its.lose(A)
    its.tell(its.core.answered, {(B, original(B)): None})
    assert its.core.unready()[B] == BEHIND
    for after_s, name in ((0.5, B), (10.0, C)):
        number = len(its.asked)
        its.said(Fate.ENDED, A)
        assert len(its.asked) == number
        its.tell(its.core.tick, after_s=after_s)
        its.tell(its.core.tick)
        assert any(name in asked.members for asked in its.asked[number:])


def test_a_member_that_is_further_behind_than_thought_gets_what_it_misses(its: Supervised) -> None:
    its.lose(A)
    its.silent.add(B)
    its.lose(C)
    its.silent.clear()
    its.tell(its.core.answered, {(B, original(B)): Answer(1, None)})
    assert its.asked[-1].delta.base == 1 and len(its.asked[-1].delta.states) == 2


def test_the_others_learn_where_a_member_listens_now(its: Supervised) -> None:
    its.silent.add(B)
    its.lose(A)
    new = elsewhere(its.group.prepared[B])
    its.silent.clear()
    its.tell(its.core.answered, {(B, original(B)): Answer(its.asked[-1].delta.version, new)})
    assert any(its.core.view.version == asked.delta.version for asked in its.asked)
    (entry,) = its.asked[-1].delta.entries
    assert entry.peer.prepared == new and entry.entered == 1


def test_members_that_answer_before_others_join_tell_only_those(its: Supervised) -> None:
    its.silent |= {*its.names}
    its.tell(its.core.coming, its.group.restarted(A))
    version = its.core.view.version
    new = elsewhere(its.group.prepared[B])
    its.tell(its.core.answered, {(B, original(B)): Answer(version, new)})
    assert its.core.view.version == version and its.core.view.entries[1].peer.prepared == new


# --- arrivals --------------------------------------------------------------------------------------------------------


def test_members_that_are_back_together_come_together(its: Supervised) -> None:
    its.lose(A, B)
    assert its.said(Fate.RESTARTED, A, B) == [core.Admit({A: 0, B: 1}, 2.0)]
    its.tell(its.core.coming, peers := its.group.restarted(A, B))
    assert not its.core.awaited(its.core.view.version) and len(its.asked[-1].delta.entries) == 2
    done = its.arrive("back", peers, its.core.promised)
    assert done == [core.Dial([A, B], 2.0), core.Report(core.Change("back", (A, B)))]
    assert its.core.unready() == {} and set(its.asked[-1].members) == {*its.names} - {A, B}
    assert its.tell(its.core.broke, A, original(A), "late") == [] and its.core.unready() == {}, "of its former process"
    its.tell(its.core.dialled, A, (0, 1), "no answer")
    assert its.core.unready() == {A: "no answer"}, "it is watched from the beginning"


def test_one_that_failed_comes_later_and_holds_up_nobody(its: Supervised) -> None:
    its.lose(A, B, C)
    assert its.said(Fate.RESTARTED, A, B, C) == [core.Admit({A: 0, B: 1, C: 2}, 2.0)]
    its.tell(its.core.coming, peers := its.group.restarted(B, C))
    its.arrive("back", peers, its.core.promised)
    assert its.tell(its.core.failed, {A: 0}, [A]) == []
    assert its.core.due() == pytest.approx(its.now + 0.1)
    its.lose(B)
    assert its.said(Fate.RESTARTED, A, B) == [core.Admit({B: 1}, 2.0), core.Admit({A: 0}, 4.0)]
    its.admit(B)
    assert its.said(Fate.RESTARTED, A) == [], "it is being admitted"
    its.tell(its.core.failed, {A: 0})
    assert its.said(Fate.RESTARTED, A) == [core.Admit({A: 0}, 4.0)]


def test_changes_go_on_while_one_is_being_admitted(its: Supervised) -> None:
    its.lose(A)
    its.said(Fate.RESTARTED, A)
    (peer,) = its.group.restarted(A)
    its.tell(its.core.coming, [peer])
    promised = its.core.promised
    follower = Follower(0, its.group.roster, its.core.view, promised)
    its.lose(B, C)
    assert its.said(Fate.RESTARTED, C) == [], "it would come with those that come now"
    its.tell(its.core.removed, ["worker_3"])
    its.arrive("back", [peer], promised)
    its.tell(its.core.dialled, A, (0, 1), None)
    (told,) = [asked for asked in its.asked if A in asked.members and asked.delta.base == promised]
    follower.follow(told.delta)
    assert {*follower.absent} == {1, 2} and "worker_3" not in follower.table.peers
    assert its.said(Fate.RESTARTED, C) == [core.Admit({C: 2}, 2.0)]


@pytest.mark.parametrize("kind", ["back", "added"])
def test_an_attempt_that_failed_is_undone(its: Supervised, kind: str) -> None:
    name = A if kind == "back" else "worker_8"
    if kind == "back":
        its.lose(A)
        its.said(Fate.RESTARTED, A)
    else:
        its.group.cluster[name] = its.group.cluster[A].changed({"name": name})
    member = its.group.follower(1)
    (peer,) = its.group.restarted(name)
    its.tell(its.core.coming, [peer])
    its.tell(its.core.failed, {name: peer.member.rank}, [name])
    for told in its.asked:
        member.follow(told.delta)
    if kind == "back":
        absence = member.absent[0]
        assert absence.ended and absence.cause == "connection closed" and member.seen[0] == 1
    else:
        assert member.absent == {} and name not in member.table.peers
    assert reported(its.tell(its.core.removed, [B])) == [("removed", (B,), "")]


def test_a_member_that_a_user_removes_is_heard_of_no_more(its: Supervised) -> None:
    assert its.tell(its.core.removed, [A, B]) == [
        core.Forget([A, B]),
        core.Post(),
        core.Report(core.Change("removed", (A, B))),
    ]
    assert its.tell(its.core.broke, A, original(A), "closed") == [] and its.core.unready() == {}
    assert set(its.asked[-1].members) == {*its.names} - {A, B}


def test_a_name_that_died_while_it_was_removed_counts_when_it_comes_again(its: Supervised) -> None:
    its.lose(A)
    its.tell(its.core.parting, [A, B])
    its.said(Fate.DEAD, A)
    its.group.roster = its.group.roster.without([A])
    assert reported(its.tell(its.core.removed, [B])) == [("removed", (B,), "")]
    its.admit(A)
    its.tell(its.core.broke, A, its.group.roster.records[A].process, "connection closed")
    assert its.tell(its.core.tick) == [core.AskRay([A], [])]


def test_late_reports_of_a_removed_member_do_not_concern_the_next_of_its_name(its: Supervised) -> None:
    its.lose(A)
    its.said(Fate.RESTARTED, A)
    its.tell(its.core.coming, its.group.restarted(A))  # an attempt to admit it goes on
    its.tell(its.core.removed, [A, B])
    its.group.roster = its.group.roster.without([A, B])
    its.silent = {A, B}
    peers = its.group.restarted(A, B)
    assert [peer.member.incarnation for peer in peers] == [0, 0]
    its.tell(its.core.coming, peers)
    its.tell(its.core.failed, {A: 0}, [A])
    its.arrive("added", peers, its.core.promised)
    for name in (A, B):
        its.tell(its.core.dialled, name, its.group.roster.records[name].process, None)
    its.tell(its.core.removed, [C])
    behind = its.core.unready()
    assert set(behind) == {A, B} < set(its.asked[-1].members)
    its.tell(its.core.broke, B, original(B), "closed")
    its.tell(its.core.dialled, B, original(B), "no answer", ended=True)
    its.tell(its.core.answered, {(B, original(B)): Answer(its.core.view.version, None)})
    assert its.core.unready() == behind and its.core.lost == {}
    its.tell(its.core.broke, A, its.group.roster.records[A].process, "closed")
    assert its.said(Fate.ENDED, A) and its.said(Fate.RESTARTED, A)
    its.tell(its.core.failed, {A: 0})
    assert its.said(Fate.RESTARTED, A) == [], "another attempt to admit it goes on"


# --- whatever happens, in any order ----------------------------------------------------------------------------------


class World:
    """Members and their actors, in simulated time. Answers are lost or late, processes end, hang and cannot be reached,
    members are removed and added, and attempts to admit them fail.
    """

    def __init__(self, seed: int) -> None:
        self.chance, self.group = random.Random(seed), Group(1)
        self.core = Core(self.group.roster, self.group.prepared)
        self.now, self._later, self._numbers = 0.0, list[Any](), itertools.count()
        self.troubled = True
        self.processes = {name: self.group.follower(rank) for rank, name in enumerate(self.group.roster.records)}
        """Of members, if they live."""
        self.unreachable, self.restarted, self.joining = set[str](), set[str](), set[str]()
        self.changes: list[core.Change] = []
        for name in self.processes:
            self.tell(self.core.dialled, name, original(name), None)

    def later(self, seconds: float, work: Callable[[], object]) -> None:
        heapq.heappush(self._later, (self.now + seconds, next(self._numbers), work))

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        until = self.now + seconds
        while True:
            due = self.core.due()
            times = [when for when in (due, self._later[0][0] if self._later else None) if when is not None]
            if not times or min(times) > until:
                self.now = until
                return
            self.now = max(self.now, min(times))
            if self._later and self._later[0][0] <= self.now:
                heapq.heappop(self._later)[2]()
            else:
                self.tell(self.core.tick)

    def often(self, probability: float) -> bool:
        return self.troubled and self.chance.random() < probability

    def process(self, name: str) -> core.ProcessId:
        return self.group.roster.records[name].process

    def tell(self, event: Callable[..., None], *about: Any, **more: Any) -> None:
        for its in self.core.handle([partial(event, *about, **more)], self.now):
            match its:
                case core.Announce():
                    for name, process in its.members.items():
                        self.later(self.chance.random() / 10, partial(self.deliver, its, name, process))
                case core.AskRay():
                    self.tell(self.core.ray_said, {name: (self.fate(name), "") for name in its.names})
                case core.Dial():
                    for name in its.names:
                        self.later(self.chance.random() / 10, partial(self.dial, name, self.process(name)))
                case core.Post():
                    left = self.core.view.entries
                    gone = [name for name, its in self.group.roster.records.items() if its.member.rank not in left]
                    self.group.roster = self.group.roster.without(gone)
                case core.Admit():
                    self.admit("back", [*its.ranks])
                case core.Report():
                    self.changes.append(its.change)

    def reaches(self, name: str, process: core.ProcessId) -> bool:
        return name in self.processes and name not in self.unreachable and self.process(name) == process

    def deliver(self, its: core.Announce, name: str, process: core.ProcessId) -> None:
        answer = None
        if self.often(0.1):  # it hangs, or its network is slow
            self.later(self.chance.random() * 20, partial(self.deliver, its, name, process))
            return
        if self.reaches(name, process) and not self.often(0.1):
            answer = self.processes[name].follow(its.delta)
        if not self.often(0.1):  # it is never heard of
            answer = None if self.often(0.1) else answer
            self.tell(self.core.answered, {(name, process): answer})

    def dial(self, name: str, process: core.ProcessId) -> None:
        known = name in self.group.roster.records and self.reaches(name, process)
        refused = name in self.unreachable and self.chance.random() < 0.5
        error = None if known and not self.often(0.1) else "no answer"
        self.tell(self.core.dialled, name, process, error, refused=refused)

    def fate(self, name: str) -> Fate:
        if name in self.processes:
            return Fate.SAME
        if name not in self.restarted and len(self.processes) > 3 and self.often(0.05):
            return Fate.DEAD
        if self.often(0.5):
            return Fate.ENDED
        self.restarted.add(name)
        return Fate.RESTARTED

    def admit(self, kind: Any, names: Sequence[str]) -> None:
        """Several attempts may go on at once, and all else meanwhile."""
        before = self.group.roster
        peers = self.group.restarted(*names)
        ranks = {peer.member.name: peer.member.rank for peer in peers}
        attempt, self.group.roster = self.group.roster, before.after_failure(self.group.roster, names)
        arriving = {peer.member.name: peer for peer in peers if not self.often(0.1)}
        if kind == "added":
            self.joining |= {*names}
        if not arriving:
            self.fail(kind, ranks)
            return
        listened = self.listening()
        self.tell(self.core.coming, [*arriving.values()])
        promised, followers = self.core.promised, dict[str, Follower]()

        def connect() -> None:
            self.tell(self.core.connecting, [ranks[name] for name in arriving])
            listening = {**listened, **self.listening()}
            members = before.with_members(attempt, arriving)
            for name, peer in arriving.items():
                its = followers[name] = Follower(peer.member.rank, members, self.core.view, promised, listening)
                for other in arriving.values():
                    its.absent.pop(other.member.rank, None)  # they connect to each other

        def finish() -> None:
            now = {name: its.member.rank for name, its in self.group.roster.records.items()}
            away = kind == "back" and any(now.get(name) != ranks[name] for name in arriving)
            if away or self.often(0.2):
                self.fail(kind, ranks)
                return
            self.group.roster = self.group.roster.with_members(attempt, arriving)
            self.processes.update(followers)
            self.unreachable.difference_update(arriving)
            self.restarted.difference_update(arriving)
            self.tell(self.core.arrived, kind, [ranks[name] for name in arriving], promised)
            self.fail(kind, {name: rank for name, rank in ranks.items() if name not in arriving})

        begin_s = self.chance.random() * 3
        self.later(begin_s, connect)
        self.later(begin_s + self.chance.random() * 3, finish)

    def listening(self) -> dict[str, Prepared]:
        return {its.peer.member.name: its.peer.prepared for its in self.core.view.entries.values()}

    def fail(self, kind: str, ranks: Mapping[str, int]) -> None:
        if kind == "added":
            self.joining.clear()
        self.tell(self.core.failed, ranks, [*ranks])

    def trouble(self) -> None:
        """Something goes wrong with a member, or a user changes the group."""
        name = self.chance.choice([*self.group.roster.records])
        if name not in self.processes:
            return
        match self.chance.randrange(6):
            case 0 | 1:
                del self.processes[name]
                self.unreachable.discard(name)
                self.tell(self.core.broke, name, self.process(name), "closed")
            case 2:
                self.unreachable.add(name)
                self.tell(self.core.broke, name, self.process(name), "reset")
            case 3:
                self.unreachable.clear()
            case 4 if len(self.processes) > 3:
                del self.processes[name]
                self.tell(self.core.removed, [name])
            case 5:
                missing = [name for name in self.group.cluster if name not in self.group.roster.records]
                if missing and not self.joining:
                    self.admit("added", missing[:1])


@pytest.mark.parametrize("seed", range(30))
def test_all_members_end_up_with_the_view_whatever_happens(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.trouble()
        world.run(world.chance.choice([0.01, 0.3, 3.0]))
    world.troubled = False
    world.unreachable.clear()
    world.run(120)
    assert world.core.unready() == {}
    assert {*world.processes} == {*world.group.roster.records}
    for process in world.processes.values():
        process.check(world.core.view)
        assert process.absent == {}
    assert len(world.core.view.departed) <= 1
    lost = [change.members[0] for change in world.changes if change.kind == "lost"]
    assert lost, "nothing happened"
    for name in world.group.cluster:
        kinds = [change.kind for change in world.changes if name in change.members]
        assert all(a != b for a, b in itertools.pairwise(kinds)), "each change is reported once"


def test_members_that_all_miss_a_change_follow_while_more_changes_go_on() -> None:
    """On a busy machine each is late for each: what it has acknowledged stays so, and it gets the rest at once."""
    group = Group(32)
    supervised, now, rounds = Core(group.roster, group.prepared), 0.0, 0
    members = {name: group.follower(rank) for rank, name in enumerate(group.roster.records)}
    for name in members:
        supervised.handle([partial(supervised.dialled, name, original(name), None)], now)
    lost = [f"worker_{rank}" for rank in range(26)]
    asked = list[core.Instruction]()
    for name in lost:  # one after another, each before anybody has answered the one before
        supervised.handle([partial(supervised.broke, name, original(name), "closed")], now)
        asked += supervised.handle([partial(supervised.ray_said, {name: (Fate.ENDED, "")})], now)
        now += 5.0
        asked += supervised.handle([supervised.tick], now)
    while announced := [its for its in asked if isinstance(its, core.Announce)]:
        rounds += 1
        answers = {key: members[key[0]].follow(its.delta) for its in announced for key in its.members.items()}
        asked = supervised.handle([partial(supervised.answered, answers)], now)
    assert rounds <= 2 and {*supervised.unready()} == {*lost}
    assert all(len(members[name].absent) == 26 for name in members if name not in lost)
