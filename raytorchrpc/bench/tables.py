"""Results as rows of text: for the terminal, a spreadsheet and ``markdown``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from raytorchrpc.bench.fit import fit
from raytorchrpc.bench.options import show_size
from raytorchrpc.bench.results import Cell, RowResult, Run, published_curve
from raytorchrpc.bench.rows import Device
from raytorchrpc.text.tables import paragraph

DEVICE_TEXT: Mapping[Device, str] = {"cpu": "CPU tensors", "cuda": "CUDA tensors"}
AUTO = "auto"
_RIVALS = ("raytorchrpc", "for comparison")


#: What column names mean, for below the tables that have them.
LINE_NOTE = (
    "per op, bandwidth: the line `time = per op + size / bandwidth` through the medians of the row.",
    "line within: the largest deviation of a median from that line.",
)
CHOICE_NOTE = (
    "auto / it: the time of auto divided by that of the row to the left; below 1, auto is faster. Forced rows are "
    "raytorchrpc with one lane; peers are the rows for comparison, such as Ray's own transports.",
)


class Table(NamedTuple):
    """Cells of text; the first column names the row."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """What column names mean, one line each; to be shown once for all tables."""


def figures(run: Run, device: Device, *, against_published: bool = False) -> Table:
    """Milliseconds by size with half the interquartile range, and each row's fitted line."""
    heads = ("row", *(show_size(size) for size in run.sizes), "per op", "bandwidth", "line within")
    rows: list[tuple[str, ...]] = []
    for row in run.measured(device):
        cells = [_figure(run.cell(row, size)) for size in run.sizes]
        line = fit(run.points(row))
        fitted = ("", "", "")
        if line is not None:
            speed = f"{line.bytes_per_s / 1e9:.3g} GB/s" if line.bytes_per_s else "-"
            fitted = (f"{show_ms(line.per_op_s * 1e3)} ms", speed, f"{line.worst:.0%}")
        rows.append((row.row, *cells, *fitted))
        curve = published_curve(row.published) if against_published else None
        if row.published and curve:
            cells = [show_ms(curve[size]) if size in curve else "" for size in run.sizes]
            rows.append((f"  published, {row.published[0]}", *cells, "", "", ""))
    title = f"{DEVICE_TEXT[device]}, {run.scope}: milliseconds one way plus acknowledgement, median ± half the IQR"
    return Table(title, heads, tuple(rows), LINE_NOTE)


def _figure(cell: Cell | None) -> str:
    if cell is None or cell.median_s is None:
        return "-"
    half = (cell.high_s - cell.low_s) / 2 if cell.high_s is not None and cell.low_s is not None else 0.0
    return f"{show_ms(cell.median_s * 1e3)} ±{half / cell.median_s:.0%}"


def show_ms(value: float) -> str:
    """Milliseconds, to three figures."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def choice(run: Run, device: Device) -> Table | None:
    """``auto`` against the fastest lane and peer at each size; None if it was not measured."""
    auto = next((row for row in run.measured(device) if row.row == AUTO), None)
    if auto is None:
        return None
    rows = []
    for size in run.sizes:
        cell = run.cell(auto, size)
        own, peer = (run.fastest(device, size, kinds=(kind,), but=AUTO) for kind in _RIVALS)
        if cell and cell.median_s is not None and (own or peer):
            against = *_compared(cell.median_s, own), *_compared(cell.median_s, peer)
            rows.append((show_size(size), cell.via or "?", *against))
    heads = ("size", "auto uses", "fastest forced row", "auto / it", "fastest peer", "auto / it")
    return Table(f"{DEVICE_TEXT[device]}: what auto chose", heads, tuple(rows), CHOICE_NOTE) if rows else None


def _compared(seconds: float, rival: tuple[str, float] | None) -> tuple[str, str]:
    return (rival[0], f"{seconds / rival[1]:.2f}") if rival else ("-", "-")


def not_measured(run: Run) -> list[str]:
    """One line per reason: the rows, or the sizes of a row, that have no figure because of it."""
    whole: dict[tuple[Device, str], list[str]] = {}
    parts: dict[tuple[Device, str, str], list[str]] = {}
    for row in run.rows:
        cells = _cells(run, row)
        if all(cell.median_s is None for cell in cells):
            reason = row.reason or next((cell.reason for cell in cells if cell.reason), "unknown")
            whole.setdefault((row.device, reason), []).append(row.row)
            continue
        for cell in cells:
            if cell.median_s is None:
                parts.setdefault((row.device, row.row, cell.reason or "unknown"), []).append(show_size(cell.bytes))
    lines = [f"{DEVICE_TEXT[device]}: {', '.join(names)}: {reason}" for (device, reason), names in whole.items()]
    for (device, name, reason), sizes in parts.items():
        lines.append(f"{DEVICE_TEXT[device]}: {name} at {', '.join(sizes)}: {reason}")
    return lines


def _cells(run: Run, row: RowResult) -> list[Cell]:
    return [cell for size in run.sizes if (cell := run.cell(row, size))]


def to_csv(runs: Sequence[Run]) -> str:
    """One line per row and size, with the reason if there is no figure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = "started scope row kind device bytes median_s q1_s q3_s samples via reason"
    writer.writerow(heads.split())
    for run in runs:
        for row in run.rows:
            for cell in _cells(run, row):
                head = (run.started, run.scope, row.row, row.kind, row.device, cell.bytes)
                times = (cell.median_s, cell.low_s, cell.high_s)
                writer.writerow([*head, *times, cell.samples, cell.via, cell.reason])
    return out.getvalue()


def plain(table: Table, width: int | None = None) -> str:
    """The table as lines of text. With ``width``, columns that do not fit follow below, each time behind the first."""
    widths = [max(map(len, column)) for column in zip(table.heads, *table.rows, strict=True)]
    blocks, used = [[0]], widths[0]
    for column, its_width in enumerate(widths[1:], 1):
        used += 2 + its_width
        if width is not None and used > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0] + 2 + its_width
        blocks[-1].append(column)
    text = "\n\n".join("\n".join(_lines(table, widths, columns)) for columns in blocks)
    return f"{table.title if width is None else paragraph('', table.title, width)}\n{text}"


def _lines(table: Table, widths: Sequence[int], columns: Sequence[int]) -> Iterator[str]:
    for row in (table.heads, ["-" * width for width in widths], *table.rows):
        cells = (row[column].rjust(widths[column]) if column else row[0].ljust(widths[0]) for column in columns)
        yield "  ".join(cells).rstrip()
