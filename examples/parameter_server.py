"""Asynchronous SGD: one actor holds the parameters; workers pull them, compute a
gradient and push it back.

While one worker computes, the others push. Its gradient is then based on parameters
that are some updates old. The number of these updates is the gradient's staleness.
The server takes smaller steps for stale gradients.

    python examples/parameter_server.py  # three workers, about ten seconds
    python examples/parameter_server.py --workers 2 --steps 100  # the short form

The last line reports what was checked. If a check fails, the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor, nn

import raytorchrpc as rtr

INPUTS, HIDDEN, CLASSES = 64, 512, 10


@dataclass
class Result:
    """On the test set; and how many gradients had which staleness."""

    first_loss: float
    last_loss: float
    accuracy: float
    staleness: Counter[int]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(first, nn.ReLU(), last)


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns points around ten centres, and the index of each point's centre."""
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, INPUTS, generator=generator)
    return centres[labels] + 2 * noise, labels


@ray.remote
class Server:
    """Holds the parameters.

    As in every sync actor, methods run one at a time, so no pull returns half an
    update.
    """

    def __init__(self, rate: float) -> None:
        self.model, self.rate = make_model(), rate
        self.updates = 0
        self.staleness: Counter[int] = Counter()

    @rtr.method
    def pull(self) -> tuple[int, list[Tensor]]:
        """Returns the number of updates so far, and the parameters."""
        return self.updates, [each.detach() for each in self.model.parameters()]

    @rtr.method
    def push(self, gradients: list[Tensor], seen: int) -> None:
        """Takes a step with gradients of the parameters after ``seen`` updates."""
        stale = self.updates - seen
        pairs = zip(self.model.parameters(), gradients, strict=True)
        with torch.no_grad():
            for parameter, gradient in pairs:
                parameter -= self.rate / (1 + stale) * gradient
        self.updates += 1
        self.staleness[stale] += 1

    def evaluate(self) -> tuple[float, float]:
        """Returns loss and accuracy on points that no worker has.

        It is not decorated, so only ``.remote()`` can call it.
        """
        inputs, labels = make_data(2000, seed=1)
        with torch.no_grad():
            outputs = self.model(inputs)
        accuracy = (outputs.argmax(1) == labels).float().mean()
        return float(nn.functional.cross_entropy(outputs, labels)), float(accuracy)

    def get_staleness(self) -> Counter[int]:
        return self.staleness


@ray.remote
class Worker:
    """Computes gradients on its own data."""

    def __init__(self, number: int) -> None:
        self.model = make_model()
        self.inputs, self.labels = make_data(4000, seed=2 + number)
        self.generator = torch.Generator().manual_seed(number)

    def train(self, server: Any, steps: int) -> None:
        parameters = list(self.model.parameters())
        for _ in range(steps):
            # Receives into this model's memory.
            seen, _ = rtr.rpc_sync(server, into=parameters).pull()
            batch = torch.randint(len(self.inputs), (64,), generator=self.generator)
            outputs = self.model(self.inputs[batch])
            loss = nn.functional.cross_entropy(outputs, self.labels[batch])
            gradients = torch.autograd.grad(loss, parameters)
            rtr.rpc_sync(server).push(list(gradients), seen)


def main(arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description="SGD with a parameter server.")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="steps of each worker")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--accuracy", type=float, default=0.9, help="to reach")
    options = parser.parse_args(arguments)
    if options.workers < 1 or options.steps < 1:
        parser.error("--workers and --steps must be at least 1")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    server = Server.remote(options.rate)
    workers = [Worker.remote(number) for number in range(options.workers)]
    first_loss, accuracy = ray.get(server.evaluate.remote())
    print(f"before: loss {first_loss:.3f}, accuracy {accuracy:.1%}")
    with rtr.init_group([server, *workers]):
        ray.get([worker.train.remote(server, options.steps) for worker in workers])
    last_loss, accuracy = ray.get(server.evaluate.remote())
    staleness = ray.get(server.get_staleness.remote())
    pushes = staleness.total()
    print(f"after {pushes} pushes: loss {last_loss:.3f}, accuracy {accuracy:.1%}")
    for stale, count in sorted(staleness.items()):
        print(f"  {count:5} gradients were {stale} updates old")
    if accuracy < options.accuracy:
        sys.exit(f"parameter_server: accuracy {accuracy:.1%} is too low")
    print(f"checked: accuracy {accuracy:.1%} is at least {options.accuracy:.1%}")
    return Result(first_loss, last_loss, accuracy, staleness)


if __name__ == "__main__":
    main()
