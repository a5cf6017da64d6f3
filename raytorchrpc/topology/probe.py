"""Describes the process and its host: the evidence from which routes are planned.

``probe`` returns an ``Endpoint``, which is plain data: it pickles and travels through Ray, and all routes of a group
are computed from one set of endpoints. Functions import torch when they need it, so this module loads without it.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import platform
import re
import resource
import shutil
from contextlib import suppress
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any, Literal

from raytorchrpc._compat import nixl_package
from raytorchrpc.topology import sysfs
from raytorchrpc.topology.endpoint import Endpoint, Gid, Gpu, Hca, HcaPort, Interface

#: Every backend name TensorPipe has had, in the order it prefers them itself.
TENSORPIPE_TRANSPORTS = ("shm", "ibv", "uv")
TENSORPIPE_CHANNELS = ("cma", "mpt_uv", "basic", "cuda_xth", "cuda_ipc", "cuda_gdr", "cuda_basic")

_PEER_MEMORY_CLIENTS = ("nv_mem", "nv_mem_nc", "nvidia-peermem")

#: CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_DMA_BUF_SUPPORTED = 124

# GID tables have up to 256 slots, filled from the low end; each read is a query to the adapter.
_GID_SLOTS = 32

# More than glibc serves from memory that it kept (32 MiB), so these pages are new.
_TRIAL_BYTES = 64 << 20
# So many bytes of a quarter of a huge page are touched: in a huge page that takes one fault, in small pages or in the
# middle-sized ones of new kernels one for each.
_TOUCHED, _FEW_FAULTS = 8, 2


def probe(*, name: str = "", node_ip: str, wants_gpu: bool = True, root: Path = Path("/")) -> Endpoint:
    """Describe this process.

    Args:
        name: the member's name, if it has one already.
        node_ip: the address Ray gives for this node.
        wants_gpu: False for an actor that asked Ray for no GPU: CUDA is then never touched.
        root: the directory that contains /proc, /sys and /dev.

    Blocks for a few milliseconds; with GPUs, for as long as CUDA takes to initialise in this process.
    A missing or unreadable file leaves its field empty and raises nothing.
    """
    import torch

    transports, channels = tensorpipe_backends()
    gpus = torch.cuda.device_count() if wants_gpu and torch.cuda.is_available() else 0
    return Endpoint(
        **file_facts(root),
        name=name,
        pid=os.getpid(),
        node_ip=node_ip,
        interfaces=_interfaces(),
        gpus=tuple(_gpu(root, index) for index in range(gpus)),
        huge_pages=_huge_pages(root),
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda,
        python_version=platform.python_version(),
        tensorpipe_transports=transports,
        tensorpipe_channels=channels,
        nixl=nixl_package.nixl_package() is not None,
        wants_gpu=wants_gpu,
    )


def file_facts(root: Path) -> dict[str, Any]:
    """The fields of an ``Endpoint`` that are read in the same way from a machine and from a copy of its files."""
    clients, shm = f"{root}/sys/kernel/mm/memory_peers", 0
    with suppress(OSError):
        shm = shutil.disk_usage(root / "dev/shm").free
    return {
        "hostname": sysfs.read(root / "proc/sys/kernel/hostname") or "",
        "uid": sysfs.number(root / "proc/self/status", "Uid:") or 0,
        "memlock_bytes": sysfs.memlock_bytes(root),
        "boot_id": sysfs.read(root / "proc/sys/kernel/random/boot_id") or "",
        "namespaces": sysfs.namespaces(root),
        "hcas": tuple(_hca(root, hca) for hca in sysfs.listing(root / "sys/class/infiniband")),
        "peer_memory": any(os.path.exists(f"{clients}/{client}/version") for client in _PEER_MEMORY_CLIENTS),
        "shm_free_bytes": shm,
    }


def pci_facts(root: Path, address: str) -> dict[str, Any]:
    """The fields of a ``Gpu`` that are in the files of the PCI device at this address."""
    device = root / "sys/bus/pci/devices" / address
    return {
        "pci_bus_id": address,
        "path": sysfs.device_path(device),
        "bar1_bytes": sysfs.bar1_bytes(device),
        "resource1_present": (device / "resource1").exists() if device.exists() else None,
    }


@functools.lru_cache(maxsize=1)
def tensorpipe_backends() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The (transports, channels) of this torch build, in TensorPipe's own order; empty without torchrpc.

    torch checks each name against its registries and starts nothing.
    """
    from raytorchrpc._compat import torch_internals

    return (
        tuple(name for name in TENSORPIPE_TRANSPORTS if torch_internals.has_tensorpipe("transports", name)),
        tuple(name for name in TENSORPIPE_CHANNELS if torch_internals.has_tensorpipe("channels", name)),
    )


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    addresses: dict[str, list[str]] = {}
    for label, listed in psutil.net_if_addrs().items():
        known = addresses.setdefault(label.partition(":")[0], [])  # the label eth0:1 belongs to the interface eth0
        known += [each.address.partition("%")[0] for each in listed if each.family in (AF_INET, AF_INET6)]
    flags: dict[str, str] = {}
    with suppress(OSError):
        flags = {name: state.flags for name, state in psutil.net_if_stats().items()}
    return tuple(
        Interface(
            name=name,
            addresses=tuple(sorted(known, key=lambda address: ":" in address)),
            up="up" in flags.get(name, "up").split(","),
        )
        for name, known in addresses.items()
    )


