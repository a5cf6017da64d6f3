"""Measures a model split over two actors, with distributed autograd, staged through the CPU and directly between GPUs.

Like PyTorch's tutorial on device-to-device communication, it compares the cost of passing every activation and gradient
through the CPU ("staged") with that of sending them from GPU to GPU ("direct"). The first actor holds the first layer
and trains; the second holds the second layer. The gradients of both layers must equal those of the same model in one
process.

    python examples/pipeline_autograd.py            # on two GPUs, or on the CPU if there are fewer
    python examples/pipeline_autograd.py --json     # prints the figures as JSON

On the CPU, staged and direct are the same, so only the gradients are checked.
"""

from __future__ import annotations

import argparse
import json
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
    """Holds one layer of the model, on this actor's GPU if it has one."""

    def __init__(self, stage: int, use_gpu: bool) -> None:
        self.device = torch.device("cuda:0" if use_gpu else "cpu")
        self.layer = make_layer(stage).to(self.device)

    @rtr.method
    def forward(self, x: Tensor, staged: bool) -> Tensor:
        y = self.layer(x.to(self.device))
        return y.cpu() if staged else y

    @rtr.method
    def gradients(self, context: int) -> list[Tensor]:
        """Returns the gradients that the context's backward pass computed for this stage's parameters."""
        by_parameter = dist_autograd.get_gradients(context)
        return [by_parameter[parameter].cpu() for parameter in self.layer.parameters()]

    def step(self, next_stage: Any, x: Tensor, staged: bool, keep: bool = False) -> list[Tensor]:
        """Runs one forward and one backward pass through both stages. Returns all gradients if ``keep``."""
        with dist_autograd.context() as context:
            # Inside this context, a tensor that requires grad carries its history to the next actor.
            y = rtr.rpc_sync(next_stage).forward(self.forward(x, staged), staged)
            dist_autograd.backward(context, [y.sum()])
            if not keep:
                return []
            return self.gradients(context) + rtr.rpc_sync(next_stage).gradients(context)

    def measure(self, next_stage: Any, rounds: int, repeats: int) -> dict[str, Any]:
        """Returns the median seconds for ``rounds`` steps in either mode, measured alternately, and all gradients."""
        torch.manual_seed(SIZE)
        x = torch.randn(SIZE, SIZE, device=self.device)
        modes = {"staged": True, "direct": False}
        # The first step is not timed: it also connects the actors and initialises the GPU.
        gradients = {mode: self.step(next_stage, x, staged, keep=True) for mode, staged in modes.items()}
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(repeats):
            for mode, staged in modes.items():
                self.synchronize()
                start = time.perf_counter()
                for _ in range(rounds):
                    self.step(next_stage, x, staged)
                self.synchronize()
                seconds[mode].append(time.perf_counter() - start)
        medians = {mode: statistics.median(values) for mode, values in seconds.items()}
        return {"input": x.cpu(), "gradients": gradients, "seconds": medians}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def reference(x: Tensor, device: str) -> list[Tensor]:
    """Returns the gradients of the same two layers, computed in this process."""
    model = nn.Sequential(make_layer(0), make_layer(1)).to(device)
    model(x.to(device)).sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare staged with direct transfers between two actors.")
    parser.add_argument("--rounds", type=int, default=10, help="forward and backward passes per measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements, of which the median is reported")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level="error")
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
        print("  (fewer than two GPUs: staged and direct are the same here)")
    print(f"  gradients               {'equal' if match else 'DIFFER from'} those of a single process")
    return 0 if match else 1


if __name__ == "__main__":
    sys.exit(main())
