"""Says which faster lane members leave unused, why, and what to do: for the log, ``explain`` and the doctor. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes.registry import TRAFFIC_TEXT, Traffic
from raytorchrpc.lanes.torchrpc.backends import name_range
from raytorchrpc.routing.pairs import LaneChoice, PairRoute, forbidden
from raytorchrpc.topology import rdma
from raytorchrpc.topology.endpoint import Endpoint

#: By traffic, the lane for one host.
_MEMORY: dict[Traffic, str] = {"cpu": "shm", "cuda": "cuda_ipc"}
#: Lanes for other hosts, and the one of them that is preferred for CPU and CUDA tensors.
_FAR, _READS = ("nixl", "nccl"), "nixl"
#: One of these in how a lane carries tensors means RDMA.
_RDMA = ("RDMA", "ibv")


def between(config: GroupConfig, route: PairRoute, a: Endpoint, b: Endpoint) -> Iterator[str]:
    """What the two members of a route leave unused, without their names."""
    causes: dict[str, list[str]] = {}
    for used in [lanes[0] for traffic in _MEMORY if (lanes := route.lanes(traffic))]:
        why = _on_one_host(config, used, a, b) if a.same_host(b) else _by_network(config, route, used, a, b)
        if why:
            causes.setdefault(why, []).append(f"{TRAFFIC_TEXT[used.traffic]} go by {used.lane} ({used.how})")
    for why, slow in causes.items():
        yield f"{' and '.join(slow)}, though {why}"


def _on_one_host(config: GroupConfig, used: LaneChoice, a: Endpoint, b: Endpoint) -> str | None:
    memory = _MEMORY[used.traffic]
    may_map = a.shares(b, "pid", "user") and a.uid == b.uid
    if used.lane in _FAR and may_map and (why := forbidden(config, memory)):
        return f"both are on one host: {memory} is {why}; allow it there"
    return None


def _by_network(config: GroupConfig, route: PairRoute, used: LaneChoice, a: Endpoint, b: Endpoint) -> str | None:
    if any(word in used.how for word in _RDMA) or not (rdma.is_worth_using(a) and rdma.is_worth_using(b)):
        return None
    if config.tls or forbidden(config, _READS):
        return None
    why = rdma.nixl_obstacle(a, b, cuda=used.traffic == "cuda")
    why = why or next((no.reason for no in route.rejected if (no.lane, no.traffic) == (_READS, used.traffic)), None)
    return why and f"both have RDMA adapters: {why}"


def shared_adapters(config: GroupConfig, members: Mapping[str, Endpoint]) -> Iterator[str]:
    """Members of one host for which UCX chooses among adapters, in the same way for each. ``members``: all."""
    if len({end.boot_id for end in members.values()}) < 2 or forbidden(config, _READS):
        return
    by_gpu, hosts = config.near_adapters and _READS not in (config.lanes or ()), dict[tuple[str, int], list[str]]()
    for name, end in members.items():
        if end.nixl and len(ports := rdma.usable_ports(end)) > 1 and not (by_gpu and rdma.near_port(end)):
            hosts.setdefault((end.boot_id, len(ports)), []).append(name)
    for (_, number), names in hosts.items():
        if len(names) > 1:
            yield (
                f"{name_range(names)}: UCX chooses among {number} RDMA adapters, perhaps the same for each, as no GPU "
                f"has chosen one; set UCX_NET_DEVICES in each actor's runtime_env"
            )
