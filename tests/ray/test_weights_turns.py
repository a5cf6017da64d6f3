"""Readers of one host that pull the same and feed one another, as GPUs do. Here with CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights import chained_pull, pull_plan
from raytorchrpc.patterns.weights.published import KIND
from tests import insides
from tests.insides import in_actor
from tests.polling import wait_until
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
from tests.ray.weight_helpers import came_from

READERS = ("a", "b", "c")
SIZE = 1 << 20
BYTES = 4 * 4 * SIZE


def take_turns(patience_s: float = 30.0) -> None:
    pull_plan.IN_TURN, pull_plan.WORTH_A_TURN = {"cpu"}, 1
    chained_pull.ON_A_HOST = chained_pull.Pace(1 << 20, 64, 6)
    chained_pull.PATIENCE_S = patience_s


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {name: spawn_for_module(Peer) for name in ("home", *READERS)}


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        for actor in actors.values():
            in_actor(actor, take_turns)
        yield group


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((SIZE,), value) for name in ("a", "b", "c", "d")}


def publish(store: rtr.WeightStore, value: int) -> int:
    return store.publish(weights(float(value)), value)


def pull(store: rtr.WeightStore, kept: dict[str, Any] = {}) -> list[float]:  # noqa: B006 - per process
    """The version, and every value that came."""
    mine, model = kept.setdefault(store.name, (store, weights(-1.0)))
    version = mine.pull(model)
    return [version, *{value for tensor in model.values() for value in tensor.unique().tolist()}]


def pull_all(actors: dict[str, Any], store: rtr.WeightStore, value: int) -> None:
    in_actor(actors["home"], publish, store, value)
    pulls = [actors[name].run.remote(pull, store) for name in READERS]
    assert ray.get(pulls, timeout=60) == [[value, float(value)]] * len(READERS)


def pull_once_read(store: rtr.WeightStore) -> list[float]:
    """As ``pull``, but begin to receive only when another has begun to read."""
    from_home = chained_pull.ChainedPull._from_home

    def wait_for_a_reader(self: chained_pull.ChainedPull, *args: Any) -> bool:
        assert wait_until(lambda: self.feeds.pool.readers > 0, 20)
        return from_home(self, *args)

    chained_pull.ChainedPull._from_home = wait_for_a_reader  # type: ignore[method-assign]
    try:
        return pull(store)
    finally:
        chained_pull.ChainedPull._from_home = from_home  # type: ignore[method-assign]


def has_a_leader(version: int) -> bool:
    """At the home: whether a reader pulls a version for others."""
    relays = insides.served(KIND)["in turn"].relays
    return wait_until(lambda: any(what[0] == version and found for what, found in relays._rounds.items()), 20)


def test_readers_feed_one_another(actors: dict[str, Any]) -> None:
    store = rtr.WeightStore("in turn", home="home")
    for value in (1, 2):  # they get to know one another
        pull_all(actors, store, value)
    in_actor(actors["home"], publish, store, 3)
    before = in_actor(actors["b"], came_from)
    leads = actors["a"].run.remote(pull_once_read, store)
    assert in_actor(actors["home"], has_a_leader, 3)
    assert in_actor(actors["b"], pull, store) == [3, 3.0]
    assert ray.get(leads, timeout=60) == [3, 3.0]
    came = {peer: size - before.get(peer, 0) for peer, size in in_actor(actors["b"], came_from).items()}
    assert came["a"] >= BYTES and came["home"] < BYTES / 10, came
