"""Which lanes a plan gives each pair of members, and what it tells the user."""

from __future__ import annotations

import itertools
import pickle
import re
import time
from dataclasses import dataclass
from typing import Any

import pytest

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.lanes.registry import LANES, TRAFFIC, Traffic
from raytorchrpc.routing.pairs import PairRoute
from raytorchrpc.routing.planner import plan
from raytorchrpc.routing.routes import RoutePlan
from tests.unit import clusters
from tests.unit.clusters import (
    CPU_CHANNELS,
    MIB,
    Cluster,
    Hcas,
    a100s,
    efa_hcas,
    gpus_with,
    group,
    infiniband_hcas,
    member,
    public_nodes,
    roce_hcas,
    with_nixl,
    with_port,
)

#: The lanes between hosts or containers; likewise where NCCL has GPUDirect RDMA and torchrpc has not.
APART, BY_NCCL = "socket torchrpc torchrpc", "socket torchrpc nccl"
CUDA_LOCAL = ("basic", "cuda_xth", "cuda_basic")
DMA_BUF = gpus_with(dma_buf=True)


def down(adapters: Hcas, name: str) -> Hcas:
    return with_port(adapters, name, state="DOWN")


def neighbours(**changes: Any) -> Cluster:
    """Two members of one host with a GPU each; ``changes`` are worker_1's."""
    gpus = a100s(2)
    return group(member(0, cuda=True, gpus=(gpus[0],)), member(1, **{"cuda": True, "gpus": (gpus[1],), **changes}))


def changed(*kinds: str) -> dict[str, str]:
    """A member's namespaces, of which some are others."""
    return member().namespaces | {kind: f"{kind}:[1]" for kind in kinds}


def lane(route: PairRoute, traffic: Traffic) -> str:
    """The preferred lane; - if there is none."""
    lanes = route.lanes(traffic)
    return lanes[0].lane if lanes else "-"


def beside(routes: RoutePlan, name: str) -> str:
    """The tensor lanes that this member opens."""
    return " ".join(each.name for each in LANES if each.out_of_band and each.name in routes.lanes_of(name))


def by_torchrpc(route: PairRoute, traffic: Traffic) -> str | None:
    """How torchrpc carries it, preferred or not."""
    hows = (choice.how for choice in route.lanes(traffic) if choice.lane == "torchrpc")
    return next((how.removeprefix("torchrpc over ") for how in hows), None)


def why_not(route: PairRoute, name: str, traffic: str) -> str:
    """Why that lane does not carry it."""
    (reason,) = (no.reason for no in route.rejected if (no.lane, no.traffic) == (name, traffic))
    return reason


MIG = tuple(gpu.changed({"name": f"{gpu.name} MIG 1g.10gb"}) for gpu in a100s(2))
UNROUTED = {"gids": tuple(gid for gid in roce_hcas()[0].ports[0].gids if gid.link_local)}
GPUS = a100s(2)

CLUSTERS: dict[str, Cluster] = {
    # on one host
    "one host": clusters.one_host(),
    "neighbours": neighbours(),
    "one GPU": neighbours(gpus=GPUS[:1]),
    "unknown hosts": group(*(member(n, boot_id="") for n in range(2))),
    "two users": neighbours(uid=1001),
    "pid namespaces": neighbours(namespaces=changed("pid")),
    "user namespaces": neighbours(namespaces=changed("user")),
    "networks and files": group(member(0), member(1, namespaces=changed("net", "mnt", "ipc"))),
    "one has no GPU": neighbours(gpus=(), cuda=False),
    "one asked for no GPU": neighbours(wants_gpu=False),
    "MIG": neighbours(gpus=MIG),
    "MIG on one side": neighbours(gpus=MIG[1:]),
    "CPU build": neighbours(tensorpipe_channels=CPU_CHANNELS, cuda=False, wants_gpu=True),
    "two GPUs": clusters.one_host_two_gpus(),
    "two pods": clusters.two_pods_one_host(),
    # on two
    "two hosts": clusters.two_hosts(),
    "InfiniBand": public_nodes(),
    "InfiniBand, first down": public_nodes(down(infiniband_hcas(), "mlx5_0")),
    "InfiniBand, another down": public_nodes(down(infiniband_hcas(), "mlx5_5")),
    "small BAR1": public_nodes(gpus=gpus_with(bar1_bytes=256 * MIB)),
    "no resource1 file": public_nodes(gpus=gpus_with(resource1_present=False)),
    "no verbs devices": public_nodes(tuple(hca.changed({"verbs_device": False}) for hca in infiniband_hcas())),
    "InfiniBand, only one and down": public_nodes(down(infiniband_hcas()[:1], "mlx5_0")),
    "InfiniBand on one side": public_nodes(lambda host: (infiniband_hcas(), ())[host]),
    "InfiniBand, two subnets": public_nodes(lambda host: infiniband_hcas(f"fec0:0000:0000:000{host}")),
    "InfiniBand and RoCE": public_nodes(lambda host: (infiniband_hcas(), roce_hcas())[host]),
    "RoCE": public_nodes(roce_hcas()),
    "RoCE, first down": public_nodes(down(roce_hcas(), "mlx5_0")),
    "RoCE, another down": public_nodes(down(roce_hcas(), "mlx5_3")),
    "RoCE, unrouted": public_nodes(with_port(roce_hcas()[:1], "mlx5_0", **UNROUTED)),
    "EFA": public_nodes(efa_hcas()),
    "EFA on one side": public_nodes(lambda host: (efa_hcas(), infiniband_hcas())[host]),
    "no adapters": public_nodes(()),
    "8 MiB memlock": public_nodes(memlock_bytes=8 * MIB),
    "no GPUDirect": public_nodes(peer_memory=False),
    "DMA-BUF": public_nodes(peer_memory=False, gpus=DMA_BUF),
    "RoCE with DMA-BUF": public_nodes(roce_hcas(), peer_memory=False, gpus=DMA_BUF),
    "NIXL on one side": public_nodes() | {"worker_0": public_nodes()["worker_0"].changed({"nixl": True})},
}
CLUSTERS |= {f"{name} + nixl": with_nixl(cluster) for name, cluster in CLUSTERS.items()}


