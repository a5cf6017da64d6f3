"""Weights of FSDP2 trainers, pulled by tensor parallel actors, as DTensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

import raytorchrpc as rtr
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn

TRAINERS, GENERATORS = ("t0", "t1"), ("g0", "g1")


class Model(torch.nn.Module):
    """Like a layer of a decoder; 5 rows are uneven over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 8)
        self.down = torch.nn.Linear(8, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 5, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(torch.relu(self.up(x)))))  # type: ignore[no-any-return]


class End(Peer):
    def build(self, trains: bool, rank: int, file: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
        torch.manual_seed(0)
        self.model = Model()
        if trains:
            fully_shard(self.model, mesh=mesh)
        else:
            head = ColwiseParallel(output_layouts=Replicate())
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": head}
            parallelize_module(self.model, mesh, plan)
            self.model.norm.weight = torch.nn.Parameter(distribute_tensor(self.model.norm.weight, mesh, [Replicate()]))

    def publish(self, store: rtr.WeightStore, version: int) -> int:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(version)
                local = parameter.to_local()  # type: ignore[attr-defined]
                local += torch.rand_like(local)
            self.model.steps.fill_(version)
        return store.publish(self.model, version)

    def whole(self) -> dict[str, torch.Tensor]:
        """All members of a process group call this together."""
        values = self.model.state_dict().items()
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in values}

    def pull(self, store: rtr.WeightStore) -> int:
        return store.pull(self.model)

    def swap(self, store: rtr.WeightStore) -> tuple[int, bool, bool]:
        """Prefetch and swap; also whether the parameters stayed the same objects, and nothing changed before."""
        parameters, before = list(self.model.parameters()), self.local()
        handle = store.prefetch(self.model)
        handle.wait(30)
        unchanged = all(torch.equal(*pair) for pair in zip(before, self.local(), strict=True))
        version = handle.swap()
        return version, all(a is b for a, b in zip(parameters, self.model.parameters(), strict=True)), unchanged

    def local(self) -> list[torch.Tensor]:
        values = self.model.state_dict().values()
        return [copy.copy(value.to_local() if hasattr(value, "to_local") else value).clone() for value in values]


@pytest.fixture(scope="module")
def ends(spawn_for_module: Spawn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    made = {name: spawn_for_module(End) for name in (*TRAINERS, *GENERATORS)}
    files = tmp_path_factory.mktemp("stores")
    builds = [
        made[name].build.remote(names is TRAINERS, rank, str(files / names[0]))
        for names in (TRAINERS, GENERATORS)
        for rank, name in enumerate(names)
    ]
    ray.get(builds, timeout=90)
    with rtr.init_group(made):
        yield made


@pytest.fixture
def store(request: pytest.FixtureRequest) -> rtr.WeightStore:
    return rtr.WeightStore(request.node.name, publishers=TRAINERS)


def published(ends: dict[str, Any], store: rtr.WeightStore, version: int) -> dict[str, torch.Tensor]:
    """Publish a version; returns the global tensors."""
    assert ray.get([ends[name].publish.remote(store, version) for name in TRAINERS], timeout=60) == [version] * 2
    return ray.get([ends[name].whole.remote() for name in TRAINERS], timeout=60)[0]


def check(ends: dict[str, Any], right: dict[str, torch.Tensor]) -> None:
    for found in ray.get([ends[name].whole.remote() for name in GENERATORS], timeout=60):
        assert found.keys() == right.keys()
        assert all(torch.equal(found[name], right[name]) for name in right)


def pull_whole(store: rtr.WeightStore) -> dict[str, torch.Tensor]:
    model = Model()
    store.pull(model)
    return model.state_dict()


def test_fsdp_to_tensor_parallel(ends: dict[str, Any], store: rtr.WeightStore) -> None:
    for version in (1, 2):
        right = published(ends, store, version)
        assert ray.get([ends[name].pull.remote(store) for name in GENERATORS], timeout=60) == [version] * 2
        check(ends, right)
    whole = ray.get(ends["g1"].run.remote(pull_whole, store), timeout=60)
    assert all(torch.equal(whole[name], right[name]) for name in right)


def test_prefetch_and_swap_of_dtensors(ends: dict[str, Any], store: rtr.WeightStore) -> None:
    for version in (1, 2):
        right = published(ends, store, version)
        swaps = [ends[name].swap.remote(store) for name in GENERATORS]
        assert ray.get(swaps, timeout=60) == [(version, True, True)] * 2
        check(ends, right)


def test_a_partial_sum_is_refused(ends: dict[str, Any], store: rtr.WeightStore) -> None:
    def publish(store: rtr.WeightStore) -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(rtr.ConfigurationError) as raised:
            store.publish({"sum": DTensor.from_local(torch.ones(2), mesh, [Partial()])})
        return str(raised.value)

    for text in ray.get([ends[name].run.remote(publish, store) for name in TRAINERS], timeout=60):
        assert "'sum'" in text and "redistribute() it to Shard or Replicate first" in text
