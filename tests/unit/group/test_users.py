"""A group of several users of one host is formed on purpose, or not at all."""

from __future__ import annotations

import pytest

from raytorchrpc.calls.rejoin import Owner
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.group.roster import Roster
from raytorchrpc.membership.messages import Probe
from raytorchrpc.topology.endpoint import Endpoint
from tests.unit import clusters


def form(first: Endpoint, second: Endpoint, watcher: Endpoint, across_users: bool = False) -> Roster:
    endpoints = {"a": first, "b": second}
    probes = {
        name: Probe(endpoint, f"node-{endpoint.boot_id}", rank, None, None, None, None, None)
        for rank, (name, endpoint) in enumerate(endpoints.items())
    }
    roster = Roster("default", GroupConfig(across_users=across_users), Owner("job", None), watcher)
    return roster.admit(dict.fromkeys(probes), probes)


def test_members_of_two_users_on_one_host_need_a_group_formed_across_users() -> None:
    first, other = clusters.member(0, uid=1000), clusters.member(1, uid=1001)
    with pytest.raises(ConfigurationError, match=r"a \(uid 1000\) and b \(uid 1001\).*across_users=True"):
        form(first, other, first)
    assert len(form(first, other, first, across_users=True).records) == 2


def test_the_process_that_forms_the_group_counts_too() -> None:
    first, second = clusters.member(0, uid=1000), clusters.member(1, uid=1000)
    with pytest.raises(ConfigurationError, match=r"a \(uid 1000\) and the process that forms the group \(uid 0\)"):
        form(first, second, clusters.member(2, uid=0))


def test_members_of_two_user_namespaces_count_as_two_users() -> None:
    first = clusters.member(0, uid=0)
    inside = clusters.member(1, uid=0)
    inside = inside.changed({"namespaces": {**inside.namespaces, "user": "another"}})
    with pytest.raises(ConfigurationError, match="user namespaces"):
        form(first, inside, first)


def test_users_of_different_hosts_connect_by_tcp_and_need_nothing() -> None:
    first, far = clusters.member(0, uid=1000), clusters.member(1, host=1, uid=1001)
    assert len(form(first, far, first).records) == 2