# --- whole clusters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What worker_0's agent and its pair with worker_1 must be. Notes and warnings are fragments.

    By default, as between hosts with GPUs that torchrpc connects by TCP.
    """

    lanes: str
    """The preferred ones for calls, CPU tensors and CUDA tensors."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    transports: tuple[str, ...] = ("uv",)
    channels: tuple[str, ...] = ("cma", "mpt_uv", *CUDA_LOCAL)
    calls: str = "tcp socket"
    """How the preferred lane carries them."""
    torchrpc: tuple[str | None, str | None] = ("uv, channel mpt_uv", "uv, channel cuda_basic")
    """How it carries CPU tensors and CUDA tensors, preferred or not."""


def rdma_case(lanes: str, notes: tuple[str, ...], warnings: tuple[str, ...] = (), gdr: bool = False) -> Case:
    """As between hosts that torchrpc connects by RDMA. ``gdr``: of GPU memory too."""
    channels = ("cma", "basic", "cuda_xth", "cuda_gdr", "cuda_basic") if gdr else ("cma", *CUDA_LOCAL)
    torchrpc = "ibv, channel basic", f"ibv, channel {'cuda_gdr' if gdr else 'cuda_basic'}"
    return Case(lanes, notes, warnings, ("ibv", "uv"), channels, torchrpc=torchrpc)


