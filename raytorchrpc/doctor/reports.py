"""A report: the findings for each process, and those for all of them together."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from raytorchrpc.doctor import compatibility, gpus, machine, nccl_advice, rdma
from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import LEVELS, Finding, Level
from raytorchrpc.doctor.nccl_advice import NcclValue

#: In display order.
RULES = (
    *(machine.software, gpus.findings, rdma.findings, nccl_advice.findings),
    *(machine.memory, machine.network),
)


class NodeReport(BaseModel, frozen=True, extra="forbid"):
    """The findings about one process, one node, or one file tree."""

    name: str
    findings: tuple[Finding, ...]
    nccl: dict[str, NcclValue]
    """By variable: the advised NCCL settings. Empty without GPUs and RDMA adapters."""
    evidence: Evidence


class Report(BaseModel, frozen=True, extra="forbid"):
    """Everything the doctor found."""

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
    return tuple(finding for rule in RULES for finding in rule(evidence))


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
    together = tuple(compatibility.findings(evidence)) if len(evidence) > 1 else ()
    levels = [finding.level for findings in (*(node.findings for node in nodes), together) for finding in findings]
    level = max(levels, key=LEVELS.index, default=LEVELS[0])
    return Report(version=version, level=level, nodes=nodes, together=together)
