"""What the hosts at both ends can do, and what of it a contestant may lack there."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytorchrpc._compat import requirements
from raytorchrpc.bench.actors import get
from raytorchrpc.bench.cases import Failed, show_size
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.topology import probe, rdma, sysfs
from raytorchrpc.topology.endpoint import Endpoint


@dataclass(frozen=True)
class Host:
    """One end, described by a process there that uses no GPU."""

    endpoint: Endpoint
    node: str
    """Ray's id."""
    free_bytes: int
    """Memory that processes can still allocate."""
    gpus: int = 0
    """Ray's count for the node."""
    gpu_names: Sequence[str] = ()
    """By Ray."""
    summary: str = ""
    """Cores, memory and processor."""
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
    def visible_gpus(self) -> Sequence[str]:
        """Values of CUDA_VISIBLE_DEVICES for actors that take turns; empty if only Ray can tell, between two nodes."""
        if self.a.node != self.b.node:
            return ()
        given = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        return (given or [*map(str, range(self.a.gpus))])[: self.a.gpus]

    @property
    def facts(self) -> tuple[str, ...]:
        """The hardware and software."""
        end = self.a.endpoint
        facts = [*{host.endpoint.boot_id: host.summary for host in (self.a, self.b)}.values()]
        if self.a.gpus:
            facts.append(f"{self.a.gpus} x {', '.join(self.a.gpu_names) or 'GPU'}, CUDA {end.cuda_version}")
        facts.append(f"RDMA adapters: {', '.join(hca.name for hca in end.hcas) or 'none'}")
        facts.append(f"Python {end.python_version}, torch {end.torch_version}, Ray {ray.__version__}")
        return tuple(facts)


def examine(hosts: Sequence[str]) -> Site:
    """Describe both ends: this host twice, unless nodes are named. Blocks until they answer.

    Raises ConfigurationError for a host that Ray does not have, BootstrapError if one does not answer.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if not hosts:
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
    problem = f"several Ray nodes match {host!r}; name one by its id" if matches else f"no Ray node {host!r}; nodes"
    known = (f"{node['NodeID']} ({node['NodeManagerAddress']}, {node['NodeManagerHostname']})" for node in nodes)
    raise ConfigurationError(f"{problem}: {'; '.join(known)}")


def describe_host(node: Mapping[str, Any]) -> Host:
    """Describe this process's host, which is that node of Ray."""
    processor = re.search(r"^model name\s*: (.*)", sysfs.read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    name = processor[1] if processor else platform.machine()
    resources, free, kind = node["Resources"], free_memory(), "accelerator_type:"
    return Host(
        endpoint=probe.probe(name=socket.gethostname(), node_ip=node["NodeManagerAddress"], wants_gpu=False),
        node=node["NodeID"],
        free_bytes=free,
        gpus=int(resources.get("GPU", 0)),
        gpu_names=[name.removeprefix(kind) for name in resources if name.startswith(kind)],
        summary=f"{os.cpu_count()} cores, {show_size(free)} of memory free, {name}",
        store_bytes=int(resources.get("object_store_memory", 0)),
    )


def free_memory(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes here can still allocate: the kernel's estimate, or less if the control group limits it."""
    import psutil  # here: where it is not installed, Ray brings its own

    free = int(psutil.virtual_memory().available)
    limit, used = (sysfs.read(control_group / f"memory.{name}") or "" for name in ("max", "current"))
    return min(free, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else free


# --- what a contestant may need: why a site lacks it, or None if it does not ---------------------------------------


def one_host(site: Site) -> str | None:
    return None if site.same_host else "needs both ends on one host"


def two_gpus(site: Site) -> str | None:
    return "needs two GPUs, and there is one" if site.same_host and site.a.gpus < 2 else None


def tensorpipe_rdma(site: Site) -> str | None:
    obstacles = rdma.ibv_obstacles({"a": site.a.endpoint, "b": site.b.endpoint})
    return next(filter(None, obstacles.values()), None)


def tensorpipe_gpudirect(site: Site) -> str | None:
    ends = site.a.endpoint, site.b.endpoint
    return next(filter(None, (rdma.gpudirect_obstacle(end, ibv=True) for end in ends)), None)


def nccl_rdma(site: Site) -> str | None:
    return rdma.ucx_obstacle(site.a.endpoint, site.b.endpoint, cuda=False)


def nccl_gpudirect(site: Site) -> str | None:
    return rdma.ucx_obstacle(site.a.endpoint, site.b.endpoint, cuda=True)


def nixl(site: Site) -> str | None:
    is_there = site.a.endpoint.nixl and site.b.endpoint.nixl
    return None if is_there else "nixl is not installed: pip install '.[nixl]' in a checkout"


def object_refs(site: Site) -> str | None:
    return requirements.obstacle("objectrefs", ray.__version__)
