"""A process in several groups: which of them an operation means."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray import ActorID

import raytorchrpc as rtr
from tests.unit.members import Groups

SHARED, OTHER, HIDDEN = "aa" * 16, "bb" * 16, "cc" * 16
"""Hex ids of actors: of one in both groups of the program, of one in the second, and of one in a library's."""
HANDLE, ONLY_IN_TQ, ONLY_IN_LIBRARY = (
    SimpleNamespace(_actor_id=ActorID.from_hex(each)) for each in (SHARED, OTHER, HIDDEN)
)


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups(
        mine={"a": None, "learner": SHARED, "unique": None},
        tq={"a": None, "learner": SHARED, "unit": OTHER, "fourth": None},
        _library={"a": None, "learner": None, "hidden": HIDDEN, "b": None, "c": None},
    )
    yield made
    made.use()


def learner(group: str) -> rtr.Member:
    return rtr.Member(1, "learner", SHARED, "", 0, "", 1, group=group)


CASES: list[tuple[Any, str | None, str, str | None]] = [
    # target, group=, the group of the served call; what is meant, or why it is not clear
    (HANDLE, None, "", "mine"),
    (HANDLE, None, "tq", "tq"),
    (HANDLE, "tq", "mine", "tq"),
    (ONLY_IN_TQ, None, "", "tq"),
    (ONLY_IN_TQ, None, "mine", "tq"),
    (ONLY_IN_TQ, "mine", "", None),
    (learner("tq"), None, "mine", "tq"),
    (learner("elsewhere"), None, "", None),
    ("unit", None, "", "tq"),
    ("unique", None, "tq", "mine"),
    ("learner", None, "", "'learner' is a member of groups 'mine' and 'tq': say which, group='mine', or pass"),
    ("learner", None, "tq", "tq"),
    ("learner", "mine", "tq", "mine"),
    (1, None, "", "1 is a rank in each of groups 'mine' and 'tq': say which, group='mine'"),
    ("1", None, "", "'1' is a rank in each of groups 'mine' and 'tq'"),
    (3, None, "", "3 is a rank in each of groups"),
    (1, None, "tq", "tq"),
    (1, "mine", "tq", "mine"),
    ("nobody", None, "", None),
    (7, None, "mine", None),
    (ONLY_IN_LIBRARY, None, "", "_library"),
    ("hidden", None, "", "_library"),
    ("unique", None, "_library", "mine"),
    ("learner", None, "_library", "_library"),
    (4, None, "", None),
    (4, None, "_library", "_library"),
    (4, "_library", "", "_library"),
]


@pytest.mark.parametrize(("target", "group", "served", "meant"), CASES)
def test_a_target_means_one_group_or_the_error_says_which_it_may_be(
    groups: Groups, target: Any, group: str | None, served: str, meant: str | None
) -> None:
    with groups.serving(served):
        if meant is not None and " " in meant:
            with pytest.raises(rtr.ConfigurationError) as raised:
                groups.member.reaching(target, group)
            assert meant in str(raised.value)
        else:
            local = groups.member.reaching(target, group)
            assert (None if local is None else local.group) == meant


def test_what_names_no_target_means_the_group_that_is_served_or_the_only_one(groups: Groups) -> None:
    with pytest.raises(rtr.ConfigurationError, match="this process is in groups 'mine' and 'tq': say which, group="):
        rtr.current_member()
    with groups.serving("tq"):
        assert rtr.current_member().group == "tq" and rtr.current_member(group="mine").group == "mine"
    with pytest.raises(rtr.NotAMember, match="in no group 'other'; it is in groups 'mine', 'tq' and '_library'"):
        rtr.current_member(group="other")
    groups.use("tq")
    assert rtr.current_member().group == "tq"


def test_a_target_that_no_group_has_is_looked_for_in_all(groups: Groups) -> None:
    awaiting = groups.member.awaiting
    with pytest.raises(rtr.NotAMember, match="'nobody' is in none of this process's groups 'mine' and 'tq'"):
        awaiting("nobody", 0.1)
    with pytest.raises(rtr.NotAMember, match="in no group 'other'"):
        awaiting("nobody", 0.1, "other")
    assert awaiting("nobody", 0.1, "tq") is groups.locals["tq"], "its own error names the members"


def test_calls_look_at_one_group_alone_only_where_the_process_uses_no_other(groups: Groups) -> None:
    mine, current = groups.locals["mine"], groups.member.current
    assert current.local is None
    groups.use("mine")
    assert current.local is mine
    groups.use("mine", clients=["another"])
    assert current.local is None and groups.member.reaching("unique") is mine
    groups.use("mine", clients=["mine"])  # a driver that has formed the group and is a member
    assert current.local is mine
