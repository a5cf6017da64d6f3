"""Decides whether TensorPipe, NCCL and UCX can use a member's RDMA adapters, and if not, why and what to do.

TensorPipe's ibv transport opens the first adapter of the list with port 1, GID index 0 and hop limit 1, and does not
check the port's state; its cuda_gdr channel does the same with the adapter nearest to each GPU. NCCL, and UCX in the
nixl lane, check every adapter and choose ports and GIDs by their state.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import TypeVar

from raytorchrpc.topology.endpoint import Endpoint, Gid, Hca, HcaPort

K = TypeVar("K")

MIB = 1 << 20
MIN_MEMLOCK_BYTES = 64 * MIB

_RDMA_ELSEWHERE = "NCCL has settings for this (NCCL_IB_HCA, NCCL_IB_GID_INDEX), TensorPipe has none"


def ibv_obstacles(members: Mapping[K, Endpoint]) -> dict[K, str | None]:
    """Why each member's agent must not open ibv; None where it may. Members that are alike may be given once.

    Any two agents that have ibv use it between them, so all of them must be able to reach each other by it.
    """
    verdicts = {name: _ibv_obstacle(endpoint) for name, endpoint in members.items()}
    able = {name: members[name] for name, obstacle in verdicts.items() if obstacle is None}
    hosts = {endpoint.boot_id for endpoint in able.values()}
    subnets = {_subnet(endpoint) for endpoint in able.values()} - {None}
    common = None
    if len({endpoint.boot_id for endpoint in members.values()}) < 2:
        common = "every member is on one host"
    elif len(hosts) < 2:
        common = "no member on another host can use its RDMA adapter"
    elif len(subnets) > 1:
        common = (
            f"the members' adapters are on different InfiniBand subnets ({', '.join(sorted(map(str, subnets)))}) and "
            f"TensorPipe's packets are not routed; {_RDMA_ELSEWHERE}"
        )
    return {name: common if name in able else obstacle for name, obstacle in verdicts.items()}


def _ibv_obstacle(endpoint: Endpoint) -> str | None:
    if "ibv" not in endpoint.tensorpipe_transports:
        return "this torch build does not have it"
    if not endpoint.hcas:
        return "no RDMA adapter"
    obstacle = tensorpipe_obstacle(endpoint.hcas[0])
    if obstacle:
        if len(endpoint.hcas) == 1:
            return obstacle
        return (
            f"{obstacle}. TensorPipe opens only the first of {len(endpoint.hcas)} adapters, {endpoint.hcas[0].name}: "
            f"let the container see only adapters that work, or use NCCL"
        )
    return _memlock_obstacle(endpoint)


def _memlock_obstacle(endpoint: Endpoint) -> str | None:
    if endpoint.memlock_bytes is None or endpoint.memlock_bytes >= MIN_MEMLOCK_BYTES:
        return None
    return (
        f"only {endpoint.memlock_bytes / MIB:.0f} MiB of memory may be locked, and RDMA locks its buffers; raise the "
        f"limit (ulimit -l unlimited, LimitMEMLOCK=infinity in the runtime: IPC_LOCK alone does nothing for a user "
        f"other than root)"
    )


def tensorpipe_obstacle(hca: Hca) -> str | None:
    """Why TensorPipe, which uses port 1, GID index 0 and hop limit 1 unchecked, cannot use this adapter."""
    if hca.driver == "efa":
        return f"{hca.name} is an EFA adapter, which looks like InfiniBand but fails in TensorPipe; use NCCL"
    if hca.verbs_device is False:
        return (
            f"{hca.name} has no /dev/infiniband/uverbs device that this process may open; give the container "
            f"the device (Kubernetes: ask for the RDMA device plugin's resource)"
        )
    port = hca.port(1)
    if port is None:
        return f"{hca.name} has no port 1"
    if port.state != "ACTIVE":
        return f"port 1 of {hca.name} is {port.state}; bring the link up"
    if port.link_layer == "InfiniBand":
        return None
    if port.link_layer != "Ethernet":
        return f"{hca.name} has link layer {port.link_layer}, neither InfiniBand nor RoCE"
    gid = next((gid for gid in port.gids if gid.index == 0), None)
    if gid is None:
        return f"{hca.name} (RoCE) has no GID at index 0, the only one TensorPipe uses; {_RDMA_ELSEWHERE}"
    kind = f"a link-local {gid.kind} address" if gid.link_local else f"a {gid.kind} address"
    # Hop limit 1 reaches the same Ethernet segment only, and endpoints do not tell segments apart.
    return (
        f"{hca.name} is RoCE and its GID index 0, the only one TensorPipe uses, is {kind} sent with hop "
        f"limit 1, so it is not routed; {_RDMA_ELSEWHERE}. If all members share one Ethernet segment, force "
        f"transports=('ibv', 'uv')"
    )


def _subnet(endpoint: Endpoint) -> str | None:
    """The InfiniBand subnet prefix of the port TensorPipe uses; None = unknown."""
    port = endpoint.hcas[0].port(1) if endpoint.hcas else None
    return next((_prefix(gid) for gid in port.gids if gid.index == 0), None) if port else None


def _prefix(gid: Gid) -> str:
    return str(ipaddress.IPv6Network((gid.value, 64), strict=False))


def networks(port: HcaPort) -> tuple[Gid, ...]:
    """A port's GIDs without what tells the ports of one network apart."""
    own = {"interface": None, "ipv4": None}
    return tuple(gid.changed({**own, "value": _prefix(gid).removesuffix("/64")}) for gid in port.gids)


