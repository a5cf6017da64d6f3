"""A model that computes while its next weights arrive by ``prefetch``, against the same steps without, and a pull."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import raytorchrpc as rtr
from benchmarks._harness import Line, Pick, await_gpu, each, gpu_count, group_of, on, show, timed
from benchmarks._weights import MODELS, TINY, Model, check_same, publish, pull, size_of, sums

#: The time of the steps that one prefetch accompanies.
ROUND_S = 0.5
TOKENS = {"cpu": 64, "cuda": 4096}
#: What a loop may lose to a prefetch; and to the copy of a swap, of 16 GB, on a GPU.
MOST_STALL_MS, MOST_SLOWER, MOST_SWAP_MS = 2.0, 1.03, 15.0


class Layer(nn.Module):
    """The matrices of a decoder's layer, each used once; attention among tokens is left out."""

    def __init__(self, shapes: Model) -> None:
        super().__init__()
        hidden, queries, keys, inner = shapes.hidden, shapes.queries, shapes.keys, shapes.inner
        ends = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
        ends |= {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
        self.parts = nn.ModuleDict({name: nn.Linear(*pair, bias=False) for name, pair in ends.items()})
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts, normal = self.parts, self.norm1(tokens)
        scores = (parts["k"](normal) * parts["v"](normal)).mean(-1, keepdim=True)
        tokens = tokens + parts["o"](parts["q"](normal) * scores.sigmoid())
        normal = self.norm2(tokens)
        return tokens + parts["down"](nn.functional.silu(parts["gate"](normal)) * parts["up"](normal))


def load(end: Any, store: Any, shapes: Model, device: str) -> int:
    """Make the model; returns its bytes."""
    if rtr.current_member().name == "reader":
        torch.set_num_threads(1)  # so that the store has a core in every case
    with torch.device(device):
        layers = [Layer(shapes) for _ in range(shapes.layers)]
        end.model = nn.Sequential(nn.Embedding(shapes.vocabulary, shapes.hidden), *layers).bfloat16()
    end.store, end.tokens = store, torch.randint(shapes.vocabulary, (TOKENS[device],), device=device)
    return size_of(end.model)


def publish_new(end: Any) -> int:
    """Returns the version."""
    with torch.no_grad():
        for parameter in end.model.parameters():
            parameter.normal_(std=0.02)
    return publish(end)


def compute(end: Any, count: int) -> None:
    """Forward and backward passes."""
    for _ in range(count):
        end.model(end.tokens).float().square().mean().backward()
        end.model.zero_grad()
    await_gpu()


def steps(end: Any, count: int) -> float:
    """Seconds of so many forward and backward passes."""
    return timed(lambda: compute(end, count))


def count_steps(end: Any, round_s: float) -> int:
    """How many steps take about ``round_s``."""
    steps(end, 2)
    return max(2, round(round_s / statistics.median(steps(end, 1) for _ in range(5))))


def beside(end: Any, count: int) -> tuple[float, float, float, int]:
    """Seconds of the steps with a prefetch and a swap, of these two calls, of the swap on the GPU; the version."""
    await_gpu()
    began = time.perf_counter()
    arriving = end.store.prefetch(end.model)
    stall = time.perf_counter() - began
    compute(end, count)
    arriving.wait()
    swapped = time.perf_counter()
    version = arriving.swap()
    stall += time.perf_counter() - swapped
    await_gpu()
    ended = time.perf_counter()
    return ended - began, stall, ended - swapped, version


def main(pick: Pick) -> None:
    gpus = gpu_count()
    device, models = ("cuda", MODELS[1:]) if gpus else ("cpu", MODELS[:1])
    lines = [line for shapes in pick(models, models[:1], [TINY]) for line in _measure(gpus, device, shapes, pick)]
    show(f"Weights that arrive while a model computes, {device}, {gpus} GPUs (medians)", lines)


def _measure(gpus: int, device: str, shapes: Model, pick: Pick) -> list[Line]:
    ms: list[tuple[float, ...]] = []
    with group_of("publisher", "reader", gpus=[str(gpu) for gpu in range(min(gpus, 2))]) as (_, ends):
        publisher, reader = ends.values()
        _, size = each([publisher, reader], load, rtr.WeightStore("prefetch", home="publisher"), shapes, device)
        count = on(reader, count_steps, pick(ROUND_S, ROUND_S, 0.02))
        for number in range(pick(20, 5, 3)):
            version = on(publisher, publish_new)
            before = on(reader, steps, count) if number % 2 else 0.0
            took, stall, swap, got = on(reader, beside, count)
            alone = before or on(reader, steps, count)
            if got != version:
                raise RuntimeError(f"version {got} was swapped in, not {version}")
            ms.append((alone * 1e3, took * 1e3, stall * 1e3, swap * 1e3, on(reader, pull) * 1e3))
        on(publisher, publish_new)
        on(reader, beside, 1)
        check_same(on(publisher, sums), on(reader, sums))
    ms = ms[2:] or ms  # at first, plans and buffers are made
    alone, _, stall, swap, pulled = map(statistics.median, zip(*ms, strict=True))
    slower = statistics.median(took / without for without, took, *_ in ms)
    what = f"{shapes.name}, {size / 1e9:.3g} GB"
    return [
        Line(f"{what}: stall of prefetch() and swap()", stall, MOST_STALL_MS, "ms", "limit", 1.0),
        Line(f"{what}: stall", stall, pulled, "ms", "a pull"),
        Line(f"{what}: a swap, until it is done", swap, MOST_SWAP_MS, "ms", "limit", 1.0),
        Line(f"{what}: {count} steps", slower * alone, alone, "ms", "without", MOST_SLOWER),
    ]
