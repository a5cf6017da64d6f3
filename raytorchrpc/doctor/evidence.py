"""What the rules look at: an ``Endpoint``, and what the doctor asks besides. Plain data; travels as JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from raytorchrpc.topology.endpoint import Endpoint

#: The variables that some rule looks at; the rest of an environment stays where it is.
WATCHED = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "IBV_FORK_SAFE",
    "RDMAV_FORK_SAFE",
    "THP_MEM_ALLOC_ENABLE",
    "TP_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "RAY_AUTH_MODE",
    "KUBERNETES_SERVICE_HOST",
)


class GpuLink(BaseModel):
    """The road between two GPUs of this process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    a: int
    b: int
    """CUDA indices in this process."""
    nvlinks: int | None = None
    """Active NVLinks that lead to the other, or to the switch between them; None = NVML was not asked."""
    peer_access: bool | None = None
    """Either may map the other's memory; None = nobody was asked."""


class Evidence(BaseModel):
    """One process, or one tree of files (``--sysfs-root``). Whatever could not be asked is None or empty."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: Endpoint
    live: bool = True
    """False: read from a tree of files. What only a running process can tell is then unknown unless a file says it."""
    hosts: int = 1
    """Hosts of the cluster that this one belongs to."""
    kernel: str | None = None
    """Release of the kernel: ``6.8.0-45-generic``."""
    container: str | None = None
    """``docker``, ``kubernetes``, ...; None = none that could be recognised."""
    gpu_driver: str | None = None
    """Version of the NVIDIA kernel driver; None = not loaded."""
    cuda_driver: str | None = None
    """Newest CUDA release that the driver serves."""
    nvml: Literal["used", "missing", "failed"] | None = None
    """Whether NVML could be asked; ``missing``: nvidia-ml-py is not installed."""
    pci_gpus: tuple[str, ...] = ()
    """PCI addresses of the machine's NVIDIA GPUs, those outside this container too."""
    gpu_files: tuple[str, ...] = ()
    """/dev/nvidia0, ...: the GPUs that were given to this container."""
    cuda_works: bool | None = None
    """What torch says; None = torch has no CUDA, or was not asked."""
    links: tuple[GpuLink, ...] = ()
    environment: dict[str, str] = {}
    """Of ``WATCHED``, what is set."""
    nccl: dict[str, str] = {}
    """NCCL's variables as it will see them, its files included."""
    may_lock_all: bool | None = None
    """The process has CAP_IPC_LOCK where it counts: in the first user namespace."""
    shm_total_bytes: int | None = None
    """Size of /dev/shm; 0 = there is none, None = unknown."""
    own_addresses: tuple[str, ...] | None = None
    """What the machine's own name resolves to; empty: nothing. None = not asked."""
    ray_version: str | None = None
    ray_token: Literal["on", "off", "missing"] | None = None
    """Ray's token authentication in this process; ``missing``: it is on and there is no token."""

    def merged(self, more: dict[str, Any]) -> Evidence:
        """This with fields replaced; those of ``endpoint`` one by one. Raises pydantic's ValidationError."""
        fields = self.model_dump(mode="json")
        endpoint = fields["endpoint"] | more.get("endpoint", {})
        return Evidence.model_validate(fields | more | {"endpoint": endpoint})
