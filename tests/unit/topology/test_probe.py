from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raytorchrpc.topology import probe as topology
from raytorchrpc.topology.endpoint import Interface
from raytorchrpc.topology.probe import probe
from tests.unit.clusters import gid_table, member
from tests.unit.trees import public_node, write


def test_probe_reads_nine_adapters_as_show_gids_prints_them(tmp_path: Path) -> None:
    tree = public_node(tmp_path)
    tree.port(tree.place("mlx5_3"), state="1: DOWN")
    (tmp_path / "dev/infiniband/uverbs8").unlink()  # not given to this container
    endpoint = probe(node_ip="10.0.60.3", root=tmp_path)
    assert [hca.name for hca in endpoint.hcas] == [f"mlx5_{n}" for n in range(9)]
    assert {hca.name: list(hca.ports[0].gids) for hca in endpoint.hcas} == gid_table()
    first, third = endpoint.hcas[0].ports[0], endpoint.hcas[3].ports[0]
    assert [gid.link_local for gid in first.gids] == [True, True, False, False]
    assert (first.state, first.link_layer, first.rate_gbps) == ("ACTIVE", "Ethernet", 25)
    assert (third.state, third.rate_gbps) == ("DOWN", 200)
    assert {hca.driver for hca in endpoint.hcas} == {"mlx5_core"}
    assert [hca.verbs_device for hca in endpoint.hcas] == [True] * 8 + [False]
    assert endpoint.peer_memory
    assert endpoint.boot_id == "0b00710d-aaaa-bbbb-cccc-dddddddddddd"
    assert endpoint.namespaces["net"] == "net:[402653183]"
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint


def test_an_empty_root_leaves_fields_empty_and_raises_nothing(tmp_path: Path) -> None:
    endpoint = probe(name="a", node_ip="10.0.0.1", root=tmp_path)
    assert (endpoint.name, endpoint.boot_id, endpoint.namespaces, endpoint.hcas) == ("a", "", {}, ())
    assert endpoint.shm_free_bytes == 0
    assert not endpoint.peer_memory
    assert not endpoint.same_host(endpoint), "an unknown boot id proves nothing"


def test_garbage_in_sysfs_raises_nothing(tmp_path: Path) -> None:
    home = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    for name, text in (("state", ""), ("rate", "fast"), ("gids/0", "zz:zz"), ("gids/1", "")):
        write(home / name, text)
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/x").mkdir()
    port = probe(node_ip="10.0.0.1", root=tmp_path).hcas[0].ports[0]
    assert (port.rate_gbps, port.gids) == (None, ())
    assert port.state != "ACTIVE"


def test_probe_of_this_process() -> None:
    endpoint = probe(node_ip="127.0.0.1", wants_gpu=False)
    assert endpoint.pid == os.getpid() and endpoint.uid == os.getuid()
    assert endpoint.torch_version == torch.__version__
    assert endpoint.shares(endpoint, "pid", "mnt", "ipc")
    assert (endpoint.interface_of("127.0.0.1"), endpoint.interface_of("203.0.113.9")) == ("lo", None)
    assert {"uv"} <= set(endpoint.tensorpipe_transports)
    assert {"basic", "mpt_uv"} <= set(endpoint.tensorpipe_channels)
    assert ("cuda_basic" in endpoint.tensorpipe_channels) is (torch.version.cuda is not None)


@pytest.mark.parametrize(
    ("enabled", "size", "seen"),
    [
        ("always madvise [never]", 2 << 20, "forbidden"),
        ("always [madvise] never", 512 << 20, None),  # the size that goes with pages of 64 KiB: too large to try
        ("always [madvise] never", 0, None),
        ("", 2 << 20, None),
    ],
)
def test_huge_pages_that_are_forbidden_or_cannot_be_tried(
    tmp_path: Path, enabled: str, size: int, seen: str | None
) -> None:
    home = tmp_path / "sys/kernel/mm/transparent_hugepage"
    write(home / "enabled", enabled)
    write(home / "hpage_pmd_size", str(size))
    assert probe(node_ip="127.0.0.1", root=tmp_path).huge_pages == seen


TRY_HUGE_PAGES = """
import os, sys, torch
from raytorchrpc.topology.probe import probe
if sys.argv[1] == "late":
    torch.ones(1)
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
print(probe(node_ip="127.0.0.1", wants_gpu=False).huge_pages)
"""


@pytest.mark.slow  # two processes that import torch
def test_huge_pages_are_tried_and_not_read_off_the_variable() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[madvise]" not in enabled.read_text():
        pytest.skip(f"{enabled} is not madvise here: the variable makes no difference")
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", TRY_HUGE_PAGES, when],
            env={**os.environ, "THP_MEM_ALLOC_ENABLE": value},
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            text=True,
        )
        for when, value in (("first", "1"), ("late", "0"))
    ]
    assert [program.communicate(timeout=60)[0].strip() for program in programs] == ["used", "unused"]


