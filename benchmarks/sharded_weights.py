"""Weights from two trainers, sharded by FSDP, to two tensor parallel generators, against copies of as many bytes and
against gathering whole tensors and broadcasting them by torch.distributed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Row, local_ray, show

PUBLISHERS, READERS = ("t0", "t1"), ("g0", "g1")
#: How a tensor parallel layer divides a weight: by rows, by columns, or not at all.
ROWS, COLUMNS, WHOLE = 0, 1, None


class Model(NamedTuple):
    """The shapes of a decoder."""

    name: str
    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    vocabulary: int

    def weights(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Shapes by name, and how tensor parallelism divides them."""
        hidden = self.hidden
        found: dict[str, tuple[tuple[int, ...], int | None]] = {"embedding": ((self.vocabulary, hidden), ROWS)}
        for layer in range(self.layers):
            of_layer = {
                "q": ((self.queries, hidden), ROWS),
                "k": ((self.keys, hidden), ROWS),
                "v": ((self.keys, hidden), ROWS),
                "o": ((hidden, self.queries), COLUMNS),
                "gate": ((self.inner, hidden), ROWS),
                "up": ((self.inner, hidden), ROWS),
                "down": ((hidden, self.inner), COLUMNS),
                "norm1": ((hidden,), WHOLE),
                "norm2": ((hidden,), WHOLE),
            }
            found.update({f"{layer}.{name}": weight for name, weight in of_layer.items()})
        return found


#: Shapes like those of Qwen3, whose embedding is tied.
MODELS = (
    Model("0.02B", 8, 256, 768, 256, 256, 32_000),
    Model("0.6B", 28, 1024, 3072, 2048, 1024, 151_936),
    Model("8B", 36, 4096, 12_288, 4096, 1024, 151_936),
)


@ray.remote(num_cpus=0)
class End:
    """A trainer or a generator: one of two that share a model."""

    def load(self, store: rtr.WeightStore, model: Model, number: int, trains: bool, device: str) -> int:
        """Make this end's shards; returns their bytes."""
        self.store, self.device, self.number = store, device, number
        self.model = {
            name: _shard(shape, ROWS if trains else divided, number, device)
            for name, (shape, divided) in model.weights().items()
        }
        if trains:
            for shard in self.model.values():
                shard.tensor.normal_()
        self.synchronize()
        return sum(shard.tensor.nbytes for shard in self.model.values())

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def publish(self) -> int:
        return self.store.publish(self.model)

    def pull(self, repeats: int) -> list[float]:
        """Seconds of each pull."""
        return [_timed(self._pull) for _ in range(repeats)]

    def _pull(self) -> None:
        self.store.pull(self.model)
        self.synchronize()

    def meet(self, store: rtr.WeightStore, number: int, trains: bool, device: str) -> None:
        model = {"weight": _shard((1024, 1024), ROWS if trains else COLUMNS, number, device)}
        (store.publish if trains else store.pull)(model)

    def copies(self, repeats: int) -> float:
        """Median seconds of copies of this end's shards within its device, one for each tensor."""
        others = [shard.tensor.clone() for shard in self.model.values()]

        def copy() -> None:
            for shard, other in zip(self.model.values(), others, strict=True):
                other.copy_(shard.tensor)
            self.synchronize()

        return statistics.median(_timed(copy) for _ in range(repeats + 1))

    def gather(self, repeats: int) -> float:
        """Median seconds to gather whole tensors at the first trainer and to broadcast them."""
        group: Any = rtr.process_group()
        dist = torch.distributed

        def sync() -> None:
            for shard in self.model.values():
                whole = torch.empty(shard.global_shape, dtype=shard.tensor.dtype, device=self.device)
                halves = list(whole.chunk(2)) if self.number == 0 else None
                if shard.global_shape[0] % 2 == 0:
                    dist.gather(shard.tensor, halves, group_dst=0, group=group)
                dist.broadcast(whole, group_src=0, group=group)
            self.synchronize()

        return statistics.median(_timed(sync) for _ in range(repeats + 1))

    def digest(self) -> dict[str, float]:
        """Sums of what has arrived, by name."""
        return {name: float(shard.tensor.double().sum()) for name, shard in self.model.items()}


