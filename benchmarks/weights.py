"""Weights of a model from one actor into the models of others, against ``ray.put`` and ``ray.get``."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Row, interleaved, local_ray, show

READERS = 4
SIZES = {10_000_000: 7, 1 << 30: 3}
#: Of each kind, after a first one.
STEPS = 5
CUDA_SIZES = {10_000_000: 100, 1 << 30: 50}


def model_of(size: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Weights like a transformer's: large and small tensors in each of 16 layers."""
    part = size // 4 // 16 // 4
    return {
        f"{layer}.{name}": torch.ones(count, device=device)
        for layer in range(16)
        for name, count in (("mlp", 2 * part), ("attention", 2 * part), ("norm", 256), ("bias", 256))
    }


@ray.remote(num_cpus=0)
class End:
    """Learner or reader."""

    def load(self, store: rtr.WeightStore | None, size: int, device: str = "cpu") -> None:
        self.model, self.store = model_of(size, device), store

    # With the store.

    def publish(self) -> int:
        return self.store.publish(self.model)

    def pull(self, version: int) -> None:
        self.store.pull(self.model, version)
        if next(iter(self.model.values())).is_cuda:
            torch.cuda.current_stream().synchronize()

    # Steps that change some elements.

    def load_bfloat16(self, store: rtr.WeightStore, size: int) -> None:
        self.model = {name: tensor.bfloat16() for name, tensor in model_of(2 * size).items()}
        self.store, self.version = store, 0

    def step(self, share: float) -> float:
        """Change a share of the elements, and publish; returns the seconds that publishing took."""
        for tensor in self.model.values():
            bits = tensor.view(torch.int16)
            bits[torch.rand(tensor.shape, device=tensor.device) < share] += 1
        return self._timed(lambda: self.store.publish(self.model))

    def follow(self, knows: bool) -> float:
        """Pull what has changed, or all; returns the seconds."""

        def pull() -> None:
            self.version = self.store.pull(self.model, since=self.version if knows else None)

        return self._timed(pull)

    def digest(self) -> int:
        return sum(int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in self.model.values())

    def _timed(self, run: Callable[[], object]) -> float:
        on_gpu = next(iter(self.model.values())).is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    # With Ray.

    def put(self) -> list[Any]:
        return [ray.put(self.model)]

    def get(self, ref: list[Any]) -> None:
        for name, tensor in ray.get(ref[0]).items():
            self.model[name].copy_(tensor)

    # Limits.

    def copies(self, repeats: int) -> float:
        """Seconds for one copy within this process."""
        other = {name: tensor.clone() for name, tensor in self.model.items()}

        def copy() -> None:
            for name, tensor in self.model.items():
                other[name].copy_(tensor)

        return interleaved({"copy": copy}, repeats)["copy"]

    def raw(self, size: int, repeats: int) -> dict[str, float]:
        """Seconds of copies between the GPUs in a process that has both: per tensor, and all in one."""
        source, target = model_of(size, "cuda:0"), model_of(size, "cuda:1")
        whole = torch.cat(list(source.values()))
        there = torch.empty_like(whole, device="cuda:1")

        def tensors() -> None:
            for name, tensor in source.items():
                target[name].copy_(tensor, non_blocking=True)
            torch.cuda.synchronize(1)

        def one() -> None:
            there.copy_(whole, non_blocking=True)
            torch.cuda.synchronize(1)

        return interleaved({"tensors": tensors, "one": one}, repeats)

    def pulls(self, repeats: int) -> float:
        """Seconds of one pull."""
        return interleaved({"pull": lambda: self.pull(1)}, repeats)["pull"]


def main(quick: bool = False) -> None:
    for peer, zero_copy in (("Ray, zero-copy tensors", "1"), ("Ray by default", "0")):
        os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = zero_copy
        with local_ray():
            _cpu(quick, peer)
    with local_ray():
        changes(quick)
    with local_ray():
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus >= 2:
            cuda(quick)
        else:
            print(f"  CUDA rows: not run, they need two GPUs and Ray has {gpus}")