def test_cuda_is_not_touched_for_an_actor_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: Any) -> None:
        raise RuntimeError("CUDA was touched")

    for name in ("is_available", "device_count", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, touched)
    assert probe(node_ip="127.0.0.1", wants_gpu=False).gpus == ()
    with pytest.raises(RuntimeError, match="CUDA was touched"):
        probe(node_ip="127.0.0.1", wants_gpu=True)


class Properties:
    name, uuid, total_memory = "NVIDIA A100-SXM4-80GB", "0000-1111", 81251 << 20
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x53, 0


REGISTERS = "0x00000000c4000000 0x00000000c4ffffff 0x0000000000040200\n"
WINDOW = "0x0000021000000000 0x0000022fffffffff 0x000000000014220c\n"
UNUSED = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"


@pytest.mark.parametrize(
    ("resource", "resource1", "bar1", "present"),
    [
        (None, False, None, None),  # not in sysfs: unknown
        (REGISTERS, False, None, False),
        (REGISTERS + WINDOW, True, 128 << 30, True),
        # A GPU whose first BAR is 64-bit: the window is resource2, and there is no resource1.
        (REGISTERS + UNUSED + WINDOW, False, 128 << 30, False),
    ],
)
def test_gpu_takes_its_window_from_sysfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resource: Any, resource1: bool, bar1: Any, present: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    device = tmp_path / "sys/bus/pci/devices/0000:53:00.0"
    for name, text in (("resource", resource), ("resource1", "" if resource1 else None)):
        if text is not None:
            write(device / name, text)
    (gpu,) = probe(node_ip="10.0.0.1", root=tmp_path).gpus
    assert (gpu.bar1_bytes, gpu.resource1_present) == (bar1, present)
    assert (gpu.pci_bus_id, gpu.memory_bytes) == ("0000:53:00.0", 81251 << 20)


@pytest.mark.parametrize(
    ("soft", "capabilities", "uid_map", "limit"),
    [
        ("8388608", "000001ffffffffff", "0 0 4294967295", None),  # root of the machine: the kernel applies no limit
        ("8388608", "000001ffffffffff", "0 1000 65536", 8 << 20),  # root of a user namespace of its own
        ("8388608", "0000000000000000", "0 0 4294967295", 8 << 20),
        ("unlimited", "0000000000000000", "0 1000 65536", None),
    ],
)
def test_memlock_is_the_limit_that_rdma_meets(
    tmp_path: Path, soft: str, capabilities: str, uid_map: str, limit: int | None
) -> None:
    write(tmp_path / "proc/self/limits", f"Max locked memory         {soft}             unlimited            bytes")
    write(tmp_path / "proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities}\nCapBnd:\t0")
    write(tmp_path / "proc/self/uid_map", uid_map)
    assert probe(node_ip="10.0.0.1", root=tmp_path).memlock_bytes == limit


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1", "eth0"),
        ("10.0.0.9", "eth0"),  # a secondary address
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),  # what a Debian host name resolves to: still a loopback address
        ("10.0.0.2", None),
        ("node.example", None),
    ],
)
def test_interface_of(address: str, expected: str | None) -> None:
    interfaces = (
        Interface(name="lo", addresses=("127.0.0.1",)),
        Interface(name="eth0", addresses=("10.0.0.1", "10.0.0.9")),
    )
    assert member(interfaces=interfaces).interface_of(address) == expected


def test_co_location_rests_on_the_kernel_never_on_the_host_name() -> None:
    here, beside = member(0), member(1)
    pod = member(2, pod=1)
    elsewhere = member(3, host=1)
    assert here.hostname == elsewhere.hostname and not here.same_host(elsewhere)
    assert here.same_host(pod) and not here.shares(pod, "pid") and not here.same_network(pod)
    assert here.shares(beside, "pid", "mnt", "ipc") and here.same_network(beside)
    unknown = member(4, namespaces={})
    assert not unknown.shares(member(5, namespaces={}), "pid"), "unreadable namespaces prove nothing"


def test_backends_of_this_build_are_the_ones_torch_accepts() -> None:
    transports, channels = topology.tensorpipe_backends()
    torch.distributed.rpc.TensorPipeRpcBackendOptions(_transports=list(transports), _channels=list(channels))
    others = set(topology.TENSORPIPE_CHANNELS) - set(channels)
    for name in others:
        with pytest.raises(RuntimeError, match=f"Unknown channel: {name}"):
            torch.distributed.rpc.TensorPipeRpcBackendOptions(_channels=[name])
