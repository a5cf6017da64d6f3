"""Queues between two actors of one host against ``ray.util.queue.Queue``: small items, batches, large CPU tensors."""

from __future__ import annotations

import statistics
import time
from typing import Any

import ray
import torch
from ray.util.queue import Queue as RayQueue

import raytorchrpc as rtr
from benchmarks._harness import End, Line, Pick, group_of, on, show, timed

#: (what, bytes of a tensor (0: a small dict), items, items in a batch, by how much fewer items go through Ray's slower
#: queue, whose time is scaled)
CASES = [
    ("small items, one by one", 0, 2_000, 1, 20),
    ("small items, batches of 500", 0, 100_000, 500, 20),
    ("20 KB tensors, batches of 50", 20_000, 2_000, 50, 4),
    ("40 MB tensors", 40_000_000, 20, 1, 2),
]
TARGET = 0.2


def put(end: End, queue: Any, size: int, count: int, batch: int) -> None:
    tensor = torch.ones(size // 4) if size else None
    items = [tensor if size else {"step": number, "reward": 1.5} for number in range(min(count, 1000))]
    put_many = queue.put_nowait_batch if isinstance(queue, RayQueue) else queue.put_many
    for begin in range(0, count, batch):
        if batch == 1:
            queue.put(items[begin % len(items)])
        else:
            put_many(items[:batch])


def get(end: End, queue: Any, count: int, batch: int) -> float:
    """Seconds from the first item to the last."""
    began, taken = 0.0, 0
    while taken < count:
        if batch == 1:
            queue.get()
            taken += 1
        elif isinstance(queue, RayQueue):  # it needs complete batches
            there = min(batch, queue.qsize(), count - taken)
            taken += len(queue.get_nowait_batch(there) if there else [queue.get()])
        else:
            taken += len(queue.get_many(batch))
        began = began or time.perf_counter()
    return time.perf_counter() - began


def calls(end: End, peer: str, size: int, count: int) -> float:
    """Seconds for the same tensors by direct calls: the speed of the lane."""
    tensor, direct = torch.ones(size // 4), rtr.rpc_sync(peer)
    direct.take(tensor)
    return timed(lambda: [direct.take(tensor) for _ in range(count)])


def main(pick: Pick) -> None:
    lines, rates = [], []
    with group_of("producer", "consumer") as (_, ends):
        producer, consumer = ends.values()

        def seconds(queue: Any, size: int, count: int, batch: int) -> float:
            gets = consumer.run.remote(get, queue, count, batch)
            on(producer, put, queue, size, count, batch)
            return float(ray.get(gets))

        for what, size, full, batch, fewer in pick(CASES, CASES, CASES[:1]):
            count, large = pick(full, full, 200), size >= 1_000_000
            took: dict[str, list[float]] = {"consumer": [], "producer": [], "ray": [], "calls": []}
            for turn in range(pick(3, 1, 1)):
                for home in ("consumer", "producer"):
                    # A short queue reuses the memory of large items sooner.
                    queue: Any = rtr.Queue(
                        f"{what} {home} {turn}", home=home, maxsize=4 if large else 2 * max(batch, 500)
                    )
                    took[home].append(seconds(queue, size, count, batch))
                rays = RayQueue(actor_options={"num_cpus": 0})
                took["ray"].append(seconds(rays, size, count // fewer, batch) * fewer)
                rays.shutdown(force=True)
                if large:
                    took["calls"].append(on(producer, calls, "consumer", size, count))
            ms = {path: statistics.median(values) * 1e3 / count for path, values in took.items() if values}
            for home in ("consumer", "producer"):
                lines.append(Line(f"{what}, home: {home}", ms[home], ms["ray"], "ms", "ray.util.queue", TARGET))
            if large:
                lines.append(Line(f"{what}, home: consumer", ms["consumer"], ms["calls"], "ms", "direct calls"))
            rate = ", ".join(f"{name} {1e3 / ms[name]:.0f}" for name in ("consumer", "producer", "ray"))
            rates.append(f"  {what}: items/s with the home at {rate}")
    show("Queues between two actors of one host (medians, for one item)", lines)
    print("\n".join(rates))
