"""Weights of a model from one actor into the models of others, against ``ray.put`` and ``ray.get``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Line, Pick, actors, each, gpu_count, group_of, interleaved, on, show, timed
from benchmarks._weights import check_same, copies, publish, pull, pulls, sums

#: Repeats by bytes.
SIZES = {10_000_000: 7, 1 << 30: 3}
CUDA_SIZES = {10_000_000: 100, 1 << 30: 50}


def model_of(size: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Weights like a transformer's: large and small tensors in each of 16 layers."""
    part = size // 4 // 16 // 4
    sides = ("mlp", 2 * part), ("attention", 2 * part), ("norm", 256), ("bias", 256)
    return {f"{layer}.{name}": torch.ones(count, device=device) for layer in range(16) for name, count in sides}


def load(end: Any, store: Any, size: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    end.store, end.version = store, 0
    end.model = {name: tensor.to(dtype) for name, tensor in model_of(4 * size // dtype.itemsize, device).items()}


def put(end: Any) -> list[Any]:
    return [ray.put(end.model)]


def get(end: Any, ref: list[Any]) -> None:
    for name, tensor in ray.get(ref[0]).items():
        end.model[name].copy_(tensor)


def step(end: Any, share: float) -> float:
    """Change a share of the elements, and publish; returns the seconds that publishing took."""
    for tensor in end.model.values():
        tensor += (torch.rand(tensor.shape, device=tensor.device) < share).to(tensor.dtype)
    return timed(lambda: publish(end))


def follow(end: Any, knows: bool) -> float:
    """Pull what has changed, or all; returns the seconds."""

    def newest() -> None:
        end.version = end.store.pull(end.model, since=end.version if knows else None)

    return timed(newest)


def publish_pairs(end: Any) -> int:
    """Publish tensors that exist one at a time."""
    return int(end.store.publish((name, tensor) for name, tensor in end.model.items()))


def timed_call(end: Any, call: Callable[[Any], object]) -> float:
    return timed(lambda: call(end))


def load_from(end: Any, how: str) -> float:
    """Load the newest version into a model that has other tensors, as an engine's loader does; returns the seconds."""
    whole: dict[str, torch.Tensor] = vars(end).setdefault("whole", {})

    def loaded() -> None:
        tensors: Any
        if how == "view":
            tensors = end.store.view()
        else:
            tensors = whole if how == "kept" and whole else end.store.layout().empty()
            end.store.pull(tensors)
        for name, tensor in tensors.items():
            end.model[name].copy_(tensor)
        if how == "kept":
            whole.update(tensors)

    return timed(loaded)


def raw(end: Any, size: int, repeats: int) -> dict[str, float]:
    """Milliseconds of copies between the GPUs in a process that has both: for each tensor, and all in one."""
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

    return interleaved({"raw copies, one for each tensor": tensors, "one raw copy of as many bytes": one}, repeats)


def main(pick: Pick) -> None:
    sizes = pick(SIZES, {10_000_000: 7}, {1_000_000: 1})
    kinds = ("Ray, zero-copy tensors", "1"), ("Ray by default", "0")
    for peer, zero_copy in pick(kinds, kinds, kinds[:1]):
        env = {} if pick(False, False, True) else {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": zero_copy}
        _cpu(sizes, pick(4, 4, 2), peer, env)
    _in_place(pick(1 << 28, 1 << 26, 1 << 21), pick(15, 7, 1))
    _changes(pick(1 << 28, 1 << 26, 1 << 20), pick(5, 5, 1))
    if gpu_count() >= 2:
        _cuda({size: repeats for size, repeats in CUDA_SIZES.items() if size <= max(sizes)})
    else:
        print(f"  CUDA rows: not run, they need two GPUs and Ray has {gpu_count()}")


def _cpu(sizes: dict[int, int], count: int, peer: str, env: dict[str, str]) -> None:
    lines = []
    with group_of("learner", *(f"reader{number}" for number in range(count)), **env) as (_, ends):
        learner, *readers = ends.values()
        for size, repeats in sizes.items():
            each([learner, *readers], load, rtr.WeightStore(f"{size}", home="learner"), size)

            def through_store() -> None:
                on(learner, publish)
                each(readers, pull)

            runs = {"store": through_store, "ray": lambda: each(readers, get, on(learner, put))}
            ms = interleaved(runs, repeats, warmup=2, block=1)
            what = f"CPU, {size / 1e6:.4g} MB to {count} actors"
            lines.append(Line(what, ms["store"], ms["ray"], "ms", f"{peer}: put, get into the model", 0.3))
            lines.append(Line(what, ms["store"], on(learner, copies, 3), "ms", "one copy of it within a process"))
    show("Weights from one actor to others of its host (medians)", lines)


def _in_place(size: int, repeats: int) -> None:
    """Each version published from a model and tensor by tensor, and loaded from views and from whole tensors."""
    took: dict[str, list[float]] = {}
    with group_of("learner", "reader") as (_, ends):
        learner, reader = ends.values()
        each([learner, reader], load, rtr.WeightStore("in place", home="learner"), size)
        for _ in range(repeats + 2):
            for publishes in (publish, publish_pairs):
                took.setdefault(publishes.__name__, []).append(on(learner, timed_call, publishes))
            for how in ("view", "kept", "new"):
                took.setdefault(how, []).append(on(reader, load_from, how))
        check_same(on(learner, sums), on(reader, sums))
    ms = {what: statistics.median(seconds[2:]) * 1e3 for what, seconds in took.items()}
    what = f"CPU, {size / 1e6:.4g} MB into a model of other tensors"
    lines = [
        Line(f"{what}: view", ms["view"], ms["kept"], "ms", "pull into whole tensors that stay", 0.7),
        Line(f"{what}: view", ms["view"], ms["new"], "ms", "pull into new whole tensors", 0.5),
        Line(f"{what}: publish an iterator", ms["publish_pairs"], ms["publish"], "ms", "publish the model"),
    ]
    show("Weights read where they were published (medians)", lines)


def _changes(size: int, repeats: int) -> None:
    """A step that changes 1 % of the elements of each tensor, next to full pulls.

    They come over TCP, as between hosts: on one host whole tensors are copied from where they were published.
    """
    config = rtr.GroupConfig(lanes=("socket", "torchrpc"), always_tcp=True)
    took: dict[str, list[float]] = {"publish all": [], "all": [], "publish 1 %": [], "1 %": []}
    with group_of("learner", "reader", config=config) as (_, ends):
        learner, reader = ends.values()
        store: Any = rtr.WeightStore("changes", home="learner", track=True)
        each([learner, reader], load, store, size, "cpu", torch.bfloat16)
        for _ in range(repeats + 1):
            for share, what in ((1.0, "all"), (0.01, "1 %")):
                took[f"publish {what}"].append(on(learner, step, share))
                took[what].append(on(reader, follow, share < 1))
            check_same(on(learner, sums), on(reader, sums))
    ms = {what: statistics.median(seconds[1:]) * 1e3 for what, seconds in took.items()}
    what = f"CPU, TCP, {size / 1e6:.4g} MB, 1 % of the elements changed"
    lines = [
        Line(what, ms["1 %"], ms["all"], "ms", "a pull of all", 0.15),
        Line(f"{what}: publish", ms["publish 1 %"], ms["publish all"], "ms", "publish of all"),
    ]
    show("Weights of which a step changes little (medians)", lines)


def _cuda(sizes: dict[int, int]) -> None:
    """Two GPUs, each with its own actor."""
    with actors(1, gpus=["0,1"], RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1") as (both,):
        copied = {size: on(both, raw, size, repeats) for size, repeats in sizes.items()}
    lines = []
    with group_of("learner", "reader", gpus=["0", "1"]) as (_, ends):
        learner, reader = ends.values()
        for size, repeats in sizes.items():
            each([learner, reader], load, rtr.WeightStore(f"{size}", home="learner"), size, "cuda")
            on(learner, publish)
            on(reader, pulls, 3)
            took = on(reader, pulls, repeats)
            target = 1.3 if size > 1e8 else None
            lines += [Line(f"CUDA, {size / 1e6:.4g} MB", took, ms, "ms", peer, target)
                      for peer, ms in copied[size].items()]  # fmt: skip
    show("Weights from one GPU to another (medians)", lines)
