"""Duration of ``init_group`` for live actors by group size, and CPU time of idle members."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import ray

import raytorchrpc as rtr
from benchmarks._harness import Row, local_ray, show

SIZES = (8, 16, 32)


@ray.remote(num_cpus=0)
class Idler:
    @rtr.method
    def null(self) -> None:
        return None

    def alive(self) -> int:
        return os.getpid()

    def cpu_seconds(self) -> float:
        times = os.times()
        return times.user + times.system


def _form(actors: list[Any]) -> float:
    start = time.perf_counter()
    group = rtr.init_group(actors)
    took = time.perf_counter() - start
    group.shutdown()
    return took


def main(quick: bool = False) -> None:
    with local_ray():
        sizes = SIZES[:1] if quick else SIZES
        actors = [Idler.remote() for _ in range(max(sizes))]
        ray.get([actor.alive.remote() for actor in actors])
        first, again = {}, {}
        done = 0
        for size in sizes:  # a process's first group also starts its torchrpc agent
            fresh = actors[done : done + size] if done + size <= len(actors) else None
            if fresh:
                first[size] = _form(fresh)
                done += size
        for size in sizes:
            again[size] = statistics.median(_form(actors[:size]) for _ in range(3 if quick else 7))
        limits = {8: 0.5, 16: None, 32: 2.0}
        rows = [
            Row(f"{size} members", took, limits[size] or 1.0, "s", "limit", 1.0 if limits[size] else None)
            for size, took in again.items()
        ]
        rows += [Row(f"{size} members, first time", took, 1.0, "s", "(1 s)") for size, took in first.items()]
        if not quick:
            rows.append(Row("growth from 8 to 32", again[32], again[8] * 4, "s", "linear growth", 1.0))
        show("init_group of living actors (medians)", rows)
        _idle(actors, quick)


def _idle(actors: list[Any], quick: bool) -> None:
    """Compare the CPU time of idle members with that of the same actors outside a group."""
    window = 2.0 if quick else 5.0

    def spent() -> float:
        before = ray.get([actor.cpu_seconds.remote() for actor in actors])
        deadline = time.monotonic() + window
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(left)
        after = ray.get([actor.cpu_seconds.remote() for actor in actors])
        return sum(after) - sum(before)

    alone = spent()
    with rtr.init_group(actors):
        joined = spent()
    share = 100 / window / len(actors)
    print(f"  idle CPU per actor: {alone * share:.2f} % of a core outside a group, {joined * share:.2f} % inside")
