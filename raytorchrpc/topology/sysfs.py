"""Readers of /proc, /sys and the kernel's interface table. None of them raises if something is missing.

Every function that reads files takes ``root``, so that a test can pass a directory of its own.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import re
import resource
import socket
import struct
from pathlib import Path

NAMESPACES = ("pid", "net", "ipc", "mnt", "user")

_SIOCGIFCONF = 0x8912
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1
_IFREQ_BYTES = 40  # struct ifreq on 64-bit Linux
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


def memlock_bytes(root: Path) -> int | None:
    """Bytes this process may lock, as RDMA registration counts them; None = no limit.

    The kernel lifts the limit for CAP_IPC_LOCK only if the process holds it in the first user namespace: a container's
    root in a user namespace of its own has the bit, and the limit still applies.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or may_lock_all(root):
        return None
    return soft


def may_lock_all(root: Path) -> bool:
    """Whether the process has CAP_IPC_LOCK in the first user namespace."""
    status = read(root / "proc/self/status") or ""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    uid_map = (read(root / "proc/self/uid_map") or "").split()
    return bool(match and int(match[1], 16) >> _CAP_IPC_LOCK & 1 and uid_map == ["0", "0", str(_EVERY_UID)])


def shm_free_bytes(root: Path) -> int:
    """Free bytes of /dev/shm; 0 if there is none."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


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


def bar1_bytes(root: Path, bdf: str) -> int | None:
    """Size of a PCI device's second BAR (on NVIDIA GPUs the window onto device memory); None = unknown.

    A 64-bit BAR takes two lines of the file, the second one with zeros, so only non-zero lines count: the window is
    line 2 on an A100 and line 3 on an H200.
    """
    sizes = []
    for line in (read(root / "sys/bus/pci/devices" / bdf / "resource") or "").splitlines()[:6]:
        try:
            start, end, _flags = (int(part, 16) for part in line.split())
        except ValueError:
            return None
        if end > start:
            sizes.append(end - start + 1)
    return sizes[1] if len(sizes) > 1 else None


def ipv4_addresses() -> list[tuple[str, str]]:
    """(interface, address) for every IPv4 address of this network namespace, including secondary ones."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        room = 64
        while True:
            buffer = array.array("B", bytes(room * _IFREQ_BYTES))
            request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request)
            except OSError:
                return []
            used = struct.unpack("iL", answer)[0]
            if used < len(buffer):
                break
            room *= 2  # the kernel silently truncates the list to what fits
    pairs = []
    for start in range(0, used, _IFREQ_BYTES):
        entry = buffer[start : start + _IFREQ_BYTES].tobytes()
        label = entry[:16].split(b"\0", 1)[0].decode(errors="replace")
        # An address label such as eth0:1 belongs to the interface eth0.
        pairs.append((label.split(":", 1)[0], socket.inet_ntoa(entry[20:24])))
    return pairs


def ipv6_addresses(root: Path) -> list[tuple[str, str]]:
    """(interface, address) for every IPv6 address, from /proc/net/if_inet6."""
    pairs = []
    for line in (read(root / "proc/net/if_inet6") or "").splitlines():
        fields = line.split()
        if len(fields) == 6 and len(fields[0]) == 32:
            pairs.append((fields[5], str(ipaddress.IPv6Address(int(fields[0], 16)))))
    return pairs


def interfaces_up() -> dict[str, bool]:
    """Every interface of this network namespace and whether it is administratively up."""
    states: dict[str, bool] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            names = [name for _, name in socket.if_nameindex()]
        except OSError:
            return {}
        for name in names:
            try:
                request = struct.pack("16sH22x", name.encode(), 0)
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
            except OSError:  # gone since it was listed
                continue
            states[name] = bool(struct.unpack("16sH22x", answer)[1] & _IFF_UP)
    return states
