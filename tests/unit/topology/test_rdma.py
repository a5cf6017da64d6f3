"""What TensorPipe gets wrong about RDMA and GPUs, one hole to a test: how the pair is routed, what NCCL is told, and
what the doctor says, all from the same simulated evidence. docs/rdma.md has a row for each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytorchrpc import GroupConfig
from raytorchrpc.doctor import Evidence
from raytorchrpc.doctor.examination import make_report
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.nixl.agent import ucx_settings
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.routing.planner import plan
from raytorchrpc.routing.routes import RoutePlan
from raytorchrpc.topology import nccl_env, sysfs
from raytorchrpc.topology.endpoint import Endpoint, Hca
from tests.unit import clusters
from tests.unit.clusters import (
    Cluster,
    a100s,
    efa_hcas,
    gpus_with,
    infiniband_hcas,
    member,
    public_nodes,
    with_nixl,
    with_port,
)
from tests.unit.trees import link, write


def preferred(routes: RoutePlan, traffic: Any, a: str = "worker_0", b: str = "worker_1") -> str:
    return routes.route(a, b).lanes(traffic)[0].lane


def findings(cluster: Cluster) -> dict[str, set[str]]:
    """What the doctor says, worse than ok: id -> levels, on any member and of all together."""
    report = make_report([Evidence(endpoint=e, hosts=len(cluster)) for e in cluster.values()], "")
    every = [f for node in report.nodes for f in node.findings] + list(report.together)
    found: dict[str, set[str]] = {}
    for each in every:
        if each.level != "ok":
            found.setdefault(each.id, set()).add(each.level)
    return found


def hidden(hcas: tuple[Hca, ...], name: str) -> tuple[Hca, ...]:
    return tuple(h.changed({"verbs_device": False}) if h.name == name else h for h in hcas)


FIRST_UNUSABLE = {
    "down on both hosts": (with_port(infiniband_hcas(), "mlx5_0", state="DOWN"), "rdma-first-unusable"),
    "down on one host": (
        lambda host: with_port(infiniband_hcas(), "mlx5_0", state="DOWN") if host else infiniband_hcas(),
        "rdma-first-unusable",
    ),
    "not given to the container": (hidden(infiniband_hcas(), "mlx5_0"), "rdma-no-verbs-device"),
    "EFA before InfiniBand": ((*efa_hcas(), *infiniband_hcas()[1:]), "rdma-efa"),
}


@pytest.mark.parametrize("name", FIRST_UNUSABLE)
def test_several_adapters_of_which_the_first_is_unusable(name: str) -> None:
    hcas, said = FIRST_UNUSABLE[name]
    cluster = public_nodes(hcas)
    routes = plan(cluster, GroupConfig())
    assert routes.agents["worker_1"].transports == ("uv",)
    assert "cuda_gdr" not in routes.agents["worker_1"].channels
    assert (preferred(routes, "cuda"), preferred(routes, "cpu")) == ("nccl", "torchrpc")
    routes = plan(with_nixl(cluster), GroupConfig())
    assert (preferred(routes, "cuda"), preferred(routes, "cpu")) == ("nixl", "nixl")
    told = nccl_env.advise(cluster["worker_1"])[nccl_env.HCA].value
    assert told == "=" + ",".join(f"mlx5_{number}:1" for number in range(1, 9))
    assert findings(cluster)[said] == {"warning"}


def test_roce_that_needs_another_gid_index() -> None:
    cluster = public_nodes(clusters.moved_roce_hcas)
    routes = plan(cluster, GroupConfig())
    assert [routes.agents[name].transports for name in cluster] == [("uv",)] * 2
    assert preferred(routes, "cuda") == "nccl"
    assert preferred(plan(with_nixl(cluster), GroupConfig()), "cpu") == "nixl"
    assert [nccl_env.advise(each)[nccl_env.GID].value for each in cluster.values()] == ["3", "5"]
    assert {"rdma-roce", "together-gid-index-differs"} <= findings(cluster).keys()
    assert not {level for levels in findings(cluster).values() for level in levels} - {"note", "warning"}


@pytest.mark.parametrize(
    ("gpus", "peer_memory", "cuda", "said"),
    [
        (gpus_with(dma_buf=True), False, "nccl", "rdma-dma-buf-only"),
        (a100s(), False, "torchrpc", "rdma-no-gpudirect"),
        (a100s(), True, "torchrpc", None),
    ],
    ids=["DMA-BUF only", "neither", "nvidia-peermem"],
)
def test_no_peer_memory_path(gpus: Any, peer_memory: bool, cuda: str, said: str | None) -> None:
    cluster = public_nodes(gpus=gpus, peer_memory=peer_memory)
    routes = plan(cluster, GroupConfig())
    assert ("cuda_gdr" in routes.agents["worker_0"].channels) is peer_memory
    assert preferred(routes, "cuda") == cuda
    assert preferred(routes, "cpu") == "torchrpc" and routes.agents["worker_0"].transports[0] == "ibv"
    gpudirect = {"rdma-dma-buf-only", "rdma-no-gpudirect"} & findings(cluster).keys()
    assert gpudirect == ({said} if said else set())


def test_containers_that_share_a_host_but_not_its_gpus() -> None:
    """Two pods of one host with a GPU each, and a third member on another host."""
    first, second = clusters.two_pods_one_host().values()
    cluster = clusters.group(first, second, member(2, host=1, cuda=True, gpus=a100s(1, host=1)))
    routes = plan(cluster, GroupConfig())
    for pod in ("worker_0", "worker_1"):
        assert not {"cuda_ipc", "cuda_xth", "cma"} & set(routes.agents[pod].channels)
    # Alone on its host, and with an agent that has no such channel on any peer there.
    assert "cuda_ipc" not in routes.agents["worker_2"].channels
    for traffic in ("cpu", "cuda"):
        assert preferred(routes, traffic) == "torchrpc"
        assert preferred(routes, traffic, "worker_0", "worker_2") == "torchrpc"
    assert findings(cluster)["together-containers-apart"] == {"warning"}
    # With adapters in the pods, RDMA between them is TensorPipe's to use; its memory sharing still is not.
    with_rdma = {name: each.changed({"hcas": infiniband_hcas()}) for name, each in cluster.items()}
    agents = plan(with_rdma, GroupConfig()).agents
    assert all("cuda_ipc" not in agent.channels and agent.transports[0] == "ibv" for agent in agents.values())


def test_efa() -> None:
    cluster = public_nodes(efa_hcas())
    routes = plan(cluster, GroupConfig())
    assert routes.agents["worker_0"].transports == ("uv",)
    assert preferred(routes, "cuda") == "torchrpc"
    by_name = plan(cluster, GroupConfig(lanes=("socket", "shm", "cuda_ipc", "nccl", "torchrpc")))
    assert preferred(by_name, "cuda") == "nccl"
    advice = nccl_env.advise(cluster["worker_0"])
    assert [advice[name].value for name in (nccl_env.HCA, nccl_env.GID, nccl_env.TIMEOUT)] == [None] * 3
    assert findings(cluster)["rdma-efa"] == {"warning"}
    routes = plan(with_nixl(cluster), GroupConfig())
    assert preferred(routes, "cuda") == preferred(routes, "cpu") == "nixl"
    assert "LIBFABRIC" in routes.explain("worker_0", "worker_1")
    assert settings(cluster["worker_0"]) is None


def settings(endpoint: Endpoint, **config: Any) -> dict[str, str] | None:
    """What NIXL is told; None: to use LIBFABRIC."""
    return ucx_settings(LaneSetup("a", Credentials(b"", 0), GroupConfig(**config), lambda: endpoint))


def host_with_switches(root: Path, gpus: int = 8) -> list[Endpoint]:
    """A process for each GPU of a host. Each two of them, with their adapters, have a root of their own."""
    paths = dict[str, tuple[str, ...] | None]()
    for number in range(9):
        for name, slot in ((f"mlx5_{number}", 1), (f"gpu {number}", 2)):
            place = f"sys/devices/pci0000:{number // 2}0/0000:{number}0:01.0/0000:{number}{slot}:00.0"
            write(root / place / "numa_node", str(number // 4))
            link(root / "devices" / name, str(root / place))
            paths[name] = sysfs.device_path(root / "devices" / name)
    hcas = tuple(hca.changed({"path": paths[hca.name]}) for hca in infiniband_hcas())
    own = [gpu.changed({"index": 0, "path": paths[f"gpu {gpu.index}"]}) for gpu in a100s(gpus)]
    return [member(n, cuda=True, gpus=(gpu,), hcas=hcas, nixl=True) for n, gpu in enumerate(own)]


def test_each_gpu_has_its_near_adapter(tmp_path: Path) -> None:
    members = host_with_switches(tmp_path)
    for number, each in enumerate(members):
        assert settings(each) == {"TLS": "^tcp", "NET_DEVICES": f"mlx5_{number}:1"}
    first, hcas = members[0], members[0].hcas
    for unknown in (
        first.changed({"gpus": ()}),
        first.changed({"gpus": first.gpus + members[1].gpus}),
        first.changed({"hcas": hcas[:1]}),
        first.changed({"hcas": infiniband_hcas()}),
        first.changed({"hcas": (*hcas[:-1], *infiniband_hcas("fec0:0000:0000:0001")[-1:])}),
    ):
        assert settings(unknown) == {"TLS": "^tcp"}
    assert settings(first, near_adapters=False) == {"TLS": "^tcp"}
    assert settings(first, lanes=("socket", "nixl", "torchrpc")) == {}
    for unusable in ({"state": "DOWN"}, {"rate_gbps": 25.0}):
        others = first.changed({"hcas": with_port(hcas, "mlx5_0", **unusable)})
        assert settings(others) == {"TLS": "^tcp", "NET_DEVICES": "mlx5_1:1"}


def test_actors_that_may_share_an_adapter_are_told(tmp_path: Path) -> None:
    here, far = host_with_switches(tmp_path, 3), member(9, host=1, cuda=True, hcas=infiniband_hcas(), nixl=True)
    assert plan(clusters.group(*here, far), GroupConfig(lanes=("-cuda_ipc",))).unused == ()
    (text,) = plan(clusters.group(*here, far), GroupConfig(near_adapters=False)).unused
    assert text.startswith("worker_0..worker_2: UCX chooses among 9 RDMA adapters") and "UCX_NET_DEVICES" in text
    without = [each.changed({"gpus": ()}) for each in here]
    (text,) = plan(clusters.group(*without[:2], here[2], far), GroupConfig()).unused
    assert text.startswith("worker_0, worker_1: ")
    assert plan(clusters.group(*without), GroupConfig()).unused == ()
