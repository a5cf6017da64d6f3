"""Torch's own RPC API between Ray actors: a parameter server that applies the gradients of all workers at once.

The program keeps the form that it has with processes of torch.distributed.rpc. The server sends every worker a function
and an RRef to itself, and an asynchronous function holds the replies back until all gradients have arrived. Classes and
functions stand in this script.

    python examples/torch_parameter_server.py              # two hundred steps, about ten seconds
    python examples/torch_parameter_server.py --steps 60   # the short form

The last line reports the accuracy on new points. If it is below 90%, the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

import raytorchrpc as rtr


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns points of a square, and whether each lies inside a circle."""
    points = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return points, (points.norm(dim=1) < 0.8).long()


class ParameterServer:
    """Owns the model. Workers reach it by an RRef."""

    def __init__(self, workers: int) -> None:
        self.model, self.workers = make_model(), workers
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.lock = threading.Lock()  # functions run on the threads of torch's pool
        self.arrived: list[list[Tensor]] = []
        self.updated: Future[list[Tensor]] = Future()

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def add(self, gradients: list[Tensor]) -> Future[list[Tensor]]:
        """Takes one worker's gradients. The Future has the parameters after the step that they are part of."""
        with self.lock:
            self.arrived.append(gradients)
            updated = self.updated
            if len(self.arrived) == self.workers:
                for parameter, *parts in zip(self.model.parameters(), *self.arrived, strict=True):
                    parameter.grad = torch.stack(parts).mean(0)
                self.optimizer.step()
                self.arrived, self.updated = [], Future()
                updated.set_result(self.parameters())
            return updated


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(server: rpc.RRef[ParameterServer], gradients: list[Tensor]) -> Future[list[Tensor]]:
    """Runs in the server's process, where no thread waits for the other workers."""
    return server.local_value().add(gradients)


def work(server: rpc.RRef[ParameterServer], number: int, steps: int) -> int:
    """Runs in a worker's process."""
    model = make_model()
    inputs, labels = make_data(4000, seed=2 + number)
    generator = torch.Generator().manual_seed(number)
    latest = server.rpc_sync().parameters()
    for _ in range(steps):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), latest, strict=True):
                parameter.copy_(value)
        batch = torch.randint(len(inputs), (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        latest = rpc.rpc_sync(server.owner(), push, args=(server, gradients))
    return steps


def serve(workers: list[int], steps: int) -> tuple[float, int]:
    """Runs in the server's process. Returns the accuracy on points that no worker has, and the steps of all workers."""
    server = rpc.RRef(ParameterServer(len(workers)))
    done = [rpc.rpc_async(worker, work, args=(server, worker, steps), timeout=0) for worker in workers]  # by rank
    total = sum(torch.futures.wait_all(done))
    inputs, labels = make_data(2000, seed=1)
    with torch.no_grad():
        right = server.local_value().model(inputs).argmax(1) == labels
    return float(right.float().mean()), total


@ray.remote
class Process:
    """In place of a process that calls init_rpc."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="A parameter server with torch's own RPC API.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    if options.workers < 1 or options.steps < 1:
        parser.error("--workers and --steps must be at least 1")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    processes = [Process.remote() for _ in range(1 + options.workers)]
    with rtr.init_group(processes) as group:
        workers = [member.rank for member in group.members[1:]]
        accuracy, total = ray.get(processes[0].run.remote(serve, workers, options.steps))
    if accuracy < 0.9:
        sys.exit(f"torch_parameter_server: accuracy {accuracy:.1%}, below 90%")
    print(f"checked: accuracy {accuracy:.1%} after {total} gradients of {len(workers)} workers")
    return accuracy


if __name__ == "__main__":
    main()
