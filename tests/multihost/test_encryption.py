"""A group formed with ``tls=True``: nobody on the wire can read it, and what anybody could read is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.multihost.rig import Host, read_line, stop
from tests.multihost.session import driver

pytestmark = pytest.mark.multihost

WORDS = "words-that-only-members-may-read"
SNIFFER = Path(__file__).with_name("sniffer.py")


@pytest.mark.parametrize("how, seen", [("usual", "seen"), ("encrypted", "not seen")])
def test_who_listens_on_the_wire_reads_the_calls_of_a_group_without_tls_alone(
    two_hosts: tuple[Host, Host], how: str, seen: str
) -> None:
    a, b = two_hosts
    with driver(a, how) as asked:
        asked.answer()
        sniffer = b.start([sys.executable, str(SNIFFER), WORDS])
        try:
            assert read_line(sniffer, 20).strip() == "listening"
            assert asked.ask("double", WORDS) == WORDS * 2
            assert sniffer.stdin is not None
            sniffer.stdin.write("enough\n")
            sniffer.stdin.flush()
            assert read_line(sniffer, 20).strip() == seen
        finally:
            stop(sniffer)


def test_lanes_that_cannot_encrypt_are_left_out_between_hosts(two_hosts: tuple[Host, Host]) -> None:
    with driver(two_hosts[0], "encrypted") as asked:
        formed = asked.answer()
        assert [lane for lane, _ in formed["lanes"]["calls"]] == ["socket", "nng"]
        assert [lane for lane, _ in formed["lanes"]["cpu"]] == ["nng"]
        assert asked.ask("tensor", 2_500_000) is True
        kind, text = asked.ask("remote")
        assert kind == "LaneUnavailable" and "tls=True" in text
