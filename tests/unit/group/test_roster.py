"""What a roster keeps when members come in, who may be in one group, and what forming costs."""

from __future__ import annotations

import os
import pickle
import time
from contextlib import nullcontext
from typing import Any

import pytest

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.group.messages import AgentIdentity, JoinedProcess, Listening, Owner, Prepared, Probe, packed
from raytorchrpc.group.roster import Roster
from raytorchrpc.topology.endpoint import Endpoint
from tests.unit import clusters
from tests.unit.clusters import Cluster

#: A rank that no member has.
CLIENT = 1 << 32


def probes_of(cluster: Cluster, life: int = 0) -> dict[str, Probe]:
    return {
        name: Probe(endpoint, f"node-{endpoint.boot_id}", 1000 * life + rank, (), None, None)
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


def test_members_stay_as_they_are_when_others_come() -> None:
    """Their agents are those that their processes prepared, so both ends decide a route alike."""
    cluster = clusters.hosts_of(2, 4)
    here = {name: end for name, end in cluster.items() if end.boot_id == next(iter(cluster.values())).boot_id}
    before, _ = formed(here)
    new = {name: probe for name, probe in probes_of(cluster).items() if name not in here}
    after = before.admit(dict.fromkeys(new), new)
    assert after.plan.members == tuple(after.records) and len(after.records) == 8
    assert {name: after.plan.kind(name) for name in here} == {name: before.plan.kind(name) for name in here}
    left = after.without(here)
    assert left.plan.members == tuple(new) and left.plan.kind("worker_5") == after.plan.kind("worker_5")


def test_a_member_whose_admission_failed_is_as_before() -> None:
    cluster = clusters.hosts_of(1, 4)
    before, _ = formed(cluster)
    back = {name: probes_of(cluster, life=1)[name] for name in ("worker_1", "worker_2")}
    attempt = before.admit(dict.fromkeys(back), back).with_former(before, ["worker_2"])
    assert [record.member.incarnation for record in attempt.records.values()] == [0, 1, 0, 0]
    assert attempt.records["worker_2"] == before.records["worker_2"]
    again = attempt.admit({"worker_2": None}, {"worker_2": back["worker_2"]})
    assert again.records["worker_2"].member.incarnation == 2, "its process may have heard that it is 1"


def test_an_actor_has_not_been_restarted_because_an_attempt_to_add_it_failed() -> None:
    cluster = clusters.hosts_of(1, 4)
    roster, _ = formed({name: cluster[name] for name in ("worker_0", "worker_1")})
    new = {"worker_2": probes_of(cluster)["worker_2"]}
    attempt = roster.admit(dict.fromkeys(new), new)
    again = roster.after_failure(attempt, new).admit(dict.fromkeys(new), new)
    assert again.records["worker_2"].process == (3, 0)


def test_members_that_are_admitted_at_once_have_to_suit_each_other() -> None:
    cluster = clusters.hosts_of(1, 4)
    roster, _ = formed({name: cluster[name] for name in ("worker_0", "worker_1")})
    probes = probes_of(cluster)
    one, other = ({name: probes[name]} for name in ("worker_2", "worker_3"))
    first = roster.admit(dict.fromkeys(one), one)
    taken, beside = roster.after_failure(first, one), roster.with_members(first, one)
    second = taken.admit(dict.fromkeys(other), other, beside)
    assert {*second.records} == {"worker_0", "worker_1", "worker_3"}, "the other one may not come"
    member, before = second.records["worker_3"].member, first.records["worker_2"].member
    assert (before.rank, member.rank) == (2, 3) and member.worker_id != before.worker_id
    agent = AgentIdentity("rtr-of-an-earlier-group", before.worker_id)
    known = {"worker_3": probes["worker_3"]._replace(agent=agent)}
    assert taken.admit(dict.fromkeys(known), known, beside).records["worker_3"].renew_agent, "both cannot keep an id"
    endpoint = probes["worker_3"].endpoint
    wrong = {"worker_3": probes["worker_3"]._replace(endpoint=endpoint.changed({"torch_version": "1.0"}))}
    alone = Roster("default", GroupConfig(), Owner("job", None), endpoint)
    with pytest.raises(BootstrapError, match=r"worker_\d has 1\.0, worker_2 has"):
        alone.admit(dict.fromkeys(wrong), wrong, alone.admit(dict.fromkeys(one), one))


def test_a_client_sees_itself_in_the_group_and_no_member_does() -> None:
    cluster = clusters.hosts_of(2, 4)
    roster, _ = formed({name: end for name, end in cluster.items() if name != "worker_7"})
    seen = roster.as_seen_by("client", JoinedProcess("key", None), probes_of(cluster)["worker_7"], CLIENT)
    assert seen.plan.members == (*roster.plan.members, "client")
    assert seen.records["client"].member.rank == CLIENT and not seen.records["client"].starts_agent
    assert set(seen.plan.far_from("client")) == {f"worker_{number}" for number in range(4)}
    kept = roster.with_client("client", seen)
    assert kept.description == roster.description and kept.record("client") == seen.records["client"]
    assert not kept.reached_by_tcp("worker_0") and kept.reached_by_tcp("client")
    assert kept.without(["client"]).clients == {}
    new = {"worker_7": probes_of(cluster)["worker_7"]}
    assert kept.admit(dict.fromkeys(new), new).records["worker_7"].member.rank == 7


def cost_of_forming(n: int) -> dict[str, float]:
    """Seconds to plan a group on 16 hosts, and bytes to send: one description for each host, a part for each member."""
    began = time.thread_time()
    roster, prepared = formed(clusters.hosts_of(16, n // 16))
    planned = time.thread_time() - began
    shared = packed(roster.description), packed(Listening("", "", prepared, 1.0))
    parts = [pickle.dumps(roster.spec(name)) for name in roster.records]
    return {"seconds": planned, "bytes": 16 * sum(map(len, shared)) + sum(map(len, parts))}


def test_forming_a_group_costs_time_and_bytes_in_proportion_to_its_members() -> None:
    sizes = (192, 768, 3072)
    runs: dict[int, list[dict[str, float]]] = {n: [] for n in sizes}
    for _ in range(8):
        for n in sizes:
            runs[n].append(cost_of_forming(n))
        slopes = {key: clusters.slope({n: min(cost[key] for cost in costs) for n, costs in runs.items()})
                  for key in ("seconds", "bytes")}  # fmt: skip
        # A busy machine takes longer for some runs, and the caches of a processor do not hold the larger groups. A loop
        # over all pairs would give 2.
        if slopes["seconds"] <= 1.3 and slopes["bytes"] <= 1.1:
            return
    pytest.fail(f"costs grow faster than the group: {slopes}")


# --- users ----------------------------------------------------------------------------------------------------------


def user(number: int, uid: int, **changes: Any) -> Endpoint:
    return clusters.member(number, uid=uid, **changes)


OTHERS = {"namespaces": clusters.member(1).namespaces | {"user": "another"}}


@pytest.mark.parametrize(
    ("second", "watcher", "across_users", "said"),
    [
        (user(1, 1001), user(0, 1000), False, r"a \(uid 1000\) and b \(uid 1001\).*across_users=True"),
        (user(1, 1001), user(0, 1000), True, None),
        (user(1, 1000), user(2, 0), False, r"a \(uid 1000\) and the process that forms the group \(uid 0\)"),
        (user(1, 1000, **OTHERS), user(0, 1000), False, "user namespaces"),
        (user(1, 1001, host=1), user(0, 1000), False, None),  # by TCP
    ],
    ids=["two users", "a group across users", "who forms it", "user namespaces", "users of two hosts"],
)
def test_users_of_one_host_need_a_group_formed_across_users(
    second: Endpoint, watcher: Endpoint, across_users: bool, said: str | None
) -> None:
    probes = probes_of({"a": user(0, 1000), "b": second})
    roster = Roster("default", GroupConfig(across_users=across_users), Owner("job", None), watcher)
    with nullcontext() if said is None else pytest.raises(ConfigurationError, match=said):
        assert len(roster.admit(dict.fromkeys(probes), probes).records) == 2


def test_a_rank_that_some_member_may_know_is_not_given_again() -> None:
    """Members refuse for good whom an attempt that failed had them remove."""
    roster, _ = formed(clusters.hosts_of(1, 2))
    late = {"late": next(iter(probes_of(clusters.hosts_of(1, 1)).values()))}
    attempt = roster.admit({"late": None}, late)
    again = roster.after_failure(attempt, ["late"]).admit({"late": None}, late)
    assert again.records["late"].member.rank > attempt.records["late"].member.rank
