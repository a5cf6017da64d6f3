"""The supervisor goes on while an actor that is about to be a member does not answer."""

from __future__ import annotations

import os
import queue
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.returning import Returning


def state(actor: Any) -> ray_internals.ActorState:
    return ray_internals.actor_state(ray_internals.actor_id_of(actor))


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
