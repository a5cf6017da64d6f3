"""The supervisor goes on while an actor that is about to be a member does not answer."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.group import control_connections, restarts
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.restarts import RestartedActors
from tests.polling import suspend
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.returning import Returning


def state(actor: Any) -> ray_internals.ActorState:
    return ray_internals.actor_state(ray_internals.actor_id_of(actor))


def restart(actor: Any) -> int:
    """Kill it; returns the pid of its next process."""
    before = state(actor).pid
    os.kill(before, signal.SIGKILL)
    until = time.monotonic() + 60
    while (now := state(actor)).state != "ALIVE" or now.pid == before:
        assert time.monotonic() < until
        time.sleep(0.01)
    return now.pid


@pytest.fixture
def suspended() -> Iterator[list[int]]:
    """Processes that go on after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_a_restarted_actor_that_hangs_delays_no_other(
    spawn: Spawn, suspended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_there = threading.Event()
    is_listening = RestartedActors.is_listening

    def once_both_are_there(self: RestartedActors, handle: Any, there: ray_internals.ActorState) -> bool:
        return both_are_there.is_set() and is_listening(self, handle, there)

    monkeypatch.setattr(RestartedActors, "is_listening", once_both_are_there)
    monkeypatch.setattr(restarts, "_ANSWER_S", 60.0)  # what it would delay them by
    a, b, c = (spawn(Returning, max_restarts=-1) for _ in range(3))
    with rtr.init_group({"a": a, "b": b, "c": c}) as group:
        suspended.append(restart(a))
        suspend(suspended[0])
        restart(b)
        news: queue.Queue[rtr.Change] = queue.Queue()
        group.on_change(news.put)
        both_are_there.set()
        while (back := news.get(timeout=60)).kind == "lost":  # a's or b's, that is told late
            pass
        assert (back.kind, back.members) == ("back", ("b",))
        os.kill(state(c).pid, signal.SIGKILL)
        lost = news.get(timeout=60)
        assert (lost.kind, lost.members) == ("lost", ("c",))
        os.kill(suspended.pop(), signal.SIGCONT)
        returned: set[str] = set()
        while returned != {"a", "c"}:  # one by one, or together
            change = news.get(timeout=60)
            assert change.kind == "back"
            returned.update(change.members)
        group.wait_ready(30)


def test_a_member_that_was_silent_as_it_returned_is_watched_again(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, silent = ControlConnections.watch, [1]

    def silent_once(self: ControlConnections, name: str, patience_s: float) -> Any:
        if name == "a" and self._tokens[name].endswith(".1") and silent:  # its first new process
            silent.pop()
            raise rtr.RpcTimeout("'a' does not answer")
        return watch(self, name, patience_s)

    a, b = (spawn(Returning, max_restarts=-1) for _ in range(2))
    with rtr.init_group({"a": a, "b": b}) as group:
        monkeypatch.setattr(ControlConnections, "watch", silent_once)
        news: queue.Queue[rtr.Change] = queue.Queue()
        group.on_change(news.put)
        for incarnation in (1, 2):
            os.kill(state(a).pid, signal.SIGKILL)
            assert [news.get(timeout=60).kind for _ in range(2)] == ["lost", "back"]
            group.wait_ready(30)
            assert group.members[0].incarnation == incarnation
        assert not silent


def test_members_are_watched_if_others_are_removed_while_the_group_connects_to_them(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, connecting, goes_on = ControlConnections.watch, threading.Event(), threading.Event()

    def held(self: ControlConnections, name: str, patience_s: float) -> Any:
        if name == "removed":
            connecting.set()
            assert goes_on.wait(60)
        return watch(self, name, patience_s)

    monkeypatch.setattr(ControlConnections, "watch", held)
    monkeypatch.setattr(control_connections, "_AT_A_TIME", 1)  # "stays" is next on the same thread
    removed, stays = spawn(Returning), spawn(Returning)
    with rtr.init_group({"removed": removed, "stays": stays}) as group:
        news: queue.Queue[rtr.Change] = queue.Queue()
        group.on_change(news.put)
        assert connecting.wait(60)
        group.remove(["removed"])
        goes_on.set()
        os.kill(state(stays).pid, signal.SIGKILL)
        assert news.get(timeout=60).kind == "removed"
        assert news.get(timeout=60).kind in ("lost", "dead")  # the second if Ray tells first


@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_loss_is_told_while_a_change_waits_for_a_busy_actor(spawn: Spawn, tmp_path: Path, change: str) -> None:
    latch = Latch.make(tmp_path / "latch")
    a, b, busy = spawn(Returning), spawn(Returning), spawn(Returning)
    members = {"a": a, "b": b} if change == "add" else {"a": a, "b": b, "busy": busy}
    with rtr.init_group(members) as group, ThreadPoolExecutor() as pool:
        news: queue.Queue[rtr.Change] = queue.Queue()
        group.on_change(news.put)
        held = busy.hold.remote(latch)
        arrived = latch.await_arrival()
        waits = pool.submit(
            lambda: group.add({"busy": busy}) if change == "add" else group.remove(["busy"], timeout=60)
        )
        if change == "remove":
            assert news.get(timeout=60).kind == "removed"
        os.kill(state(b).pid, signal.SIGKILL)
        lost = news.get(timeout=60)
        assert lost.kind in ("lost", "dead") and lost.members == ("b",)
        assert not waits.done()
        latch.release(arrived)
        waits.result(60)
        ray.get(held)
        assert ("busy" in {member.name for member in group.members}) == (change == "add")
