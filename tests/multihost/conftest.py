"""Two hosts with one Ray between them, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multihost.rig import Host, Unavailable, hosts

#: Ray's own start on a host (seconds): about four, more on a busy machine.
START_S = 60.0
STORE_BYTES = 400_000_000
_QUIET = {
    "RAY_AUTH_MODE": "disabled",
    # A lost host is noticed in seconds instead of half a minute.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "10",
}


def start_ray(head: Host, *others: Host, store_bytes: int = STORE_BYTES) -> str:
    """One cluster over these hosts; returns its address."""
    common = ["--num-cpus=4", f"--object-store-memory={store_bytes}", "--disable-usage-stats"]
    first = ["--head", "--port=6379", "--include-dashboard=false"]
    address = f"{head.address}:6379"
    head.run(["ray", "start", *first, f"--node-ip-address={head.address}", *common], START_S, _QUIET)
    for host in others:
        joining = ["ray", "start", f"--address={address}", f"--node-ip-address={host.address}", *common]
        host.run(joining, START_S, _QUIET)
    return address


def build() -> Iterator[tuple[Host, Host]]:
    """Skips, with the kernel's reason, where hosts cannot be built."""
    made = hosts(2)
    try:
        a, b = made.__enter__()
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))
    try:
        start_ray(a, b)
        yield a, b
    finally:
        made.__exit__(None, None, None)


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Nobody may break these."""
    yield from build()


@pytest.fixture
def doomed_hosts() -> Iterator[tuple[Host, Host]]:
    """One test's own."""
    yield from build()
