"""The demo's training code: a parameter server and its workers, as a user of raytorchrpc would write them.

Asynchronous SGD: every worker pulls the newest parameters, computes gradients on its own share of the images and pushes
them back, without waiting for the other workers. Ray creates and places the actors; direct calls carry parameters and
gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor, nn
from torch.nn import functional

import raytorchrpc as rtr

LEARNING_RATE = 0.1
BATCH = 32
EVALUATE_EVERY = 25


class Progress(NamedTuple):
    steps: int
    accuracy: float


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def load_split(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 1797 handwritten digits: training and test images, training and test labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images, labels = torch.as_tensor(digits.data / 16).float(), torch.as_tensor(digits.target)
    parts = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=digits.target)
    return tuple(parts)


@ray.remote
class ParameterServer:
    """Holds the parameters, applies gradients as they arrive, and decides when to stop."""

    def __init__(self, seed: int, target: float, max_steps: int) -> None:
        torch.set_num_threads(1)
        self.model = make_model(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        _, self.images, _, self.labels = load_split(seed)
        self.target, self.max_steps = target, max_steps
        self.state = Progress(steps=0, accuracy=0.0)

    @rtr.method
    def pull(self) -> dict[str, Tensor]:
        """The current parameters; a copy, because the next push changes the originals."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    @rtr.method
    def push(self, gradients: dict[str, Tensor]) -> bool:
        """Take one step of gradient descent; returns False when training has ended."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()
        steps, accuracy = self.state.steps + 1, self.state.accuracy
        if steps % EVALUATE_EVERY == 0:
            with torch.no_grad():
                accuracy = (self.model(self.images).argmax(1) == self.labels).float().mean().item()
        self.state = Progress(steps, accuracy)
        return accuracy < self.target and steps < self.max_steps

    @rtr.method(concurrent=True)
    def progress(self) -> Progress:
        """The state; ``concurrent`` lets it run beside a ``push``."""
        return self.state

    @rtr.method(concurrent=True)
    def stop(self) -> None:
        """End training at the next push of each worker."""
        self.max_steps = 0


@ray.remote
class Worker:
    """Computes gradients on its share of the training images."""

    def __init__(self, rank: int, workers: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.model = make_model(seed)
        images, _, labels, _ = load_split(seed)
        self.images, self.labels = images[rank::workers], labels[rank::workers]
        self.random = torch.Generator().manual_seed(seed + rank)

    def train(self, server: ActorHandle[ParameterServer]) -> None:
        """Started by a Ray call; from here on, the two actors call each other directly."""
        training = True
        while training:
            parameters = rtr.rpc_sync(server).pull()
            training = rtr.rpc_sync(server).push(self.gradients(parameters))

    def gradients(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        self.model.load_state_dict(parameters)
        batch = torch.randint(len(self.images), (BATCH,), generator=self.random)
        loss = functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])
        names, values = zip(*self.model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, values), strict=True))

    def compare(self, server: ActorHandle[ParameterServer], exchanges: int) -> dict[str, list[float]]:
        """Seconds per exchange (one pull, one push of the same size) over either path, alternating."""
        nothing = {name: torch.zeros_like(value) for name, value in self.model.named_parameters()}

        def direct() -> None:
            rtr.rpc_sync(server).pull()
            rtr.rpc_sync(server).push(nothing)

        def object_store() -> None:
            ray.get(server.pull.remote())
            ray.get(server.push.remote(nothing))

        paths: dict[str, Callable[[], None]] = {"direct": direct, "object store": object_store}
        seconds: dict[str, list[float]] = {path: [] for path in paths}
        for _ in range(exchanges):
            for path, exchange in paths.items():
                start = time.perf_counter()
                exchange()
                seconds[path].append(time.perf_counter() - start)
        return seconds
