"""Pipeline-parallel training: three actors each hold a part of the model, and micro-
batches flow through them.

Inside a distributed autograd context, activations carry their history from each stage
straight to the next, and the backward pass runs through the same stages. While one
stage processes a micro-batch, the others process earlier and later ones. Each stage
has its own optimizer.

    python examples/pipeline_training.py  # eight micro-batches, about ten seconds
    python examples/pipeline_training.py --steps 3 --pieces 4  # the short form

The last line compares losses and parameters with those of the same model in one
process. If they differ by more than rounding, the exit status is 1.
pipeline_autograd.py measures the gain of direct transfers between GPUs.
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

import raytorchrpc as rtr

STAGES, WIDTH, RATE, ROUNDING = 3, 128, 1e-3, 1e-9


def make_part(stage: int) -> nn.Module:
    """Returns one stage, with doubles: the order of additions does not matter."""
    torch.manual_seed(stage)
    last = nn.Linear(WIDTH, 1) if stage == STAGES - 1 else nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), last).double()


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(step)
    inputs = torch.randn(256, WIDTH, generator=seed, dtype=torch.double)
    return inputs, inputs[:, :4].sum(1, keepdim=True).tanh()


@ray.remote
class Stage:
    """Holds one part of the model. The first stage also drives the training."""

    def __init__(self, number: int, next_stage: Any = None) -> None:
        self.part, self.next_stage = make_part(number), next_stage
        self.optimizer = torch.optim.Adam(self.part.parameters(), RATE)
        self.lock, self.inside, self.at_once = threading.Lock(), 0, 0

    @rtr.method(concurrent=True)  # several micro-batches can be in flight
    def forward(self, x: Tensor) -> Tensor:
        """Returns the output of this stage and all later ones."""
        with self.lock:
            self.inside += 1
            self.at_once = max(self.at_once, self.inside)
            y = self.part(x)  # one at a time
        if self.next_stage is not None:
            y = rtr.rpc_sync(self.next_stage).forward(y)
        with self.lock:
            self.inside -= 1
        return y

    @rtr.method
    def step(self, context: int) -> None:
        """Updates this stage's parameters with the gradients of the context."""
        gradients = dist_autograd.get_gradients(context)
        for parameter in self.part.parameters():
            parameter.grad = gradients[parameter]
        self.optimizer.step()

    def train(self, stages: list[Any], steps: int, pieces: int) -> list[float]:
        losses = []
        for number in range(steps):
            inputs, target = make_batch(number)
            with dist_autograd.context() as context:
                # Send all micro-batches before waiting for the first result.
                first = rtr.rpc_async(stages[0])
                futures = [first.forward(piece) for piece in inputs.chunk(pieces)]
                outputs = torch.cat([future.wait() for future in futures])
                loss = nn.functional.mse_loss(outputs, target)
                dist_autograd.backward(context, [loss])
                for done in [rtr.rpc_async(stage).step(context) for stage in stages]:
                    done.wait()  # gradients end with the context
            losses.append(loss.item())
        return losses

    def state(self) -> tuple[list[Tensor], int]:
        return [each.detach() for each in self.part.parameters()], self.at_once


def train_in_one_process(steps: int) -> list[Tensor]:
    """Returns losses and parameters without stages and micro-batches."""
    model = nn.Sequential(*(make_part(stage) for stage in range(STAGES)))
    optimizer, losses = torch.optim.Adam(model.parameters(), RATE), []
    for number in range(steps):
        inputs, target = make_batch(number)
        loss = nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [
        torch.tensor(losses, dtype=torch.double),
        *(parameter.detach() for parameter in model.parameters()),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pipeline-parallel training.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pieces", type=int, default=8, help="micro-batches")
    options = parser.parse_args(arguments)
    if options.steps < 1 or not 1 <= options.pieces <= 256:
        parser.error("--steps must be at least 1, and --pieces 1 to 256")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    stages: list[Any] = []
    for number in reversed(range(STAGES)):  # each stage needs the next one's handle
        stages.insert(0, Stage.remote(number, stages[0] if stages else None))
    with rtr.init_group(stages):
        training = stages[0].train.remote(stages, options.steps, options.pieces)
        losses = ray.get(training)
    states = ray.get([stage.state.remote() for stage in stages])
    ours = [
        torch.tensor(losses, dtype=torch.double),
        *(tensor for parameters, _ in states for tensor in parameters),
    ]
    pairs = zip(ours, train_in_one_process(options.steps), strict=True)
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    print(f"{STAGES} stages: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"most micro-batches in flight: {[most for _, most in states]}")
    if not difference < ROUNDING:
        sys.exit(f"pipeline_training: differs from one process by {difference:.1e}")
    print("checked: losses and parameters equal those of a single process")


if __name__ == "__main__":
    main()
