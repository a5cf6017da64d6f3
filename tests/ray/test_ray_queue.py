"""``ray.util.queue`` swapped for ``raytorchrpc.integrations.ray_queue``: nobody forms a group."""

from __future__ import annotations

import asyncio
import pickle
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.util.queue
import torch
from ray.exceptions import RayActorError

import raytorchrpc as rtr
from raytorchrpc.integrations.ray_queue import Empty, Full, Queue
from tests.polling import wait_until
from tests.ray.actors import Peer


@pytest.fixture(autouse=True)
def no_group_is_left() -> None:
    """A process stays in the groups of its last queues; a test below is about that."""


@pytest.fixture(scope="module", autouse=True)
def shared(cluster: None) -> Iterator[Queue]:
    made = Queue()
    assert made.empty()  # from now on this process is a member
    yield made
    made.shutdown()


@ray.remote(num_cpus=0)
def put_all(to: Queue, items: list[Any]) -> None:
    for item in items:
        to.put(item)


@ray.remote(num_cpus=0)
class Consumer:
    def __init__(self, of: Queue) -> None:
        self.first = of.get()  # in __init__, too
        self.queue = of

    def take(self, count: int) -> list[Any]:
        return [self.queue.get() for _ in range(count)]


@ray.remote(num_cpus=0)
class AsyncConsumer:
    async def take(self, of: Queue, count: int) -> list[Any]:
        return [await of.get_async(timeout=30) for _ in range(count)]


def test_items_keep_their_order_and_tensors_are_the_takers_own(shared: Queue) -> None:
    items = [1, "two", {"x": torch.arange(5)}, torch.ones(1 << 20)]
    for item in items:
        shared.put(item)
    assert shared.qsize() == len(shared) == shared.size() == 4 and not shared.empty() and not shared.full()
    assert [shared.get(), shared.get()] == items[:2]
    assert shared.get()["x"].tolist() == [0, 1, 2, 3, 4]
    large = shared.get_nowait()
    large.add_(1)
    assert large.sum() == 2 << 20 and shared.empty()


def test_tasks_and_actors_join_by_themselves(shared: Queue) -> None:
    consumer = Consumer.remote(shared)
    producers = [put_all.remote(shared, [number] * 5) for number in range(2)]
    ray.get(producers)
    first = ray.get(consumer.__ray_call__.remote(lambda self: self.first))
    assert sorted([first, *ray.get(consumer.take.remote(9))]) == [0] * 5 + [1] * 5
    asynchronous = AsyncConsumer.remote()
    taken = asynchronous.take.remote(shared, 3)
    shared.put_nowait_batch([torch.full((3,), number) for number in range(3)])
    assert [int(item[0]) for item in ray.get(taken)] == [0, 1, 2]


def test_errors_are_those_of_ray_and_of_this_package(shared: Queue) -> None:
    for family in (queue.Empty, ray.util.queue.Empty, rtr.Empty, Empty):
        with pytest.raises(family):
            shared.get(block=False)
    began = time.monotonic()
    with pytest.raises(Empty):
        shared.get(timeout=0.2)
    assert 0.2 <= time.monotonic() - began < 5
    for wrong in (
        lambda: shared.get(timeout=-1),
        lambda: shared.put(0, timeout=-1),
        lambda: shared.get_nowait_batch(-1),
    ):
        with pytest.raises(ValueError, match=r"at least 0|from 0 on"):
            wrong()
    for untyped in (lambda: shared.put_nowait_batch(1), lambda: shared.get_nowait_batch("2")):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            untyped()


def test_a_full_queue_refuses_at_once_or_after_the_timeout(cluster: None) -> None:
    bounded = Queue(maxsize=2, actor_options={"num_cpus": 0})
    try:
        bounded.put_nowait_batch([1, 2])
        assert bounded.full()
        for family in (queue.Full, ray.util.queue.Full, rtr.Full, Full):
            with pytest.raises(family):
                bounded.put_nowait(3)
        with pytest.raises(Full):
            bounded.put(3, timeout=0.1)
        later = put_all.remote(bounded, [3])
        assert bounded.get() == 1
        ray.get(later)
        assert bounded.get_nowait_batch(2) == [2, 3]
    finally:
        bounded.shutdown()


