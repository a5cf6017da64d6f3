"""What the hosts at both ends can do, and why a contestant, or one size of it, cannot run there."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch.distributed
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytorchrpc._compat import requirements
from raytorchrpc.bench.cases import Device, Failed, show_size
from raytorchrpc.bench.contestants import Contestant, Need
from raytorchrpc.bench.links import get
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.topology import probe, rdma, sysfs
from raytorchrpc.topology.endpoint import Endpoint

#: Share of the free memory that may be used.
USABLE = 0.8


@dataclass(frozen=True)
class Host:
    """One end, described by a process there that uses no GPU."""

    endpoint: Endpoint
    node: str
    """Ray's id."""
    free_bytes: int
    """Memory that processes can still allocate."""
    packages: frozenset[str]
    nccl: bool
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

    @property
    def same_host(self) -> bool:
        return self.a.endpoint.same_host(self.b.endpoint)

    @property
    def has_gpus(self) -> bool:
        """Both ends can have a GPU, possibly the same one."""
        return min(self.a.gpus, self.b.gpus) > 0

    @property
    def distinct_gpus(self) -> bool:
        """The two ends can have different GPUs."""
        return self.has_gpus and (not self.same_host or self.a.gpus > 1)

    def facts(self, gpu_names: Sequence[str]) -> tuple[str, ...]:
        """The hardware and software, given the names of the GPUs that were used."""
        end = self.a.endpoint
        hosts = {host.endpoint.boot_id: host for host in (self.a, self.b)}.values()
        facts = [f"{p.cores} cores, {show_size(p.free_bytes)} of memory free, {p.processor}" for p in hosts]
        if gpu_names:
            facts.append(f"{self.a.gpus} x {', '.join(gpu_names)}, CUDA {end.cuda_version}")
        facts.append(f"RDMA adapters: {', '.join(hca.name for hca in end.hcas) or 'none'}")
        facts.append(f"Python {end.python_version}, torch {end.torch_version}, Ray {ray.__version__}")
        return tuple(facts)


def examine(hosts: tuple[str, str] | None) -> Site:
    """Describe both ends: this host twice, unless nodes are named. Blocks until they answer.

    Raises ConfigurationError for a host that Ray does not have, BootstrapError if one does not answer.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if hosts is None:
        here = describe_host(find_node(ray.get_runtime_context().get_node_id(), alive))
        return Site(here, here)
    asked = []
    for node in [find_node(host, alive) for host in hosts]:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append(ray.remote(describe_host).options(num_cpus=0, scheduling_strategy=there).remote(node))
    try:
        return Site(*get(asked, 60.0))
    except Failed as failure:
        raise BootstrapError(f"cannot examine both hosts: {failure}") from failure


def find_node(host: str, nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The node with that id, address or host name. Raises ConfigurationError, naming the existing ones."""
    keys = ("NodeID", "NodeManagerAddress", "NodeManagerHostname", "NodeName")
    matches = [node for node in nodes if host in (node.get(key) for key in keys)]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})" for node in nodes)
    if matches:
        ids = ", ".join(node["NodeID"] for node in matches)
        raise ConfigurationError(f"several Ray nodes match {host!r}; name one by its id: {ids}")
    raise ConfigurationError(f"no Ray node {host!r}; nodes: {known}")


