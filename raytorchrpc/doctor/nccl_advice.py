"""NCCL's variables: what they should be here, what they are, and where a value does not fit this machine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding
from raytorchrpc.topology import nccl_env, rdma
from raytorchrpc.topology.endpoint import Endpoint


class NcclValue(BaseModel):
    """One variable of NCCL's on one node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    advised: str | None
    """None = leave it unset."""
    reason: str
    chosen: str | None = None
    """What somebody has set, which wins."""
    whole_job: bool = False
    """Peers must have the same: set it for the whole job (``runtime_env``). The others are set in-process."""


def values(evidence: Evidence) -> dict[str, NcclValue]:
    """What each of the five should be, for a machine with GPUs or RDMA adapters; empty for others."""
    if not evidence.endpoint.gpus and not evidence.endpoint.hcas:
        return {}
    return {
        name: NcclValue(
            advised=advice.value, reason=advice.reason, chosen=evidence.nccl.get(name), whole_job=advice.both_ends
        )
        for name, advice in nccl_env.advise(evidence.endpoint, own=evidence.nccl).items()
    }


def findings(evidence: Evidence) -> list[Finding]:
    """Pure: the same evidence gives the same findings."""
    endpoint, chosen = evidence.endpoint, evidence.nccl
    if not endpoint.gpus and not endpoint.hcas:
        return []
    wrong = [
        text
        for text in (
            _ifname(endpoint, chosen.get(nccl_env.IFNAME, "")),
            _hca(endpoint, chosen.get(nccl_env.HCA, "")),
            _gid(endpoint, chosen),
            _off(endpoint, chosen.get("NCCL_IB_DISABLE", "")),
        )
        if text
    ]
    if wrong:
        return [
            Finding(
                id="nccl-value-unfit",
                level="warning",
                seen="; ".join(wrong),
                meaning="NCCL takes the value as it is: it fails, or goes over TCP",
                remedy="unset it, and what fits this node is set when a group forms; a value for a whole job fits one "
                "kind of node only",
                lanes=("nccl",),
            )
        ]
    mine = [f"{name}={value.advised}" for name, value in values(evidence).items() if value.advised is not None]
    return [Finding(id="nccl-values", level="ok", seen=" ".join(mine) or "NCCL needs no value here", lanes=("nccl",))]


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
    return f"NCCL_IB_HCA={value} takes no port that can be used"


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
    return f"NCCL_IB_DISABLE={value} keeps NCCL from {len(endpoint.hcas)} RDMA adapter(s)"
