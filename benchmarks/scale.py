"""How the cost of a group grows with its members on this host: seconds, memory, connections.

``python -m benchmarks scale [--members 64,128,256] [--deadline SECONDS]`` measures groups of real actors, one after the
other. It begins no group after the deadline, nor one that does not fit into memory, and says so.
"""

from __future__ import annotations

import os
import queue
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import ray

import raytorchrpc as rtr
from benchmarks._harness import POLL_S, TIMEOUT_S, End, Pick, actors, each
from benchmarks._resources import footprint
from raytorchrpc._compat import ray_internals
from raytorchrpc.bench.cases import OUT_OF_TIME, Failed, Figure
from raytorchrpc.bench.site import free_memory

_MIB = 1 << 20
_GROUP = "scale"
#: What is told of the footprint of a process: name, bytes or pieces, unit.
_FOOTPRINT = (
    ("private memory", "private", _MIB, "MiB"),
    ("descriptors", "descriptors", 1, ""),
    ("threads", "threads", 1, ""),
)

Note = Callable[[str, str, float, str], None]
"""``note(case, what, value, unit)``."""


# --- in members ------------------------------------------------------------------------------------------------------


class Member(End):
    """A member of the group; Ray restarts it."""

    @rtr.method(concurrent=True)
    def null(self) -> None:
        """A call without arguments or result."""


def call_twice(end: Any, rank: int) -> tuple[float, float]:
    """Seconds of the first call to a member that this one has not called yet, and of the next."""
    first, again = (_seconds_of(lambda: rtr.rpc_sync(rank).null()) for _ in range(2))
    return first, again


def call_neighbours(end: Any) -> None:
    """Call the next member and the one before."""
    me, members = rtr.current_member(), rtr.get_group(_GROUP).members
    for step in (1, -1):
        rtr.rpc_sync(members[(me.rank + step) % len(members)]).null()


def call_all(end: Any) -> None:
    """Call every other member once, concurrently."""
    me = rtr.current_member()
    for call in [rtr.rpc_async(peer).null() for peer in rtr.get_group(_GROUP).members if peer != me]:
        call.wait()


def weigh(end: Any) -> dict[str, int]:
    return footprint()


def nothing(end: Any) -> None:
    """What Ray alone takes."""


def await_everybody(end: Any) -> None:
    rtr.get_group(_GROUP).wait_ready(TIMEOUT_S)


