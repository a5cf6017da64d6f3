"""Duration of ``init_group`` for living actors by group size, and CPU time of idle members."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import raytorchrpc as rtr
from benchmarks._harness import Line, Pick, actors, each, show

SIZES, LIMITS_S = (8, 16, 32), {8: 0.5, 32: 2.0}


def cpu_seconds(end: Any) -> float:
    return os.times().user + os.times().system


def _form(ends: list[Any]) -> float:
    start = time.perf_counter()
    group = rtr.init_group(ends)
    took = time.perf_counter() - start
    group.shutdown()
    return took


def _idle_percent(ends: list[Any], window_s: float) -> float:
    """CPU time of an idle actor, in percent of a core."""
    began, before = time.perf_counter(), sum(each(ends, cpu_seconds))
    time.sleep(window_s)
    return (sum(each(ends, cpu_seconds)) - before) * 100 / (time.perf_counter() - began) / len(ends)


def main(pick: Pick) -> None:
    sizes = pick(SIZES, SIZES[:1], (2,))
    lines = []
    with actors(sum(sizes)) as ends:  # a process's first group also starts its torchrpc agent
        for number, n in enumerate(sizes):
            at = sum(sizes[:number])
            lines.append(Line(f"{n} members, first time", _form(ends[at : at + n]), 1.0, "s", "(1 s)"))
        again = {n: statistics.median(_form(ends[:n]) for _ in range(pick(7, 3, 1))) for n in sizes}
        for n, took in again.items():
            lines.append(Line(f"{n} members", took, LIMITS_S.get(n, 1.0), "s", "limit", 1.0 if n in LIMITS_S else None))
        if 32 in again:
            lines.append(Line("growth from 8 to 32", again[32], again[8] * 4, "s", "linear growth", 1.0))
        show("init_group of living actors (medians)", lines)
        some, window_s = ends[: max(sizes)], pick(5.0, 2.0, 0.1)
        alone = _idle_percent(some, window_s)
        with rtr.init_group(some):
            joined = _idle_percent(some, window_s)
    print(f"  idle CPU per actor: {alone:.2f} % of a core outside a group, {joined:.2f} % inside")
