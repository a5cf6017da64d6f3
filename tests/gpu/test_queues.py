"""Queues and topics of CUDA tensors: on one GPU, to another, and to a member without one; seen in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.gpu.ends import ends
from tests.insides import in_actor
from tests.polling import wait_until

pytestmark = pytest.mark.gpu

#: Elements of float32: an item that travels with others, and one that travels alone.
SIZES = (1000, 3_000_000)
ITEMS = 24
#: GPU cycles that an item takes to be computed, so that it is not there yet when it is put.
_LATE = 5_000_000


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    with ends("producer", "same", host="host") as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        yield group


def made_late(number: int) -> torch.Tensor:
    tensor = torch.zeros(SIZES[number % len(SIZES)], device="cuda")
    torch.cuda._sleep(_LATE)
    return tensor.fill_(number)


def check(items: list[dict[str, Any]]) -> int:
    """What was put, in its order, on this process's GPU."""
    for number, item in enumerate(items):
        tensor = item["tensor"]
        assert (item["number"], tensor.device, tensor.numel()) == (
            number,
            torch.device("cuda:0"),
            SIZES[number % len(SIZES)],
        )
        assert (float(tensor.min()), float(tensor.max())) == (number, number)
    return len(items)


def put_all(put: Callable[[Any], Any], close: Callable[[], None]) -> None:
    for number in range(ITEMS):
        tensor = made_late(number)
        put({"number": number, "tensor": tensor})
        tensor.fill_(-1)  # the item is what it was when it was put
    close()
    torch.cuda.synchronize()


def produce(queue: rtr.Queue) -> None:
    put_all(queue.put, queue.close)


def consume(queue: rtr.Queue) -> int:
    return check(list(queue))


def allocated() -> int:
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("home", ["producer", "same"])
def test_a_queue_on_one_gpu(actors: dict[str, Any], home: str) -> None:
    crosses(actors, "same", home)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("home", ["producer", "same", "other"])
def test_a_queue_between_two_gpus(actors: dict[str, Any], home: str) -> None:
    crosses(actors, "other", home)


def crosses(actors: dict[str, Any], consumer: str, home: str) -> None:
    before = in_actor(actors["producer"], allocated)
    queue = rtr.Queue(f"for {consumer}, in {home}", home=home, maxsize=4)
    taken = actors[consumer].run.remote(consume, queue)
    in_actor(actors["producer"], produce, queue)
    assert ray.get(taken, timeout=120) == ITEMS
    let_go = wait_until(lambda: bool(in_actor(actors["producer"], allocated) == before), 10)
    assert let_go, f"{in_actor(actors['producer'], allocated) - before} bytes are still kept"


def test_what_a_consumer_cannot_hold_is_lost_and_said(actors: dict[str, Any]) -> None:
    queue = rtr.Queue("no gpu", home="producer", maxsize=4)

    def put() -> None:
        queue.put(torch.ones(1000, device="cuda"))
        queue.put("next")

    def get() -> tuple[str, Any]:
        with pytest.raises(rtr.RayTorchRpcError) as refused:
            queue.get(timeout=20)
        return str(refused.value), queue.get(timeout=20)

    in_actor(actors["producer"], put)
    said, following = in_actor(actors["host"], get)
    assert "cuda" in said.lower() and "host" in said
    assert following == "next"


def subscribe(topic: rtr.Topic) -> None:
    insides.saved.subscription = topic.subscribe()


def heard() -> int:
    return check(list(insides.saved.subscription))


def publish(topic: rtr.Topic) -> None:
    put_all(topic.publish, topic.close)


def test_a_topic_reaches_every_gpu(actors: dict[str, Any]) -> None:
    topic = rtr.Topic("cuda", home="producer")
    subscribers = [name for name in ("same", "other") if name in actors]
    for name in subscribers:
        in_actor(actors[name], subscribe, topic)
    hearing = [actors[name].run.remote(heard) for name in subscribers]
    in_actor(actors["producer"], publish, topic)
    assert ray.get(hearing, timeout=120) == [ITEMS] * len(subscribers)
