"""Queues between two actors of one host beside ``ray.util.queue.Queue``: small items, batches, large CPU tensors."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import ray
import torch
from ray.util.queue import Queue as RayQueue

import raytorchrpc as rtr
from benchmarks._harness import End, Pick, compare, group_of, on, timed
from raytorchrpc.bench.cases import Figure, Skipped


class Items(NamedTuple):
    """What goes through a queue in a turn."""

    size: int
    """Bytes of a tensor; 0: a small dict."""
    count: int
    batch: int
    fewer: int
    """By how much fewer go through Ray's slower queue."""


KINDS = {
    "small, one by one": Items(0, 2_000, 1, 20),
    "small, batches of 500": Items(0, 100_000, 500, 20),
    "20 KB, batches of 50": Items(20_000, 2_000, 50, 4),
    "40 MB": Items(40_000_000, 20, 1, 2),
}


def put(end: End, queue: Any, items: Items, count: int) -> None:
    value = torch.ones(items.size // 4) if items.size else {"step": 1, "reward": 1.5}
    put_many = queue.put_nowait_batch if isinstance(queue, RayQueue) else queue.put_many
    for _ in range(0, count, items.batch):
        if items.batch == 1:
            queue.put(value)
        else:
            put_many([value] * items.batch)


def get(end: End, queue: Any, items: Items, count: int) -> float:
    """Milliseconds from the first item to the last, for one item."""
    began, taken = 0.0, 0
    while taken < count:
        if items.batch == 1:
            queue.get()
            taken += 1
        elif isinstance(queue, RayQueue):  # it needs complete batches
            there = min(items.batch, queue.qsize(), count - taken)
            taken += len(queue.get_nowait_batch(there) if there else [queue.get()])
        else:
            taken += len(queue.get_many(items.batch))
        began = began or time.perf_counter()
    return (time.perf_counter() - began) * 1e3 / count


def calls(end: End, peer: str, size: int, count: int) -> float:
    """Milliseconds of a direct call with such a tensor: the speed of the lane."""
    tensor, direct = torch.ones(size // 4), rtr.rpc_sync(peer)
    return timed(lambda: [direct.take(tensor) for _ in range(count)]) / count


def queues(pick: Pick) -> list[Figure]:
    numbers = itertools.count()
    with group_of("producer", "consumer") as (_, ends):
        producer, consumer = ends.values()

        def turn(contestant: str, kind: str) -> float:
            items = KINDS[kind]
            count = pick(items.count, items.count // 2, 200)
            if contestant == "direct calls":
                if not items.size:
                    raise Skipped("only tensors are compared with calls")
                return on(producer, calls, "consumer", items.size, count)
            queue: Any
            if contestant == "ray.util.queue":
                queue, count = RayQueue(actor_options={"num_cpus": 0}), count // items.fewer
            else:
                # A short queue reuses the memory of large items sooner.
                room = 4 if items.size > 1_000_000 else 2 * max(items.batch, 500)
                queue = rtr.Queue(f"bench {next(numbers)}", home=contestant.split()[-1], maxsize=room)
            gets = consumer.run.remote(get, queue, items, count)
            on(producer, put, queue, items, count)
            took = float(ray.get(gets))
            if contestant == "ray.util.queue":
                queue.shutdown(force=True)
            return took

        contestants = "home: consumer", "home: producer", "ray.util.queue", "direct calls"
        return compare("a queue's item", turn, contestants, pick([*KINDS], [*KINDS], [*KINDS][:1]), pick(3, 1, 1))
