"""A group over several hosts outlives processes, hosts and cables."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.multihost.rig import Host
from tests.multihost.session import Driver, driver
from tests.polling import allowed

pytestmark = pytest.mark.multihost

Hosts = tuple[Host, ...]

#: What docs/failure-model.md promises (seconds): a process's death and a host's are noticed, an actor that Ray has
#: restarted is back.
DEATH_S, POWER_S, REJOIN_S = 0.2, 1.0, 3.0


@pytest.fixture(scope="module")
def on_first(three_hosts: Hosts) -> Iterator[Driver]:
    with driver(three_hosts[0]) as asked:
        yield asked


@pytest.fixture
def asked(on_first: Driver) -> Iterator[Driver]:
    yield on_first
    on_first.ask("end")


@pytest.mark.parametrize("config", [{}, {"lanes": ["nng"]}], ids=["usual", "nng"])
def test_a_process_that_is_killed_elsewhere_is_missed_at_once(
    three_hosts: Hosts, asked: Driver, config: dict[str, Any]
) -> None:
    a, b, c = three_hosts
    asked.ask("form", {"a": a.name, "b": b.name, "c": c.name}, config)
    asked.ask("endure", "a", "b")
    asked.ask("endure", "c", "b")
    killed = b.kill(asked.ask("members")["b"][2])
    _, members, cause, told = asked.await_news("lost")
    assert members == ["b"], cause
    assert told - killed < allowed(DEATH_S)
    for caller in ("a", "c"):
        how, when = asked.ask("ended", caller, "b")
        assert how == "PeerLost"
        assert when - killed < allowed(DEATH_S)
    _, members, _, back = asked.await_news("back")
    where, name, rank, _, born = asked.ask("ask", "a", "b", "about")
    assert (where, name, rank) == (b.name, "b", 1)
    assert back - born < allowed(REJOIN_S)
    assert asked.ask("send", "c", "b", 1_000_000) is True


def test_a_host_that_loses_its_power(doomed_three: Hosts) -> None:
    """Ray believes in its actors for seconds; whoever formed the group, and the callers, do not."""
    a = doomed_three[0]
    with driver(a) as asked:
        asked.ask("form", {"a": a.name, "b": "away", "c": "away"}, {}, True)
        where = {name: asked.ask("ask", "a", name, "about")[0] for name in "bc"}
        lost = next(host for host in doomed_three if host.name == where["b"])
        names = sorted(name for name, host in where.items() if host == lost.name)
        members_before = asked.ask("members")
        for caller in ("a", "driver"):
            asked.ask("endure", caller, "b")
        off = lost.power_off()
        for caller in ("a", "driver"):
            how, when = asked.ask("ended", caller, "b")
            assert how == "PeerLost" and when - off < allowed(POWER_S)
        gone: dict[str, float] = {}
        while len(gone) < len(names):
            _, members, _, told = asked.await_news("lost")
            gone.update(dict.fromkeys(members, told - off))
        assert sorted(gone) == names and max(gone.values()) < allowed(POWER_S)
        back: dict[str, float] = {}
        while len(back) < len(names):
            _, members, _, when = asked.await_news("back")
            back.update(dict.fromkeys(members, when))
        for name in names:
            host, again, rank, _, born = asked.ask("ask", "a", name, "about")
            assert host != lost.name and (again, rank) == (name, members_before[name][0])
            assert back[name] - born < allowed(REJOIN_S), "after Ray had it again"
        others = [name for name in "abc" if name != "b"]
        for other in others:
            assert asked.ask("send", other, "b", 3_000_000) and asked.ask("send", "b", other, 3_000_000)
        asked.ask("wait_ready", 5)


def test_connections_from_a_host_without_power_end(doomed_three: Hosts) -> None:
    """Those to torchrpc's listener too, which asks for nothing; its own it keeps (docs/limits.md)."""
    a, b, _ = doomed_three

    with driver(a) as asked:
        asked.ask("form", {"a": a.name, "b": b.name})
        assert asked.ask("send", "b", "a", 1_000_000) is True
        ports = [str(port) for port in asked.ask("ask", "b", "a", "torchrpc_ports")]  # the agent runs now

        def incoming() -> int:
            lines = a.run(["ss", "-tnH", "state", "established"]).splitlines()
            return sum(line.split()[2].rpartition(":")[2] in ports for line in lines)

        assert incoming() > 0
        b.pull_cable()  # first, so that nobody hears of it
        b.power_off()
        assert asked.await_news("lost")[1] == ["b"]
        until = time.monotonic() + 30
        while there := incoming():
            assert time.monotonic() < until, f"{there} connections of a host without power"


