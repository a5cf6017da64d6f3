"""Weights of a model from one actor, or from shards in several, into the models of others, beside Ray's object store,
``torch.distributed`` and plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Pick, actors, compare, each, gpu_count, group_of, on, timed
from raytorchrpc.bench.cases import Figure, Size

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
        hidden, inner, queries, keys = self.hidden, self.inner, self.queries, self.keys
        of_layer: dict[str, tuple[tuple[int, ...], int | None]] = {
            "q": ((queries, hidden), ROWS), "k": ((keys, hidden), ROWS), "v": ((keys, hidden), ROWS),
            "o": ((hidden, queries), COLUMNS), "gate": ((inner, hidden), ROWS), "up": ((inner, hidden), ROWS),
            "down": ((hidden, inner), COLUMNS), "norm1": ((hidden,), WHOLE), "norm2": ((hidden,), WHOLE),
        }  # fmt: skip
        layers = {f"{layer}.{name}": weight for layer in range(self.layers) for name, weight in of_layer.items()}
        return {"embedding": ((self.vocabulary, hidden), ROWS), **layers}


TINY = Model("tiny", 1, 128, 256, 128, 128, 512)
#: Shapes like those of Qwen3, whose embedding is tied.
MODELS = (
    Model("0.02B", 8, 256, 768, 256, 256, 32_000),
    Model("0.6B", 28, 1024, 3072, 2048, 1024, 151_936),
    Model("8B", 36, 4096, 12_288, 4096, 1024, 151_936),
)


def models(pick: Pick) -> dict[str, Model]:
    """By name, those that suit this machine."""
    some = pick(MODELS[1:], MODELS[1:2], [TINY]) if gpu_count() else pick(MODELS[:2], MODELS[:1], [TINY])
    return {model.name: model for model in some}


# --- what an end does: its model, by name, is ``end.model``, and the store ``end.store`` ------------------------------


def publish(end: Any) -> None:
    end.store.publish(end.model)


def pull(end: Any) -> float:
    """Milliseconds of a pull."""
    return timed(lambda: end.store.pull(end.model))


def copies(end: Any) -> float:
    """Milliseconds of a copy of each tensor within the end's device."""
    if not hasattr(end, "copies"):
        end.copies = {name: tensor.clone() for name, tensor in tensors(end.model).items()}
    return timed(lambda: [end.copies[name].copy_(tensor) for name, tensor in tensors(end.model).items()])


def sums(end: Any) -> dict[str, float]:
    """The sum of each tensor, by name."""
    return {name: float(tensor.double().sum()) for name, tensor in tensors(end.model).items()}


