"""Prints a report: with rich on a terminal where rich is installed, else as plain lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from raytorchrpc.doctor.findings import LEVELS, Finding
from raytorchrpc.doctor.reports import NodeReport, Report

_COLOURS = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}


def show(report: Report) -> None:
    """Print the findings, worst first, then the advised NCCL settings, then a summary line."""
    draw = _draw_rich if find_spec("rich") is not None and sys.stdout.isatty() else _draw_plain
    for node in report.nodes:
        draw(_title(node), by_level(node.findings))
        _show_nccl(node)
    if report.together:
        draw("together", by_level(report.together))
    print(f"\n{summary(report)}")


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; findings of one level keep their order."""
    return sorted(findings, key=lambda finding: -LEVELS.index(finding.level))


def summary(report: Report) -> str:
    """``2 problems, 1 warning, 3 notes`` or ``healthy``."""
    every = [finding for node in report.nodes for finding in node.findings] + list(report.together)
    counts = [(level, sum(f.level == level for f in every)) for level in reversed(LEVELS[1:])]
    listed = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts if count)
    bad = any(count for level, count in counts if level != "note")
    return listed if bad else "healthy" + (f" ({listed})" if listed else "")


def _title(node: NodeReport) -> str:
    endpoint = node.evidence.endpoint
    where = ", ".join(filter(None, (endpoint.hostname if endpoint.hostname != node.name else "", endpoint.node_ip)))
    return node.name + (f" ({where})" if where else "")


def _show_nccl(node: NodeReport) -> None:
    if not node.nccl:
        return
    print("NCCL:")
    for name, value in node.nccl.items():
        advised = "unset" if value.advised is None else value.advised
        chosen = f"; set here: {value.chosen}" if value.chosen is not None else ""
        job = "; set it for the whole job, in runtime_env" if value.whole_job and value.advised is not None else ""
        print(f"  {name}: {advised}  ({value.reason}{job}{chosen})")


def _draw_plain(title: str, findings: Sequence[Finding]) -> None:
    print(f"\n{title}")
    for finding in findings:
        lanes = f" [{', '.join(finding.lanes)}]" if finding.lanes and finding.level != "ok" else ""
        print(f"  {finding.level:<8} {finding.id}: {finding.seen}{lanes}")
        if finding.meaning:
            print(f"           means: {finding.meaning}")
        if finding.remedy:
            print(f"           do: {finding.remedy}")


def _draw_rich(title: str, findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "finding", "lanes", "what it is, what it means, what to do", title=title, title_justify="left")
    for finding in findings:
        text = Text(finding.seen)
        if finding.meaning:
            text.append(f"\n{finding.meaning}", style="dim")
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}")
        level = Text(finding.level, style=_COLOURS[finding.level])
        table.add_row(level, Text(finding.id), Text(", ".join(finding.lanes)), text)
    console = Console()
    console.print()
    console.print(table)
