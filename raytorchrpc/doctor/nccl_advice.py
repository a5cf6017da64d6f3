"""Findings about NCCL's variables: advised values, chosen values, and values that do not suit this machine."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, ok, warning
from raytorchrpc.topology import nccl_env, rdma
from raytorchrpc.topology.endpoint import Endpoint


class NcclValue(BaseModel, frozen=True, extra="forbid"):
    """One NCCL variable on one node."""

    advised: str | None
    """None = leave it unset."""
    reason: str
    chosen: str | None = None
    """The value that is already set, which takes precedence."""
    whole_job: bool = False
    """Peers must agree: set it for the whole job (``runtime_env``). Members set the others themselves."""


def values(evidence: Evidence) -> dict[str, NcclValue]:
    """Advice on each of the five variables; empty for machines without GPUs and RDMA adapters."""
    if not evidence.endpoint.gpus and not evidence.endpoint.hcas:
        return {}
    advised = nccl_env.advise(evidence.endpoint, own=evidence.nccl)
    return {
        name: NcclValue(advised=one.value, reason=one.reason, chosen=evidence.nccl.get(name), whole_job=one.both_ends)
        for name, one in advised.items()
    }


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Pure: equal evidence gives equal findings."""
    wrong = list(_unfit(evidence.endpoint, evidence.nccl))
    advised = values(evidence)
    if wrong and advised:
        yield warning(
            "nccl-value-unfit",
            "; ".join(wrong),
            "NCCL uses the value as it is: it fails, or uses TCP",
            "unset it: a suitable value is set when a group forms; one value for the whole job suits only one kind of "
            "node",
        )
    elif advised:
        texts = [f"{name}={value.advised}" for name, value in advised.items() if value.advised is not None]
        yield ok("nccl-values", " ".join(texts) or "NCCL needs no settings here")


def _unfit(endpoint: Endpoint, chosen: dict[str, str]) -> Iterator[str]:
    """What is wrong with the chosen values."""
    ports = rdma.usable_ports(endpoint)
    names = [interface.name for interface in endpoint.interfaces if interface.up and interface.addresses]
    ifname = chosen.get(nccl_env.IFNAME, "")
    exact, wanted = ifname.startswith("="), ifname.removeprefix("=").split(",")
    found = any(name == want if exact else name.startswith(want) for name in names for want in wanted if want)
    if ifname and not ifname.startswith("^") and names and not found:
        yield f"NCCL_SOCKET_IFNAME={ifname} names no interface that is up"
    hca = chosen.get(nccl_env.HCA, "")
    if hca and ports and not any(nccl_env.matches(hca, *port) for port in ports):
        yield f"NCCL_IB_HCA={hca} matches no usable port"
    if (index := chosen.get(nccl_env.GID, "")).isdigit():  # -1: NCCL chooses
        yield from _gid(endpoint, int(index), hca)
    if ports and (off := chosen.get("NCCL_IB_DISABLE", "")) not in ("", "0"):
        yield f"NCCL_IB_DISABLE={off} stops NCCL from using {len(endpoint.hcas)} RDMA adapter(s)"


def _gid(endpoint: Endpoint, index: int, filter_text: str) -> Iterator[str]:
    for hca, port in rdma.usable_ports(endpoint):
        if port.link_layer != "Ethernet" or not nccl_env.matches(filter_text, hca, port):
            continue
        gid = next((gid for gid in port.gids if gid.index == index), None)
        if gid is None or gid.link_local or "v2" not in gid.kind:
            what = "empty" if gid is None else "a link-local address" if gid.link_local else gid.kind
            right = nccl_env.gid_index(endpoint, port)
            yield f"NCCL_IB_GID_INDEX={index}: on {hca.name} that GID is {what}; {right} is the routed one"
            return
