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
