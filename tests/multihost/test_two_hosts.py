"""A group across a wire: how it is joined, and what crosses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multihost.conftest import given
from tests.multihost.rig import Host
from tests.multihost.session import Driver, driver

pytestmark = pytest.mark.multihost

Hosts = tuple[Host, Host]


def test_hosts_share_nothing_that_says_one_host(two_hosts: Hosts) -> None:
    a, b = two_hosts
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/hostname"):
        assert len({host.run(["cat", file]) for host in (a, b)}) == 2, file
    for space in ("net", "mnt", "pid", "ipc", "uts"):
        assert len({host.run(["readlink", f"/proc/1/ns/{space}"]) for host in (a, b)}) == 2, space
    a.run(["touch", "/dev/shm/mine", "/tmp/mine"])
    assert "mine" not in b.run(["ls", "/dev/shm", "/tmp"])
    assert "default" not in a.run(["ip", "route"])


def test_calls_and_tensors_between_two_hosts(two_hosts: Hosts, asked: Driver) -> None:
    _check(*two_hosts, asked)
    assert asked.ask("lanes", "a", "b", "calls")[0] == ["socket", "tcp socket"]
    first, how = asked.ask("lanes", "a", "b", "cpu")[0]
    assert first == "torchrpc" and how.startswith("torchrpc over uv"), how
    assert asked.ask("sent", "a")["torchrpc"] > 10_000_000


@pytest.mark.parametrize("how", [{"own_name": "127.0.1.1"}, {"user": True}], ids=["debian", "without-root"])
def test_a_group_where_hosts_take_their_own_name_for_loopback_and_where_nobody_is_root(how: dict[str, Any]) -> None:
    with given(2, **how) as (a, b), driver(a) as asked:
        _check(a, b, asked)


def test_nng_alone_between_two_hosts(two_hosts: Hosts, asked: Driver) -> None:
    _check(*two_hosts, asked, lanes=["nng"])
    assert {lane for traffic in ("calls", "cpu") for lane, _ in asked.ask("lanes", "a", "b", traffic)} == {"nng"}
    assert set(asked.ask("sent", "a")) == {"nng"}


def _check(a: Host, b: Host, asked: Driver, **config: Any) -> None:
    """A call, and 10 MB that go and come back, equal, and by the wire: nothing else carries them, and nothing carries
    them twice.
    """
    assert asked.ask("form", {"a": a.name, "b": b.name}, config) == ["a", "b"]
    assert asked.ask("ask", "a", "b", "about")[:2] == ["host-2", "b"]
    count = 2_500_000
    before = a.sent_bytes(), b.sent_bytes()
    assert asked.ask("send", "a", "b", count) is True
    for sent, was in zip((a.sent_bytes(), b.sent_bytes()), before, strict=True):
        assert 4 * count < sent - was < 8 * count
