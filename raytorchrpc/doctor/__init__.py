"""``raytorchrpc doctor``: what a machine's GPUs, adapters, limits and software mean for the lanes, and what to do.

| module | holds |
|---|---|
| ``report`` | ``Evidence``, ``Finding`` and ``Report``: plain data |
| ``collector`` | evidence of a process, its machine, a file tree, or other nodes and actors |
| ``devices``, ``machine`` | pure rules: evidence -> findings |
| ``examination`` | applies the rules, and those that need the evidence of several processes |
| ``command`` | the command's options and output |
"""

from __future__ import annotations

from pathlib import Path

from raytorchrpc.doctor.examination import examine_evidence
from raytorchrpc.doctor.report import Evidence, Finding, Level, NodeReport, Report

__all__ = ["Evidence", "Finding", "Level", "NodeReport", "Report", "examine"]


def examine(sysfs_root: str | Path | None = None) -> tuple[Finding, ...]:
    """Examine this process and its machine, or a file tree with ``proc``, ``sys`` and ``dev`` in it.

    Blocks while torch and Ray are imported and, with GPUs, while CUDA starts in this process. Starts no Ray and changes
    nothing. Raises ConfigurationError if ``sysfs_root`` is not such a tree.
    """
    from raytorchrpc.doctor import collector

    return examine_evidence(collector.gather() if sysfs_root is None else collector.gather_from(Path(sysfs_root)))
