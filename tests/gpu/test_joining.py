"""A child that uses CUDA joins the group of the actor that started it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.gpu.ends import Runner
from tests.insides import in_actor
from tests.ray import children

pytestmark = pytest.mark.gpu

ELEMENTS = 3_000_000


class Trainer(Runner):
    @rtr.method
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture(scope="module")
def trainers() -> Iterator[dict[str, Any]]:
    """Two actors on one GPU, the first of which has a child on it."""
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        made = {name: ray.remote(Trainer).options(num_gpus=0.45).remote() for name in ("trainer", "other")}
        in_actor(made["trainer"], children.start, "child", "spawn")
        yield made
        in_actor(made["trainer"], children.end, "child")
    finally:
        ray.shutdown()


@pytest.fixture
def in_child(trainers: dict[str, Any]) -> Callable[..., Any]:
    return lambda function, *args: in_actor(trainers["trainer"], children.do, "child", function, *args)


def doubled(target: str) -> tuple[str, bool]:
    """Whether CUDA tensors cross to this member and back."""
    data = torch.arange(ELEMENTS, device="cuda", dtype=torch.float32)
    result = rtr.rpc_sync(target).double(data)
    return result.device.type, torch.equal(result, data * 2)


def test_weights_and_calls_on_the_gpu(trainers: dict[str, Any], in_child: Callable[..., Any]) -> None:
    with rtr.init_group(trainers, name="trained") as group:
        in_child(lambda: torch.zeros(1, device="cuda").item())  # it joins as one that uses CUDA
        in_child(children.join, "engine")
        assert in_child(doubled, "other") == ("cuda", True)  # the trainer is busy with its child
        assert in_actor(trainers["other"], doubled, "engine") == ("cuda", True)
        lanes = {row.lane for row in group.stats() if "engine" in (row.caller, row.peer)}
        assert "cuda_ipc" in lanes, group.explain("other", "engine")

        store = rtr.WeightStore("policy", home="trainer")
        in_actor(
            trainers["trainer"],
            lambda: store.publish({"w": torch.arange(ELEMENTS, device="cuda", dtype=torch.float32)}),
        )

        def pull() -> bool:
            into = {"w": torch.zeros(ELEMENTS, device="cuda")}
            store.pull(into)
            return torch.equal(into["w"], torch.arange(ELEMENTS, device="cuda", dtype=torch.float32))

        assert in_child(pull)
        in_child(lambda: rtr.get_group("trained").leave())


def test_a_child_without_cuda_stays_without(trainers: dict[str, Any]) -> None:
    """Joining initialises CUDA in no process."""
    in_actor(trainers["trainer"], children.start, "plain", "spawn")

    def plain(function: Callable[..., Any], *args: Any) -> Any:
        return in_actor(trainers["trainer"], children.do, "plain", function, *args)

    with rtr.init_group(trainers, name="trained"):
        plain(children.join, "plain")
        assert plain(lambda: torch.equal(rtr.rpc_sync("other").double(torch.ones(8)), torch.full((8,), 2.0)))
        assert not plain(torch.cuda.is_initialized)
    in_actor(trainers["trainer"], children.end, "plain")