CASES = {
    "one host": Case(
        "socket shm -",
        ("shm: not used, keeps half a core busy", "mpt_uv: used, different networks"),
        channels=("cma", "mpt_uv", "basic"),
        calls="unix socket",
        torchrpc=(None, None),
    ),
    "two GPUs": Case(
        "socket shm cuda_ipc",
        ("cuda_gdr: not used, ibv is not used",),
        channels=("cma", "mpt_uv", "basic", "cuda_xth", "cuda_ipc", "cuda_basic"),
        calls="unix socket",
        torchrpc=(None, None),
    ),
    "two hosts": Case(
        "socket torchrpc -",
        ("ibv: not used, no RDMA adapter", "cma: used, same host and container"),
        channels=("cma", "mpt_uv", "basic"),
        torchrpc=("uv, channel mpt_uv", None),
    ),
    "two pods": Case(
        APART,
        (
            "cma: not used, worker_1 on this host differs in pid namespace",
            "cuda_ipc: not used, worker_1 on this host is in another container: TensorPipe can abort",
            "cuda_xth: not used, worker_1 in another container has the same pid",
        ),
        ("CPU tensors between them go through the network", "can abort the process"),
        channels=("mpt_uv", "basic", "cuda_basic"),
    ),
    "InfiniBand": rdma_case(
        APART,
        ("mpt_uv: not used, basic takes CPU tensors over RDMA", "ibv: used, RDMA between hosts"),
        gdr=True,
    ),
    "InfiniBand, first down": Case(
        BY_NCCL,
        ("ibv: not used, port 1 of mlx5_0 is DOWN; bring the link up. TensorPipe opens only the first of 9",),
        ("worker_0, worker_1: RDMA is not used by torchrpc, TCP is: port 1 of mlx5_0 is DOWN",),
    ),
    "InfiniBand, another down": rdma_case(
        BY_NCCL,
        ("cuda_gdr: not used, TensorPipe pairs each GPU with its nearest adapter, unchecked, and port 1",),
        ("GPUDirect RDMA is off, CUDA tensors are staged through CPU memory: TensorPipe pairs each GPU",),
    ),
    "RoCE": Case(
        BY_NCCL,
        ("ibv: not used, mlx5_0 is RoCE and its GID index 0, the only one TensorPipe uses, is a link-local",),
        ("NCCL_IB_GID_INDEX",),
    ),
    "no GPUDirect": rdma_case(
        APART,
        ("cuda_gdr: not used, the kernel has no peer-memory client; load nvidia-peermem",),
        ("GPUDirect RDMA is off, CUDA tensors are staged through CPU memory: the kernel has no peer-memory",),
    ),
    "small BAR1": rdma_case(
        BY_NCCL,
        ("cuda_gdr: not used, BAR1 of GPU 0 is 256 MiB, smaller than its memory (81251 MiB)",),
        ("BAR1 of GPU 0 is 256 MiB",),
    ),
    "no resource1 file": rdma_case(
        BY_NCCL,
        ("cuda_gdr: not used, GPU 0 (0000:53:00.0) has no resource1 file; TensorPipe crashes",),
        ("GPUDirect RDMA is off",),
    ),
    "EFA": Case(
        APART,
        ("ibv: not used, rdmap0s6 is an EFA adapter",),
        ("RDMA is not used by torchrpc, TCP is: rdmap0s6 is an EFA adapter, which looks like InfiniBand",),
    ),
    "8 MiB memlock": Case(
        APART,
        ("ibv: not used, only 8 MiB of memory may be locked",),
        ("LimitMEMLOCK=infinity",),
    ),
    "no verbs devices": Case(
        APART,
        ("ibv: not used, mlx5_0 has no /dev/infiniband/uverbs device",),
        ("ask for the RDMA device plugin's resource",),
    ),
    "InfiniBand, two subnets": Case(
        APART,
        ("ibv: not used, the members' adapters are on different InfiniBand subnets (fec0:0:0:1::/64,",),
        ("different InfiniBand subnets",),
    ),
    "InfiniBand and RoCE": Case(
        APART,
        ("ibv: not used, no member on another host can use its RDMA adapter",),
        ("worker_0: RDMA is not used by torchrpc", "worker_1: RDMA is not used by torchrpc, TCP is: mlx5_0 is RoCE"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cluster(name: str) -> None:
    case, routes = CASES[name], plan(CLUSTERS[name], GroupConfig())
    agent, route = routes.agents["worker_0"], routes.route("worker_0", "worker_1")
    assert (agent.transports, agent.channels) == (case.transports, case.channels)
    assert " ".join(lane(route, traffic) for traffic in TRAFFIC) == case.lanes
    assert route.lanes("calls")[0].how == case.calls
    assert (by_torchrpc(route, "cpu"), by_torchrpc(route, "cuda")) == case.torchrpc
    for fragment in case.notes:
        assert any(fragment in note for note in agent.notes), (fragment, agent.notes)
    for fragment in case.warnings:
        assert any(fragment in warning for warning in routes.warnings), (fragment, routes.warnings)
    assert bool(routes.warnings) is bool(case.warnings), routes.warnings


#: Two members with equal evidence, of whom a reason speaks by name.
ALIKE = group(member(0, cuda=True, gpus=GPUS[:1]), member(1), member(2))


@pytest.mark.parametrize("cluster", [*(CLUSTERS[name] for name in CASES), ALIKE], ids=[*CASES, "alike"])
def test_however_a_plan_is_made_it_is_the_same(cluster: Cluster) -> None:
    """In any order of members, and pair by pair."""
    config = GroupConfig()
    routes, backward = plan(cluster, config), plan(dict(reversed(cluster.items())), config)
    # No two members publish the same, so each pair is judged by itself.
    single = plan({name: each.changed({"python_version": name}) for name, each in cluster.items()}, config)
    assert routes.agents == backward.agents == single.agents
    for a, b in itertools.combinations(cluster, 2):
        route = routes.route(a, b)
        assert routes.route(b, a).choices is route.choices
        for other in (backward.route(b, a), single.route(a, b)):
            assert (route.choices, route.rejected) == (other.choices, other.rejected)


@pytest.mark.parametrize("cluster", [CLUSTERS[name] for name in CASES], ids=CASES)
def test_every_backend_left_out_says_why(cluster: Cluster) -> None:
    routes = plan(cluster, GroupConfig())
    for name, agent in routes.agents.items():
        for backend in (*cluster[name].tensorpipe_transports, *cluster[name].tensorpipe_channels):
            (note,) = (note for note in agent.notes if note.startswith(f"{backend}: "))
            used = backend in agent.transports + agent.channels
            assert note.startswith(f"{backend}: used, " if used else f"{backend}: not used, ")
            assert len(note.split(", ", 1)[1]) > 5
    for a, b in itertools.combinations(cluster, 2):
        route = routes.route(a, b)
        judged = [(one.lane, one.traffic) for one in (*route.choices, *route.rejected)]
        assert sorted(judged) == sorted((each.name, traffic) for each in LANES for traffic in each.carries)
        assert all(no.reason for no in route.rejected)
        assert all(choice.reason and choice.how for choice in route.choices)


# --- pairs ---------------------------------------------------------------------------------------------------


NCCL, NIXL = "socket shm nccl torchrpc", "socket nixl torchrpc"
EVERY = "socket shm cuda_ipc nixl torchrpc"
BOTH = "though both have RDMA adapters: "


@pytest.mark.parametrize(
    ("name", "lanes", "unused"),
    [
        ("neighbours + nixl", NIXL, ["shm is not among lanes=", "cuda_ipc is not among lanes="]),
        ("neighbours + nixl", EVERY, []),
        ("neighbours + nixl", "socket torchrpc", []),
        ("two pods + nixl", NIXL, []),  # the rule of each says why
        ("InfiniBand", "", []),
        ("InfiniBand + nixl", "", []),
        ("EFA + nixl", "", []),
        ("EFA", "", [BOTH + "NIXL is not installed"]),
        ("RoCE", "", [BOTH + "NIXL is not installed"]),  # CUDA tensors go by nccl
        ("8 MiB memlock + nixl", "", [BOTH + "only 8 MiB of memory may be locked"]),
        ("8 MiB memlock + nixl", NIXL, [BOTH + "only 8 MiB of memory may be locked"]),
        ("8 MiB memlock + nixl", "-nixl", []),
        ("InfiniBand and RoCE + nixl", "", [BOTH + "the two members have no adapters on one InfiniBand"]),
        ("InfiniBand on one side + nixl", "", []),
        ("two hosts", "", []),
    ],
)
def test_what_is_faster_and_not_used_is_told_with_its_cause(name: str, lanes: str, unused: list[str]) -> None:
    routes = plan(CLUSTERS[name], GroupConfig(lanes=tuple(lanes.split()) or None))
    assert len(routes.unused) == len(unused)
    for text, fragment in zip(sorted(routes.unused), unused, strict=True):
        assert text.startswith("between worker_0 and worker_1: ") and fragment in text
        assert text.partition(": ")[2] in routes.explain("worker_1", "worker_0")


READS, ANY_READS, GPUDIRECT = (
    "one-sided reads by RDMA",
    "one-sided reads over what UCX selects",
    "NCCL over GPUDirect RDMA",
)


def routes_of(pair: str, only: str) -> RoutePlan:
    """``only``: GroupConfig.lanes; empty: None."""
    return plan(CLUSTERS[pair], GroupConfig(lanes=tuple(only.split()) or None))


@pytest.mark.parametrize(
    ("pair", "only", "lanes", "opens"),
    [
        ("neighbours", "", "socket shm cuda_ipc", "shm cuda_ipc"),
        ("one GPU", "", "socket shm cuda_ipc", "shm cuda_ipc"),
        ("InfiniBand", "", APART, ""),
        ("unknown hosts", "", "socket torchrpc -", ""),
        ("two users", "", "socket socket socket", ""),
        ("pid namespaces", "", "socket socket socket", ""),
        ("user namespaces", "", "socket socket socket", ""),
        ("networks and files", "", "socket shm -", "shm"),
        ("one has no GPU", "", "socket shm -", "shm"),
        ("one asked for no GPU", "", "socket shm -", "shm"),
        ("MIG on one side", "", "socket shm socket", "shm"),
        # forced and forbidden
        ("neighbours", "-socket", "torchrpc torchrpc torchrpc", ""),
        ("neighbours", "torchrpc shm cuda_ipc", "torchrpc torchrpc torchrpc", ""),
        ("neighbours", "socket torchrpc", APART, ""),
        ("neighbours", "-shm -cuda_ipc", "socket socket socket", ""),
        ("neighbours", "-torchrpc", "socket shm cuda_ipc", "shm cuda_ipc"),
        ("one host", "torchrpc", "torchrpc torchrpc -", ""),
        ("one host", "socket shm", "socket shm -", "shm"),
        ("one host", "nng", "nng nng -", ""),
        ("one host", "-socket -torchrpc", "nng shm -", "shm"),
        ("one host", "socket", "socket socket -", ""),
        ("two hosts", "-torchrpc", "socket socket -", ""),
        # nccl
        *((pair, "", BY_NCCL, "nccl") for pair in ("DMA-BUF", "RoCE with DMA-BUF", "RoCE, first down")),
        ("two GPUs", NCCL, "socket shm nccl", "shm nccl"),
        ("InfiniBand", NCCL, BY_NCCL, "nccl"),
        ("no adapters", NCCL, BY_NCCL, "nccl"),
        ("two GPUs", f"cuda_ipc {NCCL}", "socket shm cuda_ipc", "shm cuda_ipc"),
        # nixl
        *((f"{pair} + nixl", "", "socket nixl nixl", "nixl") for pair in ("InfiniBand", "RoCE", "DMA-BUF")),
        ("InfiniBand, first down + nixl", "", "socket nixl nixl", "nixl"),
        ("RoCE, another down + nixl", "", "socket nixl nixl", "nixl"),
        ("neighbours + nixl", "", "socket shm cuda_ipc", "shm cuda_ipc"),
        ("neighbours + nixl", NIXL, "socket nixl nixl", "nixl"),
        ("neighbours + nixl", EVERY, "socket shm cuda_ipc", "shm cuda_ipc"),
        ("no GPUDirect + nixl", "", "socket nixl torchrpc", "nixl"),
        ("no GPUDirect + nixl", NIXL, "socket nixl nixl", "nixl"),
    ],
)
def test_the_lanes_that_a_pair_prefers_and_opens(pair: str, only: str, lanes: str, opens: str) -> None:
    routes = routes_of(pair, only)
    route = routes.route("worker_0", "worker_1")
    assert " ".join(lane(route, traffic) for traffic in TRAFFIC) == lanes
    assert beside(routes, "worker_0") == beside(routes, "worker_1") == opens


@pytest.mark.parametrize(
    ("pair", "only", "traffic", "how"),
    [
        ("two users", "", "calls", "unix socket"),
        ("pid namespaces", "", "calls", "unix socket"),
        ("networks and files", "", "calls", "tcp socket"),
        ("neighbours", "socket torchrpc", "cpu", "torchrpc over uv, channel cma"),
        ("two hosts", "-torchrpc", "cpu", "tcp socket"),
        ("two hosts", "nng", "cpu", "nng over tcp"),
        ("DMA-BUF", "", "cuda", GPUDIRECT),
        ("InfiniBand", NCCL, "cuda", GPUDIRECT),
        ("two GPUs", NCCL, "cuda", "NCCL within the host"),
        ("no adapters", NCCL, "cuda", "NCCL over the network"),
        ("InfiniBand + nixl", "", "cpu", READS),
        ("RoCE, another down + nixl", "", "cuda", READS),
        ("EFA + nixl", NIXL, "cpu", READS),
        ("no adapters + nixl", NIXL, "cpu", ANY_READS),
        ("InfiniBand on one side + nixl", NIXL, "cpu", ANY_READS),
        ("InfiniBand, only one and down + nixl", NIXL, "cpu", ANY_READS),
        ("InfiniBand, two subnets + nixl", NIXL, "cpu", ANY_READS),
        ("InfiniBand and RoCE + nixl", NIXL, "cpu", ANY_READS),
        ("8 MiB memlock + nixl", NIXL, "cpu", ANY_READS),
        ("two hosts + nixl", NIXL, "cpu", ANY_READS),
    ],
)
def test_how_the_preferred_lane_carries_it(pair: str, only: str, traffic: Traffic, how: str) -> None:
    assert routes_of(pair, only).route("worker_0", "worker_1").lanes(traffic)[0].how == how


SHARED = "shm cpu, cuda_ipc cuda"
BY_NIXL = "nixl cpu, nixl cuda"
NO_GPU = "worker_1 has no GPU; map it to 'cpu' with device_maps, or move the tensor to the CPU first"
ONE_HOST_ONLY = "same host: used only if GroupConfig.lanes names it"


@pytest.mark.parametrize(
    ("pair", "only", "lanes", "reason"),
    [
        ("InfiniBand", "", SHARED, "different hosts"),
        ("unknown hosts", "", "shm cpu", "different hosts"),
        ("two users", "", SHARED, "same host, but different users (uid 1000 and 1001)"),
        ("pid namespaces", "", SHARED, "same host, but different containers (pid namespaces)"),
        ("user namespaces", "", SHARED, "user namespace"),
        ("one has no GPU", "", "cuda_ipc cuda", NO_GPU),
        ("one asked for no GPU", "", "cuda_ipc cuda", NO_GPU),
        ("one host", "", "cuda_ipc cuda", "neither member has a GPU"),
        ("MIG on one side", "", "cuda_ipc cuda", "MIG"),
        ("CPU build", "socket torchrpc", "torchrpc cuda", "no TensorPipe channel for CUDA tensors"),
        ("neighbours", "", "torchrpc cpu, torchrpc cuda", "used only if GroupConfig.lanes names it"),
        ("neighbours", "", "nng cpu, nng cuda", "calls go by socket"),
        # forced and forbidden
        ("neighbours", "-socket", SHARED, "calls go by torchrpc, which carries no tensor descriptors"),
        ("neighbours", "torchrpc shm cuda_ipc", SHARED, "calls go by torchrpc, which carries no tensor descriptors"),
        ("neighbours", "socket torchrpc", SHARED, "not among lanes=('socket', 'torchrpc')"),
        ("neighbours", "-shm -cuda_ipc", SHARED, "forbidden by lanes=('-shm', '-cuda_ipc')"),
        ("one host", "-socket", "socket calls", "forbidden by lanes"),
        ("one host", "torchrpc", "socket calls", "not among lanes"),
        # nccl
        ("InfiniBand", "", "nccl cuda", "torchrpc uses GPUDirect RDMA between these members"),
        ("no GPUDirect", "", "nccl cuda", "adapters cannot reach GPU memory; load nvidia-peermem"),
        ("8 MiB memlock", "", "nccl cuda", "only 8 MiB of memory may be locked"),
        ("EFA", "", "nccl cuda", "EFA needs a plug-in"),
        ("no adapters", "", "nccl cuda", "either: no RDMA adapter"),
        ("InfiniBand, two subnets", "", "nccl cuda", "one InfiniBand subnet"),
        ("InfiniBand and RoCE", "", "nccl cuda", "or both RoCE"),
        ("RoCE, unrouted", "", "nccl cuda", "no adapter has an active port"),
        ("two hosts", "", "nccl cuda", "neither member has a GPU"),
        ("two GPUs", "", "nccl cuda", ONE_HOST_ONLY),
        ("two pods", "", "nccl cuda", ONE_HOST_ONLY),
        ("one GPU", NCCL, "nccl cuda", "both members use one GPU, and NCCL needs two"),
        ("MIG", NCCL, "nccl cuda", "MIG"),
        # nixl
        ("no adapters + nixl", "", "nixl cpu", "no RDMA adapter"),
        ("two hosts + nixl", "", "nixl cpu", "no RDMA adapter"),
        ("InfiniBand on one side + nixl", "", "nixl cpu", "worker_1: no RDMA adapter"),
        ("EFA on one side + nixl", NIXL, "nixl cpu", "one has EFA adapters, by LIBFABRIC, and the other none"),
        ("InfiniBand, only one and down + nixl", "", "nixl cpu", "no adapter has an active port"),
        ("InfiniBand, two subnets + nixl", "", "nixl cpu", "one InfiniBand subnet"),
        ("InfiniBand and RoCE + nixl", "", "nixl cpu", "or both RoCE"),
        ("8 MiB memlock + nixl", "", "nixl cpu", "only 8 MiB of memory may be locked"),
        ("neighbours + nixl", "", BY_NIXL, ONE_HOST_ONLY),
        ("no GPUDirect + nixl", "", "nixl cuda", "load nvidia-peermem"),
        *(
            ("NIXL on one side", only, BY_NIXL, "NIXL is not installed for torch in worker_1: pip")
            for only in ("", NIXL)
        ),
        *(("InfiniBand", only, BY_NIXL, "not installed for torch: pip") for only in ("", NIXL)),
        ("two hosts + nixl", NIXL, "nixl cuda", "neither member has a GPU"),
    ],
)
def test_a_lane_that_is_not_used_says_why(pair: str, only: str, lanes: str, reason: str) -> None:
    route = routes_of(pair, only).route("worker_0", "worker_1")
    for each in lanes.split(", "):
        assert reason in why_not(route, *each.split())


def test_neighbours_prefer_memory_to_messages() -> None:
    routes = plan(neighbours(), GroupConfig())
    route = routes.route("worker_0", "worker_1")
    lanes = {traffic: [choice.lane for choice in route.lanes(traffic)] for traffic in TRAFFIC}
    assert lanes == {
        "calls": ["socket", "torchrpc", "nng"],
        "cpu": ["shm", "socket"],
        "cuda": ["cuda_ipc", "socket"],
    }
    assert [choice.lane for choice in route.tensor_lanes] == lanes["cpu"] + lanes["cuda"]
    assert {no.lane for no in route.rejected} == {"nixl", "nccl", "torchrpc", "nng"}
    assert (route.message_lane, route.why_not("torchrpc")) == ("socket", None)
    assert "nng" not in routes.lanes_of("worker_0"), "nothing prefers it"


@pytest.mark.parametrize(
    ("pair", "only", "said"),
    [
        ("two pods", "", None),
        ("neighbours", "-cuda_ipc", "cuda_ipc: forbidden by lanes=('-cuda_ipc',); nixl: same host"),
        ("MIG on one side", "", "cuda_ipc: CUDA cannot share memory between MIG instances; nixl: same host"),
        ("neighbours", "-socket -torchrpc -cuda_ipc", "socket: forbidden"),
        ("one host", "", None),
    ],
)
def test_cuda_tensors_that_no_lane_takes_stay_in_the_messages_of_calls(pair: str, only: str, said: str | None) -> None:
    route = routes_of(pair, only).route("worker_0", "worker_1")
    assert not route.lanes("cuda") or route.lanes("cuda")[-1].lane == route.message_lane
    if said is None:
        assert lane(route, "cuda") != route.message_lane
    else:
        assert lane(route, "cuda") == route.message_lane and said in (route.through_cpu() or "")


@pytest.mark.parametrize("values", [{"transports": ("shm",)}, {"channels": ("cma",)}])
def test_messages_take_what_torchrpc_cannot(values: dict[str, Any]) -> None:
    route = plan(clusters.two_hosts(), GroupConfig(**values)).route("worker_0", "worker_1")
    assert lane(route, "cpu") == "socket"
    assert "TensorPipe" in why_not(route, "torchrpc", "cpu")


def test_members_on_one_gpu_are_told_which_it_is() -> None:
    two = a100s(2)
    turned = tuple(gpu.changed({"index": 1 - gpu.index}) for gpu in reversed(two))
    first, every = member(0, cuda=True, gpus=two[:1]), member(1, cuda=True, gpus=two)
    routes = plan(group(first, every, member(2, cuda=True, gpus=turned)), GroupConfig())
    assert routes.route("worker_0", "worker_1").same_gpus == ((0, 0),)
    assert routes.route("worker_0", "worker_2").same_gpus_from("worker_0") == ((0, 1),)
    assert routes.route("worker_0", "worker_2").same_gpus_from("worker_2") == ((1, 0),)
    assert set(routes.route("worker_1", "worker_2").same_gpus) == {(0, 1), (1, 0)}
    said = "share=True shares the memory of cuda:1 of worker_2, which is cuda:0 of worker_0"
    assert said in routes.explain("worker_2", "worker_0")


@pytest.mark.parametrize(
    ("changes", "lanes"), [({"host": 1}, None), ({}, ("-cuda_ipc",)), ({"gpus": a100s(1), "uid": 1}, None)]
)
def test_gpus_of_two_hosts_or_out_of_reach_are_not_shared(changes: dict[str, Any], lanes: Any) -> None:
    two = [member(0, cuda=True, gpus=a100s(1)), member(1, **{"cuda": True, "gpus": a100s(1), **changes})]
    assert plan(group(*two), GroupConfig(lanes=lanes)).route("worker_0", "worker_1").same_gpus == ()


def test_gpus_without_a_name_are_not_shared() -> None:
    nameless = tuple(gpu.changed({"uuid": ""}) for gpu in a100s(1))
    unknown = group(*(member(n, cuda=True, gpus=nameless) for n in range(2)))
    assert plan(unknown, GroupConfig()).route("worker_0", "worker_1").same_gpus == ()


def test_a_member_opens_the_lanes_that_its_own_routes_prefer() -> None:
    gpus = a100s(3)
    members = (
        member(0, cuda=True, gpus=(gpus[0],)),
        member(1, cuda=True, gpus=(gpus[1],)),
        member(2),
        member(3, host=1, cuda=True, gpus=(gpus[2],)),
        member(4, pod=1),
    )
    routes = plan(group(*members), GroupConfig())
    opened = {name: beside(routes, name) for name in routes.members}
    assert list(opened.values()) == ["shm cuda_ipc", "shm cuda_ipc", "shm", "", ""]
    assert {name: beside(routes, name) for name in routes.members} == opened
    assert beside(plan(clusters.one_host(1), GroupConfig()), "worker_0") == ""


# --- the agents of a group -----------------------------------------------------------------------------------


def test_rdma_on_one_host_is_not_used_and_no_warning() -> None:
    routes = plan(group(*(member(n, hcas=efa_hcas()) for n in range(2))), GroupConfig())
    assert routes.agents["worker_0"].transports == ("uv",) and not routes.warnings
    routes = plan(group(*(member(n, hcas=infiniband_hcas()) for n in range(2))), GroupConfig())
    assert routes.agents["worker_0"].transports == ("uv",)
    assert "ibv: not used, every member is on one host" in routes.agents["worker_0"].notes


def test_a_member_without_rdma_leaves_it_to_the_others() -> None:
    cluster = {**public_nodes(), "plain": member(7, host=7).changed({"name": "plain"})}
    routes = plan(cluster, GroupConfig())
    assert routes.agents["plain"].transports == ("uv",)
    assert by_torchrpc(routes.route("worker_0", "worker_1"), "cpu") == "ibv, channel basic"
    assert by_torchrpc(routes.route("worker_0", "plain"), "cpu") == "uv, channel basic"


def test_a_member_without_a_gpu_opens_no_cuda_channel_even_if_it_sees_gpus() -> None:
    sees = {"cuda": True, "gpus": a100s(2)}
    cluster = group(member(0, **sees), member(1, pod=1, wants_gpu=False, **sees), member(2, **sees))
    routes = plan(cluster, GroupConfig(lanes=("socket", "torchrpc")))
    assert not any(channel.startswith("cuda") for channel in routes.agents["worker_1"].channels)
    assert "cuda_basic: not used, this member has no GPU" in routes.agents["worker_1"].notes
    # It has no channel to compare GPUs with, so its own container does not keep the others from theirs.
    assert by_torchrpc(routes.route("worker_0", "worker_2"), "cuda") == "uv, channel cuda_ipc"
    assert why_not(routes.route("worker_0", "worker_1"), "torchrpc", "cuda").startswith("worker_1 has no GPU")


def test_a_pod_that_meets_others_takes_cuda_ipc_from_all_of_its_host() -> None:
    gpus = a100s(4)
    pods = [member(n, pod=n // 2, cuda=True, gpus=(gpus[n],)) for n in range(4)]
    away = [member(n, host=1, cuda=True, gpus=(gpus[n - 4],)) for n in (4, 5)]
    routes = plan(group(*pods, *away), GroupConfig(lanes=("socket", "torchrpc")))
    opened = ["cuda_ipc" in agent.channels for agent in routes.agents.values()]
    assert opened == [False] * 4 + [True] * 2
    assert by_torchrpc(routes.route("worker_4", "worker_5"), "cuda") == "uv, channel cuda_ipc"


def test_equal_pids_on_different_hosts_are_no_conflict() -> None:
    assert "cuda_xth" in plan(public_nodes(pid=42), GroupConfig()).agents["worker_0"].channels


def test_mig_slices_have_no_cuda_ipc() -> None:
    agent = plan(group(*(member(n, cuda=True, gpus=(MIG[n],)) for n in range(2))), GroupConfig()).agents["worker_0"]
    assert "cuda_ipc" not in agent.channels
    assert any("MIG slice" in note for note in agent.notes)


def test_the_cpu_build_is_offered_nothing_it_does_not_have() -> None:
    routes = plan(neighbours(tensorpipe_channels=CPU_CHANNELS), GroupConfig())
    assert set(routes.agents["worker_1"].channels) <= set(CPU_CHANNELS)


def test_one_warning_per_cause_names_everyone_it_concerns() -> None:
    cluster = group(*(member(n, host=n, hcas=efa_hcas(), shm_free_bytes=64 * MIB) for n in range(12)))
    (warning,) = plan(cluster, GroupConfig()).warnings  # nobody shares a host, so /dev/shm does not matter
    assert warning.startswith("worker_0..worker_11: RDMA is not used")


def test_small_shared_memory_between_neighbours_is_said_with_the_remedy() -> None:
    cluster = group(member(0), member(1, shm_free_bytes=64 * MIB))
    assert plan(cluster, GroupConfig()).warnings == ()  # only TensorPipe's own shm transport lives there
    (warning,) = plan(cluster, GroupConfig(transports=("shm", "uv"))).warnings
    assert warning.startswith("worker_1: ") and "less than 256 MiB" in warning and "--shm-size" in warning


@pytest.mark.parametrize("cluster", [clusters.one_host(1), clusters.one_host(3), clusters.two_hosts()])
def test_cpu_channels_do_not_depend_on_who_else_is_there(cluster: Cluster) -> None:
    """An agent outlives groups."""
    agents = plan(cluster, GroupConfig()).agents
    assert {agent.channels for agent in agents.values()} == {("cma", "mpt_uv", "basic")}


def test_one_that_may_not_be_read_takes_cma_from_its_host_alone() -> None:
    cluster = group(member(0), member(1), member(2, uid=7), member(3, host=1))
    agents = plan(cluster, GroupConfig()).agents
    assert ["cma" in agent.channels for agent in agents.values()] == [False, False, False, True]
    assert all("mpt_uv" in agent.channels for agent in agents.values())


# --- interfaces ----------------------------------------------------------------------------------------------


def test_each_agent_listens_on_the_interface_of_its_own_node_address() -> None:
    cluster = clusters.two_hosts()
    renamed = cluster["worker_1"].interfaces[1].changed({"name": "ens5"})
    extra = clusters.Interface(name="ib0", addresses=("192.168.0.1",))
    cluster["worker_0"] = cluster["worker_0"].changed({"interfaces": (*cluster["worker_0"].interfaces, extra)})
    cluster["worker_1"] = cluster["worker_1"].changed({"interfaces": (renamed, extra)})
    listening = [(agent.interface, agent.address) for agent in plan(cluster, GroupConfig()).agents.values()]
    assert listening == [("eth0", "10.0.0.1"), ("ens5", "10.0.1.1")]
    for agent in plan(cluster, GroupConfig(interface="ib0")).agents.values():
        assert (agent.interface, agent.address) == ("ib0", "192.168.0.1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "interface='ib0': worker_0 has no such interface; usable there: lo, eth0"),
        ({"name": "ib0", "addresses": ("1.2.3.4",), "up": False}, "it is down; usable there: lo, eth0"),
        ({"name": "ib0"}, "without an address; usable there: lo, eth0"),
    ],
)
def test_a_named_interface_must_work(change: dict[str, Any], said: str) -> None:
    interfaces = member().interfaces + ((clusters.Interface(**change),) if change else ())
    with pytest.raises(ConfigurationError, match=said):
        plan(group(member(interfaces=interfaces), member(1)), GroupConfig(interface="ib0"))


def test_loopback_is_for_one_network_only() -> None:
    local = [member(n, node_ip="127.0.0.1") for n in range(2)]
    assert plan(group(*local), GroupConfig()).agents["worker_0"].interface == "lo"
    with pytest.raises(ConfigurationError, match=r"worker_0 would listen on 127.0.0.1 .*worker_2 cannot reach"):
        plan(group(*local, member(2, host=1)), GroupConfig())


def test_an_address_on_no_interface_is_a_warning() -> None:
    routes = plan(group(member(0, node_ip="203.0.113.9"), member(1)), GroupConfig())
    assert routes.agents["worker_0"].interface is None
    assert any("worker_0: no interface holds the Ray node's address" in text for text in routes.warnings)


# --- what is forced or refused -------------------------------------------------------------------------------


def test_forced_backends_are_taken_as_given() -> None:
    routes = plan(
        clusters.one_host(), GroupConfig(lanes=("socket", "torchrpc"), transports=("shm", "uv"), channels=("basic",))
    )
    agent = routes.agents["worker_0"]
    assert (agent.transports, agent.channels) == (("shm", "uv"), ("basic",))
    assert by_torchrpc(routes.route("worker_0", "worker_1"), "cpu") == "shm, channel basic"
    assert any("forced by the configuration" in note for note in agent.notes)


def test_forced_ibv_that_may_fail_is_a_warning() -> None:
    (warning,) = plan(public_nodes(roce_hcas()), GroupConfig(transports=("ibv", "uv"))).warnings
    assert "ibv is forced, though it may fail: mlx5_0 is RoCE" in warning


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"transports": ("tcp",)}, r"transports: the torch build of worker_0 .* has no 'tcp'; it has: shm, ibv, uv"),
        ({"channels": ("cuda_ipc",)}, "channels: .* has no 'cuda_ipc'; it has: cma, mpt_uv, basic"),
        ({"transports": ()}, "transports is empty"),
        ({"lanes": ("shm", "cuda_ipc")}, "leaves no lane for calls; allow one of: socket, torchrpc, nng"),
        ({"transports": ("shm",), "lanes": ("torchrpc",)}, "nothing can carry calls between worker_0 and worker_1"),
        ({"channels": ("cma",), "lanes": ("torchrpc",)}, "nothing can carry CPU tensors .* no TensorPipe channel"),
    ],
)
def test_a_configuration_that_cannot_carry_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan(clusters.two_hosts(), GroupConfig(**values))


