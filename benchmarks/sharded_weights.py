"""Weights from two trainers, sharded by FSDP, to two tensor parallel generators, against copies of as many bytes and
against gathering whole tensors and broadcasting them by torch.distributed.
"""

from __future__ import annotations

from typing import Any

import torch

import raytorchrpc as rtr
from benchmarks._harness import Line, Pick, each, gpu_count, group_of, interleaved, show
from benchmarks._weights import COLUMNS, MODELS, ROWS, TINY, Model, copies, publish, pulls, size_of, sums

PUBLISHERS, READERS = ("t0", "t1"), ("g0", "g1")


def load(end: Any, store: Any, model: Model, device: str) -> int:
    """Make this end's shards; returns their bytes."""
    name = rtr.current_member().name
    trains, number = name in PUBLISHERS, int(name[1])
    end.store, end.number, end.device = store, number, device
    end.model = {
        weight: _shard(shape, ROWS if trains else divided, number, device)
        for weight, (shape, divided) in model.weights().items()
    }
    if trains:
        for shard in end.model.values():
            shard.tensor.normal_()
    return size_of(end.model)


def meet(end: Any, store: Any, device: str) -> None:
    """Exchange a small model, so that the first pull of another finds its connections."""
    name = rtr.current_member().name
    trains = name in PUBLISHERS
    model = {"weight": _shard((1024, 1024), ROWS if trains else COLUMNS, int(name[1]), device)}
    (store.publish if trains else store.pull)(model)


def gather(end: Any, repeats: int) -> float:
    """Median milliseconds to gather whole tensors at the first trainer and to broadcast them."""
    group: Any = rtr.process_group()
    dist = torch.distributed

    def sync() -> None:
        for shard in end.model.values():
            whole = torch.empty(shard.global_shape, dtype=shard.tensor.dtype, device=end.device)
            halves = list(whole.chunk(2)) if end.number == 0 else None
            if shard.global_shape[0] % 2 == 0:
                dist.gather(shard.tensor, halves, group_dst=0, group=group)
            dist.broadcast(whole, group_src=0, group=group)

    return interleaved({"sync": sync}, repeats, warmup=1)["sync"]


def _shard(shape: tuple[int, ...], divided: int | None, number: int, device: str) -> rtr.Shard:
    extents, offset = list(shape), [0] * len(shape)
    if divided is not None:
        extents[divided] //= 2
        offset[divided] = number * extents[divided]
    return rtr.Shard(torch.zeros(extents, dtype=torch.bfloat16, device=device), shape, tuple(offset))


def main(pick: Pick) -> None:
    gpus = gpu_count()
    device = "cuda" if gpus else "cpu"
    models = pick(MODELS[1:], MODELS[1:2], [TINY]) if gpus else pick(MODELS[:2], MODELS[:1], [TINY])
    lines = [line for model in models for line in _measure(model, device, gpus, pick(10 if gpus else 3, 3, 1))]
    show(f"Weights from two FSDP trainers to two tensor parallel generators, {device}, {gpus} GPUs (medians)", lines)


def _measure(model: Model, device: str, gpus: int, repeats: int) -> list[Line]:
    places = [str(place % gpus) for place in range(4)] if gpus else []
    with group_of(*PUBLISHERS, *READERS, gpus=places) as (group, ends):
        everybody, trainers, readers = [*ends.values()], [*ends.values()][:2], [*ends.values()][2:]
        size = sum(each(everybody, load, rtr.WeightStore(model.name, publishers=PUBLISHERS), model, device)[2:])
        each(trainers, publish)
        each(everybody, meet, rtr.WeightStore("first", publishers=PUBLISHERS), device)
        first = max(each(readers, pulls, 1))
        _check(each(trainers, sums), each(readers, sums))
        warm, copied = (max(each(readers, work, repeats)) for work in (pulls, copies))
        lines = [
            Line(f"{model.name}, {size / 1e9:.3g} GB", warm, copied, "ms", "copies within"),
            Line(f"{model.name}, the first pull", first, warm, "ms", "a later one", 2.0),
        ]
        if gpus != 1:
            group.process_group("nccl" if gpus else "gloo", members=PUBLISHERS)
            gathered = max(each(trainers, gather, min(repeats, 3)))
            lines.append(Line(model.name, warm, gathered, "ms", "gather to one trainer, broadcast", 0.2))
        return lines


def _check(sent: list[dict[str, float]], got: list[dict[str, float]]) -> None:
    """Compare the sums of what was published with those of what has arrived, whole or in halves."""
    for name in sent[0]:
        both, arrived = sent[0][name] + sent[1][name], got[0][name] + got[1][name]
        if min(abs(both - arrived), abs(both - got[0][name])) > 1e-6 * max(1.0, abs(both)):
            raise RuntimeError(f"{name!r} arrived changed: {both} became {arrived}")
