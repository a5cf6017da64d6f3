"""A model that computes while its next weights arrive by ``prefetch``, against the same steps without, and a pull."""

from __future__ import annotations

import statistics
import time
from typing import Any

import ray
import torch
from torch import nn

import raytorchrpc as rtr
from benchmarks._harness import Row, local_ray, show
from benchmarks.sharded_weights import MODELS, Model

#: The time of the steps that one prefetch accompanies.
ROUND_S = 0.5
TOKENS = {"cpu": 64, "cuda": 4096}
#: What a loop may lose to a prefetch.
MOST_STALL_MS, MOST_SLOWER = 2.0, 1.03


class Layer(nn.Module):
    """The matrices of a decoder's layer, each used once; attention among tokens is left out."""

    def __init__(self, shapes: Model) -> None:
        super().__init__()
        hidden, queries, keys, inner = shapes.hidden, shapes.queries, shapes.keys, shapes.inner
        self.q, self.k, self.v, self.o = (
            nn.Linear(*ends, bias=False)
            for ends in ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
        )
        self.gate, self.up, self.down = (
            nn.Linear(*ends, bias=False) for ends in ((hidden, inner), (hidden, inner), (inner, hidden))
        )
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normal = self.norm1(tokens)
        scores = (self.k(normal) * self.v(normal)).mean(-1, keepdim=True)
        tokens = tokens + self.o(self.q(normal) * scores.sigmoid())
        normal = self.norm2(tokens)
        return tokens + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))


def decoder(shapes: Model, device: str) -> nn.Module:
    with torch.device(device):
        layers = [Layer(shapes) for _ in range(shapes.layers)]
        return nn.Sequential(nn.Embedding(shapes.vocabulary, shapes.hidden), *layers).bfloat16()


class End:
    model: nn.Module

    def digest(self) -> list[float]:
        """Sums of the weights."""
        return [float(parameter.double().sum()) for parameter in self.model.parameters()]


@ray.remote(num_cpus=0)
class Publisher(End):
    def load(self, store: rtr.WeightStore, shapes: Model, device: str) -> None:
        self.store, self.model = store, decoder(shapes, device)

    def publish(self) -> int:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.02)
        return self.store.publish(self.model)


@ray.remote(num_cpus=0)
class Reader(End):
    def load(self, store: rtr.WeightStore, shapes: Model, device: str) -> int:
        """Make the model; returns its bytes."""
        torch.set_num_threads(1)  # so that the store has a core in every case
        self.store, self.device, self.shapes = store, device, shapes
        self.model = decoder(shapes, device)
        self.tokens = torch.randint(shapes.vocabulary, (TOKENS[device],), device=device)
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def pull(self) -> float:
        """Seconds that a loop would wait for a pull."""
        began = time.perf_counter()
        self.store.pull(self.model)
        self._await_device()
        return time.perf_counter() - began

    def count_steps(self) -> int:
        """How many steps take about ROUND_S."""
        self._steps(2)
        return max(2, round(ROUND_S / statistics.median(self._steps(1) for _ in range(5))))

    def alone(self, steps: int) -> float:
        return self._steps(steps)

    def beside(self, steps: int) -> tuple[float, float, int]:
        """Seconds of the steps with a prefetch and a swap, those of these two calls, and the version."""
        began = time.perf_counter()
        arriving = self.store.prefetch(self.model)
        stall = time.perf_counter() - began
        self._steps(steps)
        arriving.wait()
        swapping = time.perf_counter()
        version = arriving.swap()
        stall += time.perf_counter() - swapping
        self._await_device()
        return time.perf_counter() - began, stall, version

    def _steps(self, count: int) -> float:
        """Seconds of forward and backward passes."""
        began = time.perf_counter()
        for _ in range(count):
            self.model(self.tokens).float().square().mean().backward()
            self.model.zero_grad()
        self._await_device()
        return time.perf_counter() - began

    def _await_device(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main(quick: bool = False) -> None:
    with local_ray():
        gpus = int(ray.cluster_resources().get("GPU", 0))
        device, models = ("cuda", MODELS[1:]) if gpus else ("cpu", MODELS[:1])
        rows = [row for shapes in (models[:1] if quick else models) for row in _measure(min(gpus, 2), shapes, quick)]
    show(f"Weights that arrive while a model computes, {device}, {gpus} GPUs (medians)", rows)


def _measure(gpus: int, shapes: Model, quick: bool) -> list[Row]:
    """``gpus``: that the two use."""
    publisher, reader = Publisher.options(num_gpus=gpus / 2).remote(), Reader.options(num_gpus=gpus / 2).remote()
    alone, beside, stalls, pulls = [], [], [], []
    with rtr.init_group({"publisher": publisher, "reader": reader}):
        store: rtr.WeightStore = rtr.WeightStore("prefetch", home="publisher")
        device = "cuda" if gpus else "cpu"
        _, size = ray.get([end.load.remote(store, shapes, device) for end in (publisher, reader)])
        steps = 0
        for number in range(5 if quick else 20):
            version = ray.get(publisher.publish.remote())
            steps = steps or ray.get(reader.count_steps.remote())
            if number % 2:
                without = ray.get(reader.alone.remote(steps))
                took, stall, got = ray.get(reader.beside.remote(steps))
            else:
                took, stall, got = ray.get(reader.beside.remote(steps))
                without = ray.get(reader.alone.remote(steps))
            if got != version:
                raise RuntimeError(f"version {got} was swapped in, not {version}")
            pull = ray.get(reader.pull.remote())
            for times, seconds in ((alone, without), (beside, took), (stalls, stall), (pulls, pull)):
                times += [seconds * 1e3] if number > 1 else []  # at first, plans and buffers are made
        _check(publisher, reader)
    for end in (publisher, reader):
        ray.kill(end)
    what = f"{shapes.name}, {size / 1e9:.3g} GB"
    slower = statistics.median(with_it / without for with_it, without in zip(beside, alone, strict=True))
    return [
        Row(f"{what}: stall of prefetch() and swap()", statistics.median(stalls), MOST_STALL_MS, "ms", "limit", 1.0),
        Row(f"{what}: stall", statistics.median(stalls), statistics.median(pulls), "ms", "a pull"),
        Row(
            f"{what}: {steps} steps",
            slower * statistics.median(alone),
            statistics.median(alone),
            "ms",
            "alone",
            MOST_SLOWER,
        ),
    ]


def _check(publisher: Any, reader: Any) -> None:
    """Compare what was published last with a prefetch of it."""
    ray.get(publisher.publish.remote())
    ray.get(reader.beside.remote(1))
    if ray.get(publisher.digest.remote()) != ray.get(reader.digest.remote()):
        raise RuntimeError("the weights arrived changed")
