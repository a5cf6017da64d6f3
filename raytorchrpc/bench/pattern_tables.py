"""Results of ``--pattern`` for people: tables, CSV, Markdown and a plot."""

from __future__ import annotations

import csv
import io
from typing import Any

from raytorchrpc.bench import plots
from raytorchrpc.bench.markdown import grid
from raytorchrpc.bench.pattern_results import PatternCell, PatternRun
from raytorchrpc.bench.patterns import OURS, ROWS, show_payload
from raytorchrpc.bench.rows import Device
from raytorchrpc.bench.tables import DEVICE_TEXT, Table, show_ms

_RIVALS = ("bare-torchrpc", "ray")
_WHAT = {
    "ms": "milliseconds per call",
    "calls/s": "calls per second",
    "% of a core": "CPU time of one member, % of a core",
}
_WHAT_ALL = "milliseconds per round of calls to all peers"


def figures(run: PatternRun, device: Device, pattern: str) -> Table:
    """The medians of each row with the range of the repeats, and ours relative to the peers."""
    rows, lines = run.rows(device, pattern), run.lines(device, pattern)
    rivals = [row for row in _RIVALS if row in rows and OURS in rows]
    table = []
    for line in lines:
        label = next(iter(line.values())).label
        cells = [_figure(line.get(row)) for row in rows]
        table.append((label, *cells, *(_ratio(line.get(OURS), line.get(row)) for row in rivals)))
    what = _WHAT_ALL if pattern == "all-to-all" else _WHAT[next(iter(lines[0].values())).unit]
    title = f"{pattern}, {DEVICE_TEXT[device]}: {what}, median (range of the repeats)"
    notes = tuple(f"{OURS} / {row}: the figure of {OURS} divided by that of {row}." for row in rivals)
    return Table(title, ("case", *rows, *(f"{OURS} / {row}" for row in rivals)), tuple(table), notes)


def costs(run: PatternRun, device: Device, pattern: str) -> Table | None:
    """Context switches and CPU time of the caller and the callee; None for a pattern without calls."""
    rows, lines = run.rows(device, pattern), run.lines(device, pattern)
    table = [
        (next(iter(line.values())).label, *(text for row in rows for text in _cost(line.get(row)))) for line in lines
    ]
    if all(text == "-" for line in table for text in line[1:]):
        return None
    sides = "per call and side" if pattern == "all-to-all" else "per call, caller + callee"
    heads = ("case", *(head for row in rows for head in (f"{row} switches", f"{row} CPU µs")))
    return Table(f"{pattern}, {DEVICE_TEXT[device]}: context switches and CPU time {sides}", heads, tuple(table))


def _figure(cell: PatternCell | None) -> str:
    if cell is None or cell.median is None or cell.low is None or cell.high is None:
        return "-"
    middle, low, high = (
        show_ms(value) if cell.unit != "calls/s" else f"{value:,.0f}" for value in (cell.median, cell.low, cell.high)
    )
    return f"{middle} ({low}-{high})" if cell.repeats > 1 else middle


def _ratio(ours: PatternCell | None, peer: PatternCell | None) -> str:
    if ours is None or ours.median is None or peer is None or not peer.median:
        return "-"
    return f"{ours.median / peer.median:.2f}"


def _cost(cell: PatternCell | None) -> tuple[str, str]:
    if cell is None or cell.caller_switches is None or cell.caller_cpu_ms is None:
        return "-", "-"
    switches, cpu = [f"{cell.caller_switches:.1f}"], [f"{cell.caller_cpu_ms * 1e3:.0f}"]
    if cell.callee_switches is not None and cell.callee_cpu_ms is not None:
        switches.append(f"{cell.callee_switches:.1f}")
        cpu.append(f"{cell.callee_cpu_ms * 1e3:.0f}")
    return " + ".join(switches), " + ".join(cpu)


