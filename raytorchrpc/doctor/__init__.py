"""``raytorchrpc doctor``: what a machine's GPUs, adapters, limits and software mean for the lanes, and what to do.

| module | holds |
|---|---|
| ``collector``, ``gpu_probe``, ``evidence`` | reading a process, its machine or a file tree into ``Evidence`` |
| ``machine``, ``gpus``, ``rdma``, ``nccl_advice`` | pure rules: evidence -> findings |
| ``compatibility`` | the rules that need the evidence of several processes |
| ``findings``, ``reports`` | one finding, a whole report |
| ``cluster``, ``command`` | evidence from other nodes and actors, the command and its output |
"""

from __future__ import annotations

from pathlib import Path

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, Level
from raytorchrpc.doctor.reports import NodeReport, Report, examine_evidence

__all__ = ["Evidence", "Finding", "Level", "NodeReport", "Report", "examine"]


def examine(sysfs_root: str | Path | None = None) -> tuple[Finding, ...]:
    """Examine this process and its machine, or a file tree with ``proc``, ``sys`` and ``dev`` in it.

    Blocks while torch and Ray are imported and, with GPUs, while CUDA starts in this process. Starts no Ray and changes
    nothing. Raises ConfigurationError if ``sysfs_root`` is not such a tree.
    """
    from raytorchrpc.doctor import collector

    return examine_evidence(collector.gather() if sysfs_root is None else collector.gather_from(Path(sysfs_root)))