def test_torch_releases_must_agree() -> None:
    cluster = clusters.one_host(4)
    cluster["worker_1"] = cluster["worker_1"].changed({"torch_version": "2.13.1+cu130"})
    plan(cluster, GroupConfig())  # patch releases and builds may differ
    cluster["worker_2"] = cluster["worker_2"].changed({"torch_version": "2.11.0+cu130"})
    with pytest.raises(BootstrapError, match=r"worker_2 has 2\.11\.0\+cu130, worker_0 has 2\.13\.0\+cpu") as caught:
        plan(cluster, GroupConfig())
    assert caught.value.members == ("worker_2",)


def test_a_build_without_torchrpc_is_named() -> None:
    cluster = group(member(0), member(1, tensorpipe_transports=(), tensorpipe_channels=()))
    with pytest.raises(ConfigurationError, match=r"torch build of worker_1 .* has no torchrpc"):
        plan(cluster, GroupConfig())


# --- what a user reads ---------------------------------------------------------------------------------------


def test_explain_says_the_lane_the_way_and_every_reason() -> None:
    text = plan(clusters.two_pods_one_host(), GroupConfig()).explain("worker_1", "worker_0")
    forbidden = plan(clusters.one_host(), GroupConfig(lanes=("-socket",))).explain("worker_0", "worker_1")
    for fragment in (
        "worker_1 <-> worker_0",
        "calls: socket (tcp socket): same host, different network namespaces",
        "CUDA tensors: torchrpc (torchrpc over uv, channel cuda_basic): staged through CPU memory",
        "10.0.0.2 on eth0",
        "not shm for CPU tensors: same host, but different containers (pid namespaces)",
        "not cuda_ipc for CUDA tensors: same host, but different containers (pid namespaces)",
        "cuda_ipc: not used, worker_0 on this host is in another container",
    ):
        assert fragment in text, text
    assert "not socket for calls: forbidden by lanes=('-socket',)" in forbidden
    assert "CUDA tensors: none" in forbidden
    assert "not torchrpc for CUDA tensors: neither member has a GPU" in forbidden


