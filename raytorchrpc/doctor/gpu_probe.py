"""Reads facts about GPUs from the driver's files, torch and NVML; nothing here raises for what is missing."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from raytorchrpc.doctor.evidence import GpuLink
from raytorchrpc.topology import sysfs
from raytorchrpc.topology.endpoint import Gpu

_NVIDIA = "0x10de"
#: PCI classes of displays and 3D controllers, without the programming interface.
_GPU_CLASSES = ("0x0300", "0x0302")
_MAX_NVLINKS = 18


@dataclass(frozen=True)
class Nvml:
    """NVML's answers."""

    state: Literal["used", "missing", "failed"] | None = None
    driver: str | None = None
    nvlinks: dict[str, dict[str, int]] = field(default_factory=dict)
    """By a GPU's UUID: PCI address of the other end, or ``switch`` -> number of active links."""


def driver(root: Path) -> str | None:
    """The loaded kernel driver's version, or None."""
    text = sysfs.read(root / "proc/driver/nvidia/version") or ""
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def on_the_bus(root: Path) -> tuple[str, ...]:
    """PCI addresses of NVIDIA GPUs, including those this process may not use."""
    home = root / "sys/bus/pci/devices"
    return tuple(
        address
        for address in sysfs.listing(home)
        if sysfs.read(home / address / "vendor") == _NVIDIA
        and (sysfs.read(home / address / "class") or "").startswith(_GPU_CLASSES)
    )


def from_files(root: Path) -> tuple[Gpu, ...]:
    """The GPUs in the driver's files; their memory size is taken from the model name, else 0."""
    home = root / "proc/driver/nvidia/gpus"
    # Only the open kernel modules share GPU memory as DMA-BUFs.
    is_open = "Open Kernel Module" in (sysfs.read(root / "proc/driver/nvidia/version") or "")
    gpus = []
    for index, address in enumerate(sysfs.listing(home)):
        text = sysfs.read(home / address / "information") or ""
        facts = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", text, re.MULTILINE))
        device = root / "sys/bus/pci/devices" / address
        size = re.search(r"(\d+)GB", facts.get("Model", ""))
        gpus.append(
            Gpu(
                index=index,
                uuid=facts.get("GPU UUID", ""),
                name=facts.get("Model", "NVIDIA GPU"),
                memory_bytes=int(size[1]) * 10**9 if size else 0,
                pci_bus_id=address,
                bar1_bytes=sysfs.bar1_bytes(root, address),
                resource1_present=(device / "resource1").exists() if device.exists() else None,
                dma_buf=is_open,
            )
        )
    return tuple(gpus)


def cuda_works() -> bool | None:
    """``torch.cuda.is_available()``; None if this build has no CUDA."""
    import torch

    return bool(torch.cuda.is_available()) if torch.version.cuda else None


def cuda_driver() -> str | None:
    """The newest CUDA release that the driver supports, or None without a driver. Initialises nothing."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) or not version.value:
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def links(gpus: tuple[Gpu, ...], nvml: Nvml) -> tuple[GpuLink, ...]:
    """The link of each pair of this process's GPUs."""
    import torch

    found = []
    for a, b in combinations(gpus, 2):
        active = nvml.nvlinks.get(a.uuid.removeprefix("GPU-"))
        count = None if active is None else active.get(b.pci_bus_id or "", 0) + active.get("switch", 0)
        directions = (a.index, b.index), (b.index, a.index)
        peer = all(torch.cuda.can_device_access_peer(*way) for way in directions)
        found.append(GpuLink(a=a.index, b=b.index, nvlinks=count, peer_access=peer))
    return tuple(found)


def ask_nvml() -> Nvml:
    """Query NVML through nvidia-ml-py, and shut it down again."""
    try:
        import pynvml
    except ImportError:
        return Nvml("missing")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or not in this container
        return Nvml("failed")
    try:
        version = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        nvlinks = {_text(pynvml.nvmlDeviceGetUUID(h)).removeprefix("GPU-"): _nvlinks(pynvml, h) for h in handles}
        return Nvml("used", version, nvlinks)
    except pynvml.NVMLError:
        return Nvml("failed")
    finally:
        pynvml.nvmlShutdown()


def _nvlinks(pynvml: Any, handle: Any) -> dict[str, int]:
    found: Counter[str] = Counter()
    for link in range(_MAX_NVLINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            remote = _text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower()
        except pynvml.NVMLError:  # fewer links than that, or a GPU without any
            continue
        domain, _, rest = remote.partition(":")
        try:
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            switch = kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        except (pynvml.NVMLError, AttributeError):
            switch = False
        found["switch" if switch else f"{domain[-4:]}:{rest}"] += 1
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
