"""A model that computes while its next weights arrive by ``prefetch``, against the same steps without, and a pull."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import raytorchrpc as rtr
from benchmarks._harness import Line, Pick, await_gpu, each, gpu_count, group_of, on, show, timed
from benchmarks._models import MODELS, TINY, Model

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
        ends = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
        self.q, self.k, self.v, self.o = (nn.Linear(*pair, bias=False) for pair in ends)
        ends = ((hidden, inner), (hidden, inner), (inner, hidden))
        self.gate, self.up, self.down = (nn.Linear(*pair, bias=False) for pair in ends)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normal = self.norm1(tokens)
        scores = (self.k(normal) * self.v(normal)).mean(-1, keepdim=True)
        tokens = tokens + self.o(self.q(normal) * scores.sigmoid())
        normal = self.norm2(tokens)
        return tokens + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))


def load(end: Any, store: Any, shapes: Model, device: str) -> int:
    """Make the model; returns its bytes."""
    if rtr.current_member().name == "reader":
        torch.set_num_threads(1)  # so that the store has a core in every case
    with torch.device(device):
        layers = [Layer(shapes) for _ in range(shapes.layers)]
        end.model = nn.Sequential(nn.Embedding(shapes.vocabulary, shapes.hidden), *layers).bfloat16()
    end.store, end.tokens = store, torch.randint(shapes.vocabulary, (TOKENS[device],), device=device)
    return sum(parameter.nbytes for parameter in end.model.parameters())


def digest(end: Any) -> list[float]:
    """Sums of the weights."""
    return [float(parameter.double().sum()) for parameter in end.model.parameters()]


def publish(end: Any) -> int:
    with torch.no_grad():
        for parameter in end.model.parameters():
            parameter.normal_(std=0.02)
    return end.store.publish(end.model)


def pull(end: Any) -> float:
    """Seconds that a loop would wait for a pull."""
    return timed(lambda: end.store.pull(end.model))


def _compute(end: Any, count: int) -> None:
    for _ in range(count):
        end.model(end.tokens).float().square().mean().backward()
        end.model.zero_grad()


def steps(end: Any, count: int) -> float:
    """Seconds of so many forward and backward passes."""
    return timed(lambda: _compute(end, count))


def count_steps(end: Any, round_s: float) -> int:
    """How many steps take about ``round_s``."""
    steps(end, 2)
    return max(2, round(round_s / statistics.median(steps(end, 1) for _ in range(5))))


def beside(end: Any, count: int) -> tuple[float, float, int]:
    """Seconds of the steps with a prefetch and a swap, those of these two calls, and the version."""
    stalls, version = [], 0

    def both() -> None:
        nonlocal version
        began = time.perf_counter()
        arriving = end.store.prefetch(end.model)
        stalls.append(time.perf_counter() - began)
        _compute(end, count)
        await_gpu()
        arriving.wait()
        began = time.perf_counter()
        version = arriving.swap()
        stalls.append(time.perf_counter() - began)

    return timed(both), sum(stalls), version


def main(pick: Pick) -> None:
    gpus = gpu_count()
    device, models = ("cuda", MODELS[1:]) if gpus else ("cpu", MODELS[:1])
    lines = [line for shapes in pick(models, models[:1], [TINY]) for line in _measure(gpus, device, shapes, pick)]
    show(f"Weights that arrive while a model computes, {device}, {gpus} GPUs (medians)", lines)


def _measure(gpus: int, device: str, shapes: Model, pick: Pick) -> list[Line]:
    alone, with_it, stalls, pulls = [], [], [], []
    with group_of("publisher", "reader", gpus=[str(gpu) for gpu in range(min(gpus, 2))]) as (_, ends):
        publisher, reader = ends.values()
        _, size = each([publisher, reader], load, rtr.WeightStore("prefetch", home="publisher"), shapes, device)
        count = 0
        for number in range(pick(20, 5, 3)):
            version = on(publisher, publish)
            count = count or on(reader, count_steps, pick(ROUND_S, ROUND_S, 0.02))
            without = on(reader, steps, count) if number % 2 else 0.0
            took, stall, got = on(reader, beside, count)
            without = without or on(reader, steps, count)
            if got != version:
                raise RuntimeError(f"version {got} was swapped in, not {version}")
            pulled = on(reader, pull)
            for times, seconds in ((alone, without), (with_it, took), (stalls, stall), (pulls, pulled)):
                times += [seconds * 1e3] if number > 1 else []  # at first, plans and buffers are made
        on(publisher, publish)
        on(reader, beside, 1)
        if on(publisher, digest) != on(reader, digest):
            raise RuntimeError("the weights arrived changed")
    what, median = f"{shapes.name}, {size / 1e9:.3g} GB", statistics.median
    slower = median(seconds / without for seconds, without in zip(with_it, alone, strict=True))
    return [
        Line(f"{what}: stall of prefetch() and swap()", median(stalls), MOST_STALL_MS, "ms", "limit", 1.0),
        Line(f"{what}: stall", median(stalls), median(pulls), "ms", "a pull"),
        Line(f"{what}: {count} steps", slower * median(alone), median(alone), "ms", "without", MOST_SLOWER),
    ]
