"""What a short switch interval costs a process that nobody calls: CPU time of each step of its program against 5 ms."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._harness import End, Line, Pick, actors, on, show

#: Seconds: the default of members, others to compare with, and Python's own.
INTERVALS, PYTHONS = (0.0005, 0.001, 0.0001), 0.005
#: As a ratio of CPU time.
TARGET = 1.02

#: Runs for so many seconds; returns how many steps it made.
Program = Callable[[float], int]


def python_threads(count: int) -> Program:
    """Threads that compute in Python, and nothing else."""

    def run(seconds: float) -> int:
        made, until = [0] * count, time.perf_counter() + seconds

        def work(number: int) -> None:
            while time.perf_counter() < until:
                made[number] += sum(range(50)) > 0

        others = [threading.Thread(target=work, args=(number,)) for number in range(1, count)]
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()
        return sum(made)

    return run


def loader(seconds: float) -> int:
    """A training loop that takes its batches from a DataLoader, whose threads run in this process too."""
    data = TensorDataset(torch.rand(4096, 64))
    weights, made, until = torch.rand(64, 64), 0, time.perf_counter() + seconds
    pins = torch.cuda.is_available()
    while time.perf_counter() < until:
        for (batch,) in DataLoader(data, 64, num_workers=2, pin_memory=pins, multiprocessing_context="fork"):
            torch.relu(batch @ weights).sum().item()
            made += 1
    return made


def coroutines(seconds: float) -> int:
    """An event loop with 16 coroutines, one of which uses a thread."""
    made, until = 0, time.perf_counter() + seconds

    async def work(in_thread: bool) -> None:
        nonlocal made
        while time.perf_counter() < until:
            await (asyncio.to_thread(sum, range(200)) if in_thread else asyncio.sleep(0))
            sum(range(50))
            made += 1

    async def all_of_them() -> None:
        await asyncio.gather(*(work(number == 0) for number in range(16)))

    asyncio.run(all_of_them())
    return made


PROGRAMS: dict[str, Program] = {
    "1 Python thread": python_threads(1),
    "2 Python threads": python_threads(2),
    "8 Python threads": python_threads(8),
    "DataLoader, 2 workers": loader,
    "16 coroutines": coroutines,
}


def cpu_per_step(program: Program, interval_s: float, *, seconds: float) -> float:
    """Microseconds of this process."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        began = time.process_time()
        made = program(seconds)
        return (time.process_time() - began) / max(1, made) * 1e6
    finally:
        sys.setswitchinterval(before)


def pairs(measure: Callable[[float], float], interval_s: float, count: int) -> tuple[float, float]:
    """The medians of ``measure(interval)`` at ``interval_s`` and at Python's own; each pair in an order of its own."""
    found: dict[float, list[float]] = {interval_s: [], PYTHONS: []}
    for _ in range(count):
        for each in random.sample([interval_s, PYTHONS], 2):
            found[each].append(measure(each))
    return statistics.median(found[interval_s]), statistics.median(found[PYTHONS])


def main(pick: Pick) -> None:
    count, seconds = pick(20, 8, 2), pick(0.4, 0.2, 0.05)
    with actors(1) as (end,):

        def of_ray(interval_s: float) -> float:
            """Microseconds of a call through Ray to an actor with that interval."""
            on(end, _set, interval_s)
            calls, began = 200, time.perf_counter()
            ray.get([end.run.remote(_nothing) for _ in range(calls)])
            return (time.perf_counter() - began) / calls * 1e6

        measures = {name: partial(cpu_per_step, program, seconds=seconds) for name, program in PROGRAMS.items()}
        lines = []
        for interval_s in pick(INTERVALS, INTERVALS[:1], INTERVALS[:1]):
            for name, measure in {**measures, "Ray's own calls (time)": of_ray}.items():
                ours, python = pairs(measure, interval_s, count)
                target = TARGET if interval_s == INTERVALS[0] else None
                lines.append(Line(f"{name}, {interval_s * 1e3:g} ms", ours, python, "us", "5 ms", target))
    show("CPU time of a step of a program that nobody calls, medians", lines)


def _set(end: End, interval_s: float) -> None:
    sys.setswitchinterval(interval_s)


def _nothing(end: End) -> None:
    """Runs in the actor."""
