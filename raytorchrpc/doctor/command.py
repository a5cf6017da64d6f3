"""``raytorchrpc doctor``: checks the options, collects evidence, prints the report.

Needs neither typer nor rich.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from raytorchrpc import __version__
from raytorchrpc.doctor import collector
from raytorchrpc.doctor.examination import make_report
from raytorchrpc.doctor.report import LEVELS, Evidence, Finding, NodeReport, Report
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError
from raytorchrpc.process.ray_session import running_cluster
from raytorchrpc.text import paragraph

DEFAULT_TIMEOUT_S = 60.0
_INDENT = 15


def run(
    *,
    cluster: bool = False,
    address: str | None = None,
    actors: str | None = None,
    as_json: bool = False,
    sysfs_root: Path | None = None,
    strict: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Print a report; returns the exit code.

    0: healthy. 1: problems, or warnings with ``strict``. 2: bad usage, with one line on stderr.
    """
    try:
        evidence = _collect(cluster, address, actors, sysfs_root, timeout_s)
    except RayTorchRpcError as error:
        print(f"raytorchrpc doctor: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    report = make_report(evidence, __version__)
    if as_json:
        print(report.model_dump_json(indent=1))
    else:
        _show(report)
    sys.stdout.flush()  # where nobody reads it any more, that is known now, and not when Python ends
    return 0 if report.healthy(strict=strict) else 1


def _collect(
    cluster: bool, address: str | None, actors: str | None, sysfs_root: Path | None, timeout_s: float
) -> list[Evidence]:
    names = [name.strip() for name in actors.split(",") if name.strip()] if actors is not None else []
    if actors is not None and not names:
        raise ConfigurationError("--actors names no actor")
    if len(set(names)) < len(names):
        raise ConfigurationError("--actors names an actor twice")
    if sum((cluster, bool(names), sysfs_root is not None)) > 1:
        raise ConfigurationError("--cluster, --actors and --sysfs-root exclude each other: name one")
    if address is not None and not (cluster or names):
        raise ConfigurationError("--address requires --cluster or --actors")
    if not 0 < timeout_s < math.inf:
        raise ConfigurationError("--timeout must be a number of seconds above 0")
    if sysfs_root is not None:
        return [collector.gather_from(sysfs_root)]
    if not cluster and not names:
        return [collector.gather()]
    with running_cluster(address):
        if names:
            return collector.collect_from_actors(names, timeout_s)
        return collector.collect_from_nodes(timeout_s)


def _show(report: Report) -> None:
    """Print the findings, worst first, then the advised NCCL settings, then a summary line."""
    for node in report.nodes:
        hostname = node.evidence.endpoint.hostname
        where = ", ".join(filter(None, (hostname if hostname != node.name else "", node.evidence.endpoint.node_ip)))
        _show_findings(node.name + (f" ({where})" if where else ""), node.findings)
        _show_nccl(node)
    if report.together:
        _show_findings("together", report.together)
    print(f"\n{_summary(report)}")


def _summary(report: Report) -> str:
    """``2 problems, 1 warning, 3 notes`` or ``healthy``."""
    levels = Counter(f.level for findings in (*(n.findings for n in report.nodes), report.together) for f in findings)
    counts = [(level, levels[level]) for level in reversed(LEVELS[1:]) if levels[level]]
    listed = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts)
    return listed if not report.healthy(strict=True) else "healthy" + (f" ({listed})" if listed else "")


def _show_nccl(node: NodeReport) -> None:
    if node.nccl:
        print("NCCL:")
    for name, advice in node.nccl.items():
        advised = "unset" if advice.value is None else advice.value
        chosen = f"; set here: {own}" if (own := node.evidence.nccl.get(name)) is not None else ""
        job = "; set it for the whole job, in runtime_env" if advice.both_ends and advice.value is not None else ""
        print(paragraph(f"  {name}: ", f"{advised} ({advice.reason}{job}{chosen})", indent=_INDENT))


def _show_findings(title: str, findings: Sequence[Finding]) -> None:
    print(f"\n{title}")
    for finding in sorted(findings, key=lambda finding: -LEVELS.index(finding.level)):
        print(paragraph(f"  {finding.level:<8} {finding.id}: ", finding.seen, indent=_INDENT))
        for head, text in (("means", finding.meaning), ("do", finding.remedy)):
            if text:
                print(paragraph(f"           {head}: ", text, indent=_INDENT))
