"""Weights that arrive in fp8 with a scale for each block, against a pull of the same weights in bfloat16."""

from __future__ import annotations

import statistics
from typing import Any

import torch

import raytorchrpc as rtr
from benchmarks._harness import Line, Pick, each, gpu_count, group_of, on, show, timed
from benchmarks._weights import MODELS, TINY, Model, pull, size_of

BLOCK, SUFFIX = 128, "_scale_inv"
#: Later pulls of each version: they find converted tensors.
LATER = 3


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as fp8, and its scales, block by block."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-extent // BLOCK) for extent in weight.shape])
    for i, rows in enumerate(weight.float().split(BLOCK)):
        for j, block in enumerate(rows.split(BLOCK, 1)):
            scales[i, j] = block.abs().max() / 448
            values[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = block / scales[i, j]
    return values, scales


def load(end: Any, store: Any, model: Model, device: str) -> int:
    """Make a model in bfloat16 and one in fp8; returns the bytes of the first."""
    end.store, end.round, end.fp8 = store, 0, {}
    end.model = {name: torch.empty(shape, dtype=torch.bfloat16, device=device)
                 for name, (shape, _) in model.weights().items()}  # fmt: skip
    for name, tensor in end.model.items():
        is_matrix = tensor.dim() == 2
        end.fp8[name] = torch.empty_like(tensor, dtype=torch.float8_e4m3fn if is_matrix else None)
        if is_matrix:
            end.fp8[name + SUFFIX] = torch.empty([-(-extent // BLOCK) for extent in tensor.shape], device=device)
    return size_of(end.model)


def publish(end: Any) -> None:
    end.round += 1
    torch.manual_seed(end.round)
    for tensor in end.model.values():
        tensor.normal_(std=0.02)
    timed(lambda: end.store.publish(end.model))


def pull_converted(end: Any) -> float:
    """Seconds of a pull of the newest version in fp8."""
    return timed(lambda: end.store.pull(end.fp8, convert=rtr.BlockFp8()))


def check(end: Any) -> None:
    """Raise if a converted matrix is not bit for bit what the reference makes of it."""
    for name in ("0.k", "0.down"):
        values, scales = reference(end.model[name].cpu())
        same = torch.equal(end.fp8[name].cpu().view(torch.uint8), values.view(torch.uint8))
        if not same or not torch.equal(end.fp8[name + SUFFIX].cpu(), scales):
            raise RuntimeError(f"{name} arrived otherwise than the reference converts it")


def main(pick: Pick) -> None:
    gpus = gpu_count()
    device, models = ("cuda", MODELS) if gpus else ("cpu", MODELS[:2])
    lines = [line for model in pick(models, models[:1], [TINY]) for line in _measure(gpus, device, model, pick)]
    show(f"Weights that arrive in fp8, from one publisher to one reader, {device}, {gpus} GPUs (medians)", lines)


def _measure(gpus: int, device: str, model: Model, pick: Pick) -> list[Line]:
    took: dict[str, list[float]] = {"bfloat16": [], "first": [], "later": []}
    with group_of("publisher", "reader", gpus=[str(gpu) for gpu in range(min(gpus, 2))]) as (_, ends):
        publisher, reader = ends.values()
        size, _ = each([publisher, reader], load, rtr.WeightStore("fp8", home="publisher"), model, device)
        for number in range(pick(8, 4, 2)):
            on(publisher, publish)
            first, *later = [on(reader, pull_converted) for _ in range(1 + LATER)]
            _, *plain = [on(reader, pull) for _ in range(1 + LATER)]
            if number:  # at first, plans are made
                for kind, seconds in (("first", [first]), ("later", later), ("bfloat16", plain)):
                    took[kind] += seconds
        on(reader, check)
    ms = {kind: statistics.median(seconds) * 1e3 for kind, seconds in took.items()}
    what, peer = f"{model.name}, {size / 1e9:.3g} GB in bfloat16", "a pull in bfloat16"
    return [
        Line(f"{what}: fp8", ms["later"], ms["bfloat16"], "ms", peer, 0.65),
        Line(f"{what}: the first of a version", ms["first"], ms["bfloat16"], "ms", f"{peer}, converted by nobody"),
    ]
