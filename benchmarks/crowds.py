"""Patterns that many members use at once: a queue, a topic, weights, and a process group over gloo.

``python -m benchmarks crowds [--members 256] [--out FOLDER] [--tree NAME]`` measures one group of real actors and keeps
the figures in ``FOLDER/crowds.json``, from which ``scale --from-json`` writes the page. Where there are fewer members
than producers or subscribers, each has several, on threads of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist

import raytorchrpc as rtr
from benchmarks import _group_life as life
from benchmarks import _weights, scale
from benchmarks._harness import TIMEOUT_S, Line, Pick, each, on, show, timed

T = TypeVar("T")

ITEM = b"x" * 1000
#: Of the weights: four tensors of so many elements.
ELEMENTS = 1 << 20


def main(pick: Pick, members: str | None = None, out: str | None = None, tree: str | None = None) -> None:
    size = int(members) if members else pick(min(256, 8 * (os.cpu_count() or 1)), 8, 4)
    actors = life.start(size, TIMEOUT_S)
    lines: list[Line] = []
    found = scale.described(tree)
    with rtr.init_group(actors, timeout=TIMEOUT_S) as group:
        for measured in (_queues, _weights_to_all, partial(_process_group, group)):
            lines += measured(actors, pick)
            if out:  # what was measured is kept if the rest fails
                found["crowd"] = {"members": size, "lines": [asdict(line) for line in lines]}
                Path(out).mkdir(parents=True, exist_ok=True)
                Path(out, "crowds.json").write_text(json.dumps(found, indent=1) + "\n")
    life.end(actors)
    show(f"Patterns in a group of {size} members (medians)", lines)


def _queues(actors: list[Any], pick: Pick) -> list[Line]:
    """A queue and a topic at the first member. The second consumes what the others produce; they also subscribe."""
    home, consumer, *crowd = actors
    many, few, items = pick(500, 100, 6), pick(8, 8, 2), pick(10_000, 2_000, 60)
    took = {(what, users): list[float]() for what in ("queue", "topic") for users in (many, few)}
    for turn in range(pick(3, 1, 1)):
        for users in (many, few):
            of_each, some = items // users, crowd[:users]
            shares = [len(range(number, users, len(some))) for number in range(len(some))]
            queue, topic = (kind(f"{users}, {turn}", home=0) for kind in (rtr.Queue, rtr.Topic))
            taking = consumer.run.remote(take, queue, of_each * users)
            _each_of(some, put, shares, queue, of_each)
            took["queue", users].append(ray.get(taking, timeout=TIMEOUT_S) * 1e6 / (of_each * users))
            _each_of(some, subscribe, shares, topic)
            listening = [member.run.remote(listen, of_each) for member in some]
            began = on(home, publish, topic, of_each)
            ended = max(ray.get(listening, timeout=TIMEOUT_S))
            took["topic", users].append((ended - began) * 1e6 / (of_each * users))
    what = {"queue": ("item from", "producers"), "topic": ("delivery to", "subscribers")}
    medians = {key: statistics.median(times) for key, times in took.items()}
    return [
        Line(f"a {name}'s {one} {many} {users}, 1 KB", medians[name, many], medians[name, few], "us", f"{few} {users}")
        for name, (one, users) in what.items()
    ]


def _each_of(members: list[Any], function: Callable[..., T], shares: list[int], *args: Any) -> list[T]:
    """Run a function in each of these, with its share of the users."""
    pairs = zip(members, shares, strict=True)
    return list(ray.get([member.run.remote(function, share, *args) for member, share in pairs], timeout=TIMEOUT_S))


def _weights_to_all(actors: list[Any], pick: Pick) -> list[Line]:
    """Weights of 16 MB from the first member to all others at once."""
    publisher, *readers = actors
    store = rtr.WeightStore("crowd", home=0)
    each(actors, hold, store, pick(ELEMENTS, ELEMENTS, 1000))
    took = {"first": list[float](), "all": list[float](), "one": list[float]()}
    for turn in range(1 + pick(3, 1, 1)):
        for name, some in (("all" if turn else "first", readers), ("one", readers[:1])):
            on(publisher, _weights.publish)
            took[name].append(timed(lambda some=some: each(some, _weights.pull)) * 1e3)  # type: ignore[misc]
        if on(readers[0], _weights.sums) != on(publisher, _weights.sums):
            raise RuntimeError("the weights arrived changed")
    medians = {name: statistics.median(times) for name, times in took.items()}
    what = {"first": f"16 MB of weights to {len(readers)} readers at once, first time", "all": "the same, again"}
    return [Line(text, medians[name], medians["one"], "ms", "one reader") for name, text in what.items()]


def _process_group(group: rtr.Group, actors: list[Any], pick: Pick) -> list[Line]:
    """Form one of all members, and sum over them; beside gloo alone over torch's own store. Both connect if needed."""
    size, ours, torchs = len(actors), list[float](), list[float]()
    for _ in range(pick(3, 1, 1)):
        began = time.monotonic()
        group.process_group("gloo", timeout=TIMEOUT_S)
        sums = each(actors, reduced)
        ours.append(time.monotonic() - began)
        port, began = on(actors[0], open_store), time.monotonic()
        made = [actor.run.remote(make_gloo, rank, size, port) for rank, actor in enumerate(actors)]
        ray.get(made, timeout=TIMEOUT_S)
        sums += each(actors, reduced_by_gloo)
        torchs.append(time.monotonic() - began)
        if sums != [size] * size * 2:
            raise RuntimeError("a sum over all members is wrong")
    medians = statistics.median(ours), statistics.median(torchs)
    what = f"a process group of {size} over gloo, and its first sum"
    return [Line(what, *medians, "s", "gloo over torch's TCPStore")]


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