def test_explain_gives_a_reason_once_that_all_lanes_share() -> None:
    text = plan(clusters.one_host(), GroupConfig()).explain("worker_0", "worker_1")
    assert "  CUDA tensors: none: neither member has a GPU\n" in text
    assert text.count("GPU") == 1


@pytest.mark.parametrize(
    ("pages", "host", "said"),
    [
        (("used", "used"), 1, ()),
        ((None, "used"), 1, ()),
        (("used", "unused"), 1, ("reach worker_1 .*runtime_env=raytorchrpc.runtime_env",)),
        (("forbidden", None), 1, ("reach worker_0 .*write madvise to /sys/kernel/mm/transparent_hugepage/enabled",)),
        (("unused", "unused"), 1, ("reach worker_0 ", "reach worker_1 ")),
        (("unused", "unused"), 0, ()),  # shm carries CPU tensors
    ],
)
def test_explain_notes_who_receives_into_small_pages(pages: Any, host: int, said: tuple[str, ...]) -> None:
    members = group(*(member(n, host=n * host, huge_pages=has) for n, has in enumerate(pages)))
    text = plan(members, GroupConfig()).explain("worker_1", "worker_0")
    notes = sorted(line for line in text.splitlines() if line.startswith("  note: "))
    assert len(notes) == len(said)
    assert all(re.search(words, note) for words, note in zip(said, notes, strict=True)), text


