"""What several nodes' evidence together shows; and how a running machine is asked."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc.doctor import collector, examination
from raytorchrpc.doctor.examination import examine_evidence, make_report
from raytorchrpc.doctor.report import Evidence, Finding, GpuLink
from tests.unit import clusters
from tests.unit.clusters import Cluster, a100s, infiniband_hcas, member, public_nodes, roce_hcas


def evidence(cluster: Cluster, **fields: Any) -> list[Evidence]:
    return [Evidence(endpoint=endpoint, **{"hosts": len(cluster), **fields}) for endpoint in cluster.values()]


def one(findings: Iterable[Finding], name: str) -> Finding:
    (found,) = (each for each in findings if each.id == name)
    return found


def two_fabrics(other: Any) -> Cluster:
    return public_nodes(lambda host: (infiniband_hcas(), other)[host])


TWO_RELEASES = public_nodes() | {"worker_1": public_nodes()["worker_1"].changed({"torch_version": "2.11.0"})}


@pytest.mark.parametrize(
    ("cluster", "name", "level", "words"),
    [
        (public_nodes(), None, "", ""),
        (clusters.one_host_two_gpus(), None, "", ""),
        (clusters.two_pods_one_host(gpus=False), None, "", ""),
        (TWO_RELEASES, "together-no-group", "problem", "worker_1 has 2.11.0"),
        (clusters.two_pods_one_host(), "together-containers-apart", "warning", "worker_0 and worker_1"),
        (two_fabrics(()), "together-rdma-uneven", "warning", "none on worker_1"),
        (two_fabrics(roce_hcas()), "together-slower", "warning", "worker_0 and worker_1"),
        (two_fabrics(infiniband_hcas("fec0:0000:0000:0001")), "together-slower", "warning", "one InfiniBand"),
        (
            clusters.with_nixl(public_nodes(lambda host: clusters.moved_roce_hcas(host)[:1])),
            "together-gid-index-differs",
            "note",
            "3 on worker_0; 5 on worker_1",
        ),
    ],
)
def test_what_does_not_fit_together(cluster: Cluster, name: str | None, level: str, words: str) -> None:
    report = make_report(evidence(cluster), "1")
    levels = {each.id: each.level for each in report.together if each.id != "together-routes"}
    assert levels == ({} if name is None else {name: level})
    assert name is None or words in one(report.together, name).seen
    assert report.healthy() or level == "problem"


def test_nodes_that_fit_show_their_routes() -> None:
    routes = one(examination.together(evidence(public_nodes())), "together-routes")
    assert routes.level == "ok"
    assert routes.seen.startswith("worker_0 - worker_1: calls: socket (tcp socket); cpu: torchrpc (torchrpc over ibv")


def test_token_authentication_on_some_nodes_only() -> None:
    both = zip(evidence(public_nodes()), ("on", "off"), strict=True)
    found = examination.together([each.model_copy(update={"ray_token": token}) for each, token in both])
    assert "off on worker_1" in one(found, "together-token-uneven").seen


def test_ray_without_jobs_and_a_missing_token_are_told() -> None:
    (alone,) = evidence(clusters.group(member()), ray_version="2.60.0", ray_token="missing", ray_jobs=False)
    assert {each.id for each in examine_evidence(alone) if each.level == "problem"} == {"ray-token-missing"}
    assert "connection refused" in one(examine_evidence(alone), "ray-without-jobs").meaning


@pytest.mark.parametrize(
    ("ray", "torch", "lacks", "problem"),
    [
        ("2.60.0", "2.13.0+cpu", (), None),
        ("3.0.0.dev0", "unknown", (), None),
        ("2.59.0", "2.8.0", (), None),
        ("2.58.1", "2.7.1+cu126", ("ObjectRefs", "gloo", "FSDP"), None),
        ("2.48.0", "2.7.0", ("ObjectRefs", "token", "gloo", "FSDP"), None),
        ("2.47.1", "2.7.0", ("ObjectRefs", "token", "gloo", "FSDP"), "install Ray 2.48 or later"),
        ("2.60.0", "2.6.0", ("gloo", "FSDP"), "install torch 2.7 or later"),
    ],
)
def test_what_a_release_is_too_old_for_is_told(
    ray: str, torch: str, lacks: tuple[str, ...], problem: str | None
) -> None:
    (alone,) = evidence(clusters.group(member(torch_version=torch)), ray_version=ray)
    found = examine_evidence(alone)
    notes = [each for each in found if each.id == "release-lacks"]
    assert len(notes) == len(lacks) and all(words in each.seen for words, each in zip(lacks, notes, strict=True))
    assert all("or later" in each.meaning and each.remedy.startswith("upgrade ") for each in notes)
    assert [each.remedy for each in found if each.level == "problem"] == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("fields", "gpu", "expected"),
    [
        ({"cuda_works": False, "gpu_files": ("nvidia0",), "pci_gpus": ("0000:53:00.0",)}, True, "gpu-cuda-fails"),
        ({"gpu_files": ("nvidia0",), "pci_gpus": ("0000:53:00.0",)}, False, "gpu-torch-without-cuda"),
        ({"pci_gpus": ("0000:53:00.0",)}, True, "gpu-driver-missing"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}, "pci_gpus": ("0000:53:00.0",)}, True, "gpu-none"),
    ],
)
def test_why_no_gpu_is_seen(fields: dict[str, Any], gpu: bool, expected: str) -> None:
    endpoint = member(wants_gpu=True, cuda_version="13.0" if gpu else None)
    assert expected in {each.id for each in examine_evidence(Evidence(endpoint=endpoint, **fields))}


@pytest.mark.parametrize(
    ("links", "name", "words"),
    [
        ([GpuLink(a=0, b=1, nvlinks=18, peer_access=True)], "gpu-links", "18 NVLinks"),
        ([GpuLink(a=0, b=1, nvlinks=0, peer_access=True)], "gpu-links", "over PCIe"),
        ([GpuLink(a=0, b=1, peer_access=True)], "gpu-links", "all of them have peer access"),
        ([GpuLink(a=0, b=1, peer_access=False)], "gpu-no-peer-access", "GPUs 0-1"),
    ],
)
def test_how_gpus_reach_each_other(links: list[GpuLink], name: str, words: str) -> None:
    endpoint = member(cuda=True, gpus=a100s(2))
    assert words in one(examine_evidence(Evidence(endpoint=endpoint, links=tuple(links))), name).seen


def test_gpus_that_were_not_asked_for_are_no_fault() -> None:
    found = examine_evidence(Evidence(endpoint=member(), pci_gpus=("0000:53:00.0",), container="docker"))
    assert {each.id: each.level for each in found if each.id.startswith("gpu")} == {"gpu-none": "note"}


class Nvml:
    """NVML of two GPUs: two links to each other, and four to a switch."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_NVLINK_MAX_LINKS = 18
    open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{a100s(2)[handle].uuid}"

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 7:
            raise self.NVMLError("no such link")
        return int(link != 6)  # the seventh is there, and down

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=f"0000{a100s(2)[1 - handle].pci_bus_id}".upper())

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        if link == 0:
            raise self.NVMLError("not supported")
        return 0 if link == 1 else 2


@pytest.mark.parametrize(("nvml", "nvlinks"), [(Nvml(), 6), (None, None)])
def test_nvml_counts_the_links_where_it_is_installed(
    nvml: Any, nvlinks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    assert collector.links(a100s(2)) == (GpuLink(a=0, b=1, nvlinks=nvlinks, peer_access=False),)
    assert nvml is None or nvml.open == 0


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def getaddrinfo(*args: Any, **kwargs: Any) -> list[Any]:
        answer.wait(30)
        return []

    monkeypatch.setattr(collector, "_RESOLVING_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert collector.gather(wants_gpu=False, node_ip="127.0.0.1").own_addresses is None
    answer.set()
