"""Readers of /proc and /sys. None of them raises if something is missing.

Every function takes a path or ``root``, so that it also reads a copy of a machine's files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

NAMESPACES = ("pid", "net", "ipc", "mnt", "user")

_CAP_IPC_LOCK = 14
_EVERY_UID = 4294967295


def read(path: Path) -> str | None:
    """The file's text without surrounding space, or None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def link_name(path: Path | str) -> str | None:
    """Last part of a symbolic link's target, or None if there is no such link."""
    try:
        return os.path.basename(os.readlink(path)) or None
    except OSError:
        return None


def listing(path: Path) -> list[str]:
    """Names in a directory, numbers in numeric order (mlx5_2 before mlx5_10); empty if there is none."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(names, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def namespaces(root: Path) -> dict[str, str]:
    """This process's namespaces, kind -> inode as the kernel prints it; without the unreadable ones."""
    inodes = {kind: link_name(f"{root}/proc/self/ns/{kind}") for kind in NAMESPACES}
    return {kind: inode for kind, inode in inodes.items() if inode}


def number(file: Path, name: str) -> int | None:
    """The first number behind ``name`` at the start of a line; None if there is none."""
    match = re.search(rf"^{name}\s*(\d+)", read(file) or "", re.MULTILINE)
    return int(match[1]) if match else None


def memlock_bytes(root: Path) -> int | None:
    """Bytes this process may lock, as RDMA registration counts them; None = no limit.

    The kernel lifts the limit for CAP_IPC_LOCK only if the process holds it in the first user namespace: a container's
    root in a user namespace of its own has the bit, and the limit still applies.
    """
    capabilities = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", read(root / "proc/self/status") or "", re.MULTILINE)
    uid_map = (read(root / "proc/self/uid_map") or "").split()
    if capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1 and uid_map == ["0", "0", str(_EVERY_UID)]:
        return None
    return number(root / "proc/self/limits", "Max locked memory")


def huge_pages(root: Path) -> tuple[str, int]:
    """The kernel's mode for transparent huge pages (always, madvise, never; empty if unknown), and their bytes."""
    home = root / "sys/kernel/mm/transparent_hugepage"
    mode = re.search(r"\[(\w+)\]", read(home / "enabled") or "")
    size = read(home / "hpage_pmd_size") or ""
    return mode[1] if mode else "", int(size) if size.isdigit() else 0


def device_path(device: Path) -> tuple[str, ...] | None:
    """The NUMA node of a PCI device, and the devices from its root to it; None = unknown."""
    path = os.path.realpath(device).partition("/sys/devices/")[2]
    return (f"NUMA node {read(device / 'numa_node')}", *path.split("/")) if path.startswith("pci") else None


def bar1_bytes(device: Path) -> int | None:
    """Size of a PCI device's second BAR (on NVIDIA GPUs the window onto device memory); None = unknown.

    A 64-bit BAR takes two lines of the file, the second one with zeros, so only non-zero lines count: the window is
    line 2 on an A100 and line 3 on an H200.
    """
    sizes = []
    for line in (read(device / "resource") or "").splitlines()[:6]:
        try:
            start, end, _flags = (int(part, 16) for part in line.split())
        except ValueError:
            return None
        if end > start:
            sizes.append(end - start + 1)
    return sizes[1] if len(sizes) > 1 else None