def test_a_host_that_falls_silent_as_its_connections_close(doomed_three: Hosts) -> None:
    """No new connection can be made, and Ray says for a long time that all is well."""
    a, b, c = doomed_three
    with driver(a) as asked:
        asked.ask("form", {"a": a.name, "b": b.name, "c": c.name})
        asked.ask("endure", "a", "b")
        pid = asked.ask("members")["b"][2]
        raylet = b.run(["pgrep", "-x", "raylet"]).strip()
        b.run(["kill", "-STOP", raylet])  # so that Ray hears nothing of the death
        killed = b.kill(pid)
        b.pull_cable()
        _, members, cause, told = asked.await_news("lost")
        assert members == ["b"] and told - killed < allowed(POWER_S), cause
        assert asked.ask("state", "b") == "ALIVE"
        assert asked.ask("ended", "a", "b")[0] == "PeerLost"
        assert asked.ask("attempt", "c", "b", 5.0).startswith("PeerLost")


def test_a_pulled_cable_costs_a_call_its_deadline(three_hosts: Hosts, asked: Driver) -> None:
    a, b, c = three_hosts
    asked.ask("form", {"a": a.name, "b": b.name, "c": c.name})
    asked.ask("endure", "a", "b", 3.0)
    try:
        pulled = b.pull_cable()
        how, when = asked.ask("ended", "a", "b")
        assert how in ("RpcTimeout", "PeerLost") and when - pulled < 4
        assert asked.ask("attempt", "c", "b", 1.0).startswith(("RpcTimeout", "PeerLost"))
        assert asked.ask("attempt", "c", "a", 1.0) == "", "the others go on"
    finally:
        b.plug_in()
    asked.ask("wait_ready", 30)
    assert asked.ask("attempt", "a", "b", 20.0) == ""
    assert {name: member[1] for name, member in asked.ask("members").items()} == {"a": 0, "b": 0, "c": 0}


def test_a_partition_of_five_seconds_costs_nobody(three_hosts: Hosts, asked: Driver) -> None:
    a, b, c = three_hosts
    asked.ask("form", {"a": a.name, "b": b.name, "c": c.name, "d": c.name})
    asked.ask("endure", "a", "c")
    before = asked.ask("members")
    a.network.partition([a, b], [c])
    began = time.monotonic()
    try:
        assert asked.ask("attempt", "a", "b", 5.0) == "" and asked.ask("attempt", "b", "a", 5.0) == ""
        assert asked.ask("news", began + 5 - time.monotonic()) is None, "nobody was lost"
    finally:
        a.network.heal(c)
    for caller, target in (("a", "c"), ("c", "a"), ("b", "d"), ("d", "c")):
        assert asked.ask("attempt", caller, target, 10.0) == ""
    assert asked.ask("members") == before
    assert asked.ask("send", "a", "c", 1_000_000) is True


