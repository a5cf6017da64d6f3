"""The actor at either end of a road."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.bench.transports import ROADS, Road, Seen, Setting, arrived, look


class Ready(NamedTuple):
    """What an actor says of itself once it is up."""

    gpu: str
    """UUID of the GPU it uses; empty without one."""
    gpu_name: str
    gpu_free: int
    """Bytes."""


class End:
    """Sends or receives; the driver says which, how often, and how much."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._roads: dict[str, Road] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._seen: Seen | None = None

    def ready(self) -> Ready:
        """Raises what keeps CUDA from starting, where a GPU was promised."""
        if not self._cuda:
            return Ready("", "", 0)
        properties = torch.cuda.get_device_properties(0)
        torch.zeros(1, device="cuda")
        return Ready(str(getattr(properties, "uuid", "")), properties.name, torch.cuda.mem_get_info(0)[0])

    # --- what arrives ------------------------------------------------------------------------------------------

    @rtr.method
    def take(self, tensor: torch.Tensor) -> None:
        """The sample itself."""
        arrived(tensor)

    @rtr.method
    def look(self, tensor: torch.Tensor) -> None:
        """The same, and note what came."""
        self._seen = look(tensor)

    def seen(self, name: str) -> Seen | None:
        """What came last, and forget it."""
        own, self._seen = self._seen, None
        return own or (self._roads[name].seen() if name in self._roads else None)

    # --- roads ---------------------------------------------------------------------------------------------------

    def open(self, name: str, kind: str, rank: int, peer: Any, options: dict[str, Any], met: Any) -> Any:
        """Lay one end of a road; returns what the other end is to be given."""
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        road = ROADS[kind](Setting(rank, peer, address, self._cuda), options)
        met = road.open(met)
        self._roads[name] = road
        return met

    def wake(self, name: str) -> None:
        """Before the road's turn."""
        self._roads[name].wake()

    def rest(self, name: str) -> None:
        """After it."""
        self._roads[name].rest()

    def send(self, name: str, device: str, size: int, count: int, check: bool) -> list[float]:
        """Take ``count`` samples; their seconds."""
        road, tensor = self._roads[name], self._tensor(device, size)
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            road.send(tensor, check)
            seconds.append(time.perf_counter() - start)
        return seconds

    def serve(self, name: str, device: str, size: int, count: int) -> None:
        """The other end of ``send``, for roads without calls."""
        self._roads[name].serve(torch.zeros(size, dtype=torch.uint8, device=device), count)

    # --- tensors -------------------------------------------------------------------------------------------------

    def make(self, device: str, size: int) -> Seen:
        """Have a tensor of that size; what its receiver ought to see of it."""
        return look(self._tensor(device, size))

    def give(self, device: str, size: int) -> torch.Tensor:
        """The tensor itself, for transports that move results."""
        return self._tensor(device, size)

    def _tensor(self, device: str, size: int) -> torch.Tensor:
        tensor = self._tensors.get(device)
        if tensor is None or tensor.nbytes != size:
            self._tensors.pop(device, None)
            tensor = torch.full((size,), size % 251, dtype=torch.uint8, device=device)
            tensor[-1] = size * 7 % 251
            self._tensors[device] = tensor
            arrived(tensor)
        return tensor

    def drop(self) -> None:
        """Give back the memory of the last size."""
        self._tensors.clear()
        for road in self._roads.values():
            road.drop()
        if self._cuda:
            torch.cuda.empty_cache()
