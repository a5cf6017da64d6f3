"""Tensors between two actors of one host, against the roads that people compare: Ray with zero-copy tensors, bare
torchrpc, NCCL, and the machine's own memcpy. One way plus an acknowledgement after the data is there.
"""

from __future__ import annotations

import os
import time
from typing import Any

import ray
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

import raytorchrpc as rtr
from benchmarks._harness import Row, interleaved, show, start_ray

CPU_SIZES = {20_000: 100, 1_250_000: 60, 10_000_000: 25, 40_000_000: 9, 640_000_000: 5}
CUDA_SIZES = {1_250: 100, 1_250_000: 100, 10_000_000: 60, 40_000_000: 30, 640_000_000: 15, 1_250_000_000: 9}


def finish(value: Any) -> int:
    """Wait for the data itself; returns the bytes that came."""
    tensors = value if isinstance(value, list) else [value]
    if tensors[0].is_cuda:
        torch.cuda.current_stream().synchronize()
    return sum(tensor.nbytes for tensor in tensors)


@ray.remote(num_cpus=0)
class Peer:
    """Both ends: ``take`` is called by whatever road is measured."""

    @rtr.method
    def take(self, value: Any) -> int:
        return finish(value)

    def cpu(self, peer: Any, name: str, size: int, repeats: int) -> dict[str, float]:
        tensor = torch.ones(size // 4)
        warm = torch.ones(size // 4)
        worker, direct = rpc.get_worker_info(name), rtr.rpc_sync(peer)
        roads = {
            "direct": lambda: direct.take(tensor),
            "ray": lambda: ray.get(peer.take.remote(tensor)),
            "torchrpc": lambda: rpc.rpc_sync(worker, finish, args=(tensor,)),
            "memcpy": lambda: warm.copy_(tensor),
        }
        return interleaved(roads, repeats)

    def cuda(self, peer: Any, name: str, size: int, repeats: int, torchrpc: bool = True) -> dict[str, float]:
        tensor = torch.ones(max(1, size // 4), device="cuda")
        worker, direct = rpc.get_worker_info(name), rtr.rpc_sync(peer)
        roads = {"direct": lambda: direct.take(tensor)}
        if torchrpc:
            roads["torchrpc"] = lambda: rpc.rpc_sync(worker, finish, args=(tensor,))
        return interleaved(roads, repeats, warmup=5)

    def shared(self, peer: Any, small: int, large: int, repeats: int) -> dict[str, float]:
        tensors = {size: torch.ones(size // 4, device="cuda") for size in (small, large)}
        lent, copied = rtr.rpc_sync(peer, share=True), rtr.rpc_sync(peer)
        roads = {
            "small": lambda: lent.take(tensors[small]),
            "large": lambda: lent.take(tensors[large]),
            "copied": lambda: copied.take(tensors[large]),
        }
        return interleaved(roads, repeats, warmup=5)

    def many(self, peer: Any, count: int, size: int, repeats: int) -> dict[str, float]:
        direct = rtr.rpc_sync(peer)
        tensors = [torch.ones(size // 4, device="cuda") for _ in range(count)]
        one = torch.ones(count * size // 4, device="cuda")
        return interleaved({"many": lambda: direct.take(tensors), "one": lambda: direct.take(one)}, repeats)

    # NCCL has no calls: both ends run the same loop.

    def nccl_start(self, rank: int, address: str) -> None:
        host, port = address.split(":")
        store = _store or dist.TCPStore(host, int(port), is_master=False)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=2)

    def nccl(self, rank: int, size: int, repeats: int) -> float:
        tensor, ack = torch.ones(max(1, size // 4), device="cuda"), torch.ones(1, device="cuda")
        seconds = []
        for _ in range(repeats + 5):
            start = time.perf_counter()
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(ack, 1)
            else:
                dist.recv(tensor, 0)
                dist.send(ack, 0)
            torch.cuda.current_stream().synchronize()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds[5:])[repeats // 2]


def main(quick: bool = False) -> None:
    os.environ.setdefault("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1")
    start_ray()
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        _cpu(quick)
        if gpus:
            _shared()
        if gpus >= 2:
            _cuda(quick)
        else:
            print(f"  CUDA rows: not run, they need two GPUs and Ray has {gpus}")
    finally:
        ray.shutdown()


def _cpu(quick: bool) -> None:
    a, b = Peer.remote(), Peer.remote()
    rows = []
    with rtr.init_group({"a": a, "b": b}) as group:
        name = group.members[1].rpc_name
        for size, repeats in CPU_SIZES.items():
            if quick and size > 40_000_000:
                continue
            took = ray.get(a.cpu.remote(b, name, size, repeats))
            ms = {road: seconds * 1e3 for road, seconds in took.items()}
            what = f"CPU, {size / 1e6:g} MB"
            target = 0.25 if size <= 10_000_000 else None
            rows.append(Row(what, ms["direct"], ms["ray"], "ms", "Ray, zero-copy tensors", target))
            rows.append(Row(what, ms["direct"], ms["torchrpc"], "ms", "bare torchrpc", 0.3 if size > 1e8 else None))
            rows.append(Row(what, ms["direct"], ms["memcpy"], "ms", "memcpy, warm", 1.3 if size > 1e8 else None))
    ray.kill(a)
    ray.kill(b)
    show("CPU tensors, one host (medians)", rows)


def _shared() -> None:
    small, large = 1_250, 640_000_000
    a, b = (Peer.options(num_gpus=0.5).remote() for _ in range(2))
    with rtr.init_group({"a": a, "b": b}):
        took = {road: 1e3 * seconds for road, seconds in ray.get(a.shared.remote(b, small, large, 50)).items()}
    ray.kill(a)
    ray.kill(b)
    what = f"share=True, {large / 1e6:g} MB"
    rows = [
        Row(what, took["large"], took["small"], "ms", f"share=True, {small / 1e3:g} KB", 1.2),
        Row(what, took["large"], took["copied"], "ms", "the same, copied"),
    ]
    show("CUDA tensors between two actors on one GPU (medians)", rows)


def _cuda(quick: bool) -> None:
    a, b = (Peer.options(num_gpus=1).remote() for _ in range(2))
    rows = []
    address = ray.get(b.__ray_call__.remote(_free_address))
    ray.get([a.nccl_start.remote(0, address), b.nccl_start.remote(1, address)])
    with rtr.init_group({"a": a, "b": b}) as group:
        name = group.members[1].rpc_name
        for size, repeats in CUDA_SIZES.items():
            took = ray.get(a.cuda.remote(b, name, size, repeats))
            nccl = ray.get([a.nccl.remote(0, size, repeats), b.nccl.remote(1, size, repeats)])[0] * 1e3
            ms = {road: seconds * 1e3 for road, seconds in took.items()}
            what = f"CUDA, {size / 1e6:g} MB"
            small = 0.25 if size <= 10_000_000 else None
            rows.append(Row(what, ms["direct"], ms["torchrpc"], "ms", "torchrpc device map", small))
            rows.append(Row(what, ms["direct"], nccl, "ms", "NCCL send/recv + ack", 1.15 if size > 1e8 else None))
        took = ray.get(a.many.remote(b, 400, 256 * 1024, 15))
        rows.append(Row("CUDA, 400 x 256 KB", took["many"] * 1e3, took["one"] * 1e3, "ms", "one of the same bytes", 2))
    ray.kill(a)
    ray.kill(b)
    show("CUDA tensors between two GPUs of one host (medians)", rows)


def _free_address(_: Any) -> str:
    """A TCP store's address; the store that listens there serves the rendezvous, so no port is guessed."""
    global _store
    _store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return f"127.0.0.1:{_store.port}"


_store: Any = None


if __name__ == "__main__":
    main()
