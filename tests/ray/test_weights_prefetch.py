"""Weights that arrive beside a model of another actor while it trains, and that the model then takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.insides import in_actor
from tests.ray.test_tensor_lanes import MIB
from tests.ray.weight_helpers import no_readers

#: Width of the model: its largest tensor does not travel in a message.
WIDTH = 600


@pytest.fixture(scope="module")
def actors(peers: list[Any]) -> dict[str, Any]:
    return dict(zip(("learner", "a"), peers, strict=False))


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors, config=rtr.GroupConfig(shm_bytes=64 * MIB)) as group:
        yield group


class Net(torch.nn.Module):
    """Its first and last layer have one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        )
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def publish(store: rtr.WeightStore, *seeds: int) -> int:
    return [store.publish(Net(seed)) for seed in seeds][-1]


def is_net(model: torch.nn.Module, seed: int) -> bool:
    expected = Net(seed).state_dict()
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(4.0 * WIDTH).view(4, WIDTH)).square().mean().backward()
    optimizer.step()


def test_a_model_trains_while_the_next_version_arrives(actors: dict[str, Any], request: Any) -> None:
    store = rtr.WeightStore(request.node.name, home="learner", keep=3)

    def train() -> None:
        model, twin = Net(0), Net(0)
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, twin)]
        for version in (1, 2, 3):
            handle, steps = store.prefetch(model, version), 0
            while not handle.done() or steps < 2:
                for net, optimizer in zip((model, twin), optimizers, strict=True):
                    step(net, optimizer)
                steps += 1
            trained, expected = model.state_dict(), twin.state_dict()
            assert all(torch.equal(trained[name], expected[name]) for name in expected), "nothing came meanwhile"
            assert handle.swap() == version and is_net(model, version)
            assert model.layers[2].weight is model.layers[0].weight
            twin.load_state_dict(model.state_dict())
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            step(net, optimizer)
        assert not is_net(model, 3)
        trained, expected = model.state_dict(), twin.state_dict()
        assert all(torch.equal(trained[name], expected[name]) for name in expected)

    in_actor(actors["learner"], publish, store, 1, 2, 3)
    in_actor(actors["a"], train)
    assert in_actor(actors["learner"], no_readers, store)