def _cpu(quick: bool, peer: str) -> None:
    learner, readers = End.remote(), [End.remote() for _ in range(READERS)]
    rows = []
    with rtr.init_group({"learner": learner, **{f"reader{number}": reader for number, reader in enumerate(readers)}}):
        for size, repeats in SIZES.items():
            if quick and size > 100_000_000:
                continue
            store = rtr.WeightStore(f"{size}", home="learner")
            ray.get([end.load.remote(store, size) for end in (learner, *readers)])

            def by_store() -> None:
                version = ray.get(learner.publish.remote())
                ray.get([reader.pull.remote(version) for reader in readers])

            def by_ray() -> None:
                ref = ray.get(learner.put.remote())
                ray.get([reader.get.remote(ref) for reader in readers])

            took: dict[str, list[float]] = {"store": [], "ray": []}
            for run in (by_store, by_store, by_ray):
                run()
            for _ in range(repeats):
                for name, run in (("store", by_store), ("ray", by_ray)):
                    start = time.perf_counter()
                    run()
                    took[name].append(time.perf_counter() - start)
            copy = ray.get(learner.copies.remote(3)) * 1e3
            ms = {name: statistics.median(values) * 1e3 for name, values in took.items()}
            what = f"CPU, {size / 1e6:.4g} MB to {READERS} actors"
            rows.append(Row(what, ms["store"], ms["ray"], "ms", f"{peer}: put, get into the model", 0.3))
            rows.append(Row(what, ms["store"], copy, "ms", "one copy of it within a process"))
    for end in (learner, *readers):
        ray.kill(end)
    show("Weights from one actor to others of its host (medians)", rows)


def changes(quick: bool = False) -> list[Row]:
    """Print and return rows for a step that changes 1 % of the elements of each tensor, next to full pulls.

    They come over TCP, as between hosts: on one host whole tensors are copied from where they were published.
    """
    learner, reader = (End.remote() for _ in range(2))
    config = rtr.GroupConfig(lanes=("socket", "torchrpc"), always_tcp=True)
    rows = []
    with rtr.init_group({"learner": learner, "reader": reader}, config=config):
        for size in (1 << 26,) if quick else (1 << 28,):
            store = rtr.WeightStore(f"changes {size}", home="learner", track=True)
            ray.get([end.load_bfloat16.remote(store, size) for end in (learner, reader)])
            took: dict[str, list[float]] = {"publish all": [], "all": [], "publish 1 %": [], "1 %": []}
            for _ in range(STEPS + 1):
                for share, what in ((1.0, "all"), (0.01, "1 %")):
                    took[f"publish {what}"].append(ray.get(learner.step.remote(share)))
                    took[what].append(ray.get(reader.follow.remote(share < 1)))
                if ray.get(learner.digest.remote()) != ray.get(reader.digest.remote()):
                    raise RuntimeError("the weights arrived changed")
            ms = {what: statistics.median(seconds[1:]) * 1e3 for what, seconds in took.items()}
            what = f"CPU, TCP, {size / 1e6:.4g} MB, 1 % of the elements changed"
            rows.append(Row(what, ms["1 %"], ms["all"], "ms", "a pull of all", 0.15))
            rows.append(Row(f"{what}: publish", ms["publish 1 %"], ms["publish all"], "ms", "publish of all"))
    for end in (learner, reader):
        ray.kill(end)
    show("Weights of which a step changes little (medians)", rows)
    return rows


def cuda(quick: bool = False) -> list[Row]:
    """Print and return rows for two GPUs, each with its own actor."""
    sizes = {size: repeats for size, repeats in CUDA_SIZES.items() if not quick or size < 100_000_000}
    both = End.options(num_gpus=2).remote()
    raw = {size: ray.get(both.raw.remote(size, repeats)) for size, repeats in sizes.items()}
    ray.kill(both)
    learner, reader = (End.options(num_gpus=1).remote() for _ in range(2))
    rows = []
    with rtr.init_group({"learner": learner, "reader": reader}):
        for size, repeats in sizes.items():
            store = rtr.WeightStore(f"{size}", home="learner")
            ray.get([end.load.remote(store, size, "cuda") for end in (learner, reader)])
            ray.get(learner.publish.remote())
            took = ray.get(reader.pulls.remote(repeats)) * 1e3
            target = 1.3 if size > 1e8 else None
            peers = {"tensors": "raw copies, one for each tensor", "one": "one raw copy of as many bytes"}
            for name, peer in peers.items():
                rows.append(Row(f"CUDA, {size / 1e6:.4g} MB", took, raw[size][name] * 1e3, "ms", peer, target))
    for end in (learner, reader):
        ray.kill(end)
    show("Weights from one GPU to another (medians)", rows)
    return rows
