"""A report: the findings for each process, and those for all of them together."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from raytorchrpc.doctor import compatibility, gpus, memory, nccl_advice, network, rdma, software
from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import LEVELS, Finding, Level, worst
from raytorchrpc.doctor.nccl_advice import NcclValue

#: The modules with rules, in display order.
RULES = (software, gpus, rdma, nccl_advice, memory, network)


class NodeReport(BaseModel):
    """The findings about one process, one node, or one file tree."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    findings: tuple[Finding, ...]
    nccl: dict[str, NcclValue]
    """By variable: the advised NCCL settings. Empty without GPUs and RDMA adapters."""
    evidence: Evidence


class Report(BaseModel):
    """Everything the doctor found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    """Of raytorchrpc."""
    level: Level
    """The worst of all findings."""
    nodes: tuple[NodeReport, ...]
    together: tuple[Finding, ...] = ()
    """Findings about several nodes or actors at once."""

    def healthy(self, *, strict: bool = False) -> bool:
        """True without problems; with ``strict``, also without warnings."""
        return LEVELS.index(self.level) < LEVELS.index("warning" if strict else "problem")


def examine_evidence(evidence: Evidence) -> tuple[Finding, ...]:
    """Apply every rule to one process's evidence. Pure."""
    return tuple(finding for rules in RULES for finding in rules.findings(evidence))


def make_report(evidence: Sequence[Evidence], version: str) -> Report:
    """Report on one or several processes, named after their endpoints. Pure."""
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
