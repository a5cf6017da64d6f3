"""Decides which TensorPipe transports and channels each member's agent opens, from endpoints alone.

TensorPipe checks little before it uses a backend: it opens the first RDMA adapter whatever its state, and compares GPUs
across containers in a way that can abort the process. Backends belong to an agent, not to a pair, so an agent omits a
backend that would fail with any member it may connect to. That is always safe: two agents use what both have.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.topology import rdma
from raytorchrpc.topology.device_map import gpu_count
from raytorchrpc.topology.endpoint import Endpoint, is_loopback, kinds_of

SMALL_SHM_BYTES = 256 << 20

CHANNEL_REASONS = {
    "cma": "same host and container: one copy out of the other process's memory",
    "mpt_uv": "different networks: several TCP streams",
    "basic": "one stream over the transport",
    "cuda_ipc": "same host and container: copied from GPU to GPU",
    "cuda_gdr": "GPUDirect RDMA on both sides",
    "cuda_basic": "staged through CPU memory on both sides",
}

#: By Endpoint.huge_pages.
_SMALL_PAGES: dict[str | None, str] = {
    "forbidden": "its kernel forbids huge pages; write madvise to /sys/kernel/mm/transparent_hugepage/enabled there",
    "unused": "torch does not use huge pages in it; start the actor with runtime_env=raytorchrpc.runtime_env() "
    "(a driver: export THP_MEM_ALLOC_ENABLE=1 before it starts)",
}


@dataclass(frozen=True)
class AgentPlan:
    """The settings of one member's torchrpc agent. Both lists are in TensorPipe's order of preference."""

    interface: str | None
    """For TP_SOCKET_IFNAME; None if no interface of the member holds its node's address."""
    address: str
    transports: tuple[str, ...]
    channels: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """One line per backend: ``ibv: not used, no RDMA adapter``."""
    small_pages: str | None = None
    """Why large CPU tensors that arrive over torchrpc cost a page fault for each small page, and the remedy. None if
    they do not, or if it is unknown.
    """


Verdicts = dict[str, tuple[bool, str]]
#: By text: the names of all members that a warning concerns.
Warnings = defaultdict[str, list[str]]
#: How many members a note names at most.
_NAMED = 32


class _Kind(NamedTuple):
    """Members that publish the same, but for ``topology.endpoint.OWN``."""

    common: Endpoint
    endpoint: Endpoint
    """Of the first of them."""
    names: list[str]


def plan_agents(
    members: Mapping[str, Endpoint], config: GroupConfig
) -> tuple[list[tuple[Endpoint, AgentPlan, list[str]]], tuple[str, ...]]:
    """Plan the agents of all members, once for those that publish the same.

    Returns what each kind of members publishes but for ``topology.endpoint.OWN``, their AgentPlan and their names; and
    the group's warnings. ``members`` are by name, in rank order.
    """
    kinds = [_Kind(common, members[names[0]], names) for common, names in kinds_of(members, _twins(members)).values()]
    for kind in kinds:
        _check_forced(kind.endpoint, config)
    warnings: Warnings = defaultdict(list)
    ranks = {name: rank for rank, name in enumerate(members)}
    transports = _plan_transports(kinds, config, warnings)
    hosts: dict[str, list[_Kind]] = {}
    for kind in kinds:
        hosts.setdefault(kind.endpoint.boot_id, []).append(kind)
    agents = []
    for kind, offered in zip(kinds, transports, strict=True):
        # Those on its host, which are not known if the host is not.
        same_host = _Others(kind, hosts[kind.endpoint.boot_id] if kind.endpoint.boot_id else [], ranks)
        interface, address = _listener(kind, partial(_Others, kind, kinds, ranks), config, warnings)
        verdicts = _channels(kind, same_host, offered, warnings)
        opened, notes = _chosen(offered, config.transports)
        channels, more_notes = _chosen(verdicts, config.channels)
        small_pages = _SMALL_PAGES.get(kind.endpoint.huge_pages)
        agent = AgentPlan(interface, address, opened, channels, notes + more_notes, small_pages)
        agents.append((kind.common, agent, kind.names))
        if "shm" in opened and same_host.endpoints:
            _check_shm([members[name] for name in kind.names], warnings)
    texts = (f"{name_range(sorted(names, key=ranks.__getitem__))}: {text}" for text, names in warnings.items())
    return agents, tuple(texts)


