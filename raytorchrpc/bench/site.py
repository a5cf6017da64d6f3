"""What the two ends of a run can do, and why a row, or one size of it, cannot run there."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raytorchrpc.bench.options import show_size
from raytorchrpc.bench.rows import Device, Need, Row
from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes import registry
from raytorchrpc.topology import probe, rdma
from raytorchrpc.topology.endpoint import Endpoint

#: Of what is free, as much may be planned for.
_USABLE = 0.8
_PACKAGES = ("pynng", "nixl")


@dataclass(frozen=True)
class Place:
    """One end, as seen from a process there that uses no GPU."""

    endpoint: Endpoint
    free_bytes: int
    """Memory that processes may still take."""
    packages: frozenset[str]
    """Of the optional ones, those installed."""
    nccl: bool
    """torch has NCCL."""
    gpus: int = 0
    """As Ray counts them on the node."""
    cores: int = 0
    processor: str = ""
    store_bytes: int = 0
    """Capacity of the node's object store."""


@dataclass(frozen=True)
class Site:
    """Both ends."""

    a: Place
    b: Place
    known_lanes: frozenset[str] = frozenset(registry.names())
    known_settings: frozenset[str] = field(default_factory=lambda: frozenset(GroupConfig.model_fields))

    @property
    def same_host(self) -> bool:
        """One kernel runs both."""
        return self.a.endpoint.same_host(self.b.endpoint)

    @property
    def has_gpus(self) -> bool:
        """Both ends can have one (the same one, if there is only one)."""
        return min(self.a.gpus, self.b.gpus) > 0

    @property
    def distinct_gpus(self) -> bool:
        """The two ends can have different ones."""
        return self.has_gpus and (not self.same_host or self.a.gpus > 1)


def look_around(node_ip: str) -> Place:
    """Describe the process's machine; the node's own figures (``gpus``, ``store_bytes``) are Ray's to tell."""
    import torch.distributed

    return Place(
        endpoint=probe.probe(name=socket.gethostname(), node_ip=node_ip, wants_gpu=False),
        free_bytes=free_memory(),
        packages=frozenset(name for name in _PACKAGES if importlib.util.find_spec(name)),
        nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        cores=os.cpu_count() or 0,
        processor=_processor(),
    )


def _processor(root: Path = Path("/")) -> str:
    names = (line for line in _read(root / "proc/cpuinfo").splitlines() if line.startswith("model name"))
    return next(names, ":" + platform.machine()).partition(":")[2].strip()


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that processes here may still take: the kernel's estimate, or what the control group leaves."""
    free = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_read(root / f"sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def obstacle(row: Row, device: Device, site: Site) -> str | None:
    """Why the row cannot run here with tensors on that device; None if nothing is known against it."""
    for lane in row.config.get("lanes", ()):
        if lane not in site.known_lanes:
            return f"this version has no lane {lane!r}"
    for setting in row.config:
        if setting not in site.known_settings:
            return f"this version has no setting {setting!r}"
    if device == "cuda" and not site.has_gpus:
        return "no GPU that Ray knows of" if site.same_host else "not both nodes have a GPU that Ray knows of"
    needs = row.needs + (row.cuda_needs if device == "cuda" else ())
    return next((reason for need in needs if (reason := _NEEDS[need](site))), None)


def _one_host(site: Site) -> str | None:
    return None if site.same_host else "works only within one host"


def _two_hosts(site: Site) -> str | None:
    return "one host: nothing crosses a network" if site.same_host else None


def _two_gpus(site: Site) -> str | None:
    if site.distinct_gpus:
        return None
    return "no GPU that Ray knows of" if not site.has_gpus else "one GPU, and it needs two"


def _rdma_usable(site: Site) -> str | None:
    if not site.a.endpoint.hcas or not site.b.endpoint.hcas:
        return "no RDMA adapter (HCA)"
    obstacles = rdma.ibv_obstacles({"a": site.a.endpoint, "b": site.b.endpoint})
    return next((reason for reason in obstacles.values() if reason), None)


def _nccl_rdma(site: Site) -> str | None:
    for place in (site.a, site.b):
        if not place.endpoint.hcas:
            return "no RDMA adapter (HCA)"
        if not any(port.state == "ACTIVE" for hca in place.endpoint.hcas for port in hca.ports):
            return "no port of an RDMA adapter is active"
    return None


def _nccl_gpudirect(site: Site) -> str | None:
    return _nccl_rdma(site) or rdma.nccl_obstacle(site.a.endpoint, site.b.endpoint)


def _gpudirect(site: Site) -> str | None:
    for place in (site.a, site.b):
        if reason := rdma.gpudirect_obstacle(place.endpoint, ibv=True):
            return reason
    return None


def _nccl(site: Site) -> str | None:
    return None if site.a.nccl and site.b.nccl else "this torch build has no NCCL"


def _package(name: str, remedy: str) -> Callable[[Site], str | None]:
    def check(site: Site) -> str | None:
        return None if name in site.a.packages & site.b.packages else f"{name} is not installed: {remedy}"

    return check


_NEEDS: Mapping[Need, Callable[[Site], str | None]] = {
    "one host": _one_host,
    "two hosts": _two_hosts,
    "two GPUs": _two_gpus,
    "RDMA": _rdma_usable,
    "GPUDirect": _gpudirect,
    "NCCL": _nccl,
    "NCCL RDMA": _nccl_rdma,
    "NCCL GPUDirect": _nccl_gpudirect,
    "pynng": _package("pynng", "pip install pynng"),
    "nixl": _package("nixl", "pip install 'raytorchrpc[nixl]'"),
}


@dataclass(frozen=True)
class Room:
    """Memory that a run may plan with, in bytes, on the poorer of the two ends."""

    host: int
    gpu: int
    store: int

    @classmethod
    def of(cls, site: Site, gpu_free: int) -> Room:
        """``gpu_free``: bytes free on the fuller GPU once every actor is up."""
        host = min(site.a.free_bytes, site.b.free_bytes)
        return cls(int(host * _USABLE), int(gpu_free * _USABLE), min(site.a.store_bytes, site.b.store_bytes))


def size_obstacle(row: Row, device: Device, size: int, room: Room) -> str | None:
    """Why this size cannot be measured, alone and with everything else released; None if it can."""
    if row.max_bytes is not None and size > row.max_bytes:
        return f"carries at most {show_size(row.max_bytes)}"
    host, gpu = needed(row, device, size)
    if host > room.host:
        return f"may need {show_size(host)} of memory, {show_size(room.host)} can be used"
    if gpu > room.gpu:
        return f"may need {show_size(gpu)} of GPU memory, {show_size(room.gpu)} can be used"
    if row.in_store and 2 * size > room.store:
        return f"two of them do not fit into Ray's object store of {show_size(room.store)}"
    return None


def needed(row: Row, device: Device, size: int) -> tuple[int, int]:
    """Memory that one sample may hold at once: (host, of one GPU), in bytes."""
    if device == "cpu":
        return row.host_copies * size, 0
    # Object stores and TCP stage GPU tensors in host memory; roads from GPU to GPU leave it alone.
    staged = row.in_store or row.name.endswith(("-TCP", "-IB")) or row.name.startswith("torchrpc")
    return (row.host_copies * size if staged else 0), row.gpu_copies * size