def test_batches_are_whole_or_nothing(cluster: None) -> None:
    bounded = Queue(maxsize=4)
    try:
        with pytest.raises(Full):
            bounded.put_nowait_batch(range(5))
        bounded.put_nowait_batch(range(3))
        with pytest.raises(Full):
            bounded.put_nowait_batch([3, 4])
        with pytest.raises(Empty):
            bounded.get_nowait_batch(4)
        assert bounded.get_nowait_batch(0) == [] and bounded.get_nowait_batch(3) == [0, 1, 2]
    finally:
        bounded.shutdown()


def test_coroutines_put_and_get(shared: Queue) -> None:
    async def exchange() -> list[int]:
        gets = [asyncio.ensure_future(shared.get_async()) for _ in range(10)]
        for number in range(10):
            await shared.put_async(number)
        taken = await asyncio.gather(*gets)
        with pytest.raises(Empty):
            await shared.get_async(block=False)
        with pytest.raises(Empty):
            await shared.get_async(timeout=0.1)
        return taken

    assert sorted(asyncio.run(exchange())) == [*range(10)]


@pytest.mark.parametrize("force", [False, True])
def test_who_waits_hears_of_the_end(cluster: None, force: bool) -> None:
    ending = Queue()
    consumer = AsyncConsumer.remote()
    ending.put(1)
    assert ray.get(consumer.take.remote(ending, 1)) == [1]
    waiting = consumer.take.remote(ending, 1)
    assert wait_until(lambda: ending._handle().stats()["waiting_to_get"] == 1, 30)
    actor = ending.actor
    ending.shutdown(force)
    with pytest.raises((rtr.PeerLost, rtr.NotFound)):
        ray.get(waiting, timeout=30)
    with pytest.raises(RayActorError):
        ray.get(actor.empty.remote(), timeout=30)
    with pytest.raises(rtr.NotFound, match="shut down"):
        ending.put(1)


def test_the_queue_of_an_actor_that_exists_is_the_one_that_others_have(cluster: None) -> None:
    named = {"name": "one queue", "num_cpus": 0}
    first = Queue(actor_options=named)
    first.put(1)
    try:
        assert Queue(actor_options={**named, "get_if_exists": True}).get(timeout=30) == 1
    finally:
        first.shutdown()


def test_a_queue_whose_actor_restarts_is_empty_and_goes_on(cluster: None) -> None:
    restarts = Queue(actor_options={"max_restarts": 1, "num_cpus": 0})
    restarts.put(1)
    ray.kill(restarts.actor, no_restart=False)

    def put() -> bool:
        try:
            restarts.put(2, timeout=10)
        except (rtr.PeerLost, RayActorError):
            return False
        return True

    assert wait_until(lambda: not put(), 30) and wait_until(put, 60)
    assert ray.get(AsyncConsumer.remote().take.remote(restarts, 1), timeout=60) == [2]
    restarts.shutdown()


def test_a_queue_outlives_the_handle_of_its_maker_and_ends_with_the_last_one(cluster: None) -> None:
    @ray.remote(num_cpus=0)
    class Maker:
        def make(self) -> Queue:
            made = Queue()
            made.put(torch.ones(4))
            return made

    maker = Maker.remote()
    made = ray.get(maker.make.remote())
    assert made.get(timeout=30).sum() == 4
    made.put(1)
    assert ray.get(AsyncConsumer.remote().take.remote(made, 1)) == [1]


def test_a_process_leaves_the_groups_of_queues_that_it_does_not_have_any_more(cluster: None) -> None:
    made = Queue()
    twin = pickle.loads(ray.cloudpickle.dumps(made))
    made.put(1)
    assert twin.get() == 1
    name = made._joined.group
    del made, twin
    assert name in known_groups()
    later = [Queue(actor_options={"num_cpus": 0}) for _ in range(8)]
    assert all(each.empty() for each in later)
    assert wait_until(lambda: name not in known_groups(), 10)
    for each in later:
        each.shutdown(force=True)


def test_a_group_of_the_program_s_is_meant_beside_those_of_queues(shared: Queue) -> None:
    actor: Any = ray.remote(num_cpus=0)(Peer)
    peers = {"a": actor.remote(), "b": actor.remote()}
    with rtr.init_group(peers, include_driver=True, name="mine"):
        assert rtr.current_member().name == "driver"
        shared.put(1)
        assert rtr.rpc_sync(0).double(shared.get()) == 2
        assert rtr.Queue("own").home == "driver"


def known_groups() -> str:
    with pytest.raises(rtr.NotAMember) as unknown:
        rtr.get_group("no such group")
    return str(unknown.value)
