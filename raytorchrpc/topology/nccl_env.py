"""Chooses NCCL's environment variables from a process's endpoint.

NCCL reads a variable when it first needs it and keeps the value for the life of the process, so ``apply`` must run
before the first communicator and has no effect on later ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from raytorchrpc.topology.endpoint import Endpoint, Gid, Hca, HcaPort
from raytorchrpc.topology.rdma import usable_ports

IFNAME, HCA, GID = "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"
TIMEOUT, QPS = "NCCL_IB_TIMEOUT", "NCCL_IB_QPS_PER_CONNECTION"
VARIABLES = (IFNAME, HCA, GID, TIMEOUT, QPS)

#: Setting one of these chooses GIDs by something else than their index.
_OTHER_GIDS = ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")

# 4.096 us x 2^20 = 4.3 s, and seven tries: 30 s, half of the time that a call has by default.
_TIMEOUT = 20
# A RoCE fabric selects among equal paths by a hash over the UDP source port, and each queue pair has its own port.
_ROCE_QPS = 4

_Port = tuple[Hca, HcaPort]


@dataclass(frozen=True)
class Advice:
    """The value of one variable for this process, and the reason."""

    value: str | None
    """None = leave it unset."""
    reason: str
    both_ends: bool = False
    """Peers must have the same value, so no process sets it for itself; set it in the job's environment."""


def advise(
    endpoint: Endpoint, *, interface: str | None = None, own: Mapping[str, str] | None = None
) -> dict[str, Advice]:
    """Choose values for NCCL's variables, from the endpoint alone; one entry for each of ``VARIABLES``.

    Args:
        endpoint: describes this process (``topology.probe``).
        interface: the interface for connections to other hosts; None selects the one with the Ray node's address.
        own: NCCL variables that the user has set. The GID index is that of the adapters that they name.
    """
    own = own or {}
    advice = {IFNAME: _ifname(endpoint, interface)}
    ports = usable_ports(endpoint)
    why = "" if ports else "no RDMA adapter that NCCL can use without a plug-in" if endpoint.hcas else "no RDMA adapter"
    if other := _elsewhere(own):
        why = f"{other} makes NCCL use another network"
    if why:
        return advice | {name: Advice(None, why) for name in (HCA, GID, TIMEOUT, QPS)}
    chosen, reason = _choose(endpoint, ports)
    advice[HCA] = Advice("=" + ",".join(f"{hca.name}:{port.number}" for hca, port in chosen), reason)
    used = [port for port in ports if matches(own[HCA], *port)] if own.get(HCA) else chosen
    roce = [port for port in used if port[1].link_layer == "Ethernet"]
    advice[GID] = _gid_index(endpoint, roce, own) if used else Advice(None, f"{HCA}={own[HCA]} selects no usable port")
    advice[TIMEOUT] = Advice(
        str(_TIMEOUT), "NCCL gives up a packet after 7 x 4.3 s = 30 s, within a call's default deadline of 60 s"
    )
    if roce:
        why = "RoCE fabrics distribute queue pairs, not bytes, over equal paths"
        advice[QPS] = Advice(str(_ROCE_QPS), why, both_ends=True)
    else:
        advice[QPS] = Advice(None, "InfiniBand needs no more than NCCL's default of 1", both_ends=True)
    return advice


def apply(
    endpoint: Endpoint, *, interface: str | None = None, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Set NCCL's variables in ``environ`` (this process's, by default) except where the user has chosen a value.

    A value in one of NCCL's own files (``NCCL_CONF_FILE`` or ``~/.nccl.conf``, and ``/etc/nccl.conf``) also counts as
    the user's choice. ``NCCL_IB_QPS_PER_CONNECTION`` is never set here: NCCL assumes that the peer has the same value,
    and a peer whose NCCL started earlier would keep another.

    Returns the variables that were set.
    """
    environ = os.environ if environ is None else environ
    own = chosen_values(environ)
    made = {
        name: advice.value
        for name, advice in advise(endpoint, interface=interface, own=own).items()
        if advice.value is not None and not advice.both_ends and name not in own
    }
    environ.update(made)
    return made


def chosen_values(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """NCCL's variables as NCCL reads them: from the environment, then the user's file, then the machine's."""
    values = {name: text for name, text in environ.items() if name.startswith("NCCL_")}
    if conf := environ.get("NCCL_CONF_FILE"):
        users = root / conf.lstrip("/") if root != Path("/") else Path(conf)
    else:
        users = root / environ.get("HOME", "/nonexistent").lstrip("/") / ".nccl.conf"
    for file in (users, root / "etc/nccl.conf"):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, text = line.partition("=")
            if equals and name.startswith("NCCL_"):
                values.setdefault(name, text)
    return values