def skipped(run: PatternRun) -> list[str]:
    """One line per reason: the rows and cases without a figure because of it."""
    found: dict[tuple[Device, str, str], dict[str, list[str]]] = {}
    for cell in run.cells:
        if cell.median is None:
            key = cell.device, cell.row, cell.reason or "unknown"
            found.setdefault(key, {}).setdefault(cell.pattern, []).append(cell.label)
    lines: dict[tuple[Device, str, str], list[str]] = {}
    for (device, row, reason), patterns in found.items():
        names = []
        for pattern, labels in patterns.items():
            total = sum((cell.device, cell.row, cell.pattern) == (device, row, pattern) for cell in run.cells)
            names.append(pattern if len(labels) == total else f"{pattern} ({'; '.join(labels)})")
        lines.setdefault((device, ", ".join(names), reason), []).append(row)
    return [f"{DEVICE_TEXT[dev]}: {', '.join(rows)}: {names}: {why}" for (dev, names, why), rows in lines.items()]


def to_csv(run: PatternRun) -> str:
    """One line per cell, with the reason if there is no figure."""
    out = io.StringIO()
    heads = list(PatternCell.model_fields)
    writer = csv.DictWriter(out, ["started", *heads], lineterminator="\n")
    writer.writeheader()
    for cell in run.cells:
        writer.writerow({"started": run.started, **cell.model_dump()})
    return out.getvalue()


def document(run: PatternRun, picture: str | None) -> str:
    """The run as Markdown. ``picture``: the path of its plot as the document is to name it."""
    parts = [
        "# Patterns",
        "\n".join(f"- {fact}" for fact in (*run.machine, f"raytorchrpc {run.version}, {run.started}")),
    ]
    parts.append(f"To reproduce:\n\n```console\n{run.command}\n```")
    if picture:
        parts.append(f"![Each pattern's cases, one line per row]({picture})")
    for device, pattern in run.tables():
        for table in (figures(run, device, pattern), costs(run, device, pattern)):
            if table is not None:
                parts += [f"### {table.title}", grid(table.heads, table.rows)]
    parts.append("\n".join(f"- {row}: {what}" for row, what in ROWS.items()))
    if missing := skipped(run):
        parts.append("Not measured:\n\n" + "\n".join(f"- {line}" for line in missing))
    return "\n\n".join(parts) + "\n"


def draw(run: PatternRun) -> bytes:
    """Draw a PNG with a panel for each device and pattern, and a line for each row (at most five)."""
    return plots.png(figure_of(run))


def figure_of(run: PatternRun) -> Any:
    """The matplotlib figure that ``draw`` writes."""
    plots.check_available()
    from matplotlib.figure import Figure  # not pyplot, which needs a window system and keeps global state

    shown = run.tables()
    figure = Figure(figsize=(14, 4.5 * -(-len(shown) // 2)), layout="constrained")
    figure.suptitle(plots.heading(run.version, run.started, run.machine), fontsize="medium")
    panels = figure.subplots(-(-len(shown) // 2), 2, squeeze=False).flat
    for (device, pattern), panel in zip(shown, panels, strict=False):
        lines = run.lines(device, pattern)
        for number, row in enumerate(ROWS):
            points = [(x, cell.median) for x, line in enumerate(lines) if (cell := line.get(row)) and cell.median]
            if points:
                panel.plot(*zip(*points, strict=True), color=f"C{number}", marker="os^Dv"[number], label=row)
        cells = [next(iter(line.values())) for line in lines]
        labels = [f"{cell.variant}\n{show_payload(cell.bytes)}".strip() for cell in cells]
        panel.set_xticks(range(len(lines)), labels, fontsize="x-small", rotation=30)
        panel.set(title=f"{pattern}, {DEVICE_TEXT[device]}", ylabel=cells[0].unit, yscale="log")
        panel.grid(True, axis="y", alpha=0.3)
        panel.legend(fontsize="small")
    for panel in panels:
        panel.set_visible(False)
    return figure
