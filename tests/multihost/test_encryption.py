"""A group formed with ``tls=True``: nobody on the wire can read it, and what anybody could read is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.multihost.rig import Host, read_line, stop
from tests.multihost.session import Driver

pytestmark = pytest.mark.multihost

WORDS = "words-that-only-members-may-read"
SNIFFER = Path(__file__).with_name("sniffer.py")


@pytest.mark.parametrize("tls, seen", [(False, "seen"), (True, "not seen")])
def test_who_listens_on_the_wire_reads_the_calls_of_a_group_without_tls_alone(
    two_hosts: tuple[Host, Host], asked: Driver, tls: bool, seen: str
) -> None:
    a, b = two_hosts
    asked.ask("form", {"a": a.name, "b": b.name}, {"tls": tls})
    sniffer = b.start([sys.executable, str(SNIFFER), WORDS])
    try:
        assert read_line(sniffer, 20).strip() == "listening"
        assert asked.ask("ask", "a", "b", "double", WORDS) == WORDS * 2
        assert sniffer.stdin is not None
        sniffer.stdin.write("enough\n")
        sniffer.stdin.flush()
        assert read_line(sniffer, 20).strip() == seen
    finally:
        stop(sniffer)


def test_lanes_that_cannot_encrypt_are_left_out_between_hosts(two_hosts: tuple[Host, Host], asked: Driver) -> None:
    a, b = two_hosts
    asked.ask("form", {"a": a.name, "b": b.name}, {"tls": True})
    assert [lane for lane, _ in asked.ask("lanes", "a", "b", "calls")] == ["socket", "nng"]
    assert [lane for lane, _ in asked.ask("lanes", "a", "b", "cpu")] == ["socket"]
    assert asked.ask("send", "a", "b", 2_500_000) is True
    kind, text = asked.ask("run", "a", "refused", "b")
    assert kind == "LaneUnavailable" and "tls=True" in text
