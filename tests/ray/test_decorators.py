"""Decorators of others above ``@rtr.method``: a direct call runs them, as Ray does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.ray.conftest import Spawn
from tests.ray.decorated import Decorated, DecoratedAsync


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> Iterator[dict[str, Any]]:
    made = {
        "a": spawn_for_module(Decorated),
        "b": spawn_for_module(Decorated),
        "threaded": spawn_for_module(Decorated, max_concurrency=4),
        "async": spawn_for_module(DecoratedAsync),
    }
    with rtr.init_group(made, include_driver=True):
        yield made


EXPECTED = {
    "inherited": 2,
    "overridden": 6,
    "concurrent": 4,
    "of_itself": 6,
    "no_grad": False,
    "inference": True,
    "autocast": "torch.bfloat16",
    "alone": 1,
    "in_time": 1,
}


def call_in_every_way(target: str, name: str) -> list[Any]:
    return [
        getattr(rtr.rpc_sync(target, timeout=60), name)(),
        getattr(rtr.rpc_async(target, timeout=60), name)().wait(),
        getattr(rtr.remote(target, timeout=60), name)().to_here(),
    ]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("target", ["b", "threaded"])
def test_what_stands_above_the_decorator_runs_however_it_is_called(
    actors: dict[str, Any], target: str, name: str
) -> None:
    by_ray = ray.get(getattr(actors[target], name).remote(), timeout=60)
    assert by_ray == EXPECTED[name]
    assert call_in_every_way(target, name) == [by_ray] * 3, "from the driver"
    assert ray.get(actors["a"].run.remote(call_in_every_way, target, name), timeout=60) == [by_ray] * 3
    assert ray.get(actors[target].run.remote(call_in_every_way, target, name), timeout=60) == [by_ray] * 3, "of itself"


def test_a_chain_comes_back_through_the_decorators(actors: dict[str, Any]) -> None:
    assert rtr.rpc_sync("b", timeout=60).chain("a", "b") == 8
    assert ray.get(actors["b"].chain.remote("a", "b"), timeout=60) == 8


def test_generators_and_object_refs(actors: dict[str, Any]) -> None:
    assert list(rtr.rpc_sync("b").items()) == [2, 4] == [ray.get(item) for item in actors["b"].items.remote()]
    assert list(rtr.rpc_sync("b").modes()) == [False, False]
    assert list(rtr.rpc_sync("b").modes_inside()) == [False, False, False, True]
    assert rtr.rpc_sync("b").ref().tolist() == [2, 2, 2]
    assert ray.get(actors["a"].run.remote(torch.Tensor.tolist, actors["b"].ref.remote()), timeout=60) == [2, 2, 2]
    assert rtr.rpc_sync("b").cached() == rtr.rpc_sync("b").cached()


def test_an_async_actor(actors: dict[str, Any]) -> None:
    target = actors["async"]
    for name in ("coroutine", "plain"):
        assert rtr.rpc_sync("async").__getattr__(name)() == ray.get(getattr(target, name).remote()) == 2
    assert list(rtr.rpc_sync("async").items()) == [2, 4]
    with pytest.raises(rtr.SerializationError, match=r"async\.not_awaited is a coroutine .* decorator"):
        rtr.rpc_sync("async").not_awaited()


@pytest.mark.parametrize("target", ["b", "threaded"])
def test_a_lock_above_the_decorator_is_taken_by_direct_calls_and_those_of_ray(
    actors: dict[str, Any], target: str
) -> None:
    """In one order, or they would wait for each other."""
    direct = [rtr.rpc_async(target, timeout=60).alone() for _ in range(20)]
    refs = [actors[target].alone.remote() for _ in range(20)]
    assert {future.wait() for future in direct} == set(ray.get(refs, timeout=60)) == {1}


def test_a_decorator_that_hides_the_method_is_named(actors: dict[str, Any]) -> None:
    assert ray.get(actors["b"].hidden.remote()) == 1
    with pytest.raises(rtr.NoSuchMethod, match=r"Decorated\.hidden is not exposed: the decorator above .* hides it"):
        rtr.rpc_sync("b").hidden()
