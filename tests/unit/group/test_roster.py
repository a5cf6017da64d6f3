"""What members are told when others come in, who may be in one group, and the law that ``benchmarks scale`` fits."""

from __future__ import annotations

import itertools
import os
import pickle

import pytest

from benchmarks import scale
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.group.roster import GroupState, Roster
from raytorchrpc.membership.messages import AgentIdentity, Owner, Prepared, Probe, Table
from raytorchrpc.topology.endpoint import Endpoint
from tests.unit import clusters
from tests.unit.clusters import Cluster


def probes_of(cluster: Cluster, life: int = 0) -> dict[str, Probe]:
    return {
        name: Probe(endpoint, f"node-{endpoint.boot_id}", 1000 * life + rank, None, None, None, None, None)
        for rank, (name, endpoint) in enumerate(cluster.items())
    }


def prepared_of(roster: Roster) -> dict[str, Prepared]:
    return {
        name: Prepared(
            AgentIdentity(record.member.rpc_name, record.member.worker_id),
            {"socket": f"{record.member.rank}.{record.member.incarnation} {os.urandom(12).hex()}"},
            {},
            record.probe.pid,
        )
        for name, record in roster.records.items()
    }


def formed(cluster: Cluster) -> tuple[Roster, dict[str, Prepared]]:
    roster = Roster("default", GroupConfig(), Owner("job", None), next(iter(cluster.values())))
    roster = roster.admit(dict.fromkeys(cluster), probes_of(cluster))
    return roster, prepared_of(roster)


def same(one: Table, other: Table) -> None:
    assert one.info.members == other.info.members
    mine, its = one.info.plan, other.info.plan
    assert mine.members == its.members
    assert mine.agents == its.agents
    for a, b in itertools.combinations(mine.members, 2):
        assert mine.route(a, b) == its.route(a, b)
        assert mine.device_map(a, b) == its.device_map(a, b)
    assert one.peers == other.peers


@pytest.mark.parametrize("who", ["back", "new"])
def test_what_a_member_is_told_of_those_who_come_is_all_it_misses(who: str) -> None:
    cluster = clusters.hosts_of(2, 4)
    coming = ("worker_3", "worker_5")
    first = cluster if who == "back" else {name: end for name, end in cluster.items() if name not in coming}
    roster, prepared = formed(first)
    known = roster.table(roster.info(prepared), prepared)
    again = roster.admit(dict.fromkeys(coming), {name: probes_of(cluster, life=1)[name] for name in coming})
    everybody = {**prepared_of(again), **{name: prepared[name] for name in first if name not in coming}}
    info = again.info(everybody)
    for name in again.records:
        if name not in coming:
            told = again.arrival(name, info, everybody, coming)
            assert {member.name for member in told.table.info.members} == set(coming)
            same(known.merged(told.table), again.table(info, everybody))


def test_a_guest_reaches_members_on_other_hosts_by_tcp() -> None:
    cluster = clusters.hosts_of(2, 4)
    roster, prepared = formed(cluster)
    state = GroupState(roster, roster.info(prepared), prepared)
    for name, endpoint in cluster.items():
        contacts = state.directory(endpoint).contacts
        near = {other for other, its in cluster.items() if its.boot_id == endpoint.boot_id}
        assert {other for other, contact in contacts.items() if not contact.by_tcp} == near
        assert contacts[name].address == prepared[name].addresses["socket"]


def test_what_a_member_is_told_does_not_grow_with_those_who_are_there() -> None:
    told = {}
    for hosts in (1, 8):
        roster, prepared = formed(clusters.hosts_of(hosts, 8))
        arrival = roster.arrival("worker_1", roster.info(prepared), prepared, ("worker_0",))
        told[hosts] = len(pickle.dumps(arrival))
    assert told[8] < 1.2 * told[1]


@pytest.mark.parametrize("gpus", [0, 1], ids=["without GPUs", "a GPU each"])
def test_forming_a_group_costs_time_and_bytes_in_proportion_to_its_members(gpus: int) -> None:
    me = clusters.member(0, cuda=bool(gpus), gpus=clusters.a100s(gpus))
    sizes = (200, 800, 3200)
    runs = {n: [scale.simulate(me, n, 16) for _ in range(2)] for n in sizes}
    for figure in runs[sizes[0]][0].keys() - {"members", "hosts"}:
        least = {n: min(run[figure] for run in its) for n, its in runs.items()}
        assert scale.slope(least) <= 1.1, (figure, least)


@pytest.mark.parametrize(
    ("terms", "dominant"), [((3.0, 0.0, 0.0), "constant"), ((1.0, 0.5, 0.0), "n"), ((2.0, 0.1, 0.01), "n^2")]
)
def test_a_law_is_found_again(terms: tuple[float, float, float], dominant: str) -> None:
    a, b, c = terms
    found = scale.law({n: a + b * n + c * n * n for n in (8, 16, 32, 64)})
    assert found[:3] == pytest.approx(terms, abs=1e-6)
    assert found.error < 1e-6
    assert found.dominant(1000) == dominant


def test_a_law_has_no_negative_term() -> None:
    found = scale.law({8: 5.0, 16: 4.0, 32: 3.0, 64: 2.0})
    assert min(found[:3]) >= 0
    assert found.error > 0.1


# --- users ----------------------------------------------------------------------------------------------------------


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


def test_a_rank_that_some_member_may_know_is_not_given_again() -> None:
    """Members refuse for good whom an attempt that failed had them remove."""
    roster, _ = formed(clusters.hosts_of(1, 2))
    late = {"late": next(iter(probes_of(clusters.hosts_of(1, 1)).values()))}
    attempt = roster.admit({"late": None}, late)
    again = roster.after_failure(attempt, ["late"]).admit({"late": None}, late)
    assert again.records["late"].member.rank > attempt.records["late"].member.rank
