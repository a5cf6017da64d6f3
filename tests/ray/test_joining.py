"""Processes that ``init_group`` cannot reach join a group by themselves: children of members, busy actors, others."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
import torch.distributed.autograd as autograd
import torch.distributed.rpc as rpc

import raytorchrpc as rtr
from tests import insides
from tests.polling import stands_still, suspend, wait_until
from tests.ray import children
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn, peers: list[Any]) -> Iterator[dict[str, Any]]:
    made = {"trainer": spawn_for_module(Peer), "other": peers[0]}
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


def come_and_go() -> None:
    with rtr.join():
        pass


def call(target: str, method: str, *args: Any) -> Any:
    return getattr(rtr.rpc_sync(target), method)(*args)


def test_a_child_is_a_member_like_others(
    group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any], changes: Any
) -> None:
    me = in_child(children.join, "engine")
    assert (me.rank, me.name, me.actor_id) == (2, "engine", None) and me in group.members
    assert changes.get(timeout=60) == rtr.Change("added", ("engine",))
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
    assert in_child(lambda: jobs.get(60)) == "job"
    assert ray.get(actors["other"].run.remote(lambda: rtr.remote("engine").double(data).to_here()[0])) == data[0] * 2

    in_child(leave)
    assert changes.get(timeout=60) == rtr.Change("removed", ("engine",))
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
    assert changes.get(timeout=60).kind == "added"
    ray.get(trainer.run.remote(children.end, "victim"))
    assert changes.get(timeout=60) == rtr.Change("dead", ("victim",), "its process ended")
    assert [member.name for member in group.members] == ["trainer", "other"]
    group.wait_ready(60)  # callbacks hear of it before a member that is slow to follow
    with pytest.raises(rtr.PeerLost, match="lost member 'victim': its process ended"):
        ray.get(actors["other"].run.remote(call, "victim", "pid"))
    # Another process takes the name, at once.
    ray.get(trainer.run.remote(children.start, "victim"))
    again = ray.get(trainer.run.remote(children.do, "victim", children.join, "victim"))
    assert ray.get(actors["other"].run.remote(call, "victim", "pid")) == again.pid
    ray.get(trainer.run.remote(children.end, "victim"))


@pytest.mark.slow  # it and its parent import torch
def test_a_grandchild_joins_by_its_parent(
    group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any]
) -> None:
    child = in_child(children.join)
    assert child.name == f"trainer.{child.pid}"
    in_child(children.start, "grandchild", "spawn")  # or its parent would be the server of the first child
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
    config, refused = rtr.GroupConfig(joinable_by="nobody"), pytest.raises(rtr.NotAMember, match="'children'")
    with rtr.init_group(actors, config=config), refused:
        in_child(children.join, "engine")


def test_any_process_of_the_cluster_joins_a_group_that_lets_it(
    actors: dict[str, Any], peers: list[Any], latch: Callable[[], Latch]
) -> None:
    """This driver, a task, and an actor in a method that does not end."""
    busy, held = peers[1], latch()
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

        def task() -> int:
            with rtr.join("open", "task"):
                return rtr.rpc_sync("loop").double(3)  # type: ignore[no-any-return]

        assert ray.get(ray.remote(num_cpus=0)(task).remote(), timeout=60) == 6
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


def test_a_driver_alone_forms_a_group_that_others_join(peers: list[Any], latch: Callable[[], Latch]) -> None:
    busy, held = peers[1], latch()
    config = rtr.GroupConfig(joinable_by="cluster")
    with rtr.init_group([], name="alone", config=config, include_driver=True) as group:
        assert [member.name for member in group.members] == ["driver"]

        def come() -> None:
            with rtr.join("alone", "late"), rtr.allow_calls():
                held.pass_through()

        running = busy.run.remote(come)
        arrived = held.await_arrival()
        assert rtr.rpc_sync("late").double(2) == 4
        held.release(arrived)
        ray.get(running, timeout=30)
        assert [member.name for member in group.members] == ["driver"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def sockets() -> list[str]:
    """Those of this process, and its threads for a group."""
    names = [*{each.name for each in threading.enumerate()} - {"raytorchrpc-deadlines", "raytorchrpc-cleanup"}]
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has just closed it
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(name for name in names if name.startswith(("socket:", "raytorchrpc")))


def test_coming_and_going_leaves_nothing_behind(group: rtr.Group, in_child: Callable[..., Any]) -> None:
    """Also where the time for it is too short."""

    def come_and_go() -> list[str]:
        rtr.join(name="again").leave()  # what torchrpc listens on stays open
        before, outcomes = set(sockets()), []
        for timeout in (0.001, 0.01, 0.02, 0.03, *[60.0] * 16):
            try:
                with rtr.join(name="again", timeout=timeout) as joined:
                    assert rtr.rpc_sync("other").double(2) == 4
                    joined.leave()
                outcomes.append("joined")
            except rtr.BootstrapError as error:
                outcomes.append(f"{timeout}: {error}")
        assert wait_until(lambda: set(sockets()) <= before, 20), (sockets(), before)
        return outcomes

    outcomes = in_child(come_and_go)
    assert outcomes[4:] == ["joined"] * 16, outcomes
    assert wait_until(lambda: len(group) == 2, 60)


def test_a_process_that_fails_while_it_joins(
    group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any]
) -> None:
    """Killed, suspended or interrupted: the group goes on, and the name is free."""
    trainer, step = actors["trainer"], "prepare"
    ray.get(trainer.run.remote(children.start, "victim"))
    ray.get(trainer.run.remote(children.do, "victim", come_and_go))  # the first time takes longer

    def interrupted() -> str:
        insides.before_step(step, lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            rtr.join(name="engine")
        except KeyboardInterrupt:
            return "interrupted"
        return "joined"

    def suspended() -> str:
        insides.before_step(step, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        try:
            rtr.join(name="engine", timeout=2)
        except rtr.BootstrapError:
            return "refused"
        return "joined"

    def killed() -> None:
        insides.before_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        rtr.join(name="engine")

    assert in_child(interrupted) == "interrupted"
    assert wait_until(lambda: in_child(insides.group_name) is None, 60)

    pid = ray.get(trainer.run.remote(children.do, "victim", os.getpid))
    ray.get(trainer.run.remote(children.begin, "victim", suspended))
    assert wait_until(lambda: stands_still(pid), 30)
    try:
        assert in_child(children.join, "engine").name == "engine", "the group waits two seconds for the other one"
        in_child(leave)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ray.get(trainer.run.remote(children.answer, "victim")) == "refused"
    assert ray.get(trainer.run.remote(children.do, "victim", insides.group_name)) is None

    ray.get(trainer.run.remote(children.begin, "victim", killed))
    ray.get(trainer.run.remote(children.wait, "victim"))
    assert in_child(children.join, "engine").name == "engine"
    assert ray.get(actors["other"].run.remote(call, "engine", "pid")) == in_child(os.getpid)


def test_a_member_that_does_not_answer_keeps_its_name(
    group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any]
) -> None:
    trainer = actors["trainer"]
    pid = in_child(children.join, "engine").pid
    ray.get(trainer.run.remote(children.start, "second"))
    suspend(pid)
    try:
        with pytest.raises(rtr.ConfigurationError, match="has a member 'engine' already"):
            ray.get(trainer.run.remote(children.do, "second", children.join, "engine"))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ray.get(actors["other"].run.remote(call, "engine", "pid")) == pid
    ray.get(trainer.run.remote(children.end, "second"))


def test_a_group_that_ends_while_a_process_joins(
    actors: dict[str, Any], in_child: Callable[..., Any], latch: Callable[[], Latch]
) -> None:
    held = latch()

    def join() -> str:
        insides.before_step("prepare", held.pass_through)
        try:
            rtr.join()
        except rtr.BootstrapError:
            return "refused"
        return "joined"

    with rtr.init_group(actors, name="trained"):
        ray.get(actors["trainer"].run.remote(children.begin, "child", join))
        arrived = held.await_arrival()
    held.release(arrived)
    assert ray.get(actors["trainer"].run.remote(children.answer, "child")) == "refused"
    assert wait_until(lambda: in_child(insides.group_name) is None, 60)
    with rtr.init_group(actors, name="trained"):
        in_child(children.join, "engine")


def test_coroutines_need_an_async_actor(group: rtr.Group, in_child: Callable[..., Any]) -> None:
    class Engine:
        @rtr.method
        async def generate(self) -> None: ...

    with pytest.raises(rtr.ConfigurationError, match=r"Engine\.generate is a coroutine"):
        in_child(lambda: rtr.join(instance=Engine()))


def test_an_actor_serves_another_object_one_call_at_a_time(
    actors: dict[str, Any], special: dict[str, Any], latch: Callable[[], Latch]
) -> None:
    """Whatever the actor itself does meanwhile: here it is a threaded one."""
    busy, held = special["threaded"], latch()

    class Engine:
        begun = 0

        @rtr.method
        def hold(self) -> None:
            self.begun += 1
            held.pass_through()

        @rtr.method(concurrent=True)
        def holds(self) -> int:
            return self.begun

    with rtr.init_group(actors, name="open", config=rtr.GroupConfig(joinable_by="cluster")):
        ray.get(busy.run.remote(lambda: rtr.join("open", "loop", instance=Engine()) and None))
        holding = actors["other"].run.remote(call, "loop", "hold")
        arrived = held.await_arrival()
        assert ray.get(busy.double.remote(2)) == 4, "Ray's call of the actor's own method"
        with pytest.raises(rtr.RpcTimeout):
            ray.get(actors["trainer"].run.remote(lambda: rtr.rpc_sync("loop", timeout=0.5).hold()))
        held.release(arrived)
        ray.get(holding)
        assert ray.get(actors["trainer"].run.remote(call, "loop", "holds")) == 1, "the one that waited ran too"


def test_a_restarted_actor_joins_again(actors: dict[str, Any], spawn: Spawn) -> None:
    config = rtr.GroupConfig(joinable_by="cluster")
    again = spawn(Peer, max_restarts=1, max_task_retries=-1)
    with rtr.init_group(actors, name="open", config=config) as group:
        first = ray.get(again.run.remote(children.join_as, "loop", "open"))
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(again.run.options(max_task_retries=0).remote(os._exit, 1))
        second = ray.get(again.run.remote(children.join_as, "loop", "open"), timeout=60)
        assert second.pid != first.pid and second.rank > first.rank
        assert ray.get(actors["other"].run.remote(call, again, "who")) == ("loop", second.pid), "by its handle"
        assert [member.name for member in group.members] == ["trainer", "other", "loop"]


def test_the_end_of_the_supervisor(actors: dict[str, Any], in_child: Callable[..., Any]) -> None:
    """What has joined goes on, leaves, and joins the next group; nothing waits for the dead supervisor."""
    group = rtr.init_group(actors, name="trained", detached=True)
    in_child(children.join, "engine")
    assert ray.get(actors["other"].run.remote(call, "engine", "double", 2)) == 4
    host = ray.get_actor("trained", namespace="raytorchrpc")
    ray.kill(host)

    def ended() -> bool:
        try:
            ray.get(host.info.remote())
        except ray.exceptions.RayActorError:
            return True
        return False

    assert wait_until(ended, 30)
    group.shutdown()
    began = time.monotonic()
    assert in_child(call, "other", "double", 2) == 4
    in_child(leave)
    with pytest.raises(rtr.BootstrapError, match="the process that supervises group 'trained' has ended"):
        in_child(children.join, "engine")
    assert time.monotonic() - began < 50
    with rtr.init_group(actors, name="trained"):
        in_child(children.join, "engine")
        assert ray.get(actors["other"].run.remote(call, "engine", "double", 2)) == 4


def test_torchrpc_to_and_from_a_child(group: rtr.Group, actors: dict[str, Any], in_child: Callable[..., Any]) -> None:
    """RRefs, autograd and torch's own API: the listeners admit the connections of processes that joined."""
    in_child(children.join, "engine")

    def by_torch(target: str) -> tuple[float, float, float]:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rtr.rpc_sync(target).double(x).sum()])
            gradient = autograd.get_gradients(context)[x].sum().item()
        (its,) = [member.rpc_name for member in rtr.get_group("trained").members if member.name == target]
        added = rpc.rpc_sync(its, torch.add, args=(torch.ones(3), 1)).sum().item()
        return rtr.remote(target).double(torch.ones(3)).to_here().sum().item(), gradient, added

    assert in_child(by_torch, "other") == (6, 6, 6)
    assert ray.get(actors["other"].run.remote(by_torch, "engine")) == (6, 6, 6)


def test_what_lives_in_a_child_ends_with_it(group: rtr.Group, actors: dict[str, Any], changes: Any) -> None:
    trainer = actors["trainer"]
    ray.get(trainer.run.remote(children.start, "victim"))
    ray.get(trainer.run.remote(children.do, "victim", children.join, "victim"))
    jobs, weights = rtr.Queue("jobs", home="victim"), rtr.WeightStore("policy", home="victim")
    ray.get(trainer.run.remote(children.do, "victim", lambda: weights.publish({"w": torch.ones(8)})))
    jobs.put("job")
    getting = actors["other"].run.remote(lambda: (jobs.get(30), jobs.get(30)))
    assert wait_until(lambda: jobs.qsize() == 0, 30)
    ray.get(trainer.run.remote(children.end, "victim"))
    with pytest.raises(rtr.PeerLost, match="home of queue 'jobs'"):
        ray.get(getting, timeout=30)
    with pytest.raises(rtr.PeerLost, match="home of weight store 'policy'"):
        ray.get(actors["other"].run.remote(lambda: weights.pull({"w": torch.zeros(8)})))
