"""Children of a member join a group whose supervisor is on another host."""

from __future__ import annotations

import pytest

from tests.multihost.rig import Host
from tests.multihost.session import driver
from tests.polling import allowed

pytestmark = pytest.mark.multihost

Hosts = tuple[Host, ...]

#: A host that is silent is noticed, and a process that cannot be reached is given up (docs/failure-model.md, seconds).
SILENCE_S, GONE_S = 20.0, 60.0


def test_a_child_on_another_host_joins_and_dies(three_hosts: Hosts) -> None:
    """Its host comes to the group when the supervisor listens for its own host alone."""
    a, b, c = three_hosts
    with driver(a) as asked:
        asked.ask("form", {"a": a.name})
        asked.ask("add", {"b": b.name, "c": c.name})
        asked.ask("run", "b", "have_child_join", "engine")
        for caller in "abc":
            assert asked.ask("send", caller, "engine", 1_000_000) is True
        killed = b.kill(asked.ask("members")["engine"][2])
        _, members, cause, told = asked.await_news("dead")
        assert (members, cause) == (["engine"], "its process ended") and told - killed < allowed(1.0)
        asked.ask("run", "c", "have_child_join", "engine")
        assert asked.ask("send", "a", "engine", 1000) is True
        asked.ask("end")


@pytest.mark.slow
def test_a_child_whose_host_loses_its_power_is_given_up(doomed_three: Hosts) -> None:
    """Ray does not know of it, so nobody can say that it has ended."""
    a = doomed_three[0]
    with driver(a) as asked:
        asked.ask("form", {"a": a.name, "b": "away"})
        host = asked.ask("ask", "a", "b", "about")[0]
        asked.ask("run", "b", "have_child_join", "engine")
        lost = next(each for each in doomed_three if each.name == host)
        lost.pull_cable()  # first, so that nobody hears of it
        off = lost.power_off()
        _, members, cause, told = asked.await_news("dead", timeout_s=GONE_S + allowed(SILENCE_S) + 30)
        assert members == ["engine"] and "could not be reached for 60 s" in cause
        assert GONE_S <= told - off < GONE_S + allowed(SILENCE_S)
        asked.ask("run", "b", "have_child_join", "engine")
        assert asked.ask("send", "a", "engine", 1000) is True
