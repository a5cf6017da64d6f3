"""Weights of which few elements change at each step, between actors on simulated hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
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
from tests.ray.weight_helpers import came_from, no_group_is_left, pid_of  # noqa: F401

PUBLISHERS = ("t0", "t1")
SHAPE = (1024, 1024)


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {name: spawn_for_module(Peer, max_restarts=-1) for name in (*PUBLISHERS, "reader")}


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        separate(actors)
        yield group


def separate(actors: dict[str, Any]) -> None:
    """Let all actors take the reader for one on another host."""
    nodes = {name: "two" if name == "reader" else "one" for name in actors}
    ray.get([actor.run.remote(insides.pretend, nodes) for actor in actors.values()], timeout=60)


def whole(version: int) -> torch.Tensor:
    """At each version, one element of a hundred is new."""
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16()
    for step in range(2, version + 1):
        bits = tensor.view(torch.int16)
        bits[torch.rand(SHAPE, generator=torch.Generator().manual_seed(step)) < 0.01] ^= step
    return tensor


def publish(store: rtr.WeightStore, number: int | None, version: int) -> int:
    tensor = whole(version)
    if number is None:
        return store.publish({"w": tensor}, version)
    half = SHAPE[0] // 2
    return store.publish({"w": rtr.Shard(tensor[number * half :][:half], SHAPE, (number * half, 0))}, version)


_models: dict[str, Any] = {}


def pull(store: rtr.WeightStore, since: int | None, columns: int = SHAPE[1]) -> tuple[int, int]:
    """Pull the last columns into the model that this actor has; returns the version, and the bytes that came."""
    first = SHAPE[1] - columns
    model = _models.setdefault(store.name, rtr.Shard(torch.zeros(SHAPE[0], columns).bfloat16(), SHAPE, (0, first)))
    before = sum(came_from().values())
    version = store.pull({"w": model}, since=since)
    assert torch.equal(model.tensor.view(torch.int16), whole(version)[:, first:].contiguous().view(torch.int16))
    return version, sum(came_from().values()) - before


def test_one_percent_of_the_elements_takes_few_of_the_bytes(actors: dict[str, Any]) -> None:
    store = rtr.WeightStore("few", home="t0", track=True)
    came = []
    for versions, since in (((1,), None), ((2,), 1), ((3, 4), 2), ((5,), 4)):
        for version in versions:
            in_actor(actors["t0"], publish, store, None, version)
        found, size = in_actor(actors["reader"], pull, store, since)
        assert found == versions[-1]
        came.append(size)
    full, delta, two_steps, again = came
    assert full >= 2 * SHAPE[0] * SHAPE[1] and two_steps > 0.9 * full
    assert max(delta, again) < 0.15 * full, came


def test_shards_and_a_publisher_that_is_restarted(actors: dict[str, Any], group: rtr.Group) -> None:
    store = rtr.WeightStore("shards", publishers=PUBLISHERS, track=True)

    def publish_all(version: int) -> None:
        runs = [actors[name].run.remote(publish, store, number, version) for number, name in enumerate(PUBLISHERS)]
        assert ray.get(runs, timeout=60) == [version] * 2

    def came(version: int) -> int:
        found, size = in_actor(actors["reader"], pull, store, version - 1, 700)
        assert found == version
        return size

    publish_all(1)
    full = came(1)
    publish_all(2)
    assert came(2) < 0.15 * full
    pid = in_actor(actors["t1"], os.getpid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid_of(actors["t1"]) not in (None, pid), 60)
    group.wait_ready(60)
    separate(actors)
    publish_all(3)
    assert came(3) > 0.4 * full, "one has the version before, the other has lost it"
    publish_all(4)
    assert came(4) < 0.15 * full