def test_explain_itself_and_strangers() -> None:
    routes = plan(clusters.one_host(), GroupConfig())
    assert "calls itself in place" in routes.explain("worker_0", "worker_0")
    for a, b in (("worker_0", "nobody"), ("nobody", "nobody")):
        with pytest.raises(ConfigurationError, match="no member 'nobody'; members: worker_0, worker_1"):
            routes.explain(a, b)


def table_rows(routes: RoutePlan) -> list[list[str]]:
    header, rule, *lines = routes.table(200).partition("\n\n")[0].splitlines()
    assert header.split("  ")[0] == "from" and set(rule) <= {"-", " "}
    starts = [0] + [i + 2 for i in range(len(rule) - 1) if rule[i : i + 2] == "  "]
    ends = [*(start - 2 for start in starts[1:]), None]
    return [[line[start:end].strip() for start, end in zip(starts, ends, strict=True)] for line in lines]


def test_table_of_a_small_group_has_one_line_per_pair() -> None:
    routes = plan(group(member(0), member(1), member(2, host=1)), GroupConfig())
    near, far = ["socket [1]", "shm [2]", "-"], ["socket [3]", "torchrpc [4]", "-"]
    assert table_rows(routes) == [
        ["worker_0", "worker_1", *near],
        ["worker_0", "worker_2", *far],
        ["worker_1", "worker_2", *far],
    ]
    assert routes.table(100).partition("\n\n")[2].splitlines() == [
        "[1] socket (unix socket): same host and network namespace",
        "[2] shm (shared memory): same host: one copy, then a view of the memory it arrived in",
        "[3] socket (tcp socket): different hosts",
        "[4] torchrpc (uv, channel mpt_uv): different networks: several TCP streams",
    ]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["worker", "evaluation_collector", "a-member-with-a-name-of-40-characters-here"])
