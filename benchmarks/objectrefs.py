"""Times ``ray.get(b.consume.remote(a.produce.remote()))`` in the driver over every tensor transport of Ray: Ray Direct
Transport over this package (TORCHRPC), Gloo, NCCL, NIXL and CUDA IPC, and Ray's object store.

Each transport has two actors of its own, started with ``runtime_env()``. ``produce`` returns existing tensors, so that
neither allocation nor filling is timed; ``consume`` reads from them and returns a number. The tensors are verified once
for each size, untimed.

"empty" is a one-sided transport that moves nothing: Ray's own overhead, a lower bound for every transport.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Row, interleaved, local_ray, show
from benchmarks._objectref_transports import EmptyTransport, Load, Transport
from raytorchrpc.bench.tables import Table, plain

OURS, PLAIN, EMPTY = "TORCHRPC", "plain Ray", "empty"
#: Bytes -> repeats.
CPU_SIZES = {20_000: 200, 1_250_000: 100, 40_000_000: 20}
CUDA_SIZES = {1_250: 100, 20_000: 100, 1_250_000: 100, 10_000_000: 60, 40_000_000: 40, 640_000_000: 20}
CUDA_SIZES |= {1_250_000_000: 10}
SHARED_SIZES = {1_250_000: 60, 640_000_000: 20}
MANY = 1000, 4_000
"""Tensors in one object, and bytes of each."""
MANY_REPEATS = 20
#: Largest CUDA tensor in Ray's object store with ``--quick``: 1.25 GB would take seconds.
QUICK_STORE = 40_000_000


def main(quick: bool = False) -> None:
    ray.experimental.register_tensor_transport("EMPTY", ["cpu", "cuda"], EmptyTransport, torch.Tensor)
    rtr.rdt.enable()
    with local_ray():
        _cpu(quick)
        gpus = _gpus()
        if len(gpus) == 1 or (gpus and not quick):
            _one_gpu(quick)
        if len(gpus) > 1:
            _two_gpus(quick, gpus)
        else:
            print(f"  CUDA tensors between two GPUs: not run, there are {len(gpus)}")


def _cpu(quick: bool) -> None:
    zero_copy = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
    transports = [
        Transport(OURS, "TORCHRPC"),
        Transport(PLAIN, None),
        Transport("Ray, zero-copy tensors", None, env=zero_copy),
        Transport("RDT gloo", "GLOO"),
        _nixl(),
        Transport(EMPTY, "EMPTY", moves=False),
    ]

    def target(load: Load, peer: str) -> float | None:
        if load.number > 1:
            return 0.3 if peer == "RDT nixl" else None
        return {(20_000, PLAIN): 1.5, (40_000_000, PLAIN): 0.3, (40_000_000, "RDT gloo"): 0.7}.get((load.size, peer))

    loads = {Load("cpu", size): repeats for size, repeats in CPU_SIZES.items()}
    loads[Load("cpu", MANY[1], MANY[0])] = MANY_REPEATS
    _compare("CPU tensors by ObjectRef, one host (medians)", transports, loads, target, quick)


def _two_gpus(quick: bool, gpus: Sequence[str]) -> None:
    transports = [
        Transport(OURS, "TORCHRPC"),
        Transport("RDT nccl", "NCCL"),
        _nixl(),
        Transport(PLAIN, None, max_bytes=QUICK_STORE if quick else None),
        Transport(EMPTY, "EMPTY", moves=False),
    ]

    def target(load: Load, peer: str) -> float | None:
        if load.number > 1:
            return 0.3 if peer == "RDT nixl" else None
        return {"RDT nccl": 0.6 if load.size == 640_000_000 else 0.8, "RDT nixl": 0.6}.get(peer)

    loads = {Load("cuda", size): repeats for size, repeats in CUDA_SIZES.items()}
    loads[Load("cuda", MANY[1], MANY[0])] = MANY_REPEATS
    _compare("CUDA tensors by ObjectRef between two GPUs (medians)", transports, loads, target, quick, gpus=gpus[:2])


def _one_gpu(quick: bool) -> None:
    transports = [
        Transport(OURS, "TORCHRPC"),
        Transport("RDT cuda_ipc", "CUDA_IPC"),
        Transport(EMPTY, "EMPTY", moves=False),
    ]
    loads = {Load("cuda", size): repeats for size, repeats in SHARED_SIZES.items()}
    title = "CUDA tensors by ObjectRef between two actors on one GPU (medians)"
    _compare(title, transports, loads, lambda load, peer: None, quick, one_gpu=True)


_NIXL_MISSING = "not installed: pip install '.[nixl]' in a checkout"


def _nixl() -> Transport:
    missing = importlib.util.find_spec("nixl") is None
    return Transport("RDT nixl", "NIXL", obstacle=_NIXL_MISSING if missing else None)


def _gpus() -> list[str]:
    """The GPUs, as named in CUDA_VISIBLE_DEVICES."""
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    return visible or [str(index) for index in range(torch.cuda.device_count())]


def _compare(
    title: str,
    transports: Sequence[Transport],
    loads: Mapping[Load, int],
    target: Callable[[Load, str], float | None],
    quick: bool,
    gpus: Sequence[str | None] = (None, None),
    one_gpu: bool = False,
) -> None:
    """Measure every transport at every load, alternating, and print the tables."""
    device = next(iter(loads)).device
    reasons: dict[str, list[str]] = {}
    took: dict[Load, dict[str, float]] = {}
    living = [transport for transport in transports if transport.obstacle is None]
    try:
        for transport in living:
            # The actors' shares fit on one GPU, so that Ray can place all of them there.
            transport.start(device, gpus, share=0.1 if one_gpu or gpus[0] is not None else 0)
        with ThreadPoolExecutor(len(living)) as pool:
            list(pool.map(lambda transport: transport.open(device, one_gpu), living))
        for load, repeats in loads.items():
            runs = {}
            for transport in transports:
                if (reason := transport.prepare(load)) is None:
                    runs[transport.name] = transport.send
                else:
                    reasons.setdefault(f"{transport.name}: {reason}", []).append(str(load))
            medians = interleaved(runs, max(3, repeats // 3) if quick else repeats) if runs else {}
            broken = {transport.name for transport in transports if transport.obstacle is not None}
            took[load] = {name: seconds for name, seconds in medians.items() if name not in broken}
            for transport in living:
                transport.drop()
    finally:
        for transport in living:
            transport.end()
    _show(title, [transport.name for transport in transports], took, target)
    for load, seconds in took.items():
        if EMPTY in seconds and PLAIN in seconds:
            floor = seconds[EMPTY] / seconds[PLAIN]
            print(f"  {load}: Ray's overhead alone ({EMPTY}) is {floor:.2f} x {PLAIN}")
    for reason, where in reasons.items():
        print(f"  {reason} ({'everywhere' if len(where) == len(loads) else ', '.join(where)})")


def _show(
    title: str,
    names: Sequence[str],
    took: Mapping[Load, Mapping[str, float]],
    target: Callable[[Load, str], float | None],
) -> None:
    cells = tuple(
        (str(load), *(f"{seconds[name] * 1e3:.4g}" if name in seconds else "-" for name in names))
        for load, seconds in took.items()
    )
    print(f"\n{plain(Table(f'{title}: milliseconds', ('', *names), cells))}")
    rows = [
        Row(f"{load.device}, {load}", seconds[OURS] * 1e3, seconds[peer] * 1e3, "ms", peer, target(load, peer))
        for load, seconds in took.items()
        if OURS in seconds
        for peer in names
        if peer != OURS and peer in seconds
    ]
    show(f"{title}: {OURS} against the others", rows)
