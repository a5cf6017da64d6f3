"""From evidence to a report: what is well, what is not, for each node and for all of them together."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from raytorchrpc.doctor import compatibility, gpus, memory, nccl_advice, network, rdma, software
from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import LEVELS, Finding, Level, worst
from raytorchrpc.doctor.nccl_advice import NcclValue

#: One function for each subject, in the order in which they are shown.
RULES = (
    software.findings,
    gpus.findings,
    rdma.findings,
    nccl_advice.findings,
    memory.findings,
    network.findings,
)


class NodeReport(BaseModel):
    """What was found in one process, on one node, or in one tree of files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    findings: tuple[Finding, ...]
    nccl: dict[str, NcclValue]
    """By variable: what NCCL should be told here. Empty without GPUs and RDMA adapters."""
    evidence: Evidence


class Report(BaseModel):
    """Everything that the doctor says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    """Of raytorchrpc."""
    level: Level
    """The worst of all findings."""
    nodes: tuple[NodeReport, ...]
    together: tuple[Finding, ...] = ()
    """What concerns several nodes or actors at once."""

    def healthy(self, *, strict: bool = False) -> bool:
        """No problem; with ``strict``, no warning either."""
        return LEVELS.index(self.level) < LEVELS.index("warning" if strict else "problem")


def examine_evidence(evidence: Evidence) -> tuple[Finding, ...]:
    """Every rule over one process's evidence. Pure."""
    return tuple(finding for rule in RULES for finding in rule(evidence))


def make_report(evidence: Sequence[Evidence], version: str) -> Report:
    """``evidence`` of one process, or of several, named by their endpoints' names. Pure."""
    nodes = tuple(
        NodeReport(
            name=each.endpoint.name or each.endpoint.hostname or "this machine",
            findings=examine_evidence(each),
            nccl=nccl_advice.values(each),
            evidence=each,
        )
        for each in evidence
    )
    shared = tuple(compatibility.findings(evidence)) if len(evidence) > 1 else ()
    every = [finding for node in nodes for finding in node.findings] + list(shared)
    return Report(version=version, level=worst(every), nodes=nodes, together=shared)
