"""Forming, showing and ending a group, with every kind of actor Ray has."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raytorchrpc as rtr
from tests import insides
from tests.insides import has_ended
from tests.polling import wait_until
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn, kill_for_good
from tests.ray.plain import Plain, PlainAsync

Kinds = dict[str, Any]
#: Those that never heard of raytorchrpc expose no methods, but they can be members.
EXPOSE_NOTHING = {"plain", "plain_async"}


class Inherits(Peer):
    """Decorated methods come from the parent; one of them is overridden and stays exposed by its own decorator."""

    @rtr.method
    def double(self, x: Any) -> Any:
        return super().double(x)


@pytest.fixture(scope="module")
def kinds(spawn_for_module: Spawn, special: dict[str, Any]) -> Iterator[Kinds]:
    """One actor of each kind, by what is special about it."""

    class Local(Peer):  # has no importable name: Ray brings the class by value, as from a script's __main__
        pass

    spawn = spawn_for_module
    space = placement_group([{"CPU": 1}])
    yield {
        "sync": spawn(Peer),
        **special,
        "named": spawn(Peer, name="somebody"),
        "detached": spawn(Peer, name="lasting", lifetime="detached"),
        "placed": spawn(Peer, num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(space)),
        "fractional": spawn(Peer, num_gpus=0.25),
        "restartable": spawn(Peer, max_restarts=2),
        "plain": spawn(Plain),
        "plain_async": spawn(PlainAsync),
        "local": spawn(Local),
        "inherits": spawn(Inherits),
        "long_name": spawn(type("Größenordnung" + "X" * 80, (Peer,), {})),
    }
    remove_placement_group(space)


def reach(caller: Any, target: Any) -> Any:
    """``double`` of ``target``, asked for by an actor of whatever class. Returns a reference."""
    if hasattr(caller, "call"):
        return caller.call.remote(target, "double", 21)
    return caller.__ray_call__.remote(lambda self, target: rtr.rpc_sync(target).double(21), target)


# --- kinds of actors ----------------------------------------------------------------------------------------


def test_every_kind_of_actor_reaches_every_kind(kinds: Kinds) -> None:
    """Thirteen members, most of which were still starting when the group was asked for."""
    with rtr.init_group(kinds) as group:
        assert [member.name for member in group.members] == list(kinds)
        answers = {
            (caller, target): reach(handle, target)
            for caller, handle in kinds.items()
            for target in kinds
            if target not in EXPOSE_NOTHING
        }
        for pair, answer in answers.items():
            assert ray.get(answer, timeout=60) == 42, pair
        assert repr(group).endswith("... 7 more>") and len(repr(group)) < 200


def test_an_actor_has_its_gpus_also_if_it_joins_as_another_object(kinds: Kinds) -> None:
    """As one that uses a library does, which offers an object of its own."""
    asked = {name: insides.in_actor(kinds[name], insides.asked_for_gpu) for name in ("fractional", "sync")}
    assert asked == {"fractional": (True, True), "sync": (False, False)}


def test_every_copy_of_a_handle_means_the_same_member(kinds: Kinds, peers: list[Any]) -> None:
    looked_up = ray.get_actor("lasting")
    with rtr.init_group([looked_up, peers[0]]) as group:
        for copy in (looked_up, kinds["detached"]):
            assert ray.get(peers[0].call.remote(copy, "double", 21)) == 42
            assert group.explain(copy, peers[0]).startswith("peer_0 <-> peer_1")


def test_an_actor_that_is_restarting_is_waited_for(kinds: Kinds, peers: list[Any]) -> None:
    restarting = kinds["restartable"]
    with rtr.init_group({"r": restarting, "peer": peers[0]}) as first:
        pid = first.members[0].pid
    ray.kill(restarting, no_restart=False)
    assert wait_until(lambda: has_ended(pid), 60)  # Ray kills it a moment later
    with rtr.init_group({"r": restarting, "peer": peers[0]}) as second:
        assert second.members[0].pid != pid
        assert ray.get(peers[0].call.remote("r", "who")) == ("r", second.members[0].pid)


@pytest.mark.parametrize("detached", [False, True])
def test_only_one_of_several_threads_forms_a_group_of_a_name(peers: list[Any], detached: bool) -> None:
    def form(peer: Any) -> str | None:
        try:
            formed.append(rtr.init_group([peer], name="wanted", detached=detached))
            return None
        except rtr.BootstrapError as error:
            return str(error)

    formed: list[rtr.Group] = []
    with ThreadPoolExecutor(len(peers)) as pool:
        refusals = [text for text in pool.map(form, peers) if text is not None]
    for group in formed:
        group.shutdown()
    assert len(formed) == 1 and all(text.startswith("group 'wanted' ") for text in refusals)
    rtr.init_group(peers[:1], name="wanted", detached=detached).shutdown()


# --- list, dict, names ------------------------------------------------------------------------------------------


def test_a_list_names_members_by_class_and_rank(kinds: Kinds, peers: list[Any]) -> None:
    long_name = kinds["long_name"]
    with rtr.init_group([peers[0], kinds["asynchronous"], kinds["inherits"], long_name]) as group:
        names = ["peer_0", "async_peer_1", "inherits_2"]
        assert [(m.rank, m.name) for m in group.members[:3]] == list(enumerate(names))
        assert group.members[3].name, "a class may have any name"


def test_a_dict_names_members_and_every_form_of_target_reaches_them(peers: list[Any]) -> None:
    with rtr.init_group({"learner": peers[0], "collector": peers[1]}) as group:
        learner = group.members[0]
        for target in ("learner", 0, peers[0], learner):
            assert ray.get(peers[1].call.remote(target, "who")) == ("learner", learner.pid)
        assert ray.get(peers[0].call.remote("learner", "who")) == ("learner", learner.pid), "itself, from within"


def test_members_know_who_they_are(peers: list[Any]) -> None:
    def describe() -> rtr.Member:
        return rtr.current_member()

    with rtr.init_group(peers, name="trio") as group:
        assert tuple(ray.get([peer.run.remote(describe) for peer in peers])) == group.members
        assert len({member.rpc_name for member in group.members}) == 3
        assert len({member.worker_id for member in group.members}) == 3
        assert {member.node_id for member in group.members} == {ray.get_runtime_context().get_node_id()}
        assert repr(group) == "<raytorchrpc.Group 'trio': 3 members on 1 node: peer_0, peer_1, peer_2>"
        assert "Member(rank=1, name='peer_1'" in repr(group.members[1])


# --- showing it -------------------------------------------------------------------------------------------


def test_stats_have_busy_members_too_and_name_methods_queues_and_weights(
    peers: list[Any], latch: Callable[[], Latch]
) -> None:
    def use(step: Callable[[rtr.Queue, rtr.WeightStore], object]) -> None:
        step(rtr.Queue("batches", home="b"), rtr.WeightStore("policy", home="b"))

    def weights() -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(10)}

    a, b, c = peers
    with rtr.init_group({"a": a, "b": b, "c": c}) as group:
        ray.get(b.run.remote(use, lambda queue, store: store.publish(weights())))
        ray.get(a.run.remote(use, lambda queue, store: (queue.put_many([1, 2, 3]), queue.get(), store.pull(weights()))))
        ray.get(b.run.remote(use, lambda queue, store: [store.publish(weights()) for _ in range(2)]))
        ray.get(a.call.remote("b", "double", 1))
        gate = latch()
        working = b.busy.remote(gate)
        arrived = gate.await_arrival()
        stats = group.stats(timeout=10)
        gate.release(arrived)
        ray.get(working)
    assert (stats.missing, {row.caller for row in stats}) == ((), {"a"})
    methods = {row.method: row for row in stats.methods}
    assert {"double", "queue batches.put", "queue batches.take", "weight store policy.lease"} <= methods.keys()
    assert methods["double"].peer == "b" and methods["double"].mean_ms
    (queue,) = stats.queues
    assert (queue.home, queue.name, queue.items, queue.put, queue.taken) == ("b", "batches", 2, 3, 1)
    assert {row.member: (row.published, row.pulled, row.lag) for row in stats.weights} == {
        "a": (0, 1, 2),
        "b": (3, 0, 0),
    }
    assert all(said in str(stats) for said in ("queue batches.put", "queue batches", "policy"))


# --- views, copies, the driver --------------------------------------------------------------------------------


def test_a_pickled_group_is_a_view_that_works_inside_a_member(peers: list[Any]) -> None:
    def show(group: rtr.Group) -> tuple[str, str, str, str]:
        return repr(group), group.routes().table(120), group.generation, rtr.get_group().generation

    with rtr.init_group(peers) as group:
        shown = ray.get(peers[0].run.remote(show, group))
        assert shown == (repr(group), group.routes().table(120), group.generation, group.generation)


@pytest.mark.parametrize("action", ["stats", "shutdown"])
def test_a_copy_of_a_group_refuses_what_only_the_original_can(peers: list[Any], action: str) -> None:
    with rtr.init_group(peers[:2]) as group:
        copy = pickle.loads(pickle.dumps(group))
        with pytest.raises(rtr.NotAMember, match="works in the process that called init_group; this is a copy"):
            getattr(copy, action)()
        assert ray.get(peers[0].call.remote(peers[1], "double", 1)) == 2


def test_a_group_does_not_keep_its_actors_alive_from_inside(spawn: Spawn, peers: list[Any]) -> None:
    short_lived = ray.remote(Peer).options(num_cpus=0).remote()
    pid = ray.get(short_lived.run.remote(os.getpid))
    group = rtr.init_group({"short": short_lived, "peer": peers[0]})
    ray.get(peers[0].run.remote(rtr.get_group))
    group.shutdown()
    del short_lived, group
    # Threads of the group may hold it for a moment longer, in what only the collector frees.
    assert wait_until(lambda: gc.collect() >= 0 and has_ended(pid), 60)


def test_get_group_in_the_driver_is_the_group_itself(peers: list[Any]) -> None:
    with rtr.init_group(peers[:2], name="mine") as group:
        assert rtr.get_group("mine") is group
        with pytest.raises(rtr.NotAMember, match=r"no group 'default' \(known here: mine\)"):
            rtr.get_group()
    with pytest.raises(rtr.NotAMember):
        rtr.get_group("mine")


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_driver_can_be_a_member_and_again(peers: list[Any], name: str) -> None:
    with rtr.init_group({"a": peers[0], "b": peers[1]}, name=name, include_driver=True) as group:
        me = rtr.current_member()
        assert (me.rank, me.name, me.actor_id, me.pid) == (2, "driver", None, os.getpid())
        assert group.members[2] == me
        assert rtr.rpc_sync("a").double(21) == 42
        assert rtr.rpc_async(peers[1]).double(21).result(timeout=60) == 42
        assert asyncio.run(_await_double("a")) == 42
        assert rtr.remote("a").double(21).to_here() == 42
        with pytest.raises(rtr.NoSuchMethod, match="'driver' exposes no methods: it is a driver, or it joined"):
            ray.get(peers[0].call.remote("driver", "double", 1))
    with pytest.raises(rtr.NotAMember):
        rtr.rpc_sync("a").double(21)


async def _await_double(target: str) -> Any:
    return await rtr.rpc_async(target).double(21)


# --- ending it, and the next one -----------------------------------------------------------------------------


def test_the_group_ends_with_its_block_even_by_an_exception(peers: list[Any]) -> None:
    with pytest.raises(KeyError), rtr.init_group(peers[:2]) as group:
        pids = [member.pid for member in group.members]
        raise KeyError("of the user")
    with pytest.raises(rtr.NotAMember):
        ray.get(peers[0].call.remote(peers[1], "double", 1))
    assert ray.get([peer.run.remote(os.getpid) for peer in peers[:2]]) == pids, "the actors live on"
    with rtr.init_group(peers[:2]) as second:
        group.shutdown()  # an old one must not end the new one of the same name
        assert rtr.get_group() is second
        assert ray.get(peers[0].call.remote(peers[1], "double", 21)) == 42
    assert "'default': ended, had 2 members" in repr(group) and "peer_0" in repr(group)
    assert "socket" in repr(group.routes()) == str(group.routes()), "the view stays"
    assert "socket" in group.explain(0, 1)
    for use in (group.wait_ready, group.stats, lambda: group.on_change(print)):
        with pytest.raises(rtr.BootstrapError, match="group 'default' was shut down"):
            use()


def test_shutdown_with_a_dead_member_frees_the_others(spawn: Spawn, peers: list[Any]) -> None:
    mortal = spawn(Peer)
    group = rtr.init_group([*peers[:2], mortal])
    kill_for_good(mortal)
    group.shutdown()
    with rtr.init_group(peers[:2]):
        assert ray.get(peers[0].call.remote(peers[1], "double", 21)) == 42


def test_shutdown_does_not_wait_for_a_busy_member_which_leaves_later(
    peers: list[Any], latch: Callable[[], Latch], caplog: pytest.LogCaptureFixture
) -> None:
    group = rtr.init_group({"a": peers[0], "b": peers[1]}, name="busy one")
    gate = latch()
    working = peers[1].busy.remote(gate)
    group.shutdown(timeout=1)
    assert "group 'busy one': leaving when their methods return: b" in caplog.text
    gate.open()
    ray.get(working)
    with rtr.init_group({"a": peers[0], "b": peers[1]}):
        assert ray.get(peers[0].call.remote("b", "double", 21)) == 42


def test_nothing_of_ended_groups_is_left_in_their_members(peers: list[Any]) -> None:
    def threads() -> list[str]:
        names = (thread.name for thread in threading.enumerate() if "raytorchrpc" in thread.name)
        return [name for name in names if name not in ("raytorchrpc-deadlines", "raytorchrpc-cleanup")]  # they stay

    def threads_at_rest() -> list[str]:
        wait_until(lambda: not threads(), 60)  # they end a moment after they were told to
        return threads()

    def files(most: int = 0) -> int:
        """The fewest that are open: Ray opens some for a moment."""
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= most, 20 if most else 0)
        return len(os.listdir("/proc/self/fd"))

    def cycle() -> None:
        with rtr.init_group(peers[:2]):
            ray.get(peers[0].call.remote(peers[1], "double", 1))
            ray.get(peers[1].call.remote(peers[0], "double", 1))
            assert ray.get(peers[0].run.remote(threads))

    cycle()  # the agent stays from here on
    before = ray.get(peers[0].run.remote(files))
    for _ in range(4):
        cycle()
    assert ray.get(peers[0].run.remote(threads_at_rest)) == []
    assert ray.get(peers[0].run.remote(files, before + 3)) <= before + 3


def test_two_groups_side_by_side_do_not_see_each_other(kinds: Kinds, peers: list[Any]) -> None:
    left = {"x": peers[0], "y": peers[1]}
    right = {"x": kinds["sync"], "y": kinds["threaded"]}
    with rtr.init_group(left, name="left") as one, rtr.init_group(right, name="right") as other:
        assert one.generation != other.generation
        pids = {
            name: [ray.get(handles["x"].call.remote("y", "who"))[1], ray.get(handles["y"].call.remote("x", "who"))[1]]
            for name, handles in (("left", left), ("right", right))
        }
        assert len({*pids["left"], *pids["right"]}) == 4
        with pytest.raises(rtr.NotAMember, match="is not in group 'left'"):
            ray.get(peers[0].call.remote(kinds["sync"], "double", 1))
        other.shutdown()
        assert ray.get(peers[0].call.remote("y", "double", 21)) == 42