def gpudirect_obstacle(endpoint: Endpoint, ibv: bool) -> str | None:
    """Why this agent must not open cuda_gdr; None if it may. ``ibv``: whether it opens ibv."""
    if not ibv:
        return "ibv is not used"
    if not endpoint.peer_memory:
        return "the kernel has no peer-memory client; load nvidia-peermem"
    for gpu in endpoint.gpus:
        if gpu.resource1_present is not True:
            return f"GPU {gpu.index} ({gpu.pci_bus_id}) has no resource1 file; TensorPipe crashes without it"
        if gpu.bar1_bytes is None or gpu.bar1_bytes < gpu.memory_bytes:
            size = "unknown" if gpu.bar1_bytes is None else f"{gpu.bar1_bytes / MIB:.0f} MiB"
            return (
                f"BAR1 of GPU {gpu.index} is {size}, smaller than its memory "
                f"({gpu.memory_bytes / MIB:.0f} MiB); turn on above-4G decoding / resizable BAR"
            )
    # cuda_gdr uses the adapter nearest to each GPU, so every adapter must work, not only the first.
    for hca in endpoint.hcas:
        obstacle = tensorpipe_obstacle(hca)
        if obstacle:
            return f"TensorPipe pairs each GPU with its nearest adapter, unchecked, and {obstacle}"
    return None


def nixl_backend(endpoint: Endpoint) -> str:
    """By what NIXL reaches other hosts: LIBFABRIC where there are EFA adapters and no others that work, else UCX."""
    has_efa = any(hca.driver == "efa" and hca.verbs_device is not False for hca in endpoint.hcas)
    return "LIBFABRIC" if has_efa and not usable_ports(endpoint) else "UCX"


def is_worth_using(endpoint: Endpoint) -> bool:
    """Whether a lane would use its adapters if they worked. In many clouds, the ordinary network card of a machine
    without GPUs is a RoCE adapter, too.
    """
    ports = [port for hca in endpoint.hcas if hca.driver != "efa" for port in hca.ports]
    by_kind = any(port.link_layer == "InfiniBand" for port in ports)
    return bool(endpoint.hcas) and bool(endpoint.gpus or endpoint.nixl or by_kind)


def nixl_obstacle(a: Endpoint, b: Endpoint, *, cuda: bool) -> str | None:
    """Why NIXL has no RDMA between two members on different hosts; None if it has. Symmetric in a and b."""
    backends = {nixl_backend(a), nixl_backend(b)}
    if len(backends) > 1:
        return "one has EFA adapters, by LIBFABRIC, and the other none"
    return ucx_obstacle(a, b, cuda=cuda, efa=backends == {"LIBFABRIC"})


