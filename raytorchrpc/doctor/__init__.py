"""``raytorchrpc doctor``: what a machine's GPUs, adapters, limits and software mean for the lanes, and what to do.

One kind of work to a file: ``gathering`` looks (``_gpus`` at GPUs), ``evidence`` is what it saw. One file for each
subject holds its rules, pure functions from evidence to ``findings``: ``gpus``, ``rdma``, ``memory``, ``network``,
``software``, ``nccl_advice``, and ``together`` for several processes. ``reports`` puts them together, ``rendering``
shows them, ``cluster`` looks on other nodes, ``catalogue`` lists every finding there is.
"""

from __future__ import annotations

from pathlib import Path

from raytorchrpc.doctor.evidence import Evidence
from raytorchrpc.doctor.findings import Finding, Level
from raytorchrpc.doctor.reports import NodeReport, Report, examine_evidence

__all__ = ["Evidence", "Finding", "Level", "NodeReport", "Report", "examine"]


def examine(sysfs_root: str | Path | None = None) -> tuple[Finding, ...]:
    """Look at this process and its machine, or at a tree of files with ``proc``, ``sys`` and ``dev`` in it.

    Blocks for as long as the imports of torch and Ray and, with GPUs, the start of CUDA in this process take. Starts no
    Ray and changes nothing. Raises ConfigurationError for a tree that is none.
    """
    from raytorchrpc.doctor import collector

    if sysfs_root is None:
        return examine_evidence(collector.gather())
    return examine_evidence(collector.gather_from(Path(sysfs_root)))