def _huge_pages(root: Path) -> Literal["used", "unused", "forbidden"] | None:
    mode, size = sysfs.huge_pages(root)
    if mode == "never":
        return "forbidden"
    return _try_huge_pages(size) if mode and 0 < size <= _TRIAL_BYTES // 2 else None


@functools.cache
def _try_huge_pages(size: int) -> Literal["used", "unused"] | None:
    """Whether memory of tensors is in huge pages of this size. Once: torch reads its variable once, so the variable's
    present value may not be in effect.
    """
    import torch

    try:
        tensor = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device="cpu")
    except RuntimeError:  # no room for it
        return None
    start = tensor.data_ptr() + -tensor.data_ptr() % size
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for place in range(0, size // 4, size // 4 // _TOUCHED):
        ctypes.memset(start + place, 0, 1)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    if faults == 0:  # memory that was in use before, or a kernel that does not count
        return None
    return "used" if faults <= _FEW_FAULTS else "unused"


def _gpu(root: Path, index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    bdf = None
    # Older torch releases do not report the GPU's PCI address; its BAR1 size then stays unknown.
    bus, slot = getattr(properties, "pci_bus_id", None), getattr(properties, "pci_device_id", None)
    if bus is not None and slot is not None:
        bdf = f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{slot:02x}.0"
    return Gpu(
        index=index,
        uuid=str(getattr(properties, "uuid", "")),
        name=properties.name,
        memory_bytes=properties.total_memory,
        dma_buf=_dma_buf(index),
        **(pci_facts(root, bdf) if bdf else {}),
    )


def _dma_buf(index: int) -> bool | None:
    """Asks the CUDA driver, which torch has initialised."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, supported = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)):
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(supported), ctypes.c_int(_DMA_BUF_SUPPORTED), device):
        return None
    return bool(supported.value)


def _hca(root: Path, name: str) -> Hca:
    home = root / "sys/class/infiniband" / name
    ports = (_port(home / "ports" / n, int(n)) for n in sysfs.listing(home / "ports") if n.isdigit())
    verbs = [root / "dev/infiniband" / device for device in sysfs.listing(home / "device/infiniband_verbs")]
    return Hca(
        name=name,
        driver=sysfs.link_name(home / "device/driver"),
        path=sysfs.device_path(home / "device"),
        ports=tuple(ports),
        verbs_device=any(os.access(device, os.R_OK | os.W_OK) for device in verbs) if verbs else None,
    )


def _port(home: Path, number: int) -> HcaPort:
    # "4: ACTIVE" and "200 Gb/sec (4X HDR)"
    state = sysfs.read(home / "state") or "0: UNKNOWN"
    rate = re.match(r"[\d.]+", sysfs.read(home / "rate") or "")
    gids = (_gid(home, slot) for slot in range(_GID_SLOTS))
    return HcaPort(
        number=number,
        state=state.split(":", 1)[-1].strip(),
        link_layer=sysfs.read(home / "link_layer") or "InfiniBand",
        rate_gbps=float(rate[0]) if rate else None,
        gids=tuple(gid for gid in gids if gid),
    )


def _gid(home: Path, slot: int) -> Gid | None:
    value = sysfs.read(home / "gids" / str(slot))
    try:
        address = ipaddress.IPv6Address(value or "::")
    except ValueError:
        return None
    if address == ipaddress.IPv6Address("::"):  # an empty slot
        return None
    return Gid(
        index=slot,
        value=address.exploded,
        kind=sysfs.read(home / "gid_attrs/types" / str(slot)) or "IB/RoCE v1",
        interface=sysfs.read(home / "gid_attrs/ndevs" / str(slot)),
        ipv4=str(address.ipv4_mapped) if address.ipv4_mapped else None,
    )
