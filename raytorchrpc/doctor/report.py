"""The doctor's data: the ``Evidence`` of a process, the ``Finding`` of a rule, and the ``Report`` of both. JSON."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel

from raytorchrpc.topology.endpoint import Endpoint
from raytorchrpc.topology.nccl_env import Advice

#: The environment variables that some rule reads; no others are collected.
WATCHED = ("CUDA_VISIBLE_DEVICES", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class GpuLink(BaseModel, frozen=True, extra="forbid"):
    """How two GPUs of this process are connected."""

    a: int
    b: int
    """CUDA indices in this process."""
    nvlinks: int | None = None
    """Active NVLinks to the other GPU, or to the switch between them; None = NVML could not be queried."""
    peer_access: bool | None = None
    """Each can map the other's memory; None = unknown."""


class Evidence(BaseModel, frozen=True, extra="forbid"):
    """One process, or one file tree (``--sysfs-root``). Whatever is unknown is None or empty."""

    endpoint: Endpoint
    live: bool = True
    """False: read from a file tree, where facts of a running process are unknown unless a file states them."""
    hosts: int = 1
    """Number of hosts in the cluster."""
    kernel: str | None = None
    """Release of the kernel: ``6.8.0-45-generic``."""
    container: str | None = None
    """``docker``, ``kubernetes``, ...; None = no container was recognised."""
    gpu_driver: str | None = None
    """Version of the NVIDIA kernel driver; None = not loaded."""
    cuda_driver: str | None = None
    """Newest CUDA release that the driver supports."""
    nvml: bool | None = None
    """nvidia-ml-py is installed, by which NVLinks are counted; None = unknown."""
    pci_gpus: tuple[str, ...] = ()
    """PCI addresses of the machine's NVIDIA GPUs, including those outside this container."""
    gpu_files: tuple[str, ...] = ()
    """nvidia0, ... in /dev: the GPUs of this container."""
    cuda_works: bool | None = None
    """``torch.cuda.is_available()``; None = torch has no CUDA, or was not queried."""
    links: tuple[GpuLink, ...] = ()
    environment: dict[str, str] = {}
    """Those of ``WATCHED`` that are set."""
    nccl: dict[str, str] = {}
    """NCCL's variables as it reads them, including its files."""
    shm_total_bytes: int | None = None
    """Size of /dev/shm; 0 = there is none, None = unknown."""
    own_addresses: tuple[str, ...] | None = None
    """What the host name resolves to; empty: nothing. None = unknown."""
    ray_version: str | None = None
    ray_jobs: bool | None = None
    """``ray[default]`` is installed: a head started here accepts jobs. None = unknown."""
    ray_token: Literal["on", "off", "missing"] | None = None
    """Ray's token authentication in this process; ``missing``: on, but without a token."""

    def merged(self, more: dict[str, Any]) -> Evidence:
        """A copy with fields replaced; those of ``endpoint`` one by one. Raises pydantic's ValidationError."""
        fields = self.model_dump(mode="json")
        endpoint = fields["endpoint"] | more.get("endpoint", {})
        return Evidence.model_validate(fields | more | {"endpoint": endpoint})


# --- findings -------------------------------------------------------------------------------------------------------

Level = Literal["ok", "note", "warning", "problem"]
#: From best to worst.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")


class Finding(BaseModel, frozen=True, extra="forbid"):
    """A fact about a process or its machine, with its consequence and remedy."""

    id: str
    """Stable between releases."""
    level: Level
    """ok: as it should be. note: worth knowing, nothing to do. warning: works, but slower or over another lane.
    problem: something the machine has cannot be used, or will fail."""
    seen: str
    meaning: str = ""
    remedy: str = ""
    """Empty where there is nothing to do."""


def finding(level: Level, name: str, seen: str, meaning: str = "", remedy: str = "") -> Finding:
    """A ``Finding`` with the id ``name``."""
    return Finding(id=name, level=level, seen=seen, meaning=meaning, remedy=remedy)


ok, note, warning, problem = (partial(finding, level) for level in LEVELS)


def some(names: Iterable[object], limit: int = 4) -> str:
    """``a, b, c, d and 5 more``."""
    listed = [str(name) for name in names]
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")


# --- reports --------------------------------------------------------------------------------------------------------


class NodeReport(BaseModel, frozen=True, extra="forbid"):
    """The findings about one process, one node, or one file tree."""

    name: str
    findings: tuple[Finding, ...]
    nccl: dict[str, Advice]
    """By variable: the advised NCCL settings. Empty without GPUs and RDMA adapters."""
    evidence: Evidence


class Report(BaseModel, frozen=True, extra="forbid"):
    """Everything the doctor found."""

    version: str
    """Of raytorchrpc."""
    level: Level
    """The worst of all findings."""
    nodes: tuple[NodeReport, ...]
    together: tuple[Finding, ...] = ()
    """Findings about several nodes or actors at once."""

    def healthy(self, *, strict: bool = False) -> bool:
        """True without problems; with ``strict``, also without warnings."""
        return LEVELS.index(self.level) < LEVELS.index("warning" if strict else "problem")
