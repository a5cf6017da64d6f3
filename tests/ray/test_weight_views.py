"""Versions that actors read where another one has published them, whoever ends first."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
from tests.ray.weight_helpers import no_readers

#: Above what travels in a message.
SIZE = 1 << 18
STORE = "viewed"


@pytest.fixture
def actors(peers: list[Any], spawn: Spawn) -> dict[str, Any]:
    return {"learner": peers[0], "reader": peers[1], "other": spawn(Peer)}


def learn(value: float) -> int:
    """From a generator, without ever having the model whole."""
    store = rtr.WeightStore(STORE)
    return store.publish((f"layer{number}", torch.full((SIZE,), value + number)) for number in range(3))


def look(keep: bool) -> list[float]:
    """Read the newest version in place, and maybe keep a part of one tensor."""
    with rtr.WeightStore(STORE, home="learner").view() as view:
        assert view.copied_because is None
        if keep:
            insides.saved.part = view["layer2"][10:20]
        found = [float(tensor.mean()) for tensor in view.values()]
    return found


def part() -> list[float]:
    return insides.saved.part.tolist()


def drop() -> None:
    del insides.saved.part
    gc.collect()


def free() -> bool:
    return no_readers(rtr.WeightStore(STORE))


def test_what_is_viewed_stays_until_it_is_dropped_or_its_reader_ends(actors: dict[str, Any]) -> None:
    with rtr.init_group(actors):
        assert in_actor(actors["learner"], learn, 1.0) == 1
        views = [in_actor(actors[name], look, keep) for name, keep in (("reader", True), ("other", True))]
        assert views == [[1, 2, 3]] * 2 and in_actor(actors["learner"], look, False) == [1, 2, 3]
        for value in range(2, 6):
            assert in_actor(actors["learner"], learn, float(value)) == value
            assert in_actor(actors["reader"], part) == [3] * 10 == in_actor(actors["other"], part)
        in_actor(actors["reader"], drop)
        assert in_actor(actors["reader"], look, False) == [5, 6, 7]
        assert in_actor(actors["other"], part) == [3] * 10
        ray.kill(actors["other"])
        assert in_actor(actors["learner"], free), "a reader that has ended keeps nothing"
