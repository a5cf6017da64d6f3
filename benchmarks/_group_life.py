"""Steps in the life of a group of real actors, timed, each beside what Ray alone takes for its part."""

from __future__ import annotations

import os
import queue
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

import raytorchrpc as rtr
from benchmarks._harness import End
from benchmarks._resources import footprint
from raytorchrpc._compat import ray_internals
from raytorchrpc.group import join
from raytorchrpc.group.supervisor import Change

#: Timeout of each step (seconds).
TIMEOUT_S = 120.0
#: The group's name.
GROUP = "scale"
#: Ray has no event for a restart: how often it is asked (seconds).
_POLL_S = 0.05


class Member(End):
    """A member of the group; Ray restarts it (``max_restarts``)."""

    @rtr.method(concurrent=True)
    def null(self) -> None:
        """A call without arguments or result."""

    def weigh(self) -> dict[str, int]:
        return footprint()

    def call_twice(self, rank: int) -> tuple[float, float]:
        """Seconds of the first call to a member that this one has not called yet, and of the next."""
        took = []
        for _ in range(2):
            began = time.perf_counter()
            rtr.rpc_sync(rank).null()
            took.append(time.perf_counter() - began)
        return took[0], took[1]

    def call_neighbours(self) -> None:
        """Call the next member and the one before."""
        me, members = rtr.current_member(), rtr.get_group(GROUP).members
        for step in (1, -1):
            rtr.rpc_sync(members[(me.rank + step) % len(members)]).null()

    def call_all(self) -> int:
        """Call every other member once, concurrently; returns the number of calls."""
        me = rtr.current_member()
        calls = [rtr.rpc_async(peer).null() for peer in rtr.get_group(GROUP).members if peer.rank != me.rank]
        for call in calls:
            call.wait()
        return len(calls)

    def await_everybody(self) -> None:
        rtr.get_group(GROUP).wait_ready(TIMEOUT_S)

    def membership(self) -> str | None:
        """The group that this process is in, or prepares to join."""
        return join._membership.spec.group if join._membership else None

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def of_all(actors: Iterable[Any], method: str, timeout_s: float = TIMEOUT_S) -> list[Any]:
    return list(ray.get([getattr(actor, method).remote() for actor in actors], timeout=timeout_s))


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def seconds_of(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


# --- actors ----------------------------------------------------------------------------------------------------------


def start(count: int, timeout_s: float) -> list[Any]:
    """Start so many actors and wait until each has answered; a few at a time, as they compete for the cores."""
    cls, until = ray.remote(num_cpus=0, max_restarts=-1)(Member), time.monotonic() + timeout_s
    actors: list[Any] = []
    starting: list[Any] = []
    while len(actors) < count or starting:
        while len(actors) < count and len(starting) < 2 * (os.cpu_count() or 1):
            actors.append(cls.remote())
            starting.append(actors[-1].membership.remote())
        ready, starting = ray.wait(starting, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{len(actors) - len(starting)} of {count} actors have started within {timeout_s:.0f} s")
        ray.get(ready)
    return actors


def end(actors: Sequence[Any]) -> None:
    """Kill actors and wait until their processes have exited, which frees their memory."""
    pids = [ray_internals.actor_state(ray_internals.actor_id_of(actor)).pid for actor in actors]
    for actor in actors:
        ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError("killed actors have not exited")
        time.sleep(_POLL_S)


# --- the group -------------------------------------------------------------------------------------------------------


@contextmanager
def formed(actors: Sequence[Any], took: dict[str, float]) -> Iterator[rtr.Group]:
    """A group of these actors for the block; ``took`` gets the seconds of "form" and of "shutdown"."""
    began = time.monotonic()
    group = rtr.init_group(actors, name=GROUP, timeout=TIMEOUT_S)
    took["form"] = time.monotonic() - began
    try:
        yield group
    finally:
        took["shutdown"] = seconds_of(lambda: group.shutdown(TIMEOUT_S))


def call_all_pairs(actors: Sequence[Any], timeout_s: float = TIMEOUT_S) -> float:
    """Seconds until every member has called every other, including Ray's own calls."""
    began = time.monotonic()
    for count in of_all(actors, "call_all", timeout_s):
        if count != len(actors) - 1:
            raise AssertionError(f"{count} calls of {len(actors) - 1}")
    return time.monotonic() - began


def first_calls(actors: Sequence[Any], pairs: int) -> dict[str, float]:
    """Seconds of calls between members that have not called each other yet, one pair after the other.

    Of four members or more, they are no neighbours.
    """
    far = len(actors) // 2
    took = [ray.get(actors[rank].call_twice.remote(rank + far), timeout=TIMEOUT_S) for rank in range(min(pairs, far))]
    first, again = zip(*took, strict=True)
    return {"first": statistics.median(first), "first_worst": max(first), "again": statistics.median(again)}


def kill_some(actors: Sequence[Any], group: rtr.Group | None, first: int = 0) -> dict[str, float]:
    """Kill every tenth actor, from number ``first``; returns seconds since then.

    ray: until Ray has restarted all of them. With a group also lost: until ``on_change`` has reported all of them, and
    ready: until ``wait_ready`` returned, not before "ray".
    """
    doomed = {ray_internals.actor_id_of(actor): actor for actor in actors[first % len(actors) :: 10]}
    before = {actor_id: ray_internals.actor_state(actor_id) for actor_id in doomed}
    news: queue.SimpleQueue[tuple[float, Change]] = queue.SimpleQueue()
    known = {member.actor_id: member for member in group.members} if group else {}
    stop = group.on_change(lambda change: news.put((time.monotonic(), change))) if group else lambda: None
    began = time.monotonic()
    for actor in doomed.values():
        actor.die.remote()
    took: dict[str, float] = {}
    if group is not None:
        took["lost"] = _reported(news, {known[actor_id].name for actor_id in doomed}) - began
    waiting = {*doomed}
    while waiting:
        states = {actor_id: ray_internals.actor_state(actor_id) for actor_id in waiting}
        waiting = {
            actor_id
            for actor_id, state in states.items()
            if state.state != "ALIVE" or (state.pid, state.node_id) == (before[actor_id].pid, before[actor_id].node_id)
        }
        if time.monotonic() - began > TIMEOUT_S:
            raise TimeoutError(f"Ray has not restarted {len(waiting)} of {len(doomed)} actors")
        if waiting:
            threading.Event().wait(_POLL_S)
    took["ray"] = time.monotonic() - began
    if group is not None:
        group.wait_ready(TIMEOUT_S)
        took["ready"] = time.monotonic() - began
        stop()
        for member in group.members:
            if member.incarnation != known[member.actor_id].incarnation + (member.actor_id in doomed):
                raise AssertionError(f"{member} has the wrong incarnation after its restart")
        of_all(actors, "await_everybody")
    return took


def _reported(news: queue.SimpleQueue[tuple[float, Change]], names: set[str]) -> float:
    """The time when the last of these members was reported lost."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        when, change = news.get(timeout=max(0.0, until - time.monotonic()))
        if change.kind == "lost":
            names.difference_update(change.members)
        if not names:
            return when


def interrupt_forming(actors: Sequence[Any], after_s: float) -> dict[str, float]:
    """Press Ctrl-C so long after ``init_group`` was called.

    Returns seconds from then until it raised, and until no actor was in the group; nothing if it had returned before.
    Raises TimeoutError naming the actors that stay in it.
    """
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after_s, press)
    try:
        timer.start()
        rtr.init_group(actors, name=GROUP, timeout=TIMEOUT_S)
        timer.join()
        threading.Event().wait(5.0)  # the signal arrives here at the latest
        raise AssertionError("Ctrl-C did not arrive")
    except KeyboardInterrupt:
        raised = time.monotonic()
    try:
        rtr.get_group(GROUP).shutdown(TIMEOUT_S)
        was_late = True
    except rtr.NotAMember:
        was_late = False
    while inside := [rank for rank, group in enumerate(of_all(actors, "membership")) if group is not None]:
        if time.monotonic() - raised > TIMEOUT_S:
            raise TimeoutError(f"actors {inside} are still in the group, whose forming was interrupted")
        threading.Event().wait(_POLL_S)
    return {} if was_late else {"raised": raised - pressed[0], "left": time.monotonic() - pressed[0]}
