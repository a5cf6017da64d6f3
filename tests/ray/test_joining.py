"""Processes that ``init_group`` cannot reach join a group by themselves: children of members, busy actors, others."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.ray import children
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> Iterator[dict[str, Any]]:
    made = {"trainer": spawn_for_module(Peer), "other": spawn_for_module(Peer)}
    ray.get([made["trainer"].run.remote(children.start, "child"), made["other"].run.remote(int)])
    yield made
    ray.get(made["trainer"].run.remote(children.end, "child"))


@pytest.fixture
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors, name="trained") as group:
        yield group


@pytest.fixture
def in_child(actors: dict[str, Any]) -> Callable[..., Any]:
    """Runs a function in the trainer's child."""
    return lambda function, *args: ray.get(actors["trainer"].run.remote(children.do, "child", function, *args))


@pytest.fixture
def changes(group: rtr.Group) -> queue.SimpleQueue[rtr.Change]:
    seen: queue.SimpleQueue[rtr.Change] = queue.SimpleQueue()
    group.on_change(seen.put)
    return seen


def leave() -> None:
    rtr.get_group("trained").leave()


def call(target: str, method: str, *args: Any) -> Any:
    return getattr(rtr.rpc_sync(target), method)(*args)


def test_a_child_is_a_member_like_others(
    group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any], changes: Any
) -> None:
    me = in_child(children.join, "engine")
    assert (me.rank, me.name, me.actor_id) == (2, "engine", None) and me in group.members
    assert changes.get(timeout=10) == rtr.Change("added", ("engine",))
    assert "engine" in str(group.routes()) and "unix socket" in group.explain("other", "engine")
    assert group.stats().missing == ()

    data = torch.rand(1 << 20)
    for name in actors:  # both ways
        assert torch.equal(ray.get(actors[name].run.remote(call, "engine", "double", data)), data * 2)
    assert in_child(call, "other", "double", 2) == 4
    with pytest.raises(rtr.NoSuchMethod, match=r"Engine\.hidden is not exposed"):
        ray.get(actors["other"].run.remote(call, "engine", "hidden"))

    store, jobs = rtr.WeightStore("policy", home="trainer"), rtr.Queue("jobs", home="engine")
    ray.get(actors["trainer"].run.remote(lambda: store.publish({"w": data})))

    def pull() -> torch.Tensor:
        into = {"w": torch.zeros(1 << 20)}
        store.pull(into)
        return into["w"]

    assert torch.equal(in_child(pull), data)
    ray.get(actors["other"].run.remote(lambda: jobs.put("job")))
    assert in_child(lambda: jobs.get(10)) == "job"
    assert ray.get(actors["other"].run.remote(lambda: rtr.remote("engine").double(data).to_here()[0])) == data[0] * 2

    in_child(leave)
    assert changes.get(timeout=10) == rtr.Change("removed", ("engine",))
    with pytest.raises(rtr.NotAMember, match="'engine' is not in group 'trained'"):
        ray.get(actors["other"].run.remote(call, "engine", "pid"))
    with pytest.raises(rtr.NotAMember):
        in_child(rtr.current_member)
    assert in_child(children.join, "engine").rank == 3, "it joins again, under the same name"


def test_collectives_include_a_child(group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any]) -> None:
    in_child(children.join)
    group.process_group("gloo", timeout=30)

    def total() -> float:
        tensor = torch.ones(1)
        torch.distributed.all_reduce(tensor, group=rtr.process_group())
        return tensor.item()

    other = actors["other"].run.remote(total)
    assert ray.get(actors["trainer"].run.remote(children.do_both, "child", total), timeout=60) == (3.0, 3.0)
    assert ray.get(other) == 3.0


def test_a_child_that_is_killed_has_left(group: rtr.Group, actors: dict[str, Any], changes: Any) -> None:
    trainer = actors["trainer"]
    ray.get(trainer.run.remote(children.start, "victim"))
    ray.get(trainer.run.remote(children.do, "victim", children.join, "victim"))
    assert changes.get(timeout=10).kind == "added"
    ray.get(trainer.run.remote(children.end, "victim"))
    assert changes.get(timeout=10) == rtr.Change("dead", ("victim",), "its process ended")
    assert [member.name for member in group.members] == ["trainer", "other"]
    with pytest.raises(rtr.PeerLost, match="lost member 'victim': its process ended"):
        ray.get(actors["other"].run.remote(call, "victim", "pid"))
    # Another process takes the name, at once.
    ray.get(trainer.run.remote(children.start, "victim"))
    again = ray.get(trainer.run.remote(children.do, "victim", children.join, "victim"))
    assert ray.get(actors["other"].run.remote(call, "victim", "pid")) == again.pid
    ray.get(trainer.run.remote(children.end, "victim"))


