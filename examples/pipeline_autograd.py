"""A model split over two actors: forward and distributed backward through the group.

The question is the one of PyTorch's tutorial on device-to-device communication: what does it cost to pass
every activation and every gradient through the CPU ("staged"), against sending it from GPU to GPU ("direct")?
The first actor holds the first layer and trains; the second holds the second layer. The gradients of both
layers are compared with those of the same model in one process.

    python examples/pipeline_autograd.py            # two GPUs, or the CPU where there are fewer
    python examples/pipeline_autograd.py --json     # the figures, for a script

On the CPU both roads are the same one, so only the gradients are checked.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

import raytorchrpc as rtr

SIZE = 1000


def make_layer(stage: int) -> nn.Linear:
    torch.manual_seed(stage)
    return nn.Linear(SIZE, SIZE)


@ray.remote
class Stage:
    """One layer of the model, on this actor's GPU if it has one."""

    def __init__(self, stage: int, use_gpu: bool) -> None:
        self.device = torch.device("cuda:0" if use_gpu else "cpu")
        self.layer = make_layer(stage).to(self.device)

    @rtr.method
    def forward(self, x: Tensor, staged: bool) -> Tensor:
        y = self.layer(x.to(self.device))
        return y.cpu() if staged else y

    @rtr.method
    def gradients(self, context: int) -> list[Tensor]:
        """What the backward pass of this distributed autograd context left for this stage's parameters."""
        found = dist_autograd.get_gradients(context)
        return [found[parameter].cpu() for parameter in self.layer.parameters()]

    def step(self, following: Any, x: Tensor, staged: bool, keep: bool = False) -> list[Tensor]:
        """One forward and one backward through both stages; returns all gradients if they are to be kept."""
        with dist_autograd.context() as context:
            # Inside this context a tensor that requires grad takes its history along to the next actor.
            y = rtr.rpc_sync(following).forward(self.forward(x, staged), staged)
            dist_autograd.backward(context, [y.sum()])
            if not keep:
                return []
            return self.gradients(context) + rtr.rpc_sync(following).gradients(context)

    def measure(self, following: Any, rounds: int, repeats: int) -> dict[str, Any]:
        """Seconds for ``rounds`` steps by either road (medians, taken in turns), and all gradients."""
        torch.manual_seed(SIZE)
        x = torch.randn(SIZE, SIZE, device=self.device)
        roads = {"staged": True, "direct": False}
        # The first step also makes the connections and the GPU's own start-up, so it is not timed.
        gradients = {road: self.step(following, x, staged, keep=True) for road, staged in roads.items()}
        seconds: dict[str, list[float]] = {road: [] for road in roads}
        for _ in range(repeats):
            for road, staged in roads.items():
                self.synchronize()
                start = time.perf_counter()
                for _ in range(rounds):
                    self.step(following, x, staged)
                self.synchronize()
                seconds[road].append(time.perf_counter() - start)
        medians = {road: statistics.median(values) for road, values in seconds.items()}
        return {"input": x.cpu(), "gradients": gradients, "seconds": medians}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def reference(x: Tensor, device: str) -> list[Tensor]:
    """The gradients of the same two layers in this one process."""
    model = nn.Sequential(make_layer(0), make_layer(1)).to(device)
    model(x.to(device)).sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description="Staged against direct, for a model split over two actors.")
    parser.add_argument("--rounds", type=int, default=10, help="forward and backward passes per timing")
    parser.add_argument("--repeats", type=int, default=5, help="timings, of which the median is taken")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    use_gpu = ray.cluster_resources().get("GPU", 0) >= 2
    placed = Stage.options(num_gpus=1 if use_gpu else 0)
    first, second = placed.remote(0, use_gpu), placed.remote(1, use_gpu)
    with rtr.init_group({"first": first, "second": second}) as group:
        result = ray.get(first.measure.remote(second, options.rounds, options.repeats))
        routes, device_map = str(group.routes()), group.device_map("first", "second")
    ray.shutdown()

    expected = reference(result["input"], "cuda" if use_gpu else "cpu")
    match = all(
        torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3)
        for gradients in result["gradients"].values()
        for ours, theirs in zip(gradients, expected, strict=True)
    )
    staged, direct = result["seconds"]["staged"], result["seconds"]["direct"]
    if options.json:
        figures = {"gpu": use_gpu, "rounds": options.rounds, "staged_s": staged, "direct_s": direct}
        figures |= {"ratio": staged / direct, "gradients_match": match, "device_map": device_map}
        print(json.dumps(figures | {"torch": torch.__version__}))
        return 0 if match else 1
    print(routes)
    print(f"\n{options.rounds} x forward and backward, {SIZE} x {SIZE}, median of {options.repeats}")
    if use_gpu:
        print(f"  staged through the CPU  {staged:8.4f} s\n  direct, GPU to GPU      {direct:8.4f} s")
        print(f"  staged / direct         {staged / direct:8.1f}")
    else:
        print(f"  on the CPU              {direct:8.4f} s")
        print("  (fewer than two GPUs: staged and direct are the same road here)")
    print(f"  gradients               {'equal' if match else 'DIFFER from'} those of one process")
    return 0 if match else 1


if __name__ == "__main__":
    sys.exit(main())
