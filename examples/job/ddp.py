"""Trains a data-parallel model: the members of a group share a torch.distributed process group, over NCCL or gloo.

    python ddp.py --workers 2                 # on CPUs, over gloo
    python ddp.py --workers 2 --backend nccl  # one GPU per worker

The last line begins with "JOB OK"; otherwise the exit status is not 0.
"""

from __future__ import annotations

import argparse
import sys

import ray
import torch
from model import LEARNING_RATE, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel

import raytorchrpc as rtr


class Worker:
    """Trains one replica of the model."""

    def train(self, steps: int) -> list[float]:
        """Returns the mean loss over all ranks, for each step."""
        group = rtr.process_group()
        device = "cuda" if rtr.process_group_info().backend == "nccl" else "cpu"
        model = DistributedDataParallel(make_model().to(device))
        losses = []
        for step in range(steps):
            model.zero_grad()
            loss = loss_of(model, step, group.rank(), device)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LEARNING_RATE * parameter.grad
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean, group=group)
            losses.append(mean.item() / group.size())
        return losses


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a data-parallel model in Ray actors.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    options = parser.parse_args()
    if options.workers < 1 or options.steps < 2:
        parser.error("--workers must be at least 1, and --steps at least 2")

    ray.init(runtime_env=rtr.runtime_env())
    actor = ray.remote(Worker).options(num_cpus=1, num_gpus=int(options.backend == "nccl"))
    workers = [actor.remote() for _ in range(options.workers)]
    with rtr.init_group(workers, timeout=600) as group:  # the cluster may have to add nodes first
        info = group.process_group(options.backend)
        print(f"{info.backend}: " + ", ".join(f"{name} is rank {rank}" for name, rank in info.ranks.items()))
        losses = ray.get([worker.train.remote(options.steps) for worker in workers])
    if any(other != losses[0] for other in losses):
        print("JOB FAILED: the ranks do not agree on the loss")
        return 1
    for step in range(0, options.steps, max(1, options.steps // 5)):
        print(f"step {step}: loss {losses[0][step]:.4f}")
    if not losses[0][-1] < losses[0][0] / 2:
        print(f"JOB FAILED: the loss went from {losses[0][0]:.4f} to {losses[0][-1]:.4f}")
        return 1
    print(f"JOB OK: {info.world_size} ranks over {info.backend}, loss {losses[0][0]:.4f} -> {losses[0][-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
