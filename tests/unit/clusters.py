"""Simulated clusters: the evidence that real machines publish, as plain data.

The eight-GPU node is a public one: its GPUs and its nine adapters are in ``data/``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raytorchrpc.topology.endpoint import Endpoint, Gid, Gpu, Hca, HcaPort, Interface

DATA = Path(__file__).parent / "data"
MIB = 1 << 20
GIB = 1 << 30

CPU_CHANNELS = ("cma", "mpt_uv", "basic")
CUDA_CHANNELS = (*CPU_CHANNELS, "cuda_xth", "cuda_ipc", "cuda_gdr", "cuda_basic")

Cluster = dict[str, Endpoint]
Hcas = tuple[Hca, ...]


def gid_table() -> dict[str, list[Gid]]:
    """The nine adapters' GID tables, adapter -> slots, as RoCE."""
    tables: dict[str, list[Gid]] = {}
    for line in (DATA / "show_gids_9hca.txt").read_text().splitlines()[2:]:
        device, _port, index, value, *ipv4, version, interface = line.split()
        tables.setdefault(device, []).append(
            Gid(
                index=int(index),
                value=value,
                kind={"v1": "IB/RoCE v1", "v2": "RoCE v2"}[version],
                interface=interface,
                ipv4=ipv4[0] if ipv4 else None,
            )
        )
    return tables


def roce_hcas() -> tuple[Hca, ...]:
    """The nine adapters as they are: RoCE, with a link-local v1 address at GID index 0."""
    return tuple(_hca(name, "Ethernet", tuple(gids)) for name, gids in gid_table().items())


def moved_roce_hcas(host: int) -> tuple[Hca, ...]:
    """They with the routed address at GID index 3 on host 0 and at 5 on host 1."""
    moved = roce_hcas()
    for hca in moved:
        gids = tuple(gid.changed({"index": gid.index + 2 * host}) for gid in hca.ports[0].gids)
        moved = with_port(moved, hca.name, gids=gids)
    return moved


def infiniband_hcas(subnet: str = "fe80:0000:0000:0000") -> tuple[Hca, ...]:
    """The same adapters on an InfiniBand fabric: one GID each, made of the subnet prefix and the port."""
    return tuple(
        _hca(name, "InfiniBand", (Gid(index=0, value=f"{subnet}:{gids[0].value[20:]}", kind="IB/RoCE v1"),))
        for name, gids in gid_table().items()
    )


def _hca(name: str, link_layer: str, gids: tuple[Gid, ...]) -> Hca:
    port = HcaPort(number=1, state="ACTIVE", link_layer=link_layer, rate_gbps=200.0, gids=gids)
    return Hca(name=name, driver="mlx5_core", ports=(port,), verbs_device=True)


def with_port(hcas: tuple[Hca, ...], name: str, **changes: Any) -> tuple[Hca, ...]:
    """The adapters with port 1 of one of them changed."""
    return tuple(hca.changed({"ports": (hca.ports[0].changed(changes),)}) if hca.name == name else hca for hca in hcas)


def efa_hcas() -> tuple[Hca, ...]:
    port = HcaPort(number=1, state="ACTIVE", link_layer="InfiniBand", rate_gbps=100.0)
    return (Hca(name="rdmap0s6", driver="efa", ports=(port,), verbs_device=True),)


def a100s(count: int = 8, *, host: int = 0) -> tuple[Gpu, ...]:
    """The public node's GPUs, with their BAR1 as above-4G decoding gives it."""
    lines = [line for line in (DATA / "gpus_8xa100.csv").read_text().splitlines() if not line.startswith("#")]
    return tuple(
        Gpu(
            index=int(row["index"]),
            uuid=f"{host:08x}-0000-0000-0000-{int(row['index']):012x}",
            name=row["name"],
            memory_bytes=int(row["memory_mib"]) * MIB,
            pci_bus_id=re.sub(r"^0000", "", row["pci_bus_id"]).lower(),
            bar1_bytes=128 * GIB,
            resource1_present=True,
        )
        for row in list(csv.DictReader(lines))[:count]
    )