def describe_host(node: Mapping[str, Any]) -> Host:
    """Describe this process's host, which is that node of Ray."""
    processor = re.search(r"^model name\s*: (.*)", sysfs.read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return Host(
        endpoint=probe.probe(name=socket.gethostname(), node_ip=node["NodeManagerAddress"], wants_gpu=False),
        node=node["NodeID"],
        free_bytes=free_memory(),
        packages=frozenset(name for name in ("pynng", "nixl", "monarch") if importlib.util.find_spec(name)),
        nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        gpus=int(node["Resources"].get("GPU", 0)),
        cores=os.cpu_count() or 0,
        processor=processor[1] if processor else platform.machine(),
        store_bytes=int(node["Resources"].get("object_store_memory", 0)),
    )


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that processes here can still allocate: the kernel's estimate, or less if the control group limits it."""
    available = re.search(r"^MemAvailable:\s*(\d+)", sysfs.read(root / "proc/meminfo") or "", re.MULTILINE)
    free = int(available[1]) * 1024 if available else 0
    limit, used = (sysfs.read(root / f"sys/fs/cgroup/memory.{name}") or "" for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def obstacle(one: Contestant, device: Device, site: Site) -> str | None:
    """Why the contestant cannot run here with tensors on that device; None if no reason is known."""
    if device == "cuda" and not site.has_gpus:
        return "Ray has no GPU" if site.same_host else "Ray has no GPU on one of the nodes"
    return next((reason for need in one.needs if (reason := _NEEDS[need](site))), None)


def _two_gpus(site: Site) -> str | None:
    if site.distinct_gpus:
        return None
    return "needs two GPUs, and there is one" if site.has_gpus else "Ray has no GPU"


def _rdma_usable(site: Site) -> str | None:
    if not site.a.endpoint.hcas or not site.b.endpoint.hcas:
        return "no RDMA adapter (HCA)"
    obstacles = rdma.ibv_obstacles({"a": site.a.endpoint, "b": site.b.endpoint})
    return next(filter(None, obstacles.values()), None)


def _gpudirect(site: Site) -> str | None:
    ends = site.a.endpoint, site.b.endpoint
    return next(filter(None, (rdma.gpudirect_obstacle(end, ibv=True) for end in ends)), None)


def _nccl_rdma(site: Site) -> str | None:
    for end in (site.a.endpoint, site.b.endpoint):
        if not end.hcas:
            return "no RDMA adapter (HCA)"
        if not any(port.state == "ACTIVE" for hca in end.hcas for port in hca.ports):
            return "no port of an RDMA adapter is active"
    return None


def _package(site: Site, name: str, install: str) -> str | None:
    return None if name in site.a.packages & site.b.packages else f"{name} is not installed: pip install {install}"


#: By need, why it is not met; None if it is.
_NEEDS: Mapping[Need, Callable[[Site], str | None]] = {
    "one host": lambda site: None if site.same_host else "needs both ends on one host",
    "two hosts": lambda site: "needs two hosts" if site.same_host else None,
    "two GPUs": _two_gpus,
    "RDMA": _rdma_usable,
    "GPUDirect": _gpudirect,
    "NCCL": lambda site: None if site.a.nccl and site.b.nccl else "this torch build has no NCCL",
    "NCCL RDMA": _nccl_rdma,
    "NCCL GPUDirect": lambda site: _nccl_rdma(site) or rdma.ucx_obstacle(site.a.endpoint, site.b.endpoint, cuda=True),
    "pynng": lambda site: _package(site, "pynng", "pynng"),
    "nixl": lambda site: _package(site, "nixl", "'.[nixl]' in a checkout"),
    "Monarch": lambda site: _package(site, "monarch", "'.[peers]' in a checkout"),
    "ObjectRefs": lambda site: requirements.obstacle("objectrefs", ray.__version__),
}


def size_obstacle(one: Contestant, device: Device, size: int, site: Site, gpu_free: int | None = None) -> str | None:
    """Why this size cannot be measured; None if it can. ``gpu_free``: bytes of the fuller GPU."""
    if one.max_bytes is not None and size > one.max_bytes:
        return f"carries at most {show_size(one.max_bytes)}"
    needed, rooms = one.copies * size, {"memory": min(site.a.free_bytes, site.b.free_bytes)}
    if device == "cuda" and not one.in_store and gpu_free is not None:
        rooms = {"GPU memory": gpu_free}
    for where, free in rooms.items():
        if needed > free * USABLE:
            return f"may need {show_size(needed)} of {where}, {show_size(free * USABLE)} is usable"
    if one.in_store and 2 * size > (store := min(site.a.store_bytes, site.b.store_bytes)):
        return f"two of them do not fit into Ray's object store of {show_size(store)}"
    return None
