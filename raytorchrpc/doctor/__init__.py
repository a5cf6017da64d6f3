"""``raytorchrpc doctor``: what a machine's GPUs, adapters, limits and software mean for the lanes, and what to do.

| module | holds |
|---|---|
| ``collector``, ``gpu_probe``, ``evidence`` | reading a process, its machine or a file tree into ``Evidence`` |
| ``software``, ``gpus``, ``rdma``, ``nccl_advice``, ``memory``, ``network`` | pure rules: evidence -> findings |
| ``compatibility`` | the rules that need the evidence of several processes |
| ``catalogue``, ``findings``, ``reports`` | every finding that exists, one finding, a whole report |
| ``cluster``, ``terminal``, ``command`` | evidence from other nodes and actors, output, the command |
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
