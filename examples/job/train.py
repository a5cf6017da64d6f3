"""A learner and workers train a model: weights and gradients travel by direct calls between the actors.

    python train.py                                        # on this machine, with its own Ray
    ray job submit --working-dir . ... -- python train.py  # on a cluster; see README.md
    python submit.py --address http://head:8265            # the same, from Python

Ray spreads the actors over the nodes. The last line begins with "JOB OK"; otherwise the exit status is not 0.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import ray
import torch
from model import LEARNING_RATE, loss_of, make_model

import raytorchrpc as rtr


@ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD")
class Learner:
    """Holds the weights."""

    def __init__(self) -> None:
        self.model = make_model()
        self.updates = 0

    @rtr.method
    def pull(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    @rtr.method
    def push(self, gradients: list[torch.Tensor]) -> int:
        with torch.no_grad():
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter -= LEARNING_RATE * gradient
        self.updates += 1
        return self.updates


@ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD")
class Worker:
    """Computes gradients on its own batches."""

    def __init__(self, shard: int) -> None:
        self.shard, self.model = shard, make_model()

    def train(self, learner: Any, steps: int) -> tuple[float, float]:
        """Returns the loss of the first and of the last step."""
        losses = []
        parameters = list(self.model.parameters())
        for step in range(steps):
            with torch.no_grad():
                for own, theirs in zip(parameters, rtr.rpc_sync(learner).pull(), strict=True):
                    own.copy_(theirs)
            loss = loss_of(self.model, step, self.shard)
            rtr.rpc_sync(learner).push(list(torch.autograd.grad(loss, parameters)))
            losses.append(loss.item())
        return losses[0], losses[-1]

    def describe(self) -> str:
        """Returns the call timeout, which the job's environment sets, and where the package was imported from."""
        timeout_s = rtr.get_group().config.rpc_timeout_s
        return f"worker {self.shard}: rpc_timeout_s={timeout_s:g} raytorchrpc from {rtr.__file__}"


def bytes_between_nodes(group: rtr.Group, stats: Any) -> int:
    """Returns the bytes of arguments and results that crossed between members on different nodes."""
    nodes = {member.name: member.node_id for member in group.members}
    return sum(row.bytes_out + row.bytes_in for row in stats if nodes[row.caller] != nodes[row.peer])


def main() -> int:
    parser = argparse.ArgumentParser(description="Train over direct calls between Ray actors.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.workers < 1 or options.steps < 2:
        parser.error("--workers must be at least 1, and --steps at least 2")

    ray.init(runtime_env=rtr.runtime_env())
    learner = Learner.remote()
    workers = [Worker.remote(shard) for shard in range(options.workers)]
    members = {"learner": learner, **{f"worker-{shard}": worker for shard, worker in enumerate(workers)}}
    with rtr.init_group(members) as group:  # reads RAYTORCHRPC_* of the job's environment
        print(group.routes())
        losses = ray.get([worker.train.remote(learner, options.steps) for worker in workers])
        print(*ray.get([worker.describe.remote() for worker in workers]), sep="\n")
        stats = group.stats()
        print(stats)
        crossed = bytes_between_nodes(group, stats)
        nodes = len({member.node_id for member in group.members})
    first, last = (sum(each) / len(losses) for each in zip(*losses, strict=True))
    print(f"loss {first:.4f} -> {last:.4f}")
    if not last < first / 2:
        print(f"JOB FAILED: the loss went from {first:.4f} to {last:.4f}")
        return 1
    print(f"JOB OK: {len(members)} members on {nodes} node(s), {crossed} bytes of tensors and calls between nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
