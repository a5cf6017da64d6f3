"""Trees of /proc, /sys and /dev: the public eight-GPU node with its nine adapters, and a laptop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytorchrpc.topology.endpoint import Gpu
from tests.unit.clusters import a100s, gid_table

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024"
NO_ADDRESS = "0000:0000:0000:0000:0000:0000:0000:0000"
HEALTHY_ENVIRONMENT = {"IBV_FORK_SAFE": "1", "RDMAV_FORK_SAFE": "1", "HOME": "/root"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


class Tree:
    """One machine's files. Every method writes what a machine of that kind would show."""

    def __init__(self, root: Path) -> None:
        self.root = root
        write(root / "proc/sys/kernel/random/boot_id", "0b00710d-aaaa-bbbb-cccc-dddddddddddd")
        write(root / "proc/sys/kernel/hostname", "node-7")
        write(root / "proc/self/uid_map", "0 0 4294967295")
        for kind in ("pid", "net", "ipc", "mnt", "user"):
            link(root / "proc/self/ns" / kind, f"{kind}:[40265318{len(kind)}]")
        (root / "sys/class/net").mkdir(parents=True)
        self.kernel("5.4.0-150-generic")
        self.process()
        self.environment({})
        self.said: dict[str, Any] = {}
        self.say(endpoint={"node_ip": "10.0.60.3"}, own_addresses=["10.0.60.3"])
        self.say(shm_total_bytes=64 << 30)
        self.say(endpoint={"shm_free_bytes": 60 << 30})

    def kernel(self, release: str) -> None:
        write(self.root / "proc/sys/kernel/osrelease", release)

    def process(self, *, uid: int = 0, ipc_lock: bool = True, memlock: str = "unlimited") -> None:
        capabilities = "000001ffffffffff" if ipc_lock else "0000000000000000"
        write(
            self.root / "proc/self/status", f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}"
        )
        limit = f"Max locked memory         {memlock:<20} {memlock:<20} bytes"
        write(self.root / "proc/self/limits", f"Limit                     Soft Limit           Hard Limit\n{limit}")

    def environment(self, variables: dict[str, str]) -> None:
        text = "".join(f"{name}={value}\0" for name, value in variables.items())
        (self.root / "proc/self/environ").write_text(text)

    def say(self, **fields: Any) -> None:
        """What only a running process could tell."""
        endpoint = self.said.get("endpoint", {}) | fields.pop("endpoint", {})
        self.said |= fields | {"endpoint": endpoint}
        write(self.root / "evidence.json", json.dumps(self.said))

    def interface(self, name: str, state: str = "up") -> None:
        write(self.root / "sys/class/net" / name / "operstate", state)

    def driver(self, version: str = OPEN_DRIVER) -> None:
        write(self.root / "proc/driver/nvidia/version", version)

    def gpu(self, gpu: Gpu, *, bar1_gib: float = 128, given: bool = True) -> None:
        """``given``: to this container; its PCI device shows in any case."""
        index, address, name = gpu.index, gpu.pci_bus_id, gpu.name
        device = self.root / "sys/bus/pci/devices" / address
        write(device / "vendor", "0x10de")
        write(device / "class", "0x030200")
        start = 0x21000000000 + (index << 40)
        registers = "0x00000000c4000000 0x00000000c4ffffff 0x0000000000040200"
        window = f"{start:#018x} {start + int(bar1_gib * (1 << 30)) - 1:#018x} 0x000000000014220c"
        write(device / "resource", f"{registers}\n{window}")
        write(device / "resource1", "")
        if given:
            facts = f"Model: \t\t {name}\nIRQ:   \t\t 18\nGPU UUID: \t GPU-0000-{index}\nBus Location: \t {address}"
            write(self.root / "proc/driver/nvidia/gpus" / address / "information", facts)
            write(self.root / f"dev/nvidia{index}", "")

    def hca(self, name: str, *, driver: str = "mlx5_core", opened: bool = True) -> Path:
        """An adapter; returns the folder of its port 1, for ``port``."""
        home = self.root / "sys/class/infiniband" / name
        number = len(list(home.parent.glob("*")))
        link(home / "device/driver", f"../../../../bus/pci/drivers/{driver}")
        write(home / f"device/infiniband_verbs/uverbs{number}/dev", "231:0")
        if opened:
            write(self.root / f"dev/infiniband/uverbs{number}", "")
        return home / "ports/1"

    def port(
        self, port: Path, layer: str = "Ethernet", state: str = "4: ACTIVE", rate: str = "200 Gb/sec (4X HDR)"
    ) -> None:
        for file, text in (("link_layer", layer), ("state", state), ("rate", rate)):
            write(port / file, text)

    def gids(self, port: Path, gids: list[tuple[int, str, str, str | None]]) -> None:
        """(index, address, kind, interface); every other slot is empty, up to the 256 of mlx5."""
        for slot in range(16):
            write(port / "gids" / str(slot), NO_ADDRESS)
        for index, value, kind, interface in gids:
            write(port / "gids" / str(index), value)
            write(port / "gid_attrs/types" / str(index), kind)
            if interface:
                write(port / "gid_attrs/ndevs" / str(index), interface)

    def peer_memory(self) -> None:
        write(self.root / "sys/kernel/mm/memory_peers/nvidia-peermem/version", "1.3")

    def place(self, adapter: str) -> Path:
        """Port 1 of an adapter that is there."""
        return self.root / "sys/class/infiniband" / adapter / "ports/1"


def public_node(root: Path) -> Tree:
    """The node as published, in good order: RoCE, nine adapters, the first of them slow and for management."""
    tree = Tree(root)
    tree.environment(HEALTHY_ENVIRONMENT)
    tree.driver()
    for gpu in a100s():
        tree.gpu(gpu)
    for name, gids in gid_table().items():
        port = tree.hca(name)
        tree.port(port, rate="25 Gb/sec (1X EDR)" if name == "mlx5_0" else "200 Gb/sec (4X HDR)")
        tree.gids(port, [(gid.index, gid.value, gid.kind, gid.interface) for gid in gids])
        tree.interface(str(gids[0].interface))
    tree.peer_memory()
    return tree


def laptop(root: Path) -> Tree:
    """No GPU, no adapter, 8 MiB to lock, and Debian's own name."""
    tree = Tree(root)
    tree.process(uid=1000, ipc_lock=False, memlock="8388608")
    tree.environment({"HOME": "/home/me"})
    tree.interface("lo")
    tree.interface("wlan0")
    tree.say(own_addresses=["127.0.1.1"], endpoint={"node_ip": "127.0.0.1"})
    return tree
