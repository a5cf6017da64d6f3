"""The input of the rules: an ``Endpoint`` and what the doctor adds to it. Plain data, serialised as JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from raytorchrpc.topology.endpoint import Endpoint

#: The environment variables that some rule reads; no others are collected.
WATCHED = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE", "THP_MEM_ALLOC_ENABLE"),
    *("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "RAY_AUTH_MODE", "KUBERNETES_SERVICE_HOST"),
)


class GpuLink(BaseModel, frozen=True, extra="forbid"):
    """How two GPUs of this process are connected."""

    a: int
    b: int
    """CUDA indices in this process."""
    nvlinks: int | None = None
    """Active NVLinks to the other GPU, or to the switch between them; None = NVML was not queried."""
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
    nvml: Literal["used", "missing", "failed"] | None = None
    """Whether NVML could be queried; ``missing``: nvidia-ml-py is not installed."""
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
    may_lock_all: bool | None = None
    """The process has CAP_IPC_LOCK in the initial user namespace, where it counts."""
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
