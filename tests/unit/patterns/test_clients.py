"""Clients: a process that is no member uses queues, topics and weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.calls import clients
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.peers import FIRST_CLIENT, Member, PeerRoute, process_token
from raytorchrpc.patterns import handle
from tests.polling import wait_until
from tests.unit.members import GENERATION, DirectLane, Members

CONFIG = rtr.GroupConfig(rpc_timeout_s=20)


class Groups:
    """Stands for the groups that this process formed: one, with the members of ``Members``."""

    def __init__(self, members: Members) -> None:
        me = Member(FIRST_CLIENT, "client", None, "node", 0, "", -1)
        self.local = LocalMember("group", GENERATION, me, CONFIG, None, {}, 1 << 30)
        self.lane = DirectLane()
        self.lane.peers = members.members
        for member in (local.me for local in members.members.values()):
            token = process_token(GENERATION, member.rank, member.incarnation)
            self.local.peers.add_peer(PeerRoute(member, self.lane, self.lane, token=token, same_clock=True))

    def joined(self, home: Any, timeout_s: float | None = None, group: str | None = None) -> LocalMember:
        assert group in (None, GENERATION)
        return self.local

    def may_have(self, target: Any, group: str | None = None) -> bool:
        return group in (None, GENERATION)

    def name_of(self, target: Any, group: str | None = None) -> str:
        return self.local.peers.route(target).member.name

    def everywhere(
        self, timeout_s: float | None = None, group: str | None = None
    ) -> tuple[list[LocalMember], list[Exception]]:
        return [self.local], []


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(CONFIG)
    yield made
    made.close()


@pytest.fixture
def groups(members: Members, monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    made = Groups(members)
    for module in (clients, handle):
        monkeypatch.setattr(module, "own_groups", made)
    yield made
    made.local.leave()


def at_home(members: Members, kind: str) -> Any:
    return members.members["home"].services.find(kind, "q", None, "home")


@pytest.mark.usefixtures("groups")
def test_a_client_uses_a_queue_as_a_member_does(members: Members) -> None:
    queue = rtr.Queue("q", home="home", maxsize=100)
    large = torch.arange(1 << 18, dtype=torch.float32)
    queue.put({"x": large})
    queue.put_many(range(3))
    assert torch.equal(queue.get()["x"], large)
    assert queue.get_many(9) == [0, 1, 2]
    with pytest.raises(rtr.Empty):
        queue.get_nowait()

    async def put() -> list[Any]:
        await asyncio.gather(*(queue.aput(number) for number in range(20)))
        return [await queue.aget() for _ in range(20)]

    assert asyncio.run(put()) == list(range(20))
    with members.acting("a"):
        rtr.Queue.find("q").put("from a")
    assert rtr.Queue.find("q").get() == "from a"
    queue.close()
    with pytest.raises(rtr.Closed):
        queue.put(1)


@pytest.mark.usefixtures("groups")
def test_a_client_that_waits_gets_what_comes(members: Members) -> None:
    queue, got = rtr.Queue("q", home="home"), []
    taker = threading.Thread(target=lambda: got.append(queue.get(10)))
    taker.start()
    assert wait_until(lambda: queue.stats()["waiting_to_get"] == 1, 10)
    with members.acting("b"):
        rtr.Queue("q", home="home").put(7)
    taker.join(10)
    assert got == [7]


@pytest.mark.usefixtures("groups")
def test_a_client_publishes_and_subscribes(members: Members) -> None:
    topic = rtr.Topic("q", home="home")
    with topic.subscribe() as mine:
        with members.acting("a"):
            its = rtr.Topic("q", home="home").subscribe()
        topic.publish("x")
        assert mine.get(5) == "x"
        with members.acting("a"):
            assert its.get(5) == "x"


@pytest.mark.usefixtures("groups")
def test_a_client_creates_a_store_and_pulls_from_it(members: Members) -> None:
    """By any form of a target, with one publisher or several; only members publish."""
    large, small = torch.randn(300, 1000), torch.arange(3.0)
    home = members.members["home"].me
    for target in ("home", 0, home):
        store = rtr.WeightStore("w", home=target)
        assert (store.home, store.version()) == ("home", 0)
    with members.acting("home"):
        rtr.WeightStore("w").publish({"large": large, "small": small})
    mine = {"large": torch.zeros(300, 1000), "small": torch.zeros(3)}
    assert store.wait() == store.version() == store.pull(mine) == 1
    assert torch.equal(mine["large"], large) and torch.equal(mine["small"], small)
    ahead = store.prefetch(mine, since=1)
    assert ahead.wait() == 1
    with pytest.raises(rtr.NotAMember, match="include_driver=True"):
        store.publish(mine)

    sharded = rtr.WeightStore("s", publishers=[members.members["b"].me, 1])
    assert sharded.publishers == ("a", "b") and sharded.version() == 0

    def publish(name: str, row: int) -> None:
        with members.acting(name):
            store = rtr.WeightStore("s", publishers=["a", "b"])
            store.publish({"w": rtr.Shard(large[row : row + 150], (300, 1000), (row, 0))})

    publish("a", 0)
    publish("b", 150)
    whole = torch.zeros(300, 1000)
    assert sharded.pull({"w": whole}) == 1 and torch.equal(whole, large)


def test_a_handle_with_other_settings_is_told_both(members: Members) -> None:
    with members.acting("home"):
        rtr.Queue("q", maxsize=2)
        with pytest.raises(rtr.ConfigurationError, match=r"queue 'q' with maxsize=2, not maxsize=5; .*find\('q'\)"):
            rtr.Queue("q", maxsize=5)
        with pytest.raises(rtr.ConfigurationError, match="maxsize=2, not maxsize=4 and producers=1, not producers=3"):
            rtr.Queue("q", maxsize=4, producers=3)
        rtr.Topic("t")
        with pytest.raises(rtr.ConfigurationError, match="topic 't' with publishers=1, not publishers=2"):
            rtr.Topic("t", publishers=2)
        rtr.WeightStore("w")
        with pytest.raises(rtr.ConfigurationError, match="weight store 'w' with keep=1, not keep=3"):
            rtr.WeightStore("w", keep=3)
    with members.acting("a"), pytest.raises(rtr.ConfigurationError, match="maxsize=2, not maxsize=5"):
        rtr.Queue("q", home="home", maxsize=5).put(1)
