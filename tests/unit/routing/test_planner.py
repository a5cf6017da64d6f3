from __future__ import annotations

import itertools
import pickle
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.lanes.registry import LANES, Traffic
from raytorchrpc.lanes.rules import Pair
from raytorchrpc.routing import planner
from raytorchrpc.routing.planner import plan
from raytorchrpc.routing.routes import _TABLE_LIMIT, PairRoute, RoutePlan
from tests.unit import clusters
from tests.unit.clusters import (
    CPU_CHANNELS,
    MIB,
    Cluster,
    a100s,
    efa_hcas,
    group,
    infiniband_hcas,
    member,
    public_nodes,
    roce_hcas,
    with_port,
)

CUDA_LOCAL = ("basic", "cuda_xth", "cuda_basic")
#: The lanes for tensors alone, and what they carry.
TENSOR_LANES: tuple[tuple[str, Traffic], ...] = (("shm", "cpu"), ("cuda_ipc", "cuda"))
#: The lanes between hosts or containers: for calls, CPU tensors and CUDA tensors.
APART = ("socket", "torchrpc", "torchrpc")
#: Likewise where NCCL has GPUDirect RDMA and torchrpc has not.
BY_NCCL = ("socket", "torchrpc", "nccl")


def same(adapters: Any) -> Callable[[int], Any]:
    return lambda host: adapters


@dataclass(frozen=True)
class Case:
    """What worker_0's agent and its pair with worker_1 must be. Notes and warnings are fragments."""

    cluster: Callable[[], Cluster]
    lanes: tuple[str, str, str | None]
    """The preferred one for calls, CPU tensors and CUDA tensors."""
    transports: tuple[str, ...]
    channels: tuple[str, ...]
    calls: str
    """How the preferred lane carries them."""
    cpu: str
    """How torchrpc carries them, preferred or not; likewise cuda."""
    cuda: str | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