def test_a_grandchild_joins_by_its_parent(
    group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any]
) -> None:
    child = in_child(children.join)
    assert child.name == f"trainer.{child.pid}"
    in_child(children.start, "grandchild", "forkserver")
    grandchild = in_child(children.do, "grandchild", children.join)
    assert grandchild.name == f"{child.name}.{grandchild.pid}"
    assert ray.get(actors["other"].run.remote(call, grandchild.name, "pid")) == grandchild.pid
    in_child(children.end, "grandchild")


def test_what_cannot_join_is_told_why(group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any]) -> None:
    with pytest.raises(rtr.ConfigurationError, match="has a member 'other' already"):
        in_child(children.join, "other")
    with pytest.raises(rtr.ConfigurationError, match="'a b' cannot name a member"):
        in_child(children.join, "a b")
    with pytest.raises(rtr.NotAMember, match=r"cannot join group 'nowhere': .*'trained'"):
        in_child(children.join, "engine", "nowhere")
    with pytest.raises(rtr.NotAMember, match="only a process that has joined a group by"):
        ray.get(actors["other"].run.remote(leave))
    in_child(children.join, "engine")
    with pytest.raises(rtr.BootstrapError, match="this process is in group 'trained' already"):
        in_child(children.join, "twice")
    # This process is the trainer's neighbour, not its child.
    with pytest.raises(rtr.NotAMember, match=r"'trained': GroupConfig\(joinable_by='cluster'\)"):
        rtr.join("trained", "driver")
    with pytest.raises(rtr.NotAMember, match="forked"):
        ray.get(actors["trainer"].run.remote(children.start, "fork", "fork"))
        ray.get(actors["trainer"].run.remote(children.do, "fork", children.join))
    ray.get(actors["trainer"].run.remote(children.end, "fork"))


def test_only_descendants_get_a_ticket(group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any]) -> None:
    pid = ray.get(actors["trainer"].run.remote(os.getpid))

    def offered() -> int:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(f"\0raytorchrpc-parent-{pid}".encode())
            return len(sock.recv(1 << 20))

    assert offered() == 0 and ray.get(actors["other"].run.remote(offered)) == 0
    assert in_child(offered) > 0


def test_the_end_of_the_group_reaches_it(actors: dict[str, Any], in_child: Callable[..., Any]) -> None:
    for name in ("one", "two"):  # one after the other
        with rtr.init_group(actors, name=name):
            in_child(children.join, "engine")
            assert in_child(call, "other", "double", 2) == 4
        with pytest.raises(rtr.NotAMember):
            in_child(call, "other", "double", 2)
    with rtr.init_group(actors, config=rtr.GroupConfig(joinable_by="nobody")), pytest.raises(rtr.NotAMember):
        in_child(children.join, "engine")


def test_any_process_of_the_cluster_joins_a_group_that_lets_it(
    actors: dict[str, Any], spawn: Spawn, latch: Callable[[], Latch]
) -> None:
    """This driver, and an actor in a method that does not end."""
    busy, held = spawn(Peer), latch()
    config = rtr.GroupConfig(joinable_by="cluster")
    with rtr.init_group(actors, name="open", config=config) as group:

        def loop() -> str:
            rtr.join("open", "loop")
            with rtr.allow_calls():
                held.pass_through()
            return rtr.current_member().name

        running = busy.run.remote(loop)
        arrived = held.await_arrival()
        assert ray.get(actors["other"].run.remote(call, "loop", "double", 2)) == 4
        with rtr.join("open", "driver"):
            assert rtr.rpc_sync("loop").double(2) == 4
            assert ray.get(actors["other"].run.remote(lambda: [m.name for m in rtr.get_group("open").members])) == [
                *("trainer", "other", "loop", "driver")
            ]
        group.remove(["loop"])
        group.wait_ready(10)
        held.release(arrived)
        with contextlib.suppress(ray.exceptions.RayTaskError):
            ray.get(running, timeout=30)


def test_the_end_does_not_wait_for_one_that_is_busy_for_ever(
    actors: dict[str, Any], spawn: Spawn, latch: Callable[[], Latch]
) -> None:
    busy, held = spawn(Peer), latch()
    group = rtr.init_group(actors, name="open", config=rtr.GroupConfig(joinable_by="cluster"))

    def loop() -> None:
        rtr.join("open", "loop")
        held.pass_through()

    running = busy.run.remote(loop)
    arrived = held.await_arrival()
    began = time.monotonic()
    group.shutdown()
    assert time.monotonic() - began < 5
    held.release(arrived)
    ray.get(running, timeout=30)