def member(number: int = 0, *, host: int = 0, pod: int = 0, cuda: bool = False, **changes: Any) -> Endpoint:
    """One process. Members of one pod share every namespace; two pods of one host, only the kernel."""
    space = 4026530000 + 100 * pod
    fields: dict[str, Any] = {
        "name": f"worker_{number}",
        "hostname": "node",  # the same on purpose: nothing may rest on it
        "pid": 1000 + number,
        "boot_id": f"{host:08x}-1111-2222-3333-444444444444",
        "namespaces": {
            "pid": f"pid:[{space + 1}]",
            "net": f"net:[{space + 2}]",
            "ipc": f"ipc:[{space + 3}]",
            "mnt": f"mnt:[{space + 4}]",
            "user": "user:[4026531837]",
        },
        "uid": 1000,
        "node_ip": f"10.0.{host}.{pod + 1}",
        "interfaces": (
            Interface(name="lo", addresses=("127.0.0.1", "::1")),
            Interface(name="eth0", addresses=(f"10.0.{host}.{pod + 1}",)),
        ),
        "memlock_bytes": None,
        "shm_free_bytes": 64 * GIB,
        "torch_version": "2.13.0+cu130" if cuda else "2.13.0+cpu",
        "cuda_version": "13.0" if cuda else None,
        "python_version": "3.11.9",
        "tensorpipe_transports": ("shm", "ibv", "uv"),
        "tensorpipe_channels": CUDA_CHANNELS if cuda else CPU_CHANNELS,
        "wants_gpu": cuda,
        **changes,
    }
    return Endpoint(**fields)


def group(*members: Endpoint) -> Cluster:
    return {endpoint.name: endpoint for endpoint in members}


def slope(points: Mapping[int, float]) -> float:
    """Of the line through these points, both axes logarithmic: 1 where a figure is proportional to n."""
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def one_host(count: int = 2) -> Cluster:
    return group(*(member(n) for n in range(count)))


def one_host_two_gpus() -> Cluster:
    """Ray's default masking: each process sees its own GPU as index 0."""
    gpus = a100s(2)
    return group(*(member(n, cuda=True, gpus=(gpu.changed({"index": 0}),)) for n, gpu in enumerate(gpus)))


def two_hosts() -> Cluster:
    return group(member(0, host=0), member(1, host=1))


def hosts_of(hosts: int, per_host: int) -> Cluster:
    return group(*(member(n, host=n // per_host) for n in range(hosts * per_host)))


def two_pods_one_host(*, gpus: bool = True) -> Cluster:
    """Same boot id, own namespaces, equal pids, and each pod is given another GPU."""
    mine = a100s(2)
    return group(
        *(member(n, pod=n, pid=42, cuda=gpus, gpus=(mine[n].changed({"index": 0}),) if gpus else ()) for n in range(2))
    )


def public_nodes(hcas: Hcas | Callable[[int], Hcas] | None = None, **changes: Any) -> Cluster:
    """Two of the public eight-GPU nodes, one member on each; ``hcas``: adapters, or host number -> adapters."""
    own = infiniband_hcas() if hcas is None else hcas

    def node(host: int) -> Endpoint:
        adapters = own(host) if callable(own) else own
        fields = {"cuda": True, "gpus": a100s(host=host), "hcas": adapters, "peer_memory": True, **changes}
        return member(host, host=host, **fields)

    return group(node(0), node(1))


def gpus_with(**changes: Any) -> tuple[Gpu, ...]:
    """The GPUs of a public node, all changed."""
    return tuple(gpu.changed(changes) for gpu in a100s())


def with_nixl(cluster: Cluster) -> Cluster:
    return {name: each.changed({"nixl": True}) for name, each in cluster.items()}
