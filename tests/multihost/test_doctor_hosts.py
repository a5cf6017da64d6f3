"""``raytorchrpc doctor --cluster``, run on one of two hosts."""

from __future__ import annotations

import sys

import pytest

from raytorchrpc.doctor import Report
from tests.multihost.conftest import given
from tests.multihost.rig import Host

pytestmark = pytest.mark.multihost


def test_each_host_of_a_cluster_is_looked_at(two_hosts: tuple[Host, Host]) -> None:
    report = examined(two_hosts[0])
    assert {node.evidence.endpoint.node_ip for node in report.nodes} == {host.address for host in two_hosts}
    assert [node.evidence.hosts for node in report.nodes] == [2, 2]
    assert len({node.evidence.endpoint.boot_id for node in report.nodes}) == 2
    assert own_names(report) == {"ok"} and report.healthy()
    (routes,) = report.together
    assert routes.id == "together-routes" and "calls: socket (tcp socket)" in routes.seen


def test_hosts_that_take_their_own_name_for_loopback_are_warned_of() -> None:
    with given(2, own_name="127.0.1.1") as (a, _):
        report = examined(a)
    assert own_names(report) == {"warning"}
    assert report.healthy() and not report.healthy(strict=True)


def own_names(report: Report) -> set[str]:
    return {each.level for node in report.nodes for each in node.findings if each.id.startswith("own-name")}


def examined(host: Host) -> Report:
    command = [sys.executable, "-m", "raytorchrpc.doctor", "--cluster", f"--address={host.address}:6379", "--json"]
    return Report.model_validate_json(host.run(command, 100, {"RAY_AUTH_MODE": "disabled"}))