class _Others:
    """The kinds of the other members, as those of one kind see them."""

    def __init__(self, me: _Kind, kinds: Sequence[_Kind], ranks: Mapping[str, int]) -> None:
        self._kinds = [kind for kind in kinds if kind is not me or len(me.names) > 1]
        self._ranks = ranks
        self.endpoints = [kind.endpoint for kind in self._kinds]

    def named(self, meant: Callable[[Endpoint], bool]) -> str:
        """The names of those members for which this holds."""
        groups = [kind.names for kind in self._kinds if meant(kind.endpoint)]
        names = list(itertools.islice(itertools.chain.from_iterable(groups), _NAMED))
        more = sum(map(len, groups)) - len(names)
        return name_range(sorted(names, key=self._ranks.__getitem__)) + (f" and {more} more" if more else "")


def _twins(members: Mapping[str, Endpoint]) -> set[str]:
    """Members that have the same pid as one in another container of their host."""
    members_by_pid: dict[tuple[str, int], dict[str | None, list[str]]] = {}
    for name, endpoint in members.items():
        if endpoint.boot_id:
            same = members_by_pid.setdefault((endpoint.boot_id, endpoint.pid), {})
            same.setdefault(endpoint.namespaces.get("pid"), []).append(name)
    return {
        name
        for same in members_by_pid.values()
        if len(same) > 1 or None in same
        for names in same.values()
        for name in names
    }


def transport_between(a: Endpoint, b: Endpoint, plan_a: AgentPlan, plan_b: AgentPlan) -> str | None:
    """Return the transport that TensorPipe selects between the two, or None."""
    for name in plan_a.transports:
        if name in plan_b.transports and (name != "shm" or a.shares(b, "net", "ipc", "mnt")):
            return name
    return None


def channel_between(a: Endpoint, b: Endpoint, plan_a: AgentPlan, plan_b: AgentPlan, *, cuda: bool) -> str | None:
    """Return the channel that TensorPipe selects for CPU or CUDA tensors between the two, or None."""
    usable = {
        "cma": _may_read_memory(a, b),
        "cuda_ipc": a.same_host(b),
        "cuda_xth": False,  # threads of one process only
    }
    for name in plan_a.channels:
        if name.startswith("cuda_") is cuda and name in plan_b.channels and usable.get(name, True):
            return name
    return None


