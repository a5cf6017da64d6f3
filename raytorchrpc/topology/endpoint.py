"""The endpoint of a process: its host, GPUs, network interfaces and RDMA ports, as published to the group."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

T = TypeVar("T", bound="_Evidence")


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # for the doctor, which reads endpoints as JSON

    def changed(self: T, fields: Mapping[str, Any]) -> T:
        """A copy with these fields replaced."""
        return replace(self, **fields)


@dataclass(frozen=True, kw_only=True)
class Gpu(_Evidence):
    """One GPU that the process sees."""

    index: int
    """CUDA index in this process; under Ray's masking every actor's own GPU is 0."""
    uuid: str
    name: str
    memory_bytes: int
    pci_bus_id: str | None = None
    """As sysfs spells it: ``0000:53:00.0``."""
    path: tuple[str, ...] | None = None
    """Where it is: its NUMA node, and the PCI devices from the root to it; None = unknown."""
    bar1_bytes: int | None = None
    """Size of the window through which a network adapter reaches this GPU's memory; None = unknown."""
    resource1_present: bool | None = None
    """Whether sysfs has the ``resource1`` file, without which TensorPipe's cuda_gdr crashes; None if the PCI device is
    not in sysfs."""
    dma_buf: bool | None = None
    """Whether the driver shares this GPU's memory as DMA-BUFs, by which adapters reach it without nvidia-peermem
    (NCCL can use that, TensorPipe cannot); None = unknown."""


@dataclass(frozen=True, kw_only=True)
class Gid(_Evidence):
    """One filled slot of a port's GID table."""

    index: int
    value: str
    kind: str
    """``IB/RoCE v1`` or ``RoCE v2``."""
    interface: str | None = None
    ipv4: str | None = None

    @property
    def link_local(self) -> bool:
        """An fe80:: address: valid on its own link only, never routed."""
        return ipaddress.IPv6Address(self.value).is_link_local

    @property
    def routed(self) -> bool:
        """A RoCE v2 address that routers forward."""
        return "v2" in self.kind and not self.link_local


@dataclass(frozen=True, kw_only=True)
class HcaPort(_Evidence):
    """One port of an RDMA adapter."""

    number: int
    state: str
    """``ACTIVE``, ``DOWN``, ``INIT``, ...; ``UNKNOWN`` if it cannot be read."""
    link_layer: str
    """``InfiniBand`` or ``Ethernet`` (RoCE); what sysfs says otherwise."""
    rate_gbps: float | None = None
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hca(_Evidence):
    """One RDMA adapter."""

    name: str
    driver: str | None = None
    """Kernel driver: ``mlx5_core``, ``efa``, ..."""
    path: tuple[str, ...] | None = None
    """As ``Gpu.path``."""
    ports: tuple[HcaPort, ...] = ()
    verbs_device: bool | None = None
    """Whether this process may open its /dev/infiniband/uverbs file; None = unknown."""

    def port(self, number: int) -> HcaPort | None:
        """The port of that number (from 1), or None."""
        return next((port for port in self.ports if port.number == number), None)


@dataclass(frozen=True, kw_only=True)
class Interface(_Evidence):
    """One network interface of this process's network namespace."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 addresses first, in the kernel's order."""
    up: bool = True


@dataclass(frozen=True, kw_only=True)
class Endpoint(_Evidence):
    """The description of one process that it publishes to its group. Sizes are in bytes."""

    name: str = ""
    hostname: str
    pid: int
    boot_id: str
    """The kernel's boot id; empty if it cannot be read, and then no two processes count as co-hosted."""
    namespaces: dict[str, str]
    """Kind (pid, net, ipc, mnt, user) -> inode."""
    uid: int
    node_ip: str
    """The node's address in Ray."""
    interfaces: tuple[Interface, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    """Empty for an actor that asked Ray for no GPU, even if it could see some."""
    hcas: tuple[Hca, ...] = ()
    """In the order libibverbs usually lists them; TensorPipe's ibv transport opens the first one."""
    peer_memory: bool = False
    """The kernel lets network adapters access GPU memory (nvidia-peermem is registered)."""
    memlock_bytes: int | None = None
    """Bytes that RDMA may lock; None = unlimited."""
    shm_free_bytes: int = 0
    huge_pages: Literal["used", "unused", "forbidden"] | None = None
    """Whether torch allocates a large CPU tensor in huge pages, found by a trial; ``forbidden`` if the kernel gives
    huge pages to no process. None = unknown."""
    torch_version: str
    cuda_version: str | None = None
    python_version: str = ""
    tensorpipe_transports: tuple[str, ...] = ()
    tensorpipe_channels: tuple[str, ...] = ()
    nixl: bool = False
    """NIXL is installed, for the CUDA release of this torch build."""
    lanes: dict[str, str] = field(default_factory=dict)
    """Of the lanes of other distributions that the group asks for, those installed here: name -> distribution, with
    its version."""
    wants_gpu: bool = False
    """The actor asked Ray for a GPU, or a fraction of one."""

    def same_host(self, other: Endpoint) -> bool:
        """Whether one kernel runs both. Host names are never compared: clones and containers share them."""
        return bool(self.boot_id) and self.boot_id == other.boot_id

    def shares(self, other: Endpoint, *kinds: str) -> bool:
        """Whether both are on one host and in the same namespace of every given kind."""
        return self.same_host(other) and all(
            kind in self.namespaces and self.namespaces[kind] == other.namespaces.get(kind) for kind in kinds
        )

    def same_network(self, other: Endpoint) -> bool:
        """Whether both have the same network interfaces, including loopback."""
        return self.shares(other, "net")

    def interface_of(self, address: str) -> str | None:
        """The interface that holds ``address`` (the Ray node's); None if no interface of this process does.

        Returns loopback only for a loopback address. Only addresses are compared, so a host name that resolves to
        127.0.x.x has no effect.
        """
        for interface in self.interfaces:
            if address in interface.addresses:
                return interface.name
        return "lo" if is_loopback(address) else None

    def key(self) -> Hashable:
        """Equal for equal endpoints, and hashable."""
        values = (getattr(self, name) for name in _FIELDS)
        return tuple(frozenset(value.items()) if isinstance(value, dict) else value for value in values)


def is_loopback(address: str) -> bool:
    """Whether it is an address of loopback, with or without an interface (``::1%lo``)."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


_FIELDS = tuple(each.name for each in fields(Endpoint))
#: Fields that no lane's rule reads, with a value that stands for all.
OWN = {"name": "", "pid": 0, "shm_free_bytes": 0}


def kinds_of(
    endpoints: Mapping[str, Endpoint], apart: Collection[str] = ()
) -> dict[Hashable, tuple[Endpoint, list[str]]]:
    """Group members that publish the same but for ``OWN``: what they have in common, and their names.

    ``apart``: members whose pid counts too.
    """
    kinds: dict[Hashable, tuple[Endpoint, list[str]]] = {}
    for name, endpoint in endpoints.items():
        common = endpoint.changed(OWN | {"pid": endpoint.pid} if name in apart else OWN)
        kinds.setdefault(common.key(), (common, []))[1].append(name)
    return kinds
