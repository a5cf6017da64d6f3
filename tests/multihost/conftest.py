"""Hosts with one Ray between them, for all tests here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.multihost.rig import Host, Unavailable, hosts
from tests.multihost.session import Driver, driver

#: Ray's own start on a host (seconds): about four, more on a busy machine.
START_S = 90.0
STORE_BYTES = 400_000_000


def start_ray(
    *hosts: Host,
    store_bytes: int = STORE_BYTES,
    failures: int = 10,
    cpus: int = 4,
    token: str | None = None,
    head: Host | None = None,
) -> str:
    """One cluster over these hosts, the first its head; returns its address. ``head``: where it is already, to join.

    ``failures``: health checks in a row, one every half second, by which Ray gives up a host that is silent: each
    waits for a second, so the default outlasts a partition of some seconds. An actor is placed by the resources that
    hosts have: one of the host's own name, and "away" on all but the head. ``token``: turns token authentication on,
    and the job server, which listens on the head's address at port 8265.
    """
    settings = {
        **({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}),
        # A lost host is noticed in seconds instead of half a minute.
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": str(failures),
        # Nobody is to be killed because the one machine that all hosts are runs short of memory.
        "RAY_memory_monitor_refresh_ms": "0",
    }
    common = [f"--num-cpus={cpus}", f"--object-store-memory={store_bytes}", "--disable-usage-stats"]
    first = None if head else hosts[0]
    others = hosts if head else hosts[1:]
    address = f"{(head or hosts[0]).address}:6379"

    def command(host: Host, *words: str, **resources: int) -> list[str]:
        own = [f"--node-ip-address={host.address}", f"--resources={json.dumps({host.name: 1000, **resources})}"]
        return ["ray", "start", *words, *own, *common]

    if first is not None:
        server = f"--dashboard-host={first.address}" if token else "--include-dashboard=false"
        first.run(command(first, "--head", "--port=6379", server), START_S, settings)
    joining = {host: host.start(command(host, f"--address={address}", away=1000), settings) for host in others}
    for host, process in joining.items():
        out, err = process.communicate(timeout=START_S)
        assert process.returncode == 0, f"{host.name}: Ray did not start\n{out}\n{err}"
    return address


@contextmanager
def cluster(
    count: int, user: bool | None = None, own_name: str | None = None, keep: Sequence[Path] = (), **options: Any
) -> Iterator[tuple[Host, ...]]:
    """Hosts with one Ray over them (see ``hosts`` and ``start_ray``). Raises Unavailable where none can be built."""
    with hosts(count, keep, user=user, own_name=own_name) as made:
        start_ray(*made, **options)
        yield made


@contextmanager
def given(count: int, **options: Any) -> Iterator[tuple[Host, ...]]:
    """As ``cluster``; skips, with the kernel's reason, where hosts cannot be built."""
    made = cluster(count, **options)
    try:
        built = made.__enter__()
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))
    try:
        yield built
    finally:
        made.__exit__(None, None, None)


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[tuple[Host, ...]]:
    """Nobody may break these."""
    with given(2) as built:
        yield built


@pytest.fixture(scope="session")
def on_two_hosts(two_hosts: tuple[Host, ...]) -> Iterator[Driver]:
    with driver(two_hosts[0]) as asked:
        yield asked


@pytest.fixture
def asked(on_two_hosts: Driver) -> Iterator[Driver]:
    """A driver on the first of two hosts; its group ends with the test."""
    yield on_two_hosts
    on_two_hosts.ask("end")


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[tuple[Host, ...]]:
    """Tests may pull their cables and kill processes, and leave the hosts as they were. Ray gives no host up."""
    with given(3, failures=100, cpus=1) as built:
        yield built


@pytest.fixture(scope="module")
def eight_hosts() -> Iterator[tuple[Host, ...]]:
    """As ``three_hosts``, eight of them."""
    with given(8, failures=100, cpus=1, store_bytes=100_000_000) as built:
        yield built


@pytest.fixture
def doomed_three() -> Iterator[tuple[Host, ...]]:
    """One test's own: it may break them."""
    with given(3, failures=3, cpus=1) as built:
        yield built