def _chosen(verdicts: Verdicts, forced: tuple[str, ...] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The backends that an agent opens, and a note on each."""
    if forced is not None:
        return forced, (f"{', '.join(forced)}: forced by the configuration",)
    notes = tuple(f"{name}: {'used' if use else 'not used'}, {why}" for name, (use, why) in verdicts.items())
    return tuple(name for name, (use, _) in verdicts.items() if use), notes


# -- transports ---------------------------------------------------------------------------------------------


def _plan_transports(kinds: Sequence[_Kind], config: GroupConfig, warnings: Warnings) -> list[Verdicts]:
    ibv = rdma.ibv_obstacles(dict(enumerate(kind.endpoint for kind in kinds)))
    hosts = {kind.endpoint.boot_id for kind in kinds}
    several_hosts = len(hosts) > 1 or ("" in hosts and sum(len(kind.names) for kind in kinds) > 1)
    plans: list[Verdicts] = []
    for number, kind in enumerate(kinds):
        obstacle = ibv[number]
        if kind.endpoint.hcas and obstacle and several_hosts:
            if config.transports is None:
                warnings[f"RDMA is not used by torchrpc, TCP is: {obstacle}"] += kind.names
            elif "ibv" in config.transports:
                warnings[f"transport ibv is forced, though it may fail: {obstacle}"] += kind.names
        plans.append(
            {
                "ibv": (obstacle is None, obstacle or "RDMA between hosts (its thread keeps one core busy)"),
                "shm": (False, "keeps half a core busy when idle and fails beyond 18 processes on a host"),
                "uv": (True, "TCP, reaches every member"),
            }
        )
    return plans


# -- channels -----------------------------------------------------------------------------------------------


def _channels(kind: _Kind, same_host: _Others, transports: Verdicts, warnings: Warnings) -> Verdicts:
    ibv = transports["ibv"][0]
    # TensorPipe prefers mpt_uv to basic; with it, CPU tensors would leave RDMA for TCP. Without RDMA an agent has it
    # also if all members share one network: cma takes precedence there, and the next group may need it.
    leaves_rdma = "basic takes CPU tensors over RDMA, mpt_uv would take them over TCP"
    obstacles = {
        "cma": _cma_obstacle(kind, same_host, warnings),
        "mpt_uv": leaves_rdma if ibv else None,
        "basic": None,
        **_cuda_obstacles(kind, same_host, ibv, warnings),
    }
    reasons = {**CHANNEL_REASONS, "cuda_xth": "within one process"}
    return {
        name: (obstacle is None, obstacle or reasons[name])
        for name, obstacle in obstacles.items()
        if name in kind.endpoint.tensorpipe_channels
    }


def _may_read_memory(a: Endpoint, b: Endpoint) -> bool:
    """Whether the kernel lets either process read the other's memory, as far as known."""
    return a.shares(b, "pid", "user") and a.uid == b.uid


def _cma_obstacle(kind: _Kind, same_host: _Others, warnings: Warnings) -> str | None:
    # Also without another member on this host: the agent outlives the group, and the next one may have some.
    apart = same_host.named(lambda other: not _may_read_memory(kind.endpoint, other))
    if not apart:
        return None
    text = (
        "members on one host are in different containers or run as different users, so CPU tensors between "
        "them go through the network; put them in one container, as one user"
    )
    warnings[text] += kind.names
    return f"{apart} on this host differs in pid namespace, user namespace or uid"


def _cuda_obstacles(kind: _Kind, same_host: _Others, ibv: bool, warnings: Warnings) -> dict[str, str | None]:
    endpoint = kind.endpoint
    if gpu_count(endpoint) == 0:
        # Even with no device to serve, these channels initialise CUDA and can abort.
        return dict.fromkeys(("cuda_xth", "cuda_ipc", "cuda_gdr", "cuda_basic"), "this member has no GPU")
    gdr = rdma.gpudirect_obstacle(endpoint, ibv)
    if gdr and ibv:
        warnings[f"GPUDirect RDMA is off, CUDA tensors are staged through CPU memory: {gdr}"] += kind.names
    twins = same_host.named(lambda other: other.pid == endpoint.pid and not endpoint.shares(other, "pid"))
    return {
        "cuda_xth": f"{twins} in another container has the same pid" if twins else None,
        "cuda_ipc": _cuda_ipc_obstacle(kind, same_host, warnings),
        "cuda_gdr": gdr,
        "cuda_basic": None,
    }


def _cuda_ipc_obstacle(kind: _Kind, same_host: _Others, warnings: Warnings) -> str | None:
    # Only agents that both have the channel compare GPUs, and those without a GPU never have it.
    peers = [other for other in same_host.endpoints if gpu_count(other)]
    if not peers:
        return "no other member on this host has a GPU"
    apart = same_host.named(lambda other: gpu_count(other) > 0 and not kind.endpoint.shares(other, "pid", "mnt"))
    if apart:
        text = (
            "members with GPUs on one host are in different containers, where TensorPipe's GPU-to-GPU copies can abort "
            "the process; CUDA tensors are staged through CPU memory instead; put them in one container"
        )
        warnings[text] += kind.names
        return f"{apart} on this host is in another container: TensorPipe can abort there"
    for owner in (kind.endpoint, *peers):
        if any(" MIG " in gpu.name for gpu in owner.gpus):
            return f"{owner.name} has a MIG slice, which TensorPipe cannot find by its UUID"
    return None


# -- the rest -----------------------------------------------------------------------------------------------


def _check_forced(endpoint: Endpoint, config: GroupConfig) -> None:
    build = f"the torch build of {endpoint.name} ({endpoint.torch_version})"
    if "uv" not in endpoint.tensorpipe_transports:
        raise ConfigurationError(f"{build} has no torchrpc (TensorPipe) support")
    for kind, forced, offered in (
        ("transports", config.transports, endpoint.tensorpipe_transports),
        ("channels", config.channels, endpoint.tensorpipe_channels),
    ):
        for name in forced or ():
            if name not in offered:
                raise ConfigurationError(f"{kind}: {build} has no {name!r}; it has: {', '.join(offered)}")
        if forced is not None and not forced:
            raise ConfigurationError(f"{kind} is empty; {build} has: {', '.join(offered)}")


def _listener(
    kind: _Kind, others: Callable[[], _Others], config: GroupConfig, warnings: Warnings
) -> tuple[str | None, str]:
    """The interface and address torchrpc listens on."""
    endpoint = kind.endpoint
    if config.interface is not None:
        name, address = config.interface, address_on(endpoint, config.interface)
    else:
        name, address = endpoint.interface_of(endpoint.node_ip) or "", endpoint.node_ip
    if not name:
        text = (
            "no interface holds the Ray node's address, so torchrpc listens where the host name points; name one with "
            "GroupConfig(interface=...)"
        )
        warnings[text] += kind.names
    far = others().named(lambda other: not endpoint.same_network(other)) if is_loopback(address) else ""
    if far:
        raise ConfigurationError(
            f"{endpoint.name} would listen on {address} ({name}), where {far} cannot reach it; "
            f"start Ray with --node-ip-address, or name an interface with GroupConfig(interface=...)"
        )
    return name or None, address


def address_on(endpoint: Endpoint, name: str) -> str:
    """The address of a process on that interface. Raises ConfigurationError if it has none there."""
    chosen = next((i for i in endpoint.interfaces if i.name == name), None)
    if chosen is None:
        problem = "has no such interface"
    elif not chosen.up:
        problem = "has it, but it is down"
    elif not chosen.addresses:
        problem = "has it, but without an address"
    else:
        return endpoint.node_ip if endpoint.node_ip in chosen.addresses else chosen.addresses[0]
    usable = ", ".join(i.name for i in endpoint.interfaces if i.up and i.addresses) or "none"
    raise ConfigurationError(f"interface={name!r}: {endpoint.name} {problem}; usable there: {usable}")


def _check_shm(endpoints: Sequence[Endpoint], warnings: Warnings) -> None:
    text = (
        f"TensorPipe's shm transport lives in /dev/shm, which has less than {SMALL_SHM_BYTES >> 20} MiB free; "
        f"mount a larger one (Docker: --shm-size, Kubernetes: an emptyDir with medium: Memory)"
    )
    if small := [endpoint.name for endpoint in endpoints if endpoint.shm_free_bytes < SMALL_SHM_BYTES]:
        warnings[text] += small


def name_range(names: Iterable[str]) -> str:
    """Join names, with runs of three or more consecutive ones shortened: ``worker_0..worker_3, learner``."""
    runs: list[list[str]] = []
    previous: tuple[str, int] | None = None
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        current = (match[1], int(match[2])) if match else None
        if current and previous and current == (previous[0], previous[1] + 1):
            runs[-1].append(name)
        else:
            runs.append([name])
        previous = current
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)
