"""Stores with several publishers, between members of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import raytorchrpc as rtr
from tests.unit.members import Members

PUBLISHERS = ("a", "b")


def store(**options: Any) -> rtr.WeightStore:
    return rtr.WeightStore("w", publishers=PUBLISHERS, **options)


def half(number: int, value: float) -> rtr.Shard:
    return rtr.Shard(torch.full((3,), value), (6,), (3 * number,))


def publish(members: Members, *values: float, **options: Any) -> None:
    """One value for each publisher."""
    for number, (name, value) in enumerate(zip(PUBLISHERS, values, strict=True)):
        with members.acting(name):
            store(**options).publish({"w": half(number, value)})


def test_the_newest_versions_are_kept_by_all_publishers(members: Members) -> None:
    for value in (1.0, 2.0, 3.0):
        publish(members, value, value, keep=2)
    with members.acting("home"):
        model = torch.zeros(6)
        assert store(keep=2).pull({"w": model}, 2) == 2
        assert model.tolist() == [2.0] * 6
        with pytest.raises(rtr.NotFound, match=r"version 1 .*\(there: 2, 3\)"):
            store(keep=2).pull({"w": model}, 1)
        assert model.tolist() == [2.0] * 6


def test_a_lost_publisher_is_named_with_the_store(members: Members) -> None:
    publish(members, 1.0, 1.0)
    members.part(PUBLISHERS[1])
    with (
        members.acting("home"),
        pytest.raises(rtr.PeerLost, match=r"\(it is the home of shards of weight store 'w', whose"),
    ):
        store().pull({"w": torch.zeros(6)})


def test_publishers_in_any_order_are_one_store(members: Members) -> None:
    for number, name in enumerate(PUBLISHERS):
        with members.acting(name):
            assert rtr.WeightStore("w", publishers=[name, *set(PUBLISHERS) - {name}]).publish({"w": half(number, 1.0)})
    with members.acting("home"):
        model = torch.zeros(6)
        assert rtr.WeightStore("w", publishers=PUBLISHERS).pull({"w": model}) == 1
        assert model.tolist() == [1.0] * 6
        first, second = (rtr.WeightStore("w", publishers=order) for order in (PUBLISHERS, PUBLISHERS[::-1]))
        assert first.home == second.home and first.publishers == second.publishers


def test_shards_and_fused_parameters_of_a_store_with_one_home(members: Members) -> None:
    with members.acting("a"):
        rtr.WeightStore("w").publish({"q": torch.arange(8.0), "k": torch.arange(4.0)})
    with members.acting("home"):
        weights, fused = rtr.WeightStore("w", home="a"), torch.zeros(6)
        weights.pull({"qk": rtr.Shard(fused, (12,), (6,))}, mapping={"qk": ["q", "k"]})
    assert fused.tolist() == [4.0, 5.0, 6.0, 7.0, 2.0, 3.0]


def test_what_several_publishers_do_not_support_is_refused(members: Members) -> None:
    publish(members, 1.0, 1.0)
    with members.acting("a"), pytest.raises(rtr.ConfigurationError, match="clear is for whole tensors"):
        store().clear()
    with members.acting("home"), pytest.raises(rtr.ConfigurationError, match="is published by a, b, not by 'home'"):
        store().publish({"w": half(0, 1.0)})
    with members.acting("b"), pytest.raises(rtr.ConfigurationError, match=r"'w' .* is a shard: name all members"):
        rtr.WeightStore("one").publish({"w": half(0, 1.0)})


@pytest.fixture
def foreign() -> Iterator[Any]:
    """A DTensor of a device mesh without this process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = DeviceMesh("cpu", [1, 2])
        yield lambda *shape: distribute_tensor(torch.ones(shape), mesh, [Shard(0)] if shape else None)
    finally:
        dist.destroy_process_group()


def test_a_process_outside_of_a_device_mesh_has_nothing_of_its_tensors(members: Members, foreign: Any) -> None:
    """As with the stages of a pipeline, each on a mesh of its own."""
    for name, tensor in (("a", foreign(6, 2)), ("b", torch.ones(6, 2))):
        with members.acting(name):
            store().publish({"w": tensor, "own": torch.ones(1)})
    with members.acting("home"):
        mine = {"w": torch.zeros(6, 2), "own": torch.zeros(1)}
        assert store().pull(mine) == 1 and mine["w"].tolist() == [[1.0, 1.0]] * 6
        outside = {"w": foreign(6, 2), "own": torch.zeros(1)}
        assert store().pull(outside) == 1 and outside["own"].tolist() == [1.0]
        outside["own"].zero_()
        assert store().prefetch(outside).swap() == 1 and outside["own"].tolist() == [1.0]


def test_a_process_outside_of_a_device_mesh_has_nothing_of_its_numbers(members: Members, foreign: Any) -> None:
    for name, number in (("a", torch.tensor(3.0)), ("b", foreign())):
        with members.acting(name):
            assert store().publish({"x": number, "own": torch.ones(1)}) == 1
    with members.acting("home"):
        mine: dict[str, Any] = {"x": torch.tensor(0.0), "own": torch.zeros(1)}
        assert store().pull(mine) == 1 and mine["x"] == 3
        outside = {"x": foreign(), "own": torch.zeros(1)}
        assert store().pull(outside) == 1 and outside["own"] == 1
        with pytest.raises(rtr.ConfigurationError, match=r"'x' .* is not in its device mesh"):
            store().prefetch(outside)


@pytest.mark.parametrize("offset", [(5, 0), (-1, 0), (0, 1)])
def test_a_shard_outside_of_its_tensor_is_refused_at_once(members: Members, offset: tuple[int, int]) -> None:
    """Also if nothing is published yet, for which a pull waits."""
    wrong = {"w": rtr.Shard(torch.zeros(4, 4), (8, 4), offset)}
    for name, use in (("home", store().pull), ("a", store().publish)):
        with members.acting(name), pytest.raises(rtr.ConfigurationError, match=r"'w' .* does not lie in a global"):
            use(wrong, timeout=20)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield dist.init_device_mesh("cpu", (2, 2))
    finally:
        dist.destroy_process_group()


def test_weights_whose_shards_an_old_torch_places_wrongly_are_refused(
    members: Members, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.8 torch is wrong about where uneven shards of FSDP over tensor parallelism begin."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def weights(rows: int) -> dict[str, DTensor]:
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        return {"w": DTensor.from_local(torch.ones(2, 6), mesh, placements, shape=(rows, 6), stride=(6, 1))}

    monkeypatch.setattr(torch, "__version__", "2.7.0+cpu")
    store = rtr.WeightStore("w", publishers=("a", "b"))
    with members.acting("a"):
        assert store.publish(weights(8)) == 1
        with pytest.raises(rtr.ConfigurationError, match=r"different sizes needs torch 2\.8 or later, .* 2\.7\.0\+cpu"):
            store.publish(weights(7))
