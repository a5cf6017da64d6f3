"""What the hosts at both ends can do, and why a row, or one size of it, cannot run there."""

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
from raytorchrpc.topology import probe, rdma, sysfs
from raytorchrpc.topology.endpoint import Endpoint

#: Share of the free memory that may be used.
_USABLE = 0.8
_PACKAGES = ("pynng", "nixl")


@dataclass(frozen=True)
class Host:
    """One end, described by a process there that uses no GPU."""

    endpoint: Endpoint
    free_bytes: int
    """Memory that processes can still allocate."""
    packages: frozenset[str]
    """The optional packages that are installed."""
    nccl: bool
    """torch was built with NCCL."""
    gpus: int = 0
    """Ray's count for the node."""
    cores: int = 0
    processor: str = ""
    store_bytes: int = 0
    """Capacity of the node's object store."""


@dataclass(frozen=True)
class Site:
    """Both ends."""

    a: Host
    b: Host
    known_lanes: frozenset[str] = frozenset(registry.names())
    known_settings: frozenset[str] = field(default_factory=lambda: frozenset(GroupConfig.model_fields))

    @property
    def same_host(self) -> bool:
        """Both ends are on one host."""
        return self.a.endpoint.same_host(self.b.endpoint)

    @property
    def has_gpus(self) -> bool:
        """Both ends can have a GPU, possibly the same one."""
        return min(self.a.gpus, self.b.gpus) > 0

    @property
    def distinct_gpus(self) -> bool:
        """The two ends can have different GPUs."""
        return self.has_gpus and (not self.same_host or self.a.gpus > 1)


def describe_host(node_ip: str) -> Host:
    """Describe this process's host, without the fields that come from Ray (``gpus``, ``store_bytes``)."""
    import torch.distributed

    return Host(
        endpoint=probe.probe(name=socket.gethostname(), node_ip=node_ip, wants_gpu=False),
        free_bytes=free_memory(),
        packages=frozenset(name for name in _PACKAGES if importlib.util.find_spec(name)),
        nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        cores=os.cpu_count() or 0,
        processor=_processor(),
    )


def _processor(root: Path = Path("/")) -> str:
    names = (line for line in (sysfs.read(root / "proc/cpuinfo") or "").splitlines() if line.startswith("model name"))
    return next(names, ":" + platform.machine()).partition(":")[2].strip()


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that processes here can still allocate: the kernel's estimate, or less if the control group limits it."""
    free = 0
    for line in (sysfs.read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (sysfs.read(root / f"sys/fs/cgroup/memory.{name}") or "" for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def obstacle(row: Row, device: Device, site: Site) -> str | None:
    """Why the row cannot run here with tensors on that device; None if no reason is known."""
    for lane in row.config.get("lanes", ()):
        if lane not in site.known_lanes:
            return f"this version has no lane {lane!r}"
    for setting in row.config:
        if setting not in site.known_settings:
            return f"this version has no setting {setting!r}"
    if device == "cuda" and not site.has_gpus:
        return "Ray has no GPU" if site.same_host else "Ray has no GPU on one of the nodes"
    return next((reason for need in row.needs if (reason := _NEEDS[need](site))), None)


def _one_host(site: Site) -> str | None:
    return None if site.same_host else "needs both ends on one host"


def _two_hosts(site: Site) -> str | None:
    return "needs two hosts" if site.same_host else None


def _two_gpus(site: Site) -> str | None:
    if site.distinct_gpus:
        return None
    return "Ray has no GPU" if not site.has_gpus else "needs two GPUs, and there is one"


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
    return _nccl_rdma(site) or rdma.ucx_obstacle(site.a.endpoint, site.b.endpoint, cuda=True)


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
class MemoryLimits:
    """Memory that a run may use, in bytes, on the smaller of the two ends."""

    host: int
    gpu: int
    store: int

    @classmethod
    def of(cls, site: Site, gpu_free: int) -> MemoryLimits:
        """``gpu_free``: bytes free on the fuller GPU after all actors have started."""
        host = min(site.a.free_bytes, site.b.free_bytes)
        return cls(int(host * _USABLE), int(gpu_free * _USABLE), min(site.a.store_bytes, site.b.store_bytes))


def size_obstacle(row: Row, device: Device, size: int, limits: MemoryLimits) -> str | None:
    """Why this size cannot be measured even alone; None if it can."""
    if row.max_bytes is not None and size > row.max_bytes:
        return f"carries at most {show_size(row.max_bytes)}"
    host, gpu = needed(row, device, size)
    if host > limits.host:
        return f"may need {show_size(host)} of memory, {show_size(limits.host)} is usable"
    if gpu > limits.gpu:
        return f"may need {show_size(gpu)} of GPU memory, {show_size(limits.gpu)} is usable"
    if row.in_store and 2 * size > limits.store:
        return f"two of them do not fit into Ray's object store of {show_size(limits.store)}"
    return None


def needed(row: Row, device: Device, size: int) -> tuple[int, int]:
    """Memory that one sample may need: (host, one GPU), in bytes."""
    if device == "cpu":
        return row.host_copies * size, 0
    # Object stores and TCP stage GPU tensors in host memory; GPU-to-GPU transports do not.
    staged = row.in_store or row.name.endswith(("-TCP", "-IB")) or row.name.startswith("torchrpc")
    return (row.host_copies * size if staged else 0), row.gpu_copies * size