def tensors(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a dict of tensors or shards."""
    return {name: getattr(value, "tensor", value) for name, value in model.items()}


# --- whole models ----------------------------------------------------------------------------------------------------


def load(end: Any, store: Any, size: int) -> None:
    """Weights like a transformer's: large and small tensors in each of 16 layers."""
    part = size // 4 // 16 // 4
    sides = ("mlp", 2 * part), ("attention", 2 * part), ("norm", 256), ("bias", 256)
    end.store = store
    end.model = {f"{layer}.{name}": torch.ones(count) for layer in range(16) for name, count in sides}


def put(end: Any) -> list[Any]:
    return [ray.put(end.model)]


def get(end: Any, ref: list[Any]) -> None:
    for name, tensor in ray.get(ref[0]).items():
        end.model[name].copy_(tensor)


def weights(pick: Pick) -> list[Figure]:
    """From an actor to several of its host: the store, and ``ray.put`` and ``ray.get`` into the model."""
    sizes, count = pick((10_000_000, 1 << 30), (10_000_000,), (1_000_000,)), pick(4, 2, 1)
    zero = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
    names = [f"reader{number}" for number in range(count)]
    with group_of("learner", *names) as (_, members), actors(count + 1) as by_ray, actors(count + 1, **zero) as by_view:
        ends = {"raytorchrpc": [*members.values()], "Ray": by_ray, "Ray, zero-copy": by_view}

        def turn(contestant: str, size: int) -> float:
            learner, *readers = ends.get(contestant, ends["raytorchrpc"])
            if (contestant, size) not in loaded:
                store = rtr.WeightStore(f"{size}", home="learner") if contestant == "raytorchrpc" else None
                each([learner, *readers], load, store, size)
                loaded.add((contestant, size))
            if contestant == "one copy in a process":
                return on(learner, copies)
            if contestant == "raytorchrpc":
                return timed(lambda: (on(learner, publish), each(readers, pull)))
            return timed(lambda: each(readers, get, on(learner, put)))

        loaded = {("one copy in a process", size) for size in sizes}
        return compare(f"weights to {count} actors", turn, [*ends, "one copy in a process"], sizes, pick(5, 3, 1))


# --- shards ----------------------------------------------------------------------------------------------------------

PUBLISHERS, READERS = ("t0", "t1"), ("g0", "g1")


def load_shards(end: Any, store: Any, model: Model, device: str) -> None:
    name = rtr.current_member().name
    end.store, end.number, end.device = store, int(name[1]), device
    end.model = {
        weight: _shard(shape, ROWS if name in PUBLISHERS else divided, end.number, device)
        for weight, (shape, divided) in model.weights().items()
    }
    for shard in end.model.values() if name in PUBLISHERS else ():
        shard.tensor.normal_()


def _shard(shape: tuple[int, ...], divided: int | None, number: int, device: str) -> rtr.Shard:
    extents, offset = list(shape), [0] * len(shape)
    if divided is not None:
        extents[divided] //= 2
        offset[divided] = number * extents[divided]
    return rtr.Shard(torch.zeros(extents, dtype=torch.bfloat16, device=device), shape, tuple(offset))


def gather(end: Any) -> float:
    """Milliseconds to gather whole tensors at the first trainer and to broadcast them."""
    group: Any = rtr.process_group()
    dist = torch.distributed

    def sync() -> None:
        for shard in end.model.values():
            whole = torch.empty(shard.global_shape, dtype=shard.tensor.dtype, device=end.device)
            halves = list(whole.chunk(2)) if end.number == 0 else None
            if shard.global_shape[0] % 2 == 0:
                dist.gather(shard.tensor, halves, group_dst=0, group=group)
            dist.broadcast(whole, group_src=0, group=group)

    return timed(sync)


def sharded_weights(pick: Pick) -> list[Figure]:
    """From two trainers, sharded by FSDP, to two tensor parallel generators, each time by the slower one."""
    gpus, figures = gpu_count(), list[Figure]()
    device: Any = "cuda" if gpus else "cpu"
    for model in models(pick).values():
        places = [str(place % gpus) for place in range(4)] if gpus else []
        with group_of(*PUBLISHERS, *READERS, gpus=places) as (group, ends):
            trainers, readers = [*ends.values()][:2], [*ends.values()][2:]
            each([*ends.values()], load_shards, rtr.WeightStore(model.name, publishers=PUBLISHERS), model, device)
            each(trainers, publish)
            first = max(each(readers, pull))
            _check(each(trainers, sums), each(readers, sums))
            works: dict[str, tuple[list[Any], Callable[[Any], float]]] = {"raytorchrpc": (readers, pull)}
            if gpus != 1:  # NCCL takes one process for each GPU
                group.process_group("nccl" if gpus else "gloo", members=PUBLISHERS)
                works["gather and broadcast"] = trainers, gather
            works["copies within"] = readers, copies

            def turn(contestant: str, size: Size, works: Any = works) -> float:
                return max(each(*works[contestant]))

            size = sum(each(readers, lambda end: sum(tensor.nbytes for tensor in tensors(end.model).values())))
            name = f"sharded weights, {model.name}"
            figures += compare(name, turn, [*works], [size], pick(10 if gpus else 3, 3, 1), device=device)
            known: Any = {"case": name, "device": device, "size": size, "turns": 1}
            figures.append(Figure(contestant="the first pull", median=first, low=first, high=first, **known))
    return figures


def _check(sent: list[dict[str, float]], got: list[dict[str, float]]) -> None:
    """Compare the sums of what was published with those of what has arrived, whole or in halves."""
    for name in sent[0]:
        both, arrived = sent[0][name] + sent[1][name], got[0][name] + got[1][name]
        if min(abs(both - arrived), abs(both - got[0][name])) > 1e-6 * max(1.0, abs(both)):
            raise RuntimeError(f"{name!r} arrived changed: {both} became {arrived}")
