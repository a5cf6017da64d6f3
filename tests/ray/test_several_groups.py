"""Actors that are in two groups at a time, which share some of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.insides import Team
from tests.polling import wait_until
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn, kill_for_good, pid_of

Groups = tuple[rtr.Group, rtr.Group]


@pytest.fixture(scope="module")
def actors(peers: list[Any]) -> dict[str, Any]:
    return dict(zip(("both", "mine", "tq"), peers, strict=True))


@pytest.fixture(scope="module", autouse=True)
def groups(actors: dict[str, Any]) -> Iterator[Groups]:
    """The second one needs no argument more than the first."""
    both, other, unit = actors.values()
    with (
        rtr.init_group({"both": both, "peer": other}, name="mine") as mine,
        rtr.init_group({"both": both, "unit": unit}, name="tq", config=rtr.GroupConfig(joinable_by="cluster")) as tq,
    ):
        yield mine, tq


def call(target: Any, group: str | None = None) -> Any:
    return rtr.rpc_sync(target, group=group).who()


def test_a_call_finds_the_group_of_its_target(actors: dict[str, Any], groups: Groups) -> None:
    both, other, unit = actors.values()
    for target in (unit, "unit", groups[1].members[1]):
        assert ray.get(both.run.remote(call, target)) == ("unit", pid_of(unit))
    for target in (other, "peer", groups[0].members[1]):
        assert ray.get(both.run.remote(call, target)) == ("peer", pid_of(other))
    assert ray.get(both.run.remote(call, 1, "tq"))[0] == "unit"
    assert ray.get(both.run.remote(call, 1, "mine"))[0] == "peer"
    with pytest.raises(rtr.ConfigurationError, match="1 is a rank in each of groups 'mine' and 'tq': say"):
        ray.get(both.run.remote(call, 1))
    with pytest.raises(rtr.NotAMember, match="'nobody' is in none of this process's groups 'mine' and 'tq'"):
        ray.get(both.run.remote(call, "nobody"))


def test_a_method_means_the_group_whose_call_it_serves(actors: dict[str, Any]) -> None:
    def ask(rank: int) -> Any:
        return rtr.rpc_sync("both").give(lambda: (rtr.current_member().group, rtr.rpc_sync(rank).who()))

    both, other, unit = actors.values()
    assert ray.get(other.run.remote(ask, 1)) == ("mine", ("peer", pid_of(other)))
    assert ray.get(unit.run.remote(ask, 1)) == ("tq", ("unit", pid_of(unit)))
    with pytest.raises(rtr.ConfigurationError, match="this process is in groups 'mine' and 'tq'"):
        ray.get(both.run.remote(rtr.current_member))
    assert ray.get(both.run.remote(lambda: rtr.current_member(group="tq"))).rank == 0


def test_queues_and_weights_belong_to_one_group(actors: dict[str, Any]) -> None:
    def make() -> Any:
        with pytest.raises(rtr.ConfigurationError, match="this process is in groups 'mine' and 'tq'"):
            rtr.Queue("rows")
        queue, weights = rtr.Queue("rows", group="tq"), rtr.WeightStore("policy", group="mine")
        weights.publish({"w": torch.arange(3)})
        queue.put({"x": torch.ones(1 << 18)})
        return queue, weights, rtr.Queue("back", home="unit")

    both, other, unit = actors.values()
    queue, weights, back = ray.get(both.run.remote(make))

    def take(queue: rtr.Queue, back: rtr.Queue) -> Any:
        back.put("thanks")
        return queue.get(30)["x"].sum().item()

    def pull(weights: rtr.WeightStore) -> Any:
        state = {"w": torch.zeros(3, dtype=torch.int64)}
        return weights.pull(state), state["w"].tolist()

    assert ray.get(unit.run.remote(take, queue, back)) == 1 << 18
    assert ray.get(other.run.remote(pull, weights)) == (1, [0, 1, 2])
    assert ray.get(both.run.remote(lambda: back.get(30))) == "thanks"
    assert back.get(0) if back.stats()["items"] else True  # the driver is a client of the right group
    assert ray.get(both.run.remote(lambda: rtr.Queue.find("rows").home)) == "both"
    with pytest.raises(rtr.NotFound):
        ray.get(both.run.remote(lambda: rtr.Queue.find("rows", group="mine")))


def test_the_same_group_twice_is_refused(actors: dict[str, Any]) -> None:
    both, _, unit = actors.values()
    with pytest.raises(rtr.BootstrapError, match="group 'tq' exists"):
        rtr.init_group([both], name="tq")

    def form_again(unit: Any) -> None:
        rtr.init_group([unit], name="tq")

    with pytest.raises(rtr.BootstrapError, match="already in group 'tq'; end that one"):
        ray.get(both.run.remote(form_again, unit))
    assert ray.get(both.run.remote(call, "unit"))[0] == "unit"


def test_one_group_ends_while_the_other_goes_on(actors: dict[str, Any]) -> None:
    both, other, _ = actors.values()
    with rtr.init_group({"x": both, "y": other}, name="third"):
        assert ray.get(both.run.remote(call, "y"))[0] == "y"
    assert ray.get(both.run.remote(call, "unit"))[0] == "unit" and ray.get(both.run.remote(call, "peer"))[0] == "peer"
    with pytest.raises(rtr.NotAMember, match="in no group 'third'; it is in groups 'mine' and 'tq'"):
        ray.get(both.run.remote(call, "y", "third"))


def test_a_second_group_starts_no_threads_and_opens_few_files(spawn: Spawn) -> None:
    """Of its own it has a listener, its connections and a shared arena, whose lost messages end with it."""

    def used() -> tuple[set[str], int]:
        """Threads but the workers, which end when they are idle, and the listeners after the first, which a busy one
        starts; and open files.
        """
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("raytorchrpc")]
        assert names.count("raytorchrpc-listener-1") <= 1, "one selector for all groups"
        lasting = {name for name in names if not name.startswith(("raytorchrpc-peer", "raytorchrpc-listener"))}
        return lasting, len(os.listdir("/proc/self/fd"))

    def talk(group: str) -> tuple[set[str], int]:
        for peer, other in ((one, two), (two, one)):
            ray.get(peer.run.remote(call, other, group))
        return ray.get(one.run.remote(used))  # type: ignore[no-any-return]

    one, two = spawn(Peer), spawn(Peer)
    with rtr.init_group([one, two], name="first"):
        threads, files = talk("first")
        with rtr.init_group([one, two], name="second"):
            more, most = talk("second")
            assert more == threads and most <= files + 11
        assert ray.get(one.run.remote(call, two))[1] == pid_of(two)
        assert wait_until(lambda: talk("first")[1] <= files + 2, 30)


def double(target: Any, group: str | None = None) -> Any:
    return rtr.remote(target, group=group).double(21).to_here()


def test_the_torchrpc_agent_serves_both_groups(actors: dict[str, Any]) -> None:
    both, other, unit = actors.values()
    assert ray.get([both.run.remote(double, other), both.run.remote(double, unit)]) == [42, 42]
    assert ray.get([other.run.remote(double, both), unit.run.remote(double, both)]) == [42, 42]
    with rtr.init_group([both, unit], name="passing"):
        assert ray.get(unit.run.remote(double, both, "passing")) == 42
    assert ray.get(both.run.remote(double, unit)) == 42, "the end of a group has taken the peer of another away"


def test_a_group_that_the_agent_does_not_fit_goes_without(spawn: Spawn) -> None:
    first, both, second = (spawn(Peer) for _ in range(3))
    config = rtr.GroupConfig(interface="lo")
    with rtr.init_group([first, both], name="left"), rtr.init_group([both, second], name="right", config=config):
        assert ray.get(both.run.remote(call, second))[1] == pid_of(second)
        assert ray.get(both.run.remote(double, first)) == 42
        with pytest.raises(rtr.LaneUnavailable, match="agent serves another group; this needs other devices"):
            ray.get(both.run.remote(double, second))
        with pytest.raises(rtr.LaneUnavailable, match="the torchrpc agent of 'peer_0' serves another group"):
            ray.get(second.run.remote(double, both))


def test_a_member_that_restarts_rejoins_all_its_groups(actors: dict[str, Any], spawn: Spawn) -> None:
    first, both, second = actors["mine"], spawn(Peer, max_restarts=-1, max_task_retries=-1), actors["tq"]
    with rtr.init_group({"a": first, "both": both}, name="left") as left, rtr.init_group([both, second], name="right"):
        before = pid_of(both)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        # Calls that the new process makes wait for the groups that they need.
        assert ray.get(both.run.remote(call, "a"))[0] == "a"
        assert ray.get(both.run.remote(call, second))[1] == pid_of(second)
        assert pid_of(both) != before
        left.wait_ready(60)
        rtr.get_group("right").wait_ready(60)
        for peer in (first, second):
            assert ray.get(peer.run.remote(call, both))[1] == pid_of(both)
        names = ray.get(both.run.remote(lambda: [rtr.get_group(name).name for name in ("left", "right")]))
        assert names == ["left", "right"]


class Producer:
    """Without methods for direct calls, as an actor whose library joins a storage group."""

    def __init__(self) -> None:
        self.joined = rtr.join("tq", name="producer")
        self.unit = call("unit")

    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def seen(self) -> Any:
        return self.unit

    def leave(self) -> None:
        self.joined.leave()


class WithMethods(Peer):
    def __init__(self) -> None:
        super().__init__()
        rtr.join("tq")


def test_an_actor_that_serves_no_methods_joins_in_its_init(actors: dict[str, Any], spawn: Spawn) -> None:
    unit = actors["tq"]
    producer = spawn(Producer)
    assert ray.get(producer.seen.remote()) == ("unit", pid_of(unit))
    with rtr.init_group({"own": producer, "peer": actors["mine"]}, name="engines"):
        assert ray.get(producer.run.remote(call, "peer"))[0] == "peer"
        assert ray.get(producer.run.remote(call, "unit"))[0] == "unit"
    ray.get(producer.leave.remote())
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"members may call its methods .*join\(instance=\.\.\.\)"):
        ray.get(spawn(WithMethods).threads.remote())


def test_a_package_that_makes_actors_members_leaves_other_groups_alone(actors: dict[str, Any]) -> None:
    """See integrations/team.py, which verl and TorchRL use."""
    both, other, unit = actors.values()
    team = Team("engines")
    assert team.hold("verl", {"trainer": [both, other], "rollout": [unit]}) == ["trainer_0", "trainer_1", "rollout_0"]
    assert ray.get(both.run.remote(call, "rollout_0"))[1] == ray.get(both.run.remote(call, "unit"))[1] == pid_of(unit)
    team.release("verl")
    assert ray.get(both.run.remote(call, "unit"))[0] == "unit" and ray.get(both.run.remote(call, "peer"))[0] == "peer"


def test_a_package_finds_the_members_that_the_program_has_made(actors: dict[str, Any]) -> None:
    both, other, unit = actors.values()
    with rtr.init_group({"a": both, "b": other}, name="engines") as group:
        team = Team("engines")
        assert team.hold("verl", {"trainer": [both, other], "rollout": [unit]}) == ["a", "b", "rollout_0"]
        team.release("verl")
        assert [member.name for member in group.members] == ["a", "b"]


def test_a_process_that_dies_is_lost_to_both_groups(actors: dict[str, Any], spawn: Spawn) -> None:
    first, both, second = actors["mine"], spawn(Peer), actors["tq"]
    with rtr.init_group({"a": first, "both": both}, name="left"), rtr.init_group([both, second], name="right"):
        kill_for_good(both)
        for survivor in (first, second):
            with pytest.raises((rtr.PeerLost, rtr.NotAMember)):
                ray.get(survivor.run.remote(call, both))
