"""The nixl lane between actors of one host, where it has to be asked for by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor, needs_nixl
from tests.polling import wait_until
from tests.ray.conftest import Spawn
from tests.ray.test_tensor_lanes import MIB, TensorStore, bytes_by_lane

pytestmark = needs_nixl
LANES = ("socket", "nixl", "torchrpc")


@pytest.fixture(scope="module")
def stores(spawn_for_module: Spawn) -> list[Any]:
    return [spawn_for_module(TensorStore) for _ in range(2)]


@pytest.fixture(scope="module")
def group(stores: list[Any]) -> Iterator[rtr.Group]:
    config = rtr.GroupConfig(lanes=LANES, shm_bytes=256 * MIB)
    with rtr.init_group(dict(zip("ab", stores, strict=True)), config=config) as group:
        yield group


def used() -> int:
    """Bytes of this process's registered memory that somebody still holds."""
    lane = insides.tensor_lane("nixl")
    lane.reap()
    return int(lane._pool.used)


def comes_to_nothing() -> bool:
    return wait_until(lambda: used() == 0, 20)


def all_given_back(actors: list[Any]) -> bool:
    return all(in_actor(actor, comes_to_nothing) for actor in actors)


def test_large_tensors_and_arrays_go_by_nixl_both_ways(stores: list[Any], group: rtr.Group) -> None:
    def exchange() -> None:
        tensor, array = torch.arange(3_000_000.0), numpy.arange(1_000_000.0)
        sent = {"tensor": tensor, "array": array, "text": "x", "small": torch.ones(3)}
        for _ in range(3):
            back = rtr.rpc_sync("b").echo(sent)
            assert torch.equal(back["tensor"], tensor)
            assert (back["array"] == array).all()
            assert torch.equal(back["small"], torch.ones(3))
            back["tensor"].zero_()
            assert float(tensor.sum()), "what came back is private"

    in_actor(stores[0], exchange)
    lanes = bytes_by_lane(group, "a", "b")
    assert lanes["nixl"][0] > 3 * 20_000_000
    assert lanes["nixl"][1] > 3 * 20_000_000
    assert all_given_back(stores)


def test_what_does_not_fit_stays_in_the_message(spawn: Spawn) -> None:
    actors = [spawn(TensorStore) for _ in range(2)]
    config = rtr.GroupConfig(lanes=LANES, shm_bytes=4 * MIB)

    def exchange() -> None:
        large, fits = torch.arange(2_000_000.0), torch.arange(400_000.0)
        assert torch.equal(rtr.rpc_sync("q").echo(large), large)
        assert torch.equal(rtr.rpc_sync("q").echo(fits), fits)

    with rtr.init_group(dict(zip("pq", actors, strict=True)), name="another", config=config) as group:
        in_actor(actors[0], exchange)
        lanes = bytes_by_lane(group, "p", "q")
    assert lanes["socket"][0] >= 8_000_000
    assert lanes["nixl"][0] >= 1_600_000
