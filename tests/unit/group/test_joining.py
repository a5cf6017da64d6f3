"""A process that is no member joins groups as a client when it first uses them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.clients import OwnGroups
from raytorchrpc.calls.peers import Member, by_key, find
from raytorchrpc.group import join, joining
from raytorchrpc.process import fork


class Local:
    """Stands for this process as a client."""

    def __init__(self, group: str, members: tuple[Member, ...]) -> None:
        self.group, self.peers = group, SimpleNamespace(members=members)
        self.peers.member = lambda target: find(target, by_key(members), str)

    def leave(self) -> None:
        pass


class Host:
    """Stands for the supervisor of a group, which admits clients unless an error is set."""

    def __init__(self, name: str, *members: str) -> None:
        made = (Member(rank, each, None, "", 0, "", 0) for rank, each in enumerate(members))
        self.last_info: Any = SimpleNamespace(name=name, members=tuple(made))
        self.error: Exception | None = None
        self.ended: bool | Exception = False
        self.during: Any = lambda: None
        self.asked = 0

    def has_ended(self) -> bool:
        if isinstance(self.ended, Exception):
            raise self.ended
        return self.ended

    def admit_client(self, request: Any) -> None:
        self.asked += 1
        self.during()
        if self.error is not None:
            raise self.error
        its: Any = SimpleNamespace(local=Local(self.last_info.name, self.last_info.members))
        join._clients[self.last_info.name] = its


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnGroups]:
    monkeypatch.setattr(ray_internals, "session_check", lambda: lambda: True)
    monkeypatch.setattr(joining, "become_client", lambda admit, generation: admit(None))
    monkeypatch.setattr(joining.Client, "_watch", lambda self, local, member, timeout_s: None)
    monkeypatch.setattr(join, "_clients", {})
    yield OwnGroups()
    gc.collect()  # no client is left that a later fork finds


def add(groups: OwnGroups, *hosts: Host) -> None:
    for host in hosts:
        groups.add(host.last_info.name, joining.Client(host, host.last_info.name))


def group_of(groups: OwnGroups, home: Any) -> str:
    found = groups.find(home)
    assert found is not None
    name: str = found[0].group
    return name


@pytest.mark.parametrize("ended", [False, ConnectionError("Ray does not answer")])
def test_a_group_that_cannot_be_joined_now_is_joined_by_a_later_call(groups: OwnGroups, ended: Any) -> None:
    host = Host("g", "a")
    add(groups, host)
    host.error, host.ended = rtr.BootstrapError("busy with another change"), ended
    for use in (lambda: groups.find("a"), groups.everywhere):
        with pytest.raises(rtr.BootstrapError, match=r"cannot join group 'g' now.* busy with another change"):
            use()
    host.error = None
    assert group_of(groups, "a") == group_of(groups, 0) == "g"
    assert host.asked == 3


def test_a_group_that_has_ended_is_forgotten(groups: OwnGroups) -> None:
    host = Host("g", "a")
    add(groups, host)
    host.error, host.ended = rtr.BootstrapError("was shut down"), True
    with pytest.raises(rtr.NotAMember, match="group 'g', which it used, has ended"):
        groups.find("a")
    assert groups.find("a") is None


def test_a_client_that_the_group_sent_off_joins_again(groups: OwnGroups) -> None:
    host = Host("g", "a")
    add(groups, host)
    assert group_of(groups, "a") == group_of(groups, "a") == "g" and host.asked == 1
    join.leave_client("g")
    assert group_of(groups, "a") == "g" and host.asked == 2


def test_a_call_joins_no_other_group_than_that_of_its_target(groups: OwnGroups) -> None:
    broken, whole = Host("broken", "a"), Host("whole", "b")
    broken.error = rtr.ConfigurationError("not here")
    add(groups, broken, whole)
    assert group_of(groups, "b") == "whole" and broken.asked == 0
    with pytest.raises(rtr.ConfigurationError, match="not here"):
        groups.find("a")
    locals_, failed = groups.everywhere()
    assert [local.group for local in locals_] == ["whole"] and [str(error) for error in failed] == ["not here"]


def test_a_target_that_no_group_is_known_to_have_may_be_new(groups: OwnGroups) -> None:
    """In a detached group, which this process knows as it was."""
    first, second = Host("first", "a"), Host("second", "b")
    add(groups, first, second)

    def grow() -> None:
        second.last_info = SimpleNamespace(name="second", members=(*Host("", "b", "c").last_info.members,))

    second.during = grow
    first.error = rtr.BootstrapError("silent")
    assert group_of(groups, "c") == "second"
    with pytest.raises(rtr.BootstrapError, match="silent"):
        groups.find("d")
    first.error = None
    with pytest.raises(rtr.NotAMember, match="has a member 'd': group 'first' has a; group 'second' has b, c"):
        groups.find("d")
    with pytest.raises(rtr.ConfigurationError, match="groups 'first' and 'second' have a member 0"):
        groups.find(0)


def test_a_signal_handler_that_calls_during_the_first_use_is_refused(groups: OwnGroups) -> None:
    host, refused = Host("g", "a"), []

    def interrupt() -> None:
        try:
            groups.find("a")
        except rtr.RayTorchRpcError as error:
            refused.append(str(error))

    host.during = interrupt
    add(groups, host)
    assert group_of(groups, "a") == "g" and host.asked == 1
    assert len(refused) == 1 and "interrupted on this thread" in refused[0]


def test_a_child_forked_before_the_first_use_is_refused(groups: OwnGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    client = joining.Client(Host("g", "a"), "g")
    monkeypatch.setattr(fork, "_origin", None)
    client.after_fork()
    with pytest.raises(rtr.NotAMember, match="forked from a client of group 'g'"):
        groups.find("a")


def test_a_member_that_is_connected_late_is_still_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a call leaves there, such as a subscription, would outlive this process."""
    monkeypatch.setattr(ray_internals, "session_check", lambda: lambda: True)
    waits = []

    def control(route: Any, lane: Any, kind: int, timeout_s: float) -> Any:
        waits.append(timeout_s)
        return SimpleNamespace(add_done_callback=lambda done: None)

    local: Any = SimpleNamespace(
        config=rtr.GroupConfig(rpc_timeout_s=30),
        peers=SimpleNamespace(route=lambda name: SimpleNamespace(calls=None)),
        outgoing=SimpleNamespace(control=control),
    )
    client = joining.Client(Host("g", "a"), "g")
    for timeout_s in (None, 1.0, 100.0):
        client._watch(local, Member(0, "a", None, "", 0, "", 0), timeout_s)
    assert waits[0] == waits[1] > 30 and waits[2] > 100
