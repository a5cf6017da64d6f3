"""A process in several groups: which of them an operation means."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.member import awaiting, current, membership, process_member, reaching, set_locals
from raytorchrpc.calls.peers import Member, PeerRoute, PeerTable
from raytorchrpc.calls.scope import Scope, current_scope
from raytorchrpc.calls.server.services import Services

SHARED, OTHER = "aa" * 16, "bb" * 16
"""Hex ids of actors: of one in both groups, and of one in the second."""
HANDLE = SimpleNamespace(_actor_id=ray_internals.key_of_actor(SHARED))
ONLY_IN_TQ = SimpleNamespace(_actor_id=ray_internals.key_of_actor(OTHER))


def group_of(name: str, generation: str, *members: tuple[str, str | None]) -> Any:
    peers, unused = PeerTable(name, Services()), Any
    for rank, (member, actor_id) in enumerate(members):
        peers.add_peer(PeerRoute(Member(rank, member, actor_id, "", 0, "", rank, group=name), unused, unused))
    me = Member(0, members[0][0], None, "", 0, "", 0, group=name)
    return SimpleNamespace(group=name, generation=generation, peers=peers, me=me)


@pytest.fixture
def both() -> Iterator[tuple[Any, Any]]:
    mine = group_of("mine", "g1", ("a", None), ("learner", SHARED), ("unique", None))
    tq = group_of("tq", "g2", ("a", None), ("learner", SHARED), ("unit", OTHER), ("fourth", None))
    set_locals(mine, tq)
    yield mine, tq
    set_locals()


CASES: list[tuple[Any, str | None, str, str | None]] = [
    # target, group=, the generation of the served call's group; what is meant, or why it is not clear
    (HANDLE, None, "", "mine"),
    (HANDLE, None, "g2", "tq"),
    (HANDLE, "tq", "g1", "tq"),
    (ONLY_IN_TQ, None, "", "tq"),
    (ONLY_IN_TQ, None, "g1", "tq"),
    (ONLY_IN_TQ, "mine", "", None),
    (Member(1, "learner", SHARED, "", 0, "", 1, group="tq"), None, "g1", "tq"),
    (Member(1, "learner", SHARED, "", 0, "", 1, group="elsewhere"), None, "", None),
    ("unit", None, "", "tq"),
    ("unique", None, "g2", "mine"),
    ("learner", None, "", "'learner' is a member of groups 'mine' and 'tq': say which, group='mine', or pass"),
    ("learner", None, "g2", "tq"),
    ("learner", "g1", "g2", "mine"),
    (1, None, "", "1 is a rank in each of groups 'mine' and 'tq': say which, group='mine'"),
    ("1", None, "", "'1' is a rank in each of groups 'mine' and 'tq'"),
    (3, None, "", "3 is a rank in each of groups"),
    (1, None, "g2", "tq"),
    (1, "mine", "g2", "mine"),
    ("nobody", None, "", None),
    (7, None, "g1", None),
]


@pytest.mark.parametrize(("target", "group", "served", "meant"), CASES)
def test_a_target_means_one_group_or_the_error_says_which_it_may_be(
    both: tuple[Any, Any], target: Any, group: str | None, served: str, meant: str | None
) -> None:
    before = current_scope.set(Scope(group=served))
    try:
        if meant is not None and " " in meant:
            with pytest.raises(rtr.ConfigurationError) as raised:
                reaching(target, group)
            assert meant in str(raised.value)
        else:
            local = reaching(target, group)
            assert (None if local is None else local.group) == meant
    finally:
        current_scope.reset(before)


def test_what_names_no_target_means_the_group_that_is_served_or_the_only_one(both: tuple[Any, Any]) -> None:
    mine, tq = both
    with pytest.raises(rtr.ConfigurationError, match="this process is in groups 'mine' and 'tq': say which, group="):
        membership()
    before = current_scope.set(Scope(group="g2"))
    try:
        assert membership() is tq and membership("mine") is mine and rtr.current_member(group="mine") == mine.me
    finally:
        current_scope.reset(before)
    with pytest.raises(rtr.NotAMember, match="in no group 'other'; it is in groups 'mine' and 'tq'"):
        process_member(group="other")
    set_locals(tq)
    assert membership() is current.local is tq


def test_a_target_that_no_group_has_is_looked_for_in_all(both: tuple[Any, Any]) -> None:
    with pytest.raises(rtr.NotAMember, match="'nobody' is in none of this process's groups 'mine' and 'tq'"):
        awaiting("nobody", 0.1)
    with pytest.raises(rtr.NotAMember, match="in no group 'other'"):
        awaiting("nobody", 0.1, "other")
    assert awaiting("nobody", 0.1, "tq") is both[1], "its own error names the members"


def test_calls_look_at_one_group_alone_only_where_the_process_uses_no_other(both: tuple[Any, Any]) -> None:
    assert current.local is None
    set_locals(both[0])
    assert current.local is both[0]
    current.change(clients=["g3"])
    try:
        assert current.local is None and reaching("unique") is both[0]
    finally:
        current.change(clients=[])
    current.change(clients=["g1"])  # a driver that has formed the group and is a member
    assert current.local is both[0]
    current.change(clients=[])
