"""Direct calls against Ray's, between the same two actors: empty, and with CPU tensors of several sizes."""

from __future__ import annotations

import statistics
import time
from typing import Any

import ray
import torch
import torch.distributed.rpc as rpc

import raytorchrpc as rtr
from benchmarks._harness import Row, interleaved, local_ray, show


def nothing() -> None:
    """The callee of the bare torchrpc row."""


@ray.remote(num_cpus=0)
class Callee:
    @rtr.method
    def null(self) -> None:
        return None

    @rtr.method
    def take(self, tensor: torch.Tensor) -> int:
        return tensor.numel()


@ray.remote(num_cpus=0)
class Caller:
    def null(self, callee: Any, name: str, repeats: int) -> dict[str, float]:
        direct, worker = rtr.rpc_sync(callee), rpc.get_worker_info(name)
        return interleaved(
            {
                "direct": direct.null,
                "ray": lambda: ray.get(callee.null.remote()),
                "torchrpc": lambda: rpc.rpc_sync(worker, nothing),
            },
            repeats,
            warmup=50,
        )

    def tensor(self, callee: Any, size: int, repeats: int) -> dict[str, float]:
        tensor = torch.ones(size // 4)
        direct = rtr.rpc_sync(callee)
        return interleaved(
            {"direct": lambda: direct.take(tensor), "ray": lambda: ray.get(callee.take.remote(tensor))}, repeats
        )

    def in_flight(self, callee: Any, window: int, seconds: float) -> dict[str, float]:
        direct = rtr.rpc_async(callee)
        return {
            "direct": _rate(direct.null, lambda future: future.wait(), window, seconds),
            "ray": _rate(callee.null.remote, ray.get, window, seconds),
        }


def _rate(send: Any, finish: Any, window: int, seconds: float) -> float:
    """Calls per second with ``window`` of them in flight."""
    from collections import deque

    waiting: deque[Any] = deque()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        waiting.append(send())
        if len(waiting) >= window:
            finish(waiting.popleft())
            count += 1
    while waiting:
        finish(waiting.popleft())
        count += 1
    return count / (time.perf_counter() - start)


def main(quick: bool = False) -> None:
    with local_ray():
        caller, callee = Caller.remote(), Callee.remote()
        with rtr.init_group({"caller": caller, "callee": callee}) as group:
            name = group.members[1].rpc_name
            null = ray.get(caller.null.remote(callee, name, 300 if quick else 2000))
            rows = [
                Row("empty call", null["direct"] * 1e3, null["ray"] * 1e3, "ms", "Ray actor call", 0.7),
                Row("empty call", null["direct"] * 1e3, null["torchrpc"] * 1e3, "ms", "torch rpc_sync"),
            ]
            for size, repeats, target in (
                (20_000, 200, None),
                (1_250_000, 60, None),
                (10_000_000, 20, None),
                (40_000_000, 9, 0.5),
                (640_000_000, 3, None),
            ):
                if quick and size > 40_000_000:
                    continue
                took = ray.get(caller.tensor.remote(callee, size, repeats))
                rows.append(
                    Row(f"CPU tensor, {size / 1e6:g} MB", took["direct"] * 1e3, took["ray"] * 1e3, "ms", "Ray", target)
                )
            show("Calls between two actors of one host (medians)", rows)
            for window in (1, 8, 64):
                rates = [ray.get(caller.in_flight.remote(callee, window, 0.5)) for _ in range(1 if quick else 5)]
                direct, plain = (statistics.median(rate[key] for rate in rates) for key in ("direct", "ray"))
                print(f"  {window:>3} in flight: {direct:>8.0f} calls/s, Ray {plain:>7.0f} ({direct / plain:.1f} x)")
