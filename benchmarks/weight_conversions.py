"""Weights that arrive in fp8 with a scale for each block, against a pull of the same weights in bfloat16."""

from __future__ import annotations

import statistics
import time
from typing import Any

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Row, local_ray, show
from benchmarks.sharded_weights import MODELS

BLOCK, SUFFIX = 128, "_scale_inv"
#: Later pulls of each version: they find converted tensors.
LATER = 3
FP8 = rtr.BlockFp8()


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as fp8, and its scales, block by block."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-extent // BLOCK) for extent in weight.shape])
    for i, rows in enumerate(weight.float().split(BLOCK)):
        for j, block in enumerate(rows.split(BLOCK, 1)):
            scales[i, j] = block.abs().max() / 448
            values[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = block / scales[i, j]
    return values, scales


@ray.remote(num_cpus=0)
class End:
    """The publisher, or the reader."""

    def load(self, store: rtr.WeightStore, model: str, device: str) -> int:
        """Make a model in bfloat16 and one in fp8; returns the bytes of the first."""
        shapes = {name: shape for name, (shape, _) in next(m for m in MODELS if m.name == model).weights().items()}
        self.store, self.device, self.round = store, device, 0
        self.model = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
        self.fp8: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.items():
            is_matrix = tensor.dim() == 2
            self.fp8[name] = torch.empty_like(tensor, dtype=torch.float8_e4m3fn if is_matrix else None)
            if is_matrix:
                blocks = [-(-extent // BLOCK) for extent in tensor.shape]
                self.fp8[name + SUFFIX] = torch.empty(blocks, device=device)
        return sum(tensor.nbytes for tensor in self.model.values())

    def _await_device(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def publish(self) -> int:
        self.round += 1
        torch.manual_seed(self.round)
        for tensor in self.model.values():
            tensor.normal_(std=0.02)
        version = self.store.publish(self.model)
        self._await_device()
        return version

    def pull(self, *, fp8: bool) -> float:
        """Seconds of a pull of the newest version."""
        began = time.perf_counter()
        self.store.pull(self.fp8 if fp8 else self.model, convert=FP8 if fp8 else False)
        self._await_device()
        return time.perf_counter() - began

    def check(self) -> None:
        """Raise if a converted matrix is not bit for bit what the reference makes of it."""
        for name in ("0.k", "0.down"):
            values, scales = reference(self.model[name].cpu())
            same = torch.equal(self.fp8[name].cpu().view(torch.uint8), values.view(torch.uint8))
            if not same or not torch.equal(self.fp8[name + SUFFIX].cpu(), scales):
                raise RuntimeError(f"{name} arrived otherwise than the reference converts it")


def main(quick: bool = False) -> None:
    with local_ray():
        gpus = int(ray.cluster_resources().get("GPU", 0))
        device, models = ("cuda", MODELS) if gpus else ("cpu", MODELS[:2])
        rows = [row for model in (models[:1] if quick else models) for row in _measure(min(gpus, 2), model.name, quick)]
    show(f"Weights that arrive in fp8, from one publisher to one reader, {device}, {gpus} GPUs (medians)", rows)


def _measure(gpus: int, model: str, quick: bool) -> list[Row]:
    """``gpus``: that the two use."""
    device = "cuda" if gpus else "cpu"
    publisher, reader = (End.options(num_gpus=gpus / 2).remote() for _ in range(2))
    took: dict[str, list[float]] = {"bfloat16": [], "first": [], "later": []}
    with rtr.init_group({"publisher": publisher, "reader": reader}):
        store = rtr.WeightStore("fp8", home="publisher")
        size, _ = ray.get([end.load.remote(store, model, device) for end in (publisher, reader)])
        for number in range(4 if quick else 8):
            ray.get(publisher.publish.remote())
            times: dict[str, list[Any]] = {
                "first": ray.get([reader.pull.remote(fp8=True)]),
                "later": ray.get([reader.pull.remote(fp8=True) for _ in range(LATER)]),
                "bfloat16": ray.get([reader.pull.remote(fp8=False) for _ in range(1 + LATER)])[1:],
            }
            for kind, seconds in times.items():
                took[kind] += seconds if number else []  # at first, plans are made
        ray.get(reader.check.remote())
    for end in (publisher, reader):
        ray.kill(end)
    ms = {kind: statistics.median(seconds) * 1e3 for kind, seconds in took.items()}
    what, peer = f"{model}, {size / 1e9:.3g} GB in bfloat16", "a pull in bfloat16"
    return [
        Row(f"{what}: fp8", ms["later"], ms["bfloat16"], "ms", peer, 0.65),
        Row(f"{what}: the first of a version", ms["first"], ms["bfloat16"], "ms", f"{peer}, converted by nobody"),
    ]
