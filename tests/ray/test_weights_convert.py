"""Weights that arrive in fp8 with scales: on one host, between simulated hosts, and from several publishers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.calls.member import process_member
from tests import insides
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
from tests.ray.weight_helpers import came_from, no_group_is_left  # noqa: F401

FP8 = torch.float8_e4m3fn
SHAPES = {"first": (1280, 1100), "second": (300, 1024)}
NAMES = ("learner", "other", "a", "b")


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {name: spawn_for_module(Peer) for name in NAMES}


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        yield group


def weight(name: str, version: int) -> torch.Tensor:
    made = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(version)) * version
    return made.bfloat16()


def given(version: int) -> dict[str, torch.Tensor]:
    return {**{name: weight(name, version) for name in SHAPES}, "norm": torch.full((1100,), float(version))}


def publish(store: rtr.WeightStore, version: int) -> int:
    return store.publish(given(version), version)


def quantized() -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = {"norm": torch.zeros(1100, dtype=torch.bfloat16)}
    for name, (rows, columns) in SHAPES.items():
        model[name] = torch.zeros(rows, columns, dtype=FP8)
        model[f"{name}_scale_inv"] = torch.zeros(-(-rows // 128), -(-columns // 128))
    return model


def fits(values: torch.Tensor, scales: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether every element is within half a step of the format: 1/16 of it, or 1/1024 of the scale."""
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: right.shape[0], : right.shape[1]]
    wrong = (values.float() * whole - right.float()).abs()
    return bool((wrong <= torch.maximum(right.float().abs() / 16, whole / 1024) * 1.001).all())


def holds(model: dict[str, torch.Tensor], version: int) -> bool:
    right = all(fits(model[name], model[f"{name}_scale_inv"], weight(name, version)) for name in SHAPES)
    return right and bool((model["norm"] == version).all())


def pull(store: rtr.WeightStore) -> tuple[int, bool]:
    model = quantized()
    version = store.pull(model, convert=rtr.BlockFp8())
    return version, holds(model, version)


def test_half_the_bytes_cross_and_the_publisher_converts_once(actors: dict[str, Any]) -> None:
    store = rtr.WeightStore("whole", home="learner")

    def brought(fp8: bool) -> int:
        model = quantized() if fp8 else {name: torch.zeros_like(tensor) for name, tensor in given(1).items()}
        before = came_from()["learner"]
        store.pull(model, convert=rtr.BlockFp8() if fp8 else False)
        return came_from()["learner"] - before

    def conversions() -> int:
        snapshot = next(reversed(store._object(process_member())._versions.values()))
        return len(snapshot.converted)

    for version in (1, 2):
        assert ray.get(actors["learner"].run.remote(publish, store, version), timeout=60) == version
        pulls = [actors[name].run.remote(pull, store) for name in ("a", "b", "learner")]
        assert ray.get(pulls, timeout=60) == [(version, True)] * 3
    assert ray.get(actors["learner"].run.remote(conversions)) == 3, "values, scales, and norm as bfloat16"
    fp8, half = (ray.get(actors["a"].run.remote(brought, fp8), timeout=60) for fp8 in (True, False))
    assert 0 < fp8 <= 0.55 * half, (fp8, half)


def test_one_member_of_a_host_brings_them_for_the_others(actors: dict[str, Any], group: rtr.Group) -> None:
    store, here = rtr.WeightStore("far", home="learner"), group.members[0].node_id
    ray.get(actors["learner"].run.remote(publish, store, 1), timeout=60)
    try:
        nodes = {name: "two" if name in ("a", "b") else here for name in actors}
        ray.get([actor.run.remote(insides.pretend, nodes) for actor in actors.values()], timeout=60)
        before = [ray.get(actors[name].run.remote(came_from)).get("learner", 0) for name in ("a", "b")]
        pulls = [actors[name].run.remote(pull, store) for name in ("a", "b")]
        assert ray.get(pulls, timeout=60) == [(1, True)] * 2
        after = [ray.get(actors[name].run.remote(came_from)).get("learner", 0) for name in ("a", "b")]
        assert sum(after) - sum(before) < 1.5 * sum(tensor.nbytes for tensor in quantized().values())
    finally:
        here_again = [actor.run.remote(insides.pretend, dict.fromkeys(actors, here)) for actor in actors.values()]
        ray.get(here_again, timeout=60)


def test_shards_are_quantized_where_they_are(actors: dict[str, Any]) -> None:
    """Two publishers have rows; a reader has columns, as a row-parallel layer of an inference engine."""
    store = rtr.WeightStore("shards", publishers=["learner", "other"])

    def publish_rows(number: int) -> int:
        made = weight("first", 3)
        first, last = ((0, 768), (768, 1280))[number]
        return store.publish({"first": rtr.Shard(made[first:last], made.shape, (first, 0))}, 3)

    def pull_columns(first: int, last: int) -> bool:
        whole, blocks = SHAPES["first"], (10, 9)
        part = torch.zeros(1280, last - first, dtype=FP8)
        scales = torch.zeros(10, -(-last // 128) - first // 128)
        shards = {
            "first": rtr.Shard(part, whole, (0, first)),
            "first_scale_inv": rtr.Shard(scales, blocks, (0, first // 128)),
        }
        for _ in range(2):  # the second time by the plan of the first
            part.view(torch.uint8).zero_()
            store.pull(shards, convert=rtr.BlockFp8())
        return fits(part, scales, weight("first", 3)[:, first:last])

    published = [actors[name].run.remote(publish_rows, at) for at, name in enumerate(("learner", "other"))]
    assert ray.get(published, timeout=60) == [3, 3]
    pulls = [actors["a"].run.remote(pull_columns, 0, 640), actors["b"].run.remote(pull_columns, 640, 1100)]
    assert ray.get(pulls, timeout=60) == [True, True]


def test_only_a_part_crosses(actors: dict[str, Any]) -> None:
    """Whole versions, of which only what was published anew is brought."""
    store = rtr.WeightStore("part", home="learner")

    def publish_norm(version: int) -> int:
        return store.publish({**given(version), "norm": torch.full((1100,), float(version))}, version, only="norm")

    def pull_since(since: int | None, only: str | None) -> tuple[int, bool, int]:
        empty = {name: torch.zeros_like(value) for name, value in given(1).items()}
        model = vars(insides.saved).setdefault("whole", empty)  # of this actor, which lives on
        before = came_from()["learner"]
        version = store.pull(model, since=since, only=only)
        came = came_from()["learner"] - before
        right = all(torch.equal(model[name], weight(name, 1)) for name in SHAPES)
        return version, right and bool((model["norm"] == version).all()), came

    assert ray.get(actors["learner"].run.remote(publish, store, 1), timeout=60) == 1
    assert ray.get(actors["a"].run.remote(pull_since, None, None), timeout=60)[:2] == (1, True)
    for version, only in ((2, None), (3, "norm"), (4, "no*")):
        assert ray.get(actors["learner"].run.remote(publish_norm, version), timeout=60) == version
        found = ray.get(actors["a"].run.remote(pull_since, version - 1, only), timeout=60)
        assert found[:2] == (version, True) and 0 < found[2] < 50_000, found

    def pull_fp8() -> bool:
        model = quantized()
        store.pull(model, convert=rtr.BlockFp8())
        right = all(fits(model[name], model[f"{name}_scale_inv"], weight(name, 1)) for name in SHAPES)
        return right and bool((model["norm"] == 4).all())

    assert ray.get(actors["b"].run.remote(pull_fp8), timeout=60)
