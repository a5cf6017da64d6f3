"""The timed life of a group: formation, calls between all members, deaths, rejoins, shutdown.

Works with actors on one host (``benchmarks/scale.py``) and on several (``tests/multihost``).
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

import raytorchrpc as rtr
from benchmarks._process import footprint
from raytorchrpc.group.supervisor import Change

#: Timeout of each step (seconds).
TIMEOUT_S = 120.0
#: The group's name.
GROUP = "scale"


class Member:
    """A member of the group; Ray restarts it (``max_restarts``). Other actors with these methods work too."""

    @rtr.method(concurrent=True)
    def null(self) -> None:
        """A call without arguments or result."""

    def pid(self) -> int:
        return os.getpid()

    def call(self, target: Any) -> int:
        """Call one peer; returns its rank."""
        rtr.rpc_sync(target).null()
        return rtr.current_member().rank

    def call_all(self) -> tuple[int, float]:
        """Call every other member once, concurrently; returns the number of calls and their seconds."""
        me, began = rtr.current_member(), time.monotonic()
        calls = [rtr.rpc_async(peer).null() for peer in rtr.get_group(GROUP).members if peer.rank != me.rank]
        for call in calls:
            call.wait()
        return len(calls), time.monotonic() - began

    def await_everybody(self) -> None:
        rtr.get_group(GROUP).wait_ready(TIMEOUT_S)

    def memory(self) -> dict[str, int]:
        """See ``footprint``."""
        return footprint()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def exercise(
    actors: Sequence[Any],
    config: rtr.GroupConfig | None = None,
    between: Callable[[str, rtr.Group], object] = lambda stage, group: None,
) -> dict[str, float]:
    """Run all steps with live ``Member`` actors (with ``max_restarts``); returns the seconds of each.

    form: ``init_group``. first_calls: every member calls every other, which also opens all connections. calls: again,
    over open connections. lost: from the kill of every tenth member to the last ``on_change`` about it. ray_back: until
    Ray has restarted the last of them. rejoin: from there to ``wait_ready``. calls_after: every member calls every
    other again. shutdown: ``Group.shutdown``. ``between`` is called with "formed" before the first call and with
    "talked" after the calls; its time is not counted. Raises what a step raises, after shutting the group down.
    """
    took: dict[str, float] = {}
    news: queue.SimpleQueue[tuple[float, Change]] = queue.SimpleQueue()
    _all(actor.pid.remote() for actor in actors)  # wait until they have started
    began = time.monotonic()
    group = rtr.init_group(actors, name=GROUP, config=config, timeout=TIMEOUT_S)
    took["form"] = time.monotonic() - began
    try:
        group.on_change(lambda change: news.put((time.monotonic(), change)))
        between("formed", group)
        took["first_calls"] = _call_all_pairs(actors)
        took["calls"] = _call_all_pairs(actors)
        between("talked", group)
        doomed = list(actors[::10])
        names = {group.members[rank].name for rank in range(0, len(actors), 10)}
        before = {member.name: member.incarnation for member in group.members}
        began = time.monotonic()
        for actor in doomed:
            actor.die.remote()
        took["lost"] = _await(news, "lost", names) - began
        for actor in doomed:
            _await_restart(actor)
        alive = time.monotonic()
        took["ray_back"] = alive - began
        group.wait_ready(TIMEOUT_S)
        took["rejoin"] = time.monotonic() - alive
        for member in group.members:
            if member.incarnation != before[member.name] + (member.name in names):
                raise AssertionError(f"{member} has the wrong incarnation after its restart")
        _all(actor.await_everybody.remote() for actor in actors)
        took["calls_after"] = _call_all_pairs(actors)
    finally:
        began = time.monotonic()
        group.shutdown(TIMEOUT_S)
        took["shutdown"] = time.monotonic() - began
    return took


def _await(news: queue.SimpleQueue[tuple[float, Change]], kind: str, names: set[str]) -> float:
    """The time when the last of these changes was reported."""
    left, until = set(names), time.monotonic() + TIMEOUT_S
    while True:
        when, change = news.get(timeout=max(0.0, until - time.monotonic()))
        if change.kind == kind:
            left.difference_update(change.members)
        if not left:
            return when


def _await_restart(actor: Any) -> None:
    """Wait until Ray has restarted the actor; until then calls may fail or block."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            ray.get(actor.pid.remote(), timeout=TIMEOUT_S)
            return
        except RayActorError:
            if time.monotonic() > until:
                raise
            threading.Event().wait(0.02)  # Ray has no event to wait for


def _call_all_pairs(actors: Sequence[Any]) -> float:
    """Seconds until every member has called every other, including Ray's own calls."""
    began = time.monotonic()
    for count, _ in _all(actor.call_all.remote() for actor in actors):
        if count != len(actors) - 1:
            raise AssertionError(f"{count} calls of {len(actors) - 1}")
    return time.monotonic() - began


def _all(references: Any) -> list[Any]:
    return ray.get(list(references), timeout=TIMEOUT_S)  # type: ignore[no-any-return]
