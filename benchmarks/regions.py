"""Scattered blocks of a KV cache, read into given blocks of another actor, beside calls and copies in one process."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

import raytorchrpc as rtr
from benchmarks._harness import End, Pick, compare, gpu_count, group_of, median_of, on
from raytorchrpc.bench.cases import Figure


class Shape(NamedTuple):
    """Of a cache, and of a read: so many blocks of each layer."""

    layers: int
    rows: int
    blocks: int
    block_bytes: int = 32 << 10


class Member(End):
    cache: dict[str, torch.Tensor]

    @rtr.method
    def blocks(self, rows: list[int]) -> list[torch.Tensor]:
        return [layer[row] for layer in self.cache.values() for row in rows]

    @rtr.method
    def collected(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [layer.index_select(0, rows.to(layer.device)) for layer in self.cache.values()]


def prepare(end: Member, device: str, shape: Shape, is_owner: bool) -> None:
    made = [torch.ones(shape.rows, shape.block_bytes, dtype=torch.uint8, device=device) for _ in range(shape.layers)]
    end.cache = {f"layer {number}": layer for number, layer in enumerate(made)}
    if is_owner:
        rtr.Region(f"cache on {device}", end.cache)


def turn(end: Member, contestant: str, device: str, shape: Shape, count: int) -> float:
    """Median milliseconds until all blocks are in their places."""
    shuffle = torch.Generator().manual_seed(1)
    rows, at = (torch.randperm(shape.rows, generator=shuffle)[: shape.blocks] for _ in range(2))
    layers = list(end.cache.values())
    targets = [layer[row] for layer in layers for row in at.tolist()]
    peer = rtr.rpc_sync("owner", into=targets) if contestant == "a call with into=" else rtr.rpc_sync("owner")

    def scatter() -> None:
        for layer, blocks in zip(layers, peer.collected(rows), strict=True):
            layer.index_copy_(0, at.to(device), blocks)

    def copy(sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    run: Any = {
        "a region": lambda: rtr.read("owner", f"cache on {device}", rows=rows, at=at, into=end.cache).wait(),
        "a call with into=": lambda: peer.blocks(rows.tolist()),
        "a call, scattered": scatter,
    }.get(contestant)
    if contestant == "copies in one process":
        others = [layer.clone() for layer in layers]
        run = partial(copy, [layer[row] for layer in others for row in rows.tolist()])
    elif contestant == "one copy in one process":
        size = shape.layers * shape.blocks * shape.block_bytes
        one, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        run = partial(one.copy_, other)
    run()
    return median_of(run, count)


def regions(pick: Pick) -> list[Figure]:
    shape = pick(Shape(64, 256, 128), Shape(64, 256, 128), Shape(2, 8, 4))
    contestants = (
        "a region",
        "copies in one process",
        "one copy in one process",
        "a call with into=",
        "a call, scattered",
    )
    figures = []
    for device in ("cpu", "cuda"):
        if device == "cuda" and not gpu_count():
            continue
        with group_of("owner", "reader", gpus=["0"] if device == "cuda" else (), cls=Member) as (_, ends):
            for name, end in ends.items():
                on(end, prepare, device, shape, name == "owner")

            def measured(contestant: str, _: Any, device: str = device, reader: Any = ends["reader"]) -> float:
                return on(reader, turn, contestant, device, shape, pick(9, 5, 1))

            case = f"{shape.layers * shape.blocks} blocks of {shape.block_bytes >> 10} KB, {device}"
            figures += compare(case, measured, contestants, [""], pick(5, 3, 1))
    return figures
