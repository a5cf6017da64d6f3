"""Times ``ray.get(b.take.remote(a.produce.remote()))`` in the driver over every tensor transport of Ray: Ray Direct
Transport over this package (TORCHRPC), Gloo, NCCL, NIXL and CUDA IPC, and Ray's object store.

Each transport has two actors of its own, started with ``runtime_env()``. ``produce`` returns existing tensors, so that
neither allocation nor filling is timed. The tensors are verified once for each size, untimed. "empty" is a one-sided
transport that moves nothing: Ray's own overhead, a lower bound for every transport.
"""

from __future__ import annotations

from typing import Any

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Pick, Skipped, engine, gpu_count, ratios, show
from raytorchrpc._compat import requirements
from raytorchrpc.bench.cases import Case, Row
from raytorchrpc.bench.reports import plain, tables
from raytorchrpc.bench.results import Device

if missed := requirements.obstacle("objectrefs", ray.__version__):
    raise Skipped(missed)
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

OURS, PLAIN, EMPTY = "TORCHRPC", "plain Ray", "empty"
SIZES: dict[Device, tuple[int, ...]] = {
    "cpu": (20_000, 1_250_000, 40_000_000),
    "cuda": (1_250, 20_000, 1_250_000, 10_000_000, 40_000_000, 640_000_000, 1_250_000_000),
}
#: A thousand tensors in one object.
MANY = Case(size=4_000_000, tensors=1000, variant="1000 tensors")
#: Largest CUDA tensor in Ray's object store with ``--quick``: 1.25 GB would take seconds.
QUICK_STORE = 40_000_000
TARGETS = {
    **{("20 KB", PLAIN): 1.5, ("40 MB", PLAIN): 0.3, ("40 MB", "RDT gloo"): 0.7},
    **{(f"{MANY.label}", "RDT nixl"): 0.3, ("640 MB", "RDT nixl"): 0.6},
    **{(size, "RDT nccl"): 1.0 for size in ("1.25 KB", "10 MB", "640 MB")},
}


class EmptyTransport(TensorTransportManager):  # type: ignore[misc]
    """Moves nothing: the receiver gets tensors of its own, of the right shapes."""

    def __init__(self) -> None:
        self._key: Any = None
        self._tensors: list[torch.Tensor] = []

    def tensor_transport_backend(self) -> str:
        return "EMPTY"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, *_: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, _: str, tensors: list[torch.Tensor]) -> TensorTransportMetadata:
        return TensorTransportMetadata([(tensor.shape, tensor.dtype) for tensor in tensors], tensors[0].device.type)

    def get_communicator_metadata(self, *_: Any) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(self, _: str, meta: TensorTransportMetadata, *__: Any) -> list[torch.Tensor]:
        key = meta.tensor_device, meta.tensor_meta
        if key != self._key:
            self._key = key
            self._tensors = [torch.ones(s, dtype=d, device=meta.tensor_device) for s, d in meta.tensor_meta]
        return list(self._tensors)

    def send_multiple_tensors(self, *_: Any) -> None:
        raise NotImplementedError("one-sided")

    def garbage_collect(self, *_: Any) -> None:
        pass

    def abort_transport(self, *_: Any) -> None:
        pass


def _row(name: str, transport: str | None, **more: Any) -> Row:
    options = {"tensor_transport": transport, "empty": name == EMPTY}
    return Row(name, "rdt", name, "raytorchrpc" if name == OURS else "for comparison", options=options, **more)


def main(pick: Pick) -> None:
    ray.experimental.register_tensor_transport("EMPTY", ["cpu", "cuda"], EmptyTransport, torch.Tensor)
    rtr.rdt.enable()
    ours, store, empty = _row(OURS, "TORCHRPC"), _row(PLAIN, None), _row(EMPTY, "EMPTY")
    nixl = _row("RDT nixl", "nixl", needs=("nixl",))
    zero_copy = _row("Ray, zero-copy tensors", None, env={"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"})
    others = [zero_copy, _row("RDT gloo", "gloo"), nixl, empty]
    _compare("CPU tensors by ObjectRef, one host", [ours, store, *pick(others, others, [])], "cpu", pick)
    gpus = gpu_count()
    if gpus:
        transports = {OURS: "TORCHRPC", "RDT cuda_ipc": "cuda_ipc", EMPTY: "EMPTY"}
        rows = [_row(name, transport, one_gpu=True) for name, transport in transports.items()]
        _compare("CUDA tensors by ObjectRef between two actors on one GPU", rows, "cuda", pick)
    if gpus > 1:
        store = _row(PLAIN, None, max_bytes=pick(None, QUICK_STORE, QUICK_STORE))
        rows = [ours, _row("RDT nccl", "nccl"), nixl, store, empty]
        _compare("CUDA tensors by ObjectRef between two GPUs", rows, "cuda", pick)
    else:
        print(f"  CUDA tensors between two GPUs: not run, there are {gpus}")


def _compare(title: str, rows: list[Row], device: Device, pick: Pick) -> None:
    sizes = [*(Case(size=size) for size in pick(SIZES[device], SIZES[device], (20_000,))), MANY]
    run = engine(rows, sorted(sizes, key=lambda case: case.size), device, budget_s=pick(1800, 1800, 60))
    for table in tables(run)[:1]:
        print(f"\n{plain(table._replace(title=f'{title}: milliseconds'))}")
    peers = {row.name: row.name for row in rows if row.name != OURS}
    show(f"{title} (medians): {OURS} against the others", ratios(run, OURS, peers, TARGETS))
    for floor in ratios(run, EMPTY, {PLAIN: PLAIN}):
        print(f"  {floor.what}: Ray's overhead alone ({EMPTY}) is {floor.ratio:.2f} x {PLAIN}")