def die(end: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- in the driver ---------------------------------------------------------------------------------------------------


def _seconds_of(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


@contextmanager
def _formed(ends: Sequence[Any], took: dict[str, float]) -> Iterator[rtr.Group]:
    """A group of these actors for the block; ``took`` gets the seconds of "form" and of "shutdown"."""
    began = time.monotonic()
    group = rtr.init_group(ends, name=_GROUP, timeout=TIMEOUT_S)
    took["form"] = time.monotonic() - began
    try:
        yield group
    finally:
        took["shutdown"] = _seconds_of(lambda: group.shutdown(TIMEOUT_S))


def _kill_some(ends: Sequence[Any], group: rtr.Group | None, first: int = 0) -> dict[str, float]:
    """Kill every tenth actor, from number ``first``; returns seconds since then.

    ray: until Ray has restarted all of them. With a group also lost: until ``on_change`` has reported all of them, and
    ready: until ``wait_ready`` returned, not before "ray".
    """
    doomed = {ray_internals.actor_id_of(actor): actor for actor in ends[first % len(ends) :: 10]}
    before = {actor_id: ray_internals.actor_state(actor_id).pid for actor_id in doomed}
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()

    def note_losses(change: rtr.Change) -> None:
        for name in change.members if change.kind == "lost" else ():
            lost.put(name)

    stop = group.on_change(note_losses) if group else lambda: None
    took, began = dict[str, float](), time.monotonic()
    for actor in doomed.values():
        actor.run.remote(die)
    if group is not None:
        for _ in doomed:
            lost.get(timeout=TIMEOUT_S)
        took["lost"] = time.monotonic() - began
    while waiting := [each for each, pid in before.items() if not _is_back(each, pid)]:
        if time.monotonic() - began > TIMEOUT_S:
            raise TimeoutError(f"Ray has not restarted {len(waiting)} of {len(doomed)} actors")
        time.sleep(POLL_S)  # Ray has no event for a restart
    took["ray"] = time.monotonic() - began
    if group is not None:
        group.wait_ready(TIMEOUT_S)
        took["ready"] = time.monotonic() - began
        stop()
        each(ends, await_everybody)
    return took


def _is_back(actor_id: str, former_pid: int) -> bool:
    state = ray_internals.actor_state(actor_id)
    return state.state == "ALIVE" and state.pid != former_pid


def scale(pick: Pick, members: str | None = None, deadline: float | None = None) -> list[Figure]:
    sizes = [int(size) for size in members.split(",")] if members else pick((8, 16, 32, 64), (8, 16), (4,))
    until, figures = time.monotonic() + (deadline or 3600.0), list[Figure]()
    for size in sizes:
        label = f"{size} members"

        def note(case: str, step_name: str, value: float, unit: str, label: str = label) -> None:
            known: Any = {"case": case, "contestant": label, "size": step_name, "unit": unit}
            figures.append(Figure(**known, median=value, low=value, high=value, turns=1))
            print(f"  {label}: {step_name} {value:.3g} {unit}", flush=True)

        try:
            with ExitStack() as stack:
                _measure(size, stack, pick(5, 2, 1), until, note)
        except (Failed, TimeoutError, rtr.RayTorchRpcError, ray.exceptions.RayError) as reason:
            figures.append(Figure(case="time", contestant=label, size="the rest", unit="s", reason=str(reason)[:200]))
    return figures


def _measure(size: int, stack: ExitStack, repeats: int, until: float, note: Note) -> None:
    """All steps with so many fresh actors. Raises Failed if time or memory do not suffice."""

    def step(step_name: str, seconds: float) -> None:
        note("time", step_name, seconds, "s")
        if time.monotonic() > until:
            raise Failed(f"{OUT_OF_TIME} after {step_name!r}")

    def start(count: int) -> list[Any]:
        return list(stack.enter_context(actors(count, cls=Member, restarts=-1, until=until)))

    def weigh_all(stage: str) -> None:
        rows = each(ends, weigh)
        for who, held in (("a member", rows), ("the process that forms the group", [footprint()])):
            for name, key, of, unit in _FOOTPRINT:
                note(f"{name} of {who}", stage, statistics.median(row[key] for row in held) / of, unit)

    if time.monotonic() > until:
        raise Failed(OUT_OF_TIME)
    began, few = time.monotonic(), min(size, os.cpu_count() or 1)
    ends = start(few)
    needed = statistics.median(row["pss"] for row in each(ends, weigh)) * size
    if needed > (free := free_memory()):
        raise Failed(f"they need {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free")
    ends += start(size - few)
    step("Ray starts the actors", time.monotonic() - began)
    weigh_all("not joined")
    step("Ray calls each actor once", _seconds_of(lambda: each(ends, nothing)))
    took: dict[str, float] = {}
    with _formed(ends, took) as group:
        step("form the group, fresh actors", took["form"])
        weigh_all("joined, no calls yet")
        each(ends, call_neighbours)
        weigh_all("each has called two neighbours")
        far = size // 2  # of four members or more, these are no neighbours
        first = [each([ends[rank]], call_twice, rank + far)[0] for rank in range(min(4 * repeats, far))]
        for step_name, seconds in zip(
            ("first", "again"), map(statistics.median, zip(*first, strict=True)), strict=True
        ):
            note("calls between two members", step_name, seconds * 1e3, "ms")
        step("all-to-all calls, first time", _seconds_of(lambda: each(ends, call_all)))
        step("all-to-all calls, again", _seconds_of(lambda: each(ends, call_all)))
        weigh_all("each has called all members")
        kills = [_kill_some(ends, group, first=number) for number in range(repeats)]
        step("kill every tenth member, until all are reported", max(kill["lost"] for kill in kills))
        step("until Ray has restarted all of them", max(kill["ray"] for kill in kills))
        step("from then until all are back", max(kill["ready"] - kill["ray"] for kill in kills))
    step("shutdown", took["shutdown"])
    with _formed(ends, took):
        step("form the group, the same actors", took["form"])
    step("Ray's restart of as many without a group", _kill_some(ends, None)["ray"])
