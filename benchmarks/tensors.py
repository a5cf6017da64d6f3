"""Tensors where ``raytorchrpc bench`` has no row: borrowed ones (``share=True``), and many small ones in one call."""

from __future__ import annotations

from typing import Any

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Row, interleaved, local_ray, show

SMALL, LARGE = 1_250, 640_000_000
#: Number and bytes of the tensors in one call.
MANY = 400, 256 * 1024


@ray.remote(num_cpus=0)
class Peer:
    """Both ends."""

    @rtr.method
    def take(self, value: Any) -> int:
        tensors = value if isinstance(value, list) else [value]
        torch.cuda.current_stream().synchronize()
        return sum(tensor.nbytes for tensor in tensors)

    def shared(self, peer: Any) -> dict[str, float]:
        small, large = (torch.ones(size // 4, device="cuda") for size in (SMALL, LARGE))
        lent, copied = rtr.rpc_sync(peer, share=True), rtr.rpc_sync(peer)
        runs = {
            "small": lambda: lent.take(small),
            "large": lambda: lent.take(large),
            "copied": lambda: copied.take(large),
        }
        return interleaved(runs, repeats=50, warmup=5)

    def many(self, peer: Any) -> dict[str, float]:
        count, size = MANY
        tensors, direct = [torch.ones(size // 4, device="cuda") for _ in range(count)], rtr.rpc_sync(peer)
        one = torch.ones(count * size // 4, device="cuda")
        return interleaved({"many": lambda: direct.take(tensors), "one": lambda: direct.take(one)}, 15, warmup=5)


def main(quick: bool = False) -> None:
    with local_ray():
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus:
            ms = _measure("shared", num_gpus=0.5)
            what = f"share=True, {LARGE / 1e6:g} MB"
            rows = [
                Row(what, ms["large"], ms["small"], "ms", f"share=True, {SMALL / 1e3:g} KB", 1.2),
                Row(what, ms["large"], ms["copied"], "ms", "the same, copied"),
            ]
            show("CUDA tensors between two actors on one GPU (medians)", rows)
        if gpus >= 2:
            ms = _measure("many", num_gpus=1)
            what = f"{MANY[0]} CUDA tensors of {MANY[1] // 1024} KiB"
            row = Row(what, ms["many"], ms["one"], "ms", "one tensor of the same total size", 2)
            show("Many CUDA tensors in one call between two GPUs (medians)", [row])
        else:
            print(f"  Not all rows ran: they need two GPUs, and Ray has {gpus}")


def _measure(method: str, num_gpus: float) -> dict[str, float]:
    """Milliseconds by name, from ``Peer.method`` on one of two actors."""
    a, b = (Peer.options(num_gpus=num_gpus).remote() for _ in range(2))
    with rtr.init_group({"a": a, "b": b}):
        took = ray.get(getattr(a, method).remote(b))
    for actor in (a, b):
        ray.kill(actor)
    return {name: seconds * 1e3 for name, seconds in took.items()}
