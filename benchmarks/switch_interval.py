"""What members pay for their switch interval, in CPU time of a step of their program, and what calls to them gain."""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

import raytorchrpc as rtr
from benchmarks._harness import End, Pick, compare, group_of, on, timed
from raytorchrpc.bench.cases import Figure
from raytorchrpc.calls.member import process_member
from raytorchrpc.process.switch_interval import SwitchInterval

#: Python's own interval, and that of members while calls come (seconds).
PYTHONS_S, SHORT_S = 0.005, rtr.GroupConfig().switch_interval_s or 0.0005
CONTESTANTS = "shortened", "5 ms"
#: Bytes of the argument, by its name.
SIZES = {"empty": 0, "1.25 KB": 1250, "10 MB": 10_000_000}


def python_threads(count: int) -> Callable[[float], int]:
    """Threads that compute in Python for so many seconds; returns how many steps they made."""

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
    data, weights = TensorDataset(torch.rand(4096, 64)), torch.rand(64, 64)
    made, until, pins = 0, time.perf_counter() + seconds, torch.cuda.is_available()
    while time.perf_counter() < until:
        for (batch,) in DataLoader(data, 64, num_workers=2, pin_memory=pins, multiprocessing_context="fork"):
            torch.relu(batch @ weights).sum().item()
            made += 1
    return made


PROGRAMS = {f"{count} Python threads": python_threads(count) for count in (1, 2, 8)} | {"DataLoader": loader}


def cpu_per_step(end: End, program: str, seconds: float) -> float:
    """Microseconds of the actor's process. Its methods may be called meanwhile."""
    with rtr.allow_calls():
        began = time.process_time()
        made = PROGRAMS[program](seconds)
        return (time.process_time() - began) / max(1, made) * 1e6


def calls(end: End, peer: str, size: int, pause_s: float, count: int) -> float:
    """Median milliseconds of calls of ``peer``."""
    arguments, took = [torch.ones(size // 4)] if size else [], []
    for _ in range(count):
        took.append(timed(lambda: rtr.rpc_sync(peer).take(*arguments)))
        time.sleep(pause_s)
    return statistics.median(took)


def run_python(end: Any) -> None:
    """Keep the actor's process busy until ``run_nothing``."""
    end.idle = idle = threading.Event()

    def work() -> None:
        while not idle.is_set():
            sum(range(50))

    threading.Thread(target=work, daemon=True).start()


def run_nothing(end: Any) -> None:
    end.idle.set()


def set_interval(end: End, shortened: bool) -> None:
    """Set whether calls shorten the interval of the actor's process; none has come yet."""
    local = process_member()
    if local.incoming.interval is not None:
        local.incoming.interval.end()
    new = SwitchInterval(SHORT_S, local.deadlines) if shortened else None
    local.incoming.interval = local.outgoing.interval = new
    sys.setswitchinterval(PYTHONS_S)


def switch_interval(pick: Pick) -> list[Figure]:
    rounds, seconds = pick(20, 6, 1), pick(0.25, 0.2, 0.05)
    programs, sizes = pick([*PROGRAMS], [*PROGRAMS], [*PROGRAMS][:1]), pick([*SIZES], [*SIZES], [*SIZES][:1])
    with group_of("callee", "caller") as (_, members):
        callee, caller = members.values()

        def price(contestant: str, program: str, called: bool) -> float:
            time.sleep(random.random() * 0.01)  # the machine has periods of its own
            on(callee, set_interval, contestant == "shortened")
            step = callee.run.remote(cpu_per_step, program, seconds)
            if called:
                on(caller, calls, "callee", 0, 0.02, int(seconds / 0.025))
            return float(ray.get(step))

        def gain(contestant: str, size: str) -> float:
            for end in (callee, caller):
                on(end, set_interval, contestant == "shortened")
            return on(caller, calls, "callee", SIZES[size], 0.02, pick(20, 13, 5))

        figures = []
        for called, when in ((False, "that nobody calls"), (True, "with 40 calls a second")):
            name = f"CPU time of a step of a program {when}"
            figures += compare(
                name, lambda *at, called=called: price(*at, called), CONTESTANTS, programs, rounds, unit="us"
            )
        for busy in ("the callee runs", "both ends run"):
            on(callee if busy == "the callee runs" else caller, run_python)
            figures += compare(f"calls every 20 ms while {busy} Python", gain, CONTESTANTS, sizes, pick(6, 3, 1))
        for end in (callee, caller):
            on(end, run_nothing)
    return figures
