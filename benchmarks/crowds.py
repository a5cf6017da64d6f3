"""Patterns that many members use at once: a queue, a topic, weights, and a process group over gloo.

``python -m benchmarks crowds [--members 256]`` measures one group of real actors. Where there are fewer members than
producers or subscribers, each has several, on threads of its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist

import raytorchrpc as rtr
from benchmarks import weights
from benchmarks._harness import TIMEOUT_S, Pick, actors, compare, each, on, timed
from raytorchrpc.bench.cases import Figure, Size

T = TypeVar("T")

ITEM = b"x" * 1000


def crowds(pick: Pick, members: str | None = None) -> list[Figure]:
    size = int(members) if members else pick(min(256, 8 * (os.cpu_count() or 1)), 8, 4)
    with actors(size) as ends:
        return _measure(pick, ends)


def _measure(pick: Pick, ends: list[Any]) -> list[Figure]:
    size, rounds, numbers = len(ends), pick(3, 1, 1), itertools.count()
    home, consumer, *crowd = ends
    many, few, items = pick(500, 100, 6), pick(8, 8, 2), pick(10_000, 2_000, 60)
    readers = {f"{size - 1} readers": ends[1:], "one reader": ends[1:2]}

    def through_queue(contestant: str, where: Size) -> float:
        """The second member consumes what the others produce; microseconds of an item."""
        users = int(contestant.split()[0])
        queue, of_each = rtr.Queue(f"crowd {next(numbers)}", home=0), items // users
        taking = consumer.run.remote(take, queue, of_each * users)
        _each_of(crowd, users, put, queue, of_each)
        return float(ray.get(taking, timeout=TIMEOUT_S)) * 1e6 / (of_each * users)

    def through_topic(contestant: str, where: Size) -> float:
        users = int(contestant.split()[0])
        topic, of_each = rtr.Topic(f"crowd {next(numbers)}", home=0), items // users
        _each_of(crowd, users, subscribe, topic)
        listening = [member.run.remote(listen, of_each) for member in crowd[:users]]
        began = on(home, publish, topic, of_each)
        return (max(ray.get(listening, timeout=TIMEOUT_S)) - began) * 1e6 / (of_each * users)

    def to_readers(contestant: str, where: Size) -> float:
        on(home, weights.publish)
        return timed(lambda: each(readers[contestant], weights.pull))

    def first_sum(contestant: str, where: Size) -> float:
        """Form a process group of all members, and sum over them; both connect if needed."""
        began = time.monotonic()
        if contestant == "raytorchrpc":
            group.process_group("gloo", timeout=TIMEOUT_S)
            sums = each(ends, reduced)
        else:
            port = on(home, open_store)
            made = [actor.run.remote(make_gloo, rank, size, port) for rank, actor in enumerate(ends)]
            ray.get(made, timeout=TIMEOUT_S)
            sums = each(ends, reduced_by_gloo)
        if sums != [size] * size:
            raise RuntimeError("a sum over all members is wrong")
        return time.monotonic() - began

    where = [f"{size} members"]
    with rtr.init_group(ends, timeout=TIMEOUT_S) as group:
        each(ends, hold, rtr.WeightStore("crowd", home=0), pick(1 << 20, 1 << 20, 1000))
        figures = compare(
            "a queue's item, 1 KB", through_queue, [f"{n} producers" for n in (many, few)], where, rounds, unit="us"
        )
        topics = [f"{n} subscribers" for n in (many, few)]
        figures += compare("a topic's delivery, 1 KB", through_topic, topics, where, rounds, unit="us")
        figures += compare("16 MB of weights", to_readers, [*readers], where, rounds)
        gloos = "raytorchrpc", "gloo over torch's TCPStore"
        figures += compare("a process group over gloo, and its first sum", first_sum, gloos, where, rounds, unit="s")
        if on(readers["one reader"][0], weights.sums) != on(home, weights.sums):
            raise RuntimeError("the weights arrived changed")
    return figures


def _each_of(crowd: list[Any], users: int, function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function in so many members, with its share of the users."""
    some = crowd[:users]
    shares = [len(range(number, users, len(some))) for number in range(len(some))]
    pairs = zip(some, shares, strict=True)
    return list(ray.get([member.run.remote(function, share, *args) for member, share in pairs], timeout=TIMEOUT_S))


# --- in members ------------------------------------------------------------------------------------------------------


def on_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Results of ``work(number)``, each on a thread of its own."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def put(end: Any, producers: int, queue: rtr.Queue, items: int) -> None:
    me = rtr.current_member().rank

    def produce(number: int) -> None:
        for item in range(items):
            queue.put(((me, number), item, ITEM), timeout=TIMEOUT_S)

    on_threads(producers, produce)


def take(end: Any, queue: rtr.Queue, count: int) -> float:
    """Seconds from the first item to the last; those of each producer have to come in order."""
    began, taken, following = 0.0, 0, dict[Any, int]()
    while taken < count:
        for producer, number, _ in queue.get_many(64, timeout=TIMEOUT_S):
            began = began or time.monotonic()
            if number != following.get(producer, 0):
                raise RuntimeError(f"item {number} of producer {producer} is not {following.get(producer, 0)}")
            following[producer], taken = number + 1, taken + 1
    return time.monotonic() - began


def subscribe(end: Any, subscribers: int, topic: rtr.Topic) -> None:
    end.subscriptions = on_threads(subscribers, lambda number: topic.subscribe())


def publish(end: Any, topic: rtr.Topic, items: int) -> float:
    """When it began (``time.monotonic``)."""
    began = time.monotonic()
    for number in range(items):
        topic.publish((number, ITEM), timeout=TIMEOUT_S)
    return began


def listen(end: Any, items: int) -> float:
    """When the last item arrived at the last subscriber (``time.monotonic``)."""

    def follow(number: int) -> float:
        with end.subscriptions[number] as subscription:
            if [subscription.get(timeout=TIMEOUT_S)[0] for _ in range(items)] != [*range(items)]:
                raise RuntimeError("items are missing, or in another order")
            return time.monotonic()

    return max(on_threads(len(end.subscriptions), follow))


def hold(end: Any, store: rtr.WeightStore, elements: int) -> None:
    end.store, end.model = store, {f"{number}": torch.rand(elements) for number in range(4)}


def reduced(end: Any) -> int:
    """The sum of a one of each member."""
    one = torch.ones(1)
    dist.all_reduce(one, group=rtr.process_group())
    return int(one)


def reduced_by_gloo(end: Any) -> int:
    """The same over what ``make_gloo`` made."""
    one = torch.ones(1)
    end.gloo[1].allreduce([one]).wait()
    return int(one)


def open_store(end: Any) -> int:
    """Returns the port."""
    end.keys = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(end.keys.port)


def make_gloo(end: Any, rank: int, size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    end.gloo = store, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))  # type: ignore[attr-defined]