@pytest.mark.slow
def test_a_partition_that_outlasts_the_connections(three_hosts: Hosts, asked: Driver) -> None:
    """Whoever cannot be reached is lost to the others, and back, the same as before, once it can be."""
    a, b, c = three_hosts
    asked.ask("form", {"a": a.name, "b": b.name, "c": c.name})
    for caller, target in (("a", "c"), ("b", "c"), ("c", "a")):
        assert asked.ask("send", caller, target, 1_000_000) is True
    asked.ask("endure", "a", "c")
    before = asked.ask("members")
    cut = time.monotonic()
    a.network.partition([a, b], [c])
    try:
        _, members, cause, told = asked.await_news("lost")
        assert members == ["c"] and told - cut < 20, cause
        how, when = asked.ask("ended", "a", "c")
        assert how == "PeerLost" and when - cut < 20
        assert asked.ask("attempt", "b", "c", 5.0).startswith("PeerLost")
        assert asked.ask("attempt", "b", "a", 5.0) == ""
    finally:
        a.network.heal(c)
    healed = time.monotonic()
    _, members, _, back = asked.await_news("back")
    assert members == ["c"] and back - healed < 10
    assert asked.ask("members") == before, "the same process"
    for caller, target in (("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")):
        assert asked.ask("attempt", caller, target, 10.0) == ""
        assert asked.ask("send", caller, target, 1_000_000) is True
    asked.ask("wait_ready", 5)


def test_who_missed_a_change_catches_up(three_hosts: Hosts, asked: Driver) -> None:
    """While the third host is cut off, a member of the second ends and comes back, one is removed and one is added."""
    a, b, c = three_hosts
    asked.ask("form", {"a": a.name, "b": b.name, "c": c.name, "r": b.name})
    assert asked.ask("attempt", "c", "b", 5.0) == ""
    pid = asked.ask("members")["b"][2]
    a.network.partition([a, b], [c])
    try:
        b.kill(pid)
        assert asked.await_news("lost")[1] == ["b"]
        _, members, _, back = asked.await_news("back")
        born = asked.ask("ask", "a", "b", "about")[4]
        assert members == ["b"] and back - born < allowed(REJOIN_S)
        asked.ask("remove", ["r"])
        assert asked.ask("attempt", "a", "b", 5.0) == ""
    finally:
        a.network.heal(c)
    asked.ask("caught_up", "c", 20)
    assert asked.ask("view", "c") == asked.ask("view", "a") == [["a", 0, 0], ["b", 1, 1], ["c", 2, 0]]
    for caller, target in (("c", "b"), ("b", "c"), ("a", "c")):
        assert asked.ask("attempt", caller, target, 10.0) == ""
        assert asked.ask("send", caller, target, 1_000_000) is True


def test_torchrpc_listens_to_the_hosts_of_members_alone(three_hosts: Hosts, asked: Driver) -> None:
    a, b, c = three_hosts
    asked.ask("form", {"a": a.name, "b": b.name})
    where = [str(word) for word in asked.ask("ask", "a", "b", "door")]
    assert _knock(c, where) == "no answer"
    asked.ask("add", {"c": c.name})
    assert asked.ask("send", "c", "b", 1_000_000) is True
    # Last: TensorPipe stops listening when somebody goes without a word.
    assert _knock(c, where) == "let in"


_KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)
    print("let in")
except TimeoutError:
    print("no answer")
"""


def _knock(host: Host, where: list[str]) -> str:
    return host.run([sys.executable, "-c", _KNOCK, *where]).strip()


def test_a_member_on_another_host_joins_a_group_of_one_host(three_hosts: Hosts, asked: Driver) -> None:
    a, b, _ = three_hosts
    asked.ask("form", {"a": a.name, "b": a.name})
    assert asked.ask("attempt", "a", "b", 5.0) == ""
    assert asked.ask("add", {"c": b.name}) == [2]
    for caller, target in (("a", "c"), ("c", "a"), ("c", "b"), ("b", "c"), ("a", "b")):
        assert asked.ask("attempt", caller, target, 5.0) == ""
        assert asked.ask("send", caller, target, 2_000_000) is True
    killed = b.kill(asked.ask("members")["c"][2])
    _, members, _, told = asked.await_news("lost")
    assert members == ["c"] and told - killed < allowed(DEATH_S)
    asked.await_news("back")
    assert asked.ask("send", "b", "c", 2_000_000) is True