def ucx_obstacle(a: Endpoint, b: Endpoint, *, cuda: bool, efa: bool = False) -> str | None:
    """Why UCX has no RDMA between two members on different hosts; None if it has. Symmetric in a and b.

    With ``cuda``, of GPU memory, for which NCCL (GPUDirect RDMA) has the same requirements. ``efa``: both use EFA.
    """
    obstacles = {end.name: obstacle for end in (a, b) if (obstacle := _rdma_alone(end, cuda, efa))}
    if len(obstacles) == 2 and len(set(obstacles.values())) == 1:
        return obstacles[a.name]  # without names, so that many pairs share one text
    if obstacles:
        return "; ".join(sorted(f"{name}: {obstacle}" for name, obstacle in obstacles.items()))
    if not efa and not _fabrics(a) & _fabrics(b):
        return "the two members have no adapters on one InfiniBand subnet or both RoCE"
    return None


def _rdma_alone(endpoint: Endpoint, cuda: bool, efa: bool) -> str | None:
    if not endpoint.hcas:
        return "no RDMA adapter"
    if not efa and not _fabrics(endpoint):
        return "no adapter has an active port that may be opened (EFA needs a plug-in, which cannot be detected)"
    if obstacle := _memlock_obstacle(endpoint):
        return obstacle
    if cuda and not endpoint.peer_memory and not all(gpu.dma_buf for gpu in endpoint.gpus):
        return "adapters cannot reach GPU memory; load nvidia-peermem, or use the open GPU driver (DMA-BUF)"
    return None


def _fabrics(endpoint: Endpoint) -> set[str]:
    """The networks of the usable ports: InfiniBand subnets, and "RoCE" (routed, so one for all)."""
    fabrics: set[str] = set()
    for _hca, port in usable_ports(endpoint):
        if port.link_layer == "InfiniBand":
            fabrics |= {_prefix(gid) for gid in port.gids[:1]}
        else:
            fabrics.add("RoCE")
    return fabrics


def usable_ports(endpoint: Endpoint) -> list[tuple[Hca, HcaPort]]:
    """The ports that NCCL and UCX can use: active, on an adapter that may be opened, on RoCE with a routed address."""
    return [(hca, port) for hca in endpoint.hcas for port in hca.ports if _is_usable(hca, port)]


def near_port(endpoint: Endpoint) -> tuple[Hca, HcaPort] | None:
    """The one of several usable, fast ports that is nearest to the member's GPU; of those that are equally near, one by
    the GPU's number on the bus. None if that is unknown, GPUs differ in it, or the ports are on several fabrics, so
    that a peer may not reach it.
    """
    ports = usable_ports(endpoint)
    fastest = max((port.rate_gbps or 0 for _, port in ports), default=0)
    ports = [(hca, port) for hca, port in ports if port.rate_gbps is None or port.rate_gbps * 2 >= fastest]
    chosen: list[tuple[Hca, HcaPort] | None] = []
    for gpu in endpoint.gpus if len(ports) > 1 and len(_fabrics(endpoint)) == 1 else ():
        depths = [_shared_depth(gpu.path or (), hca.path or ()) for hca, _ in ports]
        nearest = [port for port, depth in zip(ports, depths, strict=True) if depth == max(depths) > 0]
        bus = int((gpu.pci_bus_id or "0:0").split(":")[1], 16)
        chosen.append(nearest[bus % len(nearest)] if nearest else None)
    return chosen[0] if chosen and chosen.count(chosen[0]) == len(chosen) else None


def _shared_depth(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)


def _is_usable(hca: Hca, port: HcaPort) -> bool:
    if hca.driver == "efa" or hca.verbs_device is False or port.state != "ACTIVE":  # EFA needs a plug-in
        return False
    if port.link_layer == "Ethernet":
        return any(gid.routed for gid in port.gids)
    return port.link_layer == "InfiniBand"
