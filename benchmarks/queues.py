"""Queues between two actors of one host against ``ray.util.queue.Queue``: small items, batches, large CPU tensors."""

from __future__ import annotations

import statistics
import time
from typing import Any

import ray
import torch
from ray.util.queue import Queue as RayQueue

import raytorchrpc as rtr
from benchmarks._harness import Row, local_ray, show

#: (what, bytes of a tensor (0: a small dict), items, items in a batch, target).
CASES = [
    ("small items, one by one", 0, 2_000, 1, 0.2),
    ("small items, batches of 500", 0, 100_000, 500, 0.2),
    ("20 KB tensors, batches of 50", 20_000, 2_000, 50, 0.2),
    ("40 MB tensors", 40_000_000, 20, 1, 0.2),
]
#: Ray's slower queue gets a fraction of the items, and its time is scaled.
RAYS_SHARE = {0: 20, 20_000: 4, 40_000_000: 2}


@ray.remote(num_cpus=0)
class End:
    """Producer or consumer."""

    @rtr.method
    def take(self, tensor: torch.Tensor) -> int:
        return tensor.numel()

    def put(self, queue: Any, size: int, count: int, batch: int) -> None:
        tensor = torch.ones(size // 4) if size else None
        items = [tensor if size else {"step": number, "reward": 1.5} for number in range(min(count, 1000))]
        put_many = queue.put_nowait_batch if isinstance(queue, RayQueue) else queue.put_many
        for begin in range(0, count, batch):
            if batch == 1:
                queue.put(items[begin % len(items)])
            else:
                put_many(items[:batch])

    def get(self, queue: Any, count: int, batch: int) -> float:
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

    def calls(self, peer: Any, size: int, count: int) -> float:
        """Seconds for the same tensors by direct calls: the speed of the lane."""
        tensor, direct = torch.ones(size // 4), rtr.rpc_sync(peer)
        direct.take(tensor)
        start = time.perf_counter()
        for _ in range(count):
            direct.take(tensor)
        return time.perf_counter() - start


def seconds(producer: Any, consumer: Any, queue: Any, size: int, count: int, batch: int) -> float:
    """Seconds for ``count`` items."""
    gets = consumer.get.remote(queue, count, batch)
    ray.get(producer.put.remote(queue, size, count, batch))
    return float(ray.get(gets))


def main(quick: bool = False) -> None:
    with local_ray():
        producer, consumer = End.remote(), End.remote()
        rows, rates = [], []
        with rtr.init_group({"producer": producer, "consumer": consumer}):
            for what, size, count, batch, target in CASES:
                share = RAYS_SHARE[size]
                took: dict[str, list[float]] = {"consumer": [], "producer": [], "ray": [], "calls": []}
                for turn in range(1 if quick else 3):
                    for home in ("consumer", "producer"):
                        # A short queue reuses the memory of large items sooner.
                        maxsize = 4 if size >= 1_000_000 else 2 * max(batch, 500)
                        queue = rtr.Queue(f"{what} {home} {turn}", home=home, maxsize=maxsize)
                        took[home].append(seconds(producer, consumer, queue, size, count, batch))
                    plain = RayQueue(actor_options={"num_cpus": 0})
                    took["ray"].append(seconds(producer, consumer, plain, size, count // share, batch) * share)
                    plain.shutdown(force=True)
                    if size >= 1_000_000:
                        took["calls"].append(ray.get(producer.calls.remote("consumer", size, count)))
                ms = {path: statistics.median(values) * 1e3 / count for path, values in took.items() if values}
                rows.append(Row(f"{what}, home: consumer", ms["consumer"], ms["ray"], "ms", "ray.util.queue", target))
                rows.append(Row(f"{what}, home: producer", ms["producer"], ms["ray"], "ms", "ray.util.queue", target))
                if "calls" in ms:
                    rows.append(Row(f"{what}, home: consumer", ms["consumer"], ms["calls"], "ms", "direct calls"))
                rates.append((what, 1e3 / ms["consumer"], 1e3 / ms["producer"], 1e3 / ms["ray"]))
    show("Queues between two actors of one host (medians, for one item)", rows)
    for what, at_consumer, at_producer, plain in rates:
        print(f"  {what:<32}{at_consumer:>10.0f} items/s, home at the producer {at_producer:>9.0f}, Ray {plain:>8.0f}")
