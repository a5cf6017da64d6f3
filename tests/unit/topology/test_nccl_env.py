"""What NCCL is told, from a process's evidence, and that nobody's own choice is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raytorchrpc import GroupConfig
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.topology import nccl_env
from raytorchrpc.topology.endpoint import Endpoint, Gid, Hca, Interface
from raytorchrpc.topology.nccl_env import GID, HCA, IFNAME, QPS, TIMEOUT, advise, apply, chosen_values, matches
from tests.unit.clusters import a100s, efa_hcas, infiniband_hcas, member, roce_hcas, with_port

ETHERNET = tuple(
    Interface(name=str(gids[-1].interface), addresses=(str(gids[-1].ipv4),))
    for gids in (hca.ports[0].gids for hca in roce_hcas())
)
NO_FILES = {"HOME": "/nonexistent"}


def node(hcas: tuple[Hca, ...], **changes: Any) -> Endpoint:
    fields = {"interfaces": ETHERNET, "node_ip": "10.0.60.3", "cuda": True, "gpus": a100s(1), **changes}
    return member(hcas=hcas, **fields)


def roce_with(*gids: tuple[int, str, str, str | None]) -> tuple[Hca, ...]:
    """One RoCE adapter: (index, IPv4 address, kind, interface)."""
    made = tuple(
        Gid(index=index, value=f"0000:0000:0000:0000:0000:ffff:{_hex(ipv4)}", kind=kind, interface=name, ipv4=ipv4)
        for index, ipv4, kind, name in gids
    )
    return with_port(roce_hcas()[:1], "mlx5_0", gids=made)


def _hex(ipv4: str) -> str:
    a, b, c, d = map(int, ipv4.split("."))
    return f"{a:02x}{b:02x}:{c:02x}{d:02x}"


EVERY = "=" + ",".join(f"mlx5_{number}:1" for number in range(9))
MANAGED = with_port(roce_hcas(), "mlx5_0", rate_gbps=25.0)  # for management, behind the Ray node's address
BROKEN = with_port(infiniband_hcas()[:3], "mlx5_0", state="DOWN")
BROKEN = (*BROKEN[:2], BROKEN[2].changed({"verbs_device": False}))
SLOW_ROCE = with_port(roce_hcas()[:1], "mlx5_0", rate_gbps=100.0)
ALIKE = (*roce_hcas()[:1], *infiniband_hcas()[1:2])
OTHER_INDEX = (*roce_hcas()[:1], roce_with((5, "25.11.128.2", "RoCE v2", "eth1"))[0].changed({"name": "mlx5_9"}))
NONE = {HCA: None, GID: None, TIMEOUT: None, QPS: None}


@pytest.mark.parametrize(
    ("hcas", "own", "expected"),
    [
        (MANAGED, {}, {IFNAME: "=eth0", HCA: EVERY.replace("mlx5_0:1,", ""), GID: "3", TIMEOUT: "20", QPS: "4"}),
        (infiniband_hcas(), {}, {HCA: EVERY, GID: None, QPS: None}),
        (BROKEN, {}, {HCA: "=mlx5_1:1"}),
        # One link layer, by its rate; InfiniBand if both are alike.
        ((*SLOW_ROCE, *infiniband_hcas()[1:3]), {}, {HCA: "=mlx5_1:1,mlx5_2:1"}),
        (ALIKE, {}, {HCA: "=mlx5_1:1"}),
        (ALIKE[::-1], {}, {HCA: "=mlx5_1:1"}),
        # No adapter that NCCL can use.
        ((), {}, {IFNAME: "=eth0", **NONE}),
        (efa_hcas(), {}, {IFNAME: "=eth0", **NONE}),
        (with_port(roce_hcas()[:1], "mlx5_0", state="DOWN"), {}, {IFNAME: "=eth0", **NONE}),
        # Adapters that need different indices are left to NCCL, unless somebody chose among them.
        (OTHER_INDEX, {}, {GID: None}),
        (OTHER_INDEX, {"NCCL_IB_HCA": "=mlx5_9"}, {GID: "5"}),
        (OTHER_INDEX, {"NCCL_IB_HCA": "^mlx5_9"}, {GID: "3"}),
        # Somebody chooses GIDs by address, or another network.
        (roce_hcas(), {"NCCL_IB_ADDR_RANGE": "10.0.0.0/8"}, {GID: None}),
        (roce_hcas(), {"NCCL_IB_ROCE_VERSION_NUM": "1"}, {GID: None}),
        (roce_hcas(), {"NCCL_IB_DISABLE": "1"}, NONE),
        (roce_hcas(), {"NCCL_NET": "Socket"}, NONE),
        (roce_hcas(), {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}, {GID: "3"}),
    ],
)
def test_what_is_advised_for_the_adapters(
    hcas: tuple[Hca, ...], own: dict[str, str], expected: dict[str, str | None]
) -> None:
    advice = advise(node(hcas), own=own)
    assert sorted(advice) == sorted(nccl_env.VARIABLES)
    assert all(each.reason for each in advice.values())
    assert {name: advice[name].value for name in expected} == expected


@pytest.mark.parametrize(
    ("hcas", "name", "words"),
    [
        (MANAGED, HCA, "mlx5_0:1 (25 of 200 Gb/s)"),
        (BROKEN, HCA, "mlx5_0:1 (cannot be used), mlx5_2:1 (cannot be used)"),
        (OTHER_INDEX, GID, "mlx5_0:1 3, mlx5_9:1 5"),
    ],
)
def test_a_reason_names_what_is_left_out(hcas: tuple[Hca, ...], name: str, words: str) -> None:
    assert words in advise(node(hcas))[name].reason


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(0, "10.0.60.3", "IB/RoCE v1", "eth0"), (1, "10.0.60.3", "RoCE v2", "eth0")], "1"),
        # Two addresses: the one that this process's interface holds, even with the higher index.
        ([(1, "192.168.7.7", "RoCE v2", "eth0.7"), (5, "10.0.60.3", "RoCE v2", "eth0")], "5"),
        # A container: what belongs to the host's interface shows an address, and is not the container's.
        ([(3, "172.16.0.1", "RoCE v2", None), (9, "25.11.128.2", "RoCE v2", "eth1")], "9"),
        # The Ray node's own address comes before another one that is held too.
        ([(2, "25.11.128.2", "RoCE v2", "eth1"), (4, "10.0.60.3", "RoCE v2", "eth0")], "4"),
        ([(2, "10.0.60.3", "RoCE v2", None)], "2"),
    ],
)
def test_the_gid_index_is_that_of_a_routed_address_held_here(
    gids: list[tuple[int, str, str, str | None]], index: str
) -> None:
    assert advise(node(roce_with(*gids)))[GID].value == index


@pytest.mark.parametrize(
    ("node_ip", "interface", "expected"),
    [
        ("10.0.60.3", None, "=eth0"),
        ("10.0.60.3", "eth4", "=eth4"),
        ("127.0.0.1", None, None),
        ("203.0.113.9", None, None),
    ],
)
def test_the_interface_is_the_ray_nodes_or_the_one_asked_for(
    node_ip: str, interface: str | None, expected: str | None
) -> None:
    assert advise(node((), node_ip=node_ip), interface=interface)[IFNAME].value == expected


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("mlx5", True),
        ("=mlx5", False),
        ("=mlx5_1", True),
        ("mlx5_1", True),
        ("=mlx5_1:1", True),
        ("=mlx5_1:2", False),
        ("=mlx5_1::0:0", True),
        ("^mlx5_1", False),
        ("^=mlx5_11", True),
        ("^mlx5_2,mlx5_3", True),
        ("", True),
    ],
)
def test_a_value_of_nccl_ib_hca_is_read_as_nccl_reads_it(text: str, taken: bool) -> None:
    hca = roce_hcas()[1]
    assert matches(text, hca, hca.ports[0]) is taken


def test_what_somebody_chose_stays(tmp_path: Path) -> None:
    environ = {**NO_FILES, "NCCL_IB_TIMEOUT": "23", "NCCL_SOCKET_IFNAME": ""}
    made = apply(node(roce_hcas()), environ=environ)
    assert set(made) == {HCA, GID}
    assert environ == {**NO_FILES, "NCCL_IB_TIMEOUT": "23", "NCCL_SOCKET_IFNAME": "", **made}
    assert apply(node(roce_hcas()), environ=environ) == {}


def test_nothing_that_both_ends_must_share_is_set_for_one() -> None:
    environ = dict(NO_FILES)
    made = apply(node(roce_hcas()), environ=environ)
    assert advise(node(roce_hcas()))[QPS].value == "4" and QPS not in environ
    assert made == {IFNAME: "=eth0", HCA: made[HCA], GID: "3", TIMEOUT: "20"}


def test_a_value_in_ncclss_own_file_stays(tmp_path: Path) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("#NCCL_IB_TIMEOUT=1\nNCCL_IB_GID_INDEX=7\n")
    environ = {**NO_FILES, "NCCL_CONF_FILE": str(conf)}
    assert GID not in apply(node(roce_hcas()), environ=environ)
    assert chosen_values(environ)[GID] == "7"
    (tmp_path / ".nccl.conf").write_text("NCCL_IB_HCA=mlx5_1\n")
    assert chosen_values({"HOME": str(tmp_path), "NCCL_IB_HCA": "mlx5_2"})[HCA] == "mlx5_2"
    assert chosen_values({"HOME": str(tmp_path)})[HCA] == "mlx5_1"


def test_a_member_that_opens_the_nccl_lane_sets_them_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl_env.VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    setup = LaneSetup(
        member="a",
        credentials=Credentials(bytes(32), 0),
        config=GroupConfig(interface="lo"),
        endpoint=lambda: node(()),
        devices=(0,),
    )
    row = registry.lane("nccl")
    make = registry.resolve(row, row.make)
    assert (make(setup).name, os.environ[IFNAME]) == ("nccl", "=lo")
    monkeypatch.setenv(IFNAME, "eth9")
    make(setup)
    assert os.environ[IFNAME] == "eth9"
