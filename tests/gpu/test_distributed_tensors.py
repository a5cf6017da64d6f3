"""DTensors on GPUs: the shards cross by the group's lanes, and arrive on a mesh of the receiver's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import raytorchrpc as rtr
from tests.ray.actors import Peer

pytestmark = pytest.mark.gpu(2)


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    ray.init(address="local", num_gpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield [ray.remote(Peer).options(num_gpus=1, num_cpus=0).remote() for _ in range(2)]
    ray.shutdown()


kept: list[DeviceMesh] = []


def enter() -> None:
    kept.append(rtr.register_device_mesh(init_device_mesh("cuda", (2,), mesh_dim_names=("replica",))))


def double_at(peer: str) -> tuple[bool, str, float, float]:
    tensor = DTensor.from_local(torch.ones(1 << 20, device="cuda"), kept[0], [Replicate()])
    found = rtr.rpc_sync(peer).double(tensor)
    return (
        found.device_mesh is kept[0],
        found.device.type,
        found.to_local().mean().item(),
        found.sum().full_tensor().item(),
    )


def test_a_dtensor_goes_there_and_back(pair: list[Any]) -> None:
    with rtr.init_group(dict(zip("ab", pair, strict=True))) as group:
        group.process_group("nccl")
        ray.get([actor.run.remote(enter) for actor in pair], timeout=120)
        found = ray.get(
            [actor.run.remote(double_at, peer) for actor, peer in zip(pair, "ba", strict=True)], timeout=120
        )
    assert found == [(True, "cuda", 2.0, 2.0 * (1 << 20))] * 2
