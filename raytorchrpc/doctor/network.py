"""Addresses, interfaces, and what the machine's own name resolves to."""

from __future__ import annotations

import ipaddress

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, Level, some
from raytorchrpc.topology.probe import interface_for

_SELECTORS = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def findings(evidence: Evidence) -> list[Finding]:
    """Pure: the same evidence gives the same findings."""
    return [*_address(evidence), *_own_name(evidence), *_selected(evidence)]


def _address(evidence: Evidence) -> list[Finding]:
    endpoint = evidence.endpoint
    if not endpoint.node_ip:
        return []
    if _is_loopback(endpoint.node_ip):
        return [
            Finding(
                id="address-loopback",
                level="problem" if evidence.hosts > 1 else "note",
                seen=f"Ray's address of this node is {endpoint.node_ip}",
                meaning="no other host can reach its members",
                remedy="ray start --node-ip-address with the address that the others know"
                if evidence.hosts > 1
                else "",
            )
        ]
    name = interface_for(endpoint, endpoint.node_ip)
    if name is None and not evidence.live and not any(i.addresses for i in endpoint.interfaces):
        return []  # files do not tell which interface has which IPv4 address
    if name is None:
        return [
            Finding(
                id="address-unknown",
                level="warning",
                seen=f"no interface here holds Ray's address of this node, {endpoint.node_ip}",
                meaning="torchrpc and NCCL listen where the machine's name points, or where they choose",
                remedy="GroupConfig(interface=...) names the interface that the other hosts reach",
                lanes=("torchrpc", "nccl"),
            )
        ]
    return [Finding(id="address", level="ok", seen=f"Ray's address of this node, {endpoint.node_ip}, is on {name}")]


def _own_name(evidence: Evidence) -> list[Finding]:
    addresses, name = evidence.own_addresses, evidence.endpoint.hostname
    # On one host nothing goes wrong with it, and every Debian laptop is like that.
    level: Level = "warning" if evidence.hosts > 1 else "note"
    meaning = (
        "torch.distributed by itself (Gloo, TensorPipe, a store on this host) tells other hosts an address that is "
        "not this machine's; members are not concerned: they listen on the Ray node's address"
    )
    if addresses is None:
        return []
    if not addresses:
        return [
            Finding(
                id="own-name-unknown",
                level=level,
                seen=f"the machine's own name, {name}, resolves to nothing",
                meaning="torch.distributed by itself (Gloo) fails to start; members do not look the name up",
                remedy=f"put {name} with this machine's address into /etc/hosts, or export GLOO_SOCKET_IFNAME",
                lanes=("torchrpc",),
            )
        ]
    if all(_is_loopback(address) for address in addresses):
        return [
            Finding(
                id="own-name-loopback",
                level=level,
                seen=f"the machine's own name, {name}, resolves to {some(addresses)}",
                meaning=meaning,
                remedy=f"put {name} with this machine's address into /etc/hosts, or export TP_SOCKET_IFNAME and "
                "GLOO_SOCKET_IFNAME for this node"
                if evidence.hosts > 1
                else "",
                lanes=("torchrpc",),
            )
        ]
    return [Finding(id="own-name", level="ok", seen=f"the machine's own name, {name}, resolves to {some(addresses)}")]


def _selected(evidence: Evidence) -> list[Finding]:
    usable = {i.name for i in evidence.endpoint.interfaces if i.up}
    if not usable:
        return []
    wrong = [
        f"{name}={value}"
        for name in _SELECTORS
        if (value := evidence.environment.get(name)) and not set(value.split(",")) & usable
    ]
    if not wrong:
        return []
    return [
        Finding(
            id="interface-variable-wrong",
            level="warning",
            seen=f"{' and '.join(wrong)}: no such interface here that is up ({some(sorted(usable), 8)})",
            meaning="torch falls back to what the machine's name resolves to, without a word; GLOO_SOCKET_IFNAME fails",
            remedy="unset it: it differs from node to node, and groups find their interface themselves",
            lanes=("torchrpc",),
        )
    ]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
