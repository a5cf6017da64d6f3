"""Duration of ``init_group`` for living actors by group size, and CPU time of idle members."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import raytorchrpc as rtr
from benchmarks._harness import Line, Pick, actors, each, show, timed

SIZES, LIMITS_S = (8, 16, 32), {8: 0.5, 32: 2.0}


def cpu_seconds(end: Any) -> float:
    return os.times().user + os.times().system


def _form(ends: list[Any]) -> float:
    start = time.perf_counter()
    group = rtr.init_group(ends)
    took = time.perf_counter() - start
    group.shutdown()
    return took


def main(pick: Pick) -> None:
    sizes = pick(SIZES, SIZES[:1], (2,))
    fresh = pick(True, True, False)  # a process's first group also starts its torchrpc agent
    with actors(sum(sizes), fresh=fresh) as ends:
        places = [sum(sizes[:number]) for number in range(len(sizes))]
        first = {size: _form(ends[at : at + size]) for at, size in zip(places, sizes, strict=True)}
        again = {size: statistics.median(_form(ends[:size]) for _ in range(pick(7, 3, 1))) for size in sizes}
        lines = [Line(f"{n} members", s, LIMITS_S.get(n, 1.0), "s", "limit", LIMITS_S.get(n) and 1.0)
                 for n, s in again.items()]  # fmt: skip
        lines += [Line(f"{n} members, first time", took, 1.0, "s", "(1 s)") for n, took in first.items()]
        if 32 in again:
            lines.append(Line("growth from 8 to 32", again[32], again[8] * 4, "s", "linear growth", 1.0))
        show("init_group of living actors (medians)", lines)
        _idle(ends[: max(sizes)], pick(5.0, 2.0, 0.1))


def _idle(ends: list[Any], window_s: float) -> None:
    """Compare the CPU time of idle members with that of the same actors outside a group."""

    def share() -> float:
        before = sum(each(ends, cpu_seconds))
        wait = timed(lambda: time.sleep(window_s))
        return (sum(each(ends, cpu_seconds)) - before) * 100 / wait / len(ends)

    alone = share()
    with rtr.init_group(ends):
        joined = share()
    print(f"  idle CPU per actor: {alone:.2f} % of a core outside a group, {joined:.2f} % inside")
