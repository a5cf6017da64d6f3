"""Actors whose results stay with them until somebody gets them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import ray
import torch

import raytorchrpc as rtr
from tests.ray.actors import Latch
from tests.releases import skip_module_without

skip_module_without("objectrefs")


@ray.remote
class RefPeer:
    """Makes tensors, and adds up what it gets."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    @rtr.method(objectref=True)
    def ones(self, numel: int) -> torch.Tensor:
        return torch.ones(numel)

    @rtr.method(objectref=True)
    def make(self, how: Callable[[], Any]) -> Any:
        return how()

    @rtr.method(objectref=True)
    def state(self) -> torch.Tensor:
        return self.kept.setdefault("state", torch.zeros(10_000))

    def overwrite_when_freed(self, value: float, timeout: float) -> None:
        ray.experimental.wait_tensor_freed(self.kept["state"], timeout)
        self.kept["state"].fill_(value)

    def total(self, *tensors: Any) -> float:
        return float(sum(tensor.sum() for tensor in tensors))

    def look(self, what: Callable[[Any], Any], value: Any) -> Any:
        """``what(value)``, of an argument that Ray got."""
        return what(value)

    def get(self, what: Callable[[Any], Any], refs: Any) -> Any:
        """``what(ray.get(refs))``, of refs inside a container."""
        if isinstance(refs, dict):
            return what({key: ray.get(ref) for key, ref in refs.items()})
        return what(ray.get(refs))

    def pass_on(self, refs: list[Any], other: Any) -> float:
        return ray.get(other.get.remote(refs))

    def use(self, maker: Any, numel: int) -> float:
        """The whole line of a user's, in an actor."""
        return self.total(ray.get(maker.ones.remote(numel)))

    def put(self, numel: int) -> list[Any]:
        return [ray.put(torch.ones(numel), _tensor_transport="TORCHRPC")]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def busy(self, latch: Latch) -> None:
        latch.pass_through()

    def held(self) -> int:
        gc.collect()
        return rtr.rdt.held()

    def pid(self) -> int:
        return os.getpid()


@ray.remote
class AsyncRefPeer:
    """Its methods are coroutines."""

    @rtr.method(objectref=True)
    async def ones(self, numel: int) -> torch.Tensor:
        return torch.ones(numel)

    async def total(self, *tensors: Any) -> float:
        return float(sum(tensor.sum() for tensor in tensors))

    async def get(self, refs: list[Any]) -> float:
        return await self.total(*await rtr.rdt.get(refs))

    async def use(self, maker: Any, numel: int) -> float:
        return await self.total(await rtr.rdt.get(maker.ones.remote(numel)))

    async def busy(self, latch: Latch) -> None:
        latch.pass_through()  # the loop stands still


@ray.remote
class Stranger:
    """Never in a group, and knows of no transport."""

    def get(self, refs: list[Any]) -> float:
        return float(sum(tensor.sum() for tensor in ray.get(refs)))


@ray.remote(num_cpus=0)
def total_in_task(refs: list[Any]) -> float:
    return float(sum(tensor.sum() for tensor in ray.get(refs)))
