"""Findings about addresses, interfaces and the resolution of the host name."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, Level, finding, ok, some, warning
from raytorchrpc.topology.probe import interface_for

_SELECTORS = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Pure: equal evidence gives equal findings."""
    if evidence.endpoint.node_ip:
        yield from _address(evidence)
    if evidence.own_addresses is not None:
        yield _own_name(evidence, evidence.own_addresses)
    yield from _selected(evidence)


def _address(evidence: Evidence) -> Iterator[Finding]:
    endpoint = evidence.endpoint
    if _is_loopback(endpoint.node_ip):
        yield finding(
            "problem" if evidence.hosts > 1 else "note",
            "address-loopback",
            f"Ray's address of this node is {endpoint.node_ip}",
            "other hosts cannot reach its members",
            "pass the address that other hosts use to ray start --node-ip-address" if evidence.hosts > 1 else "",
        )
        return
    name = interface_for(endpoint, endpoint.node_ip)
    if name is not None:
        yield ok("address", f"Ray's address of this node, {endpoint.node_ip}, is on {name}")
    elif evidence.live or any(i.addresses for i in endpoint.interfaces):  # files may list no IPv4 address
        yield warning(
            "address-unknown",
            f"no interface holds Ray's address of this node, {endpoint.node_ip}",
            "torchrpc and NCCL listen on the address of the host name, or on one they choose",
            "set GroupConfig(interface=...) to the interface that other hosts reach",
        )


def _own_name(evidence: Evidence, addresses: tuple[str, ...]) -> Finding:
    name, several = evidence.endpoint.hostname, evidence.hosts > 1
    # On a single host it does no harm, and Debian's installer sets it up like that.
    level: Level = "warning" if several else "note"
    if not addresses:
        return finding(
            level,
            "own-name-unknown",
            f"the host name, {name}, does not resolve",
            "torch.distributed by itself (Gloo) fails to start; members do not look the name up",
            f"add {name} with this machine's address to /etc/hosts, or export GLOO_SOCKET_IFNAME",
        )
    seen = f"the host name, {name}, resolves to {some(addresses)}"
    if not all(_is_loopback(address) for address in addresses):
        return ok("own-name", seen)
    return finding(
        level,
        "own-name-loopback",
        seen,
        "torch.distributed by itself (Gloo, TensorPipe, a store on this host) gives other hosts an address that is not "
        "this machine's; members are not affected: they listen on Ray's address of the node",
        f"add {name} with this machine's address to /etc/hosts, or export TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME on "
        "this node"
        if several
        else "",
    )


def _selected(evidence: Evidence) -> Iterator[Finding]:
    usable = {i.name for i in evidence.endpoint.interfaces if i.up}
    wrong = [
        f"{name}={value}"
        for name in _SELECTORS
        if (value := evidence.environment.get(name)) and not set(value.split(",")) & usable
    ]
    if usable and wrong:
        yield warning(
            "interface-variable-wrong",
            f"{' and '.join(wrong)}: no interface of that name is up ({some(sorted(usable), 8)})",
            "torch silently falls back to the address of the host name; with GLOO_SOCKET_IFNAME it fails",
            "unset the variable: interface names differ between nodes, and groups find their interface themselves",
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
