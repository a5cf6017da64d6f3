"""The actor at either end of a transport."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.bench.transports import TRANSPORTS, Context, Digest, Transport, digest, synchronize


class Ready(NamedTuple):
    """What an actor reports once it has started."""

    gpu: str
    """UUID of its GPU; empty without one."""
    gpu_name: str
    gpu_free: int
    """Bytes."""


class BenchActor:
    """Sends or receives; the driver decides which, how often, and how much."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._transports: dict[str, Transport] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._digest: Digest | None = None

    def ready(self) -> Ready:
        """Raises whatever prevents CUDA from starting if the actor has a GPU."""
        if not self._cuda:
            return Ready("", "", 0)
        properties = torch.cuda.get_device_properties(0)
        torch.zeros(1, device="cuda")
        return Ready(str(getattr(properties, "uuid", "")), properties.name, torch.cuda.mem_get_info(0)[0])

    @rtr.method
    def take(self, tensor: torch.Tensor) -> None:
        """The callee of a sample."""
        synchronize(tensor)

    @rtr.method
    def take_checked(self, tensor: torch.Tensor) -> None:
        """The same, and keeps a digest of the tensor."""
        self._digest = digest(tensor)

    def received(self, name: str) -> Digest | None:
        """Digest of the last tensor that arrived; forgets it."""
        own, self._digest = self._digest, None
        return own or (self._transports[name].received() if name in self._transports else None)

    def open(self, name: str, kind: str, rank: int, peer: Any, options: dict[str, Any], meeting: Any) -> Any:
        """Open one end of a transport; returns what the other end's ``open`` needs."""
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        transport = TRANSPORTS[kind](Context(rank, peer, address, self._cuda), options)
        meeting = transport.open(meeting)
        self._transports[name] = transport
        return meeting

    def resume(self, name: str) -> None:
        self._transports[name].resume()

    def pause(self, name: str) -> None:
        self._transports[name].pause()

    def send(self, name: str, device: str, size: int, count: int, check: bool) -> list[float]:
        """Take ``count`` samples; returns the seconds of each."""
        transport, tensor = self._transports[name], self._tensor(device, size)
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            transport.send(tensor, check)
            seconds.append(time.perf_counter() - start)
        return seconds

    def serve(self, name: str, device: str, size: int, count: int) -> None:
        """The other end of ``send``, for transports without calls."""
        self._transports[name].serve(torch.zeros(size, dtype=torch.uint8, device=device), count)

    def prepare(self, device: str, size: int) -> Digest:
        """Create the tensor of that size; returns the digest that its receiver must compute."""
        return digest(self._tensor(device, size))

    def produce(self, device: str, size: int) -> torch.Tensor:
        """Return the tensor itself, for transports that move results."""
        return self._tensor(device, size)

    def _tensor(self, device: str, size: int) -> torch.Tensor:
        tensor = self._tensors.get(device)
        if tensor is None or tensor.nbytes != size:
            self._tensors.pop(device, None)
            tensor = torch.full((size,), size % 251, dtype=torch.uint8, device=device)
            tensor[-1] = size * 7 % 251
            self._tensors[device] = tensor
            synchronize(tensor)
        return tensor

    def drop(self) -> None:
        self._tensors.clear()
        for transport in self._transports.values():
            transport.drop()
        if self._cuda:
            torch.cuda.empty_cache()
