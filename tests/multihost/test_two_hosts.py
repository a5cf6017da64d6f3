"""A group across a wire: how it is joined, what crosses, and what a death on the other host looks like."""

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


def test_calls_and_tensors_between_two_hosts(two_hosts: Hosts) -> None:
    a, b = two_hosts
    with driver(a, "usual") as asked:
        formed = asked.answer()
        assert formed["members"] == 2
        assert formed["lanes"]["calls"][0] == ["socket", "tcp socket"]
        first, how = formed["lanes"]["cpu"][0]
        assert first == "torchrpc" and how.startswith("torchrpc over uv"), formed
        assert asked.ask("call") == [42, "host-2", "b"]
        _check_tensor(a, b, asked)
        assert asked.ask("stats")["torchrpc"] > 10_000_000


@pytest.mark.parametrize("how", [{"own_name": "127.0.1.1"}, {"user": True}], ids=["debian", "without-root"])
def test_a_group_where_hosts_take_their_own_name_for_loopback_and_where_nobody_is_root(how: dict[str, Any]) -> None:
    with given(2, **how) as (a, b), driver(a, "usual") as asked:
        assert asked.answer()["members"] == 2
        assert asked.ask("call") == [42, "host-2", "b"]
        _check_tensor(a, b, asked)


def test_nng_alone_between_two_hosts(two_hosts: Hosts) -> None:
    a, b = two_hosts
    with driver(a, "by_nng") as asked:
        formed = asked.answer()
        assert {lane for lanes in formed["lanes"].values() for lane, _ in lanes} == {"nng"}
        assert asked.ask("call") == [42, "host-2", "b"]
        _check_tensor(a, b, asked)
        assert set(asked.ask("stats")) == {"nng"}


def _check_tensor(a: Host, b: Host, asked: Driver) -> None:
    """10 MB go and come back, equal, and by the wire: nothing else carries them, and nothing carries them twice."""
    count = 2_500_000
    before = a.sent_bytes(), b.sent_bytes()
    assert asked.ask("tensor", count) is True
    for sent, was in zip((a.sent_bytes(), b.sent_bytes()), before, strict=True):
        assert 4 * count < sent - was < 8 * count


@pytest.mark.parametrize("how", ["usual", "by_nng"])
def test_a_member_that_dies_on_the_other_host_is_lost_at_once(two_hosts: Hosts, how: str) -> None:
    with driver(two_hosts[0], how) as asked:
        asked.answer()
        first, after, seconds = asked.ask("lose")
        assert (first, after) == ("PeerLost", "PeerLost")
        assert seconds < 2


def test_a_host_without_power_takes_its_members_along_at_once(doomed_hosts: Hosts) -> None:
    a, b = doomed_hosts
    with driver(a, "power_off") as asked:
        assert asked.answer() == "pull"
        b.power_off()
        first, after, seconds = asked.answer()
        assert (first, after) == ("PeerLost", "PeerLost")
        assert seconds < 5
