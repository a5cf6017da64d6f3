"""A driver that formed a group without joining it uses its queues and topics, over real connections."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.calls import clients
from raytorchrpc.calls.clients import own_groups
from raytorchrpc.group import joining
from tests.polling import wait_until
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn, peers: list[Any]) -> dict[str, Any]:
    return {"home": spawn_for_module(Peer, max_restarts=-1), "a": peers[0]}


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    maps = {actors["home"]: {actors["a"]: {}}, 1: rtr.DeviceMap.from_dict({0: {}})}
    with rtr.init_group(actors, name="fed", config=rtr.GroupConfig(device_maps=maps)) as group:
        yield group
    assert wait_until(lambda: not [thread.name for thread in threading.enumerate() if "client" in thread.name], 30)


def take(queue: rtr.Queue, count: int) -> list[Any]:
    return [queue.get(10) for _ in range(count)]


def test_items_of_any_size_go_both_ways_while_the_home_is_busy(
    actors: dict[str, Any], latch: Callable[[], Latch]
) -> None:
    held = latch()
    busy = actors["home"].busy.remote(held)
    arrived = held.await_arrival()
    queue, back = rtr.Queue("work", home="home", maxsize=50), rtr.Queue("back", home=actors["home"])
    assert back.home == "home"
    large = torch.rand(3 << 20)
    queue.put({"large": large, "n": 1})
    queue.put_many(range(5))
    taken = ray.get(actors["a"].run.remote(take, queue, 6))
    assert torch.equal(taken[0]["large"], large) and taken[1:] == [0, 1, 2, 3, 4]
    ray.get(actors["a"].run.remote(lambda: back.put(large * 2)))
    assert torch.equal(back.get(10), large * 2)
    assert queue.stats()["taken"] == 6

    async def put() -> None:
        await asyncio.gather(*(queue.aput(number) for number in range(20)))

    asyncio.run(put())
    assert ray.get(actors["a"].run.remote(take, queue, 20)) == list(range(20))
    held.release(arrived)
    ray.get(busy, timeout=30)


def test_a_member_can_be_named_in_any_form(group: rtr.Group, actors: dict[str, Any]) -> None:
    """In the driver, which is no member, and in members."""
    handle = actors["home"]
    forms: list[Any] = [handle, "home", 0, "0", group.members[0]]

    def homes(*forms: Any) -> set[str]:
        stores = [rtr.WeightStore("w", home=form) for form in forms]
        shared = [rtr.WeightStore("s", publishers=[form, "a"]) for form in forms]
        assert {store.publishers for store in shared} == {("a", "home")}
        return {handle.home for handle in (*stores, *(rtr.Queue("q", home=form) for form in forms))}

    assert group.config.device_maps == {"home": rtr.DeviceMap(), "a": rtr.DeviceMap()}
    assert {group.explain("a", form) for form in forms} == {group.explain("a", "home")}
    assert {str(group.device_map(form, form)) for form in forms} == {"{}"}
    with pytest.raises(rtr.NotAMember, match=r"'homer' is not in group 'fed'; its members: home \(0\), a \(1\)"):
        group.remove(["homer"])
    with pytest.raises(rtr.NotAMember, match="True does not name a member: pass an actor handle"):
        group.explain(True, handle)
    assert homes(*forms) == ray.get(actors["a"].run.remote(homes, *forms)) == {"home"}


def test_a_driver_pulls_weights(actors: dict[str, Any]) -> None:
    def publish(value: float) -> int:
        return rtr.WeightStore("policy").publish({"w": torch.full((1 << 20,), value)})

    store = rtr.WeightStore("policy", home=actors["home"])
    assert store.version() == 0
    model = {"w": torch.zeros(1 << 20)}
    for version in (1, 2):
        assert ray.get(actors["home"].run.remote(publish, float(version))) == store.wait(version) == version
        assert store.pull(model) == version and model["w"].eq(version).all()


def test_topics_and_find(actors: dict[str, Any]) -> None:
    topic = rtr.Topic("news", home="home")
    with topic.subscribe("latest") as mine:
        ray.get(actors["a"].run.remote(lambda: rtr.Topic.find("news").publish("from a")))
        assert mine.get(10) == "from a"
        topic.publish("mine")
        assert mine.get(10) == "mine"
    assert rtr.Topic.find("news").stats()["subscribers"] == 0
    with pytest.raises(rtr.NotFound, match="group 'fed' has a queue 'none'"):
        rtr.Queue.find("none")


def test_calls_and_who_is_listed(actors: dict[str, Any], group: rtr.Group, peers: list[Any]) -> None:
    assert rtr.rpc_sync(actors["a"]).double(2) == 4
    large = torch.rand(1 << 20)
    assert torch.equal(rtr.rpc_async("home").double(large).wait(), large * 2)

    async def call() -> int:
        return await rtr.rpc_async("a").double(3)

    assert asyncio.run(call()) == 6
    with pytest.raises(rtr.NotAMember, match="without joining it"):
        rtr.current_member()
    group.add({"b": peers[1]})
    for members in (group.members, ray.get(actors["a"].run.remote(lambda: rtr.get_group("fed").members))):
        assert [(member.rank, member.name) for member in members] == [(0, "home"), (1, "a"), (2, "b")]
    assert rtr.rpc_sync("b").double(1) == 2
    group.remove(["b"])


def subscribe_and_end(name: str) -> None:
    """In a process of its own: a client of a detached group that dies with a full subscription."""
    rtr.get_group(name)
    subscription = rtr.Topic("news", home="reader").subscribe("block", maxsize=1)
    assert subscription.get(30) == 0
    rtr.Queue("subscribed", home="reader").put(1)
    os._exit(1)


def test_a_client_that_ends_holds_nobody_up(peers: list[Any]) -> None:
    with rtr.init_group({"reader": peers[1]}, name="held up", detached=True):
        topic = rtr.Topic("news", home="reader")
        task = ray.remote(num_cpus=0, max_retries=0)(subscribe_and_end).remote("held up")
        assert wait_until(lambda: topic.stats()["subscribers"] == 1, 60)
        for number in range(5):
            topic.publish(number, timeout=60)
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(task)
        assert wait_until(lambda: topic.stats()["subscribers"] == 0, 30)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(rtr.NotAMember, match="has a member 'nowhere': group 'fed' has home, a"):
        rtr.Queue("q", home="nowhere").put(1)
    with pytest.raises(rtr.NotAMember, match="include_driver=True"):
        rtr.WeightStore("w", home="home").publish({"w": torch.ones(1)})
    with pytest.raises(rtr.ConfigurationError, match="pass home="):
        rtr.Queue("q")
    with pytest.raises(rtr.ConfigurationError, match="maxsize=50, not maxsize=3"):
        rtr.Queue("work", home="home", maxsize=3).put(1)


def test_two_groups_with_the_same_names(actors: dict[str, Any], peers: list[Any]) -> None:
    bound, store = rtr.Queue("bound", home="home"), rtr.WeightStore("bound", home="home")
    bound.put(1)
    assert store.version() == 0
    ray.get(actors["home"].run.remote(lambda: rtr.WeightStore("bound").publish({"w": torch.ones(2)})))
    with rtr.init_group({"home": peers[1], "b": peers[2]}, name="other"):
        with pytest.raises(rtr.ConfigurationError, match="groups 'fed' and 'other' have a member 'home'"):
            rtr.Queue("q", home="home").put(1)
        assert pickle.loads(pickle.dumps(bound)).get(30) == 1, "a handle stays in its group"
        bound.put(2)
        rtr.Queue("q", home="b").put(1)
        assert rtr.Queue.find("q").get(30) == 1
        assert rtr.Queue.find("bound").get(30) == 2
        model = {"w": torch.zeros(2)}
        assert store.prefetch(model).wait() == store.pull(model) == 1


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """This process joins groups only once this is set."""
    held, become_client = threading.Event(), joining.become_client

    def become(*args: Any) -> None:
        held.wait(60)
        become_client(*args)

    monkeypatch.setattr(joining, "become_client", become)
    return held


def test_the_time_of_an_operation_limits_the_joining_too(peers: list[Any], held_up: threading.Event) -> None:
    with rtr.init_group({"late": peers[1]}, name="late"):
        queue, began = rtr.Queue("q", home="late"), time.monotonic()
        with pytest.raises(rtr.RpcTimeout, match="has not become a client"):
            rtr.rpc_sync("late", timeout=0.1).double(1)
        for operation in (lambda: queue.get(0.1), lambda: queue.get_nowait(), lambda: rtr.Queue.find("q", timeout=0.1)):
            with pytest.raises(rtr.RpcTimeout):
                operation()
        assert time.monotonic() - began < 30
        held_up.set()
        assert rtr.rpc_sync("late").double(1) == 2
        queue.put(1)
        assert queue.get(30) == 1


def test_an_event_loop_goes_on_while_its_process_joins(peers: list[Any], held_up: threading.Event) -> None:
    late = peers[1]

    async def use() -> list[Any]:
        queue = rtr.Queue("q", home=late)  # a handle stands for a name that is known
        call, put = rtr.rpc_async(late).double(2), asyncio.ensure_future(queue.aput(1))
        await asyncio.wait([put], timeout=0.05)
        assert not put.done() and not call.done()
        with pytest.raises(rtr.RayTorchRpcError, match="event loop"):
            rtr.remote(late).double(1)
        held_up.set()
        await put
        return [await call, await queue.aget(30), await rtr.rpc_async("late").double(3)]

    with rtr.init_group({"late": late}, name="late"):
        assert asyncio.run(use()) == [4, 1, 6]


def test_a_group_whose_host_stands_still_holds_a_call_up_no_longer_than_its_time(peers: list[Any]) -> None:
    with rtr.init_group({"still": peers[1]}, name="still", detached=True):
        host = ray.get_actor("still", namespace="raytorchrpc")
        pid = ray.get(host.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(rtr.RpcTimeout, match="has not become a client"):
                rtr.rpc_sync("still", timeout=0.2).double(1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert rtr.rpc_sync("still").double(1) == 2
        assert time.monotonic() - began < 25, "the first attempt did not go on waiting for the host"


def drop_clients(host: Any) -> None:
    """In the actor that hosts a group: as after they could not be reached for a minute."""
    supervisor = host._supervisor
    for name, client in supervisor._core.clients.copy().items():
        process = client.member.rank, client.member.incarnation
        supervisor._report(partial(supervisor._core.dialled, name, process, "dropped", ended=True))


def test_a_client_that_the_group_has_dropped_joins_again_when_it_is_used(
    peers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with rtr.init_group({"dropper": peers[1]}, name="drops", detached=True) as group:
        assert rtr.rpc_sync("dropper").double(1) == 2
        before = own_groups.joined("dropper")
        monkeypatch.setattr(clients, "_UNSUPERVISED_S", -1.0)
        assert wait_until(lambda: own_groups.joined("dropper") is before, 30), "the supervisor is connected"
        monkeypatch.setattr(clients, "_UNSUPERVISED_S", 1.0)
        ray.get(ray.get_actor("drops", namespace="raytorchrpc").__ray_call__.remote(drop_clients), timeout=30)
        assert wait_until(lambda: own_groups.joined("dropper") is None, 30)
        group.add({"newcomer": peers[2]})
        assert rtr.rpc_sync("newcomer").double(2) == 4
        assert own_groups.joined("dropper") is not before


def test_a_home_that_restarts_and_members_that_come_and_go(
    actors: dict[str, Any], group: rtr.Group, peers: list[Any]
) -> None:
    old = rtr.Queue("lives", home="home")
    old.put(1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            rtr.Queue("empty", home="home").get(60)
        except rtr.PeerLost as lost:
            raised.append(lost)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert wait_until(lambda: rtr.Queue("empty", home="home").stats()["waiting_to_get"] == 1, 30)
    began = time.monotonic()
    ray.kill(actors["home"], no_restart=False)
    waiting.join(40)
    assert raised and time.monotonic() - began < 40
    assert wait_until(lambda: group.members[0].incarnation == 1, 60)
    group.wait_ready()
    with pytest.raises(rtr.NotFound, match="ended"):
        old.get(30)
    rtr.Queue("lives", home="home").put(2)
    assert rtr.Queue("lives", home="home").get(30) == 2

    group.add({"c": peers[1]})
    added = rtr.Queue("q", home="c")
    added.put(3)
    group.remove(["c"])

    def is_refused() -> bool:
        """Until the end of the connection is noticed, the home is lost."""
        with pytest.raises((rtr.NotAMember, rtr.PeerLost)) as refused:
            added.get(30)
        return "has a member 'c'" in str(refused.value)

    assert wait_until(is_refused, 60)
