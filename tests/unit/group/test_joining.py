"""A process that is no member joins groups as a client when it first uses them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import clients
from raytorchrpc.calls.clients import OwnGroups, Supervision
from raytorchrpc.calls.peers import Member, by_key, find
from raytorchrpc.group import join, joining
from raytorchrpc.group.supervisor import Supervisor
from raytorchrpc.process import fork
from raytorchrpc.process.completion import Completion
from raytorchrpc.process.threads import ThreadShortage
from tests.polling import wait_until


class Local:
    """Stands for this process as a client."""

    def __init__(self, group: str, members: tuple[Member, ...]) -> None:
        self.group, self.peers = group, SimpleNamespace(members=members)
        self.peers.known = lambda target: find(target, by_key(members))

    def leave(self) -> None:
        pass


class Host:
    """Stands for the supervisor of a group, which admits clients unless an error is set."""

    def __init__(self, name: str, *members: str) -> None:
        made = (Member(rank, each, None, "", 0, "", 0) for rank, each in enumerate(members))
        self.last_info: Any = SimpleNamespace(name=name, members=tuple(made), config=rtr.GroupConfig(rpc_timeout_s=20))
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
        self.supervision, self.connection = Supervision(), Completion()
        self.supervision.begin(self.connection)
        local: Any = Local(self.last_info.name, self.last_info.members)
        spec: Any = SimpleNamespace(generation=self.last_info.name)
        made: Any = SimpleNamespace(local=local, spec=spec, supervision=self.supervision, vouch=None)
        made.is_client = made.has_joined = True
        join._memberships[spec.generation] = made


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnGroups]:
    monkeypatch.setattr(ray_internals, "session_check", lambda: lambda: True)
    monkeypatch.setattr(joining, "become_client", lambda admit, generation, until: admit(None))
    monkeypatch.setattr(joining.Client, "watch", lambda self, local, member, until: None)
    monkeypatch.setattr(join, "_memberships", {})
    yield OwnGroups()
    gc.collect()  # no client is left that a later fork finds


def add(groups: OwnGroups, *hosts: Host) -> None:
    for host in hosts:
        groups.add(host.last_info.name, joining.Client(host, host.last_info.name))


def find_local(groups: OwnGroups, home: Any, timeout_s: float | None = None, group: str | None = None) -> Any:
    """As an operation there does."""
    if (local := groups.joined(home, timeout_s, group)) is None:
        joining = groups.join(home, timeout_s, group)
        local = None if joining is None else joining.result()
    return local


def group_of(groups: OwnGroups, home: Any, group: str | None = None) -> str:
    name: str = find_local(groups, home, group=group).group
    return name


@pytest.mark.parametrize("ended", [False, ConnectionError("Ray does not answer")])
def test_a_group_that_cannot_be_joined_now_is_joined_by_a_later_call(groups: OwnGroups, ended: Any) -> None:
    host = Host("g", "a")
    add(groups, host)
    host.error, host.ended = rtr.BootstrapError("busy with another change"), ended
    for use in (lambda: find_local(groups, "a"), groups.everywhere):
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
        find_local(groups, "a")
    assert find_local(groups, "a") is None


def test_a_client_that_the_group_sent_off_joins_again(groups: OwnGroups) -> None:
    host = Host("g", "a")
    add(groups, host)
    assert group_of(groups, "a") == group_of(groups, "a") == "g" and host.asked == 1
    join.leave(None, "g")
    assert group_of(groups, "a") == "g" and host.asked == 2


def test_a_call_joins_no_other_group_than_that_of_its_target(groups: OwnGroups) -> None:
    broken, whole = Host("broken", "a"), Host("whole", "b")
    broken.error = rtr.ConfigurationError("not here")
    add(groups, broken, whole)
    assert group_of(groups, "b") == "whole" and broken.asked == 0
    with pytest.raises(rtr.ConfigurationError, match="not here"):
        find_local(groups, "a")
    locals_, failed = groups.everywhere()
    assert [local.group for local in locals_] == ["whole"] and [str(error) for error in failed] == ["not here"]


def test_a_target_that_no_group_is_known_to_have_may_be_new(groups: OwnGroups) -> None:
    """In a detached group, which this process knows as it was."""
    first, second = Host("first", "a"), Host("second", "b")
    add(groups, first, second)

    def grow() -> None:
        second.last_info = Host("second", "b", "c").last_info

    second.during = grow
    first.error = rtr.BootstrapError("silent")
    assert group_of(groups, "c") == "second"
    with pytest.raises(rtr.BootstrapError, match="silent"):
        find_local(groups, "d")
    first.error = None
    with pytest.raises(rtr.NotAMember, match="has a member 'd': group 'first' has a; group 'second' has b, c"):
        find_local(groups, "d")
    with pytest.raises(rtr.ConfigurationError, match="groups 'first' and 'second' have a member 0"):
        find_local(groups, 0)


def test_code_that_interrupts_the_thread_that_joins_is_refused(groups: OwnGroups) -> None:
    """A finalizer: it would wait for itself."""
    host, refused = Host("g", "a"), []

    def interrupt() -> None:
        try:
            find_local(groups, "a")
        except rtr.RayTorchRpcError as error:
            refused.append(str(error))

    host.during = interrupt
    add(groups, host)
    assert group_of(groups, "a") == "g" and host.asked == 1
    assert len(refused) == 1 and "interrupted on this thread" in refused[0]


def test_an_operation_waits_for_its_own_time_until_the_group_is_joined_and_a_later_one_finds_it(
    groups: OwnGroups,
) -> None:
    host, held = Host("g", "a"), threading.Event()
    host.during = lambda: held.wait(20)
    add(groups, host)
    first = groups.join("a", 0.05)
    # It joins, or was too late for that: an operation that waits for one that joins names that one.
    assert first is not None and wait_until(lambda: host.asked == 1 or first.done(), 20)
    second = groups.join("a")
    assert second is not None
    with pytest.raises(rtr.RpcTimeout, match=r"has not become a client of a group with 'a' within 0.05 s"):
        first.result()
    with pytest.raises(rtr.RpcTimeout):
        groups.everywhere(0.05)
    assert not second.done() and groups.joined("a") is None
    held.set()
    assert second.result().group == "g" and host.asked == 1
    assert groups.joined("a") is second.result()


def test_a_client_that_the_supervisor_has_dropped_joins_again(
    groups: OwnGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host("g", "a")
    add(groups, host)
    before, second = find_local(groups, "a"), Completion()
    host.connection.complete()
    assert groups.joined("a") is before, "the supervisor may connect again"
    monkeypatch.setattr(clients, "_UNSUPERVISED_S", -1.0)
    assert Supervision().is_over, "it never came"
    host.supervision.begin(second)
    assert groups.joined("a") is before
    second.complete()
    assert groups.joined("a") is None
    host.error, allowed = rtr.BootstrapError("its host has died"), list[float]()
    with monkeypatch.context() as patch:
        patch.setattr(
            joining,
            "become_client",
            lambda admit, generation, until: (allowed.append(until - time.monotonic()), admit(None)),
        )
        for ended in (False, True):
            host.ended = ended
            assert find_local(groups, "a", 1.0) is before, "members can be called all the same"
    assert max(allowed) <= 0.5, "and the call has time for it"
    host.error = None
    assert find_local(groups, "a") is not before and host.asked == 4


def test_a_member_is_found_in_the_group_that_is_known_to_have_it(groups: OwnGroups) -> None:
    add(groups, Host("first", "a", "b"), Host("second", "a"))
    assert group_of(groups, "a", "first") == "first" and group_of(groups, "a", "second") == "second"
    assert groups.name_of(1) == "b" and groups.name_of(0) == "a" and groups.name_of("c") is None
    with pytest.raises(rtr.ConfigurationError, match="groups 'first' and 'second' have a member 'a'"):
        group_of(groups, "a")
    assert groups.may_have("a", "second") and not groups.may_have("a", "a group that is over")


def test_a_child_forked_before_the_first_use_is_refused(groups: OwnGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    client = joining.Client(Host("g", "a"), "g")
    monkeypatch.setattr(fork, "_origin", None)
    client.after_fork()
    with pytest.raises(rtr.NotAMember, match="forked from a client of group 'g'"):
        find_local(groups, "a")


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
    for name, timeout_s in (("a", 1.0), ("b", 100.0)):
        client.watch(local, Member(0, name, None, "", 0, "", 0), time.monotonic() + timeout_s)
    assert 30 < waits[0] < 40 and waits[1] > 100


def test_the_end_of_a_group_waits_for_no_client_that_is_lost() -> None:
    asked: list[Any] = []
    stub: Any = SimpleNamespace(
        roster=SimpleNamespace(by_themselves=set("ab"), clients=dict.fromkeys("cd"), generation="g"),
        _core=SimpleNamespace(lost=dict.fromkeys("bd")),
        _connections=SimpleNamespace(
            send=lambda name, function, *args: asked.append((name, function, args)),
            call_all=lambda function, arguments, until: asked.append((function, arguments)),
        ),
    )
    Supervisor._send_off(stub, "abcd", for_good=True)
    *told, awaited = asked
    assert sorted(told) == [(name, join.leave, ("g", True)) for name in "bd"]
    assert awaited == (join.leave, {"a": ("g", True), "c": ("g", True)})


def test_a_shortage_costs_no_other_instruction_of_the_change() -> None:
    carried_out: list[str] = []

    def carry_out(instruction: str) -> None:
        carried_out.append(instruction)
        if instruction != "announce":
            raise ThreadShortage(instruction, "the test says so")

    stand_in: Any = SimpleNamespace(_carry_out=carry_out, _changed=threading.Condition())
    stand_in._core = SimpleNamespace(handle=lambda events, now: ["dial", "announce", "admit"])
    with pytest.raises(ThreadShortage, match="the thread dial"):
        Supervisor._handle(stand_in)
    assert carried_out == ["dial", "announce", "admit"]
