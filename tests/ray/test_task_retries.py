"""Ray's ``max_task_retries``: an actor that was restarted runs the interrupted method again, and that one makes direct
calls before the actor is back in its group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.retried import Alone, AsyncRetried, Retried

RETRIED = {"max_restarts": -1, "max_task_retries": -1}


class Members(NamedTuple):
    group: rtr.Group
    peer: Any
    sync: Any
    threaded: Any
    asynchronous: Any


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn, peers: list[Any]) -> dict[str, Any]:
    """For all tests here: all but the peer come back."""
    spawn = spawn_for_module
    return {
        "peer": peers[0],
        "sync": spawn(Retried, **RETRIED),
        "threaded": spawn(Retried, max_concurrency=3, **RETRIED),
        "asynchronous": spawn(AsyncRetried, **RETRIED),
    }


@pytest.fixture
def members(actors: dict[str, Any]) -> Iterator[Members]:
    with rtr.init_group(actors, name="retried") as group:
        yield Members(group, *actors.values())


@pytest.fixture
def marker(tmp_path: Path) -> str:
    return str(tmp_path / "interrupted")


@pytest.mark.parametrize("kind", ["sync", "threaded"])
def test_an_interrupted_method_that_calls_a_peer_ends_well_when_it_runs_again(
    members: Members, marker: str, kind: str
) -> None:
    actor = getattr(members, kind)
    before = ray.get(actor.pid.remote(), timeout=60)
    pid, doubled, _ = ray.get(actor.sync_call.remote(marker), timeout=90)
    assert pid != before and torch.equal(doubled, torch.full((3,), 2.0))
    members.group.wait_ready(30)
    assert ray.get(members.peer.call.remote(kind, "double", 4), timeout=60) == 8


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("remote_call", 42),
        ("through_queue", (7, "sync")),
        ("through_weights", (0, "sync", "retried")),
    ],
)
def test_every_way_into_the_group_waits_for_the_return(members: Members, marker: str, method: str, result: Any) -> None:
    assert ray.get(getattr(members.sync, method).remote(marker), timeout=90) == result


def test_a_coroutine_waits_for_the_return_without_holding_up_its_loop(members: Members, marker: str) -> None:
    doubled, item, ticks, waited_s = ray.get(members.asynchronous.call.remote(marker), timeout=90)
    assert torch.equal(doubled, torch.full((3,), 2.0)) and item == 7
    assert ticks > 0 or waited_s < 0.25, "it may be back in the group already"


def test_a_restarted_actor_is_back_though_its_method_goes_on_and_makes_no_call(
    members: Members, marker: str, tmp_path: Path
) -> None:
    """What others call there beside its turns is served meanwhile."""
    latch = Latch.make(tmp_path / "latch")
    ran = members.sync.busy.remote(marker, latch)
    held = latch.await_arrival()
    assert wait_until(lambda: members.group.members[1].incarnation > 0, 60)
    members.group.wait_ready(30)
    assert ray.get(members.peer.call.remote("sync", "pid"), timeout=60)
    latch.release(held)
    assert ray.get(ran, timeout=60) == "released"


def test_nothing_is_left_in_rays_store(members: Members, marker: str) -> None:
    """What a group and those that came back have kept there."""
    ray.get(members.sync.sync_call.remote(marker), timeout=90)
    members.group.wait_ready(30)
    # A process that another test killed may have left a record.
    record = f"groups/{members.group.generation}"
    assert record in insides.stored_keys("groups/")
    actors = [member.actor_id for member in members.group.members]
    members.group.shutdown()
    assert record not in insides.stored_keys("groups/")
    until = time.monotonic() + 60
    while left := [key for actor in actors for key in insides.stored_keys(f"restarted/{actor}")]:
        assert time.monotonic() < until, left
        time.sleep(0.05)  # the process stops to listen


def test_the_secret_of_a_group_is_never_in_rays_store(
    members: Members, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the group nor a process that comes back puts it there."""
    secret = insides.in_actor(members.peer, insides.group_secret)
    posted = insides.posted(monkeypatch)
    call = members.sync.sync_call.remote(marker)
    while not ray.wait([call], timeout=0.001)[0]:
        insides.stored_values("restarted/")  # the supervisor looks there too, before the process is a member again
    ray.get(call)
    insides.stored_values("")
    assert not any(secret in value for value in posted)
    assert any(b"SocketAddress" in value for value in posted), "the process has posted where it listens"


def test_a_call_in_init_is_refused_at_once(members: Members, marker: str) -> None:
    ray.get(members.sync.sync_call.remote(marker), timeout=90)
    assert ray.get(members.sync.early_error.remote(), timeout=60) == "NotAMember"


def test_a_restarted_actor_that_is_in_no_group_is_told_at_once(spawn: Spawn, marker: str) -> None:
    actor = spawn(Alone, **RETRIED)
    error, seconds = ray.get(actor.attempt.remote(marker), timeout=90)
    assert error == "NotAMember" and seconds < 20
    assert ray.get(actor.restarted.remote())
