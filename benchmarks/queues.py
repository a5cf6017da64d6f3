"""Queues between actors of one host: ours, also by ``integrations.ray_queue``, beside those of Ray and of Python."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import Any, NamedTuple

import ray
import torch
from ray.util.queue import Queue as RayQueue

import raytorchrpc as rtr
from benchmarks._harness import TIMEOUT_S, End, Pick, compare, group_of, on, timed
from raytorchrpc.bench.cases import Figure, Skipped
from raytorchrpc.integrations.ray_queue import Queue as DropIn


class Items(NamedTuple):
    """What goes through a queue in a turn."""

    size: int
    """Bytes of a tensor; 0: a number."""
    count: int
    batch: int
    fewer: int
    """By how much fewer go through Ray's slower queue."""
    producers: int = 1


KINDS = {
    "number": Items(0, 2_000, 1, 8),
    "number, 4 producers": Items(0, 2_000, 1, 8, 4),
    "number, batches of 64": Items(0, 32_000, 64, 8),
    "8 KB": Items(8_192, 2_000, 1, 16),
    "8 KB, 4 producers": Items(8_192, 2_000, 1, 16, 4),
    "8 KB, batches of 64": Items(8_192, 12_800, 64, 16),
    "40 MB": Items(40_000_000, 20, 1, 2),
}
#: Queues with the interface of Ray's.
AS_RAY = {"as ray.util.queue": DropIn, "ray.util.queue": RayQueue}


def put(end: End | None, queue: Any, items: Items, count: int) -> None:
    value: Any = torch.ones(items.size // 4) if items.size else 1
    batches = getattr(queue, "put_nowait_batch", None) or getattr(queue, "put_many", None)
    for _ in range(0, count, items.batch):
        if items.batch == 1:
            queue.put(value)
        elif batches:
            batches([value] * items.batch)
        else:
            queue.put([value] * items.batch)


def get(end: End | None, queue: Any, items: Items, count: int) -> float:
    """Milliseconds from the first item to the last, for one item."""
    began, taken = 0.0, 0
    while taken < count:
        if items.batch == 1:
            queue.get()
            taken += 1
        elif isinstance(queue, rtr.Queue):
            taken += len(queue.get_many(items.batch))
        elif hasattr(queue, "get_nowait_batch"):  # it needs complete batches
            there = min(items.batch, queue.qsize(), count - taken)
            taken += len(queue.get_nowait_batch(there) if there else [queue.get()])
        else:
            taken += len(queue.get())
        began = began or time.perf_counter()
    return (time.perf_counter() - began) * 1e3 / count


def put_with_others(start: Any, taken: Any, queue: Any, items: Items, count: int) -> None:
    start.wait()
    put(None, queue, items, count)
    taken.wait(TIMEOUT_S)  # tensors end with the process that has put them


def among_processes(items: Items, count: int) -> float:
    """Likewise, through a queue of Python's from children of this process."""
    spawn = multiprocessing.get_context("spawn")
    queue, start, taken = spawn.Queue(), spawn.Barrier(items.producers), spawn.Event()
    children = [
        spawn.Process(target=put_with_others, args=(start, taken, queue, items, count)) for _ in range(items.producers)
    ]
    for child in children:
        child.start()
    try:
        return get(None, queue, items, count * items.producers)
    finally:
        taken.set()
        for child in children:
            child.join()


def calls(end: End, peer: str, size: int, count: int) -> float:
    """Milliseconds of a direct call with such a tensor: the speed of the lane."""
    tensor, direct = torch.ones(size // 4), rtr.rpc_sync(peer)
    return timed(lambda: [direct.take(tensor) for _ in range(count)]) / count


def queues(pick: Pick) -> list[Figure]:
    numbers = itertools.count()
    with group_of("consumer", "producer", "producer_1", "producer_2", "producer_3") as (_, ends):
        consumer, *producers = ends.values()

        def turn(contestant: str, kind: str) -> float:
            items = KINDS[kind]
            count = pick(items.count, items.count // 2, 256) // items.producers
            if contestant == "ray.util.queue":
                count = max(items.batch, count // items.fewer)
            count = count // items.batch * items.batch
            if contestant == "direct calls":
                if items.size < 1_000_000:
                    raise Skipped("only large tensors are compared with calls")
                return on(producers[0], calls, "consumer", items.size, count)
            if contestant == "multiprocessing.Queue":
                return among_processes(items, count)
            queue: Any
            if contestant in AS_RAY:
                queue = AS_RAY[contestant](actor_options={"num_cpus": 0})
                for end in ends.values():  # every process has it, and has used it
                    on(end, lambda _, queue: queue.qsize(), queue)
            else:
                # A short queue reuses the memory of large items sooner.
                room = 4 if items.size > 1_000_000 else 2 * max(items.batch, 500)
                queue = rtr.Queue(f"bench {next(numbers)}", home=contestant.split()[-1], maxsize=room)
            gets = consumer.run.remote(get, queue, items, count * items.producers)
            ray.get([end.run.remote(put, queue, items, count) for end in producers[: items.producers]])
            took = float(ray.get(gets))
            if contestant in AS_RAY:
                queue.shutdown(force=True)
            return took

        contestants = "home: consumer", "home: producer", *AS_RAY, "multiprocessing.Queue", "direct calls"
        return compare("a queue's item", turn, contestants, pick([*KINDS], [*KINDS], [*KINDS][:1]), pick(3, 1, 1))
