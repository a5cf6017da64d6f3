"""A group's view, and members that follow it by deltas: in any state they end up with the group as it is."""

from __future__ import annotations

import pickle
import random
import time
from dataclasses import replace

import pytest

from raytorchrpc.group.view import JOINING, Absence, Delta, Table
from tests.unit.clusters import slope
from tests.unit.group.followers import Group, elsewhere


def test_a_delta_that_comes_twice_or_late_changes_nothing() -> None:
    group, was = Group(1), 1
    member = group.follower()
    group.back("worker_3")
    first = group.view.since(was)
    group.view.mark(group.away("worker_3", cause="killed again"))
    member.follow(group.view.since(was))
    assert member.follow(first).version == group.view.version
    member.follow(group.view.since(was))
    member.check(group.view)
    assert member.reconnected == ["worker_3"]


def test_a_member_that_misses_the_base_of_a_delta_says_which_version_it_has() -> None:
    group = Group(1)
    member = group.follower()
    group.back("worker_3")
    later = group.view.version
    group.view.mark(group.away("worker_4"))
    assert member.follow(group.view.since(later)).version == 1
    assert member.reconnected == [] and member.absent == {}


def test_a_member_that_was_unreachable_replaces_all_connections() -> None:
    group = Group(1)
    member = group.follower()
    group.view.mark(group.away("worker_0", "worker_3"))
    group.view.remove({4: None})
    group.view.admit(group.restarted("worker_5"))
    member.follow(group.view.since(1, reconnects=True))
    member.check(group.view)
    assert member.reconnected == [f"worker_{rank}" for rank in (1, 2, 3, 5, 6, 7)]
    group.view.mark({3: None})
    member.follow(group.view.since(group.view.version - 1))
    assert len(member.reconnected) == 6


def test_departures_are_kept_for_those_that_have_not_followed_them() -> None:
    group = Group(1)
    behind, current = group.follower(), group.follower(1)
    group.view.remove({6: None})
    group.view.forget(behind.table.version)
    assert group.view.since(1).departed, "a member has not followed yet"
    current.follow(group.view.since(1))
    group.view.forget(group.view.version)
    assert not group.view.departed
    everything = group.view.since(1)
    assert everything.base == 0
    behind.follow(everything)
    behind.check(group.view)
    assert behind.reconnected == []
    group.view.mark(group.away("worker_3"))
    assert group.view.since(2).base == 2, "who has followed gets no more than the change"


@pytest.mark.parametrize("seed", range(20))
def test_members_that_follow_now_and_then_end_up_alike(seed: int) -> None:
    chance, group = random.Random(seed), Group(1)
    members = [group.follower(rank) for rank in (0, 1)]
    versions = [1]
    for _ in range(60):
        name = f"worker_{chance.randrange(2, 8)}"
        if name not in group.roster.records:
            group.view.admit(group.restarted(name), chance.choice([JOINING, None]))
        else:
            rank = group.rank(name)
            match chance.randrange(6):
                case 0:
                    group.view.mark(group.away(name, cause=str(chance.random())))
                case 1:
                    group.view.admit(group.restarted(name), JOINING)
                case 2:
                    group.view.mark({rank: None})
                case 3:
                    group.view.describe({rank: elsewhere(group.prepared[name])})
                case 4:
                    group.view.remove({rank: chance.choice([None, Absence("died", True, True)])})
                    group.roster = group.roster.without([name])
                case 5:
                    group.view.admit([group.view.entries[rank].peer])  # it was unreachable
        versions.append(group.view.version)
        for member in members:
            if chance.random() < 0.3:
                base = chance.choice([member.table.version, chance.choice(versions)])
                member.follow(group.view.since(base, reconnects=chance.random() < 0.1))
        if chance.random() < 0.2:
            group.view.forget(min(member.table.version for member in members))
    for member in members:
        member.follow(group.view.since(member.table.version))
        member.check(group.view)


# --- what a change costs ---------------------------------------------------------------------------------------------


def following(table: Table, rank: int, delta: Delta) -> float:
    """Seconds of this thread's to follow one delta."""
    began = time.thread_time()
    difference = table.difference(delta, rank)
    assert difference is not None
    table.update(difference)
    table.version = delta.version
    return time.thread_time() - began


def test_a_return_costs_each_member_the_same_in_a_group_of_any_size() -> None:
    times, sizes = {}, {}
    for hosts in (4, 16, 64):
        group = Group(hosts)
        member = group.follower()
        taken = []
        for rank in range(1, 31):
            group.view.mark(group.away(f"worker_{rank}"))
            peer = group.view.entries[rank].peer
            group.view.admit([peer._replace(member=replace(peer.member, incarnation=1))])
            sent = pickle.dumps(group.view.since(member.table.version))
            taken.append(following(member.table, 0, pickle.loads(sent)))
        times[8 * hosts], sizes[8 * hosts] = min(taken), len(sent)
        assert [its.incarnation for its in member.table.info.members[:32]] == [0, *[1] * 30, 0]
    assert slope(times) < 0.5, times  # microseconds: a larger group has more cache misses; work for each would give 1
    assert slope(sizes) < 0.05, sizes
