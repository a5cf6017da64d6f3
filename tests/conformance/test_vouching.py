"""Whom a member asks about a connection, and how long it waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.calls import protocol
from raytorchrpc.calls.peers import Member, PeerTable
from raytorchrpc.calls.server.services import Services
from raytorchrpc.group import vouching
from raytorchrpc.group.vouching import vouched
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.process.guard import Connection

HOST = "192.0.2.1"
THEIRS, STRANGERS = (Connection((HOST, port), (HOST, 9)) for port in (1, 2))


class Asked:
    """Member 0 of a group; "quick" answers at once that it made THEIRS, "frozen" when it is told to."""

    def __init__(self) -> None:
        self.peers = PeerTable("g", Services())
        self.lanes = [SimpleNamespace(name="torchrpc", hosts={"quick": HOST, "frozen": HOST})]
        self.me = SimpleNamespace(rank=0, name="me")
        self.config = SimpleNamespace(torchrpc_from=())
        self.codec = SimpleNamespace(decode=lambda answer: answer)
        self.asked: list[str] = []
        self.unanswered: list[Pending] = []

    def form(self) -> None:
        for rank, name in ((1, "quick"), (2, "frozen"), (0, "me")):
            member = Member(rank, name, None, "n", 1, f"rtr:{name}", rank)
            self.peers.add_peer(SimpleNamespace(member=member, token=0))  # type: ignore[arg-type]

    def ask(self, local: Any, route: Any, about: Any) -> Pending:
        self.asked.append(route.member.name)
        pending = Pending()
        if route.member.name == "quick":
            pending.settle(Message((protocol.OK,), ([THEIRS],)))  # type: ignore[arg-type]
        else:
            self.unanswered.append(pending)
        return pending


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    made = Asked()
    monkeypatch.setattr(vouching, "_ask", made.ask)
    monkeypatch.setattr(vouching, "_ANSWER_S", 0.2)
    yield made
    made.peers.close()


def test_a_member_that_connects_before_this_one_knows_it_is_waited_for(local: Any) -> None:
    timer = threading.Timer(0.1, local.form)
    timer.start()
    assert list(vouched(local, {}, {THEIRS: None})) == [THEIRS]
    timer.join()


def test_the_end_of_the_group_ends_that_wait(local: Any) -> None:
    local.peers.close()
    assert list(vouched(local, {}, {THEIRS: None})) == []


def test_a_member_that_does_not_answer_is_waited_for_once(local: Any) -> None:
    local.form()
    slow: dict[str, float] = {}
    assert list(vouched(local, slow, {STRANGERS: None})) == []
    local.asked.clear()
    for _ in range(10):
        assert list(vouched(local, slow, {STRANGERS: None})) == []
    assert set(local.asked) == {"quick"}
    local.unanswered[0].settle(Message((protocol.OK,), ([],)))  # type: ignore[arg-type]
    local.asked.clear()
    assert list(vouched(local, slow, {STRANGERS: None})) == []
    assert local.asked == ["quick", "frozen"], "it has answered"
