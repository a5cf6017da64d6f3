"""How the cost of a group grows with its members on this host: seconds, memory, connections.

``python -m benchmarks scale [--members 64,128,256] [--deadline SECONDS]`` measures groups of real actors, one after the
other. It begins no group after the deadline, nor one that does not fit into memory, and says so.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray

import raytorchrpc as rtr
from benchmarks import _group_life as life
from benchmarks._harness import Pick
from benchmarks._resources import footprint
from raytorchrpc.bench.cases import OUT_OF_TIME, Failed, Figure
from raytorchrpc.bench.site import free_memory

_MIB = 1 << 20
#: At which parts of the time that forming takes it is interrupted.
_INTERRUPTED_AT = (0.05, 0.45, 0.85)
#: What is told of the footprint of a process: name, bytes or pieces, unit.
_FOOTPRINT = (
    ("private memory", "private", _MIB, "MiB"),
    ("descriptors", "descriptors", 1, ""),
    ("threads", "threads", 1, ""),
)

Note = Callable[[str, str, float, str], None]
"""``note(case, what, value, unit)``."""


def scale(pick: Pick, members: str | None = None, deadline: float | None = None) -> list[Figure]:
    sizes = [int(size) for size in members.split(",")] if members else pick((8, 16, 32, 64), (8, 16), (4,))
    until, figures = time.monotonic() + (deadline or 3600.0), list[Figure]()
    for size in sizes:
        label = f"{size} members"

        def note(case: str, step_name: str, value: float, unit: str, label: str = label) -> None:
            known: Any = {"case": case, "contestant": label, "size": step_name, "unit": unit}
            figures.append(Figure(**known, median=value, low=value, high=value, turns=1))
            print(f"  {label}: {step_name} {value:.3g} {unit}", flush=True)

        actors: list[Any] = []
        try:
            _measure(size, actors, pick(5, 2, 1), until, note)
        except (Failed, TimeoutError, rtr.RayTorchRpcError, ray.exceptions.RayError) as reason:
            figures.append(Figure(case="time", contestant=label, size="the rest", unit="s", reason=str(reason)[:200]))
        finally:
            life.end(actors)
    return figures


def _measure(size: int, actors: list[Any], repeats: int, until: float, note: Note) -> None:
    """All steps with so many fresh actors. Raises Failed if time or memory do not suffice."""

    def step(step_name: str, seconds: float) -> None:
        note("time", step_name, seconds, "s")
        if time.monotonic() > until:
            raise Failed(f"{OUT_OF_TIME} after {step_name!r}")

    def weigh(stage: str) -> None:
        rows = life.of_all(actors, "weigh")
        for who, held in (("a member", life.medians(rows)), ("the process that forms the group", footprint())):
            for name, key, of, unit in _FOOTPRINT:
                note(f"{name} of {who}", stage, held[key] / of, unit)

    if time.monotonic() > until:
        raise Failed(OUT_OF_TIME)
    began, few = time.monotonic(), min(size, os.cpu_count() or 1)
    actors += life.start(few, until - began)
    needed = statistics.median(row["pss"] for row in life.of_all(actors, "weigh")) * size
    if needed > (free := free_memory()):
        raise Failed(f"they need {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free")
    actors += life.start(size - few, until - time.monotonic())
    step("Ray starts the actors", time.monotonic() - began)
    weigh("not joined")
    step("Ray calls each actor once", life.seconds_of(lambda: life.of_all(actors, "membership")))
    took: dict[str, float] = {}
    with life.formed(actors, took) as group:
        step("form the group, fresh actors", took["form"])
        weigh("joined, no calls yet")
        life.of_all(actors, "call_neighbours")
        weigh("each has called two neighbours")
        for step_name, seconds in life.first_calls(actors, 4 * repeats).items():
            note("calls between two members", step_name, seconds * 1e3, "ms")
        step("all-to-all calls, first time", life.call_all_pairs(actors))
        step("all-to-all calls, again", life.call_all_pairs(actors))
        weigh("each has called all members")
        kills = [life.kill_some(actors, group, first=number) for number in range(repeats)]
        step("kill every tenth member, until all are reported", max(kill["lost"] for kill in kills))
        step("until Ray has restarted all of them", max(kill["ray"] for kill in kills))
        step("from then until all are back", max(kill["ready"] - kill["ray"] for kill in kills))
    step("shutdown", took["shutdown"])
    with life.formed(actors, took):
        step("form the group, the same actors", took["form"])
    stopped = [life.interrupt_forming(actors, part * took["form"]) for part in _INTERRUPTED_AT]
    step(
        "Ctrl-C while it forms, until no member is in it", max((each["left"] for each in stopped if each), default=0.0)
    )
    step("Ray's restart of as many without a group", life.kill_some(actors, None)["ray"])