def matches(filter_text: str, hca: Hca, port: HcaPort) -> bool:
    """Whether a value of NCCL_IB_HCA, ``[^][=]name[:port[:rail[:plane]]],...``, selects this port.

    Names match as prefixes unless the value contains =.
    """
    without = filter_text.startswith("^")
    text = filter_text[1:] if without else filter_text
    exact = text.startswith("=")
    entries = [entry.split(":") for entry in text.removeprefix("=").split(",") if entry.split(":")[0]]
    if not entries:
        return True
    is_named = any(
        (hca.name == name if exact else hca.name.startswith(name)) and (not rest or rest[0] in ("", str(port.number)))
        for name, *rest in entries
    )
    return is_named is not without


def gid_index(endpoint: Endpoint, port: HcaPort) -> int | None:
    """The GID index for RoCE traffic of this port; None if there is no routed RoCE v2 GID.

    Prefers the GID of the Ray node's address, then of an address of this process's interfaces, then of an IPv4 address.
    """
    held = {address: i for i in endpoint.interfaces if i.up for address in i.addresses}

    def rank(gid: Gid) -> tuple[bool, bool, bool, int]:
        where = held.get(gid.ipv4 or "")
        foreign = where is None or gid.interface not in (None, where.name)
        return (gid.ipv4 != endpoint.node_ip, foreign, gid.ipv4 is None, gid.index)

    routed = [gid for gid in port.gids if gid.routed]
    return min(routed, key=rank).index if routed else None


def _elsewhere(own: Mapping[str, str]) -> str | None:
    """The setting that makes NCCL use something else than InfiniBand verbs; None if there is none."""
    if own.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return f"NCCL_IB_DISABLE={own['NCCL_IB_DISABLE']}"
    net = own.get("NCCL_NET", "")
    return None if not net or net.startswith("IB") else f"NCCL_NET={net}"


def _ifname(endpoint: Endpoint, interface: str | None) -> Advice:
    # Without =, NCCL reads the text as a prefix: eth1 also matches eth10.
    if interface:
        return Advice(f"={interface}", "as asked for")
    address = endpoint.node_ip
    name = endpoint.interface_of(address)
    if not address:
        return Advice(None, "the Ray node's address is not known here")
    if name is None:
        return Advice(None, f"no interface holds the Ray node's address {address}")
    if name == "lo":
        return Advice(None, f"the Ray node's address {address} is a loopback address")
    return Advice(f"={name}", f"it holds the Ray node's address {address}")


def _choose(endpoint: Endpoint, usable: list[_Port]) -> tuple[list[_Port], str]:
    """The ports to use, and how many of which they are, with the reason why the others are not used."""
    rates: dict[str, float] = {}
    for _, port in usable:
        rates[port.link_layer] = rates.get(port.link_layer, 0.0) + (port.rate_gbps or 0.0)
    # NCCL cannot connect InfiniBand to RoCE, so every host must decide by the same rule.
    layer = max(rates, key=lambda name: (rates[name], name == "InfiniBand"))
    fastest = max(port.rate_gbps or 0 for _, port in usable if port.link_layer == layer)
    chosen: list[_Port] = []
    reasons: list[str] = []
    ports = [(hca, port) for hca in endpoint.hcas for port in hca.ports]
    for hca, port in ports:
        if (hca, port) not in usable:
            reasons.append(f"{hca.name}:{port.number} (cannot be used)")
        elif port.link_layer != layer:
            reasons.append(f"{hca.name}:{port.number} (its link layer is {port.link_layer})")
        elif port.rate_gbps is not None and port.rate_gbps * 2 < fastest:
            reasons.append(f"{hca.name}:{port.number} ({port.rate_gbps:g} of {fastest:g} Gb/s)")
        else:
            chosen.append((hca, port))
    left_out = f"; not {', '.join(reasons)}" if reasons else ""
    return chosen, f"{len(chosen)} of {len(ports)} ports, {layer}{left_out}"


def _gid_index(endpoint: Endpoint, roce: list[_Port], own: Mapping[str, str]) -> Advice:
    if not roce:
        return Advice(None, "InfiniBand needs none")
    by_hand = next((name for name in _OTHER_GIDS if own.get(name)), None)
    if by_hand:
        return Advice(None, f"{by_hand} is set, and NCCL uses it instead")
    indices = {f"{hca.name}:{port.number}": gid_index(endpoint, port) for hca, port in roce}
    values = set(indices.values())
    if len(values) > 1:
        each = ", ".join(f"{name} {index}" for name, index in indices.items())
        return Advice(None, f"the adapters need different ones ({each}), and NCCL (2.21 and newer) finds each itself")
    (value,) = values
    example = next(gid for gid in roce[0][1].gids if gid.index == value)
    return Advice(str(value), f"RoCE v2 with the address {example.ipv4 or example.value} on {roce[0][0].name}")