def test_the_table_fits_a_terminal_and_names_each_reason_once(width: int, name: str) -> None:
    endpoints = [
        member(n, host=n // 2).changed({"name": f"{name}_{n}"}) for n in range(8)
    ]  # the most members with a line for each pair
    for plans in (plan(group(*endpoints), GroupConfig()), plan(clusters.hosts_of(4, 8), GroupConfig())):
        text = plans.table(width)
        assert max(map(len, text.splitlines())) <= width
        assert text.count("one copy, then") == text.count("different hosts") == 1


def test_table_of_a_big_group_has_one_line_per_kind() -> None:
    rows = table_rows(plan(clusters.one_host(32), GroupConfig()))
    assert [row[:3] for row in rows] == [["worker_0..worker_31", "each other", "socket [1]"]]

    rows = table_rows(plan(clusters.hosts_of(4, 8), GroupConfig()))
    ranges = "worker_0..worker_7 | worker_8..worker_15 | worker_16..worker_23 | worker_24..worker_31"
    assert [row[:3] for row in rows] == [
        [ranges, "each other", "socket [1]"],
        [ranges, "across |", "socket [3]"],
    ]


def test_table_of_a_big_group_tells_two_kinds_of_members_apart() -> None:
    learner = member(0, host=9).changed({"name": "learner"})
    rows = table_rows(plan(group(learner, *(member(n) for n in range(1, 12))), GroupConfig()))
    assert [row[:3] for row in rows] == [
        ["worker_1..worker_11", "each other", "socket [1]"],
        ["learner", "worker_1..worker_11", "socket [3]"],
    ]


def test_a_group_of_one_has_a_plan_and_a_table() -> None:
    routes = plan(clusters.one_host(1), GroupConfig())
    assert routes.members == ("worker_0",)
    assert routes.table() == "one member, no routes"


# -- size ----------------------------------------------------------------------------------------------------


def test_a_plan_for_a_big_group_is_quick_and_small() -> None:
    cluster = clusters.hosts_of(8, 64)
    start = time.thread_time()
    routes = plan(cluster, GroupConfig())
    assert time.thread_time() - start < 1
    pickled = pickle.dumps(routes)
    assert len(pickled) < 32 * 1024
    copy = pickle.loads(pickled)
    assert copy == routes
    assert copy.route("worker_5", "worker_9") == routes.route("worker_5", "worker_9")
    few = routes.part(("worker_1", "worker_70"))
    assert few.members == ("worker_1", "worker_70")
    assert few.route("worker_1", "worker_70") == routes.route("worker_1", "worker_70")