CASES = {
    "one host": Case(
        clusters.one_host,
        ("socket", "shm", None),
        ("uv",),
        ("cma", "mpt_uv", "basic"),
        "unix socket",
        "torchrpc over uv, channel cma",
        None,
        ("shm: not used, keeps half a core busy", "mpt_uv: used, different networks"),
    ),
    "one host, two GPUs, each process sees one": Case(
        clusters.one_host_two_gpus,
        ("socket", "shm", "cuda_ipc"),
        ("uv",),
        ("cma", "mpt_uv", "basic", "cuda_xth", "cuda_ipc", "cuda_basic"),
        "unix socket",
        "torchrpc over uv, channel cma",
        "torchrpc over uv, channel cuda_ipc",
        ("cuda_gdr: not used, ibv is not used",),
    ),
    "two hosts": Case(
        clusters.two_hosts,
        ("socket", "torchrpc", None),
        ("uv",),
        ("cma", "mpt_uv", "basic"),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        None,
        ("ibv: not used, no RDMA adapter", "cma: used, same host and container"),
    ),
    "two pods on one host": Case(
        clusters.two_pods_one_host,
        APART,
        ("uv",),
        ("mpt_uv", "basic", "cuda_basic"),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        "torchrpc over uv, channel cuda_basic",
        (
            "cma: not used, worker_1 on this host differs in pid namespace",
            "cuda_ipc: not used, worker_1 on this host is in another container: TensorPipe can abort",
            "cuda_xth: not used, worker_1 in another container has the same pid",
        ),
        ("CPU tensors between them go through the network", "can abort the process"),
    ),
    "public node on InfiniBand": Case(
        public_nodes,
        APART,
        ("ibv", "uv"),
        ("cma", "basic", "cuda_xth", "cuda_gdr", "cuda_basic"),
        "tcp socket",
        "torchrpc over ibv, channel basic",
        "torchrpc over ibv, channel cuda_gdr",
        ("mpt_uv: not used, basic takes CPU tensors over RDMA", "ibv: used, RDMA between hosts"),
    ),
    "first port down": Case(
        lambda: public_nodes(same(with_port(infiniband_hcas(), "mlx5_0", state="DOWN"))),
        BY_NCCL,
        ("uv",),
        ("cma", "mpt_uv", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        "torchrpc over uv, channel cuda_basic",
        ("ibv: not used, port 1 of mlx5_0 is DOWN; bring the link up. TensorPipe opens only the first of 9",),
        ("worker_0, worker_1: RDMA is not used by torchrpc, TCP is: port 1 of mlx5_0 is DOWN",),
    ),
    "another port down": Case(
        lambda: public_nodes(same(with_port(infiniband_hcas(), "mlx5_5", state="DOWN"))),
        BY_NCCL,
        ("ibv", "uv"),
        ("cma", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over ibv, channel basic",
        "torchrpc over ibv, channel cuda_basic",
        ("cuda_gdr: not used, TensorPipe pairs each GPU with its nearest adapter, unchecked, and port 1",),
        ("GPUDirect RDMA is off, CUDA tensors are staged through CPU memory: TensorPipe pairs each GPU",),
    ),
    "RoCE, only GID 0 usable by TensorPipe": Case(
        lambda: public_nodes(same(roce_hcas())),
        BY_NCCL,
        ("uv",),
        ("cma", "mpt_uv", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        "torchrpc over uv, channel cuda_basic",
        ("ibv: not used, mlx5_0 is RoCE and its GID index 0, the only one TensorPipe uses, is a link-local",),
        ("NCCL_IB_GID_INDEX",),
    ),
    "no peer-memory path": Case(
        lambda: public_nodes(peer_memory=False),
        APART,
        ("ibv", "uv"),
        ("cma", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over ibv, channel basic",
        "torchrpc over ibv, channel cuda_basic",
        ("cuda_gdr: not used, the kernel has no peer-memory client; load nvidia-peermem",),
        ("GPUDirect RDMA is off, CUDA tensors are staged through CPU memory: the kernel has no peer-memory",),
    ),
    "small BAR1": Case(
        clusters.small_bar1_nodes,
        BY_NCCL,
        ("ibv", "uv"),
        ("cma", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over ibv, channel basic",
        "torchrpc over ibv, channel cuda_basic",
        ("cuda_gdr: not used, BAR1 of GPU 0 is 256 MiB, smaller than its memory (81251 MiB)",),
        ("BAR1 of GPU 0 is 256 MiB",),
    ),
    "no resource1 file": Case(
        clusters.no_resource1_nodes,
        BY_NCCL,
        ("ibv", "uv"),
        ("cma", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over ibv, channel basic",
        "torchrpc over ibv, channel cuda_basic",
        ("cuda_gdr: not used, GPU 0 (0000:53:00.0) has no resource1 file; TensorPipe crashes",),
        ("GPUDirect RDMA is off",),
    ),
    "EFA": Case(
        lambda: public_nodes(same(efa_hcas())),
        APART,
        ("uv",),
        ("cma", "mpt_uv", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        "torchrpc over uv, channel cuda_basic",
        ("ibv: not used, rdmap0s6 is an EFA adapter",),
        ("RDMA is not used by torchrpc, TCP is: rdmap0s6 is an EFA adapter, which looks like InfiniBand",),
    ),
    "8 MiB memlock": Case(
        lambda: public_nodes(memlock_bytes=8 * MIB),
        APART,
        ("uv",),
        ("cma", "mpt_uv", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        "torchrpc over uv, channel cuda_basic",
        ("ibv: not used, the process may lock only 8 MiB of memory",),
        ("LimitMEMLOCK=infinity",),
    ),
    "adapters not given to the container": Case(
        lambda: public_nodes(same(tuple(hca.changed({"verbs_device": False}) for hca in infiniband_hcas()))),
        APART,
        ("uv",),
        ("cma", "mpt_uv", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        "torchrpc over uv, channel cuda_basic",
        ("ibv: not used, mlx5_0 has no /dev/infiniband/uverbs device",),
        ("ask for the RDMA device plugin's resource",),
    ),
    "two InfiniBand subnets": Case(
        lambda: public_nodes(lambda host: infiniband_hcas(f"fec0:0000:0000:000{host}")),
        APART,
        ("uv",),
        ("cma", "mpt_uv", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        "torchrpc over uv, channel cuda_basic",
        ("ibv: not used, the members' adapters are on different InfiniBand subnets (fec0:0:0:1::/64,",),
        ("different InfiniBand subnets",),
    ),
    "InfiniBand on one host, RoCE on the other": Case(
        lambda: public_nodes(lambda host: (infiniband_hcas(), roce_hcas())[host]),
        APART,
        ("uv",),
        ("cma", "mpt_uv", *CUDA_LOCAL),
        "tcp socket",
        "torchrpc over uv, channel mpt_uv",
        "torchrpc over uv, channel cuda_basic",
        ("ibv: not used, no member on another host can use its RDMA adapter",),
        (
            "worker_0: RDMA is not used by torchrpc",
            "worker_1: RDMA is not used by torchrpc, TCP is: mlx5_0 is RoCE",
        ),
    ),
}


def lane(route: PairRoute, traffic: Traffic) -> str | None:
    """The preferred lane."""
    lanes = route.lanes(traffic)
    return lanes[0].lane if lanes else None


def beside(routes: RoutePlan, name: str) -> tuple[str, ...]:
    """The tensor lanes that this member opens."""
    return tuple(each.name for each in LANES if each.out_of_band and each.name in routes.lanes_of(name))


def by_torchrpc(route: PairRoute, traffic: Traffic) -> str | None:
    """How torchrpc carries it, preferred or not."""
    return next((choice.how for choice in route.lanes(traffic) if choice.lane == "torchrpc"), None)


def why_not(route: PairRoute, name: str, traffic: Traffic) -> str:
    """Why that lane does not carry it."""
    (reason,) = (no.reason for no in route.rejected if (no.lane, no.traffic) == (name, traffic))
    return reason


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cluster(case: Case) -> None:
    routes = plan(case.cluster(), GroupConfig())
    agent, route = routes.agents["worker_0"], routes.route("worker_0", "worker_1")
    assert agent.transports == case.transports
    assert agent.channels == case.channels
    assert (lane(route, "calls"), lane(route, "cpu"), lane(route, "cuda")) == case.lanes
    assert route.lanes("calls")[0].how == case.calls
    assert by_torchrpc(route, "cpu") == case.cpu
    assert by_torchrpc(route, "cuda") == case.cuda
    for fragment in case.notes:
        assert any(fragment in note for note in agent.notes), (fragment, agent.notes)
    for fragment in case.warnings:
        assert any(fragment in warning for warning in routes.warnings), (fragment, routes.warnings)
    assert bool(routes.warnings) is bool(case.warnings), routes.warnings


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_both_sides_reach_the_same_answer(case: Case) -> None:
    cluster = case.cluster()
    forward = plan(cluster, GroupConfig())
    backward = plan(dict(reversed(cluster.items())), GroupConfig())
    assert forward.agents == backward.agents
    for a, b in itertools.combinations(cluster, 2):
        there, back = forward.route(a, b), backward.route(b, a)
        assert (there.choices, there.rejected) == (back.choices, back.rejected)
        assert forward.route(b, a) is there


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_decided_for_many_pairs_at_once_is_what_each_pair_would_get(case: Case) -> None:
    cluster, config = case.cluster(), GroupConfig()
    routes = plan(cluster, config)
    lanes = planner._candidates(config)
    for a, b in itertools.combinations(cluster, 2):
        alone = planner._judge(Pair(cluster[a], cluster[b], routes.agents[a], routes.agents[b]), lanes)
        assert (routes.route(a, b).choices, routes.route(a, b).rejected) == alone


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_plan_made_of_an_earlier_one_is_the_same_plan(case: Case) -> None:
    before = case.cluster()
    first = plan(before, GroupConfig())
    names = list(before)
    now = {**before, names[0]: before[names[0]].changed({"pid": 4711})}
    assert plan(now, GroupConfig(), (before, first)) == plan(now, GroupConfig())
    fewer = {name: before[name] for name in names[1:]}
    assert plan(fewer, GroupConfig(), (before, first)) == plan(fewer, GroupConfig())
    more = plan(before, GroupConfig(), (fewer, plan(fewer, GroupConfig())))
    assert more == first


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_backend_left_out_says_why(case: Case) -> None:
    cluster = case.cluster()
    routes = plan(cluster, GroupConfig())
    for name, agent in routes.agents.items():
        for backend in (*cluster[name].tensorpipe_transports, *cluster[name].tensorpipe_channels):
            (note,) = (note for note in agent.notes if note.startswith(f"{backend}: "))
            used = backend in agent.transports + agent.channels
            assert note.startswith(f"{backend}: used, " if used else f"{backend}: not used, ")
            assert len(note.split(", ", 1)[1]) > 5
    for route in routes.routes.values():
        judged = [(one.lane, one.traffic) for one in (*route.choices, *route.rejected)]
        assert sorted(judged) == sorted((each.name, traffic) for each in LANES for traffic in each.carries)
        assert all(no.reason for no in route.rejected)
        assert all(choice.reason and choice.how for choice in route.choices)


# -- what a group does to its members ------------------------------------------------------------------------


def test_rdma_on_one_host_alone_is_no_warning() -> None:
    cluster = group(*(member(n, hcas=efa_hcas()) for n in range(2)))
    routes = plan(cluster, GroupConfig())
    assert routes.agents["worker_0"].transports == ("uv",)
    assert not routes.warnings


def test_working_adapters_stay_off_when_every_member_is_on_one_host() -> None:
    routes = plan(group(*(member(n, hcas=infiniband_hcas()) for n in range(2))), GroupConfig())
    assert routes.agents["worker_0"].transports == ("uv",)
    assert "ibv: not used, every member is on one host" in routes.agents["worker_0"].notes


def test_a_member_without_rdma_leaves_it_to_the_others() -> None:
    cluster = {**public_nodes(), "plain": member(7, host=7).changed({"name": "plain"})}
    routes = plan(cluster, GroupConfig())
    assert routes.agents["plain"].transports == ("uv",)
    assert by_torchrpc(routes.route("worker_0", "worker_1"), "cpu") == "torchrpc over ibv, channel basic"
    assert by_torchrpc(routes.route("worker_0", "plain"), "cpu") == "torchrpc over uv, channel basic"


def test_a_member_without_a_gpu_opens_no_cuda_channel_even_if_it_sees_gpus() -> None:
    gpus = a100s(2)
    cluster = group(
        member(0, cuda=True, gpus=gpus),
        member(1, cuda=True, gpus=gpus, wants_gpu=False, pod=1),
        member(2, cuda=True, gpus=gpus),
    )
    routes = plan(cluster, GroupConfig())
    assert not any(channel.startswith("cuda") for channel in routes.agents["worker_1"].channels)
    assert "cuda_basic: not used, this member has no GPU" in routes.agents["worker_1"].notes
    # It has no channel to compare GPUs with, so its own container does not keep the others from theirs.
    assert by_torchrpc(routes.route("worker_0", "worker_2"), "cuda") == "torchrpc over uv, channel cuda_ipc"
    assert why_not(routes.route("worker_0", "worker_1"), "torchrpc", "cuda").startswith("worker_1 has no GPU")


def test_a_pod_that_meets_others_takes_cuda_ipc_from_all_of_its_host() -> None:
    gpus = a100s(4)
    pods = [member(n, pod=n // 2, cuda=True, gpus=(gpus[n],)) for n in range(4)]
    away = [member(n, host=1, cuda=True, gpus=(gpus[n - 4],)) for n in (4, 5)]
    routes = plan(group(*pods, *away), GroupConfig())
    assert all("cuda_ipc" not in routes.agents[f"worker_{n}"].channels for n in range(4))
    assert all("cuda_ipc" in routes.agents[f"worker_{n}"].channels for n in (4, 5))
    assert by_torchrpc(routes.route("worker_4", "worker_5"), "cuda") == "torchrpc over uv, channel cuda_ipc"


def test_equal_pids_on_different_hosts_are_no_conflict() -> None:
    routes = plan(public_nodes(pid=42), GroupConfig())
    assert "cuda_xth" in routes.agents["worker_0"].channels


def test_mig_slices_have_no_cuda_ipc() -> None:
    slices = tuple(gpu.changed({"name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"}) for gpu in a100s(2))
    routes = plan(group(*(member(n, cuda=True, gpus=(slices[n],)) for n in range(2))), GroupConfig())
    assert "cuda_ipc" not in routes.agents["worker_0"].channels
    assert any("MIG slice" in note for note in routes.agents["worker_0"].notes)


def test_different_users_on_one_host_do_not_read_each_others_memory() -> None:
    gpus = a100s(2)
    cluster = group(*(member(n, cuda=True, gpus=(gpus[n],), uid=1001 - n) for n in range(2)))
    routes = plan(cluster, GroupConfig())
    route = routes.route("worker_0", "worker_1")
    assert route.lanes("calls")[0].how == "unix socket"
    assert (lane(route, "cpu"), lane(route, "cuda")) == ("torchrpc", "torchrpc")
    assert by_torchrpc(route, "cpu") == "torchrpc over uv, channel mpt_uv"
    for name, traffic in TENSOR_LANES:
        assert why_not(route, name, traffic) == "same host, but different users (uid 1000 and 1001)"


def test_the_cpu_build_is_offered_nothing_it_does_not_have() -> None:
    cluster = group(
        member(0, cuda=True, gpus=a100s(1)),
        member(1, gpus=a100s(1), wants_gpu=True, tensorpipe_channels=CPU_CHANNELS),
    )
    routes = plan(cluster, GroupConfig())
    assert set(routes.agents["worker_1"].channels) <= set(CPU_CHANNELS)
    assert "no TensorPipe channel for CUDA tensors" in why_not(routes.route("worker_0", "worker_1"), "torchrpc", "cuda")


def test_one_warning_per_cause_names_everyone_it_concerns() -> None:
    cluster = group(*(member(n, host=n, hcas=efa_hcas(), shm_free_bytes=64 * MIB) for n in range(12)))
    (warning,) = plan(cluster, GroupConfig()).warnings  # nobody shares a host, so /dev/shm does not matter
    assert warning.startswith("worker_0..worker_11: RDMA is not used")


def test_small_shared_memory_between_neighbours_is_said_with_the_remedy() -> None:
    cluster = group(member(0), member(1, shm_free_bytes=64 * MIB))
    assert plan(cluster, GroupConfig()).warnings == ()  # only TensorPipe's own shm transport lives there
    (warning,) = plan(cluster, GroupConfig(transports=("shm", "uv"))).warnings
    assert warning.startswith("worker_1: ") and "less than 256 MiB" in warning and "--shm-size" in warning


# -- lanes for tensors alone ---------------------------------------------------------------------------------


def neighbours(**changes: Any) -> Cluster:
    """Two members of one host with a GPU each; ``changes`` are worker_1's."""
    gpus = a100s(2)
    return group(member(0, cuda=True, gpus=(gpus[0],)), member(1, **{"cuda": True, "gpus": (gpus[1],), **changes}))


def changed(kind: str) -> dict[str, str]:
    """A member's namespaces with one of them another."""
    return {**member().namespaces, kind: f"{kind}:[1]"}


def test_neighbours_prefer_memory_and_keep_torchrpc() -> None:
    routes = plan(neighbours(), GroupConfig())
    route = routes.route("worker_0", "worker_1")
    assert [choice.lane for choice in route.lanes("calls")] == ["socket", "torchrpc", "nng"]
    assert [choice.lane for choice in route.lanes("cpu")] == ["shm", "torchrpc", "nng"]
    assert [choice.lane for choice in route.lanes("cuda")] == ["cuda_ipc", "torchrpc"]
    assert {no.lane for no in route.rejected} == {"nixl", "nccl"}
    assert route.message_lane == "socket"
    assert [choice.lane for choice in route.tensor_lanes] == ["shm", "torchrpc", "nng", "cuda_ipc", "torchrpc"]


def test_one_gpu_for_two_members_is_mapped_too() -> None:
    route = plan(neighbours(gpus=(a100s(2)[0],)), GroupConfig()).route("worker_0", "worker_1")
    assert lane(route, "cuda") == "cuda_ipc"


def test_hosts_do_not_share_memory() -> None:
    route = plan(public_nodes(), GroupConfig()).route("worker_0", "worker_1")
    assert [why_not(route, *which) for which in TENSOR_LANES] == ["different hosts"] * 2


def test_an_unknown_host_counts_as_another() -> None:
    route = plan(group(*(member(n, boot_id="") for n in range(2))), GroupConfig()).route("worker_0", "worker_1")
    assert (lane(route, "cpu"), why_not(route, "shm", "cpu")) == ("torchrpc", "different hosts")


def test_another_pid_namespace_shares_no_memory() -> None:
    cluster = neighbours(namespaces=changed("pid"))
    route = plan(cluster, GroupConfig()).route("worker_0", "worker_1")
    assert route.lanes("calls")[0].how == "unix socket"
    assert (lane(route, "cpu"), lane(route, "cuda")) == ("torchrpc", "torchrpc")
    for name, traffic in TENSOR_LANES:
        assert why_not(route, name, traffic) == "same host, but different containers (pid namespaces)"


def test_another_user_namespace_shares_no_memory() -> None:
    route = plan(neighbours(namespaces=changed("user")), GroupConfig()).route("worker_0", "worker_1")
    assert (lane(route, "cpu"), lane(route, "cuda")) == ("torchrpc", "torchrpc")
    for name, traffic in TENSOR_LANES:
        assert "user namespace" in why_not(route, name, traffic)


def test_cpu_tensors_need_no_common_network_or_files() -> None:
    namespaces = {**changed("net"), "mnt": "mnt:[1]", "ipc": "ipc:[1]"}
    route = plan(group(member(0), member(1, namespaces=namespaces)), GroupConfig()).route("worker_0", "worker_1")
    assert route.lanes("calls")[0].how == "tcp socket"
    assert lane(route, "cpu") == "shm"


def test_members_on_one_gpu_are_told_which_it_is() -> None:
    both = a100s(2)
    turned = tuple(gpu.changed({"index": 1 - gpu.index}) for gpu in reversed(both))
    first = member(0, cuda=True, gpus=both[:1])
    every = member(1, cuda=True, gpus=both)
    other = member(2, cuda=True, gpus=turned)
    routes = plan(group(first, every, other), GroupConfig())
    assert routes.route("worker_0", "worker_1").same_gpus == ((0, 0),)
    assert routes.route("worker_0", "worker_2").same_gpus_from("worker_0") == ((0, 1),)
    assert routes.route("worker_0", "worker_2").same_gpus_from("worker_2") == ((1, 0),)
    assert set(routes.route("worker_1", "worker_2").same_gpus) == {(0, 1), (1, 0)}
    said = "share=True shares the memory of cuda:1 of worker_2, which is cuda:0 of worker_0"
    assert said in routes.explain("worker_2", "worker_0")


def test_gpus_of_two_hosts_or_out_of_reach_are_not_shared() -> None:
    alike = a100s(1)
    apart = [member(0, cuda=True, gpus=alike), member(1, cuda=True, gpus=alike, host=1)]
    assert plan(group(*apart), GroupConfig()).route("worker_0", "worker_1").same_gpus == ()
    together = group(*(member(n, cuda=True, gpus=alike) for n in range(2)))
    assert plan(together, GroupConfig(lanes=("-cuda_ipc",))).route("worker_0", "worker_1").same_gpus == ()
    nameless = tuple(gpu.changed({"uuid": ""}) for gpu in alike)
    unknown = group(*(member(n, cuda=True, gpus=nameless) for n in range(2)))
    assert plan(unknown, GroupConfig()).route("worker_0", "worker_1").same_gpus == ()


def test_a_member_without_a_gpu_takes_cpu_tensors_alone() -> None:
    for changes in ({"gpus": (), "cuda": False}, {"wants_gpu": False}):
        routes = plan(neighbours(**changes), GroupConfig())
        route = routes.route("worker_0", "worker_1")
        assert (lane(route, "cpu"), lane(route, "cuda")) == ("shm", None)
        assert (
            why_not(route, "cuda_ipc", "cuda")
            == "worker_1 has no GPU; map it to 'cpu' with device_maps, or move the tensor to the CPU first"
        )
        assert beside(routes, "worker_0") == ("shm",)


def test_members_without_gpus_are_told_so() -> None:
    route = plan(clusters.one_host(), GroupConfig()).route("worker_0", "worker_1")
    assert why_not(route, "cuda_ipc", "cuda").startswith("neither member has a GPU")


def test_mig_slices_share_no_memory() -> None:
    gpu = a100s(2)[1].changed({"name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"})  # one side is enough
    route = plan(neighbours(gpus=(gpu,)), GroupConfig()).route("worker_0", "worker_1")
    assert (lane(route, "cpu"), lane(route, "cuda")) == ("shm", "torchrpc")
    assert "MIG" in why_not(route, "cuda_ipc", "cuda")


@pytest.mark.parametrize("lanes", [("-socket",), ("torchrpc", "shm", "cuda_ipc")])
def test_tensors_beside_the_messages_need_the_socket_lane(lanes: tuple[str, ...]) -> None:
    routes = plan(neighbours(), GroupConfig(lanes=lanes))
    route = routes.route("worker_0", "worker_1")
    assert [lane(route, traffic) for traffic in ("calls", "cpu", "cuda")] == ["torchrpc"] * 3
    for name, traffic in TENSOR_LANES:
        assert why_not(route, name, traffic) == "calls go by torchrpc, which carries no tensor descriptors"
    assert beside(routes, "worker_0") == ()


@pytest.mark.parametrize(
    ("lanes", "reason"),
    [
        (("socket", "torchrpc"), "not among lanes=('socket', 'torchrpc')"),
        (("-shm", "-cuda_ipc"), "forbidden by lanes=('-shm', '-cuda_ipc')"),
    ],
)
def test_tensors_can_be_left_to_torchrpc(lanes: tuple[str, ...], reason: str) -> None:
    routes = plan(neighbours(), GroupConfig(lanes=lanes))
    route = routes.route("worker_0", "worker_1")
    assert [lane(route, traffic) for traffic in ("calls", "cpu", "cuda")] == ["socket", "torchrpc", "torchrpc"]
    assert [why_not(route, *which) for which in TENSOR_LANES] == [reason] * 2
    assert by_torchrpc(route, "cpu") == "torchrpc over uv, channel cma"
    assert beside(routes, "worker_0") == ()


def test_neighbours_need_no_torchrpc_but_others_do() -> None:
    config = GroupConfig(lanes=("-torchrpc",))
    route = plan(neighbours(), config).route("worker_0", "worker_1")
    assert {choice.lane for choice in route.choices} == {"socket", "shm", "cuda_ipc", "nng"}
    config = GroupConfig(lanes=("-torchrpc", "-nng"))
    with pytest.raises(ConfigurationError, match=r"CPU tensors between worker_0 and worker_1 \(shm: different hosts"):
        plan(clusters.two_hosts(), config)


def test_nng_takes_the_tensors_of_hosts_without_torchrpc() -> None:
    routes = plan(clusters.two_hosts(), GroupConfig(lanes=("-torchrpc",)))
    route = routes.route("worker_0", "worker_1")
    assert (route.message_lane, lane(route, "cpu"), route.in_band_lane) == ("socket", "nng", "nng")
    assert route.lanes("cpu")[0].how == "nng over tcp"
    assert "torchrpc" in (route.why_not("torchrpc") or "")
    assert "nng" in routes.lanes_of("worker_0")
    assert not any("nng" in text for text in routes.warnings)  # it was asked for


@pytest.mark.parametrize("values", [{"transports": ("shm",)}, {"channels": ("cma",)}])
def test_nng_takes_what_torchrpc_cannot_and_a_warning_says_so(values: dict[str, Any]) -> None:
    routes = plan(clusters.two_hosts(), GroupConfig(**values))
    assert lane(routes.route("worker_0", "worker_1"), "cpu") == "nng"
    assert [text for text in routes.warnings if "go by nng" in text and "TensorPipe" in text]


def test_nng_is_not_opened_where_nothing_prefers_it() -> None:
    routes = plan(neighbours(), GroupConfig())
    assert [choice.lane for choice in routes.route("worker_0", "worker_1").lanes("cpu")] == ["shm", "torchrpc", "nng"]
    assert "nng" not in routes.lanes_of("worker_0")
    assert routes.route("worker_0", "worker_1").why_not("torchrpc") is None


def test_nng_backs_shared_memory_where_torchrpc_is_forbidden() -> None:
    route = plan(neighbours(), GroupConfig(lanes=("socket", "shm", "nng"))).route("worker_0", "worker_1")
    assert (lane(route, "cpu"), route.in_band_lane) == ("shm", "nng")
    route = plan(neighbours(), GroupConfig(lanes=("socket", "shm"))).route("worker_0", "worker_1")
    assert (lane(route, "cpu"), route.in_band_lane) == ("shm", None)


def test_a_member_opens_the_lanes_that_its_own_routes_prefer() -> None:
    gpus = a100s(3)
    routes = plan(
        group(
            member(0, cuda=True, gpus=(gpus[0],)),
            member(1, cuda=True, gpus=(gpus[1],)),
            member(2),
            member(3, host=1, cuda=True, gpus=(gpus[2],)),
            member(4, pod=1),
        ),
        GroupConfig(),
    )
    opened = {name: beside(routes, name) for name in routes.members}
    assert opened == {
        "worker_0": ("shm", "cuda_ipc"),
        "worker_1": ("shm", "cuda_ipc"),
        "worker_2": ("shm",),
        "worker_3": (),
        "worker_4": (),
    }
    assert {name: beside(routes.for_member(name), name) for name in routes.members} == opened


def test_a_group_of_one_opens_no_lane_for_tensors() -> None:
    assert beside(plan(clusters.one_host(1), GroupConfig()), "worker_0") == ()


# -- agents outlive groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [clusters.one_host(1), clusters.one_host(3), clusters.two_hosts()])
def test_cpu_channels_do_not_depend_on_who_else_is_there(cluster: Cluster) -> None:
    agents = plan(cluster, GroupConfig()).agents
    assert {agent.channels for agent in agents.values()} == {("cma", "mpt_uv", "basic")}


def test_one_that_may_not_be_read_takes_cma_from_its_host_alone() -> None:
    cluster = group(member(0), member(1), member(2, uid=7), member(3, host=1))
    agents = plan(cluster, GroupConfig()).agents
    assert ["cma" in agent.channels for agent in agents.values()] == [False, False, False, True]
    assert all("mpt_uv" in agent.channels for agent in agents.values())


# -- interfaces ----------------------------------------------------------------------------------------------


def test_each_agent_listens_on_the_interface_of_its_own_node_address() -> None:
    cluster = clusters.two_hosts()
    renamed = cluster["worker_1"].interfaces[1].changed({"name": "ens5"})
    cluster["worker_1"] = cluster["worker_1"].changed({"interfaces": (renamed,)})
    agents = plan(cluster, GroupConfig()).agents
    assert (agents["worker_0"].interface, agents["worker_0"].address) == ("eth0", "10.0.0.1")
    assert (agents["worker_1"].interface, agents["worker_1"].address) == ("ens5", "10.0.1.1")


def test_an_interface_can_be_named() -> None:
    cluster = clusters.two_hosts()
    for n, name in enumerate(cluster):
        extra = clusters.Interface(name="ib0", addresses=(f"192.168.0.{n}",))
        interfaces = (*cluster[name].interfaces, extra)
        cluster[name] = cluster[name].changed({"interfaces": interfaces})
    agent = plan(cluster, GroupConfig(interface="ib0")).agents["worker_1"]
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


# -- what the configuration forces ---------------------------------------------------------------------------


def test_forced_backends_are_taken_as_given() -> None:
    config = GroupConfig(transports=("shm", "uv"), channels=("basic",))
    routes = plan(clusters.one_host(), config)
    agent = routes.agents["worker_0"]
    assert (agent.transports, agent.channels) == (("shm", "uv"), ("basic",))
    assert by_torchrpc(routes.route("worker_0", "worker_1"), "cpu") == "torchrpc over shm, channel basic"
    assert any("forced by the configuration" in note for note in agent.notes)


def test_forced_ibv_that_may_fail_is_a_warning() -> None:
    config = GroupConfig(transports=("ibv", "uv"))
    (warning,) = plan(public_nodes(same(roce_hcas())), config).warnings
    assert "ibv is forced, though it may fail: mlx5_0 is RoCE" in warning


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"transports": ("tcp",)},
            r"transports: the torch build of worker_0 .* has no 'tcp'; it has: shm, ibv, uv",
        ),
        ({"channels": ("cuda_ipc",)}, "channels: .* has no 'cuda_ipc'; it has: cma, mpt_uv, basic"),
        ({"transports": ()}, "transports is empty"),
        (
            {"lanes": ("-torchrpc", "-nng")},
            "nothing can carry CPU tensors between worker_0 and worker_1 .*forbidden by",
        ),
        ({"lanes": ("socket",)}, "leaves no lane for CPU tensors; allow one of: shm, nixl, torchrpc, nng"),
        ({"lanes": ("shm", "cuda_ipc")}, "leaves no lane for calls; allow one of: socket, torchrpc, nng"),
        ({"transports": ("shm",), "lanes": ("-nng",)}, "nothing can carry CPU tensors between worker_0 and worker_1"),
        ({"channels": ("cma",), "lanes": ("-nng",)}, "nothing can carry CPU tensors .* no TensorPipe channel"),
    ],
)
def test_a_configuration_that_cannot_carry_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan(clusters.two_hosts(), GroupConfig(**values))


@pytest.mark.parametrize(
    ("lanes", "calls", "cpu", "reason"),
    [
        (None, "socket", "shm", None),
        (("-socket",), "torchrpc", "torchrpc", "forbidden by lanes"),
        (("torchrpc",), "torchrpc", "torchrpc", "not among lanes"),
        (("socket", "torchrpc"), "socket", "torchrpc", None),
        (("socket", "shm"), "socket", "shm", None),
        (("nng",), "nng", "nng", "not among lanes"),
        (("-socket", "-torchrpc"), "nng", "nng", "forbidden by lanes"),
    ],
)
def test_lanes_can_be_forced_and_forbidden(
    lanes: tuple[str, ...] | None, calls: str, cpu: str, reason: str | None
) -> None:
    route = plan(clusters.one_host(), GroupConfig(lanes=lanes)).route("worker_0", "worker_1")
    assert (route.message_lane, lane(route, "cpu")) == (calls, cpu)
    refused = [no for no in route.rejected if no.lane == "socket"]
    assert [reason in no.reason for no in refused if reason] == ([True] if reason else [])


def test_calls_fall_through_to_torchrpc() -> None:
    route = plan(clusters.two_hosts(), GroupConfig()).route("worker_0", "worker_1")
    assert [choice.lane for choice in route.lanes("calls")] == ["socket", "torchrpc", "nng"]


# -- nccl ----------------------------------------------------------------------------------------------------

DMA_BUF = tuple(gpu.changed({"dma_buf": True}) for gpu in a100s())


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        (public_nodes(), "torchrpc uses GPUDirect RDMA between these members"),
        (public_nodes(peer_memory=False), "adapters cannot reach GPU memory; load nvidia-peermem"),
        (public_nodes(memlock_bytes=8 * MIB), "only 8 MiB of memory may be locked"),
        (public_nodes(same(efa_hcas())), "EFA needs a plug-in"),
        (public_nodes(same(())), "either: no RDMA adapter"),
        (public_nodes(lambda host: infiniband_hcas(f"fec0:0000:0000:000{host}")), "one InfiniBand subnet"),
        (public_nodes(lambda host: (infiniband_hcas(), roce_hcas())[host]), "or both RoCE"),
        (clusters.two_hosts(), "neither member has a GPU"),
        (clusters.one_host_two_gpus(), "same host: used only if GroupConfig.lanes names it"),
        (clusters.two_pods_one_host(), "same host: used only if GroupConfig.lanes names it"),
    ],
)
def test_nccl_says_why_it_is_not_used(cluster: Cluster, reason: str) -> None:
    routes = plan(cluster, GroupConfig())
    assert reason in why_not(routes.route("worker_0", "worker_1"), "nccl", "cuda")
    assert "nccl" not in beside(routes, "worker_0")


@pytest.mark.parametrize(
    "cluster",
    [
        public_nodes(same(roce_hcas()), peer_memory=False, gpus=DMA_BUF),
        public_nodes(peer_memory=False, gpus=DMA_BUF),
        public_nodes(same(with_port(roce_hcas(), "mlx5_0", state="DOWN"))),
    ],
    ids=["RoCE with DMA-BUF", "InfiniBand with DMA-BUF", "RoCE, one port down"],
)
def test_nccl_carries_cuda_tensors_where_torchrpc_has_no_gpudirect(cluster: Cluster) -> None:
    routes = plan(cluster, GroupConfig())
    route = routes.route("worker_0", "worker_1")
    assert [choice.lane for choice in route.lanes("cuda")] == ["nccl", "torchrpc"]
    assert route.lanes("cuda")[0].how == "NCCL over GPUDirect RDMA"
    assert beside(routes, "worker_0") == ("nccl",)


def test_gids_that_are_not_routed_are_no_road_for_nccl() -> None:
    ports = {"gids": tuple(gid for gid in roce_hcas()[0].ports[0].gids if gid.link_local)}
    hcas = with_port(roce_hcas()[:1], "mlx5_0", **ports)
    route = plan(public_nodes(same(hcas)), GroupConfig()).route("worker_0", "worker_1")
    assert "no adapter has an active port" in why_not(route, "nccl", "cuda")


@pytest.mark.parametrize(
    ("cluster", "how"),
    [
        (clusters.one_host_two_gpus(), "NCCL within the host"),
        (public_nodes(), "NCCL over GPUDirect RDMA"),
        (public_nodes(same(())), "NCCL over the network"),
    ],
    ids=["one host", "two hosts with RDMA", "two hosts without"],
)
def test_nccl_is_used_where_it_is_asked_for(cluster: Cluster, how: str) -> None:
    routes = plan(cluster, GroupConfig(lanes=("socket", "shm", "nccl", "torchrpc")))
    route = routes.route("worker_0", "worker_1")
    assert [choice.lane for choice in route.lanes("cuda")] == ["nccl", "torchrpc"]
    assert route.lanes("cuda")[0].how == how


def test_cuda_ipc_comes_before_nccl() -> None:
    config = GroupConfig(lanes=("socket", "shm", "cuda_ipc", "nccl", "torchrpc"))
    routes = plan(clusters.one_host_two_gpus(), config)
    assert lane(routes.route("worker_0", "worker_1"), "cuda") == "cuda_ipc"
    assert beside(routes, "worker_0") == ("shm", "cuda_ipc")


def test_nccl_needs_two_whole_gpus() -> None:
    config = GroupConfig(lanes=("socket", "shm", "nccl", "torchrpc"))
    route = plan(neighbours(gpus=(a100s(2)[0],)), config).route("worker_0", "worker_1")
    assert why_not(route, "nccl", "cuda") == "both members use one GPU, and NCCL needs two"
    slices = tuple(gpu.changed({"name": f"{gpu.name} MIG 1g.10gb"}) for gpu in a100s(2))
    route = plan(neighbours(gpus=slices), config).route("worker_0", "worker_1")
    assert "MIG" in why_not(route, "nccl", "cuda")


# -- nixl ----------------------------------------------------------------------------------------------------

NIXL: tuple[Traffic, ...] = ("cpu", "cuda")
BY_NAME = GroupConfig(lanes=("socket", "nixl", "torchrpc"))


def with_nixl(cluster: Cluster) -> Cluster:
    return {name: each.changed({"nixl": True}) for name, each in cluster.items()}


@pytest.mark.parametrize(
    "hcas",
    [
        infiniband_hcas(),
        roce_hcas(),
        with_port(infiniband_hcas(), "mlx5_0", state="DOWN"),
        with_port(roce_hcas(), "mlx5_3", state="DOWN"),
    ],
    ids=["InfiniBand", "RoCE", "first adapter down", "another adapter down"],
)
def test_nixl_is_preferred_between_hosts_with_rdma(hcas: Any) -> None:
    routes = plan(with_nixl(public_nodes(same(hcas))), GroupConfig())
    route = routes.route("worker_0", "worker_1")
    for traffic in NIXL:
        assert [choice.lane for choice in route.lanes(traffic) if choice.lane not in ("nccl", "nng")] == [
            "nixl",
            "torchrpc",
        ]
        assert route.lanes(traffic)[0].how == "one-sided reads by RDMA"
    assert beside(routes, "worker_0") == beside(routes, "worker_1") == ("nixl",)


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        (public_nodes(same(())), "no RDMA adapter"),
        (clusters.two_hosts(), "no RDMA adapter"),
        (public_nodes(lambda host: (infiniband_hcas(), ())[host]), "worker_1: no RDMA adapter"),
        (public_nodes(same(efa_hcas())), "EFA needs a plug-in"),
        (public_nodes(same(with_port(infiniband_hcas()[:1], "mlx5_0", state="DOWN"))), "no adapter has an active port"),
        (public_nodes(lambda host: infiniband_hcas(f"fec0:0000:0000:000{host}")), "one InfiniBand subnet"),
        (public_nodes(lambda host: (infiniband_hcas(), roce_hcas())[host]), "or both RoCE"),
        (public_nodes(memlock_bytes=8 * MIB), "only 8 MiB of memory may be locked"),
    ],
)
def test_without_a_device_of_its_own_nixl_is_used_by_name_alone(cluster: Cluster, reason: str) -> None:
    cluster = with_nixl(cluster)
    routes = plan(cluster, GroupConfig())
    assert reason in why_not(routes.route("worker_0", "worker_1"), "nixl", "cpu")
    assert "nixl" not in beside(routes, "worker_0")
    (first, *_) = plan(cluster, BY_NAME).route("worker_0", "worker_1").lanes("cpu")
    assert (first.lane, first.how) == ("nixl", "one-sided reads over what UCX selects")


def test_on_one_host_nixl_is_used_by_name_alone() -> None:
    cluster = with_nixl(neighbours())
    route = plan(cluster, GroupConfig()).route("worker_0", "worker_1")
    assert all(why_not(route, "nixl", traffic).startswith("same host: used only if") for traffic in NIXL)
    routes = plan(cluster, BY_NAME)
    assert [lane(routes.route("worker_0", "worker_1"), traffic) for traffic in NIXL] == ["nixl"] * 2
    assert beside(routes, "worker_0") == ("nixl",)
    both = plan(cluster, GroupConfig(lanes=("socket", "shm", "cuda_ipc", "nixl", "torchrpc")))
    assert beside(both, "worker_0") == ("shm", "cuda_ipc")


def test_nixl_leaves_gpu_memory_alone_that_adapters_may_not_reach() -> None:
    cluster = with_nixl(public_nodes(peer_memory=False))
    route = plan(cluster, GroupConfig()).route("worker_0", "worker_1")
    assert (lane(route, "cpu"), lane(route, "cuda")) == ("nixl", "torchrpc")
    assert "load nvidia-peermem" in why_not(route, "nixl", "cuda")
    by_dma_buf = with_nixl(public_nodes(peer_memory=False, gpus=DMA_BUF))
    assert lane(plan(by_dma_buf, GroupConfig()).route("worker_0", "worker_1"), "cuda") == "nixl"
    assert lane(plan(cluster, BY_NAME).route("worker_0", "worker_1"), "cuda") == "nixl"


def test_nixl_has_to_be_installed_on_both_sides() -> None:
    both = public_nodes()
    one = {**both, "worker_0": both["worker_0"].changed({"nixl": True})}
    for cluster, said in (
        (one, "NIXL is not installed for torch in worker_1: pip"),
        (both, "not installed for torch: pip"),
    ):
        for config in (GroupConfig(), BY_NAME):
            route = plan(cluster, config).route("worker_0", "worker_1")
            assert all(said in why_not(route, "nixl", traffic) for traffic in NIXL)
    route = plan(with_nixl(clusters.two_hosts()), BY_NAME).route("worker_0", "worker_1")
    assert why_not(route, "nixl", "cuda").startswith("neither member has a GPU")


def test_the_order_of_members_does_not_matter_to_nixl() -> None:
    cluster = with_nixl(public_nodes(lambda host: (infiniband_hcas(), ())[host]))
    turned = dict(reversed(list(cluster.items())))
    answers = [plan(each, GroupConfig()).route("worker_0", "worker_1") for each in (cluster, turned)]
    assert why_not(answers[0], "nixl", "cpu") == why_not(answers[1], "nixl", "cpu")


# -- members that cannot be in one group ---------------------------------------------------------------------


def test_torch_releases_must_agree() -> None:
    cluster = clusters.one_host(4)
    cluster["worker_2"] = cluster["worker_2"].changed({"torch_version": "2.11.0+cu130"})
    with pytest.raises(BootstrapError, match=r"worker_2 has 2\.11\.0\+cu130, worker_0 has 2\.13\.0\+cpu") as caught:
        plan(cluster, GroupConfig())
    assert caught.value.members == ("worker_2",)


def test_patch_releases_and_builds_may_differ() -> None:
    cluster = clusters.one_host(2)
    cluster["worker_1"] = cluster["worker_1"].changed({"torch_version": "2.13.1+cu130"})
    plan(cluster, GroupConfig())


def test_a_build_without_torchrpc_is_named() -> None:
    cluster = group(member(0), member(1, tensorpipe_transports=(), tensorpipe_channels=()))
    with pytest.raises(ConfigurationError, match=r"torch build of worker_1 .* has no torchrpc"):
        plan(cluster, GroupConfig())


# -- what a user reads ---------------------------------------------------------------------------------------


def test_explain_says_the_lane_the_way_and_every_reason() -> None:
    text = plan(clusters.two_pods_one_host(), GroupConfig()).explain("worker_1", "worker_0")
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


def test_explain_says_what_was_rejected() -> None:
    text = plan(clusters.one_host(), GroupConfig(lanes=("-socket",))).explain("worker_0", "worker_1")
    assert "not socket for calls: forbidden by lanes=('-socket',)" in text
    assert "CUDA tensors: none" in text
    assert "not torchrpc for CUDA tensors: neither member has a GPU" in text


HUGE_PAGES: dict[tuple[str | None, str | None], tuple[str, ...]] = {
    ("used", "used"): (),
    (None, "used"): (),
    ("used", "unused"): ("reach worker_1 .*runtime_env=raytorchrpc.runtime_env",),
    ("forbidden", None): ("reach worker_0 .*write madvise to /sys/kernel/mm/transparent_hugepage/enabled",),
    ("unused", "unused"): ("reach worker_0 ", "reach worker_1 "),
}


@pytest.mark.parametrize("pages", HUGE_PAGES)
def test_explain_notes_who_receives_into_small_pages(pages: tuple[str | None, str | None]) -> None:
    members = group(*(member(n, host=n, huge_pages=has) for n, has in enumerate(pages)))
    text = plan(members, GroupConfig()).explain("worker_1", "worker_0")
    notes = sorted(line for line in text.splitlines() if line.startswith("  note: "))
    assert len(notes) == len(HUGE_PAGES[pages])
    assert all(re.search(words, note) for words, note in zip(HUGE_PAGES[pages], notes, strict=True)), text


def test_explain_notes_no_small_pages_where_shm_carries_cpu_tensors() -> None:
    members = group(*(member(n, huge_pages="unused") for n in range(2)))
    assert "note: " not in plan(members, GroupConfig()).explain("worker_0", "worker_1")


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
        member(n, host=n // 2).changed({"name": f"{name}_{n}"}) for n in range(_TABLE_LIMIT)
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
    cluster = clusters.hosts_of(8, 8)
    start = time.perf_counter()
    routes = plan(cluster, GroupConfig())
    assert time.perf_counter() - start < 1.0
    pickled = pickle.dumps(routes)
    assert pickle.loads(pickled) == routes
    mine = routes.for_member("worker_5")
    assert len(mine.routes) == 63
    assert mine.route("worker_5", "worker_9") == routes.route("worker_9", "worker_5")
    with pytest.raises(ConfigurationError, match="no route between"):
        mine.route("worker_1", "worker_2")
    assert len(pickle.dumps(mine)) < 32 * 1024 < len(pickled)