def _shard(shape: tuple[int, ...], divided: int | None, number: int, device: str) -> rtr.Shard:
    extents, offset = list(shape), [0] * len(shape)
    if divided is not None:
        extents[divided] //= 2
        offset[divided] = number * extents[divided]
    return rtr.Shard(torch.zeros(extents, dtype=torch.bfloat16, device=device), shape, tuple(offset))


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main(quick: bool = False) -> None:
    with local_ray():
        gpus = int(ray.cluster_resources().get("GPU", 0))
    device = "cuda" if gpus else "cpu"
    models = MODELS[1 : 2 if quick else 3] if gpus else MODELS[: 1 if quick else 2]
    rows = [row for model in models for row in _measure(model, device, gpus, 3 if quick or not gpus else 10)]
    show(f"Weights from two FSDP trainers to two tensor parallel generators, {device}, {gpus} GPUs (medians)", rows)


def _measure(model: Model, device: str, gpus: int, repeats: int) -> list[Row]:
    with local_ray():
        names = (*PUBLISHERS, *READERS)
        ends = {name: _end(place % gpus if gpus else None) for place, name in enumerate(names)}
        with rtr.init_group(ends) as group:
            store = rtr.WeightStore(model.name, publishers=PUBLISHERS)
            loads = [end.load.remote(store, model, at % 2, at < 2, device) for at, end in enumerate(ends.values())]
            sizes = ray.get(loads)
            readers, trainers = [ends[name] for name in READERS], [ends[name] for name in PUBLISHERS]
            ray.get([end.publish.remote() for end in trainers])
            _meet(ends, device)
            first = max(took[0] for took in ray.get([end.pull.remote(1) for end in readers]))
            _check(trainers, readers)
            warm = max(statistics.median(took) for took in ray.get([end.pull.remote(repeats) for end in readers]))
            copies = max(ray.get([end.copies.remote(repeats) for end in readers]))
            rows = [
                Row(f"{model.name}, {sum(sizes[2:]) / 1e9:.3g} GB", warm * 1e3, copies * 1e3, "ms", "copies within"),
                Row(f"{model.name}, the first pull", first * 1e3, warm * 1e3, "ms", "a later one", 2.0),
            ]
            if not gpus or gpus > 1:
                group.process_group("nccl" if gpus else "gloo", members=PUBLISHERS)
                gather = max(ray.get([end.gather.remote(min(repeats, 3)) for end in trainers]))
                rows.append(Row(model.name, warm * 1e3, gather * 1e3, "ms", "gather to one trainer, broadcast", 0.2))
            return rows


def _meet(ends: dict[str, Any], device: str) -> None:
    """Have all ends exchange a small model once, so that the first pull of another finds its connections."""
    store = rtr.WeightStore("first", publishers=PUBLISHERS)
    ray.get([end.meet.remote(store, at % 2, at < 2, device) for at, end in enumerate(ends.values())])


def _end(gpu: int | None) -> Any:
    env = rtr.runtime_env()["env_vars"] | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    return End.options(num_gpus=0 if gpu is None else 0.2, runtime_env={"env_vars": env}).remote()


def _check(trainers: list[Any], readers: list[Any]) -> None:
    """Compare the sums of what was published with those of what has arrived."""
    sent, got = ray.get([end.digest.remote() for end in trainers]), ray.get([end.digest.remote() for end in readers])
    for name in sent[0]:
        both, arrived = sent[0][name] + sent[1][name], got[0][name] + got[1][name]
        if abs(both - arrived) > 1e-6 * max(1.0, abs(both)) and abs(both - got[0][name]) > 1e-6 * max(1.0, abs(both)):
            raise RuntimeError(f"{name!r} arrived changed: {both} became {arrived}")
