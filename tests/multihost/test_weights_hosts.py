"""Weights between hosts: what the host of their publishers sends."""

from __future__ import annotations

import pytest

from tests.multihost.rig import Host
from tests.multihost.session import driver

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(240)]

BYTES = 64 << 20
#: Frames, acknowledgements and requests, by the share of the payload.
OVERHEAD = 1.15


@pytest.mark.parametrize("publishers", [1, 2])
def test_each_other_host_gets_the_weights_once(three_hosts: tuple[Host, ...], publishers: int) -> None:
    """By all of its readers together: two want all, or each another half."""
    source = three_hosts[0]
    with driver(source, "serve", module="weights") as asked:
        assert asked.answer() == 6
        for version, halves in ((1, False), (2, True)):
            assert asked.ask("publish", publishers, version) == [version] * publishers
            before = source.sent_bytes()
            assert asked.ask("pull", publishers, halves) == [[version, float(version)]] * 4
            sent = source.sent_bytes() - before
            print(f"{publishers} publishers, {'halves' if halves else 'all'}: {sent / BYTES:.3f} times the weights")
            assert 2 * BYTES <= sent < 2 * BYTES * OVERHEAD
