"""Weights between hosts: what the host of their publishers sends, and how long many hosts take."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.multihost.rig import Host, Unavailable
from tests.multihost.session import driver

pytestmark = pytest.mark.multihost

BYTES = 64 << 20
#: Frames, acknowledgements and requests, by the share of the payload.
OVERHEAD = 1.15
#: Slow enough that wires, and not the one machine that all hosts are, take the time (megabits per second).
RATE = 300


def _members(source: Host, others: Sequence[Host], of_each: int) -> dict[str, str]:
    """Two publishers on one host, and so many readers on each of the others."""
    readers = [host.name for host in others for _ in range(of_each)]
    return dict.fromkeys(("t0", "t1"), source.name) | {f"g{number}": name for number, name in enumerate(readers)}


@pytest.mark.parametrize("publishers", [1, 2])
def test_the_other_hosts_get_the_weights_once(three_hosts: tuple[Host, ...], publishers: int) -> None:
    """By all of their readers together: two want all, or each another half."""
    source, *others = three_hosts
    sources, readers = ["t0", "t1"][:publishers], ["g0", "g1", "g2", "g3"]
    with driver(source) as asked:
        asked.ask("form", _members(source, others, 2))
        for version, halves in ((1, False), (2, True)):
            assert asked.ask("each", sources, "publish_weights", sources, version) == [version] * publishers
            before = source.sent_bytes()
            pulled = asked.ask("each", readers, "pull_weights", sources, "half" if halves else None)
            assert [found for *found, _ in pulled] == [[version, float(version)]] * 4
            sent = source.sent_bytes() - before
            print(f"{publishers} publishers, {'halves' if halves else 'all'}: {sent / BYTES:.3f} times the weights")
            assert BYTES <= sent < BYTES * OVERHEAD


def test_many_hosts_feed_one_another(eight_hosts: tuple[Host, ...]) -> None:
    source = eight_hosts[0]
    try:
        for host in eight_hosts:
            host.limit_rate(RATE)
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))
    took: dict[int, float] = {}
    with driver(source) as asked:
        asked.ask("form", _members(source, eight_hosts[1:], 1))
        for version, readers in enumerate((1, 1, 2, 4, 7), 1):  # the first time connections are made
            assert asked.ask("each", ["t0"], "publish_weights", ["t0"], version) == [version]
            before = source.sent_bytes()
            pulled = asked.ask("each", [f"g{number}" for number in range(readers)], "pull_weights", ["t0"], None)
            assert [found for *found, _ in pulled] == [[version, float(version)]] * readers
            sent, took[readers] = source.sent_bytes() - before, max(found[-1] for found in pulled)
            print(f"{readers} readers: {sent / BYTES:.3f} times the weights, {took[readers]:.2f} s")
            assert sent < 1.2 * BYTES
    assert all(seconds < took[1] * (1 + math.log2(readers)) for readers, seconds in took.items() if readers > 1), took
