"""Bounded queues between actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.polling import wait_until
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn
from tests.ray.test_tensor_lanes import MIB, used

LARGE = 2 * MIB  # elements of float32


@pytest.fixture(scope="module")
def actors(peers: list[Any]) -> dict[str, Any]:
    return dict(zip(("home", "a", "b"), peers, strict=True))


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors, config=rtr.GroupConfig(shm_bytes=128 * MIB)) as group:
        yield group


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> Any:
    """One in ``home``; made here, in a driver that is in no group."""
    return rtr.Queue(request.node.name, home="home", maxsize=8)


def put_all(queue: rtr.Queue, items: list[Any]) -> None:
    for item in items:
        queue.put(item)
    queue.close()


def all_of(queue: rtr.Queue, batch: int = 1) -> list[Any]:
    return list(queue.items(batch=batch))


def same(one: Any, other: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))


@pytest.mark.parametrize("producer", ["home", "a"])
@pytest.mark.parametrize("consumer", ["home", "b"])
def test_anything_crosses_in_order(actors: dict[str, Any], request: Any, producer: str, consumer: str) -> None:
    queue = rtr.Queue(request.node.name, home="home", maxsize=50)

    def put() -> None:
        tensor, array = torch.arange(1.0 * LARGE), numpy.arange(LARGE)
        queue.put({"tensor": tensor.view(-1, 2).T, "array": array, "tag": "x"})
        tensor.zero_()
        array[:] = 0
        queue.put_many([None, 7, tensor[:3], array[:2]])
        queue.close()

    def get() -> None:
        first, *rest = queue
        assert same(first["tensor"], torch.arange(1.0 * LARGE).view(-1, 2).T)
        assert same(first["array"], numpy.arange(LARGE)) and first["tag"] == "x"
        first["tensor"].fill_(3)
        assert rest[:2] == [None, 7] and same(rest[2], torch.zeros(3)) and same(rest[3], numpy.zeros(2, dtype=int))

    in_actor(actors[producer], put)
    in_actor(actors[consumer], get)


def test_what_cannot_work_is_refused(actors: dict[str, Any], queue: Any, spawn: Spawn) -> None:
    for settings in ({"maxsize": 0}, {"max_bytes": -1}, {"producers": 1.5}):
        with pytest.raises(rtr.ConfigurationError, match="must be a whole number of at least 1"):
            rtr.Queue("bad", home="home", **settings)  # type: ignore[arg-type]
    with pytest.raises(rtr.ConfigurationError, match="needs a home"):
        rtr.Queue("homeless")

    def act_outside() -> None:
        with pytest.raises(rtr.NotAMember, match=r"this process is in no group.*get_group\(name\)"):
            queue.put(1)

    in_actor(spawn(Peer), act_outside)

    def act() -> None:
        with pytest.raises(rtr.SerializationError, match="cannot be pickled"):
            queue.put(threading.Lock())
        with pytest.raises(rtr.ConfigurationError, match="timeout is a number of seconds from 0"):
            queue.get(timeout=-1)
        with pytest.raises(rtr.NotAMember, match="'nobody' is not in group"):
            rtr.Queue("q", home="nobody")

    in_actor(actors["a"], act)


def test_it_is_served_while_the_home_is_busy_and_inside_its_methods(
    actors: dict[str, Any], queue: Any, latch: Any
) -> None:
    held: Latch = latch()
    busy = actors["home"].busy.remote(held)
    inside = held.await_arrival()
    in_actor(actors["a"], put_all, queue, [1, 2])
    assert in_actor(actors["b"], all_of, queue) == [1, 2]
    held.release(inside)
    ray.get(busy, timeout=60)


def test_large_items_stay_where_they_arrived_if_the_home_takes_them(actors: dict[str, Any], queue: Any) -> None:
    in_actor(actors["a"], lambda: queue.put(torch.ones(LARGE)))

    def take(keep: bool) -> None:
        insides.saved.kept = queue.get(keep=keep)

    in_actor(actors["home"], take, False)
    assert in_actor(actors["a"], used) >= 4 * LARGE, "no copy was made"
    in_actor(actors["a"], lambda: queue.put(torch.ones(LARGE)))
    in_actor(actors["home"], take, True)
    assert in_actor(actors["a"], lambda: wait_until(lambda: used() == 0, 20))


def test_a_get_within_a_call_ends_with_it(actors: dict[str, Any], queue: Any) -> None:
    def outer() -> float:
        began = time.monotonic()
        with pytest.raises((rtr.RpcTimeout, rtr.Empty)):
            rtr.rpc_sync("b", timeout=0.4).give(queue.get)
        return time.monotonic() - began

    assert in_actor(actors["a"], outer) < 20
    assert in_actor(actors["a"], lambda: wait_until(lambda: queue.stats()["waiting_to_get"] == 0, 20))


# --- deaths --------------------------------------------------------------------------------------------------


def test_deaths(spawn: Spawn, actors: dict[str, Any], group: rtr.Group) -> None:
    """Of a consumer that waits, a producer that waits, and at last the home, which comes back without the queue."""
    dying = {name: spawn(Peer) for name in ("producer", "consumer")}
    dying["home2"] = spawn(Peer, max_restarts=1)
    group.add(dying)
    before = len(group.members)
    queue = rtr.Queue("q", home="home2", maxsize=2)
    waits = dying["consumer"].run.remote(queue.get)
    assert in_actor(actors["a"], lambda: wait_until(lambda: queue.stats()["waiting_to_get"] == 1, 20))
    ray.kill(dying["consumer"])
    assert in_actor(actors["a"], lambda: wait_until(lambda: queue.stats()["waiting_to_get"] == 0, 20))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waits, timeout=60)
    puts = dying["producer"].run.remote(queue.put_many, [torch.full((LARGE,), float(n)) for n in range(3)])
    assert in_actor(actors["a"], lambda: wait_until(lambda: queue.stats()["waiting_to_put"] == 1, 20))
    ray.kill(dying["producer"])
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(puts, timeout=60)
    assert wait_until(lambda: len(group.members) == before - 2, 20)
    arrived = in_actor(actors["a"], lambda: [float(queue.get(timeout=20)[0]) for _ in range(3)])
    assert arrived == [0.0, 1.0, 2.0], "what had arrived stays"

    def outlive() -> str:
        insides.saved.kept = queue
        with pytest.raises(rtr.PeerLost) as lost:
            queue.get()
        return str(lost.value)

    waits = actors["a"].run.remote(outlive)
    assert in_actor(actors["b"], lambda: wait_until(lambda: queue.stats()["waiting_to_get"] == 1, 20))
    ray.kill(dying["home2"], no_restart=False)
    assert "it is the home of queue 'q'" in ray.get(waits, timeout=60)

    def use_again() -> str:
        with pytest.raises(rtr.NotFound) as error:
            insides.saved.kept.get()
        return str(error.value)

    # Whoever called it knows of the death before the group does.
    assert wait_until(lambda: [m.incarnation for m in group.members if m.name == "home2"] == [1], 30)
    group.wait_ready()
    assert "has no queue 'q'" in in_actor(actors["a"], use_again)
    group.remove(["home2"])
