"""What NCCL is told, from a process's evidence, and that nobody's own choice is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raytorchrpc import GroupConfig
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.nccl import lane as nccl
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


def values(endpoint: Endpoint, **own: str) -> dict[str, str | None]:
    return {name: advice.value for name, advice in advise(endpoint, own=own).items()}


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


def test_the_public_node_of_nine_adapters() -> None:
    hcas = with_port(roce_hcas(), "mlx5_0", rate_gbps=25.0)  # for management, behind the Ray node's address
    assert values(node(hcas)) == {
        IFNAME: "=eth0",
        HCA: "=" + ",".join(f"mlx5_{number}:1" for number in range(1, 9)),
        GID: "3",
        TIMEOUT: "20",
        QPS: "4",
    }
    assert "mlx5_0:1 (25 of 200 Gb/s)" in advise(node(hcas))[HCA].reason


def test_infiniband_needs_no_gid_index_and_one_queue_pair() -> None:
    found = values(node(infiniband_hcas()))
    assert (found[GID], found[QPS]) == (None, None)
    assert found[HCA] == "=" + ",".join(f"mlx5_{number}:1" for number in range(9))


def test_ports_that_cannot_be_used_are_left_out() -> None:
    hcas = with_port(infiniband_hcas()[:3], "mlx5_0", state="DOWN")
    hcas = (*hcas[:2], hcas[2].changed({"verbs_device": False}))
    advice = advise(node(hcas))[HCA]
    assert advice.value == "=mlx5_1:1"
    assert "mlx5_0:1 (cannot be used), mlx5_2:1 (cannot be used)" in advice.reason


def test_one_link_layer_is_chosen_by_its_rate() -> None:
    mixed = (*with_port(roce_hcas()[:1], "mlx5_0", rate_gbps=100.0), *infiniband_hcas()[1:3])
    assert values(node(mixed))[HCA] == "=mlx5_1:1,mlx5_2:1"
    alike = (*roce_hcas()[:1], *infiniband_hcas()[1:2])
    assert values(node(alike))[HCA] == values(node(tuple(reversed(alike))))[HCA] == "=mlx5_1:1"


@pytest.mark.parametrize("hcas", [(), efa_hcas(), with_port(roce_hcas()[:1], "mlx5_0", state="DOWN")])
def test_without_an_adapter_for_nccl_only_the_interface_is_named(hcas: tuple[Hca, ...]) -> None:
    assert values(node(hcas)) == {IFNAME: "=eth0", HCA: None, GID: None, TIMEOUT: None, QPS: None}


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
    assert values(node(roce_with(*gids)))[GID] == index


def test_adapters_that_need_different_indices_are_left_to_nccl() -> None:
    other = roce_with((5, "25.11.128.2", "RoCE v2", "eth1"))[0].changed({"name": "mlx5_9"})
    advice = advise(node((*roce_hcas()[:1], other)))[GID]
    assert advice.value is None
    assert "mlx5_0:1 3, mlx5_9:1 5" in advice.reason


def test_the_gid_index_follows_the_adapters_that_somebody_chose() -> None:
    other = roce_with((5, "25.11.128.2", "RoCE v2", "eth1"))[0].changed({"name": "mlx5_9"})
    hcas = (*roce_hcas()[:1], other)
    assert values(node(hcas), NCCL_IB_HCA="=mlx5_9")[GID] == "5"
    assert values(node(hcas), NCCL_IB_HCA="^mlx5_9")[GID] == "3"


@pytest.mark.parametrize(("name", "text"), [("NCCL_IB_ADDR_RANGE", "10.0.0.0/8"), ("NCCL_IB_ROCE_VERSION_NUM", "1")])
def test_whoever_chooses_gids_by_address_is_left_alone(name: str, text: str) -> None:
    assert values(node(roce_hcas()), **{name: text})[GID] is None


def test_where_nccl_is_sent_elsewhere_nothing_is_said_of_adapters() -> None:
    assert values(node(roce_hcas()), NCCL_IB_DISABLE="1")[HCA] is None
    assert values(node(roce_hcas()), NCCL_NET="Socket")[GID] is None
    assert values(node(roce_hcas()), NCCL_IB_DISABLE="0", NCCL_NET="IB")[GID] == "3"


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


def test_advice_is_given_for_every_variable_with_its_reason() -> None:
    for hcas in ((), roce_hcas(), infiniband_hcas(), efa_hcas()):
        advice = advise(node(hcas))
        assert tuple(sorted(advice)) == tuple(sorted(nccl_env.VARIABLES))
        assert all(each.reason for each in advice.values())


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
    lane = nccl.make(setup)
    assert (lane.name, os.environ[IFNAME]) == ("nccl", "=lo")
    monkeypatch.setenv(IFNAME, "eth9")
    nccl.make(setup)
    assert os.environ[IFNAME] == "eth9"
