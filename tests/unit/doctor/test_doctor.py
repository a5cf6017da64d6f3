"""What the doctor says of machines that are described file by file: the healthy ones, and one fault at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytorchrpc import ConfigurationError
from raytorchrpc.doctor import Finding, examine
from tests.unit.clusters import a100s
from tests.unit.doctor.pages import FINDINGS
from tests.unit.trees import CLOSED_DRIVER, HEALTHY_ENVIRONMENT, Tree, laptop, public_node


def said(findings: tuple[Finding, ...], *levels: str) -> dict[str, str]:
    """id -> level, of those levels."""
    return {finding.id: finding.level for finding in findings if finding.level in levels}


def finding(findings: tuple[Finding, ...], name: str) -> Finding:
    (found,) = (each for each in findings if each.id == name)
    return found


def test_the_healthy_node_of_nine_adapters_gives_no_warning(tmp_path: Path) -> None:
    public_node(tmp_path)
    findings = examine(tmp_path)
    assert said(findings, "warning", "problem") == {}
    # What TensorPipe cannot do on RoCE is no fault of the machine's.
    assert said(findings, "note") == {"rdma-roce": "note"}
    well = said(findings, "ok")
    expected = "address fork-safety gpu memlock nccl-values own-name rdma rdma-gpudirect shm"
    assert sorted(well) == expected.split()
    assert "8 x NVIDIA A100-SXM4-80GB, driver 570.124.06" in finding(findings, "gpu").seen
    assert "9 usable port(s) on 9 adapter(s), Ethernet, 25 or 200 Gb/s" in finding(findings, "rdma").seen
    assert "10.0.60.3, is on eth0" in finding(findings, "address").seen


def test_a_laptop_gives_notes_at_most(tmp_path: Path) -> None:
    laptop(tmp_path)
    findings = examine(tmp_path)
    assert said(findings, "warning", "problem") == {}
    assert set(said(findings, "note")) == {"gpu-none", "rdma-none", "own-name-loopback", "address-loopback"}


def test_a_healthy_infiniband_node_gives_not_even_a_note(tmp_path: Path) -> None:
    tree = public_node(tmp_path)
    for number in range(9):
        infiniband(tree, number)
    findings = examine(tmp_path)
    assert said(findings, "note", "warning", "problem") == {}


def test_a_network_card_that_happens_to_be_an_rdma_adapter_gives_notes_at_most(tmp_path: Path) -> None:
    """As in many clouds: RoCE, nothing of /dev/infiniband, 8 MiB to lock, and no GPU that would need it."""
    tree = laptop(tmp_path)
    port = tree.hca("mlx5_0", opened=False)
    tree.port(port, rate="50 Gb/sec (1X HDR)")
    tree.gids(port, [(0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1", "eth0")])
    findings = examine(tmp_path)
    assert said(findings, "warning", "problem") == {}
    assert {"rdma-no-verbs-device", "memlock-small", "fork-unsafe"} <= set(said(findings, "note"))
    assert finding(findings, "memlock-small").meaning.startswith("no lane would use RDMA here")


def infiniband(tree: Tree, number: int) -> None:
    port = tree.place(f"mlx5_{number}")
    shutil.rmtree(port)
    tree.port(port, "InfiniBand")
    tree.gids(port, [(0, f"fe80:0000:0000:0000:0000:0000:0000:000{number}", "IB/RoCE v1", None)])


def bare_roce(tree: Tree) -> None:
    """GID 0 only, as a container shows whose adapter's interface stayed outside."""
    for number in range(9):
        port = tree.place(f"mlx5_{number}")
        shutil.rmtree(port / "gids")
        shutil.rmtree(port / "gid_attrs")
        tree.gids(port, [(0, f"fe80:0000:0000:0000:0000:0000:0000:000{number}", "IB/RoCE v1", "eth0")])


def no_peermem(tree: Tree) -> None:
    shutil.rmtree(tree.root / "sys/kernel/mm/memory_peers")


