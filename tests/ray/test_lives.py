"""Handles belong to one life of their object, and say so when it has ended: its home was restarted, or the group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.polling import wait_until
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn

#: Above what travels in a message: these weights are read where they were published.
LARGE = 1 << 18


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {"home": spawn_for_module(Peer, max_restarts=-1), "reader": spawn_for_module(Peer)}


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        yield group


def restart(actors: dict[str, Any], group: rtr.Group) -> None:
    """Kill the home, and wait until it is back as another process."""
    before = next(m.incarnation for m in group.members if m.name == "home")
    ray.kill(actors["home"], no_restart=False)
    assert wait_until(lambda: next(m.incarnation for m in group.members if m.name == "home") > before, 60)
    group.wait_ready()


def weights(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((LARGE,), value) for name, value in values.items()}


def publish(**values: float) -> None:
    rtr.WeightStore("it", track=True).publish(weights(**values), 5)


def not_found(use: Callable[[], Any]) -> str:
    with pytest.raises(rtr.NotFound) as error:
        use()
    return str(error.value)


def use_everything() -> None:
    """In the reader: objects of all kinds, with something in each."""
    queue, topic = rtr.Queue("it", home="home"), rtr.Topic("it", home="home")
    store = rtr.WeightStore("it", home="home", track=True)
    queue.put("old")
    subscription = topic.subscribe()
    topic.publish("old")
    model = weights(a=0.0, b=0.0)
    assert store.pull(model) == 5
    insides.saved.kept = queue, topic, subscription, store, model


def remake(**values: float) -> None:
    """At home: objects of the same names, with the same version of other weights."""
    rtr.Queue("it").put("new")
    rtr.Topic("it").publish("new")
    publish(**values)


def use_all_again() -> None:
    """In the reader: none of the old handles reaches a new object."""
    queue, topic, subscription, store, model = insides.saved.kept
    uses: list[Callable[[], Any]] = [
        lambda: queue.put("to whom"),
        queue.get_nowait,
        queue.qsize,
        queue.close,
        lambda: list(queue.items()),
        lambda: topic.publish("to whom"),
        topic.subscribe,
        topic.close,
        topic.stats,
        subscription.get,
        lambda: list(subscription),
        store.version,
        lambda: store.wait(1, 0),
        lambda: store.pull(model),
        lambda: store.pull(model, since=5),
        lambda: store.pull(model, 5),
    ]
    for use in uses:
        assert "has no" in not_found(use)
    assert all(bool((tensor == value).all()) for tensor, value in zip(model.values(), (1.0, 2.0), strict=True))
    subscription.cancel()  # no effect on anybody else


def use_the_new() -> list[Any]:
    """In the reader: handles made again by name, and found ones. The model has the old store's version 5."""
    queue, store = rtr.Queue("it", home="home"), rtr.WeightStore.find("it")
    model = insides.saved.kept[4]
    assert rtr.Topic.find("it").stats()["put"] == 1, "the old handle published nothing"
    return [queue.qsize(), queue.get(), store.pull(model, since=5), *(float(tensor[0]) for tensor in model.values())]


def test_old_handles_reach_nothing_after_a_restart_of_the_home(actors: dict[str, Any], group: rtr.Group) -> None:
    in_actor(actors["home"], lambda: publish(a=1.0, b=2.0))
    in_actor(actors["reader"], use_everything)
    restart(actors, group)
    missing = in_actor(actors["reader"], lambda: not_found(insides.saved.kept[0].qsize))
    assert "queue 'it'" in missing and "'home'" in missing and "ended" in missing and "by name again" in missing
    in_actor(actors["home"], lambda: remake(a=101.0, b=102.0))
    missing = in_actor(actors["reader"], lambda: not_found(insides.saved.kept[3].version))
    assert "weight store 'it' that is there now is a new one" in missing
    in_actor(actors["reader"], use_all_again)
    assert in_actor(actors["reader"], use_the_new) == [1, "new", 5, 101.0, 102.0]


def test_a_handle_carries_the_life_that_it_was_used_in(actors: dict[str, Any], group: rtr.Group) -> None:
    """Into pickles; one that was not used makes the object, or binds to the one that is there."""
    unused = rtr.Queue("carried", home="home")

    def use() -> rtr.Queue:
        unused.put(1)
        return unused

    used = in_actor(actors["reader"], use)
    assert in_actor(actors["reader"], used.qsize) == in_actor(actors["home"], used.qsize) == 1
    assert in_actor(actors["reader"], lambda: rtr.Queue.find("carried").maxsize) == used.maxsize == 1024
    restart(actors, group)
    for name in actors:
        assert "has no" in in_actor(actors[name], lambda: not_found(used.qsize))
    assert in_actor(actors["home"], unused.qsize) == 0, "it made a new one"
    for name in actors:
        assert "new one" in in_actor(actors[name], lambda: not_found(used.qsize))


def test_the_next_group_has_other_objects(spawn: Spawn) -> None:
    """No process died: handles of the group before reach none of them, at home neither."""
    members = {"home": spawn(Peer), "reader": spawn(Peer)}
    pids = None

    def make_here() -> None:
        publish(a=1.0, b=2.0)
        insides.saved.own = rtr.Queue("it"), rtr.Topic("it"), rtr.WeightStore("it", track=True)

    def own_again() -> None:
        queue, topic, store = insides.saved.own
        model = weights(a=0.0, b=0.0)
        uses: list[Callable[[], Any]] = [
            lambda: queue.put("to whom"),
            queue.get_nowait,
            lambda: topic.publish("to whom"),
            store.version,
            lambda: store.publish(model),
            lambda: store.pull(model, since=5),
            store.clear,
        ]
        for use in uses:
            assert "has no" in not_found(use)

    with rtr.init_group(members, name="first"):
        in_actor(members["home"], make_here)
        in_actor(members["reader"], lambda: use_everything())
        pids = [in_actor(actor, os.getpid) for actor in members.values()]
    with rtr.init_group(members, name="second"):
        in_actor(members["home"], lambda: remake(a=101.0, b=102.0))
        in_actor(members["reader"], use_all_again)
        in_actor(members["home"], own_again)
        assert in_actor(members["reader"], use_the_new) == [1, "new", 5, 101.0, 102.0]
        assert pids == [in_actor(actor, os.getpid) for actor in members.values()]
