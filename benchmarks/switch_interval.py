"""What members pay for their switch interval, in CPU time of a step of their program, and what calls to them gain."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

import raytorchrpc as rtr
from benchmarks._harness import End, Line, Pick, group_of, on, show
from raytorchrpc.calls.member import process_member
from raytorchrpc.process.switch_interval import SwitchInterval

#: Python's own interval, and that of members while calls come (seconds).
PYTHONS_S, SHORT_S = 0.005, rtr.GroupConfig().switch_interval_s or 0.0005
#: Most CPU time, as a ratio, of a program that nobody calls.
PRICE = 1.02
#: Bytes of the argument, by its name, and most milliseconds of a call to a busy member.
SIZES = {"empty": (0, 0.8), "1.25 KB": (1250, 0.9), "10 MB": (10_000_000, 2.0)}
#: Pauses between calls (seconds).
PAUSES = {"closed loop": 0.0, "every 20 ms": 0.02}
#: An interval so long that the time of a call tells how often its callee waited for the lock (seconds), and how often
#: that may be.
LONG_S, MOST_HANDOVERS = 0.02, 2.0

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


def cpu_per_step(end: End, program: str, seconds: float) -> float:
    """Microseconds of the actor's process. Its methods may be called meanwhile."""
    with rtr.allow_calls():
        began = time.process_time()
        made = PROGRAMS[program](seconds)
        return (time.process_time() - began) / max(1, made) * 1e6


def calls(end: End, peer: str, size: int, pause_s: float, count: int) -> list[float]:
    """Milliseconds of each call of ``peer``."""
    value, took = torch.ones(size // 4) if size else None, []
    for _ in range(count):
        began = time.perf_counter()
        rtr.rpc_sync(peer).take(value) if size else rtr.rpc_sync(peer).take()
        took.append((time.perf_counter() - began) * 1e3)
        if pause_s:
            time.sleep(pause_s)
    return took


def run_python(end: Any) -> None:
    """Keep the actor's process busy from now on."""

    def work() -> None:
        while not idle.is_set():
            sum(range(50))

    end.idle = idle = threading.Event()
    threading.Thread(target=work, daemon=True).start()


def run_nothing(end: Any) -> None:
    end.idle.set()


def set_interval(end: End, seconds: float, shortened: bool) -> None:
    """Set the interval of the actor's process, and whether calls shorten it; none has come yet."""
    local = process_member()
    if local.incoming.interval is not None:
        local.incoming.interval.end()
    new = SwitchInterval(SHORT_S, local.deadlines) if shortened else None
    local.incoming.interval = local.outgoing.interval = new
    sys.setswitchinterval(seconds)


def nothing(end: End) -> None:
    """Runs in the actor."""


def calls_of_ray(end: Any) -> float:
    """Microseconds of a call through Ray."""
    count, began = 200, time.perf_counter()
    ray.get([end.run.remote(nothing) for _ in range(count)])
    return (time.perf_counter() - began) / count * 1e6


def prices(ends: Sequence[Any], pick: Pick, called: bool) -> list[Line]:
    """Each measurement is with and without the setting, in an order of its own."""
    count, seconds = pick(20, 6, 1), pick(0.25, 0.2, 0.05)
    callee, caller = ends
    lines = []
    programs = list(PROGRAMS)
    for program in [*pick(programs, programs, programs[:1]), *([] if called else ["Ray's own calls"])]:
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(count):
            for shortened in random.sample([True, False], 2):
                on(callee, set_interval, PYTHONS_S, shortened)
                if program not in PROGRAMS:
                    found[shortened].append(calls_of_ray(callee))
                    continue
                step = callee.run.remote(cpu_per_step, program, seconds)
                if called:
                    on(caller, calls, "callee", 0, 0.02, int(seconds / 0.025))
                found[shortened].append(ray.get(step))
        ours, own = statistics.median(found[True]), statistics.median(found[False])
        lines.append(Line(program, ours, own, "us", "5 ms", None if called else PRICE))
    return lines


def gains(ends: Sequence[Any], pick: Pick) -> list[Line]:
    """Calls of a member that runs Python, from one that does not and then from one that does."""
    turns, count = pick(6, 3, 1), pick(20, 13, 5)
    callee, caller = ends
    lines = []
    for busy in ("callee", "both ends"):
        on(callee if busy == "callee" else caller, run_python)
        for pause, pause_s in PAUSES.items():
            for size, (size_bytes, most_ms) in SIZES.items():
                found: dict[bool, list[float]] = {True: [], False: []}
                for _ in range(turns):
                    for shortened in random.sample([True, False], 2):
                        for end in ends:
                            on(end, set_interval, PYTHONS_S, shortened)
                        found[shortened] += on(caller, calls, "callee", size_bytes, pause_s, count)[3:]
                most = most_ms if busy == "callee" else 2 * most_ms
                for name, share in (("median", 0.5), ("95 %", 0.95)):
                    ours, own = (sorted(found[each])[int(share * len(found[each]))] for each in (True, False))
                    target = most / own if name == "median" else None
                    lines.append(Line(f"{busy}: {size}, {pause}, {name}", ours, own, "ms", "5 ms", target))
    for end in ends:
        on(end, run_nothing)
    return lines


def handovers(ends: Sequence[Any], pick: Pick) -> list[Line]:
    """How often a callee that runs Python waits for the interpreter lock, in each call."""
    count = pick(43, 23, 5)
    callee, caller = ends
    lines = []
    on(callee, set_interval, LONG_S, False)
    on(callee, run_python)
    for pause, pause_s in PAUSES.items():
        for size, (size_bytes, _) in SIZES.items():
            took = on(caller, calls, "callee", size_bytes, pause_s, count)[3:]
            waits = statistics.mean(took) / (LONG_S * 1e3)
            lines.append(Line(f"{size}, {pause}", waits, MOST_HANDOVERS, "per call", "at most", 1.0))
    on(callee, run_nothing)
    return lines


def main(pick: Pick) -> None:
    with group_of("callee", "caller") as (_, members):
        ends = list(members.values())
        show("CPU time of a step of a program that nobody calls, medians", prices(ends, pick, called=False))
        show("The same with 40 calls a second", prices(ends, pick, called=True))
        show("Calls of members that run Python", gains(ends, pick))
        show("Hand-overs of the interpreter lock in a callee that runs Python", handovers(ends, pick))