def no_gpudirect(tree: Tree) -> None:
    no_peermem(tree)
    tree.driver(CLOSED_DRIVER)


def only_efa(tree: Tree) -> None:
    shutil.rmtree(tree.root / "sys/class/infiniband")
    tree.port(tree.hca("rdmap0s6", driver="efa"), "InfiniBand", rate="100 Gb/sec (4X EDR)")


def in_a_container(tree: Tree, given: int) -> None:
    tree.environment({**HEALTHY_ENVIRONMENT, "KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    shutil.rmtree(tree.root / "proc/driver/nvidia/gpus")
    for file in tree.root.glob("dev/nvidia*"):
        file.unlink()
    for gpu in a100s():
        tree.gpu(gpu, given=gpu.index < given)


def nccl(**variables: str) -> Callable[[Tree], None]:
    return lambda tree: tree.environment({**HEALTHY_ENVIRONMENT, **variables})


def down(*numbers: int) -> Callable[[Tree], Any]:
    return lambda tree: [tree.port(tree.place(f"mlx5_{number}"), state="1: DOWN") for number in numbers]


def said_of(**fields: Any) -> Callable[[Tree], Any]:
    return lambda tree: tree.say(**fields)


def locks(memlock: str = "8388608", **changes: Any) -> Callable[[Tree], Any]:
    return lambda tree: tree.process(memlock=memlock, **changes)


NOT_ROOT = locks(uid=1000, ipc_lock=False)
NO_SHM = {"shm_total_bytes": 64 << 20, "endpoint": {"shm_free_bytes": 60 << 20}}

#: Name -> how to spoil the healthy node, the findings it gets ("id level, ..."), and what the first one shows. The node
#: has the note rdma-roce besides, unless - comes first.
BROKEN: dict[str, tuple[Callable[[Tree], Any], str, str]] = {
    "first adapter down": (down(0), "- rdma-first-unusable warning", "mlx5_0, is DOWN"),
    "another adapter down": (down(4), "rdma-port-down warning", "mlx5_4"),
    "every adapter down": (down(*range(9)), "- rdma-first-unusable problem", ""),
    "RoCE with GID 0 only": (bare_roce, "- rdma-no-routed-gid problem", ""),
    "RoCE needs GID 3, and 0 was set": (
        nccl(NCCL_IB_GID_INDEX="0"),
        "nccl-value-unfit warning",
        "a link-local address; 3 is the routed one",
    ),
    "RoCE v1 was set": (nccl(NCCL_IB_GID_INDEX="2"), "nccl-value-unfit warning", "IB/RoCE v1; 3 is the routed one"),
    "no nvidia-peermem": (no_peermem, "rdma-dma-buf-only note", ""),
    "no DMA-BUF": (lambda tree: tree.driver(CLOSED_DRIVER), "", ""),
    "neither": (no_gpudirect, "rdma-no-gpudirect warning", ""),
    "small BAR1": (
        lambda tree: [tree.gpu(gpu, bar1_gib=0.25) for gpu in a100s()],
        "gpu-bar1-small warning",
        "BAR1 of 8 GPU(s)",
    ),
    "8 MiB to lock, not root": (NOT_ROOT, "memlock-small problem", "uid 1000 may lock 8 MiB"),
    "8 MiB to lock, root without IPC_LOCK": (locks(ipc_lock=False), "memlock-small problem", ""),
    "8 MiB to lock, root with IPC_LOCK": (locks(), "", ""),
    "no verbs devices": (
        lambda tree: shutil.rmtree(tree.root / "dev/infiniband"),
        "rdma-no-verbs-device problem",
        "mlx5_0, mlx5_1, mlx5_2, mlx5_3 and 5 more",
    ),
    "tiny /dev/shm": (said_of(**NO_SHM), "shm-small warning", ""),
    "own name is 127.0.1.1, one host": (said_of(own_addresses=["127.0.1.1"], hosts=1), "own-name-loopback note", ""),
    "own name is 127.0.1.1, two hosts": (
        said_of(own_addresses=["127.0.1.1"], hosts=2),
        "own-name-loopback warning",
        "",
    ),
    "own name is nothing, two hosts": (said_of(own_addresses=[], hosts=2), "own-name-unknown warning", ""),
    "fork safety unset": (lambda tree: tree.environment({"IBV_FORK_SAFE": "1"}), "fork-unsafe warning", ""),
    "fork safety unset, new kernel": (
        lambda tree: [tree.environment({}), tree.kernel("6.8.0-45-generic")],
        "fork-unsafe note",
        "",
    ),
    "EFA": (only_efa, "- rdma-efa warning", ""),
    "a container with no GPU of its host's": (
        lambda tree: in_a_container(tree, given=0),
        "gpu-not-in-container warning",
        "",
    ),
    "a container with one GPU of its host's": (
        lambda tree: in_a_container(tree, given=1),
        "gpu-partly-in-container note",
        "1 of the host's 8 GPUs",
    ),
    "InfiniBand and RoCE": (
        lambda tree: [infiniband(tree, number) for number in range(4, 9)],
        "rdma-link-layers-mixed note",
        "",
    ),
    "Ray on 127.0.0.1, two hosts": (
        said_of(endpoint={"node_ip": "127.0.0.1"}, hosts=2),
        "address-loopback problem",
        "",
    ),
    "Ray's address on no interface": (said_of(endpoint={"node_ip": "203.0.113.9"}), "address-unknown warning", ""),
    "an interface for all nodes that this one has not": (
        nccl(TP_SOCKET_IFNAME="ens5", NCCL_SOCKET_IFNAME="=ens5"),
        "interface-variable-wrong warning, nccl-value-unfit warning",
        "",
    ),
    "an adapter that is not there": (nccl(NCCL_IB_HCA="=mlx5_bond_0"), "nccl-value-unfit warning", ""),
    "RDMA turned off": (nccl(NCCL_IB_DISABLE="1"), "nccl-value-unfit warning", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_fault_gives_its_finding_and_no_other(tmp_path: Path, name: str) -> None:
    spoil, listed, words = BROKEN[name]
    spoil(public_node(tmp_path))
    findings = examine(tmp_path)
    expected = dict(each.split() for each in listed.removeprefix("- ").split(", ") if each)
    if not listed.startswith("-"):
        expected["rdma-roce"] = "note"
    assert said(findings, "note", "warning", "problem") == expected
    assert not words or words in finding(findings, next(iter(expected))).seen
    for each in findings:
        assert each.level in FINDINGS[each.id]
        if each.level in ("warning", "problem"):
            assert each.meaning and each.remedy, f"{each.id} does not say what it means and what to do"


def test_ipc_lock_is_no_remedy_for_a_user_other_than_root(tmp_path: Path) -> None:
    NOT_ROOT(public_node(tmp_path))
    assert "IPC_LOCK alone does nothing" in finding(examine(tmp_path), "memlock-small").remedy


def test_values_in_ncclss_own_files_are_seen(tmp_path: Path) -> None:
    tree = public_node(tmp_path)
    (tree.root / "etc").mkdir()
    (tree.root / "etc/nccl.conf").write_text("# for the whole machine\nNCCL_IB_HCA=mlx4\n")
    assert "NCCL_IB_HCA=mlx4" in finding(examine(tmp_path), "nccl-value-unfit").seen


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ('{"hosts": "many"}', "hosts='many' must be a valid integer"),
        ('{"endpoint": {"color": 1}}', r"endpoint\[color\]=1"),
    ],
)
def test_an_evidence_file_that_is_none_is_refused_with_its_name(tmp_path: Path, text: str, words: str) -> None:
    tree = laptop(tmp_path)
    (tree.root / "evidence.json").write_text(text)
    with pytest.raises(ConfigurationError, match=f"evidence.json: .*{words}"):
        examine(tmp_path)


def test_this_machine_is_examined_without_an_error() -> None:
    findings = examine()
    assert {"torch", "ray"} <= set(said(findings, "ok"))
    assert not [each.id for each in findings if each.id not in FINDINGS]
