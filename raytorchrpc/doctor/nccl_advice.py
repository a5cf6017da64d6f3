"""Findings about NCCL's variables: advised values, chosen values, and values that do not suit this machine."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, ok, warning
from raytorchrpc.topology import nccl_env, rdma
from raytorchrpc.topology.endpoint import Endpoint


class NcclValue(BaseModel):
    """One NCCL variable on one node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    return {
        name: NcclValue(
            advised=advice.value, reason=advice.reason, chosen=evidence.nccl.get(name), whole_job=advice.both_ends
        )
        for name, advice in nccl_env.advise(evidence.endpoint, own=evidence.nccl).items()
    }


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Pure: equal evidence gives equal findings."""
    endpoint, chosen = evidence.endpoint, evidence.nccl
    if not endpoint.gpus and not endpoint.hcas:
        return
    wrong = (
        _ifname(endpoint, chosen.get(nccl_env.IFNAME, "")),
        _hca(endpoint, chosen.get(nccl_env.HCA, "")),
        _gid(endpoint, chosen),
        _off(endpoint, chosen.get("NCCL_IB_DISABLE", "")),
    )
    if any(wrong):
        yield warning(
            "nccl-value-unfit",
            "; ".join(filter(None, wrong)),
            "NCCL uses the value as it is: it fails, or uses TCP",
            "unset it: a suitable value is set when a group forms; one value for the whole job suits only one kind of "
            "node",
        )
        return
    advised = [f"{name}={value.advised}" for name, value in values(evidence).items() if value.advised is not None]
    yield ok("nccl-values", " ".join(advised) or "NCCL needs no settings here")


def _ifname(endpoint: Endpoint, value: str) -> str:
    names = [i.name for i in endpoint.interfaces if i.up and i.addresses]
    if not value or value.startswith("^") or not names:
        return ""
    exact, wanted = value.startswith("="), value.removeprefix("=").split(",")
    if any(name == want if exact else name.startswith(want) for name in names for want in wanted if want):
        return ""
    return f"NCCL_SOCKET_IFNAME={value} names no interface that is up"


def _hca(endpoint: Endpoint, value: str) -> str:
    ports = rdma.usable_ports(endpoint)
    if not value or not ports or any(nccl_env.matches(value, *port) for port in ports):
        return ""
    return f"NCCL_IB_HCA={value} matches no usable port"


def _gid(endpoint: Endpoint, chosen: dict[str, str]) -> str:
    text = chosen.get(nccl_env.GID, "")
    if not text.isdigit():  # -1: NCCL chooses
        return ""
    ports = [p for p in rdma.usable_ports(endpoint) if nccl_env.matches(chosen.get(nccl_env.HCA, ""), *p)]
    for hca, port in ports:
        if port.link_layer != "Ethernet":
            continue
        gid = next((gid for gid in port.gids if gid.index == int(text)), None)
        if gid is None or gid.link_local or "v2" not in gid.kind:
            what = "empty" if gid is None else "a link-local address" if gid.link_local else gid.kind
            right = nccl_env.gid_index(endpoint, port)
            return f"NCCL_IB_GID_INDEX={text}: on {hca.name} that GID is {what}; {right} is the routed one"
    return ""


def _off(endpoint: Endpoint, value: str) -> str:
    if value in ("", "0") or not rdma.usable_ports(endpoint):
        return ""
    return f"NCCL_IB_DISABLE={value} stops NCCL from using {len(endpoint.hcas)} RDMA adapter(s)"
