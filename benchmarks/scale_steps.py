"""What a group goes through as it grows: forming, everybody calling everybody, deaths, returns, the end; timed.

For any placement of the actors: ``benchmarks/scale.py`` has them on one host, ``tests/multihost`` on several.
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
from raytorchrpc.group.supervisor import Change

#: No single step may take longer (seconds).
PATIENCE_S = 120.0
#: What the group is called.
GROUP = "scale"


class Member:
    """Any actor that has these methods will do; restarted by Ray (``max_restarts``) after its death."""

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
        """Call every other member once, all at once; returns how many, and the seconds from the first to the last."""
        me, began = rtr.current_member(), time.monotonic()
        calls = [rtr.rpc_async(peer).null() for peer in rtr.get_group(GROUP).members if peer.rank != me.rank]
        for call in calls:
            call.wait()
        return len(calls), time.monotonic() - began

    def await_everybody(self) -> None:
        rtr.get_group(GROUP).wait_ready(PATIENCE_S)

    def memory(self) -> dict[str, int]:
        """Bytes of this process alone (``Private_*`` of smaps_rollup), its open descriptors and its threads."""
        private = 0
        with open("/proc/self/smaps_rollup") as file:
            for line in file:
                if line.startswith("Private_"):
                    private += int(line.split()[1]) * 1024
        return {
            "private": private,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def exercise(
    actors: Sequence[Any],
    config: rtr.GroupConfig | None = None,
    between: Callable[[str, rtr.Group], object] = lambda stage, group: None,
) -> dict[str, float]:
    """Take living actors of ``Member`` (with ``max_restarts``) through all steps; returns the seconds of each.

    form: ``init_group``. first_calls: everybody calls everybody, which also makes all connections. calls: again, with
    the connections there. lost: from the kill of every tenth member to the last ``on_change`` of it. ray_back: to when
    Ray has the last of them alive again, rejoin: from there to ``wait_ready``. calls_after: everybody calls everybody
    again. shutdown: ``Group.shutdown``. ``between`` is called with "formed" before anybody has called anybody, and with
    "talked" after that; what it takes is in none of the figures. Raises whatever fails; then the group is shut down
    too.
    """
    took: dict[str, float] = {}
    news: queue.SimpleQueue[tuple[float, Change]] = queue.SimpleQueue()
    _all(actor.pid.remote() for actor in actors)  # they have started
    began = time.monotonic()
    group = rtr.init_group(actors, name=GROUP, config=config, timeout_s=PATIENCE_S)
    took["form"] = time.monotonic() - began
    try:
        group.on_change(lambda change: news.put((time.monotonic(), change)))
        between("formed", group)
        took["first_calls"] = _everybody(actors)
        took["calls"] = _everybody(actors)
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
        group.wait_ready(PATIENCE_S)
        took["rejoin"] = time.monotonic() - alive
        for member in group.members:
            if member.incarnation != before[member.name] + (member.name in names):
                raise AssertionError(f"{member} is not who it should be after its restart")
        _all(actor.await_everybody.remote() for actor in actors)
        took["calls_after"] = _everybody(actors)
    finally:
        began = time.monotonic()
        group.shutdown(PATIENCE_S)
        took["shutdown"] = time.monotonic() - began
    return took


def _await(news: queue.SimpleQueue[tuple[float, Change]], kind: str, names: set[str]) -> float:
    """When the last of these was told."""
    left, until = set(names), time.monotonic() + PATIENCE_S
    while True:
        when, change = news.get(timeout=max(0.0, until - time.monotonic()))
        if change.kind == kind:
            left.difference_update(change.members)
        if not left:
            return when


def _await_restart(actor: Any) -> None:
    """Until Ray has it alive again; before that calls may fail, or wait."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            ray.get(actor.pid.remote(), timeout=PATIENCE_S)
            return
        except RayActorError:
            if time.monotonic() > until:
                raise
            threading.Event().wait(0.02)  # Ray offers nothing to wait on


def _everybody(actors: Sequence[Any]) -> float:
    """Seconds until everybody has called everybody, Ray's own calls included."""
    began = time.monotonic()
    for count, _ in _all(actor.call_all.remote() for actor in actors):
        if count != len(actors) - 1:
            raise AssertionError(f"{count} calls of {len(actors) - 1}")
    return time.monotonic() - began


def _all(references: Any) -> list[Any]:
    return ray.get(list(references), timeout=PATIENCE_S)  # type: ignore[no-any-return]
